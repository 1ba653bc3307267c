"""The hardware and the settings of the planner's tests."""

from __future__ import annotations

from seqpar.planner.hardware import HARDWARE
from seqpar.planner.layer import RankTimeline
from seqpar.planner.setting import Setting
from seqpar.planner.shape import ModelShape
from seqpar.planner.simulate import Result, Timeline

A100, H100 = HARDWARE["a100"], HARDWARE["h100"]


def attention_shape(heads: int, kv_heads: int, head_dim: int, v_head_dim: int = 0) -> ModelShape:
    hidden = heads * head_dim
    return ModelShape("attention", 1, hidden, heads, kv_heads, head_dim, 4 * hidden, 64, v_head_dim=v_head_dim)


def attention(setting: Setting) -> tuple[Result, Result]:
    """Forward and backward of attention alone, on the slowest rank."""
    rank, results = RankTimeline(setting), []
    for backward in (False, True):
        timeline = Timeline()
        rank.attention(timeline, backward)
        results.append(timeline.run())
    return results[0], results[1]
