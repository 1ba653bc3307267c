"""Point-to-point messages between ranks, which overlap with computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..placement.placement import Placement
from ..ranks.calls import Calls, Close, calls_of
from ..ranks.in_process import RankInProcess
from ..ranks.mesh import Ranks, global_ranks, parent_group
from . import waiting
from .communicator import communicator
from .in_process import InProcessTransport
from .shared_memory import SharedMemoryTransport, share_messages, shared_memory
from .trace import count_sent, open_traces, say_transport
from .waiting import PeerTensor, Pending, start_messages

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
        calls: the calls of the ranks' process group.
        generation: of its connections. After an error they are closed and made again.
    """

    ranks: Ranks
    memory: SharedMemoryTransport | None
    group: ProcessGroup | None
    calls: Calls
    generation: int

    @property
    def reads_in_place(self) -> bool:
        """Whether the ranks read one another's messages in shared memory."""
        return self.memory is not None and self.memory.reads_in_place


def connect(ranks: Ranks | Link | None, device: torch.device) -> Link | None:
    """Connect ``ranks`` for messages on ``device``, at the first call. All of them must call this. None for one rank.

    NCCL connects ranks at the first operation of their group, in which every rank must take part. A step of a schedule
    may leave some ranks out, so it cannot be the first operation.
    """
    if isinstance(ranks, Link):
        if ranks.generation != ranks.calls.generation:
            raise RuntimeError(
                "the connections of this call were closed after an error in another call of its ranks; repeat the step"
            )
        for record in open_traces if _sends_messages else ():
            backend = None if ranks.group is None else ranks.group._get_backend(device).name()
            record.transports.add(backend or (ranks.memory or SharedMemoryTransport).name)
        return ranks
    if ranks is None or ranks.size() == 1:
        return None
    if isinstance(rank := parent_group(ranks), RankInProcess):
        return Link(ranks, InProcessTransport(ranks, rank, device), None, Calls(rank), 0)
    memory = shared_memory(ranks, device)
    group = communicator(ranks, device) if _sends_messages and memory is None else None
    calls = calls_of(parent_group(ranks))
    if group is not None and device.type != "cpu":  # on a CPU ``shared_memory`` says it

        def say() -> tuple[None, Close]:
            say_transport(ranks, False, False, device)
            return None, lambda _: None

        calls.connect(("transport", device.type, global_ranks(ranks)), say)
    return Link(ranks, memory, group, calls, calls.generation)


def call(ranks: Ranks | None, name: str, *what: int, goes_on: bool = False) -> AbstractContextManager[None]:
    """``waiting.call``; within ``without_messages`` there are no calls."""
    return waiting.call(ranks if _sends_messages else None, name, *what, goes_on=goes_on)


def link_of(ranks: Ranks, device: torch.device, kept: dict[Any, Any]) -> Link:
    """The link of several ranks that is in ``kept``; ``connect`` makes it. All ``ranks`` must call this."""
    link: Link | None = kept.get(("link", device))
    if link is None or link.generation != link.calls.generation:
        link = connect(ranks, device)
        assert link is not None
        if _sends_messages:
            kept["link", device] = link
    return link


class Links(NamedTuple):
    """The links of an attention call. None where there are no other ranks."""

    ulysses: Link | None = None  # of the all-to-all
    within: Link | None = None  # of the ring, inside this host
    across: Link | None = None  # of the ring, between hosts

    @property
    def share_memory(self) -> bool:
        """Whether the ranks of the ring read one another's messages in shared memory."""
        return self.within is not None and self.within.reads_in_place and self.across is None


_NO_LINKS = Links()


def links_of(placement: Placement, device: torch.device) -> Links:
    """Connect the ranks of an attention call, at the first call. All of them must call this."""
    if not placement.sends:
        return _NO_LINKS
    links: Links | None = placement.kept.get(device)
    if links is None or any(link is not None and link.generation != link.calls.generation for link in links):
        placement.kept.clear()
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


def exchange(sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], ranks: Ranks | Link | None) -> Pending:
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
    link = ranks
    if not isinstance(link, Link) or open_traces or link.generation != link.calls.generation:
        link = connect(ranks, (sends or receives)[0][1].device)
    assert link is not None
    if open_traces:
        for peer, tensor in sends:
            count_sent(tensor.nbytes, link.ranks, peer)
    if not _sends_messages:
        return Pending()
    if link.memory is not None:
        buffers = [tensor for _, tensor in (*sends, *receives)]
        return share_messages(link.ranks, link.memory, sends, receives, "alias", buffers)
    return start_messages(sends, receives, link.ranks, link.group)
