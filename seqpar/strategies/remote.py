"""The remote steps of a ring: receiving their K/V behind the computation, and returning the gradients to the owners.

Messages are exchanged in two levels (see ``seqpar.schedule``). A *fetch* is an exchange with ranks of other hosts, a
*step* is one with ranks of the same host. On a single host there are only steps.

Where every rank needs all keys (``plan.dense``), both levels are collectives: an all-gather between hosts, then one
inside each host; the gradients return by a reduce-scatter inside each host, then one between hosts. Everywhere else
they are messages between pairs of ranks.

Shapes: b batch, k keys of a step, n KV heads, d head_dim of q and k, e head_dim of v. A message holds k and v, or dk
and dv, of some rows: see ``Message``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.collectives import start_all_gather, start_reduce_scatter
from ..comm.host_messages import host_messages
from ..comm.p2p import Pending, exchange, make_ready, new_message
from ..comm.pulls import shared_memory, start_pulls
from ..comm.streams import TransferStream
from ..comm.trace import count_step
from ..heads import Heads
from ..keys import GatheredKeys, Selection
from ..mesh import AttentionGroups, Ranks
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
    """The steps with remote keys, part by part: the part's number and heads, the step, and its K/V ``[b, k, n, d]``
    and ``[b, k, n, e]``.

    The first transfers start when it is made, and those of the next steps whenever a step is asked for. In a step
    without keys for this rank, K/V are this rank's own.
    """

    def __init__(self, call: AttentionCall, heads: Heads, k: Tensor, v: Tensor, transport: Transport) -> None:
        self.parts = call.parts(heads, k, v)
        self._plan = plan = call.plan
        self._transport = transport
        at = [part.kv_in(heads) for part in self.parts]
        self._own = [_KeyValues((of_heads(k, some), of_heads(v, some))) for some in at]
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

    def __init__(self, call: AttentionCall, transport: Transport) -> None:
        self._plan = call.plan
        self._transport = transport
        self._step: list[Callable[[], None]] = []  # to wait for the last step, and add what was received
        self._fetch: list[Callable[[], None]] = []  # the same for the last fetch
        self._sums: list[dict[int, Any]] = [{}, {}]  # by owner, the gradients of the rows that this rank fetched
        self._last: tuple[int, list[list[Tensor]]] | None = None

    def start(self, index: int, grads: list[Message], own: list[Tensor]) -> None:
        """Send the gradients of step ``index``, after those of the step before have been received.

        Args:
            index: the step.
            grads: what ``new_gradients`` made. Emptied, so that its memory can be freed.
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


