"""Loaders resume in the middle of an epoch: the batches that follow are those of a run that was not interrupted."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("transformers")

import seqpar.hf

from .pool import Pool, mesh_of, on_ranks

pytestmark = pytest.mark.slow
LENGTH, STEPS = 8, 6  # of each dp rank in an epoch


def examples(count: int = 12) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.full((LENGTH,), i)} for i in range(count)]


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(examples())


class Stateful(DataLoader[Any]):
    """A loader like torchdata's ``StatefulDataLoader``: it saves its state, and skips batches without loading them."""

    def __init__(self, *args: Any, snapshot_every_n_steps: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.done, self.start, self.resumed = 0, 0, False

    def __iter__(self) -> Any:
        self.start, self.resumed = self.done if self.resumed else 0, False
        self.done = self.start
        for batch in islice(super().__iter__(), self.start, None):
            self.done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done, self.resumed = state["done"], True


def loader_of(kind: str) -> Any:
    if kind == "stream":
        return DataLoader(Streamed(), batch_size=1)
    if kind == "stateful":
        return Stateful(examples(), batch_size=1)
    return DataLoader(examples(), batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(3))


def seen(batches: Any, count: int | None = None) -> list[int]:
    return [int(batch["input_ids"][0, 0]) for batch in islice(batches, count)]


@on_ranks
def resumed(group: ProcessGroup, kind: str, scatter: bool) -> tuple[list[int], list[int]]:
    """The batches of three epochs, and those of three epochs that are interrupted in the second one."""
    mesh = mesh_of(2, 2, 2, 1)

    def make() -> Any:
        return seqpar.hf.ShardedLoader(loader_of(kind), mesh=mesh, scatter=scatter)

    loader = make()
    expected = [x for _ in range(3) for x in seen(loader)]
    loader = make()
    first = seen(loader)
    iterator = iter(loader)
    first += seen(iterator, 2)
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    file.seek(0)
    again = make()
    again.load_state_dict(torch.load(file, weights_only=True))
    return expected, first + seen(again) + seen(again)


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("kind", ["shuffled", "stream", "stateful"])
def test_resuming_in_the_middle_of_an_epoch(pool: Pool, kind: str, scatter: bool) -> None:
    results = pool.run(8, resumed, kind, scatter)
    for expected, ours in results:
        assert len(expected) == 3 * STEPS and ours == expected
    assert not set(results[0][0][:STEPS]) & set(results[4][0][:STEPS])  # dp rank 0 and dp rank 1


def test_a_stateful_loader_is_asked_itself() -> None:
    loader = seqpar.hf.ShardedLoader(Stateful(examples(), batch_size=1))
    seen(iter(loader), 5)
    again = seqpar.hf.ShardedLoader(inner := Stateful(examples(), batch_size=1))
    again.load_state_dict(loader.state_dict())
    assert seen(again) == list(range(5, 12)) and inner.start == 5


def test_a_state_between_epochs_and_one_of_another_run() -> None:
    loader = seqpar.hf.ShardedLoader(loader_of("shuffled"))
    seen(loader)
    state = loader.state_dict()
    second = seen(loader)
    again = seqpar.hf.ShardedLoader(loader_of("shuffled"))
    again.load_state_dict(state)
    assert seen(again) == second and again.state_dict()["yielded"] == 0
    with pytest.raises(ValueError, match=r"saved with dp=2, but this loader has dp=1"):
        again.load_state_dict({**state, "dp": 2})
    with pytest.raises(ValueError, match="another kind of loader"):
        again.load_state_dict({**state, "loader": {}})
