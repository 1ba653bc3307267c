"""Divide key intervals into a few calls of a kernel that supports full, causal and banded masks.

The intervals of a mask consist of a few bands, each over a range of queries of its own:

    keys ->        a window of 3 in two packed documents
    x                       band 1: rows 0 to 4, keys 0 to 4, left 2, right 0
    xx
    xxx
     xxx
      xxx
         x                  band 2: rows 5 to 7, keys 5 to 7, the same left and right
         xx
         xxx

A kernel that takes packed sequences of different lengths computes both bands in one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..schedule.rows import KeyIntervals
from .tiles import BOTH_MOVE, HI_MOVES, LO_MOVES, IntArray, runs


@dataclass(frozen=True)
class Band:
    """Queries ``q0:q1`` and keys ``k0:k1``, aligned in the bottom right corner as in flash-attn.

    Query ``i`` sees the keys ``j`` of ``k0:k1`` with ``p - left <= j <= p + right``, where ``p = i - q1 + k1``; -1 is
    unlimited. Every query sees some key.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    left: int
    right: int


def bands(intervals: KeyIntervals, row: int) -> IntArray:
    """The bands of one batch row, ``[bands, 6]``: the fields of ``Band``, in the order of the queries. No two share a
    query.

    Args:
        intervals: on the host.
        row: the batch row.
    """
    lo, hi = intervals.lo[row].numpy(), intervals.hi[row].numpy()
    if not len(lo):
        return np.empty((0, 6), np.int64)
    by_run = np.stack(runs(lo, hi))  # [3, runs]
    start, stop, kind = by_run[:, lo[by_run[0]] < hi[by_run[0]]]
    grows, shrinks = (kind == HI_MOVES) | (kind == BOTH_MOVE), (kind == LO_MOVES) | (kind == BOTH_MOVE)
    k0, right = lo[start].astype(np.int64), np.where(grows, 0, -1)
    k1 = hi[start] + np.where(grows, stop - 1 - start, 0)
    left = np.where(shrinks, start - stop + k1 - k0, -1)  # query ``start`` sees k0 = p - left; p is start - stop + k1
    # A band and the next one are one band if the next is a window and the band its first queries, which see fewer keys
    # than the window has.
    found = np.stack([start, stop, k0, k1, left, right], 1)
    a, b = found[:-1].T, found[1:].T
    joins = (a[1] == b[0]) & (a[5] == 0) & (b[5] == 0) & (a[3] + b[1] - b[0] == b[3])
    joins &= (a[4] == -1) & (b[4] >= 0) & ((b[2] == a[2]) | (b[2] == a[2] + 1))
    found[1:][joins, 0], found[1:][joins, 2] = a[0][joins], a[2][joins]
    kept: IntArray = found[~np.append(joins, False)[: len(found)]]
    return kept


