"""Schedules and tiles. They are pure functions, and are tested without processes for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar import Mask
from seqpar.kernels.cpu import pairs_computed_on_cpu
from seqpar.kernels.tiles import TileKind, decompose
from seqpar.placement.heads import Heads, kv_index
from seqpar.placement.layout import CPU, LayoutName, TokenLayout, segments_layout
from seqpar.placement.placement import Placement
from seqpar.planner.pairs import visible_pairs
from seqpar.schedule.plan import AttentionPlan, attention_plan
from seqpar.schedule.program import Hop
from seqpar.schedule.rows import KeyIntervals, RowSpans
from seqpar.strategies.head_exchange import MAX_CHUNKS, HeadExchange

from ..generators import masks
from ..strategy_cases import LAYOUTS, layout_of

Scheduled = tuple[Mask, TokenLayout, bool, int]


@st.composite
def scheduled(draw: st.DrawFn, times: int = 1) -> Scheduled:
    """A mask, a sharding, whether the steps are joined into one all-gather, and the ring's ranks on one host.

    The sequence is ``times`` as long as the mask's.
    """
    mask_len = draw(st.integers(1, 200))
    seq_len = mask_len * times
    hosts, per_host = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ring, ulysses = hosts * per_host, draw(st.integers(1, 3))
    layout = layout_of(draw(st.sampled_from(LAYOUTS)), seq_len, ring * ulysses)
    sharding = TokenLayout(seq_len, layout, ring, ulysses)
    return draw(masks(mask_len)), sharding, draw(st.booleans()), per_host


@settings(max_examples=150)
@given(scheduled())
def test_each_visible_pair_is_computed_exactly_once(problem: Scheduled) -> None:
    mask, shards, gather, per_host = problem
    computed = torch.zeros(shards.seq_len, shards.seq_len, dtype=torch.int64)
    for rank in range(shards.ring):
        plan = AttentionPlan(mask, shards, rank, gather, per_host)
        for step in range(len(plan)):
            for rows in plan.intervals(step, CPU, positions=True):
                keys = torch.arange(rows.k_positions.shape[0])
                seen = (keys >= rows.lo[0, :, None]) & (keys < rows.hi[0, :, None])
                computed[rows.q_positions.long()[:, None], rows.k_positions.long()[None]] += seen
                assert bool((rows.lo.diff() >= 0).all()) and bool((rows.hi.diff() >= 0).all())
    assert torch.equal(computed, mask.dense(shards.seq_len).long())


@settings(max_examples=100)
@given(scheduled())
def test_every_send_has_its_receive(problem: Scheduled) -> None:
    mask, shards, gather, per_host = problem
    schedules = [AttentionPlan(mask, shards, rank, gather, per_host) for rank in range(shards.ring)]
    assert len({len(s) for s in schedules}) == 1 == len({s.dense for s in schedules})
    hops: list[list[Hop]] = [[plan[i].intra_host for plan in schedules] for i in range(len(schedules[0]))]
    between = [inter_host(plan) for plan in schedules]
    other_hosts = schedules[0].hosts - 1
    assert {len(x) for x in between} == {min(1, other_hosts) if gather else other_hosts}
    hops += map(list, zip(*between, strict=True))
    for by_rank in hops:
        sent = [(r, t.peer, t.owner, t.owner_rows) for r, hop in enumerate(by_rank) for t in hop.sends]
        received = [(t.peer, r, t.owner, t.owner_rows) for r, hop in enumerate(by_rank) for t in hop.receives]
        assert sorted(sent, key=str) == sorted(received, key=str)
        for rank, hop in enumerate(by_rank):
            peers = {t.peer for t in (*hop.sends, *hop.receives)} - {rank}
            assert peers <= {peer for peers_of_round in hop.rounds for peer in peers_of_round}


def inter_host(plan: AttentionPlan) -> list[Hop]:
    """The hops between hosts, each once."""
    return [step.inter_host for step in plan if step.inter_host is not None and step.starts_inter_host]


@settings(max_examples=100)
@given(scheduled())
def test_rows_are_sent_once_to_each_other_host(problem: Scheduled) -> None:
    """To every host, exactly the rows that some of its ranks sees; and the ranks there send on what they have."""
    mask, shards, gather, per_host = problem
    plans = [AttentionPlan(mask, shards, rank, gather, per_host) for rank in range(shards.ring)]
    seen = mask.dense(shards.seq_len)
    held = [shards.ring_positions(rank).tensor(CPU) for rank in range(shards.ring)]
    for host in range(plans[0].hosts):
        ranks = range(host * per_host, (host + 1) * per_host)
        own = torch.cat([held[rank] for rank in ranks])
        wanted = seen[own].any(0)
        wanted[own] = False
        arrived = torch.zeros(shards.seq_len, dtype=torch.int64)
        for plan in (plans[rank] for rank in ranks):
            has = {plan.rank: torch.arange(len(held[plan.rank]))}
            for transfer in (t for hop in inter_host(plan) for t in hop.receives):
                assert transfer.peer // per_host != host and transfer.peer == transfer.owner
                has[transfer.owner] = transfer.owner_rows.index(CPU)
                arrived[held[transfer.owner][has[transfer.owner]]] += 1
            for transfer in (t for step in plan for t in step.intra_host.sends):
                assert transfer.peer in ranks
                assert torch.equal(has[transfer.owner][transfer.sender_rows.index(CPU)], transfer.owner_rows.index(CPU))
        assert torch.equal(arrived, wanted.long()) or plans[0].dense


@settings(max_examples=60)
@given(scheduled())
def test_only_visible_rows_are_received(problem: Scheduled) -> None:
    mask, shards, gather, per_host = problem
    dense = mask.dense(shards.seq_len)
    for rank in range(shards.ring):
        plan = AttentionPlan(mask, shards, rank, gather, per_host)
        received = sum(len(t.owner_rows) for step in plan for t in step.intra_host.receives)
        mine = shards.ring_positions(rank).tensor(CPU)
        seen = dense[mine].any(0)
        seen[mine] = False
        assert received == int(seen.sum())


def test_a_window_receives_from_its_neighbour_only() -> None:
    shards = TokenLayout(64 * 128, "contiguous", ring=64)
    steps = list(AttentionPlan(Mask.sliding_window(100), shards, 20))
    assert [len(step.intra_host.receives) for step in steps] == [0, 1] + [0] * 62
    (transfer,) = steps[1].intra_host.receives
    assert transfer.peer == 19 and len(transfer.owner_rows) == 100


def test_block_diffusion_sends_no_noisy_row() -> None:
    """Each rank holds the same blocks of the clean and of the noisy half."""
    clean, ranks = 64, 4
    layout = segments_layout((clean, clean), ranks, "contiguous")
    for rank in range(ranks):
        shards = TokenLayout(2 * clean, layout, ring=ranks)
        plan, held = (
            AttentionPlan(Mask.block_diffusion(clean, 8), shards, rank),
            shards.ring_positions(rank).tensor(CPU),
        )
        sent = [held[t.owner_rows.index(CPU)] for step in plan for t in step.intra_host.sends]
        assert len(sent) == ranks - 1 - rank or (rank == 0 and len(sent) == 3)
        assert all(bool((x < clean).all()) and len(x) == clean // ranks for x in sent)


def test_a_tree_costs_its_area() -> None:
    """The kernel for CPUs computes 16 answers to a long prompt with little more than their visible pairs."""
    prompt, answer, answers = 32768, 4096, 16
    seq_len = prompt + answer * answers
    costs, areas = [], []
    for mask in (Mask.tree([-1] + [0] * answers, [prompt] + [answer] * answers), Mask.causal()):
        plan = AttentionPlan(mask, TokenLayout(seq_len, "contiguous", ring=1), 0)
        costs.append(sum(map(pairs_computed_on_cpu, plan.intervals(0, CPU))))
        areas.append(visible_pairs(mask, seq_len))
    assert areas[0] == prompt * (prompt + 1) // 2 + answers * (prompt * answer + answer * (answer + 1) // 2)
    assert costs[0] / costs[1] <= 1.1 * areas[0] / areas[1]


@pytest.mark.parametrize("spans", [1, 16, 17, 40])
def test_rows_are_selected_by_few_operators(spans: int) -> None:
    """By slices or by one index, and never by an operator for each of many documents."""
    selection = RowSpans(tuple((5 * i + 1, 5 * i + 1 + i % 4 + 1) for i in range(spans)))
    rows = torch.cat([torch.arange(start, stop) for start, stop in selection.spans])
    x = torch.randn(2, 3, 5 * spans + 1, 2, 4)
    values, target = torch.randn(2, 3, len(rows), 2, 4), x.clone()
    selection.index(CPU)  # cached for the next layer
    with Operators() as taken:
        selection.copy_to([values], [x])
    with Operators() as added:
        selection.add_to([target], [values])
    assert torch.equal(values, x[:, :, rows])
    expected = x.clone()
    expected[:, :, rows] *= 2
    assert torch.equal(target, expected)
    assert torch.equal(
        selection.counts_below(torch.arange(x.shape[2])), torch.searchsorted(rows, torch.arange(x.shape[2]))
    )
    assert taken.count <= 3 * 16 and added.count <= 5 * 16


class Operators(TorchDispatchMode):
    """Counts operators."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", get_args(LayoutName))
