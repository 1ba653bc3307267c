"""The results of ``gpu.py``: the rows, the order in which they are measured in a limited time, and the tables."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Report:
    """Results so far.

    Attributes:
        environment: GPU and versions.
        checks: errors against float64, and the result of compute-sanitizer.
        speed: TFLOP/s of the Triton kernels and of other implementations, and the host's microseconds.
        ranks: the time of one rank's computation, and its share of the time of the full attention.
        carry: cost of the carry.
        elementwise: kernels that only move bytes.
        skipped: the tasks that were left out, and why.
    """

    environment: dict[str, Any]
    checks: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    carry: list[dict[str, Any]] = field(default_factory=list)
    elementwise: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write the JSON and the Markdown, replacing earlier ones."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = "gpu-" + str(self.environment["gpu"]).lower().replace(" ", "-")
        for suffix, text in ((".json", json.dumps(vars(self), indent=1)), (".md", markdown(self))):
            partial_file = folder / f"{stem}{suffix}.partial"
            partial_file.write_text(text)
            partial_file.replace(folder / f"{stem}{suffix}")


@dataclass(frozen=True)
class Task:
    """Some rows of the report.

    Attributes:
        name: what is measured.
        seconds: about how long the task takes on an H200.
        run: adds the rows to a report.
    """

    name: str
    seconds: float
    run: Callable[[Report], None]


def run_in_time(
    tasks: Sequence[Task],
    report: Report,
    seconds: float,
    save: Callable[[Report], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the tasks in order, and leave out the tasks that would not end in time.

    Args:
        tasks: the tasks, the most important one first.
        report: receives the rows, and the names of the tasks that are left out or fail.
        seconds: the time for all tasks.
        save: called after every task.
        clock: returns the time in seconds.
    """
    deadline = clock() + seconds
    slower = 1.0  # how many times slower than an H200 this GPU has been so far, at most
    for task in tasks:
        began = clock()
        remaining = deadline - began
        if task.seconds * slower > remaining:
            report.skipped.append(
                f"{task.name}: takes {task.seconds * slower:.0f} s, and {max(remaining, 0):.0f} s were left"
            )
            continue
        try:
            task.run(report)
        except Exception as error:  # the other tasks are measured nevertheless
            report.skipped.append(f"{task.name}: {type(error).__name__}: {str(error)[:200]}")
        if task.seconds >= 1:
            slower = max(slower, (clock() - began) / task.seconds)
        save(report)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def markdown(report: Report) -> str:
    """The figures as tables.

    Goals on an H200 at head_dim 128, causal, with 16k tokens and more: "auto" has at least 0.97 of the speed of the
    fastest implementation. The Triton kernels have at least 0.8 (forward) and 0.75 (backward) of cuDNN's speed, and are
    faster than FlexAttention. A rank of a ring has at least 0.95 of the ideal speed. A carry costs less than 3 %.
    """
    env = report.environment
    failed = [row for row in report.checks if not row["passed"]]
    lines = [f"# {env['gpu']}", "", f"torch {env['torch']}, triton {env['triton']}, cuDNN {env['cudnn']}.", "",
             f"Checks against float64: {len(report.checks) - len(failed)} passed, {len(failed)} failed.",
             ""]  # fmt: skip
    lines += [f"* FAILED: {row}" for row in failed]
    names = list(dict.fromkeys(name for row in report.speed for name in row["forward"]))
    rows = sorted(report.speed, key=lambda r: (r["head_dim"], r["heads"] != r["kv_heads"], r["tokens"]))
    shape = "| tokens | batch | head_dim | heads | mask | "

    def cells(row: dict[str, Any], values: dict[str, float]) -> str:
        of_shape = (f"{row['tokens']} | {row['batch']} | {row['head_dim']} | {row['heads']}/{row['kv_heads']} | "
                    f"{'causal' if row['causal'] else 'full'}")  # fmt: skip
        return f"| {of_shape} | " + " | ".join(f"{values[n]:.0f}" if n in values else "" for n in names)

    for direction in ("forward", "backward"):
        lines += [f"## TFLOP/s {direction}, bfloat16", "", shape + " | ".join(names) + " | of cuDNN | auto of best |",
                  "|" + " --- |" * (len(names) + 7)]  # fmt: skip
        for row in rows:
            rates = row[direction]
            share = f"{rates['seqpar'] / rates['cudnn']:.2f}" if "cudnn" in rates else ""
            auto = f"{rates['attention()'] / max(rates.values()):.2f}" if "attention()" in rates else ""
            lines.append(f"{cells(row, rates)} | {share} | {auto} |")
        lines += ["", f"## Microseconds of the host, {direction}", "", shape + " | ".join(names) + " |",
                  "|" + " --- |" * (len(names) + 5)]  # fmt: skip
        lines += [f"{cells(row, row[f'{direction}_host_us'])} |" for row in rows]
        lines += [f"* launched while the GPU waited, {row['tokens']} tokens: {', '.join(late)}"
                  for row in rows if (late := row[f"{direction}_not_queued"])]  # fmt: skip
        lines.append("")
    lines += [
        "## One rank's computation, its steps one after another on one GPU, no communication",
        "",
        "| strategy | tokens | ranks | direction | full / ranks, ms | rank | ms | host, us | share of ideal |",
        "|" + " --- |" * 9,
    ]
    for row in report.ranks:
        for direction in ("forward", "backward"):
            of = row[direction]
            for rank, ms in of["rank_ms"].items():
                host, ideal = of["rank_host_us"][rank], of["full_ms"] / row["ranks"]
                lines.append(f"| {row['strategy']} | {row['tokens']} | {row['ranks']} | {direction} | {ideal:.2f} | "
                             f"{rank} | {ms:.2f} | {host:.0f} | {of['share_of_ideal'][rank]:.3f} |")  # fmt: skip
    lines += ["", "## Cost of the carry", "", "| queries | keys | out | in and out | in, last |", "|" + " --- |" * 5]
    for row in report.carry:
        cost = [f"{100 * row['cost'][n]:.1f} %" for n in ("out", "in and out", "in, last")]
        lines.append(f"| {row['queries']} | {row['keys']} | {' | '.join(cost)} |")
    lines += ["", "## Kernels that move bytes", "", "| kernel | ms | GB/s |", "| --- | --- | --- |"]
    lines += [f"| {row['kernel']} | {row['ms']:.3f} | {row['gb_per_s']:.0f} |" for row in report.elementwise]
    if report.skipped:
        lines += ["", "## Left out", "", *(f"* {what}" for what in report.skipped)]
    return "\n".join(lines) + "\n"
