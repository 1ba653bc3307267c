"""Fetches rows of other ranks in one uneven all-to-all. All ranks know which rows each rank needs, and where they are.

A row belongs to an item and to a batch row. The items of ``halo`` are tokens, the items of ``by_states`` are segments:
the tokens of a rank that follow one another in the sequence. A document is cut where a segment ends.

Shapes: b batch, s tokens of this rank, n items of this rank, w elements of a row, m rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..base.cache import cached_tensors, upload
from ..comm.collectives import start_all_to_all
from ..comm.p2p import Link, call, new_message
from ..kernels.base import accumulator
from ..masks.mask import Mask
from ..placement.layout import Assigned, Layout, Positions, TokenLayout, shard_ranges

Value = TypeVar("Value")


@dataclass(frozen=True)
class RowPlan:
    """Which rows a rank sends and receives, and which ones it needs.

    Attributes:
        sends, receives: the number of rows, for each rank.
        sent: the rows that are sent, one rank's after another's, as indices into this rank's rows; int64.
        index: the rows of the result, int64 [m], as indices into this rank's rows, the received rows and a row of
            zeros, one after another.
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    sent: Tensor
    index: Tensor

    @property
    def nbytes(self) -> int:
        return self.sent.nbytes + self.index.nbytes

    def on(self, device: torch.device) -> RowPlan:
        return RowPlan(self.sends, self.receives, upload(self.sent, device), upload(self.index, device))


def fetch_rows(rows: Tensor, plan: RowPlan, link: Link | None, no_row: Tensor | None = None) -> Tensor:
    """``rows [n * b, w]`` of this rank to ``[m, w]``, in a call of the ranks.

    ``no_row [1, w]`` is the result where a rank needs no row; None is zeros.
    """
    return start_fetch(rows, plan, link, no_row)()


def start_fetch(rows: Tensor, plan: RowPlan, link: Link | None, no_row: Tensor | None = None) -> Callable[[], Tensor]:
    """Start ``fetch_rows``; the function that is returned waits for the result."""
    width = rows.shape[1]
    message = new_message(sum(plan.sends) * width, rows, link)
    torch.index_select(rows, 0, plan.sent, out=message.view(len(plan.sent), width))
    wait = _start_exchange(message, plan.sends, plan.receives, width, link)
    last = rows.new_zeros(1, width) if no_row is None else no_row
    return lambda: torch.cat([rows, *wait(), last]).index_select(0, plan.index)


class FetchRows(torch.autograd.Function):
    """``fetch_rows``, as a call of its own. Backward returns gradients to their owners in float32."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: RowPlan, link: Link | None, no_row: Tensor | None = None) -> Tensor:
        ctx.plan, ctx.link, ctx.count = plan, link, len(rows)
        with call(link and link.ranks, "rows", rows.shape[1], rows.element_size()):
            return fetch_rows(rows, plan, link, no_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        plan, link, width, total = ctx.plan, ctx.link, grad.shape[1], ctx.count + sum(ctx.plan.receives)
        gradients = grad.new_zeros(total + 1, width, dtype=accumulator(grad.dtype))
        gradients.index_add_(0, plan.index, grad.to(gradients.dtype))
        with call(link and link.ranks, "gradients of rows", width, gradients.element_size()):
            message = new_message(sum(plan.receives) * width, gradients, link)
            message.copy_(gradients[ctx.count : total].flatten())
            returned = _start_exchange(message, plan.receives, plan.sends, width, link)()
        own = gradients[: ctx.count]
        own.index_add_(0, plan.sent, torch.cat([own[:0], *returned]))
        return own.to(grad.dtype), None, None, None


def _start_exchange(
    message: Tensor, sends: Sequence[int], receives: Sequence[int], width: int, link: Link | None
) -> Callable[[], list[Tensor]]:
    received, pending = start_all_to_all(message, [n * width for n in sends], [n * width for n in receives], link)

    def wait() -> list[Tensor]:
        pending.wait()
        return [part.view(n, width) for part, n in zip(received, receives, strict=True)]

    return wait


class JoinBackward(torch.autograd.Function):
    """``x``. Backward also runs the backward of ``other``, with a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.like = other.new_empty(()).expand(other.shape)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.zeros_like(ctx.like)


