"""A sequence in chunks of tokens, one per rank: all-gathered or reduce-scattered, in one collective or chunk by chunk.

Shapes: b batch, s tokens of this rank, t tokens of all ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.cache import cached_tensors
from ..comm.collectives import all_gather, all_to_all_single, reduce_scatter, run
from ..comm.p2p import Link, call, connect, exchange
from ..comm.trace import count_sent
from ..comm.waiting import Pending, operation
from ..placement.layout import TokenLayout, split_range
from ..ranks.mesh import rank_in, size_of
from .gemm import sum_dtype

_NAME = "a tensor-parallel layer"  # of the collectives, in errors
Overlap = Literal["auto", "ring", "none"]
OVERLAPS: tuple[str, ...] = get_args(Overlap)

# The full sequence is sent in about this many pieces, so each of P ranks sends its chunk in about _PIECES / P.
_PIECES = 16
# By device type: a chunk is not cut into smaller pieces, and ``overlap="auto"`` sends smaller chunks in one collective.
# On a GPU, a message takes the host 60 to 100 us. In 80 us, a link of 200 GB/s carries 16 MB.
_MIN_MESSAGE_BYTES = {"cpu": 0, "cuda": 16 << 20}


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """Increasing rows of the full sequence."""

    start: int  # the first row
    length: int
    index: Tensor | None = None  # the rows, int64 [length], where the activations are; None if they are consecutive

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


# ``(rows, x)``: some tokens ``x [b, rows, ...]``, and their rows in the full sequence.
RowPiece = tuple[SequenceRows, Tensor]


@dataclass(frozen=True, eq=False)
class ChunkRows:
    """Which rows of the full sequence each rank holds. Made once for a sharding and a device."""

    chunks: tuple[SequenceRows, ...]  # by rank
    pieces: tuple[tuple[SequenceRows, ...], ...]  # by rank: the pieces in which its chunk is sent
    order: Tensor | None  # the rows of all ranks, one rank after another, int64 [t]; None if they are 0 to t - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors. The tensors of chunks and pieces are views of ``order``."""
        return 0 if self.order is None else self.order.nbytes

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each rank."""
        return [rows.length for rows in self.chunks]


def rows_of_sharding(tokens: TokenLayout, rank: int, device: torch.device) -> ChunkRows:
    """The rows of the tensor-parallel ranks that attention treats as its single rank ``rank``. Cached."""

    def make() -> ChunkRows:
        full, by_rank = tokens.tensor_positions(rank)
        order = torch.cat(tokens.tensor_rows(rank, device))

        def rows_at(span: range) -> SequenceRows:
            if not len(span):
                return SequenceRows(0, 0)
            first, last = (full.count_below(position_at(i)) for i in (span.start, span.stop - 1))
            if last - first + 1 == len(span):
                return SequenceRows(first, len(span))
            return SequenceRows(first, len(span), order.narrow(0, span.start, len(span)))

        def position_at(index: int) -> int:
            """The position of a token, counted through the ranks' tokens one rank after another."""
            holder = bisect_right(offsets, index) - 1
            return by_rank[holder].at(index - offsets[holder])

        lengths = [len(positions) for positions in by_rank]
        offsets = list(accumulate(lengths, initial=0))
        chunks = _cut(lengths, rows_at, order)
        in_order = all(
            rows.index is None and (rows.start == offset or not rows.length)
            for rows, offset in zip(chunks.chunks, offsets, strict=False)
        )
        return replace(chunks, order=None) if in_order else chunks

    return cached_tensors(("chunks", tokens, rank), device, make)


@lru_cache(maxsize=8)
def rows_in_rank_order(lengths: tuple[int, ...]) -> ChunkRows:
    """The rows of ranks that hold ``lengths`` tokens, where the full sequence is one rank's tokens after another's."""
    return _cut(lengths, lambda span: SequenceRows(span.start, len(span)), None)


