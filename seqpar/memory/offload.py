"""What a layer keeps from forward to backward, on the device or in pinned host memory.

The host runs far ahead of the GPU, so copies are ordered by streams and events:

* A tensor is copied to the host on a stream of its own, after the kernels queued so far. The copy overlaps the
  following kernels.
* When a layer ends, the stream of the kernels waits for the copies of the layer before, whose device memory is then
  freed. The last layer's tensors are still on the device when backward begins.
* When backward reads the first tensor of a layer, it starts to copy back the tensors of the layer before. These copies
  wait for the kernels queued so far, and overlap the backward of the layer.

So the tensors of two layers are on the device at a time. Device memory is allocated and freed on the stream of the
kernels, which waits for every copy. Pinned memory is freed by PyTorch after the copies that use it.
"""

from __future__ import annotations

from functools import cache
from weakref import ref

import torch
from torch import Tensor

_MIN_BYTES = 1 << 20  # smaller tensors stay on the device


class Kept:
    """The tensors that one call of a layer keeps.

    Args:
        offload: whether tensors on a GPU are copied to the host. Tensors on the CPU are in host memory already.
        before: what the layer before keeps, which backward reads next.
    """

    def __init__(self, offload: bool = False, before: Kept | None = None) -> None:
        self._offload = offload
        self._before = None if before is None else ref(before)
        self._device: dict[int, Tensor] = {}  # by number
        self._host: dict[int, tuple[Tensor, torch.device]] = {}
        self._count = 0
        self._event: torch.cuda.Event | None = None  # after the last copy

    def put(self, x: Tensor) -> int:
        """Keep ``x``, and return the number by which ``get`` finds it."""
        x, number = x.detach(), self._count
        self._count += 1
        self._device[number] = x
        if self._offload and copies_to_host(x):
            stream = _copy_stream(x.device)
            stream.wait_event(torch.cuda.current_stream(x.device).record_event())
            with torch.cuda.stream(stream):
                host = torch.empty_like(x, device="cpu", pin_memory=True)
                host.copy_(x, non_blocking=True)
            self._host[number], self._event = (host, x.device), stream.record_event()
        return number

    def end(self) -> None:
        """Free the device memory of the layer before, whose tensors are copied. Called when the layer has ended."""
        if (before := self._previous()) is not None:
            for number, (_, device) in before._host.items():
                before._wait(device)
                before._device.pop(number, None)

    def get(self, number: int) -> Tensor:
        """Tensor ``number``. The tensors of the layer before are fetched too."""
        self._fetch()
        if number in self._host:
            self._wait(self._host[number][1])
        if (before := self._previous()) is not None:
            before._fetch()
        return self._device[number].detach()

    def _fetch(self) -> None:
        """Start to copy the tensors that are only on the host back to the device."""
        for number in self._host.keys() - self._device.keys():
            host, device = self._host[number]
            x = self._device[number] = torch.empty_like(host, device=device, pin_memory=False)
            stream = _copy_stream(device)
            stream.wait_event(torch.cuda.current_stream(device).record_event())  # its memory may still be read
            with torch.cuda.stream(stream):
                x.copy_(host, non_blocking=True)
            self._event = stream.record_event()

    def _wait(self, device: torch.device) -> None:
        assert self._event is not None
        torch.cuda.current_stream(device).wait_event(self._event)

    def _previous(self) -> Kept | None:
        return None if self._before is None else self._before()


def copies_to_host(x: Tensor) -> bool:
    """Whether ``x`` is copied to the host: a tensor on a GPU that is not small."""
    return x.device.type == "cuda" and x.nbytes >= _MIN_BYTES


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=0)
