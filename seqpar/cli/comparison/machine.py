"""The machine that a comparison was measured on, and the share of it that other programs used meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ...planner.costs import device_name
from ..launch import cores


@dataclass(frozen=True)
class Clock:
    """A moment.

    Attributes:
        wall: ``time.perf_counter()``, in seconds.
        machine: CPU seconds that all processes of this machine have used so far.
    """

    wall: float
    machine: float

    @staticmethod
    def now() -> Clock:
        return Clock(time.perf_counter(), busy_seconds())

    def busy_share_since(self, start: Clock, own: float) -> float:
        """The share of this machine's cores that other processes have used since ``start``.

        Args:
            start: an earlier moment.
            own: CPU seconds that the ranks on this machine have used since then.
        """
        others = max(0.0, self.machine - start.machine - own)
        return others / max(1e-9, self.wall - start.wall) / (os.cpu_count() or 1)


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have used; 0 if the operating system does not report them."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, irq, softirq = map(int, stat.read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def machine_facts(device: torch.device) -> dict[str, Any]:
    """The columns of the CSV file that are the same in all rows."""
    from ... import __version__

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": device_name(device),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seqpar": __version__,
    }


def _commit() -> str:
    """The commit of this checkout; empty for an installed package."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        )
    except OSError:  # no git
        return ""
    return described.stdout.strip()
