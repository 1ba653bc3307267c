"""The MLP of a layer for some tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from ..patching.forwards import replace_forward
from .weights import OWNER, OriginalForward, SummedWeights


def tile_mlp(module: nn.Module, tokens: int = 32_768) -> None:
    """Compute ``module`` for at most ``tokens`` tokens at a time, and recompute each tile in backward. In place.

    Only one tile's activations exist at a time, in forward and in backward: of the module's input nothing else is kept.

    Args:
        module: takes ``[..., hidden]`` and returns a tensor of ``[..., n]``, or a tuple of tensors. Each token's result
            must depend on this token alone, as in an MLP and in a mixture of experts without a capacity per expert.
        tokens: of one tile.
    """

    def run(self: nn.Module, forward: OriginalForward, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        count = -(-(x.numel() // x.shape[-1]) // tokens)
        if count <= 1:
            return forward(x, *args, **kwargs)
        _check(self, args, kwargs)
        # torch.compile does not trace replaced weights: there, the weights' gradients are summed in their own dtype.
        weights = None if torch.compiler.is_compiling() else SummedWeights(self)

        def tile_forward(tile: Tensor) -> Any:
            if weights is None:
                return forward(tile, *args, **kwargs)
            return weights.call(forward, tile, *args, **kwargs)

        rows = x.flatten(0, -2)  # [tokens, hidden]
        rows = rows.view(*[1] * (x.dim() - 2), *rows.shape)  # with the dimensions of x
        tiles = [checkpoint(tile_forward, tile, use_reentrant=False) for tile in rows.chunk(count, dim=-2)]
        if isinstance(tiles[0], Tensor):
            return torch.cat(tiles, dim=-2).view(*x.shape[:-1], -1)
        return tuple(_join(parts, x) for parts in zip(*tiles, strict=True))

    replace_forward(module, OWNER, run)


def _join(tiles: tuple[Any, ...], x: Tensor) -> Any:
    """One of several outputs: of the dimensions of ``x``, or ``[tokens, n]`` as a router's logits."""
    if not all(isinstance(tile, Tensor) for tile in tiles):
        raise TypeError("tiled_mlp: the MLP returns a tuple of more than tensors; leave tiled_mlp out")
    joined = torch.cat(tiles, dim=-2)
    return joined.view(*x.shape[:-1], -1) if joined.dim() == x.dim() else joined


def _check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        raise ValueError(
            f"tiled_mlp: {type(module).__name__} takes several tensors, and it is not known how to tile them; leave "
            "tiled_mlp out"
        )
    inner = next((m for m in module.modules() if isinstance(m, FSDPModule) and m is not module), None)
    if inner is not None:
        raise ValueError(
            f"tiled_mlp: fully_shard was called for {type(inner).__name__} inside of {type(module).__name__}, and "
            "would gather its weights once for every tile; call fully_shard for the layer or for the whole MLP instead"
        )
