"""``seqpar demo``: the same training run on one process and under every strategy, with the losses side by side."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.table import Table

from .launch import BAD_OPTION, CommandError, bad_options, cores, threads_per_rank
from .tables import human_bytes, make_folder, plot_comparison, write_csv
from .trainer.config import DeviceName, TrainConfig
from .trainer.data import read_corpus
from .trainer.worker import launch_training

_ONE_PROCESS = "one process"
# The largest allowed difference of the loss. Rounding differs between strategies, and training amplifies the
# difference; a wrong gradient causes a much larger one.
_TOLERANCE = 0.01

_STRATEGIES: dict[str, dict[str, Any]] = {
    "ring, zigzag": {"strategy": "ring", "layout": "zigzag"},
    "ring, striped": {"strategy": "ring", "layout": "striped"},
    "ulysses": {"strategy": "ulysses", "layout": "contiguous"},
    "context_parallel": {"strategy": "context_parallel", "comm": "all_gather", "layout": "zigzag"},
    "tp_sp": {"strategy": "tp_sp", "layout": "contiguous"},
    "hybrid": {"strategy": "hybrid", "layout": "zigzag"},
}


@dataclass(frozen=True)
class _Result:
    """The loss curve and the summary that one run has written to its folder."""

    name: str
    losses: list[float]
    summary: dict[str, Any]

    def difference(self, other: _Result) -> float:
        """The largest absolute difference of the losses of two runs at any step."""
        return max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))


def demo(
    nproc: Annotated[int, typer.Option(help="Ranks of each sharded run, on this machine.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 36,
    seq_len: Annotated[int, typer.Option(help="Tokens (bytes) of a sequence. A step has two sequences.")] = 1024,
    mask: Annotated[str, typer.Option(help="The mask, as in seqpar train.")] = "causal",
    text: Annotated[str | None, typer.Option(help="Text file. By default the source files of this package.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the data.")] = 0,
    device: Annotated[str, typer.Option(help=f"Where to compute. One of {', '.join(get_args(DeviceName))}.")] = "cpu",
    out: Annotated[str, typer.Option(help="Folder for the table, the plot and each run's files.")] = "demo",
    deadline: Annotated[float, typer.Option(help="Seconds after which a run is stopped.")] = 600.0,
) -> None:
    """Train one model on one process and then under each strategy, and compare the losses.

    Each run starts new processes with the same weights and data. The command fails if the loss curves differ. It takes
    a few minutes on two cores.
    """
    if nproc < 2:
        raise CommandError(f"nproc={nproc}: expected at least 2, to compare with one process", BAD_OPTION)
    base = TrainConfig(
        text=text,
        mask=mask,
        seq_len=seq_len,
        batch=2,
        steps=steps,
        seed=seed,
        device=cast("DeviceName", device),  # checked below
        deadline=deadline,
        plot=False,
    )
    runs = {_ONE_PROCESS: (1, replace(base, strategy="local", layout="contiguous"))}
    runs |= {name: (nproc, replace(base, **options)) for name, options in _STRATEGIES.items()}
    folder = Path(out)
    with bad_options():
        for ranks, config in runs.values():
            config.check(ranks, ranks)
        corpus = read_corpus(text)
        make_folder(folder)
    corpus.save(folder / "text.txt")  # all runs read this copy, because the original may change meanwhile
    runs = {name: (ranks, replace(c, text=str(folder / "text.txt"))) for name, (ranks, c) in runs.items()}
    console = Console()
    console.print(
        f"Training on {corpus.name} ({len(corpus.data):,} bytes), {steps} steps of 2 x {seq_len:,} tokens: "
        f"on one process, then on {nproc} processes with {threads_per_rank(nproc)} thread(s) each; {cores()} cores."
    )
    start = time.perf_counter()
    results = [_run(name, ranks, config, folder) for name, (ranks, config) in runs.items()]
    _report(results, folder, console, f"{nproc} ranks, {seq_len:,} tokens, {mask}")
    console.print(
        f"[dim]{time.perf_counter() - start:.0f} s in all; tables, plot and the files of each run are in {out}[/]"
    )
    different = [r.name for r in results if not r.difference(results[0]) <= _TOLERANCE]
    if different:
        raise CommandError(f"{' and '.join(different)}: the loss differs from one process's by more than {_TOLERANCE}")


def _run(name: str, ranks: int, config: TrainConfig, folder: Path) -> _Result:
    """Train in new processes, and read the files that they have written."""
    out = folder / name.replace(", ", "-").replace(" ", "-")
    config = replace(config, out=str(out), title=name)
    (out / "summary.json").unlink(missing_ok=True)
    try:
        launch_training(config, ranks)
    except CommandError as error:
        raise CommandError(f"{name}: {error}", error.code) from error
    with (out / "losses.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    return _Result(name, losses, json.loads((out / "summary.json").read_text()))


def _report(results: list[_Result], folder: Path, console: Console, title: str) -> None:
    """Print the table of all runs, and write the CSV files and the plot. The first result is that of one process."""
    one = results[0]
    rows = [
        {
            "run": r.name,
            "ranks": r.summary["ranks"],
            "first_loss": r.losses[0],
            "final_loss": r.losses[-1],
            "largest_difference": r.difference(one),
            "tokens_per_second": r.summary["tokens_per_second"],
            "peak_memory_per_rank": max(r.summary["peak_memory_per_rank"]),
            "attention_bytes_per_token": r.summary["attention_bytes_per_token"],
            "gradient_bytes_per_step": r.summary["gradient_bytes_per_step"],
        }
        for r in results
    ]
    write_csv(folder / "demo.csv", rows)
    curves = [{"step": i + 1, **{r.name: r.losses[i] for r in results}} for i in range(len(one.losses))]
    write_csv(folder / "curves.csv", curves)
    console.print(f"\n[bold]The same training run under every strategy[/]: {title}", highlight=False)
    table = Table()
    table.add_column("run")
    for heading in ("final\nloss", "largest\ndifference", "tokens/s", "peak memory\nper rank", "sent\nper token"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["run"],
            f"{row['final_loss']:.4f}",
            "" if row["run"] == _ONE_PROCESS else f"{row['largest_difference']:.1e}",
            f"{row['tokens_per_second']:,.0f}",
            human_bytes(row["peak_memory_per_rank"]),
            human_bytes(row["attention_bytes_per_token"]),
            end_section=row["run"] == _ONE_PROCESS,
        )
    console.print(table)
    gradients = sorted({int(row["gradient_bytes_per_step"]) for row in rows[1:]}, reverse=True)
    console.print(
        f"[dim]The loss of the first step is {one.losses[0]:.4f}. Largest difference: of the loss between a run and "
        "one process, at any step. Peak memory: resident memory above that before the model was made, on the rank with "
        "the most. Sent per token: bytes that attention sends in forward and backward, summed over the ranks. The sum "
        f"of the weights' gradients sends another {' or '.join(map(human_bytes, gradients))} per step"
        f"{' (less under tp_sp, which shards most weights)' * (len(gradients) > 1)}.[/]"
    )
    plot_comparison(folder / "demo.png", {r.name: r.losses for r in results}, title)
