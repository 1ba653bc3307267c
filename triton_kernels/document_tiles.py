"""The attention kernels on document tiles, each by itself and with tile sizes that depend on the model alone.

In ``deterministic="invariant"``, queries and keys lie in tiles of 128 rows (``seqpar.schedule.document_tiles``), which
every configuration's tiles divide. So a program computes the same tiles in the same order, whatever else the tensors
hold. Tile sizes are never measured here: another length could make another one the fastest.

Shapes: m rows of queries, n rows of keys, h query heads, g KV heads, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def forward(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[IntervalsLike], score: ScoreLike) -> tuple[Tensor, Tensor]:
    """``out [1, m, h, e]`` and ``lse [1, h, m]`` of ``q [1, m, h, d]``, ``k [1, n, g, d]`` and ``v [1, n, g, e]``.

    ``parts``: which keys each query sees, for each part of the mask, one after another.
    """
    carry, config = None, _config("forward", (k, v), v, score)
    for i, part in enumerate(parts, 1):
        carry = attention_forward(q, k, v, part, score, carry=carry, last=i == len(parts), config=config)
    assert carry is not None
    return carry


def gradients(
    kernel: str,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: Sequence[IntervalsLike],
    score: ScoreLike,
) -> tuple[Tensor, ...]:
    """``dq [1, m, h, d]`` of the kernel "dq", or ``dk [1, n, g, d]`` and ``dv [1, n, g, e]`` of the kernel "dkdv".

    ``dout [1, m, h, e]``, ``lse, delta [1, h, m]``, and ``parts`` as in :func:`forward`. The gradients have the dtype of
    q, k and v, or are float32 sums over several parts.
    """
    dtype = q.dtype if len(parts) == 1 else torch.float32
    found = tuple(torch.empty_like(x, dtype=dtype) for x in ((q,) if kernel == "dq" else (k, v)))
    if q.numel() == 0 or k.numel() == 0:
        return tuple(x.zero_() for x in found)
    dq, dk, dv = (*found, k, v) if kernel == "dq" else (q, *found)
    config = _config(kernel, (k, v) if kernel == "dq" else (q, dout), v, score)
    for i, part in enumerate(parts):
        operands = Operands(dout, q, k, v, statistics(lse, delta), part, dq, dk, dv)
        if kernel == "dq":
            dq_launch(operands, score, config, new=i == 0)()
        else:
            tables = bounds_and_ranges(part.lo, part.hi, k.shape[1], config.block_n)
            keys_launch(operands, score, *tables, config, new=i == 0)()
    return found
