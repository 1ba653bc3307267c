"""``seqpar.verify``: one training step of any model, sharded and on one device, and what a difference means.

``seqpar.hf.verify`` has the same report, and the same comparison of losses and gradients.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from .base.checks import check_number
from .comm.collectives import run
from .comm.trace import trace
from .patching.replaced import replaced
from .ranks.mesh import global_ranks, sequence_group_of, size_of
from .ranks.rendezvous import group_timeout, store_all_gather
from .sharding.same_rows import OtherRowsError
from .sharding.sharding import Sharding
from .sharding.spec import AttentionSpec

# The largest error that counts as equal, relative to the norm of one device's tensor. In float32 it is 8,000 units in
# the last place, because a deep model multiplies the rounding of its layers. In half precision it is 13 to 20 units,
# because more would hide faults. Models in float64 compute softmax and norms in float32: it is 8 units of float32.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_CHECK = "SEQPAR_CHECK"  # the environment variable: how often ranks compare what they shard
_OF_LOSS = 1e-2  # a loss is a mean over all tokens, whose error is so much smaller
# A gradient that is smaller than this, relative to the largest one, may be nothing but rounding error.
_LEAST = 1e-3
_ADDED = re.compile(r"module\.|_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")  # by wrappers
_SHOWN = 8
_KINDS = ("batch", "path", "weights", "layer", "input", "forward", "loss", "backward", "gradient")

StepFunction = Callable[..., Any]


class StepResult(NamedTuple):
    """What one training step computed."""

    loss: float
    gradients: dict[str, Tensor]  # by the parameter's name: on the CPU, or DTensors


@dataclass(frozen=True)
class Difference:
    """One difference between a sharded model and the same model on one device."""

    # "batch", "path" or "weights": the ranks' batches, models or weights differ from one another. "layer": a layer does
    # not attend over the sharded sequence. "input": the tokens, positions or labels that the model received. "forward"
    # and "backward": the first tensor of the forward that differs, and the first gradient of such a tensor in backward.
    # "loss", and "gradient": the gradient of a parameter.
    kind: str
    quantity: str  # the name of the tensor or parameter
    layer: str = ""  # the name of the attention layer; empty for the model itself
    tokens: tuple[int, ...] = ()  # the global positions of the tokens that differ
    ranks: tuple[int, ...] = ()  # of the sequence, on which the quantity differs
    error: float = 0.0  # the norm of the difference, relative to the norm of what one device computes
    tolerance: float = 0.0  # the largest error that counts as equal
    explanation: str = ""  # a probable cause
    stops: bool = False  # whether nothing after this difference can be compared
    at: int = 0  # its place in the order of the training step, among the differences of its kind
    ratio: float = 0.0  # of a gradient that is one device's times a number on every rank: the number

    @property
    def name(self) -> str:
        """The name of the parameter."""
        return self.quantity

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: differences in the order of a training step."""
        return _KINDS.index(self.kind), self.at

    def __str__(self) -> str:
        where = f"layer {self.layer!r}, {self.quantity}" if self.layer else self.quantity
        parts = [f"{self.kind}: {where}"]
        if self.ranks:
            parts.append(f"on rank(s) {', '.join(map(str, self.ranks))}")
        if self.tokens:
            parts.append(f"tokens {_token_list(self.tokens)}")
        if self.tolerance:
            parts.append(f"error {self.error:.2g} (tolerance {self.tolerance:.0e})")
        return "; ".join([*parts, *([self.explanation] if self.explanation else [])])


def _token_list(tokens: Iterable[int]) -> str:
    ranges: list[list[int]] = []
    for token in tokens:
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges[:8]]
    return ", ".join(shown + ["..."] * (len(ranges) > 8))


