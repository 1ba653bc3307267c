"""Megatron's tensor and sequence parallelism: all-gather x GEMM and GEMM x reduce-scatter, overlapped.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Weights are sharded over the
ranks. Outside the linear layers, the tokens are sharded over the same ranks. A column-parallel layer all-gathers the
tokens before its GEMM, and a row-parallel layer reduce-scatters them after its GEMM. The backward of each communicates
like the forward of the other. ``overlap`` selects how:

* "ring": the GEMMs of one chunk run while the next chunk is being received (Wang et al., "Overlap Communication with
  Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). With few ranks a chunk is sent
  in several pieces, and the GEMMs of its first pieces overlap with the transfer of its later pieces;
* "symm_mem": PyTorch's fused symmetric-memory operators, for NVLink;
* "none": one collective before or after one GEMM;
* "auto": the same as "ring", because "symm_mem" has not been measured yet.

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

Bytes sent per rank of P: (P-1)/P * N * hidden * e for the all-gather, and as many for the reduce-scatter. Backward
sends the same again, and all-gathers the input once more, because autograd does not keep the gathered input.

``sequence_chunks.py`` sends and receives the chunks. Shapes: b batch, s tokens of this rank, t tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.p2p import make_ready
from .autograd import to_autocast_dtype
from .sequence_chunks import PartialSums, Piece, Rows, SequenceChunks, sum_dtype
from .symmetric_memory import all_gather_matmul, matmul_reduce_scatter


def all_gather_linear(x: Tensor, weights: Sequence[Tensor], chunks: SequenceChunks) -> list[Tensor]:
    """``F.linear`` of the all-gathered sequence with each of the weights.

    Args:
        x: ``[b, s, in]``, this rank's tokens.
        weights: each ``[out_i, in]``, this rank's rows of a column-parallel weight.
        chunks: which tokens each rank holds.

    Returns:
        ``[b, t, out_i]`` for each weight. The gathered input is not kept: backward gathers it again, behind the GEMMs
        of the input's gradient.
    """
    x, *weights = to_autocast_dtype(x, *weights)
    return list(_AllGatherLinear.apply(x, chunks, *weights))


def linear_reduce_scatter(x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
    """``F.linear``, summed over the ranks; each rank keeps its tokens.

    Args:
        x: ``[b, t, in_local]``.
        weight: ``[out, in_local]``, this rank's columns of a row-parallel weight.
        chunks: which tokens each rank holds.

    Returns:
        ``[b, s, out]``.
    """
    x, weight = to_autocast_dtype(x, weight)
    y: Tensor = _ReduceScatterOutput.apply(_SavedOperands.apply(x, weight, chunks), x.detach(), weight.detach(), chunks)
    return y


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: SequenceChunks, *weights: Tensor) -> tuple[Tensor, ...]:
        x = x.contiguous()
        ctx.save_for_backward(x, *weights)
        ctx.chunks = chunks
        return all_gather_linear_forward(x, weights, chunks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        need_x, _, *need_weights = ctx.needs_input_grad
        dx, dweights = all_gather_linear_backward(douts, x, weights, ctx.chunks, need_x, need_weights)
        return dx, None, *dweights


def all_gather_linear_forward(x: Tensor, weights: Sequence[Tensor], chunks: SequenceChunks) -> tuple[Tensor, ...]:
    """``all_gather_linear`` of a contiguous ``x``."""
    make_ready(chunks.group, x.device)
    if chunks.overlap == "none":
        full = chunks.all_gather(x)  # [b, t, in]
        return tuple(F.linear(full, w) for w in weights)
    if chunks.overlap == "symm_mem":
        return tuple(all_gather_matmul(x, weights, chunks.group))
    return project_pieces(chunks.receive_chunks(x), x, weights, chunks)


def project_pieces(
    pieces: Iterator[Iterator[Piece]],
    x: Tensor,
    weights: Sequence[Tensor],
    chunks: SequenceChunks,
    full: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """``F.linear`` of every rank's tokens with each of the weights, piece by piece as the tokens arrive.

    Args:
        pieces: what ``chunks.receive_chunks(x)`` returned.
        x: ``[b, s, in]``, this rank's tokens.
        weights: each ``[out_i, in]``.
        chunks: which tokens each rank holds.
        full: ``[b, t, in]``, an empty tensor to which the tokens of all ranks are written; None if they are not needed.

    Returns:
        ``[b, t, out_i]`` for each weight.
    """
    outs = tuple(x.new_empty(x.shape[0], chunks.total, w.shape[0]) for w in weights)  # [b, t, out_i]
    for rows, piece in chain.from_iterable(pieces):
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
    """The gradients of ``x`` and of each weight; None for those that are not needed.

    ``full [b, t, in]`` is the gathered input if the caller has it, and with "ring" only. Otherwise x is gathered again.
    """
    dweights = [torch.zeros_like(w, dtype=sum_dtype(w)) for w in weights]
    # The weights are concatenated, so that the partial gradient of x is rounded once, after the sum over all weights.
    # The outputs' gradients are larger, and are concatenated for some rows at a time.
    weight = (weights[0] if len(weights) == 1 else torch.cat(list(weights))) if need_x else x.new_empty(0)  # [out, in]

    def input_gradient(rows: Rows) -> Tensor:
        parts = [rows.take(dout) for dout in douts]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return matmul_float32(joined, weight) if chunks.float32_gradients else joined @ weight

    def add_weight_gradients(rows: Rows | None, piece: Tensor) -> None:
        for dweight, dout, needed in zip(dweights, douts, need_weights, strict=True):
            if needed:
                add_weight_gradient(dweight, dout if rows is None else rows.take(dout), piece)

    dx = None
    if chunks.overlap == "ring":
        # During the GEMMs of each step, the next chunk of x is received and the last partial dx is sent.
        partial_dx = PartialSums(chunks)
        x_chunks: Iterator[Iterator[Piece]] = repeat(iter(()), chunks.size)
        if any(need_weights):
            x_chunks = chunks.receive_chunks(x) if full is None else chunks.cut_chunks(full)
        for step, pieces in enumerate(x_chunks, start=1):
            if need_x:
                partial_dx.add(step % chunks.size, input_gradient)
            for rows, piece in pieces:
                add_weight_gradients(rows, piece)
        dx = partial_dx.result().to(x.dtype) if need_x else None
    else:
        if need_x and chunks.overlap == "symm_mem":
            dx = matmul_reduce_scatter(torch.cat(list(douts), -1), weight, chunks.group)
        elif need_x:
            full_dx = x.new_empty(x.shape[0], chunks.total, x.shape[2])  # [b, t, in]
            for rows in chain.from_iterable(chunks.rows.pieces):
                rows.put(full_dx, input_gradient(rows))
            dx = chunks.reduce_scatter(full_dx)
        if any(need_weights):
            add_weight_gradients(None, chunks.all_gather(x))
    of_weights = zip(dweights, weights, need_weights, strict=True)
    return dx, [d.to(w.dtype) if need else None for d, w, need in of_weights]


class _SavedOperands(torch.autograd.Function):
    """The autograd node of ``linear_reduce_scatter``: saves the operands, and computes all gradients.

    ``_ReduceScatterOutput`` computes the output after this node has saved its operands. PyTorch stops to recompute a
    checkpoint as soon as everything that backward needs is saved. If this layer is the last one of the checkpoint, it
    stops before the reduce-scatter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
        """Returns a placeholder with the shape and dtype of the output that takes no memory."""
        ctx.save_for_backward(x, weight)
        ctx.chunks = chunks
        own = len(chunks.rows.chunks[chunks.rank])
        return x.new_empty(()).expand(x.shape[0], own, weight.shape[0])  # [b, s, out]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return *linear_reduce_scatter_backward(dout.contiguous(), x, weight, ctx.chunks), None


