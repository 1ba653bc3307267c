"""Activation checkpointing that recomputes a layer without its attention and without the communication of attention.

Selective activation checkpointing keeps the results of chosen operators and recomputes the rest. The forward of
attention, together with its all-to-alls, is such an operator (see ``operators.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from . import operators  # noqa: F401 (registers the operator)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator is torch.ops.seqpar.attention.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def keep_attention() -> tuple[Any, Any]:
    """Contexts for ``torch.utils.checkpoint`` that recompute a layer except its attention.

    Examples:
        >>> y = checkpoint(layer, x, use_reentrant=False, context_fn=seqpar.keep_attention)

    The output and the log-sum-exp of attention are kept. With Ulysses, the exchanged q, k and v are kept too (only q if
    there are more ranks than KV heads), so that the recomputation sends nothing for them. Korthikanti et al., 2022, do
    the opposite: they recompute attention and keep the rest. Since attention kernels no longer store the scores,
    attention is the most expensive part to recompute and the cheapest part to keep.

    Returns:
        The two contexts that ``torch.utils.checkpoint.checkpoint`` expects of its ``context_fn``.
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)
    return contexts
