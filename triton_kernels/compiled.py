"""Compile a :class:`Launch` ahead of time, for a GPU that this machine does not have, and read off what it takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Launch

_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Shared memory of one block, bytes (CUDA programming guide, table of compute capabilities; CDNA3 LDS).
SHARED_LIMIT = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
}
_MATRIX = {"cuda": r"\b(mma|wgmma|tcgen05)\.(sync|mma)\S*", "hip": r"\bv_mfma_\w+"}


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes:
        registers: per thread.
        spilled_bytes: per thread.
        shared_bytes: shared memory per block.
        matrix: family of its matrix instructions ("mma", "wgmma", "tcgen05", "mfma"), "" for none.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix: str

    def fits_shared(self, target: str) -> bool:
        """Whether the GPU has that much shared memory for a block."""
        return self.shared_bytes <= SHARED_LIMIT[target]


def compile_for(launch: Launch, target: str) -> Any:
    """Compile ``launch`` for ``target`` as a call with these arguments would; tensors may be on the meta device.

    Raises:
        RuntimeError: under ``TRITON_INTERPRET=1``, where Triton interprets kernels instead of compiling them.
    """
    kernel = launch.kernel
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted; unset it to compile them")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    # What Triton's launcher learns from the arguments: integers equal to 1 become constants, and multiples of 16
    # (pointers too, since PyTorch aligns allocations) are known to be so, which allows wide loads.
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None or (_specialized(parameter, value) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}{value.block_shape}>".replace(" ", "")
            continue
        if isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, Tensor) or (_specialized(parameter, value) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=TARGETS[target], options=launch.config.options
    )


def _specialized(parameter: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and not parameter.do_not_specialize


def resources(compiled: Any, target: str) -> Resources:
    """The resources of a kernel compiled for ``target``."""
    if "cubin" in compiled.asm:
        return _cuda_resources(compiled)
    return _hip_resources(compiled.asm["amdgcn"], compiled.metadata.shared)


def _cuda_resources(compiled: Any) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [_cuobjdump(), "--dump-resource-usage", str(cubin)], check=True, capture_output=True, text=True
        ).stdout
    sizes = {name: int(size) for name, size in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(
        registers=sizes["REG"],
        # A spill shows as LOCAL in a kernel's own frame and as STACK where ptxas gives it one.
        spilled_bytes=sizes["STACK"] + sizes["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        matrix=_family(compiled.asm["ptx"], _MATRIX["cuda"]),
    )


def _hip_resources(assembly: str, shared: int) -> Resources:
    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if found is None:
            raise RuntimeError(f"no .{name} in the assembly's metadata")
        return int(found.group(1))

    return Resources(
        registers=field("vgpr_count"),
        spilled_bytes=field("private_segment_fixed_size"),
        shared_bytes=shared,
        matrix=_family(assembly, _MATRIX["hip"]),
    )


def _family(assembly: str, pattern: str) -> str:
    found = re.search(pattern, assembly)
    return "" if found is None else "mfma" if "mfma" in found.group() else found.group(1)


def _cuobjdump() -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
