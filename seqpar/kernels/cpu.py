"""Attention on PyTorch's CPU flash kernel: intervals cut into tiles, partial results merged in float32.

The kernel has neither a carry nor key intervals. It does return ``lse``, and its backward accepts any ``out`` and
``lse``: so the gradient of one tile of a larger attention is a call with that attention's final ``out`` and ``lse``.
In the kernel a value that is not finite reaches rows of the tile that do not see it, because ``0 * nan`` is nan. So the
reference computes a tile whose results are not finite.

Shapes: b batch, q queries, k keys, h query heads, n KV heads, d head_dim of q and k, e head_dim of v. The kernel wants
heads before the sequence, and one head_dim: the narrower tensors get zeros, which change nothing, inside each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..base.cache import outside_modes
from ..schedule.rows import KeyIntervals
from .base import Carry, Grads, OutputGrad, Score, all_finite, empty_carry, finish, merge_, row_delta
from .reference import ReferenceBackend
from .tiles import Tile, TileKind, tiles

# PyTorch's kernel computes blocks of so many keys. A causal tile leaves out whole blocks only.
_KEY_BLOCK = 512
# A pair of a masked tile takes 1.2 to 1.7 times as long as one of a full tile (measured in benchmarks/LOG.md).
_MASKED_PAIR = 1.5

# The masks of a step are kept if there are few of them, of few pairs of a query and a key.
_MOST_KEPT, _KEPT_PAIRS = 8, 1 << 12

_forward = torch._scaled_dot_product_flash_attention_for_cpu
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
        v_dim, width, queries, keys = v.size(3), max(q.size(3), v.size(3)), q.size(1), k.size(1)
        q_part, k_part, v_part = q_heads, k_heads, v_heads = _heads_first(width, q, k, v)
        for row, tile in intervals.tiles.get("of all rows") or _tiles(intervals):
            mask, blind = _kept_mask(intervals, row, tile) if tile.kind is TileKind.MASKED else (None, None)
            whole = row is None and tile.q1 - tile.q0 == queries and tile.k1 - tile.k0 == keys
            if not whole:
                q_part, k_part, v_part = _of_tile(row, tile, 2, (q_heads,), (k_heads, v_heads))
            causal, scale = tile.kind is TileKind.CAUSAL, score.softmax_scale
            out, out_lse = _forward(q_part, k_part, v_part, 0.0, causal, attn_mask=mask, scale=scale)  # [b, h, q]
            out = out.transpose(1, 2)  # [b, q, h, width]
            if v_dim < width:
                out = out[..., :v_dim]
            if blind is not None:
                out[:, blind], out_lse[..., blind] = 0, -torch.inf
            if tile.kind is not TileKind.FULL and not all_finite(out):
                q_part, k_part, v_part = _of_tile(row, tile, 1, (q,), (k, v))
                part = _part(intervals, row, tile)
                out, out_lse = _exact.forward(q_part, k_part, v_part, part, score, None, last=False)
            if carry is None and (whole or out_lse.shape == (q.size(0), q.size(2), queries)):
                # The first partial result, of all queries.
                carry = out if v_dim == width else out.contiguous(), out_lse
                continue
            acc, lse = carry = carry or empty_carry(q, v_dim)  # [b, q, h, e], [b, h, q]
            (acc_part,), (lse_part,) = _of_tile(row, tile, 1, (acc,)), _of_tile(row, tile, 2, (lse,))
            merge_(acc_part, lse_part, out, out_lse)
        carry = carry or empty_carry(q, v_dim)
        return finish(carry, score, q.dtype) if last else carry

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputGrad, intervals: KeyIntervals, score: Score, grads: Grads
    ) -> None:
        dout, out, lse, _ = output
        width = max(q.size(3), v.size(3))
        dout_heads, q_heads, k_heads, v_heads, out_heads = _heads_first(width, dout, q, k, v, out)
        new = list(grads.new)
        for row, tile in intervals.tiles.get("of all rows") or _tiles(intervals):
            mask, blind = _kept_mask(intervals, row, tile) if tile.kind is TileKind.MASKED else (None, None)
            of_queries, of_keys = (dout_heads, q_heads, out_heads, lse), (k_heads, v_heads)
            dout_part, q_part, out_part, tile_lse, k_part, v_part = _of_tile(row, tile, 2, of_queries, of_keys)
            results = _backward(
                dout_part,
                q_part,
                k_part,
                v_part,
                out_part,
                tile_lse if blind is None else tile_lse.masked_fill(blind, torch.inf),  # exp(score - inf) is 0
                0.0,
                tile.kind is TileKind.CAUSAL,
                attn_mask=mask,
                scale=score.softmax_scale,
            )  # [b, h, q, width], [b, n, k, width], [b, n, k, width]
            if tile.kind is not TileKind.FULL and not all(map(all_finite, results)):
                q_part, dout_part, out_part, k_part, v_part = _of_tile(row, tile, 1, (q, dout, out), (k, v))
                part, exact = _part(intervals, row, tile), Grads(None, None, None, new_dq=True, new_dkv=True)
                delta = row_delta(out_part, dout_part, None)
                _exact.backward(
                    q_part, k_part, v_part, OutputGrad(dout_part, out_part, tile_lse, delta), part, score, exact
                )
                results = [grad.transpose(1, 2) for grad in exact.tensors]
            parts = [grad.transpose(1, 2) for grad in results]  # [b, q or k, h or n, width]
            if width > min(q.size(3), v.size(3)):
                parts = [x[..., : y.shape[3]] for x, y in zip(parts, (q, k, v), strict=True)]
            if grads.dq is None and [x.shape for x in parts] == [q.shape, k.shape, v.shape]:
                grads.dq, grads.dk, grads.dv = parts
                new = [False, False, False]
                continue
            for i, (grad, target) in enumerate(zip(parts, grads.make(q, k, v), strict=True)):
                if new[i] and grad.shape == target.shape:  # the first gradient, of all rows
                    target.copy_(grad)
                    continue
                if new[i]:
                    target.zero_()
                (rows,) = _of_tile(row, tile, 1, (target,)) if i == 0 else _of_tile(row, tile, 1, (), (target,))
                rows += grad
            new = [False, False, False]
        if any(new):
            for target, empty in zip(grads.make(q, k, v), new, strict=True):
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


def _heads_first(width: int, *tensors: Tensor) -> list[Tensor]:
    """Each ``[b, s, h, d]`` as float32 ``[b, h, s, width]``, with zeros where it is narrower.

    Else a view of a float32 tensor, because the kernel takes any strides.
    """
    found = []
    for x in tensors:
        if x.size(3) < width:
            x = functional.pad(x, (0, width - x.size(3)))
        found.append((x if x.dtype is torch.float32 else x.float()).transpose(1, 2))
    return found


def _tiles(intervals: KeyIntervals) -> list[tuple[int | None, Tile]]:
    """The tiles with their batch row; None is all batch rows. Cached in ``intervals``."""
    if "of all rows" not in intervals.tiles:
        rows = intervals.lo.shape[0]
        intervals.tiles["of all rows"] = [
            (None if rows == 1 else row, tile) for row in range(rows) for tile in tiles(intervals, row)
        ]
    found: list[tuple[int | None, Tile]] = intervals.tiles["of all rows"]
    return found


def _of_tile(
    row: int | None, tile: Tile, dim: int, queries: Sequence[Tensor], keys: Sequence[Tensor] = ()
) -> list[Any]:
    """The tile's part of tensors that have all queries along ``dim``, and of tensors that have all keys along it."""
    parts = []
    for tensors, start, stop in ((queries, tile.q0, tile.q1), (keys, tile.k0, tile.k1)):
        for x in tensors:
            if row is not None:
                x = x[row : row + 1]
            parts.append(x if stop - start == x.size(dim) else x.narrow(dim, start, stop - start))
    return parts


