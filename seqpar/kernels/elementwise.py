"""Where the package's Triton kernels can run: the attention backend, and the small work around attention."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def elementwise_kernels(x: Tensor) -> Any | None:
    """``seqpar.triton_kernels`` where they take ``x``, else None; then PyTorch's operators do the same in more passes.

    Not while torch.compile traces, which fuses those operators itself.
    """
    if not x.is_cuda or x.dtype not in DTYPES or unavailable() is not None or torch.compiler.is_compiling():
        return None
    return import_module("seqpar.triton_kernels")


def unavailable() -> str | None:
    """Why no kernel can run on this machine, or None."""
    if not _installed():
        return "Triton is not installed"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "no CUDA or ROCm GPU (TRITON_INTERPRET=1, set before the first import, runs the kernels on the CPU)"
    return None


def interpreted() -> bool:
    """Triton reads the variable when it is imported: set it before."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None
