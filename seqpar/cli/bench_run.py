"""Measures the cases of ``seqpar bench`` in rounds. Each runner runs once a round: a slow machine slows all alike.

All ranks of a case make and run its runners together. If a runner fails on one rank, no rank runs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

from ..kernels import BACKENDS
from ..ranks.mesh import ranks_by_host
from .bench_cases import BenchCase, BenchConfig
from .bench_runners import (
    BenchSetting,
    RefusalError,
    Runner,
    Times,
    local_runner,
    mixer_runner,
    peer_runner,
    reference,
    sdpa_runner,
    strategy_runner,
)
from .launch import cores

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


@dataclass(frozen=True)
class Groups:
    """Groups of the first ``n`` ranks."""

    group: ProcessGroup  # attention communicates in it
    control: ProcessGroup  # gloo: the ranks coordinate the measurement
    fake: ProcessGroup  # its messages take no time
    alone: ProcessGroup  # this rank only

    @staticmethod
    def make(sizes: Sequence[int]) -> dict[int, Groups]:
        """The groups of the first ``n`` ranks, for each n in ``sizes``. All ranks call this together."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

        world: Any = dist.group.WORLD
        alone = [dist.new_group([rank]) for rank in range(world.size())][world.rank()]
        groups = {}
        for n in sizes:
            ranks = list(range(n))
            group = world if n == world.size() else dist.new_group(ranks)
            control = dist.new_group(ranks, backend="gloo", timeout=_TIMEOUT)
            groups[n] = Groups(group, control, dist.new_group(ranks, backend="fake"), alone)
        return groups

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.control.size()
        dist.all_gather_object(values, value, group=self.control)
        return values

    def together(self, make: Callable[[], T]) -> tuple[T | None, str | None]:
        """What ``make()`` returns on this rank, and None; or None and the error, if it raises one on any rank."""
        value, reason = None, None
        try:
            value = make()
        except RefusalError as error:
            reason = str(error)
        except Exception as error:
            first = (str(error).strip() or repr(error)).splitlines()[0]
            reason = f"{type(error).__name__}: {first[:200]}"
        reasons = [r for r in self.gather(reason) if r is not None]
        return (None, reasons[0]) if reasons else (value, None)