class _ReduceScatterOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
        return linear_reduce_scatter_forward(x, weight, chunks)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        return dout, None, None, None


def linear_reduce_scatter_forward(x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
    """``linear_reduce_scatter`` without its gradient."""
    make_ready(chunks.group, x.device)
    if chunks.overlap == "none":
        return chunks.reduce_scatter(F.linear(x, weight))
    if chunks.overlap == "symm_mem":
        return matmul_reduce_scatter(x, weight.t(), chunks.group)
    partial_y = PartialSums(chunks)
    for step in (*range(1, chunks.size), 0):  # this rank's own tokens last, during the last transfer
        partial_y.add(step, lambda rows: F.linear(rows.take(x), weight))
    return partial_y.result()


def linear_reduce_scatter_backward(
    dout: Tensor, x: Tensor, weight: Tensor, chunks: SequenceChunks
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``weight``; ``dout`` is contiguous."""
    dweight = torch.zeros_like(weight, dtype=sum_dtype(weight))
    if chunks.overlap == "ring":
        dx = torch.empty_like(x)  # [b, t, in_local]
        for rows, piece in chain.from_iterable(chunks.receive_chunks(dout)):
            rows.put(dx, piece @ weight)
            add_weight_gradient(dweight, piece, rows.take(x))
    else:
        full = chunks.all_gather(dout)  # [b, t, out]
        dx = full @ weight
        add_weight_gradient(dweight, full, x)
    return dx, dweight.to(weight.dtype)


def matmul_float32(x: Tensor, weight: Tensor) -> Tensor:
    """``x [b, t, out] @ weight [out, in]`` with a result in float32 (float64 for float64)."""
    dtype = sum_dtype(x)
    if x.dtype == dtype:
        return x @ weight
    if x.device.type == "cuda" and torch.version.hip is None:  # the GEMM accumulates in float32 and can return it
        y: Tensor = torch.mm(x.flatten(0, 1), weight, out_dtype=dtype).unflatten(0, x.shape[:2])
        return y
    return x.to(dtype) @ weight.to(dtype)


def add_weight_gradient(dweight: Tensor, dout: Tensor, x: Tensor) -> None:
    """Add ``dout^T x`` over all tokens: ``dout [b, t, out]``, ``x [b, t, in]``, ``dweight [out, in]``."""
    dout, x = dout.flatten(0, 1).t(), x.flatten(0, 1)
    if dweight.dtype == x.dtype:
        dweight.addmm_(dout, x)
    else:
        dweight += dout @ x
