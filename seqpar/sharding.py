"""Sharding tensors along the sequence, and gathering them again.

Shapes: a tensor has ``seq`` entries along ``dim``, and its shard ``seq_local``; all other dimensions are arbitrary.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .checks import check_choice, check_int, no_compile
from .comm.collectives import all_gather
from .comm.handshake import Fingerprint, all_gather_header, fingerprint
from .layout import LAYOUTS, Layout, check_lengths, global_order, shard_length, shard_positions, shard_ranges
from .mesh import rank_in, sequence_group, size_of
from .strategies import STRATEGIES, StrategyName


@no_compile
def shard(
    x: Tensor,
    dim: int = 1,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: Layout = "contiguous",
    strategy: StrategyName | Literal["tp_sp"] | None = None,
) -> Tensor:
    """This rank's shard of ``x``, which every rank holds in full. Nothing is sent.

    Differentiable: ``x`` is replicated, so every rank receives its full gradient, all-gathered from the gradients of
    the shards, as in Megatron-LM. All ranks of the group must run the backward.

    Args:
        x: tensor of any dtype and shape. It may have fewer tokens than there are ranks.
        dim: the dimension of the sequence.
        mesh: the sequence is sharded over its ring and ulysses dimensions.
        group: the ranks the sequence is sharded over, instead of a mesh. With neither, the default group.
        layout: which tokens each rank holds: "contiguous", "zigzag" or "striped" (see ``seqpar.layout``).
        strategy: with "tp_sp" the sequence is sharded over the mesh's tp dimension too. No other strategy makes a
            difference.

    Returns:
        ``x`` with ``seq_local`` of ``seq`` entries along ``dim``, contiguous. ``seq`` need not divide by anything:
        shards may differ in length.

    Raises:
        TypeError: an argument has another type.
        ValueError: an unknown layout or strategy, a ``dim`` that ``x`` does not have, or a mesh without the dimensions.
    """
    group = resolve_sequence_group(mesh, group, strategy)
    dim = _check_arguments("x", x, dim, layout)
    if group is None:
        return x
    out: Tensor = _Shard.apply(x, dim, group, layout)
    return out


@no_compile
def unshard(
    x_local: Tensor,
    dim: int = 1,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: Layout = "contiguous",
    strategy: StrategyName | Literal["tp_sp"] | None = None,
) -> Tensor:
    """The full tensor on every rank, all-gathered from the shards that ``shard`` returned.

    Differentiable: the result is replicated and so is its gradient, of which each rank keeps its shard.

    Args:
        x_local: this rank's shard, with ``seq_local`` entries along ``dim``.
        dim: the dimension of the sequence.
        mesh: as given to ``shard``.
        group: as given to ``shard``.
        layout: as given to ``shard``.
        strategy: as given to ``shard``.

    Returns:
        ``x_local`` with ``seq`` entries along ``dim``, in the order of the sequence.

    Raises:
        TypeError: an argument has another type.
        ValueError: the shards do not have the layout's lengths, or differ in another dimension, dtype or layout.
        RuntimeError: another rank raised an error on its own input.
    """
    group = resolve_sequence_group(mesh, group, strategy)
    if group is None:
        _check_arguments("x_local", x_local, dim, layout)
        return x_local

    def header() -> _ShardHeader:
        axis = _check_arguments("x_local", x_local, dim, layout)  # if it raises, all ranks raise
        other_dims = (*x_local.shape[:axis], *x_local.shape[axis + 1 :])
        return _ShardHeader(x_local.shape[axis], fingerprint(axis, layout, x_local.dtype, other_dims))

    headers = all_gather_header(header, group)
    if len({header.spec for header in headers}) > 1:
        raise ValueError(
            f"x_local: the ranks of the group differ in dim, layout, dtype or a dimension other than {dim} "
            f"(here {x_local.dtype} {tuple(x_local.shape)}, layout={layout!r}); pass the same on every rank"
        )
    lengths = tuple(header.length for header in headers)
    check_lengths(lengths, layout)
    out: Tensor = _Unshard.apply(x_local, dim % x_local.dim(), group, layout, lengths)
    return out


@no_compile
def positions(
    seq_len: int,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: Layout = "contiguous",
    strategy: StrategyName | Literal["tp_sp"] | None = None,
) -> Tensor:
    """Global positions of this rank's tokens. Nothing is sent.

    Args:
        seq_len: the global length of the sequence, in tokens.
        mesh: as given to ``shard``.
        group: as given to ``shard``.
        layout: as given to ``shard``.
        strategy: as given to ``shard``.

    Returns:
        int64 ``[seq_local]`` on the CPU, increasing.

    Raises:
        TypeError: an argument has another type.
        ValueError: a negative ``seq_len``, or an unknown layout or strategy.
    """
    check_int("seq_len", seq_len, 0)
    check_choice("layout", layout, LAYOUTS)
    group = resolve_sequence_group(mesh, group, strategy)
    # A copy: the cached tensor must not be written to.
    return shard_positions(seq_len, size_of(group), rank_in(group), layout).clone()


class _ShardHeader(NamedTuple):
    """A rank's shard: its number of tokens, and everything that must be the same on every rank."""

    length: int
    spec: Fingerprint


