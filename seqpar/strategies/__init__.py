"""Strategies: each says who takes part in what; the loop and the autograd function are shared.

A strategy joins by standing in ``STRATEGIES``: a function of (mesh, group, its own options) that returns the groups.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.distributed import DeviceMesh, ProcessGroup

from ..check import check_choice, check_options
from ..mesh import Groups
from .context_parallel import context_parallel
from .function import Call, SequenceParallelAttention
from .hybrid import hybrid
from .local import local
from .recompute import keep_attention
from .ring import ring
from .ulysses import ulysses

STRATEGIES: dict[str, Callable[..., Groups]] = {f.__name__: f for f in (local, ring, ulysses, context_parallel, hybrid)}


def strategy_options(strategy: str) -> list[str]:
    """The options a strategy takes besides mesh and group."""
    return list(inspect.signature(STRATEGIES[strategy]).parameters)[2:]


def resolve(strategy: str, mesh: DeviceMesh | None, group: ProcessGroup | None, options: dict[str, Any]) -> Groups:
    """The groups of a strategy.

    Raises:
        TypeError, ValueError: unknown strategy or option (with the nearest valid name), or groups that do not fit.
    """
    check_choice("strategy", strategy, STRATEGIES)
    check_options(strategy, options, strategy_options(strategy))
    return STRATEGIES[strategy](mesh, group, **options)


__all__ = ["STRATEGIES", "Call", "SequenceParallelAttention", "keep_attention", "resolve", "strategy_options"]
