"""Layers that attend to the keys of an earlier layer (Gemma 4): an all-gather receives the keys once for all of them.

The layer that computes the keys all-gathers them, and they stay with its key tensor. The layers that reuse that tensor
find them there and send nothing. Their gradients are summed by autograd before one reduce-scatter returns them to the
ranks that own the keys. Layers with a sliding window keep to themselves: they need few keys of other ranks.

Bytes sent per rank of P for L such layers: (P-1)/P * N * 2 d_kv * e forward and (P-1)/P * N * 2 d_kv * 4 backward,
instead of L times that and L times K/V again in backward.

Shapes: b batch, s tokens of this rank, t tokens of all ranks, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ..comm.collectives import reduce_scatter
from ..kernels.base import accumulator
from ..layout import shard_positions
from ..mask import Mask
from ..sharding import Sharding, unshard
from ..strategies.operators import ANY_RANKS, AttentionOptions, attention_op
from .state import Patch

_GATHERED = "_seqpar_gathered"


def storing_layer(module: nn.Module) -> int:
    """The index of the layer that computes the keys which ``module`` attends to: its own, or an earlier one's."""
    layer = cast(int, module.layer_idx)
    modes = getattr(module.config, "kv_sharing_modes", None)
    if modes is None or modes[layer] != "reuse":
        return layer
    types = cast(Any, module.config).layer_types
    return next(i for i, mode in enumerate(modes) if mode == "store" and types[i] == types[layer])


def gathers_shared_keys(module: nn.Module, patch: Patch, mask: Mask) -> bool:
    """Whether the layer's keys are all-gathered here, for itself and for the layers that share them.

    ``mask`` is the layer's.
    """
    modes = getattr(getattr(module, "config", None), "kv_sharing_modes", None)
    if modes is None or patch.ranks == 1 or patch.strategy != "context_parallel":
        return False
    if patch.options.get("comm") not in (None, "all_gather") or mask.has_window:
        return False
    types, storing = cast(Any, module.config).layer_types, storing_layer(module)
    return modes[storing] == "store" and any(
        mode == "reuse" and kind == types[storing] for mode, kind in zip(modes, types, strict=True)
    )


def attend_to_shared_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shared: Tensor,
    sinks: Tensor | None,
    mask: Mask,
    sharding: Sharding,
    options: AttentionOptions,
    seed: Tensor | None,
) -> Tensor:
    """Attention over the keys of all ranks, which are all-gathered in the first layer that attends to them.

    Args:
        q: ``[b, s, h, d]``.
        k, v: ``[b, s, n, d]``.
        shared: the key tensor that the layers share, as the model made it; what is gathered stays with it.
        sinks: ``[h]``.
        mask, sharding: the batch's.
        options: of the layer.
        seed: of dropout.

    Returns:
        ``[b, s, h, d]``.
    """
    gathered: tuple[Tensor, Tensor] | None = getattr(shared, _GATHERED, None)
    if gathered is None or gathered[0].dtype != k.dtype:
        gathered = _AllGatherKeys.apply(k, sharding), _AllGatherKeys.apply(v, sharding)  # [b, t, n, d] each
        setattr(shared, _GATHERED, gathered)
    out: Tensor = attention_op(q, *gathered, sinks, None, seed, None, mask, sharding, ANY_RANKS, options, None)[0]
    return out


class _AllGatherKeys(torch.autograd.Function):
    """``[b, s, n, d]`` to ``[b, t, n, d]``; backward sums the ranks' partial gradients, in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding, ctx.dtype = sharding, x.dtype
        return unshard(x, 1, sharding=sharding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        sharding: Sharding = ctx.sharding
        group = sharding.sequence_group
        assert group is not None
        rows, ranks = grad.to(accumulator(grad.dtype)), group.size()
        places = (shard_positions(sharding.seq_len, ranks, rank, sharding.layout) for rank in range(ranks))
        total = reduce_scatter([rows.index_select(1, p.to(grad.device)) for p in places], group)
        return total.to(ctx.dtype), None