@dataclass(frozen=True)
class VerificationReport:
    """What ``verify`` returns, the same on every rank.

    Attributes:
        differences: the differences from one device, in the order of a training step.
        loss: the loss of the sharded model, the mean over the ranks; NaN if it was not computed.
        expected_loss: the loss on one device; NaN if it was not computed.
        compared: the number of trainable parameters, whose gradients were compared.
        ranks: the number of ranks; in ``seqpar.hf``, of the ranks that the sequence is sharded over.
        cause: what the differences have in common, and the probable cause; empty if none is known.
        layers: in ``seqpar.hf``, the number of attention layers that were compared.
        seq_len: in ``seqpar.hf``, the number of tokens of the full sequence.
        strategy, layout: in ``seqpar.hf``, as given to ``parallelize``.
    """

    differences: tuple[Difference, ...]
    loss: float
    expected_loss: float
    compared: int
    ranks: int
    cause: str = ""
    layers: int = 0
    seq_len: int = 0
    strategy: str = ""
    layout: str = ""

    @property
    def ok(self) -> bool:
        """Whether there are no differences."""
        return not self.differences

    @property
    def gradients(self) -> tuple[Difference, ...]:
        """The differences of the gradients of parameters."""
        return tuple(d for d in self.differences if d.kind == "gradient")

    def __str__(self) -> str:
        name, what = "seqpar.verify", f"{self.ranks} rank(s)"
        if self.seq_len:
            how = f"strategy={self.strategy!r}, layout={self.layout!r}, {self.layers} attention layers"
            name, what = "seqpar.hf.verify", f"{self.seq_len} tokens on {what}, {how}"
        if not math.isnan(self.expected_loss):
            what += f", loss {self.loss:.6f} (one device {self.expected_loss:.6f})"
        if self.ok:
            return f"{name}: equal to one device: {what}, {self.compared} gradients"
        others, gradients = [d for d in self.differences if d.kind != "gradient"], self.gradients
        lines = [*others, *([self.cause] if self.cause else []), *gradients[:_SHOWN]]
        if gradients:
            lines.append(f"the gradients of {len(gradients)} of {self.compared} parameters differ")
        return "\n".join([f"{name}: not what one device computes: {what}", *map(str, lines)])


class VerificationError(AssertionError):
    """A sharded model does not compute what one device would.

    Attributes:
        report: what ``verify`` would have returned.
    """

    def __init__(self, report: VerificationReport) -> None:
        super().__init__(str(report))
        self.report = report


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


def run_step(step: Callable[[], Any], model: nn.Module) -> StepResult:
    """The loss that a training step returns, and the gradient of each parameter that has one."""
    for p in model.parameters():
        p.grad = None
    loss = step()
    if not isinstance(loss, (int, float)) and not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise TypeError(f"{getattr(step, '__name__', 'step')}: returned {type(loss).__name__}; expected the loss")
    gradients = {}
    for name, p in model.named_parameters():
        if (g := p.grad) is not None:
            device = g.device_mesh.device_type if isinstance(g, DTensor) else "cpu"  # FSDP may offload its gradients
            gradients[name] = g.detach().to(device, copy=True)
            p.grad = None
    return StepResult(float(loss.detach() if isinstance(loss, Tensor) else loss), gradients)


