"""A model of NCCL's groups, to show on a CPU which exchanges of messages would hang on a cluster.

gloo starts every message on its own. NCCL starts the messages between ``ncclGroupStart`` and ``ncclGroupEnd`` as one
kernel, if they fit into its budget. A larger group is cut into several kernels, each rank cutting its own list, and a
rank's kernels run one after another on one stream. A message needs both its ends to be running at the same time. So a
send may wait in the first kernel of one rank for a receive in the second kernel of another, while that other rank's
first kernel waits for yet another rank: a circle that never ends (pytorch/pytorch#174288).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

# The number of operations that the model starts as one kernel: fewer than any NCCL version needs to.
BUDGET = 64


class Operation(NamedTuple):
    """One end of a message. ``peer`` is the rank of the other end."""

    is_send: bool
    peer: int


Group = Sequence[Operation]


class HangError(AssertionError):
    """No rank can make progress."""


def run(programs: Sequence[Sequence[Group]], budget: int = BUDGET) -> int:
    """Run the groups of every rank, by rank, until all messages have been exchanged.

    Returns:
        The number of kernels that the ranks started.

    Raises:
        HangError: some kernels wait for each other, or a message has only one end.
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
