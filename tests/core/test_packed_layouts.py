"""``benchmarks/packed_layouts.py`` on short rows: its numbers are right, and the balanced layout receives few rows."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from seqpar import Assigned, Mask
from seqpar.placement.layout import CPU, TokenLayout
from seqpar.schedule.plan import AttentionPlan

OURS = "`Sharding.balanced`"


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import packed_layouts

    assert isinstance(packed_layouts, ModuleType)
    return packed_layouts


def test_every_layout_divides_the_row(layouts: Any) -> None:
    """And the rows that are counted are the rows that the executed schedule sends."""
    edges = layouts.boundaries("midtrain", 1 << 14, 0)
    for name, make in layouts.LAYOUTS.items():
        shards = make(edges, 8)
        if name == "striped":
            assert sorted(i for (r,) in shards for i in r) == list(range(1 << 14))
            continue
        layout = Assigned(tuple(map(tuple, shards)))  # raises unless each token has one rank
        tokens, mask = TokenLayout(1 << 14, layout, ring=8), Mask.documents(edges)
        received = layouts.rows_of(edges, shards)[1]
        for rank in range(8):
            hops = [step.intra_host for step in AttentionPlan(mask, tokens, rank)]
            planned = sum(len(t.owner_rows.index(CPU)) for hop in hops for t in hop.receives)
            assert received[rank] == planned, (name, rank)


def test_rows_of_striped_shards(layouts: Any) -> None:
    edges = [0, 3, 40, 41, 64]
    striped = [[range(rank, 64, 4)] for rank in range(4)]
    single = [[range(i, i + 1) for i in range(rank, 64, 4)] for rank in range(4)]
    assert layouts.striped_rows(edges, striped) == list(layouts.rows_of(edges, single))


def test_the_table(layouts: Any) -> None:
    cases = [(mix, 1 << 17, 8, 1) for mix in layouts.MIXES]
    names = [name for name in layouts.LAYOUTS if "each document" not in name]
    found = layouts.compare(cases, names)
    assert all(x.pairs <= 1.02 for x in found[OURS])
    rows = {name: sum(x.rows for x in by_case) for name, by_case in found.items()}
    others = [rows[name] for name in names if name != OURS and max(x.pairs for x in found[name]) < 1.2]
    assert others and rows[OURS] < min(others)
    assert layouts.table(found).count("\n") == len(names) + 1


def test_predictions_on_gpus(layouts: ModuleType) -> None:
    """Balanced layouts are the fastest, and none is faster than the kernel."""
    import flat_scaling

    kernel = flat_scaling.GPU.rate(None).forward
    rates = {}
    for name in flat_scaling.PREDICTED:
        work, seconds = flat_scaling.work_and_seconds((name, 16, 0))
        assert work / seconds < kernel
        rates[name] = work / seconds
    for strategy in ("ring", "all-gather", "Ulysses in hosts, ring between them"):
        assert rates[f"{strategy}, balanced"] > rates[f"{strategy}, zigzag"]
