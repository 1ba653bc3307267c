"""``seqpar.verify``: one training step of any model, sharded and on one device, and what a difference means."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from .base.checks import check_number
from .base.replaced import replaced
from .comm.trace import trace
from .comm.waiting import run, waiting
from .ranks.mesh import check_mesh_and_group, size_of
from .sharding.same_rows import OtherRowsError
from .sharding.sharding import Sharding
from .sharding.spec import AttentionSpec

# The largest error that counts as equal, relative to the norm of one device's tensor.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_CHECK = "SEQPAR_CHECK"  # the environment variable: how often ranks compare what they shard
_OF_LOSS = 1e-2  # a loss is a mean over all tokens, whose error is so much smaller
# What wrappers add to the names of parameters.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_SHOWN = 8

Step = Callable[..., Any]


@dataclass(frozen=True)
class GradientDifference:
    """The gradient of a parameter that differs from one device's.

    Attributes:
        name: the parameter, without the prefixes of wrappers.
        error: the norm of the difference, relative to the norm of one device's gradient; on the worst rank.
        ratio: by which factor one device's gradient comes closest to it.
        parallel: whether it is one device's gradient times ``ratio``.
    """

    name: str
    error: float
    ratio: float
    parallel: bool

    def __str__(self) -> str:
        times = f", {self.ratio:.4g} times one device's" if self.parallel else ""
        return f"gradient of {self.name}: error {self.error:.2g}{times}"


@dataclass(frozen=True)
class StepReport:
    """What ``verify`` returns, the same on every rank.

    Attributes:
        loss: the mean over the ranks of what ``step`` returned.
        expected_loss: what ``reference`` returned.
        gradients: the gradients that differ, those with the largest error first.
        compared: the number of parameters whose gradients were compared.
        ranks: the number of ranks.
        tolerance: the largest error that counts as equal.
        causes: what the differences have in common, and the probable cause.
    """

    loss: float
    expected_loss: float
    gradients: tuple[GradientDifference, ...]
    compared: int
    ranks: int
    tolerance: float
    causes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the loss and every gradient are one device's."""
        return not self.gradients and not self.causes and self._same_loss

    @property
    def _same_loss(self) -> bool:
        return _same_loss(self.loss, self.expected_loss, self.tolerance)

    def __str__(self) -> str:
        losses = f"loss {self.loss:.6f} (one device {self.expected_loss:.6f})"
        if self.ok:
            return f"seqpar.verify: equal to one device on {self.ranks} rank(s): {losses}, {self.compared} gradients"
        rest = [f"... and {len(self.gradients) - _SHOWN} more gradients"] if len(self.gradients) > _SHOWN else []
        first = f"seqpar.verify: not what one device computes, on {self.ranks} rank(s): {losses}"
        shown = [*self.causes, *(f"  {x}" for x in self.gradients[:_SHOWN]), *rest]
        return "\n".join([first, *shown, f"(tolerance {self.tolerance:.0e}, {self.compared} gradients compared)"])


class VerificationError(AssertionError):
    """A sharded model does not compute what one device would.

    Attributes:
        report: what ``verify`` would have returned.
    """

    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report


def verify(
    model: nn.Module,
    step: Step,
    reference: Step,
    *,
    reference_model: nn.Module | None = None,
    tolerance: float | None = None,
    raise_on_error: bool = False,
    group: ProcessGroup | None = None,
) -> StepReport:
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
            with ``strategy="local"`` for a model with tensor-parallel layers. The names of the parameters are compared.
        tolerance: the largest error that counts as equal, relative to the norm of one device's tensor. By default 1e-6
            for float64, 1e-3 for float32, 2e-2 for float16 and 1e-1 for bfloat16, of the parameters' lowest precision.
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
    check_mesh_and_group(None, group)
    group = group or dist.group.WORLD
    tolerance = check_number("tolerance", tolerance)
    report = _compare(model, step, reference, reference_model or model, tolerance, group)
    if raise_on_error and not report.ok:
        raise VerificationError(report)
    return report


def tolerance_of(model: nn.Module) -> float:
    """The default tolerance for the lowest precision of the model's parameters."""
    dtypes = {p.dtype for p in model.parameters()} & TOLERANCE.keys()
    return max((TOLERANCE[dtype] for dtype in dtypes), default=TOLERANCE[torch.float32])


def _same_loss(loss: float, expected: float, tolerance: float) -> bool:
    return abs(loss - expected) <= _OF_LOSS * tolerance * abs(expected)


