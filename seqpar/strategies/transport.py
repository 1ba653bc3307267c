"""How a ring sends K/V and their gradients: as messages between pairs of ranks, or as collectives.

Where every rank needs all keys (``plan.dense``), both hops are collectives: an all-gather between hosts and one inside
each host. Gradients return by a reduce-scatter inside each host and one between hosts. Each method of a transport
starts to send, and returns a function that waits.

Shapes: b batch, k keys of a step, n KV heads, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from operator import attrgetter, floordiv, mod
from typing import Any, NamedTuple

from torch import Tensor

from ..comm.collectives import start_all_gather, start_reduce_scatter
from ..comm.p2p import Link, Links, exchange, new_message
from ..comm.waiting import Pending
from ..schedule.plan import AttentionPlan
from ..schedule.program import ByPeer, Hop, Step, Transfer
from ..schedule.rows import NO_ROWS, GatheredRows, RowSpans

KV = tuple[Tensor, Tensor]  # [b, k, n, d], [b, k, n, e]
Wait = Callable[[], None]


class Message:
    """A buffer that holds the same number of rows of several tensors, such as k and v, one tensor after the other.

    Args:
        like: tensors of the same shapes, except for the number of rows.
        rows: how many rows of each tensor it holds.
        flat: the buffer ``[elements]``; by default a new one.
        to: the link over which a new buffer may be sent; None if it is not sent.
        longest: the rows of the longest shard. The memory of a new buffer has room for all of them, or for a half, a
            quarter, ... of them, so that messages of other masks can use it again.
    """

    def __init__(
        self, like: Sequence[Tensor], rows: int, *, flat: Tensor | None = None, to: Link | None = None, longest: int = 0
    ) -> None:
        self.rows, self._views = rows, list[Tensor]()
        self._form = form = _form(rows, longest, *map(_shape, like))
        if flat is None:
            if to is not None and to.memory is not None:
                flat = new_message(form.numel, like[0], to)
            else:
                flat = like[0].new_empty(form.room)
                if form.room > form.numel:
                    flat = flat[: form.numel]
        self.flat = flat

    @property
    def tensors(self) -> list[Tensor]:
        """Views ``[..., rows, n, d]`` of the buffer, one per tensor; they may differ in d. Make them after the message
        has arrived: in shared memory, the buffer is replaced by the one that the sender wrote."""
        if not self._views:
            flat = self.flat
            start = flat.storage_offset()
            self._views = [flat.as_strided(shape, stride, start + at) for shape, stride, at in self._form.parts]
        return self._views

    @property
    def kv(self) -> KV:
        k, v = self.tensors
        return k, v

    def narrow(self, start: int, rows: int) -> list[Tensor]:
        return self.tensors if rows == self.rows else [x.narrow(-3, start, rows) for x in self.tensors]


_shape = attrgetter("shape")


class _Form(NamedTuple):
    """How a message is divided, in elements.

    Attributes:
        parts: of each tensor, the shape, the strides and the place in the message.
        numel: of the message.
        room: of the memory of a new message.
    """

    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    numel: int
    room: int


@lru_cache(maxsize=128)
def _form(rows: int, longest: int, *like: Sequence[int]) -> _Form:
    """The form of a message of ``rows`` rows of tensors of the shapes ``like`` (see ``Message``)."""
    parts, numel = [], 0
    for shape in like:
        shape = *shape[:-3], rows, *shape[-2:]
        parts.append((shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), numel))
        numel += prod(shape)
    room = longest >> (longest // rows).bit_length() - 1 if 0 < rows < longest else rows
    return _Form(tuple(parts), numel, numel // rows * room if rows else numel)


class KeyValues:
    """Rows of k and v of one owner, the message that holds all of these rows once there is one, and the last message of
    some of them."""

    def __init__(self, kv: KV, message: Message | None = None) -> None:
        self.kv = kv  # [b, k, n, d], [b, k, n, e]
        self._message, self._last = message, (NO_ROWS, message)

    def message(self, rows: RowSpans, to: Link | None, longest: int, *, padded: bool = False) -> Message:
        """A message of ``rows``, to be sent over ``to``; ``padded`` with zeros to the ``longest`` shard."""
        full, (last, message) = rows.count == self.kv[0].shape[1], self._last
        if full:
            message = self._message
        if message is not None and (full or rows == last):
            return message
        message = Message(self.kv, longest if padded else rows.count, to=to, longest=longest)
        if message.rows > rows.count:
            message.flat.zero_()  # TORCH_NCCL_NAN_CHECK=1 looks at the padding too
        rows.copy_to(message.narrow(0, rows.count), self.kv)
        if full:
            self._message = message  # every step of the ring sends it again
        else:
            self._last = rows, message  # under a zigzag layout, all earlier ranks need the same half
        return message


class PeerToPeer:
    """Messages between pairs of ranks, each with only the rows that the receiver needs."""

    def __init__(self, plan: AttentionPlan, links: Links) -> None:
        self._plan, self.link, self._across = plan, links.within, links.across

    def send_inter_host(self, step: Step, local: KeyValues) -> Callable[[], Any]:
        """Send this rank's rows ``local`` to other hosts. The function returns what ``send_intra_host`` needs."""
        assert step.inter_host is not None
        incoming, pending = self._send_rows(step.inter_host, {self._plan.rank: local}, self._across)

        def wait() -> dict[int, KeyValues]:
            pending.wait()
            return {owner: KeyValues(message.kv, message) for owner, message in incoming.items()}

        return wait

    def send_intra_host(self, step: Step, local: KeyValues, host_kv: Any) -> Callable[[], KV]:
        """Send the rows of a step inside the host: ``local``, or rows ``host_kv`` that an inter-host hop has brought.

        The function returns the step's K/V; ``local`` in a step without keys for this rank.
        """
        sources = {self._plan.rank: local} if step.inter_host is None else {**host_kv, self._plan.rank: local}
        incoming, pending = self._send_rows(step.intra_host, sources, self.link)

        def wait() -> KV:
            pending.wait()
            views = _views(step.intra_host.received, incoming)
            incoming.clear()
            return _step_kv(step, views, local)

        return wait

    def return_intra_host(
        self, step: Step, partial: Message | None, dkv: Sequence[Tensor], sums: dict[int, Any]
    ) -> Wait:
        """Send the gradients of a step inside the host, from where its K/V went to where they came from.

        Args:
            step: the step.
            partial: the gradients of its K/V, dk and dv or one of them; None in a step without keys.
            dkv: the gradients of this rank's K/V, to which the function adds received gradients.
            sums: by owner, the gradients of rows of other hosts, to which the function adds received gradients.
        """
        hop, outgoing = step.intra_host, dict[int, Message]()
        if partial is not None and len(hop.receives) == 1:
            outgoing[hop.receives[0].peer] = partial
        elif isinstance(step.keys, GatheredRows) and partial is not None:
            outgoing = {peer: Message(dkv, rows, to=self.link) for peer, rows in hop.received.rows.items()}
            for i, views in enumerate(_views(hop.received, outgoing)):
                step.keys.gather(i, partial.tensors, views)
        incoming, pending = self._exchange(hop, outgoing, hop.sent, dkv, self.link)
        host_rows = {t.owner: t.owner_rows.count for t in step.inter_host.receives} if step.inter_host else {}

        def accumulate() -> None:
            pending.wait()
            for transfer, views in zip(hop.sends, _views(hop.sent, incoming), strict=True):
                owner, message = transfer.owner, incoming[transfer.peer]
                if owner == self._plan.rank:
                    transfer.owner_rows.add_to(dkv, views)
                elif owner not in sums and transfer.sender_rows.count == message.rows == host_rows[owner]:
                    sums[owner] = message
                else:
                    if owner not in sums:
                        sums[owner] = Message(dkv, host_rows[owner])
                        sums[owner].flat.zero_()
                    transfer.sender_rows.add_to(sums[owner].tensors, views)
            incoming.clear()

        return accumulate

    def return_inter_host(self, step: Step, sums: dict[int, Any], dkv: Sequence[Tensor]) -> Wait:
        """Send the ``sums`` of gradients to the owners. The function adds the received sums to ``dkv``."""
        assert step.inter_host is not None
        hop = step.inter_host
        incoming, pending = self._exchange(hop, dict(sums), hop.sent, dkv, self._across)

        def accumulate() -> None:
            pending.wait()
            for transfer in hop.sends:
                transfer.owner_rows.add_to(dkv, incoming.pop(transfer.peer).tensors)

        return accumulate

    def _send_rows(
        self, hop: Hop, sources: dict[int, KeyValues], link: Link | None
    ) -> tuple[dict[int, Message], Pending]:
        """Start a hop whose rows are in ``sources``, by owner. Returns the received messages, by peer."""
        kv, outgoing, longest = sources[self._plan.rank].kv, dict[int, Message](), self._plan.longest
        if len(hop.sent.rows) == len(hop.sends):  # one transfer to each peer
            for transfer in hop.sends:
                outgoing[transfer.peer] = sources[transfer.owner].message(transfer.sender_rows, link, longest)
        else:
            outgoing = {peer: Message(kv, rows, to=link, longest=longest) for peer, rows in hop.sent.rows.items()}
            for transfer, views in zip(hop.sends, _views(hop.sent, outgoing), strict=True):
                transfer.sender_rows.copy_to(views, sources[transfer.owner].kv)
        return self._exchange(hop, outgoing, hop.received, kv, link)

    def _exchange(
        self,
        hop: Hop,
        outgoing: dict[int, Message],
        receipt: ByPeer,
        like: Sequence[Tensor],
        link: Link | None,
    ) -> tuple[dict[int, Message], Pending]:
        """Exchange messages in the hop's rounds of peers. A message of this rank to itself is not sent."""
        rank, size, longest = self._plan.rank, self._plan.per_host, self._plan.longest
        incoming = {
            p: outgoing[p] if p == rank else Message(like, rows, longest=longest) for p, rows in receipt.rows.items()
        }
        index = mod if link is self.link else floordiv  # of a peer among the ranks of ``link``
        rounds = []
        for peers in hop.rounds:
            sends = [(index(peer, size), outgoing[peer].flat) for peer in peers if peer in outgoing]
            receives = [(index(peer, size), incoming[peer].flat) for peer in peers if peer in incoming]
            rounds.append(exchange(sends, receives, link))
        if len(rounds) == 1 and rank not in incoming:
            return incoming, rounds[0]
        return incoming, Pending.all(rounds, [message.flat for message in (*outgoing.values(), *incoming.values())])


