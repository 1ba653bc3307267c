"""Calls with the full batch: loss, gradients and outputs are one device's."""

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
from seqpar.hf.losses.logits import MissingLogits

from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close
from .workers import (
    IN_PLACE,
    PARALLELIZE,
    Case,
    Result,
    check,
    check_cases,
    check_loss,
    check_step,
    expected_of,
    gradients,
    make_batch,
    one_device_of,
    tiny,
    trained,
)

pytestmark = pytest.mark.slow
CASES: dict[int, list[Case]] = {
    1: [("llama", "ring-zigzag", "plain")],
    2: [
        ("llama", "ulysses-contiguous", "left"),
        ("gpt_oss", "ring-zigzag", "packed"),
        ("modernbert", "ring-zigzag", "packed"),
        ("gpt2", "ring-zigzag", "plain"),
    ],
    4: [
        ("llama", "ring-zigzag", "plain"),
        ("gemma2", "hybrid-zigzag", "right"),
        ("mistral", "all_gather-striped", "packed"),
        ("qwen3_moe", "ulysses-contiguous", "right"),
        ("bert", "ring-zigzag", "left"),
    ],
}


@pytest.mark.thorough(world=[4])
@pytest.mark.parametrize("world", CASES)
def test_loss_and_gradients(pool: Pool, world: int) -> None:
    pool.run(world, check_cases, expected_of(CASES[world]), sharded=False)


def packed_by_boundaries() -> dict[str, Any]:
    batch = make_batch("packed")
    starts = (batch.pop("position_ids")[0] == 0).nonzero().flatten().tolist()
    return {**batch, "cu_seq_lens_q": torch.tensor([*starts, 45], dtype=torch.int32), "max_length_q": 19}


@on_ranks
def counted(group: ProcessGroup, expected: float) -> None:
    """The loss with ``num_items_in_batch``, ``shift_labels``, boundaries of documents, and unnamed arguments."""
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    batch = make_batch("packed")
    items = int((batch["labels"][:, 1:] != -100).sum())
    unlabelled = {name: x for name, x in batch.items() if name != "labels"}
    losses = [
        model(**batch, num_items_in_batch=torch.tensor(2 * items)).loss.item() * 2,
        model(**unlabelled, shift_labels=F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]).loss.item(),
        model(**packed_by_boundaries()).loss.item(),
        model(batch["input_ids"], None, batch["position_ids"], labels=batch["labels"], use_cache=True).loss.item(),
        model(**batch, return_dict=False)[0].item(),
    ]
    assert len(losses) == 5
    for loss in losses:
        check_loss(loss, expected)


def test_loss_of_other_batches(pool: Pool) -> None:
    pool.run(2, counted, one_device_of("llama", "packed").loss)


def without_labels(kind: str, how: str) -> dict[str, Any]:
    batch: dict[str, Any] = make_batch(how)
    batch.pop("labels")
    options = {"output_router_logits": True} if kind == "qwen3_moe" else {}
    return {**batch, "output_hidden_states": True, **options}


Outputs = dict[str, Any]


def outputs_of(kind: str, how: str) -> Outputs:
    """The outputs of one device."""
    with torch.no_grad():
        output = tiny(kind)(**without_labels(kind, how), **({} if kind in IN_PLACE else {"use_cache": False}))
    return {name: output[name] for name in ("logits", "hidden_states", "router_logits") if name in output}


@on_ranks
def inferred(group: ProcessGroup, kind: str, strategy: str, how: str, expected: Outputs) -> None:
    """Logits, hidden states, the logits of some tokens and, of a mixture of experts, router logits."""
    model = seqpar.hf.parallelize(tiny(kind), group=group, **PARALLELIZE[strategy])
    batch, logits = without_labels(kind, how), expected["logits"]
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()  # other outputs may differ

    def equal(ours: Tensor, theirs: Tensor, where: Tensor = real) -> None:
        assert_close(ours[where], theirs[where])

    output = model(**batch)
    equal(output.logits, logits)
    for ours, theirs in zip(output.hidden_states, expected["hidden_states"], strict=True):
        equal(ours, theirs)
    if kind == "qwen3_moe":
        for ours, theirs in zip(output.router_logits, expected["router_logits"], strict=True):
            equal(ours, theirs, real.flatten())
    else:  # the first output of qwen3_moe is the router's loss
        equal(model(**batch, return_dict=False)[0], logits)
    if kind not in IN_PLACE:
        equal(model(**batch, logits_to_keep=30).logits, logits[:, -30:], real[:, -30:])
        some = torch.tensor([7, -2, 30])
        equal(model(**batch, logits_to_keep=some).logits, logits[:, some], real[:, some])


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
def test_full_outputs(pool: Pool, kind: str, strategy: str, how: str, world: int) -> None:
    pool.run(world, inferred, kind, strategy, how, outputs_of(kind, how))