def _compare(
    model: nn.Module,
    step: Step,
    reference: Step,
    reference_model: nn.Module,
    tolerance: float,
    group: ProcessGroup | None,
) -> StepReport:
    with _without_dropout(model), _without_dropout(reference_model):
        with ExitStack() as alone:
            for module in reference_model.modules():
                if isinstance(module, DistributedDataParallel):
                    alone.enter_context(module.no_sync())
            expected_loss, expected = _run(reference, reference_model)
        ranks = size_of(group)
        references = _gather(expected_loss, group)
        expected_loss = references[0]
        causes = []
        unlike = [i for i, x in enumerate(references) if not _same_loss(x, references[0], tolerance)]
        if unlike:
            other = unlike[0]
            causes.append(
                f"the ranks hold different rows (or weights): the reference's loss is {references[0]:.6f} on rank 0, "
                f"{references[other]:.6f} on rank {other}; deal rows by dp rank: DistributedSampler(dataset, "
                "num_replicas=dp, rank=dp_rank); with dp > 1 the reference takes the rows of all replicas"
            )
        asked: list[Any] = []
        try:
            with _watching(asked), trace() as done:
                loss, actual = _run(step, model)
        except OtherRowsError as error:
            causes = causes or [f"the ranks hold different rows: {error}"]
            return StepReport(float("nan"), expected_loss, (), 0, ranks, tolerance, tuple(causes))
    if missing := actual.keys() ^ expected.keys():
        causes.append(f"only one of the models has a gradient for {', '.join(sorted(missing)[:_SHOWN])}")
    names = [name for name in actual if name in expected]
    numbers = torch.zeros(len(names), 8, dtype=torch.float64, device="cpu")
    for row, name in zip(numbers, names, strict=True):
        row.copy_(_numbers(actual[name], expected[name], group))
    by_rank = _gather((loss, numbers), group)
    losses = [x for x, _ in by_rank]
    loss = sum(losses) / ranks
    stats = torch.stack([x for _, x in by_rank])  # [ranks, parameters, 8]
    differences = [_difference(name, stats[:, i], tolerance) for i, name in enumerate(names)]
    found = tuple(sorted((x for x in differences if x.error > tolerance), key=lambda x: -x.error))
    if not found and _same_loss(sum(losses), expected_loss, tolerance):
        loss = expected_loss  # the losses are shares of a sum, and the step sums the gradients
    if not causes and (found or not _same_loss(loss, expected_loss, tolerance)):
        totals = [row[4:].tolist() for row in stats[0]]
        right = {n: all(error_of(divided(x, n)) <= tolerance for x in totals) for n in (1, ranks) if names}
        times = [x / expected_loss if expected_loss else math.nan for x in losses]
        causes = _causes(differences, found, losses, times, right, bool(asked), bool(done.backends), tolerance)
    return StepReport(loss, expected_loss, found, len(names), ranks, tolerance, tuple(causes))


def _causes(
    differences: Sequence[GradientDifference],
    found: Sequence[GradientDifference],
    losses: Sequence[float],
    times: Sequence[float],
    right: dict[int, bool],
    asked: bool,
    attended: bool,
    tolerance: float,
) -> list[str]:
    """What the differences have in common.

    Args:
        differences: of all parameters.
        found: of the parameters whose gradients differ.
        losses: of each rank.
        times: each rank's loss divided by one device's.
        right: for n = 1 and n = the number of ranks, whether the sum of the ranks' gradients over n is one device's.
        asked: whether the step asked for positions.
        attended: whether the step computed attention of this package.
        tolerance: as in ``verify``.
    """
    ranks = len(losses)
    if found and all(x.parallel for x in differences):
        ratio = median(x.ratio for x in found)
        alike = len(found) == len(differences) and all(abs(x.ratio / ratio - 1) <= 2 * tolerance for x in found)
        other = (
            "the loss divides by another number. Give token_loss the ignore_index of the reference, and divide by as "
            "many parts of the batch as it does"
        )
        if alike and all(abs(x / ratio - 1) <= 2 * tolerance for x in times):
            return [f"every gradient, and the loss, is {ratio:.4g} times one device's: {other}"]
        factors = {_factor(x.ratio, ranks, tolerance) for x in found}
        names = "every gradient" if len(found) == len(differences) else "some gradients"
        if len(factors) == 1 and (n := factors.pop()) > 1:
            if len(found) < len(differences):
                return [
                    f"some gradients are {n:g} times one device's: what one rank holds alone, such as a shard or an "
                    f"expert, has the gradients of {n:g} losses, whose mean is due; divide these gradients by {n:g}"
                ]
            return [
                f"every gradient is {n:g} times one device's: {n:g} ranks were summed where their mean is due; average "
                "with seqpar.sync_gradients(model), without reduce='sum'; if a wrapper sums, pass token_loss "
                "gradients='sum'"
            ]
        if n and n < 1:
            return [
                f"{names}: 1/{1 / n:g} of one device's: each of {1 / n:g} ranks has a share of the loss, and the "
                "gradients were averaged where their sum is due; take the loss from seqpar.token_loss, with "
                "gradients='mean', or call seqpar.sync_gradients(model, reduce='sum'). "
                "Or the loss is divided by the number of parts of a batch, and the step returns it undivided"
            ]
        if alike:
            return [f"every gradient is {ratio:.4g} times one device's: {other}"]
    if found and right.get(ranks):
        return [
            "the mean of the ranks' gradients is one device's, but the step does not average them: call "
            "seqpar.sync_gradients(model) after backward, or wrap the model in DDP or FSDP over all ranks"
        ]
    if found and right.get(1):
        return [
            "each rank has a share of the loss and of the gradient, and the step does not sum them: call "
            "seqpar.sync_gradients(model, reduce='sum') after backward, or take the loss from seqpar.token_loss"
        ]
    if ranks > 1 and not attended:
        return [
            "the step computed no attention of seqpar, so each rank attends to its own tokens only: run the model "
            "inside seqpar.replace_sdpa(sharding), or call seqpar.sdpa or seqpar.attention"
        ]
    if unlike := [i for i, x in enumerate(losses) if not _same_loss(x, losses[0], tolerance)]:
        return [
            f"the ranks' losses differ ({losses[0]:.6f} on rank 0, {losses[unlike[0]]:.6f} on rank {unlike[0]}): "
            "a term of the loss differs between ranks. If it is the mean over a rank's own tokens, of which the ranks "
            "have different numbers, take the loss from seqpar.token_loss; if it is computed from a rank's own tokens "
            "otherwise, such as a pooled output, unshard them first; if it draws random numbers, draw the same ones"
        ]
    positions = (
        "position embeddings or rotary angles that do not take sharding.positions(), which the step did not ask for, "
        "but arange(seq_local)"
        if not asked
        else "positions, where the model takes them from elsewhere than sharding.positions()"
    )
    return [
        "the loss or the gradients are another function's. Look at another mask (causal, documents, padding); labels "
        "that were shifted after they were sharded, or shards of another layout; tokens mixed by something that is not "
        f"attention, such as a convolution or a pooled mean; {positions}"
    ]


