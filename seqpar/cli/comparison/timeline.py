"""Where the time of one step goes on each rank: computation, messages under way, waiting for them.

torch's profiler records one step. On a CPU, gloo's operations are under way as long as the profiler says, and messages
through shared memory while they are written. Waits are the calls that wait for either. The rest of the calling thread's
time is computation. On CUDA, the kernels of NCCL are the messages, the other kernels are the computation, and a gap
between those is a wait.
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

Span = tuple[float, float]  # seconds since the step began
_WAIT, _SEND, _STEP = "wait for messages", "send a message", "step"


@dataclass(frozen=True)
class Timeline:
    """One rank's step."""

    compute: list[Span]
    sends: list[Span]
    waits: list[Span]


def record(run: Callable[[], object], device: torch.device, chrome: Path | None = None) -> Timeline:
    """Run one step under the profiler, and write its Chrome trace if asked to."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with _named_messages(), profile(activities=activities) as profiler, record_function(_STEP):
        run()
    if chrome is not None:
        profiler.export_chrome_trace(str(chrome))
    events: Any = profiler.events()
    return on_cuda(events) if device.type == "cuda" else on_cpu(events)


@contextmanager
def _named_messages() -> Iterator[None]:
    """Waits for messages appear in the profile, whoever waits, and so does sending them through shared memory."""
    with _named(dist.Work, "wait", _WAIT), _named(Receiving, "wait", _WAIT), _named(HostMessages, "send", _SEND):
        yield


@contextmanager
def _named(owner: Any, method: str, name: str) -> Iterator[None]:
    """Calls of a method of the class ``owner`` appear in the profile."""
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
    """The union of spans, as spans that do not touch, in order."""
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
    """What disjoint spans in order leave of ``start`` to ``end``."""
    result = []
    for first, last in spans:
        if first > start:
            result.append((start, first))
        start = max(start, last)
    return [*result, (start, end)] if end > start else result
