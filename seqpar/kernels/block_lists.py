"""Key intervals for FlashAttention-4: a function that masks scores, and lists of the blocks to compute.

A block of queries and keys is skipped if no query sees any of its keys, computed without a mask if every query sees
every key in the same part of a union, and computed with the mask otherwise.

Shapes: b batch rows, q_len queries, n blocks of queries, or of keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..base.cache import cached_tensors
from ..masks.runs import MOST_PARTS
from ..schedule.rows import KeyIntervals

_K_BLOCK = 128  # of FlashAttention-4's kernels for a head_dim up to 128
_Q_BLOCK = {9: 128, 10: 256, 11: 256}  # by compute capability: a multiple of what one thread block computes
# Of the lists of a step's forward, and of its backward. The cache keeps both. Above this, a step runs on Triton.
_MOST_BYTES = 24 << 20


class BlockLists(NamedTuple):
    """For every block of queries the blocks of keys to compute, or for every block of keys the blocks of queries.

    A ``masked`` block needs the mask, a ``full`` block does not. The first ``count`` indices are valid.
    """

    masked_count: Tensor  # int32 [b, 1, blocks]
    masked: Tensor  # int32 [b, 1, blocks, longest list]
    full_count: Tensor
    full: Tensor


class _Ranges(NamedTuple):
    """Of each block of queries the blocks of keys, or of each block of keys the blocks of queries: ``[parts, b, n]``.

    Because intervals do not decrease, the blocks to compute are consecutive, and so are the full ones among them.
    """

    first: Tensor
    first_full: Tensor
    end_full: Tensor
    end: Tensor


class _Segments(NamedTuple):
    """The blocks of all parts in segments that follow one another: ``[b, n, segments]``.

    The blocks of a segment are all masked, all full, or none is computed.
    """

    first: Tensor
    masked: Tensor  # how many blocks
    full: Tensor


def _by_part(*ends: Tensor) -> Iterator[Tensor]:
    return (x.view(-1, *x.shape[-2:]) for x in ends)  # [parts, b, q_len]


def _ranges(lo: Tensor, hi: Tensor, k_len: int, q_block: int, k_block: int, by_keys: bool) -> _Ranges:
    last = -lo.shape[-1] % q_block
    # The rows that fill up the last block repeat its last query.
    lo, hi = (torch.cat([x, x[..., -1:].expand(-1, -1, last)], -1) for x in _by_part(lo, hi))
    lo, hi = (x.unflatten(-1, (-1, q_block)) for x in (lo, hi))  # [parts, b, q blocks, q_block]
    lowest, lo, hi, highest = (x.contiguous() for x in (lo[..., 0], lo[..., -1], hi[..., 0], hi[..., -1]))
    if by_keys:
        starts = torch.arange(0, k_len, k_block, device=lo.device, dtype=lo.dtype)
        starts = starts.expand(*lo.shape[:-1], -1).contiguous()
        stops = (starts + k_block).clamp(max=k_len)
        first = torch.searchsorted(highest, starts, right=True)
        end = torch.searchsorted(lowest, stops)
        first_full, end_full = torch.searchsorted(hi, stops), torch.searchsorted(lo, starts, right=True)
        end_full = torch.where(stops - starts == k_block, end_full, first_full)  # beyond the last key a mask is needed
    else:
        first, end = lowest // k_block, -(-highest // k_block)
        first_full, end_full = -(-lo // k_block), hi // k_block
    some = first_full < end_full
    return _Ranges(
        first, torch.where(some, first_full, first), torch.where(some, end_full, first), torch.maximum(first, end)
    )


def _segments(of: _Ranges) -> _Segments:
    edges = torch.cat(of).sort(0).values  # [4 parts, b, n]; nothing changes between two neighbours
    first, length = edges[:-1], edges.diff(dim=0)
    seen = ((of.first <= first[:, None]) & (first[:, None] < of.end)).any(1)
    full = ((of.first_full <= first[:, None]) & (first[:, None] < of.end_full)).any(1)
    counts = (torch.where(x, length, 0) for x in (seen & ~full, full))
    return _Segments(*(x.movedim(0, -1).contiguous() for x in (first, *counts)))


def block_lists(
    lo: Tensor, hi: Tensor, k_len: int, q_block: int, k_block: int, longest: tuple[int, int], by_keys: bool = False
) -> BlockLists:
    """The blocks of key intervals, computed on their device without reading them.

    Args:
        lo, hi: int32 ``[b, q_len]``, not decreasing along the queries, or ``[parts, b, q_len]``.
        k_len: the number of keys.
        q_block, k_block: queries and keys of a block.
        longest: the lengths of the longest list of masked blocks and of the longest list of full blocks.
        by_keys: for each block of keys the blocks of queries, instead of the other way round.
    """
    first, *counts = _segments(_ranges(lo, hi, k_len, q_block, k_block, by_keys))
    lists = []
    for count, width in zip(counts, longest, strict=True):
        end = count.cumsum(-1)  # of a segment's blocks in the list
        at = torch.arange(width, device=lo.device).expand(*end.shape[:-1], -1).contiguous()
        segment = torch.searchsorted(end, at, right=True).clamp_(max=end.shape[-1] - 1)
        lists += [end[..., -1], (first + count - end).gather(-1, segment) + at]
    return BlockLists(*(x.int()[:, None].contiguous() for x in lists))


def longest_lists(intervals: KeyIntervals, q: Tensor, k: Tensor, backward: bool) -> tuple[int, int]:
    """The ``longest`` of ``block_lists``, from the intervals on the host. Kept in ``intervals``."""
    key = "longest lists", backward
    if key not in intervals.tiles:
        host = intervals.on_host()
        assert host is not None  # or there would be no call with intervals
        _, *counts = _segments(_ranges(host.lo, host.hi, k.shape[1], _q_block(q), _K_BLOCK, backward))
        intervals.tiles[key] = tuple(max(1, int(x.sum(-1).max())) for x in counts)
    longest: tuple[int, int] = intervals.tiles[key]
    return longest


def too_long(intervals: KeyIntervals, q: Tensor, k: Tensor) -> bool:
    """Whether the lists of blocks take more memory than the cache has."""
    blocks = {False: -(-q.shape[1] // _q_block(q)), True: -(-k.shape[1] // _K_BLOCK)}
    rows = intervals.lo.shape[-2]
    return any(
        4 * rows * n * sum(longest_lists(intervals, q, k, by_keys)) > _MOST_BYTES for by_keys, n in blocks.items()
    )


class _PaddedIntervals(NamedTuple):
    """What FlashAttention-4 takes for key intervals."""

    padded: tuple[Tensor, ...]  # of each part lo and hi, int32 [b, q of all blocks]
    lists: BlockLists


def interval_arguments(intervals: KeyIntervals | None, q: Tensor, k: Tensor, *, backward: bool) -> dict[str, Any]:
    """The arguments of FlashAttention-4's functions for key intervals; none without."""
    if intervals is None:
        return {}
    q_block = _q_block(q)

    def make() -> _PaddedIntervals:
        longest = longest_lists(intervals, q, k, backward)
        lists = block_lists(intervals.lo, intervals.hi, k.shape[1], q_block, _K_BLOCK, longest, by_keys=backward)
        # The kernels read one row per batch row, and queries up to the end of the last block.
        ends = (x for part in zip(*_by_part(intervals.lo, intervals.hi), strict=True) for x in part)
        padded = (F.pad(x.expand(len(q), -1), (0, -q.shape[1] % q_block)).contiguous() for x in ends)
        return _PaddedIntervals(tuple(padded), lists)

    # The intervals are freed before others can have their id.
    found = cached_tensors(("block lists", id(intervals), len(q), backward), q.device, make, intervals)
    names = "mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"
    return {
        "mask_mod": _interval_mask(len(found.padded) // 2),
        "aux_tensors": list(found.padded),
        "block_sparse_tensors": _sparse_tensors()(
            **dict(zip(names, found.lists, strict=True)), block_size=(q_block, _K_BLOCK)
        ),
        "pack_gqa": False,
    }


def _q_block(q: Tensor) -> int:
    return _Q_BLOCK[torch.cuda.get_device_capability(q.device)[0]]


def takes_block_sizes() -> bool:
    """Whether the installed version takes lists of blocks of a given size."""
    try:
        return "block_size" in _sparse_tensors()._fields
    except (ImportError, AttributeError):
        return False


def _sparse_tensors() -> Any:
    return import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch


@lru_cache(maxsize=MOST_PARTS)
def _interval_mask(parts: int) -> Any:
    """``lo[query] <= key < hi[query]`` in any of the parts, in FlashAttention-4's language.

    Its functions are compiled for each number of parts: a kernel is found by what the function's closure holds.
    """
    cute, utils = import_module("cutlass.cute"), import_module("flash_attn.cute.utils")
    cutlass = import_module("cutlass")

    @cute.jit
    def interval_mask(batch, head, query, key, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        lo = utils.scalar_to_ssa(aux_tensors[0][batch[0], query[0]], cutlass.Int32)
        hi = utils.scalar_to_ssa(aux_tensors[1][batch[0], query[0]], cutlass.Int32)
        seen = (key >= lo) & (key < hi)
        for part in cutlass.range_constexpr(1, parts):
            lo = utils.scalar_to_ssa(aux_tensors[2 * part][batch[0], query[0]], cutlass.Int32)
            hi = utils.scalar_to_ssa(aux_tensors[2 * part + 1][batch[0], query[0]], cutlass.Int32)
            seen = seen | ((key >= lo) & (key < hi))
        return seen

    return interval_mask
