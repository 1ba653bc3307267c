"""The remote steps of a ring: receiving their K/V behind the computation, and returning the gradients to the owners.

Messages are exchanged in two levels (see ``seqpar.schedule``). A *fetch* is an exchange with ranks of other hosts, a
*step* is one with ranks of the same host. On a single host there are only steps.

Where every rank needs all keys (``plan.dense``), both levels are collectives: an all-gather between hosts, then one
inside each host; the gradients return by a reduce-scatter inside each host, then one between hosts. Everywhere else
they are messages between pairs of ranks.

Shapes: b batch, k keys of a step, n KV heads, d head_dim. Messages hold k and v, or dk and dv, of some rows:
``[2, b, rows, n, d]``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.collectives import start_all_gather, start_reduce_scatter
from ..comm.p2p import Pending, exchange, make_ready
from ..comm.pulls import shared_memory, start_pulls
from ..comm.streams import TransferStream
from ..comm.trace import count_step
from ..heads import Heads
from ..keys import GatheredKeys, Selection
from ..mesh import AttentionGroups
from ..schedule import AttentionPlan, Exchange, Step, Transfer
from .call import AttentionCall

# The K/V of this many remote steps, or chunks of heads of a step, are on the way at a time.
_AHEAD = 2
# With ``chunks=``, which asks for less memory. Also in an all-gather over several hosts: there, the start of a chunk
# waits for its fetch.
_AHEAD_AT_LEAST = 1

KV = tuple[Tensor, Tensor]


def connect(groups: AttentionGroups, device: torch.device) -> None:
    """Connect the ranks of the ring for messages on ``device``, at the first call. All of them must call this."""
    make_ready(groups.within, device)
    make_ready(groups.across, device)


class RemoteSteps:
    """The steps with remote keys, part by part: the part's number and heads, the step, and its K/V ``[b, k, n, d]``.

    The first transfers start when it is made, and those of the next steps whenever a step is asked for. In a step
    without keys for this rank, K/V are this rank's own.
    """

    def __init__(
        self, call: AttentionCall, heads: Heads, k: Tensor, v: Tensor, sent_by: Transport | None = None
    ) -> None:
        self.parts = call.parts(heads, k)
        self._plan = plan = call.plan
        self._transport = sent_by or transport(call)
        self._own = [_KeyValues(*(of_heads(x, part.kv_in(heads)) for x in (k, v))) for part in self.parts]
        # Also the steps in which this rank has no messages: all ranks start theirs in the same order, ahead of the same
        # kernels and returns.
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
        # An all-gather starts the step of its next chunk, which needs the next fetch, before the kernel of this one.
        for _ in range(2 if plan.gather else 1):
            self._start_fetch()
        while self._to_start and len(self._started) < self._ahead and not self._waits_for_fetch():
            self._start_step()

    def __iter__(self) -> Iterator[tuple[int, Heads, int, Tensor, Tensor]]:
        for number, i in self._tasks:
            if self._plan.gather:  # the next chunk takes the memory of the last one, whose kernel it waits for
                self._stream.release()
            while self._to_start and len(self._started) <= self._ahead:
                if self._started and self._waits_for_fetch() and not self._plan.gather:
                    break  # the step that needs it waits for it, not those before
                self._start_step()
            self._stream.release()
            yield number, self.parts[number], i, *self._started.popleft()()
        self._stream.release()

    def _waits_for_fetch(self) -> bool:
        """Whether the next step to start needs a fetch that has not been waited for."""
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
            self._start_fetch()  # the next one
            with self._stream.posting():  # the kernels do not wait for the fetch
                self._fetched = (number, fetch), self._fetching.popleft()()
        fetched = self._fetched[1] if fetch is not None and self._fetched is not None else None
        step = self._plan[i]
        if step.receives and number == 0:
            count_step()
        with self._stream.posting():
            self._started.append(self._transport.start_step(step, self._own[number], fetched))


class Returns:
    """The gradients of remote K/V, sent to the ranks that own the K/V while the next ones are computed.

    The gradients of fetched rows are added up inside the host, by the rank that fetched the rows, and sent to the owner
    once.
    """

    def __init__(self, call: AttentionCall, sent_by: Transport | None = None) -> None:
        self._plan = call.plan
        self._transport = sent_by or transport(call)
        self._step: list[Callable[[], None]] = []  # to wait for the last step, and add what was received
        self._fetch: list[Callable[[], None]] = []  # the same for the last fetch
        self._sums: list[dict[int, Tensor]] = [{}, {}]  # by owner, the gradients of the rows that this rank fetched
        self._last: tuple[int, Sequence[Tensor]] | None = None

    def start(self, index: int, grads: list[Tensor], own: Tensor) -> None:
        """Send the gradients of step ``index``, after those of the step before have been received.

        Args:
            index: the step.
            grads: what ``new_gradients`` made. Emptied, so that its memory can be freed.
            own: ``[2, b, k, n, d]``, the gradients of this rank's own K/V. Received gradients are added to it.
        """
        self._end_step()
        targets = list(own) if self._plan.gather else [own]
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


def new_gradients(step: Step, step_k: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Empty tensors for the gradients of a step's remote keys: dk and dv in one message, or in a tensor each.

    Those of an all-gather are copied once more before they are sent, so that dk can be freed before dv is copied.
    """
    if not step.receives:
        return []
    if isinstance(step.keys, GatheredKeys):
        return [torch.empty_like(step_k, dtype=dtype) for _ in range(2)]
    return [step_k.new_empty(2, *step_k.shape, dtype=dtype)]


