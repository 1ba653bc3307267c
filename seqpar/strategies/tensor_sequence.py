"""Megatron's tensor and sequence parallelism: all-gather x GEMM and GEMM x reduce-scatter, overlapped.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Weights are sharded over the
ranks. Outside the linear layers, the tokens are sharded over the same ranks. A column-parallel layer all-gathers the
tokens before its GEMM, and a row-parallel layer reduce-scatters them after its GEMM. The backward of each communicates
like the forward of the other.

The GEMMs of one chunk run while the next chunk is being received (Wang et al., "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). With few ranks a chunk is sent in several
pieces, and the GEMMs of its first pieces overlap with the transfer of its later pieces.

[Note: overlap] Rank 1 of 4; chunk r holds the tokens of rank r. Partial outputs are sent in the model's dtype, summed
in float32 by the rank that keeps them, and rounded once.

    all_gather_linear
    GEMM         | x of chunk 1     | x of chunk 0     | x of chunk 3     | x of chunk 2     |
    receive x    | chunk 0 .......  | chunk 3 .......  | chunk 2 .......  |
    send own x   | to 2 ..........  | to 3 ..........  | to 0 ..........  |

    linear_reduce_scatter
    GEMM         | y of chunk 2     | y of chunk 3     | y of chunk 0     | y of chunk 1     | sum
    send y       |                  | chunk 2, to 2 .  | chunk 3, to 3 .  | chunk 0, to 0 .  |
    receive y    |                  | chunk 1, from 0  | chunk 1, from 3  | chunk 1, from 2  |

Elements sent per rank of P, N tokens: (P-1)/P * N * hidden for the all-gather, and as many for the reduce-scatter.
Backward sends the same again, and all-gathers the input once more, because autograd does not keep the gathered input.

``sequence_chunks.py`` sends and receives the chunks, and ``tensor_operators.py`` makes operators of these functions.
Shapes: b batch, s tokens of this rank, t tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import torch
import torch.nn.functional as F
from torch import Tensor

from .gemm import add_weight_gradient, join, matmul_float32, sum_dtype
from .sequence_chunks import PartialSums, RowPiece, SequenceChunks, SequenceRows


def all_gather_linear(x: Tensor, weights: Sequence[Tensor], chunks: SequenceChunks) -> list[Tensor]:
    """``x [b, s, in]``, contiguous, and ``weights [out_i, in]`` to ``[b, t, out_i]`` each."""
    return project(chunks.receive_chunks(x), x, weights, chunks)


def project(
    x_chunks: Iterator[Iterator[RowPiece]],
    x: Tensor,
    weights: Sequence[Tensor],
    chunks: SequenceChunks,
    full: Tensor | None = None,
) -> list[Tensor]:
    """``F.linear`` of ``x_chunks`` with each weight. The tokens are also written to ``full [b, t, in]``."""
    outs = [x.new_empty(x.shape[0], chunks.total, w.shape[0]) for w in weights]  # [b, t, out_i]
    for rows, piece in chain.from_iterable(x_chunks):  # this rank's tokens first
        for out, w in zip(outs, weights, strict=True):
            rows.put(out, F.linear(piece, w))
        if full is not None:
            rows.put(full, piece)
    return outs


def all_gather_linear_backward(
    douts: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    chunks: SequenceChunks,
    need_x: bool,
    need_weights: Sequence[bool],
    full: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of ``x`` and of each weight from ``douts [b, t, out_i]``; None for those that are not needed.

    x is gathered again, because its gathered form was not kept, unless the caller has it as ``full [b, t, in]``.
    """
    weights_and_needs = zip(weights, need_weights, strict=True)
    dweights = [torch.zeros_like(w, dtype=sum_dtype(w)) if need else None for w, need in weights_and_needs]
    # The weights are joined, so that dx is rounded once, after the sum over them. The larger douts are joined by rows.
    weight = join(weights) if need_x else x.new_empty(0)  # [out, in]

    def partial_dx(rows: SequenceRows) -> Tensor:
        dout = join([rows.take(dout) for dout in douts], -1)  # [b, rows, out]
        return matmul_float32(dout, weight) if chunks.float32_gradients else dout @ weight

    x_chunks: Iterator[Iterator[RowPiece]] = repeat(iter(()), chunks.size)
    if any(need_weights):
        x_chunks = chunks.receive_chunks(x) if full is None else chunks.cut_chunks(full)
    dx = PartialSums(chunks, x, x.shape[2])
    for step, pieces in enumerate(x_chunks, start=1):  # meanwhile the next x is received, and the last dx is sent
        if need_x:
            dx.add(step % chunks.size, partial_dx)
        for rows, piece in pieces:
            for dweight, dout in zip(dweights, douts, strict=True):
                if dweight is not None:
                    add_weight_gradient(dweight, rows.take(dout), piece)
    rounded = [None if dweight is None else dweight.to(w.dtype) for dweight, w in zip(dweights, weights, strict=True)]
    return dx.result().to(x.dtype) if need_x else None, rounded


def linear_reduce_scatter(x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
    """``x [b, t, in]`` and ``weight [out, in]`` to ``[b, s, out]``, summed over the ranks."""
    y = PartialSums(chunks, x, weight.shape[0])
    for step in (*range(1, chunks.size), 0):  # this rank's tokens last, during the last transfer
        y.add(step, lambda rows: F.linear(rows.take(x), weight))
    return y.result()


def linear_reduce_scatter_backward(
    dout: Tensor, x: Tensor, weight: Tensor, chunks: SequenceChunks
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``weight`` from ``dout [b, s, out]``, contiguous."""
    dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=sum_dtype(weight))
    for rows, piece in chain.from_iterable(chunks.receive_chunks(dout)):
        rows.put(dx, piece @ weight)
        add_weight_gradient(dweight, piece, rows.take(x))
    return dx, dweight.to(weight.dtype)
