"""One kernel launch as a value: it can be run, or compiled ahead of time for a GPU that this machine does not have."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import Config

if knobs.runtime.interpret:
    # Triton imports it at the first launch. The interpreter has then replaced functions whose signatures it reads, and
    # Python 3.10 knows no signature of what replaces them.
    import triton.experimental.gluon


@dataclass(frozen=True)
class Launch:
    """A kernel, its grid, its arguments by name and its configuration.

    Attributes:
        arguments: every parameter of the kernel. Entries that are not parameters of the kernel are ignored.
    """

    kernel: Any
    grid: int
    arguments: dict[str, Any]
    config: Config

    def __call__(self) -> Any:
        """Run the kernel on the current stream of its tensors' device. An empty grid launches nothing.

        Returns:
            What Triton returns: the compiled kernel, or None in the interpreter.
        """
        if self.grid == 0:
            return None
        device = next(a.device for a in self.arguments.values() if isinstance(a, Tensor))
        # Triton launches on the current device, which need not be the tensors' device.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            arguments = {name: self.arguments[name] for name in self.kernel.arg_names}
            return self.kernel[(self.grid,)](**arguments, **self.config.options)


class Repeated:
    """Runs the launches of one kernel. A launch that is like an earlier one skips Triton's dispatch.

    Triton binds every argument by name and inspects each one to find the compiled kernel. Together with making the
    arguments, this takes longer than many kernels run. Here, a key contains everything that the arguments depend on: shapes,
    strides and dtypes of the tensors, whether each starts at a multiple of 16 bytes (if not, Triton compiles another
    variant), and the caller's other values. For a known key, the compiled kernel and its arguments are reused, and only
    the tensors are replaced.
    """

    def __init__(self, *inputs: str) -> None:
        """``inputs``: the kernel's parameters that change from launch to launch: tensors, None, and integers."""
        self._inputs = inputs
        self._ready: dict[Hashable, _Ready] = {}

    def __call__(self, inputs: tuple[Tensor | int | None, ...], values: Hashable, make: Callable[[], Launch]) -> None:
        """Run a launch.

        Args:
            inputs: in the order of the parameters' names. The first is a tensor, on whose device the kernel runs.
            values: every other value that the launch depends on.
            make: returns the launch, of the tensors of ``inputs`` or of copies of them.
        """
        first: Any = inputs[0]
        device = first.get_device()
        key = layout_key(device, values, inputs)
        ready = self._ready.get(key)
        if ready is not None and not ready.hooks and (device < 0 or device == torch.cuda.current_device()):
            ready(inputs)
            return
        launch = make()
        compiled = launch()
        if isinstance(compiled, CompiledKernel):  # neither an interpreted kernel nor one that is still being compiled
            ready = _Ready.of(launch, compiled, self._inputs, inputs)
            if ready is not None:
                if len(self._ready) >= _MOST_READY:
                    self._ready.clear()
                self._ready[key] = ready

    def forget(self) -> None:
        """Forget all launches, so that Triton dispatches the next one."""
        self._ready.clear()


# Triton versions whose internal launch is known. For other versions, the documented interface is used.
_KNOWN = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)
_MOST_COLUMNS = 512  # of one tile
_MOST_READY = 4096  # launches of one kernel that are remembered: about 2 KB each


def layout_key(device: int, values: Hashable, inputs: tuple[Tensor | int | None, ...]) -> Hashable:
    """Everything that Triton's choice of a compiled kernel, and the arguments other than the inputs, depend on."""
    key: list[Hashable] = [device, values]
    for x in inputs:
        if isinstance(x, Tensor):
            key += x.dtype, x.data_ptr() & 15, x.shape, x.stride()
        else:
            key.append(None if x is None else -(2**31) <= x < 2**31)  # an integer's type: 32 or 64 bits
    if torch.version.hip is not None:
        # There, Triton also asks whether 32 bits can address the memory.
        key += (x.untyped_storage().nbytes() < 2**31 for x in inputs if isinstance(x, Tensor))
    return tuple(key)


