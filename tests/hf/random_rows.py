"""A loader whose sampler, dataset, collate function and workers draw random numbers in every way there is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers.trainer_utils import seed_worker

COUNT, LENGTH = 8, 12


class Crops(Dataset[Tensor]):
    """Row ``i`` starts at a random place."""

    def __getitem__(self, i: int) -> Tensor:
        start = 100 * i + random.randrange(50)
        return torch.arange(start, start + LENGTH) + int(np.random.randint(20))


class Shuffled(Sampler[int]):
    """An order that it draws from the global generator, as transformers' ``LengthGroupedSampler`` does."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT).tolist())

    def __len__(self) -> int:
        return COUNT


def masked(rows: list[Tensor]) -> dict[str, Tensor]:
    """As a collator for masked language models."""
    ids = torch.stack(rows)
    return {"input_ids": ids.masked_fill(torch.rand(ids.shape) < 0.3, 1), "labels": ids}


def loader_of(workers: int = 0, rank: int = 0) -> DataLoader[Any]:
    init = partial(seed_worker, num_workers=workers, rank=rank)  # as the Trainer has it
    more: Any = {"worker_init_fn": init, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader(Crops(), 2, sampler=Shuffled(), collate_fn=masked, num_workers=workers, **more)


def draw(amount: int) -> None:
    """Draw from the global generators, as dropout does."""
    torch.rand(amount)
    np.random.rand(amount)
    random.random()
