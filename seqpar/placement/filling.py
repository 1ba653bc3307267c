"""Fills ranks with the tiles of a mask's components: the two equations of ``balanced.py``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

PERMILLE = 19  # by how much a rank's pairs, or tokens, may exceed the mean
_NEAR = 12  # pieces that are compared for one choice
_FEWEST = 8  # short pieces for a rank, at least
_DEEP = 4  # tiles at the dense end by which long pieces are compared: the last tile may hold another document


@dataclass(eq=False, slots=True)
class Component:
    """The tiles ``lo <= i < hi`` of one component. Its dense end is its last tiles, or its first."""

    lo: int
    hi: int
    dense_first: bool


@dataclass(eq=False, slots=True)
class TileRange:
    """Tiles ``lo <= i < hi`` of a component: of a rank, or not yet given to one."""

    lo: int
    hi: int
    of: Component

    @property
    def size(self) -> int:
        return self.hi - self.lo

    @property
    def depth(self) -> int:
        """How many tiles of the component's sparse end a rank with this piece sees, the piece included."""
        return self.of.hi - self.lo if self.of.dense_first else self.hi - self.of.lo

    def take(self, count: int, at_hi: bool) -> TileRange:
        """Cut off ``count`` tiles."""
        if at_hi:
            self.hi -= count
            return TileRange(self.hi, self.hi + count, self.of)
        self.lo += count
        return TileRange(self.lo - count, self.lo, self.of)


# The first tile of a component, the one past its last, and whether the dense end comes first.
Bounds = tuple[int, int, bool]


