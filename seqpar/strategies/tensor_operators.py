"""The linear layers of ``tensor_sequence.py`` as operators that torch.compile does not trace (see ``operators.py``).

Shapes: b batch, s tokens of this rank, t tokens of all tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mesh import ParallelContext, rank_in
from ..opaque import Opaque, constant
from ..sharding import Sharding
from .autograd import to_autocast_dtype
from .operators import AttentionOptions, placement
from .sequence_chunks import SequenceChunks
from .tensor_sequence import (
    all_gather_linear_backward,
    all_gather_linear_forward,
    linear_reduce_scatter_backward,
    linear_reduce_scatter_forward,
)

# The least number of tokens of all ranks in a compiled layer: torch.compile specialises on sizes of 0 and 1.
LEAST_TOKENS = 2


@constant(AttentionOptions)
@dataclass(frozen=True)
class ChunkOptions(Opaque):
    """The constants of ``SequenceChunks``.

    Attributes:
        overlap: "auto", "ring", "symm_mem" or "none".
        attention: the options of the attention that reads the tokens, which are put into its order. None: the chunks of
            the ranks follow one another. If its keys are replicated, the tokens are those of all its ranks.
    """

    overlap: str
    attention: AttentionOptions | None = None


class TracedChunks(NamedTuple):
    """Replaces ``SequenceChunks`` while torch.compile traces.

    Attributes:
        tokens: the number of this rank's tokens.
        sharding: the sharding of the sequence.
        ranks: the ranks of the layer.
        options: the constants of ``SequenceChunks``.
    """

    tokens: int
    sharding: Sharding
    ranks: ParallelContext
    options: ChunkOptions


def chunks_of(
    tokens: int, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions, device: torch.device
) -> SequenceChunks:
    """The chunks of a layer whose rank holds ``tokens`` tokens."""
    sharding.check_local(tokens)
    if options.attention is None:
        group = ranks.tensor
        return SequenceChunks.in_rank_order(group, sharding.lengths_in(group), options.overlap, device)
    groups, sequence = placement(sharding, ranks, options.attention)
    if options.attention.replicated:
        return SequenceChunks.of_context(groups.sequence, sequence, device)
    group = ranks.tensor
    assert group is not None
    return SequenceChunks.of_sharding(group, sequence, rank_in(groups.sequence), options.overlap, device)


@torch.library.custom_op("seqpar::all_gather_linear", mutates_args=())
def all_gather_linear_op(
    x: Tensor,
    weights: Sequence[Tensor],
    sharding: Sharding,
    ranks: ParallelContext,
    options: ChunkOptions,
) -> list[Tensor]:
    """``all_gather_linear``: ``x [b, s, in]`` and ``weights [out_i, in]`` to ``[b, t, out_i]`` each."""
    chunks = chunks_of(x.shape[1], sharding, ranks, options, x.device)
    return list(all_gather_linear_forward(x.contiguous(), weights, chunks))


@all_gather_linear_op.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    sharding: Sharding,
    ranks: ParallelContext,
    options: ChunkOptions,
) -> list[Tensor]:
    tokens = torch.library.get_ctx().new_dynamic_size(min=LEAST_TOKENS)
    return [x.new_empty(x.shape[0], tokens, w.shape[0]) for w in weights]


@torch.library.custom_op("seqpar::all_gather_linear_backward", mutates_args=())
def _all_gather_linear_backward(
    douts: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    need_x: bool,
    need_weights: Sequence[bool],
    sharding: Sharding,
    ranks: ParallelContext,
    options: ChunkOptions,
) -> list[Tensor]:
    """The gradients of ``x`` and of the weights that are needed, in this order."""
    chunks = chunks_of(x.shape[1], sharding, ranks, options, x.device)
    dx, dweights = all_gather_linear_backward(douts, x.contiguous(), weights, chunks, need_x, need_weights)
    return [d.contiguous() for d in (dx, *dweights) if d is not None]


@_all_gather_linear_backward.register_fake
def _(
    douts: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    need_x: bool,
    need_weights: Sequence[bool],
    sharding: Sharding,
    ranks: ParallelContext,
    options: ChunkOptions,
) -> list[Tensor]:
    needed = zip((x, *weights), (need_x, *need_weights), strict=True)
    return [like.new_empty(like.shape) for like, need in needed if need]


def _save_all_gather(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, *ctx.chunks = inputs
    ctx.save_for_backward(x, *weights)
    ctx.need = x.requires_grad, [w.requires_grad for w in weights]


def _backward_all_gather(ctx: Any, douts: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    need_x, need_weights = ctx.need
    grads = iter(_all_gather_linear_backward(list(douts), x, weights, need_x, need_weights, *ctx.chunks))
    dx = next(grads) if need_x else None
    return dx, [next(grads) if need else None for need in need_weights], None, None, None


all_gather_linear_op.register_autograd(_backward_all_gather, setup_context=_save_all_gather)


@torch.library.custom_op("seqpar::linear_reduce_scatter", mutates_args=())
def linear_reduce_scatter_op(
    x: Tensor, weight: Tensor, tokens: int, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions
) -> Tensor:
    """``linear_reduce_scatter``: ``x [b, t, in_local]`` and ``weight [out, in_local]`` to ``[b, tokens, out]``."""
    y = linear_reduce_scatter_forward(x, weight, chunks_of(tokens, sharding, ranks, options, x.device))
    return y.contiguous()


@linear_reduce_scatter_op.register_fake
def _(
    x: Tensor, weight: Tensor, tokens: int, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions
) -> Tensor:
    return x.new_empty(x.shape[0], tokens, weight.shape[0])


@torch.library.custom_op("seqpar::linear_reduce_scatter_backward", mutates_args=())
def _linear_reduce_scatter_backward(
    dout: Tensor, x: Tensor, weight: Tensor, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions
) -> list[Tensor]:
    """The gradients of ``x`` and ``weight``."""
    chunks = chunks_of(dout.shape[1], sharding, ranks, options, x.device)
    return [d.contiguous() for d in linear_reduce_scatter_backward(dout.contiguous(), x.contiguous(), weight, chunks)]


@_linear_reduce_scatter_backward.register_fake
def _(
    dout: Tensor, x: Tensor, weight: Tensor, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions
) -> list[Tensor]:
    return [like.new_empty(like.shape) for like in (x, weight)]


def _save_reduce_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, *ctx.chunks = inputs
    ctx.save_for_backward(x, weight)


def _backward_reduce_scatter(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return *_linear_reduce_scatter_backward(dout, *ctx.saved_tensors, *ctx.chunks), None, None, None, None


linear_reduce_scatter_op.register_autograd(_backward_reduce_scatter, setup_context=_save_reduce_scatter)


@torch.library.custom_op("seqpar::all_gather_positions", mutates_args=())
def all_gather_positions_op(
    positions: Tensor, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions
) -> Tensor:
    """``SequenceChunks.all_gather_positions``."""
    chunks = chunks_of(positions.shape[-1], sharding, ranks, options, positions.device)
    if chunks.group is None:
        full: Tensor = torch.atleast_2d(positions)
        return full.clone()  # an operator must not return its argument
    return chunks.all_gather_positions(positions)


@all_gather_positions_op.register_fake
def _(positions: Tensor, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions) -> Tensor:
    tokens = torch.library.get_ctx().new_dynamic_size(min=LEAST_TOKENS)
    return positions.new_empty(positions.shape[0] if positions.dim() == 2 else 1, tokens)


def traced_all_gather_linear(x: Tensor, weights: Sequence[Tensor], chunks: TracedChunks) -> list[Tensor]:
    """``all_gather_linear`` while torch.compile traces."""
    x, *weights = to_autocast_dtype(x, *weights)
    outs: list[Tensor] = all_gather_linear_op(x, weights, chunks.sharding, chunks.ranks, chunks.options)
    return outs


def traced_linear_reduce_scatter(x: Tensor, weight: Tensor, chunks: TracedChunks) -> Tensor:
    """``linear_reduce_scatter`` while torch.compile traces."""
    x, weight = to_autocast_dtype(x, weight)
    y: Tensor = linear_reduce_scatter_op(x, weight, *chunks)
    return y
