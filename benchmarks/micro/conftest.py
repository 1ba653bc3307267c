"""The stored run of this machine, to which a new run is compared, and a second rank for what needs one.

A run is stored in ``benchmarks/results/micro/``, in one file for each machine: its processor and number of cores. The
first run of a machine is stored; ``--store`` replaces it.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

from seqpar.cli.bench import machine_facts

from .operations import OPERATIONS, TIMEOUT, partner

FOLDER = Path(__file__).parents[1] / "results" / "micro"
SLOWER = 1.2  # the ratio from which a line is marked
_LINES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store", action="store_true", help="replace this machine's stored run by this one")


def stored_run(facts: dict[str, Any]) -> Path:
    """The file of this machine's stored run."""
    return FOLDER / (
        re.sub(r"[^a-z0-9]+", "-", f"{facts['device']} {facts['cores']} cores".lower()).strip("-") + ".json"
    )


def ratios(now: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> list[str]:
    """A line for each benchmark: the fastest time and the median, and both divided by the stored ones.

    The fastest is what other programs disturb least.
    """
    lines = []
    for name, times in now.items():
        line = f"{name:<44} {1e6 * times['min']:>12,.1f} us {1e6 * times['median']:>12,.1f} us"
        if name in before:
            fastest, median = (times[key] / before[name][key] for key in ("min", "median"))
            line += f"   {fastest:>5.2f} x {median:>5.2f} x" + ("  SLOWER" if min(fastest, median) > SLOWER else "")
        lines.append(line if name in before else f"{line}   new")
    return lines


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]) -> None:
    """Called when a run is written (``--benchmark-json``)."""
    facts = machine_facts(torch.device("cpu"))
    now = {b["name"]: {key: b["stats"][key] for key in ("min", "median")} for b in output_json["benchmarks"]}
    path = stored_run(facts)
    before, heading = {}, "fastest and median"
    if path.exists():
        stored = json.loads(path.read_text())
        before, facts_before = stored["times"], stored["machine"]
        heading += ", and both over the stored run's ({date}, commit {commit}, torch {torch})".format(**facts_before)
    lines = [heading, *ratios(now, before)]
    if not path.exists() or config.getoption("--store"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": facts, "times": now}, indent=1) + "\n")
        lines.append(f"stored in {path}")
    config.stash[_LINES] = lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in config.stash.get(_LINES, []):
        terminalreporter.write_line(line)


Together = Callable[[str], None]


@pytest.fixture(scope="session")
def second_rank() -> Iterator[Any]:
    """A pipe to a process that is rank 1 of a gloo group; this process is rank 0."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=partner, args=(store.port, theirs), daemon=True)
    process.start()
    dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=TIMEOUT)
    yield ours
    ours.send(None)
    process.join(30)
    dist.destroy_process_group()


@pytest.fixture
def together(second_rank: Any, benchmark: BenchmarkFixture) -> Together:
    """Measure an operation of ``OPERATIONS`` that both ranks run equally often."""

    def run(name: str) -> None:
        rounds, warmup = 200, 20  # of one call each: with more, there would be one call that is not counted here
        second_rank.send((name, rounds + warmup))
        operation = OPERATIONS[name]()
        timed: Any = benchmark  # its methods have no types
        timed.pedantic(operation, rounds=rounds, warmup_rounds=warmup, iterations=1)
        assert second_rank.recv() == "done"

    return run
