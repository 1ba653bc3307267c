"""Backward: two kernels that add into float32 buffers; deterministic, because each element has one writer.

    p  = exp(s - lse)                 dv += p^T dout
    dp = dout v^T                     ds  = p * (dp - delta) * chain,   delta = rowsum(dout * out) - dlse
    dk += scale * ds^T q              dq += scale * ds k

``dkdv_kernel`` holds a tile of keys and loops over queries, ``dq_kernel`` holds a tile of queries and loops over keys.
Both recompute the scores: seven tile products instead of the five of FlashAttention-2's backward, whose single kernel
needs atomics for ``dq`` and so adds in an order that changes from run to run.

The gradients are added to the buffers, not stored: the steps of a ring accumulate without a temporary. ``p`` needs only
the finished ``lse`` (over all keys, sinks included), not the keys of other steps, so the backward needs no carry.

Shapes: b batch, q local queries, k keys of a step, h query heads, n KV heads, d head_dim. The names inside the
kernels are explained in ``tiles.py``.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

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
    Constants,
    HeadRows,
    HeadScore,
    Intervals,
    Keys,
    Line,
    Score,
    add_rows,
    alibi_bias,
    dropout_keep,
    load_positions,
    load_rows,
    score_arguments,
    score_constants,
    stream_line,
    stream_rows,
    tanh,
    tile_split,
    tile_start,
)


class _KeyTile(NamedTuple):
    """The tile of keys that a program of ``dkdv_kernel`` holds."""

    k: tl.tensor  # [BLOCK_N, BLOCK_D]
    v: tl.tensor  # [BLOCK_N, BLOCK_D]
    column: tl.tensor  # [BLOCK_N]
    j: tl.tensor  # [BLOCK_N]


class _Queries(NamedTuple):
    """The queries of one head, which ``dkdv_kernel`` reads tile by tile."""

    Q: HeadRows
    DOUT: HeadRows
    LSE: Line
    DELTA: Line
    LO: Line
    HI: Line
    POSITIONS: tl.tensor


class _QueryTile(NamedTuple):
    """The tile of queries that a program of ``dq_kernel`` holds."""

    q: tl.tensor  # [BLOCK_M, BLOCK_D]
    dout: tl.tensor  # [BLOCK_M, BLOCK_D]
    lse: tl.tensor  # [BLOCK_M], base 2, as are the next
    delta: tl.tensor
    lo: tl.tensor
    hi: tl.tensor
    i: tl.tensor


@triton.jit
def _probabilities(qk, lse, i, j, score, C: tl.constexpr):
    """``p = exp(s - lse)`` of the products ``qk``, and the derivative of ``s`` by ``scale * qk``."""
    if C.SOFTCAP:
        squashed = tanh(qk * score.scale)
        s = score.cap * squashed
        chain = 1.0 - squashed * squashed
    else:
        s = qk * score.scale
        chain = 1.0
    if C.ALIBI:
        s -= alibi_bias(score, i, j)
    return tl.exp2(s - lse), chain


@triton.jit
def _accumulate_dkdv(dk, dv, keys, queries, score, tiles, C: tl.constexpr, MASKED: tl.constexpr):
    """Add the gradients of ``tiles`` of one head's queries. Scores are transposed: ``[BLOCK_N, BLOCK_M]``."""
    for n in range(0, tiles.count):
        q_start = tile_start(tiles, n, C.BLOCK_M, MASKED)
        row = q_start + tl.arange(0, C.BLOCK_M)
        q = stream_rows(queries.Q, q_start, C, C.BLOCK_M, MASKED)  # [BLOCK_M, BLOCK_D]
        lse = stream_line(queries.LSE, q_start, C, C.BLOCK_M)
        i = load_positions(queries.POSITIONS, row, queries.Q.length, C)
        qk = tl.dot(keys.k, tl.trans(q), input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_M]
        p, chain = _probabilities(qk, lse[None, :], i[None, :], keys.j[:, None], score, C)
        if MASKED:
            hi = stream_line(queries.HI, q_start, C, C.BLOCK_M)
            lo = stream_line(queries.LO, q_start, C, C.BLOCK_M)
            p = tl.where((keys.column[:, None] >= lo[None, :]) & (keys.column[:, None] < hi[None, :]), p, 0.0)
        dout = stream_rows(queries.DOUT, q_start, C, C.BLOCK_M, MASKED)  # [BLOCK_M, BLOCK_D]
        dp = tl.dot(keys.v, tl.trans(dout), input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_M]
        if C.DROPOUT:
            keep = dropout_keep(score, i[None, :], keys.j[:, None])
            dropped = tl.where(keep, p * score.keep_scale, 0.0)
            dp = tl.where(keep, dp * score.keep_scale, 0.0)
        else:
            dropped = p
        dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=C.PRECISION)
        # Loaded only now: during the products above, delta would occupy registers.
        delta = stream_line(queries.DELTA, q_start, C, C.BLOCK_M)
        ds = p * (dp - delta[None, :]) * chain
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=C.PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dkdv_kernel(
    Q, stride_qb, stride_qs, stride_qh,        # [b, q, h, d], pointer or descriptor
    K, stride_kb, stride_ks, stride_kh,        # [b, k, n, d]
    V, stride_vb, stride_vs, stride_vh,        # [b, k, n, d]
    DOUT, stride_db, stride_ds, stride_dh,     # [b, q, h, d], pointer or descriptor
    DK, stride_dkb, stride_dks, stride_dkh,    # [b, k, n, d], float32
    DV, stride_dvb, stride_dvs, stride_dvh,    # [b, k, n, d], float32
    STATISTICS, BOUNDS, RANGES,                # see tiles.py
    Q_POSITIONS, K_POSITIONS,                  # int32 [q], [k]
    ALIBI_SLOPES, stride_slopes,               # [h] or [b, h]
    softmax_scale, scale, cap, keep_scale, dropout_threshold, seed, head_offset,
    heads, q_len, q_padded, k_len, tiles, row_sets,
    C: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one KV head, with all its query heads: grid ``batch * kv_heads * tiles``."""
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    program = tl.program_id(0)
    kv_heads = heads // C.GROUP
    tile = program % tiles
    kv_head = program // tiles % kv_heads
    batch = program // tiles // kv_heads
    k_start = tile * BLOCK_N
    column = k_start + tl.arange(0, BLOCK_N)

    # The queries that see the tile: RANGES[0] holds begin and inner_begin, RANGES[1] inner_end and end.
    row_set = tl.where(row_sets == 1, 0, batch)
    of_hi = RANGES + row_set * 2 * tiles + tile
    of_lo = of_hi + row_sets * 2 * tiles
    begin, end = tl.load(of_hi), tl.load(of_lo + tiles)
    if begin >= end:
        return  # no query sees these keys
    inner, edges = tile_split(begin, end, tl.load(of_hi + tiles), tl.load(of_lo), C.BLOCK_M)

    K = HeadRows(K, batch, kv_head, (stride_kb, stride_ks, stride_kh), k_len)
    V = HeadRows(V, batch, kv_head, (stride_vb, stride_vs, stride_vh), k_len)
    k = load_rows(K, k_start, C, BLOCK_N, True)
    v = load_rows(V, k_start, C, BLOCK_N, True)
    j = tl.load(K_POSITIONS + column, mask=column < k_len, other=0) if C.ALIBI or C.DROPOUT else column
    keys = _KeyTile(k, v, column, j)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    # The query heads of the group are summed in registers: dk and dv have one writer, and k and v are read once.
    for member in range(0, C.GROUP):
        head = kv_head * C.GROUP + member
        slope = tl.load(ALIBI_SLOPES + batch * stride_slopes + head) * LOG2E if C.ALIBI else 0.0
        score = HeadScore(scale, cap, slope, keep_scale, dropout_threshold, seed, batch, head + head_offset)
        statistics = (batch * heads + head) * 2
        queries = _Queries(
            HeadRows(Q, batch, head, (stride_qb, stride_qs, stride_qh), q_len),
            HeadRows(DOUT, batch, head, (stride_db, stride_ds, stride_dh), q_len),
            Line(STATISTICS, statistics, q_padded),
            Line(STATISTICS, statistics + 1, q_padded),
            Line(BOUNDS, row_set + row_sets, q_padded),
            Line(BOUNDS, row_set, q_padded),
            Q_POSITIONS,
        )
        dk, dv = _accumulate_dkdv(dk, dv, keys, queries, score, inner, C, False)
        dk, dv = _accumulate_dkdv(dk, dv, keys, queries, score, edges, C, True)

    DK = HeadRows(DK, batch, kv_head, (stride_dkb, stride_dks, stride_dkh), k_len)
    DV = HeadRows(DV, batch, kv_head, (stride_dvb, stride_dvs, stride_dvh), k_len)
    add_rows(DV, dv, k_start, C, BLOCK_N)
    add_rows(DK, dk * softmax_scale, k_start, C, BLOCK_N)


@triton.jit
def _accumulate_dq(dq, queries, keys, score, tiles, C: tl.constexpr, MASKED: tl.constexpr):
    """Add the gradient of ``tiles`` of keys."""
    for n in range(0, tiles.count):
        k_start = tile_start(tiles, n, C.BLOCK_N, MASKED)
        column = k_start + tl.arange(0, C.BLOCK_N)
        k = stream_rows(keys.K, k_start, C, C.BLOCK_N, MASKED)  # [BLOCK_N, BLOCK_D]
        j = load_positions(keys.POSITIONS, column, keys.K.length, C)
        qk = tl.dot(queries.q, tl.trans(k), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        p, chain = _probabilities(qk, queries.lse[:, None], queries.i[:, None], j[None, :], score, C)
        if MASKED:
            seen = (column[None, :] >= queries.lo[:, None]) & (column[None, :] < queries.hi[:, None])
            p = tl.where(seen, p, 0.0)
        v = stream_rows(keys.V, k_start, C, C.BLOCK_N, MASKED)  # [BLOCK_N, BLOCK_D]
        dp = tl.dot(queries.dout, tl.trans(v), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if C.DROPOUT:
            keep = dropout_keep(score, queries.i[:, None], j[None, :])
            dp = tl.where(keep, dp * score.keep_scale, 0.0)
        ds = p * (dp - queries.delta[:, None]) * chain
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=C.PRECISION)
    return dq


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dq_kernel(
    Q, stride_qb, stride_qs, stride_qh,        # [b, q, h, d]
    K, stride_kb, stride_ks, stride_kh,        # [b, k, n, d], pointer or descriptor
    V, stride_vb, stride_vs, stride_vh,        # [b, k, n, d], pointer or descriptor
    DOUT, stride_db, stride_ds, stride_dh,     # [b, q, h, d]
    DQ, stride_dqb, stride_dqs, stride_dqh,    # [b, q, h, d], float32
    STATISTICS,                                # see tiles.py
    LO, HI, stride_rows,                       # int32 [1 or b, q]
    Q_POSITIONS, K_POSITIONS,                  # int32 [q], [k]
    ALIBI_SLOPES, stride_slopes,               # [h] or [b, h]
    softmax_scale, scale, cap, keep_scale, dropout_threshold, seed, head_offset,
    heads, q_len, q_padded, k_len, tiles,
    C: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: grid ``batch * heads * tiles``. Tiles and intervals as in the forward."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_D: tl.constexpr = C.BLOCK_D
    program = tl.program_id(0)
    q_start = (tiles - 1 - program % tiles) * BLOCK_M
    head = program // tiles % heads
    batch = program // tiles // heads
    kv_head = head // C.GROUP
    row = q_start + tl.arange(0, BLOCK_M)
    row_in = tl.minimum(row, q_len - 1)
    q_last = tl.minimum(q_start + BLOCK_M, q_len) - 1
    LO += batch * stride_rows
    HI += batch * stride_rows
    begin, end = tl.load(LO + q_start), tl.load(HI + q_last)
    if begin >= end:
        return  # these queries see no key
    lo = tl.load(LO + row_in)
    hi = tl.load(HI + row_in)
    inner, edges = tile_split(begin, end, tl.load(LO + q_last), tl.load(HI + q_start), C.BLOCK_N)

    Q = HeadRows(Q, batch, head, (stride_qb, stride_qs, stride_qh), q_len)
    DOUT = HeadRows(DOUT, batch, head, (stride_db, stride_ds, stride_dh), q_len)
    K = HeadRows(K, batch, kv_head, (stride_kb, stride_ks, stride_kh), k_len)
    V = HeadRows(V, batch, kv_head, (stride_vb, stride_vs, stride_vh), k_len)
    DQ = HeadRows(DQ, batch, head, (stride_dqb, stride_dqs, stride_dqh), q_len)
    STATISTICS += (tl.cast(batch, tl.int64) * heads + head) * 2 * q_padded + row
    q = load_rows(Q, q_start, C, BLOCK_M, True)
    dout = load_rows(DOUT, q_start, C, BLOCK_M, True)
    lse = tl.load(STATISTICS)
    delta = tl.load(STATISTICS + q_padded)
    i = tl.load(Q_POSITIONS + row_in) if C.ALIBI or C.DROPOUT else row
    slope = tl.load(ALIBI_SLOPES + batch * stride_slopes + head) * LOG2E if C.ALIBI else 0.0

    score = HeadScore(scale, cap, slope, keep_scale, dropout_threshold, seed, batch, head + head_offset)
    queries, keys = _QueryTile(q, dout, lse, delta, lo, hi, i), Keys(K, V, K_POSITIONS)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    dq = _accumulate_dq(dq, queries, keys, score, inner, C, False)
    dq = _accumulate_dq(dq, queries, keys, score, edges, C, True)
    add_rows(DQ, dq * softmax_scale, q_start, C, BLOCK_M)


def backward_launches(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    intervals: Intervals,
    score: Score,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    allow_tf32: bool | None = None,
    hip: bool | None = None,
    dkdv_config: Config | None = None,
    dq_config: Config | None = None,
) -> tuple[Launch, Launch, Launch]:
    """The launches behind :func:`attention_backward`: of the statistics, ``dk, dv`` and ``dq``, in this order."""
    batch, q_len, heads, head_dim = q.shape
    k_len, kv_heads = k.shape[1:3]
    features = score_constants(score)
    dkdv_config = dkdv_config or choose("dkdv", q.device, head_dim, q.dtype, heavy=any(features.values()))
    dq_config = dq_config or choose("dq", q.device, head_dim, q.dtype, heavy=any(features.values()))
    statistics_first, statistics = statistics_launch(lse, delta)
    q_padded = statistics.shape[1]
    lo, hi = intervals.lo.contiguous(), intervals.hi.contiguous()
    shared = {
        **strides(q=q, k=k, v=v, d=dout),
        **score_arguments(score, heads),
        "softmax_scale": score.softmax_scale,
        "Q_POSITIONS": intervals.q_positions,
        "K_POSITIONS": intervals.k_positions,
        "heads": heads,
        "q_len": q_len,
        "q_padded": q_padded,
        "k_len": k_len,
    }

    def constants(config: Config, tma: bool) -> Constants:
        return Constants(
            D=head_dim,
            BLOCK_D=padded(head_dim),
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            GROUP=heads // kv_heads,
            PRECISION=precision(q.dtype, allow_tf32, hip),
            TMA=tma,
            **features,
        )

    block_m, block_n = dkdv_config.block_m, dkdv_config.block_n
    tiles = triton.cdiv(k_len, block_n)
    bounds = padded_bounds(lo, hi, k_len, q_padded)
    streamed, tma = descriptors(
        dkdv_config,
        {"Q": (q, block_m), "DOUT": (dout, block_m)},
        {"STATISTICS": (statistics, block_m), "BOUNDS": (bounds, block_m)},
    )
    dkdv_arguments = {
        **shared,
        **strides(dk=dk, dv=dv),
        **streamed,
        "K": k,
        "V": v,
        "DK": dk,
        "DV": dv,
        "RANGES": query_ranges(bounds.view(2, -1, q_padded), k_len, block_n),
        "row_sets": lo.shape[0],
        "tiles": tiles,
        "C": constants(dkdv_config, tma),
    }
    dkdv_launch = Launch(dkdv_kernel, batch * kv_heads * tiles, dkdv_arguments, dkdv_config)

    block_m, block_n = dq_config.block_m, dq_config.block_n
    tiles = triton.cdiv(q_len, block_m)
    streamed, tma = descriptors(dq_config, {"K": (k, block_n), "V": (v, block_n)})
    dq_arguments = {
        **shared,
        **strides(dq=dq),
        **streamed,
        "Q": q,
        "DOUT": dout,
        "STATISTICS": statistics,
        "DQ": dq,
        "LO": lo,
        "HI": hi,
        "stride_rows": 0 if lo.shape[0] == 1 else q_len,
        "tiles": tiles,
        "C": constants(dq_config, tma),
    }
    dq_launch = Launch(dq_kernel, batch * heads * tiles, dq_arguments, dq_config)
    return statistics_first, dkdv_launch, dq_launch


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    intervals: Intervals,
    score: Score,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    allow_tf32: bool | None = None,
    dkdv_config: Config | None = None,
    dq_config: Config | None = None,
) -> None:
    """Add the gradients of :func:`~.forward.attention_forward` over these keys to ``dq, dk, dv``.

    Deterministic. The gradient of the sinks follows from ``lse`` and ``delta`` without a kernel.

    Args:
        dout: ``[batch, q_len, heads, head_dim]`` in the dtype of ``q``.
        q: as for the forward.
        k: as for the forward.
        v: as for the forward.
        lse: float32 ``[batch, heads, q_len]``, the finished one: over all keys, sinks included.
        delta: float32 ``[batch, heads, q_len]``, from :func:`~.preprocess.delta`.
        intervals: as for the forward.
        score: as for the forward.
        dq: float32, shape of ``q``; added to in place.
        dk: float32, shape of ``k``; added to in place.
        dv: float32, shape of ``v``; added to in place.
        allow_tf32: as for the forward.
        dkdv_config: tile sizes of ``dk, dv``; None takes them from the table.
        dq_config: tile sizes of ``dq``; None takes them from the table.

    Raises:
        ValueError: a ``softmax_scale`` that is not positive.
    """
    if q.numel() == 0 or k.numel() == 0:
        return
    buffers = [unit_stride(x) for x in (dq, dk, dv)]
    dout, q, k, v = (unit_stride(x) for x in (dout, q, k, v))
    launches = partial(
        backward_launches, dout, q, k, v, lse.contiguous(), delta.contiguous(), intervals, score, allow_tf32=allow_tf32
    )
    if tune.wanted(q) and dkdv_config is None and dq_config is None:
        scratch = [torch.zeros_like(x) for x in buffers]
        flags = f"{score.softcap > 0}{score.alibi_slopes is not None}{score.dropout_p > 0}"

        def candidate(config: Config, which: int) -> Launch:
            made = launches(*scratch, dkdv_config=config, dq_config=config)
            made[0]()  # the statistics, which the timed kernel reads
            return made[which]

        dkdv_config = tune.tuned("dkdv", q, k, flags, lambda config: candidate(config, 1))
        dq_config = tune.tuned("dq", q, k, flags, lambda config: candidate(config, 2))
    for launch in launches(*buffers, dkdv_config=dkdv_config, dq_config=dq_config):
        launch()
    for given, used in zip((dq, dk, dv), buffers, strict=True):
        if used is not given:
            given.copy_(used)
