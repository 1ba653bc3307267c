"""``ParallelismConfig``: an unmodified Trainer and SFTTrainer have the losses of one process; the Trainer mixin."""

from __future__ import annotations

import logging
import os
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
import transformers

import seqpar.hf

from ..pool import Pool, on_ranks
from .trainers import (
    LOSS,
    Run,
    Stream,
    accuracy,
    alone,
    compare,
    logged,
    parallel,
    sequences,
    settings,
    tokenizer,
    torchrun,
    trainer_of,
)
from .workers import make_batch, tiny

pytestmark = pytest.mark.slow


def with_trainer(config: Any, folder: str, kind: str, batch: int, data: str) -> Run:
    """The losses of the steps, and an evaluation. Without data-parallel ranks, its last batch is not full: transformers
    would pad the batches of several."""
    rows = sequences(80, None if data == "packed" else 37)
    trainer = trainer_of(
        tiny(kind), config, folder, 5, Stream(rows) if data == "stream" else rows, batch,
        sequences(7 if data == "not across" else 8),
        gradient_accumulation_steps=2,
        average_tokens_across_devices=data != "not across",
        data_collator=transformers.DataCollatorWithFlattening() if data == "packed" else None,
        compute_metrics=None if data == "packed" else accuracy,
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate() if data != "packed" else {}
    return logged(trainer), {x: metrics[x] for x in ("eval_loss", "eval_accuracy", "eval_rows") if x in metrics}


def with_sft(config: Any, folder: str, kind: str, batch: int, packing: bool, **arguments: Any) -> Run:
    import datasets
    import trl

    data = datasets.Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in sequences(40, None)])
    # Sooner or later rounding, which differs from CPU to CPU, gives a token of gpt-oss another expert.
    steps = 3 if kind == "gpt_oss" else 5
    trainer = trl.SFTTrainer(
        tiny(kind),
        trl.SFTConfig(
            parallelism_config=config,
            per_device_train_batch_size=batch,
            packing=packing,
            max_length=64,
            bf16=False,
            **settings(folder, steps, **arguments),
        ),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logged(trainer), {
        name: entries[-1][name] for name in ("entropy", "mean_token_accuracy", "num_tokens", "grad_norm")
    }


@pytest.mark.parametrize(
    ("world", "config", "kind", "batch", "data"),
    [
        (4, {"cp_size": 2, "outputs": "full", "strategy": "ulysses", "layout": "contiguous"}, "mistral", 4, "rows"),
        (4, {"cp_size": -1, "strategy": "hybrid", "ulysses_size": 2}, "mistral", 2, "packed"),
        (2, {"cp_size": 2}, "gpt_oss", 2, "packed"),
        (4, {"cp_size": 2, "outputs": "full"}, "llama", 2, "stream"),
        (2, {"cp_size": 2, "outputs": "full"}, "llama", 2, "not across"),
    ],
)
def test_trainer(
    pools: dict[int, Pool], tmp_path: Path, world: int, config: dict[str, Any], kind: str, batch: int, data: str
) -> None:
    """``batch`` sequences for each micro-batch of all data-parallel ranks."""
    # transformers never keeps packed documents apart in gpt-oss: there the one process uses this package too.
    own = {"cp_size": 1} if kind == "gpt_oss" else None
    expected = alone(with_trainer, str(tmp_path), kind, batch, data, config=own)
    dp = 1 if config["cp_size"] == -1 else world // config["cp_size"]
    compare(pools[world].run(world, parallel, with_trainer, config, str(tmp_path), kind, batch // dp, data), expected)


@pytest.mark.parametrize(
    ("world", "config", "kind", "packing"),
    [
        (1, {"cp_size": 1}, "gpt_oss", False),
        (2, {"cp_size": 2, "strategy": "ulysses"}, "gpt_oss", False),
        (2, {"cp_size": 2}, "gemma2", True),
        (4, {"cp_size": -1, "layout": "striped"}, "mistral", True),
        (4, {"cp_size": -1, "strategy": "context_parallel"}, "gpt_oss", True),
    ],
)
def test_sft_trainer(
    pools: dict[int, Pool], tmp_path: Path, world: int, config: dict[str, Any], kind: str, packing: bool
) -> None:
    """With TRL's fused head, the loss, entropy and accuracy come from per-token outputs; without it, from logits."""
    utilities = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utilities, "add_fused_lm_head"):
        config = {**config, "outputs": "full"}
    dp = 1 if config["cp_size"] == -1 else world // config["cp_size"]
    # As in test_trainer, one process keeps gpt-oss's packed documents apart with this package only.
    own = {**config, "cp_size": 1}
    expected = alone(with_sft, str(tmp_path), kind, 2, packing, config=own if kind == "gpt_oss" and packing else None)
    if world == 1:
        ours = [alone(with_sft, str(tmp_path), kind, 2, packing, config=own)]
    else:
        ours = pools[world].run(world, parallel, with_sft, config, str(tmp_path), kind, 2 // dp, packing)
    compare(ours, expected)


@on_ranks
def verified_by_trainer(group: ProcessGroup, folder: str, summed: bool) -> tuple[list[str], str]:
    """The messages logged with SEQPAR_VERIFY=3 in five steps of a Trainer."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("seqpar")
    level = logger.level
    config = seqpar.hf.ParallelismConfig(cp_size=2, gradients="auto" if summed else "partial")
    with torchrun(group):
        os.environ["SEQPAR_VERIFY"] = "3"
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            trainer_of(tiny("mistral"), config, folder, 5, sequences(20)).train()
        except seqpar.hf.VerificationError as error:
            return said, str(error)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
    return said, ""


def test_verify_while_training(pools: dict[int, Pool], tmp_path: Path) -> None:
    for said, error in pools[2].run(2, verified_by_trainer, str(tmp_path), True):
        assert not error and [x.split(":")[0] for x in said if "equal to one device" in x] == ["step 1", "step 4"]
    for _, error in pools[2].run(2, verified_by_trainer, str(tmp_path), False):
        assert "divided by the number of ranks, 2" in error


class DividesByItems(transformers.Trainer):  # type: ignore[misc]
    """A loss of its own, divided by ``num_items_in_batch``."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")[:, 1:].flatten()
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        assert num_items_in_batch is not None
        return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


class MultipliesByProcesses(transformers.Trainer):  # type: ignore[misc]
    """The factor of losses in earlier versions of transformers."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * self.accelerator.num_processes


def with_changes(config: Any, folder: str, what: str) -> Run:
    """The losses and the last gradient norm of a training that differs from the usual one in ``what``."""
    kind, rows = "llama", sequences(20)
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2}
    if what == "rows classified":
        rows = [{"input_ids": row["input_ids"], "labels": torch.tensor(i % 3)} for i, row in enumerate(rows)]
        model = tiny(kind, auto=transformers.AutoModelForSequenceClassification, num_labels=3)
    elif what == "tokens classified":
        model = tiny("bert_tokens")
    else:
        model = tiny(kind)
    if what == "liger":
        # Of Liger's kernels, which need a GPU, only the loss. One process has transformers' loss.
        kernels = {"rope": False, "rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": True}
        arguments |= {"use_liger_kernel": config is not None, "liger_kernel_config": kernels}
    trainer_class = DividesByItems if what == "own division" else transformers.Trainer
    arguments["bf16"] = "bf16" in what
    trainer = trainer_of(model, config, folder, 3, rows, eval_rows=rows[:4], trainer=trainer_class, **arguments)
    metrics = {}
    if "evaluated" in what or what == "liger":
        metrics["eval_loss"] = trainer.evaluate()["eval_loss"]
    trainer.train()
    if config is not None:
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert unwrap(trainer.model.forward).__module__.startswith(
            "liger_kernel" if what == "liger" else "transformers"
        )
        assert "autocast" not in repr(trainer.model.forward) or "bf16" in what
        assert sum(m is trainer.model_wrapped or m is trainer.model for m in trainer.accelerator._models) == 1
    (*_, last) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return logged(trainer), {**metrics, "grad_norm": last["grad_norm"]}


@pytest.mark.parametrize(
    "what",
    ["own division", "evaluated before", "evaluated before, bf16", "rows classified", "tokens classified", "liger"],
)
def test_trainer_with(pools: dict[int, Pool], tmp_path: Path, what: str) -> None:
    if what == "liger":
        pytest.importorskip("liger_kernel")
    losses, metrics = alone(with_changes, str(tmp_path), what)
    for ours, our_metrics in pools[2].run(2, parallel, with_changes, {"cp_size": 2}, str(tmp_path), what):
        tolerance = 3e-2 if "bf16" in what else LOSS
        assert ours == pytest.approx(losses, abs=tolerance)
        assert our_metrics == pytest.approx(metrics, rel=tolerance)


@on_ranks
def trained_without(group: ProcessGroup, folder: str, what: str) -> str:
    with torchrun(group):
        config = seqpar.hf.ParallelismConfig(cp_size=2)
        if what == "a wrapper":
            accelerator = accelerate.Accelerator(cpu=True, parallelism_config=config)
            model = accelerator.prepare_model(tiny("llama"), evaluation_mode=True)
            call = partial(model, **make_batch("plain"))
        else:
            model = tiny("llama")
            if what == "a division":
                model = tiny("llama", auto=transformers.AutoModelForSequenceClassification, num_labels=3)
            trainer = MultipliesByProcesses if what == "a division" else transformers.Trainer
            made = trainer_of(
                model, config, folder, 1, sequences(4), eval_rows=sequences(4), trainer=trainer,
                compute_metrics=accuracy,
            )  # fmt: skip
            calls = {
                "a division": made.train,
                "evaluate": made.evaluate,
                "predict": partial(made.predict, sequences(4)),
            }
            call = calls[what]
        try:
            call()
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a wrapper", "it is trained without a wrapper"),
        ("a division", "its loss is a mean, which MultipliesByProcesses multiplies by the number of processes"),
        ("evaluate", "pass outputs='full' to"),
        ("predict", "pass outputs='full' to"),
    ],
)
def test_trainer_without(pools: dict[int, Pool], tmp_path: Path, what: str, message: str) -> None:
    for error in pools[2].run(2, trained_without, str(tmp_path), what):
        assert message in error


def resumed(config: Any, folder: str, kind: str) -> Run:
    """The losses of six steps. The last three run after resuming from a checkpoint."""
    losses = []
    for steps in (3, 6):
        saves = {"save_strategy": "steps", "save_steps": 3}
        trainer = trainer_of(tiny(kind), config, folder, steps, sequences(20), **saves)
        trainer.train(resume_from_checkpoint=steps == 6)
        losses = logged(trainer)
    return losses, {}


def test_resume(pools: dict[int, Pool], tmp_path: Path) -> None:
    expected = alone(resumed, str(tmp_path / "alone"), "qwen3")
    assert len(expected[0]) == 6
    compare(pools[2].run(2, parallel, resumed, {"cp_size": 2}, str(tmp_path / "two"), "qwen3"), expected)


def with_mixin(mesh: Any, folder: str, batch: int, across: bool, eval_rows: int) -> tuple[Run, list[int]]:
    """The losses of three steps, the evaluation loss, and the numbers of tokens and of sequences in a step."""
    model = tiny("qwen3")
    if mesh is not None:
        seqpar.hf.parallelize(model, mesh=mesh, strategy="hybrid")
    trainer = trainer_of(
        model, None, folder, 3, sequences(20, 40, 9), batch, sequences(eval_rows, 40, 9),
        transformers.Trainer if mesh is None else seqpar.hf.SequenceParallelTrainer,
        include_num_input_tokens_seen="all", gradient_accumulation_steps=2, average_tokens_across_devices=across,
    )  # fmt: skip
    trainer.train()
    counts = [trainer.state.num_input_tokens_seen, trainer.get_total_train_batch_size(trainer.args)]
    return (logged(trainer), {"eval_loss": trainer.evaluate()["eval_loss"]}), counts


@on_ranks
def mixin_on_ranks(group: ProcessGroup, folder: str, dp: int, across: bool, eval_rows: int) -> Any:
    with torchrun(group):
        mesh = seqpar.init_mesh(dp, 2 // dp, 2, 1, device_type="cpu")
        return with_mixin(mesh, folder, 2 // dp, across, eval_rows)


@pytest.mark.parametrize(("dp", "across", "eval_rows"), [(2, True, 8), (2, False, 8), (1, True, 7)])
def test_mixin_trainer(pools: dict[int, Pool], tmp_path: Path, dp: int, across: bool, eval_rows: int) -> None:
    """``dp`` replicas of ``4 / dp`` ranks of a sequence, compared with one process with ``dp`` times the batch."""
    with torchrun(None):
        (losses, metrics), counts = with_mixin(None, str(tmp_path), 2, across, eval_rows)
    for (ours, our_metrics), our_counts in pools[4].run(4, mixin_on_ranks, str(tmp_path), dp, across, eval_rows):
        # without ``across``, transformers takes the mean of each replica's mean
        assert ours == pytest.approx(losses, abs=LOSS if across else 0.2)
        # Replicas are weighted by their tokens before the shift, one process's batches by the tokens after it.
        assert our_metrics == pytest.approx(metrics, abs=LOSS if dp == 1 else 2e-2 if across else 0.2)
        assert our_counts == counts


def test_refused_mixin_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trainer(model: Any, **options: Any) -> Any:
        cls = seqpar.hf.SequenceParallelTrainer
        return trainer_of(model, None, str(tmp_path), 1, sequences(2), trainer=cls, **options)

    with pytest.raises(ValueError, match="not parallelized"):
        trainer(tiny("llama"))
    model = seqpar.hf.parallelize(tiny("llama"), strategy="local")
    with pytest.raises(ValueError, match="compute_metrics: it needs the logits"):
        trainer(model, compute_metrics=len)
    create = transformers.Trainer.create_accelerator_and_postprocess

    def create_with_deepspeed(trainer: Any) -> None:
        create(trainer)
        trainer.is_deepspeed_enabled = True

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", create_with_deepspeed)
    with pytest.raises(ValueError, match=r"the Trainer uses DeepSpeed.*gradients='mean'"):
        trainer(model)
    trainer(seqpar.hf.parallelize(seqpar.hf.restore(model), strategy="local", gradients="mean"))
