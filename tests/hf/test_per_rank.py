"""Each rank of a sequence has its own batch: outputs, losses and gradients are one device's."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
import transformers
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import seqpar
import seqpar.hf
from seqpar.hf.accelerate import _needs_per_rank_batches
from seqpar.hf.losses.logits import MissingLogits
from seqpar.ranks import rendezvous

from ..live_bytes import LiveBytes
from ..pool import OwnPool, Pool, limit_waits, mesh_of, on_ranks, start
from ..reference import assert_close
from ..standins import fake_modules
from .test_accelerate import torchrun
from .test_compose import fsdp1, fsdp1_gradients, shard_fully
from .workers import PARALLELIZE, Result, check, gradients, make_batch, rounded, rounding_of, tiny

pytestmark = pytest.mark.slow


def batch_of(rank: int, how: str) -> dict[str, Tensor]:
    """A batch for each rank, with different lengths and, unless it is packed, different numbers of rows."""
    return make_batch(how, 45 + 7 * rank, 1 + rank % 3, seed=rank)


def one_device(world: int, kind: str, how: str) -> list[Result]:
    """For each batch its loss, and the gradients of the mean of the weighted losses."""
    model, losses = tiny(kind), list[Tensor]()

    def step() -> float:
        losses[:] = [model(**batch_of(rank, how), use_cache=False).loss for rank in range(world)]
        torch.stack([(1 + rank) * loss for rank, loss in enumerate(losses)]).mean().backward()
        return 0.0

    result = rounded(model, step)
    return [result._replace(loss=loss.item()) for loss in losses]


@on_ranks
def trained(
    group: ProcessGroup, expected: list[Result], kind: str, strategy: str, how: str, checkpointing: bool | None = None
) -> None:
    """``checkpointing`` is the ``use_reentrant`` of activation checkpointing."""
    rank = group.rank()
    model = seqpar.hf.parallelize(tiny(kind), group=group, batches="per_rank", **PARALLELIZE[strategy])
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    loss = model(**batch_of(rank, how)).loss
    ((1 + rank) * loss).backward()
    seqpar.sync_gradients(model, group=group)
    check(Result(loss.item(), gradients(model)), expected[rank])


@pytest.mark.thorough(kind=["qwen3_moe"])
@pytest.mark.parametrize(
    ("kind", "strategy", "how", "world", "checkpointing"),
    [
        ("llama", "ring-zigzag", "left", 2, None),
        ("mistral", "ulysses-contiguous", "right", 4, None),
        ("qwen3_moe", "hybrid-zigzag", "right", 4, None),
        ("llama", "all_gather-striped", "packed", 2, None),
        ("llama", "ring-zigzag", "plain", 2, False),
        ("llama", "ring-zigzag", "plain", 2, True),
        ("llama", "ring-zigzag", "plain", 1, None),
    ],
)
def test_loss_and_gradients(
    pool: Pool, kind: str, strategy: str, how: str, world: int, checkpointing: bool | None
) -> None:
    pool.run(world, trained, one_device(world, kind, how), kind, strategy, how, checkpointing)


@on_ranks
def wrapped(group: ProcessGroup, wrapper: str, expected: list[Result]) -> None:
    rank = dist.get_rank()
    model = seqpar.hf.parallelize(tiny("llama"), mesh=mesh_of(2, 2, 1, 1), batches="per_rank")
    outer: Any = model
    if "checkpointed" in wrapper:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if wrapper == "ddp":  # finding unused parameters walks through the exchange
        outer = DistributedDataParallel(model, find_unused_parameters=True)
    elif wrapper == "fsdp1":
        outer = fsdp1(model, True, LlamaDecoderLayer)
    else:
        shard_fully(model)
    loss = outer(**batch_of(rank, "right")).loss
    ((1 + rank) * loss).backward()
    grads = fsdp1_gradients(outer, "llama") if wrapper == "fsdp1" else gradients(outer)
    check(Result(loss.item(), grads), expected[rank])


@pytest.mark.thorough(wrapper=["fsdp", "fsdp, checkpointed layers", "fsdp1"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp, checkpointed layers", "fsdp1"])
def test_wrappers_over_all_ranks(four: Pool, wrapper: str) -> None:
    """Wrappers that average over all 4 ranks, of which two share each sequence."""
    four.run(4, wrapped, wrapper, one_device(4, "llama", "right"))


@on_ranks
def inferred(group: ProcessGroup) -> None:
    """The outputs without labels, and the tokens that a rank generates from its own prompt."""
    rank = group.rank()
    plain, model = tiny("mistral").eval(), tiny("mistral").eval()
    batch: dict[str, Any] = batch_of(rank, "left")
    del batch["labels"]
    real = batch["attention_mask"].bool()

    def equal(ours: Tensor, theirs: Tensor) -> None:
        assert_close(ours[real], theirs[real])

    with torch.no_grad():
        expected = plain(**batch, output_hidden_states=True, use_cache=False)
        seqpar.hf.parallelize(model, group=group, batches="per_rank")
        output = model(**batch, output_hidden_states=True)
        for ours, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
            equal(ours, theirs)
        equal(output.logits, expected.logits)
        last = model(**batch, logits_to_keep=5).logits
        assert_close(last, expected.logits[:, -5:])
        assert isinstance(model(**batch, labels=batch["input_ids"]).logits, MissingLogits)
        prompt: dict[str, Any] = {name: x[:1] for name, x in batch.items()}
        prompt.update(max_new_tokens=5 + 3 * rank, do_sample=False, eos_token_id=None)
        assert torch.equal(model.generate(**prompt), plain.generate(**prompt))
        # A copy calls itself, and restoring gives the calls back.
        other = copy.deepcopy(model)
        for p in other.parameters():
            p.zero_()
        assert float(other(**batch).logits.abs().max()) == 0
        equal(seqpar.hf.restore(model)(**batch).logits, expected.logits)


def test_outputs_and_generation(pool: Pool) -> None:
    pool.run(2, inferred)


def focal(pooled_logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return (torch.nn.functional.cross_entropy(pooled_logits, labels, reduction="none") ** 2).mean()


@on_ranks
def classified(group: ProcessGroup, batches: Any, user_loss: bool) -> None:
    """A model that scores the last token of each row."""

    def made() -> Any:
        model = tiny("llama", auto=transformers.AutoModelForSequenceClassification, num_labels=3)
        if user_loss:
            model.loss_function = focal
        return model

    def batch_of_rows(rank: int) -> dict[str, Tensor]:
        batch = batch_of(rank, "right")
        batch["labels"] = torch.arange(len(batch["input_ids"])) % 3
        return batch

    at = group.rank() if batches == "per_rank" else 0
    by_rank = [batch_of_rows(i) for i in range(group.size() if batches == "per_rank" else 1)]
    plain, model = made(), seqpar.hf.parallelize(made(), group=group, batches=batches)
    expected = [plain(**batch, use_cache=False) for batch in by_rank]
    torch.stack([x.loss for x in expected]).mean().backward()
    output = model(**by_rank[at])
    output.loss.backward()
    seqpar.sync_gradients(model, group=group)
    assert_close(output.logits, expected[at].logits)
    one = Result(expected[at].loss.item(), gradients(plain), rounding_of("llama"))
    check(Result(output.loss.item(), gradients(model)), one)


@pytest.mark.parametrize("user_loss", [False, True])
@pytest.mark.parametrize("batches", ["per_rank", "shared"])
def test_sequence_classification(pool: Pool, batches: str, user_loss: bool) -> None:
    pool.run(2, classified, batches, user_loss)


@on_ranks
def peaks(group: ProcessGroup) -> tuple[int, int]:
    """The peak bytes of a forward and backward, for a shared batch and for each rank's batch of the same size."""
    found = []
    for batches in ("shared", "per_rank"):
        options: Any = {"batches": batches}
        model = seqpar.hf.parallelize(tiny("llama"), group=group, **options)
        with LiveBytes() as live:
            model(**make_batch("plain", 1024, 1, seed=0)).loss.backward()
        found.append(live.peak)
    return found[0], found[1]


