"""Linear layers whose input is gathered, or whose output is reduce-scattered, along the sequence, behind the GEMMs.

The two halves of Megatron-LM's tensor parallelism with sequence parallelism (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022), each the other's backward. ``overlap`` says how they communicate:

* "ring": in as many pieces as ranks, each piece's GEMM running while the next piece is on its way (Wang et al.,
  "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023);
* "symm_mem": PyTorch's fused symmetric-memory operators, for NVLink;
* "none": one collective before or after one GEMM;
* "auto": "symm_mem" where it can run, else "ring".

Partial outputs travel in the model's dtype and are summed in float32 at their destination, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..schedule import on_device
from .exchange import Pending, exchange, make_ready
from .gather import all_gather, reduce_scatter
from .symmetric import gather_matmul, matmul_scatter, symmetric_memory_reason

OVERLAPS = ("auto", "ring", "symm_mem", "none")


@dataclass(frozen=True, eq=False)
class Pieces:
    """A sequence ``[batch, tokens, ...]`` of which each rank of ``group`` holds a piece.

    ``rows[r]`` int64: where the tokens of rank ``r`` stand in the whole.
    """

    group: ProcessGroup
    rows: tuple[Tensor, ...]
    overlap: str = "ring"

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def total(self) -> int:
        return sum(len(r) for r in self.rows)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """The tokens of ``rank``, contiguous."""
        start = self._start(rank)
        if start is not None:
            return whole[:, start : start + len(self.rows[rank])].contiguous()
        return whole.index_select(1, on_device(self.rows[rank], whole.device))

    def place(self, whole: Tensor, rank: int, piece: Tensor) -> None:
        """Write the tokens of ``rank``."""
        start = self._start(rank)
        if start is not None:
            whole[:, start : start + len(self.rows[rank])] = piece
        else:
            whole.index_copy_(1, on_device(self.rows[rank], whole.device), piece)

    def _start(self, rank: int) -> int | None:
        """The first row of ``rank``, if its rows follow one another."""
        rows = self.rows[rank]
        if not len(rows):
            return 0
        first = int(rows[0])
        return first if int(rows[-1]) - first + 1 == len(rows) else None

    def gather(self, piece: Tensor) -> Tensor:
        """The whole sequence, by one collective."""
        whole = all_gather(piece, [len(r) for r in self.rows], 1, self.group)
        order = torch.cat(self.rows)
        if torch.equal(order, torch.arange(len(order))):
            return whole
        out = torch.empty_like(whole)
        return out.index_copy_(1, order.to(whole.device), whole)

    def scatter(self, whole: Tensor) -> Tensor:
        """The sum over the ranks of this rank's tokens, by one collective."""
        pieces = [self.take(whole, r) for r in range(len(self.rows))]
        return reduce_scatter(pieces, self.group)

    def visit(self, piece: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's piece, this rank's own first; the next one is on its way while one is used."""
        ranks = self.group.size()
        coming, received = Pending([], []), piece
        for step in range(ranks):
            coming.wait()
            source, current = (self.rank - step) % ranks, received
            if step + 1 < ranks:
                received, coming = self._fetch(piece, step + 1)
            yield source, current

    def _fetch(self, piece: Tensor, step: int) -> tuple[Tensor, Pending]:
        ranks = self.group.size()
        source, target = (self.rank - step) % ranks, (self.rank + step) % ranks
        room = piece.new_empty(piece.shape[0], len(self.rows[source]), *piece.shape[2:])
        return room, exchange([(target, piece)], [(source, room)], self.group)


class _Sum:
    """A sum over the ranks: each rank's part of it is sent as soon as it is computed."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._sending = Pending([], [])
        self._arriving: list[Tensor] = []
        self._own: Tensor | None = None

    def add(self, step: int, partial: Callable[[int], Tensor]) -> None:
        """Compute the part of the rank ``step`` after this one, and send it; the same steps on every rank."""
        pieces, ranks = self._pieces, self._pieces.group.size()
        target, source = (pieces.rank + step) % ranks, (pieces.rank - step) % ranks
        piece = partial(target).contiguous()
        if target == pieces.rank:
            self._own = piece
            return
        room = piece.new_empty(piece.shape[0], len(pieces.rows[pieces.rank]), *piece.shape[2:])
        self._sending.wait()
        self._sending = exchange([(target, piece)], [(source, room)], pieces.group)
        self._arriving.append(room)

    def result(self) -> Tensor:
        """This rank's part, summed in float32 and rounded once."""
        assert self._own is not None
        self._sending.wait()
        total = self._own.to(_wide(self._own))
        for piece in self._arriving:
            total = total + piece
        return total.to(self._own.dtype)


def resolve_overlap(overlap: str, group: ProcessGroup, device: torch.device, even: bool) -> str:
    """What "auto" stands for here; a ValueError when "symm_mem" is asked for and cannot run."""
    if overlap not in ("auto", "symm_mem"):
        return overlap
    reason = symmetric_memory_reason(group, device, even)
    if overlap == "symm_mem" and reason is not None:
        raise ValueError(f"overlap='symm_mem' cannot run here: {reason}; use overlap='auto'")
    return "symm_mem" if reason is None else "ring"


def gather_linear(x: Tensor, weights: Sequence[Tensor], pieces: Pieces) -> list[Tensor]:
    """``F.linear`` of the gathered sequence with each of the weights.

    Args:
        x: ``[batch, seq_local, in]``.
        weights: each ``[out_i, in]``, this rank's rows of a column-parallel weight.

    Returns:
        One ``[batch, tokens, out_i]`` for each weight. The gathered input is not kept: backward gathers it again,
        behind the GEMMs of the input's gradient.
    """
    x, *weights = _autocast(x, *weights)
    return list(_GatherLinear.apply(x, pieces, *weights))


def linear_scatter(x: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
    """``F.linear``, summed over the ranks, of which each keeps its tokens.

    Args:
        x: ``[batch, tokens, in_local]``.
        weight: ``[out, in_local]``, this rank's columns of a row-parallel weight.

    Returns:
        ``[batch, seq_local, out]``.
    """
    x, weight = _autocast(x, weight)
    y: Tensor = _LinearScatter.apply(x, weight, pieces)
    return y


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype, where it is on: inside an autograd function it would round behind our back."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pieces: Pieces, *weights: Tensor) -> tuple[Tensor, ...]:
        make_ready(pieces.group, x.device)
        x = x.contiguous()
        ctx.save_for_backward(x, *weights)
        ctx.pieces = pieces
        if pieces.overlap == "none":
            whole = pieces.gather(x)
            return tuple(F.linear(whole, w) for w in weights)
        if pieces.overlap == "symm_mem":
            return tuple(gather_matmul(x, weights, pieces.group))
        outs = tuple(x.new_empty(x.shape[0], pieces.total, w.shape[0]) for w in weights)
        for rank, piece in pieces.visit(x):
            for out, w in zip(outs, weights, strict=True):
                pieces.place(out, rank, F.linear(piece, w))
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        pieces: Pieces = ctx.pieces
        need_x, need_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        grads = [torch.zeros_like(w, dtype=_wide(w)) for w in weights]

        def input_gradient(rank: int) -> Tensor:
            partial = x.new_zeros(x.shape[0], len(pieces.rows[rank]), x.shape[2])
            for dout, w in zip(douts, weights, strict=True):
                partial = partial + pieces.take(dout, rank) @ w
            return partial

        dx = None
        if pieces.overlap == "ring":
            # Behind each step's GEMMs: the next piece of the input comes in, the last part of dx goes out.
            dx_sum = _Sum(pieces)
            visits = pieces.visit(x) if need_w else [(-1, x)] * pieces.group.size()
            for step, (rank, piece) in enumerate(visits):
                if need_x:
                    dx_sum.add(step, input_gradient)
                for grad, dout in zip(grads, douts, strict=True) if need_w else ():
                    _add_weight_gradient(grad, pieces.take(dout, rank), piece)
            dx = dx_sum.result() if need_x else None
        else:
            if need_x and pieces.overlap == "symm_mem":
                dx = matmul_scatter(torch.cat(douts, -1), torch.cat(weights), pieces.group)
            elif need_x:
                dx = pieces.scatter(torch.cat(douts, -1) @ torch.cat(weights))
            if need_w:
                whole = pieces.gather(x)
                for grad, dout in zip(grads, douts, strict=True):
                    _add_weight_gradient(grad, dout, whole)
        return dx, None, *(g.to(w.dtype) if need_w else None for g, w in zip(grads, weights, strict=True))


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pieces: Pieces) -> Tensor:
        make_ready(pieces.group, x.device)
        ctx.save_for_backward(x, weight)
        ctx.pieces = pieces
        if pieces.overlap == "none":
            return pieces.scatter(F.linear(x, weight))
        if pieces.overlap == "symm_mem":
            return matmul_scatter(x, weight.t(), pieces.group)
        total = _Sum(pieces)
        for step in (*range(1, pieces.group.size()), 0):  # its own part last, behind the last transfer
            total.add(step, lambda rank: F.linear(pieces.take(x, rank), weight))
        return total.result()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        pieces: Pieces = ctx.pieces
        dout = dout.contiguous()
        grad = torch.zeros_like(weight, dtype=_wide(weight))
        if pieces.overlap == "ring":
            dx = torch.empty_like(x)
            for rank, piece in pieces.visit(dout):
                pieces.place(dx, rank, piece @ weight)
                _add_weight_gradient(grad, piece, pieces.take(x, rank))
        else:
            whole = pieces.gather(dout)
            dx = whole @ weight
            _add_weight_gradient(grad, whole, x)
        return dx, grad.to(weight.dtype), None


def _wide(x: Tensor) -> torch.dtype:
    """The dtype in which several pieces are summed, to be rounded once."""
    return torch.promote_types(x.dtype, torch.float32)


def _add_weight_gradient(grad: Tensor, dout: Tensor, x: Tensor) -> None:
    """Add ``dout^T x`` over all tokens."""
    grad += dout.flatten(0, 1).t() @ x.flatten(0, 1)
