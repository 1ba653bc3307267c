"""Fit ``seqpar/planner/calibration.json`` to published times, and write the errors: ``python docs/forecast.py``.

``tests/planner/published.py`` has the times. Half of them decide the shares and the ranges; the table and the chart of
``docs/planning.md`` show the errors of both halves. With ``--fit`` the shares are fitted again, for some minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from io import BytesIO
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from seqpar.planner.forecast import KINDS, Calibration, calibration  # noqa: E402
from tests.planner.published import ALONE, CALIBRATING, HELD_OUT, LEFT_OUT, ROWS, Row  # noqa: E402

FILE = ROOT / "seqpar" / "planner" / "calibration.json"
START, END = "<!-- written by docs/forecast.py -->", "<!-- end of what docs/forecast.py writes -->"
NAMES = {**KINDS, ALONE: "attention without the rest of a layer"}
INSIDE = 0.9  # the share of further runs that a range should hold
LEAST = 1.1  # a range goes at least this factor down and up


def ratio(row: Row, shares: Calibration) -> float:
    """The published time over the expected time."""
    return row.seconds / row.forecast(shares)


def fit() -> Calibration:
    """The shares with the least mean error over the calibrating half, one after another in ever smaller steps."""

    def error(shares: Calibration) -> float:
        return float(np.mean([abs(log(ratio(row, shares))) for row in CALIBRATING]))

    best = Calibration()
    least = error(best)
    for step in (0.2, 0.1, 0.05, 0.02):
        for name in ("gemm", "attention", "packed", "memory", "network") * 2:
            for sign in (-1, 1):
                while True:
                    value = round(getattr(best, name) + sign * step, 2)
                    if not 0.2 <= value <= 1.0:
                        break
                    tried = replace(best, **{name: value})
                    found = error(tried)
                    if found >= least - 1e-6:
                        break
                    best, least = tried, found
                    print(f"{name} {value}: mean error {exp(least) - 1:.1%}", flush=True)
    return best


def ranges(shares: Calibration) -> dict[str, tuple[float, float]]:
    """By kind of run, the published over the expected time between which one more run is expected.

    It is Student's prediction interval from the logarithms of the calibrating runs, which is the wider the fewer they
    are.
    """
    found = {}
    for kind in NAMES:
        logs = [log(ratio(row, shares)) for row in CALIBRATING if row.kind == kind]
        n, z = len(logs) - 1, NormalDist().inv_cdf((1 + INSIDE) / 2)
        t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)  # Student's quantile
        half = t * float(np.std(logs, ddof=1)) * sqrt(1 + 1 / len(logs))
        low, high = exp(np.mean(logs) - half), exp(np.mean(logs) + half)
        found[kind] = (round(min(low, 1 / LEAST), 2), round(max(high, LEAST), 2))
    return found


def summary(rows: Sequence[Row], shares: Calibration, kind: str) -> tuple[int, float, float]:
    """The number of rows of a kind, the median error of their times, and the share of them inside the range."""
    ratios = [ratio(row, shares) for row in rows if row.kind == kind]
    low, high = (shares.ranges or {})[kind]
    return (
        len(ratios),
        float(np.median([abs(1 / x - 1) for x in ratios])),
        float(np.mean([low <= x <= high for x in ratios])),
    )


def section(shares: Calibration) -> str:
    """The table of errors, as Markdown."""
    lines = [
        "| kind of run | range | runs that calibrate | held-out runs | median error | inside the range |",
        "|---" * 6 + "|",
    ]
    for kind, words in NAMES.items():
        low, high = (shares.ranges or {})[kind]
        count, *_ = summary(CALIBRATING, shares, kind)
        held, median, inside = summary(HELD_OUT, shares, kind)
        lines.append(
            f"| {kind}: {words} | {low:.2f} … {high:.2f} | {count} | {held} | {median:.0%} | {inside:.0%} |".replace(
                "%", " %"
            )
        )
    values = ", ".join(f"{name} {value:g}" for name, value in asdict(shares).items() if name != "ranges")
    lines += [
        "",
        f"Shares of the published rates: {values}.",
        "",
        "![Errors](assets/forecast.png)",
        "",
        "Not compared:",
        "",
    ]
    lines += [f"* {why}: {what}" for why, what in LEFT_OUT.items()]
    return "\n".join(lines)


def draw(shares: Calibration) -> bytes:
    """A chart of the expected over the published time of every row."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for number, kind in enumerate(NAMES):
        low, high = (shares.ranges or {})[kind]
        axes.fill_betweenx([number - 0.38, number + 0.38], low, high, color="#d9e4f0", linewidth=0)
        halves: Iterable[tuple[Sequence[Row], str, str, float]] = (
            (CALIBRATING, "#8a8a8a", "calibrates", -0.15), (HELD_OUT, "#1f5fa8", "held out", 0.15),
        )  # fmt: skip
        for rows, colour, label, shift in halves:
            ratios = [ratio(row, shares) for row in rows if row.kind == kind]
            axes.plot(
                ratios,
                [number + shift] * len(ratios),
                "o",
                color=colour,
                markersize=4,
                alpha=0.8,
                label=None if number else label,
            )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(NAMES)), NAMES)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([0.7, 0.8, 1, 1.25, 1.5, 2], ["0.7", "0.8", "1", "1.25", "1.5", "2"])
    axes.minorticks_off()
    axes.set_xlabel("published time / expected time; the bar is the range that a plan prints")
    figure.legend(loc="outside upper right", ncols=2, fontsize=8)
    buffer = BytesIO()
    figure.savefig(buffer, dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def main() -> None:
    fitted = fit() if "--fit" in sys.argv else calibration()
    shares = {name: value for name, value in asdict(fitted).items() if name != "ranges"}
    lines = ",\n    ".join(f'"{kind}": {list(x)}' for kind, x in ranges(fitted).items())
    FILE.write_text(f'{{\n  "shares": {json.dumps(shares)},\n  "ranges": {{\n    {lines}\n  }}\n}}\n')
    calibration.cache_clear()
    shares_now = calibration()
    page = ROOT / "docs" / "planning.md"
    text = page.read_text()
    before, rest = text.split(START)
    page.write_text(f"{before}{START}\n\n{section(shares_now)}\n\n{END}{rest.split(END)[1]}")
    (ROOT / "docs" / "assets" / "forecast.png").write_bytes(draw(shares_now))
    write: Callable[[str], int] = sys.stdout.write
    for row in ROWS:
        half = "calibrates" if row in CALIBRATING else "held out"
        write(f"{1 / ratio(row, shares_now) - 1:+6.0%}  {half:10}  {row.kind:16} {row.source}: {row.what}\n")


if __name__ == "__main__":
    main()
