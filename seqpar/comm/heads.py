"""The all-to-all of DeepSpeed-Ulysses: a shard of the sequence becomes a shard of the heads, and back.

Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer
Models", 2023. Heads need not divide by the ranks, nor tokens; where two ranks' query heads read the same key/value
head, both receive it, and its two gradients are summed at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh import Ranks, rank_in_whole, whole_group
from ..schedule import Shards, head_range, kv_head_range, on_device
from .trace import count_sent


@dataclass(frozen=True)
class HeadExchange:
    """Moves tensors ``[batch, seq, heads, dim]`` between the two shardings inside one ulysses group.

    A sequence shard holds this rank's tokens and all heads; a head shard holds the tokens of the whole ulysses
    group, in increasing position, and this rank's heads.
    """

    group: Ranks
    shards: Shards
    ring_rank: int
    heads: int
    kv_heads: int

    @property
    def rank(self) -> int:
        return self.group.rank()

    def head_ranges(self, heads: int) -> list[range]:
        """Of a tensor of ``heads`` query or key/value heads, those each rank takes."""
        size = self.group.size()
        if heads == self.heads:
            return [head_range(self.heads, size, r) for r in range(size)]
        return [kv_head_range(self.heads, self.kv_heads, size, r) for r in range(size)]

    @property
    def shared_kv(self) -> bool:
        """Whether some key/value head is read by two ranks."""
        ranges = [kv_head_range(self.heads, self.kv_heads, self.group.size(), r) for r in range(self.group.size())]
        return sum(len(r) for r in ranges) > self.kv_heads

    def _token_rows(self, device: torch.device) -> list[Tensor]:
        """Where each rank's tokens stand in the group's sequence."""
        return [on_device(rows, device) for rows in self.shards.ulysses_rows(self.ring_rank)]

    def to_heads(self, tensors: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        """Sequence shards to head shards, all in one exchange.

        Args:
            tensors: pairs of ``x [batch, seq_local, heads, dim]``, all of one dtype, and the number of heads that
                the rule of division goes by (query heads or key/value heads).
        """
        rows = self._token_rows(tensors[0][0].device)
        ranges = [self.head_ranges(heads) for _, heads in tensors]
        sends = [[_Chunk(x, heads=r[peer]) for (x, _), r in zip(tensors, ranges, strict=True)]
                 for peer in range(self.group.size())]  # fmt: skip
        shapes = [[(x.shape[0], len(peer_rows), len(r[self.rank]), x.shape[3])
                   for (x, _), r in zip(tensors, ranges, strict=True)] for peer_rows in rows]  # fmt: skip
        received = _all_to_all(sends, shapes, self.group)
        total = sum(len(r) for r in rows)
        results = []
        for i, (x, _) in enumerate(tensors):
            out = x.new_empty(x.shape[0], total, len(ranges[i][self.rank]), x.shape[3])
            for peer_rows, chunks in zip(rows, received, strict=True):
                out.index_copy_(1, peer_rows, chunks[i])
            results.append(out)
        return results

    def to_sequence(self, tensors: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
        """Head shards back to sequence shards; what several ranks hold of one key/value head is summed."""
        rows = self._token_rows(tensors[0][0].device)
        ranges = [self.head_ranges(heads) for _, heads in tensors]
        sends = [[_Chunk(x, rows=peer_rows) for x, _ in tensors] for peer_rows in rows]
        tokens = len(rows[self.rank])
        shapes = [[(x.shape[0], tokens, len(r[peer]), x.shape[3]) for (x, _), r in zip(tensors, ranges, strict=True)]
                  for peer in range(self.group.size())]  # fmt: skip
        received = _all_to_all(sends, shapes, self.group)
        results = []
        for i, (x, heads) in enumerate(tensors):
            out = x.new_empty(x.shape[0], tokens, heads, x.shape[3])
            filled = 0
            for peer, chunks in enumerate(received):
                span = ranges[i][peer]
                again = max(0, min(filled, span.stop) - span.start)  # heads that a rank before this one has sent, too
                out[:, :, span.start : span.start + again] += chunks[i][:, :, :again]
                out[:, :, span.start + again : span.stop] = chunks[i][:, :, again:]
                filled = max(filled, span.stop)
            results.append(out)
        return results


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
) -> list[list[Tensor]]:
    """One uneven all-to-all of lists of tensors of one dtype: ``sends[peer]`` goes to ``peer``.

    ``shapes[peer]`` are the shapes of what comes from it. Sent as bytes, which every backend takes.
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
    group = whole_group(ranks)
    receive_splits, send_splits = [0] * group.size(), [0] * group.size()
    for peer, (coming, going) in enumerate(zip(receive_sizes, send_sizes, strict=True)):
        receive_splits[rank_in_whole(ranks, peer)] = coming
        send_splits[rank_in_whole(ranks, peer)] = going
    dist.all_to_all_single(received, packed, receive_splits, send_splits, group=group)
    away = [size for peer, size in enumerate(send_sizes) if peer != ranks.rank() and size]
    count_sent(sum(away), len(away))
    pieces = iter(received.view(like.dtype).split([c for peer in counts for c in peer]))
    return [[next(pieces).view(shape) for shape in peer_shapes] for peer_shapes in shapes]
