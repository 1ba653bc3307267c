"""Device meshes and the process groups the sequence is sharded over. All arithmetic of degrees stands here."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

DIMENSIONS = ("dp", "ring", "ulysses", "tp")
_SEQUENCE, _SEQUENCE_TP = "sequence", "sequence_tp"


def init_mesh(dp: int = 1, ring: int = 1, ulysses: int = 1, tp: int = 1, device_type: str | None = None) -> DeviceMesh:
    """A DeviceMesh with the dimensions ``("dp", "ring", "ulysses", "tp")``.

    Starts the process group when none is running: from torchrun's environment, on any number of hosts, or for one
    process alone. The backend is nccl for cuda (with gloo beside it for tensors on the host) and gloo for cpu.
    Rank order: tp fastest, then ulysses, ring, dp, so that what talks most sits closest.

    Args:
        dp, ring, ulysses, tp: sizes; one of them may be -1, which takes the ranks that remain.
        device_type: "cuda" or "cpu"; by default cuda where there is one.

    Raises:
        TypeError, ValueError: sizes that are not positive ints or whose product is not the number of ranks.
    """
    sizes = {"dp": dp, "ring": ring, "ulysses": ulysses, "tp": tp}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name}={size!r}: a mesh size is an int")
        if size < 1 and size != -1:
            raise ValueError(f"{name}={size}: a mesh size is at least 1, or -1 for the ranks that remain")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    shape = _fill(sizes, world)
    if not dist.is_initialized():
        _start(device_type)
    mesh = dist.init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)
    # Made now, by all ranks together.
    mesh["ring", "ulysses"]._flatten(_SEQUENCE)
    mesh["ring", "ulysses", "tp"]._flatten(_SEQUENCE_TP)
    return mesh


def _fill(sizes: dict[str, int], world: int) -> tuple[int, ...]:
    """The sizes with -1 filled in, checked against the number of ranks."""
    open_names = [name for name, size in sizes.items() if size == -1]
    if len(open_names) > 1:
        raise ValueError(f"{' and '.join(open_names)} are -1: only one mesh size may be left open")
    product = 1
    for size in sizes.values():
        product *= size if size > 0 else 1
    spelled = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if open_names and world % product == 0:
        sizes = {**sizes, open_names[0]: world // product}
    elif open_names or product != world:
        raise ValueError(
            f"mesh {spelled} does not fit {world} rank(s): the product of the sizes must be {world}; "
            "change a size or start another number of ranks"
        )
    return tuple(sizes.values())


def _start(device_type: str) -> None:
    """Start the default process group from torchrun's environment, or for this process alone."""
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # What starts the group ends it: gloo's threads must not outlive the interpreter.
    atexit.register(_stop)


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def sequence_group(
    mesh: DeviceMesh | None = None, group: ProcessGroup | None = None, strategy: str | None = None
) -> ProcessGroup | None:
    """The group over which the sequence is sharded.

    ``group`` itself; or the mesh's ring and ulysses dimensions together (rank = ring_rank * ulysses +
    ulysses_rank), and for ``strategy="tp_sp"`` its tp dimension too (tp_rank fastest); or a one-dimensional mesh's
    only group. A mesh of tp alone shards the sequence over tp. With neither mesh nor group, the default group, and
    None when torch.distributed is not initialised: one process.
    """
    if mesh is not None and group is not None:
        raise ValueError("mesh and group: give one of them, not both")
    if group is not None:
        if not isinstance(group, ProcessGroup):
            raise TypeError(f"group={group!r}: a torch.distributed ProcessGroup that this rank belongs to is needed")
        return group
    if mesh is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r}: a torch.distributed DeviceMesh is needed (seqpar.init_mesh makes one)")
    if mesh.ndim == 1:
        return mesh.get_group()
    names = _sequence_dimensions(mesh)
    if "tp" in (mesh.mesh_dim_names or ()) and (strategy == "tp_sp" or mesh[names].size() == 1):
        dimensions = (*names, "tp")
        return mesh[dimensions]._flatten(_SEQUENCE_TP).get_group()
    return context_group(mesh)


def context_group(mesh: DeviceMesh) -> ProcessGroup:
    """The mesh's ring and ulysses dimensions together, whatever its tp dimension is used for."""
    names = _sequence_dimensions(mesh)
    return mesh[names[0]].get_group() if len(names) == 1 else mesh[names]._flatten(_SEQUENCE).get_group()


