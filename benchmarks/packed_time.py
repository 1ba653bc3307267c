"""The CPU time of each rank for packed documents: what the layouts of ``packed_layouts.py`` cost when they run.

    python benchmarks/packed_time.py

Ranks are processes on this machine, with one thread each. All of them hold every layout, and run forward and backward
of ring attention in one layout after another, ``--rounds`` times. A rank's time in a layout is the least CPU time of
its process over the rounds: it depends less on what else the machine does than seconds on the clock, and a rank that
waits for another one takes none. Prints the largest over the mean of the ranks, beside the same of the pairs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from packed_layouts import LAYOUTS, boundaries, rows_of, striped_rows

import seqpar
from seqpar import Assigned, Mask, Sharding

NAMES = ("zigzag", "striped", "MagiAttention, heap", "`Sharding.balanced`")


def run(rank: int, args: argparse.Namespace, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    edges, steps = boundaries(args.mix, args.seq_len, 0), []
    for name in NAMES:
        shards = LAYOUTS[name](edges, ranks)
        layout: Any = name if name in ("zigzag", "striped") else Assigned(shards)  # type: ignore[arg-type]
        sharding = Sharding(args.seq_len, layout)
        tensors = [torch.randn(1, sharding.seq_local, args.heads, 64, requires_grad=True) for _ in range(3)]
        steps.append((sharding, tensors, torch.randn_like(tensors[0])))
    mask, seconds = Mask.documents(edges), torch.zeros(args.rounds, len(NAMES))
    for row in (seconds[0], *seconds):  # the first round is not counted
        for i, (sharding, tensors, dout) in enumerate(steps):
            dist.barrier()
            start = time.process_time()
            seqpar.ring_attention(*tensors, mask=mask, sharding=sharding).backward(dout)
            row[i] = time.process_time() - start
    by_rank = [torch.zeros(len(NAMES)) for _ in range(ranks)]
    dist.all_gather(by_rank, seconds.min(0).values)
    for name, times in zip(NAMES, torch.stack(by_rank, 1) if rank == 0 else (), strict=False):
        shards = LAYOUTS[name](edges, ranks)
        pairs = torch.tensor((striped_rows if name == "striped" else rows_of)(edges, shards)[0]).double()
        each = " | ".join(f"{float(x.max() / x.mean()):.2f}" for x in (pairs, times))
        print(f"| {ranks} | {name} | {each} | {float(times.sum()):.2f} s |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mix", default="magi")
    parser.add_argument("--seq-len", type=int, default=1 << 15)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("| ranks | layout | pairs, largest / mean | CPU time, largest / mean | CPU time of all ranks |")
    print("|---|---|---|---|---|")
    for ranks in args.ranks:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.spawn(run, (args, ranks, store.port), ranks)


if __name__ == "__main__":
    main()
