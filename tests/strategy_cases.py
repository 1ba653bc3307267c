"""The table of strategies over which the tests are parametrized.

To test a new strategy, add a row to ``STRATEGIES``. The tests of attention, layers, bad input, checkpointing,
compilation and default devices then run it. ``test_strategies.py`` fails as long as a strategy of the package, or a
value of ``comm``, has no row here. Importing this module has no side effects.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from seqpar import Assigned
from seqpar.placement import layout

from .reference import rank_positions

# Every layout has a row: the names, and random ranges of positions for each rank (``reference.rank_positions``).
LAYOUTS = (*layout.LAYOUTS, "assigned")


def layout_of(name: str, seq_len: int, ranks: int) -> Any:
    """The layout with which rank ``r`` of ``ranks`` holds ``rank_positions(seq_len, ranks, r, name)``."""
    if name != "assigned":
        return name

    def ranges(rank: int) -> list[range]:
        mine = rank_positions(seq_len, ranks, rank, name).numpy()
        cuts = [0, *(np.flatnonzero(np.diff(mine) > 1) + 1).tolist(), len(mine)]
        return [range(int(mine[a]), int(mine[b - 1]) + 1) for a, b in pairwise(cuts) if a < b]

    return Assigned(tuple(tuple(ranges(rank)) for rank in range(ranks)))


# The keys are used in the ids of tests. The values are arguments of ``seqpar.attention`` and ``ParallelAttention``.
STRATEGIES: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "ulysses": {"strategy": "ulysses"},
    "all_gather": {"strategy": "context_parallel", "comm": "all_gather"},
    "all_gather in chunks": {"strategy": "context_parallel", "chunks": 2},
    "p2p": {"strategy": "context_parallel", "comm": "p2p"},
    "a2a": {"strategy": "context_parallel", "comm": "a2a"},
    "a2a+p2p": {"strategy": "context_parallel", "comm": "a2a+p2p"},
    "hybrid": {"strategy": "hybrid"},
}

# ``comm`` has other names for ring, Ulysses and hybrid. What does not depend on the name runs these.
OTHER_NAMES = ("p2p", "a2a", "a2a+p2p")
DISTINCT = [name for name in STRATEGIES if name not in OTHER_NAMES]

# Strategies that include the projections can only be used as layers.
LAYER_STRATEGIES: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "activations": {"strategy": "context_parallel", "gather": "activations"},
    "tp_sp": {"strategy": "tp_sp"},
}
DISTINCT_LAYERS = [name for name in LAYER_STRATEGIES if name not in OTHER_NAMES]

# One row for each layer class, for tests in which a row costs seconds.
ONE_PER_CLASS = ("ring", "ulysses", "all_gather", "hybrid", "tp_sp")

# Numbers of ranks: a power of two, an odd number, and a hybrid of 2 x 2. Eight ranks are in tests of their own: meshes,
# a hybrid of 4 x 2 and 2 x 4, and several hosts.
WORLDS = (2, 3, 4)
