"""The protocol of an attention backend: one step of forward or backward on key intervals, with a carry.

Shapes: b batch, q local queries, k keys of a step, h query heads, n KV heads, d head_dim of q and k, e head_dim of v.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..schedule.rows import KeyIntervals
from .elementwise import elementwise_kernels

Carry = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Score:
    """How scores are computed from queries and keys, for some heads of the model.

    ``s = softmax_scale * q.k``; then ``softcap * tanh(s / softcap)`` if ``softcap > 0``; then minus
    ``alibi_slopes * |i - j|`` for global positions ``i`` and ``j``. Dropout acts on the probabilities and leaves the
    log-sum-exp unchanged.

    Attributes:
        softmax_scale: a factor on ``q.k``.
        softcap: the bound of the scores; 0 is none.
        alibi_slopes: float32 ``[h]`` or ``[b, h]``, or None.
        sinks: float32 ``[h]``, one more logit per head in the denominator of the softmax, without a value; or None.
        dropout_p: the probability of dropping an attention weight.
        dropout_seed: decides what is dropped, together with the batch row, the head and the global positions.
        head_offset: the index in the model of the first of these heads, for dropout.
    """

    softmax_scale: float
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    head_offset: int = 0

    @cached_property
    def needs_positions(self) -> bool:
        """Whether the scores depend on global positions."""
        return self.alibi_slopes is not None or self.dropout_p > 0

    def heads(self, start: int, stop: int) -> Score:
        """The score function of the heads ``start:stop``, counted from the first of these heads."""
        slopes, sinks = (None if x is None else x[..., start:stop] for x in (self.alibi_slopes, self.sinks))
        return replace(self, alibi_slopes=slopes, sinks=sinks, head_offset=self.head_offset + start)


class OutputGrad(NamedTuple):
    """The output of the local queries and its gradient, which the backward of every step reads.

    Attributes:
        dout: ``[b, q, h, e]``, the gradient of the output.
        out: ``[b, q, h, e]``, the final output, over the keys of all steps and with the sinks.
        lse: ``[b, h, q]``, the log-sum-exp of ``out``.
        delta: ``[b, h, q]``, ``rowsum(dout * out)`` minus the gradient of ``lse``; None if the backend ignores it.
    """

    dout: Tensor
    out: Tensor
    lse: Tensor
    delta: Tensor | None


@dataclass
class Grads:
    """The tensors to which a backend adds the gradients of one step.

    Attributes:
        dq: ``[b, q, h, d]``.
        dk: ``[b, k, n, d]``.
        dv: ``[b, k, n, e]``. All three are None if the step is the only one: the backend then makes them, in any
            floating dtype.
        new_dq: whether ``dq`` is uninitialised, so that the gradient is written to it instead of added.
        new_dkv: whether ``dk`` and ``dv`` are uninitialised.
        final: whether nothing is added to them later, so that they may be rounded to the dtypes of q, k and v.
    """

    dq: Any
    dk: Any
    dv: Any
    new_dq: bool = False
    new_dkv: bool = False
    final: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv``."""
        return self.dq, self.dk, self.dv

    @property
    def new(self) -> tuple[bool, bool, bool]:
        """For each of ``dq, dk, dv``, whether it is uninitialised."""
        return self.new_dq, self.new_dkv, self.new_dkv

    def make(self, q: Tensor, k: Tensor, v: Tensor, *, rounded: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv``, made uninitialised if they are None.

        They are float32 (float64 for float64), or, if ``rounded`` and final, have the dtypes of ``q``, ``k`` and ``v``.
        """
        if self.dq is None:
            dtypes = (x.dtype if rounded and self.final else accumulator(x.dtype) for x in (q, k, v))
            tensors = (torch.empty_like(x, dtype=dtype) for x, dtype in zip((q, k, v), dtypes, strict=True))
            self.dq, self.dk, self.dv = tensors
        return self.tensors

    def zero_new_(self) -> None:
        """Write zeros to the uninitialised tensors."""
        for x, new in zip(self.tensors, self.new, strict=True):
            if new:
                x.zero_()


class Backend(Protocol):
    """Attention of local queries over the keys of one step, computed by one kernel library.

    Shapes: ``q [b, q, h, d]``, ``k [b, k, n, d]``, ``v [b, k, n, e]``, ``out, dout [b, q, h, e]``,
    ``lse, delta [b, h, q]``; e is v's head_dim, for most models d. Query head ``i`` reads KV head ``i // (h // n)``.
    Statistics and accumulators are float32, or float64 for float64 inputs.
    """

    name: str
    deterministic: bool  # whether gradients have the same bits in every run
    reads_delta: bool  # whether its backward reads ``OutputGrad.delta``

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, or None."""
        ...

    def unsupported(
        self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool, v_head_dim: int | None = None
    ) -> str | None:
        """Why it cannot compute this call, or None. ``v_head_dim``: of v; by default the head_dim of q."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, intervals: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        """Continue the online softmax over the keys of one step.

        Args:
            q, k, v: the local queries, and the step's keys and values.
            intervals: which of the keys each query sees.
            score: how scores are computed.
            carry: ``(acc, lse)`` of the previous steps, or None in the first step: the normalised partial output and
                its log-sum-exp (-inf for a query that has seen no key). The backend may overwrite it.
            last: whether this is the last step. The backend then adds the sinks to the denominator and rounds to
                ``q.dtype``.

        Returns:
            ``(acc, lse)`` over all keys so far, 0 and -inf for a query that has seen no key.
        """
        ...

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputGrad, intervals: KeyIntervals, score: Score, grads: Grads
    ) -> None:
        """The gradients of one step.

        Args:
            q, k, v: the local queries, and the step's keys and values.
            output: the output of the local queries and its gradient.
            intervals, score: as in ``forward``.
            grads: the tensors to add the gradients to, or to write them to where these are new.
        """
        ...


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, partial results and partial gradients for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_carry(q: Tensor, v_head_dim: int | None = None) -> Carry:
    """The carry of queries ``q [b, q, h, d]`` that have seen no key; ``v_head_dim`` is d by default."""
    batch, q_len, heads, dim = q.shape
    dtype = accumulator(q.dtype)
    acc = q.new_zeros(batch, q_len, heads, dim if v_head_dim is None else v_head_dim, dtype=dtype)
    return acc, q.new_full((batch, heads, q_len), -torch.inf, dtype=dtype)


def all_finite(x: Tensor) -> bool:
    """Whether all values are finite. It may be False if they are so large that their sum overflows."""
    return isfinite((x.sum(dtype=torch.float32) if x.itemsize < 4 else x.sum()).item())


def head_dims(head_dim: int, v_head_dim: int | None) -> str:
    return f"head_dim={head_dim}" + (f" of q and k, {v_head_dim} of v" if v_head_dim not in (None, head_dim) else "")


def merge_(acc: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge the partial result ``(out, out_lse)`` into ``(acc, lse)`` in place.

    ``acc, out [b, q, h, d]`` are each normalised by their own ``lse, out_lse [b, h, q]``:
    ``acc' = (1 - w) acc + w out`` with ``w = exp(out_lse) / (exp(lse) + exp(out_lse)) = sigmoid(out_lse - lse)``.
    """
    if acc.dtype == torch.float32 and (kernels := elementwise_kernels(out)) is not None:
        kernels.merge_(acc, lse, out, out_lse)
        return
    weight = torch.sigmoid(out_lse - lse)  # [b, h, q]
    weight.nan_to_num_(0.0)  # -inf minus -inf: neither part has seen a key
    acc.lerp_(out.to(acc.dtype), weight.transpose(1, 2).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, out_lse))


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """``rowsum(dout * out) - dlse``, contiguous ``[b, h, q]``, for ``out, dout [b, q, h, d]``."""
    if (kernels := elementwise_kernels(out)) is not None:
        delta: Tensor = kernels.delta(out, dout, dlse)
        return delta
    dtype = accumulator(out.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2)
    return (delta if dlse is None else delta - dlse).contiguous()


def finish(carry: Carry, score: Score, dtype: torch.dtype) -> Carry:
    """Add the sinks to the denominator, and round to ``dtype``."""
    acc, lse = carry
    if score.sinks is not None:
        with_sink = torch.logaddexp(lse, score.sinks.to(lse.dtype)[:, None])
        weight = torch.exp(lse - with_sink).nan_to_num_(0.0)  # [b, h, q]; nan: no key seen, and a sink of -inf
        acc = acc * weight.transpose(1, 2).unsqueeze(-1)
        lse = with_sink
    return acc if acc.dtype == dtype else acc.to(dtype), lse


def sink_gradient(score: Score, output: OutputGrad) -> Tensor:
    """The gradient ``[h]`` of the sinks, summed over the queries of ``output``."""
    assert score.sinks is not None and output.delta is not None
    lse = output.lse
    # The softmax weight of the sink, [b, h, q]. It is nan for a sink of -inf and a query that sees no key.
    weight = torch.exp(score.sinks.to(lse.dtype)[:, None] - lse).nan_to_num_(0.0)
    return -(weight * output.delta).sum((0, 2))  # the sink has no value, only a weight in the denominator
