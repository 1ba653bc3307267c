"""One transformer layer on one rank as a timeline: what the runtime computes and sends, in the order it issues it.

Attention runs the runtime's own loops. ``RemoteSteps`` and ``Returns`` (``strategies/remote.py``) decide when a message
of the plan is sent. ``ulysses_forward`` and ``ulysses_backward`` (``strategies/ulysses.py``) decide when an all-to-all
is sent. Here they are called with tensors without data (torch's "meta" device), and with a ``Transport`` and a
``HeadExchange`` that record bytes and send nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..comm.p2p import Pending
from ..heads import Heads
from ..kernels.cpu import computed_pairs as computed_by_cpu
from ..keys import ShardKeys
from ..layout import CPU, Layout, SequenceSharding
from ..mask import Mask
from ..mesh import AttentionGroups, ranks_per_host
from ..schedule import AttentionPlan, Exchange, Step, Transfer
from ..strategies.call import AttentionCall
from ..strategies.head_exchange import HeadChunk, HeadExchange, HeadSlices, Incoming, row_width
from ..strategies.remote import RemoteSteps, Returns, of_heads
from ..strategies.ring import halves
from ..strategies.sequence_chunks import pieces_of_chunk
from ..strategies.transport import KV, Message
from ..strategies.ulysses import chunk_limit
from ..strategies.ulysses import ulysses_backward as run_ulysses_backward
from ..strategies.ulysses import ulysses_forward as run_ulysses_forward
from .hardware import Hardware
from .model import ModelShape
from .pairs import all_pairs, computed_pairs
from .simulate import Timeline

WITHIN, BETWEEN = "within_host", "between_hosts"  # the levels of links
LEVELS = (WITHIN, BETWEEN)
# With AdamW in mixed precision: 2 for the weight, 4 + 8 for its float32 copy and moments, 4 for the gradient (ALST,
# arXiv 2506.13996).
STATE_BYTES = 18.0
_META = torch.device("meta")
_E = 2  # bytes of an element in bfloat16


@dataclass(frozen=True)
class Setting:
    """How one replica of a model is computed.

    Rank order as in ``init_mesh``: tensor fastest, then ulysses, then ring, then the replicas.

    Attributes:
        model: the shape of the model.
        hardware: the GPUs and links.
        mask: which keys each query sees.
        seq_len: tokens of a sequence.
        batch: sequences that a replica computes at a time.
        ring, ulysses, tensor: ranks along each dimension.
        replicas: data-parallel replicas. Weights are sharded over all ranks (ZeRO-3, FSDP).
        layout: which positions each rank holds.
        gather: whether the ring's K/V are received in one step.
        kernel: the attention kernel; None is the first one of the hardware.
        state_bytes: bytes per weight for the weight, its gradient and the state of the optimizer.
        dtype: the dtype of q, k and v.
    """

    model: ModelShape
    hardware: Hardware
    mask: Mask
    seq_len: int
    batch: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    replicas: int = 1
    layout: Layout = "contiguous"
    gather: bool = False
    kernel: str | None = None
    state_bytes: float = STATE_BYTES
    dtype: torch.dtype = torch.bfloat16

    @property
    def sequence_ranks(self) -> int:
        """Ranks that the sequence is sharded over."""
        return self.ring * self.ulysses * self.tensor

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.sequence_ranks * self.replicas

    @property
    def sharding(self) -> SequenceSharding:
        return SequenceSharding(self.seq_len, self.layout, self.ring, self.ulysses, self.tensor)

    @property
    def tokens(self) -> int:
        """Tokens of the rank with the longest shard, of all its sequences."""
        return -(-self.seq_len // self.sequence_ranks) * self.batch

    def host(self, ring: int, ulysses: int, tensor: int) -> int:
        """The host of a rank of the first replica."""
        return ((ring * self.ulysses + ulysses) * self.tensor + tensor) // self.hardware.gpus_per_host

    def ring_per_host(self, ulysses: int = 0, tensor: int = 0) -> int:
        """How many consecutive ranks of a ring share a host, as ``AttentionGroups.per_host``."""
        hosts: dict[int, list[int]] = {}
        for rank in range(self.ring):
            hosts.setdefault(self.host(rank, ulysses, tensor), []).append(rank)
        return ranks_per_host([tuple(ranks) for ranks in hosts.values()])

    def slowest_ring_rank(self) -> int:
        """The ring rank whose queries see the most keys."""
        if self.ring == 1:
            return 0
        pairs = _pairs_by_rank(self.mask, self.seq_len, self.layout, self.ring)
        return max(range(self.ring), key=pairs.__getitem__)

    def imbalance(self) -> float:
        """The pairs of the slowest ring rank, divided by the mean."""
        pairs = _pairs_by_rank(self.mask, self.seq_len, self.layout, self.ring)
        return max(pairs) * len(pairs) / max(1, sum(pairs))


@lru_cache(maxsize=256)
def _pairs_by_rank(mask: Mask, seq_len: int, layout: Layout, ring: int) -> list[int]:
    """The visible pairs of each ring rank. Ranks that share its tokens move the borders by a few tokens at most."""
    sharding = SequenceSharding(seq_len, layout, ring)
    return [all_pairs(mask, seq_len, sharding.ring_positions(rank)) for rank in range(ring)]


@dataclass(frozen=True)
class _Place:
    """One rank, and the hosts of those that it exchanges messages with."""

    setting: Setting
    ring: int
    ulysses: int
    tensor: int

    def level(self, ring: int | None = None, ulysses: int | None = None, tensor: int | None = None) -> str:
        """The level of the links to the rank that differs from this one as given."""
        at = (
            self.ring if ring is None else ring,
            self.ulysses if ulysses is None else ulysses,
            self.tensor if tensor is None else tensor,
        )
        own = self.setting.host(self.ring, self.ulysses, self.tensor)
        return WITHIN if self.setting.host(*at) == own else BETWEEN

    def start(
        self,
        timeline: Timeline,
        name: str,
        stream: str,
        sent: Sequence[tuple[str, float]],
        received: Sequence[tuple[str, float]],
        within: float | None = None,
    ) -> int | None:
        """Messages that are sent and received together.

        Args:
            timeline: where they are noted.
            name: what is sent.
            stream: the communicator.
            sent, received: the level and the bytes of each message.
            within: bytes/s within the host; by default those of messages to so many peers.
        """
        hardware = self.setting.hardware
        totals, peers = dict.fromkeys(LEVELS, 0.0), 1
        for messages in (sent, received):
            by_level, near = dict.fromkeys(LEVELS, 0.0), 0
            for level, size in messages:
                by_level[level] += size
                near += level == WITHIN
            peers = max(peers, near)
            for level, size in by_level.items():
                totals[level] = max(totals[level], size)
                if messages is sent:
                    timeline.sent[level] += int(size)
        links = {}
        if totals[WITHIN]:
            links[WITHIN] = totals[WITHIN] / min(within or hardware.p2p, hardware.peer * peers)
        if totals[BETWEEN]:
            links[BETWEEN] = totals[BETWEEN] / hardware.network
        return timeline.start(name, stream, links, hardware.latency)


class _RingMessages:
    """A ``Transport`` that records the messages instead of sending them."""

    def __init__(self, timeline: Timeline, place: _Place, plan: AttentionPlan) -> None:
        self._timeline, self._place, self._plan = timeline, place, plan

    def start_fetch(self, fetch: Exchange, own: Any) -> Callable[[], Any]:
        return self._start("fetch", "ring across hosts", fetch, _row_bytes(own.kv))

    def start_step(self, step: Step, own: Any, fetched: Any) -> Callable[[], KV]:
        wait = self._start("k, v", "ring", step, _row_bytes(own.kv))

        def waited() -> KV:
            wait()
            kv: KV = own.kv
            return kv

        return waited

    def start_return(
        self, step: Step, grad: Message | None, own: list[Tensor], sums: dict[int, Any], fetch: Exchange | None
    ) -> Callable[[], None]:
        return self._start("dk, dv", "ring", step, _row_bytes(own), back=True)

    def start_fetch_return(self, fetch: Exchange, sums: dict[int, Any], own: list[Tensor]) -> Callable[[], None]:
        return self._start("sums of dk, dv", "ring across hosts", fetch, _row_bytes(own), back=True)

    def _start(self, name: str, stream: str, planned: Exchange, row: float, back: bool = False) -> Callable[[], None]:
        plan, place = self._plan, self._place
        within = None
        if plan.dense:
            size = plan.longest * row
            if isinstance(planned, Step):
                first = plan.rank // plan.per_host * plan.per_host
                peers, size = [r for r in range(first, first + plan.per_host) if r != plan.rank], size * plan.hosts
            else:
                peers = list(range(plan.rank % plan.per_host, plan.sharding.ring, plan.per_host))
                peers.remove(plan.rank)
            sent = [(place.level(ring=peer), size) for peer in peers]
            received = list(sent)
            within = place.setting.hardware.all_gather
        else:
            sent, received = (self._messages(x, row) for x in (planned.sends, planned.receives))
        if back:
            sent, received = received, sent
        number = place.start(self._timeline, name, stream, sent, received, within)
        return lambda: self._timeline.wait(number)

    def _messages(self, transfers: tuple[Transfer, ...], row: float) -> list[tuple[str, float]]:
        others = [t for t in transfers if t.peer != self._plan.rank]
        return [(self._place.level(ring=t.peer), len(t.rows) * row) for t in others]


def _row_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of a message's row of tensors ``[b, rows, n, d]``."""
    return sum(x.nbytes for x in tensors) // max(1, tensors[0].shape[-3])


