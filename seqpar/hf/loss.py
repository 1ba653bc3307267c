"""The loss of a sharded sequence, and logits that are computed for a few tokens at a time.

The loss has its one-device value on every rank. Its backward computes this rank's partial gradients. The sum of the
partial gradients of all ranks is the one-device gradient.

Shapes: tokens of this rank, hidden, vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from ..checks import no_compile
from ..layers.loss import all_reduce_loss
from ..layers.wrappers import averaging_wrappers
from .batch import IGNORE_INDEX, BatchShard
from .state import Gradients, Patch, current_forward

GRADIENTS: tuple[str, ...] = get_args(Gradients)
_CHUNK_BYTES = 128 << 20

Pointwise = Callable[[Tensor], Tensor]


class TokenLoss:
    """The loss function of a parallelized model: cross-entropy over the tokens of the full sequence.

    The model's forward calls it as it calls transformers' own loss functions. Unlike these it does not shift the
    labels, because ``shard_batch`` has shifted them.

    Args:
        patch: the model's ``Patch``.
        model: the parallelized model.
    """

    def __init__(self, patch: Patch, model: nn.Module) -> None:
        self.patch = patch
        self.model = model

    @no_compile
    def __call__(
        self,
        logits: Tensor | LazyLogits,
        labels: Tensor,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        seqpar: BatchShard | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The sum of the cross-entropy of all ranks' tokens, divided by ``num_items_in_batch``.

        Args:
            logits: ``[..., vocabulary]``, of this rank's tokens.
            labels: int64 ``[...]``, this rank's shifted labels.
            args, kwargs: ignored.
            num_items_in_batch: the divisor; by default the number of labels in the full batch.
            ignore_index: tokens with this label do not count.
            seqpar: the batch's ``BatchShard``. It is only needed if the loss is computed outside of the model's
                forward, as in a pipeline.

        Returns:
            A float32 scalar, the same on every rank.

        Raises:
            ValueError: ``shard_batch`` has not sharded the labels; or a wrapper averages the gradients over only some
                of the ranks of the sequence.
        """
        forward = current_forward()
        if forward is not None and forward.targets is not None:
            return torch.zeros((), device=labels.device)  # the caller asked for log-probabilities instead of a loss
        shard = seqpar or (forward.batch_shard if forward is not None else None)
        if shard is None or (shard.num_items is None and num_items_in_batch is None):
            raise ValueError(
                "labels: they were not sharded by seqpar.hf.shard_batch; give it the full batch with 'labels'"
            )
        labels = labels.reshape(-1)  # [tokens]
        if isinstance(logits, LazyLogits):
            hidden = logits.hidden.reshape(len(labels), -1)  # [tokens, hidden]
            total = fused_cross_entropy(
                hidden, logits.head, labels, logits.pointwise, ignore_index, self.patch.loss_chunk
            )
        else:
            flat = logits.reshape(len(labels), -1).float()  # [tokens, vocabulary]
            total = F.cross_entropy(flat, labels, ignore_index=ignore_index, reduction="sum")
        num_items: Any = shard.num_items if num_items_in_batch is None else num_items_in_batch
        if isinstance(num_items, Tensor):
            num_items = num_items.to(total.device)
        elif num_items == 0:
            num_items = total.new_zeros(())  # no label counts: the loss is NaN, as on one device
        return reduce_over_ranks(total / num_items, self.patch, self.model)


def reduce_over_ranks(local_loss: Tensor, patch: Patch, model: nn.Module) -> Tensor:
    """The sum of ``local_loss`` over the ranks. Its backward computes this rank's partial gradients.

    Inside a wrapper that averages gradients over the ranks of the sequence, the backward multiplies the gradients by
    the number of these ranks.

    Args:
        local_loss: the part of the loss of this rank's tokens, a scalar.
        patch: the model's ``Patch``.
        model: the parallelized model.
    """
    if patch.group is None or patch.ranks == 1 or patch.batches == "own":
        return local_loss  # with batches="own", the all-to-all of the outputs sums the parts of the loss
    return all_reduce_loss(local_loss, patch.group, gradient_scale(patch, patch.group, model))


def gradient_scale(patch: Patch, group: ProcessGroup, model: nn.Module) -> int:
    """The number by which the wrappers around ``model`` divide the sum of the partial gradients.

    Raises:
        ValueError: a wrapper averages over only some of the ranks of the sequence, or is DeepSpeed's.
    """
    if patch.gradients == "partial" or not torch.is_grad_enabled():
        return 1
    if patch.gradients == "mean":
        return patch.ranks
    sequence = frozenset(dist.get_process_group_ranks(group))
    scale = 1
    forward = current_forward()
    for name, ranks in averaging_wrappers(model, forward is not None and forward.model is model):
        if sequence <= ranks:
            scale = patch.ranks
        elif len(sequence & ranks) > 1:
            raise ValueError(
                f"gradients='auto': {name} averages over ranks {sorted(ranks)}, which are some but not all of the "
                f"ranks of the sequence, {sorted(sequence)}; wrap the model over all of them, or over dp only"
            )
    return scale


