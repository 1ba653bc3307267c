"""Who fetches which keys from whom, at which step, and what is computed with them: pure functions.

A schedule follows from (mask, layout, group sizes, rank) alone: no process group and no data. The runtime
executes it, tests and byte counts read it, a planner can simulate it for any number of ranks.

At step ``h`` of a ring of ``n``, rank ``r`` visits the keys of rank ``(r - h) % n``. They come straight from their
owner rather than passed on from neighbour to neighbour: under a full mask that is the same number of bytes, under
any other mask each rank receives only the rows that some query of its own sees, and nobody waits for a relay.
An all-gather is the same schedule with all the steps that move something joined into one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import shard_positions, split_range
from .mask import Mask


@dataclass(frozen=True)
class SequenceSharding:
    """How the sequence lies over the ranks: rank = (ring_rank * ulysses + ulysses_rank) * tensor + tensor_rank.

    ``tensor`` ranks next to one another have gathered their tokens before attention (Megatron's sequence
    parallelism); to the ring and the all-to-all they are one rank that holds the tokens of all of them.
    """

    seq_len: int
    layout: str = "contiguous"
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    def rank_positions(self, rank: int) -> Tensor:
        """Global positions of the tokens a rank attends with, int64 ``[seq_local]``, increasing."""
        return _merged_positions(self, rank * self.tensor, self.tensor)

    def ring_positions(self, ring_rank: int) -> Tensor:
        """Global positions of the tokens one ulysses group holds together: one stop of the ring."""
        ranks = self.ulysses * self.tensor
        return _merged_positions(self, ring_rank * ranks, ranks)

    def tensor_rows(self, rank: int) -> tuple[Tensor, ...]:
        """Where the tokens of each tensor rank stand among those that ``rank`` attends with, int64 ``[seq_local]``."""
        return _rows_among(self, rank * self.tensor, self.tensor, 1)

    def ulysses_rows(self, ring_rank: int) -> tuple[Tensor, ...]:
        """Where the tokens of each ulysses rank stand among those of one stop of the ring, int64 ``[seq_local]``."""
        ranks = self.ulysses * self.tensor
        return _rows_among(self, ring_rank * ranks, ranks, self.tensor)


@lru_cache(maxsize=1024)
def on_device(index: Tensor, device: torch.device) -> Tensor:
    """A copy of a schedule's tensor on ``device``, made once (by the tensor's identity)."""
    return index.to(device)


@lru_cache(maxsize=1024)
def _merged_positions(shards: SequenceSharding, first: int, count: int) -> Tensor:
    """Positions of the tokens of ``count`` ranks from ``first``, increasing."""
    ranks = shards.ranks * shards.tensor
    parts = [shard_positions(shards.seq_len, ranks, first + i, shards.layout) for i in range(count)]
    return parts[0] if count == 1 else torch.cat(parts).sort().values


@lru_cache(maxsize=256)
def _rows_among(shards: SequenceSharding, first: int, count: int, each: int) -> tuple[Tensor, ...]:
    """Of ``count`` ranks from ``first``, where every ``each`` ranks' tokens stand among those of all."""
    merged = _merged_positions(shards, first, count)
    parts = (_merged_positions(shards, first + i, each) for i in range(0, count, each))
    return tuple(torch.searchsorted(merged, part) for part in parts)


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """Which visiting keys each local query sees.

    ``lo, hi`` int32 ``[b, q_len]`` with ``b`` 1 or the batch size: local key indices, ``hi`` exclusive,
    ``0 <= lo <= hi <= k_len``, neither falling along the queries. ``q_positions`` int32 ``[q_len]`` and
    ``k_positions`` int32 ``[k_len]``: global positions, increasing (ALiBi and dropout depend on them).
    """

    lo: Tensor
    hi: Tensor
    q_positions: Tensor
    k_positions: Tensor
    _copies: dict[torch.device, KeyIntervals] = field(default_factory=dict, repr=False)

    def to(self, device: torch.device) -> KeyIntervals:
        """A copy on ``device``, made once."""
        if device == self.lo.device:
            return self
        if device not in self._copies:
            self._copies[device] = KeyIntervals(
                self.lo.to(device), self.hi.to(device), self.q_positions.to(device), self.k_positions.to(device)
            )
        return self._copies[device]

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, summed over the batch rows told apart."""
        return int((self.hi.long() - self.lo.long()).sum())


@dataclass(frozen=True)
class Selection:
    """Rows of a shard, as increasing (start, stop) pairs of local indices."""

    spans: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def take(self, x: Tensor) -> Tensor:
        """The selected rows of ``x [batch, rows, ...]``, contiguous."""
        pieces = [x[:, start:stop] for start, stop in self.spans]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def add_to(self, target: Tensor, values: Tensor) -> None:
        """Add ``values`` to the selected rows of ``target``."""
        offset = 0
        for start, stop in self.spans:
            target[:, start:stop] += values[:, offset : offset + stop - start]
            offset += stop - start


@dataclass(frozen=True)
class Transfer:
    """Rows of keys and values that pass between this rank and ``peer`` (ranks of the ring)."""

    peer: int
    rows: Selection


@dataclass(frozen=True, eq=False)
class Step:
    """One step: the keys that come in, those that go out, and the intervals computed with what came in.

    Attributes:
        fetch: what this rank receives. Empty at step 0, which computes with its own keys.
        serve: what this rank sends to others in the same step.
        rows: the intervals over the fetched keys; None when no local query sees any of them.
        order: int64 ``[k_len]``: puts the concatenation of the fetched rows in increasing position; None when it
            already is.
    """

    fetch: tuple[Transfer, ...]
    serve: tuple[Transfer, ...]
    rows: KeyIntervals | None
    order: Tensor | None = None

    @property
    def fetched(self) -> int:
        """Rows received."""
        return sum(len(t.rows) for t in self.fetch)

    @property
    def served(self) -> int:
        """Rows sent."""
        return sum(len(t.rows) for t in self.serve)


@lru_cache(maxsize=1024)
def visible(mask: Mask, shards: SequenceSharding, query_rank: int, key_rank: int) -> tuple[Tensor, Tensor]:
    """What the queries of one ring rank see of the keys of another, as local key indices.

    Returns ``(lo, hi)`` int64 ``[b, q_len]``: because a rank's positions increase, an interval of global positions
    is an interval of local indices.
    """
    return _local_intervals(mask, shards.ring_positions(query_rank), shards.ring_positions(key_rank))


def _local_intervals(mask: Mask, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The queries' intervals as indices of the increasing positions ``keys``, int64 ``[b, q_len]``."""
    lo, hi = mask.intervals(queries)
    return torch.searchsorted(keys, torch.atleast_2d(lo)), torch.searchsorted(keys, torch.atleast_2d(hi))


