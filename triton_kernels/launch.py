"""One kernel launch as a value: it can be run, or compiled ahead of time for a GPU that this machine does not have."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import Config


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, its arguments by name and its configuration.

    Attributes:
        arguments: every parameter of the kernel; entries that are none of its parameters are left out.
    """

    kernel: Any
    grid: int
    arguments: dict[str, Any]
    config: Config

    def __call__(self) -> None:
        """Run it on the current stream of the device that its tensors are on. An empty grid launches nothing."""
        if self.grid == 0:
            return
        device = next(a.device for a in self.arguments.values() if isinstance(a, Tensor))
        # Triton launches on the current device, which need not be that of the tensors.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            arguments = {name: self.arguments[name] for name in self.kernel.arg_names}
            self.kernel[(self.grid,)](**arguments, **self.config.options)


def strides(axes: str = "bsh", /, **tensors: Tensor | None) -> dict[str, int]:
    """``stride_<name><axis>`` for the leading ``axes`` of each tensor; 0 for an axis of size 1 and for None.

    PyTorch gives an axis of size 1 any stride. Triton would compile a new variant of the kernel for some of them.
    """
    return {
        f"stride_{name}{axis}": 0 if x is None or x.shape[index] == 1 else x.stride(index)
        for name, x in tensors.items()
        for index, axis in enumerate(axes)
    }


def unit_stride(x: Tensor) -> Tensor:
    """``x`` itself if its last dimension is dense, as the kernels need it, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def descriptors(
    config: Config, tiles: dict[str, tuple[Tensor, int]], lines: dict[str, tuple[Tensor, int]] | None = None
) -> tuple[dict[str, Any], bool]:
    """The arguments of tensors that a kernel reads tile by tile, and whether it reads them by TMA.

    TMA is Hopper's bulk copy engine: it takes a descriptor of the whole tensor instead of a pointer, and one thread
    starts the copy of a tile.

    Args:
        config: asks for TMA or not.
        tiles: by name, ``x [batch, seq, heads, head_dim]`` and how many rows of one head are read at once.
        lines: by name, a contiguous ``[lines, padded length]`` and how many numbers of one line are read at once.

    Returns:
        Descriptors and True if ``config.tma`` and if every tensor is laid out as TMA needs it (start and strides
        multiples of 16 bytes); else the tensors themselves and False.
    """
    lines = lines or {}
    if not config.tma or not all(_describable(x) for x, _ in tiles.values()):
        return {name: x for name, (x, _) in (*tiles.items(), *lines.items())}, False
    described: dict[str, Any] = {}
    for name, (x, rows) in tiles.items():
        # An axis of size 1 may have any stride, also one that the descriptor rejects; 16 elements are always accepted.
        axes = [stride if size > 1 else 16 for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)]
        described[name] = TensorDescriptor(x, list(x.shape), [*axes, 1], [1, rows, 1, padded(x.shape[-1])])
    for name, (x, numbers) in lines.items():
        described[name] = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, numbers])
    return described, True


def _describable(x: Tensor) -> bool:
    if 0 in x.shape or x.data_ptr() % 16:
        return False
    strides = (stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    return all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)


def padded(head_dim: int) -> int:
    """The columns of a tile that holds a head: the next power of two, and at least the 16 that matrix units take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def precision(dtype: torch.dtype, allow_tf32: bool | None, hip: bool | None = None) -> str:
    """``input_precision`` of ``tl.dot`` for operands of ``dtype``.

    For float32, tf32 is used only if asked for, by ``allow_tf32`` or by ``torch.set_float32_matmul_precision``.
    Otherwise CUDA computes three tf32 products, which keep about 22 of float32's 24 bits (Ootomo and Yokota, 2022) on
    the matrix units, and ROCm one exact product, because its matrix units multiply float32.
    """
    if dtype != torch.float32:
        return "ieee"
    if allow_tf32 is None:
        allow_tf32 = torch.get_float32_matmul_precision() != "highest"
    if allow_tf32:
        return "tf32"
    if hip is None:
        hip = torch.version.hip is not None
    return "ieee" if hip else "tf32x3"
