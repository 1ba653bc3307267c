"""Messages between processes of one host through shared memory: received values, reused memory, and errors in waits."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar.comm import shared_memory as transports
from seqpar.comm import trace
from seqpar.comm.collectives import start_all_gather, start_all_to_all, start_reduce_scatter
from seqpar.comm.p2p import connect, exchange, new_message, without_messages
from seqpar.comm.shared_memory import ReceiveMode, SharedMemoryTransport, shared_memory

from ..pool import OwnPool, Pool, at_once, limit_waits, meanwhile, on_ranks, start
from ..reference import assert_close
from ..strategy_cases import DISTINCT, STRATEGIES

CPU = torch.device("cpu")
TIMEOUT_S = 1.5  # of waits in vain
DTYPES = torch.float32, torch.bfloat16, torch.float64, torch.uint8


def transport_of(group: ProcessGroup) -> SharedMemoryTransport:
    transport = shared_memory(group, CPU)
    assert transport is not None
    return transport


def send(transport: SharedMemoryTransport, peer: int, x: Tensor) -> None:
    transport.exchange([(peer, x)], [], "copy")


def receive(transport: SharedMemoryTransport, peer: int, numel: int, mode: ReceiveMode = "copy") -> Tensor:
    out = torch.empty(numel)
    transport.exchange([], [(peer, out)], mode)[0].wait()
    return out


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def pattern(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 100, (numel,), generator=torch.Generator().manual_seed(seed)).to(dtype)


@on_ranks
def random_exchanges(group: ProcessGroup, seed: int, rounds: int) -> int:
    """Messages of various sizes and dtypes, from various kinds of tensors, received in various orders."""
    rank, size, wrong = group.rank(), group.size(), 0
    for number in range(rounds):
        of_all = random.Random(seed * 1000 + number)  # the same on every rank
        plan = [
            (a, b, of_all.choice([1, 7, 1000, 20_000, 100_000]), of_all.choice(DTYPES))
            for a in range(size)
            for b in range(size)
            if a != b and of_all.random() < 0.6
        ] * of_all.choice([1, 2])
        mine = random.Random(seed * 1000 + number * size + rank)
        sends, received = [], []
        for i, (a, b, numel, dtype) in enumerate(plan):
            if a == rank:
                message = pattern(i, numel, dtype)
                if mine.random() < 0.5:
                    message = new_message(numel + 3, message, connect(group, CPU))[3:].copy_(message)
                sends.append((b, message))
            if b == rank:
                received.append((a, torch.empty(numel, dtype=dtype), pattern(i, numel, dtype)))
        parts = [exchange(sends, [], group)]
        for peer, out, _ in received:
            parts.append(exchange([], [(peer, out)], group))
        mine.shuffle(parts)
        for part in parts:
            part.wait()
        for _, message in sends:
            if message.untyped_storage().nbytes() == message.nbytes:  # not of ``new_message``: it may be written now
                message.zero_()
        wrong += sum(not torch.equal(out, expected) for _, out, expected in received)
    return wrong


@pytest.mark.parametrize("world", [2, 8])
def test_messages_arrive(pool: Pool, world: int) -> None:
    seed = random.randrange(1000)
    assert pool.run(world, random_exchanges, seed, 20, shared_memory=True) == [0] * world, f"seed {seed}"


@on_ranks
def collectives(group: ProcessGroup) -> list[Any]:
    rank, size = group.rank(), group.size()
    own = torch.arange(6.0).view(2, 3) + 10 * rank
    gathered, pending = start_all_gather(own, group)
    pending.wait()
    total, pending = start_reduce_scatter(torch.arange(size * 4.0).view(size, 4) * (rank + 1), group)
    pending.wait()
    sends = [peer + rank for peer in range(size)]  # some of rank 0's are empty
    x = torch.cat([torch.full((n,), 10.0 * rank + peer) for peer, n in enumerate(sends)])
    received, pending = start_all_to_all(x, sends, [rank + peer for peer in range(size)], group)
    pending.wait()
    return [gathered, total, torch.cat(received)]


@pytest.mark.parametrize("world", [2, 4])
def test_collectives(pool: Pool, world: int) -> None:
    by_rank = pool.run(world, collectives, shared_memory=True)
    for shared, gloo in zip(by_rank, pool.run(world, collectives, shared_memory=False), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(shared, gloo, strict=True))


@on_ranks
def step(group: ProcessGroup, options: dict[str, Any], kv_heads: int) -> tuple[list[Tensor], int, int]:
    """The output and the gradients of a step, and the bytes and messages that it sends."""
    torch.manual_seed(group.rank())
    q = torch.randn(2, 9, 8, 16, dtype=torch.float64, requires_grad=True)  # [b, s, h, d]
    k, v = (torch.randn(2, 9, kv_heads, 16, dtype=torch.float64, requires_grad=True) for _ in "kv")
    sharding = seqpar.Sharding(9 * group.size(), group=group)
    with seqpar.trace() as trace:
        out = seqpar.attention(q, k, v, sharding=sharding, **options)
        gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    return [out.detach(), *gradients], trace.bytes_sent, trace.messages


@pytest.mark.slow
@pytest.mark.thorough(name=["all_gather in chunks"])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", DISTINCT)
def test_attention_is_the_same_as_over_gloo(pool: Pool, name: str, world: int, kv_heads: int) -> None:
    in_memory, over_gloo = (
        pool.run(world, step, STRATEGIES[name], kv_heads, shared_memory=shared) for shared in (True, False)
    )
    for (tensors, *sent), (expected, *expected_sent) in zip(in_memory, over_gloo, strict=True):
        assert_close(tensors, expected)
        assert sent == expected_sent and min(sent) > 0


@on_ranks
def step_of_one_rank(group: ProcessGroup, options: dict[str, Any]) -> None:
    """Rank 0 alone attends, without messages."""
    q = torch.zeros(1, 8, 4, 16, requires_grad=True)  # [b, s, h, d]
    sharding = seqpar.Sharding(8 * group.size(), group=group)
    for ranks in (range(group.size()), range(1)):
        with without_messages() if len(ranks) == 1 else nullcontext():
            if group.rank() in ranks:
                seqpar.attention(q, q, q, sharding=sharding, **options).sum().backward()


@pytest.mark.parametrize("name", DISTINCT)
def test_without_messages_no_rank_waits(pool: Pool, name: str) -> None:
    pool.run(4, step_of_one_rank, STRATEGIES[name], shared_memory=True)


@on_ranks
def an_aliased_message(group: ProcessGroup) -> tuple[bool, int, int]:
    """Rank 0 sends more messages while rank 1 keeps the first. It is not overwritten before rank 1 frees the tensor."""
    transport, peer = transport_of(group), 1 - group.rank()
    if group.rank() == 0:
        for value in range(5):
            send(transport, peer, torch.full((50_000,), float(value)))
            receive(transport, peer, 1)  # rank 1 has read it
        held = len(transport._blocks)
        receive(transport, peer, 1)  # rank 1 has let go
        for value in range(5):
            send(transport, peer, torch.full((50_000,), float(value)))
            receive(transport, peer, 1)
        return True, held, len(transport._blocks)
    first = receive(transport, peer, 50_000, "alias")
    send(transport, peer, torch.zeros(1))
    for _ in range(4):
        receive(transport, peer, 50_000)
        send(transport, peer, torch.zeros(1))
    right = bool((first == 0).all())
    del first
    send(transport, peer, torch.zeros(1))
    for _ in range(5):
        receive(transport, peer, 50_000)
        send(transport, peer, torch.zeros(1))
    return right, 0, 0


def test_a_message_stays_as_long_as_it_is_read(pool: Pool) -> None:
    (_, held, later), (right, _, _) = pool.run(2, an_aliased_message, shared_memory=True)
    assert right
    assert later == held  # the first block has been used again


@on_ranks
def many_messages(group: ProcessGroup) -> tuple[int, float]:
    """Both ranks send many messages before they receive any. Later they take less memory."""
    transport, peer = transport_of(group), 1 - group.rank()
    sends = [(peer, torch.full((400_000,), float(value))) for value in range(64)]
    outs = [torch.empty(400_000) for _ in sends]
    for work in transport.exchange(sends, [], "copy") + transport.exchange([], [(peer, out) for out in outs], "copy"):
        work.wait()
    wrong = sum(not torch.equal(out, x) for out, (_, x) in zip(outs, sends, strict=True))
    sizes = random.Random(0).choices([1 << 20, 3 << 20, 1 << 16], k=60)
    for i, size in enumerate(sizes):
        out = torch.empty(size, dtype=torch.uint8)
        x = torch.full((size,), i, dtype=torch.uint8)
        for work in transport.exchange([(peer, x)], [(peer, out)], "copy"):
            work.wait()
        wrong += not bool((out == i).all())
    # The first messages took 128 MiB.
    return wrong, sum(block.nbytes for block in transport._blocks.values() if block.has_memory) / (1 << 20)


@pytest.mark.slow
def test_many_unread_messages(pool: Pool) -> None:
    for wrong, megabytes in pool.run(2, many_messages, shared_memory=True):
        assert wrong == 0
        assert megabytes < 100


@on_ranks
def one_sender(group: ProcessGroup) -> int:
    """The number of new open files or of blocks, if rank 0 sends many messages to a slow rank 1."""
    transport, count = transport_of(group), 200
    files, blocks = open_files(), len(transport._blocks)
    for i in range(count):
        if group.rank() == 0:
            send(transport, 1, torch.full((10,), float(i)))
            continue
        out = receive(transport, 0, 10)
        assert bool((out == i).all())
        time.sleep(0.001)
    if group.rank() == 1:
        assert open_files() - files < 10  # other threads of the process may open one
    return max(open_files() - files, len(transport._blocks) - blocks)


def test_a_sender_waits_for_a_slow_receiver(pool: Pool) -> None:
    assert pool.run(2, one_sender, shared_memory=True)[0] < 80


@on_ranks
def waits_in_vain(world: ProcessGroup, how: str) -> str:
    """Rank 0 waits for a message that rank 1 does not send."""
    store = dist.distributed_c10d._get_default_store()
    transport: SharedMemoryTransport | None = transport_of(world)
    if world.rank() == 1:
        assert transport is not None
        child = os.fork() if how == "ends, but not its child" else 0
        if how == "ends, but not its child" and not child:
            time.sleep(60)
        if how == "other size":
            send(transport, 0, torch.zeros(5))
        if how.startswith("ends"):
            transport = None
            dist.destroy_process_group()
            gc.collect()
        if how.startswith("ends"):
            time.sleep(1.5 if child else 0.5)
        else:
            store.wait(["caught"], timedelta(minutes=3))
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return ""
    assert transport is not None
    if how == "sends nothing":
        limit_waits(TIMEOUT_S)
    sends = [] if how == "other size" else [(1, torch.zeros(4))]  # rank 1 receives nothing
    with pytest.raises((RuntimeError, ValueError)) as caught:
        exchange(sends, [(1, torch.zeros(4))], world).wait()
    store.set("caught", "")
    return f"{caught.value}: {caught.value.__cause__}"


@on_ranks
def does_not_connect(world: ProcessGroup) -> str:
    """Rank 1 raises an error before it has made a file."""
    limit_waits(TIMEOUT_S)
    with (
        mock.patch.object(transports, "_new_file", side_effect=KeyError) if world.rank() else nullcontext(),
        pytest.raises((KeyError, RuntimeError)) as caught,
    ):
        transport_of(world)
    return str(caught.value)


# What rank 1 does, and the error of rank 0.
WAITS = {
    "ends": r"messages of attention: rank\(s\) \[1\] .* have ended",
    "ends, but not its child": r"messages of attention: rank\(s\) \[1\] .* have ended",
    "other size": "rank 1 has sent 20 bytes, but this rank expects 16",
    "sends nothing": r"rank\(s\) \[1\] .* after \d+\.\d s",
}


@pytest.fixture(scope="module", autouse=True)
def started(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Callable[[], list[list[str]]]]:
    calls: list[Callable[[ProcessGroup], str]] = [partial(waits_in_vain, how=how) for how in WAITS]
    together = partial(at_once, 2, [*calls, does_not_connect], 3600.0, shared_memory=True)
    with meanwhile(request, "waits", together) as result:
        yield result


@pytest.fixture
def waits(started: Callable[[], list[list[str]]]) -> list[list[str]]:
    """What the ranks raise in each wait, while the first tests of the file run."""
    return started()


def test_waits_end(waits: list[list[str]]) -> None:
    """Without the timeout if rank 1 has ended: it is longer than any test then."""
    *by_case, unconnected = waits
    for (how, said), (message, _) in zip(WAITS.items(), by_case, strict=True):
        assert re.search(said, message), (how, message)
    assert unconnected[0].startswith("the first messages on a host: rank(s) [1]")


@on_ranks
def can_share_memory(group: ProcessGroup, port: int, name: str, unlike: str) -> tuple[bool, list[str]]:
    """Whether three ranks share memory if rank 1 differs from the others in ``unlike``, and what is logged."""
    world = start(port, name, group.rank(), 3)
    odd = group.rank() == 1
    with (
        mock.patch.dict(os.environ, {"SEQPAR_HOST": f"host {odd and unlike == 'host'}"}),
        mock.patch.dict(os.environ, {"SEQPAR_SHARED_MEMORY": str(int(not (odd and unlike == "variable")))}),
        mock.patch.object(os, "getpid", return_value=1 << 30 if odd and unlike == "process" else os.getpid()),
        mock.patch.object(os, "memfd_create", side_effect=OSError if odd and unlike == "files" else os.memfd_create),
    ):
        with mock.patch.object(trace, "_log") as log:
            shared = shared_memory(world, CPU) is not None, shared_memory(world, CPU) is not None
        assert shared[0] == shared[1]
        return shared[0], [call[0] for call in log.method_calls]


@pytest.mark.parametrize("unlike", ["nothing", "host", "process", "files", "variable"])
def test_who_shares_memory(own: OwnPool, unlike: str) -> None:
    results = own.pool.run(3, can_share_memory, own.port, unlike, unlike, shared_memory=True)
    assert [shared for shared, _ in results] == [unlike == "nothing"] * 3
    # Once, by the first rank.
    assert [said for _, said in results] == [["info" if unlike == "nothing" else "warning"], [], []]


@on_ranks
def what_stays(group: ProcessGroup, port: int) -> list[tuple[int, int]]:
    """The numbers of open files and of mapped blocks after each default group has been destroyed."""
    counts = []
    for i in range(3):
        world = start(port, f"files {i}", group.rank(), 2)
        transport, peer = transport_of(world), 1 - group.rank()
        for work in transport.exchange([(peer, torch.zeros(100))], [(peer, torch.empty(100))], "copy"):
            work.wait()
        del transport, work
        dist.barrier()
        dist.destroy_process_group()
        del world
        gc.collect()
        counts.append((open_files(), Path("/proc/self/maps").read_text().count("memfd:seqpar")))
    return counts


def test_nothing_stays_open(own: OwnPool) -> None:
    for counts in own.pool.run(2, what_stays, own.port, shared_memory=True):
        assert counts[1] == counts[2] == (counts[1][0], 0)


def test_nothing_is_left_on_disk(pool: Pool) -> None:
    before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
    pool.run(2, random_exchanges, 1, 3, shared_memory=True)
    assert not Path("/dev/shm").exists() or set(Path("/dev/shm").iterdir()) == before
