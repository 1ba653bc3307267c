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

The last gradients are returned while the rank computes the second half of its own keys, which it has left for the end.

An all-gather (``comm="all_gather"``) is one remote step. If every rank needs all keys, it is a collective, and the
gradients return by a reduce-scatter. Otherwise its messages are exchanged between pairs of ranks. Over several hosts,
messages have two hops. ``seqpar.schedule`` orders the messages and ``transfers.py`` sends them.

Elements sent per rank of P, forward, full mask, N tokens: (P-1)/P * N * n * (d + e). Backward sends K/V again, and
dk and dv in float32.

Shapes: b batch, q queries of this rank, k keys of a step, h query heads, n KV heads, d head_dim of q and k, e head_dim
of v.
"""

from __future__ import annotations

from torch import Tensor

from ..kernels.base import Carry
from .call import Run


def ring_forward(run: Run, q: Tensor, k: Tensor, v: Tensor) -> Carry:
    """Attention of this rank's queries over the keys of all ranks of the ring.

    Args:
        run: this rank's program.
        q, k, v: ``[b, q, h, d]``, ``[b, k, n, d]`` and ``[b, k, n, e]``, contiguous.

    Returns:
        ``out [b, q, h, e]`` in q's dtype and ``lse [b, h, q]`` in float32 (float64 for float64).
    """
    carry = None
    with run.transfers(k, v) as kv:  # posts receives and sends ahead, in the program's order
        for step in run.steps:  # own keys first
            k_step, v_step = kv.wait(step)  # [b, k, n, d], [b, k, n, e]
            carry = run.attend(q, k_step, v_step, step, carry)
    return run.finish(carry)


def ring_backward(
    run: Run, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of ``ring_forward``.

    Args:
        run: this rank's program.
        dout: ``[b, q, h, e]``, contiguous.
        dlse: ``[b, h, q]``, or None if the log-sum-exp has no gradient.
        q, k, v, out, lse: the arguments and the results of ``ring_forward``.

    Returns:
        ``dq [b, q, h, d]``, ``dk [b, k, n, d]``, ``dv [b, k, n, e]`` and ``dsinks [h]`` (None without sinks). Sums of
        several steps are float32 (float64 for float64). ``dsinks`` is this rank's partial gradient.
    """
    output = run.kernel.output_grad(dout, dlse, out, lse)
    grads = run.new_gradients(q, k, v)  # [dq, dk, dv]
    with run.transfers(k, v) as kv, run.returns(*grads[1:]) as owners:
        for step in run.backward_steps:  # own keys first; where messages are sent, half of the heads last
            # K/V are freed before the gradients are sent, which can then use their memory.
            run.backward(q, *kv.wait(step), output, step, grads, *owners.buffers(step))
            owners.send(step)  # while the next step is computed
    return *grads, run.kernel.dsinks(output)
