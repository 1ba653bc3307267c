"""Layouts: which global positions each rank of the sequence group holds. They are in increasing order on every rank.

* ``contiguous``: the sequence is split into ``ranks`` parts; rank ``r`` holds part ``r``.
* ``zigzag``: the sequence is split into ``2 * ranks`` parts; rank ``r`` holds parts ``r`` and ``2 * ranks - 1 - r``
  (the layout of Llama 3's and ring-flash-attention's context parallelism).
* ``striped``: rank ``r`` holds positions ``r, r + ranks, r + 2 * ranks, ...`` (Brandon et al., Striped Attention,
  2023).
* an ``Assigned`` value: any ranges of positions for each rank.

A length need not divide by the number of parts: when ``length`` is split into ``m`` parts, the first ``length % m``
parts hold one token more.

Eight tokens on four ranks under a causal mask. Row ``i`` shows the keys that query ``i`` sees, and which rank holds
token ``i``. The work of a rank is the number of keys its queries see:

                  key               rank that holds query i
            0 1 2 3 4 5 6 7     contiguous   zigzag   striped
    query 0 x . . . . . . .          0          0         0
          1 x x . . . . . .          0          1         1
          2 x x x . . . . .          1          2         2
          3 x x x x . . . .          1          3         3
          4 x x x x x . . .          2          3         0
          5 x x x x x x . .          2          2         1
          6 x x x x x x x .          3          1         2
          7 x x x x x x x x          3          0         3

                  work of rank 0          3          9         6
                          rank 1          7          9         8
                          rank 2         11          9        10
                          rank 3         15          9        12

Every rank waits for the slowest one, so ``contiguous`` takes 15 units of time, ``zigzag`` 9 and ``striped`` 12. With
long sequences ``striped`` comes close to ``zigzag``: its ranks differ by at most one key for each query. Under a full
mask all three are balanced.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ..base.cache import cached_tensors
from ..base.checks import TRANSPOSE, check_choice

LayoutName = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)
CPU = torch.device("cpu")
# How the tokens of a rank lie in the sequence, whatever the layout's name: in one run of consecutive positions, in two,
# in several, or in runs that are shorter than the tiles of attention kernels.
Grain = Literal["one run", "two runs", "several runs", "tiny runs"]
_TINY = 64
# Tokens of a rank at equal distances: their indices among the rank's tokens, and among the tokens of several ranks.
TokenSlices = tuple[slice, slice]


@dataclass(frozen=True, repr=False, eq=False)
class Assigned:
    """A layout that says for each rank which global positions it holds, in any division of a sequence.

    Immutable, hashable and comparable. Two values are equal if their ranks hold the same positions.

    Args:
        by_rank: for each rank its positions, as increasing ranges of consecutive positions. The ranges of all ranks
            together must hold every position from 0 to the sequence's length once. A rank may hold none. Neighbouring
            ranges of a rank are merged, and empty ranges are left out.

    Raises:
        TypeError: a range is not a ``range``.
        ValueError: a range has another step than 1 or begins before the rank's range before it, two ranges overlap, or
            a position is in no range.

    Examples:
        >>> Assigned([[range(0, 2), range(6, 7)], [range(2, 6)]])
        Assigned(7 tokens, 2 ranks, 3 ranges, checksum=f64f7745)
    """

    by_rank: tuple[tuple[range, ...], ...]
    seq_len: int = field(init=False)
    checksum: int = field(init=False)  # the same in every process: ranks compare it

    def __post_init__(self) -> None:
        by_rank = tuple(_merged_ranges(rank, ranges) for rank, ranges in enumerate(self.by_rank))
        holders = sorted((r.start, r.stop, rank) for rank, ranges in enumerate(by_rank) for r in ranges)
        end, before = 0, -1
        for start, stop, rank in holders:
            if start > end:
                raise ValueError(f"by_rank: no rank holds {range(end, start)}; each position needs one rank")
            if start < 0:
                raise ValueError(f"by_rank: rank {rank} holds {range(start, stop)}; positions are at least 0")
            if start < end:
                both = range(start, min(stop, end))
                raise ValueError(f"by_rank: ranks {before} and {rank} both hold {both}; each position needs one rank")
            end, before = stop, rank
        numbers = " ".join(f"{start},{stop},{rank}" for start, stop, rank in holders)
        checksum = zlib.crc32(f"{len(by_rank)} {numbers}".encode())
        for name, value in (("by_rank", by_rank), ("seq_len", end), ("checksum", checksum)):
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Assigned):
            return NotImplemented
        return self is other or (self.checksum == other.checksum and self.by_rank == other.by_rank)

    def __hash__(self) -> int:
        return self.checksum  # the hash of all ranges would be computed at every look-up in a cache

    def __repr__(self) -> str:
        ranges = sum(map(len, self.by_rank))
        return (
            f"Assigned({self.seq_len} tokens, {len(self.by_rank)} ranks, {ranges} ranges, checksum={self.checksum:08x})"
        )


def _merged_ranges(rank: int, ranges: Iterable[range]) -> tuple[range, ...]:
    """The ranges of ``rank`` without empty ones, and with neighbours merged, after checking them."""
    merged: list[range] = []
    for r in ranges:
        if not isinstance(r, range):
            raise TypeError(f"by_rank: rank {rank} holds {r!r}; expected a range of positions, such as range(0, 8)")
        if not r:
            continue
        if r.step != 1 and len(r) > 1:
            raise ValueError(f"by_rank: rank {rank} holds {r}; give ranges of consecutive positions, of step 1")
        if merged and r[0] < merged[-1].stop:
            raise ValueError(f"by_rank: rank {rank} holds {r} after {merged[-1]}; give its ranges in increasing order")
        if merged and r[0] == merged[-1].stop:
            merged[-1] = range(merged[-1].start, r[-1] + 1)
        else:
            merged.append(range(r[0], r[-1] + 1))
    return tuple(merged)


# Which positions each rank holds: by name, or one by one.
Layout: TypeAlias = LayoutName | Assigned
# A layout in words: "balanced" is an ``Assigned`` value that ``balanced_layout`` makes for a mask.
LayoutWord: TypeAlias = LayoutName | Literal["balanced"]
LAYOUT_WORDS: tuple[LayoutWord, ...] = (*LAYOUTS, "balanced")


def check_layout(
    layout: object, seq_len: int | None = None, ranks: int | None = None, names: Iterable[str] = LAYOUTS
) -> None:
    """Raise unless ``layout`` is a layout, and fits a sequence of ``seq_len`` tokens over ``ranks`` ranks.

    ``names`` are the names that it may have.

    Raises:
        TypeError: it is neither a name nor an ``Assigned``.
        ValueError: an unknown name, or an ``Assigned`` for another length or number of ranks.
    """
    if not isinstance(layout, Assigned):
        check_choice("layout", layout, names)
        return
    if seq_len not in (None, layout.seq_len):
        raise ValueError(f"layout={layout!r}: the sequence has {seq_len} tokens; make a layout for this length")
    if ranks not in (None, len(layout.by_rank)):
        raise ValueError(f"layout={layout!r}: the sequence is sharded over {ranks} ranks; make a layout for them")


def least_length(layout: Layout) -> int:
    """The fewest tokens that a sequence with ``layout`` may have."""
    return layout.seq_len if isinstance(layout, Assigned) else 0


def split_range(length: int, parts: int, index: int) -> range:
    """The indices of part ``index`` when ``length`` items are split into ``parts``.

    The first ``length % parts`` parts hold one item more than the others.
    """
    size, remainder = divmod(length, parts)
    start = index * size + min(index, remainder)
    return range(start, start + size + (index < remainder))


def chunk_range(length: int, parts: int, index: int) -> range:
    """The indices of part ``index`` as ``torch.chunk`` and DTensors split: all parts but the last ones are equal."""
    size = -(-length // parts)
    return range(min(index * size, length), min((index + 1) * size, length))


def shard_ranges(seq_len: int, ranks: int, rank: int, layout: Layout = "contiguous") -> tuple[range, ...]:
    """The global positions that ``rank`` of ``ranks`` holds, as non-empty ranges in increasing order."""
    check_layout(layout, seq_len, ranks)
    if isinstance(layout, Assigned):
        return layout.by_rank[rank]
    if layout == "contiguous":
        ranges: tuple[range, ...] = (split_range(seq_len, ranks, rank),)
    elif layout == "zigzag":
        first = split_range(seq_len, 2 * ranks, rank)
        second = split_range(seq_len, 2 * ranks, 2 * ranks - 1 - rank)
        # On the last rank the two parts are neighbours and form one range.
        ranges = (range(first.start, second.stop),) if first.stop == second.start else (first, second)
    else:  # striped
        ranges = (range(rank, seq_len, ranks),)
    return tuple(r for r in ranges if len(r))


@lru_cache(maxsize=32)  # of the last lengths: every call of a model with several streams needs them
def segments_layout(lengths: tuple[int, ...], ranks: int, layout: LayoutName) -> Assigned:
    """Streams of ``lengths`` tokens, one after another, each of which is divided over the ranks by itself."""
    starts = list(accumulate(lengths, initial=0))
    by_rank = (
        tuple(
            range(start + r.start, start + r.stop)
            for length, start in zip(lengths, starts, strict=False)
            for r in shard_ranges(length, ranks, rank, layout)
        )
        for rank in range(ranks)
    )
    return Assigned(tuple(by_rank))


def shard_length(seq_len: int, ranks: int, rank: int, layout: Layout = "contiguous") -> int:
    return sum(len(r) for r in shard_ranges(seq_len, ranks, rank, layout))


def check_lengths(lengths: Sequence[int], layout: Layout, seq_len: int | None = None) -> int:
    """The global length of a sequence whose shards hold ``lengths`` tokens, by rank.

    Raises:
        ValueError: the layout gives other lengths, or they do not add up to ``seq_len``.
    """
    total = sum(lengths)
    if seq_len is not None and total != seq_len:
        raise ValueError(
            f"seq_len={seq_len}: the ranks hold {total} tokens together, {list(lengths)} by rank; pass "
            f"seq_len={total}, or the shards that seqpar.shard returns for {seq_len} tokens"
        )
    expected = [shard_length(total, len(lengths), rank, layout) for rank in range(len(lengths))]
    if list(lengths) != expected:
        raise ValueError(
            f"length: the ranks hold {list(lengths)} tokens, but layout={layout!r} splits {total} tokens into "
            f"{expected}; pass the shards that seqpar.shard returns for this layout"
        )
    return total


def check_length(length: int, seq_len: int, ranks: int, rank: int, layout: Layout, heads: int | None = None) -> None:
    """Raise a ValueError if this rank's shard of a sequence of ``seq_len`` tokens does not hold ``length`` tokens.

    ``heads`` is the number of query heads, for an error that recognises ``[batch, heads, seq, head_dim]``.
    """
    expected = shard_length(seq_len, ranks, rank, layout)
    if length != expected:
        fix = TRANSPOSE if heads == expected else "pass the shard that seqpar.shard returns for this layout"
        raise ValueError(
            f"length: this rank holds {length} tokens, but layout={layout!r} gives it {expected} of seq_len={seq_len}; "
            f"{fix}"
        )


@dataclass(frozen=True)
class Stripe:
    """Blocks of ``block`` consecutive positions that begin at ``start``, ``start + stride``, and so on.

    There are ``count`` positions in total, so the last block may be shorter. A range of consecutive positions is a
    single block.
    """

    start: int
    count: int
    block: int
    stride: int

    @property
    def stop(self) -> int:
        return self.at(self.count - 1) + 1

    def at(self, index: int) -> int:
        return self.start + index // self.block * self.stride + index % self.block

    def count_below(self, position: int) -> int:
        """How many of the positions are smaller than ``position``."""
        blocks, within = divmod(position - self.start, self.stride)
        return max(0, min(self.count, blocks * self.block + min(within, self.block)))


@dataclass(frozen=True)
class Positions:
    """An increasing set of global positions, as a few stripes one after another.

    It describes the tokens of a rank in a size that does not grow with the sequence.
    """

    stripes: tuple[Stripe, ...]

    def __len__(self) -> int:
        return sum(stripe.count for stripe in self.stripes)

    @property
    def is_ranges(self) -> bool:
        return all(stripe.block >= stripe.count for stripe in self.stripes)

    @cached_property
    def _offsets(self) -> list[int]:
        return list(accumulate((stripe.count for stripe in self.stripes), initial=0))

    def with_offsets(self) -> Iterable[tuple[Stripe, int]]:
        return zip(self.stripes, self._offsets, strict=False)

    def count_below(self, position: int) -> int:
        """How many of the positions are smaller than ``position``: the index of the first one that is not."""
        return sum(stripe.count_below(position) for stripe in self.stripes)

    def at(self, index: int) -> int:
        i = bisect_right(self._offsets, index) - 1
        return self.stripes[i].at(index - self._offsets[i])

    def counts_below(self, x: Tensor) -> Tensor:
        """``count_below`` of every element of ``x``, integers >= 0, computed on the device of ``x``."""
        total: Tensor | None = None
        for stripe in self.stripes:
            if stripe.block >= stripe.count:
                part = (x - stripe.start).clamp_(0, stripe.count)
            elif stripe.block == 1 and stripe.start < stripe.stride:
                shifted = x + (stripe.stride - 1 - stripe.start)
                part = shifted.div_(stripe.stride, rounding_mode="trunc").clamp_(max=stripe.count)
            else:
                shifted = x - stripe.start
                blocks = shifted.div(stripe.stride, rounding_mode="floor")
                within = shifted.sub_(blocks, alpha=stripe.stride).clamp_(max=stripe.block)
                part = within.add_(blocks, alpha=stripe.block).clamp_(0, stripe.count)
            total = part if total is None else total.add_(part)
        return torch.zeros_like(x) if total is None else total

    def tensor(self, device: torch.device, start: int = 0, stop: int | None = None) -> Tensor:
        """The positions at the indices ``start:stop``, int64, increasing."""
        stop = len(self) if stop is None else stop
        parts = []
        for stripe, offset in zip(self.stripes, self._offsets, strict=False):
            first, last = max(start - offset, 0), min(stop - offset, stripe.count)
            if first >= last:
                continue
            if stripe.block >= stripe.count:
                parts.append(torch.arange(stripe.start + first, stripe.start + last, device=device))
            elif stripe.block == 1:
                parts.append(torch.arange(stripe.at(first), stripe.at(last - 1) + 1, stripe.stride, device=device))
            else:
                index = torch.arange(first, last, device=device)
                blocks = index.div(stripe.block, rounding_mode="floor")
                parts.append(index.add_(blocks, alpha=stripe.stride - stripe.block).add_(stripe.start))
        if not parts:
            return torch.empty(0, dtype=torch.int64, device=device)
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def merged_positions(seq_len: int, ranks: int, first: int, count: int, layout: Layout) -> Positions:
    """The positions of the tokens of the ranks ``first ... first + count - 1`` of ``ranks`` together. Cached."""
    found = _positions_of(seq_len, ranks, layout)
    if (first, count) not in found:
        found[first, count] = _merged_positions(seq_len, ranks, first, count, layout)
    return found[first, count]


@lru_cache(maxsize=32)  # of the last lengths, as many as there are ranks: a step may have a new length
def _positions_of(seq_len: int, ranks: int, layout: Layout) -> dict[tuple[int, int], Positions]:
    return {}


def _merged_positions(seq_len: int, ranks: int, first: int, count: int, layout: Layout) -> Positions:
    if layout == "striped":
        periods, rest = divmod(max(0, seq_len - first), ranks)
        held = periods * count + min(rest, count)
        return Positions((Stripe(first, held, count, ranks),) if held else ())
    by_rank = [shard_ranges(seq_len, ranks, first + i, layout) for i in range(count)]
    return ranges_to_positions(sorted((r.start, r.stop) for ranges in by_rank for r in ranges))


def ranges_to_positions(ranges: Iterable[tuple[int, int]]) -> Positions:
    """The positions of increasing ``(start, stop)`` ranges. Neighbours are merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        elif start < stop:
            merged.append((start, stop))
    return Positions(tuple(Stripe(a, b - a, b - a, b - a) for a, b in merged))


