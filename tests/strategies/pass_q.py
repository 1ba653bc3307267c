"""An algorithm that sends queries instead of keys: for a few queries over a long sequence of sharded keys.

Every rank gathers the queries of all ranks, attends to its own keys, and sends each rank the partial result of that
rank's queries. In backward dk and dv are complete where they are computed, and dq is summed.
Yang et al., "Context Parallelism for Scalable Million-Token Inference", 2024 (pass-Q).

Elements sent per rank of P, forward, N tokens: (P-1)/P * N * h * d, and (P-1)/P * N * h * (e + 1) in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from seqpar.comm.collectives import all_gather, start_all_to_all, sum_shards
from seqpar.kernels.base import Grads, OutputGrad, accumulator, merge_, row_delta
from seqpar.placement.placement import Placement
from seqpar.placement.strategies import STRATEGIES, Strategy
from seqpar.ranks.mesh import sequence_group_of
from seqpar.strategies.algorithm import Algorithm, AttentionGradients, Shapes
from seqpar.strategies.algorithms import ALGORITHMS
from seqpar.strategies.call import AttentionCall
from seqpar.strategies.local import Kernel, Seen


def place(mesh: DeviceMesh | None, group: ProcessGroup | None) -> Placement:
    group = sequence_group_of(mesh, group)
    return Placement(sequence_group=group, ring=group, algorithm="pass-Q")


class PassQ(Algorithm):
    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        kernel, lengths, rank = call.kernel(q, k, v), _lengths(call), call.plan.rank
        partial_results = []
        for q_rank, seen in zip(_of_ranks(call, q), _seen(call, kernel, q), strict=True):
            out, lse = kernel.forward(q_rank, k, v, seen)  # [b, q, h, e], [b, h, q] over this rank's keys, in float32
            partial_results.append(torch.cat([out, lse.transpose(1, 2).unsqueeze(-1)], 3).flatten())
        sends = [x.numel() for x in partial_results]
        receives = [sends[rank]] * len(lengths)
        received, pending = start_all_to_all(torch.cat(partial_results), sends, receives, call.placement.ring)
        pending.wait()
        acc, lse = kernel.empty(q)
        for x in received:
            out, out_lse = x.view(*q.shape[:3], kernel.v_head_dim + 1).split([kernel.v_head_dim, 1], 3)
            merge_(acc, lse, out.contiguous(), out_lse.squeeze(3).transpose(1, 2).contiguous())
        out, lse = kernel.finish((acc, lse), q.dtype)
        return out, lse, [q, k, v, out, lse]

    def backward(
        self, call: AttentionCall, saved: Sequence[Tensor], dout: Tensor, dlse: Tensor | None, shapes: Shapes
    ) -> AttentionGradients:
        q, k, v, out, lse = saved
        kernel = call.kernel(q, k, v, lse_gradient=dlse is not None)
        own = OutputGrad(dout, out, lse, row_delta(out, dout, dlse))
        assert own.delta is not None
        by_tensor = [_of_ranks(call, x) for x in (q, dout, out, lse.transpose(1, 2), own.delta.transpose(1, 2))]
        dqs = [torch.zeros_like(x, dtype=accumulator(q.dtype)) for x in by_tensor[0]]
        dk, dv = (torch.zeros_like(x, dtype=accumulator(q.dtype)) for x in (k, v))
        for dq, seen, q_rank, *output, lse_rank, delta in zip(dqs, _seen(call, kernel, q), *by_tensor, strict=True):
            statistics = (x.transpose(1, 2).contiguous() for x in (lse_rank, delta))
            kernel.backward(q_rank, k, v, OutputGrad(*output, *statistics), seen, Grads(dq, dk, dv))
        group = call.placement.sequence_group
        dq = dqs[0] if group is None else sum_shards(dqs, 1, group)
        return dq, dk, dv, kernel.dsinks(own)


def _lengths(call: AttentionCall) -> list[int]:
    tokens = call.placement.tokens
    return [len(tokens.ring_positions(rank)) for rank in range(tokens.ring)]


def _of_ranks(call: AttentionCall, x: Tensor) -> Sequence[Tensor]:
    """The tensors ``x [b, s, ...]`` of all ranks."""
    lengths = _lengths(call)
    return [y.contiguous() for y in all_gather(x, lengths, 1, call.placement.sequence_group).split(lengths, 1)]


def _seen(call: AttentionCall, kernel: Kernel, q: Tensor) -> Iterator[Seen]:
    """For each rank, which of this rank's keys its queries see."""
    plan = call.plan
    for rank in range(call.placement.tokens.ring):
        yield partial(plan.between, rank, plan.rank, q.device, kernel.needs_positions)


def register() -> None:
    """Make it a strategy of this process: "pass_q"."""
    ALGORITHMS["pass-Q"] = PassQ()
    STRATEGIES["pass_q"] = Strategy(place, "Yang et al., 2024", "(P-1)/P * N * h * (d * e + 4 * (d_v + 1))", "more")
