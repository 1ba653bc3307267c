"""The one autograd function behind every strategy: exchange heads, visit keys, exchange back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.handshake import all_gather_header
from ..kernels.base import Score, accumulator
from ..mask import Mask
from ..mesh import AttentionGroups, Ranks, parent_group
from ..schedule import SequenceSharding, Step, attention_steps
from .checkpointing import kept
from .ring import visit_backward, visit_forward
from .ulysses import Arriving, HeadExchange, HeadPart


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call, resolved: who takes part, where the tokens lie, how scores are made."""

    groups: AttentionGroups
    shards: SequenceSharding
    mask: Mask
    score: Score
    backend: str
    heads: int
    kv_heads: int
    return_lse: bool

    @property
    def ring(self) -> Ranks | None:
        return self.groups.ring

    def steps(self) -> tuple[Step, ...]:
        return attention_steps(self.mask, self.shards, self.groups.ring_rank, self.groups.gather)

    def exchange(self) -> HeadExchange | None:
        """The all-to-all around the ring, where there is one."""
        if self.groups.ulysses is None or self.groups.ulysses_size == 1 or not self.heads:
            return None  # tensor parallelism beyond the heads leaves ranks with none
        return HeadExchange(self.groups.ulysses, self.shards, self.groups.ring_rank, self.heads, self.kv_heads)

    def parts(self, exchange: HeadExchange | None) -> list[Part]:
        """The heads this rank attends with, in the parts in which they arrive."""
        group = self.heads // max(1, self.kv_heads)
        if exchange is None:
            return [Part(range(self.heads), range(self.kv_heads), group)]
        parts: list[Part] = []
        for by_rank in exchange.parts():
            brings = any(by_rank.keys)
            keys = by_rank.keys[exchange.rank] if brings else parts[-1].keys
            parts.append(Part(by_rank.queries[exchange.rank], keys, group, brings, by_rank))
        return parts


