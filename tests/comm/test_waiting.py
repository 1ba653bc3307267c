"""No rank waits forever: if one rank raises an error or does not make a call, the other ranks stop waiting."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.comm import collectives, handshake, waiting
from seqpar.comm.communicator import communicator
from seqpar.ranks import rendezvous
from seqpar.ranks.mesh import Ranks

from ..pool import OwnPool, Pool, at_once, limit_waits, meanwhile, on_ranks, start
from ..reference import assert_error
from ..strategy_cases import DISTINCT, STRATEGIES

TIMEOUT_S = 4.0


def error_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The type and message of the error that ``call`` raises, and the seconds until then."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def meet() -> None:
    """Wait for the other ranks, which may have started more slowly than a short timeout allows."""
    dist.monitored_barrier(timeout=timedelta(seconds=60))


def attend(**arguments: Any) -> None:
    x = torch.zeros(1, 8, 4, 16)  # [b, s, h, d]
    seqpar.attention(x, x, x, **{"layout": "contiguous", **arguments})


@on_ranks
def mesh_and_group(group: ProcessGroup, port: int, others_give: str) -> tuple[str, str, float]:
    """Rank 1 passes both a mesh and a group."""
    world = start(port, f"both {others_give}", group.rank(), group.size(), TIMEOUT_S)
    mesh = seqpar.init_mesh(ring=-1, device_type="cpu")
    given: dict[str, Any] = {"mesh": mesh, "group": world}
    attend(group=world)
    return error_of(lambda: attend(**(given if world.rank() == 1 else {others_give: given[others_give]})))


@pytest.mark.thorough(others_give=["mesh"])
@pytest.mark.parametrize("others_give", ["mesh", "group"])
def test_one_rank_gives_mesh_and_group(own: OwnPool, others_give: str) -> None:
    results = own.pool.run(3, mesh_and_group, own.port, others_give)
    for rank, (kind, message, _) in enumerate(results):
        if rank == 1:
            assert kind == "ValueError" and "mesh and group" in message
        else:
            assert kind == "RuntimeError" and "rank(s) [1] of the group raised" in message, message


@on_ranks
def one_rank_raises_before(world: ProcessGroup, name: str, ready: bool) -> tuple[str, str, float]:
    """Rank 1 raises an error in a constructor, and makes none of the calls that the other ranks make."""
    x = torch.zeros(1, 8, 64)  # [b, s, hidden]
    ring, tp_sp = (seqpar.ParallelAttention(s, 64, 4, group=world, layout="contiguous") for s in ("ring", "tp_sp"))
    calls: dict[str, Callable[[], Any]] = {
        "handshake": lambda: attend(group=world),
        "ring": lambda: attend(group=world, seq_len=24),
        "ulysses": lambda: attend(group=world, seq_len=24, strategy="ulysses"),
        "layer": lambda: ring(x),
        "layer with a length": lambda: ring(x, seq_len=24),
        "tp_sp": lambda: tp_sp(x, seq_len=24),
        "init_mesh": lambda: seqpar.init_mesh(ring=-1, device_type="cpu"),
    }
    meet()
    if ready:  # as in a later step: the communicators exist
        calls[name]()
    meet()
    bad: dict[bool, Callable[[], Any]] = {
        True: lambda: seqpar.init_mesh(ring=5, device_type="cpu"),
        False: lambda: Mask.documents([3, 1]),
    }
    with pytest.MonkeyPatch.context() as patch:
        if not ready or name == "init_mesh":  # ranks that meet in the store: rank 0 may be slow on a busy machine
            patch.setattr(rendezvous, "_GRACE_S", 15.0)
        return error_of(bad[name == "init_mesh"] if world.rank() == 1 else calls[name])


@on_ranks
def different_calls(world: ProcessGroup) -> tuple[str, str, float]:
    """Rank 1 makes another call than the others. They notice it long before the timeout."""
    limit_waits(60.0)
    sharding = seqpar.Sharding(8 * world.size(), "contiguous", group=world)
    meet()
    attend(group=world)
    if world.rank() == 1:
        return error_of(lambda: attend(group=world))
    return error_of(lambda: sharding.unshard(torch.zeros(1, 8)))


@on_ranks
def unused_unshard(world: ProcessGroup) -> tuple[str, str, float]:
    """Rank 1 does not use what it has unsharded, so it does not take part in the backward."""
    x = torch.ones(1, 2, 4, requires_grad=True)
    y = seqpar.Sharding(2 * world.size(), "contiguous", group=world).unshard(x)
    meet()
    return error_of((x if world.rank() == 1 else y).sum().backward)


# The calls of ``one_rank_raises_before``, and whether it is a later one.
RAISES = [(name, False) for name in ("handshake", "ring", "layer", "tp_sp", "init_mesh")]
RAISES += [(name, True) for name in ("handshake", "ring", "ulysses", "layer with a length", "init_mesh")]


Errors = dict[Any, list[tuple[str, str, float]]]


@pytest.fixture(scope="module", autouse=True)
def started(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Callable[[], Errors]]:
    calls: dict[Any, Callable[[ProcessGroup], tuple[str, str, float]]] = {
        (name, ready): partial(one_rank_raises_before, name=name, ready=ready) for name, ready in RAISES
    }
    calls |= {"different calls": different_calls, "between GPUs": wait_between_gpus, "unused": unused_unshard}
    together = partial(at_once, 3, [*calls.values()], TIMEOUT_S)
    with meanwhile(request, "errors", lambda: dict(zip(calls, together(), strict=True))) as result:
        yield result


@pytest.fixture
def errors(started: Callable[[], Errors]) -> Errors:
    """The errors of the ranks in each case. Every case waits for the timeout: all of them at the same time, and while
    the first tests of the file run."""
    return started()


@on_ranks
def different_meshes(group: ProcessGroup, port: int) -> list[tuple[str, str, float]]:
    """Rank 1 asks for another mesh, and then for the same one as the others."""
    world = start(port, "different meshes", group.rank(), group.size())
    asked = {"dp": 1, "tp": -1} if world.rank() == 1 else {"dp": -1}
    wrong = error_of(lambda: seqpar.init_mesh(ring=2, device_type="cpu", **asked))
    right = error_of(lambda: seqpar.init_mesh(ring=2, dp=-1, device_type="cpu"))
    return [wrong, right]


def test_ranks_ask_for_different_meshes(own: OwnPool) -> None:
    for wrong, right in own.pool.run(4, different_meshes, own.port):
        kind, message, _ = wrong
        assert kind == "ValueError", message
        assert "rank 0: device_type=cpu, dp=2, ring=2" in message and "rank 1: device_type=cpu, dp=1" in message
        assert right[0] == "nothing", right


def full_and_shards(group: ProcessGroup, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v of the full sequence and of this rank. Each rank has the same number of tokens."""
    torch.manual_seed(5)
    full = [torch.randn(2, 4 * group.size(), 4, 8, dtype=dtype) for _ in range(3)]  # [b, s, h, d]
    return full, [seqpar.shard(x, group=group, layout="contiguous").clone() for x in full]