def needed(lo: Tensor, hi: Tensor, keys: int) -> Tensor:
    """Which of ``keys`` lie inside some interval, bool ``[keys]``."""
    seen = lo < hi
    edges = torch.zeros(keys + 1, dtype=torch.int64, device="cpu")
    edges.index_add_(0, lo[seen], torch.ones_like(lo[seen]))
    edges.index_add_(0, hi[seen], -torch.ones_like(hi[seen]))
    return edges.cumsum(0)[:keys] > 0


def _selection(chosen: Tensor) -> Selection:
    padded = F.pad(chosen.float(), (1, 1))
    edges = padded.diff().nonzero().flatten().tolist()
    return Selection(tuple(zip(edges[::2], edges[1::2], strict=True)))


@lru_cache(maxsize=4096)
def transfer_rows(mask: Mask, shards: SequenceSharding, query_rank: int, key_rank: int) -> Selection:
    """The rows of ``key_rank``'s keys that ``query_rank`` needs: those inside one of its queries' intervals."""
    lo, hi = visible(mask, shards, query_rank, key_rank)
    return _selection(needed(lo, hi, len(shards.ring_positions(key_rank))))


def _rows(lo: Tensor, hi: Tensor, q_positions: Tensor, k_positions: Tensor) -> KeyIntervals:
    return KeyIntervals(lo.int(), hi.int(), q_positions.int(), k_positions.int())


def _own_step(mask: Mask, shards: SequenceSharding, rank: int) -> Step:
    lo, hi = visible(mask, shards, rank, rank)
    positions = shards.ring_positions(rank)
    return Step((), (), _rows(lo, hi, positions, positions) if bool((lo < hi).any()) else None)


def _fetch_step(mask: Mask, shards: SequenceSharding, rank: int, shifts: range) -> Step:
    """Visit the keys of the ranks ``shifts`` before this one, and serve the ranks ``shifts`` after it."""
    n = shards.ring
    fetch = [Transfer(peer, transfer_rows(mask, shards, rank, peer)) for peer in ((rank - h) % n for h in shifts)]
    serve = [Transfer(peer, transfer_rows(mask, shards, peer, rank)) for peer in ((rank + h) % n for h in shifts)]
    fetch = [t for t in fetch if len(t.rows)]
    serve = [t for t in serve if len(t.rows)]
    if not fetch:
        return Step((), tuple(serve), None)
    keys = torch.cat([t.rows.take(shards.ring_positions(t.peer)[None])[0] for t in fetch])
    sorted_keys, order = keys.sort()
    queries = shards.ring_positions(rank)
    # Every key between a query's bounds was fetched, so the bounds index the fetched keys too.
    lo, hi = _local_intervals(mask, queries, sorted_keys)
    unsorted = not torch.equal(keys, sorted_keys)
    return Step(tuple(fetch), tuple(serve), _rows(lo, hi, queries, sorted_keys), order if unsorted else None)


@lru_cache(maxsize=256)
def attention_steps(mask: Mask, shards: SequenceSharding, rank: int, gather: bool = False) -> tuple[Step, ...]:
    """The steps of one ring rank, own keys first.

    Args:
        mask, shards: the problem.
        rank: rank in the ring.
        gather: fetch from everybody in one step (all-gather) instead of one step for each rank (ring).

    Every rank has the same number of steps, some of them empty: step ``h`` of one is step ``h`` of all, which keeps
    the order of messages between any two ranks the same on both.
    """
    if gather:
        shifts = [range(1, shards.ring)] if shards.ring > 1 else []
    else:
        shifts = [range(h, h + 1) for h in range(1, shards.ring)]
    return (_own_step(mask, shards, rank), *(_fetch_step(mask, shards, rank, s) for s in shifts))


def head_range(heads: int, ranks: int, rank: int) -> range:
    """The query heads of one rank of an all-to-all: the first ``heads % ranks`` ranks hold one more."""
    return split_range(heads, ranks, rank)


def kv_head_range(heads: int, kv_heads: int, ranks: int, rank: int) -> range:
    """The key/value heads that the query heads of that rank read. Ranks share one where they must."""
    queries = head_range(heads, ranks, rank)
    if not len(queries):
        return range(0)
    group = heads // kv_heads
    return range(queries.start // group, (queries.stop - 1) // group + 1)
