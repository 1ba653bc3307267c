"""The part of ``seqpar doctor`` that runs on several ranks: it measures messages, and compares every strategy with one
device. The command starts the ranks, or torchrun does.
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
# The largest allowed relative error of a result against float64, in the 2-norm. Rounding causes less than a fifth.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_SIZES = (8, 1 << 10, 32 << 10, 1 << 20, 32 << 20)  # bytes that each rank sends
_REPEATS = 5
HEADS, HEAD_DIM = 8, 64


@dataclass(frozen=True)
class Link:
    """The time of messages of one size among all ranks at once."""

    operation: str  # "p2p" (to the next rank, from the previous one), "all-to-all" or "all-gather"
    nbytes: int  # that each rank sends, to all other ranks together
    seconds: float  # of the slowest rank, the median of a few runs
    bytes_per_second: float  # that each rank sends


@dataclass(frozen=True)
class Check:
    """A comparison of one strategy with one device in float64."""

    what: str  # the strategy, and the backend if a particular one was compared
    mask: str
    error: float | None  # the largest relative error of the output and the gradients; None after an exception
    tolerance: float
    problem: str | None = None  # what is wrong

    @property
    def ok(self) -> bool:
        return self.problem is None


@dataclass(frozen=True)
class RankReport:
    ranks: int
    hosts: int
    backend: str  # "nccl" or "gloo"
    device: str  # "cuda" or "cpu"
    links: list[Link]  # one for each operation and size; empty with one rank
    checks: list[Check]  # one for each strategy and mask


def examine_ranks(measure: bool, check: bool) -> RankReport:
    """Measure the links and compare the strategies. All ranks of the job call this together."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    init_mesh(ring=-1, device_type="cuda" if cuda else "cpu", timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return RankReport(
        group.size(),
        len(ranks_by_host(group)),
        "nccl" if cuda else "gloo",
        device.type,
        list(measure_links(group, device)) if measure and group.size() > 1 else [],
        list(compare(group, device)) if check else [],
    )


