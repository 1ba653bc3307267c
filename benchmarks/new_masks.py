"""Steps that each have new documents and a new length: what they leave behind, and how long they take.

    python benchmarks/new_masks.py [--steps 5000] [--ranks 2] [--strategy ring]

Rank 0 prints, after each tenth of the steps: resident memory, the Python objects that the garbage collector knows, and
the seconds of this process's CPU in a step, which depend less on what else the machine does than seconds on the clock.
In a run that leaves nothing behind, all three stay as they are from the second line on.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import seqpar


def step(number: int, strategy: Any, group: dist.ProcessGroup) -> None:
    """Forward and backward of attention over packed documents."""
    chance = random.Random(number)
    seq_len = chance.randrange(400, 600)
    edges = sorted(chance.sample(range(1, seq_len), 6))
    mask = seqpar.Mask.documents([0, *edges, seq_len])
    sharding = seqpar.Sharding(seq_len, "zigzag", group=group)
    q, k, v = (torch.randn(1, sharding.seq_local, 4, 16, requires_grad=True) for _ in range(3))
    out = seqpar.attention(q, k, v, strategy=strategy, mask=mask, sharding=sharding)
    out.sum().backward()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(rank: int, args: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=args.ranks)
    world = dist.group.WORLD
    assert world is not None
    each, began = max(1, args.steps // 10), time.process_time()
    for number in range(1, args.steps + 1):
        step(number, args.strategy, world)
        if number % each == 0 and rank == 0:
            milliseconds = (time.process_time() - began) / each * 1e3
            gc.collect()
            objects = len(gc.get_objects())
            print(f"{number:6} steps {resident_mib():8.1f} MiB {objects:9,} objects {milliseconds:7.2f} ms", flush=True)
            began = time.process_time()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="ring")
    args = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(run, (args, store.port), nprocs=args.ranks)


if __name__ == "__main__":
    main()
