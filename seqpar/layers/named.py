"""The layers that differ from one another in the strategy only."""

from __future__ import annotations

from collections.abc import Callable

from ..masks.mask import Mask
from ..sharding.sharding import Sharding
from .attention import AttentionLayer


class LocalAttention(AttentionLayer):
    """Attention on one rank, which holds the full sequence. No options."""

    strategy = "local"


class RingAttention(AttentionLayer):
    """Ring attention: K/V rows are sent from rank to rank, step by step. No options.

    Under a causal mask, use the layout "zigzag" or "striped", with which all ranks have the same work.
    """

    strategy = "ring"


class UlyssesAttention(AttentionLayer):
    """Ulysses: all-to-all from sequence shards to head shards and back. No options.

    With more ranks than heads, some ranks have no work.
    """

    strategy = "ulysses"


class HybridAttention(AttentionLayer):
    """A hybrid: all-to-all in subgroups, ring across them.

    Args:
        ulysses_size: on a plain group, the size of the subgroups, a divisor of the group's size; by default the largest
            one up to its square root. On a mesh, the sizes of its ring and ulysses dimensions are used.
    """

    strategy = "hybrid"


class AutoAttention(AttentionLayer):
    """Takes in each call the strategy that should be the fastest, see ``seqpar.attention``. No options."""

    strategy = "auto"

    def mask_planner(self, sharding: Sharding) -> Callable[..., Mask]:
        raise ValueError("strategy='auto': it depends on the mask; name the strategy to plan for")
