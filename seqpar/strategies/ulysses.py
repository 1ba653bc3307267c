"""DeepSpeed-Ulysses: an all-to-all turns a shard of the sequence into a shard of the heads, and another one back.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023. Neither heads nor tokens need to divide by the ranks. Where the query heads of two ranks read the same KV
head, both ranks receive it, and its two partial gradients are summed in float32 by the rank that holds the tokens.

Eight tokens, four heads, four ranks. Rank 1 holds tokens 2 and 3 of all heads before the all-to-all, and all tokens of
head 1 after it; each cell is the rank that holds that token of that head:

                   sequence shards                        head shards
    tokens     0  1  2  3  4  5  6  7               0  1  2  3  4  5  6  7
    head 0     0  0  1  1  2  2  3  3               0  0  0  0  0  0  0  0
    head 1     0  0  1  1  2  2  3  3   to_heads    1  1  1  1  1  1  1  1
    head 2     0  0  1  1  2  2  3  3   <------->   2  2  2  2  2  2  2  2
    head 3     0  0  1  1  2  2  3  3  to_sequence  3  3  3  3  3  3  3  3

[Note: overlap] The heads of each rank are exchanged in chunks. While one chunk is computed, the next one is on its way
to this rank, and the output of the previous one is on its way back:

    to_heads     | q k v of 0 | q k v of 1 | q k v of 2 |
    compute      |            | attend 0   | attend 1   | attend 2   |
    to_sequence  |            |            | out of 0   | out of 1   | out of 2   |

Bytes sent per rank of P, forward: (P-1)/P^2 * N * (2 d + 2 d_kv) * e. More ranks than KV heads send a KV head to each
rank that reads it; more ranks than query heads leave ranks without work (use ``hybrid``).

Shapes: b batch, s tokens of this rank, t tokens of the ulysses group, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.communicator import communicator
from ..comm.handshake import all_gather_header
from ..comm.p2p import Pending
from ..comm.trace import count_sent
from ..heads import Heads
from ..kernels.base import accumulator
from ..layout import split_range
from ..mesh import Ranks
from ..schedule import SequenceSharding

# The largest number of chunks in which the heads of a rank are exchanged. 1 turns the overlap off.
MAX_CHUNKS = 4

# ``(heads, q, k, v) -> (out, lse)``: attention of one chunk's head shards.
Attend = Callable[[Heads, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# ``(heads, dout, dlse, q, k, v, out, lse) -> (dq, dk, dv, dsinks)``: its backward, not rounded yet.
AttendBackward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def ulysses_forward(exchange: HeadExchange, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Communicate, attend, communicate back, chunk by chunk.

    Args:
        exchange: the all-to-all.
        attend: attention of head shards, over the keys of this rank's group or of a ring across groups.
        q: ``[b, s, h, d]``, this rank's sequence shard of all heads.
        k, v: ``[b, s, n, d]``, likewise.

    Returns:
        ``out [b, s, h, d]``, followed by the tensors that ``ulysses_backward`` needs: for each chunk its head shards
        ``q``, then ``k`` and ``v`` if the chunk has KV heads of its own, ``out`` and ``lse``.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    saved: list[Tensor] = []
    chunks = exchange.chunks
    outgoing: list[Incoming] = []
    incoming = exchange.to_heads(chunks[0], q, k, v)
    for i, chunk in enumerate(chunks):
        chunk_q, *chunk_kv = incoming.wait()  # [b, t, h, d], [b, t, n, d]
        if i + 1 < len(chunks):
            incoming = exchange.to_heads(chunks[i + 1], q, k, v)
        if chunk_kv:
            chunk_k, chunk_v = chunk_kv
        chunk_out, chunk_lse = attend(chunk.heads, chunk_q, chunk_k, chunk_v)
        outgoing.append(exchange.to_sequence((chunk_out, chunk.query_slices, out)))
        saved += [chunk_q, *chunk_kv, chunk_out, chunk_lse]
    for sent in outgoing:
        sent.wait()
    return out, *saved


def ulysses_backward(
    exchange: HeadExchange,
    attend_backward: AttendBackward,
    saved: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    k_shape: torch.Size,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of ``ulysses_forward``: communicate, backward of attention, communicate back, chunk by chunk.

    Args:
        exchange: the all-to-all.
        attend_backward: the backward of ``attend``.
        saved: what ``ulysses_forward`` returned after ``out``.
        dout: ``[b, s, h, d]``, this rank's sequence shard.
        dlse: ``[b, h, t]``, this rank's head shard (see ``lse_gradient_to_heads``), or None.
        k_shape: the shape of ``k`` and ``v``, ``[b, s, n, d]``.

    Returns:
        ``dq [b, s, h, d]``, ``dk, dv [b, s, n, d]``, and ``dsinks [h]``, which is 0 for the heads of other ranks; None
        if attention has no sinks.
    """
    like = saved[0]
    # A finished gradient is sent in the model's dtype. Partial gradients of a KV head are sent in float32, then summed.
    kv_dtype = accumulator(like.dtype) if exchange.shares_kv else like.dtype
    dq = like.new_empty(dout.shape)
    dk, dv = (like.new_empty(k_shape, dtype=kv_dtype) for _ in range(2))
    dsinks: Tensor | None = None
    chunks = exchange.chunks
    outgoing: list[Incoming] = []
    incoming = exchange.queries_to_heads(chunks[0], dout)
    for i, (chunk, (q, k, v, out, lse)) in enumerate(_by_chunk(chunks, saved)):
        (chunk_dout,) = incoming.wait()  # [b, t, h, d]
        if i + 1 < len(chunks):
            incoming = exchange.queries_to_heads(chunks[i + 1], dout)
        at = chunk.heads.queries_in(exchange.full_chunk.heads)
        chunk_dlse = None if dlse is None else dlse[:, at.start : at.stop]  # [b, h, t]
        chunk_dq, *chunk_dkv, chunk_dsinks = attend_backward(chunk.heads, chunk_dout, chunk_dlse, q, k, v, out, lse)
        outgoing.append(exchange.to_sequence((chunk_dq.to(dq.dtype), chunk.query_slices, dq)))
        # Chunks that read the same KV heads follow one another: their gradients are sent once, with the last chunk.
        if chunk.has_kv:
            kv_slices, sum_dkv = chunk.kv_slices, chunk_dkv
        else:
            sum_dkv = [x + y for x, y in zip(sum_dkv, chunk_dkv, strict=True)]
        if i + 1 == len(chunks) or chunks[i + 1].has_kv:
            pairs = zip(sum_dkv, (dk, dv), strict=True)
            outgoing.append(exchange.to_sequence(*((x.to(kv_dtype), kv_slices, target) for x, target in pairs)))
        if chunk_dsinks is not None:
            dsinks = chunk_dsinks.new_zeros(dout.shape[2]) if dsinks is None else dsinks
            at = chunk.heads.queries_in(exchange.heads)
            dsinks[at.start : at.stop] = chunk_dsinks
    for sent in outgoing:
        sent.wait()
    return dq, dk, dv, dsinks


