"""Measures cases in rounds. In a round each attempt runs once, so that a slower machine slows all attempts alike.

All ranks of a case make and run its attempts together. If an attempt fails on one rank, no rank runs it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

from ...mesh import ranks_by_host
from ..launch import cores
from .attempts import (
    QUANTITIES,
    TOLERANCES,
    Attempt,
    Times,
    one_process,
    peer_attempt,
    reference,
    silence,
    strategy_attempt,
)
from .cases import BenchConfig, Case
from .machine import busy_seconds
from .peers import RefusalError, Setting
from .results import BOTH, FORWARD, CaseResult, Sample

_FEWEST_ROUNDS = 3
_TIMEOUT = timedelta(hours=4)  # ranks that a case does not use wait for its end
_PAUSE_S = 0.02  # until the threads of the previous run have stopped spinning

T = TypeVar("T")
Show = Callable[[str], None]


@dataclass(frozen=True)
class Groups:
    """Groups of the first ``n`` ranks.

    Attributes:
        group: the group that attention communicates in.
        control: a gloo group, in which the ranks coordinate the measurement.
        nothing: a group of the same ranks whose messages take no time.
        alone: a group with this rank only.
    """

    group: ProcessGroup
    control: ProcessGroup
    nothing: ProcessGroup
    alone: ProcessGroup

    @staticmethod
    def make(sizes: Sequence[int]) -> dict[int, Groups]:
        """The groups of the first ``n`` ranks, for each n in ``sizes``. All ranks call this together."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

        world: Any = dist.group.WORLD
        alone = [dist.new_group([rank]) for rank in range(world.size())][world.rank()]
        made = {}
        for n in sizes:
            ranks = list(range(n))
            made[n] = Groups(
                world if n == world.size() else dist.new_group(ranks),
                dist.new_group(ranks, backend="gloo", timeout=_TIMEOUT),
                dist.new_group(ranks, backend="fake"),
                alone,
            )
        return made

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        values: list[Any] = [None] * self.control.size()
        dist.all_gather_object(values, value, group=self.control)
        return values

    def together(self, make: Callable[[], T]) -> tuple[T | None, str | None]:
        """Call ``make`` on all ranks.

        Returns:
            What ``make`` returned on this rank, and None; if it raised an error on any rank, None and the error.
        """
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

    def __init__(self, case: Case, groups: Groups, device: torch.device, config: BenchConfig, show: Show) -> None:
        self.case, self.device, self._config, self._show = case, device, config, show
        self._groups = groups
        self._setting = Setting(case, groups.group, groups.alone, dist.get_world_size(), device)
        self._rank = groups.control.rank()
        self._hosts = ranks_by_host(groups.group)
        self._on_host = max(map(len, self._hosts))  # ranks that share the cores of a host
        self.result = CaseResult(case, [], {}, case.ranks if device.type == "cuda" else len(self._hosts))
        self._attempts: list[tuple[Attempt | None, Sample]] = []  # None: only rank 0 runs the attempt

    def prepare(self, peers: dict[str, Any]) -> None:
        """Make and check every attempt, and count its bytes and its memory.

        Args:
            peers: the adapters of other packages, by name.
        """
        self._show("reference")
        expected, reason = self._groups.together(self._reference)
        if expected is None:
            raise RuntimeError(f"{self.case}: the reference cannot be computed: {reason}")
        for name, make in one_process(self._setting):
            self._add(name, "ideal", make, expected)
        for contender in self._config.contenders(self.case.ranks):
            self._add(contender.name, "seqpar", partial(strategy_attempt, self._setting, contender), expected)
        for module in peers.values():
            make_one = partial(peer_attempt, self._setting, module, self._groups.nothing)
            self._add(module.NAME, "peer", make_one, expected)

    def _reference(self) -> list[Tensor]:
        """out, dq, dk and dv of the full sequence, which rank 0 computes with all cores and broadcasts."""
        self._use_threads(alone=self._rank == 0)
        case = self.case
        if self._rank == 0:
            results = [x.contiguous().cpu() for x in reference(self._setting)]
        else:
            shapes = [
                (case.batch, case.seq_len, heads, width)
                for heads, width in (
                    (case.heads, case.v_head_dim),
                    (case.heads, case.head_dim),
                    (case.kv_heads, case.head_dim),
                    (case.kv_heads, case.v_head_dim),
                )
            ]
            results = [torch.empty(shape) for shape in shapes]
        for x in results:
            dist.broadcast(x, 0, group=self._groups.control)
        return results

    def _add(self, name: str, kind: str, make: Callable[[], Attempt], expected: list[Tensor]) -> None:
        """Make an attempt, compare the results of its first run with ``expected``, and count its bytes and memory."""
        self._show(f"{name}: first run")
        alone = kind == "ideal"
        absent = alone and self._rank != 0
        self._use_threads(alone)
        start = time.perf_counter()
        attempt, reason = self._groups.together(lambda: None if absent else make())
        if reason is None:
            errors, reason = self._groups.together(lambda: [] if attempt is None else attempt.errors(expected))
        if reason is not None:
            self.result.refused[name] = reason
            return
        sample = Sample(name, kind, warmup_s=time.perf_counter() - start)
        found = _relative_errors([e for e in self._groups.gather(errors) if e])
        wrong = [quantity for quantity, error in found.items() if not error <= TOLERANCES[self.case.dtype]]
        if wrong:
            differ = ", ".join(f"{quantity} by {found[quantity]:.1e}" for quantity in wrong)
            why = f"WRONG: differs from the result of one device: {differ}"
            if kind != "peer" or "out" in wrong:
                self.result.refused[name] = why
                return
            assert attempt is not None
            attempt.no_backward = why  # the forward is right and is measured
        sample.error = max(error for quantity, error in found.items() if quantity not in wrong)
        if attempt is not None:
            sample.layout, sample.backend = attempt.layout, attempt.backend
            if attempt.no_backward is not None:
                self.result.refused[f"{name}, backward,"] = attempt.no_backward
        ranks = None if alone else self._groups.group
        observed, reason = self._groups.together(lambda: None if attempt is None else attempt.observe(ranks))
        if reason is not None:
            self.result.refused[name] = reason
            return
        mine = (0, 0, 0) if observed is None else (observed[0].bytes_sent, observed[0].bytes_between_hosts, observed[1])
        most = [max(column) for column in zip(*self._groups.gather(mine), strict=True)]
        sample.bytes_sent, sample.bytes_between_hosts, sample.peak_memory = most
        sample.chosen = "" if observed is None else ", ".join(observed[0].chosen)
        self._attempts.append((attempt, sample))
        self.result.samples.append(sample)

    def _use_threads(self, alone: bool) -> None:
        """Share the cores among the ranks of a host; an attempt that rank 0 runs alone has all of them."""
        torch.set_num_threads(max(1, cores() // (1 if alone else self._on_host)))

    def rounds(self, until: float) -> None:
        """Run at least three rounds, and more until rank 0's ``time.monotonic()`` would pass ``until``."""
        start, busy, cpu = time.perf_counter(), busy_seconds(), time.process_time()
        for number in range(self._config.rounds):
            turn = number % max(1, len(self._attempts))
            begun = time.monotonic()
            for attempt, sample in self._attempts[turn:] + self._attempts[:turn]:
                self._show(f"round {number + 1} of {self._config.rounds}: {sample.name}")
                self._once(attempt, sample)
            again = time.monotonic() + (time.monotonic() - begun) < until or number + 1 < _FEWEST_ROUNDS
            if not self._groups.gather(again)[0]:
                break
        by_rank = self._groups.gather(time.process_time() - cpu)
        spent = sum(by_rank[rank] for rank in self._hosts[0])
        others = (busy_seconds() - busy - spent) / (time.perf_counter() - start)
        self.result.busy_share = max(0.0, others / (os.cpu_count() or 1))

    def _once(self, attempt: Attempt | None, sample: Sample) -> None:
        """Run an attempt once with and once without messages, and append the times to ``sample``."""
        self._use_threads(sample.kind == "ideal")
        times = self._timed(attempt, silent=False)
        both = sample.kind != "peer" or attempt is None or attempt.no_backward is None
        sample.seconds[FORWARD].append(max(t.forward for t in times))
        sample.cpu.append(sum(t.cpu for t in times))
        if both:
            sample.seconds[BOTH].append(max(t.both for t in times))
        if attempt is not None and attempt.silent is not None:
            times = self._timed(attempt, silent=True)
            sample.silent[FORWARD].append(max(t.forward for t in times))
            if both:
                sample.silent[BOTH].append(max(t.both for t in times))

    def _timed(self, attempt: Attempt | None, silent: bool) -> list[Times]:
        """Run an attempt once, and return the times of the ranks that ran it."""
        time.sleep(_PAUSE_S)
        dist.barrier(self._groups.control)
        mine = None
        if attempt is not None:
            if silent:
                with silence(attempt) as attend:
                    mine, _ = attempt.run(attend)
            else:
                mine, _ = attempt.run()
        return [t for t in self._groups.gather(mine) if t is not None]

    def write_traces(self, folder: Path) -> None:
        """Write a Chrome trace of one step of every attempt on several ranks to ``folder``, on each rank."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])]
        for attempt, sample in self._attempts:
            if sample.kind == "ideal" or attempt is None:
                continue
            self._show(f"{sample.name}: trace")
            self._use_threads(False)
            word = sample.name.replace(" ", "-").replace(",", "").replace("+", "and")
            dist.barrier(self._groups.control)
            with profile(activities=activities) as profiler:
                self._groups.together(attempt.run)
            file = folder / f"{self.case.preset}-{self.case.seq_len}-{word}-rank{self._rank}.json"
            profiler.export_chrome_trace(str(file))


def _relative_errors(by_rank: list[list[tuple[float, float]]]) -> dict[str, float]:
    """The relative error of each quantity over the rows of all ranks, in the 2-norm."""
    errors = {}
    for name, parts in zip(QUANTITIES, zip(*by_rank, strict=True), strict=False):
        error, norm = (sum(part[i] for part in parts) for i in range(2))
        errors[name] = float((error / max(norm, 1e-300)) ** 0.5)
    return errors


def measure(
    config: BenchConfig, cases: Sequence[Case], device: torch.device, peers: dict[str, Any], show: Show, out: Path
) -> list[CaseResult]:
    """Measure all cases, one after another. All ranks call this together; ranks that a case does not use wait.

    Args:
        config: the options.
        cases: the cases.
        device: the device of this rank.
        peers: the adapters of other packages, by name.
        show: shows a text to the user.
        out: the folder for Chrome traces.

    Returns:
        The results of the cases in which this rank took part. Rank 0 has all of them.
    """
    world = dist.get_world_size()
    groups = Groups.make(sorted({world, *(case.ranks for case in cases)}))
    results = []
    began = time.monotonic()
    weights = [_weight(case) for case in cases]
    for i, case in enumerate(cases):
        if dist.get_rank() < case.ranks:
            share = weights[i] / sum(weights[i:])
            until = time.monotonic() + max(0.0, began + config.budget - time.monotonic()) * share
            one = CaseMeasurement(case, groups[case.ranks], device, config, partial(_show_of, case, show))
            one.prepare(peers)
            one.rounds(until)
            if config.trace:
                one.write_traces(out)
            results.append(one.result)
            torch.cuda.empty_cache()
        groups[world].gather(None)
    return results


def _show_of(case: Case, show: Show, text: str) -> None:
    show(f"{case}: {text}")


def _weight(case: Case) -> float:
    """The expected time of a case relative to other cases.

    It is proportional to the visible pairs, plus a constant for everything else: the pairs of 1,000 causal tokens.
    """
    return case.visible_pairs() + 5e5
