"""The remote steps of a ring: when their K/V are received, and when the gradients are returned to the owners.

Messages are exchanged in two levels (see ``seqpar.schedule``). A *fetch* is an exchange with ranks of other hosts, a
*step* is one with ranks of the same host. On a single host there are only steps. ``transport.py`` sends the messages.

Shapes: b batch, k keys of a step, n KV heads, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm.p2p import make_ready
from ..comm.streams import TransferStream
from ..comm.trace import count_step
from ..heads import Heads
from ..mesh import AttentionGroups
from ..schedule.plan import Step
from ..schedule.rows import GatheredRows
from .call import AttentionCall
from .transport import KV, KeyValues, Message, Transport

# While one remote step (or one chunk of heads of a step) is computed, the K/V of this many more are being received.
_AHEAD = 2
# The same with ``chunks=``, which asks for less memory; and in an all-gather over several hosts, in which a chunk can
# start only after its fetch has arrived.
_AHEAD_AT_LEAST = 1


def connect(groups: AttentionGroups, device: torch.device) -> None:
    """Connect the ranks of the ring for messages on ``device``, at the first call. All of them must call this."""
    make_ready(groups.within, device)
    make_ready(groups.across, device)


class RemoteSteps:
    """Iterates over the steps with remote keys, for one part of the heads after another.

    Yields the part's number and heads, the index of the step, and the step's K/V ``[b, k, n, d]`` and ``[b, k, n, e]``.
    In a step without keys for this rank, these are this rank's own K/V.

    The constructor starts the first transfers. Each iteration starts those of a later step, then waits for its own.
    """

    def __init__(self, call: AttentionCall, heads: Heads, k: Tensor, v: Tensor, transport: Transport) -> None:
        self.parts = call.parts(heads, k, v)
        self._plan = plan = call.plan
        self._transport = transport
        at = [part.kv_in(heads) for part in self.parts]
        self._own = [KeyValues((of_heads(k, some), of_heads(v, some))) for some in at]
        # These include the steps in which this rank has no messages: all ranks must start their messages in the same
        # order relative to the kernels and to the returned gradients.
        numbers = range(len(self.parts))
        self._tasks = [(number, i) for number in numbers for i in range(1, len(plan))]
        self._to_start = deque(self._tasks)
        self._started: deque[Callable[[], KV]] = deque()
        self._to_fetch = deque((number, i) for number in numbers for i in range(plan.fetches))
        self._fetching: deque[Callable[[], Any]] = deque()
        self._fetched: tuple[tuple[int, int], Any] | None = None  # the part and the fetch, and what was fetched
        few = call.groups.chunks is not None or (plan.gather and plan.fetches > 0)
        self._ahead = _AHEAD_AT_LEAST if few else _AHEAD
        self._stream = TransferStream((k, v), call.kv_ready) if self._tasks else TransferStream()
        # An all-gather starts the step of the next chunk, which needs the next fetch, before the kernel of this chunk.
        for _ in range(2 if plan.gather else 1):
            self._start_fetch()
        while self._to_start and len(self._started) < self._ahead and not self._waits_for_fetch():
            self._start_step()

    def __iter__(self) -> Iterator[tuple[int, Heads, int, Tensor, Tensor]]:
        for number, i in self._tasks:
            if self._plan.gather:  # the next chunk reuses the memory of the last chunk, after the last chunk's kernel
                self._stream.release()
            while self._to_start and len(self._started) <= self._ahead:
                if self._started and self._waits_for_fetch() and not self._plan.gather:
                    break  # only the step that needs the fetch waits for it, not the steps before
                self._start_step()
            self._stream.release()
            yield number, self.parts[number], i, *self._started.popleft()()
        self._stream.release()

    def _waits_for_fetch(self) -> bool:
        """Whether the next step to start needs a fetch that this rank has not waited for yet."""
        number, i = self._to_start[0]
        fetch = self._plan.fetch_of(i)
        return fetch is not None and (self._fetched is None or self._fetched[0] != (number, fetch))

    def _start_fetch(self) -> None:
        if self._to_fetch:
            number, index = self._to_fetch.popleft()
            with self._stream.posting():
                self._fetching.append(self._transport.start_fetch(self._plan.fetch(index), self._own[number]))

    def _start_step(self) -> None:
        """Start the transfers of the next step."""
        waits = self._waits_for_fetch()
        number, i = self._to_start.popleft()
        fetch = self._plan.fetch_of(i)
        if waits:
            assert fetch is not None
            self._start_fetch()  # the fetch after this one
            with self._stream.posting():  # the kernels do not wait for the fetch
                self._fetched = (number, fetch), self._fetching.popleft()()
        fetched = self._fetched[1] if fetch is not None and self._fetched is not None else None
        step = self._plan[i]
        if step.receives and number == 0:
            count_step()
        with self._stream.posting():
            self._started.append(self._transport.start_step(step, self._own[number], fetched))


class Returns:
    """Sends the gradients of remote K/V to the owners of the K/V while the gradients of the next step are computed.

    A rank that fetched rows from another host adds up the gradients that the ranks of its host have computed for these
    rows, and sends the sum to the owner once.
    """

    def __init__(self, call: AttentionCall, transport: Transport) -> None:
        self._plan = call.plan
        self._transport = transport
        self._step: list[Callable[[], None]] = []  # each waits for a message of the last step, and adds its gradients
        self._fetch: list[Callable[[], None]] = []  # the same for the last fetch
        self._sums: list[dict[int, Any]] = [{}, {}]  # by owner: the gradients of the rows that this rank fetched
        self._last: tuple[int, list[list[Tensor]]] | None = None

    def start(self, index: int, grads: list[Message], own: list[Tensor]) -> None:
        """Wait for the gradients of the previous step, then send those of step ``index``.

        Args:
            index: the step.
            grads: the messages that ``new_gradients`` made. The list is emptied, so that their memory can be freed.
            own: dk and dv of this rank's own K/V, to which received gradients are added.
        """
        self._end_step()
        targets = [[x] for x in own] if self._plan.gather else [own]
        self._last = index, targets
        fetch = self._plan.fetch_of(index)
        exchange_of = None if fetch is None else self._plan.fetch(fetch)
        for target, sums in zip(targets, self._sums, strict=False):
            grad = grads.pop(0) if grads else None
            self._step.append(self._transport.start_return(self._plan[index], grad, target, sums, exchange_of))
            del grad

    def finish(self) -> None:
        """Wait for all gradients, and add them."""
        self._end_step()
        self._end_fetch()

    def _end_step(self) -> None:
        while self._step:
            self._step.pop(0)()
        if self._last is None:
            return
        (index, targets), self._last = self._last, None
        fetch = self._plan.fetch_of(index)
        if fetch is None or not self._plan.ends_fetch(index):
            return
        self._end_fetch()
        for target, sums in zip(targets, self._sums, strict=False):
            self._fetch.append(self._transport.start_fetch_return(self._plan.fetch(fetch), sums, target))
            sums.clear()

    def _end_fetch(self) -> None:
        while self._fetch:
            self._fetch.pop(0)()


def new_gradients(
    step: Step, step_k: Tensor, step_v: Tensor, dtype: torch.dtype, groups: AttentionGroups
) -> list[Message]:
    """Empty messages for the gradients of a step's remote keys: one message of dk and dv together, or one of each.

    The gradients of an all-gather are copied before they are sent. With one message of each, dk is freed before dv is
    copied.
    """
    if not step.receives:
        return []
    rows, both = step_k.shape[1], (step_k, step_v)
    if isinstance(step.keys, GatheredRows):
        return [Message([x], rows, dtype=dtype) for x in both]
    return [Message(both, rows, dtype=dtype, to=groups.within)]


def of_heads(x: Tensor, heads: range) -> Tensor:
    """Some of the heads of ``x [..., heads, head_dim]``."""
    return x if len(heads) == x.shape[-2] else x[..., heads.start : heads.stop, :]