def _by_chunk(chunks: Sequence[HeadChunk], saved: Sequence[Tensor]) -> Iterator[tuple[HeadChunk, list[Tensor]]]:
    """Each chunk with its q, k, v, out and lse."""
    tensors = iter(saved)
    for chunk in chunks:
        q = next(tensors)
        if chunk.has_kv:
            k, v = next(tensors), next(tensors)
        yield chunk, [q, k, v, next(tensors), next(tensors)]


def saved_lse(exchange: HeadExchange, saved: Sequence[Tensor]) -> Tensor:
    """The log-sum-exp of all heads of this rank, ``[b, h, t]``, from what ``ulysses_forward`` returned."""
    return torch.cat([tensors[-1] for _, tensors in _by_chunk(exchange.chunks, saved)], 1)


class _LseGradient(NamedTuple):
    """Whether a rank has a gradient of the log-sum-exp."""

    has_dlse: bool


def lse_to_sequence(exchange: HeadExchange, lse: Tensor) -> Tensor:
    """The head shard ``lse [b, h, t]`` as a sequence shard ``[b, h, s]``: an all-to-all of heads of width 1."""
    column = lse.transpose(1, 2).unsqueeze(-1)  # [b, t, h, 1]
    target = column.new_empty(lse.shape[0], exchange.tokens, len(exchange.heads.queries), 1)  # [b, s, h, 1]
    exchange.to_sequence((column, exchange.full_chunk.query_slices, target)).wait()
    return target.squeeze(-1).transpose(1, 2)


