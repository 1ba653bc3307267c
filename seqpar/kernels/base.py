"""The protocol of an attention backend: one hop of forward or backward on row intervals, with a carry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..schedule import KeyIntervals
from .elementwise import elementwise_kernels

Carry = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Score:
    """How scores are made from queries and keys, for the heads at hand.

    ``s = softmax_scale * q.k``; then ``softcap * tanh(s / softcap)`` when ``softcap > 0``; then minus
    ``alibi_slopes * |i - j|`` with global positions. ``sinks`` is one more logit for each head in the softmax's
    denominator, without a value. Dropout acts on the probabilities; ``lse`` never sees it.

    Attributes:
        alibi_slopes: float32 ``[heads]`` or ``[batch, heads]``.
        sinks: float32 ``[heads]``.
        head_offset: the global index of the first head at hand (dropout is keyed by global heads).
    """

    softmax_scale: float
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    head_offset: int = 0

    def heads(self, start: int, stop: int) -> Score:
        """The same for the heads ``start:stop`` only."""
        slopes, sinks = (None if x is None else x[..., start:stop] for x in (self.alibi_slopes, self.sinks))
        return replace(self, alibi_slopes=slopes, sinks=sinks, head_offset=self.head_offset + start)


class Backend(Protocol):
    """Attention of local queries over visiting keys.

    Shapes: ``q, dout, out, dq [batch, q_len, heads, head_dim]``, ``k, v, dk, dv [batch, k_len, kv_heads,
    head_dim]``, ``lse, delta [batch, heads, q_len]``. Statistics and accumulators are float32, float64 for float64
    inputs.
    """

    name: str

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, or None."""
        ...

    def unsupported(self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool) -> str | None:
        """Why it cannot do this request, or None."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        """Go on with the online softmax.

        Args:
            carry: ``(acc, lse)`` of the hops so far, or None at the first: the normalised partial output and its
                log-sum-exp (-inf where nothing was seen). Its storage may be reused.
            last: finish: fold the sinks in and round to ``q.dtype``.

        Returns:
            ``(acc, lse)`` over all keys so far. A row that saw nothing has 0 and -inf.
        """
        ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
        rows: KeyIntervals,
        score: Score,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Add this hop's gradients to ``dq, dk, dv``.

        ``out`` and ``lse`` are the finished ones (over all keys, with the sinks); ``delta`` is
        ``rowsum(dout * out)``, less the gradient of ``lse``.
        """
        ...


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, partial results and travelling gradients for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_carry(q: Tensor) -> Carry:
    """The carry before any key was seen."""
    batch, q_len, heads, _ = q.shape
    dtype = accumulator(q.dtype)
    return torch.zeros_like(q, dtype=dtype), q.new_full((batch, heads, q_len), -torch.inf, dtype=dtype)


def merge_(acc: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
    """Merge the partial result ``(out, out_lse)`` into ``(acc, lse)`` in place.

    ``out [batch, q_len, heads, head_dim]`` is normalised by its own ``out_lse [batch, heads, q_len]``, as ``acc`` is.
    """
    if acc.dtype == torch.float32 and (kernels := elementwise_kernels(out)) is not None:
        kernels.merge_(acc, lse, out, out_lse)
        return
    share = torch.sigmoid(out_lse - lse).nan_to_num_(0.0)  # nan: neither has seen anything
    acc.lerp_(out, share.transpose(1, 2).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, out_lse))


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """``rowsum(dout * out) - dlse``, contiguous ``[batch, heads, q_len]``, for ``out, dout [batch, q_len, heads,
    head_dim]``."""
    if (kernels := elementwise_kernels(out)) is not None:
        return kernels.delta(out, dout, dlse)
    dtype = accumulator(out.dtype)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2)
    return (delta if dlse is None else delta - dlse).contiguous()


def finish(carry: Carry, score: Score, dtype: torch.dtype) -> Carry:
    """Fold the sinks in and round to ``dtype``, once."""
    acc, lse = carry
    if score.sinks is not None:
        with_sink = torch.logaddexp(lse, score.sinks.to(lse.dtype)[:, None])
        acc = acc * torch.exp(lse - with_sink).transpose(1, 2).unsqueeze(-1)
        lse = with_sink
    return acc.to(dtype), lse
