"""What several commands print and write: tables, CSV and PNG files and their folders, and numbers with units."""

from __future__ import annotations

import csv
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.table import Table


def number_table(*headings: str, **options: Any) -> Table:
    """A table with texts in its first column and numbers in the others. ``options`` are rich's."""
    table = Table(**options)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    return table


def make_folder(out: Path, option: str = "--out") -> None:
    """Make the folder that ``option`` names; ValueError if it cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{option} {out}: {error.strerror or error}; name a folder that can be written") from error


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, at least one, which have the same keys. Floats are written with all their digits."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def human_bytes(n: float) -> str:
    """A number of bytes with a unit, such as "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def device_name(device: torch.device) -> str:
    """Such as "NVIDIA H200" or "AMD EPYC 9654 96-Core Processor"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):  # not Linux
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def pyplot_without_display() -> Any:
    """matplotlib.pyplot without a display. It is imported here because the import takes half a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    pyplot_without_display().close(figure)
    return path
