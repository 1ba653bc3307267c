"""PyTorch's flex_attention and varlen_attn over a sharded sequence, as calls of attention under a mask.

Shapes: b batch, s tokens of this rank, h query heads, n KV heads, d head_dim of q and k, e head_dim of v; r rows of the
mask (1 or b); B, H batch rows and heads of a BlockMask (1, or b and h).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .base.checks import check_int
from .masks.mask import Mask, check_rows
from .masks.rules import Documents
from .sharding.sharding import Sharding

if TYPE_CHECKING:  # torch 2.15 does not import flex_attention itself, and its import is slow
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask
    from torch.nn.attention.varlen import AuxRequest as VarlenAuxRequest

_ROWS, _PAIRS = 1024, 1 << 22  # of what a check looks at at a time: queries, and pairs of a query and a key


class TorchCall(NamedTuple):
    """A call in terms of attention under a mask.

    Attributes:
        query, key, value: ``[b, h, s, d]``, ``[b, n, s, d]``, ``[b, n, s, e]``.
        returned: what the function returns, from the output ``[b, h, s, e]`` and the log-sum-exp ``[b, h, s]``.
        needs_lse: whether it returns the log-sum-exp.
        check: raises a ValueError if the call has a mask, and it differs from the given one; None if it has no mask.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    enable_gqa: bool
    returned: Callable[[Tensor, Tensor | None], Any]
    needs_lse: bool
    check: Callable[[Mask, Sharding], None] | None


def flex_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: object = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: object = None,  # of speed, not of results
    *,
    return_aux: AuxRequest | None = None,
) -> TorchCall:
    """The call of PyTorch's function with these arguments.

    Raises:
        ValueError: an argument that cannot be answered over a sharded sequence.
    """
    _check_shapes("batch, heads, seq, head_dim", query=query, key=key, value=value)
    if score_mod is not None:
        raise ValueError(
            "score_mod: a function of the scores is not known to give one device's scores on a shard; pass None, and "
            "softcap=, alibi_slopes= or sinks= to replace_sdpa, or hide keys by the mask"
        )
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux: expected one of them")
    if return_aux is not None and return_aux.max_scores:
        raise ValueError("return_aux: max_scores is not computed over a sharded sequence; request lse alone")

    def returned(out: Tensor, lse: Tensor | None) -> Any:
        if return_aux is None:
            return (out, lse) if return_lse else out
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)

    def check(mask: Mask, sharding: Sharding) -> None:
        _check_block_mask(cast("BlockMask", block_mask), mask, sharding, query)

    needs_lse = return_lse or (return_aux is not None and return_aux.lse)
    own = None if block_mask is None else check
    return TorchCall(query, key, value, scale, enable_gqa, returned, needs_lse, own)


def varlen_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: VarlenAuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = True,  # torch 2.11 has no such argument, and takes fewer KV heads
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> TorchCall:
    """The call of PyTorch's function with these arguments.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument that cannot be answered over a sharded sequence.
    """
    _check_shapes("tokens, heads, head_dim", query=query, key=key, value=value)
    if return_aux is not None and return_aux.lse:
        raise ValueError("return_aux: lse is not returned; call seqpar.attention with return_lse=True")
    for name, given in (("seqused_k", seqused_k), ("block_table", block_table), ("num_splits", num_splits)):
        if given is not None:
            raise ValueError(f"{name}: not supported over a sharded sequence; leave it out, or use a KeyValueCache")

    def check(mask: Mask, sharding: Sharding) -> None:
        own = varlen_mask(cu_seq_q, cu_seq_k, max_q, max_k, window_size, sharding.seq_len)
        if own == mask:
            return
        positions = sharding.positions()
        (lo, hi), (own_lo, own_hi) = (_spans(x, positions, sharding.seq_len) for x in (mask, own))
        both = (hi.minimum(own_hi) - lo.maximum(own_lo)).clamp(min=0).sum(0)  # keys under both, [r, s]
        differs = ((both != (hi - lo).sum(0)) | (both != (own_hi - own_lo).sum(0))).any(0)
        if differs.any():
            raise ValueError(
                f"cu_seq_q and window_size: token {int(positions[differs][0])} sees other tokens than under the mask, "
                f"{_short(mask)}; pass replace_sdpa mask=, a mask with the documents and the window of the call, such "
                "as Mask.documents(cu_seqlens, causal=False) & Mask.sliding_window(*window_size)"
            )

    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return TorchCall(q, k, v, scale, enable_gqa, lambda out, _: out[0].transpose(0, 1), False, check)


