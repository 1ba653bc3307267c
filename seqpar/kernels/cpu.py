"""Attention on PyTorch's CPU flash kernel: intervals cut into tiles, partial results merged in float32.

The kernel has neither a carry nor key intervals. It does return ``lse``, and its backward accepts any ``out`` and
``lse``: so the gradient of one tile of a larger attention is a call with that attention's final ``out`` and ``lse``.
In the kernel a value that is not finite reaches rows of the tile that do not see it, because ``0 * nan`` is nan. So the
reference computes a tile whose results are not finite.

Shapes: b batch, q queries, k keys, h query heads, n KV heads, d head_dim of q and k, e head_dim of v. The kernel wants
heads before the sequence, and one head_dim: the narrower tensors get zeros, which change nothing, inside each call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..schedule.rows import KeyIntervals
from .base import Carry, Grads, OutputGrad, Score, all_finite, empty_carry, finish, merge_, row_delta
from .reference import ReferenceBackend
from .tiles import Tile, TileKind, tiles

# PyTorch's kernel computes blocks of so many keys. A causal tile leaves out whole blocks only.
_KEY_BLOCK = 512
# A pair of a masked tile takes 1.2 to 1.7 times as long as one of a full tile (measured in benchmarks/LOG.md).
_MASKED_PAIR = 1.5

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_exact = ReferenceBackend()


class CpuBackend:
    """PyTorch's flash attention for the CPU. Half types are computed in float32, so that partial results stay exact."""

    name = "cpu"
    deterministic = True
    reads_delta = False  # its kernel computes delta itself, from dout and out

    def unavailable(self) -> str | None:
        return None

    def unsupported(
        self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool, v_head_dim: int | None = None
    ) -> str | None:
        if q.device.type != "cpu":
            return f"the tensors are on {q.device.type}"
        if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"dtype {q.dtype}: float32, bfloat16 and float16 only"
        if not score.softmax_scale > 0:  # it scales the -inf of hidden keys too
            return f"softmax_scale={score.softmax_scale} (positive only)"
        for name, used in (("softcap", score.softcap), ("dropout", score.dropout_p)):
            if used:
                return f"PyTorch's CPU flash kernel has no {name}"
        if score.alibi_slopes is not None:
            return "PyTorch's CPU flash kernel has no ALiBi"
        if lse_gradient:
            return "PyTorch's CPU flash backward takes no gradient of lse"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, intervals: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        v_dim, width = v.shape[3], max(q.shape[3], v.shape[3])
        q_heads, k_heads, v_heads = _heads_first(width, q, k, v)
        for batch, tile in _tiles(intervals, q.shape[0]):
            queries, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            mask, blind = _mask(intervals, batch, tile)
            out, out_lse = _forward(
                q_heads[batch, :, queries],
                k_heads[batch, :, keys],
                v_heads[batch, :, keys],
                0.0,
                tile.kind is TileKind.CAUSAL,
                attn_mask=mask,
                scale=score.softmax_scale,
            )  # [b, h, q, width], [b, h, q]
            out = out.transpose(1, 2)[..., :v_dim]  # [b, q, h, e]
            if blind is not None:
                out[:, blind], out_lse[..., blind] = 0, -torch.inf
            if tile.kind is not TileKind.FULL and not all_finite(out):
                inputs = q[batch, queries], k[batch, keys], v[batch, keys]
                out, out_lse = _exact.forward(*inputs, _part(intervals, batch, tile), score, None, last=False)
            if carry is None and out_lse.shape == (q.shape[0], q.shape[2], q.shape[1]):
                # The first partial result, of all queries.
                carry = out if v_dim == width else out.contiguous(), out_lse
                continue
            acc, lse = carry = carry or empty_carry(q, v_dim)  # [b, q, h, e], [b, h, q]
            merge_(acc[batch, queries], lse[batch, :, queries], out, out_lse)
        carry = carry or empty_carry(q, v_dim)
        return finish(carry, score, q.dtype) if last else carry

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputGrad, intervals: KeyIntervals, score: Score, grads: Grads
    ) -> None:
        dout, out, lse, _ = output
        width = max(q.shape[3], v.shape[3])
        dout_heads, q_heads, k_heads, v_heads, out_heads = _heads_first(width, dout, q, k, v, out)
        targets = [x.transpose(1, 2) for x in grads[:3]]  # [b, h or n, q or k, d]: views
        new = list(grads.new)
        for batch, tile in _tiles(intervals, q.shape[0]):
            queries, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
            mask, blind = _mask(intervals, batch, tile)
            tile_lse = lse[batch, :, queries]
            results = _backward(
                dout_heads[batch, :, queries],
                q_heads[batch, :, queries],
                k_heads[batch, :, keys],
                v_heads[batch, :, keys],
                out_heads[batch, :, queries],
                tile_lse if blind is None else tile_lse.masked_fill(blind, torch.inf),  # exp(score - inf) is 0
                0.0,
                tile.kind is TileKind.CAUSAL,
                attn_mask=mask,
                scale=score.softmax_scale,
            )  # [b, h, q, width], [b, n, k, width], [b, n, k, width]
            if tile.kind is not TileKind.FULL and not all_finite(*results):
                inputs = q[batch, queries], k[batch, keys], v[batch, keys]
                dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in inputs)
                tile_dout, tile_out = dout[batch, queries], out[batch, queries]
                tile_output = OutputGrad(tile_dout, tile_out, tile_lse, row_delta(tile_out, tile_dout, None))
                _exact.backward(*inputs, tile_output, _part(intervals, batch, tile), score, Grads(dq, dk, dv))
                results = [grad.transpose(1, 2) for grad in (dq, dk, dv)]
            for i, (grad, target, rows) in enumerate(zip(results, targets, (queries, keys, keys), strict=True)):
                grad = grad[..., : target.shape[3]]
                if new[i] and grad.shape == target.shape:  # the first gradient, of all rows
                    take = _take if grads.own_memory else Tensor.copy_
                    targets[i] = take(grads[:3][i], grad.transpose(1, 2)).transpose(1, 2)
                elif new[i]:
                    target.zero_()[batch, :, rows] = grad
                else:
                    target[batch, :, rows] += grad
            new = [False, False, False]
        for target, empty in zip(targets, new, strict=True):
            if empty:
                target.zero_()


