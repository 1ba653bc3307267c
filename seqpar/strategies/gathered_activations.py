"""FastSeq: all-gather hidden states instead of keys and values, and project the hidden states of all ranks to K/V.

NUS HPC-AI Lab, OpenDiT, 2024. Context parallelism sends the keys and values of each token, ``2 d_kv`` numbers. They are
computed from the token's hidden state, ``hidden`` numbers. With as many KV heads as query heads, ``hidden`` is half of
``2 d_kv``. The price is that every rank projects the tokens of all ranks.

[Note: overlap] Rank 1 of 4; chunk r holds the hidden states of rank r. The transfers start before the query projection,
and a chunk is projected while the next chunk is received. Attention then runs over all keys and sends nothing. In
backward the hidden states are gathered again. These transfers start before the output projection's backward.

    forward
    compute      | q of own x | k, v of 1 | k, v of 0    | k, v of 3   | k, v of 2 | attend
    receive x    | chunk 0 ..............  | chunk 3 ...  | chunk 2 ... |

    backward
    compute      | o_proj     | k, v again, as in forward | dq, dk, dv | dx of 2  | dx of 3  | dx of 0  | dx of 1 | sum
    receive x    | chunk 0 ............. | 3 .. | 2 .. |
    send dx      |                                                     |          | to 2 ... | to 3 ... | to 0 ... |

K/V of all tokens, kept for backward, would take as much memory on every rank as on one device. Instead, backward
gathers and projects the hidden states again, and uses them for the weights' gradients too. A rank's queries give only a
partial gradient of the keys and values of all ranks, and hence of all hidden states. Partial gradients are computed and
sent in float32, summed by the rank that holds the tokens, and rounded once. The gradients of the weights are partial,
as under every other strategy.

Bytes sent per rank of P, under any mask: (P-1)/P * N * hidden * e forward; backward the same again, and partial
gradients of the hidden states in float32, (P-1)/P * N * hidden * 4.

Shapes: b batch, s tokens of this rank, t tokens of all ranks, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..comm.p2p import make_ready
from ..kernels.base import accumulator
from .autograd import attention_backward, attention_forward
from .call import AttentionCall
from .sequence_chunks import Piece, SequenceChunks
from .tensor_sequence import all_gather_linear_backward, project

Gather = Literal["kv", "activations", "auto"]
GATHERS: tuple[str, ...] = get_args(Gather)

# ``(k, v, *parameters) -> (k, v)``: projections ``[b, t, n * d]`` without biases to keys and values ``[b, t, n, d]``.
FinishKeys = Callable[..., tuple[Tensor, Tensor]]

# Operations that a GPU does while it sends one byte, inside a host and between hosts. An H100 SXM computes 990 TFLOP/s
# in dense bfloat16. It sends 450 GB/s over NVLink and 50 GB/s over a network of 400 Gbit/s per GPU (NVIDIA's data
# sheets of the H100 and the DGX).
_FLOPS_PER_BYTE = (990e12 / 450e9, 990e12 / 50e9)


def prefers_activations(
    kv_rows: tuple[int, int], activation_rows: tuple[int, int], hidden: int, d_kv: int, dtype: torch.dtype
) -> bool:
    """Whether sending hidden states instead of keys and values saves more time than projecting all of them takes.

    Bytes and operations are those of forward and backward together, also in evaluation, so that both decide alike.

    Args:
        kv_rows: rows of K/V that all ranks together would receive under the mask, inside hosts and between hosts.
        activation_rows: rows of hidden states that they would receive, likewise.
        hidden: the width of the hidden states.
        d_kv: KV heads times head_dim.
        dtype: of both.
    """
    width = 2 * dtype.itemsize + accumulator(dtype).itemsize  # sent twice, and its gradient once
    bytes_saved = [(kv * 2 * d_kv - x * hidden) * width for kv, x in zip(kv_rows, activation_rows, strict=True)]
    # k and v in forward and again in backward, their inputs' and their weights' gradients.
    flops = 4 * sum(activation_rows) * 2 * (2 * d_kv) * hidden
    return sum(saved * rate for saved, rate in zip(bytes_saved, _FLOPS_PER_BYTE, strict=True)) > flops


class GatheredActivations:
    """All-gathers the hidden states of all ranks and projects them to keys and values.

    Args:
        chunks: which tokens each rank holds.
        finish: adds the biases, and applies the norm and the rotation of the keys.
    """

    def __init__(self, chunks: SequenceChunks, finish: FinishKeys) -> None:
        self.chunks, self.finish = chunks, finish
        self._arriving: Iterator[Iterator[Piece]] | None = None

    def start(self, x: Tensor) -> None:
        """Start to gather ``x [b, s, hidden]``, contiguous, this rank's tokens."""
        make_ready(self.chunks.group, x.device)
        self._arriving = self.chunks.receive_chunks(x)

    def project(self, x: Tensor, weights: Sequence[Tensor], full: Tensor | None = None) -> list[Tensor]:
        """k and v ``[b, t, n * d]`` without biases, from the hidden states that ``start`` has started to gather.

        The hidden states of all ranks are written to ``full [b, t, hidden]`` if it is given.
        """
        if self._arriving is None:
            self.start(x)
        arriving, self._arriving = self._arriving, None
        assert arriving is not None
        return project(arriving, x, weights, self.chunks, full)


