"""The CUDA stream from which keys and values are sent, beside the stream of the attention kernels. None on the CPU.

NCCL starts a transfer when the work is done that was queued before on the stream it is posted from. Posted from the
stream of the kernels, the keys of a later step wait for every kernel that has been launched, though they need none of
them. So they are packed, posted and received on a stream of their own, which waits for two things only:

* k and v, when the stream is opened. Backward sends the k and v of forward again, which have been ready for long: its
  first transfers do not wait for the backward of the layers behind.
* the kernels that read a message, before its memory is used for another one.

[Note: memory of messages] A tensor that is made on this stream lives in memory that PyTorch's allocator gives to this
stream alone, in the order of this stream. So it may be written as soon as this stream gets there, whatever the kernels
still do. ``TransferStream`` holds every message until its kernels have been launched and this stream waits for them;
only then may the memory be given to a later message. ``Tensor.record_stream`` would be safe too, but it frees memory
only after the GPU has got there: the host, which is far ahead, would meanwhile allocate the messages of all steps.

Rank 5 of a ring of 8. The first transfers wait for k and v only; that of step 5 for the kernel of step 1, the memory
of which it is given:

    kernels      | own kv | step 1 | step 2 | step 3 | step 4 | step 5 |
    transfers    | step 1 | step 2 | step 3 | step 4 | step 5 |
    in memory    | a      | b      | c      | d      | a      |
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class ReadyEvents:
    """When the keys and values of an attention call were ready: backward sends those of forward without waiting."""

    def __init__(self) -> None:
        # By the storages of k and v. The weak references keep their addresses from being used again.
        self._events: dict[tuple[int, ...], tuple[list[StorageWeakRef], torch.cuda.Event]] = {}

    def event(self, *tensors: Tensor) -> torch.cuda.Event:
        """The event after which ``tensors`` can be read: of an earlier call with them, or a new one, of now.

        Saved tensors that were recomputed, or copied back from the host, are others than those of forward: they are
        ready now.
        """
        references = [StorageWeakRef(x.untyped_storage()) for x in tensors]
        key = tuple(reference.cdata for reference in references)
        if key not in self._events:
            for old in [k for k, (held, _) in self._events.items() if any(x.expired() for x in held)]:
                del self._events[old]
            self._events[key] = references, _event_now(tensors[0].device)
        return self._events[key][1]


class TransferStream:
    """The stream that the messages of one loop over remote keys are posted from.

    Args:
        tensors: what is sent.
        ready: when they were ready.
    """

    def __init__(self, tensors: tuple[Tensor, ...] = (), ready: ReadyEvents | None = None) -> None:
        self._stream = _side_stream(tensors[0].device) if tensors else None
        self._held: list[Tensor] = []
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready.event(*tensors))

    @contextmanager
    def posting(self) -> Iterator[None]:
        """Within the block, tensors are made and transfers are posted on this stream."""
        if self._stream is None:
            yield
            return
        outer, _posting.on = posting_stream(), self
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            _posting.on = outer

    def position(self) -> torch.cuda.Event | None:
        """What this stream has been given so far."""
        return None if self._stream is None else self._stream.record_event()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Hold messages that have arrived, until ``release``."""
        self._held += tensors

    def release(self) -> None:
        """Let later messages use the memory of those that are held. The kernels that read them have been launched."""
        if self._held and self._stream is not None:
            self._stream.wait_event(_event_now(self._held[0].device))
        self._held.clear()


_posting = threading.local()


def posting_stream() -> TransferStream | None:
    """The stream that transfers are being posted from; None is the stream of the kernels."""
    stream: TransferStream | None = getattr(_posting, "on", None)
    return stream


def _event_now(device: torch.device) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    # A graph that is being captured must not wait for events from outside of it. Its transfers wait for the kernels.
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return None
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _stream_of(device: int) -> torch.cuda.Stream:
    """One for each GPU. Of high priority, so that packing a message does not wait until a kernel leaves the GPU."""
    return torch.cuda.Stream(device, priority=-1)
