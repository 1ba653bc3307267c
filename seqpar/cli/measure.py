"""``seqpar plan --measure``: this machine as hardware of the planner, measured in seconds.

Two processes measure the links. Without a GPU, a core of the CPU counts as one. There the elements are float32, twice
as large as the planner's, so half of the measured bytes a second go into the table.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from ..comm.collectives import start_all_gather
from ..comm.p2p import exchange
from ..kernels import BackendName, backends
from ..planner import HARDWARE, Hardware
from ..planner.hardware import AttentionRate
from .doctor import _attention_rate, _copy_rate, _matrix_rate
from .launch import cores, follow_launcher, launch

_RANKS = 2
_BYTES = 8 << 20  # of a message of each rank
_DEADLINE_S = 60.0


def measure_machine() -> Hardware:
    """The rates of this machine: products, attention, memory, and messages between two of its processes."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    kernel = next(status.name for status in backends() if status.available)
    rate = _attention_rate(cast("BackendName", kernel), device)
    gemm = _matrix_rate(device)
    # Forward and backward of one run: 3.5 / both = 1 / forward + 2.5 / backward.
    backward = 2.5 / max(1e-30, 3.5 / rate.forward_backward - 1 / rate.forward)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "links.json"
        launch(["-m", "seqpar.cli.measure", str(file)], _RANKS, _DEADLINE_S)
        links = json.loads(file.read_text())
    scale = 0.5 if device.type == "cpu" else 1.0
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
        attention={kernel: AttentionRate(rate.forward, backward, kernel in ("triton", "reference"))},
        memory_bytes=memory,
        memory_bandwidth=_copy_rate(device) * scale,
        p2p=links["p2p"] * scale,
        peer=links["p2p"] * scale,
        all_to_all=links["all_to_all"] * scale,
        all_gather=links["all_gather"] * scale,
        network=links["p2p"] * scale,
        host_link=_copy_rate(device) * scale,
        latency=links["latency"],
        kernel=0.0,
        gpus_per_host=gpus,
        reserved_bytes=0.0,
    )


def _best(run: Callable[[], object]) -> float:
    """The shortest of a few runs, in seconds; the first one connects."""
    times = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _worker() -> None:
    """One of the two ranks. Rank 0 writes the bytes that each rank sends in a second."""
    follow_launcher()
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= _RANKS
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    group = dist.group.WORLD
    assert group is not None
    ranks, peer = group.size(), 1 - group.rank()
    sent, received = (torch.zeros(ranks, _BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def sync() -> None:
        if cuda:
            torch.cuda.synchronize()

    def p2p(size: int) -> None:
        exchange([(peer, sent[0, :size])], [(peer, received[0, :size])], group).wait()
        sync()

    def all_to_all() -> None:
        dist.all_to_all_single(received, sent)
        sync()

    def all_gather() -> None:
        _, pending = start_all_gather(sent[0], group)
        pending.wait()
        sync()

    moved = _BYTES * (ranks - 1)
    result = {
        "p2p": _BYTES / _best(lambda: p2p(_BYTES)),
        "latency": _best(lambda: p2p(8)),
        "all_to_all": moved / _best(all_to_all),
        "all_gather": moved / _best(all_gather),
    }
    if group.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _worker()
