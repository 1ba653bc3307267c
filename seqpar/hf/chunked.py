"""Cross-entropy from hidden states, some tokens at a time: the logits of a long shard never exist whole.

As in Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024), the gradients are made in the forward, chunk by
chunk, and scaled in the backward. On CUDA that kernel is used where it is installed and does what is asked.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .logits import Pointwise

_CHUNK_BYTES = 128 << 20


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    pointwise: tuple[Pointwise, ...] = (),
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """The summed cross-entropy of ``pointwise(head(hidden))``, a float32 scalar.

    Args:
        hidden: ``[tokens, hidden]``.
        labels: int64 ``[tokens]``; those equal to ``ignore_index`` do not count, and their logits are never made.
        pointwise: what is done to each logit.
        chunk: tokens at a time; by default as many as have 128 MiB of float32 logits.
    """
    counted = (labels != ignore_index).nonzero().flatten()
    if len(counted) < len(labels):
        hidden, labels = hidden.index_select(0, counted), labels.index_select(0, counted)
    if not pointwise and chunk is None and (liger := _liger()) is not None and hidden.is_cuda and len(labels):
        return liger(reduction="sum")(head.weight, hidden, labels, head.bias).float()
    chunk = chunk or max(1, _CHUNK_BYTES // (4 * head.out_features))
    total: Tensor = _ChunkedCrossEntropy.apply(hidden, head.weight, head.bias, labels, pointwise, chunk)
    return total


def _liger() -> Any:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        pointwise: tuple[Pointwise, ...],
        chunk: int,
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        total = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        for start in range(0, len(labels), chunk):
            span = slice(start, start + chunk)
            rows = hidden[span]
            logits = F.linear(rows, weight, bias).requires_grad_(any(ctx.needs_input_grad[:3]))
            with torch.enable_grad():
                scores = logits
                for step in pointwise:
                    scores = step(scores)
                loss = F.cross_entropy(scores.float(), labels[span], reduction="sum")
            total += loss.detach()
            if not logits.requires_grad:
                continue
            (d_logits,) = torch.autograd.grad(loss, logits)
            if d_hidden is not None:
                d_hidden[span] = (d_logits @ weight).to(hidden.dtype)
            if d_weight is not None:
                d_weight += d_logits.T @ rows
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        scaled = (None if x is None else x * grad.to(x.dtype) for x in ctx.saved_tensors)
        return (*scaled, None, None, None)
