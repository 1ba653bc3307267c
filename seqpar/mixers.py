"""Convolutions, linear attention and state-space layers over a sharded sequence: three functions that communicate
around code of yours, which stays as it is on one device.

* ``by_heads`` gives the function the whole sequence of some heads: the all-to-all of Ulysses around any function.
* ``halo`` gives the function the rows before this rank's tokens: for causal convolutions.
* ``by_states`` computes each run of consecutive tokens from the state of the tokens before it: for recurrences.

Documents of a ``mask`` are kept apart. A causal mixer needs nothing else of the mask: padding at the end of a row
belongs to its last document under ``Mask.padding``, and other padding is a document of its own.

Backward communicates, as the backward of attention does: every rank must run it. Gradients follow the package's
convention, so average the gradients of weights over the ranks (``seqpar.sync_gradients``, DDP, FSDP).

Shapes: b batch, s tokens of this rank, t tokens of the sequence, h heads, n heads that several of the h heads share,
d and e elements of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .base.cache import cached_tensors, upload
from .base.checks import check_dense, check_int, no_compile
from .comm.p2p import Link, call, links_of
from .comm.waiting import operation
from .kernels.base import accumulator
from .masks.mask import Mask, check_rows
from .placement.heads import Heads, kv_index
from .placement.placement import Placement
from .sharding.sharding import Sharding
from .sharding.spec import AttentionSpec
from .strategies.autograd import with_gradient
from .strategies.head_exchange import HeadChunk, HeadExchange, head_exchange_of
from .strategies.head_messages import split_heads
from .strategies.row_exchange import (
    EqualRuns,
    FetchRows,
    HaloPlan,
    JoinBackward,
    RowPlan,
    StatePlan,
    document_groups,
    halo_plan,
    state_plan,
)

__all__ = ["by_heads", "by_states", "halo"]

_ALL_TO_ALL, _LOCAL = AttentionSpec("ulysses"), AttentionSpec("local")
_ONE_DOCUMENT = Mask.full()
Tensors = Tensor | Sequence[Tensor]


def by_heads(
    fn: Callable[..., Any], x: Tensors, kv: Tensors = (), *, sharding: Sharding, mask: Mask | None = None
) -> Any:
    """Call ``fn`` with all tokens of this rank's heads, and return its result for this rank's tokens of all heads.

    Heads are divided as evenly as possible. With more ranks than heads, the ranks that are left over compute the last
    head too, and their results are not used.

    Args:
        fn: ``fn(heads, *x, *kv)`` returns a tensor ``[b, t, h, e]`` or a tuple of these. ``heads`` is the slice of the
            h heads that this rank computes, for weights with one entry per head: ``A[heads]``. If the mask has several
            documents, ``fn`` is called for the documents of each length, which are the batch rows then.
        x: a tensor ``[b, s, h, d]`` or several, which may differ in d and dtype; they travel in one message, and no
            value is rounded. Channels that do not depend on one another are heads with d = 1.
        kv: tensors ``[b, s, n, d]`` of heads that several heads of ``x`` read, such as the keys of grouped values or
            the groups of Mamba-2: head i reads head ``i // (h / n)``. ``fn`` gets the heads that its heads read. If
            some of these are read more often than others, ``fn`` gets one for each of its heads.
        sharding: which tokens each rank holds.
        mask: documents that are kept apart; None: the sequence is one document.

    Returns:
        The result of ``fn``, with s instead of t tokens and all h heads.

    Raises:
        TypeError: a tensor is not a floating-point tensor, or the result of ``fn`` is not made of tensors.
        ValueError: the tensors do not fit together or do not fit the sharding, or n does not divide h.

    Bytes sent per rank of P, N tokens, w bytes of a token in its heads of ``x``, ``kv`` and the result: (P-1)/P^2 * N *
    w if P divides h and n, forward and backward. A head of ``kv`` that r ranks read is sent to each of them, and its r
    partial gradients are returned in float32. Source: the all-to-all of Jacobs et al., DeepSpeed Ulysses, 2023.
    """
    xs, kvs = _tuple_of("x", x), _tuple_of("kv", kv)
    _check({"x": xs, "kv": kvs}, sharding, mask, dims=4)
    heads, kv_heads = xs[0].shape[2], kvs[0].shape[2] if kvs else 1
    for name, tensors, count in (("x", xs, heads), ("kv", kvs, kv_heads)):
        if heads % max(kv_heads, 1) or not heads or not kv_heads or {y.shape[2] for y in tensors} - {count}:
            name = "kv" if heads and kv_heads and heads % kv_heads else name
            raise ValueError(
                f"{name}: x has {[y.shape[2] for y in xs]} heads and kv has {[y.shape[2] for y in kvs]}; all tensors "
                "of x have h heads, all of kv have n, and n divides h"
            )
    exchange, groups = _exchange_of(Heads.of_model(heads, kv_heads), xs[0], sharding, mask)
    shards = _to_heads(exchange, xs, kvs)
    own = slice(0, heads) if exchange is None else exchange.slice
    single, results = _in_groups(lambda *y: fn(own, *y), shards, groups)
    for y in results:
        if y.dim() != 4 or y.shape[:3] != shards[0].shape[:3]:
            raise ValueError(
                f"fn: its result has the shape {tuple(y.shape)} for {shards[0].shape[1]} tokens of "
                f"{shards[0].shape[2]} heads; expected [batch, tokens, heads, any]"
            )
    results = _to_sequence(exchange, results)
    return results[0] if single else results


def halo(
    fn: Callable[[Tensor], Tensor], x: Tensor, width: int, *, sharding: Sharding, mask: Mask | None = None
) -> Tensor:
    """Call ``fn`` with this rank's rows of ``x`` and the ``width`` rows before them, which are other ranks'.

    Args:
        fn: takes ``[b, width + m, ...]`` and returns ``[b, m, ...]``: its output for a row depends on this row and on
            the ``width`` rows before it. A causal convolution with a kernel of W positions and without padding is such
            a function, with ``width = W - 1``. ``fn`` is called once: this rank's runs of consecutive tokens follow one
            another, each behind the rows before it.
        x: ``[b, s, ...]``, floating point.
        width: how many rows before its own an output depends on. Rows before the start of a document are zeros.
        sharding: which tokens each rank holds. Under "striped" every token is a run of its own; ``by_heads`` sends
            less then.
        mask: documents that are kept apart; None: the sequence is one document.

    Returns:
        The outputs of this rank's rows, ``[b, s, ...]``.

    Raises:
        TypeError: ``x`` is not a floating-point tensor, or ``width`` is not an int.
        ValueError: ``x`` does not fit the sharding or the mask, ``width`` is negative, or the result of ``fn`` does not
            have m rows.

    Bytes sent per rank, w bytes of a row: b * w for each row of this rank that another rank needs; with long runs and
    one document b * width * w for each run that another rank continues. Backward sends the gradients of these rows in
    float32.
    """
    check_int("width", width, 0)
    _check({"x": _tuple_of("x", x)}, sharding, mask, dims=2)
    extended, plan = _extend(x, width, sharding, _ONE_DOCUMENT if mask is None else mask)
    y = fn(extended)
    if not isinstance(y, Tensor) or y.shape[:2] != (x.shape[0], plan.length - width):
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(
            f"fn: it returned {got} for {plan.length} rows; expected a tensor [batch, {plan.length - width}, ...], "
            f"without outputs for the first width={width} rows"
        )
    out: Tensor = y.flatten(0, 1).index_select(0, plan.outputs).unflatten(0, x.shape[:2])
    return out


def by_states(
    scan: Callable[..., tuple[Tensors, tuple[Tensor, ...]]],
    merge: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]],
    correct: Callable[..., Tensor],
    x: Tensors,
    *,
    sharding: Sharding,
    mask: Mask | None = None,
) -> Tensor:
    """Compute a recurrence run by run: first each run from an empty state, then correct it by the state before it.

    A run is tokens of this rank that follow one another in the sequence, in one document. A run is summarized by a few
    tensors, such as the decay over the run and the state at its end. A summary is sent only to ranks that hold later
    tokens of the same document.

    For a decaying sum ``state = decay * state + x``::

        def scan(x, log_decay):                       # [r, m, d], [r, m, d]
            decay = log_decay.cumsum(1)
            sums = (x * (-decay).exp()).cumsum(1) * decay.exp()
            return (sums, decay), (decay[:, -1], sums[:, -1])
        def merge(first, second):                     # two runs, one after the other
            return first[0] + second[0], second[0].exp() * first[1] + second[1]
        def correct(sums, decay, before):             # before: (decay, state) or None
            return sums if before is None else sums + decay.exp() * before[1][:, None]

    Args:
        scan: takes tensors ``[r, m, ...]`` of r runs of m tokens, and returns ``(local, summary)``: a tensor
            ``[r, m, ...]`` or several, for ``correct``, and a tuple of tensors ``[r, ...]``, best in float32.
        merge: the summary of two runs, one after the other, as one run.
        correct: ``correct(*local, before)`` returns the outputs ``[r, m, ...]``. ``before`` is the summary of
            everything before the runs in their document; None if they begin a document.
        x: a tensor ``[b, s, ...]`` or several, floating point.
        sharding: which tokens each rank holds. Under "striped" every token is a run of its own; use ``by_heads`` there.
        mask: documents that are kept apart; None: the sequence is one document.

    Returns:
        ``[b, s, ...]``.

    Raises:
        TypeError: a tensor is not a floating-point tensor.
        ValueError: the tensors do not fit together, the sharding or the mask.

    Bytes sent per rank, c bytes of a summary of one row: b * c for each pair of a run of this rank that its document
    goes on after and a rank that holds a later part of the document. Backward sends the same in float32.
    """
    xs = _tuple_of("x", x)
    _check({"x": xs}, sharding, mask, dims=2)
    shape = xs[0].shape[:2]
    if not shape[0]:
        raise ValueError(
            f"x: shape {tuple(xs[0].shape)} has no batch rows, so ``scan`` has nothing to scan; skip the call"
        )
    plan, link, xs = _plan_states(xs, sharding, _ONE_DOCUMENT if mask is None else mask)
    rows = [y.flatten(0, 1) for y in xs]
    scanned = [scan(*(_runs(y, index) for y in rows)) for index in plan.groups.index]
    summaries = [torch.cat(same) for same in zip(*(summary for _, summary in scanned), strict=True)]  # [runs, ...]
    shapes, dtypes = [y.shape[1:] for y in summaries], [y.dtype for y in summaries]
    table = torch.cat([y.flatten(1) for y in _promoted(summaries)], 1).index_select(0, plan.last)
    fetched = fetch(table, plan.rows, link)

    def split(row: Tensor) -> tuple[Tensor, ...]:
        columns = row.split_with_sizes([shape.numel() for shape in shapes], 1)
        return tuple(
            y.unflatten(1, shape).to(dtype) if shape else y.squeeze(1).to(dtype)
            for y, shape, dtype in zip(columns, shapes, dtypes, strict=True)
        )

    state: tuple[Tensor, ...] = ()
    finished: list[tuple[Tensor, ...]] = []  # of the chains with the fewest parts first
    for part in fetched.split_with_sizes(list(plan.steps)):
        count = len(part)
        if not state:
            state = split(part)
            continue
        if count < len(state[0]):
            finished.append(tuple(y[count:] for y in state))
        state = merge(tuple(y[:count] for y in state), split(part))
    before = [torch.cat(same) for same in zip(state, *reversed(finished), strict=True)] if state else []
    outs = []
    for (local, _), at in zip(scanned, plan.continues, strict=True):
        tensors = (local,) if isinstance(local, Tensor) else local
        outs.append(correct(*tensors, None if at is None else tuple(y.index_select(0, at) for y in before)))
    every = torch.cat([y.flatten(0, 1) for y in outs]).index_select(0, plan.groups.inverse)
    out: Tensor = _join(every, fetched)
    out = out.unflatten(0, xs[0].shape[:2])  # [b, s or 1, ...]
    return out[:, : shape[1]]


def _tuple_of(name: str, x: Any) -> tuple[Tensor, ...]:
    tensors = (x,) if isinstance(x, Tensor) else tuple(x)
    for y in tensors:
        if not isinstance(y, Tensor) or not y.is_floating_point():
            got = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(f"{name}: expected floating-point tensors, got {got}")
    return tensors


@no_compile
def _check(named: dict[str, tuple[Tensor, ...]], sharding: Sharding, mask: Mask | None, dims: int) -> None:
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding={sharding!r}: expected a seqpar.Sharding, as Sharding(seq_len, layout) makes one")
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(f"mask={type(mask).__name__}: expected a seqpar.Mask, such as Mask.documents(cu_seqlens)")
    tensors = [(name, y) for name, of_name in named.items() for y in of_name]
    if not named["x"]:
        raise ValueError("x: expected at least one tensor")
    for name, y in tensors:
        check_dense(name, y)
    batch = tensors[0][1].shape[0] if tensors[0][1].dim() else 0
    for name, y in tensors:
        if y.dim() < dims or (dims == 4 and y.dim() != 4):
            shape = "[batch, tokens, heads, any]" if dims == 4 else "[batch, tokens, ...]"
            raise ValueError(f"{name}: shape {tuple(y.shape)}; expected {shape}")
        if y.shape[0] != batch:
            raise ValueError(f"{name}: {y.shape[0]} batch rows beside {batch} of x; give all tensors the same")
        sharding.check_local(y.shape[1])
    if mask is not None:
        check_rows(mask, *tensors[0])
        mask.check_length(sharding.seq_len)


def link_of(sharding: Sharding, like: Tensor) -> tuple[Placement, Link | None]:
    """The placement of an exchange between all ranks that share the sequence, and their link."""
    if sharding.sequence_group is None:
        placement = sharding.place(_LOCAL)
    else:  # tokens that are sharded over tp too are shared by these ranks alike
        placement = sharding.place(_ALL_TO_ALL, sharding.sequence_ranks)
    return placement, links_of(placement, like.device).ulysses


class Exchange:
    """The all-to-all of ``by_heads``. Ranks without heads of their own compute the last head too."""

    def __init__(self, exchange: HeadExchange) -> None:
        self.exchange, self.full = exchange, exchange.full_chunk
        last = self.full.tensor_heads[range(len(exchange.heads.queries) - 1, len(exchange.heads.queries))]
        by_rank = tuple(heads if heads.queries else last for heads in self.full.by_rank)
        self.chunk = HeadChunk(exchange.rank, by_rank, exchange.heads)

    @cached_property
    def slice(self) -> slice:
        return slice(self.chunk.heads.queries.start, self.chunk.heads.queries.stop)

    def repeated(self, device: torch.device) -> Tensor | None:
        """For each of this rank's heads, the head of kv that it reads, int64 [h]; None if kv need not be repeated."""
        index = kv_index(self.chunk.heads)
        if index is None:
            return None
        key = "repeated heads", *index
        return cached_tensors(key, device, lambda: upload(torch.tensor(index, device="cpu"), device))

    @property
    def computes(self) -> int:
        return int(bool(self.full.heads.queries))

    def call(self, name: str, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """In the block, the ranks exchange messages of ``tensors [b, any, any, d]``."""
        link = self.exchange.link
        return call(link and link.ranks, name, *(y.shape[0] * y.shape[3] * y.element_size() for y in tensors))

    def to_heads(self, chunk: HeadChunk, xs: Sequence[Tensor], kvs: Sequence[Tensor]) -> list[Tensor]:
        """``[b, s, h, d]`` of all heads to ``[b, t, h, d]`` of the heads in ``chunk``."""
        bits = _as_bits([*xs, *kvs])
        x = torch.cat(bits[: len(xs)], 3) if len(xs) > 1 else bits[0]
        kv = bits[len(xs) :]
        shard = self.exchange.to_heads(chunk, x, *kv).wait().transpose(0, 1)  # [b, t, w]
        queries, of_kv = len(chunk.heads.queries), len(chunk.heads.kv)
        all_x, *all_kv = split_heads(shard, [(queries, x.shape[3]), *((of_kv, y.shape[3]) for y in kv)])
        parts = [*all_x.split_with_sizes([y.shape[3] for y in bits[: len(xs)]], 3), *all_kv]
        return [part.contiguous().view(y.dtype) for part, y in zip(parts, (*xs, *kvs), strict=True)]

    def to_sequence(self, shards: Sequence[Tensor], of_kv: bool = False) -> list[Tensor]:
        """``[b, t, h, d]`` of this rank's heads to ``[b, s, h, d]`` of all heads, or of all heads of kv."""
        heads = self.exchange.heads
        slices, count = (self.full.kv_slices, len(heads.kv)) if of_kv else (self.full.query_slices, len(heads.queries))
        if slices.overlap:  # the messages are summed
            dtype = accumulator(max((y.dtype for y in shards), key=lambda dtype: dtype.itemsize))
            bits = [y.to(dtype) for y in shards]
        else:
            bits = _as_bits(shards)
        pairs = [
            (y[:, :, : y.shape[2] * self.computes], y.new_empty(y.shape[0], self.exchange.tokens, count, y.shape[3]))
            for y in bits
        ]
        self.exchange.to_sequence(slices, *pairs).wait()
        sequence = [target for _, target in pairs]
        if slices.overlap:
            return [y.to(like.dtype) for y, like in zip(sequence, shards, strict=True)]
        return [y.view(like.dtype) for y, like in zip(sequence, shards, strict=True)]


def _as_bits(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors as views of one dtype, so that one message holds them and nothing is rounded."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) == 1:
        return list(tensors)
    unit = {1: torch.int8, 2: torch.int16, 4: torch.int32}[min(dtype.itemsize for dtype in dtypes)]
    return [x.contiguous().view(unit) for x in tensors]


class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Exchange, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.heads, ctx.count = heads, count
        with heads.call("to heads", tensors):
            shards = heads.to_heads(heads.chunk, tensors[:count], tensors[count:])
        if (index := heads.repeated(shards[0].device)) is not None:
            shards[count:] = [y.index_select(2, index) for y in shards[count:]]
        return tuple(shards)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        heads, x, kv = ctx.heads, grads[: ctx.count], list(grads[ctx.count :])
        if (index := heads.repeated(grads[0].device)) is not None:
            count = len(heads.chunk.heads.kv)
            sums = [y.new_zeros(*y.shape[:2], count, y.shape[3], dtype=accumulator(y.dtype)) for y in kv]
            kv = [total.index_add_(2, index, y.to(total.dtype)) for total, y in zip(sums, kv, strict=True)]
        with heads.call("gradients to sequence", grads):
            of_kv = heads.to_sequence(kv, of_kv=True) if kv else []
            of_x = heads.to_sequence(x)
        return None, None, *of_x, *(y.to(g.dtype) for y, g in zip(of_kv, grads[ctx.count :], strict=True))


class ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Exchange, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.heads, ctx.count = heads, shards[0].shape[2]
        with heads.call("to sequence", shards):
            return tuple(heads.to_sequence(shards))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        heads = ctx.heads
        with heads.call("gradients to heads", grads):
            shards = heads.to_heads(heads.full, grads, ())
        if not heads.computes:
            shards = [y.new_zeros(*y.shape[:2], ctx.count, y.shape[3]) for y in shards]
        return None, *shards


@no_compile
def _exchange_of(
    heads: Heads, like: Tensor, sharding: Sharding, mask: Mask | None
) -> tuple[Exchange | None, EqualRuns | None]:
    placement, link = link_of(sharding, like)
    groups = None if mask is None else document_groups(placement.tokens, mask, like.shape[0], like.device)
    if link is None:
        return None, groups
    exchange = head_exchange_of(placement, heads, 1, link)
    assert exchange is not None
    key = "by_heads", heads, link
    if key not in placement.kept:
        placement.kept[key] = Exchange(exchange)
    return placement.kept[key], groups


@no_compile
def _to_heads(heads: Exchange | None, xs: tuple[Tensor, ...], kvs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if heads is None:
        return *xs, *kvs
    with operation("by_heads"):
        shards: tuple[Tensor, ...] = ToHeads.apply(heads, len(xs), *_joined((*xs, *kvs)))
    return shards


@no_compile
def _to_sequence(heads: Exchange | None, shards: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if heads is None:
        return shards
    with operation("by_heads"):
        results: tuple[Tensor, ...] = ToSequence.apply(heads, *_joined(shards))
    return results


def _joined(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors, of which at least one requires a gradient, so that this rank takes part in the backward."""
    if any(y.requires_grad for y in tensors):
        return tensors
    first = next((i for i, y in enumerate(tensors) if y.is_floating_point() or y.is_complex()), None)
    return tuple(with_gradient(y) if i == first else y for i, y in enumerate(tensors))


def _runs(rows: Tensor, index: Tensor) -> Tensor:
    """``rows [b * t, ...]`` of the runs ``index [runs, length]``, as ``[runs, length, ...]``."""
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)  # type: ignore[no-any-return]


def _in_groups(
    fn: Callable[..., Any], tensors: tuple[Tensor, ...], groups: EqualRuns | None
) -> tuple[bool, tuple[Tensor, ...]]:
    """Whether ``fn`` returns a single tensor, and its results, for tensors ``[b, t, ...]``."""
    rows = None if groups is None else [y.flatten(0, 1) for y in tensors]
    parts = (
        [fn(*tensors)] if groups is None or rows is None else [fn(*(_runs(y, x) for y in rows)) for x in groups.index]
    )
    single = isinstance(parts[0], Tensor)
    by_group = [tuple(part) if isinstance(part, tuple | list) else (part,) for part in parts]
    if not by_group[0] or not all(isinstance(y, Tensor) for part in by_group for y in part):
        raise TypeError(f"fn: it returned {type(parts[0]).__name__}; expected a tensor or a tuple of tensors")
    if groups is None:
        return single, by_group[0]
    joined = (torch.cat([y.flatten(0, 1) for y in same]) for same in zip(*by_group, strict=True))
    shape = tensors[0].shape[:2]
    return single, tuple(y.index_select(0, groups.inverse).unflatten(0, shape) for y in joined)


@no_compile
def _extend(x: Tensor, width: int, sharding: Sharding, mask: Mask) -> tuple[Tensor, HaloPlan]:
    placement, link = link_of(sharding, x)
    plan = halo_plan(placement.tokens, placement.rank, mask, x.shape[0], width, x.device)
    rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2:].numel())
    fetched = fetch(rows, plan.rows, link, "halo")
    return fetched.view(x.shape[0], plan.length, *x.shape[2:]), plan


@no_compile
def _plan_states(
    xs: tuple[Tensor, ...], sharding: Sharding, mask: Mask
) -> tuple[StatePlan, Link | None, tuple[Tensor, ...]]:
    placement, link = link_of(sharding, xs[0])
    plan = state_plan(placement.tokens, placement.rank, mask, xs[0].shape[0], xs[0].device)
    if not sharding.seq_local:  # one token of zeros, because ``scan`` may not take tensors without tokens
        xs = tuple(torch.cat([y, y.new_zeros(y.shape[0], 1, *y.shape[2:])], 1) for y in xs)
    return plan, link, xs


@no_compile
def fetch(
    rows: Tensor, plan: RowPlan, link: Link | None, name: str = "by_states", no_row: Tensor | None = None
) -> Tensor:
    """``FetchRows``, of rows that require a gradient on every rank if they can have one."""
    with operation(name):
        fetched: Tensor = FetchRows.apply(*(_joined((rows,)) if link is not None else (rows,)), plan, link, no_row)
    return fetched


@no_compile
def _join(x: Tensor, other: Tensor) -> Tensor:
    joined: Tensor = JoinBackward.apply(x, other)
    return joined


def _promoted(tensors: list[Tensor]) -> list[Tensor]:
    dtype = tensors[0].dtype
    for y in tensors[1:]:
        dtype = torch.promote_types(dtype, y.dtype)
    return [y.to(dtype) for y in tensors]