def pairs_computed_on_cpu(intervals: KeyIntervals) -> float:
    """The pairs of a query and a key that the kernel computes for one head, visible or not, in pairs of a full tile.

    The mean of the rows of ``intervals``.
    """
    rows = intervals.lo.shape[0]
    return sum(_computed(tile) for row in range(rows) for tile in tiles(intervals, row)) / rows


def _computed(tile: Tile) -> float:
    queries, keys = tile.q1 - tile.q0, tile.k1 - tile.k0
    if tile.kind is not TileKind.CAUSAL:
        return queries * keys * (_MASKED_PAIR if tile.kind is TileKind.MASKED else 1.0)
    block = 256 if queries >= 768 else 64 if queries >= 192 else 32  # queries that the kernel computes at a time
    blocks = [(first, min(first + block, queries)) for first in range(0, queries, block)]
    return sum((end - first) * min(keys, -(-end // _KEY_BLOCK) * _KEY_BLOCK) for first, end in blocks)


def _take(target: Tensor, value: Tensor) -> Tensor:
    """Give ``target`` the values of ``value``, which nothing else uses: its memory, if it is as the target's."""
    if target.is_contiguous() and value.is_contiguous() and target.dtype == value.dtype:
        return target.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return target.copy_(value)


def _heads_first(width: int, *tensors: Tensor) -> list[Tensor]:
    """Each ``[b, s, h, d]`` as float32 ``[b, h, s, width]``, with zeros where it is narrower.

    Else a view of a float32 tensor, because the kernel takes any strides.
    """
    padded = (x if x.shape[3] == width else functional.pad(x, (0, width - x.shape[3])) for x in tensors)
    return [x.float().transpose(1, 2) for x in padded]


def _tiles(intervals: KeyIntervals, batch: int) -> list[tuple[slice, Tile]]:
    if intervals.lo.shape[0] == 1:
        return [(slice(0, batch), tile) for tile in tiles(intervals, 0)]
    return [(slice(row, row + 1), tile) for row in range(intervals.lo.shape[0]) for tile in tiles(intervals, row)]


def _part(intervals: KeyIntervals, batch: slice, tile: Tile) -> KeyIntervals:
    row = batch.start if intervals.lo.shape[0] > 1 else 0
    lo, hi = (x[row, None, tile.q0 : tile.q1].clamp(tile.k0, tile.k1) - tile.k0 for x in (intervals.lo, intervals.hi))
    return KeyIntervals(lo, hi, intervals.q_positions[tile.q0 : tile.q1], intervals.k_positions[tile.k0 : tile.k1])


def _mask(intervals: KeyIntervals, batch: slice, tile: Tile) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask of a masked tile, ``[1, 1, q, k]``, and the queries that see none of its keys, bool ``[q]``.

    None where there is no such tensor. A query without keys sees the first key in the mask, because the kernel does not
    say what it returns for a row that is all -inf. Its results must be replaced.
    """
    if tile.kind is not TileKind.MASKED:
        return None, None
    row = batch.start if intervals.lo.shape[0] > 1 else 0
    lo, hi = intervals.lo[row, tile.q0 : tile.q1], intervals.hi[row, tile.q0 : tile.q1]  # [q]
    keys = torch.arange(tile.k0, tile.k1, dtype=torch.int32, device="cpu")
    seen = (keys >= lo[:, None]) & (keys < hi[:, None])  # [q, k]
    blind = lo == hi
    seen[:, 0] |= blind
    mask = torch.zeros(seen.shape, dtype=torch.float32, device="cpu").masked_fill_(~seen, -torch.inf)[None, None]
    return mask, blind if blind.any() else None
