"""Compares ``Sharding.balanced`` with other layouts for packed documents: work, rows received, and time to plan.

    python benchmarks/packed_layouts.py            # prints the table, in a few minutes
    python benchmarks/packed_layouts.py --write    # and writes it to docs/packed.md
    python benchmarks/packed_layouts.py --window 4096  # for three layers with this window beside each full one

Nothing is sent or computed with: a layout, and the documents, decide all numbers but the milliseconds. The layouts of
other packages are written here again from their descriptions, and are not their code. Documents are causal.

Units: T is the number of tokens of a rank's mean shard, and a row the key and value of one token.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from seqpar import Assigned, Mask
from seqpar.placement.balanced import balanced_layout
from seqpar.placement.layout import Positions, merged_positions, ranges_to_positions, shard_ranges, split_range
from seqpar.planner.mixes import document_mix
from seqpar.planner.pairs import computed_pairs
from seqpar.schedule.rows import visible_ranges

PAGE = Path(__file__).parents[1] / "docs" / "packed.md"
PER_HOST = 8
TILE = 128
CHUNK = 2048  # tokens, of MagiAttention and FlashMask
SIZES = (
    (1 << 17, 8),
    (1 << 17, 32),
    (1 << 18, 16),
    (1 << 19, 64),
    (1 << 20, 64),
    (1 << 20, 256),
    (1 << 22, 64),
    (1 << 22, 256),
)
Ranges = list[list[range]]  # of each rank, its positions in increasing order


# Documents. A row holds whole documents, and the last one is cut at its end.


def log_normal(chance: random.Random, median: int, sigma: float, most: int) -> int:
    return min(most, max(16, int(median * chance.lognormvariate(0, sigma))))


def midtrain(chance: random.Random, seq_len: int) -> int:
    """60 % of the tokens in long documents, whose lengths have a Pareto tail (ProLong, LongCA-bench)."""
    if chance.random() > 0.045:
        return log_normal(chance, 500, 1.2, 8192)
    return min(seq_len, int(8192 * chance.paretovariate(1.1)))


def fine_tuning(chance: random.Random, seq_len: int) -> int:
    """Short samples, and one in a hundred of up to 128k tokens (LongAlign, LMSys)."""
    if chance.random() > 0.01:
        return log_normal(chance, 650, 1.1, 16384)
    return int(8192 * (min(seq_len, 1 << 17) / 8192) ** chance.random())


MIXES: dict[str, Callable[[random.Random, int], int] | None] = {
    "magi": None,  # the histogram of MagiAttention's benchmark, see seqpar/planner/mixes.py
    "wlb": None,  # and WLB-LLM's
    "log-normal": lambda chance, seq_len: log_normal(chance, 2000, 1.5, seq_len),
    "midtrain": midtrain,
    "fine-tuning": fine_tuning,
}


def boundaries(mix: str, seq_len: int, seed: int) -> list[int]:
    """The boundaries of the documents of one row."""
    draw = MIXES[mix]
    if draw is None:
        mask = document_mix(mix, seq_len, seed, seq_len // 4 if mix == "magi" else None)
        return [*mask.starts[0], seq_len] if mask.starts[0][-1] < seq_len else list(mask.starts[0])
    chance, edges = random.Random(f"{mix}:{seq_len}:{seed}"), [0]
    while edges[-1] < seq_len:
        edges.append(min(seq_len, edges[-1] + draw(chance, seq_len)))
    return edges


# Layouts.


def by_name(name: str) -> Callable[[list[int], int], Ranges]:
    return lambda edges, ranks: [list(shard_ranges(edges[-1], ranks, rank, name)) for rank in range(ranks)]  # type: ignore[arg-type]


def balanced(edges: list[int], ranks: int) -> Ranges:
    layout = balanced_layout(Mask.documents(edges), edges[-1], ranks, per_host=PER_HOST)
    return [list(x) for x in layout.by_rank] if isinstance(layout, Assigned) else by_name(layout)(edges, ranks)


def zigzag_in_documents(edges: list[int], ranks: int) -> Ranges:
    """Each document in zigzag, as in Llama 3's and TransformerEngine's packed batches."""
    found: Ranges = [[] for _ in range(ranks)]
    if len(edges) * ranks > 300_000:
        return []  # too many pieces
    for start, stop in pairwise(edges):
        for part in range(2 * ranks):
            piece = split_range(stop - start, 2 * ranks, part)
            found[min(part, 2 * ranks - 1 - part)].append(range(start + piece.start, start + piece.stop))
    return found


def pairs_of_chunks(edges: list[int], size: int) -> list[int]:
    """The visible pairs of each chunk of ``size`` tokens."""
    x = np.arange(0, edges[-1] + 1, size)
    document = np.minimum(np.searchsorted(edges, x, side="right") - 1, len(edges) - 2)
    lengths = np.diff(edges)
    before = np.append(0, np.cumsum(lengths * (lengths + 1) // 2))
    depth = x - np.asarray(edges)[document]
    found: list[int] = np.diff(before[document] + depth * (depth + 1) // 2).tolist()
    return found


def heap(edges: list[int], ranks: int, nearest: int = 1) -> Ranges:
    """MagiAttention's dispatch solver: the chunk with the most pairs to the lightest rank that has room.

    With ``nearest > 1``, to the rank among so many of the lightest whose keys overlap most with the chunk's.
    """
    size = min(CHUNK, edges[-1] // (8 * ranks))
    pairs = pairs_of_chunks(edges, size)
    most, held = len(pairs) // ranks, list[list[int]]([] for _ in range(ranks))
    depths: list[dict[int, int]] = [{} for _ in range(ranks)]
    light = [(0, rank) for rank in range(ranks)]
    for chunk in sorted(range(len(pairs)), key=lambda i: (-pairs[i], i)):
        first = [heapq.heappop(light) for _ in range(min(nearest, len(light)))]
        keys = dict(parts_of(edges, range(chunk * size, (chunk + 1) * size))) if nearest > 1 else {}

        def overlap(item: tuple[int, int], keys: dict[int, tuple[int, int]] = keys) -> int:
            return sum(min(depths[item[1]].get(document, 0), hi) for document, (_, hi) in keys.items())

        load, rank = max(first, key=lambda item: (overlap(item), -item[0], -item[1]))
        first.remove((load, rank))
        held[rank].append(chunk)
        for document, (_, hi) in keys.items():
            depths[rank][document] = max(depths[rank].get(document, 0), hi)
        if len(held[rank]) < most:
            first.append((load + pairs[chunk], rank))
        for item in first:
            heapq.heappush(light, item)
    return of_chunks(held, size)


def of_chunks(held: list[list[int]], size: int) -> Ranges:
    merged = [ranges_to_positions((i * size, (i + 1) * size) for i in sorted(chunks)) for chunks in held]
    return [[range(s.start, s.stop) for s in positions.stripes] for positions in merged]


@lru_cache
def halves(count: int) -> np.ndarray:
    """Every choice of half of ``2 * count`` chunks: ``[choices, count]``."""
    return np.array(list(combinations(range(2 * count), count)))


def exchange(edges: list[int], ranks: int) -> Ranges:
    """FlashMask's balance: chunks of 2,048 tokens in a heap, then the heaviest rank shares its chunks anew with each
    other rank, in the best of all ways. With more than 8 chunks for each rank the heap is kept."""
    each = max(1, edges[-1] // (CHUNK * ranks))
    size = edges[-1] // (each * ranks)
    pairs = np.array(pairs_of_chunks(edges, size))
    held, light = list[list[int]]([] for _ in range(ranks)), [(0, rank) for rank in range(ranks)]
    for chunk in sorted(range(len(pairs)), key=lambda i: (-int(pairs[i]), i)):
        load, rank = heapq.heappop(light)
        held[rank].append(chunk)
        if len(held[rank]) < each:
            heapq.heappush(light, (load + int(pairs[chunk]), rank))
    loads = [int(pairs[chunks].sum()) for chunks in held]
    for _ in range(200 if each <= 8 else 0):
        heaviest = max(range(ranks), key=loads.__getitem__)
        better = False
        for other in sorted(range(ranks), key=loads.__getitem__)[: ranks - 1]:
            both = np.array(held[heaviest] + held[other])
            sums = pairs[both][halves(each)].sum(1)
            best = int(np.argmin(np.maximum(sums, pairs[both].sum() - sums)))
            most = max(int(sums[best]), int(pairs[both].sum() - sums[best]))
            if most < loads[heaviest]:
                mine = halves(each)[best]
                held[heaviest], held[other] = both[mine].tolist(), np.delete(both, mine).tolist()
                loads[heaviest], loads[other] = (int(pairs[held[rank]].sum()) for rank in (heaviest, other))
                better = True
                break
        if not better:
            break
    return of_chunks(held, size)


def dynamic_size(edges: list[int], ranks: int) -> Ranges:
    """Megatron's dynamic context parallelism: a document gets the power of two of ranks that its length asks for."""
    found: Ranges = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for start, stop in sorted(pairwise(edges), key=lambda x: (x[0] - x[1], x)):
        length = stop - start
        size = min(ranks, 1 << max(0, math.ceil(math.log2(length * ranks / edges[-1]))))
        first = min(range(0, ranks, size), key=lambda i: (max(loads[i : i + size]), i))
        for rank in range(first, first + size):
            loads[rank] += length**2 / size
            pieces = shard_ranges(length, size, rank - first, "zigzag")
            found[rank] += [range(start + r.start, start + r.stop) for r in pieces]
    return [sorted(ranges, key=lambda r: r.start) for ranges in found]


