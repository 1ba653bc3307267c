"""Schedules and tiles are pure: checked here without processes, at any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpar import Mask
from seqpar.kernels.tiles import Kind, decompose
from seqpar.layout import LAYOUTS
from seqpar.schedule import SequenceSharding, attention_steps, head_range, kv_head_range, needed, visible
from seqpar.strategies.ulysses import HeadExchange


@st.composite
def boundaries(draw: st.DrawFn, seq_len: int) -> list[int]:
    cuts = draw(st.lists(st.integers(0, seq_len), max_size=6))
    return [0, *sorted(cuts)]


@st.composite
def masks(draw: st.DrawFn, seq_len: int) -> Mask:
    """Any mask, or two of them combined."""

    def one() -> Mask:
        kind = draw(st.integers(0, 5))
        if kind == 0:
            return Mask.full()
        if kind == 1:
            return Mask.causal()
        if kind == 2:
            return Mask.sliding_window(draw(st.integers(-1, seq_len)), draw(st.integers(-1, seq_len)))
        if kind == 3:
            return Mask.documents(draw(boundaries(seq_len)), causal=draw(st.booleans()))
        if kind == 4:
            return Mask.prefix_lm(draw(st.integers(0, seq_len)))
        return Mask.chunked(draw(st.integers(1, seq_len)), causal=draw(st.booleans()))

    return one() & one() if draw(st.booleans()) else one()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Mask, SequenceSharding, bool]:
    seq_len = draw(st.integers(1, 200))
    shards = SequenceSharding(
        seq_len, draw(st.sampled_from(LAYOUTS)), ring=draw(st.integers(1, 6)), ulysses=draw(st.integers(1, 3))
    )
    return draw(masks(seq_len)), shards, draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(problems())
def test_each_visible_pair_is_computed_exactly_once(problem: tuple[Mask, SequenceSharding, bool]) -> None:
    mask, shards, gather = problem
    computed = torch.zeros(shards.seq_len, shards.seq_len, dtype=torch.int64)
    for rank in range(shards.ring):
        for step in attention_steps(mask, shards, rank, gather):
            if step.rows is None:
                continue
            rows = step.rows
            keys = torch.arange(rows.k_positions.shape[0])
            seen = (keys >= rows.lo[0, :, None]) & (keys < rows.hi[0, :, None])
            computed[rows.q_positions.long()[:, None], rows.k_positions.long()[None]] += seen
            assert bool((rows.lo.diff() >= 0).all()) and bool((rows.hi.diff() >= 0).all())
    assert torch.equal(computed, mask.dense(shards.seq_len).long())


@settings(max_examples=100, deadline=None)
@given(problems())
def test_what_one_rank_serves_another_fetches(problem: tuple[Mask, SequenceSharding, bool]) -> None:
    mask, shards, gather = problem
    schedules = [attention_steps(mask, shards, rank, gather) for rank in range(shards.ring)]
    assert len({len(s) for s in schedules}) == 1
    for index in range(len(schedules[0])):
        sent = {(r, t.peer): t.rows for r, s in enumerate(schedules) for t in s[index].serve}
        received = {(t.peer, r): t.rows for r, s in enumerate(schedules) for t in s[index].fetch}
        assert sent == received


@settings(max_examples=60, deadline=None)
@given(problems())
def test_only_needed_rows_travel(problem: tuple[Mask, SequenceSharding, bool]) -> None:
    mask, shards, gather = problem
    dense = mask.dense(shards.seq_len)
    for rank in range(shards.ring):
        fetched = sum(step.fetched for step in attention_steps(mask, shards, rank, gather))
        mine = shards.ring_positions(rank)
        seen = dense[mine].any(0)
        seen[mine] = False
        assert fetched == int(seen.sum())


def test_a_window_talks_to_its_neighbour_only() -> None:
    shards = SequenceSharding(64 * 128, "contiguous", ring=64)
    steps = attention_steps(Mask.sliding_window(100), shards, 20)
    assert [len(step.fetch) for step in steps] == [0, 1] + [0] * 62
    assert steps[1].fetch[0].peer == 19 and steps[1].fetched == 100


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_causal_work_is_balanced(layout: str, ranks: int) -> None:
    shards = SequenceSharding(ranks * 64, layout, ring=ranks)
    work = [
        sum(step.rows.pairs for step in attention_steps(Mask.causal(), shards, rank) if step.rows is not None)
        for rank in range(ranks)
    ]
    assert sum(work) == shards.seq_len * (shards.seq_len + 1) // 2
    # Zigzag's ranks are exactly alike; striped's differ by one pair for each query at most.
    assert max(work) - min(work) <= (0 if layout == "zigzag" else shards.seq_len)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12))
def test_heads_are_dealt_once_and_meet_their_keys(kv_heads: int, group: int, ranks: int) -> None:
    heads = kv_heads * group
    dealt = [head_range(heads, ranks, rank) for rank in range(ranks)]
    assert [h for r in dealt for h in r] == list(range(heads))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    for rank, mine in enumerate(dealt):
        assert {h // group for h in mine} == set(kv_head_range(heads, kv_heads, ranks, rank))


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 12), st.integers(1, 2))
def test_parts_of_heads_cover_them_once_in_equal_groups(kv_heads: int, group: int, ranks: int, ring: int) -> None:
    heads = kv_heads * group
    shards = SequenceSharding(ranks * ring, "contiguous", ring, ranks)
    subgroup: Any = SimpleNamespace(size=lambda: ranks)
    exchange = HeadExchange(subgroup, shards, 0, heads, kv_heads)
    whole, parts = exchange.whole, exchange.parts()
    for rank in range(ranks):
        assert [h for part in parts for h in part.queries[rank]] == list(whole.queries[rank])
        assert [h for part in parts for h in part.keys[rank]] == list(whole.keys[rank])
        keys: range = range(0)
        for part in parts:
            keys = part.keys[rank] or keys
            assert {h // group for h in part.queries[rank]} == set(keys)
            if len(parts) > 1:  # equal groups
                assert len({sum(h // group == k for h in part.queries[rank]) for k in keys}) == 1
    # Around a ring keys go on travelling: no part may read another's.
    assert ring == 1 or all(any(part.keys) for part in parts)
    divide = heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)
    assert len(parts) > 1 or not divide or heads == ranks or (ring > 1 and kv_heads <= ranks)


@settings(max_examples=200, deadline=None)
@given(problems(), st.data())
def test_tiles_cover_the_intervals(problem: tuple[Mask, SequenceSharding, bool], data: st.DataObject) -> None:
    mask, shards, _ = problem
    # Longer than a short run, so that every kind of tile occurs.
    shards = SequenceSharding(shards.seq_len * 4, shards.layout, shards.ring, shards.ulysses)
    lo, hi = visible(mask, shards, data.draw(st.integers(0, shards.ring - 1)), 0)
    keys = len(shards.ring_positions(0))
    seen = (torch.arange(keys) >= lo[0, :, None]) & (torch.arange(keys) < hi[0, :, None])
    covered = torch.zeros_like(seen, dtype=torch.int64)
    for tile in decompose(lo[0], hi[0]):
        q, k = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        if tile.kind is Kind.FULL:
            covered[q, k] += 1
        elif tile.kind is Kind.CAUSAL:
            assert tile.q1 - tile.q0 == tile.k1 - tile.k0
            covered[q, k] += torch.ones(tile.q1 - tile.q0, tile.k1 - tile.k0).tril().long()
        else:
            assert bool(seen[q, k].any(1).all())  # the kernel has no answer for a row without keys
            covered[q, k] += seen[q, k]
    assert torch.equal(covered, seen.long())
    assert torch.equal(needed(lo, hi, keys), seen.any(0))


def test_a_causal_shard_is_one_causal_tile() -> None:
    """The common case costs one kernel call: no rectangle, no mask."""
    lo, hi = visible(Mask.causal(), SequenceSharding(4096, "zigzag", ring=2), 0, 0)
    (tile,) = decompose(lo[0], hi[0])
    assert tile.kind is Kind.CAUSAL and (tile.q0, tile.q1, tile.k0, tile.k1) == (0, 2048, 0, 2048)
