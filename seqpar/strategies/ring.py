"""Ring Attention: keys and values visit every rank, step by step, behind the computation.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. Per rank of ``P`` and layer,
forward: ``(P - 1) / P * tokens * 2 * kv_heads * head_dim`` elements sent under a full mask, fewer under any other:
only the rows that the receiver's queries see. Balanced under a causal mask with the zigzag and striped layouts.
"""

from __future__ import annotations

from torch.distributed import DeviceMesh, ProcessGroup

from ..mesh import Groups, sequence_group


def ring(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Groups:
    """The whole sequence group is one ring."""
    group = sequence_group(mesh, group)
    return Groups(sequence=group, ring=group)
