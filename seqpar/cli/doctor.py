"""``seqpar doctor``: what this machine can run, how fast, and whether its ranks compute what one device computes.

Rates are in operations or bytes per second, from the fastest of a few runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
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

from ..checks import check_int
from ..comm.collectives import start_all_gather, start_all_to_all
from ..comm.p2p import exchange
from ..comm.trace import trace
from ..functional import attention
from ..kernels import BACKENDS, BackendName, backends
from ..layers import LocalAttention, MegatronAttention
from ..mask import Mask
from ..mesh import init_mesh, ranks_by_host
from ..planner.costs import cost_file, device_name
from ..planner.costs import measure as measure_costs
from ..sharding import Sharding
from ..strategies import STRATEGIES, compared_options
from .launch import FAILED, CommandError, bad_options, cores, launch, under_launcher
from .tables import human_bytes

_HEADS, _HEAD_DIM = 8, 64
_LONG_ENOUGH_S = 0.15  # a shorter run of attention would measure overheads more than the kernel
_REPEATS = 3
_RANKS_DEADLINE_S = 120.0

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
            report["ranks"] = check_up(measure, check)
            is_first = dist.get_rank() == 0
        else:
            with console.status("checking several ranks"):
                report["ranks"] = _check_ranks(measure, check, nproc)
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
    found = report.get("ranks")
    problems = [found] if isinstance(found, str) else [c.what for c in found.checks if not c.ok] if found else []
    if problems:
        raise CommandError(f"the self-check failed: {'; '.join(dict.fromkeys(problems))}", FAILED)


def examine() -> dict[str, Any]:
    """The versions, devices and attention backends of this machine, and what to install or upgrade."""
    versions = [_version(name, *tested) for name, tested in TESTED.items()]
    kernels = [asdict(status) for status in backends()]
    advice = [v["advice"] for v in versions if v["advice"]]
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
        "kernels": kernels,
        "install": advice,
    }


def _version(name: str, oldest: str, newest: str, extra: str) -> dict[str, str]:
    """The installed version of a package, the tested versions, and advice if they differ."""
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    try:
        found = platform.python_version() if name == "Python" else importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        how = f"pip install 'seqpar[{extra}]'" if extra else "comes with CUDA and ROCm builds of torch"
        return {"name": name, "version": "not installed", "tested": tested, "advice": f"{name}: {how}"}
    numbers = _numbers(found)
    advice = ""
    if numbers < _numbers(oldest):
        advice = f"{name} {found}: older than {oldest}, the oldest that the tests have run with; upgrade it"
    elif numbers > _numbers(newest):
        advice = f"{name} {found}: newer than {newest}, the newest that the tests have run with"
    return {"name": name, "version": found, "tested": tested, "advice": advice}


def _numbers(version: str) -> tuple[int, ...]:
    """The major and minor version as numbers, to compare."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])


def _devices() -> list[dict[str, Any]]:
    """The CPU and the GPUs of this machine, and for each GPU the other GPUs whose memory it can access."""
    found: list[dict[str, Any]] = [
        {
            "name": "CPU",
            "what": f"{device_name(torch.device('cpu'))}, {cores()} core(s) usable, "
            f"{torch.backends.cpu.get_cpu_capability()}",
        }
    ]
    count = torch.cuda.device_count()
    for i in range(count):
        p = torch.cuda.get_device_properties(i)
        peers = [j for j in range(count) if j != i and torch.cuda.can_device_access_peer(i, j)]
        what = f"{p.name}, {human_bytes(p.total_memory)}, compute capability {p.major}.{p.minor}"
        found.append({"name": f"cuda:{i}", "what": what, "peers": peers})
    return found


def _check_ranks(measure: bool, check: bool, nproc: int | None) -> Findings | str:
    """The findings of several ranks on this machine, or the message of the error that they ended with."""
    if not dist.is_gloo_available():
        return "this PyTorch is built without gloo"
    ranks = nproc or max(2, torch.cuda.device_count())
    try:
        return launch(check_up, ranks, measure, check, deadline_s=_RANKS_DEADLINE_S)[0]
    except CommandError as error:
        return str(error)


# Tables


def _print(console: Console, report: dict[str, Any]) -> None:
    """Print the report as tables."""
    software = _table("", "installed", "tested")
    for v in report["versions"]:
        software.add_row(v["name"], v["version"], v["tested"])
    software.add_row("build of torch", report["build"], "")
    available = ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in report["distributed"].items())
    software.add_row("distributed", available, "")
    _show(console, f"Software, {report['platform']}", software)
    devices = _table("", "")
    for d in report["devices"]:
        peers = d.get("peers")
        devices.add_row(d["name"], d["what"] + (f", can access the memory of {peers}" if peers else ""))
    if len(report["devices"]) == 1:
        devices.add_row("CUDA", "none")
    _show(console, "Devices", devices)
    kernels = _table("backend", "runs here")
    for k in report["kernels"]:
        kernels.add_row(k["name"], "[green]yes[/]" if k["available"] else f"[red]no[/]: {escape(str(k['reason']))}")
    _show(console, "Attention backends, best first", kernels)
    if (rates := report.get("rates")) is not None:
        table = _table("operation", "rate")
        for operation, rate in rates["operations"].items():
            table.add_row(operation, rate)
        _show(console, f"Measured now: {rates['device']}, {rates['dtype']}", table)
    found = report.get("ranks")
    if isinstance(found, str):
        console.print(f"\n[bold red]Several ranks failed[/]: {escape(found)}", highlight=False)
    elif found is not None:
        _print_findings(console, found)
    if report["install"]:
        console.print("\n[bold]To install or to upgrade[/]", highlight=False)
        for line in report["install"]:
            console.print(f"  {escape(line)}", highlight=False)


