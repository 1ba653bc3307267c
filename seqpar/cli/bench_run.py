"""Measures the cases of ``seqpar bench`` in rounds. Each runner runs once a round: a slow machine slows all alike.

All ranks of a case make and run its runners together. If a runner fails on one rank, no rank runs it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from ..comm.trace import count_sent, trace
from ..ranks.mesh import Ranks, ranks_by_host
from .bench_cases import BenchCase, BenchConfig
from .bench_runners import BenchAttention, BenchRunner, BenchSetting, RefusalError, reference, runners
from .launch import CommandError, cores

FORWARD, BOTH = "forward", "forward + backward"
PASSES = (FORWARD, BOTH)
# The largest allowed relative error of an output or a gradient, in the 2-norm. One device has less than a tenth of it.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
_QUANTITIES = ("out", "dq", "dk", "dv")
_MIN_ROUNDS = 3
_TIMEOUT = timedelta(hours=4)  # ranks that a case does not use wait for its end
_PAUSE_S = 0.02  # until the threads of the previous run have stopped spinning

T = TypeVar("T")
Show = Callable[[str], None]  # shows a text to the user


@dataclass
class Sample:
    """The measurements of one runner. Each list has one entry per round, and all runners run in the same rounds."""

    name: str
    kind: str  # "ideal", "seqpar" or "peer"
    layout: str = ""
    backend: str = ""
    seconds: dict[str, list[float]] = field(default_factory=lambda: {x: [] for x in PASSES})  # of the slowest rank
    silent: dict[str, list[float]] = field(default_factory=lambda: {x: [] for x in PASSES})  # without messages
    cpu: list[float] = field(default_factory=list)  # CPU seconds of both passes, of all threads and ranks
    warmup_s: float = 0.0  # of the first run, which connects the ranks and compiles the kernels, and of its check
    bytes_sent: int = 0  # in both passes, by the rank that sends the most
    bytes_between_hosts: int = 0  # the same, to other hosts
    peak_memory: int = 0  # bytes above the inputs, on the rank with the largest
    error: float = 0.0  # the largest relative error of the output and the gradients
    chosen: str = ""  # by "auto"


@dataclass
class CaseResult:
    case: BenchCase
    samples: list[Sample]
    refused: dict[str, str]  # why a runner did not run, by its name
    # The ideal is the time of one process, divided by this number: by the ranks on CUDA, where each has its own device,
    # and by the hosts on a CPU, where one process has all cores of its host.
    divisor: int
    busy_share: float = 0.0  # of the cores, by other programs during the rounds


class Times(NamedTuple):
    """The seconds of one run."""

    forward: float
    both: float | None  # None without a backward
    cpu: float  # of all threads of this process


class CaseMeasurement:
    """Measures one case on this rank. All ranks of the case call each method together."""

    def __init__(self, setting: BenchSetting, config: BenchConfig, show: Show) -> None:
        case = setting.case
        self._setting, self._control, self._config = setting, setting.control, config
        self._show: Show = lambda text: show(f"{case}: {text}")
        self._rank = setting.control.rank()
        self._hosts = ranks_by_host(setting.group)
        self.result = CaseResult(case, [], {}, case.ranks if setting.device.type == "cuda" else len(self._hosts))
        # Only rank 0 has the attention and the inputs of an ideal.
        self._ready: list[tuple[Sample, BenchAttention | None, list[Tensor]]] = []

    def prepare(self) -> None:
        """Make and check every runner, and count its bytes and its memory."""
        case = self._setting.case
        self._show("reference")
        try:
            expected = self._expected()
        except RefusalError as error:
            raise CommandError(f"{case}: the reference cannot be computed: {error}") from error
        for runner in runners(self._config, case):
            try:
                self._add(runner, expected)
            except RefusalError as error:
                self.result.refused[runner.name] = str(error)

    def _gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self._control.size()
        dist.all_gather_object(values, value, group=self._control)
        return values

    def _together(self, make: Callable[[], Any], alone: bool = False) -> Any:
        """What ``make()`` returns on this rank. RefusalError on every rank if it raises an error on one of them.

        With ``alone`` only rank 0 calls it, and the others return None.
        """
        value, reason = None, None
        try:
            if self._rank == 0 or not alone:
                value = make()
        except RefusalError as error:
            reason = str(error)
        except Exception as error:
            first = (str(error).strip() or repr(error)).splitlines()[0]
            reason = f"{type(error).__name__}: {first[:200]}"
        for why in self._gather(reason):
            if why is not None:
                raise RefusalError(why)
        return value

    def _use_threads(self, alone: bool) -> None:
        """Share the cores among the ranks of a host; a runner that rank 0 runs alone has all of them."""
        torch.set_num_threads(max(1, cores() // (1 if alone else max(map(len, self._hosts)))))

    def _expected(self) -> list[Tensor]:
        """out, dq, dk and dv of the full sequence in float32, which rank 0 computes with all cores."""
        self._use_threads(alone=True)
        results = self._together(lambda: reference_results(self._setting), alone=True)
        if results is None:
            q, k, v, out = self._setting.case.shapes()
            results = [torch.empty(shape) for shape in (out, q, k, v)]
        for x in results:
            dist.broadcast(x, 0, group=self._control)
        return list(results)

    def _add(self, runner: BenchRunner, expected: list[Tensor]) -> None:
        """Make a runner, compare the results of its first run with ``expected``, and count its bytes and memory."""
        self._show(f"{runner.name}: first run")
        setting, alone = self._setting, runner.kind == "ideal"
        self._use_threads(alone)
        start = time.perf_counter()
        attention = self._together(lambda: runner.make(setting), alone)
        inputs = setting.inputs(attention.positions) if attention else []
        squares = self._together(lambda: _squared_errors(runner, attention, inputs, expected), alone)
        sample = Sample(runner.name, runner.kind, runner.layout, runner.backend, warmup_s=time.perf_counter() - start)
        error, norm = torch.tensor([x for x in self._gather(squares) if x], dtype=torch.float64).sum(0).unbind(1)
        relative = dict(zip(_QUANTITIES, (error / norm.clamp_min(1e-300)).sqrt().tolist(), strict=False))
        wrong = [quantity for quantity, error in relative.items() if not error <= TOLERANCES[setting.case.dtype]]
        if wrong:
            differences = ", ".join(f"{quantity} by {relative[quantity]:.1e}" for quantity in wrong)
            why = f"WRONG: differs from the result of one device: {differences}"
            if runner.kind != "peer" or "out" in wrong:
                raise RefusalError(why)
            attention = replace(attention, no_backward=why)  # the forward is right and is measured
        sample.error = max(error for quantity, error in relative.items() if quantity not in wrong)
        if attention and attention.no_backward:
            self.result.refused[f"{runner.name}, backward,"] = attention.no_backward
        counted = self._together(lambda: _count(runner, attention, inputs, setting.group), alone)
        sizes = [x[:3] for x in self._gather(counted) if x]
        sample.bytes_sent, sample.bytes_between_hosts, sample.peak_memory = map(max, zip(*sizes, strict=True))
        sample.chosen = counted[3] if counted else ""
        self._ready.append((sample, attention, inputs))
        self.result.samples.append(sample)

    def rounds(self, until: float) -> None:
        """Run at least three rounds, and more until rank 0's ``time.monotonic()`` would pass ``until``."""
        start, busy, cpu = time.perf_counter(), busy_seconds(), time.process_time()
        for number in range(self._config.rounds):
            turn = number % max(1, len(self._ready))
            round_start = time.monotonic()
            for sample, attention, inputs in self._ready[turn:] + self._ready[:turn]:
                self._show(f"round {number + 1} of {self._config.rounds}: {sample.name}")
                self._use_threads(sample.kind == "ideal")
                times = self._time(attention, inputs, sample.seconds)
                sample.cpu.append(sum(t.cpu for t in times))
                if attention and attention.silent:
                    silent = replace(attention.silent, no_backward=attention.no_backward)
                    self._time(silent, inputs, sample.silent)
            again = 2 * time.monotonic() - round_start < until or number + 1 < _MIN_ROUNDS
            if not self._gather(again)[0]:
                break
        by_rank = self._gather(time.process_time() - cpu)
        spent = sum(by_rank[rank] for rank in self._hosts[0])
        others = (busy_seconds() - busy - spent) / (time.perf_counter() - start)
        self.result.busy_share = max(0.0, others / (os.cpu_count() or 1))

    def _time(
        self, attention: BenchAttention | None, inputs: list[Tensor], seconds: dict[str, list[float]]
    ) -> list[Times]:
        """Run once, and append the times of the slowest rank to ``seconds``."""
        time.sleep(_PAUSE_S)
        dist.barrier(self._control)
        times = [t for t in self._gather(run_once(attention, inputs)[0] if attention else None) if t]
        seconds[FORWARD].append(max(t.forward for t in times))
        both = [t.both for t in times if t.both is not None]
        if both:
            seconds[BOTH].append(max(both))
        return times

    def write_traces(self, folder: Path) -> None:
        """Write a Chrome trace of one step of every runner on several ranks to ``folder``, on each rank."""
        cuda = self._setting.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        case = self.result.case
        for sample, attention, inputs in self._ready:
            if sample.kind == "ideal" or attention is None:
                continue
            self._show(f"{sample.name}: trace")
            self._use_threads(False)
            word = sample.name.replace(" ", "-").replace(",", "").replace("+", "and")
            dist.barrier(self._control)
            with profile(activities=activities) as profiler:
                self._together(partial(run_once, attention, inputs))
            file = folder / f"{case.preset}-{case.seq_len}-{word}-rank{self._rank}.json"
            profiler.export_chrome_trace(str(file))


