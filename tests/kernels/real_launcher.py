"""Compares what Triton's launcher passes to a CUDA driver with the arguments of the kernels, for every shape of call.

``test_triton_launch.py`` runs it in a process of its own, in which ``recording_driver.c`` is the CUDA driver. Each call
is made twice: the first launch goes through Triton's dispatch, the second one is a repeated launch of ``launch.py``.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

import seqpar.triton_kernels.backward as backward
import seqpar.triton_kernels.forward as forward
import seqpar.triton_kernels.hopper_forward as hopper_forward
import seqpar.triton_kernels.merge as merge
import seqpar.triton_kernels.preprocess as preprocess
import seqpar.triton_kernels.rotary as rotary
from seqpar.kernels.base import Score
from seqpar.schedule.rows import KeyIntervals
from seqpar.triton_kernels import Config, apply_rotary, attention_backward, attention_forward, delta, merge_
from seqpar.triton_kernels.launch import is_descriptor

KERNELS = (
    *(forward.forward_kernel, backward.backward_kernel, backward.dq_kernel, preprocess.delta_kernel),
    *(preprocess.statistics_kernel, merge.merge_kernel, rotary.rotary_kernel, hopper_forward.hopper_kernel),
)
REPEATED = (
    *(forward._launches, backward._keys_launches, backward._dq_launches, preprocess._delta_launches),
    *(preprocess._statistics_launches, merge._launches, rotary._launches, hopper_forward._launches),
)
HEADS, KV_HEADS, LENGTH, DIM = 2, 1, 128, 32
# Warps of a program; of other kernels as many as the launch asks for.
ROLES = {hopper_forward.hopper_kernel: 4 + 4 + 4}  # two consumers and the producer, whose group has four warps too


class Recorded(ctypes.Structure):
    """``Launch`` of recording_driver.c."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.c_int),
        ("offsets", ctypes.c_int * 256),
        ("sizes", ctypes.c_int * 256),
        ("bytes", ctypes.c_ubyte * 8192),
    )

    def values(self) -> list[bytes]:
        spans = [(self.offsets[i], self.offsets[i] + self.sizes[i]) for i in range(self.parameters)]
        return [bytes(self.bytes[start:stop]) for start, stop in spans]


def install() -> Any:
    """Make the recording driver Triton's. Returns its library."""
    library = ctypes.CDLL("libcuda.so.1")
    library.launch_at.restype = ctypes.POINTER(Recorded)
    driver: Any = object.__new__(CudaDriver)  # whose constructor asks torch.cuda
    driver.utils, driver.launcher_cls = CudaUtils(), CudaLauncher
    driver.get_current_device, driver.get_current_stream = lambda: 0, lambda device: 0
    driver.set_current_device, driver.get_device_capability = lambda device: None, lambda device: (9, 0)
    triton.runtime.driver.set_active(driver)
    return library


