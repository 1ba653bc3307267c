"""The one entrance to attention of sequence shards: for ``seqpar.attention``, layers, Hugging Face and caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.overrides import has_torch_function

from ..base.checks import no_compile
from ..masks.mask import Mask
from ..placement.placement import ANY_RANKS, ParallelContext
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec
from . import operators
from .auto import named
from .autograd import join_backward
from .prepare import prepared
from .seed import draw_seed

# q, k, v, sinks, alibi_slopes, seed and latent_weight.
AttentionTensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]

# The number of query heads and the head_dim that every call must have (None: any), and how many calls had them.
_HEADS: ContextVar[tuple[int, int, list[None]] | None] = ContextVar("heads", default=None)


@contextmanager
def only_heads(heads: int, head_dim: int) -> Iterator[list[None]]:
    """In the block, ``attend`` raises unless q has ``heads`` heads of ``head_dim``. The list has an item per call."""
    calls: list[None] = []
    token = _HEADS.set((heads, head_dim, calls))
    try:
        yield calls
    finally:
        _HEADS.reset(token)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext = ANY_RANKS,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    latent_weight: Tensor | None = None,
    joins_backward: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of tensors that have been checked: ``out [b, s, h, e]`` and the operator's ``lse``.

    Args:
        q, k, v, sinks, alibi_slopes, latent_weight, spec, mask, sharding, ranks: see ``operators.attention``. The
            strategy of ``spec`` may be "auto".
        seed: of dropout, int64 ``[]`` on the host, the same on every rank. Without it all ranks take one that rank 0
            draws.
        joins_backward: False if no rank's inputs require gradients. Otherwise this rank takes part in the backward.
    """
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and (expected := _HEADS.get()):
        heads, head_dim, calls = expected
        if q.shape[2:] != (heads, head_dim):
            raise ValueError(
                f"q: {q.shape[2]} heads of head_dim {q.shape[3]}, but a group of heads has {heads} of {head_dim}; the "
                "layer must take the number of heads from the size of its projections, or leave head_groups out"
            )
        if mask.head_groups:
            raise ValueError(
                f"mask: {mask!r:.60} has a mask for each of {len(mask.head_groups)} groups of heads, but the layer "
                "attends with some of its heads at a time; leave head_groups out"
            )
        calls.append(None)
    if spec.strategy == "auto":
        spec = named(spec, mask, q.shape[2], k.shape[2], sharding)
    if spec.dropout_p and seed is None:
        seed, spec = draw_seed(), spec.having(draws_seed=True)
    tensors = q, k, v, sinks, alibi_slopes, seed, latent_weight
    if is_compiling:
        # Said here, because the frame that has made ``spec`` may not be compiled, if there is a graph break.
        out, lse, *_ = operators.attention(*tensors, spec.having(returns_saved=True), mask, sharding, ranks)
        return out, lse
    run = _attend_in_eager if get_eval_frame_callback() is None else _attend_after_a_graph_break
    return run(tensors, spec, mask, sharding, ranks, joins_backward)


def _attend_in_eager(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
    joins_backward: bool,
) -> tuple[Tensor, Tensor]:
    q, k, v, sinks, alibi_slopes, seed, latent_weight = tensors
    kind = None
    if not spec.draws_seed:
        kind = prepared(q, k, v, sinks, alibi_slopes, latent_weight, spec, mask, sharding, ranks)
    if joins_backward and torch.is_grad_enabled() and (kind is None or kind.placement.sends):
        q = join_backward(q, (k, v, sinks, latent_weight), spec, sharding, ranks)
    tensors = q, k, v, sinks, alibi_slopes, seed, latent_weight
    if kind is None or has_torch_function(tensors):
        out, lse, *_ = operators.attention(*tensors, spec, mask, sharding, ranks)
    else:
        out, lse, *_ = operators.attention_in_eager(*tensors, (spec, mask, sharding, ranks, kind))
    return out, lse


# torch 2.11 would raise an error for each attribute that is read. It takes as long as a look-up of the call.
_attend_after_a_graph_break = no_compile(_attend_in_eager)
