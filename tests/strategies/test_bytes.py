"""The exact number of bytes sent, compared with the lower bounds in the README's table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from itertools import cycle, product
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar.comm import collectives
from seqpar.comm.shared_memory import VARIABLE
from seqpar.placement import layout
from seqpar.placement.layout import shard_length

from ..cases import Batch
from ..pool import Pool, mesh_of, on_ranks
from ..problems import HEAD_RULES, RULES, heads_for
from ..reference import Rule, Rules, combined_mask, fitted, rank_positions, rows_of, rules_id, visible_pairs

TOKENS, BATCH, HEAD_DIM = 48, 2, 4
# The formulas are for ranks with equally many tokens.
LAYOUTS = [name for name in layout.LAYOUTS if len({shard_length(TOKENS, 8, rank, name) for rank in range(8)}) == 1]
FULL, CAUSAL = (Rule("full"),), (Rule("causal"),)


@dataclass(frozen=True)
class Case:
    """One attention call whose bytes are counted.

    Attributes:
        options: the strategy and its options.
    """

    options: dict[str, Any] = field(hash=False)
    rules: Rules = FULL
    layout: str = "contiguous"
    heads: int = 8
    kv_heads: int = 8
    dtype: torch.dtype = torch.float32
    v_head_dim: int = HEAD_DIM

    def __str__(self) -> str:
        words = [*map(str, self.options.values()), self.layout, rules_id(self.rules)]
        for f in fields(self)[3:]:
            words.append(f"{f.name}={getattr(self, f.name)}".replace("torch.", ""))
        return " ".join(words)

    @property
    def d(self) -> int:
        """Elements of a token's queries."""
        return self.heads * HEAD_DIM

    @property
    def d_kv(self) -> int:
        """Elements of a token's keys."""
        return self.kv_heads * HEAD_DIM

    @property
    def d_out(self) -> int:
        """Elements of a token's output."""
        return self.heads * self.v_head_dim

    @property
    def d_v(self) -> int:
        """Elements of a token's values."""
        return self.kv_heads * self.v_head_dim

    @property
    def e(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def e_partial(self) -> int:
        """Bytes of an element of a partial gradient, which is float32 or larger."""
        return max(4, self.e)


@dataclass
class Sent:
    """What one rank sends, in forward and in backward.

    Attributes:
        traced: bytes that ``seqpar.trace`` counts.
        handed_over: payload bytes handed to torch.distributed for other ranks.
        p2p: the bytes of ``handed_over`` that are sent point to point, by the ring.
        steps: steps in which the rank receives keys.
    """

    traced: tuple[int, int]
    handed_over: tuple[int, int]
    p2p: tuple[int, int]
    steps: tuple[int, int]


@on_ranks
def count_bytes(group: ProcessGroup, case: Case) -> Sent:
    generator = torch.Generator().manual_seed(0)
    shapes = (case.heads, HEAD_DIM), (case.kv_heads, HEAD_DIM), (case.kv_heads, case.v_head_dim)
    tensors = (torch.randn(BATCH, TOKENS, *shape, generator=generator).to(case.dtype) for shape in shapes)
    q, k, v = (seqpar.shard(x, group=group, layout=case.layout).requires_grad_() for x in tensors)
    out: Any = None

    def forward() -> None:
        nonlocal out
        out = seqpar.attention(q, k, v, group=group, layout=case.layout, mask=combined_mask(case.rules), **case.options)

    return watch(forward, lambda: out.sum().backward())


def watch(forward: Callable[[], None], backward: Callable[[], None]) -> Sent:
    """Run both and count."""
    counts = watch_one(forward), watch_one(backward)
    return Sent(*zip(*counts, strict=True))


def watch_one(work: Callable[[], None]) -> tuple[int, int, int, int]:
    """Run ``work`` over gloo; the fields of ``Sent`` in one direction."""
    handed_over = p2p = 0
    send, all_to_all = dist.isend, dist.all_to_all_single
    all_gather, reduce_scatter = collectives.all_gather_single, collectives.reduce_scatter_single

    def watched_send(x: Tensor, *, tag: int, **where: Any) -> Any:
        nonlocal handed_over, p2p
        if tag and x.nbytes > 1:  # else it says in which call the rank is, or connects two ranks
            handed_over += x.nbytes
            p2p += x.nbytes
        return send(x, tag=tag, **where)

    def watched_all_to_all(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal handed_over
        sizes, inner = args[1], kwargs["group"]
        row_bytes = input.nbytes // max(input.shape[0], 1)
        handed_over += row_bytes * sum(size for peer, size in enumerate(sizes) if peer != inner.rank())
        return all_to_all(output, input, *args, **kwargs)

    def watched_all_gather(output: Tensor, input: Tensor, **kwargs: Any) -> Any:
        nonlocal handed_over
        handed_over += input.nbytes * (kwargs["group"].size() - 1)
        return all_gather(output, input, **kwargs)

    def watched_reduce_scatter(output: Tensor, input: Tensor, **kwargs: Any) -> Any:
        nonlocal handed_over
        handed_over += output.nbytes * (kwargs["group"].size() - 1)
        return reduce_scatter(output, input, **kwargs)

    with (
        mock.patch.dict(os.environ, {VARIABLE: "0"}),
        mock.patch.object(collectives, "all_gather_single", watched_all_gather),
        mock.patch.object(collectives, "reduce_scatter_single", watched_reduce_scatter),
        mock.patch.object(dist, "isend", watched_send),
        mock.patch.object(dist, "all_to_all_single", watched_all_to_all),
        mock.patch.object(collectives, "all_to_all_single", watched_all_to_all),
        seqpar.trace() as trace,
    ):
        work()
    return trace.bytes_sent, handed_over, p2p, trace.steps


def check(batch: Batch, world: int, cases: list[Case], verify: Callable[[Case, list[Sent]], None]) -> None:
    """Count the bytes of every case; the trace must agree with torch.distributed, and ``verify`` with both."""

    def verify_case(case: Case, by_rank: list[Sent]) -> None:
        for sent in by_rank:
            assert sent.traced == sent.handed_over
        verify(case, by_rank)

    batch.check(world, count_bytes, cases, verify_case)


RING = [{"strategy": "ring"}, {"strategy": "context_parallel", "comm": "p2p"}]
GATHER = [{"strategy": "context_parallel"}]
ULYSSES = [{"strategy": "ulysses"}, {"strategy": "context_parallel", "comm": "a2a"}]
HYBRID = [{"strategy": "hybrid"}, {"strategy": "context_parallel", "comm": "a2a+p2p"}]


@pytest.mark.parametrize("world", [2, 4])
def test_full_mask(batch: Batch, world: int) -> None:
    """Ring and all-gather: (P-1)/P x N x (d_k + d_v) x e forward; in backward k, v again, and dk, dv in float32.

    d_k and d_v are the elements of a token's keys and values, 2 d_kv together where these have the same head_dim.
    """
    heads = ((8, torch.float32, HEAD_DIM), (2, torch.bfloat16, 3), (1, torch.float64, 7))
    cases = [
        Case(options, layout=layout, kv_heads=kv_heads, dtype=dtype, v_head_dim=v_head_dim)
        for (options, layout), (kv_heads, dtype, v_head_dim) in zip(
            product(RING + GATHER, LAYOUTS), cycle(heads), strict=False
        )
    ]

    def verify(case: Case, by_rank: list[Sent]) -> None:
        tokens = BATCH * TOKENS * (world - 1) // world
        forward = tokens * (case.d_kv + case.d_v) * case.e
        backward = forward + tokens * (case.d_kv + case.d_v) * case.e_partial
        assert [sent.traced for sent in by_rank] == [(forward, backward)] * world
        steps = 1 if case.options in GATHER else world - 1
        assert [sent.steps for sent in by_rank] == [(steps, steps)] * world

    check(batch, world, cases, verify)


@pytest.mark.parametrize("world", [2, 4])
def test_ulysses(batch: Batch, world: int) -> None:
    """(P-1)/P² x N x (2 d + 2 d_kv) x e, forward and backward, under any mask; q, k, v and out each count their own."""
    heads = ((8, torch.float32, HEAD_DIM), (world, torch.bfloat16, HEAD_DIM), (world, torch.bfloat16, 6))
    cases = [
        Case(options, rules, layout, kv_heads=kv_heads, dtype=dtype, v_head_dim=v_head_dim)
        for (options, rules, layout), (kv_heads, dtype, v_head_dim) in zip(
            product(ULYSSES, (FULL, CAUSAL), LAYOUTS), cycle(heads), strict=False
        )
    ]

    def verify(case: Case, by_rank: list[Sent]) -> None:
        elements = case.d + case.d_out + case.d_kv + case.d_v
        total = BATCH * TOKENS * (world - 1) * elements * case.e // world**2
        assert [sent.traced for sent in by_rank] == [(total, total)] * world

    check(batch, world, cases, verify)


@pytest.mark.parametrize("world", [2, 4])
def test_ulysses_with_few_kv_heads(batch: Batch, world: int) -> None:
    """A KV head is sent once to each rank that reads it, forward and backward; its partial gradients in float32."""

    def verify(case: Case, by_rank: list[Sent]) -> None:
        tokens = BATCH * TOKENS * (world - 1) // world  # N / P of this rank, to P - 1 ranks
        queries = tokens * (case.d + case.d_out) * case.e // world
        forward = queries + tokens * (case.d_kv + case.d_v) * case.e
        backward = forward + tokens * (case.d_kv + case.d_v) * case.e_partial  # k, v again
        assert [sent.traced for sent in by_rank] == [(forward, backward)] * world

    cases = [
        Case({"strategy": "ulysses"}, kv_heads=1, dtype=torch.bfloat16, v_head_dim=v_head_dim) for v_head_dim in (4, 3)
    ]
    check(batch, world, cases, verify)


@pytest.mark.parametrize(("world", "size"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.slow)])
def test_hybrid(batch: Batch, world: int, size: int) -> None:
    """The bytes of Ulysses inside the subgroups, and the bytes of a ring across them with 1/size of the heads."""
    heads = ((8, torch.float32), (8, torch.bfloat16), (size, torch.float32))
    cases = [
        Case({**options, "ulysses_size": size}, layout=layout, kv_heads=kv_heads, dtype=dtype)
        for options, (layout, (kv_heads, dtype)) in product(HYBRID, zip(LAYOUTS, cycle(heads), strict=False))
    ]
    ring = world // size

    def verify(case: Case, by_rank: list[Sent]) -> None:
        inside = BATCH * TOKENS * (size - 1) * (2 * case.d + 2 * case.d_kv) * case.e // (world * size)
        across = BATCH * TOKENS * (ring - 1) * 2 * case.d_kv // (ring * size)
        expected = inside + across * case.e, inside + across * (case.e + case.e_partial)
        assert [sent.traced for sent in by_rank] == [expected] * world

    check(batch, world, cases, verify)


class LocalHeads(NamedTuple):
    """Numbers of heads on one rank."""

    queries: int
    kv: int  # that its query heads read


def heads_by_rank(heads: int, kv_heads: int, ranks: int) -> list[LocalHeads]:
    """The heads of each rank, when the query heads are divided as evenly as possible."""
    shards = [shard.tolist() for shard in torch.arange(heads).tensor_split(ranks)]
    return [LocalHeads(len(shard), len({h * kv_heads // heads for h in shard})) for shard in shards]


# (heads, kv_heads). On 4 ranks, 10 query heads over 5 KV heads are divided in 3, 3, 2, 2: the first rank's query heads
# read KV heads 0, 0, 1. With (9, 3) on 2 ranks they read 0, 0, 0, 1, 1.
UNEVEN_HEADS = [(10, 5), (9, 3), (7, 7), (6, 3), (5, 1)]


@pytest.mark.parametrize(("world", "size"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.slow)])
def test_hybrid_uneven_heads(batch: Batch, world: int, size: int) -> None:
    """A rank whose query heads read KV heads unequally often sends each of these KV heads once a ring step.

    The KV heads are repeated for the query heads after they are received, never before they are sent; their gradients
    are sent back once a head in float32.
    """
    cases = [
        Case({**options, "ulysses_size": size}, heads=heads, kv_heads=kv_heads, dtype=dtype)
        for (heads, kv_heads), (options, dtype) in product(
            UNEVEN_HEADS, zip(HYBRID, (torch.float32, torch.bfloat16), strict=True)
        )
    ]
    ring = world // size

    def verify(case: Case, by_rank: list[Sent]) -> None:
        by_ulysses_rank = heads_by_rank(case.heads, case.kv_heads, size)
        shared = sum(local.kv for local in by_ulysses_rank) > case.kv_heads  # ranks hold parts of one gradient
        e_kv = case.e_partial if shared else case.e
        head = BATCH * TOKENS // world * HEAD_DIM  # elements of one head of the tokens of one rank
        for rank, sent in enumerate(by_rank):
            own = by_ulysses_rank[rank % size]
            across = (ring - 1) * size * 2 * own.kv * head
            assert sent.p2p == (across * case.e, across * (case.e + case.e_partial)), f"ring bytes of rank {rank}"
            to_heads = [local for r, local in enumerate(by_ulysses_rank) if r != rank % size]
            to_queries, to_kv = (sum(local.queries for local in to_heads), sum(local.kv for local in to_heads))
            inside_forward = (to_queries + 2 * to_kv + (size - 1) * own.queries) * head * case.e  # q, k, v; out
            dq = (to_queries + (size - 1) * own.queries) * head * case.e  # dout; dq
            again = 2 * to_kv * head * case.e if shared else 0  # k, v
            inside_backward = dq + again + (size - 1) * 2 * own.kv * head * e_kv
            assert sent.traced == (sent.p2p[0] + inside_forward, sent.p2p[1] + inside_backward), f"rank {rank}"

    check(batch, world, cases, verify)


@on_ranks
def count_tensor_parallel_ring(group: ProcessGroup, case: Case, tp: int) -> Sent:
    """A Megatron layer with a ring across its tensor-parallel groups."""
    mesh = mesh_of(1, group.size() // tp, 1, tp)
    layer = seqpar.ParallelAttention(
        "tp_sp",
        24,
        case.heads,
        case.kv_heads,
        HEAD_DIM,
        mesh=mesh,
        overlap="none",
        context="ring",
        dtype=case.dtype,
        layout="contiguous",
    )
    x = torch.randn(BATCH, TOKENS // group.size(), 24, dtype=case.dtype, requires_grad=True)
    y: Any = None

    def forward() -> None:
        nonlocal y
        y = layer(x, mask=combined_mask(case.rules), seq_len=TOKENS)

    return watch(forward, lambda: y.sum().backward())


@pytest.mark.slow
@pytest.mark.thorough(tp=[2])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ring_uneven_heads(batch: Batch, tp: int) -> None:
    """The same for tensor parallelism with a ring: without overlap, only the ring sends point to point."""
    cases = [
        Case({"context": "ring"}, heads=heads, kv_heads=kv_heads, dtype=dtype)
        for (heads, kv_heads), dtype in zip(UNEVEN_HEADS, cycle((torch.float32, torch.bfloat16)), strict=False)
    ]
    ring = 8 // tp

    def verify(case: Case, by_rank: list[Sent]) -> None:
        by_tp_rank = heads_by_rank(case.heads, case.kv_heads, tp)
        for rank, sent in enumerate(by_rank):
            across = (ring - 1) * BATCH * TOKENS // ring * 2 * by_tp_rank[rank % tp].kv * HEAD_DIM
            assert sent.p2p == (across * case.e, across * (case.e + case.e_partial)), f"rank {rank}"
            assert sent.steps == (ring - 1, ring - 1)

    batch.check(8, count_tensor_parallel_ring, cases, verify, tp)


def visible_rows(rules: Rules, world: int, layout: str) -> list[list[int]]:
    """``[sender][receiver]``: the number of the sender's keys that some query of the receiver sees."""
    visible = visible_pairs(rules, TOKENS).any(0)
    positions = [rank_positions(TOKENS, world, rank, layout) for rank in range(world)]
    return [
        [0 if to == own else int(visible[positions[to]][:, positions[own]].any(0).sum()) for to in range(world)]
        for own in range(world)
    ]


def masks_of_groups(rules: Rules) -> list[Rules]:
    """The rules of each group of heads; of all heads, if they share the mask."""
    for at, rule in enumerate(rules):
        if rule.name == "by_heads":
            return [(*rules[:at], *own, *rules[at + 1 :]) for own in rule.args]
    return [rules]


@pytest.mark.thorough(world=[4])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_only_what_the_mask_needs(batch: Batch, world: int) -> None:
    """Ring and all-gather send the keys that some query of the receiver sees, and their gradients back; no more. Each
    group of heads with a mask of its own sends its keys only."""
    shared = [fitted(rules, TOKENS) for rules in (*RULES, *HEAD_RULES) if rows_of(rules) == 1]
    cases = [
        Case(options, rules, layout, *heads_for(rules, 0), dtype=torch.bfloat16, v_head_dim=v_head_dim)
        for (options, rules, layout), v_head_dim in zip(
            product(RING[:1] + GATHER, shared, LAYOUTS), cycle((HEAD_DIM, 2)), strict=False
        )
    ]

    def verify(case: Case, by_rank: list[Sent]) -> None:
        groups = masks_of_groups(case.rules)
        by_group = [visible_rows(rules, world, case.layout) for rules in groups]
        elements = BATCH * (case.d_kv + case.d_v) // len(groups)  # of one row of k and v of a group of heads
        for rank, sent in enumerate(by_rank):
            sends = sum(sum(rows[rank]) for rows in by_group)
            receives = sum(other[rank] for rows in by_group for other in rows)
            forward = sends * elements * case.e
            assert sent.traced == (forward, forward + receives * elements * case.e_partial), f"rank {rank}"

    check(batch, world, cases, verify)


def test_contiguous_examples(batch: Batch) -> None:
    """Causal: keys go to later ranks only. A window: to the next rank only. Documents within ranks: nowhere. Blocks
    that are shifted by half a block in half of the heads: keys of these heads go to the next rank only."""
    world = 4
    local = TOKENS // world
    documents = (Rule("documents", (tuple(range(0, TOKENS + 1, local)), True)),)
    window = (Rule("sliding_window", (5, 0)),)
    shifted = (Rule("by_heads", ((Rule("chunked", (local, True)),), (Rule("chunked", (local, True, (local // 2,))),))),)
    row = BATCH * 2 * 8 * HEAD_DIM * 4  # bytes of one token's k and v
    bytes_and_steps: dict[Rules, tuple[list[int], list[int]]] = {
        CAUSAL: ([local * row * later for later in (3, 2, 1, 0)], [0, 1, 2, 3]),
        window: ([5 * row, 5 * row, 5 * row, 0], [0, 1, 1, 1]),
        documents: ([0, 0, 0, 0], [0, 0, 0, 0]),
        shifted: ([*[local // 2 * row // 2] * 3, 0], [0, 1, 1, 1]),
    }

    def verify(case: Case, by_rank: list[Sent]) -> None:
        sent, steps = bytes_and_steps[case.rules]
        assert [rank.traced[0] for rank in by_rank] == sent
        assert [rank.steps[0] for rank in by_rank] == steps

    check(batch, world, [Case({"strategy": "ring"}, rules) for rules in bytes_and_steps], verify)


def test_one_rank_sends_nothing(batch: Batch) -> None:
    def verify(case: Case, by_rank: list[Sent]) -> None:
        assert by_rank[0].traced == (0, 0)

    check(batch, 1, [Case(options) for options in (*RING, *GATHER, *ULYSSES, *HYBRID)], verify)


@on_ranks
def tensor_parallel_bytes(group: ProcessGroup, overlap: str, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a Megatron layer sends in forward and in backward."""
    layer = seqpar.ParallelAttention("tp_sp", 24, 8, 8, 4, group=group, overlap=overlap, dtype=dtype)
    x = torch.randn(BATCH, TOKENS // group.size(), 24, dtype=dtype, requires_grad=True)
    with seqpar.trace() as forward:
        y = layer(x, seq_len=TOKENS)
    with seqpar.trace() as backward:
        y.sum().backward()
    return forward.bytes_sent, backward.bytes_sent


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("overlap", ["ring", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_parallel(pool: Pool, world: int, overlap: str, dtype: torch.dtype) -> None:
    """Forward: an all-gather and a reduce-scatter of (P-1)/P x N x hidden x e each. Backward: both, and the all-gather
    of the input once more."""
    one_way = (world - 1) * BATCH * TOKENS // world * 24 * dtype.itemsize
    assert pool.run(world, tensor_parallel_bytes, overlap, dtype) == [(2 * one_way, 3 * one_way)] * world


@on_ranks
def bytes_around_the_layers(group: ProcessGroup, dtype: torch.dtype) -> list[int]:
    """Bytes of ``shard``, ``unshard`` and ``token_loss``, each in forward and in backward."""
    sharding = seqpar.Sharding(TOKENS, "zigzag", group=group)
    x = torch.randn(BATCH, TOKENS, 24, dtype=dtype, requires_grad=True)
    x_local = sharding.shard(x).detach().requires_grad_()
    labels, sent = torch.zeros(BATCH, sharding.seq_local, dtype=torch.int64), []
    calls: list[Callable[[], Tensor]] = [
        lambda: sharding.shard(x),
        lambda: sharding.unshard(x_local),
        lambda: seqpar.token_loss(x_local[..., 0], labels, sharding=sharding),
    ]
    for call in calls:
        with seqpar.trace() as forward:
            y = call()
        with seqpar.trace() as backward:
            y.backward(torch.ones_like(y))
        sent += [forward.bytes_sent, backward.bytes_sent]
    return sent


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_around_the_layers(pool: Pool, world: int, dtype: torch.dtype) -> None:
    """``shard`` sends nothing. ``unshard`` all-gathers, and its backward reduce-scatters in float32. The loss
    all-reduces a sum in three parts and a count in float64, its backward one gradient in float32: counted as rings."""
    shard = BATCH * TOKENS // world * 24
    gather, scatter = ((world - 1) * shard * size for size in (dtype.itemsize, 4))
    loss, gradient = (2 * nbytes * (world - 1) // world for nbytes in (4 * 8, 4))
    assert pool.run(world, bytes_around_the_layers, dtype) == [[0, 0, gather, scatter, loss, gradient]] * world


@on_ranks
def nested_traces(group: ProcessGroup) -> list[int]:
    """Bytes of the outer trace, bytes of the inner trace, attention calls of the outer trace."""
    x = seqpar.shard(torch.zeros(1, 8, 2, 4), group=group, layout="contiguous")
    with seqpar.trace() as outer:
        seqpar.ring_attention(x, x, x, group=group, layout="contiguous")
        with seqpar.trace() as inner:
            seqpar.ulysses_attention(x, x, x, group=group, layout="contiguous")
        seqpar.unshard(x, group=group, layout="contiguous")
    seqpar.ring_attention(x, x, x, group=group, layout="contiguous")  # after the block: not counted
    return [outer.bytes_sent, inner.bytes_sent, outer.backends.total()]


def test_traces_nest(pool: Pool) -> None:
    shard = 4 * 8 * 4  # tokens, d, bytes
    ulysses = 4 * shard // 2  # half of the heads of q, k, v and out
    assert pool.run(2, nested_traces) == [
        [2 * shard + ulysses + shard, ulysses, 2],  # the second rank's queries see the first rank's keys
        [0 + ulysses + shard, ulysses, 2],
    ]
