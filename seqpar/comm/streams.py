"""The CUDA stream from which keys and values are sent, beside the stream of the attention kernels. None on the CPU.

NCCL starts a transfer after the work that was queued before it on the stream from which it is posted. If the transfer
of a later step's keys were posted from the stream of the kernels, it would wait for every kernel launched so far,
though it needs none of them. So messages are packed, posted and received on a stream of their own, which waits only for

* k and v, when the stream is opened. Backward sends the k and v of forward again, which have been ready since then. Its
  first transfers therefore do not wait for the backward of the following layers.
* the kernels that read a message, before the memory of the message is reused for another one.

[Note: memory of messages] PyTorch's allocator gives the memory of a tensor that was made on this stream to later
tensors of this stream, as soon as the host frees it. The later tensor may then be written while kernels of another
stream still read the first one. ``TransferStream`` therefore holds every message until the kernels that read it have
been launched and this stream waits for them. ``Tensor.record_stream`` would be safe too, but it frees memory only after
the GPU has finished these kernels. The host is far ahead of the GPU, and would allocate the messages of all steps.

Rank 5 of a ring of 8. The first transfers wait for k and v only. The transfer of step 5 waits for the kernel of step 1,
whose memory it reuses:

    kernels      | own kv | step 1 | step 2 | step 3 | step 4 | step 5 |
    transfers    | step 1 | step 2 | step 3 | step 4 | step 5 |
    in memory    | a      | b      | c      | d      | a      |
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class ReadyEvents:
    """The events after which the keys and values of an attention call can be sent, from forward to backward."""

    def __init__(self) -> None:
        # By the addresses of the storages of k and v. Weak references keep the addresses from being reused.
        self._events: dict[tuple[int, ...], tuple[list[StorageWeakRef], torch.cuda.Event]] = {}

    def event(self, *tensors: Tensor) -> torch.cuda.Event:
        """The event after which ``tensors`` can be read: an earlier call's with them, or else a new event.

        Saved tensors that were recomputed or copied back from the host are not the tensors of forward, so they get a
        new event.
        """
        references = [StorageWeakRef(x.untyped_storage()) for x in tensors]
        key = tuple(reference.cdata for reference in references)
        if key not in self._events:
            for old in [k for k, (held, _) in self._events.items() if any(x.expired() for x in held)]:
                del self._events[old]
            self._events[key] = references, _event_now(tensors[0].device)
        return self._events[key][1]


class TransferStream:
    """The stream from which the messages of one loop over remote steps are posted.

    Args:
        tensors: k and v, which are sent.
        ready: the events after which they can be sent.
    """

    def __init__(self, tensors: tuple[Tensor, ...] = (), ready: ReadyEvents | None = None) -> None:
        self._device = tensors[0].device if tensors else None
        self._stream = _side_stream(tensors[0].device) if tensors else None
        self._held: list[Tensor] = []
        if self._stream is not None and ready is not None:
            self._stream.wait_event(ready.event(*tensors))

    def posting(self) -> AbstractContextManager[None]:
        """Within the block, tensors are made and transfers are posted on this stream."""
        return nullcontext() if self._stream is None else self._switched()

    @contextmanager
    def _switched(self) -> Iterator[None]:
        outer, _posting.on = posting_stream(), self
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            _posting.on = outer

    def position(self) -> torch.cuda.Event | None:
        """An event after the work queued on this stream so far."""
        return None if self._stream is None else self._stream.record_event()

    def join(self) -> None:
        """Let the kernels that are launched from now on wait for this stream."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._stream.record_event())

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Hold messages that have arrived, until ``release``."""
        self._held += tensors

    def release(self) -> None:
        """Let later messages reuse the memory of the held ones, after the kernels that read these are launched."""
        if self._held and self._stream is not None:
            self._stream.wait_event(_event_now(self._held[0].device))
        self._held.clear()


_posting = threading.local()


def posting_stream() -> TransferStream | None:
    """The stream from which transfers are posted now; None is the stream of the kernels."""
    stream: TransferStream | None = getattr(_posting, "on", None)
    return stream


def _event_now(device: torch.device) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    # A graph that is being captured must not wait for events from outside of it, so it has no stream of transfers.
    if device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return None
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _stream_of(device: int) -> torch.cuda.Stream:
    """One stream per GPU. Its high priority lets the kernels that pack a message start before waiting kernels."""
    return torch.cuda.Stream(device, priority=-1)
