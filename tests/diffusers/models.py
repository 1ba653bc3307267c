"""Tiny random models of diffusers, and inputs for them.

Shapes: image tokens, text tokens, and heads are odd unless a case says otherwise.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.patching.replaced import replaced

BATCH = 2


@dataclass(frozen=True)
class Case:
    """What is special about the inputs of a model.

    Attributes:
        model: a key of ``MODELS``.
        strategy: as in ``seqpar.attention``.
        text: tokens of the text.
        ragged: whether the second row's text has only one real token, where the model takes a mask.
        heads: of attention.
        image: tokens of the image, in a Flux.
    """

    model: str
    strategy: str = "ring"
    text: int = 5
    ragged: bool = False
    heads: int = 3
    image: int = 13

    def __str__(self) -> str:
        return f"{self.model}-{self.strategy}-text{self.text}{'-ragged' * self.ragged}-{self.heads}heads"

    @property
    def real(self) -> Tensor:
        """Which text tokens are real: bool ``[b, text]``."""
        real = torch.ones(BATCH, self.text, dtype=torch.bool)
        if self.ragged:
            real[1, 1:] = False
        return real


def make(case: Case, seed: int) -> tuple[Any, dict[str, Any]]:
    """A model and its inputs, in float64 if its code can compute in float64; some inputs require gradients."""
    import diffusers

    dtype = torch.float32 if case.model in FLOAT32 else torch.float64
    torch.manual_seed(seed)
    name, config, inputs = MODELS[case.model](case)
    model = getattr(diffusers, name)(**config)
    with torch.no_grad():
        for parameter in model.parameters():  # some are zero at first
            parameter.normal_(std=0.3) if parameter.dim() < 2 else parameter.normal_(std=parameter.shape[-1] ** -0.5)

    def ready(x: Any, key: str = "") -> Any:
        if isinstance(x, list):
            return [ready(each, key) for each in x]
        return x.to(dtype).requires_grad_(key in GRADIENTS) if isinstance(x, Tensor) and x.is_floating_point() else x

    return nn.Module.to(model, dtype), {key: ready(x, key) for key, x in inputs.items()}  # diffusers' own warns


FLOAT32 = ("cosmos", "cosmos_frames")


@contextmanager
def without_casts() -> Iterator[None]:
    """In the block, float64 tensors stay so where a model's code casts to float32, in rotary embeddings and norms.

    A cast may round two float64 numbers that differ in the last place to different float32 numbers.
    """
    cast, to = Tensor.float, Tensor.to

    def to_float(x: Tensor) -> Tensor:
        return x if x.dtype == torch.float64 else cast(x)

    def to_any(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        single = any(each is torch.float32 for each in (*args, *kwargs.values()))
        return x if single and x.dtype == torch.float64 else to(x, *args, **kwargs)

    with replaced(Tensor, float=to_float, to=to_any):
        yield


def class_of(model: str) -> str:
    """The name of a model's class."""
    name: str = MODELS[model](Case(model))[0]
    return name


def available(model: str) -> bool:
    """Whether the installed diffusers has the class of the model."""
    import diffusers

    return hasattr(diffusers, class_of(model))


def installed() -> dict[str, Any]:
    """All classes in ``diffusers.models.transformers``, by name."""
    import diffusers
    from diffusers.models import transformers

    found = {}
    for module in pkgutil.iter_modules(transformers.__path__, f"{transformers.__name__}."):
        for name, cls in vars(importlib.import_module(module.name)).items():
            if inspect.isclass(cls) and issubclass(cls, diffusers.ModelMixin) and cls.__module__ == module.name:
                found[name] = cls
    return found


GRADIENTS = (
    "hidden_states", "encoder_hidden_states", "pooled_projections", "text_encoder_layers", "x", "cap_feats",
    "audio_hidden_states",
)  # fmt: skip


def times() -> Tensor:
    return torch.rand(BATCH)


def ids(tokens: int, axes: int) -> Tensor:
    return torch.randint(0, 9, (tokens, axes)).float()


def packed(case: Case, channels: int = 6, tokens: int = 13) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(BATCH, tokens, channels),
        "encoder_hidden_states": torch.randn(BATCH, case.text, 10),
        "timestep": times(),
    }