@dataclass(frozen=True)
class _Rank:
    """The size of a group and a rank of it, without the group."""

    count: int
    index: int

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.index


@dataclass(frozen=True)
class _HeadMessages(HeadExchange):
    """A ``HeadExchange`` that records the messages instead of sending them."""

    timeline: Timeline = field(default_factory=Timeline)
    place: Any = None

    def to_heads(self, chunk: HeadChunk, x: Tensor, *kv: Tensor) -> Incoming:
        _, _, dims, counts = chunk.to_send(x, *kv)
        widths = [row_width(count, dims) for count in counts]
        one = x.shape[0] * x.element_size()
        sent = [self.tokens * w * one for w in widths]
        received = [length * widths[self.rank] * one for length in self.lengths]
        shard = x.new_empty(sum(self.lengths), x.shape[0], widths[self.rank])
        return self._start("to heads", sent, received, shard, sum(sent))

    def to_sequence(self, slices: HeadSlices, *tensors: tuple[Tensor, Tensor]) -> Incoming:
        shard, target = tensors[0]
        one = shard.shape[0] * sum(x.shape[3] for x, _ in tensors) * shard.element_size()
        sent = [length * shard.shape[2] * one for length in self.lengths]
        received = [self.tokens * w * one for w in slices.counts]
        return self._start("to sequence", sent, received, target, sum(sent))

    def _start(self, name: str, sent: list[int], received: list[int], result: Tensor, packed: int) -> Incoming:
        place, bandwidth = self.place, self.place.setting.hardware.memory_bandwidth
        self.timeline.compute("pack", 2 * packed / bandwidth)
        messages = [
            [(place.level(ulysses=peer), float(n)) for peer, n in enumerate(x) if peer != self.rank]
            for x in (sent, received)
        ]
        number = place.start(self.timeline, name, "all-to-all", *messages, within=place.setting.hardware.all_to_all)

        def arrived() -> Tensor:
            self.timeline.wait(number)
            self.timeline.compute("unpack", 2 * sum(received) / bandwidth)
            return result

        return Incoming(Pending(), arrived)


