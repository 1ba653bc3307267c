"""The charts of ``seqpar bench``. Values that were not measured are left out, and so are empty charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..tables import pyplot_without_display, save_figure
from .results import BOTH, PASSES, CaseResult, Row, rows_of
from .timeline import Span, Timeline

_MARKERS = "osD^vP*X<>"
_COMPUTE, _SENDS, _WAITS = "#1f5fa8", "#e0903a", "#c9c9c9"
_MOST_RANKS = 8  # ranks of each attempt in the chart of timelines

Value = Callable[[Row], float | None]


def draw_charts(results: Sequence[CaseResult], folder: Path, title: str) -> list[Path]:
    """Draw the charts into ``folder``, and return the files.

    Args:
        results: the measured cases.
        folder: an existing folder.
        title: the title of the charts.
    """
    rows = [row for result in results for row in rows_of(result)]
    lengths = sorted({row.seq_len for row in rows})
    ranks = sorted({result.case.ranks for result in results})
    at_most_ranks = [row for result in results if result.case.ranks == ranks[-1] for row in rows_of(result)]
    charts = [
        _lines(at_most_ranks, folder / "length.png", title, "seq_len", "tokens", lambda r: r.median_s, "seconds", True),
        _lines(
            [row for row in at_most_ranks if row.kind != "ideal"],
            folder / "ideal.png",
            f"{title}\n1: the fastest attention of the full sequence on one process, its time divided by the resources",
            "seq_len",
            "tokens",
            lambda r: r.share_of_ideal,
            "share of the ideal",
            False,
        ),
        _lines(
            [row for row in at_most_ranks if row.run == BOTH],
            folder / "memory.png",
            title,
            "seq_len",
            "tokens",
            lambda r: None if r.peak_memory is None else r.peak_memory / (1 << 20),
            "peak memory of a rank above its inputs, in MiB",
            False,
        ),
    ]
    if len(ranks) > 1:
        longest = [row for row in rows if row.seq_len == lengths[-1]]
        charts.append(
            _lines(longest, folder / "ranks.png", f"{title}, {lengths[-1]:,} tokens", "ranks", "ranks",
                   lambda r: r.median_s, "seconds", True)
        )  # fmt: skip
    drawn = [result for result in results if result.timelines]
    if drawn:
        charts.append(_timelines(drawn[-1], folder / "timeline.png"))
    return [chart for chart in charts if chart is not None]


def _lines(
    rows: Sequence[Row], path: Path, title: str, x: str, x_label: str, value: Value, y_label: str, logarithmic: bool
) -> Path | None:
    """Draw ``value`` of every row over its column ``x``.

    There is one panel for each preset and pass, and one line for each attempt.

    Returns:
        The file; None if there is nothing to draw.
    """
    rows = [row for row in rows if value(row) is not None]
    panels = list(dict.fromkeys((row.preset, row.mask) for row in rows))
    runs = [run for run in PASSES if any(row.run == run for row in rows)]
    if not rows:
        return None
    names = list(dict.fromkeys(row.what for row in sorted(rows, key=lambda r: r.kind != "seqpar")))
    pyplot = pyplot_without_display()
    colors = pyplot.get_cmap("tab20").colors
    figure, grid = pyplot.subplots(
        len(runs), len(panels), figsize=(4.6 * len(panels) + 2.6, 3.4 * len(runs) + 0.4), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for i, run in enumerate(runs):
        for j, panel in enumerate(panels):
            axes = grid[i][j]
            for n, name in enumerate(names):
                points = sorted(
                    (getattr(row, x), value(row))
                    for row in rows
                    if (row.preset, row.mask) == panel and row.run == run and row.what == name
                )
                if points:
                    ideal = next(row.kind for row in rows if row.what == name) == "ideal"
                    axes.plot(
                        *zip(*points, strict=True),
                        color="0.45" if ideal else colors[2 * n % 20 + n // 10],
                        linestyle="--" if ideal else "-",
                        marker=_MARKERS[n % len(_MARKERS)],
                        markersize=5,
                        linewidth=1.5,
                        label=name,
                    )
            ticks = sorted({getattr(row, x) for row in rows})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
            if logarithmic:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.set_title(f"{panel[0]}, {run}", fontsize=10)
            axes.set_xlabel(x_label)
            axes.set_ylabel(y_label)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles.update({label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)})
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    save_figure(figure, path)
    return path


def _timelines(result: CaseResult, path: Path) -> Path:
    """Draw one step of each attempt and rank: a bar of computation and waits, and above it a thin bar of transfers."""
    pyplot = pyplot_without_display()
    lanes: list[tuple[str, Timeline]] = []
    for name, by_rank in result.timelines.items():
        lanes += [(f"{name}, rank {rank}", timeline) for rank, timeline in enumerate(by_rank[:_MOST_RANKS])]
    figure, axes = pyplot.subplots(figsize=(10, 1.4 + 0.34 * len(lanes)), layout="constrained")
    # The axis ends at 2.5 times the median of the ends, because one slow package would make all other bars too short.
    ends = sorted(_end(timeline) for _, timeline in lanes)
    limit = min(ends[-1], 2.5 * ends[len(ends) // 2])
    for i, (_, timeline) in enumerate(lanes):
        for spans, color, bottom, height in (
            (timeline.compute, _COMPUTE, i - 0.15, 0.5),
            (timeline.waits, _WAITS, i - 0.15, 0.5),
            (timeline.sends, _SENDS, i - 0.38, 0.18),
        ):
            axes.broken_barh([(1e3 * a, 1e3 * (b - a)) for a, b in spans], (bottom, height), color=color, linewidth=0)
        if _end(timeline) > limit:
            axes.text(1e3 * limit, i + 0.1, f"to {1e3 * _end(timeline):,.0f} ms ", ha="right", va="center",
                      fontsize=7, color="white")  # fmt: skip
    axes.set_xlim(0, 1e3 * limit * 1.01)
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the step began, under the profiler")
    for color, label in ((_COMPUTE, "computes"), (_SENDS, "transfers"), (_WAITS, "waits for messages")):
        axes.plot([], [], color=color, linewidth=6, label=label)
    figure.legend(loc="outside lower right", ncols=3, fontsize=8)
    axes.set_title(f"One step, forward + backward: {result.case}", fontsize=10)
    save_figure(figure, path)
    return path


def _end(timeline: Timeline) -> float:
    last: list[Span] = [spans[-1] for spans in (timeline.compute, timeline.sends, timeline.waits) if spans]
    return max((end for _, end in last), default=0.0)
