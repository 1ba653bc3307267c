"""Rotary embedding on arbitrary positions in one pass (Su et al., RoFormer, 2021), half-split as in HF Llama.

``rotate_half`` pairs element ``i`` of a head with ``i + head_dim / 2``. By element of ``x`` one read and one write, 4
bytes in half precision, and a table of cosines and sines that all heads of a token share. In PyTorch conversion, four
products, two sums, ``cat`` and conversion back make 40 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import Config
from .launch import Launch, strides, unit_stride
from .tiles import UNSPECIALIZED


@triton.jit(do_not_specialize=UNSPECIALIZED)
def rotary_kernel(X, OUT, COS, SIN, POSITIONS, FREQUENCIES, stride_xb, stride_xs, stride_xh, stride_ob, stride_os,
                  stride_oh, stride_tb, factor, heads, q_len, tiles, D: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK_M: tl.constexpr, TABLES: tl.constexpr, INVERSE: tl.constexpr):  # fmt: skip
    """All heads of one tile of tokens: grid ``batch * tiles``. BLOCK_D holds half a head."""
    start = tl.program_id(0) % tiles * BLOCK_M
    batch = tl.cast(tl.program_id(0) // tiles, tl.int64)
    row = start + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    HALF: tl.constexpr = D // 2
    inside = (row < q_len)[:, None] & (column < HALF)[None, :]
    if TABLES:
        table = batch * stride_tb + tl.cast(start, tl.int64) * HALF
        at = table + tl.arange(0, BLOCK_M)[:, None] * HALF + column[None, :]
        cos = tl.load(COS + at, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(SIN + at, mask=inside, other=0.0).to(tl.float32)
    else:
        position = tl.load(POSITIONS + batch * stride_tb + row, mask=row < q_len, other=0).to(tl.float32)
        frequency = tl.load(FREQUENCIES + column, mask=column < HALF, other=0.0)
        angle = position[:, None] * frequency[None, :]
        cos = tl.cos(angle) * factor
        sin = tl.sin(angle) * factor
    if INVERSE:
        sin = -sin
    X += batch * stride_xb + tl.cast(start, tl.int64) * stride_xs
    OUT += batch * stride_ob + tl.cast(start, tl.int64) * stride_os
    x_at = tl.arange(0, BLOCK_M)[:, None] * stride_xs + column[None, :]
    out_at = tl.arange(0, BLOCK_M)[:, None] * stride_os + column[None, :]
    for _ in range(0, heads):
        first = tl.load(X + x_at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(X + x_at + HALF, mask=inside, other=0.0).to(tl.float32)
        tl.store(OUT + out_at, (first * cos - second * sin).to(OUT.dtype.element_ty), mask=inside)
        tl.store(OUT + out_at + HALF, (second * cos + first * sin).to(OUT.dtype.element_ty), mask=inside)
        X += stride_xh
        OUT += stride_oh


def rotary_launch(x: Tensor, out: Tensor, *, cos: Tensor | None = None, sin: Tensor | None = None,
                  positions: Tensor | None = None, frequencies: Tensor | None = None, factor: float = 1.0,
                  inverse: bool = False, config: Config | None = None) -> Launch:  # fmt: skip
    """The launch behind :func:`rotary`, with every tensor already allocated and contiguous where it must be."""
    batch, seq, heads, head_dim = x.shape
    by_token = cos if cos is not None else positions
    if by_token is None:
        raise TypeError("rotary: cos and sin, or positions and frequencies, are needed")
    block_d = triton.next_power_of_2(head_dim // 2)
    config = config or Config(max(1, 2048 // block_d), 0, num_warps=4, num_stages=1)
    tiles = triton.cdiv(seq, config.block_m)
    arguments = {
        "X": x, "OUT": out, "COS": cos, "SIN": sin, "POSITIONS": positions, "FREQUENCIES": frequencies,
        **strides("x", x), **strides("o", out),
        "stride_tb": 0 if by_token.dim() == 1 or by_token.shape[0] == 1 else by_token.stride(0), "factor": factor,
        "heads": heads, "q_len": seq, "tiles": tiles, "D": head_dim, "BLOCK_D": block_d, "BLOCK_M": config.block_m,
        "TABLES": cos is not None, "INVERSE": inverse,
    }  # fmt: skip
    return Launch(rotary_kernel, batch * tiles, arguments, config)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inverse: bool, arguments: dict[str, Any]) -> Tensor:
        ctx.inverse, ctx.arguments = inverse, arguments
        x = unit_stride(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            rotary_launch(x, out, inverse=inverse, **arguments)()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # A rotation's transpose is the rotation back.
        return _Rotary.apply(grad, not ctx.inverse, ctx.arguments), None, None


def rotary(x: Tensor, positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate ``x`` by ``positions * frequencies``; differentiable in ``x``.

    Args:
        x: ``[batch, seq, heads, head_dim]``, head_dim even, float16, bfloat16 or float32.
        positions: integers ``[seq]`` or ``[1 or batch, seq]``, in any order.
        frequencies: float32 ``[head_dim / 2]`` (HF's ``inv_freq``); angles are float32 products, as there.
        factor: scales cosine and sine (YaRN's attention factor).

    Returns:
        A new contiguous tensor in the dtype of ``x``, computed in float32.

    Raises:
        ValueError: an odd head_dim or ``positions`` or ``frequencies`` that do not fit ``x``.
    """
    _check(x, positions.shape, frequencies.shape)
    arguments = {
        "positions": positions.contiguous(),
        "frequencies": frequencies.to(torch.float32).contiguous(),
        "factor": float(factor),
    }
    return _Rotary.apply(x, False, arguments)


def rotary_from_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` with given tables ``cos, sin [1 or batch, seq, 1, head_dim / 2]`` (or without the 1 for heads).

    Otherwise as :func:`rotary`.
    """
    cos, sin = (t.squeeze(2) if t.dim() == 4 else t for t in (cos, sin))
    _check(x, cos.shape[:-1], cos.shape[-1:])
    if sin.shape != cos.shape:
        raise ValueError(f"sin={tuple(sin.shape)}: must have the shape of cos, {tuple(cos.shape)}")
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    return _Rotary.apply(x, False, {"cos": cos.contiguous(), "sin": sin.contiguous()})


def _check(x: Tensor, tokens: torch.Size, half: torch.Size) -> None:
    batch, seq, _, head_dim = x.shape
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim}: rotary embedding pairs elements and needs an even one")
    if tuple(half) != (head_dim // 2,):
        raise ValueError(f"frequencies={tuple(half)}: head_dim={head_dim} needs {head_dim // 2} of them")
    if tuple(tokens) not in ((seq,), (1, seq), (batch, seq)):
        raise ValueError(f"positions={tuple(tokens)}: x has batch {batch} and {seq} tokens; give [seq] or [batch, seq]")
