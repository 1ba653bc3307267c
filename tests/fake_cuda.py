"""Fake CUDA tensors on a machine whose PyTorch has no CUDA.

In a ``FakeTensorMode`` a tensor on "cuda" has a shape but no values. Most operators work. Indexing, however, needs the
device guard of CUDA, which a CPU build of PyTorch does not have. The device guard of "meta", which does nothing, is
used instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_CUDA, _META, _DEVICE_TYPES = 1, 14, 20  # c10::DeviceType
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"


class _FakeTensorMode(FakeTensorMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 would take the dtype for addmm's factor beta
            return kwargs["out"]
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """In the block, a FakeTensorMode in which tensors on "cuda" can be used, except in autograd's backward."""
    if torch.cuda.is_available():
        # A test may only say so. The first fake tensor would make a real one, in torch 2.11.
        with mock.patch("torch._subclasses.fake_tensor.init_gpu_context"), _FakeTensorMode():
            yield
        return
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(library, _REGISTRY)
    except (OSError, ValueError) as error:
        pytest.skip(f"this build of PyTorch has no table of device guards: {error}")
    before = guards[_CUDA]
    guards[_CUDA] = guards[_META]
    try:
        with _FakeTensorMode():
            yield
    finally:
        guards[_CUDA] = before
