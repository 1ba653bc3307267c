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

*Several masks.* Near the start of a document, layers with a window see as much as the other layers. Beyond, each query
sees a full window. So the tiles are divided into those in which the window hides nothing, and the others, and each rank
gets equally many tokens and pairs of both kinds, by the steps above. Then it has equally many pairs of every mask. It
receives more rows, because documents are cut where their queries begin to see a full window.

Other layouts count pairs and not rows: the heap of MagiAttention (Tao and Huang, 2025) gives chunks of equal size to
the rank with the least work, FlashMask (Wang et al., 2024) then exchanges chunks, WLB-LLM (Wang et al., 2025,
arXiv:2503.17924) cuts every document into zigzag, and Megatron gives a document as many ranks as its length asks for.

All numbers are integers, so every rank and machine finds the same layout.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise, starmap
from math import lcm

import numpy as np

from ..masks.mask import Mask
from ..masks.runs import Array, Runs, keys_below_line
from .filling import PERMILLE, Bounds, Component, TileRange, fill, joined
from .layout import Assigned, Layout, shard_ranges, split_range
from .levelling import Level

TILE = 128
_FEWEST_TILES = 4  # of a rank; with fewer the layout is zigzag
_ENOUGH_TILES = 16  # of a rank: with fewer the tiles are smaller
_MOST_TILES = 1 << 18  # of a sequence: smaller tiles take too long