def flux(case: Case) -> Any:
    """Text to image."""
    config = {
        "in_channels": 6,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": case.heads,
        "joint_attention_dim": 10,
        "pooled_projection_dim": 8,
        "axes_dims_rope": (4, 4, 8),
    }
    inputs = {
        **packed(case, tokens=case.image),
        "pooled_projections": torch.randn(BATCH, 8),
        "img_ids": ids(case.image, 3),
        "txt_ids": ids(case.text, 3),
    }
    return "FluxTransformer2DModel", config, inputs


def flux_like(case: Case, name: str) -> Any:
    _, config, inputs = flux(case)
    return name, config, inputs


def bria(case: Case) -> Any:
    name, config, inputs = flux_like(case, "BriaTransformer2DModel")
    del inputs["pooled_projections"]
    return name, config, inputs


def ovis(case: Case) -> Any:
    name, config, inputs = flux_like(case, "OvisImageTransformer2DModel")
    del config["pooled_projection_dim"], inputs["pooled_projections"]
    return name, config, inputs


def longcat(case: Case) -> Any:
    name, config, inputs = flux_like(case, "LongCatImageTransformer2DModel")
    del inputs["pooled_projections"]
    return name, config, inputs


def residuals(case: Case, tokens: int, count: int = 2) -> list[Tensor]:
    """Of a ControlNet, for each block."""
    return [torch.randn(BATCH, tokens, case.heads * 16) for _ in range(count)]


def flux_control(case: Case) -> Any:
    """Residuals of a ControlNet."""
    name, config, inputs = flux(case)
    control = {"controlnet_block_samples": residuals(case, 13), "controlnet_single_block_samples": residuals(case, 13)}
    return name, config, {**inputs, **control}


def flux2(case: Case) -> Any:
    config = {
        "in_channels": 6,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": case.heads,
        "joint_attention_dim": 10,
        "timestep_guidance_channels": 8,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    inputs = {**packed(case), "img_ids": ids(13, 4), "txt_ids": ids(case.text, 4), "guidance": torch.ones(BATCH)}
    return "Flux2Transformer2DModel", config, inputs


def chroma(case: Case) -> Any:
    config = {
        "in_channels": 6,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": case.heads,
        "joint_attention_dim": 10,
        "axes_dims_rope": (4, 4, 8),
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 12,
        "approximator_layers": 1,
    }
    image = torch.ones(BATCH, 13, dtype=torch.bool)
    mask = torch.cat([case.real, image], 1) if case.ragged else None
    inputs = {**packed(case), "img_ids": ids(13, 3), "txt_ids": ids(case.text, 3), "attention_mask": mask}
    return "ChromaTransformer2DModel", config, inputs


def qwen(case: Case) -> Any:
    """Text to image."""
    config = {
        "in_channels": 6,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": case.heads,
        "joint_attention_dim": 10,
        "axes_dims_rope": (4, 4, 8),
    }
    inputs = {
        **packed(case, tokens=15),
        "encoder_hidden_states_mask": case.real,
        "img_shapes": [[(1, 3, 5)]] * BATCH,
    }
    return "QwenImageTransformer2DModel", config, inputs


def qwen_control(case: Case) -> Any:
    """Residuals of a ControlNet."""
    name, config, inputs = qwen(case)
    return name, config, {**inputs, "controlnet_block_samples": residuals(case, 15)}


def qwen_edit(case: Case) -> Any:
    """Two images for each text, with a timestep each, as in Qwen-Image-Edit."""
    name, config, inputs = qwen(case)
    return name, {**config, "zero_cond_t": True}, {**inputs, "img_shapes": [[(1, 3, 3), (1, 3, 2)]] * BATCH}


def video(case: Case, channels: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(BATCH, channels, 3, 6, 10),
        "encoder_hidden_states": torch.randn(BATCH, case.text, 10),
        "timestep": times() * 1000,
    }


def wan(case: Case, **more: Any) -> Any:
    """Text to video."""
    config = {
        "num_attention_heads": case.heads,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 10,
        "freq_dim": 8,
        "ffn_dim": 16,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    return "WanTransformer3DModel", {**config, **more}, video(case)


def skyreels(case: Case) -> Any:
    """Without diffusion forcing."""
    _, config, inputs = wan(case)
    return "SkyReelsV2Transformer3DModel", config, inputs


def wan_per_token(case: Case) -> Any:
    """A timestep for each token, as in Wan 2.2."""
    name, config, inputs = wan(case)
    return name, config, {**inputs, "timestep": torch.rand(BATCH, 45) * 1000}


def wan_image(case: Case) -> Any:
    """Image to video."""
    name, config, inputs = wan(case, image_dim=10, added_kv_proj_dim=case.heads * 12)
    text = torch.randn(BATCH, 512, 10)  # diffusers' code has this length in it
    return (
        name,
        config,
        {**inputs, "encoder_hidden_states": text, "encoder_hidden_states_image": torch.randn(BATCH, 7, 10)},
    )


def hunyuan(case: Case) -> Any:
    """Text to video."""
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": case.heads,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 10,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (4, 4, 8),
        "guidance_embeds": False,
    }
    inputs = {**video(case), "encoder_attention_mask": case.real, "pooled_projections": torch.randn(BATCH, 8)}
    return "HunyuanVideoTransformer3DModel", config, inputs


def hunyuan_replace(case: Case) -> Any:
    """An image as the first frame."""
    name, config, inputs = hunyuan(case)
    return name, {**config, "image_condition_type": "token_replace"}, inputs


def hunyuan15(case: Case) -> Any:
    """With and without an image."""
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": case.heads,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 10,
        "text_embed_2_dim": 8,
        "image_embed_dim": 6,
        "rope_axes_dim": (4, 4, 8),
        "patch_size": 2,
    }
    inputs = {
        **video(case),
        "encoder_attention_mask": case.real,
        "encoder_hidden_states_2": torch.randn(BATCH, 3, 8),
        "encoder_attention_mask_2": torch.tensor([[True, True, True], [True, not case.ragged, not case.ragged]]),
        "image_embeds": torch.zeros(BATCH, 2, 6) if case.ragged else torch.randn(BATCH, 2, 6),
    }
    return "HunyuanVideo15Transformer3DModel", config, inputs