def tensor_group(mesh: DeviceMesh | None = None, group: ProcessGroup | None = None) -> ProcessGroup | None:
    """The group over which weights are sharded: ``group`` itself, the mesh's tp dimension, or a one-dimensional
    mesh's only group."""
    if mesh is None or mesh.ndim == 1:
        return sequence_group(mesh, group)
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"mesh with dimensions {mesh.mesh_dim_names}: a dimension named 'tp' is needed")
    return mesh["tp"].get_group()


def _sequence_dimensions(mesh: DeviceMesh) -> tuple[str, ...]:
    names = tuple(name for name in ("ring", "ulysses") if name in (mesh.mesh_dim_names or ()))
    if not names:
        raise ValueError(
            f"mesh with dimensions {mesh.mesh_dim_names}: a dimension named 'ring' or 'ulysses' is needed, "
            "or a mesh of one dimension"
        )
    return names


@dataclass(frozen=True)
class Subgroup:
    """Some ranks of a process group, which all of them know and none has to set up: a group within a group.

    Making a process group of a group's ranks needs every rank of the world, or every member to have made as many
    groups before (torch names them by that number); a subgroup needs nobody.
    """

    parent: ProcessGroup
    ranks: tuple[int, ...]  # in ``parent``

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.parent.rank())


Ranks = ProcessGroup | Subgroup


def parent_group(ranks: Ranks) -> ProcessGroup:
    """The process group that carries the messages of ``ranks``."""
    return ranks.parent if isinstance(ranks, Subgroup) else ranks


def rank_in_parent(ranks: Ranks, rank: int) -> int:
    """The rank in that process group of ``rank`` of ``ranks``."""
    return ranks.ranks[rank] if isinstance(ranks, Subgroup) else rank


@dataclass(frozen=True)
class AttentionGroups:
    """Who takes part in one attention call; a None stands for one rank.

    The sequence is sharded over ``sequence``; heads and tokens change places inside ``ulysses``; keys and values
    travel inside ``ring``. ``gather``: the ring's keys are fetched in one step.
    """

    sequence: ProcessGroup | None = None
    ring: Ranks | None = None
    ulysses: Ranks | None = None
    gather: bool = False

    @property
    def ring_size(self) -> int:
        return size_of(self.ring)

    @property
    def ring_rank(self) -> int:
        return rank_in(self.ring)

    @property
    def ulysses_size(self) -> int:
        return size_of(self.ulysses)


def size_of(group: Ranks | None) -> int:
    """Ranks in ``group``; None is one rank."""
    return 1 if group is None else group.size()


def rank_in(group: Ranks | None) -> int:
    """This process's rank in ``group``; None is one rank."""
    return 0 if group is None else group.rank()


def two_dimensional(
    mesh: DeviceMesh | None, group: ProcessGroup | None, ulysses_size: int | None
) -> tuple[Ranks | None, Ranks | None]:
    """The (ring, ulysses) ranks of a hybrid: the mesh's dimensions, or a plain group cut by ``ulysses_size``."""
    if mesh is not None and mesh.ndim > 1 and ulysses_size is None:
        names = _sequence_dimensions(mesh)
        ring, ulysses = (mesh[name].get_group() if name in names else None for name in ("ring", "ulysses"))
        return ring, ulysses
    whole = sequence_group(mesh, group)
    ranks = size_of(whole)
    if ulysses_size is None:
        ulysses_size = max(d for d in range(1, int(ranks**0.5) + 1) if ranks % d == 0)
    if isinstance(ulysses_size, bool) or not isinstance(ulysses_size, int):
        raise TypeError(f"ulysses_size={ulysses_size!r}: an int is needed")
    if ulysses_size < 1 or ranks % ulysses_size:
        divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        raise ValueError(f"ulysses_size={ulysses_size}: it must divide the group's {ranks} ranks: {divisors}")
    if whole is None or ulysses_size == 1:
        return whole, None
    if ulysses_size == ranks:
        return None, whole
    first = rank_in(whole) // ulysses_size * ulysses_size
    across = range(rank_in(whole) % ulysses_size, ranks, ulysses_size)
    return Subgroup(whole, tuple(across)), Subgroup(whole, tuple(range(first, first + ulysses_size)))
