"""The attention function and the mask function that transformers' interfaces call."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import attention
from ..mask import Mask
from .batch import BatchShard
from .decode import DecodeShard, decode
from .forward import current
from .masks import chunks

if TYPE_CHECKING:
    from .patch import Patch


def no_mask(
    batch_size: int | None = None, q_length: int | None = None, attention_mask: Tensor | None = None, **kwargs: Any
) -> None:
    """In place of a dense mask: none. Padding comes by ``shard_batch`` (or ``generate``), which takes it out."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("attention_mask: it has padding; pass the batch through seqpar.hf.shard_batch, which keeps it")


@torch.compiler.disable
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
    """Attention of a transformers layer over the sharded sequence.

    ``query [batch, heads, seq, head_dim]``, ``key, value [batch, kv_heads, seq, head_dim]``, this rank's tokens;
    returns ``[batch, seq, heads, head_dim]``. A compiled layer breaks its graph here, once.

    Raises:
        ValueError: a layer of no parallelized model, or something this attention does not have.
    """
    patch: Patch | None = getattr(module, "_seqpar", None)
    name = f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
    if patch is None:
        raise ValueError(f"{name}: attn_implementation 'seqpar' is set by seqpar.hf.parallelize(model); call that")
    for what, given in (("attention_mask", attention_mask), ("position_bias", position_bias)):
        if given is not None:
            raise ValueError(
                f"{name}: {what} of shape {tuple(given.shape)} is given; dense score terms are not supported"
            )
    if seqpar is None and (call := current()) is not None:  # a layer that does not hand its **kwargs on
        seqpar = call.shard
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window, chunk = _span(module, sliding_window)
    query, key, value = _alike(query, key, value)
    # Autocast has had its say; the kernels' own float32 must stay.
    with torch.autocast(query.device.type, enabled=False):
        if isinstance(seqpar, DecodeShard):
            args = (patch, scaling, window, chunk, softcap or 0.0, s_aux, name)
            return decode(module, query, key, value, seqpar, *args), None
        if seqpar is None:
            raise ValueError(
                f"{name}: no 'seqpar' came with the batch; call model(**seqpar.hf.shard_batch(batch, ...)). A model "
                "whose layers do not hand **kwargs on cannot recompute them (activation checkpointing)"
            )
        tuned = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False)
        if tuned and seqpar.seq_len >= (scale := int(getattr(module, "floor_scale", 0))):
            raise ValueError(
                f"{name}: attn_temperature_tuning scales queries by their place among the tokens at hand, which are "
                f"one rank's here; rows of fewer than floor_scale={scale} tokens do without"
            )
        mask = _mask(seqpar.mask, causal, window, chunk)
        seed = (seqpar.seed + (getattr(module, "layer_idx", None) or 0) * 0x9E3779B1) % 2**62
        return _sharded(query, key, value, seqpar, patch, mask, scaling, softcap, s_aux, dropout, seed), None


def _sharded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: BatchShard,
    patch: Patch,
    mask: Mask,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
    seed: int,
) -> Tensor:
    if (shard.layout, shard.ranks) != (patch.layout, patch.ranks):
        raise ValueError(
            f"the batch was cut with layout={shard.layout!r} for {shard.ranks} ranks, the model parallelized with "
            f"layout={patch.layout!r} for {patch.ranks}; give shard_batch and parallelize the same"
        )
    value_dim: int = value.shape[-1]
    if value_dim < query.shape[-1]:  # latent attention has narrower values: zeros beside them change nothing
        value = F.pad(value, (0, query.shape[-1] - value_dim))
    out = cast(Any, attention)(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        strategy=patch.strategy,
        mask=mask,
        mesh=patch.mesh,
        group=patch.given_group,
        layout=patch.layout,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        sinks=sinks,
        dropout_p=dropout,
        backend=patch.backend,
        seq_len=shard.seq_len,
        dropout_seed=seed,
        **patch.options,
    )
    assert isinstance(out, Tensor)
    return out[..., :value_dim]


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """One dtype for all: autocast's, or the values' (rotations and norms may leave queries and keys in float32)."""
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[-1].dtype
    return tuple(x.to(dtype) for x in tensors)


def _span(module: nn.Module, sliding_window: int | None) -> tuple[int | None, int | None]:
    """The layer's window (``|i - j| < window``) and chunk. Layers that leave them to the dense mask have them in the
    config."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    kind = types[layer] if types is not None and layer is not None and layer < len(types) else None
    if kind == "sliding_attention" and sliding_window is None:
        sliding_window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
    return sliding_window, getattr(config, "attention_chunk_size", None) if kind == "chunked_attention" else None


@lru_cache(maxsize=512)
def _mask(batch: Mask, causal: bool, window: int | None, chunk: int | None) -> Mask:
    mask = batch & Mask.causal() if causal else batch
    if window is not None:
        mask = mask & Mask.sliding_window(window - 1, 0 if causal else window - 1)
    return mask & chunks(chunk, batch) if chunk else mask
