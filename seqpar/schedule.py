"""Which rank sends which keys to which rank at which step, and what each rank computes with them: pure functions.

A schedule follows from the mask, the sharding and the rank alone: no process group and no data. The runtime executes
it, tests and byte counts read it, and a planner can simulate it for any number of ranks.

In a ring of ``n`` ranks, step 0 computes with a rank's own keys. At step ``h``, rank ``r`` computes with keys of rank
``(r - h) % n``. K/V rows are sent directly by their owner instead of being forwarded around the ring. With a full mask
this moves the same bytes; with any other mask, each rank receives only the rows that its queries see, and no step waits
for a previous forward. An all-gather is the same schedule with all steps after step 0 merged into one.

Eight tokens, four ranks, zigzag, causal mask. The step of each (query rank, key rank) pair, and the global positions of
the keys that are sent ("-": the queries see none of them, so nothing is sent):

                   keys of rank 0 [0 7]   rank 1 [1 6]   rank 2 [2 5]   rank 3 [3 4]
    queries 0 7        step 0  own        step 3  1 6    step 2  2 5    step 1  3 4
    queries 1 6        step 1  0          step 0  own    step 3  2 5    step 2  3 4
    queries 2 5        step 2  0          step 1  1      step 0  own    step 3  3 4
    queries 3 4        step 3  0          step 2  1      step 1  2      step 0  own

Shapes: b is 1 or the batch size, q_len and k_len are the numbers of local queries and of the step's keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import shard_positions
from .mask import Mask


@dataclass(frozen=True)
class SequenceSharding:
    """How a sequence is divided over ranks: rank = (ring_rank * ulysses + ulysses_rank) * tensor + tensor_rank.

    Under tensor parallelism, each run of ``tensor`` consecutive ranks all-gathers its tokens before attention, so the
    ring and the all-to-all treat the run as a single rank.

    Attributes:
        seq_len: tokens of the full sequence.
        layout: which positions each rank holds: "contiguous", "zigzag" or "striped".
        ring, ulysses, tensor: ranks along each dimension.
    """

    seq_len: int
    layout: str = "contiguous"
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of attention: a tensor-parallel run counts as one."""
        return self.ring * self.ulysses

    def rank_positions(self, rank: int) -> Tensor:
        """Global positions of the tokens that ``rank`` attends with, int64 ``[seq_local]``, increasing."""
        return _merged_positions(self, rank * self.tensor, self.tensor)

    def ring_positions(self, ring_rank: int) -> Tensor:
        """Global positions of the tokens that all ulysses ranks of ``ring_rank`` hold together, increasing."""
        ranks = self.ulysses * self.tensor
        return _merged_positions(self, ring_rank * ranks, ranks)

    def tensor_rows(self, rank: int) -> tuple[Tensor, ...]:
        """By tensor rank: the indices of its tokens in ``rank_positions(rank)``, int64 ``[seq_local]``."""
        return _indices_in_merged(self, rank * self.tensor, self.tensor, 1)

    def ulysses_rows(self, ring_rank: int) -> tuple[Tensor, ...]:
        """By ulysses rank: the indices of its tokens in ``ring_positions(ring_rank)``, int64 ``[seq_local]``."""
        ranks = self.ulysses * self.tensor
        return _indices_in_merged(self, ring_rank * ranks, ranks, self.tensor)


@lru_cache(maxsize=1024)
def on_device(index: Tensor, device: torch.device) -> Tensor:
    """A copy of a schedule's tensor on ``device``. Cached by the tensor's identity."""
    return index.to(device)


@lru_cache(maxsize=1024)
def _merged_positions(sharding: SequenceSharding, first: int, count: int) -> Tensor:
    """Positions of the tokens of ranks ``first ... first + count - 1`` together, increasing."""
    ranks = sharding.ranks * sharding.tensor
    parts = [shard_positions(sharding.seq_len, ranks, first + i, sharding.layout) for i in range(count)]
    return parts[0] if count == 1 else torch.cat(parts).sort().values


@lru_cache(maxsize=256)
def _indices_in_merged(sharding: SequenceSharding, first: int, count: int, each: int) -> tuple[Tensor, ...]:
    """For every ``each`` of the ``count`` ranks from ``first``: the indices of their tokens in the merged positions."""
    merged = _merged_positions(sharding, first, count)
    parts = (_merged_positions(sharding, first + i, each) for i in range(0, count, each))
    return tuple(torch.searchsorted(merged, part) for part in parts)


@dataclass(frozen=True, eq=False)
class KeyIntervals:
    """Which of a step's keys each local query sees: query ``i`` sees the keys ``lo[i] <= j < hi[i]``.

    Attributes:
        lo, hi: int32 ``[b, q_len]``, indices of the step's keys, ``0 <= lo <= hi <= k_len``. Neither decreases along
            the queries.
        q_positions: int32 ``[q_len]``, global positions, increasing. ALiBi and dropout depend on them.
        k_positions: int32 ``[k_len]``, likewise.
    """

    lo: Tensor
    hi: Tensor
    q_positions: Tensor
    k_positions: Tensor
    _copies: dict[torch.device, KeyIntervals] = field(default_factory=dict, repr=False)

    def to(self, device: torch.device) -> KeyIntervals:
        """A copy on ``device``. Cached."""
        if device == self.lo.device:
            return self
        if device not in self._copies:
            self._copies[device] = KeyIntervals(
                self.lo.to(device), self.hi.to(device), self.q_positions.to(device), self.k_positions.to(device)
            )
        return self._copies[device]


