"""Activation checkpointing that recomputes a layer but not its attention, nor the communication of that attention.

Selective activation checkpointing keeps the results of chosen operators and recomputes the rest. The forward of
attention, together with its all-to-alls, is such an operator: while a checkpoint records, it is called through
``torch.library``, so that the checkpoint sees it. Otherwise it is a plain function call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# The function that an operator's handle stands for, during the call: operators take only tensors and numbers.
_calls: dict[int, Callable[..., tuple[Tensor, ...]]] = {}


@torch.library.custom_op("seqpar::checkpointed", mutates_args=())
def _checkpointed(tensors: list[Tensor], handle: int) -> list[Tensor]:
    return list(_calls[handle](*tensors))


@_checkpointed.register_fake
def _(tensors: list[Tensor], handle: int) -> list[Tensor]:
    return list(_calls[handle](*tensors))  # it communicates, but fake tensors carry nothing


def checkpointed_op(function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``function(*tensors)``. A checkpoint with ``keep_attention`` keeps the results, which are new tensors."""
    if _get_current_dispatch_mode() is None:
        return function(*tensors)
    handle = id(function)
    _calls[handle] = function
    try:
        return tuple(_checkpointed(list(tensors), handle))
    finally:
        del _calls[handle]


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator is torch.ops.seqpar.checkpointed.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def keep_attention() -> tuple[Any, Any]:
    """Contexts for ``torch.utils.checkpoint`` that recompute a layer except its attention.

    Examples:
        >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=seqpar.keep_attention)

    The output and the log-sum-exp of attention are kept, and with Ulysses the exchanged q, k and v too (q alone, if
    more ranks than KV heads share k and v), so that the recomputation sends nothing for them. Korthikanti et al.,
    2022, do the opposite: they recompute attention and keep the rest. Since attention kernels no longer store the
    scores, attention is the most expensive part to recompute and the cheapest to keep.

    Returns:
        The two contexts that ``torch.utils.checkpoint.checkpoint`` expects of its ``context_fn``.
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return contexts