def balanced_layout(
    mask: Mask | Mapping[Mask, int], seq_len: int, ranks: int, ulysses: int = 1, per_host: int = 0
) -> Layout:
    """A layout in which every rank has the same number of tokens and of visible pairs.

    Args:
        mask: which keys each query sees, or the masks of a model's layers, each with the number of its layers.
        seq_len: tokens of the full sequence.
        ranks: the number of ranks.
        ulysses: how many consecutive ranks attend with the same tokens, because an all-to-all or tensor parallelism
            joins them. Each such group gets equal pairs, and its tokens are cut evenly over its ranks.
        per_host: how many consecutive ranks share a host; 0: all.

    Returns:
        "contiguous" or "zigzag" where that is balanced, or where a rank has fewer than four tiles, else an
        ``Assigned``.
    """
    weights, groups = {mask: 1} if isinstance(mask, Mask) else mask, ranks // ulysses
    for each in weights:
        each.check_length(seq_len)
    common = lcm(*(len(each.head_groups) or 1 for each in weights))  # so that every mask counts all heads
    of_masks = ((_Pairs(x, seq_len, common // (len(x.head_groups) or 1)), weight) for x, weight in weights.items())
    counted = sorted(of_masks, key=lambda x: -x[0].total)
    most_pairs, *others = (pairs for pairs, _ in counted)

    def busiest(shards: list[list[range]]) -> int:
        """The sum over the masks of the busiest rank's pairs, times the number of layers."""
        return sum(max(pairs.of(shards)) * weight for pairs, weight in counted)

    total = sum(pairs.total * weight for pairs, weight in counted)
    names: tuple[Layout, ...] = ("contiguous", "zigzag")
    most = dict[Layout, int]()
    for name in names:
        by_rank = [shard_ranges(seq_len, ranks, rank, name) for rank in range(ranks)]
        most[name] = busiest([list(chain(*by_rank[i : i + ulysses])) for i in range(0, ranks, ulysses)])
        if most[name] * groups * 1000 <= total * (1000 + PERMILLE):
            return name
    if seq_len < _FEWEST_TILES * TILE * ranks:
        return "zigzag"
    tile = TILE
    while tile > 1 and (
        seq_len < _ENOUGH_TILES * tile * groups or _difference(seq_len, tile, groups, ulysses) * ranks * 50 > seq_len
    ):
        tile //= 2
    best: tuple[int, list[list[TileRange]], list[list[range]]] | None = None
    enough = total * (1000 + PERMILLE * len(counted)) // (1000 * groups)
    while tile and (best is None or (best[0] > enough and seq_len // tile < _MOST_TILES >> 3 * len(others))):
        edges = np.minimum(np.arange(-(-seq_len // tile) + 1) * tile, seq_len)
        table, *fewer = (pairs.below(edges) for pairs in (most_pairs, *others))
        below: list[int] = table.tolist()
        if best is not None and not others:  # go on with smaller tiles
            filled = _halved(best[1], len(below) - 1)
        else:
            filled, end = [[] for _ in range(groups)], 0
            components = _components(most_pairs, tile, table)
            for pieces in _classes(components, table, fewer) if others else [joined(components, below, groups)]:
                first, end = end, end + sum(p.size for p in pieces)  # dealt to the ranks in turn
                sizes = [len(range(first, end)[(i - first) % groups :: groups]) for i in range(groups)]
                parts = fill(below, pieces, sizes)
                if others:
                    Level(below, parts).run()
                filled = [a + b for a, b in zip(filled, parts, strict=True)]
        Level(below, filled).run()
        shards = [_ranges(x, tile, seq_len) for x in filled]
        now = busiest(shards)
        if best is None or now < best[0] or not others:
            best = now, filled, shards
        tile //= 2
    assert best is not None
    now, filled, shards = best
    if now > min(most.values()):  # a single token may have more than a rank's share
        return min(names, key=most.__getitem__)
    order = _numbered(filled, max(1, per_host // ulysses) if per_host else groups)
    return Assigned(tuple(chain.from_iterable(_cut(shards[i], ulysses) for i in order)))


def pairs_of_ranks(mask: Mask, seq_len: int, shards: Sequence[Sequence[range]]) -> list[int]:
    """The visible pairs of the queries of each rank, whose positions are the ranges ``shards[rank]``; the sum over the
    mask's batch rows and groups of heads."""
    pairs = _Pairs(mask, seq_len)
    if all(r.step == 1 for ranges in shards for r in ranges):
        return pairs.of(shards)
    positions = [np.concatenate([np.arange(0), *map(np.asarray, ranges)]) for ranges in shards]
    return [int((pairs.below(x + 1) - pairs.below(x)).sum()) for x in positions]


def _difference(seq_len: int, tile: int, groups: int, ulysses: int) -> int:
    """By how many tokens two ranks differ at most: one group has a tile more, and one has the last tile, a part."""
    of_groups = (tile if -(-seq_len // tile) % groups else 0) + -seq_len % tile
    return -(-(of_groups + 2 * (ulysses - 1)) // ulysses)  # both groups may be cut into unequal parts


class _Pairs:
    """The visible pairs of a mask, at a cost that does not grow with the tokens; the sum over its batch rows and groups
    of heads, each pair counted ``times`` times."""

    def __init__(self, mask: Mask, seq_len: int, times: int = 1) -> None:
        self.seq_len, self.rows, self.times = seq_len, mask.runs(seq_len), times
        self._before = []  # of each row, the pairs of the queries before each run
        for runs in self.rows:
            count = np.diff(np.append(np.minimum(runs.start, seq_len), seq_len))
            self._before.append(np.append(0, np.cumsum(self._seen(runs, np.arange(len(runs)), count))))

    def _seen(self, runs: Runs, run: Array, count: Array) -> Array:
        """The pairs of the first ``count`` queries of each ``run``."""
        hi = keys_below_line(runs.hi[run], runs.hi_step[run], count, self.seq_len)
        return self.times * (hi - keys_below_line(runs.lo[run], runs.lo_step[run], count, self.seq_len))

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

    def of(self, shards: Sequence[Sequence[range]]) -> list[int]:
        """The pairs of the queries of each shard."""
        edges = [(r.start, r.stop) for ranges in shards for r in ranges]
        pairs = np.diff(self.below(np.array(edges, dtype=np.int64).reshape(-1)).reshape(-1, 2)).reshape(-1)
        before = np.append(0, np.cumsum(pairs))[np.append(0, np.cumsum([*map(len, shards)]))]
        found: list[int] = np.diff(before).tolist()
        return found

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


def _components(pairs: _Pairs, tile: int, below: Array) -> list[Bounds]:
    """The components in whole tiles. A tile with two of them belongs to the one whose queries there see more keys."""
    at = pairs.component_starts()
    before, here, after = pairs.below(np.concatenate([at - 1, at, at + 1])).reshape(3, -1)
    cuts = np.where(here - before >= after - here, -(-at // tile), at // tile)
    edges = np.concatenate([[0], np.unique(cuts[(cuts > 0) & (cuts < len(below) - 1)]), [len(below) - 1]])
    lo, hi = edges[:-1], edges[1:]
    half = (hi - lo) // 2
    dense_first = below[lo + half] - below[lo] > below[hi] - below[hi - half]
    return [*zip(lo.tolist(), hi.tolist(), dense_first.tolist(), strict=True)]


def _classes(components: list[Bounds], below: Array, others: list[Array]) -> list[list[TileRange]]:
    """The tiles in pieces, grouped by which of the ``others`` show fewer pairs there than ``below``."""
    pairs = np.diff(below)
    classes = sum(((np.diff(x) < pairs) << i for i, x in enumerate(others)), np.zeros(len(pairs), dtype=np.int64))
    changes, found = (1 + np.flatnonzero(np.diff(classes))).tolist(), defaultdict[int, list[TileRange]](list)
    for c in starmap(Component, components):
        for lo, hi in pairwise([c.lo, *changes[bisect_right(changes, c.lo) : bisect_left(changes, c.hi)], c.hi]):
            found[int(classes[lo])].append(TileRange(lo, hi, c))
    return [found[key] for key in sorted(found)]


def _halved(ranks: list[list[TileRange]], tiles: int) -> list[list[TileRange]]:
    """The same pieces in tiles of half the size, of which the sequence has ``tiles``."""
    components = {p.of: Component(2 * p.of.lo, min(2 * p.of.hi, tiles), p.of.dense_first) for x in ranks for p in x}
    return [[TileRange(2 * p.lo, min(2 * p.hi, tiles), components[p.of]) for p in x] for x in ranks]


def _numbered(ranks: list[list[TileRange]], per_host: int) -> list[int]:
    """The indices of ``ranks`` in an order in which holders of one component share hosts: a host gets a row once."""

    def deepest(pieces: list[TileRange]) -> TileRange:
        return max(pieces, key=lambda p: (p.depth - p.size, p.depth, -p.lo))

    by_component = defaultdict[Component, list[int]](list)
    of_rank = [*map(deepest, ranks)]
    for i in sorted(range(len(ranks)), key=lambda i: -of_rank[i].depth):
        by_component[of_rank[i].of].append(i)
    hosts: list[list[int]] = []
    rests = []
    for group in by_component.values():
        full = len(group) // per_host * per_host
        hosts += [group[i : i + per_host] for i in range(0, full, per_host)]
        rests.append(group[full:])
    most, shared = -(-len(ranks) // per_host), list[list[int]]()
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


def _ranges(pieces: list[TileRange], tile: int, seq_len: int) -> list[range]:
    return [range(p.lo * tile, min(p.hi * tile, seq_len)) for p in sorted(pieces, key=lambda p: p.lo)]


def _cut(ranges: list[range], parts: int) -> list[tuple[range, ...]]:
    """``ranges`` in increasing order, cut evenly over ``parts`` ranks."""
    if parts == 1:
        return [tuple(ranges)]
    starts = list(accumulate(map(len, ranges), initial=0))
    found = []
    for part in range(parts):
        mine = split_range(starts[-1], parts, part)
        each = (
            r[max(0, mine.start - start) : max(0, mine.stop - start)] for r, start in zip(ranges, starts, strict=False)
        )
        found.append(tuple(r for r in each if r))
    return found
