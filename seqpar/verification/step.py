"""``seqpar.verify``: one training step of any model, sharded and on one device, and what a difference means.

``seqpar.hf.verify`` has the same report, and the same comparison of losses and gradients.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from ..base.checks import check_number
from ..comm.trace import trace
from ..patching.replaced import replaced
from ..ranks.mesh import sequence_group_of, size_of
from ..sharding.same_rows import OtherRowsError
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec
from .gradients import StepResult, all_gather_values, compare_gradients, run_step
from .report import Difference, VerificationError, VerificationReport

# The largest error that counts as equal, relative to the norm of one device's tensor. In float32 it is 8,000 units in
# the last place, because a deep model multiplies the rounding of its layers. In half precision it is 13 to 20 units,
# because more would hide faults. Models in float64 compute softmax and norms in float32: it is 8 units of float32.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_CHECK = "SEQPAR_CHECK"  # the environment variable: how often ranks compare what they shard
_OF_LOSS = 1e-2  # a loss is a mean over all tokens, whose error is so much smaller
_ADDED = re.compile(r"module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")  # by wrappers

StepFunction = Callable[..., Any]


def verify(
    model: nn.Module,
    step: StepFunction,
    reference: StepFunction,
    *,
    reference_model: nn.Module | None = None,
    tolerance: float | None = None,
    raise_on_error: bool = False,
    group: ProcessGroup | None = None,
) -> VerificationReport:
    """Compare the loss and every gradient of one training step with one device's.

    All ranks call it together, before or during training. The gradients, buffers, modes and random state of the model
    are afterwards what they were. Dropout is off inside of it.

    Args:
        model: the model that ``step`` trains; DDP, FSDP or ``fully_shard`` may wrap it.
        step: ``step()`` or ``step(model)``: the sharded training step up to the optimizer: forward, backward, and
            ``sync_gradients`` if the training uses it. It returns the loss.
        reference: ``reference()`` or ``reference(model)``: forward and backward of the same rows on one device, without
            sharding. Every rank computes it by itself, of the rows of all ranks. It returns the loss. Wrappers may
            average its gradients, which are equal on all ranks.
        reference_model: the model that ``reference`` trains, if it is another one, such as the same weights in layers
            with ``strategy="local"`` for a model with tensor-parallel layers. Parameters with the same name are
            compared. A parameter that only some ranks have, such as an expert that is named by its number among all
            experts, is compared on these ranks.
        tolerance: the largest error that counts as equal, relative to the norm of one device's tensor. By default 1e-6
            for float64, 1e-3 for float32, 2e-2 for float16 and 1e-1 for bfloat16, of the parameters' lowest precision.
            A gradient of less than a thousandth of the largest one is compared relative to that thousandth.
        raise_on_error: whether to raise an error instead of returning a report that is not ``ok``.
        group: the ranks that train together. By default all ranks.

    Returns:
        The report: ``report.ok``, and ``str(report)`` with the differences and their probable cause.

    Raises:
        TypeError: an argument of the wrong type.
        VerificationError: with ``raise_on_error``, the step is not what one device computes.

    Examples:
        >>> model, x = nn.Linear(4, 1), torch.ones(1, 8, 4)
        >>> def step() -> Tensor:
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> verify(model, step, step).ok
        True
    """
    for name, module in (("model", model), ("reference_model", reference_model or model)):
        if not isinstance(module, nn.Module):
            raise TypeError(f"{name}={type(module).__name__}: expected a torch.nn.Module")
    for name, function in (("step", step), ("reference", reference)):
        if not callable(function):
            raise TypeError(f"{name}={function!r}: expected a function that returns the loss after its backward")
    tolerance = tolerance_of(model) if tolerance is None else tolerance
    group = sequence_group_of(None, group)
    tolerance = check_number("tolerance", tolerance)
    report = _compare(model, step, reference, reference_model or model, tolerance, group)
    if raise_on_error and not report.ok:
        raise VerificationError(report)
    return report


def tolerance_of(model: nn.Module) -> float:
    """The default tolerance for the lowest precision of the model's parameters."""
    dtypes = {p.dtype for p in model.parameters()} & TOLERANCE.keys()
    return max((TOLERANCE[dtype] for dtype in dtypes), default=TOLERANCE[torch.float32])


def trainable(model: nn.Module) -> int:
    """The number of parameters that a training step gives gradients."""
    return sum(p.requires_grad for p in model.parameters())


