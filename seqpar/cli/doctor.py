"""``seqpar doctor``: what this machine can run, how fast, and whether its ranks compute what one device computes.

Rates are in operations or bytes per second, from the fastest of a few runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from ..checks import check_int
from ..comm.nccl import nccl_problems, nccl_report, nccl_version
from ..comm.trace import trace
from ..functional import attention
from ..kernels import BACKENDS, BackendName, backends
from ..startup import LAUNCH_ORDER
from .doctor_ranks import HEAD_DIM, HEADS, Check, Link, RankReport, examine_ranks, measured_dtype, synchronize
from .launch import FAILED, CommandError, bad_options, cores, launch, under_launcher
from .tables import device_name, human_bytes

# For each package: the oldest and the newest release that the tests have run with, and the extra of seqpar that
# installs it.
TESTED: dict[str, tuple[str, str, str]] = {
    "Python": ("3.10", "3.13", ""),
    "torch": ("2.11", "2.13", ""),
    "triton": ("3.6", "3.9", ""),
    "transformers": ("5.17", "5.23", "hf"),
    "accelerate": ("1.15", "1.15", "hf"),
    "peft": ("0.21", "0.21", "hf"),
}
_DEADLINE_S = 120.0  # of the ranks that the command starts


def doctor(
    measure: Annotated[bool, typer.Option(help="Measure rates and links.")] = True,
    check: Annotated[
        bool, typer.Option(help="Compare every strategy on several ranks with one device in float64.")
    ] = True,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks to start on this machine.", show_default="one per GPU, at least 2")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show what this machine can run, how fast, and whether its results are right. Takes a minute.

    The command fails if a result is wrong. Under torchrun, it measures and compares torchrun's ranks, on one or more
    hosts.
    """
    with bad_options():
        check_int("nproc", 2 if nproc is None else nproc, 1)
    report = examine()
    is_first = True
    if measure or check:
        console = Console(stderr=True)
        if under_launcher():
            report["ranks"] = examine_ranks(measure, check)
            is_first = dist.get_rank() == 0
        else:
            with console.status("checking several ranks"):
                report["ranks"] = _start_ranks(measure, check, nproc)
        if measure and is_first:
            with console.status("measuring"):
                report["rates"] = _rates()
        if under_launcher():
            dist.barrier()
            dist.destroy_process_group()
    if is_first:
        if as_json:
            typer.echo(json.dumps(report, indent=2, default=asdict))
        else:
            _print(Console(), report)
    ranks = report.get("ranks")
    problems = [ranks] if isinstance(ranks, str) else [c.what for c in ranks.checks if not c.ok] if ranks else []
    if problems:
        raise CommandError(f"the self-check failed: {'; '.join(dict.fromkeys(problems))}", FAILED)


# This machine


def examine() -> dict[str, Any]:
    """The versions, devices and attention backends of this machine, and what to install or upgrade."""
    versions = [_version(name, *tested) for name, tested in TESTED.items()]
    kernels = [asdict(status) for status in backends()]
    advice = [v["advice"] for v in versions if v["advice"]]
    advice += nccl_problems(nccl_version(), {LAUNCH_ORDER: "1", **os.environ})
    advice += [reason for k in kernels if (reason := k["reason"]) and "pip install" in reason]
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "distributed": {
            "gloo": dist.is_gloo_available(),
            "nccl": dist.is_nccl_available(),
            "mpi": dist.is_mpi_available(),
        },
        "build": torch.version.cuda or torch.version.hip or "CPU only",
        "devices": _devices(),
        "nccl": nccl_report(),
        "kernels": kernels,
        "install": advice,
    }


def _version(name: str, oldest: str, newest: str, extra: str) -> dict[str, str]:
    """The installed version of a package, the tested versions, and advice if they differ."""
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    try:
        version = platform.python_version() if name == "Python" else importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        how = f"pip install 'seqpar[{extra}]'" if extra else "comes with CUDA and ROCm builds of torch"
        return {"name": name, "version": "not installed", "tested": tested, "advice": f"{name}: {how}"}
    numbers = _major_and_minor(version)
    advice = ""
    if numbers < _major_and_minor(oldest):
        advice = f"{name} {version}: older than {oldest}, the oldest that the tests have run with; upgrade it"
    elif numbers > _major_and_minor(newest):
        advice = f"{name} {version}: newer than {newest}, the newest that the tests have run with"
    return {"name": name, "version": version, "tested": tested, "advice": advice}


