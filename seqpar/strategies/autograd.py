"""Forward and backward of every strategy, and which ranks take part in backward.

Every strategy is an all-to-all (Ulysses) around a ring. Either of the two may have a single rank.

Shapes: b batch, s tokens of this rank, h query heads, n KV heads, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..comm.p2p import Link, links_of
from ..comm.trace import count_choice
from ..heads import Heads
from ..kernels.base import accumulator
from ..placement import Placement
from .call import AttentionCall, Run
from .head_exchange import HeadExchange, chunk_limit
from .latent import LatentKeys
from .ring import ring_backward, ring_forward
from .ulysses import saved_lse, ulysses_backward, ulysses_forward

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def attention_forward(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Attention of sequence shards.

    Args:
        call: everything but the tensors.
        q: ``[b, s, h, d]``.
        k: ``[b, s, n, d]``.
        v: ``[b, s, n, e]``.

    Returns:
        ``out [b, s, h, e]``, ``lse [b, h, s]``, and the ``saved`` of ``attention_backward``. With an all-to-all,
        ``lse`` is an empty tensor unless ``call.spec.return_lse``.
    """
    if call.placement.gather is None and call.placement.tokens.ring > 1:
        count_choice("all_gather" if call.plan.gather else "p2p")
    exchange = None if call.placement.ulysses is None else head_exchange(call, q.shape, q.device)
    with torch.autocast(q.device.type, enabled=False):  # float32 statistics stay float32
        if exchange is None:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            out, lse = ring_forward(Run(call, call.heads, q, k, v), q, k, v)
            return out, lse, q, k, v, out, lse
        out, *saved = ulysses_forward(exchange, partial(Run, call), q, k, v, call.v_head_dim(v.shape))
        lse = exchange.lse_to_sequence(saved_lse(exchange, saved)) if call.spec.return_lse else saved[-1].new_empty(0)
    return out, lse, *saved, *((k, v) if exchange.shares_kv else ())


def attention_backward(
    call: AttentionCall,
    saved: Sequence[Tensor],
    dout: Tensor | None,
    dlse: Tensor | None,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
) -> Gradients:
    """Gradients of ``attention_forward``, in the dtypes of its arguments.

    Args:
        call: as given to ``attention_forward``.
        saved: the tensors that it returned after ``out`` and ``lse``.
        dout: ``[b, s, h, e]``; None is zeros. Every rank takes part, whether or not its output has a gradient.
        dlse: ``[b, h, s]``; None is zeros.
        q_shape, k_shape, v_shape: the shapes of its arguments.

    Returns:
        ``dq, dk, dv``, and ``dsinks [h]``, this rank's partial gradient; None without sinks.
    """
    exchange = head_exchange(call, q_shape, saved[0].device)
    like, sinks = saved[0], call.score.sinks
    dout = like.new_zeros(*q_shape[:3], call.v_head_dim(v_shape)) if dout is None else dout.contiguous()
    dlse = dlse if call.spec.return_lse else None
    with torch.autocast(like.device.type, enabled=False):
        if exchange is None:
            q, k, v, out, lse = saved
            run = Run(call, call.heads, q, k, v, lse_gradient=dlse is not None)
            dq, dk, dv, dsinks = ring_backward(run, dout, dlse, q, k, v, out, lse)
        else:
            if call.spec.return_lse:
                dlse = exchange.lse_gradient_to_heads(dout, dlse)
            new_run = partial(Run, call, lse_gradient=dlse is not None)
            dq, dk, dv, dsinks = ulysses_backward(exchange, new_run, saved, dout, dlse, q_shape, k_shape, v_shape)
    if dsinks is not None and sinks is not None:
        dsinks = dsinks.to(sinks.dtype)
    return dq.to(like.dtype), dk.to(like.dtype), dv.to(like.dtype), dsinks


def gradient_state(*tensors: Tensor | None) -> int:
    """Whether this rank needs a backward, as a number that ``any_needs_gradient`` reads: 0 if gradients are turned off,
    2 if one of the tensors requires a gradient, and 1 if none does."""
    if not torch.is_grad_enabled():
        return 0
    return 2 if any(x is not None and x.requires_grad for x in tensors) else 1


def any_needs_gradient(states: Sequence[int]) -> bool:
    """Whether a backward will run, in which all ranks take part. ``states`` is the ``gradient_state`` of each rank."""
    without, needing = ([rank for rank, state in enumerate(states) if state == value] for value in (0, 2))
    if without and needing:
        raise ValueError(
            f"gradients: rank(s) {without} of the group run under torch.no_grad(), but the inputs of rank(s) {needing} "
            "require gradients; use the same mode on every rank"
        )
    return bool(needing)


def with_gradient(x: Tensor) -> Tensor:
    """``x``, or an alias of it that requires a gradient if gradients are on. In compiled code, ``x``.

    The backward of attention communicates. A rank whose inputs require no gradient would not run it, and the ranks
    whose inputs do would wait for it. With the alias it takes part.
    """
    if x.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return x
    return x.detach().requires_grad_()


def with_latents(
    call: AttentionCall,
    weight: Tensor | None,
    q_shape: Sequence[int],
    v_shape: Sequence[int],
    d_weight: Tensor | None = None,
) -> AttentionCall:
    """``call``, in which ``weight`` expands k and v unless it is None. Its gradient is added to ``d_weight``."""
    if weight is None:
        return call
    return replace(call, latent=LatentKeys(weight, q_shape[3] - v_shape[3], d_weight))


def new_weight_gradient(weight: Tensor | None, needed: bool) -> Tensor | None:
    """Zeros to which the gradient of ``weight`` is added, or None if no gradient is needed."""
    if weight is None or not needed:
        return None
    return torch.zeros_like(weight, dtype=accumulator(weight.dtype))


def to_autocast_dtype(*tensors: Tensor) -> list[Tensor]:
    """The tensors, cast to autocast's dtype if autocast is on. As in PyTorch's own operators, float64 is not cast.

    Call it before a custom autograd.Function, inside of which autocast does nothing.
    """
    device_type = tensors[0].device.type
    # torch 2.11 cannot trace ``is_autocast_available``. All devices for which code is compiled have autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    if not available or not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def head_exchange(call: AttentionCall, q_shape: Sequence[int], device: torch.device) -> HeadExchange | None:
    """The all-to-all around the ring, if more than one rank takes part in it. ``q_shape`` is ``[b, s, h, d]``."""
    placement, link = call.placement, links_of(call.placement, device).ulysses
    if link is None:
        return None
    chunks = 1 if link.memory is not None else chunk_limit(placement.tokens, q_shape, device.type)
    return head_exchange_of(placement, call.heads, chunks, link)


def head_exchange_of(placement: Placement, heads: Heads, chunks: int, link: Link | None = None) -> HeadExchange | None:
    """``head_exchange`` before there is a call, in at most ``chunks`` chunks of heads."""
    if placement.ulysses is None or placement.tokens.ulysses == 1 or not heads.queries:
        return None  # tensor parallelism over more ranks than heads leaves ranks without heads
    key = heads, chunks, link
    exchange: HeadExchange | None = placement.kept.get(key)
    if exchange is None:
        exchange = placement.kept[key] = HeadExchange(placement, heads, chunks, link)
    return exchange
