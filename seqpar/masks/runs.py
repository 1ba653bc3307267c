"""The intervals of a mask as runs of query positions along which both ends of the interval are straight lines.

``mask.py`` says which mask has which runs. A mask of a million tokens in a hundred packed documents has about a hundred
runs, so whatever is computed from runs costs as much as the mask has documents, not as it has tokens.

Shapes: n queries. Positions are int64.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.cache import upload

# An upper end larger than every position, and far enough from int64's limit that sums with it do not overflow.
UNBOUNDED = 1 << 62
# The most intervals of keys that a query may see: each one is a call of a kernel more in every step.
MOST_PARTS = 16

Interval = tuple[Tensor, Tensor]
Array = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Runs:
    """The intervals of one batch row.

    Run ``i`` contains the queries from ``start[i]`` to the next start. Its query ``x`` sees the keys from
    ``lo[i] + lo_step[i] * (x - start[i])`` up to ``hi[i] + hi_step[i] * (x - start[i])``, exclusive. Either every query
    of a run sees some key, or none does.

    Attributes:
        start, lo, lo_step, hi, hi_step: int64 ``[runs]``; the steps are 0 or 1.
    """

    start: Array
    lo: Array
    lo_step: Array
    hi: Array
    hi_step: Array

    @staticmethod
    def of(start: Any, lo: Any, lo_step: Any, hi: Any, hi_step: Any) -> Runs:
        """Runs from arrays or numbers. A number applies to every run. Runs that contain no position are left out."""
        starts = np.asarray(start, dtype=np.int64)
        columns = [np.broadcast_to(np.asarray(x, dtype=np.int64), starts.shape) for x in (lo, lo_step, hi, hi_step)]
        nonempty = np.append(starts[1:] > starts[:-1], True)
        return Runs(starts[nonempty], *(column[nonempty] for column in columns))

    def __and__(self, other: Runs) -> Runs:
        """The intersection of the intervals."""
        starts = np.union1d(self.start, other.start)
        a, b = self._cut_at(starts), other._cut_at(starts)
        meet = _crossings(starts, *a[:2], *b[:2]), _crossings(starts, *a[2:], *b[2:])
        starts = np.unique(np.concatenate([starts, *meet]))
        a, b = self._cut_at(starts), other._cut_at(starts)
        return Runs(starts, *_upper(*a[:2], *b[:2]), *_lower(*a[2:], *b[2:]))._without_negative()

    def _cut_at(self, starts: Array) -> tuple[Array, Array, Array, Array]:
        """``lo, lo_step, hi, hi_step`` of the same intervals, cut into runs at ``starts``."""
        run = np.searchsorted(self.start, starts, side="right") - 1
        distance = starts - self.start[run]
        lo_step, hi_step = self.lo_step[run], self.hi_step[run]
        return self.lo[run] + lo_step * distance, lo_step, self.hi[run] + hi_step * distance, hi_step

    def _without_negative(self) -> Runs:
        """The same with ``hi`` raised to ``lo`` wherever it is smaller, which means that no key is visible."""
        # Where the ends meet, the query sees nothing; if they part again, the next query is the first that sees a key.
        after = self.hi_step > self.lo_step
        cut = _crossings(self.start, self.lo, self.lo_step, self.hi - after, self.hi_step)
        starts = np.unique(np.concatenate([self.start, cut]))
        lo, lo_step, hi, hi_step = self._cut_at(starts)
        return Runs(starts, lo, lo_step, *_upper(lo, lo_step, hi, hi_step))

    @property
    def sees(self) -> NDArray[np.bool_]:
        """For each run, whether its queries see some key, ``[runs]``."""
        seen: NDArray[np.bool_] = self.lo < self.hi
        return seen

    def __len__(self) -> int:
        return len(self.start)

    def __reduce__(self) -> tuple[Any, ...]:
        return Runs, self._columns  # without the lists below

    @cached_property
    def rows(self) -> list[tuple[int, int, int, int, int]]:
        """``(start, lo, lo_step, hi, hi_step)`` of each run as Python ints, which are faster to read than an array."""
        return list(zip(*(x.tolist() for x in self._columns), strict=True))

    @property
    def _columns(self) -> tuple[Array, Array, Array, Array, Array]:
        return self.start, self.lo, self.lo_step, self.hi, self.hi_step

    @cached_property
    def starts(self) -> list[int]:
        """``start`` as a list, for ``bisect``."""
        starts: list[int] = self.start.tolist()
        return starts

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """The first and one past the last key that queries from ``first`` to ``last`` may see."""
        start, lo, lo_step, _, _ = self.rows[bisect_right(self.starts, first) - 1]
        end, _, _, hi, hi_step = self.rows[bisect_right(self.starts, last) - 1]
        return lo + lo_step * (first - start), hi + hi_step * (last - end)

    def at(self, positions: Tensor) -> Interval:
        """``(lo, hi)`` of the queries at ``positions``, int64 ``[n]``, computed on their device."""
        start, lo, lo_step, hi, hi_step = self.rows[0]
        if len(self) == 1:
            distance = positions - start
            return distance * lo_step + lo, distance * hi_step + hi
        # The line of lo along run i is lo[i] - lo_step[i] * start[i] + lo_step[i] * x; hi has the same form.
        table = np.stack([self.start, self.lo - self.lo_step * self.start, self.lo_step,
                          self.hi - self.hi_step * self.start, self.hi_step])  # fmt: skip
        starts, *lines = upload(torch.from_numpy(table), positions.device)
        run = torch.searchsorted(starts, positions, right=True) - 1  # [n]
        lo_at, lo_slope, hi_at, hi_slope = (line.index_select(0, run) for line in lines)  # [n] each
        return lo_at.addcmul_(lo_slope, positions), hi_at.addcmul_(hi_slope, positions)


def _crossings(starts: Array, a: Array, a_step: Array, b: Array, b_step: Array) -> Array:
    """The positions inside runs at which the lines ``a`` and ``b`` cross."""
    length = np.diff(starts, append=UNBOUNDED)
    distance = (b - a) * (a_step - b_step)  # slopes are 0 or 1, so they differ by at most 1
    inside = (a_step != b_step) & (distance > 0) & (distance < length)
    crossings: Array = (starts + distance)[inside]
    return crossings


def keys_below_line(end: Array, slope: Array, count: Array, seq_len: int) -> Array:
    """``end + slope * i``, clipped to ``0 ... seq_len`` and summed over ``0 <= i < count``, for each run."""
    first = np.clip(-end, 0, count)  # the queries of a run with slope 1 for which the line has reached 0
    last = np.clip(seq_len - end, first, count)  # and seq_len
    n = last - first
    rising = n * np.where(n > 0, end, 0) + n * (first + last - 1) // 2 + (count - last) * seq_len
    result: Array = np.where(slope > 0, rising, count * np.clip(end, 0, seq_len))
    return result


def _upper(a: Array, a_step: Array, b: Array, b_step: Array) -> tuple[Array, Array]:
    """The upper one of two lines that do not cross inside a run, and its slope."""
    first = (a > b) | ((a == b) & (a_step > b_step))
    return np.where(first, a, b), np.where(first, a_step, b_step)


def _lower(a: Array, a_step: Array, b: Array, b_step: Array) -> tuple[Array, Array]:
    """The lower one of two lines that do not cross inside a run, and its slope."""
    first = (a < b) | ((a == b) & (a_step < b_step))
    return np.where(first, a, b), np.where(first, a_step, b_step)


EVERYTHING = Runs.of([0], 0, 0, UNBOUNDED, 0)
NOTHING = Runs.of([0], 0, 0, 0, 0)

# The parts of a mask whose queries see several intervals: in each part a query sees one of them, or none. The parts of
# a mask are disjoint.
Parts = tuple[Runs, ...]


def intersection(masks: Sequence[Parts], seq_len: int) -> Parts:
    """The parts of the keys that queries below ``seq_len`` see under each of the masks."""
    by_parts = sorted(masks, key=len)  # most masks have one part, of which an intersection has one too
    result: Parts = reduce(lambda a, b: tuple(x & y for x, y in product(a, b)), by_parts)
    if len(result) == 1 or len(masks) == 1:
        return result
    seen = tuple(part for part in result if part.sees[part.start < seq_len].any()) or (NOTHING,)
    _, lo, _, hi, _ = _columns(seen, _starts(seen, seq_len))
    fewest = (lo < hi).sum(0).max()  # intervals that some query sees
    return seen if len(seen) == fewest <= MOST_PARTS else union(seen, seq_len)


def union(parts: Sequence[Runs], seq_len: int) -> Parts:
    """The keys that queries below ``seq_len`` see under any of ``parts``, as parts that are disjoint.

    Raises:
        ValueError: some query sees more than ``MOST_PARTS`` intervals, or the order of the intervals needs more parts.
    """
    starts = _starts(parts, seq_len)
    _, *lines = _columns(parts, starts)
    ends, steps = np.concatenate(lines[::2]), np.concatenate(lines[1::2])  # of lo and hi, [2 parts, runs]
    length = np.diff(starts, append=max(seq_len, 1))
    cuts = [starts]
    for i in range(len(ends)):
        # Where two lines meet is a run of a single query. In the other runs the order of the lines does not change.
        distance = (ends[i + 1 :] - ends[i]) * (steps[i] - steps[i + 1 :])
        for meet in (distance, distance + 1):
            inside = (steps[i] != steps[i + 1 :]) & (distance >= 0) & (meet < length)
            cuts.append((starts + meet)[inside])
    starts, *lines = _columns(parts, np.unique(np.concatenate(cuts)))
    return _in_order(starts, *_disjoint(lines), seq_len)


def _disjoint(lines: Sequence[Array]) -> tuple[list[Array], Array]:
    """The intervals of each run in increasing order, and how many there are, ``[runs]``.

    ``lines``: ``lo, lo_step, hi, hi_step`` of intervals that may overlap, ``[intervals, runs]``. Their order does not
    change inside a run.
    """
    lines = [np.where(lines[0] < lines[2], lines[0], UNBOUNDED), *lines[1:]]  # without keys: the last ones
    order = np.argsort(lines[0], axis=0, kind="stable")
    merged = [np.take_along_axis(x, order, 0) for x in lines]
    lo, _, hi, _ = merged
    count, columns = (lo[0] < hi[0]).astype(np.int64), np.arange(lo.shape[1])
    for i in range(1, len(lo)):  # intervals that overlap or touch become one
        interval = [x[i].copy() for x in merged]
        last = np.maximum(count - 1, 0)
        seen, apart = interval[0] < interval[2], interval[0] > hi[last, columns]
        longer = seen & ~apart & (interval[2] > hi[last, columns])
        for x, new in zip(merged[2:], interval[2:], strict=True):
            x[last[longer], columns[longer]] = new[longer]
        for x, new in zip(merged, interval, strict=True):
            x[count[seen & apart], columns[seen & apart]] = new[seen & apart]
        count += seen & apart
    return merged, count


def parts_by_document(parts: Sequence[Runs], cuts: Sequence[int], seq_len: int) -> tuple[Array, Array, Array]:
    """The parts of each document, which depend on nothing but which pairs of its tokens are visible.

    Args:
        parts: of the mask of all documents.
        cuts: where documents begin, increasing, the first one 0.
        seq_len: where the last one ends.

    Returns:
        The number of tokens of each document and the number of its parts, both ``[documents]``. Then ``lo`` and ``hi``
        of each query, counted from the beginning of its document, ``[2, most parts, seq_len]``. Both are 0 in the parts
        that the document does not have.
    """
    edges = np.array([*(x for x in cuts if x < seq_len), seq_len])
    length = np.diff(edges)
    _, lo, _, hi, _ = _columns(parts, np.arange(seq_len))
    ends = np.clip(np.stack([lo, hi]) - np.repeat(edges[:-1], length), 0, np.repeat(length, length))
    if len(parts) == 1 or not seq_len:
        return length, np.ones_like(length), ends
    merged, count = _disjoint([ends[0], 0 * lo, ends[1], 0 * hi])
    ends = np.where(np.arange(len(parts))[:, None] < count, np.stack(merged[::2]), 0)
    # A run ends where a document ends, or where the number of intervals or the slope of an end changes.
    rise = np.diff(ends, append=0)  # to the next query
    jumps = ((rise < 0) | (rise > 1)).any((0, 1)) | (np.diff(count, append=0) != 0)
    jumps[edges[1:] - 1] = True
    bends = (rise[..., 1:] != rise[..., :-1]).any((0, 1)) & ~jumps[1:]
    starts = np.flatnonzero(np.append(True, jumps[:-1] | bends))
    (lo, hi), (lo_step, hi_step) = ends[..., starts], np.where(jumps, 0, rise)[..., starts]
    found: list[Parts] = []
    for first, stop in pairwise(edges):
        runs = slice(*np.searchsorted(starts, (first, stop)))
        lines = [x[:, runs] for x in (lo, lo_step, hi, hi_step)]
        found.append(_in_order(starts[runs] - first, lines, count[starts[runs]], stop - first))
    ends = np.zeros((2, max(map(len, found)), seq_len), dtype=np.int64)
    for of_document, first, stop in zip(found, edges, edges[1:], strict=False):
        for i, part in enumerate(of_document):
            ends[:, i, first:stop] = part._cut_at(np.arange(stop - first))[::2]
    return length, np.array([*map(len, found)]), ends


def _in_order(starts: Array, lines: Sequence[Array], count: Array, seq_len: int) -> Parts:
    """Parts in which neither end decreases.

    Args:
        starts: of the runs.
        lines: ``lo, lo_step, hi, hi_step`` of each run's intervals in increasing order, ``[most intervals, runs]``.
        count: the intervals of each run.
        seq_len: the queries of the last run end there.
    """
    last = np.diff(starts, append=max(seq_len, int(starts[-1]) + 1)) - 1
    by_run = np.stack([*lines, lines[0] + lines[1] * last, lines[2] + lines[3] * last]).transpose(2, 1, 0).tolist()
    ends: list[tuple[int, int]] = []  # of each part's last query
    rows: list[list[tuple[int, int, int, int, int]]] = []  # of each part: Runs.rows
    for start, intervals, n in zip(starts.tolist(), by_run, count.tolist(), strict=True):
        free = [*range(len(ends))]
        for lo, lo_step, hi, hi_step, last_lo, last_hi in reversed(intervals[:n]):
            fits = [i for i in free if ends[i][0] <= lo and ends[i][1] <= hi]
            if fits:
                free.remove(part := max(fits, key=ends.__getitem__))
            else:
                part = len(ends)
                if part == MOST_PARTS:
                    _refuse(start)
                ends.append((0, 0))
                rows.append([(0, 0, 0, 0, 0)] if start else [])
            ends[part] = last_lo, last_hi
            rows[part].append((start, lo, lo_step, hi, hi_step))
        for i in free:
            if ends[i][0] < ends[i][1]:  # its queries see nothing from here on
                at = ends[i][1]
                ends[i] = at, at
                rows[i].append((start, at, 0, at, 0))
    return tuple(_joined(Runs(*np.array(x, dtype=np.int64).T)) for x in rows) or (NOTHING,)


def _refuse(position: int) -> None:
    raise ValueError(
        f"mask: the queries up to position {position} need more than {MOST_PARTS} intervals of keys, in which neither "
        f"end decreases from query to query; at most {MOST_PARTS} are attended one after another. Order the tokens so "
        "that the keys of a query lie together, or attend under fewer masks"
    )


def _joined(runs: Runs) -> Runs:
    """The same intervals in fewer runs: a run that continues the lines of the one before it is left out."""
    start, sees = runs.start, runs.sees
    length, steps = np.diff(start), [runs.lo_step.copy(), runs.hi_step.copy()]
    same = sees[1:] == sees[:-1]
    for x, step in zip((runs.lo, runs.hi), steps, strict=True):
        rise = np.diff(x)
        single = (length == 1) & ((rise == 0) | (rise == 1))
        step[:-1][single] = rise[single]  # a run of a single query has any slope
        same &= (rise == step[:-1] * length) & (step[1:] == step[:-1])
    kept = np.append(True, ~same)
    return Runs(start[kept], runs.lo[kept], steps[0][kept], runs.hi[kept], steps[1][kept])


def _starts(parts: Sequence[Runs], seq_len: int) -> Array:
    starts = np.unique(np.concatenate([part.start for part in parts]))
    return starts[starts < max(seq_len, 1)]


def _columns(parts: Sequence[Runs], starts: Array) -> tuple[Array, Array, Array, Array, Array]:
    """``starts``, and ``lo, lo_step, hi, hi_step`` of each part, cut into runs there: ``[parts, runs]``."""
    lo, lo_step, hi, hi_step = (np.stack(x) for x in zip(*(part._cut_at(starts) for part in parts), strict=True))
    return starts, lo, lo_step, hi, hi_step
