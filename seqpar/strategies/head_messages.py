"""The messages of Ulysses' all-to-all: which heads of a sequence shard each rank sends, side by side.

Shapes: b batch, s tokens of this rank, h heads, d head_dim, w elements of a token in its heads of all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor


class HeadSlices:
    """For each rank, some consecutive heads of a sequence shard.

    Attributes:
        by_rank: the heads of each rank, as indices into the sequence shard.
        counts: the number of heads of each rank.
        even: whether all ranks have the same number of heads, at equal distances. ``of`` can view them together then.
        overlap: whether two ranks have the same head.
    """

    def __init__(self, by_rank: Sequence[range]) -> None:
        self.by_rank = by_rank
        self.counts = [len(heads) for heads in by_rank]
        steps = {b.start - a.start for a, b in pairwise(by_rank)}
        self._step = max(steps, default=0)
        self.even = len(set(self.counts)) == 1 and len(steps) <= 1
        self.overlap = any(a.stop > b.start for a, b in pairwise(by_rank) if a and b)

    def without(self, rank: int) -> HeadSlices:
        """The same with no heads for ``rank``."""
        others = HeadSlices([range(0) if i == rank else heads for i, heads in enumerate(self.by_rank)])
        others.overlap = self.overlap
        return others

    def of(self, x: Tensor, ranks: range) -> Tensor:
        """The heads of one rank, or of all if they are ``even``, in ``x [b, s, h, d]``: ``[ranks, s, b, h, d]``."""
        batch, seq, head, dim = x.stride()
        heads = self.by_rank[ranks.start]
        size = (len(ranks), x.shape[1], x.shape[0], len(heads), x.shape[3])
        return x.as_strided(size, (self._step * head, seq, batch, head, dim), x.storage_offset() + heads.start * head)


# A sequence shard [b, s, h, d], and which of its heads each rank sends or receives.
ShardHeads = tuple[Tensor, HeadSlices]


def row_widths(parts: Sequence[ShardHeads]) -> list[int]:
    """For each rank, the elements of one token in its heads of all parts."""
    return [sum(slices.counts[i] * x.shape[3] for x, slices in parts) for i in range(len(parts[0][1].counts))]


def pack(parts: Sequence[ShardHeads], messages: Tensor) -> None:
    """Write the message ``[s, b, w]`` to each rank, one after another, into ``messages [elements]``."""
    (batch, tokens), widths = parts[0][0].shape[:2], row_widths(parts)
    ranks, start = range(len(widths)), 0
    # On a GPU, one kernel for all ranks takes the host less time than a kernel for each rank.
    together = all(slices.even for _, slices in parts)
    for group in [ranks] if together else [ranks[i : i + 1] for i in ranks]:
        shape = len(group), tokens, batch, widths[group.start]
        message = messages.narrow(0, start, prod(shape)).view(shape)
        start += prod(shape)
        shapes = [(slices.counts[group.start], x.shape[3]) for x, slices in parts]
        for (x, slices), heads in zip(parts, split_heads(message, shapes), strict=True):
            heads.copy_(slices.of(x, group))


def unpack(parts: Sequence[ShardHeads], messages: Sequence[Tensor]) -> None:
    """Write the message ``[s, b, w]`` of each rank into the parts. A head that two ranks have is added to its part."""
    batch, tokens = parts[0][0].shape[:2]
    by_rank = [
        split_heads(message.view(tokens, batch, width), [(slices.counts[i], x.shape[3]) for x, slices in parts])
        for i, (message, width) in enumerate(zip(messages, row_widths(parts), strict=True))
    ]
    for (x, slices), heads in zip(parts, zip(*by_rank, strict=True), strict=True):  # heads: [s, b, h, d] of each rank
        if slices.even and not slices.overlap:
            torch.stack(heads, out=slices.of(x, range(len(heads))))
            continue
        for i, message in enumerate(heads):
            target = slices.of(x, range(i, i + 1))[0]
            target.add_(message) if slices.overlap else target.copy_(message)


def split_heads(x: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Split ``x [..., w]``, the heads of several tensors side by side, into views ``[..., heads, dim]``."""
    columns = x.split_with_sizes([heads * dim for heads, dim in shapes], -1)
    return [column.unflatten(-1, shape) for column, shape in zip(columns, shapes, strict=True)]