@dataclass(frozen=True)
class _Owners:
    """Where rows are: ``find(rank, items)`` is the index of each item on a rank, or -1."""

    rank: int
    ranks: int
    batch: int
    find: Callable[[int, Tensor], Tensor]
    count: int  # items of this rank

    def plan(self, wanted: Sequence[Tensor], needed: Tensor) -> RowPlan:
        """The plan of this rank.

        Args:
            wanted: for each rank the keys ``item * batch + row`` that it needs from other ranks, increasing.
            needed: the keys of the result's rows, int64 [m]; -1 for a row of zeros.
        """
        sent, received = [], []
        for peer, keys in enumerate(wanted):
            items = keys.div(self.batch, rounding_mode="floor")
            index = self.find(self.rank, items)
            own = (keys % self.batch * self.count + index)[index >= 0]
            sent.append(own if peer != self.rank else own[:0])
        mine = wanted[self.rank]
        items = mine.div(self.batch, rounding_mode="floor")
        for peer in range(self.ranks):
            found = self.find(peer, items) >= 0
            received.append(mine[found] if peer != self.rank else mine[:0])
        order = torch.cat(received)
        by_key, places = order.sort()
        index = self.find(self.rank, needed.div(self.batch, rounding_mode="floor"))
        total = self.count * self.batch
        at = torch.searchsorted(by_key, needed).clamp(max=max(len(by_key) - 1, 0))
        remote = total + places[at] if len(places) else torch.zeros_like(needed)
        rows = torch.where(index >= 0, needed % self.batch * self.count + index, remote)
        rows = torch.where(needed < 0, total + len(order), rows)
        return RowPlan(tuple(map(len, sent)), tuple(map(len, received)), torch.cat(sent), rows)


def _find_positions(held: Positions, x: Tensor) -> Tensor:
    index = held.counts_below(x.clamp(min=0))
    return torch.where((x >= 0) & (held.counts_below(x.clamp(min=0) + 1) > index), index, -1)


def _segments(held: Positions) -> Tensor:
    """First and one past the last position of each segment, int64 ``[segments, 2]``."""
    parts = [torch.empty(0, 2, dtype=torch.int64, device="cpu")]
    for stripe in held.stripes:
        block = stripe.count if stripe.block >= stripe.stride else stripe.block
        index = torch.arange(0, stripe.count, block, device="cpu")
        start = stripe.start + index.div(stripe.block, rounding_mode="floor") * stripe.stride
        parts.append(torch.stack([start, start + (stripe.count - index).clamp(max=block)], 1))
    return torch.cat(parts)


def _cached(name: str, mask: Mask, key: tuple[Hashable, ...], device: torch.device, make: Callable[[], Value]) -> Value:
    """``make()``, kept as long as ``mask``; or as one of the last values if the mask is full, which lives for ever."""
    owner = mask if mask.rules else None
    return cached_tensors((name, id(owner), *key), device, make, owner)


def _held(tokens: TokenLayout) -> list[Positions]:
    return [tokens.tensor_positions(rank)[0] for rank in range(tokens.ranks)]


def _document_starts(mask: Mask) -> list[Tensor]:
    """For each batch row, or for all of them, the positions at which a document begins."""
    return [torch.tensor(starts, dtype=torch.int64, device="cpu") for starts in mask.starts]


def _begin(starts: Tensor, positions: Tensor) -> Tensor:
    return starts[torch.searchsorted(starts, positions.contiguous(), right=True) - 1]


def _keys(by_row: Sequence[Tensor], batch: int) -> Tensor:
    """Increasing keys ``item * batch + row``, from the items of each batch row, or of all of them."""
    if len(by_row) == 1:
        by_row = [by_row[0]] * batch
    keys = [items.unique() * batch + row for row, items in enumerate(by_row)]
    return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *keys]).sort().values


@dataclass(frozen=True)
class HaloPlan:
    """The rows of ``halo``: all runs of this rank one after another, each behind the ``width`` rows before the run.

    Attributes:
        rows: the result has the rows ``[b * length]``.
        length: for each batch row.
        outputs: where the outputs of this rank's tokens are among ``[b * (length - width)]`` outputs, int64 [b * s].
    """

    rows: RowPlan
    length: int
    outputs: Tensor

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.outputs.nbytes