class StartInBackward(torch.autograd.Function):
    """Returns ``y``. Its backward starts to gather ``x`` again, to overlap with the backward of what computed ``y``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, gathered: GatheredActivations) -> Tensor:
        """``y [b, s, hidden]``; ``x [b, s, hidden]`` is this rank's input of the layer."""
        ctx.save_for_backward(x)
        ctx.gathered = gathered
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Returns ``dy`` unchanged."""
        (x,) = ctx.saved_tensors
        ctx.gathered.start(x)
        return dy, None, None


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
        gathered: GatheredActivations,
        call: AttentionCall,
        *parameters: Tensor,
    ) -> Tensor:
        """``q [b, s, h, d]`` and ``x [b, s, hidden]`` to ``out [b, s, h, d]``; ``finish`` takes ``parameters``."""
        ctx.gathered, ctx.call = gathered, call
        with torch.autocast(x.device.type, enabled=False):
            k, v = gathered.finish(*gathered.project(x, (k_weight, v_weight)), *parameters)
        out, _, q, _, _, _, lse = attention_forward(call, q, k, v)
        ctx.save_for_backward(q, x, k_weight, v_weight, out, lse, *parameters)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        """``dout [b, s, h, d]`` to the gradients of the tensors; those of weights and parameters are partial."""
        q, x, k_weight, v_weight, out, lse, *parameters = ctx.saved_tensors
        gathered, weights = ctx.gathered, (k_weight, v_weight)
        _, need_x, *need_weights = ctx.needs_input_grad[:4]
        with torch.autocast(x.device.type, enabled=False):
            full = x.new_empty(x.shape[0], gathered.chunks.total, x.shape[2])  # [b, t, hidden]
            projections = gathered.project(x, weights, full)
            k, v, gradients = differentiable(gathered.finish, *projections, *parameters)
            del projections
            dq, dk, dv, dsinks = attention_backward(
                ctx.call, (q, k, v, out, lse), dout, None, q.shape, k.shape, v.shape
            )
            del k, v
            douts = gradients(dk, dv)
            del dk, dv, gradients
            dx, dweights = all_gather_linear_backward(
                douts[:2], x, weights, gathered.chunks, need_x, need_weights, full
            )
        return dq, dx, *dweights, dsinks, None, None, *douts[2:]


def differentiable(
    function: Callable[..., tuple[Tensor, Tensor]], *inputs: Tensor
) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor], Sequence[Tensor]]]:
    """The two results of ``function(*inputs)``, and a function from the gradients of these to those of the inputs."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        results = function(*leaves)

    def gradients(*of_results: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(results, leaves, of_results)

    first, second = results
    return first.detach(), second.detach(), gradients
