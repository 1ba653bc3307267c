"""The Trainer on several ranks has the losses of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState

import seqpar
import seqpar.hf

from ..pool import Pool, on_ranks
from .workers import VOCAB, tiny

pytestmark = pytest.mark.slow
Run = tuple[list[float], float, int, int]


def sequences(count: int) -> list[dict[str, Tensor]]:
    """Rows with different numbers of labels, so that a mean of means differs from the mean."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(3, VOCAB, (count, 40), generator=g)
    labels = rows.clone()
    for i, row in enumerate(labels):
        row[: 3 * (i % 9)] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]


def train(parallel: Any, folder: str, batch: int, across: bool, evaluated_on: int) -> Run:
    """The losses of three optimizer steps, the evaluation loss, the number of tokens, and the sequences per step."""
    model = tiny("qwen3")
    if parallel is not None:
        seqpar.hf.parallelize(model, mesh=parallel, strategy="hybrid")
    kind = transformers.Trainer if parallel is None else seqpar.hf.SequenceParallelTrainer
    trainer = kind(
        model,
        transformers.TrainingArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=batch,
            per_device_eval_batch_size=batch,
            include_num_input_tokens_seen="all",
            gradient_accumulation_steps=2,
            average_tokens_across_devices=across,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=sequences(20),
        eval_dataset=sequences(evaluated_on),
    )
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seen, together = trainer.state.num_input_tokens_seen, trainer.get_total_train_batch_size(trainer.args)
    return losses, evaluated, seen, together


@on_ranks
def train_in_parallel(group: ProcessGroup, folder: str, dp: int, across: bool, evaluated_on: int) -> Run:
    mesh = seqpar.init_mesh(dp, 4 // dp, 2, 1, device_type="cpu")
    rank, world = group.rank(), group.size()
    before = dict(os.environ)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="1"
    )
    try:
        return train(mesh, folder, 2 // dp, across, evaluated_on)
    finally:
        os.environ.clear()
        os.environ.update(before)
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


@pytest.mark.parametrize(("dp", "across", "evaluated_on"), [(2, True, 8), (2, False, 8), (1, True, 7)])
def test_trainer(pool: Pool, tmp_path: Path, dp: int, across: bool, evaluated_on: int) -> None:
    """``dp`` replicas of ``8 / dp`` ranks of a sequence, compared with one process with ``dp`` times the batch."""
    losses, evaluated, *counts = train(None, str(tmp_path), 2, across, evaluated_on)
    for ours, ours_evaluated, *ours_counts in pool.run(8, train_in_parallel, str(tmp_path), dp, across, evaluated_on):
        if across:
            assert ours == pytest.approx(losses, abs=1e-4)
        else:  # transformers then takes the mean of each replica's mean
            assert ours == pytest.approx(losses, abs=0.2)
        # Replicas are weighted by their tokens before the shift, one process's batches by those after it.
        assert ours_evaluated == pytest.approx(evaluated, abs=1e-4 if dp == 1 else 2e-2 if across else 0.2)
        assert ours_counts == counts


def test_refused_arguments(tmp_path: Path) -> None:
    def trainer(model: Any, **arguments: Any) -> Any:
        settings = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        return seqpar.hf.SequenceParallelTrainer(model, settings, train_dataset=sequences(2), **arguments)

    with pytest.raises(ValueError, match="not parallelized"):
        trainer(tiny("llama"))
    model = seqpar.hf.parallelize(tiny("llama"), strategy="local")
    with pytest.raises(ValueError, match="compute_metrics: it needs the logits"):
        trainer(model, compute_metrics=len)


def test_deepspeed_is_refused_unless_the_caller_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = transformers.Trainer.create_accelerator_and_postprocess

    def create_with_deepspeed(trainer: Any) -> None:
        create(trainer)
        trainer.is_deepspeed_enabled = True

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", create_with_deepspeed)
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    model = seqpar.hf.parallelize(tiny("llama"), strategy="local")
    with pytest.raises(ValueError, match=r"the Trainer uses DeepSpeed.*gradients='mean'"):
        seqpar.hf.SequenceParallelTrainer(model, arguments, train_dataset=sequences(2))
    seqpar.hf.parallelize(seqpar.hf.restore(model), strategy="local", gradients="mean")
    seqpar.hf.SequenceParallelTrainer(model, arguments, train_dataset=sequences(2))
