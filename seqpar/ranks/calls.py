"""The calls of a process group: everything in which its ranks exchange messages, in the same order on every rank.

Messages are matched by their order. A rank that left one call in the middle, or that makes a call more than the others,
would take the messages of one call for the messages of another, and nothing would fail. So:

* Each rank counts the calls of a group, and each message says in which call it is sent (``Calls.tag``). A rank raises
  an error at the first message of another call. NCCL's messages have no room for the tag.
* An exception that leaves a call, also one from a signal's handler, closes the connections of the ranks. The messages
  of the other ranks then fail, and these ranks leave their calls too.
* Before the next call, the ranks compare their counts through the store, and connect again. If the counts differ, the
  ranks are at different places of the program. Then every call raises an error, until ``init_mesh`` lets all ranks
  begin to count again.
* A group belongs to the first thread that makes calls with it, as long as this thread lives. Backward may run in any
  thread.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from threading import get_ident
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

from .processes import check_own_process
from .rendezvous import OutOfStepError, group_timeout, is_simulated, own_entry, store_all_gather, waits_in_vain

Tag = tuple[int, int]  # the number of a call, and a checksum of what is called
# Closes a connection. The argument is ``Calls.left_by`` after an exception in a call; None if there was none.
Close = Callable[[int | None], object]

_NO_CALL: Tag = (0, 0)
MESSAGES_FAILED = -1
# How long a rank that has left a call waits in its next call for the other ranks. It may wait in vain: a rank to which
# this rank sends no messages goes on.
_PATIENCE = timedelta(seconds=30)


class Calls:
    """The calls of one process group, and the connections over which its ranks exchange messages.

    Attributes:
        connections: by any key, what ``connect`` has made.
        generation: how often the connections have been closed.
        works: messages that were started and not waited for, by the identity of their list, each with a function that
            lets their memory be used again after the connections were closed.
        tag: of the messages that are sent now.
        greeted: by process group, the ranks with which the tag has been exchanged.
        left_by: the rank of the job whose error has ended the call. MESSAGES_FAILED: the ranks find out together which
            rank is missing (``failed_wait``).
        epoch: of the default group: how often the ranks have begun to count their calls again.
        unusable: the operation of torch.distributed in which this rank may have failed before the other ranks.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.connections: dict[Any, Any] = {}
        self.generation = 0
        self.works: dict[int, tuple[list[Any], Callable[[], None]]] = {}
        self.tag = _NO_CALL
        self.greeted: dict[ProcessGroup, set[int]] = {}
        self.left = False  # whether an exception has left a call, and the ranks have not met since
        self.left_by: int | None = None
        self._left_at = 0  # the number of the last call that this rank has left
        self.unusable: str | None = None
        self._closers: list[Close] = []
        self._used: WeakSet[Calls] = WeakSet((self,))  # whose connections the calls of this group use
        self._name = group.group_name
        self._number = self._what = self.epoch = 0
        self._thread = self._running = 0  # identifiers of threads

    def connect(self, key: Any, make: Callable[[], tuple[Any, Close]]) -> Any:
        """The connection of ``key``. If there is none, ``make()`` makes it and what closes it, collectively."""
        if key not in self.connections:
            check_own_process("a connection to other ranks")
            self.connections[key], close = make()
            self._closers.append(close)
        if (calls := current.get()) is not None and calls is not self:
            calls._used.add(self)
        return self.connections[key]

    @contextmanager
    def call(self, group: ProcessGroup, what: int, goes_on: bool = False) -> Iterator[None]:
        """The messages that are started in the block belong to one call of ``group``. ``what`` is its checksum.

        Args:
            goes_on: the block is a further part of the last call.

        Raises:
            RuntimeError: another thread makes calls with the group, the process was forked from a rank, or the ranks
                are in different calls.
        """
        check_own_process("a message to other ranks")
        self._check_thread()
        if self.unusable is not None:
            raise RuntimeError(
                f"group: {self.unusable} has failed on this rank, so that the ranks may be in different operations of "
                "the process group; end all process groups (destroy_process_group) and start them again"
            )
        # An exception may also come between a call and its end, between its parts, or while it is left.
        if self._running or self.left or (self.works and not goes_on):
            self.leave()
        self._running, self.left_by, outer, at = get_ident(), None, None, None
        try:
            outer = current.set(self)
            if not goes_on:
                self._number, self._what = self._number + 1, what
                self.greeted.clear()
            at = waits_in_vain.set(self._waits_in_vain)
            if self.left:
                self._meet(group)
            self.tag = self._number, what
            yield
        except BaseException:
            self.leave()
            raise
        finally:
            if outer is not None:
                current.reset(outer)
            if at is not None:
                waits_in_vain.reset(at)
            self.tag, self._running = _NO_CALL, 0

    def _check_thread(self) -> None:
        this = get_ident()
        if self._running not in (0, this) and _lives(self._running):
            raise RuntimeError(f"group: another thread is in the middle of a call with it; {_THREADS}")
        if self._thread != this and torch._C._current_graph_task_id() == -1:
            if _lives(self._thread):
                raise RuntimeError(f"group: this is not the thread that made the first call with it; {_THREADS}")
            self._thread = this

    def _meet(self, group: ProcessGroup) -> None:
        """Let the ranks compare their counts."""
        ranks = dist.get_process_group_ranks(group)
        purpose, timeout = "the first call after an error", min(_PATIENCE, group_timeout(group))
        counts = store_all_gather(purpose, ranks, str(self._number), timeout, group.group_name)
        if len(set(counts)) > 1:
            by_rank = ", ".join(f"rank {rank} in call {count}" for rank, count in zip(ranks, counts, strict=True))
            raise OutOfStepError(
                f"the ranks left different calls by errors or interrupts, and are now in different calls ({by_rank}); "
                "call seqpar.init_mesh on every rank, with the same sizes as before, and repeat the step from its "
                "beginning"
            )
        self.left = False

    def leave(self) -> None:
        """Close the connections that the calls of this group use, so that no rank waits for messages of this one."""
        self.left, self._left_at = True, self._number
        left_by = dist.get_rank() if self.left_by is None else self.left_by
        for calls in [*self._used]:
            calls.close(left_by)
        if left_by != MESSAGES_FAILED:
            with suppress(RuntimeError):
                own_entry.write("an error", [left_by])
        self._write(self._number, left_by)

    def _write(self, call: int | Literal["all"], left_by: int) -> None:
        """Tell the ranks that wait in this call that this rank does not come."""
        if dist.is_initialized() and not is_simulated():
            with suppress(RuntimeError):
                _get_default_store().set(f"{self._prefix()}/{call}", str(left_by))

    def _prefix(self) -> str:
        assert dist.group.WORLD is not None
        return f"seqpar/left/{self._name}/{calls_of(dist.group.WORLD).epoch}"

    def _waits_in_vain(self, operation: str) -> bool:
        """In a long wait: whether another rank has left this call because messages have failed, or the call before it,
        which this rank has ended.

        Raises:
            OutOfStepError: another rank has left this call for another reason, or waits in another call that has the
                same number.
        """
        store, prefix = _get_default_store(), self._prefix()
        ended = () if self._left_at == self._number - 1 else (self._number - 1,)
        for key in (f"{prefix}/{call}" for call in (self._number, *ended, "all")):
            if store.check([key]):
                self.left_by = rank = int(store.get(key))
                if rank == MESSAGES_FAILED:
                    return True
                raise OutOfStepError(
                    f"{operation}: rank(s) [{rank}] of the job left this call by an error; see its traceback"
                )
        if self.tag == _NO_CALL:
            return False
        # The latest call in which a rank of the group has waited for long.
        own, before = json.dumps([self._number, self._what, dist.get_rank(), operation]), ""
        while (entry := store.compare_set(f"{prefix}/waits", before, own).decode()) != own:
            number, what, rank, where = json.loads(entry)
            if number >= self._number:
                if number == self._number and what != self._what:
                    raise OutOfStepError(
                        f"{operation}: rank {rank} of the job makes another call than this rank (it waits in {where}); "
                        "make the same calls on all ranks, with tensors of the same shapes and dtype: skip no layer at "
                        "random"
                    )
                break
            before = entry
        return False

    def close(self, left_by: int | None = None) -> None:
        """Close the connections. Later calls connect the ranks again."""
        self.generation += 1
        closers, self._closers = self._closers, []
        self.connections.clear()
        for close in closers:
            close(left_by)
        for works, settle in self.works.values():
            settle()
            works.clear()
        self.works.clear()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