@dataclass(frozen=True)
class Selection:
    """Some rows of a shard, as increasing (start, stop) pairs of local indices."""

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
    """Rows of K/V that this rank sends to ``peer`` or receives from it; ``peer`` is a rank of the ring."""

    peer: int
    rows: Selection


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the ring on one rank.

    Attributes:
        receives: the K/V rows that this rank receives. Empty at step 0, which computes with this rank's own K/V.
        sends: the K/V rows that this rank sends to others in the same step.
        intervals: which of the received keys each local query sees; None if no query sees any of them.
        order: int64 ``[k_len]``, the permutation that sorts the concatenated received rows by position; None if they
            are sorted already.
    """

    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    intervals: KeyIntervals | None
    order: Tensor | None = None

    @property
    def is_local(self) -> bool:
        """Whether the step computes with this rank's own K/V, so that nothing is sent or received."""
        return not self.receives and not self.sends


@lru_cache(maxsize=1024)
def visible(mask: Mask, sharding: SequenceSharding, query_rank: int, key_rank: int) -> tuple[Tensor, Tensor]:
    """Which keys of ring rank ``key_rank`` the queries of ``query_rank`` see: ``(lo, hi)`` int64 ``[b, q_len]``.

    ``lo`` and ``hi`` are indices into the key rank's shard: because its positions increase, an interval of global
    positions is an interval of local indices.
    """
    return _local_intervals(mask, sharding.ring_positions(query_rank), sharding.ring_positions(key_rank))


def _local_intervals(mask: Mask, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The intervals of ``queries`` as indices into the increasing positions ``keys``, int64 ``[b, q_len]``."""
    lo, hi = mask.intervals(queries)
    return torch.searchsorted(keys, torch.atleast_2d(lo)), torch.searchsorted(keys, torch.atleast_2d(hi))


def needed(lo: Tensor, hi: Tensor, keys: int) -> Tensor:
    """Which of ``keys`` keys are inside some interval, bool ``[keys]``."""
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
def transfer_rows(mask: Mask, sharding: SequenceSharding, query_rank: int, key_rank: int) -> Selection:
    """The rows of ``key_rank``'s shard that some query of ``query_rank`` sees."""
    lo, hi = visible(mask, sharding, query_rank, key_rank)
    return _selection(needed(lo, hi, len(sharding.ring_positions(key_rank))))


def _key_intervals(lo: Tensor, hi: Tensor, q_positions: Tensor, k_positions: Tensor) -> KeyIntervals:
    return KeyIntervals(lo.int(), hi.int(), q_positions.int(), k_positions.int())


def _local_step(mask: Mask, sharding: SequenceSharding, rank: int) -> Step:
    lo, hi = visible(mask, sharding, rank, rank)
    positions = sharding.ring_positions(rank)
    return Step((), (), _key_intervals(lo, hi, positions, positions) if bool((lo < hi).any()) else None)


def _remote_step(mask: Mask, sharding: SequenceSharding, rank: int, shifts: range) -> Step:
    """Receive keys from the ranks ``shifts`` before this one, and send keys to the ranks ``shifts`` after it."""
    n = sharding.ring
    receives = [Transfer(peer, transfer_rows(mask, sharding, rank, peer)) for peer in ((rank - h) % n for h in shifts)]
    sends = [Transfer(peer, transfer_rows(mask, sharding, peer, rank)) for peer in ((rank + h) % n for h in shifts)]
    receives = [t for t in receives if len(t.rows)]
    sends = [t for t in sends if len(t.rows)]
    if not receives:
        return Step((), tuple(sends), None)
    keys = torch.cat([t.rows.take(sharding.ring_positions(t.peer)[None])[0] for t in receives])
    sorted_keys, order = keys.sort()
    queries = sharding.ring_positions(rank)
    # Every key inside a query's interval was received, so the interval has no gap among the received keys either.
    lo, hi = _local_intervals(mask, queries, sorted_keys)
    unsorted = not torch.equal(keys, sorted_keys)
    return Step(
        tuple(receives), tuple(sends), _key_intervals(lo, hi, queries, sorted_keys), order if unsorted else None
    )


@lru_cache(maxsize=256)
def attention_steps(mask: Mask, sharding: SequenceSharding, rank: int, gather: bool = False) -> tuple[Step, ...]:
    """The steps of one ring rank, own keys first.

    Args:
        mask: which keys each query sees.
        sharding: which positions each rank holds.
        rank: this rank in the ring.
        gather: receive from all ranks in one step (all-gather) instead of one rank a step (ring).

    Returns:
        As many steps on every rank, some of them empty. Step ``h`` of one rank sends what step ``h`` of another
        receives, so any two ranks see the messages between them in the same order.
    """
    if gather:
        shifts = [range(1, sharding.ring)] if sharding.ring > 1 else []
    else:
        shifts = [range(h, h + 1) for h in range(1, sharding.ring)]
    return (_local_step(mask, sharding, rank), *(_remote_step(mask, sharding, rank, s) for s in shifts))
