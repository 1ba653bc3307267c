"""``seqpar doctor``: what this machine can run, and how fast.

Rates are operations or bytes a second, from the shortest of a few runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ..comm.p2p import exchange
from ..comm.trace import trace
from ..functional import attention
from ..kernels import BACKENDS, BackendName, backends
from .launch import CommandError, cores, follow_launcher, launch
from .trainer.report import human_bytes

_HEADS, _HEAD_DIM = 8, 64
_LONG_ENOUGH_S = 0.15  # of a run of attention: shorter ones measure overheads
_REPEATS = 3
_LINK_BYTES = 32 << 20
_LINK_DEADLINE_S = 30.0


def doctor(
    measure: Annotated[bool, typer.Option(help="Measure rates, besides listing what is there.")] = True,
) -> None:
    """Show what this machine can run and how fast: versions, devices, backends, measured rates. Takes seconds."""
    console = Console()
    torch.set_num_threads(cores())
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    _print(console, "Software", _software())
    _print(console, "Devices", _devices())
    _print(console, "Attention backends, best first", _backends())
    if measure:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {cores()} thread(s)"
        dtype = str(_dtype(device)).removeprefix("torch.")
        with console.status("measuring"):
            table = _measured(device)
        _print(console, f"Measured now: {name}, {dtype}", table)


def cpu_name() -> str:
    """The processor's name, such as "AMD EPYC 9654 96-Core Processor"."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


# Tables


def _print(console: Console, title: str, table: Table) -> None:
    console.print(f"\n[bold]{title}[/]", highlight=False)
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(show_header=bool(columns))
    for column in columns or ("", ""):
        table.add_column(column, overflow="fold")
    return table


def _software() -> Table:
    table = _table()
    table.add_row("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    cuda = torch.version.cuda or torch.version.hip
    table.add_row("PyTorch", f"{torch.__version__} ({f'CUDA or ROCm {cuda}' if cuda else 'CPU only'})")
    for name in ("triton", "transformers"):
        table.add_row(name, _version(name))
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    table.add_row("distributed", ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in available.items()))
    return table


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Table:
    table = _table()
    table.add_row("CPU", f"{cpu_name()}, {cores()} core(s) usable, {torch.backends.cpu.get_cpu_capability()}")
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        table.add_row(f"cuda:{i}", f"{p.name}, {human_bytes(p.total_memory)}, compute capability {p.major}.{p.minor}")
    if not torch.cuda.device_count():
        table.add_row("CUDA", "none")
    return table


def _backends() -> Table:
    table = _table("backend", "runs here")
    for status in backends():
        table.add_row(status.name, "[green]yes[/]" if status.available else f"[red]no[/]: {escape(str(status.reason))}")
    return table


def _measured(device: torch.device) -> Table:
    table = _table("operation", "rate")
    table.add_row("matrix product", _flops(_matrix_rate(device)))
    for name, backend in BACKENDS.items():
        if backend.unavailable() is not None:
            continue
        try:
            rate = _attention_rate(cast("BackendName", name), device)
        except (RuntimeError, MemoryError) as error:
            table.add_row(f"attention, {name}", f"failed: {str(error).splitlines()[0]}")
            continue
        if rate.ran != name:
            table.add_row(f"attention, {name}", f"does not support this call; {rate.ran} ran instead")
            continue
        table.add_row(
            f"attention, {name}\n  causal, {rate.seq_len:,} tokens, {_HEADS} heads of {_HEAD_DIM}",
            f"forward {_flops(rate.forward)}\nforward and backward {_flops(rate.forward_backward)}",
        )
    table.add_row("memory copy", f"{_copy_rate(device) / 1e9:.1f} GB/s, read and written")
    table.add_row("gloo over loopback\n  2 processes, both ways at once", _link())
    return table


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.2f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


def _link() -> str:
    if not dist.is_gloo_available():
        return "this PyTorch is built without gloo"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "link.json"
        try:
            launch(["-m", "seqpar.cli.doctor", str(file)], 2, _LINK_DEADLINE_S)
        except CommandError as error:
            return f"failed: {error}"
        result = json.loads(file.read_text())
    return f"{result['bytes_per_second'] / 1e9:.2f} GB/s each way\n{result['latency'] * 1e6:.0f} µs for 8 bytes"


# Measurements on one device


@dataclass(frozen=True)
class _AttentionRate:
    """Operations a second of attention.

    Attributes:
        ran: the backend that ran; another than the one asked for where that one does not support the call.
        seq_len: tokens.
        forward: operations a second of a forward.
        forward_backward: operations a second of a forward and a backward.
    """

    ran: str
    seq_len: int
    forward: float
    forward_backward: float


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _attention_rate(backend: BackendName, device: torch.device) -> _AttentionRate:
    """Causal attention of 8 heads of 64, at the first sequence length 512, 1,024, ... that takes about 0.15 s.

    A forward counts ``2 * seq_len**2 * 8 * 64`` operations, half of a full mask's, and a backward 2.5 times that.
    """
    longest = 32768 if device.type == "cuda" else 8192
    seq_len = 256
    while True:
        seq_len *= 2
        shape = (1, seq_len, _HEADS, _HEAD_DIM)  # [batch, seq, heads, head_dim]
        q, k, v = (torch.randn(shape, device=device, dtype=_dtype(device), requires_grad=True) for _ in range(3))
        dout = torch.randn_like(q)

        def forward() -> Tensor:
            return attention(q, k, v, strategy="local", backend=backend)  # noqa: B023 (called before the next round)

        with trace() as t:
            forward()  # compiles kernels and fills caches
        once = _best_seconds(forward, device, 1)
        if once > _LONG_ENOUGH_S / 3 or seq_len >= longest:
            break
    seconds = _best_seconds(forward, device)
    both = _best_seconds(lambda: forward().backward(dout), device)
    operations = 2.0 * seq_len**2 * _HEADS * _HEAD_DIM
    return _AttentionRate(", ".join(t.backends), seq_len, operations / seconds, 3.5 * operations / both)


def _matrix_rate(device: torch.device) -> float:
    """Operations a second of the product of two square matrices."""
    n = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(n, n, device=device, dtype=_dtype(device)) for _ in range(2))
    torch.mm(a, b)  # the first product sets up the library
    return 2.0 * n**3 / _best_seconds(lambda: torch.mm(a, b), device)


def _copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy of 256 MiB (1 GiB on CUDA)."""
    n = (1 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.zeros(n, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2.0 * n / _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(run: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """The shortest of ``repeats`` runs."""
    times = []
    for _ in range(repeats):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# The link between two ranks


def _exchange_seconds(nbytes: int) -> float:
    """The shortest time of an exchange in which each of two ranks sends and receives ``nbytes``, as in a ring."""
    group = dist.group.WORLD
    assert group is not None
    peer = 1 - group.rank()
    send_buffer, recv_buffer = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    best = float("inf")
    for _ in range(_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        exchange([(peer, send_buffer)], [(peer, recv_buffer)], group).wait()
        best = min(best, time.perf_counter() - start)
    return best


def _link_worker() -> None:
    """One of the two ranks that ``_link`` starts: ``python -m seqpar.cli.doctor FILE``. Rank 0 writes the file."""
    follow_launcher()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _exchange_seconds(1 << 20)  # connects
    result = {"bytes_per_second": _LINK_BYTES / _exchange_seconds(_LINK_BYTES), "latency": _exchange_seconds(8)}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _link_worker()
