"""Point-to-point messages between ranks, sent and received behind the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..mesh import Ranks, parent_group, rank_in_parent
from .trace import count_sent

Message = tuple[int, Tensor]  # the peer, and a contiguous tensor that is sent to it or received from it


class Pending:
    """Messages that have been started and not waited for. Holds their buffers until then."""

    def __init__(self, works: Sequence[dist.Work | None] = (), buffers: Sequence[Tensor] = ()) -> None:
        self._works = works
        self._buffers = buffers

    @staticmethod
    def all(parts: Sequence[Pending]) -> Pending:
        """The messages of all ``parts`` together."""
        return Pending([work for part in parts for work in part._works], [x for part in parts for x in part._buffers])

    def wait(self) -> None:
        """Wait until all messages are sent and received. On CUDA, the current stream waits instead of the host."""
        for work in self._works:
            if work is not None:
                work.wait()
        self._works, self._buffers = (), ()


_ready: set[ProcessGroup] = set()


def make_ready(ranks: Ranks | None, device: torch.device) -> None:
    """Set up NCCL's communicator for the process group of ``ranks``. All its ranks must call this.

    Only the first call of a group communicates. NCCL makes a communicator at the first operation of a group, in which
    every rank must take part. A step of a schedule may leave some ranks out, so it cannot be the first operation.
    """
    if ranks is None or device.type == "cpu" or (group := parent_group(ranks)) in _ready:
        return
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    _ready.add(group)


def exchange(sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks | None) -> Pending:
    """Start sending and receiving messages, and return at once.

    Args:
        sends: ``(peer, tensor)`` pairs; ``peer`` is a rank of ``ranks``.
        receives: ``(peer, receive buffer)`` pairs. The sender and the receiver must list the messages between them in
            the same order.
        ranks: the ranks that exchange messages; None if there are none.

    The messages form one group of NCCL's, which must be small and complete: at most 32 messages, and the peers' groups
    hold their other ends (see ``schedule.exchange_groups``). On CUDA the transfers start when the work already queued
    on the current stream is done, and run on NCCL's stream.
    """
    sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
    receives = [(peer, tensor) for peer, tensor in receives if tensor.numel()]
    if not sends and not receives:
        return Pending()
    assert ranks is not None
    ops = [_operation(dist.isend, peer, tensor, ranks) for peer, tensor in sends]
    ops += [_operation(dist.irecv, peer, tensor, ranks) for peer, tensor in receives]
    for _, tensor in sends:
        count_sent(tensor.numel() * tensor.element_size())
    return Pending(dist.batch_isend_irecv(ops), [tensor for _, tensor in (*sends, *receives)])


def _operation(kind: Callable[..., Any], peer: int, tensor: Tensor, ranks: Ranks) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=parent_group(ranks), group_peer=rank_in_parent(ranks, peer))
