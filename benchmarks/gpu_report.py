"""The report of ``gpu.py``: the rows that a task writes as they end, and the tables. Imports no other package."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
T = TypeVar("T")
GPU_LOST = 3  # exit status of a process whose GPU context is lost, for example after an illegal memory access


@dataclass
class Rows:
    """The rows of one task, in its own process. Each is written to a file as it ends.

    Attributes:
        path: the file, one JSON object a line.
        skip: what has already a row, or ended an earlier process of this task.
        check_gpu: raises if the GPU's context is lost.
    """

    path: Path
    skip: frozenset[str] = frozenset()
    check_gpu: Callable[[], object] = lambda: None

    def add(self, kind: str, what: str, **fields: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "what": what, **fields}) + "\n")

    def attempt(self, what: str, run: Callable[[], T]) -> T | None:
        """The result of ``run``. If it raises, a row with the causes is written, and the result is None.

        If the process ends or hangs in ``run``, it is replaced by a process that leaves ``what`` out.
        """
        if what in self.skip:
            return None
        self.add("begin", what)
        try:
            return run()
        except Exception as error:
            self.add("failure", what, error=causes(error))
            try:
                self.check_gpu()
            except Exception:
                sys.exit(GPU_LOST)
            return None

    def first_call(self, what: str, run: Callable[[], object]) -> float | None:
        """The seconds of the first call, with compilation; None if it fails."""

        def timed() -> float:
            began = time.perf_counter()
            run()
            self.check_gpu()
            return time.perf_counter() - began

        return self.attempt(what, timed)


def causes(error: BaseException) -> str:
    """The error and all its causes, the first cause first, each with its message and where it was raised."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    parts = []
    for cause in reversed(chain):
        calls = [f"{Path(x.filename).name}:{x.lineno} {x.name}" for x in traceback.extract_tb(cause.__traceback__)[-4:]]
        parts.append(f"{type(cause).__name__}: {str(cause)[:1500]} [{' < '.join(reversed(calls))}]")
    return "\n".join(parts)


