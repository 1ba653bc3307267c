"""``strategy="auto"``: a rule that every rank computes alike, and how far it is from the planner's best."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.placement.balanced import balanced_layout
from seqpar.placement.layout import Assigned, Grain, Layout, LayoutName, TokenLayout
from seqpar.planner.mixes import document_mix
from seqpar.planner.setting import Setting
from seqpar.planner.step import attention_seconds
from seqpar.strategies.auto import fastest

from ..pool import Pool, on_ranks
from ..reference import assert_close, assert_error
from ..settings import H100, attention_shape
from ..strategy_cases import layout_of


def one_device(tokens: int, mask: Mask) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v and dout; and out, dq, dk and dv in float64."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, tokens, n, 16, generator=generator, dtype=torch.float64) for n in (4, 2, 2, 4)]
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    keys, values = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / 4
    weights = scores.masked_fill(~mask.dense(tokens), float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return inputs, [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


MASKS = {"causal": Mask.causal(), "window": Mask.sliding_window(9), "documents": Mask.documents([0, 5, 40, 50, 67])}


@on_ranks
def _attend(group: ProcessGroup, layout: Any) -> list[Any]:
    """Every mask with and without a sharding: what differs from float64, what was chosen, how many messages it took."""
    found: list[Any] = []
    for mask in MASKS.values():
        inputs, expected = one_device(67, mask)
        sharding = seqpar.Sharding(67, layout, group=group)
        for arguments in ({"sharding": sharding}, {"group": group, "layout": layout}):
            q, k, v, dout = (sharding.shard(x.float()) for x in inputs)
            for x in (q, k, v):
                x.requires_grad_()
            with seqpar.trace() as t:
                out = seqpar.attention(q, k, v, strategy="auto", mask=mask, **arguments)
                results = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
            for result, full in zip(results, expected, strict=True):
                assert_close(result, sharding.shard(full), torch.float32)
            with seqpar.trace() as named:
                (name,) = t.chosen or {"local": 1}
                options = {"ulysses_size": 2} if name == "hybrid" else {}
                given = {} if name == "local" else arguments
                if name != "local":
                    out = seqpar.attention(q, k, v, strategy=name, mask=mask, **given, **options)
                    out.backward(dout)
            found.append((name, t.bytes_sent == named.bytes_sent))
    return found


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "assigned"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_chooses_alike_and_is_right(pool: Pool, world: int, layout: str) -> None:
    by_rank = pool.run(world, _attend, layout_of(layout, 67, world))
    assert all(found == by_rank[0] for found in by_rank)
    assert all(same for _, same in by_rank[0])  # nothing is sent for the choice
    assert {name for name, _ in by_rank[0]} <= ({"local"} if world == 1 else {"ring", "ulysses", "hybrid"})


@on_ranks
def _layer(group: ProcessGroup) -> tuple[float, list[str]]:
    torch.manual_seed(0)
    layer = seqpar.ParallelAttention("auto", 32, 4, 2, dtype=torch.float64)
    one = seqpar.ParallelAttention("local", 32, 4, 2, dtype=torch.float64)
    one.load_state_dict(layer.state_dict())
    x = torch.randn(2, 33, 32, dtype=torch.float64)
    sharding = seqpar.Sharding(33, group=group)
    with seqpar.trace() as t:
        y = layer(sharding.shard(x), sharding=sharding)
    expected = sharding.shard(one(x, seq_len=33))
    return float((y - expected).abs().max()), list(t.chosen)


def test_the_layer_chooses_too(pool: Pool) -> None:
    found = pool.run(2, _layer)
    for error, chosen in found:
        assert_error(error, 0.0, dtype=torch.float64)
        assert chosen and chosen == found[0][1]


@pytest.mark.parametrize("call", [lambda s: seqpar.mask_planner(s, "auto"), seqpar.AutoAttention(8, 2).mask_planner])
def test_nothing_is_planned_ahead_for_auto(call: Any) -> None:
    with pytest.raises(ValueError, match="name the strategy to plan for"):
        call(seqpar.Sharding(8))


def test_it_is_no_context_of_a_tensor_parallel_layer() -> None:
    with pytest.raises(ValueError, match="context='auto'"):
        seqpar.ParallelAttention("tp_sp", 8, 2, context="auto")


# The rule

LOCAL, GLOBAL = True, False


@pytest.mark.parametrize(
    ("mask", "heads", "kv_heads", "grain", "ranks", "per_host", "expected"),
    [
        (GLOBAL, 32, 8, "two runs", 1, 1, "ring"),
        (GLOBAL, 32, 8, "two runs", 2, 2, "ring"),
        (GLOBAL, 32, 8, "two runs", 8, 8, "ulysses"),
        (GLOBAL, 32, 8, "one run", 2, 2, "ulysses"),  # a ring's last rank would have most of the work
        (GLOBAL, 32, 8, "two runs", 16, 8, "hybrid 8"),  # all-to-alls inside hosts
        (GLOBAL, 32, 32, "two runs", 16, 8, "ulysses"),
        (GLOBAL, 32, 8, "one run", 16, 8, "ulysses"),
        (GLOBAL, 4, 4, "two runs", 8, 8, "hybrid 4"),  # more ranks would be idle
        (GLOBAL, 6, 2, "two runs", 4, 4, "hybrid 2"),  # four ranks would have 2, 2, 1 and 1 heads
        (GLOBAL, 8, 8, "two runs", 3, 3, "ring"),
        (LOCAL, 32, 8, "one run", 8, 8, "ring"),
        (LOCAL, 32, 8, "tiny runs", 8, 8, "ulysses"),  # every rank needs keys of all ranks
        (LOCAL, 32, 8, "two runs", 8, 4, "ring"),
        (LOCAL, 32, 8, "several runs", 2, 2, "ring"),
        (LOCAL, 32, 8, "several runs", 8, 8, "ulysses"),
        (LOCAL, 32, 32, "several runs", 16, 8, "hybrid 8"),
    ],
)
def test_the_rule(
    mask: bool, heads: int, kv_heads: int, grain: Grain, ranks: int, per_host: int, expected: str
) -> None:
    strategy, options = fastest(mask, heads, kv_heads, grain, ranks, per_host)
    assert " ".join(map(str, (strategy, *options.values()))) == expected


def test_layouts_are_asked_for_their_runs() -> None:
    """Blocks dealt to the ranks one after another are tiny or not by their length, whatever a layout is called."""
    for layout, grain in (("contiguous", "one run"), ("zigzag", "two runs"), ("striped", "tiny runs")):
        assert TokenLayout(4096, cast(LayoutName, layout), 4).grain == grain
    for size, grain in (
        (1, "tiny runs"),
        (4, "tiny runs"),
        (256, "several runs"),
        (512, "two runs"),
        (1024, "one run"),
    ):
        blocks = [[range(i, i + size) for i in range(rank * size, 4096, 4 * size)] for rank in range(4)]
        assert TokenLayout(4096, Assigned(blocks), 4).grain == grain, size


def test_local_masks() -> None:
    """The kinds of rules count. New documents in every step must not compile code again."""
    window, documents = Mask.sliding_window(4), Mask.documents([0, 8])
    blocks, ahead = Mask.causal([(3, 5)]), Mask.sliding_window(-1, 3)
    windows = window, Mask.chunked(4), window & Mask.causal(), Mask.causal([(3, 5)], window=2), window & documents
    assert all(mask.is_local and mask.has_window for mask in windows)
    assert documents.is_local and not documents.has_window
    for mask in (Mask.causal(), Mask.full(), Mask.prefix_lm(3), Mask.padding(0, 4), blocks, ahead):
        assert not mask.is_local and not mask.has_window, repr(mask)


TOKENS = 8192  # of each rank
SIMULATED = list(product((2, 8, 16), (32, 8), ("zigzag", "contiguous"), ("causal", "window", "documents")))


@pytest.mark.parametrize(("ranks", "kv_heads", "layout", "kind"), SIMULATED)
def test_the_rule_is_near_the_best_that_the_planner_simulates(
    ranks: int, kv_heads: int, layout: Layout, kind: str
) -> None:
    """Forward and backward of 32 heads on H100s. A window has 1/16 of the sequence, and there are 16 documents."""
    tokens = ranks * TOKENS
    mask = {
        "causal": Mask.causal(),
        "window": Mask.sliding_window(tokens // 16),
        "documents": Mask.documents([*range(0, tokens, tokens // 16), tokens]),
    }[kind]
    per_host = min(8, ranks)
    hardware = replace(H100, gpus_per_host=per_host)

    def seconds(ulysses: int, gather: bool = False) -> float:
        return attention_seconds(
            Setting(
                hardware, mask, tokens, model=attention_shape(32, kv_heads, 128), ring=ranks // ulysses,
                ulysses=ulysses, layout=layout, gather=gather,
            )
        )  # fmt: skip

    strategy, options = fastest(mask.is_local, 32, kv_heads, TokenLayout(tokens, layout, ranks).grain, ranks, per_host)
    chosen = options.get("ulysses_size") or (ranks if strategy == "ulysses" else 1)
    sizes = {1, 2, per_host, ranks}
    best = min(seconds(1, gather=True), *map(seconds, sizes))
    assert seconds(chosen) < 1.25 * best


@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_the_rule_in_balanced_layouts(ranks: int, kv_heads: int) -> None:
    """Packed documents, and layers with a window beside them. One ring of all ranks takes 1.2 to 1.6 times as long."""
    tokens = ranks * TOKENS
    documents = document_mix("magi", tokens, longest=tokens // 4)
    window = documents & Mask.sliding_window(1023)
    for mask, layers in ((documents, {documents: 1}), (window, {documents: 1, window: 3})):
        layout = balanced_layout(layers, tokens, ranks, per_host=8)
        assert isinstance(layout, Assigned)
        setting = Setting(H100, mask, tokens, model=attention_shape(32, kv_heads, 128), layout=layout)
        sizes = {u for u in (1, 4, 8, ranks) if u <= 32}
        seconds = {u: attention_seconds(replace(setting, ring=ranks // u, ulysses=u)) for u in sizes}
        strategy, options = fastest(mask.is_local, 32, kv_heads, TokenLayout(tokens, layout, ranks).grain, ranks, 8)
        chosen = options.get("ulysses_size") or (ranks if strategy == "ulysses" else 1)
        assert seconds[chosen] < 1.15 * min(seconds.values()) and chosen > 1, seconds