class _Ready:
    """A compiled kernel with its grid and arguments, without the inputs."""

    def __init__(
        self, compiled: Any, grid: int, arguments: list[Any], inputs: list[tuple[int, int]], tiled: list[Any]
    ) -> None:
        """``inputs``, ``tiled``: places among the arguments, and of their tensors among the inputs."""
        self._compiled, self._grid = compiled, grid
        self.hooks: list[Any] = compiled.src.fn.pre_run_hooks  # which Triton's way calls before a launch
        self._arguments, self._inputs, self._tiled = arguments, inputs, tiled

    @classmethod
    def of(cls, launch: Launch, compiled: Any, names: tuple[str, ...], inputs: tuple[Any, ...]) -> _Ready | None:
        """``launch`` as a ``_Ready``; None if one of its tensors is a copy instead of an input."""
        arguments = [launch.arguments[name] for name in launch.kernel.arg_names]
        places, tiled = [], []
        for place, (name, value) in enumerate(zip(launch.kernel.arg_names, arguments, strict=True)):
            given = names.index(name) if name in names else None
            if is_descriptor(value):
                if given is None or value.base is not inputs[given]:
                    return None
                tiled.append((place, given, type(value), {**value.__dict__, "base": None}))
            elif given is not None:
                if value is not inputs[given]:
                    return None
                places.append((place, given))
            elif isinstance(value, Tensor):
                return None
            if given is not None:
                arguments[place] = None  # the memory of one call is not kept for the next
        return cls(compiled, launch.grid, arguments, places, tiled)

    def __call__(self, inputs: tuple[Any, ...]) -> None:
        arguments = self._arguments.copy()
        for place, given in self._inputs:
            arguments[place] = inputs[given]
        for place, given, made, fields in self._tiled:
            # Without the checks of its constructor: the key says that this tensor passes them like the first.
            descriptor = object.__new__(made)
            descriptor.__dict__.update(fields, base=inputs[given])
            arguments[place] = descriptor
        compiled = self._compiled
        if not _KNOWN or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            compiled[(self._grid, 1, 1)](*arguments)
            return
        # As in the line above, without the names and the dictionary that only hooks need.
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        compiled.run(
            self._grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )


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
        tiles: by name, ``x [batch, seq, heads, head_dim]`` and how many rows of one head are read at once. Each has
            a second argument, ``<name>_TAIL``, for its columns past the first tile; None if there are none.
        lines: by name, a contiguous ``[lines, padded length]`` and how many numbers of one line are read at once.

    Returns:
        Descriptors and True if ``config.tma`` and if every tensor is laid out as TMA needs it (start and strides
        multiples of 16 bytes); else the tensors themselves and False.
    """
    lines = lines or {}
    tails = {f"{name}_TAIL": if_tail(x) for name, (x, _) in tiles.items()}
    if not config.tma or not all(describable(x) for x, _ in tiles.values()):
        return {name: x for name, (x, _) in (*tiles.items(), *lines.items())} | tails, False
    described: dict[str, Any] = tails
    for name, (x, rows) in tiles.items():
        # An axis of size 1 may have any stride, also one that the descriptor rejects; 16 elements are always accepted.
        batch, seq, heads = (
            stride if size > 1 else 16 for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True)
        )
        # Heads come before the sequence, because Triton drops only leading axes of size 1 from a box.
        shape = [x.shape[0], x.shape[2], x.shape[1], x.shape[3]]
        for part, columns in zip((name, f"{name}_TAIL"), tile_columns(x.shape[-1]), strict=True):
            if columns:
                described[part] = TensorDescriptor(x, shape, [batch, heads, seq, 1], [1, 1, rows, columns])
    for name, (x, numbers) in lines.items():
        described[name] = TensorDescriptor(x, list(x.shape), list(x.stride()), [1, numbers])
    return described, True


def is_descriptor(x: object) -> bool:
    """Whether ``x`` is a TMA descriptor, of Triton or of Gluon."""
    return hasattr(x, "block_shape")


def describable(x: Tensor) -> bool:
    """Whether ``x [batch, seq, heads, head_dim]`` is laid out as TMA needs it."""
    if 0 in x.shape or x.data_ptr() % 16:
        return False
    strides = (stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    return all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in strides)


def widths(q: Tensor, v: Tensor) -> dict[str, Any]:
    """Fields of ``tiles.Constants``: the head_dims of q and k, and of v, and the columns of the tiles that hold them."""
    head_dim, v_head_dim = q.shape[-1], v.shape[-1]
    block, tail = tile_columns(head_dim)
    return {"D": head_dim, "BLOCK_D": block, "TAIL": tail, "DV": v_head_dim, "BLOCK_DV": padded(v_head_dim)}


def tile_columns(head_dim: int) -> tuple[int, int]:
    """The columns of the tile that holds a head of q or k, and of a second one for what is past 512, or 0.

    ``tl.dot`` takes powers of two: 576 columns, as in multi-head latent attention, would be padded to 1024.
    """
    return (padded(head_dim), 0) if head_dim <= _MOST_COLUMNS else (_MOST_COLUMNS, padded(head_dim - _MOST_COLUMNS))


def if_tail(x: Tensor) -> Tensor | None:
    """``x [batch, seq, heads, head_dim]`` itself if its heads take a second tile."""
    return x if x.shape[-1] > _MOST_COLUMNS else None


def padded(head_dim: int) -> int:
    """The columns of a tile that holds a head: the next power of two, and at least the 16 that matrix units take."""
    return max(16, 1 << (head_dim - 1).bit_length())


def precision(dtype: torch.dtype, allow_tf32: bool | None, hip: bool | None = None) -> str:
    """``input_precision`` of ``tl.dot`` for operands of ``dtype``.

    For float32, tf32 is used only if asked for, by ``allow_tf32`` or by ``torch.set_float32_matmul_precision``.
    Otherwise CUDA computes three tf32 products, which keep about 22 of float32's 24 bits (Ootomo and Yokota, 2022) on
    the matrix units, and ROCm one exact product, because its matrix units multiply float32 (and few of them tf32).
    """
    if dtype != torch.float32:
        return "ieee"
    if allow_tf32 is None:
        allow_tf32 = torch.get_float32_matmul_precision() != "highest"
    if hip is None:
        hip = torch.version.hip is not None
    if hip:
        # Of ROCm's architectures only gfx942 multiplies in tf32; Triton rejects it for the others.
        return "tf32" if allow_tf32 and _rocm_name().startswith("gfx942") else "ieee"
    return "tf32" if allow_tf32 else "tf32x3"


def dies(hip: bool | None = None) -> int:
    """How many dies the GPU has, each with a cache of its own, to which it deals the programs in turn.

    Args:
        hip: whether to compile for MI300X and MI350X; None looks at this machine's GPUs.
    """
    if hip is None:
        hip = torch.version.hip is not None and _rocm_name().startswith(("gfx94", "gfx95"))
    return 8 if hip else 1


@lru_cache(maxsize=1)
def _rocm_name() -> str:
    """The architecture of this machine's ROCm GPUs; "" if there are none."""
    return getattr(torch.cuda.get_device_properties(0), "gcnArchName", "") if torch.cuda.is_available() else ""