def lse_gradient_to_heads(exchange: HeadExchange, like: Tensor, dlse: Tensor | None) -> Tensor | None:
    """The sequence shard ``dlse [b, h, s]`` as a head shard ``[b, h, t]``; None if no rank has a gradient.

    ``like [b, s, h, d]`` gives the shape and dtype on a rank that has none.
    """
    headers = all_gather_header(lambda: _LseGradient(dlse is not None), exchange.group)
    if not any(header.has_dlse for header in headers):
        return None
    column = like.new_zeros(*like.shape[:3], 1, dtype=accumulator(like.dtype))  # [b, s, h, 1]
    if dlse is not None:
        column = dlse.transpose(1, 2).unsqueeze(-1)
    (column,) = exchange.queries_to_heads(exchange.full_chunk, column).wait()
    return column.squeeze(-1).transpose(1, 2)


@dataclass(frozen=True)
class HeadChunk:
    """Heads of every rank that are exchanged together.

    Attributes:
        rank: this rank.
        by_rank: the heads that each rank attends with after the all-to-all.
        tensor_heads: the heads of the tensors before the all-to-all.
        has_kv: whether this chunk carries KV heads of its own; otherwise it reuses the previous chunk's.
    """

    rank: int
    by_rank: tuple[Heads, ...]
    tensor_heads: Heads
    has_kv: bool = True

    @property
    def heads(self) -> Heads:
        """The heads that this rank attends with."""
        return self.by_rank[self.rank]

    @property
    def query_slices(self) -> list[range]:
        """By rank: where its query heads are in a sequence shard ``[b, s, h, d]``."""
        return [heads.queries_in(self.tensor_heads) for heads in self.by_rank]

    @property
    def kv_slices(self) -> list[range]:
        """By rank: where its KV heads are in a sequence shard ``[b, s, n, d]``."""
        return [heads.kv_in(self.tensor_heads) for heads in self.by_rank]


class Incoming:
    """Tensors that an all-to-all has not delivered yet."""

    def __init__(self, work: dist.Work | None, buffers: list[Tensor], unpack: Callable[[], list[Tensor]]) -> None:
        self._work = work
        self._buffers = buffers  # must live until the all-to-all is done
        self._unpack = unpack

    def wait(self) -> list[Tensor]:
        """The tensors, once they have arrived (on CUDA, the current stream waits). Call it once."""
        Pending([] if self._work is None else [self._work], self._buffers).wait()
        tensors = self._unpack()
        self._buffers = []
        return tensors


