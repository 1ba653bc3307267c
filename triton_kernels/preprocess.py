"""What the backward needs before its products: delta, statistics padded to whole tiles, who sees which keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .launch import Launch, padded, strides, unit_stride
from .tiles import LOG2E, UNSPECIALIZED, head_base, load_rows

_LOG2E = tl.constexpr(LOG2E)
_PAD = 128  # a multiple of every configuration's tile of queries


@triton.jit(do_not_specialize=UNSPECIALIZED)
def delta_kernel(OUT, DOUT, DLSE, DELTA, stride_ob, stride_os, stride_oh, stride_db, stride_ds, stride_dh,
                 heads, q_len, tiles, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
                 HAS_DLSE: tl.constexpr):  # fmt: skip
    """``delta = rowsum(dout * out) - dlse`` in float32; grid ``batch * heads * tiles``."""
    program = tl.program_id(0)
    q_start = program % tiles * BLOCK_M
    head = program // tiles % heads
    batch = program // tiles // heads
    row = q_start + tl.arange(0, BLOCK_M)
    OUT = head_base(OUT, batch, head, stride_ob, stride_oh, False)
    DOUT = head_base(DOUT, batch, head, stride_db, stride_dh, False)
    first = (tl.cast(batch, tl.int64) * heads + head) * q_len
    out = load_rows(OUT, 0, 0, q_start, stride_os, q_len, D, BLOCK_M, BLOCK_D, True, False).to(tl.float32)
    dout = load_rows(DOUT, 0, 0, q_start, stride_ds, q_len, D, BLOCK_M, BLOCK_D, True, False).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + first + row, mask=row < q_len, other=0.0)
    tl.store(DELTA + first + row, delta, mask=row < q_len)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def statistics_kernel(LSE, DELTA, STATISTICS, q_len, q_padded, tiles, BLOCK_M: tl.constexpr):
    """``STATISTICS [batch * heads, 2, q_padded]``: lse in base 2, then delta; grid ``batch * heads * tiles``.

    Rows that saw nothing and rows that are none have lse +inf: their probabilities are 0. So the loops below load
    their statistics without a mask.
    """
    head = tl.cast(tl.program_id(0) // tiles, tl.int64)
    row = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    lse = tl.load(LSE + head * q_len + row, mask=row < q_len, other=float("-inf"))
    delta = tl.load(DELTA + head * q_len + row, mask=row < q_len, other=0.0)
    STATISTICS += head * 2 * q_padded + row
    tl.store(STATISTICS, tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E), mask=row < q_padded)
    tl.store(STATISTICS + q_padded, delta, mask=row < q_padded)


def delta_launch(out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor, config: Config | None = None) -> Launch:
    """The launch behind :func:`delta`."""
    batch, q_len, heads, head_dim = out.shape
    config = config or Config(64, 0, num_warps=4, num_stages=1)
    tiles = triton.cdiv(q_len, config.block_m)
    arguments = {
        "OUT": out, "DOUT": dout, "DLSE": dlse, "DELTA": delta, **strides("o", out), **strides("d", dout),
        "heads": heads, "q_len": q_len, "tiles": tiles, "D": head_dim, "BLOCK_D": padded(head_dim),
        "BLOCK_M": config.block_m, "HAS_DLSE": dlse is not None,
    }  # fmt: skip
    return Launch(delta_kernel, batch * heads * tiles, arguments, config)


def delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """``rowsum(dout * out) - dlse``, float32 ``[batch, heads, q_len]``, reading each input once.

    ``out, dout [batch, q_len, heads, head_dim]``; ``dlse [batch, heads, q_len]`` or None.
    """
    batch, q_len, heads, _ = out.shape
    result = out.new_empty(batch, heads, q_len, dtype=torch.float32)
    if out.numel():
        delta_launch(unit_stride(out), unit_stride(dout), None if dlse is None else dlse.contiguous(), result)()
    return result


def statistics_launch(lse: Tensor, delta: Tensor) -> tuple[Launch, Tensor]:
    """The launch that fills ``statistics``, and ``statistics [2 * batch * heads, q_padded]``, float32.

    ``lse, delta [batch, heads, q_len]``, contiguous.
    """
    batch, heads, q_len = lse.shape
    q_padded = triton.cdiv(q_len, _PAD) * _PAD
    statistics = lse.new_empty(2 * batch * heads, q_padded)
    config = Config(1024, 0, num_warps=4, num_stages=1)
    tiles = triton.cdiv(q_padded, config.block_m)
    arguments = {
        "LSE": lse, "DELTA": delta, "STATISTICS": statistics, "q_len": q_len, "q_padded": q_padded, "tiles": tiles,
        "BLOCK_M": config.block_m,
    }  # fmt: skip
    return Launch(statistics_kernel, batch * heads * tiles, arguments, config), statistics


def padded_bounds(lo: Tensor, hi: Tensor, k_len: int, q_padded: int) -> Tensor:
    """``(hi, lo)`` with rows that see nothing appended, int32 ``[2 * rows, q_padded]``; still never falling."""
    rows, q_len = lo.shape
    bounds = lo.new_full((2 * rows, q_padded), k_len)
    bounds[:rows, :q_len] = hi
    bounds[rows:, :q_len] = lo
    return bounds


def query_ranges(bounds: Tensor, k_len: int, block: int) -> Tensor:
    """Which queries see each tile of ``block`` keys: int32 ``[2, rows, 2 * tiles]`` for :func:`padded_bounds`.

    Of a tile ``[k0, k1)``, ``[0]`` holds the first query whose ``hi`` passes ``k0`` (the range's start), then the first
    whose ``hi`` reaches ``k1``; ``[1]`` the first whose ``lo`` passes ``k0``, then the first whose ``lo`` reaches
    ``k1`` (the range's stop). From the second to the third every query sees the whole tile.
    """
    first = torch.arange(0, k_len, block, device=bounds.device, dtype=torch.int32)
    edges = torch.cat((first + 1, (first + block).clamp_(max=k_len)))
    return torch.searchsorted(bounds, edges.expand(2, bounds.shape[1], -1).contiguous(), out_int32=True)
