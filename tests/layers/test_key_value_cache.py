"""Generation with ``KeyValueCache``: a prompt and several decoded tokens equal one forward of the local layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.comm.trace import trace
from seqpar.ranks.calls import calls_of

from ..models import HIDDEN, MLP, attention_layer, randomize
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close
from ..strategy_cases import DISTINCT_LAYERS, LAYER_STRATEGIES, layout_of

NEW = (1, 1, 4, 1)  # new tokens of each call after the prompt
MASKS = {
    "causal": Mask.causal(),
    "window": (Mask.sliding_window(6) | Mask.global_tokens(2)) & Mask.causal(),
    "padding": Mask.padding([0, 5]) & Mask.causal(),
    "by heads": Mask.by_heads([Mask.causal(), Mask.sliding_window(4), Mask.padding([0, 5])]) & Mask.causal(),
}
SCORES = {"softmax_scale": 0.7, "alibi_slopes": [0.5, 0.02, 0.3, 0.0, 1.0, 0.1]}
# seq_len of the prompt, (heads, KV heads), mask, arguments of the layer. With 5 heads over 4 tensor-parallel ranks the
# KV heads are uneven.
CASES = [
    (23, (6, 2), "window", SCORES),
    (3, (5, 5), "causal", {}),
    (22, (6, 3), "padding", {}),
    (19, (6, 3), "by heads", {}),
]


def made(heads: tuple[int, int], strategy: str = "local", **options: Any) -> Any:
    layer = attention_layer(heads, strategy, **options)
    torch.manual_seed(5)
    randomize(layer)
    return layer.eval()


@torch.no_grad()
def generated(layer: Any, x: Tensor, sharding: seqpar.Sharding, mask: Mask) -> tuple[Tensor, seqpar.KeyValueCache]:
    """The layer's output for all tokens of ``x [2, seq, hidden]``: of the prompt together, and then of ``NEW``."""
    cache = seqpar.KeyValueCache(sharding)
    parts = [sharding.unshard(layer(sharding.shard(x[:, : sharding.seq_len]), mask, cache=cache))]
    for count in NEW:
        start = cache.length
        parts.append(layer(x[:, start : start + count], mask, cache=cache))
    assert cache.length == x.shape[1]
    return torch.cat(parts, 1), cache


@on_ranks
def compared(group: ProcessGroup, row: dict[str, Any], layout: Any, seed: int) -> None:
    torch.manual_seed(seed)
    strategy = row["strategy"]
    for length, heads, name, scores in CASES:
        x = torch.randn(2, length + sum(NEW), HIDDEN, dtype=torch.float64)
        given = layout_of(layout, length, group.size())
        sharding = seqpar.Sharding(length, given, group=group, strategy="tp_sp" if strategy == "tp_sp" else None)
        layer = made(heads, **row, **scores, group=group)
        y, cache = generated(layer, x, sharding, MASKS[name])
        expected = made(heads, **scores)(x, mask=MASKS[name])
        assert_close(y, expected.detach(), torch.float64, f"{strategy}, {length} tokens, {heads}, {name}")
        (cached,) = cache._layers.values()
        total, held = x.shape[1], cached.k.shape[1]
        if strategy == "tp_sp":
            assert held == total and cached.k.shape[2] == len(layer._heads.kv)
        else:
            assert layout == "assigned" or held <= total // group.size() + 2
            assert cached.k.shape[2] == heads[1]
            assert torch.equal(cached.positions, cached.positions.sort().values)


@pytest.mark.thorough(world=[2, 3])
@pytest.mark.parametrize("strategy", DISTINCT_LAYERS)
@pytest.mark.parametrize(("world", "layout"), [(2, "contiguous"), (3, "assigned"), (4, "zigzag")])
def test_generation_is_one_forward(pool: Pool, strategy: str, world: int, layout: str) -> None:
    pool.run(world, compared, LAYER_STRATEGIES[strategy], layout, torch.seed() % 2**31)