LAYOUTS: dict[str, Callable[[list[int], int], Ranges]] = {
    "zigzag": by_name("zigzag"),
    "zigzag in each document": zigzag_in_documents,
    "striped": by_name("striped"),
    "MagiAttention, heap": heap,
    "MagiAttention, affinity": lambda edges, ranks: heap(edges, ranks, 4),
    "FlashMask, exchange": exchange,
    "Megatron, dynamic size": dynamic_size,
    "`Sharding.balanced`": balanced,
}


# Numbers.


def parts_of(edges: list[int], piece: range) -> Iterator[tuple[int, tuple[int, int]]]:
    """The documents in consecutive positions, with the first and one past the last of their tokens there."""
    start, document = piece.start, int(np.searchsorted(edges, piece.start, side="right")) - 1
    while start < piece.stop:
        stop = min(piece.stop, edges[document + 1])
        yield document, (start - edges[document], stop - edges[document])
        start, document = stop, document + 1


def least_rows(edges: list[int], ranks: int) -> float:
    """The rows that all ranks receive at least, if none has more than the mean of the pairs and of the tokens.

    In a document of L tokens, the i-th deepest of its ranks is at least at depth ``sqrt(L**2 - 2 i pairs)`` and ``L - i
    tokens``.
    """
    lengths = np.diff(edges).astype(float)
    pairs, tokens = float((lengths * (lengths + 1) / 2).sum()) / ranks, edges[-1] / ranks
    total = 0.0
    for i in range(1, ranks):
        least = np.maximum(np.sqrt(np.maximum(lengths**2 - 2 * i * pairs, 0)), lengths - i * tokens)
        total += float(np.maximum(least, 0).sum())
    return total


