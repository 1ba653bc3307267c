"""Attention as operators of ``torch.library``, which torch.compile and selective checkpointing see as one node.

A compiled function must not depend on values that change from step to step. The operators therefore take the mask, the
sharding and the ranks as opaque objects (``seqpar.compile_types``), which they read when they run. Checks, plans and
communication are never traced. Only the constants in ``AttentionSpec`` are part of the compiled function.

In eager code, the autograd.Function of attention computes by itself instead of calling the operator, and keeps its
``AttentionCall`` for backward.

Shapes: b batch, s tokens of this rank, t tokens of the ulysses group, h query heads, n KV heads, d head_dim of q
and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..base.compile_types import unwrap
from ..base.library import operator
from ..kernels.base import accumulator
from ..masks.mask import Mask
from ..placement.placement import ParallelContext
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec
from .algorithm import Shapes
from .algorithms import algorithm_of
from .autograd import autocasts, once_differentiable, without_autocast
from .call import AttentionCall
from .latent import LatentKeys, value_dim
from .prepare import new_call, prepared_backward
from .seed import check_seed_is_kept


def compute(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, latent_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``out``, ``lse`` and what backward needs, from the call's algorithm. ``call`` is without the latent weight."""
    if latent_weight is not None:
        call = call.with_latent(LatentKeys(latent_weight, q.shape[3] - v.shape[3]))
    algorithm = algorithm_of(call.placement, call.heads)
    if not call.placement.sends and not autocasts():
        return algorithm.forward(call, q, k, v)
    try:
        # Statistics stay float32 under autocast.
        with without_autocast(q), call.on_ranks("forward", (q.shape, k.shape, v.shape), q.dtype):
            return algorithm.forward(call, q, k, v)
    finally:
        if call.errors:
            call.raise_error()


