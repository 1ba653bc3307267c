"""All-gather of shards that may differ in length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .trace import count_sent

# torch 2.13 renamed it; 2.11 has only the old name.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
