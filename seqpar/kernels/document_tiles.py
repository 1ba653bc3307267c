"""Attention on document tiles, in a fixed order of operations: the same bits for the same row, whatever is beside it.

Every operation has one shape, and a row has one place in it (see ``schedule/document_tiles.py``). So a matrix product
adds the terms of a row in the same order, whichever kernel the library takes for this shape, and sums go over tiles
from the first to the last.

Shapes: t tiles, m = t * TILE rows of queries or keys, h query heads, n KV heads, g query heads for each KV head
(h = n g), d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm.trace import count_backend, open_traces
from ..schedule.document_tiles import TILE
from ..schedule.rows import KeyIntervals
from . import BACKENDS
from .base import Score, accumulator
from .triton import explain_errors

MaskParts = Sequence[KeyIntervals]


class OutputTiles(NamedTuple):
    """What backward needs of the output of queries in tiles.

    Attributes:
        dout: ``[1, m, h, e]``, contiguous.
        lse, delta: ``[1, h, m]``, contiguous, float32 (float64 for float64).
    """

    dout: Tensor
    lse: Tensor
    delta: Tensor

    def of(self, rows: slice) -> OutputTiles:
        """The output of some queries."""
        lse, delta = (x[..., rows].contiguous() for x in (self.lse, self.delta))
        return OutputTiles(self.dout[:, rows], lse, delta)


class TileKernels(Protocol):
    """Attention of queries in tiles over keys in tiles.

    ``q [1, m, h, d]``, ``k [1, m, n, d]`` and ``v [1, m, n, e]`` are contiguous, each with its own m. ``seen``: which
    keys each query sees, for each part of the mask.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: MaskParts, score: Score) -> tuple[Tensor, Tensor]:
        """``out [1, m, h, e]`` in q's dtype, and ``lse [1, h, m]``."""
        ...

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        """``rowsum(dout * out) - dlse``, ``[1, h, m]``."""
        ...

    def query_gradients(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputTiles, seen: MaskParts, score: Score
    ) -> Tensor:
        """``dq [1, m, h, d]``, of any floating dtype."""
        ...

    def key_gradients(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputTiles, seen: MaskParts, score: Score
    ) -> tuple[Tensor, Tensor]:
        """``dk [1, m, n, d]`` and ``dv [1, m, n, e]``, of any floating dtype."""
        ...


def tile_kernels(backend: str, q: Tensor, k: Tensor, v_head_dim: int, score: Score) -> TileKernels:
    """Triton's on a GPU or where ``backend`` names it, if they support the call; else PyTorch's."""
    triton, use_triton = BACKENDS["triton"], False
    if backend == "triton" or (q.is_cuda and backend not in ("cpu", "reference")):
        why = triton.unavailable() or triton.unsupported(q, k, score, lse_gradient=False, v_head_dim=v_head_dim)
        use_triton = why is None
    if open_traces:
        count_backend("triton" if use_triton else "reference")
    return _TritonTiles() if use_triton else _TorchTiles()