def ltx(case: Case) -> Any:
    """Text to video."""
    config = {
        "in_channels": 6,
        "out_channels": 6,
        "num_attention_heads": case.heads,
        "attention_head_dim": 8,
        "cross_attention_dim": case.heads * 8,
        "num_layers": 2,
        "caption_channels": 10,
    }
    inputs = {
        **packed(case, tokens=30),
        "encoder_attention_mask": case.real.float(),
        "num_frames": 2,
        "height": 3,
        "width": 5,
    }
    return "LTXVideoTransformer3DModel", config, inputs


def ltx_per_token(case: Case) -> Any:
    """A timestep for each token."""
    name, config, inputs = ltx(case)
    return name, config, {**inputs, "timestep": torch.rand(BATCH, 30)}


def sd3(case: Case, dual: tuple[int, ...] = ()) -> Any:
    """Text to image."""
    config = {
        "sample_size": 12,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": case.heads,
        "joint_attention_dim": 10,
        "caption_projection_dim": case.heads * 16,
        "pooled_projection_dim": 8,
        "pos_embed_max_size": 12,
        "dual_attention_layers": dual,
        "qk_norm": "rms_norm" if dual else None,
    }
    inputs = {
        "hidden_states": torch.randn(BATCH, 4, 6, 10),
        "encoder_hidden_states": torch.randn(BATCH, case.text, 10),
        "pooled_projections": torch.randn(BATCH, 8),
        "timestep": times() * 1000,
    }
    return "SD3Transformer2DModel", config, inputs


def sd3_control(case: Case) -> Any:
    """Residuals of a ControlNet."""
    name, config, inputs = sd3(case)
    return name, config, {**inputs, "block_controlnet_hidden_states": residuals(case, 15, 1)}


def sd35(case: Case) -> Any:
    """With more attention among image tokens, as in SD 3.5."""
    return sd3(case, dual=(0,))


def cogvideox(case: Case) -> Any:
    """With rotary embeddings."""
    config = {
        "num_attention_heads": case.heads,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 10,
        "num_layers": 2,
        "sample_width": 10,
        "sample_height": 6,
        "sample_frames": 9,
        "max_text_seq_length": case.text,
        "use_rotary_positional_embeddings": True,
    }
    angles = torch.randn(45, 16)
    inputs = {
        **video(case),
        "hidden_states": torch.randn(BATCH, 3, 4, 6, 10),
        "image_rotary_emb": (angles.cos().double(), angles.sin().double()),
    }
    return "CogVideoXTransformer3DModel", config, inputs


def cogview4(case: Case) -> Any:
    """Without a mask."""
    config = {
        "num_attention_heads": case.heads,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "text_embed_dim": 10,
        "time_embed_dim": 8,
        "condition_dim": 4,
        "pos_embed_max_size": 12,
        "sample_size": 12,
        "rope_axes_dim": (16, 16),
    }
    sizes = {name: torch.rand(BATCH, 2) * 100 for name in ("original_size", "target_size", "crop_coords")}
    inputs = {**packed(case), "hidden_states": torch.randn(BATCH, 4, 6, 10), **sizes}
    return "CogView4Transformer2DModel", config, inputs


