"""``ShardedLoader`` around datasets that are split by dp, packed or streamed; plans that a loader's workers make."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

pytest.importorskip("transformers")
pytest.importorskip("datasets")
pytest.importorskip("trl")
pytest.importorskip("torchdata")

import datasets
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader
from trl import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import seqpar.hf
from seqpar.schedule.plan import AttentionPlan

from ..pool import Pool, may_have_children, mesh_of, on_ranks
from ..reference import assert_error
from .random_rows import draw, loader_of
from .workers import tiny

pytestmark = pytest.mark.slow
LENGTH, DP = 8, 2


def documents_of(values: list[int]) -> list[dict[str, list[int]]]:
    # Even lengths, as LENGTH is, so that no row has one token, which two ranks cannot share.
    return [{"input_ids": [value] * (2 + value % 5 * 2)} for value in values]


def make_loader(kind: str, values: list[int], dp_rank: int, workers: int = 0, epoch: int = 0) -> Any:
    """The loader of a dp rank, as docs/huggingface.md makes it. Every token of an example is the example's value."""
    sampler: Any = None
    collate: Any = None
    dataset: Any = datasets.Dataset.from_list([{"input_ids": [value] * LENGTH} for value in values])
    if kind == "shuffled":
        dataset = dataset.with_format("torch")
        sampler = DistributedSampler(dataset, num_replicas=DP, rank=dp_rank, seed=3, drop_last=True)
        sampler.set_epoch(epoch)
    elif kind == "packed":
        dataset = datasets.Dataset.from_list(documents_of(values)).to_iterable_dataset(num_shards=4)
        dataset = split_dataset_by_node(dataset, rank=dp_rank, world_size=DP)
        dataset = pack_dataset(dataset, LENGTH, "bfd_split", map_kwargs={"batch_size": 5})
        collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    else:
        dataset = dataset.to_iterable_dataset(num_shards={"shards": 4, "examples": 3}[kind]).with_format("torch")
        dataset = split_dataset_by_node(dataset, rank=dp_rank, world_size=DP)
    return StatefulDataLoader(
        dataset,
        batch_size=2,
        sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )


def seen(batches: Any, count: int | None = None) -> list[list[int]]:
    return [batch["input_ids"].flatten().tolist() for batch in islice(batches, count)]


@on_ranks
def resumed(group: ProcessGroup, kind: str, workers: int, scatter: bool, values: list[int]) -> Any:
    """The batches of three epochs, and the batches of three epochs that are interrupted in the second one."""
    mesh = mesh_of(DP, 2, 1, 1)

    def make(epoch: int = 0) -> Any:
        loader = make_loader(kind, values, mesh["dp"].get_local_rank(), workers, epoch)
        return seqpar.hf.ShardedLoader(loader, mesh=mesh, scatter=scatter)

    def set_epoch(sharded: Any, epoch: int) -> None:
        if kind == "shuffled":
            sharded.loader.sampler.set_epoch(epoch)

    with may_have_children():
        loader, epochs = make(), []
        for epoch in range(3):
            set_epoch(loader, epoch)
            epochs.append(seen(loader))
        loader = make()
        first = seen(loader)
        again = make()
        again.load_state_dict(loader.state_dict())  # between two epochs
        set_epoch(again, 1)
        first += seen(iter(again), 2)
        file = io.BytesIO()
        torch.save(again.state_dict(), file)
        file.seek(0)
        last = make(epoch=1)
        last.load_state_dict(torch.load(file, weights_only=False))
        first += seen(last)
        set_epoch(last, 2)
        return epochs, first + seen(last)


