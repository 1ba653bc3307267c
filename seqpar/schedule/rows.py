"""Selected rows of a shard, and the keys of a step: the values of which a schedule consists.

Their sizes do not grow with the sequence. What the kernels need for each query is computed on the kernels' device.

Shapes: b is 1 or the batch size, q_len and k_len are the numbers of local queries and of the step's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cache import cached_tensors, upload
from ..layout import CPU, Positions

# More spans than this are selected by one index instead of a slice each.
_MAX_SLICES = 16


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """Which of a step's keys each local query sees: query ``i`` sees the keys ``lo[i] <= j < hi[i]``.

    Attributes:
        lo, hi: int32 ``[b, q_len]``, indices of the step's keys, ``0 <= lo <= hi <= k_len``. Neither decreases along
            the queries.
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


@dataclass(frozen=True)
class RowSpans:
    """Some rows of a shard, as increasing (start, stop) pairs of local indices."""

    spans: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def index(self, device: torch.device) -> Tensor:
        """The selected rows, int64 ``[rows]``. Cached."""

        def make() -> Tensor:
            start, stop = np.asarray(self.spans, dtype=np.int64).T
            length = stop - start
            # Row ``i`` of the selection is row ``i`` plus the number of rows that are left out before its span.
            left_out = start - (np.cumsum(length) - length)
            columns = upload(torch.from_numpy(np.stack([left_out, length])), device)
            skipped = columns[0].repeat_interleave(columns[1], output_size=len(self))
            return skipped.add_(torch.arange(len(self), device=device))

        return cached_tensors(("selection", self.spans), device, make)

    def locate(self, rows: RowSpans) -> RowSpans:
        """The indices of ``rows``, a subset of the selected rows, among the selected rows."""
        if not self.spans or self.spans[0][0] == 0 == len(self.spans) - 1:
            return rows
        found: list[tuple[int, int]] = []
        own, offset = iter(self.spans), 0
        first, last = next(own)
        for start, stop in rows.spans:
            while last < stop:
                offset += last - first
                first, last = next(own)
            begin, end = offset + start - first, offset + stop - first
            if found and found[-1][1] == begin:
                found[-1] = found[-1][0], end
            else:
                found.append((begin, end))
        return RowSpans(tuple(found))

    def copy_to(self, out: Tensor, x: Tensor) -> None:
        """Copy the selected rows of ``x [..., rows, heads, head_dim]`` into ``out``."""
        if len(self.spans) > _MAX_SLICES:
            out.copy_(x.index_select(-3, self.index(x.device)))
            return
        offset = 0
        for start, stop in self.spans:
            out[..., offset : offset + stop - start, :, :] = x[..., start:stop, :, :]
            offset += stop - start

    def add_to(self, target: Tensor, values: Tensor) -> None:
        """Add ``values`` to the selected rows of ``target [..., rows, heads, head_dim]``."""
        if len(self.spans) > _MAX_SLICES:
            # Every row is selected once, so the order of the additions does not matter.
            target.index_add_(target.dim() - 3, self.index(target.device), values)
            return
        offset = 0
        for start, stop in self.spans:
            target[..., start:stop, :, :] += values[..., offset : offset + stop - start, :, :]
            offset += stop - start

    def counts_below(self, x: Tensor) -> Tensor:
        """How many of the selected rows are smaller than each element of ``x``, an integer tensor of local indices."""
        if len(self.spans) <= _MAX_SLICES:
            return _counts_in_ranges(self.spans, x)
        return torch.searchsorted(self.index(x.device), x)


NO_ROWS = RowSpans(())


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
        held: the positions of the rank's shard.
        rows: the rows of the shard.
    """

    held: Positions
    rows: RowSpans

    def __len__(self) -> int:
        return len(self.rows)

    def counts_below(self, x: Tensor) -> Tensor:
        """How many of the keys have a position below each element of ``x``."""
        local = self.held.counts_below(x)
        return local if len(self.rows) == len(self.held) else self.rows.counts_below(local)

    def positions(self, device: torch.device) -> Tensor:
        """Global positions of the keys, int64 ``[k_len]``, increasing."""
        parts = [self.held.tensor(device, start, stop) for start, stop in self.rows.spans]
        return torch.cat(parts) if len(parts) != 1 else parts[0]


@dataclass(frozen=True)
class GatheredRows:
    """Keys of one step that come from all other ranks, sorted by position.

    Attributes:
        ranges: ranges of global positions that hold the keys.
        own: the rows of this rank inside ``ranges``. They are not among the keys, because step 0 computes with them.
        shards: the keys of each rank that sends some, in the order of the step's ``receives``.
    """

    ranges: tuple[tuple[int, int], ...]
    own: ShardRows
    shards: tuple[ShardRows, ...]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def counts_below(self, x: Tensor) -> Tensor:
        """How many of the keys have a position below each element of ``x``."""
        return _counts_in_ranges(self.ranges, x).sub_(self.own.counts_below(x))

    def rows_of(self, index: int, device: torch.device) -> Tensor:
        """The indices of the keys of ``shards[index]`` among all keys, int64 ``[rows]``. Cached."""
        shard = self.shards[index]
        return cached_tensors(
            ("gathered", self.ranges, self.own.held, shard.held),
            device,
            lambda: self.counts_below(shard.positions(device)),
        )

    def scatter(self, index: int, x: Tensor, out: Tensor) -> None:
        """Copy the rows ``x [..., rows, heads, head_dim]`` of ``shards[index]`` to their places in ``out``."""
        if (pieces := self._pieces[index]) is None:
            out.index_copy_(out.dim() - 3, self.rows_of(index, x.device), x)
            return
        for row, start, count in pieces:
            out[..., start : start + count, :, :] = x[..., row : row + count, :, :]

    def gather(self, index: int, x: Tensor, out: Tensor) -> None:
        """Copy the rows of ``shards[index]`` from their places in ``x [..., k_len, heads, head_dim]`` to ``out``."""
        if (pieces := self._pieces[index]) is None:
            out.copy_(x.index_select(-3, self.rows_of(index, x.device)))
            return
        for row, start, count in pieces:
            out[..., row : row + count, :, :] = x[..., start : start + count, :, :]

    @cached_property
    def _pieces(self) -> list[list[tuple[int, int, int]] | None]:
        """For each shard, ``(row, start, count)`` of its ranges of consecutive positions; None if there are many."""
        return [self._pieces_of(shard) for shard in self.shards]

    def _pieces_of(self, shard: ShardRows) -> list[tuple[int, int, int]] | None:
        if not shard.held.is_ranges or len(shard.rows.spans) > _MAX_SLICES:
            return None
        pieces, row = [], 0
        for start, stop in shard.rows.spans:
            for stripe, offset in shard.held.with_offsets():
                first, last = max(start, offset), min(stop, offset + stripe.count)
                if first < last:
                    pieces.append((row, self._count_below(shard.held.at(first)), last - first))
                    row += last - first
        return pieces

    def _count_below(self, position: int) -> int:
        inside = sum(max(0, min(position, stop) - start) for start, stop in self.ranges)
        own = self.own.held.count_below(position)
        return inside - sum(max(0, min(own, stop) - start) for start, stop in self.own.rows.spans)

    def positions(self, device: torch.device) -> Tensor:
        """Global positions of the keys, int64 ``[k_len]``, increasing."""
        positions = torch.empty(len(self), dtype=torch.int64, device=device)
        for i, shard in enumerate(self.shards):
            positions[self.rows_of(i, device)] = shard.positions(device)
        return positions