def halo_plan(tokens: TokenLayout, rank: int, mask: Mask, batch: int, width: int, device: torch.device) -> HaloPlan:
    def make() -> HaloPlan:
        held, starts = _held(tokens), _document_starts(mask)
        offsets = torch.arange(-width, 0, device="cpu")

        def before(positions: Tensor, begin: Tensor) -> Tensor:
            """The ``width`` positions before each position; -1 before the document. [n, width]"""
            found = positions[:, None] + offsets
            return torch.where(found >= begin[:, None], found, -1)

        wanted = []
        for positions in held:
            first = _segments(positions)[:, 0]
            rows = [before(first, _begin(row, first)).flatten() for row in starts]
            wanted.append(_keys([x[(x >= 0) & (_find_positions(positions, x) < 0)] for x in rows], batch))
        own = held[rank].tensor(torch.device("cpu"))
        by_row, places = [], []
        for row in starts:
            begin = _begin(row, own)
            is_first = own == begin
            is_first[1:] |= own[1:] != own[:-1] + 1
            is_first[:1] = True
            place = torch.arange(len(own), device="cpu") + width * is_first.cumsum(0)
            needed = own.new_full((len(own) + width * int(is_first.sum()),), -1)
            needed[place] = own
            needed[place[is_first][:, None] + offsets] = before(own[is_first], begin[is_first])
            by_row.append(needed)
            places.append(place - width)
        length = max(width + 1, *map(len, by_row))
        all_rows = torch.arange(batch, device="cpu")[:, None]
        padded = torch.stack([torch.nn.functional.pad(x, (0, length - len(x)), value=-1) for x in by_row])
        keys = torch.where(padded < 0, -1, padded * batch + all_rows)  # [b, length]
        owners = _Owners(rank, tokens.ranks, batch, lambda r, x: _find_positions(held[r], x), len(own))
        outputs = (torch.stack(places) + all_rows * (length - width)).flatten()
        return HaloPlan(owners.plan(wanted, keys.flatten()).on(device), length, upload(outputs, device))

    return _cached("halo", mask, (tokens, rank, batch, width), device, make)


def shift_plan(
    tokens: TokenLayout, rank: int, mask: Mask, batch: int, by: tuple[int, ...], device: torch.device
) -> RowPlan:
    """For each step of ``by`` and each of this rank's tokens, the row so many positions later in its document.

    The result has the rows ``[len(by) * b * s]``.
    """

    def make() -> RowPlan:
        held, starts = _held(tokens), _document_starts(mask)

        def later(positions: Tensor, step: int, row: Tensor) -> Tensor:
            """The positions ``step`` after each position; -1 outside of its document."""
            found = positions + step
            inside = (found >= 0) & (found < tokens.seq_len)
            same = _begin(row, torch.where(inside, found, positions)) == _begin(row, positions)
            return torch.where(inside & same, found, -1)

        def at_borders(positions: Positions, step: int) -> Tensor:
            """The positions of a rank for which the row ``step`` later may be another rank's: at ends of segments."""
            first, end = _segments(positions).unbind(1)
            count = (end - first).clamp(max=abs(step))
            begin = end - count if step > 0 else first
            index = torch.arange(int(count.sum()), device="cpu")
            return (begin - count.cumsum(0) + count).repeat_interleave(count) + index

        wanted = []
        for positions in held:
            borders = [at_borders(positions, step) for step in by]
            rows = [torch.cat([later(x, step, row) for x, step in zip(borders, by, strict=True)]) for row in starts]
            wanted.append(_keys([x[(x >= 0) & (_find_positions(positions, x) < 0)] for x in rows], batch))
        own = held[rank].tensor(torch.device("cpu"))
        found = torch.stack([torch.stack([later(own, step, row) for row in starts]) for step in by])
        all_rows = torch.arange(batch, device="cpu")[:, None]
        keys = torch.where(found < 0, -1, found * batch + all_rows)  # [len(by), b, s]
        owners = _Owners(rank, tokens.ranks, batch, lambda r, x: _find_positions(held[r], x), len(own))
        return owners.plan(wanted, keys.flatten()).on(device)

    return _cached("shift", mask, (tokens, rank, batch, by), device, make)


@dataclass(frozen=True)
class WindowPlan:
    """The rows of this rank's windows. Windows of ``size`` tokens follow one another from the start of the sequence.

    Attributes:
        rows: the result has the rows ``[b * len(windows) * size]``.
        windows: the windows of the result, int64: this rank's, and those before each run of them.
        own: where this rank's windows are among them, int64.
    """

    rows: RowPlan
    windows: Tensor
    own: Tensor

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.windows.nbytes + self.own.nbytes


