"""Device meshes, the process groups over which the sequence and the weights are sharded, and the hosts of ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from ..base.checks import check_int
from ..base.settings import check_settings, text
from .calls import begin_again
from .in_process import RankInProcess
from .processes import check_own_process
from .rendezvous import group_timeout, is_simulated, store_all_gather
from .startup import check_alone, check_timeout, start_process_group, started_ranks

DIMENSIONS = ("dp", "ring", "ulysses", "tp")
# The dimensions of a mesh of the caller's own over which a loss and its gradients are averaged.
_AVERAGED = (*DIMENSIONS, "dp_replicate", "dp_shard")
# By mesh and names of dimensions: the group. Slicing a mesh takes a tenth of a millisecond, which calls avoid.
_mesh_groups: MutableMapping[DeviceMesh, dict[tuple[tuple[str, ...], bool], ProcessGroup]] = WeakIdKeyDictionary()

# By default group, device type and sizes: what ``init_mesh`` has made.
_meshes: MutableMapping[ProcessGroup, dict[tuple[Any, ...], DeviceMesh]] = WeakKeyDictionary()


def init_mesh(
    dp: int = 1,
    ring: int = 1,
    ulysses: int = 1,
    tp: int = 1,
    device_type: str | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    device_id: torch.device | int | None = None,
) -> DeviceMesh:
    """A DeviceMesh with the dimensions ``("dp", "ring", "ulysses", "tp")``.

    If no process group is running, this starts one: from torchrun's environment, on any number of hosts, or for this
    process alone. Processes that srun or mpirun started need torchrun's environment variables too.

    Rank order: tp is fastest, then ulysses, ring and dp, so that the ranks that communicate most are closest together.
    The sequence is sharded over ring x ulysses (rank = ring_rank * ulysses_size + ulysses_rank), and for
    ``strategy="tp_sp"`` over tp too. If ring and ulysses are 1, it is sharded over tp under every strategy.

    The ranks compare their sizes, so that all of them raise if they differ, and learn which of them share a host. So
    all ranks make every call. A call with the sizes of an earlier one returns the same mesh, as long as its process
    groups are running, because new ones would take memory and threads until the end of the job.

    Args:
        dp: number of replicas of the sequence group, which process different data.
        ring: number of ranks in each ring.
        ulysses: number of ranks in each all-to-all.
        tp: number of ranks that the weights of tensor-parallel layers are sharded over. One of the four sizes may be
            -1: it becomes the number of ranks divided by the other sizes.
        device_type: "cuda" or "cpu"; by default cuda if it is available.
        backend: as in ``torch.distributed.init_process_group``. The default for cpu is "gloo". The default for cuda is
            "cpu:gloo,cuda:nccl" for up to 256 ranks and "nccl" for more. With gloo, handshakes (see ``attention``) do
            not need the GPU. But gloo connects every rank with every other one when it starts, which fails in jobs of
            hundreds of hosts.
        timeout: how long an operation may wait for other ranks, in seconds or as a timedelta. Then the ranks that
            wait raise an error or, in NCCL, end their process. By default 10 minutes.
        device_id: the GPU of this rank, as an index or a torch.device. By default ``LOCAL_RANK``, which torchrun sets,
            or the only GPU that the process sees. NCCL is bound to it: it connects the ranks at once instead of at
            their first message, and makes the mesh's groups from that connection.

    ``backend``, ``timeout`` and ``device_id`` have no effect if a process group is already running.

    Returns:
        The mesh. All four dimensions are present, even if their size is 1.

    Raises:
        TypeError: an argument has another type.
        ValueError: an environment variable of the package has a value that it cannot have; the sizes do not fit the
            number of ranks, the ranks ask for different meshes, or it is not known
            which GPU this rank should use; or srun or mpirun started several processes without torchrun's variables.
        RuntimeError: some ranks did not call this within the timeout; the message names them.
    """
    sizes = {"dp": dp, "ring": ring, "ulysses": ulysses, "tp": tp}  # slowest to fastest: see DIMENSIONS
    for name, size in sizes.items():
        check_int(name, size)
        if size < 1 and size != -1:
            raise ValueError(f"{name}={size}: expected a size of at least 1, or -1 for all remaining ranks")
    if device_type is not None and not isinstance(device_type, str):
        raise TypeError(f"device_type={device_type!r}: expected 'cuda' or 'cpu', got {type(device_type).__name__}")
    if device_type not in (None, "cuda", "cpu"):
        raise ValueError(f"device_type={device_type!r}: expected 'cuda' or 'cpu'")
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    check_own_process("init_mesh")
    check_settings()
    # Sizes are checked before the process group starts, so that a bad size fails without a rendezvous.
    world = dist.get_world_size() if dist.is_initialized() else started_ranks()
    shape = _resolve_sizes(sizes, world)
    duration = check_timeout(timeout)
    if not dist.is_initialized():
        start_process_group(device_type, world, backend, duration, device_id)
    spec = device_type, *shape
    # Ranks whose calls came out of step after an error agree again here, also if the mesh exists.
    _agree_on_mesh(spec)
    assert dist.group.WORLD is not None
    if dist.group.WORLD not in _meshes:
        _meshes.clear()  # meshes keep their default group, also after it was destroyed
    meshes = _meshes.setdefault(dist.group.WORLD, {})
    running = dist.distributed_c10d._world.pg_map
    if spec in meshes and all(group in running for group in _mesh_groups[meshes[spec]].values()):
        return meshes[spec]
    mesh = dist.init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)
    # Flattening makes process groups, which is collective. So it is done here, not in the first call that needs one.
    set_timeouts(mesh)
    for names in (("ring", "ulysses"), ("ring", "ulysses", "tp"), ("dp", "ring", "ulysses")):
        dimension_group(mesh, names)
    meshes[spec] = mesh
    return mesh


def set_timeouts(*meshes: DeviceMesh) -> None:
    """Give the groups of new meshes the timeout of the default group. torch gives them its own, of 10 or 30 minutes."""
    world = dist.group.WORLD
    assert world is not None
    # The private function of older versions warns in torch 2.15, which has a public one.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in () if is_simulated() else {group for mesh in meshes for group in mesh.get_all_groups()}:
        set_timeout(group_timeout(world), group)


def _resolve_sizes(sizes: dict[str, int], world: int) -> tuple[int, ...]:
    """Replace a size of -1 by the remaining ranks, and check the product against ``world``."""
    open_names = [name for name, size in sizes.items() if size == -1]
    if len(open_names) > 1:
        raise ValueError(f"{' and '.join(open_names)} are -1: at most one mesh size may be -1; give the others a size")
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


def _agree_on_mesh(spec: tuple[Any, ...]) -> None:
    """Raise on every rank if the ranks ask for different meshes. Record the host of each rank."""
    world = dist.group.WORLD
    assert world is not None
    ranks = range(world.size())
    begin_again()
    entries = store_all_gather("init_mesh", ranks, json.dumps([spec, host_name()]), group_timeout(world))
    by_rank, hosts = zip(*map(json.loads, entries), strict=True)
    first_ranks: dict[tuple[Any, ...], int] = {}
    for rank, values in enumerate(by_rank):
        first_ranks.setdefault(tuple(values), rank)
    if len(first_ranks) > 1:
        names = ("device_type", *DIMENSIONS)
        shown = "; ".join(
            f"rank {rank}: " + ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
            for values, rank in first_ranks.items()
        )
        raise ValueError(f"init_mesh: the ranks ask for different meshes ({shown}); pass the same sizes on every rank")
    _hosts[world] = {tuple(ranks): hosts}


# By default group and global ranks: the host of each rank.
_hosts: MutableMapping[ProcessGroup, dict[tuple[int, ...], tuple[str, ...]]] = WeakKeyDictionary()


def ranks_by_host(group: Ranks) -> tuple[tuple[int, ...], ...]:
    """The ranks of ``group`` that share a host, host by host, in the order of their first ranks.

    ``init_mesh`` records the host of every rank. If it has not been called, the first call with these ranks is
    collective: all of them must make it.
    """
    hosts = _known_hosts(group)
    if hosts is None:
        members = global_ranks(group)
        timeout = group_timeout(parent_group(group))
        hosts = tuple(store_all_gather("the hosts of a group", members, host_name(), timeout))
        assert dist.group.WORLD is not None
        _hosts.setdefault(dist.group.WORLD, {})[members] = hosts
    return _ranks_of_equal(hosts)


def known_per_host(group: ProcessGroup | None) -> int:
    """How many consecutive ranks of ``group`` share a host: 1 if they are irregular, all as long as the hosts are not
    known. The same on every rank. Never communicates."""
    if group is None or not _known_hosts(group):
        return size_of(group)
    hosts = ranks_by_host(group)
    per_host = ranks_per_host(hosts)
    return 1 if len(hosts) > 1 and per_host == group.size() else per_host


def ranks_on_other_hosts(group: Ranks) -> frozenset[int]:
    """The ranks of ``group`` on other hosts than this one. Empty as long as the hosts are not known."""
    if _known_hosts(group) is None:
        return frozenset()
    this_host = next(ranks for ranks in ranks_by_host(group) if group.rank() in ranks)
    return frozenset(range(group.size())).difference(this_host)


def _known_hosts(group: Ranks) -> tuple[str, ...] | None:
    """The host of each of the ranks; None before ``init_mesh`` and the first ``ranks_by_host`` of these."""
    members, parent = global_ranks(group), parent_group(group)
    if isinstance(parent, RankInProcess):
        return tuple(str(rank // parent.crew.per_host) for rank in members)
    if is_simulated():  # one process acts as a rank of many: hosts have LOCAL_WORLD_SIZE ranks, as under torchrun
        return tuple(str(rank // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) for rank in members)
    world = dist.group.WORLD
    assert world is not None
    hosts = _hosts.setdefault(world, {})
    if members not in hosts and (of_world := hosts.get(tuple(range(world.size())))) is not None:
        hosts[members] = tuple(of_world[rank] for rank in members)
    return hosts.get(members)


def _ranks_of_equal(values: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return tuple(map(tuple, ranks.values()))


def host_name() -> str:
    """A name that is unique to this host: the environment variable ``SEQPAR_HOST``, or the host's name and boot id,
    because containers may have equal host names."""
    if (name := text("SEQPAR_HOST")) is not None:
        return name
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def check_mesh_and_group(mesh: DeviceMesh | None, group: ProcessGroup | None) -> None:
    """Raise if both are given, or one of them has another type."""
    if mesh is not None and group is not None:
        raise ValueError("mesh and group: expected at most one of them, got both; leave one out")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r}: expected a torch.distributed DeviceMesh; seqpar.init_mesh makes one")
    if group is not None and not isinstance(group, ProcessGroup):
        raise TypeError(f"group={group!r}: expected a torch.distributed ProcessGroup that this rank belongs to")


def default_group() -> ProcessGroup | None:
    """The ranks of a call that is given neither a mesh nor a group. None without torch.distributed.

    Raises:
        ValueError: a launcher has started several processes, and no process group is running in this one.
    """
    if not dist.is_initialized():
        check_alone()
    return dist.group.WORLD


def sequence_group_of(
    mesh: DeviceMesh | None = None, group: ProcessGroup | None = None, strategy: str | None = None
) -> ProcessGroup | None:
    """The group over which the sequence is sharded. None in a process that is a rank alone (see ``default_group``).

    * ``group`` is given: ``group`` itself.
    * ``mesh`` has one dimension: its only group.
    * ``mesh`` has ring and ulysses dimensions: both together (rank = ring_rank * ulysses_size + ulysses_rank). For
      ``strategy="tp_sp"`` the tp dimension belongs to it too (tp_rank fastest). If ring x ulysses is one rank, the
      sequence is sharded over tp under every strategy.
    * neither is given: the default group.

    Raises:
        TypeError, ValueError: see ``check_mesh_and_group`` and ``default_group``.
    """
    check_mesh_and_group(mesh, group)
    if group is not None:
        return group
    if mesh is None:
        return default_group()
    if mesh.ndim == 1:
        return dimension_group(mesh, ())
    names, all_names = _sequence_dimensions(mesh), mesh.mesh_dim_names or ()
    one_rank = all(mesh.size(all_names.index(name)) == 1 for name in names)
    if "tp" in all_names and (strategy == "tp_sp" or one_rank):
        return dimension_group(mesh, (*names, "tp"))
    return context_group(mesh)


def context_group(mesh: DeviceMesh) -> ProcessGroup:
    """The mesh's ring and ulysses dimensions together, without tp under every strategy."""
    return dimension_group(mesh, _sequence_dimensions(mesh))


