"""``token_log_probs``: values and gradients are those of the logits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import seqpar
import seqpar.hf

from ..live_bytes import LiveBytes
from ..pool import Pool, on_ranks
from .workers import gradients, make_batch, tiny, worst

pytestmark = pytest.mark.slow
VALUE, GRADIENT = 1e-4, 1e-3


def some_loss(log_probs: Tensor, seed: int = 0) -> Tensor:
    """A loss in which the log-probability of each token has a different weight."""
    return (log_probs * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(seed))).mean()


def from_logits(kind: str, batch: dict[str, Tensor], model: Any = None) -> Tensor:
    labels = batch["labels"][:, 1:]
    given = {name: x for name, x in batch.items() if name != "labels"}
    scores = (model or tiny(kind))(**given, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    found: Tensor = scores.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return found.masked_fill(labels == -100, 0)


@on_ranks
def trained(group: ProcessGroup, kind: str, how: str, batches: Any, wrapper: str) -> tuple[float, float]:
    """The errors of the log-probabilities, and of the gradients of a loss computed from them."""
    own, rank = batches == "per_rank", group.rank()
    plain, model = tiny(kind), seqpar.hf.parallelize(tiny(kind), group=group, batches=batches, loss_chunk=5)
    given = [make_batch(how, 45 + 7 * i, seed=i) for i in range(group.size() if own else 1)]
    expected = [from_logits(kind, batch, plain) for batch in given]
    torch.stack([some_loss(x, i) for i, x in enumerate(expected)]).sum().backward()
    mine = rank if own else 0
    outer: Any = DistributedDataParallel(model, process_group=group) if wrapper == "ddp" else model
    ours = seqpar.hf.token_log_probs(outer, given[mine])
    some_loss(ours, mine).backward()
    if wrapper == "none":
        seqpar.sync_gradients(model, group=group)
    return float((ours - expected[mine]).abs().max()), worst(gradients(model), gradients(plain))


@pytest.mark.parametrize(
    ("kind", "how", "world", "batches", "wrapper"),
    [
        ("gemma2", "packed", 4, "shared", "none"),
        ("qwen3_moe", "plain", 2, "shared", "ddp"),
        ("mistral", "right", 2, "per_rank", "none"),
        ("gpt2", "plain", 1, "shared", "none"),
    ],
)
def test_values_and_gradients(pool: Pool, kind: str, how: str, world: int, batches: str, wrapper: str) -> None:
    for value, gradient in pool.run(world, trained, kind, how, batches, wrapper):
        assert value < VALUE and gradient < GRADIENT


@on_ranks
def of_other_batches(group: ProcessGroup) -> list[float]:
    """Errors without labels, with shifted labels, for a batch from ``shard_batch``, and with ``outputs="local"``."""
    batch = make_batch("packed")
    rest = {name: x for name, x in batch.items() if name != "labels"}
    every = batch["input_ids"].masked_fill(rest["position_ids"] == 0, -100)
    expected = from_logits("llama", batch)
    whole = F.pad(expected, (0, 1))
    local = seqpar.Sharding(45, "zigzag", group=group).shard(whole)
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    model = seqpar.hf.parallelize(tiny("llama"), group=group)
    pairs = [
        (seqpar.hf.token_log_probs(model, rest), from_logits("llama", {**rest, "labels": every})),
        (seqpar.hf.token_log_probs(model, {**rest, "shift_labels": shifted}), whole),
        (seqpar.hf.token_log_probs(model, seqpar.hf.shard_batch(batch, group=group)), local),
    ]
    seqpar.hf.restore(model)
    seqpar.hf.parallelize(model, group=group, outputs="local")
    pairs.append((seqpar.hf.token_log_probs(model, batch), local))
    with pytest.raises(ValueError, match="does not predict the next token"):
        seqpar.hf.token_log_probs(seqpar.hf.parallelize(tiny("bert"), group=group), rest)
    return [float((ours - theirs).abs().max()) for ours, theirs in pairs]


def test_other_batches(pool: Pool) -> None:
    for errors in pool.run(2, of_other_batches):
        assert max(errors) < VALUE, errors


def test_logits_never_exist_at_once() -> None:
    """The logits of 512 tokens and 8,192 words would take 16 MiB, and so would their gradients."""
    model = seqpar.hf.parallelize(tiny("llama", vocab_size=8192, max_position_embeddings=512), loss_chunk=16)
    with LiveBytes() as live:
        seqpar.hf.token_log_probs(model, make_batch("plain", 512, 1)).sum().backward()
    assert live.peak < 14 << 20, live.peak
