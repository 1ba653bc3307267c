"""Compile a :class:`Launch` for a GPU that this machine does not have, and read the resources that it uses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from triton_kernels.launch import Launch

DESCRIPTORS = TensorDescriptor, GluonDescriptor
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
# Shared memory of one block, bytes (CUDA programming guide, table of compute capabilities; CDNA3 LDS).
SHARED_LIMIT = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
# Warps that one processor runs at a time (same tables). Its blocks share a little more shared memory than one can have.
_WARPS = {"sm_80": 64, "sm_86": 48, "sm_90": 64, "sm_100": 64, "sm_120": 48, "gfx942": 32, "gfx950": 32}
_TENSOR_COLUMNS = 512
_PRODUCT = re.compile(r"\b(HGMMA|HMMA|UTC\w*MMA)\b")
# In disassembled code: waits for products or copies, barriers of the block, spilled registers.
_COSTS = (r"\b(WARPGROUP\.DEPBAR|LDGDEPBAR|DEPBAR|SYNCS\S*TRYWAIT\S*)", r"\bBAR\.", r"\b(LDL|STL)\b")
_MATRIX = {"cuda": r"\b(mma|wgmma|tcgen05)\.(sync|mma)\S*", "hip": r"\bv_mfma_\w+"}


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes:
        registers: per thread.
        spilled_bytes: per thread.
        shared_bytes: shared memory per block.
        matrix: family of its matrix instructions ("mma", "wgmma", "tcgen05", "mfma"), "" for none.
        occupancy: blocks that run on one processor at a time, by registers, shared memory and warps.
        products: products of tiles in its code.
        synchronous: products among them that warps wait for at once though the hardware has asynchronous ones (wgmma).
        serialized: the number of ptxas's message that it makes products wait for one another, such as "C7513"; or "".
        reloaded: tiles that go from shared memory through registers into such a product, which could read them there.
        tensor_columns: columns of tensor memory (sm_100), of 512.
        loops: for each innermost loop with products, in the order of the code, how often one iteration waits for
            products or copies, waits for all warps of the block at a barrier, and reads or writes spilled registers.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix: str
    occupancy: int = 0
    products: int = 0
    synchronous: int = 0
    serialized: str = ""
    reloaded: int = 0
    tensor_columns: int = 0
    loops: tuple[tuple[int, ...], ...] = ()

    def fits(self, target: str) -> bool:
        """Whether a block's shared memory and tensor memory fit the GPU."""
        return self.shared_bytes <= SHARED_LIMIT[target] and self.tensor_columns <= _TENSOR_COLUMNS


