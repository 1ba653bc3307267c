"""How the K/V of remote steps and their gradients are sent: as messages between pairs of ranks, or as collectives.

``remote.py`` decides when a message is sent, this file how. Where every rank needs all keys (``plan.dense``), both
levels of an exchange are collectives: an all-gather between hosts, then one inside each host; the gradients return by a
reduce-scatter inside each host, then one between hosts. Everywhere else they are messages between pairs of ranks.

Shapes: b batch, k keys of a step, n KV heads, d head_dim of q and k, e head_dim of v. A message holds k and v, or dk
and dv, of some rows: see ``Message``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.collectives import start_all_gather, start_reduce_scatter
from ..comm.p2p import Pending, exchange, new_message
from ..keys import GatheredKeys, Selection
from ..mesh import AttentionGroups, Ranks
from ..schedule import AttentionPlan, Exchange, Step, Transfer
from .call import AttentionCall

KV = tuple[Tensor, Tensor]


class Message:
    """A buffer that holds the same number of rows of several tensors, such as k and v, one tensor after the other.

    Attributes:
        flat: the buffer, ``[elements]``, which is sent.
        rows: how many rows of each tensor it holds.
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
        """A message of ``rows`` rows of tensors shaped as ``like``, in the buffer ``flat`` or in a new one.

        A new buffer of a message that is sent needs ``to``, the ranks to which it may be sent.
        """
        self._shapes = [(*x.shape[:-3], rows, *x.shape[-2:]) for x in like]
        self.rows = rows
        if flat is None:
            numel = sum(map(prod, self._shapes))
            flat = like[0].new_empty(numel, dtype=dtype) if to is None else new_message(numel, like[0], to, dtype)
        self.flat = flat

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Views ``[..., rows, n, d]`` of the buffer, one per tensor; they may differ in d. Make them after the message
        has arrived: in shared memory, the buffer is replaced by the one that the sender wrote."""
        parts = self.flat.split_with_sizes([prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def narrow(self, start: int, length: int) -> list[Tensor]:
        """Some of the rows of each tensor."""
        return [x.narrow(-3, start, length) for x in self.tensors]


class KeyValues:
    """K/V of one rank, all rows or some, and the message that holds all of these rows once there is one."""

    def __init__(self, kv: KV, message: Message | None = None) -> None:
        self.kv = kv  # [b, k, n, d], [b, k, n, e]
        self._all_rows = message

    def message(self, rows: Selection, to: Ranks | None, length: int | None = None) -> Message:
        """A message of ``rows``, to be sent to ranks of ``to``. With ``length`` it is padded to that many rows; the
        values of the padding are undefined."""
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
    """How K/V and their gradients are sent. The planner has an implementation that only records the messages."""

    def start_fetch(self, fetch: Exchange, own: KeyValues) -> Callable[[], Any]:
        """Start a fetch. The returned function waits for it, and returns the ``fetched`` of ``start_step``."""

    def start_step(self, step: Step, own: KeyValues, fetched: Any) -> Callable[[], KV]:
        """Start a step. The returned function waits for it, and returns the step's K/V; this rank's own K/V if the step
        has no keys for this rank."""

    def start_return(
        self, step: Step, grad: Message | None, own: list[Tensor], sums: dict[int, Any], fetch: Exchange | None
    ) -> Callable[[], None]:
        """Start to return a step's gradients. The returned function waits, and adds the received gradients.

        Args:
            step: the step.
            grad: the gradients of the step's keys: dk and dv, or one of them. None if the step has no keys.
            own: the gradients of this rank's K/V, ``[b, k, n, d]`` each.
            sums: by owner, the gradients of the rows that this rank has fetched.
            fetch: the fetch whose rows the step sends; None if the step sends the senders' own rows.
        """

    def start_fetch_return(self, fetch: Exchange, sums: dict[int, Any], own: list[Tensor]) -> Callable[[], None]:
        """Start to return the sums of a fetch to the owners. The returned function waits, and adds the received sums to
        ``own``."""


def transport_of(call: AttentionCall, device: torch.device) -> Transport:
    """How the messages of a call are sent."""
    # Ranks that share memory read one another's messages in place. An all-gather would copy them.
    collective = call.plan.dense and not call.shares_memory(device)
    return _Collectives(call.plan, call.groups) if collective else _Messages(call.plan, call.groups)


class _Messages:
    """Messages between pairs of ranks, each with only the rows that the receiver needs."""

    def __init__(self, plan: AttentionPlan, groups: AttentionGroups) -> None:
        self._plan, self._groups = plan, groups

    def start_fetch(self, fetch: Exchange, own: KeyValues) -> Callable[[], dict[int, KeyValues]]:
        sends = {t.peer: own.message(t.at, self._groups.across) for t in fetch.sends}
        received = {t.peer: Message(own.kv, len(t.rows)) for t in fetch.receives}
        pending = self._fetch_exchange(fetch, sends, received)

        def wait() -> dict[int, KeyValues]:
            pending.wait()
            kv = {owner: (message.tensors[0], message.tensors[1]) for owner, message in received.items()}
            return {owner: KeyValues(kv[owner], message) for owner, message in received.items()}

        return wait

    def start_step(self, step: Step, own: KeyValues, fetched: dict[int, KeyValues] | None) -> Callable[[], KV]:
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
        """By peer, an empty message for its transfers. For this rank itself: its message in ``own``, if it has one."""
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

    def start_fetch(self, fetch: Exchange, own: KeyValues) -> Callable[[], Tensor]:
        assert self._groups.across is not None
        gathered, pending = start_all_gather(self._message(own), self._groups.across)  # [hosts, elements]

        def wait() -> Tensor:
            pending.wait()
            return gathered

        return wait

    def start_step(self, step: Step, own: KeyValues, fetched: Tensor | None) -> Callable[[], KV]:
        assert self._groups.within is not None
        by_host = self._message(own)[None] if fetched is None else fetched  # [hosts, elements]
        gathered, pending = start_all_gather(by_host, self._groups.within)  # [ranks of a host, hosts, elements]
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
        by_rank[plan.rank % plan.per_host, plan.rank // plan.per_host].zero_()  # ``own`` has this rank's part
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

    def _message(self, own: KeyValues) -> Tensor:
        """This rank's K/V, ``[elements]``."""
        return own.message(Selection(((0, own.kv[0].shape[1]),)), self._groups.within, self._plan.longest).flat

    def _rank_of(self, x: Tensor, transfer: Transfer, like: Sequence[Tensor]) -> Message:
        """The message of the transfer's owner in ``x [ranks of a host, hosts, elements]``."""
        host, local = divmod(transfer.owner, self._plan.per_host)
        return Message(like, self._plan.longest, flat=x[local, host])

    def _add(self, total: Tensor, own: list[Tensor]) -> None:
        """Add ``total [elements]``, gradients of this rank's K/V, to ``own``."""
        for x, received in zip(own, Message(own, self._plan.longest, flat=total).tensors, strict=True):
            x.add_(received[:, : x.shape[1]])


def _by_peer(transfers: Sequence[Transfer]) -> dict[int, list[Transfer]]:
    by_peer: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        by_peer.setdefault(transfer.peer, []).append(transfer)
    return by_peer


def _views(transfers: Sequence[Transfer], messages: dict[int, Message]) -> list[list[Tensor]]:
    """For each transfer, views of its rows in the message of its peer: one view per tensor."""
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
    """k and v of all received rows, sorted by position. Empties ``received``."""
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
    """Exchange messages in the planned groups of peers. ``index`` maps a rank of the ring to its index in ``ranks``."""
    groups = [
        exchange(
            [(index(peer), sends[peer].flat) for peer in peers if peer in sends],
            [(index(peer), received[peer].flat) for peer in peers if peer in received],
            ranks,
        )
        for peers in planned.groups
    ]
    # The buffers include the message from this rank to itself, which is not sent.
    return Pending.all(groups, [message.flat for message in (*sends.values(), *received.values())])