def expected(kernel: Any, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """The parameters of the compiled kernel, by name: tensors, descriptors and numbers."""
    found: list[tuple[str, Any]] = []
    for parameter in kernel.params:
        value = arguments[parameter.name]
        is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            continue
        found.append((parameter.name, value))
        if is_descriptor(value):
            found += [(f"{parameter.name} {i}", x) for i, x in enumerate((*value.shape, *value.strides))]
    return found


def check(name: str, value: Any, given: bytes) -> None:
    if is_descriptor(value):
        words = struct.unpack("<10Q7I", given[:108])
        rank, element = words[15], value.base.element_size()
        assert words[0] == value.base.data_ptr() and rank == len(value.shape) and words[16] == element, name
        assert list(words[1 : 1 + rank]) == [*reversed(value.shape)], name
        assert list(words[6 : 5 + rank]) == [x * element for x in reversed(value.strides[:-1])], name
        assert words[11] == value.block_shape[-2], name  # rows of the box; its columns may be less than the tile's
    elif isinstance(value, Tensor):
        assert int.from_bytes(given, "little") == value.data_ptr() and len(given) == 8, name
    elif isinstance(value, float):
        assert given == struct.pack("<f", value), (name, value, given)
    else:
        assert int.from_bytes(given, "little", signed=True) == value, (name, value, given)


def calls() -> tuple[dict[str, Callable[[], object]], set[int]]:
    """The shapes of calls, by name, and the addresses of their tensors."""
    torch.manual_seed(0)
    positions = torch.arange(LENGTH, dtype=torch.int32)
    mask = KeyIntervals(torch.zeros(1, LENGTH, dtype=torch.int32), positions[None] + 1, positions, positions)
    slopes, sinks = torch.rand(2, HEADS), torch.rand(HEADS)
    q, dout = (torch.randn(2, LENGTH, HEADS, DIM).bfloat16() for _ in range(2))
    k, v = (torch.randn(2, LENGTH, KV_HEADS, DIM).bfloat16() for _ in range(2))
    acc, lse = torch.zeros(q.shape), torch.zeros(2, HEADS, LENGTH)
    dq, dk, dv = (torch.zeros(x.shape) for x in (q, k, v))
    tiles, pointers = Config(64, 32, 4, 1, True), Config(64, 32, 4, 1, False)
    table, row_sums = torch.rand(1, LENGTH, DIM // 2), torch.zeros(lse.shape)

    def forward_of(score: Score, config: Config = tiles, **options: Any) -> Callable[[], object]:
        return lambda: attention_forward(q, k, v, mask, score, config=config, **options)

    def backward_of(score: Score, config: Config = tiles, **options: Any) -> Callable[[], object]:
        both: dict[str, Any] = {"config": config, "dq_config": config, **options}
        return lambda: attention_backward(dout, q, k, v, lse, row_sums, mask, score, dq, dk, dv, **both)

    plain, features = Score(0.1), Score(0.1, softcap=5.0, alibi_slopes=slopes, sinks=sinks)
    dropped = Score(0.1, dropout_p=0.1, dropout_seed=2**40, head_offset=3)
    tensors = q, k, v, dout, acc, lse, dq, dk, dv, table, row_sums, slopes, sinks, mask.lo, mask.hi, positions
    shapes: dict[str, Callable[[], object]] = {
        "forward": forward_of(plain),
        "carry": forward_of(plain, carry=(acc, lse), last=False),
        "carry, last, sinks, softcap, ALiBi": forward_of(features, carry=(acc, lse)),
        "dropout, a seed of 64 bits, by pointers": forward_of(dropped, pointers),
        "backward, new gradients": backward_of(plain, new_dq=True, new_dkv=True),
        "deterministic": backward_of(plain, deterministic=True),
        "merge": lambda: merge_(acc, lse, q, lse),
        "rotary": lambda: apply_rotary(q, table, table),
        "delta": lambda: delta(q, dout),
    }
    of_hopper, more = hopper_calls()
    return shapes | of_hopper, {x.data_ptr() for x in (*tensors, *more)}


def hopper_calls() -> tuple[dict[str, Callable[[], object]], list[Tensor]]:
    """Calls of the Hopper forward, by name, and their tensors: two variants of the kernel, in several shapes."""
    shapes: dict[str, Callable[[], object]] = {}
    tensors: list[Tensor] = []
    for name, batch, rows, q_len, k_len, heads, kv_heads, carried in (
        ("hopper", 1, 1, 256, 256, 2, 2, False),
        ("hopper, two rows of intervals, other lengths", 2, 2, 300, 70, 4, 4, False),
        ("hopper, strided", 2, 1, 129, 130, 2, 2, False),
        ("hopper, carry, last, sinks", 2, 1, 200, 333, 4, 2, True),
    ):
        apart = 3 if "strided" in name else 1
        q, k, v = (
            torch.randn(batch, n, apart * h, 64).bfloat16()[:, :, ::apart]
            for n, h in ((q_len, heads), (k_len, kv_heads), (k_len, kv_heads))
        )
        lo, positions = torch.zeros(rows, q_len, dtype=torch.int32), torch.arange(max(q_len, k_len), dtype=torch.int32)
        mask = KeyIntervals(lo, lo + k_len, positions[:q_len], positions[:k_len])
        carry = (torch.zeros(q.shape), torch.zeros(batch, heads, q_len)) if carried else None
        score = Score(0.1, sinks=torch.rand(heads)) if carried else Score(0.1)
        shapes[name] = partial(hopper_forward.hopper_forward, q, k, v, mask, score, carry=carry)
        tensors += [q, k, v, mask.lo, mask.hi, *(carry or ()), *([] if score.sinks is None else [score.sinks])]
    return shapes, tensors


def main() -> None:
    library, asked, checked = install(), list[tuple[Any, dict[str, Any]]](), 0
    for kernel in KERNELS:

        def run(*args: Any, _kernel: Any = kernel, _run: Any = kernel.run, **arguments: Any) -> Any:
            asked.append((_kernel, dict(zip(_kernel.arg_names, args, strict=False)) | arguments))
            return _run(*args, **arguments)

        kernel.run = run
    shapes, given_tensors = calls()
    for name, call in shapes.items():
        by_way = []
        for repeated_launches in REPEATED:
            repeated_launches.forget()
        for _ in range(2):
            first = library.launch_count()
            preprocess._remembered.clear()  # whose kernels would not run again
            call()
            by_way.append([library.launch_at(i).contents for i in range(first, library.launch_count())])
        bound, repeated = by_way
        assert len(bound) == len(repeated) and bound, name
        for recorded, again, (kernel, arguments) in zip(bound, repeated, asked, strict=True):
            wanted, values = expected(kernel, arguments), recorded.values()
            assert recorded.block[0] == 32 * ROLES.get(kernel, arguments["num_warps"]), name
            if kernel is hopper_forward.hopper_kernel:
                batch, heads, q_len, _ = arguments["Q"].shape
                assert recorded.grid[:] == [batch * heads * triton.cdiv(q_len, 128), 1, 1], name
            assert len(values) >= len(wanted), (name, len(values), len(wanted))
            for (parameter, value), given in zip(wanted, values, strict=False):
                check(f"{name}: {parameter}", value, given)
            assert not any(any(given) for given in values[len(wanted) :]), name  # scratch memory that nothing uses
            assert (recorded.grid[:], recorded.shared) == (again.grid[:], again.shared), name
            for (parameter, value), one, other in zip(wanted, values, again.values(), strict=False):
                base = value.base if is_descriptor(value) else value
                if not isinstance(base, Tensor) or base.data_ptr() in given_tensors:  # others are made in each call
                    assert one == other, f"{name}: the repeated launch has another {parameter}"
            checked += len(wanted)
        print(f"{name}: {len(bound)} launches")
        asked.clear()
    print(f"{checked} parameters")


if __name__ == "__main__":
    main()
