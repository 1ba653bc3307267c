"""The part of ``seqpar doctor`` that runs on several ranks: it measures messages and checks attention.

The command starts the ranks, or torchrun does.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm.collectives import start_all_gather, start_all_to_all
from ..comm.p2p import exchange
from ..functional import attention
from ..kernels import BACKENDS
from ..layers import LocalAttention
from ..mask import Mask
from ..megatron import MegatronAttention
from ..mesh import init_mesh, ranks_by_host
from ..sharding import Sharding
from ..strategies import STRATEGIES, compared_options

_TIMEOUT = timedelta(seconds=60)  # of one collective
_SIZES = (8, 1 << 10, 32 << 10, 1 << 20, 32 << 20)  # bytes that each rank sends
_REPEATS = 5
_BATCH, _HEADS, _KV_HEADS, _HEAD_DIM, _HIDDEN = 2, 8, 2, 64, 64
# The largest allowed relative error of a result against float64, in the 2-norm. Rounding causes less than a fifth.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_QUANTITIES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Link:
    """The time of messages of one size among all ranks.

    Attributes:
        operation: "p2p" (each rank sends to the next rank and receives from the previous one), "all-to-all" or
            "all-gather".
        nbytes: bytes that each rank sends, to all other ranks together.
        seconds: seconds of the slowest rank, the median of a few runs.
        bytes_per_second: bytes per second that each rank sends.
    """

    operation: str
    nbytes: int
    seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class Check:
    """A comparison of one strategy with one device in float64.

    Attributes:
        what: the strategy, followed by the backend if a particular one was compared.
        mask: the name of the mask.
        error: the largest relative error of the output and the gradients; None if the strategy raised an error.
        tolerance: the largest allowed ``error``.
        problem: what is wrong, or None.
    """

    what: str
    mask: str
    error: float | None
    tolerance: float
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the results are right."""
        return self.problem is None


@dataclass(frozen=True)
class Findings:
    """The results of ``check_up``.

    Attributes:
        ranks: number of ranks.
        hosts: number of hosts.
        backend: the backend of torch.distributed, "nccl" or "gloo".
        device: the type of the ranks' devices, "cuda" or "cpu".
        links: one for each operation and size; empty if there is one rank.
        checks: one for each strategy and mask.
    """

    ranks: int
    hosts: int
    backend: str
    device: str
    links: list[Link]
    checks: list[Check]


def check_up(measure: bool, check: bool) -> Findings:
    """Measure the links and compare the strategies. All ranks of the job call this together.

    Args:
        measure: whether to measure the links.
        check: whether to compare the strategies.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    init_mesh(ring=-1, device_type="cuda" if cuda else "cpu", timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return Findings(
        group.size(),
        len(ranks_by_host(group)),
        "nccl" if cuda else "gloo",
        device.type,
        list(measure_links(group, device)) if measure and group.size() > 1 else [],
        list(compare(group, device)) if check else [],
    )


# Links


def measure_links(group: ProcessGroup, device: torch.device) -> Iterator[Link]:
    """The time of messages among all ranks at once, for each operation and size."""
    ranks, rank = group.size(), group.rank()

    def p2p(size: int) -> None:
        sent, received = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
        exchange([((rank + 1) % ranks, sent)], [((rank - 1) % ranks, received)], group).wait()

    def all_to_all(size: int) -> None:
        each = -(-size // (ranks - 1))
        sent = torch.empty(ranks * each, dtype=torch.uint8, device=device)
        start_all_to_all(sent, [each] * ranks, [each] * ranks, group)[1].wait()

    def all_gather(size: int) -> None:
        start_all_gather(torch.empty(-(-size // (ranks - 1)), dtype=torch.uint8, device=device), group)[1].wait()

    for operation, run in (("p2p", p2p), ("all-to-all", all_to_all), ("all-gather", all_gather)):
        for size in _SIZES:
            seconds = _slowest_median(run, size, group, device)
            yield Link(operation, size, seconds, size / seconds)


def _slowest_median(run: Callable[[int], None], size: int, group: ProcessGroup, device: torch.device) -> float:
    """The median of the seconds of ``run(size)``, on the rank on which it is the largest."""
    times = []
    for number in range(_REPEATS + 1):
        synchronize(device)
        _gathered(0.0, group, device)  # so that all ranks begin together
        start = time.perf_counter()
        run(size)
        synchronize(device)
        if number:  # the first run connects the ranks
            times.append(time.perf_counter() - start)
    return max(_gathered(statistics.median(times), group, device))


def synchronize(device: torch.device) -> None:
    """Wait for the kernels of a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gathered(value: float, group: ProcessGroup, device: torch.device) -> list[float]:
    """Every rank's value, by rank."""
    if group.size() == 1:
        return [value]
    by_rank, pending = start_all_gather(torch.tensor([value], dtype=torch.float64, device=device), group)
    pending.wait()
    values: list[float] = by_rank.flatten().tolist()
    return values


# Comparison with one device


