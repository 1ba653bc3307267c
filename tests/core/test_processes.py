"""Processes that a rank has started, such as the workers of a DataLoader: what works in them and what is refused."""

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
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import seqpar
from seqpar import Mask, Sharding
from seqpar.ranks.processes import check_own_process, inherited

from ..observe import message_of
from ..pool import Pool, at_once, may_have_children, on_ranks

SEQ_LEN = 1200
X = torch.arange(SEQ_LEN * 2).view(1, SEQ_LEN, 2)
DOCUMENTS = Mask.documents([0, 700, 720, SEQ_LEN])


def in_fork(function: Callable[[], Any], deadline_s: int = 120) -> Any:
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


def said(sharding: Any) -> tuple[Any, ...]:
    """Everything that a sharding says about its rank."""
    of_functions = seqpar.shard(X, sharding=sharding), seqpar.positions(sharding=sharding)
    assert torch.equal(of_functions[0], sharding.shard(X)) and torch.equal(of_functions[1], sharding.positions())
    return sharding.lengths, sharding.seq_local, sharding.positions().tolist(), sharding.shard(X).tolist()


class Rows(Dataset[str]):
    """Each item is what a rank, or a process that it has started, gets without a message.

    Args:
        sharding: the sharding that the rank has made.
        balanced: another one, for ``DOCUMENTS``.
        where: the mesh or the group, for shardings that the other process makes; None if it cannot have them.
        ranks, rank: of the sequence.
    """

    def __init__(
        self, sharding: Any, balanced: Any, where: dict[str, DeviceMesh | ProcessGroup] | None, ranks: int, rank: int
    ) -> None:
        self.sharding, self.balanced, self.where, self.ranks, self.rank = sharding, balanced, where, ranks, rank

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        of_rank: Any = Sharding.balanced(DOCUMENTS, SEQ_LEN, ranks=self.ranks, rank=self.rank)
        found = {"made before": said(self.sharding), "balanced": said(self.balanced), "of a given rank": said(of_rank)}
        if self.where is not None:
            where: Any = self.where
            found["made here"] = said(Sharding(SEQ_LEN, "zigzag", **where))
            found["balanced here"] = said(Sharding.balanced(DOCUMENTS, SEQ_LEN, **where))
            found["segments"] = said(Sharding.segments([700, 500], **where))
            found["functions"] = (
                seqpar.shard(X, layout="zigzag", **where).tolist(),
                seqpar.positions(SEQ_LEN, layout="zigzag", **where).tolist(),
            )
            seqpar.mask_planner(self.sharding)(DOCUMENTS)
        return str(found)


def refused_in_fork(group: ProcessGroup, sharding: Sharding, x: Tensor) -> dict[str, str]:
    """What a fork of a rank raises in calls that need a message."""
    linear = nn.Linear(2, 2)
    loss = linear(torch.ones(1, 2)).sum()
    loss.backward()
    losses, labels = torch.ones(x.shape[:2]), torch.ones(x.shape[:2], dtype=torch.long)
    where: dict[str, Any] = {"group": group, "layout": "zigzag"}
    calls: dict[str, Callable[[], Any]] = {
        "check": lambda: sharding.shard(X, check=True),
        "unshard": lambda: sharding.unshard(x),
        "unshard without a sharding": lambda: seqpar.unshard(x, **where),
        "ring": lambda: seqpar.attention(x, x, x, sharding=sharding),
        "ulysses": lambda: seqpar.attention(x, x, x, sharding=sharding, strategy="ulysses"),
        "without a sharding": lambda: seqpar.attention(x, x, x, strategy="context_parallel", **where),
        "wrong input": lambda: seqpar.attention(x, x, x[:, 1:], **where),
        "layer": lambda: seqpar.ParallelAttention("ring", 32, 4, **where)(x.flatten(2)),
        "tp_sp": lambda: seqpar.ParallelAttention("tp_sp", 32, 4, group=group)(x.flatten(2)),
        "token_loss": lambda: seqpar.token_loss(losses, labels, sharding=sharding),
        "token_loss without a sharding": lambda: seqpar.token_loss(losses, labels, group=group),
        "sync_gradients": lambda: seqpar.sync_gradients(linear, group=group),
        "verify": lambda: seqpar.verify(linear, lambda: loss, lambda: loss, group=group),
        "halo": lambda: seqpar.mixers.halo(lambda y: y[:, 2:], x, 2, sharding=sharding),
        "init_mesh": lambda: seqpar.init_mesh(ring=-1, device_type="cpu"),
    }
    return {name: message_of(call) for name, call in calls.items()}


@on_ranks
def in_workers(group: ProcessGroup) -> dict[str, str]:
    mesh = seqpar.init_mesh(ring=-1, device_type="cpu")
    ranks, rank = group.size(), group.rank()
    hidden = torch.randn(1, SEQ_LEN // ranks, 4, 8)  # [b, s, h, d]
    where: dict[str, Any]
    for where in ({"mesh": mesh}, {"group": group}, {}):
        sharding = Sharding(SEQ_LEN, "zigzag", **where)
        rows = Rows(sharding, Sharding.balanced(DOCUMENTS, SEQ_LEN, **where), where, ranks, rank)
        expected = rows[0]
        os.environ["SEQPAR_CHECK"] = "1"  # nothing is compared in a worker
        try:
            with may_have_children():
                forks: dict[str, Any] = {"batch_size": None, "multiprocessing_context": "fork"}
                loaders: list[Any] = [
                    DataLoader(rows, num_workers=2, persistent_workers=True, **forks),
                    *([] if "mesh" not in where else [StatefulDataLoader(rows, num_workers=1, **forks)]),
                ]
                for loader in loaders:
                    for _ in range(2):
                        assert list(loader) == [expected] * len(rows)
            # A pool of processes pickles the sharding for each task. It is valid in forks of this rank alone.
            of_both: list[Any] = [None, None]
            dist.all_gather_object(of_both, sharding)
            pickled = [pickle.dumps(x) for x in (sharding, *of_both)]
            messages = in_fork(lambda: [message_of(lambda: said(pickle.loads(x))) for x in pickled])  # noqa: B023
            assert messages[0] == messages[1 + rank] == "nothing"
            assert f"made by rank {1 - rank} of 2" in messages[2 - rank], messages
            for x in of_both:  # the rank itself may be another rank than the one that has pickled it
                assert "which has process groups of its own" in message_of(lambda: said(x))  # noqa: B023
        finally:
            del os.environ["SEQPAR_CHECK"]
    refused: dict[str, str] = in_fork(lambda: refused_in_fork(group, sharding, hidden))
    return refused


def test_forked_workers() -> None:
    (by_rank,) = at_once(2, [in_workers], shared_memory=True)
    for rank, refused in enumerate(by_rank):
        wrong = refused.pop("wrong input")
        assert wrong.startswith("ValueError: v: shape"), wrong
        for name, message in refused.items():
            assert f"this process was forked from rank {rank} of 2" in message, (name, message)
