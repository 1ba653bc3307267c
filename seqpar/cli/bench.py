"""``seqpar bench``: strategies and other packages side by side on this machine, on the same inputs.

Units: seconds and bytes. Tokens and operations per second are of all ranks together.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from ..base.checks import check_int
from ..placement.layout import LAYOUT_WORDS
from ..planner.mixes import MIXES
from ..ranks.mesh import ranks_by_host
from .bench_cases import DEVICES, DTYPES, PRESETS, BenchConfig, strategy_names
from .bench_run import BOTH, PASSES, CaseResult, Sample, run_cases
from .bench_runners import adapters
from .launch import CommandError, bad_options, cores, join, launch, under_launcher
from .plan import read_tokens
from .tables import device_name, human_bytes, make_folder, number_table, pyplot_without_display, save_figure, write_csv

_DEADLINE_S = 4 * 3600.0  # of the whole command
_WIDTH = 100  # columns of the tables if stdout is not a terminal
_TIMEOUT = timedelta(seconds=300)  # of one collective, because another package may make a rank wait forever


def bench(
    preset: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(PRESETS)}. Can be repeated, like all options down to --peer."),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(strategy_names())}; the last four are values of comm for context_parallel.",
            show_default="ring, ulysses, all_gather, auto; with 4 ranks or more also hybrid",
        ),
    ] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(LAYOUT_WORDS)}; the last one is made for the mask.",
            show_default="contiguous for Ulysses, else zigzag; for the preset packed also balanced",
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            help=f"causal, full, window:N, documents:N (N tokens each), or {', '.join(map('mix:{}'.format, MIXES))}.",
            show_default="the preset's",
        ),
    ] = None,
    seq_len: Annotated[
        list[str] | None,
        typer.Option(help="Tokens of the full sequence, such as 4096 or 128K.", show_default="depends on the device"),
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(help="Number of ranks that compute, of those started.", show_default="all")
    ] = None,
    backend: Annotated[list[str] | None, typer.Option(help="auto, or a backend that seqpar doctor lists.")] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Another package, by its file in benchmarks/peers.", show_default="all")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure other packages as well.")] = True,
    nproc: Annotated[int, typer.Option(help="Ranks to start on this machine. Ignored under torchrun.")] = 2,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 1,
    heads: Annotated[int | None, typer.Option(help="Query heads.", show_default="depends on the device")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="KV heads.", show_default="the preset's")] = None,
    head_dim: Annotated[int | None, typer.Option(help="head_dim of v.", show_default="depends on the device")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(DTYPES)}.", show_default="bfloat16 on CUDA, else float32")
    ] = None,
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "auto",
    rounds: Annotated[int, typer.Option(help="Rounds of each case. In a round, every attention runs once.")] = 7,
    budget: Annotated[
        float, typer.Option(help="Seconds after which rounds are left out. Each case has at least three.")
    ] = 150,
    charts: Annotated[bool, typer.Option(help="Draw PNG charts.")] = True,
    trace: Annotated[bool, typer.Option("--trace", help="Write a Chrome trace for every rank and case.")] = False,
    out: Annotated[str, typer.Option(help="Folder for the CSV, the JSON, the charts and the traces.")] = "bench",
) -> None:
    """Compare strategies, layouts and other packages on this machine. The default takes less than five minutes."""
    options: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in locals().items() if x is not None}
    del options["nproc"]
    with bad_options():
        options["seq_len"] = tuple(map(read_tokens, seq_len or ()))
        config = BenchConfig(**options)
        check_int("nproc", nproc, 1)
        config.check(int(os.environ["WORLD_SIZE"]) if under_launcher() else nproc)
        adapters(config.peer_names)
    if under_launcher():
        run_bench(config)
        return
    with bad_options():
        make_folder(Path(out))
    launch(run_bench, nproc, config, deadline_s=_DEADLINE_S)


def run_bench(config: BenchConfig) -> None:
    """Run one rank of the comparison. Rank 0 prints the tables and writes the files."""
    start = time.monotonic()
    device = join(_TIMEOUT, config.device)
    assert dist.group.WORLD is not None
    hosts = len(ranks_by_host(dist.group.WORLD))
    world, is_first = dist.get_world_size(), dist.get_rank() == 0
    cases, folder = config.cases(world, device.type == "cuda"), Path(config.out)
    if is_first or config.trace:
        with bad_options():
            make_folder(folder)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    facts = machine_facts(device)
    if is_first:
        console.print(
            f"{facts['device']}, {cores()} core(s), {world} rank(s) on {hosts} host(s), torch "
            f"{facts['torch']}. {len(cases)} case(s); presets: "
            + "; ".join(f"{name}: {PRESETS[name].about}" for name in config.preset),
            highlight=False,
        )
    with console.status("starting") if is_first else nullcontext() as status:
        results = run_cases(
            config, cases, device, adapters(config.peer_names), status.update if status else lambda text: None
        )
    if is_first:
        report(results, facts, folder, console, config.charts)
        console.print(
            f"[dim]{time.monotonic() - start:.0f} s in all; tables, charts and JSON are in {folder}[/]", highlight=False
        )
    dist.barrier()
    dist.destroy_process_group()
    seqpars = {*strategy_names(), "local"}  # first words of the names of runners
    refused = [reason for result in results for reason in result.refused.items()]
    wrong = [f"{name}: {why}" for name, why in refused if why.startswith("WRONG") and name.split(" ")[0] in seqpars]
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
        if not ideals:
            continue
        best = min(ideals, key=lambda s: statistics.median(s.seconds[run]))
        order = {"seqpar": 1, "peer": 2, "ideal": 3}
        rows += [_row(result, s, run, best) for s in sorted(measured, key=lambda s: 0 if s is best else order[s.kind])]
    return rows


def _row(result: CaseResult, sample: Sample, run: str, ideal: Sample) -> dict[str, Any]:
    """The row of one runner and pass. ``ideal`` is the fastest attention on one process."""
    case, seconds = result.case, sample.seconds[run]
    alone = sample.kind == "ideal"
    divisor = 1 if alone else result.divisor
    median = statistics.median(seconds)
    exposed = [s - t for s, t in zip(seconds, sample.silent[run], strict=False)]
    operations = case.operations(backward=False) + (case.operations(backward=True) if run == BOTH else 0.0)
    both = run == BOTH or not sample.seconds[BOTH]  # bytes and memory were measured for forward and backward together
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
        "share_of_ideal": statistics.median(i / divisor / s for i, s in zip(ideal.seconds[run], seconds, strict=True)),
        "tokens_per_s": case.batch * case.seq_len / median,
        "tflops": operations / median / 1e12,
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
    columns = {heading: [text(row) for row in rows] for heading, text in _COLUMNS.items()}
    columns = {heading: cells for heading, cells in columns.items() if {*cells} - {"", "0 B"}}
    for heading in (x for x in _LEFT_OUT_FIRST if x in columns):
        cells = [[heading, *texts] for heading, texts in columns.items()]
        if 1 + sum(3 + max(len(line) for cell in column for line in cell.split("\n")) for column in cells) <= width:
            break
        del columns[heading]
    sizes = str(case.head_dim) if case.head_dim == case.v_head_dim else f"{case.head_dim} (v {case.v_head_dim})"
    table = number_table(
        *columns,
        title=f"[bold]{run}[/], {case.preset}: {case.seq_len:,} tokens, {case.ranks} rank(s), {case.heads} heads "
        f"({case.kv_heads} KV) of {sizes}, mask {case.mask}, {case.dtype}\nmedian of {rounds} rounds; other programs "
        f"took {result.busy_share:.0%} of the cores",
        title_justify="left",
    )
    for i, cells_of_row in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(*cells_of_row, end_section=i + 1 < len(rows) and rows[i]["kind"] != rows[i + 1]["kind"])
    return table


def _name(row: Mapping[str, Any]) -> str:
    suffix = ", one process" if row["kind"] == "ideal" else f": {row['chosen']}" if row["chosen"] else ""
    return f"{row['what']}{suffix}"


def _size(column: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row[column] is None else human_bytes(row[column])


# The columns of the printed tables by heading, and those that a narrow terminal leaves out, in this order.
_COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "": _name,
    "seconds": lambda row: f"{row['median_s']:.4f}",
    "range": lambda row: f"{row['fastest_s']:.4f} to {row['slowest_s']:.4f}",
    "share of\nthe ideal": lambda row: f"{row['share_of_ideal']:.2f}",
    "tokens/s": lambda row: f"{row['tokens_per_s']:,.0f}",
    "TFLOP/s": lambda row: f"{row['tflops']:.3f}" if row["tflops"] < 10 else f"{row['tflops']:,.0f}",
    "exposed\nmessages": lambda row: "" if row["exposed_s"] is None else f"{row['exposed_s'] * 1e3:.1f} ms",
    "sent by\na rank": _size("bytes_sent"),
    "to other\nhosts": _size("bytes_between_hosts"),
    "peak\nmemory": _size("peak_memory"),
}
_LEFT_OUT_FIRST = (
    "to other\nhosts",
    "TFLOP/s",
    "range",
    "exposed\nmessages",
    "tokens/s",
    "peak\nmemory",
    "sent by\na rank",
)


def report(
    results: Sequence[CaseResult], facts: dict[str, Any], folder: Path, console: Console, charts: bool = True
) -> None:
    """Print the tables and why some runners did not run, and write the CSV, the JSON and the charts to ``folder``."""
    for result in results:
        for run in PASSES:
            console.print(table_of(result, run, console.width))
    console.print(
        "[dim]Share of the ideal: the ideal time divided by the measured time, the median over the rounds. Ideal "
        "time: the fastest attention of the full sequence on one process with all cores of its host, divided "
        "by the number of hosts (on CUDA: by the number of ranks). Exposed messages: the measured time minus the time "
        "of the same call if its messages took no time. Bytes sent, and peak memory above the inputs, count "
        "forward and backward on the rank with the most. Columns for which the terminal is too narrow are in "
        "bench.csv.[/]",
        highlight=False,
    )
    cases_by_reason: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for reason in result.refused.items():
            cases_by_reason.setdefault(reason, []).append(str(result.case))
    for (name, why), cases in cases_by_reason.items():
        where = "" if len(cases) == len(results) else f" ({'; '.join(cases)})"
        console.print(f"[bold]{name}[/] did not run: {why}{where}", highlight=False)
    rows = [row for result in results for row in rows_of(result)]
    if rows:
        write_csv(folder / "bench.csv", [{**facts, **row} for row in rows])
    content = {"machine": facts, "rows": rows, "cases": [asdict(result) for result in results]}
    (folder / "bench.json").write_text(json.dumps(content, indent=1) + "\n")
    if charts and results:
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
    by_case = {result.case: rows_of(result) for result in results}
    rows = [row for case_rows in by_case.values() for row in case_rows]
    names = list(dict.fromkeys(row["what"] for row in sorted(rows, key=lambda r: r["kind"] != "seqpar")))
    most_ranks, longest = (max(getattr(case, x) for case in by_case) for x in ("ranks", "seq_len"))
    of_most_ranks = [row for case, case_rows in by_case.items() if case.ranks == most_ranks for row in case_rows]
    of_longest = [row for row in rows if row["seq_len"] == longest] if len({c.ranks for c in by_case}) > 1 else []
    files = []
    for file, (x, y, label) in _CHARTS.items():
        points = [row for row in (of_longest if x == "ranks" else of_most_ranks) if row[y] is not None]
        if y == "share_of_ideal":
            points = [row for row in points if row["kind"] != "ideal"]
        if y == "peak_memory":
            points = [{**row, y: row[y] / (1 << 20)} for row in points if row["run"] == BOTH]
        if points:
            files.append(_draw(points, names, x, y, f"{title}\n{label}", folder / file))
    return files


def _draw(rows: list[dict[str, Any]], names: list[str], x: str, y: str, title: str, path: Path) -> Path:
    presets = list(dict.fromkeys((row["preset"], row["mask"]) for row in rows))
    panels = [(run, preset) for run in PASSES for preset in presets if any(row["run"] == run for row in rows)]
    pyplot = pyplot_without_display()
    colors = pyplot.get_cmap("tab20").colors
    columns, lines = len(presets), len(panels) // len(presets)
    size = (4.6 * columns + 2.6, 3.4 * lines + 0.6)
    figure, grid = pyplot.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    ticks = sorted({row[x] for row in rows})
    for axes, (run, preset) in zip(grid.flat, panels, strict=True):
        for n, name in enumerate(names):
            inside = [r for r in rows if (r["preset"], r["mask"]) == preset and r["run"] == run and r["what"] == name]
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