class CaseMeasurement:
    """Measures one case on this rank. All ranks of the case call each method together."""

    def __init__(self, case: BenchCase, groups: Groups, device: torch.device, config: BenchConfig, show: Show) -> None:
        self._config, self._groups = config, groups
        self._show: Show = lambda text: show(f"{case}: {text}")
        self._setting = BenchSetting(case, groups.group, groups.alone, dist.get_world_size(), device)
        self._rank = groups.control.rank()
        self._hosts = ranks_by_host(groups.group)
        self._ranks_per_host = max(map(len, self._hosts))  # they share the cores
        self.result = CaseResult(case, [], {}, case.ranks if device.type == "cuda" else len(self._hosts))
        self._runners: list[tuple[Runner | None, Sample]] = []  # None: only rank 0 runs it

    def prepare(self, peers: dict[str, Any]) -> None:
        """Make and check every runner, and count its bytes and its memory. ``peers``: adapters by name."""
        self._show("reference")
        setting = self._setting
        expected, reason = self._groups.together(self._reference)
        if expected is None:
            raise RuntimeError(f"{setting.case}: the reference cannot be computed: {reason}")
        if setting.case.mixer:
            peers = {}
            self._add("linear attention", "ideal", partial(mixer_runner, setting), expected)
        else:
            self._add("SDPA", "ideal", partial(sdpa_runner, setting), expected)
            for backend, status in BACKENDS.items():
                if backend != "reference" and status.unavailable() is None:
                    self._add(f"local {backend}", "ideal", partial(local_runner, setting, backend), expected)
        for strategy in self._config.strategies(setting.case.preset, setting.case.ranks):
            self._add(strategy.name, "seqpar", partial(strategy_runner, setting, strategy), expected)
        for module in peers.values():
            self._add(module.NAME, "peer", partial(peer_runner, setting, module, self._groups.fake), expected)

    def _reference(self) -> list[Tensor]:
        """out, dq, dk and dv of the full sequence, which rank 0 computes with all cores and broadcasts."""
        self._use_threads(alone=self._rank == 0)
        if self._rank == 0:
            results = [x.contiguous().cpu() for x in reference(self._setting)]
        else:
            q, k, v, out = self._setting.case.shapes()
            results = [torch.empty(shape) for shape in (out, q, k, v)]
        for x in results:
            dist.broadcast(x, 0, group=self._groups.control)
        return results

    def _add(self, name: str, kind: str, make: Callable[[], Runner], expected: list[Tensor]) -> None:
        """Make a runner, compare the results of its first run with ``expected``, and count its bytes and memory."""
        self._show(f"{name}: first run")
        refused, groups = self.result.refused, self._groups
        alone = kind == "ideal"
        self._use_threads(alone)
        start = time.perf_counter()
        runner, reason = groups.together(lambda: make() if self._rank == 0 or not alone else None)
        if reason is None:
            errors, reason = groups.together(lambda: runner.errors(expected) if runner else [])
        if reason is not None:
            refused[name] = reason
            return
        sample = Sample(name, kind, warmup_s=time.perf_counter() - start)
        relative = _relative_errors([e for e in groups.gather(errors) if e])
        wrong = [quantity for quantity, error in relative.items() if not error <= TOLERANCES[self.result.case.dtype]]
        if wrong:
            differences = ", ".join(f"{quantity} by {relative[quantity]:.1e}" for quantity in wrong)
            why = f"WRONG: differs from the result of one device: {differences}"
            if kind != "peer" or "out" in wrong:
                refused[name] = why
                return
            assert runner is not None
            runner.no_backward = why  # the forward is right and is measured
        sample.error = max(error for quantity, error in relative.items() if quantity not in wrong)
        if runner is not None:
            sample.layout, sample.backend = runner.layout, runner.backend
            if runner.no_backward is not None:
                refused[f"{name}, backward,"] = runner.no_backward
        peer_ranks = groups.group if kind == "peer" else None
        counted, reason = groups.together(lambda: runner.count(peer_ranks) if runner else (0, 0, 0, ""))
        if counted is None:
            refused[name] = str(reason)
            return
        *sizes, sample.chosen = counted
        largest = [max(column) for column in zip(*groups.gather(sizes), strict=True)]
        sample.bytes_sent, sample.bytes_between_hosts, sample.peak_memory = largest
        self._runners.append((runner, sample))
        self.result.samples.append(sample)

    def _use_threads(self, alone: bool) -> None:
        """Share the cores among the ranks of a host; a runner that rank 0 runs alone has all of them."""
        torch.set_num_threads(max(1, cores() // (1 if alone else self._ranks_per_host)))

    def rounds(self, until: float) -> None:
        """Run at least three rounds, and more until rank 0's ``time.monotonic()`` would pass ``until``."""
        start, busy, cpu = time.perf_counter(), busy_seconds(), time.process_time()
        for number in range(self._config.rounds):
            turn = number % max(1, len(self._runners))
            round_start = time.monotonic()
            for runner, sample in self._runners[turn:] + self._runners[:turn]:
                self._show(f"round {number + 1} of {self._config.rounds}: {sample.name}")
                self._run_once(runner, sample)
            again = 2 * time.monotonic() - round_start < until or number + 1 < _MIN_ROUNDS
            if not self._groups.gather(again)[0]:
                break
        by_rank = self._groups.gather(time.process_time() - cpu)
        spent = sum(by_rank[rank] for rank in self._hosts[0])
        others = (busy_seconds() - busy - spent) / (time.perf_counter() - start)
        self.result.busy_share = max(0.0, others / (os.cpu_count() or 1))

    def _run_once(self, runner: Runner | None, sample: Sample) -> None:
        """Run once with and once without messages, and append the times of the slowest rank to ``sample``."""
        self._use_threads(sample.kind == "ideal")
        has_backward = runner is None or runner.no_backward is None
        times = self._timed(lambda: runner.run()[0] if runner else None)
        sample.cpu.append(sum(t.cpu for t in times))
        _append(sample.seconds, times, has_backward)
        if runner is not None and runner.silent is not None:
            _append(sample.silent, self._timed(runner.run_silently), has_backward)

    def _timed(self, run: Callable[[], Times | None]) -> list[Times]:
        time.sleep(_PAUSE_S)
        dist.barrier(self._groups.control)
        return [t for t in self._groups.gather(run()) if t is not None]

    def write_traces(self, folder: Path) -> None:
        """Write a Chrome trace of one step of every runner on several ranks to ``folder``, on each rank."""
        cuda = self._setting.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        case = self.result.case
        for runner, sample in self._runners:
            if sample.kind == "ideal" or runner is None:
                continue
            self._show(f"{sample.name}: trace")
            self._use_threads(False)
            word = sample.name.replace(" ", "-").replace(",", "").replace("+", "and")
            dist.barrier(self._groups.control)
            with profile(activities=activities) as profiler:
                self._groups.together(runner.run)
            file = folder / f"{case.preset}-{case.seq_len}-{word}-rank{self._rank}.json"
            profiler.export_chrome_trace(str(file))


def _append(seconds: dict[str, list[float]], times: list[Times], has_backward: bool) -> None:
    seconds[FORWARD].append(max(t.forward for t in times))
    if has_backward:
        seconds[BOTH].append(max(t.both for t in times))


def _relative_errors(by_rank: list[list[tuple[float, float]]]) -> dict[str, float]:
    errors = {}
    for name, parts in zip(_QUANTITIES, zip(*by_rank, strict=True), strict=False):
        error, norm = (sum(part[i] for part in parts) for i in range(2))
        errors[name] = float((error / max(norm, 1e-300)) ** 0.5)
    return errors


def run_cases(
    config: BenchConfig, cases: Sequence[BenchCase], device: torch.device, peers: dict[str, Any], show: Show
) -> list[CaseResult]:
    """Measure all cases, one after another. All ranks call this together; ranks that a case does not use wait.

    Returns:
        The results of the cases in which this rank took part. Rank 0 has all of them.
    """
    world, start = dist.get_world_size(), time.monotonic()
    groups = Groups.make(sorted({world, *(case.ranks for case in cases)}))
    # A case takes time for its visible pairs, and as long as the pairs of 1,000 causal tokens for everything else.
    weights = [case.visible_pairs() + 5e5 for case in cases]
    results = []
    for i, case in enumerate(cases):
        if dist.get_rank() < case.ranks:
            share = weights[i] / sum(weights[i:])
            until = time.monotonic() + max(0.0, start + config.budget - time.monotonic()) * share
            measurement = CaseMeasurement(case, groups[case.ranks], device, config, show)
            measurement.prepare(peers)
            measurement.rounds(until)
            if config.trace:
                measurement.write_traces(Path(config.out))
            results.append(measurement.result)
            torch.cuda.empty_cache()
        groups[world].gather(None)
    return results


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used; 0 if the operating system does not report them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
