"""The exact number of visible pairs of a query and a key between two shards, at a cost that does not grow with tokens.

Along a run of the mask (see ``runs.py``) both ends of a query's interval are linear in the query's position. The number
of a shard's keys below such an end is linear as well, between the shard's first and last key. So the number of visible
pairs is a sum of linear functions that are clipped at both ends, which has a closed form.

A stripe of positions is described by four numbers: ``start``, ``count``, ``block`` and ``stride``. It has ``count``
positions in blocks of ``block`` consecutive ones, and a block begins every ``stride`` positions.
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
    """For each shard of keys, the number of visible pairs with the queries of one shard.

    If the batch rows have different masks, this is the mean over the rows, rounded down.

    Args:
        mask: which keys each query sees.
        seq_len: tokens of the full sequence.
        queries: the positions of the queries, of one shard.
        keys: the positions of the keys, of one or more shards of the same layout.
    """
    rows = mask.runs(seq_len)
    stripes = _stripes(keys)
    counts = np.zeros(len(stripes), dtype=np.int64)
    for runs in rows:
        for start, step, count in _progressions(queries):
            counts += _pairs(runs, start, step, count, stripes)
    totals = np.zeros(len(keys), dtype=np.int64)
    np.add.at(totals, _shard_of_stripes(keys), counts)
    return [int(x) // len(rows) for x in totals]


def all_pairs(mask: Mask, seq_len: int, queries: Positions) -> int:
    """The number of visible pairs of a query at ``queries`` with any key of the sequence."""
    return visible_pairs(mask, seq_len, queries, [ranges_to_positions([(0, seq_len)])])[0]


def computed_pairs(mask: Mask, seq_len: int, queries: Positions, keys: Sequence[Positions], tile: int) -> list[int]:
    """For each shard of keys, the number of pairs that a kernel computes for the queries of one shard.

    A kernel computes whole tiles of ``tile`` queries and ``tile`` keys, from the first key that a query of the tile
    sees to the last. So it computes some pairs that are not visible. The other arguments are those of
    ``visible_pairs``.
    """
    begin, held, block, stride = _stripes(keys).T
    owners = _shard_of_stripes(keys)
    first = np.arange(0, len(queries), tile)
    last = np.minimum(first + tile, len(queries)) - 1
    positions = [_positions_at(queries, index) for index in (first, last)]
    totals = np.zeros(len(keys), dtype=np.int64)
    rows = mask.runs(seq_len)
    for runs in rows:
        ends = []  # the first and one past the last key of each query tile, as indices into each shard: [tiles, shards]
        for x, line, slope in ((positions[0], runs.lo, runs.lo_step), (positions[1], runs.hi, runs.hi_step)):
            run = np.searchsorted(runs.start, x, side="right") - 1
            end = line[run] + slope[run] * (x - runs.start[run])  # [tiles]
            offset = end[:, None] - begin  # [tiles, stripes]
            below = np.clip(offset // stride * block + np.minimum(offset % stride, block), 0, held)
            by_shard = np.zeros((len(x), len(keys)), dtype=np.int64)
            np.add.at(by_shard.T, owners, below.T)
            ends.append(by_shard)
        first_tile, last_tile = ends[0] // tile, -(-ends[1] // tile)  # of the keys
        key_tiles = np.where(ends[1] > ends[0], last_tile - first_tile, 0).sum(0)  # [shards]
        totals += key_tiles * tile * tile
    return [int(x) // len(rows) for x in totals]


def _stripes(shards: Sequence[Positions]) -> Array:
    """``start, count, block, stride`` of the stripes of all shards, one shard after another: int64 ``[stripes, 4]``."""
    return np.array([_as_periodic(s) for shard in shards for s in shard.stripes], dtype=np.int64).reshape(-1, 4)


def _shard_of_stripes(shards: Sequence[Positions]) -> Array:
    """The index of each stripe's shard, in the order of ``_stripes``: int64 ``[stripes]``."""
    return np.repeat(np.arange(len(shards)), [len(shard.stripes) for shard in shards])


def _positions_at(positions: Positions, index: Array) -> Array:
    """The positions at ``index``, which is increasing."""
    found = np.empty_like(index)
    for stripe, offset in positions.with_offsets():
        inside = (index >= offset) & (index < offset + stripe.count)
        i = index[inside] - offset
        found[inside] = stripe.start + i // stripe.block * stripe.stride + i % stripe.block
    return found


def _as_periodic(stripe: Stripe) -> tuple[int, int, int, int]:
    """``start, count, block, stride`` of a stripe. A stripe of consecutive positions has ``block = stride = 1``."""
    if stripe.block >= stripe.count or stripe.block == stripe.stride:
        return stripe.start, stripe.count, 1, 1
    return stripe.start, stripe.count, stripe.block, stripe.stride


def _progressions(queries: Positions) -> list[tuple[int, int, int]]:
    """The positions as arithmetic progressions ``(first, step, count)``."""
    found = []
    for stripe in queries.stripes:
        start, count, block, stride = _as_periodic(stripe)
        found += [(start + i, stride, (count - i + block - 1) // block) for i in range(min(block, count))]
    return found


def _pairs(runs: Runs, first: int, step: int, count: int, stripes: Array) -> Array:
    """For each stripe of keys, the number of visible pairs with the queries at ``first + step * i``.

    Args:
        runs: the mask of one batch row.
        first, step, count: the queries are those with ``0 <= i < count``.
        stripes: int64 ``[stripes, 4]``, see ``_stripes``.

    Returns:
        int64 ``[stripes]``.
    """
    # Each run contains the queries with i0 <= i < i1.
    cuts = np.clip(-((first - runs.start) // step), 0, count)
    i0, i1 = cuts, np.append(cuts[1:], count)
    i0[0] = 0
    kept = i1 > i0
    i0, i1 = i0[kept, None], i1[kept, None]  # [runs, 1]
    totals = []
    for end, slope in ((runs.hi, runs.hi_step), (runs.lo, runs.lo_step)):
        # The end of the intervals along a run is at position a + b * i.
        a = (np.minimum(end, UNBOUNDED) + slope * (first - runs.start))[kept, None]
        b = (slope * step)[kept, None]
        start, held, block, stride = stripes.T
        # The number of a stripe's keys below that end is below + rise * i, clipped to 0 ... held.
        below = (a - start) // stride * block + np.minimum((a - start) % stride, block)
        rise = np.where(b > 0, b // stride * block, 0)
        totals.append(_sum_of_clipped(below, rise, i0, i1, held))
    result: Array = (totals[0] - totals[1]).sum(0)
    return result


def _sum_of_clipped(a: Array, slope: Array, i0: Array, i1: Array, top: Array) -> Array:
    """The sum of ``a + slope * i``, clipped to ``0 ... top``, over ``i0 <= i < i1``. ``slope`` is not negative."""
    level = (i1 - i0) * np.clip(a, 0, top)
    rising = np.maximum(slope, 1)
    begin = np.clip(-(a // rising), i0, i1)  # the first i at which the line reaches 0
    end = np.clip(-((a - top) // rising), begin, i1)  # the first i at which the line reaches the top
    count = end - begin
    ramp = np.where(count > 0, count * np.where(count > 0, a, 0) + slope * ((begin + end - 1) * count // 2), 0)
    result: Array = np.where(slope > 0, ramp + (i1 - end) * top, level)
    return result
