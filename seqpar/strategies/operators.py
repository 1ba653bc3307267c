"""Attention as operators of ``torch.library``, which torch.compile and selective checkpointing see as one node.

A compiled function must not depend on values that change from step to step. The operators therefore take the mask, the
sharding and the ranks as opaque objects (``seqpar.opaque``), which they read when they run. Checks, plans and
communication are never traced. Only the constants in ``AttentionOptions`` are part of the compiled function.

Eager calls do not use the operators, because dispatching one takes a tenth of a millisecond.

Shapes: b batch, s tokens of this rank, t tokens of the ulysses group, h query heads, n KV heads, d head_dim of q
and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, NamedTuple

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..checks import check_inputs
from ..comm.handshake import all_gather_header
from ..heads import Heads
from ..kernels.base import Score, accumulator
from ..layout import SequenceSharding, check_length
from ..mask import Mask, layer_mask
from ..mesh import AttentionGroups, ParallelContext, rank_in, sequence_group, size_of
from ..opaque import Opaque, constant, real
from ..schedule import attention_plan
from ..sharding import Sharding
from . import STRATEGIES, compared_options, resolve
from .autograd import (
    SequenceParallelAttention,
    attention_backward,
    attention_forward,
    gradient_state,
    head_exchange,
    head_exchange_of,
    new_weight_gradient,
    with_gradient,
    with_latents,
)
from .call import AttentionCall
from .head_exchange import MAX_CHUNKS, HeadExchange
from .ulysses import saved_shapes

# Passed as ``ranks`` for a call that has none of its own. The ranks are then those of the sharding.
ANY_RANKS = ParallelContext(None, None)


@constant()
@dataclass(frozen=True)
class AttentionOptions(Opaque):
    """The constants of a call.

    Attributes:
        strategy: the strategy's name. Under tensor parallelism it is that of the ranks with the same heads. "auto"
            stands for the strategy that is chosen when the operator runs.
        strategy_options: (name, value) of each option of the strategy.
        tensor_parallel: whether q, k and v hold all tokens of the tensor-parallel ranks, and some heads of the model.
        first_head: the index in the model of the first query head.
        q_per_kv: query heads that read one KV head; None: heads of q divided by heads of k.
        softmax_scale: a factor on the scores; None: ``head_dim ** -0.5``.
        softcap, dropout_p, deterministic, backend, return_lse: as for ``seqpar.attention``.
        layer_mask: causality, window and chunk that a layer adds to the mask (see ``mask.layer_mask``).
        replicated: whether k and v hold the tokens of all ranks (see ``gathered_activations.py``).
        draws_seed: whether each rank has drawn a dropout seed of its own. All ranks then use rank 0's seed.
    """

    strategy: str
    strategy_options: tuple[tuple[str, Any], ...] = ()
    tensor_parallel: bool = False
    first_head: int = 0
    q_per_kv: int | None = None
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    backend: str = "auto"
    return_lse: bool = False
    layer_mask: tuple[bool, int | None, int | None] | None = None
    replicated: bool = False
    draws_seed: bool = False

    def heads(self, q_shape: Sequence[int], k_shape: Sequence[int]) -> Heads:
        """The heads of tensors ``[b, s, h, d]`` and ``[b, s, n, d]``."""
        heads = int(q_shape[2])
        per_kv = heads // int(k_shape[2]) if self.q_per_kv is None else self.q_per_kv
        return Heads(range(self.first_head, self.first_head + heads), per_kv)

    def with_choice(self, chosen: Tensor | None) -> AttentionOptions:
        """The options with what was chosen when compiled code ran, if anything was.

        With strategy "auto", ``chosen`` is a ``choice``, otherwise int64 ``[]``: whether k and v are ``replicated``.
        """
        if chosen is None:
            return self
        if self.strategy != "auto":
            return replace(self, replicated=bool(chosen.item()))
        index, ulysses_size = chosen.tolist()
        name = tuple(STRATEGIES)[index]
        options = {"ulysses_size": ulysses_size} if ulysses_size else compared_options(name)
        return replace(self, strategy=name, strategy_options=constants(options))


def choice(strategy: str, options: Mapping[str, Any]) -> Tensor:
    """A strategy with its options, chosen when compiled code runs, as int64 ``[2]`` on the host."""
    return torch.tensor([tuple(STRATEGIES).index(strategy), options.get("ulysses_size") or 0], device="cpu")


def constants(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The options of a strategy as constants. torch.compile may have turned the ints among them into variables."""
    return tuple((name, index(x) if isinstance(x, int) else x) for name, x in options.items())


