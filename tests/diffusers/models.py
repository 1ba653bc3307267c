"""Tiny random models of diffusers, and inputs for them.

Shapes: image tokens, text tokens, and heads are odd unless a case says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    """

    model: str
    strategy: str = "ring"
    text: int = 5
    ragged: bool = False
    heads: int = 3

    def __str__(self) -> str:
        return f"{self.model}-{self.strategy}-text{self.text}{'-ragged' * self.ragged}-{self.heads}heads"

    @property
    def real(self) -> Tensor:
        """Which text tokens are real: bool ``[b, text]``."""
        real = torch.ones(BATCH, self.text, dtype=torch.bool)
        if self.ragged:
            real[1, 1:] = False
        return real


def make(case: Case, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Any, dict[str, Any]]:
    """A model and its inputs; those in floating point require gradients."""
    import diffusers

    torch.manual_seed(seed)
    name, config, inputs = MODELS[case.model](case)
    model = getattr(diffusers, name)(**config)
    with torch.no_grad():
        for parameter in model.parameters():  # some are zero at first
            parameter.normal_(std=0.3) if parameter.dim() < 2 else parameter.normal_(std=parameter.shape[-1] ** -0.5)

    def ready(x: Any, key: str = "") -> Any:
        if isinstance(x, list):
            return [ready(each) for each in x]
        return x.to(dtype).requires_grad_(key in GRADIENTS) if isinstance(x, Tensor) and x.is_floating_point() else x

    return nn.Module.to(model, dtype), {key: ready(x, key) for key, x in inputs.items()}  # diffusers' own warns


GRADIENTS = ("hidden_states", "encoder_hidden_states", "pooled_projections")


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
        **packed(case),
        "pooled_projections": torch.randn(BATCH, 8),
        "img_ids": ids(13, 3),
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
    name, config, inputs = qwen(case)
    return name, config, {**inputs, "controlnet_block_samples": residuals(case, 15)}


def qwen_edit(case: Case) -> Any:
    name, config, inputs = qwen(case)
    return name, {**config, "zero_cond_t": True}, {**inputs, "img_shapes": [[(1, 3, 3), (1, 3, 2)]] * BATCH}


def video(case: Case, channels: int = 4) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(BATCH, channels, 3, 6, 10),
        "encoder_hidden_states": torch.randn(BATCH, case.text, 10),
        "timestep": times() * 1000,
    }


def wan(case: Case, **more: Any) -> Any:
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
    _, config, inputs = wan(case)
    return "SkyReelsV2Transformer3DModel", config, inputs


def wan_per_token(case: Case) -> Any:
    name, config, inputs = wan(case)
    return name, config, {**inputs, "timestep": torch.rand(BATCH, 45) * 1000}


def wan_image(case: Case) -> Any:
    name, config, inputs = wan(case, image_dim=10, added_kv_proj_dim=case.heads * 12)
    text = torch.randn(BATCH, 512, 10)  # diffusers' code has this length in it
    return (
        name,
        config,
        {**inputs, "encoder_hidden_states": text, "encoder_hidden_states_image": torch.randn(BATCH, 7, 10)},
    )


def hunyuan(case: Case) -> Any:
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
    name, config, inputs = hunyuan(case)
    return name, {**config, "image_condition_type": "token_replace"}, inputs


def hunyuan15(case: Case) -> Any:
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
    name, config, inputs = ltx(case)
    return name, config, {**inputs, "timestep": torch.rand(BATCH, 30)}


def sd3(case: Case, dual: tuple[int, ...] = ()) -> Any:
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
    name, config, inputs = sd3(case)
    return name, config, {**inputs, "block_controlnet_hidden_states": residuals(case, 15, 1)}


def sd35(case: Case) -> Any:
    return sd3(case, dual=(0,))


def cogvideox(case: Case) -> Any:
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
}
MASKED = ("chroma", "qwen", "qwen_control", "qwen_edit", "hunyuan", "hunyuan_replace", "hunyuan15", "ltx")
