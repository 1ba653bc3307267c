"""Megatron's tensor and sequence parallelism: all-gather x GEMM and GEMM x reduce-scatter, overlapped.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022. Weights are sharded over the
ranks, and outside the linear layers so are the tokens. A column-parallel layer all-gathers the tokens before its GEMM,
a row-parallel layer reduce-scatters them after its GEMM; each is the backward of the other. ``overlap`` says how:

* "ring": chunk by chunk, the GEMMs of one chunk running while the next chunk is being received (Wang et al., "Overlap
  Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023). With few
  ranks a chunk is sent in several pieces, so that its own GEMMs hide the transfer of its later pieces;
* "symm_mem": PyTorch's fused symmetric-memory operators, for NVLink;
* "none": one collective before or after one GEMM;
* "auto": "symm_mem" where it can run, else "ring".

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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..comm.collectives import all_gather, reduce_scatter
from ..comm.p2p import Pending, exchange, make_ready

Overlap = Literal["auto", "ring", "symm_mem", "none"]
OVERLAPS: tuple[str, ...] = get_args(Overlap)

# The full sequence is sent in at least this many pieces: a chunk of P ranks in about _PIECES / P.
_PIECES = 8

# ``(rows, x)``: some tokens of the full sequence, and where they are in it.
Piece = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class SequenceChunks:
    """A sequence ``[b, t, ...]`` of which each rank of ``group`` holds one chunk of tokens.

    Attributes:
        group: the tensor-parallel ranks.
        rows: by rank, int64 ``[s]``, the indices of its tokens in the full sequence, increasing.
        in_order: whether the chunks, one rank after another, are the full sequence.
        overlap: "ring", "symm_mem" or "none".
    """

    group: ProcessGroup
    rows: tuple[Tensor, ...]
    in_order: bool
    overlap: str = "ring"

    @staticmethod
    def resolve(
        group: ProcessGroup, rows: tuple[Tensor, ...], in_order: bool, overlap: str, device: torch.device
    ) -> SequenceChunks:
        """The chunks, with "auto" resolved for these ranks.

        Raises:
            ValueError: "symm_mem" is asked for and cannot run here.
        """
        if overlap in ("auto", "symm_mem"):
            even = in_order and len({len(r) for r in rows}) == 1
            reason = symmetric_memory_reason(group, device, even)
            if overlap == "symm_mem" and reason is not None:
                raise ValueError(f"overlap='symm_mem' cannot run here: {reason}; use overlap='auto'")
            overlap = "symm_mem" if reason is None else "ring"
        return SequenceChunks(group, rows, in_order, overlap)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def total(self) -> int:
        """Tokens of the full sequence."""
        return sum(len(r) for r in self.rows)

    def pieces(self, rank: int) -> list[Tensor]:
        """The rows of ``rank`` in the pieces in which its chunk is sent."""
        return list(self.rows[rank].tensor_split(max(1, _PIECES // len(self.rows))))

    def all_gather(self, chunk: Tensor) -> Tensor:
        """The full sequence ``[b, t, ...]`` from every rank's ``chunk [b, s, ...]``, in one collective."""
        full = all_gather(chunk, [len(r) for r in self.rows], 1, self.group)
        if self.in_order:
            return full
        return torch.empty_like(full).index_copy_(1, torch.cat(self.rows).to(full.device), full)

    def reduce_scatter(self, full: Tensor) -> Tensor:
        """Sum ``full [b, t, ...]`` over the ranks and keep this rank's tokens ``[b, s, ...]``, in one collective."""
        return reduce_scatter([select_rows(full, rows) for rows in self.rows], self.group)

    def receive_chunks(self, chunk: Tensor) -> Iterator[Iterator[Piece]]:
        """Every rank's chunk, piece by piece, this rank's first. The next chunk is received while one is used."""
        incoming: Iterator[Piece] = iter([(self.rows[self.rank], chunk)])
        for step in range(1, self.group.size() + 1):
            current = incoming
            if step < self.group.size():
                incoming = self._start_step(chunk, step)
            yield current

    def _start_step(self, chunk: Tensor, step: int) -> Iterator[Piece]:
        """Start receiving the chunk of the rank ``step`` before this one, and sending ``chunk`` to the rank ``step``
        after it. The iterator waits for one piece at a time."""
        ranks = self.group.size()
        source, target = (self.rank - step) % ranks, (self.rank + step) % ranks
        own_pieces = chunk.tensor_split(len(self.pieces(self.rank)), 1)
        started: list[tuple[Tensor, Tensor, Pending]] = []
        for rows, piece in zip(self.pieces(source), own_pieces, strict=True):
            recv_buffer = chunk.new_empty(chunk.shape[0], len(rows), *chunk.shape[2:])
            pending = exchange([(target, piece.contiguous())], [(source, recv_buffer)], self.group)
            started.append((rows, recv_buffer, pending))
        return _wait_in_turn(started)


