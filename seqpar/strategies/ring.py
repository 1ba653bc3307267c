"""Ring Attention: K/V rows are sent from rank to rank, step by step, behind the attention over the previous step's.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. All strategies share this
loop. ``seqpar.schedule`` decides which rows are sent at which step: on one rank the loop has one step, and for an
all-gather it has two. Neither forward nor backward branches on the layout or the mask.

[Note: overlap and buffers] Rank 2 of 4, full mask. While the kernel of one step runs, the K/V of the next two steps are
on the way, in receive buffers of their own, so that a transfer has the time of two kernels. In backward, the gradients
of a step's remote K/V are sent back to the rank that owns them behind the kernel of the next step.

    forward
    compute      | attend own kv    | attend kv of 1   | attend kv of 0   | attend kv of 3   | out, lse
    receive      | kv of 1 ......  kv of 0 .........     kv of 3 .........                   |
    send own kv  | to 3 .........  to 0 ............     to 1 ............                   |

    backward
    compute      | grads of own kv  | grads of kv of 1 | grads of kv of 0 | grads of kv of 3 |
    receive      | kv of 1 ......  kv of 0 .........     kv of 3 .........                   |
    send dkv     |                  |                  | of 1, to 1 ....  | of 0, to 0 ....  | of 3, to 3 ....
    receive dkv  |                  |                  | own, from 3 ...  | own, from 0 ...  | own, from 1 ...

An all-gather (``comm="all_gather"``) is one remote step. If every rank needs all keys, it is a collective, and the
gradients return by a reduce-scatter. Otherwise its messages are exchanged between pairs of ranks.

Bytes sent per rank of P, forward, full mask: (P-1)/P * N * 2 d_kv * e. Backward sends K/V again, and dk, dv in float32.

Shapes: b batch, q queries of this rank, k keys of a step, h query heads, n KV heads, d head_dim. Messages hold k and v,
or dk and dv, of some rows: ``[2, b, rows, n, d]``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..comm.collectives import start_all_gather, start_reduce_scatter
from ..comm.p2p import Pending, exchange, make_ready
from ..comm.trace import count_step
from ..heads import Heads
from ..kernels import select
from ..kernels.base import Carry, OutputGrad, accumulator, empty_carry, finish, row_delta
from ..mesh import Ranks
from ..schedule import AttentionPlan, GatheredKeys, Selection, Step
from .call import AttentionCall

# The K/V of this many remote steps are on the way at a time.
_AHEAD = 2
# The chunks of an all-gather are large, and each has the time of a whole chunk's kernel.
_AHEAD_OF_GATHER = 1


def ring_forward(call: AttentionCall, heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> Carry:
    """Attention of this rank's queries over the keys of all ranks of the ring.

    Args:
        call: the ranks, the plan and the score function.
        heads: the heads of ``q, k, v``, all or some of ``call.heads``.
        q: ``[b, q, h, d]``, contiguous.
        k, v: ``[b, k, n, d]``, contiguous.

    Returns:
        ``out [b, q, h, d]`` in q's dtype and ``lse [b, h, q]`` in float32 (float64 for float64).
    """
    make_ready(call.groups.ring, q.device)
    backend = select(
        call.backend,
        q,
        k,
        call.score_of(heads),
        deterministic=call.deterministic,
        kv_index=heads.kv_index(),
    )
    remote = _RemoteSteps(call, heads, k, v)
    last = max((i for i, step in enumerate(call.plan) if step.keys is not None and q.numel()), default=-1)
    carry: Carry | None = None
    if (seen := call.intervals(0, q)) is not None:
        carry = backend.forward(q, k, v, seen, call.score_of(heads), None, last == 0)
    parts = remote.parts
    carries: list[Carry | None] = [carry] if len(parts) == 1 else [_carry_of(carry, x.queries_in(heads)) for x in parts]
    for number, part, i, step_k, step_v in remote:
        if (seen := call.intervals(i, q)) is not None:
            queries, score = _of_heads(q, part.queries_in(heads)), call.score_of(part)
            carries[number] = backend.forward(queries, step_k, step_v, seen, score, carries[number], i == last)
    if last == -1:  # no query sees any key
        return finish(empty_carry(q), call.score_of(heads), q.dtype)
    results = [carry for carry in carries if carry is not None]
    if last == 0 or len(results) == 1:
        return carry if carry is not None and last == 0 else results[0]
    return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 1)


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
    plan, ring, score = call.plan, call.groups.ring, call.score_of(heads)
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
    needs_delta = backend.reads_delta or score.sinks is not None
    delta = row_delta(out, dout, dlse) if needs_delta else None
    dq = torch.empty_like(q, dtype=dtype)
    dkv = k.new_empty(2, *k.shape, dtype=dtype)  # [2, b, k, n, d]: gradients of this rank's K/V

    def backward(
        part: Heads, i: int, step_k: Tensor, step_v: Tensor, dk: Tensor, dv: Tensor, *, new_dq: bool, new_dkv: bool
    ) -> None:
        """Add the gradients of step ``i`` for some heads, or write them where there are none yet."""
        at = part.queries_in(heads)
        part_dq = _of_heads(dq, at)
        if (seen := call.intervals(i, q)) is not None:
            part_q, part_dout, part_out = (_of_heads(x, at) for x in (q, dout, out))
            part_delta = None if delta is None else delta[:, at.start : at.stop]
            output = OutputGrad(part_dout, part_out, lse[:, at.start : at.stop], part_delta)
            part_score = call.score_of(part)
            backend.backward(
                part_q, step_k, step_v, output, seen, part_score, part_dq, dk, dv, new_dq=new_dq, new_dkv=new_dkv
            )
            return
        for x, new in ((part_dq, new_dq), (dk, new_dkv), (dv, new_dkv)):
            if new:
                x.zero_()

    def own_backward(part: Heads, *, new_dq: bool, new_dkv: bool) -> None:
        at = part.kv_in(heads)
        backward(part, 0, *(_of_heads(x, at) for x in (k, v, *dkv)), new_dq=new_dq, new_dkv=new_dkv)

    remote = _RemoteSteps(call, heads, k, v)
    first, *rest = [heads] if all(step.is_local for step in plan) else _halves(heads)
    for part in rest:  # computed at the end, when these hold the gradients of the remote steps
        _of_heads(dq, part.queries_in(heads)).zero_()
        _of_heads(dkv, part.kv_in(heads)).zero_()
    own_backward(first, new_dq=True, new_dkv=not any(set(part.kv) & set(first.kv) for part in rest))
    accumulate_returned: Callable[[], None] = _nothing
    for _, part, i, step_k, step_v in remote:
        # Gradients of remote K/V are written to buffers that are sent to their owners.
        grads = _new_gradients(plan[i], step_k, dtype)
        if grads:
            backward(part, i, step_k, step_v, *(grads if len(grads) == 2 else grads[0]), new_dq=False, new_dkv=True)
        del step_k, step_v  # what is sent now takes their memory
        accumulate_returned()
        own_dkv = _of_heads(dkv, part.kv_in(heads))
        accumulate_returned = _return_gradients(plan, plan[i], grads, own_dkv, ring)
    for part in rest:  # behind the last return
        own_backward(part, new_dq=False, new_dkv=False)
    accumulate_returned()
    dsinks = None
    if score.sinks is not None:
        # The probability of the sink, [b, h, q]; nan for a sink of -inf where no key is seen.
        assert delta is not None
        sink_weight = torch.exp(score.sinks.to(dtype)[:, None] - lse).nan_to_num_(0.0)
        dsinks = -(sink_weight * delta).sum((0, 2))  # [h]: the sink has no value, only a weight in the denominator
    return dq, dkv[0], dkv[1], dsinks


class _RemoteSteps:
    """The steps with remote keys, part by part: the part's number and heads, the step, and its K/V ``[b, k, n, d]``.

    The first transfers start when it is made, and those of the next steps whenever a step is asked for. In a step
    without keys for this rank, K/V are this rank's own.
    """

    def __init__(self, call: AttentionCall, heads: Heads, k: Tensor, v: Tensor) -> None:
        self.parts = call.parts(heads, k)
        self._plan, self._ring = call.plan, call.groups.ring
        local = [_LocalKV(*(_of_heads(x, part.kv_in(heads)) for x in (k, v))) for part in self.parts]
        # Also the steps in which this rank has no messages: all ranks start theirs in the same order, ahead of the same
        # kernels and returns.
        self._tasks = [(number, i) for number in range(len(self.parts)) for i in range(1, len(call.plan))]
        self._to_start = deque((local[number], i) for number, i in self._tasks)
        self._started: deque[Callable[[], tuple[Tensor, Tensor]]] = deque()
        self._ahead = _AHEAD_OF_GATHER if call.plan.gather else _AHEAD
        self._start(self._ahead)

    def _start(self, ahead: int) -> None:
        """Start transfers, until ``ahead`` are on the way."""
        while self._to_start and len(self._started) < ahead:
            local, i = self._to_start.popleft()
            self._started.append(_start_step(self._plan, i, local, self._ring))

    def __iter__(self) -> Iterator[tuple[int, Heads, int, Tensor, Tensor]]:
        for number, i in self._tasks:
            self._start(self._ahead + 1)
            yield number, self.parts[number], i, *self._started.popleft()()


class _LocalKV:
    """This rank's K/V, and the messages that hold rows of them."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v  # [b, k, n, d]
        self._all_rows: Tensor | None = None

    def message(self, rows: Selection, length: int | None = None) -> Tensor:
        """``[2, b, rows, n, d]``; ``[2, b, length, n, d]`` with a ``length``, the last rows of which have any value."""
        full = len(rows) == self.k.shape[1]
        if full and self._all_rows is not None:
            return self._all_rows
        batch, _, heads, dim = self.k.shape
        message = self.k.new_empty(2, batch, length or len(rows), heads, dim)
        for i, x in enumerate((self.k, self.v)):
            rows.copy_to(message[i, :, : len(rows)], x)
        if full:
            self._all_rows = message  # every step of the ring sends it again
        return message


