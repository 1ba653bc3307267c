"""Rotary embeddings whose frequencies follow the longest position at hand ("dynamic", "longrope").

A rank holds only some positions, so its longest may not be the batch's. The embedding is shown the batch's longest
position behind the rank's own, and that one's angles are dropped again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .batch import BatchShard
from .forward import current

_FOLLOW = ("dynamic", "longrope")


def follows_length(module: nn.Module) -> bool:
    """Whether it is such an embedding."""
    kinds = getattr(module, "rope_type", None)
    return any(kind in _FOLLOW for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,)))


def before_rope(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Put the longest position behind ``position_ids [batch, seq]``."""
    call = current()
    if call is None or not isinstance(call.shard, BatchShard):
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _longer(kwargs["position_ids"], call.shard.longest)}
    return (args[0], _longer(args[1], call.shard.longest), *args[2:]), kwargs


def after_rope(module: nn.Module, args: Any, kwargs: Any, output: tuple[Tensor, Tensor]) -> Any:
    """Drop its angles from ``cos, sin [batch, seq + 1, head_dim]``."""
    call = current()
    if call is None or not isinstance(call.shard, BatchShard):
        return None
    return tuple(x[:, :-1] for x in output)


def _longer(position_ids: Tensor, longest: int) -> Tensor:
    return torch.cat([position_ids, position_ids.new_full((len(position_ids), 1), longest)], dim=1)