def constant_float(x: float) -> float:
    """``x`` as a constant. torch.compile may have turned it into a variable."""
    return float.fromhex(float(x).hex())


def draw_seed() -> Tensor:
    """A dropout seed from torch's CPU generator, int64 ``[]``."""
    return torch.randint(2**62, (), device="cpu")


def traced_seed() -> Tensor:
    """``draw_seed`` while torch.compile traces.

    If backward recomputes the graph, as under ``torch.utils.checkpoint``, it would draw another seed, and the gradients
    would be those of another dropout mask. The seed is therefore marked as a value that must be saved.
    """
    kept = partial(create_selective_checkpoint_contexts, _keep_all)
    seed: Tensor = checkpoint(draw_seed, use_reentrant=False, context_fn=kept)
    return seed


def _keep_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def _check_seed_is_kept() -> None:
    """Raise if torch.compile saves only a function's arguments for backward, and ignores that the seed is marked."""
    in_region = fx_traceback.current_meta.get("custom", {}).get("_region_activation_memory_budget")
    if 0 in (in_region, functorch_config.activation_memory_budget):
        raise ValueError(
            "dropout: with an activation memory budget of 0, torch.compile draws random numbers again in backward, and "
            "the gradients would be wrong; use a larger budget, or pass dropout_seed to seqpar.attention"
        )


class _SeedHeader(NamedTuple):
    """The dropout seed that a rank has drawn."""

    seed: int


def placement(
    sharding: Sharding, ranks: ParallelContext, options: AttentionOptions
) -> tuple[AttentionGroups, SequenceSharding]:
    """The groups of a call, and which positions their ranks hold.

    Raises:
        ValueError: the sharding is for other ranks.
    """
    own = ranks.mesh is not None or ranks.group is not None
    mesh, group = (ranks.mesh, ranks.group) if own else (sharding.mesh, sharding.group)
    tensor_size = 1
    if options.tensor_parallel:
        sharding.check_ranks(sequence_group(mesh, group, "tp_sp"))
        tensor_size, group = size_of(ranks.tensor), None
    if options.tensor_parallel and options.strategy == "local":
        groups = AttentionGroups()
    else:
        groups = resolve(options.strategy, mesh, group, dict(options.strategy_options))
    if groups.sequence is not None and not options.tensor_parallel:
        sharding.check_ranks(groups.sequence)
    if options.replicated:
        groups = with_replicated_keys(groups)
    ring, ulysses = groups.ring_size, groups.ulysses_size
    return groups, SequenceSharding(sharding.seq_len, sharding.layout, ring, ulysses, tensor_size)


def with_replicated_keys(groups: AttentionGroups) -> AttentionGroups:
    """The same ranks, each of which holds the keys and values of all of them."""
    return replace(groups, gather=False, chunks=None, replicated=True)


def make_call(
    head_dim: int,
    heads: Heads,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: int,
    mask: Mask,
    groups: AttentionGroups,
    sharding: SequenceSharding,
    options: AttentionOptions,
) -> AttentionCall:
    """The call for checked and resolved arguments. Every attention call of the package is made here."""
    if options.layer_mask is not None:
        mask = layer_mask(mask, *options.layer_mask)
    return AttentionCall(
        groups=groups,
        sharding=sharding,
        plan=attention_plan(mask, sharding, groups.ring_rank, groups.gathers, groups.per_host, groups.replicated),
        score=Score(
            softmax_scale=head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale,
            softcap=options.softcap,
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.detach().float(),
            sinks=None if sinks is None else sinks.detach(),
            dropout_p=options.dropout_p,
            dropout_seed=dropout_seed,
            head_offset=heads.queries.start,
        ),
        backend=options.backend,
        deterministic=options.deterministic,
        heads=heads,
        return_lse=options.return_lse,
    )


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    latent_weight: Tensor | None,
    mask: Mask,
    groups: AttentionGroups,
    sharding: Sharding,
    options: AttentionOptions,
) -> None:
    """Raise unless the tensors fit the mask and the sharding."""
    if groups.replicated:
        keys = f"k and v: {k.shape[1]} and {v.shape[1]} tokens; expected all {sharding.seq_len} of the sequence"
        if not k.shape[1] == v.shape[1] == sharding.seq_len:
            raise ValueError(keys)
        k, v = (x.narrow(1, 0, q.shape[1]) for x in (k, v))
    check_inputs(q, k, v, latent_weight, options.q_per_kv is None)
    if mask.batch not in (1, q.shape[0]):
        raise ValueError(f"mask: made for {mask.batch} batch rows, but q has {q.shape[0]}")
    mask.check_length(sharding.seq_len)
    if not options.tensor_parallel:  # otherwise q holds the tokens of several ranks, each of which has checked its own
        group = groups.sequence
        check_length(q.shape[1], sharding.seq_len, size_of(group), rank_in(group), sharding.layout, q.shape[2])


