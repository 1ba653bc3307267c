"""The one autograd function behind every strategy: exchange heads, visit keys, exchange back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import Score
from ..backends.base import accumulator
from ..comm import HeadExchange, agree
from ..mask import Mask
from ..mesh import Groups, Ranks, whole_group
from ..schedule import Shards, Step, attention_steps, head_range, kv_head_range
from .recompute import kept
from .visit import visit_backward, visit_forward


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call, resolved: who takes part, where the tokens lie, how scores are made."""

    groups: Groups
    shards: Shards
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
        if self.groups.ulysses is None or self.groups.ulysses_size == 1:
            return None
        return HeadExchange(self.groups.ulysses, self.shards, self.groups.ring_rank, self.heads, self.kv_heads)

    def local_heads(self) -> tuple[range, range]:
        """Query heads and key/value heads this rank attends with, after the exchange."""
        if self.groups.ulysses is None:
            return range(self.heads), range(self.kv_heads)
        size, rank = self.groups.ulysses_size, self.groups.ulysses.rank()
        return head_range(self.heads, size, rank), kv_head_range(self.heads, self.kv_heads, size, rank)

    def local_score(self) -> Score:
        heads, _ = self.local_heads()
        return self.score.heads(heads.start, heads.stop)

    def kv_index(self) -> Tensor | None:
        """The key/value head of each local query head, where they do not form equal groups; else None."""
        heads, kv_heads = self.local_heads()
        index = [h // (self.heads // self.kv_heads) - kv_heads.start for h in heads]
        equal = not index or (
            len(index) % len(kv_heads) == 0 and index == [i // (len(index) // len(kv_heads)) for i in range(len(index))]
        )
        return None if equal else torch.tensor(index, device="cpu")


class SequenceParallelAttention(torch.autograd.Function):
    """``(q, k, v, sinks) -> (out, lse)`` on sequence shards; saves only its inputs, ``out`` and ``lse``.

    Differentiable once: the backward communicates, and is not itself recorded.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.device_type = q.device.type
        with torch.autocast(ctx.device_type, enabled=False):  # float32 statistics stay float32
            return SequenceParallelAttention._forward(ctx, q, k, v, sinks, call)

    @staticmethod
    def _forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
        exchange = call.exchange()
        if exchange is not None:
            kinds = (call.heads, call.kv_heads, call.kv_heads)
            to_heads = exchange.to_heads
            q, k, v = kept(lambda *qkv: tuple(to_heads(list(zip(qkv, kinds, strict=True)))), q, k, v)
        else:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        index = call.kv_index()
        keys, values = (k, v) if index is None else (x.index_select(2, index.to(x.device)) for x in (k, v))
        score = call.local_score()
        steps = call.steps()
        out, lse = kept(lambda q, k, v: visit_forward(steps, q, k, v, score, call.backend, call.ring), q, keys, values)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        if exchange is not None:
            to_sequence = exchange.to_sequence
            (out,) = kept(lambda out: tuple(to_sequence([(out, call.heads)])), out)
            if call.return_lse:
                (columns,) = exchange.to_sequence([(lse.transpose(1, 2).unsqueeze(-1).contiguous(), call.heads)])
                lse = columns.squeeze(-1).transpose(1, 2)
        if not call.return_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        with torch.autocast(ctx.device_type, enabled=False):
            return SequenceParallelAttention._backward(ctx, dout, dlse)

    @staticmethod
    def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        call: Call = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        exchange = call.exchange()
        dlse = dlse if call.return_lse else None
        dout, dlse = _head_gradients(call, exchange, q, dout, dlse)
        index = call.kv_index()
        keys, values = (k, v) if index is None else (x.index_select(2, index.to(x.device)) for x in (k, v))
        dq, dk, dv, dsinks = visit_backward(
            call.steps(), dout, q, keys, values, out, lse, dlse, call.local_score(), call.backend, call.ring
        )
        if index is not None:
            dk, dv = (
                torch.zeros_like(x, dtype=g.dtype).index_add_(2, index.to(g.device), g) for x, g in ((k, dk), (v, dv))
            )
        if dsinks is not None:
            heads, _ = call.local_heads()
            whole = dsinks.new_zeros(call.heads)
            whole[heads.start : heads.stop] = dsinks
            assert call.score.sinks is not None
            dsinks = whole.to(call.score.sinks.dtype)
        if exchange is None:
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None
        # Finished gradients travel in the model's dtype; where ranks hold parts of one, in float32.
        (dq,) = exchange.to_sequence([(dq.to(q.dtype), call.heads)])
        if not exchange.shared_kv:
            dk, dv = dk.to(k.dtype), dv.to(v.dtype)
        dk, dv = exchange.to_sequence([(dk, call.kv_heads), (dv, call.kv_heads)])
        return dq, dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _head_gradients(
    call: Call, exchange: HeadExchange | None, q: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The incoming gradients on this rank's heads; every rank takes part whether or not it has any."""
    if exchange is None:
        dout = torch.zeros_like(q) if dout is None else dout.contiguous()
        return dout, dlse
    batch, _, _, head_dim = q.shape
    first = call.groups.ring_rank * call.shards.ulysses
    tokens = len(call.shards.rank_positions(first + exchange.rank))
    if dout is None:
        dout = q.new_zeros(batch, tokens, call.heads, head_dim)
    (dout,) = exchange.to_heads([(dout, call.heads)])
    if call.return_lse and any(has for (has,) in agree(lambda: [dlse is not None], whole_group(exchange.group))):
        dtype = accumulator(q.dtype)
        columns = q.new_zeros(batch, tokens, call.heads, 1, dtype=dtype)
        if dlse is not None:
            columns = dlse.transpose(1, 2).unsqueeze(-1)
        (columns,) = exchange.to_heads([(columns, call.heads)])
        dlse = columns.squeeze(-1).transpose(1, 2)
    return dout, dlse
