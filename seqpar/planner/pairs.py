"""The pairs of a query and a key: those that a mask lets see each other, and those that a kernel's tiles compute.

Along a run of the mask (see ``masks/runs.py``) both ends of a query's interval are linear in the query's position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..masks.mask import Mask
from ..masks.runs import keys_below_line
from ..placement.layout import Positions, Stripe

Array = NDArray[np.int64]


def visible_pairs(mask: Mask, seq_len: int) -> int:
    """The number of visible pairs of a query and a key in a sequence, at a cost that does not grow with its tokens.

    If batch rows or groups of heads have different masks, this is the mean over them, rounded down.
    """
    rows, total = mask.runs(seq_len), 0
    for runs in rows:
        count = np.diff(np.append(np.minimum(runs.start, seq_len), seq_len))
        for sign, end, slope in ((1, runs.hi, runs.hi_step), (-1, runs.lo, runs.lo_step)):
            total += sign * int(keys_below_line(end, slope, count, seq_len).sum())
    return total // _masks(mask)


def heaviest_first(mask: Mask, seq_len: int) -> Mask:
    """``mask`` with its groups of heads rotated: the first ranks, of which one is simulated, have the most work."""
    groups = mask.head_groups
    pairs = [visible_pairs(group, seq_len) for group in groups]
    at = pairs.index(max(pairs)) if groups else 0
    return Mask.by_heads([*groups[at:], *groups[:at]]) if at else mask


def computed_pairs(mask: Mask, seq_len: int, queries: Positions, keys: Sequence[Positions], tile: int) -> list[int]:
    """For each shard of keys, the number of pairs that a kernel computes for the queries of one shard.

    A kernel computes whole tiles of ``tile`` queries and ``tile`` keys, from the first key that a query of the tile
    sees to the last. So it computes some pairs that are not visible. With tiles of 1 these are the visible pairs. If
    batch rows or groups of heads have different masks, this is the mean over them, rounded down.

    Args:
        mask: which keys each query sees.
        seq_len: tokens of the full sequence.
        queries: the positions of the queries, of one shard.
        keys: the positions of the keys, of one or more shards of the same layout.
        tile: queries and keys of a tile.
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
    return [int(x) // _masks(mask) for x in totals]


def _masks(mask: Mask) -> int:
    """How many masks ``mask.runs`` has the intervals of: of each batch row and group of heads."""
    return mask.batch * max(1, len(mask.head_groups))


def _stripes(shards: Sequence[Positions]) -> Array:
    """``start, count, block, stride`` of the stripes of all shards, one shard after another: int64 ``[stripes, 4]``."""
    return np.array([_as_periodic(s) for shard in shards for s in shard.stripes], dtype=np.int64).reshape(-1, 4)


def _shard_of_stripes(shards: Sequence[Positions]) -> Array:
    return np.repeat(np.arange(len(shards)), [len(shard.stripes) for shard in shards])


def _positions_at(positions: Positions, index: Array) -> Array:
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
