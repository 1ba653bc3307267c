"""Row intervals cut into tiles that a dense attention kernel can run: full, causal, or masked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import torch
from torch import Tensor

from ..schedule import KeyIntervals

# A run of rows shorter than this is cheaper as part of a masked tile than as tiles of its own.
_SHORT_RUN = 64
_MIN_BLOCK, _MAX_BLOCK = 64, 512


class Kind(Enum):
    FULL = "full"  # every row sees every key
    CAUSAL = "causal"  # square; row t sees the keys 0..t
    MASKED = "masked"  # rows compare indices


@dataclass(frozen=True)
class Tile:
    """The queries ``q0:q1`` against the keys ``k0:k1``. The tiles of a decomposition never overlap, together
    hold every visible pair, and leave out the rows that see nothing."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Kind


@lru_cache(maxsize=512)
def tiles(rows: KeyIntervals, row: int) -> tuple[Tile, ...]:
    """The decomposition of one batch row's intervals. Cached by the identity of ``rows``."""
    return tuple(decompose(rows.lo[row].long(), rows.hi[row].long()))


def decompose(lo: Tensor, hi: Tensor) -> Iterator[Tile]:
    """Cut intervals ``lo, hi`` int64 ``[q_len]`` into tiles.

    Rows fall into runs in which both ends stand still (a rectangle), only ``hi`` moves, one key a row (a rectangle
    and a causal square), or anything else (masked blocks, as wide as their rows need). Runs too short to pay for
    tiles of their own join a masked block.
    """
    if not len(lo):
        return
    first_lo, first_hi = lo.tolist(), hi.tolist()
    pending: int | None = None  # first row of short runs not yet emitted
    for start, stop, kind in _runs(lo, hi):
        empty = first_lo[start] == first_hi[start]
        plain = not empty and stop - start >= _SHORT_RUN and kind in (_STILL, _HI_MOVES)
        if (plain or empty) and pending is not None:
            yield from _masked(first_lo, first_hi, pending, start)
            pending = None
        if plain:
            yield from _plain(first_lo[start], first_hi[start], start, stop, kind)
        elif not empty and pending is None:
            pending = start
    if pending is not None:
        yield from _masked(first_lo, first_hi, pending, len(lo))


_STILL, _HI_MOVES, _BOTH_MOVE, _OTHER = range(4)


def _runs(lo: Tensor, hi: Tensor) -> Iterator[tuple[int, int, int]]:
    """Maximal runs of rows that step alike: (start, stop, how they step)."""
    dlo, dhi, seen = lo.diff(), hi.diff(), lo < hi
    steps = torch.full_like(dlo, _OTHER)
    steps[(dlo == 0) & (dhi == 0)] = _STILL
    steps[(dlo == 0) & (dhi == 1)] = _HI_MOVES
    steps[(dlo == 1) & (dhi == 1)] = _BOTH_MOVE
    steps[~seen[1:] & ~seen[:-1]] = _STILL
    steps[seen[1:] != seen[:-1]] = _OTHER
    start, kind, row = 0, _STILL, 1
    for step, count in zip(*(x.tolist() for x in steps.unique_consecutive(return_counts=True)), strict=True):
        if step == _OTHER:  # each of these rows stands alone, unless the next ones go on from it
            for first in range(row, row + count):
                yield start, first, kind
                start, kind = first, _STILL
        elif start == row - 1:  # a row that stood alone: these go on from it
            kind = step
        else:
            yield start, row, kind
            start, kind = row, step if count > 1 else _STILL
        row += count
    yield start, len(lo), kind


def _plain(lo: int, hi: int, start: int, stop: int, kind: int) -> Iterator[Tile]:
    if kind == _STILL:
        yield Tile(start, stop, lo, hi, Kind.FULL)
        return
    if hi - 1 > lo:
        yield Tile(start, stop, lo, hi - 1, Kind.FULL)
    yield Tile(start, stop, hi - 1, hi - 1 + stop - start, Kind.CAUSAL)


def _masked(lo: list[int], hi: list[int], start: int, stop: int) -> Iterator[Tile]:
    """Blocks of rows over all the keys any of them sees; taller where rows see many keys."""
    while start < stop:
        width = hi[start] - lo[start]
        end = min(start + max(_MIN_BLOCK, min(_MAX_BLOCK, width // 4)), stop)
        if lo[start] < hi[end - 1]:
            yield Tile(start, end, lo[start], hi[end - 1], Kind.MASKED)
        start = end