class RankTimeline:
    """What one rank issues.

    Args:
        setting: how the replica is computed.
        ring_rank: the rank in the ring; by default the slowest.
        ulysses_rank, tensor_rank: likewise; rank 0 has the most heads.
    """

    def __init__(
        self, setting: Setting, ring_rank: int | None = None, ulysses_rank: int = 0, tensor_rank: int = 0
    ) -> None:
        s = setting
        self.setting = s
        ring_rank = s.slowest_ring_rank() if ring_rank is None else ring_rank
        self._place = _Place(s, ring_rank, ulysses_rank, tensor_rank)
        per_host = s.ring_per_host(ulysses_rank, tensor_rank)
        self._plan = AttentionPlan(s.mask, s.sharding, ring_rank, s.gather, per_host)
        self._heads = Heads.of_model(s.model.heads, s.model.kv_heads).split(s.tensor)[tensor_rank]
        self._rate = s.hardware.rate(s.kernel)
        score: Any = None
        groups = AttentionGroups(gather=s.gather)
        self._call = AttentionCall(groups, s.sharding, self._plan, score, "auto", False, self._heads, False)
        rank = ring_rank * s.ulysses + ulysses_rank
        self._tokens = len(s.sharding._positions(rank * s.tensor, s.tensor))
        self._own_tokens = len(s.sharding._positions(rank * s.tensor + tensor_rank, 1)) * s.batch

    @cached_property
    def _pairs(self) -> dict[int, float]:
        """By step, the pairs of this rank's queries that are computed."""
        s, plan = self.setting, self._plan
        if s.hardware.device == "cpu":  # its kernel computes other tiles than those of GPUs
            with _disable_current_modes():  # the tiles are read from tensors, also where the caller's have no data
                intervals = {i: plan.intervals(i, CPU) for i in range(len(plan))}
                return {i: computed_by_cpu(x) for i, x in intervals.items() if x is not None}
        shards = [s.sharding.ring_positions(rank) for rank in range(s.ring)]
        by_owner = computed_pairs(s.mask, s.seq_len, shards[plan.rank], shards, s.hardware.tile)
        pairs: dict[int, float] = {}
        for i, step in enumerate(plan):
            if isinstance(step.keys, ShardKeys):
                pairs[i] = by_owner[step.receives[0].owner if i else plan.rank]
            elif step.keys is not None:
                pairs[i] = sum(by_owner[t.owner] for t in step.receives)
        return pairs

    def _attend(self, timeline: Timeline, name: str, step: int, heads: Heads, backward: bool) -> None:
        """A kernel."""
        if (pairs := self._pairs.get(step)) is None or not heads.queries:
            return
        s = self.setting
        d, e = s.model.head_dim, s.model.v_head_dim or s.model.head_dim
        width = 3 * d + 2 * e if backward else d + e
        flops = 2.0 * pairs * s.batch * len(heads.queries) * width
        rate = self._rate.backward if backward else self._rate.forward
        timeline.compute(name, s.hardware.kernel + flops / rate)
        if step and not self._rate.carries:
            elements = self._tokens * s.batch * len(heads.queries) * (d if backward else e)
            # Of each element of out, or dq: the step's, and the float32 result read and written.
            timeline.compute("merge", (s.dtype.itemsize + 4 + 4) * elements / s.hardware.memory_bandwidth)

    def _ring_forward(self, timeline: Timeline, heads: Heads, k: Tensor, v: Tensor) -> None:
        """``ring_forward`` without its tensors."""
        remote = RemoteSteps(self._call, heads, k, v, _RingMessages(timeline, self._place, self._plan))
        self._attend(timeline, "attend own", 0, heads, False)
        for _, part, i, *_ in remote:
            self._attend(timeline, f"attend step {i}", i, part, False)

    def _ring_backward(self, timeline: Timeline, heads: Heads, k: Tensor, v: Tensor) -> None:
        """``ring_backward`` without its tensors."""
        messages = _RingMessages(timeline, self._place, self._plan)
        remote = RemoteSteps(self._call, heads, k, v, messages)
        dkv = [torch.empty_like(x, dtype=torch.float32) for x in (k, v)]
        first, *rest = [heads] if all(step.is_local for step in self._plan) else halves(heads)
        self._attend(timeline, "gradients of own", 0, first, True)
        returns = Returns(self._call, messages)
        for _, part, i, *_ in remote:
            self._attend(timeline, f"gradients of step {i}", i, part, True)
            at = part.kv_in(heads)
            returns.start(i, [], [of_heads(x, at) for x in dkv])
        for part in rest:
            self._attend(timeline, "gradients of own", 0, part, True)
        returns.finish()

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        s = self.setting
        heads = (len(self._heads.queries), len(self._heads.kv), len(self._heads.kv))
        dims = (s.model.head_dim, s.model.head_dim, s.model.v_head_dim or s.model.head_dim)
        shapes = ((s.batch, self._tokens, n, dim) for n, dim in zip(heads, dims, strict=True))
        q, k, v = (torch.empty(shape, dtype=s.dtype, device=_META) for shape in shapes)
        return q, k, v

    def attention(self, timeline: Timeline, backward: bool = False) -> None:
        """Attention with its communication, forward or backward."""
        s = self.setting
        q, k, v = self._tensors()
        if s.ulysses == 1:
            (self._ring_backward if backward else self._ring_forward)(timeline, self._heads, k, v)
            return
        most = chunk_limit(s.sharding, q.shape, s.hardware.device)
        ranks: Any = _Rank(s.ulysses, self._place.ulysses)
        # What backward reads of the forward has the shapes that a forward gives it.
        scratch = Timeline() if backward else timeline
        exchange = _HeadMessages(
            ranks, s.sharding, self._place.ring, self._heads, most, timeline=scratch, place=self._place
        )

        def attend(heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            if not backward:
                self._ring_forward(timeline, heads, k, v)
            return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(
                q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32
            )

        last_kv: Tensor | None = None

        def attend_backward(heads: Heads, dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
            nonlocal last_kv
            self._ring_backward(timeline, heads, k, v)
            dq, dk, dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v))
            again, last_kv = k is last_kv, k  # a chunk that reads the K/V of the one before
            return dq, *((_Added(), _Added()) if again else (dk, dv)), None

        _, *saved = run_ulysses_forward(exchange, attend, q, k, v, v.shape[3])
        if backward:
            exchange = _with_timeline(exchange, timeline)
            if exchange.shares_kv:
                saved += [k, v]
            dout = q.new_empty(*q.shape[:3], v.shape[3])
            run_ulysses_backward(exchange, attend_backward, saved, dout, None, q.shape, k.shape, v.shape)

    # The rest of a layer

    def _memory_bound(self, timeline: Timeline, name: str, elements: float) -> None:
        """Operations that read or write ``elements`` for each of this rank's tokens."""
        timeline.compute(name, elements * self._own_tokens * _E / self.setting.hardware.memory_bandwidth)

    def _gemm(self, inputs: float, outputs: float) -> float:
        """Seconds of the product of all tokens of the tensor-parallel ranks, by this rank's share of a weight."""
        s = self.setting
        return 2.0 * self._own_tokens * inputs * outputs / s.hardware.gemm_flops

    def _chunk(self, timeline: Timeline, step: int) -> list[int | None]:
        """Send a chunk of tokens to the tensor-parallel rank ``step`` after this one, piece by piece."""
        s, place = self.setting, self._place
        pieces = pieces_of_chunk(s.tensor)
        size = self._own_tokens * s.model.hidden * _E / pieces
        target, source = (place.level(tensor=(place.tensor + x) % s.tensor) for x in (step, -step))
        return [
            place.start(timeline, "tokens", "tensor", [(target, size)], [(source, size)], s.hardware.p2p)
            for _ in range(pieces)
        ]

    def _gather_gemm(self, timeline: Timeline, name: str, seconds: float, reduce: float = 0.0) -> None:
        """All-gather of the tokens; the GEMMs of each chunk overlap with the transfer of the next chunk.

        With ``reduce``, GEMMs before those whose partial outputs are sent as soon as they are computed.
        """
        tensor = self.setting.tensor
        sends: list[int | None] = []
        incoming: list[int | None] = []
        for step in range(1, tensor + 1):
            current = incoming
            incoming = self._chunk(timeline, step) if step < tensor else []
            if reduce:
                sends = self._partial(timeline, name, step % tensor, reduce / tensor, sends)
            pieces = current or [None]
            for number in pieces:
                timeline.wait(number)
                timeline.compute(name, seconds / tensor / len(pieces))
        timeline.wait(*sends)

    def _partial(
        self, timeline: Timeline, name: str, step: int, seconds: float, before: list[int | None]
    ) -> list[int | None]:
        if step == 0:
            timeline.compute(name, seconds)
            return before
        pieces = pieces_of_chunk(self.setting.tensor)
        sends = []
        size = self._own_tokens * self.setting.model.hidden * _E / pieces
        place = self._place
        target, source = (place.level(tensor=(place.tensor + x) % self.setting.tensor) for x in (step, -step))
        for _ in range(pieces):
            timeline.compute(name, seconds / pieces)
            sends.append(place.start(timeline, "partial outputs", "tensor", [(target, size)], [(source, size)]))
        timeline.wait(*before)
        return sends

    def _columns(self, timeline: Timeline, name: str, seconds: float, backward: bool = False) -> None:
        """A column-parallel linear layer; ``seconds`` of its GEMM over the tokens of all tensor-parallel ranks."""
        if self.setting.tensor == 1:
            timeline.compute(name, seconds * (2 if backward else 1))
        elif backward:
            self._gather_gemm(timeline, name, seconds, reduce=seconds)
        else:
            self._gather_gemm(timeline, name, seconds)

    def _rows(self, timeline: Timeline, name: str, seconds: float, backward: bool = False) -> None:
        """A row-parallel linear layer."""
        tensor = self.setting.tensor
        if tensor == 1:
            timeline.compute(name, seconds * (2 if backward else 1))
        elif backward:
            self._gather_gemm(timeline, name, 2 * seconds)
        else:
            sends: list[int | None] = []
            for step in (*range(1, tensor), 0):
                sends = self._partial(timeline, name, step, seconds / tensor, sends)
            timeline.wait(*sends)

    def _mlp_gemms(self) -> tuple[float, float]:
        """Seconds of the GEMMs into and out of the MLP."""
        m = self.setting.model
        one = self._gemm(m.hidden, m.mlp_width)
        return one * (2 if m.gated else 1), one

    def mlp_seconds(self) -> float:
        """Seconds of the GEMMs of the MLP, forward."""
        return sum(self._mlp_gemms())

    def forward(self, timeline: Timeline, attention: bool = True) -> None:
        """A layer; without ``attention``, all of it but attention."""
        m = self.setting.model
        self._memory_bound(timeline, "norm", 2 * m.hidden)
        self._columns(timeline, "q, k, v", self._gemm(m.qkv_parameters, 1))
        self._memory_bound(timeline, "rotary", 2 * (m.d + m.d_kv))
        if attention:
            self.attention(timeline)
        self._rows(timeline, "output projection", self._gemm(m.d_out, m.hidden))
        self._memory_bound(timeline, "residual, norm", 5 * m.hidden)
        into, out = self._mlp_gemms()
        self._columns(timeline, "MLP", into)
        self._memory_bound(timeline, "activation", (3 if m.gated else 2) * m.mlp_width)
        self._rows(timeline, "MLP", out)
        self._memory_bound(timeline, "residual", 3 * m.hidden)

    def backward(self, timeline: Timeline) -> None:
        """The backward of a layer."""
        m = self.setting.model
        into, out = self._mlp_gemms()
        self._rows(timeline, "MLP", out, True)
        self._memory_bound(timeline, "activation", (5 if m.gated else 3) * m.mlp_width)
        self._columns(timeline, "MLP", into, True)
        self._memory_bound(timeline, "residual, norm", 8 * m.hidden)
        self._rows(timeline, "output projection", self._gemm(m.d_out, m.hidden), True)
        self.attention(timeline, True)
        self._memory_bound(timeline, "rotary", 2 * (m.d + m.d_kv))
        self._columns(timeline, "q, k, v", self._gemm(m.qkv_parameters, 1), True)
        self._memory_bound(timeline, "residual, norm", 5 * m.hidden)


