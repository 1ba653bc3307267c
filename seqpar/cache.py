"""A cache bounded in bytes, for values that are computed from a mask and a sharding and used by every layer.

A training run with packed documents has a new mask in every step. A cache that counts entries would keep the tensors of
hundreds of past masks. This cache keeps the most recently used values up to a number of bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value")


class ByteCache(Generic[Value]):
    """The most recently used values, of at most ``limit`` bytes together. Thread-safe.

    A value larger than ``limit`` is not cached.
    """

    def __init__(self, limit: int, nbytes: Callable[[Value], int]) -> None:
        self._limit = limit
        self._nbytes = nbytes
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()  # autograd runs backward on threads of its own
        self.total = 0

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made by ``make()`` if the cache does not hold it."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()
        size = self._nbytes(value)
        if size <= self._limit:
            with self._lock:
                if key not in self._values:
                    self._values[key] = value, size
                    self.total += size
                while self.total > self._limit:
                    self.total -= self._values.popitem(last=False)[1][1]
        return value

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.total = 0


def tensor_bytes(value: Any) -> int:
    """The number of bytes of a tensor, of an object with ``nbytes``, or of a tuple of these."""
    return sum(map(tensor_bytes, value)) if isinstance(value, tuple) else value.nbytes


# Index tensors and key intervals, on any device. A new mask of 1 M tokens on 8 ranks takes about 8 MiB.
_tensors: ByteCache[Any] = ByteCache(64 << 20, tensor_bytes)


def cached_tensors(key: Hashable, device: torch.device, make: Callable[[], Value]) -> Value:
    """A value made of tensors on ``device``: made by ``make()`` if it is not cached."""
    value: Value = _tensors.get((key, *context_of(device)), make)
    return value


def context_of(device: torch.device) -> tuple[Hashable, ...]:
    """The part of a cache key that says where a tensor on ``device`` may be used.

    On a GPU it includes the current stream, because another stream might read the tensor before it is written. Under a
    FakeTensorMode it includes the mode, whose tensors must not be mixed with others.
    """
    stream = 0
    if device.type == "cuda" and torch.cuda.is_initialized():
        stream = torch.cuda.current_stream(device).cuda_stream
    return device, stream, torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def upload(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``. Copies from the host to a GPU go through pinned memory, so that the host does not wait."""
    if device.type == x.device.type == "cpu":
        return x
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # a fake tensor has no values
        return torch.empty_like(x, device=device)
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