def _compare(
    model: nn.Module,
    step: StepFunction,
    reference: StepFunction,
    reference_model: nn.Module,
    tolerance: float,
    group: ProcessGroup | None,
) -> VerificationReport:
    ranks, asked = size_of(group), list[Any]()
    found: list[Difference] = []
    with _without_dropout(model), _without_dropout(reference_model):
        with ExitStack() as alone:
            for module in reference_model.modules():
                if isinstance(module, DistributedDataParallel):
                    alone.enter_context(module.no_sync())
            theirs = _plainly_named(run_step(_call(reference, reference_model), reference_model))
        references = all_gather_values(theirs.loss, group)
        expected_loss = references[0]
        if unlike := _other_losses(references, tolerance):
            why = (
                f"the ranks hold different rows (or weights): the reference's loss is {references[0]:.6f} on rank 0, "
                f"{references[unlike[0]]:.6f} on rank {unlike[0]}; deal rows by dp rank: DistributedSampler(dataset, "
                "num_replicas=dp, rank=dp_rank); with dp > 1 the reference takes the rows of all replicas"
            )
            found.append(Difference("batch", "rows", ranks=unlike, explanation=why))
        try:
            with _watching(asked), trace() as done:
                ours = _plainly_named(run_step(_call(step, model), model))
        except OtherRowsError as error:
            rows = Difference("batch", "rows", explanation=f"the ranks hold different rows: {error}")
            return VerificationReport((*(found or [rows]),), math.nan, expected_loss, 0, ranks)
    losses = all_gather_values(ours.loss, group)
    loss = sum(losses) / ranks
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    held = {_ADDED.sub("", name) for name, _ in model.named_parameters()}
    gradients, cause = compare_gradients(ours, theirs, tolerance, group, device, held)
    if not gradients and not loss_difference(sum(losses), expected_loss, _OF_LOSS * tolerance):
        loss = expected_loss  # the losses are shares of a sum, and the step sums the gradients
    differences = [*loss_difference(loss, expected_loss, _OF_LOSS * tolerance)]
    differences += sorted(gradients, key=lambda d: -d.error)
    if found:
        cause = ""  # the rows
    elif differences and not cause:
        cause = _cause_of_another_function(losses, bool(asked), bool(done.backends), tolerance)
    return VerificationReport((*found, *differences), loss, expected_loss, trainable(model), ranks, cause)


def _call(step: StepFunction, model: nn.Module) -> Callable[[], Any]:
    """``step``, which may take the model."""
    parameters = inspect.signature(step).parameters.values()
    takes_model = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    )
    return partial(step, model) if takes_model else step


def _plainly_named(result: StepResult) -> StepResult:
    """``result`` without what wrappers add to the names of parameters."""
    return StepResult(result.loss, {_ADDED.sub("", name): g for name, g in result.gradients.items()})


def loss_difference(loss: float, expected: float, tolerance: float) -> list[Difference]:
    """The difference between two losses, if there is one."""
    error = abs(loss - expected) / max(abs(expected), 1e-6)
    if error <= tolerance or (math.isnan(loss) and math.isnan(expected)):  # NaN: no label counts
        return []
    why = f"{loss:.6f}, on one device {expected:.6f}"
    return [Difference("loss", "loss", error=error, tolerance=tolerance, explanation=why)]


def _other_losses(losses: Sequence[float], tolerance: float) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(losses) if loss_difference(x, losses[0], _OF_LOSS * tolerance))


def _cause_of_another_function(losses: Sequence[float], asked: bool, attended: bool, tolerance: float) -> str:
    """Why the loss or the gradients may be another function's.

    Args:
        losses: of each rank.
        asked: whether the step asked for positions.
        attended: whether the step computed attention of this package.
        tolerance: as in ``verify``.
    """
    if len(losses) > 1 and not attended:
        return (
            "the step computed no attention of seqpar, so each rank attends to its own tokens only: run the model "
            "inside seqpar.replace_sdpa(sharding), or call seqpar.sdpa or seqpar.attention"
        )
    if unlike := _other_losses(losses, tolerance):
        return (
            f"the ranks' losses differ ({losses[0]:.6f} on rank 0, {losses[unlike[0]]:.6f} on rank {unlike[0]}): "
            "a term of the loss differs between ranks. If it is the mean over a rank's own tokens, of which the ranks "
            "have different numbers, take the loss from seqpar.token_loss; if it is computed from a rank's own tokens "
            "otherwise, such as a pooled output, unshard them first; if it draws random numbers, draw the same ones"
        )
    positions = (
        "position embeddings or rotary angles that do not take sharding.positions(), which the step did not ask for, "
        "but arange(seq_local)"
        if not asked
        else "positions, where the model takes them from elsewhere than sharding.positions()"
    )
    return (
        "the loss or the gradients are another function's. Look at another mask (causal, documents, padding); labels "
        "that were shifted after they were sharded, or shards of another layout; tokens mixed by something that is not "
        f"attention, such as a convolution or a pooled mean; {positions}"
    )


@contextmanager
def _watching(asked: list[Any]) -> Iterator[None]:
    """Inside the block, the ranks compare what they shard, and ``asked`` notes that positions are asked for."""
    positions = Sharding.positions

    def noted(sharding: Sharding) -> Tensor:
        asked.append(sharding)
        return positions(sharding)

    before = os.environ.get(_CHECK)
    os.environ[_CHECK] = "1"
    try:
        with replaced(Sharding, positions=noted):
            yield
    finally:
        del os.environ[_CHECK]
        if before is not None:
            os.environ[_CHECK] = before


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """After the block, the gradients, buffers and modes of ``model``, and the random state, are as before."""
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    buffers = [(m, n, b) for m in model.modules() for n, b in m._buffers.items()]
    values = [None if b is None else b.detach().clone() for *_, b in buffers]
    on_cuda = any(p.is_cuda for p in model.parameters())
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if on_cuda else []):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for (module, name, buffer), value in zip(buffers, values, strict=True):
                module._buffers[name] = None if buffer is None or value is None else buffer.copy_(value)
        for p, gradient in gradients:
            p.grad = gradient


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    with unchanged(model):
        for module in model.modules():
            attends = isinstance(getattr(module, "spec", None), AttentionSpec)  # an attention layer of the package
            module.training = module.training and not (
                attends or isinstance(module, _DropoutNd | nn.MultiheadAttention)
            )
        yield
