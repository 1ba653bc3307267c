"""All tokens of a batch in tiles of a fixed size, each document from the beginning of a tile on.

The row of a token in its tile, and the tiles that it sees, depend on its document alone: neither on the number of ranks
nor on what is packed beside the document. A rank that has some of a tile's tokens computes the whole tile, in which the
other tokens are zeros. ``deterministic="invariant"`` is built on this.

Shapes: b batch, s tokens of the sequence, m rows of all tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks.runs import Runs
from ..placement.layout import CPU

TILE = 128  # rows; a multiple of the tiles of every Triton kernel


@dataclass(frozen=True, eq=False)
class DocumentTiles:
    """The rows of all tiles, batch row by batch row and document by document.

    Attributes:
        rows: the row of each token, int64 ``[b, s]``.
        lo, hi: the first and one past the last row that each row sees, int64 ``[m]``. Neither decreases.
    """

    rows: Tensor
    lo: Tensor
    hi: Tensor

    @classmethod
    def of(cls, runs: Sequence[Runs], starts: Sequence[Sequence[int]], seq_len: int, batch: int) -> DocumentTiles:
        """The tiles of ``batch`` rows of ``seq_len`` tokens.

        Args:
            runs: which keys each query sees, for each batch row or for all of them.
            starts: where documents begin, likewise. No query sees keys of two documents.
            seq_len, batch: the sizes.
        """
        positions, total = torch.arange(seq_len, device=CPU), 0
        columns: list[list[Tensor]] = [[], [], []]
        for row in range(batch):
            begin = torch.tensor([x for x in starts[row % len(starts)] if x < seq_len], dtype=torch.int64, device=CPU)
            length = torch.cat([begin[1:], begin.new_full((1,), seq_len)])[: len(begin)] - begin
            padded = (length + TILE - 1) // TILE * TILE
            end = total + padded.cumsum(0)  # of each document's rows
            total += int(padded.sum())
            document = torch.searchsorted(begin, positions, right=True) - 1
            place = (end - padded - begin)[document] + positions
            edge = torch.cat([place, place.new_full((1,), total)])
            lo, hi = (x.clamp(max=seq_len) for x in runs[row % len(runs)].at(positions))
            first = end.repeat_interleave(padded)  # a row without a token sees nothing
            at, last = place - (total - len(first)), first.clone()
            first[at] = edge[lo]
            last[at] = torch.where(lo < hi, edge[hi - 1] + 1, edge[lo])
            for column, x in zip(columns, (place, first, last), strict=True):
                column.append(x)
        place, lo, hi = (torch.cat([positions[:0], *column]) for column in columns)
        return cls(place.view(batch, seq_len), lo, hi)

    def seen_by(self, tiles: Tensor, rows: Tensor) -> Tensor:
        """Which of ``rows`` some row of ``tiles`` sees, bool ``[len(rows)]``. Both are increasing."""
        change = torch.zeros(len(rows) + 1, dtype=torch.int64, device=CPU)
        queries = rows_of(tiles)
        for ends, step in ((self.lo[queries], 1), (self.hi[queries], -1)):
            change.index_add_(0, torch.searchsorted(rows, ends), torch.full_like(ends, step))
        return change.cumsum(0)[:-1] > 0

    def seeing(self, tiles: Tensor, rows: Tensor) -> Tensor:
        """Which of ``rows`` see some row of ``tiles``, bool ``[len(rows)]``. Both are increasing."""
        lo, hi = self.lo[rows], self.hi[rows]
        first, end = (torch.searchsorted(tiles, tile) for tile in (lo // TILE, (hi + TILE - 1) // TILE))
        return (lo < hi) & (first < end)


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
