"""Streaming datasets under ``ShardedLoader``, packed by TRL too, and plans that workers make."""

from __future__ import annotations

import io
import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("trl")

import datasets
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import seqpar.hf
from seqpar.schedule import AttentionPlan

from .hf_workers import tiny
from .pool import Pool, mesh_of, on_ranks

pytestmark = pytest.mark.slow
LENGTH = 8


@contextmanager
def may_have_children() -> Iterator[None]:
    """In the block, this worker may start the workers of a data loader. Daemon processes may not do that otherwise."""
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, config["daemon"] = config.get("daemon"), False
    try:
        yield
    finally:
        config["daemon"] = before


def stream(values: list[int], shards: int) -> Any:
    rows = {"input_ids": [[value] * LENGTH for value in values]}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=shards).with_format("torch")


class Sharding(IterableDataset[Any]):
    """A stream with the method ``shard``, and with a state."""

    def __init__(self, values: list[int], stride: int = 1, offset: int = 0) -> None:
        self.values, self.stride, self.offset, self.next = values, stride, offset, 0

    def shard(self, num_shards: int, index: int) -> Sharding:
        return Sharding(self.values, num_shards, index)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["next"]

    def __iter__(self) -> Iterator[Any]:
        own = self.values[self.offset :: self.stride]
        for at in range(self.__dict__.pop("start", 0), len(own)):
            self.next = at + 1
            yield {"input_ids": torch.full((LENGTH,), own[at])}


def make_loader(kind: str, values: list[int], workers: int) -> Any:
    dataset: Any
    if kind == "packed":
        documents = {"input_ids": [[value] * (1 + value % 11) for value in values]}
        dataset = pack_dataset(
            datasets.Dataset.from_dict(documents).to_iterable_dataset(num_shards=4),
            LENGTH,
            "bfd_split",
            map_kwargs={"batch_size": 5},
        )
    elif kind == "shard":
        dataset = Sharding(values)
    else:
        dataset = stream(values, 4 if "whole" in kind else 3)
        dataset = dataset.shuffle(seed=3, buffer_size=4) if "shuffled" in kind else dataset
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True) if kind == "packed" else None
    if not workers and "stateful" not in kind:
        return DataLoader(dataset, batch_size=2, collate_fn=collate)
    from torchdata.stateful_dataloader import StatefulDataLoader

    context = "fork" if workers else None
    return StatefulDataLoader(
        dataset, batch_size=2, num_workers=workers, multiprocessing_context=context, collate_fn=collate
    )


def seen(batches: Any, count: int | None = None) -> list[list[int]]:
    return [batch["input_ids"].flatten().tolist() for batch in islice(batches, count)]


