"""Backward: two kernels that add into float32 buffers, deterministic because each element has one writer.

``dk, dv`` go by tiles of keys, ``dq`` by tiles of queries, both recomputing the scores (FlashAttention-2's
backward without its atomics: seven products of tiles rather than five, in a fixed order). The buffers are added to,
not written, so that the hops of a ring need no temporary.

The queries that see a tile of keys follow from the intervals never falling (``preprocess.py``).
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
from .preprocess import padded_bounds, query_ranges, statistics_launch
from .tiles import (
    LOG2E,
    UNSPECIALIZED,
    add_rows,
    alibi_bias,
    head_base,
    kept,
    load_line,
    load_rows,
    score_arguments,
    tanh,
    tile_split,
)

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _probabilities(qk, lse, i, j, slope, scale, cap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """``exp(S - lse)`` and the derivative of ``S`` by the scaled product, short of the scale itself."""
    if SOFTCAP:
        squashed = tanh(qk * scale)
        s = cap * squashed
        chain = 1.0 - squashed * squashed
    else:
        s = qk * scale
        chain = 1.0
    if ALIBI:
        s -= alibi_bias(slope, i, j)
    return tl.exp2(s - lse), chain


@triton.jit
def _accumulate_dkdv(dk, dv, k, v, Q, DOUT, STATISTICS, BOUNDS, Q_POSITIONS, stride_qs, stride_ds, q_len, q_padded,
                     statistics_row, bounds_row, row_sets, column, j,
                     start, skip_from, skip_to, tiles, scale, cap, slope, keep_scale, dropout_threshold, seed,
                     head_key, batch, head, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                     MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
                     PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Add ``tiles`` tiles of one head's queries from ``start``, leaving out ``[skip_from, skip_to)``; transposed."""
    for n in range(0, tiles):
        q_start = start + n * BLOCK_M
        if MASKED:
            q_start += tl.where(q_start >= skip_from, skip_to - skip_from, 0)
        row = q_start + tl.arange(0, BLOCK_M)
        q = load_rows(Q, batch, head, q_start, stride_qs, q_len, D, BLOCK_M, BLOCK_D, MASKED, TMA)
        lse = load_line(STATISTICS, statistics_row, q_start, q_padded, BLOCK_M, TMA)
        i = tl.load(Q_POSITIONS + row, mask=row < q_len, other=0) if ALIBI or DROPOUT else row
        qk = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [keys, queries]
        p, chain = _probabilities(qk, lse[None, :], i[None, :], j[:, None], slope, scale, cap, SOFTCAP, ALIBI)
        if MASKED:
            hi = load_line(BOUNDS, bounds_row, q_start, q_padded, BLOCK_M, TMA)
            lo = load_line(BOUNDS, bounds_row + row_sets, q_start, q_padded, BLOCK_M, TMA)
            p = tl.where((column[:, None] >= lo[None, :]) & (column[:, None] < hi[None, :]), p, 0.0)
        dout = load_rows(DOUT, batch, head, q_start, stride_ds, q_len, D, BLOCK_M, BLOCK_D, MASKED, TMA)
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        if DROPOUT:
            keep = kept(seed, dropout_threshold, i[None, :], j[:, None], head_key, batch)
            dropped = tl.where(keep, p * keep_scale, 0.0)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        else:
            dropped = p
        dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=PRECISION)
        delta = load_line(STATISTICS, statistics_row + 1, q_start, q_padded, BLOCK_M, TMA)
        ds = p * (dp - delta[None, :]) * chain
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dkdv_kernel(Q, K, V, DOUT, STATISTICS, DK, DV, BOUNDS, RANGES, Q_POSITIONS, K_POSITIONS, ALIBI_SLOPES,
                stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
                stride_db, stride_ds, stride_dh, stride_dkb, stride_dks, stride_dkh, stride_dvb, stride_dvs,
                stride_dvh, stride_slopes, softmax_scale, scale, cap, keep_scale, dropout_threshold, seed,
                head_offset, heads, q_len, q_padded, k_len, tiles, row_sets, GROUP: tl.constexpr, D: tl.constexpr,
                BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
                ALIBI: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
                TMA: tl.constexpr):  # fmt: skip
    """One tile of keys of one key/value head, all its query heads: grid ``batch * kv_heads * tiles``."""
    program = tl.program_id(0)
    kv_heads = heads // GROUP
    tile = program % tiles
    kv_head = program // tiles % kv_heads
    batch = program // tiles // kv_heads
    k_start = tile * BLOCK_N
    column = k_start + tl.arange(0, BLOCK_N)
    # RANGES [first row of hi or lo, row set, (key past the first | key past the last) x tiles]
    rows = tl.where(row_sets == 1, 0, batch)
    of_hi = RANGES + rows * 2 * tiles + tile
    of_lo = of_hi + row_sets * 2 * tiles
    begin, end = tl.load(of_hi), tl.load(of_lo + tiles)
    if begin >= end:
        return  # nobody sees these keys
    start, left, inner, inner_stop, right = tile_split(begin, end, tl.load(of_hi + tiles), tl.load(of_lo), BLOCK_M)
    K = head_base(K, batch, kv_head, stride_kb, stride_kh, False)
    V = head_base(V, batch, kv_head, stride_vb, stride_vh, False)
    k = load_rows(K, batch, kv_head, k_start, stride_ks, k_len, D, BLOCK_N, BLOCK_D, True, False)
    v = load_rows(V, batch, kv_head, k_start, stride_vs, k_len, D, BLOCK_N, BLOCK_D, True, False)
    j = tl.load(K_POSITIONS + column, mask=column < k_len, other=0) if ALIBI or DROPOUT else column
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        slope = tl.load(ALIBI_SLOPES + batch * stride_slopes + head) * _LOG2E if ALIBI else 0.0
        Q_HEAD = head_base(Q, batch, head, stride_qb, stride_qh, TMA)
        DOUT_HEAD = head_base(DOUT, batch, head, stride_db, stride_dh, TMA)
        head_key = head + head_offset
        dk, dv = _accumulate_dkdv(
            dk, dv, k, v, Q_HEAD, DOUT_HEAD, STATISTICS, BOUNDS, Q_POSITIONS, stride_qs, stride_ds,
            q_len, q_padded, (batch * heads + head) * 2, rows, row_sets, column, j,
            inner, 0, 0, (inner_stop - inner) // BLOCK_M,
            scale, cap, slope, keep_scale, dropout_threshold, seed, head_key, batch, head,
            D, BLOCK_D, BLOCK_M, False, SOFTCAP, ALIBI, DROPOUT, PRECISION, TMA)  # fmt: skip
        dk, dv = _accumulate_dkdv(
            dk, dv, k, v, Q_HEAD, DOUT_HEAD, STATISTICS, BOUNDS, Q_POSITIONS, stride_qs, stride_ds,
            q_len, q_padded, (batch * heads + head) * 2, rows, row_sets, column, j,
            start, inner, inner_stop, left + right,
            scale, cap, slope, keep_scale, dropout_threshold, seed, head_key, batch, head,
            D, BLOCK_D, BLOCK_M, True, SOFTCAP, ALIBI, DROPOUT, PRECISION, TMA)  # fmt: skip
    DK = head_base(DK, batch, kv_head, stride_dkb, stride_dkh, False)
    DV = head_base(DV, batch, kv_head, stride_dvb, stride_dvh, False)
    add_rows(DV, dv, k_start, stride_dvs, k_len, D, BLOCK_N, BLOCK_D)
    add_rows(DK, dk * softmax_scale, k_start, stride_dks, k_len, D, BLOCK_N, BLOCK_D)