def _print_findings(console: Console, found: Findings) -> None:
    where = f"{found.ranks} rank(s) on {found.hosts} host(s), {found.backend}, {found.device}"
    if found.links:
        table = _table("each rank sends", *dict.fromkeys(link.operation for link in found.links))
        for size in dict.fromkeys(link.nbytes for link in found.links):
            cells = [
                f"{link.seconds * 1e6:,.0f} µs"
                + (f", {link.bytes_per_second / 1e9:.2f} GB/s" if size >= 1 << 10 else "")
                for link in found.links
                if link.nbytes == size
            ]
            table.add_row(human_bytes(size), *cells)
        _show(console, f"Messages among all ranks at once: {where}", table)
    if found.costs:
        console.print(f"costs stored for strategy 'auto': {found.costs}", highlight=False, soft_wrap=True)
    if found.checks:
        masks = list(dict.fromkeys(check.mask for check in found.checks))
        table = _table("relative error against float64", *masks)
        for what in dict.fromkeys(check.what for check in found.checks):
            by_mask = {check.mask: check for check in found.checks if check.what == what}
            table.add_row(what, *(_verdict(by_mask.get(mask)) for mask in masks))
        _show(console, f"Self-check, forward and backward: {where}", table)


def _verdict(check: Any) -> str:
    if check is None:
        return ""
    return f"[green]{check.error:.1e}[/]" if check.ok else f"[red]{escape(check.problem)}[/]"


def _show(console: Console, title: str, table: Table) -> None:
    console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _rates() -> dict[str, Any]:
    """The rates of this process's device as texts with units."""
    torch.set_num_threads(cores())
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found = {"matrix product": _flops(_matrix_rate(device))}
    for name, backend in BACKENDS.items():
        if backend.unavailable() is not None:
            continue
        try:
            rate = _attention_rate(cast("BackendName", name), device)
        except (RuntimeError, MemoryError) as error:
            found[f"attention, {name}"] = f"failed: {str(error).splitlines()[0]}"
            continue
        if rate.ran != name:
            found[f"attention, {name}"] = f"does not support this call; {rate.ran} ran instead"
            continue
        found[f"attention, {name}: causal, {rate.seq_len:,} tokens, {_HEADS} heads of {_HEAD_DIM}"] = (
            f"forward {_flops(rate.forward)}, forward and backward {_flops(rate.forward_backward)}"
        )
    found["memory copy"] = f"{_copy_rate(device) / 1e9:.1f} GB/s, read and written"
    threads = "" if device.type == "cuda" else f", {cores()} thread(s)"
    return {
        "device": f"{device_name(device)}{threads}",
        "dtype": str(_dtype(device)).removeprefix("torch."),
        "operations": found,
    }


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.2f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.1f} GFLOP/s"


# Measurements on one device


@dataclass(frozen=True)
class _AttentionRate:
    """The rate of an attention backend.

    Attributes:
        ran: the backend that ran. It is not the one that was asked for if that one does not support the call.
        seq_len: tokens of the sequence.
        forward: operations per second in the forward.
        forward_backward: operations per second in forward and backward together.
    """

    ran: str
    seq_len: int
    forward: float
    forward_backward: float


def _dtype(device: torch.device) -> torch.dtype:
    """The dtype in which the device is measured."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


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
    """Operations per second of the product of two square matrices."""
    n = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(n, n, device=device, dtype=_dtype(device)) for _ in range(2))
    torch.mm(a, b)  # the first product sets up the library
    return 2.0 * n**3 / _best_seconds(lambda: torch.mm(a, b), device)


def _copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written together, of a copy of 256 MiB (1 GiB on CUDA)."""
    n = (1 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.zeros(n, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2.0 * n / _best_seconds(lambda: target.copy_(source), device)


def _best_seconds(run: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Seconds of the fastest of ``repeats`` runs."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


_TIMEOUT = timedelta(seconds=60)  # of one collective
_SIZES = (8, 1 << 10, 32 << 10, 1 << 20, 32 << 20)  # bytes that each rank sends
_LINK_REPEATS = 5
_BATCH, _KV_HEADS, _HIDDEN = 2, 2, 64
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
        costs: the file in which the costs for ``strategy="auto"`` are stored; None if they were not measured.
    """

    ranks: int
    hosts: int
    backend: str
    device: str
    links: list[Link]
    checks: list[Check]
    costs: str | None = None


def check_up(measure: bool, check: bool) -> Findings:
    """Measure the links and compare the strategies. All ranks of the job call this together.

    Args:
        measure: whether to measure the links, and the costs for ``strategy="auto"``.
        check: whether to compare the strategies.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    init_mesh(ring=-1, device_type="cuda" if cuda else "cpu", timeout=_TIMEOUT)
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    costs = None
    if measure and group.size() > 1:
        costs = cost_file(device, ranks_by_host(group))
        measure_costs(group, device, costs)
    else:
        os.environ["SEQPAR_MEASURE"] = "0"  # so that ``strategy="auto"`` does not measure either
    return Findings(
        group.size(),
        len(ranks_by_host(group)),
        "nccl" if cuda else "gloo",
        device.type,
        list(measure_links(group, device)) if measure and group.size() > 1 else [],
        list(compare(group, device)) if check else [],
        str(costs) if costs is not None and costs.exists() else None,
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
    for number in range(_LINK_REPEATS + 1):
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