def run_once(attention: BenchAttention, inputs: Sequence[Tensor]) -> tuple[Times, list[Tensor]]:
    """Run the forward, and the backward if there is one: the times, and out, dq, dk, dv or out alone.

    ``inputs``: q, k, v and dout of this rank's tokens; q, k and v require gradients.
    """
    q, k, v, dout = inputs
    backward = attention.no_backward is None
    marks, cpu = [_mark(q.device)], time.process_time()
    with attention.block(), torch.set_grad_enabled(backward):
        out = attention.attend(q, k, v)
        marks.append(_mark(q.device))
        if backward:
            out.backward(dout)
    marks.append(_mark(q.device))
    if q.device.type == "cuda":
        torch.cuda.synchronize(q.device)
    both = _between(marks[0], marks[2]) if backward else None
    times = Times(_between(*marks[:2]), both, time.process_time() - cpu)
    results = [out.detach()]
    for x in (q, k, v) if backward else ():
        assert x.grad is not None
        results.append(x.grad)
        x.grad = None
    return times, results


def _mark(device: torch.device) -> Any:
    """This moment in the stream of the device, for ``_between``."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    seconds: float = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
    return seconds


def reference_results(setting: BenchSetting) -> list[Tensor]:
    """out, dq, dk and dv of the full sequence in float32, from inputs that are rounded to the dtype of the case."""
    attention = reference(setting)
    inputs = [x.detach().float().requires_grad_(x.requires_grad) for x in setting.inputs(attention.positions)]
    return [x.contiguous().cpu() for x in run_once(attention, inputs)[1]]


def _squared_errors(
    runner: BenchRunner, attention: BenchAttention, inputs: list[Tensor], expected: list[Tensor]
) -> list[tuple[float, float]]:
    """Of out and each gradient: the squared error of this rank's rows, and the squared norm of the expected rows.

    ``expected``: out, dq, dk, dv of the full sequence. This is the first run, which is not timed.
    """
    with trace() as ran:
        _, results = run_once(attention, inputs)
    if runner.kind == "ideal" and runner.backend and runner.backend not in ran.backends:
        raise RefusalError(f"{runner.backend} does not support this call")
    pairs = []
    for result, full in zip(results, expected, strict=False):
        right = full.index_select(1, attention.positions.to(full.device)).to(torch.float64)
        wrong = result.to(right.device, torch.float64) - right
        pairs.append((float(wrong.square().sum()), float(right.square().sum())))
    return pairs


def _count(
    runner: BenchRunner, attention: BenchAttention, inputs: list[Tensor], ranks: Ranks
) -> tuple[int, int, int, str]:
    """Run once: bytes sent, bytes sent to other hosts, peak memory, and the strategy that "auto" chose.

    Messages of another package are counted among ``ranks``.
    """
    with trace() as sent, CountsMessages(ranks) if runner.kind == "peer" else nullcontext():
        memory = peak_memory(inputs[0].device, lambda: run_once(attention, inputs))
    return sent.bytes_sent, sent.bytes_between_hosts, memory, ", ".join(sent.chosen)


class CountsMessages(TorchDispatchMode):
    """Within its block, the bytes that torch.distributed's operators send are added to the open traces."""

    # Operators that send the full input to each rank, and operators that send an equal part of it to each rank.
    _TO_EACH = ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_")
    _DIVIDED = ("alltoall_base_", "alltoall_", "_reduce_scatter_base_", "reduce_scatter_", "dim_zero_all_to_all")

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, size = func.overloadpacket.__name__, self._ranks.size()
        if name == "send":
            count_sent(_nbytes(args[0]), self._ranks, args[2])
        elif name in self._TO_EACH and size > 1:
            count_sent(_nbytes(args[1]) * (size - 1), self._ranks, messages=size - 1)
        elif name in self._DIVIDED and size > 1:
            nbytes = _nbytes(args[0] if name == "dim_zero_all_to_all" else args[1])
            count_sent(nbytes * (size - 1) // size, self._ranks, messages=size - 1)
        return func(*args, **(kwargs or {}))


def _nbytes(x: Any) -> int:
    return x.nbytes if isinstance(x, Tensor) else sum(map(_nbytes, x))


def peak_memory(device: torch.device, run: Callable[[], object]) -> int:
    """The peak of memory in bytes while ``run`` runs, above the memory before.

    On CUDA the memory of tensors on the device. On a CPU, where torch does not count, the resident memory of the
    process: on Linux ``VmHWM``, which is reset here, elsewhere ``ru_maxrss``, the peak since the process started.
    """
    gc.collect()
    # The C library returns freed memory, which a run would otherwise reuse and so need less than it would alone.
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): set the peak to the current resident memory
    before = _peak(device)
    run()
    return max(0, _peak(device) - before)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):  # not Linux
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10  # KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, others KiB


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used; 0 if the operating system does not report them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def settings_of(cases: Sequence[BenchCase], device: torch.device) -> list[BenchSetting]:
    """The setting of each case. Cases on as many ranks share their groups. All ranks call this together."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

    world: Any = dist.group.WORLD
    alone = [dist.new_group([rank]) for rank in range(world.size())][world.rank()]
    made: dict[int, BenchSetting] = {}
    for case in cases:
        if case.ranks not in made:
            ranks = list(range(case.ranks))
            group = world if case.ranks == world.size() else dist.new_group(ranks)
            control = dist.new_group(ranks, backend="gloo", timeout=_TIMEOUT)
            fake = dist.new_group(ranks, backend="fake")
            made[case.ranks] = BenchSetting(case, device, group, alone, fake, control, world.size())
    return [replace(made[case.ranks], case=case) for case in cases]


def run_cases(config: BenchConfig, cases: Sequence[BenchCase], device: torch.device, show: Show) -> list[CaseResult]:
    """Measure all cases, one after another. All ranks call this together; ranks that a case does not use wait.

    Returns:
        The results of the cases in which this rank took part. Rank 0 has all of them.
    """
    start, settings = time.monotonic(), settings_of(cases, device)
    everyone = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    # A case takes time for its visible pairs, and as long as the pairs of 1,000 causal tokens for everything else.
    weights = [case.visible_pairs() + 5e5 for case in cases]
    results = []
    for i, setting in enumerate(settings):
        if dist.get_rank() < setting.case.ranks:
            share = weights[i] / sum(weights[i:])
            until = time.monotonic() + max(0.0, start + config.budget - time.monotonic()) * share
            measurement = CaseMeasurement(setting, config, show)
            measurement.prepare()
            measurement.rounds(until)
            if config.trace:
                measurement.write_traces(Path(config.out))
            results.append(measurement.result)
            torch.cuda.empty_cache()
        dist.barrier(everyone)
    return results
