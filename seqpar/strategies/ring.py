"""Ring Attention: ranks send K/V rows to one another step by step, while they attend to the previous step's rows.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. All strategies share this
loop. ``seqpar.schedule`` decides which rows are sent at which step: on one rank the loop has one step, and for an
all-gather it has two. Neither forward nor backward branches on the layout or the mask.

[Note: overlap and buffers] Rank 2 of 4, full mask. While the kernel of one step runs, the rank receives the K/V of the
next two steps into separate buffers, so each transfer may take as long as two kernels. In backward, the gradients of a
step's remote K/V are sent back to the rank that owns the K/V while the kernel of the next step runs.

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
gradients return by a reduce-scatter. Otherwise its messages are exchanged between pairs of ranks. Over several hosts,
both have two levels. ``remote.py`` orders the transfers and ``transport.py`` sends them.

Bytes sent per rank of P, forward, full mask: (P-1)/P * N * 2 d_kv * e. Backward sends K/V again, and dk, dv in float32.

Shapes: b batch, q queries of this rank, k keys of a step, h query heads, n KV heads, d head_dim of q and k, e head_dim
of v. In the formula of bytes, 2 d_kv is the number of elements of k and v together for one token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..heads import Heads
from ..kernels import select
from ..kernels.base import Carry, Grads, OutputGrad, accumulator, empty_carry, finish, row_delta
from .call import AttentionCall
from .remote import RemoteSteps, Returns, connect, new_gradients, of_heads
from .transport import transport_of


def ring_forward(call: AttentionCall, heads: Heads, q: Tensor, k: Tensor, v: Tensor) -> Carry:
    """Attention of this rank's queries over the keys of all ranks of the ring.

    Args:
        call: the ranks, the plan and the score function.
        heads: the heads of ``q, k, v``, all or some of ``call.heads``.
        q: ``[b, q, h, d]``, contiguous.
        k: ``[b, k, n, d]``, contiguous.
        v: ``[b, k, n, e]``, contiguous.

    Returns:
        ``out [b, q, h, e]`` in q's dtype and ``lse [b, h, q]`` in float32 (float64 for float64).
    """
    connect(call.groups, q.device)
    score, expansion, v_head_dim = call.score_of(heads), call.expansion(heads, q.device), call.v_head_dim(v.shape)
    backend = select(
        call.backend,
        q,
        k if expansion is None else q,
        score,
        deterministic=call.deterministic,
        expansion=expansion,
        carry=len(call.plan) > 1,
        v_head_dim=v_head_dim,
    )
    remote = RemoteSteps(call, heads, k, v, transport_of(call, q.device))
    last = max((i for i, step in enumerate(call.plan) if step.keys is not None and q.numel()), default=-1)
    carry: Carry | None = None
    if (seen := call.intervals(0, q)) is not None:
        carry = backend.forward(q, k, v, seen, score, None, last == 0)
    parts = remote.parts
    carries: list[Carry | None] = [carry] if len(parts) == 1 else [_carry_of(carry, x.queries_in(heads)) for x in parts]
    for number, part, i, step_k, step_v in remote:
        if (seen := call.intervals(i, q)) is not None:
            queries, part_score = of_heads(q, part.queries_in(heads)), call.score_of(part)
            carries[number] = backend.forward(queries, step_k, step_v, seen, part_score, carries[number], i == last)
    if last == -1:  # no query sees any key
        return finish(empty_carry(q, v_head_dim), score, q.dtype)
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
        dout: ``[b, q, h, e]``, contiguous.
        dlse: ``[b, h, q]``, or None if the log-sum-exp has no gradient.
        call, heads, q, k, v, out, lse: what ``ring_forward`` was given and returned.

    Returns:
        ``dq [b, q, h, d]``, ``dk [b, k, n, d]``, ``dv [b, k, n, e]`` and ``dsinks [h]`` (None without sinks), in
        float32 (float64 for float64). ``dsinks`` is this rank's partial gradient.
    """
    plan, score, expansion = call.plan, call.score_of(heads), call.expansion(heads, q.device)
    dtype = accumulator(q.dtype)
    backend = select(
        call.backend,
        q,
        k if expansion is None else q,
        score,
        lse_gradient=dlse is not None,
        deterministic=call.deterministic,
        expansion=expansion,
        carry=len(call.plan) > 1,
        v_head_dim=out.shape[3],
    )
    needs_delta = backend.reads_delta or score.sinks is not None
    delta = row_delta(out, dout, dlse) if needs_delta else None
    dq = torch.empty_like(q, dtype=dtype)
    own_dkv = [torch.empty_like(x, dtype=dtype) for x in (k, v)]  # gradients of this rank's K/V

    def backward(part: Heads, i: int, step_k: Tensor, step_v: Tensor, grads: Grads) -> None:
        """Add the gradients of step ``i`` for some heads to ``grads``, or write them where ``grads`` is new."""
        at = part.queries_in(heads)
        if (seen := call.intervals(i, q)) is not None:
            part_q, part_dout, part_out = (of_heads(x, at) for x in (q, dout, out))
            part_delta = None if delta is None else delta[:, at.start : at.stop]
            output = OutputGrad(part_dout, part_out, lse[:, at.start : at.stop], part_delta)
            backend.backward(part_q, step_k, step_v, output, seen, call.score_of(part), grads)
        else:
            grads.zero_new_()

    def own_backward(part: Heads, **new: bool) -> None:
        part_k, part_v, dk, dv = (of_heads(x, part.kv_in(heads)) for x in (k, v, *own_dkv))
        backward(part, 0, part_k, part_v, Grads(of_heads(dq, part.queries_in(heads)), dk, dv, **new))

    remote = RemoteSteps(call, heads, k, v, transport_of(call, q.device))
    nothing_to_hide = all(step.is_local for step in plan) or call.shares_memory(q.device)
    first, *rest = [heads] if expansion is not None or nothing_to_hide else halves(heads)
    for part in rest:  # ``own_backward`` adds to these at the end, after the remote steps have added theirs
        of_heads(dq, part.queries_in(heads)).zero_()
        for x in own_dkv:
            of_heads(x, part.kv_in(heads)).zero_()
    own_backward(first, new_dq=True, new_dkv=not any(set(part.kv) & set(first.kv) for part in rest))
    returns = Returns(call, transport_of(call, q.device))
    for _, part, i, step_k, step_v in remote:
        # Gradients of remote K/V are written to buffers that are sent to their owners.
        grads = new_gradients(plan[i], step_k, step_v, dtype, call.groups)
        if grads:
            dk, dv = (x for message in grads for x in message.tensors)
            backward(part, i, step_k, step_v, Grads(of_heads(dq, part.queries_in(heads)), dk, dv, new_dkv=True))
            del dk, dv
        del step_k, step_v  # so that the messages sent now can reuse their memory
        returns.start(i, grads, [of_heads(x, part.kv_in(heads)) for x in own_dkv])
    for part in rest:  # while the last gradients are being returned
        own_backward(part)
    returns.finish()
    dsinks = None
    if score.sinks is not None:
        # The softmax weight of the sink, [b, h, q]. It is nan for a sink of -inf and a query that sees no key.
        assert delta is not None
        sink_weight = torch.exp(score.sinks.to(dtype)[:, None] - lse).nan_to_num_(0.0)
        dsinks = -(sink_weight * delta).sum((0, 2))  # [h]: the sink has no value, only a weight in the denominator
    dk, dv = own_dkv
    return dq, dk, dv, dsinks


def halves(heads: Heads) -> list[Heads]:
    """The heads in two parts that can be computed one after the other, if possible."""
    if len(heads.queries) < 2:
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
    return of_heads(acc, heads), lse[:, heads.start : heads.stop].contiguous()
