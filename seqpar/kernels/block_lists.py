"""Key intervals for FlashAttention-4: a function that masks scores, and lists of the blocks to compute.

A block of queries and keys is skipped if no query sees any of its keys, computed without a mask if every query sees
every key, and computed with the mask otherwise.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..schedule.rows import KeyIntervals

_K_BLOCK = 128  # of FlashAttention-4's kernels for a head_dim up to 128
_Q_BLOCK = {9: 128, 10: 256, 11: 256}  # by compute capability: a multiple of what one thread block computes


class BlockLists(NamedTuple):
    """For every block of queries the blocks of keys to compute, or for every block of keys the blocks of queries.

    A ``masked`` block needs the mask, a ``full`` block does not. The first ``count`` indices are valid.
    """

    masked_count: Tensor  # int32 [b, 1, blocks]
    masked: Tensor  # int32 [b, 1, blocks, other blocks]
    full_count: Tensor
    full: Tensor


def block_lists(lo: Tensor, hi: Tensor, k_len: int, q_block: int, k_block: int, by_keys: bool = False) -> BlockLists:
    """The blocks of key intervals, computed on their device without reading them.

    Args:
        lo, hi: int32 ``[b, q_len]``, not decreasing along the queries.
        k_len: the number of keys.
        q_block, k_block: queries and keys of a block.
        by_keys: for each block of keys the blocks of queries, instead of the other way round.
    """
    last = -lo.shape[1] % q_block
    # The rows that fill up the last block repeat its last query.
    lo, hi = (torch.cat([x, x[:, -1:].expand(-1, last)], 1) for x in (lo, hi))
    lo, hi = (x.view(len(x), -1, q_block) for x in (lo, hi))  # [b, q blocks, q_block]
    starts = torch.arange(0, k_len, k_block, device=lo.device)  # [k blocks]
    stops = (starts + k_block).clamp(max=k_len)
    some = (starts < hi[..., -1:]) & (stops > lo[..., :1])  # [b, q blocks, k blocks]: no row sees more than these
    every = (starts >= lo[..., -1:]) & (stops <= hi[..., :1])
    every &= stops - starts == k_block  # beyond the last key a mask is needed
    lists = []
    for blocks in (some & ~every, every):
        if by_keys:
            blocks = blocks.transpose(1, 2)
        order = blocks.logical_not().to(torch.uint8).argsort(dim=-1, stable=True)
        lists += [blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()]
    return BlockLists(*lists)


def interval_arguments(intervals: KeyIntervals | None, q: Tensor, k: Tensor, *, backward: bool) -> dict[str, Any]:
    """The arguments of FlashAttention-4's functions for key intervals; none without. Cached in ``intervals``."""
    if intervals is None:
        return {}
    key = "flash_attn_4", backward
    if key not in intervals.tiles:
        q_block = _Q_BLOCK[torch.cuda.get_device_capability(q.device)[0]]
        lists = block_lists(intervals.lo, intervals.hi, k.shape[1], q_block, _K_BLOCK, by_keys=backward)
        # The kernels read one row per batch row, and queries up to the end of the last block.
        rows = (x.expand(len(q), -1) for x in (intervals.lo, intervals.hi))
        padded = [F.pad(x, (0, -q.shape[1] % q_block)).contiguous() for x in rows]
        names = "mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"
        sparse = _sparse_tensors()(**dict(zip(names, lists, strict=True)), block_size=(q_block, _K_BLOCK))
        intervals.tiles[key] = {
            "mask_mod": _interval_mask(),
            "aux_tensors": padded,
            "block_sparse_tensors": sparse,
            "pack_gqa": False,
        }
    arguments: dict[str, Any] = intervals.tiles[key]
    return arguments


def takes_block_sizes() -> bool:
    """Whether the installed version takes lists of blocks of a given size."""
    try:
        return "block_size" in _sparse_tensors()._fields
    except (ImportError, AttributeError):
        return False


def _sparse_tensors() -> Any:
    return import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch


@lru_cache(maxsize=1)
def _interval_mask() -> Any:
    """``lo[query] <= key < hi[query]`` in FlashAttention-4's language."""
    cute, utils = import_module("cutlass.cute"), import_module("flash_attn.cute.utils")
    int32 = import_module("cutlass").Int32

    @cute.jit
    def interval_mask(batch, head, query, key, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        lo = utils.scalar_to_ssa(aux_tensors[0][batch[0], query[0]], int32)
        hi = utils.scalar_to_ssa(aux_tensors[1][batch[0], query[0]], int32)
        return (key >= lo) & (key < hi)

    return interval_mask