def _major_and_minor(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])


def _devices() -> list[dict[str, Any]]:
    """The CPU and the GPUs of this machine, and for each GPU the other GPUs whose memory it can access."""
    cpu = f"{device_name(torch.device('cpu'))}, {cores()} core(s) usable, {torch.backends.cpu.get_cpu_capability()}"
    devices: list[dict[str, Any]] = [{"name": "CPU", "what": cpu}]
    count = torch.cuda.device_count()
    for i in range(count):
        p = torch.cuda.get_device_properties(i)
        peers = [j for j in range(count) if j != i and torch.cuda.can_device_access_peer(i, j)]
        what = f"{p.name}, {human_bytes(p.total_memory)}, compute capability {p.major}.{p.minor}"
        devices.append({"name": f"cuda:{i}", "what": what, "peers": peers})
    return devices


# Rates of one device

_LONG_ENOUGH_S = 0.15  # a shorter run of attention would measure overheads more than the kernel


@dataclass(frozen=True)
class _AttentionRate:
    ran: str  # the backend; another one than was asked for, if that one does not support the call
    seq_len: int
    forward: float  # operations per second
    forward_backward: float  # of both together


def _rates() -> dict[str, Any]:
    """The rates of this process's device as texts with units."""
    torch.set_num_threads(cores())
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    operations = {"matrix product": _flops(_matrix_rate(device))}
    for name, backend in BACKENDS.items():
        if backend.unavailable() is not None:
            continue
        try:
            rate = _attention_rate(cast("BackendName", name), device)
        except (RuntimeError, MemoryError) as error:
            operations[f"attention, {name}"] = f"failed: {str(error).splitlines()[0]}"
            continue
        if rate.ran != name:
            operations[f"attention, {name}"] = f"does not support this call; {rate.ran} ran instead"
            continue
        operations[f"attention, {name}: causal, {rate.seq_len:,} tokens, {HEADS} heads of {HEAD_DIM}"] = (
            f"forward {_flops(rate.forward)}, forward and backward {_flops(rate.forward_backward)}"
        )
    operations["memory copy"] = f"{_copy_rate(device) / 1e9:.1f} GB/s, read and written"
    threads = "" if device.type == "cuda" else f", {cores()} thread(s)"
    return {
        "device": f"{device_name(device)}{threads}",
        "dtype": str(measured_dtype(device)).removeprefix("torch."),
        "operations": operations,
    }


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.2f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


def _attention_rate(backend: BackendName, device: torch.device) -> _AttentionRate:
    """The rate of causal attention with 8 heads of head_dim 64.

    The sequence has the first length of 512, 1,024, 2,048, ... whose forward takes long enough to be measured. A
    forward counts as ``2 * seq_len**2 * 8 * 64`` operations, half as many as with a full mask. A backward counts as 2.5
    times that.
    """
    longest = 32768 if device.type == "cuda" else 8192
    seq_len = 256
    while True:
        seq_len *= 2
        shape = (1, seq_len, HEADS, HEAD_DIM)  # [batch, seq, heads, head_dim]
        q, k, v = (
            torch.randn(shape, device=device, dtype=measured_dtype(device), requires_grad=True) for _ in range(3)
        )
        dout = torch.randn_like(q)

        def forward() -> Tensor:
            return attention(q, k, v, strategy="local", backend=backend)  # noqa: B023 (called before the next round)

        with trace() as t:
            forward()  # compiles kernels and fills caches
        if _best_seconds(forward, device, 1) > _LONG_ENOUGH_S / 3 or seq_len >= longest:
            break
    seconds = _best_seconds(forward, device)
    both = _best_seconds(lambda: forward().backward(dout), device)
    operations = 2.0 * seq_len**2 * HEADS * HEAD_DIM
    return _AttentionRate(", ".join(t.backends), seq_len, operations / seconds, 3.5 * operations / both)


