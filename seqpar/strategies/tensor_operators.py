"""The linear layers of ``tensor_sequence.py`` as operators, which eager and compiled code call.

``overlap`` selects how communication and GEMMs overlap:

* "ring": the GEMMs of one chunk run while the next chunk is received (``tensor_sequence.py``);
* "none": one collective before or after one GEMM (``one_gemm.py``);
* "auto": "ring"; on a GPU "none" where a chunk is too small for a message.

Shapes: b batch, s tokens of this rank, t tokens of all tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ..base.cache import context_of
from ..base.compile_types import Opaque, register_constant_type
from ..base.library import operator
from ..placement.placement import ParallelContext
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec
from . import one_gemm, tensor_sequence
from .autograd import to_autocast_dtype
from .sequence_chunks import SequenceChunks, rows_in_rank_order, rows_of_sharding

# By overlap: the module whose functions compute.
_ALGORITHMS: dict[str, Any] = {"ring": tensor_sequence, "none": one_gemm}


@register_constant_type(AttentionSpec)
@dataclass(frozen=True)
class ChunkOptions(Opaque):
    """The constants of ``SequenceChunks``.

    Attributes:
        overlap: "auto", "ring" or "none".
        attention: the spec of the attention that reads the tokens, which are put into its order. None: the chunks of
            the ranks follow one another. If its keys are replicated, all its ranks hold the chunks.
        lengths: the number of tokens of each rank, where the ranks have told each other; None: the sharding says.
    """

    overlap: str
    attention: AttentionSpec | None = None
    lengths: tuple[int, ...] | None = None


def lengths_of(tokens: int, sharding: Sharding, group: ProcessGroup | None, options: ChunkOptions) -> tuple[int, ...]:
    """The number of tokens of each rank of ``group``, of which this rank holds ``tokens``."""
    if options.lengths is not None:
        return options.lengths
    sharding.check_local(tokens)
    return sharding.lengths_in(group)


class ShardedTokens(NamedTuple):
    """The tokens of a tensor-parallel layer, which its ranks all-gather and reduce-scatter."""

    tokens: int  # of this rank
    sharding: Sharding
    ranks: ParallelContext  # of the layer
    options: ChunkOptions


def chunks_of(
    tokens: int, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions, device: torch.device
) -> SequenceChunks:
    """The chunks of a layer whose rank holds ``tokens`` tokens. Made once for a sharding."""
    key = tokens, ranks, options, *context_of(device)
    chunks: SequenceChunks | None = sharding.chunks.get(key)
    if chunks is None:
        chunks = sharding.chunks[key] = _make_chunks(tokens, sharding, ranks, options, device)
    return chunks


def _make_chunks(
    tokens: int, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions, device: torch.device
) -> SequenceChunks:
    attention, group, replicated = options.attention, ranks.tensor, False
    if attention is None:
        rows = rows_in_rank_order(lengths_of(tokens, sharding, group, options))
    else:
        sharding.check_local(tokens)
        placement = sharding.place(attention, ranks)
        layout, rank = placement.tokens, placement.rank
        replicated = layout.replicated
        if replicated:
            group, layout, rank = placement.sequence_group, layout.all_gathered(), 0
        rows = rows_of_sharding(layout, rank, device)
    return SequenceChunks(group, rows, options.overlap, float32_gradients=replicated)


def _algorithm(chunks: SequenceChunks, x: Tensor, width: int) -> Any:
    return _ALGORITHMS[chunks.overlap_for(x, width)]


def gather_and_project(x: Tensor, weights: Sequence[Tensor], tokens: ShardedTokens) -> list[Tensor]:
    """All-gather ``x [b, s, in]`` and project it with ``weights [out_i, in]``, to ``[b, t, out_i]`` each.

    The gathered input is not kept: backward gathers it again, behind the GEMMs of the input's gradient.
    """
    x, *weights = to_autocast_dtype(x, *weights)
    outs: list[Tensor] = all_gather_linear(x, weights, *tokens[1:])
    return outs


def project_and_scatter(x: Tensor, weight: Tensor, tokens: ShardedTokens) -> Tensor:
    """Project ``x [b, t, in_local]`` with ``weight [out, in_local]``, and reduce-scatter it to ``[b, s, out]``."""
    x, weight = to_autocast_dtype(x, weight)
    y: Tensor = linear_reduce_scatter(x, weight, *tokens)
    return y


def new_tokens() -> Any:
    """While an operator is traced: the number of tokens of all ranks, which is known when it runs."""
    return torch.library.get_ctx().new_dynamic_size(min=2)  # torch.compile specialises on sizes of 0 and 1


@operator(
    fake=lambda x, weights, *_: [x.new_empty(x.shape[0], n, w.shape[0]) for n in [new_tokens()] for w in weights],
    autograd=lambda x, weights, *constants: list(_AllGatherLinear.apply(x, constants, *weights)),
)
def all_gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    sharding: Sharding,
    ranks: ParallelContext,
    options: ChunkOptions,
) -> list[Tensor]:
    """``x [b, s, in]`` and ``weights [out_i, in]`` to ``[b, t, out_i]`` each."""
    chunks = chunks_of(x.shape[1], sharding, ranks, options, x.device)
    with chunks.call("all_gather_linear", x):
        outs: list[Tensor] = _algorithm(chunks, x, x.shape[2]).all_gather_linear(x.contiguous(), weights, chunks)
    return outs


@operator(
    fake=lambda douts, x, weights, needed, *_: [
        like.new_empty(like.shape) for like, need in zip((x, *weights), needed, strict=True) if need
    ]
)
def all_gather_linear_backward(
    douts: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    needed: Sequence[bool],
    sharding: Sharding,
    ranks: ParallelContext,
    options: ChunkOptions,
) -> list[Tensor]:
    """The gradients of ``x`` and of the weights that are ``needed``."""
    chunks = chunks_of(x.shape[1], sharding, ranks, options, x.device)
    need_x, *need_weights = needed
    backward = _algorithm(chunks, x, x.shape[2]).all_gather_linear_backward
    with chunks.call("all_gather_linear_backward", x):
        dx, dweights = backward(douts, x.contiguous(), weights, chunks, need_x, need_weights)
    return [d.contiguous() for d in (dx, *dweights) if d is not None]


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, constants: tuple[Any, ...], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        ctx.constants = constants
        return tuple(all_gather_linear(x, weights, *constants))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        need_x, _, *need_weights = ctx.needs_input_grad
        needed = [need_x, *need_weights]
        results = iter(all_gather_linear_backward(douts, x, weights, needed, *ctx.constants))
        dx, *dweights = (next(results) if need else None for need in needed)
        return dx, None, *dweights


@operator(
    fake=lambda x, weight, tokens, *_: x.new_empty(x.shape[0], tokens, weight.shape[0]),
    autograd=lambda x, weight, *constants: _ReduceScatterOutput.apply(
        _SavedOperands.apply(x, weight, constants), x.detach(), weight.detach(), constants
    ),
)
def linear_reduce_scatter(
    x: Tensor, weight: Tensor, tokens: int, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions
) -> Tensor:
    """``x [b, t, in_local]`` and ``weight [out, in_local]`` to ``[b, tokens, out]``, summed over the ranks."""
    chunks = chunks_of(tokens, sharding, ranks, options, x.device)
    with chunks.call("linear_reduce_scatter", x):
        y: Tensor = _algorithm(chunks, x, weight.shape[0]).linear_reduce_scatter(x.contiguous(), weight, chunks)
    return y.contiguous()


@operator(fake=lambda dout, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)))
def linear_reduce_scatter_backward(
    dout: Tensor, x: Tensor, weight: Tensor, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``weight``."""
    chunks = chunks_of(dout.shape[1], sharding, ranks, options, x.device)
    backward = _algorithm(chunks, x, weight.shape[0]).linear_reduce_scatter_backward
    with chunks.call("linear_reduce_scatter_backward", x):
        dx, dweight = backward(dout.contiguous(), x.contiguous(), weight, chunks)
    return dx.contiguous(), dweight.contiguous()


