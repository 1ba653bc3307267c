"""A model of NCCL's groups, which shows on a CPU which exchanges of messages would hang on a cluster.

gloo starts each message separately. NCCL starts all messages between ``ncclGroupStart`` and ``ncclGroupEnd`` in one
kernel, if there are few enough. It divides a larger group into several kernels. Each rank divides its own list of
messages, and runs its kernels one after another on one stream. A message is sent while the kernels of both its ends run
at the same time. A deadlock is therefore possible: a send in the first kernel of a rank waits for a receive in the
second kernel of another rank, whose first kernel waits for a third rank, and so on (pytorch/pytorch#174288).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

# The number of operations that the model starts in one kernel. All versions of NCCL can start more.
BUDGET = 64


class Operation(NamedTuple):
    """One end of a message. ``peer`` is the rank of the other end."""

    is_send: bool
    peer: int


Group = Sequence[Operation]


class HangError(AssertionError):
    """No rank can make progress."""


def run(programs: Sequence[Sequence[Group]], budget: int = BUDGET) -> int:
    """Run the groups of all ranks until all messages have been exchanged.

    Args:
        programs: the groups of each rank.
        budget: the number of operations in one kernel.

    Returns:
        The number of kernels that the ranks started.

    Raises:
        HangError: some kernels wait for one another, or a message has only one end.
    """
    queues = [deque(kernel for group in program for kernel in _cut(group, budget)) for program in programs]
    # The unmatched operations of the kernel that each rank is running.
    running: list[list[Operation]] = [[] for _ in programs]
    started = 0
    ready = set(range(len(programs)))
    while ready:
        rank = ready.pop()
        while not running[rank] and queues[rank]:
            running[rank] = list(queues[rank].popleft())
            started += 1
        for operation in list(running[rank]):
            other_end = Operation(not operation.is_send, rank)
            if other_end in running[operation.peer]:
                running[rank].remove(operation)
                running[operation.peer].remove(other_end)
                if not running[operation.peer]:
                    ready.add(operation.peer)
        if not running[rank] and queues[rank]:
            ready.add(rank)
    waiting = [rank for rank, operations in enumerate(running) if operations or queues[rank]]
    if waiting:
        raise HangError(f"{len(waiting)} of {len(programs)} ranks wait for ever, among them {waiting[:4]}")
    return started


def _cut(group: Group, budget: int) -> list[Group]:
    return [group[i : i + budget] for i in range(0, len(group), budget)]