def of_heads(x: Tensor, heads: range) -> Tensor:
    """Some of the heads of ``x [..., heads, head_dim]``."""
    return x if len(heads) == x.shape[-2] else x[..., heads.start : heads.stop, :]


class _KeyValues:
    """K/V of some rows of one rank, and the messages that hold rows of them."""

    def __init__(self, k: Tensor, v: Tensor, both: Tensor | None = None) -> None:
        self.k, self.v = k, v  # [b, k, n, d]
        self._all_rows = both  # [2, b, k, n, d]

    def message(self, rows: Selection, length: int | None = None) -> Tensor:
        """``[2, b, rows, n, d]``; ``[2, b, length, n, d]`` with a ``length``, the last rows of which have any value."""
        full = len(rows) == self.k.shape[1]
        if full and self._all_rows is not None:
            return self._all_rows
        batch, _, heads, dim = self.k.shape
        message = self.k.new_empty(2, batch, length or len(rows), heads, dim)
        self.copy_rows(rows, message[:, :, : len(rows)])
        if full:
            self._all_rows = message  # every step of the ring sends it again
        return message

    def copy_rows(self, rows: Selection, out: Tensor) -> None:
        """Copy the rows into ``out [2, b, rows, n, d]``."""
        for x, target in zip((self.k, self.v), out, strict=True):
            rows.copy_to(target, x)


class Transport(Protocol):
    """How K/V and their gradients are sent. The planner has one of its own, which notes what is sent."""

    def start_fetch(self, fetch: Exchange, own: _KeyValues) -> Callable[[], Any]:
        """Start a fetch. The returned function waits for it, and returns what the steps need of it."""

    def start_step(self, step: Step, own: _KeyValues, fetched: Any) -> Callable[[], KV]:
        """Start a step. The returned function waits for it, and returns its K/V, or this rank's own if it has none."""

    def start_return(
        self, step: Step, grad: Tensor | None, own: Tensor, sums: dict[int, Tensor], fetch: Exchange | None
    ) -> Callable[[], None]:
        """Start to return a step's gradients. The returned function waits, and adds what was received.

        Args:
            step: the step.
            grad: ``[..., k, n, d]``, the gradients of the step's keys; None if it has none.
            own: ``[..., k, n, d]``, the gradients of this rank's K/V.
            sums: by owner, those of the rows that this rank has fetched, ``[..., rows, n, d]``.
            fetch: the fetch whose rows the step has; None if these are the senders' own.
        """

    def start_fetch_return(self, fetch: Exchange, sums: dict[int, Tensor], own: Tensor) -> Callable[[], None]:
        """Start to return the sums of a fetch. The returned function waits, and adds what was received to ``own``."""


def transport(call: AttentionCall) -> Transport:
    """How the messages of a call are sent."""
    return _Collectives(call.plan, call.groups) if call.plan.dense else _Messages(call.plan, call.groups)