def _matrix_rate(device: torch.device) -> float:
    """Operations per second of the product of two square matrices."""
    n = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(n, n, device=device, dtype=measured_dtype(device)) for _ in range(2))
    torch.mm(a, b)  # the first product sets up the library
    return 2.0 * n**3 / _best_seconds(lambda: torch.mm(a, b), device)


def _copy_rate(device: torch.device) -> float:
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


def _start_ranks(measure: bool, check: bool, nproc: int | None) -> RankReport | str:
    """The report of several ranks on this machine, or the message of the error that they ended with."""
    if not dist.is_gloo_available():
        return "this PyTorch is built without gloo"
    ranks = nproc or max(2, torch.cuda.device_count())
    try:
        return launch(examine_ranks, ranks, measure, check, deadline_s=_DEADLINE_S)[0]
    except CommandError as error:
        return str(error)


# Tables


def _print(console: Console, report: dict[str, Any]) -> None:
    for title, columns, rows in _tables(report):
        table = Table(show_header=any(columns))
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
        console.print(table)
    if isinstance(ranks := report.get("ranks"), str):
        console.print(f"\n[bold red]Several ranks failed[/]: {escape(ranks)}", highlight=False)
    if report["install"]:
        console.print("\n[bold]To install or to upgrade[/]", highlight=False)
        for line in report["install"]:
            console.print(f"  {escape(line)}", highlight=False)


def _tables(report: dict[str, Any]) -> Iterator[tuple[str, Sequence[str], Sequence[tuple[str, ...]]]]:
    """Yields titles, columns and rows."""
    versions = [(v["name"], v["version"], v["tested"]) for v in report["versions"]]
    available = ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in report["distributed"].items())
    versions += [("build of torch", report["build"], ""), ("distributed", available, "")]
    yield f"Software, {report['platform']}", ("", "installed", "tested"), versions
    devices = [
        (d["name"], d["what"] + (f", can access the memory of {d['peers']}" if d.get("peers") else ""))
        for d in report["devices"]
    ]
    yield "Devices", ("", ""), devices if len(devices) > 1 else [*devices, ("CUDA", "none")]
    yield "Communicators on GPUs (NCCL)", ("", ""), list(report["nccl"].items())
    kernels = [
        (k["name"], "[green]yes[/]" if k["available"] else f"[red]no[/]: {escape(str(k['reason']))}")
        for k in report["kernels"]
    ]
    yield "Attention backends, best first", ("backend", "runs here"), kernels
    if (rates := report.get("rates")) is not None:
        title = f"Measured now: {rates['device']}, {rates['dtype']}"
        yield title, ("operation", "rate"), list(rates["operations"].items())
    ranks = report.get("ranks")
    if not isinstance(ranks, RankReport):
        return
    where = f"{ranks.ranks} rank(s) on {ranks.hosts} host(s), {ranks.backend}, {ranks.device}"
    operations = dict.fromkeys(link.operation for link in ranks.links)
    cells = {(link.nbytes, link.operation): _link(link) for link in ranks.links}
    if ranks.links:
        sizes = dict.fromkeys(link.nbytes for link in ranks.links)
        links = [(human_bytes(size), *(cells[size, operation] for operation in operations)) for size in sizes]
        yield f"Messages among all ranks at once: {where}", ("each rank sends", *operations), links
    if ranks.checks:
        verdicts = {(check.what, check.mask): _verdict(check) for check in ranks.checks}
        masks, names = (dict.fromkeys(key[i] for key in verdicts) for i in (1, 0))
        checks = [(name, *(verdicts.get((name, mask), "") for mask in masks)) for name in names]
        yield f"Self-check, forward and backward: {where}", ("relative error against float64", *masks), checks


def _link(link: Link) -> str:
    rate = f", {link.bytes_per_second / 1e9:.2f} GB/s" if link.nbytes >= 1 << 10 else ""
    return f"{link.seconds * 1e6:,.0f} µs{rate}"


def _verdict(check: Check) -> str:
    return f"[green]{check.error:.1e}[/]" if check.problem is None else f"[red]{escape(check.problem)}[/]"
