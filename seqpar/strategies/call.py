"""One attention call with everything resolved: the ranks, the sharding, the mask and the score function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..cache import cached_tensors, upload
from ..comm.shared_memory import shared_memory
from ..comm.streams import ReadyEvents
from ..heads import Heads
from ..kernels.base import Score
from ..kernels.expansion import Expansion, RepeatedHeads
from ..keys import KeyIntervals
from ..layout import SequenceSharding, split_range
from ..mesh import AttentionGroups
from ..schedule import AttentionPlan
from .latent import LatentKeys

# K/V are sent in chunks of heads of at least this many bytes, by device type. A transfer of this size takes much longer
# than it takes to start a transfer and to split a kernel.
_CHUNK_BYTES = {"cpu": 1 << 20, "cuda": 8 << 20}
# The most chunks of a step. A ring has fewer, because the transfer of one step overlaps with the previous step.
_MAX_CHUNKS = 4


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What ``ring.py`` and ``ulysses.py`` need to know besides the tensors. Built by ``operators.make_call``.

    Attributes:
        groups: the ranks of the ring and of the all-to-all.
        sharding: which positions each rank holds.
        plan: which K/V rows are sent when, and which keys each query sees.
        score: how scores are computed, for all of ``heads``.
        backend: the name of an attention backend, or "auto".
        deterministic: leave out backends whose gradients may differ from run to run.
        heads: the heads of q, k and v. Under tensor parallelism these are some of the model's heads.
        return_lse: whether the caller gets the log-sum-exp, which is then differentiable.
        kv_ready: the point on the GPU's stream from which k and v could be sent, noted in forward and used in backward.
        latent: in latent attention, expands k and v, which then hold latents and rotated keys.
    """

    groups: AttentionGroups
    sharding: SequenceSharding
    plan: AttentionPlan
    score: Score
    backend: str
    deterministic: bool
    heads: Heads
    return_lse: bool
    kv_ready: ReadyEvents = field(default_factory=ReadyEvents, repr=False)
    latent: LatentKeys | None = None
    _scores: dict[Heads, Score] = field(default_factory=dict, init=False, repr=False)

    def shares_memory(self, device: torch.device) -> bool:
        """Whether the ranks of the ring read one another's messages in shared memory: nothing is transferred then."""
        groups = self.groups
        return groups.across is None and groups.within is not None and shared_memory(groups.within, device) is not None

    def parts(self, heads: Heads, k: Tensor, v: Tensor) -> list[Heads]:
        """``heads`` in the chunks in which the K/V of a step, ``[b, k, n, d]`` and ``[b, k, n, e]``, are sent.

        While one chunk is computed, the next chunk is received. Only the first transfer overlaps with nothing but the
        attention to this rank's own keys. The chunks are the same on all ranks, whatever the lengths of their shards.
        """
        kv = len(heads.kv)
        if len(self.plan) == 1 or kv < 2 or heads.kv_index() is not None:
            return [heads]
        if (chunks := self.groups.chunks) is None:
            if self.shares_memory(k.device):
                return [heads]
            nbytes = k.shape[0] * self.plan.longest * kv * (k.shape[3] + v.shape[3]) * k.element_size()
            most = -(-_MAX_CHUNKS // (len(self.plan) - 1))
            chunks = max(1, min(most, nbytes // _CHUNK_BYTES.get(k.device.type, 8 << 20)))
        each, chunks = len(heads.queries) // kv, min(chunks, kv)
        cuts = [split_range(kv, chunks, i) for i in range(chunks)]  # of the KV heads
        return [heads[range(cut.start * each, cut.stop * each)] for cut in cuts]

    def expansion(self, heads: Heads, device: torch.device) -> Expansion | None:
        """Expands the keys and values that are sent to those of ``heads``. None if they are the same."""
        if self.latent is not None:
            return self.latent.of(heads.queries_in(self.heads))
        index = heads.kv_index()
        if index is None:
            return None

        def make() -> Tensor:
            return upload(torch.tensor(index, device="cpu"), device)

        return RepeatedHeads(cached_tensors(("KV heads", *index), device, make))

    def v_head_dim(self, v_shape: Sequence[int]) -> int:
        """The head_dim of the output, for ``v [b, k, n, e]`` as it is sent."""
        return v_shape[3] if self.latent is None else self.latent.v_head_dim

    def intervals(self, step: int, q: Tensor) -> KeyIntervals | None:
        """Which of a step's keys the queries ``q`` see; None if they see none of them, or there are no queries."""
        if not q.numel():  # an all-to-all over more ranks than heads leaves ranks that send K/V and compute nothing
            return None
        return self.plan.intervals(step, q.device, self.score.needs_positions)

    def score_of(self, heads: Heads) -> Score:
        """The score function of some of the heads."""
        if heads not in self._scores:
            at = heads.queries_in(self.heads)
            self._scores[heads] = self.score.heads(at.start, at.stop)
        return self._scores[heads]