@pytest.mark.thorough
def test_memory_of_one_batch_at_a_time(pool: Pool) -> None:
    for shared, per_rank in pool.run(4, peaks):
        assert per_rank < 1.25 * shared, (per_rank, shared)


def with_gap(batch: dict[str, Any]) -> None:
    batch["attention_mask"][0, 3] = 0


def cut_to_one_token(batch: dict[str, Any]) -> None:
    batch.update({name: x[:, :1] for name, x in batch.items()})


def shard(batch: dict[str, Any]) -> None:
    batch.update(seqpar.hf.shard_batch(make_batch("plain"), check=False))


# For each fault: the ranks that have it, a change of the batch, and what the error says.
FAULTS: dict[str, tuple[tuple[int, ...], Callable[[dict[str, Any]], object], str]] = {
    "gap": ((1,), with_gap, "the batch of rank 1 of the sequence: attention_mask: row 0 has zeros between ones"),
    "arguments": ((1,), lambda batch: batch.update(use_cache=False), "arguments: the ranks of the group differ"),
    "gradients": ((1,), lambda batch: torch.set_grad_enabled(False), "gradients"),
    "sharded": ((0, 1), shard, "batch: it is sharded already"),
    "boundaries": (
        (0, 1), lambda batch: batch.update(cu_seq_lens_q=torch.tensor([0, 45])), "cu_seq_lens_q: not supported"
    ),
    "object": ((0, 1), lambda batch: batch.update(more=object()), "more=object"),
    "tuple": ((0, 1), lambda batch: batch.update(return_dict=False), "return_dict=False"),
    "short": ((1,), cut_to_one_token, "the batch of rank 1 of the sequence: batch: rows of 1 tokens"),
    "nothing": ((0, 1), lambda batch: batch.clear(), "batch: expected 'input_ids'"),
}  # fmt: skip


