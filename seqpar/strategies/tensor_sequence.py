"""Megatron's tensor and sequence parallelism: all-gather x GEMM and GEMM x reduce-scatter, overlapped.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Weights are sharded over the
ranks, and outside the linear layers so are the tokens. A column-parallel layer all-gathers the tokens before its GEMM,
a row-parallel layer reduce-scatters them after its GEMM; each is the backward of the other. ``overlap`` says how:

* "ring": chunk by chunk, the GEMMs of one chunk running while the next chunk is being received (Wang et al., "Overlap
  Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). With few
  ranks a chunk is sent in several pieces, so that its own GEMMs hide the transfer of its later pieces;
* "symm_mem": PyTorch's fused symmetric-memory operators, for NVLink;
* "none": one collective before or after one GEMM;
* "auto": "ring", until "symm_mem" has been measured.

[Note: overlap] Rank 1 of 4; chunk r holds the tokens of rank r. Partial outputs are sent in the model's dtype, summed
in float32 by the rank that keeps them, and rounded once.

    all_gather_linear
    GEMM         | x of chunk 1     | x of chunk 0     | x of chunk 3     | x of chunk 2     |
    receive x    | chunk 0 .......  | chunk 3 .......  | chunk 2 .......  |
    send own x   | to 2 ..........  | to 3 ..........  | to 0 ..........  |

    linear_reduce_scatter
    GEMM         | y of chunk 2     | y of chunk 3     | y of chunk 0     | y of chunk 1     | sum
    send y       |                  | chunk 2 to 2 ..  | chunk 3 to 3 ..  | chunk 0 to 0 ..  |
    receive y    |                  | chunk 1, by 0 .  | chunk 1, by 3 .  | chunk 1, by 2 .  |

Bytes sent per rank of P: (P-1)/P * N * hidden * e for the all-gather, as many for the reduce-scatter, the same again in
backward, and one more all-gather for the input, which is not kept.

Shapes: b batch, s tokens of this rank, t tokens of all ranks.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, repeat
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from ..cache import cached_tensors
from ..comm.collectives import all_gather, reduce_scatter
from ..comm.p2p import Pending, exchange, make_ready
from ..comm.trace import count_sent
from ..layout import SequenceSharding, split_range
from ..mesh import rank_in, size_of
from .autograd import to_autocast_dtype

Overlap = Literal["auto", "ring", "symm_mem", "none"]
OVERLAPS: tuple[str, ...] = get_args(Overlap)

# The full sequence is sent in at least this many pieces: a chunk of P ranks in about _PIECES / P.
_PIECES = 16


@dataclass(frozen=True, eq=False)
class Rows:
    """Increasing rows of the full sequence.

    Attributes:
        start: the first row.
        length: how many there are.
        index: the rows, int64 ``[length]``, on the device of the activations; None if they are consecutive.
    """

    start: int
    length: int
    index: Tensor | None = None

    def __len__(self) -> int:
        return self.length

    def take(self, full: Tensor) -> Tensor:
        """``full[:, rows]``, a view if the rows are consecutive."""
        if self.index is None:
            return full.narrow(1, self.start, self.length)
        return full.index_select(1, self.index)

    def put(self, full: Tensor, x: Tensor) -> None:
        """``full[:, rows] = x``."""
        if self.index is None:
            full.narrow(1, self.start, self.length).copy_(x)
        else:
            full.index_copy_(1, self.index, x)


# ``(rows, x)``: some tokens of the full sequence, and where they are in it.
Piece = tuple[Rows, Tensor]


@dataclass(frozen=True, eq=False)
class ChunkRows:
    """Which rows of the full sequence each rank holds. Made once for a sharding and a device.

    Attributes:
        chunks: by rank, its rows.
        pieces: by rank, its rows in the pieces in which its chunk is sent.
        order: the rows of all ranks, one rank after another, int64 ``[t]``; None if that is the full sequence.
    """

    chunks: tuple[Rows, ...]
    pieces: tuple[tuple[Rows, ...], ...]
    order: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors. The chunks' and the pieces' are views of ``order``."""
        return 0 if self.order is None else self.order.nbytes

    @property
    def lengths(self) -> list[int]:
        """By rank, the number of its tokens."""
        return [len(rows) for rows in self.chunks]


