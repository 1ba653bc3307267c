"""The all-to-all of Ulysses, from shards of the sequence to shards of the heads and back (see ``ulysses.py``).

A sequence shard holds one rank's tokens of all heads. A head shard holds all tokens of the ulysses group of one rank's
heads. Each rank sends every other rank one message: the elements ``[tokens, b, w]`` of its tokens and the other rank's
heads, or the other way around. The messages of all ranks, one after another, are a head shard.

Shapes: b batch, s tokens of this rank, t tokens of the ulysses group, h query heads, n KV heads, d head_dim of q and k,
e head_dim of v, w elements of a token in the heads of several tensors, such as q, k and v, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..cache import cached_tensors
from ..comm.collectives import start_all_to_all
from ..comm.p2p import Pending
from ..heads import Heads
from ..layout import SequenceSharding, split_range
from ..mesh import Ranks


class HeadSlices:
    """For each rank, some consecutive heads of a sequence shard.

    Attributes:
        by_rank: the heads of each rank, as indices into the sequence shard.
        counts: the number of heads of each rank.
        even: whether all ranks have the same number of heads, at equal distances. ``view`` can address them then.
        overlap: whether two ranks have the same head.
    """

    def __init__(self, by_rank: Sequence[range]) -> None:
        self.by_rank = by_rank
        self.counts = [len(heads) for heads in by_rank]
        starts = [heads.start for heads in by_rank]
        self._first = starts[0]
        self._step = starts[1] - starts[0] if len(starts) > 1 else 0
        self.even = len(set(self.counts)) == 1 and starts == [self._first + self._step * i for i in range(len(starts))]
        self.overlap = any(a.stop > b.start for a, b in pairwise(by_rank) if a and b)

    def view(self, x: Tensor) -> Tensor:
        """The heads of all ranks of a sequence shard ``x [b, s, heads, d]``: ``[ranks, s, b, h, d]``."""
        batch, seq, head, dim = x.stride()
        size = (len(self.by_rank), x.shape[1], x.shape[0], self.counts[0], x.shape[3])
        stride = (self._step * head, seq, batch, head, dim)
        return x.as_strided(size, stride, x.storage_offset() + self._first * head)


@dataclass(frozen=True)
class HeadChunk:
    """Heads of every rank that are exchanged together.

    Attributes:
        rank: this rank.
        by_rank: the heads that each rank attends with after the all-to-all.
        tensor_heads: the heads of the tensors before the all-to-all.
        has_kv: whether the chunk includes KV heads. Otherwise its query heads read the previous chunk's KV heads.
    """

    rank: int
    by_rank: tuple[Heads, ...]
    tensor_heads: Heads
    has_kv: bool = True

    @cached_property
    def heads(self) -> Heads:
        """The heads that this rank attends with."""
        return self.by_rank[self.rank]

    @cached_property
    def query_slices(self) -> HeadSlices:
        """For each rank, the indices of its query heads in a sequence shard ``[b, s, h, d]``."""
        return HeadSlices([heads.queries_in(self.tensor_heads) for heads in self.by_rank])

    @cached_property
    def kv_slices(self) -> HeadSlices:
        """For each rank, the indices of its KV heads in a sequence shard ``[b, s, n, d]``."""
        return HeadSlices([heads.kv_in(self.tensor_heads) for heads in self.by_rank])

    def to_send(
        self, x: Tensor, *kv: Tensor
    ) -> tuple[Sequence[Tensor], list[HeadSlices], list[int], list[tuple[int, ...]]]:
        """What is sent of ``x [b, s, h, d]`` and of ``kv``, tensors ``[b, s, n, d]``.

        Returns:
            The tensors that are sent; for each tensor its ``HeadSlices``, and its head_dim; and for each rank how many
            heads of each tensor it receives.
        """
        slices = [self.query_slices, *([self.kv_slices] * len(kv) if self.has_kv else [])]
        tensors = (x, *kv)[: len(slices)]
        counts = list(zip(*(s.counts for s in slices), strict=True))
        return tensors, slices, [y.shape[3] for y in tensors], counts

    def split(self, shard: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Split a head shard ``[t, b, w]`` into views ``[b, t, heads, dim]``: the query heads, then k and v if it has
        them. ``dims`` holds the head_dim of each of the three."""
        queries, kv = len(self.heads.queries), len(self.heads.kv)
        if queries and shard.shape[2] == queries * dims[0]:
            dims = dims[:1]
        counts = (queries, kv, kv)[: len(dims)]
        columns = shard.transpose(0, 1)  # [b, t, w]
        return split_heads(columns, counts, dims)


def row_width(counts: Sequence[int], dims: Sequence[int]) -> int:
    """Elements of one token in ``counts`` heads of tensors whose head_dims are ``dims``."""
    return sum(count * dim for count, dim in zip(counts, dims, strict=True))


