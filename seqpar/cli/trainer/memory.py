"""The memory that a step needs, and the free memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from ..tables import human_bytes
from .config import DTYPES, TrainConfig
from .data import BATCH_BYTES
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