def window_layout(tokens: TokenLayout, size: int) -> Layout:
    """Which windows each rank computes: those that end in its tokens, or where tokens alternate, contiguous windows."""
    if tokens.layout == "striped":
        return "contiguous"
    ranges = [shard_ranges(tokens.seq_len, tokens.ranks, rank, tokens.layout) for rank in range(tokens.ranks)]
    return Assigned(tuple(tuple(range(r.start // size, r.stop // size) for r in of_rank) for of_rank in ranges))


def window_plan(tokens: TokenLayout, rank: int, batch: int, size: int, before: int, device: torch.device) -> WindowPlan:
    """``before``: how many windows before its own each run of windows has."""

    def make() -> WindowPlan:
        held, layout, offsets = _held(tokens), window_layout(tokens, size), torch.arange(size, device="cpu")
        runs = [shard_ranges(tokens.seq_len // size, tokens.ranks, peer, layout) for peer in range(tokens.ranks)]

        def needed(ranges: Iterable[range], more: int = before) -> Tensor:
            """Windows, and ``more`` before each of their runs."""
            found = (range(max(0, r.start - more), r.stop) for r in ranges if r)
            return torch.tensor([i for r in found for i in r], dtype=torch.int64, device="cpu")

        def tokens_of(windows: Tensor) -> Tensor:
            return (windows[:, None] * size + offsets).flatten()

        first = runs  # which windows, and the windows before, have tokens of other ranks
        if tokens.layout != "striped":  # where tokens alternate, all windows; else the first one that ends in a run
            first = [
                tuple(range(r.start // size, min(r.start // size + 1, r.stop // size)) for r in of_rank)
                for of_rank in (
                    shard_ranges(tokens.seq_len, tokens.ranks, x, tokens.layout) for x in range(tokens.ranks)
                )
            ]
        wanted = [
            _keys([x[_find_positions(y, x) < 0]], batch)
            for x, y in zip((tokens_of(needed(of_rank)) for of_rank in first), held, strict=True)
        ]
        every = needed(runs[rank])
        keys = tokens_of(every) * batch + torch.arange(batch, device="cpu")[:, None]  # [b, windows * size]
        owners = _Owners(rank, tokens.ranks, batch, lambda r, x: _find_positions(held[r], x), len(held[rank]))
        own = torch.isin(every, needed(runs[rank], 0)).nonzero().flatten()
        rows = owners.plan(wanted, keys.flatten()).on(device)
        return WindowPlan(rows, upload(every, device), upload(own, device))

    return cached_tensors(("windows", tokens, rank, batch, size, before), device, make)


@dataclass(frozen=True)
class EqualRuns:
    """Runs of tokens, each inside one document, in groups of equal length.

    Attributes:
        index: for each group, the tokens of its runs, int64 [runs, length], as indices into ``[b * s]`` tokens.
        runs: the (batch row, first token) of every run, in the order of the groups.
        inverse: where each token is among the tokens of all groups, int64 [b * s].
    """

    index: tuple[Tensor, ...]
    runs: tuple[tuple[int, int], ...]
    inverse: Tensor

    @property
    def nbytes(self) -> int:
        return self.inverse.nbytes + sum(x.nbytes for x in self.index) + 200 * (len(self.runs) + 1)


def _group(firsts: Sequence[Tensor], length: int, batch: int, device: torch.device, apart: set[Any]) -> EqualRuns:
    """Groups of the runs that begin at the tokens ``firsts`` of each batch row, or of all of them.

    Runs in ``apart``, as (batch row, first token), are in other groups than the rest.
    """
    by_length: dict[tuple[int, bool], list[tuple[int, int]]] = {}
    if not length:  # of a rank without tokens, which gets one token of zeros
        by_length[1, False], length = [(row, 0) for row in range(batch)], 1
        firsts = []
    for row in range(batch if firsts else 0):
        first = firsts[row % len(firsts)].tolist()
        for a, b in zip(first, [*first[1:], length], strict=True):
            by_length.setdefault((b - a, (row, a) in apart), []).append((row, a))
    index = []
    for (tokens, _), of_length in by_length.items():
        start = torch.tensor([row * length + a for row, a in of_length], dtype=torch.int64, device="cpu")
        index.append(start[:, None] + torch.arange(tokens, device="cpu"))
    order = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(x.flatten() for x in index)])
    runs = tuple(run for each in by_length.values() for run in each)
    return EqualRuns(tuple(upload(x, device) for x in index), runs, upload(order.argsort(), device))


def document_groups(tokens: TokenLayout, mask: Mask, batch: int, device: torch.device) -> EqualRuns | None:
    """The documents of the whole sequence; None if it is one document."""
    length = tokens.seq_len

    def make() -> EqualRuns:
        starts = [x[x < length] for x in _document_starts(mask)]
        if not length or (len(starts) == 1 and len(starts[0]) == 1):
            return EqualRuns((), (), torch.empty(0, dtype=torch.int64, device=device))
        return _group(starts, length, batch, device, set())

    groups = _cached("documents", mask, (length, batch), device, make)
    return groups if groups.index else None


@dataclass(frozen=True)
class StatePlan:
    """The runs of ``by_states`` and what is sent between ranks.

    Attributes:
        groups: the runs of this rank's tokens. A run before which there is a part of its document is in another group
            than the rest.
        last: of each segment and batch row, the run whose summary is sent, int64 [b * segments].
        rows: the result has the summaries of the parts before runs, step by step: in step k the k-th part of each of
            the first ``steps[k]`` runs that have parts before them. Those with the most parts come first.
        steps: decreasing.
        continues: for each group, where its runs are among the runs that have parts before them, int64; None if nothing
            is before them.
    """

    groups: EqualRuns
    last: Tensor
    rows: RowPlan
    steps: tuple[int, ...]
    continues: tuple[Tensor | None, ...]

    @property
    def nbytes(self) -> int:
        indices = [x.nbytes for x in self.continues if x is not None]
        return self.groups.nbytes + self.last.nbytes + self.rows.nbytes + sum(indices)


def state_plan(tokens: TokenLayout, rank: int, mask: Mask, batch: int, device: torch.device) -> StatePlan:
    def make() -> StatePlan:
        held, starts = _held(tokens), _document_starts(mask)
        by_rank = [_segments(positions) for positions in held]
        every = torch.cat(by_rank)
        order = every[:, 0].argsort()
        ids = order.argsort().split([len(x) for x in by_rank])  # of each rank's segments, in order of the sequence
        begins = every[order, 0]

        def find(peer: int, x: Tensor) -> Tensor:
            if not len(ids[peer]):
                return torch.full_like(x, -1)
            at = torch.searchsorted(ids[peer], x).clamp(max=len(ids[peer]) - 1)
            return torch.where(ids[peer][at] == x, at, -1)

        def parts_before(peer: int, row: Tensor) -> list[range]:
            """For each segment of ``peer``, the segments before it that hold tokens of the same document."""
            first = by_rank[peer][:, 0]
            origin = torch.searchsorted(begins, _begin(row, first).contiguous(), right=True) - 1
            return [range(a, b) for a, b in zip(origin.tolist(), ids[peer].tolist(), strict=True)]

        wanted = []
        for peer in range(tokens.ranks):
            items = [torch.tensor([i for r in parts_before(peer, row) for i in r], dtype=torch.int64) for row in starts]
            wanted.append(_keys([x[find(peer, x) < 0] for x in items], batch))
        own = held[rank].tensor(torch.device("cpu"))
        segment_starts = _first_tokens(held[rank], by_rank[rank])
        firsts = []
        for row in starts:
            is_first = own == _begin(row, own)
            is_first[1:] |= own[1:] != own[:-1] + 1
            is_first[:1] = True
            firsts.append(is_first.nonzero().flatten())
        chains: list[tuple[tuple[int, int], range]] = []
        for i in range(batch):
            for first, parts in zip(segment_starts, parts_before(rank, starts[i % len(starts)]), strict=True):
                if len(parts):
                    chains.append(((i, first), parts))
        chains.sort(key=lambda chain: -len(chain[1]))
        at = {run: i for i, (run, _) in enumerate(chains)}
        groups = _group(firsts, len(own), batch, device, set(at))
        steps, keys = [], []
        for k in range(len(chains[0][1]) if chains else 0):
            active = [parts[k] * batch + run[0] for run, parts in chains if len(parts) > k]
            steps.append(len(active))
            keys += active
        run_of = {run: i for i, run in enumerate(groups.runs)}
        ends = [*segment_starts[1:], len(own)][: len(segment_starts)]
        last = []
        for i in range(batch):
            first_tokens = firsts[i % len(firsts)]
            last += [run_of[i, int(first_tokens[torch.searchsorted(first_tokens, end) - 1])] for end in ends]
        owners = _Owners(rank, tokens.ranks, batch, find, len(by_rank[rank]))
        plan = owners.plan(wanted, torch.tensor(keys, dtype=torch.int64, device="cpu")).on(device)
        continues, start = [], 0
        for index in groups.index:
            runs, start = groups.runs[start : start + len(index)], start + len(index)
            chained = [at[run] for run in runs if run in at]
            continues.append(upload(torch.tensor(chained, dtype=torch.int64), device) if chained else None)
        last_runs = upload(torch.tensor(last, dtype=torch.int64, device="cpu"), device)
        return StatePlan(groups, last_runs, plan, tuple(steps), tuple(continues))

    return _cached("states", mask, (tokens, rank, batch), device, make)


def _first_tokens(held: Positions, segments: Tensor) -> list[int]:
    """The index of the first token of each segment among the tokens of its rank."""
    found: list[int] = held.counts_below(segments[:, 0].clone()).tolist()
    return found
