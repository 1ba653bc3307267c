"""Attention on the kernels of a library: key intervals are divided into a few calls, whose results are merged.

FlashAttention's kernels take neither a carry nor key intervals. They return ``lse``, and their backward accepts any
``out`` and ``lse``. The gradient of one part of a larger attention is therefore a call with that attention's final
``out`` and ``lse``. ``bands.py`` decides which calls make up a step. A query is in one call of a step, or in two if a
library supports only square causal masks.

In each call the library rounds its partial output, dq, dk and dv to the dtype of ``q``. These are merged and added in
float32, and the result is rounded once more at the end. Attention in a single step is rounded only by the library.

Shapes: b batch, q queries, k keys, h query heads, n KV heads, d head_dim, e head_dim of v, t rows of all sequences of a
packed call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..base.cache import outside_modes, upload
from ..comm.trace import count_backend
from ..schedule.rows import KeyIntervals, united
from .bands import Abilities, KernelCall, cut
from .base import Backend, Carry, Grads, OutputGrad, Score, empty_carry, finish, head_dims, merge_, row_delta
from .triton import TritonBackend

# A step that needs more calls runs on a kernel that takes key intervals, if there is one.
_MOST_CALLS = 8

Fallback = Callable[[Tensor, Tensor, Tensor, Score], Backend]


@dataclass(frozen=True)
class Options:
    """The arguments of a library's kernel besides q, k and v."""

    softmax_scale: float
    softcap: float
    left: int  # the band, see ``bands.Band``; -1 is unlimited
    right: int
    cu_q: Tensor | None  # int32 [sequences + 1] on the device, the boundaries of a packed call's sequences
    cu_k: Tensor | None
    max_q: int  # the most queries and keys of a sequence
    max_k: int
    intervals: KeyIntervals | None  # for a call with ``KernelCall.masked``

    @property
    def causal(self) -> bool:
        return (self.left, self.right) == (-1, 0)


