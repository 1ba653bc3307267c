"""Backward: a kernel with five products of tiles, or a deterministic pair with seven, that add into float32 buffers.

    p  = exp(s - lse)                 dv += p^T dout
    dp = dout v^T                     ds  = p * (dp - delta) * chain,   delta = rowsum(dout * out) - dlse
    dk += scale * ds^T q              dq += scale * ds k

``backward_kernel`` holds a tile of keys and loops over queries. Many programs process the same tile of queries, and each
adds to its ``dq`` with atomics, in an order that changes from run to run.

For deterministic gradients, only one program may write an element. ``backward_kernel`` then computes dk and dv only, and
``dq_kernel`` computes dq: it holds a tile of queries, loops over keys, and computes the scores and ``dp`` once more.

Both kernels add the gradients to the buffers, so the steps of a ring accumulate without temporary tensors. If a buffer
is new, they store to it instead. If several programs add to a new buffer, it is filled with zeros first. ``p`` depends
on the other steps only through the final ``lse`` (over all keys, sinks included), so the backward needs no carry.

Shapes: b batch, q local queries, k keys of a step, h query heads, n KV heads, d head_dim of q and k, e head_dim
of v. The names inside the kernels are explained in ``tiles.py``.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tune
from .configs import Config, choose, for_split, processors
from .launch import (
    Launch,
    Repeated,
    describable,
    descriptors,
    dies,
    if_tail,
    layout_key,
    precision,
    strides,
    unit_stride,
    widths,
)
from .preprocess import bounds_and_ranges, statistics
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
    products,
    program_index,
    reduce_rows,
    score_arguments,
    score_constants,
    score_values,
    stream_line,
    stream_rows,
    tanh,
    tile_split,
    tile_start,
)


class _KeyTile(NamedTuple):
    """The tile of keys that a program of ``backward_kernel`` holds."""

    k: tl.tensor  # [BLOCK_N, BLOCK_D]
    k_tail: tl.tensor  # [BLOCK_N, TAIL]; k itself without a tail
    v: tl.tensor  # [BLOCK_N, BLOCK_DV]
    column: tl.tensor  # [BLOCK_N]
    j: tl.tensor  # [BLOCK_N]


class _Queries(NamedTuple):
    """The queries of one head, which ``backward_kernel`` reads tile by tile."""

    Q: HeadRows
    Q_TAIL: HeadRows
    DOUT: HeadRows
    DQ: HeadRows
    LSE: Line
    DELTA: Line
    LO: tl.tensor  # pointers to the first query's bounds
    HI: tl.tensor
    POSITIONS: tl.tensor
    begin: tl.tensor  # see tiles.py
    end: tl.tensor
    inner_begin: tl.tensor
    inner_end: tl.tensor


class _QueryTile(NamedTuple):
    """The tile of queries that a program of ``dq_kernel`` holds."""

    q: tl.tensor  # [BLOCK_M, BLOCK_D]
    q_tail: tl.tensor  # [BLOCK_M, TAIL]; q itself without a tail
    dout: tl.tensor  # [BLOCK_M, BLOCK_DV]
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
def _accumulate(dk, dk_tail, dv, keys, queries, score, softmax_scale, C: tl.constexpr, WITH_DQ: tl.constexpr):
    """Add the gradients of one head's queries. Scores are transposed: ``[BLOCK_N, BLOCK_M]``."""
    # disable_licm: values that are the same for all tiles are computed again for each, because they would not fit into
    # the registers. (Not for tf32x3, where splitting k and v into two halves again would take too long.)
    AGAIN: tl.constexpr = C.PRECISION != "tf32x3"
    CV: tl.constexpr = C.values
    CT: tl.constexpr = C.tail
    for q_start in tl.range(queries.begin // C.BLOCK_M * C.BLOCK_M, queries.end, C.BLOCK_M, disable_licm=AGAIN):
        row = q_start + tl.arange(0, C.BLOCK_M)
        q = stream_rows(queries.Q, q_start, C, C.BLOCK_M, True)  # [BLOCK_M, BLOCK_D]
        lse = stream_line(queries.LSE, q_start, C, C.BLOCK_M)
        i = load_positions(queries.POSITIONS, row, queries.Q.length, C)
        q_tail = stream_rows(queries.Q_TAIL, q_start, CT, C.BLOCK_M, True) if C.TAIL else q  # [BLOCK_M, TAIL]
        qk = products(keys.k, keys.k_tail, q, q_tail, C)  # [BLOCK_N, BLOCK_M]
        p, chain = _probabilities(qk, lse[None, :], i[None, :], keys.j[:, None], score, C)
        # A branch in one loop needs fewer registers than separate loops for masked and unmasked tiles.
        if (q_start < queries.inner_begin) | (q_start + C.BLOCK_M > queries.inner_end):
            lo, hi = tl.load(queries.LO + row), tl.load(queries.HI + row)
            p = tl.where((keys.column[:, None] >= lo[None, :]) & (keys.column[:, None] < hi[None, :]), p, 0.0)
        dout = stream_rows(queries.DOUT, q_start, CV, C.BLOCK_M, True)  # [BLOCK_M, BLOCK_DV]
        dp = tl.dot(keys.v, tl.trans(dout), input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_M]
        if C.DROPOUT:
            keep = dropout_keep(score, i[None, :], keys.j[:, None])
            dropped = tl.where(keep, p * score.keep_scale, 0.0)
            dp = tl.where(keep, dp * score.keep_scale, 0.0)
        else:
            dropped = p
        dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=C.PRECISION)
        # delta is loaded only here, because it would occupy registers during the products above.
        delta = stream_line(queries.DELTA, q_start, C, C.BLOCK_M)
        ds = (p * (dp - delta[None, :]) * chain).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=C.PRECISION)
        if C.TAIL:
            dk_tail = tl.dot(ds, q_tail, dk_tail, input_precision=C.PRECISION)
        if WITH_DQ:
            tl.static_assert(C.TAIL == 0)
            if C.TMA:
                # Transposed: sm_90 then reads both factors from shared memory, and none through registers.
                dq = tl.trans(tl.dot(tl.trans(keys.k), ds, input_precision=C.PRECISION))  # [BLOCK_M, BLOCK_D]
            else:
                dq = tl.dot(tl.trans(ds), keys.k, input_precision=C.PRECISION)
            reduce_rows(queries.DQ, dq * softmax_scale, q_start, C, C.BLOCK_M, C.TMA)
    return dk, dk_tail, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_kernel(
    Q, stride_qb, stride_qs, stride_qh, Q_TAIL,    # [b, q, h, d], pointers or descriptors
    K, stride_kb, stride_ks, stride_kh,        # [b, k, n, d]
    V, stride_vb, stride_vs, stride_vh,        # [b, k, n, e]
    DOUT, stride_db, stride_ds, stride_dh,     # [b, q, h, e], pointer or descriptor
    DQ, stride_dqb, stride_dqs, stride_dqh,    # WITH_DQ: [b, q, h, d], float32, pointer or descriptor
    DK, stride_dkb, stride_dks, stride_dkh,    # [b, k, n, d], float32
    DV, stride_dvb, stride_dvs, stride_dvh,    # [b, k, n, e], float32
    STATISTICS, BOUNDS, RANGES,                # see tiles.py
    Q_POSITIONS, K_POSITIONS,                  # int32 [q], [k]
    ALIBI_SLOPES, stride_slopes,               # [h] or [b, h]
    softmax_scale, scale, cap, keep_scale, dropout_threshold, seed, head_offset,
    heads, q_len, q_padded, k_len, tiles, row_sets,
    C: tl.constexpr, WITH_DQ: tl.constexpr, NEW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one KV head and ``1 / SPLIT`` of its query heads: grid ``batch * kv_heads * SPLIT * tiles``.

    NEW: DK and DV are uninitialised. SPLIT > 1: several programs add to each of their tiles.
    """
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_D: tl.constexpr = C.BLOCK_D
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    CV: tl.constexpr = C.values
    CT: tl.constexpr = C.tail
    TAIL: tl.constexpr = C.TAIL
    MEMBERS: tl.constexpr = C.GROUP // SPLIT
    program = program_index(C)
    tile = program % tiles
    first_head = program // tiles * MEMBERS % heads
    kv_head = first_head // C.GROUP
    batch = program // tiles * MEMBERS // heads
    k_start = tile * BLOCK_N
    column = k_start + tl.arange(0, BLOCK_N)

    # The queries that see the tile: RANGES[0] holds begin and inner_begin, RANGES[1] inner_end and end.
    row_set = tl.where(row_sets == 1, 0, batch)
    of_hi = RANGES + row_set * 2 * tiles + tile
    of_lo = of_hi + row_sets * 2 * tiles
    begin, end = tl.load(of_hi), tl.load(of_lo + tiles)
    # Two nested conditions, because the outer one is evaluated at compile time.
    if not NEW:
        if begin >= end:
            return  # no query sees these keys
    inner_begin, inner_end = tl.load(of_hi + tiles), tl.load(of_lo)
    # Probabilities of rows past the last key may overflow, so tiles with such rows are masked.
    inner_end = tl.where(k_start + BLOCK_N <= k_len, inner_end, 0)
    HI = BOUNDS + tl.cast(row_set, tl.int64) * q_padded
    LO = HI + tl.cast(row_sets, tl.int64) * q_padded

    K = HeadRows(K, batch, kv_head, (stride_kb, stride_ks, stride_kh), k_len)
    V = HeadRows(V, batch, kv_head, (stride_vb, stride_vs, stride_vh), k_len)
    k = load_rows(K, k_start, C, BLOCK_N, True)
    k_tail = load_rows(K, k_start, CT, BLOCK_N, True) if C.TAIL else k
    v = load_rows(V, k_start, CV, BLOCK_N, True)
    j = tl.load(K_POSITIONS + column, mask=column < k_len, other=0) if C.ALIBI or C.DROPOUT else column
    keys = _KeyTile(k, k_tail, v, column, j)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dk_tail = tl.zeros([BLOCK_N, TAIL], dtype=tl.float32) if C.TAIL else dk
    dv = tl.zeros([BLOCK_N, BLOCK_DV], dtype=tl.float32)
    # The query heads of the group are summed in registers, so that k and v are read once.
    for member in range(0, MEMBERS):
        head = first_head + member
        slope = tl.load(ALIBI_SLOPES + batch * stride_slopes + head) * LOG2E if C.ALIBI else 0.0
        score = HeadScore(scale, cap, slope, keep_scale, dropout_threshold, seed, batch, head + head_offset)
        statistics = (batch * heads + head) * 2
        queries = _Queries(
            HeadRows(Q, batch, head, (stride_qb, stride_qs, stride_qh), q_len),
            HeadRows(Q_TAIL if C.TAIL else Q, batch, head, (stride_qb, stride_qs, stride_qh), q_len),
            HeadRows(DOUT, batch, head, (stride_db, stride_ds, stride_dh), q_len),
            HeadRows(DQ, batch, head, (stride_dqb, stride_dqs, stride_dqh), q_len),
            Line(STATISTICS, statistics, q_padded),
            Line(STATISTICS, statistics + 1, q_padded),
            LO,
            HI,
            Q_POSITIONS,
            begin,
            end,
            inner_begin,
            inner_end,
        )
        dk, dk_tail, dv = _accumulate(dk, dk_tail, dv, keys, queries, score, softmax_scale, C, WITH_DQ)

    DK = HeadRows(DK, batch, kv_head, (stride_dkb, stride_dks, stride_dkh), k_len)
    DV = HeadRows(DV, batch, kv_head, (stride_dvb, stride_dvs, stride_dvh), k_len)
    if SPLIT > 1:
        reduce_rows(DV, dv, k_start, CV, BLOCK_N, False)
        tl.static_assert(C.TAIL == 0)
        reduce_rows(DK, dk * softmax_scale, k_start, C, BLOCK_N, False)
    else:
        add_rows(DV, dv, k_start, CV, BLOCK_N, NEW)
        add_rows(DK, dk * softmax_scale, k_start, C, BLOCK_N, NEW)
        if C.TAIL:
            add_rows(DK, dk_tail * softmax_scale, k_start, CT, BLOCK_N, NEW)


@triton.jit
def _accumulate_dq(dq, dq_tail, queries, keys, score, tiles, C: tl.constexpr, MASKED: tl.constexpr):
    """Add the gradient of ``tiles`` of keys."""
    CV: tl.constexpr = C.values
    CT: tl.constexpr = C.tail
    for n in range(0, tiles.count):
        k_start = tile_start(tiles, n, C.BLOCK_N, MASKED)
        column = k_start + tl.arange(0, C.BLOCK_N)
        k = stream_rows(keys.K, k_start, C, C.BLOCK_N, MASKED)  # [BLOCK_N, BLOCK_D]
        j = load_positions(keys.POSITIONS, column, keys.K.length, C)
        k_tail = stream_rows(keys.K_TAIL, k_start, CT, C.BLOCK_N, MASKED) if C.TAIL else k  # [BLOCK_N, TAIL]
        qk = products(queries.q, queries.q_tail, k, k_tail, C)  # [BLOCK_M, BLOCK_N]
        p, chain = _probabilities(qk, queries.lse[:, None], queries.i[:, None], j[None, :], score, C)
        if MASKED:
            seen = (column[None, :] >= queries.lo[:, None]) & (column[None, :] < queries.hi[:, None])
            p = tl.where(seen, p, 0.0)
        v = stream_rows(keys.V, k_start, CV, C.BLOCK_N, MASKED)  # [BLOCK_N, BLOCK_DV]
        dp = tl.dot(queries.dout, tl.trans(v), input_precision=C.PRECISION)  # [BLOCK_M, BLOCK_N]
        if C.DROPOUT:
            keep = dropout_keep(score, queries.i[:, None], j[None, :])
            dp = tl.where(keep, dp * score.keep_scale, 0.0)
        ds = (p * (dp - queries.delta[:, None]) * chain).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=C.PRECISION)
        if C.TAIL:
            dq_tail = tl.dot(ds, k_tail, dq_tail, input_precision=C.PRECISION)
    return dq, dq_tail


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dq_kernel(
    Q, stride_qb, stride_qs, stride_qh,            # [b, q, h, d]
    K, stride_kb, stride_ks, stride_kh, K_TAIL,    # [b, k, n, d], pointers or descriptors
    V, stride_vb, stride_vs, stride_vh,        # [b, k, n, e], pointer or descriptor
    DOUT, stride_db, stride_ds, stride_dh,     # [b, q, h, e]
    DQ, stride_dqb, stride_dqs, stride_dqh,    # [b, q, h, d], float32
    STATISTICS,                                # see tiles.py
    LO, HI, stride_rows,                       # int32 [1 or b, q]
    Q_POSITIONS, K_POSITIONS,                  # int32 [q], [k]
    ALIBI_SLOPES, stride_slopes,               # [h] or [b, h]
    softmax_scale, scale, cap, keep_scale, dropout_threshold, seed, head_offset,
    heads, q_len, q_padded, k_len, tiles,
    C: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: grid ``batch * heads * tiles``. Tiles and intervals as in the forward.

    NEW: DQ is uninitialised.
    """
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_D: tl.constexpr = C.BLOCK_D
    CV: tl.constexpr = C.values
    CT: tl.constexpr = C.tail
    TAIL: tl.constexpr = C.TAIL
    program = program_index(C)
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
    if not NEW:
        if begin >= end:
            return  # these queries see no key
    lo = tl.load(LO + row_in)
    hi = tl.load(HI + row_in)
    inner, edges = tile_split(begin, end, tl.load(LO + q_last), tl.load(HI + q_start), C.BLOCK_N)

    Q = HeadRows(Q, batch, head, (stride_qb, stride_qs, stride_qh), q_len)
    DOUT = HeadRows(DOUT, batch, head, (stride_db, stride_ds, stride_dh), q_len)
    K_TAIL = HeadRows(K_TAIL if C.TAIL else K, batch, kv_head, (stride_kb, stride_ks, stride_kh), k_len)
    K = HeadRows(K, batch, kv_head, (stride_kb, stride_ks, stride_kh), k_len)
    V = HeadRows(V, batch, kv_head, (stride_vb, stride_vs, stride_vh), k_len)
    DQ = HeadRows(DQ, batch, head, (stride_dqb, stride_dqs, stride_dqh), q_len)
    STATISTICS += (tl.cast(batch, tl.int64) * heads + head) * 2 * q_padded + row
    q = load_rows(Q, q_start, C, BLOCK_M, True)
    q_tail = load_rows(Q, q_start, CT, BLOCK_M, True) if C.TAIL else q
    dout = load_rows(DOUT, q_start, CV, BLOCK_M, True)
    lse = tl.load(STATISTICS)
    delta = tl.load(STATISTICS + q_padded)
    i = tl.load(Q_POSITIONS + row_in) if C.ALIBI or C.DROPOUT else row
    slope = tl.load(ALIBI_SLOPES + batch * stride_slopes + head) * LOG2E if C.ALIBI else 0.0

    score = HeadScore(scale, cap, slope, keep_scale, dropout_threshold, seed, batch, head + head_offset)
    queries, keys = _QueryTile(q, q_tail, dout, lse, delta, lo, hi, i), Keys(K, K_TAIL, V, K_POSITIONS)
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    dq_tail = tl.zeros([BLOCK_M, TAIL], dtype=tl.float32) if C.TAIL else dq
    dq, dq_tail = _accumulate_dq(dq, dq_tail, queries, keys, score, inner, C, False)
    dq, dq_tail = _accumulate_dq(dq, dq_tail, queries, keys, score, edges, C, True)
    add_rows(DQ, dq * softmax_scale, q_start, C, BLOCK_M, NEW)
    if C.TAIL:
        add_rows(DQ, dq_tail * softmax_scale, q_start, CT, BLOCK_M, NEW)


class Operands(NamedTuple):
    """The tensors of a backward on which no configuration depends: see :func:`attention_backward`."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    statistics: Tensor  # from preprocess.statistics
    intervals: Intervals
    dq: Tensor
    dk: Tensor
    dv: Tensor


def _arguments(
    operands: Operands, score: Score, config: Config, tma: bool, allow_tf32: bool | None, hip: bool | None
) -> dict[str, Any]:
    """Arguments that both kernels take."""
    dout, q, k, v, statistics, intervals, dq, dk, dv = operands
    heads = q.shape[2]
    constants = Constants(
        **widths(q, v),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        GROUP=heads // k.shape[2],
        PRECISION=precision(q.dtype, allow_tf32, hip),
        TMA=tma,
        DIES=dies(hip),
        **score_constants(score),
    )
    return {
        **strides(q=q, k=k, v=v, d=dout, dq=dq, dk=dk, dv=dv),
        **score_arguments(score, heads),
        "softmax_scale": score.softmax_scale,
        "Q_POSITIONS": intervals.q_positions,
        "K_POSITIONS": intervals.k_positions,
        "heads": heads,
        "q_len": q.shape[1],
        "q_padded": statistics.shape[1],
        "k_len": k.shape[1],
        "C": constants,
    }


def keys_launch(
    operands: Operands,
    score: Score,
    bounds: Tensor,
    ranges: Tensor,
    config: Config,
    *,
    with_dq: bool = False,
    new: bool = False,
    split: int = 1,
    allow_tf32: bool | None = None,
    hip: bool | None = None,
) -> Launch:
    """The launch of ``backward_kernel``.

    Args:
        operands, score: the tensors, all of them allocated, and how scores are computed.
        bounds: from ``preprocess.padded_bounds``.
        ranges: from ``preprocess.query_ranges``, for tiles of ``config.block_n``.
        config: tile sizes.
        with_dq: add to ``dq`` too, in an order that changes from run to run.
        new: whether ``dk`` and ``dv`` are uninitialised.
        split: how many programs share the query heads of a KV head.
        allow_tf32: of float32 inputs; None follows ``torch.get_float32_matmul_precision``.
        hip: whether the GPU is one of ROCm's; None asks PyTorch.
    """
    dout, q, k, v, statistics, _, dq, dk, dv = operands
    batch, k_len, kv_heads, _ = k.shape
    tiles = triton.cdiv(k_len, config.block_n)
    tiled = {"Q": (q, config.block_m), "DOUT": (dout, config.block_m)}
    if with_dq:
        tiled["DQ"] = dq, config.block_m
    streamed, tma = descriptors(config, tiled, {"STATISTICS": (statistics, config.block_m)})
    arguments = {
        **_arguments(operands, score, config, tma, allow_tf32, hip),
        "DQ": None,
        **streamed,
        "BOUNDS": bounds,
        "K": k,
        "V": v,
        "DK": dk,
        "DV": dv,
        "RANGES": ranges,
        "row_sets": bounds.shape[0] // 2,
        "tiles": tiles,
        "WITH_DQ": with_dq,
        "NEW": new,
        "SPLIT": split,
    }
    return Launch(backward_kernel, batch * kv_heads * split * tiles, arguments, config)


def dq_launch(
    operands: Operands,
    score: Score,
    config: Config,
    *,
    new: bool = False,
    allow_tf32: bool | None = None,
    hip: bool | None = None,
) -> Launch:
    """The launch of ``dq_kernel``. ``new``: whether ``dq`` is uninitialised."""
    dout, q, k, v, statistics, intervals, dq, _, _ = operands
    batch, q_len, heads, _ = q.shape
    tiles = triton.cdiv(q_len, config.block_m)
    streamed, tma = descriptors(config, {"K": (k, config.block_n), "V": (v, config.block_n)})
    arguments = {
        **_arguments(operands, score, config, tma, allow_tf32, hip),
        **streamed,
        "Q": q,
        "DOUT": dout,
        "STATISTICS": statistics,
        "DQ": dq,
        "LO": intervals.lo.contiguous(),
        "HI": intervals.hi.contiguous(),
        "stride_rows": 0 if intervals.lo.shape[0] == 1 else q_len,
        "tiles": tiles,
        "NEW": new,
    }
    return Launch(dq_kernel, batch * heads * tiles, arguments, config)


_keys_launches = Repeated(
    "Q", "Q_TAIL", "K", "V", "DOUT", "DQ", "DK", "DV", "STATISTICS", "BOUNDS", "RANGES", "Q_POSITIONS", "K_POSITIONS",
    "ALIBI_SLOPES", "seed",
)  # fmt: skip
_dq_launches = Repeated(
    "Q", "K", "K_TAIL", "V", "DOUT", "DQ", "STATISTICS", "LO", "HI", "Q_POSITIONS", "K_POSITIONS", "ALIBI_SLOPES",
    "seed",
)  # fmt: skip


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
    new_dq: bool = False,
    new_dkv: bool = False,
    deterministic: bool = False,
    allow_tf32: bool | None = None,
    config: Config | None = None,
    dq_config: Config | None = None,
) -> None:
    """Add the gradients of :func:`~.forward.attention_forward` over these keys to ``dq, dk, dv``.

    The caller computes the gradient of the sinks from ``lse`` and ``delta``.

    Args:
        dout: ``[batch, q_len, heads, v_head_dim]`` in the dtype of ``q``.
        q, k, v, intervals, score, allow_tf32: the forward's.
        lse: float32 ``[batch, heads, q_len]``, the final log-sum-exp: over all keys, sinks included.
        delta: float32 ``[batch, heads, q_len]``, from :func:`~.preprocess.delta`.
        dq, dk, dv: float32, shapes of ``q``, ``k`` and ``v``; added to in place.
        new_dq, new_dkv: whether ``dq``, and ``dk`` and ``dv``, are uninitialised, so that the gradients are written.
        deterministic: whether the gradients must have the same bits in every run.
        config: tile sizes of ``backward_kernel``; None takes them from the table.
        dq_config: tile sizes of ``dq_kernel``, which runs if deterministic; None takes them from the table.

    Raises:
        ValueError: a ``softmax_scale`` that is not positive.
    """
    gradients = (dq, new_dq), (dk, new_dkv), (dv, new_dkv)
    if q.numel() == 0 or k.numel() == 0:
        for x, new in gradients:
            if new:
                x.zero_()
        return
    dense = [unit_stride(x) for x in (dq, dk, dv)]
    dout, q, k, v = (unit_stride(x) for x in (dout, q, k, v))
    operands = Operands(dout, q, k, v, statistics(lse, delta), intervals, *dense)
    mask = tune.mask_class(intervals) if tune.wanted(q) else None
    asked = deterministic, allow_tf32, config, dq_config, mask
    features = score.softcap > 0, score.alibi_slopes is None, score.dropout_p > 0
    key = layout_key(q.get_device(), (asked, features), (q, k, v, dout, dense[0]))
    choice = _choices.get(key)
    if choice is None:
        if len(_choices) >= 4096:
            _choices.clear()
        choice = _choices[key] = _choose(operands, score, *asked)
    keys_config, other_config, split = choice
    with_dq = other_config is None
    # If several programs add to an element, it must be 0 first.
    zeroed = [*(dense[:1] if with_dq and new_dq else []), *(dense[1:] if split > 1 and new_dkv else [])]
    for x in zeroed:
        x.zero_()
    store_dkv = new_dkv and split == 1

    bounds, ranges = bounds_and_ranges(intervals.lo, intervals.hi, k.shape[1], keys_config.block_n)
    values = score_values(score), precision(q.dtype, allow_tf32)
    positions = intervals.q_positions, intervals.k_positions, score.alibi_slopes, score.dropout_seed
    _keys_launches(
        (q, if_tail(q), k, v, dout, dense[0] if with_dq else None, *dense[1:], operands.statistics, bounds, ranges, *positions),
        (values, keys_config, with_dq, store_dkv, split),
        lambda: keys_launch(
            operands, score, bounds, ranges, keys_config, with_dq=with_dq, new=store_dkv, split=split,
            allow_tf32=allow_tf32,
        ),
    )  # fmt: skip
    if other_config is not None:
        _dq_launches(
            (q, k, if_tail(k), v, dout, dense[0], operands.statistics, intervals.lo, intervals.hi, *positions),
            (values, other_config, new_dq),
            lambda: dq_launch(operands, score, other_config, new=new_dq, allow_tf32=allow_tf32),
        )  # fmt: skip
    for (given, _), used in zip(gradients, dense, strict=True):
        if used is not given:
            given.copy_(used)


class _Choice(NamedTuple):
    """How a backward is computed: tile sizes of both kernels (None if the first computes ``dq`` too), and the split."""

    keys: Config
    dq: Config | None
    split: int


_choices: dict[Hashable, _Choice] = {}  # by dtypes, shapes, strides, device and options


def _choose(
    operands: Operands,
    score: Score,
    deterministic: bool,
    allow_tf32: bool | None,
    config: Config | None,
    dq_config: Config | None,
    mask: str | None,
) -> _Choice:
    """The configuration of a call. ``mask`` is the class of the mask if the tile sizes are to be tuned, else None."""
    q, k, v_head_dim = operands.q, operands.k, operands.v.shape[-1]
    features = score_constants(score)
    heavy = any(features.values())
    streamed = {"backward": (q, operands.dout, operands.dq), "dkdv": (q, operands.dout), "dq": (k, operands.v)}
    tma = {kernel: all(describable(x) for x in tiled) for kernel, tiled in streamed.items()}

    def chosen(kernel: str) -> Config | None:
        return choose(kernel, q.device, q.shape[-1], q.dtype, v_head_dim=v_head_dim, heavy=heavy, tma=tma[kernel])

    one = None if deterministic else chosen("backward")
    if config is not None or dq_config is not None or mask is None:
        keys_config = config or one or chosen("dkdv")
        assert keys_config is not None
        if one is not None:
            split = _split(k, q.shape[2], keys_config.block_n)
            return _Choice(keys_config if config or split == 1 else for_split(keys_config), None, split)
        return _Choice(keys_config, dq_config or chosen("dq"), 1)
    names = ("backward",) if one else ("dkdv", "dq")
    # Candidates run many times, so they write to scratch gradients.
    dq, dk, dv = (torch.zeros_like(x) for x in (operands.dq, operands.dk, operands.dv))
    scratch = operands._replace(dq=dq, dk=dk, dv=dv)
    flags = f"{''.join(str(feature) for feature in features.values())} {mask}"

    def candidate(kernel: str, config: Config) -> Launch:
        if kernel == "dq":
            return dq_launch(scratch, score, config, allow_tf32=allow_tf32)
        split = _split(k, q.shape[2], config.block_n) if one else 1
        tables = bounds_and_ranges(operands.intervals.lo, operands.intervals.hi, k.shape[1], config.block_n)
        return keys_launch(scratch, score, *tables, config, with_dq=one is not None, split=split, allow_tf32=allow_tf32)

    best = [
        tune.tuned(name, q, k, flags, partial(candidate, name), v_head_dim=v_head_dim, heavy=heavy, tma=tma[name])
        for name in names
    ]
    return _Choice(best[0], None, _split(k, q.shape[2], best[0].block_n)) if one else _Choice(best[0], best[1], 1)


def _split(k: Tensor, heads: int, block: int) -> int:
    """How many programs share the query heads of a KV head, so that there are two for each processor of the GPU."""
    batch, k_len, kv_heads, _ = k.shape
    programs, group = batch * kv_heads * triton.cdiv(k_len, block), heads // kv_heads
    wanted = 2 * processors(k.device)
    return next((n for n in range(1, group) if group % n == 0 and n * programs >= wanted), group)