@dataclass(frozen=True)
class Part:
    """Heads that this rank attends with at once.

    Attributes:
        queries, keys: their global indices; ``group`` query heads of the whole read one key/value head.
        brings_keys: whether its keys arrive with it, and are not those of the part before.
    """

    queries: range
    keys: range
    group: int
    brings_keys: bool = True
    exchanged: HeadPart | None = None

    @property
    def by_rank(self) -> HeadPart:
        """The same part of every rank."""
        assert self.exchanged is not None
        return self.exchanged

    def attend(self, call: Call, steps: tuple[Step, ...], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp over all keys of the ring."""
        k, v = self._equal_groups(k, v)
        return visit_forward(steps, q, k, v, self._score(call), call.backend, call.ring)

    def gradients(
        self,
        call: Call,
        steps: tuple[Step, ...],
        saved: list[Tensor],
        dout: Tensor,
        dlse: Tensor | None,
        dsinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of q, k, v, not yet rounded; writes those of its heads into ``dsinks [heads]``."""
        q, k, v, out, lse = saved
        dq, dk, dv, part_dsinks = visit_backward(
            steps, dout, q, *self._equal_groups(k, v), out, lse, dlse, self._score(call), call.backend, call.ring
        )
        if dsinks is not None and part_dsinks is not None:
            dsinks[self.queries.start : self.queries.stop] = part_dsinks
        if (index := self._kv_index(k.device)) is not None:
            dk, dv = (torch.zeros_like(k, dtype=x.dtype).index_add_(2, index, x) for x in (dk, dv))
        return dq, dk, dv

    def _score(self, call: Call) -> Score:
        return call.score.heads(self.queries.start, self.queries.stop)

    def _equal_groups(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values whose heads serve equal numbers of query heads."""
        index = self._kv_index(k.device)
        return (k, v) if index is None else (k.index_select(2, index), v.index_select(2, index))

    def _kv_index(self, device: torch.device) -> Tensor | None:
        """The key/value head of each query head, where they do not form equal groups; else None."""
        index = [h // self.group - self.keys.start for h in self.queries]
        each = len(index) // max(1, len(self.keys))
        if not index or (each * len(self.keys) == len(index) and index == [i // each for i in range(len(index))]):
            return None
        return torch.tensor(index, device=device)


class SequenceParallelAttention(torch.autograd.Function):
    """``(q, k, v, sinks) -> (out, lse)`` on sequence shards; saves only its inputs, ``out`` and ``lse``.

    Around an all-to-all, heads travel in parts: one part is on its way while another is computed.

    Differentiable once: the backward communicates, and is not itself recorded.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.device_type = q.device.type
        ctx.call, ctx.shapes = call, (q.shape, k.shape)
        with torch.autocast(ctx.device_type, enabled=False):  # float32 statistics stay float32
            out, lse, saved = _forward(call, q, k, v)
        ctx.save_for_backward(*saved)
        if not call.return_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        dlse = dlse if call.return_lse else None
        with torch.autocast(ctx.device_type, enabled=False):
            return *_backward(call, ctx.saved_tensors, ctx.shapes, dout, dlse), None


def _forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, log-sum-exp, and what backward needs: of each part q, then k and v where it brings them, out and lse."""
    exchange, steps = call.exchange(), call.steps()
    parts = call.parts(exchange)
    if exchange is None:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = kept(lambda *qkv: parts[0].attend(call, steps, *qkv), q, k, v)
        return out, lse, [q, k, v, out, lse]
    out, *saved = kept(lambda *qkv: _exchange_and_attend(call, steps, exchange, parts, *qkv), q, k, v)
    lse = torch.cat(saved[-len(parts) :], 1)
    if call.return_lse:
        columns = q.new_empty(*q.shape[:3], 1, dtype=lse.dtype)
        exchange.to_sequence((lse.transpose(1, 2).unsqueeze(-1), exchange.whole.queries, columns)).wait()
        lse = columns.squeeze(-1).transpose(1, 2)
    return out, lse, saved


def _exchange_and_attend(
    call: Call, steps: tuple[Step, ...], exchange: HeadExchange, parts: list[Part], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    """The output on the sequence shard, then what ``_forward`` saves."""

    def fetch(part: Part) -> Arriving:
        keys = [(x, part.by_rank.keys) for x in (k, v)] if part.brings_keys else []
        return exchange.to_heads((q, part.by_rank.queries), *keys)

    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    saved: tuple[list[Tensor], ...] = ([], [], [], [], [])
    going: list[Arriving] = []
    coming = fetch(parts[0])
    for i, part in enumerate(parts):
        for tensors, arrived in zip(saved, coming.wait(), strict=False):
            tensors.append(arrived)
        if i + 1 < len(parts):
            coming = fetch(parts[i + 1])
        result = part.attend(call, steps, *(tensors[-1] for tensors in saved[:3]))
        going.append(exchange.to_sequence((result[0], part.by_rank.queries, out)))
        for tensors, arrived in zip(saved[3:], result, strict=True):
            tensors.append(arrived)
    for leaving in going:
        leaving.wait()
    return out, *chain.from_iterable(saved)


def _by_part(parts: list[Part], saved: Sequence[Tensor]) -> Iterator[tuple[Part, list[Tensor]]]:
    """Each part with its q, k, v, out and lse."""
    tensors, n, brought = iter(saved), len(parts), list(accumulate(part.brings_keys for part in parts))
    qs, ks, vs, outs, lses = (list(islice(tensors, count)) for count in (n, brought[-1], brought[-1], n, n))
    for i, part in enumerate(parts):
        yield part, [qs[i], ks[brought[i] - 1], vs[brought[i] - 1], outs[i], lses[i]]


def _backward(
    call: Call,
    saved: Sequence[Tensor],
    shapes: tuple[torch.Size, torch.Size],
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and the sinks."""
    exchange, steps = call.exchange(), call.steps()
    parts = call.parts(exchange)
    (q_shape, k_shape), q, k = shapes, saved[0], saved[len(parts)]
    dout = q.new_zeros(q_shape) if dout is None else dout  # every rank takes part, whether or not it has a gradient
    dsinks = None if call.score.sinks is None else call.score.sinks.new_zeros(call.heads)
    if exchange is None:
        dq, dk, dv = parts[0].gradients(call, steps, list(saved), dout.contiguous(), dlse, dsinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(k.dtype), dsinks
    dlse = _head_shard_of_dlse(call, exchange, q, q_shape, dlse)
    # Finished gradients travel in the model's dtype; where ranks hold parts of one, in float32.
    kv_dtype = accumulator(k.dtype) if exchange.shared_kv else k.dtype
    dq = q.new_empty(q_shape)
    dk, dv = (k.new_empty(k_shape, dtype=kv_dtype) for _ in range(2))
    going: list[Arriving] = []
    sums: list[Tensor] = []
    coming = exchange.to_heads((dout, parts[0].by_rank.queries))
    for i, (part, tensors) in enumerate(_by_part(parts, saved)):
        (part_dout,) = coming.wait()
        if i + 1 < len(parts):
            coming = exchange.to_heads((dout, parts[i + 1].by_rank.queries))
        first = parts[0].queries.start
        part_dlse = None if dlse is None else dlse[:, part.queries.start - first : part.queries.stop - first]
        part_dq, *dkv = part.gradients(call, steps, tensors, part_dout, part_dlse, dsinks)
        going.append(exchange.to_sequence((part_dq.to(q.dtype), part.by_rank.queries, dq)))
        sums = dkv if part.brings_keys else [x + y for x, y in zip(sums, dkv, strict=True)]
        if part.brings_keys:
            keys = part.by_rank.keys
        if i + 1 == len(parts) or parts[i + 1].brings_keys:
            finished = zip(sums, (dk, dv), strict=True)
            going.append(exchange.to_sequence(*((x.to(kv_dtype), keys, room) for x, room in finished)))
    for leaving in going:
        leaving.wait()
    return dq, dk.to(k.dtype), dv.to(k.dtype), dsinks


class _LseGradient(NamedTuple):
    """Whether a rank has a gradient of lse."""

    has_dlse: bool


def _head_shard_of_dlse(
    call: Call, exchange: HeadExchange, q: Tensor, q_shape: torch.Size, dlse: Tensor | None
) -> Tensor | None:
    """The gradient of lse for this rank's heads, if any rank has one."""
    if not call.return_lse or not any(
        header.has_dlse
        for header in all_gather_header(lambda: _LseGradient(dlse is not None), parent_group(exchange.group))
    ):
        return None
    columns = q.new_zeros(*q_shape[:3], 1, dtype=accumulator(q.dtype))
    if dlse is not None:
        columns = dlse.transpose(1, 2).unsqueeze(-1)
    (columns,) = exchange.to_heads((columns, exchange.whole.queries)).wait()
    return columns.squeeze(-1).transpose(1, 2)