class _TorchTiles:
    """Plain PyTorch, on any device and for any dtype. Products and statistics are float32 (float64 for float64)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: MaskParts, score: Score) -> tuple[Tensor, Tensor]:
        (_, _, heads, _), (_, _, kv_heads, v_dim) = q.shape, v.shape
        tiles = _TilePairs(q, k, v, seen, score)
        out, lse, sinks = q.new_empty(1, q.shape[1], heads, v_dim), _statistics(q), None
        if score.sinks is not None:
            sinks = score.sinks.to(lse.dtype).repeat_interleave(TILE).view(kv_heads, -1, 1)  # [n, rows, 1]
        for i, keys in enumerate(tiles.keys_of):
            largest = q.new_full((kv_heads, tiles.rows, 1), -torch.inf, dtype=lse.dtype)
            total, acc = torch.zeros_like(largest), largest.new_zeros(kv_heads, tiles.rows, v_dim)
            for j in keys:
                s, _, visible = tiles.scores(i, j)
                previous, largest = largest, torch.maximum(largest, s.amax(-1, keepdim=True))
                shift = largest.masked_fill(largest == -torch.inf, 0.0)
                p, scale = torch.exp(s - shift), torch.exp(previous - shift)
                total = total * scale + p.sum(-1, keepdim=True)
                acc = acc * scale + _product(p, tiles.v[j], visible, tiles.v_is_finite[j])
            if sinks is not None:  # one more key of each row, with value 0
                previous, largest = largest, torch.maximum(largest, sinks)
                shift = largest.masked_fill(largest == -torch.inf, 0.0)
                scale = torch.exp(previous - shift)
                total, acc = total * scale + torch.exp(sinks - shift), acc * scale
            acc = acc / total.masked_fill(total == 0, 1.0)
            at = slice(i * TILE, (i + 1) * TILE)
            out[0, at] = acc.view(heads, TILE, v_dim).transpose(0, 1)
            lse[0, :, at] = (largest + total.log()).view(heads, TILE)
        return out, lse

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        delta = _statistics(out)
        for i, (x, y) in enumerate(zip(_tiles(out), _tiles(dout), strict=True)):
            delta[0, :, i * TILE : (i + 1) * TILE] = (x * y).sum(-1)
        return delta if dlse is None else delta - dlse

    def query_gradients(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputTiles, seen: MaskParts, score: Score
    ) -> Tensor:
        tiles = _TilePairs(q, k, v, seen, score, output)
        gradient = torch.empty_like(q, dtype=output.lse.dtype)
        for i, keys in enumerate(tiles.keys_of):
            dq = torch.zeros_like(tiles.q[i])
            for j in keys:
                _, ds, visible = tiles.weights(i, j)
                dq += _product(ds, tiles.k[j], visible, tiles.k_is_finite[j])
            _put(gradient, i, dq * score.softmax_scale)
        return gradient

    def key_gradients(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputTiles, seen: MaskParts, score: Score
    ) -> tuple[Tensor, Tensor]:
        tiles = _TilePairs(q, k, v, seen, score, output)
        gradients = [torch.empty_like(x, dtype=output.lse.dtype) for x in (k, v)]
        queries_of: list[list[int]] = [[] for _ in tiles.k]
        for i, keys in enumerate(tiles.keys_of):
            for j in keys:
                queries_of[j].append(i)
        for j, queries in enumerate(queries_of):
            dk, dv = torch.zeros_like(tiles.k[j]), torch.zeros_like(tiles.v[j])
            for i in queries:  # the query heads of a KV head are summed in one product
                p, ds, visible = tiles.weights(i, j)
                visible = None if visible is None else visible.mT
                dv += _product(p.mT, tiles.dout[i], visible, tiles.dout_is_finite[i])
                dk += _product(ds.mT, tiles.q[i], visible, tiles.q_is_finite[i])
            _put(gradients[0], j, dk * score.softmax_scale)
            _put(gradients[1], j, dv)
        return gradients[0], gradients[1]


class _TilePairs:
    """Scores and weights of pairs of tiles.

    Attributes:
        rows: g * TILE, the rows of a tile's query heads with the same KV head.
        q, dout: ``[t, n, rows, d]`` and ``[t, n, rows, e]``.
        k, v: ``[t, n, TILE, d]`` and ``[t, n, TILE, e]``.
        keys_of: for each tile of queries, the tiles of keys of which it sees some key.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: MaskParts,
        score: Score,
        output: OutputTiles | None = None,
    ) -> None:
        kv_heads, self._group = k.shape[2], q.shape[2] // k.shape[2]
        self.rows, self._score = self._group * TILE, score
        self.q, self.k, self.v = _tiles(q, kv_heads), _tiles(k), _tiles(v)
        self.k_is_finite, self.v_is_finite, self.q_is_finite = map(_are_finite, (self.k, self.v, self.q))
        if output is not None:
            self.dout = _tiles(output.dout, kv_heads)
            self.dout_is_finite = _are_finite(self.dout)
            lse = output.lse.masked_fill(output.lse == -torch.inf, 0.0)  # the scores of these rows are -inf
            self._lse, self._delta = (_tiles(x.mT.unsqueeze(-1), kv_heads) for x in (lse, output.delta))
        self._lo, self._hi = (
            torch.cat(x).view(len(seen), -1, TILE, 1) for x in zip(*((y.lo, y.hi) for y in seen), strict=True)
        )
        self._q_positions, self._k_positions = (x.view(-1, TILE) for x in (seen[0].q_positions, seen[0].k_positions))
        self._columns = torch.arange(TILE, device=q.device)
        on_host = [part.on_host() or part.to(torch.device("cpu")) for part in seen]
        self.keys_of = [sorted(set().union(*tiles)) for tiles in zip(*map(_visible_tiles, on_host), strict=True)]
        self._full = [*zip(*map(_full_tiles, on_host), strict=True)]

    def scores(self, i: int, j: int) -> tuple[Tensor, Tensor | float, Tensor | None]:
        """Scores ``[n, rows, TILE]`` of a tile of queries and one of keys, their derivative by the scaled products, and
        which of them are visible; None: all."""
        score, shape = self._score, (self.k.shape[1], self._group, TILE, TILE)
        s = self.q[i] @ self.k[j].mT * score.softmax_scale
        chain: Tensor | float = 1.0
        if score.softcap:
            capped = torch.tanh(s / score.softcap)
            s, chain = score.softcap * capped, 1 - capped * capped
        if score.alibi_slopes is not None:
            distance = (self._q_positions[i][:, None] - self._k_positions[j]).abs().to(s.dtype)
            slopes = score.alibi_slopes.to(s.dtype).view(-1, self._group, 1, 1)
            s = (s.view(shape) - slopes * distance).view(s.shape)
        if any(j in tiles for tiles in self._full[i]):  # every query sees every key
            return s, chain, None
        columns = self._columns + j * TILE
        visible = ((columns >= self._lo[:, i]) & (columns < self._hi[:, i])).any(0).expand(shape).reshape(s.shape)
        return s.masked_fill(~visible, -torch.inf), chain, visible

    def weights(self, i: int, j: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Probabilities, the gradients of the scaled products, and which of them are visible; None: all."""
        s, chain, visible = self.scores(i, j)
        p = torch.exp(s - self._lse[i])
        ds = p * (self.dout[i] @ self.v[j].mT - self._delta[i]) * chain
        return p, ds if visible is None else ds.masked_fill(~visible, 0.0), visible


def _statistics(like: Tensor) -> Tensor:
    """Memory for a number of each row and head of ``like [1, m, h, d]``: ``[1, h, m]``."""
    return like.new_empty(1, like.shape[2], like.shape[1], dtype=accumulator(like.dtype))


def _tiles(x: Tensor, kv_heads: int | None = None) -> Tensor:
    """``x [1, m, h, d]`` as ``[t, h, TILE, d]``, or with ``kv_heads`` as ``[t, n, g * TILE, d]``, contiguous."""
    tiles = x.to(accumulator(x.dtype)).view(-1, TILE, *x.shape[2:]).transpose(1, 2).contiguous()
    count, heads, _, dim = tiles.shape
    return tiles if kv_heads is None else tiles.view(count, kv_heads, heads // kv_heads * TILE, dim)


def _put(x: Tensor, tile: int, value: Tensor) -> None:
    """Write ``value [n, g * TILE, d]`` to a tile of ``x [1, m, h, d]``."""
    x[0, tile * TILE : (tile + 1) * TILE] = value.view(x.shape[2], TILE, x.shape[3]).transpose(0, 1)


def _are_finite(tiles: Tensor) -> Any:
    """For each tile, whether all of its values are finite."""
    return tiles.isfinite().flatten(1).all(1).tolist()


def _product(weights: Tensor, x: Tensor, visible: Tensor | None, is_finite: bool) -> Tensor:
    """``weights [n, a, b] @ x [n, b, c]``. Invisible pairs add nothing, also where a value of ``x`` is not finite."""
    if is_finite or visible is None:
        return weights @ x
    hidden = ~x.isfinite().all(-1)  # [n, b]
    result = weights @ x.masked_fill(hidden[..., None], 0.0)
    for head, row in hidden.nonzero().tolist():
        reached = visible[head, :, row]
        result[head, reached] += weights[head, reached, row, None] * x[head, row]
    return result


def _visible_tiles(seen: KeyIntervals) -> Iterator[list[int]]:
    """For each tile of queries, the tiles of keys of which some query of it sees a key."""
    for lo, hi in zip(seen.lo.view(-1, TILE), seen.hi.view(-1, TILE), strict=True):
        lo, hi = lo[lo < hi], hi[lo < hi]
        if not len(lo):
            yield []
            continue
        first, last = int(lo[0]) // TILE, (int(hi[-1]) - 1) // TILE
        begin = torch.arange(first, last + 1, device="cpu")[:, None] * TILE
        yield (((lo < begin + TILE) & (hi > begin)).any(1).nonzero().flatten() + first).tolist()


def _full_tiles(seen: KeyIntervals) -> list[range]:
    """For each tile of queries, the tiles of keys of which every query sees every key."""
    ends = seen.lo.view(-1, TILE)[:, -1].tolist(), seen.hi.view(-1, TILE)[:, 0].tolist()
    return [range(-(-lo // TILE), hi // TILE) for lo, hi in zip(*ends, strict=True)]


class _TritonTiles:
    """The package's Triton kernels. A row's sums do not depend on the other rows of its tile."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: MaskParts, score: Score) -> tuple[Tensor, Tensor]:
        from ..triton_kernels.document_tiles import forward

        with explain_errors("triton"):
            out, lse = forward(q, k, v, seen, score)
        return out, lse

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
        from ..triton_kernels import delta

        with explain_errors("triton"):
            return delta(out, dout, dlse)

    def query_gradients(self, *arguments: Any) -> Tensor:
        (dq,) = self._gradients("dq", *arguments)
        return dq

    def key_gradients(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        dk, dv = self._gradients("dkdv", *arguments)
        return dk, dv

    def _gradients(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, output: OutputTiles, seen: MaskParts, score: Score
    ) -> tuple[Tensor, ...]:
        from ..triton_kernels.document_tiles import gradients

        with explain_errors("triton"):
            found: tuple[Tensor, ...] = gradients(kernel, *output, q, k, v, seen, score)
        return found