def _wait_in_turn(started: list[tuple[Tensor, Tensor, Pending]]) -> Iterator[Piece]:
    for rows, recv_buffer, pending in started:
        pending.wait()
        yield rows, recv_buffer


class _PartialSums:
    """A reduce-scatter of partial outputs, each of which is sent as soon as it is computed."""

    def __init__(self, chunks: SequenceChunks) -> None:
        self._chunks = chunks
        self._sends: list[Pending] = []
        self._received: list[list[Tensor]] = []
        self._own: Tensor | None = None

    def add(self, step: int, partial_output: Callable[[Tensor], Tensor]) -> None:
        """Compute ``partial_output(rows)`` for the tokens of the rank ``step`` after this one, and send it there.

        Every rank adds the same steps in the same order; step 0 is its own tokens, which are not sent.
        """
        chunks, ranks = self._chunks, self._chunks.group.size()
        target, source = (chunks.rank + step) % ranks, (chunks.rank - step) % ranks
        if step == 0:
            self._own = partial_output(chunks.rows[target])
            return
        before, self._sends = self._sends, []
        buffers = []
        for rows, own_rows in zip(chunks.pieces(target), chunks.pieces(chunks.rank), strict=True):
            piece = partial_output(rows).contiguous()
            buffers.append(piece.new_empty(piece.shape[0], len(own_rows), *piece.shape[2:]))
            self._sends.append(exchange([(target, piece)], [(source, buffers[-1])], chunks.group))
        self._received.append(buffers)
        for pending in before:  # frees what was sent: the partial outputs of at most two chunks exist at a time
            pending.wait()

    def result(self) -> Tensor:
        """The sum over the ranks of this rank's tokens, accumulated in float32 and rounded once."""
        assert self._own is not None
        for pending in self._sends:
            pending.wait()
        total = self._own.to(_sum_dtype(self._own))
        for buffers in self._received:
            total = total + torch.cat(buffers, 1)
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
    x, *weights = _autocast(x, *weights)
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
    x, weight = _autocast(x, weight)
    y: Tensor = _LinearReduceScatter.apply(x, weight, chunks)
    return y


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast to autocast's dtype here, because autocast does not apply inside a custom autograd.Function."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device_type)) for x in tensors]


