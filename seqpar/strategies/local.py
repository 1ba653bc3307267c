"""The attention of one rank to keys and values that it has: what an algorithm calls between its messages.

Shapes: b batch, q queries, k keys, h query heads, n KV heads as they are sent, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels import BackendChoice
from ..kernels.base import (
    Backend,
    Carry,
    Grads,
    OutputGrad,
    Score,
    accumulator,
    empty_carry,
    finish,
    row_delta,
    sink_gradient,
)
from ..kernels.expansion import ExpandedKV, Expansion
from ..kernels.library import together
from ..schedule.rows import KeyIntervals
from .transfers import take_heads

# Which keys each query sees: intervals to attend to one after another, without a key in common; none if no query sees
# any key. A function, because an error in it is a kernel's error too.
Seen = Callable[[], Sequence[KeyIntervals]]


class Kernel:
    """The backend for some heads of a call.

    Latents and KV heads that are read by different numbers of query heads are expanded just before the backend reads
    them. On a rank that sends messages, the kernel notes an error of the backend, and all later results are NaN. So the
    rank goes on to send and to receive until the end of the call, where the error is raised.

    Args:
        choice: the backends that may compute them.
        score: how the scores of these heads are computed.
        q, k: ``[b, q, h, d]`` and ``[b, k, n, d]``, like all tensors of these heads.
        v_head_dim: the head_dim of the output.
        expansion: computes keys and values from the tensors that were sent; None if the keys and values were sent.
        lse_gradient: whether backward has a gradient of the log-sum-exp.
        errors: where errors are noted, of all kernels of the call. None: they are raised.
    """

    def __init__(
        self,
        choice: BackendChoice,
        score: Score,
        q: Tensor,
        k: Tensor,
        v_head_dim: int,
        expansion: Expansion | None = None,
        *,
        lse_gradient: bool = False,
        errors: list[Exception] | None,
    ) -> None:
        self._score, self.v_head_dim, self._errors = score, v_head_dim, errors
        self.needs_positions = score.needs_positions
        expanded_k = k if expansion is None else q
        backend = choice.backend(q, expanded_k, score, lse_gradient=lse_gradient, v_head_dim=v_head_dim)
        self._unexpanded = backend
        self._backend: Backend | ExpandedKV = backend if expansion is None else ExpandedKV(backend, expansion)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Seen,
        carry: Carry | None = None,
        last: bool = False,
        at: range | None = None,
    ) -> Carry:
        """Continue the online softmax of ``carry`` over more keys.

        Args:
            q, k, v: ``[b, q, h, d]``, ``[b, k, n, d]`` and ``[b, k, n, e]``, as they were sent.
            seen: returns which of the keys each query sees.
            carry: the result so far; None if there is none.
            last: whether these keys are the last ones.
            at: some of the heads, by their indices in q: ``carry``, k and v have these only. None is all heads.

        Returns:
            ``out [b, q, h, e]`` and ``lse [b, h, q]``, both float32 (float64 for float64). After the last keys ``out``
            is final and has q's dtype.
        """
        score, backend = self._score, self._backend
        if at is not None:
            q, score = take_heads(q, at), score.heads(at.start, at.stop)
        if not self._errors:
            try:
                if parts := seen():
                    if len(parts) > 1:
                        parts = together(self._unexpanded, parts, q, k)
                    if isinstance(backend, ExpandedKV):
                        backend = backend if at is None else backend.of(at)
                        return backend.forward(q, k, v, parts, score, carry, last)
                    for intervals in parts[:-1]:
                        carry = backend.forward(q, k, v, intervals, score, carry, False)
                    return backend.forward(q, k, v, parts[-1], score, carry, last)
                carry = carry or self.empty(q)
                return finish(carry, score, q.dtype) if last else carry
            except Exception as error:
                if self._errors is None:
                    raise
                self._errors.append(error)
        out = q.new_full((*q.shape[:3], self.v_head_dim), torch.nan, dtype=q.dtype if last else accumulator(q.dtype))
        return out, q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, dtype=accumulator(q.dtype))

    def empty(self, q: Tensor) -> Carry:
        """The carry of no keys."""
        return empty_carry(q, self.v_head_dim)

    def finish(self, carry: Carry, dtype: torch.dtype, at: range | None = None) -> Carry:
        """The final result from a carry of the heads ``at``, as ``forward`` returns it after the last keys."""
        return finish(carry, self._score if at is None else self._score.heads(at.start, at.stop), dtype)

    def output_grad(self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> OutputGrad:
        """The output and its gradient, with what ``backward`` needs of them."""
        needs_delta = self._backend.reads_delta or self._score.sinks is not None
        return OutputGrad(dout, out, lse, row_delta(out, dout, dlse) if needs_delta else None)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: OutputGrad,
        seen: Seen,
        grads: Grads,
        at: range | None = None,
    ) -> None:
        """Add the gradients of some keys to ``grads``, or write them where these are new.

        Args:
            q, k, v, seen, at: as in ``forward``.
            output: of all heads.
            grads: of the heads ``at``; dk and dv for the tensors that were sent.
        """
        score, backend = self._score, self._backend
        if at is not None:
            dout, out, lse, delta = output
            lse, delta = lse[:, at.start : at.stop], None if delta is None else delta[:, at.start : at.stop]
            output = OutputGrad(take_heads(dout, at), take_heads(out, at), lse, delta)
            q, score = take_heads(q, at), score.heads(at.start, at.stop)
        if not self._errors:
            try:
                if len(parts := seen()) > 1:
                    parts = together(self._unexpanded, parts, q, k)
                if not parts:
                    grads.make(q, k, v)
                    grads.zero_new_()
                elif isinstance(backend, ExpandedKV):
                    backend = backend if at is None else backend.of(at)
                    backend.backward(q, k, v, output, parts, score, grads)
                else:
                    grads.final = grads.final and len(parts) == 1
                    for intervals in parts:
                        backend.backward(q, k, v, output, intervals, score, grads)
                        grads.new_dq = grads.new_dkv = False
                return
            except Exception as error:
                if self._errors is None:
                    raise
                self._errors.append(error)
        for x in grads.make(q, k, v):
            x.fill_(torch.nan)

    def dsinks(self, output: OutputGrad) -> Tensor | None:
        """The partial gradient of the sinks, ``[h]``; None without sinks."""
        return None if self._score.sinks is None else sink_gradient(self._score, output)
