"""Point-to-point exchange that runs behind the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..mesh import Ranks, parent_group, rank_in_parent
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


def make_ready(ranks: Ranks | None, device: torch.device) -> None:
    """Set up the connections between ``ranks``, once, by all of their process group together.

    NCCL makes its communicator at a group's first operation, in which every rank must take part; but a step of a
    schedule may leave some ranks out.
    """
    if ranks is None or device.type == "cpu" or (group := parent_group(ranks)) in _ready:
        return
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    _ready.add(group)


def exchange(sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks | None) -> Pending:
    """Start sending and receiving ``(rank in ranks, contiguous tensor)`` messages, and return at once.

    Both ends must name the messages between them in the same order. On CUDA the transfer starts when the work
    already queued on the current stream is done, and runs on NCCL's own stream.
    """
    if not sends and not receives:
        return Pending([], [])
    assert ranks is not None
    ops = [_operation(dist.isend, peer, tensor, ranks) for peer, tensor in sends if tensor.numel()]
    ops += [_operation(dist.irecv, peer, tensor, ranks) for peer, tensor in receives if tensor.numel()]
    for _, tensor in sends:
        count_sent(tensor.numel() * tensor.element_size())
    works = dist.batch_isend_irecv(ops) if ops else []
    return Pending(works, [tensor for _, tensor in (*sends, *receives)])


def _operation(kind: Callable[..., Any], peer: int, tensor: Tensor, ranks: Ranks) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=parent_group(ranks), group_peer=rank_in_parent(ranks, peer))
