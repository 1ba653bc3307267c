"""The messages of one rank, recorded on a ``Timeline`` instead of sent.

``RecordedTransport`` and ``RecordedHeadExchange`` stand in for the transport of a ring and the ``HeadExchange`` of
Ulysses. The runtime's own loops call them, so the messages have the order and the sizes of a training step.

Shapes: b batch, s tokens of this rank, t tokens of the Ulysses group, k keys of a step, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..comm.p2p import Links
from ..comm.waiting import Pending
from ..schedule.plan import AttentionPlan
from ..schedule.program import Hop, Step, Transfer
from ..strategies.head_exchange import HeadChunk, HeadExchange, Incoming
from ..strategies.head_messages import HeadSlices, row_widths
from ..strategies.transport import KV, KeyValues, Message, PeerToPeer, Wait
from .setting import BETWEEN, LEVELS, WITHIN, Setting
from .simulate import Timeline

Messages = Sequence[tuple[str, float]]  # the level and the bytes of each message of an exchange


@dataclass(frozen=True)
class RankPlace:
    """The coordinates of the simulated rank in its replica.

    Attributes:
        setting: how the ranks are split.
        ring, ulysses, tensor: the index of the rank along each dimension.
    """

    setting: Setting
    ring: int
    ulysses: int
    tensor: int

    @property
    def among_all(self) -> RankPlace:
        """The rank in an all-to-all over all ranks of the sequence."""
        s = self.setting
        return RankPlace(replace(s, ring=1, ulysses=s.ring * s.ulysses), 0, self.ring * s.ulysses + self.ulysses, 0)

    def level_to(self, ring: int | None = None, ulysses: int | None = None, tensor: int | None = None) -> str:
        """The level of the link to a peer, whose coordinates are this rank's except for the given ones."""
        peer = (
            self.ring if ring is None else ring,
            self.ulysses if ulysses is None else ulysses,
            self.tensor if tensor is None else tensor,
        )
        own_host = self.setting.host(self.ring, self.ulysses, self.tensor)
        return WITHIN if self.setting.host(*peer) == own_host else BETWEEN

    def start(
        self,
        timeline: Timeline,
        name: str,
        stream: str,
        sent: Messages,
        received: Messages,
        bandwidth_within: float | None = None,
        rounds: int = 1,
    ) -> int | None:
        """Record messages that this rank sends and receives in one exchange, and count the bytes that it sends.

        A link is used for as long as the larger direction of the exchange takes.

        Args:
            timeline: the timeline that records the exchange.
            name: what is sent.
            stream: the communicator, whose exchanges run one after another.
            sent, received: the level and the bytes of each message.
            bandwidth_within: bytes/s inside the host, for a collective. By default the bandwidth of point-to-point
                messages to as many peers.
            rounds: how many of the messages are sent one after another, each with its latency.

        Returns:
            The number of the transfer for ``timeline.wait``; None if there is nothing to transfer.
        """
        hardware = self.setting.hardware
        sent_bytes, received_bytes = _bytes_by_level(sent), _bytes_by_level(received)
        for level, size in sent_bytes.items():
            timeline.sent[level] += int(size)
        links = {}
        if size := max(sent_bytes[WITHIN], received_bytes[WITHIN]):
            peers = max(1, *(sum(level == WITHIN for level, _ in messages) for messages in (sent, received)))
            links[WITHIN] = size / min(bandwidth_within or hardware.p2p, hardware.peer * peers)
        if size := max(sent_bytes[BETWEEN], received_bytes[BETWEEN]):
            links[BETWEEN] = size / hardware.network
        return timeline.start(name, stream, links, rounds * hardware.latency)


def _bytes_by_level(messages: Messages) -> dict[str, float]:
    totals = dict.fromkeys(LEVELS, 0.0)
    for level, size in messages:
        totals[level] += size
    return totals


