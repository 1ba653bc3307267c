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
# The first version of cuDNN whose kernels have no lower limit on the number of queries.
_OLDEST = 90000
# With this variable, PyTorch's cuDNN kernels take packed rows, and return an lse of another layout.
_RAGGED_VARIABLE = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"


class CudnnBackend(LibraryBackend):
    """cuDNN's fused attention."""

    name = "cudnn"
    capabilities = (8, 9, 10, 12)
    # The backward refuses one key. On compute capability 10.x, PyTorch refuses one query with some versions of cuDNN.
    abilities = Abilities(windows=False, packs=False, fewest=2)
    _lse_dims = 4  # dimensions of the operators' lse: [b, h, q, 1] in some versions of PyTorch, [b, h, q] in others

    def unavailable(self) -> str | None:
        if torch.version.cuda is None:
            return "this PyTorch is built without CUDA"
        version = loaded_cudnn()
        if isinstance(version, str):
            return version
        if version is None or version < _OLDEST:
            return f"PyTorch's cuDNN is {version or 'missing'}, and 9.0 or newer is needed"
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


def loaded_cudnn() -> int | str | None:
    """The version of the cuDNN that PyTorch has loaded, such as 91900; why PyTorch refuses it; or None without one."""
    return _ask(torch.backends.cudnn.version)


@lru_cache(maxsize=8)  # PyTorch refuses an older cuDNN than its own in the first call only
def _ask(version: Callable[[], int | None]) -> int | str | None:
    try:
        return version()
    except RuntimeError as error:
        return str(error)
