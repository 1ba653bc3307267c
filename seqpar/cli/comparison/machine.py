"""The machine that a comparison was measured on, and the time that its cores are busy."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..launch import cores
from ..tables import device_name


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