def pieces_of_chunk(ranks: int) -> int:
    """The number of pieces in which each of ``ranks`` ranks sends its chunk."""
    return max(1, _PIECES // ranks)


def _cut(lengths: Sequence[int], rows_at: Callable[[range], SequenceRows], order: Tensor | None) -> ChunkRows:
    """The rows of chunks of ``lengths`` tokens. ``rows_at`` takes tokens, counted through the chunks of all ranks."""
    chunks, pieces = [], []
    parts = pieces_of_chunk(len(lengths))
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        spans = (split_range(length, parts, part) for part in range(parts))
        chunks.append(rows_at(range(start, start + length)))
        pieces.append(tuple(rows_at(range(start + span.start, start + span.stop)) for span in spans))
    return ChunkRows(tuple(chunks), tuple(pieces), order)


@dataclass(frozen=True, eq=False)
class SequenceChunks:
    """A sequence ``[b, t, ...]`` of which each rank of ``group`` holds one chunk of tokens."""

    group: ProcessGroup | None  # None is a single rank
    rows: ChunkRows
    overlap: str = "ring"  # or "auto" or "none"
    float32_gradients: bool = False  # with "ring": half-precision gradients of the input are summed and sent in float32

    def call(self, name: str, x: Tensor, goes_on: bool = False) -> AbstractContextManager[None]:
        """In the block, the ranks exchange the messages of the operator ``name`` for ``x [b, ...]``.

        ``goes_on``: the block is a further part of the last call.
        """
        return call(self.group, name, self.total, x.shape[0], x.dtype.itemsize, goes_on=goes_on)

    @cached_property
    def size(self) -> int:
        return size_of(self.group)

    @cached_property
    def rank(self) -> int:
        return rank_in(self.group)

    @cached_property
    def total(self) -> int:
        """Tokens of the full sequence."""
        return sum(self.rows.lengths)

    def overlap_for(self, x: Tensor, width: int) -> str:
        """How communication and GEMMs overlap for tokens of ``width`` elements like the elements of ``x [b, ...]``.

        The same on all ranks, because it depends on the longest chunk.
        """
        if self.overlap != "auto":
            return self.overlap
        return "ring" if self._fills_messages(x, width, 1) else "none"

    def pieces(self, x: Tensor, width: int) -> Sequence[Sequence[SequenceRows]]:
        """By rank: the rows of each message of its chunk, for tokens of ``width`` elements like those in ``x``."""
        split = self._fills_messages(x, width, pieces_of_chunk(len(self.rows.chunks)))
        return self.rows.pieces if split else [(rows,) for rows in self.rows.chunks]

    def _fills_messages(self, x: Tensor, width: int, parts: int) -> bool:
        nbytes = max(self.rows.lengths) * x.shape[0] * width * x.element_size()
        return nbytes // parts >= _MIN_MESSAGE_BYTES.get(x.device.type, _MIN_MESSAGE_BYTES["cuda"])

    @operation(_NAME)
    def all_gather(self, chunk: Tensor) -> Tensor:
        """The full sequence ``[b, t, ...]`` from every rank's ``chunk [b, s, ...]``, in one collective."""
        full = all_gather(chunk, self.rows.lengths, 1, self.group)
        if self.rows.order is None:
            return full
        return torch.empty_like(full).index_copy_(1, self.rows.order, full)

    @operation(_NAME)
    def reduce_scatter(self, full: Tensor) -> Tensor:
        """Sum ``full [b, t, ...]`` over the ranks and keep this rank's tokens ``[b, s, ...]``, in one collective.

        Tensors in half precision are sent in half precision, and the rank that keeps the sum adds them in float32. The
        backend's reduce-scatter would round after every addition.
        """
        if self.size == 1:
            return full
        chunks = [rows.take(full) for rows in self.rows.chunks]
        if full.dtype == sum_dtype(full):
            assert self.group is not None
            return reduce_scatter(chunks, self.group)
        sends = torch.cat([chunk.reshape(-1) for chunk in chunks])
        own_chunk = chunks[self.rank]
        received = sends.new_empty(self.size, own_chunk.numel())
        sizes = [chunk.numel() for chunk in chunks]
        assert self.group is not None
        out = [own_chunk.numel()] * self.size
        run(all_to_all_single, received.view(-1), sends, out, sizes, group=self.group)
        for peer, size in enumerate(sizes):
            if peer != self.rank:
                count_sent(size * sends.element_size(), self.group, peer)
        return received.sum(0, dtype=sum_dtype(full)).to(full.dtype).view(own_chunk.shape)

    def receive_chunks(self, chunk: Tensor) -> Iterator[Iterator[RowPiece]]:
        """Every rank's chunk, piece by piece, this rank's first. While the caller uses one chunk, the next is received.

        The call starts the first transfers.
        """
        link = connect(self.group, chunk.device)
        local: Iterator[RowPiece] = iter([(self.rows.chunks[self.rank], chunk)])
        incoming = self._start_step(chunk, 1, link) if self.size > 1 else None

        def chunks() -> Iterator[Iterator[RowPiece]]:
            nonlocal incoming
            yield local
            for step in range(2, self.size):
                current, incoming = incoming, self._start_step(chunk, step, link)
                assert current is not None
                yield current
            if incoming is not None:
                yield incoming

        return chunks()

    def cut_chunks(self, full: Tensor) -> Iterator[Iterator[RowPiece]]:
        """The same chunks and pieces as ``receive_chunks``, from the full sequence ``[b, t, ...]``."""
        for step in range(self.size):
            source = (self.rank - step) % self.size
            pieces = (self.rows.chunks[source],) if step == 0 else self.pieces(full, full.shape[2])[source]
            yield ((rows, rows.take(full)) for rows in pieces)

    def _start_step(self, chunk: Tensor, step: int, link: Link | None) -> Iterator[RowPiece]:
        """Start receiving the chunk of rank ``rank - step``, and sending ``chunk`` to rank ``rank + step``.

        The returned iterator waits for one piece at a time.
        """
        source, target = (self.rank - step) % self.size, (self.rank + step) % self.size
        pieces = self.pieces(chunk, chunk.shape[2])
        local_pieces = chunk.split([rows.length for rows in pieces[self.rank]], 1)
        messages: list[tuple[SequenceRows, Tensor, Pending]] = []
        for rows, piece in zip(pieces[source], local_pieces, strict=True):
            recv_buffer = chunk.new_empty(chunk.shape[0], rows.length, *chunk.shape[2:])
            pending = exchange([(target, piece.contiguous())], [(source, recv_buffer)], link)
            messages.append((rows, recv_buffer, pending))

        def wait_in_turn() -> Iterator[RowPiece]:
            for rows, recv_buffer, pending in messages:
                pending.wait()
                yield rows, recv_buffer

        return wait_in_turn()


class PartialSums:
    """A reduce-scatter that sends each partial output as soon as it is computed.

    Args:
        chunks: the chunks of the outputs.
        x: a tensor ``[b, ...]`` of the outputs' dtype.
        width: elements of an output token.
    """

    def __init__(self, chunks: SequenceChunks, x: Tensor, width: int) -> None:
        self._chunks, self._pieces = chunks, chunks.pieces(x, width)
        self._link: Link | None = None
        self._sends: list[Pending] = []
        self._received: list[list[Tensor]] = []
        self._local: Tensor | None = None

    def add(self, step: int, partial_output: Callable[[SequenceRows], Tensor]) -> None:
        """Compute ``partial_output(rows)`` for the tokens of rank ``rank + step``, and send it to that rank.

        All ranks must call this with the same steps in the same order. Step 0 is this rank's own tokens, which are not
        sent.
        """
        chunks, rows_of = self._chunks, self._chunks.rows
        target, source = (chunks.rank + step) % chunks.size, (chunks.rank - step) % chunks.size
        if step == 0:
            self._local = partial_output(rows_of.chunks[target])
            return
        previous_sends, self._sends = self._sends, []
        buffers = []
        for rows, local_rows in zip(self._pieces[target], self._pieces[chunks.rank], strict=True):
            piece = partial_output(rows).contiguous()
            buffers.append(piece.new_empty(piece.shape[0], local_rows.length, *piece.shape[2:]))
            self._link = self._link or connect(chunks.group, piece.device)
            self._sends.append(exchange([(target, piece)], [(source, buffers[-1])], self._link))
        self._received.append(buffers)
        for pending in previous_sends:  # frees partial outputs, so that at most two chunks of them exist at a time
            pending.wait()

    def result(self) -> Tensor:
        """The sum over the ranks of this rank's tokens, accumulated in float32 and rounded once."""
        assert self._local is not None
        for pending in self._sends:
            pending.wait()
        total = self._local.to(sum_dtype(self._local), copy=True)
        lengths = [rows.length for rows in self._pieces[self._chunks.rank]]
        for buffers in self._received:
            for part, buffer in zip(total.split(lengths, 1), buffers, strict=True):
                part += buffer
        return total.to(self._local.dtype)
