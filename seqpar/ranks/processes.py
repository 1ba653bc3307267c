"""Whether this process is a rank of its process groups, or was forked from one and inherited them.

A forked process, such as a worker of a DataLoader, has its parent's process groups, and ``dist.is_initialized()`` is
True in it. A message that it sent would be taken for a message of its parent, and the threads that would receive its
messages run in the parent alone.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch.distributed import ProcessGroup

# The process groups that this process has inherited, the default group of its parent first. They are kept: to free a
# group of gloo waits for its threads, which this process does not have, so that destroy_process_group would not return.
_inherited: list[ProcessGroup] = []


def _note_groups() -> None:
    if (world := dist.group.WORLD) is not None:
        _inherited[:0] = world, *(group for group in dist.distributed_c10d._world.pg_map if group is not world)


os.register_at_fork(after_in_child=_note_groups)


def inherited() -> bool:
    """Whether this process was forked from a rank and still has the process groups of that rank.

    False in a process that has ended them and has started a group of its own.
    """
    return bool(_inherited) and dist.group.WORLD is _inherited[0]


def check_own_process(what: str) -> None:
    """Raise a RuntimeError if this process has inherited its process groups.

    Args:
        what: what needs the other ranks, for the error.
    """
    if inherited():
        raise RuntimeError(
            f"{what}: this process was forked from rank {dist.get_rank()} of {dist.get_world_size()}, whose process "
            "groups it has inherited but cannot use; communicate in the rank itself. A process that is to communicate "
            "calls torch.distributed.destroy_process_group and init_process_group first, or is spawned"
        )
