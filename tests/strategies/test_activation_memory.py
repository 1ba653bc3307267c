"""The tensors that autograd saves in forward for backward, in attention and in tensor-parallel layers.

The formula for the layers is from Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", 2022: with sequence parallelism a transformer layer keeps ``sbh/t (34 + 5as/h)`` bytes in half precision (s
tokens, b batch, h hidden, a heads, t tensor-parallel ranks). Attention here never keeps its matrix, the term ``5as/h``.
"""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar.strategies import head_exchange

from ..pool import Pool, on_ranks

TOKENS, BATCH, HIDDEN, HEADS, HEAD_DIM = 64, 2, 32, 8, 4


def saved_bytes(module: nn.Module, x: Tensor, recompute: bool = False) -> int:
    """Bytes that autograd keeps of a forward; each storage counts once, weights do not count."""
    held = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    weights = {p.untyped_storage().data_ptr() for p in held}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    del y
    return sum(saved.values())


@on_ranks
def layers_save_a_shard(group: ProcessGroup) -> None:
    """In units of ``sbh/t`` elements (heads * head_dim = hidden): everything is divided by the ranks."""
    layer = seqpar.ParallelAttention("tp_sp", HIDDEN, HEADS, HEADS, HEAD_DIM, group=group)
    x = torch.randn(BATCH, TOKENS // group.size(), HIDDEN, requires_grad=True)
    unit = x.nbytes
    lse = 4 * BATCH * TOKENS * HEADS // group.size()
    # The gather's input, q, k, v and out; o_proj's input shares out's storage.
    assert saved_bytes(layer, x) == 5 * unit + lse
    assert saved_bytes(layer, x, recompute=True) <= unit  # the input
    # The gather's input, and gate, up, silu(gate) and their product, which are 3 h wide each.
    mlp = seqpar.MegatronMLP(HIDDEN, 3 * HIDDEN, group=group)
    assert saved_bytes(mlp, x) == unit + 4 * 3 * unit


@pytest.mark.parametrize("world", [1, 2, 4])
def test_saved_activations_are_divided_by_the_ranks(pool: Pool, world: int) -> None:
    pool.run(world, layers_save_a_shard)


@on_ranks
def gathered_keys_are_not_saved(group: ProcessGroup) -> None:
    """Of a layer that gathers activations: the input, q, out and the log-sum-exp of this rank's tokens."""
    layer = seqpar.ParallelAttention(
        "context_parallel",
        HIDDEN,
        HEADS,
        HEADS,
        HEAD_DIM,
        group=group,
        gather="activations",
        bias=True,
        layout="contiguous",
    )
    x = torch.randn(BATCH, TOKENS // group.size(), HIDDEN, requires_grad=True)
    lse = 4 * BATCH * TOKENS * HEADS // group.size()
    assert saved_bytes(layer, x) == 3 * x.nbytes + lse


@pytest.mark.parametrize("world", [2, 4])
def test_gathered_keys_are_computed_again(pool: Pool, world: int) -> None:
    pool.run(world, gathered_keys_are_not_saved)


class Attention(nn.Module):
    """Attention as a function of q, for any keys."""

    def __init__(self, k: Tensor, v: Tensor, **arguments: Any) -> None:
        super().__init__()
        self.k, self.v, self.arguments = k, v, arguments

    def forward(self, q: Tensor) -> Tensor:
        y: Tensor = seqpar.attention(q, self.k, self.v, **self.arguments)
        return y


@on_ranks
def attention_saves_a_shard(group: ProcessGroup, options: dict[str, Any], kv_heads: int, chunks: bool) -> None:
    ranks = group.size()
    sharding = seqpar.Sharding(TOKENS, group=group)
    q, k, v = (
        torch.randn(BATCH, sharding.seq_local, heads, HEAD_DIM, requires_grad=True)
        for heads in (HEADS, kv_heads, kv_heads)
    )
    with mock.patch.dict(head_exchange.MIN_CHUNK_WORK, cpu=1 if chunks else 1 << 40):
        saved = saved_bytes(Attention(k, v, sharding=sharding, **options), q)
    one_head = 4 * BATCH * TOKENS * HEAD_DIM // ranks
    lse = 4 * BATCH * TOKENS * HEADS // ranks
    assert saved == (2 * HEADS + 2 * kv_heads) * one_head + lse  # q, out; k, v


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_keys_and_values_are_divided_by_the_ranks(pool: Pool, world: int, kv_heads: int) -> None:
    """However many ranks read a KV head."""
    everything: list[dict[str, Any]] = [{"strategy": "ring"}, {"strategy": "ulysses"}, {"strategy": "hybrid"}]
    for options, chunks in product(everything, (False, True)):
        pool.run(world, attention_saves_a_shard, options, kv_heads, chunks)


class PaperLayer(nn.Module):
    """The transformer layer of the paper, without its two dropouts."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.norm1 = nn.LayerNorm(HIDDEN, dtype=dtype)
        self.norm2 = nn.LayerNorm(HIDDEN, dtype=dtype)
        self.attention = seqpar.ParallelAttention("tp_sp", HIDDEN, HEADS, HEADS, HEAD_DIM, group=group, dtype=dtype)
        self.mlp = seqpar.MegatronMLP(HIDDEN, 4 * HIDDEN, "gelu", group=group, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


@on_ranks
def paper_layer_saves_what_the_paper_says(group: ProcessGroup) -> None:
    tp, sbh = group.size(), TOKENS * BATCH * HIDDEN
    layer = PaperLayer(group)
    x = torch.randn(BATCH, TOKENS // tp, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    dropout_masks = 2 * sbh  # one byte an element
    lse = 4 * TOKENS * BATCH * HEADS
    norm_statistics = 2 * 2 * 2 * TOKENS * BATCH  # mean and deviation of two norms, 2 bytes each
    assert saved_bytes(layer, x) == (34 * sbh - dropout_masks + lse + norm_statistics) // tp
    assert saved_bytes(layer, x, recompute=True) == 2 * sbh // tp  # the layer's input


@pytest.mark.parametrize("world", [1, 2, 4])
def test_saved_activations_meet_the_formula_of_sequence_parallelism(pool: Pool, world: int) -> None:
    pool.run(world, paper_layer_saves_what_the_paper_says)
