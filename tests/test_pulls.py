"""All-gather by copies from other ranks' memory, with threads as ranks and with simulated streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from seqpar.comm import pulls
from seqpar.comm.trace import trace

from .streams import RaceError, Simulator
from .test_streams import WORLD, attend, one_rank


class Host:
    """The memory of each rank, and a barrier of them."""

    def __init__(self, ranks: int, nbytes: int) -> None:
        self.memory = [torch.full((nbytes,), 0xFF, dtype=torch.uint8) for _ in range(ranks)]  # NaNs
        self.barrier = Barrier(ranks)


class StandIn:
    """A rank's ``_SymmetricMemory``, with the same signatures. Checks what would be a race between the GPUs."""

    def __init__(self, host: Host, rank: int) -> None:
        self._host, self._rank = host, rank
        self.barriers = 0

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int | None = 0) -> Tensor:
        may_read = self.barriers % 2 == 1  # all ranks have put, and none puts again
        assert may_read == (rank != self._rank), "own memory is written, others' read, on their side of the barrier"
        start = (storage_offset or 0) * dtype.itemsize
        stop = start + prod(sizes) * dtype.itemsize
        assert 0 <= start < stop <= len(self._host.memory[rank])
        return self._host.memory[rank][start:stop].view(dtype).view(*sizes)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        assert timeout_ms > 0, "a barrier without a timeout would wait for ever"
        self._host.barrier.wait(timeout_ms / 1000)
        self.barriers += 1


class Memory:
    """``SharedMemory`` of a rank."""

    def __init__(self, host: Host, rank: int) -> None:
        self.stand_in, self.timeout_ms = StandIn(host, rank), 10_000

    def handle(self, nbytes: int) -> StandIn:
        return self.stand_in


def gather_on_threads(shapes: Sequence[tuple[int, ...]], ranks: int) -> None:
    """All-gather a tensor of each shape, one after another, in the same memory."""
    host = Host(ranks, max(map(prod, shapes)) * 4 + 8)

    def run(rank: int) -> None:
        memory: Any = Memory(host, rank)
        where: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
        for number, shape in enumerate(shapes):
            shards = [torch.randn(shape, generator=torch.Generator().manual_seed(8 * number + r)) for r in range(ranks)]
            gathered, pending = pulls.start_pulls(shards[rank], where, memory)
            pending.wait()
            assert torch.equal(gathered, torch.stack(shards))
        assert memory.stand_in.barriers == 2 * sum(prod(shape) > 0 for shape in shapes)

    no_stream = SimpleNamespace(record_event=lambda: None, wait_event=lambda event: None)
    with mock.patch.object(torch.cuda, "current_stream", return_value=no_stream), ThreadPoolExecutor(ranks) as threads:
        for found in [threads.submit(run, rank) for rank in range(ranks)]:
            found.result(30)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_every_shard(ranks: int) -> None:
    gather_on_threads([(2, 3, 5), (2, 1, 7), (0, 4), (2, 3, 5)], ranks)


@pytest.mark.parametrize("which", [1, 2])
def test_a_missing_barrier_is_found(which: int) -> None:
    """Without the first, others' memory is read before it is written; without the second, written while it is read."""
    real, calls = StandIn.barrier, dict[int, int]()

    def barrier(self: StandIn, *args: Any) -> None:
        calls[id(self)] = calls.get(id(self), 0) + 1
        if calls[id(self)] % 2 != which % 2:
            real(self, *args)

    with mock.patch.object(StandIn, "barrier", barrier), pytest.raises(AssertionError, match="side of the barrier"):
        gather_on_threads([(4,), (4,)], 2)


class SimulatedMemory:
    """PyTorch's class of symmetric memory, on fake CUDA tensors. Handles of tensors of ``WORLD`` ranks."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator, self.made = simulator, list[int]()
        self.groups: list[tuple[Any, ...]] = []

    def set_group_info(self, *info: Any) -> None:
        self.groups.append(info)

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
        assert tuple(stride) == (1,) and dtype == torch.uint8 and name == self.groups[-1][0]
        self.made.append(size[0])
        return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor) -> Any:
        others = torch.empty_like(tensor)

        def get_buffer(rank: int, sizes: Any, dtype: torch.dtype) -> Tensor:
            memory = tensor if rank == self.groups[-1][1] else others
            return memory[: prod(sizes) * dtype.itemsize].view(dtype).view(*sizes)

        def barrier(channel: int, timeout_ms: int) -> None:
            self._simulator.run("barrier", [], [])

        return SimpleNamespace(get_buffer=get_buffer, barrier=barrier)


def attend_with_pulls(simulator: Simulator, **options: Any) -> SimulatedMemory:
    """An all-gather's forward and backward; the memory that it made."""
    memory = SimulatedMemory(simulator)
    with mock.patch.object(pulls, "symmetric_memory", return_value=memory):
        attend(simulator, strategy="context_parallel", comm="all_gather", **options)
    return memory


@pytest.mark.parametrize("per_host", [WORLD, 4])
def test_copies_run_beside_the_kernels(per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pulls.VARIABLE, "1")
    with one_rank(per_host) as simulator, trace() as sent:
        memory = attend_with_pulls(simulator, layers=1, chunks=4)
        assert len(memory.made) == 1 and memory.made[0] % (2 << 20) == 0
        barriers, kernels = simulator.named("barrier"), simulator.named("attend")
        assert len(barriers) == 2 * 2 * 4 and all(x.stream == "messages" for x in barriers)
        assert not kernels[0].is_after(barriers[1])  # this rank's own keys
        assert kernels[1].is_after(barriers[1]) and not kernels[1].is_after(barriers[3])  # the first chunk
        between_hosts = len(simulator.named("all-gather"))
        assert between_hosts == (0 if per_host == WORLD else 2 * 4)
    with one_rank(per_host) as simulator, trace() as by_nccl:
        monkeypatch.delenv(pulls.VARIABLE)
        assert not attend_with_pulls(simulator, layers=1, chunks=4).made
    assert sent.bytes_sent == by_nccl.bytes_sent


def does_not_wait(self: pulls.Copied) -> None:
    pass


def test_kernels_wait_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above relies on."""
    monkeypatch.setenv(pulls.VARIABLE, "1")
    broken: Callable[..., None] = does_not_wait
    with (
        mock.patch.object(pulls.Copied, "wait", broken),
        one_rank(WORLD) as simulator,
        pytest.raises(RaceError, match="reads memory that is written by 'aten::copy_' on 'messages'"),
    ):
        attend_with_pulls(simulator)