@on_ranks
def with_faults(group: ProcessGroup) -> None:
    for fault, (ranks, change, message) in FAULTS.items():
        model = seqpar.hf.parallelize(tiny("llama"), group=group, batches="per_rank")
        batch: dict[str, Any] = batch_of(group.rank(), "right")
        if group.rank() in ranks:
            change(batch)
        try:
            model(**batch)
        except (ValueError, TypeError, RuntimeError) as error:
            assert str(error).startswith(message), (fault, error)  # noqa: PT017 (on every rank)
        else:
            raise AssertionError(fault)
        finally:
            torch.set_grad_enabled(True)


def test_refused_calls(pool: Pool) -> None:
    pool.run(2, with_faults)


@on_ranks
def called_less(group: ProcessGroup, port: int) -> str:
    """The error if rank 1 calls the model once and rank 0 calls it twice."""
    group = start(port, "calls", group.rank(), group.size())
    model = seqpar.hf.parallelize(tiny("llama"), batches="per_rank")
    # The rank waits less for the reports of others.
    with torch.no_grad(), mock.patch.object(rendezvous, "_GRACE_S", 0.2):
        model(**batch_of(group.rank(), "right"))
        limit_waits(1.5)
        try:
            if group.rank() == 0:
                model(**batch_of(0, "right"))
        except RuntimeError as error:
            return str(error)
    return ""


def test_error_if_a_rank_does_not_call(own: OwnPool) -> None:
    message, _ = own.pool.run(2, called_less, own.port)
    assert "1" in message and "handshake" in message, message


class PreferenceTrainer(transformers.Trainer):  # type: ignore[misc]
    """A trainer that only makes its Accelerator."""

    def __init__(self, fsdp: bool, config: Any) -> None:
        self.fsdp, self.config = fsdp, config
        self.args = transformers.TrainingArguments("unused", use_cpu=True, report_to="none")
        self.create_accelerator_and_postprocess()

    def _build_accelerator_args(self, **arguments: Any) -> dict[str, Any]:
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2) if self.fsdp else None
        return {"cpu": True, "parallelism_config": self.config, "fsdp_plugin": plugin}

    def another(self, config: Any) -> Any:
        """An Accelerator for something else."""
        return accelerate.Accelerator(cpu=True, parallelism_config=config)


class SupervisedTrainer(PreferenceTrainer):
    pass


# Stands for TRL, whose installed version is asked for.
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
TRL: Any = {
    "trl.trainer.base_trainer": SimpleNamespace(_BaseTrainer=PreferenceTrainer),
    "trl.trainer.sft_trainer": SimpleNamespace(SFTTrainer=SupervisedTrainer),
}


@on_ranks
def batches_of_trainer(group: ProcessGroup, port: int, fsdp: bool, expected: list[Result]) -> list[float]:
    """A rank's batches with a trainer that needs batches per rank."""
    group = start(port, f"fsdp {fsdp}", group.rank(), group.size())
    rank = group.rank()
    with torchrun(group):
        config = seqpar.hf.ParallelismConfig(group.size())
        # Without a trainer of TRL the ranks of a sequence share batches; the next Accelerator has the same state.
        shared = PreferenceTrainer.__new__(PreferenceTrainer).another(config)
        rows: Any = DataLoader(cast(Any, torch.arange(6.0)), batch_size=1)
        assert [float(x) for x in shared.prepare_data_loader(rows)] == [0, 1, 2, 3, 4, 5]
        if fsdp:
            accelerate.state.AcceleratorState._reset_state()
        with fake_modules(TRL):
            accelerator = PreferenceTrainer(fsdp, config).accelerator
        batches = [float(x) for x in accelerator.prepare_data_loader(rows)]
        model = accelerator.prepare(tiny("llama"))
        loss = model(**batch_of(rank, "right")).loss
        accelerator.backward((1 + rank) * loss)
        assert accelerator.gather_for_metrics(torch.tensor([float(rank)])).tolist() == [0, 1]
    check(Result(loss.item(), gradients(model)), expected[rank])
    return batches


@needs_trl
@pytest.mark.parametrize("fsdp", [False, True])
def test_trainer_that_needs_batches_per_rank(own: OwnPool, fsdp: bool) -> None:
    expected = one_device(2, "llama", "right")
    assert own.pool.run(2, batches_of_trainer, own.port, fsdp, expected) == [[0, 2, 4], [1, 3, 5]]


@needs_trl
def test_which_trainers_need_batches_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes decide, whatever they are called."""
    trainer = PreferenceTrainer.__new__(PreferenceTrainer)
    assert not _needs_per_rank_batches(trainer)
    for name, module in TRL.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert _needs_per_rank_batches(trainer) and not _needs_per_rank_batches(None)
    for cls in (SupervisedTrainer, type("Mine", (SupervisedTrainer,), {}), transformers.Trainer):
        assert not _needs_per_rank_batches(cls.__new__(cls))
    monkeypatch.setattr("seqpar.hf.accelerate.version", lambda package: "1.8.0")
    with pytest.raises(ImportError, match=r"PreferenceTrainer requires TRL 1\.9"):
        _needs_per_rank_batches(trainer)
