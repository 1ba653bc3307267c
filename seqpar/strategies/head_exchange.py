"""The all-to-all of Ulysses, from shards of the sequence to shards of the heads and back (see ``ulysses.py``).

A sequence shard holds one rank's tokens of all heads. A head shard holds all tokens of the ulysses group of one rank's
heads. Each rank sends every other rank one message: ``to_heads`` sends [its tokens, b, their heads], ``to_sequence``
sends [their tokens, b, its heads].

Shapes: b batch, s tokens of this rank, t tokens of the ulysses group, h query heads, n KV heads, d head_dim of q and k,
e head_dim of v, w = h*d + n*d + n*e elements of a token in its heads of q, k and v.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.collectives import start_all_to_all
from ..comm.handshake import all_gather_header
from ..comm.p2p import Link, links_of, new_message, sends_messages
from ..comm.waiting import Pending
from ..kernels.base import accumulator
from ..placement.heads import Heads
from ..placement.layout import TokenLayout, TokenSlices, split_range
from ..placement.placement import Placement
from ..ranks.mesh import rank_in
from .head_messages import HeadSlices, ShardHeads, pack, row_widths, split_heads, unpack

# The largest number of chunks in which the heads of a rank are exchanged. 1 turns the overlap off.
MAX_CHUNKS = 8
# The least work of a chunk, in multiply-adds of q k^T without a mask, by device type. Its attention then takes about
# 20 ms on a CPU core and 0.1 ms on a GPU, much longer than starting an all-to-all takes.
MIN_CHUNK_WORK = {"cpu": 1 << 29, "cuda": 1 << 34}
# How many chunks this rank receives while it computes another one, by device type (see "overlap" in ``ulysses.py``).
PREFETCH_CHUNKS = {"cpu": 1, "cuda": 2}


def chunk_limit(tokens: TokenLayout, q_shape: Sequence[int], device_type: str) -> int:
    """The largest number of chunks into which it pays to divide the heads of a rank. It is the same on every rank.

    ``q_shape`` is the shape of a sequence shard of q, ``[b, s, h, d]``.
    """
    batch, _, heads, dim = q_shape
    work = batch * heads * dim * tokens.seq_len**2 // tokens.ranks
    return max(1, min(MAX_CHUNKS, work // MIN_CHUNK_WORK.get(device_type, MIN_CHUNK_WORK["cuda"])))


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
        return HeadSlices([heads.q_range(within=self.tensor_heads) for heads in self.by_rank])

    @cached_property
    def kv_slices(self) -> HeadSlices:
        """For each rank, the indices of its KV heads in a sequence shard ``[b, s, n, d]``."""
        return HeadSlices([heads.kv_range(within=self.tensor_heads) for heads in self.by_rank])

    def parts(self, x: Tensor, *kv: Tensor) -> list[ShardHeads]:
        """What is sent of ``x [b, s, h, d]`` and of ``kv [b, s, n, d]``."""
        return [(x, self.query_slices), *((y, self.kv_slices) for y in kv if self.has_kv)]

    def split(self, shard: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """Split a head shard ``[t, b, w]`` into views ``[b, t, heads, dim]``: the query heads, then k and v if it has
        them. ``dims`` holds the head_dim of each of the three."""
        queries, kv = len(self.heads.queries), len(self.heads.kv)
        shapes = list(zip((queries, kv, kv), dims, strict=True))
        only_queries = queries > 0 and shard.shape[2] == queries * dims[0]
        return split_heads(shard.transpose(0, 1), shapes[:1] if only_queries else shapes)


class Incoming:
    """The result of an all-to-all that has been started."""

    def __init__(self, pending: Pending, unpack: Callable[[], Tensor]) -> None:
        self._pending = pending
        self._unpack = unpack

    def wait(self) -> Tensor:
        """Wait for the messages and return the tensor. On CUDA the current stream waits. Call it once."""
        self._pending.wait()
        return self._unpack()


@dataclass(frozen=True)
class HeadExchange:
    """The all-to-all between sequence shards and head shards inside one ulysses group.

    The tokens of a head shard are sorted by position.

    Attributes:
        placement: the ranks of the all-to-all, and which positions each rank holds.
        heads: the heads of a sequence shard.
        max_chunks: the largest number of chunks (see ``chunk_limit``).
        link: connects the ranks of the all-to-all; None if nothing is sent, as in the planner.
    """

    placement: Placement
    heads: Heads
    max_chunks: int
    link: Link | None = None

    @cached_property
    def rank(self) -> int:
        return rank_in(self.placement.ulysses)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank's sequence shard."""
        return tuple(self.placement.tokens.ulysses_lengths(self.placement.ring_rank))

    @cached_property
    def tokens(self) -> int:
        """Tokens of this rank's sequence shard."""
        return self.lengths[self.rank]

    @cached_property
    def pieces(self) -> tuple[tuple[TokenSlices, ...], ...]:
        """For each rank, the pieces of its tokens, and where these are in a head shard."""
        return self.placement.tokens.ulysses_pieces(self.placement.ring_rank)

    @cached_property
    def shares_kv(self) -> bool:
        """Whether the query heads of two ranks read the same KV head. If so, head shards of k and v are larger than
        sequence shards, and each rank has only a partial gradient of a shared KV head."""
        return self.full_chunk.kv_slices.overlap

    @cached_property
    def full_chunk(self) -> HeadChunk:
        """All heads in one chunk."""
        return HeadChunk(self.rank, self.heads.split(self.placement.tokens.ulysses), self.heads)

    @cached_property
    def chunks(self) -> tuple[HeadChunk, ...]:
        """All heads, divided into at most ``max_chunks`` chunks in the same way on every rank.

        Within a chunk every KV head is read by the same number of query heads, so that attention kernels need no copies
        of KV heads. If the heads cannot be divided like this, there is one chunk. A chunk may reuse the KV heads of the
        previous chunk (``has_kv`` is False), but not in a hybrid, where a chunk's K/V are sent around the ring as well.
        """
        full, limit = self.full_chunk, self.max_chunks
        counts = {(len(part.queries), len(part.kv)) for part in full.by_rank}
        queries, kv = next(iter(counts))
        if limit == 1 or len(counts) > 1:
            return (full,)

        def chunk(queries: range, has_kv: bool = True) -> HeadChunk:
            """The chunk with the query heads ``queries`` of each rank, counted from the rank's first query head."""
            return HeadChunk(self.rank, tuple(part[queries] for part in full.by_rank), self.heads, has_kv)

        q_per_kv = self.heads.q_per_kv
        if kv > 1 and queries == kv * q_per_kv:
            cuts = [split_range(kv, min(limit, kv), i) for i in range(min(limit, kv))]  # of the KV heads
            return tuple(chunk(range(cut.start * q_per_kv, cut.stop * q_per_kv)) for cut in cuts)
        if kv == 1 and self.placement.tokens.ring == 1:
            cuts = [split_range(queries, min(limit, queries), i) for i in range(min(limit, queries))]
            return tuple(chunk(cut, has_kv=cut.start == 0) for cut in cuts)
        return (full,)

    def head_shards(self, x: Tensor, *kv: Tensor) -> Iterator[tuple[HeadChunk, Tensor]]:
        """Yields each chunk with its head shard (see ``to_heads``) while the next chunks are being received."""
        chunks, ahead = self.chunks, PREFETCH_CHUNKS.get(x.device.type, 1)
        started = deque(self.to_heads(chunk, x, *kv) for chunk in chunks[:ahead])
        for i, chunk in enumerate(chunks):
            arrived = [started.popleft().wait()]
            if i + ahead < len(chunks):
                started.append(self.to_heads(chunks[i + ahead], x, *kv))
            yield chunk, arrived.pop()  # only the caller has a reference then, and can free it

    def to_heads(self, chunk: HeadChunk, x: Tensor, *kv: Tensor) -> Incoming:
        """Send each rank its query heads of ``x``, and its KV heads of ``kv`` if the chunk has any, in one all-to-all.

        Args:
            chunk: the heads.
            x: ``[b, s, h, d]``, with the query heads.
            kv: tensors ``[b, s, n, d]`` of the same dtype: k and v, or nothing. They may differ in d.

        Returns:
            This rank's head shard ``[t, b, w]``: its query heads, then its KV heads of k, then its KV heads of v.
        """
        parts, batch = chunk.parts(x, *kv), x.shape[0]
        shapes = [(slices.counts[self.rank], y.shape[3]) for y, slices in parts]
        width, sent = sum(heads * dim for heads, dim in shapes), self._sent(parts)
        sends = [self.tokens * batch * w for w in row_widths(sent)]
        receives = [length * batch * width for length in self.lengths]
        receives[self.rank] = sends[self.rank]
        messages = new_message(sum(sends), x, self.link)
        pack(sent, messages)
        received, pending = start_all_to_all(messages, sends, receives, self.link)

        def head_shard() -> Tensor:
            shard = x.new_empty(sum(self.lengths), batch, width)
            if sent is not parts:
                for in_sequence, in_head_shard in self._own(parts, split_heads(shard, shapes)):
                    in_head_shard.copy_(in_sequence)
            if pairs := self._rows(received, [shard]):
                in_messages, in_shard = zip(*pairs, strict=True)
                torch._foreach_copy_(in_shard, in_messages)
            received.clear()  # frees the messages
            return shard

        return Incoming(pending, head_shard)

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
        parts = [(target, slices) for _, target in tensors]
        sent, batch = self._sent(parts), tensors[0][0].shape[0]
        shards = [x.transpose(0, 1) for x, _ in tensors]  # [t, b, h, d]
        sends = [length * batch * sum(prod(x.shape[2:]) for x in shards) for length in self.lengths]
        receives = [self.tokens * batch * width for width in row_widths(sent)]
        sends[self.rank] = receives[self.rank]
        messages = new_message(sum(sends), shards[0], self.link)
        if pairs := self._rows(messages.split_with_sizes(sends), [x.flatten(2) for x in shards]):
            in_messages, in_shards = zip(*pairs, strict=True)
            torch._foreach_copy_(in_messages, in_shards)
        received, pending = start_all_to_all(messages, sends, receives, self.link)
        if slices.overlap:
            for _, target in tensors:
                target.zero_()
        if sent is not parts:
            for in_sequence, in_shard in self._own(parts, shards):
                in_sequence.add_(in_shard) if slices.overlap else in_sequence.copy_(in_shard)

        def sequence_shards() -> Tensor:
            unpack(sent, received)
            received.clear()  # frees the messages
            return tensors[-1][1]

        return Incoming(pending, sequence_shards)

    def _sent(self, parts: list[ShardHeads]) -> list[ShardHeads]:
        """The parts with what is sent. In shared memory, a rank's own heads of its own tokens are copied to their place
        instead."""
        if self.link is None or not self.link.reads_in_place or not sends_messages():
            return parts
        return [(x, slices.without(self.rank)) for x, slices in parts]

    def _own(self, parts: Sequence[ShardHeads], shards: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's heads of its own tokens: views in sequence shards, and in head shards ``[t, b, h, d]``."""
        for (x, slices), shard in zip(parts, shards, strict=True):
            local = slices.of(x, range(self.rank, self.rank + 1))[0]
            yield from ((local[tokens], shard[rows]) for tokens, rows in self.pieces[self.rank])

    def _rows(self, messages: Sequence[Tensor], shards: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The rows of the message ``[s, b, w]`` of each rank, and the same rows of head shards ``[t, b, w]``."""
        batch, widths = shards[0].shape[1], [x.shape[2] for x in shards]
        pairs = []
        for message, pieces in zip(messages, self.pieces, strict=True):
            if message.numel():
                columns = message.view(-1, batch, sum(widths)).split_with_sizes(widths, 2)
                by_tensor = zip(columns, shards, strict=True)
                pairs += [(column[tokens], x[rows]) for column, x in by_tensor for tokens, rows in pieces]
        return pairs

    def saved_shapes(
        self, q_shape: Sequence[int], k_shape: Sequence[int], v_shape: Sequence[int], out_dim: int
    ) -> list[tuple[int, ...]]:
        """The shapes of the tensors that ``ulysses_forward`` returns after ``out``, for tensors of these shapes."""
        batch, tokens = q_shape[0], sum(self.lengths)
        shapes: list[tuple[int, ...]] = []
        for chunk in self.chunks:
            queries, width = len(chunk.heads.queries), len(chunk.heads.queries) * q_shape[3]
            if chunk.has_kv and not self.shares_kv:
                width += len(chunk.heads.kv) * (k_shape[3] + v_shape[3])
            shapes += [(tokens, batch, width), (batch, tokens, queries, out_dim), (batch, queries, tokens)]
        return shapes

    def lse_to_sequence(self, lse: Tensor) -> Tensor:
        """The head shard ``lse [b, h, t]`` as a sequence shard ``[b, h, s]``: an all-to-all with a head_dim of 1."""
        column = lse.transpose(1, 2).unsqueeze(-1)  # [b, t, h, 1]
        target = column.new_empty(lse.shape[0], self.tokens, len(self.heads.queries), 1)  # [b, s, h, 1]
        self.to_sequence(self.full_chunk.query_slices, (column, target)).wait()
        return target.squeeze(-1).transpose(1, 2)

    def lse_gradient_to_heads(self, like: Tensor, dlse: Tensor | None) -> Tensor | None:
        """The sequence shard ``dlse [b, h, s]`` as a head shard ``[b, h, t]``; None if no rank has a gradient.

        ``like [b, s, h, d]`` gives the shape and dtype on a rank that has none.
        """
        headers = all_gather_header(lambda: _LseGradient(dlse is not None), self.placement.ulysses)
        if not any(header.has_dlse for header in headers):
            return None
        column = like.new_zeros(*like.shape[:3], 1, dtype=accumulator(like.dtype))  # [b, s, h, 1]
        if dlse is not None:
            column = dlse.transpose(1, 2).unsqueeze(-1)
        shard = self.to_heads(self.full_chunk, column).wait()  # [t, b, h]
        return shard.permute(1, 2, 0)


class _LseGradient(NamedTuple):
    has_dlse: bool


def head_exchange(
    placement: Placement, heads: Heads, q_shape: Sequence[int], device: torch.device
) -> HeadExchange | None:
    """The all-to-all around the ring, if more than one rank takes part in it. ``q_shape`` is ``[b, s, h, d]``."""
    if placement.ulysses is None or (link := links_of(placement, device).ulysses) is None:
        return None
    chunks = 1 if link.reads_in_place else chunk_limit(placement.tokens, q_shape, device.type)
    return head_exchange_of(placement, heads, chunks, link)


def head_exchange_of(placement: Placement, heads: Heads, chunks: int, link: Link | None = None) -> HeadExchange | None:
    """``head_exchange`` before there is a call, in at most ``chunks`` chunks of heads."""
    if placement.ulysses is None or placement.tokens.ulysses == 1 or not heads.queries:
        return None  # tensor parallelism over more ranks than heads leaves ranks without heads
    key = heads, chunks, link
    exchange: HeadExchange | None = placement.kept.get(key)
    if exchange is None:
        exchange = placement.kept[key] = HeadExchange(placement, heads, chunks, link)
    return exchange
