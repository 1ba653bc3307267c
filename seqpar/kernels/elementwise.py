"""Where the package's Triton kernels can run: attention's backend, and the elementwise work around attention."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class ElementwiseKernels(Protocol):
    """The functions of ``seqpar.triton_kernels`` that each fuse several PyTorch operators."""

    def merge_(self, acc: Tensor, lse: Tensor, out: Tensor, out_lse: Tensor) -> None:
        """Merge the partial attention result ``(out, out_lse)`` into ``(acc, lse)``."""
        ...

    def delta(self, out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
        """``rowsum(dout * out) - dlse``."""
        ...

    def apply_rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate ``x`` by the angles of these cosines and sines."""
        ...


def elementwise_kernels(x: Tensor) -> ElementwiseKernels | None:
    """``seqpar.triton_kernels`` if its kernels can process ``x``. If None, use PyTorch's operators instead.

    It is None while torch.compile traces, because torch.compile fuses those operators itself.
    """
    if not x.is_cuda or x.dtype not in DTYPES or unavailable() is not None or torch.compiler.is_compiling():
        return None
    if not targeted(x.device):
        return None
    from .. import triton_kernels  # not at the top: it imports Triton, which need not be installed

    return triton_kernels


def unavailable() -> str | None:
    """Why the kernels cannot run on this machine, or None."""
    if not _installed():
        return "Triton is not installed"
    if interpreted():
        return _no_interpreter()
    if not torch.cuda.is_available():
        return "no CUDA or ROCm GPU (TRITON_INTERPRET=1, set before the first import, runs the kernels on the CPU)"
    return None


@lru_cache(maxsize=16)
def targeted(device: torch.device) -> bool:
    """Whether Triton compiles for this GPU: one of compute capability 8.0 or higher, or any GPU of ROCm."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU. Triton reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@lru_cache(maxsize=1)
def _no_interpreter() -> str | None:
    """Why Triton's interpreter does not work with the installed numpy, or None."""
    import numpy
    import triton

    triton_version, numpy_version = (
        tuple(int(part) for part in version.split(".")[:2]) for version in (triton.__version__, numpy.__version__)
    )
    if triton_version <= (3, 6) and numpy_version >= (2, 4):
        return (
            f"the interpreter of Triton {triton.__version__} does not work with numpy {numpy.__version__}; install "
            "numpy<2.4 or Triton 3.7, or unset TRITON_INTERPRET to run the kernels on a GPU"
        )
    return None


@lru_cache(maxsize=1)
def _installed() -> bool:
    return find_spec("triton") is not None
