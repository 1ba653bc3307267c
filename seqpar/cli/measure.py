"""``seqpar plan --measure``: this machine as hardware of the planner, measured in seconds.

Two processes measure the links, and keep what they find for ``strategy="auto"``. Without a GPU, a core of the CPU
counts as one. There the elements are float32, twice as large as the planner's, so half of the measured bytes a second
go into the table.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from ..kernels import BackendName, backends
from ..mesh import init_mesh, ranks_by_host
from ..planner import HARDWARE, Hardware
from ..planner.costs import Costs, cost_file, measure
from ..planner.hardware import AttentionRate
from .doctor import _attention_rate, _copy_rate, _matrix_rate
from .launch import cores, follow_launcher, launch

_RANKS = 2
_DEADLINE_S = 120.0


def measure_machine() -> Hardware:
    """The rates of this machine: products, attention, memory, and messages between two of its processes."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    kernel = next(status.name for status in backends() if status.available)
    gemm = _matrix_rate(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "costs.json"
        launch(["-m", "seqpar.cli.measure", str(file)], _RANKS, _DEADLINE_S)
        links = Costs.from_json(file.read_text()).hardware
    scale = 0.5 if device.type == "cpu" else 1.0
    attention = links.rate(None) if links.device == device.type else _rate_of_one(cast("BackendName", kernel), device)
    if device.type == "cuda":
        memory: float = torch.cuda.get_device_properties(device).total_memory
        gpus = torch.cuda.device_count()
    else:
        gpus = cores()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / gpus
    return replace(
        HARDWARE["h100"],
        name="this machine",
        peak_flops=gemm,
        gemm_flops=gemm,
        attention={kernel: replace(attention, carries=kernel in ("triton", "reference"))},
        memory_bytes=memory,
        memory_bandwidth=_copy_rate(device) * scale,
        p2p=links.p2p * scale,
        peer=links.p2p * scale,
        all_to_all=links.all_to_all * scale,
        all_gather=links.all_gather * scale,
        network=links.p2p * scale,
        host_link=_copy_rate(device) * scale,
        latency=links.latency,
        kernel=0.0,
        gpus_per_host=gpus,
        reserved_bytes=0.0,
        device=device.type,
    )


def _rate_of_one(kernel: BackendName, device: torch.device) -> AttentionRate:
    """The rates of the only GPU, which the two processes cannot share."""
    rate = _attention_rate(kernel, device)
    # Forward and backward of one run: 3.5 / both = 1 / forward + 2.5 / backward.
    return AttentionRate(rate.forward, 2.5 / max(1e-30, 3.5 / rate.forward_backward - 1 / rate.forward))


def _worker() -> None:
    """One of the two ranks. Rank 0 writes the costs."""
    follow_launcher()
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= _RANKS
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    init_mesh(ring=-1, device_type="cuda" if cuda else "cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    group = dist.group.WORLD
    assert group is not None
    costs = measure(group, device, cost_file(device, ranks_by_host(group)))
    if group.rank() == 0:
        Path(sys.argv[1]).write_text(costs.to_json())
    dist.barrier()


if __name__ == "__main__":
    _worker()