def _rows_of_sharding(sharding: SequenceSharding, rank: int, device: torch.device) -> ChunkRows:
    """The rows of the tensor-parallel ranks that together are ``rank`` of attention. Cached."""

    def make() -> ChunkRows:
        full, by_rank = sharding.tensor_positions(rank)
        order = torch.cat(sharding.tensor_rows(rank, device))

        def rows_at(span: range) -> Rows:
            if not len(span):
                return Rows(0, 0)
            first, last = (full.count_below(position_at(i)) for i in (span.start, span.stop - 1))
            if last - first + 1 == len(span):
                return Rows(first, len(span))
            return Rows(first, len(span), order.narrow(0, span.start, len(span)))

        def position_at(index: int) -> int:
            """The position of a token, counted through the ranks' tokens one rank after another."""
            holder = bisect_right(offsets, index) - 1
            return by_rank[holder].at(index - offsets[holder])

        lengths = [len(held) for held in by_rank]
        offsets = list(accumulate(lengths, initial=0))
        chunks = _cut(lengths, rows_at, order)
        in_order = all(
            rows.index is None and (rows.start == offset or not len(rows))
            for rows, offset in zip(chunks.chunks, offsets, strict=False)
        )
        return replace(chunks, order=None) if in_order else chunks

    return cached_tensors(("chunks", sharding, rank), device, make)


@lru_cache(maxsize=8)
def _rows_in_rank_order(lengths: tuple[int, ...]) -> ChunkRows:
    """The rows of ranks that hold ``lengths`` tokens, one rank after another."""
    return _cut(lengths, lambda span: Rows(span.start, len(span)), None)


