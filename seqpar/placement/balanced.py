"""The layout of ``Sharding.balanced``: ranges of positions for each rank, chosen for one mask.

Every rank gets the same number of tokens and of visible pairs of a query and a key, in a few ranges, and few keys of
other ranks. The layout is made of tiles of ``TILE`` consecutive tokens, so a kernel computes few pairs that are not
visible.

*What costs rows.* A *component* is a range of positions that no query sees out of or into, such as a document. In a
causal document of L tokens, a rank whose last query is at depth D needs D rows. So the ranks that hold tokens of the
document receive ``sum(D) - L`` rows together. A rank with a deep piece can hold every earlier piece without more rows.

*Two ends.* So few ranks should hold the deep ends of long documents, and each should hold many tokens there. The ranks
are filled one after another. With ``t`` tokens and ``a`` pairs still to be given, a rank gets ``x`` tokens of the
densest end that is left, and ``h`` tokens of a sparse one, the head of the same document if it is free:

    x + h = t                                 tokens
    pairs(dense end, x) + pairs(head, h) = a  pairs

Whole short documents, the sparsest first, take the place of the head as far as they fit.

*Levelling.* Tiles are coarse, so some ranks are left with a few percent too many pairs. They swap tiles with ranks that
have too few, wherever that adds the fewest rows.

Similar are the heap of MagiAttention's dispatch solver (Zewei et al., 2025), which gives chunks of equal size to the
rank with the least work, the exchange of chunks in FlashMask's (Wang et al., 2025) context parallelism, and dynamic
context parallelism in Megatron (2026). They count pairs, and not rows.

All numbers are integers, so every rank and machine finds the same layout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray

from ..masks.mask import Mask
from ..masks.runs import Runs, keys_below_line
from .layout import Assigned, Layout, shard_ranges, split_range

TILE = 128
_FEWEST_TILES = 4  # of a rank
_MOST_TILES = 1 << 17  # of a sequence: smaller tiles take too long
_PERMILLE = 19  # by how much a rank's pairs, or tokens, may exceed the mean
_NEAR = 12  # pieces that are compared for one choice
_LIGHT, _ENDS = 6, 8  # ranks, and ends of pieces of each, that are compared for one swap
_DEEP = 4  # tiles at the dense end by which long pieces are compared: the last tile may hold another document
_SWAP_ROWS = 8  # what a swap costs besides its rows, in tiles of rows

Array = NDArray[np.int64]


def balanced_layout(mask: Mask, seq_len: int, ranks: int, together: int = 1, per_host: int = 0) -> Layout:
    """A layout in which every rank has the same number of tokens and of visible pairs.

    Args:
        mask: which keys each query sees.
        seq_len: tokens of the full sequence.
        ranks: the number of ranks.
        together: how many consecutive ranks attend with the same tokens, because an all-to-all or tensor parallelism
            joins them. Each such group gets equal pairs, and its tokens are cut evenly over its ranks.
        per_host: how many consecutive ranks share a host; 0: all.

    Returns:
        "contiguous" or "zigzag" where that is balanced, or where a rank has fewer than four tiles, else an
        ``Assigned``.
    """
    mask.check_length(seq_len)
    groups, pairs = ranks // together, _Pairs(mask, seq_len)

    def is_balanced(most: int) -> bool:
        return most * groups * 1000 <= pairs.total * (1000 + _PERMILLE)

    names: tuple[Layout, ...] = ("contiguous", "zigzag")
    for name in names:
        by_rank = [shard_ranges(seq_len, ranks, rank, name) for rank in range(ranks)]
        joined = [list(chain(*by_rank[i : i + together])) for i in range(0, ranks, together)]
        if is_balanced(max(pairs.of(joined))):
            return name
    if seq_len < _FEWEST_TILES * TILE * ranks:
        return "zigzag"
    tile = TILE
    while seq_len % (tile * groups) and seq_len * _PERMILLE < 1000 * tile * groups:  # groups may differ by one tile
        tile //= 2
    best: tuple[int, list[list[_Piece]], int] | None = None
    while tile and (best is None or (not is_balanced(best[0]) and seq_len // tile < _MOST_TILES)):
        below = pairs.below(np.minimum(np.arange(-(-seq_len // tile) + 1) * tile, seq_len)).tolist()
        filled = _fill(below, _components(pairs, tile, below), groups)
        worst = _Level(below, filled).run()
        if best is None or worst < best[0]:
            best = worst, filled, tile
        tile //= 2
    assert best is not None
    _, pieces, tile = best
    numbered = _numbered(pieces, max(1, per_host // together) if per_host else groups)
    return Assigned(tuple(chain.from_iterable(_cut(x, tile, seq_len, together) for x in numbered)))


class _Pairs:
    """The visible pairs of a mask, at a cost that does not grow with the tokens; the sum over its batch rows."""

    def __init__(self, mask: Mask, seq_len: int) -> None:
        self.seq_len, self.rows = seq_len, mask.runs(seq_len)
        self._before = []  # of each row, the pairs of the queries before each run
        for runs in self.rows:
            count = np.diff(np.append(np.minimum(runs.start, seq_len), seq_len))
            self._before.append(np.append(0, np.cumsum(self._seen(runs, np.arange(len(runs)), count))))

    def _seen(self, runs: Runs, run: Array, count: Array) -> Array:
        """The pairs of the first ``count`` queries of each ``run``."""
        hi = keys_below_line(runs.hi[run], runs.hi_step[run], count, self.seq_len)
        return hi - keys_below_line(runs.lo[run], runs.lo_step[run], count, self.seq_len)

    @property
    def total(self) -> int:
        return sum(int(before[-1]) for before in self._before)

    def below(self, x: Array) -> Array:
        """The pairs of the queries at the positions below each ``x``."""
        total = np.zeros(len(x), dtype=np.int64)
        for runs, before in zip(self.rows, self._before, strict=True):
            run = np.searchsorted(runs.start, x, side="right") - 1
            total += before[run] + self._seen(runs, run, x - runs.start[run])
        return total

    def of(self, shards: list[list[range]]) -> list[int]:
        """The pairs of the queries of each shard."""
        edges = [(r.start, r.stop) for ranges in shards for r in ranges]
        pairs = np.diff(self.below(np.array(edges, dtype=np.int64).reshape(-1)).reshape(-1, 2)).reshape(-1)
        owner = np.repeat(np.arange(len(shards)), [*map(len, shards)])
        return [int(pairs[owner == i].sum()) for i in range(len(shards))]

    def component_starts(self) -> Array:
        """The positions, besides 0, that no interval crosses: queries before and after see no keys of each other."""
        at = np.unique(np.concatenate([runs.start for runs in self.rows]))
        at = at[(at > 0) & (at < self.seq_len)]
        for runs in self.rows:
            last, first = (np.searchsorted(runs.start, x, side="right") - 1 for x in (at - 1, at))
            hi = runs.hi[last] + runs.hi_step[last] * (at - 1 - runs.start[last])
            lo = runs.lo[first] + runs.lo_step[first] * (at - runs.start[first])
            at = at[(hi <= at) & (lo >= at)]
        return at


@dataclass(eq=False)
class _Component:
    """The tiles ``lo <= i < hi`` of one component. Its dense end is its last tiles, or its first."""

    lo: int
    hi: int
    dense_first: bool


def _components(pairs: _Pairs, tile: int, below: list[int]) -> list[_Component]:
    """The components in whole tiles. A tile with two of them belongs to the one whose queries there see more keys."""
    at = pairs.component_starts()
    before, here, after = (pairs.below(at + i) for i in (-1, 0, 1))
    cuts = np.where(here - before >= after - here, -(-at // tile), at // tile)
    edges = [0, *np.unique(cuts[(cuts > 0) & (cuts < len(below) - 1)]).tolist(), len(below) - 1]
    found = []
    for lo, hi in pairwise(edges):
        half = (hi - lo) // 2
        found.append(_Component(lo, hi, below[lo + half] - below[lo] > below[hi] - below[hi - half]))
    return found


@dataclass(eq=False)
class _Piece:
    """Tiles ``lo <= i < hi`` of a component: of a rank, or not yet given to one."""

    lo: int
    hi: int
    of: _Component

    @property
    def size(self) -> int:
        return self.hi - self.lo

    @property
    def depth(self) -> int:
        """How many tiles of the component's sparse end a rank with this piece sees, the piece included."""
        return self.of.hi - self.lo if self.of.dense_first else self.hi - self.of.lo

    def take(self, count: int, at_hi: bool) -> _Piece:
        """Cut off ``count`` tiles."""
        if at_hi:
            self.hi -= count
            return _Piece(self.hi, self.hi + count, self.of)
        self.lo += count
        return _Piece(self.lo - count, self.lo, self.of)


