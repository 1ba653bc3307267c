"""``seqpar bench``: strategies and other packages side by side on this machine, on the same inputs.

Units: seconds and bytes. Tokens and operations per second are of all ranks together.
"""

from __future__ import annotations

import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ..base.checks import check_int
from ..ranks.mesh import ranks_by_host
from .bench_cases import PRESETS, BenchConfig
from .bench_run import BOTH, PASSES, CaseResult, Sample, run_cases
from .bench_runners import KINDS, adapters
from .launch import CommandError, bad_options, cores, join, launch, under_launcher
from .tables import device_name, human_bytes, make_folder, number_table, pyplot_without_display, save_figure, write_csv

_DEADLINE_S = 4 * 3600.0  # of the whole command
_WIDTH = 100  # columns of the tables if stdout is not a terminal
_TIMEOUT = timedelta(seconds=300)  # of one collective, because another package may make a rank wait forever


def bench(**options: Any) -> None:
    """Compare strategies, layouts and other packages on this machine. The default takes less than five minutes."""
    config = BenchConfig(**options)
    with bad_options():
        check_int("nproc", config.nproc, 1)
        config.check(int(os.environ["WORLD_SIZE"]) if under_launcher() else config.nproc)
        adapters(config)
        make_folder(Path(config.out))
    if under_launcher():
        run_bench(config)
    else:
        launch(run_bench, config.nproc, config, deadline_s=_DEADLINE_S)


bench.__signature__ = inspect.signature(BenchConfig, eval_str=True)  # type: ignore[attr-defined] # typer reads it


def run_bench(config: BenchConfig) -> None:
    """Run one rank of the comparison. Rank 0 prints the tables and writes the files."""
    start = time.monotonic()
    device = join(_TIMEOUT, config.device)
    assert dist.group.WORLD is not None
    hosts = len(ranks_by_host(dist.group.WORLD))
    world, is_first = dist.get_world_size(), dist.get_rank() == 0
    cases, folder = config.cases(world, device.type == "cuda"), Path(config.out)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    facts = machine_facts(device)
    if is_first:
        presets = "; ".join(f"{name}: {PRESETS[name].about}" for name in config.presets)
        console.print(
            f"{facts['device']}, {cores()} core(s), {world} rank(s) on {hosts} host(s), torch "
            f"{facts['torch']}. {len(cases)} case(s); presets: {presets}"
        )
    with console.status("starting") if is_first else nullcontext() as status:
        results = run_cases(config, cases, device, status.update if status else lambda text: None)
    if is_first:
        report(results, facts, folder, console, config.charts)
        console.print(f"[dim]{time.monotonic() - start:.0f} s in all; tables, charts and JSON are in {folder}[/]")
    dist.barrier()
    dist.destroy_process_group()
    others = tuple(peer.NAME for peer in adapters(config))
    refused = [reason for result in results for reason in result.refused.items()]
    wrong = [f"{name}: {why}" for name, why in refused if why.startswith("WRONG") and not name.startswith(others)]
    if wrong:
        raise CommandError("; ".join(wrong))


def machine_facts(device: torch.device) -> dict[str, Any]:
    """The columns of the CSV file that are the same in all rows."""
    from .. import __version__

    git = ["git", "describe", "--always", "--dirty"]
    try:
        described = subprocess.run(git, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        commit = described.stdout.strip()  # empty for an installed package
    except OSError:  # no git
        commit = ""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "device": device_name(device),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seqpar": __version__,
    }


# What is printed and written


def rows_of(result: CaseResult) -> list[dict[str, Any]]:
    """One row for each runner and pass: the ideal, then seqpar's strategies, other packages, and slower ideals.

    The keys are the columns of the CSV file. A value that was not measured is None.
    """
    rows = []
    for run in PASSES:
        measured = [s for s in result.samples if s.seconds[run]]
        ideals = [s for s in measured if s.kind == "ideal"]
        if ideals:
            best = min(ideals, key=lambda s: statistics.median(s.seconds[run]))
            others = sorted((s for s in measured if s is not best), key=lambda s: KINDS.index(s.kind))
            rows += [_row(result, s, run, best) for s in (best, *others)]
    return rows


