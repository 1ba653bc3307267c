"""Waits for other ranks through the store of torch.distributed, with a timeout and an error that names missing ranks.

The store is the key-value service with which torch.distributed started. It works before the ranks have a process group,
and after a message between them has failed. A round trip takes longer than a message, so it is used only when groups
are made and after failures.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

# Ranks that fail together report within this time of one another.
_GRACE_S = 2.0
# How often a rank looks whether rank 0 has begun another round, at first and at most. Later waits are longer, so that a
# thousand ranks do not keep the store busy.
_POLL_S, _LONGEST_POLL_S = 0.01, 0.5
# What to do about missing ranks, for error messages.
ADVICE = (
    "look for an earlier error on other ranks (in their input, mask, mesh or group), or for a call that only some "
    "ranks make"
)


def is_simulated() -> bool:
    """Whether the default group has the "fake" backend: a single process acts as one of the ranks."""
    return str(dist.get_backend()) == "fake"


def group_timeout(group: ProcessGroup) -> timedelta:
    """How long an operation of ``group`` may take before its backend gives up."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(timeout := getattr(options, "_timeout", None), timedelta):
            return timeout
    return dist.distributed_c10d.default_pg_timeout


def store_all_gather(purpose: str, ranks: Sequence[int], value: str, timeout: timedelta) -> list[str]:
    """All-gather ``value`` through the store. Each rank writes one value and reads one list.

    Args:
        purpose: a name for the exchange. All ranks must call this function equally often for each purpose.
        ranks: the global ranks that take part, the same on each of them.
        value: this rank's value.
        timeout: how long a rank waits for the others.

    Raises:
        RuntimeError: some ranks did not call this function before the timeout. The message names them.
    """
    index, size = ranks.index(dist.get_rank()), len(ranks)
    if size == 1 or is_simulated():
        return [value] * size
    store, key = _get_default_store(), _key(purpose, ranks)
    entries = _join(store, key, value, index, timeout) if index else _gather(store, key, value, size, timeout)
    if missing := [i for i, entry in enumerate(entries) if entry is None]:
        raise RuntimeError(missing_message(missing, purpose, timeout))
    return [entry for entry in entries if entry is not None]


# After a failure, torchrun may start the ranks again with the same store. The store then still has the entries of ranks
# that have ended, some of them while they waited. Rank 0 therefore begins a round under a new key, and the other ranks
# write their entries under this key. A rank takes part in a round only if rank 0's list has its entry.


def _gather(store: dist.Store, key: str, value: str, size: int, timeout: timedelta) -> list[str | None]:
    """On rank 0: the value of each rank, None for a rank that did not arrive in time."""
    before = store.get(key).decode() if store.check([key]) else ""
    current = f"{key}/{uuid.uuid4().hex}"
    store.set(key, current)
    if before and not store.check([f"{before}/all"]):
        store.set(f"{before}/all", "[]")  # ranks that wait in the last round join this one
    keys = [f"{current}/{i}" for i in range(1, size)]
    with suppress(RuntimeError):  # DistStoreError
        store.wait(keys, timeout)
    written = keys if store.check(keys) else [k for k in keys if store.check([k])]
    values = dict(zip(written, map(json.loads, store.multi_get(written)), strict=True)) if written else {}
    entries: list[Any] = [["", value], *map(values.get, keys)]
    store.set(f"{current}/all", json.dumps(entries))
    return [entry and entry[1] for entry in entries]


def _join(store: dist.Store, key: str, value: str, index: int, timeout: timedelta) -> list[str | None]:
    """On the other ranks: the list that ``_gather`` returns. ``[None]`` if rank 0 did not arrive in time."""
    # Wait longer than rank 0, so that all ranks report rank 0's list of missing ranks.
    end = time.monotonic() + timeout.total_seconds() + _GRACE_S
    mine, before, poll = [uuid.uuid4().hex, value], "", _POLL_S
    with suppress(RuntimeError):  # DistStoreError
        while (seconds := end - time.monotonic()) > 0:
            store.wait([key], timedelta(seconds=seconds))
            current = store.get(key).decode()
            if current == before:  # an earlier round: rank 0 has not arrived yet
                time.sleep(poll)
                poll = min(2 * poll, _LONGEST_POLL_S)
                continue
            store.set(f"{current}/{index}", json.dumps(mine))
            store.wait([f"{current}/all"], timedelta(seconds=max(end - time.monotonic(), _POLL_S)))
            entries = json.loads(store.get(f"{current}/all"))
            if len(entries) > index and entries[index] == mine:
                return [entry and entry[1] for entry in entries]
            before = current
    return [None]


class ArrivalLog:
    """Finds the ranks that did not start an operation, if the operation takes too long or fails.

    Args:
        purpose: a name for the type of operation.
        ranks: the global ranks that take part.
        number: the number of the operation among the operations with this ``purpose``, the same on every rank.
    """

    def __init__(self, purpose: str, ranks: Sequence[int], number: int) -> None:
        self._keys = [f"{_key(purpose, ranks)}/{number}/{index}" for index in range(len(ranks))]
        self._index = ranks.index(dist.get_rank())

    def report(self) -> None:
        """Report that this rank has started the operation. A rank calls this when its wait is longer than usual."""
        if not is_simulated():
            _get_default_store().set(self._keys[self._index], "waits")

    def missing(self) -> list[int]:
        """The ranks that have not started the operation. A rank calls this after the operation has failed."""
        if is_simulated():
            return []
        self.report()
        store, end = _get_default_store(), time.monotonic() + _GRACE_S
        while missing := [i for i, key in enumerate(self._keys) if not store.check([key])]:
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        return missing


def missing_message(missing: Sequence[int], purpose: str, timeout: timedelta) -> str:
    """The message of the error that the waiting ranks raise."""
    seconds = f"within {timeout.total_seconds():.0f} s"
    if missing:
        return f"{purpose}: rank(s) {list(missing)} of the group did not arrive {seconds}; {ADVICE}"
    return (
        f"{purpose}: all ranks of the group arrived, but it did not end {seconds}; one of them called another "
        f"collective of this group before it that the others did not call; {ADVICE}"
    )


def _key(purpose: str, ranks: Sequence[int]) -> str:
    digest = hashlib.sha1(repr(tuple(ranks)).encode(), usedforsecurity=False).hexdigest()
    return f"seqpar/{purpose}/{digest}"
