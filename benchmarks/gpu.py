"""Check the attention backends on one GPU, then measure them. One command, from a checkout, in under 8 minutes:

    python benchmarks/gpu.py --out DIR             # checks, then measures; writes DIR/gpu-<name>.json and .md
    python benchmarks/gpu.py --part hops --out DIR # one part: checks, kernels, hops, ranks, tiles or peers
    python benchmarks/gpu.py --resume DIR/gpu-<name>.json --out DIR  # what an earlier run has not ended
    python benchmarks/gpu.py --smoke               # tiny shapes in Triton's interpreter, without a GPU and figures

It needs PyTorch, Triton, numpy and einops. seqpar need not be installed.

* **checks** compare every kernel and every backend that is installed with the float64 reference of the tests, on fresh
  inputs in memory full of NaNs, with strided and offset keys, tensors of more than 2^31 elements, and two streams at
  once. compute-sanitizer runs two shapes if it is installed.
* **kernels** measures every backend, ``seqpar.attention``, and ``scaled_dot_product_attention`` on cuDNN and flash; the
  cost of a carry at the shapes of a ring's steps; and the kernels that only move bytes.
* **hops** measures the computation of one of 8 ranks in a zigzag ring, an all-gather and Ulysses with every backend,
  step after step on this one GPU without communication, and compares it with an eighth of the full causal attention.
* **ranks** runs ``cluster_smoke.py`` with four ranks on this GPU over NCCL.
* **tiles** measures tile sizes of the Triton kernels; **peers** measures FlexAttention.

A backend that "auto" does not take yet has tasks of its own, which come first.

Every task is a process with a time limit. Processes are started ahead and wait for a task, so that their imports take
no time. If a process hangs or loses the GPU, the step that it was in becomes a row with the reason, and a new process
continues the task without this step. Checks run side by side, measurements alone. The tasks that matter most come
first, and what would not end in time is listed as left out. The report is written after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpu_report import GPU_LOST, Report, Row, markdown

RESULTS = Path(__file__).parent / "results"
PARTS = ("checks", "kernels", "hops", "ranks", "tiles", "peers")
_IMPORTS = 90.0  # seconds that the first imports on a machine may take
_MOST_PROCESSES = 8  # of one task
# Kernels and head_dims whose tiles are measured.
TILED = (
    *(("backward", 128), ("forward", 128), ("backward", 64), ("forward", 64)),
    *(("dkdv", 128), ("dq", 128), ("forward", 256)),
)


@dataclass(frozen=True)
class Task:
    """Some rows of the report.

    Attributes:
        part: one of ``PARTS``.
        name: what is checked or measured.
        seconds: about how long the task takes on an H200. It does not start if less time is left.
        function: the function of ``gpu_checks.py`` or ``gpu_speed.py`` that adds the rows.
        arguments: its arguments after the rows.
        alone: whether no other task may run at the same time.
        limit: seconds that one step may take.
        under: the command of a tool under which the process runs.
        environment: variables of the process.
    """

    part: str
    name: str
    seconds: float
    function: str
    arguments: tuple[Any, ...]
    alone: bool = True
    limit: float = 45.0
    under: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


class Process:
    """A process that waits for a task. Its children end with it."""

    def __init__(self, command: Sequence[str], stem: Path, environment: dict[str, str]) -> None:
        self.rows, self.log = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
        self.rows.touch()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, str(self.rows)], stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
                env=os.environ | environment, start_new_session=True,
            )  # fmt: skip

    def give(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the process has already ended, which is seen later
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.close()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)


@dataclass
class Runner:
    """Runs tasks in processes, and adds their rows to a report.

    Attributes:
        worker: the command of a process, see ``gpu_worker.py``.
        report: receives the rows.
        out: the folder of the report, or None to write none.
        suffix: ends the names of the report's files.
        seconds: the time for all tasks, from now on.
        jobs: how many tasks run at the same time, at most.
        environment: variables of all processes.
    """

    worker: Sequence[str]
    report: Report
    out: Path | None
    suffix: str = ""
    seconds: float = 440.0
    jobs: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._deadline = time.monotonic() + self.seconds
        self._lock, self._numbers, self._live = threading.RLock(), count(), set[Process]()
        self._waiting: deque[Process] = deque()
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """End all processes."""
        for process in list(self._live):
            process.kill()

    def run(self, tasks: Sequence[Task]) -> None:
        """Run the tasks in order: tasks beside one another that need not be alone at the same time."""
        for alone, together in groupby(tasks, key=lambda task: task.alone):
            with ThreadPoolExecutor(1 if alone else self.jobs) as pool:
                list(pool.map(self._run_task, together))

    def _run_task(self, task: Task) -> None:
        began, skip, ends = time.monotonic(), set[str](), list[str]()
        if task.seconds > (left := self._deadline - began):
            why = f"takes {task.seconds:.0f} s, and {max(0, left):.0f} s were left"
            self._add({"kind": "skipped", "task": task.name, "what": task.name, "why": why})
            return
        for _ in range(_MOST_PROCESSES):
            step, end = self._run_process(task, skip)
            ends.append(end)
            if end == "ended":
                break
            if step in skip and end == f"exit status {GPU_LOST}":
                continue  # the step's row has the causes
            kind = "skipped" if task.under and "not supported" in end else "failure"
            self._add({"kind": kind, "task": task.name, "what": step, "why" if kind == "skipped" else "error": end})
            if step in (task.name, *skip) or time.monotonic() >= self._deadline:
                break
            skip.add(step)
        with self._lock:
            self.report.tasks.append({"name": task.name, "seconds": time.monotonic() - began, "ends": ends})
        self._save()

    def _run_process(self, task: Task, skip: set[str]) -> tuple[str, str]:
        """Run a task in a process, and add what is done to ``skip``. Returns its last step and how it ended."""
        with self._lock:
            special = task.under or task.environment
            process = self._start(task) if special or not self._waiting else self._waiting.popleft()
            while not special and len(self._waiting) < self.jobs:
                self._waiting.append(self._start())
        names = {"name": task.name, "function": task.function, "arguments": task.arguments, "skip": sorted(skip)}
        process.give(names)
        step, read = task.name, 0
        until = time.monotonic() + task.limit + _IMPORTS
        while True:
            ended = process.process.poll()
            with process.rows.open() as file:
                file.seek(read)
                text = file.read()
                lines, read = text.splitlines(keepends=True), read + len(text.encode())
            if lines and not lines[-1].endswith("\n"):
                read -= len(lines.pop().encode())
            for line in lines:
                until = time.monotonic() + task.limit
                row = json.loads(line)
                if row["kind"] == "begin":
                    step = row["what"]
                else:
                    skip.add(row["what"])
                    self._add({"task": task.name, **row})
            now = time.monotonic()
            if ended is not None or now > min(until, self._deadline):
                break
            time.sleep(0.02)
        process.kill()
        with self._lock:
            self._live.discard(process)
        if ended is None:
            reason = "the time of all tasks was over" if now > self._deadline else f"no result after {task.limit:.0f} s"
            end = f"{reason}: killed"
        else:
            end = "ended" if ended == 0 else f"exit status {ended}"
        output = process.log.read_text(errors="replace")[-3000:].strip()
        if end not in ("ended", f"exit status {GPU_LOST}") and output:
            end += "\n" + output
        return step, end

    def _start(self, task: Task | None = None) -> Process:
        under, variables = (task.under, dict(task.environment)) if task else ((), {})
        stem = Path(self._folder.name) / str(next(self._numbers))
        process = Process([*under, *self.worker], stem, self.environment | variables)
        self._live.add(process)
        return process

    def _add(self, row: Row) -> None:
        with self._lock:
            if row["kind"] == "environment":
                self.report.environment = row
            else:
                self.report.rows.append(row)
            if row["kind"] in ("failure", "skipped") or not row.get("passed", True):
                why = row.get("error") or row.get("why") or row.get("errors")
                print(f"{row['kind'].upper()} {row['task']}: {row['what']}: {why}", flush=True)
            elif row["kind"] != "check":
                print(
                    json.dumps({k: v for k, v in row.items() if not k.endswith(("_host_us", "_first_s"))}), flush=True
                )
        self._save()

    def _save(self) -> None:
        with self._lock:
            if self.out is not None:
                self.report.write(self.out, self.suffix)


def tasks(smoke: bool, backends: Sequence[str], tools: Sequence[str] = (), new: Sequence[str] = ()) -> list[Task]:
    """All checks and measurements, the most important first.

    Args:
        smoke: tiny shapes.
        backends: the names of the backends that can run here, "triton" among them.
        tools: the commands of compute-sanitizer.
        new: the names of backends that can run here and that "auto" does not take yet. Their tasks come first, because
            most of them have never run.
    """
    found = _smoke_tasks(backends) if smoke else [*_new_tasks(new, backends), *_tasks(backends, tools)]
    first: dict[str, Task] = {}
    for task in found:
        first.setdefault(task.name, task)
    return list(first.values())


def _new_tasks(new: Sequence[str], backends: Sequence[str]) -> Iterator[Task]:
    """The checks of each new backend, then its speed beside the other backends'."""
    for name in new:
        contacts = [("bfloat16", 128, 1, 16, 16), ("float16", 64, 1, 16, 4)]
        calls: list[tuple[str, int, tuple[Any, ...]]] = [
            *(("check_contact", 10, (k, name, *x)) for x in contacts for k in ("forward", "carry", "backward")),
            *(("check_values", 20, (name, x, d)) for x in ("bfloat16", "float16") for d in (128, 64)),
            *((check, 10, (name,)) for check in ("check_strides", "check_streams", "check_graph")),
            ("check_large", 15, (name,)),
        ]
        for function, seconds, arguments in calls:
            what, alone = " ".join(map(str, (function, *arguments))), function == "check_large"
            yield Task("checks", what, seconds, function, (False, *arguments), alone=alone, limit=90)
        for shape in ((128, 16, 16, True), (64, 32, 32, True), (128, 32, 8, True), (128, 16, 16, False)):
            what = f"{name} beside the others, 16384 tokens, {', '.join(map(str, shape))}"
            yield Task("kernels", what, 12, "measure_speed", (False, [*backends, name], 16384, *shape, True))
        for tokens in ((8192, 4096), (4096, 8192)):
            yield Task("kernels", f"carry of {name}, {tokens}", 6, "measure_carry", (False, *tokens, name))
        what = f"{name} beside the others, ring at 65536 tokens"
        yield Task("hops", what, 22, "measure_hops", (False, [*backends, name], "ring", 65536, 128))


