"""One attention call with everything resolved: the ranks, the sharding, the mask and the score function."""

from __future__ import annotations

from dataclasses import dataclass

from ..heads import Heads
from ..kernels.base import Score
from ..mask import Mask
from ..mesh import AttentionGroups
from ..schedule import SequenceSharding, Step, attention_steps


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What ``ring.py`` and ``ulysses.py`` need to know besides the tensors. Built by ``functional.attend``.

    Attributes:
        groups: the ranks of the ring and of the all-to-all.
        sharding: which positions each rank holds.
        mask: which keys each query sees.
        score: how scores are computed, for all of ``heads``.
        backend: the name of an attention backend, or "auto".
        deterministic: leave out backends whose gradients may differ from run to run.
        heads: the heads of q, k and v. Under tensor parallelism, some of the model's.
        return_lse: whether the caller gets the log-sum-exp, which is differentiable then.
    """

    groups: AttentionGroups
    sharding: SequenceSharding
    mask: Mask
    score: Score
    backend: str
    deterministic: bool
    heads: Heads
    return_lse: bool

    def steps(self) -> tuple[Step, ...]:
        """The steps of this rank's ring; one, with the local keys, if there is no ring."""
        return attention_steps(self.mask, self.sharding, self.groups.ring_rank, self.groups.gather)

    def score_of(self, heads: Heads) -> Score:
        """The score function of some of the heads."""
        at = heads.queries_in(self.heads)
        return self.score.heads(at.start, at.stop)
