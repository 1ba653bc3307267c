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
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

# Ranks that fail together report within this time of one another.
_GRACE_S = 2.0
# How long a rank waits until it looks whether a new meeting has begun, at first and at most. Later waits are longer, so
# that a thousand ranks do not keep the store busy.
_POLL_S, _LONGEST_POLL_S = 0.01, 0.5
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
    store, key, nonce = _get_default_store(), _key(purpose, ranks), uuid.uuid4().hex
    own = json.dumps([nonce, value])
    entries = _gather(store, key, own, size, timeout) if index == 0 else _join(store, key, own, index, timeout)
    if missing := [i for i, entry in enumerate(entries) if entry is None]:
        raise RuntimeError(missing_message(missing, purpose, timeout))
    nonces, values = zip(*map(json.loads, filter(None, entries)), strict=True)
    return Meeting(f"{key}/{nonces[0]}", list(values))


# After a failure, torchrun may start the ranks again with the same store. The store then still has the entries of ranks
# that have ended, some of them in the middle of a meeting. Rank 0 therefore gives each meeting a new key, and the other
# ranks write their entries under this key. A rank takes part in a meeting only if rank 0's list has its entry.


def _gather(store: dist.Store, key: str, own: str, size: int, timeout: timedelta) -> list[str | None]:
    """On rank 0, the entry of each rank, None for a rank that did not arrive in time."""
    last = store.get(key).decode() if store.check([key]) else ""
    meeting = f"{key}/{json.loads(own)[0]}"
    store.set(key, meeting)
    if last and not store.check([f"{last}/all"]):
        store.set(f"{last}/all", "[]")  # ranks that wait in the last meeting join this one
    others = [f"{meeting}/{i}" for i in range(1, size)]
    with suppress(RuntimeError):  # DistStoreError
        store.wait(others, timeout)
    entries = [own, *(store.get(other).decode() if store.check([other]) else None for other in others)]
    store.set(f"{meeting}/all", json.dumps(entries))
    return entries


def _join(store: dist.Store, key: str, own: str, index: int, timeout: timedelta) -> list[str | None]:
    """On the other ranks, the list that ``_gather`` returns on rank 0. ``[None]`` if rank 0 did not arrive in time."""
    # Wait longer than rank 0, so that all ranks report rank 0's list of missing ranks.
    end = time.monotonic() + timeout.total_seconds() + _GRACE_S
    last, poll = "", _POLL_S
    while (left := end - time.monotonic()) > 0:
        try:
            store.wait([key], timedelta(seconds=left))
            meeting = store.get(key).decode()
            if meeting == last:  # an earlier meeting: rank 0 has not arrived yet
                time.sleep(poll)
                poll = min(2 * poll, _LONGEST_POLL_S)
                continue
            store.set(f"{meeting}/{index}", own)
            store.wait([f"{meeting}/all"], timedelta(seconds=max(end - time.monotonic(), _POLL_S)))
        except RuntimeError:  # DistStoreError
            break
        entries: list[str | None] = json.loads(store.get(f"{meeting}/all"))
        if len(entries) > index and entries[index] == own:
            return entries
        last = meeting
    return [None]


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
    if not missing:
        return (
            f"{purpose}: all ranks of the group arrived, but it did not end within {timeout.total_seconds():.0f} s; "
            f"one of them called another collective of this group before it that the others did not call; {ADVICE}"
        )
    return (
        f"{purpose}: rank(s) {list(missing)} of the group did not arrive within {timeout.total_seconds():.0f} s; "
        f"{ADVICE}"
    )


def _key(purpose: str, ranks: Sequence[int]) -> str:
    digest = hashlib.sha1(repr(tuple(ranks)).encode(), usedforsecurity=False).hexdigest()
    return f"seqpar/{purpose}/{digest}"
