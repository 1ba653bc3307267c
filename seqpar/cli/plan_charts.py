"""The charts of ``seqpar plan --charts``: the time of each choice by computing and waiting, and its memory by use."""

from __future__ import annotations

from pathlib import Path

from ..planner import Choice, Plan
from .tables import make_folder, pyplot_without_display, save_figure

_MOST_CHOICES = 10
_PARTS = ("states", "gathered", "activations", "working", "reserved")
_COLORS = ("#1f5fa8", "#6aa5d9", "#e0903a", "#b04a3c", "#8a8a8a")


def draw_charts(made: Plan, folder: Path) -> list[Path]:
    """Draw the first choices of a plan into ``folder``, and return the files.

    Raises:
        ValueError: the folder cannot be made.
    """
    make_folder(folder, "--charts")
    choices = made.choices[:_MOST_CHOICES]
    names = [
        f"{i}  {c.strategy if c.context == c.strategy else f'{c.strategy} + {c.context}'}  "
        + " ".join(str(n) for n in c.degrees.values())
        for i, c in enumerate(choices, start=1)
    ]
    title = f"{made.model.name}, {made.seq_len:,} tokens, {made.ranks:,} x {made.hardware.name}"
    return [
        _bars(
            folder / "seconds.png",
            title,
            names,
            "GPU seconds per million tokens",
            {
                "computes": [c.compute_s * _scale(c, made) for c in choices],
                "waits for communication": [(c.seconds - c.compute_s) * _scale(c, made) for c in choices],
            },
        ),
        _bars(
            folder / "memory.png",
            title,
            names,
            "GB of memory on one GPU",
            {part: [getattr(c.memory, part) / 1e9 for c in choices] for part in _PARTS},
            made.hardware.memory_bytes / 1e9,
        ),
    ]


def _scale(choice: Choice, made: Plan) -> float:
    """Converts seconds of a step to GPU seconds per million tokens."""
    return made.ranks * 1e6 / (choice.tokens_per_s * choice.seconds)


def _bars(
    path: Path,
    title: str,
    names: list[str],
    unit: str,
    parts: dict[str, list[float]],
    limit: float | None = None,
) -> Path:
    """Draw one stacked horizontal bar for each name.

    Args:
        path: the PNG file.
        title: the title of the chart.
        names: the label of each bar.
        unit: the label of the axis.
        parts: the parts of the bars by name: one value for each bar.
        limit: the value of a vertical line, the memory of the GPU.
    """
    figure, axes = pyplot_without_display().subplots(figsize=(9, 1.1 + 0.36 * len(names)), layout="constrained")
    left = [0.0] * len(names)
    for (name, values), color in zip(parts.items(), _COLORS, strict=False):
        axes.barh(names, values, left=left, label=name, color=color)
        left = [a + b for a, b in zip(left, values, strict=True)]
    if limit is not None:
        axes.axvline(limit, color="black", linewidth=1, linestyle="--", label="memory of the GPU")
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(f"{title}\nstrategy, and its dp, ring, ulysses and tp ranks; best first", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    return save_figure(figure, path)