@torch.library.custom_op("seqpar::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    chosen: Tensor | None,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
    options: AttentionOptions,
    latent_weight: Tensor | None,
) -> list[Tensor]:
    """``attention_forward`` as an operator.

    Args:
        q, k, v: ``[b, s, h, d]``, ``[b, s, n, d]`` and ``[b, s, n, e]``.
        sinks: ``[h]``.
        alibi_slopes: ``[h]`` or ``[b, h]``.
        seed: the dropout seed, int64 ``[]`` on the host.
        chosen: of ``AttentionOptions.with_choice``.
        mask, sharding, options: of the call.
        ranks: of the call; ``ANY_RANKS`` for those of the sharding.
        latent_weight: ``[h, nope + e, w]``, if k and v are latents and rotated keys (see ``latent.py``).

    Returns:
        ``out [b, s, h, e]``; ``lse [b, h, s]``, which is undefined unless ``options.return_lse`` if the strategy is
        "auto" or has an all-to-all; the tensors of ``_kept_dtypes``; and with ``options.draws_seed`` rank 0's seed.
    """
    given, options = options, options.with_choice(chosen)
    groups, sequence = placement(sharding, ranks, options)
    kept_dtypes = _kept_dtypes(q, k, groups, sequence, given)

    def header() -> _SeedHeader:
        _check(q, k, v, latent_weight, mask, groups, sharding, options)
        return _SeedHeader(_number(seed))

    agreed = header() if not options.draws_seed else all_gather_header(header, sharding.sequence_group)[0]
    heads = options.heads(q.shape, k.shape)
    call = make_call(q.shape[3], heads, sinks, alibi_slopes, agreed.seed, mask, groups, sequence, options)
    call = with_latents(call, latent_weight, q.shape, v.shape)
    out, lse, *saved = attention_forward(call, q, k, v)
    results = [out, lse.flatten() if given.strategy == "auto" and not options.return_lse else lse]
    if kept_dtypes:
        kept = _to_keep(saved, head_exchange(call, q.shape, q.device))
        inputs = {x.data_ptr() for x in (q, k, v)}  # an operator must not return one of its arguments
        results += [(x.clone() if x.data_ptr() in inputs else x).flatten() for x in kept]
        results += [q.new_empty(0, dtype=dtype) for dtype in kept_dtypes[len(kept) :]]
    if options.draws_seed:
        results.append(torch.tensor(agreed.seed, device="cpu"))
    return [x.contiguous() for x in results]


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    chosen: Tensor | None,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
    options: AttentionOptions,
    latent_weight: Tensor | None,
) -> list[Tensor]:
    sharding, ranks = real(sharding), real(ranks)
    groups, sequence = placement(sharding, ranks, options)
    batch, length, heads, dim = q.shape
    out_dim = v.shape[3] if latent_weight is None else latent_weight.shape[1] - (dim - v.shape[3])
    dtype = accumulator(q.dtype)
    lse = q.new_empty(batch, heads, length, dtype=dtype)
    kept_dtypes = _kept_dtypes(q, k, groups, sequence, options)
    if kept_dtypes and not options.return_lse:
        size: Any = torch.library.get_ctx().new_dynamic_size() if options.strategy == "auto" else 0
        lse = q.new_empty(size, dtype=dtype)
    results = [q.new_empty(batch, length, heads, out_dim), lse]
    results += [q.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=dtype) for dtype in kept_dtypes]
    if options.draws_seed:
        _check_seed_is_kept()
        results.append(torch.empty((), dtype=torch.int64, device="cpu"))
    return results