def _check_shapes(dimensions: str, **tensors: object) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.dim() != dimensions.count(",") + 1:
            shape = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name}: expected a tensor [{dimensions}], got {shape}")


def varlen_mask(
    cu_seq_q: Any, cu_seq_k: Any, max_q: object, max_k: object, window_size: tuple[int, int], seq_len: int
) -> Mask:
    """The mask of a call of varlen_attn over a sequence of ``seq_len`` tokens. Copies the boundaries to the host.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: the boundaries of queries and keys differ, or are not boundaries of the full sequence, or a document
            is longer than ``max_q`` or ``max_k``.
    """
    documents = Mask.documents(cu_seq_q, causal=False)
    if cu_seq_k is None or (cu_seq_k is not cu_seq_q and Mask.documents(cu_seq_k, causal=False) != documents):
        raise ValueError("cu_seq_k: expected the boundaries of cu_seq_q: queries and keys are the same tokens")
    (boundaries, *others) = cast(Documents, documents.rules[0]).boundaries
    if others or boundaries[-1] != seq_len:
        raise ValueError(
            f"cu_seq_q: ends at {boundaries[-1]}; expected boundaries in the full sequence of {seq_len} tokens: "
            "boundaries in a rank's tokens cannot say which tokens of other ranks are of the same document"
        )
    longest = max((after - before for before, after in pairwise(boundaries)), default=0)
    for name, length in (("max_q", max_q), ("max_k", max_k)):
        check_int(name, length, 0)
        if cast(int, length) < longest:
            raise ValueError(f"{name}={length}: a document of cu_seq_q has {longest} tokens; pass the longest length")
    return documents & Mask.sliding_window(*window_size)