@on_ranks
def resumed(group: ProcessGroup, kind: str, dp: int, workers: int, scatter: bool, values: list[int]) -> Any:
    """The batches of three epochs, and those of three epochs that are interrupted in the second one."""
    mesh = mesh_of(dp, 8 // dp, 1, 1)
    with may_have_children():
        loader = seqpar.hf.ShardedLoader(make_loader(kind, values, workers), mesh=mesh, scatter=scatter)
        epochs = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            epochs.append(seen(loader))
        loader = seqpar.hf.ShardedLoader(make_loader(kind, values, workers), mesh=mesh, scatter=scatter)
        first = seen(loader)
        loader.set_epoch(1)
        first += seen(iter(loader), 2)
        file = io.BytesIO()
        torch.save(loader.state_dict(), file)
        file.seek(0)
        again = seqpar.hf.ShardedLoader(make_loader(kind, values, workers), mesh=mesh, scatter=scatter)
        again.load_state_dict(torch.load(file, weights_only=True))
        first += seen(again)
        again.set_epoch(2)
        return epochs, first + seen(again)


@pytest.mark.parametrize(
    ("kind", "dp", "workers", "scatter"),
    [
        ("whole shards", 2, 0, False),
        ("whole shards stateful", 4, 0, False),
        ("whole shards", 2, 2, False),
        ("examples", 4, 0, True),
        ("examples shuffled", 2, 0, False),
        ("shard", 2, 0, True),
        ("packed", 2, 1, False),
        ("packed", 4, 0, False),
    ],
)
def test_streams_are_dealt_and_resumed(pool: Pool, kind: str, dp: int, workers: int, scatter: bool) -> None:
    values = random.sample(range(1, 100_000), 59)
    results = pool.run(8, resumed, kind, dp, workers, scatter, values)
    ranks = 8 // dp
    for rank, (epochs, ours) in enumerate(results):
        assert ours == [batch for epoch in epochs for batch in epoch], f"values={values}"
        assert [len(e) for e in epochs] == [len(e) for e in results[0][0]] and len(epochs[0]) > 2
        same = results[rank // ranks * ranks][0]
        if kind != "packed":  # every token of a row is the row's value
            assert [sorted({*b}) for e in epochs for b in e] == [sorted({*b}) for e in same for b in e]
    for epoch in range(3):  # dp ranks see different values, and most of all
        per_dp = [{x for batch in results[d * ranks][0][epoch] for x in batch} - {0} for d in range(dp)]
        assert sum(map(len, per_dp)) == len(set().union(*per_dp)) and set().union(*per_dp) <= set(values)


@on_ranks
def split_before(group: ProcessGroup) -> tuple[list[list[int]], list[list[int]]]:
    from datasets.distributed import split_dataset_by_node

    mesh = mesh_of(2, 4, 1, 1)
    data = stream(list(range(1, 18)), 4)
    ours = split_dataset_by_node(data, rank=mesh["dp"].get_local_rank(), world_size=2)
    wrong = split_dataset_by_node(data, rank=group.rank(), world_size=8)
    with pytest.raises(ValueError, match="split it with world_size=2, rank="):
        seqpar.hf.ShardedLoader(DataLoader(wrong, batch_size=2), mesh=mesh)
    loaders = [seqpar.hf.ShardedLoader(DataLoader(x, batch_size=2), mesh=mesh) for x in (data, ours)]
    return seen(loaders[0]), seen(loaders[1])


def test_a_stream_is_not_split_twice(pool: Pool) -> None:
    for first, second in pool.run(8, split_before):
        assert first == second and len(first) == 4  # of 9 and 8 examples


class Failing(Sharding):
    def shard(self, num_shards: int, index: int) -> Sharding:
        return self if index else Sharding(self.values)

    def __iter__(self) -> Iterator[Any]:
        yield from islice(super().__iter__(), 4)
        raise OSError("the disk is gone")


@on_ranks
def read_failing(group: ProcessGroup, scatter: bool) -> str:
    loader: Any = DataLoader(Failing(list(range(1, 9))), batch_size=2)
    try:
        seen(seqpar.hf.ShardedLoader(loader, mesh=mesh_of(2, 4, 1, 1), scatter=scatter))
    except (OSError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("scatter", [False, True])
def test_a_dataset_that_raises_stops_all_ranks(pool: Pool, scatter: bool) -> None:
    errors = pool.run(8, read_failing, scatter, deadline_s=20)
    assert all("the disk is gone" in e or "raised an error" in e for e in errors), errors


class Documents:
    """Batches of packed documents."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 + i)
        tokens = torch.randint(3, 60, (40,), generator=generator)
        cut = int(torch.randint(5, 35, (), generator=generator))
        positions = torch.cat([torch.arange(cut), torch.arange(40 - cut)])
        return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


@on_ranks
def train_with_plans(group: ProcessGroup, kind: str, strategy: str, way: str) -> tuple[int, float]:
    """The number of plans made in this process for three batches, and the errors of the losses."""
    model = tiny(kind)
    seqpar.hf.parallelize(model, group=group, strategy=strategy)
    collate: Any = seqpar.hf.PlanCollator(model)
    if way == "collator":
        collate = seqpar.hf.ShardCollator(collate, group=group)
    made = mock.Mock()
    initialize = AttentionPlan.__init__

    def init(self: AttentionPlan, *args: Any, **kwargs: Any) -> None:
        made()
        initialize(self, *args, **kwargs)

    with may_have_children():
        loader: Any = DataLoader(
            Documents(), batch_size=1, collate_fn=collate, num_workers=1, multiprocessing_context="fork"
        )
        if way == "loader":
            loader = seqpar.hf.ShardedLoader(loader, group=group)
        with mock.patch.object(AttentionPlan, "__init__", init):
            losses = []
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                losses.append(float(loss))
    plain: DataLoader[Any] = DataLoader(Documents(), batch_size=1)
    expected = [float(model(**batch).loss) for batch in plain]
    return made.call_count, max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "strategy", "way"),
    [
        ("gemma3", "ring", "whole"),
        ("llama", "context_parallel", "loader"),
        ("llama4", "ulysses", "collator"),
        ("modernbert", "ring", "whole"),
    ],
)
def test_no_plan_is_made_in_the_training_process(pool: Pool, kind: str, strategy: str, way: str) -> None:
    for made, difference in pool.run(2, train_with_plans, kind, strategy, way):
        assert made == 0 and difference < 1e-5
