"""Calls with the full batch: loss, gradients and outputs are those of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import transformers

import seqpar
import seqpar.hf
from seqpar.hf.loss import MissingLogits

from ..pool import Pool, WorkerError, mesh_of, on_ranks
from .workers import IN_PLACE, PARALLELIZE, gradients, make_batch, one_device_of, tiny, worst

pytestmark = pytest.mark.slow
LOSS, GRADIENT, LOGITS = 2e-5, 1e-3, 1e-4
CASES = [
    ("llama", "ring-zigzag", "plain", 4),
    ("llama", "ulysses-contiguous", "left", 2),
    ("mistral", "all_gather-striped", "packed", 4),
    ("gemma3", "hybrid-zigzag", "right", 4),
    ("gpt_oss", "ring-zigzag", "packed", 2),
    ("qwen3_moe", "ulysses-contiguous", "right", 4),
    ("modernbert", "ring-zigzag", "packed", 2),
    ("bert", "ring-zigzag", "left", 4),
    ("gpt2", "ring-zigzag", "plain", 2),
    ("llama", "ring-zigzag", "plain", 1),
]


@on_ranks
def trained(group: ProcessGroup, kind: str, strategy: str, how: str) -> tuple[float, float, bool]:
    batch = make_batch(how)
    expected, grads = one_device_of(kind, how)
    model = seqpar.hf.parallelize(tiny(kind), group=group, **PARALLELIZE[strategy])
    given = {name: x.clone() for name, x in batch.items()}
    output = model(**given)
    output.loss.backward()
    seqpar.sync_gradients(model, group=group)
    assert all(torch.equal(given[name], x) for name, x in batch.items())
    return (
        abs(output.loss.item() - expected),
        worst(gradients(model), grads),
        not isinstance(output.logits, MissingLogits),
    )


@pytest.mark.parametrize(("kind", "strategy", "how", "world"), CASES)
def test_loss_and_gradients(pool: Pool, kind: str, strategy: str, how: str, world: int) -> None:
    for loss, gradient, logits in pool.run(world, trained, kind, strategy, how):
        assert loss < LOSS and gradient < GRADIENT and not logits


def packed_by_boundaries() -> dict[str, Any]:
    batch = make_batch("packed")
    starts = (batch.pop("position_ids")[0] == 0).nonzero().flatten().tolist()
    return {**batch, "cu_seq_lens_q": torch.tensor([*starts, 45], dtype=torch.int32), "max_length_q": 19}


@on_ranks
def counted(group: ProcessGroup) -> list[float]:
    """Errors of losses with ``num_items_in_batch``, with ``shift_labels``, and with boundaries of documents."""
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    expected = one_device_of("llama", "packed")[0]
    batch = make_batch("packed")
    items = int((batch["labels"][:, 1:] != -100).sum())
    shifted = {**batch, "shift_labels": F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]}
    del shifted["labels"]
    losses = [
        model(**batch, num_items_in_batch=torch.tensor(2 * items)).loss.item() * 2,
        model(**shifted).loss.item(),
        model(**packed_by_boundaries()).loss.item(),
        model(batch["input_ids"], None, batch["position_ids"], labels=batch["labels"], use_cache=True).loss.item(),
        model(**batch, return_dict=False)[0].item(),
    ]
    return [abs(loss - expected) for loss in losses]


def test_other_ways_to_give_the_batch(pool: Pool) -> None:
    for errors in pool.run(2, counted):
        assert max(errors) < LOSS, errors


def expected_outputs(kind: str, how: str) -> tuple[Any, Tensor]:
    """The outputs of one device, and which tokens to compare: the outputs of padding tokens may differ."""
    batch = make_batch(how)
    batch.pop("labels")
    options = {"output_router_logits": True} if kind == "qwen3_moe" else {}
    options |= {} if kind in IN_PLACE else {"use_cache": False}
    output = tiny(kind)(**batch, output_hidden_states=True, **options)
    return output, batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


@on_ranks
def inferred(group: ProcessGroup, kind: str, strategy: str, how: str) -> list[float]:
    """Errors of logits, hidden states, kept logits and, of a mixture of experts, router logits."""
    expected, real = expected_outputs(kind, how)
    model = seqpar.hf.parallelize(tiny(kind), group=group, **PARALLELIZE[strategy])
    batch = make_batch(how)
    batch.pop("labels")
    options = {"output_router_logits": True} if kind == "qwen3_moe" else {}
    output = model(**batch, output_hidden_states=True, **options)

    def error(ours: Tensor, theirs: Tensor, where: Tensor = real) -> float:
        assert ours.shape == theirs.shape
        return float((ours - theirs)[where].abs().max())

    errors = [error(output.logits, expected.logits)]
    errors += [error(x, y) for x, y in zip(output.hidden_states, expected.hidden_states, strict=True)]
    if kind != "qwen3_moe":  # whose first output is the router's loss
        errors.append(error(model(**batch, return_dict=False)[0], expected.logits))
    else:
        flat = real.flatten()
        errors += [error(x, y, flat) for x, y in zip(output.router_logits, expected.router_logits, strict=True)]
    if kind not in IN_PLACE:
        errors.append(error(model(**batch, logits_to_keep=30).logits, expected.logits[:, -30:], real[:, -30:]))
        some = torch.tensor([7, -2, 30])
        errors.append(error(model(**batch, logits_to_keep=some).logits, expected.logits[:, some], real[:, some]))
    return errors


@pytest.mark.parametrize(
    ("kind", "strategy", "how", "world"),
    [
        ("llama", "ring-zigzag", "plain", 4),
        ("mistral", "ulysses-contiguous", "left", 2),
        ("qwen3_moe", "all_gather-striped", "right", 4),
        ("modernbert", "ring-zigzag", "left", 2),
        ("llama", "ring-zigzag", "plain", 1),
    ],
)
def test_whole_outputs(pool: Pool, kind: str, strategy: str, how: str, world: int) -> None:
    for errors in pool.run(world, inferred, kind, strategy, how):
        assert max(errors) < LOGITS, errors


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


@on_ranks
def trained_outside(group: ProcessGroup, wrapper: str) -> tuple[float, float]:
    """Errors of a loss that every rank computes from the logits of all tokens."""
    expected, grads = one_device_of("llama", "plain")
    batch = make_batch("plain")
    labels = batch.pop("labels")
    model = tiny("llama")
    mesh = mesh_of(1, 4, 2, 1)
    seqpar.hf.parallelize(model, mesh=mesh, strategy="hybrid")
    outer: Any = model
    if wrapper == "ddp":
        outer = DistributedDataParallel(model)
    elif wrapper == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    loss = loss_of(outer(**batch).logits, labels)
    loss.backward()
    if wrapper == "none":
        seqpar.sync_gradients(model, mesh=mesh)
    ours = {name: (p.grad.full_tensor() if wrapper == "fsdp" else p.grad) for name, p in model.named_parameters()}
    return abs(loss.item() - expected), worst(ours, grads)


@on_ranks
def value_head(group: ProcessGroup, frozen: bool) -> float:
    """The error of the gradients of a head on whole outputs, outside of the parallelized model, and of the model."""
    torch.manual_seed(3)
    model, head = tiny("llama"), nn.Linear(32, 1)
    model.model.requires_grad_(not frozen)
    both = nn.ModuleList([model, head])
    batch = make_batch("plain")
    batch.pop("labels")

    def both_gradients() -> dict[str, Tensor]:
        both.zero_grad()
        head(model(**batch, output_hidden_states=True).hidden_states[-1]).square().mean().backward()
        if parallel:
            seqpar.sync_gradients(both, group=group)
        return {name: p.grad.clone() for name, p in both.named_parameters() if p.grad is not None}

    parallel = False
    expected = both_gradients()
    seqpar.hf.parallelize(model, group=group)
    parallel = True
    return worst(both_gradients(), expected)


def test_gradients_of_a_head_on_whole_outputs(pool: Pool) -> None:
    for frozen in (False, True):
        assert max(pool.run(2, value_head, frozen)) < GRADIENT


@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp"])
def test_loss_from_whole_logits(pool: Pool, wrapper: str) -> None:
    for loss, gradient in pool.run(8, trained_outside, wrapper):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def chosen(group: ProcessGroup) -> None:
    batch = make_batch("plain")
    sharding = seqpar.Sharding(45, "zigzag", group=group)
    expected = tiny("llama")(**batch)
    local = seqpar.hf.parallelize(tiny("llama"), group=group, outputs="local")
    assert isinstance(local(**batch).logits, MissingLogits)
    labels = batch.pop("labels")
    mine = expected.logits[:, sharding.positions()]
    torch.testing.assert_close(local(**batch).logits, mine, atol=LOGITS, rtol=0)
    whole = seqpar.hf.parallelize(tiny("llama"), group=group, outputs="full")
    output = whole(**batch, labels=labels)
    torch.testing.assert_close(output.logits, expected.logits, atol=LOGITS, rtol=0)
    assert abs(output.loss.item() - expected.loss.item()) < LOSS
    output = whole(**batch, labels=labels, return_dict=False)
    torch.testing.assert_close(output[1], expected.logits, atol=LOGITS, rtol=0)
    (output.loss if hasattr(output, "loss") else output[0]).backward()
    seqpar.sync_gradients(whole, group=group)
    assert worst(gradients(whole), one_device_of("llama", "plain")[1]) < GRADIENT


def test_outputs_that_were_asked_for(pool: Pool) -> None:
    pool.run(4, chosen)


@on_ranks
def composed(group: ProcessGroup, how: str) -> tuple[float, float]:
    expected, grads = one_device_of("llama", "packed")
    model = tiny("llama")
    if how == "checkpoints":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    seqpar.hf.parallelize(model, group=group)
    called: Any = torch.compile(model, backend="aot_eager") if how == "compile" else model
    loss = called(**make_batch("packed")).loss
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    return abs(loss.item() - expected), worst(gradients(model), grads)


@pytest.mark.parametrize("how", ["checkpoints", "compile"])
def test_composition(pool: Pool, how: str) -> None:
    for loss, gradient in pool.run(2, composed, how):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def adapted(group: ProcessGroup) -> float:
    from peft import LoraConfig, get_peft_model

    model = seqpar.hf.parallelize(get_peft_model(tiny("llama"), LoraConfig(target_modules="all-linear")), group=group)
    return float(model(**make_batch("packed")).loss)


def test_peft(pool: Pool) -> None:
    pytest.importorskip("peft")
    for loss in pool.run(2, adapted):
        assert abs(loss - one_device_of("llama", "packed")[0]) < LOSS


@on_ranks
def different(group: ProcessGroup, seed: int, checked: str | None, calls: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if checked is not None:
            patch.setenv("SEQPAR_CHECK", checked)
        model = seqpar.hf.parallelize(tiny("llama"), group=group)
        try:
            for call in range(calls):
                last = call == calls - 1
                model(**make_batch("plain", seed=seed + group.rank() * last))
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("checked", "calls", "raises"), [(None, 1, True), (None, 4, True), ("3", 4, True), ("3", 3, False), ("0", 1, False)]
)
def test_different_batches(pool: Pool, checked: str | None, calls: int, raises: bool) -> None:
    for message in pool.run(2, different, 0, checked, calls):
        assert message.startswith("batch: the ranks of the sequence group passed different batches") == raises, message


def test_too_short(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="rows of 3 tokens cannot be sharded over 4 ranks"):
        pool.run(4, short)


@on_ranks
def short(group: ProcessGroup) -> None:
    seqpar.hf.parallelize(tiny("llama"), group=group)(**make_batch("plain", length=3))


@on_ranks
def without_a_cache(group: ProcessGroup, prompt: Tensor) -> list[list[int]]:
    model = seqpar.hf.parallelize(tiny("llama").eval(), group=group)
    return model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False).tolist()


def test_generation_without_a_cache(pool: Pool) -> None:
    prompt = make_batch("plain", length=9)["input_ids"]
    expected = tiny("llama").eval().generate(prompt, max_new_tokens=4, do_sample=False).tolist()
    assert pool.run(2, without_a_cache, prompt) == [expected, expected]


def test_attn_implementation(tmp_path: Path) -> None:
    """``from_pretrained`` accepts the name, but the model raises an error until it is parallelized."""
    tiny("llama").save_pretrained(tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="seqpar").train()
    batch = make_batch("packed")
    with pytest.raises(ValueError, match=r"set by seqpar.hf.parallelize\(model\)"):
        model(**batch)
    seqpar.hf.parallelize(model)
    assert abs(model(**batch).loss.item() - one_device_of("llama", "packed")[0]) < LOSS


@on_ranks
def dropped(group: ProcessGroup) -> tuple[list[float], bool]:
    """The losses of three calls with attention dropout, and whether torch's random number generator is unchanged."""
    model = seqpar.hf.parallelize(tiny("llama", attention_dropout=0.3), group=group)
    torch.manual_seed(5 if group.rank() == 0 else 6)
    before = torch.get_rng_state()
    losses = [model(**make_batch("plain")).loss.item() for _ in range(3)]
    seqpar.hf.shard_batch(make_batch("plain"), group=group)
    return losses, torch.equal(before, torch.get_rng_state())


def test_dropout_draws_no_random_numbers(pool: Pool) -> None:
    """Otherwise the next random numbers of a training loop, such as the order of rows, would depend on dropout."""
    one, two = pool.run(1, dropped)[0][0], pool.run(2, dropped)
    assert len({round(loss, 3) for loss in one}) == 3  # each call drops other weights
    for losses, alike in two:
        assert alike and losses == pytest.approx(one, abs=LOSS)
