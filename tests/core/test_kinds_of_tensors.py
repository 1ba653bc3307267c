"""Kinds of tensors that hold no rank's dense numbers are refused by name at every entrance, with the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar import mixers

HEADS, HEADS_FIRST, HIDDEN = torch.randn(2, 4, 4, 8), torch.randn(2, 4, 4, 8), torch.randn(2, 4, 32)
LOSSES, LABELS, LOGITS = torch.rand(2, 4), torch.zeros(2, 4, dtype=torch.int64), torch.randn(2, 8, 5)


class Setting:
    """Two ranks of a ring and of tp, of which this process is the first, and layers."""

    def __init__(self) -> None:
        self.ring_mesh = seqpar.init_mesh(ring=2, device_type="cpu")
        self.tp_mesh = seqpar.init_mesh(tp=2, device_type="cpu")
        self.ring = seqpar.Sharding(8, "contiguous", mesh=self.ring_mesh)
        self.tp = seqpar.Sharding(8, mesh=self.tp_mesh, strategy="tp_sp")
        self.layer = seqpar.RingAttention(32, 4, mesh=self.ring_mesh)
        self.tp_layer = seqpar.MegatronAttention(32, 4, mesh=self.tp_mesh)
        self.mlp = seqpar.MegatronMLP(32, 64, mesh=self.tp_mesh)
        self.head = seqpar.VocabParallelHead(32, 10, mesh=self.tp_mesh)
        self.embedding = seqpar.VocabParallelEmbedding(10, 32, mesh=self.tp_mesh)
        self.cache = seqpar.KeyValueCache(self.ring)


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield Setting()
    dist.destroy_process_group()


def replaced(s: Setting, q: Tensor, k: Tensor) -> Tensor:
    with seqpar.replace_sdpa(s.ring):
        return F.scaled_dot_product_attention(q, k, k)


@torch.no_grad()
def cached(s: Setting, q: Tensor) -> Tensor:
    return s.cache.attention(0, q, HEADS, HEADS)


def loss_of_logits(s: Setting, logits: Tensor, labels: Tensor) -> Tensor:
    return seqpar.vocab_parallel_cross_entropy(logits, labels, 10, mesh=s.tp_mesh, sharding=s.tp)


def ring(s: Setting, **tensors: Tensor) -> Tensor:
    latents = {"k": HEADS[:, :, :1], "v": HEADS[:, :, :1, :4]} if "latent_weight" in tensors else {}
    arguments: Any = {"q": HEADS, "k": HEADS, "v": HEADS, **latents, **tensors}
    return seqpar.ring_attention(**arguments, sharding=s.ring)


# Entrance -> the argument's name, a tensor that would be right, and the call.
Entrance = tuple[str, Tensor, Callable[[Setting, Any], Any]]
ENTRANCES: dict[str, Entrance] = {
    "attention": ("q", HEADS, lambda s, x: seqpar.attention(x, HEADS, HEADS, sharding=s.ring)),
    "attention, a mesh": (
        "v",
        HEADS,
        lambda s, x: seqpar.attention(HEADS, HEADS, x, mesh=s.ring_mesh, layout="contiguous", seq_len=8),
    ),
    "ring_attention": ("k", HEADS, lambda s, x: ring(s, k=x)),
    "ulysses_attention": ("q", HEADS, lambda s, x: seqpar.ulysses_attention(x, x, x, sharding=s.ring)),
    "context_parallel": ("q", HEADS, lambda s, x: seqpar.context_parallel_attention(x, x, x, sharding=s.ring)),
    "hybrid_attention": ("q", HEADS, lambda s, x: seqpar.hybrid_attention(x, x, x, sharding=s.ring)),
    "sinks": ("sinks", torch.randn(4), lambda s, x: ring(s, sinks=x)),
    "alibi_slopes": ("alibi_slopes", torch.rand(2, 4), lambda s, x: ring(s, alibi_slopes=x)),
    "latent_weight": ("latent_weight", torch.rand(4, 8, 8), lambda s, x: ring(s, latent_weight=x)),
    "sdpa": ("k", HEADS_FIRST, lambda s, x: seqpar.sdpa(HEADS_FIRST, x, HEADS_FIRST, sharding=s.ring)),
    "replace_sdpa, q": ("q", HEADS_FIRST, lambda s, x: replaced(s, x, HEADS_FIRST)),
    "replace_sdpa, k": ("k", HEADS_FIRST, lambda s, x: replaced(s, HEADS_FIRST, x)),
    "shard": ("x", torch.randn(2, 8, 3), lambda s, x: seqpar.shard(x, mesh=s.ring_mesh, layout="contiguous")),
    "Sharding.shard": ("x", torch.randn(2, 8, 3), lambda s, x: s.ring.shard(x)),
    "unshard": ("x_local", HIDDEN, lambda s, x: seqpar.unshard(x, sharding=s.ring)),
    "Sharding.unshard": ("x_local", HIDDEN, lambda s, x: s.ring.unshard(x)),
    "token_loss": ("losses", LOSSES, lambda s, x: seqpar.token_loss(x, LABELS, sharding=s.ring)),
    "token_loss, labels": ("labels", LABELS, lambda s, x: seqpar.token_loss(LOSSES, x, sharding=s.ring)),
    "vocabulary": ("logits", LOGITS, lambda s, x: loss_of_logits(s, x, LABELS)),
    "vocabulary, labels": ("labels", LABELS, lambda s, x: loss_of_logits(s, LOGITS, x)),
    "RingAttention": ("x_local", HIDDEN, lambda s, x: s.layer(x, sharding=s.ring)),
    "MegatronAttention": ("x_local", HIDDEN, lambda s, x: s.tp_layer(x, sharding=s.tp)),
    "MegatronMLP": ("x_local", HIDDEN, lambda s, x: s.mlp(x, sharding=s.tp)),
    "VocabParallelHead": ("x_local", HIDDEN, lambda s, x: s.head(x, sharding=s.tp)),
    "VocabParallelEmbedding": ("ids", LABELS, lambda s, x: s.embedding(x, sharding=s.tp)),
    "KeyValueCache": ("q", HEADS, lambda s, x: cached(s, x)),
    "by_heads": ("x", HEADS, lambda s, x: mixers.by_heads(lambda heads, y, k: y, x, HEADS, sharding=s.ring)),
    "by_heads, kv": ("kv", HEADS, lambda s, x: mixers.by_heads(lambda heads, y, k: y, HEADS, x, sharding=s.ring)),
    "halo": ("x", HIDDEN, lambda s, x: mixers.halo(lambda y: y[:, 2:], x, 2, sharding=s.ring)),
    "by_states": (
        "x",
        HIDDEN,
        lambda s, x: mixers.by_states(
            lambda y: (y, (y[:, -1],)), lambda a, b: b, lambda y, before: y, x, sharding=s.ring
        ),
    ),
    "Mask.documents": ("cu_seqlens", torch.tensor([[0, 4, 8]] * 2), lambda s, x: seqpar.Mask.documents(x)),
}
# Kind -> how it is made, and what the message says after the argument's name.
KINDS: dict[str, tuple[Callable[[Setting, Tensor], Any], str]] = {
    "DTensor": (
        lambda s, x: DTensor.from_local(x, s.ring_mesh["ring"], [Replicate()]),
        r"a DTensor; .* pass \w+\.to_local\(\) .*full_tensor\(\)",
    ),
    "jagged": (
        lambda s, x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
        "a nested tensor; pack .* or pad",
    ),
    "sparse": (lambda s, x: x.to_sparse(), r"layout torch.sparse_coo; .* \w+\.to_dense\(\)"),
    "meta": (lambda s, x: x.to("meta"), "device meta holds no data; move it"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entrance", ENTRANCES)
def test_refused_by_name(setting: Setting, entrance: str, kind: str) -> None:
    name, x, call = ENTRANCES[entrance]
    make, message = KINDS[kind]
    if kind == "jagged" and x.dim() < 2:
        pytest.skip("there is no such tensor")
    with pytest.raises((TypeError, ValueError), match=f"^{name}: {message}"):
        call(setting, make(setting, x))


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_transforms_are_refused(setting: Setting, entrance: str) -> None:
    _, x, call = ENTRANCES[entrance]
    with pytest.raises(TypeError, match=r"inside a transform of torch.func \(vmap, grad"):
        torch.vmap(lambda y: call(setting, y))(x[None])


def test_dtensor_heads_of_tp(setting: Setting) -> None:
    """q, k and v whose heads are sharded over tp, as torchtitan's."""
    x = DTensor.from_local(HEADS, setting.tp_mesh["tp"], [dist.tensor.Shard(2)])
    with pytest.raises(TypeError, match=r"q: a DTensor; .* q\.to_local\(\) if it has the tokens and the heads"):
        seqpar.ring_attention(x, x, x, sharding=setting.ring)
    out = seqpar.ring_attention(*[x.to_local()] * 3, sharding=setting.ring)
    assert out.shape == HEADS.shape
