"""Batches that the workers of a loader, or a map over a data set, cut for their rank."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("transformers")
pytest.importorskip("datasets")

import datasets

import seqpar.hf

from ..observe import message_of
from ..pool import at_once, may_have_children, on_ranks
from .workers import tiny

LENGTH, ROWS = 12, 4
datasets.disable_progress_bars()


def full_batch(first: int) -> dict[str, Tensor]:
    ids = torch.arange(first, first + LENGTH)[None]
    return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(LENGTH)[None] % 7}


def collate(examples: list[int]) -> dict[str, Tensor]:
    return full_batch(examples[0])


class Cut(Dataset[str]):
    """Each item says what the ways to cut a batch return, and what the others raise."""

    def __init__(self, group: ProcessGroup, check: bool) -> None:
        self.group, self.check = group, check
        self.sharding = seqpar.Sharding(LENGTH, "striped", group=group)
        self.collator = seqpar.hf.ShardCollator(collate, group=group, layout="striped")

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> str:
        batch = full_batch(index)
        where: dict[str, Any] = {"group": self.group, "layout": "striped"}
        cuts = [
            seqpar.hf.shard_batch(batch, **where, check=self.check),
            seqpar.hf.shard_batch(batch, sharding=self.sharding, check=self.check),
            self.collator([index]),
            seqpar.hf.ShardCollator(collate, **where)([index]),
        ]
        first, *others = [{name: x.tolist() for name, x in cut.items() if isinstance(x, Tensor)} for cut in cuts]
        assert all(other == first for other in others)
        return str(first)


class Refused(Cut):
    def __getitem__(self, index: int) -> str:
        loader: Any = seqpar.hf.ShardedLoader([full_batch(0)], group=self.group)
        calls = [
            lambda: seqpar.hf.shard_batch(full_batch(0), group=self.group),
            lambda: seqpar.hf.shard_batch(full_batch(0), sharding=self.sharding),
            lambda: next(iter(loader)),
        ]
        return "\n".join(map(message_of, calls))


@on_ranks
def cut_in_workers(group: ProcessGroup, cache: str) -> str:
    with_check = Cut(group, check=True)
    expected = [with_check[i] for i in range(ROWS)]  # in the ranks themselves
    rows, rank = Cut(group, check=False), group.rank()
    os.environ["SEQPAR_CHECK"] = "1"  # nothing is compared in a worker
    forks: dict[str, Any] = {"batch_size": None, "multiprocessing_context": "fork"}
    with may_have_children():
        assert list(DataLoader(rows, num_workers=2, **forks)) == list(DataLoader(rows, batch_size=None)) == expected
        (refused,) = set(DataLoader(Refused(group, True), num_workers=1, **forks))
    del os.environ["SEQPAR_CHECK"]
    # The map pickles its function for a pool of forked processes.
    sharding, of_rank = rows.sharding, seqpar.Sharding.balanced(seqpar.Mask.causal(), LENGTH, ranks=2, rank=rank)
    data = datasets.Dataset.from_dict({"first": [*range(ROWS)]})

    def cut(row: dict[str, Any]) -> dict[str, Any]:
        batch = full_batch(row["first"])
        local = seqpar.hf.shard_batch(batch, sharding=sharding, check=False)
        return {
            "input_ids": local["input_ids"][0],
            "positions": sharding.positions(),
            "of_rank": of_rank.shard(batch["input_ids"])[0],
        }

    mapped = data.map(cut, num_proc=2, cache_file_name=f"{cache}/{rank}.arrow").with_format("torch")
    for row in mapped:
        batch = full_batch(int(row["first"]))["input_ids"]
        assert torch.equal(row["input_ids"], sharding.shard(batch)[0])
        assert torch.equal(row["positions"], sharding.positions())
        assert torch.equal(row["of_rank"], of_rank.shard(batch)[0])
    return refused


def test_workers_cut_batches(tmp_path: Path) -> None:
    (by_rank,) = at_once(2, [partial(cut_in_workers, cache=str(tmp_path))])
    for rank, refused in enumerate(by_rank):
        for message in refused.splitlines():
            assert f"this process was forked from rank {rank} of 2" in message, message


def test_no_process_of_several_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny("llama"), full_batch(0)
    calls = [
        lambda: seqpar.hf.parallelize(model),
        lambda: seqpar.hf.shard_batch(batch),
        lambda: seqpar.hf.shard_batch(batch, check=False),
        lambda: seqpar.hf.ShardedLoader([batch]),
        lambda: seqpar.hf.ShardCollator(),
    ]
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for call in calls:
        assert message_of(call).startswith("ValueError: WORLD_SIZE=2, so 2 processes were started")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert [message_of(call) for call in calls] == ["nothing"] * len(calls)