def attention_seconds(setting: Setting, backward: bool = True) -> float:
    """Seconds of attention alone on the slowest rank, forward and, with ``backward``, backward."""
    rank, seconds = RankTimeline(setting), 0.0
    for is_backward in (False, True)[: 1 + backward]:
        timeline = Timeline()
        rank.attention(timeline, is_backward)
        seconds += timeline.run().seconds
    return seconds


class _Added:
    """What is added to a tensor without data: nothing. Adding two of these would import PyTorch's compiler."""

    def __radd__(self, x: Tensor) -> Tensor:
        return x


def _with_timeline(exchange: _HeadMessages, timeline: Timeline) -> _HeadMessages:
    return _HeadMessages(
        exchange.group,
        exchange.sharding,
        exchange.ring_rank,
        exchange.heads,
        exchange.max_chunks,
        timeline=timeline,
        place=exchange.place,
    )


def parameter_links(setting: Setting, sent: float) -> Mapping[str, float]:
    """Seconds by link of an all-gather (or reduce-scatter) of ``sent`` bytes of weights over all ranks.

    A tensor-parallel rank gathers its share. Between hosts, the bytes cross once a host, over all of its links.
    """
    s, hardware = setting, setting.hardware
    hosts = -(-s.ranks // hardware.gpus_per_host)
    each = max(1, min(s.ranks, hardware.gpus_per_host) // s.tensor)
    return {
        WITHIN: sent * (each - 1) / each / hardware.all_gather,
        BETWEEN: sent * (hosts - 1) / hosts / each / hardware.network,
    }