def _part(intervals: KeyIntervals, row: int | None, tile: Tile) -> KeyIntervals:
    lo, hi = (
        x[row or 0, None, tile.q0 : tile.q1].clamp(tile.k0, tile.k1) - tile.k0 for x in (intervals.lo, intervals.hi)
    )
    return KeyIntervals(lo, hi, intervals.q_positions[tile.q0 : tile.q1], intervals.k_positions[tile.k0 : tile.k1])


def _kept_mask(intervals: KeyIntervals, row: int | None, tile: Tile) -> tuple[Tensor, Tensor | None]:
    """``_mask``. Small masks are kept in ``intervals``: to make one takes as long as the kernel that reads it."""
    if len(_tiles(intervals)) > _MOST_KEPT or (tile.q1 - tile.q0) * (tile.k1 - tile.k0) > _KEPT_PAIRS:
        return _mask(intervals, row, tile)
    key = "mask", row, tile.q0, tile.k0
    if key not in intervals.tiles:
        with outside_modes():
            intervals.tiles[key] = _mask(intervals, row, tile)
    mask, blind = intervals.tiles[key]
    return mask, blind


def _mask(intervals: KeyIntervals, row: int | None, tile: Tile) -> tuple[Tensor, Tensor | None]:
    """The additive mask of a masked tile, ``[1, 1, q, k]``, and the queries that see none of its keys, bool ``[q]``.

    None if all of them see one. A query without keys sees the first key in the mask, because the kernel does not
    say what it returns for a row that is all -inf. Its results must be replaced.
    """
    lo, hi = (x[row or 0, tile.q0 : tile.q1] for x in (intervals.lo, intervals.hi))  # [q]
    keys = torch.arange(tile.k0, tile.k1, dtype=torch.int32, device="cpu")
    seen = (keys >= lo[:, None]) & (keys < hi[:, None])  # [q, k]
    blind = lo == hi
    seen[:, 0] |= blind
    mask = torch.zeros(seen.shape, dtype=torch.float32, device="cpu").masked_fill_(~seen, -torch.inf)[None, None]
    return mask, blind if blind.any() else None
