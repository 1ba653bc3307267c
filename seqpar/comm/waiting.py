"""Operations between ranks, whose errors name the operation, the seconds and the missing ranks."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.cache import is_captured
from ..ranks.calls import MESSAGES_FAILED, calls_of, check_tag, current, current_tag
from ..ranks.in_process import RankInProcess
from ..ranks.mesh import Ranks, global_ranks, parent_group
from ..ranks.processes import check_own_process
from ..ranks.rendezvous import (
    LONG_WAIT,
    OutOfStepError,
    failed_wait,
    group_timeout,
    is_simulated,
    own_entry,
    waits_in_vain,
)
from .streams import TransferStream, posting_stream

_name: ContextVar[str | None] = ContextVar("operation", default=None)


def operation_name(default: str = "messages of attention") -> str:
    """The name of messages and collectives in errors."""
    return _name.get() or default


@contextmanager
def operation(name: str) -> Iterator[None]:
    """In the block, or in the decorated function, errors call the messages and collectives ``name``."""
    before = _name.set(name)
    try:
        yield
    finally:
        _name.reset(before)


@contextmanager
def waiting(what: str, ranks: Ranks) -> Iterator[None]:
    """If the block fails, the error names the operation, the seconds that it took, and the missing ranks."""
    check_own_process(what)
    if own_entry.written:  # by a wait that has failed
        own_entry.remove()
    began = time.monotonic()
    try:
        yield
    except OutOfStepError:
        raise
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
    if (calls := current.get()) is not None:
        calls.left_by = MESSAGES_FAILED
    seconds, waited_for, closed = time.monotonic() - began, global_ranks(ranks), False
    if isinstance(error, PeerError):
        waited_for = waited_for[error.peer : error.peer + 1]
        closed = seconds < group_timeout(parent_group(ranks)).total_seconds()
    return RuntimeError(failed_wait(what, waited_for, seconds, closed))


def call(ranks: Ranks | None, name: str, *what: int, goes_on: bool = False) -> AbstractContextManager[None]:
    """In the block, ``ranks`` make one call together (see ``ranks/calls.py``). ``what`` is the same on every rank.

    ``goes_on``: the block is a further part of their last call.
    """
    if ranks is None or ranks.size() == 1 or isinstance(parent_group(ranks), RankInProcess):
        return nullcontext()
    if torch.cuda.is_initialized() and is_captured():
        raise RuntimeError(
            f"{name} over {ranks.size()} ranks: a CUDA graph cannot capture it, because the host of each rank takes "
            "part in its messages; capture the modules before and after it"
        )
    group = parent_group(ranks)
    # Python's hash of a str differs from process to process; its hash of an int does not.
    return calls_of(group).call(group, hash((zlib.crc32(name.encode()), *what)), goes_on)


class Started(Protocol):
    """An operation that has been started, such as PyTorch's ``Work``."""

    def wait(self) -> Any:
        """Wait until it is done. On CUDA, the current stream waits instead of the host."""


PeerTensor = tuple[int, Tensor]  # the peer, and a contiguous tensor that is sent to it or received from it


