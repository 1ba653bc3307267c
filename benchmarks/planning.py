"""The time that a new mask of packed documents costs the host of one rank, before the first kernel of a step can start.

The measured code makes the mask from its boundaries and plans all steps of the middle rank, for forward and backward.
It also computes the key intervals of the rank's own keys, with the operators that would run on the device. No process
group is needed.

Units: milliseconds of CPU time of one thread (robust on a busy machine), the median of ``--repeats`` masks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product

import torch

from seqpar import Mask
from seqpar.placement.layout import CPU, LAYOUTS, Layout, TokenLayout
from seqpar.schedule.plan import AttentionPlan


def boundaries(seq_len: int, documents: int, seed: int) -> torch.Tensor:
    """Boundaries of documents of random lengths, int64 ``[documents + 1]``."""
    inner = torch.randint(1, seq_len, (documents - 1,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.zeros(1, dtype=torch.int64), inner.sort().values, torch.tensor([seq_len])])


def plan_once(cu_seqlens: torch.Tensor, sharding: TokenLayout, gather: bool, per_host: int) -> float:
    """The CPU time of one plan in milliseconds."""
    start = time.thread_time()
    plan = AttentionPlan(Mask.documents(cu_seqlens), sharding, sharding.ring // 2, gather, per_host).prepare()
    plan.intervals(0, CPU)
    return 1e3 * (time.thread_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{args.documents} documents; ms of one thread\n")
    print("| tokens | ranks | of a host | layout | ring | all-gather |\n|---|---|---|---|---|---|")
    for seq_len, ranks in ((1 << 20, 64), (1 << 24, 1024)):
        for per_host, layout in product((ranks, 8), LAYOUTS):
            cells = [median_ms(seq_len, ranks, per_host, layout, gather, args) for gather in (False, True)]
            print(
                f"| {seq_len:,} | {ranks:,} | {per_host:,} | {layout} | {cells[0]:.1f} | {cells[1]:.1f} |", flush=True
            )


def median_ms(seq_len: int, ranks: int, per_host: int, layout: Layout, gather: bool, args: argparse.Namespace) -> float:
    sharding = TokenLayout(seq_len, layout, ring=ranks)
    masks = [boundaries(seq_len, args.documents, seed) for seed in range(args.repeats + 1)]
    return statistics.median(
        [plan_once(mask, sharding, gather, per_host) for mask in masks][1:]
    )  # the first one warms up


if __name__ == "__main__":
    main()
