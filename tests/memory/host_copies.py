"""A stand-in for CUDA, with which tensors on the CPU are offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from seqpar.memory import layers, offload

_real = torch.empty_like


class HostCopies:
    """Counts the copies to the host and back. Copies are synchronous.

    Attributes:
        to_host, to_device: numbers of copies.
    """

    def __init__(self) -> None:
        self.to_host = self.to_device = 0
        self._host: list[tuple[StorageWeakRef, int]] = []

    @property
    def nbytes(self) -> int:
        """The bytes that are on the host now."""
        return sum(nbytes for storage, nbytes in self._host if not storage.expired())

    def _empty_like(self, x: Tensor, *, pin_memory: bool | None = None, **options: Any) -> Tensor:
        y = _real(x, **options)
        if pin_memory is None:
            return y
        if pin_memory:
            self.to_host += 1
            self._host.append((StorageWeakRef(y.untyped_storage()), y.nbytes))
        else:
            self.to_device += 1
        return y

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """In the block, tensors of more than 64 bytes are offloaded."""
        stream = mock.MagicMock()
        with ExitStack() as patches:
            for module in (offload, layers):
                patches.enter_context(mock.patch.object(module, "copies_to_host", lambda x: x.nbytes > 64))
            patches.enter_context(mock.patch.object(offload, "_copy_stream", return_value=stream))
            patches.enter_context(mock.patch.object(torch, "empty_like", self._empty_like))
            cuda = {"current_stream": lambda *_: stream, "stream": mock.MagicMock()}
            patches.enter_context(mock.patch.multiple(torch.cuda, **cuda))
            yield
