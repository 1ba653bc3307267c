"""Linear layers whose input is gathered, or whose output is reduce-scattered, along the sequence, behind the GEMMs.

The two halves of Megatron-LM's tensor parallelism with sequence parallelism (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022), each the other's backward. ``overlap`` says how they communicate:

* "ring": piece by piece, a piece's GEMMs running while the next one is on its way (Wang et al., "Overlap Communication
  with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). With few ranks a piece
  travels in several parts, so that its own GEMMs, too, hide the rest of it;
* "symm_mem": PyTorch's fused symmetric-memory operators, for NVLink;
* "none": one collective before or after one GEMM;
* "auto": "symm_mem" where it can run, else "ring".

Partial outputs travel in the model's dtype and are summed in float32 at their destination, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm.collectives import all_gather, reduce_scatter
from ..comm.p2p import Pending, exchange, make_ready
from ..schedule import on_device
from .symmetric_memory import all_gather_matmul, matmul_reduce_scatter, symmetric_memory_reason

OVERLAPS = ("auto", "ring", "symm_mem", "none")
_PARTS = 8  # of the whole sequence, at least, where it goes by pieces


@dataclass(frozen=True, eq=False)
class SequenceChunks:
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

    def parts(self, rank: int) -> list[Tensor]:
        """The rows of ``rank`` in the parts in which they travel."""
        return list(self.rows[rank].tensor_split(max(1, _PARTS // len(self.rows))))

    def gather(self, piece: Tensor) -> Tensor:
        """The whole sequence, by one collective."""
        whole = all_gather(piece, [len(r) for r in self.rows], 1, self.group)
        order = torch.cat(self.rows)
        if torch.equal(order, torch.arange(len(order), device="cpu")):
            return whole
        out = torch.empty_like(whole)
        return out.index_copy_(1, order.to(whole.device), whole)

    def scatter(self, whole: Tensor) -> Tensor:
        """The sum over the ranks of this rank's tokens, by one collective."""
        return reduce_scatter([take(whole, rows) for rows in self.rows], self.group)

    def visit(self, piece: Tensor) -> Iterator[Iterator[tuple[Tensor, Tensor]]]:
        """Every rank's piece, this rank's own first, as ``(rows, part)``; the next piece comes while one is used."""
        coming: Iterator[tuple[Tensor, Tensor]] = iter([(self.rows[self.rank], piece)])
        for step in range(1, self.group.size() + 1):
            current = coming
            if step < self.group.size():
                coming = self._fetch(piece, step)
            yield current

    def _fetch(self, piece: Tensor, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Post the exchange of whole pieces with the ranks ``step`` away; yields each part when it is here."""
        ranks = self.group.size()
        source, target = (self.rank - step) % ranks, (self.rank + step) % ranks
        served = piece.tensor_split(len(self.parts(self.rank)), 1)
        posted = []
        for rows, send in zip(self.parts(source), served, strict=True):
            room = piece.new_empty(piece.shape[0], len(rows), *piece.shape[2:])
            posted.append((rows, room, exchange([(target, send.contiguous())], [(source, room)], self.group)))
        return self._arrivals(posted)

    @staticmethod
    def _arrivals(posted: list[tuple[Tensor, Tensor, Pending]]) -> Iterator[tuple[Tensor, Tensor]]:
        for rows, room, pending in posted:
            pending.wait()
            yield rows, room


def take(whole: Tensor, rows: Tensor) -> Tensor:
    """``whole[:, rows]``, contiguous, for rising ``rows``."""
    start = _start(rows)
    if start is not None:
        return whole[:, start : start + len(rows)].contiguous()
    return whole.index_select(1, on_device(rows, whole.device))


def _place(whole: Tensor, rows: Tensor, piece: Tensor) -> None:
    """``whole[:, rows] = piece``."""
    start = _start(rows)
    if start is not None:
        whole[:, start : start + len(rows)] = piece
    else:
        whole.index_copy_(1, on_device(rows, whole.device), piece)


def _start(rows: Tensor) -> int | None:
    """The first of ``rows``, if they follow one another."""
    if not len(rows):
        return 0
    first = int(rows[0])
    return first if int(rows[-1]) - first + 1 == len(rows) else None


class _Sum:
    """A sum over the ranks: each rank's part of it is sent as soon as it is computed."""

    def __init__(self, pieces: SequenceChunks) -> None:
        self._pieces = pieces
        self._sending: list[Pending] = []
        self._arriving: list[list[Tensor]] = []
        self._own: Tensor | None = None

    def add(self, step: int, partial: Callable[[Tensor], Tensor]) -> None:
        """Compute ``partial(rows)`` for the rank ``step`` after this one, and send it; the same steps on every rank."""
        pieces, ranks = self._pieces, self._pieces.group.size()
        target, source = (pieces.rank + step) % ranks, (pieces.rank - step) % ranks
        if target == pieces.rank:
            self._own = partial(pieces.rows[target])
            return
        before, self._sending = self._sending, []
        rooms = []
        for rows, own in zip(pieces.parts(target), pieces.parts(pieces.rank), strict=True):
            piece = partial(rows).contiguous()
            rooms.append(piece.new_empty(piece.shape[0], len(own), *piece.shape[2:]))
            self._sending.append(exchange([(target, piece)], [(source, rooms[-1])], pieces.group))
        self._arriving.append(rooms)
        for pending in before:  # what was sent is freed: at most two pieces wait
            pending.wait()

    def result(self) -> Tensor:
        """This rank's part, summed in float32 and rounded once."""
        assert self._own is not None
        for pending in self._sending:
            pending.wait()
        total = self._own.to(_wide(self._own))
        for rooms in self._arriving:
            total = total + torch.cat(rooms, 1)
        return total.to(self._own.dtype)


def resolve_overlap(overlap: str, group: ProcessGroup, device: torch.device, even: bool) -> str:
    """What "auto" stands for here; a ValueError when "symm_mem" is asked for and cannot run."""
    if overlap not in ("auto", "symm_mem"):
        return overlap
    reason = symmetric_memory_reason(group, device, even)
    if overlap == "symm_mem" and reason is not None:
        raise ValueError(f"overlap='symm_mem' cannot run here: {reason}; use overlap='auto'")
    return "symm_mem" if reason is None else "ring"


def all_gather_linear(x: Tensor, weights: Sequence[Tensor], pieces: SequenceChunks) -> list[Tensor]:
    """``F.linear`` of the gathered sequence with each of the weights.

    Args:
        x: ``[batch, seq_local, in]``.
        weights: each ``[out_i, in]``, this rank's rows of a column-parallel weight.

    Returns:
        One ``[batch, tokens, out_i]`` for each weight. The gathered input is not kept: backward gathers it again,
        behind the GEMMs of the input's gradient.
    """
    x, *weights = _autocast(x, *weights)
    return list(_AllGatherLinear.apply(x, pieces, *weights))


def linear_reduce_scatter(x: Tensor, weight: Tensor, pieces: SequenceChunks) -> Tensor:
    """``F.linear``, summed over the ranks, of which each keeps its tokens.

    Args:
        x: ``[batch, tokens, in_local]``.
        weight: ``[out, in_local]``, this rank's columns of a row-parallel weight.

    Returns:
        ``[batch, seq_local, out]``.
    """
    x, weight = _autocast(x, weight)
    y: Tensor = _LinearReduceScatter.apply(x, weight, pieces)
    return y


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype, where it is on: inside an autograd function it would round behind our back."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pieces: SequenceChunks, *weights: Tensor) -> tuple[Tensor, ...]:
        make_ready(pieces.group, x.device)
        x = x.contiguous()
        ctx.save_for_backward(x, *weights)
        ctx.pieces = pieces
        if pieces.overlap == "none":
            whole = pieces.gather(x)
            return tuple(F.linear(whole, w) for w in weights)
        if pieces.overlap == "symm_mem":
            return tuple(all_gather_matmul(x, weights, pieces.group))
        outs = tuple(x.new_empty(x.shape[0], pieces.total, w.shape[0]) for w in weights)
        for rows, part in chain.from_iterable(pieces.visit(x)):
            for out, w in zip(outs, weights, strict=True):
                _place(out, rows, F.linear(part, w))
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        pieces: SequenceChunks = ctx.pieces
        need_x, need_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        # One weight: the partial gradient of x is then rounded once, after the sum over all of them.
        weight, dout = torch.cat(weights), torch.cat(douts, -1)
        grad = torch.zeros_like(weight, dtype=_wide(weight))
        dx = None
        if pieces.overlap == "ring":
            # Behind each step's GEMMs: the next piece of the input comes in, the last part of dx goes out.
            dx_sum, ranks = _Sum(pieces), pieces.group.size()
            visits = pieces.visit(x) if need_w else repeat(iter(()), ranks)
            for step, parts in enumerate(visits, start=1):
                if need_x:
                    dx_sum.add(step % ranks, lambda rows: take(dout, rows) @ weight)
                for rows, part in parts:
                    _add_weight_gradient(grad, take(dout, rows), part)
            dx = dx_sum.result() if need_x else None
        else:
            if need_x and pieces.overlap == "symm_mem":
                dx = matmul_reduce_scatter(dout, weight, pieces.group)
            elif need_x:
                dx = pieces.scatter(dout @ weight)
            if need_w:
                _add_weight_gradient(grad, dout, pieces.gather(x))
        grads = grad.to(weight.dtype).split([len(w) for w in weights]) if need_w else [None] * len(weights)
        return dx, None, *grads


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pieces: SequenceChunks) -> Tensor:
        make_ready(pieces.group, x.device)
        ctx.save_for_backward(x, weight)
        ctx.pieces = pieces
        if pieces.overlap == "none":
            return pieces.scatter(F.linear(x, weight))
        if pieces.overlap == "symm_mem":
            return matmul_reduce_scatter(x, weight.t(), pieces.group)
        total = _Sum(pieces)
        for step in (*range(1, pieces.group.size()), 0):  # its own part last, behind the last transfer
            total.add(step, lambda rows: F.linear(take(x, rows), weight))
        return total.result()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        pieces: SequenceChunks = ctx.pieces
        dout = dout.contiguous()
        grad = torch.zeros_like(weight, dtype=_wide(weight))
        if pieces.overlap == "ring":
            dx = torch.empty_like(x)
            for rows, part in chain.from_iterable(pieces.visit(dout)):
                _place(dx, rows, part @ weight)
                _add_weight_gradient(grad, part, take(x, rows))
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
    dout, x = dout.flatten(0, 1).t(), x.flatten(0, 1)
    if grad.dtype == x.dtype:
        grad.addmm_(dout, x)
    else:
        grad += dout @ x
