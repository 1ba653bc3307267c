"""Latent attention (DeepSeek-V2 and V3, Kimi K2, GLM-4.x lite and others): ranks send latents, not keys and values.

The attention layers of these models expand a token's latent to the keys and values of all heads in a method of their
own, ``expand_kv``, just before they call the attention function. In a parallelized model this method returns its
arguments as they are. The attention function sends them, and expands what arrives (see ``strategies/latent.py``).

Shapes: latents ``[batch, 1, seq, width]``, rotated keys ``[batch, 1, seq, rope]``, as transformers has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_METHOD = "expand_kv"
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


def _as_they_are(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated


def hand_on_latents(layer: nn.Module) -> bool:
    """Let the attention layer hand on latents, if it has any. Returns whether it does."""
    if not callable(getattr(layer, _METHOD, None)) or not all(hasattr(layer, name) for name in _SIZES):
        return False
    if not isinstance(getattr(layer, "kv_b_proj", None), nn.Module):
        return False
    setattr(layer, _METHOD, _as_they_are)
    return True


def hand_on_keys(layer: nn.Module) -> None:
    """Undo ``hand_on_latents``."""
    vars(layer).pop(_METHOD, None)


def hands_on_latents(layer: nn.Module) -> bool:
    return vars(layer).get(_METHOD) is _as_they_are


def expand(layer: nn.Module, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[batch, heads, seq, head_dim]``, by the layer's own method."""
    method: Any = getattr(type(layer), _METHOD)
    keys, values = method(layer, latents, rotated)
    return keys, values


@contextmanager
def recorded_expansion(layer: nn.Module, record: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """In the block, ``record(layer, latents, rotated)`` is called before a layer of latent attention expands them.

    A layer that hands on latents expands nothing.
    """
    if not callable(getattr(layer, _METHOD, None)) or hands_on_latents(layer):
        yield
        return

    def record_and_expand(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        record(layer, latents, rotated)
        return expand(layer, latents, rotated)

    setattr(layer, _METHOD, record_and_expand)
    try:
        yield
    finally:
        hand_on_keys(layer)


def latent_weight(layer: nn.Module, heads: int, latents: Tensor, copies: int) -> Tensor | None:
    """The weight ``[heads, nope + v_head_dim, width]`` with which ``seqpar.attention`` expands the latents.

    Args:
        layer: an attention layer that hands on latents.
        heads: its query heads.
        latents: their width is the weight's.
        copies: the ranks of an all-to-all, each of which receives all latents, where it would receive some KV heads.

    Returns:
        None if the layer's projection is not a plain linear layer, such as LoRA's, or if keys and values of some heads
        are fewer numbers than ``copies`` of a latent.
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
