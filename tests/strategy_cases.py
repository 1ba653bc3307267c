"""The table of strategies over which the tests are parametrized.

To test a new strategy, add a row to ``STRATEGIES``. The tests of attention, layers, bad input, checkpointing,
compilation and default devices then run it. ``test_strategies.py`` fails as long as a strategy of the package, or a
value of ``comm``, has no row here. Importing this module has no side effects.
"""

from __future__ import annotations

from typing import Any

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

# Strategies that include the projections can only be used as layers.
LAYER_STRATEGIES: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "activations": {"strategy": "context_parallel", "gather": "activations"},
    "tp_sp": {"strategy": "tp_sp"},
}

# One row for each layer class, for tests in which a row costs seconds.
ONE_PER_CLASS = ("ring", "ulysses", "all_gather", "hybrid", "tp_sp")

# Numbers of ranks: a power of two, an odd number, and a hybrid of 2 x 2. Eight ranks are in tests of their own: meshes,
# a hybrid of 4 x 2 and 2 x 4, and several hosts.
WORLDS = (2, 3, 4)
