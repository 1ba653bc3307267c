"""The machine that a comparison was measured on: its cores, what other programs used of them, and peaks of memory."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import time
from contextlib import suppress
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


class PeakMemory:
    """The peak of this process's memory since the object was made, in bytes above the memory at that time.

    On CUDA it is the memory of tensors on the device, as torch counts it. On a CPU torch does not count memory, and it
    is the resident memory of the process: on Linux ``VmHWM``, which is reset here, elsewhere ``ru_maxrss``, the peak
    since the process started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._baseline = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): set the peak to the current resident memory
        self._baseline = _resident_peak()

    def bytes(self) -> int:
        """The peak so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._baseline
        return max(0, _resident_peak() - self._baseline)


def _resident_peak() -> int:
    """The peak of resident memory in bytes."""
    with suppress(OSError):  # not Linux
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10  # KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, others KiB
