"""``benchmarks/gpu.py`` without a GPU: what its times mean, what a broken task costs, and which tasks it leaves out.

``test_triton_interpreter.py`` runs all of its functions on tiny shapes in the interpreter.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
# A process of the runner that does what its task says: a list of steps and what happens in each.
WORKER = """
import json, os, pathlib, subprocess, sys, time
from gpu_report import Rows

def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

line = sys.stdin.readline()
if not line:
    sys.exit()
task = json.loads(line)
rows = Rows(pathlib.Path(sys.argv[1]), frozenset(task["skip"]), lambda: None)
rows.add("begin", task["name"])
for step, action in task["arguments"]:
    def run():
        if action == "hangs":
            child = subprocess.Popen(["sleep", "600"])
            pathlib.Path(os.environ["CHILDREN"]).write_text(str(child.pid))
            time.sleep(600)
        if action == "aborts":
            print("ptxas died", flush=True)
            os.abort()
        if action == "loses the GPU":
            rows.check_gpu = lost
            lost()
        if action == "has a cause":
            try:
                int("no number")
            except ValueError as error:
                raise RuntimeError("the kernel failed") from error
        return True
    if action == "ends the process":
        print("no such module", flush=True)
        sys.exit(1)
    if rows.attempt(step, run):
        rows.add("check", step, errors={}, passed=True)
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[None]:
    """The modules of the benchmark can be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield


@pytest.fixture
def gpu(folder: None) -> ModuleType:
    return importlib.import_module("gpu")


@pytest.fixture
def speed(folder: None) -> ModuleType:
    return importlib.import_module("gpu_speed")


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
def fake_gpu(speed: ModuleType) -> Iterator[FakeGpu]:
    fake = FakeGpu()
    clock = SimpleNamespace(perf_counter=lambda: fake.host / 1e6)
    cuda = {"Event": fake.event, "_sleep": fake.sleep, "synchronize": fake.synchronize}
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(speed, DEVICE=torch.device("cuda"), time=clock, _cycles={}),
    ):
        yield fake


def launches(fake: FakeGpu, count: int) -> Callable[[], None]:
    def thunk() -> None:
        for _ in range(count):
            fake.launch(50.0, 10.0)

    return thunk


def test_the_gpu_does_not_wait_for_the_host(speed: ModuleType, fake_gpu: FakeGpu) -> None:
    """Kernels of 10 us, each of which takes the host 50 us to launch."""
    assert speed.timed("few", launches(fake_gpu, 10)) == (pytest.approx(0.1), pytest.approx(500), True)
    assert fake_gpu.sleeps == [1 << 21]
    timing = speed.timed("many", launches(fake_gpu, 100))  # 5 ms of the host: more than the first kernel takes
    assert timing == (pytest.approx(1.0), pytest.approx(5000), True)
    assert fake_gpu.sleeps[1:] == [1 << 21, 1 << 22, 1 << 23, 1 << 24]
    speed.timed("many", launches(fake_gpu, 100))
    assert fake_gpu.sleeps[5:] == [1 << 24]  # as long as last time
    medians = speed.interleaved({"few": launches(fake_gpu, 10), "many": launches(fake_gpu, 100)}, 3)
    assert [round(x.ms, 3) for x in medians.values()] == [0.1, 1.0]


def test_a_call_that_waits_for_the_gpu_is_told_apart(speed: ModuleType, fake_gpu: FakeGpu) -> None:
    def thunk() -> None:
        fake_gpu.launch(50.0, 10.0)
        fake_gpu.synchronize()

    assert not speed.timed("waits", thunk).queued
    assert max(fake_gpu.sleeps) == 1 << 28  # and no longer


def test_an_empty_queue_would_measure_the_host(speed: ModuleType, fake_gpu: FakeGpu) -> None:
    """What the tests above rely on."""
    with mock.patch.object(torch.cuda, "_sleep"), mock.patch.object(speed, "_MOST_CYCLES", 1):
        timing = speed.timed("few", launches(fake_gpu, 10))
    assert timing.ms > 0.4 and not timing.queued


@pytest.fixture
def run_tasks(gpu: ModuleType, tmp_path: Path) -> Callable[..., Any]:
    """Runs tasks of the worker above, and returns the report."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)

    def run(*tasks: Any, jobs: int = 1) -> Any:
        report = gpu.Report({"gpu": "NVIDIA H200"})
        environment = {"PYTHONPATH": str(ROOT / "benchmarks"), "CHILDREN": str(tmp_path / "children")}
        with gpu.Runner([sys.executable, str(worker)], report, tmp_path / "out", "", 240.0, jobs, environment) as run:
            run.run(tasks)
            assert all(process.process.poll() is None for process in run._waiting)
        assert all(process.process.poll() is not None for process in run._waiting)
        return report

    return run


def steps(gpu: ModuleType, *actions: str, **options: Any) -> Any:
    """A task whose steps are named after what happens in them."""
    options = {"limit": 120.0, "alone": False} | options
    pairs = [(f"{action} {i}", action) for i, action in enumerate(actions)]
    return gpu.Task("checks", f"task of {len(actions)}", 0, "", pairs, **options)


