"""The worker pool itself: results by rank, errors with their rank, deadlines, and a new start after each failure."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..pool import WORLDS, Pool, WorkerError, on_ranks


@on_ranks
def ranks_and_sum(group: ProcessGroup, start: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([start + group.rank()])
    dist.all_reduce(total, group=group)
    return group.rank(), group.size(), total


@on_ranks
def raise_on(group: ProcessGroup, rank: int) -> None:
    if group.rank() == rank:
        raise ValueError("the error of one rank")


@on_ranks
def hang_on(group: ProcessGroup, rank: int) -> None:
    if group.rank() == rank:
        time.sleep(600)
    dist.barrier(group=group)


@on_ranks
def crash_on(group: ProcessGroup, rank: int) -> None:
    if group.rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize("world", WORLDS)
def test_results_come_by_rank(pool: Pool, world: int) -> None:
    results = pool.run(world, ranks_and_sum, start=1)
    assert [(rank, size) for rank, size, _ in results] == [(rank, world) for rank in range(world)]
    assert all(total.item() == world * (world + 1) // 2 for *_, total in results)


@pytest.mark.slow
def test_failures_end_within_the_deadline() -> None:
    pool = Pool(ranks=2)
    try:
        with pytest.raises(WorkerError, match=r"(?s)rank 1 of 2: .*raise_on.*the error of one rank"):
            pool.run(2, raise_on, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pool, "deadline_s", 2)
            with pytest.raises(WorkerError, match=r"(?s)rank 1 of 2: did not answer in 2 s.*hang_on"):
                pool.run(2, hang_on, 1)
        with pytest.raises(WorkerError, match=r"(?s)rank 0 of 1: the process ended with code -11; .*crash_on"):
            pool.run(1, crash_on, 0)
        assert len(pool.run(2, ranks_and_sum, 0)) == 2
    finally:
        pool.close()
