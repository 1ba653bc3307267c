"""Write CSV, PNG and JSON files, and format numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def make_folder(out: Path, option: str = "--out") -> None:
    """Make the folder that ``option`` names.

    Raises:
        ValueError: the folder cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {out}: {error.strerror or error}; name a folder that can be written") from error


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, which have the same keys. Floats are written with all their digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def human_bytes(n: float) -> str:
    """A number of bytes with a unit, such as "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def human_count(n: float) -> str:
    """A number with three digits and a unit, such as "1.5 k"."""
    for unit in ("", " k", " M"):
        if abs(n) < 1000 or unit == " M":
            return f"{n:.3g}{unit}" if abs(n) < 1000 else f"{n:,.0f}{unit}"
        n /= 1000
    raise AssertionError


def plot_loss(path: Path, losses: Sequence[float], title: str) -> None:
    """Draw one run's loss curve."""
    pyplot = pyplot_without_display()
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1.5, color="#1f5fa8")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def plot_comparison(path: Path, runs: Mapping[str, Sequence[float]], title: str) -> None:
    """Draw the loss curves of all runs, and below them the absolute differences from the losses of the first run."""
    pyplot = pyplot_without_display()
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    names = list(runs)
    reference = runs[names[0]]
    steps = range(1, len(reference) + 1)
    top.plot(steps, reference, label=names[0], color="0.8", linewidth=7, solid_capstyle="round")
    colors = pyplot.get_cmap("tab10").colors
    # The curves coincide. Each is drawn as dashes in the gaps of the others, so that all are visible.
    dash, largest = 5, 0.0
    for i, name in enumerate(names[1:]):
        pattern = (i * dash, (dash, dash * (len(names) - 2)) if len(names) > 2 else (1, 0))
        top.plot(steps, runs[name], color=colors[i], linewidth=2.5, linestyle=pattern)
        top.plot([], [], label=name, color=colors[i], linewidth=2.5)  # a solid line for the legend
        gap = [abs(a - b) for a, b in zip(runs[name], reference, strict=True)]
        largest = max(largest, *gap)
        bottom.plot(steps, gap, color=colors[i], marker=".", markersize=6, linestyle="none")
    top.set_ylabel("loss (nats per byte)")
    top.set_title(title, fontsize=10)
    top.legend(fontsize=9, handlelength=2.5)
    if largest > 0:
        bottom.set_yscale("log")  # leaves out points that are exactly 0
        bottom.set_ylim(1e-8, max(1e-4, 10 * largest))
    bottom.set_ylabel(f"difference from\n{names[0]}")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def pyplot_without_display() -> Any:
    """matplotlib.pyplot without a display. It is imported here because the import takes half a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
    pyplot_without_display().close(figure)
