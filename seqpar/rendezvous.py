"""Waits for other ranks through the store of torch.distributed, with a timeout and an error that names missing ranks.

The store is the key-value service with which torch.distributed started. It works before the ranks have a process group,
and after a message between them has failed. A round trip takes longer than a message, so it is used only when groups
are made and after failures.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

# Ranks that fail together report within this time of one another.
_GRACE_S = 2.0
# What to do about missing ranks, for error messages.
ADVICE = (
    "look for an earlier error on other ranks (in their input, mask, mesh or group), or for a call that only some "
    "ranks make"
)


class Meeting(NamedTuple):
    """What ``meet`` returns.

    Attributes:
        key: a key of the store that no other meeting has; the same on every rank.
        values: each rank's value, by rank.
    """

    key: str
    values: list[str]


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


def meet(purpose: str, ranks: Sequence[int], value: str, timeout: timedelta) -> Meeting:
    """Wait until all ``ranks`` have called this function for ``purpose``, and return the value of each.

    Each rank sends one value to the store and reads one list from it, whatever the number of ranks.

    Args:
        purpose: a name for the meeting. All ranks must call this function equally often for each purpose.
        ranks: the global ranks that meet, the same on each of them.
        value: this rank's value.
        timeout: how long a rank waits for the others.

    Raises:
        RuntimeError: some ranks did not call this function before the timeout. The message names them.
    """
    index, size = ranks.index(dist.get_rank()), len(ranks)
    if size == 1 or is_simulated():
        return Meeting(purpose, [value] * size)
    store = _get_default_store()
    counter = _key(purpose, ranks)
    # The store counts the calls. No rank calls again before all ranks have called, so that each ``size`` consecutive
    # calls belong to one meeting.
    key = f"{counter}/{(store.add(counter, 1) - 1) // size}"
    store.set(f"{key}/{index}", value)
    entries = [f"{key}/{i}" for i in range(size)]
    try:
        if index == 0:
            store.wait(entries, timeout)
            store.set(f"{key}/all", json.dumps([store.get(entry).decode() for entry in entries]))
        else:  # wait longer than rank 0, so that all ranks report rank 0's list of missing ranks
            store.wait([f"{key}/all"], timeout + timedelta(seconds=_GRACE_S))
        values: list[str] | None = json.loads(store.get(f"{key}/all"))
    except RuntimeError as error:  # DistStoreError
        missing = [i for i, entry in enumerate(entries) if not store.check([entry])]
        if index == 0:
            store.add(counter, len(missing))  # count the missing ranks too, so that the next call is of a new meeting
            store.set(f"{key}/all", "null")
        raise RuntimeError(missing_message(missing, purpose, timeout)) from error
    if values is None:
        missing = [i for i, entry in enumerate(entries) if not store.check([entry])]
        raise RuntimeError(missing_message(missing, purpose, timeout))
    return Meeting(key, values)


class Watch:
    """Finds the ranks that did not start an operation, if the operation takes too long or fails.

    Args:
        purpose: a name for the kind of operation.
        ranks: the global ranks that take part.
        number: the number of the operation among those with the same ``purpose``, the same on every rank.
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
    return (
        f"{purpose}: rank(s) {list(missing)} of the group did not arrive within {timeout.total_seconds():.0f} s; "
        f"{ADVICE}"
    )


def _key(purpose: str, ranks: Sequence[int]) -> str:
    digest = hashlib.sha1(repr(tuple(ranks)).encode(), usedforsecurity=False).hexdigest()
    return f"seqpar/{purpose}/{digest}"
