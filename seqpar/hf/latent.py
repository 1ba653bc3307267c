"""Latent attention (DeepSeek-V2 and V3, Kimi K2, GLM-4.x lite and others): ranks send latents, not keys and values.

An attention layer of these models calls its method ``expand_kv`` just before it calls the attention function. The
method expands the latents to the keys and values of all heads. In a parallelized model ``expand_kv`` returns latents
and rotated keys unchanged: the layer has "latent KV". The attention function sends latents to other ranks, and each
rank expands the latents that it receives (see ``strategies/latent.py``).

Shapes, as in transformers: latents ``[batch, 1, seq, width]``, rotated keys ``[batch, 1, seq, rope]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_METHOD = "expand_kv"
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


def _unchanged(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated


def enable_latent_kv(layer: nn.Module) -> None:
    """Make ``layer`` pass latents to the attention function, if it is a layer of latent attention."""
    has_method = callable(getattr(layer, _METHOD, None)) and all(hasattr(layer, name) for name in _SIZES)
    if has_method and isinstance(getattr(layer, "kv_b_proj", None), nn.Module):
        setattr(layer, _METHOD, _unchanged)


def disable_latent_kv(layer: nn.Module) -> None:
    """Make ``layer`` pass keys and values again."""
    vars(layer).pop(_METHOD, None)


def has_latent_kv(layer: nn.Module) -> bool:
    """Whether ``layer`` passes latents and rotated keys to the attention function instead of keys and values."""
    return vars(layer).get(_METHOD) is _unchanged


def expand(layer: nn.Module, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, each ``[batch, heads, seq, head_dim]``, by the layer's original method."""
    method: Any = getattr(type(layer), _METHOD)
    keys, values = method(layer, latents, rotated)
    return keys, values


@contextmanager
def recorded_expansion(layer: nn.Module, record: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """In the block, ``record(layer, latents, rotated)`` is called whenever ``layer`` expands latents."""
    if not callable(getattr(layer, _METHOD, None)) or has_latent_kv(layer):
        yield
        return

    def record_and_expand(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        record(layer, latents, rotated)
        return expand(layer, latents, rotated)

    setattr(layer, _METHOD, record_and_expand)
    try:
        yield
    finally:
        disable_latent_kv(layer)


def latent_weight(layer: nn.Module, heads: int, latents: Tensor, copies: int) -> Tensor | None:
    """The weight with which ``seqpar.attention`` expands latents: ``[heads, nope + v_head_dim, width]``.

    None if keys and values should be sent instead: the projection is no plain linear layer (LoRA's is not), or the
    latents of ``copies`` ranks, all of which an all-to-all sends to each rank, are no smaller than keys and values.
    """
    sizes: Any = layer
    projection: Any = sizes.kv_b_proj
    per_head = sizes.qk_nope_head_dim + sizes.v_head_dim
    if type(projection) is not nn.Linear or projection.bias is not None or isinstance(projection.weight, DTensor):
        return None
    weight: Tensor = projection.weight
    if tuple(weight.shape) != (heads * per_head, latents.shape[-1]):
        return None
    if (sizes.kv_lora_rank + sizes.qk_rope_head_dim) * copies >= heads * (per_head + sizes.qk_rope_head_dim):
        return None
    return weight.unflatten(0, (heads, per_head))
