"""Layers that attend to the keys and values of an earlier layer (Gemma 4), which are all-gathered once for all of them.

The layer that computes the keys and values all-gathers them, and stores the result as an attribute of its key tensor.
The layers that reuse the key tensor read the attribute and send nothing. In backward, autograd sums the gradients of
all these layers, and one reduce-scatter then sends the sums to the ranks that own the keys. Layers with a sliding
window do not share an all-gather, because they need few keys of other ranks.

Bytes sent per rank of P for all layers that share keys: (P-1)/P * N * 2 d_kv * e in forward, and
(P-1)/P * N * 2 d_kv * 4 in backward. Without sharing, each layer would send this, and K/V again in backward.

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
from ..mesh import ANY_RANKS
from ..sharding import Sharding, unshard
from ..spec import AttentionSpec
from ..strategies import operators
from .state import Patch

_GATHERED = "_seqpar_gathered"


def storing_layer(module: nn.Module) -> int:
    """The index of the layer that computes the keys of ``module``: ``module`` itself or an earlier layer."""
    layer = cast(int, module.layer_idx)
    modes = getattr(module.config, "kv_sharing_modes", None)
    if modes is None or modes[layer] != "reuse":
        return layer
    types = cast(Any, module.config).layer_types
    return next(i for i, mode in enumerate(modes) if mode == "store" and types[i] == types[layer])


def gathers_shared_keys(module: nn.Module, patch: Patch, mask: Mask) -> bool:
    """Whether several layers share the keys of ``module``, and ``attend_to_shared_keys`` should all-gather them once.

    Args:
        module: an attention layer.
        patch: the model's ``Patch``.
        mask: the mask of the layer.
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
    spec: AttentionSpec,
    seed: Tensor | None,
) -> Tensor:
    """Attention over the keys of all ranks. The first layer that attends to these keys all-gathers them.

    Args:
        q: ``[b, s, h, d]``.
        k, v: ``[b, s, n, d]``.
        shared: the key tensor that the layers share, as the model computed it. The all-gathered keys and values are
            stored as an attribute of it.
        sinks: ``[h]``, or None.
        mask: the documents and padding of the batch.
        sharding: the sharding of the sequence.
        spec: the spec of the attention, with the layer's causality and window.
        seed: the seed of attention dropout, int64 ``[]`` on the CPU, or None.

    Returns:
        ``[b, s, h, d]``.
    """
    gathered: tuple[Tensor, Tensor] | None = getattr(shared, _GATHERED, None)
    if gathered is None or gathered[0].dtype != k.dtype:
        gathered = _AllGatherKeys.apply(k, sharding), _AllGatherKeys.apply(v, sharding)  # [b, t, n, d] each
        setattr(shared, _GATHERED, gathered)
    tensors = q, *gathered, sinks, None, seed, None
    out: Tensor = operators.attention(*tensors, spec, mask, sharding, ANY_RANKS)[0]
    return out


class _AllGatherKeys(torch.autograd.Function):
    """All-gathers ``[b, s, n, d]`` to ``[b, t, n, d]``. Backward sums the ranks' partial gradients in float32."""

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