def easyanimate(case: Case) -> Any:
    """Blocks with and without weights of their own for text."""
    config = {
        "num_attention_heads": case.heads,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "patch_size": 2,
        "time_embed_dim": 8,
        "text_embed_dim": 10,
        "num_layers": 3,
        "mmdit_layers": 2,
    }
    return "EasyAnimateTransformer3DModel", config, video(case)


def glm_image(case: Case) -> Any:
    """Without a mask or a cache."""
    config = {
        "num_attention_heads": case.heads,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "text_embed_dim": 10,
        "time_embed_dim": 8,
        "condition_dim": 4,
        "prior_vq_quantizer_codebook_size": 7,
    }
    inputs = {
        **packed(case),
        "hidden_states": torch.randn(BATCH, 4, 6, 10),
        "prior_token_id": torch.randint(0, 7, (BATCH, 15)),
        "prior_token_drop": torch.zeros(BATCH, 15, dtype=torch.bool),
        "target_size": torch.rand(BATCH, 2) * 100,
        "crop_coords": torch.rand(BATCH, 2) * 100,
    }
    return "GlmImageTransformer2DModel", config, inputs


def cogview3(case: Case) -> Any:
    _, config, inputs = cogview4(case)
    del config["rope_axes_dim"]
    return "CogView3PlusTransformer2DModel", config, inputs


def chronoedit(case: Case) -> Any:
    _, config, inputs = wan(case)
    return "ChronoEditTransformer3DModel", config, inputs


def wan_vace(case: Case) -> Any:
    """With control frames."""
    _, config, inputs = wan(case, vace_layers=[0, 1], vace_in_channels=5)
    return "WanVACETransformer3DModel", config, {**inputs, "control_hidden_states": torch.randn(BATCH, 5, 3, 6, 10)}


def bria_fibo(case: Case) -> Any:
    """Without a mask."""
    name, config, inputs = flux_like(case, "BriaFiboTransformer2DModel")
    del inputs["pooled_projections"]
    layers = [torch.randn(BATCH, case.text, 9) for _ in range(4)]
    return name, {**config, "text_encoder_dim": 9}, {**inputs, "text_encoder_layers": layers}


def flux3(case: Case) -> Any:
    """Without reference images."""
    config = {
        "in_channels": 6,
        "cond_in_channels": 6,
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": case.heads,
        "joint_attention_dim": 10,
        "timestep_channels": 8,
        "axes_dims_rope": (4, 4, 4, 4),
    }
    return (
        "Flux3Transformer2DModel",
        config,
        {**packed(case), "img_ids": ids(13, 4), "txt_ids": ids(case.text, 4)},
    )


def hunyuan_image(case: Case) -> Any:
    """Two texts."""
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": case.heads,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "text_embed_dim": 10,
        "text_embed_2_dim": 8,
        "rope_axes_dim": (8, 8),
    }
    inputs = {
        **packed(case),
        "hidden_states": torch.randn(BATCH, 4, 3, 5),
        "encoder_attention_mask": case.real,
        "encoder_hidden_states_2": torch.randn(BATCH, 3, 8),
        "encoder_attention_mask_2": torch.tensor([[True, True, True], [True, not case.ragged, not case.ragged]]),
    }
    return "HunyuanImageTransformer2DModel", config, inputs


def auraflow(case: Case) -> Any:
    config = {
        "sample_size": 12,
        "in_channels": 4,
        "out_channels": 4,
        "num_mmdit_layers": 2,
        "num_single_dit_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": case.heads,
        "joint_attention_dim": 10,
        "caption_projection_dim": case.heads * 16,
        "pos_embed_max_size": 36,
    }
    return "AuraFlowTransformer2DModel", config, {**packed(case), "hidden_states": torch.randn(BATCH, 4, 6, 10)}


def pixart(case: Case) -> Any:
    config = {
        "num_attention_heads": case.heads,
        "attention_head_dim": 16,
        "out_channels": 4,
        "num_layers": 2,
        "cross_attention_dim": case.heads * 16,
        "sample_size": 12,
        "caption_channels": 10,
        "use_additional_conditions": False,
    }
    inputs = {**packed(case), "hidden_states": torch.randn(BATCH, 4, 6, 10), "encoder_attention_mask": case.real.long()}
    return "PixArtTransformer2DModel", config, inputs