def test_many_documents_are_few_spans(layout: LayoutName) -> None:
    """8,000 documents over a million tokens: what one rank sends another is not a list of documents."""
    seq_len = 1 << 20
    mask = Mask.documents([*range(0, seq_len, 131), seq_len])
    plan = AttentionPlan(mask, TokenLayout(seq_len, layout, ring=64), 31)
    transfers = [t for step in plan for t in (*step.intra_host.sends, *step.intra_host.receives)]
    spans = max(len(t.owner_rows.spans) for t in transfers)
    assert spans <= 2, f"layout={layout!r}: let _merged_positions describe its tokens by stripes"


@settings(max_examples=100)
@given(scheduled(), st.integers(1, 4), st.integers(1, 2), st.sampled_from([1, 2, 4]))
def test_messages_are_posted_once_and_in_the_same_order_on_every_rank(
    problem: Scheduled, chunks: int, prefetch: int, groups: int
) -> None:
    """Also where groups of heads have masks of their own."""
    mask, shards, gather, per_host = problem
    heads, programs = Heads.of_model(8, 4), []
    mask = Mask.by_heads([mask, *(Mask.sliding_window(9 * i) for i in range(1, groups))])
    for rank in range(shards.ring):
        plan = attention_plan(mask, shards, rank, gather, per_host, 8)
        programs.append(plan.program(heads, chunks, prefetch=prefetch))
    posts = [[step.posts for step in program.steps] for program in programs]
    assert all(other == posts[0] for other in posts)
    posted = [post for step_posts in posts[0] for post in step_posts]
    steps = programs[0].steps
    messages = [i for i, step in enumerate(steps) if step.index]
    assert [i for level, i in posted if level == "intra_host"] == messages
    inter_host = [i for i, step in enumerate(steps) if step.starts_inter_host]
    assert [i for level, i in posted if level == "inter_host"] == inter_host
    for i in messages:
        at = next(at for at, step_posts in enumerate(posts[0]) if ("intra_host", i) in step_posts)
        assert i - prefetch <= at <= i
        if i in inter_host:
            assert posted.index(("inter_host", i)) < posted.index(("intra_host", i))


