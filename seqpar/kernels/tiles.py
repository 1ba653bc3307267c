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

import torch
from torch import Tensor

from ..schedule.rows import KeyIntervals

# A run of fewer queries is cheaper as part of a masked tile than as tiles of its own, unless it is the only one.
_SHORT_RUN = 64
_MIN_BLOCK, _MAX_BLOCK = 64, 512  # queries in a masked tile
# A causal square of 256 to 768 queries is divided into smaller squares and rectangles. PyTorch's kernel for the CPU
# spends up to a quarter of its time above the diagonal of such a square (measured in benchmarks/LOG.md).
_CAUSAL_BLOCK, _CAUSAL_WHOLE = 256, 768


class Kind(Enum):
    """What the queries of a tile see of its keys."""

    FULL = "full"  # every query sees every key
    CAUSAL = "causal"  # square; query t of the tile sees its keys 0 to t
    MASKED = "masked"  # query t sees the keys lo[t] to hi[t] - 1


@dataclass(frozen=True)
class Tile:
    """The queries ``q0:q1`` and the keys ``k0:k1``.

    The tiles of one decomposition do not overlap, cover every visible (query, key) pair and leave out the queries that
    see no key.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Kind


def tiles(intervals: KeyIntervals, row: int) -> tuple[Tile, ...]:
    """The decomposition of one batch row's intervals. Cached in ``intervals``."""
    if row not in intervals.tiles:
        intervals.tiles[row] = tuple(decompose(intervals.lo[row], intervals.hi[row]))
    found: tuple[Tile, ...] = intervals.tiles[row]
    return found


def decompose(lo: Tensor, hi: Tensor) -> Iterator[Tile]:
    """Divide the intervals ``lo, hi``, int64 ``[q_len]``, into tiles.

    A run along which both ends are constant is one full rectangle. A run along which ``lo`` is constant and ``hi``
    grows by one key per query is a full rectangle beside a causal square. Other runs, and runs too short for tiles of
    their own, are cut into masked blocks, each as wide as its queries need.
    """
    if not len(lo):
        return
    first_lo, first_hi = lo.tolist(), hi.tolist()
    pending: int | None = None  # first query of the runs that wait for a masked block
    for start, stop, kind in runs(lo, hi):
        empty = first_lo[start] == first_hi[start]
        short = stop - start < _SHORT_RUN and stop - start < len(lo)
        plain = not empty and not short and kind in (STILL, HI_MOVES)
        if (plain or empty) and pending is not None:
            yield from _masked(first_lo, first_hi, pending, start)
            pending = None
        if plain:
            yield from _plain(first_lo[start], first_hi[start], start, stop, kind)
        elif not empty and pending is None:
            pending = start
    if pending is not None:
        yield from _masked(first_lo, first_hi, pending, len(lo))


STILL, HI_MOVES, BOTH_MOVE, LO_MOVES, _OTHER = range(5)


def runs(lo: Tensor, hi: Tensor) -> Iterator[tuple[int, int, int]]:
    """Maximal runs as ``(start, stop, step)``, where ``step`` is how ``lo`` and ``hi`` change along the run.

    A run of one query has the step ``STILL``.
    """
    dlo, dhi, seen = lo.diff(), hi.diff(), lo < hi
    # steps[t] is the step from query t to query t + 1.
    steps = torch.full_like(dlo, _OTHER)
    steps[(dlo == 0) & (dhi == 0)] = STILL
    steps[(dlo == 0) & (dhi == 1)] = HI_MOVES
    steps[(dlo == 1) & (dhi == 1)] = BOTH_MOVE
    steps[(dlo == 1) & (dhi == 0)] = LO_MOVES
    steps[~seen[1:] & ~seen[:-1]] = STILL
    steps[seen[1:] != seen[:-1]] = _OTHER
    start, kind, row = 0, STILL, 1
    for step, count in zip(*(x.tolist() for x in steps.unique_consecutive(return_counts=True)), strict=True):
        if step == _OTHER:  # each of these queries is a run of its own, unless the next step continues it
            for first in range(row, row + count):
                yield start, first, kind
                start, kind = first, STILL
        elif start == row - 1:  # the current run has one query: this step continues it
            kind = step
        else:
            yield start, row, kind
            start, kind = row, step if count > 1 else STILL
        row += count
    yield start, len(lo), kind


def _plain(lo: int, hi: int, start: int, stop: int, kind: int) -> Iterator[Tile]:
    """The tiles of a ``STILL`` or ``HI_MOVES`` run whose first query sees the keys ``lo:hi``."""
    if kind == STILL:
        yield Tile(start, stop, lo, hi, Kind.FULL)
        return
    k0, size = hi - 1, stop - start
    if k0 > lo:
        yield Tile(start, stop, lo, k0, Kind.FULL)
    block = _CAUSAL_BLOCK if size < _CAUSAL_WHOLE else size
    for first in range(0, size, block):
        end = min(first + block, size)
        if first:
            yield Tile(start + first, start + end, k0, k0 + first, Kind.FULL)
        yield Tile(start + first, start + end, k0 + first, k0 + end, Kind.CAUSAL)


def _masked(lo: list[int], hi: list[int], start: int, stop: int) -> Iterator[Tile]:
    """Blocks of queries over all keys that any of them sees. The blocks are larger if the queries see more keys."""
    while start < stop:
        width = hi[start] - lo[start]
        end = min(start + max(_MIN_BLOCK, min(_MAX_BLOCK, width // 4)), stop)
        if lo[start] < hi[end - 1]:
            yield Tile(start, end, lo[start], hi[end - 1], Kind.MASKED)
        start = end