def all_gather_values(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Each rank's ``value``, which JSON can represent, by rank. No rank waits longer than the group's timeout.

    The store works even after a message has failed.
    """
    if group is None or group.size() == 1:
        return [json.loads(json.dumps(value))]
    limit = group_timeout(group) + timedelta(seconds=5)
    return [json.loads(x) for x in store_all_gather("verify", global_ranks(group), json.dumps(value), limit)]


def loss_difference(loss: float, expected: float, tolerance: float) -> list[Difference]:
    """The difference between two losses, if there is one."""
    error = abs(loss - expected) / max(abs(expected), 1e-6)
    if error <= tolerance or (math.isnan(loss) and math.isnan(expected)):  # NaN: no label counts
        return []
    why = f"{loss:.6f}, on one device {expected:.6f}"
    return [Difference("loss", "loss", error=error, tolerance=tolerance, explanation=why)]


def _other_losses(losses: Sequence[float], tolerance: float) -> tuple[int, ...]:
    return tuple(i for i, x in enumerate(losses) if loss_difference(x, losses[0], _OF_LOSS * tolerance))


def compare_gradients(
    ours: StepResult,
    theirs: StepResult,
    tolerance: float,
    group: ProcessGroup | None,
    device: torch.device,
    held: Container[str] | None = None,
) -> tuple[list[Difference], str]:
    """Compare the gradients of the sharded model, after they were averaged, with one device's.

    All ranks of ``group`` call it together. It sums tensors on ``device``. ``held``: the names of this rank's
    parameters, if the ranks' may differ: what another rank holds is not compared here.

    Returns:
        The gradients that differ on some rank, in the order of the parameters, and what they have in common; or "".
    """

    def pair(name: str) -> list[Tensor | None]:
        gradients = [x.gradients.get(name) for x in (ours, theirs)]
        return [x.full_tensor().cpu() if isinstance(x, DTensor) else x for x in gradients]

    if held is not None:
        lacking = all_gather_values([name for name in theirs.gradients if name not in held], group)
        nowhere = set(lacking[0]).intersection(*lacking[1:])
        compared = {name: g for name, g in theirs.gradients.items() if name in held or name in nowhere}
        theirs = StepResult(theirs.loss, compared)
    numbers = {name: _products(*pair(name)) for name in {**theirs.gradients, **ours.gradients}}
    least = _LEAST * max((math.sqrt(x[1]) for x in numbers.values()), default=0.0)
    wrong = [name for name, x in numbers.items() if not _error(x, least) <= tolerance]
    names = [*dict.fromkeys(name for rank in all_gather_values(wrong, group) for name in rank)]
    if not names:
        return [], ""
    pairs = {name: pair(name) for name in names}
    shapes = all_gather_values([[[*x.shape] for x in pairs[name] if x is not None][:1] for name in names], group)
    rows = []
    for name, by_rank in zip(names, zip(*shapes, strict=True), strict=True):
        (a, e), (shape, *others) = pairs[name], [x[0] for x in by_rank if x]
        if group is not None and all(other == shape for other in others):  # else each rank has a shard of its own
            a = torch.zeros(shape) if a is None else a
            total = a.to(device, torch.promote_types(a.dtype, torch.float64), copy=True)
            run(dist.all_reduce, total, group=group)
            a = total.cpu()
        sums = _products(a, e) if any(x is not None for x in pairs[name]) else [0.0] * 4
        rows.append([_products(*pairs[name]), sums, name in ours.gradients, name in theirs.gradients])
    found, missing, right = [], list[str](), dict.fromkeys((1, size_of(group)), True)
    for name, by_rank in zip(names, zip(*all_gather_values(rows, group), strict=True), strict=True):
        here, totals, in_ours, in_theirs = zip(*by_rank, strict=True)
        for n in right:
            right[n] &= all(_error(_divided(x, n), least) <= tolerance for x in totals)
        errors, shards = [_error(x, least) for x in here], [x for x in here if any(x)]  # an empty shard has zeros
        ratios = [_ratio(x) for x in shards]
        alike = max(ratios) - min(ratios) <= tolerance * abs(ratios[0])
        ratio = ratios[0] if alike and all(_is_multiple(x, tolerance) for x in shards) else 0.0
        why = f"it is {ratio:.4g} times one device's" if ratio else ""
        if in_ours != in_theirs:
            missing.append(name)
            why = "it has no gradient" if sum(in_theirs) > sum(in_ours) else "on one device it has no gradient"
        ranks = tuple(i for i, x in enumerate(errors) if not x <= tolerance)
        found.append(Difference("gradient", name, "", (), ranks, max(errors), tolerance, why, ratio=ratio))
    small = (tolerance * least) ** 2  # the square of a norm that is so small that another factor would not show
    every = all(name in pairs or x[1] <= small for name, x in numbers.items())
    times = all_gather_values(ours.loss / theirs.loss if theirs.loss else math.nan, group)
    return found, _cause_of_gradients(found, missing, every, times, right, tolerance)


def _cause_of_gradients(
    found: Sequence[Difference],
    missing: Sequence[str],
    every: bool,
    times: Sequence[float],
    right: dict[int, bool],
    tolerance: float,
) -> str:
    """What the gradients that differ have in common; or "".

    Args:
        found: the gradients that differ.
        missing: the names of gradients that some rank or one device lacks.
        every: whether these are all gradients.
        times: each rank's loss divided by one device's.
        right: for n = 1 and n = the number of ranks, whether the sum of the ranks' gradients over n is one device's.
        tolerance: as in ``verify``.
    """
    ranks = len(times)
    if all(x.ratio for x in found):
        ratio = median(x.ratio for x in found)
        alike = every and all(abs(x.ratio / ratio - 1) <= 2 * tolerance for x in found)
        other = (
            "the loss divides by another number. Give token_loss the ignore_index of the reference, and divide by as "
            "many parts of the batch as it does"
        )
        if alike and all(abs(x / ratio - 1) <= 2 * tolerance for x in times):
            return f"every gradient, and the loss, is {ratio:.4g} times one device's: {other}"
        factors = {_factor(x.ratio, ranks, tolerance) for x in found}
        n = factors.pop() if len(factors) == 1 else 0.0
        number = "the number of ranks, " if n in (ranks, 1 / ranks) else ""
        if n > 1 and not every:
            return (
                f"some gradients are {n:g} times one device's: what one rank holds alone, such as a shard or an "
                f"expert, has the gradients of {n:g} losses, whose mean is due; divide these gradients by {n:g}"
            )
        if n > 1:
            return (
                f"every gradient is multiplied by {number}{n:g}: {n:g} ranks were summed where their mean is due; "
                "average with seqpar.sync_gradients(model), without reduce='sum'; if a wrapper sums, pass token_loss "
                "gradients='sum', or pass it to parallelize"
            )
        if n:
            which = "every gradient is" if every else "some gradients are"
            return (
                f"{which} divided by {number}{1 / n:g}: each of {1 / n:g} ranks has a share of the loss, and the "
                "gradients were averaged where their sum is due; take the loss from seqpar.token_loss or a "
                "parallelized model, with gradients='mean', or call seqpar.sync_gradients(model, reduce='sum'). "
                "Or the loss is divided by the number of parts of a batch, and the step returns it undivided"
            )
        if alike:
            return f"every gradient is {ratio:.4g} times one device's: {other}"
    if right[ranks]:
        return (
            "the gradients were not averaged. The mean of the ranks' gradients is one device's, but the step does not "
            "average them: call seqpar.sync_gradients(model) after backward, or wrap the model in DDP or FSDP over all "
            "ranks"
        )
    if missing:
        return f"some rank, or one device, has no gradient for {', '.join(missing[:_SHOWN])}"
    if right[1]:
        return (
            "each rank has a share of the loss and of the gradient, and the step does not sum them: call "
            "seqpar.sync_gradients(model, reduce='sum') after backward, or take the loss from seqpar.token_loss"
        )
    return ""


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


def _factor(ratio: float, ranks: int, tolerance: float) -> float:
    """``n`` or ``1/n`` for a ratio near it, with n a divisor of the number of ranks; 0 for another one."""
    for n in range(2, ranks + 1):
        for factor in (float(n), 1 / n):
            if ranks % n == 0 and abs(ratio / factor - 1) <= 2 * tolerance:
                return factor
    return 0.0


def _products(a: Tensor | None, e: Tensor | None) -> list[float]:
    """Of a gradient ``a`` and one device's gradient ``e``: |a - e|², |e|², a·e and |a|². None counts as zeros."""
    present = e if a is None else a
    if present is None:
        return [0.0] * 4
    a, e = ((torch.zeros_like(present) if x is None else x).double().flatten() for x in (a, e))
    return torch.stack([(a - e) @ (a - e), e @ e, a @ e, a @ a]).tolist()


def _divided(numbers: Sequence[float], n: float) -> list[float]:
    """The ``_products`` of ``a / n`` and ``e``. ``numbers`` are the ``_products`` of ``a`` and ``e``."""
    _, ee, ae, aa = numbers
    return [max(aa / n**2 - 2 * ae / n + ee, 0.0), ee, ae / n, aa / n**2]


def _error(numbers: Sequence[float], least: float = 0.0) -> float:
    """|a - e| relative to |e|, or to ``least`` if that is greater. ``numbers`` begin with the ``_products``."""
    error = math.sqrt(numbers[0]) / (max(math.sqrt(numbers[1]), least) or 1.0)
    return math.inf if math.isnan(error) else error


def _ratio(numbers: Sequence[float]) -> float:
    return numbers[2] / numbers[1] if numbers[1] else math.inf


def _is_multiple(numbers: Sequence[float], tolerance: float) -> bool:
    """Whether ``a`` is ``e`` times ``_ratio(numbers)``."""
    _, ee, ae, aa, *_ = numbers
    return ee > 0 and aa - ae * ae / ee <= (tolerance * ae / ee) ** 2 * ee


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
