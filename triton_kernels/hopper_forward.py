"""Forward on Hopper: FlashAttention-3's pipeline over row intervals, with the carry of ``forward.py``; in Gluon.

In Gluon, Triton's lower level, a kernel places tiles in shared memory and divides its warps among roles by itself. A
program computes 128 queries of one head in three roles that run at the same time (Shah et al., 2024, 3.1 and 3.2): the
producer, one warp, loads tiles of keys and values into buffers of ``STAGES`` slots by TMA, and two consumers, of four warps
each (a warpgroup), compute the attention of 64 queries.

[Note: the barriers]
Barriers in shared memory (mbarriers) connect the roles. A slot's *ready* barrier is passed when its tile has arrived, its
*empty* barrier when both consumers have read the tile. A wait names a phase, 0 or 1: the ``n``-th use of a slot, from 0 on,
waits for phase ``n & 1`` of the ready barrier. The load before it waits for the other phase of the empty barrier, which a
new barrier passes at once.

    producer    wait(keys.empty), load K -> keys.ready        wait(values.empty), load V -> values.ready
    consumers   wait(keys.ready), S = Q K^T -> keys.empty     wait(values.ready), O += P V -> values.empty

[Note: what overlaps]
Within a consumer, the softmax of a tile runs while the matrix units compute ``P V`` of the tile before:

    matrix units   S 1 | P V 0        | S 2 | P V 1        | S 3 ...
    other units        | softmax 1    |     | softmax 2    |

Between the consumers, ``turn`` passes the right to start products to and fro, so that the softmax of one consumer runs
while the products of the other one do. This order is for speed: results do not depend on it. Names: see ``tiles.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import tiles
from .configs import Config, table_config
from .forward import allocate, forward_launch
from .launch import Launch, Repeated, describable, descriptors, unit_stride
from .tiles import LN2, LOG2E, UNSPECIALIZED, Constants, IntervalsLike, ScoreLike, Tiles, score_values

tile_split = gluon.jit(tiles.tile_split.fn)
tile_start = gluon.jit(tiles.tile_start.fn)
# Triton 3.8 gave the function another name.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@dataclass(frozen=True)
class HopperConstants(Constants):
    """What the kernel is compiled for; ``C`` in the functions below."""

    STAGES: int = 2
    CARRY: bool = False
    LAST: bool = True
    SINKS: bool = False


class _TileBuffer(NamedTuple):
    """Slots for tiles of keys or values, and two barriers for each slot."""

    slots: Any  # [STAGES, 1, 1, BLOCK_N, D]
    ready: Any
    empty: Any


class _ProgramRows(NamedTuple):
    """The rows of a program: pointers to the first one, and indices that count from it."""

    ACC: Any
    LSE_IN: Any
    OUT: Any
    LSE: Any
    LO: Any
    HI: Any
    stride_as: Any
    stride_os: Any
    last: Any
    stored: Any  # how many of the rows are stored


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a product's result, [64, columns], in the registers of a warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def _softmax(s, m, l, scale, MASKED: gl.constexpr):
    """One step of the online softmax: ``p`` of the tile, the new ``m`` and ``l``, and the factor for ``acc``."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale)
    # A row that has seen no key yet subtracts 0 instead of -inf: exp2(-inf - -inf) is NaN, exp2(-inf) is 0.
    shift = gl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new
    p = gl.exp2(s * scale - shift[:, None])
    alpha = gl.exp2(m - shift)
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _hide(s, k_start, rows, first, C: gl.constexpr):
    """The scores of 64 queries from ``first`` on, -inf outside of each query's interval."""
    layout: gl.constexpr = accumulator(C.BLOCK_N)
    row = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, layout)), rows.last)
    column = k_start + gl.arange(0, C.BLOCK_N, gl.SliceLayout(0, layout))
    lo, hi = gl.load(rows.LO + row), gl.load(rows.HI + row)
    seen = (column[None, :] >= lo[:, None]) & (column[None, :] < hi[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _tile_at(j, inner, edges, C: gl.constexpr):
    """The first key of tile ``j``: the masked tiles come first."""
    return gl.where(
        j < edges.count, tile_start(edges, j, C.BLOCK_N, True), tile_start(inner, j - edges.count, C.BLOCK_N, False)
    )


@gluon.jit
def _multiply_scores(q, keys, j, C: gl.constexpr):
    """Start ``S = Q K^T`` of tile ``j``."""
    BLOCK_N: gl.constexpr = C.BLOCK_N
    k = keys.slots.index(j % C.STAGES).reshape((BLOCK_N, C.D))
    zero = gl.zeros([64, BLOCK_N], gl.float32, accumulator(BLOCK_N))
    return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _multiply_values(acc, p, values, j, C: gl.constexpr):
    """Wait for the values of tile ``j`` and start ``O += P V``."""
    mbarrier.wait(values.ready.index(j % C.STAGES), j // C.STAGES & 1)
    p = gl.convert_layout(p.to(values.slots.dtype), gl.DotOperandLayout(0, accumulator(C.D), 2))
    return warpgroup_mma(p, values.slots.index(j % C.STAGES).reshape((C.BLOCK_N, C.D)), acc, is_async=True)


@gluon.jit
def _step(
    j, state, q, keys, values, turn, inner, edges, rows, scale,
    SELF: gl.constexpr, C: gl.constexpr, MASKED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """``S`` and the softmax of tile ``j``, and ``P V`` of the tile before: see [Note: what overlaps]."""
    acc, p, m, l = state
    mbarrier.wait(keys.ready.index(j % C.STAGES), j // C.STAGES & 1)
    mbarrier.wait(turn.index(SELF), (j + SELF & 1) ^ 1)
    s = _multiply_scores(q, keys, j, C)
    if not FIRST:
        acc = _multiply_values(acc, p, values, j - 1, C)
    mbarrier.arrive(turn.index(1 - SELF), count=1)
    s = warpgroup_mma_wait(0 if FIRST else 1, [s])
    mbarrier.arrive(keys.empty.index(j % C.STAGES), count=1)
    if MASKED:
        s = _hide(s, _tile_at(j, inner, edges, C), rows, SELF * 64, C)
    p, m, l, alpha = _softmax(s, m, l, scale, MASKED)
    if not FIRST:
        # This wait passes at once. Without it, the compiler would wait for P V before the exponentials.
        mbarrier.wait(values.ready.index((j - 1) % C.STAGES), (j - 1) // C.STAGES & 1)
        acc, p = warpgroup_mma_wait(0, [acc, p])
        mbarrier.arrive(values.empty.index((j - 1) % C.STAGES), count=1)
    if C.CARRY or not FIRST:
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, accumulator(C.D)))[:, None]
    return acc, p, m, l


@gluon.jit
def _consumer(q, q_ready, keys, values, turn, inner, edges, rows, scale, sink, SELF: gl.constexpr, C: gl.constexpr):
    """The attention of 64 queries: first over the masked tiles, then over the inner ones."""
    D: gl.constexpr = C.D
    of_scores: gl.constexpr = gl.SliceLayout(1, accumulator(C.BLOCK_N))
    of_output: gl.constexpr = gl.SliceLayout(1, accumulator(D))
    column = gl.arange(0, D, gl.SliceLayout(0, accumulator(D)))
    statistic = SELF * 64 + gl.arange(0, 64, of_scores)
    row = SELF * 64 + gl.arange(0, 64, of_output)
    # The state of the online softmax: see [Note: the carry] in forward.py.
    if C.CARRY:
        start = rows.ACC + ((row * rows.stride_as)[:, None] + column[None, :])
        acc = gl.load(start, mask=(row < rows.stored)[:, None], other=0.0)
        m = gl.load(rows.LSE_IN + statistic, mask=statistic < rows.stored, other=float("-inf")) * LOG2E
        l = gl.where(m == float("-inf"), 0.0, 1.0)
    else:
        acc = gl.zeros([64, D], gl.float32, accumulator(D))
        m = gl.full([64], float("-inf"), gl.float32, of_scores)
        l = gl.zeros([64], gl.float32, of_scores)

    # The first tile is masked, or treated as if it were.
    mbarrier.wait(q_ready, 0)
    state = acc, 0.0, m, l
    state = _step(0, state, q, keys, values, turn, inner, edges, rows, scale, SELF, C, True, True)
    for j in range(1, edges.count):
        state = _step(j, state, q, keys, values, turn, inner, edges, rows, scale, SELF, C, True, False)
    count = edges.count + inner.count
    for j in range(gl.maximum(edges.count, 1), count):
        state = _step(j, state, q, keys, values, turn, inner, edges, rows, scale, SELF, C, False, False)
    acc, p, m, l = state
    acc = warpgroup_mma_wait(0, [_multiply_values(acc, p, values, count - 1, C)])

    if C.SINKS:
        # A sink is one more key of the row with value 0: it adds to l and nothing to acc.
        m_new = gl.maximum(m, sink)
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = gl.exp2(m - shift)
        l = l * alpha + gl.exp2(sink - shift)
        acc = acc * gl.convert_layout(alpha, of_output)[:, None]
        m = m_new
    seen = l > 0.0
    l = gl.where(seen, l, 1.0)  # a row that saw no key: 0 / 1, not 0 / 0
    acc = acc * gl.convert_layout(1.0 / l, of_output)[:, None]
    out = rows.OUT + ((row * rows.stride_os)[:, None] + column[None, :])
    gl.store(out, acc.to(rows.OUT.dtype.element_ty), mask=(row < rows.stored)[:, None])
    lse = gl.where(seen, (m + gl.log2(l)) * LN2, float("-inf"))
    gl.store(rows.LSE + statistic, lse, mask=statistic < rows.stored)


@gluon.jit
def _producer(Q, q_slots, q_ready, q_start, head, K, keys, V, values, kv_head, batch, inner, edges, C: gl.constexpr):
    """Load the queries, and then tile after tile of keys and values as slots become empty: see [Note: the barriers]."""
    mbarrier.expect(q_ready, 2 * Q.block_type.nbytes)
    for half in gl.static_range(2):
        async_load(Q, [batch, head, q_start + half * 64, 0], q_ready, q_slots.index(half))
    for j in range(0, edges.count + inner.count):
        k_start = _tile_at(j, inner, edges, C)
        slot, phase = j % C.STAGES, j // C.STAGES & 1
        mbarrier.wait(keys.empty.index(slot), phase ^ 1)
        mbarrier.expect(keys.ready.index(slot), K.block_type.nbytes)
        async_load(K, [batch, kv_head, k_start, 0], keys.ready.index(slot), keys.slots.index(slot))
        mbarrier.wait(values.empty.index(slot), phase ^ 1)
        mbarrier.expect(values.ready.index(slot), V.block_type.nbytes)
        async_load(V, [batch, kv_head, k_start, 0], values.ready.index(slot), values.slots.index(slot))


@gluon.jit
def _barriers(arrivals: gl.constexpr, N: gl.constexpr):
    """``N`` barriers, each of which is passed after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def _tile_buffer(X, C: gl.constexpr):
    slots = gl.allocate_shared_memory(X.dtype, [C.STAGES, 1, 1, C.BLOCK_N, C.D], X.layout)
    return _TileBuffer(slots, _barriers(1, C.STAGES), _barriers(2, C.STAGES))


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "stride_rows"])
def hopper_kernel(
    Q, K, V,                                        # descriptors of [b, h, q, d] and [b, n, k, d]
    ACC, stride_ab, stride_as, stride_ah, LSE_IN,   # CARRY: [b, q, h, d] and [b, h, q], float32
    OUT, stride_ob, stride_os, stride_oh, LSE,      # [b, q, h, d] and float32 [b, h, q]; may be ACC and LSE_IN
    LO, HI, stride_rows,                            # int32 [1 or b, q]
    SINK_LOGITS,                                    # [h]
    scale, heads, q_len, k_len, tiles,
    C: gl.constexpr,
):  # fmt: skip
    """128 queries of one head: grid ``batch * heads * tiles``."""
    # The last queries run first. Under a causal mask they have the most keys, and the GPU's last programs should be short.
    program = gl.program_id(0)
    q_start = (tiles - 1 - program % tiles) * 128
    head = program // tiles % heads
    batch = program // tiles // heads
    kv_head = head // C.GROUP
    LO += batch * stride_rows + q_start
    HI += batch * stride_rows + q_start
    last = gl.minimum(128, q_len - q_start) - 1  # of the program's queries
    begin, end = gl.load(LO), gl.load(HI + last)
    inner, edges = tile_split(begin, end, gl.load(LO + last), gl.load(HI), C.BLOCK_N)
    # No key: all roles take one tile past the last key, which TMA fills with 0 and which is masked. That needs no branch.
    # The carry in memory does not change: no row is stored.
    none = begin >= end
    edges = Tiles(gl.where(none, k_len, edges.start), gl.where(none, 1, edges.count), edges.skip_from, edges.skip_to)
    stored = gl.where(none, 0, last + 1) if C.CARRY and not C.LAST else last + 1

    # Sequence x heads x head_dim passes 2**31: only offsets within a tile fit 32 bits.
    head_row = (batch.to(gl.int64) * heads + head) * q_len + q_start
    out_row = batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh + q_start.to(gl.int64) * stride_os
    acc_row = batch.to(gl.int64) * stride_ab + head.to(gl.int64) * stride_ah + q_start.to(gl.int64) * stride_as
    carry = (ACC + acc_row, LSE_IN + head_row) if C.CARRY else (OUT, LSE)
    rows = _ProgramRows(*carry, OUT + out_row, LSE + head_row, LO, HI, stride_as, stride_os, last, stored)
    sink = gl.load(SINK_LOGITS + head).to(gl.float32) * LOG2E if C.SINKS else 0.0

    q_slots = gl.allocate_shared_memory(Q.dtype, [2, 1, 1, 64, C.D], Q.layout)
    q_ready, turn = _barriers(1, 1).index(0), _barriers(1, 2)
    keys, values = _tile_buffer(K, C), _tile_buffer(V, C)
    fence_async_shared()
    first, second = q_slots.index(0).reshape((64, C.D)), q_slots.index(1).reshape((64, C.D))
    gl.warp_specialize(
        [
            (_consumer, (first, q_ready, keys, values, turn, inner, edges, rows, scale, sink, 0, C)),
            (_consumer, (second, q_ready, keys, values, turn, inner, edges, rows, scale, sink, 1, C)),
            (_producer, (Q, q_slots, q_ready, q_start, head, K, keys, V, values, kv_head, batch, inner, edges, C)),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and registers of their threads
    )


def hopper_launch(
    q: Tensor, k: Tensor, v: Tensor, intervals: IntervalsLike, score: ScoreLike, config: Config | None = None, **rest: Any
) -> Launch:  # fmt: skip
    """As ``forward_launch``, with the names of its arguments, for q, k and v that TMA can read."""
    config = config or table_config("sm_90", "hopper", q.shape[3], q.dtype)
    like = forward_launch(q, k, v, intervals, score, config=config, **rest)
    described, tma = descriptors(config, {"Q": (q, 64), "K": (k, config.block_n), "V": (v, config.block_n)})
    assert tma, "a tensor that TMA cannot read"
    for name in ("Q", "K", "V"):
        x = described[name]
        layout = gl.NVMMASharedLayout.get_default_for(x.block_shape, gl.float16)  # as for any dtype of two bytes
        described[name] = TensorDescriptor(x.base, x.shape, x.strides, x.block_shape, layout)
    flags = {name: like.arguments[name] for name in ("CARRY", "LAST", "SINKS")}
    constants = HopperConstants(**vars(like.arguments["C"]), **flags, STAGES=config.num_stages)
    return replace(like, kernel=hopper_kernel, arguments={**like.arguments, **described, "C": constants})


_launches = Repeated("Q", "K", "V", "ACC", "LSE_IN", "OUT", "LSE", "LO", "HI", "SINK_LOGITS")


def hopper_forward(
    q: Tensor, k: Tensor, v: Tensor, intervals: IntervalsLike, score: ScoreLike, *,
    carry: tuple[Tensor, Tensor] | None = None, last: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`attention_forward`, with its arguments and results, on a GPU of compute capability 9.0.

    q, k and v ``[batch, seq, heads, head_dim]`` are float16 or bfloat16 and have one head_dim, 64 or 128. ``score`` has no
    softcap, ALiBi or dropout. Tensors that TMA cannot read are copied.
    """
    acc, lse_in, out, lse = allocate(q, v, carry, last)
    if q.numel() == 0:
        return out, lse
    q, k, v = (readable(x) for x in (q, k, v))
    make = partial(hopper_launch, q, k, v, intervals, score, acc=acc, lse_in=lse_in, out=out, lse=lse, last=last)
    inputs = q, k, v, acc, lse_in, out, lse, intervals.lo, intervals.hi, score.sinks
    _launches(inputs, (last, score_values(score)), make)
    return out, lse


def readable(x: Tensor) -> Tensor:
    """``x [batch, seq, heads, head_dim]`` itself if TMA can read it, else a copy. Without keys, one that no query sees."""
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0], 1, *x.shape[2:])
    x = unit_stride(x)
    return x if describable(x) else x.clone(memory_format=torch.contiguous_format)
