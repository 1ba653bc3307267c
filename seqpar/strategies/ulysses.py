"""DeepSpeed-Ulysses: all-to-all from sequence shards to head shards, attention on whole sequences, and back.

Jacobs et al., 2023. Per rank of ``P`` and layer, forward: ``(P - 1) / P**2 * tokens * 2 * (heads + kv_heads) *
head_dim`` elements sent. Balanced under every mask and layout as far as heads divide; more ranks than heads leave
ranks idle (use ``hybrid``), more ranks than key/value heads send a key/value head to each rank that reads it.
"""

from __future__ import annotations

from torch.distributed import DeviceMesh, ProcessGroup

from ..mesh import Groups, sequence_group


def ulysses(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Groups:
    """The whole sequence group exchanges heads."""
    group = sequence_group(mesh, group)
    return Groups(sequence=group, ulysses=group)
