"""``ParallelismConfig``: an unmodified Trainer, SFTTrainer and accelerate loop have the losses of one process."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from inspect import unwrap
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
import accelerate.commands.launch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState

import seqpar.hf
from seqpar.hf import batch as hf_batch
from seqpar.hf.accelerate import _BASE, _SFT, _is_of_trl
from seqpar.placement import balanced

from ..pool import Pool, may_have_children, on_ranks
from ..reference import assert_error, nudge
from ..standins import fake_modules
from . import test_encoders as encoders
from .random_rows import draw, loader_of
from .workers import HYBRIDS, VOCAB, make_batch, tiny

pytestmark = pytest.mark.slow
Run = tuple[list[float], dict[str, float]]


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
    of_trainer = "data_collator", "compute_metrics", "compute_loss_func"
    options = {name: arguments.pop(name) for name in of_trainer if name in arguments}
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


def with_trainer(config: Any, folder: str, kind: str, batch: int, data: str) -> Run:
    """The losses of the steps, and an evaluation. Without data-parallel ranks, its last batch is not full: transformers
    would pad the batches of several."""
    rows = sequences(80, None if data == "packed" else 37)
    trainer = trainer_of(
        tiny(kind), config, folder, 2, Stream(rows) if data == "stream" else rows, batch,
        sequences(7 if data == "not across" else 8),
        gradient_accumulation_steps=2,
        average_tokens_across_devices=data != "not across",
        data_collator=transformers.DataCollatorWithFlattening() if data == "packed" else None,
        compute_metrics=None if data == "packed" else accuracy,
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate() if data != "packed" else {}
    return logged(trainer), {x: metrics[x] for x in ("eval_loss", "eval_accuracy", "eval_rows") if x in metrics}


@cache
def tokenizer() -> Any:
    """A tokenizer of words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t3"))
    words.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2")


