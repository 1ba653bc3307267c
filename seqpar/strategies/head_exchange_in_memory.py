"""The all-to-all of Ulysses between processes of one host that share memory.

Shapes: as in ``head_exchange.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..comm.p2p import exchange, new_message
from ..layout import SequenceSharding
from .head_exchange import HeadChunk, HeadExchange, HeadSlices, Incoming, row_width, split_heads, write_heads

# Rows of a head shard, and the tokens of a sequence shard that are in these rows.
RowsOfTokens = tuple[slice, slice]


@lru_cache(maxsize=256)
def _rows_of_ranks(sharding: SequenceSharding, ring_rank: int) -> tuple[tuple[RowsOfTokens, ...], ...]:
    """For each ulysses rank, the rows of its tokens in a head shard, which holds the tokens of all ulysses ranks.

    If the tokens divide evenly, a rank has one pair of slices in a contiguous or striped layout, and two in a zigzag
    layout.
    """
    by_rank = []
    for rows in sharding.ulysses_rows(ring_rank):
        pairs = []
        for first, end in _equally_spaced(rows):
            step = int(rows[first + 1] - rows[first]) if end - first > 1 else 1
            pairs.append((slice(int(rows[first]), int(rows[end - 1]) + 1, step), slice(first, end)))
        by_rank.append(tuple(pairs) or ((slice(0), slice(0)),))
    return tuple(by_rank)


def _equally_spaced(numbers: Tensor) -> Iterator[tuple[int, int]]:
    """Divide the increasing ``numbers [n]`` into ranges of indices in which neighbours have the same difference."""
    _, counts = numbers.diff().unique_consecutive(return_counts=True)
    start = 0  # the first index that is in no range yet
    difference = 0  # the index of the first difference of a run of equal differences
    for count in counts.tolist():
        first = max(start, difference)  # the difference between two ranges is in neither of them
        difference += count
        if first < difference:
            start = difference + 1
            yield first, start
    if start < len(numbers):
        yield start, len(numbers)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
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
        rows_of_ranks = _rows_of_ranks(self.sharding, self.ring_rank)
        sends, received = [], {}
        for peer, (count, width) in enumerate(zip(counts, widths, strict=True)):
            targets = [(shard[rows], own) for rows, own in rows_of_ranks[peer]]
            if peer != self.rank:
                message = new_message(tokens * batch * width, x, self.group)
                sends.append((peer, message))
                received[peer] = x.new_empty(self.lengths[peer] * batch * widths[self.rank])
                targets = [(message.view(tokens, batch, width), slice(tokens))]
            for target, own in targets:
                for y, s, into in zip(tensors, slices, split_heads(target, count, dims), strict=True):
                    heads = s.by_rank[peer]
                    into.copy_(y[:, own, heads.start : heads.stop].transpose(0, 1))
        pending = exchange(sends, list(received.items()), self.group, borrow=True)

        def unpack() -> Tensor:
            for peer, message in received.items():
                by_token = message.view(self.lengths[peer], batch, widths[self.rank])
                for rows, own in rows_of_ranks[peer]:
                    shard[rows] = by_token[own]
            received.clear()
            return shard

        return Incoming(pending, unpack)

    def to_sequence(self, slices: HeadSlices, *tensors: tuple[Tensor, Tensor]) -> Incoming:
        columns = [x.transpose(0, 1) for x, _ in tensors]  # [t, b, h, d]
        targets, tokens = [target for _, target in tensors], self.tokens
        like, (_, batch, heads, _) = columns[0], columns[0].shape
        dims = [x.shape[3] for x in columns]
        rows_of_ranks = _rows_of_ranks(self.sharding, self.ring_rank)
        sends, received = [], {}
        for peer, length in enumerate(self.lengths):
            if peer == self.rank:
                continue
            message = new_message(length * batch * heads * sum(dims), like, self.group)
            into = split_heads(message.view(length, batch, heads * sum(dims)), [heads] * len(dims), dims)
            for x, y in zip(into, columns, strict=True):
                for rows, own in rows_of_ranks[peer]:
                    x[own] = y[rows]
            sends.append((peer, message))
            received[peer] = like.new_empty(tokens * batch * slices.counts[peer] * sum(dims))
        pending = exchange(sends, list(received.items()), self.group, borrow=True)

        def unpack() -> Tensor:
            own = [_concatenated([x[rows] for rows, _ in rows_of_ranks[self.rank]]) for x in columns]
            by_peer = [own] * len(self.lengths)
            for peer, message in received.items():
                count = slices.counts[peer]
                shard = message.view(tokens, batch, count * sum(dims))
                by_peer[peer] = split_heads(shard, [count] * len(dims), dims)
            write_heads(by_peer, slices, targets)
            return targets[-1]

        return Incoming(pending, unpack)
