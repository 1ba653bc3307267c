"""Counts the bytes that a block of code sends, and the backends that it uses."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..ranks.mesh import Ranks, global_ranks, parent_group, ranks_on_other_hosts, shown

_log = logging.getLogger("seqpar")


@dataclass
class Trace:
    """What this process did while the trace was open.

    Attributes:
        bytes_sent: payload bytes sent to *other* ranks. The few bytes of handshakes are not payload.
        bytes_between_hosts: the part of ``bytes_sent`` that went to ranks on other hosts. Which ranks share a host is
            known after ``init_mesh``, or after the first attention of a group. Before that, none are counted.
        messages: payload messages sent to other ranks.
        steps: steps of a ring or an all-gather in which this rank received keys, forward and backward.
        backends: for each backend, the number of calls that used it, forward and backward.
        transports: what carried attention's messages: "shared memory", or the backend of a process group, such as
            "gloo" or "nccl". Collectives in the caller's own group, such as ``unshard``, are not among them.
        chosen: the choices that seqpar made, with the number of calls: with ``strategy="auto"`` the strategy, with
            "context_parallel" without ``comm`` "all_gather" or "p2p".
    """

    bytes_sent: int = 0
    bytes_between_hosts: int = 0
    messages: int = 0
    steps: int = 0
    backends: Counter[str] = field(default_factory=Counter)
    transports: set[str] = field(default_factory=set)
    chosen: Counter[str] = field(default_factory=Counter)


# Process-wide, not thread-local: autograd runs backward on threads of its own.
open_traces: list[Trace] = []


@contextmanager
def trace() -> Iterator[Trace]:
    """Count the bytes, messages, steps and backends of everything that this process runs inside the block.

    Examples:
        >>> with seqpar.trace() as t:
        ...     seqpar.ring_attention(q, k, v).sum().backward()
        >>> t.bytes_sent, t.backends
    """
    record = Trace()
    open_traces.append(record)
    try:
        yield record
    finally:
        # By identity: two traces that counted the same are equal.
        open_traces[:] = [t for t in open_traces if t is not record]


def count_sent(nbytes: int, ranks: Ranks, peer: int | None = None, messages: int = 1) -> None:
    """Count ``nbytes`` of payload that this rank sends to ``peer``, or in equal shares to all other ranks."""
    if not open_traces:
        return
    peers = [i for i in range(ranks.size()) if i != ranks.rank()] if peer is None else [peer]
    elsewhere = ranks_on_other_hosts(ranks)
    between_hosts = nbytes * sum(i in elsewhere for i in peers) // len(peers)
    for record in open_traces:
        record.bytes_sent += nbytes
        record.bytes_between_hosts += between_hosts
        record.messages += messages


def count_step() -> None:
    """Count a step in which this rank receives keys."""
    for record in open_traces:
        record.steps += 1


def count_choice(name: str) -> None:
    """Count a call for which seqpar chose ``name``."""
    for record in open_traces:
        record.chosen[name] += 1


def count_backend(name: str) -> None:
    """Count a call of a backend."""
    for record in open_traces:
        record.backends[name] += 1


def say_transport(ranks: Ranks, shared: bool, wanted: bool, device: torch.device) -> None:
    """Log, on the first of ``ranks``, what carries attention's messages between them, of tensors on ``device``.

    It is a warning if the ranks share a host, as far as is known, and cannot share memory: gloo is slower.
    """
    if ranks.rank():
        return
    backend = parent_group(ranks)._get_backend(device).name()
    expected = shared or not wanted or backend != "gloo" or bool(ranks_on_other_hosts(ranks))
    carrier = "through shared memory" if shared else f"by {backend}"
    if not expected:
        carrier += (
            ", which is slower than shared memory: some ranks are in other containers or on other hosts, or have no "
            "free file descriptor, or have SEQPAR_SHARED_MEMORY=off"
        )
    say = _log.info if expected else _log.warning
    say("attention's messages between the ranks %s are sent %s", shown(global_ranks(ranks)), carrier)
