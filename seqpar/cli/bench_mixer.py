"""Linear attention in plain PyTorch, which ``seqpar bench --preset linear`` runs over a sharded sequence.

Shapes: ``b`` batch, ``t`` tokens, ``h`` heads, ``n`` KV heads, ``d`` head_dim of q and k, ``e`` head_dim of v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 128  # tokens


def linear_attention(heads: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention without softmax, whose scores decay with the distance: ``out[i] = sum(r^(i-j) (q[i] k[j]) v[j])``.

    The sum is over the tokens j up to i. It is computed in chunks, in float32. Head i has the decay ``1 - 2^(-5 - i)``
    of RetNet (Sun et al., arXiv 2307.08621).

    Args:
        heads: the heads of q among all heads.
        q, k, v: ``[b, t, h, d]``, ``[b, t, n, d]`` and ``[b, t, n, e]``; n divides h.

    Returns:
        ``[b, t, h, e]``.
    """
    index = torch.arange(heads.start, heads.stop, device=q.device)[:, None, None]
    rate = torch.log1p(-(2.0 ** (-5.0 - index)))  # [h, 1, 1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    chunks: Any = zip(*(x.float().transpose(1, 2).split(CHUNK, 2) for x in (q * q.shape[3] ** -0.5, k, v)), strict=True)
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    outs = []
    for x, y, z in chunks:  # [b, h, c, d or e]
        at = torch.arange(x.shape[2], device=q.device)[:, None]
        apart = at - at.T
        decays = (rate * apart).exp().masked_fill(apart < 0, 0.0)  # [h, c, c]
        outs.append((x @ y.mT * decays) @ z + (x * (rate * (at + 1)).exp()) @ state)
        state = (rate * len(at)).exp() * state + (y * (rate * (len(at) - 1 - at)).exp()).mT @ z
    return torch.cat(outs, 2).transpose(1, 2).to(v.dtype)
