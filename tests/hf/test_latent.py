"""Models with latent attention: the ranks send latents, and the loss and gradients are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")

import seqpar
import seqpar.hf
from seqpar.hf.latent import has_latent_kv

from ..pool import Pool, on_ranks
from .workers import PARALLELIZE, compare, gradients, make_batch, one_device_of, tiny, worst

LOSS, GRADIENT = 2e-5, 1e-3
KIND, WIDTH, ROPE, LAYERS = "deepseek_v3", 8, 4, 2


class Wrapped(nn.Linear):
    """A projection that is not a plain linear layer, as with LoRA."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def bytes_sent(group: ProcessGroup, model: Any, batch: dict[str, Tensor], **arguments: Any) -> tuple[float, int]:
    """The loss, and the bytes that this rank sends in one forward."""
    model = seqpar.hf.parallelize(model, group=group, **arguments)
    local = seqpar.hf.shard_batch(batch, group=group, layout=arguments["layout"])
    with torch.no_grad(), seqpar.trace() as trace:
        loss = model(**local).loss
    return loss.item(), trace.bytes_sent


@on_ranks
def checks(group: ProcessGroup) -> None:
    chosen = zip([*PARALLELIZE, "ring-zigzag", "ulysses-contiguous"], ("plain", "packed", "left") * 2, strict=True)
    for strategy, how in chosen:
        if strategy.startswith("hybrid") and group.size() != 4:
            continue
        loss, gradient = compare(group, KIND, strategy, how)
        assert loss < LOSS and gradient < GRADIENT, (strategy, how, loss, gradient)
    batch = make_batch("plain", 48)
    expected = tiny(KIND)(**batch).loss.item()
    shares = (group.size() - 1) / group.size() * 2 * 48  # rows of other ranks
    # The causal mask of a contiguous ring needs fewer rows than all; an all-gather of every rank's rows does not.
    arguments: dict[str, Any] = {"strategy": "context_parallel", "layout": "zigzag"}
    loss, sent = bytes_sent(group, tiny(KIND), batch, **arguments)
    assert abs(loss - expected) < LOSS
    assert sent <= LAYERS * shares * (WIDTH + ROPE) * 4 * 1.05
    # A projection that is not a plain linear layer: keys and values are sent, 15 numbers of each of 4 heads.
    model = tiny(KIND)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Wrapped
    loss, more = bytes_sent(group, model, batch, **arguments)
    assert abs(loss - expected) < LOSS and more > 4 * sent


@pytest.mark.parametrize("world", [2, 4])
def test_loss_gradients_and_bytes(pool: Pool, world: int) -> None:
    pool.run(world, checks)


@on_ranks
def recomputed(group: ProcessGroup) -> tuple[float, float]:
    """With activation checkpointing: the layers run again in backward, outside of the model's forward."""
    batch = make_batch("packed")
    expected, grads = one_device_of(KIND, "packed")
    model = seqpar.hf.parallelize(tiny(KIND), group=group)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = model(**seqpar.hf.shard_batch(batch, group=group)).loss
    loss.backward()
    seqpar.sync_gradients(model, group=group)
    return abs(loss.item() - expected), worst(gradients(model), grads)


def test_activation_checkpointing(pool: Pool) -> None:
    for loss, gradient in pool.run(2, recomputed):
        assert loss < LOSS and gradient < GRADIENT


@on_ranks
def generated(group: ProcessGroup) -> bool:
    prompt = make_batch("plain", 20)["input_ids"]
    alone = tiny(KIND).eval()
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = alone.generate(prompt, **options)
    model = seqpar.hf.parallelize(tiny(KIND).eval(), group=group)
    return torch.equal(model.generate(prompt, **options), expected)


def test_generate(pool: Pool) -> None:
    assert all(pool.run(2, generated))


def test_restore() -> None:
    model, batch = tiny(KIND), make_batch("plain")
    expected = model(**batch).loss.item()
    seqpar.hf.parallelize(model, strategy="local")
    attention = model.model.layers[0].self_attn
    assert has_latent_kv(attention)
    assert abs(model(**seqpar.hf.shard_batch(batch)).loss.item() - expected) < LOSS
    seqpar.hf.restore(model)
    assert not has_latent_kv(attention)
    assert model(**batch).loss.item() == expected
