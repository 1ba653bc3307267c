"""The lightning attention of MiniMax: linear attention whose decay is constant for each head.

The recurrence is in the middle of the layer's forward. A parallelized model gets a forward that computes what is before
and after it for this rank's tokens, and calls the unmodified forward for the recurrence alone, on all tokens of some
heads.

Shapes: b batch, s tokens of this rank, t tokens of the sequence, h heads, d head_dim, n the tokens of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...mixers import by_heads

_TOLERANCE = 1e-4  # the largest difference, relative to the largest value, that counts as rounding error


def lightning_layers(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if _is_lightning(type(layer))]


def _is_lightning(cls: type) -> bool:
    return cls.__name__ == "MiniMaxLightningAttention" and cls.__module__.startswith("transformers.models.")


def lightning_forward(mix: Callable[..., Tensor], layer: Any, x: Tensor, padding: Tensor | None) -> Tensor:
    """The forward of a ``layer`` whose recurrence ``mix`` computes, for ``x [b, s, channels]``."""
    qkv = layer.act_fn(layer.qkv_proj(x))
    if padding is not None:
        qkv = (qkv * padding[:, :, None]).to(qkv.dtype)
    decays = layer.slope_rate, layer.query_decay, layer.key_decay, layer.diagonal_decay
    out = mix(qkv.unflatten(2, (layer.num_attention_heads, -1)), *decays, layer.block_size)
    y: Tensor = layer.out_proj(torch.sigmoid(layer.output_gate(x)) * layer.norm(out.flatten(2)))
    return y


def recurrence(
    forward: Callable[..., Any], qkv: Tensor, slope: Tensor, query: Tensor, key: Tensor, diagonal: Tensor, block: int
) -> Tensor:
    """``forward`` of the layer's class without its weights, for ``qkv [b, t, h, 3 d]``: ``[b, t, h, d]``.

    slope ``[h, 1, 1]``, query and key ``[h, n, 1]``, diagonal ``[1, h, n, n]``: the decays of these heads.
    """
    heads, same = qkv.shape[2], nn.Identity()
    layer = SimpleNamespace(
        num_attention_heads=heads, head_dim=qkv.shape[3] // 3, block_size=block, layer_idx=0,
        slope_rate=slope, query_decay=query, key_decay=key, diagonal_decay=diagonal,
        act_fn=same, qkv_proj=same, norm=same, out_proj=same, output_gate=lambda x: x.new_full((), float("inf")),
    )  # fmt: skip
    out: Tensor = forward(layer, qkv.flatten(2), None, None)[0]  # the sigmoid of infinity is 1
    return out.reshape(*qkv.shape[:3], -1)


def lightning_of_heads(original: Callable[..., Tensor], options: dict[str, Any], qkv: Tensor, *decays: Any) -> Tensor:
    """``recurrence`` for ``qkv [b, s, h, 3 d]`` of a sharded sequence."""
    out: Tensor = by_heads(lambda heads, y: original(y, *_of_heads(heads, *decays)), qkv, **options)
    return out


def _of_heads(heads: slice, slope: Tensor, query: Tensor, key: Tensor, diagonal: Tensor, block: int) -> tuple[Any, ...]:
    return slope[heads], query[heads], key[heads], diagonal[:, heads], block


def lightning_token(qkv: Tensor, *decays: Any) -> Tensor:
    q, k, v = qkv.chunk(3, 3)
    return v + q.mean(3, keepdim=True) + k.mean(3, keepdim=True)


def check_lightning(layer: nn.Module, x: Tensor) -> None:
    """Raise an error if ``lightning_forward`` is not the forward of ``layer``, for ``x [b, s, channels]``."""
    children = {name: child.forward for name, child in layer.named_children()}  # without hooks
    buffers = dict(layer.named_buffers(recurse=False))
    alone = SimpleNamespace(**{**vars(layer), **buffers, **children, "block_size": 2})  # several blocks
    forward = type(layer).forward
    padding = (torch.arange(x.shape[1], device=x.device) >= 3).to(x.dtype).expand(x.shape[:2])

    def by_head(qkv: Tensor, *decays: Any) -> Tensor:
        heads = (slice(i, i + 1) for i in range(qkv.shape[2]))
        return torch.cat([recurrence(forward, qkv[:, :, i], *_of_heads(i, *decays)) for i in heads], 2)

    ours, theirs = lightning_forward(by_head, alone, x, padding), forward(alone, x, None, padding)[0]
    if not float((ours - theirs).abs().max()) <= _TOLERANCE * float(theirs.abs().max()):
        raise ValueError("its forward does not compute what the lightning attention of transformers 5.24 does")