def _row(result: CaseResult, sample: Sample, run: str, ideal: Sample) -> dict[str, Any]:
    """The row of one runner and pass. ``ideal`` is the fastest attention on one process."""
    case, seconds = result.case, sample.seconds[run]
    alone = sample.kind == "ideal"
    median = statistics.median(seconds)
    exposed = [s - t for s, t in zip(seconds, sample.silent[run], strict=False)]
    both = run == BOTH or not sample.seconds[BOTH]  # bytes and memory were measured for forward and backward together
    shares = [i / (1 if alone else result.divisor) / s for i, s in zip(ideal.seconds[run], seconds, strict=True)]
    return {
        **asdict(case),
        "ranks": 1 if alone else case.ranks,
        "what": sample.name,
        "kind": sample.kind,
        "layout": sample.layout,
        "backend": sample.backend,
        "run": run,
        "rounds": len(seconds),
        "median_s": median,
        "fastest_s": min(seconds),
        "slowest_s": max(seconds),
        "cpu_s": statistics.median(sample.cpu) if both else None,
        "share_of_ideal": statistics.median(shares),
        "tokens_per_s": case.batch * len(case.queries()) / median,
        "tflops": case.operations(run == BOTH) / median / 1e12,
        "exposed_s": max(0.0, statistics.median(exposed)) if exposed else None,
        "bytes_sent": sample.bytes_sent if both and not alone else None,
        "bytes_between_hosts": sample.bytes_between_hosts if both and not alone else None,
        "peak_memory": sample.peak_memory if both else None,
        "warmup_s": sample.warmup_s,
        "error": sample.error,
        "chosen": sample.chosen,
    }


def table_of(result: CaseResult, run: str, width: int = _WIDTH) -> Table:
    """The table of one case and one of ``PASSES``, without empty columns and those that do not fit into ``width``."""
    case = result.case
    rounds = max((len(s.seconds[run]) for s in result.samples), default=0)
    rows = [row for row in rows_of(result) if row["run"] == run]
    columns = {heading: [text(row) for row in rows] for heading, text, _ in _COLUMNS}
    columns = {heading: cells for heading, cells in columns.items() if {*cells} - {"", "0 B"}}
    for heading, _, turn in sorted(_COLUMNS, key=lambda column: column[2]):
        lines = [max(len(line) for text in (x, *cells) for line in text.split("\n")) for x, cells in columns.items()]
        if turn and 1 + sum(3 + length for length in lines) > width:
            columns.pop(heading, None)
    sizes = str(case.head_dim) if case.head_dim == case.v_head_dim else f"{case.head_dim} (v {case.v_head_dim})"
    table = number_table(
        *columns,
        title=f"[bold]{run}[/], {case.preset}: {case.seq_len:,} tokens, {case.ranks} rank(s), {case.heads} heads "
        f"({case.kv_heads} KV) of {sizes}, mask {case.mask}, {case.dtype}\nmedian of {rounds} rounds; other programs "
        f"took {result.busy_share:.0%} of the cores",
        title_justify="left",
    )
    for i, cells in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(*cells, end_section=rows[i]["kind"] != rows[min(i + 1, len(rows) - 1)]["kind"])
    return table


def _name(row: Mapping[str, Any]) -> str:
    suffix = ", one process" if row["kind"] == "ideal" else f": {row['chosen']}" if row["chosen"] else ""
    return f"{row['what']}{suffix}"


def _size(column: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row[column] is None else human_bytes(row[column])


# The columns of the printed tables: heading, text, and its turn to be left out if the terminal is narrow; 0: never.
_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str], int], ...] = (
    ("", _name, 0),
    ("seconds", lambda row: f"{row['median_s']:.4f}", 0),
    ("range", lambda row: f"{row['fastest_s']:.4f} to {row['slowest_s']:.4f}", 3),
    ("share of\nthe ideal", lambda row: f"{row['share_of_ideal']:.2f}", 0),
    ("tokens/s", lambda row: f"{row['tokens_per_s']:,.0f}", 5),
    ("TFLOP/s", lambda row: f"{row['tflops']:.3f}" if row["tflops"] < 10 else f"{row['tflops']:,.0f}", 2),
    ("exposed\nmessages", lambda row: "" if row["exposed_s"] is None else f"{row['exposed_s'] * 1e3:.1f} ms", 4),
    ("sent by\na rank", _size("bytes_sent"), 7),
    ("to other\nhosts", _size("bytes_between_hosts"), 1),
    ("peak\nmemory", _size("peak_memory"), 6),
)


