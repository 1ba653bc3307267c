"""Peak memory of this process."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


class PeakMemory:
    """The most memory held since this object was made, above what was held then.

    On CUDA, tensors' memory on the device; on the CPU, resident memory of the process (on Linux the kernel's
    ``VmHWM``, reset here; elsewhere ``ru_maxrss``, which counts from the process's start).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._baseline = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
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
                return int(line.split()[1]) << 10
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10
