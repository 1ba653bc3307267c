"""The all-to-all of DeepSpeed-Ulysses: a shard of the sequence becomes a shard of the heads, and back.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023. Heads need not divide by the ranks, nor tokens; where two ranks' query heads read the same key/value
head, both receive it, and its two gradients are summed at home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.trace import count_sent
from ..layout import split_range
from ..mesh import Ranks, parent_group, rank_in_parent
from ..schedule import SequenceSharding, head_range, kv_head_range, on_device

_PARTS = 4  # at most, in which a rank's heads travel


@dataclass(frozen=True)
class HeadPart:
    """Some heads of every rank, exchanged together: ``queries[r]`` and ``keys[r]`` are those of rank ``r``."""

    queries: tuple[range, ...]
    keys: tuple[range, ...]


class Arriving:
    """Tensors on their way; ``wait`` once."""

    def __init__(self, work: dist.Work | None, buffers: list[Tensor], unpack: Callable[[], list[Tensor]]) -> None:
        self._work = work
        self._buffers = buffers  # held until everything has left and come
        self._unpack = unpack

    def wait(self) -> list[Tensor]:
        """What has come, when it is here (on CUDA: the current stream waits)."""
        if self._work is not None:
            self._work.wait()
        tensors = self._unpack()
        self._buffers = []
        return tensors


@dataclass(frozen=True)
class HeadExchange:
    """Moves tensors ``[batch, seq, heads, dim]`` between the two shardings inside one ulysses group.

    A sequence shard holds this rank's tokens and all heads; a head shard holds the tokens of the whole ulysses
    group, in increasing position, and some of this rank's heads.
    """

    group: Ranks
    shards: SequenceSharding
    ring_rank: int
    heads: int
    kv_heads: int

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def whole(self) -> HeadPart:
        """All heads."""
        size = self.group.size()
        return HeadPart(
            tuple(head_range(self.heads, size, r) for r in range(size)),
            tuple(kv_head_range(self.heads, self.kv_heads, size, r) for r in range(size)),
        )

    def parts(self) -> list[HeadPart]:
        """All heads, cut so that one part can travel while another is computed; the same cut on every rank.

        A part's query heads form equal groups over its key/value heads. One without keys reads those of the part
        before it; around a ring, where keys go on travelling, there is none.
        """
        whole, group = self.whole, self.heads // self.kv_heads
        kinds = {(len(q), len(k)) for q, k in zip(whole.queries, whole.keys, strict=True)}
        queries, keys = next(iter(kinds))
        if len(kinds) > 1:
            return [whole]
        if keys > 1 and self.heads % self.group.size() == 0 and queries == keys * group:
            cuts = [split_range(keys, min(_PARTS, keys), i) for i in range(min(_PARTS, keys))]
            return [
                HeadPart(_within(whole.queries, range(c.start * group, c.stop * group)), _within(whole.keys, c))
                for c in cuts
            ]
        if keys == 1 and self.shards.ring == 1:
            cuts = [split_range(queries, min(_PARTS, queries), i) for i in range(min(_PARTS, queries))]
            return [
                HeadPart(_within(whole.queries, c), whole.keys if c is cuts[0] else _within(whole.keys, range(0)))
                for c in cuts
            ]
        return [whole]

    @property
    def shared_kv(self) -> bool:
        """Whether some key/value head is read by two ranks."""
        return sum(map(len, self.whole.keys)) > self.kv_heads

    def _token_rows(self, device: torch.device) -> list[Tensor]:
        """Where each rank's tokens stand in the group's sequence."""
        return [on_device(rows, device) for rows in self.shards.ulysses_rows(self.ring_rank)]

    def to_heads(self, *tensors: tuple[Tensor, Sequence[range]]) -> Arriving:
        """Sequence shards to head shards, all in one exchange.

        Args:
            tensors: ``x [batch, seq_local, heads, dim]``, all of one dtype, each with the heads that each rank gets.

        Returns:
            Arriving head shards, one for each.
        """
        rows = self._token_rows(tensors[0][0].device)
        sends = [[_Chunk(x, heads=ranges[peer]) for x, ranges in tensors] for peer in range(self.group.size())]
        shapes = [[(x.shape[0], len(peer_rows), len(ranges[self.rank]), x.shape[3]) for x, ranges in tensors]
                  for peer_rows in rows]  # fmt: skip
        work, buffers, received = _all_to_all(sends, shapes, self.group)
        total = sum(len(r) for r in rows)

        def unpack() -> list[Tensor]:
            results = []
            for i, (x, ranges) in enumerate(tensors):
                out = x.new_empty(x.shape[0], total, len(ranges[self.rank]), x.shape[3])
                for peer_rows, chunks in zip(rows, received, strict=True):
                    out.index_copy_(1, peer_rows, chunks[i])
                results.append(out)
            return results

        return Arriving(work, buffers, unpack)

    def to_sequence(self, *tensors: tuple[Tensor, Sequence[range], Tensor]) -> Arriving:
        """Head shards back to sequence shards; what several ranks hold of one key/value head is summed.

        Args:
            tensors: ``x [batch, seq, heads of this rank, dim]``, all of one dtype, each with the heads that each
                rank sends and the sequence shard whose heads they become, which ``wait`` writes.
        """
        rows = self._token_rows(tensors[0][0].device)
        sends = [[_Chunk(x, rows=peer_rows) for x, _, _ in tensors] for peer_rows in rows]
        tokens = len(rows[self.rank])
        shapes = [[(x.shape[0], tokens, len(ranges[peer]), x.shape[3]) for x, ranges, _ in tensors]
                  for peer in range(self.group.size())]  # fmt: skip
        work, buffers, received = _all_to_all(sends, shapes, self.group)

        def unpack() -> list[Tensor]:
            for i, (_, ranges, out) in enumerate(tensors):
                filled = 0
                for span, chunks in zip(ranges, received, strict=True):
                    again = max(0, min(filled, span.stop) - span.start)  # heads that a rank before has sent, too
                    out[:, :, span.start : span.start + again] += chunks[i][:, :, :again]
                    out[:, :, span.start + again : span.stop] = chunks[i][:, :, again:]
                    filled = max(filled, span.stop)
            return [out for _, _, out in tensors]

        return Arriving(work, buffers, unpack)


def _within(ranges: Sequence[range], cut: range) -> tuple[range, ...]:
    """``cut`` of each range, counted from its start."""
    return tuple(r[cut.start : cut.stop] for r in ranges)


@dataclass(frozen=True)
class _Chunk:
    """Some heads or some rows of ``x [batch, seq, heads, dim]``, to be sent."""

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

    def write(self, room: Tensor) -> None:
        """Copy it, in one pass."""
        room = room.view(self.shape)
        if self.heads is not None:
            room.copy_(self.x[:, :, self.heads.start : self.heads.stop])
        else:
            assert self.rows is not None
            torch.index_select(self.x, 1, self.rows, out=room)


def _all_to_all(
    sends: list[list[_Chunk]], shapes: Sequence[Sequence[tuple[int, ...]]], ranks: Ranks
) -> tuple[dist.Work | None, list[Tensor], list[list[Tensor]]]:
    """Start one uneven all-to-all of lists of tensors of one dtype: ``sends[peer]`` goes to ``peer``.

    ``shapes[peer]`` are the shapes of what comes from it. Sent as bytes, which every backend takes. Returns the work,
    the buffers that must live until it is done, and views of what will have come then.
    """
    like = sends[0][0].x
    lengths = [[prod(chunk.shape) for chunk in chunks] for chunks in sends]
    buffer = like.new_empty(sum(map(sum, lengths)))
    rooms = iter(buffer.split([n for peer in lengths for n in peer]))
    for chunk in chain.from_iterable(sends):
        chunk.write(next(rooms))
    packed = buffer.view(torch.uint8)
    send_sizes = [sum(peer) * like.element_size() for peer in lengths]
    counts = [[prod(s) for s in peer_shapes] for peer_shapes in shapes]
    receive_sizes = [sum(c) * like.element_size() for c in counts]
    received = packed.new_empty(sum(receive_sizes))
    group = parent_group(ranks)
    receive_splits, send_splits = [0] * group.size(), [0] * group.size()
    for peer, (coming, going) in enumerate(zip(receive_sizes, send_sizes, strict=True)):
        receive_splits[rank_in_parent(ranks, peer)] = coming
        send_splits[rank_in_parent(ranks, peer)] = going
    work = dist.all_to_all_single(received, packed, receive_splits, send_splits, group=group, async_op=True)
    away = [size for peer, size in enumerate(send_sizes) if peer != ranks.rank() and size]
    count_sent(sum(away), len(away))
    pieces = iter(received.view(like.dtype).split([c for peer in counts for c in peer]))
    views = [[next(pieces).view(shape) for shape in peer_shapes] for peer_shapes in shapes]
    return work, [packed, received], views
