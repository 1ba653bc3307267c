"""The memory that a step needs, the free memory, and the peak of this process's memory."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from .config import DTYPES, TrainConfig
from .data import BATCH_BYTES
from .report import human_bytes
from .world import World


def check_memory(config: TrainConfig, world: World) -> None:
    """Raise if the memory for a step is certainly too small.

    Raises:
        ValueError: a step needs more memory than is free for this rank.
    """
    on_host, on_device = least_memory(config, world.size)
    free_on_host = _free_on_host() // world.local_ranks
    where = "of this machine's memory"
    if world.device.type == "cuda":
        _check_fits(config, world, on_host, free_on_host, where)
        _check_fits(config, world, on_device, torch.cuda.mem_get_info(world.device)[0], "of its GPU's memory")
    else:
        _check_fits(config, world, on_host + on_device, free_on_host, where)


def _check_fits(config: TrainConfig, world: World, needed: int, free: int, where: str) -> None:
    if needed > free:
        raise ValueError(
            f"seq_len={config.seq_len}, batch={config.batch}: on {world.size} rank(s) a step needs at least "
            f"{human_bytes(needed)} {where} per rank, but only {human_bytes(free)} are free for each rank; lower "
            "--seq-len, --batch, --layers or --hidden, or use more ranks"
        )


def least_memory(config: TrainConfig, ranks: int) -> tuple[int, int]:
    """The least bytes of a step on each rank: for the batch, on the host; and for saved activations, on the device."""
    shape = config.shape
    width = DTYPES[config.dtype].itemsize
    kv_width = shape.hidden // shape.heads * shape.kv_heads
    # Per token and layer: the inputs of both norms, at least in float32; the inputs of the products; q, k, v and out.
    layer = 2 * shape.hidden * max(width, 4) + (4 * shape.hidden + 2 * kv_width + 3 * shape.intermediate) * width
    tokens = config.batch * (config.seq_len // ranks)
    return config.batch * config.seq_len * BATCH_BYTES, tokens * shape.layers * layer


def _free_on_host() -> int:
    """Free bytes of this machine, at most the limit of this process's control group."""
    free = 1 << 62  # unknown: no limit
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10  # KiB
    with suppress(OSError, ValueError):  # "max" where there is no limit
        free = min(free, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return free


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
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10  # KiB
    except OSError:  # not Linux
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, others KiB