@pytest.mark.thorough(workers=[0, 2])
@pytest.mark.parametrize(
    ("kind", "workers", "scatter"),
    [
        ("shuffled", 0, False),
        ("shuffled", 1, True),
        ("shards", 2, False),
        ("examples", 0, True),
        ("packed", 0, False),
    ],
)
def test_resumed_epoch(four: Pool, kind: str, workers: int, scatter: bool) -> None:
    count = 29 if kind in ("shuffled", "examples") else 57  # with these, one row is left over
    values = random.sample(range(1, 100_000), count)
    results = four.run(4, resumed, kind, workers, scatter, values)
    for rank, (epochs, ours) in enumerate(results):
        assert ours == [batch for epoch in epochs for batch in epoch], f"values={values}"
        assert [len(e) for e in epochs] == [len(e) for e in results[0][0]] and len(epochs[0]) > 2
        if kind != "packed":
            same = results[rank // 2 * 2][0]
            assert [sorted({*b}) for e in epochs for b in e] == [sorted({*b}) for e in same for b in e]
    for epoch in range(3):  # dp ranks see different values, and most of all
        per_dp = [{x for batch in results[d * 2][0][epoch] for x in batch} - {0} for d in range(DP)]
        assert sum(map(len, per_dp)) == len(set().union(*per_dp)) and set().union(*per_dp) <= set(values)
        assert kind == "packed" or sum(map(len, per_dp)) == count - 1


@on_ranks
def refuse(group: ProcessGroup) -> None:
    mesh, values = mesh_of(DP, 2, 1, 1), list(range(1, 18))
    dp_rank, sharded = mesh["dp"].get_local_rank(), seqpar.hf.ShardedLoader
    stream = datasets.Dataset.from_dict({"input_ids": [[x] * LENGTH for x in values]}).to_iterable_dataset(num_shards=4)
    over_world: Any = split_dataset_by_node(stream, rank=group.rank(), world_size=4)
    with pytest.raises(ValueError, match=r"has world_size=4, rank=.*make it with world_size=2, rank="):
        sharded(DataLoader(over_world), mesh=mesh)
    examples: Any = [{"input_ids": torch.full((LENGTH,), x)} for x in values]
    sampler: Any = DistributedSampler(examples, num_replicas=4, rank=group.rank())
    with pytest.raises(ValueError, match=r"has num_replicas=4, rank=.*make it with num_replicas=2, rank="):
        sharded(DataLoader(examples, sampler=sampler), mesh=mesh)
    for scatter in (False, True):
        with pytest.raises((ValueError, RuntimeError), match=r"two dp ranks load the same|raised an error"):
            next(iter(sharded(DataLoader(examples), mesh=mesh, scatter=scatter)))
    uneven = examples[: 1 + group.rank() % 2]
    with pytest.raises((ValueError, RuntimeError), match=r"only ranks .* have another batch"):
        seen(sharded(DataLoader(uneven), group=mesh["ring"].get_group()))
    loader = sharded(make_loader("shards", values, dp_rank), mesh=mesh)
    with pytest.raises(ValueError, match=r"saved with dp=4, but this loader has dp=2"):
        loader.load_state_dict({"dp": 4})
    with pytest.raises(TypeError, match=r"loader=DataLoader: it has no state_dict; use torchdata"):
        sharded(DataLoader(examples), group=mesh["ring"].get_group()).state_dict()


def test_refused_loaders(four: Pool) -> None:
    four.run(4, refuse)


class Failing(IterableDataset[Any]):
    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank

    def __iter__(self) -> Iterator[Any]:
        yield from ({"input_ids": torch.full((LENGTH,), 10 * self.dp_rank + i)} for i in range(4))
        if not self.dp_rank:
            raise OSError("the disk is gone")


@on_ranks
def read_failing(group: ProcessGroup, scatter: bool) -> str:
    mesh = mesh_of(DP, 2, 1, 1)
    loader: Any = DataLoader(Failing(mesh["dp"].get_local_rank()), batch_size=2)
    try:
        seen(seqpar.hf.ShardedLoader(loader, mesh=mesh, scatter=scatter))
    except (OSError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("scatter", [False, True])
def test_error_of_a_dataset_on_all_ranks(four: Pool, scatter: bool) -> None:
    errors = four.run(4, read_failing, scatter)
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


@pytest.mark.thorough(kind=["modernbert"])
@pytest.mark.parametrize(
    ("kind", "strategy", "way"),
    [
        ("gemma3", "ring", "whole"),
        ("llama", "context_parallel", "loader"),
        ("llama4", "ulysses", "collator"),
        ("modernbert", "ring", "whole"),
    ],
)
def test_no_plan_is_made_in_the_training_process(four: Pool, kind: str, strategy: str, way: str) -> None:
    for made, difference in four.run(2, train_with_plans, kind, strategy, way):
        assert made == 0
        assert_error(difference, 0.0)


@on_ranks
def drawn(group: ProcessGroup, workers: int) -> list[list[Any]]:
    """The rows of each batch, in order of their tokens. The ranks draw other amounts in between, from other seeds."""
    torch.manual_seed(group.rank())
    batches, seen = seqpar.hf.ShardedLoader(loader_of(workers), group=group), []
    with may_have_children():
        for _ in range(2):
            for local in batches:
                every = seqpar.unshard(local["input_ids"], sharding=seqpar.Sharding(12, "zigzag", group=group))
                seen.append(every.tolist())
                draw(1 + 3 * group.rank())
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_draw_the_same_rows(pool: Pool, workers: int) -> None:
    """From samplers, datasets and collate functions, whatever dropout draws."""
    first, second = pool.run(2, drawn, workers)
    assert first == second and len(first) == 8 and first[:4] != first[4:]