def _fill(below: list[int], components: list[_Component], ranks: int) -> list[list[_Piece]]:
    """The pieces of each rank, filled one after another."""
    filler, tiles = _Filler(below, components, ranks), len(below) - 1
    filled, left = list[list[_Piece]](), below[-1]
    for rank in range(ranks - 1):
        pieces = filler.fill(tiles // ranks + (rank < tiles % ranks), left // (ranks - rank))
        filled.append(pieces)
        left -= sum(map(filler.cost, pieces))
    return [*filled, [*filler.long, *filler.short]]


class _Filler:
    """The pieces that no rank has yet: ``short`` ones, which fit on a rank, sorted by their mean cost, and ``long``."""

    def __init__(self, below: list[int], components: list[_Component], ranks: int) -> None:
        self.below = below
        self.tiles, self.mean = -(-(len(below) - 1) // ranks), below[-1] // ranks
        self.long: list[_Piece] = []
        self.short: list[_Piece] = []
        self.means: list[int] = []  # of ``short``
        whole = [_Piece(c.lo, c.hi, c) for c in components]
        short = self._merged(piece for piece in whole if not self._is_long(piece))
        self.long = [piece for piece in whole if self._is_long(piece)]
        self.short = sorted(short, key=lambda piece: (self._mean(piece), piece.lo))
        self.means = [self._mean(piece) for piece in self.short]

    def _is_long(self, piece: _Piece) -> bool:
        return piece.size > self.tiles or self.cost(piece) > self.mean

    def _merged(self, short: Iterable[_Piece]) -> list[_Piece]:
        """Sparse neighbours as one piece: fewer ranges, in which a cut costs few rows."""
        merged, before = list[_Piece](), 0
        for piece in short:
            sparse = self._mean(piece) * self.tiles * 8 <= self.mean
            if before and sparse and merged[-1].hi == piece.lo and (piece.hi - merged[-1].lo) * 8 <= self.tiles:
                lo = merged.pop().lo
                piece = _Piece(lo, piece.hi, _Component(lo, piece.hi, False))
            merged.append(piece)
            before = sparse
        return merged

    def cost(self, piece: _Piece) -> int:
        return self.below[piece.hi] - self.below[piece.lo]

    def _mean(self, piece: _Piece) -> int:
        return self.cost(piece) // piece.size

    def _end(self, piece: _Piece, count: int, dense: bool) -> int:
        """The cost of ``count`` tiles at the dense or the sparse end."""
        if dense != piece.of.dense_first:
            return self.below[piece.hi] - self.below[piece.hi - count]
        return self.below[piece.lo + count] - self.below[piece.lo]

    def fill(self, t: int, a: int) -> list[_Piece]:
        """``t`` tiles that cost about ``a``."""
        pieces: list[_Piece] = []
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

    def _fits(self, piece: _Piece, t: int, a: int) -> bool:
        """Whether the whole piece leaves enough for the sparsest tiles that could follow."""
        least = self.means[0] if self.means else min([self._end(p, 1, False) for p in self.long], default=0)
        return piece.size <= t and self.cost(piece) + (t - piece.size) * least <= a

    def _two_ends(self, piece: _Piece, t: int, a: int) -> list[_Piece]:
        """The dense end of ``piece``, and sparse tiles: whole short pieces, and the head of ``piece``."""
        pieces: list[_Piece] = []

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
            if n == t and (off * 1000 <= self.mean * _PERMILLE or not others):
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

    def _reaches(self, piece: _Piece, first: _Piece, t: int, a: int) -> bool:
        """Whether ``first``, and then the dense end of ``piece``, cost at least ``a``."""
        left = t - first.size
        return left >= 0 and self._end(piece, min(left, piece.size), True) >= a - self.cost(first)

    def _solve(self, dense: _Piece, sparse: _Piece, t: int, a: int) -> int:
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

    def _round(self, piece: _Piece, x: int, t: int, a: int, off: int, whole: Callable[[int], None]) -> int:
        """``x``, or one tile more or less, with another whole short piece if the cost comes closer to ``a``."""
        best = None
        for index, short in enumerate(self.short[:_NEAR] if off * 4000 > self.mean * _PERMILLE else ()):
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
            fitting = (i for i in reversed(range(len(self.short))) if self._fits(self.short[i], t, a))
            return next(fitting, None)
        near = [i for i in self._around(t, a) if self._fits(self.short[i], t, a)]
        return min(near, key=lambda i: abs(self.means[i] * t - a), default=None)

    def _rest(self, t: int, a: int) -> list[_Piece]:
        """The last ``t`` tiles: both ends of the smallest short piece whose ends can cost ``a``."""

        def off(i: int) -> tuple[int, int]:
            low, high = (self._end(self.short[i], t, dense) for dense in (False, True))
            least = max(0, low - a, a - high)
            return least if least * 2000 > self.mean * _PERMILLE else 0, self.short[i].size

        large = [i for i in self._around(t, a) if self.short[i].size >= t]
        if not large:  # a part of the largest piece, or all of it
            index = max(range(len(self.short)), key=lambda i: (self.short[i].size, -i))
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

    def _pop(self, index: int) -> _Piece:
        self.means.pop(index)
        return self.short.pop(index)

    def _remove(self, piece: _Piece) -> None:
        if piece in self.long:
            self.long.remove(piece)
        else:
            self._pop(self.short.index(piece))

    def _keep(self, piece: _Piece) -> None:
        """Put what is left of ``piece`` back."""
        if not piece.size:
            return
        if self._is_long(piece):
            self.long.append(piece)
        else:
            index = bisect_left(self.means, self._mean(piece))
            self.means.insert(index, self._mean(piece))
            self.short.insert(index, piece)


_End = tuple[int, _Piece, bool]  # the cost of the last tile at an end of a piece, the piece, whether the end is ``hi``


@dataclass
class _Swap:
    """``count`` tiles at an end of ``mine`` for as many at an end of ``theirs``, a piece of rank ``other``."""

    score: int  # what it costs for what it gains
    other: int
    mine: tuple[_Piece, bool]
    theirs: tuple[_Piece, bool]
    count: int
    gain: int


class _Level:
    """Swaps tiles between ranks, until no rank has too many pairs."""

    def __init__(self, below: list[int], ranks: list[list[_Piece]]) -> None:
        self.below, self.ranks = below, ranks
        self.loads = [sum(below[p.hi] - below[p.lo] for p in pieces) for pieces in ranks]
        self.mean = below[-1] // len(ranks)
        self.limit = self.mean + self.mean * _PERMILLE // 1000
        self._known: dict[int, dict[_Component, list[_Piece]]] = {}

    def run(self) -> int:
        """Swap, and return the pairs of the rank with the most."""
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
            self.loads[rank] -= swap.gain
            self.loads[swap.other] += swap.gain
        return max(self.loads)

    def _best(self, rank: int) -> _Swap | None:
        """The swap of ``rank`` with one of the lightest ranks that adds the fewest rows for the pairs it moves.

        If there is none at the ends where most is gained, then one at any end, then one with any rank.
        """
        light = sorted((load, other) for other, load in enumerate(self.loads) if load < self.mean)
        for others, any_end in ((light[:_LIGHT], False), (light[: 4 * _LIGHT], True), (light, True)):
            best: _Swap | None = None
            for load, other in others:
                most = min(self.loads[rank] - self.mean, self.limit - load)
                best = self._with(rank, other, most, any_end, best)
            if best is not None:
                return best
        return None

    def _with(self, rank: int, other: int, most: int, any_end: bool, best: _Swap | None) -> _Swap | None:
        """The better one of ``best`` and the swaps with ``other`` that move at most ``most`` pairs."""
        theirs = self._ends(other, False, any_end)
        for cost, piece, at_hi in self._ends(rank, True, any_end):
            for less, their, their_hi in theirs:
                if less >= cost:
                    break
                at_most = min(most, (cost - less) * min(piece.size, their.size))
                if cost - less > most or (best is not None and (_SWAP_ROWS << 40) // at_most >= best.score):
                    continue
                count, gain = self._count(piece, at_hi, their, their_hi, most)
                if gain <= 0 or (best is not None and (_SWAP_ROWS << 40) // gain >= best.score):
                    continue
                rows = self._rows(rank, other, piece, at_hi, count) + self._rows(other, rank, their, their_hi, count)
                score = ((max(0, rows) + _SWAP_ROWS) << 40) // gain
                if best is None or score < best.score:
                    best = _Swap(score, other, (piece, at_hi), (their, their_hi), count, gain)
        return best

    def _ends(self, rank: int, dense: bool, any_end: bool) -> list[_End]:
        """The densest or the sparsest ends of the rank's pieces."""
        f, found = self.below, list[_End]()
        for p in self.ranks[rank]:
            if any_end or dense != p.of.dense_first:
                found.append((f[p.hi] - f[p.hi - 1], p, True))
            if any_end or dense == p.of.dense_first:
                found.append((f[p.lo + 1] - f[p.lo], p, False))
        return sorted(found, key=lambda end: (end[0], end[1].lo), reverse=dense)[:_ENDS]

    def _count(self, a: _Piece, a_hi: bool, b: _Piece, b_hi: bool, most: int) -> tuple[int, int]:
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

    def _rows(self, giver: int, taker: int, piece: _Piece, at_hi: bool, count: int) -> int:
        """How many more rows, in tiles, both ranks need once ``count`` tiles of ``piece`` have moved."""
        at_depth = at_hi != piece.of.dense_first  # whether the tiles are those furthest from the sparse end
        left = 0 if count == piece.size else piece.depth - count if at_depth else piece.depth
        moved = piece.depth if at_depth else piece.depth - piece.size + count
        own, others = self._by_component(giver)[piece.of], self._by_component(taker).get(piece.of)
        second = own[1].depth if len(own) > 1 else 0
        after = max(left, second if own[0] is piece else own[0].depth)
        before = others[0].depth if others else 0
        return after - own[0].depth + max(moved, before) - before

    def _by_component(self, rank: int) -> dict[_Component, list[_Piece]]:
        """The rank's pieces of each component, the deepest first."""
        if rank not in self._known:
            found = defaultdict[_Component, list[_Piece]](list)
            for piece in self.ranks[rank]:
                found[piece.of].append(piece)
            self._known[rank] = {c: sorted(pieces, key=lambda p: -p.depth) for c, pieces in found.items()}
        return self._known[rank]


def _numbered(ranks: list[list[_Piece]], per_host: int) -> list[list[_Piece]]:
    """The ranks in an order in which holders of one component share hosts: a row is sent to a host once."""

    def deepest(pieces: list[_Piece]) -> _Piece:
        return max(pieces, key=lambda p: (p.depth - p.size, p.depth, -p.lo))

    by_component = defaultdict[_Component, list[list[_Piece]]](list)
    for pieces in sorted(ranks, key=lambda pieces: -deepest(pieces).depth):
        by_component[deepest(pieces).of].append(pieces)
    hosts: list[list[list[_Piece]]] = []
    rests = []
    for group in by_component.values():
        full = len(group) // per_host * per_host
        hosts += [group[i : i + per_host] for i in range(0, full, per_host)]
        rests.append(group[full:])
    most, shared = -(-len(ranks) // per_host), list[list[list[_Piece]]]()
    for rest in sorted(rests, key=len, reverse=True):  # the largest first, into the first host with room
        room = next((host for host in shared if len(host) + len(rest) <= per_host), None)
        if room is None and len(hosts) + len(shared) < most:
            shared.append(room := [])
        if room is not None:
            room += rest
            continue
        for host in shared:  # no host has room for all of them
            fits = per_host - len(host)
            host += rest[:fits]
            rest = rest[fits:]
    return list(chain.from_iterable((*hosts, *sorted(shared, key=len, reverse=True))))


def _cut(pieces: list[_Piece], tile: int, seq_len: int, parts: int) -> list[tuple[range, ...]]:
    """The tokens of ``pieces`` in increasing order, cut evenly over ``parts`` ranks."""
    ranges = [range(p.lo * tile, min(p.hi * tile, seq_len)) for p in sorted(pieces, key=lambda p: p.lo)]
    starts = list(accumulate(map(len, ranges), initial=0))
    found = []
    for part in range(parts):
        mine = split_range(starts[-1], parts, part)
        each = (
            r[max(0, mine.start - start) : max(0, mine.stop - start)] for r, start in zip(ranges, starts, strict=False)
        )
        found.append(tuple(r for r in each if r))
    return found
