"""Key intervals as bands and as calls of a kernel, compared with the intervals for each pair of query and key."""

from __future__ import annotations

import random
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from seqpar.kernels.bands import Abilities, KernelCall, cut
from seqpar.kernels.block_lists import block_lists, longest_lists, too_long
from seqpar.placement.layout import CPU, LAYOUTS, TokenLayout
from seqpar.schedule.plan import attention_plan
from seqpar.schedule.rows import KeyIntervals

from ..problems import BATCH_RULES, RULES
from ..reference import Rule, combined_mask, fitted
from ..standins import band_mask

LONG = (
    (Rule("sliding_window", (20, 0)),),
    (Rule("documents", ((0, 70, 71, 200, 300), True)),),
    (Rule("documents", ((0, 70, 71, 200, 300), True)), Rule("sliding_window", (15, 0))),
    (Rule("documents", ((0, 10, 20, 30, 40, 300), True)), Rule("sliding_window", (15, 0))),
)


def seen_by(intervals: KeyIntervals, k_len: int) -> Tensor:
    """Which queries see which keys, bool ``[b, q, k]``."""
    keys = torch.arange(k_len)
    return (keys >= intervals.lo[..., None]) & (keys < intervals.hi[..., None])


def covered(calls: list[KernelCall], batch: int, q_len: int, k_len: int) -> Tensor:
    """How many calls compute each pair of a query and a key, int ``[b, q, k]``."""
    times = torch.zeros(batch, q_len, k_len, dtype=torch.int64)
    flat = torch.zeros(batch * q_len, batch * k_len, dtype=torch.int64)
    for call in calls:
        if call.ends is None:
            seen = band_mask(call.q1 - call.q0, call.k1 - call.k0, call.left, call.right).long()
            if call.every_row:
                times[:, call.queries, call.keys] += seen
            else:
                flat[call.queries, call.keys] += seen
            continue
        q_ends, k_ends = ((0, *ends) for ends in call.ends)
        assert (q_ends[-1], k_ends[-1]) == (call.q1 - call.q0, call.k1 - call.k0)
        for i in range(len(q_ends) - 1):
            q_at = slice(call.q0 + q_ends[i], call.q0 + q_ends[i + 1])
            k_at = slice(call.k0 + k_ends[i], call.k0 + k_ends[i + 1])
            flat[q_at, k_at] += band_mask(q_at.stop - q_at.start, k_at.stop - k_at.start, call.left, call.right).long()
    for row in range(batch):
        times[row] += flat[row * q_len : (row + 1) * q_len, row * k_len : (row + 1) * k_len]
    assert flat.sum() == sum(
        flat[r * q_len : (r + 1) * q_len, r * k_len : (r + 1) * k_len].sum() for r in range(batch)
    ), "a call reaches into another batch row"
    return times


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_calls_compute_each_visible_pair_once(layout: str, ranks: int) -> None:
    cases = [(rules, 50) for rules in (*RULES, *BATCH_RULES)] + [(rules, 300) for rules in LONG]
    abilities = [
        Abilities(gaps=True),
        Abilities(),
        Abilities(packs=False),
        Abilities(windows=False, packs=False, fewest=2),
    ]
    cuts = 0
    for rules, seq_len in cases:
        mask = combined_mask(fitted(rules, seq_len))
        for rank in range(ranks):
            plan = attention_plan(mask, TokenLayout(seq_len, layout, ring=ranks), rank)
            for i, step in enumerate(plan):
                batches = {mask.batch, 2} if mask.batch == 1 else {mask.batch}
                for intervals, batch in product(plan.intervals(i, CPU), batches):
                    k_len, q_len = len(step.keys or ()), intervals.lo.shape[1]
                    expected = seen_by(intervals, k_len).expand(batch, -1, -1)
                    for can in abilities:
                        calls = cut(intervals, batch, q_len, k_len, can, most=10**6)
                        if calls is None:
                            assert not can.windows
                            continue
                        cuts += 1
                        assert torch.equal(covered(calls, batch, q_len, k_len), expected.long()), (str(rules), can)
                        if not can.packs:
                            assert all(call.ends is None for call in calls)
                        elif not can.gaps:
                            assert not any(call.has_gaps for call in calls)
    assert cuts > 100