class _SavedOperands(torch.autograd.Function):
    """The autograd node of ``linear_reduce_scatter``: saves the operands, and computes all gradients.

    ``_ReduceScatterOutput`` computes the output after this node has saved its operands. PyTorch stops to recompute a
    checkpoint as soon as everything that backward needs is saved. If this layer is the last one of the checkpoint, it
    stops before the reduce-scatter.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, constants: tuple[Any, ...]) -> Tensor:
        """Returns a placeholder with the shape and dtype of the output that takes no memory."""
        ctx.save_for_backward(x, weight)
        tokens, *ctx.constants = constants
        return x.new_empty(()).expand(x.shape[0], tokens, weight.shape[0])  # [b, s, out]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return *linear_reduce_scatter_backward(dout, *ctx.saved_tensors, *ctx.constants), None


class _ReduceScatterOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, x: Tensor, weight: Tensor, constants: tuple[Any, ...]) -> Tensor:
        y: Tensor = linear_reduce_scatter(x, weight, *constants)
        return y

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        return dout, None, None, None


@operator(
    fake=lambda positions, *_: positions.new_empty(positions.shape[0] if positions.dim() == 2 else 1, new_tokens())
)
def all_gather_positions(
    positions: Tensor, sharding: Sharding, ranks: ParallelContext, options: ChunkOptions
) -> Tensor:
    """The positions ``[1 or b, t]`` of all tokens, from this rank's ``[s]`` or ``[b, s]``.

    Every call communicates. A cache could hold the result on one rank and not on another, which would then wait.
    """
    chunks = chunks_of(positions.shape[-1], sharding, ranks, options, positions.device)
    full: Tensor = torch.atleast_2d(positions)
    return full.clone() if chunks.size == 1 else chunks.all_gather(full)