def ulysses_size(mesh: DeviceMesh | None) -> int:
    """The ranks of the mesh's dimension "ulysses"; 1 without one."""
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
    return mesh.size(names.index("ulysses")) if mesh is not None and "ulysses" in names else 1


def averaged_dimensions(mesh: DeviceMesh) -> tuple[str, ...]:
    """The dimensions of ``mesh`` over which losses and gradients are averaged: all of them.

    Raises:
        ValueError: the ranks along a dimension may have other parameters, as pipeline stages do.
    """
    names = mesh.mesh_dim_names or ()
    if other := [name for name in names if name not in _AVERAGED]:
        known = tuple(name for name in names if name in _AVERAGED)
        raise ValueError(
            f"mesh: its dimensions are {names}; it is not known whether the ranks along {other[0]!r} hold the same "
            f"parameters; pass the part of the mesh whose ranks do, such as mesh[{', '.join(map(repr, known))}]"
        )
    return names


def all_ranks_group(mesh: DeviceMesh | None, group: ProcessGroup | None) -> ProcessGroup | None:
    """The ranks whose mean loss is the objective: all ranks of ``mesh``, or ``group``, or the default group."""
    if mesh is None or mesh.ndim == 1:
        return sequence_group_of(mesh, group)
    check_mesh_and_group(mesh, group)
    names = averaged_dimensions(mesh)
    return dist.group.WORLD if mesh.size() == dist.get_world_size() else dimension_group(mesh, names, False)