def with_sft(config: Any, folder: str, kind: str, batch: int, packing: bool, **arguments: Any) -> Run:
    import datasets
    import trl

    data = datasets.Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in sequences(40, None)])
    steps = 2  # sooner or later rounding, which differs from CPU to CPU, gives a token of gpt-oss another expert
    trainer = trl.SFTTrainer(
        tiny(kind),
        trl.SFTConfig(
            parallelism_config=config,
            per_device_train_batch_size=batch,
            packing=packing,
            max_length=64,
            bf16=False,
            loss_type="nll",  # the default of TRL 1.9, chunked_nll, replaces the model's forward
            **settings(folder, steps, **arguments),
        ),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    with (
        mock.patch.object(balanced, "TILE", 4),  # so that these short rows have four tiles for each rank
        mock.patch.object(hf_batch, "balanced_layout", wraps=balanced.balanced_layout) as made,
    ):
        trainer.train()
    assert made.called == (config is not None and config.settings.layout == "balanced")
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logged(trainer), {
        name: entries[-1][name] for name in ("entropy", "mean_token_accuracy", "num_tokens", "grad_norm")
    }


def with_loop(config: Any, folder: str, kind: str, batch: int, data: str, fsdp: bool = False) -> Run:
    """The losses of a training loop as in accelerate's documentation."""
    plugin = None
    if fsdp and config is not None:
        PartialState(cpu=True)
        # accelerate uses FSDP on accelerators only; the processes have none.
        PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="transformer_based_wrap"
        )
    accelerator = accelerate.Accelerator(cpu=plugin is None, parallelism_config=config, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2 == (plugin is not None)
    torch.manual_seed(3)
    model = tiny(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = sequences(20, masked=1)  # so that the mean over replicas is the mean over labels
    dataset: Any = Stream(rows) if data == "stream" else rows
    loader = DataLoader(dataset, batch_size=batch, shuffle=data == "shuffled")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _, local in zip(range(2), loader, strict=False):
        loss = model(**local).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {}


BODIES: dict[str, Callable[..., Any]] = {"trainer": with_trainer, "sft": with_sft, "loop": with_loop}


@on_ranks
def parallel(group: ProcessGroup, body: str, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    with torchrun(group):
        return BODIES[body](seqpar.hf.ParallelismConfig(**config), *args, **kwargs)


def alone(body: str, *args: Any, config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """The results of one process, without this package or with this ``config``."""
    with torchrun(None):
        return BODIES[body](None if config is None else seqpar.hf.ParallelismConfig(**config), *args, **kwargs)


@cache
def rounding_of_steps(kind: str, rate: float = 1e-2, steps: int = 3) -> float:
    """How much the gradients after some steps of AdamW change with the last unit of the model's weights.

    The norm of the change, relative to the norm of the gradients, in one process without a Trainer. A loss could stay
    the same by chance.
    """
    gradients = []
    for nudged in (False, True):
        model = tiny(kind)
        if nudged:
            nudge(model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        rows = sequences(4 * steps)
        for step in range(steps):
            batch = {name: torch.stack([row[name] for row in rows[4 * step : 4 * step + 4]]) for name in rows[0]}
            optimizer.zero_grad()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step + 1 < steps:
                optimizer.step()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def check_values(ours: list[float], theirs: list[float], rounding: float, *what: object) -> None:
    """Compare losses or metrics with one process's, some of which may be NaN."""
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        size = max(1.0, abs(y))
        if not math.isnan(y):
            assert_error(abs(x - y), rounding * size, " ".join(map(str, what)) or "loss", size=size)


def compare(ours: list[Run], theirs: Run, rounding: float) -> None:
    for losses, metrics in ours:
        check_values(losses, theirs[0], rounding)
        assert metrics.keys() == theirs[1].keys()
        for name, value in metrics.items():
            check_values([value], [theirs[1][name]], rounding, name)


@pytest.mark.thorough(data=["packed"])
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
    expected = alone("trainer", str(tmp_path), kind, batch, data, config=own)
    dp = 1 if config["cp_size"] == -1 else world // config["cp_size"]
    compare(
        pools[world].run(world, parallel, "trainer", config, str(tmp_path), kind, batch // dp, data),
        expected,
        rounding_of_steps(kind),
    )


class Tokens:
    """What the collator asks a tokenizer for."""

    padding_side = "right"

    def pad(self, rows: list[dict[str, Any]], **options: Any) -> dict[str, Tensor]:
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def with_encoder(config: Any, folder: str) -> Run:
    """The losses of ``Seq2SeqTrainer``, of all weights and of LoRA."""
    losses, peft = list[float](), import_module("peft")
    batch = {name: x.repeat(4, 1) for name, x in encoders.make_batch("Bart", "plain").items()}
    batch["labels"][::3, :9] = -100
    rows = [{name: x[i].tolist() for name, x in batch.items()} for i in range(8)]
    for lora in (False, True):
        model = encoders.tiny("Bart")
        if lora:
            torch.manual_seed(2)
            of_lora = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
            adapter = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", **of_lora)
            try:
                model = peft.get_peft_model(model, adapter)
            except AttributeError:  # peft 0.18 asks Bart for a method that transformers 5.23 has renamed
                assert peft.__version__.startswith("0.18.")
                break
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        arguments = transformers.Seq2SeqTrainingArguments(parallelism_config=config, **settings(folder, 2, **sizes))
        collate = transformers.DataCollatorForSeq2Seq(Tokens(), None, padding=False)
        trainer = transformers.Seq2SeqTrainer(model, arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
        losses += logged(trainer)
    return losses, {}


BODIES["encoder"] = with_encoder


def test_encoder_decoder(pools: dict[int, Pool], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    expected = alone("encoder", str(tmp_path))
    runs = pools[2].run(2, parallel, "encoder", {"cp_size": 2}, str(tmp_path))
    compare(runs, expected, encoders.one_device("Bart", "plain")[0].rounding)


@pytest.mark.thorough(world=[2])
@pytest.mark.thorough(world=[4], kind=["gpt_oss"])
@pytest.mark.parametrize(
    ("world", "config", "kind", "packing"),
    [
        (1, {"cp_size": 1}, "gpt_oss", False),
        (2, {"cp_size": 2, "strategy": "ulysses"}, "gpt_oss", False),
        (2, {"cp_size": 2}, "gemma2", True),
        (2, {"cp_size": 2, "layout": "balanced"}, "mistral", True),
        (4, {"cp_size": -1, "layout": "striped"}, "mistral", True),
        (4, {"cp_size": -1, "strategy": "context_parallel"}, "gpt_oss", True),
        (2, {"cp_size": 2}, "qwen3_5", False),
        (4, {"cp_size": 2}, "qwen3_5", True),
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
    # As in test_trainer, one process keeps packed documents of some models apart with this package only.
    own = {**config, "cp_size": 1}
    with_own = packing and (kind == "gpt_oss" or kind in HYBRIDS)
    expected = alone("sft", str(tmp_path), kind, 2, packing, config=own if with_own else None)
    if world == 1:
        ours = [alone("sft", str(tmp_path), kind, 2, packing, config=own)]
    else:
        ours = pools[world].run(world, parallel, "sft", config, str(tmp_path), kind, 2 // dp, packing)
    compare(ours, expected, rounding_of_steps(kind))


@pytest.mark.thorough(cp_size=[4])
@pytest.mark.parametrize(("cp_size", "data", "fsdp"), [(4, "shuffled", False), (2, "stream", False), (2, "rows", True)])
def test_accelerate_loop(pools: dict[int, Pool], cp_size: int, data: str, fsdp: bool) -> None:
    """Under DDP, and FSDP2 over all four ranks, there with all switches of ``Memory``."""
    dp = 4 // cp_size
    config: dict[str, Any] = {"cp_size": cp_size}
    if fsdp:
        config["memory"] = seqpar.Memory(tiled_mlp=5, head_groups=2, checkpoint="attention", offload=True)
    expected, _ = alone("loop", "", "mistral", 4, data)
    runs = pools[4].run(4, parallel, "loop", config, "", "mistral", 4 // dp, data, fsdp)
    losses = torch.tensor([run[0] for run in runs]).unflatten(0, (dp, cp_size))  # [dp, cp, steps]
    assert torch.equal(losses, losses[:, :1].expand_as(losses))
    check_values(losses.mean((0, 1)).tolist(), expected, rounding_of_steps("mistral"))


@on_ranks
def verified(group: ProcessGroup) -> str:
    """The report of ``verify`` on a model that accelerate has prepared. Each sequence has a batch of its own."""
    with torchrun(group):
        accelerator = accelerate.Accelerator(cpu=True, parallelism_config=seqpar.hf.ParallelismConfig(cp_size=2))
        model = accelerator.prepare(tiny("gpt_oss"))
        return str(seqpar.hf.verify(model, make_batch("packed", seed=group.rank() // 2), raise_on_error=False))


@pytest.mark.parametrize("world", [2, 4])
def test_verify(pools: dict[int, Pool], world: int) -> None:
    for said in pools[world].run(world, verified):
        assert "equal to one device: 45 tokens on 2 rank(s)" in said, said


@on_ranks
def verified_by_trainer(group: ProcessGroup, folder: str, summed: bool) -> tuple[list[str], str]:
    """The messages logged with SEQPAR_VERIFY=3 in five steps of a Trainer."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("seqpar")
    level = logger.level
    config = seqpar.hf.ParallelismConfig(cp_size=2, gradients="mean" if summed else "sum")
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
    """The loss of earlier versions of transformers."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss *= self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def with_changes(config: Any, folder: str, what: str, batch: int = 2) -> Run:
    """The losses and the last gradient norm of a training that differs from the usual one in ``what``."""
    kind, rows = "llama", sequences(20)
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2}
    if what == "rows classified":
        rows = [{"input_ids": row["input_ids"], "labels": torch.tensor(i % 3)} for i, row in enumerate(rows)]
        model = tiny(kind, auto=transformers.AutoModelForSequenceClassification, num_labels=3)
    elif what == "tokens classified":
        model = tiny("bert_tokens")
    elif what == "experts":  # the loss of their router is not divided by the number of labels
        model = tiny("qwen3_moe")
    else:
        model = tiny(kind)
    if what == "liger":
        # Of Liger's kernels, which need a GPU, only the loss. One process has transformers' loss.
        kernels = {"rope": False, "rms_norm": False, "swiglu": False, "fused_linear_cross_entropy": True}
        arguments |= {"use_liger_kernel": config is not None, "liger_kernel_config": kernels}
    trainer_classes = {"own division": DividesByItems, "own factor": MultipliesByProcesses}
    arguments |= {"bf16": "bf16" in what, "trainer": trainer_classes.get(what, transformers.Trainer)}
    trainer = trainer_of(model, config, folder, 2, rows, batch, rows[:4], **arguments)
    metrics = {"rows": trainer.get_total_train_batch_size(trainer.args)}
    if "evaluated" in what or what == "liger":
        metrics["eval_loss"] = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.args.average_tokens_across_devices
    if config is not None:
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert unwrap(trainer.model.forward).__module__.startswith(
            "liger_kernel" if what == "liger" else "transformers"
        )
        assert "autocast" not in repr(trainer.model.forward) or "bf16" in what
        assert sum(m is trainer.model_wrapped or m is trainer.model for m in trainer.accelerator._models) == 1
    (*_, last) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return logged(trainer), {**metrics, "grad_norm": last["grad_norm"]}


BODIES["changes"] = with_changes


@pytest.mark.thorough(what=["own division", "own factor", "experts", "evaluated before, bf16", "rows classified"])
@pytest.mark.parametrize(
    "what",
    [
        "own division", "own factor", "experts", "evaluated before", "evaluated before, bf16", "rows classified",
        "tokens classified", "liger",
    ],
)  # fmt: skip
def test_trainer_with(pools: dict[int, Pool], tmp_path: Path, what: str) -> None:
    if what == "liger":
        pytest.importorskip("liger_kernel")
    world = 4 if what in ("own division", "rows classified") else 2  # with data-parallel ranks too
    losses, metrics = alone("changes", str(tmp_path), what, world)
    for ours, our_metrics in pools[world].run(world, parallel, "changes", {"cp_size": 2}, str(tmp_path), what):
        rounding = torch.finfo(torch.bfloat16).eps / 2 if "bf16" in what else rounding_of_steps("llama")
        check_values(ours, losses, rounding)
        check_values([*our_metrics.values()], [metrics[name] for name in our_metrics], rounding, *our_metrics)


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def stack(name: str, fill: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], True, fill)

    ids = stack("input_ids", 0)
    return {"input_ids": ids, "labels": stack("labels", -100), "attention_mask": (ids != 0).long()}


def metrics_of(prediction: Any, compute_result: bool = True) -> dict[str, float]:
    """Of predictions in one array, in a list of batches, or in lists of rows."""
    values = {"labels": prediction.label_ids, "inputs": prediction.inputs, "losses": prediction.losses}
    found = {f"{name}_{i}": x for name, y in values.items() if y is not None for i, x in enumerate(counted(y))}
    count, total = counted(prediction.predictions)
    return {**found, "predictions": total / 1000, "count": count} if compute_result else {}


def counted(values: Any) -> tuple[int, float]:
    """The number and the sum of all values that are not padding."""
    if isinstance(values, list | tuple):
        parts = [counted(x) for x in values]
        return sum(count for count, _ in parts), sum(total for _, total in parts)
    x = torch.as_tensor(values)
    x = x[x != -100].float()
    return x.numel(), float(x.sum())


def of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    """As ``compute_loss_func``."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


# Of TrainingArguments and of the Trainer: what touches batches, samplers, the loss, outputs, gradients, precision and
# evaluation. Switches that do not touch one another are in one run. Arguments that start with "_" are of
# ``with_switches``.
SWITCHES: dict[str, dict[str, Any]] = {
    "torch_compile": {
        "torch_compile": True, "torch_compile_backend": "eager", "_evaluate": True, "_kind": "qwen3_moe",
        "gradient_accumulation_steps": 2,
    },
    "batch_rebalance, include_num_input_tokens_seen, activation_checkpointing": {
        "train_sampling_strategy": "batch_rebalance", "include_num_input_tokens_seen": "non_padding",
        "activation_checkpointing": True, "use_cache": True, "_lengths": True, "gradient_accumulation_steps": 2,
    },
    "group_by_length, load_best_model_at_end": {
        "train_sampling_strategy": "group_by_length", "_lengths": True, "_evaluate": True,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "eval_on_start": True,
        **{f"{what}_{of}": value for of, value in (("strategy", "steps"), ("steps", 1)) for what in ("eval", "save")},
    },
    "sequential, prediction_loss_only": {
        "train_sampling_strategy": "sequential", "max_grad_norm": 0.1, "optim": "sgd",
        "ddp_find_unused_parameters": True,
        "accelerator_config": {"even_batches": False, "use_seedable_sampler": False},
        "prediction_loss_only": True, "_metrics": True,
    },
    "include_for_metrics, average_tokens_across_devices": {
        "include_for_metrics": ["inputs", "loss"], "eval_accumulation_steps": 1, "_metrics": True, "_full": True,
        "average_tokens_across_devices": False, "gradient_accumulation_steps": 2,
    },
    "eval_do_concat_batches, auto_find_batch_size": {
        "eval_do_concat_batches": False, "_metrics": True, "_full": True, "auto_find_batch_size": True
    },
    "eval_use_gather_object, dataloader_drop_last": {
        "eval_use_gather_object": True, "_metrics": True, "_full": True,
        "dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 2, "_rows": 9,
    },
    "batch_eval_metrics, split_batches": {
        "batch_eval_metrics": True, "_metrics": True, "_full": True,
        "accelerator_config": {"split_batches": True, "non_blocking": True},
    },
    "label_smoothing_factor, workers": {
        "label_smoothing_factor": 0.1, "_evaluate": True, "gradient_accumulation_steps": 2,
        "dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork",
        "dataloader_persistent_workers": True,
    },
    "compute_loss_func, epochs": {
        "compute_loss_func": of_outputs, "_evaluate": True, "max_steps": -1, "num_train_epochs": 2, "_rows": 9,
        "gradient_accumulation_steps": 2,
    },
    "bf16_full_eval": {"bf16_full_eval": True, "_evaluate": True},
    "ddp_static_graph": {"ddp_static_graph": True, "full_determinism": True},
}  # fmt: skip


def with_switches(config: Any, folder: str, name: str, batch: int = 2) -> Run:
    """What a Trainer logs in two steps and an evaluation, with the switch ``name``."""
    given = dict(SWITCHES[name])
    own = {key: given.pop(key) for key in [*given] if key.startswith("_")}
    lengths = None if "_lengths" in own else 37
    rows, eval_rows = sequences(own.get("_rows", 12), lengths), sequences(8, lengths)
    if lengths is None:
        given["data_collator"] = padded
    if "split_batches" in name:
        batch = 4  # of all ranks
    if "_metrics" in own:
        given["compute_metrics"] = metrics_of
    if config is not None and "_full" in own:
        config = seqpar.hf.ParallelismConfig(cp_size=2, outputs="full")
    with may_have_children():
        trainer = trainer_of(tiny(own.get("_kind", "llama")), config, folder, 2, rows, batch, eval_rows, **given)
        if config is not None:
            assert trainer.get_cp_size() == 2 and trainer.accelerator.parallelism_config.cp_size == 2
        trainer.train()
        evaluated = trainer.evaluate() if {"_evaluate", "_metrics"} & own.keys() else {}
    metrics = {key: x for key, x in evaluated.items() if not key.endswith(("time", "_second"))}
    history = trainer.state.log_history
    for key in ("grad_norm", "eval_loss", "num_input_tokens_seen"):
        metrics |= {f"{key}_{i}": float(entry[key]) for i, entry in enumerate(history) if key in entry}
    metrics |= {"flos": trainer.state.total_flos, "batch": trainer.get_total_train_batch_size(trainer.args)}
    return logged(trainer), metrics


BODIES["switches"] = lambda config, folder, names, batch=2: {
    name: with_switches(config, f"{folder}/{name}", name, batch) for name in names
}


@pytest.mark.thorough(names=[[*SWITCHES][:1], [*SWITCHES][7:]])
@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, [*SWITCHES][:1], id="compiled"),
        pytest.param(2, [*SWITCHES][1:7], id="2"),
        pytest.param(2, [*SWITCHES][7:], id="2, more"),
        pytest.param(4, [name for name in SWITCHES if name.startswith(("batch_rebalance", "eval_use_gather"))], id="4"),
    ],
)
def test_switches(pools: dict[int, Pool], tmp_path: Path, world: int, names: list[str]) -> None:
    """Each switch is right over 2 ranks that share sequences, and the samplers over 2 such groups."""
    if world == 4 and "has no batch size" in inspect.getsource(accelerate.data_loader.BatchSamplerShard.__init__):
        names = names[1:]  # an old accelerate refuses it on several ranks
    expected = alone("switches", str(tmp_path / "alone"), names, world)
    for ours in pools[world].run(world, parallel, "switches", {"cp_size": 2}, str(tmp_path / "ranks"), names):
        for name, (losses, metrics) in ours.items():
            rounding = rounding_of_steps(
                SWITCHES[name].get("_kind", "llama"), steps=5
            )  # the most that any of them makes
            if name == "bf16_full_eval":
                rounding = torch.finfo(torch.bfloat16).eps / 8  # the mean over the tokens of an evaluation
            if world == 4:
                metrics["flos"] = expected[name][1]["flos"]  # each process pads its rows to another length
            assert losses and metrics.keys() == expected[name][1].keys(), name
            check_values(losses, expected[name][0], rounding, name)
            check_values([*metrics.values()], [expected[name][1][key] for key in metrics], rounding, name)


@on_ranks
def trained_without(group: ProcessGroup, folder: str, what: str) -> str:
    with torchrun(group):
        config = seqpar.hf.ParallelismConfig(cp_size=2)
        if what == "a wrapper":
            accelerator = accelerate.Accelerator(cpu=True, parallelism_config=config)
            model = accelerator.prepare_model(tiny("llama"), evaluation_mode=True)
            call = partial(model, **make_batch("plain"))
        else:
            made = trainer_of(
                tiny("llama"), config, folder, 1, sequences(4), eval_rows=sequences(4), compute_metrics=accuracy
            )
            call = made.evaluate if what == "evaluate" else partial(made.predict, sequences(4))
        try:
            call()
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a wrapper", "it is trained without a wrapper"),
        ("evaluate", "pass outputs='full' to"),
        ("predict", "pass outputs='full' to"),
    ],
)
def test_trainer_without(pools: dict[int, Pool], tmp_path: Path, what: str, message: str) -> None:
    for error in pools[2].run(2, trained_without, str(tmp_path), what):
        assert message in error


def with_masks(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As a collator for masked language models: it draws the labels from PyTorch's generator."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    drawn = (torch.rand(ids.shape) < 0.5) & (ids != 0)
    return {"input_ids": ids, "labels": ids.masked_fill(~drawn, -100), "attention_mask": (ids != 0).long()}


class DrawsByRank(transformers.TrainerCallback):  # type: ignore[misc]
    """Draws other random numbers on each rank, as dropout does."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        draw(args.process_index)


def resumed(config: Any, folder: str, workers: int, data: str) -> Run:
    """The losses of five steps. The last three run after resuming in the middle of an epoch of three steps."""
    losses = []
    rows = sequences(6, None if data == "group_by_length" else 37)
    strategy = {"train_sampling_strategy": data} if data == "group_by_length" else {}
    for steps in (2, 5):
        with may_have_children():
            trainer = trainer_of(
                tiny("llama"), config, folder, steps, Stream(rows) if data == "stream" else rows,
                save_strategy="steps", save_steps=2, data_collator=with_masks, dataloader_num_workers=workers,
                **strategy,
            )  # fmt: skip
            if config is not None:
                trainer.add_callback(DrawsByRank())
            trainer.train(resume_from_checkpoint=steps == 5)
        losses = logged(trainer)
    return losses, {}


BODIES["resumed"] = resumed


@pytest.mark.thorough(workers=[0], data=["rows"])
@pytest.mark.parametrize(("workers", "data"), [(0, "rows"), (2, "rows"), (0, "group_by_length"), (0, "stream")])
def test_resume(pools: dict[int, Pool], tmp_path: Path, workers: int, data: str) -> None:
    """In the middle of an epoch, with random numbers that are drawn in the collate function."""
    expected = alone("resumed", str(tmp_path / "alone"), workers, data)
    assert len(expected[0]) == 5
    runs = pools[2].run(2, parallel, "resumed", {"cp_size": -1}, str(tmp_path / "two"), workers, data)
    compare(runs, expected, rounding_of_steps("llama", steps=5))


SCRIPT = """
import torch.distributed as dist

import seqpar.hf
from tests.hf.test_accelerate import with_loop

losses, _ = with_loop(seqpar.hf.ParallelismConfig(), "", "mistral", 4, "rows")
assert dist.get_world_size() == 2
if dist.get_rank() == 0:
    print("losses", *losses)
"""
YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 1
num_processes: 2
parallelism_config:
  parallelism_config_cp_size: 2
"""


def accelerate_launch(out: Path, arguments: list[str]) -> None:
    """``accelerate launch``, with ``out`` as the standard output of the ranks."""
    # The ranks are forks of this process, which import nothing again.
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", PET_RUN_PATH="1", PET_START_METHOD="fork")
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
    sys.argv[1:] = arguments
    accelerate.commands.launch.main()


def test_accelerate_launch(tmp_path: Path) -> None:
    """The number of ranks comes from the YAML file."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "two.yaml").write_text(YAML)
    arguments = ["--config_file", str(tmp_path / "two.yaml"), "--main_process_port", "0", str(tmp_path / "script.py")]
    launcher = get_context("forkserver").Process(target=accelerate_launch, args=(tmp_path / "out", arguments))
    launcher.start()
    try:
        expected, _ = alone("loop", "", "mistral", 4, "rows")
        launcher.join(120)
    finally:
        launcher.kill()
    assert launcher.exitcode == 0
    (line,) = [line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("losses")]
    check_values([float(x) for x in line.split()[1:]], expected, rounding_of_steps("mistral"))


@on_ranks
def refused(group: ProcessGroup, config: dict[str, Any], arguments: dict[str, Any]) -> str:
    with torchrun(group):
        try:
            accelerator = accelerate.Accelerator(
                cpu=True, parallelism_config=seqpar.hf.ParallelismConfig(**config), **arguments
            )
            accelerator.prepare(DataLoader(sequences(4), batch_size=2))
            accelerator.prepare(seqpar.hf.parallelize(tiny("llama"), group=group))
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"cp_size": 4}, {}, "expected a product equal to the number of processes, 2"),
        ({"cp_size": 2, "dp_shard_size": 2}, {}, "expected a product equal to the number of processes, 2"),
        ({"cp_size": 1}, {}, "the ParallelismConfig has cp_size=1 and batches="),
        (
            {"cp_size": 2},
            {"dataloader_config": accelerate.utils.DataLoaderConfiguration(dispatch_batches=True)},
            "dispatch_batches=True",
        ),
    ],
)
def test_refused_configs(
    pools: dict[int, Pool], config: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    for error in pools[2].run(2, refused, config, arguments):
        assert message in error


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in ({"sp_size": 8}, {}):  # as accelerate's users say it, or ``accelerate launch``
        monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "1" if sizes else "8")
        config = seqpar.hf.ParallelismConfig(**sizes)
        assert (config.cp_size, config.sp_size, config.settings.strategy) == (8, 1, "ulysses")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "1")
    config = seqpar.hf.ParallelismConfig(2, strategy="hybrid", ulysses_size=2)
    assert isinstance(config, accelerate.ParallelismConfig)
    assert config.cp_size == 2 and not config.cp_enabled
    assert "cp_size=2" in repr(config) and "strategy='hybrid'" in repr(config)
    arguments = transformers.TrainingArguments(output_dir="unused", use_cpu=True, parallelism_config=config)
    assert '"ulysses_size": 2' in arguments.to_json_string()
    for cp_size, ranks in ((3, 12), (-1, -1)):
        both = seqpar.hf.ParallelismConfig(cp_size, sp_size=4)
        assert both.cp_size == ranks and both.settings.strategy == "hybrid"
        assert both.settings.options == {"ulysses_size": 4}
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "8")
    assert seqpar.hf.ParallelismConfig().cp_size == 8
    for wrong, message in (
        ({"cp_size": 0}, "cp_size=0: expected at least 1"),
        ({"sp_size": 2, "strategy": "ring"}, "sp_size=2, cp_size=8: sp_size is the number of ranks of Ulysses"),
        ({"sp_size": 2, "cp_size": 2, "strategy": "ulysses"}, "sp_size=2, cp_size=2: sp_size is the number"),
        ({"sp_size": 2, "cp_size": 2, "ulysses_size": 4}, "strategy='hybrid' over sp_size"),
        ({"sp_size": -1, "cp_size": 2}, "sp_size=-1, cp_size=2"),
        ({"layout": "zigzack"}, "layout='zigzack'"),
        ({"outputs": "all"}, "outputs='all'"),
        ({"strategy": "rong"}, "strategy='rong'"),
    ):
        with pytest.raises(ValueError, match=message):
            seqpar.hf.ParallelismConfig(**wrong)


def test_what_it_relies_on() -> None:
    """Undocumented names in accelerate and transformers, which ``hf/accelerate.py`` lists."""
    start = inspect.getsource(accelerate.Accelerator.__init__)
    assert 0 < start.index("parallelism_config.get_device_mesh(") < start.index("._validate_accelerator(self)")
    prepare = inspect.getsource(accelerate.Accelerator._prepare_one)
    assert "self.prepare_model(" in prepare and "self.prepare_data_loader(" in prepare
    assert "self.gather(" in inspect.getsource(accelerate.Accelerator.gather_for_metrics)
    assert "parallelism_config.tp_enabled" in inspect.getsource(accelerate.Accelerator.prepare)
    assert accelerate.ParallelismConfig(dp_shard_size=2).fsdp_dim_names == ["dp_shard_cp"]
    for size in ("tp", "cp"):
        source = inspect.getsource(getattr(transformers.Trainer, f"get_{size}_size"))
        assert f"pc.{size}_size" in source or "pc." not in source
    for step in (transformers.Trainer.training_step, transformers.Trainer.prediction_step):
        assert "self.compute_loss(" in inspect.getsource(step)
    trl = pytest.importorskip("trl")
    base, sft = (getattr(import_module(f"trl.{module}"), name) for module, name in (_BASE, _SFT))
    assert issubclass(trl.DPOTrainer, base) and issubclass(sft, base) and sft is trl.SFTTrainer
    assert _is_of_trl(trl.SFTTrainer.__new__(trl.SFTTrainer), _BASE, _SFT)


def with_mixin(mesh: Any, folder: str, batch: int, across: bool, eval_rows: int) -> tuple[Run, list[int]]:
    """The losses of two steps, the evaluation loss, and the numbers of tokens and of sequences in a step."""
    model = tiny("qwen3")
    if mesh is not None:
        seqpar.hf.parallelize(model, mesh=mesh, strategy="hybrid")
    trainer = trainer_of(
        model, None, folder, 2, sequences(20, 40, 9), batch, sequences(eval_rows, 40, 9),
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


@pytest.mark.thorough(dp=[1])
@pytest.mark.thorough(across=[False])
@pytest.mark.parametrize(("dp", "across", "eval_rows"), [(2, True, 8), (2, False, 8), (1, True, 7)])
def test_mixin_trainer(pools: dict[int, Pool], tmp_path: Path, dp: int, across: bool, eval_rows: int) -> None:
    """``dp`` replicas of ``4 / dp`` ranks of a sequence, compared with one process with ``dp`` times the batch."""
    with torchrun(None):
        (losses, metrics), counts = with_mixin(None, str(tmp_path), 2, across, eval_rows)
    for (ours, our_metrics), our_counts in pools[4].run(4, mixin_on_ranks, str(tmp_path), dp, across, eval_rows):
        if across:
            check_values(ours, losses, rounding_of_steps("qwen3"))
        else:  # transformers takes the mean of each replica's mean
            assert ours == pytest.approx(losses, abs=0.2)
        if dp == 1:
            check_values([*our_metrics.values()], [*metrics.values()], rounding_of_steps("qwen3"))
        else:  # replicas are weighted by their tokens before the shift, one process's batches by the tokens after it
            assert our_metrics == pytest.approx(metrics, abs=2e-2 if across else 0.2)
        assert our_counts == counts


def test_refused_mixin_trainers(tmp_path: Path) -> None:
    def trainer(model: Any, **options: Any) -> Any:
        cls = seqpar.hf.SequenceParallelTrainer
        return trainer_of(model, None, str(tmp_path), 1, sequences(2), trainer=cls, **options)

    with pytest.raises(ValueError, match="not parallelized"):
        trainer(tiny("llama"))
    model = seqpar.hf.parallelize(tiny("llama"), strategy="local")
    with pytest.raises(ValueError, match="compute_metrics: it needs the logits"):
        trainer(model, compute_metrics=len)


@on_ranks
def drawn(group: ProcessGroup, sequence_ranks: int, workers: int) -> list[Any]:
    torch.manual_seed(group.rank())
    with torchrun(group), may_have_children():
        stateful = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = accelerate.Accelerator(
            parallelism_config=seqpar.hf.ParallelismConfig(cp_size=sequence_ranks),
            dataloader_config=stateful if workers < 0 else None,
        )
        loader, seen = accelerator.prepare(loader_of(max(workers, 0), group.rank())), []
        loaders = [loader] * 3
        if workers >= 0:  # torchdata's cannot be copied
            loaders += [copy.copy(loader), copy.deepcopy(loader), accelerate.skip_first_batches(loader, 1)]
        for each in loaders:
            for batch in each:
                seen.append((batch["input_ids"].tolist(), batch["labels"].tolist()))
                draw(1 + 3 * group.rank())
                if workers < 0 and len(seen) % 3 == 0:  # resume after this batch
                    state = each.state_dict()
                    each = accelerator.prepare(loader_of(0, group.rank()))
                    each.load_state_dict(state)
                    seen += [(batch["input_ids"].tolist(), batch["labels"].tolist()) for batch in each]
                    break
    return seen


@pytest.mark.thorough(workers=[0])
@pytest.mark.parametrize("workers", [0, 2, -1])
def test_ranks_draw_the_same_rows(pools: dict[int, Pool], workers: int) -> None:
    """From samplers, datasets and collate functions, and in workers that transformers seeds by the rank.

    Also from loaders that are copied, resumed, or made from a prepared one. -1: of torchdata.
    """
    if workers < 0:
        pytest.importorskip("torchdata")
        if "adjust_state_dict_for_prefetch" not in vars(accelerate.data_loader.DataLoaderShard):
            pytest.skip("this version of accelerate resumes loaders at another batch")
    if workers <= 0:
        first, second = pools[2].run(2, drawn, 2, workers)
        assert first == second and first[:4] != first[4:8] and len(first) == (23 if workers == 0 else 12)
    by_rank = pools[4].run(4, drawn, 2, workers)
    assert by_rank[0] == by_rank[1] != by_rank[2] == by_rank[3] and len(by_rank[0]) == (11 if workers >= 0 else 8)
    assert by_rank[0][:2] != by_rank[0][2:4]
    rows = sorted(row[0] // 100 for rank in (0, 2) for _, labels in by_rank[rank][:2] for row in labels)
    assert rows == [*range(8)]  # every row of an epoch once


class Distillation(transformers.Trainer):  # type: ignore[misc]
    """Stands for TRL's trainer, which needs a second model."""


class DistillationOfSequences(seqpar.hf.SequenceParallelMixin, Distillation):
    pass


@on_ranks
def refused_trainers(group: ProcessGroup, folder: str, by_config: bool) -> None:
    if by_config:
        model, config = tiny("llama"), seqpar.hf.ParallelismConfig(cp_size=2)
        classes: tuple[Any, Any] = transformers.Trainer, Distillation
    else:
        model, config = seqpar.hf.parallelize(tiny("llama"), group=group), None
        classes = seqpar.hf.SequenceParallelTrainer, DistillationOfSequences
    with torchrun(group):
        trainer = trainer_of(model, config, folder, 1, sequences(4), trainer=classes[0])
        trainer.loss = torch.nn.Linear(1, 1)
        trainer.loss.gather_across_devices = True
        with pytest.raises(ValueError, match=r"gather_across_devices=True: .* 2 times, .*batches='per_rank'"):
            trainer.train()
    module = {"trl.trainer.distillation_trainer": SimpleNamespace(DistillationTrainer=Distillation)}
    with (
        fake_modules(module),
        torchrun(group),
        pytest.raises(ValueError, match=r"Distillation.*: it computes its loss from parts"),
    ):
        trainer_of(model, config, folder, 1, sequences(4), trainer=classes[1])


@pytest.mark.parametrize("by_config", [True, False])
def test_refused_trainers(pools: dict[int, Pool], tmp_path: Path, by_config: bool) -> None:
    pools[2].run(2, refused_trainers, str(tmp_path), by_config)
