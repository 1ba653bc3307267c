"""Attention on PyTorch's CPU flash kernel: intervals cut into tiles, partial results merged in float32.

The kernel has neither a carry nor row intervals; it does have its ``lse`` and a backward that takes any ``out`` and
``lse``, which is all that a tile of a larger attention needs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..schedule import KeyIntervals
from .base import Carry, Score, empty_carry, finish, merge_
from .tiles import Kind, Tile, tiles

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class CpuBackend:
    """PyTorch's flash attention for the CPU. Half types are computed in float32: partial results stay exact."""

    name = "cpu"
    deterministic = True

    def unavailable(self) -> str | None:
        return None

    def unsupported(self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool) -> str | None:
        if q.device.type != "cpu":
            return f"the tensors are on {q.device.type}"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"dtype {q.dtype}: float32, bfloat16 and float16 only"
        for name, used in (("softcap", score.softcap), ("dropout", score.dropout_p)):
            if used:
                return f"PyTorch's CPU flash kernel has no {name}"
        if score.alibi_slopes is not None:
            return "PyTorch's CPU flash kernel has no ALiBi"
        if lse_gradient:
            return "PyTorch's CPU flash backward takes no gradient of lse"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        acc, lse = carry or empty_carry(q)
        heads_first = _heads_first(q, k, v)
        for batch, tile in _tiles(rows, q.shape[0]):
            tq, tk, tv = _cut(heads_first, batch, tile)
            mask = _mask(rows, batch, tile)
            out, out_lse = _forward(
                tq, tk, tv, 0.0, tile.kind is Kind.CAUSAL, attn_mask=mask, scale=score.softmax_scale
            )
            span = slice(tile.q0, tile.q1)
            merge_(acc[batch, span], lse[batch, :, span], out.transpose(1, 2), out_lse)
        return finish((acc, lse), score, q.dtype) if last else (acc, lse)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        rows: KeyIntervals,
        score: Score,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        keys, queries = _heads_first(k, v), _heads_first(q, dout, out)
        for batch, tile in _tiles(rows, q.shape[0]):
            tq, tk, tv, tdout, tout = _cut((queries[0], *keys, *queries[1:]), batch, tile)
            mask = _mask(rows, batch, tile)
            span, keys_span = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            gq, gk, gv = _backward(
                tdout, tq, tk, tv, tout, lse[batch, :, span], 0.0, tile.kind is Kind.CAUSAL,
                attn_mask=mask, scale=score.softmax_scale,
            )  # fmt: skip
            dq[batch, span] += gq.transpose(1, 2)
            dk[batch, keys_span] += gk.transpose(1, 2)
            dv[batch, keys_span] += gv.transpose(1, 2)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """float32 ``[batch, heads, seq, head_dim]`` views; the kernel takes their strides."""
    return tuple(x.float().transpose(1, 2) for x in tensors)


def _tiles(rows: KeyIntervals, batch: int) -> Iterator[tuple[slice, Tile]]:
    """Each tile with the batch rows it serves."""
    shared = rows.lo.shape[0] == 1
    for row in range(rows.lo.shape[0]):
        for tile in tiles(rows, row):
            yield slice(0, batch) if shared else slice(row, row + 1), tile


def _cut(tensors: tuple[Tensor, ...], batch: slice, tile: Tile) -> Iterator[Tensor]:
    """The tile's part of q, k, v and of any more tensors along the queries."""
    for i, x in enumerate(tensors):
        span = slice(tile.k0, tile.k1) if i in (1, 2) else slice(tile.q0, tile.q1)
        yield x[batch, :, span]


def _mask(rows: KeyIntervals, batch: slice, tile: Tile) -> Tensor | None:
    """A masked tile's additive mask ``[1, 1, q, k]``. Each of a tile's rows sees something of it."""
    if tile.kind is not Kind.MASKED:
        return None
    row = batch.start if rows.lo.shape[0] > 1 else 0
    lo, hi = rows.lo[row, tile.q0 : tile.q1], rows.hi[row, tile.q0 : tile.q1]
    keys = torch.arange(tile.k0, tile.k1, dtype=torch.int32, device="cpu")
    seen = (keys >= lo[:, None]) & (keys < hi[:, None])
    return torch.zeros(seen.shape, device="cpu").masked_fill_(~seen, -torch.inf)[None, None]