@dataclass
class Report:
    """Results so far.

    Attributes:
        environment: GPU and versions.
        rows: the rows of all tasks. Their kinds: check, ceiling, speed, hops, carry, tiles, elementwise, sanitizer;
            failure for what raised or ended its process; skipped.
        tasks: for each task, the seconds it took and how its processes ended.
    """

    environment: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    tasks: list[Row] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Report:
        """The report in a JSON file, with the tasks that have ended and their rows."""
        stored = json.loads(path.read_text())
        tasks = [task for task in stored["tasks"] if task["ends"][-1:] == ["ended"] and task["name"] != "environment"]
        names = {task["name"] for task in tasks}
        return cls(stored["environment"], [row for row in stored["rows"] if row["task"] in names], tasks)

    def of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]

    def failed(self) -> list[Row]:
        """What raised, ended its process, or is wrong."""
        return [x for x in self.rows if x["kind"] == "failure" or not x.get("passed", True)]

    def write(self, folder: Path, suffix: str = "") -> None:
        """Write the JSON and the Markdown, replacing earlier ones."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = "gpu-" + str(self.environment.get("gpu")).lower().replace(" ", "-") + suffix
        for ending, text in ((".json", json.dumps(vars(self), indent=1)), (".md", markdown(self))):
            partial_file = folder / f"{stem}{ending}.partial"
            partial_file.write_text(text)
            partial_file.replace(folder / f"{stem}{ending}")


# Predicted TFLOP/s of the Triton kernels on an H100 SXM, from the instructions of their loops: by head_dim and tokens
# forward full, forward causal, backward full, backward causal.
PREDICTED = {
    (128, 8192): (455, 395, 440, 360),
    (128, 16384): (470, 430, 455, 400),
    (128, 32768): (485, 460, 465, 440),
    (64, 8192): (375, 320, 340, 285),
    (64, 16384): (385, 350, 355, 320),
    (64, 32768): (395, 375, 370, 350),
    (256, 16384): (380, 350, 170, 160),
}
PREDICTED_DETERMINISTIC = {(128, 16384): (270, 245)}  # backward full, backward causal


def predicted(row: Row, direction: str, name: str) -> float | None:
    """The predicted TFLOP/s of a row, on GPUs with sm_90 only."""
    shape, causal = (row["head_dim"], row["tokens"]), int(row["causal"])
    if name == "triton deterministic":
        pair = PREDICTED_DETERMINISTIC.get(shape)
        return pair[causal] if pair and direction == "backward" else None
    four = PREDICTED.get(shape)
    return four[causal + 2 * (direction == "backward")] if four and name == "triton" else None


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    line = ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]
    return [*line, ""] if rows else []


def _names(rows: list[Row], field: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row[field]))


def _shape(row: Row) -> list[str]:
    mask = "causal" if row["causal"] else "full"
    return [str(row["tokens"]), str(row["batch"]), str(row["head_dim"]), f"{row['heads']}/{row['kv_heads']}", mask]


def _figure(values: dict[str, float], name: str, digits: int) -> str:
    return f"{values[name]:.{digits}f}" if name in values else ""


def markdown(report: Report) -> str:
    """The figures as tables.

    Goals on an H200 at head_dim 128, causal, with 16k tokens and more: "auto" has at least 0.97 of the speed of the
    fastest implementation. The Triton kernels have at least 0.8 (forward) and 0.75 (backward) of cuDNN's speed, and are
    faster than FlexAttention. A rank of a ring has at least 0.95 of the ideal speed. A carry costs less than 3 %.
    """
    env, checks, failed = report.environment, report.of("check"), report.failed()
    wrong = sum(not row["passed"] for row in checks)
    lines = [f"# {env.get('gpu')}", "", f"torch {env.get('torch')}, triton {env.get('triton')}, cuDNN "
             f"{env.get('cudnn')}, backends {', '.join(env.get('backends', []))}.", "",
             f"Checks against float64: {len(checks) - wrong} passed, {wrong} failed.", ""]  # fmt: skip
    for row in failed:
        why = row.get("error") or ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
        lines += [f"* FAILED: {row['task']}: {row['what']}: " + why.replace("\n", "\n  ")]
    if ranks := report.of("ranks"):
        lines += ["## Ranks on one GPU, over NCCL", ""]
        lines += [*(f"* {'ok' if row['passed'] else 'FAILED'}: {row['what']}" for row in ranks), ""]
    cells = [[r["what"], f"{r['figure']:.0f}", r["unit"], r["gpu"]] for r in report.of("ceiling")]
    lines += ["## Ceiling", "", *_table(["what", "figure", "unit", "clock, clock limit, power, limit, degrees"], cells)]
    shape = ["tokens", "batch", "head_dim", "heads", "mask"]
    speed = sorted(report.of("speed"), key=lambda r: (r["head_dim"], r["heads"] != r["kv_heads"], r["tokens"]))
    for direction in ("forward", "backward"):
        names = _names(speed, direction)
        cells = []
        for row in speed:
            rates = row[direction]
            library = rates.get("SDPA cudnn")
            of_cudnn = f"{rates['triton'] / library:.2f}" if library and "triton" in rates else ""
            best = f"{rates['attention()'] / max(rates.values()):.2f}" if "attention()" in rates else ""
            cells.append([*_shape(row), *(_figure(rates, n, 0) for n in names), of_cudnn, best])
        lines += [f"## TFLOP/s {direction}, bfloat16, single calls", ""]
        lines += _table([*shape, *names, "triton of cuDNN", "auto of best"], cells)
        of = [
            (row, name, row[direction][name], predicted(row, direction, name))
            for row in speed
            for name in row[direction]
        ]
        cells = [[*_shape(row), name, f"{rate:.0f}", f"{p:.0f}", f"{rate / p:.2f}"] for row, name, rate, p in of if p]
        lines += [f"## {direction.capitalize()} beside its prediction for an H100", ""]
        lines += _table([*shape, "kernel", "TFLOP/s", "predicted", "ratio"], cells)
        for title, which, digits in (("TFLOP/s {}, back to back for half a second", "sustained", 0),
                                     ("Microseconds of the host, {}", "host_us", 0),
                                     ("Seconds of the first call, {}", "first_s", 1)):  # fmt: skip
            with_it = [row for row in speed if row[f"{direction}_{which}"]]
            cells = [[*_shape(r), *(_figure(r[f"{direction}_{which}"], n, digits) for n in names)] for r in with_it]
            lines += [f"## {title.format(direction)}", "", *_table([*shape, *names], cells)]
        lines += [f"* launched while the GPU waited, {row['what']}: {', '.join(late)}"
                  for row in speed if (late := row[f"{direction}_not_queued"])]  # fmt: skip
        lines += [f"* computed by another backend, {row['what']}: {name} by {', '.join(ran)}"
                  for row in speed for name, ran in row[f"{direction}_ran"].items() if {*ran} != {name}]  # fmt: skip
    lines += ["## One rank's computation, its steps one after another on one GPU, no communication", "",
              "The ideal is the fastest attention of all tokens divided by the ranks.", ""]  # fmt: skip
    cells = []
    for row in report.of("hops"):
        for direction in ("forward", "backward"):
            of = row[direction]
            for name, ms in of["rank_ms"].items():
                ran = ", ".join(f"{n} {calls}" for n, calls in row["ran"][name].items())
                cells.append([row["strategy"], str(row["tokens"]), str(row["head_dim"]), direction, name, ran,
                              f"{of['ideal_ms']:.2f}", f"{ms:.2f}", _figure(of["sustained_ms"], name, 2),
                              f"{of['rank_host_us'][name]:.0f}", f"{of['ideal_ms'] / ms:.3f}"])  # fmt: skip
    lines += _table(["strategy", "tokens", "head_dim", "direction", "backend", "ran (steps)", "ideal, ms", "ms",
                     "back to back, ms", "host, us", "share of ideal"], cells)  # fmt: skip
    ways = ["out", "in and out", "in, last"]
    cells = [[r.get("backend", "triton"), str(r["queries"]), str(r["keys"]),
              *(f"{100 * r['cost'][w]:.1f} %" for w in ways)] for r in report.of("carry")]  # fmt: skip
    lines += ["## Cost of the carry", "", *_table(["backend", "queries", "keys", *ways], cells)]
    cells = [[r["kernel"], str(r["head_dim"]), tile, f"{rate:.0f}", f"{r['first_s'][tile]:.1f}"]
             for r in report.of("tiles") for tile, rate in r["rates"].items()]  # fmt: skip
    lines += ["## Tiles of the Triton kernels, 16k tokens, causal", ""]
    lines += _table(["kernel", "head_dim", "tile", "TFLOP/s", "first call, s"], cells)
    cells = [[r["what"], f"{r['ms']:.3f}", f"{r['gb_per_s']:.0f}"] for r in report.of("elementwise")]
    lines += ["## Kernels that move bytes", "", *_table(["kernel", "ms", "GB/s"], cells)]
    if left_out := report.of("skipped"):
        lines += ["## Left out", "", *(f"* {row['what']}: {row['why']}" for row in left_out)]
    return "\n".join(lines) + "\n"