def _spans(mask: Mask, positions: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """The intervals of ``mask`` without keys past the end, ``[parts of the mask, r, s]``."""
    mask.check_length(seq_len)
    lo, hi = (torch.stack(ends) for ends in zip(*mask.interval_sets(positions), strict=True))
    lo, hi = (x.view(len(x), x.shape[1:-1].numel(), len(positions)).clamp(max=seq_len) for x in (lo, hi))
    return lo, hi.maximum(lo)


def _short(mask: Mask) -> str:
    return repr(mask) if len(repr(mask)) <= 100 else f"{repr(mask)[:97]}..."


def _check_block_mask(block_mask: BlockMask, mask: Mask, sharding: Sharding, query: Tensor) -> None:
    """Raise unless this rank's queries see the same keys under ``block_mask`` as under ``mask``.

    A block mask of the full sequence is read as PyTorch reads it: a query sees all keys of full blocks, and in the
    other blocks that are listed the keys that ``mask_mod`` shows. The blocks of a block mask of this rank's tokens say
    nothing about other ranks' keys: ``mask_mod`` must show the mask's keys at all positions of the full sequence.

    Args:
        query: ``[b, h, s, d]``, this rank's queries.
    """
    check_rows(mask, "query", query)
    (batch, heads, tokens), seq_len = query.shape[:3], sharding.seq_len
    is_whole = tuple(block_mask.seq_lengths) == (seq_len, seq_len)
    if not is_whole and tuple(block_mask.seq_lengths) != (tokens, tokens):
        raise ValueError(
            f"block_mask: made for {block_mask.seq_lengths[0]} queries and {block_mask.seq_lengths[1]} keys; expected "
            f"{seq_len} of both, the full sequence, or {tokens} of both, this rank's tokens"
        )
    device, (rows, columns) = block_mask.kv_num_blocks.device, block_mask.kv_num_blocks.shape[:2]
    if rows not in (1, batch) or columns not in (1, heads):
        raise ValueError(
            f"block_mask: made for {rows} batch rows and {columns} heads, but query has {batch} and {heads}"
        )
    width = block_mask.BLOCK_SIZE[1]
    first = torch.arange(0, seq_len, width, device=device)  # the first key of each block
    ends = (first + width).clamp(max=seq_len)
    positions = sharding.positions()
    spans = _spans(mask, positions, seq_len)
    parts = positions.to(device).split(_ROWS), *(x.to(device).split(_ROWS, 2) for x in spans)
    for queries, lo, hi in zip(*parts, strict=True):
        visible = (hi[..., None].minimum(ends) - lo[..., None].maximum(first)).clamp(min=0)
        visible = visible.sum(0)[:, None]  # how many keys a query sees in a block, [r, 1, queries, blocks]
        partial = torch.ones(1, 1, len(queries), len(first), dtype=torch.bool, device=device)
        if is_whole:
            at = queries // block_mask.BLOCK_SIZE[0]
            partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, at, len(first))
            full = torch.zeros_like(partial)
            if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
                full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, at, len(first))
            # PyTorch counts a block twice that is in both lists.
            wrong = torch.where(full, partial | (visible != ends - first), ~partial & (visible != 0))
            partial = partial & ~full
            if wrong.any():
                _refuse_block_mask(mask, int(queries[wrong.nonzero()[0, 2]]))
        pairs = partial.flatten(0, 1).any(0).nonzero()  # of a query and a block, [pairs, 2]
        for x, y in (some.unbind(1) for some in pairs.split(max(1, _PAIRS // width)) if len(some)):
            keys = first[y, None] + torch.arange(width, device=device)  # [pairs, width]
            seen = _seen(block_mask, batch, heads, queries[x], keys.clamp(max=seq_len - 1))
            shown = ((keys >= lo[:, :, x, None]) & (keys < hi[:, :, x, None])).any(0)[:, None]
            differs = (seen != shown) & partial[:, :, x, y, None] & (keys < seq_len)
            if differs.any():
                _refuse_block_mask(mask, int(queries[x][differs.nonzero()[0, 2]]))


def _refuse_block_mask(mask: Mask, query: int) -> None:
    raise ValueError(
        f"block_mask: the query at position {query} of the full sequence sees other keys than under the mask, "
        f"{_short(mask)}; pass replace_sdpa mask=, the mask that the block mask means. Positions are the full "
        "sequence's, also for a block mask that was made for a rank's tokens"
    )


def _listed(counts: Tensor, indices: Tensor, rows: Tensor, blocks: int) -> Tensor:
    """Which blocks of keys a BlockMask lists for the rows of blocks ``rows``: bool ``[B, H, len(rows), blocks]``."""
    counts, indices = counts[:, :, rows], indices[:, :, rows].long()
    beyond = torch.arange(indices.shape[-1], device=indices.device) >= counts[..., None]
    listed = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool, device=counts.device)
    return listed.scatter_(-1, indices.masked_fill(beyond, blocks), True)[..., :blocks]


class _CheckedIndices(TorchDispatchMode):
    """Raise an IndexError for an index beyond a tensor, which on a GPU would end the process."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            for size, index in zip(args[0].shape, args[1], strict=False):
                if index is not None and index.numel() and not -size <= int(index.min()) <= int(index.max()) < size:
                    raise IndexError(f"index {int(index.max())} is out of bounds for a dimension of size {size}")
        return func(*args, **(kwargs or {}))


def _seen(block_mask: BlockMask, batch: int, heads: int, queries: Tensor, keys: Tensor) -> Tensor:
    """What ``mask_mod`` shows to ``queries [pairs]`` of ``keys [pairs, width]``: ``[b or 1, h or 1, pairs, width]``."""
    from torch.nn.attention.flex_attention import create_mask

    def at(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return block_mask.mask_mod(b, h, queries[i], keys[i, j])

    try:
        with _CheckedIndices(), torch.no_grad():
            seen = create_mask(at, batch, heads, keys.shape[0], keys.shape[1], keys.device)
    except Exception as error:
        raise ValueError(
            f"block_mask: its mask_mod raised {type(error).__name__} at positions of the full sequence ({error}), and "
            "cannot be compared with the mask; make the block mask for the full sequence, or call flex_attention "
            "without block_mask, which takes the mask of replace_sdpa"
        ) from error
    for dim in (0, 1):
        if seen.stride(dim) == 0:  # the same for all
            seen = seen.narrow(dim, 0, 1)
    return seen
