"""Attention in plain PyTorch, block by block: every feature, every dtype, every device.

The online softmax of Milakov and Gimelshein (2018), blocked as in FlashAttention (Dao et al., 2022). Only one block of
scores exists at a time, so memory does not grow with the product of the lengths.

Shapes: b batch, q queries, k keys, h query heads, n KV heads, g query heads per KV head (h = n g), d head_dim, e
head_dim of v.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from einops import einsum, rearrange
from torch import Tensor

from ..schedule.rows import KeyIntervals
from .base import Carry, Grads, OutputGrad, Score, accumulator, all_finite, empty_carry, finish, merge_
from .dropout import keep_mask

# A block of float32 scores takes 1 MiB per head.
_Q_BLOCK, _K_BLOCK = 256, 1024


class ReferenceBackend:
    """The backend that the others are tested against. It supports every call, so it runs where no other backend can."""

    name = "reference"
    deterministic = True
    reads_delta = True

    def unavailable(self) -> str | None:
        return None

    def unsupported(
        self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool, v_head_dim: int | None = None
    ) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, intervals: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        acc, lse = carry or empty_carry(q, v.shape[3])  # [b, q, h, e], [b, h, q]
        intervals = intervals.to(q.device)
        dtype = accumulator(q.dtype)
        for at in blocks(intervals, (), (v,)):
            rows, queries, keys = at
            s, _ = scores(q[rows, queries], k[rows, keys], intervals, at, score)  # [b, h, q, k]
            block_lse = torch.logsumexp(s, dim=-1)  # [b, h, q]
            p = torch.exp(s - _subtrahend(block_lse)[..., None])
            if score.dropout_p:
                p = p * _dropout_factor(q, intervals, at, score)
            p = rearrange(p, "b (n g) q k -> b n g q k", n=k.shape[2])
            out = einsum(p, v[rows, keys].to(dtype), "b n g q k, b k n e -> b q n g e")
            merge_(acc[rows, queries], lse[rows, :, queries], rearrange(out, "b q n g e -> b q (n g) e"), block_lse)
        return finish((acc, lse), score, q.dtype) if last else (acc, lse)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputGrad, intervals: KeyIntervals, score: Score, grads: Grads
    ) -> None:
        dout, _, lse, delta = output
        assert delta is not None
        grads.make(q, k, v)
        grads.zero_new_()
        intervals = intervals.to(q.device)
        dtype = accumulator(q.dtype)
        by_query = q, dout, _subtrahend(lse).mT, delta.mT
        for at in blocks(intervals, by_query, (k, v)):
            rows, queries, keys = at
            s, derivative = scores(q[rows, queries], k[rows, keys], intervals, at, score)  # [b, h, q, k]
            p = torch.exp(s - _subtrahend(lse[rows, :, queries])[..., None])
            block_q, block_dout = (
                _by_kv_head(x[rows, queries].to(dtype), k.shape[2]) for x in (q, dout)
            )  # [b, q, n, g, d], [b, q, n, g, e]
            block_k, block_v = k[rows, keys].to(dtype), v[rows, keys].to(dtype)  # [b, k, n, d], [b, k, n, e]
            dp = einsum(block_dout, block_v, "b q n g e, b k n e -> b n g q k")
            dp = rearrange(dp, "b n g q k -> b (n g) q k")
            dropped = p
            if score.dropout_p:
                factor = _dropout_factor(q, intervals, at, score)
                dropped, dp = p * factor, dp * factor
            ds = p * (dp - delta[rows, :, queries, None]) * derivative
            ds, dropped = (rearrange(x, "b (n g) q k -> b n g q k", n=k.shape[2]) for x in (ds, dropped))
            block_dq = einsum(ds, block_k, "b n g q k, b k n d -> b q n g d")
            grads.dq[rows, queries] += rearrange(block_dq, "b q n g d -> b q (n g) d")
            grads.dk[rows, keys] += einsum(ds, block_q, "b n g q k, b q n g d -> b k n d")
            grads.dv[rows, keys] += einsum(dropped, block_dout, "b n g q k, b q n g e -> b k n e")


Block = tuple[slice, slice, slice]  # batch rows, queries, keys
_ALL = slice(None)


def blocks(intervals: KeyIntervals, by_query: Sequence[Tensor], by_key: Sequence[Tensor]) -> Iterator[Block]:
    """Blocks of queries and keys in which some query sees some key.

    ``lo`` and ``hi`` never decrease along the queries, so the first and last query of a block bound its visible keys.

    If a value of ``by_query [b, q, ...]`` or ``by_key [b, k, ...]`` in a block is not finite, the blocks are single
    queries with the keys that they see: multiplied by the weight 0 of another pair, the value would be nan.
    """
    lo, hi = intervals.lo, intervals.hi
    for q0 in range(0, lo.shape[1], _Q_BLOCK):
        q1 = min(q0 + _Q_BLOCK, lo.shape[1])
        start, stop = int(lo[:, q0].min()), int(hi[:, q1 - 1].max())
        for k0 in range(start, stop, _K_BLOCK):
            k1 = min(k0 + _K_BLOCK, stop)
            if all(map(all_finite, (*(x[:, q0:q1] for x in by_query), *(x[:, k0:k1] for x in by_key)))):
                yield _ALL, slice(q0, q1), slice(k0, k1)
                continue
            ends = zip(lo[:, q0:q1].clamp(k0, k1).tolist(), hi[:, q0:q1].clamp(k0, k1).tolist(), strict=True)
            for row, (first, last) in enumerate(ends):
                rows = _ALL if lo.shape[0] == 1 else slice(row, row + 1)
                for i in range(q1 - q0):
                    if first[i] < last[i]:
                        yield rows, slice(q0 + i, q0 + i + 1), slice(first[i], last[i])


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Queries ``[b, q, h, d]`` as ``[b, q, n, g, d]``: consecutive query heads share a KV head."""
    return rearrange(x, "b q (n g) d -> b q n g d", n=kv_heads)


