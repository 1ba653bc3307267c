"""Operations between ranks, whose errors name the operation, the seconds and the missing ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..ranks.mesh import Ranks, global_ranks, parent_group
from ..ranks.processes import check_own_process
from ..ranks.rendezvous import LONG_WAIT, failed_wait, group_timeout, is_simulated, own_entry
from .streams import posting_stream

MESSAGES = "messages of attention"  # their name in errors
_name: ContextVar[str | None] = ContextVar("operation", default=None)


@contextmanager
def operation(name: str) -> Iterator[None]:
    """In the block, or in the decorated function, the errors of ``run`` call its collectives ``name``."""
    before = _name.set(name)
    try:
        yield
    finally:
        _name.reset(before)


@contextmanager
def waiting(what: str, ranks: Ranks) -> Iterator[None]:
    """If the block fails, the error names the operation, the seconds that it took, and the missing ranks."""
    check_own_process(what)
    begin()
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        raise failure(what, ranks, error, began) from error
    if own_entry.written:
        own_entry.remove()


class PeerError(RuntimeError):
    """A message failed because of ``peer``, one of the ranks that take part."""

    def __init__(self, peer: int, message: str) -> None:
        super().__init__(message)
        self.peer = peer


def failure(what: str, ranks: Ranks, error: RuntimeError, began: float) -> RuntimeError:
    """The error of a wait in ``what`` for ``ranks`` that began at ``began``, and has failed with ``error``."""
    seconds, waited_for, closed = time.monotonic() - began, global_ranks(ranks), False
    if isinstance(error, PeerError):
        waited_for = waited_for[error.peer : error.peer + 1]
        closed = seconds < group_timeout(parent_group(ranks)).total_seconds()
    return RuntimeError(failed_wait(what, waited_for, seconds, closed))


def run(collective: Callable[..., Any], *args: Any, group: ProcessGroup, **kwargs: Any) -> None:
    """Run a collective of torch.distributed, whose first argument is a tensor, with errors as in ``waiting``."""
    what, in_parts = _name.get() or collective.__name__, args[0].device.type == "cpu" and not is_simulated()
    with waiting(what, group):
        work = collective(*args, group=group, async_op=in_parts, **kwargs)
        if in_parts:
            wait_in_parts(work, what)


# Messages for which nothing has waited, because of an error, each with its default group.
_unfinished: list[tuple[ref[ProcessGroup], Pending]] = []


def begin() -> None:
    """Call this before operations are started: take back what earlier ones have left."""
    if own_entry.written:  # by a wait that has failed
        own_entry.remove()
    if _unfinished:
        left, world = _unfinished.copy(), dist.group.WORLD
        _unfinished.clear()
        for pending in (x for default_group, x in left if default_group() is not world):
            pending.drop()  # its default group has been destroyed
        for pending in (x for default_group, x in left if default_group() is world):
            pending.finish()


class Started(Protocol):
    """An operation that has been started, such as PyTorch's ``Work``."""

    def wait(self) -> Any:
        """Wait until it is done. On CUDA, the current stream waits instead of the host."""


Message = tuple[int, Tensor]  # the peer, and a contiguous tensor that is sent to it or received from it


