"""Inputs of the backward: delta, statistics padded to whole tiles, and which queries see each tile of keys.

Shapes: b batch, q local queries, k keys of a step, h query heads, d head_dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .configs import Config
from .launch import Launch, Repeated, padded, strides, unit_stride
from .tiles import LOG2E, UNSPECIALIZED, Constants, HeadRows, load_rows

_PAD = 128  # a multiple of every configuration's tile of queries
_MOST_REMEMBERED = 64
_T = TypeVar("_T")
_remembered: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remembered(first: Tensor, second: Tensor, wanted: Hashable, make: Callable[[], _T]) -> _T:
    """The result of ``make()``, which depends on these two tensors and on ``wanted``. It is kept while both are unchanged.

    The steps of a ring share their queries, and calls share their mask, so values derived from them are computed once.
    """
    owner, other = (x if x._base is None else x._base for x in (first, second))  # each step may make its own views
    stream = None
    if first.is_cuda:
        # What a CUDA graph computes exists only when the graph runs; what a stream computes, only later on that stream.
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = torch.cuda.current_stream(first.device).cuda_stream
    # Inference tensors count no versions. They cannot be saved for a backward, so none is written between its steps.
    states = [(x.data_ptr(), x.shape, x.stride(), 0 if x.is_inference() else x._version) for x in (first, second)]
    key = (wanted, stream, *states)
    found: dict[Hashable, tuple[Any, _T]] = _remembered.setdefault(owner, {})
    entry = found.get(key)
    if entry is None or entry[0]() is not other:
        if len(found) >= _MOST_REMEMBERED:
            found.clear()
        found[key] = entry = weakref.ref(other), make()
    return entry[1]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def delta_kernel(
    OUT, stride_ob, stride_os, stride_oh,     # [b, q, h, d]
    DOUT, stride_db, stride_ds, stride_dh,    # [b, q, h, d]
    DLSE, DELTA,                              # float32 [b, h, q]
    heads, q_len, tiles,
    C: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """``delta = rowsum(dout * out) - dlse`` in float32; grid ``batch * heads * tiles``."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    program = tl.program_id(0)
    q_start = program % tiles * BLOCK_M
    head = program // tiles % heads
    batch = program // tiles // heads
    row = q_start + tl.arange(0, BLOCK_M)
    OUT = HeadRows(OUT, batch, head, (stride_ob, stride_os, stride_oh), q_len)
    DOUT = HeadRows(DOUT, batch, head, (stride_db, stride_ds, stride_dh), q_len)
    first = (tl.cast(batch, tl.int64) * heads + head) * q_len
    out = load_rows(OUT, q_start, C, BLOCK_M, True).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    dout = load_rows(DOUT, q_start, C, BLOCK_M, True).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + first + row, mask=row < q_len, other=0.0)
    tl.store(DELTA + first + row, delta, mask=row < q_len)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def statistics_kernel(LSE, DELTA, STATISTICS, q_len, q_padded, tiles, BLOCK_M: tl.constexpr):
    """``STATISTICS [batch * heads, 2, q_padded]``: lse in base 2, then delta; grid ``batch * heads * tiles``.

    Fully masked rows and padding rows get ``lse = +inf``, so ``exp2(s - lse) = 0`` and the loops of the backward load
    their statistics without a mask.
    """
    head = tl.cast(tl.program_id(0) // tiles, tl.int64)
    row = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    lse = tl.load(LSE + head * q_len + row, mask=row < q_len, other=float("-inf"))
    delta = tl.load(DELTA + head * q_len + row, mask=row < q_len, other=0.0)
    STATISTICS += head * 2 * q_padded + row
    tl.store(STATISTICS, tl.where(lse == float("-inf"), float("inf"), lse * LOG2E), mask=row < q_padded)
    tl.store(STATISTICS + q_padded, delta, mask=row < q_padded)


def delta_launch(out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, config: Config | None = None) -> Launch:
    """The launch behind :func:`delta`, with every tensor already allocated."""
    batch, q_len, heads, head_dim = out.shape
    config = config or Config(64 if head_dim <= 256 else 16, 0, num_warps=4, num_stages=1)
    tiles = triton.cdiv(q_len, config.block_m)
    arguments = {
        **strides(o=out, d=dout),
        "OUT": out,
        "DOUT": dout,
        "DLSE": dlse,
        "DELTA": delta,
        "heads": heads,
        "q_len": q_len,
        "tiles": tiles,
        "C": Constants(D=head_dim, BLOCK_D=padded(head_dim), BLOCK_M=config.block_m),
        "HAS_DLSE": dlse is not None,
    }
    return Launch(delta_kernel, batch * heads * tiles, arguments, config)


_delta_launches = Repeated("OUT", "DOUT", "DLSE", "DELTA")
_statistics_launches = Repeated("LSE", "DELTA", "STATISTICS")


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """``rowsum(dout * out) - dlse``, reading each input once.

    Args:
        out: ``[batch, q_len, heads, head_dim]``.
        dout: the shape of ``out``.
        dlse: float32 ``[batch, heads, q_len]``, or None if nothing depends on ``lse``.

    Returns:
        float32 ``[batch, heads, q_len]``.
    """
    batch, q_len, heads, _ = out.shape
    result = out.new_empty(batch, heads, q_len, dtype=torch.float32)
    if out.numel():
        inputs = unit_stride(out), unit_stride(dout), None if dlse is None else dlse.contiguous(), result
        _delta_launches(inputs, None, lambda: delta_launch(*inputs))
    return result


def statistics_launch(lse: Tensor, delta: Tensor, statistics: Tensor) -> Launch:
    """The launch behind :func:`statistics`, with every tensor already allocated."""
    batch, heads, q_len = lse.shape
    q_padded = statistics.shape[1]
    config = Config(1024, 0, num_warps=4, num_stages=1)
    tiles = triton.cdiv(q_padded, config.block_m)
    arguments = {
        "LSE": lse,
        "DELTA": delta,
        "STATISTICS": statistics,
        "q_len": q_len,
        "q_padded": q_padded,
        "tiles": tiles,
        "BLOCK_M": config.block_m,
    }
    return Launch(statistics_kernel, batch * heads * tiles, arguments, config)


def padded_queries(q_len: int) -> int:
    """``q_len`` rounded up to whole tiles of any configuration."""
    return triton.cdiv(q_len, _PAD) * _PAD


def statistics(lse: Tensor, delta: Tensor) -> Tensor:
    """The ``lse`` and ``delta`` of :func:`~.backward.attention_backward`, as the loops of the backward load them.

    Returns:
        float32 ``[2 * batch * heads, q_padded]``.
    """
    batch, heads, q_len = lse.shape

    def make() -> Tensor:
        result = lse.new_empty(2 * batch * heads, padded_queries(q_len))
        inputs = lse.contiguous(), delta.contiguous(), result
        _statistics_launches(inputs, None, lambda: statistics_launch(*inputs))
        return result

    return remembered(delta, lse, "statistics", make)


def bounds_and_ranges(lo: Tensor, hi: Tensor, k_len: int, block: int) -> tuple[Tensor, Tensor]:
    """:func:`padded_bounds`, and :func:`query_ranges` of tiles of ``block`` keys."""

    def make() -> tuple[Tensor, Tensor]:
        bounds = padded_bounds(lo, hi, k_len, padded_queries(lo.shape[1]))
        return bounds, query_ranges(bounds.view(2, *lo.shape[:1], -1), k_len, block)

    return remembered(lo, hi, (k_len, block), make)


def padded_bounds(lo: Tensor, hi: Tensor, k_len: int, q_padded: int) -> Tensor:
    """``hi`` and ``lo``, int32 ``[row_sets, q_len]``, as lines of one tensor, padded to ``q_padded`` queries.

    Padding queries get the empty interval ``lo = hi = k_len``: they see no key, and ``lo`` and ``hi`` still never fall.

    Returns:
        int32 ``[2 * row_sets, q_padded]``: the lines of ``hi``, then the lines of ``lo``.
    """
    row_sets, q_len = lo.shape
    bounds = lo.new_full((2 * row_sets, q_padded), k_len)
    bounds[:row_sets, :q_len] = hi
    bounds[row_sets:, :q_len] = lo
    return bounds


def query_ranges(bounds: Tensor, k_len: int, block: int) -> Tensor:
    """Which queries see each tile of ``block`` keys.

    A query sees some key of the tile ``[k0, k1)`` if ``hi > k0`` and ``lo < k1``, and all of them if ``hi >= k1`` and
    ``lo <= k0``. Neither bound falls along the queries, so each condition holds from, or up to, one query on, which a
    binary search finds.

    Args:
        bounds: ``[2, row_sets, q_padded]``, from :func:`padded_bounds`.

    Returns:
        int32 ``[2, row_sets, 2 * tiles]``. ``[0]`` holds, for every tile, the first query with ``hi > k0`` (``begin``),
        then for every tile the first with ``hi >= k1`` (``inner_begin``). ``[1]`` holds the first with ``lo > k0``
        (``inner_end``), then the first with ``lo >= k1`` (``end``).
    """
    first = torch.arange(0, k_len, block, device=bounds.device, dtype=torch.int32)  # [tiles]
    edges = torch.cat((first + 1, (first + block).clamp_(max=k_len)))  # [2 * tiles]
    return torch.searchsorted(bounds, edges.expand(2, bounds.shape[1], -1).contiguous(), out_int32=True)