@given(
    scheduled(),
    st.sampled_from([(8, 8), (8, 2), (6, 3), (4, 1), (1, 1)]),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
)
def test_each_head_attends_to_the_keys_of_each_step_once(
    problem: Scheduled, model_heads: tuple[int, int], chunks: int, split_own: bool, by_heads: bool
) -> None:
    """Forward and backward; the last step of a head is marked, and its gradients are written before they are added.
    With a mask for each KV head, each head attends to the keys of its own mask."""
    mask, shards, gather, per_host = problem
    masks = [mask, *(Mask.sliding_window(9 * i) for i in range(1, model_heads[1] if by_heads else 1))]
    where = shards, shards.ring - 1, gather, per_host
    plan = attention_plan(Mask.by_heads(masks), *where, model_heads[0])
    program = plan.program(Heads.of_model(*model_heads), chunks, split_own=split_own)
    of_mask = [AttentionPlan(x, *where) for x in masks]
    seen = [[i for i in range(len(x)) if x.intervals(i, CPU)] for x in of_mask]
    of_head = [seen[head * len(masks) // model_heads[0]] for head in range(model_heads[0])]
    for steps in (program.steps, program.backward_steps):
        computed = [
            (step.index, head) for step in steps if step.attends for head in step.q_heads or range(model_heads[0])
        ]
        assert sorted(computed) == sorted((i, head) for head, keys in enumerate(of_head) for i in keys)
    finished = [h for step in program.steps if step.is_last for h in step.q_heads or range(model_heads[0])]
    assert sorted(finished) == list(range(model_heads[0]))
    written = [h for step in program.backward_steps if step.new_dq for h in step.q_heads or range(model_heads[0])]
    added = [h for step in program.backward_steps if step.index == 0 and not step.new_dq for h in step.q_heads or ()]
    assert sorted(written + added) == list(range(model_heads[0]))


def test_neighbouring_heads_with_equal_masks_have_one_plan() -> None:
    """Whatever part of them a rank holds; a layer of windows and a full head has two groups, not four."""
    window, layout = Mask.sliding_window(3), TokenLayout(32, "zigzag", ring=2)
    plan = attention_plan(Mask.by_heads([window, window, Mask.sliding_window(3), Mask.full()]), layout, 0, heads=16)
    of_model = Heads.of_model(16, 8)
    assert [part.queries for part, _ in plan.groups_of(of_model)] == [range(12), range(12, 16)]
    assert [part.queries for part, _ in plan.groups_of(of_model[range(5, 14)])] == [range(5, 12), range(12, 14)]
    assert [part.queries for part, _ in plan.groups_of(of_model[range(14, 15)])] == [range(14, 15)]
    assert len(plan.program(of_model).steps) == 4 and len(plan.program(of_model[range(3, 9)]).steps) == 2
    alternating = attention_plan(Mask.by_heads([window, Mask.full()] * 2), layout, 0, heads=16)
    assert len(alternating.program(of_model).steps) == 8


def test_a_program_is_printed_step_by_step() -> None:
    plan = AttentionPlan(Mask.causal(), TokenLayout(8, "zigzag", ring=4), 1)
    assert str(plan.program(Heads.of_model(4, 2))) == (
        "0  step 0: own keys; attend to 2 keys; post intra_host of 1, intra_host of 2\n"
        "1  step 1: receive 1 rows of 0 from 0, send 1 rows to 2; attend to 1 keys; post intra_host of 3\n"
        "2  step 2: receive 2 rows of 3 from 3, send 1 rows to 3; attend to 2 keys\n"
        "3  step 3: receive 2 rows of 2 from 2, send 2 rows to 0; attend to 2 keys"
    )


def pairs(parts: Sequence[KeyIntervals]) -> int:
    """Visible (query, key) pairs."""
    return sum(int((intervals.hi.long() - intervals.lo.long()).sum()) for intervals in parts)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("ranks", [2, 8, pytest.param(32, marks=pytest.mark.slow)])
def test_causal_work_is_balanced(layout: str, ranks: int) -> None:
    shards = TokenLayout(ranks * 64, layout, ring=ranks)
    work = [
        sum(pairs(plan.intervals(step, CPU)) for step in range(ranks))
        for plan in (AttentionPlan(Mask.causal(), shards, rank) for rank in range(ranks))
    ]
    assert sum(work) == shards.seq_len * (shards.seq_len + 1) // 2
    # Zigzag's ranks have equal work; striped's differ by at most one pair for each query.
    assert max(work) - min(work) <= (0 if layout == "zigzag" else shards.seq_len)


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12))
def test_each_query_head_is_on_one_rank_with_its_kv_head(kv_heads: int, q_per_kv: int, ranks: int) -> None:
    heads = kv_heads * q_per_kv
    by_rank = Heads.of_model(heads, kv_heads).split(ranks)
    assert [h for rank in by_rank for h in rank.queries] == list(range(heads))
    counts = [len(rank.queries) for rank in by_rank]
    assert max(counts) - min(counts) <= 1
    for rank in by_rank:
        read = [h // q_per_kv for h in rank.queries]
        assert sorted(set(read)) == list(rank.kv)
        # What a kernel computes for equal groups, or the index itself.
        each = len(read) // max(1, len(rank.kv))
        index = kv_index(rank) or [i // max(1, each) for i in range(len(read))]
        assert [rank.kv[i] for i in index] == read


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 12), st.integers(1, 2), st.integers(1, 3))
def test_chunks_of_heads_cover_them_once_in_equal_groups(
    kv_heads: int, q_per_kv: int, ranks: int, ring: int, tensor: int
) -> None:
    heads = Heads.of_model(kv_heads * q_per_kv, kv_heads).split(tensor)[-1]
    sharding = TokenLayout(ranks * ring, "contiguous", ring, ranks)
    subgroup: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    exchange = HeadExchange(Placement(ulysses=subgroup, tokens=sharding), heads, MAX_CHUNKS)
    full, chunks = exchange.full_chunk, exchange.chunks
    for rank in range(ranks):
        assert [h for chunk in chunks for h in chunk.by_rank[rank].queries] == list(full.by_rank[rank].queries)
        sent = [h for chunk in chunks if chunk.has_kv for h in chunk.by_rank[rank].kv]
        assert sent == list(full.by_rank[rank].kv)
        for chunk in chunks:
            assert len(chunks) == 1 or kv_index(chunk.by_rank[rank]) is None  # equal groups
    # In a hybrid K/V are still to be sent around the ring: no chunk may reuse the K/V of another.
    assert ring == 1 or all(chunk.has_kv for chunk in chunks)
    divide = kv_heads % ranks == 0 or (kv_heads * q_per_kv % ranks == 0 and ranks % kv_heads == 0)
    alone = kv_heads * q_per_kv == ranks or (ring > 1 and kv_heads <= ranks)
    assert tensor > 1 or len(chunks) > 1 or not divide or alone


