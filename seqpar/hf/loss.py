"""The loss of a sharded sequence, and logits that are computed a few tokens at a time.

Every rank's loss has the one-device value. Its backward gives this rank's partial gradient; the sum of all ranks'
partial gradients is the one-device gradient.

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
from .batch import IGNORE_INDEX, BatchShard
from .state import Gradients, Patch, current_forward
from .wrappers import averaging_wrappers

GRADIENTS: tuple[str, ...] = get_args(Gradients)
_CHUNK_BYTES = 128 << 20

Pointwise = Callable[[Tensor], Tensor]


class TokenLoss:
    """The loss function of a parallelized model: cross-entropy over the tokens of the full sequence.

    The model's forward calls it like transformers' own loss functions. ``labels`` are shifted already.
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
        """The mean over the labels that count, of all ranks' tokens: a float32 scalar.

        Args:
            logits: ``[..., vocabulary]``, of this rank's tokens.
            labels: int64, as many as there are rows of logits.
            num_items_in_batch: what to divide by; by default the number of labels of the full batch.
            ignore_index: the label that does not count.
            seqpar: the batch's ``BatchShard``, where no forward of the model is under way (in a pipeline).

        Raises:
            ValueError: the labels do not come from ``shard_batch``; or a wrapper around the model reduces gradients in
                a way for which ``gradients="auto"`` has no factor.
        """
        forward = current_forward()
        if forward is not None and forward.targets is not None:
            return torch.zeros((), device=labels.device)  # log-probabilities are asked for, and no loss
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
    """The sum of all ranks' ``local_loss``. Its backward gives this rank's partial gradient only.

    Under a wrapper that averages gradients over the ranks of the sequence, the backward multiplies by their number.
    """
    if patch.group is None or patch.ranks == 1 or patch.batches == "own":
        return local_loss  # of other ranks' batches: the exchange of outputs sums it
    return all_reduce_loss(local_loss, patch.group, gradient_scale(patch, patch.group, model))


def gradient_scale(patch: Patch, group: ProcessGroup, model: nn.Module) -> int:
    """The number by which wrappers around ``model`` will divide the sum of the partial gradients."""
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
                f"sequence's {sorted(sequence)}; wrap the model over all of them, or over dp only"
            )
    return scale


class LazyLogits:
    """``head(hidden)``, followed by what the model does to each logit (a softcap, a scale), all not computed yet.

    The output embedding returns it where a loss follows, so that the logits of all tokens never exist at once. Any
    use other than the loss function and the elementwise operations below computes the logits.

    Attributes:
        head: the output embedding.
        hidden: its input ``[..., hidden]``.
        pointwise: the functions to apply to the logits, in order.
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
    """The summed cross-entropy of ``pointwise(head(hidden))``, a float32 scalar, some tokens at a time.

    As in Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024), the forward computes the gradients too, chunk by
    chunk, and the backward scales them. On CUDA, Liger's kernel is used if it is installed and can do the request.

    Args:
        hidden: ``[tokens, hidden]``.
        head: the output embedding, ``[vocabulary, hidden]``.
        labels: int64 ``[tokens]``. The logits of tokens labelled ``ignore_index`` are never computed.
        pointwise: functions that are applied to each logit.
        ignore_index: the label that does not count.
        chunk: tokens at a time; by default as many as have 128 MiB of float32 logits.
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
    """The log-probability of each label that counts, and 0 for the others, float32 ``[batch, seq]``.

    Lazy logits are computed some tokens at a time, and again in backward, so that those of all tokens never exist.

    Args:
        logits: ``[batch, seq, vocabulary]``.
        labels: int64 ``[batch, seq]``, shifted.
        chunk: as in ``fused_cross_entropy``.
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

    # At least one chunk, which may be empty: all ranks take part in the backward.
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
            # Detached, what is saved here never goes to hooks around the model: activation checkpointing would run the
            # model again as soon as the gradient below asks for it.
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
        # In float32: one over the number of labels, rounded to bfloat16, would be wrong by up to 0.4 %.
        scaled = (None if x is None else (x.to(grad.dtype) * grad).to(x.dtype) for x in ctx.saved_tensors)
        return (*scaled, None, None, None)
