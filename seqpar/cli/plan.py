"""``seqpar plan``: predict which strategy is the best for a model, a sequence length and a cluster."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..checks import check_int
from ..planner import HARDWARE, MODELS, Choice, Plan
from ..planner import plan as make_plan
from ..planner.hardware import hardware_of
from ..planner.memory import RECOMPUTE
from ..planner.mixes import MIXES, mask_of
from ..planner.setting import BETWEEN, WITHIN
from .launch import BAD_OPTION, CommandError, bad_options
from .tables import make_folder, pyplot_without_display, save_figure, write_csv

_NARROWEST = 80  # columns of the table
_UNITS = {"k": 1 << 10, "m": 1 << 20}


def plan(
    model: Annotated[str, typer.Option(help=f"A Hugging Face config.json, or one of {', '.join(MODELS)}.")],
    seq_len: Annotated[str, typer.Option(help="Tokens of a sequence, such as 131072, 128K or 1M. K is 1,024.")],
    gpus: Annotated[int, typer.Option(help="GPUs of all replicas.")],
    hardware: Annotated[str, typer.Option(help=f"A YAML or JSON file, or one of {', '.join(HARDWARE)}.")] = "h100",
    measure: Annotated[
        bool, typer.Option("--measure", help="Plan for this machine: measure its rates, for a few seconds.")
    ] = False,
    mask: Annotated[
        str,
        typer.Option(
            help=f"causal, full, window:N, documents:N (N tokens each), or {', '.join(map('mix:{}'.format, MIXES))}."
        ),
    ] = "causal",
    batch: Annotated[int, typer.Option(help="Sequences that each replica computes at a time.")] = 1,
    dp: Annotated[int | None, typer.Option(help="Data-parallel replicas. By default every number is compared.")] = None,
    kernel: Annotated[
        str | None, typer.Option(help="The attention kernel. By default the first one of the hardware.")
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(help=f"What backward recomputes: {', '.join(RECOMPUTE)}. By default as little as fits."),
    ] = None,
    offload: Annotated[
        bool | None, typer.Option(help="Keep saved activations in host memory. By default as is fastest.")
    ] = None,
    chunked_loss: Annotated[bool, typer.Option(help="Compute the logits for some tokens at a time.")] = True,
    tiled_mlp: Annotated[
        bool | None, typer.Option(help="Compute the MLP for some tokens at a time. By default if needed.")
    ] = None,
    state_bytes: Annotated[float, typer.Option(help="Bytes per weight: weight, gradient and optimizer.")] = 18.0,
    top: Annotated[int, typer.Option(help="Choices to print.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print all choices as JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(help="CSV file to write all choices to.")] = None,
    charts: Annotated[Path | None, typer.Option(help="Folder to write PNG charts to.")] = None,
) -> None:
    """Predict which strategy and split of the GPUs is the best, and why. It needs no GPU and no network."""
    with bad_options():
        tokens = read_tokens(seq_len)
        check_int("gpus", gpus, 1)
        check_int("top", top, 1)
        if dp is not None and (dp < 1 or gpus % dp):
            raise ValueError(f"dp={dp}: expected a divisor of gpus={gpus}")
        if measure:
            from .measure import measure_machine

            machine = measure_machine()
        else:
            machine = hardware_of(hardware)
        made = make_plan(
            model,
            tokens,
            gpus,
            machine,
            mask_of(mask, tokens),
            batch=batch,
            replicas=dp,
            kernel=kernel,
            recompute=recompute,
            offload=offload,
            chunked_loss=chunked_loss,
            tiled_mlp=tiled_mlp,
            state_bytes=state_bytes,
        )
    if csv is not None:
        _write(lambda: write_csv(csv, [_row(choice) for choice in made.choices]), csv)
    if charts is not None:
        with bad_options():
            _write(lambda: draw_charts(made, charts), charts)
    if as_json:
        typer.echo(json.dumps(made.as_dict(), indent=2))
    else:
        _print(made, mask, kernel, top)


def read_tokens(text: str) -> int:
    """The number of tokens of a string such as "128K" or "1M"; ValueError if it is not a whole number."""
    digits, unit = (text[:-1], text[-1].lower()) if text[-1:].lower() in _UNITS else (text, "")
    try:
        tokens = float(digits.replace("_", "").replace(",", "")) * _UNITS.get(unit, 1)
    except ValueError:
        tokens = -1.0
    if not 1 <= tokens < inf or tokens != int(tokens):
        raise ValueError(f"seq-len={text!r}: expected a number of tokens such as 131072, 128K or 1M")
    return int(tokens)


def _name(choice: Choice) -> str:
    """The strategy; under tensor parallelism also the strategy of attention, such as "tp_sp + ring"."""
    return choice.strategy if choice.context in (choice.strategy, "local") else f"{choice.strategy} + {choice.context}"


def _digits(x: float) -> str:
    """A number with three significant digits, or with all digits before the decimal point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _write(write: Any, path: Path) -> None:
    """Make the parent folder of ``path`` and call ``write``; CommandError if the path cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}; name a path that can be written", BAD_OPTION) from error


def _row(choice: Choice) -> dict[str, Any]:
    """A choice as a row of the CSV file. The column names have the units."""
    row = choice.as_dict()
    sent, memory = row.pop("bytes_sent"), row.pop("memory")
    row |= {**row.pop("degrees"), **row.pop("switches")}
    return row | {f"bytes_sent_{level}": n for level, n in sent.items()} | {f"memory_{x}": n for x, n in memory.items()}


def _print(made: Plan, mask: str, kernel: str | None, top: int) -> None:
    """Print the first ``top`` choices, with the reason for each and a legend."""
    console, gpu = Console(), made.hardware
    console.width = max(console.width, _NARROWEST)  # a narrower table would leave columns out
    kernel = kernel or next(iter(gpu.attention))
    console.print(
        f"[bold]{made.model.name}[/], {made.model.parameters / 1e9:.1f} billion weights; {made.seq_len:,} tokens per "
        f"sequence, mask {mask}; {made.ranks:,} x {gpu.name}, {gpu.gpus_per_host} per host; attention kernel {kernel}",
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("strategy")  # the only one that wraps
    table.add_column("ranks", no_wrap=True)
    for name in ("step s", "tokens/s", "MFU", "waits", "GB in", "GB out", "memory", "longest"):
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for number, choice in enumerate(made.choices[:top], start=1):
        table.add_row(
            str(number),
            _name(choice),
            " ".join(str(choice.degrees[x]) for x in ("dp", "ring", "ulysses", "tp")),
            _digits(choice.seconds),
            f"{choice.tokens_per_s:,.0f}",
            f"{choice.mfu:.0%}",
            f"{choice.exposed_s / choice.seconds:.0%}",
            *(_digits(choice.bytes_sent[level] / 1e9) for level in (WITHIN, BETWEEN)),
            _digits(choice.memory_bytes / 1e9),
            human_tokens(choice.longest_seq_len),
            style=None if choice.fits else "dim",
        )
    console.print(table)
    for number, choice in enumerate(made.choices[:top], start=1):
        console.print(f"{number:2} {choice.layout}; {choice.reason}", highlight=False)
    if len(made.choices) > top:
        console.print(f"{len(made.choices) - top} more with --top {len(made.choices)}", highlight=False)
    best = made.best
    parts = ", ".join(
        f"{name} {getattr(best.memory, name) / 1e9:.1f}"
        for name in ("states", "gathered", "activations", "working", "logits", "reserved")
    )
    console.print(f"memory of the first row in GB: {parts}", highlight=False)
    paper = {name: n / 1e9 for name, n in made.paper_activation_bytes.items()}
    console.print(
        "activations of one layer on one device, by the formulas of Korthikanti et al., in GB: "
        f"{paper['none']:.4g}; with selective recomputation {paper['selective']:.4g}; with full recomputation "
        f"{paper['full']:.4g}",
        highlight=False,
    )
    console.print(
        "strategy: context_parallel has comm='all_gather'; with comm='p2p' it would be the row ring. ranks: dp, ring, "
        "ulysses, tp. MFU: the model's FLOPs, without recomputation and of visible pairs only, divided by "
        f"{gpu.peak_flops / 1e12:.3g} TFLOP/s per GPU. waits: the share of a step in which the slowest GPU waits for "
        "communication. GB in, GB out: GB of activations that a GPU sends in a step, inside its host and to other "
        "hosts. memory: the peak of a GPU's memory in GB. longest: tokens of the longest sequence that fits.",
        highlight=False,
    )


def human_tokens(n: int) -> str:
    """A number of tokens with a unit, such as "1.4M". K is 1,024 and M is 1,024²."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if n >= size:
            return f"{n / size:.1f}{unit}".replace(".0", "")
    return str(n)


