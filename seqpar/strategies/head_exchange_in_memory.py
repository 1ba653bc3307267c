"""The all-to-all of Ulysses between processes of one host that share memory.

Shapes: as in ``head_exchange.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..comm.p2p import exchange, new_message
from ..layout import SequenceSharding
from .head_exchange import HeadChunk, HeadExchange, HeadSlices, Incoming, row_width, split_heads, write_heads


@lru_cache(maxsize=256)
def _places(sharding: SequenceSharding, ring_rank: int) -> tuple[tuple[tuple[slice, slice], ...], ...]:
    """For each ulysses rank, pairs of slices: rows of a head shard, and the same tokens in the rank's sequence shard.

    If the tokens divide evenly, a rank has one pair in a contiguous or striped layout, and two in a zigzag layout.
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
    """The concatenation of ``parts``. A single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class HeadExchangeInMemory(HeadExchange):
    """The all-to-all between processes that share memory: each process reads the messages that the others wrote there.

    No transfer has to overlap with computation, so all heads are exchanged in one chunk.
    """

    def to_heads(self, chunk: HeadChunk, x: Tensor, *kv: Tensor) -> Incoming:
        tensors, slices, dims, counts = chunk.to_send(x, *kv)
        batch, tokens = x.shape[:2]
        widths = [row_width(count, dims) for count in counts]  # by rank, elements of each token
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
                for y, s, into in zip(tensors, slices, split_heads(target, count, dims), strict=True):
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
            into = split_heads(message.view(length, batch, heads * sum(dims)), [heads] * len(dims), dims)
            for x, y in zip(into, columns, strict=True):
                for place, part in places[peer]:
                    x[part] = y[place]
            sends.append((peer, message))
            received[peer] = like.new_empty(tokens * batch * slices.counts[peer] * sum(dims))
        pending = exchange(sends, list(received.items()), self.group, borrow=True)

        def unpack() -> Tensor:
            own = [_joined([x[place] for place, _ in places[self.rank]]) for x in columns]
            by_peer = [own] * len(self.lengths)
            for peer, message in received.items():
                count = slices.counts[peer]
                shard = message.view(tokens, batch, count * sum(dims))
                by_peer[peer] = split_heads(shard, [count] * len(dims), dims)
            write_heads(by_peer, slices, targets)
            return targets[-1]

        return Incoming(pending, unpack)
