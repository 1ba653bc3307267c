"""Forward: online softmax over the row intervals, carried from hop to hop.

The tiling of FlashAttention-2 (Dao, 2023) with two changes. Each row has its own interval of keys, so one kernel
serves every mask and layout. And the online softmax may start from the ``(acc, lse)`` of the keys seen before
(``m = lse, l = 1``), which makes a ring's hops one softmax: nothing is rounded or merged in between.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tune
from .configs import Config, choose
from .launch import Launch, descriptors, padded, precision, strides, unit_stride
from .tiles import (
    LN2,
    LOG2E,
    UNSPECIALIZED,
    alibi_bias,
    head_base,
    kept,
    load_rows,
    score_arguments,
    store_rows,
    tanh,
    tile_split,
)

_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(LN2)


@triton.jit
def _attend(acc, m, l, q, K, V, stride_ks, stride_vs, k_len, lo, hi, i, K_POSITIONS, start, skip_from, skip_to, tiles,
            scale, cap, slope, keep_scale, dropout_threshold, seed, head, batch, kv_head,
            D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
            SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
            PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Go on with the online softmax over ``tiles`` tiles from ``start``, leaving out ``[skip_from, skip_to)``."""
    for n in range(0, tiles):
        k_start = start + n * BLOCK_N
        if MASKED:
            k_start += tl.where(k_start >= skip_from, skip_to - skip_from, 0)
        k = load_rows(K, batch, kv_head, k_start, stride_ks, k_len, D, BLOCK_N, BLOCK_D, MASKED, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        column = k_start + tl.arange(0, BLOCK_N)
        if ALIBI or DROPOUT:
            j = tl.load(K_POSITIONS + column, mask=column < k_len, other=0)
        if SOFTCAP:
            s = cap * tanh(s * scale)
        elif ALIBI:
            s = s * scale
        if ALIBI:
            s -= alibi_bias(slope, i[:, None], j[None, :])
        if MASKED:
            s = tl.where((column[None, :] >= lo[:, None]) & (column[None, :] < hi[:, None]), s, float("-inf"))
        if SOFTCAP or ALIBI:
            m_new = tl.maximum(m, tl.max(s, 1))
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * scale)
        # A row that has seen nothing yet: subtract 0, not -inf, and exp2(-inf) stays 0.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        if SOFTCAP or ALIBI:
            p = tl.exp2(s - shift[:, None])
        else:
            p = tl.exp2(s * scale - shift[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if DROPOUT:
            p = tl.where(kept(seed, dropout_threshold, i[:, None], j[None, :], head, batch), p * keep_scale, 0.0)
        v = load_rows(V, batch, kv_head, k_start, stride_vs, k_len, D, BLOCK_N, BLOCK_D, MASKED, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(Q, K, V, ACC, OUT, LSE_IN, LSE, LO, HI, Q_POSITIONS, K_POSITIONS, ALIBI_SLOPES, SINK_LOGITS,
                   stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
                   stride_ab, stride_as, stride_ah, stride_ob, stride_os, stride_oh, stride_rows, stride_slopes,
                   scale, cap, keep_scale, dropout_threshold, seed, head_offset, heads, q_len, k_len, tiles,
                   GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, CARRY: tl.constexpr, LAST: tl.constexpr, SOFTCAP: tl.constexpr,
                   ALIBI: tl.constexpr, DROPOUT: tl.constexpr, SINKS: tl.constexpr,
                   PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """One tile of queries of one head: grid ``batch * heads * tiles``."""
    program = tl.program_id(0)
    # Long rows first (under a causal mask the last ones): what is left at the end of the launch is short.
    q_start = (tiles - 1 - program % tiles) * BLOCK_M
    head = program // tiles % heads
    batch = program // tiles // heads
    row = q_start + tl.arange(0, BLOCK_M)
    # Rows past the end repeat the last one; their results are not stored.
    row_in = tl.minimum(row, q_len - 1)
    LO += batch * stride_rows
    HI += batch * stride_rows
    q_last = tl.minimum(q_start + BLOCK_M, q_len) - 1
    begin, end = tl.load(LO + q_start), tl.load(HI + q_last)
    if CARRY and not LAST:
        # Not one condition: the outer one is settled when it is compiled.
        if begin >= end:
            return  # the carry is updated in place: it stays as it is
    lo = tl.load(LO + row_in)
    hi = tl.load(HI + row_in)
    # The intervals never fall: first and last row bound what the tile sees, and what all its rows see.
    start, left, inner, inner_stop, right = tile_split(begin, end, tl.load(LO + q_last), tl.load(HI + q_start), BLOCK_N)
    kv_head = head // GROUP
    Q = head_base(Q, batch, head, stride_qb, stride_qh, False)
    K = head_base(K, batch, kv_head, stride_kb, stride_kh, TMA)
    V = head_base(V, batch, kv_head, stride_vb, stride_vh, TMA)
    OUT = head_base(OUT, batch, head, stride_ob, stride_oh, False)
    first_statistic = (tl.cast(batch, tl.int64) * heads + head) * q_len
    LSE += first_statistic
    i = tl.load(Q_POSITIONS + row_in) if ALIBI or DROPOUT else row
    slope = tl.load(ALIBI_SLOPES + batch * stride_slopes + head) * _LOG2E if ALIBI else 0.0
    q = load_rows(Q, batch, head, q_start, stride_qs, q_len, D, BLOCK_M, BLOCK_D, True, False)
    if CARRY:
        ACC = head_base(ACC, batch, head, stride_ab, stride_ah, False)
        acc = load_rows(ACC, 0, 0, q_start, stride_as, q_len, D, BLOCK_M, BLOCK_D, True, False)
        m = tl.load(LSE_IN + first_statistic + row, mask=row < q_len, other=float("-inf")) * _LOG2E
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        l = tl.zeros([BLOCK_M], dtype=tl.float32)
    head_key = head + head_offset
    acc, m, l = _attend(acc, m, l, q, K, V, stride_ks, stride_vs, k_len, lo, hi, i, K_POSITIONS,
                        inner, 0, 0, (inner_stop - inner) // BLOCK_N,
                        scale, cap, slope, keep_scale, dropout_threshold, seed, head_key, batch, kv_head,
                        D, BLOCK_D, BLOCK_N, False, SOFTCAP, ALIBI, DROPOUT, PRECISION, TMA)  # fmt: skip
    acc, m, l = _attend(acc, m, l, q, K, V, stride_ks, stride_vs, k_len, lo, hi, i, K_POSITIONS,
                        start, inner, inner_stop, left + right,
                        scale, cap, slope, keep_scale, dropout_threshold, seed, head_key, batch, kv_head,
                        D, BLOCK_D, BLOCK_N, True, SOFTCAP, ALIBI, DROPOUT, PRECISION, TMA)  # fmt: skip
    if SINKS:
        sink = tl.load(SINK_LOGITS + head).to(tl.float32) * _LOG2E
        m_new = tl.maximum(m, sink)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.exp2(sink - shift)
        acc = acc * alpha[:, None]
        m = m_new
    seen = l > 0.0
    l = tl.where(seen, l, 1.0)
    acc = acc / l[:, None]
    store_rows(OUT, acc, q_start, stride_os, q_len, D, BLOCK_M, BLOCK_D)
    lse = tl.where(seen, (m + tl.log2(l)) * _LN2, float("-inf"))
    tl.store(LSE + row, lse, mask=row < q_len)


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, q_positions: Tensor, k_positions: Tensor, *,
    acc: Tensor | None, lse_in: Tensor | None, out: Tensor, lse: Tensor, softmax_scale: float, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: int = 0,
    head_offset: int = 0, last: bool = True, allow_tf32: bool | None = None, hip: bool | None = None,
    config: Config | None = None,
) -> Launch:  # fmt: skip
    """The launch behind :func:`forward`, with every tensor already allocated."""
    batch, q_len, heads, head_dim = q.shape
    heavy = softcap > 0 or dropout_p > 0 or alibi_slopes is not None
    config = config or choose("forward", q.device, head_dim, q.dtype, heavy=heavy)
    tiles = triton.cdiv(q_len, config.block_m)
    arguments = {
        "Q": q, "ACC": acc, "OUT": out, "LSE_IN": lse_in, "LSE": lse, "LO": lo, "HI": hi,
        "Q_POSITIONS": q_positions, "K_POSITIONS": k_positions, "ALIBI_SLOPES": alibi_slopes, "SINK_LOGITS": sinks,
        **strides("q", q), **strides("k", k), **strides("v", v), **strides("a", acc), **strides("o", out),
        "stride_rows": 0 if lo.shape[0] == 1 else q_len,
        "stride_slopes": 0 if alibi_slopes is None or alibi_slopes.dim() == 1 else heads,
        **score_arguments(softmax_scale, softcap, dropout_p, dropout_seed, head_offset),
        "heads": heads, "q_len": q_len, "k_len": k.shape[1], "tiles": tiles,
        "GROUP": heads // k.shape[2], "D": head_dim, "BLOCK_D": padded(head_dim),
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "CARRY": acc is not None, "LAST": last,
        "ALIBI": alibi_slopes is not None, "SINKS": sinks is not None and last,
        "PRECISION": precision(q.dtype, allow_tf32, hip),
        **descriptors(config, {"K": (k, config.block_n), "V": (v, config.block_n)}),
    }  # fmt: skip
    return Launch(forward_kernel, batch * heads * tiles, arguments, config)


def forward(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, q_positions: Tensor, k_positions: Tensor, *,
    softmax_scale: float, carry: tuple[Tensor, Tensor] | None = None, last: bool = True, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: int = 0,
    head_offset: int = 0, allow_tf32: bool | None = None, config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of ``q`` over the keys of each row's interval, going on from ``carry``.

    Args:
        q: ``[batch, q_len, heads, head_dim]``, float16, bfloat16 or float32, head_dim up to 256.
        k, v: ``[batch, k_len, kv_heads, head_dim]`` of the same dtype; head ``h`` reads kv head
            ``h // (heads // kv_heads)``.
        lo, hi: int32 ``[1 or batch, q_len]``, first and one-past-last key of each row, neither ever falling.
        q_positions, k_positions: int32 ``[q_len]``, ``[k_len]``, global (ALiBi and dropout depend on them).
        softmax_scale: positive.
        carry: float32 ``(acc [batch, q_len, heads, head_dim], lse [batch, heads, q_len])`` over the keys seen before:
            normalised, natural logarithm, -inf for a row that saw nothing. Unless ``last``, it is updated in place.
        last: fold ``sinks`` in and round the output to ``q.dtype``.
        softcap, alibi_slopes, sinks, dropout_p, dropout_seed, head_offset: as in ``seqpar.backends.base.Score``.
        allow_tf32: for float32; None follows ``torch.get_float32_matmul_precision``.
        config: tile sizes; None takes them from the table.

    Returns:
        ``(acc, lse)`` over all keys so far. A row that saw nothing has 0 and -inf.

    Raises:
        ValueError: a ``softmax_scale`` that is not positive.
    """
    batch, q_len, heads, _ = q.shape
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    acc, lse_in = (unit_stride(carry[0]), carry[1].contiguous()) if carry is not None else (None, None)
    if acc is not None and lse_in is not None and not last:
        out, lse = acc, lse_in
    else:
        out = torch.empty(q.shape, device=q.device, dtype=q.dtype if last else torch.float32)
        lse = q.new_empty(batch, heads, q_len, dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    shared: dict[str, Any] = {
        "softmax_scale": softmax_scale, "softcap": softcap,
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.contiguous(),
        "sinks": None if sinks is None else sinks.contiguous(), "dropout_p": dropout_p, "dropout_seed": dropout_seed,
        "head_offset": head_offset, "last": last, "allow_tf32": allow_tf32, "lse_in": lse_in, "acc": acc,
    }  # fmt: skip
    inputs: dict[str, Any] = {
        "q": q, "k": k, "v": v, "lo": lo.contiguous(), "hi": hi.contiguous(), "q_positions": q_positions,
        "k_positions": k_positions, **shared,
    }  # fmt: skip
    if config is None and tune.wanted(q):
        scratch: dict[str, Any] = {"out": torch.empty_like(out), "lse": torch.empty_like(lse)}
        flags = f"{acc is not None}{last}{softcap > 0}{alibi_slopes is not None}{dropout_p > 0}"
        config = tune.tuned("forward", q, k, flags, lambda c: forward_launch(**inputs, **scratch, config=c))
    forward_launch(**inputs, out=out, lse=lse, config=config)()
    return out, lse
