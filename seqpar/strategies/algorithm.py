"""``Algorithm``: what the ranks of an attention call send to one another, and what they keep for backward.

An algorithm is a value of ``ALGORITHMS`` in ``algorithms.py``. A strategy names it in its ``Placement``. The operators
call it in eager and in compiled code, and know nothing else of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..placement.heads import Heads
from ..placement.placement import Placement
from ..sharding.spec import AttentionSpec
from .call import AttentionCall

Shapes = tuple[Sequence[int], Sequence[int], Sequence[int]]  # of q [b, s, h, d], k [b, s, n, d] and v [b, s, n, e]
AttentionGradients = tuple[Tensor, Tensor, Tensor, Tensor | None]  # dq, dk, dv, and dsinks [h] or None


class Algorithm:
    """An algorithm that saves ``q, k, v, out`` and ``lse`` for backward. ``forward`` and ``backward`` are its own.

    An algorithm that saves other tensors overrides the remaining methods too.
    """

    def forward(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """``out [b, s, h, e]``, ``lse [b, h, s]`` and the tensors for ``backward``.

        Every rank of the call runs it. Statistics and partial results are float32 (float64 for float64).
        """
        raise NotImplementedError

    def backward(
        self, call: AttentionCall, saved: Sequence[Tensor], dout: Tensor, dlse: Tensor | None, shapes: Shapes
    ) -> AttentionGradients:
        """The gradients of ``forward``, of any floating dtype; ``dsinks`` is this rank's part of a sum.

        Every rank of the call runs it. ``dout [b, s, h, e]`` is contiguous. ``dlse [b, h, s]`` is None if this rank has
        no gradient of ``lse``.
        """
        raise NotImplementedError

    def lse_shape(self, spec: AttentionSpec, q_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the ``lse`` that ``forward`` returns."""
        batch, length, heads, _ = q_shape
        return batch, heads, length

    # In compiled code, the operator returns what its backward needs. The number and the dtypes of these tensors may
    # depend on the placement, the heads and the dtype only; each has one dimension, of any size. With no tensors,
    # ``backward`` gets q, k, v, out and lse.

    def kept_dtypes(self, placement: Placement, heads: Heads, dtype: torch.dtype) -> list[torch.dtype]:
        """The dtypes of the tensors that ``keep`` returns, for q of ``dtype``."""
        return []

    def keep(self, call: AttentionCall, saved: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """The tensors ``saved``, as many as ``kept_dtypes``. None of them is q, k or v."""
        return []

    def restore(self, call: AttentionCall, kept: Sequence[Tensor], shapes: Shapes, out_dim: int) -> list[Tensor]:
        """The tensors that ``keep`` was given. ``out_dim`` is the head_dim of the output."""
        return list(kept)
