"""Multi-head latent attention: ranks send each token's latent, and expand received latents to keys and values.

DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", 2024, section 2.1.
The keys and values of all heads follow from a token's latent ``c`` and one rotated key ``r`` that all heads share:

    k of head i = [nope part of W_i c, r]        v of head i = value part of W_i c

In DeepSeek-V3, ``c`` and ``r`` are 512 and 64 numbers per token, and the keys and values of 128 heads are 40,960.
Every strategy therefore sends ``c`` and ``r`` as if they were the key and the value of a single head. A rank expands
the rows of a step for its own query heads, some heads at a time, just before the kernel. It does not keep the expanded
keys and values: backward sends the latents again, expands them again, and returns the gradients of ``c`` and ``r`` in
float32.

Cost: each rank multiplies all tokens with W once in forward and three times in backward. Each time this takes
``2 * w * h * (nope + e)`` operations per token, divided by the ranks of an all-to-all. A rank's attention to one token
takes ``2 * s * h * (d + e)`` operations in forward under a full mask. With DeepSeek-V3's sizes (nope = e = 128, d =
192) and 16,384 tokens per rank, expanding adds 2.5 % to the forward under a full mask and 5 % under a causal mask.

Shapes: b batch, s tokens of this rank, k keys of a step, h query heads, w width of the latent, r width of the rotated
key, d head_dim of q and k (nope + r), e head_dim of v.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# As many heads are expanded at a time as take this many bytes, keys, values and their gradients together.
_BLOCK_BYTES = 256 << 20


class LatentKeys:
    """Expands latents ``[b, k, 1, w]`` and rotated keys ``[b, k, 1, r]`` to the keys and values of some heads.

    Args:
        weight: ``[h, nope + e, w]``.
        nope: how many elements of a key come from the latent.
        d_weight: the tensor to which the gradient of ``weight`` is added, of its shape, in float32 (float64 for
            float64). None if that gradient is not needed.
    """

    def __init__(self, weight: Tensor, nope: int, d_weight: Tensor | None = None) -> None:
        self.weight, self.nope, self.d_weight = weight, nope, d_weight

    @property
    def v_head_dim(self) -> int:
        return self.weight.shape[1] - self.nope

    def of(self, heads: range) -> LatentKeys:
        """The same for some of the heads."""
        at = slice(heads.start, heads.stop)
        return LatentKeys(self.weight[at], self.nope, None if self.d_weight is None else self.d_weight[at])

    def blocks(self, sent_k: Tensor) -> list[range]:
        """The heads that are expanded at a time."""
        heads, width, _ = self.weight.shape
        per_head = sent_k.shape[0] * sent_k.shape[1] * width * (sent_k.element_size() + 2 * 4)
        each = max(1, _BLOCK_BYTES // max(1, per_head))
        return [range(start, min(start + each, heads)) for start in range(0, heads, each)]

    def expand(self, sent_k: Tensor, sent_v: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """``k [b, k, heads, d]`` and ``v [b, k, heads, e]``."""
        weight = self.weight[heads.start : heads.stop]
        kv = F.linear(sent_k.squeeze(2), weight.flatten(0, 1)).unflatten(2, weight.shape[:2])  # [b, k, heads, nope + e]
        k_nope, v = kv.split_with_sizes([self.nope, self.v_head_dim], 3)
        k = torch.cat([k_nope, sent_v.expand(-1, -1, len(heads), -1)], 3)
        return k, v.contiguous()

    def add_gradients(
        self, sent_k: Tensor, sent_v: Tensor, dk: Tensor, dv: Tensor, heads: range, to_dk: Tensor, to_dv: Tensor
    ) -> None:
        """Add the gradients of expanded keys and values to the gradients of the latents and the rotated keys.

        Args:
            sent_k, sent_v: the latents ``[b, k, 1, w]`` and the rotated keys ``[b, k, 1, r]``.
            dk, dv: the gradients of the expanded keys, ``[b, k, heads, d]``, and values, ``[b, k, heads, e]``.
            heads: the heads of ``dk`` and ``dv``.
            to_dk, to_dv: the gradients of ``sent_k`` and ``sent_v`` to add to, in the dtype of ``dk``.
        """
        d_nope, d_rope = dk.split_with_sizes([self.nope, dk.shape[3] - self.nope], 3)
        to_dv += d_rope.sum(2, keepdim=True)
        dkv = torch.cat([d_nope, dv], 3).flatten(2).flatten(0, 1)  # [b * k, heads * (nope + e)]
        at = slice(heads.start, heads.stop)
        to_dk += _product(dkv, self.weight[at].flatten(0, 1)).view_as(to_dk)
        if self.d_weight is not None:
            latents = sent_k.flatten(0, 2)  # [b * k, w]
            self.d_weight[at] += _product(dkv.T, latents).view_as(self.d_weight[at])


def value_dim(weight: Tensor | None, q_shape: Sequence[int], v_shape: Sequence[int]) -> int:
    """The head_dim of the output: of v, or of the values to which ``weight`` expands latents."""
    return v_shape[3] if weight is None else weight.shape[1] - (q_shape[3] - v_shape[3])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in a's dtype, float32 or float64; ``b`` has the model's dtype.

    On a GPU, tensor cores multiply in the model's dtype and accumulate in float32, as in a linear layer's backward.
    """
    if a.is_cuda and b.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a.to(b.dtype), b, out_dtype=a.dtype)
    return a @ b.to(a.dtype)