@on_ranks
def on_a_mesh(group: ProcessGroup) -> None:
    """tp 2 beside a ring of 2, twice (dp): each rank caches its heads of half of the tokens."""
    mesh = mesh_of(2, 2, 1, 2)
    x = torch.randn(2, 21 + sum(NEW), HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sharding = seqpar.Sharding(21, "zigzag", mesh=mesh, strategy="tp_sp")
    y, cache = generated(made((6, 2), "tp_sp", mesh=mesh), x, sharding, Mask.causal())
    assert_close(y, made((6, 2))(x).detach(), torch.float64)
    (cached,) = cache._layers.values()
    assert cached.k.shape[1] in (13, 14, 15) and cached.k.shape[2] == 1
    torch.manual_seed(3)
    mlp, local = seqpar.MegatronMLP(HIDDEN, 30, bias=True, mesh=mesh, dtype=torch.float64), MLP("swiglu")
    randomize(local)
    mlp.load_state_dict(local.state_dict())
    assert_close(mlp(x[:, -1:]).detach(), local(x[:, -1:]).detach(), torch.float64)  # of a token that all ranks have


def test_tensor_parallel_beside_a_ring(pool: Pool) -> None:
    pool.run(8, on_a_mesh)


@on_ranks
def counted(group: ProcessGroup, length: int) -> tuple[int, int, int]:
    """Of one more token: the bytes sent; and the bytes of the cache before it, and the allocated bytes."""
    sharding, layer = seqpar.Sharding(length, "zigzag", group=group), made((6, 2), "ring", group=group)
    cache = seqpar.KeyValueCache(sharding)
    with torch.no_grad():
        layer(torch.zeros(2, sharding.seq_local, HIDDEN, dtype=torch.float64), cache=cache)
        new = torch.zeros(2, 1, HIDDEN, dtype=torch.float64)
        layer(new, cache=cache)
        with trace() as t:
            layer(new, cache=cache)
    (cached,) = cache._layers.values()
    return t.bytes_sent, cached.k.nbytes + cached.v.nbytes, t.messages


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_of_a_token_and_of_the_cache(pool: Pool, world: int) -> None:
    """P ranks hold a prompt P times as long in the same memory, and send the same for a token of any prompt."""
    rows, heads, kv_heads, head_dim = 2, 6, 2, 4
    for each in (20, 40):
        for sent, held, messages in pool.run(world, counted, each * world):
            assert sent == (world - 1) * rows * heads * (head_dim + 1) * 8 and messages == world - 1  # float64
            assert each <= held / (2 * rows * kv_heads * head_dim * 8) <= each + 2


class Plain(nn.Module):
    """Two layers of PyTorch's attention with grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = layer(x).split([HIDDEN, HIDDEN // 2, HIDDEN // 2], 2)
            q, k, v = (y.unflatten(2, (-1, 6)).transpose(1, 2) for y in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
            x = x + y.transpose(1, 2).flatten(2)
        return x


@on_ranks
def with_pytorchs_attention(group: ProcessGroup, strategy: Any) -> None:
    torch.manual_seed(2)
    model, x = Plain().double(), torch.randn(2, 29, HIDDEN, dtype=torch.float64)
    prompt = seqpar.Sharding(22, "striped", group=group)

    def through(x: Tensor, mask: Mask, cache: seqpar.KeyValueCache) -> Tensor:
        with seqpar.replace_sdpa(prompt, mask, cache=cache, strategy=strategy):
            y: Tensor = model(x)
        return y

    y, _ = generated(through, x, prompt, Mask.causal())
    assert_close(y, model(x).detach(), torch.float64)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_pytorchs_attention_in_a_model(pool: Pool, strategy: str) -> None:
    pool.run(2, with_pytorchs_attention, strategy)


@on_ranks
def with_other_tokens(group: ProcessGroup) -> None:
    sharding, layer = seqpar.Sharding(8, "zigzag", group=group), made((6, 2), "ring", group=group)
    cache = seqpar.KeyValueCache(sharding)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        layer(torch.zeros(1, sharding.seq_local, HIDDEN, dtype=torch.float64), cache=cache)
        patch.setenv("SEQPAR_CHECK", "1")
        with pytest.raises(ValueError, match=r"rank\(s\) \[1\].*the same new tokens"):
            layer(torch.full((1, 1, HIDDEN), float(group.rank())).double(), cache=cache)


def test_ranks_with_other_tokens(pool: Pool) -> None:
    pool.run(2, with_other_tokens)


@on_ranks
def between_two_layers(group: ProcessGroup) -> None:
    """The layers of a token share their connection, which an error between them may have closed."""
    sharding, mask = seqpar.Sharding(8, "zigzag", group=group), Mask.causal()
    q, k, v = (torch.randn(1, 9, 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    cache, new = seqpar.KeyValueCache(sharding), [x[:, 8:] for x in (q, k, v)]
    with torch.no_grad():
        for layer in range(3):
            cache.attention(layer, *(sharding.shard(x[:, :8]) for x in (q, k, v)), mask=mask)
        outs = [cache.attention(0, *new, mask=mask), cache.attention(1, *new, mask=mask)]
        calls_of(group).leave()
        outs.append(cache.attention(2, *new, mask=mask))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert_close(outs[0], seqpar.attention(q, k, v, strategy="local")[:, 8:])


@pytest.mark.parametrize("shared_memory", [True, False])
def test_connections_that_are_closed_between_two_layers(pool: Pool, shared_memory: bool) -> None:
    pool.run(2, between_two_layers, shared_memory=shared_memory)


def test_half_precision_under_autocast() -> None:
    layer, x = made((6, 2)).float(), torch.randn(2, 30, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        y, cache = generated(layer, x, seqpar.Sharding(23), Mask.causal())
        expected = layer(x).detach()
    assert next(iter(cache._layers.values())).k.dtype == torch.bfloat16
    assert_close(y, expected.double(), torch.bfloat16)
    with torch.no_grad(), pytest.raises(ValueError, match=r"in torch\.bfloat16, but .* the autocast of the prompt"):
        layer(x[:, :1], cache=cache)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"cache": "new"}, TypeError, "cache=str: expected a seqpar.KeyValueCache"),
        ({"sharding": seqpar.Sharding(5)}, ValueError, "pass cache.sharding"),
        ({"seq_len": 4}, ValueError, "leave seq_len out"),
        ({"mask": Mask.documents([0, 4])}, ValueError, "the last boundary is 4, but the sequence has 5"),
        ({"x_local": torch.zeros(3, 1, HIDDEN).double()}, ValueError, "use the batch"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, ValueError, r"positions: shape \(2,\); expected \(1,\)"),
    ],
)
def test_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    layer, cache = made((6, 2)), seqpar.KeyValueCache(seqpar.Sharding(4))
    x = torch.zeros(2, 4, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        layer(x, cache=cache)
        with pytest.raises(error, match=words):
            layer(**{"x_local": x[:, :1], "cache": cache, **arguments})


def test_refused_layers_and_modes() -> None:
    cache, x = seqpar.KeyValueCache(seqpar.Sharding(4)), torch.zeros(2, 4, HIDDEN, dtype=torch.float64)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    with pytest.raises(ValueError, match=r"inside torch\.no_grad"):
        made((6, 2))(x, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"dropout_p=0\.1: .*model\.eval"):
            made((6, 2), dropout_p=0.1).train()(x, cache=cache)
        shared, other, twice = made((6, 2)), made((6, 2)), seqpar.KeyValueCache(seqpar.Sharding(4))
        shared(shared(x, cache=twice), cache=twice)  # as a layer at two depths
        with pytest.raises(ValueError, match="call each layer once a pass"):
            other(x, cache=twice)
        with pytest.raises(ValueError, match="rope_type='dynamic'"):
            made((6, 2), rope=seqpar.RotaryEmbedding(4, scaling=dynamic))(x, cache=cache)
    with pytest.raises(TypeError, match=r"sharding=4: expected the seqpar\.Sharding"):
        seqpar.KeyValueCache(4)
    with pytest.raises(ValueError, match=r"pass cache\.sharding"):
        seqpar.replace_sdpa(seqpar.Sharding(5), cache=cache)
    with torch.no_grad(), seqpar.replace_sdpa(cache.sharding, cache=cache):
        q = torch.ones(1, 2, 4, 4)
        F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(ValueError, match=r"dropout_p=0\.5"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def test_no_new_tokens() -> None:
    sharding = seqpar.Sharding(8, "zigzag")
    layer, cache = seqpar.ParallelAttention("ring", 8, 2), seqpar.KeyValueCache(sharding)
    with torch.no_grad():
        layer(torch.randn(1, 8, 8), cache=cache)
        with pytest.raises(ValueError, match="cache: a call after the prompt has 0 new tokens"):
            layer(torch.randn(1, 0, 8), cache=cache)


def test_layers_of_one_cache_may_score_differently() -> None:
    """The layers of a token share the choice of a backend only if their calls have the same features."""
    q, k, v = (torch.randn(1, 9, 2, 8) for _ in range(3))
    slopes = torch.tensor([0.5, 0.25])
    options: list[dict[str, Any]] = [{}, {"alibi_slopes": slopes}, {"softcap": 2.0}, {"sinks": slopes}]
    cache = seqpar.KeyValueCache(seqpar.Sharding(8, strategy="local"))
    with torch.no_grad():
        for start, stop in ((0, 8), (8, 9)):
            tokens = [x[:, start:stop] for x in (q, k, v)]
            outs = [cache.attention(i, *tokens, strategy="local", **x) for i, x in enumerate(options)]
    for out, option in zip(outs, options, strict=True):
        assert_close(out, seqpar.attention(q, k, v, strategy="local", **option)[:, 8:])
