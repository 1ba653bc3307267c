"""``shard``, ``unshard`` and ``positions``: the methods of a ``Sharding`` for a call that does not keep one.

Shapes: a tensor has ``seq`` entries along ``dim``, and its shard has ``seq_local``. All other dimensions are arbitrary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ..base.checks import no_compile
from ..comm.handshake import Fingerprint, all_gather_header, fingerprint, propagate_errors
from ..placement.layout import Layout, check_layout, check_lengths
from ..placement.strategies import StrategyName
from .arguments import check_sharding, layout_of
from .sharding import Sharding, resolve_sequence_group
from .shards import check_dim
from .worker import WorkerSharding


@no_compile
def shard(
    x: Tensor,
    dim: int = 1,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: Layout | None = None,
    sharding: Sharding | WorkerSharding | None = None,
    strategy: StrategyName | Literal["tp_sp"] | None = None,
    check: bool = False,
) -> Tensor:
    """``Sharding(x.shape[dim], layout, ...).shard(x, dim)``: this rank's shard of ``x``. Nothing is sent.

    Args:
        x: tensor of any dtype and shape, the same on every rank. It may have fewer tokens than there are ranks.
        dim: the dimension of the sequence.
        mesh: the sequence is sharded over its ring and ulysses dimensions.
        group: the ranks the sequence is sharded over, instead of a mesh. With neither, the default group.
        layout: which tokens each rank holds: "contiguous", "zigzag", "striped" or a ``seqpar.Assigned``. It may be left
            out for a single rank, and for ranks that are tensor-parallel alone ("tp_sp"), whose layout is then
            "contiguous".
        sharding: instead of the other arguments; the call is then ``sharding.shard(x, dim)``.
        strategy: with "tp_sp" the sequence is sharded over the mesh's tp dimension too. No other strategy makes a
            difference.
        check: whether the ranks compare their ``x`` (see ``Sharding.shard``).

    Returns:
        ``x`` with ``seq_local`` of ``seq`` entries along ``dim``, contiguous. ``seq`` need not divide by anything:
        shards may differ in length.

    Raises:
        TypeError: an argument has another type.
        ValueError: no layout over several ranks, an unknown layout or strategy, a ``dim`` that ``x`` does not have, a
            mesh without the dimensions, or an argument that differs from the sharding.
    """
    if sharding is None:
        axis = check_dim("x", x, dim)
        layout = layout_of(layout, mesh, group, strategy)
        sharding = Sharding(x.shape[axis], layout, mesh=mesh, group=group, strategy=strategy)
    else:
        check_sharding(sharding, mesh=mesh, group=group, layout=layout, strategy=strategy, or_worker=True)
    return sharding.shard(x, dim, check=check)


@no_compile
def unshard(
    x_local: Tensor,
    dim: int = 1,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: Layout | None = None,
    sharding: Sharding | None = None,
    strategy: StrategyName | Literal["tp_sp"] | None = None,
) -> Tensor:
    """The full tensor on every rank, all-gathered from the shards that ``shard`` returned.

    Without ``sharding`` a handshake comes first, in which the ranks learn the length of the sequence and compare their
    shards. See ``Sharding.unshard``. All arguments but ``x_local`` are as given to ``shard``.

    Args:
        x_local: this rank's shard, with ``seq_local`` entries along ``dim``.

    Returns:
        ``x_local`` with ``seq`` entries along ``dim``, in the order of the sequence.

    Raises:
        TypeError: an argument has another type.
        ValueError: the shards do not have the layout's lengths, or differ in another dimension, dtype or layout; or an
            argument differs from the sharding.
        RuntimeError: another rank raised an error on its own input.
    """
    if sharding is not None:
        check_sharding(sharding, mesh=mesh, group=group, layout=layout, strategy=strategy)
        return sharding.unshard(x_local, dim)
    sequence_group = resolve_sequence_group(mesh, group, strategy)
    with propagate_errors(sequence_group):
        layout = layout_of(layout, mesh, group, strategy)

    def header() -> _ShardHeader:
        axis = check_dim("x_local", x_local, dim)  # if it raises, all ranks raise
        check_layout(layout)
        other_dims = (*x_local.shape[:axis], *x_local.shape[axis + 1 :])
        return _ShardHeader(x_local.shape[axis], fingerprint(axis, layout, x_local.dtype, other_dims))

    headers = all_gather_header(header, sequence_group)
    if len({header.spec for header in headers}) > 1:
        raise ValueError(
            f"x_local: the ranks of the group differ in dim, layout, dtype or a dimension other than {dim} "
            f"(here {x_local.dtype} {tuple(x_local.shape)}, layout={layout!r}); pass the same on every rank"
        )
    seq_len = check_lengths([header.length for header in headers], layout)
    return Sharding(seq_len, layout, mesh=mesh, group=group, strategy=strategy).unshard(x_local, dim)


@no_compile
def positions(
    seq_len: int | None = None,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: Layout | None = None,
    sharding: Sharding | WorkerSharding | None = None,
    strategy: StrategyName | Literal["tp_sp"] | None = None,
) -> Tensor:
    """``Sharding(seq_len, layout, ...).positions()``: global positions of this rank's tokens. Nothing is sent.

    All arguments but ``seq_len`` are as given to ``shard``.

    Args:
        seq_len: the length of the full sequence, in tokens; not needed with ``sharding``.

    Returns:
        int64 ``[seq_local]`` on the CPU, increasing.

    Raises:
        TypeError: an argument has another type.
        ValueError: a negative ``seq_len``, an unknown layout or strategy, or an argument that differs from the
            sharding.
    """
    if sharding is None:
        if seq_len is None:
            raise TypeError("seq_len=None: expected the length of the full sequence, or a sharding")
        layout = layout_of(layout, mesh, group, strategy)
        sharding = Sharding(seq_len, layout, mesh=mesh, group=group, strategy=strategy)
    else:
        check_sharding(
            sharding, mesh=mesh, group=group, layout=layout, seq_len=seq_len, strategy=strategy, or_worker=True
        )
    return sharding.positions()


class _ShardHeader(NamedTuple):
    """A rank's shard: its number of tokens, and everything that must be the same on every rank."""

    length: int
    spec: Fingerprint