_MAX_BARS = 10
_PARTS = ("states", "gathered", "activations", "working", "reserved")
_COLORS = ("#1f5fa8", "#6aa5d9", "#e0903a", "#b04a3c", "#8a8a8a")


def draw_charts(made: Plan, folder: Path) -> None:
    """Draw the time of the first choices, by computing and waiting, and their memory by use."""
    make_folder(folder, "--charts")
    choices = made.choices[:_MAX_BARS]
    scales = [made.ranks * 1e6 / (c.tokens_per_s * c.seconds) for c in choices]  # to GPU seconds per million tokens
    seconds = {
        "computes": [c.compute_s * scale for c, scale in zip(choices, scales, strict=True)],
        "waits for communication": [(c.seconds - c.compute_s) * x for c, x in zip(choices, scales, strict=True)],
    }
    memory = {part: [getattr(c.memory, part) / 1e9 for c in choices] for part in _PARTS}
    limit = made.hardware.memory_bytes / 1e9
    _bars(made, folder / "seconds.png", "GPU seconds per million tokens", seconds)
    _bars(made, folder / "memory.png", "GB of memory on one GPU", memory, limit)


def _bars(made: Plan, path: Path, unit: str, parts: dict[str, list[float]], limit: float | None = None) -> None:
    """Draw one stacked bar for each choice, and a line at the memory of the GPU, ``limit``."""
    names = [
        f"{i}  {_name(c)}  " + " ".join(str(n) for n in c.degrees.values())
        for i, c in enumerate(made.choices[:_MAX_BARS], start=1)
    ]
    figure, axes = pyplot_without_display().subplots(figsize=(9, 1.1 + 0.36 * len(names)), layout="constrained")
    start = [0.0] * len(names)
    for (part, values), color in zip(parts.items(), _COLORS, strict=False):
        axes.barh(names, values, left=start, label=part, color=color)
        start = [a + b for a, b in zip(start, values, strict=True)]
    if limit is not None:
        axes.axvline(limit, color="black", linewidth=1, linestyle="--", label="memory of the GPU")
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    title = f"{made.model.name}, {made.seq_len:,} tokens, {made.ranks:,} x {made.hardware.name}"
    axes.set_title(f"{title}\nstrategy, and its dp, ring, ulysses and tp ranks; best first", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)