def _factor(ratio: float, ranks: int, tolerance: float) -> float:
    """``n`` or ``1/n`` for a ratio near it, with n a divisor of the number of ranks; 0 for another one."""
    for n in range(2, ranks + 1):
        for factor in (float(n), 1 / n):
            if ranks % n == 0 and abs(ratio / factor - 1) <= 2 * tolerance:
                return factor
    return 0.0


def _difference(name: str, rows: Tensor, tolerance: float) -> GradientDifference:
    by_rank = rows.tolist()
    errors, ratios = [error_of(x) for x in by_rank], [ratio_of(x) for x in by_rank]
    worst = max(range(len(errors)), key=errors.__getitem__)
    same = max(ratios) - min(ratios) <= tolerance * abs(ratios[0])
    parallel = same and all(is_multiple(x, tolerance) for x in by_rank)
    return GradientDifference(name, errors[worst], ratios[worst], parallel)


def _numbers(actual: Tensor, expected: Tensor, group: ProcessGroup | None) -> Tensor:
    """The ``products`` of the gradients, and of the sum of ``actual`` over the ranks: ``[8]``."""
    total = actual.clone()
    if group is not None:
        run(dist.all_reduce, total, group=group)
    return torch.cat([products(actual, expected), products(total, expected)])


def products(a: Tensor, e: Tensor) -> Tensor:
    """Of a gradient ``a`` and one device's gradient ``e``: |a - e|², |e|², a·e and |a|², float64 ``[4]`` on the CPU."""
    a, e = a.double().flatten(), e.double().flatten()
    return torch.stack([(a - e) @ (a - e), e @ e, a @ e, a @ a]).cpu()


def divided(numbers: Sequence[float], n: float) -> list[float]:
    """The ``products`` of ``a / n`` and ``e``. ``numbers`` are the ``products`` of ``a`` and ``e``."""
    _, ee, ae, aa = numbers
    return [max(aa / n**2 - 2 * ae / n + ee, 0.0), ee, ae / n, aa / n**2]


def error_of(numbers: Sequence[float], least: float = 0.0) -> float:
    """|a - e| relative to |e|, or to ``least`` if that is greater. ``numbers`` begin with the ``products``."""
    error = math.sqrt(numbers[0]) / (max(math.sqrt(numbers[1]), least) or 1.0)
    return math.inf if math.isnan(error) else error


def ratio_of(numbers: Sequence[float]) -> float:
    """The factor by which ``e`` comes closest to ``a``."""
    return numbers[2] / numbers[1] if numbers[1] else math.inf


def is_multiple(numbers: Sequence[float], tolerance: float) -> bool:
    """Whether ``a`` is ``e`` times ``ratio_of(numbers)``."""
    _, ee, ae, aa, *_ = numbers
    return ee > 0 and aa - ae * ae / ee <= (tolerance * ae / ee) ** 2 * ee


def _run(step: Step, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """The loss that a step returns, and the full gradient of each parameter that has one."""
    parameters = inspect.signature(step).parameters.values()
    takes_model = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    )
    for p in model.parameters():
        p.grad = None
    loss = step(model) if takes_model else step()
    if not isinstance(loss, (int, float)) and not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise TypeError(f"{getattr(step, '__name__', 'step')}: returned {type(loss).__name__}; expected the loss")
    gradients = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            for prefix in _WRAPPERS:
                name = name.replace(prefix, "")
            full = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            gradients[name] = full.detach().clone()
    return float(loss.detach() if isinstance(loss, Tensor) else loss), gradients


def _gather(value: Any, group: ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    with waiting("verify", group):
        dist.all_gather_object(values, value, group=group)
    return values


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
