"""``Split`` and ``Switches``: what the time and the memory of a layer depend on besides its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch

from ..masks.mask import Mask
from ..placement.layout import Assigned, Layout, TokenLayout, ranges_to_positions
from ..ranks.mesh import ranks_per_host
from .hardware import Hardware
from .pairs import computed_pairs

# The two levels of links, as ``Choice.bytes_sent`` names them.
WITHIN, BETWEEN = "within_host", "between_hosts"
LEVELS = (WITHIN, BETWEEN)

INVARIANT = "invariant"  # the name of the kernels of ``deterministic="invariant"``
ELEMENT_BYTES = 2  # of a weight or an activation in bfloat16
FLOAT32_BYTES = 4

Recompute = Literal["none", "keep_attention", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Split:
    """A sequence, its mask and a cluster, and how the ranks are split.

    Ranks are numbered as in ``init_mesh``: the tensor-parallel rank varies fastest, then the Ulysses rank, then the
    ring rank, then the replica.

    Attributes:
        hardware: the GPUs and the links.
        mask: which keys each query sees.
        seq_len: tokens of a full sequence.
        batch: sequences that one replica computes at a time.
        ring, ulysses, tensor: ranks along each dimension that a sequence is sharded over.
        replicas: data-parallel replicas.
        layout: which positions each rank holds.
        gather: whether K/V are all-gathered in one step (``comm="all_gather"``) instead of sent around the ring.
        kernel: the attention kernel, a name of ``hardware.attention``; None is the first one. "invariant" are the
            kernels and the messages of ``deterministic="invariant"``.
        dtype: the dtype of q, k and v.
    """

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
    dtype: torch.dtype = torch.bfloat16

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that one sequence is sharded over."""
        return self.ring * self.ulysses * self.tensor

    @property
    def ranks(self) -> int:
        """Number of ranks of all replicas."""
        return self.sequence_ranks * self.replicas

    @property
    def is_invariant(self) -> bool:
        """Whether attention has the same bits on any number of ranks."""
        return self.kernel == INVARIANT

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return -(-self.ranks // self.hardware.gpus_per_host)

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


@dataclass(frozen=True)
class Switches:
    """What a training step recomputes, offloads or computes some tokens at a time, to need less device memory.

    Attributes:
        recompute: what backward recomputes: nothing ("none"), a layer without its attention ("keep_attention"), or a
            whole layer ("full").
        offload: whether saved activations are copied to host memory until backward.
        chunked_loss: whether logits are computed for some tokens at a time.
        tiled_mlp: whether the MLP is computed for some tokens at a time, and recomputed in backward.
        head_groups: in how many groups of heads the projections to q, k and v and attention are computed, one group
            after another.
    """

    recompute: Recompute = "none"
    offload: bool = False
    chunked_loss: bool = True
    tiled_mlp: bool = False
    head_groups: int = 1

    @property
    def saving(self) -> int:
        """How many of ``offload``, ``tiled_mlp`` and ``head_groups`` are in use."""
        return self.offload + self.tiled_mlp + (self.head_groups > 1)

    def __str__(self) -> str:
        words = {"none": [], "keep_attention": ["recompute all but attention"], "full": ["recompute all"]}
        return ", ".join(
            words[self.recompute]
            + ["offload"] * self.offload
            + ["tiled MLP"] * self.tiled_mlp
            + [f"heads in {self.head_groups} groups"] * (self.head_groups > 1)
            + ["whole logits"] * (not self.chunked_loss)
        )


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
