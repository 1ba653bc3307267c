"""The shard of a tensor, and the full tensor of all shards, as differentiable functions."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.checks import check_dense, check_int
from ..comm.collectives import all_gather, sum_shards
from ..comm.waiting import operation
from ..placement.layout import TokenLayout, shard_length, shard_ranges


def _along(dim: int, positions: range) -> tuple[slice, ...]:
    return (*[slice(None)] * dim, slice(positions.start, positions.stop, positions.step))


def local_shard(x: Tensor, dim: int, tokens: TokenLayout, rank: int) -> Tensor:
    """The shard of ``x`` that ``rank`` holds, as a contiguous copy."""
    ranges = shard_ranges(tokens.seq_len, tokens.ranks, rank, tokens.layout)
    parts = [x[_along(dim, r)] for r in ranges or (range(0),)]  # a rank without tokens returns an empty tensor
    # Zigzag has two ranges. One range may be a view of x, so it is copied.
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


@operation("unshard")
def _all_gather_shards(x_local: Tensor, dim: int, tokens: TokenLayout, group: ProcessGroup) -> Tensor:
    lengths = [shard_length(tokens.seq_len, tokens.ranks, rank, tokens.layout) for rank in range(tokens.ranks)]
    return in_order(all_gather(x_local, lengths, dim, group), dim, tokens)


def in_order(by_rank: Tensor, dim: int, tokens: TokenLayout) -> Tensor:
    """The full tensor, contiguous, from the shards one after another in the order of the ranks."""
    if tokens.layout == "contiguous":  # already in the order of the sequence
        return by_rank.contiguous()
    full = torch.empty_like(by_rank, memory_format=torch.contiguous_format)
    # Slices instead of an index of all tokens, because copying an index to the GPU would make the host wait.
    start = 0
    ranges = [shard_ranges(tokens.seq_len, tokens.ranks, rank, tokens.layout) for rank in range(tokens.ranks)]
    for r in chain.from_iterable(ranges):
        full[_along(dim, r)] = by_rank.narrow(dim, start, len(r))
        start += len(r)
    return full


class Unshard(torch.autograd.Function):
    """All-gathers the shards. Backward reduce-scatters, because every rank may have computed from all of the result."""

    @staticmethod
    def forward(ctx: Any, x_local: Tensor, dim: int, tokens: TokenLayout, group: ProcessGroup) -> Tensor:
        ctx.constants = dim, tokens, group
        return _all_gather_shards(x_local, dim, tokens, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _SumShards.apply(grad, *ctx.constants), None, None, None


class _SumShards(torch.autograd.Function):
    """Reduce-scatters ``x``: this rank's shard of the sum over the ranks, summed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, tokens: TokenLayout, group: ProcessGroup) -> Tensor:
        ctx.constants = dim, tokens, group
        with operation("the backward of unshard"):
            return sum_shards([local_shard(x, dim, tokens, rank) for rank in range(tokens.ranks)], dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return Unshard.apply(grad, *ctx.constants), None, None, None


def check_full(x: Tensor, dim: int, seq_len: int) -> int:
    """``dim`` counted from the front, after checking that ``x`` holds the full sequence."""
    dim = check_dim("x", x, dim)
    if x.shape[dim] != seq_len:
        raise ValueError(
            f"x: shape {tuple(x.shape)} has {x.shape[dim]} entries along dim {dim}, but the sharding is of "
            f"seq_len={seq_len}; make a Sharding of that length, or name the dimension of the sequence"
        )
    return dim


def check_dim(name: str, x: Tensor, dim: int) -> int:
    """``dim`` counted from the front, after checking the arguments."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    check_dense(name, x)
    check_int("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: {name} has {x.dim()} dimensions, {tuple(x.shape)}; choose one of them")
    return dim % x.dim()