@dataclass
class Numbers:
    """Of one layout of one row."""

    pairs: float  # of the rank with the most, over the mean
    rows: float  # received by all ranks, in units of T
    over_least: float  # the same over ``least_rows``; 0 if that is 0
    between_hosts: float  # rows that hosts receive, over the tokens of the sequence
    largest_send: float  # rows that the rank with the most sends, in units of T
    pieces: float  # ranges of a rank
    tiles: float  # pairs in computed tiles on the rank with the most, over the mean
    waste: float  # pairs in computed tiles over visible pairs
    ms: float


def numbers(edges: list[int], shards: Ranges, ms: float) -> Numbers:
    """What the layout of causal documents costs."""
    ranks, seq_len, tokens = len(shards), edges[-1], edges[-1] / len(shards)
    striped = shards[0][0].step > 1
    pairs, received, sent, hosts = (striped_rows if striped else rows_of)(edges, shards)
    mask, everything = Mask.documents(edges), [ranges_to_positions([(0, seq_len)])]
    tiles = []
    for rank, ranges in enumerate(shards):
        held = ranges_to_positions((r.start, r.stop) for r in ranges)
        held = merged_positions(seq_len, ranks, rank, 1, "striped") if striped else held
        tiles.append(computed_pairs(mask, seq_len, held, everything, TILE)[0])
    least, total = least_rows(edges, ranks), float(sum(received))
    return Numbers(
        max(pairs) * ranks / sum(pairs),
        total / seq_len,
        total / least if least else 0.0,
        hosts / seq_len,
        max(sent) / tokens,
        sum(map(len, shards)) / ranks,
        max(tiles) * ranks / sum(tiles),
        sum(tiles) / sum(pairs),
        ms,
    )


