"""The intervals of a mask as runs of query positions along which both ends of the interval are straight lines.

``mask.py`` says which mask has which runs. A mask of a million tokens in a hundred packed documents has about a hundred
runs, so whatever is computed from runs costs as much as the mask has documents, not as it has tokens.

Shapes: n queries. Positions are int64.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base.cache import upload

# An upper end larger than every position, and far enough from int64's limit that sums with it do not overflow.
UNBOUNDED = 1 << 62

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
        cut = _crossings(self.start, self.lo, self.lo_step, self.hi, self.hi_step)
        starts = np.unique(np.concatenate([self.start, cut]))
        lo, lo_step, hi, hi_step = self._cut_at(starts)
        return Runs(starts, lo, lo_step, *_upper(lo, lo_step, hi, hi_step))

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