def report(
    results: Sequence[CaseResult], facts: dict[str, Any], folder: Path, console: Console, charts: bool = True
) -> None:
    """Print the tables and why some runners did not run, and write the CSV, the JSON and the charts to ``folder``."""
    for result in results:
        for run in PASSES:
            if any(s.seconds[run] for s in result.samples):
                console.print(table_of(result, run, console.width))
    console.print(
        "[dim]Share of the ideal: the ideal time divided by the measured time, the median over the rounds. Ideal "
        "time: the fastest attention of the full sequence on one process with all cores of its host, divided "
        "by the number of hosts (on CUDA: by the number of ranks). Exposed messages: the measured time minus the time "
        "of the same call if its messages took no time. Bytes sent, and peak memory above the inputs, count "
        "forward and backward on the rank with the most. Columns for which the terminal is too narrow are in "
        "bench.csv.[/]",
    )
    cases_by_reason: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for reason in result.refused.items():
            cases_by_reason.setdefault(reason, []).append(str(result.case))
    for (name, why), cases in cases_by_reason.items():
        where = "" if len(cases) == len(results) else f" ({'; '.join(cases)})"
        console.print(f"[bold]{name}[/] did not run: {why}{where}")
    rows = [row for result in results for row in rows_of(result)]
    if rows:
        write_csv(folder / "bench.csv", [{**facts, **row} for row in rows])
    content = {"machine": facts, "rows": rows, "cases": [asdict(result) for result in results]}
    (folder / "bench.json").write_text(json.dumps(content, indent=1) + "\n")
    if charts and rows:
        draw_charts(results, folder, f"{facts['device']}, {results[-1].case.ranks} rank(s)")


_MARKERS = "osD^vP*X<>"
# By file: the columns of the x axis and of the y axis, and the label of the latter.
_CHARTS = {
    "length.png": ("seq_len", "median_s", "seconds"),
    "ideal.png": (
        "seq_len",
        "share_of_ideal",
        "share of the ideal; 1: the fastest attention of the full sequence on one process, divided by the resources",
    ),
    "memory.png": ("seq_len", "peak_memory", "peak memory of a rank above its inputs, in MiB"),
    "ranks.png": ("ranks", "median_s", "seconds"),
}


def draw_charts(results: Sequence[CaseResult], folder: Path, title: str) -> list[Path]:
    """Draw the charts into ``folder``, an existing folder, and return the files. Empty charts are left out.

    A chart has one panel for each preset and pass, and one line for each runner. The charts over the length are of the
    most ranks, and the chart over the number of ranks is of the longest sequence.
    """
    rows = [{**row, "of": result.case.ranks} for result in results for row in rows_of(result)]
    names = list(dict.fromkeys(row["what"] for row in sorted(rows, key=lambda r: r["kind"] != "seqpar")))
    files = []
    for file, (x, y, label) in _CHARTS.items():
        fixed = "seq_len" if x == "ranks" else "of"
        largest = max(row[fixed] for row in rows)
        points = [row for row in rows if row[fixed] == largest and row[y] is not None]
        if x == "ranks" and len({result.case.ranks for result in results}) == 1:
            points = []
        if y == "share_of_ideal":
            points = [row for row in points if row["kind"] != "ideal"]
        if y == "peak_memory":
            points = [{**row, y: row[y] / (1 << 20)} for row in points if row["run"] == BOTH]
        if points:
            files.append(_draw(points, names, x, y, f"{title}\n{label}", folder / file))
    return files


def _draw(rows: list[dict[str, Any]], names: list[str], x: str, y: str, title: str, path: Path) -> Path:
    presets = list(dict.fromkeys((row["preset"], row["mask"]) for row in rows))
    passes = [run for run in PASSES if any(row["run"] == run for row in rows)]
    pyplot = pyplot_without_display()
    colors = pyplot.get_cmap("tab20").colors
    size = (4.6 * len(presets) + 2.6, 3.4 * len(passes) + 0.6)
    figure, grid = pyplot.subplots(len(passes), len(presets), figsize=size, squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    ticks = sorted({row[x] for row in rows})
    for axes, (run, preset) in zip(grid.flat, product(passes, presets), strict=True):
        for n, name in enumerate(names):
            inside = [r for r in rows if (r["run"], (r["preset"], r["mask"]), r["what"]) == (run, preset, name)]
            if inside:
                ideal = inside[0]["kind"] == "ideal"
                style = {"color": "0.45", "linestyle": "--"} if ideal else {"color": colors[2 * n % 20 + n // 10]}
                points = zip(*sorted((row[x], row[y]) for row in inside), strict=True)
                (handles[name],) = axes.plot(*points, marker=_MARKERS[n % 10], markersize=5, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        if y == "median_s":
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_title(f"{preset[0]}, {run}", fontsize=10)
        axes.set_xlabel("tokens" if x == "seq_len" else x)
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return save_figure(figure, path)
