"""Activation checkpointing that recomputes a layer without repeating its attention or that attention's communication.

Selective activation checkpointing keeps the results of chosen operators and recomputes the rest. Attention's forward is
one such operator, and so are the two all-to-alls around it: while a checkpoint records, they are called through
``torch.library`` so that it sees them; otherwise they are plain calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# What an operator's handle stands for, while it is called: operators take tensors and numbers only.
_calls: dict[int, Callable[..., tuple[Tensor, ...]]] = {}


@torch.library.custom_op("seqpar::kept", mutates_args=())
def _kept(tensors: list[Tensor], handle: int) -> list[Tensor]:
    return list(_calls[handle](*tensors))


def kept(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """``function(*tensors)``, whose results (new tensors) a checkpoint with ``keep_attention`` keeps."""
    if _get_current_dispatch_mode() is None:
        return function(*tensors)
    handle = id(function)
    _calls[handle] = function
    try:
        return tuple(_kept(list(tensors), handle))
    finally:
        del _calls[handle]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator is torch.ops.seqpar.kept.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def keep_attention() -> tuple[Any, Any]:
    """Contexts for ``torch.utils.checkpoint``: recompute everything of a layer but its attention.

    >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=seqpar.keep_attention)

    Kept are attention's output and log-sum-exp (with Ulysses also the exchanged q, k, v): the recomputation sends
    nothing for them. Korthikanti et al., 2022, recompute attention and keep the rest; with kernels that never store
    the scores, attention is what costs most to repeat and least to keep.
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return contexts