@dataclass(frozen=True)
class HeadExchange:
    """The all-to-all between sequence shards and head shards inside one ulysses group.

    A sequence shard holds this rank's tokens of all heads. A head shard holds the tokens of the ulysses group, sorted
    by position, of some heads of this rank.

    Attributes:
        group: the ranks of the all-to-all.
        sharding: which positions each rank holds.
        ring_rank: this rank in the ring across ulysses groups.
        heads: the heads of a sequence shard.
    """

    group: Ranks
    sharding: SequenceSharding
    ring_rank: int
    heads: Heads

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def tokens(self) -> int:
        """Tokens of this rank's sequence shard."""
        return self.sharding.ulysses_lengths(self.ring_rank)[self.rank]

    @property
    def shares_kv(self) -> bool:
        """Whether the query heads of two ranks read the same KV head."""
        return sum(len(heads.kv) for heads in self.full_chunk.by_rank) > len(self.heads.kv)

    @cached_property
    def full_chunk(self) -> HeadChunk:
        """All heads at once."""
        return HeadChunk(self.rank, self.heads.split(self.group.size()), self.heads)

    @cached_property
    def chunks(self) -> list[HeadChunk]:
        """All heads in chunks, the same on every rank.

        Within a chunk every KV head serves the same number of query heads, so that attention kernels need no copies.
        If the ranks' heads do not divide so, there is one chunk. A chunk may carry no KV heads, in which case it reuses
        the previous chunk's; this never happens in a hybrid, whose K/V are still to be sent around the ring.
        """
        full = self.full_chunk
        counts = {(len(heads.queries), len(heads.kv)) for heads in full.by_rank}
        queries, kv = next(iter(counts))
        if len(counts) > 1:
            return [full]
        if kv > 1 and queries == kv * self.heads.q_per_kv:
            cuts = [split_range(kv, min(MAX_CHUNKS, kv), i) for i in range(min(MAX_CHUNKS, kv))]  # of the KV heads
            each = self.heads.q_per_kv
            return [self._chunk(range(cut.start * each, cut.stop * each)) for cut in cuts]
        if kv == 1 and self.sharding.ring == 1:
            cuts = [split_range(queries, min(MAX_CHUNKS, queries), i) for i in range(min(MAX_CHUNKS, queries))]
            return [self._chunk(cut, has_kv=cut.start == 0) for cut in cuts]
        return [full]

    def _chunk(self, queries: range, has_kv: bool = True) -> HeadChunk:
        """The query heads ``queries`` of each rank, counted from its first."""
        by_rank = tuple(heads[queries] for heads in self.full_chunk.by_rank)
        return HeadChunk(self.rank, by_rank, self.heads, has_kv)

    def to_heads(self, chunk: HeadChunk, q: Tensor, k: Tensor, v: Tensor) -> Incoming:
        """Send each rank its heads of ``q``, and of ``k, v`` if the chunk has KV heads, in one all-to-all.

        Args:
            q: ``[b, s, h, d]``. k, v: ``[b, s, n, d]``, of the same dtype.

        Returns:
            The head shards of this rank's heads, ``q [b, t, h, d]`` and, if the chunk has KV heads, ``k, v``.
        """
        kv = [(x, chunk.kv_slices) for x in (k, v)] if chunk.has_kv else []
        return self._to_heads((q, chunk.query_slices), *kv)

    def queries_to_heads(self, chunk: HeadChunk, x: Tensor) -> Incoming:
        """Send each rank its query heads of ``x [b, s, h, d]``; returns ``[b, t, h, d]``."""
        return self._to_heads((x, chunk.query_slices))

    def _to_heads(self, *tensors: tuple[Tensor, Sequence[range]]) -> Incoming:
        rows = self._token_rows(tensors[0][0].device)
        sends = [[_Slice(x, heads=heads[peer]) for x, heads in tensors] for peer in range(self.group.size())]
        shapes = [
            [(x.shape[0], len(peer_rows), len(heads[self.rank]), x.shape[3]) for x, heads in tensors]
            for peer_rows in rows
        ]
        work, buffers, received = _all_to_all(sends, shapes, self.group)
        total = sum(len(r) for r in rows)

        def unpack() -> list[Tensor]:
            results = []
            for i, (x, heads) in enumerate(tensors):
                out = x.new_empty(x.shape[0], total, len(heads[self.rank]), x.shape[3])  # [b, t, h, d]
                for peer_rows, from_peer in zip(rows, received, strict=True):
                    out.index_copy_(1, peer_rows, from_peer[i])
                results.append(out)
            return results

        return Incoming(work, buffers, unpack)

    def to_sequence(self, *tensors: tuple[Tensor, Sequence[range], Tensor]) -> Incoming:
        """Send each rank its tokens of this rank's heads, in one all-to-all.

        Args:
            tensors: triples of a head shard ``[b, t, h, d]``, the slice of each rank's heads in a sequence shard, and
                the sequence shard ``[b, s, h, d]`` that ``wait`` writes. A KV head that several ranks send is summed.
        """
        rows = self._token_rows(tensors[0][0].device)
        sends = [[_Slice(x, rows=peer_rows) for x, _, _ in tensors] for peer_rows in rows]
        tokens = len(rows[self.rank])
        shapes = [
            [(x.shape[0], tokens, len(heads[peer]), x.shape[3]) for x, heads, _ in tensors]
            for peer in range(self.group.size())
        ]
        work, buffers, received = _all_to_all(sends, shapes, self.group)

        def unpack() -> list[Tensor]:
            for i, (_, slices, target) in enumerate(tensors):
                written = 0
                for at, from_peer in zip(slices, received, strict=True):
                    again = max(0, min(written, at.stop) - at.start)  # heads that an earlier rank has sent too
                    target[:, :, at.start : at.start + again] += from_peer[i][:, :, :again]
                    target[:, :, at.start + again : at.stop] = from_peer[i][:, :, again:]
                    written = max(written, at.stop)
            return [target for _, _, target in tensors]

        return Incoming(work, buffers, unpack)

    def _token_rows(self, device: torch.device) -> tuple[Tensor, ...]:
        """By rank: the indices of its tokens in a head shard, int64 ``[s]``."""
        return self.sharding.ulysses_rows(self.ring_rank, device)


