"""The charts of ``seqpar bench``. Values that were not measured are left out, and so are empty charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..tables import pyplot_without_display, save_figure
from .results import BOTH, PASSES, CaseResult, Row, rows_of

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
