"""Cutting tensors along the sequence and putting them together again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from .checks import check_choice, check_int, no_compile
from .comm.collectives import all_gather
from .comm.handshake import Fingerprint, all_gather_header, fingerprint
from .layout import LAYOUTS, check_lengths, global_order, shard_length, shard_positions, shard_ranges
from .mesh import rank_in, sequence_group, size_of


@no_compile
def shard(
    x: Tensor,
    dim: int = 1,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "contiguous",
    strategy: str | None = None,
) -> Tensor:
    """This rank's part of ``x``, which every rank holds whole.

    Args:
        x: any tensor; ``dim`` is its sequence, of any length, fewer tokens than ranks included.
        group, mesh: the ranks the sequence is sharded over: of a mesh ring x ulysses, and tp too for
            ``strategy="tp_sp"`` or where it is all there is (``seqpar.mesh.sequence_group``).
        layout: "contiguous", "zigzag" or "striped". A length cut in ``m`` parts gives the first ``length % m`` parts
            one token more (``m`` is the number of ranks, twice that for zigzag).

    Differentiable: ``x`` is replicated, so its gradient is the whole one on every rank (gathered from the shards'),
    as in Megatron-LM. All ranks of the group must run the backward.
    """
    group = sequence_group(mesh, group, strategy)
    dim = _check(x, dim, layout)
    return x if group is None else _Shard.apply(x, dim, group, layout)


@no_compile
def unshard(
    x_local: Tensor,
    dim: int = 1,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "contiguous",
    strategy: str | None = None,
) -> Tensor:
    """The whole tensor, on every rank, from the shards ``x_local`` that ``shard`` gives.

    Differentiable: the result is replicated and so is its gradient, of which each rank takes its part.

    Raises:
        ValueError: shards that do not have the lengths of the layout, or differ in another dimension.
    """
    group = sequence_group(mesh, group, strategy)
    if group is None:
        _check(x_local, dim, layout)
        return x_local

    def header() -> _ShardHeader:
        axis = _check(x_local, dim, layout)
        others = (*x_local.shape[:axis], *x_local.shape[axis + 1 :])
        return _ShardHeader(x_local.shape[axis], fingerprint(axis, layout, x_local.dtype, others))

    headers = all_gather_header(header, group)
    if len({header.others for header in headers}) > 1:
        raise ValueError(
            f"x_local: the ranks of the group differ in dim, layout, dtype or a dimension other than {dim} "
            f"(here {x_local.dtype} {tuple(x_local.shape)}, layout={layout!r}); pass the same on every rank"
        )
    lengths = [header.length for header in headers]
    check_lengths(lengths, layout)
    return _Unshard.apply(x_local, dim % x_local.dim(), group, layout, tuple(lengths))


@no_compile
def positions(
    seq_len: int,
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    layout: str = "contiguous",
    strategy: str | None = None,
) -> Tensor:
    """Global positions of this rank's tokens, int64 ``[seq_local]``, increasing.

    ``seq_len`` is the whole sequence's length.
    """
    check_int("seq_len", seq_len, 0)
    check_choice("layout", layout, LAYOUTS)
    group = sequence_group(mesh, group, strategy)
    return shard_positions(seq_len, size_of(group), rank_in(group), layout).clone()


class _ShardHeader(NamedTuple):
    """A shard: its tokens, and a fingerprint of what must be the same on every rank."""

    length: int
    others: Fingerprint


def _check(x: Tensor, dim: int, layout: str) -> int:
    """``dim`` counted from the front."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x={type(x).__name__}: a tensor is needed")
    check_choice("layout", layout, LAYOUTS)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim={dim!r}: an int is needed")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim}: x has {x.dim()} dimensions {tuple(x.shape)}; name one of them")
    return dim % x.dim()


def _take(x: Tensor, dim: int, group: ProcessGroup, layout: str) -> Tensor:
    ranges = shard_ranges(x.shape[dim], group.size(), group.rank(), layout)
    index: list[Any] = [slice(None)] * x.dim()
    pieces = []
    for r in ranges or (range(0),):
        index[dim] = slice(r.start, r.stop, r.step)
        pieces.append(x[tuple(index)])
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].contiguous().clone()


def _join(x: Tensor, dim: int, group: ProcessGroup, layout: str, lengths: tuple[int, ...]) -> Tensor:
    whole = all_gather(x, lengths, dim, group)
    if layout == "contiguous":
        return whole.contiguous()
    return whole.index_select(dim, global_order(sum(lengths), group.size(), layout).to(x.device))


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, layout: str) -> Tensor:
        ctx.how = dim, group, layout
        ctx.lengths = tuple(shard_length(x.shape[dim], group.size(), rank, layout) for rank in range(group.size()))
        return _take(x, dim, group, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        dim, group, layout = ctx.how
        return _join(grad, dim, group, layout, ctx.lengths), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, layout: str, lengths: tuple[int, ...]) -> Tensor:
        ctx.how = dim, group, layout
        return _join(x, dim, group, layout, lengths)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _take(grad, *ctx.how), None, None, None, None
