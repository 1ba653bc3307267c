"""GEMMs whose results are summed over ranks or over chunks, in float32 also for half precision.

Shapes: b batch, t tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which partial results of ``x``'s dtype are summed: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def join(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat``, without a copy of a single tensor."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def matmul_float32(x: Tensor, weight: Tensor) -> Tensor:
    """``x [b, t, out] @ weight [out, in]`` with a result in float32 (float64 for float64)."""
    dtype = sum_dtype(x)
    if x.dtype == dtype:
        return x @ weight
    if _returns_float32(x):
        y: Tensor = torch.mm(x.flatten(0, 1), weight, out_dtype=dtype).unflatten(0, x.shape[:2])
        return y
    return x.to(dtype) @ weight.to(dtype)


def add_weight_gradient(dweight: Tensor, dout: Tensor, x: Tensor) -> None:
    """Add ``dout^T x`` over all tokens: ``dout [b, t, out]``, ``x [b, t, in]``, ``dweight [out, in]``.

    In half precision, the product is rounded to the dtype of x before it is added, except on NVIDIA GPUs.
    """
    dout, x = dout.flatten(0, 1).t(), x.flatten(0, 1)
    if dweight.dtype == x.dtype:
        dweight.addmm_(dout, x)
    elif _returns_float32(x):
        torch.addmm(dweight, dout, x, out_dtype=dweight.dtype, out=dweight)
    else:
        dweight += dout @ x


def _returns_float32(x: Tensor) -> bool:
    """Whether a GEMM of half precision, which accumulates in float32, can return float32."""
    return x.device.type == "cuda" and torch.version.hip is None
