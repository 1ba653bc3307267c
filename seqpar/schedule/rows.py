"""Which rows of K/V a rank needs: rows of a shard, the keys of a step, and the ranges of positions that queries see.

Their sizes do not grow with the sequence. What the kernels need for each query is computed on the kernels' device.

Shapes: b is 1 or the batch size, q_len and k_len are the numbers of local queries and of the step's keys.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..base.cache import cached_tensors, upload
from ..masks.runs import Runs
from ..placement.layout import CPU, Positions, Stripe

# Under a striped layout, a narrow window leaves gaps between the keys of neighbouring queries. The gaps of up to this
# many queries of a run are left out.
_EXACT_QUERIES = 4096
# More spans than this are selected by one index instead of a slice each.
_MAX_SLICES = 16


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """Which of a step's keys each local query sees: query ``i`` sees the keys ``lo[i] <= j < hi[i]``.

    Attributes:
        lo, hi: int32 ``[b, q_len]``, indices of the step's keys, ``0 <= lo <= hi <= k_len``. Neither decreases along
            the queries. Of a union (see ``united``) ``[parts, b, q_len]``.
        q_positions: int32 ``[q_len]``, global positions, increasing. Only ALiBi and dropout read them; without these
            two it may be any int32 tensor.
        k_positions: int32 ``[k_len]``, likewise.
        tiles: a cache for what backends derive from ``lo`` and ``hi``.
        made_on_host: computes the same intervals on the host, without reading them from a GPU; None if that is not
            possible.
    """

    lo: Tensor
    hi: Tensor
    q_positions: Tensor
    k_positions: Tensor
    tiles: dict[Any, Any] = field(default_factory=dict, repr=False)
    made_on_host: Callable[[], KeyIntervals | None] | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(x.nbytes for x in {self.lo, self.hi, self.q_positions, self.k_positions})

    @property
    def is_union(self) -> bool:
        return self.lo.dim() == 3

    def to(self, device: torch.device) -> KeyIntervals:
        """A copy on ``device``."""
        if device == self.lo.device:
            return self
        lo, hi, q_positions, k_positions = (
            x.to(device) for x in (self.lo, self.hi, self.q_positions, self.k_positions)
        )
        made_on_host = self.on_host if self.lo.device == CPU else self.made_on_host
        return KeyIntervals(lo, hi, q_positions, k_positions, made_on_host=made_on_host)

    def on_host(self) -> KeyIntervals | None:
        """The same intervals on the host, without waiting for a GPU; None if that is not possible."""
        if self.lo.device == CPU:
            return self
        return None if self.made_on_host is None else self.made_on_host()


def united(parts: Sequence[KeyIntervals]) -> KeyIntervals:
    """A step's parts, which have no key in common, as one value: for kernels that take several intervals of a query.

    Cached as long as the first part lives.
    """
    first = parts[0]

    def make() -> KeyIntervals:
        lo, hi = (torch.stack(ends) for ends in zip(*((part.lo, part.hi) for part in parts), strict=True))
        made_on_host = partial(_united_on_host, [part.made_on_host for part in parts])
        return KeyIntervals(lo, hi, first.q_positions, first.k_positions, made_on_host=made_on_host)

    return cached_tensors(("united", id(first)), first.lo.device, make, first)


def _united_on_host(makers: Sequence[Callable[[], KeyIntervals | None] | None]) -> KeyIntervals | None:
    parts = [part for make in makers if make is not None and (part := make()) is not None]
    return united(parts) if len(parts) == len(makers) else None


@dataclass(frozen=True)
class RowSpans:
    """Some rows of a shard, as increasing (start, stop) pairs of local indices.

    Attributes:
        spans: the pairs.
        count: the number of rows.
    """

    spans: tuple[tuple[int, int], ...]
    count: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", sum(stop - start for start, stop in self.spans))

    def __len__(self) -> int:
        return self.count

    def index(self, device: torch.device) -> Tensor:
        """The selected rows, int64 ``[rows]``. Cached."""

        def make() -> Tensor:
            start, stop = np.asarray(self.spans, dtype=np.int64).T
            length = stop - start
            # Row ``i`` of the selection is row ``i`` plus the number of rows that are left out before its span.
            gaps = start - (np.cumsum(length) - length)
            columns = upload(torch.from_numpy(np.stack([gaps, length])), device)
            rows = columns[0].repeat_interleave(columns[1], output_size=len(self))
            return rows.add_(torch.arange(len(self), device=device))

        return cached_tensors(("selection", self.spans), device, make, self)

    def locate(self, rows: RowSpans) -> RowSpans:
        """The indices of ``rows``, a subset of the selected rows, among the selected rows."""
        if not self.spans or self.spans[0][0] == 0 == len(self.spans) - 1:
            return rows
        located: list[tuple[int, int]] = []
        spans, offset = iter(self.spans), 0
        first, last = next(spans)
        for start, stop in rows.spans:
            while last < stop:
                offset += last - first
                first, last = next(spans)
            begin, end = offset + start - first, offset + stop - first
            if located and located[-1][1] == begin:
                located[-1] = located[-1][0], end
            else:
                located.append((begin, end))
        return RowSpans(tuple(located))

    def copy_to(self, out: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
        """Copy the selected rows of each of ``xs [..., rows, heads, head_dim]`` into ``out``."""
        for target, x in zip(out, xs, strict=True):
            if len(self.spans) > _MAX_SLICES:
                target.copy_(x.index_select(-3, self.index(x.device)))
                continue
            offset = 0
            for start, stop in self.spans:
                _narrow(target, offset, stop - start).copy_(_narrow(x, start, stop - start))
                offset += stop - start

    def add_to(self, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Add ``values`` to the selected rows of each of ``targets [..., rows, heads, head_dim]``."""
        for target, x in zip(targets, values, strict=True):
            if len(self.spans) > _MAX_SLICES:
                # Every row is selected once, so the order of the additions does not matter.
                target.index_add_(target.dim() - 3, self.index(target.device), x)
                continue
            offset = 0
            for start, stop in self.spans:
                _narrow(target, start, stop - start).add_(_narrow(x, offset, stop - start))
                offset += stop - start

    def counts_below(self, x: Tensor) -> Tensor:
        """How many of the selected rows are smaller than each element of ``x``, an integer tensor of local indices."""
        if len(self.spans) <= _MAX_SLICES:
            return _counts_in_ranges(self.spans, x)
        return torch.searchsorted(self.index(x.device), x)


