"""``Setting``: what the planner simulates, that is a model, a mask, a cluster and a split of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from ..masks.mask import Mask
from ..placement.layout import Assigned, Layout, TokenLayout, ranges_to_positions
from ..ranks.mesh import ranks_per_host
from .hardware import Hardware
from .pairs import computed_pairs
from .shape import PLAIN, Kind, ModelShape

# The two levels of links, as ``Choice.bytes_sent`` names them.
WITHIN, BETWEEN = "within_host", "between_hosts"
LEVELS = (WITHIN, BETWEEN)

ELEMENT_BYTES = 2  # of a weight or an activation in bfloat16
FLOAT32_BYTES = 4
GRADIENT_BYTES = FLOAT32_BYTES  # gradients of weights are accumulated and reduce-scattered in float32
# AdamW with FSDP2 and a mixed-precision policy, for each weight: 4 bytes each for the float32 weight, its gradient and
# the two moments. Weights in bfloat16 exist only while they are gathered.
STATE_BYTES = 16.0


Weights = Literal["fsdp", "hsdp", "zero2", "zero1"]
WEIGHTS: dict[Weights, str] = {
    "fsdp": "weights, gradients and optimizer sharded over all ranks (ZeRO-3)",
    "hsdp": "the same over the ranks of a host, with a copy on every host",
    "zero2": "the same as fsdp, but gathered weights are kept from forward to backward",
    "zero1": "the same as fsdp, but weights and gradients are whole until the last backward of a step",
}


@dataclass(frozen=True)
class Setting:
    """A model, a mask and a cluster, and how the ranks are split.

    Ranks are numbered as in ``init_mesh``: the tensor-parallel rank varies fastest, then the Ulysses rank, then the
    ring rank, then the replica.

    Attributes:
        model: the shape of the model.
        hardware: the GPUs and the links.
        mask: which keys each query sees.
        seq_len: tokens of a full sequence.
        batch: sequences that one replica computes at a time.
        ring, ulysses, tensor: ranks along each dimension that a sequence is sharded over.
        replicas: data-parallel replicas.
        layout: which positions each rank holds.
        gather: whether K/V are all-gathered in one step (``comm="all_gather"``) instead of sent around the ring.
        kernel: the attention kernel, a name of ``hardware.attention``; None is the first one.
        accumulation: how often a replica computes ``batch`` sequences in a step, before the optimizer.
        weights: how weights are sharded, see ``WEIGHTS``.
        state_bytes: bytes per weight, for the weight, its gradient and the state of the optimizer.
        dtype: the dtype of q, k and v.
        kind: what a layer that is simulated by itself computes.
    """

    model: ModelShape
    hardware: Hardware
    mask: Mask
    seq_len: int
    batch: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    replicas: int = 1
    layout: Layout = "contiguous"
    gather: bool = False
    kernel: str | None = None
    accumulation: int = 1
    weights: Weights = "fsdp"
    state_bytes: float = STATE_BYTES
    dtype: torch.dtype = torch.bfloat16
    kind: Kind = PLAIN

    @property
    def of_kinds(self) -> list[Setting]:
        """For each kind of layer, the setting with its kind and mask."""
        return [replace(self, kind=x, mask=mask) for x, mask in self.model.masks(self.mask, self.seq_len)]

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that one sequence is sharded over."""
        return self.ring * self.ulysses * self.tensor

    @property
    def ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.sequence_ranks * self.replicas

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.ranks // self.hardware.gpus_per_host)

    @property
    def state_ranks(self) -> int:
        """Number of ranks that the state of the optimizer is sharded over."""
        return min(self.ranks, self.hardware.gpus_per_host) if self.weights == "hsdp" else self.ranks

    @property
    def tokens(self) -> TokenLayout:
        """Which positions of a sequence each rank of a replica holds."""
        return TokenLayout(self.seq_len, self.layout, self.ring, self.ulysses, self.tensor)

    @property
    def most_tokens(self) -> int:
        """Tokens on the rank with the longest shard, summed over the ``batch`` sequences.

        The longest shard of a balanced layout may have 2 % more, which are not counted.
        """
        return -(-self.seq_len // self.sequence_ranks) * self.batch

    def host(self, ring: int, ulysses: int, tensor: int) -> int:
        """The number of the host that a rank of the first replica runs on."""
        return ((ring * self.ulysses + ulysses) * self.tensor + tensor) // self.hardware.gpus_per_host

    def ring_per_host(self, ulysses: int = 0, tensor: int = 0) -> int:
        """How many consecutive ranks of a ring share a host, as in ``Placement.per_host``."""
        hosts: dict[int, list[int]] = {}
        for rank in range(self.ring):
            hosts.setdefault(self.host(rank, ulysses, tensor), []).append(rank)
        return ranks_per_host([tuple(ranks) for ranks in hosts.values()])

    def slowest_ring_rank(self) -> int:
        """The ring rank with the most work in attention."""
        if self.ring == 1:
            return 0
        pairs = _work_by_ring_rank(self.mask, self.seq_len, self.layout, self.ring)
        return max(range(self.ring), key=pairs.__getitem__)

    def imbalance(self) -> float:
        """The work of the slowest ring rank, divided by the mean over the ring ranks; 1 is balanced."""
        pairs = _work_by_ring_rank(self.mask, self.seq_len, self.layout, self.ring)
        return max(pairs) * len(pairs) / max(1, sum(pairs))


_TILES = 4096  # a ring rank's queries are counted in at most so many tiles


@lru_cache(maxsize=256)
def _work_by_ring_rank(mask: Mask, seq_len: int, layout: Layout, ring: int) -> list[int]:
    """The pairs of a query and a key that each ring rank computes.

    Of a layout with a name, the Ulysses and tensor-parallel ranks that share the tokens of a ring rank are left out:
    they move the borders between ring ranks by a few tokens at most.
    """
    together = len(layout.by_rank) // ring if isinstance(layout, Assigned) else 1
    tokens, everything = TokenLayout(seq_len, layout, ring, together), [ranges_to_positions([(0, seq_len)])]
    tile = -(-seq_len // ring // _TILES)
    return [computed_pairs(mask, seq_len, tokens.ring_positions(rank), everything, tile)[0] for rank in range(ring)]
