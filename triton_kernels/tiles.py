"""Helpers shared by the attention kernels: tiles of keys, loads and stores, scores, dropout.

Names, mostly from the FlashAttention papers. Capitals are pointers (or TMA descriptors) and compile-time constants;
lower case are values in registers.

    BLOCK_M, BLOCK_N   queries and keys in a tile
    D, BLOCK_D         head_dim of q and k, and the power of two that holds it; DV, BLOCK_DV: of v
    TAIL               columns of a second tile of q and k where D > 512 (576 = 512 + 64: tl.dot takes powers of two),
                       else 0; q_tail, k_tail, dq_tail and dk_tail are these columns
    GROUP              query heads per KV head
    s, p               scores and probabilities of one tile, [BLOCK_M, BLOCK_N]; backward_kernel transposes both
    m, l, acc          online softmax: running maximum (base 2) and sum, [BLOCK_M]; output before the division by l,
                       [BLOCK_M, BLOCK_DV]
    row, column        local indices of the tile's queries, [BLOCK_M], and keys, [BLOCK_N]
    i, j               global positions of the same; ALiBi and dropout depend on them, nothing else does
    lo, hi             first and one-past-last local key index of each query, [BLOCK_M]
    begin, end         range of keys (in backward_kernel: of queries) outside which the whole tile is masked
    inner_begin,       range of keys (queries) inside which nothing of the tile is masked
      inner_end
    head, kv_head      local head indices; ``head // GROUP == kv_head``
    head_key           global index of the query head: dropout is keyed by it, so heads may be sharded
    row_sets           how many sets of intervals there are: 1 for the whole batch, or one per batch row
    STATISTICS         float32 [2 * batch * heads, q_padded]; per head a line of lse (base 2) and a line of delta
    BOUNDS             int32 [2 * row_sets, q_padded]; the lines of hi, then the lines of lo
    RANGES             int32 [2, row_sets, 2 * tiles]; begin, inner_begin, inner_end, end of each tile of keys
    chain              derivative of a score by its scaled product q.k (1 without softcap)

Softmax in base 2. GPUs have an instruction for ``exp2``, not for ``exp``, and ``exp(x) = exp2(x * log2(e))``. So every
score, maximum and log-sum-exp inside the kernels is kept times log2(e):

    p = exp(scale * qk - lse)  =  exp2((scale * log2(e)) * qk - (lse * log2(e)))

``scale * log2(e)`` is one host-side constant, and its product with ``qk`` less the maximum is one fused multiply-add.
``lse`` is converted to and from natural logarithms where it enters and leaves a kernel.

Arguments come in bundles, which leave no trace in the machine code. Compile-time values are in :class:`Constants`, a
single argument of each kernel with products. Run-time values are in NamedTuples, which a kernel builds for its helpers;
a launch passes them to the kernel one by one, because Triton specializes single arguments. A NamedTuple must hold no
compile-time constants: where the tuple is assigned, Triton turns them into run-time values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Arguments whose values change from call to call. Triton must not compile variants for multiples of 16 or for 1.
UNSPECIALIZED = ["q_len", "q_padded", "k_len", "heads", "row_sets", "tiles", "seed", "head_offset", "dropout_threshold"]


class ScoreLike(Protocol):
    """How scores are computed from queries and keys. ``seqpar.kernels.Score`` has this protocol and documents the fields."""

    @property
    def softmax_scale(self) -> float: ...
    @property
    def softcap(self) -> float: ...
    @property
    def alibi_slopes(self) -> Tensor | None: ...  # [heads] or [batch, heads]
    @property
    def sinks(self) -> Tensor | None: ...  # [heads]
    @property
    def dropout_p(self) -> float: ...
    @property
    def dropout_seed(self) -> int: ...
    @property
    def head_offset(self) -> int: ...


class IntervalsLike(Protocol):
    """Which keys each query sees. ``seqpar.schedule.rows.KeyIntervals`` has this protocol, and documents the fields."""

    @property
    def lo(self) -> Tensor: ...  # int32 [1 or batch, q_len]
    @property
    def hi(self) -> Tensor: ...  # int32 [1 or batch, q_len]
    @property
    def q_positions(self) -> Tensor: ...  # int32 [q_len]
    @property
    def k_positions(self) -> Tensor: ...  # int32 [k_len]


@dataclass(frozen=True)
class Constants:
    """What a kernel is compiled for; ``C`` in the kernels. Names are explained at the top of this file.

    A field is a plain Python value to Triton 3.6: give it a name of its own (``D: tl.constexpr = C.D``) before it goes
    into the list of a shape.
    """

    D: int
    BLOCK_D: int
    BLOCK_M: int
    BLOCK_N: int = 0
    GROUP: int = 1
    SOFTCAP: bool = False
    ALIBI: bool = False
    DROPOUT: bool = False
    PRECISION: str = "ieee"
    TMA: bool = False
    DIES: int = 1
    DV: int = 0
    BLOCK_DV: int = 0
    TAIL: int = 0
    FIRST: int = 0  # the first column that load_rows and its kind read or write

    @property
    def tail(self) -> Constants:
        """The constants for helpers that load and store the columns of q and k from BLOCK_D on; ``CT`` in the kernels."""
        return replace(self, FIRST=self.BLOCK_D, BLOCK_D=self.TAIL)

    @property
    def values(self) -> Constants:
        """The constants for helpers that load and store rows of v and of the output; ``CV`` in the kernels."""
        return replace(self, D=self.DV, BLOCK_D=self.BLOCK_DV)


def score_arguments(score: ScoreLike, heads: int) -> dict[str, Any]:
    """Run-time arguments that say how scores are computed.

    Raises:
        ValueError: a scale that is not positive. The kernels take the largest product and scale it afterwards, which
            is the largest score only if the scale is positive.
    """
    if not score.softmax_scale > 0:
        raise ValueError(f"softmax_scale={score.softmax_scale}: expected a positive scale; negate q instead")
    scale = LOG2E.value * score.softmax_scale
    slopes = score.alibi_slopes
    return {
        # tanh(x) = 1 - 2 / (1 + exp(2 x)) with x = softmax_scale / softcap * qk: exp2 takes this factor times qk.
        "scale": 2 * scale / score.softcap if score.softcap else scale,
        "cap": score.softcap * LOG2E.value,
        "ALIBI_SLOPES": None if slopes is None else slopes.contiguous(),
        "stride_slopes": heads if slopes is not None and slopes.dim() == 2 else 0,
        "keep_scale": 1 / (1 - score.dropout_p),
        "dropout_threshold": min(round(score.dropout_p * 2**32), 2**32 - 1),
        "seed": score.dropout_seed,
        "head_offset": score.head_offset,
    }


def score_values(score: ScoreLike) -> tuple[float, ...]:
    """What :func:`score_arguments` and :func:`score_constants` depend on, besides the tensors and the seed."""
    return score.softmax_scale, score.softcap, score.dropout_p, score.head_offset


def score_constants(score: ScoreLike) -> dict[str, bool]:
    """Fields of :class:`Constants` that say how scores are computed; any of them makes ``configs.choose`` ``heavy``."""
    return {"SOFTCAP": score.softcap > 0, "ALIBI": score.alibi_slopes is not None, "DROPOUT": score.dropout_p > 0}


class HeadScore(NamedTuple):
    """How the scores of one query head are computed, and what its dropout mask depends on."""

    scale: tl.tensor
    cap: tl.tensor
    slope: tl.tensor  # ALiBi, times log2(e)
    keep_scale: tl.tensor  # 1 / (1 - dropout_p)
    dropout_threshold: tl.tensor
    seed: tl.tensor
    batch: tl.tensor
    head_key: tl.tensor


class HeadRows(NamedTuple):
    """One head's rows, ``[length, D]``, of a tensor ``[batch, length, heads, D]``."""

    X: tl.tensor  # pointer to the whole tensor, or its descriptor
    batch: tl.tensor
    head: tl.tensor
    strides: tl.tuple  # of batch, rows and heads
    length: tl.tensor