class Collectives:
    """All-gathers of all rows and reduce-scatters of all gradients, padded to the longest shard."""

    def __init__(self, plan: AttentionPlan, links: Links) -> None:
        assert links.within is not None
        self._plan, self.link, self._across = plan, links.within, links.across

    def send_inter_host(self, step: Step, local: KeyValues) -> Callable[[], Any]:
        assert self._across is not None
        gathered, pending = start_all_gather(self._message(local), self._across)  # [hosts, elements]

        def wait() -> Tensor:
            pending.wait()
            return gathered

        return wait

    def send_intra_host(self, step: Step, local: KeyValues, host_kv: Any) -> Callable[[], KV]:
        by_host = self._message(local)[None] if step.inter_host is None else host_kv  # [hosts, elements]
        gathered, pending = start_all_gather(by_host, self.link)  # [ranks of a host, hosts, elements]
        views = [self._rows_of(t, gathered, local.kv) for t in step.intra_host.receives]
        del by_host, host_kv, gathered

        def wait() -> KV:
            pending.wait()
            return _step_kv(step, views, local)

        return wait

    def return_intra_host(
        self, step: Step, partial: Message | None, dkv: Sequence[Tensor], sums: dict[int, Any]
    ) -> Wait:
        plan = self._plan
        elements = plan.longest * sum(x.shape[0] * x.shape[2] * x.shape[3] for x in dkv)
        padded = any(transfer.owner_rows.count < plan.longest for transfer in step.intra_host.receives)
        by_rank = (dkv[0].new_zeros if padded else dkv[0].new_empty)(plan.per_host, plan.hosts, elements)
        by_rank[plan.rank % plan.per_host, plan.rank // plan.per_host].zero_()  # ``dkv`` has this rank's part
        for i, transfer in enumerate(step.intra_host.receives):
            assert partial is not None and isinstance(step.keys, GatheredRows)
            step.keys.gather(i, partial.tensors, self._rows_of(transfer, by_rank, dkv))
        total, pending = start_reduce_scatter(by_rank, self.link)  # [hosts, elements]
        del by_rank

        def accumulate() -> None:
            pending.wait()
            if step.inter_host is None:
                self._add(total[0], dkv)
            else:
                sums[plan.rank] = total

        return accumulate

    def return_inter_host(self, step: Step, sums: dict[int, Any], dkv: Sequence[Tensor]) -> Wait:
        assert self._across is not None
        total, pending = start_reduce_scatter(sums[self._plan.rank], self._across)

        def accumulate() -> None:
            pending.wait()
            self._add(total, dkv)

        return accumulate

    def _message(self, local: KeyValues) -> Tensor:
        return local.message(RowSpans(((0, local.kv[0].shape[1]),)), self.link, self._plan.longest, padded=True).flat

    def _rows_of(self, transfer: Transfer, x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """The rows of the transfer's owner in ``x [ranks of a host, hosts, elements]``."""
        host, local = divmod(transfer.owner, self._plan.per_host)
        return Message(like, self._plan.longest, flat=x[local, host]).narrow(0, transfer.owner_rows.count)

    def _add(self, total: Tensor, dkv: Sequence[Tensor]) -> None:
        for x, sums in zip(dkv, Message(dkv, self._plan.longest, flat=total).tensors, strict=True):
            x.add_(sums[:, : x.shape[1]])


Transport = PeerToPeer | Collectives


def _views(transfers: ByPeer, messages: dict[int, Message]) -> list[list[Tensor]]:
    """For each transfer, views of its rows in the message of its peer: one view per tensor."""
    return [messages[peer].narrow(start, rows) for peer, start, rows in transfers.places]


def _step_kv(step: Step, incoming: list[list[Tensor]], local: KeyValues) -> KV:
    """k and v of all received rows, sorted by position; ``local`` if there are none. Empties ``incoming``."""
    if not incoming:
        return local.kv
    if len(incoming) == 1:
        k, v = incoming.pop()
        return k, v
    assert isinstance(step.keys, GatheredRows)
    message = Message(incoming[0], len(step.keys))
    for i in range(len(incoming)):
        step.keys.scatter(i, incoming.pop(0), message.tensors)
    return message.kv
