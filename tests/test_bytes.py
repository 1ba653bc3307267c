"""What is sent, counted exactly, against the least that has to be (the table in the README)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar.layout import LAYOUTS

from .pool import Pool
from .reference import RULES, Rule, Rules, combined, dealt, seen_by_definition

TOKENS, BATCH, HEADS, KV_HEADS, HEAD_DIM = 48, 2, 8, 8, 4
FULL, CAUSAL = (Rule("full"),), (Rule("causal"),)


@dataclass(frozen=True)
class Sent:
    """One attention call whose bytes are counted."""

    options: dict[str, Any] = field(hash=False)
    rules: Rules = FULL
    layout: str = "contiguous"
    kv_heads: int = KV_HEADS
    dtype: torch.dtype = torch.float32

    @property
    def d(self) -> int:
        return HEADS * HEAD_DIM

    @property
    def d_kv(self) -> int:
        return self.kv_heads * HEAD_DIM

    @property
    def e(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def accumulated(self) -> int:
        """Bytes of an element of a gradient that is not finished yet."""
        return max(4, self.e)


@dataclass
class Counted:
    """Of one rank, forward and backward: what the trace says, and what went into torch.distributed."""

    traced: tuple[int, int] = (0, 0)
    handed_over: tuple[int, int] = (0, 0)
    hops: tuple[int, int] = (0, 0)


def count(group: ProcessGroup, calls: list[Sent]) -> list[Counted]:
    return [_count(group, call) for call in calls]


def _count(group: ProcessGroup, call: Sent) -> Counted:
    made = torch.Generator().manual_seed(0)
    heads = (HEADS, call.kv_heads, call.kv_heads)
    whole = (torch.randn(BATCH, TOKENS, n, HEAD_DIM, generator=made).to(call.dtype) for n in heads)
    q, k, v = (seqpar.shard(x, group=group, layout=call.layout).requires_grad_() for x in whole)
    out: Any = None

    def forward() -> None:
        nonlocal out
        out = seqpar.attention(q, k, v, group=group, layout=call.layout, mask=combined(call.rules), **call.options)

    first, second = _watched(group, forward), _watched(group, lambda: out.sum().backward())
    return Counted(*((first[i], second[i]) for i in range(3)))


def _watched(group: ProcessGroup, work: Callable[[], None]) -> tuple[int, int, int]:
    """Run ``work``; bytes by the trace, payload bytes given to torch.distributed for other ranks, and hops."""
    handed_over = 0
    send, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def watched_send(ops: list[dist.P2POp]) -> Any:
        nonlocal handed_over
        handed_over += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return send(ops)

    def watched_all_to_all(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal handed_over
        sizes, inner = args[1], kwargs["group"]
        row = input.nbytes // max(input.shape[0], 1)
        handed_over += row * sum(size for peer, size in enumerate(sizes) if peer != inner.rank())
        return all_to_all(output, input, *args, **kwargs)

    with (
        mock.patch.object(dist, "batch_isend_irecv", watched_send),
        mock.patch.object(dist, "all_to_all_single", watched_all_to_all),
        seqpar.trace() as trace,
    ):
        work()
    return trace.bytes_sent, handed_over, trace.steps


def run(pool: Pool, world: int, calls: list[Sent]) -> list[list[Counted]]:
    """By call, then by rank; what the trace says has been held against what torch.distributed was given."""
    by_rank = pool.run(world, count, calls)
    for index, call in enumerate(calls):
        for rank, counted in enumerate(by_rank):
            assert counted[index].traced == counted[index].handed_over, f"rank {rank}, {call}"
    return [[counted[index] for counted in by_rank] for index in range(len(calls))]


RING = [{"strategy": "ring"}, {"strategy": "context_parallel", "comm": "p2p"}]
GATHER = [{"strategy": "context_parallel"}]
ULYSSES = [{"strategy": "ulysses"}, {"strategy": "context_parallel", "comm": "a2a"}]
HYBRID = [{"strategy": "hybrid"}, {"strategy": "context_parallel", "comm": "a2a+p2p"}]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_full_mask(pool: Pool, world: int) -> None:
    """Ring and all-gather: (P-1)/P x N x 2 d_kv x e forward; in backward k, v again, and dk, dv in float32."""
    calls = [
        Sent(options, layout=layout, kv_heads=kv_heads, dtype=dtype)
        for options in RING + GATHER
        for layout in LAYOUTS
        for kv_heads, dtype in ((8, torch.float32), (2, torch.bfloat16), (1, torch.float64))
    ]
    rows = BATCH * TOKENS * (world - 1) // world
    for call, ranks in zip(calls, run(pool, world, calls), strict=True):
        forward = rows * 2 * call.d_kv * call.e
        backward = forward + rows * 2 * call.d_kv * call.accumulated
        assert [counted.traced for counted in ranks] == [(forward, backward)] * world, call
        hops = 1 if call.options in GATHER else world - 1
        assert [counted.hops for counted in ranks] == [(hops, hops)] * world, call


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ulysses(pool: Pool, world: int) -> None:
    """(P-1)/P² x N x (2 d + 2 d_kv) x e, forward and backward, whatever the mask."""
    calls = [
        Sent(options, rules, layout, kv_heads, dtype)
        for options in ULYSSES
        for rules in (FULL, CAUSAL)
        for layout in LAYOUTS
        for kv_heads, dtype in ((8, torch.float32), (world, torch.bfloat16))
    ]
    for call, ranks in zip(calls, run(pool, world, calls), strict=True):
        sent = BATCH * TOKENS * (world - 1) * (2 * call.d + 2 * call.d_kv) * call.e // world**2
        assert [counted.traced for counted in ranks] == [(sent, sent)] * world, call


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ulysses_with_few_kv_heads(pool: Pool, world: int) -> None:
    """A key/value head goes once to each rank that reads it; its partial gradients come home in float32."""
    calls = [Sent({"strategy": "ulysses"}, kv_heads=1, dtype=torch.bfloat16)]
    tokens = BATCH * TOKENS * (world - 1) // world  # to the other ranks, of this rank's N / P tokens; N / P each
    for call, ranks in zip(calls, run(pool, world, calls), strict=True):
        queries = tokens * call.d * call.e // world
        forward = 2 * queries + tokens * 2 * call.d_kv * call.e
        backward = 2 * queries + tokens * 2 * call.d_kv * call.accumulated
        assert [counted.traced for counted in ranks] == [(forward, backward)] * world, call


@pytest.mark.parametrize(("world", "size"), [(4, 2), (8, 2), (8, 4)])
def test_hybrid(pool: Pool, world: int, size: int) -> None:
    """Ulysses's bytes inside the subgroups, ring's across them with 1/size of the heads."""
    calls = [
        Sent({**options, "ulysses_size": size}, layout=layout, kv_heads=kv_heads, dtype=dtype)
        for options in HYBRID
        for layout in LAYOUTS
        for kv_heads, dtype in ((8, torch.float32), (8, torch.bfloat16), (size, torch.float32))
    ]
    ring = world // size
    for call, ranks in zip(calls, run(pool, world, calls), strict=True):
        inside = BATCH * TOKENS * (size - 1) * (2 * call.d + 2 * call.d_kv) * call.e // (world * size)
        across = BATCH * TOKENS * (ring - 1) * 2 * call.d_kv // (ring * size)
        expected = inside + across * call.e, inside + across * (call.e + call.accumulated)
        assert [counted.traced for counted in ranks] == [expected] * world, call


def rows_sent(rules: Rules, world: int, layout: str) -> list[list[int]]:
    """``[sender][receiver]``: the sender's keys that some query of the receiver sees, pair by pair."""
    seen = seen_by_definition(rules, TOKENS).any(0)
    positions = [dealt(TOKENS, world, rank, layout) for rank in range(world)]
    return [
        [0 if to == own else int(seen[positions[to]][:, positions[own]].any(0).sum()) for to in range(world)]
        for own in range(world)
    ]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_only_what_the_mask_needs(pool: Pool, world: int) -> None:
    """Ring and all-gather send the rows inside some interval of the receiver, and their gradients back, no more."""
    shared = [rules for rules in RULES if max(rule.rows for rule in rules) == 1]
    calls = [
        Sent(options, rules, layout, dtype=torch.bfloat16)
        for options in RING[:1] + GATHER
        for rules in shared
        for layout in LAYOUTS
    ]
    for call, ranks in zip(calls, run(pool, world, calls), strict=True):
        rows = rows_sent(call.rules, world, call.layout)
        for rank, counted in enumerate(ranks):
            served, fetched = sum(rows[rank]), sum(other[rank] for other in rows)
            row = BATCH * 2 * call.d_kv
            assert counted.traced == (
                served * row * call.e,
                served * row * call.e + fetched * row * call.accumulated,
            ), f"rank {rank}, {call}"