class LibraryBackend(ABC):
    """A ``Backend`` that runs a library's kernels. A subclass declares what the kernels support, and calls them."""

    name: str
    device_type = "cuda"
    deterministic = False
    reads_delta = False  # the kernels compute delta themselves, from dout and out
    capabilities: tuple[int, ...] = (8, 9, 10, 11, 12)  # major compute capabilities
    max_head_dim = 256  # of q and k
    softcap = False  # whether the kernels support one
    abilities = Abilities()  # which masks the kernels support, see ``able``
    optionally_deterministic = False  # whether there are kernels with gradients of the same bits in every run

    def __init__(self, fallback: Fallback) -> None:
        """``fallback(q, k, v, score)`` returns the backend for steps that need more than a few calls."""
        self._fallback = fallback

    # Methods of subclasses

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, or None."""

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        """``out`` and ``lse`` of one call.

        Args:
            q, k, v: ``[b, q, h, d]``, ``[b, k, n, d]``, ``[b, k, n, e]``; packed ``[t, h, d]``, ``[t, n, d]``,
                ``[t, n, e]``.
            options: the other arguments.

        Returns:
            ``out [b, q, h, e]``, packed ``[t, h, e]``, and ``lse`` float32 ``[b, h, q]``, packed ``[h, t]``; infinite,
            with either sign, for a query without keys.
        """

    @abstractmethod
    def call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``dq, dk, dv`` of one call, from the final ``out`` and ``lse`` (dense)."""

    def able(self, q: Tensor) -> Abilities:
        """Which masks the kernels support for queries with the dtype, head_dim and device of ``q``."""
        return self.abilities

    def refused_head_dim(self, head_dim: int, v_head_dim: int, capability: tuple[int, int]) -> str | None:
        """Why there are no kernels for this head_dim of q and k and ``v_head_dim`` of v, or None."""
        if v_head_dim != head_dim:
            return f"{head_dims(head_dim, v_head_dim)} (equal ones only)"
        if head_dim > self.max_head_dim:
            return f"head_dim={head_dim} (at most {self.max_head_dim})"
        return None

    # Methods of ``Backend``

    def unsupported(
        self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool, v_head_dim: int | None = None
    ) -> str | None:
        if q.device.type != self.device_type:
            return f"the tensors are on {q.device.type}"
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"{q.dtype} (float16 and bfloat16 only)"
        v_head_dim = q.shape[-1] if v_head_dim is None else v_head_dim
        if q.shape[-1] % 8 or v_head_dim % 8:
            return f"{head_dims(q.shape[-1], v_head_dim)} (multiples of 8 only)"
        if not score.softmax_scale > 0:
            return f"softmax_scale={score.softmax_scale} (positive only)"
        if score.softcap and not self.softcap:
            return "no softcap"
        if score.alibi_slopes is not None:
            return "no ALiBi by global positions"
        if score.dropout_p:
            return "no dropout by global positions"
        if lse_gradient:
            return "no gradient of lse"
        capability = _capability(q.device)
        if capability[0] not in self.capabilities:
            majors = ", ".join(f"{major}.x" for major in self.capabilities)
            return f"compute capability {capability[0]}.{capability[1]} ({majors} only)"
        return self.refused_head_dim(q.shape[-1], v_head_dim, capability)

    def made_deterministic(self) -> Backend | None:
        """This backend with gradients that have the same bits in every run, or None."""
        if not self.optionally_deterministic:
            return None
        made = copy(self)
        made.deterministic = True
        return made

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, intervals: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        launches = self.launches(intervals, q, k)
        if launches is None:
            return self._other(q, k, v, score).forward(q, k, v, intervals, score, carry, last)
        first, written = carry is None, 0
        for launch in launches:
            call = launch.call
            out, lse = self.call_forward(
                _rows(q, call, call.queries),
                _rows(k, call, call.keys),
                _rows(v, call, call.keys),
                _options(launch, intervals, score),
            )
            if call.has_gaps or call.masked:
                lse = lse.masked_fill(lse.isinf(), -torch.inf)
            if carry is None and lse.numel() == len(q) * q.shape[1] * q.shape[2]:  # all queries
                if call.ends is not None:
                    lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
                carry = out.view(*q.shape[:3], -1), lse
                if not (last and len(launches) == 1):
                    carry = carry[0].float(), lse
                written = call.q1
                continue
            carry = carry or empty_carry(q, v.shape[3])
            for rows, queries, part, part_lse in _by_place(call, out, lse, q.shape[1]):
                acc, acc_lse = carry[0][rows, queries], carry[1][rows, :, queries]
                if first and call.q0 >= written:  # no other call of this step has these queries
                    acc.copy_(part)
                    acc_lse.copy_(part_lse)
                else:
                    merge_(acc, acc_lse, part, part_lse)
            written = max(written, call.q1)
        carry = carry or empty_carry(q, v.shape[3])
        return finish(carry, score, q.dtype) if last else carry

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputGrad, intervals: KeyIntervals, score: Score, grads: Grads
    ) -> None:
        launches = self.launches(intervals, q, k)
        if launches is None:
            other = self._other(q, k, v, score)
            if other.reads_delta and output.delta is None:
                output = output._replace(delta=row_delta(output.out, output.dout, None))
            other.backward(q, k, v, output, intervals, score, grads)
            return
        new = list(grads.new)
        if len(launches) != 1:
            grads.make(q, k, v)
        for launch in launches:
            call = launch.call
            at = call.queries, call.keys, call.keys
            results = self.call_backward(
                _rows(output.dout, call, call.queries),
                _rows(q, call, call.queries),
                _rows(k, call, call.keys),
                _rows(v, call, call.keys),
                _rows(output.out, call, call.queries),
                _statistics(output.lse, call),
                _options(launch, intervals, score),
            )
            if grads.dq is None:
                whole = all(x.numel() == y.numel() for x, y in zip(results, (q, k, v), strict=True))
                if whole and call.ends is None:
                    grads.dq, grads.dk, grads.dv = (x.reshape(y.shape) for x, y in zip(results, (q, k, v), strict=True))
                    return
                grads.make(q, k, v)
            for i, (grad, target, rows) in enumerate(zip(results, grads.tensors, at, strict=True)):
                if new[i] and grad.numel() < target.numel():
                    target.zero_()
                part = _rows(target, call, rows, writable=True)
                if new[i] and grad.numel() == target.numel():
                    part.copy_(grad)
                else:
                    part.add_(grad)
            new = [False] * 3
        for target, empty in zip(grads.tensors, new, strict=True):
            if empty:
                target.zero_()

    def unites(self, parts: Sequence[KeyIntervals], q: Tensor, k: Tensor) -> bool:
        """Whether one call computes the union of these parts of a step."""
        return self.able(q).intervals

    def launches(self, intervals: KeyIntervals, q: Tensor, k: Tensor) -> list[PreparedCall] | None:
        """The calls of one step; None if it needs too many. Cached in ``intervals``."""
        can = self.able(q)
        key = "launches", can, q.shape[0], q.device
        if key not in intervals.tiles:
            sizes = q.shape[0], q.shape[1], k.shape[1]
            with _disable_current_modes():  # reads values, also if the tensors on the device are fake
                host = intervals.on_host()
                calls = None if host is None else cut(host, *sizes, can, _MOST_CALLS)
            with outside_modes():
                intervals.tiles[key] = None if calls is None else [_prepare(call, q.device) for call in calls]
        launches: list[PreparedCall] | None = intervals.tiles[key]
        return launches

    def _other(self, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Backend:
        other = self._fallback(q, k, v, score)
        if self.deterministic and isinstance(other, TritonBackend):
            other = other.made_deterministic()
        count_backend(other.name)
        return other


def together(backend: Backend, parts: Sequence[KeyIntervals], q: Tensor, k: Tensor) -> Sequence[KeyIntervals]:
    """What the backend attends to one after another: a step's parts, or their union if one call computes it."""
    unites = isinstance(backend, LibraryBackend) and backend.unites(parts, q, k)
    return (united(parts),) if unites else parts


class PreparedCall(NamedTuple):
    """A call, and for a packed one the boundaries of its sequences on the device, int32 ``[sequences + 1]``."""

    call: KernelCall
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None


def _prepare(call: KernelCall, device: torch.device) -> PreparedCall:
    if call.ends is None:
        return PreparedCall(call)
    host = torch.tensor([(0, *ends) for ends in call.ends], dtype=torch.int32, device="cpu")
    return PreparedCall(call, *upload(host, device).unbind())


def _options(launch: PreparedCall, intervals: KeyIntervals, score: Score) -> Options:
    call, cu_q, cu_k = launch
    taken = intervals if call.masked else None
    return Options(score.softmax_scale, score.softcap, call.left, call.right, cu_q, cu_k, *call.longest, taken)


def _rows(x: Tensor, call: KernelCall, rows: slice, writable: bool = False) -> Tensor:
    """The rows of ``x [b, s, h, d]`` that a call reads: ``[b, rows, h, d]``, or ``[rows, h, d]`` for a packed call.

    Unless ``call.every_row``, rows are counted through the concatenation of all batch rows.
    """
    if call.every_row or len(x) == 1:
        part = x[:, rows]
        return part if call.ends is None else part[0]
    flat = x.view(-1, *x.shape[2:]) if writable else x.flatten(0, 1)
    return flat[rows] if call.ends is not None else flat[None, rows]


def _statistics(lse: Tensor, call: KernelCall) -> Tensor:
    """The rows of ``lse [b, h, q]`` that a call reads, contiguous: ``[b, h, rows]``, or ``[h, rows]`` if packed."""
    if call.every_row or len(lse) == 1:
        part = lse[:, :, call.queries]
        return (part if call.ends is None else part[0]).contiguous()
    part = lse.transpose(0, 1).flatten(1)[:, call.queries]
    return (part if call.ends is not None else part[None]).contiguous()


def _by_place(call: KernelCall, out: Tensor, lse: Tensor, q_len: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yields slices of batch rows and of queries, and their ``out [b, q, h, d]`` and ``lse [b, h, q]``."""
    if call.ends is not None:
        out, lse = out[None], lse[None]
    if call.every_row:
        yield slice(None), call.queries, out, lse
        return
    for row in range(call.q0 // q_len, -(-call.q1 // q_len)):
        start, stop = max(call.q0, row * q_len), min(call.q1, (row + 1) * q_len)
        at = slice(start - call.q0, stop - call.q0)
        yield slice(row, row + 1), slice(start - row * q_len, stop - row * q_len), out[:, at], lse[:, :, at]


@lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
