"""Attention on cuDNN's kernels, through the operators of ``scaled_dot_product_attention``.

cuDNN's causal mask is aligned to the top left corner. A causal band with more keys than queries is therefore computed
as a full rectangle and a causal square. Windows and packed documents run on the fallback.

PyTorch keeps a compiled graph for each shape and strides of q, k and v (``MHA.cpp``). The graph of a backward also
contains the strides of the output and its gradient in the call that compiled it, and later calls are not checked. So
these two are always dense here, as PyTorch's own are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .bands import Abilities
from .base import head_dims
from .library import LibraryBackend, Options

_forward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_packed_forward: Any = torch.ops.aten._cudnn_attention_forward.default
_packed_backward: Any = torch.ops.aten._cudnn_attention_backward.default
# With this variable, PyTorch's cuDNN kernels take packed rows, and return an lse of another layout.
_RAGGED_VARIABLE = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


class CudnnBackend(LibraryBackend):
    """cuDNN's fused attention."""

    name = "cudnn"
    capabilities: tuple[int, ...] = (8, 9, 10, 12)
    oldest = 90000  # the first version of cuDNN whose kernels have no lower limit on the number of queries
    # The backward refuses one key. On compute capability 10.x, PyTorch refuses one query with some versions of cuDNN.
    abilities = Abilities(windows=False, packs=False, fewest=2)
    _lse_dims = 4  # dimensions of the operators' lse: [b, h, q, 1] in some versions of PyTorch, [b, h, q] in others

    def unavailable(self) -> str | None:
        if torch.version.cuda is None:
            return "this PyTorch is built without CUDA"
        version = loaded_cudnn()
        if isinstance(version, str):
            return version
        if version is None or version < self.oldest:
            needed = f"{self.oldest // 10000}.{self.oldest // 100 % 100}"
            return f"PyTorch's cuDNN is {version or 'missing'}, and {needed} or newer is needed"
        if os.environ.get(_RAGGED_VARIABLE) == "1":
            return f"{_RAGGED_VARIABLE}=1 changes the layout of cuDNN's results; unset it"
        return None if torch.cuda.is_available() else "no CUDA GPU"

    def refused_head_dim(self, head_dim: int, v_head_dim: int, capability: tuple[int, int]) -> str | None:
        if max(head_dim, v_head_dim) <= 128:
            return None
        found = loaded_cudnn()
        version = found if isinstance(found, int) else 0
        if max(head_dim, v_head_dim) <= 256 and version >= 91000 and capability == (9, 0):
            return None
        if (head_dim, v_head_dim) == (192, 128) and version >= 91100 and capability[0] == 10:
            return None
        known = "up to 128; up to 256 with cuDNN 9.10 on compute capability 9.0; 192 and 128 with cuDNN 9.11 on 10.x"
        return f"{head_dims(head_dim, v_head_dim)} ({known})"

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = _forward(*heads_first, None, True, 0.0, options.causal, False, scale=options.softmax_scale)
        type(self)._lse_dims = lse.dim()
        return out.transpose(1, 2), lse.reshape(lse.shape[:3])

    def call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout.contiguous(), q, k, v, out.contiguous()))
        lse = lse[..., None] if self._lse_dims == 4 else lse
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of dropout
        grads = _backward(
            dout, q, k, v, out, lse, unused, unused, None, None, None,
            options.max_q, options.max_k, 0.0, options.causal, scale=options.softmax_scale,
        )  # fmt: skip
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


class CudnnVarlenBackend(CudnnBackend):
    """``cudnn``, and packed documents in one launch, by the operators of PyTorch's ``varlen_attn``.

    Its causal mask is aligned to the top left corner of each document. So a causal call packs documents with as many
    queries as keys. Older versions of cuDNN lack kernels for short documents.
    """

    name = "cudnn_varlen"
    capabilities = (9, 10)
    oldest = 92400
    abilities = Abilities(windows=False, fewest=2)

    def unavailable(self) -> str | None:
        if (why := super().unavailable()) is not None:
            return why
        # Older versions of PyTorch have the operators and do not call them. Which lse they return is not documented.
        if all(argument.name != "seqused_k" for argument in _packed_forward._schema.arguments):
            return f"PyTorch {torch.__version__} is too old: 2.15 or newer is needed"
        return None

    def refused_head_dim(self, head_dim: int, v_head_dim: int, capability: tuple[int, int]) -> str | None:
        return f"{head_dims(head_dim, v_head_dim)} (up to 128)" if max(head_dim, v_head_dim) > 128 else None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        if options.cu_q is None:
            return super().call_forward(q, k, v, options)
        packed = options.cu_q, options.cu_k, options.max_q, options.max_k
        out, lse, *_ = _packed_forward(
            q, k, v, None, *packed, True, 0.0, options.causal, False, scale=options.softmax_scale
        )
        return out, lse

    def call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        if options.cu_q is None:
            return super().call_backward(dout, q, k, v, out, lse, options)
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state of dropout
        packed = options.cu_q, options.cu_k, options.max_q, options.max_k
        dq, dk, dv = _packed_backward(
            dout.contiguous(), q, k, v, out.contiguous(), lse, unused, unused, None,
            *packed, 0.0, options.causal, scale=options.softmax_scale,
        )  # fmt: skip
        return dq, dk, dv


def loaded_cudnn() -> int | str | None:
    """The version of the cuDNN that PyTorch has loaded, such as 91900; why PyTorch refuses it; or None without one."""
    return _ask(torch.backends.cudnn.version)


@lru_cache(maxsize=8)  # PyTorch refuses an older cuDNN than its own in the first call only
def _ask(version: Callable[[], int | None]) -> int | str | None:
    try:
        return version()
    except RuntimeError as error:
        return str(error)
