"""Logits that are computed for a few tokens at a time, and what is computed from them: losses and log-probabilities.

Shapes: tokens of this rank, hidden, vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules import linear
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...comm.handshake import propagate_errors
from ...layers.exact import is_invariant
from ...layers.loss import exact_sum
from ...memory.weights import SummedWeights
from ...patching.replaced import replaced
from ..batch import BOUNDARY_NAMES, IGNORE_INDEX, BatchCut, BatchSpec
from ..inspection.support import pools_last_token, predicts_in_place
from ..prompts import SharedPrompts
from ..state import Patch, patch_of

_CHUNK_BYTES = 128 << 20
LOG_PROBS = "seqpar_log_probs"  # an argument of the model's forward: True, or "entropy" to ask for entropies too

Pointwise = Callable[[Tensor], Tensor]
InForward = Callable[[Tensor, Any, Callable[..., Tensor] | None], Tensor]


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``module(*args)`` with its hooks, also if the call is replaced in the instance."""
    return type(module)._call_impl(module, *args, **kwargs)


def _is_torchs(forward: Any) -> bool:
    """Whether ``forward`` is PyTorch's of ``nn.Linear``, which may have been replaced in the class."""
    return forward is nn.Linear.forward and forward.__code__.co_filename == linear.__file__


def _is_plain(head: nn.Linear) -> bool:
    """Whether no class of its own decides how the weight multiplies (a quantized weight, a DTensor)."""
    plain = all(x is None or type(x) in (nn.Parameter, Tensor) for x in (head.weight, head.bias))
    return plain and tuple(head.weight.shape) == (head.out_features, head.in_features)


class LazyLogits:
    """Logits that are not computed yet: ``head(hidden)``, followed by elementwise functions (a softcap, a scale).

    If the model computes a loss, its output embedding returns this object, and ``TokenLoss`` computes the logits of a
    few tokens at a time. The elementwise operations below return another ``LazyLogits``. Any other operation computes
    the logits of all tokens, which then are what this object stands for, so that it may change them in place.
    """

    def __init__(
        self,
        head: nn.Module,
        hidden: Tensor,
        vocabulary: int,
        pointwise: Pointwise | None = None,
        full: Tensor | None = None,
    ) -> None:
        self.head = head  # the output embedding
        self.hidden = hidden  # [..., hidden], its input
        self.vocabulary = vocabulary  # about how many logits a token has
        self.pointwise = pointwise  # applied to the logits
        self.full = full  # the logits, once they are computed

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def materialize(self) -> Tensor:
        """The logits ``[..., vocabulary]``."""
        if self.full is None:
            logits = call_module(self.head, self.hidden)
            self.full = self.pointwise(logits) if self.pointwise else logits
        return self.full

    def in_forward(self, function: InForward) -> Tensor:
        """``function(hidden, head, forward)``, called by the head instead of its own ``forward``.

        A wrapper that shards the head (FSDP, ZeRO-3) gathers the weight before the head's forward and frees it after
        it, and prepares the backward. So it gathers the weight once, however many times ``function`` calls ``forward``.

        ``head`` is the module in the wrappers. ``forward`` is None for a plain linear layer, to multiply by its weight.
        """
        core: Any = self.head
        while isinstance(core, FullyShardedDataParallel | DistributedDataParallel):
            core = core.module
        forward, results = core.forward, list[Tensor]()
        is_linear = _is_torchs(type(core).forward) and "forward" not in vars(core)

        def compute(hidden: Tensor) -> Tensor:
            results.append(function(hidden, core, None if is_linear and _is_plain(core) else forward))
            return results[0]

        with replaced(core, forward=compute):
            output: Tensor = call_module(self.head, self.hidden)
        # ``fully_shard`` may cast the output to a lower precision.
        return output if output.dtype == results[0].dtype else results[0]

    def _then(self, function: Pointwise) -> LazyLogits:
        before = self.pointwise
        both = (lambda x: function(before(x))) if before else function
        full = None if self.full is None else function(self.full)
        return LazyLogits(self.head, self.hidden, self.vocabulary, both, full)

    def _binary(self, operation: Callable[[Any, Any], Any], other: Any) -> Any:
        if isinstance(other, int | float):
            return self._then(lambda x: operation(x, other))
        return operation(self.materialize(), other)

    def __truediv__(self, other: Any) -> Any:
        return self._binary(torch.true_divide, other)

    def __mul__(self, other: Any) -> Any:
        return self._binary(torch.mul, other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Tensor) and not other.requires_grad and other.shape[-1:].numel() == other.numel():
            return self._then(lambda x: x + other.flatten())  # the same for every token, as a bias of the vocabulary
        return self._binary(torch.add, other)

    def float(self) -> Any:
        return self._then(lambda x: x.float())

    def tanh(self) -> Any:
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

    def __setitem__(self, index: Any, value: Any) -> None:
        self.materialize()[index] = value


