"""When each rank computes, transfers messages and waits for messages during one step, from torch's profiler.

On a CPU, a transfer is an operation of gloo, or the time in which a message is written to shared memory. A wait is a
call that waits for either. During the rest of the step, the calling thread computes. On CUDA, the kernels of NCCL are
the transfers, the other kernels are the computation, and the gaps between those are the waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ...comm.host_messages import HostMessages, Receiving

Span = tuple[float, float]  # start and end, in seconds since the start of the step
_WAIT, _SEND, _STEP = "wait for messages", "send a message", "step"


@dataclass(frozen=True)
class Timeline:
    """What one rank does during a step.

    Attributes:
        compute: the spans in which it computes.
        sends: the spans in which messages are transferred.
        waits: the spans in which it waits for messages.
    """

    compute: list[Span]
    sends: list[Span]
    waits: list[Span]


def record(run: Callable[[], object], device: torch.device, chrome: Path | None = None) -> Timeline:
    """Run one step under the profiler.

    Args:
        run: runs the step.
        device: the device of this rank.
        chrome: the file to write a Chrome trace to; None to write none.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with _named_messages(), profile(activities=activities) as profiler, record_function(_STEP):
        run()
    if chrome is not None:
        profiler.export_chrome_trace(str(chrome))
    events: Any = profiler.events()
    return on_cuda(events) if device.type == "cuda" else on_cpu(events)


@contextmanager
def _named_messages() -> Iterator[None]:
    """A block in which waits for messages, and sends through shared memory, appear in the profile."""
    with _named(dist.Work, "wait", _WAIT), _named(Receiving, "wait", _WAIT), _named(HostMessages, "send", _SEND):
        yield


@contextmanager
def _named(owner: Any, method: str, name: str) -> Iterator[None]:
    """A block in which calls of a method of the class ``owner`` appear in the profile as ``name``."""
    original = getattr(owner, method)

    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return original(*args, **kwargs)

    setattr(owner, method, named)
    try:
        yield
    finally:
        setattr(owner, method, original)


def on_cpu(events: Iterable[Any]) -> Timeline:
    """The timeline of a profile's events (``name`` and ``time_range``, in microseconds) on a CPU."""
    events = list(events)
    step = next(e.time_range for e in events if e.name == _STEP)

    def spans(keep: Callable[[str], bool]) -> list[Span]:
        return merged(
            (max(0.0, e.time_range.start - step.start) / 1e6, min(e.time_range.end, step.end) / 1e6 - step.start / 1e6)
            for e in events
            if keep(e.name) and e.time_range.end > step.start
        )

    waits = spans(lambda name: name == _WAIT)
    sends = spans(lambda name: name == _SEND or name.startswith("gloo:"))
    return Timeline(gaps(waits, 0.0, (step.end - step.start) / 1e6), sends, waits)


def on_cuda(events: Iterable[Any]) -> Timeline:
    """The timeline of a profile's events on CUDA devices."""
    kernels = [e for e in events if str(e.device_type).endswith("CUDA") and e.name not in (_STEP, _WAIT)]
    if not kernels:
        return Timeline([], [], [])
    start = min(e.time_range.start for e in kernels)

    def spans(nccl: bool) -> list[Span]:
        chosen = (e for e in kernels if ("nccl" in e.name.lower()) is nccl)
        return merged(((e.time_range.start - start) / 1e6, (e.time_range.end - start) / 1e6) for e in chosen)

    compute, sends = spans(False), spans(True)
    end = max((e.time_range.end - start) / 1e6 for e in kernels)
    return Timeline(compute, sends, gaps(compute, 0.0, end))


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of ``spans``, as sorted spans that do not touch."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def gaps(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The parts of ``start`` to ``end`` that ``spans``, which are disjoint and sorted, do not cover."""
    result = []
    for first, last in spans:
        if first > start:
            result.append((start, first))
        start = max(start, last)
    return [*result, (start, end)] if end > start else result