class _DifferentiableAttention(torch.autograd.Function):
    """``attention`` in eager code, with and without gradients. Differentiable once: the backward communicates.

    In compiled code, and where a dispatch mode must see one operator, it calls the operators instead of computing.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """``out`` and ``lse``, and what else the operator returns where it is called.

        The arguments are the operator's tensors, and a tuple of its other arguments and of what ``prepared`` has
        returned; None if it has not been called.
        """
        q, k, v, sinks, alibi_slopes, seed, latent_weight, (spec, mask, sharding, ranks, kind) = arguments
        where = mask, sharding, ranks
        call, shapes = None, (q.shape, k.shape, v.shape)
        if spec.returns_saved or seen_by_dispatch_mode():
            tensors = sinks, alibi_slopes, seed, latent_weight
            with torch._C._AutoDispatchBelowAutograd():
                results = attention(q, k, v, *tensors, spec.having(returns_saved=True), *where)
            seed = results[-1] if spec.draws_seed else seed
            saved = results[2 : len(results) - spec.draws_seed] or (q, k, v, *results[:2])
        else:
            call = new_call(q, k, v, sinks, alibi_slopes, seed, latent_weight, spec, *where, kind)
            *results, saved = compute(call, q, k, v, latent_weight)
        ctx.set_materialize_grads(False)
        ctx.constants, ctx.shapes, ctx.call = (spec, *where), shapes, call
        ctx.save_for_backward(sinks, alibi_slopes, seed, latent_weight, *saved)
        ctx.mark_non_differentiable(*results[1 if not spec.return_lse else 2 :])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        sinks, alibi_slopes, seed, latent_weight, *saved = ctx.saved_tensors
        needs_d_weight = latent_weight is not None and ctx.needs_input_grad[6]
        if ctx.call is not None:
            of_weight = latent_weight, needs_d_weight
            dq, dk, dv, dsinks, d_weight = attention_gradients(ctx.call, saved, dout, dlse, ctx.shapes, *of_weight)
        else:
            tensors = sinks, alibi_slopes, seed, latent_weight
            dlse = dlse if ctx.constants[0].return_lse else None
            dq, dk, dv, *others = attention_backward(
                dout, dlse, saved, *ctx.shapes, *tensors, *ctx.constants, needs_d_weight
            )
            d_weight = others.pop() if needs_d_weight else None
            dsinks = others[0] if others else None
        return dq, dk, dv, dsinks, None, None, d_weight, None


def attention_gradients(
    call: AttentionCall,
    saved: Sequence[Tensor],
    dout: Tensor | None,
    dlse: Tensor | None,
    shapes: Shapes,
    latent_weight: Tensor | None = None,
    needs_d_weight: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of attention, in the dtypes of its arguments.

    Args:
        call: the forward's, without the latent weight.
        saved: the tensors that the algorithm's forward has returned for backward.
        dout: ``[b, s, h, e]``; None is zeros. Every rank takes part, whether or not its output has a gradient.
        dlse: ``[b, h, s]``; None is zeros.
        shapes: of q, k and v.
        latent_weight: the forward's.
        needs_d_weight: whether the weight's gradient is returned.

    Returns:
        ``dq, dk, dv``; ``dsinks [h]``, this rank's partial gradient, None without sinks; and the gradient of the weight
        or None.
    """
    like, sinks, d_weight = saved[0], call.score.sinks, None
    q_shape, _, v_shape = shapes
    if latent_weight is not None:
        if needs_d_weight:
            d_weight = torch.zeros_like(latent_weight, dtype=accumulator(latent_weight.dtype))
        call = call.with_latent(LatentKeys(latent_weight, q_shape[3] - v_shape[3], d_weight))
    dout = like.new_zeros(*q_shape[:3], call.v_head_dim(v_shape)) if dout is None else dout.contiguous()
    dlse = dlse if call.spec.return_lse else None
    algorithm = algorithm_of(call.placement, call.heads)
    if not call.placement.sends and not autocasts():
        dq, dk, dv, dsinks = algorithm.backward(call, saved, dout, dlse, shapes)
    else:
        try:
            with without_autocast(like), call.on_ranks("backward", shapes, like.dtype):
                dq, dk, dv, dsinks = algorithm.backward(call, saved, dout, dlse, shapes)
        finally:
            if call.errors:
                call.raise_error()
    if dsinks is not None and sinks is not None:
        dsinks = dsinks.to(sinks.dtype)
    if d_weight is not None:
        d_weight = d_weight.to(like.dtype)
    return dq.to(like.dtype), dk.to(like.dtype), dv.to(like.dtype), dsinks, d_weight


def _fake_attention(*args: Any) -> list[Tensor]:
    q, k, v, _, _, _, latent_weight, spec, _, sharding, ranks = args
    placement = unwrap(sharding).place(spec, unwrap(ranks))
    heads = spec.heads(q.shape, k.shape)
    algorithm = algorithm_of(placement, heads)
    out = q.new_empty(*q.shape[:3], value_dim(latent_weight, q.shape, v.shape))
    results = [out, q.new_empty(algorithm.lse_shape(spec, q.shape), dtype=accumulator(q.dtype))]
    if spec.returns_saved:
        dtypes = algorithm.kept_dtypes(placement, heads, q.dtype)
        results += [q.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=dtype) for dtype in dtypes]
    if spec.draws_seed:
        check_seed_is_kept()
        results.append(torch.empty((), dtype=torch.int64, device="cpu"))
    return results


