"""Swaps tiles between ranks until no rank has too many pairs: the second step of ``balanced.py``."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from .filling import PERMILLE, Component, TileRange

_LIGHT, _ENDS = 6, 8  # ranks, and ends of pieces of each, that are compared for one swap
_SWAP_ROWS = 16  # what a swap costs besides its rows, in tiles of rows

# The cost of the last tile at an end of a piece, the piece, whether the end is ``hi``, and the piece's size.
_End = tuple[int, TileRange, bool, int]


@dataclass
class _Swap:
    """``count`` tiles at an end of ``mine`` for as many at an end of ``theirs``, a piece of rank ``other``."""

    score: int  # what it costs for what it gains
    other: int
    mine: tuple[TileRange, bool]
    theirs: tuple[TileRange, bool]
    count: int
    gain: int


class Level:
    """Swaps tiles between ranks, until no rank has too many pairs."""

    def __init__(self, below: list[int], ranks: list[list[TileRange]]) -> None:
        self.below, self.ranks = below, ranks
        self.loads = [sum(below[p.hi] - below[p.lo] for p in pieces) for pieces in ranks]
        self.mean = sum(self.loads) // len(ranks)
        self.limit = self.mean + self.mean * PERMILLE // 1000
        self._known: dict[int, dict[Component, list[TileRange]]] = {}
        self._known_ends: dict[int, dict[tuple[bool, bool], list[_End]]] = defaultdict(dict)

    def run(self) -> None:
        for _ in range(8 * len(self.ranks)):
            rank = max(range(len(self.ranks)), key=self.loads.__getitem__)
            if self.loads[rank] <= self.limit or (swap := self._best(rank)) is None:
                break
            for giver, taker, (piece, at_hi) in (
                (rank, swap.other, swap.mine),
                (swap.other, rank, swap.theirs),
            ):
                self.ranks[taker].append(piece.take(swap.count, at_hi))
                if not piece.size:
                    self.ranks[giver].remove(piece)
                self._known.pop(giver, None)
                self._known_ends.pop(giver, None)
            self.loads[rank] -= swap.gain
            self.loads[swap.other] += swap.gain

    def _best(self, rank: int) -> _Swap | None:
        """The swap of ``rank`` with one of the lightest ranks that adds the fewest rows for the pairs it moves.

        It should move half of what is too much. If none does, it may be with more ranks, then at any end of a piece,
        and then move less.
        """
        light = sorted((load, other) for other, load in enumerate(self.loads) if load < self.mean)
        half = (self.loads[rank] - self.limit) // 2
        near, more = light[:_LIGHT], light[: 4 * _LIGHT]
        for others, any_end, least in (
            (near, False, half),
            (near, True, half),
            (more, True, half // 8),
            (light, True, 0),
        ):
            best: _Swap | None = None
            for load, other in others:
                most = min(self.loads[rank] - self.mean, self.limit - load)
                if most > least:
                    best = self._with(rank, other, least, most, any_end, best)
            if best is not None:
                return best
        return None

    def _with(self, rank: int, other: int, least: int, most: int, any_end: bool, best: _Swap | None) -> _Swap | None:
        """The better one of ``best`` and the swaps with ``other`` that move from ``least`` to ``most`` pairs."""
        theirs = self._ends(other, False, any_end)
        for cost, piece, at_hi, size in self._ends(rank, True, any_end):
            for less, their, their_hi, their_size in theirs:
                if less >= cost:
                    break
                if cost - less > most or (at_most := (cost - less) * min(size, their_size)) <= least:
                    continue
                if best is not None and (_SWAP_ROWS << 40) // min(most, at_most) >= best.score:
                    continue
                count, gain = self._count(piece, at_hi, their, their_hi, most)
                if gain <= least or (best is not None and (_SWAP_ROWS << 40) // gain >= best.score):
                    continue
                rows = self._rows(rank, other, piece, at_hi, count) + self._rows(other, rank, their, their_hi, count)
                score = ((max(0, rows) + _SWAP_ROWS) << 40) // gain
                if best is None or score < best.score:
                    best = _Swap(score, other, (piece, at_hi), (their, their_hi), count, gain)
        return best

    def _ends(self, rank: int, dense: bool, any_end: bool) -> list[_End]:
        """The densest or the sparsest ends of the rank's pieces."""
        known = self._known_ends[rank]
        if (dense, any_end) not in known:
            f, found = self.below, list[_End]()
            for p in self.ranks[rank]:
                if any_end or dense != p.of.dense_first:
                    found.append((f[p.hi] - f[p.hi - 1], p, True, p.size))
                if any_end or dense == p.of.dense_first:
                    found.append((f[p.lo + 1] - f[p.lo], p, False, p.size))
            found.sort(key=lambda end: (end[0], end[1].lo), reverse=dense)
            known[dense, any_end] = found if any_end else found[:_ENDS]
        return known[dense, any_end]

    def _count(self, a: TileRange, a_hi: bool, b: TileRange, b_hi: bool, most: int) -> tuple[int, int]:
        """How many tiles of ``a`` to swap for tiles of ``b`` without moving more than ``most`` pairs, and the pairs."""
        f, low, high = self.below, 1, min(a.size, b.size)

        def gain(n: int) -> int:
            given = f[a.hi] - f[a.hi - n] if a_hi else f[a.lo + n] - f[a.lo]
            return given - (f[b.hi] - f[b.hi - n] if b_hi else f[b.lo + n] - f[b.lo])

        if (all_tiles := gain(high)) <= most:
            return high, all_tiles
        while low + 1 < high:
            n = (low + high) // 2
            low, high = (n, high) if gain(n) <= most else (low, n)
        return low, gain(low)

    def _rows(self, giver: int, taker: int, piece: TileRange, at_hi: bool, count: int) -> int:
        """How many more rows, in tiles, both ranks need once ``count`` tiles of ``piece`` have moved."""
        at_depth = at_hi != piece.of.dense_first  # whether the tiles are those furthest from the sparse end
        left = 0 if count == piece.size else piece.depth - count if at_depth else piece.depth
        moved = piece.depth if at_depth else piece.depth - piece.size + count
        own, others = self._by_component(giver)[piece.of], self._by_component(taker).get(piece.of)
        second = own[1].depth if len(own) > 1 else 0
        after = max(left, second if own[0] is piece else own[0].depth)
        before = others[0].depth if others else 0
        return after - own[0].depth + max(moved, before) - before

    def _by_component(self, rank: int) -> dict[Component, list[TileRange]]:
        """The rank's pieces of each component, the deepest first."""
        if rank not in self._known:
            found = defaultdict[Component, list[TileRange]](list)
            for piece in self.ranks[rank]:
                found[piece.of].append(piece)
            self._known[rank] = {c: sorted(pieces, key=lambda p: -p.depth) for c, pieces in found.items()}
        return self._known[rank]
