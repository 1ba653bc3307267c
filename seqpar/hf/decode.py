"""Attention of a few new tokens over keys that stay where they are: Tree Attention (Shyam et al., 2024).

Every rank holds the new queries. Each attends to its own keys, and the partial results with their log-sum-exp meet in
one collective a layer: ``batch * heads * new tokens * (head_dim + 1)`` float32 numbers a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..comm.collectives import all_gather_single
from ..comm.trace import count_sent

if TYPE_CHECKING:
    from .patch import Patch


@dataclass(frozen=True, eq=False)
class DecodeShard:
    """What the layers must know while new tokens are decoded.

    Attributes:
        cache: whose layers are ``ShardedLayer``.
        start: global position of the first new token.
        first: int64 ``[batch]``, the first token of each row that is no padding; None: the first of all.
    """

    cache: Any
    start: int
    first: Tensor | None


def decode(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: DecodeShard,
    patch: Patch,
    scaling: float | None,
    window: int | None,
    chunk: int | None,
    softcap: float,
    sinks: Tensor | None,
    name: str,
) -> Tensor:
    """``query [batch, heads, new, head_dim]``, the same on every rank; ``key, value [batch, kv_heads, kept,
    head_dim]``, this rank's. Returns ``[batch, new, heads, value_dim]`` in query's dtype, the same on every rank."""
    layer = shard.cache.layers[module.layer_idx]
    positions = layer.seen.to(query.device)
    if key.shape[2] != len(positions):
        raise ValueError(f"{name}: its keys come from another layer's cache; such sharing is not supported")
    seen = _visible(query.shape[2], positions, shard, window, chunk)  # [batch | 1, new, kept]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads, kv_heads = query.shape[1], key.shape[1]
    grouped = query.float().unflatten(1, (kv_heads, heads // kv_heads))
    scores = torch.einsum("bngqd,bnkd->bngqk", grouped, key.float()).flatten(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [batch, heads, new]
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = torch.einsum("bngqk,bnkd->bngqd", weights.unflatten(1, (kv_heads, -1)), value.float()).flatten(1, 2)
    out = merge(out, lse, sinks, patch)
    return out.transpose(1, 2).to(query.dtype)


def _visible(new: int, positions: Tensor, shard: DecodeShard, window: int | None, chunk: int | None) -> Tensor:
    queries = torch.arange(shard.start, shard.start + new, device=positions.device)[:, None]
    first = positions.new_zeros(1, 1, 1) if shard.first is None else shard.first.to(positions)[:, None, None]
    seen = (positions <= queries) & (positions >= first)
    if window is not None:
        seen = seen & (positions > queries - window)
    if chunk is not None:
        seen = seen & (positions >= queries - (queries - first) % chunk)
    return seen


def merge(out: Tensor, lse: Tensor, sinks: Tensor | None, patch: Patch) -> Tensor:
    """The ranks' partial results ``out [batch, heads, new, value_dim]`` as one, by ``lse [batch, heads, new]``."""
    outs, lses = out[None], lse[None]
    if patch.group is not None and patch.ranks > 1:
        packed = torch.cat([out, lse[..., None]], dim=-1).contiguous()
        gathered = packed.new_empty(patch.ranks, *packed.shape)
        all_gather_single(gathered.view(-1), packed.view(-1), group=patch.group)
        count_sent(packed.numel() * packed.element_size() * (patch.ranks - 1), patch.ranks - 1)
        outs, lses = gathered[..., :-1], gathered[..., -1]
    total = torch.logsumexp(lses, dim=0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[None, :, None])
    weights = torch.exp(lses - total.masked_fill(total == -torch.inf, 0.0))
    return (weights[..., None] * outs).sum(0)
