"""Attention in plain PyTorch, block by block: every feature, every dtype, every device.

The online softmax of Milakov and Gimelshein (2018) as blocked by FlashAttention (Dao et al., 2022); never more than
one block of scores exists at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..schedule import KeyIntervals
from .base import Carry, Score, accumulator, empty_carry, finish, merge_
from .dropout import keep_mask

_Q_BLOCK, _K_BLOCK = 256, 1024


class ReferenceBackend:
    """What the others are measured against, and what does a request no other backend can."""

    name = "reference"
    deterministic = True

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        acc, lse = carry or empty_carry(q)
        rows = rows.to(q.device)
        for qs, ks in _blocks(rows):
            s, _ = _scores(q[:, qs], k[:, ks], rows, qs, ks, score)  # [batch, heads, q, k]
            block_lse = torch.logsumexp(s, dim=-1)
            p = torch.exp(s - _finite(block_lse)[..., None])
            if score.dropout_p:
                p = p * _keep(q, rows, qs, ks, score)
            merge_(acc[:, qs], lse[:, :, qs], _times_values(p, v[:, ks]), block_lse)
        return finish((acc, lse), score, q.dtype) if last else (acc, lse)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        rows: KeyIntervals,
        score: Score,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        rows = rows.to(q.device)
        dtype = accumulator(q.dtype)
        for qs, ks in _blocks(rows):
            s, slope = _scores(q[:, qs], k[:, ks], rows, qs, ks, score)
            p = torch.exp(s - _finite(lse[:, :, qs])[..., None])
            block_dout = dout[:, qs].to(dtype)
            dp = _grouped("bqngd,bknd->bngqk", block_dout, v[:, ks].to(dtype)).flatten(1, 2)
            dropped = p
            if score.dropout_p:
                keep = _keep(q, rows, qs, ks, score)
                dropped, dp = p * keep, dp * keep
            ds = p * (dp - delta[:, :, qs, None]) * slope
            groups = ds.unflatten(1, (k.shape[2], -1))
            dq[:, qs] += torch.einsum("bngqk,bknd->bqngd", groups, k[:, ks].to(dtype)).flatten(2, 3)
            dk[:, ks] += _grouped("bqngd,bngqk->bknd", q[:, qs].to(dtype), groups)
            dv[:, ks] += _grouped("bqngd,bngqk->bknd", block_dout, dropped.unflatten(1, (k.shape[2], -1)))


def _blocks(rows: KeyIntervals) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries and keys with something visible: the intervals never fall, so a block's range follows
    from its first and last row."""
    q_len = rows.lo.shape[1]
    for q0 in range(0, q_len, _Q_BLOCK):
        q1 = min(q0 + _Q_BLOCK, q_len)
        start, stop = int(rows.lo[:, q0].min()), int(rows.hi[:, q1 - 1].max())
        for k0 in range(start, stop, _K_BLOCK):
            yield slice(q0, q1), slice(k0, min(k0 + _K_BLOCK, stop))


def _grouped(equation: str, queries: Tensor, other: Tensor) -> Tensor:
    """An einsum whose first operand ``[batch, q, heads, dim]`` is grouped by the key/value heads ``n``."""
    kv_heads = other.shape[2] if equation.startswith("bqngd,bknd") else other.shape[1]
    return torch.einsum(equation, queries.unflatten(2, (kv_heads, -1)), other)


def _times_values(p: Tensor, v: Tensor) -> Tensor:
    groups = p.unflatten(1, (v.shape[2], -1))
    return torch.einsum("bngqk,bknd->bqngd", groups, v.to(p.dtype)).flatten(2, 3)


def _scores(
    q: Tensor, k: Tensor, rows: KeyIntervals, qs: slice, ks: slice, score: Score
) -> tuple[Tensor, Tensor | float]:
    """Masked scores ``[batch, heads, q, k]`` and their derivative by ``q.k``."""
    dtype = accumulator(q.dtype)
    s = _grouped("bqngd,bknd->bngqk", q.to(dtype), k.to(dtype)).flatten(1, 2) * score.softmax_scale
    slope: Tensor | float = score.softmax_scale
    if score.softcap:
        capped = torch.tanh(s / score.softcap)
        s, slope = score.softcap * capped, score.softmax_scale * (1 - capped * capped)
    if score.alibi_slopes is not None:
        distance = (rows.q_positions[qs, None] - rows.k_positions[None, ks]).abs().to(dtype)
        slopes = score.alibi_slopes.to(dtype)
        s = s - (slopes if slopes.dim() == 2 else slopes[None])[:, :, None, None] * distance
    keys = torch.arange(ks.start, ks.stop, device=q.device)
    seen = (keys >= rows.lo[:, qs, None]) & (keys < rows.hi[:, qs, None])  # [b, q, k]
    return s.masked_fill(~seen[:, None], -torch.inf), slope


def _keep(q: Tensor, rows: KeyIntervals, qs: slice, ks: slice, score: Score) -> Tensor:
    heads = range(score.head_offset, score.head_offset + q.shape[2])
    kept = keep_mask(score.dropout_seed, score.dropout_p, q.shape[0], heads, rows.q_positions[qs], rows.k_positions[ks])
    return kept.to(accumulator(q.dtype)) / (1 - score.dropout_p)


def _finite(lse: Tensor) -> Tensor:
    """``lse`` to subtract: 0 for rows that saw nothing, so that exp(-inf - lse) is 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
