"""Who takes part in one attention call and which positions each rank holds; and a layer's mesh or group."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.distributed import DeviceMesh, ProcessGroup

from ..base.compile_types import Opaque, register_reference_type
from ..ranks.mesh import (
    Ranks,
    Subgroup,
    check_mesh_and_group,
    rank_in,
    ranks_by_host,
    ranks_per_host,
    size_of,
    tensor_group,
)
from .layout import TokenLayout

_NO_TOKENS = TokenLayout(0)


@dataclass(frozen=True, eq=False)
class Placement:
    """Who takes part in one attention call, and which positions each rank holds. Made once, by ``Sharding.place``.

    Attributes:
        sequence_group: the ranks that attend to one sequence; None is this rank alone.
        ring: the ranks that send keys and values to one another, or None.
        ulysses: the ranks among which an all-to-all turns sequence shards into head shards, or None.
        gather: whether a rank receives all remote keys and values in one step; None: only if the ring has one host.
        chunks: with ``gather``, in how many chunks of heads they are received; None decides by their size.
        algorithm: the name of a value of ``strategies.algorithms.ALGORITHMS``; None is the ring, with an all-to-all
            around it if ``ulysses`` has several ranks.
        tokens: which positions each rank holds. A strategy's row in ``STRATEGIES`` leaves it to ``Sharding.place``.
        kept: what calls with this placement keep for later calls: the links of its ranks, and its all-to-alls.
    """

    sequence_group: ProcessGroup | None = None
    ring: Ranks | None = None
    ulysses: Ranks | None = None
    gather: bool | None = False
    chunks: int | None = None
    algorithm: str | None = None
    tokens: TokenLayout = _NO_TOKENS
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def rank(self) -> int:
        """This rank among the ranks of the sequence."""
        return rank_in(self.sequence_group)

    @cached_property
    def ring_rank(self) -> int:
        """This rank in the ring. Where k and v are replicated there is no ring, and it is the rank in the sequence."""
        return self.rank if self.tokens.replicated else rank_in(self.ring)

    @cached_property
    def sends(self) -> bool:
        """Whether attention sends messages."""
        return size_of(self.ring) > 1 or size_of(self.ulysses) > 1

    @cached_property
    def length(self) -> int:
        """The number of tokens that this rank attends with."""
        return len(self.tokens.tensor_positions(self.rank)[0])

    @cached_property
    def gathers(self) -> bool:
        """``gather``; if it is None, whether the ring has one host. The same on every rank.

        A ring and an all-gather send the same bytes between hosts, where transfers take long. In a ring, the transfer
        of a step overlaps with the kernels of the steps before it. In an all-gather, it overlaps with the kernels of
        other heads at most. May be collective, see ``ranks_by_host``: read it after the ranks have checked their input.
        """
        if self.gather is None:
            return self.ring is None or len(ranks_by_host(self.ring)) == 1
        return self.gather

    @cached_property
    def per_host(self) -> int:
        """How many consecutive ranks of the ring share a host (see ``ranks_per_host``). If hosts have different numbers
        of ranks, messages are sent as inside one host. May be collective, see ``ranks_by_host``."""
        return self.tokens.ring if self.ring is None else ranks_per_host(ranks_by_host(self.ring))

    @cached_property
    def plan_arguments(self) -> tuple[TokenLayout, int, bool, int]:
        """The arguments of ``attention_plan`` besides the mask. May be collective, see ``ranks_by_host``."""
        return self.tokens, self.ring_rank, self.gathers, self.per_host

    @cached_property
    def within(self) -> Ranks | None:
        """The ranks of the ring on this rank's host."""
        first = self.ring_rank // self.per_host * self.per_host
        return _some_of(self.ring, range(first, first + self.per_host))

    @cached_property
    def across(self) -> Ranks | None:
        """The ranks of the ring with this rank's index on each host; None if the ring has one host."""
        if self.per_host == self.tokens.ring:
            return None
        return _some_of(self.ring, range(self.ring_rank % self.per_host, self.tokens.ring, self.per_host))


def _some_of(ranks: Ranks | None, indices: range) -> Ranks | None:
    if ranks is None or len(indices) == ranks.size():
        return ranks
    if isinstance(ranks, Subgroup):
        return Subgroup(ranks.parent, tuple(ranks.ranks[i] for i in indices))
    return Subgroup(ranks, tuple(indices))


# A compiled function is compiled again for another mesh or group. The layers of a model share theirs.
@register_reference_type(lambda context: [id(context.mesh), id(context.group)])
class ParallelContext(Opaque):
    """The mesh or the group that a layer was made with.

    Process groups cannot be copied, so a deep copy of a layer refers to the same ParallelContext.
    """

    def __init__(self, mesh: DeviceMesh | None, group: ProcessGroup | None) -> None:
        check_mesh_and_group(mesh, group)
        self.mesh = mesh
        self.group = group
        self.tensor_meshes: dict[str, DeviceMesh] = {}  # by device type: of a tensor-parallel layer's weights

    @cached_property
    def tensor(self) -> ProcessGroup | None:
        """The group over which a tensor-parallel layer's weights are sharded."""
        return tensor_group(self.mesh, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelContext:
        return self


# Instead of the ranks of a layer, for a call that is no layer's: the ranks are then the sharding's.
ANY_RANKS = ParallelContext(None, None)