class _Messages:
    """Messages between pairs of ranks, which hold only the rows that the receiver needs."""

    def __init__(self, plan: AttentionPlan, groups: AttentionGroups) -> None:
        self._plan, self._groups = plan, groups

    def start_fetch(self, fetch: Exchange, own: _KeyValues) -> Callable[[], dict[int, _KeyValues]]:
        sends = {t.peer: own.message(t.at) for t in fetch.sends}
        batch, _, heads, dim = own.k.shape
        received = {t.peer: own.k.new_empty(2, batch, len(t.rows), heads, dim) for t in fetch.receives}
        pending = self._fetch_exchange(fetch, sends, received)

        def wait() -> dict[int, _KeyValues]:
            pending.wait()
            return {owner: _KeyValues(both[0], both[1], both) for owner, both in received.items()}

        return wait

    def start_step(self, step: Step, own: _KeyValues, fetched: dict[int, _KeyValues] | None) -> Callable[[], KV]:
        sources = {**(fetched or {}), self._plan.rank: own}
        like = own.k[None].expand(2, *own.k.shape)
        sends: dict[int, Tensor] = {}
        for peer, transfers in _by_peer(step.sends).items():
            if len(transfers) == 1:
                sends[peer] = sources[transfers[0].owner].message(transfers[0].at)
                continue
            sends[peer] = _with_rows(like, sum(len(t.rows) for t in transfers))
            for transfer, view in zip(transfers, _views(transfers, sends), strict=True):
                sources[transfer.owner].copy_rows(transfer.at, view)
        received = self._buffers(step.receives, sends, like)
        pending = self._step_exchange(step, sends, received)

        def wait() -> KV:
            pending.wait()
            if not received:
                return own.k, own.v
            views = _views(step.receives, received)
            received.clear()
            k, v = _sorted_keys(step, views)
            return k, v

        return wait

    def start_return(
        self, step: Step, grad: Tensor | None, own: Tensor, sums: dict[int, Tensor], fetch: Exchange | None
    ) -> Callable[[], None]:
        sends: dict[int, Tensor] = {}
        if len(step.receives) == 1:
            assert grad is not None
            sends[step.receives[0].peer] = grad
        elif grad is not None:
            assert isinstance(step.keys, GatheredKeys)
            sends = self._buffers(step.receives, {}, grad)
            for i, view in enumerate(_views(step.receives, sends)):
                step.keys.gather(i, grad, view)
        # Gradients come from the ranks that K/V were sent to.
        received = self._buffers(step.sends, sends, own)
        pending = self._step_exchange(step, sends, received)
        fetched_rows = {t.owner: len(t.rows) for t in fetch.receives} if fetch is not None else {}

        def accumulate() -> None:
            pending.wait()
            for transfer, view in zip(step.sends, _views(step.sends, received), strict=True):
                owner = transfer.owner
                if owner == self._plan.rank:
                    transfer.rows.add_to(own, view)
                elif owner not in sums and len(transfer.at) == fetched_rows[owner] and view.is_contiguous():
                    sums[owner] = view
                else:
                    if owner not in sums:
                        sums[owner] = _with_rows(own, fetched_rows[owner]).zero_()
                    transfer.at.add_to(sums[owner], view)
            received.clear()

        return accumulate

    def start_fetch_return(self, fetch: Exchange, sums: dict[int, Tensor], own: Tensor) -> Callable[[], None]:
        received = {t.peer: _with_rows(own, len(t.rows)) for t in fetch.sends}
        pending = self._fetch_exchange(fetch, dict(sums), received)

        def accumulate() -> None:
            pending.wait()
            for transfer in fetch.sends:
                transfer.rows.add_to(own, received.pop(transfer.peer))

        return accumulate

    def _buffers(self, transfers: Sequence[Transfer], own: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """By peer, an empty message for its transfers; for this rank itself, the message of ``own``, if it has one."""
        return {
            peer: own[peer]
            if peer == self._plan.rank and peer in own
            else _with_rows(like, sum(len(t.rows) for t in part))
            for peer, part in _by_peer(transfers).items()
        }

    def _fetch_exchange(self, fetch: Exchange, sends: dict[int, Tensor], received: dict[int, Tensor]) -> Pending:
        """Exchange messages with ranks of other hosts, in the groups of the fetch."""
        size = self._plan.per_host
        return _exchange(fetch, sends, received, lambda peer: peer // size, self._groups.across)

    def _step_exchange(self, step: Step, sends: dict[int, Tensor], received: dict[int, Tensor]) -> Pending:
        """Exchange messages with ranks of this host, in the groups of the step."""
        size = self._plan.per_host
        return _exchange(step, sends, received, lambda peer: peer % size, self._groups.within)


class _Collectives:
    """All-gathers of all rows and reduce-scatters of all gradients, padded to the longest shard."""

    def __init__(self, plan: AttentionPlan, groups: AttentionGroups) -> None:
        self._plan, self._groups = plan, groups

    def start_fetch(self, fetch: Exchange, own: _KeyValues) -> Callable[[], Tensor]:
        assert self._groups.across is not None
        gathered, pending = start_all_gather(self._message(own), self._groups.across)  # [hosts, 2, b, longest, n, d]

        def wait() -> Tensor:
            pending.wait()
            return gathered

        return wait

    def start_step(self, step: Step, own: _KeyValues, fetched: Tensor | None) -> Callable[[], KV]:
        assert self._groups.within is not None
        by_host = self._message(own)[None] if fetched is None else fetched  # [hosts, 2, b, longest, n, d]
        memory = shared_memory(self._groups.within, by_host.device)
        gathered, pending = (  # [ranks of a host, hosts, 2, ...]
            start_all_gather(by_host, self._groups.within)
            if memory is None
            else start_pulls(by_host, self._groups.within, memory)
        )
        views = [self._rank_of(gathered, t)[:, :, : len(t.rows)] for t in step.receives]
        del by_host, fetched, gathered

        def wait() -> KV:
            pending.wait()
            if not views:
                return own.k, own.v
            k, v = _sorted_keys(step, views)
            return k, v

        return wait

    def start_return(
        self, step: Step, grad: Tensor | None, own: Tensor, sums: dict[int, Tensor], fetch: Exchange | None
    ) -> Callable[[], None]:
        plan, within = self._plan, self._groups.within
        assert within is not None
        shape = *own.shape[:-3], plan.longest, *own.shape[-2:]
        by_rank = own.new_empty(plan.per_host, plan.hosts, *shape)
        by_rank[plan.rank % plan.per_host, plan.rank // plan.per_host].zero_()  # accumulated in ``own`` already
        for i, transfer in enumerate(step.receives):
            assert grad is not None and isinstance(step.keys, GatheredKeys)
            step.keys.gather(i, grad, self._rank_of(by_rank, transfer)[..., : len(transfer.rows), :, :])
        total, pending = start_reduce_scatter(by_rank, within)  # [hosts, ...]
        del by_rank

        def accumulate() -> None:
            pending.wait()
            if fetch is None:
                own.add_(total[0, ..., : own.shape[-3], :, :])
            else:
                sums[plan.rank] = total

        return accumulate

    def start_fetch_return(self, fetch: Exchange, sums: dict[int, Tensor], own: Tensor) -> Callable[[], None]:
        assert self._groups.across is not None
        total, pending = start_reduce_scatter(sums[self._plan.rank], self._groups.across)

        def accumulate() -> None:
            pending.wait()
            own.add_(total[..., : own.shape[-3], :, :])

        return accumulate

    def _message(self, own: _KeyValues) -> Tensor:
        """This rank's K/V, ``[2, b, longest, n, d]``."""
        return own.message(Selection(((0, own.k.shape[1]),)), self._plan.longest)

    def _rank_of(self, x: Tensor, transfer: Transfer) -> Tensor:
        """What ``x [ranks of a host, hosts, ...]`` has of the owner of the rows."""
        host, local = divmod(transfer.owner, self._plan.per_host)
        return x[local, host]


def _by_peer(transfers: Sequence[Transfer]) -> dict[int, list[Transfer]]:
    by_peer: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        by_peer.setdefault(transfer.peer, []).append(transfer)
    return by_peer


def _views(transfers: Sequence[Transfer], messages: dict[int, Tensor]) -> list[Tensor]:
    """The rows of each transfer in the message of its peer, ``[..., rows, n, d]``."""
    views, offsets = [], dict.fromkeys(messages, 0)
    for transfer in transfers:
        message, offset = messages[transfer.peer], offsets[transfer.peer]
        views.append(message.narrow(-3, offset, len(transfer.rows)))
        offsets[transfer.peer] += len(transfer.rows)
    return views


def _sorted_keys(step: Step, received: list[Tensor]) -> Tensor:
    """The received rows ``[2, b, rows, n, d]`` as one tensor, sorted by position. Empties ``received``."""
    if not isinstance(step.keys, GatheredKeys) or len(received) == 1:
        return received.pop()
    like = received[0]
    rows = _with_rows(like, len(step.keys))  # [2, b, k, n, d]
    for i in range(len(step.receives)):
        step.keys.scatter(i, received.pop(0), rows)
    return rows


def _exchange(
    planned: Exchange,
    sends: dict[int, Tensor],
    received: dict[int, Tensor],
    index: Callable[[int], int],
    ranks: Any,
) -> Pending:
    """Exchange messages in the planned groups of peers. ``index`` is that of a rank of the ring in ``ranks``."""
    groups = [
        exchange(
            [(index(peer), sends[peer]) for peer in peers if peer in sends],
            [(index(peer), received[peer]) for peer in peers if peer in received],
            ranks,
        )
        for peers in planned.groups
    ]
    # Also the message to this rank itself, which is not sent.
    return Pending.all(groups, [*sends.values(), *received.values()])


def _with_rows(like: Tensor, rows: int) -> Tensor:
    """An empty tensor shaped as ``like [..., k, n, d]``, of ``rows`` rows."""
    return like.new_empty(*like.shape[:-3], rows, *like.shape[-2:])