_THREADS = (
    "messages are matched by their order, so use a group from one thread, or make one for each thread with "
    "torch.distributed.new_group"
)
# The calls of the group that is in a call now, in this thread.
current: ContextVar[Calls | None] = ContextVar("calls", default=None)
_calls: MutableMapping[ProcessGroup, Calls] = WeakKeyDictionary()


def calls_of(group: ProcessGroup) -> Calls:
    """The calls of ``group``."""
    calls = _calls.get(group)
    if calls is None:
        world = dist.group.WORLD
        for other in [g for g in _calls if g not in dist.distributed_c10d._world.pg_map]:
            _calls.pop(other).close()  # the group was destroyed, and something still holds it
        assert world is not None
        calls = _calls[group] = Calls(group)
    return calls


def all_calls() -> list[Calls]:
    """The calls of all groups of this process."""
    return [*_calls.values()]


def other_threads() -> bool:
    """Whether another thread than this one makes calls."""
    return any(calls._thread not in (0, get_ident()) and _lives(calls._thread) for calls in all_calls())


def current_tag() -> Tag:
    """The tag of the messages that this thread sends now."""
    calls = current.get()
    return _NO_CALL if calls is None else calls.tag


def check_tag(rank: int, theirs: Tag, own: Tag) -> None:
    """Raise an OutOfStepError if a message of ``rank`` is one of another call than the call of this rank."""
    if theirs == own:
        return
    if theirs[0] == own[0]:
        raise OutOfStepError(
            f"rank {rank} of the job makes another call than this rank: pass tensors of the same shapes and dtype, and "
            "the same mask, sharding and options, on every rank"
        )
    raise OutOfStepError(
        f"rank {rank} of the job has sent a message of call {theirs[0]} of the group, but this rank is in call "
        f"{own[0]}: an error or an interrupt has let one of them leave a call, or it makes a call that the other does "
        "not make; make the same calls on all ranks"
    )


def begin_again() -> None:
    """Let all groups begin to count their calls again. All ranks of the job call this, and then wait for one another.

    A rank that waits for this one in a call, because an error has let them get out of step, leaves its call.
    """
    assert dist.group.WORLD is not None
    for calls in all_calls():
        if calls._number:
            calls._write("all", dist.get_rank())
        calls.close(dist.get_rank())
        calls.left, calls._number, calls._left_at = False, 0, 0
    calls_of(dist.group.WORLD).epoch += 1


def _forget() -> None:
    """In a child: close nothing. The connections are the parent's."""
    for calls in all_calls():
        calls._closers.clear()


os.register_at_fork(after_in_child=_forget)


def _lives(thread: int) -> bool:
    return thread in sys._current_frames()
