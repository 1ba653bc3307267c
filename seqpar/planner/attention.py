"""``SelfAttention``: its sizes, and what it computes and sends on one rank, in the order of the runtime.

The runtime's own loops run here: ``ring_forward`` and ``ring_backward``, and for an all-to-all ``ulysses_forward`` and
``ulysses_backward``. They are called with tensors without data (torch's "meta" device). ``messages.py`` records their
kernels and messages, and ``AttentionTimeline`` prices the kernel of each step.

Shapes: b batch, s tokens of this rank, k keys of a step, h query heads, n KV heads, d head_dim of q and k, e head_dim
of v.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..kernels.base import Score
from ..kernels.cpu import pairs_computed_on_cpu
from ..masks.mask import Mask
from ..placement.heads import Heads
from ..placement.layout import CPU, TokenLayout
from ..placement.placement import Placement
from ..schedule.plan import AttentionPlan, PlanByHeads, attention_plan
from ..schedule.program import Step
from ..sharding.spec import AttentionSpec
from ..strategies.call import AttentionCall
from ..strategies.head_exchange import chunk_limit
from ..strategies.latent import LatentKeys
from ..strategies.ring import ring_backward, ring_forward
from ..strategies.ulysses import ulysses_backward, ulysses_forward
from .messages import RecordedHeadExchange, RecordedInvariant, RecordedRun, RecordedTransport, SimulatedRanks
from .pairs import computed_pairs
from .part import LayerPart, PartRow
from .rank import RankTimeline
from .split import ELEMENT_BYTES, FLOAT32_BYTES, Split, Switches

_META = torch.device("meta")
_ALL_GATHER_CHUNKS = 4.0  # an all-gather of K/V receives the KV heads in at most this many chunks


@dataclass(frozen=True)
class SelfAttention(LayerPart):
    """Attention of all tokens of the sequence to one another.

    Attributes:
        heads: query heads.
        kv_heads: KV heads.
        head_dim: the head_dim of q and k.
        v_head_dim: the head_dim of v; 0 if it equals ``head_dim``.
        q_rank: the rank of the low-rank projection of q in latent attention (DeepSeek); 0 if q has a single matrix.
        kv_rank: the rank of the shared low-rank projection of k and v in latent attention; 0 without latent attention.
        shared_dim: in latent attention, elements of k (those with rotary positions) that are the same for all heads.
        gated: whether q's projection also returns a gate of the output (Qwen3-Next).
        window: keys that a query sees at most, itself included; 0 for all that the mask has.
        chunked: whether the window is a chunk of the sequence (Llama 4) instead of a sliding window.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    shared_dim: int = 0
    gated: bool = False
    window: int = 0
    chunked: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ValueError(f"model: kv_heads={self.kv_heads}: expected a divisor of heads={self.heads}")

    @property
    def dims(self) -> tuple[int, int]:
        """The head_dim of q and k, and of v."""
        return self.head_dim, self.v_head_dim or self.head_dim

    @property
    def d(self) -> int:
        """Elements of q for one token."""
        return self.heads * self.head_dim

    @property
    def d_out(self) -> int:
        """Elements of the output for one token."""
        return self.heads * self.dims[1]

    @property
    def d_kv(self) -> int:
        """Elements of k and v for one token."""
        return self.kv_heads * sum(self.dims)

    @property
    def sent_kv_heads(self) -> int:
        """Heads of the K/V that ranks send: a single one with latent attention, which sends latents."""
        return 1 if self.kv_rank else self.kv_heads

    @property
    def sent_kv(self) -> int:
        """Elements of the K/V of one token that ranks send."""
        return self.kv_rank + self.shared_dim if self.kv_rank else self.d_kv

    @property
    def row(self) -> PartRow:
        q = self.q_rank * (self.hidden + self.d) if self.q_rank else self.hidden * self.d
        rotary = 2 * (self.d + self.kv_heads * self.head_dim)
        return PartRow(
            before=q + self.hidden * (self.sent_kv + self.gated * self.d_out),
            after=self.d_out * self.hidden,
            between=self.kv_rank * (self.d_kv - self.kv_heads * self.shared_dim),  # expands latents to keys and values
            moved=rotary,
            moved_backward=rotary,
            tensor_parallel=not self.kv_rank,
        )

    def sees(self, mask: Mask, seq_len: int) -> Mask:
        if not 0 < self.window < seq_len:
            return mask
        return mask & (Mask.chunked(self.window) if self.chunked else Mask.sliding_window(*2 * (self.window - 1,)))

    def more_pairs(self, seq_len: int) -> int:
        """Pairs of a query and a key in one sequence besides the keys that ``sees`` has."""
        return 0

    def has_groups(self, groups: int, ranks: int = 1) -> bool:
        """Whether ``Memory`` can compute it in groups of heads: of whole KV heads, without latents, and with a head for
        each of ``ranks`` Ulysses ranks."""
        return not self.kv_rank and self.kv_heads % groups == 0 and ranks * groups <= self.heads

    # Memory

    def pieces(self, split: Split, switches: Switches) -> int:
        return switches.head_groups if switches.head_groups > 1 else 0

    def kept(self, split: Split, pieces: int = 1) -> float:
        """q, k, v and the output; with an all-to-all, the output also as a head shard; with a gate, the gate before and
        after its sigmoid, and its product with the output; and the log-sum-exp."""
        elements = self.d + self.sent_kv + ((2 if split.ulysses > 1 else 1) + 3 * self.gated) * self.d_out
        nbytes = ELEMENT_BYTES * (self.q_rank + elements / pieces) + FLOAT32_BYTES * self.heads / pieces
        return split.most_tokens * nbytes

    def checkpointed(self, split: Split) -> list[float]:
        """The output and the log-sum-exp; with an all-to-all, the head shards of q and the output, and of k and v.

        Two ranks that read the same KV head do not keep k and v, but exchange them again.
        """
        elements: list[float] = [self.d_out]
        if split.ulysses > 1:
            by_rank = Heads.of_model(self.heads, self.sent_kv_heads).split(split.tensor)[0].split(split.ulysses)
            shares_kv = any(a.kv and b.kv and a.kv.stop > b.kv.start for a, b in pairwise(by_rank))
            elements += [self.d, self.d_out, *([] if shares_kv else 2 * [self.sent_kv / 2])]
        nbytes = [*(ELEMENT_BYTES * x for x in elements), FLOAT32_BYTES * self.heads]
        return [float(split.most_tokens * x) for x in nbytes]

    def working(self, split: Split, pieces: int = 1) -> float:
        """Gradients, and K/V and their gradients in transfer."""
        tokens, head_ranks = split.most_tokens, split.ulysses * split.tensor  # ranks that share the heads
        kv_heads = max(1.0, self.sent_kv_heads / head_ranks)
        # Elements of k and v of one ring rank: all tokens of the ranks that share the heads, and the heads of one rank.
        kv = tokens * head_ranks * kv_heads * self.sent_kv / self.sent_kv_heads
        # dq in float32 and rounded, and dout; dk and dv in float32 and rounded.
        nbytes: float = tokens * ((ELEMENT_BYTES + FLOAT32_BYTES) * self.d + ELEMENT_BYTES * self.d_out)
        nbytes += kv * (FLOAT32_BYTES + ELEMENT_BYTES)
        if split.is_invariant:  # for some heads, rows as they have arrived, in the order of the tokens, and in tiles
            of_token = ELEMENT_BYTES * (self.d_kv + self.d + self.d_out) + 2 * FLOAT32_BYTES * self.heads
            groups = len(split.mask.head_groups)
            parts = max(split.tensor, groups) if groups else min(self.kv_heads, 2 * split.tensor)
            nbytes += 3 * split.seq_len * split.batch * of_token / parts
        elif split.ring > 1 and split.gather:  # two chunks of the K/V of the other ranks, and of their gradients
            chunks = min(_ALL_GATHER_CHUNKS, kv_heads)
            nbytes += (split.ring - 1) * kv * (2 * ELEMENT_BYTES + 2 * FLOAT32_BYTES) / chunks
        elif split.ring > 1:  # the K/V of three steps, and the gradients of two
            nbytes += kv * (3 * ELEMENT_BYTES + 2 * FLOAT32_BYTES)
        if split.ulysses > 1:  # the messages of an all-to-all
            nbytes += tokens * ELEMENT_BYTES * (self.d + kv / tokens)
        return nbytes / pieces

    # Time

    def record(self, rank: RankTimeline, backward: bool = False) -> None:
        """Record attention, one group of heads after another.

        With all but attention recomputed, there is no attention in the second forward. In backward, groups compute
        their products and their attention again.
        """
        groups, keeps = rank.switches.head_groups, rank.switches.recompute == "keep_attention"
        again = backward and groups > 1
        if again:
            rank.timeline.compute("products again", sum(self.product_seconds(rank)))
        group = replace(self, heads=self.heads // groups, kv_heads=self.kv_heads // groups)
        attention = AttentionTimeline(rank, group)
        passes = [False] * (not keeps and (again or not backward)) + [True] * backward
        for is_backward in passes:
            for _ in range(groups):
                attention.record(is_backward)


class AttentionTimeline:
    """Records the attention of one rank.

    Args:
        rank: the rank, and how the ranks are split.
        sizes: the heads of the model, or of one group.
    """

    def __init__(self, rank: RankTimeline, sizes: SelfAttention) -> None:
        s = rank.split
        self._split, self._rank, self._sizes = s, rank, sizes
        per_host = s.ring_per_host(rank.ulysses, rank.tensor)
        self._plan = attention_plan(s.mask, s.tokens, rank.ring, s.gather, per_host, sizes.heads)
        self._heads = Heads.of_model(sizes.heads, sizes.sent_kv_heads).split(s.tensor)[rank.tensor]
        self._rate = s.hardware.rate(s.kernel)
        ulysses: Any = SimulatedRanks(s.ulysses, rank.ulysses)
        ring: Any = SimulatedRanks(s.ring, rank.ring)
        # Without all-to-alls, a ring has all ranks of attention.
        self._placement = Placement(ring, ring, ulysses, s.gather, tokens=s.tokens)
        latent = None
        if sizes.kv_rank:
            own_dim = sizes.head_dim - sizes.shared_dim
            weight = torch.empty(sizes.heads, own_dim + sizes.dims[1], sizes.kv_rank, device=_META)
            latent = LatentKeys(weight, own_dim)
        score = Score(1.0)  # only a kernel would read it
        self._call = AttentionCall(self._placement, self._plan, AttentionSpec(), self._heads, score, latent=latent)
        # Under tensor parallelism, each rank attends with some of the heads to the tokens of all tensor-parallel ranks.
        first_rank = (rank.ring * s.ulysses + rank.ulysses) * s.tensor
        self._tokens = len(s.tokens._positions(first_rank, s.tensor))

    def record(self, backward: bool) -> None:
        """Record the forward of attention, or its backward, with all messages."""
        if self._split.is_invariant:
            with _disable_current_modes():  # the tiles have values to count, which a FakeTensorMode would empty
                self._record_invariant(backward)
            return
        q, k, v = self._qkv()
        if self._split.ulysses > 1:
            self._record_ulysses(q, k, v, backward)
            return
        run = self._run(self._rank, self._heads, q, k, v)
        if backward:
            ring_backward(run, q, None, q, k, v, q, q)
        else:
            ring_forward(run, q, k, v)

    def _qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """``q [b, s, h, d]``, ``k [b, s, n, d]`` and ``v [b, s, n, e]`` of this rank, without data; with latent
        attention, k are the latents and v the rotated keys."""
        s, sizes = self._split, self._sizes
        heads = (len(self._heads.queries), len(self._heads.kv), len(self._heads.kv))
        sent = (sizes.kv_rank, sizes.shared_dim) if sizes.kv_rank else sizes.dims
        dims = (sizes.head_dim, *sent)
        shapes = ((s.batch, self._tokens, n, dim) for n, dim in zip(heads, dims, strict=True))
        q, k, v = (torch.empty(shape, dtype=s.dtype, device=_META) for shape in shapes)
        return q, k, v

    def _run(self, rank: RankTimeline, heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> RecordedRun:
        transport = RecordedTransport(rank, self._plan)
        return RecordedRun(self._call, heads, k, v, transport, partial(self._kernel, rank))

    def _kernel(
        self, rank: RankTimeline, name: str, plan: AttentionPlan, step: Step, heads: int, backward: bool
    ) -> None:
        """Record the kernel of one step of a plan, and the merge of its result where the kernel cannot carry."""
        s, sizes, pairs = self._split, self._sizes, self._pairs_by_step[plan][step.index]
        name = f"{name} step {step.index}" if step.index else f"{name} own"
        d, e = sizes.dims
        # Forward multiplies q by k (d) and the weights by v (e). Backward multiplies for the scores, dq and dk (3 d),
        # and for dv and the gradient of the weights (2 e).
        width = 3 * d + 2 * e if backward else d + e
        flops = 2.0 * pairs * s.batch * heads * width
        rate = self._rate.backward if backward else self._rate.forward
        rank.timeline.compute(name, s.hardware.kernel + flops / rate)
        if sizes.kv_rank:  # once in forward; in backward again, and for the gradients of latents and weight
            keys = sum(len(t.owner_rows) for t in step.intra_host.receives) if step.intra_host else self._tokens
            weights = heads * sizes.kv_rank * (d - sizes.shared_dim + e)
            rank.compute("expand", (3 if backward else 1) * 2.0 * keys * s.batch * weights)
        if step.index and not self._rate.carries:
            # For each element of out (in backward, of dq): the merge reads the step's result, and reads and writes the
            # float32 result of all steps so far.
            elements = self._tokens * s.batch * heads * (d if backward else e)
            rank.compute("merge", nbytes=(s.dtype.itemsize + 2 * FLOAT32_BYTES) * elements)

    @cached_property
    def _pairs_by_step(self) -> dict[AttentionPlan, dict[int, float]]:
        """For the plan of each group of heads, the pairs of a query and a key that the kernel computes for one head in
        each step with keys."""
        masks = self._split.mask.head_groups or (self._split.mask,)
        plans = self._plan.plans if isinstance(self._plan, PlanByHeads) else [self._plan]
        return {plan: self._pairs_of(mask, plan) for mask, plan in zip(masks, plans, strict=True)}

    def _pairs_of(self, mask: Mask, plan: AttentionPlan) -> dict[int, float]:
        s = self._split
        if s.hardware.device == "cpu":  # the CPU kernel computes other tiles than the kernels of GPUs
            with _disable_current_modes():  # the tiles are read from tensors, which a FakeTensorMode would empty
                intervals = {i: plan.intervals(i, CPU) for i in range(len(plan))}
                return {i: sum(map(pairs_computed_on_cpu, parts)) for i, parts in intervals.items() if parts}
        by_owner = _pairs_by_owner(mask, s.tokens, plan.rank, s.hardware.tile)
        pairs: dict[int, float] = {}
        for i, step in enumerate(plan):
            if step.keys is not None:
                pairs[i] = sum(by_owner[t.owner] for t in step.intra_host.receives) if i else by_owner[plan.rank]
        return pairs

    def _record_invariant(self, backward: bool) -> None:
        (q, k, v), algorithm = self._qkv(), RecordedInvariant(self._rank)
        if not backward:
            algorithm.forward(self._call, q, k, v)
            return
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[0], q.shape[2], q.shape[1])
        algorithm.backward(self._call, [q, k, v, out, lse.float()], out, None, (q.shape, k.shape, v.shape))

    # Ulysses, with or without a ring across its groups

    def _record_ulysses(self, q: Tensor, k: Tensor, v: Tensor, backward: bool) -> None:
        """Run ``ulysses_forward``, and for the backward ``ulysses_backward``, with recorded messages.

        The backward needs the tensors that the forward has saved. In that case the messages and kernels of the forward
        are recorded nowhere: it has a timeline of its own, which is dropped.
        """
        s, rank = self._split, self._rank
        first = RankTimeline(s, rank.ring, rank.ulysses, rank.tensor) if backward else rank
        max_chunks = chunk_limit(s.tokens, q.shape, s.hardware.device)
        exchange = self._head_exchange(first, max_chunks)
        e = self._call.v_head_dim(v.shape)
        _, *saved = ulysses_forward(exchange, partial(self._run, first), q, k, v, e)
        if not backward:
            return

        previous_k: Tensor | None = None

        def new_run(heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> RecordedRun:
            nonlocal previous_k
            run = self._run(rank, heads, q, k, v)
            run.adds_dkv, previous_k = k is previous_k, k
            return run

        exchange = self._head_exchange(rank, max_chunks)
        if exchange.shares_kv:
            saved += [k, v]
        dout = q.new_empty(*q.shape[:3], e)
        ulysses_backward(exchange, new_run, saved, dout, None, q.shape, k.shape, v.shape)

    def _head_exchange(self, rank: RankTimeline, max_chunks: int) -> RecordedHeadExchange:
        return RecordedHeadExchange(self._placement, self._heads, max_chunks, recorder=rank)


@lru_cache(maxsize=256)  # forward and backward, and every way to recompute, need the same
def _pairs_by_owner(mask: Mask, tokens: TokenLayout, ring_rank: int, tile: int) -> list[int]:
    """The pairs that a kernel computes for the queries of ``ring_rank``, for the keys of each ring rank."""
    shards = [tokens.ring_positions(rank) for rank in range(tokens.ring)]
    return computed_pairs(mask, tokens.seq_len, shards[ring_rank], shards, tile)
