"""Layouts: which global positions each rank of the sequence group holds, always in increasing order.

The rule for lengths that do not divide is the same everywhere: a length cut in ``m`` parts gives the first
``length % m`` parts one token more.

* ``contiguous``: ``m = ranks``; rank ``r`` holds part ``r``.
* ``zigzag``: ``m = 2 * ranks``; rank ``r`` holds parts ``r`` and ``2 * ranks - 1 - r``, so that under a causal
  mask every rank has the same work (the layout of Llama 3's and ring-flash-attention's context parallelism).
* ``striped``: rank ``r`` holds ``r, r + ranks, r + 2 * ranks, ...`` (Brandon et al., Striped Attention, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS: tuple[str, ...] = get_args(Layout)


def part(length: int, parts: int, index: int) -> range:
    """Part ``index`` of ``length`` items cut in ``parts``: the first ``length % parts`` hold one item more."""
    size, longer = divmod(length, parts)
    start = index * size + min(index, longer)
    return range(start, start + size + (index < longer))


def shard_ranges(seq_len: int, ranks: int, rank: int, layout: str = "contiguous") -> tuple[range, ...]:
    """The global positions that ``rank`` of ``ranks`` holds, as increasing ranges (empty ones left out)."""
    if layout == "contiguous":
        ranges: tuple[range, ...] = (part(seq_len, ranks, rank),)
    elif layout == "zigzag":
        first, second = part(seq_len, 2 * ranks, rank), part(seq_len, 2 * ranks, 2 * ranks - 1 - rank)
        # The middle rank's parts touch: one range.
        ranges = (range(first.start, second.stop),) if first.stop == second.start else (first, second)
    elif layout == "striped":
        ranges = (range(rank, seq_len, ranks),)
    else:
        raise ValueError(f"layout={layout!r}: choose one of {', '.join(LAYOUTS)}")
    return tuple(r for r in ranges if len(r))


def shard_length(seq_len: int, ranks: int, rank: int, layout: str = "contiguous") -> int:
    """How many tokens ``rank`` holds."""
    return sum(len(r) for r in shard_ranges(seq_len, ranks, rank, layout))


def check_lengths(lengths: Sequence[int], layout: str, seq_len: int | None = None) -> int:
    """The whole length of shards of ``lengths`` tokens, by rank; a ValueError when the layout does not cut it so."""
    total = sum(lengths)
    if seq_len is not None and total != seq_len:
        raise ValueError(f"seq_len={seq_len}: the shards hold {total} tokens together ({list(lengths)})")
    expected = [shard_length(total, len(lengths), rank, layout) for rank in range(len(lengths))]
    if list(lengths) != expected:
        raise ValueError(
            f"length: the ranks hold {list(lengths)} tokens, but layout={layout!r} cuts {total} tokens in {expected}; "
            "pass what seqpar.shard gives with the same layout"
        )
    return total


def check_length(length: int, seq_len: int, ranks: int, rank: int, layout: str) -> None:
    """A ValueError when this rank's shard of a sequence of ``seq_len`` is not ``length`` tokens long."""
    expected = shard_length(seq_len, ranks, rank, layout)
    if length != expected:
        raise ValueError(
            f"length: this rank brings {length} tokens, but layout={layout!r} gives it {expected} of "
            f"seq_len={seq_len}; pass what seqpar.shard gives"
        )


@lru_cache(maxsize=256)
def shard_positions(seq_len: int, ranks: int, rank: int, layout: str = "contiguous") -> Tensor:
    """Global positions of ``rank``'s tokens, int64 ``[seq_local]``, increasing. Cached: do not write to it."""
    ranges = shard_ranges(seq_len, ranks, rank, layout)
    if not ranges:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.cat([torch.arange(r.start, r.stop, r.step, device="cpu") for r in ranges])


@lru_cache(maxsize=64)
def global_order(seq_len: int, ranks: int, layout: str = "contiguous") -> Tensor:
    """Where each global position stands in the concatenation of all shards, int64 ``[seq_len]``.

    ``torch.cat(shards, dim).index_select(dim, global_order(...))`` is the whole sequence. Cached.
    """
    shards = torch.cat([shard_positions(seq_len, ranks, rank, layout) for rank in range(ranks)])
    return torch.argsort(shards)