class RecordedTransport(PeerToPeer):
    """A transport that records the K/V and the gradients that a rank of a ring sends and receives.

    Args:
        timeline: the timeline that records the messages.
        place: the rank.
        plan: the plan of its attention.
    """

    def __init__(self, timeline: Timeline, place: RankPlace, plan: AttentionPlan) -> None:
        super().__init__(plan, Links())
        self._timeline, self._place = timeline, place

    def send_inter_host(self, step: Step, local: KeyValues) -> Callable[[], Any]:
        return self._start("k, v between hosts", "ring across hosts", step.inter_host, _row_bytes(local.kv))

    def send_intra_host(self, step: Step, local: KeyValues, arrived: Any) -> Callable[[], KV]:
        wait = self._start("k, v", "ring", step.intra_host, _row_bytes(local.kv))

        def wait_for_kv() -> KV:
            wait()
            return local.kv  # has no data: stands in for the K/V that would have been received

        return wait_for_kv

    def return_intra_host(
        self, step: Step, partial: Message | None, dkv: Sequence[Tensor], sums: dict[int, Any]
    ) -> Wait:
        return self._start("dk, dv", "ring", step.intra_host, _row_bytes(dkv), is_return=True)

    def return_inter_host(self, step: Step, sums: dict[int, Any], dkv: Sequence[Tensor]) -> Wait:
        return self._start("sums of dk, dv", "ring across hosts", step.inter_host, _row_bytes(dkv), is_return=True)

    def _start(self, name: str, stream: str, hop: Hop | None, row_bytes: float, is_return: bool = False) -> Wait:
        """Record a hop of the plan. A return sends the gradients of the rows that the hop received."""
        assert hop is not None
        bandwidth_within = None
        if self._plan.dense:
            sent = self._collective(stream, row_bytes)
            received = sent  # every rank sends what it receives
            bandwidth_within = self._place.setting.hardware.all_gather
        else:
            sent, received = (self._messages(x, row_bytes) for x in (hop.sends, hop.receives))
        if is_return:
            sent, received = received, sent
        number = self._place.start(self._timeline, name, stream, sent, received, bandwidth_within)
        return lambda: self._timeline.wait(number)

    def _collective(self, stream: str, row_bytes: float) -> Messages:
        """What this rank sends in an all-gather: its longest possible shard, to each peer.

        The first hop gathers over the ranks of other hosts. The second gathers the shards of all hosts inside the host.
        """
        plan, size = self._plan, self._plan.longest * row_bytes
        if stream == "ring":
            first = plan.rank // plan.per_host * plan.per_host
            peers, size = range(first, first + plan.per_host), size * plan.hosts
        else:
            peers = range(plan.rank % plan.per_host, plan.tokens.ring, plan.per_host)
        return [(self._place.level_to(ring=peer), size) for peer in peers if peer != plan.rank]

    def _messages(self, transfers: tuple[Transfer, ...], row_bytes: float) -> Messages:
        return [
            (self._place.level_to(ring=transfer.peer), len(transfer.owner_rows) * row_bytes)
            for transfer in transfers
            if transfer.peer != self._plan.rank
        ]


def _row_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of one row (one token of every batch row) of tensors ``[b, k, n, d]`` that are sent together."""
    return sum(x.nbytes for x in tensors) // max(1, tensors[0].shape[-3])


@dataclass(frozen=True)
class SimulatedRanks:
    """Stands in for a process group: ``index`` is this rank, ``count`` the number of ranks."""

    count: int
    index: int

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.index


@dataclass(frozen=True)
class RecordedHeadExchange(HeadExchange):
    """A ``HeadExchange`` that records its all-to-alls, and the copies that pack and unpack the messages.

    Attributes:
        timeline: the timeline that records the messages.
        place: the rank, a ``RankPlace``. It has a default only because the fields of ``HeadExchange`` before it do.
    """

    timeline: Timeline = field(default_factory=Timeline)
    place: Any = None

    def to_heads(self, chunk: HeadChunk, x: Tensor, *kv: Tensor) -> Incoming:
        widths = row_widths(chunk.parts(x, *kv))
        element_bytes = x.shape[0] * x.element_size()  # of one element of a token, in all batch rows
        sent = [self.tokens * width * element_bytes for width in widths]
        received = [length * widths[self.rank] * element_bytes for length in self.lengths]
        head_shard = x.new_empty(sum(self.lengths), x.shape[0], widths[self.rank])  # [t, b, w]
        return self._start("to heads", sent, received, head_shard)

    def to_sequence(self, slices: HeadSlices, *tensors: tuple[Tensor, Tensor]) -> Incoming:
        head_shard, sequence_shard = tensors[0]
        head_bytes = head_shard.shape[0] * sum(x.shape[3] for x, _ in tensors) * head_shard.element_size()
        sent = [length * head_shard.shape[2] * head_bytes for length in self.lengths]
        received = [self.tokens * count * head_bytes for count in slices.counts]
        return self._start("to sequence", sent, received, sequence_shard)

    def _start(self, name: str, sent: list[int], received: list[int], result: Tensor) -> Incoming:
        """Record an all-to-all of ``sent[peer]`` and ``received[peer]`` bytes. ``result`` is what it returns."""
        place: RankPlace = self.place
        hardware = place.setting.hardware
        self.timeline.compute("pack", 2 * sum(sent) / hardware.memory_bandwidth)  # one read and one write
        to_peers, from_peers = (
            [(place.level_to(ulysses=peer), float(size)) for peer, size in enumerate(sizes) if peer != self.rank]
            for sizes in (sent, received)
        )
        number = place.start(self.timeline, name, "all-to-all", to_peers, from_peers, hardware.all_to_all)

        def arrived() -> Tensor:
            self.timeline.wait(number)
            self.timeline.compute("unpack", 2 * sum(received) / hardware.memory_bandwidth)
            return result

        return Incoming(Pending(), arrived)