def _kept_dtypes(
    q: Tensor, k: Tensor, groups: AttentionGroups, sequence: SequenceSharding, options: AttentionOptions
) -> list[torch.dtype]:
    """The dtypes of the tensors that the operator returns for its backward: none for a ring.

    With an all-to-all these are head shards, whose number and sizes depend on the length. They are returned flat, as a
    fixed number of tensors of any size: k and v, if they are exchanged again in backward, and for each chunk of heads
    the three of ``ulysses_forward``. The rest is empty. With strategy "auto" a ring may run, which returns k, v and q.

    As an operator must not return its arguments, sequence shards of q, k and v are copied, and nothing else is.
    """
    if options.strategy == "auto":
        chunks = min(MAX_CHUNKS, -(-q.shape[2] // 2))  # an all-to-all has at least two ranks
    elif (exchange := head_exchange_of(groups, sequence, options.heads(q.shape, k.shape), MAX_CHUNKS)) is not None:
        chunks = len(exchange.chunks)
    else:
        return []
    return [q.dtype] * 2 + [q.dtype, q.dtype, accumulator(q.dtype)] * chunks


def _to_keep(saved: Sequence[Tensor], exchange: HeadExchange | None) -> list[Tensor]:
    """The tensors of ``_kept_dtypes``, of those that ``attention_forward`` saves."""
    if exchange is None:
        q, k, v, *_ = saved
        return [k, v, q]
    chunks = 3 * len(exchange.chunks)
    again = saved[chunks:] or [saved[0].new_empty(0) for _ in range(2)]
    return [*again, *saved[:chunks]]


def _from_kept(
    kept: Sequence[Tensor],
    local: Sequence[Tensor],
    exchange: HeadExchange | None,
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    out_dim: int,
) -> list[Tensor]:
    """The tensors that ``attention_forward`` saves, of those of ``_to_keep`` and of ``local``, out and lse."""
    k, v, *rest = kept
    if exchange is None:
        out, lse = local
        batch, length, heads, _ = q_shape
        return [rest[0].view(q_shape), k.view(k_shape), v.view(v_shape), out, lse.view(batch, heads, length)]
    shapes = saved_shapes(exchange, q_shape, k_shape, v_shape, out_dim)
    saved = [x.view(shape) for x, shape in zip(rest, shapes, strict=False)]
    return saved + ([k.view(k_shape), v.view(v_shape)] if exchange.shares_kv else [])


@torch.library.custom_op("seqpar::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor | None,
    dlse: Tensor | None,
    kept: Sequence[Tensor],
    local: Sequence[Tensor],
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    chosen: Tensor | None,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
    options: AttentionOptions,
    latent_weight: Tensor | None,
    needs_weight_gradient: bool,
) -> list[Tensor]:
    """``attention_backward`` as an operator.

    Returns ``dq, dk, dv``, then ``dsinks`` if there are sinks, then the gradient of ``latent_weight`` if it is needed.

    Args:
        kept: k, v and q, or the tensors of ``_kept_dtypes``.
        local: the forward's ``out`` and ``lse``; empty if the strategy has an all-to-all and is not "auto".
        dout, dlse, q_shape, k_shape, v_shape: as for ``attention_backward``.
        sinks, alibi_slopes, seed, chosen, mask, sharding, ranks, options, latent_weight: as for the forward.
        needs_weight_gradient: whether the weight's gradient is returned.
    """
    options = options.with_choice(chosen)
    groups, sequence = placement(sharding, ranks, options)
    heads = options.heads(q_shape, k_shape)
    call = make_call(q_shape[3], heads, sinks, alibi_slopes, _number(seed), mask, groups, sequence, options)
    d_weight = new_weight_gradient(latent_weight, needs_weight_gradient)
    call = with_latents(call, latent_weight, q_shape, v_shape, d_weight)
    exchange = head_exchange(call, q_shape, kept[0].device)
    kept, local = ([x.contiguous() for x in tensors] for tensors in (kept, local))
    saved = _from_kept(kept, local, exchange, q_shape, k_shape, v_shape, call.v_head_dim(v_shape))
    gradients = attention_backward(call, saved, dout, dlse, q_shape, k_shape, v_shape)
    of_weight = None if d_weight is None else d_weight.to(kept[0].dtype)
    return [x.contiguous() for x in (*gradients, of_weight) if x is not None]


@attention_backward_op.register_fake
def _(
    dout: Tensor | None,
    dlse: Tensor | None,
    kept: Sequence[Tensor],
    local: Sequence[Tensor],
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    seed: Tensor | None,
    chosen: Tensor | None,
    mask: Mask,
    sharding: Sharding,
    ranks: ParallelContext,
    options: AttentionOptions,
    latent_weight: Tensor | None,
    needs_weight_gradient: bool,
) -> list[Tensor]:
    gradients = [kept[0].new_empty(shape) for shape in (q_shape, k_shape, v_shape)]
    others = sinks, latent_weight if needs_weight_gradient else None
    return gradients + [torch.empty_like(x) for x in others if x is not None]


@torch.library.custom_op("seqpar::positions", mutates_args=())
def positions_op(
    like: Tensor, chosen: Tensor | None, sharding: Sharding, ranks: ParallelContext, options: AttentionOptions
) -> Tensor:
    """Global positions of the tokens of ``like [b, s, ...]``, int64 ``[s]`` on the host. With replicated keys, the
    positions of all tokens.

    The result is cached, and must not be written to. Rotary embeddings recognise it by identity.
    """
    options = options.with_choice(chosen)
    groups, sequence = placement(sharding, ranks, options)
    if options.replicated:
        return sequence.together().rank_positions(0)
    return sequence.rank_positions(rank_in(groups.sequence))


@positions_op.register_fake
def _(
    like: Tensor, chosen: Tensor | None, sharding: Sharding, ranks: ParallelContext, options: AttentionOptions
) -> Tensor:
    return torch.empty(like.shape[1], dtype=torch.int64, device="cpu")


def _number(seed: Tensor | None) -> int:
    """The seed as an int. Its tensor is on the host, so reading it does not wait for a GPU."""
    return 0 if seed is None else int(seed.item())


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    q, k, v, sinks, alibi_slopes, seed, chosen, *ctx.call, latent_weight = inputs
    out, lse, *kept = output
    if ctx.call[-1].draws_seed:
        *kept, seed = kept
    ctx.set_materialize_grads(False)
    ctx.shapes = q.shape, k.shape, v.shape
    local = [out, lse] if ctx.call[-1].strategy == "auto" or not kept else []
    ctx.local = len(local)
    ctx.save_for_backward(sinks, alibi_slopes, seed, chosen, latent_weight, *local, *(kept or (k, v, q)))


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    sinks, alibi_slopes, seed, chosen, latent_weight, *saved = ctx.saved_tensors
    local, kept = saved[: ctx.local], saved[ctx.local :]
    dout, dlse = grads[0], grads[1] if ctx.call[-1].return_lse else None
    needs_weight_gradient = latent_weight is not None and ctx.needs_input_grad[-1]
    tensors = sinks, alibi_slopes, seed, chosen
    dq, dk, dv, *others = attention_backward_op(
        dout, dlse, kept, local, *ctx.shapes, *tensors, *ctx.call, latent_weight, needs_weight_gradient
    )
    d_weight = others.pop() if needs_weight_gradient else None
    return dq, dk, dv, others[0] if others else None, *[None] * 7, d_weight


attention_op.register_autograd(_backward, setup_context=_setup_context)


def seen_by_dispatch_mode() -> bool:
    """Whether a dispatch mode is on that must see attention as one operator, such as selective checkpointing's."""
    mode = _get_current_dispatch_mode()
    return mode is not None and not isinstance(mode, FakeTensorMode)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    dropout_seed: int,
    *,
    mask: Mask,
    groups: AttentionGroups,
    sequence: SequenceSharding,
    heads: Heads,
    options: AttentionOptions,
    sharding: Sharding | None,
    mesh: DeviceMesh | None,
    group: ProcessGroup | None,
    joins_backward: bool = True,
    latent_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of an eager call whose arguments are checked and resolved.

    Under a dispatch mode, such as that of selective checkpointing, this calls the operator. Only the operator needs
    ``sharding``, or ``mesh`` and ``group``, which describe the same ranks as ``groups`` and ``sequence``.
    ``joins_backward`` is False if it is known that no rank's inputs require gradients.
    """
    several = groups.ring_size * groups.ulysses_size > 1
    if several and joins_backward and gradient_state(q, k, v, sinks, latent_weight) == 1:
        q = with_gradient(q)
    if seen_by_dispatch_mode():
        ranks = ParallelContext(mesh, group)
        if sharding is None:
            strategy: Any = "tp_sp" if options.tensor_parallel else None
            sharding = Sharding(sequence.seq_len, sequence.layout, mesh=mesh, group=group, strategy=strategy)
        seed = torch.tensor(dropout_seed, device="cpu") if options.dropout_p else None
        out, lse, *_ = attention_op(
            q, k, v, sinks, alibi_slopes, seed, None, mask, sharding, ranks, options, latent_weight
        )
        return out, lse
    call = make_call(q.shape[3], heads, sinks, alibi_slopes, dropout_seed, mask, groups, sequence, options)
    out, lse = SequenceParallelAttention.apply(q, k, v, sinks, latent_weight, call)
    return out, lse