@settings(max_examples=200)
@given(scheduled(4), st.data())  # long enough for every kind of tile
def test_tiles_cover_the_intervals(problem: Scheduled, data: st.DataObject) -> None:
    mask, shards, _, _ = problem
    plan = AttentionPlan(mask, shards, data.draw(st.integers(0, shards.ring - 1)))
    step = data.draw(st.integers(0, len(plan) - 1))
    for intervals in plan.intervals(step, CPU):
        (lo,), (hi,) = intervals.lo, intervals.hi
        keys = len(plan[step].keys or ())
        seen = (torch.arange(keys) >= lo[:, None]) & (torch.arange(keys) < hi[:, None])
        covered = torch.zeros_like(seen, dtype=torch.int64)
        for tile in decompose(lo, hi):
            q, k = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            if tile.kind is TileKind.FULL:
                covered[q, k] += 1
            elif tile.kind is TileKind.CAUSAL:
                assert tile.q1 - tile.q0 == tile.k1 - tile.k0
                covered[q, k] += torch.ones(tile.q1 - tile.q0, tile.k1 - tile.k0).tril().long()
            else:
                assert bool(seen[q, k].any())
                covered[q, k] += seen[q, k]
        assert torch.equal(covered, seen.long())


@pytest.mark.parametrize(("size", "calls"), [(256, 1), (257, 3), (600, 5), (767, 5), (768, 1)])
def test_a_short_causal_square_is_cut(size: int, calls: int) -> None:
    """Where the kernel for the CPU wastes much above the diagonal, and nowhere else."""
    keys = torch.arange(size)
    found = list(decompose(torch.full((size,), 3), 4 + keys))
    covered = torch.zeros(size, size + 3)
    for tile in found:
        ones = torch.ones(tile.q1 - tile.q0, tile.k1 - tile.k0)
        covered[tile.q0 : tile.q1, tile.k0 : tile.k1] += ones.tril() if tile.kind is TileKind.CAUSAL else ones
    assert len(found) == calls
    assert torch.equal(covered[:, 3:], (keys <= keys[:, None]).float()) and not covered[:, :3].any()


def test_a_causal_shard_is_one_causal_tile() -> None:
    """The most common case is one kernel call without a mask tensor."""
    (intervals,) = AttentionPlan(Mask.causal(), TokenLayout(4096, "zigzag", ring=2), 0).intervals(0, CPU)
    (tile,) = decompose(intervals.lo[0], intervals.hi[0])
    assert tile.kind is TileKind.CAUSAL and (tile.q0, tile.q1, tile.k0, tile.k1) == (0, 2048, 0, 2048)
