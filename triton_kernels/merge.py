"""Merge two partial attention results in one pass, for backends that cannot carry.

By element 4 bytes are read and 4 written of ``acc`` and as many as ``out`` has are read of it: with a half-precision
``out`` 10 bytes. In PyTorch the conversion and ``lerp_`` are two passes of 18 together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .launch import Launch, padded, strides, unit_stride
from .tiles import LN2, LOG2E, UNSPECIALIZED, head_base, load_rows, store_rows

_LOG2E = tl.constexpr(LOG2E)
_LN2 = tl.constexpr(LN2)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_kernel(ACC, LSE, OUT, OUT_LSE, stride_ab, stride_as, stride_ah, stride_ob, stride_os, stride_oh,
                 stride_lb, stride_lh,
                 heads, q_len, tiles, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """Grid ``batch * heads * tiles``."""
    program = tl.program_id(0)
    q_start = program % tiles * BLOCK_M
    head = program // tiles % heads
    batch = program // tiles // heads
    row = q_start + tl.arange(0, BLOCK_M)
    first = (tl.cast(batch, tl.int64) * heads + head) * q_len + row
    LSE = head_base(LSE, batch, head, stride_lb, stride_lh, False) + row
    a = tl.load(LSE, mask=row < q_len, other=float("-inf"))
    b = tl.load(OUT_LSE + first, mask=row < q_len, other=float("-inf"))
    larger = tl.maximum(a, b)
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    weight_a = tl.exp2((a - shift) * _LOG2E)
    weight_b = tl.exp2((b - shift) * _LOG2E)
    total = weight_a + weight_b
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    ACC = head_base(ACC, batch, head, stride_ab, stride_ah, False)
    OUT = head_base(OUT, batch, head, stride_ob, stride_oh, False)
    acc = load_rows(ACC, 0, 0, q_start, stride_as, q_len, D, BLOCK_M, BLOCK_D, True, False)
    out = load_rows(OUT, 0, 0, q_start, stride_os, q_len, D, BLOCK_M, BLOCK_D, True, False).to(tl.float32)
    acc = acc * (weight_a / total)[:, None] + out * (weight_b / total)[:, None]
    store_rows(ACC, acc, q_start, stride_as, q_len, D, BLOCK_M, BLOCK_D)
    lse = tl.where(seen, shift + tl.log2(total) * _LN2, float("-inf"))
    tl.store(LSE, lse, mask=row < q_len)


def merge_launch(acc: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor, config: Config | None = None) -> Launch:
    """The launch behind :func:`merge_`."""
    batch, q_len, heads, head_dim = acc.shape
    config = config or Config(32, 0, num_warps=4, num_stages=1)
    tiles = triton.cdiv(q_len, config.block_m)
    arguments = {
        "ACC": acc, "LSE": lse, "OUT": out, "OUT_LSE": out_lse, **strides("a", acc), **strides("o", out),
        **strides("l", lse, "bh"),
        "heads": heads, "q_len": q_len, "tiles": tiles, "D": head_dim, "BLOCK_D": padded(head_dim),
        "BLOCK_M": config.block_m,
    }  # fmt: skip
    return Launch(merge_kernel, batch * heads * tiles, arguments, config)


def merge_(acc: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge the partial result ``(out, out_lse)`` into ``(acc, lse)`` in place.

    Args:
        acc: float32 ``[batch, q_len, heads, head_dim]``, normalised by its own ``lse``.
        lse: float32 ``[batch, heads, q_len]``, its last dimension dense; natural logarithm, -inf for a row that saw nothing.
        out: as ``acc``, of any dtype.
        out_lse: as ``lse``.

    Raises:
        ValueError: an ``acc`` or ``lse`` that cannot be written in place.
    """
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in (acc, lse)):
        raise ValueError("acc and lse are updated in place: the last dimension of both must be dense")
    if acc.numel():
        merge_launch(acc, lse, unit_stride(out), out_lse.contiguous())()
