"""Each rank of a sequence has a batch of its own: outputs, losses and gradients are those of one device."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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
from seqpar.hf.loss import MissingLogits

from ..live_bytes import LiveBytes
from ..pool import OwnPool, Pool, WorkerError, mesh_of, on_ranks, start
from .test_compose import fsdp1, fsdp1_gradients
from .test_accelerate import torchrun
from .workers import PARALLELIZE, gradients, make_batch, tiny, worst

pytestmark = pytest.mark.slow
LOSS, GRADIENT, OUTPUT = 2e-5, 1e-3, 1e-4


def batch_of(rank: int, how: str) -> dict[str, Tensor]:
    """A batch for each rank, with different lengths and, unless it is packed, different numbers of rows."""
    return make_batch(how, 45 + 7 * rank, 1 + rank % 3, seed=rank)


@cache
def one_device(world: int, kind: str, how: str) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each batch, and the gradients of the weighted sum of the losses, without sequence parallelism."""
    model = tiny(kind)
    losses = [model(**batch_of(rank, how), use_cache=False).loss for rank in range(world)]
    torch.stack([(1 + rank) * loss for rank, loss in enumerate(losses)]).sum().backward()
    return [loss.item() for loss in losses], gradients(model)


@on_ranks
def trained(
    group: ProcessGroup, kind: str, strategy: str, how: str, checkpointing: bool | None = None
) -> tuple[float, float]:
    """Errors of the loss and gradients. ``checkpointing`` is the ``use_reentrant`` of activation checkpointing."""
    rank = group.rank()
    losses, grads = one_device(group.size(), kind, how)
    model = seqpar.hf.parallelize(tiny(kind), group=group, batches="per_rank", **PARALLELIZE[strategy])
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    loss = model(**batch_of(rank, how)).loss
    ((1 + rank) * loss).backward()
    seqpar.sync_gradients(model, group=group)
    return abs(loss.item() - losses[rank]), worst(gradients(model), grads)


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
    for loss, gradient in pool.run(world, trained, kind, strategy, how, checkpointing):
        assert loss < LOSS and gradient < GRADIENT


def full_gradients(model: Any) -> dict[str, Tensor]:
    """The full gradients, also of parameters that ``fully_shard`` has sharded."""
    return {
        name.replace("module.", ""): g.full_tensor() if isinstance(g, DTensor) else g
        for name, g in gradients(model).items()
    }