_READ_BY_WRAPPERS = {getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "grad_fn")}
_READ_BY_WRAPPERS |= {Tensor.is_floating_point, torch.is_floating_point}
_COPIES = {Tensor.clone, Tensor.detach, Tensor.view_as}


class MissingLogits(Tensor):
    """Stands in an output for logits that were not computed. Every use of it raises an error with the reason.

    It is a tensor, because the Trainer and wrappers look for tensors in outputs. Wrappers read some attributes, and
    some copy each output, so that a function of theirs runs in backward (DistributedDataParallel, ZeRO-3).
    A copy raises the same errors.
    """

    @staticmethod
    def __new__(cls) -> MissingLogits:
        # Mixed precision converts outputs only if they are of a floating-point dtype.
        return torch.Tensor._make_subclass(cls, torch.empty(0, dtype=torch.bool, device="cpu"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "MissingLogits()"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READ_BY_WRAPPERS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function in _COPIES:
            return cls()
        raise ValueError(
            "logits: a call with labels returns a loss, but no logits, which take batch * seq * vocabulary numbers; "
            "pass outputs='full' to seqpar.hf.parallelize or seqpar.hf.ParallelismConfig (compute_metrics and "
            "Trainer.predict need it, unless prediction_loss_only=True), or call the model without labels"
        )


torch._dynamo.config.nontraceable_tensor_subclasses.add(MissingLogits)


def fused_cross_entropy(
    hidden: Tensor,
    head: nn.Linear,
    labels: Tensor,
    pointwise: Pointwise | None = None,
    ignore_index: int = IGNORE_INDEX,
    chunk: int | None = None,
    few_count: bool = True,
) -> Tensor:
    """The summed cross-entropy of the logits ``pointwise(head(hidden))``, computed for ``chunk`` tokens at a time.

    As in Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024), the forward computes the gradients too, chunk by
    chunk, and the backward only scales them. On CUDA, Liger's kernel is used if it is installed, and if neither
    ``pointwise`` nor ``chunk`` is given. By default, a chunk has as many tokens as fit in 128 MiB of float32.

    ``few_count``: no logits are computed where the label is ``ignore_index``. For this the host waits for the GPU.

    ``hidden`` is [tokens, hidden], ``labels`` int64 [tokens]; the result is float32 [].
    """
    if few_count:
        counted = (labels != ignore_index).nonzero().flatten()
        if len(counted) < len(labels):
            hidden, labels = hidden.index_select(0, counted), labels.index_select(0, counted)
    if not pointwise and chunk is None and hidden.is_cuda and len(labels) and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger: Any = LigerFusedLinearCrossEntropyLoss(ignore_index=ignore_index, reduction="sum")
        liger_loss: Tensor = liger(head.weight, hidden, labels, head.bias)
        return liger_loss.float()
    chunk = chunk or max(1, _CHUNK_BYTES // (4 * head.out_features))
    inputs = [hidden, head.weight, head.bias]
    if not torch.is_grad_enabled():  # otherwise the forward would compute the gradients of the parameters
        inputs = [None if x is None else x.detach() for x in inputs]
    total: Tensor = _FusedCrossEntropy.apply(*inputs, labels, pointwise, ignore_index, chunk)
    return total


def summed_cross_entropy(
    logits: LazyLogits,  # [..., vocabulary]
    labels: Tensor,  # int64 [tokens]
    chunk: int | None,
    few_count: bool,
) -> Tensor:
    """``fused_cross_entropy``, for any head, as the parts of a sum ``[1 or 3]``.

    A head that is no plain linear layer computes its logits twice.
    """

    def compute(hidden: Tensor, head: Any, forward: Callable[..., Tensor] | None) -> Tensor:
        rows = hidden.flatten(0, -2)  # [tokens, hidden]
        if forward is not None:
            return exact_sum(-_scores(logits, rows, labels, head, forward, chunk, few_count))
        return fused_cross_entropy(rows, head, labels, logits.pointwise, IGNORE_INDEX, chunk, few_count)[None]

    return logits.in_forward(compute)


def label_log_probs(logits: Tensor | LazyLogits, labels: Tensor, chunk: int | None = None) -> Tensor:
    """The log-probability of each shifted label: float32 ``[batch, seq]``, 0 where it is ``IGNORE_INDEX``."""
    return label_scores(logits, labels, chunk)[..., 0]


def label_scores(
    logits: Tensor | LazyLogits, labels: Tensor, chunk: int | None = None, entropy: bool = False
) -> Tensor:
    """The log-probability of each shifted label, and with ``entropy`` the entropy of what is predicted there.

    Lazy logits ``[batch, seq, vocabulary]`` are computed for ``chunk`` tokens at a time, and again in backward. The
    result is float32 ``[batch, seq, 1 or 2]``, 0 where the label is ``IGNORE_INDEX``.
    """
    if isinstance(logits, LazyLogits) and logits.full is not None:
        logits = logits.full
    if not isinstance(logits, LazyLogits):
        return _score(logits.flatten(0, 1), labels.flatten(), entropy).view(*labels.shape, 1 + entropy)

    def compute(hidden: Tensor, head: Any, forward: Callable[..., Tensor] | None) -> Tensor:
        return _scores(logits, hidden.flatten(0, -2), labels.flatten(), head, forward, chunk, entropy=entropy)

    return logits.in_forward(compute).view(*labels.shape, 1 + entropy)


def _score(logits: Tensor, labels: Tensor, entropy: bool) -> Tensor:
    """``label_scores`` of ``logits [tokens, vocabulary]``."""
    logits = logits.float()
    scores = [-F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")]
    if entropy:
        log_probs = logits.log_softmax(-1)
        each = log_probs.exp() * log_probs.clamp(min=torch.finfo(torch.float32).min)  # 0 for a token of probability 0
        scores.append(-each.sum(-1).masked_fill(labels == IGNORE_INDEX, 0))
    return torch.stack(scores, -1)


def _scores(
    logits: LazyLogits,
    rows: Tensor,  # [tokens, hidden], the input of the head
    labels: Tensor,  # int64 [tokens]
    head: Any,
    forward: Callable[..., Tensor] | None,  # the head's; None for a plain linear layer
    chunk: int | None,
    few_count: bool = True,
    entropy: bool = False,
) -> Tensor:
    """``label_scores``, float32 ``[tokens, 1 or 2]``. For ``few_count`` see ``fused_cross_entropy``."""
    everything = labels
    if few_count:
        counted = (labels != IGNORE_INDEX).nonzero().flatten()
        rows, labels = rows[counted], labels[counted]
    chunk = chunk or max(1, _CHUNK_BYTES // (4 * logits.vocabulary))
    # In backward, a wrapper may have given the module other tensors for its weight.
    project: Callable[..., Tensor] = F.linear
    if forward is not None and is_invariant(head):  # it sums over ranks, which may have other numbers of chunks
        project, chunk = forward, max(len(rows), 1)
    elif forward is not None:
        project = partial(SummedWeights(head).call, forward)
    weights = (head.weight, head.bias) if forward is None else ()

    def score(rows: Tensor, wanted: Tensor, *weights: Any) -> Tensor:
        scores = project(rows[None], *weights)[0]  # [chunk, vocabulary]
        return _score(logits.pointwise(scores) if logits.pointwise else scores, wanted, entropy)

    # If no label counts there is one empty chunk, so that this rank runs the same backward as the other ranks.
    scored = [
        checkpoint(score, x, y, *weights, use_reentrant=False, preserve_rng_state=forward is not None)
        for x, y in zip(rows.split(chunk), labels.split(chunk), strict=True)
    ]
    scores = torch.cat(scored)
    if few_count:
        shape = len(everything), scores.shape[1]
        scores = everything.new_zeros(shape, dtype=torch.float32).index_put((counted,), scores)
    return scores


@dataclass
class LogProbsOutput(ModelOutput):
    """What a forward returns if it is asked for log-probabilities."""

    log_probs: Tensor | None = None  # float32 [batch, seq]
    entropy: Tensor | None = None  # of the same tokens; None unless it is asked for


@overload
def token_log_probs(model: nn.Module, batch: Mapping[str, Any] | SharedPrompts) -> Tensor: ...


@overload
def token_log_probs(
    model: nn.Module, batch: Mapping[str, Any] | SharedPrompts, *, entropy: Literal[True]
) -> tuple[Tensor, Tensor]: ...


def token_log_probs(
    model: nn.Module, batch: Mapping[str, Any] | SharedPrompts, *, entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probability of each token given the tokens before it.

    The logits are computed for a few tokens at a time (``loss_chunk`` of ``parallelize``), and again in backward. Each
    rank must compute the same loss from the result. Gradients are averaged over the ranks as in a training on
    ``model(**batch).loss``. With ``batches="per_rank"``, each rank has its own batch and its
    own loss.

    Args:
        model: a parallelized language model, also inside peft, DDP or FSDP.
        batch: the full batch, as the model is called with it. Without ``labels`` or ``shift_labels``, all tokens are
            labels, except for padding and the first token of each document. Or what ``share_prompts`` returns: rollouts
            that share prompts.
        entropy: whether to return the entropies of the distributions too from which the labels would be drawn.

    Returns:
        float32 ``[batch, seq - 1]``, the same on every rank. Entry ``t`` is the log-probability of label ``t + 1``, and
        0 if this label is -100. With ``shift_labels [batch, seq]`` the result is ``[batch, seq]``, and entry ``t`` is
        the log-probability of label ``t``. With ``outputs="local"``, or with a batch from ``shard_batch``, the result
        has this rank's tokens only, ``[batch, seq_local]``. Of ``share_prompts``: ``[rollouts, tokens]``, and entry
        ``t`` is the log-probability of token ``t`` of the answer. With ``entropy``, a pair of log-probabilities and
        entropies, of the same shape.

    Raises:
        ValueError: the model is not parallelized, it does not predict the next token, or the batch cannot be sharded.
        RuntimeError: another rank raised an error on its own batch.
    """
    patch = patch_of(model)
    with propagate_errors(patch.sequence_group):
        found: Tensor | tuple[Tensor, Tensor] = _token_log_probs(model, patch, batch, entropy)
        return found


def _token_log_probs(model: nn.Module, patch: Patch, batch: Any, entropy: bool) -> Any:
    root = next(m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, "_seqpar"))
    if pools_last_token(root) or predicts_in_place(root) or root.get_output_embeddings() is None:
        raise ValueError(
            f"model={type(root).__name__}: it does not predict the next token; give a causal language model"
        )
    if isinstance(batch, SharedPrompts):
        if patch.settings.outputs == "local":
            raise ValueError("outputs='local': rollouts that share prompts need all outputs; leave outputs out")
        rollouts, row = batch, batch.to(root.device).batch
        if entropy:
            log_probs, entropies = token_log_probs(model, row, entropy=True)
            return rollouts.unshare(log_probs), rollouts.unshare(entropies)
        return rollouts.unshare(token_log_probs(model, row))
    batch = dict(batch)
    if batch.get("labels") is None and batch.get("shift_labels") is None:
        if patch.has_encoder:
            raise ValueError(
                f"batch: {type(root).__name__} has an encoder; give the labels [batch, seq] of its decoder"
            )
        batch["labels"] = _labels(batch)
    output: Any = model(**batch, **{LOG_PROBS: "entropy" if entropy else True})
    return (output.log_probs, output.entropy) if entropy else cast(Tensor, output.log_probs)


def _labels(batch: dict[str, Any]) -> Tensor:
    """The labels of a batch without labels: its tokens, and -100 for padding and the first token of each document."""
    ids, positions = batch.get("input_ids"), batch.get("position_ids")
    if not isinstance(ids, Tensor) or batch.get("seqpar") is not None:
        raise ValueError("batch: expected 'input_ids' [batch, seq] of a full batch, or 'labels'")
    if isinstance(positions, Tensor) and positions.dim() == 3:  # of images and text
        batch = {**batch, "position_ids": None}
    names = "input_ids", "position_ids", "attention_mask", *BOUNDARY_NAMES
    spec = BatchSpec({name: batch[name] for name in names if name in batch}, BatchCut(1, "contiguous"))
    labels = ids.clone() if spec.valid is None else ids.masked_fill(~spec.valid, IGNORE_INDEX)
    starts = spec.mask.starts
    for row, label in enumerate(labels):
        label[[start for start in starts[row % len(starts)] if start < len(label)]] = IGNORE_INDEX
    return labels


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        pointwise: Pointwise | None,
        ignore_index: int,
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
            # Without these hooks, activation checkpointing around the model would recompute the tensors that are saved
            # here, and torch.autograd.grad would run the model's forward again.
            with torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda x: x):
                scores = pointwise(logits) if pointwise else logits
                loss = F.cross_entropy(scores.float(), labels[span], ignore_index=ignore_index, reduction="sum")
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
        return (*scaled, None, None, None, None)
