"""``seqpar bench``: strategies and other packages side by side on this machine, on the same inputs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..checks import check_int
from ..layout import Layout
from ..mesh import init_mesh
from ..planner.mixes import MIXES
from .bench_cases import DEVICES, DTYPES, PRESETS, BenchConfig, adapters, strategy_names
from .bench_run import BOTH, PASSES, CaseResult, Row, machine_facts, measure, rows_of, table_of, to_json
from .launch import BAD_OPTION, CommandError, bad_options, cores, launch, under_launcher
from .plan import read_tokens
from .tables import make_folder, pyplot_without_display, save_figure, write_csv

_DEADLINE_S = 4 * 3600.0  # of the whole command
_WIDTH = 132  # columns of the tables if stdout is not a terminal
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
        typer.Option(help="contiguous, zigzag or striped.", show_default="contiguous for Ulysses, else zigzag"),
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
    with bad_options():
        config = BenchConfig(
            presets=tuple(preset or ("causal",)),
            strategies=tuple(strategy or ()),
            layouts=cast(tuple[Layout, ...], tuple(layout or ())),  # the config checks them
            masks=tuple(mask or ()),
            seq_lens=tuple(read_tokens(text) for text in seq_len or ()),
            ranks=tuple(ranks or ()),
            backends=tuple(backend or ("auto",)),
            peers=(tuple(peer) if peer else None) if peers else (),
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            rounds=rounds,
            budget=budget,
            charts=charts,
            trace=trace,
            out=out,
        )
    if under_launcher():
        run_bench(config)
        return
    with bad_options():
        check_int("nproc", nproc, 1)
        config.check(nproc)
        adapters(config.peers)
        make_folder(Path(out))
    launch(run_bench, nproc, config, deadline_s=_DEADLINE_S)


def run_bench(config: BenchConfig) -> None:
    """Run one rank of the comparison. Rank 0 prints the tables and writes the files.

    Raises:
        CommandError: an option is not allowed, or the results of a strategy of seqpar are wrong.
    """
    start = time.monotonic()
    with bad_options():
        config.check(int(os.environ["WORLD_SIZE"]))
        modules = adapters(config.peers)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = config.device != "cpu" and torch.cuda.device_count() >= local_ranks
    if config.device == "cuda" and not cuda:
        raise CommandError(
            f"device='cuda': {torch.cuda.device_count()} GPU(s) for {local_ranks} rank(s); use --device cpu", BAD_OPTION
        )
    init_mesh(ring=-1, device_type="cuda" if cuda else "cpu", timeout=_TIMEOUT)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    world, is_first = dist.get_world_size(), dist.get_rank() == 0
    cases, folder = config.cases(world, device), Path(config.out)
    if config.trace:
        with bad_options():
            make_folder(folder)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    facts = machine_facts(device)
    if is_first:
        console.print(
            f"{facts['device']}, {cores()} core(s), {world} rank(s) on {world // local_ranks or 1} host(s), torch "
            f"{facts['torch']}. {len(cases)} case(s); presets: "
            + "; ".join(f"{name}: {PRESETS[name].about}" for name in config.presets),
            highlight=False,
        )
    with _progress(console, is_first) as show:
        results = measure(config, cases, device, modules, show, folder)
    wrong = [
        f"{name}: {why}"
        for result in results
        for name, why in result.refused.items()
        if _is_ours(name) and why.startswith("WRONG")
    ]
    if is_first:
        with bad_options():
            make_folder(folder)
        report(results, facts, folder, console, config.charts)
        console.print(
            f"[dim]{time.monotonic() - start:.0f} s in all; tables, charts and JSON are in {folder}[/]", highlight=False
        )
    dist.barrier()
    dist.destroy_process_group()
    if wrong:
        raise CommandError("; ".join(wrong))


def _is_ours(name: str) -> bool:
    """Whether an attempt runs seqpar, not another package."""
    return name.split(" ")[0] in (*strategy_names(), "local")


def report(
    results: Sequence[CaseResult], facts: dict[str, Any], folder: Path, console: Console, charts: bool = True
) -> None:
    """Print the tables and the reasons of what did not run, and write the CSV, the JSON and the charts to ``folder``.

    Args:
        results: the measured cases.
        facts: columns that are the same in all rows (see ``machine_facts``).
        folder: an existing folder.
        console: the terminal.
        charts: whether to draw charts.
    """
    for result in results:
        for run in PASSES:
            console.print(table_of(result, run))
    console.print(
        "[dim]Share of the ideal: the ideal time divided by the measured time, the median over the rounds. The ideal "
        "time is that of the fastest attention of the full sequence on one process with all cores of its host, divided "
        "by the number of hosts (on CUDA: by the number of ranks). Exposed messages: the measured time minus the time "
        "of the same call if its messages took no time. Bytes sent, and peak memory above the inputs, are those of "
        "forward and backward on the rank with the most.[/]",
        highlight=False,
    )
    refused: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for reason in result.refused.items():
            refused.setdefault(reason, []).append(str(result.case))
    for (name, why), where in refused.items():
        cases = "" if len(where) == len(results) else f" ({'; '.join(where)})"
        console.print(f"[bold]{name}[/] did not run: {why}{cases}", highlight=False)
    rows = [row for result in results for row in rows_of(result)]
    if rows:
        write_csv(folder / "bench.csv", [{**facts, **asdict(row)} for row in rows])
    (folder / "bench.json").write_text(json.dumps(to_json(results, facts), indent=1) + "\n")
    if charts and results:
        draw_charts(results, folder, f"{facts['device']}, {results[-1].case.ranks} rank(s)")


@contextmanager
def _progress(console: Console, is_first: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows a text on the terminal. On other ranks than 0, or without a terminal, it does nothing."""
    if not is_first or not console.is_terminal:
        yield lambda text: None
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        yield lambda text: progress.update(task, description=text)


