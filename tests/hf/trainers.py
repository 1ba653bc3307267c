"""Data and settings of the tests of Trainers, and training runs on one process and on several."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.data import IterableDataset

import seqpar.hf

from ..pool import on_ranks
from .workers import VOCAB

LOSS = 1e-4
Run = tuple[list[float], dict[str, float]]  # losses, and metrics by name
Train = Callable[..., Run]  # the first argument is a ``ParallelismConfig``, or None without this package


def sequences(count: int, length: int | None = 37, masked: int = 4) -> list[dict[str, Tensor]]:
    """Rows of ``length`` tokens, or of different lengths. With ``masked`` they have different numbers of labels."""
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, VOCAB, (length or 15 + 7 * (i % 4),), generator=g) for i in range(count)]
    examples = []
    for i, row in enumerate(rows):
        labels = row.clone()
        labels[: 3 * (i % masked)] = -100
        examples.append({"input_ids": row, "labels": labels})
    return examples


class Stream(IterableDataset[Any]):
    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.rows)


@contextmanager
def torchrun(group: ProcessGroup | None) -> Iterator[None]:
    """In the block, the environment variables of ``torchrun``, and accelerate as in a new process."""
    before = dict(os.environ)
    if group is not None:
        rank, world = str(group.rank()), str(group.size())
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, ACCELERATE_USE_CPU="true", **address)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def settings(folder: str, steps: int, **arguments: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }


def trainer_of(
    model: Any, config: Any, folder: str, steps: int, rows: Any, batch: int = 2, eval_rows: Any = None,
    trainer: Any = transformers.Trainer, **arguments: Any,
) -> Any:  # fmt: skip
    options = {name: arguments.pop(name) for name in ("data_collator", "compute_metrics") if name in arguments}
    arguments = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, **arguments}
    return trainer(
        model,
        transformers.TrainingArguments(parallelism_config=config, **settings(folder, steps, **arguments)),
        train_dataset=rows,
        eval_dataset=eval_rows,
        **options,
    )


def logged(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def accuracy(prediction: Any) -> dict[str, float]:
    counts = prediction.label_ids[:, 1:] != -100
    right = (prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:])[counts]
    return {"accuracy": float(right.mean()), "rows": len(prediction.label_ids)}


@cache
def tokenizer() -> Any:
    """A tokenizer of words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t3"))
    words.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2")


@on_ranks
def parallel(group: ProcessGroup, train: Train, config: dict[str, Any], *args: Any, **kwargs: Any) -> Run:
    with torchrun(group):
        return train(seqpar.hf.ParallelismConfig(**config), *args, **kwargs)


def alone(train: Train, *args: Any, config: dict[str, Any] | None = None, **kwargs: Any) -> Run:
    """The results of one process, without this package or with this ``config``."""
    with torchrun(None):
        return train(None if config is None else seqpar.hf.ParallelismConfig(**config), *args, **kwargs)


def compare(ours: list[Run], theirs: Run) -> None:
    for losses, metrics in ours:
        assert losses == pytest.approx(theirs[0], abs=LOSS)
        assert metrics.keys() == theirs[1].keys()
        for name, value in metrics.items():
            assert value == pytest.approx(theirs[1][name], abs=LOSS, rel=LOSS), name