class LazyLogits:
    """Logits that are not computed yet: ``head(hidden)``, followed by elementwise functions (a softcap, a scale).

    If the model computes a loss, its output embedding returns this object. ``TokenLoss`` then computes the logits of
    a few tokens at a time, so that the logits of all tokens are never in memory at once. The elementwise operations
    below return another ``LazyLogits``. Any other operation computes the logits.

    Attributes:
        head: the output embedding.
        hidden: ``[..., hidden]``, the input of the output embedding.
        pointwise: the functions that the model applies to the logits, in order.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor, pointwise: tuple[Pointwise, ...] = ()) -> None:
        self.head = head
        self.hidden = hidden
        self.pointwise = pointwise

    def materialize(self) -> Tensor:
        """The logits ``[..., vocabulary]``."""
        logits = F.linear(self.hidden, self.head.weight, self.head.bias)
        for function in self.pointwise:
            logits = function(logits)
        return logits

    def _then(self, function: Pointwise) -> LazyLogits:
        return LazyLogits(self.head, self.hidden, (*self.pointwise, function))

    def _binary(self, operation: Callable[[Any, Any], Any], other: Any) -> Any:
        if isinstance(other, int | float):
            return self._then(lambda x: operation(x, other))
        return operation(self.materialize(), other)

    def __truediv__(self, other: Any) -> Any:
        return self._binary(torch.true_divide, other)

    def __mul__(self, other: Any) -> Any:
        return self._binary(torch.mul, other)

    __rmul__ = __mul__

    def float(self) -> LazyLogits:
        return self._then(lambda x: x.float())

    def tanh(self) -> LazyLogits:
        return self._then(torch.tanh)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and isinstance(args[0], LazyLogits):
            return args[0].tanh()
        tensors = [x.materialize() if isinstance(x, LazyLogits) else x for x in args]
        return function(*tensors, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.materialize()[index]


def fused_cross_entropy(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    pointwise: tuple[Pointwise, ...] = (),
    ignore_index: int = IGNORE_INDEX,
    chunk: int | None = None,
) -> Tensor:
    """The summed cross-entropy of the logits ``pointwise(head(hidden))``, computed for ``chunk`` tokens at a time.

    As in Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024), the forward computes the gradients too, chunk by
    chunk, and the backward only scales them. On CUDA, Liger's kernel is used if it is installed, and if neither
    ``pointwise`` nor ``chunk`` is given.

    Args:
        hidden: ``[tokens, hidden]``.
        head: the output embedding, with a weight ``[vocabulary, hidden]``.
        labels: int64 ``[tokens]``. The logits of tokens with the label ``ignore_index`` are not computed.
        pointwise: functions to apply to the logits, in order.
        ignore_index: tokens with this label do not count.
        chunk: how many tokens have logits at a time; by default as many as fit in 128 MiB of float32.

    Returns:
        A float32 scalar.
    """
    counted = (labels != ignore_index).nonzero().flatten()
    if len(counted) < len(labels):
        hidden, labels = hidden.index_select(0, counted), labels.index_select(0, counted)
    if not pointwise and chunk is None and hidden.is_cuda and len(labels) and (liger := _liger()) is not None:
        liger_loss: Tensor = liger(reduction="sum")(head.weight, hidden, labels, head.bias).float()
        return liger_loss
    chunk = chunk or max(1, _CHUNK_BYTES // (4 * head.out_features))
    total: Tensor = _FusedCrossEntropy.apply(hidden, head.weight, head.bias, labels, pointwise, chunk)
    return total


def label_log_probs(logits: Tensor | LazyLogits, labels: Tensor, chunk: int | None = None) -> Tensor:
    """The log-probability of each label.

    Lazy logits are computed for ``chunk`` tokens at a time, and again in backward. The logits of all tokens are never
    in memory at once.

    Args:
        logits: ``[batch, seq, vocabulary]``.
        labels: int64 ``[batch, seq]``, shifted.
        chunk: as in ``fused_cross_entropy``.

    Returns:
        float32 ``[batch, seq]``, 0 where the label is ``IGNORE_INDEX``.
    """
    if not isinstance(logits, LazyLogits):
        flat = logits.flatten(0, 1).float()
        return -F.cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape)
    head = logits.head
    counted = (labels.flatten() != IGNORE_INDEX).nonzero().flatten()
    rows, wanted = logits.hidden.flatten(0, -2)[counted], labels.flatten()[counted]
    chunk = chunk or max(1, _CHUNK_BYTES // (4 * head.out_features))

    def score(rows: Tensor, weight: Tensor, bias: Tensor | None, wanted: Tensor) -> Tensor:
        scores = F.linear(rows, weight, bias)  # [chunk, vocabulary]
        for function in logits.pointwise:
            scores = function(scores)
        return -F.cross_entropy(scores.float(), wanted, reduction="none")

    # If no label counts there is one empty chunk. The result then still depends on ``hidden``, and this rank runs the
    # same backward as the other ranks.
    scored = [
        checkpoint(score, x, head.weight, head.bias, y, use_reentrant=False, preserve_rng_state=False)
        for x, y in zip(rows.split(chunk), wanted.split(chunk), strict=True)
    ]
    return torch.zeros(labels.numel(), device=rows.device).index_put((counted,), torch.cat(scored)).view(labels.shape)


def _liger() -> Any:
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss


class _FusedCrossEntropy(torch.autograd.Function):
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
        d_hidden = torch.empty_like(hidden) if needs_hidden else None  # [tokens, hidden]
        # Sums over the chunks, therefore in float32.
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None  # [vocabulary, hidden]
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs_bias else None
        for start in range(0, len(labels), chunk):
            span = slice(start, start + chunk)
            rows = hidden[span]
            logits = F.linear(rows, weight, bias).requires_grad_(any(ctx.needs_input_grad[:3]))  # [chunk, vocabulary]
            # These hooks replace those of activation checkpointing around the model. Otherwise torch.autograd.grad
            # below would run the model's forward again to recompute the tensors that are saved here.
            with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda x: x):
                scores = logits
                for function in pointwise:
                    scores = function(scores)
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
        # Multiply in float32: ``grad`` is one over the number of labels, and bfloat16 would round it by up to 0.4 %.
        scaled = (None if x is None else (x.to(grad.dtype) * grad).to(x.dtype) for x in ctx.saved_tensors)
        return (*scaled, None, None, None)
