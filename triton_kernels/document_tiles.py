"""The attention kernels on document tiles, each by itself and with tile sizes that depend on the model alone.

In ``deterministic="invariant"``, queries and keys lie in tiles of 128 rows (``seqpar.schedule.document_tiles``), which
every configuration's tiles divide. So a program computes the same tiles in the same order, whatever else the tensors
hold. Tile sizes are never measured here: another length could make another one the fastest.

Shapes: m rows of queries, n rows of keys, h query heads, g KV heads, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backward import Operands, dq_launch, keys_launch
from .configs import Config, choose
from .forward import attention_forward
from .launch import describable
from .preprocess import bounds_and_ranges, statistics
from .tiles import IntervalsLike, ScoreLike, score_constants


def _config(kernel: str, streamed: tuple[Tensor, Tensor], v: Tensor, score: ScoreLike) -> Config:
    """The table's configuration; ``streamed`` are the tensors that the kernel may read by TMA."""
    x, tma = streamed[0], all(map(describable, streamed))
    heavy = any(score_constants(score).values())
    config = choose(kernel, x.device, x.shape[3], x.dtype, v_head_dim=v.shape[3], heavy=heavy, tma=tma)
    assert config is not None
    return config


def forward(q: Tensor, k: Tensor, v: Tensor, intervals: IntervalsLike, score: ScoreLike) -> tuple[Tensor, Tensor]:
    """``out [1, m, h, e]`` and ``lse [1, h, m]`` of ``q [1, m, h, d]``, ``k [1, n, g, d]`` and ``v [1, n, g, e]``."""
    return attention_forward(q, k, v, intervals, score, config=_config("forward", (k, v), v, score))


def gradients(
    kernel: str,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: IntervalsLike,
    score: ScoreLike,
) -> tuple[Tensor, ...]:
    """``dq [1, m, h, d]`` of the kernel "dq", or ``dk [1, n, g, d]`` and ``dv [1, n, g, e]`` of the kernel "dkdv".

    In the dtype of q, k and v; ``dout [1, m, h, e]``, ``lse, delta [1, h, m]``.
    """
    found = tuple(map(torch.empty_like, (q,) if kernel == "dq" else (k, v)))
    if q.numel() == 0 or k.numel() == 0:
        return tuple(x.zero_() for x in found)
    dq, dk, dv = (*found, k, v) if kernel == "dq" else (q, *found)
    operands = Operands(dout, q, k, v, statistics(lse, delta), intervals, dq, dk, dv)
    config = _config(kernel, (k, v) if kernel == "dq" else (q, dout), v, score)
    if kernel == "dq":
        dq_launch(operands, score, config, new=True)()
    else:
        tables = bounds_and_ranges(intervals.lo, intervals.hi, k.shape[1], config.block_n)
        keys_launch(operands, score, *tables, config, new=True)()
    return found