def rows_of(edges: list[int], shards: Ranges) -> tuple[list[int], list[int], list[int], int]:
    """The pairs, the rows received and the rows sent of each rank, and the rows that all hosts receive."""
    ranks = len(shards)
    pairs, sent = [0] * ranks, [0] * ranks
    depth: list[dict[int, int]] = [{} for _ in range(ranks)]  # of each document: one past the last token held
    held: list[dict[int, int]] = [defaultdict(int) for _ in range(ranks)]
    pieces = [(rank, *part) for rank, ranges in enumerate(shards) for r in ranges for part in parts_of(edges, r)]
    for rank, document, (start, stop) in pieces:
        pairs[rank] += (stop * (stop + 1) - start * (start + 1)) // 2
        depth[rank][document] = max(depth[rank].get(document, 0), stop)
        held[rank][document] += stop - start
    receivers = defaultdict[int, list[tuple[int, int]]](list)
    for rank in range(ranks):
        for document, deepest in depth[rank].items():
            receivers[document].append((deepest, rank))
    for rank, document, (start, stop) in pieces:
        for deepest, other in receivers[document]:
            if other != rank and deepest > start:
                sent[rank] += min(deepest, stop) - start
    received = [sum(d - held[rank][document] for document, d in depth[rank].items()) for rank in range(ranks)]
    hosts = 0
    for first in range(0, ranks, PER_HOST):
        members = range(first, min(first + PER_HOST, ranks))
        for document in {document for rank in members for document in depth[rank]}:
            deepest = max(depth[rank].get(document, 0) for rank in members)
            hosts += deepest - sum(held[rank].get(document, 0) for rank in members)
    return pairs, received, sent, hosts


def striped_rows(edges: list[int], shards: Ranges) -> tuple[list[int], list[int], list[int], int]:
    """``rows_of`` for rank ``r`` with the positions ``r, r + ranks, ...``."""
    ranks = len(shards)
    starts = np.repeat(edges[:-1], np.diff(edges))
    position = np.arange(edges[-1])
    depth, owner = position - starts + 1, position % ranks
    later = np.repeat(edges[1:], np.diff(edges)) - position - 1  # tokens of the document after each
    last = later < ranks  # the rank's last token of the document
    pairs = np.bincount(owner, depth, ranks)
    sent = np.bincount(owner, np.minimum(later, ranks - 1), ranks)
    received = np.bincount(owner[last], depth[last], ranks) - np.bincount(owner, minlength=ranks)
    host_last = np.ones(len(position), dtype=bool)  # the host's last token of the document
    host = owner // PER_HOST
    for start, stop in pairwise(edges):
        tail = np.arange(max(start, stop - ranks), stop)
        _, index = np.unique(host[tail][::-1], return_index=True)
        host_last[start:stop] = False
        host_last[tail[::-1][index]] = True
    hosts = int(depth[host_last].sum()) - edges[-1]
    return [[int(i) for i in x] for x in (pairs, received, sent)] + [hosts]  # type: ignore[return-value]


# The table.


def compare(cases: Iterable[tuple[str, int, int, int]], layouts: Iterable[str]) -> dict[str, list[Numbers | None]]:
    """The numbers of every layout in every case: a mix, a length, a number of ranks and a seed."""
    found: dict[str, list[Numbers | None]] = {name: [] for name in layouts}
    for mix, seq_len, ranks, seed in cases:
        edges = boundaries(mix, seq_len, seed)
        for name in found:
            times = []
            for _ in range(3):
                start = time.perf_counter()
                shards = LAYOUTS[name](edges, ranks)
                times.append((time.perf_counter() - start) * 1e3)
                if times[-1] > 100:
                    break
            found[name].append(numbers(edges, shards, min(times)) if shards else None)
    return found


