"""The functions of ``tensor_sequence.py`` without its overlap: one collective, and one GEMM of all tokens.

Shapes: b batch, s tokens of this rank, t tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from .gemm import add_weight_gradient, join, sum_dtype
from .sequence_chunks import SequenceChunks


def all_gather_linear(x: Tensor, weights: Sequence[Tensor], chunks: SequenceChunks) -> list[Tensor]:
    """``x [b, s, in]`` and ``weights [out_i, in]`` to ``[b, t, out_i]`` each."""
    full = chunks.all_gather(x)  # [b, t, in]
    return [F.linear(full, w) for w in weights]


def all_gather_linear_backward(
    douts: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    chunks: SequenceChunks,
    need_x: bool,
    need_weights: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of ``x`` and of each weight from ``douts [b, t, out_i]``; None for those that are not needed."""
    dx = None
    if need_x:
        weight = join(weights)  # [out, in]
        full_dx = x.new_empty(x.shape[0], chunks.total, x.shape[2])  # [b, t, in]
        for rows in chain.from_iterable(chunks.rows.pieces):  # so that not all of douts are joined at a time
            rows.put(full_dx, join([rows.take(dout) for dout in douts], -1) @ weight)
        dx = chunks.reduce_scatter(full_dx)
    dweights: list[Tensor | None] = [None] * len(weights)
    full = chunks.all_gather(x) if any(need_weights) else x
    for i, (dout, w, need) in enumerate(zip(douts, weights, need_weights, strict=True)):
        dweights[i] = _weight_gradient(w, dout, full) if need else None
    return dx, dweights


def linear_reduce_scatter(x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
    """``x [b, t, in]`` and ``weight [out, in]`` to ``[b, s, out]``."""
    return chunks.reduce_scatter(F.linear(x, weight))


def linear_reduce_scatter_backward(
    dout: Tensor, x: Tensor, weight: Tensor, chunks: SequenceChunks
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``weight`` from ``dout [b, s, out]``."""
    full = chunks.all_gather(dout)  # [b, t, out]
    return full @ weight, _weight_gradient(weight, full, x)


def _weight_gradient(weight: Tensor, dout: Tensor, x: Tensor) -> Tensor:
    dweight = torch.zeros_like(weight, dtype=sum_dtype(weight))
    add_weight_gradient(dweight, dout, x)
    return dweight.to(weight.dtype)
