"""The autograd function of every strategy: Ulysses around a ring, each of which may have one rank.

Shapes: b batch, s tokens of this rank, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .call import AttentionCall
from .checkpointing import checkpointed_op
from .ring import ring_backward, ring_forward
from .ulysses import (
    HeadExchange,
    chunk_limit,
    lse_gradient_to_heads,
    lse_to_sequence,
    saved_lse,
    ulysses_backward,
    ulysses_forward,
)


def gradient_state(*tensors: Tensor | None) -> int:
    """What a rank tells the others about its backward, as ``any_needs_gradient`` reads it: 0 if gradients are turned
    off, 2 if one of the tensors requires one, else 1."""
    if not torch.is_grad_enabled():
        return 0
    return 2 if any(x is not None and x.requires_grad for x in tensors) else 1


def any_needs_gradient(states: Sequence[int]) -> bool:
    """Whether a backward will run, from the ``gradient_state`` of each rank: then all ranks must take part in it."""
    without, needing = ([rank for rank, state in enumerate(states) if state == value] for value in (0, 2))
    if without and needing:
        raise ValueError(
            f"gradients: rank(s) {without} of the group run under torch.no_grad(), but the inputs of rank(s) {needing} "
            "require gradients; use the same mode on every rank"
        )
    return bool(needing)


def with_gradient(x: Tensor) -> Tensor:
    """``x``, or an alias of it that requires a gradient if gradients are on.

    The backward of attention communicates. A rank whose inputs require no gradient would not run it, and the ranks
    whose inputs do would wait for it. With the alias it takes part.
    """
    return x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()


class SequenceParallelAttention(torch.autograd.Function):
    """``(q, k, v, sinks) -> (out, lse)`` on sequence shards. Saves only its inputs, ``out`` and ``lse``.

    Differentiable once: the backward communicates, and is not itself recorded.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        """``q [b, s, h, d]``, ``k, v [b, s, n, d]`` to ``out [b, s, h, d]`` and ``lse [b, h, s]``."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.shapes, ctx.device_type = call, (q.shape, k.shape), q.device.type
        exchange = _head_exchange(call, q.shape, ctx.device_type)
        with torch.autocast(ctx.device_type, enabled=False):  # float32 statistics stay float32
            if exchange is None:
                q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
                out, lse = checkpointed_op(partial(ring_forward, call, call.heads), q, k, v)
                saved = [q, k, v, out, lse]
            else:
                ring = partial(ring_forward, call)
                out, *saved = checkpointed_op(partial(ulysses_forward, exchange, ring), q, k, v)
                lse = saved_lse(exchange, saved)  # [b, h, t]: this rank's head shard
                if call.return_lse:
                    lse = lse_to_sequence(exchange, lse)
                if exchange.shares_kv:
                    saved += [k, v]
        ctx.save_for_backward(*saved)
        if not call.return_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """``dout [b, s, h, d]`` and ``dlse [b, h, s]`` to the gradients of q, k, v and the sinks."""
        call: AttentionCall = ctx.call
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        q_shape, k_shape = ctx.shapes
        exchange = _head_exchange(call, q_shape, ctx.device_type)
        # Every rank takes part in the communication, whether or not its output has a gradient.
        dout = saved[0].new_zeros(q_shape) if dout is None else dout.contiguous()
        dlse = dlse if call.return_lse else None
        with torch.autocast(ctx.device_type, enabled=False):
            if exchange is None:
                q, k, v, out, lse = saved
                dq, dk, dv, dsinks = ring_backward(call, call.heads, dout, dlse, q, k, v, out, lse)
            else:
                if call.return_lse:
                    dlse = lse_gradient_to_heads(exchange, dout, dlse)
                ring = partial(ring_backward, call)
                dq, dk, dv, dsinks = ulysses_backward(exchange, ring, saved, dout, dlse, k_shape)
        dtype = saved[0].dtype
        sinks = call.score.sinks
        if dsinks is not None and sinks is not None:
            dsinks = dsinks.to(sinks.dtype)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), dsinks, None


def to_autocast_dtype(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype, where autocast is on, as PyTorch's own operators cast them; float64 stays.

    To be called before a custom autograd.Function, in which autocast does nothing.
    """
    device_type = tensors[0].device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def _head_exchange(call: AttentionCall, q_shape: torch.Size, device_type: str) -> HeadExchange | None:
    """The all-to-all around the ring, if more than one rank takes part in it. ``q_shape`` is ``[b, s, h, d]``."""
    groups = call.groups
    if groups.ulysses is None or groups.ulysses_size == 1 or not call.heads.queries:
        return None  # tensor parallelism over more ranks than heads leaves ranks with no heads
    chunks = chunk_limit(call.sharding, q_shape, device_type)
    return HeadExchange(groups.ulysses, call.sharding, groups.ring_rank, call.heads, chunks)