def _start_step(
    plan: AttentionPlan, index: int, local: _LocalKV, ring: Ranks | None
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Start sending and receiving the K/V of a step. The returned function waits for them and returns them."""
    step = plan[index]
    if step.receives:
        count_step()
    if plan.dense and ring is not None:
        rows = Selection(((0, local.k.shape[1]),))
        gathered, pending = start_all_gather(local.message(rows, plan.longest), ring)  # [ranks, 2, b, longest, n, d]
        received = {t.peer: gathered[t.peer][:, :, : len(t.rows)] for t in step.receives}
        del gathered
    else:
        batch, _, heads, dim = local.k.shape
        received = {t.peer: local.k.new_empty(2, batch, len(t.rows), heads, dim) for t in step.receives}
        pending = _exchange(step, {t.peer: local.message(t.rows) for t in step.sends}, received, ring)

    def wait() -> tuple[Tensor, Tensor]:
        pending.wait()
        if not received:
            return local.k, local.v
        k, v = _sorted_keys(step, received)
        return k, v

    return wait


def _sorted_keys(step: Step, received: dict[int, Tensor]) -> Tensor:
    """The received messages ``[2, b, rows, n, d]`` as one, sorted by position. Empties ``received``."""
    if not isinstance(step.keys, GatheredKeys) or len(received) == 1:
        return received.pop(step.receives[0].peer)
    like = next(iter(received.values()))
    rows = like.new_empty(*like.shape[:2], len(step.keys), *like.shape[3:])  # [2, b, k, n, d]
    for i, transfer in enumerate(step.receives):
        step.keys.scatter(i, received.pop(transfer.peer), rows)
    return rows


def _new_gradients(step: Step, step_k: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Empty tensors for the gradients of a step's remote keys: dk and dv in one message, or in a tensor each.

    Those of an all-gather are copied once more before they are sent, so that dk can be freed before dv is copied.
    """
    if not step.receives:
        return []
    if isinstance(step.keys, GatheredKeys):
        return [torch.empty_like(step_k, dtype=dtype) for _ in range(2)]
    return [step_k.new_empty(2, *step_k.shape, dtype=dtype)]


def _return_gradients(
    plan: AttentionPlan, step: Step, grads: list[Tensor], own_dkv: Tensor, ring: Ranks | None
) -> Callable[[], None]:
    """Start sending a step's gradients to the ranks that own its K/V, and receiving those of this rank's K/V.

    Args:
        plan, step: the step's.
        grads: what ``_new_gradients`` made. Emptied, so that its memory can be freed.
        own_dkv: ``[2, b, k, n, d]``, the gradients of this rank's K/V.
        ring: the ranks.

    Returns:
        A function that waits, and adds the received gradients to ``own_dkv``.
    """
    accumulate = []
    for target in own_dkv if plan.gather else [own_dkv]:
        grad = grads.pop(0) if grads else None
        if plan.dense and ring is not None:
            accumulate.append(_start_reduce_scatter(plan, step, grad, target, ring))
        else:
            accumulate.append(_start_return(step, grad, target, ring))
        del grad

    def accumulate_all() -> None:
        while accumulate:
            accumulate.pop(0)()

    return accumulate_all


def _start_return(step: Step, grad: Tensor | None, target: Tensor, ring: Ranks | None) -> Callable[[], None]:
    """Send each peer the rows of ``grad [..., k, n, d]`` that it owns; receive what is to be added to ``target``."""
    sends = {}
    for i, transfer in enumerate(step.receives):
        assert grad is not None
        sends[transfer.peer] = message = grad
        if isinstance(step.keys, GatheredKeys) and len(step.receives) > 1:
            sends[transfer.peer] = message = _with_rows(grad, len(transfer.rows))
            step.keys.gather(i, grad, message)
    # Gradients come from the ranks that K/V were sent to.
    received = {t.peer: _with_rows(target, len(t.rows)) for t in step.sends}
    pending = _exchange(step, sends, received, ring)

    def accumulate() -> None:
        pending.wait()
        for transfer in step.sends:
            transfer.rows.add_to(target, received.pop(transfer.peer))

    return accumulate


def _start_reduce_scatter(
    plan: AttentionPlan, step: Step, grad: Tensor | None, target: Tensor, ring: Ranks
) -> Callable[[], None]:
    """The same as a collective: sum the ranks' gradients ``[..., k, n, d]`` of this rank's K/V."""
    by_rank = target.new_empty(ring.size(), *target.shape[:-3], plan.longest, *target.shape[-2:])
    by_rank[ring.rank()].zero_()  # accumulated in ``target`` already
    for i, transfer in enumerate(step.receives):
        assert grad is not None and isinstance(step.keys, GatheredKeys)
        step.keys.gather(i, grad, by_rank[transfer.peer][..., : len(transfer.rows), :, :])
    total, pending = start_reduce_scatter(by_rank, ring)
    del by_rank

    def accumulate() -> None:
        pending.wait()
        target.add_(total[..., : target.shape[-3], :, :])

    return accumulate


def _exchange(step: Step, sends: dict[int, Tensor], received: dict[int, Tensor], ring: Ranks | None) -> Pending:
    """Exchange messages with the step's peers, in its groups of peers."""
    groups = [
        exchange([(p, sends[p]) for p in peers if p in sends], [(p, received[p]) for p in peers if p in received], ring)
        for peers in step.groups
    ]
    return Pending.all(groups)


def _with_rows(like: Tensor, rows: int) -> Tensor:
    """An empty tensor shaped as ``like [..., k, n, d]``, of ``rows`` rows."""
    return like.new_empty(*like.shape[:-3], rows, *like.shape[-2:])


def _halves(heads: Heads) -> list[Heads]:
    """The heads in two parts that can be computed one after the other, if possible."""
    if heads.kv_index() is not None or len(heads.queries) < 2:
        return [heads]
    # Whole groups of query heads; or the query heads of a single KV head.
    groups = len(heads.kv) if len(heads.kv) > 1 else len(heads.queries)
    cut = (groups + 1) // 2 * (len(heads.queries) // groups)
    return [heads[range(cut)], heads[range(cut, len(heads.queries))]]


def _carry_of(carry: Carry | None, heads: range) -> Carry | None:
    """The carry of some of the heads."""
    if carry is None:
        return None
    acc, lse = carry
    return _of_heads(acc, heads), lse[:, heads.start : heads.stop].contiguous()


def _of_heads(x: Tensor, heads: range) -> Tensor:
    """Some of the heads of ``x [..., heads, head_dim]``."""
    return x if len(heads) == x.shape[-2] else x[..., heads.start : heads.stop, :]


def _nothing() -> None:
    pass