def intervals_of(lo: list[int], hi: list[int]) -> KeyIntervals:
    first, last = (torch.tensor([x], dtype=torch.int32) for x in (lo, hi))
    return KeyIntervals(first, last, first, first)


def test_any_increasing_intervals() -> None:
    """Random intervals, most of them of no mask that the package has."""
    chance = random.Random(0)
    for _ in range(300):
        q_len, k_len = chance.randint(1, 30), chance.randint(1, 30)
        lo = sorted(chance.randint(0, k_len) for _ in range(q_len))
        hi = sorted(chance.randint(0, k_len) for _ in range(q_len))
        hi = [max(a, b) for a, b in zip(lo, hi, strict=True)]
        intervals = intervals_of(lo, hi)
        for gaps in (False, True):
            calls = cut(intervals, 1, q_len, k_len, Abilities(gaps=gaps), most=10**6)
            assert calls is not None
            assert torch.equal(covered(calls, 1, q_len, k_len), seen_by(intervals, k_len).long())


def calls_of(
    rules: tuple[Rule, ...], seq_len: int, layout: str = "contiguous", ranks: int = 1
) -> list[list[KernelCall]]:
    """By rank and step, without the steps that have no keys."""
    found = []
    for rank in range(ranks):
        plan = attention_plan(combined_mask(rules), TokenLayout(seq_len, layout, ring=ranks), rank)
        for i, step in enumerate(plan):
            if step.keys is not None:
                (intervals,) = plan.intervals(i, CPU)
                calls = cut(intervals, 1, intervals.lo.shape[1], len(step.keys), Abilities(gaps=True), 10**6)
                assert calls is not None
                found.append(calls)
    return found


def test_common_masks_are_one_call_or_two() -> None:
    causal, window = (Rule("causal"),), (Rule("sliding_window", (63, 0)),)
    assert calls_of(causal, 256) == [[KernelCall(0, 256, 0, 256, -1, 0)]]
    assert calls_of((Rule("full"),), 256) == [[KernelCall(0, 256, 0, 256, -1, -1)]]
    assert calls_of(window, 256) == [[KernelCall(0, 256, 0, 256, 63, 0)]]
    assert all(len(calls) <= 2 for calls in calls_of(causal, 256, "zigzag", 4))
    assert all(len(calls) == 1 for calls in calls_of(causal, 256, "contiguous", 4))
    assert all(len(calls) <= 2 for calls in calls_of(causal, 256, "striped", 4))


def test_packed_documents_are_one_call() -> None:
    boundaries = tuple(range(0, 2049, 64))
    documents = (Rule("documents", (boundaries, True)),)
    ((call,),) = calls_of(documents, 2048)
    assert call.ends == (boundaries[1:], boundaries[1:]) and (call.left, call.right) == (-1, 0)
    ((windowed,),) = calls_of((*documents, Rule("sliding_window", (20, 0))), 2048)
    assert windowed.ends == call.ends and (windowed.left, windowed.right) == (20, 0)
    # A window that is wider than some documents and narrower than others.
    uneven = (Rule("documents", ((0, 10, 20, 100), True)), Rule("sliding_window", (20, 0)))
    ((both,),) = calls_of(uneven, 100)
    assert both.ends is not None and (both.left, both.right) == (20, 0)
    # Under a striped layout documents leave gaps between what a rank's queries see of another rank's keys.
    assert all(len(calls) == 1 for calls in calls_of(documents, 2048, "striped", 4))
    assert all(len(calls) <= 2 for calls in calls_of(documents, 2048, "contiguous", 4))