def joined(components: list[Bounds], below: list[int], ranks: int) -> list[TileRange]:
    """The components as pieces. Small neighbours are one piece: fewer ranges, and a cut between two costs no rows."""
    tiles, mean = -(-(len(below) - 1) // ranks), below[-1] // ranks
    found, small = list[TileRange](), False  # whether the last piece is small
    for lo, hi, dense_first in components:
        is_short = hi - lo <= tiles and below[hi] - below[lo] <= mean
        if is_short and small and (hi - found[-1].lo) * _FEWEST <= tiles:
            last = found[-1]
            last.hi = last.of.hi = hi
            last.of.dense_first = False
        else:
            found.append(TileRange(lo, hi, Component(lo, hi, dense_first)))
        small = is_short
    return found


def fill(below: list[int], pieces: list[TileRange], sizes: list[int]) -> list[list[TileRange]]:
    """The part of ``pieces`` that each rank gets, filled one after another: ``sizes`` tiles that cost equally much."""
    filler, ranks = _Filler(below, pieces, len(sizes)), len(sizes)
    filled, left = list[list[TileRange]](), sum(map(filler.cost, pieces))
    for rank in range(ranks - 1):
        filled.append(filler.fill(sizes[rank], left // (ranks - rank)))
        left -= sum(map(filler.cost, filled[-1]))
    return [*filled, [*filler.long, *filler.short]]


class _Filler:
    """The pieces that no rank has yet: ``short`` ones, which fit on a rank, sorted by their mean cost, and ``long``."""

    def __init__(self, below: list[int], pieces: list[TileRange], ranks: int) -> None:
        self.below = below
        self.tiles, self.mean = -(-sum(p.size for p in pieces) // ranks), sum(map(self.cost, pieces)) // ranks
        self.long: list[TileRange] = []
        self.short: list[TileRange] = []
        self.means: list[int] = []  # of ``short``
        short = list[TileRange]()
        for piece in pieces:
            (self.long if self._is_long(piece) else short).append(piece)
        by_mean = sorted((self._mean(piece), piece.lo, piece) for piece in self._merged(short))
        self.short, self.means = [piece for *_, piece in by_mean], [mean for mean, *_ in by_mean]
        self._prefixes: tuple[list[int], list[int]] | None = None  # of ``_sparsest``, until ``short`` changes

    def _is_long(self, piece: TileRange) -> bool:
        return piece.size > self.tiles or self.cost(piece) > self.mean

    def _merged(self, short: Iterable[TileRange]) -> list[TileRange]:
        """Small neighbours as one piece, as in ``joined``, for masks whose components were divided into classes."""
        merged = list[TileRange]()
        for piece in short:
            if merged and merged[-1].hi == piece.lo and (piece.hi - merged[-1].lo) * _FEWEST <= self.tiles:
                lo = merged.pop().lo
                piece = TileRange(lo, piece.hi, Component(lo, piece.hi, False))
            merged.append(piece)
        return merged

    def cost(self, piece: TileRange) -> int:
        return self.below[piece.hi] - self.below[piece.lo]

    def _mean(self, piece: TileRange) -> int:
        return self.cost(piece) // piece.size

    def _end(self, piece: TileRange, count: int, dense: bool) -> int:
        """The cost of ``count`` tiles at the dense or the sparse end."""
        if dense != piece.of.dense_first:
            return self.below[piece.hi] - self.below[piece.hi - count]
        return self.below[piece.lo + count] - self.below[piece.lo]

    def fill(self, t: int, a: int) -> list[TileRange]:
        """``t`` tiles that cost about ``a``."""
        pieces: list[TileRange] = []
        while t:
            if self.long:
                piece = max(self.long, key=lambda p: (self._end(p, min(_DEEP, p.size), True), p.lo))
                self.long.remove(piece)
                if not self._fits(piece, t, a):
                    return pieces + self._two_ends(piece, t, a)
            elif (index := self._nearest(t, a, not pieces)) is not None:
                piece = self._pop(index)
            else:
                return pieces + self._rest(t, a)
            pieces.append(piece)
            t, a = t - piece.size, a - self.cost(piece)
        return pieces

    def _fits(self, piece: TileRange, t: int, a: int, index: int | None = None) -> bool:
        """Whether the whole piece, ``short[index]`` or a long one, leaves enough for the sparsest tiles that follow."""
        left, a = t - piece.size, a - self.cost(piece)
        if left < 0 or a < 0:
            return False
        if not left:
            return True
        sizes, costs = self._sparsest(t)  # of the first pieces together
        if index is not None and index < len(sizes) and sizes[index] <= t:  # the piece is one of them
            left, a = t, a + self.cost(piece)
        if (last := bisect_left(sizes, left)) < len(sizes):
            missing, short = sizes[last] - left, self.short[last]
            return costs[last] - missing * self.cost(short) // short.size <= a
        if sizes:
            left, a = left - sizes[-1], a - costs[-1]
        return left * min([self._end(p, 1, False) for p in self.long], default=0) <= a

    def _sparsest(self, t: int) -> tuple[list[int], list[int]]:
        """The tiles, and the costs, of the first short piece, of the first two and so on, to at least ``t`` tiles."""
        known = self._prefixes
        if known is None or (known[0][-1:] < [t] and len(known[0]) < len(self.short)):
            sizes, costs, size, cost = list[int](), list[int](), 0, 0
            for piece in self.short:
                size, cost = size + piece.size, cost + self.cost(piece)
                sizes.append(size)
                costs.append(cost)
                if size >= t:
                    break
            known = self._prefixes = sizes, costs
        return known

    def _two_ends(self, piece: TileRange, t: int, a: int) -> list[TileRange]:
        """The dense end of ``piece``, and sparse tiles: whole short pieces, and the head of ``piece``."""
        pieces: list[TileRange] = []

        def whole(index: int) -> None:
            nonlocal t, a
            pieces.append(self._pop(index))
            t, a = t - pieces[-1].size, a - self.cost(pieces[-1])

        taken = -1
        while taken != len(pieces) and self.short:  # whole short pieces instead of the head
            taken, n = len(pieces), min(t, piece.size)
            spare = t - self._solve(piece, piece, n, a)
            room = max(1, spare // 2)  # with sparser tiles the dense end is larger: solve again
            while room > 0 and self.short and self.short[0].size <= spare and self._reaches(piece, self.short[0], t, a):
                room, spare = room - self.short[0].size, spare - self.short[0].size
                whole(0)
        while t:
            n = min(t, piece.size)
            x = self._solve(piece, piece, n, a)
            off = self._end(piece, x, True) + self._end(piece, n - x, False) - a
            others = [*self.short[:_NEAR], *self.long]
            if n == t and (off * 1000 <= self.mean * PERMILLE or not others):
                x = self._round(piece, x, t, a, abs(off), whole)
                pieces += [piece.take(x, not piece.of.dense_first), piece.take(t - x, piece.of.dense_first)]
                break
            # The piece is too small, or too dense even at its head: the sparsest of the other pieces.
            sparse = min(others, key=lambda p: ((self._end(p, min(t, p.size), False) << 10) // min(t, p.size), p.lo))
            self._remove(sparse)
            if sparse.size <= t and (self._reaches(piece, sparse, t, a) or sparse.size + piece.size < t):
                pieces.append(sparse)
                t, a = t - sparse.size, a - self.cost(sparse)
                continue
            x = max(self._solve(piece, sparse, t, a), t - sparse.size)
            pieces += [piece.take(x, not piece.of.dense_first), sparse.take(t - x, sparse.of.dense_first)]
            self._keep(sparse)
            break
        self._keep(piece)
        return [p for p in pieces if p.size]

    def _reaches(self, piece: TileRange, first: TileRange, t: int, a: int) -> bool:
        """Whether ``first``, and then the dense end of ``piece``, cost at least ``a``."""
        left = t - first.size
        return left >= 0 and self._end(piece, min(left, piece.size), True) >= a - self.cost(first)

    def _solve(self, dense: TileRange, sparse: TileRange, t: int, a: int) -> int:
        """The two equations: how many of ``t`` tiles come from the dense end, so that all cost about ``a``."""

        def excess(x: int) -> int:
            return self._end(dense, x, True) + self._end(sparse, t - x, False) - a

        low, high = 0 if dense is sparse else max(0, t - sparse.size), min(t, dense.size)
        if high <= low or excess(low) >= 0:
            return min(low, high)
        while low + 1 < high:
            x = (low + high) // 2
            low, high = (x, high) if excess(x) <= 0 else (low, x)
        return low if -excess(low) <= excess(high) else high

    def _round(self, piece: TileRange, x: int, t: int, a: int, off: int, whole: Callable[[int], None]) -> int:
        """``x``, or one tile more or less, with another whole short piece if the cost comes closer to ``a``."""
        best = None
        for index, short in enumerate(self.short[:_NEAR] if off * 4000 > self.mean * PERMILLE else ()):
            for y in range(max(0, x - 1), min(x + 1, t - short.size, piece.size) + 1):
                ends = self._end(piece, y, True) + self._end(piece, t - y - short.size, False)
                if abs(ends + self.cost(short) - a) < off:
                    best, off = (index, y), abs(ends + self.cost(short) - a)
        if best is None:
            return x
        whole(best[0])
        return best[1]

    def _nearest(self, t: int, a: int, first: bool) -> int | None:
        """The index of the short piece that a rank without long pieces takes next: at first the densest that fits, then
        one whose mean cost is nearest to the mean cost of what is missing."""
        if first:
            fitting = (i for i in reversed(range(len(self.short))) if self._fits(self.short[i], t, a, i))
            return next(fitting, None)
        near = self._around(t, a)
        off = [abs(mean * t - a) for mean in self.means[near.start : near.stop]]
        order = (near[i] for i in sorted(range(len(off)), key=off.__getitem__))
        return next((i for i in order if self._fits(self.short[i], t, a, i)), None)

    def _rest(self, t: int, a: int) -> list[TileRange]:
        """The last ``t`` tiles: both ends of the smallest short piece whose ends can cost ``a``."""

        def off(i: int) -> tuple[int, int]:
            low, high = (self._end(self.short[i], t, dense) for dense in (False, True))
            least = max(0, low - a, a - high)
            return least if least * 2000 > self.mean * PERMILLE else 0, self.short[i].size

        large = [i for i in self._around(t, a) if self.short[i].size >= t]
        if not large:  # the piece with the nearest mean cost, and more
            index = min(range(len(self.short)), key=lambda i: abs(self.means[i] * t - a))
            if self.short[index].size <= t:
                piece = self._pop(index)
                return [piece, *self.fill(t - piece.size, a - self.cost(piece))]
            large = [index]
        piece = self._pop(min(large, key=off))
        x = self._solve(piece, piece, t, a)
        pieces = [piece.take(x, not piece.of.dense_first), piece.take(t - x, piece.of.dense_first)]
        self._keep(piece)
        return [p for p in pieces if p.size]

    def _around(self, t: int, a: int) -> range:
        """The indices of short pieces whose mean cost is near ``a / t``."""
        at = bisect_left(self.means, a // t)
        return range(max(0, at - _NEAR), min(len(self.short), at + _NEAR))

    def _pop(self, index: int) -> TileRange:
        self._forget(index)
        self.means.pop(index)
        return self.short.pop(index)

    def _forget(self, index: int) -> None:
        """``short`` changes at ``index``."""
        if self._prefixes is not None and index < len(self._prefixes[0]):
            self._prefixes = None

    def _remove(self, piece: TileRange) -> None:
        if piece in self.long:
            self.long.remove(piece)
        else:
            self._pop(self.short.index(piece))

    def _keep(self, piece: TileRange) -> None:
        """Put what is left of ``piece`` back."""
        if not piece.size:
            return
        if self._is_long(piece):
            self.long.append(piece)
        else:
            index = bisect_left(self.means, self._mean(piece))
            self._forget(index)
            self.means.insert(index, self._mean(piece))
            self.short.insert(index, piece)
