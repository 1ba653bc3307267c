"""Attention's own process groups: which ranks make them, how often, what is sent in them, and how long they live."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar.comm import collectives, nccl
from seqpar.comm.communicator import communicator, existing_communicators
from seqpar.comm.p2p import connect, without_messages
from seqpar.ranks.mesh import Subgroup, global_ranks, ranks_by_host

from ..fake_cuda import fake_cuda
from ..pool import OwnPool, Pool, mesh_of, on_ranks, start
from ..reference import assert_error
from ..strategy_cases import DISTINCT, STRATEGIES

CPU = torch.device("cpu")


@contextmanager
def groups_of_payload(used: list[ProcessGroup]) -> Iterator[None]:
    """Note the group of every message that is not a handshake's header. Meant for backends of the CPU."""
    methods: tuple[str, ...] = (
        "send",
        "recv",
        "alltoall_base",
        "allreduce",
        "broadcast",
        "_allgather_base",
        "_reduce_scatter_base",
    )
    methods += ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
    before = {name: vars(ProcessGroup)[name] for name in methods if name in vars(ProcessGroup)}

    def spy(name: str) -> Callable[..., Any]:
        def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
            if any(x.dtype != torch.int64 for x in tensors):
                used.append(self)
            return before[name].__get__(self)(*args, **kwargs)

        return call

    for name in before:
        setattr(ProcessGroup, name, spy(name))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(ProcessGroup, name, method)


def step(**arguments: Any) -> None:
    """Forward and backward of one call."""
    q = torch.randn(1, 8, 4, 16, requires_grad=True)  # [b, s, h, d]
    seqpar.attention(q, q, q, layout="contiguous", **arguments).sum().backward()


def made() -> list[ProcessGroup]:
    """The communicators of this process."""
    return existing_communicators()


@on_ranks
def payload_groups(group: ProcessGroup, options: dict[str, Any]) -> tuple[bool, bool, int]:
    """Whether a payload went through another group, whether all were made once, and the number of payloads."""
    used: list[ProcessGroup] = []
    step(group=group, **options)
    first = made()
    known = [each for each in (group, *dist.distributed_c10d._world.pg_map) if each not in first]
    with groups_of_payload(used):
        for _ in range(2):
            step(group=group, **options)
    return any(x is y for x in used for y in known), made() == first, len(used)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", DISTINCT)
def test_messages_have_groups_of_their_own(pool: Pool, name: str, world: int) -> None:
    for through_known, same, messages in pool.run(world, payload_groups, STRATEGIES[name]):
        assert not through_known and same and messages


@on_ranks
def one_for_equal_ranks(group: ProcessGroup) -> bool:
    """All ranks of a group have its communicator; another group with the same ranks has its own."""
    first = communicator(group, CPU)
    all_ranks = communicator(Subgroup(group, tuple(range(group.size()))), CPU)
    of_mesh = communicator(mesh_of(1, -1, 1, 1).get_group("ring"), CPU)
    return first is all_ranks and first is not of_mesh


def test_a_group_has_a_communicator_of_its_own(pool: Pool) -> None:
    assert all(pool.run(8, one_for_equal_ranks))


@on_ranks
def collectives_of_wrong_sizes(group: ProcessGroup) -> list[str]:
    """What torch's collectives raise for buffers of the wrong size, in each kind of group."""
    two, three = torch.zeros(2), torch.zeros(3)
    errors = []
    for each in (group, communicator(group, CPU), communicator(group, CPU, "handshake")):
        calls: list[Callable[[], Any]] = [
            lambda: collectives.all_gather_single(three, two, group=each),  # noqa: B023
            lambda: collectives.reduce_scatter_single(two, three, group=each),  # noqa: B023
            lambda: collectives.all_to_all_single(two, three, [1, 1], [1, 1], group=each),  # noqa: B023
        ]
        for call in calls:
            try:
                call()
            except Exception as error:
                text = str(error).rsplit("] ")[-1]  # without the time
                errors.append(f"{type(error).__name__}: {text}")
    return errors


def test_errors_of_torch_keep_their_type_and_text(pool: Pool) -> None:
    for errors in pool.run(2, collectives_of_wrong_sizes):
        assert len(errors) == 9 and errors[:3] == errors[3:6] == errors[6:]
        assert not any("process group" in error.lower() for error in errors), errors


