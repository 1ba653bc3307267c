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

[Note: overlap] Unless the sequence is short, the heads of each rank are exchanged in chunks. While one chunk is
computed, the next one is on its way to this rank, and the output of the previous one is on its way back:

    to_heads     | q k v of 0 | q k v of 1 | q k v of 2 |
    compute      |            | attend 0   | attend 1   | attend 2   |
    to_sequence  |            |            | out of 0   | out of 1   | out of 2   |

On a GPU two chunks are on their way to this rank. A transfer waits for the kernels that were launched before it was
posted, so the one after the next is posted before the kernel of this chunk. It has the time of two kernels.

[Note: shared KV heads] With more ranks than KV heads, every rank receives a whole KV head, however many ranks there
are. So autograd keeps the sequence shards of k and v, which shrink with the ranks, and backward exchanges them again,
together with dout. If no two ranks read the same KV head, both take the same memory, and the head shards are kept.

Bytes sent per rank of P: (P-1)/P^2 * N * (2 d + 2 d_kv) * e, forward and backward. If every KV head is read by r ranks:
(P-1)/P^2 * N * (2 d + 2 r d_kv) * e forward, and in backward (P-1)/P^2 * N * 2 r d_kv * 4 more. (Here d and d_kv are a
token's elements of q and of k; where v has another head_dim, 2 d are those of q and out, 2 d_kv those of k and v.) More
ranks than query heads leave ranks without work (use ``hybrid``).

Shapes: b batch, s tokens of this rank, t tokens of the ulysses group, h query heads, n KV heads, d head_dim of q and k,
e head_dim of v, w elements of the heads of several tensors side by side. Messages are ``[tokens, b, w]``: those of all
ranks one after another are a head shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import cached_tensors
from ..comm.collectives import start_all_to_all
from ..comm.handshake import all_gather_header
from ..comm.p2p import Pending, exchange, new_message
from ..heads import Heads
from ..kernels.base import accumulator
from ..layout import SequenceSharding, split_range
from ..mesh import Ranks

# The largest number of chunks in which the heads of a rank are exchanged. 1 turns the overlap off.
MAX_CHUNKS = 8
# So many chunks are on their way to this rank at a time. On a GPU the host is ahead: the transfer of a chunk waits for
# the kernels that were launched before it was posted.
_AHEAD = {"cpu": 1, "cuda": 2}
# A chunk has at least as many products of a query's and a key's elements, counted without a mask, so that its attention
# takes much longer than to start an all-to-all: about 20 ms on a CPU core, and 0.1 ms on a GPU.
_CHUNK_WORK = {"cpu": 1 << 29, "cuda": 1 << 34}

# ``(heads, q, k, v) -> (out, lse)``: attention of one chunk's head shards.
Attend = Callable[[Heads, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
# ``(heads, dout, dlse, q, k, v, out, lse) -> (dq, dk, dv, dsinks)``: its backward, not rounded yet.
AttendBackward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


def chunk_limit(sharding: SequenceSharding, q_shape: Sequence[int], device_type: str) -> int:
    """In how many chunks it is worth exchanging the heads of a rank: the same on every rank.

    Args:
        sharding: which positions each rank holds.
        q_shape: ``[b, s, h, d]``, the shape of a sequence shard of q.
        device_type: the type of its device.
    """
    batch, _, heads, dim = q_shape
    work = batch * heads * dim * sharding.seq_len**2 // sharding.ranks
    return max(1, min(MAX_CHUNKS, work // _CHUNK_WORK.get(device_type, _CHUNK_WORK["cuda"])))


def ulysses_forward(
    exchange: HeadExchange, attend: Attend, q: Tensor, k: Tensor, v: Tensor, out_dim: int
) -> tuple[Tensor, ...]:
    """Communicate, attend, communicate back, chunk by chunk.

    Args:
        exchange: the all-to-all.
        attend: attention of head shards, over the keys of this rank's group or of a ring across groups.
        q: ``[b, s, h, d]``, this rank's sequence shard of all heads.
        k: ``[b, s, n, d]``, likewise.
        v: ``[b, s, n, e]``, likewise.
        out_dim: the head_dim of the output: e, unless ``attend`` expands k and v.

    Returns:
        ``out [b, s, h, out_dim]``, followed by the new tensors that ``ulysses_backward`` needs: for each chunk its head
        shard (see ``HeadExchange.to_heads``), without k and v if these are exchanged again, then ``out`` and ``lse``.
    """
    dims = q.shape[3], k.shape[3], v.shape[3]
    out = q.new_empty(*q.shape[:3], out_dim)
    saved: list[Tensor] = []
    chunks = exchange.chunks
    chunk_kv: list[Tensor] = []
    outgoing: list[Incoming] = []
    arriving = _arriving(chunks, lambda chunk: exchange.to_heads(chunk, q, k, v), q.device)
    for chunk in chunks:
        shard = next(arriving)  # [t, b, w]
        chunk_q, *new_kv = chunk.split(shard, dims)  # [b, t, h, d], [b, t, n, d], [b, t, n, e]
        chunk_kv = new_kv or chunk_kv
        chunk_out, chunk_lse = attend(chunk.heads, chunk_q, *chunk_kv)
        outgoing.append(exchange.to_sequence(chunk.query_slices, (chunk_out, out)))
        if new_kv and exchange.shares_kv:
            shard = shard[:, :, : len(chunk.heads.queries) * dims[0]].contiguous()
        saved += [shard, chunk_out, chunk_lse]
    for sent in outgoing:
        sent.wait()
    return out, *saved


def ulysses_backward(
    exchange: HeadExchange,
    attend_backward: AttendBackward,
    saved: Sequence[Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of ``ulysses_forward``: communicate, backward of attention, communicate back, chunk by chunk.

    Args:
        exchange: the all-to-all.
        attend_backward: the backward of ``attend``.
        saved: what ``ulysses_forward`` returned after ``out``; if ``exchange.shares_kv``, followed by k and v.
        dout: ``[b, s, h, e]``, this rank's sequence shard.
        dlse: ``[b, h, t]``, this rank's head shard (see ``lse_gradient_to_heads``), or None.
        q_shape, k_shape, v_shape: the shapes of ``q [b, s, h, d]``, ``k [b, s, n, d]`` and ``v [b, s, n, e]``.

    Returns:
        ``dq``, ``dk`` and ``dv``, of these shapes, and ``dsinks [h]``, which is 0 for the heads of other ranks; None
        if attention has no sinks.
    """
    like, chunks = saved[0], exchange.chunks
    # A finished gradient is sent in the model's dtype. Partial gradients of a KV head are sent in float32, then summed.
    kv_dtype = accumulator(like.dtype) if exchange.shares_kv else like.dtype
    dims = _, k_dim, v_dim = q_shape[3], k_shape[3], v_shape[3]
    dq = like.new_empty(*q_shape)
    dk, dv = (like.new_empty(*shape, dtype=kv_dtype) for shape in (k_shape, v_shape))
    dsinks: Tensor | None = None
    again = tuple(saved[-2:]) if exchange.shares_kv else ()  # k, v: exchanged again

    def to_heads(chunk: HeadChunk) -> Incoming:
        return exchange.to_heads(chunk, dout, *again)

    chunk_kv: list[Tensor] = []
    outgoing: list[Incoming] = []
    arriving = _arriving(chunks, to_heads, like.device)
    for i, (chunk, (shard, out, lse)) in enumerate(_by_chunk(chunks, saved)):
        # [b, t, h, e], [b, t, n, d], [b, t, n, e]
        chunk_dout, *received_kv = chunk.split(next(arriving), (dout.shape[3], k_dim, v_dim))
        chunk_q, *kept_kv = chunk.split(shard, dims)
        chunk_kv = received_kv or kept_kv or chunk_kv
        at = chunk.heads.queries_in(exchange.full_chunk.heads)
        chunk_dlse = None if dlse is None else dlse[:, at.start : at.stop]  # [b, h, t]
        chunk_dq, *chunk_dkv, chunk_dsinks = attend_backward(
            chunk.heads, chunk_dout, chunk_dlse, chunk_q, *chunk_kv, out, lse
        )
        outgoing.append(exchange.to_sequence(chunk.query_slices, (chunk_dq.to(dq.dtype), dq)))
        # Chunks that read the same KV heads follow one another: their gradients are sent once, with the last chunk.
        if chunk.has_kv:
            kv_slices, sum_dkv = chunk.kv_slices, chunk_dkv
        else:
            sum_dkv = [x + y for x, y in zip(sum_dkv, chunk_dkv, strict=True)]
        if i + 1 == len(chunks) or chunks[i + 1].has_kv:
            sum_dk, sum_dv = (x.to(kv_dtype) for x in sum_dkv)
            outgoing.append(exchange.to_sequence(kv_slices, (sum_dk, dk), (sum_dv, dv)))
        if chunk_dsinks is not None:
            dsinks = chunk_dsinks.new_zeros(dout.shape[2]) if dsinks is None else dsinks
            at = chunk.heads.queries_in(exchange.heads)
            dsinks[at.start : at.stop] = chunk_dsinks
    for sent in outgoing:
        sent.wait()
    return dq, dk, dv, dsinks


def _arriving(
    chunks: Sequence[HeadChunk], to_heads: Callable[[HeadChunk], Incoming], device: torch.device
) -> Iterator[Tensor]:
    """The head shard of each chunk ``[t, b, w, d]``, while those of the next chunks are on their way."""
    ahead = _AHEAD.get(device.type, 1)
    started = deque(to_heads(chunk) for chunk in chunks[:ahead])
    for i in range(len(chunks)):
        arrived = [started.popleft().wait()]
        if i + ahead < len(chunks):
            started.append(to_heads(chunks[i + ahead]))
        yield arrived.pop()  # so that the caller has the only reference


def _by_chunk(chunks: Sequence[HeadChunk], saved: Sequence[Tensor]) -> Iterator[tuple[HeadChunk, Sequence[Tensor]]]:
    """Each chunk with its head shard, out and lse."""
    for i, chunk in enumerate(chunks):
        yield chunk, saved[3 * i : 3 * i + 3]


def saved_lse(exchange: HeadExchange, saved: Sequence[Tensor]) -> Tensor:
    """The log-sum-exp of all heads of this rank, ``[b, h, t]``, from what ``ulysses_forward`` returned."""
    by_chunk = [lse for _, (_, _, lse) in _by_chunk(exchange.chunks, saved)]
    return by_chunk[0] if len(by_chunk) == 1 else torch.cat(by_chunk, 1)


class _LseGradient(NamedTuple):
    """Whether a rank has a gradient of the log-sum-exp."""

    has_dlse: bool


def lse_to_sequence(exchange: HeadExchange, lse: Tensor) -> Tensor:
    """The head shard ``lse [b, h, t]`` as a sequence shard ``[b, h, s]``: an all-to-all of heads of width 1."""
    column = lse.transpose(1, 2).unsqueeze(-1)  # [b, t, h, 1]
    target = column.new_empty(lse.shape[0], exchange.tokens, len(exchange.heads.queries), 1)  # [b, s, h, 1]
    exchange.to_sequence(exchange.full_chunk.query_slices, (column, target)).wait()
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
    shard = exchange.to_heads(exchange.full_chunk, column).wait()  # [t, b, h]
    return shard.permute(1, 2, 0)


class HeadSlices:
    """By rank: some consecutive heads of a sequence shard."""

    def __init__(self, by_rank: Sequence[range]) -> None:
        self.by_rank = by_rank
        self.widths = [len(heads) for heads in by_rank]
        starts = [heads.start for heads in by_rank]
        self._first = starts[0]
        self._step = starts[1] - starts[0] if len(starts) > 1 else 0
        # Whether all ranks have as many heads, at equal distances: the heads of all ranks are one view then.
        self.even = len(set(self.widths)) == 1 and starts == [self._first + self._step * i for i in range(len(starts))]
        # Whether two ranks have the same head.
        self.overlap = any(a.stop > b.start for a, b in pairwise(by_rank) if a and b)

    def view(self, x: Tensor) -> Tensor:
        """The heads of all ranks of a sequence shard ``x [b, s, heads, d]``: ``[ranks, s, b, h, d]``."""
        batch, seq, head, dim = x.stride()
        size = (len(self.by_rank), x.shape[1], x.shape[0], self.widths[0], x.shape[3])
        stride = (self._step * head, seq, batch, head, dim)
        return x.as_strided(size, stride, x.storage_offset() + self._first * head)


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

    @cached_property
    def heads(self) -> Heads:
        """The heads that this rank attends with."""
        return self.by_rank[self.rank]

    @cached_property
    def query_slices(self) -> HeadSlices:
        """By rank: where its query heads are in a sequence shard ``[b, s, h, d]``."""
        return HeadSlices([heads.queries_in(self.tensor_heads) for heads in self.by_rank])

    @cached_property
    def kv_slices(self) -> HeadSlices:
        """By rank: where its KV heads are in a sequence shard ``[b, s, n, d]``."""
        return HeadSlices([heads.kv_in(self.tensor_heads) for heads in self.by_rank])

    def to_send(
        self, x: Tensor, *kv: Tensor
    ) -> tuple[Sequence[Tensor], list[HeadSlices], list[int], list[tuple[int, ...]]]:
        """What is sent of ``x [b, s, h, d]`` and of ``kv``: the tensors, and of each the heads of every rank and its
        head_dim; by rank, how many heads of each tensor."""
        slices = [self.query_slices, *([self.kv_slices] * len(kv) if self.has_kv else [])]
        tensors = (x, *kv)[: len(slices)]
        counts = list(zip(*(s.widths for s in slices), strict=True))
        return tensors, slices, [y.shape[3] for y in tensors], counts

    def split(self, shard: Tensor, dims: Sequence[int]) -> list[Tensor]:
        """A head shard ``[t, b, w]`` as views ``[b, t, heads, dim]``: its query heads and, if it has them, k and v.

        ``dims`` has the head_dim of each.
        """
        queries, kv = len(self.heads.queries), len(self.heads.kv)
        if queries and shard.shape[2] == queries * dims[0]:
            dims = dims[:1]
        counts = (queries, kv, kv)[: len(dims)]
        columns = shard.transpose(0, 1)  # [b, t, w]
        return _split_heads(columns, counts, dims)


def _width(counts: Sequence[int], dims: Sequence[int]) -> int:
    """Elements of so many heads of several tensors."""
    return sum(count * dim for count, dim in zip(counts, dims, strict=True))


def _split_heads(x: Tensor, counts: Sequence[int], dims: Sequence[int]) -> list[Tensor]:
    """The heads of several tensors, which are side by side in ``x [..., w]``: views ``[..., heads, dim]``."""
    sizes = list(zip(counts, dims, strict=True))
    parts = x.split_with_sizes([count * dim for count, dim in sizes], -1)
    return [part.unflatten(-1, size) for part, size in zip(parts, sizes, strict=True)]


def _write_heads(by_peer: Sequence[Sequence[Tensor]], slices: HeadSlices, targets: Sequence[Tensor]) -> None:
    """Write the heads that each rank has sent, ``[s, b, h, d]``, to sequence shards ``[b, s, h, d]``.

    A head that several ranks have sent is summed.
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
    """Tensors that an all-to-all has not delivered yet."""

    def __init__(self, pending: Pending, unpack: Callable[[], Tensor]) -> None:
        self._pending = pending
        self._unpack = unpack

    def wait(self) -> Tensor:
        """The tensor, once it has arrived (on CUDA, the current stream waits). Call it once."""
        self._pending.wait()
        return self._unpack()


@lru_cache(maxsize=256)
def _all_heads(heads: Heads, ranks: int, rank: int) -> HeadChunk:
    """All heads at once."""
    return HeadChunk(rank, heads.split(ranks), heads)


@lru_cache(maxsize=256)
def _chunks(heads: Heads, ranks: int, rank: int, most: int, in_ring: bool) -> tuple[HeadChunk, ...]:
    """``HeadExchange.chunks``: at most ``most``."""
    full = _all_heads(heads, ranks, rank)
    counts = {(len(part.queries), len(part.kv)) for part in full.by_rank}
    queries, kv = next(iter(counts))
    if most == 1 or len(counts) > 1:
        return (full,)

    def chunk(queries: range, has_kv: bool = True) -> HeadChunk:
        """The query heads ``queries`` of each rank, counted from its first."""
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
    """By ulysses rank: how many tokens it holds."""
    return tuple(sharding.ulysses_lengths(ring_rank))


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
        max_chunks: the largest number of chunks (see ``chunk_limit``).
    """

    group: Ranks
    sharding: SequenceSharding
    ring_rank: int
    heads: Heads
    max_chunks: int = MAX_CHUNKS

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
        """Whether the query heads of two ranks read the same KV head: head shards of k, v are larger than sequence
        shards then, and their gradients partial."""
        return self.full_chunk.kv_slices.overlap

    @property
    def full_chunk(self) -> HeadChunk:
        """All heads at once."""
        return _all_heads(self.heads, self.group.size(), self.rank)

    @property
    def chunks(self) -> tuple[HeadChunk, ...]:
        """All heads in chunks, the same on every rank.

        Within a chunk every KV head serves the same number of query heads, so that attention kernels need no copies.
        If the ranks' heads do not divide so, there is one chunk. A chunk may carry no KV heads, in which case it reuses
        the previous chunk's; this never happens in a hybrid, whose K/V are still to be sent around the ring.
        """
        return _chunks(self.heads, self.group.size(), self.rank, self.max_chunks, self.sharding.ring > 1)

    def to_heads(self, chunk: HeadChunk, x: Tensor, *kv: Tensor) -> Incoming:
        """Send each rank its query heads of ``x``, and its KV heads of ``kv`` if the chunk has some: one all-to-all.

        Args:
            chunk: the heads.
            x: ``[b, s, h, d]``, with the query heads.
            kv: tensors ``[b, s, n, d]`` of the same dtype: k and v, or nothing. They may differ in d.

        Returns:
            This rank's head shard ``[t, b, w]``: its query heads, then its KV heads of k, then those of v.
        """
        tensors, slices, dims, counts = chunk.to_send(x, *kv)
        batch, tokens = x.shape[:2]
        widths = [_width(count, dims) for count in counts]  # by rank, elements of each token
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
            for heads, part in zip(_split_heads(target, count, dims), parts, strict=True):
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
            slices: by rank, the place of its heads in a sequence shard. A KV head that several ranks send is summed.
            tensors: pairs of a head shard ``[b, t, h, d]`` and the sequence shard ``[b, s, h, d]`` to be written. The
                pairs may differ in d.

        Returns:
            ``wait`` returns the last of the sequence shards, after all of them are written.
        """
        columns = [x.transpose(0, 1).flatten(2) for x, _ in tensors]  # [t, b, w]
        rows = torch.cat(columns, 2) if len(columns) > 1 else columns[0]
        rows = self._ordered(rows, 0).contiguous()
        _, batch, width = rows.shape
        targets, tokens = [target for _, target in tensors], self.tokens
        dims = [target.shape[3] for target in targets]
        widths = [w * sum(dims) for w in slices.widths]  # by rank, elements of each token
        receives = [tokens * batch * w for w in widths]
        sends = [length * batch * width for length in self.lengths]
        received, pending = start_all_to_all(rows, sends, receives, self.group)

        def unpack() -> Tensor:
            if slices.even and not slices.overlap:
                even = received.view(len(widths), tokens, batch, widths[0])
                count = [slices.widths[0]] * len(dims)
                for target, x in zip(targets, _split_heads(even, count, dims), strict=True):
                    slices.view(target).copy_(x)
                return targets[-1]
            by_peer = [
                _split_heads(part.view(tokens, batch, w), [heads] * len(dims), dims)
                for part, w, heads in zip(received.split_with_sizes(receives), widths, slices.widths, strict=True)
            ]
            _write_heads(by_peer, slices, targets)
            return targets[-1]

        return Incoming(pending, unpack)

    def _ordered(self, rows: Tensor, direction: int) -> Tensor:
        """``rows [t, ...]`` in the order of the ranks instead of the positions (0), or the other way around (1)."""
        if self.sharding.layout == "contiguous":
            return rows  # they are the same

        def make() -> tuple[Tensor, ...]:
            by_rank = torch.cat(self.sharding.ulysses_rows(self.ring_rank, rows.device))
            return by_rank, by_rank.argsort()

        orders = cached_tensors(("token orders", self.sharding, self.ring_rank), rows.device, make)
        return rows.index_select(0, orders[direction])


@lru_cache(maxsize=256)
def _places(sharding: SequenceSharding, ring_rank: int) -> tuple[tuple[tuple[slice, slice], ...], ...]:
    """By ulysses rank: pairs of some rows of a head shard and the same tokens in its sequence shard.

    One pair for contiguous and striped layouts, two for zigzag, where tokens divide evenly.
    """
    places = []
    for rows in sharding.ulysses_rows(ring_rank):
        pairs, first = [], 0
        steps, counts = (x.tolist() for x in rows.diff().unique_consecutive(return_counts=True))
        while first < len(rows):
            step, count = (steps.pop(0), counts.pop(0)) if steps else (1, 0)
            begin, last = int(rows[first]), int(rows[first]) + step * count
            pairs.append((slice(begin, last + 1, step), slice(first, first + count + 1)))
            first += count + 1
            if counts:  # the step to the next run belongs to neither
                counts[0] -= 1
                if not counts[0]:
                    del steps[0], counts[0]
        places.append(tuple(pairs) or ((slice(0), slice(0)),))
    return tuple(places)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The concatenation of ``parts``, without a copy if there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class HeadExchangeInMemory(HeadExchange):
    """The all-to-all between processes that share memory: each reads what the others have written there.

    There is no transfer to hide behind the computation, so all heads are exchanged at once.
    """

    def to_heads(self, chunk: HeadChunk, x: Tensor, *kv: Tensor) -> Incoming:
        tensors, slices, dims, counts = chunk.to_send(x, *kv)
        batch, tokens = x.shape[:2]
        widths = [_width(count, dims) for count in counts]  # by rank, elements of each token
        shard = x.new_empty(sum(self.lengths), batch, widths[self.rank])
        places = _places(self.sharding, self.ring_rank)
        sends, received = [], {}
        for peer, (count, width) in enumerate(zip(counts, widths, strict=True)):
            targets = [(shard[place], part) for place, part in places[peer]]
            if peer != self.rank:
                message = new_message(tokens * batch * width, x, self.group)
                sends.append((peer, message))
                received[peer] = x.new_empty(self.lengths[peer] * batch * widths[self.rank])
                targets = [(message.view(tokens, batch, width), slice(tokens))]
            for target, part in targets:
                for y, s, into in zip(tensors, slices, _split_heads(target, count, dims), strict=True):
                    heads = s.by_rank[peer]
                    into.copy_(y[:, part, heads.start : heads.stop].transpose(0, 1))
        pending = exchange(sends, list(received.items()), self.group, borrow=True)

        def unpack() -> Tensor:
            for peer, message in received.items():
                rows = message.view(self.lengths[peer], batch, widths[self.rank])
                for place, part in places[peer]:
                    shard[place] = rows[part]
            received.clear()
            return shard

        return Incoming(pending, unpack)

    def to_sequence(self, slices: HeadSlices, *tensors: tuple[Tensor, Tensor]) -> Incoming:
        columns = [x.transpose(0, 1) for x, _ in tensors]  # [t, b, h, d]
        targets, tokens = [target for _, target in tensors], self.tokens
        like, (_, batch, heads, _) = columns[0], columns[0].shape
        dims = [x.shape[3] for x in columns]
        places = _places(self.sharding, self.ring_rank)
        sends, received = [], {}
        for peer, length in enumerate(self.lengths):
            if peer == self.rank:
                continue
            message = new_message(length * batch * heads * sum(dims), like, self.group)
            into = _split_heads(message.view(length, batch, heads * sum(dims)), [heads] * len(dims), dims)
            for x, y in zip(into, columns, strict=True):
                for place, part in places[peer]:
                    x[part] = y[place]
            sends.append((peer, message))
            received[peer] = like.new_empty(tokens * batch * slices.widths[peer] * sum(dims))
        pending = exchange(sends, list(received.items()), self.group, borrow=True)

        def unpack() -> Tensor:
            own = [_joined([x[place] for place, _ in places[self.rank]]) for x in columns]
            by_peer = [own] * len(self.lengths)
            for peer, message in received.items():
                count = slices.widths[peer]
                shard = message.view(tokens, batch, count * sum(dims))
                by_peer[peer] = _split_heads(shard, [count] * len(dims), dims)
            _write_heads(by_peer, slices, targets)
            return targets[-1]

        return Incoming(pending, unpack)