@triton.jit
def _accumulate_dq(dq, q, dout, lse, delta, K, V, stride_ks, stride_vs, k_len, lo, hi, i, K_POSITIONS,
                   start, skip_from, skip_to, tiles, scale, cap, slope, keep_scale, dropout_threshold, seed,
                   head_key, batch, kv_head, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
                   MASKED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, DROPOUT: tl.constexpr,
                   PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Add ``tiles`` tiles of keys from ``start``, leaving out ``[skip_from, skip_to)``."""
    for n in range(0, tiles):
        k_start = start + n * BLOCK_N
        if MASKED:
            k_start += tl.where(k_start >= skip_from, skip_to - skip_from, 0)
        column = k_start + tl.arange(0, BLOCK_N)
        k = load_rows(K, batch, kv_head, k_start, stride_ks, k_len, D, BLOCK_N, BLOCK_D, MASKED, TMA)
        j = tl.load(K_POSITIONS + column, mask=column < k_len, other=0) if ALIBI or DROPOUT else column
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p, chain = _probabilities(qk, lse[:, None], i[:, None], j[None, :], slope, scale, cap, SOFTCAP, ALIBI)
        if MASKED:
            p = tl.where((column[None, :] >= lo[:, None]) & (column[None, :] < hi[:, None]), p, 0.0)
        v = load_rows(V, batch, kv_head, k_start, stride_vs, k_len, D, BLOCK_N, BLOCK_D, MASKED, TMA)
        dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            keep = kept(seed, dropout_threshold, i[:, None], j[None, :], head_key, batch)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        ds = p * (dp - delta[:, None]) * chain
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dq_kernel(Q, K, V, DOUT, STATISTICS, DQ, LO, HI, Q_POSITIONS, K_POSITIONS, ALIBI_SLOPES,
              stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
              stride_db, stride_ds, stride_dh, stride_dqb, stride_dqs, stride_dqh, stride_rows, stride_slopes,
              softmax_scale, scale, cap, keep_scale, dropout_threshold, seed, head_offset, heads, q_len,
              q_padded, k_len, tiles, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
              DROPOUT: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """One tile of queries of one head: grid ``batch * heads * tiles``."""
    program = tl.program_id(0)
    q_start = (tiles - 1 - program % tiles) * BLOCK_M
    head = program // tiles % heads
    batch = program // tiles // heads
    kv_head = head // GROUP
    row = q_start + tl.arange(0, BLOCK_M)
    row_in = tl.minimum(row, q_len - 1)
    LO += batch * stride_rows
    HI += batch * stride_rows
    q_last = tl.minimum(q_start + BLOCK_M, q_len) - 1
    begin, end = tl.load(LO + q_start), tl.load(HI + q_last)
    if begin >= end:
        return  # these queries see nothing
    lo = tl.load(LO + row_in)
    hi = tl.load(HI + row_in)
    start, left, inner, inner_stop, right = tile_split(begin, end, tl.load(LO + q_last), tl.load(HI + q_start), BLOCK_N)
    Q = head_base(Q, batch, head, stride_qb, stride_qh, False)
    DOUT = head_base(DOUT, batch, head, stride_db, stride_dh, False)
    K = head_base(K, batch, kv_head, stride_kb, stride_kh, TMA)
    V = head_base(V, batch, kv_head, stride_vb, stride_vh, TMA)
    STATISTICS += (tl.cast(batch, tl.int64) * heads + head) * 2 * q_padded + row
    q = load_rows(Q, batch, head, q_start, stride_qs, q_len, D, BLOCK_M, BLOCK_D, True, False)
    dout = load_rows(DOUT, batch, head, q_start, stride_ds, q_len, D, BLOCK_M, BLOCK_D, True, False)
    lse = tl.load(STATISTICS)
    delta = tl.load(STATISTICS + q_padded)
    i = tl.load(Q_POSITIONS + row_in) if ALIBI or DROPOUT else row
    slope = tl.load(ALIBI_SLOPES + batch * stride_slopes + head) * _LOG2E if ALIBI else 0.0
    head_key = head + head_offset
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    dq = _accumulate_dq(dq, q, dout, lse, delta, K, V, stride_ks, stride_vs, k_len, lo, hi, i, K_POSITIONS,
                        inner, 0, 0, (inner_stop - inner) // BLOCK_N,
                        scale, cap, slope, keep_scale, dropout_threshold, seed, head_key, batch, kv_head,
                        D, BLOCK_D, BLOCK_N, False, SOFTCAP, ALIBI, DROPOUT, PRECISION, TMA)  # fmt: skip
    dq = _accumulate_dq(dq, q, dout, lse, delta, K, V, stride_ks, stride_vs, k_len, lo, hi, i, K_POSITIONS,
                        start, inner, inner_stop, left + right,
                        scale, cap, slope, keep_scale, dropout_threshold, seed, head_key, batch, kv_head,
                        D, BLOCK_D, BLOCK_N, True, SOFTCAP, ALIBI, DROPOUT, PRECISION, TMA)  # fmt: skip
    DQ = head_base(DQ, batch, head, stride_dqb, stride_dqh, False)
    add_rows(DQ, dq * softmax_scale, q_start, stride_dqs, q_len, D, BLOCK_M, BLOCK_D)


def backward_launches(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, lo: Tensor, hi: Tensor,
    q_positions: Tensor, k_positions: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *, softmax_scale: float,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: int = 0,
    head_offset: int = 0, allow_tf32: bool | None = None, hip: bool | None = None,
    dkdv_config: Config | None = None, dq_config: Config | None = None,
) -> tuple[Launch, Launch, Launch]:  # fmt: skip
    """The launches behind :func:`backward`: of the statistics, of ``dk, dv`` and of ``dq``, to run in this order."""
    batch, q_len, heads, head_dim = q.shape
    k_len, kv_heads = k.shape[1:3]
    heavy = softcap > 0 or dropout_p > 0 or alibi_slopes is not None
    dkdv_config = dkdv_config or choose("dkdv", q.device, head_dim, q.dtype, heavy=heavy)
    dq_config = dq_config or choose("dq", q.device, head_dim, q.dtype, heavy=heavy)
    prepare, statistics = statistics_launch(lse, delta)
    q_padded = statistics.shape[1]
    bounds = padded_bounds(lo, hi, k_len, q_padded)
    shared = {
        "STATISTICS": statistics, "LO": lo, "HI": hi, "q_padded": q_padded, "Q_POSITIONS": q_positions,
        "K_POSITIONS": k_positions,
        "ALIBI_SLOPES": alibi_slopes, **strides("q", q), **strides("k", k), **strides("v", v), **strides("d", dout),
        "stride_rows": 0 if lo.shape[0] == 1 else q_len,
        "stride_slopes": 0 if alibi_slopes is None or alibi_slopes.dim() == 1 else heads,
        "softmax_scale": softmax_scale,
        **score_arguments(softmax_scale, softcap, dropout_p, dropout_seed, head_offset),
        "heads": heads, "q_len": q_len, "k_len": k_len, "GROUP": heads // kv_heads, "D": head_dim,
        "BLOCK_D": padded(head_dim), "ALIBI": alibi_slopes is not None,
        "PRECISION": precision(q.dtype, allow_tf32, hip),
    }  # fmt: skip
    tiles = triton.cdiv(k_len, dkdv_config.block_n)
    dkdv_launch = Launch(
        dkdv_kernel,
        batch * kv_heads * tiles,
        {
            **shared, "K": k, "V": v, "DK": dk, "DV": dv, **strides("dk", dk), **strides("dv", dv),
            "RANGES": query_ranges(bounds.view(2, -1, q_padded), k_len, dkdv_config.block_n), "row_sets": lo.shape[0],
            "tiles": tiles,
            "BLOCK_M": dkdv_config.block_m, "BLOCK_N": dkdv_config.block_n,
            **descriptors(
                dkdv_config,
                {"Q": (q, dkdv_config.block_m), "DOUT": (dout, dkdv_config.block_m)},
                {"STATISTICS": (statistics, dkdv_config.block_m), "BOUNDS": (bounds, dkdv_config.block_m)},
            ),
        },
        dkdv_config,
    )  # fmt: skip
    tiles = triton.cdiv(q_len, dq_config.block_m)
    dq_launch = Launch(
        dq_kernel,
        batch * heads * tiles,
        {
            **shared, "Q": q, "DOUT": dout, "DQ": dq, **strides("dq", dq), "tiles": tiles,
            "BLOCK_M": dq_config.block_m, "BLOCK_N": dq_config.block_n,
            **descriptors(
                dq_config,
                {"K": (k, dq_config.block_n), "V": (v, dq_config.block_n)},
            ),
        },
        dq_config,
    )  # fmt: skip
    return prepare, dkdv_launch, dq_launch


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, lo: Tensor, hi: Tensor,
    q_positions: Tensor, k_positions: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, *, softmax_scale: float,
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: int = 0,
    head_offset: int = 0, allow_tf32: bool | None = None, dkdv_config: Config | None = None,
    dq_config: Config | None = None,
) -> None:  # fmt: skip
    """Add the gradients of :func:`~.forward.forward` over these keys to ``dq, dk, dv``.

    Args:
        dout: ``[batch, q_len, heads, head_dim]`` in the dtype of ``q``.
        q, k, v, lo, hi, q_positions, k_positions: as for the forward.
        lse: float32 ``[batch, heads, q_len]``, the finished one over all keys, sinks included.
        delta: float32 ``[batch, heads, q_len]``, :func:`delta`.
        dq, dk, dv: float32, shapes of ``q, k, v``; added to in place.

    Deterministic. The sinks' gradient follows from ``lse`` and ``delta`` without a kernel.

    Raises:
        ValueError: a ``softmax_scale`` that is not positive.
    """
    if q.numel() == 0 or k.numel() == 0:
        return
    buffers = [unit_stride(x) for x in (dq, dk, dv)]
    inputs = (
        unit_stride(dout), unit_stride(q), unit_stride(k), unit_stride(v), lse.contiguous(), delta.contiguous(),
        lo.contiguous(), hi.contiguous(), q_positions, k_positions,
    )  # fmt: skip
    shared: dict[str, Any] = {
        "softmax_scale": softmax_scale, "softcap": softcap,
        "alibi_slopes": None if alibi_slopes is None else alibi_slopes.contiguous(), "dropout_p": dropout_p,
        "dropout_seed": dropout_seed, "head_offset": head_offset, "allow_tf32": allow_tf32,
    }  # fmt: skip
    if tune.wanted(q) and dkdv_config is None and dq_config is None:
        scratch = [torch.zeros_like(x) for x in buffers]
        flags = f"{softcap > 0}{alibi_slopes is not None}{dropout_p > 0}"

        def make(c: Config, which: int) -> Launch:
            launches = backward_launches(*inputs, *scratch, **shared, dkdv_config=c, dq_config=c)
            launches[0]()
            return launches[which]

        dkdv_config = tune.tuned("dkdv", q, k, flags, lambda c: make(c, 1))
        dq_config = tune.tuned("dq", q, k, flags, lambda c: make(c, 2))
    launches = backward_launches(*inputs, *buffers, **shared, dkdv_config=dkdv_config, dq_config=dq_config)
    for launch in launches:
        launch()
    for given, used in zip((dq, dk, dv), buffers, strict=True):
        if used is not given:
            given.copy_(used)
