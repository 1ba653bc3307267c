"""The hardware and the settings of the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seqpar.planner import HARDWARE, Layer, Mlp, ModelShape, SelfAttention
from seqpar.planner.part import LayerPart
from seqpar.planner.rank import RankTimeline
from seqpar.planner.setting import Setting
from seqpar.planner.simulate import Result, Timeline

A100, H100 = HARDWARE["a100"], HARDWARE["h100"]


def decoder(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, width: int, vocab: int,
    gated: bool = True, **attention: Any,
) -> ModelShape:  # fmt: skip
    """A decoder whose layers are alike."""
    parts = SelfAttention(hidden, heads, kv_heads, head_dim, **attention), Mlp(hidden, width, gated)
    return ModelShape(name, (Layer(layers, parts),), vocab)


def changed(model: ModelShape, kind: type[LayerPart], **changes: Any) -> ModelShape:
    """The model with other sizes of every part of a kind."""

    def parts(layer: Layer) -> tuple[LayerPart, ...]:
        return tuple(replace(part, **changes) if isinstance(part, kind) else part for part in layer.parts)

    return replace(model, layers=tuple(Layer(layer.count, parts(layer)) for layer in model.layers))


def attention_shape(heads: int, kv_heads: int, head_dim: int, v_head_dim: int = 0) -> ModelShape:
    hidden = heads * head_dim
    return decoder("attention", 1, hidden, heads, kv_heads, head_dim, 4 * hidden, 64, v_head_dim=v_head_dim)


def attention_timeline(setting: Setting, backward: bool, *place: int) -> Timeline:
    """Forward or backward of attention alone, on a rank with the indices ``place``, by default the slowest."""
    rank = RankTimeline(setting, *place)
    setting.model.attention.record(rank, backward)
    return rank.timeline


def attention(setting: Setting) -> tuple[Result, Result]:
    """Forward and backward of attention alone, on the slowest rank."""
    forward, backward = (attention_timeline(setting, x).run() for x in (False, True))
    return forward, backward
