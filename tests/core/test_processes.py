"""Processes that a rank has started: what they may do with the process groups that they inherit."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from seqpar.ranks.processes import check_own_process, inherited

from ..pool import Pool, on_ranks


def in_fork(function: Callable[[], Any], deadline_s: int = 20) -> Any:
    """The result of ``function`` in a fork of this process. If it raises, its error."""
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(pid, 0)
        assert answer, f"the child ended with status {status}"
        return pickle.loads(answer)
    signal.alarm(deadline_s)  # a child that waits for a message is ended
    try:
        answer = pickle.dumps(function())
    except BaseException as error:
        answer = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os.write(write_end, answer)
    os._exit(0)


@on_ranks
def fork_of_a_rank(group: ProcessGroup) -> dict[str, Any]:
    def own_group() -> tuple[bool, list[float]]:
        dist.destroy_process_group()
        without = inherited()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.ones(2)
        dist.all_reduce(x)
        check_own_process("a sum")
        return without or inherited() or in_fork(inherited) is not True, x.tolist()

    return {
        "rank": inherited(),
        "child": in_fork(inherited),
        "grandchild": in_fork(lambda: in_fork(inherited)),
        "error": str(in_fork(lambda: check_own_process("attention"))),
        "own group": in_fork(own_group),
        "afterwards": inherited(),
    }


def test_a_fork_of_a_rank_knows_that_it_is_none(pool: Pool) -> None:
    for rank, found in enumerate(pool.run(2, fork_of_a_rank)):
        error = found.pop("error")
        assert error.startswith("RuntimeError: attention: this process was forked from rank"), error
        assert f"from rank {rank} of {pool.ranks}" in error
        expected = {"rank": False, "child": True, "grandchild": True, "own group": (False, [1.0, 1.0])}
        assert found == {**expected, "afterwards": False}


@pytest.mark.parametrize("initialised", [False, True])
def test_a_fork_of_a_process_without_ranks_is_none_of_them(initialised: bool) -> None:
    if initialised:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert in_fork(inherited) is initialised
        assert not inherited()
    finally:
        if initialised:
            dist.destroy_process_group()