class Pending:
    """Messages that have been started and not waited for. Holds their buffers until then.

    Buffers on a ``TransferStream`` are held by it from then on, until their readers have been launched.

    If an error keeps the caller from waiting, the connections of the call are closed, so that the messages are not
    taken for messages of the next call.

    Args:
        works: the operations.
        buffers: what they send and receive.
        ranks: the ranks that take part; None without operations.
        peers: for each operation the rank that it sends to or receives from. None if they are collectives, or NCCL's
            groups of messages.
    """

    def __init__(
        self,
        works: Iterable[Started] = (),
        buffers: Sequence[Tensor] = (),
        ranks: Ranks | None = None,
        peers: Sequence[int] | None = None,
    ) -> None:
        self._works, self._buffers, self._ranks, self._peers = [*works], buffers, ranks, peers
        self._calls = current.get() if self._works else None
        self._posted_from = posting_stream()
        if self._calls is not None:
            settle = partial(_settle, self._works, buffers, self._posted_from)
            self._calls.works[id(self._works)] = self._works, settle
        # A message to this rank itself is not sent, but written on the stream that messages are posted from.
        self._written = self._posted_from.position() if self._posted_from and buffers and not self._works else None

    @staticmethod
    def all(parts: Sequence[Pending], buffers: Sequence[Tensor]) -> Pending:
        """The messages of all ``parts`` together, in ``buffers``."""
        works = [work for part in parts for work in part._works]
        peers = [peer for part in parts for peer in part._peers or ()]
        ranks = next((part._ranks for part in parts if part._works), None)
        for part in parts:
            if part._calls is not None:
                part._calls.works.pop(id(part._works), None)
            part._works, part._buffers = [], ()
        return Pending(works, buffers, ranks, peers if len(peers) == len(works) else None)

    def wait(self) -> None:
        """Wait until all messages are sent and received. On CUDA, the current stream waits instead of the host.

        Raises:
            OutOfStepError: a message is one of another call.
            RuntimeError: a rank is missing; the message names it.
        """
        began, done = time.monotonic(), 0
        try:
            if self._peers is None and self._works and self._buffers[0].is_cpu:
                _wait_for_collective(self._works[0])
            elif self._works and isinstance(self._works[0], _GLOO_MESSAGES) and self._buffers[0].is_cpu:
                if not isinstance(self._works[0], _SIMULATED):
                    _wait_for_messages(self._works)
            else:
                for work in self._works:
                    work.wait()
                    done += 1
        except BaseException as error:
            failed = isinstance(error, RuntimeError) and not isinstance(error, OutOfStepError)
            if self._calls is not None:
                if failed:
                    self._calls.left_by = MESSAGES_FAILED
                self._calls.leave()
            self._works.clear()
            if not failed or not isinstance(error, RuntimeError):
                raise
            assert self._ranks is not None
            at = error.done if isinstance(error, _WaitError) else done
            cause: RuntimeError = error
            if self._peers is not None and at is not None and not isinstance(error, PeerError):
                cause = PeerError(self._peers[at], str(error))
            raise failure(operation_name(), self._ranks, cause, began) from error
        if own_entry.written:
            own_entry.remove()
        if self._written is not None:
            torch.cuda.current_stream(self._buffers[0].device).wait_event(self._written)
        if self._posted_from is not None:
            self._posted_from.hold(self._buffers)
        if self._calls is not None:
            self._calls.works.pop(id(self._works), None)
        self._works, self._buffers = [], ()

    def __del__(self) -> None:
        if self._works and self._calls is not None and not sys.is_finalizing():
            self._calls.leave()


def _settle(works: Sequence[Started], buffers: Sequence[Tensor], stream: TransferStream | None) -> None:
    """After an error: on a GPU, let what uses the memory of messages next wait for them. NCCL has been told to end."""
    if not buffers[0].is_cpu:
        with nullcontext() if stream is None else stream.posting():
            for work in works:
                with suppress(RuntimeError):
                    work.wait()


