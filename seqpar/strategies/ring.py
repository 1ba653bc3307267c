"""Ring Attention: K/V rows are sent from rank to rank, step by step, behind the attention over the previous step's.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. All strategies share this
loop. ``seqpar.schedule`` decides which rows are sent at which step: on one rank the loop has one step, and for an
all-gather it has two. Neither forward nor backward branches on the layout or the mask.

[Note: overlap and buffers] Rank 2 of 4, full mask. While the kernel of one step runs, the K/V of the next step are on
the way, in receive buffers of their own; at most two such pairs exist at a time. In backward, the gradients of a step's
remote K/V are sent back to the rank that owns them behind the kernel of the next step.

    forward
    compute      | attend own kv    | attend kv of 1   | attend kv of 0   | attend kv of 3   | out, lse
    receive      | kv of 1 .......  | kv of 0 .......  | kv of 3 .......  |
    send own kv  | to 3 ..........  | to 0 ..........  | to 1 ..........  |

    backward
    compute      | grads of own kv  | grads of kv of 1 | grads of kv of 0 | grads of kv of 3 |
    receive      | kv of 1 .......  | kv of 0 .......  | kv of 3 .......  |
    send dkv     |                  |                  | of 1, to 1 ....  | of 0, to 0 ....  | of 3, to 3 ....
    receive dkv  |                  |                  | own, from 3 ...  | own, from 0 ...  | own, from 1 ...

Bytes sent per rank of P, forward, full mask: (P-1)/P * N * 2 d_kv * e. Backward sends K/V again, and dk, dv in float32.

Shapes: b batch, q queries of this rank, k keys of a step, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.p2p import Pending, exchange, make_ready
from ..comm.trace import count_step
from ..heads import Heads
from ..kernels import select
from ..kernels.base import Carry, OutputGrad, accumulator, empty_carry, finish, row_delta
from ..mesh import Ranks
from ..schedule import Step, on_device
from .call import AttentionCall


def ring_forward(call: AttentionCall, heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> Carry:
    """Attention of this rank's queries over the keys of all ranks of the ring.

    Args:
        call: the ranks, the mask and the score function.
        heads: the heads of ``q, k, v``, all or some of ``call.heads``.
        q: ``[b, q, h, d]``, contiguous.
        k, v: ``[b, k, n, d]``, contiguous.

    Returns:
        ``out [b, q, h, d]`` in q's dtype and ``lse [b, h, q]`` in float32 (float64 for float64).
    """
    ring, steps, score = call.groups.ring, call.steps(), call.score_of(heads)
    make_ready(ring, q.device)
    backend = select(call.backend, q, k, score, deterministic=call.deterministic, kv_index=heads.kv_index())
    # Ranks beyond the heads of an all-to-all have no query: they send K/V and compute nothing.
    last = max((i for i, step in enumerate(steps) if step.intervals is not None and q.numel()), default=-1)
    carry: Carry | None = None
    remote = RemoteKV.start(steps[0], k, v, ring)
    for i, step in enumerate(steps):
        step_k, step_v = remote.wait(k, v)
        if i + 1 < len(steps):
            remote = RemoteKV.start(steps[i + 1], k, v, ring)
        if step.intervals is not None and q.numel():
            carry = backend.forward(q, step_k, step_v, step.intervals, score, carry, i == last)
    return carry if carry is not None else finish(empty_carry(q), score, q.dtype)


def ring_backward(
    call: AttentionCall,
    heads: Heads,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of ``ring_forward``.

    Args:
        dout: ``[b, q, h, d]``, contiguous.
        dlse: ``[b, h, q]``, or None if the log-sum-exp has no gradient.
        call, heads, q, k, v, out, lse: what ``ring_forward`` was given and returned.

    Returns:
        ``dq [b, q, h, d]``, ``dk, dv [b, k, n, d]`` and ``dsinks [h]`` (None without sinks), in float32 (float64 for
        float64). ``dsinks`` is this rank's partial gradient.
    """
    ring, steps, score = call.groups.ring, call.steps(), call.score_of(heads)
    dtype = accumulator(q.dtype)
    backend = select(
        call.backend,
        q,
        k,
        score,
        lse_gradient=dlse is not None,
        deterministic=call.deterministic,
        kv_index=heads.kv_index(),
    )
    output = OutputGrad(dout, out, lse, row_delta(out, dout, dlse))
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    remote = RemoteKV.start(steps[0], k, v, ring)
    returning = ReturnedGrads.none()
    for i, step in enumerate(steps):
        step_k, step_v = remote.wait(k, v)
        if i + 1 < len(steps):
            remote = RemoteKV.start(steps[i + 1], k, v, ring)
        # Gradients of the local K/V accumulate in place; those of remote K/V in buffers that are sent to their owners.
        local = step.is_local
        step_dk, step_dv = (dk, dv) if local else (torch.zeros_like(x, dtype=dtype) for x in (step_k, step_v))
        if step.intervals is not None and q.numel():
            backend.backward(q, step_k, step_v, output, step.intervals, score, dq, step_dk, step_dv)
        returning.accumulate(dk, dv)
        returning = ReturnedGrads.none() if local else ReturnedGrads.start(step, step_dk, step_dv, ring)
    returning.accumulate(dk, dv)
    dsinks = None
    if score.sinks is not None:
        # The probability of the sink, [b, h, q]; nan for a sink of -inf where no key is seen.
        sink_weight = torch.exp(score.sinks.to(dtype)[:, None] - lse).nan_to_num_(0.0)
        dsinks = -(sink_weight * output.delta).sum(
            (0, 2)
        )  # [h]: the sink has no value, so only the denominator depends on it
    return dq, dk, dv, dsinks


