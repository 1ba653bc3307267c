"""What an attention call needs to know besides its values, found once for all calls of one kind.

A training run calls attention with tensors of the same shapes in every layer and step. Checks, the placement, the plan,
the program and the backends that may compute it are the same each time. They are kept in the sharding, by mask, and are
freed with either.

The key of a call holds everything on which these depend: its constants and ranks, and the type, shape, dtype, device
and layout of each tensor. It leaves out

* values, which are read at every call: sinks, slopes, latent weights, dropout seeds,
* strides, because the algorithms make their inputs contiguous,
* the modes of gradients, inference and autocast, which decide nothing that is kept,
* whether a backend can run, which ``BackendChoice`` asks at every call,
* the connections of the ranks, which ``links_of`` compares with the state of their group at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ..base.checks import check_inputs
from ..comm.handshake import Fingerprint, all_gather_header
from ..comm.trace import count_choice
from ..kernels.base import Score
from ..masks.mask import Mask, check_rows, layer_mask
from ..placement.layout import check_length
from ..placement.placement import ParallelContext
from ..schedule.plan import attention_plan
from ..sharding.same_rows import check_layouts
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec
from .call import AttentionCall
from .invariant import check_invariant

# Of one mask and sharding: such as the layers of a model with several kinds of attention, for some batch sizes.
_MOST_KINDS = 64


class _SeedHeader(NamedTuple):
    seed: int
    layout: Fingerprint


def prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    latent_weight: Tensor | None,
    spec: AttentionSpec,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
) -> AttentionCall:
    """The kind of a call, for tensors as ``operators.attention`` takes them. ``AttentionCall.with_values`` makes the
    call.

    Raises:
        TypeError, ValueError: the tensors do not fit together, or do not fit the mask or the sharding.
    """
    if q.is_nested or k.is_nested or v.is_nested:
        check_inputs(q, k, v, latent_weight)  # says why they are refused
    # Devices are slow to compare.
    devices = (q.is_cpu and k.is_cpu and v.is_cpu) or (q.device, k.device, v.device)
    key: tuple[Any, ...] = (
        *(spec, ranks, torch._C._are_functorch_transforms_active(), devices),
        *(type(q), q.shape, q.dtype, q.layout),
        *(type(k), k.shape, k.dtype, k.layout),
        *(type(v), v.shape, v.dtype, v.layout),
    )
    if sinks is not None or alibi_slopes is not None or latent_weight is not None:
        vectors = sinks, alibi_slopes, latent_weight
        key += tuple(None if x is None else (type(x), x.shape, x.dtype, x.device, x.layout) for x in vectors)

    entry = sharding.calls_by_id.get(id(mask))
    found: AttentionCall | None = None if entry is None or entry[0]() is not mask else entry[1].get(key)
    if found is not None:
        return found

    def make() -> AttentionCall:
        placement = sharding.place(spec, ranks)
        tokens = placement.tokens
        if not tokens.replicated:
            if not spec.tensor_parallel:  # there, query heads are divided without regard to the KV heads
                check_inputs(q, k, v, latent_weight)
        elif not k.shape[1] == v.shape[1] == tokens.seq_len:
            raise ValueError(
                f"k and v: {k.shape[1]} and {v.shape[1]} tokens; expected all {tokens.seq_len} of the sequence"
            )
        check_rows(mask, "q", q)
        mask.check_heads(*spec.model_heads(q.shape, k.shape))
        if spec.deterministic == "invariant":
            check_invariant(spec, alibi_slopes, latent_weight)
        mask.check_length(tokens.seq_len)
        if q.shape[1] != placement.length:
            check_length(q.shape[1], tokens.seq_len, tokens.ranks, placement.rank, tokens.layout, q.shape[2])
        return call_of(q.shape, k.shape, spec, mask, sharding, ranks)

    return _kept(mask, sharding, key, make)


def prepared_backward(
    shapes: Sequence[Sequence[int]],
    like: Tensor,
    features: tuple[Any, ...],
    spec: AttentionSpec,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
) -> AttentionCall:
    """The kind of a call whose forward has checked the tensors, for the backward of compiled code.

    Args:
        shapes: of q, k and v.
        like: a tensor of their dtype and device.
        features: what else the choice of a backend depends on.
        spec, mask, sharding, ranks: the forward's.
    """
    key = (spec, ranks, *map(tuple, shapes), like.dtype, like.device, features)
    return _kept(mask, sharding, key, lambda: call_of(shapes[0], shapes[1], spec, mask, sharding, ranks))


def _kept(mask: Mask, sharding: Sharding, key: tuple[Any, ...], make: Callable[[], AttentionCall]) -> AttentionCall:
    kinds: dict[tuple[Any, ...], AttentionCall] = sharding.calls.setdefault(mask, {})
    number, forget = id(mask), sharding.calls_by_id.pop
    sharding.calls_by_id[number] = ref(mask, lambda _: forget(number, None)), kinds
    call = kinds.get(key)
    if call is None:
        call = make()
        while len(kinds) >= _MOST_KINDS:
            kinds.pop(next(iter(kinds)), None)
        kinds[key] = call
    return call


def call_of(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    spec: AttentionSpec,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
) -> AttentionCall:
    """The kind of a call of tensors that have been checked."""
    if spec.layer_mask is not None:
        mask = layer_mask(mask, *spec.layer_mask)
    placement, heads = sharding.place(spec, ranks), spec.heads(q_shape, k_shape)
    score = Score(
        softmax_scale=q_shape[3] ** -0.5 if spec.softmax_scale is None else spec.softmax_scale,
        softcap=spec.softcap,
        dropout_p=spec.dropout_p,
        head_offset=heads.queries.start,
    )
    plan = attention_plan(mask, *placement.plan_arguments, spec.model_heads(q_shape, k_shape)[0])
    cuts = tuple(x.cuts for x in mask.head_groups or (mask,)) if spec.deterministic == "invariant" else ()
    return AttentionCall(placement, plan, spec, heads, score, cuts)


def new_call(
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
    kind: AttentionCall | None = None,
) -> AttentionCall:
    """The call of the operator, without the latent weight. With ``spec.draws_seed`` all ranks take rank 0's seed.

    ``kind`` is what ``prepared`` has returned, if it has been called.
    """
    of_call = q, k, v, sinks, alibi_slopes, latent_weight, spec, mask, sharding, ranks
    dropout_seed = 0 if seed is None else int(seed.item())  # on the host: a GPU is not waited for
    if spec.draws_seed:

        def header() -> _SeedHeader:
            prepared(*of_call)
            return _SeedHeader(dropout_seed, sharding.checksum)

        headers = all_gather_header(header, sharding.sequence_group)
        check_layouts(headers)
        dropout_seed = headers[0].seed
    call = (kind or prepared(*of_call)).with_values(sinks, alibi_slopes, dropout_seed, q)
    placement = call.placement
    if placement.gather is None and placement.tokens.ring > 1:
        count_choice("all_gather" if call.plan.gather else "p2p")
    return call