@on_ranks
def some_ranks_only(group: ProcessGroup, port: int) -> tuple[int, int]:
    """Two ranks attend, then all of them in a group of all ranks."""
    world = start(port, "some", group.rank(), group.size())
    half = dist.new_group([0, 1] if world.rank() < 2 else [2, 3], use_local_synchronization=True)
    if world.rank() < 2:
        step(group=half, strategy="hybrid")
        step(group=half, strategy="ring")
    whole = dist.new_group([0, 1, 2, 3])
    step(group=whole, strategy="ring")
    return dist.get_pg_count(), len(made())


def test_only_the_ranks_of_the_group_take_part(own: OwnPool) -> None:
    results = own.pool.run(4, some_ranks_only, own.port)
    assert len({groups for groups, _ in results}) == 1
    assert results[0][1] > results[3][1]  # the first two have made communicators that the others have not


@on_ranks
def meshes_come_and_go(group: ProcessGroup, port: int, rounds: int) -> tuple[list[int], int]:
    """Communicators after each round, and how many of the destroyed groups something still holds."""
    start(port, "meshes", group.rank(), group.size())
    x = torch.randn(1, 8, 4, 16)  # [b, s, h, d]
    counts, destroyed = [], []
    for _ in range(rounds):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ring"))
        nested = DeviceMesh("cpu", torch.arange(4).view(1, 2, 2), mesh_dim_names=("dp", "ring", "ulysses"))
        mine = dist.new_group([0, 1, 2, 3])
        seqpar.attention(x, x, x, mesh=mesh["ring"], layout="contiguous")
        seqpar.attention(x, x, x, mesh=mesh, strategy="ulysses", layout="contiguous")
        seqpar.attention(x, x, x, mesh=nested, strategy="hybrid", layout="contiguous")
        seqpar.attention(x, x, x, group=mine, strategy="hybrid", layout="contiguous")
        counts.append(len(made()))
        destroyed.append(weakref.ref(mine))
        for each in (mine, mesh.get_group("ring"), nested.get_group("ring"), nested.get_group("ulysses")):
            dist.destroy_process_group(each)
        del each, mine, mesh, nested
        gc.collect()
    return counts, sum(reference() is not None for reference in destroyed)


def test_meshes_made_and_destroyed_repeatedly(own: OwnPool) -> None:
    for counts, held in own.pool.run(4, meshes_come_and_go, own.port, 4):
        assert counts == counts[:1] * 4 and not held


@on_ranks
def restart(group: ProcessGroup, port: int) -> list[bool]:
    """Whether the communicators end with the default group, which is started again and again."""
    rank, world = group.rank(), group.size()
    ended: list[bool] = []
    before: list[weakref.ref[ProcessGroup]] = []
    for _ in range(3):
        start(port, str(len(ended)), rank, world)
        step(strategy="ring")
        step(strategy="hybrid")
        gc.collect()
        ended.append(all(reference() is None for reference in before))
        before = [weakref.ref(each) for each in made()]
    return ended


def test_the_default_group_can_be_started_again(own: OwnPool) -> None:
    for ended in own.pool.run(4, restart, own.port):
        assert ended == [True] * 3


@on_ranks
def ended_together(group: ProcessGroup, port: int, how: str) -> tuple[set[str], set[str]]:
    """The communicators of this process, and the groups that torch has ended together with the default group."""
    c10d = dist.distributed_c10d
    start(port, f"to {how}", group.rank(), group.size())
    step(strategy="hybrid")
    ended, end = set[str](), vars(ProcessGroup)[how]

    def spy(self: ProcessGroup) -> None:
        ended.add(self.group_name)
        end(self)

    names = {str(each.group_name) for each in made()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroup, how, spy)
        c10d._abort_process_group() if how == "abort" else dist.destroy_process_group()
    return names, ended


@pytest.mark.parametrize("how", ["abort", "shutdown"])
def test_torch_ends_them_with_the_default_group(own: OwnPool, how: str) -> None:
    for names, ended in own.pool.run(4, ended_together, own.port, how):
        assert names and names <= ended


