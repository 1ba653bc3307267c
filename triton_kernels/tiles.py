"""What the kernels share inside a tile: which tiles lie inside an interval, scores, dropout, loads.

Scores are kept in base 2: ``s * log2(e)``, so that one fused multiply-add feeds ``exp2``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def score_arguments(
    softmax_scale: float, softcap: float, dropout_p: float, dropout_seed: int, head_offset: int
) -> dict[str, Any]:
    """The scalar arguments by which every kernel makes scores.

    Raises:
        ValueError: a scale that is not positive (the largest score is taken before scaling).
    """
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale={softmax_scale}: the kernels need a positive scale; negate q instead")
    return {
        # With a soft cap tanh(x) = 1 - 2 / (1 + exp2(2 log2(e) x)) takes its own scale.
        "scale": 2 * LOG2E * softmax_scale / softcap if softcap else LOG2E * softmax_scale,
        "cap": softcap * LOG2E,
        "keep_scale": 1 / (1 - dropout_p),
        "dropout_threshold": min(round(dropout_p * 2**32), 2**32 - 1),
        "seed": dropout_seed,
        "head_offset": head_offset,
        "SOFTCAP": softcap > 0,
        "DROPOUT": dropout_p > 0,
    }


# Arguments whose values differ from call to call: no compiled variant of their own for multiples of 16 or for 1.
UNSPECIALIZED = ["q_len", "q_padded", "k_len", "heads", "row_sets", "tiles", "seed", "head_offset", "dropout_threshold"]


@triton.jit
def tile_split(begin, end, inner_begin, inner_end, BLOCK: tl.constexpr):
    """Aligned tiles of ``[begin, end)``: those within ``[inner_begin, inner_end)`` need no mask.

    Returns the first tile's start, the number of masked tiles left of the inner ones, the inner ones' start and
    stop, and the number of masked tiles right of them.
    """
    start = begin // BLOCK * BLOCK
    stop = tl.where(end > begin, tl.cdiv(end, BLOCK) * BLOCK, start)
    inner_start = tl.minimum(tl.maximum(tl.cdiv(inner_begin, BLOCK) * BLOCK, start), stop)
    inner_stop = tl.minimum(tl.maximum(inner_end // BLOCK * BLOCK, inner_start), stop)
    return start, (inner_start - start) // BLOCK, inner_start, inner_stop, (stop - inner_stop) // BLOCK


@triton.jit
def head_base(x, batch, head, stride_b, stride_h, TMA: tl.constexpr):
    """Where the rows of one head begin; a descriptor stays as it is, and is indexed at each load."""
    if TMA:
        return x
    else:
        return x + (tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h)


@triton.jit
def load_rows(base, batch, head, start, stride, length, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
              BOUND: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Rows ``start ... start + BLOCK`` of one head's ``[length, D]``: zeros past ``D``, and past ``length`` if BOUND.

    ``base`` is what :func:`head_base` gave. With TMA it is a descriptor of ``[batch, length, heads, D]``.
    """
    if TMA:
        return base.load([batch, start, head, 0]).reshape(BLOCK, BLOCK_D)
    else:
        row = tl.arange(0, BLOCK)
        column = tl.arange(0, BLOCK_D)
        # Only the tile's start needs 64 bits: sequence x heads x head_dim passes 2**31.
        pointers = (base + tl.cast(start, tl.int64) * stride) + (row[:, None] * stride + column[None, :])
        if BOUND and D < BLOCK_D:
            return tl.load(pointers, mask=(start + row < length)[:, None] & (column < D)[None, :], other=0.0)
        elif BOUND:
            return tl.load(pointers, mask=(start + row < length)[:, None], other=0.0)
        elif D < BLOCK_D:
            return tl.load(pointers, mask=(column < D)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def load_line(base, line, start, length, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """``BLOCK`` numbers from ``start`` in one line of ``[lines, length]``, which has room for whole blocks."""
    if TMA:
        return base.load([line, start]).reshape(BLOCK)
    else:
        return tl.load(base + tl.cast(line, tl.int64) * length + start + tl.arange(0, BLOCK))


@triton.jit
def _row_pointers(base, start, stride, FIRST: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """As in :func:`load_rows`, but row by row: in an accumulator's layout a thread's columns of one row then differ by
    constants, and take no registers of their own."""
    rows = base + tl.cast(start, tl.int64) * stride + tl.arange(0, BLOCK) * stride
    return rows[:, None] + (FIRST + tl.arange(0, COLUMNS))[None, :]


@triton.jit
def _inside(start, length, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    inside = (start + tl.arange(0, BLOCK) < length)[:, None]
    if D < FIRST + COLUMNS:
        inside = inside & (FIRST + tl.arange(0, COLUMNS) < D)[None, :]
    return inside


@triton.jit
def store_rows(base, x, start, stride, length, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store ``x [BLOCK, BLOCK_D]`` as rows ``start ...`` of ``[length, D]``, rounded to what ``base`` points to."""
    pointers = _row_pointers(base, start, stride, 0, BLOCK, BLOCK_D)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=_inside(start, length, D, 0, BLOCK, BLOCK_D))


@triton.jit
def _add_columns(base, x, start, stride, length, D: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
                 COLUMNS: tl.constexpr):  # fmt: skip
    pointers = _row_pointers(base, start, stride, FIRST, BLOCK, COLUMNS)
    inside = _inside(start, length, D, FIRST, BLOCK, COLUMNS)
    tl.store(pointers, x + tl.load(pointers, mask=inside, other=0.0), mask=inside)


@triton.jit
def add_rows(base, x, start, stride, length, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add ``x [BLOCK, BLOCK_D]`` to rows ``start ...`` of ``[length, D]``, in halves of the columns where that saves
    registers: what is there comes in beside the accumulators."""
    if BLOCK_D >= 64:
        HALF: tl.constexpr = BLOCK_D // 2
        left, right = tl.split(tl.permute(tl.reshape(x, [BLOCK, 2, HALF]), [0, 2, 1]))
        _add_columns(base, left, start, stride, length, D, 0, BLOCK, HALF)
        _add_columns(base, right, start, stride, length, D, HALF, BLOCK, HALF)
    else:
        _add_columns(base, x, start, stride, length, D, 0, BLOCK, BLOCK_D)


@triton.jit
def tanh(x):
    """``tanh(x / (2 log2(e)))`` of an ``x`` scaled for it; saturates without NaN."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x))


@triton.jit
def alibi_bias(slope, i, j):
    """What ALiBi takes off: ``slope * |i - j|`` for global positions (Press et al., 2022)."""
    return slope * tl.abs(i - j).to(tl.float32)


@triton.jit
def kept(seed, threshold, i, j, head, batch):
    """Dropout's mask: a pure function of the global positions, head and batch row (Philox4x32-10)."""
    word, _, _, _ = tl.philox(seed, j, i, head, batch)
    return word >= tl.cast(threshold, tl.uint32)
