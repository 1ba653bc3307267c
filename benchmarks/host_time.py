"""The time that the host spends on one layer of so few tokens that there is almost nothing to compute.

On a GPU, the host only launches kernels and messages. If the launches of a layer take longer than its kernels, the GPU
waits. Here one process simulates one rank of eight (for the hybrid, a ring of 4 across groups of 2) in a process group
of the backend "fake", whose messages take no time. It also measures a group of one rank. The layer is given a
``Sharding`` and has been called before, as in a training loop.

    python benchmarks/host_time.py

Prints the CPU time of the calling thread in microseconds, for forward and backward of a layer over a sequence of 16
tokens. ``layer`` is the time of the whole layer, including the projections and their dispatch. ``kernels`` is the part
inside the attention backend, which on a CPU computes in the same thread. Each number is the median of ``--repeats``
calls; the fastest call is in parentheses.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar.kernels.cpu import CpuBackend
from seqpar.placement.strategies import compared_options

HIDDEN, HEADS, KV_HEADS, RING, ULYSSES = 64, 8, 8, 4, 2
STRATEGIES = ("local", "ring", "ulysses", "context_parallel", "hybrid", "tp_sp")


class KernelTime:
    """The CPU seconds that this process's threads spend inside the attention backend."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("forward", "backward"):
            setattr(CpuBackend, name, self._timed(getattr(CpuBackend, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            result = function(*args, **kwargs)
            self.seconds += time.thread_time() - start
            return result

        return timed


def measure(strategy: Any, seq_len: int, repeats: int, ranks: int, kernels: KernelTime) -> list[str]:
    """A row of the table."""
    many, megatron = ranks > 1, strategy == "tp_sp"
    sizes: dict[str, Any] = (
        {"tp": ranks} if megatron else {"ring": RING if many else 1, "ulysses": ULYSSES if many else 1}
    )
    mesh = seqpar.init_mesh(**sizes, device_type="cpu")
    single: dict[str, Any] = {} if strategy == "local" else {"mesh": mesh}
    layer = seqpar.ParallelAttention(strategy, HIDDEN, HEADS, KV_HEADS, **single, **compared_options(strategy))
    sharding = seqpar.Sharding(seq_len, "zigzag", mesh=mesh, strategy="tp_sp" if megatron else None)
    x = torch.randn(1, sharding.seq_local, HIDDEN, requires_grad=True)  # [b, s, hidden]
    dy = torch.randn_like(x)
    mask = seqpar.Mask.causal()
    # Four times of each call: forward, its kernels, backward, its kernels. On the CPU, backward runs in this thread.
    calls: list[list[float]] = []
    for _ in range(repeats + 20):
        times = []
        y: Any = None
        for backward in (False, True):
            kernels.seconds, start = 0.0, time.thread_time()
            if backward:
                y.backward(dy)
            else:
                y = layer(x, mask=mask, sharding=sharding) if single else layer(x, mask=mask)
            times += [time.thread_time() - start, kernels.seconds]
        calls.append(times)
    columns = zip(*calls[20:], strict=True)
    return [f"{1e6 * statistics.median(column):,.0f} ({1e6 * min(column):,.0f})" for column in columns]


def main(
    seq_len: Annotated[int, typer.Option(help="Tokens of the sequence.")] = 16,
    repeats: Annotated[int, typer.Option(help="Calls of each layer.")] = 1000,
) -> None:
    """Measure the host time of one layer under every strategy."""
    torch.set_num_threads(1)
    kernels = KernelTime()
    for ranks in (RING * ULYSSES, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
        title = f"one rank of {ranks}: microseconds of CPU time, {seq_len} tokens in all"
        table = Table("", "layer, forward", "kernels", "layer, backward", "kernels", title=title)
        for strategy in STRATEGIES:
            if ranks == 1 or strategy != "local":
                table.add_row(strategy, *measure(strategy, seq_len, repeats, ranks, kernels))
        Console(width=100).print(table)
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
