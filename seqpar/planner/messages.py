"""The messages and kernels of one rank, recorded on a ``Timeline`` instead of sent and computed.

``RecordedTransport``, ``RecordedHeadExchange`` and ``RecordedRun`` stand in for the transport of a ring, the
``HeadExchange`` of Ulysses and the ``Run`` with the kernels. The runtime's own loops call them, so the messages have
the order and the sizes of a training step.

Shapes: b batch, s tokens of this rank, t tokens of the Ulysses group, k keys of a step, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from ..comm.p2p import Links
from ..comm.waiting import Pending
from ..kernels.base import OutputGrad, Score
from ..kernels.document_tiles import OutputTiles, TileKernels
from ..masks.mask import Mask
from ..placement.heads import Heads
from ..placement.layout import CPU, TokenLayout
from ..schedule.document_tiles import TileGroup, pairs_computed
from ..schedule.plan import AttentionPlan
from ..schedule.program import Hop, Step
from ..strategies.call import AttentionCall, Carries, Run
from ..strategies.head_exchange import HeadChunk, HeadExchange, Incoming
from ..strategies.head_messages import HeadSlices, row_widths
from ..strategies.invariant import Invariant, RankTiles, rank_tiles
from ..strategies.local import Kernel
from ..strategies.row_exchange import RowPlan
from ..strategies.transport import KV, KeyValues, Message, PeerToPeer, Wait
from .rank import RankTimeline, Sizes


class RecordedTransport(PeerToPeer):
    """A transport that records the K/V and the gradients that a rank of a ring sends and receives.

    Args:
        recorder: the rank.
        plan: the plan of its attention.
    """

    def __init__(self, recorder: RankTimeline, plan: AttentionPlan) -> None:
        super().__init__(plan, Links())
        self._recorder = recorder

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
        if self._plan.dense:  # every rank sends what it receives
            sent = received = self._collective(stream, row_bytes)
            bandwidth_within = self._recorder.split.hardware.all_gather
        else:
            sent, received = (
                [(transfer.peer, len(transfer.owner_rows) * row_bytes) for transfer in transfers]
                for transfers in (hop.sends, hop.receives)
            )
        if is_return:
            sent, received = received, sent
        number = self._recorder.start(name, stream, "ring", sent, received, bandwidth_within)
        return lambda: self._recorder.timeline.wait(number)

    def _collective(self, stream: str, row_bytes: float) -> Sizes:
        """What this rank sends in an all-gather: its longest possible shard, to each peer.

        The first hop gathers over the ranks of other hosts. The second gathers the shards of all hosts inside the host.
        """
        plan, size = self._plan, self._plan.longest * row_bytes
        if stream == "ring":
            first = plan.rank // plan.per_host * plan.per_host
            return [(peer, size * plan.hosts) for peer in range(first, first + plan.per_host)]
        return [(peer, size) for peer in range(plan.rank % plan.per_host, plan.tokens.ring, plan.per_host)]


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
        recorder: the rank.
    """

    _: KW_ONLY
    recorder: RankTimeline

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
        recorder, bandwidth = self.recorder, self.recorder.split.hardware.all_to_all
        recorder.compute("pack", nbytes=2 * sum(sent))  # one read and one write
        number = recorder.start(name, "all-to-all", "ulysses", enumerate(sent), enumerate(received), bandwidth)

        def arrived() -> Tensor:
            recorder.timeline.wait(number)
            recorder.compute("unpack", nbytes=2 * sum(received))
            return result

        return Incoming(Pending(), arrived)


