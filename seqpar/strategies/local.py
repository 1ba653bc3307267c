"""One rank holds the whole sequence: no communication."""

from __future__ import annotations

from torch.distributed import DeviceMesh, ProcessGroup

from ..mesh import Groups, sequence_group, size_of


def local(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Groups:
    """No groups. A group of several ranks given by name is refused: their shards would not see one another."""
    if mesh is not None or group is not None:
        ranks = size_of(sequence_group(mesh, group))
        if ranks > 1:
            raise ValueError(
                f"strategy='local' with a sequence group of {ranks} ranks: it attends within one rank; "
                "choose ring, ulysses, context_parallel or hybrid, or leave group and mesh out"
            )
    return Groups()