class Message:
    """Some rows of several tensors, such as k and v, one tensor after the other in one flat buffer.

    Attributes:
        flat: ``[elements]``, what is sent.
    """

    def __init__(
        self,
        like: Sequence[Tensor],
        rows: int,
        *,
        dtype: torch.dtype | None = None,
        flat: Tensor | None = None,
        to: Ranks | None = None,
    ) -> None:
        """An empty message of ``rows`` rows of tensors shaped as ``like``; or what ``flat`` holds.

        ``to`` are the ranks that it will be sent to, if it will.
        """
        self._shapes = [(*x.shape[:-3], rows, *x.shape[-2:]) for x in like]
        self.rows = rows
        if flat is None:
            numel = sum(map(prod, self._shapes))
            flat = like[0].new_empty(numel, dtype=dtype) if to is None else new_message(numel, like[0], to, dtype)
        self.flat = flat

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Views of it, ``[..., rows, n, d]`` each, which may differ in d. To be read after it has been received."""
        parts = self.flat.split_with_sizes([prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def narrow(self, start: int, length: int) -> list[Tensor]:
        """Some of the rows of each tensor."""
        return [x.narrow(-3, start, length) for x in self.tensors]


def new_gradients(
    step: Step, step_k: Tensor, step_v: Tensor, dtype: torch.dtype, groups: AttentionGroups
) -> list[Message]:
    """Empty messages for the gradients of a step's remote keys: one of dk and dv, or one of each.

    Those of an all-gather are copied once more before they are sent, so that dk can be freed before dv is copied.
    """
    if not step.receives:
        return []
    rows, both = step_k.shape[1], (step_k, step_v)
    if isinstance(step.keys, GatheredKeys):
        return [Message([x], rows, dtype=dtype) for x in both]
    return [Message(both, rows, dtype=dtype, to=groups.within)]


def of_heads(x: Tensor, heads: range) -> Tensor:
    """Some of the heads of ``x [..., heads, head_dim]``."""
    return x if len(heads) == x.shape[-2] else x[..., heads.start : heads.stop, :]


class _KeyValues:
    """K/V of some rows of one rank, and the messages that hold rows of them."""

    def __init__(self, kv: KV, message: Message | None = None) -> None:
        self.kv = kv  # [b, k, n, d], [b, k, n, e]
        self._all_rows = message

    def message(self, rows: Selection, to: Ranks | None, length: int | None = None) -> Message:
        """The rows, to be sent to ranks of ``to``; with a ``length``, so many, the last of which have any value."""
        full = len(rows) == self.kv[0].shape[1]
        if full and self._all_rows is not None:
            return self._all_rows
        message = Message(self.kv, length or len(rows), to=to)
        self.copy_rows(rows, message.narrow(0, len(rows)))
        if full:
            self._all_rows = message  # every step of the ring sends it again
        return message

    def copy_rows(self, rows: Selection, out: Sequence[Tensor]) -> None:
        """Copy the rows of k and of v into ``out``."""
        for x, target in zip(self.kv, out, strict=True):
            rows.copy_to(target, x)


class Transport(Protocol):
    """How K/V and their gradients are sent. The planner has one of its own, which notes what is sent."""

    def start_fetch(self, fetch: Exchange, own: _KeyValues) -> Callable[[], Any]:
        """Start a fetch. The returned function waits for it, and returns what the steps need of it."""

    def start_step(self, step: Step, own: _KeyValues, fetched: Any) -> Callable[[], KV]:
        """Start a step. The returned function waits for it, and returns its K/V, or this rank's own if it has none."""

    def start_return(
        self, step: Step, grad: Message | None, own: list[Tensor], sums: dict[int, Any], fetch: Exchange | None
    ) -> Callable[[], None]:
        """Start to return a step's gradients. The returned function waits, and adds what was received.

        Args:
            step: the step.
            grad: the gradients of the step's keys, dk and dv or one of them; None if it has none.
            own: those of this rank's K/V, ``[b, k, n, d]`` each.
            sums: by owner, those of the rows that this rank has fetched.
            fetch: the fetch whose rows the step has; None if these are the senders' own.
        """

    def start_fetch_return(self, fetch: Exchange, sums: dict[int, Any], own: list[Tensor]) -> Callable[[], None]:
        """Start to return the sums of a fetch. The returned function waits, and adds what was received to ``own``."""


def transport(call: AttentionCall, device: torch.device) -> Transport:
    """How the messages of a call are sent."""
    # Ranks that share memory read one another's messages where they are. An all-gather would copy them.
    collective = call.plan.dense and not share_memory(call.groups, device)
    return _Collectives(call.plan, call.groups) if collective else _Messages(call.plan, call.groups)


def share_memory(groups: AttentionGroups, device: torch.device) -> bool:
    """Whether the ranks of the ring read one another's messages in memory: there is no transfer to hide then."""
    return groups.across is None and groups.within is not None and host_messages(groups.within, device) is not None


