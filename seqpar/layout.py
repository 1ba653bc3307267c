"""Layouts: which global positions each rank of the sequence group holds, always in increasing order.

* ``contiguous``: the sequence is split into ``ranks`` parts; rank ``r`` holds part ``r``.
* ``zigzag``: the sequence is split into ``2 * ranks`` parts; rank ``r`` holds parts ``r`` and ``2 * ranks - 1 - r``
  (the layout of Llama 3's and ring-flash-attention's context parallelism).
* ``striped``: rank ``r`` holds positions ``r, r + ranks, r + 2 * ranks, ...`` (Brandon et al., Striped Attention,
  2023).

A length need not divide by the number of parts: when ``length`` is split into ``m`` parts, the first ``length % m``
parts hold one token more.

Eight tokens on four ranks under a causal mask. Row ``i`` shows the keys that query ``i`` sees, and which rank holds
token ``i``. The work of a rank is the number of keys its queries see:

                  key               rank that holds query i
            0 1 2 3 4 5 6 7     contiguous   zigzag   striped
    query 0 x . . . . . . .          0          0         0
          1 x x . . . . . .          0          1         1
          2 x x x . . . . .          1          2         2
          3 x x x x . . . .          1          3         3
          4 x x x x x . . .          2          3         0
          5 x x x x x x . .          2          2         1
          6 x x x x x x x .          3          1         2
          7 x x x x x x x x          3          0         3

                  work of rank 0          3          9         6
                          rank 1          7          9         8
                          rank 2         11          9        10
                          rank 3         15          9        12

Every rank waits for the slowest one, so ``contiguous`` takes 15 units of time, ``zigzag`` 9 and ``striped`` 12. With
long sequences ``striped`` comes close to ``zigzag``: its ranks differ by at most one key for each query. Under a full
mask all three are balanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def split_range(length: int, parts: int, index: int) -> range:
    """The indices of part ``index`` when ``length`` items are split into ``parts``.

    The first ``length % parts`` parts hold one item more than the others.
    """
    size, remainder = divmod(length, parts)
    start = index * size + min(index, remainder)
    return range(start, start + size + (index < remainder))


def shard_ranges(seq_len: int, ranks: int, rank: int, layout: Layout = "contiguous") -> tuple[range, ...]:
    """The global positions that ``rank`` of ``ranks`` holds, as non-empty ranges in increasing order."""
    if layout == "contiguous":
        ranges: tuple[range, ...] = (split_range(seq_len, ranks, rank),)
    elif layout == "zigzag":
        first = split_range(seq_len, 2 * ranks, rank)
        second = split_range(seq_len, 2 * ranks, 2 * ranks - 1 - rank)
        # On the last rank the two parts are neighbours and form one range.
        ranges = (range(first.start, second.stop),) if first.stop == second.start else (first, second)
    elif layout == "striped":
        ranges = (range(rank, seq_len, ranks),)
    else:
        raise ValueError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
    return tuple(r for r in ranges if len(r))


def shard_length(seq_len: int, ranks: int, rank: int, layout: Layout = "contiguous") -> int:
    """The number of tokens that ``rank`` holds."""
    return sum(len(r) for r in shard_ranges(seq_len, ranks, rank, layout))


def check_lengths(lengths: Sequence[int], layout: Layout, seq_len: int | None = None) -> int:
    """The global length of a sequence whose shards hold ``lengths`` tokens, by rank.

    Raises:
        ValueError: the layout gives other lengths, or they do not add up to ``seq_len``.
    """
    total = sum(lengths)
    if seq_len is not None and total != seq_len:
        raise ValueError(
            f"seq_len={seq_len}: the ranks hold {total} tokens together, {list(lengths)} by rank; pass "
            f"seq_len={total}, or the shards that seqpar.shard returns for {seq_len} tokens"
        )
    expected = [shard_length(total, len(lengths), rank, layout) for rank in range(len(lengths))]
    if list(lengths) != expected:
        raise ValueError(
            f"length: the ranks hold {list(lengths)} tokens, but layout={layout!r} splits {total} tokens into "
            f"{expected}; pass the shards that seqpar.shard returns for this layout"
        )
    return total


def check_length(length: int, seq_len: int, ranks: int, rank: int, layout: Layout) -> None:
    """Raise a ValueError if this rank's shard of a sequence of ``seq_len`` tokens does not hold ``length`` tokens."""
    expected = shard_length(seq_len, ranks, rank, layout)
    if length != expected:
        raise ValueError(
            f"length: this rank holds {length} tokens, but layout={layout!r} gives it {expected} of seq_len={seq_len}; "
            "pass the shard that seqpar.shard returns for this layout"
        )


@lru_cache(maxsize=256)
def shard_positions(seq_len: int, ranks: int, rank: int, layout: Layout = "contiguous") -> Tensor:
    """Global positions of the tokens of ``rank``, int64 ``[seq_local]``, increasing. Cached: do not write to it."""
    ranges = shard_ranges(seq_len, ranks, rank, layout)
    if not ranges:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.cat([torch.arange(r.start, r.stop, r.step, device="cpu") for r in ranges])


@lru_cache(maxsize=64)
def global_order(seq_len: int, ranks: int, layout: Layout = "contiguous") -> Tensor:
    """The index of each global position in the concatenation of all shards, int64 ``[seq_len]``. Cached, read-only.

    ``torch.cat(shards, dim).index_select(dim, global_order(...))`` is the full sequence.
    """
    positions = torch.cat([shard_positions(seq_len, ranks, rank, layout) for rank in range(ranks)])  # [seq_len]
    return torch.argsort(positions)
