"""Checks of the arguments of attention layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.checks import check_int
from .rotary import RotaryEmbedding


def check_heads(hidden_size: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """``(kv_heads, head_dim)``, with defaults filled in."""
    check_int("hidden_size", hidden_size, 1)
    check_int("num_heads", heads, 1)
    kv_heads = heads if kv_heads is None else kv_heads
    check_int("num_kv_heads", kv_heads, 1)
    if heads % kv_heads:
        divisors = ", ".join(str(d) for d in range(1, heads + 1) if heads % d == 0)
        raise ValueError(f"num_kv_heads={kv_heads}: it must divide num_heads={heads}: one of {divisors}")
    if head_dim is None:
        if hidden_size % heads:
            raise ValueError(
                f"num_heads={heads}: it does not divide hidden_size={hidden_size}; pass head_dim, or other heads"
            )
        head_dim = hidden_size // heads
    check_int("head_dim", head_dim, 1)
    return kv_heads, head_dim


def check_rope(rope: RotaryEmbedding | None, head_dim: int) -> None:
    if rope is None:
        return
    if not isinstance(rope, RotaryEmbedding):
        raise TypeError(f"rope={rope!r}: expected a seqpar.RotaryEmbedding, or None")
    if rope.head_dim != head_dim:
        raise ValueError(f"rope: made for head_dim={rope.head_dim}, but the layer has {head_dim}; make them equal")


def check_positions(positions: Tensor, x: Tensor) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(f"positions={type(positions).__name__}: expected an integer tensor [seq] or [batch, seq]")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f"positions: dtype {positions.dtype}; expected integers")
    batch, length, _ = x.shape
    if tuple(positions.shape) not in ((length,), (1, length), (batch, length)):
        raise ValueError(f"positions: shape {tuple(positions.shape)}; expected {(length,)} or {(batch, length)}")