def dimension_group(mesh: DeviceMesh, names: tuple[str, ...], ordered: bool = True) -> ProcessGroup:
    """The group of one of the mesh's dimensions, or of several together. Cached by the mesh's identity.

    Making the group of several is collective. ``init_mesh`` makes those that are needed.

    Args:
        mesh: the mesh.
        names: the dimensions, slowest to fastest; none for a mesh of one dimension.
        ordered: whether the order of the ranks matters.

    Raises:
        ValueError: the mesh has ranks in another order than their group, which torch sorts, and the order matters.
    """
    groups = _mesh_groups.setdefault(mesh, {})
    if (found := groups.get((names, ordered))) is not None:
        return found
    all_names = mesh.mesh_dim_names or ()
    large = tuple(n for n in names if mesh.size(all_names.index(n)) > 1) or names[-1:]
    if large != names:
        group = dimension_group(mesh, large, ordered)
    else:
        dims = [all_names.index(name) for name in names] or [0]
        with unset_fake_temporarily():  # the ranks are known also while tensors are fake
            last = mesh.mesh.movedim(dims, [*range(-len(dims), 0)]).flatten(-len(dims))  # [..., ranks of a group]
            by_group = last.reshape(-1, last.shape[-1]).tolist()
        for ranks in by_group if ordered else ():
            if ranks != sorted(ranks):
                raise ValueError(
                    f"mesh: its ranks along {' x '.join(names) or 'its dimension'} are {shown(ranks)}; expected "
                    "increasing numbers, in which order torch sorts the ranks of a group; make the mesh with "
                    "seqpar.init_mesh"
                )
        part = mesh[tuple(sorted(names, key=all_names.index))] if names else mesh
        if len(names) > 1:
            check_own_process("mesh: making the group of several dimensions")
            part = part._flatten("_".join(names))
            set_timeouts(part)
        group = part.get_group()
    groups[names, ordered] = group
    return group