def outcomes(report: Any) -> list[tuple[str, str]]:
    return [(row["kind"], row["what"]) for row in report.rows]


def test_a_step_that_hangs_costs_one_row(gpu: ModuleType, run_tasks: Callable[..., Any], tmp_path: Path) -> None:
    """It is killed with its children, and the other steps of its task are done by another process."""
    report = run_tasks(steps(gpu, "works", "hangs", "works", limit=3.0))
    assert outcomes(report) == [("check", "works 0"), ("failure", "hangs 1"), ("check", "works 2")]
    assert report.rows[1]["error"] == "no result after 3 s: killed" and report.rows[1]["task"] == "task of 3"
    assert report.tasks[0]["ends"] == ["no result after 3 s: killed", "ended"]
    child = int((tmp_path / "children").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
    stored = json.loads((tmp_path / "out" / "gpu-nvidia-h200.json").read_text())
    assert stored["rows"] == report.rows
    assert "* FAILED: task of 3: hangs 1: no result after 3 s" in (tmp_path / "out" / "gpu-nvidia-h200.md").read_text()


def test_a_lost_gpu_costs_one_row(gpu: ModuleType, run_tasks: Callable[..., Any]) -> None:
    """After an illegal access every later call of the process fails, so another process goes on."""
    report = run_tasks(steps(gpu, "works", "loses the GPU", "aborts", "works"))
    assert outcomes(report) == [
        ("check", "works 0"), ("failure", "loses the GPU 1"), ("failure", "aborts 2"), ("check", "works 3"),
    ]  # fmt: skip
    assert report.rows[1]["error"].startswith("RuntimeError: CUDA error: an illegal memory access")
    assert report.rows[2]["error"] == "exit status -6\nptxas died"
    assert [end.split("\n")[0] for end in report.tasks[0]["ends"]] == ["exit status 3", "exit status -6", "ended"]


def test_the_causes_of_an_error_are_reported(
    gpu: ModuleType, run_tasks: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_tasks(steps(gpu, "has a cause", "works"), steps(gpu, "ends the process"))
    assert outcomes(report) == [("failure", "has a cause 0"), ("check", "works 1"), ("failure", "task of 1")]
    first, second = report.rows[0]["error"].split("\n")
    assert first.startswith("ValueError: invalid literal for int") and first.endswith(" run]")
    assert second.startswith("RuntimeError: the kernel failed [worker.py:")
    assert report.rows[2]["error"] == "exit status 1\nno such module"
    assert first in capsys.readouterr().out  # at once


def test_tasks_run_side_by_side_or_alone_and_end_in_time(
    gpu: ModuleType, run_tasks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is over while a step hangs."""
    hangs = tmp_path / "children"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * hangs.exists(), sleep=time.sleep)
    monkeypatch.setattr(gpu, "time", clock)
    report = run_tasks(
        steps(gpu, "works"),
        steps(gpu, "works", "works"),
        steps(gpu, "works", "hangs", "works", alone=True),
        steps(gpu, "works", "works", "works", "works", alone=True),
        jobs=2,
    )
    kinds = [kind for kind, _ in outcomes(report)]
    assert kinds == ["check"] * 4 + ["failure", "skipped"]
    assert report.rows[4]["error"] == "the time of all tasks was over: killed"
    assert report.rows[5]["why"] == "takes 0 s, and 0 s were left"


def test_what_matters_most_comes_first(gpu: ModuleType) -> None:
    tasks = gpu.tasks(smoke=False, backends=["triton", "cudnn", "flash"], tools=["compute-sanitizer"])
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names) and {task.part for task in tasks} == set(gpu.PARTS)
    important = {"16384 tokens, head_dim 128, heads 16/16, causal=True", "ring at 65536 tokens, head_dim 128"}
    last = max(names.index(name) for name in important)
    assert sum(task.seconds for task in tasks[: last + 1] if task.alone) < 90
    measured = next(task for task in tasks if task.function == "measure_speed")
    assert "triton deterministic" in measured.arguments[1]
    assert [task.function for task in tasks[-4:]] == ["measure_flex", "measure_flex", "two_shapes", "two_shapes"]
    assert all(dict(task.environment) == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} for task in tasks[-2:])
    hops = {tuple(task.arguments[2:]) for task in tasks if task.part == "hops"}
    lengths, head_dims = (8192, 16384, 32768, 65536, 131072), (64, 128, 256)
    assert hops == {(s, n, d) for s in ("ring", "all-gather", "ulysses") for n in lengths for d in head_dims}


def test_a_new_backend_comes_first(gpu: ModuleType, folder: None) -> None:
    """With every check of the others, and beside them; the names and the order of the other tasks stay as they are."""
    old = gpu.tasks(smoke=False, backends=["triton", "cudnn"])
    found = gpu.tasks(smoke=False, backends=["triton", "cudnn"], new=["hopper"])
    first = found[: len(found) - len(old)]
    assert found[len(first) :] == old and all("hopper" in task.name for task in first)
    checks = {task.function for task in first if task.part == "checks"}
    assert checks == {f"check_{x}" for x in ("contact", "values", "strides", "streams", "graph", "large")}
    assert [task.part for task in first] == sorted((task.part for task in first), key=gpu.PARTS.index)
    speed = [task.arguments[1] for task in first if task.function in ("measure_speed", "measure_hops")]
    assert speed == [["triton", "cudnn", "hopper"]] * 5
    modules = [importlib.import_module(name) for name in ("gpu_checks", "gpu_speed")]
    for task in first:
        (function,) = {f for module in modules if (f := getattr(module, task.function, None)) is not None}
        inspect.signature(function).bind("rows", *task.arguments)


def test_a_report_is_resumed(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has ended is left out, what was killed is done again, and the new report has both."""
    machine = {"gpu": "NVIDIA H100", "torch": "2.13", "backends": ["triton"]}
    every = gpu.tasks(smoke=False, backends=["triton"])
    done, killed = every[0].name, every[1].name
    old = [{"kind": "check", "task": name, "what": name, "passed": True, "errors": {}} for name in (done, killed)]
    ends = [{"name": done, "seconds": 1, "ends": ["ended"]}, {"name": killed, "seconds": 1, "ends": ["killed"]}]
    (tmp_path / "report.json").write_text(json.dumps({"environment": machine, "rows": old, "tasks": ends}))
    asked: list[str] = []

    class Runner:
        def __init__(self, worker: Any, report: Any, *_: Any) -> None:
            self.report = report

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, tasks: Any) -> None:
            if tasks[0].name == "environment":
                self.report.environment = machine
            else:
                asked.extend(task.name for task in tasks)

    monkeypatch.setattr(gpu, "Runner", Runner)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    arguments = ["--resume", str(tmp_path / "report.json"), "--out", str(tmp_path)]
    assert gpu.main(arguments) == 0
    assert done not in asked and killed in asked and len(asked) >= len(every) - 1
    assert "checks: 1 passed" in capsys.readouterr().out
    machine = {**machine, "torch": "2.14"}
    assert gpu.main(arguments) == 2
    assert "another machine or another version: torch" in capsys.readouterr().out


def test_a_figure_is_beside_its_prediction(gpu: ModuleType) -> None:
    rates = {"triton": 440.0, "triton deterministic": 250.0}
    row = {"kind": "speed", "what": "w", "task": "t", "tokens": 16384, "batch": 1, "head_dim": 128, "heads": 16}
    row |= {"kv_heads": 16, "causal": True, "auto": "triton", "forward": {"triton": 430.0}, "backward": rates}
    row |= {f"{d}_{x}": {} for d in ("forward", "backward") for x in ("ran", "sustained", "host_us", "first_s")}
    row |= {"forward_not_queued": [], "backward_not_queued": []}
    text = gpu.markdown(gpu.Report({"gpu": "NVIDIA H100"}, [row]))
    assert "| 16384 | 1 | 128 | 16/16 | causal | triton | 440 | 400 | 1.10 |" in text
    assert "| 16384 | 1 | 128 | 16/16 | causal | triton deterministic | 250 | 245 | 1.02 |" in text


def test_the_measured_tiles_are_candidates_for_tuning(
    gpu: ModuleType, speed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seqpar.triton_kernels import configs

    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    tasks = gpu.tasks(smoke=False, backends=["triton"])
    assert {task.arguments[1:] for task in tasks if task.part == "tiles"} == set(speed._TILES)
    for (kernel, head_dim), cells in speed._TILES.items():
        known = configs.candidates(kernel, torch.device("cuda", 9), head_dim, torch.bfloat16)
        assert {configs.parse_cell(cell) for cell in cells} <= set(known[1:]), (kernel, head_dim)


@pytest.mark.slow
@pytest.mark.thorough
def test_it_runs_from_a_checkout_without_an_installed_package(tmp_path: Path) -> None:
    """In an environment that has PyTorch, Triton, numpy and einops, but not seqpar. Another package is named tests."""
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    for name in ("seqpar", "triton_kernels", "benchmarks", "tests"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    (installed / "tests").mkdir(parents=True)
    (installed / "tests" / "__init__.py").touch()
    for entry in Path(torch.__file__).parents[1].iterdir():
        if "seqpar" not in entry.name and not (installed / entry.name).exists():
            (installed / entry.name).symlink_to(entry)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "all.pth").write_text(str(installed))
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    assert "No module named 'seqpar'" in run("-c", "import seqpar").stderr
    done = run(checkout / "benchmarks" / "gpu.py", "--smoke", "--only", "check_contact forward")
    assert done.returncode == 0 and "checks: 1 passed; failed: 0" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_runs_only_with_smoke(gpu: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="no GPU here; without one only"):
        importlib.import_module("gpu_checks").describe(SimpleNamespace(), smoke=False)
    with mock.patch.object(gpu, "Runner"), mock.patch.object(gpu.signal, "signal"):
        assert gpu.main([]) == 2  # the task that describes the GPU has reported nothing
