"""Keys and values that are computed from the tensors that the ranks send, just before a kernel reads them.

Ranks may send latents, or fewer KV heads than a kernel needs.

Shapes: b batch, q local queries, k keys of a step, h query heads, n heads that were sent, d head_dim of q and k, e
head_dim of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..base.cache import cached_tensors, upload
from ..schedule.rows import KeyIntervals
from .base import Backend, Carry, Grads, OutputGrad, Score


class Expansion(Protocol):
    """Computes one KV head for each query head from the tensors that were sent instead of keys and values."""

    def of(self, heads: range) -> Expansion:
        """The same for some of the query heads and for the heads that were sent for them."""
        ...

    def blocks(self, sent_k: Tensor) -> list[range]:
        """The query heads in blocks. Keys and values are expanded for one block at a time."""
        ...

    def expand(self, sent_k: Tensor, sent_v: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """``k [b, k, heads, d]`` and ``v [b, k, heads, e]`` from the tensors that were sent, ``[b, k, n, ...]``."""
        ...

    def add_gradients(
        self, sent_k: Tensor, sent_v: Tensor, dk: Tensor, dv: Tensor, heads: range, to_dk: Tensor, to_dv: Tensor
    ) -> None:
        """Add the gradients of the sent tensors to ``to_dk`` and ``to_dv``; ``dk`` and ``dv`` are the gradients of
        ``expand``'s results."""
        ...


class RepeatedHeads:
    """Repeats KV heads, one for each query head, where KV heads are read by different numbers of query heads.

    This happens on ranks whose share of the query heads begins or ends inside a group. K/V are repeated here for the
    kernel, and not before they are sent.
    """

    def __init__(self, kv_heads: Sequence[int], device: torch.device) -> None:
        """``kv_heads``: for each query head the KV head that it reads."""

        def make() -> Tensor:
            return upload(torch.tensor(kv_heads, device="cpu"), device)

        self._kv_heads, self._device = kv_heads, device
        self._kv_index = cached_tensors(("KV heads", *kv_heads), device, make)  # int64 [h]

    def of(self, heads: range) -> RepeatedHeads:
        own = self._kv_heads[heads.start : heads.stop]
        return RepeatedHeads([x - own[0] for x in own], self._device)

    def blocks(self, sent_k: Tensor) -> list[range]:
        return [range(len(self._kv_index))]

    def expand(self, sent_k: Tensor, sent_v: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        return sent_k.index_select(2, self._kv_index), sent_v.index_select(2, self._kv_index)

    def add_gradients(
        self, sent_k: Tensor, sent_v: Tensor, dk: Tensor, dv: Tensor, heads: range, to_dk: Tensor, to_dv: Tensor
    ) -> None:
        to_dk.index_add_(2, self._kv_index, dk)
        to_dv.index_add_(2, self._kv_index, dv)


class ExpandedKV:
    """A backend with keys and values that are expanded in each step, some heads at a time.

    It takes the intervals of all parts of the mask: the keys and values are expanded once for them.
    """

    def __init__(self, backend: Backend, expansion: Expansion) -> None:
        self.reads_delta = backend.reads_delta
        self._backend, self._expansion = backend, expansion

    def of(self, heads: range) -> ExpandedKV:
        """The same for some of the query heads."""
        return ExpandedKV(self._backend, self._expansion.of(heads))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: Sequence[KeyIntervals],
        score: Score,
        carry: Carry | None,
        last: bool,
    ) -> Carry:
        """As ``Backend.forward``, for one or more intervals without a key in common."""
        blocks, results = self._expansion.blocks(k), list[Carry]()
        for heads in blocks:
            block_q, block_score, of_heads = q, score, carry
            if len(blocks) > 1:
                at, block_score = slice(heads.start, heads.stop), score.heads(heads.start, heads.stop)
                block_q = q[:, :, at]
                of_heads = None if carry is None else (carry[0][:, :, at].contiguous(), carry[1][:, at].contiguous())
            expanded = self._expansion.expand(k, v, heads)
            for i, intervals in enumerate(parts, 1):
                ends = last and i == len(parts)
                of_heads = self._backend.forward(block_q, *expanded, intervals, block_score, of_heads, ends)
            assert of_heads is not None
            results.append(of_heads)
        if len(results) == 1:
            return results[0]
        return torch.cat([acc for acc, _ in results], 2), torch.cat([lse for _, lse in results], 1)

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: OutputGrad,
        parts: Sequence[KeyIntervals],
        score: Score,
        grads: Grads,
    ) -> None:
        """As ``Backend.backward``, for one or more intervals without a key in common."""
        dq, dk, dv = grads.make(q, k, v)
        if grads.new_dkv:
            dk.zero_()
            dv.zero_()
        for heads in self._expansion.blocks(k):
            at = slice(heads.start, heads.stop)
            block_k, block_v = self._expansion.expand(k, v, heads)
            block_dk, block_dv = (torch.empty_like(x, dtype=dk.dtype) for x in (block_k, block_v))
            of_heads = OutputGrad(
                output.dout[:, :, at],
                output.out[:, :, at],
                output.lse[:, at],
                None if output.delta is None else output.delta[:, at],
            )
            for i, intervals in enumerate(parts):
                self._backend.backward(
                    q[:, :, at],
                    block_k,
                    block_v,
                    of_heads,
                    intervals,
                    score.heads(heads.start, heads.stop),
                    Grads(dq[:, :, at], block_dk, block_dv, grads.new_dq and not i, new_dkv=not i),
                )
            del block_k, block_v
            self._expansion.add_gradients(k, v, block_dk, block_dv, heads, dk, dv)
