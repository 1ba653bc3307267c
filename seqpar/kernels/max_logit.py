"""The largest score of each query, computed as a backend: the statistic that it carries is a maximum.

So every strategy, layout and mask that attention has gives the largest scores too, without code of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..schedule.rows import KeyIntervals
from .base import Carry, Score, empty_carry
from .reference import ReferenceBackend, blocks, scores


class MaxLogitBackend(ReferenceBackend):
    """Returns zeros in place of ``out``, and the largest score of each query in place of ``lse``."""

    name = "max_logit"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, intervals: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        zeros, largest = carry or empty_carry(q, v.shape[3])  # [b, q, h, e], [b, h, q]
        intervals = intervals.to(q.device)
        for at in blocks(intervals, (), ()):
            rows, queries, keys = at
            s, _ = scores(q[rows, queries], k[rows, keys], intervals, at, score)  # [b, h, q, k]
            so_far = largest[rows, :, queries]
            so_far.copy_(torch.maximum(so_far, s.amax(-1)))
        return zeros.to(q.dtype) if last else zeros, largest
