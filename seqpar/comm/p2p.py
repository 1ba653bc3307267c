"""Point-to-point messages between ranks, which overlap with computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..mesh import Ranks
from ..placement import Placement
from ..rendezvous import ADVICE
from .communicator import communicator
from .shared_memory import SharedMemoryTransport, shared_memory
from .streams import posting_stream
from .trace import count_sent

Message = tuple[int, Tensor]  # the peer, and a contiguous tensor that is sent to it or received from it


class Started(Protocol):
    """An operation that has been started, such as PyTorch's ``Work``."""

    def wait(self) -> Any:
        """Wait until it is done. On CUDA, the current stream waits instead of the host."""


class Pending:
    """Messages that have been started and not waited for. Holds their buffers until then.

    Buffers on a ``TransferStream`` are held by it from then on, until their readers have been launched.
    """

    def __init__(self, works: Sequence[Started | None] = (), buffers: Sequence[Tensor] = ()) -> None:
        self._works = works
        self._buffers = buffers
        self._posted_from = posting_stream()
        # A message to this rank itself is not sent, but written on the stream that messages are posted from.
        self._written = self._posted_from.position() if self._posted_from and buffers and not works else None

    @staticmethod
    def all(parts: Sequence[Pending], buffers: Sequence[Tensor]) -> Pending:
        """The messages of all ``parts`` together, in ``buffers``."""
        return Pending([work for part in parts for work in part._works], buffers)

    def wait(self) -> None:
        """Wait until all messages are sent and received. On CUDA, the current stream waits instead of the host."""
        try:
            for work in self._works:
                if work is not None:
                    work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"messages of attention did not arrive; {ADVICE}") from error
        if self._written is not None:
            torch.cuda.current_stream(self._buffers[0].device).wait_event(self._written)
        if self._posted_from is not None:
            self._posted_from.hold(self._buffers)
        self._works, self._buffers = (), ()


_sends_messages = True


@contextmanager
def without_messages() -> Iterator[None]:
    """Within the block attention sends no messages, so that its computation can be measured by itself.

    All ranks of a group must enter and leave the block together. Received tensors have undefined values.
    """
    global _sends_messages
    _sends_messages = False
    try:
        yield
    finally:
        _sends_messages = True


def sends_messages() -> bool:
    """Whether the caller is outside of ``without_messages``."""
    return _sends_messages


class Link(NamedTuple):
    """Ranks that are connected for messages on one device. ``connect`` makes it.

    Attributes:
        ranks: the ranks.
        memory: their shared memory; None if they do not share any.
        group: the process group in which they exchange messages; None if they share memory.
    """

    ranks: Ranks
    memory: SharedMemoryTransport | None
    group: ProcessGroup | None


def connect(ranks: Ranks | Link | None, device: torch.device) -> Link | None:
    """Connect ``ranks`` for messages on ``device``, at the first call. All of them must call this. None for one rank.

    NCCL connects ranks at the first operation of their group, in which every rank must take part. A step of a schedule
    may leave some ranks out, so it cannot be the first operation.
    """
    if isinstance(ranks, Link):
        return ranks
    if ranks is None or ranks.size() == 1:
        return None
    memory = shared_memory(ranks, device)
    return Link(ranks, memory, communicator(ranks, device) if _sends_messages and memory is None else None)


class Links(NamedTuple):
    """The links of an attention call. None where there are no other ranks."""

    ulysses: Link | None = None  # of the all-to-all
    within: Link | None = None  # of the ring, inside this host
    across: Link | None = None  # of the ring, between hosts

    @property
    def share_memory(self) -> bool:
        """Whether the ranks of the ring read one another's messages in shared memory."""
        return self.within is not None and self.within.memory is not None and self.across is None


def links_of(placement: Placement, device: torch.device) -> Links:
    """Connect the ranks of an attention call, at the first call. All of them must call this."""
    links: Links | None = placement.kept.get(device)
    if links is None:
        ranks = placement.ulysses, placement.within, placement.across
        links = Links(*(connect(x, device) for x in ranks))
        if _sends_messages:
            placement.kept[device] = links
    return links


def new_message(numel: int, like: Tensor, link: Link | None) -> Tensor:
    """An empty message, ``[numel]``, to be sent over ``link``. Do not write to it after it has been sent."""
    if link is None or link.memory is None:
        return like.new_empty(numel)
    return link.memory.empty(numel, like.dtype)


def exchange(sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks | Link | None) -> Pending:
    """Start sending and receiving messages, and return at once.

    Args:
        sends: ``(peer, tensor)`` pairs; ``peer`` is a rank of ``ranks``.
        receives: ``(peer, receive buffer)`` pairs. The sender and the receiver must list the messages between them in
            the same order. Make views of a receive buffer after the wait: between processes that share memory, the
            wait replaces its memory by the memory that the sender wrote.
        ranks: the ranks that exchange messages, or their link; None if there are none.

    The messages form one group of NCCL's, which must be small and complete: at most 32 messages, and the peers' groups
    hold their other ends (see ``schedule.rounds``). On CUDA the transfers start when the work already queued
    on the current stream is done, and run on NCCL's stream.
    """
    sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
    receives = [(peer, tensor) for peer, tensor in receives if tensor.numel()]
    if not sends and not receives:
        return Pending()
    buffers = [tensor for _, tensor in (*sends, *receives)]
    link = connect(ranks, buffers[0].device)
    assert link is not None
    for peer, tensor in sends:
        count_sent(tensor.nbytes, link.ranks, peer)
    if not _sends_messages:
        return Pending()
    if link.memory is not None:
        return Pending(link.memory.exchange(sends, receives, "alias"), buffers)
    group = link.group
    ops = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
    ops += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
    return Pending(dist.batch_isend_irecv(ops), buffers)
