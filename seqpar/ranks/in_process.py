"""Several ranks in one process, each in a thread of its own. They take turns: while one computes, the others wait.

A rank computes until it waits for a message. So the ranks may share one device, and on a GPU one stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextvars import copy_context
from threading import Condition, Thread, get_ident
from typing import Any, TypeVar

import torch
from torch.distributed import ProcessGroup

OfRank = TypeVar("OfRank")


class RankInProcess(ProcessGroup):
    """A process group as one of its ranks sees it. It has no backend, and torch.distributed does not know it.

    Attributes:
        crew: all ranks.
    """

    group_name: Any = "ranks of one process"

    def __init__(self, rank: int, size: int, crew: Crew) -> None:
        init: Any = super().__init__  # torch's type stubs do not have the form without a store
        init(rank, size)
        self.crew = crew


class _StoppedError(BaseException):
    """Another rank has raised an error. Not an Exception, because no code of a rank may handle it."""


class Crew:
    """The ranks of one process, and the messages between them.

    Args:
        size: the number of ranks.
        per_host: how many consecutive ranks act as ranks of one host.
        share_memory: whether the ranks of a host act as ranks that share memory.
    """

    def __init__(self, size: int, per_host: int, share_memory: bool) -> None:
        self.ranks = [RankInProcess(rank, size, self) for rank in range(size)]
        self.per_host, self.share_memory = per_host, share_memory
        self._turn = Condition()  # the rank that computes holds it
        self._messages: dict[Hashable, Any] = {}
        self._numbers = Counter[Hashable]()
        self._wanted: dict[int, Hashable] = {}  # by thread: the message that it waits for
        self._running = 0
        self._error: BaseException | None = None

    def run(self, body: Callable[[int], OfRank]) -> list[OfRank]:
        """``body(rank)`` of every rank. If a rank raises an error, this raises it."""
        results: dict[int, OfRank] = {}
        self._error, self._running = None, len(self.ranks)
        for left in (self._messages, self._numbers, self._wanted):
            left.clear()

        def run_rank(rank: int) -> None:
            # Asked for, the number also counts in this thread: else MKL would use a number of its own at first, which
            # may change the bits of a matrix product.
            torch.get_num_threads()
            with self._turn:
                try:
                    if self._error is None:
                        results[rank] = body(rank)
                except _StoppedError:
                    pass
                except BaseException as error:
                    self._error = self._error or error
                self._running -= 1
                self._turn.notify_all()

        threads = [Thread(target=copy_context().run, args=(run_rank, i), daemon=True) for i in range(len(self.ranks))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # such as an interrupt: the ranks end at their next message
            self._error = error
            raise
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(len(self.ranks))]

    def number(self, *route: Hashable) -> int:
        """The number of the next message on a route. Sender and receiver count alike."""
        self._numbers[route] += 1
        return self._numbers[route]

    def send(self, message: Any, *key: Hashable) -> None:
        """Send a message, whose key no other message has."""
        self._messages[key] = message
        self._turn.notify_all()

    def receive(self, *key: Hashable) -> Any:
        """Wait for the message of this key, while other ranks compute."""
        while key not in self._messages:
            self._wanted[get_ident()] = key
            if len(self._wanted) == self._running and not self._messages.keys() & {*self._wanted.values()}:
                self._error = self._error or RuntimeError(f"the ranks wait for messages that no rank sends: {key}")
            if self._error is not None:
                self._turn.notify_all()
                raise _StoppedError
            self._turn.wait()
        self._wanted.pop(get_ident(), None)
        return self._messages.pop(key)