class RecordedInvariant(Invariant):
    """The algorithm of ``deterministic="invariant"``, whose messages and kernels are recorded.

    Args:
        recorder: the rank.
    """

    def __init__(self, recorder: RankTimeline) -> None:
        self._recorder = recorder

    def tiles(self, call: AttentionCall, group: int, q: Tensor) -> RankTiles:
        mask, tokens = self._recorder.split.mask, call.placement.tokens
        return _counted_tiles((mask.head_groups or (mask,))[group], tokens, call.placement.rank, q.shape[0])

    def kernels(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> TileKernels:
        return _RecordedTiles(self._recorder)

    def start(self, plan: RowPlan, call: AttentionCall, *messages: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        recorder, numbers = self._recorder, []
        for tensors in messages:
            row_bytes = sum(x.shape[2:].numel() * x.element_size() for x in tensors)
            sent, received = ([n * row_bytes for n in rows] for rows in (plan.sends, plan.receives))
            sizes, bandwidth = (enumerate(sent), enumerate(received)), recorder.split.hardware.all_to_all
            recorder.compute("pack", nbytes=2 * sum(sent))  # one read and one write
            numbers.append(recorder.start("rows of tiles", "all-to-all", "ring", *sizes, bandwidth))

        def wait() -> list[Tensor]:
            recorder.timeline.wait(*numbers)
            found = [x.new_empty(1, len(plan.index), *x.shape[2:]) for tensors in messages for x in tensors]
            recorder.compute("unpack", nbytes=4 * sum(x.nbytes for x in found))  # joined, and put into tiles
            return found

        return wait


@lru_cache(maxsize=256)  # each way to recompute asks for them
def _counted_tiles(mask: Mask, tokens: TokenLayout, rank: int, batch: int) -> RankTiles:
    """The tiles of a rank, without data. Instead of what queries see, they have the pairs that a kernel computes."""
    found, meta = rank_tiles(tokens, rank, mask.parts(tokens.seq_len), mask.cuts, batch, CPU), torch.device("meta")

    def counted(groups: tuple[TileGroup, ...]) -> Any:
        return tuple(group._replace(parts=cast(Any, [*map(pairs_computed, group.parts)])) for group in groups)

    tensors = found.index.to(meta), found.rows.to(meta), found.keys.on(meta), found.queries.on(meta)
    return RankTiles(*tensors, counted(found.seen), counted(found.seeing))


class _RecordedTiles:
    """Kernels of tiles that are recorded.

    A tile of scores is a product of q and k (d). Forward multiplies its weights by v (e). Backward multiplies dout by v
    (e) and the gradient of the scores by k for dq (d); and again for dk (d) and dv (e), which also need dout by v.
    """

    def __init__(self, recorder: RankTimeline) -> None:
        self._recorder = recorder

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Any, score: Score) -> tuple[Tensor, Tensor]:
        self._record("attend", seen, q, q.shape[3] + v.shape[3])
        return q.new_empty(*q.shape[:3], v.shape[3]), self._statistics(q)

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        self._recorder.compute("delta", nbytes=out.nbytes + dout.nbytes)
        return self._statistics(out)

    def query_gradients(self, q: Tensor, k: Tensor, v: Tensor, output: OutputTiles, seen: Any, score: Score) -> Tensor:
        self._record("dq", seen, q, 2 * q.shape[3] + v.shape[3])
        return q

    def key_gradients(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputTiles, seen: Any, score: Score
    ) -> tuple[Tensor, Tensor]:
        self._record("dk, dv", seen, q, 2 * (q.shape[3] + v.shape[3]))
        return k, v

    def _statistics(self, like: Tensor) -> Tensor:
        return like.new_empty(1, like.shape[2], like.shape[1], dtype=torch.float32)

    def _record(self, name: str, seen: Any, q: Tensor, width: int) -> None:
        s = self._recorder.split
        rate = s.hardware.rate(s.kernel)
        flops = 2.0 * sum(seen) * q.shape[2] * width
        seconds = flops / (rate.forward if name == "attend" else rate.backward)
        self._recorder.timeline.compute(name, len(seen) * s.hardware.kernel + seconds)


class _NoGradient:
    """Stands in for a gradient that is added to a tensor without data: the sum is that tensor.

    The sum of two tensors on the meta device would import PyTorch's compiler, which is slow.
    """

    def __radd__(self, x: Tensor) -> Tensor:
        return x


class _NoKernel(Kernel):
    """Computes nothing."""

    def __init__(self, v_head_dim: int) -> None:
        self.v_head_dim = v_head_dim

    def output_grad(self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> OutputGrad:
        return OutputGrad(dout, out, lse, None)

    def dsinks(self, output: OutputGrad) -> None:
        return None


class RecordedRun(Run):
    """A run whose kernels are recorded instead of computed.

    Args:
        call, heads: as in ``Run``.
        k, v: ``[b, k, n, d]`` and ``[b, k, n, e]``, without data.
        transport: records the messages.
        record: records the kernel of a step of a plan, for a number of heads.
    """

    adds_dkv = False  # whether dk and dv are added to the chunk before, which has the same K/V

    def __init__(
        self,
        call: AttentionCall,
        heads: Heads,
        k: Tensor,
        v: Tensor,
        transport: RecordedTransport,
        record: Callable[[str, AttentionPlan, Step, int, bool], None],
    ) -> None:
        self.kv_ready, self.plan, self.transport, self._record = call.kv_ready, call.plan, transport, record
        self.heads, self.program = heads, call.program(heads, k, v)
        self.steps, self.plans = self.program.steps, self.program.plans or (self.plan,)
        self.kernel = _NoKernel(call.v_head_dim(v.shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, carries: Carries | None) -> Carries:
        if step.attends:
            self._record("attend", self.plans[step.group], step, len(step.q_heads or self.heads.queries), False)
        return carries or [
            (q.new_empty(*q.shape[:3], self.kernel.v_head_dim), q.new_empty(q.shape[0], q.shape[2], q.shape[1]))
        ]

    def new_gradients(self, q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
        return [dq, _NoGradient(), _NoGradient()] if self.adds_dkv else [dq, dk, dv]

    def backward(self, q: Tensor, k: Tensor, v: Tensor, output: OutputGrad, step: Step, *grads: Any) -> None:
        if step.attends:
            heads = len(step.q_heads or self.heads.queries)
            self._record("gradients of", self.plans[step.group], step, heads, True)