def scores(q: Tensor, k: Tensor, intervals: KeyIntervals, at: Block, score: Score) -> tuple[Tensor, Tensor | float]:
    """Masked scores ``[b, h, q, k]`` of a block, and their derivative by ``q.k``."""
    rows, queries, keys = at
    dtype = accumulator(q.dtype)
    s = einsum(_by_kv_head(q.to(dtype), k.shape[2]), k.to(dtype), "b q n g d, b k n d -> b n g q k")
    s = rearrange(s, "b n g q k -> b (n g) q k") * score.softmax_scale
    derivative: Tensor | float = score.softmax_scale
    if score.softcap:
        capped = torch.tanh(s / score.softcap)
        s, derivative = score.softcap * capped, score.softmax_scale * (1 - capped * capped)
    if score.alibi_slopes is not None:
        distance = (intervals.q_positions[queries, None] - intervals.k_positions[None, keys]).abs().to(dtype)  # [q, k]
        slopes = score.alibi_slopes.to(dtype)  # [h] or [b, h]
        s = s - (slopes[rows] if slopes.dim() == 2 else slopes[None])[:, :, None, None] * distance
    index = torch.arange(keys.start, keys.stop, device=q.device)
    seen = (index >= intervals.lo[rows, queries, None]) & (index < intervals.hi[rows, queries, None])  # [1 or b, q, k]
    return s.masked_fill(~seen[:, None], -torch.inf), derivative


def _dropout_factor(q: Tensor, intervals: KeyIntervals, at: Block, score: Score) -> Tensor:
    """Factors of a block's probabilities, ``[b, h, q, k]``: 0 for dropped ones, else ``1 / (1 - dropout_p)``."""
    rows, queries, keys = at
    heads = range(score.head_offset, score.head_offset + q.shape[2])
    q_positions, k_positions = intervals.q_positions[queries], intervals.k_positions[keys]
    keep = keep_mask(score.dropout_seed, score.dropout_p, q.shape[0], heads, q_positions, k_positions)
    return keep[rows].to(accumulator(q.dtype)) / (1 - score.dropout_p)


def _subtrahend(lse: Tensor) -> Tensor:
    """``lse`` with 0 for queries that see no key, so that exp(score - lse) is 0 for them and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
