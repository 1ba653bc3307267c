"""All tokens of a batch in tiles of a fixed size, each document from the beginning of a tile on.

The row of a token in its tile, and the tiles that it sees, depend on its document alone: neither on the number of ranks
nor on what is packed beside the document. A rank that has some of a tile's tokens computes the whole tile, in which the
other tokens are zeros. ``deterministic="invariant"`` is built on this.

Shapes: b batch, s tokens of the sequence, m rows of all tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..masks.runs import Runs, parts_by_document
from ..placement.layout import CPU
from .rows import KeyIntervals

TILE = 128  # rows; a multiple of the tiles of every Triton kernel


class TileGroup(NamedTuple):
    """Rows of documents with equally many parts, and what they see: nothing outside of the group.

    Attributes:
        queries, keys: their rows, among the queries and among the keys.
        parts: for each part of the mask, the keys of the group that each query of the group sees.
    """

    queries: slice
    keys: slice
    parts: tuple[KeyIntervals, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def to(self, device: torch.device) -> TileGroup:
        """A copy on ``device``."""
        return self._replace(parts=tuple(part.to(device) for part in self.parts))


@dataclass(frozen=True, eq=False)
class DocumentTiles:
    """The rows of all tiles: first the documents with one part, then the documents with two, and so on.

    Attributes:
        rows: the row of each token, int64 ``[b, s]``.
        lo, hi: the first and one past the last row that each row sees in each part, int64 ``[parts, m]``. Neither
            decreases along the rows of the documents that have the part.
        groups: for each number of parts that documents have, that number and one past their last row, increasing.
    """

    rows: Tensor
    lo: Tensor
    hi: Tensor
    groups: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, parts: Sequence[Sequence[Runs]], cuts: Sequence[Sequence[int]], seq_len: int, batch: int
    ) -> DocumentTiles:
        """The tiles of ``batch`` rows of ``seq_len`` tokens, under the mask of some heads.

        Args:
            parts: for each part of the mask and each batch row, or once for all of them, its intervals.
            cuts: where documents begin, for each batch row or once for all of them. No query sees keys of two
                documents.
            seq_len, batch: the sizes.
        """
        of_rows = zip(*parts, strict=True)
        by_row = [parts_by_document(runs, cuts[row % len(cuts)], seq_len) for row, runs in enumerate(of_rows)]
        most = max(ends.shape[1] for _, _, ends in by_row)
        of_batch = [by_row[row % len(by_row)] for row in range(batch)]
        empty = np.zeros((2, most, 0), dtype=np.int64)
        padded_ends = [np.pad(x, ((0, 0), (0, most - x.shape[1]), (0, 0))) for _, _, x in of_batch]
        lo, hi = torch.from_numpy(np.concatenate([empty, *padded_ends], 2))  # of the tokens of all batch rows
        length, count = (
            torch.from_numpy(np.concatenate([empty[0, 0], *x])) for x in ([row[i] for row in of_batch] for i in (0, 1))
        )
        padded, order = (length + TILE - 1) // TILE * TILE, count.argsort(stable=True)
        end = torch.empty_like(length)
        end[order] = padded[order].cumsum(0)
        first, begin = (x.repeat_interleave(length) for x in (end - padded, length.cumsum(0) - length))
        place = first + torch.arange(len(first), device=CPU) - begin
        numbers, documents = count[order].unique_consecutive(return_counts=True)
        groups = zip(numbers.tolist(), end[order][documents.cumsum(0) - 1].tolist(), strict=True)
        # A row without a token sees nothing.
        ends = [end[order].repeat_interleave(padded[order]).repeat(most, 1) for _ in range(2)]
        for end_of_rows, x in zip(ends, (lo, hi), strict=True):
            end_of_rows[:, place] = first + x
        return cls(place.view(batch, seq_len), ends[0], ends[1], tuple(groups) or ((1, 0),))

    def seen_by(self, tiles: Tensor, rows: Tensor) -> Tensor:
        """Which of ``rows`` some row of ``tiles`` sees, bool ``[len(rows)]``."""
        lo, hi = (ends[:, rows_of(tiles)].flatten().sort().values for ends in (self.lo, self.hi))
        begun, ended = torch.searchsorted(lo, rows, right=True), torch.searchsorted(hi, rows, right=True)
        return begun > ended

    def seeing(self, tiles: Tensor, rows: Tensor) -> Tensor:
        """Which of ``rows`` see some row of ``tiles``, increasing; bool ``[len(rows)]``."""
        lo, hi = self.lo[:, rows], self.hi[:, rows]
        first, end = (torch.searchsorted(tiles, tile) for tile in (lo // TILE, (hi + TILE - 1) // TILE))
        seeing: Tensor = ((lo < hi) & (first < end)).any(0)
        return seeing

    def intervals(self, query_tiles: Tensor, key_tiles: Tensor) -> tuple[TileGroup, ...]:
        """Which rows of ``key_tiles`` each row of ``query_tiles`` sees. Both are increasing."""
        found, q_start, k_start = [], 0, 0
        queries, keys = rows_of(query_tiles), rows_of(key_tiles)
        for parts, last in self.groups:
            q_stop, k_stop = (int((rows < last).sum()) for rows in (queries, keys))
            at, among = queries[q_start:q_stop], keys[k_start:k_stop].int()
            ends = (
                (rows_among(x[i][at], key_tiles) - k_start).int()[None]
                for i in range(parts)
                for x in (self.lo, self.hi)
            )
            of_parts = tuple(KeyIntervals(lo, hi, at.int(), among) for lo, hi in zip(ends, ends, strict=True))
            found.append(TileGroup(slice(q_start, q_stop), slice(k_start, k_stop), of_parts))
            q_start, k_start = q_stop, k_stop
        return tuple(found)


def pairs_computed(seen: KeyIntervals) -> int:
    """The pairs of a query and a key in the tiles that a kernel computes for one part of the mask: for each tile of
    queries, from the first tile of keys with a visible one to the last."""
    lo, hi = (x.view(-1, TILE) for x in (seen.lo, seen.hi))
    first = torch.where(lo < hi, lo // TILE, seen.lo.max()).amin(1)
    return int((torch.where(lo < hi, -(-hi // TILE), 0).amax(1) - first).clamp(min=0).sum()) * TILE**2


def tiles_of(rows: Tensor) -> Tensor:
    """The tiles that have some of ``rows``, increasing."""
    tiles: Tensor = (rows // TILE).unique()
    return tiles


def rows_of(tiles: Tensor) -> Tensor:
    """All rows of ``tiles``."""
    return (tiles[:, None] * TILE + torch.arange(TILE, device=CPU)).flatten()


def rows_among(rows: Tensor, tiles: Tensor) -> Tensor:
    """How many rows of ``tiles``, increasing, come before each of ``rows``, integers up to m."""
    tile = rows // TILE
    at = torch.searchsorted(tiles, tile)
    inside = torch.cat([tiles, tiles.new_full((1,), -1)])[at] == tile
    return at * TILE + torch.where(inside, rows % TILE, 0)
