"""The attention of one layer on one rank as a timeline: its kernels and messages, in the order the runtime issues them.

The runtime's own loops run here: ``ring_forward`` and ``ring_backward``, and for an all-to-all ``ulysses_forward`` and
``ulysses_backward``. They are called with tensors without data (torch's "meta" device). ``RecordedRun`` prices the
kernel of each step, and ``messages.py`` the messages.

Shapes: b batch, s tokens of this rank, k keys of a step, h query heads, n KV heads, d head_dim of q and k, e head_dim
of v.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.base import OutputGrad
from ..kernels.cpu import pairs_computed_on_cpu
from ..masks.mask import Mask
from ..placement.heads import Heads
from ..placement.layout import CPU, TokenLayout
from ..placement.placement import Placement
from ..schedule.plan import AttentionPlan
from ..schedule.program import Step
from ..sharding.spec import AttentionSpec
from ..strategies.call import AttentionCall, Carries, Run
from ..strategies.head_exchange import chunk_limit
from ..strategies.latent import LatentKeys
from ..strategies.local import Kernel
from ..strategies.ring import ring_backward, ring_forward
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
        self._plan = AttentionPlan(s.mask, s.tokens, place.ring, s.gather, per_host)
        m = s.model
        self._heads = Heads.of_model(m.heads, m.sent_kv_heads).split(s.tensor)[place.tensor]
        self._rate = s.hardware.rate(s.kernel)
        ulysses: Any = SimulatedRanks(s.ulysses, place.ulysses)
        ring: Any = SimulatedRanks(s.ring, place.ring)
        self._placement = Placement(None, ring, ulysses, s.gather, tokens=s.tokens)
        score: Any = None  # only a kernel would read it
        latent = None
        if m.kv_rank:
            weight = torch.empty(m.heads, m.head_dim - m.shared_dim + m.v_head_dim, m.kv_rank, device=_META)
            latent = LatentKeys(weight, m.head_dim - m.shared_dim)
        self._call = AttentionCall(self._placement, self._plan, AttentionSpec(), self._heads, score, latent=latent)
        # Under tensor parallelism, each rank attends with some of the heads to the tokens of all tensor-parallel ranks.
        first_rank = (place.ring * s.ulysses + place.ulysses) * s.tensor
        self._tokens = len(s.tokens._positions(first_rank, s.tensor))

    def record(self, timeline: Timeline, backward: bool = False) -> None:
        """Record the forward of attention, or its backward, with all messages."""
        q, k, v = self._qkv()
        if self._setting.ulysses > 1:
            self._record_ulysses(timeline, q, k, v, backward)
            return
        run = self._run(timeline, self._heads, q, k, v)
        if backward:
            ring_backward(run, q, None, q, k, v, q, q)
        else:
            ring_forward(run, q, k, v)

    def _qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q [b, s, h, d]``, ``k [b, s, n, d]`` and ``v [b, s, n, e]`` of this rank, without data; with latent
        attention, k are the latents and v the rotated keys."""
        s, m = self._setting, self._setting.model
        heads = (len(self._heads.queries), len(self._heads.kv), len(self._heads.kv))
        sent = (m.kv_rank, m.shared_dim) if m.kv_rank else (m.head_dim, m.v_head_dim or m.head_dim)
        dims = (m.head_dim, *sent)
        shapes = ((s.batch, self._tokens, n, dim) for n, dim in zip(heads, dims, strict=True))
        q, k, v = (torch.empty(shape, dtype=s.dtype, device=_META) for shape in shapes)
        return q, k, v

    def _run(self, timeline: Timeline, heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> RecordedRun:
        transport = RecordedTransport(timeline, self._place, self._plan)
        return RecordedRun(self._call, heads, k, v, transport, partial(self._kernel, timeline))

    def _kernel(self, timeline: Timeline, name: str, step: Step, heads: int, backward: bool) -> None:
        """Record the kernel of one step, and the merge of its result where the kernel cannot carry."""
        s, pairs = self._setting, self._pairs_by_step[step.index]
        name = f"{name} step {step.index}" if step.index else f"{name} own"
        d, e = s.model.head_dim, s.model.v_head_dim or s.model.head_dim
        # Forward multiplies q by k (d) and the weights by v (e). Backward multiplies for the scores, dq and dk (3 d),
        # and for dv and the gradient of the weights (2 e).
        width = 3 * d + 2 * e if backward else d + e
        flops = 2.0 * pairs * s.batch * heads * width
        rate = self._rate.backward if backward else self._rate.forward
        timeline.compute(name, s.hardware.kernel + flops / rate)
        if s.model.kv_rank:  # once in forward; in backward again, and for the gradients of latents and weight
            keys = sum(len(t.owner_rows) for t in step.intra_host.receives) if step.intra_host else self._tokens
            weights = heads * s.model.kv_rank * (d - s.model.shared_dim + e)
            timeline.compute("expand", (3 if backward else 1) * 2.0 * keys * s.batch * weights / s.hardware.gemm_flops)
        if step.index and not self._rate.carries:
            # For each element of out (in backward, of dq): the merge reads the step's result, and reads and writes the
            # float32 result of all steps so far.
            elements = self._tokens * s.batch * heads * (d if backward else e)
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
        by_owner = _pairs_by_owner(s.mask, s.tokens, plan.rank, s.hardware.tile)
        pairs: dict[int, float] = {}
        for i, step in enumerate(plan):
            if step.keys is not None:
                pairs[i] = sum(by_owner[t.owner] for t in step.intra_host.receives) if i else by_owner[plan.rank]
        return pairs

    # Ulysses, with or without a ring across its groups

    def _record_ulysses(self, timeline: Timeline, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> None:
        """Run ``ulysses_forward``, and for the backward ``ulysses_backward``, with recorded messages.

        The backward needs the tensors that the forward has saved. In that case the messages and kernels of the forward
        are recorded nowhere: its exchange has a timeline of its own, which is dropped.
        """
        s, first = self._setting, Timeline() if backward else timeline
        max_chunks = chunk_limit(s.tokens, q.shape, s.hardware.device)
        exchange = self._head_exchange(first, max_chunks)
        e = self._call.v_head_dim(v.shape)
        _, *saved = ulysses_forward(exchange, partial(self._run, first), q, k, v, e)
        if not backward:
            return

        previous_k: Tensor | None = None

        def new_run(heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> RecordedRun:
            nonlocal previous_k
            run = self._run(timeline, heads, q, k, v)
            run.adds_dkv, previous_k = k is previous_k, k
            return run

        exchange = self._head_exchange(timeline, max_chunks)
        if exchange.shares_kv:
            saved += [k, v]
        dout = q.new_empty(*q.shape[:3], e)
        ulysses_backward(exchange, new_run, saved, dout, None, q.shape, k.shape, v.shape)

    def _head_exchange(self, timeline: Timeline, max_chunks: int) -> RecordedHeadExchange:
        return RecordedHeadExchange(self._placement, self._heads, max_chunks, timeline=timeline, place=self._place)


@lru_cache(maxsize=256)  # forward and backward, and every way to recompute, need the same
def _pairs_by_owner(mask: Mask, tokens: TokenLayout, ring_rank: int, tile: int) -> list[int]:
    """The pairs that a kernel computes for the queries of ``ring_rank``, for the keys of each ring rank."""
    shards = [tokens.ring_positions(rank) for rank in range(tokens.ring)]
    return computed_pairs(mask, tokens.seq_len, shards[ring_rank], shards, tile)


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
        record: records the kernel of a step, for a number of heads.
    """

    adds_dkv = False  # whether dk and dv are added to the chunk before, which has the same K/V

    def __init__(
        self,
        call: AttentionCall,
        heads: Heads,
        k: Tensor,
        v: Tensor,
        transport: RecordedTransport,
        record: Callable[[str, Step, int, bool], None],
    ) -> None:
        self.kv_ready, self.plan, self.transport, self._record = call.kv_ready, call.plan, transport, record
        self.heads, self.program = heads, call.program(heads, k, v)
        self.steps = self.program.steps
        self.kernel = _NoKernel(call.v_head_dim(v.shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, carries: Carries | None) -> Carries:
        if step.attends:
            self._record("attend", step, len(step.q_heads or self.heads.queries), False)
        return carries or [
            (q.new_empty(*q.shape[:3], self.kernel.v_head_dim), q.new_empty(q.shape[0], q.shape[2], q.shape[1]))
        ]

    def new_gradients(self, q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
        return [dq, _NoGradient(), _NoGradient()] if self.adds_dkv else [dq, dk, dv]

    def backward(self, q: Tensor, k: Tensor, v: Tensor, output: OutputGrad, step: Step, *grads: Tensor) -> None:
        if step.attends:
            self._record("gradients of", step, len(step.q_heads or self.heads.queries), True)
