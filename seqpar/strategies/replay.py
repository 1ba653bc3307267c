"""Attention of all ranks in one process: the same programs and kernels, with copies for messages.

Shapes: b batch, s tokens of all ranks, h query heads, n KV heads, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..base.cache import is_captured
from ..comm.p2p import links_of
from ..masks.mask import Mask
from ..placement.layout import Layout
from ..placement.placement import ANY_RANKS
from ..ranks.in_process import Crew
from ..sharding.sharding import Sharding
from ..sharding.shards import in_order, local_shard
from ..sharding.spec import AttentionSpec
from .auto import named
from .autograd import once_differentiable
from .call import AttentionCall, Record
from .operators import attention_gradients, compute
from .prepare import new_call

OfRank = TypeVar("OfRank")


def attend_in_process(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    mask: Mask,
    layout: Layout,
    crew: Crew,
    *,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    seed: Tensor | None = None,
    latent_weight: Tensor | None = None,
    records: Sequence[Record | None] = (),
) -> tuple[Tensor, Tensor | None]:
    """``attend`` on every rank of ``crew``: ``out [b, s, h, e]`` and, with ``spec.return_lse``, ``lse [b, h, s]``.

    Args:
        q, k, v: ``[b, s, h, d]``, ``[b, s, n, d]`` and ``[b, s, n, e]``, checked.
        spec, mask, sinks, alibi_slopes, seed, latent_weight: see ``attend``.
        layout: which tokens each rank holds.
        crew: the ranks.
        records: for each rank, what notes its tensors (see ``AttentionCall``).
    """
    if q.device.type == "cuda" and is_captured():
        raise RuntimeError("replay: a CUDA graph cannot capture it, because its ranks are threads; capture attention")
    shardings = [Sharding(q.shape[1], layout, group=rank) for rank in crew.ranks]
    spec = named(spec, mask, q.shape[2], k.shape[2], shardings[0])
    others = spec, mask, shardings, crew, torch.is_grad_enabled(), records
    out, lse = _Replay.apply(q, k, v, sinks, alibi_slopes, seed, latent_weight, others)
    return out, lse


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        q, k, v, sinks, alibi_slopes, seed, latent_weight, others = arguments
        spec, mask, shardings, crew, has_backward, records = others
        tokens, ranks = shardings[0].tokens, range(len(shardings))
        shards = [
            (local_shard(q, 1, tokens, i), local_shard(k, 1, tokens, i), local_shard(v, 1, tokens, i)) for i in ranks
        ]
        values = sinks, alibi_slopes, seed, latent_weight, spec, mask
        calls = [
            replace(  # all ranks use the stream of the kernels
                new_call(*shards[rank], *values, shardings[rank], ANY_RANKS), kv_ready=None, record=record
            )
            for rank, record in zip(ranks, records or [None] * len(ranks), strict=True)
        ]
        if has_backward and any(ctx.needs_input_grad) and (why := unknown_sums(calls[0], q.device)):
            raise ValueError(f"replay: {why}")
        shapes = [tuple(x.shape for x in of_rank) for of_rank in shards]
        results = _on_ranks(crew, q.device, lambda rank: compute(calls[rank], *shards[rank], latent_weight))
        saved = [of_rank for _, _, of_rank in results]
        ctx.set_materialize_grads(False)
        ctx.constants = calls, shapes, tokens, crew, [len(of_rank) for of_rank in saved]
        ctx.save_for_backward(sinks, alibi_slopes, latent_weight, *(x for of_rank in saved for x in of_rank))
        out = in_order(torch.cat([x for x, _, _ in results], 1), 1, tokens)
        lse = in_order(torch.cat([x for _, x, _ in results], 2), 2, tokens) if spec.return_lse else None
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        (calls, shapes, tokens, crew, counts), (_, _, latent_weight, *flat) = ctx.constants, ctx.saved_tensors
        saved = [[flat.pop(0) for _ in range(count)] for count in counts]

        def gradients(rank: int) -> tuple[Tensor | None, ...]:
            dout_local, dlse_local = (
                None if x is None else local_shard(x, dim, tokens, rank) for x, dim in ((dout, 1), (dlse, 2))
            )
            of_weight = latent_weight, latent_weight is not None and ctx.needs_input_grad[6]
            return attention_gradients(calls[rank], saved[rank], dout_local, dlse_local, shapes[rank], *of_weight)

        *by_tensor, by_sinks, by_weight = zip(*_on_ranks(crew, saved[0][0].device, gradients), strict=True)
        dq, dk, dv = (in_order(torch.cat(parts, 1), 1, tokens) for parts in by_tensor)
        dsinks, d_weight = (None if parts[0] is None else reduce(add, parts) for parts in (by_sinks, by_weight))
        return dq, dk, dv, dsinks, None, None, d_weight, None


def _on_ranks(crew: Crew, device: torch.device, body: Callable[[int], OfRank]) -> list[OfRank]:
    """``body`` on every rank, in the modes and on the stream of this thread, which other threads do not have."""
    inference, stream = torch.is_inference_mode_enabled(), None
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)

    def run(rank: int) -> OfRank:
        on_stream: AbstractContextManager[object] = nullcontext() if stream is None else torch.cuda.stream(stream)
        with torch.inference_mode(inference), torch.no_grad(), on_stream:
            return body(rank)

    return crew.run(run)


def unknown_sums(call: AttentionCall, device: torch.device) -> str:
    """Why the gradients cannot be replayed: backward adds them in the order of a collective. "" if they can be.

    This rank's own term of a sum is 0 where its ranks are all that there are, so that the sum of three has two terms.
    """
    links, plan = links_of(call.placement, device), call.plan
    if plan.num_steps == 1 or not plan.dense or links.share_memory:
        return ""
    for link, most in ((links.within, 3 if links.across is None else 2), (links.across, 2)):
        if link is not None and not link.reads_in_place and link.ranks.size() > most:
            return (
                f"in context_parallel's all-gather, {link.ranks.size()} ranks add the gradients of keys and values in "
                "a reduce-scatter, whose order of sums its process group decides (NCCL, gloo), so that they cannot be "
                "replayed bit by bit; replay the forward alone, under torch.no_grad(), or let the ranks use comm='p2p' "
                "or strategy='ring'"
            )
    return ""
