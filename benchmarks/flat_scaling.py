"""Predicts attention of packed documents on 8 to 256 GPUs, by the rule of MagiAttention's benchmark.

    python benchmarks/flat_scaling.py            # prints the table, in a minute
    python benchmarks/flat_scaling.py --write    # and writes it to docs/packed.md

8,192 tokens for each GPU, causal documents of MagiAttention's mix that are cut at a quarter of the row, 64 query and 8
KV heads of 128, forward on H100. A number is the work of all rows over the time of the slowest rank, as the planner
simulates it, in TFLOP/s for each GPU. The published rows were read from charts of MagiAttention's benchmark.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from packed_layouts import PAGE, boundaries, heap

from seqpar import Assigned, Mask
from seqpar.placement.balanced import balanced_layout
from seqpar.placement.layout import Layout
from seqpar.planner.attention import SelfAttention
from seqpar.planner.hardware import HARDWARE
from seqpar.planner.pairs import visible_pairs
from seqpar.planner.setting import Setting
from seqpar.planner.shape import Layer, ModelShape
from seqpar.planner.step import attention_seconds

RANKS, SEEDS, TOKENS = (8, 16, 32, 64, 128, 256), range(6), 8192
HEADS, GPU = SelfAttention(8192, 64, 8, 128), HARDWARE["h100"]
MODEL = ModelShape("64:8", (Layer(1, (HEADS,)),), vocab=1)
LAYOUTS: dict[str, Callable[[list[int], int, int], Layout]] = {
    "zigzag": lambda edges, ranks, together: "zigzag",
    "heap": lambda edges, ranks, together: Assigned(tuple(map(tuple, heap(edges, ranks)))),
    "balanced": lambda edges, ranks, together: balanced_layout(
        Mask.documents(edges), edges[-1], ranks, together, GPU.gpus_per_host
    ),
}
# The name of a row, its layout, the ranks of its all-to-alls, and whether rows are gathered in one step.
PREDICTED = {
    "ring, zigzag": ("zigzag", 1, False),
    "ring, MagiAttention's heap": ("heap", 1, False),
    "ring, balanced": ("balanced", 1, False),
    "Ulysses in hosts, ring between them, zigzag": ("zigzag", 8, False),
    "Ulysses in hosts, ring between them, balanced": ("balanced", 8, False),
    "all-gather, zigzag": ("zigzag", 1, True),
    "all-gather, MagiAttention's heap": ("heap", 1, True),
    "all-gather, balanced": ("balanced", 1, True),
}
PUBLISHED = {
    "TransformerEngine, ring": (89, 68, 47, 28),
    "Megatron, hybrid": (277, 222, 190, 160),
    "USP (Ulysses and ring)": (260, 252, 254, 192),
    "MagiAttention 1.1": (459, 426, 314, 237),
}


def work_and_seconds(case: tuple[str, int, int]) -> tuple[float, float]:
    """FLOPs of the visible pairs of one row, and seconds of all GPUs."""
    name, ranks, seed = case
    layout, ulysses, gather = PREDICTED[name]
    edges = boundaries("magi", TOKENS * ranks, seed)
    mask, seq_len = Mask.documents(edges), edges[-1]
    made = LAYOUTS[layout](edges, ranks, ulysses)
    ring = ranks // ulysses
    setting = Setting(GPU, mask, seq_len, model=MODEL, ring=ring, ulysses=ulysses, layout=made, gather=gather)
    flops = 2.0 * HEADS.heads * 2 * HEADS.head_dim * visible_pairs(mask, seq_len)
    return flops, ranks * attention_seconds(setting, ("forward",))


def table(names: Iterable[str], ranks: Iterable[int]) -> str:
    names, ranks = list(names), list(ranks)
    cases = list(product(names, ranks, SEEDS))
    with ProcessPoolExecutor() as pool:
        found = dict(zip(cases, pool.map(work_and_seconds, cases), strict=True))
    lines = ["| TFLOP/s for each GPU | " + " | ".join(map(str, RANKS)) + " |", "|---" * (len(RANKS) + 1) + "|"]
    for name in names:
        sums = [[sum(x) for x in zip(*(found[name, n, seed] for seed in SEEDS), strict=True)] for n in ranks]
        lines.append(f"| predicted: {name} | " + " | ".join(f"{a / b / 1e12:.0f}" for a, b in sums) + " |")
    for name, measured in PUBLISHED.items():
        cells = [*map(str, measured), *[""] * (len(RANKS) - len(measured))]
        lines.append(f"| published: {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    given = parser.parse_args()
    text = table(PREDICTED, RANKS)
    print(text)
    if given.write:
        before, rest = PAGE.read_text().split("<!-- flat scaling -->\n")
        after = rest.split("<!-- end of flat scaling -->\n")[1]
        PAGE.write_text(f"{before}<!-- flat scaling -->\n{text}\n<!-- end of flat scaling -->\n{after}")


if __name__ == "__main__":
    main()
