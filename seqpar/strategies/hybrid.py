"""Ulysses inside, ring across: the two-dimensional scheme of USP (Fang and Zhao, 2024) and LoongTrain (Gu et al.,
2024).

All-to-all in subgroups of ``ulysses_size`` ranks that sit close together, ring among the subgroups: degrees beyond
the number of heads, and a ring with fewer and longer steps.
"""

from __future__ import annotations

from torch.distributed import DeviceMesh, ProcessGroup

from ..mesh import Groups, sequence_group, two_dimensional


def hybrid(mesh: DeviceMesh | None, group: ProcessGroup | None, ulysses_size: int | None = None) -> Groups:
    """A mesh gives its ring and ulysses dimensions; a plain group is cut in subgroups of ``ulysses_size`` (by
    default the largest divisor of its size up to the square root)."""
    ring, ulysses = two_dimensional(mesh, group, ulysses_size)
    return Groups(sequence=sequence_group(mesh, group), ring=ring, ulysses=ulysses)
