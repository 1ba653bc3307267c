"""``seqpar demo``: the same training run on one process and under every strategy, with the losses side by side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..base.checks import check_choice, check_int
from .launch import CommandError, bad_options, cores, launch, threads_per_rank
from .tables import human_bytes, make_folder, number_table, pyplot_without_display, save_figure, write_csv

_ONE_PROCESS = "one process"
_BATCH = 2
# The largest allowed difference of the loss. Rounding differs between strategies, and training amplifies the
# difference; a wrong gradient causes a much larger one.
_TOLERANCE = 0.01
_STRATEGIES = {
    "ring, zigzag": ["--strategy=ring", "--layout=zigzag"],
    "ring, striped": ["--strategy=ring", "--layout=striped"],
    "ulysses": ["--strategy=ulysses", "--layout=contiguous"],
    "context_parallel": ["--strategy=context_parallel", "--layout=zigzag"],
    "tp_sp": ["--strategy=tp_sp", "--layout=contiguous"],
    "hybrid": ["--strategy=hybrid", "--layout=zigzag"],
}


def demo(
    nproc: Annotated[int, typer.Option(help="Ranks of each sharded run, on this machine; an even number.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 36,
    seq_len: Annotated[int, typer.Option(help="Tokens (bytes) of a sequence. A step has two sequences.")] = 1024,
    mask: Annotated[str, typer.Option(help="causal, window:N, documents, or several joined by +.")] = "causal",
    text: Annotated[str | None, typer.Option(help="Text file. By default the source files of this package.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the data.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute, cpu or cuda.")] = "cpu",
    out: Annotated[str, typer.Option(help="Folder for the table, the losses and the plot.")] = "demo",
    deadline: Annotated[float, typer.Option(help="Seconds after which a run is stopped.")] = 600.0,
) -> None:
    """Train one model on one process and then under each strategy, and compare the losses.

    Each run starts new processes with the same weights and data. The command fails if the losses differ. It takes a few
    minutes on two cores. The model and the training loop are in examples/bytelm.py.
    """
    from ..examples import bytelm

    folder = Path(out)
    with bad_options():
        check_choice("device", device, ("cpu", "cuda"))
        for name, number in (("steps", steps), ("seq_len", seq_len)):
            check_int(name, number, 1)
        if nproc < 2 or nproc % 2:
            raise ValueError(f"nproc={nproc}: expected an even number, because hybrid makes pairs of ranks")
        bytelm.parse_mask(mask)
        make_folder(folder)
        try:
            content = bytelm.read_text(text)
        except OSError as error:
            raise ValueError(f"text={text!r}: {error.strerror}; name a readable text file") from error
    (folder / "text.txt").write_bytes(content)  # all runs read this copy, because the original may change meanwhile
    options = [f"--steps={steps}", f"--seq-len={seq_len}", f"--batch={_BATCH}", f"--mask={mask}", f"--seed={seed}"]
    options += [f"--device={device}", f"--text={folder / 'text.txt'}"]
    console = Console()
    console.print(
        f"Training on {text or 'the sources of seqpar'} ({len(content):,} bytes), {steps} steps of {_BATCH} x "
        f"{seq_len:,} tokens: on one process, then on {nproc} processes with {threads_per_rank(nproc)} thread(s) each; "
        f"{cores()} cores."
    )
    start = time.perf_counter()
    results: dict[str, list[dict[str, Any]]] = {}  # by run: the result of each rank
    for name, strategy in {_ONE_PROCESS: [], **_STRATEGIES}.items():
        ranks = 1 if name == _ONE_PROCESS else nproc
        console.print(f"[bold]{name}[/], {ranks} rank(s)")
        try:
            results[name] = launch(bytelm.main, ranks, [*strategy, *options], deadline_s=deadline)
        except CommandError as error:
            raise CommandError(f"{name}: {error}", error.code) from error
    curves = {name: by_rank[0]["losses"] for name, by_rank in results.items()}
    one, tokens = curves[_ONE_PROCESS], steps * _BATCH * seq_len
    rows = [
        {
            "run": name,
            "ranks": len(by_rank),
            "first_loss": curves[name][0],
            "final_loss": curves[name][-1],
            "largest_difference": max(abs(a - b) for a, b in zip(curves[name], one, strict=True)),
            "tokens_per_second": by_rank[0]["tokens_per_second"],
            "peak_memory_per_rank": max(rank["peak_memory"] for rank in by_rank),
            "attention_bytes_per_token": sum(rank["attention_bytes"] for rank in by_rank) / tokens,
            "gradient_bytes_per_step": sum(rank["gradient_bytes"] for rank in by_rank) / steps,
        }
        for name, by_rank in results.items()
    ]
    title = f"{nproc} ranks, {seq_len:,} tokens, {mask}"
    console.print(f"\n[bold]The same training run under every strategy[/]: {title}", highlight=False)
    _print(rows, console)
    write_csv(folder / "demo.csv", rows)
    write_csv(folder / "curves.csv", [{"step": i + 1, **{n: c[i] for n, c in curves.items()}} for i in range(steps)])
    _plot(folder / "demo.png", curves, title)
    console.print(f"[dim]{time.perf_counter() - start:.0f} s in all; table, losses and plot are in {out}[/]")
    different = [row["run"] for row in rows if not row["largest_difference"] <= _TOLERANCE]
    if different:
        raise CommandError(f"{' and '.join(different)}: the loss differs from one process's by more than {_TOLERANCE}")


def _print(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    headings = "final\nloss", "largest\ndifference", "tokens/s", "peak memory\nper rank", "sent\nper token"
    table = number_table("run", *headings)
    for row in rows:
        one = row["run"] == _ONE_PROCESS
        table.add_row(
            row["run"],
            f"{row['final_loss']:.4f}",
            "" if one else f"{row['largest_difference']:.1e}",
            f"{row['tokens_per_second']:,.0f}",
            human_bytes(row["peak_memory_per_rank"]),
            human_bytes(row["attention_bytes_per_token"]),
            end_section=one,
        )
    console.print(table)
    gradients = sorted({row["gradient_bytes_per_step"] for row in rows[1:]}, reverse=True)
    console.print(
        f"[dim]The loss of the first step is {rows[0]['first_loss']:.4f}. Largest difference: of the loss between a "
        "run and one process, at any step. Peak memory: resident memory above what it was without the model, on the "
        "rank with the most. Sent per token: bytes that attention sends in forward and backward, over all ranks. "
        f"The mean of the weights' gradients sends another {' or '.join(map(human_bytes, gradients))} per step"
        f"{' (less under tp_sp, which shards most weights)' * (len(gradients) > 1)}.[/]"
    )


def _plot(path: Path, curves: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw the losses of all runs, and below them the absolute differences from the losses of one process."""
    pyplot = pyplot_without_display()
    figure, (top, bottom) = pyplot.subplots(
        2, sharex=True, height_ratios=(3, 2), figsize=(8, 6.5), layout="constrained"
    )
    colors = pyplot.get_cmap("tab10").colors
    one = curves[_ONE_PROCESS]
    steps = range(1, len(one) + 1)
    top.plot(steps, one, label=_ONE_PROCESS, color="0.8", linewidth=7, solid_capstyle="round")
    # The curves coincide. Each is drawn as dashes in the gaps of the others, so that all are visible.
    dash, others = 5, [name for name in curves if name != _ONE_PROCESS]
    for i, name in enumerate(others):
        pattern = (i * dash, (dash, dash * (len(others) - 1)) if len(others) > 1 else (1, 0))
        top.plot(steps, curves[name], color=colors[i], linewidth=2.5, linestyle=pattern)
        top.plot([], [], label=name, color=colors[i], linewidth=2.5)  # a solid line for the legend
        gap = [abs(a - b) for a, b in zip(curves[name], one, strict=True)]
        bottom.plot(steps, gap, color=colors[i], marker=".", markersize=6, linestyle="none", clip_on=False)
    bottom.set_yscale("symlog", linthresh=1e-8)  # logarithmic, and with a place for 0 below
    bottom.set_ylim(bottom=0)
    top.set(ylabel="loss (nats per byte)", title=title)
    top.legend(fontsize=9, handlelength=2.5)
    bottom.set(xlabel="step", ylabel=f"difference from\n{_ONE_PROCESS}")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    save_figure(figure, path)
