"""The rates of this machine: matrix products, attention, memory, and messages among ranks.

Rates are in operations or bytes per second, from the fastest of a few runs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler import profile
from torch.distributed import ProcessGroup

from ..comm.collectives import start_all_gather, start_all_to_all
from ..comm.p2p import exchange
from ..comm.trace import trace
from ..functional import attention
from ..kernels import BackendName, backends
from ..planner import HARDWARE, Hardware
from ..planner.hardware import AttentionRate
from ..planner.split import INVARIANT
from ..sharding.spec import Deterministic
from .launch import cores, join, launch, this_device

HEADS, HEAD_DIM = 8, 64
_OPERATOR = "aten::_scaled_dot_product_"
_SIZES = (8, 1 << 10, 32 << 10, 1 << 20, 32 << 20)  # bytes that each rank sends
_REPEATS = 5
_LONG_ENOUGH_S = 0.15  # a shorter run of attention would measure overheads more than the kernel
_RANKS = 2  # that measure the links for the planner
_DEADLINE_S = 120.0


@dataclass(frozen=True)
class MeasuredLink:
    """The time of messages of one size among all ranks at once."""

    operation: str  # "p2p" (to the next rank, from the previous one), "all-to-all" or "all-gather"
    nbytes: int  # that each rank sends, to all other ranks together
    seconds: float  # of the slowest rank, the median of a few runs
    bytes_per_second: float  # that each rank sends


@dataclass(frozen=True)
class MeasuredAttention:
    ran: str  # the backend; another one than was asked for, if that one does not support the call
    seq_len: int
    head_dim: int
    forward: float  # operations per second
    forward_backward: float  # of both together


def measured_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attention_rate(
    backend: BackendName, device: torch.device, deterministic: Deterministic = False
) -> MeasuredAttention:
    """The rate of causal attention with 8 heads, of head_dim 64 on a CPU and 128 on a GPU.

    The sequence has the first length of 512, 1,024, 2,048, ... whose forward takes long enough to be measured. A
    forward counts as ``2 * seq_len**2 * 8 * head_dim`` operations, half as many as with a full mask. A backward counts
    as 2.5 times that.
    """
    head_dim = rated_head_dim(device)
    longest = 32768 if device.type == "cuda" else 8192
    seq_len = 256
    while True:
        seq_len *= 2
        shape = (1, seq_len, HEADS, head_dim)  # [batch, seq, heads, head_dim]
        q, k, v = (
            torch.randn(shape, device=device, dtype=measured_dtype(device), requires_grad=True) for _ in range(3)
        )
        dout = torch.randn_like(q)

        def forward() -> Tensor:
            of_call = q, k, v  # noqa: B023 (called before the next round)
            return attention(*of_call, strategy="local", backend=backend, deterministic=deterministic)

        with trace() as t:
            forward()  # compiles kernels and fills caches
        if _best_seconds(forward, device, 1) > _LONG_ENOUGH_S / 3 or seq_len >= longest:
            break
    seconds = _best_seconds(forward, device)
    both = _best_seconds(lambda: forward().backward(dout), device)
    operations = 2.0 * seq_len**2 * HEADS * head_dim
    return MeasuredAttention(", ".join(t.backends), seq_len, head_dim, operations / seconds, 3.5 * operations / both)


def rated_head_dim(device: torch.device) -> int:
    """The head_dim of measured attention. On a GPU it is the head_dim of the rates in the planner's table."""
    return 128 if device.type == "cuda" else HEAD_DIM


def sdpa_backend(device: torch.device) -> str:
    """The operator that PyTorch's ``scaled_dot_product_attention`` runs for a causal forward, and on a GPU its kernel.

    The call has 4,096 tokens on a GPU and 512 on a CPU, and the heads and dtype of ``attention_rate``.
    """
    on_gpu = device.type == "cuda"
    shape = 1, HEADS, 4096 if on_gpu else 512, rated_head_dim(device)
    q, k, v = (torch.randn(shape, device=device, dtype=measured_dtype(device)) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v, is_causal=True)  # the first call sets up the library
    with profile(use_kineto=on_gpu, use_device="cuda" if on_gpu else None) as profiled:
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        synchronize(device)
    return ran_by_sdpa(profiled.function_events or ())


