"""The loop that every strategy shares: visit the keys of the other ranks, step by step, and attend to them.

Ring Attention (Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023), with the
steps of ``seqpar.schedule``: the keys of the next step are on their way before this step's computation starts, in
forward and in backward, and gradients of visiting keys go home in float32 behind the next step's computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.p2p import Pending, exchange, make_ready
from ..comm.trace import count_hop
from ..kernels import select
from ..kernels.base import Carry, Score, accumulator, empty_carry, finish, row_delta
from ..mesh import Ranks
from ..schedule import KeyIntervals, Step, on_device


@dataclass
class _Visit:
    """Visiting keys and values of one step, on their way."""

    step: Step
    pending: Pending
    received: list[Tensor]  # k of the first peer, v of the first peer, k of the second, ...

    def wait(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The step's keys and values in increasing position; this rank's own ``k, v`` when nothing was fetched."""
        self.pending.wait()
        if not self.step.fetch:
            return k, v
        if len(self.step.fetch) > 1:
            k, v = torch.cat(self.received[::2], dim=1), torch.cat(self.received[1::2], dim=1)
        else:
            k, v = self.received
        if self.step.order is not None:
            order = on_device(self.step.order, k.device)
            k, v = k.index_select(1, order), v.index_select(1, order)
        return k, v


def _start(step: Step, k: Tensor, v: Tensor, group: Ranks | None) -> _Visit:
    if step.fetch:
        count_hop()
    received = [_room(x, len(t.rows)) for t in step.fetch for x in (k, v)]
    receives = list(zip((t.peer for t in step.fetch for _ in range(2)), received, strict=True))
    sends = [(t.peer, t.rows.take(x)) for t in step.serve for x in (k, v)]
    return _Visit(step, exchange(sends, receives, group), received)


def _rows(step: Step, q: Tensor) -> KeyIntervals | None:
    """The step's intervals, if there are queries: ranks beyond the heads of an all-to-all have none."""
    return step.rows if q.numel() else None


def _room(like: Tensor, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(like.shape[0], rows, *like.shape[2:], dtype=dtype)


def visit_forward(
    steps: tuple[Step, ...], q: Tensor, k: Tensor, v: Tensor, score: Score, backend: str, group: Ranks | None
) -> Carry:
    """Attention of the local queries over the keys of the whole ring.

    ``q [batch, q_len, heads, head_dim]``, ``k, v [batch, k_len, kv_heads, head_dim]``. Returns the output in
    ``q.dtype`` and the float32 ``lse [batch, heads, q_len]``.
    """
    make_ready(group, q.device)
    chosen = select(backend, q, k, score)
    visible = [i for i, step in enumerate(steps) if _rows(step, q) is not None]
    carry: Carry | None = None
    coming = _start(steps[0], k, v, group)
    for i, step in enumerate(steps):
        keys, values = coming.wait(k, v)
        if i + 1 < len(steps):
            coming = _start(steps[i + 1], k, v, group)
        if (rows := _rows(step, q)) is not None:
            carry = chosen.forward(q, keys, values, rows, score, carry, i == visible[-1])
    return carry if carry is not None else finish(empty_carry(q), score, q.dtype)


def visit_backward(
    steps: tuple[Step, ...],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    score: Score,
    backend: str,
    group: Ranks | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of the local ``q, k, v`` (float32, float64 for float64) and this rank's share of the sinks'."""
    dtype = accumulator(q.dtype)
    chosen = select(backend, q, k, score, lse_gradient=dlse is not None)
    delta = row_delta(out, dout, dlse)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    coming = _start(steps[0], k, v, group)
    going = _Homeward.nothing()
    for i, step in enumerate(steps):
        keys, values = coming.wait(k, v)
        if i + 1 < len(steps):
            coming = _start(steps[i + 1], k, v, group)
        own = not step.fetch and not step.serve
        dkeys, dvalues = (dk, dv) if own else (torch.zeros_like(x, dtype=dtype) for x in (keys, values))
        if (rows := _rows(step, q)) is not None:
            chosen.backward(dout, q, keys, values, out, lse, delta, rows, score, dq, dkeys, dvalues)
        going.arrive(dk, dv)
        going = _Homeward.nothing() if own else _send_home(step, dkeys, dvalues, group)
    going.arrive(dk, dv)
    dsinks = None
    if score.sinks is not None:
        weight = torch.exp(score.sinks.to(dtype)[:, None] - lse)  # the sink's probability; its value is 0
        dsinks = -(weight * delta).sum((0, 2))
    return dq, dk, dv, dsinks


@dataclass
class _Homeward:
    """Gradients of visiting keys on their way to their owners, and those of this rank's keys on their way here."""

    step: Step | None
    pending: Pending
    received: list[Tensor]

    @staticmethod
    def nothing() -> _Homeward:
        return _Homeward(None, Pending([], []), [])

    def arrive(self, dk: Tensor, dv: Tensor) -> None:
        """Wait, and add what came in to this rank's gradients."""
        self.pending.wait()
        if self.step is None:
            return
        for i, transfer in enumerate(self.step.serve):
            transfer.rows.add_to(dk, self.received[2 * i])
            transfer.rows.add_to(dv, self.received[2 * i + 1])


def _send_home(step: Step, dkeys: Tensor, dvalues: Tensor, group: Ranks | None) -> _Homeward:
    if step.order is not None:
        back = on_device(step.order, dkeys.device).argsort()
        dkeys, dvalues = dkeys.index_select(1, back), dvalues.index_select(1, back)
    sizes = [len(t.rows) for t in step.fetch]
    pieces = zip(step.fetch, dkeys.split(sizes, dim=1), dvalues.split(sizes, dim=1), strict=True) if sizes else ()
    sends = [(t.peer, x.contiguous()) for t, *grads in pieces for x in grads]
    received = [_room(x, len(t.rows)) for t in step.serve for x in (dkeys, dvalues)]
    receives = list(zip((t.peer for t in step.serve for _ in range(2)), received, strict=True))
    return _Homeward(step, exchange(sends, receives, group), received)