NO_ROWS = RowSpans(())


def _narrow(x: Tensor, start: int, count: int) -> Tensor:
    """Some rows of ``x [..., rows, heads, head_dim]``."""
    return x if count == x.shape[-3] else x.narrow(-3, start, count)


def _counts_in_ranges(ranges: Sequence[tuple[int, int]], x: Tensor) -> Tensor:
    """How many elements of the increasing, disjoint ``ranges`` are smaller than each element of ``x``."""
    total: Tensor | None = None
    for start, stop in ranges:
        part = (x - start).clamp_(0, stop - start)
        total = part if total is None else total.add_(part)
    return torch.zeros_like(x) if total is None else total


@dataclass(frozen=True)
class ShardRows:
    """Keys of one step that come from one rank: some rows of its shard.

    Attributes:
        shard_positions: the positions of the rank's shard.
        rows: the rows of the shard.
    """

    shard_positions: Positions
    rows: RowSpans

    def __len__(self) -> int:
        return len(self.rows)

    def counts_below(self, x: Tensor) -> Tensor:
        """How many of the keys have a position below each element of ``x``."""
        local = self.shard_positions.counts_below(x)
        return local if len(self.rows) == len(self.shard_positions) else self.rows.counts_below(local)

    def positions(self, device: torch.device) -> Tensor:
        """Global positions of the keys, int64 ``[k_len]``, increasing."""
        parts = [self.shard_positions.tensor(device, start, stop) for start, stop in self.rows.spans]
        return torch.cat(parts) if len(parts) != 1 else parts[0]