def pieces_of_chunk(ranks: int) -> int:
    """In how many pieces each of ``ranks`` sends its chunk."""
    return max(1, _PIECES // ranks)


def _cut(lengths: Sequence[int], rows_at: Callable[[range], Rows], order: Tensor | None) -> ChunkRows:
    """The rows of every chunk and piece. ``rows_at`` is given indices in the sequence of all ranks, one after another.

    ``lengths`` are the ranks' tokens.
    """
    chunks, pieces = [], []
    parts = pieces_of_chunk(len(lengths))
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        spans = (split_range(length, parts, part) for part in range(parts))
        chunks.append(rows_at(range(start, start + length)))
        pieces.append(tuple(rows_at(range(start + span.start, start + span.stop)) for span in spans))
    return ChunkRows(tuple(chunks), tuple(pieces), order)


# By positions of this rank: their version and all ranks' positions, by the ranks and the rows of the full sequence.
_gathered: MutableMapping[Tensor, dict[tuple[ProcessGroup | None, ChunkRows], tuple[int, Tensor]]]
_gathered = WeakIdKeyDictionary()


@dataclass(frozen=True, eq=False)
class SequenceChunks:
    """A sequence ``[b, t, ...]`` of which each rank of ``group`` holds one chunk of tokens.

    Attributes:
        group: the tensor-parallel ranks; None is a single rank.
        rows: which rows of the full sequence each rank holds.
        overlap: "ring", "symm_mem" or "none".
        float32_gradients: whether partial gradients of the input are computed and sent in float32, whatever its dtype.
            With "ring" only.
    """

    group: ProcessGroup | None
    rows: ChunkRows
    overlap: str = "ring"
    float32_gradients: bool = False

    @staticmethod
    def of_sharding(
        group: ProcessGroup, sharding: SequenceSharding, rank: int, overlap: str, device: torch.device
    ) -> SequenceChunks:
        """The chunks of the tensor-parallel ranks that together are ``rank`` of attention.

        Raises:
            ValueError: ``overlap="symm_mem"`` cannot run here.
        """
        rows = _rows_of_sharding(sharding, rank, device)
        return SequenceChunks(group, rows, _resolve_overlap(overlap, group, rows, device))

    @staticmethod
    def of_context(group: ProcessGroup | None, sharding: SequenceSharding, device: torch.device) -> SequenceChunks:
        """The chunks of all ranks of attention, each of which is to hold the full sequence."""
        return SequenceChunks(group, _rows_of_sharding(sharding.together(), 0, device), float32_gradients=True)

    @staticmethod
    def in_rank_order(
        group: ProcessGroup | None, lengths: Sequence[int], overlap: str, device: torch.device
    ) -> SequenceChunks:
        """Chunks of ``lengths`` tokens, one rank after another.

        Raises:
            ValueError: ``overlap="symm_mem"`` cannot run here.
        """
        rows = _rows_in_rank_order(tuple(lengths))
        return SequenceChunks(group, rows, _resolve_overlap(overlap, group, rows, device))

    @property
    def size(self) -> int:
        return size_of(self.group)

    @property
    def rank(self) -> int:
        return rank_in(self.group)

    @property
    def total(self) -> int:
        """Tokens of the full sequence."""
        return sum(self.rows.lengths)

    def all_gather(self, chunk: Tensor) -> Tensor:
        """The full sequence ``[b, t, ...]`` from every rank's ``chunk [b, s, ...]``, in one collective."""
        full = all_gather(chunk, self.rows.lengths, 1, self.group)
        if self.rows.order is None:
            return full
        return torch.empty_like(full).index_copy_(1, self.rows.order, full)

    def all_gather_positions(self, positions: Tensor) -> Tensor:
        """The positions ``[1 or b, t]`` of the full sequence, from every rank's ``[s]`` or ``[b, s]``.

        Layers that are given the same tensor get the same tensor, which is gathered once.
        """
        if positions.is_inference():  # PyTorch does not count the writes to it
            return self.all_gather(torch.atleast_2d(positions))
        gathered = _gathered.setdefault(positions, {})
        version, full = gathered.get((self.group, self.rows), (None, None))
        if full is None or version != positions._version:
            full = self.all_gather(torch.atleast_2d(positions))
            gathered[self.group, self.rows] = positions._version, full
        return full

    def reduce_scatter(self, full: Tensor) -> Tensor:
        """Sum ``full [b, t, ...]`` over the ranks and keep this rank's tokens ``[b, s, ...]``, in one collective.

        Half precision is sent as it is, and added in float32 by the rank that keeps the sum: a reduce-scatter of the
        backend would round after every addition.
        """
        if self.size == 1:
            return full
        chunks = [rows.take(full) for rows in self.rows.chunks]
        if full.dtype == sum_dtype(full):
            assert self.group is not None
            return reduce_scatter(chunks, self.group)
        sends = torch.cat([chunk.reshape(-1) for chunk in chunks])
        own = chunks[self.rank]
        received = sends.new_empty(self.size, own.numel())
        sizes = [chunk.numel() for chunk in chunks]
        dist.all_to_all_single(received.view(-1), sends, [own.numel()] * self.size, sizes, group=self.group)
        assert self.group is not None
        for peer, size in enumerate(sizes):
            if peer != self.rank:
                count_sent(size * sends.element_size(), self.group, peer)
        return received.sum(0, dtype=sum_dtype(full)).to(full.dtype).view(own.shape)

    def receive_chunks(self, chunk: Tensor) -> Iterator[Iterator[Piece]]:
        """Every rank's chunk, piece by piece, this rank's first. The next chunk is received while one is used.

        The first transfers start at once. ``make_ready`` must have been called.
        """
        own: Iterator[Piece] = iter([(self.rows.chunks[self.rank], chunk)])
        return self._receive_after(own, self._start_step(chunk, 1), chunk) if self.size > 1 else iter([own])

    def _receive_after(
        self, own: Iterator[Piece], incoming: Iterator[Piece], chunk: Tensor
    ) -> Iterator[Iterator[Piece]]:
        """The rest of ``receive_chunks``, once the first transfers have started."""
        yield own
        for step in range(2, self.size):
            current, incoming = incoming, self._start_step(chunk, step)
            yield current
        yield incoming

    def cut_chunks(self, full: Tensor) -> Iterator[Iterator[Piece]]:
        """What ``receive_chunks`` gives, out of the full sequence ``[b, t, ...]``."""
        for step in range(self.size):
            source = (self.rank - step) % self.size
            pieces = (self.rows.chunks[source],) if step == 0 else self.rows.pieces[source]
            yield ((rows, rows.take(full)) for rows in pieces)

    def _start_step(self, chunk: Tensor, step: int) -> Iterator[Piece]:
        """Start receiving the chunk of the rank ``step`` before this one, and sending ``chunk`` to the rank ``step``
        after it. The iterator waits for one piece at a time."""
        source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
        pieces = self.rows.pieces
        own_pieces = chunk.split([len(rows) for rows in pieces[self.rank]], 1)
        started: list[tuple[Rows, Tensor, Pending]] = []
        for rows, piece in zip(pieces[source], own_pieces, strict=True):
            recv_buffer = chunk.new_empty(chunk.shape[0], len(rows), *chunk.shape[2:])
            pending = exchange([(target, piece.contiguous())], [(source, recv_buffer)], self.group, borrow=True)
            started.append((rows, recv_buffer, pending))
        return _wait_in_turn(started)


def _wait_in_turn(started: list[tuple[Rows, Tensor, Pending]]) -> Iterator[Piece]:
    for rows, recv_buffer, pending in started:
        pending.wait()
        yield rows, recv_buffer


class PartialSums:
    """A reduce-scatter of partial outputs, each of which is sent as soon as it is computed."""

    def __init__(self, chunks: SequenceChunks) -> None:
        self._chunks = chunks
        self._sends: list[Pending] = []
        self._received: list[list[Tensor]] = []
        self._own: Tensor | None = None

    def add(self, step: int, partial_output: Callable[[Rows], Tensor]) -> None:
        """Compute ``partial_output(rows)`` for the tokens of the rank ``step`` after this one, and send it there.

        Every rank adds the same steps in the same order; step 0 is its own tokens, which are not sent.
        """
        chunks, rows_of = self._chunks, self._chunks.rows
        target, source = (chunks.rank + step) % chunks.size, (chunks.rank - step) % chunks.size
        if step == 0:
            self._own = partial_output(rows_of.chunks[target])
            return
        before, self._sends = self._sends, []
        buffers = []
        for rows, own_rows in zip(rows_of.pieces[target], rows_of.pieces[chunks.rank], strict=True):
            piece = partial_output(rows).contiguous()
            buffers.append(piece.new_empty(piece.shape[0], len(own_rows), *piece.shape[2:]))
            self._sends.append(exchange([(target, piece)], [(source, buffers[-1])], chunks.group, borrow=True))
        self._received.append(buffers)
        for pending in before:  # frees what was sent: the partial outputs of at most two chunks exist at a time
            pending.wait()

    def result(self) -> Tensor:
        """The sum over the ranks of this rank's tokens, accumulated in float32 and rounded once."""
        assert self._own is not None
        for pending in self._sends:
            pending.wait()
        total = self._own.to(sum_dtype(self._own), copy=True)
        lengths = [len(rows) for rows in self._chunks.rows.pieces[self._chunks.rank]]
        for buffers in self._received:
            for part, buffer in zip(total.split(lengths, 1), buffers, strict=True):
                part += buffer
        return total.to(self._own.dtype)


def all_gather_linear(x: Tensor, weights: Sequence[Tensor], chunks: SequenceChunks) -> list[Tensor]:
    """``F.linear`` of the all-gathered sequence with each of the weights.

    Args:
        x: ``[b, s, in]``, this rank's tokens.
        weights: each ``[out_i, in]``, this rank's rows of a column-parallel weight.
        chunks: which tokens each rank holds.

    Returns:
        ``[b, t, out_i]`` for each weight. The gathered input is not kept: backward gathers it again, behind the GEMMs
        of the input's gradient.
    """
    x, *weights = to_autocast_dtype(x, *weights)
    return list(_AllGatherLinear.apply(x, chunks, *weights))


def linear_reduce_scatter(x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
    """``F.linear``, summed over the ranks; each rank keeps its tokens.

    Args:
        x: ``[b, t, in_local]``.
        weight: ``[out, in_local]``, this rank's columns of a row-parallel weight.
        chunks: which tokens each rank holds.

    Returns:
        ``[b, s, out]``.
    """
    x, weight = to_autocast_dtype(x, weight)
    y: Tensor = _ReduceScatterOutput.apply(_SavedOperands.apply(x, weight, chunks), x.detach(), weight.detach(), chunks)
    return y


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: SequenceChunks, *weights: Tensor) -> tuple[Tensor, ...]:
        x = x.contiguous()
        ctx.save_for_backward(x, *weights)
        ctx.chunks = chunks
        return all_gather_linear_forward(x, weights, chunks)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        need_x, _, *need_weights = ctx.needs_input_grad
        dx, dweights = all_gather_linear_backward(douts, x, weights, ctx.chunks, need_x, need_weights)
        return dx, None, *dweights


def all_gather_linear_forward(x: Tensor, weights: Sequence[Tensor], chunks: SequenceChunks) -> tuple[Tensor, ...]:
    """``all_gather_linear`` of a contiguous ``x``."""
    make_ready(chunks.group, x.device)
    if chunks.overlap == "none":
        full = chunks.all_gather(x)  # [b, t, in]
        return tuple(F.linear(full, w) for w in weights)
    if chunks.overlap == "symm_mem":
        return tuple(all_gather_matmul(x, weights, chunks.group))
    return project_pieces(chunks.receive_chunks(x), x, weights, chunks)


def project_pieces(
    pieces: Iterator[Iterator[Piece]],
    x: Tensor,
    weights: Sequence[Tensor],
    chunks: SequenceChunks,
    full: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """``F.linear`` of every rank's tokens with each of the weights, as they arrive.

    Args:
        pieces: what ``chunks.receive_chunks(x)`` returned.
        x: ``[b, s, in]``, this rank's tokens.
        weights: each ``[out_i, in]``.
        chunks: which tokens each rank holds.
        full: ``[b, t, in]``, to be filled with the tokens.

    Returns:
        ``[b, t, out_i]`` for each weight.
    """
    outs = tuple(x.new_empty(x.shape[0], chunks.total, w.shape[0]) for w in weights)  # [b, t, out_i]
    for rows, piece in chain.from_iterable(pieces):
        for out, w in zip(outs, weights, strict=True):
            rows.put(out, F.linear(piece, w))
        if full is not None:
            rows.put(full, piece)
    return outs


def all_gather_linear_backward(
    douts: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    chunks: SequenceChunks,
    need_x: bool,
    need_weights: Sequence[bool],
    full: Tensor | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of ``x`` and of each weight, those that are needed.

    ``full [b, t, in]`` is the gathered input, if it is at hand; with "ring" only.
    """
    dweights = [torch.zeros_like(w, dtype=sum_dtype(w)) for w in weights]
    # As one weight, so that the partial gradient of x is rounded once, after the sum over all weights. The outputs'
    # gradients, which are larger, are joined for some rows at a time only.
    weight = (weights[0] if len(weights) == 1 else torch.cat(list(weights))) if need_x else x.new_empty(0)  # [out, in]

    def input_gradient(rows: Rows) -> Tensor:
        parts = [rows.take(dout) for dout in douts]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return matmul_float32(joined, weight) if chunks.float32_gradients else joined @ weight

    def add_weight_gradients(rows: Rows | None, piece: Tensor) -> None:
        for dweight, dout, needed in zip(dweights, douts, need_weights, strict=True):
            if needed:
                add_weight_gradient(dweight, dout if rows is None else rows.take(dout), piece)

    dx = None
    if chunks.overlap == "ring":
        # Behind the GEMMs of each step, the next chunk of x is received and the last partial dx is sent.
        partial_dx = PartialSums(chunks)
        x_chunks: Iterator[Iterator[Piece]] = repeat(iter(()), chunks.size)
        if any(need_weights):
            x_chunks = chunks.receive_chunks(x) if full is None else chunks.cut_chunks(full)
        for step, pieces in enumerate(x_chunks, start=1):
            if need_x:
                partial_dx.add(step % chunks.size, input_gradient)
            for rows, piece in pieces:
                add_weight_gradients(rows, piece)
        dx = partial_dx.result().to(x.dtype) if need_x else None
    else:
        if need_x and chunks.overlap == "symm_mem":
            dx = matmul_reduce_scatter(torch.cat(list(douts), -1), weight, chunks.group)
        elif need_x:
            full_dx = x.new_empty(x.shape[0], chunks.total, x.shape[2])  # [b, t, in]
            for rows in chain.from_iterable(chunks.rows.pieces):
                rows.put(full_dx, input_gradient(rows))
            dx = chunks.reduce_scatter(full_dx)
        if any(need_weights):
            add_weight_gradients(None, chunks.all_gather(x))
    of_weights = zip(dweights, weights, need_weights, strict=True)
    return dx, [d.to(w.dtype) if need else None for d, w, need in of_weights]


class _SavedOperands(torch.autograd.Function):
    """The graph's node of ``linear_reduce_scatter``: it saves the operands, and its backward is the whole backward.

    The output is computed by ``_ReduceScatterOutput`` afterwards. PyTorch stops the recomputation of a checkpoint as
    soon as everything is saved that backward needs: before the reduce-scatter, where this layer is the last.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
        """A stand-in for the output, of its shape and dtype, without memory of its own."""
        ctx.save_for_backward(x, weight)
        ctx.chunks = chunks
        own = len(chunks.rows.chunks[chunks.rank])
        return x.new_empty(()).expand(x.shape[0], own, weight.shape[0])  # [b, s, out]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return *linear_reduce_scatter_backward(dout.contiguous(), x, weight, ctx.chunks), None


class _ReduceScatterOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
        return linear_reduce_scatter_forward(x, weight, chunks)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        return dout, None, None, None


def linear_reduce_scatter_forward(x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
    """``linear_reduce_scatter`` without its gradient."""
    make_ready(chunks.group, x.device)
    if chunks.overlap == "none":
        return chunks.reduce_scatter(F.linear(x, weight))
    if chunks.overlap == "symm_mem":
        return matmul_reduce_scatter(x, weight.t(), chunks.group)
    partial_y = PartialSums(chunks)
    for step in (*range(1, chunks.size), 0):  # this rank's own tokens last, behind the last transfer
        partial_y.add(step, lambda rows: F.linear(rows.take(x), weight))
    return partial_y.result()


def linear_reduce_scatter_backward(
    dout: Tensor, x: Tensor, weight: Tensor, chunks: SequenceChunks
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and ``weight``; ``dout`` is contiguous."""
    dweight = torch.zeros_like(weight, dtype=sum_dtype(weight))
    if chunks.overlap == "ring":
        dx = torch.empty_like(x)  # [b, t, in_local]
        for rows, piece in chain.from_iterable(chunks.receive_chunks(dout)):
            rows.put(dx, piece @ weight)
            add_weight_gradient(dweight, piece, rows.take(x))
    else:
        full = chunks.all_gather(dout)  # [b, t, out]
        dx = full @ weight
        add_weight_gradient(dweight, full, x)
    return dx, dweight.to(weight.dtype)


def matmul_float32(x: Tensor, weight: Tensor) -> Tensor:
    """``x [b, t, out] @ weight [out, in]`` with a result in float32 (float64 for float64)."""
    dtype = sum_dtype(x)
    if x.dtype == dtype:
        return x @ weight
    if x.device.type == "cuda" and torch.version.hip is None:  # the GEMM accumulates in float32: it need not round
        y: Tensor = torch.mm(x.flatten(0, 1), weight, out_dtype=dtype).unflatten(0, x.shape[:2])
        return y
    return x.to(dtype) @ weight.to(dtype)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which partial results of ``x``'s dtype are summed, to be rounded once."""
    return torch.promote_types(x.dtype, torch.float32)


def add_weight_gradient(dweight: Tensor, dout: Tensor, x: Tensor) -> None:
    """Add ``dout^T x`` over all tokens: ``dout [b, t, out]``, ``x [b, t, in]``, ``dweight [out, in]``."""
    dout, x = dout.flatten(0, 1).t(), x.flatten(0, 1)
    if dweight.dtype == x.dtype:
        dweight.addmm_(dout, x)
    else:
        dweight += dout @ x


def _resolve_overlap(overlap: str, group: ProcessGroup | None, rows: ChunkRows, device: torch.device) -> str:
    """ "auto" resolved; raise a ValueError if "symm_mem" cannot run."""
    if overlap == "symm_mem" and group is not None:
        even = rows.order is None and len(set(rows.lengths)) == 1
        if (reason := symmetric_memory_reason(group, device, even)) is not None:
            raise ValueError(f"overlap='symm_mem' cannot run here: {reason}; use overlap='auto'")
    return "ring" if overlap == "auto" else overlap


_symm_mem_groups: set[str] = set()  # names of the groups for which symmetric memory is enabled


def symmetric_memory_reason(group: ProcessGroup, device: torch.device, even: bool) -> str | None:
    """Why PyTorch's fused symmetric-memory operators cannot run over this group, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it needs NVIDIA GPUs, and the tensors are on {device.type}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs NVLink multicast (Hopper or later)"
    # torchrun numbers the ranks host by host, and says how many each host runs.
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    if len({rank // per_host for rank in dist.get_process_group_ranks(group)}) > 1:
        return "the group spans several hosts"
    if not even:
        return "it needs shards of equal length in the contiguous layout"
    if group.group_name not in _symm_mem_groups:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        try:
            enable_symm_mem_for_group(group.group_name)
        except RuntimeError as error:
            return str(error)
        _symm_mem_groups.add(group.group_name)
    return None


def all_gather_matmul(x: Tensor, weights: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """All-gather ``x [b, s, in]`` along the sequence and multiply it by each ``weight [out, in]``, fused."""
    assert group is not None
    _, outs = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t() for w in weights], 1, group.group_name)
    return list(outs)


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
    """``x [b, t, in] @ weight [in, out]``, summed over the ranks and scattered along the sequence, fused."""
    assert group is not None
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 1, group.group_name)
    return y
