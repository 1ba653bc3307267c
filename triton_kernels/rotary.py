"""Rotary embedding in one pass (Su et al., RoFormer, 2021), half-split as in HF Llama.

``rotate_half`` pairs element ``i`` of a head with element ``i + head_dim / 2``. Each element is read once and written
once, 4 bytes in half precision, beside one table of cosines and sines that all heads of a token share. PyTorch's
conversions, products, sums and ``cat`` take 40 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .launch import Launch, Repeated, strides, unit_stride
from .tiles import UNSPECIALIZED


@triton.jit(do_not_specialize=UNSPECIALIZED)
def rotary_kernel(
    X, stride_xb, stride_xs, stride_xh,      # [b, s, h, d]
    OUT, stride_ob, stride_os, stride_oh,    # [b, s, h, d]
    COS, SIN, stride_tb,                     # float32 [1 or b, s, d / 2], rows dense
    heads, q_len, tiles,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """All heads of one tile of tokens: grid ``batch * tiles``. BLOCK_D holds half a head."""
    start = tl.program_id(0) % tiles * BLOCK_M
    batch = tl.cast(tl.program_id(0) // tiles, tl.int64)
    row = start + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    HALF: tl.constexpr = D // 2
    inside = (row < q_len)[:, None] & (column < HALF)[None, :]
    table = batch * stride_tb + tl.cast(start, tl.int64) * HALF
    at = table + tl.arange(0, BLOCK_M)[:, None] * HALF + column[None, :]
    cos = tl.load(COS + at, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
    sin = tl.load(SIN + at, mask=inside, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    X += batch * stride_xb + tl.cast(start, tl.int64) * stride_xs
    OUT += batch * stride_ob + tl.cast(start, tl.int64) * stride_os
    x_at = tl.arange(0, BLOCK_M)[:, None] * stride_xs + column[None, :]
    out_at = tl.arange(0, BLOCK_M)[:, None] * stride_os + column[None, :]
    # The heads share the table: a program loops over them, so that it is read once.
    for _ in range(0, heads):
        first = tl.load(X + x_at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(X + x_at + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + out_at, (first * cos - second * sin).to(OUT.dtype.element_ty), mask=inside)
        tl.store(OUT + out_at + HALF, (second * cos + first * sin).to(OUT.dtype.element_ty), mask=inside)
        X += stride_xh
        OUT += stride_oh


def rotary_launch(
    x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False, config: Config | None = None
) -> Launch:
    """The launch behind :func:`apply_rotary`, with every tensor already allocated.

    ``x, out [batch, seq, heads, head_dim]``; ``cos, sin`` contiguous ``[1 or batch, seq, head_dim / 2]``.
    """
    batch, seq, heads, head_dim = x.shape
    block_d = triton.next_power_of_2(head_dim // 2)
    config = config or Config(max(1, 2048 // block_d), 0, num_warps=4, num_stages=1)
    tiles = triton.cdiv(seq, config.block_m)
    arguments = {
        **strides(x=x, o=out),
        **strides("b", t=cos),
        "X": x,
        "OUT": out,
        "COS": cos,
        "SIN": sin,
        "heads": heads,
        "q_len": seq,
        "tiles": tiles,
        "D": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_M": config.block_m,
        "INVERSE": inverse,
    }
    return Launch(rotary_kernel, batch * tiles, arguments, config)


_launches = Repeated("X", "OUT", "COS", "SIN")


class _ApplyRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        x = unit_stride(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            _launches((x, out, cos, sin), inverse, lambda: rotary_launch(x, out, cos, sin, inverse=inverse))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # The transpose of a rotation is the rotation back; a factor in cos and sin stays.
        return _ApplyRotary.apply(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` by the angles of these cosines and sines; differentiable in ``x``.

    Args:
        x: ``[batch, seq, heads, head_dim]``, head_dim even, float16, bfloat16 or float32.
        cos: float32 ``[1 or batch, seq, 1, head_dim / 2]``, with or without the 1 for the heads. A factor common to
            ``cos`` and ``sin``, such as YaRN's attention factor, scales the result.
        sin: as ``cos``.

    Returns:
        A new contiguous tensor in the dtype of ``x``, computed in float32.

    Raises:
        ValueError: ``head_dim`` is odd, or ``cos`` or ``sin`` does not fit ``x``.
    """
    batch, seq, _, head_dim = x.shape
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: expected an even number, since rotary embeddings pair the elements")
    for name, table in (("cos", cos), ("sin", sin)):
        shape = tuple(table.shape)
        if shape[1:] not in ((seq, head_dim // 2), (seq, 1, head_dim // 2)) or shape[0] not in (1, batch):
            raise ValueError(
                f"{name}={shape}: expected [1 or {batch}, {seq}, 1, {head_dim // 2}] for x={tuple(x.shape)}"
            )
    if sin.shape != cos.shape:
        raise ValueError(f"sin={tuple(sin.shape)}: expected the shape of cos, {tuple(cos.shape)}")
    cos, sin = (t.reshape(t.shape[0], seq, head_dim // 2).contiguous() for t in (cos, sin))  # [1 or b, s, d / 2]
    rotated: Tensor = _ApplyRotary.apply(x, cos, sin, False)
    return rotated
