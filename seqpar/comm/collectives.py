"""All-gather and reduce-scatter of shards that may differ in length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .trace import count_sent

# torch 2.13 renamed them; 2.11 has only the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, lengths: Sequence[int], dim: int, group: ProcessGroup | None) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``, where rank ``r`` brings ``lengths[r]`` entries.

    Sent as bytes, each shard padded to the longest: any dtype, any backend.
    """
    if group is None or group.size() == 1:
        return x
    rows = x.movedim(dim, 0).contiguous()
    longest = max(lengths)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    payload = padded.view(-1).view(torch.uint8)
    gathered = payload.new_empty(group.size() * payload.numel())
    if payload.numel():
        all_gather_single(gathered, payload, group=group)
        count_sent(payload.numel() * (group.size() - 1), group.size() - 1)
    shards = gathered.view(x.dtype).view(group.size(), longest, *rows.shape[1:])
    whole = torch.cat([shard[:length] for shard, length in zip(shards, lengths, strict=True)])
    return whole.movedim(0, dim)


def reduce_scatter(pieces: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """The sum over the ranks of ``pieces[this rank]``; pieces ``[batch, seq_r, ...]`` may differ in length.

    Each piece is padded to the longest, for one collective.
    """
    if group.size() == 1:
        return pieces[0]
    longest = max(p.shape[1] for p in pieces)
    like = pieces[group.rank()]
    padded = like.new_zeros(len(pieces), like.shape[0], longest, *like.shape[2:])
    for slot, piece in zip(padded, pieces, strict=True):
        slot[:, : piece.shape[1]] = piece
    total = torch.empty_like(padded[0])
    if padded.numel():
        reduce_scatter_single(total.view(-1), padded.view(-1), group=group)
        count_sent(total.numel() * total.element_size() * (group.size() - 1), group.size() - 1)
    return total[:, : like.shape[1]].contiguous()


def all_reduce(x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``x`` over the ranks, in place, and return it.

    Counted as a ring's reduce-scatter and all-gather, whichever algorithm the backend chooses.
    """
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)
        peers = group.size() - 1
        count_sent(2 * x.numel() * x.element_size() * peers // group.size(), 2 * peers)
    return x