class Pending:
    """Messages that have been started and not waited for. Holds their buffers until then.

    Buffers on a ``TransferStream`` are held by it from then on, until their readers have been launched.

    If an error keeps the caller from waiting, the next messages that this process starts wait first: otherwise they
    would be taken for these.

    Args:
        works: the operations.
        buffers: what they send and receive.
        ranks: the ranks that take part; None without operations.
        peers: for each operation the rank that it sends to or receives from. None if they are collectives, or NCCL's
            groups of messages.
    """

    def __init__(
        self,
        works: Sequence[Started] = (),
        buffers: Sequence[Tensor] = (),
        ranks: Ranks | None = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        self._works, self._buffers, self._ranks, self._peers = works, buffers, ranks, peers
        self._posted_from = posting_stream()
        # A message to this rank itself is not sent, but written on the stream that messages are posted from.
        self._written = self._posted_from.position() if self._posted_from and buffers and not works else None

    @staticmethod
    def all(parts: Sequence[Pending], buffers: Sequence[Tensor]) -> Pending:
        """The messages of all ``parts`` together, in ``buffers``."""
        works = [work for part in parts for work in part._works]
        peers = [peer for part in parts for peer in part._peers or ()]
        ranks = next((part._ranks for part in parts if part._works), None)
        for part in parts:
            part._works = ()
        return Pending(works, buffers, ranks, peers if len(peers) == len(works) else None)

    def wait(self) -> None:
        """Wait until all messages are sent and received. On CUDA, the current stream waits instead of the host.

        Raises:
            RuntimeError: a rank is missing; the message names it.
        """
        began, done = time.monotonic(), 0
        try:
            for work in self._works:
                if self._peers is None and self._buffers[0].device.type == "cpu":
                    wait_in_parts(work, MESSAGES)
                else:
                    work.wait()
                done += 1
        except RuntimeError as error:
            self._works = ()
            assert self._ranks is not None
            cause = error if self._peers is None else PeerError(self._peers[done], str(error))
            raise failure(MESSAGES, self._ranks, cause, began) from error
        if own_entry.written:
            own_entry.remove()
        if self._written is not None:
            torch.cuda.current_stream(self._buffers[0].device).wait_event(self._written)
        if self._posted_from is not None:
            self._posted_from.hold(self._buffers)
        self._works, self._buffers = (), ()

    def __del__(self) -> None:
        if self._works and dist.group.WORLD is not None:
            _unfinished.append((ref(dist.group.WORLD), self))

    def drop(self) -> None:
        """Free the buffers without waiting: the ranks of the messages are gone."""
        self._works, self._buffers = (), ()

    def finish(self) -> None:
        """Wait, and let later messages use the memory."""
        self.wait()
        if self._posted_from is not None:
            self._posted_from.release()


def start(
    collective: Callable[..., Any], *args: Any, buffers: Sequence[Tensor], ranks: Ranks, group: ProcessGroup | None
) -> Pending:
    """Start a collective of ``ranks`` in ``group``, their process group."""
    if own_entry.written or _unfinished:
        begin()
    began = time.monotonic()
    try:
        return Pending([collective(*args, group=group, async_op=True)], buffers, ranks)
    except RuntimeError as error:
        raise failure(MESSAGES, ranks, error, began) from error


def start_messages(sends: Sequence[Message], receives: Sequence[Message], ranks: Ranks, group: Any) -> Pending:
    """Start messages between ``ranks`` in ``group``, their process group. There must be one."""
    if own_entry.written or _unfinished:
        begin()
    messages = [(dist.isend, *x) for x in sends] + [(dist.irecv, *x) for x in receives]
    ops = [dist.P2POp(op, tensor, group=group, group_peer=peer) for op, peer, tensor in messages]
    buffers, peers = [tensor for _, _, tensor in messages], [peer for _, peer, _ in messages]
    if buffers[0].device.type != "cpu":
        return Pending(dist.batch_isend_irecv(ops), buffers, ranks)
    works, began = list[Started](), time.monotonic()
    try:
        for op in ops:  # gloo starts them one by one anyway, but then it is not known which one fails
            works += dist.batch_isend_irecv([op])
    except RuntimeError as error:
        raise failure(MESSAGES, ranks, PeerError(peers[len(works)], str(error)), began) from error
    return Pending(works, buffers, ranks, peers)


def wait_in_parts(work: Any, what: str) -> None:
    """Wait for a collective of tensors on the host. After a while, tell the other ranks that this rank waits."""
    try:
        work.wait(LONG_WAIT)
    except RuntimeError:
        if work.is_completed():
            raise
        own_entry.write(what)
        work.wait()
