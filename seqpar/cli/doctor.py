"""``seqpar doctor``: what this machine can run, and how well."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from ..kernels import BACKENDS, backends
from .errors import CommandError
from .launch import cores, launch
from .measure import attention_rate, copy_rate, matrix_rate
from .report import human_bytes

_LINK_DEADLINE_S = 15.0


def doctor(
    measure: Annotated[bool, typer.Option(help="Measure rates, not only list what there is.")] = True,
) -> None:
    """Show what this machine can run and how well: versions, devices, backends, measured rates. Takes seconds."""
    console = Console()
    torch.set_num_threads(cores())
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    _print(console, "Software", _software())
    _print(console, "Devices", _devices())
    _print(console, "Attention backends, best first", _backends())
    if measure:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {cores()} thread(s)"
        kind = "bfloat16" if device.type == "cuda" else "float32"
        with console.status("measuring"):
            table = _measured(device)
        _print(console, f"Measured now: {name}, {kind}", table)


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
    for name in ("triton", "flash-attn", "transformers"):
        table.add_row(name, _version(name))
    have = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    table.add_row("distributed", ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in have.items()))
    return table


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Table:
    table = _table()
    table.add_row("CPU", f"{_cpu_name()}, {cores()} core(s) usable, {torch.backends.cpu.get_cpu_capability()}")
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        table.add_row(f"cuda:{i}", f"{p.name}, {human_bytes(p.total_memory)}, compute capability {p.major}.{p.minor}")
    if not torch.cuda.device_count():
        table.add_row("CUDA", "none")
    return table


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _backends() -> Table:
    table = _table("backend", "runs here")
    for status in backends():
        table.add_row(status.name, "[green]yes[/]" if status.available else f"[red]no[/]: {status.reason}")
    return table


def _measured(device: torch.device) -> Table:
    table = _table("what", "rate")
    matrix = matrix_rate(device)
    table.add_row("matrix product", f"{_flops(matrix)}")
    for backend in BACKENDS:
        if BACKENDS[backend].unavailable() is not None:
            continue
        try:
            rate = attention_rate(backend, device)
        except (RuntimeError, MemoryError) as error:
            table.add_row(f"attention, {backend}", f"failed: {str(error).splitlines()[0]}")
            continue
        if rate.ran != backend:
            table.add_row(f"attention, {backend}", f"leaves this request to {rate.ran}")
            continue
        table.add_row(
            f"attention, {backend}\n  causal, {rate.seq_len:,} tokens, 8 heads of 64",
            f"forward {_flops(rate.forward)}\nforward and backward {_flops(rate.forward_backward)}",
        )
    table.add_row("memory copy", f"{copy_rate(device) / 1e9:.1f} GB/s, read and written")
    table.add_row("gloo over loopback\n  2 processes, both ways at once", _link())
    return table


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.2f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


def _link() -> str:
    if not dist.is_gloo_available():
        return "gloo is not in this PyTorch"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "link.json"
        try:
            launch(["-m", "seqpar.cli.link", str(file)], 2, _LINK_DEADLINE_S)
        except CommandError as error:
            return f"failed: {error}"
        result = json.loads(file.read_text())
    return f"{result['bytes_per_second'] / 1e9:.2f} GB/s each way\n{result['latency'] * 1e6:.0f} µs for 8 bytes"
