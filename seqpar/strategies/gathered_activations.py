"""FastSeq: all-gather hidden states instead of keys and values, and project the hidden states of all ranks to K/V.

NUS HPC-AI Lab, OpenDiT, 2024. Context parallelism sends the keys and values of each token, ``2 n d`` numbers. They are
computed from the token's hidden state, ``hidden`` numbers. With as many KV heads as query heads, ``hidden`` is half of
``2 n d``. The price is that every rank projects the tokens of all ranks.

[Note: overlap] Rank 1 of 4; chunk r holds the hidden states of rank r. The transfers start before the query projection,
and a chunk is projected while the next chunk is received. Attention then runs over all keys and sends nothing. In
backward the hidden states are gathered again.

    forward
    compute      | q of own x | k, v of 1 | k, v of 0    | k, v of 3   | k, v of 2 | attend
    receive x    | chunk 0 ..............  | chunk 3 ...  | chunk 2 ... |

    backward
    compute      | k, v of 1 | k, v of 0 | 3 | 2 | dq, dk, dv | dx of 2  | dx of 3  | dx of 0  | dx of 1 | sum
    receive x    | chunk 0 . | chunk 3 . | 2 |
    send dx      |                                            |          | to 2 ... | to 3 ... | to 0 ... |

K/V of all tokens, kept for backward, would take as much memory on every rank as on one device. Instead, backward
gathers and projects the hidden states again, and uses them for the weights' gradients too. A rank's queries give only a
partial gradient of the keys and values of all ranks, and hence of all hidden states. Partial gradients are computed and
sent in float32, summed by the rank that holds the tokens, and rounded once. The gradients of the weights are partial,
as under every other strategy.

Elements sent per rank of P, N tokens, any mask: (P-1)/P * N * hidden in forward. Backward sends as many again, and as
many partial gradients of the hidden states, in float32.

Shapes: b batch, s tokens of this rank, t tokens of all ranks, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .operators import attention_gradients, compute
from .prepare import new_call
from .sequence_chunks import RowPiece, SequenceChunks
from .tensor_sequence import all_gather_linear_backward, project

Gather = Literal["kv", "activations"]
GATHERS: tuple[str, ...] = get_args(Gather)

# ``(k, v, *parameters) -> (k, v)``: projections ``[b, t, n * d]`` without biases to keys and values ``[b, t, n, d]``.
FinishKeys = Callable[..., tuple[Tensor, Tensor]]


class GatheredAttention(torch.autograd.Function):
    """Attention of this rank's queries over all keys: ``(q, x, k_weight, v_weight, sinks, ...) -> out``.

    Saves its inputs, ``out`` and the log-sum-exp; k and v are computed again in backward. Differentiable once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        x: Tensor,
        k_weight: Tensor,
        v_weight: Tensor,
        sinks: Tensor | None,
        seed: Tensor | None,
        x_chunks: Iterator[Iterator[RowPiece]],
        chunks: SequenceChunks,
        finish: FinishKeys,
        where: tuple[Any, ...],
        *parameters: Tensor,
    ) -> Tensor:
        """``q [b, s, h, d]`` and ``x [b, s, hidden]`` to ``out [b, s, h, d]``.

        ``x_chunks`` is what ``chunks.receive_chunks(x)`` returned; ``finish`` takes ``parameters``. ``where`` is the
        spec, the mask, the sharding and the ranks; they and ``seed`` are arguments of the operator ``attention``.
        """
        ctx.chunks, ctx.finish = chunks, finish
        with torch.autocast(x.device.type, enabled=False):
            with chunks.call("all_gather_linear", x, goes_on=True):
                projections = project(x_chunks, x, (k_weight, v_weight), chunks)
            k, v = finish(*projections, *parameters)
            del projections
            ctx.call = call = new_call(q, k, v, sinks, None, seed, None, *where)
            out, lse, saved = compute(call, q, k, v)
        ctx.save_for_backward(saved[0], x, k_weight, v_weight, out, lse, *parameters)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        """``dout [b, s, h, d]`` to the gradients of the tensors. Gradients of weights and parameters are partial."""
        q, x, k_weight, v_weight, out, lse, *parameters = ctx.saved_tensors
        chunks, weights = ctx.chunks, (k_weight, v_weight)
        _, need_x, *need_weights = ctx.needs_input_grad[:4]
        with torch.autocast(x.device.type, enabled=False):
            full = x.new_empty(x.shape[0], chunks.total, x.shape[2])  # [b, t, hidden]
            with chunks.call("all_gather_linear_backward", x):
                projections = project(chunks.receive_chunks(x), x, weights, chunks, full)
            k, v, gradients = differentiable(ctx.finish, *projections, *parameters)
            del projections
            saved, shapes = (q, k, v, out, lse), (q.shape, k.shape, v.shape)
            dq, dk, dv, dsinks, _ = attention_gradients(ctx.call, saved, dout, None, shapes)
            del saved
            del k, v
            douts = gradients(dk, dv)
            del dk, dv, gradients
            with chunks.call("all_gather_linear_backward", x, goes_on=True):
                dx, dweights = all_gather_linear_backward(douts[:2], x, weights, chunks, need_x, need_weights, full)
        return dq, dx, *dweights, dsinks, *[None] * 5, *douts[2:]


def differentiable(
    function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor
) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Sequence[Tensor]]]:
    """The two results of ``function(*inputs)``, and a function from their gradients to the gradients of the inputs."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        results = function(*leaves)

    def gradients(*of_results: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(results, leaves, of_results)

    first, second = results
    return first.detach(), second.detach(), gradients