def _tasks(backends: Sequence[str], tools: Sequence[str]) -> Iterator[Task]:
    libraries = [name for name in backends if name != "triton"]
    every = ["triton", "triton deterministic", *libraries]

    def speed(tokens: int, head_dim: int, heads: int, kv_heads: int, causal: bool) -> Task:
        name = f"{tokens} tokens, head_dim {head_dim}, heads {heads}/{kv_heads}, causal={causal}"
        seconds = 10 + (tokens / 16384) ** 2 * (1 if causal else 2)
        shape = tokens, head_dim, heads, kv_heads, causal
        return Task("kernels", name, seconds, "measure_speed", (False, every, *shape, tokens == 16384))

    def hops(strategy: str, tokens: int, head_dim: int) -> Task:
        name, seconds = f"{strategy} at {tokens} tokens, head_dim {head_dim}", 10 + 12 * (tokens / 65536) ** 2
        return Task("hops", name, seconds, "measure_hops", (False, backends, strategy, tokens, head_dim))

    def carry(queries: int, keys: int) -> Task:
        return Task("kernels", f"carry, {queries} queries, {keys} keys", 6, "measure_carry", (False, queries, keys))

    def contact(kernel: str, name: str, *shape: Any) -> Task:
        arguments = (False, kernel, name, *shape)
        return Task("checks", f"first call of {name} {kernel}, {shape}", 10, "check_contact", arguments, alone=False)

    # One process for each kernel: dtype, head_dim, batch, heads, KV heads. With 4 KV heads, programs share a KV head in
    # the Triton backward. The compiled kernels are kept, and serve the measurements.
    plain = "bfloat16", 128, 1, 16, 16
    for kernel in ("forward", "carry", "backward"):
        yield contact(kernel, "triton", *plain)
    yield contact("backward", "triton deterministic", *plain)
    yield contact("backward", "triton", "bfloat16", 128, 1, 16, 4)
    for name in libraries:
        yield from (contact(kernel, name, *plain) for kernel in ("forward", "carry", "backward"))
    for head_dim in (64, 256, 40):
        for kernel in ("forward", "backward"):
            yield from (contact(kernel, name, "bfloat16", head_dim, 1, 16, 4) for name in backends)
    for kernel in ("forward", "backward"):
        yield contact(kernel, "triton", "float32", 64, 1, 4, 4)

    yield Task("kernels", "ceiling", 8, "measure_ceiling", (False,))

    # What the planner needs, and what decides the order of "auto".
    for heads, causal in (((128, 16, 16), True), ((64, 32, 32), True), ((128, 32, 8), True), ((128, 16, 16), False)):
        yield speed(16384, *heads, causal)
    yield hops("ring", 65536, 128)
    for gather in (False, True):
        yield Task("checks", f"messages on streams, gather={gather}", 8, "check_transfers", (False, "triton", gather))

    dims = {"bfloat16": (128, 64, 40, 256), "float16": (128, 64), "float32": (64,)}
    for dtype, head_dims in dims.items():
        for head_dim in head_dims:
            for name in every if dtype != "float32" else every[:2]:
                what = f"values of {name}, {dtype}, head_dim {head_dim}"
                yield Task("checks", what, 20, "check_values", (False, name, dtype, head_dim), alone=False)
    yield Task("checks", "GEMMs that return float32", 5, "check_gemms", (False,), alone=False)
    yield Task("checks", "the same bits on any number of ranks", 15, "check_invariant", (False,), alone=False)
    for name in every:
        yield Task("checks", f"strides, {name}", 10, "check_strides", (False, name), alone=False)
        yield Task("checks", f"two streams, {name}", 10, "check_streams", (False, name), alone=False)
        yield Task("checks", f"CUDA graph, {name}", 10, "check_graph", (False, name), alone=False)

    for only in ("a rank", ""):  # the deaths of ranks first, which have never run over NCCL
        what, seconds = f"ranks on one GPU, {only or 'all checks'}", 60 if only else 90
        yield Task("ranks", what, seconds, "check_ranks", (False, only), limit=240)

    yield carry(8192, 4096)
    yield carry(4096, 8192)
    for kernel, head_dim in TILED:
        yield Task("tiles", f"tiles of {kernel}, head_dim {head_dim}", 20, "measure_tiles", (False, kernel, head_dim))
    for tokens in (8192, 32768):
        yield from (speed(tokens, *shape, True) for shape in ((128, 16, 16), (64, 32, 32)))
    yield speed(16384, 256, 16, 8, True)
    yield from (hops(strategy, 65536, 128) for strategy in ("all-gather", "ulysses"))
    yield hops("ring", 16384, 128)
    yield from (hops("ring", 65536, head_dim) for head_dim in (64, 256))
    yield Task("kernels", "kernels that move bytes", 6, "measure_elementwise", (False,))
    for name in every:
        yield Task("checks", f"more than 2^31 elements, {name}", 15, "check_large", (False, name), limit=90)

    for tokens in (8192, 32768):
        yield from (hops(strategy, tokens, 128) for strategy in ("ring", "all-gather", "ulysses"))
    yield from (carry(*sizes) for sizes in ((16384, 8192), (8192, 16384)))
    for tokens in (4096, 65536, 2048):
        yield from (speed(tokens, *shape, True) for shape in ((128, 16, 16), (64, 32, 32)))
    for strategy in ("all-gather", "ulysses", "ring"):
        for tokens in (16384, 65536, 8192, 32768, 131072):
            yield from (hops(strategy, tokens, head_dim) for head_dim in (128, 64, 256))

    # What takes long to start, and may disturb what runs after it.
    for causal in (True, False):
        yield Task("peers", f"FlexAttention, causal={causal}", 30, "measure_flex", (False, causal), limit=120)
    for tool in ("memcheck", "racecheck"):
        for command in tools:
            yield Task(
                "checks", f"compute-sanitizer {tool}", 60, "two_shapes", (), limit=150,
                under=(command, "--tool", tool, "--error-exitcode", "9"),
                environment=(("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),),
            )  # fmt: skip


def _smoke_tasks(backends: Sequence[str]) -> Iterator[Task]:
    """Every function once, on tiny shapes."""
    shape = ("float16", 32, 1, 2, 1)
    calls: list[tuple[str, str, tuple[Any, ...]]] = [
        *(("checks", "check_contact", (kernel, "triton", *shape)) for kernel in ("forward", "carry", "backward")),
        *(("checks", "check_values", (name, "float16", 32)) for name in backends),
        *(
            ("checks", function, ("triton",))
            for function in ("check_strides", "check_streams", "check_graph", "check_large")
        ),
        ("checks", "check_gemms", ()),
        ("checks", "check_invariant", ()),
        ("ranks", "check_ranks", ("balanced",)),
        *(("checks", "check_transfers", ("reference", gather)) for gather in (False, True)),
        ("kernels", "measure_ceiling", ()),
        ("kernels", "measure_speed", ([*backends, "triton deterministic"], 64, 64, 2, 1, True, True)),
        ("kernels", "measure_carry", (64, 32)),
        ("kernels", "measure_elementwise", ()),
        *(("hops", "measure_hops", (backends, s, 64, 32)) for s in ("ring", "all-gather", "ulysses")),
        *(("tiles", "measure_tiles", (kernel, 32)) for kernel in ("forward", "backward", "dkdv", "dq")),
    ]
    for part, function, arguments in calls:
        yield Task(part, " ".join(map(str, (function, *arguments))), 1, function, (True, *arguments), limit=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, nothing written: does it run?")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given several times")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the tasks whose names contain this text")
    parser.add_argument("--seconds", type=float, default=440.0, help="what has not ended by then is left out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and Markdown")
    parser.add_argument(
        "--resume", type=Path, metavar="REPORT", help="a JSON report: leave out what it has, and add to it"
    )
    arguments = parser.parse_args(argv)
    smoke, parts = arguments.smoke, arguments.part or PARTS
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    report = Report() if arguments.resume is None else Report.read(arguments.resume)
    before = dict(report.environment)
    suffix = "".join(f"-{part}" for part in arguments.part or ())
    worker = [sys.executable, str(Path(__file__).with_name("gpu_worker.py"))]
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    # Each task is a process: without this, cudnn_flex would compile its kernels in each.
    environment = {"TRITON_INTERPRET": "1"} if smoke else {"FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
    with Runner(
        worker, report, None if smoke else arguments.out, suffix, arguments.seconds, jobs, environment
    ) as runner:

        def stop(*_: object) -> None:  # the processes have sessions of their own, and would go on
            runner.kill()
            os._exit(1)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        runner.run([Task("", "environment", 0, "describe", (smoke,))])
        if not report.environment:
            return 2  # the reason has been printed
        same = {"gpu", "torch", "triton", "python", "cudnn"} & {*before}
        if changed := {x for x in same if before[x] != report.environment.get(x)}:
            print(f"--resume {arguments.resume}: it is of another machine or another version: {', '.join(changed)}")
            return 2
        every = tasks(
            smoke, report.environment["backends"], [tool] if tool else [], report.environment.get("only_by_name", ())
        )
        done = {task["name"] for task in report.tasks}
        wanted = (task for task in every if task.part in parts and arguments.only in task.name)
        runner.run([task for task in wanted if task.name not in done])
    if not smoke:
        print(markdown(report))
    checks, failed = report.of("check"), report.failed()
    print(f"checks: {sum(row['passed'] for row in checks)} passed; failed: {len(failed)}", flush=True)
    print(
        *(
            f"{row['kind']} {row['task']}: {row['what']}: {str(row.get('error') or row['errors'])[:300]}"
            for row in failed
        ),
        sep="\n",
    )
    if smoke:
        print("smoke: interpreted figures mean nothing and are not kept")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