def cosmos(case: Case) -> Any:
    """In float32, as its code requires."""
    config = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": case.heads,
        "attention_head_dim": 16,
        "num_layers": 2,
        "text_embed_dim": 10,
        "adaln_lora_dim": 6,
        "max_size": (4, 12, 12),
        "concat_padding_mask": False,
        "controlnet_block_every_n": 1,
    }
    return "CosmosTransformer3DModel", config, {**video(case), "attention_mask": case.real}


def cosmos_frames(case: Case) -> Any:
    """A timestep for each frame, and residuals of a ControlNet."""
    name, config, inputs = cosmos(case)
    control = [torch.randn(BATCH, 45, case.heads * 16) for _ in range(2)]
    times = {"timestep": torch.rand(BATCH, 1, 3, 1, 1), "block_controlnet_hidden_states": control}
    return name, config, {**inputs, **times}


def z_image(case: Case) -> Any:
    """Text to image."""
    config = {
        "in_channels": 4,
        "dim": case.heads * 16,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": case.heads,
        "n_kv_heads": case.heads,
        "cap_feat_dim": 10,
        "axes_dims": [4, 4, 8],
        "axes_lens": [200, 16, 16],
    }
    # The model pads each text to a multiple of 32 tokens.
    texts = [torch.randn(case.text + 32 * (case.ragged and row == 0), 10) for row in range(BATCH)]
    return (
        "ZImageTransformer2DModel",
        config,
        {"x": [torch.randn(4, 1, 6, 10) for _ in range(BATCH)], "t": times(), "cap_feats": texts},
    )


def z_image_edit(case: Case) -> Any:
    """A given image with its features, and three texts."""
    name, config, inputs = z_image(case)
    images = [[image[:, :, :4], image] for image in inputs["x"]]
    texts = [[text, text[:1], text[:2]] for text in inputs["cap_feats"]]
    more = {"siglip_feats": [[torch.randn(2, 3, 7), None] for _ in range(BATCH)], "image_noise_mask": [[0, 1]] * BATCH}
    return name, {**config, "siglip_feat_dim": 7}, {**inputs, "x": images, "cap_feats": texts, **more}


def lumina2(case: Case) -> Any:
    """Grouped KV heads."""
    config = {
        "sample_size": 12,
        "in_channels": 4,
        "hidden_size": case.heads * 16,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": case.heads,
        "num_kv_heads": 1,
        "multiple_of": 8,
        "axes_dim_rope": (4, 4, 8),
        "axes_lens": (60, 16, 16),
        "cap_feat_dim": 10,
    }
    inputs = {**packed(case), "hidden_states": torch.randn(BATCH, 4, 6, 10), "encoder_attention_mask": case.real}
    return "Lumina2Transformer2DModel", config, inputs


def joyimage(case: Case, rope_type: str = "mrope") -> Any:
    """Rotary positions of image and text."""
    config = {
        "in_channels": 4,
        "hidden_size": case.heads * 16,
        "num_attention_heads": case.heads,
        "text_dim": 10,
        "num_layers": 2,
        "rope_dim_list": [4, 4, 8],
        "rope_type": rope_type,
    }
    return "JoyImageEditTransformer3DModel", config, video(case)


def krea2(case: Case) -> Any:
    """Grouped KV heads; padding at the end of the text."""
    config = {
        "in_channels": 6,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": case.heads,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "timestep_embed_dim": 8,
        "text_hidden_dim": 12,
        "num_text_layers": 2,
        "text_num_attention_heads": 3,
        "text_num_key_value_heads": 3,
        "text_intermediate_size": 8,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 4, 8),
    }
    inputs = {
        **packed(case),
        "encoder_hidden_states": torch.randn(BATCH, case.text, 2, 12),
        "position_ids": ids(case.text + 13, 3),
        "encoder_attention_mask": case.real,
    }
    return "Krea2Transformer2DModel", config, inputs