def test_savings_that_can_be_named(pool: Pool) -> None:
    """Causal and contiguous: keys go only to later ranks. A window talks to its neighbour. Documents stay at home."""
    world = 4
    part = TOKENS // world
    documents = (Rule("documents", (tuple(range(0, TOKENS + 1, part)), True)),)
    calls = [Sent({"strategy": "ring"}, rules) for rules in (CAUSAL, (Rule("sliding_window", (5, 0)),), documents)]
    causal, window, apart = run(pool, world, calls)
    row = BATCH * 2 * calls[0].d_kv * calls[0].e
    assert [counted.traced[0] for counted in causal] == [part * row * later for later in (3, 2, 1, 0)]
    assert [counted.hops[0] for counted in causal] == [0, 1, 2, 3]
    assert [counted.traced[0] for counted in window] == [5 * row, 5 * row, 5 * row, 0]
    assert [counted.traced for counted in apart] == [(0, 0)] * world
    assert [counted.hops for counted in apart] == [(0, 0)] * world


def test_one_rank_sends_nothing(pool: Pool) -> None:
    calls = [Sent(options) for options in (*RING, *GATHER, *ULYSSES, *HYBRID)]
    assert all(counted.traced == (0, 0) for (counted,) in run(pool, 1, calls))


def nested(group: ProcessGroup) -> list[int]:
    """Traces may be nested, and one that is closed counts no more."""
    x = seqpar.shard(torch.zeros(1, 8, 2, 4), group=group)
    with seqpar.trace() as outer:
        seqpar.ring_attention(x, x, x, group=group)
        with seqpar.trace() as inner:
            seqpar.ulysses_attention(x, x, x, group=group)
        seqpar.unshard(x, group=group)
    seqpar.ring_attention(x, x, x, group=group)
    return [outer.bytes_sent, inner.bytes_sent, outer.backends.total()]


def test_traces_nest(pool: Pool) -> None:
    shard = 4 * 8 * 4  # tokens, d, bytes
    ulysses = 4 * shard // 2  # half of the heads of q, k, v and out
    assert pool.run(2, nested) == [
        [2 * shard + ulysses + shard, ulysses, 2],  # the first rank's keys are seen by the second
        [0 + ulysses + shard, ulysses, 2],
    ]