def compare(group: ProcessGroup, device: torch.device) -> Iterator[Check]:
    """Compare forward and backward of every strategy with attention of the full sequence in float64."""
    ranks = group.size()
    tokens = 64 * ranks + 5
    masks = {
        "causal": Mask.causal(),
        "window": Mask.sliding_window(37),
        "documents": Mask.documents([0, 11, tokens // 2, tokens]),
    }
    names = [name for name in STRATEGIES if name != "local" or ranks == 1]
    for mask_name, mask in masks.items():
        problem = _Problem(tokens, mask, device)
        for strategy in names:
            yield _check(strategy, mask_name, problem, group, {"strategy": strategy, **compared_options(strategy)})
    problem = _Problem(tokens, masks["causal"], device)
    for name, backend in BACKENDS.items():
        if backend.unavailable() is None:
            yield _check(f"ring, {name}", "causal", problem, group, {"strategy": "ring", "backend": name})
    yield _check_layer(tokens, group, device)


class _Problem:
    """q, k, v and dout of the full sequence, and the output and gradients that one device computes in float64.

    Shapes: ``[b, s, h, d]``, with s tokens of the full sequence.
    """

    def __init__(self, tokens: int, mask: Mask, device: torch.device) -> None:
        self.mask, self.device = mask, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        heads = (_HEADS, _KV_HEADS, _KV_HEADS, _HEADS)
        self.inputs = [  # rounded to the dtype that the ranks compute in
            torch.randn(_BATCH, tokens, n, _HEAD_DIM, generator=generator).to(self.dtype) for n in heads
        ]
        q, k, v, dout = (x.double() for x in self.inputs)
        self.expected = one_device(q, k, v, dout, mask)


def one_device(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> list[Tensor]:
    """``out, dq, dk, dv`` of attention computed with a dense mask. Shapes: ``[b, s, h, d]``."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~mask.dense(q.shape[1]), float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _check(what: str, mask: str, problem: _Problem, group: ProcessGroup, options: dict[str, Any]) -> Check:
    """Compare ``seqpar.attention(**options)`` with one device."""
    tokens = problem.inputs[0].shape[1]

    def errors() -> list[tuple[float, float]]:
        sharding = Sharding(tokens, "zigzag", group=group)
        q, k, v, dout = (sharding.shard(x).to(problem.device) for x in problem.inputs)
        for x in (q, k, v):
            x.requires_grad_()
        out = attention(q, k, v, mask=problem.mask, sharding=sharding, **options)
        results = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
        return [_error(x, sharding.shard(y)) for x, y in zip(results, problem.expected, strict=True)]

    return _judge(what, mask, errors, group, problem.device, problem.dtype, _QUANTITIES)


def _check_layer(tokens: int, group: ProcessGroup, device: torch.device) -> Check:
    """Compare ``MegatronAttention`` with the same layer on one device in float64."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(_BATCH, tokens, _HIDDEN, generator=generator).to(dtype) for _ in range(2))

    def errors() -> list[tuple[float, float]]:
        one = LocalAttention(_HIDDEN, _HEADS, _KV_HEADS, 16, dtype=torch.float64)
        with torch.no_grad():
            for parameter in one.parameters():
                random = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
                parameter.copy_(random.to(dtype))
        whole = x.double().requires_grad_()
        y = one(whole, seq_len=tokens)
        (dx,) = torch.autograd.grad(y, whole, dy.double())
        layer = MegatronAttention(_HIDDEN, _HEADS, _KV_HEADS, 16, group=group, device=device, dtype=dtype)
        layer.load_state_dict({name: value.to(device, dtype) for name, value in one.state_dict().items()})
        sharding = Sharding(tokens, "zigzag", group=group, strategy="tp_sp")
        local, dy_local = (sharding.shard(t).to(device) for t in (x, dy))
        out = layer(local.requires_grad_(), sharding=sharding)
        (dx_local,) = torch.autograd.grad(out, local, dy_local)
        return [_error(a, sharding.shard(b)) for a, b in ((out.detach(), y.detach()), (dx_local, dx))]

    return _judge("tp_sp", "causal", errors, group, device, dtype, ("out", "dx"))


def _error(result: Tensor, expected: Tensor) -> tuple[float, float]:
    """The squared error of this rank's rows, and the squared norm of the expected rows."""
    wrong = result.cpu().double() - expected
    return float(wrong.square().sum()), float(expected.square().sum())


def _judge(
    what: str,
    mask: str,
    errors: Callable[[], list[tuple[float, float]]],
    group: ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    quantities: tuple[str, ...],
) -> Check:
    """Compare the results of all ranks.

    An exception that all ranks raise becomes the check's problem. If only some ranks raise, the others wait for them
    until the deadline of the command.

    Args:
        what, mask: the strategy and the mask.
        errors: computes the results of this rank, and returns ``_error`` for each of ``quantities``.
        group: the ranks.
        device: the device of this rank.
        dtype: the dtype of the results.
        quantities: the names of the results.
    """
    tolerance = TOLERANCES[dtype]
    try:
        found = errors()
    except Exception as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        return Check(what, mask, None, tolerance, f"{type(error).__name__}: {first}")
    by_quantity = {}
    for name, (wrong, right) in zip(quantities, found, strict=True):
        total = [sum(_gathered(x, group, device)) for x in (wrong, right)]
        by_quantity[name] = (total[0] / max(total[1], 1e-300)) ** 0.5
    bad = [f"{name} differs by {x:.1e}" for name, x in by_quantity.items() if not x <= tolerance]
    return Check(what, mask, max(by_quantity.values()), tolerance, "; ".join(bad) or None)