def shown(ranks: Sequence[int]) -> str:
    """The first ranks, for error messages."""
    return f"[{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}]"


def tensor_group(mesh: DeviceMesh | None = None, group: ProcessGroup | None = None) -> ProcessGroup | None:
    """The group over which weights are sharded: ``group``, the mesh's tp dimension or only dimension, or the default
    group."""
    if mesh is None or mesh.ndim == 1:
        return sequence_group_of(mesh, group)
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f"mesh: its dimensions are {mesh.mesh_dim_names}; expected one named 'tp'; make it with seqpar.init_mesh"
        )
    return dimension_group(mesh, ("tp",))


def _sequence_dimensions(mesh: DeviceMesh) -> tuple[str, ...]:
    names = tuple(name for name in ("ring", "ulysses") if name in (mesh.mesh_dim_names or ()))
    if not names:
        raise ValueError(
            f"mesh: its dimensions are {mesh.mesh_dim_names}; expected one named 'ring' or 'ulysses', or a mesh of one "
            "dimension; make it with seqpar.init_mesh"
        )
    return names


@dataclass(frozen=True)
class Subgroup:
    """Some of a ProcessGroup's ranks. ``comm.communicator`` makes the process group in which they exchange messages.

    Attributes:
        parent: the process group.
        ranks: ranks in ``parent``; rank ``i`` of the subgroup is ``ranks[i]``.
    """

    parent: ProcessGroup
    ranks: tuple[int, ...]

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.parent.rank())