class _Greeting:
    """Tells ``peer`` the tag of this rank's call, and receives and compares the peer's.

    gloo ends the process if a message is longer than the tensor that receives it. So the messages themselves, whose
    number in gloo depends on the tag, are received only from ranks in the same call.
    """

    def __init__(self, peer: int, ranks: Ranks, group: ProcessGroup) -> None:
        self.peer, self._rank, self._tag = peer, global_ranks(ranks)[peer], current_tag()
        self._sent = torch.tensor(self._tag, device="cpu")
        self._received = torch.empty_like(self._sent)
        where: dict[str, Any] = {"group": group, "tag": 0}
        with self._naming_the_peer():
            self._works = (
                dist.isend(self._sent, group_dst=peer, **where),
                dist.irecv(self._received, group_src=peer, **where),
            )

    @contextmanager
    def _naming_the_peer(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(self.peer, str(error)) from error

    def wait(self) -> None:
        with self._naming_the_peer():
            for work in self._works:
                if work is not None:
                    work.wait()
        number, what = self._received.tolist()
        check_tag(self._rank, (number, what), self._tag)


def _greetings(peers: Sequence[int], ranks: Ranks, group: ProcessGroup) -> list[_Greeting]:
    """Greetings to the peers to which this call has sent nothing yet."""
    if (calls := current.get()) is None:
        return []
    greeted = calls.greeted.setdefault(group, set())
    if greeted.issuperset(peers):
        return []
    new = [peer for peer in dict.fromkeys(peers) if peer not in greeted]
    greeted.update(new)
    return [] if is_simulated() else [_Greeting(peer, ranks, group) for peer in new]


def start(
    collective: Callable[..., Any], *args: Any, buffers: Sequence[Tensor], ranks: Ranks, group: ProcessGroup | None
) -> Pending:
    """Start a collective of ``ranks`` in ``group``, their process group."""
    if own_entry.written:
        own_entry.remove()
    began = time.monotonic()
    try:
        others = [peer for peer in range(ranks.size()) if peer != ranks.rank()]
        if buffers[0].is_cpu and group is not None and (new := _greetings(others, ranks, group)):
            _wait_for_messages(new)
        return Pending([collective(*args, group=group, async_op=True)], buffers, ranks)
    except OutOfStepError:
        raise
    except RuntimeError as error:
        raise failure(operation_name(), ranks, error, began) from error


def start_messages(sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], ranks: Ranks, group: Any) -> Pending:
    """Start messages between ``ranks`` in ``group``, their process group. There must be one."""
    if own_entry.written:
        own_entry.remove()
    messages = [*sends, *receives]
    buffers, peers = [x for _, x in messages], [peer for peer, _ in messages]
    if not buffers[0].is_cpu:
        ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in sends]
        ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in receives]
        return Pending(dist.batch_isend_irecv(ops), buffers, ranks)
    works: list[Any] = []
    began, at, number = time.monotonic(), 0, 1 + (hash(current_tag()) & 0x3FFFFFFF)
    try:
        if new := _greetings(peers, ranks, group):
            works += new
            peers = [greeting.peer for greeting in new] + peers
        for peer, x in sends:  # gloo starts them one by one anyway; so it is known which one fails
            at = len(works)
            works.append(dist.isend(x, group=group, group_dst=peer, tag=number))
        for peer, x in receives:
            at = len(works)
            works.append(dist.irecv(x, group=group, group_src=peer, tag=number))
    except RuntimeError as error:
        cause = error if isinstance(error, PeerError) else PeerError(peers[at], str(error))
        raise failure(operation_name(), ranks, cause, began) from error
    return Pending(works, buffers, ranks, peers)


class _WaitError(RuntimeError):
    """The operation ``done`` of a list has failed. None: another rank has left the call."""

    def __init__(self, done: int | None, message: str) -> None:
        super().__init__(message)
        self.done = done


def _long_wait(told: bool) -> bool:
    """After each part of a wait: tell the other ranks once that this rank waits. True: they have been told."""
    if waits_in_vain.get()(operation_name()):
        raise _WaitError(None, "another rank has left the call")
    if not told:
        own_entry.write(operation_name())
    return True


def _wait_for_collective(work: Any) -> None:
    """Wait for a collective of gloo."""
    told = False
    while True:
        try:
            work.wait(LONG_WAIT)
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # it has failed, or ended just after the wait
                return
            told = _long_wait(told)


def _wait_for_messages(works: Sequence[Started]) -> None:
    """Wait for messages of gloo in another thread, so that this one can be interrupted, and sees that a rank has left.

    If the sender or the receiver of a message leaves in the middle of it, gloo does not always notice, and would wait
    until its timeout. A wait of gloo with a shorter timeout closes all connections when it is over.
    """
    told, waiter = False, _idle.pop() if _idle else _Waiter()
    waiter.messages.put(works)
    while True:
        try:
            error = waiter.errors.get(timeout=LONG_WAIT.total_seconds())
            break
        except Empty:
            told = _long_wait(told)
    _idle.append(waiter)
    if error is not None:
        raise error


class _Waiter:
    """A thread that waits for lists of messages, and returns an error or None for each list."""

    def __init__(self) -> None:
        self.messages, self.errors = SimpleQueue[Sequence[Started]](), SimpleQueue[Exception | None]()
        Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            works, done, result = self.messages.get(), 0, None
            try:
                for work in works:
                    work.wait()
                    done += 1
            except Exception as error:
                known = isinstance(error, OutOfStepError | PeerError)
                result = error if known else _WaitError(done, str(error))
            del works, work
            self.errors.put(result)


_idle: list[_Waiter] = []
_GLOO_MESSAGES = dist.Work, _Greeting
# The works of a simulated group, for which nothing is waited.
_SIMULATED: Any = getattr(torch._C._distributed_c10d, "FakeWork", ())