def compile_for(launch: Launch, target: str, *, aligned: bool = True) -> Any:
    """Compile ``launch`` for ``target`` as a call with these arguments would; tensors may be on the meta device.

    Args:
        launch: the kernel and its arguments.
        target: a key of ``TARGETS``.
        aligned: whether tensors start, and integers are, multiples of 16 as far as the arguments say; False compiles
            the variant for tensors and strides without known alignment.

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
        if isinstance(value, DESCRIPTORS):
            tile = f"{_TYPES[value.base.dtype]}{value.block_shape}"
            signature[name] = f"tensordesc<{tile},{value.layout!r}>" if kernel.is_gluon() else f"tensordesc<{tile}>"
            continue
        if isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        if aligned and (isinstance(value, Tensor) or (_specialized(parameter, value) and value % 16 == 0)):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    return triton.compile(
        source(kernel, signature, constants, attributes), target=TARGETS[target], options=launch.config.options
    )


def _specialized(parameter: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and not parameter.do_not_specialize


class StubDriver:
    """Triton's driver on a machine without a GPU, for tensors on the CPU: compiles kernels, and runs none.

    ``triton.runtime.driver.set_active(StubDriver("sm_90", launch))`` makes Triton use it.
    """

    def __init__(self, target: str, launch: Callable[..., None]) -> None:
        """``launch`` takes what the driver's own would: the three sizes of the grid, ..., the kernel's arguments."""
        self.launcher_cls = lambda source, metadata: launch
        self.utils = self
        self._target = target

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, kernel, 255, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[self._target], "multiprocessor_count": 132}

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self._target]

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def resources(compiled: Any, target: str) -> Resources:
    """The resources of a kernel compiled for ``target``."""
    measured = _cuda_resources(compiled) if "cubin" in compiled.asm else _hip_resources(compiled)
    code = compiled.asm["ttgir"]
    asynchronous = re.findall(r"ttng\.warp_group_dot .*", code)
    products = re.findall(r"(?:= tt\.dot |ttng\.tc_gen5_mma).*", code)
    tiles = re.findall(r"ttg\.local_load .* -> tensor<\d+x\d+x", code)
    return replace(
        measured,
        occupancy=_occupancy(measured, compiled.metadata.num_warps, target),
        products=len(asynchronous) + len(products),
        synchronous=sum("isAsync = true" not in product for product in asynchronous),
        serialized=_serialized(compiled.asm["ptx"]) if asynchronous else "",
        reloaded=len(tiles) if asynchronous else 0,
        tensor_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
    )


def tma_errors(launch: Launch, compiled: list[dict[str, Any]] | None) -> list[str]:
    """What CUDA's ``cuTensorMapEncodeTiled`` rejects in the descriptors of a launch, as its documentation lists it.

    Args:
        launch: the kernel and its arguments.
        compiled: for each descriptor what Triton's compiler chose, ``metadata.tensordesc_meta`` of the compiled kernel.
    """
    named = [(name, x) for name, x in launch.arguments.items() if isinstance(x, DESCRIPTORS)]
    order = {parameter.name: i for i, parameter in enumerate(launch.kernel.params)}
    named.sort(key=lambda pair: order[pair[0]])
    errors = []
    for (name, x), chosen in zip(named, compiled or [], strict=True):
        size, box, swizzle = chosen["elem_size"], chosen["block_size"], chosen["swizzle"]
        inner, widest = box[-1] * size, 16 << swizzle  # bytes; 1 to 3 are swizzles of 32, 64 and 128 bytes
        rules = {
            f"{len(box)} dimensions": 1 <= len(box) == len(x.shape) <= 5,
            f"sizes {x.shape}": all(1 <= n <= 2**32 for n in x.shape),
            f"strides {x.strides}": all(0 <= n * size < 2**40 and n * size % 16 == 0 for n in x.strides[:-1]),
            f"a last stride of {x.strides[-1]}": x.strides[-1] == 1,
            f"a box of {box}": all(1 <= n <= 256 for n in box),
            f"a row of {inner} bytes": inner % 16 == 0 and (not swizzle or inner <= widest),
            "an address that is no multiple of 16": x.base.data_ptr() % 16 == 0,
        }
        errors += [f"the descriptor of {name} has {what}" for what, allowed in rules.items() if not allowed]
    return errors


def _occupancy(measured: Resources, warps: int, target: str) -> int:
    """Blocks on one processor: the registers of a thread come in steps of 8, and CUDA takes 1 KB of each block."""
    registers = -(-max(measured.registers, 1) // 8) * 8
    if target.startswith("gfx"):  # four SIMDs with 512 registers a lane each
        by_registers = 4 * min(8, 512 // registers) // warps
        total, reserved = SHARED_LIMIT[target], 0
    else:
        by_registers = 65536 // (registers * 32 * warps)
        total, reserved = SHARED_LIMIT[target] + 1024, 1024
    return min(by_registers, _WARPS[target] // warps, total // (measured.shared_bytes + reserved or 1))


def _cuda_resources(compiled: Any) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage, code = (
            subprocess.run([_cuobjdump(), option, str(cubin)], check=True, capture_output=True, text=True).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    sizes = {name: int(size) for name, size in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(
        registers=sizes["REG"],
        # A spill shows as LOCAL in a kernel's own frame and as STACK where ptxas gives it one.
        spilled_bytes=sizes["STACK"] + sizes["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        matrix=_family(compiled.asm["ptx"], _MATRIX["cuda"]),
        loops=_loops(code),
    )


def _loops(code: str) -> tuple[tuple[int, ...], ...]:
    """``Resources.loops`` of disassembled code.

    A loop is what a branch jumps back over. What follows the end of the kernel waits for a copy that has not arrived,
    and jumps back into the middle of a loop.
    """
    # Triton 3.6 prints after an instruction of sm_120 what it waits for: "EXIT     &req={0}  ?trans5;".
    found = [
        (int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.+?)\s*(?:\s{2}[&?][^;]*)?;", code)
    ]
    end = max(at for at, text in found if text == "EXIT")
    products = [at for at, text in found if _PRODUCT.search(text)]
    back = [(int(to[1], 16), at) for at, text in found if (to := re.search(r"\bBRA\b.* (0x[0-9a-f]+)", text))]
    loops: list[tuple[int, int]] = []
    for first, last in sorted(back, key=lambda loop: loop[1] - loop[0]):
        inside = first < last < end and any(first <= at <= last for at in products)
        if inside and all(last < x or y < first for x, y in loops):
            loops.append((first, last))
    return tuple(
        tuple(sum(bool(re.search(what, text)) for at, text in found if first <= at <= last) for what in _COSTS)
        for first, last in sorted(loops)
    )


def _serialized(ptx: str) -> str:
    architecture = re.search(r"^\.target sm_(\d+)\w*", ptx, re.MULTILINE)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        ptxas = get_ptxas(int(architecture[1])).path
        command = [
            ptxas,
            "-v",
            f"--gpu-name={architecture[0][8:]}",
            str(source),
            "-o",
            str(source.with_suffix(".cubin")),
        ]
        output = subprocess.run(command, check=True, capture_output=True, text=True)
    message = re.search(r"C75\d\d", output.stdout + output.stderr)
    return "" if message is None else message[0]


def _hip_resources(compiled: Any) -> Resources:
    assembly = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if match is None:
            raise RuntimeError(f"no .{name} in the assembly's metadata")
        return int(match.group(1))

    return Resources(
        registers=field("vgpr_count"),
        spilled_bytes=field("private_segment_fixed_size"),
        shared_bytes=compiled.metadata.shared,
        matrix=_family(assembly, _MATRIX["hip"]),
    )


def _family(assembly: str, pattern: str) -> str:
    match = re.search(pattern, assembly)
    return "" if match is None else "mfma" if "mfma" in match.group() else match.group(1)


def _cuobjdump() -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