@dataclass(frozen=True)
class KernelCall:
    """One call of a library's kernel, on the queries ``q0:q1`` and the keys ``k0:k1``."""

    q0: int
    q1: int
    k0: int
    k1: int
    left: int  # the band, see ``Band``; in a packed call the band of each sequence
    right: int
    every_row: bool = False  # rows count in every batch row; otherwise in the concatenation of all batch rows
    # Of a packed call: one past the last query and the last key of each sequence, counted from ``q0`` and ``k0``.
    ends: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    masked: bool = False  # the kernel takes the intervals themselves; the band is unlimited

    @property
    def queries(self) -> slice:
        return slice(self.q0, self.q1)

    @property
    def keys(self) -> slice:
        return slice(self.k0, self.k1)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The most queries and the most keys of a sequence."""
        if self.ends is None:
            return self.q1 - self.q0, self.k1 - self.k0
        q, k = (max(b - a for a, b in pairwise((0, *ends))) for ends in self.ends)
        return max(2, q), k  # flash-attn takes 1 to mean that every sequence has one query

    @cached_property
    def has_gaps(self) -> bool:
        """Whether some packed queries have no keys."""
        return self.ends is not None and any(a == b for a, b in pairwise((0, *self.ends[1])))


@dataclass(frozen=True)
class Abilities:
    """What the kernels of a library support in one call."""

    # Bands with a left side, and causal bands with more keys than queries. Without this, only full masks, and causal
    # masks with as many keys as queries.
    windows: bool = True
    packs: bool = True  # packed sequences of different lengths
    gaps: bool = False  # packed sequences that have queries and no keys, or keys and no queries
    intervals: bool = False  # key intervals: for unions, and for steps that would need more than a few calls
    fewest: int = 1  # queries of a call, and keys


def cut(
    intervals: KeyIntervals, batch: int, q_len: int, k_len: int, can: Abilities, most: int
) -> list[KernelCall] | None:
    """The calls of one step, or None if ``most`` calls are not enough. ``intervals`` are on the host."""
    calls = None if intervals.is_union else _cut(intervals, batch, q_len, k_len, can, most)
    if calls is None and can.intervals:
        return [KernelCall(0, q_len, 0, k_len, -1, -1, every_row=True, masked=True)]
    return calls


def _cut(
    intervals: KeyIntervals, batch: int, q_len: int, k_len: int, can: Abilities, most: int
) -> list[KernelCall] | None:
    by_row = [bands(intervals, row) for row in range(intervals.lo.shape[0])]
    if len(by_row) == 1 and batch > 1:
        calls = _calls(by_row[0], can, most)
        if calls is None or all(call.ends is None for call in calls):
            return calls and [replace(call, every_row=True) for call in calls]
        by_row *= batch
    moved = [np.add(found, (i * q_len, i * q_len, i * k_len, i * k_len, 0, 0)) for i, found in enumerate(by_row)]
    return _calls(np.concatenate(moved), can, most)


def _calls(found: IntArray, can: Abilities, most: int) -> list[KernelCall] | None:
    (_, q1, _, k1, _, right), (next_q0, _, next_k0, _, _, next_right) = found[:-1].T, found[1:].T
    beside = ((next_q0 == q1) & (next_k0 == k1)) | (can.gaps & (next_k0 >= k1))
    if len(found) - np.count_nonzero(can.packs & beside & (next_right == right)) > most:
        return None  # found in a few microseconds, also for thousands of bands
    calls: list[KernelCall] = []
    for chain in _chains([Band(*fields) for fields in found.tolist()], can):
        made = [_packed(chain)] if len(chain) > 1 else _alone(chain[0], can)
        if made is None or len(calls) + len(made) > most:
            return None
        if any(min(x.q1 - x.q0, x.k1 - x.k0) < can.fewest for x in made):
            return None
        calls += made
    return calls


def _chains(found: Sequence[Band], can: Abilities) -> Iterator[list[Band]]:
    """Yields lists of consecutive bands that can be packed into one call."""
    chain: list[Band] = []
    left: int | None = -1
    for band in found:
        if chain:
            last = chain[-1]
            beside = (band.q0, band.k0) == (last.q1, last.k1) or (can.gaps and band.k0 >= last.k1)
            common = _common_left(left, chain, band)
            fits = can.windows or (_is_full_or_square(last) and _is_full_or_square(band))
            if can.packs and fits and beside and band.right == last.right and common is not None:
                chain.append(band)
                left = common
                continue
            yield chain
        chain, left = [band], band.left
    if chain:
        yield chain


def _common_left(left: int | None, chain: Sequence[Band], band: Band) -> int | None:
    """A left side that gives the chain, whose left side is ``left``, and the band the same masks; None if none does."""
    if left is None or left == band.left:
        return left
    # A left side that reaches beyond the first key of every sequence hides no key, like -1.
    if band.left == -1:
        return left if left >= band.k1 - band.k0 - 1 else None
    if left == -1:
        return band.left if all(band.left >= other.k1 - other.k0 - 1 for other in chain) else None
    return None


def _packed(chain: Sequence[Band]) -> KernelCall:
    q0, k0 = chain[0].q0, chain[0].k0
    q_ends, k_ends = [0], [0]
    for band in chain:
        if band.q0 - q0 > q_ends[-1]:  # queries without keys
            q_ends.append(band.q0 - q0)
            k_ends.append(k_ends[-1])
        if band.k0 - k0 > k_ends[-1]:  # keys without queries
            q_ends.append(q_ends[-1])
            k_ends.append(band.k0 - k0)
        q_ends.append(band.q1 - q0)
        k_ends.append(band.k1 - k0)
    left, right = max(band.left for band in chain), chain[0].right
    return KernelCall(q0, chain[-1].q1, k0, chain[-1].k1, left, right, ends=(tuple(q_ends[1:]), tuple(k_ends[1:])))


def _is_full_or_square(band: Band) -> bool:
    """Whether its mask is full, or causal with as many keys as queries."""
    return band.left == -1 and (band.right == -1 or band.q1 - band.q0 == band.k1 - band.k0)


def _alone(band: Band, can: Abilities) -> list[KernelCall] | None:
    q0, q1, k0, k1 = band.q0, band.q1, band.k0, band.k1
    if can.windows or _is_full_or_square(band):
        return [KernelCall(q0, q1, k0, k1, band.left, band.right)]
    if band.left == -1:  # a full rectangle beside a causal square
        corner = k1 - (q1 - q0)
        return [KernelCall(q0, q1, k0, corner, -1, -1), KernelCall(q0, q1, corner, k1, -1, 0)]
    return None
