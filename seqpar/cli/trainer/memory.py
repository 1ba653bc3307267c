"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


class PeakMemory:
    """The most memory held since this object was made, in bytes above what was held then.

    On CUDA it is the memory of tensors on the device, as torch counts it. torch does not count the CPU's: there it is
    the process's resident memory. Linux keeps its peak as ``VmHWM``, which is reset here. Elsewhere it is
    ``ru_maxrss``, the peak since the process started.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._baseline = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): set the peak to what is resident now
        self._baseline = _resident_peak()

    def bytes(self) -> int:
        """The peak so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._baseline
        return max(0, _resident_peak() - self._baseline)


def _resident_peak() -> int:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10  # KiB
    except OSError:  # not Linux
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, others KiB