@dataclass(frozen=True)
class _Slice:
    """Some heads or some rows of ``x [b, s, h, d]``, to be sent."""

    x: Tensor
    heads: range | None = None
    rows: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        batch, seq, heads, dim = self.x.shape
        return (
            batch,
            seq if self.rows is None else len(self.rows),
            heads if self.heads is None else len(self.heads),
            dim,
        )

    def write(self, send_buffer: Tensor) -> None:
        """Copy the slice into ``send_buffer``, in one pass."""
        send_buffer = send_buffer.view(self.shape)
        if self.heads is not None:
            send_buffer.copy_(self.x[:, :, self.heads.start : self.heads.stop])
        else:
            assert self.rows is not None
            torch.index_select(self.x, 1, self.rows, out=send_buffer)


def _all_to_all(
    sends: list[list[_Slice]], shapes: Sequence[Sequence[tuple[int, ...]]], ranks: Ranks
) -> tuple[dist.Work | None, list[Tensor], list[list[Tensor]]]:
    """Start one all-to-all with uneven splits.

    Args:
        sends: by peer, the slices for it, all of one dtype. They are sent as bytes, which every backend takes.
        shapes: by peer, the shapes of the tensors that it sends.

    Returns:
        The work, the buffers that must live until it is done, and by peer the received tensors, which are valid then.
    """
    like = sends[0][0].x
    lengths = [[prod(x.shape) for x in to_peer] for to_peer in sends]
    buffer = like.new_empty(sum(map(sum, lengths)))
    send_buffers = iter(buffer.split([n for to_peer in lengths for n in to_peer]))
    for x in chain.from_iterable(sends):
        x.write(next(send_buffers))
    packed = buffer.view(torch.uint8)
    send_sizes = [sum(to_peer) * like.element_size() for to_peer in lengths]
    counts = [[prod(s) for s in peer_shapes] for peer_shapes in shapes]
    recv_sizes = [sum(c) * like.element_size() for c in counts]
    received = packed.new_empty(sum(recv_sizes))
    group = communicator(ranks, packed.device)
    work = dist.all_to_all_single(received, packed, recv_sizes, send_sizes, group=group, async_op=True)
    to_others = [size for peer, size in enumerate(send_sizes) if peer != ranks.rank() and size]
    count_sent(sum(to_others), len(to_others))
    pieces = iter(received.view(like.dtype).split([c for from_peer in counts for c in from_peer]))
    views = [[next(pieces).view(shape) for shape in peer_shapes] for peer_shapes in shapes]
    return work, [packed, received], views
