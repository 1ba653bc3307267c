"""Where the tokens of each model are: in which arguments, in which attention, and in which output.

The names of modules, arguments and dimensions are diffusers' own, of version 0.42. ``parallelize`` compares them with
the model that it is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..patching.forwards import function_of, name_of


@dataclass(frozen=True)
class Cut:
    """Where the tokens of a stream are in an argument: a tensor, a list or tuple of tensors, or a number of tokens.

    A number ``n`` stands for the first ``n`` tokens of the stream, and becomes the number of them that this rank holds.

    Args:
        streams: the stream, such as "image"; or several, whose tokens follow one another in the argument.
        dim: the dimension of the tokens.
        dims: the number of dimensions of a tensor with an entry for each token. Other tensors are left as they are, and
            so are tensors with one entry in this dimension. None: every tensor has an entry for each token.
    """

    streams: str | tuple[str, ...]
    dim: int = 1
    dims: int | None = None


@dataclass(frozen=True)
class Across:
    """Attention from one stream to another. This rank's queries see all keys and values, which are all-gathered.

    Args:
        queries: the stream of the queries, such as "audio".
        keys: the stream of the keys and values.
    """

    queries: str
    keys: str


@dataclass(frozen=True)
class Plan:
    """How a model's tokens are sharded. The names of modules may contain ``*`` for one part, as in "blocks.*.attn1",
    and ``-1`` for the last of a list, as in "blocks.-1".

    Every stream is cut by itself into one contiguous part for each rank.

    Args:
        cuts: for each module, "" being the model itself, its arguments that are cut before it runs. A tuple of cuts is
            for an argument that is a tuple. An argument may be None. "blocks.0" is the first of the blocks that runs.
        attention: for each attention module, the streams whose tokens it joins, in order. "()" is attention whose keys
            and values every rank holds in full, such as cross-attention to a text; this rank then computes it alone.
            ``Across`` is attention between two streams that are both cut.
        output: the module whose output ``[batch, tokens, channels]`` has the tokens of ``output_stream``. It is
            gathered, so that what follows sees all tokens. Of several such modules a call may run only one.
        output_stream: the name of this stream.
        other_outputs: further modules whose outputs are gathered, with the name of the stream of each.
        padding: the module and the argument that tells which tokens of a stream are padding: bool
            ``[batch, tokens]``, True for real tokens, or the same of all joint tokens in the order of the attention.
            Padding follows a row's real tokens. Where the model passes attention an ``attn_mask``, it sees the real
            tokens only.
        padded_stream: the name of this stream.

    Raises:
        TypeError: something else than a ``Cut`` or a tuple of them is the cut of an argument.
        ValueError: attention's streams are a string, no argument is cut for a stream, or no argument of the padding's
            module is.
    """

    cuts: Mapping[str, Mapping[str, Cut | tuple[Cut, ...]]]
    attention: Mapping[str, tuple[str, ...] | Across]
    output: str = "proj_out"
    output_stream: str = "image"
    other_outputs: Mapping[str, str] = field(default_factory=dict)
    padding: tuple[str, str] | None = None
    padded_stream: str = "text"

    def __post_init__(self) -> None:
        for module, cuts in self.cuts.items():
            for argument, value in cuts.items():
                for each in value if isinstance(value, tuple) else (value,):
                    if not isinstance(each, Cut):
                        raise TypeError(f"plan: cuts[{module!r}][{argument!r}]={each!r}: expected a Cut")
        cut = self.streams
        used = {self.output_stream, *self.other_outputs.values()} | ({self.padded_stream} if self.padding else set())
        for module, streams in self.attention.items():
            if isinstance(streams, str):
                raise ValueError(f"plan: attention[{module!r}]={streams!r}: expected a tuple, such as ({streams!r},)")
            used.update((streams.queries, streams.keys) if isinstance(streams, Across) else streams)
        if unknown := sorted(used - {*cut}):
            raise ValueError(f"plan: no argument is cut for the stream {unknown[0]!r}, only for {cut}")
        if self.padding is not None and self.padding[0] not in self.cuts:
            raise ValueError(
                f"plan: padding={self.padding!r}: its module has no cuts; modules with cuts: {[*self.cuts]}"
            )

    @property
    def streams(self) -> list[str]:
        """The names of the streams, sorted."""
        cuts = [cut for of_module in self.cuts.values() for cut in of_module.values()]
        each = [cut for x in cuts for cut in (x if isinstance(x, tuple) else (x,))]
        return sorted({name for x in each for name in ((x.streams,) if isinstance(x.streams, str) else x.streams)})


IMAGE, TEXT, AUDIO = Cut("image"), Cut("text"), Cut("audio")
IMAGE_FIRST, TEXT_FIRST = ("image", "text"), ("text", "image")
WHOLE: tuple[str, ...] = ()
# An argument with an entry for each token in some checkpoints, and one for each row in others.
PER_TOKEN = Cut("image", dims=2)
HIDDEN = {"hidden_states": IMAGE}
BOTH = {**HIDDEN, "encoder_hidden_states": TEXT}
ROWS = Cut("image", dim=0)  # a table [tokens, channels]
IDS = {"img_ids": Cut("image", dim=-2), "txt_ids": Cut("text", dim=-2)}
CONTROL = {"controlnet_block_samples": IMAGE}

_FLUX = Plan(
    cuts={"": {**BOTH, **IDS}},
    attention={"transformer_blocks.*.attn": TEXT_FIRST, "single_transformer_blocks.*.attn": TEXT_FIRST},
)
_CONTROL = {"controlnet_block_samples": IMAGE, "controlnet_single_block_samples": IMAGE}
_HUNYUAN = {"transformer_blocks.*.attn": IMAGE_FIRST, "context_embedder.token_refiner.refiner_blocks.*.attn": WHOLE}

_HUNYUAN_VIDEO = Plan(
    {
        "transformer_blocks.0": BOTH,
        "transformer_blocks.*": {"freqs_cis": ROWS},
        "single_transformer_blocks.*": {"image_rotary_emb": ROWS},
    },
    {**_HUNYUAN, "single_transformer_blocks.*.attn": IMAGE_FIRST},
    padding=("transformer_blocks.0", "attention_mask"),
)
_WAN = {"blocks.*.attn1": ("image",), "blocks.*.attn2": WHOLE}
_WAN_VIDEO = Plan({"blocks.0": HIDDEN, "blocks.*": {"rotary_emb": IMAGE}}, _WAN)
_CROSS = {"transformer_blocks.*.attn1": ("image",), "transformer_blocks.*.attn2": WHOLE}
# The tokens of models whose rows are sequences of text and image tokens.
_TOKENS, _TOKEN_ROWS = Cut("tokens"), Cut("tokens", dim=0)
_PER_FRAME = Cut("image", dims=3)  # a timestep for each frame, repeated for its tokens
_COSMOS_TIMES = {"embedded_timestep": _PER_FRAME, "temb": _PER_FRAME}

PLANS: dict[str, Plan] = {
    "FluxTransformer2DModel": Plan({"": {**BOTH, **IDS, **_CONTROL}}, _FLUX.attention),
    "Flux2Transformer2DModel": _FLUX,
    "ChromaTransformer2DModel": Plan(
        {"": {**BOTH, **IDS, **_CONTROL, "attention_mask": Cut(TEXT_FIRST)}},
        _FLUX.attention,
        padding=("", "attention_mask"),
    ),
    "QwenImageTransformer2DModel": Plan(
        {
            "": CONTROL,
            "transformer_blocks.0": BOTH,
            "transformer_blocks.*": {
                "encoder_hidden_states_mask": TEXT,
                "image_rotary_emb": (ROWS, Cut("text", dim=0)),
                "modulate_index": IMAGE,
            },
        },
        {"transformer_blocks.*.attn": TEXT_FIRST},
        padding=("transformer_blocks.0", "encoder_hidden_states_mask"),
    ),
    **dict.fromkeys(
        ("WanTransformer3DModel", "ChronoEditTransformer3DModel"),
        Plan({"": {"timestep": PER_TOKEN}, **_WAN_VIDEO.cuts}, _WAN),
    ),
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "HunyuanVideo15Transformer3DModel": Plan(
        {"transformer_blocks.0": BOTH, "transformer_blocks.*": {"attention_mask": TEXT, "freqs_cis": ROWS}},
        _HUNYUAN,
        padding=("transformer_blocks.0", "attention_mask"),
    ),
    "LTXVideoTransformer3DModel": Plan(
        {"": {**HIDDEN, "timestep": PER_TOKEN}, "transformer_blocks.*": {"image_rotary_emb": IMAGE}},
        _CROSS,
    ),
    "LTX2VideoTransformer3DModel": Plan(
        {
            "": {
                **HIDDEN,
                "audio_hidden_states": AUDIO,
                "timestep": PER_TOKEN,
                "audio_timestep": Cut("audio", dims=2),
            },
            "transformer_blocks.*": {
                "video_rotary_emb": Cut("image", dim=-2),
                "ca_video_rotary_emb": Cut("image", dim=-2),
                "audio_rotary_emb": Cut("audio", dim=-2),
                "ca_audio_rotary_emb": Cut("audio", dim=-2),
            },
        },
        {
            **_CROSS,
            "transformer_blocks.*.audio_attn1": ("audio",),
            "transformer_blocks.*.audio_attn2": WHOLE,
            "transformer_blocks.*.audio_to_video_attn": Across("image", "audio"),
            "transformer_blocks.*.video_to_audio_attn": Across("audio", "image"),
        },
        other_outputs={"audio_proj_out": "audio"},
    ),
    "SD3Transformer2DModel": Plan(
        {"": {"block_controlnet_hidden_states": IMAGE}, "transformer_blocks.0": BOTH},
        {"transformer_blocks.*.attn": IMAGE_FIRST, "transformer_blocks.*.attn2": ("image",)},
    ),
    **dict.fromkeys(
        (
            "CogVideoXTransformer3DModel",
            "CogView4Transformer2DModel",
            "EasyAnimateTransformer3DModel",
            "GlmImageTransformer2DModel",
        ),
        Plan(
            {"transformer_blocks.0": BOTH, "transformer_blocks.*": {"image_rotary_emb": ROWS}},
            {"transformer_blocks.*.attn1": TEXT_FIRST},
        ),
    ),
    "CogView3PlusTransformer2DModel": Plan({"transformer_blocks.0": BOTH}, {"transformer_blocks.*.attn1": TEXT_FIRST}),
    "SkyReelsV2Transformer3DModel": _WAN_VIDEO,
    "WanVACETransformer3DModel": Plan(
        {
            **_WAN_VIDEO.cuts,
            "vace_blocks.0": {"control_hidden_states": IMAGE},
            "vace_blocks.*": {**HIDDEN, "rotary_emb": IMAGE},
        },
        {**_WAN, "vace_blocks.*.attn1": ("image",), "vace_blocks.*.attn2": WHOLE},
    ),
    "BriaTransformer2DModel": _FLUX,
    "OvisImageTransformer2DModel": _FLUX,
    "LongCatImageTransformer2DModel": _FLUX,
    "BriaFiboTransformer2DModel": Plan({"": {**BOTH, **IDS, "text_encoder_layers": TEXT}}, _FLUX.attention),
    "Flux3Transformer2DModel": Plan(
        {"": {**BOTH, **IDS}},
        {
            "txt_mode_blocks.*.attn": ("text",),
            "mode_blocks.image.*.attn": ("image",),
            "single_transformer_blocks.*.attn": TEXT_FIRST,
        },
    ),
    "HunyuanImageTransformer2DModel": Plan(
        {
            "transformer_blocks.0": BOTH,
            "transformer_blocks.*": {"image_rotary_emb": ROWS},
            "single_transformer_blocks.*": {"image_rotary_emb": ROWS},
        },
        {**_HUNYUAN, "single_transformer_blocks.*.attn": IMAGE_FIRST},
        padding=("transformer_blocks.0", "attention_mask"),
    ),
    "AuraFlowTransformer2DModel": Plan(
        {"joint_transformer_blocks.0": BOTH},
        {"joint_transformer_blocks.*.attn": TEXT_FIRST, "single_transformer_blocks.*.attn": TEXT_FIRST},
    ),
    "PixArtTransformer2DModel": Plan({"transformer_blocks.0": HIDDEN}, _CROSS),
    "CosmosTransformer3DModel": Plan(
        {
            "transformer_blocks.0": HIDDEN,
            "transformer_blocks.*": {
                **_COSMOS_TIMES,
                "image_rotary_emb": ROWS,
                "extra_pos_emb": IMAGE,
                "controlnet_residual": IMAGE,
            },
            "norm_out": _COSMOS_TIMES,
        },
        _CROSS,
    ),
    "ZImageTransformer2DModel": Plan(
        {
            "layers.0": {"x": _TOKENS},
            "layers.*": {"freqs_cis": _TOKENS, "noise_mask": _TOKENS},
            "all_final_layer.*": {"noise_mask": _TOKENS},
        },
        {"layers.*.attention": ("tokens",), "*_refiner.*.attention": WHOLE},
        output="all_final_layer.*",
        output_stream="tokens",
        padding=("layers.0", "attn_mask"),
        padded_stream="tokens",
    ),
    "Lumina2Transformer2DModel": Plan(
        {"layers.0": {"hidden_states": _TOKENS}, "layers.*": {"image_rotary_emb": _TOKENS}},
        {"layers.*.attn": ("tokens",), "*_refiner.*.attn": WHOLE},
        output="norm_out",
        output_stream="tokens",
        padding=("layers.0", "attention_mask"),
        padded_stream="tokens",
    ),
    "MiniMaxH3Transformer3DModel": Plan(
        {
            "transformer_blocks.0": {"hidden_states": _TOKENS},
            "transformer_blocks.*": {"adaln_indices": _TOKEN_ROWS, "rotary_emb": _TOKEN_ROWS},
            "norm_out": {"timestep_indices": _TOKEN_ROWS},
        },
        {"transformer_blocks.*.attn": ("tokens",), "token_refiner.refiner_blocks.*.attn": WHOLE},
        output="norm_out",
        output_stream="tokens",
    ),
    "JoyImageEditTransformer3DModel": Plan(
        {"double_blocks.0": BOTH, "double_blocks.*": {"image_rotary_emb": (ROWS, Cut("text", dim=0))}},
        {"double_blocks.*.attn": IMAGE_FIRST},
    ),
    "Krea2Transformer2DModel": Plan(
        {"": {**BOTH, "position_ids": Cut(TEXT_FIRST, dim=0)}},
        {
            "text_fusion.layerwise_blocks.*.attn": WHOLE,  # of the text encoder's layers, for each token
            "text_fusion.refiner_blocks.*.attn": ("text",),
            "transformer_blocks.*.attn": TEXT_FIRST,
        },
        output="final_layer",
        padding=("", "encoder_attention_mask"),
    ),
}


# Why there is no plan for a class. For all further classes nobody has written one yet.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "HiDreamImageTransformer2DModel",
            "ConsisIDTransformer3DModel",
            "HunyuanVideoFramepackTransformer3DModel",
            "BriaFibo2Transformer2DModel",
            "ErnieImageTransformer2DModel",
        ),
        "between or after its blocks it cuts joined tokens at the lengths of whole streams",
    ),
    **dict.fromkeys(
        (
            "QwenImage21Transformer2DModel",
            "HeliosTransformer3DModel",
            "AnyFlowFARTransformer3DModel",
            "Ideogram4Transformer2DModel",
        ),
        "its attention has a mask by image or by chunk",
    ),
    "MochiTransformer3DModel": "it picks the text tokens of each row",
    "PRXTransformer2DModel": "its attention has queries of the image only",
    "AllegroTransformer3DModel": "its attention has a mask of image tokens",
    **dict.fromkeys(("WanAnimateTransformer3DModel", "LatteTransformer3DModel"), "it has attention within each frame"),
    **dict.fromkeys(
        ("SanaTransformer2DModel", "SanaVideoTransformer3DModel"),
        "it has linear attention, and convolutions between tokens",
    ),
}


def _class_with_plan(model: nn.Module) -> Any:
    """The class of diffusers that has a plan in this package, of which ``model`` is; None if there is none."""
    parents = (cls for cls in type(model).__mro__ if cls.__module__.startswith("diffusers."))
    return next((cls for cls in parents if cls.__name__ in PLANS), None)


def has_plan(model: nn.Module) -> bool:
    """Whether this package has a plan for the class of a model."""
    return _class_with_plan(model) is not None


def plan_of(model: nn.Module) -> Plan:
    """The plan of a diffusers model.

    Raises:
        ValueError: there is none for the class, or something has replaced the forward that the plan is for.
    """
    cls, parent = type(model), _class_with_plan(model)
    if parent is not None:
        plan = PLANS[parent.__name__]
        forward = function_of(model.forward)
        if forward is not function_of(parent.forward) or parent.forward.__module__ != parent.__module__:
            raise ValueError(
                f"model: {cls.__name__} has another forward than diffusers' {parent.__name__}, namely "
                f"{name_of(forward)}; pass plan=, a seqpar.diffusers.Plan that says where "
                "its tokens are"
            )
        config: Any = model.config
        if config.get("image_condition_type") == "token_replace":
            first_frame = {"num_tokens": IMAGE}  # HunyuanVideo's blocks take the number of its tokens
            return replace(plan, cuts={k: {**v, **first_frame} if "*" in k else v for k, v in plan.cuts.items()})
        return plan
    if cls.__name__ in REFUSED:
        raise ValueError(f"model: there is no plan for {cls.__name__}, because {REFUSED[cls.__name__]}")
    raise ValueError(
        f"model: no plan says where the tokens of {cls.__name__} are; pass plan=, a seqpar.diffusers.Plan. "
        + _first_block(model)
        + "There are plans for "
        + ", ".join(PLANS)
    )


def _first_block(model: nn.Module) -> str:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            block = module[0]
            return f"Its first block {name}.0 takes {tuple(inspect.signature(block.forward).parameters)}. "
    return ""
