"""Merge two partial attention results in one pass, for backends that cannot carry.

Bytes per element of ``acc``: 4 read and 4 written of ``acc``, and the size of an element of ``out`` read; 10 in all if
``out`` is half precision. PyTorch takes two passes, the conversion and ``lerp_``, and 18 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .launch import Launch, Repeated, padded, strides, unit_stride
from .tiles import LN2, LOG2E, UNSPECIALIZED, Constants, HeadRows, load_rows, store_rows


@triton.jit(do_not_specialize=UNSPECIALIZED)
def merge_kernel(
    ACC, stride_ab, stride_as, stride_ah,    # [b, q, h, d], float32, updated
    LSE, stride_lb, stride_lh,               # [b, h, q], float32, updated
    OUT, stride_ob, stride_os, stride_oh,    # [b, q, h, d]
    OUT_LSE,                                 # [b, h, q], float32
    heads, q_len, tiles,
    C: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head: grid ``batch * heads * tiles``."""
    BLOCK_M: tl.constexpr = C.BLOCK_M
    program = tl.program_id(0)
    q_start = program % tiles * BLOCK_M
    head = program // tiles % heads
    batch = program // tiles // heads
    row = q_start + tl.arange(0, BLOCK_M)
    LSE += tl.cast(batch, tl.int64) * stride_lb + tl.cast(head, tl.int64) * stride_lh + row
    OUT_LSE += (tl.cast(batch, tl.int64) * heads + head) * q_len + row
    a = tl.load(LSE, mask=row < q_len, other=float("-inf"))
    b = tl.load(OUT_LSE, mask=row < q_len, other=float("-inf"))
    # Each side has the weight exp(lse). The larger lse is subtracted from both, so that nothing overflows.
    larger = tl.maximum(a, b)
    shift = tl.where(larger == float("-inf"), 0.0, larger)  # if neither side has seen a key, -inf - -inf would be NaN
    weight_a = tl.exp2((a - shift) * LOG2E)
    weight_b = tl.exp2((b - shift) * LOG2E)
    total = weight_a + weight_b
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    ACC = HeadRows(ACC, batch, head, (stride_ab, stride_as, stride_ah), q_len)
    OUT = HeadRows(OUT, batch, head, (stride_ob, stride_os, stride_oh), q_len)
    acc = load_rows(ACC, q_start, C, BLOCK_M, True)  # [BLOCK_M, BLOCK_D]
    out = load_rows(OUT, q_start, C, BLOCK_M, True).to(tl.float32)
    acc = acc * (weight_a / total)[:, None] + out * (weight_b / total)[:, None]
    store_rows(ACC, acc, q_start, C, BLOCK_M)
    lse = tl.where(seen, shift + tl.log2(total) * LN2, float("-inf"))
    tl.store(LSE, lse, mask=row < q_len)


def merge_launch(acc: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor, config: Config | None = None) -> Launch:
    """The launch behind :func:`merge_`."""
    batch, q_len, heads, head_dim = acc.shape
    config = config or Config(32 if head_dim <= 256 else 16, 0, num_warps=4, num_stages=1)
    tiles = triton.cdiv(q_len, config.block_m)
    arguments = {
        **strides(a=acc, o=out),
        **strides("bh", l=lse),
        "ACC": acc,
        "LSE": lse,
        "OUT": out,
        "OUT_LSE": out_lse,
        "heads": heads,
        "q_len": q_len,
        "tiles": tiles,
        "C": Constants(D=head_dim, BLOCK_D=padded(head_dim), BLOCK_M=config.block_m),
    }
    return Launch(merge_kernel, batch * heads * tiles, arguments, config)


_launches = Repeated("ACC", "LSE", "OUT", "OUT_LSE")


def merge_(acc: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge the partial result ``(out, out_lse)`` into ``(acc, lse)`` in place.

    Args:
        acc: float32 ``[batch, q_len, heads, head_dim]``, normalised by its own ``lse``.
        lse: float32 ``[batch, heads, q_len]``, its last dimension dense; natural logarithm, -inf for a query that has
            seen no key.
        out: the shape of ``acc``, of any dtype.
        out_lse: the shape and dtype of ``lse``.

    Raises:
        ValueError: ``acc`` or ``lse`` cannot be written in place.
    """
    for name, x in (("acc", acc), ("lse", lse)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} has strides {x.stride()}: expected a dense last dimension, to update it in place")
    if acc.numel():
        inputs = acc, lse, unit_stride(out), out_lse.contiguous()
        _launches(inputs, None, lambda: merge_launch(*inputs))
