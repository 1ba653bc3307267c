"""``seqpar plan``: predict which strategy is the best for a model, a sequence length and a cluster."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.checks import check_int
from ..planner import HARDWARE, MODELS, Choice, Plan
from ..planner import plan as make_plan
from ..planner.hardware import hardware_of
from ..planner.mixes import MIXES, mask_of, prompt_and_answers
from ..planner.prompts import prompt_sharing
from ..planner.reasons import human_tokens
from ..planner.setting import STATE_BYTES
from ..planner.split import BETWEEN, INVARIANT, RECOMPUTE, WITHIN
from .launch import BAD_OPTION, CommandError, bad_options
from .tables import make_folder, pyplot_without_display, save_figure, write_csv

_WIDTH = 80  # columns of the table
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
        str | None,
        typer.Option(
            help="causal, full, window:N, documents:N (N tokens each), answers:GxN (a prompt, G answers of N each), "
            f"or {', '.join(map('mix:{}'.format, MIXES))}.",
            show_default="causal, or full for a model whose attention is not",
        ),
    ] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(
            help="The work of a step: sequences, such as 64, or tokens, such as 4M.",
            show_default="the least that every split that fits can compute",
        ),
    ] = None,
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
        bool | None, typer.Option(help="Keep saved activations in host memory. By default if needed.")
    ] = None,
    chunked_loss: Annotated[bool, typer.Option(help="Compute the logits for some tokens at a time.")] = True,
    tiled_mlp: Annotated[
        bool | None, typer.Option(help="Compute the MLP for some tokens at a time. By default if needed.")
    ] = None,
    head_groups: Annotated[
        int | None, typer.Option(help="Groups of heads that are computed one after another. By default if needed.")
    ] = None,
    deterministic: Annotated[
        str | None, typer.Option(help='"invariant": attention has the same bits on any number of GPUs.')
    ] = None,
    state_bytes: Annotated[float, typer.Option(help="Bytes per weight: weight, gradient and optimizer.")] = STATE_BYTES,
    top: Annotated[int | None, typer.Option(help="Choices to print.", show_default="one of each strategy")] = None,
    code: Annotated[
        bool, typer.Option("--code", help="Print the first row without tensor parallelism as a file that trains.")
    ] = False,
    row: Annotated[int | None, typer.Option(help="Print this row of the table as a file that trains.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all choices as JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(help="CSV file to write all choices to.")] = None,
    charts: Annotated[Path | None, typer.Option(help="Folder to write PNG charts to.")] = None,
) -> None:
    """Predict which strategy and split of the GPUs is the best, and why. It needs no GPU and no network."""
    invariant: Any = deterministic or False  # another value is refused
    with bad_options():
        tokens = read_tokens(seq_len)
        check_int("gpus", gpus, 1)
        for name, value in (("top", top), ("row", row)):
            if value is not None:
                check_int(name, value, 1)
        if dp is not None and (dp < 1 or gpus % dp):
            raise ValueError(f"dp={dp}: expected a divisor of gpus={gpus}")
        if measure:
            from .measure import measure_machine

            machine = measure_machine(invariant)
        else:
            machine = hardware_of(hardware)
        made = make_plan(
            model,
            tokens,
            gpus,
            machine,
            None if mask is None else mask_of(mask, tokens),
            global_batch=None if global_batch is None else read_batch(global_batch, tokens),
            batch=batch,
            replicas=dp,
            kernel=kernel,
            recompute=recompute,
            offload=offload,
            chunked_loss=chunked_loss,
            tiled_mlp=tiled_mlp,
            head_groups=head_groups,
            deterministic=invariant,
            state_bytes=state_bytes,
        )
    if csv is not None:
        _write(lambda: write_csv(csv, [_row(choice) for choice in made.choices]), csv)
    rows = made.choices[:top] if top else shown(made.choices)
    if charts is not None:
        with bad_options():
            _write(lambda: draw_charts(made, rows, charts), charts)
    if as_json:
        typer.echo(json.dumps(made.as_dict(), indent=2))
    elif code or row:
        with bad_options():
            if row and row > len(rows):
                raise ValueError(f"row={row}: expected at most {len(rows)}, the number of rows of the table")
            typer.echo(made.code(rows[row - 1] if row else None), nl=False)
    else:
        for line in table(made, mask or ("causal" if made.model.causal else "full"), rows):
            typer.echo(line)
        if mask is not None and mask.startswith("answers:"):
            found = prompt_sharing(*prompt_and_answers(mask, tokens), ranks=rows[0].degrees["ring"], tile=machine.tile)
            for line in textwrap.wrap(str(found), _WIDTH):
                typer.echo(line)
    if not made.choices[0].possible:
        raise CommandError(f"nothing fits: {made.shortage}")


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


def read_batch(text: str, seq_len: int) -> int:
    """The number of sequences of a string such as "64" or, in tokens, "4M"; ValueError if it is not a whole number."""
    if text[-1:].lower() not in _UNITS:
        if not text.isdecimal() or not int(text):
            raise ValueError(
                f"global-batch={text!r}: expected a number of sequences such as 64, or of tokens such as 4M"
            )
        return int(text)
    tokens = read_tokens(text)
    if tokens % seq_len:
        raise ValueError(f"global-batch={text!r}: expected a multiple of seq-len={seq_len}")
    return tokens // seq_len


def _name(choice: Choice) -> str:
    """The strategy; under tensor parallelism also the strategy or the comm of attention, such as "tp_sp + ring"."""
    if choice.context in (choice.strategy, "local"):
        return choice.strategy
    return f"{choice.strategy} + {choice.comm or choice.context}"


def _digits(x: float, limit: float = 1e5) -> str:
    """Three significant digits, or all before the decimal point; from ``limit`` on two, in thousands, millions, ..."""
    if x < limit:
        return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
    unit = next(i for i in range(1, 6) if x < 999.5 * 1000**i or i == 5)
    x /= 1000**unit
    return f"{x:.0f}{'kMGTP'[unit - 1]}" if x >= 10 else f"{x:.1f}{'kMGTP'[unit - 1]}"


def _write(write: Any, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}; name a path that can be written", BAD_OPTION) from error


def _row(choice: Choice) -> dict[str, Any]:
    row = choice.as_dict()
    memory, needs = row.pop("memory"), " ".join(row.pop("needs"))
    sent = {name: row.pop(name) for name in ("bytes_sent", "parameter_bytes_sent")}
    row |= {**row.pop("degrees"), **row.pop("switches"), "needs": needs}
    row |= {f"{name}_{level}": n for name, levels in sent.items() for level, n in levels.items()}
    return row | {f"memory_{part}": n for part, n in memory.items()}


def table(made: Plan, mask: str, rows: Sequence[Choice]) -> list[str]:
    """The lines of the table of some choices."""
    gpu = made.hardware
    lines = [
        f"{made.model.name}, {made.model.parameters / 1e9:.1f} billion weights of {made.state_bytes:g} bytes; "
        f"{human_tokens(made.seq_len)} tokens, mask {mask}",
        f"{made.ranks:,} x {gpu.name}, {gpu.gpus_per_host} per host, attention kernel {made.kernel}; a step has "
        f"{made.global_batch:,} x {human_tokens(made.seq_len)} tokens",
        _ROW.format("", "dp x ring", "step", "", "", "NVLink", "network", "mem.", ""),
        _ROW.format("strategy", "x uly x tp", "s", "tokens/s", "MFU", "GB", "GB", "GB", "fits"),
    ]
    for i, choice in enumerate(rows, start=1):
        within, between = (choice.bytes_sent[x] + choice.parameter_bytes_sent[x] for x in (WITHIN, BETWEEN))
        steps = [f"{_digits(choice.low_s, most)}-{_digits(choice.high_s, most)}" for most in (1e5, 1e3)]
        cells = (
            "x".join(str(choice.degrees[x]) for x in ("dp", "ring", "ulysses", "tp")),
            steps[len(steps[0]) > 10],
            _digits(choice.tokens_per_s, 1e7),
            f"{choice.mfu:.0%}",
            _digits(within / 1e9),
            _digits(between / 1e9),
            _digits(choice.memory_bytes / 1e9),
            human_tokens(choice.longest_seq_len),
        )
        lines += [
            _ROW.format(_name(choice), *cells).rstrip(),
            *textwrap.wrap(choice.reason, _WIDTH, initial_indent=f"{i:>2}. ", subsequent_indent="    "),
        ]
    lines += textwrap.wrap(
        f"step: the range, at least {_digits(made.choices[0].floor_s)} s. uly: ulysses. NVLink, network: GB that a GPU "
        f"sends in a step, weights included. mem.: of {_digits(gpu.memory_bytes / 1e9)} GB. fits: tokens of the "
        "longest sequence. --row 1: the first row as a file that trains."
        + (" ring: like every other strategy with as many ranks." if made.kernel == INVARIANT else ""),
        _WIDTH,
    )
    return lines


_ROW = "{:<18} {:>10} {:>9} {:>9} {:>4} {:>6} {:>7} {:>4} {:>5}"


def shown(choices: Sequence[Choice]) -> list[Choice]:
    """The first choice of each strategy; the fastest and the one with the least memory of those that are equally fast;
    the first without offloading; and the first that needs a switch that the package lacks, if it is faster."""
    first = choices[0]
    found = {choice.strategy: choice for choice in reversed(choices) if choice.fits == first.fits and not choice.needs}
    wanted = [*found.values(), *(x for x in choices if {"fastest", "safest"} & set(x.reason.split("; ")))]
    wanted += [x for x in choices if not x.switches.offload][:1]
    wanted += [x for x in choices if x.needs and x.fits and x.tokens_per_s > first.tokens_per_s][:1]
    return [x for x in choices if x is first or any(x is y for y in wanted)]


_PARTS = ("states", "gathered", "activations", "working", "reserved")
_COLORS = ("#1f5fa8", "#6aa5d9", "#e0903a", "#b04a3c", "#8a8a8a")


def draw_charts(made: Plan, rows: Sequence[Choice], folder: Path) -> None:
    """Draw the time of the rows of the table, by computing and waiting and with its range, and their memory by use."""
    make_folder(folder, "--charts")
    seconds = {
        "computes": [x.compute_s for x in rows],
        "waits for communication": [x.seconds - x.compute_s for x in rows],
    }
    memory = {part: [getattr(x.memory, part) / 1e9 for x in rows] for part in _PARTS}
    axes = _bars(made, rows, "seconds of a step", seconds)
    middle, below, above = zip(*((x.seconds, x.seconds - x.low_s, x.high_s - x.seconds) for x in rows), strict=True)
    spread = [[max(0.0, x) for x in side] for side in (below, above)]
    axes.errorbar(middle, range(len(rows)), xerr=spread, fmt="none", color="black", capsize=3, label="range")
    _save(axes, folder / "seconds.png")
    axes = _bars(made, rows, "GB of memory on one GPU", memory)
    gpu = made.hardware.memory_bytes / 1e9
    axes.axvline(gpu, color="black", linewidth=1, linestyle="--", label="memory of the GPU")
    _save(axes, folder / "memory.png")


def _bars(made: Plan, rows: Sequence[Choice], unit: str, parts: dict[str, list[float]]) -> Any:
    """Axes with one stacked bar for each row."""
    names = [f"{i}  {_name(x)}  " + "x".join(map(str, x.degrees.values())) for i, x in enumerate(rows, start=1)]
    _, axes = pyplot_without_display().subplots(figsize=(9, 1.1 + 0.36 * len(names)), layout="constrained")
    start = [0.0] * len(names)
    for (part, values), color in zip(parts.items(), _COLORS, strict=False):
        axes.barh(names, values, left=start, label=part, color=color)
        start = [a + b for a, b in zip(start, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    title = f"{made.model.name}, {made.seq_len:,} tokens, {made.ranks:,} x {made.hardware.name}"
    axes.set_title(f"{title}\nthe rows of the table: strategy, dp x ring x ulysses x tp ranks", fontsize=10)
    return axes


def _save(axes: Any, path: Path) -> None:
    axes.figure.legend(loc="outside right upper", fontsize=8)
    save_figure(axes.figure, path)
