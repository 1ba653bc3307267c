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

from typing import NamedTuple

import triton
import triton.language as tl

from .tiles import (
    LOG2E,
    UNSPECIALIZED,
    HeadRows,
    HeadScore,
    Keys,
    Line,
    add_rows,
    alibi_bias,
    dropout_keep,
    load_positions,
    load_rows,
    products,
    program_index,
    reduce_rows,
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


class _HeadQueries(NamedTuple):
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
    # The exponentials run while dP is multiplied. With dropout, or without dq, the registers do not suffice for it.
    EARLY: tl.constexpr = WITH_DQ and not C.DROPOUT
    # ptxas makes dkdv wait for each product if dv comes before ds. At head_dims 192 and 128 it does not, and spills.
    LATE: tl.constexpr = not C.DROPOUT and (WITH_DQ or C.D == C.DV)
    CV: tl.constexpr = C.values
    CT: tl.constexpr = C.tail
    for q_start in tl.range(queries.begin // C.BLOCK_M * C.BLOCK_M, queries.end, C.BLOCK_M, disable_licm=AGAIN):
        row = q_start + tl.arange(0, C.BLOCK_M)
        q = stream_rows(queries.Q, q_start, C, C.BLOCK_M, True)  # [BLOCK_M, BLOCK_D]
        lse = stream_line(queries.LSE, q_start, C, C.BLOCK_M)
        i = load_positions(queries.POSITIONS, row, queries.Q.length, C)
        q_tail = stream_rows(queries.Q_TAIL, q_start, CT, C.BLOCK_M, True) if C.TAIL else q  # [BLOCK_M, TAIL]
        qk = products(keys.k, keys.k_tail, q, q_tail, C)  # [BLOCK_N, BLOCK_M]
        if EARLY:
            dout = stream_rows(queries.DOUT, q_start, CV, C.BLOCK_M, True)  # [BLOCK_M, BLOCK_DV]
            dp = tl.dot(keys.v, tl.trans(dout), input_precision=C.PRECISION)  # [BLOCK_N, BLOCK_M]
        p, chain = _probabilities(qk, lse[None, :], i[None, :], keys.j[:, None], score, C)
        # A branch in one loop needs fewer registers than separate loops for masked and unmasked tiles.
        if (q_start < queries.inner_begin) | (q_start + C.BLOCK_M > queries.inner_end):
            lo, hi = tl.load(queries.LO + row), tl.load(queries.HI + row)
            p = tl.where((keys.column[:, None] >= lo[None, :]) & (keys.column[:, None] < hi[None, :]), p, 0.0)
        if not EARLY:
            dout = stream_rows(queries.DOUT, q_start, CV, C.BLOCK_M, True)
            dp = tl.dot(keys.v, tl.trans(dout), input_precision=C.PRECISION)
        if C.DROPOUT:
            keep = dropout_keep(score, i[None, :], keys.j[:, None])
            dropped = tl.where(keep, p * score.keep_scale, 0.0)
            dp = tl.where(keep, dp * score.keep_scale, 0.0)
        else:
            dropped = p
        if not LATE:
            dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=C.PRECISION)
        # delta is loaded only here, because it would occupy registers during the products above.
        delta = stream_line(queries.DELTA, q_start, C, C.BLOCK_M)
        ds = (p * (dp - delta[None, :]) * chain).to(q.dtype)
        if LATE:
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=C.PRECISION)
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
    DK, stride_dkb, stride_dks, stride_dkh,    # [b, k, n, d], float32; any dtype if NEW and SPLIT is 1
    DV, stride_dvb, stride_dvs, stride_dvh,    # [b, k, n, e], as DK
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
        queries = _HeadQueries(
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
    DQ, stride_dqb, stride_dqs, stride_dqh,    # [b, q, h, d], float32; any dtype if NEW
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
