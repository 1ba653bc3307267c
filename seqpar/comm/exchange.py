"""Point-to-point exchange that runs behind the computation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .trace import count_sent

Message = tuple[int, Tensor]


class Pending:
    """A batch of messages on their way. Holds the buffers until they have arrived."""

    def __init__(self, works: list[dist.Work], buffers: list[Tensor]) -> None:
        self._works = works
        self._buffers = buffers

    def wait(self) -> None:
        """Return when everything sent and received is done (on CUDA: make the current stream wait for it)."""
        for work in self._works:
            work.wait()
        self._works, self._buffers = [], []


_ready: set[ProcessGroup] = set()


def make_ready(group: ProcessGroup | None, device: torch.device) -> None:
    """Set up the group's connections, once, by all its ranks together.

    NCCL makes its communicator at a group's first operation, in which every rank must take part; but a step of a
    schedule may leave some ranks out.
    """
    if group is None or device.type == "cpu" or group in _ready:
        return
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    _ready.add(group)


def exchange(sends: Sequence[Message], receives: Sequence[Message], group: ProcessGroup | None) -> Pending:
    """Start sending and receiving ``(rank in group, contiguous tensor)`` messages, and return at once.

    Both ends must name the messages between them in the same order. On CUDA the transfer starts when the work
    already queued on the current stream is done, and runs on NCCL's own stream.
    """
    if not sends and not receives:
        return Pending([], [])
    assert group is not None
    ops = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends if tensor.numel()]
    ops += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives if tensor.numel()]
    for _, tensor in sends:
        count_sent(tensor.numel() * tensor.element_size())
    works = dist.batch_isend_irecv(ops) if ops else []
    return Pending(works, [tensor for _, tensor in (*sends, *receives)])