_MARKERS = "osD^vP*X<>"
_SHARE = "share of the ideal; 1: the fastest attention of the full sequence on one process, divided by the resources"
# By file: the column of the x axis, the value and its name.
_CHARTS: dict[str, tuple[str, Callable[[Row], float | None], str]] = {
    "length.png": ("seq_len", lambda row: row.median_s, "seconds"),
    "ideal.png": ("seq_len", lambda row: None if row.kind == "ideal" else row.share_of_ideal, _SHARE),
    "memory.png": (
        "seq_len",
        lambda row: None if row.peak_memory is None or row.run != BOTH else row.peak_memory / (1 << 20),
        "peak memory of a rank above its inputs, in MiB",
    ),
    "ranks.png": ("ranks", lambda row: row.median_s, "seconds"),
}


def draw_charts(results: Sequence[CaseResult], folder: Path, title: str) -> list[Path]:
    """Draw the charts into ``folder``, an existing folder, and return the files.

    A chart has one panel for each preset and pass, and one line for each attempt. The charts over the length are of the
    most ranks, and the chart over the number of ranks is of the longest sequence.
    """
    rows = [row for result in results for row in rows_of(result)]
    ranks = [result.case.ranks for result in results]
    names = list(dict.fromkeys(row.what for row in sorted(rows, key=lambda r: r.kind != "seqpar")))
    drawn = []
    for file, (x, value, label) in _CHARTS.items():
        if x == "ranks":
            kept = [row for row in rows if row.seq_len == max(r.seq_len for r in rows) and len(set(ranks)) > 1]
        else:
            kept = [row for result in results if result.case.ranks == max(ranks) for row in rows_of(result)]
        kept = [row for row in kept if value(row) is not None]
        if kept:
            drawn.append(_draw(kept, names, x, value, f"{title}\n{label}", folder / file))
    return drawn


def _draw(rows: list[Row], names: list[str], x: str, value: Callable[[Row], Any], title: str, path: Path) -> Path:
    panels = list(dict.fromkeys((row.preset, row.mask) for row in rows))
    runs = [run for run in PASSES if any(row.run == run for row in rows)]
    pyplot = pyplot_without_display()
    colors = pyplot.get_cmap("tab20").colors
    figure, grid = pyplot.subplots(
        len(runs), len(panels), figsize=(4.6 * len(panels) + 2.6, 3.4 * len(runs) + 0.6), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    handles: dict[str, Any] = {}
    ticks = sorted({getattr(row, x) for row in rows})
    for axes, (run, panel) in zip(grid.flat, ((run, panel) for run in runs for panel in panels), strict=True):
        inside = [row for row in rows if (row.preset, row.mask) == panel and row.run == run]
        for n, name in enumerate(names):
            points = sorted((getattr(row, x), value(row)) for row in inside if row.what == name)
            if points:
                ideal = any(row.kind == "ideal" for row in inside if row.what == name)
                style = {"color": "0.45", "linestyle": "--"} if ideal else {"color": colors[2 * n % 20 + n // 10]}
                (handles[name],) = axes.plot(*zip(*points, strict=True), marker=_MARKERS[n % 10], markersize=5, **style)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        if title.endswith("seconds"):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_title(f"{panel[0]}, {run}", fontsize=10)
        axes.set_xlabel("tokens" if x == "seq_len" else x)
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    save_figure(figure, path)
    return path