@on_ranks
def gradients_of_some(group: ProcessGroup, options: dict[str, Any], known: bool, ranks: list[int]) -> float:
    """The largest error of the gradients of q, k, v, if only the inputs of ``ranks`` require gradients."""
    full, local = full_and_shards(group)
    for x in full:
        x.requires_grad_()
    weights = torch.randn(full[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (seqpar.attention(*full, strategy="local") * weights).sum().backward()
    for x in local:
        x.requires_grad_(group.rank() in ranks)
    length = full[0].shape[1] if known else None
    out = seqpar.attention(*local, group=group, seq_len=length, **options, layout="contiguous")
    (out * seqpar.shard(weights, group=group, layout="contiguous")).sum().backward()
    if group.rank() not in ranks:
        return float(sum(x.grad is not None for x in local))
    errors = []
    for x, whole in zip(local, full, strict=True):
        assert x.grad is not None and whole.grad is not None
        errors.append((x.grad - seqpar.shard(whole.grad, group=group, layout="contiguous")).abs().max().item())
    return max(errors)


@pytest.mark.parametrize("known", [False, True], ids=["handshake", "seq_len"])
@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("world", [2, 4])
def test_inputs_of_some_ranks_require_gradients(pool: Pool, world: int, name: str, known: bool) -> None:
    for ranks in ([0], [world - 1]):
        errors = pool.run(world, gradients_of_some, STRATEGIES[name], known, ranks)
        assert_error(max(errors), 0.0, dtype=torch.float64)


@on_ranks
def layer_gradients_of_some(group: ProcessGroup, strategy: str, frozen: bool, known: bool) -> float:
    """The error of the gradient of a layer's input, which only rank 0 requires."""
    torch.manual_seed(2)
    x = torch.randn(2, 4 * group.size(), 32, dtype=torch.float64, requires_grad=True)  # [b, s, hidden]
    layers = []
    for s, g in (("local", None), (strategy, group)):
        torch.manual_seed(3)
        layers.append(
            seqpar.ParallelAttention(s, 32, 4, group=g, dtype=torch.float64, layout="contiguous").requires_grad_(
                not frozen
            )
        )
    layers[0](x).square().sum().backward()
    x_local = seqpar.shard(x.detach(), group=group, layout="contiguous").clone().requires_grad_(group.rank() == 0)
    layers[1](x_local, seq_len=x.shape[1] if known else None).square().sum().backward()
    assert x.grad is not None
    if group.rank() != 0:
        return float(x_local.grad is not None)
    assert x_local.grad is not None
    return (x_local.grad - seqpar.shard(x.grad, group=group, layout="contiguous")).abs().max().item()


@pytest.mark.parametrize("known", [False, True], ids=["handshake", "seq_len"])
@pytest.mark.parametrize("frozen", [False, True], ids=["weights", "frozen"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "tp_sp"])
def test_inputs_of_layers_on_some_ranks_require_gradients(pool: Pool, strategy: str, frozen: bool, known: bool) -> None:
    errors = pool.run(2, layer_gradients_of_some, strategy, frozen, known)
    assert_error(max(errors), 0.0, dtype=torch.float64)


@on_ranks
def no_gradients(group: ProcessGroup, known: bool) -> tuple[bool, bool, tuple[str, str, float], tuple[str, str, float]]:
    """Whether outputs need gradients where no input does, then where gradients are off; errors of ranks that differ."""
    _, local = full_and_shards(group)
    length = 4 * group.size() if known else None
    on = seqpar.attention(*local, group=group, seq_len=length, layout="contiguous").requires_grad
    with torch.no_grad():
        off = seqpar.attention(*local, group=group, seq_len=length, layout="contiguous").requires_grad
    mlp = seqpar.MegatronMLP(16, 32, group=group)
    x = torch.zeros(1, 4, 16, requires_grad=group.rank() == 0)  # [b, s, hidden]
    for tensor in local:
        tensor.requires_grad_()
    with torch.set_grad_enabled(group.rank() == 0):
        mode = error_of(lambda: seqpar.attention(*local, group=group, layout="contiguous"))
    return on, off, mode, error_of(lambda: mlp(x))


def test_ranks_differ_in_gradients(pool: Pool) -> None:
    for known in (False, True):
        for on, off, mode, mlp in pool.run(2, no_gradients, known):
            assert not off and on is known  # without a handshake a rank cannot know that no other rank needs gradients
            assert mode[0] == "ValueError" and "torch.no_grad()" in mode[1]
            assert mlp[0] == "ValueError" and "requires_gradient" in mlp[1]


class FakeCuda:
    """CUDA streams, events and pinned memory on a machine without them; the events of ``late`` are never done."""

    def __init__(self, patch: pytest.MonkeyPatch, late: bool = False) -> None:
        self.log: list[str] = []
        self.current = "compute"
        cuda = self

        class Stream:
            def __init__(self, device: torch.device, priority: int) -> None:
                cuda.log.append(f"new stream of priority {priority}")

        class Event:
            def record(self) -> None:
                cuda.log.append(f"record on {cuda.current}")

            def query(self) -> bool:
                cuda.log.append("query")
                return not late

        @contextlib.contextmanager
        def stream(_: Stream) -> Iterator[None]:
            cuda.current = "side"
            yield
            cuda.current = "compute"

        all_gather = collectives.all_gather_single

        def all_gather_single(*args: Any, **kwargs: Any) -> Any:
            cuda.log.append(f"all-gather on {cuda.current}")
            return all_gather(*args, **kwargs)

        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the GPU"))
        patch.setattr(handshake, "_pinned", lambda *shape: torch.empty(*shape, dtype=torch.int64))
        patch.setattr(handshake, "all_gather_single", all_gather_single)
        patch.setattr(handshake, "_HostAllGather", device_all_gather)
        handshake._side_stream.cache_clear()


def device_all_gather(words: Tensor, ranks: Ranks, patience: timedelta | None) -> handshake._DeviceAllGather:
    return handshake._DeviceAllGather(words, ranks, torch.device("cpu"), patience)


@on_ranks
def handshake_between_gpus(group: ProcessGroup) -> tuple[list[str], bool, float]:
    """The operations of a handshake in a group without a CPU backend, and whether it has its own communicator."""
    with pytest.MonkeyPatch.context() as patch:
        cuda = FakeCuda(patch)
        for _ in range(2):
            attend(group=group)
        own_group = communicator(group, torch.device("cpu"), "handshake")
        handshake._side_stream.cache_clear()
    return cuda.log, own_group is communicator(group, torch.device("cpu")), 0.0


def test_a_handshake_between_gpus_does_not_wait_for_the_computation(pool: Pool) -> None:
    for log, shared, _ in pool.run(2, handshake_between_gpus):
        one = ["all-gather on side", "record on side", "query"]
        assert log == ["new stream of priority -1", *one, *one] and not shared


@on_ranks
def wait_between_gpus(world: ProcessGroup) -> tuple[str, str, float]:
    """Rank 1 does not take part in the second handshake."""
    with pytest.MonkeyPatch.context() as patch:
        FakeCuda(patch)
        meet()
        attend(group=world)
        if world.rank() == 1:
            return "nothing", "", 0.0
        FakeCuda(patch, late=True)
        patch.setattr(handshake, "all_gather_single", lambda *_, **__: None)  # NCCL: it returns at once
        return error_of(lambda: attend(group=world))


@on_ranks
def error_that_nobody_waits_for(group: ProcessGroup, port: int) -> tuple[str, str, float]:
    """Rank 1 raises in its first call, and no other rank makes a call."""
    world = start(port, "alone", group.rank(), group.size())
    if world.rank() != 1:
        return "nothing", "", 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "_PATIENCE", timedelta(seconds=0.5))
        return error_of(lambda: attend(group=world, layout="zig"))


@pytest.mark.slow
def test_an_error_is_shown_soon_though_no_other_rank_comes(own: OwnPool) -> None:
    kind, message, seconds = own.pool.run(2, error_that_nobody_waits_for, own.port)[1]
    assert kind == "ValueError" and "layout" in message and seconds < 20


@pytest.mark.parametrize(("name", "ready"), RAISES)
def test_one_rank_raises_in_a_constructor(errors: Errors, name: str, ready: bool) -> None:
    for rank, (kind, message, _) in enumerate(errors[name, ready]):
        if rank == 1:
            assert kind == "ValueError", message
            continue
        assert kind == "RuntimeError" and "look for an earlier error" in message, message
        # On a busy machine, rank 2 may be late too.
        assert re.search(r"rank\(s\) \[1\b", message) or (ready and name not in ("handshake", "init_mesh")), message


def test_ranks_make_different_calls(errors: Errors) -> None:
    texts = [f"{kind}: {message}" for kind, message, _ in errors["different calls"]]
    noticed = "OutOfStepError: {}: rank {} of the job makes another call than this rank (it waits in {})"
    where = ["unshard", "handshake", "unshard"]
    pairs = [(rank, other) for rank in range(3) for other in range(3) if where[rank] != where[other]]
    first = [noticed.format(where[rank], other, where[other]) for rank, other in pairs]
    assert any(text.startswith(tuple(first)) for text in texts), texts
    assert all(f"Error: {here}: " in text for here, text in zip(where, texts, strict=True)), texts


def test_one_rank_does_not_use_what_it_has_unsharded(errors: Errors) -> None:
    for rank, (kind, message, _) in enumerate(errors["unused"]):
        if rank == 1:
            assert kind == "nothing", message
        else:
            assert kind == "RuntimeError" and message.startswith("the backward of unshard: rank(s) [1"), message


def test_a_rank_is_missing_in_a_handshake_between_gpus(errors: Errors) -> None:
    kind, message, _ = errors["between GPUs"][0]
    assert kind == "RuntimeError" and "handshake: rank(s) [1] of the job did not arrive" in message, message


class _EndsLate:
    """An operation that ends just after a wait has run out of time."""

    def __init__(self, error: str = "") -> None:
        self.error, self.waits = error, 0

    def is_completed(self) -> bool:
        return True

    def wait(self, limit: timedelta | None = None) -> None:
        self.waits += 1
        if limit is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_an_operation_that_ends_at_the_end_of_a_wait_has_not_failed() -> None:
    late, failed = _EndsLate(), _EndsLate("Connection closed by peer")
    exchange: Any = object.__new__(handshake._HostAllGather)
    exchange._work = late
    assert exchange.wait(timedelta(seconds=1)) and late.waits == 2
    waiting._wait_for_collective(late)
    exchange._work = failed
    for wait in (lambda: exchange.wait(timedelta(seconds=1)), lambda: waiting._wait_for_collective(failed)):
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            wait()
