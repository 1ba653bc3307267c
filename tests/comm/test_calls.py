"""Calls of a group: ranks in different calls, interrupts, threads, forked children, and few files.

After each of them, the next call is right or raises an error, under both transports.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

import seqpar
from seqpar.comm.handshake import all_gather_header, propagate_errors
from seqpar.comm.shared_memory import SharedMemoryTransport
from seqpar.ranks import calls, rendezvous

from ..observe import message_of
from ..pool import OwnPool, Pool, on_ranks, start

SEQ_LEN = 32
BOTH = pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shared memory"])
FULL = seqpar.Mask.full()
CALLS: dict[str, Callable[[Tensor, seqpar.Sharding], Tensor]] = {
    "ring": lambda x, s: seqpar.attention(x, x, x, sharding=s),
    "ulysses": lambda x, s: seqpar.attention(x, x, x, sharding=s, strategy="ulysses"),
    "all-gather": lambda x, s: seqpar.attention(x, x, x, sharding=s, strategy="context_parallel", mask=FULL),
    "without a sharding": lambda x, s: seqpar.attention(x, x, x, group=s.group, layout=s.layout),
    "halo": lambda x, s: seqpar.mixers.halo(lambda y: y[:, :-1] + y[:, 1:], x, 1, sharding=s),
    "by_heads": lambda x, s: seqpar.mixers.by_heads(lambda _, y: y.cumsum(1), x, sharding=s),
    "unshard": lambda x, s: s.shard(s.unshard(x) * 2),
}


def results_of(name: str, group: ProcessGroup, seed: int, whole: bool = True) -> tuple[Tensor, ...]:
    """The result and the gradient of a call, ``whole`` or this rank's."""
    sharding = seqpar.Sharding(SEQ_LEN, "contiguous", group=group)
    generator = torch.Generator().manual_seed(seed)
    x = sharding.shard(torch.randn(1, SEQ_LEN, 4, 8, generator=generator, dtype=torch.float64)).requires_grad_()
    out = CALLS[name](x, sharding)
    (dx,) = torch.autograd.grad(out.square().sum(), x)
    return tuple(sharding.unshard(y) if whole else y for y in (out.detach(), dx))


