"""Attention on the package's own kernel for Hopper GPUs: forward in Gluon, and the backward of ``triton``."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..schedule.rows import KeyIntervals
from .base import Carry, Score, head_dims
from .elementwise import interpreted
from .triton import TritonBackend, explain_errors

_CAPABILITY = (9, 0)
_HEAD_DIMS = (64, 128)
_TRITON = (3, 6), (3, 9)


class HopperBackend(TritonBackend):
    """CUDA GPUs of compute capability 9.0."""

    name = "hopper"

    def unavailable(self) -> str | None:
        if not torch.cuda.is_available():
            return "no GPU of compute capability 9.0"
        return super().unavailable() or _why_not()

    def unsupported(
        self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool, v_head_dim: int | None = None
    ) -> str | None:
        if q.dtype not in (torch.float16, torch.bfloat16):
            return f"{q.dtype} (float16 and bfloat16 only)"
        if q.shape[-1] not in _HEAD_DIMS or v_head_dim not in (None, q.shape[-1]):
            return f"{head_dims(q.shape[-1], v_head_dim)} (64 or 128, of q, k and v)"
        if score.softcap:
            return "no softcap"
        if score.alibi_slopes is not None:
            return "no ALiBi"
        if score.dropout_p:
            return "no dropout"
        why = super().unsupported(q, k, score, lse_gradient=lse_gradient, v_head_dim=v_head_dim)
        if why is None and torch.cuda.get_device_capability(q.device) != _CAPABILITY:
            major, minor = torch.cuda.get_device_capability(q.device)
            return f"compute capability {major}.{minor} (9.0 only)"
        return why

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, intervals: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        from ..triton_kernels.hopper_forward import hopper_forward

        with explain_errors(self.name):
            found: Carry = hopper_forward(q, k, v, intervals.to(q.device), score, carry=carry, last=last)
        return found


@lru_cache(maxsize=1)
def _why_not() -> str | None:
    """Why the kernel cannot run although Triton's can, or None."""
    import triton

    if interpreted():
        return "TRITON_INTERPRET=1 interprets the kernels in Triton, and Gluon has no interpreter"
    if not _TRITON[0] <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= _TRITON[1]:
        return (
            f"Triton {triton.__version__} (3.6 to 3.9 only, because Gluon's functions change from version to version)"
        )
    gpus = range(torch.cuda.device_count())
    if torch.version.hip or all(torch.cuda.get_device_capability(gpu) != _CAPABILITY for gpu in gpus):
        return "no GPU of compute capability 9.0"
    return None
