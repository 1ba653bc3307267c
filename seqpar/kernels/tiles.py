"""Divide key intervals into tiles that a dense attention kernel can compute: full, causal, or masked.

    keys ->        a document mask, causal: x is what a query sees
    x                       causal square (rows 0 to 3)
    xx
    xxx
    xxxx
        xxxxxxx             full rectangle (columns 4 to 7), beside a causal square (columns 8 to 10)
        xxxxxxx...

A run is a range of consecutive queries along which ``lo`` and ``hi`` change by the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..schedule.rows import KeyIntervals

IntArray = NDArray[np.integer[Any]]

# A run of fewer queries is cheaper as part of a masked tile than as tiles of its own, unless it is the only one.
_SHORT_RUN = 64
_MIN_BLOCK, _MAX_BLOCK = 64, 512  # queries in a masked tile
# A causal square of 256 to 768 queries is divided into smaller squares and rectangles. PyTorch's kernel for the CPU
# spends up to a quarter of its time above the diagonal of such a square (measured in benchmarks/LOG.md).
_CAUSAL_BLOCK, _CAUSAL_WHOLE = 256, 768


class TileKind(Enum):
    """What the queries of a tile see of its keys."""

    FULL = "full"  # every query sees every key
    CAUSAL = "causal"  # square; query t of the tile sees its keys 0 to t
    MASKED = "masked"  # query t sees the keys lo[t] to hi[t] - 1; some queries may see none


@dataclass(frozen=True)
class Tile:
    """The queries ``q0:q1`` and the keys ``k0:k1``.

    The tiles of one decomposition do not overlap and cover every visible (query, key) pair. Queries that see no key are
    left out, unless they are a few between queries of a masked tile.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: TileKind


def tiles(intervals: KeyIntervals, row: int) -> tuple[Tile, ...]:
    """The decomposition of one batch row's intervals. Cached in ``intervals``."""
    if row not in intervals.tiles:
        intervals.tiles[row] = tuple(decompose(intervals.lo[row], intervals.hi[row]))
    found: tuple[Tile, ...] = intervals.tiles[row]
    return found


def decompose(lo: Tensor, hi: Tensor) -> Iterator[Tile]:
    """Divide the intervals ``lo, hi``, integers ``[q_len]`` on the host, into tiles.

    A run along which both ends are constant is one full rectangle. A run along which ``lo`` is constant and ``hi``
    grows by one key per query is a full rectangle beside a causal square. Other runs, and runs too short for tiles of
    their own, are cut into masked blocks, each as wide as its queries need.
    """
    if not len(lo):
        return
    los, his = lo.numpy(), hi.numpy()
    if los[0] == los[-1] and his[0] == his[-1]:  # neither decreases: all queries see the same keys
        if los[0] < his[0]:
            yield Tile(0, len(los), int(los[0]), int(his[0]), TileKind.FULL)
        return
    start, stop, kind = runs(los, his)
    empty = los[start] == his[start]
    short = (stop - start < _SHORT_RUN) & (stop - start < len(lo))
    plain = ~empty & ~short & ((kind == STILL) | (kind == HI_MOVES))
    blocks = ~plain & (~empty | short)  # neighbours among these runs share their masked blocks
    first = blocks & ~np.append(False, blocks[:-1])
    ends = stop[blocks & ~np.append(blocks[1:], False)].tolist()  # of each group of neighbours
    groups = iter(ends)
    for i in np.flatnonzero(plain | first).tolist():
        if plain[i]:
            yield from _plain(int(los[start[i]]), int(his[start[i]]), int(start[i]), int(stop[i]), int(kind[i]))
        else:
            yield from _masked(los, his, int(start[i]), next(groups))


STILL, HI_MOVES, BOTH_MOVE, LO_MOVES, _OTHER = range(5)


def runs(lo: IntArray, hi: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Maximal runs as arrays ``(start, stop, kind)``, int64 ``[runs]``. ``kind`` is how ``lo`` and ``hi`` change.

    A run of one query has the kind ``STILL``. ``lo`` and ``hi`` are ``[q_len]``, with at least one query.
    """
    dlo, dhi, seen = np.diff(lo), np.diff(hi), lo < hi
    # steps[t] is the step from query t to query t + 1: for (dlo, dhi) = (0, 0), (0, 1), (1, 0) and (1, 1).
    by_change = np.array([STILL, HI_MOVES, LO_MOVES, BOTH_MOVE])
    steps = np.where((dlo | dhi) & ~1 == 0, by_change[(dlo & 1) * 2 + (dhi & 1)], _OTHER)
    steps[~seen[1:] & ~seen[:-1]] = STILL
    steps[seen[1:] != seen[:-1]] = _OTHER
    # Groups of equal steps. A run takes a whole group and the query after it. The next run starts at the query after
    # that, unless the run has a single query: then it takes the next group. So of several groups of one step each,
    # every other one begins a run.
    first = np.flatnonzero(np.append(True, steps[1:] != steps[:-1])) if len(steps) else np.empty(0, np.int64)
    kinds, index = steps[first], np.arange(len(first))
    known = (kinds == _OTHER) | (np.diff(first, append=len(steps)) > 1)  # whether the next group continues a run
    last = np.maximum.accumulate(np.where(known, index, -1))
    after = np.where(last >= 0, kinds[last] == _OTHER, True) ^ ((index - last) % 2 == 1)
    continues = np.append(True, after[:-1])[: len(first)]
    begins = steps == _OTHER
    begins[first[~continues]] = True
    start = np.append(0, np.flatnonzero(begins) + 1)
    stop = np.append(start[1:], len(lo))
    kind = np.where(stop - start > 1, np.append(steps, STILL)[start], STILL)
    return start, stop, kind


def _plain(lo: int, hi: int, start: int, stop: int, kind: int) -> Iterator[Tile]:
    """The tiles of a ``STILL`` or ``HI_MOVES`` run whose first query sees the keys ``lo:hi``."""
    if kind == STILL:
        yield Tile(start, stop, lo, hi, TileKind.FULL)
        return
    k0, size = hi - 1, stop - start
    if k0 > lo:
        yield Tile(start, stop, lo, k0, TileKind.FULL)
    block = _CAUSAL_BLOCK if size < _CAUSAL_WHOLE else size
    for first in range(0, size, block):
        end = min(first + block, size)
        if first:
            yield Tile(start + first, start + end, k0, k0 + first, TileKind.FULL)
        yield Tile(start + first, start + end, k0 + first, k0 + end, TileKind.CAUSAL)


def _masked(lo: IntArray, hi: IntArray, start: int, stop: int) -> Iterator[Tile]:
    """Blocks of queries over all keys that any of them sees. The blocks are larger if the queries see more keys."""
    while start < stop:
        k0 = int(lo[start])
        end = min(start + max(_MIN_BLOCK, min(_MAX_BLOCK, (int(hi[start]) - k0) // 4)), stop)
        if (lo[start:end] < hi[start:end]).any():
            yield Tile(start, end, k0, int(hi[end - 1]), TileKind.MASKED)
        start = end
