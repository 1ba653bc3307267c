"""The table of strategies covers every strategy of the package."""

from __future__ import annotations

import seqpar
from seqpar.placement.strategies import COMMS
from seqpar.placement.strategies import STRATEGIES as PACKAGE_STRATEGIES

from ..strategy_cases import LAYER_STRATEGIES, ONE_PER_CLASS, STRATEGIES


def test_every_strategy_has_a_row() -> None:
    # "auto" takes one of the others: test_rules.py.
    assert {row["strategy"] for row in STRATEGIES.values()} == set(PACKAGE_STRATEGIES) - {"local", "auto"}


def test_every_way_of_context_parallel_has_a_row() -> None:
    rows = [row for row in STRATEGIES.values() if row["strategy"] == "context_parallel"]
    assert {row["comm"] for row in rows if "comm" in row} == set(COMMS)


def test_one_per_class_has_every_layer_class_once() -> None:
    classes = {
        name: type(seqpar.ParallelAttention(hidden_size=16, num_heads=4, **row))
        for name, row in LAYER_STRATEGIES.items()
    }
    chosen = [classes[name] for name in ONE_PER_CLASS]
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) == set(classes.values())
