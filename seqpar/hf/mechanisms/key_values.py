"""Attention layers whose keys and values are latents, or are shared with other layers.

Latent attention (DeepSeek-V2 and V3, Kimi K2, GLM-4.x lite and others): a layer calls its method ``expand_kv`` just
before it calls the attention function. The method expands the latents to the keys and values of all heads. In a
parallelized model ``expand_kv`` returns latents and rotated keys unchanged: the layer has "latent KV". The attention
function sends latents to other ranks, and each rank expands the latents that it receives (``strategies/latent.py``).
Shapes, as in transformers: latents ``[batch, 1, seq, width]``, rotated keys ``[batch, 1, seq, rope]``.

Shared keys (Gemma 4): several layers attend to the keys and values of an earlier layer, which are all-gathered once.
The layer that computes the keys and values all-gathers them, and stores the result as an attribute of its key tensor.
The layers that reuse the key tensor read the attribute and send nothing. In backward, autograd sums the gradients of
all these layers, and one reduce-scatter then sends the sums to the ranks that own the keys. Layers with a sliding
window do not share an all-gather, because they need few keys of other ranks. Bytes sent per rank of P for all layers
that share keys: (P-1)/P * N * 2 d_kv * e in forward, and (P-1)/P * N * 2 d_kv * 4 in backward. Without sharing, each
layer would send this, and K/V again in backward.
Shapes: b batch, s tokens of this rank, t tokens of all ranks, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...masks.mask import Mask
from ...patching.replaced import replaced
from ...sharding.sharding import Sharding
from ...sharding.spec import AttentionSpec
from ...strategies.attend import attend
from ..state import Patch

_METHOD = "expand_kv"
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


def _unchanged(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotated


def has_expansion(layer: nn.Module) -> bool:
    """Whether ``layer`` has latent attention."""
    has_method = callable(getattr(layer, _METHOD, None)) and all(hasattr(layer, name) for name in _SIZES)
    return has_method and isinstance(getattr(layer, "kv_b_proj", None), nn.Module)


def enable_latent_kv(layer: nn.Module) -> None:
    """Make ``layer`` pass latents to the attention function, if it has latent attention."""
    if has_expansion(layer):
        setattr(layer, _METHOD, _unchanged)


def disable_latent_kv(layer: nn.Module) -> None:
    vars(layer).pop(_METHOD, None)


def has_latent_kv(layer: nn.Module) -> bool:
    return vars(layer).get(_METHOD) is _unchanged


def expand(layer: nn.Module, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """The layer's keys and values, each ``[batch, heads, seq, head_dim]``."""
    method: Any = getattr(type(layer), _METHOD)
    tokens = latents.shape[2]
    if not tokens:  # a rank without keys: the method's ``view(..., -1, ...)`` cannot have zero elements
        latents, rotated = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (latents, rotated))
    keys, values = method(layer, latents, rotated)
    return keys[:, :, :tokens], values[:, :, :tokens]


@contextmanager
def recorded_expansion(layer: nn.Module, record: Callable[[nn.Module, Tensor, Tensor], None]) -> Iterator[None]:
    """In the block, ``record(layer, latents, rotated)`` is called whenever ``layer`` expands latents."""
    if not callable(getattr(layer, _METHOD, None)) or has_latent_kv(layer):
        yield
        return

    def record_and_expand(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        record(layer, latents, rotated)
        return expand(layer, latents, rotated)

    with replaced(layer, **{_METHOD: record_and_expand}):
        yield


def latent_weight(layer: nn.Module, heads: int, latents: Tensor, ulysses: int) -> Tensor | None:
    """The weight with which ``seqpar.attention`` expands latents: ``[heads, nope + v_head_dim, width]``.

    None if keys and values should be sent instead: the projection is no plain linear layer (LoRA's is not), or the
    latents of ``ulysses`` ranks, all of which an all-to-all sends to each rank, are no smaller than keys and values.
    """
    sizes: Any = layer
    per_head = sizes.qk_nope_head_dim + sizes.v_head_dim
    if (sizes.kv_lora_rank + sizes.qk_rope_head_dim) * ulysses >= heads * (per_head + sizes.qk_rope_head_dim):
        return None
    return plain_weight(layer, heads, latents)


def plain_weight(layer: nn.Module, heads: int, latents: Tensor) -> Tensor | None:
    """The weight that expands latents, ``[heads, nope + v_head_dim, width]``; None if it is no plain linear layer's."""
    sizes: Any = layer
    projection: Any = sizes.kv_b_proj
    per_head = sizes.qk_nope_head_dim + sizes.v_head_dim
    if type(projection) is not nn.Linear or projection.bias is not None or isinstance(projection.weight, DTensor):
        return None
    weight: Tensor = projection.weight
    if tuple(weight.shape) != (heads * per_head, latents.shape[-1]):
        return None
    return weight.unflatten(0, (heads, per_head))


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
    """Whether several layers share the keys of ``module``, and should all-gather them once."""
    modes = getattr(getattr(module, "config", None), "kv_sharing_modes", None)
    if modes is None or patch.ranks == 1 or patch.settings.strategy != "context_parallel":
        return False
    if patch.settings.options.get("comm") not in (None, "all_gather") or mask.has_window:
        return False
    if patch.settings.deterministic == "invariant":  # the gradients of an all-gather are summed over the ranks
        return False
    types, storing = cast(Any, module.config).layer_types, storing_layer(module)
    return modes[storing] == "store" and any(
        mode == "reuse" and kind == types[storing] for mode, kind in zip(modes, types, strict=True)
    )


def attend_to_shared_keys(
    q: Tensor,  # [b, s, h, d]
    k: Tensor,  # [b, s, n, d]
    v: Tensor,  # [b, s, n, d]
    shared: Tensor,  # the key tensor that the layers share; the all-gathered keys and values are its attribute
    sinks: Tensor | None,  # [h]
    mask: Mask,  # the documents and padding of the batch
    sharding: Sharding,
    spec: AttentionSpec,  # with the layer's causality and window
    seed: Tensor | None,  # of attention dropout, int64 [] on the CPU
) -> Tensor:
    """Attention over the keys of all ranks: ``[b, s, h, d]``. The first layer that attends to them all-gathers them."""
    gathered: tuple[Tensor, Tensor] | None = getattr(shared, _GATHERED, None)
    if gathered is None or gathered[0].dtype != k.dtype:
        gathered = sharding.unshard(k), sharding.unshard(v)  # [b, t, n, d] each
        setattr(shared, _GATHERED, gathered)
    return attend(q, *gathered, spec, mask, sharding, sinks=sinks, seed=seed)[0]