def ran_by_sdpa(events: Iterable[Any]) -> str:
    """What ``sdpa_backend`` returns, from the events of a profile."""
    names = [event.name.removeprefix(_OPERATOR) for event in events if event.name.startswith(_OPERATOR)]
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    longest = max(kernels, key=lambda event: event.time_range.elapsed_us(), default=None)
    operator = ", ".join(dict.fromkeys(names)) or "an unknown operator"
    return operator if longest is None else f"{operator}: {longest.name}"


def matrix_rate(device: torch.device) -> float:
    """Operations per second of the product of two square matrices."""
    n = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(n, n, device=device, dtype=measured_dtype(device)) for _ in range(2))
    torch.mm(a, b)  # the first product sets up the library
    return 2.0 * n**3 / _best_seconds(lambda: torch.mm(a, b), device)


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written together, of a copy of 256 MiB (1 GiB on CUDA)."""
    n = (1 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.zeros(n, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2.0 * n / _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(run: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def measure_links(group: ProcessGroup, device: torch.device) -> Iterator[MeasuredLink]:
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
                gather(0.0, group, device)  # so that all ranks begin together
                start = time.perf_counter()
                run(size)
                synchronize(device)
                if number:  # the first run connects the ranks
                    times.append(time.perf_counter() - start)
            seconds = max(gather(statistics.median(times), group, device))
            yield MeasuredLink(operation, size, seconds, size / seconds)


def gather(value: float, group: ProcessGroup, device: torch.device) -> list[float]:
    """Every rank's value, by rank."""
    if group.size() == 1:
        return [value]
    by_rank, pending = start_all_gather(torch.tensor([value], dtype=torch.float64, device=device), group)
    pending.wait()
    values: list[float] = by_rank.flatten().tolist()
    return values


def measure_machine(deterministic: Deterministic = False) -> Hardware:
    """This machine for the planner, from a few seconds of measurements.

    With ``deterministic="invariant"`` it has the rates of these kernels, and no others.

    Two processes measure the links. On a machine without a GPU, each core of the CPU counts as a GPU. The planner
    counts 2 bytes per element, but the CPU computes in float32 with 4. So half of the measured bandwidth is reported.
    """
    device = this_device()
    torch.set_num_threads(1)
    kernel = next(status.name for status in backends() if status.available)
    gemm = matrix_rate(device)
    attention = attention_rate(cast("BackendName", kernel), device, deterministic)
    # A backward has 2.5 times the FLOPs of a forward: 3.5 / forward_backward = 1 / forward + 2.5 / backward.
    backward = 2.5 / max(1e-30, 3.5 / attention.forward_backward - 1 / attention.forward)
    if deterministic == INVARIANT:
        kernel, backward = INVARIANT, backward * 7 / 5  # seven products instead of five
    links = launch(_measure_links, _RANKS, deadline_s=_DEADLINE_S)[0]
    scale = 0.5 if device.type == "cpu" else 1.0
    p2p, all_to_all, all_gather = (
        scale * max(link.bytes_per_second for link in links if link.operation == operation)
        for operation in ("p2p", "all-to-all", "all-gather")
    )
    if device.type == "cuda":
        memory: float = torch.cuda.get_device_properties(device).total_memory
        gpus = torch.cuda.device_count()
    else:
        gpus = cores()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / gpus
    return replace(
        HARDWARE["h100"],
        name="this machine",
        peak_flops=gemm,
        gemm_flops=gemm,
        attention={kernel: AttentionRate(attention.forward, backward, kernel in ("triton", "reference"))},
        memory_bytes=memory,
        memory_bandwidth=copy_rate(device) * scale,
        p2p=p2p,
        peer=p2p,
        all_to_all=all_to_all,
        all_gather=all_gather,
        network=p2p,
        host_link=copy_rate(device) * scale,
        latency=min(link.seconds for link in links),
        kernel=0.0,
        gpus_per_host=gpus,
        reserved_bytes=0.0,
        device=device.type,
    )


def _measure_links() -> list[MeasuredLink]:
    device = join()
    assert dist.group.WORLD is not None
    return list(measure_links(dist.group.WORLD, device))
