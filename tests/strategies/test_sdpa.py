"""``seqpar.sdpa`` and ``seqpar.replace_sdpa``: models that call PyTorch's attention compute one device's results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Mask

from ..pool import Pool, on_ranks
from ..reference import assert_close

TOKENS = 67
MASKS = {
    "full": (False, None),
    "causal": (True, None),
    "window": (False, Mask.sliding_window(9, 4)),
    "documents": (False, Mask.documents([0, 5, 40, 50, TOKENS])),
}


@on_ranks
def call(group: ProcessGroup, strategy: Any, layout: Any, seed: int) -> None:
    """Every mask with grouped heads and a scale: out, dq, dk and dv of PyTorch's function in float64."""
    for is_causal, mask in MASKS.values():
        generator = torch.Generator().manual_seed(seed)
        shapes = (2, 4, TOKENS, 8), (2, 2, TOKENS, 8), (2, 2, TOKENS, 6), (2, 4, TOKENS, 6)
        q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        sharding = seqpar.Sharding(TOKENS, layout, group=group)
        results = []
        for inputs, arguments in (
            ([q, k, v, dout], {}),
            ([sharding.shard(x, 2) for x in (q, k, v, dout)], {"sharding": sharding, "mask": mask}),
        ):
            x, y, z = (t.detach().requires_grad_() for t in inputs[:3])
            function: Any = seqpar.sdpa if arguments else F.scaled_dot_product_attention
            dense = mask.dense(TOKENS) if mask is not None and not arguments else None
            causal = is_causal and dense is None
            options = {"strategy": strategy} if arguments else {}
            out = function(x, y, z, dense, 0.0, causal, scale=0.3, enable_gqa=True, **arguments, **options)
            results.append([out.detach(), *torch.autograd.grad(out, (x, y, z), inputs[3])])
        for expected, result in zip(*results, strict=True):
            assert_close(result, sharding.shard(expected, 2), torch.float64)


@pytest.mark.parametrize(("world", "strategy", "layout"), [(2, "ring", "zigzag"), (3, "ulysses", "contiguous")])
def test_the_function(pool: Pool, world: int, strategy: str, layout: str) -> None:
    pool.run(world, call, strategy, layout, torch.seed() % 2**31)


class Attention(nn.Module):
    """nanoGPT's: heads from one projection."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(16, 48), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + y.transpose(1, 2).flatten(2)


class CrossAttention(nn.Module):
    """Attention over its own tokens, and over a text that every rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = Attention(causal=False), nn.Linear(16, 32)
        self.text = nn.Parameter(torch.randn(1, 7, 16))

    def forward(self, x: Tensor) -> Tensor:
        q = self.own(x).unflatten(2, (2, 8)).transpose(1, 2)
        k, v = self.other(self.text.expand(len(x), -1, -1)).unflatten(2, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        self.layer, self.use_reentrant = Attention(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return y


def compiled() -> nn.Module:
    layer = Attention()
    layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")  # type: ignore[method-assign]
    return layer


MODELS: dict[str, tuple[Callable[[], nn.Module], Mask | None]] = {
    "nanoGPT": (Attention, None),
    "nanoGPT, documents": (Attention, Mask.documents([0, 20, TOKENS], causal=False)),
    "cross-attention": (CrossAttention, None),
    "nn.TransformerEncoderLayer": (encoder, None),
    "checkpointed": (Checkpointed, None),
    "compiled": (compiled, None),
}


@on_ranks
def train(group: ProcessGroup, name: str, seed: int) -> None:
    """Output and weight gradients of a model are one device's, twice, so that compiled code sees a second block."""
    make, mask = MODELS[name]
    torch.manual_seed(seed)
    model = make().double()
    for _ in range(2):
        x, dout = torch.randn(2, 2, TOKENS, 16, dtype=torch.float64)
        sharding, gradients, outputs = seqpar.Sharding(TOKENS, "zigzag", group=group), [], []
        for sharded in (False, True):
            model.zero_grad()
            where = sharding if sharded else seqpar.Sharding(TOKENS, strategy="local")
            whole_keys = [7] if name == "cross-attention" else []
            block: Any = nullcontext()
            if sharded or mask is not None:
                strategy: Any = "ring" if sharded else "local"
                block = seqpar.replace_sdpa(where, mask, whole_keys=whole_keys, strategy=strategy)
            with block:
                y = model(sharding.shard(x) if sharded else x)
                y.backward(sharding.shard(dout) if sharded else dout)
            outputs.append(y.detach() if sharded else sharding.shard(y.detach()))
            if sharded:
                seqpar.sync_gradients(model, group=group, reduce="sum")
            gradients.append([p.grad for p in model.parameters()])
        assert_close(outputs[1], outputs[0], torch.float64)
        for result, expected in zip(gradients[1], gradients[0], strict=True):
            assert_close(result, expected, torch.float64)


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x == "compiled" else ()) for x in MODELS])
def test_models_without_a_changed_line(pool: Pool, name: str) -> None:
    pool.run(2, train, name, torch.seed() % 2**31)


# Refused

SHARDING = seqpar.Sharding(8)
X = torch.randn(1, 2, 8, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.ones(8, 8, dtype=torch.bool)}, "attn_mask: a matrix .* Mask.documents"),
        ({"is_causal": True, "mask": Mask.full()}, "expected one of them"),
        ({"sharding": None}, "sharding=None: expected"),
        ({"k": X[:, :1], "v": X[:, :1]}, "pass enable_gqa=True"),
        ({"q": X[0]}, r"q: expected a tensor \[batch, heads, seq, head_dim\], got shape \(2, 8, 4\)"),
        ({"q": X[:, :, :4], "k": X[:, :, :4], "v": X[:, :, :4]}, "4 tokens"),
    ],
)
def test_refused_calls(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        seqpar.sdpa(**{"q": X, "k": X, "v": X, "sharding": SHARDING, **arguments})


def cross_attention() -> None:
    F.scaled_dot_product_attention(X, X[:, :, :3], X[:, :, :3])


def causal_over_whole_keys() -> None:
    F.scaled_dot_product_attention(X, X[:, :, :5], X[:, :, :5], is_causal=True)


def weights() -> None:
    nn.MultiheadAttention(8, 2)(*[torch.randn(8, 1, 8)] * 3)


def no_attention() -> None:
    torch.softmax(X, -1)


def reentrant_checkpoint() -> None:
    Checkpointed(use_reentrant=True)(torch.randn(1, 8, 16, requires_grad=True))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (cross_attention, r"8 queries and 3 keys: .* whole_keys=\[3\]"),
        (causal_over_whole_keys, "8 sharded queries with 5 keys"),
        (weights, "need_weights=False"),
        (no_attention, "no token has seen another rank's tokens"),
        (reentrant_checkpoint, "use_reentrant=False"),
    ],
)
def test_refused_models(body: Callable[[], None], message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message), seqpar.replace_sdpa(SHARDING, whole_keys=[5]):
        body()


def test_whole_keys_of_a_shard_s_length() -> None:
    with pytest.raises(ValueError, match="keys of this length could be either"):
        seqpar.replace_sdpa(SHARDING, whole_keys=[8])


def test_a_backward_after_the_block_is_noticed() -> None:
    """The recomputation would see this rank's tokens only."""
    model, x = Checkpointed(), torch.randn(1, 8, 16)
    with seqpar.replace_sdpa(SHARDING):
        y = model(x)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()


def test_the_block_ends() -> None:
    with seqpar.replace_sdpa(SHARDING):
        F.scaled_dot_product_attention(X, X, X)
    F.scaled_dot_product_attention(X, X[:, :, :3], X[:, :, :3])