def minimax(case: Case) -> Any:
    """Video, audio and text in one sequence."""
    config = {
        "num_attention_heads": case.heads,
        "attention_head_dim": 12,
        "hidden_size": 20,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "ffn_dim": 16,
        "in_channels": 2,
        "audio_in_channels": 3,
        "text_dim": 10,
        "freq_dim": 8,
        "time_embed_hidden_dim": 8,
        "time_embed_dim": 6,
        "rope_freq_dim": 2,
    }
    lengths = case.text, 13, 4  # text, video, audio
    text, image, sound = torch.randperm(sum(lengths)).split(lengths)
    tags = torch.zeros(sum(lengths), dtype=torch.long)
    tags[image], tags[sound] = 1, 2
    inputs = {
        **packed(case, channels=8),
        "audio_hidden_states": torch.randn(BATCH, 4, 3),
        "timestep": torch.rand(2),
        "timestep_indices": torch.randint(0, 2, tags.shape),
        "token_tags": tags,
        "position_ids": torch.randint(0, 9, (len(tags), 3)),
        "video_indices": image,
        "audio_indices": sound,
        "text_indices": text,
    }
    return "MiniMaxH3Transformer3DModel", config, inputs


def ltx2(case: Case, rope: str = "interleaved") -> Any:
    """Video and audio."""
    config = {
        "in_channels": 6,
        "out_channels": 6,
        "num_attention_heads": case.heads,
        "attention_head_dim": 12,
        "cross_attention_dim": case.heads * 12,
        "audio_in_channels": 5,
        "audio_out_channels": 5,
        "audio_num_attention_heads": case.heads,
        "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": case.heads * 8,
        "num_layers": 2,
        "caption_channels": 10,
        "rope_type": rope,
    }
    inputs = {
        **packed(case, tokens=30),
        "audio_hidden_states": torch.randn(BATCH, case.text, 5),
        "audio_encoder_hidden_states": torch.randn(BATCH, case.text, 10),
        "timestep": torch.rand(BATCH, 30) if rope == "split" else times(),
        "audio_timestep": times(),
        "sigma": times(),
        "encoder_attention_mask": case.real.float(),
        "num_frames": 2,
        "height": 3,
        "width": 5,
        "audio_num_frames": case.text,
    }
    return "LTX2VideoTransformer3DModel", config, inputs


def ltx23(case: Case) -> Any:
    """Gates, and a timestep for each token, as in LTX-2.3."""
    name, config, inputs = ltx2(case, "split")
    more = {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True}
    return name, {**config, **more}, inputs


MODELS: dict[str, Callable[[Case], Any]] = {
    "flux": flux,
    "flux_control": flux_control,
    "qwen_control": qwen_control,
    "sd3_control": sd3_control,
    "flux2": flux2,
    "chroma": chroma,
    "qwen": qwen,
    "qwen_edit": qwen_edit,
    "wan": wan,
    "wan_per_token": wan_per_token,
    "wan_image": wan_image,
    "hunyuan": hunyuan,
    "hunyuan15": hunyuan15,
    "ltx": ltx,
    "ltx_per_token": ltx_per_token,
    "sd3": sd3,
    "sd35": sd35,
    "cogvideox": cogvideox,
    "cogview4": cogview4,
    "skyreels": skyreels,
    "hunyuan_replace": hunyuan_replace,
    "bria": bria,
    "ovis": ovis,
    "longcat": longcat,
    "easyanimate": easyanimate,
    "glm_image": glm_image,
    "cogview3": cogview3,
    "chronoedit": chronoedit,
    "wan_vace": wan_vace,
    "bria_fibo": bria_fibo,
    "flux3": flux3,
    "hunyuan_image": hunyuan_image,
    "auraflow": auraflow,
    "pixart": pixart,
    "cosmos": cosmos,
    "cosmos_frames": cosmos_frames,
    "z_image": z_image,
    "z_image_edit": z_image_edit,
    "lumina2": lumina2,
    "joyimage": joyimage,
    "krea2": krea2,
    "minimax": minimax,
    "ltx2": ltx2,
    "ltx23": ltx23,
}
MASKED = (
    "chroma", "qwen", "qwen_control", "qwen_edit", "hunyuan", "hunyuan_replace", "hunyuan15", "ltx", "hunyuan_image",
    "pixart", "cosmos", "z_image", "z_image_edit", "lumina2", "krea2", "ltx2",
)  # fmt: skip
# Models whose sharded attention has no padding: a text is in the keys of cross-attention, or has 8 learned tokens more.
UNPADDED = (
    "wan", "wan_per_token", "wan_image", "ltx", "ltx_per_token", "skyreels", "chronoedit", "wan_vace", "auraflow",
    "pixart", "minimax", "ltx2", "ltx23", *FLOAT32,
)  # fmt: skip
ONE_STREAM = ("z_image", "z_image_edit", "lumina2")
