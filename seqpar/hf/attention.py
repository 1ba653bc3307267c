"""The attention function that transformers' ``AttentionInterface`` calls.

Shapes follow transformers: query ``[batch, heads, seq, head_dim]``, key ``[batch, kv_heads, seq, head_dim]``,
value ``[batch, kv_heads, seq, v_head_dim]``; the result is ``[batch, seq, heads, v_head_dim]``. In latent attention,
key and value are latents and rotated keys (see ``latent.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_inputs
from ..kernels.base import Score
from ..mask import layer_mask
from ..mesh import ANY_RANKS
from ..planner.rules import named
from ..spec import AttentionSpec, constant_float, constants
from ..strategies.autograd import join_backward
from ..strategies.operators import attention as attention_operator
from .batch import BatchShard
from .generate import decode
from .key_values import attend_to_shared_keys, expand, gathers_shared_keys, has_latent_kv, latent_weight
from .masks import WITHOUT_HOOKS, mask_in_layer
from .state import DecodeShard, Patch, current_forward


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    seqpar: BatchShard | DecodeShard | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: attention of one layer over the sharded sequence.

    ``query``, ``key`` and ``value`` hold this rank's tokens. In a compiled layer this is one operator, or a graph break
    during generation. The second result, the attention weights, is always None.

    Raises:
        ValueError: the layer's model is not parallelized, no shard came with the batch, or the layer asks for
            something that this attention does not support.
    """
    patch = getattr(module, "_seqpar", None)
    name = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if not isinstance(patch, Patch):
        raise ValueError(f"{name}: attn_implementation 'seqpar' is set by seqpar.hf.parallelize(model); call that")
    for argument, x in (("attention_mask", attention_mask), ("position_bias", position_bias)):
        if x is not None:
            raise ValueError(
                f"{name}: {argument} of shape {tuple(x.shape)} is given; dense score terms are not supported"
            )
    if seqpar is None and (forward := current_forward()) is not None:  # the layer does not pass its **kwargs on
        seqpar = forward.shard
    if seqpar is None:
        raise ValueError(
            f"{name}: no 'seqpar' came with the batch: {WITHOUT_HOOKS}, or call the part with what "
            "seqpar.hf.shard_batch returns. A model whose layers do not pass **kwargs on cannot recompute them "
            "(activation checkpointing)"
        )
    mask, in_layer = mask_in_layer(module, seqpar, patch, is_causal, sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weight, shared_key = None, key
    if has_latent_kv(module):
        if isinstance(seqpar, BatchShard) and patch.ranks > 1:
            weight = latent_weight(module, query.shape[1], key, patch.ulysses_ranks)
        if weight is None:
            key, value = expand(module, key, value)
    query, key, value = _same_dtype(query, key, value)
    weight = None if weight is None else weight.to(query.dtype)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # [b, s, h, d], [b, s, n, d] and [b, s, n, e]
    # The inputs have autocast's dtype already. The kernels' own float32 must stay float32.
    with torch.autocast(query.device.type, enabled=False):
        if isinstance(seqpar, DecodeShard):
            score = Score(scale, softcap or 0.0, sinks=s_aux)
            return decode(module, q, k, v, seqpar, patch, in_layer, score, name), None
        _check_tuning(module, seqpar, name)
        if seqpar.sharding is None:  # the forward runs without the hooks, as in a pipeline stage
            patch.place(seqpar)
        sharding, seed = seqpar.sharding, None
        assert sharding is not None and seqpar.seed_on_host is not None
        if dropout:
            seed = (seqpar.seed_on_host + _layer_seed(module)) % 2**62
        spec = AttentionSpec(
            strategy=patch.strategy,
            strategy_options=constants(patch.options),
            softmax_scale=constant_float(scale),
            softcap=constant_float(softcap or 0.0),
            dropout_p=constant_float(dropout),
            backend=patch.backend,
            layer_mask=in_layer,
            returns_saved=torch.compiler.is_compiling(),
        )
        if not torch.compiler.is_compiling() and gathers_shared_keys(module, patch, layer_mask(mask, *in_layer)):
            spec = spec.having(replicated=True)
            return attend_to_shared_keys(q, k, v, shared_key, s_aux, mask, sharding, spec, seed), None
        cluster = sharding.layout, sharding.ranks, sharding.per_host
        spec = named(spec, mask, q.shape[2], k.shape[2], *cluster)
        check_inputs(q, k, v, weight)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            q = join_backward(q, (k, v, s_aux, weight), spec, sharding)
        return attention_operator(q, k, v, s_aux, None, seed, weight, spec, mask, sharding, ANY_RANKS)[0], None


def _check_tuning(module: nn.Module, shard: BatchShard, name: str) -> None:
    tuned = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False)
    if tuned and shard.seq_len >= (floor_scale := int(getattr(module, "floor_scale", 0))):
        raise ValueError(
            f"{name}: attn_temperature_tuning scales queries by their index in its input, which here holds one rank's "
            f"tokens; rows of fewer than floor_scale={floor_scale} tokens are not scaled and work"
        )


def _layer_seed(module: nn.Module) -> int:
    """A number that differs from layer to layer. The odd multiplier spreads the layers' indices over 32 bits."""
    return (getattr(module, "layer_idx", None) or 0) * 0x9E3779B1


def _same_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast all tensors to autocast's dtype, or to the dtype of the values: rotations and norms may return float32."""
    device_type = tensors[0].device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else tensors[-1].dtype
    return tuple(x.to(dtype) for x in tensors)
