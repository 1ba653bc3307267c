"""``Sharding.balanced``: equal tokens and pairs, few rows, and the same layout in every process."""

from __future__ import annotations

import random
from itertools import chain, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Assigned, Mask, Sharding
from seqpar.placement.balanced import _Pairs, balanced_layout
from seqpar.placement.layout import CPU, LAYOUTS, Layout, TokenLayout, shard_length, shard_positions, shard_ranges
from seqpar.planner.mixes import document_mix
from seqpar.ranks import mesh as mesh_module
from seqpar.ranks.mesh import sequence_group_of
from seqpar.schedule.plan import AttentionPlan
from seqpar.sharding.report import report
from seqpar.sharding.worker import WorkerSharding

from ..hosts import hosts_of
from ..observe import message_of
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close, dense_attention
from ..strategy_cases import STRATEGIES


def documents(seed: int, seq_len: int) -> list[int]:
    """Boundaries of documents with a long tail."""
    chance, edges = random.Random(seed), [0]
    median, spread = chance.choice([(60, 1.5), (400, 1.0), (300, 2.2)])
    while edges[-1] < seq_len:
        edges.append(min(seq_len, edges[-1] + 1 + int(median * chance.lognormvariate(0, spread))))
    return edges


def shares(mask: Mask, seq_len: int, ranks: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """The tokens and the visible pairs of each rank over their mean, counted token by token."""
    seen = torch.zeros(seq_len, dtype=torch.float64)  # of each query
    sets = (x.interval_sets(torch.arange(seq_len)) for x in mask.head_groups or (mask,))
    for ends in chain.from_iterable(sets):
        lo, hi = (x.clamp(max=seq_len) for x in ends)
        seen += (hi - lo).reshape(-1, seq_len).sum(0)
    ranges = [shard_ranges(seq_len, ranks, rank, layout) for rank in range(ranks)]
    tokens = torch.tensor([sum(map(len, x)) for x in ranges]).double()
    pairs = torch.stack([sum((seen[r.start : r.stop].sum() for r in x), torch.zeros(())) for x in ranges])
    return tokens / tokens.mean(), pairs / pairs.mean()


@pytest.mark.parametrize("ranks", [2, 4, 7, 16])
def test_tokens_and_pairs_are_balanced(ranks: int) -> None:
    for seed in range(50):
        chance = random.Random(seed)
        seq_len = chance.choice([600 * ranks, 1024 * ranks, 2048 * ranks + 17, chance.randint(512, 4000) * ranks - 1])
        mask = Mask.documents(documents(seed, seq_len))
        layout = balanced_layout(mask, seq_len, ranks)
        tokens, pairs = shares(mask, seq_len, ranks, layout)  # Assigned checks that each token has one rank
        assert tokens.max() - tokens.min() <= 0.02 and pairs.max() <= 1.02, (seed, seq_len, layout)
        if seed % 4:
            continue
        together, seq_len = chance.choice([x for x in (1, 2, 4) if ranks % x == 0]), 512 * ranks + chance.randrange(99)
        mask = Mask.documents(documents(seed, seq_len))
        layout = balanced_layout({mask: 1, mask & Mask.sliding_window(90): 2}, seq_len, ranks, together, 2)
        tokens, _ = shares(mask, seq_len, ranks, layout)
        assert tokens.max() - tokens.min() <= 0.02, (seed, seq_len, together, layout)


@pytest.mark.parametrize("ranks", [4, 16])
def test_layers_with_windows(ranks: int) -> None:
    for seed in range(12):
        seq_len = random.Random(seed).choice([600 * ranks, 1024 * ranks, 2048 * ranks + 17])
        full = Mask.documents(documents(seed, seq_len))
        window = full & Mask.sliding_window(255)
        layout = balanced_layout({window: 3, full: 1}, seq_len, ranks)
        tokens, pairs = shares(full, seq_len, ranks, layout)
        assert tokens.max() <= 1.02 and pairs.max() <= 1.02, (seed, layout)
        assert shares(window, seq_len, ranks, layout)[1].max() <= 1.07, (seed, layout)


def test_windows_in_a_long_row() -> None:
    full = document_mix("magi", 1 << 20, longest=1 << 18)
    window, narrow = full & Mask.sliding_window(4095), full & Mask.sliding_window(1023)
    by_mask = [_Pairs(mask, 1 << 20) for mask in (full, window, narrow)]
    three = {window: 1, narrow: 1, full: 1}
    for masks, most in (({full: 1, window: 3}, (1.02, 1.03, 1.2)), (three, (1.02, 1.04, 1.04))):
        layout = balanced_layout(masks, 1 << 20, 64)
        pairs = [x.of([list(shard_ranges(1 << 20, 64, rank, layout)) for rank in range(64)]) for x in by_mask]
        assert all(max(x) * 64 / sum(x) <= y for x, y in zip(pairs, most, strict=True))


def test_numbers_of_layers_count() -> None:
    """Zigzag gives the rank with a document's head 7 % less of the windows: it is kept where few layers have them."""
    full, window = Mask.causal(), Mask.sliding_window(4095)
    assert balanced_layout({full: 100, window: 1}, 32768, 8) == "zigzag"
    assert isinstance(balanced_layout({full: 1, window: 100}, 32768, 8), Assigned)
    alike, half = Mask.by_heads([window] * 8), Mask.by_heads([full, window])
    for weight in (1, 4):
        assert balanced_layout({full: 1, alike: weight}, 32768, 8) == balanced_layout(
            {full: 1, window: weight}, 32768, 8
        )
    by_layer = Sharding.balanced({full: 1, window: 1}, 32768, ranks=8, rank=0)
    rows = [by_layer.report(x).splitlines()[1:-1] for x in ({half: 2}, {full: 1, window: 1})]
    assert [x.split()[2:] for x in rows[0]] == [x.split()[2:] for x in rows[1]]


MASKS = {
    "window": Mask.documents([0, 3000, 3500, 9000, 16384]) & Mask.sliding_window(700),
    "prefix": Mask.prefix_lm(5000),
    "chunked": Mask.chunked(3000),
    "padding": Mask.causal() & Mask.padding(1000, 12000),
    "rows": Mask.documents([[0, 9000, 16384], [0, 500, 16384]]),
    "blocks": Mask.causal(blocks=[(100, 4000), (9000, 16000)]),
    "forward": Mask.sliding_window(0, -1),
    "both": Mask.documents([0, 4000, 16384], causal=False),
    "nothing": Mask.documents([0], padding=True),
    "tree": Mask.tree([-1, 0, 0, 2, 2, 0, -1], [3000, 4000, 500, 700, 1184, 5000, 2000]),
    "block diffusion": Mask.block_diffusion(8192, 96),
    "union": Mask.sliding_window(700) | Mask.global_tokens(300),
    "by heads": Mask.by_heads([Mask.causal(), Mask.documents([0, 3000, 3500, 9000, 16384])]),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str) -> None:
    mask, seq_len = MASKS[name], 16384
    for ranks in (3, 8):
        layout = balanced_layout(mask, seq_len, ranks)
        tokens, pairs = shares(mask, seq_len, ranks, layout)
        assert tokens.max() <= 1.02 and (name == "nothing" or pairs.max() <= 1.02), layout


def test_layouts_with_names() -> None:
    """One document is zigzag, and so are short sequences. Queries with equally many keys are contiguous."""
    assert balanced_layout(Mask.causal(), 100_000, 8) == "zigzag"
    assert balanced_layout(Mask.documents([0, 3000, 4000]), 4000, 8) == "zigzag"
    assert balanced_layout(Mask.documents([0, 100, 256]), 256, 2) == "zigzag"
    for mask in (Mask.full(), Mask.sliding_window(60), Mask.documents(range(0, 65537, 64))):
        assert balanced_layout(mask, 65536, 8) == "contiguous"
    assert balanced_layout(Mask.causal(), 5000, 1) == "contiguous"
    assert Sharding.balanced(Mask.causal(), 0).lengths == (0,)


def rows_of(edges: list[int], layout: Layout, ranks: int) -> int:
    """The rows that all ranks receive: keys that a rank sees and does not hold, from the definition."""
    received = 0
    for rank in range(ranks):
        held = torch.zeros(edges[-1], dtype=torch.bool)
        for r in shard_ranges(edges[-1], ranks, rank, layout):
            held[r.start : r.stop] = True
        for start, stop in pairwise(edges):
            mine = held[start:stop].nonzero()
            received += int((~held[start : start + int(mine[-1]) + 1]).sum()) if len(mine) else 0
    return received


def test_few_rows_are_received() -> None:
    """At most 1.35 times the least that any layout with the same largest rank can have, over random rows together."""
    ranks, rows, bound = 16, 0, 0.0
    for seed in range(12):
        edges = documents(3 * seed, 4096 * ranks)
        layout = balanced_layout(Mask.documents(edges), edges[-1], ranks)
        rows += rows_of(edges, layout, ranks)
        lengths = [b - a for a, b in pairwise(edges)]
        pairs, tokens = sum(x * x / 2 for x in lengths) / ranks, edges[-1] / ranks
        for length in lengths:  # a rank whose piece ends at depth D holds at most ``tokens``, and ``pairs`` below it
            least = [max((length**2 - 2 * i * pairs), 0) ** 0.5 for i in range(1, ranks)]
            bound += sum(max(x, length - i * tokens, 0) for i, x in enumerate(least, 1))
    assert rows <= 1.35 * bound


def test_a_layout_is_made_of_tiles() -> None:
    edges = documents(5, 1 << 18)
    layout = balanced_layout(Mask.documents(edges), 1 << 18, 16)
    assert isinstance(layout, Assigned)
    assert all(r.start % 128 == r.stop % 128 == 0 for ranges in layout.by_rank for r in ranges)
    assert {sum(map(len, ranges)) for ranges in layout.by_rank} == {1 << 14}


def test_holders_of_a_document_share_hosts() -> None:
    edges = [0, 40_000, 80_000, 120_000, 1 << 17]
    mask = Mask.documents(edges)
    by_host = {}
    for per_host in (4, 0):
        layout = balanced_layout(mask, 1 << 17, 16, per_host=per_host)
        assert isinstance(layout, Assigned)
        hosts = tuple(
            tuple(sorted((r for x in layout.by_rank[i : i + 4] for r in x), key=min)) for i in range(0, 16, 4)
        )
        by_host[per_host] = rows_of(edges, Assigned(hosts), 4)
    assert by_host[4] <= by_host[0]


def test_ranks_that_share_tokens() -> None:
    """With an all-to-all, its ranks have equal pairs together, and equally many tokens each."""
    mask, seq_len = Mask.documents(documents(2, 32768)), 32768
    layout = balanced_layout(mask, seq_len, 8, ulysses=2)
    _, pairs = shares(mask, seq_len, 8, layout)
    tokens, _ = shares(mask, seq_len, 8, layout)
    assert pairs.view(4, 2).mean(1).max() <= 1.02 and tokens.max() <= 1.02


@on_ranks
def layouts(group: ProcessGroup, edges: list[int]) -> list[tuple[str, list[int]]]:
    """The layouts of equal arguments, and this rank's positions: of the ranks alone, of a group and of a mesh, while
    the hosts are unknown and known, and after attention."""
    mask, mesh, found = Mask.documents(edges), mesh_of(2, 2, 2, 1), []
    sequence = sequence_group_of(mesh)
    assert sequence is not None
    rank = sequence.rank()

    def make(arguments: dict[str, int]) -> None:
        made = Sharding.balanced(mask, edges[-1], ranks=4, rank=rank, **arguments)
        same: list[dict[str, Any]] = [{"group": sequence}, {"mesh": mesh}, {"mesh": mesh, "strategy": "tp_sp"}]
        all_of_them = [made, *(Sharding.balanced(mask, edges[-1], **where, **arguments) for where in same)]
        assert len({x.layout for x in all_of_them}) == 1
        found.append((repr(made.layout), shard_positions(edges[-1], 4, rank, made.layout).tolist()))

    for arguments in ({}, {"ulysses": 2}, {"ranks_per_host": 2}, {"ulysses": 2, "ranks_per_host": 2}):
        with mock.patch.dict(mesh_module._hosts, clear=True):  # as before the first attention
            make(arguments)
        with hosts_of(2):
            sharding = Sharding.balanced(mask, edges[-1], mesh=mesh)
            q = sharding.shard(torch.ones(1, edges[-1], 2, 4))
            seqpar.attention(q, q, q, strategy="hybrid", sharding=sharding, mask=mask)
            make(arguments)
    return found


def test_equal_arguments_are_equal_layouts(pool: Pool) -> None:
    made = list(zip(*pool.run(8, layouts, documents(7, 4096))[:4], strict=True))
    for before, after in zip(made[::2], made[1::2], strict=True):
        assert before == after and len({layout for layout, _ in before}) == 1
        assert sorted(x for _, positions in before for x in positions) == list(range(4096))
    assert len({by_rank[0][0] for by_rank in made[::2]}) > 1  # the arguments count


EDGES = [0, 500, 520, 700, 900, 1100]


@on_ranks
def attend(group: ProcessGroup, edges: list[int], options: dict[str, Any]) -> tuple[list[Tensor], str]:
    mask = Mask.documents(edges)
    where: dict[str, Any] = {"mesh": mesh_of(2, 2, 2, 1)} if group.size() == 8 else {"group": group}
    sharding = Sharding.balanced(mask, edges[-1], **where)
    leaves = [sharding.shard(x).requires_grad_() for x in tensors(edges)[:3]]
    out = seqpar.attention(*leaves, sharding=sharding, mask=mask, **options)
    out.backward(sharding.shard(tensors(edges)[3]))
    return [sharding.unshard(x) for x in (out.detach(), *(x.grad for x in leaves if x.grad is not None))], repr(
        sharding
    )


def tensors(edges: list[int]) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of out, ``[1, s, 1, 4]``."""
    return torch.randn(4, 1, edges[-1], 1, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64).unbind()


@pytest.mark.parametrize(
    ("strategy", "world", "edges"),
    [
        ("ring", 2, EDGES),
        ("ulysses", 2, EDGES),
        pytest.param("hybrid", 8, [0, 1100, 1120, 2000, 2100], marks=pytest.mark.slow),  # on a mesh of 2 x 2 x 2
    ],
)
def test_attention_is_one_device(pool: Pool, strategy: str, world: int, edges: list[int]) -> None:
    q, k, v, dout = tensors(edges)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(q, k, v, Mask.documents(edges).dense(edges[-1]))
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    results = pool.run(world, attend, edges, STRATEGIES[strategy])
    assert len({made for _, made in results}) == 1 and "Assigned" in results[0][1]  # the same on every rank
    for by_rank, _ in results:
        for name, actual, right in zip(("out", "dq", "dk", "dv"), by_rank, expected, strict=True):
            assert_close(actual, right, torch.float64, name)


def test_in_a_worker() -> None:
    mask = Mask.documents(EDGES)
    made = Sharding.balanced(mask, EDGES[-1], ranks=2, rank=1)
    assert isinstance(made, WorkerSharding) and made.layout == balanced_layout(mask, EDGES[-1], 2)
    x = torch.arange(EDGES[-1])[None]
    assert torch.equal(made.shard(x)[0], made.positions())


def test_errors() -> None:
    mask, make = Mask.documents(EDGES), Sharding.balanced
    wrong: Any = "causal"
    assert message_of(lambda: make(wrong, 8)).startswith("TypeError: mask=str: expected a seqpar.Mask")
    assert message_of(lambda: make({mask: 1, wrong: 2}, 8)).startswith("TypeError: mask=str: expected a seqpar.Mask")
    assert message_of(lambda: make({}, 8)).startswith("ValueError: mask={}: expected at least one mask")
    assert message_of(lambda: make({mask: 0}, 8)).endswith("]=0: expected at least 1")
    assert "has 8 tokens" in message_of(lambda: make({Mask.causal(): 1, mask: 2}, 8))
    assert "has 8 tokens" in message_of(lambda: make(mask, 8))
    assert "ranks=4, rank=None: give both" in message_of(lambda: make(mask, 1100, ranks=4))
    assert "rank=4: expected one of 4 ranks" in message_of(lambda: make(mask, 1100, ranks=4, rank=4))
    assert "ulysses=3: expected a divisor of the 4 ranks" in message_of(
        lambda: make(mask, 1100, ranks=4, rank=0, ulysses=3)
    )
    assert "ulysses=2: expected a divisor of the 1 ranks" in message_of(lambda: make(mask, 1100, ulysses=2))
    assert "ranks_per_host=0: expected at least 1" in message_of(lambda: make(mask, 1100, ranks_per_host=0))


@pytest.mark.parametrize("together", [1, 2])
def test_the_report_is_what_ranks_hold_compute_and_receive(together: int) -> None:
    """Counted token by token, and the rows of a ring's plans."""
    n, ranks = 2100, 4
    mask = Mask.documents([[0, 900, 920, n], [0, 30, n]]) & Mask.sliding_window(400)
    seen = mask.dense(n)  # [2, n, n]
    for layout in (balanced_layout(mask, n, ranks, together), *LAYOUTS):
        lines = report(n, layout, ranks, together, mask, 1_000_000).splitlines()[1:-1]  # a megabyte for each row
        held, pairs, received = ([float(x.split()[i].replace(",", "")) for x in lines] for i in (1, 2, 4))
        assert held == [shard_length(n, ranks, rank, layout) for rank in range(ranks)]
        tokens = TokenLayout(n, layout, ranks // together, together)
        for first in range(0, ranks, together):
            own = tokens.ring_positions(first // together).tensor(CPU)
            others = torch.ones(n, dtype=torch.bool).index_fill(0, own, False)
            rows = int((seen[:, own].any(dim=(0, 1)) & others).sum())
            steps = AttentionPlan(mask, tokens, first // together)
            assert rows == sum(len(t.owner_rows) for step in [*steps][1:] for t in step.intra_host.receives)
            mine = slice(first, first + together)
            assert pairs[mine] == pytest.approx([float(seen[:, own].sum()) / together] * together, abs=1)
            assert received[mine] == pytest.approx([rows / together] * together)


def test_print_shows_what_balanced_has_made() -> None:
    mask = Mask.documents([0, 3000, 4096])
    for made in (Sharding.balanced(mask, 4096), Sharding.balanced(mask, 4096, ranks=4, rank=0)):
        first, *table = str(made).splitlines()
        assert first == f"balanced for {mask!r}: {made!r}" and "\n".join(table) == made.report(mask)
        assert len(table) == len(made.lengths) + 2
    layers = made.report({mask: 1, mask & Mask.sliding_window(9): 3}).splitlines()[1:5]
    alone = [made.report(x).splitlines()[1:5] for x in (mask, mask & Mask.sliding_window(9))]
    for both, one, other in zip(layers, *alone, strict=True):
        pairs = [float(x.split()[2].replace(",", "")) for x in (both, one, other)]
        assert pairs[0] == pairs[1] + 3 * pairs[2]
    with pytest.raises(TypeError, match=r"mask=int: expected a seqpar\.Mask"):
        made.report({3: 1})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="token_bytes=-1: expected at least 0"):
        made.report(mask, -1)
