"""The algorithms: the ring's loop, an all-to-all around it, and one whose bits do not depend on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..kernels.base import Grads, accumulator
from ..placement.heads import Heads
from ..placement.placement import Placement
from ..sharding.spec import AttentionSpec
from .algorithm import Algorithm, AttentionGradients, Shapes
from .call import AttentionCall, Run
from .head_exchange import MAX_CHUNKS, HeadExchange, head_exchange, head_exchange_of
from .invariant import Invariant
from .ring import ring_backward, ring_forward
from .ulysses import ulysses_backward, ulysses_forward


class Ring(Algorithm):
    """``ring.py``: on one rank, in a ring and in an all-gather."""

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if call.has_all_keys and q.numel():
            kernel = call.kernel(q, k, v)
            seen = partial(call.plan.intervals, 0, q.device, kernel.needs_positions)
            out, lse = kernel.forward(q, k, v, seen, last=True)
        else:
            out, lse = ring_forward(Run(call, call.heads, q, k, v), q, k, v)
        return out, lse, [q, k, v, out, lse]

    def backward(
        self, call: AttentionCall, saved: Sequence[Tensor], dout: Tensor, dlse: Tensor | None, shapes: Shapes
    ) -> AttentionGradients:
        q, k, v, out, lse = saved
        lse_gradient = dlse is not None
        if call.has_all_keys and q.numel():
            kernel = call.kernel(q, k, v, lse_gradient=lse_gradient)
            seen = partial(call.plan.intervals, 0, q.device, kernel.needs_positions)
            output, grads = kernel.output_grad(dout, dlse, out, lse), Grads(None, None, None, True, True, True)
            kernel.backward(q, k, v, output, seen, grads)
            return *grads.tensors, kernel.dsinks(output)
        return ring_backward(Run(call, call.heads, q, k, v, lse_gradient=lse_gradient), dout, dlse, q, k, v, out, lse)


class AllToAll(Algorithm):
    """``ulysses.py``. For each chunk of heads it saves three head shards, and once k and v if they are sent again."""

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        exchange = _exchange(call, q.shape, q.device)
        out, *saved = ulysses_forward(exchange, partial(Run, call), q, k, v, call.v_head_dim(v.shape))
        lse = saved[-1].new_empty(0)
        if call.spec.return_lse:
            by_chunk = saved[2::3]
            lse = exchange.lse_to_sequence(by_chunk[0] if len(by_chunk) == 1 else torch.cat(by_chunk, 1))
        return out, lse, [*saved, *((k, v) if exchange.shares_kv else ())]

    def backward(
        self, call: AttentionCall, saved: Sequence[Tensor], dout: Tensor, dlse: Tensor | None, shapes: Shapes
    ) -> AttentionGradients:
        exchange = _exchange(call, shapes[0], dout.device)
        if call.spec.return_lse:
            dlse = exchange.lse_gradient_to_heads(dout, dlse)
        is_part = exchange.shares_kv or not all(chunk.has_kv for chunk in exchange.chunks)
        new_run = partial(Run, call, lse_gradient=dlse is not None, is_part=is_part)
        return ulysses_backward(exchange, new_run, saved, dout, dlse, *shapes)

    def lse_shape(self, spec: AttentionSpec, q_shape: Sequence[int]) -> tuple[int, ...]:
        return super().lse_shape(spec, q_shape) if spec.return_lse else (0,)

    # The sizes of head shards depend on the length, and their number depends on it too, up to a limit. Tensors that
    # are not there are empty. As an operator must not return its arguments, k and v are copied, and nothing else is.

    def kept_dtypes(self, placement: Placement, heads: Heads, dtype: torch.dtype) -> list[torch.dtype]:
        exchange = head_exchange_of(placement, heads, MAX_CHUNKS)
        assert exchange is not None
        return [dtype] * 2 + [dtype, dtype, accumulator(dtype)] * len(exchange.chunks)

    def keep(self, call: AttentionCall, saved: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        chunks = 3 * len(_exchange(call, q.shape, q.device).chunks)
        kept = [*(saved[chunks:] or [q.new_empty(0) for _ in range(2)]), *saved[:chunks]]
        inputs = {x.data_ptr() for x in (q, k, v)}
        kept = [(x.clone() if x.data_ptr() in inputs else x).flatten() for x in kept]
        dtypes = self.kept_dtypes(call.placement, call.heads, q.dtype)
        return kept + [q.new_empty(0, dtype=dtype) for dtype in dtypes[len(kept) :]]

    def restore(self, call: AttentionCall, kept: Sequence[Tensor], shapes: Shapes, out_dim: int) -> list[Tensor]:
        exchange = _exchange(call, shapes[0], kept[0].device)
        k, v, *in_heads = kept
        saved_shapes = exchange.saved_shapes(*shapes, out_dim)
        saved = [x.view(shape) for x, shape in zip(in_heads, saved_shapes, strict=False)]
        return saved + ([k.view(shapes[1]), v.view(shapes[2])] if exchange.shares_kv else [])


def _exchange(call: AttentionCall, q_shape: Sequence[int], device: torch.device) -> HeadExchange:
    exchange = head_exchange(call.placement, call.heads, q_shape, device)
    assert exchange is not None
    return exchange


RING, ALL_TO_ALL = Ring(), AllToAll()
ALGORITHMS: dict[str, Algorithm] = {"ring": RING, "all-to-all": ALL_TO_ALL, "invariant": Invariant()}


def algorithm_of(placement: Placement, heads: Heads) -> Algorithm:
    """The algorithm of a call with these heads. The same on every rank that this rank sends messages to."""
    if placement.algorithm is not None:
        return ALGORITHMS[placement.algorithm]
    # Tensor parallelism over more ranks than heads leaves ranks without heads, which have nothing to exchange.
    return ALL_TO_ALL if placement.tokens.ulysses > 1 and heads.queries else RING
