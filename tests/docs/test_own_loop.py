"""``examples/own_loop.py``: under every wrapper, on several ranks and after a resumption, the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.distributed import ProcessGroup

from examples import own_loop

from ..pool import OwnPool, Pool, mesh_of, on_ranks, start
from ..reference import assert_close
from .test_docs import _blocks

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@on_ranks
def losses_of_rank(group: ProcessGroup, port: int, run: str, argv: list[str]) -> list[float]:
    start(port, run, group.rank(), group.size())
    return own_loop.main([*argv, "--seq-len=65"])


def test_the_losses_of_one_process(own: OwnPool, tmp_path: Path) -> None:
    def train(name: str, ranks: int, *argv: str) -> list[float]:
        by_rank = own.pool.run(ranks, losses_of_rank, own.port, name, list(argv))
        assert all(losses == by_rank[0] for losses in by_rank)
        return by_rank[0]

    expected = train("one", 1, "--steps=4")
    assert len(expected) == 8
    checkpoint = f"--checkpoint={tmp_path / 'saved'}"
    assert_close(train("saving", 2, "--wrapper=fsdp2", "--steps=2", checkpoint), expected[:4])
    assert_close(train("resuming", 4, "--dp=2", "--steps=4", checkpoint), expected[4:])
    for wrapper in ("none", "ddp", "fsdp2"):
        losses = train(f"dp, {wrapper}", 4, "--dp=2", f"--wrapper={wrapper}", "--steps=2")
        assert_close(losses, expected[:4])


@on_ranks
def dealt(group: ProcessGroup, source: str) -> list[int]:
    names: dict[str, Any] = {"torch": torch, "mesh": mesh_of(2, 2, 2, 1)}
    exec(source, names)
    return list(names["sampler"])


def test_the_sampler_of_the_page(pool: Pool) -> None:
    """The ranks of a sequence get the same rows, and the two dp ranks get all rows between them."""
    (source,) = (source for _, source in _blocks("docs/own-code.md") if "DistributedSampler(" in source)
    by_rank = pool.run(8, dealt, source)
    assert by_rank[:4] == [by_rank[0]] * 4 and by_rank[4:] == [by_rank[4]] * 4
    assert sorted(by_rank[0] + by_rank[4]) == list(range(8))