Ranks = ProcessGroup | Subgroup


def parent_group(ranks: Ranks) -> ProcessGroup:
    """The process group that the caller gave, of which ``ranks`` are all ranks or some."""
    return ranks.parent if isinstance(ranks, Subgroup) else ranks


def global_ranks(ranks: Ranks) -> tuple[int, ...]:
    """The ranks of ``ranks`` as ranks of the default group, in the order of ``ranks``."""
    parent = parent_group(ranks)
    if isinstance(parent, RankInProcess):
        return ranks.ranks if isinstance(ranks, Subgroup) else tuple(range(parent.size()))
    try:
        of_parent = dist.get_process_group_ranks(parent)
    except KeyError:
        raise ValueError(
            "group: its process group has been destroyed (destroy_process_group); make the mesh, the group and the "
            "Sharding again, with the process groups that are running"
        ) from None
    return tuple(of_parent[rank] for rank in ranks.ranks) if isinstance(ranks, Subgroup) else tuple(of_parent)


def ranks_per_host(hosts: Sequence[tuple[int, ...]]) -> int:
    """How many consecutive ranks share a host, if there are several and the same number on each of ``hosts``; otherwise
    the number of all ranks."""
    size = len(hosts[0])
    regular = all(host == tuple(range(i * size, (i + 1) * size)) for i, host in enumerate(hosts))
    return size if regular and size > 1 else sum(map(len, hosts))


def size_of(group: Ranks | None) -> int:
    """The number of ranks in ``group``; None is one rank."""
    return 1 if group is None else group.size()


def rank_in(group: Ranks | None) -> int:
    """This process's rank in ``group``; None is one rank."""
    return 0 if group is None else group.rank()


def ring_and_ulysses_ranks(
    mesh: DeviceMesh | None, group: ProcessGroup | None, ulysses_size: int | None
) -> tuple[Ranks | None, Ranks | None]:
    """This process's ring and all-to-all in a hybrid of both.

    They are the mesh's ring and ulysses dimensions. A plain group (or a mesh with ``ulysses_size``, or one that shards
    the sequence over tp, see ``sequence_group_of``) is divided into blocks of ``ulysses_size`` consecutive ranks, by
    default the largest divisor of its size up to the square root. The ranks of one block take part in one all-to-all,
    and the ranks with the same index in their blocks form a ring.

    Returns:
        ``(ring, ulysses)``, each None if it is this rank alone.
    """
    sequence_group = sequence_group_of(mesh, group)
    if mesh is not None and mesh.ndim > 1 and ulysses_size is None and sequence_group is context_group(mesh):
        names = _sequence_dimensions(mesh)
        ring, ulysses = (dimension_group(mesh, (name,)) if name in names else None for name in ("ring", "ulysses"))
        return ring, ulysses
    ranks = size_of(sequence_group)
    if ulysses_size is None:
        ulysses_size = max(d for d in range(1, int(ranks**0.5) + 1) if ranks % d == 0)
    check_int("ulysses_size", ulysses_size)
    if ulysses_size < 1 or ranks % ulysses_size:
        divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        raise ValueError(
            f"ulysses_size={ulysses_size}: expected a divisor of the group's {ranks} ranks; choose one of {divisors}"
        )
    if sequence_group is None or ulysses_size == 1:
        return sequence_group, None
    if ulysses_size == ranks:
        return None, sequence_group
    rank = rank_in(sequence_group)
    first = rank // ulysses_size * ulysses_size
    ring_ranks = tuple(range(rank % ulysses_size, ranks, ulysses_size))
    ulysses_ranks = tuple(range(first, first + ulysses_size))
    return Subgroup(sequence_group, ring_ranks), Subgroup(sequence_group, ulysses_ranks)
