"""The attention of one layer on one rank as a timeline: its kernels and messages, in the order the runtime issues them.

Attention runs the runtime's own loops. ``RemoteSteps`` and ``Returns`` (``strategies/remote.py``) decide when a message
of the plan is sent. ``ulysses_forward`` and ``ulysses_backward`` (``strategies/ulysses.py``) decide when an all-to-all
is sent. Here they are called with tensors without data (torch's "meta" device), and their messages are recorded
(``messages.py``).

Shapes: b batch, s tokens of this rank, k keys of a step, h query heads, n KV heads, d head_dim of q and k, e head_dim
of v.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..heads import Heads
from ..kernels.cpu import computed_pairs as pairs_computed_on_cpu
from ..keys import ShardKeys
from ..layout import CPU
from ..mesh import AttentionGroups
from ..schedule import AttentionPlan
from ..strategies.call import AttentionCall
from ..strategies.head_exchange import chunk_limit
from ..strategies.remote import RemoteSteps, Returns, of_heads
from ..strategies.ring import halves
from ..strategies.ulysses import ulysses_backward, ulysses_forward
from .messages import RankPlace, RecordedHeadExchange, RecordedTransport, SimulatedRanks
from .pairs import computed_pairs
from .setting import FLOAT32_BYTES
from .simulate import Timeline

_META = torch.device("meta")


class AttentionTimeline:
    """Records the attention of one rank on a ``Timeline``.

    Args:
        place: the rank, and how the ranks are split.
    """

    def __init__(self, place: RankPlace) -> None:
        s = place.setting
        self._setting, self._place = s, place
        per_host = s.ring_per_host(place.ulysses, place.tensor)
        self._plan = AttentionPlan(s.mask, s.sharding, place.ring, s.gather, per_host)
        self._heads = Heads.of_model(s.model.heads, s.model.kv_heads).split(s.tensor)[place.tensor]
        self._rate = s.hardware.rate(s.kernel)
        groups = AttentionGroups(gather=s.gather)
        score: Any = None  # only a kernel would read it
        self._call = AttentionCall(groups, s.sharding, self._plan, score, "auto", False, self._heads, False)
        # Under tensor parallelism, each rank attends with some of the heads to the tokens of all tensor-parallel ranks.
        first_rank = (place.ring * s.ulysses + place.ulysses) * s.tensor
        self._tokens = len(s.sharding._positions(first_rank, s.tensor))

    def record(self, timeline: Timeline, backward: bool = False) -> None:
        """Record the forward of attention, or its backward, with all messages."""
        q, k, v = self._qkv()
        if self._setting.ulysses > 1:
            self._record_ulysses(timeline, q, k, v, backward)
        elif backward:
            self._ring_backward(timeline, self._heads, k, v)
        else:
            self._ring_forward(timeline, self._heads, k, v)

    def _qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q [b, s, h, d]``, ``k [b, s, n, d]`` and ``v [b, s, n, e]`` of this rank, without data."""
        s = self._setting
        heads = (len(self._heads.queries), len(self._heads.kv), len(self._heads.kv))
        dims = (s.model.head_dim, s.model.head_dim, s.model.v_head_dim or s.model.head_dim)
        shapes = ((s.batch, self._tokens, n, dim) for n, dim in zip(heads, dims, strict=True))
        q, k, v = (torch.empty(shape, dtype=s.dtype, device=_META) for shape in shapes)
        return q, k, v

    # The ring

    def _ring_forward(self, timeline: Timeline, heads: Heads, k: Tensor, v: Tensor) -> None:
        """The loop of ``ring_forward`` (``strategies/ring.py``), without its kernels' results."""
        transport = RecordedTransport(timeline, self._place, self._plan)
        remote = RemoteSteps(self._call, heads, k, v, transport)
        self._kernel(timeline, "attend own", 0, heads, backward=False)
        for _, part, i, *_ in remote:
            self._kernel(timeline, f"attend step {i}", i, part, backward=False)

    def _ring_backward(self, timeline: Timeline, heads: Heads, k: Tensor, v: Tensor) -> None:
        """The loop of ``ring_backward`` (``strategies/ring.py``), without its kernels' results."""
        transport = RecordedTransport(timeline, self._place, self._plan)
        remote = RemoteSteps(self._call, heads, k, v, transport)
        own_dkv = [torch.empty_like(x, dtype=torch.float32) for x in (k, v)]
        first, *rest = [heads] if all(step.is_local for step in self._plan) else halves(heads)
        self._kernel(timeline, "gradients of own", 0, first, backward=True)
        returns = Returns(self._call, transport)
        for _, part, i, *_ in remote:
            self._kernel(timeline, f"gradients of step {i}", i, part, backward=True)
            kv_heads = part.kv_in(heads)
            returns.start(i, [], [of_heads(x, kv_heads) for x in own_dkv])
        for part in rest:
            self._kernel(timeline, "gradients of own", 0, part, backward=True)
        returns.finish()

    def _kernel(self, timeline: Timeline, name: str, step: int, heads: Heads, backward: bool) -> None:
        """Record the kernel of one step, and the merge of its result where the kernel cannot carry."""
        pairs = self._pairs_by_step.get(step)
        if pairs is None or not heads.queries:
            return
        s = self._setting
        d, e = s.model.head_dim, s.model.v_head_dim or s.model.head_dim
        # Forward multiplies q by k (d) and the weights by v (e). Backward multiplies for the scores, dq and dk (3 d),
        # and for dv and the gradient of the weights (2 e).
        width = 3 * d + 2 * e if backward else d + e
        flops = 2.0 * pairs * s.batch * len(heads.queries) * width
        rate = self._rate.backward if backward else self._rate.forward
        timeline.compute(name, s.hardware.kernel + flops / rate)
        if step and not self._rate.carries:
            # For each element of out (in backward, of dq): the merge reads the step's result, and reads and writes the
            # float32 result of all steps so far.
            elements = self._tokens * s.batch * len(heads.queries) * (d if backward else e)
            nbytes = (s.dtype.itemsize + 2 * FLOAT32_BYTES) * elements
            timeline.compute("merge", nbytes / s.hardware.memory_bandwidth)

    @cached_property
    def _pairs_by_step(self) -> dict[int, float]:
        """For each step with keys, the pairs of a query and a key that the kernel computes for one head."""
        s, plan = self._setting, self._plan
        if s.hardware.device == "cpu":  # the CPU kernel computes other tiles than the kernels of GPUs
            with _disable_current_modes():  # the tiles are read from tensors, which a FakeTensorMode would empty
                intervals = {i: plan.intervals(i, CPU) for i in range(len(plan))}
                return {i: pairs_computed_on_cpu(x) for i, x in intervals.items() if x is not None}
        shards = [s.sharding.ring_positions(rank) for rank in range(s.ring)]
        by_owner = computed_pairs(s.mask, s.seq_len, shards[plan.rank], shards, s.hardware.tile)
        pairs: dict[int, float] = {}
        for i, step in enumerate(plan):
            if isinstance(step.keys, ShardKeys):
                pairs[i] = by_owner[step.receives[0].owner if i else plan.rank]
            elif step.keys is not None:
                pairs[i] = sum(by_owner[transfer.owner] for transfer in step.receives)
        return pairs

    # Ulysses, with or without a ring across its groups

    def _record_ulysses(self, timeline: Timeline, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> None:
        """Run ``ulysses_forward``, and for the backward ``ulysses_backward``, with recorded messages.

        The backward needs the tensors that the forward has saved. In that case the messages and kernels of the forward
        are recorded nowhere: its exchange has a timeline of its own, which is dropped.
        """
        s = self._setting

        def attend(heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            if not backward:
                self._ring_forward(timeline, heads, k, v)
            out = q.new_empty(*q.shape[:3], v.shape[3])  # [b, t, h, e]
            return out, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)  # lse [b, h, t]

        max_chunks = chunk_limit(s.sharding, q.shape, s.hardware.device)
        exchange = self._head_exchange(Timeline() if backward else timeline, max_chunks)
        _, *saved = ulysses_forward(exchange, attend, q, k, v, v.shape[3])
        if not backward:
            return

        previous_k: Tensor | None = None

        def attend_backward(heads: Heads, dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
            nonlocal previous_k
            self._ring_backward(timeline, heads, k, v)
            dq, dk, dv = (x.new_empty(x.shape, dtype=torch.float32) for x in (q, k, v))
            shares_kv, previous_k = k is previous_k, k  # with the chunk before, whose dk and dv these are added to
            return dq, *((_NoGradient(), _NoGradient()) if shares_kv else (dk, dv)), None

        exchange = self._head_exchange(timeline, max_chunks)
        if exchange.shares_kv:
            saved += [k, v]
        dout = q.new_empty(*q.shape[:3], v.shape[3])
        ulysses_backward(exchange, attend_backward, saved, dout, None, q.shape, k.shape, v.shape)

    def _head_exchange(self, timeline: Timeline, max_chunks: int) -> RecordedHeadExchange:
        s, place = self._setting, self._place
        ranks: Any = SimulatedRanks(s.ulysses, place.ulysses)
        return RecordedHeadExchange(
            ranks, s.sharding, place.ring, self._heads, max_chunks, timeline=timeline, place=place
        )


class _NoGradient:
    """Stands in for a gradient that is added to a tensor without data: the sum is that tensor.

    The sum of two tensors on the meta device would import PyTorch's compiler, which is slow.
    """

    def __radd__(self, x: Tensor) -> Tensor:
        return x
