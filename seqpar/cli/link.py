"""Two ranks that measure the link between them: started by ``seqpar doctor``, prints nothing, writes a JSON file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm.p2p import exchange
from .launch import follow_launcher

_BYTES = 32 << 20


def _seconds(nbytes: int) -> float:
    """The shortest time of an exchange in which each rank sends and receives ``nbytes``, as a ring does."""
    group = dist.group.WORLD
    assert group is not None
    peer = 1 - group.rank()
    ours, theirs = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        exchange([(peer, ours)], [(peer, theirs)], group).wait()
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """``python -m seqpar.cli.link FILE``, as one of two ranks."""
    follow_launcher()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _seconds(1 << 20)  # connects
    result = {"bytes_per_second": _BYTES / _seconds(_BYTES), "latency": _seconds(8)}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