def split_heads(x: Tensor, counts: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """Split ``x [..., w]``, the heads of several tensors side by side, into views ``[..., heads, dim]``."""
    sizes = list(zip(counts, dims, strict=True))
    parts = x.split_with_sizes([count * dim for count, dim in sizes], -1)
    return [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]


def write_heads(by_peer: Sequence[Sequence[Tensor]], slices: HeadSlices, targets: Sequence[Tensor]) -> None:
    """Write the heads ``[s, b, h, d]`` that each rank has sent into the sequence shards ``targets [b, s, h, d]``.

    If several ranks have sent the same head, their values are summed.
    """
    written = 0
    for at, from_peer in zip(slices.by_rank, by_peer, strict=True):
        again = max(0, min(written, at.stop) - at.start)  # heads that an earlier rank has sent too
        for target, heads in zip(targets, from_peer, strict=True):
            x = heads.transpose(0, 1)
            if again:
                target[:, :, at.start : at.start + again] += x[:, :, :again]
            if again < len(at):
                target[:, :, at.start + again : at.stop] = x[:, :, again:]
        written = max(written, at.stop)


class Incoming:
    """The result of an all-to-all that has been started."""

    def __init__(self, pending: Pending, unpack: Callable[[], Tensor]) -> None:
        self._pending = pending
        self._unpack = unpack

    def wait(self) -> Tensor:
        """Wait for the messages and return the tensor. On CUDA the current stream waits. Call it once."""
        self._pending.wait()
        return self._unpack()


@lru_cache(maxsize=256)
def _all_heads(heads: Heads, ranks: int, rank: int) -> HeadChunk:
    return HeadChunk(rank, heads.split(ranks), heads)


@lru_cache(maxsize=256)
def _chunks(heads: Heads, ranks: int, rank: int, most: int, in_ring: bool) -> tuple[HeadChunk, ...]:
    """``HeadExchange.chunks``, of which there are at most ``most``."""
    full = _all_heads(heads, ranks, rank)
    counts = {(len(part.queries), len(part.kv)) for part in full.by_rank}
    queries, kv = next(iter(counts))
    if most == 1 or len(counts) > 1:
        return (full,)

    def chunk(queries: range, has_kv: bool = True) -> HeadChunk:
        """The chunk with the query heads ``queries`` of each rank, counted from the rank's first query head."""
        return HeadChunk(rank, tuple(part[queries] for part in full.by_rank), heads, has_kv)

    if kv > 1 and queries == kv * heads.q_per_kv:
        cuts = [split_range(kv, min(most, kv), i) for i in range(min(most, kv))]  # of the KV heads
        each = heads.q_per_kv
        return tuple(chunk(range(cut.start * each, cut.stop * each)) for cut in cuts)
    if kv == 1 and not in_ring:
        cuts = [split_range(queries, min(most, queries), i) for i in range(min(most, queries))]
        return tuple(chunk(cut, has_kv=cut.start == 0) for cut in cuts)
    return (full,)


@lru_cache(maxsize=256)
def _lengths(sharding: SequenceSharding, ring_rank: int) -> tuple[int, ...]:
    """The number of tokens that each ulysses rank holds."""
    return tuple(sharding.ulysses_lengths(ring_rank))


@dataclass(frozen=True)
class HeadExchange:
    """The all-to-all between sequence shards and head shards inside one ulysses group.

    A sequence shard holds this rank's tokens of all heads. A head shard holds the tokens of the ulysses group, sorted
    by position, of some heads of this rank.

    Attributes:
        group: the ranks of the all-to-all.
        sharding: which positions each rank holds.
        ring_rank: the rank of this process in the ring across ulysses groups.
        heads: the heads of a sequence shard.
        max_chunks: the largest number of chunks (see ``ulysses.chunk_limit``).
    """

    group: Ranks
    sharding: SequenceSharding
    ring_rank: int
    heads: Heads
    max_chunks: int

    @cached_property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank's sequence shard."""
        return _lengths(self.sharding, self.ring_rank)

    @property
    def tokens(self) -> int:
        """Tokens of this rank's sequence shard."""
        return self.lengths[self.rank]

    @property
    def shares_kv(self) -> bool:
        """Whether the query heads of two ranks read the same KV head. If so, head shards of k and v are larger than
        sequence shards, and each rank has only a partial gradient of a shared KV head."""
        return self.full_chunk.kv_slices.overlap

    @property
    def full_chunk(self) -> HeadChunk:
        """All heads in one chunk."""
        return _all_heads(self.heads, self.group.size(), self.rank)

    @property
    def chunks(self) -> tuple[HeadChunk, ...]:
        """All heads, divided into chunks in the same way on every rank.

        Within a chunk every KV head is read by the same number of query heads, so that attention kernels need no copies
        of KV heads. If the heads cannot be divided like this, there is one chunk. A chunk may reuse the KV heads of the
        previous chunk (``has_kv`` is False), but not in a hybrid, where a chunk's K/V are sent around the ring as well.
        """
        return _chunks(self.heads, self.group.size(), self.rank, self.max_chunks, self.sharding.ring > 1)

    def to_heads(self, chunk: HeadChunk, x: Tensor, *kv: Tensor) -> Incoming:
        """Send each rank its query heads of ``x``, and its KV heads of ``kv`` if the chunk has any, in one all-to-all.

        Args:
            chunk: the heads.
            x: ``[b, s, h, d]``, with the query heads.
            kv: tensors ``[b, s, n, d]`` of the same dtype: k and v, or nothing. They may differ in d.

        Returns:
            This rank's head shard ``[t, b, w]``: its query heads, then its KV heads of k, then those of v.
        """
        tensors, slices, dims, counts = chunk.to_send(x, *kv)
        batch, tokens = x.shape[:2]
        widths = [row_width(count, dims) for count in counts]  # by rank, elements of each token
        buffer = x.new_empty(tokens * batch * sum(widths))
        if all(s.even for s in slices):
            buffers, counts = [buffer.view(len(widths), tokens, batch, widths[0])], counts[:1]
            views = [[s.view(y) for y, s in zip(tensors, slices, strict=True)]]
        else:
            by_peer = buffer.split_with_sizes([tokens * batch * w for w in widths])
            buffers = [y.view(tokens, batch, w) for y, w in zip(by_peer, widths, strict=True)]
            views = [
                [
                    y[:, :, s.by_rank[i].start : s.by_rank[i].stop].transpose(0, 1)
                    for y, s in zip(tensors, slices, strict=True)
                ]
                for i in range(len(widths))
            ]
        for target, count, parts in zip(buffers, counts, views, strict=True):
            for heads, part in zip(split_heads(target, count, dims), parts, strict=True):
                heads.copy_(part)
        sends = [tokens * batch * w for w in widths]
        width = widths[self.rank]
        receives = [length * batch * width for length in self.lengths]
        received, pending = start_all_to_all(buffer, sends, receives, self.group)
        received = received.view(sum(self.lengths), batch, width)
        return Incoming(pending, lambda: self._ordered(received, 1))

    def to_sequence(self, slices: HeadSlices, *tensors: tuple[Tensor, Tensor]) -> Incoming:
        """Send each rank its tokens of this rank's heads, in one all-to-all.

        Args:
            slices: for each rank, the indices of its heads in a sequence shard. The values of a KV head that several
                ranks send are summed.
            tensors: pairs of a head shard ``[b, t, h, d]`` and the sequence shard ``[b, s, h, d]`` to write. The pairs
                may differ in d.

        Returns:
            Its ``wait`` writes all sequence shards and returns the last one.
        """
        columns = [x.transpose(0, 1).flatten(2) for x, _ in tensors]  # [t, b, w]
        rows = torch.cat(columns, 2) if len(columns) > 1 else columns[0]
        rows = self._ordered(rows, 0).contiguous()
        _, batch, width = rows.shape
        targets, tokens = [target for _, target in tensors], self.tokens
        dims = [target.shape[3] for target in targets]
        widths = [count * sum(dims) for count in slices.counts]  # by rank, elements of each token
        receives = [tokens * batch * w for w in widths]
        sends = [length * batch * width for length in self.lengths]
        received, pending = start_all_to_all(rows, sends, receives, self.group)

        def unpack() -> Tensor:
            if slices.even and not slices.overlap:
                even = received.view(len(widths), tokens, batch, widths[0])
                count = [slices.counts[0]] * len(dims)
                for target, x in zip(targets, split_heads(even, count, dims), strict=True):
                    slices.view(target).copy_(x)
                return targets[-1]
            by_peer = [
                split_heads(part.view(tokens, batch, w), [heads] * len(dims), dims)
                for part, w, heads in zip(received.split_with_sizes(receives), widths, slices.counts, strict=True)
            ]
            write_heads(by_peer, slices, targets)
            return targets[-1]

        return Incoming(pending, unpack)

    def _ordered(self, rows: Tensor, direction: int) -> Tensor:
        """Reorder ``rows [t, ...]``: direction 0 from the order of positions to that of ranks, direction 1 back."""
        if self.sharding.layout == "contiguous":
            return rows  # the two orders are the same

        def make() -> tuple[Tensor, ...]:
            by_rank = torch.cat(self.sharding.ulysses_rows(self.ring_rank, rows.device))
            return by_rank, by_rank.argsort()

        orders = cached_tensors(("token orders", self.sharding, self.ring_rank), rows.device, make)
        return rows.index_select(0, orders[direction])
