"""``seqpar plan --measure``: measure the rates of this machine for the planner, in a few seconds.

Two processes measure the links. On a machine without a GPU, each core of the CPU counts as a GPU. The planner counts 2
bytes per element, but the CPU computes in float32 with 4. So half of the measured bandwidth is reported.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist

from ..kernels import BackendName, backends
from ..mesh import init_mesh
from ..planner import HARDWARE, Hardware
from ..planner.hardware import AttentionRate
from .doctor import _attention_rate, _copy_rate, _matrix_rate
from .doctor_ranks import Link, measure_links
from .launch import cores, launch

_RANKS = 2
_DEADLINE_S = 120.0


def measure_machine() -> Hardware:
    """The rates of this machine: matrix products, attention, memory, and messages between two processes.

    Raises:
        CommandError: one of the two processes failed.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    kernel = next(status.name for status in backends() if status.available)
    gemm = _matrix_rate(device)
    attention = _attention_rate(cast("BackendName", kernel), device)
    # A backward has 2.5 times the FLOPs of a forward: 3.5 / forward_backward = 1 / forward + 2.5 / backward.
    backward = 2.5 / max(1e-30, 3.5 / attention.forward_backward - 1 / attention.forward)
    links = launch(_measure_links, _RANKS, deadline_s=_DEADLINE_S)[0]
    scale = 0.5 if device.type == "cpu" else 1.0  # of bandwidths: see the top of this file
    p2p, all_to_all, all_gather = (
        scale * max(link.bytes_per_second for link in links if link.operation == operation)
        for operation in ("p2p", "all-to-all", "all-gather")
    )
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
        attention={kernel: AttentionRate(attention.forward, backward, kernel in ("triton", "reference"))},
        memory_bytes=memory,
        memory_bandwidth=_copy_rate(device) * scale,
        p2p=p2p,
        peer=p2p,
        all_to_all=all_to_all,
        all_gather=all_gather,
        network=p2p,
        host_link=_copy_rate(device) * scale,
        latency=min(link.seconds for link in links),
        kernel=0.0,
        gpus_per_host=gpus,
        reserved_bytes=0.0,
        device=device.type,
    )


def _measure_links() -> list[Link]:
    """One of the two ranks."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= _RANKS
    init_mesh(ring=-1, device_type="cuda" if cuda else "cpu")
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    group = dist.group.WORLD
    assert group is not None
    return list(measure_links(group, device))