class _AllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: SequenceChunks, *weights: Tensor) -> tuple[Tensor, ...]:
        make_ready(chunks.group, x.device)
        x = x.contiguous()
        ctx.save_for_backward(x, *weights)
        ctx.chunks = chunks
        if chunks.overlap == "none":
            full = chunks.all_gather(x)  # [b, t, in]
            return tuple(F.linear(full, w) for w in weights)
        if chunks.overlap == "symm_mem":
            return tuple(all_gather_matmul(x, weights, chunks.group))
        outs = tuple(x.new_empty(x.shape[0], chunks.total, w.shape[0]) for w in weights)  # [b, t, out_i]
        for rows, piece in chain.from_iterable(chunks.receive_chunks(x)):
            for out, w in zip(outs, weights, strict=True):
                _write_rows(out, rows, F.linear(piece, w))
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        chunks: SequenceChunks = ctx.chunks
        need_x, need_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:])
        # As one weight, so that the partial gradient of x is rounded once, after the sum over all weights.
        weight, dout = torch.cat(weights), torch.cat(douts, -1)  # [out, in], [b, t, out]
        dweight = torch.zeros_like(weight, dtype=_sum_dtype(weight))
        dx = None
        if chunks.overlap == "ring":
            # Behind the GEMMs of each step, the next chunk of x is received and the last partial dx is sent.
            partial_dx, ranks = _PartialSums(chunks), chunks.group.size()
            x_chunks = chunks.receive_chunks(x) if need_w else repeat(iter(()), ranks)
            for step, pieces in enumerate(x_chunks, start=1):
                if need_x:
                    partial_dx.add(step % ranks, lambda rows: select_rows(dout, rows) @ weight)
                for rows, piece in pieces:
                    _add_weight_gradient(dweight, select_rows(dout, rows), piece)
            dx = partial_dx.result() if need_x else None
        else:
            if need_x and chunks.overlap == "symm_mem":
                dx = matmul_reduce_scatter(dout, weight, chunks.group)
            elif need_x:
                dx = chunks.reduce_scatter(dout @ weight)
            if need_w:
                _add_weight_gradient(dweight, dout, chunks.all_gather(x))
        dweights = dweight.to(weight.dtype).split([len(w) for w in weights]) if need_w else [None] * len(weights)
        return dx, None, *dweights


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, chunks: SequenceChunks) -> Tensor:
        make_ready(chunks.group, x.device)
        ctx.save_for_backward(x, weight)
        ctx.chunks = chunks
        if chunks.overlap == "none":
            return chunks.reduce_scatter(F.linear(x, weight))
        if chunks.overlap == "symm_mem":
            return matmul_reduce_scatter(x, weight.t(), chunks.group)
        partial_y = _PartialSums(chunks)
        for step in (*range(1, chunks.group.size()), 0):  # this rank's own tokens last, behind the last transfer
            partial_y.add(step, lambda rows: F.linear(select_rows(x, rows), weight))
        return partial_y.result()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        chunks: SequenceChunks = ctx.chunks
        dout = dout.contiguous()
        dweight = torch.zeros_like(weight, dtype=_sum_dtype(weight))
        if chunks.overlap == "ring":
            dx = torch.empty_like(x)  # [b, t, in_local]
            for rows, piece in chain.from_iterable(chunks.receive_chunks(dout)):
                _write_rows(dx, rows, piece @ weight)
                _add_weight_gradient(dweight, piece, select_rows(x, rows))
        else:
            full = chunks.all_gather(dout)  # [b, t, out]
            dx = full @ weight
            _add_weight_gradient(dweight, full, x)
        return dx, dweight.to(weight.dtype), None


def _sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which partial results of ``x``'s dtype are summed, to be rounded once."""
    return torch.promote_types(x.dtype, torch.float32)


def _add_weight_gradient(dweight: Tensor, dout: Tensor, x: Tensor) -> None:
    """Add ``dout^T x`` over all tokens: ``dout [b, t, out]``, ``x [b, t, in]``, ``dweight [out, in]``."""
    dout, x = dout.flatten(0, 1).t(), x.flatten(0, 1)
    if dweight.dtype == x.dtype:
        dweight.addmm_(dout, x)
    else:
        dweight += dout @ x


def select_rows(full: Tensor, rows: Tensor) -> Tensor:
    """``full[:, rows]``, contiguous, for increasing ``rows``."""
    start = _first_if_consecutive(rows)
    if start is not None:
        return full[:, start : start + len(rows)].contiguous()
    return full.index_select(1, rows.to(full.device))


def _write_rows(full: Tensor, rows: Tensor, x: Tensor) -> None:
    """``full[:, rows] = x``."""
    start = _first_if_consecutive(rows)
    if start is not None:
        full[:, start : start + len(rows)] = x
    else:
        full.index_copy_(1, rows.to(full.device), x)


def _first_if_consecutive(rows: Tensor) -> int | None:
    """The first of ``rows``, if they are consecutive."""
    if not len(rows):
        return 0
    first = int(rows[0])
    return first if int(rows[-1]) - first + 1 == len(rows) else None


_symm_mem_groups: set[str] = set()  # names of the groups for which symmetric memory is enabled


def symmetric_memory_reason(group: ProcessGroup, device: torch.device, even: bool) -> str | None:
    """Why PyTorch's fused symmetric-memory operators cannot run over this group, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it needs NVIDIA GPUs, and the tensors are on {device.type}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs NVLink multicast (Hopper or later)"
    if group.size() > torch.cuda.device_count():
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


def all_gather_matmul(x: Tensor, weights: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """All-gather ``x [b, s, in]`` along the sequence and multiply it by each ``weight [out, in]``, fused."""
    _, outs = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t() for w in weights], 1, group.group_name)
    return list(outs)


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """``x [b, t, in] @ weight [in, out]``, summed over the ranks and scattered along the sequence, fused."""
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 1, group.group_name)
    return y