@on_ranks
def trained_outside(group: ProcessGroup, wrapper: str, expected: Result) -> None:
    batch = make_batch("plain")
    labels = batch.pop("labels")
    model, mesh = tiny("llama"), mesh_of(1, 2, 2, 1)
    seqpar.hf.parallelize(model, mesh=mesh, strategy="hybrid")
    outer: Any = model
    if wrapper == "ddp":
        outer = DistributedDataParallel(model)
    elif wrapper == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    loss = F.cross_entropy(outer(**batch).logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
    loss.backward()
    if wrapper == "none":
        seqpar.sync_gradients(model, mesh=mesh)
    check(Result(loss.item(), gradients(outer)), expected)


@pytest.mark.parametrize("wrapper", ["none", "ddp", "fsdp"])
def test_loss_computed_from_full_logits(four: Pool, wrapper: str) -> None:
    four.run(4, trained_outside, wrapper, one_device_of("llama", "plain"))


class ValueHead(nn.Module):
    """A model, and a head on its hidden states, outside of the parallelized model."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.model = tiny("llama")
        self.model.model.requires_grad_(not frozen)
        torch.manual_seed(3)
        self.head = nn.Linear(32, 1)

    def forward(self, **batch: Any) -> Any:
        hidden = self.model(**batch, output_hidden_states=True).hidden_states[-1]
        return transformers.modeling_outputs.CausalLMOutput(loss=self.head(hidden).square().mean())


@on_ranks
def with_value_head(group: ProcessGroup, frozen: bool, batch: dict[str, Tensor], expected: Result) -> None:
    both = ValueHead(frozen)
    seqpar.hf.parallelize(both.model, group=group)
    check_step(group, both, batch, expected)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_a_head_on_full_outputs(pool: Pool, frozen: bool) -> None:
    batch = make_batch("plain")
    batch.pop("labels")
    pool.run(2, with_value_head, frozen, batch, trained(ValueHead(frozen), batch))


@on_ranks
def with_outputs(group: ProcessGroup, logits: Tensor, expected: Result) -> None:
    batch = make_batch("plain")
    local = seqpar.hf.parallelize(tiny("llama"), group=group, outputs="local")
    assert isinstance(local(**batch).logits, MissingLogits)
    labels = batch.pop("labels")
    positions = seqpar.Sharding(45, "zigzag", group=group).positions()
    assert_close(local(**batch).logits, logits[:, positions])
    full = seqpar.hf.parallelize(tiny("llama"), group=group, outputs="full")
    for return_dict in (True, False):
        full.zero_grad()
        output = full(**batch, labels=labels, return_dict=return_dict)
        assert_close(output[1], logits)
        output[0].backward()
        seqpar.sync_gradients(full, group=group)
        check(Result(output[0].item(), gradients(full)), expected)


def test_option_outputs(pool: Pool) -> None:
    pool.run(4, with_outputs, outputs_of("llama", "plain")["logits"], one_device_of("llama", "plain"))


@on_ranks
def composed(group: ProcessGroup, expected: Result) -> None:
    for how in ("checkpoints", "peft"):
        model: Any = tiny("llama")
        if how == "checkpoints":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif how == "peft":
            peft = pytest.importorskip("peft")
            model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
        seqpar.hf.parallelize(model, group=group)
        if how == "peft":
            check_loss(model(**make_batch("packed")).loss.item(), expected.loss)
        else:
            check_step(group, model, make_batch("packed"), expected, how)


def test_composition(pool: Pool) -> None:
    pool.run(2, composed, one_device_of("llama", "packed"))


@on_ranks
def different(group: ProcessGroup, interval: str | None, calls: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if interval is not None:
            patch.setenv("SEQPAR_CHECK", interval)
        model = seqpar.hf.parallelize(tiny("llama"), group=group)
        try:
            for number in range(calls):
                model(**make_batch("plain", seed=group.rank() * (number == calls - 1)))
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("interval", "calls", "raises"),
    [(None, 1, True), (None, 4, True), ("3", 4, True), ("3", 3, False), ("0", 1, False)],
)
def test_different_batches(pool: Pool, interval: str | None, calls: int, raises: bool) -> None:
    for message in pool.run(2, different, interval, calls):
        assert message.startswith("batch: the ranks of the sequence group passed different batches") == raises, message


@on_ranks
def with_short_rows(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match="rows of 3 tokens cannot be sharded over 4 ranks"):
        seqpar.hf.parallelize(tiny("llama"), group=group)(**make_batch("plain", length=3))


def test_refused_short_rows(pool: Pool) -> None:
    pool.run(4, with_short_rows)


@on_ranks
def without_a_cache(group: ProcessGroup, prompt: Tensor) -> list[list[int]]:
    model = seqpar.hf.parallelize(tiny("llama").eval(), group=group)
    tokens: list[list[int]] = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False).tolist()
    return tokens


def test_generation_without_a_cache(pool: Pool) -> None:
    prompt = make_batch("plain", length=9)["input_ids"]
    expected = tiny("llama").eval().generate(prompt, max_new_tokens=4, do_sample=False).tolist()
    assert pool.run(2, without_a_cache, prompt) == [expected, expected]


def test_attn_implementation_of_from_pretrained(tmp_path: Path) -> None:
    """``from_pretrained`` accepts the name, but the model raises an error until it is parallelized."""
    tiny("llama").save_pretrained(tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="seqpar").train()
    batch = make_batch("packed")
    with pytest.raises(ValueError, match=r"set by seqpar.hf.parallelize\(model\)"):
        model(**batch)
    seqpar.hf.parallelize(model)
    check_loss(model(**batch).loss.item(), one_device_of("llama", "packed").loss)