def shard_positions(seq_len: int, ranks: int, rank: int, layout: Layout = "contiguous") -> Tensor:
    """Global positions of the tokens of ``rank``, int64 ``[seq_local]``, increasing. Cached: do not write to it."""
    cpu = torch.device("cpu")
    key = "positions", seq_len, ranks, rank, layout
    return cached_tensors(key, cpu, lambda: merged_positions(seq_len, ranks, rank, 1, layout).tensor(cpu))


@dataclass(frozen=True)
class TokenLayout:
    """How a sequence is divided over ranks: rank = (ring_rank * ulysses + ulysses_rank) * tensor + tensor_rank.

    Under tensor parallelism, each block of ``tensor`` consecutive ranks all-gathers its tokens before attention. The
    ring and the all-to-all treat such a block as a single rank.

    Attributes:
        seq_len: tokens of the full sequence.
        layout: which positions each rank holds: "contiguous", "zigzag", "striped", or an ``Assigned``.
        ring, ulysses, tensor: ranks along each dimension.
        replicated: whether every rank of the ring holds the keys of all its ranks, so that none are sent.
    """

    seq_len: int
    layout: Layout = "contiguous"
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    replicated: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks of attention, where a block of tensor-parallel ranks counts as one."""
        return self.ring * self.ulysses

    @property
    def runs(self) -> int:
        """How many runs of consecutive positions all ranks hold together."""
        return _runs(self)

    @property
    def grain(self) -> Grain:
        """How the tokens of most ranks lie in the sequence."""
        if self.runs <= self.ranks:
            return "one run"
        if self.runs <= 2 * self.ranks:
            return "two runs"
        return "several runs" if self.runs * _TINY <= self.seq_len else "tiny runs"

    def ring_positions(self, ring_rank: int) -> Positions:
        """Global positions of the tokens that all ulysses ranks of ``ring_rank`` hold together."""
        ranks = self.ulysses * self.tensor
        return self._positions(ring_rank * ranks, ranks)

    def all_gathered(self) -> TokenLayout:
        """The same shards, if all ranks all-gather their tokens before attention."""
        return replace(self, ring=1, ulysses=1, tensor=self.ranks * self.tensor)

    def rank_positions(self, rank: int, device: torch.device = CPU) -> Tensor:
        """Global positions of the tokens that ``rank`` attends with, int64 ``[seq_local]``. Do not write to it."""
        held = self._positions(rank * self.tensor, self.tensor)
        return cached_tensors(("rank_positions", held), device, lambda: held.tensor(device))

    def tensor_positions(self, rank: int) -> tuple[Positions, tuple[Positions, ...]]:
        """The positions that ``rank`` attends with, and the positions that each of its tensor-parallel ranks holds."""
        first = rank * self.tensor
        return self._positions(first, self.tensor), tuple(self._positions(first + i, 1) for i in range(self.tensor))

    def tensor_rows(self, rank: int, device: torch.device = CPU) -> tuple[Tensor, ...]:
        """For each tensor rank, the indices of its tokens in ``rank_positions(rank)``, int64 ``[seq_local]``."""
        merged, parts = self.tensor_positions(rank)
        return cached_tensors(
            ("tensor_rows", self, rank),
            device,
            lambda: tuple(merged.counts_below(part.tensor(device)) for part in parts),
        )

    def ulysses_pieces(self, ring_rank: int) -> tuple[tuple[TokenSlices, ...], ...]:
        """For each ulysses rank of ``ring_rank``, the pieces of its tokens."""
        return _ulysses_pieces(self, ring_rank)

    def ulysses_lengths(self, ring_rank: int) -> list[int]:
        first = ring_rank * self.ulysses
        return [len(self._positions((first + i) * self.tensor, self.tensor)) for i in range(self.ulysses)]

    def _positions(self, first: int, count: int) -> Positions:
        return merged_positions(self.seq_len, self.ranks * self.tensor, first, count, self.layout)


@lru_cache(maxsize=256)  # every call of a mixer asks for it
def _runs(tokens: TokenLayout) -> int:
    held = (tokens._positions(rank * tokens.tensor, tokens.tensor) for rank in range(tokens.ranks))
    return sum(-(-stripe.count // stripe.block) for positions in held for stripe in positions.stripes)


@lru_cache(maxsize=32)
def _ulysses_pieces(tokens: TokenLayout, ring_rank: int) -> tuple[tuple[TokenSlices, ...], ...]:
    full, tensor = tokens.ring_positions(ring_rank), tokens.tensor
    first = ring_rank * tokens.ulysses

    def pieces(held: Positions) -> Iterator[TokenSlices]:
        for stripe, offset in held.with_offsets():
            each = stripe.block if stripe.block < stripe.count else 1  # pieces of a stripe
            for i in range(each):
                tokens = range(i, stripe.count, each)
                rows = [full.count_below(stripe.at(token)) for token in tokens[:2]]
                step = rows[-1] - rows[0] or 1
                yield slice(offset + i, offset + stripe.count, each), slice(rows[0], rows[0] + len(tokens) * step, step)

    ranks = range(first, first + tokens.ulysses)
    return tuple(tuple(pieces(tokens._positions(rank * tensor, tensor))) for rank in ranks)
