"""Point-to-point messages between ranks, which overlap with computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..mesh import Ranks
from ..rendezvous import ADVICE
from .communicator import communicator
from .shared_memory import shared_memory
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


def make_ready(ranks: Ranks | None, device: torch.device) -> bool:
    """Connect ``ranks`` for messages on ``device``, at the first call. All of them must call this.

    NCCL connects ranks at the first operation of their group, in which every rank must take part. A step of a schedule
    may leave some ranks out, so it cannot be the first operation.

    Returns:
        Whether they read one another's messages in shared memory, so that nothing is transferred.
    """
    if ranks is None or ranks.size() == 1:
        return False
    shares_memory = shared_memory(ranks, device) is not None
    if _sends_messages and not shares_memory:
        communicator(ranks, device)
    return shares_memory


def new_message(numel: int, like: Tensor, ranks: Ranks, dtype: torch.dtype | None = None) -> Tensor:
    """An empty message to ``ranks``, ``[numel]``. Do not write to it after it has been sent."""
    dtype = dtype or like.dtype
    memory = shared_memory(ranks, like.device)
    return like.new_empty(numel, dtype=dtype) if memory is None else memory.empty(numel, dtype)


def exchange(sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks | None) -> Pending:
    """Start sending and receiving messages, and return at once.

    Args:
        sends: ``(peer, tensor)`` pairs; ``peer`` is a rank of ``ranks``.
        receives: ``(peer, receive buffer)`` pairs. The sender and the receiver must list the messages between them in
            the same order. Make views of a receive buffer after the wait: between processes that share memory, the
            wait replaces its memory by the memory that the sender wrote.
        ranks: the ranks that exchange messages; None if there are none.

    The messages form one group of NCCL's, which must be small and complete: at most 32 messages, and the peers' groups
    hold their other ends (see ``schedule.rounds``). On CUDA the transfers start when the work already queued
    on the current stream is done, and run on NCCL's stream.
    """
    sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
    receives = [(peer, tensor) for peer, tensor in receives if tensor.numel()]
    if not sends and not receives:
        return Pending()
    assert ranks is not None
    for peer, tensor in sends:
        count_sent(tensor.nbytes, ranks, peer)
    buffers = [tensor for _, tensor in (*sends, *receives)]
    device = buffers[0].device
    if not _sends_messages:
        return Pending()
    if (memory := shared_memory(ranks, device)) is not None:
        return Pending(memory.exchange(sends, receives, "alias"), buffers)
    group = communicator(ranks, device)
    ops = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
    ops += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
    return Pending(dist.batch_isend_irecv(ops), buffers)
