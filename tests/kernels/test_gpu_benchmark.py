"""``benchmarks/gpu.py`` without a GPU: what its times mean, and which measurements it skips when time runs out.

``test_triton_kernels.py`` runs all of it on tiny shapes in the interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """The benchmark as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("gpu_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


class FakeGpu:
    """A host and a GPU with a queue, in microseconds. A kernel starts when it is launched and the queue is empty."""

    def __init__(self) -> None:
        self.host = self.idle_from = 0.0
        self.sleeps: list[int] = []

    def launch(self, host: float, kernel: float) -> None:
        """Launch a kernel, which takes ``host`` on the host and ``kernel`` on the GPU."""
        self.host += host
        self.idle_from = max(self.idle_from, self.host) + kernel

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles)
        self.launch(5.0, cycles / 2000)

    def synchronize(self) -> None:
        self.host = max(self.host, self.idle_from)

    def event(self, enable_timing: bool) -> Any:
        """An event with the methods of PyTorch's."""
        event = SimpleNamespace()

        def record() -> None:
            event.at = max(self.idle_from, self.host)

        def wait() -> None:
            self.host = max(self.host, event.at)

        event.record, event.synchronize = record, wait
        event.query = lambda: event.at <= self.host
        event.elapsed_time = lambda stop: (stop.at - event.at) / 1000
        return event


@pytest.fixture
def fake_gpu(gpu: ModuleType) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    clock = SimpleNamespace(perf_counter=lambda: fake.host / 1e6)
    cuda = {"Event": fake.event, "_sleep": fake.sleep, "synchronize": fake.synchronize}
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(gpu, DEVICE=torch.device("cuda"), time=clock, _cycles={}),
    ):
        yield fake


def launches(fake: FakeGpu, count: int) -> Callable[[], None]:
    def thunk() -> None:
        for _ in range(count):
            fake.launch(50.0, 10.0)

    return thunk


def test_the_gpu_does_not_wait_for_the_host(gpu: ModuleType, fake_gpu: FakeGpu) -> None:
    """Kernels of 10 us, each of which takes the host 50 us to launch."""
    assert gpu.timed("few", launches(fake_gpu, 10)) == (pytest.approx(0.1), pytest.approx(500), True)
    assert fake_gpu.sleeps == [1 << 21]
    timing = gpu.timed("many", launches(fake_gpu, 100))  # 5 ms of the host: more than the first kernel takes
    assert timing == (pytest.approx(1.0), pytest.approx(5000), True)
    assert fake_gpu.sleeps[1:] == [1 << 21, 1 << 22, 1 << 23, 1 << 24]
    gpu.timed("many", launches(fake_gpu, 100))
    assert fake_gpu.sleeps[5:] == [1 << 24]  # as long as last time
    medians = gpu.interleaved({"few": launches(fake_gpu, 10), "many": launches(fake_gpu, 100)}, 3)
    assert [round(x.ms, 3) for x in medians.values()] == [0.1, 1.0]


def test_a_call_that_waits_for_the_gpu_is_told_apart(gpu: ModuleType, fake_gpu: FakeGpu) -> None:
    def thunk() -> None:
        fake_gpu.launch(50.0, 10.0)
        fake_gpu.synchronize()

    assert not gpu.timed("waits", thunk).queued
    assert max(fake_gpu.sleeps) == 1 << 28  # and no longer


def test_an_empty_queue_would_measure_the_host(gpu: ModuleType, fake_gpu: FakeGpu) -> None:
    """What the tests above rely on."""
    with mock.patch.object(torch.cuda, "_sleep"), mock.patch.object(gpu, "_MOST_CYCLES", 1):
        timing = gpu.timed("few", launches(fake_gpu, 10))
    assert timing.ms > 0.4 and not timing.queued


def test_the_least_important_rows_are_left_out(gpu: ModuleType) -> None:
    now, ran, saved = [0.0], list[str](), list[list[str]]()

    def task(name: str, expected: float, takes: float) -> Any:
        def run(report: Any) -> None:
            now[0] += takes
            ran.append(name)
            if name == "fails":
                raise RuntimeError("no such kernel")

        return gpu.Task(name, expected, run)

    tasks = [
        task("first", 10, 10),
        task("slow", 20, 40),  # this GPU takes twice as long as an H200
        task("too long", 30, 30),
        task("fails", 5, 5),
        task("short", 10, 20),
        task("last", 20, 20),
    ]
    report = gpu.Report({"gpu": None})
    gpu.run_in_time(tasks, report, 100, lambda _: saved.append(list(ran)), lambda: now[0])
    assert ran == ["first", "slow", "fails", "short"] and now[0] <= 100
    assert saved == [ran[: i + 1] for i in range(4)]  # after every row
    left_out = ["too long: takes 60 s, and 50 s were left", "last: takes 40 s, and 25 s were left"]
    assert report.skipped == [left_out[0], "fails: RuntimeError: no such kernel", left_out[1]]


def test_rows_in_the_order_of_their_importance_fit_into_eight_minutes(gpu: ModuleType) -> None:
    tasks = gpu.tasks(smoke=False)
    assert len({task.name for task in tasks}) == len(tasks)
    important = {"checks, bfloat16, head_dim 128", "16384 tokens, head_dim 128, heads 16/16, causal=True",
                 "ring at 65536 tokens", "carry, 8192 queries, 4096 keys"}  # fmt: skip
    before, seconds = set(), 0.0
    for task in tasks:
        before.add(task.name)
        seconds += task.seconds
        if important <= before:
            break
    assert important <= before and seconds < 120
    assert sum(task.seconds for task in tasks) > 450  # so that the budget decides


def test_partial_results_are_written(gpu: ModuleType, tmp_path: Path) -> None:
    report = gpu.Report({"gpu": "NVIDIA H200", "torch": "2", "triton": "3", "cudnn": 9})
    report.carry.append({"queries": 8, "keys": 4, "ms": {}, "cost": {"out": 0.01, "in and out": 0.02, "in, last": 0.0}})
    report.write(tmp_path)
    report.skipped.append("flex: too long")
    report.write(tmp_path)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["gpu-nvidia-h200.json", "gpu-nvidia-h200.md"]
    text = (tmp_path / "gpu-nvidia-h200.md").read_text()
    assert "# NVIDIA H200" in text and "| 8 | 4 | 1.0 % | 2.0 % | 0.0 % |" in text and "* flex: too long" in text
    assert json.loads((tmp_path / "gpu-nvidia-h200.json").read_text())["carry"][0]["keys"] == 4