@on_ranks
def wrapped(group: ProcessGroup, wrapper: str) -> tuple[float, float]:
    """Errors with wrappers that average over all ranks, of which four share each sequence."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses, grads = one_device(world, "llama", "right")
    mesh = mesh_of(2, 4, 1, 1)
    model = seqpar.hf.parallelize(tiny("llama"), mesh=mesh, batches="per_rank")
    outer: Any = model
    if "checkpointed" in wrapper:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if wrapper == "ddp":  # finding unused parameters walks through the exchange
        outer = DistributedDataParallel(model, find_unused_parameters=True)
    elif wrapper == "fsdp1":
        outer = fsdp1(model, True, LlamaDecoderLayer)
    else:
        everyone = dist.device_mesh.init_device_mesh("cpu", (world,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=everyone)
        fully_shard(model, mesh=everyone)
    loss = outer(**batch_of(rank, "right")).loss
    ((1 + rank) * loss).backward()
    expected = {name: g / world for name, g in grads.items()}
    ours = fsdp1_gradients(outer, "llama") if wrapper == "fsdp1" else full_gradients(outer)
    return abs(loss.item() - losses[rank]), worst(ours, expected)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp, checkpointed layers", "fsdp1"])
def test_wrappers_that_average(pool: Pool, wrapper: str) -> None:
    for loss, gradient in pool.run(8, wrapped, wrapper):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def inferred(group: ProcessGroup) -> list[float]:
    """Errors of the outputs without labels, and of the tokens that a rank generates from its own prompt."""
    rank = group.rank()
    plain, model = tiny("mistral").eval(), tiny("mistral").eval()
    batch = batch_of(rank, "left")
    del batch["labels"]
    with torch.no_grad():
        expected = plain(**batch, output_hidden_states=True, use_cache=False)
        seqpar.hf.parallelize(model, group=group, batches="per_rank")
        output = model(**batch, output_hidden_states=True)
        kept = model(**batch, logits_to_keep=5).logits
        assert isinstance(model(**batch, labels=batch["input_ids"]).logits, MissingLogits)
        prompt = {name: x[:1] for name, x in batch.items()}
        same = [
            x.generate(**prompt, max_new_tokens=5 + 3 * rank, do_sample=False, eos_token_id=None)
            for x in (plain, model)
        ]
    real = batch["attention_mask"].bool()
    errors = [
        float((ours - theirs)[real].abs().max())
        for ours, theirs in zip(output.hidden_states, expected.hidden_states, strict=True)
    ]
    errors.append(float((output.logits - expected.logits)[real].abs().max()))
    errors.append(float((kept - expected.logits[:, -5:]).abs().max()))
    assert torch.equal(same[0], same[1])
    # A copy calls itself, and restoring gives the calls back.
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
        assert float(other(**batch).logits.abs().max()) == 0
        errors.append(float((seqpar.hf.restore(model)(**batch).logits - expected.logits)[real].abs().max()))
    return errors


def test_outputs_and_generation(pool: Pool) -> None:
    for errors in pool.run(2, inferred):
        assert max(errors) < OUTPUT, errors


@on_ranks
def classified(group: ProcessGroup, batches: Any, own_loss: bool) -> tuple[float, float, float]:
    """Errors of scores, loss and gradients of a model that scores the last token of each row."""
    rank = group.rank()

    def focal(pooled_logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return (torch.nn.functional.cross_entropy(pooled_logits, labels, reduction="none") ** 2).mean()

    config = transformers.AutoConfig.for_model(**{**tiny("llama").config.to_dict(), "num_labels": 3})

    def made() -> Any:
        torch.manual_seed(0)
        model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
        if own_loss:
            model.loss_function = focal
        return model

    def batch_of_rows(rank: int) -> dict[str, Tensor]:
        batch = batch_of(rank, "right")
        batch["labels"] = torch.arange(len(batch["input_ids"])) % 3
        return batch

    plain = made()
    own = [batch_of_rows(i if batches == "per_rank" else 0) for i in range(group.size())]
    expected = [plain(**batch, use_cache=False) for batch in own]
    torch.stack([x.loss for x in (expected if batches == "per_rank" else expected[:1])]).sum().backward()
    model = seqpar.hf.parallelize(made(), group=group, batches=batches)
    output = model(**own[rank])
    output.loss.backward()
    seqpar.sync_gradients(model, group=group)
    scores = float((output.logits - expected[rank].logits).abs().max())
    return scores, abs(output.loss.item() - expected[rank].loss.item()), worst(gradients(model), gradients(plain))


@pytest.mark.parametrize("own_loss", [False, True])
@pytest.mark.parametrize("batches", ["per_rank", "shared"])
def test_sequence_classification(pool: Pool, batches: str, own_loss: bool) -> None:
    for scores, loss, gradient in pool.run(2, classified, batches, own_loss):
        assert scores < OUTPUT and loss < LOSS and gradient < GRADIENT


@on_ranks
def peaks(group: ProcessGroup) -> tuple[int, int]:
    """The peak bytes of a forward and backward, for a shared batch and for own batches of the same size."""
    found = []
    for batches in ("shared", "per_rank"):
        model = seqpar.hf.parallelize(tiny("llama"), group=group, batches=batches)
        batch = make_batch("plain", 1024, 1, seed=0)
        with LiveBytes() as live:
            model(**batch).loss.backward()
        found.append(live.peak)
    return found[0], found[1]


def test_activations_of_one_batch_at_a_time(pool: Pool) -> None:
    for shared, own in pool.run(4, peaks):
        assert own < 1.25 * shared, (own, shared)


@on_ranks
def refused(group: ProcessGroup, how: str) -> None:
    rank = group.rank()
    model = seqpar.hf.parallelize(tiny("llama"), group=group, batches="per_rank")
    batch: dict[str, Any] = batch_of(rank, "right")
    if how == "gap" and rank == 1:
        batch["attention_mask"][0, 3] = 0
    elif how == "arguments" and rank == 1:
        batch["output_hidden_states"] = True
    elif how == "gradients" and rank == 1:
        torch.set_grad_enabled(False)
    elif how == "sharded":
        batch = seqpar.hf.shard_batch(make_batch("plain"), group=group)
    elif how == "boundaries":
        batch["cu_seq_lens_q"] = torch.tensor([0, 45])
    elif how == "object":
        batch["more"] = object()
    elif how == "tuple":
        batch["return_dict"] = False
    elif how == "short" and rank == 1:
        batch = {name: x[:, :1] for name, x in batch.items()}
    elif how == "nothing":
        batch = {}
    try:
        model(**batch)
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("gap", "the batch of rank 1 of the sequence: attention_mask: row 0 has zeros between ones"),
        ("arguments", "arguments: the ranks of the group differ"),
        ("gradients", "gradients"),
        ("sharded", "batch: it is sharded already"),
        ("boundaries", "cu_seq_lens_q: not supported"),
        ("object", "more=object"),
        ("tuple", "return_dict=False"),
        ("short", "the batch of rank 1 of the sequence: batch: rows of 1 tokens"),
        ("nothing", "batch: expected 'input_ids'"),
    ],
)
def test_refused_calls(how: str, message: str, pool: Pool) -> None:
    with pytest.raises(WorkerError) as raised:
        pool.run(2, refused, how)
    assert str(raised.value).count(f"Error: {message}") == 2, raised.value


@on_ranks
def called_less(group: ProcessGroup, port: int) -> str:
    """The error if rank 1 calls the model once and rank 0 calls it twice."""
    group = start(port, "calls", group.rank(), group.size(), timeout_s=4.0)
    model = seqpar.hf.parallelize(tiny("llama"), batches="per_rank")
    with torch.no_grad():
        model(**batch_of(group.rank(), "right"))
        try:
            if group.rank() == 0:
                model(**batch_of(0, "right"))
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_rank_that_does_not_call(own: OwnPool) -> None:
    waited, _ = own.pool.run(2, called_less, own.port)
    assert "1" in waited and "handshake" in waited, waited


def test_arguments() -> None:
    unknown: Any = "mine"
    with pytest.raises(ValueError, match="batches='mine'"):
        seqpar.hf.parallelize(tiny("llama"), strategy="local", batches=unknown)
    with pytest.raises(ValueError, match="outputs='local'"):
        seqpar.hf.parallelize(tiny("llama"), strategy="local", batches="per_rank", outputs="local")


class PreferenceTrainer(transformers.Trainer):  # type: ignore[misc]
    """A trainer that makes an Accelerator as a Trainer does."""

    __module__ = "trl.trainer.some_trainer"

    def __init__(self, fsdp: bool, config: Any) -> None:
        plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2) if fsdp else None
        self.accelerator = accelerate.Accelerator(cpu=True, parallelism_config=config, fsdp_plugin=plugin)


@on_ranks
def dealt_to(group: ProcessGroup, port: int, fsdp: bool) -> tuple[list[float], float, float]:
    """A rank's batches, and errors of the loss and gradients, with a trainer that needs own batches."""
    group = start(port, f"fsdp {fsdp}", group.rank(), group.size())
    rank = group.rank()
    with torchrun(group):
        config = seqpar.hf.ParallelismConfig(group.size())
        # Without a trainer of TRL the ranks of a sequence share batches; the next Accelerator has the same state.
        shared = accelerate.Accelerator(cpu=True, parallelism_config=config)
        rows: Any = DataLoader(cast(Any, torch.arange(6.0)), batch_size=1)
        assert [float(x) for x in shared.prepare_data_loader(rows)] == [0, 1, 2, 3, 4, 5]
        if fsdp:
            accelerate.state.AcceleratorState._reset_state()
        accelerator = PreferenceTrainer(fsdp, config).accelerator
        dealt = [float(x) for x in accelerator.prepare_data_loader(rows)]
        losses, grads = one_device(group.size(), "llama", "right")
        model = accelerator.prepare(tiny("llama"))
        loss = model(**batch_of(rank, "right")).loss
        accelerator.backward((1 + rank) * loss)
        assert accelerator.gather_for_metrics(torch.tensor([float(rank)])).tolist() == [0, 1]
    expected = {name: g / group.size() for name, g in grads.items()}
    return dealt, abs(loss.item() - losses[rank]), worst(full_gradients(model), expected)


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_trainer_that_needs_own_batches(own: OwnPool, fsdp: bool) -> None:
    (first, *errors), (second, *more) = own.pool.run(2, dealt_to, own.port, fsdp)
    assert first == [0, 2, 4] and second == [1, 3, 5]
    for loss, gradient in (errors, more):
        assert loss < LOSS and gradient < GRADIENT


def test_which_trainers_need_own_batches() -> None:
    trl_sft: Any = type("SFTTrainer", (transformers.Trainer,), {"__module__": "trl.trainer.sft_trainer"})
    for cls, needs in ((PreferenceTrainer, True), (trl_sft, False), (transformers.Trainer, False)):
        assert _needs_per_rank_batches(cls.__new__(cls)) is needs
    assert not _needs_per_rank_batches(None)
