"""``seqpar doctor``: what this machine can run, how fast, and whether its ranks compute what one device computes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.checks import check_int
from ..comm.nccl import nccl_problems, nccl_report, nccl_version
from ..comm.shared_memory import shared_memory
from ..functional import attention
from ..kernels import BACKENDS, ONLY_BY_NAME, BackendName, backends
from ..layers import LocalAttention
from ..masks.mask import Mask
from ..placement.strategies import STRATEGIES, compared_options
from ..planner import HARDWARE
from ..planner.code import KERNELS
from ..ranks.mesh import ranks_by_host
from ..ranks.startup import LAUNCH_ORDER
from ..sharding.sharding import Sharding
from .launch import FAILED, CommandError, bad_options, cores, join, launch, this_device, under_launcher
from .libraries import cudnn
from .measure import (
    HEAD_DIM,
    HEADS,
    MeasuredLink,
    attention_rate,
    copy_rate,
    gather,
    matrix_rate,
    measure_links,
    measured_dtype,
    sdpa_backend,
)
from .tables import device_name, human_bytes

# For each package: the oldest and the newest release that the tests have run with (`make compat` for the oldest of
# Hugging Face's packages), and the extra of seqpar that installs it.
TESTED: dict[str, tuple[str, str, str]] = {
    "Python": ("3.10", "3.13", ""),
    "torch": ("2.11", "2.15", ""),
    "triton": ("3.6", "3.9", ""),
    "transformers": ("5.23", "5.24", "hf"),
    "accelerate": ("1.12", "1.15", "hf"),
    "peft": ("0.18", "0.21", "hf"),
}
_DEADLINE_S = 120.0  # of the ranks that the command starts
_TIMEOUT = timedelta(seconds=60)  # of one collective
# The largest allowed relative error of a result against float64, in the 2-norm. Rounding causes less than a fifth.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


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
    backend: str  # what carries messages: "nccl", "gloo", or "gloo and shared memory" (for attention's messages)
    device: str  # "cuda" or "cpu"
    links: list[MeasuredLink]  # one for each operation and size; empty with one rank
    checks: list[Check]  # one for each strategy and mask


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
    of_cudnn = cudnn()
    advice += of_cudnn.problems
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
        "cudnn": of_cudnn,
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


def _rates() -> dict[str, Any]:
    """The rates of this process's device as texts with units."""
    torch.set_num_threads(cores())
    device = this_device()
    operations = {"matrix product": _flops(matrix_rate(device))}
    for name, backend in BACKENDS.items():
        if backend.unavailable() is not None or name in ONLY_BY_NAME:
            continue
        try:
            rate = attention_rate(cast("BackendName", name), device)
        except (RuntimeError, MemoryError) as error:
            operations[f"attention, {name}"] = f"failed: {str(error).splitlines()[0]}"
            continue
        if rate.ran != name:
            operations[f"attention, {name}"] = f"does not support this call; {rate.ran} ran instead"
            continue
        what = f"attention, {name}: causal, {rate.seq_len:,} tokens, {HEADS} heads of {rate.head_dim}"
        operations[what] = _both(rate.forward, rate.forward_backward) + in_table(name, device_name(device))
    try:
        operations["scaled_dot_product_attention runs"] = sdpa_backend(device)
    except (RuntimeError, MemoryError) as error:
        operations["scaled_dot_product_attention"] = f"failed: {str(error).splitlines()[0]}"
    operations["memory copy"] = f"{copy_rate(device) / 1e9:.1f} GB/s, read and written"
    threads = "" if device.type == "cuda" else f", {cores()} thread(s)"
    return {
        "device": f"{device_name(device)}{threads}",
        "dtype": str(measured_dtype(device)).removeprefix("torch."),
        "operations": operations,
    }


def in_table(backend: str, gpu: str) -> str:
    """The rates of a backend in the planner's table, if it has this GPU, as the end of a text."""
    found = next((name for name in HARDWARE if re.search(rf"\b{name}\b", gpu, re.IGNORECASE)), None)
    rate = None if found is None else HARDWARE[found].attention.get(KERNELS.get(backend, backend))
    if found is None or rate is None:
        return ""
    together = 3.5 / (1 / rate.forward + 2.5 / rate.backward)
    return f"; in the planner's table, for long sequences on {found.upper()}: {_both(rate.forward, together)}"


def _both(forward: float, together: float) -> str:
    return f"forward {_flops(forward)}, forward and backward {_flops(together)}"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.2f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


# Several ranks


def _start_ranks(measure: bool, check: bool, nproc: int | None) -> RankReport | str:
    if not dist.is_gloo_available():
        return "this PyTorch is built without gloo"
    ranks = nproc or max(2, torch.cuda.device_count())
    try:
        return launch(examine_ranks, ranks, measure, check, deadline_s=_DEADLINE_S)[0]
    except CommandError as error:
        return str(error)


def examine_ranks(measure: bool, check: bool) -> RankReport:
    """Measure the links and compare the strategies. All ranks of the job call this together."""
    device, group = join(_TIMEOUT), dist.group.WORLD
    assert group is not None
    shares_memory = group.size() > 1 and shared_memory(group, device) is not None
    return RankReport(
        group.size(),
        len(ranks_by_host(group)),
        "nccl" if device.type == "cuda" else "gloo and shared memory" if shares_memory else "gloo",
        device.type,
        list(measure_links(group, device)) if measure and group.size() > 1 else [],
        list(compare(group, device)) if check else [],
    )


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
        if backend.unavailable() is None and name not in ONLY_BY_NAME:
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
    from ..megatron import MegatronAttention  # it imports DTensor, which takes as long as torch

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
        wrong, norm = (sum(gather(x, group, device)) for x in squares)
        errors[name] = (wrong / max(norm, 1e-300)) ** 0.5
    bad = [f"{name} differs by {x:.1e}" for name, x in errors.items() if not x <= tolerance]
    return Check(what, mask, max(errors.values()), tolerance, "; ".join(bad) or None)


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
    versions += [
        ("build of torch", report["build"], ""), ("cuDNN, loaded", str(report["cudnn"]), ""),
        ("distributed", available, ""),
    ]  # fmt: skip
    yield f"Software, {report['platform']}", ("", "installed", "tested"), versions
    devices = [
        (d["name"], d["what"] + (f", can access the memory of {d['peers']}" if d.get("peers") else ""))
        for d in report["devices"]
    ]
    yield "Devices", ("", ""), devices if len(devices) > 1 else [*devices, ("CUDA", "none")]
    if len(devices) > 1:
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


def _link(link: MeasuredLink) -> str:
    rate = f", {link.bytes_per_second / 1e9:.2f} GB/s" if link.nbytes >= 1 << 10 else ""
    return f"{link.seconds * 1e6:,.0f} µs{rate}"


def _verdict(check: Check) -> str:
    return f"[green]{check.error:.1e}[/]" if check.problem is None else f"[red]{escape(check.problem)}[/]"