class Line(NamedTuple):
    """One line of a tensor ``[lines, length]`` whose length is a multiple of every tile."""

    X: tl.tensor  # pointer or descriptor
    line: tl.tensor
    length: tl.tensor


class Keys(NamedTuple):
    """Keys and values of one head, which the kernel reads tile by tile."""

    K: HeadRows
    K_TAIL: HeadRows
    V: HeadRows
    POSITIONS: tl.tensor


class Tiles(NamedTuple):
    """``count`` tiles from ``start``, leaving out the tiles ``[skip_from, skip_to)``."""

    start: tl.tensor
    count: tl.tensor
    skip_from: tl.tensor
    skip_to: tl.tensor


@triton.jit
def program_index(C: tl.constexpr):
    """The program's index, such that programs on the same die of the GPU have neighbouring ones.

    The tiles of one head read the same keys and values, so they should share a cache. A GPU with several dies (MI300X:
    8) has a cache on each die, and distributes the programs over the dies in turn.
    """
    program = tl.program_id(0)
    if C.DIES > 1:
        share = tl.num_programs(0) // C.DIES
        program = tl.where(program < share * C.DIES, program % C.DIES * share + program // C.DIES, program)
    return program


@triton.jit
def tile_split(begin, end, inner_begin, inner_end, BLOCK: tl.constexpr):
    """Split the tiles of ``[begin, end)`` into inner ones, which need no mask, and the others at both edges.

    [Note: which tiles are masked]
    The bounds of the intervals never decrease, so the first and the last query of a tile bound all the others. With keys from left to right
    and x for what a query sees:

                        begin = lo[first]           inner_end = hi[first]
                                v                           v
        first query             xxxxxxxxxxxxxxxxxxxxxxxxxxxx
                                  xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
                                     xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
        last query                      xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
                                        ^                               ^
                              inner_begin = lo[last]          end = hi[last]

        tiles     |skipped|masked |masked | inner | inner |masked |masked |skipped|
                          ^start          ^skip_from      ^skip_to

    Comparing indices takes more instructions than scaling a score, so inner tiles run in a loop of their own. Under a
    causal mask, all tiles but one or two on the diagonal are inner. The masked tiles of both edges share a
    second loop, which skips the inner ones, so that the machine code has two copies of the body and not three. An
    online softmax takes the tiles in any order. Inner tiles lie within ``[0, length)``, so only masked ones need bounds
    on their loads.

    Args:
        begin: start of the range outside which everything is masked.
        end: its end, exclusive.
        inner_begin: start of the range inside which nothing is masked.
        inner_end: its end, exclusive; at most ``inner_begin`` if there is no such range.
        BLOCK: width of a tile.

    Returns:
        :class:`Tiles` of the inner tiles, and of the masked ones.
    """
    start = begin // BLOCK * BLOCK
    stop = tl.where(end > begin, tl.cdiv(end, BLOCK) * BLOCK, start)
    inner_start = tl.minimum(tl.maximum(tl.cdiv(inner_begin, BLOCK) * BLOCK, start), stop)
    inner_stop = tl.minimum(tl.maximum(inner_end // BLOCK * BLOCK, inner_start), stop)
    inner = Tiles(inner_start, (inner_stop - inner_start) // BLOCK, 0, 0)
    edges = Tiles(start, (inner_start - start) // BLOCK + (stop - inner_stop) // BLOCK, inner_start, inner_stop)
    return inner, edges


@triton.jit
def tile_start(tiles, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Where the ``n``-th tile starts; only masked tiles have some to skip."""
    start = tiles.start + n * BLOCK
    if MASKED:
        start += tl.where(start >= tiles.skip_from, tiles.skip_to - tiles.skip_from, 0)
    return start


@triton.jit
def _row_pointer(rows, start):
    """Pointer to row ``start``. Sequence x heads x head_dim passes 2**31: only offsets within a tile fit 32 bits."""
    stride_b, stride_s, stride_h = rows.strides
    head = rows.X + (tl.cast(rows.batch, tl.int64) * stride_b + tl.cast(rows.head, tl.int64) * stride_h)
    return head + tl.cast(start, tl.int64) * stride_s


@triton.jit
def load_rows(rows, start, C: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr):
    """Rows ``start ... start + BLOCK``, read by pointers; 0 past ``D`` and, if BOUND, past ``length``."""
    row = tl.arange(0, BLOCK)
    column = C.FIRST + tl.arange(0, C.BLOCK_D)
    pointers = _row_pointer(rows, start) + (row[:, None] * rows.strides[1] + column[None, :])
    if BOUND and C.D < C.FIRST + C.BLOCK_D:
        return tl.load(pointers, mask=(start + row < rows.length)[:, None] & (column < C.D)[None, :], other=0.0)
    elif BOUND:
        return tl.load(pointers, mask=(start + row < rows.length)[:, None], other=0.0)
    elif C.D < C.FIRST + C.BLOCK_D:
        return tl.load(pointers, mask=(column < C.D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def stream_rows(rows, start, C: tl.constexpr, BLOCK: tl.constexpr, BOUND: tl.constexpr):
    """As :func:`load_rows`, for the tiles that a loop reads: by TMA if C.TMA, which always fills with 0."""
    if C.TMA:
        return rows.X.load([rows.batch, rows.head, start, C.FIRST]).reshape(BLOCK, C.BLOCK_D)
    else:
        return load_rows(rows, start, C, BLOCK, BOUND)


@triton.jit
def stream_line(line, start, C: tl.constexpr, BLOCK: tl.constexpr):
    """``BLOCK`` numbers from ``start`` of one :class:`Line`; no bounds, because lines are padded to whole tiles."""
    if C.TMA:
        return line.X.load([line.line, start]).reshape(BLOCK)
    else:
        return tl.load(line.X + tl.cast(line.line, tl.int64) * line.length + start + tl.arange(0, BLOCK))


@triton.jit
def load_positions(POSITIONS, index, length, C: tl.constexpr):
    """Global positions at ``index``; ``index`` itself if the scores do not depend on positions."""
    return tl.load(POSITIONS + index, mask=index < length, other=0) if C.ALIBI or C.DROPOUT else index


@triton.jit
def _store_pointers(rows, start, FIRST: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    # The same addresses as in load_rows, computed row by row: in an accumulator's layout a thread's columns of one row
    # then differ by constants, and take no registers of their own.
    of_row = _row_pointer(rows, start) + tl.arange(0, BLOCK) * rows.strides[1]
    return of_row[:, None] + (FIRST + tl.arange(0, COLUMNS))[None, :]


@triton.jit
def _in_bounds(rows, start, C: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    inside = (start + tl.arange(0, BLOCK) < rows.length)[:, None]
    if C.D < FIRST + COLUMNS:
        inside = inside & (FIRST + tl.arange(0, COLUMNS) < C.D)[None, :]
    return inside


@triton.jit
def store_rows(rows, x, start, C: tl.constexpr, BLOCK: tl.constexpr):
    """Store ``x [BLOCK, BLOCK_D]`` as rows ``start ...``, rounded to the tensor's dtype."""
    pointers = _store_pointers(rows, start, C.FIRST, BLOCK, C.BLOCK_D)
    tl.store(pointers, x.to(rows.X.dtype.element_ty), mask=_in_bounds(rows, start, C, C.FIRST, BLOCK, C.BLOCK_D))


@triton.jit
def _add_columns(rows, x, start, C: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    pointers = _store_pointers(rows, start, FIRST, BLOCK, COLUMNS)
    inside = _in_bounds(rows, start, C, FIRST, BLOCK, COLUMNS)
    tl.store(pointers, x + tl.load(pointers, mask=inside, other=0.0), mask=inside)


@triton.jit
def add_rows(rows, x, start, C: tl.constexpr, BLOCK: tl.constexpr, NEW: tl.constexpr):
    """Add ``x [BLOCK, BLOCK_D]`` to rows ``start ...``; store it if NEW, where there is nothing to add to.

    Wide tiles are added in two halves of the columns. The old values need registers in addition to the accumulators,
    and with halves they need only half as many at a time.
    """
    if NEW:
        store_rows(rows, x, start, C, BLOCK)
    elif C.BLOCK_D >= 64:
        HALF: tl.constexpr = C.BLOCK_D // 2
        left, right = tl.split(tl.permute(tl.reshape(x, [BLOCK, 2, HALF]), [0, 2, 1]))
        _add_columns(rows, left, start, C, C.FIRST, BLOCK, HALF)
        _add_columns(rows, right, start, C, C.FIRST + HALF, BLOCK, HALF)
    else:
        _add_columns(rows, x, start, C, C.FIRST, BLOCK, C.BLOCK_D)


@triton.jit
def reduce_rows(rows, x, start, C: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """Add ``x [BLOCK, BLOCK_D]`` to rows ``start ...``, to which other programs add too, in any order."""
    if TMA:
        rows.X.atomic_add([rows.batch, rows.head, start, 0], x.reshape(1, 1, BLOCK, C.BLOCK_D))
    else:
        pointers = _store_pointers(rows, start, 0, BLOCK, C.BLOCK_D)
        tl.atomic_add(pointers, x, mask=_in_bounds(rows, start, C, 0, BLOCK, C.BLOCK_D), sem="relaxed")


@triton.jit
def products(a, a_tail, b, b_tail, C: tl.constexpr):
    """``a b^T`` of rows of q and of k, in either order."""
    found = tl.dot(a, tl.trans(b), input_precision=C.PRECISION)
    if C.TAIL:
        found = tl.dot(a_tail, tl.trans(b_tail), found, input_precision=C.PRECISION)
    return found


@triton.jit
def tanh(x):
    """``tanh(x / (2 log2(e)))``: the caller's scale holds the factor. Saturates to 1 and -1 without NaN."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x))


@triton.jit
def alibi_bias(score, i, j):
    """What ALiBi subtracts: ``slope * |i - j|`` for global positions (Press et al., 2022)."""
    return score.slope * tl.abs(i - j).to(tl.float32)


@triton.jit
def dropout_keep(score, i, j):
    """Which probabilities dropout keeps: a pure function of global positions, head and batch row (Philox4x32-10).

    Forward, backward and every rank of any sharding therefore agree on the mask without storing it.
    """
    word, _, _, _ = tl.philox(score.seed, j, i, score.head_key, score.batch)
    return word >= tl.cast(score.dropout_threshold, tl.uint32)