def resolve_sequence_group(
    mesh: DeviceMesh | None, group: ProcessGroup | None, strategy: str | None
) -> ProcessGroup | None:
    """The ranks the sequence is sharded over, after checking the strategy's name."""
    if strategy is not None:
        check_choice("strategy", strategy, (*STRATEGIES, "tp_sp"))
    return sequence_group(mesh, group, strategy)


def _check_arguments(name: str, x: Tensor, dim: int, layout: Layout) -> int:
    """``dim`` counted from the front, after checking the arguments."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    check_choice("layout", layout, LAYOUTS)
    check_int("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: {name} has {x.dim()} dimensions, {tuple(x.shape)}; choose one of them")
    return dim % x.dim()


def _local_shard(x: Tensor, dim: int, group: ProcessGroup, layout: Layout) -> Tensor:
    """This rank's shard of ``x``, as a contiguous copy."""
    ranges = shard_ranges(x.shape[dim], group.size(), group.rank(), layout)
    index: list[slice] = [slice(None)] * x.dim()
    parts = []
    for r in ranges or (range(0),):  # a rank without tokens returns an empty tensor
        index[dim] = slice(r.start, r.stop, r.step)
        parts.append(x[tuple(index)])
    # Zigzag has two ranges. One range may be a view of x, so it is copied.
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous().clone()


def _all_gather_shards(
    x_local: Tensor, dim: int, group: ProcessGroup, layout: Layout, lengths: tuple[int, ...]
) -> Tensor:
    """The full tensor from every rank's shard; rank ``r`` holds ``lengths[r]`` tokens."""
    full = all_gather(x_local, lengths, dim, group)  # in the order of the ranks
    if layout == "contiguous":  # already in the order of the sequence
        return full.contiguous()
    return full.index_select(dim, global_order(sum(lengths), group.size(), layout).to(full.device))


class _Shard(torch.autograd.Function):
    """Forward selects this rank's shard, backward all-gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, layout: Layout) -> Tensor:
        ctx.spec = dim, group, layout
        ctx.lengths = tuple(shard_length(x.shape[dim], group.size(), rank, layout) for rank in range(group.size()))
        return _local_shard(x, dim, group, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, group, layout = ctx.spec
        return _all_gather_shards(grad, dim, group, layout, ctx.lengths), None, None, None


class _Unshard(torch.autograd.Function):
    """Forward all-gathers, backward selects this rank's shard."""

    @staticmethod
    def forward(
        ctx: Any, x_local: Tensor, dim: int, group: ProcessGroup, layout: Layout, lengths: tuple[int, ...]
    ) -> Tensor:
        ctx.spec = dim, group, layout
        return _all_gather_shards(x_local, dim, group, layout, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _local_shard(grad, *ctx.spec), None, None, None, None
