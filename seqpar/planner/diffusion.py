"""The sizes of diffusers' transformers, from the entries of their ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..base.checks import check_choice, check_int
from .attention import SelfAttention
from .mlp import CrossAttention, Mlp
from .shape import Layer, ModelShape

# Text tokens that cross-attention is planned with. Joint attention has the text in the sequence.
TEXT_TOKENS = 512


class _Blocks(NamedTuple):
    """The weights of a class, in units of one projection from hidden size to hidden size.

    Attributes:
        text: the entry with the width of the text encoder.
        embedders: of embeddings of time and text, of modulation that blocks share, and of the output's norm.
        streams: 2 if the blocks of ``num_layers`` have weights of their own for text.
        modulation: of the modulation of each stream in these blocks.
        single_modulation: of the modulation in the blocks of ``num_single_layers``.
        condition: the entry with the width of the input of the modulation; None: the hidden size.
        width: the entry with the width of MLPs; None: ``mlp_ratio`` times the hidden size.
        gated: whether MLPs have a gate.
        cross: whether blocks have cross-attention to the text.
    """

    text: str
    embedders: int
    streams: int = 1
    modulation: int = 0
    single_modulation: int = 0
    condition: str | None = None
    width: str | None = None
    gated: bool = False
    cross: bool = False


_HUNYUAN = _Blocks("text_embed_dim", 7, streams=2, modulation=6, single_modulation=3)
_REFINER = 14  # weights of a block that refines the text
CLASSES = {
    "WanTransformer3DModel": _Blocks("text_dim", 8, width="ffn_dim", cross=True),
    "FluxTransformer2DModel": _Blocks("joint_attention_dim", 5, streams=2, modulation=6, single_modulation=3),
    "Flux2Transformer2DModel": _Blocks("joint_attention_dim", 19, streams=2, gated=True),
    "QwenImageTransformer2DModel": _Blocks("joint_attention_dim", 3, streams=2, modulation=6),
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
    "HunyuanVideo15Transformer3DModel": _HUNYUAN,
    "LTXVideoTransformer3DModel": _Blocks("caption_channels", 8, cross=True),
    "CogVideoXTransformer3DModel": _Blocks("text_embed_dim", 0, modulation=12, condition="time_embed_dim"),
}


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of the transformer that a configuration of diffusers describes.

    Raises:
        ValueError: the class is not modelled, or the configuration lacks a size.
    """
    check_choice("model: _class_name", config["_class_name"], CLASSES)
    blocks = CLASSES[config["_class_name"]]

    def size(key: str, default: int | None = None) -> int:
        value = config.get(key) if config.get(key) is not None else default
        if value is None:
            raise ValueError(f"model: the configuration has no {key}; add it")
        check_int(f"model: {key}", value, 0)
        return int(value)

    heads, head_dim, double = (size(key) for key in ("num_attention_heads", "attention_head_dim", "num_layers"))
    single, hidden = size("num_single_layers", 0), heads * head_dim
    width = size(blocks.width) if blocks.width else round(hidden * config.get("mlp_ratio", 4))
    unit = hidden * hidden
    condition = hidden * (size(blocks.condition) if blocks.condition else hidden)
    block = 4 * unit + (3 if blocks.gated else 2) * hidden * width
    modulation = double * blocks.streams * blocks.modulation + single * blocks.single_modulation
    image_keys = 2 if blocks.cross and config.get("added_kv_proj_dim") else 0
    others = [
        double * (blocks.streams - 1) * block,
        double * (2 * blocks.cross + image_keys) * unit,  # k and v of cross-attention
        modulation * condition,
        (blocks.embedders + _REFINER * size("num_refiner_layers", 0)) * unit,
        size(blocks.text) * hidden,
    ]
    parts = (
        SelfAttention(hidden, heads, heads, head_dim),
        *([CrossAttention(hidden, hidden, TEXT_TOKENS)] if blocks.cross else []),
        Mlp(hidden, width, blocks.gated),
    )
    return ModelShape(
        name, (Layer(double + single, parts),), vocab=0, causal=False, diffusion=True, other_weights=sum(others)
    )