def test_a_mask_without_lines_is_not_cut() -> None:
    lo = list(range(0, 40000, 2))
    assert cut(intervals_of(lo, [x + 5 for x in lo]), 1, len(lo), 40005, Abilities(gaps=True), most=8) is None


def random_parts(q_len: int, k_len: int, parts: int, rows: int, made: torch.Generator) -> tuple[Tensor, Tensor]:
    """``lo`` and ``hi`` of disjoint intervals, some of them empty, int32 ``[parts, rows, q_len]``."""
    ends = torch.randint(0, k_len + 1, (2 * parts, rows, q_len), generator=made, dtype=torch.int32)
    ends = ends.sort(-1).values.sort(0).values  # no end decreases, and no interval begins before the one before it ends
    return ends[::2], ends[1::2]


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("by_keys", [False, True])
def test_block_lists(by_keys: bool, parts: int) -> None:
    chance, made = random.Random(1), torch.Generator().manual_seed(parts)
    without_mask = 0
    for number in range(60):
        q_len, k_len = chance.randint(1, 40), chance.randint(1, 40 * parts)
        lo, hi = random_parts(q_len, k_len, parts, 2, made)
        if number % 2:  # all queries see the same keys, so that there are blocks without a mask
            lo, hi = (x[..., :1].expand_as(x).contiguous() for x in (lo, hi))
        seen = torch.stack([seen_by(KeyIntervals(a, b, a, b), k_len) for a, b in zip(lo, hi, strict=True)]).any(0)
        q, k = (torch.empty(2, n, 1, 8, device="meta") for n in (q_len, k_len))
        union = KeyIntervals(lo, hi, lo, lo) if parts > 1 else KeyIntervals(lo[0], hi[0], lo, lo)
        with (
            mock.patch("seqpar.kernels.block_lists._q_block", return_value=8),
            mock.patch("seqpar.kernels.block_lists._K_BLOCK", 4),
        ):
            longest = longest_lists(union, q, k, by_keys)
        lists = block_lists(union.lo, union.hi, k_len, 8, 4, longest, by_keys=by_keys)
        assert (lists.masked.shape[-1], lists.full.shape[-1]) == longest
        without_mask += int(lists.full_count.sum())
        for b in range(2):
            for q0 in range(0, q_len, 8):
                for k0 in range(0, k_len, 4):
                    block = seen[b, q0 : q0 + 8, k0 : k0 + 4]
                    outer, inner = (k0 // 4, q0 // 8) if by_keys else (q0 // 8, k0 // 4)
                    with_mask = lists.masked[b, 0, outer, : lists.masked_count[b, 0, outer]].tolist()
                    without = lists.full[b, 0, outer, : lists.full_count[b, 0, outer]].tolist()
                    assert len(set(with_mask + without)) == len(with_mask + without)
                    assert with_mask == sorted(with_mask) and without == sorted(without)
                    if inner in without:
                        assert block.all() and k0 + 4 <= k_len
                    elif block.any():
                        assert inner in with_mask
    assert without_mask > 10


def test_block_lists_grow_with_the_tokens() -> None:
    """The lists of a window are as long for 32k tokens as for 128k. The lists of a causal mask are cut off."""
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        for by_keys in (False, True):
            lengths = []
            for tokens in (1 << 15, 1 << 17):
                q = torch.empty(1, tokens, 1, 8, device="meta")
                end = torch.arange(1, tokens + 1).int()[None]
                window = KeyIntervals((end - 1024).clamp(min=0), end, end[0], end[0])
                lengths.append(longest_lists(window, q, q, by_keys))
                assert not too_long(window, q, q)
            assert lengths[0] == lengths[1] and sum(lengths[0]) <= 1024 // 128 + 2
        tokens = 1 << 19
        q, end = torch.empty(1, tokens, 1, 8, device="meta"), torch.arange(1, tokens + 1).int()[None]
        assert too_long(KeyIntervals(torch.zeros_like(end), end, end[0], end[0]), q, q)