@on_ranks
def first_messages(group: ProcessGroup, port: int) -> tuple[list[int], list[str]]:
    """The peers of a new communicator's messages, and the names of two communicators."""
    world = start(port, f"pairs of {group.size()}", group.rank(), group.size())
    receive, peers = dist.irecv, list[int]()

    def spy(x: torch.Tensor, **where: Any) -> Any:
        peers.append(where["group_src"])
        return receive(x, **where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "irecv", spy)
        made_now = communicator(world, CPU), communicator(world, CPU, "handshake")
    for each in made_now:
        assert dist.get_backend(each) == "gloo" and dist.get_process_group_ranks(each) == [*range(world.size())]
        assert dist.distributed_c10d._find_pg_by_ranks_and_tag("", dist.get_process_group_ranks(each)) not in made_now
    return sorted(peers), [each.group_desc for each in made_now]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_pairs_are_connected_at_first(own: OwnPool, world: int) -> None:
    for rank, (peers, names) in enumerate(own.pool.run(world, first_messages, own.port)):
        assert peers == [peer for peer in range(world) if peer != rank]
        assert names == ["seqpar_messages", "seqpar_handshake"]


class Model(nn.Module):
    def __init__(self, group: ProcessGroup | None, strategy: str) -> None:
        super().__init__()
        self.layer = seqpar.ParallelAttention(strategy, 32, 4, group=group, layout="zigzag", dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


@on_ranks
def train_under_ddp(group: ProcessGroup, strategy: str) -> float:
    """The largest difference between weights trained under DDP over the group, and by one process."""
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)  # [b, s, hidden]
    torch.manual_seed(0)
    alone = Model(None, "local")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model(group, strategy), process_group=group)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (alone, ddp)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        alone(x).square().mean().backward()
        y = ddp(seqpar.shard(x, group=group, layout="zigzag"))
        (y.square().sum() / x.numel() * group.size()).backward()  # DDP divides by the number of ranks
        for optimizer in optimizers:
            optimizer.step()
    pairs = zip(alone.parameters(), ddp.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("strategy", ["ring", "hybrid"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_model_trains_under_ddp_over_the_same_ranks(pool: Pool, world: int, strategy: str) -> None:
    assert_error(max(pool.run(world, train_under_ddp, strategy)), 0.0, dtype=torch.float64)


@on_ranks
def hosts_of(group: ProcessGroup, port: int, names: list[str], init_mesh: bool) -> list[tuple[tuple[int, ...], ...]]:
    """Which ranks share a host: of all ranks, and of a mesh's dimensions ring and dp."""
    world = start(port, f"hosts {names} {init_mesh}", group.rank(), group.size())
    with pytest.MonkeyPatch.context() as patch:
        if names:
            patch.setenv("SEQPAR_HOST", names[world.rank()])
        if init_mesh:
            mesh = seqpar.init_mesh(dp=2, ring=2, device_type="cpu")
            patch.delenv("SEQPAR_HOST", raising=False)  # every rank has learned every rank's host
        else:
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ring"))
        return [ranks_by_host(g) for g in (world, mesh.get_group("ring"), mesh.get_group("dp"))]


@pytest.mark.parametrize("init_mesh", [True, False])
def test_ranks_by_host(own: OwnPool, init_mesh: bool) -> None:
    for hosts in own.pool.run(4, hosts_of, own.port, ["a", "b", "a", "b"], init_mesh):
        assert hosts == [((0, 2), (1, 3)), ((0,), (1,)), ((0, 1),)]
    for hosts in own.pool.run(4, hosts_of, own.port, [], init_mesh):  # one machine
        assert hosts == [((0, 1, 2, 3),), ((0, 1),), ((0, 1),)]


class FakeNccl:
    """Stands for ``ProcessGroupNCCL``, which builds for the CPU lack."""

    class Options:
        is_high_priority_stream = False
        global_ranks_in_group: list[int]
        _timeout: timedelta

        def __init__(self) -> None:
            self.config = SimpleNamespace()

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        self.options, self.where = options, (rank, size)


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeNccl]:
    """What makes an NCCL backend of two ranks. Its arguments are the settings of the caller's group."""
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(nccl, "global_ranks", lambda ranks: (4, 6))
    monkeypatch.setattr(nccl, "rank_in", lambda ranks: 1)
    monkeypatch.setattr(nccl, "size_of", lambda ranks: 2)
    monkeypatch.setattr(nccl, "_warn_of_problems", lambda: None)
    anything: Any = object()

    def make(purpose: nccl.Purpose = "messages", **settings: Any) -> FakeNccl:
        callers = SimpleNamespace(options=SimpleNamespace(config=SimpleNamespace(**settings)))
        monkeypatch.setattr(nccl, "parent_group", lambda ranks: SimpleNamespace(_get_backend=lambda device: callers))
        limit = timedelta(seconds=9)
        backend: FakeNccl = nccl.nccl_backend(dist.HashStore(), anything, CPU, purpose, "seqpar/1", limit)
        return backend

    return make


def test_nccl_gets_a_high_priority_stream(fake_nccl: Callable[..., FakeNccl]) -> None:
    backend = fake_nccl()
    assert backend.options.is_high_priority_stream and backend.where == (1, 2)
    assert backend.options.global_ranks_in_group == [4, 6] and backend.options._timeout == timedelta(seconds=9)
    assert vars(backend.options)["group_name"] == "seqpar/1"
    assert vars(backend.options.config) == {"max_ctas": 16}
    assert vars(fake_nccl("handshake").options.config) == {"max_ctas": 1}


def test_nccl_gets_the_settings_of_the_callers_group(fake_nccl: Callable[..., FakeNccl]) -> None:
    settings = {"cga_cluster_size": 2, "min_ctas": 4, "max_ctas": 24, "net_name": "Socket"}
    assert vars(fake_nccl(**settings).options.config) == settings
    assert vars(fake_nccl(**{**settings, "max_ctas": nccl._UNSET}).options.config) == {**settings, "max_ctas": 16}


def test_nccl_gets_as_many_sms_as_asked_for(
    fake_nccl: Callable[..., FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEQPAR_NCCL_MIN_CTAS", "20")
    assert vars(fake_nccl().options.config) == {"min_ctas": 20, "max_ctas": 20}
    monkeypatch.setenv("SEQPAR_NCCL_MAX_CTAS", "28")
    assert vars(fake_nccl(max_ctas=4).options.config) == {"min_ctas": 20, "max_ctas": 28}
    for bad in ("0", "-1", "many", "65"):
        monkeypatch.setenv("SEQPAR_NCCL_MAX_CTAS", bad)
        with pytest.raises(ValueError, match=f"SEQPAR_NCCL_MAX_CTAS={bad}: expected a number from 1 to 64"):
            fake_nccl()


def test_nccl_that_may_deadlock_is_named() -> None:
    ordered = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
    assert nccl.nccl_problems((2, 26, 2), ordered) == nccl.nccl_problems(None, {}) == []
    assert "NCCL 2.25.1 is older than 2.26" in nccl.nccl_problems((2, 25, 1), ordered)[0]
    assert "NCCL_LAUNCH_ORDER_IMPLICIT is not 1" in nccl.nccl_problems((2, 29, 7), {})[0]


def test_global_ranks(pool: Pool) -> None:
    assert pool.run(4, ranks_of_subgroup) == [(3, 1)] * 4


@on_ranks
def ranks_of_subgroup(group: ProcessGroup) -> tuple[int, ...]:
    return global_ranks(Subgroup(group, (3, 1)))


@on_ranks
def attend_before_and_after(group: ProcessGroup, options: dict[str, Any]) -> bool:
    """Attend with a sharding whose first call sends no messages, and compare with a sharding of its own."""
    torch.manual_seed(0)
    full = torch.randn(1, 24, 4, 16)
    results = []
    for silent in (True, False):
        sharding = seqpar.Sharding(24, "zigzag", group=group)
        q = sharding.shard(full)
        if silent:
            with without_messages():
                seqpar.attention(q, q, q, sharding=sharding, **options)
        results.append(seqpar.attention(q, q, q, sharding=sharding, **options))
    return torch.equal(*results)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_first_call_without_messages(pool: Pool, name: str) -> None:
    assert all(pool.run(4, attend_before_and_after, STRATEGIES[name]))


def test_the_log_names_what_carries_the_messages_of_a_gpu_once(caplog: pytest.LogCaptureFixture) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with fake_cuda(), caplog.at_level("INFO", "seqpar"), seqpar.trace() as t:
            links = [connect(dist.group.WORLD, torch.device("cuda")) for _ in range(2)]
            connect(links[0], torch.device("cuda"))
    finally:
        dist.destroy_process_group()
    assert caplog.text.count("attention's messages between the ranks [0, 1] are sent by fake") == 1
    assert t.transports == {"fake"}