def measure_links(group: ProcessGroup, device: torch.device) -> Iterator[Link]:
    """The time of messages among all ranks at once, for each operation and size."""
    ranks, rank = group.size(), group.rank()

    def tensor(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    def p2p(size: int) -> None:
        exchange([((rank + 1) % ranks, tensor(size))], [((rank - 1) % ranks, tensor(size))], group).wait()

    def all_to_all(size: int) -> None:
        part = -(-size // (ranks - 1))
        start_all_to_all(tensor(ranks * part), [part] * ranks, [part] * ranks, group)[1].wait()

    def all_gather(size: int) -> None:
        start_all_gather(tensor(-(-size // (ranks - 1))), group)[1].wait()

    for operation, run in (("p2p", p2p), ("all-to-all", all_to_all), ("all-gather", all_gather)):
        for size in _SIZES:
            times = []
            for number in range(_REPEATS + 1):
                synchronize(device)
                _gather(0.0, group, device)  # so that all ranks begin together
                start = time.perf_counter()
                run(size)
                synchronize(device)
                if number:  # the first run connects the ranks
                    times.append(time.perf_counter() - start)
            seconds = max(_gather(statistics.median(times), group, device))
            yield Link(operation, size, seconds, size / seconds)


def _gather(value: float, group: ProcessGroup, device: torch.device) -> list[float]:
    """Every rank's value, by rank."""
    if group.size() == 1:
        return [value]
    by_rank, pending = start_all_gather(torch.tensor([value], dtype=torch.float64, device=device), group)
    pending.wait()
    values: list[float] = by_rank.flatten().tolist()
    return values


def compare(group: ProcessGroup, device: torch.device) -> Iterator[Check]:
    """Compare forward and backward of every strategy with attention of the full sequence in float64."""
    ranks, dtype = group.size(), measured_dtype(device)
    tokens, batch, kv_heads = 64 * ranks + 5, 2, 2
    masks = {
        "causal": Mask.causal(),
        "window": Mask.sliding_window(37),
        "documents": Mask.documents([0, 11, tokens // 2, tokens]),
    }
    generator = torch.Generator().manual_seed(0)
    inputs = [  # q, k, v, dout of the full sequence, rounded to the dtype that the ranks compute in
        torch.randn(batch, tokens, heads, HEAD_DIM, generator=generator).to(dtype)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    ]
    expected = {name: _one_device(inputs, mask) for name, mask in masks.items()}

    def check(what: str, mask: str, **options: Any) -> Check:
        def pairs() -> list[tuple[Tensor, Tensor]]:
            sharding = Sharding(tokens, "zigzag", group=group)
            q, k, v, dout = (sharding.shard(x).to(device) for x in inputs)
            for x in (q, k, v):
                x.requires_grad_()
            out = attention(q, k, v, mask=masks[mask], sharding=sharding, **options)
            results = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
            return [(x, sharding.shard(y)) for x, y in zip(results, expected[mask], strict=True)]

        return _judge(what, mask, pairs, group, device, ("out", "dq", "dk", "dv"))

    for mask in masks:
        for strategy in STRATEGIES:
            if strategy != "local" or ranks == 1:
                yield check(strategy, mask, strategy=strategy, **compared_options(strategy))
    for name, backend in BACKENDS.items():
        if backend.unavailable() is None:
            yield check(f"ring, {name}", "causal", strategy="ring", backend=name)
    yield _check_layer(tokens, group, device)


def _one_device(inputs: list[Tensor], mask: Mask) -> list[Tensor]:
    """``out, dq, dk, dv`` of q, k, v and dout ``[b, s, h, d]``, in float64 with a dense mask."""
    q, k, v, dout = (x.double().requires_grad_(i < 3) for i, x in enumerate(inputs))
    keys, values = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~mask.dense(q.shape[1]), float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _check_layer(tokens: int, group: ProcessGroup, device: torch.device) -> Check:
    """Compare ``MegatronAttention`` with the same layer on one device in float64."""
    dtype, hidden, kv_heads, head_dim = measured_dtype(device), 64, 2, 16
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(2, tokens, hidden, generator=generator).to(dtype) for _ in range(2))

    def pairs() -> list[tuple[Tensor, Tensor]]:
        one = LocalAttention(hidden, HEADS, kv_heads, head_dim, dtype=torch.float64)
        with torch.no_grad():
            for parameter in one.parameters():
                random = torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5
                parameter.copy_(random.to(dtype))
        full = x.double().requires_grad_()
        y = one(full, seq_len=tokens)
        (dx,) = torch.autograd.grad(y, full, dy.double())
        layer = MegatronAttention(hidden, HEADS, kv_heads, head_dim, group=group, device=device, dtype=dtype)
        layer.load_state_dict({name: value.to(device, dtype) for name, value in one.state_dict().items()})
        sharding = Sharding(tokens, "zigzag", group=group, strategy="tp_sp")
        x_local, dy_local = (sharding.shard(t).to(device) for t in (x, dy))
        out = layer(x_local.requires_grad_(), sharding=sharding)
        (dx_local,) = torch.autograd.grad(out, x_local, dy_local)
        return [(out.detach(), sharding.shard(y.detach())), (dx_local, sharding.shard(dx))]

    return _judge("tp_sp", "causal", pairs, group, device, ("out", "dx"))


def _judge(
    what: str,
    mask: str,
    pairs: Callable[[], list[tuple[Tensor, Tensor]]],
    group: ProcessGroup,
    device: torch.device,
    quantities: tuple[str, ...],
) -> Check:
    """Compare the results of all ranks: ``pairs()`` are this rank's results and the expected ones, by quantity.

    An exception that all ranks raise becomes the check's problem. If only some ranks raise, the others wait for them
    until the deadline of the command.
    """
    tolerance = TOLERANCES[measured_dtype(device)]
    try:
        results = pairs()
    except Exception as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        return Check(what, mask, None, tolerance, f"{type(error).__name__}: {first}")
    errors = {}
    for name, (result, right) in zip(quantities, results, strict=True):
        squares = (float(x.square().sum()) for x in (result.cpu().double() - right, right))
        wrong, norm = (sum(_gather(x, group, device)) for x in squares)
        errors[name] = (wrong / max(norm, 1e-300)) ** 0.5
    bad = [f"{name} differs by {x:.1e}" for name, x in errors.items() if not x <= tolerance]
    return Check(what, mask, max(errors.values()), tolerance, "; ".join(bad) or None)


def measured_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