@operator(
    fake=_fake_attention,
    autograd=lambda *arguments: _DifferentiableAttention.apply(*arguments[:7], (*arguments[7:], None)),
    computes=True,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    latent_weight: Tensor | None,
    spec: AttentionSpec,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
) -> list[Tensor]:
    """Attention of sequence shards as an operator: the only way to the kernels.

    Args:
        q, k, v: ``[b, s, h, d]``, ``[b, s, n, d]`` and ``[b, s, n, e]``.
        sinks: ``[h]``.
        alibi_slopes: ``[h]`` or ``[b, h]``.
        seed: the dropout seed, int64 ``[]`` on the host.
        latent_weight: ``[h, nope + e, w]``, if k and v are latents and rotated keys (see ``latent.py``).
        spec, mask, sharding: of the call.
        ranks: of the call; ``ANY_RANKS`` for the ranks of the sharding.

    Returns:
        ``out [b, s, h, e]``; ``lse [b, h, s]``, which may be empty unless ``spec.return_lse``; with
        ``spec.returns_saved`` the tensors of ``Algorithm.keep``; and with ``spec.draws_seed`` rank 0's seed.
    """
    call = new_call(q, k, v, sinks, alibi_slopes, seed, latent_weight, spec, mask, sharding, ranks)
    out, lse, saved = compute(call, q, k, v, latent_weight)
    results = [out, lse]
    if spec.returns_saved:
        results += algorithm_of(call.placement, call.heads).keep(call, saved, q, k, v)
    if spec.draws_seed:
        results.append(torch.tensor(call.score.dropout_seed, device="cpu"))
    return [x.contiguous() for x in results]


@operator(
    fake=lambda dout, dlse, saved, q_shape, k_shape, v_shape, sinks, alibi_slopes, seed, weight, *constants: [
        *(saved[0].new_empty(shape) for shape in (q_shape, k_shape, v_shape)),
        *(torch.empty_like(x) for x in (sinks, weight if constants[-1] else None) if x is not None),
    ]
)
def attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    saved: Sequence[Tensor],
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    latent_weight: Tensor | None,
    spec: AttentionSpec,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
    needs_d_weight: bool,
) -> list[Tensor]:
    """``attention_gradients`` as an operator.

    Returns ``dq, dk, dv``, then ``dsinks`` if there are sinks, then the gradient of ``latent_weight`` if it is needed.

    Args:
        saved: the tensors of ``Algorithm.keep``; q, k, v, out and lse if there are none.
        dout, dlse: ``[b, s, h, e]`` and ``[b, h, s]``; None is zeros.
        q_shape, k_shape, v_shape: the shapes of q, k and v.
        sinks, alibi_slopes, seed, latent_weight, spec, mask, sharding, ranks: the forward's.
        needs_d_weight: whether the weight's gradient is returned.
    """
    shapes, saved = (q_shape, k_shape, v_shape), [x.contiguous() for x in saved]
    features = sinks is None, None if alibi_slopes is None else alibi_slopes.dim(), latent_weight is None
    kind = prepared_backward(shapes, saved[0], features, spec, mask, sharding, ranks)
    call = kind.with_values(sinks, alibi_slopes, 0 if seed is None else int(seed.item()), saved[0])
    out_dim = value_dim(latent_weight, q_shape, v_shape)
    saved = algorithm_of(call.placement, call.heads).restore(call, saved, shapes, out_dim)
    gradients = attention_gradients(call, saved, dout, dlse, shapes, latent_weight, needs_d_weight)
    return [x.contiguous() for x in gradients if x is not None]


@operator(fake=lambda like, *_: torch.empty(like.shape[1], dtype=torch.int64, device="cpu"))
def global_positions(like: Tensor, sharding: Sharding, ranks: ParallelContext, spec: AttentionSpec) -> Tensor:
    """Global positions of the tokens of ``like [b, s, ...]``, int64 ``[s]`` on the host. With replicated keys, the
    positions of all tokens.

    The result is cached, and must not be written to. Rotary embeddings recognise it by identity.
    """
    placement = sharding.place(spec, ranks)
    if placement.tokens.replicated:
        return placement.tokens.all_gathered().rank_positions(0)
    return placement.tokens.rank_positions(placement.rank)


def attention_in_eager(*arguments: Any) -> Any:
    """``attention`` where nothing has to see an operator, in code that torch.compile does not see."""
    return _DifferentiableAttention.apply(*arguments)


def seen_by_dispatch_mode() -> bool:
    """Whether a dispatch mode is on that must see attention as one operator, such as selective checkpointing's."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    mode = _get_current_dispatch_mode()
    return mode is not None and not isinstance(mode, FakeTensorMode)