class _Messages:
    """Messages between pairs of ranks, which hold only the rows that the receiver needs."""

    def __init__(self, plan: AttentionPlan, groups: AttentionGroups) -> None:
        self._plan, self._groups = plan, groups

    def start_fetch(self, fetch: Exchange, own: _KeyValues) -> Callable[[], dict[int, _KeyValues]]:
        sends = {t.peer: own.message(t.at, self._groups.across) for t in fetch.sends}
        received = {t.peer: Message(own.kv, len(t.rows)) for t in fetch.receives}
        pending = self._fetch_exchange(fetch, sends, received)

        def wait() -> dict[int, _KeyValues]:
            pending.wait()
            kv = {owner: (message.tensors[0], message.tensors[1]) for owner, message in received.items()}
            return {owner: _KeyValues(kv[owner], message) for owner, message in received.items()}

        return wait

    def start_step(self, step: Step, own: _KeyValues, fetched: dict[int, _KeyValues] | None) -> Callable[[], KV]:
        within, sources = self._groups.within, {**(fetched or {}), self._plan.rank: own}
        sends: dict[int, Message] = {}
        for peer, transfers in _by_peer(step.sends).items():
            if len(transfers) == 1:
                sends[peer] = sources[transfers[0].owner].message(transfers[0].at, within)
                continue
            sends[peer] = Message(own.kv, sum(len(t.rows) for t in transfers), to=within)
            for transfer, views in zip(transfers, _views(transfers, sends), strict=True):
                sources[transfer.owner].copy_rows(transfer.at, views)
        received = self._buffers(step.receives, sends, own.kv)
        pending = self._step_exchange(step, sends, received)

        def wait() -> KV:
            pending.wait()
            if not received:
                return own.kv
            views = _views(step.receives, received)
            received.clear()
            return _sorted_keys(step, views)

        return wait

    def start_return(
        self, step: Step, grad: Message | None, own: list[Tensor], sums: dict[int, Message], fetch: Exchange | None
    ) -> Callable[[], None]:
        sends: dict[int, Message] = {}
        if len(step.receives) == 1:
            assert grad is not None
            sends[step.receives[0].peer] = grad
        elif grad is not None:
            assert isinstance(step.keys, GatheredKeys)
            sends = self._buffers(step.receives, {}, grad.tensors, to=self._groups.within)
            for i, views in enumerate(_views(step.receives, sends)):
                for x, view in zip(grad.tensors, views, strict=True):
                    step.keys.gather(i, x, view)
        # Gradients come from the ranks that K/V were sent to.
        received = self._buffers(step.sends, sends, own)
        pending = self._step_exchange(step, sends, received)
        fetched_rows = {t.owner: len(t.rows) for t in fetch.receives} if fetch is not None else {}

        def accumulate() -> None:
            pending.wait()
            for transfer, views in zip(step.sends, _views(step.sends, received), strict=True):
                owner, message = transfer.owner, received[transfer.peer]
                if owner == self._plan.rank:
                    _add_rows(transfer.rows, own, views)
                elif owner not in sums and len(transfer.at) == fetched_rows[owner] == message.rows:
                    sums[owner] = message
                else:
                    if owner not in sums:
                        sums[owner] = Message(own, fetched_rows[owner])
                        sums[owner].flat.zero_()
                    _add_rows(transfer.at, sums[owner].tensors, views)
            received.clear()

        return accumulate

    def start_fetch_return(self, fetch: Exchange, sums: dict[int, Message], own: list[Tensor]) -> Callable[[], None]:
        received = {t.peer: Message(own, len(t.rows)) for t in fetch.sends}
        pending = self._fetch_exchange(fetch, dict(sums), received)

        def accumulate() -> None:
            pending.wait()
            for transfer in fetch.sends:
                _add_rows(transfer.rows, own, received.pop(transfer.peer).tensors)

        return accumulate

    def _buffers(
        self,
        transfers: Sequence[Transfer],
        own: dict[int, Message],
        like: Sequence[Tensor],
        to: Ranks | None = None,
    ) -> dict[int, Message]:
        """By peer, an empty message for its transfers; for this rank itself, the message of ``own``, if it has one."""
        return {
            peer: own[peer]
            if peer == self._plan.rank and peer in own
            else Message(like, sum(len(t.rows) for t in part), to=to)
            for peer, part in _by_peer(transfers).items()
        }

    def _fetch_exchange(self, fetch: Exchange, sends: dict[int, Message], received: dict[int, Message]) -> Pending:
        """Exchange messages with ranks of other hosts, in the groups of the fetch."""
        size = self._plan.per_host
        return _exchange(fetch, sends, received, lambda peer: peer // size, self._groups.across)

    def _step_exchange(self, step: Step, sends: dict[int, Message], received: dict[int, Message]) -> Pending:
        """Exchange messages with ranks of this host, in the groups of the step."""
        size = self._plan.per_host
        return _exchange(step, sends, received, lambda peer: peer % size, self._groups.within)


class _Collectives:
    """All-gathers of all rows and reduce-scatters of all gradients, padded to the longest shard."""

    def __init__(self, plan: AttentionPlan, groups: AttentionGroups) -> None:
        self._plan, self._groups = plan, groups

    def start_fetch(self, fetch: Exchange, own: _KeyValues) -> Callable[[], Tensor]:
        assert self._groups.across is not None
        gathered, pending = start_all_gather(self._message(own), self._groups.across)  # [hosts, elements]

        def wait() -> Tensor:
            pending.wait()
            return gathered

        return wait

    def start_step(self, step: Step, own: _KeyValues, fetched: Tensor | None) -> Callable[[], KV]:
        assert self._groups.within is not None
        by_host = self._message(own)[None] if fetched is None else fetched  # [hosts, elements]
        memory = shared_memory(self._groups.within, by_host.device)
        gathered, pending = (  # [ranks of a host, hosts, elements]
            start_all_gather(by_host, self._groups.within)
            if memory is None
            else start_pulls(by_host, self._groups.within, memory)
        )
        views = [self._rank_of(gathered, t, own.kv).narrow(0, len(t.rows)) for t in step.receives]
        del by_host, fetched, gathered

        def wait() -> KV:
            pending.wait()
            return _sorted_keys(step, views) if views else own.kv

        return wait

    def start_return(
        self, step: Step, grad: Message | None, own: list[Tensor], sums: dict[int, Tensor], fetch: Exchange | None
    ) -> Callable[[], None]:
        plan, within = self._plan, self._groups.within
        assert within is not None
        elements = plan.longest * sum(x.shape[0] * x.shape[2] * x.shape[3] for x in own)
        by_rank = own[0].new_empty(plan.per_host, plan.hosts, elements)
        by_rank[plan.rank % plan.per_host, plan.rank // plan.per_host].zero_()  # accumulated in ``own`` already
        for i, transfer in enumerate(step.receives):
            assert grad is not None and isinstance(step.keys, GatheredKeys)
            views = self._rank_of(by_rank, transfer, own).narrow(0, len(transfer.rows))
            for x, view in zip(grad.tensors, views, strict=True):
                step.keys.gather(i, x, view)
        total, pending = start_reduce_scatter(by_rank, within)  # [hosts, elements]
        del by_rank

        def accumulate() -> None:
            pending.wait()
            if fetch is None:
                self._add(total[0], own)
            else:
                sums[plan.rank] = total

        return accumulate

    def start_fetch_return(self, fetch: Exchange, sums: dict[int, Tensor], own: list[Tensor]) -> Callable[[], None]:
        assert self._groups.across is not None
        total, pending = start_reduce_scatter(sums[self._plan.rank], self._groups.across)

        def accumulate() -> None:
            pending.wait()
            self._add(total, own)

        return accumulate

    def _message(self, own: _KeyValues) -> Tensor:
        """This rank's K/V, ``[elements]``."""
        return own.message(Selection(((0, own.kv[0].shape[1]),)), self._groups.within, self._plan.longest).flat

    def _rank_of(self, x: Tensor, transfer: Transfer, like: Sequence[Tensor]) -> Message:
        """What ``x [ranks of a host, hosts, elements]`` has of the owner of the rows."""
        host, local = divmod(transfer.owner, self._plan.per_host)
        return Message(like, self._plan.longest, flat=x[local, host])

    def _add(self, total: Tensor, own: list[Tensor]) -> None:
        """Add gradients ``total [elements]`` of this rank's K/V."""
        for x, received in zip(own, Message(own, self._plan.longest, flat=total).tensors, strict=True):
            x.add_(received[:, : x.shape[1]])


def _by_peer(transfers: Sequence[Transfer]) -> dict[int, list[Transfer]]:
    by_peer: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        by_peer.setdefault(transfer.peer, []).append(transfer)
    return by_peer


def _views(transfers: Sequence[Transfer], messages: dict[int, Message]) -> list[list[Tensor]]:
    """The rows of each transfer in the message of its peer, of each tensor."""
    views, offsets = [], dict.fromkeys(messages, 0)
    for transfer in transfers:
        message, offset = messages[transfer.peer], offsets[transfer.peer]
        views.append(message.narrow(offset, len(transfer.rows)))
        offsets[transfer.peer] += len(transfer.rows)
    return views


def _add_rows(rows: Selection, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Add ``values`` to the rows of ``targets``, tensor by tensor."""
    for target, x in zip(targets, values, strict=True):
        rows.add_to(target, x)


def _sorted_keys(step: Step, received: list[list[Tensor]]) -> KV:
    """The received rows of k and of v, each as one tensor that is sorted by position. Empties ``received``."""
    if not isinstance(step.keys, GatheredKeys) or len(received) == 1:
        k, v = received.pop()
        return k, v
    k, v = Message(received[0], len(step.keys)).tensors  # [b, k, n, d], [b, k, n, e]
    for i in range(len(step.receives)):
        for target, x in zip((k, v), received.pop(0), strict=True):
            step.keys.scatter(i, x, target)
    return k, v


def _exchange(
    planned: Exchange,
    sends: dict[int, Message],
    received: dict[int, Message],
    index: Callable[[int], int],
    ranks: Any,
) -> Pending:
    """Exchange messages in the planned groups of peers. ``index`` is that of a rank of the ring in ``ranks``."""
    groups = [
        exchange(
            [(index(peer), sends[peer].flat) for peer in peers if peer in sends],
            [(index(peer), received[peer].flat) for peer in peers if peer in received],
            ranks,
            borrow=True,
        )
        for peers in planned.groups
    ]
    # Also the message to this rank itself, which is not sent.
    return Pending.all(groups, [message.flat for message in (*sends.values(), *received.values())])
