"""Attention as operators of ``torch.library``, which torch.compile and selective checkpointing see as one node.

A compiled function must not depend on values that change from step to step. The operators therefore take the mask, the
sharding and the ranks as opaque objects (``seqpar.compile_types``), which they read when they run. Checks, plans and
communication are never traced. Only the constants in ``AttentionSpec`` are part of the compiled function.

Eager code calls the same operators. There, the autograd.Function of attention computes by itself
instead of calling the operator again, and keeps its ``AttentionCall`` for backward.

Shapes: b batch, s tokens of this rank, t tokens of the ulysses group, h query heads, n KV heads, d head_dim of q
and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..base.compile_types import unwrap
from ..base.library import operator
from ..comm.handshake import Fingerprint, all_gather_header
from ..comm.trace import count_choice
from ..kernels.base import Score, accumulator
from ..masks.mask import Mask, check_rows, layer_mask
from ..placement.heads import Heads
from ..placement.layout import check_length
from ..placement.placement import ParallelContext, Placement
from ..schedule.plan import attention_plan
from ..sharding.same_rows import check_layouts
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec
from .algorithm import Shapes
from .algorithms import algorithm_of
from .call import AttentionCall
from .latent import LatentKeys, value_dim
from .seed import check_seed_is_kept


class _SeedHeader(NamedTuple):
    seed: int
    layout: Fingerprint


def make_call(
    head_dim: int,
    heads: Heads,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: int,
    mask: Mask,
    placement: Placement,
    spec: AttentionSpec,
    device: torch.device,
) -> AttentionCall:
    """The call for checked and resolved arguments. Every attention call of the package is made here."""
    if spec.layer_mask is not None:
        mask = layer_mask(mask, *spec.layer_mask)
    if spec.alibi_slopes is not None:
        alibi_slopes = spec.slopes(heads, device)
    return AttentionCall(
        placement=placement,
        plan=attention_plan(mask, *placement.plan_arguments),
        spec=spec,
        heads=heads,
        score=Score(
            softmax_scale=head_dim**-0.5 if spec.softmax_scale is None else spec.softmax_scale,
            softcap=spec.softcap,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.detach().float(),
            sinks=None if sinks is None else sinks.detach(),
            dropout_p=spec.dropout_p,
            dropout_seed=dropout_seed,
            head_offset=heads.queries.start,
        ),
    )


def new_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    spec: AttentionSpec,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
) -> AttentionCall:
    """The call of the operator, without the latent weight. With ``spec.draws_seed`` all ranks take rank 0's seed.

    Raises:
        ValueError: the tensors, which fit together, do not fit the mask or the sharding.
    """
    placement = sharding.place(spec, ranks)

    def header() -> _SeedHeader:
        tokens = placement.tokens
        if tokens.replicated and not k.shape[1] == v.shape[1] == tokens.seq_len:
            raise ValueError(
                f"k and v: {k.shape[1]} and {v.shape[1]} tokens; expected all {tokens.seq_len} of the sequence"
            )
        check_rows(mask, "q", q)
        mask.check_length(tokens.seq_len)
        if q.shape[1] != placement.length:
            check_length(q.shape[1], tokens.seq_len, tokens.ranks, placement.rank, tokens.layout, q.shape[2])
        seed_now = 0 if seed is None else int(seed.item())  # on the host: a GPU is not waited for
        return _SeedHeader(seed_now, sharding.checksum if spec.draws_seed else Fingerprint(0))

    if spec.draws_seed:
        headers = all_gather_header(header, sharding.sequence_group)
        check_layouts(headers)
        agreed = headers[0]
    else:
        agreed = header()
    heads = spec.heads(q.shape, k.shape)
    call = make_call(q.shape[3], heads, sinks, alibi_slopes, agreed.seed, mask, placement, spec, q.device)
    if placement.gather is None and placement.tokens.ring > 1:
        count_choice("all_gather" if call.plan.gather else "p2p")
    return call


def compute(
    call: AttentionCall, q: Tensor, k: Tensor, v: Tensor, latent_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """``out``, ``lse`` and what backward needs, from the call's algorithm. ``call`` is without the latent weight."""
    if latent_weight is not None:
        call = replace(call, latent=LatentKeys(latent_weight, q.shape[3] - v.shape[3]))
    try:
        exchange = call.on_ranks("forward", (q.shape, k.shape, v.shape), q.dtype)
        with torch.autocast(q.device.type, enabled=False), exchange:  # float32 statistics stay float32
            return algorithm_of(call.placement, call.heads).forward(call, q, k, v)
    finally:
        if call.errors:
            call.raise_error()


class _DifferentiableAttention(torch.autograd.Function):
    """``attention`` in eager code, with and without gradients. Differentiable once: the backward communicates.

    In compiled code, and where a dispatch mode must see one operator, it calls the operators instead of computing.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """``out`` and ``lse``, and what else the operator returns where it is called."""
        q, k, v, sinks, alibi_slopes, seed, latent_weight, spec, *where = arguments
        call, shapes = None, (q.shape, k.shape, v.shape)
        if spec.returns_saved or seen_by_dispatch_mode():
            tensors = sinks, alibi_slopes, seed, latent_weight
            with torch._C._AutoDispatchBelowAutograd():
                results = attention(q, k, v, *tensors, spec.having(returns_saved=True), *where)
            seed = results[-1] if spec.draws_seed else seed
            saved = results[2 : len(results) - spec.draws_seed] or (q, k, v, *results[:2])
        else:
            call = new_call(q, k, v, sinks, alibi_slopes, seed, spec, *where)
            *results, saved = compute(call, q, k, v, latent_weight)
        ctx.set_materialize_grads(False)
        ctx.constants, ctx.shapes, ctx.call = (spec, *where), shapes, call
        ctx.save_for_backward(sinks, alibi_slopes, seed, latent_weight, *saved)
        ctx.mark_non_differentiable(*results[1 if not spec.return_lse else 2 :])
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
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
        return dq, dk, dv, dsinks, None, None, d_weight, *[None] * 4


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
        call = replace(call, latent=LatentKeys(latent_weight, q_shape[3] - v_shape[3], d_weight))
    dout = like.new_zeros(*q_shape[:3], call.v_head_dim(v_shape)) if dout is None else dout.contiguous()
    dlse = dlse if call.spec.return_lse else None
    try:
        with torch.autocast(like.device.type, enabled=False), call.on_ranks("backward", shapes, like.dtype):
            algorithm = algorithm_of(call.placement, call.heads)
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


@operator(fake=_fake_attention, autograd=_DifferentiableAttention.apply, computes=True)
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
    call = new_call(q, k, v, sinks, alibi_slopes, seed, spec, mask, sharding, ranks)
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
    placement = sharding.place(spec, ranks)
    heads = spec.heads(q_shape, k_shape)
    device, dropout_seed = saved[0].device, 0 if seed is None else int(seed.item())
    call = make_call(q_shape[3], heads, sinks, alibi_slopes, dropout_seed, mask, placement, spec, device)
    shapes, saved = (q_shape, k_shape, v_shape), [x.contiguous() for x in saved]
    out_dim = value_dim(latent_weight, q_shape, v_shape)
    saved = algorithm_of(placement, heads).restore(call, saved, shapes, out_dim)
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


def seen_by_dispatch_mode() -> bool:
    """Whether a dispatch mode is on that must see attention as one operator, such as selective checkpointing's."""
    mode = _get_current_dispatch_mode()
    return mode is not None and not isinstance(mode, FakeTensorMode)
