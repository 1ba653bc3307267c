"""Caches for values that are computed from a mask and a sharding and used by every layer.

A training run with packed documents has a new mask and a new length in every step. What is computed for a mask that is
gone would never be used again, so an entry is dropped together with its owner, such as a plan. Entries without an owner
are few: their number is bounded, and not only their bytes, because many small ones are slow for Python's garbage
collector.

What is kept does not depend on the mode in which it was needed first: it is made in ``outside_modes``. Its device and
dtype are said wherever a tensor is made, because PyTorch's default dtype belongs to all threads.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

Value = TypeVar("Value")


@contextmanager
def outside_modes() -> Iterator[None]:
    """In the block, tensors are made as outside of inference mode, gradients, autocast, transforms of torch.func, a
    default device, and modes of ``TorchFunctionMode`` and ``TorchDispatchMode``.

    Only a FakeTensorMode stays, whose tensors have a key of their own (``context_of``).
    """
    fake = _fake_mode()
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch._C._DisableAutocast(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableFuncTorch(),
        _disable_current_modes(),
        nullcontext() if fake is None else fake,
    ):
        yield


class ByteCache(Generic[Value]):
    """The most recently used values, of at most ``limit`` bytes together. Thread-safe.

    A value larger than ``limit`` is not cached.

    Args:
        limit: the bytes.
        nbytes: the bytes of a value.
        entries: the number of values without an owner, at most; by default any.
    """

    def __init__(self, limit: int, nbytes: Callable[[Value], int], entries: int | None = None) -> None:
        self._limit, self._nbytes, self._entries = limit, nbytes, entries
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._owned: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by owner: its keys
        # Autograd runs backward on threads of its own. An owner may be freed while this thread has the lock.
        self._lock = RLock()
        self.total = 0

    def get(self, key: Hashable, make: Callable[[], Value], owner: object = None) -> Value:
        """The value of ``key``, made by ``make()`` in ``outside_modes`` if the cache does not hold it.

        The value is dropped when ``owner`` is freed; so it must not refer to it.
        """
        with self._lock:
            if (found := self._values.get(key)) is not None:
                self._values.move_to_end(key)
                return found[0]
        with outside_modes():
            value = make()
        size = self._nbytes(value)
        if size <= self._limit:
            with self._lock:
                if key not in self._values:
                    self._values[key] = value, size
                    self.total += size
                    if owner is not None:
                        self._keys_of(owner).add(key)
                while self.total > self._limit or len(self._values) > (self._entries or len(self._values)):
                    self.total -= self._values.popitem(last=False)[1][1]
        return value

    def _keys_of(self, owner: object) -> set[Hashable]:
        if owner not in self._owned:
            self._owned[owner] = keys = set[Hashable]()
            weakref.finalize(owner, self._drop, keys).atexit = False
        found: set[Hashable] = self._owned[owner]
        return found

    def _drop(self, keys: set[Hashable]) -> None:
        with self._lock:
            for key in keys & self._values.keys():
                self.total -= self._values.pop(key)[1]

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self.total = 0


def tensor_bytes(value: Any) -> int:
    """The number of bytes of a tensor, of an object with ``nbytes``, or of a tuple of these."""
    return sum(map(tensor_bytes, value)) if isinstance(value, tuple) else value.nbytes


# Index tensors and key intervals, on any device. A new mask of 1 M tokens on 8 ranks takes about 8 MiB.
_tensors: ByteCache[Any] = ByteCache(64 << 20, tensor_bytes)
_without_owner: ByteCache[Any] = ByteCache(64 << 20, tensor_bytes, entries=256)
# A CUDA graph reads tensors by their addresses and does not keep them, so they are kept as long as the process.
_captured: list[Any] = []
_CPU = torch.device("cpu")


def cached_tensors(key: Hashable, device: torch.device, make: Callable[[], Value], owner: object = None) -> Value:
    """A value made of tensors on ``device``: made by ``make()`` if it is not cached. See ``ByteCache.get``."""
    cache = _without_owner if owner is None else _tensors
    value: Value
    if device == _CPU and not _modes():  # it takes long to ask for the device's type, and whether there are streams
        value = cache.get((key, device, 0, None), make, owner)
        return value
    captured = device.type == "cuda" and is_captured()
    value = cache.get((key, *context_of(device)), refuse_capture if captured else make, owner)
    if captured:
        _captured.append(value)
    return value


def is_captured() -> bool:
    """Whether the kernels of this thread's current stream are being captured in a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture() -> Any:
    """Raise a RuntimeError: what has to be made now cannot be made while a CUDA graph is captured."""
    raise RuntimeError(
        "a CUDA graph cannot capture the first attention call with a mask and a sharding, which copies tables to the "
        "GPU; run forward and backward once with them on a stream, and pass this stream to torch.cuda.graph"
    )


def context_of(device: torch.device) -> tuple[Hashable, ...]:
    """The part of a cache key that says where a tensor on ``device`` may be used.

    On a GPU it includes the current stream, because another stream might read the tensor before it is written. Under a
    FakeTensorMode it includes the mode, whose tensors must not be mixed with others.
    """
    stream = 0
    if torch.cuda.is_initialized() and device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    return device, stream, _mode(_FAKE) if _modes() else None


_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def _fake_mode() -> Any:
    return _mode(_FAKE) if _modes() else None


def upload(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``. Copies from the host to a GPU go through pinned memory, so that the host does not wait."""
    if device.type == x.device.type == "cpu":
        return x
    if _fake_mode() is not None:  # a fake tensor has no values
        return torch.empty_like(x, device=device)
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