@dataclass
class RemoteKV:
    """The K/V rows of one step, on their way into receive buffers."""

    step: Step
    pending: Pending
    buffers: list[Tensor]  # k of the first peer, v of the first peer, k of the second, ...

    @staticmethod
    def start(step: Step, k: Tensor, v: Tensor, ring: Ranks | None) -> RemoteKV:
        """Start the sends of this rank's rows of ``k, v`` and the receives of the step's; return at once."""
        if step.receives:
            count_step()
        buffers = [_recv_buffer(x, len(t.rows)) for t in step.receives for x in (k, v)]  # [b, rows, n, d]
        receives = list(zip((t.peer for t in step.receives for _ in range(2)), buffers, strict=True))
        sends = [(t.peer, t.rows.take(x)) for t in step.sends for x in (k, v)]
        return RemoteKV(step, exchange(sends, receives, ring), buffers)

    def wait(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The step's K/V, sorted by position; this rank's own ``k, v`` if the step receives nothing."""
        self.pending.wait()
        if not self.step.receives:
            return k, v
        if len(self.step.receives) > 1:
            k, v = torch.cat(self.buffers[::2], dim=1), torch.cat(self.buffers[1::2], dim=1)
        else:
            k, v = self.buffers
        if self.step.order is not None:
            order = on_device(self.step.order, k.device)
            k, v = k.index_select(1, order), v.index_select(1, order)
        return k, v


@dataclass
class ReturnedGrads:
    """Gradients of remote K/V on the way to their owners, and gradients of this rank's K/V on the way here."""

    step: Step | None
    pending: Pending
    buffers: list[Tensor]  # dk from the first peer, dv from the first peer, dk from the second, ...

    @staticmethod
    def none() -> ReturnedGrads:
        return ReturnedGrads(None, Pending([], []), [])

    @staticmethod
    def start(step: Step, step_dk: Tensor, step_dv: Tensor, ring: Ranks | None) -> ReturnedGrads:
        """Start the sends of the step's gradients, and the receives of those that its ``sends`` led to."""
        if step.order is not None:
            unsort = on_device(step.order, step_dk.device).argsort()
            step_dk, step_dv = step_dk.index_select(1, unsort), step_dv.index_select(1, unsort)
        sizes = [len(t.rows) for t in step.receives]
        by_peer = zip(step.receives, step_dk.split(sizes, 1), step_dv.split(sizes, 1), strict=True) if sizes else ()
        sends = [(t.peer, x.contiguous()) for t, *grads in by_peer for x in grads]
        buffers = [_recv_buffer(x, len(t.rows)) for t in step.sends for x in (step_dk, step_dv)]  # [b, rows, n, d]
        receives = list(zip((t.peer for t in step.sends for _ in range(2)), buffers, strict=True))
        return ReturnedGrads(step, exchange(sends, receives, ring), buffers)

    def accumulate(self, dk: Tensor, dv: Tensor) -> None:
        """Wait, and add the received gradients to this rank's."""
        self.pending.wait()
        if self.step is None:
            return
        for i, transfer in enumerate(self.step.sends):
            transfer.rows.add_to(dk, self.buffers[2 * i])
            transfer.rows.add_to(dv, self.buffers[2 * i + 1])


def _recv_buffer(like: Tensor, rows: int) -> Tensor:
    return like.new_empty(like.shape[0], rows, *like.shape[2:])