def table(found: dict[str, list[Numbers | None]]) -> str:
    lines = [
        "| layout | pairs, largest / mean: mean (worst) | rows received / least: median, mean | rows between hosts / N "
        "| largest send / T | ranges a rank | tiles, largest / mean | tiles / pairs | plan, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, by_case in found.items():
        some = [x for x in by_case if x is not None]

        def mean(field: str, some: list[Numbers] = some) -> float:
            return float(statistics.mean(getattr(x, field) for x in some))

        over = [x.over_least for x in some if x.over_least]
        is_balanced = mean("pairs") < 1.2
        rows = f"{statistics.median(over):.2f}, {statistics.mean(over):.2f}" if is_balanced else "not balanced"
        lines.append(
            f"| {name} | {mean('pairs'):.2f} ({max(x.pairs for x in some):.2f}) | {rows} | {mean('between_hosts'):.2f} "
            f"| {mean('largest_send'):.0f} | {mean('pieces'):.0f} | {mean('tiles'):.2f} | {mean('waste'):.2f} "
            f"| {mean('ms'):.1f} |"
        )
    return "\n".join(lines)


def more_rows(found: dict[str, list[Numbers | None]]) -> list[int]:
    """The cases in which another layout with pairs below 1.2 times the mean receives fewer rows."""
    ours = found["`Sharding.balanced`"]
    return [
        i
        for i, own in enumerate(ours)
        if any(x[i] is not None and x[i].pairs < 1.2 and x[i].rows < own.rows for x in found.values())  # type: ignore[union-attr]
    ]


def table_of_windows(window: int, seq_len: int = 1 << 20, ranks: int = 64) -> str:
    """``Sharding.balanced`` for full layers alone, and for three layers with this window beside each full one."""
    lines = [
        "| documents | layout for | pairs, largest / mean: full | window | rows received / N: full | window |",
        "|---|---|---|---|---|---|",
    ]
    for mix in MIXES:
        full = Mask.documents(boundaries(mix, seq_len, 0))
        masks = full, full & Mask.sliding_window(window - 1)
        for name, layers in (("the full layers", {full: 1}), ("all layers", {full: 1, masks[1]: 3})):
            layout = balanced_layout(layers, seq_len, ranks, per_host=PER_HOST)
            held = [merged_positions(seq_len, ranks, rank, 1, layout) for rank in range(ranks)]
            found = [pairs_and_rows(mask, seq_len, held) for mask in masks]
            lines.append(f"| {mix} | {name} | " + " | ".join(f"{x[i]:.2f}" for i in (0, 1) for x in found) + " |")
    return "\n".join(lines)


def pairs_and_rows(mask: Mask, seq_len: int, shards: list[Positions]) -> tuple[float, float]:
    """The largest pairs over the mean, and the rows that all ranks receive over the tokens."""
    everything, runs = [ranges_to_positions([(0, seq_len)])], mask.runs(seq_len)
    pairs = [computed_pairs(mask, seq_len, held, everything, 1)[0] for held in shards]
    seen = sum(stop - start for held in shards for start, stop in visible_ranges(runs, held, seq_len))
    return max(pairs) * len(pairs) / sum(pairs), seen / seq_len - 1  # each query sees its own key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--window", type=int, help="keys of a window: compare layouts for layers with and without it")
    given = parser.parse_args()
    if given.window:
        print(table_of_windows(given.window))
        return
    cases = [(mix, *size, seed) for seed in range(given.seeds) for mix in MIXES for size in SIZES]
    found = compare(cases, LAYOUTS)
    text = table(found)
    print(text)
    fewer = more_rows(found)
    print(f"{len(fewer)} of {len(cases)} cases in which a layout with pairs below 1.2 receives fewer rows:")
    for i in fewer:
        rows = {name: round(x[i].rows, 2) for name, x in found.items() if x[i] is not None and x[i].pairs < 1.2}  # type: ignore[union-attr]
        print("  ", cases[i], rows)
    if given.write:
        before, rest = PAGE.read_text().split("<!-- packed layouts -->\n")
        after = rest.split("<!-- end of packed layouts -->\n")[1]
        PAGE.write_text(f"{before}<!-- packed layouts -->\n{text}\n<!-- end of packed layouts -->\n{after}")


if __name__ == "__main__":
    main()
