"""The hardware and the settings of the planner's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seqpar.planner import HARDWARE, Layer, Mlp, ModelShape, SelfAttention
from seqpar.planner.part import LayerPart
from seqpar.planner.rank import RankTimeline
from seqpar.planner.setting import Setting
from seqpar.planner.simulate import Result
from seqpar.planner.split import BETWEEN, WITHIN

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


def attention(setting: Setting, *place: int, part: LayerPart | None = None) -> tuple[Result, Result]:
    """Forward and backward of attention or of another part alone, on the rank ``place`` or on the slowest one."""
    ranks = [RankTimeline(setting, *place) for _ in range(2)]
    for rank, backward in zip(ranks, (False, True), strict=True):
        (part or setting.model.attention).record(rank, backward)
    forward, backward_ = (rank.timeline.run() for rank in ranks)
    return forward, backward_


def sent_bytes(setting: Setting, rank: int, part: LayerPart | None = None) -> list[tuple[int, int]]:
    """What a rank sends inside its host and to others, in forward and in backward of attention or of another part."""
    results = attention(setting, *divmod(rank, setting.ulysses), part=part)
    return [(x.sent.get(WITHIN, 0), x.sent.get(BETWEEN, 0)) for x in results]
