"""The gradients of one training step, sharded and on one device, and what the ones that differ have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Sequence
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..base.sharded import is_dtensor
from ..comm.collectives import run
from ..ranks.mesh import global_ranks, size_of
from ..ranks.rendezvous import group_timeout, store_all_gather
from .report import SHOWN, Difference

# A gradient that is smaller than this, relative to the largest one, may be nothing but rounding error.
_LEAST = 1e-3


class StepResult(NamedTuple):
    """What one training step computed."""

    loss: float
    gradients: dict[str, Tensor]  # by the parameter's name: on the CPU, or DTensors


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
            device = g.device_mesh.device_type if is_dtensor(g) else "cpu"  # FSDP may offload its gradients
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
        return [x.full_tensor().cpu() if is_dtensor(x) else x for x in gradients]

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
        return f"some rank, or one device, has no gradient for {', '.join(missing[:SHOWN])}"
    if right[1]:
        return (
            "each rank has a share of the loss and of the gradient, and the step does not sum them: call "
            "seqpar.sync_gradients(model, reduce='sum') after backward, or take the loss from seqpar.token_loss"
        )
    return ""


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
