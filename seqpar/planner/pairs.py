"""The exact number of visible pairs of a query and a key between two ranks, at a cost that does not grow with tokens.

Along a run of the mask both ends of a query's interval are linear in its position. The number of a shard's keys below
such an end is linear too, between the shard's first and last key. Sums of clipped linear functions have a closed form.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..layout import Positions, Stripe, ranges_to_positions
from ..mask import Mask
from ..runs import UNBOUNDED, Runs

Array = NDArray[np.int64]


def visible_pairs(mask: Mask, seq_len: int, queries: Positions, keys: Sequence[Positions]) -> list[int]:
    """For each shard in ``keys``, the number of pairs of a query at ``queries`` and a key of the shard that it sees.

    If the batch rows have masks of their own, this is the mean over the rows, rounded down.

    Args:
        mask: which keys each query sees.
        seq_len: tokens of the full sequence.
        queries: positions of one shard.
        keys: positions of some shards, of the same layout as ``queries``.
    """
    rows = mask.runs(seq_len)
    stripes = [stripe for shard in keys for stripe in shard.stripes]
    counts = np.zeros(len(stripes), dtype=np.int64)
    table = np.array([_as_periodic(s) for s in stripes], dtype=np.int64).reshape(-1, 4)
    for runs in rows:
        for start, step, count in _progressions(queries):
            counts += _pairs(runs, start, step, count, table)
    owners = np.repeat(np.arange(len(keys)), [len(shard.stripes) for shard in keys])
    totals = np.zeros(len(keys), dtype=np.int64)
    np.add.at(totals, owners, counts)
    return [int(x) // len(rows) for x in totals]


def all_pairs(mask: Mask, seq_len: int, queries: Positions) -> int:
    """The number of pairs of a query at ``queries`` and a key that it sees, over all keys."""
    return visible_pairs(mask, seq_len, queries, [ranges_to_positions([(0, seq_len)])])[0]


def computed_pairs(mask: Mask, seq_len: int, queries: Positions, keys: Sequence[Positions], tile: int) -> list[int]:
    """For each of ``keys``: the pairs that a kernel computes, visible or not.

    A kernel computes tiles of ``tile`` queries and as many keys, from the first key that a query of the tile sees to
    the last. The arguments are those of ``visible_pairs``.
    """
    stripes = [stripe for shard in keys for stripe in shard.stripes]
    owners = np.repeat(np.arange(len(keys)), [len(shard.stripes) for shard in keys])
    table = np.array([_as_periodic(s) for s in stripes], dtype=np.int64).reshape(-1, 4)
    first = np.arange(0, len(queries), tile)
    last = np.minimum(first + tile, len(queries)) - 1
    positions = [_positions_at(queries, index) for index in (first, last)]
    totals = np.zeros(len(keys), dtype=np.int64)
    rows = mask.runs(seq_len)
    for runs in rows:
        ends = []  # the first and one past the last of each shard's keys, by tile: [tiles, shards]
        for x, start, slope in ((positions[0], runs.lo, runs.lo_step), (positions[1], runs.hi, runs.hi_step)):
            run = np.searchsorted(runs.start, x, side="right") - 1
            at = start[run] + slope[run] * (x - runs.start[run])
            by_shard = np.zeros((len(x), len(keys)), dtype=np.int64)
            begin, held, block, stride = table.T
            offset = at[:, None] - begin
            below = np.clip(offset // stride * block + np.minimum(offset % stride, block), 0, held)
            np.add.at(by_shard.T, owners, below.T)
            ends.append(by_shard)
        lo, hi = ends[0] // tile, -(-ends[1] // tile)
        seen = np.where(ends[1] > ends[0], hi - lo, 0).sum(0)
        totals += seen * tile * tile
    return [int(x) // len(rows) for x in totals]


def _positions_at(positions: Positions, index: Array) -> Array:
    """The positions at increasing indices."""
    found = np.empty_like(index)
    for stripe, offset in positions.with_offsets():
        inside = (index >= offset) & (index < offset + stripe.count)
        i = index[inside] - offset
        found[inside] = stripe.start + i // stripe.block * stripe.stride + i % stripe.block
    return found


def _as_periodic(stripe: Stripe) -> tuple[int, int, int, int]:
    """``start, count, block, stride``; a range of consecutive positions has block and stride 1."""
    if stripe.block >= stripe.count or stripe.block == stripe.stride:
        return stripe.start, stripe.count, 1, 1
    return stripe.start, stripe.count, stripe.block, stripe.stride


def _progressions(queries: Positions) -> list[tuple[int, int, int]]:
    """The positions as ``(first, step, count)``."""
    found = []
    for stripe in queries.stripes:
        start, count, block, stride = _as_periodic(stripe)
        found += [(start + i, stride, (count - i + block - 1) // block) for i in range(min(block, count))]
    return found


def _pairs(runs: Runs, first: int, step: int, count: int, keys: Array) -> Array:
    """By key stripe, the pairs with the queries ``first, first + step, ...``."""
    # The queries i0 <= i < i1 of each run.
    cuts = np.clip(-((first - runs.start) // step), 0, count)
    i0, i1 = cuts, np.append(cuts[1:], count)
    i0[0] = 0
    kept = i1 > i0
    i0, i1 = i0[kept, None], i1[kept, None]  # [runs, 1]
    totals = []
    for end, slope in ((runs.hi, runs.hi_step), (runs.lo, runs.lo_step)):
        # A line through the run as a + b * i.
        a = (np.minimum(end, UNBOUNDED) + slope * (first - runs.start))[kept, None]
        b = (slope * step)[kept, None]
        start, held, block, stride = keys.T  # [stripes]
        below = (a - start) // stride * block + np.minimum((a - start) % stride, block)  # at i = 0, not clipped
        rise = np.where(b > 0, b // stride * block, 0)
        totals.append(_sum_of_clipped(below, rise, i0, i1, held))
    result: Array = (totals[0] - totals[1]).sum(0)
    return result


def _sum_of_clipped(a: Array, slope: Array, i0: Array, i1: Array, top: Array) -> Array:
    """The sum of ``a + slope * i``, clipped to ``0 ... top``, over ``i0 <= i < i1``."""
    level = (i1 - i0) * np.clip(a, 0, top)
    rising = np.maximum(slope, 1)
    begin = np.clip(-(a // rising), i0, i1)  # the first i at which the line reaches 0
    end = np.clip(-((a - top) // rising), begin, i1)  # and at which it reaches the top
    count = end - begin
    ramp = np.where(count > 0, count * np.where(count > 0, a, 0) + slope * ((begin + end - 1) * count // 2), 0)
    result: Array = np.where(slope > 0, ramp + (i1 - end) * top, level)
    return result