def results_with(x: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The whole result and gradient of a call of attention, as ``results_of`` returns them."""
    out = seqpar.attention(x, x, x, **arguments)
    (dx,) = torch.autograd.grad(out.square().sum(), x)
    return tuple(arguments["sharding"].unshard(y) for y in (out.detach(), dx))


def same(some: Sequence[Any], others: Sequence[Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(isinstance(a, Tensor) and torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in pairs)


def verdict(attempt: Callable[[], Any], expected: tuple[Tensor, ...]) -> str:
    """Whether an attempt is "right" or "wrong", or its error."""
    try:
        return "right" if same(attempt(), expected) else "wrong"
    except (RuntimeError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def wait_less() -> None:
    """Let a rank that has left a call not wait long for the others, nor for their own reports of an error."""
    calls._PATIENCE, rendezvous._GRACE_S = timedelta(seconds=1), 0.2


def differing(name: str, group: ProcessGroup) -> dict[str, Callable[[], object]]:
    """What rank 1 does while rank 0 makes the call ``name``."""
    sharding = seqpar.Sharding(SEQ_LEN, "contiguous", group=group)
    x = sharding.shard(torch.randn(1, SEQ_LEN, 4, 8, dtype=torch.float64))
    others: dict[str, Callable[[], object]] = {
        "a forward without a backward": lambda: [CALLS[name](x, sharding) for _ in range(2)],
        "another dtype": lambda: CALLS[name](x.float(), sharding),
    }
    if name in ("ring", "ulysses"):
        options: dict[str, Any] = {"sharding": sharding, "strategy": name}
        others["another mask"] = lambda: seqpar.attention(x, x, x, mask=seqpar.Mask.sliding_window(5), **options)
        for argument in ("sinks", "alibi_slopes"):
            others[argument] = partial(results_with, x.requires_grad_(), {argument: torch.ones(4), **options})
        others["another scale"] = lambda: seqpar.attention(x, x, x, softmax_scale=0.3, **options)
        moved = seqpar.Sharding(SEQ_LEN, "zigzag", group=group)
        others["another layout"] = lambda: seqpar.attention(x, x, x, sharding=moved, strategy=name)
        others["another call"] = lambda: CALLS["halo"](x, sharding)
    return others


@on_ranks
def make_different_calls(pool_group: ProcessGroup, port: int, label: str) -> dict[str, list[str]]:
    """Rank 1 makes another call than rank 0. Later calls raise until the ranks begin again."""
    group, seen = start(port, label, pool_group.rank(), 2, 20.0), {}
    wait_less()
    for name in ("ring", "ulysses", "all-gather", "halo", "by_heads"):
        usual = partial(results_of, name, group, 7)
        expected = usual()  # also connects the ranks
        for what, other in differing(name, group).items():
            texts = [verdict(other if group.rank() == 1 else usual, expected), verdict(usual, expected)]
            seqpar.init_mesh(ring=2, device_type="cpu")
            seen[f"{name}: {what}"] = [*texts, verdict(usual, expected)]
    return seen


@BOTH
def test_ranks_in_different_calls(own: OwnPool, shared_memory: bool) -> None:
    label = f"different {shared_memory}"
    by_rank = own.pool.run(2, make_different_calls, own.port, label, shared_memory=shared_memory)
    for case in by_rank[0]:
        first, second, last = zip(*(seen[case] for seen in by_rank), strict=True)
        assert any("OutOfStepError" in text for text in first), (case, first)
        assert all("Error" in text for text in first), (case, first)
        assert "wrong" not in second and last == ("right", "right"), (case, second, last)


@on_ranks
def fail_in_a_block(pool_group: ProcessGroup, port: int, label: str) -> str:
    """Between two calls, the user's code in a block of ``replace_sdpa`` raises on rank 1."""
    group = start(port, label, pool_group.rank(), 2, 300.0)
    q = torch.randn(1, 4, SEQ_LEN // 2, 8)

    def block() -> None:
        with seqpar.replace_sdpa(seqpar.Sharding(SEQ_LEN, "zigzag", group=group), seqpar.Mask.causal()):
            functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            if group.rank() == 1:
                raise RuntimeError("the user's")
            functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    return message_of(block)


@BOTH
def test_an_error_between_two_calls(own: OwnPool, shared_memory: bool) -> None:
    """The other rank does not wait for its timeout, which is longer than any test."""
    label = f"block {shared_memory}"
    other, failed = own.pool.run(2, fail_in_a_block, own.port, label, shared_memory=shared_memory)
    assert "the user's" in failed and re.search(r"rank\(s\) \[1\] of the job", other), other


@on_ranks
def interrupt_calls(pool_group: ProcessGroup, port: int, label: str, seed: int, trials: int) -> list[tuple[str, ...]]:
    """Signals interrupt steps at random times, on one rank or on all. Afterwards, steps are right or raise an error."""
    rank, seen = pool_group.rank(), list[tuple[str, ...]]()
    group = start(port, label, rank, pool_group.size(), 50.0)
    wait_less()
    names = ["ring", "ulysses", "without a sharding", "halo"]
    expected = {name: results_of(name, group, 7) for name in names}

    def step() -> list[Tensor]:
        return [x for name in names for x in results_of(name, group, 7, whole=False)]

    local = step()
    for trial in range(trials):
        of_all, own = random.Random(seed + trial), random.Random(seed + 100 * trial + rank)
        interrupted = rank in of_all.choice([(0,), (1,), (0, 1, 2), (0, 1, 2)])
        connected = verdict(step, local)
        assert connected == "right", (seed, trial, connected, seen)
        with suppress(KeyboardInterrupt, RuntimeError), alarm(own.uniform(0.001, 0.02) if interrupted else None):
            for _ in range(4):
                step()
        first = verdict(step, local)
        seqpar.init_mesh(ring=-1, device_type="cpu")
        seen.append((first, verdict(lambda: results_of("ring", group, 7), expected["ring"])))
    return seen


@contextmanager
def alarm(seconds: float | None) -> Iterator[None]:
    """After so many seconds, a signal raises a KeyboardInterrupt in the block."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds or 0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@BOTH
def test_after_an_interrupt_steps_are_right_or_raise(own: OwnPool, shared_memory: bool) -> None:
    seed = random.randrange(1000)
    label = f"interrupts {shared_memory}"
    by_rank = own.pool.run(3, interrupt_calls, own.port, label, seed, 3, shared_memory=shared_memory)
    for trial in zip(*by_rank, strict=True):
        for first, last in trial:
            assert first != "wrong" and last == "right", (seed, trial)


@on_ranks
def attend_in_threads(pool_group: ProcessGroup, port: int, label: str) -> list[str]:
    """Two threads with a group each; then a second thread in one of the groups."""
    group = start(port, label, pool_group.rank(), 2, 20.0)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    expected = [results_of("ring", group, seed) for seed in range(2)]

    def many(index: int) -> str:
        return ", ".join(
            {verdict(lambda: results_of("ring", groups[index], index), expected[index]) for _ in range(15)}
        )

    with ThreadPoolExecutor(2) as threads:
        seen = list(threads.map(many, range(2)))
        both = threads.submit(verdict, lambda: results_of("ring", group, 0), expected[0]).result()
    return [*seen, both, verdict(lambda: results_of("ring", groups[0], 0), expected[0])]


@BOTH
def test_threads(own: OwnPool, shared_memory: bool) -> None:
    for seen in own.pool.run(2, attend_in_threads, own.port, f"threads {shared_memory}", shared_memory=shared_memory):
        first, second, other_thread, thread_has_ended = seen
        assert first == second == thread_has_ended == "right", seen
        assert "not the thread that made the first call" in other_thread, seen


@on_ranks
def attend_in_a_child(pool_group: ProcessGroup, port: int, label: str) -> list[str]:
    """A forked child of rank 0 attends, and ends. Then all ranks attend."""
    group = start(port, label, pool_group.rank(), 2, 20.0)
    expected = {name: results_of(name, group, 7) for name in CALLS}
    if group.rank() == 0:
        read_end, write_end = os.pipe()
        if (child := os.fork()) == 0:
            texts = [verdict(partial(results_of, name, group, 7), expected[name]) for name in CALLS]
            os.write(write_end, "\n".join(texts).encode())
            os._exit(0)
        os.close(write_end)
        os.waitpid(child, 0)
        with os.fdopen(read_end) as pipe:
            texts = pipe.read().splitlines()
    else:
        texts = []
    return [verdict(partial(results_of, name, group, 7), expected[name]) for name in CALLS] + texts


@BOTH
def test_a_child_of_a_rank_cannot_take_part(own: OwnPool, shared_memory: bool) -> None:
    by_rank = own.pool.run(2, attend_in_a_child, own.port, f"child {shared_memory}", shared_memory=shared_memory)
    for seen in by_rank:
        assert seen[: len(CALLS)] == ["right"] * len(CALLS), seen
    in_child = by_rank[0][len(CALLS) :]
    assert len(in_child) == len(CALLS) and all("forked" in text for text in in_child), in_child


@on_ranks
def connect_without_files(pool_group: ProcessGroup, port: int, label: str, spare: int) -> tuple[str, str, bool]:
    """Rank 1 may open ``spare`` more files when the ranks connect."""
    group = start(port, label, pool_group.rank(), 2, 20.0)
    expected = results_of("ring", dist.new_group([0, 1]), 7)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank() == 1:
        open_now = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 1 + spare, limits[1]))
    try:
        first = verdict(lambda: results_of("ring", group, 7), expected)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    second = verdict(lambda: results_of("ring", group, 7), expected)
    return first, second, any(isinstance(x, SharedMemoryTransport) for x in calls.calls_of(group).connections.values())


def test_a_rank_that_may_open_no_more_files(own: OwnPool) -> None:
    """All ranks take gloo, or all raise an error and then are right."""
    for spare in (0, 8):
        label = f"{spare} files"
        by_rank = own.pool.run(2, connect_without_files, own.port, label, spare, shared_memory=True)
        firsts, seconds, shares = zip(*by_rank, strict=True)
        assert firsts == ("right", "right") or all("Error" in text for text in firsts), by_rank
        assert seconds == ("right", "right") and len(set(shares)) == 1, by_rank


@on_ranks
def mapped_bytes(group: ProcessGroup) -> tuple[int, bool]:
    """The bytes of address space that messages take after a call, and whether a core dump leaves them out."""
    results_of("ring", group, 7)
    total, left_out, in_file = 0, [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            in_file = "memfd:seqpar" in line
        elif in_file and line.startswith("Size:"):
            total += int(line.split()[1]) << 10
        elif in_file and line.startswith("VmFlags:"):
            left_out.append(" dd" in line)
    return total, bool(left_out) and all(left_out)


def test_messages_reserve_what_they_need(pool: Pool) -> None:
    for total, left_out in pool.run(4, mapped_bytes, shared_memory=True):
        assert left_out and total < 4 << 30


class OneNumber(NamedTuple):
    number: int


@on_ranks
def errors_of_one_object(group: ProcessGroup) -> list[str]:
    """What the ranks say if the same exception object is raised on rank 1 in two calls, inside of two blocks."""
    error = ValueError("the same object")

    def header() -> Any:
        raise error

    def run() -> None:
        with propagate_errors(group):
            all_gather_header(header if group.rank() == 1 else lambda: OneNumber(1), group)

    return [message_of(run) for _ in range(2)]


def test_an_error_that_is_raised_twice_is_told_twice(pool: Pool) -> None:
    first, second = pool.run(2, errors_of_one_object)
    assert all(text.startswith("RuntimeError: rank(s) [1] of the group raised an error") for text in first), first
    assert second == ["ValueError: the same object"] * 2