@dataclass(frozen=True)
class GatheredRows:
    """Keys of one step that come from all other ranks, sorted by position.

    Attributes:
        ranges: ranges of global positions that hold the keys.
        local: the rows of this rank inside ``ranges``. They are not among the keys, because step 0 computes with them.
        shards: the keys of each rank that sends some, in the order of the step's ``receives``.
    """

    ranges: tuple[tuple[int, int], ...]
    local: ShardRows
    shards: tuple[ShardRows, ...]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def counts_below(self, x: Tensor) -> Tensor:
        """How many of the keys have a position below each element of ``x``."""
        return _counts_in_ranges(self.ranges, x).sub_(self.local.counts_below(x))

    def rows_of(self, index: int, device: torch.device) -> Tensor:
        """The indices of the keys of ``shards[index]`` among all keys, int64 ``[rows]``. Cached."""
        shard = self.shards[index]
        return cached_tensors(
            ("gathered", self.ranges, self.local.shard_positions, shard.shard_positions),
            device,
            lambda: self.counts_below(shard.positions(device)),
            self,
        )

    def scatter(self, index: int, xs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Copy the rows ``xs [..., rows, heads, head_dim]`` of ``shards[index]`` to their places in ``out``."""
        pieces = self._pieces[index]
        for x, target in zip(xs, out, strict=True):
            if pieces is None:
                target.index_copy_(target.dim() - 3, self.rows_of(index, x.device), x)
            for row, start, count in pieces or ():
                target[..., start : start + count, :, :] = x[..., row : row + count, :, :]

    def gather(self, index: int, xs: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Copy the rows of ``shards[index]`` from their places in ``xs [..., k_len, heads, head_dim]`` to ``out``."""
        pieces = self._pieces[index]
        for x, target in zip(xs, out, strict=True):
            if pieces is None:
                target.copy_(x.index_select(-3, self.rows_of(index, x.device)))
            for row, start, count in pieces or ():
                target[..., row : row + count, :, :] = x[..., start : start + count, :, :]

    @cached_property
    def _pieces(self) -> list[list[tuple[int, int, int]] | None]:
        """For each shard, ``(row, start, count)`` of its ranges of consecutive positions; None if there are many."""
        return [self._pieces_of(shard) for shard in self.shards]

    def _pieces_of(self, shard: ShardRows) -> list[tuple[int, int, int]] | None:
        if not shard.shard_positions.is_ranges or len(shard.rows.spans) > _MAX_SLICES:
            return None
        pieces, row = [], 0
        for start, stop in shard.rows.spans:
            for stripe, offset in shard.shard_positions.with_offsets():
                first, last = max(start, offset), min(stop, offset + stripe.count)
                if first < last:
                    pieces.append((row, self._count_below(shard.shard_positions.at(first)), last - first))
                    row += last - first
        return pieces

    def _count_below(self, position: int) -> int:
        inside = sum(max(0, min(position, stop) - start) for start, stop in self.ranges)
        local = self.local.shard_positions.count_below(position)
        return inside - sum(max(0, min(local, stop) - start) for start, stop in self.local.rows.spans)

    def positions(self, device: torch.device) -> Tensor:
        """Global positions of the keys, int64 ``[k_len]``, increasing."""
        positions = torch.empty(len(self), dtype=torch.int64, device=device)
        for i, shard in enumerate(self.shards):
            positions[self.rows_of(i, device)] = shard.positions(device)
        return positions


def visible_ranges(
    rows: Sequence[Runs], queries: Positions, seq_len: int, exact: bool = True
) -> tuple[tuple[int, int], ...]:
    """Ranges of global positions that hold every key that some of ``queries`` sees, disjoint and increasing.

    Args:
        rows: by batch row, the mask's runs.
        queries: the positions of the queries.
        seq_len: tokens of the full sequence.
        exact: whether the ranges must hold no other keys. Queries with gaps between them, as in a striped layout, then
            have up to one range per run. Otherwise they have one range, from the first visible key to the last.
    """
    ranges: list[tuple[int, int]] = []
    for runs in rows:
        for stripe in queries.stripes:
            ranges += _seen_by_stripe(runs, stripe, exact)
    return merged_ranges((start, min(stop, seq_len)) for start, stop in ranges)


def merged_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The union of ``ranges``, which may overlap, disjoint and increasing."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], stop)
        elif start < stop:
            union.append((start, stop))
    return tuple(union)


def _seen_by_stripe(runs: Runs, stripe: Stripe, exact: bool) -> Iterator[tuple[int, int]]:
    """Yields the ranges of positions that queries at ``stripe`` see. They may overlap."""
    first, last = bisect_right(runs.starts, stripe.start) - 1, bisect_left(runs.starts, stripe.stop)
    consecutive = stripe.block >= stripe.count
    if not consecutive and not exact:
        # lo and hi never decrease along the queries, so the first and the last query bound all intervals.
        yield runs.bounds(stripe.start, stripe.stop - 1)
        return
    ends = [*runs.starts[first + 1 : last], stripe.stop]
    for (start, lo, lo_step, hi, hi_step), end in zip(runs.rows[first:last], ends, strict=True):
        if consecutive:
            x0, x1 = max(start, stripe.start), end - 1
        else:
            begin, stop = stripe.count_below(start), stripe.count_below(end)
            if begin == stop:
                continue
            x0, x1 = stripe.at(begin), stripe.at(stop - 1)
        lo_at, hi_at = lo + lo_step * (x0 - start), hi + hi_step * (x0 - start)
        if lo_at >= hi_at:
            continue  # no query of this run sees a key
        gap = 1 if consecutive else stripe.stride - stripe.block + 1  # between neighbouring queries
        if lo_step == 0 or hi_step == 0 or hi_at - lo_at >= gap or stop - begin > _EXACT_QUERIES:
            yield lo_at, hi + hi_step * (x1 - start)
        else:  # a window that is narrower than the gap
            for index in range(begin, stop):
                shift = stripe.at(index) - x0
                yield lo_at + shift, hi_at + shift


def rows_in(ranges: Sequence[tuple[int, int]], shard: Positions) -> RowSpans:
    """The rows of a shard with positions ``shard`` that have a position in one of ``ranges``."""
    spans: list[tuple[int, int]] = []
    for stripe, offset in shard.with_offsets():
        # Start at the first range that overlaps the stripe.
        first = bisect_right(ranges, stripe.start, key=_stop)
        for start, stop in ranges[first:]:
            if start >= stripe.stop:
                break
            begin, end = stripe.count_below(start) + offset, stripe.count_below(stop) + offset
            if spans and spans[-1][1] == begin:
                spans[-1] = spans[-1][0], end
            elif begin < end:
                spans.append((begin, end))
    return RowSpans(tuple(spans)) if spans else NO_ROWS


def _stop(range_: tuple[int, int]) -> int:
    return range_[1]
