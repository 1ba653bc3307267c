"""Forward: FlashAttention-2 over row intervals, with an online softmax that continues from step to step of a ring.

Two things differ from FlashAttention-2 (Dao, 2023):

* Each query has its own interval of keys, ``lo <= key < hi``, so one kernel supports every mask and every layout.
* The online softmax may start from the ``(acc, lse)`` of the keys of earlier steps, so the steps of a ring compute one
  softmax. Between them nothing is rounded to the model's dtype, and no partial results are merged.

[Note: the carry]
The state of an online softmax is ``(m, l, acc)``: the largest score so far, the sum of ``exp(s - m)`` and the sum of
``exp(s - m) * v``. Its result, ``acc / l`` and ``lse = m + log(l)``, does not change if ``m`` is replaced by another
``m'`` and ``l`` and ``acc`` are scaled by ``exp(m - m')``. With ``m' = lse``, ``l`` becomes 1 and ``acc`` the normalised
output. So ``(acc, lse)`` is itself such a state:

    end of a step:     lse = m + log(l);   acc = acc / l      -> float32 memory
    start of the next:   m = lse;   l = 1 (0 where lse = -inf: the row has seen no key)

A step that is not the last updates ``acc`` and ``lse`` in place, and does not change rows whose interval is empty. The
last step adds the sinks and rounds to the model's dtype.

Shapes: b batch, q local queries, k keys of a step, h query heads, n KV heads, d head_dim of q and k, e head_dim
of v. The names inside the kernel are explained in ``tiles.py``.
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
from .launch import Launch, Repeated, describable, descriptors, dies, if_tail, precision, strides, unit_stride, widths
from .tiles import (
    LN2,
    LOG2E,
    UNSPECIALIZED,
    Constants,
    HeadRows,
    HeadScore,
    IntervalsLike,
    Keys,
    ScoreLike,
    alibi_bias,
    dropout_keep,
    load_positions,
    load_rows,
    products,
    program_index,
    score_arguments,
    score_constants,
    score_values,
    store_rows,
    stream_rows,
    tanh,
    tile_split,
    tile_start,
)


class _ForwardQueries(NamedTuple):
    """One tile of queries."""

    q: tl.tensor  # [BLOCK_M, BLOCK_D]
    q_tail: tl.tensor  # [BLOCK_M, TAIL]; q itself without a tail
    lo: tl.tensor  # [BLOCK_M], as are the next
    hi: tl.tensor
    i: tl.tensor


@triton.jit
def _attend(acc, m, l, queries, keys, score, tiles, C: tl.constexpr, MASKED: tl.constexpr):
    """Continue the online softmax over ``tiles`` of keys."""
    # With a softcap or ALiBi, the score is not a multiple of q.k, so it is scaled before its maximum is taken. Otherwise
    # the maximum is scaled instead, and the scores together with the subtraction, in one fused multiply-add.
    SCALED: tl.constexpr = C.SOFTCAP or C.ALIBI
    CV: tl.constexpr = C.values
    CT: tl.constexpr = C.tail
    # With an accumulator of 512 columns, the addresses for Hopper's products would spill if they were kept in registers.
    AGAIN: tl.constexpr = C.TMA and C.BLOCK_DV > 256
    for n in tl.range(0, tiles.count, disable_licm=AGAIN):
        k_start = tile_start(tiles, n, C.BLOCK_N, MASKED)
        k = stream_rows(keys.K, k_start, C, C.BLOCK_N, MASKED)  # [BLOCK_N, BLOCK_D]
        k_tail = stream_rows(keys.K_TAIL, k_start, CT, C.BLOCK_N, MASKED) if C.TAIL else k  # [BLOCK_N, TAIL]
        s = products(queries.q, queries.q_tail, k, k_tail, C)  # [BLOCK_M, BLOCK_N]
        column = k_start + tl.arange(0, C.BLOCK_N)
        j = load_positions(keys.POSITIONS, column, keys.K.length, C)
        if C.SOFTCAP:
            s = score.cap * tanh(s * score.scale)
        elif C.ALIBI:
            s = s * score.scale
        if C.ALIBI:
            s -= alibi_bias(score, queries.i[:, None], j[None, :])
        if MASKED:
            seen = (column[None, :] >= queries.lo[:, None]) & (column[None, :] < queries.hi[:, None])
            s = tl.where(seen, s, float("-inf"))
        if SCALED:
            m_new = tl.maximum(m, tl.max(s, 1))
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * score.scale)
        # A row that has seen no key yet subtracts 0 instead of -inf: exp2(-inf - -inf) is NaN, exp2(-inf) is 0.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
        if SCALED:
            p = tl.exp2(s - shift[:, None])
        else:
            p = tl.exp2(s * score.scale - shift[:, None])
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        # Dropout is applied to the probabilities after they have been summed, so it does not change l and lse.
        if C.DROPOUT:
            p = tl.where(dropout_keep(score, queries.i[:, None], j[None, :]), p * score.keep_scale, 0.0)
        v = stream_rows(keys.V, k_start, CV, C.BLOCK_N, MASKED)  # [BLOCK_N, BLOCK_DV]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=C.PRECISION)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    Q, stride_qb, stride_qs, stride_qh,             # [b, q, h, d]
    K, stride_kb, stride_ks, stride_kh, K_TAIL,     # [b, k, n, d], pointers or descriptors
    V, stride_vb, stride_vs, stride_vh,             # [b, k, n, e], pointer or descriptor
    ACC, stride_ab, stride_as, stride_ah, LSE_IN,   # CARRY: [b, q, h, e] and [b, h, q], float32
    OUT, stride_ob, stride_os, stride_oh, LSE,      # [b, q, h, e] and float32 [b, h, q]; may be ACC and LSE_IN
    LO, HI, stride_rows,                            # int32 [1 or b, q]
    Q_POSITIONS, K_POSITIONS,                       # int32 [q], [k]
    ALIBI_SLOPES, stride_slopes, SINK_LOGITS,       # [h] or [b, h]; [h]
    scale, cap, keep_scale, dropout_threshold, seed, head_offset,
    heads, q_len, k_len, tiles,
    C: tl.constexpr, CARRY: tl.constexpr, LAST: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: grid ``batch * heads * tiles``."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    BLOCK_DV: tl.constexpr = C.BLOCK_DV
    CV: tl.constexpr = C.values
    CT: tl.constexpr = C.tail
    program = program_index(C)
    # The last queries run first. Under a causal mask they have the most keys, and the GPU's last programs should be short.
    q_start = (tiles - 1 - program % tiles) * BLOCK_M
    head = program // tiles % heads
    batch = program // tiles // heads
    kv_head = head // C.GROUP

    # Rows past the end repeat the last row, so that all loads are in bounds and no interval exceeds [begin, end). Their
    # results are not stored.
    row = q_start + tl.arange(0, BLOCK_M)
    row_in = tl.minimum(row, q_len - 1)
    q_last = tl.minimum(q_start + BLOCK_M, q_len) - 1
    LO += batch * stride_rows
    HI += batch * stride_rows
    begin, end = tl.load(LO + q_start), tl.load(HI + q_last)
    # Two conditions: the outer one is decided when the kernel is compiled.
    if CARRY and not LAST:
        if begin >= end:
            return  # no query sees a key, and the carry in memory does not change
    lo = tl.load(LO + row_in)
    hi = tl.load(HI + row_in)
    inner, edges = tile_split(begin, end, tl.load(LO + q_last), tl.load(HI + q_start), C.BLOCK_N)

    Q = HeadRows(Q, batch, head, (stride_qb, stride_qs, stride_qh), q_len)
    K_TAIL = HeadRows(K_TAIL if C.TAIL else K, batch, kv_head, (stride_kb, stride_ks, stride_kh), k_len)
    K = HeadRows(K, batch, kv_head, (stride_kb, stride_ks, stride_kh), k_len)
    V = HeadRows(V, batch, kv_head, (stride_vb, stride_vs, stride_vh), k_len)
    OUT = HeadRows(OUT, batch, head, (stride_ob, stride_os, stride_oh), q_len)
    first_statistic = (tl.cast(batch, tl.int64) * heads + head) * q_len
    LSE += first_statistic
    i = tl.load(Q_POSITIONS + row_in) if C.ALIBI or C.DROPOUT else row
    slope = tl.load(ALIBI_SLOPES + batch * stride_slopes + head) * LOG2E if C.ALIBI else 0.0
    q = load_rows(Q, q_start, C, BLOCK_M, True)
    q_tail = load_rows(Q, q_start, CT, BLOCK_M, True) if C.TAIL else q

    # The state of the online softmax: see [Note: the carry].
    if CARRY:
        ACC = HeadRows(ACC, batch, head, (stride_ab, stride_as, stride_ah), q_len)
        acc = load_rows(ACC, q_start, CV, BLOCK_M, True)
        m = tl.load(LSE_IN + first_statistic + row, mask=row < q_len, other=float("-inf")) * LOG2E
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_DV], dtype=tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        l = tl.zeros([BLOCK_M], dtype=tl.float32)

    # The loops: see [Note: which tiles are masked].
    score = HeadScore(scale, cap, slope, keep_scale, dropout_threshold, seed, batch, head + head_offset)
    queries, keys = _ForwardQueries(q, q_tail, lo, hi, i), Keys(K, K_TAIL, V, K_POSITIONS)
    acc, m, l = _attend(acc, m, l, queries, keys, score, inner, C, False)
    acc, m, l = _attend(acc, m, l, queries, keys, score, edges, C, True)

    if SINKS:
        # A sink is one more key of the row with value 0: it adds to l and nothing to acc.
        sink = tl.load(SINK_LOGITS + head).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - shift)
        l = l * alpha + tl.exp2(sink - shift)
        acc = acc * alpha[:, None]
        m = m_new
    seen = l > 0.0
    l = tl.where(seen, l, 1.0)  # a row that saw no key: 0 / 1, not 0 / 0
    acc = acc * (1.0 / l)[:, None]
    store_rows(OUT, acc, q_start, CV, BLOCK_M)
    lse = tl.where(seen, (m + tl.log2(l)) * LN2, float("-inf"))
    tl.store(LSE + row, lse, mask=row < q_len)


def forward_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: IntervalsLike,
    score: ScoreLike,
    *,
    acc: Tensor | None,
    lse_in: Tensor | None,
    out: Tensor,
    lse: Tensor,
    last: bool = True,
    allow_tf32: bool | None = None,
    hip: bool | None = None,
    config: Config | None = None,
) -> Launch:
    """The launch behind :func:`attention_forward`, with every tensor already allocated."""
    batch, q_len, heads, head_dim = q.shape
    features = score_constants(score)
    if config is None:
        tma = describable(k) and describable(v)
        config = choose(
            "forward", q.device, head_dim, q.dtype, v_head_dim=v.shape[3], heavy=any(features.values()), tma=tma
        )
        assert config is not None
    tiles = triton.cdiv(q_len, config.block_m)
    lo, hi = intervals.lo.contiguous(), intervals.hi.contiguous()
    streamed, tma = descriptors(config, {"K": (k, config.block_n), "V": (v, config.block_n)})
    constants = Constants(
        **widths(q, v),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        GROUP=heads // k.shape[2],
        PRECISION=precision(q.dtype, allow_tf32, hip),
        TMA=tma,
        DIES=dies(hip),
        **features,
    )
    arguments = {
        **strides(q=q, k=k, v=v, a=acc, o=out),
        **streamed,
        **score_arguments(score, heads),
        "Q": q,
        "ACC": acc,
        "LSE_IN": lse_in,
        "OUT": out,
        "LSE": lse,
        "LO": lo,
        "HI": hi,
        "stride_rows": 0 if lo.shape[0] == 1 else q_len,
        "Q_POSITIONS": intervals.q_positions,
        "K_POSITIONS": intervals.k_positions,
        "SINK_LOGITS": None if score.sinks is None else score.sinks.contiguous(),
        "heads": heads,
        "q_len": q_len,
        "k_len": k.shape[1],
        "tiles": tiles,
        "C": constants,
        "CARRY": acc is not None,
        "LAST": last,
        "SINKS": score.sinks is not None and last,
    }
    return Launch(forward_kernel, batch * heads * tiles, arguments, config)


def allocate(
    q: Tensor, v: Tensor, carry: tuple[Tensor, Tensor] | None, last: bool
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """``acc, lse_in, out, lse`` of a launch, for the arguments of :func:`attention_forward`."""
    batch, q_len, heads, _ = q.shape
    acc, lse_in = (unit_stride(carry[0]), carry[1].contiguous()) if carry is not None else (None, None)
    if acc is not None and lse_in is not None and not last:
        out, lse = acc, lse_in
    else:
        out = q.new_empty(batch, q_len, heads, v.shape[3], dtype=q.dtype if last else torch.float32)  # [b, q, h, e]
        lse = q.new_empty(batch, heads, q_len, dtype=torch.float32)  # [b, h, q]
    return acc, lse_in, out, lse


_launches = Repeated(
    "Q", "K", "K_TAIL", "V", "ACC", "LSE_IN", "OUT", "LSE", "LO", "HI", "Q_POSITIONS", "K_POSITIONS",
    "ALIBI_SLOPES", "SINK_LOGITS", "seed",
)  # fmt: skip


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: IntervalsLike,
    score: ScoreLike,
    *,
    carry: tuple[Tensor, Tensor] | None = None,
    last: bool = True,
    allow_tf32: bool | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` over the keys of each query's interval, continued from ``carry``.

    Args:
        q: ``[batch, q_len, heads, head_dim]``, float16, bfloat16 or float32; see ``configs.py`` for the head_dims.
        k: ``[batch, k_len, kv_heads, head_dim]`` in the dtype of ``q``; query head ``h`` reads key/value head
            ``h // (heads // kv_heads)``.
        v: ``[batch, k_len, kv_heads, v_head_dim]`` in the dtype of ``q``.
        intervals: int32 ``lo, hi [1 or batch, q_len]``, the first and one-past-last key of each query, neither falling
            along the queries; int32 global positions ``q_positions [q_len]`` and ``k_positions [k_len]``. All on the
            device of ``q``.
        score: how scores are computed, as ``seqpar.kernels.Score``; ``softmax_scale`` must be positive.
        carry: float32 ``(acc [batch, q_len, heads, v_head_dim], lse [batch, heads, q_len])`` over the keys of earlier
            steps: the normalised partial output and its log-sum-exp (natural logarithm; -inf for a query that has seen
            no key). Unless ``last``, the result is written into both, or into a copy of one that is not dense.
        last: whether no step follows: fold ``score.sinks`` in and round the output to ``q.dtype``.
        allow_tf32: for float32 inputs; None follows ``torch.get_float32_matmul_precision``.
        config: tile sizes; None takes them from the table.

    Returns:
        ``(acc, lse)`` over all keys so far. A query that has seen no key has 0 and -inf.

    Raises:
        ValueError: a ``softmax_scale`` that is not positive.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    acc, lse_in, out, lse = allocate(q, v, carry, last)
    if q.numel() == 0:
        return out, lse
    mask = tune.mask_class(intervals) if tune.wanted(q) else None

    def make() -> Launch:
        launch = partial(
            forward_launch, q, k, v, intervals, score, acc=acc, lse_in=lse_in, last=last, allow_tf32=allow_tf32
        )
        best = config
        if best is None and mask is not None:
            # Candidates run many times, so they write to scratch outputs and do not change the carry.
            on_scratch = partial(launch, out=torch.empty_like(out), lse=torch.empty_like(lse))
            flags = f"{acc is not None}{last}{score.softcap > 0}{score.alibi_slopes is not None}{score.dropout_p > 0}"
            best = tune.tuned(
                "forward", q, k, f"{flags} {mask}", lambda candidate: on_scratch(config=candidate),
                v_head_dim=v.shape[3], heavy=any(score_constants(score).values()),
                tma=describable(k) and describable(v),
            )  # fmt: skip
        return launch(out=out, lse=lse, config=best)

    inputs = (
        q, k, if_tail(k), v, acc, lse_in, out, lse, intervals.lo, intervals.hi, intervals.q_positions, intervals.k_positions,
        score.alibi_slopes, score.sinks, score.dropout_seed,
    )  # fmt: skip
    _launches(inputs, (last, config, mask, precision(q.dtype, allow_tf32), score_values(score)), make)
    return out, lse
