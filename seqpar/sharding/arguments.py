"""How the arguments of a call that say where tokens are fit together: sharding, layout, mesh and group."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch.distributed import DeviceMesh, ProcessGroup

from ..base.checks import check_int, no_compile
from ..placement.layout import LAYOUTS, Layout, check_layout
from ..ranks.mesh import check_mesh_and_group, shown, size_of
from .sharding import Sharding, global_ranks_or_own, resolve_sequence_group
from .worker import WorkerSharding


def require_layout(layout: Layout | None, group: ProcessGroup | None) -> Layout:
    """``layout``, which only a single rank may leave out.

    Raises:
        ValueError: it is None and the group has several ranks. A default could differ from the layout with which the
            tokens were sharded, and nothing would notice: shards of different layouts have equal lengths.
    """
    if layout is not None:
        return layout
    if (ranks := size_of(group)) > 1:
        raise ValueError(
            f"layout=None: over {ranks} ranks it is not assumed which tokens each rank holds; pass sharding=, the "
            "seqpar.Sharding that the tokens were sharded with, or the layout= that was given to seqpar.shard: "
            + ", ".join(map(repr, LAYOUTS))
        )
    return "contiguous"


@no_compile
def check_sharding(
    sharding: object,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    layout: Layout | None = None,
    seq_len: int | None = None,
    strategy: str | None = None,
    or_worker: bool = False,
) -> None:
    """Raise unless ``sharding`` is None or a Sharding, and equal to the arguments that are given beside it.

    ``or_worker``: it may be a WorkerSharding, because the call sends nothing.
    """
    if sharding is None:
        return
    if not isinstance(sharding, Sharding) and not (or_worker and isinstance(sharding, WorkerSharding)):
        why = "; this one has no process groups" if isinstance(sharding, WorkerSharding) else ""
        raise TypeError(f"sharding={sharding!r}: expected a seqpar.Sharding, as Sharding(seq_len) makes one{why}")
    check_mesh_and_group(mesh, group)
    own: object
    for name, value, own in (("layout", layout, sharding.layout), ("seq_len", seq_len, sharding.seq_len)):
        if value is not None and value != own:
            raise ValueError(f"{name}={value!r}: the sharding has {name}={own!r}; leave {name} out")
    if isinstance(sharding, WorkerSharding):
        if mesh is not None or group is not None or strategy is not None:
            raise ValueError(f"mesh, group and strategy: {sharding!r} has no process groups; leave them out")
        return
    if strategy is not None and (strategy == "tp_sp") != (sharding.strategy == "tp_sp"):
        raise ValueError(f"strategy={strategy!r}: the sharding has strategy={sharding.strategy!r}; leave strategy out")
    if mesh is not None and mesh != sharding.mesh:
        raise ValueError(f"mesh={mesh}: the sharding was made with mesh={sharding.mesh}; leave mesh out")
    if group is not None:
        given, ranks = global_ranks_or_own(group), global_ranks_or_own(sharding.sequence_group)
        if given != ranks:
            raise ValueError(
                f"group: its ranks are {shown(given)}, but the sharding's are {shown(ranks)}; leave group out"
            )


def layout_of(
    layout: Layout | None, mesh: DeviceMesh | None, group: ProcessGroup | None, strategy: str | None
) -> Layout:
    """``layout``, as ``shard`` takes it."""
    sequence_group = resolve_sequence_group(mesh, group, strategy)
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    in_context = mesh is not None and any(
        name in names and mesh.size(names.index(name)) > 1 for name in ("ring", "ulysses")
    )
    if layout is None and not in_context and ("tp" in names or strategy == "tp_sp"):
        return "contiguous"
    return require_layout(layout, sequence_group)


def sharding_of_one_rank(seq_len: int, layout: Layout, sequence_group: ProcessGroup | None, **where: Any) -> Sharding:
    """The sharding of a call without one, in which later calls of the same length find what was prepared for it.

    ``where`` are the mesh, the group and the strategy. The ``sequence_group`` that follows from them is a part of the
    key: meshes are equal if they have equal ranks, also if the groups of one of them have been destroyed.
    """
    check_int("seq_len", seq_len, 0)
    check_layout(layout)
    return _of_one_rank(seq_len, layout, sequence_group, **where)


@lru_cache(maxsize=16)
def _of_one_rank(seq_len: int, layout: Layout, sequence_group: ProcessGroup | None, **where: Any) -> Sharding:
    return Sharding(seq_len, layout, **where)
