"""Parallelized transformers models in DeepSpeed's engine, with every stage of ZeRO, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

from transformers import TrainingArguments

import seqpar
import seqpar.hf
from seqpar.hf.losses.logits import MissingLogits

from ..engines.engine import full_weights, initialize, needs_deepspeed, start_deepspeed
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_error, nudge
from .workers import Rows, make_batch, tiny

pytestmark = [pytest.mark.slow, needs_deepspeed]
STEPS = 3


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # With a small eps, AdamW would enlarge the rounding of gradients that are almost 0.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def batches_of(step: int, dp: int) -> list[dict[str, Tensor]]:
    """A batch for each dp rank, with other numbers of labels."""
    return [make_batch(("right", "left")[row], seed=10 * step + row) for row in range(dp)]


def train_one_process(kind: str, dp: int, nudged: bool = False) -> dict[str, Tensor]:
    """The weights after the steps, each of which has the mean over the labels of ``dp`` batches."""
    model = tiny(kind)
    if nudged:
        nudge(model.parameters())
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        batches = batches_of(step, dp)
        counts = [(batch["labels"][:, 1:] != -100).sum() for batch in batches]
        for batch, count in zip(batches, counts, strict=True):
            (model(**batch).loss * count / sum(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of a weight."""
    return max(float((ours[name] - x).detach().abs().max()) for name, x in theirs.items())


@on_ranks
def train(
    group: ProcessGroup, kind: str, zero: int, dp: int, options: dict[str, Any], expected: dict[str, Tensor]
) -> float:
    """Returns the largest difference of a weight from one process, after steps with the loss in several ways."""
    mesh = mesh_of(dp, 2, 1, 1)
    model = seqpar.hf.parallelize(tiny(kind), mesh=mesh, **options)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = initialize(model, optimizer_of(model), zero)
    for step in range(STEPS):
        batches: list[Any] = batches_of(step, dp)
        batch = batches[mesh["dp"].get_local_rank()]
        if step < 2:
            with Rows() as rows:
                output = engine(**(seqpar.hf.shard_batch(batch, mesh=mesh) if step else batch))
            assert rows.most == options.get("loss_chunk", rows.most)
            loss = output.loss
            assert isinstance(output.logits, MissingLogits)
            with pytest.raises(ValueError, match="a call with labels returns a loss, but no logits"):
                output.logits.argmax(-1)
        else:
            labels = sum((x["labels"][:, 1:] != -100).sum() for x in batches) / dp  # of each rank, on average
            loss = -seqpar.hf.token_log_probs(engine, batch).sum() / labels
        engine.backward(loss)
        engine.step()
    with full_weights(engine) as weights:
        error = difference(weights, expected)
    engine.destroy()
    return error


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_weights_equal_one_process(pools: dict[int, Pool], zero: int) -> None:
    memory = seqpar.Memory(tiled_mlp=16, head_groups=1 if zero == 3 else 2)
    for kind, dp, options in (("llama", 2, {"memory": memory}), ("gemma2", 1, {"loss_chunk": 5}), ("qwen3_5", 1, {})):
        expected = train_one_process(kind, dp)
        errors = pools[2 * dp].run(2 * dp, train, kind, zero, dp, options, expected)
        assert_error(max(errors), difference(train_one_process(kind, dp, nudged=True), expected), kind)


@on_ranks
def refused(group: ProcessGroup) -> str:
    model = seqpar.hf.parallelize(tiny("llama"), group=group, memory=seqpar.Memory(head_groups=2))
    engine = initialize(model, optimizer_of(model), zero=3)
    try:
        engine(**make_batch("plain"))
    except ValueError as error:
        return str(error)
    return ""


def test_groups_of_heads_are_refused_with_zero_3(two: Pool) -> None:
    """A group needs a part of each projection, and ZeRO-3 gathers projections as a whole."""
    words = "head_groups: DeepSpeed's ZeRO-3 has partitioned the weights of LlamaAttention"
    assert all(words in message for message in two.run(2, refused))


def rows_of_a_step() -> list[dict[str, Tensor]]:
    """The rows of two micro-batches of two rows. Every epoch is one step, whatever the order of the rows is."""
    batch = make_batch("plain", 40, rows=4)
    for row, ignored in zip(batch["labels"], (0, 9, 20, 31), strict=True):
        row[:ignored] = -100
    return [{"input_ids": ids, "labels": labels} for ids, labels in zip(*batch.values(), strict=True)]


CLIP, RATE = 0.5, 0.01


def as_the_trainer_does(nudged: bool = False) -> dict[str, Tensor]:
    """The weights after steps of the Trainer's loop on one process."""
    model, rows = tiny("llama"), rows_of_a_step()
    if nudged:
        nudge(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=1e-3, weight_decay=0.0)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@on_ranks
def train_with_the_trainer(group: ProcessGroup, folder: str, expected: dict[str, Tensor]) -> float:
    start_deepspeed()
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    arguments = TrainingArguments(
        folder, deepspeed=config, max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_grad_norm=CLIP, learning_rate=RATE, adam_epsilon=1e-3, optim="adamw_torch", report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = seqpar.hf.SequenceParallelTrainer(model, arguments, train_dataset=rows_of_a_step())
    trainer.train()
    with full_weights(trainer.model_wrapped) as weights:
        return difference(weights, expected)


def test_the_trainer_with_zero_3(tmp_path: Path) -> None:
    pool = Pool(2)  # of its own, because the Trainer sets environment variables for accelerate
    expected = as_the_trainer_does()
    errors = pool.run(2, train_with_the_trainer, str(tmp_path), expected)
    pool.close()
    assert_error(max(errors), difference(as_the_trainer_does(nudged=True), expected))
