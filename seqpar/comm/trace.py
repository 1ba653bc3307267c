"""Counting what a piece of code sends and which backends it uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Trace:
    """What this process did while the trace was open.

    Attributes:
        bytes_sent: payload bytes sent to *other* ranks (the few bytes of control exchanges are not payload).
        messages: payload messages sent to other ranks.
        hops: steps of a ring or gather in which this rank fetched keys, forward and backward.
        backends: calls by backend name, forward and backward.
    """

    bytes_sent: int = 0
    messages: int = 0
    hops: int = 0
    backends: Counter[str] = field(default_factory=Counter)


# Process-wide, not thread-local: autograd runs backward on threads of its own.
_open: list[Trace] = []


@contextmanager
def trace() -> Iterator[Trace]:
    """Count bytes, messages, hops and backends of everything this process runs inside the block.

    >>> with seqpar.trace() as t:
    ...     seqpar.ring_attention(q, k, v).sum().backward()
    >>> t.bytes_sent, t.backends
    """
    record = Trace()
    _open.append(record)
    try:
        yield record
    finally:
        # By identity: two traces that counted the same are equal.
        _open[:] = [t for t in _open if t is not record]


def count_sent(nbytes: int, messages: int = 1) -> None:
    for record in _open:
        record.bytes_sent += nbytes
        record.messages += messages


def count_hop() -> None:
    for record in _open:
        record.hops += 1


def count_backend(name: str) -> None:
    for record in _open:
        record.backends[name] += 1
