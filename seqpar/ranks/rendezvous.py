"""Waits for other ranks through the store of torch.distributed, and errors of waits that name the missing ranks.

The store is the key-value service with which torch.distributed started. It works before the ranks have a process group,
and after a message between them has failed. A round trip takes longer than a message, so it is used only when groups
are made, in long waits and after failures.

[Note: missing ranks] If one rank ends, the ranks that exchange messages with it fail, and end in turn. The ranks that
wait for these fail next. Each rank must name the first one. So each rank has an entry in the store:

* A rank that has waited for a second writes what it waits in. It removes the entry as soon as it goes on.
* A rank whose wait has failed writes it too. It then reads the entries of the ranks that it waits for. Those without an
  entry after a grace period are missing: they have ended, or do something else. It adds them to its entry.
* A rank that leaves a call by an error of its own, or because it has been told which rank did, writes this rank.
* A rank that reads an entry with missing ranks names the same ranks, because they are the reason.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_store

from .processes import check_own_process

# Ranks that fail together report within this time of one another.
_GRACE_S = 2.0
# A rank that has waited for this long writes an entry.
LONG_WAIT = timedelta(seconds=1)
# How long a rank whose peer has closed their connection waits for the entry that the peer wrote before.
_CLOSED_GRACE_S = 1.0
_ENTRY = "seqpar/waits/{}"  # the key of a rank's entry, which is null when it goes on
_Entry = tuple[str, list[int]]  # the operation, and the ranks that this rank has found missing
# How often a rank looks whether rank 0 has begun another round, at first and at most. Later waits are longer, so that a
# thousand ranks do not keep the store busy.
_FIRST_POLL_S, _POLL_S, _LONGEST_POLL_S = 0.001, 0.01, 0.5
# What to do about missing ranks, for error messages.
ADVICE = (
    "look for an earlier error on other ranks (in their input, mask, mesh or group), or for a call that only some "
    "ranks make"
)


class OutOfStepError(RuntimeError):
    """The ranks of a group are in different calls, or one of them has left the call."""


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


def store_all_gather(purpose: str, ranks: Sequence[int], value: str, timeout: timedelta, group: str = "") -> list[str]:
    """All-gather ``value`` through the store. Each rank writes one value and reads one list.

    Args:
        purpose: a name for the exchange. All ranks must call this function equally often for each purpose.
        ranks: the global ranks that take part, the same on each of them.
        value: this rank's value.
        timeout: how long a rank waits for the others.
        group: the name of the process group for which they communicate. Two threads may do so for two groups.

    Raises:
        RuntimeError: some ranks did not call this function before the timeout, and the message names them; or this
            process was forked from a rank.
    """
    index, size = ranks.index(dist.get_rank()), len(ranks)
    if size == 1 or is_simulated():
        return [value] * size
    check_own_process(purpose)
    values = _all_gather(_get_default_store(), purpose, ranks, index, value, timeout, group)
    own_entry.remove()
    return values


def fresh_prefix(store: dist.Store, rank: int, world: int, timeout: timedelta) -> str:
    """A prefix for the keys of a new default group, which all ranks call this for. No entry in the store has it.

    torchrun may start the ranks again with the same store. A process group of PyTorch would then use entries of ranks
    that have ended, and try to connect to them.

    Raises:
        RuntimeError: some ranks did not call this function before the timeout. The message names them.
    """
    return _all_gather(store, "the start of the process group", range(world), rank, uuid.uuid4().hex, timeout)[0]


def _all_gather(
    store: dist.Store,
    purpose: str,
    ranks: Sequence[int],
    index: int,
    value: str,
    timeout: timedelta,
    group: str = "",
) -> list[str]:
    """``store_all_gather`` on the rank ``ranks[index]``."""
    key, began = _key(purpose, group, ranks), time.monotonic()
    try:
        entries = (_join if index else _gather)(store, key, value, index or len(ranks), purpose, timeout)
        if missing := [ranks[i] for i, entry in enumerate(entries) if entry is None]:
            own_entry.write(purpose, missing)
    except dist.DistError as error:
        raise RuntimeError(missing_message(None, purpose, time.monotonic() - began)) from error
    if missing:
        raise RuntimeError(missing_message(missing, purpose, time.monotonic() - began))
    return [entry for entry in entries if entry is not None]


def _wait(store: dist.Store, keys: list[str], purpose: str, seconds: float) -> None:
    """Wait for the keys. TimeoutError: they were not set in time.

    It asks again and again: while ``store.wait`` waits, no other thread of this process can use the store, and if it
    waits in vain, torch prints lines that read like a failure.
    """
    began, poll, told = time.monotonic(), _FIRST_POLL_S, False
    while not store.check(keys):
        waited = time.monotonic() - began
        if waited > LONG_WAIT.total_seconds():
            if not told:
                own_entry.write(purpose)
                told = True
            if waits_in_vain.get()(purpose):
                raise TimeoutError
        if waited > seconds:
            raise TimeoutError
        time.sleep(min(poll, _LONGEST_POLL_S, max(seconds - waited, 0.0)))
        poll *= 1.5


# During a call: whether a wait in an operation, which is named, would never end (``Calls.waits_in_vain``).
waits_in_vain: ContextVar[Callable[[str], bool]] = ContextVar("waits_in_vain", default=lambda _: False)


# After a failure, torchrun may start the ranks again with the same store. The store then still has the entries of ranks
# that have ended, some of them while they waited. Rank 0 therefore begins a round under a new key, and the other ranks
# write their entries under this key. A rank takes part in a round only if rank 0's list has its entry.


def _gather(store: dist.Store, key: str, value: str, size: int, purpose: str, timeout: timedelta) -> list[str | None]:
    """On rank 0: the value of each rank, None for a rank that did not arrive in time."""
    before = store.get(key).decode() if store.check([key]) else ""
    current = f"{key}/{uuid.uuid4().hex}"
    store.set(key, current)
    if before and not store.check([f"{before}/all"]):
        store.set(f"{before}/all", "[]")  # ranks that wait in the last round join this one
    keys = [f"{current}/{i}" for i in range(1, size)]
    with suppress(TimeoutError):
        _wait(store, keys, purpose, timeout.total_seconds())
    written = keys if store.check(keys) else [k for k in keys if store.check([k])]
    values = dict(zip(written, map(json.loads, store.multi_get(written)), strict=True)) if written else {}
    entries: list[Any] = [["", value], *map(values.get, keys)]
    store.set(f"{current}/all", json.dumps(entries))
    return [entry and entry[1] for entry in entries]


def _join(store: dist.Store, key: str, value: str, index: int, purpose: str, timeout: timedelta) -> list[str | None]:
    """On the other ranks: the list that ``_gather`` returns. ``[None]`` if rank 0 did not arrive in time."""
    # Wait longer than rank 0, so that all ranks report rank 0's list of missing ranks.
    end = time.monotonic() + timeout.total_seconds() + _GRACE_S
    mine, before, poll = [uuid.uuid4().hex, value], "", _POLL_S
    with suppress(TimeoutError):
        while (seconds := end - time.monotonic()) > 0:
            _wait(store, [key], purpose, seconds)
            current = store.get(key).decode()
            if current == before:  # an earlier round: rank 0 has not arrived yet
                if waits_in_vain.get()(purpose):
                    break
                time.sleep(poll)
                poll = min(2 * poll, _LONGEST_POLL_S)
                continue
            store.set(f"{current}/{index}", json.dumps(mine))
            _wait(store, [f"{current}/all"], purpose, end - time.monotonic())
            entries = json.loads(store.get(f"{current}/all"))
            if len(entries) > index and entries[index] == mine:
                return [entry and entry[1] for entry in entries]
            before = current
    return [None]


class OwnEntry:
    """This rank's entry in the store.

    Attributes:
        written: whether there may be one. At first, a process that has ended may have left it.
    """

    def __init__(self) -> None:
        self.written = True

    def write(self, operation: str, missing: Sequence[int] = ()) -> None:
        """Write that this rank waits in ``operation``, and the ranks for which it has waited in vain.

        Before the default group has started, nobody reads the entry, and none is written.
        """
        if dist.is_initialized() and not is_simulated():
            self.written = True
            _get_default_store().set(_ENTRY.format(dist.get_rank()), json.dumps([operation, [*missing]]))

    def remove(self) -> None:
        """Remove the entry, because this rank goes on. Call it if it is ``written``."""
        self.written = False
        if dist.is_initialized() and not is_simulated():
            with suppress(RuntimeError):
                _get_default_store().set(_ENTRY.format(dist.get_rank()), "null")


own_entry = OwnEntry()


def failed_wait(operation: str, ranks: Sequence[int], seconds: float, closed: bool = False) -> str:
    """The message of the error of a wait that has failed.

    Args:
        operation: what this rank waited in.
        ranks: the global ranks for which it waited.
        seconds: how long it waited.
        closed: whether one of ``ranks`` is known to have closed the connection.
    """
    found: list[tuple[dict[int, _Entry], list[int]]] = []

    def ask() -> None:
        with suppress(RuntimeError):  # DistNetworkError
            own_entry.write(operation)
            entries, missing = _find_missing([rank for rank in ranks if rank != dist.get_rank()], closed)
            own_entry.write(operation, missing)
            found.append((entries, missing))

    # In a thread, because a store whose host has stopped never answers.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(3 * _GRACE_S)
    if not found:
        return missing_message(None, operation, seconds)
    if dist.get_rank() == 0:
        time.sleep(_GRACE_S)  # rank 0 may host the store, which the other ranks still read
    entries, missing = found[0]
    elsewhere = {rank: what for rank, (what, _) in entries.items() if what != operation}
    return missing_message(missing, operation, seconds, elsewhere)


def _find_missing(ranks: Sequence[int], closed: bool) -> tuple[dict[int, _Entry], list[int]]:
    """The entries of ``ranks``, and the ranks that are missing (see the note above)."""
    store, began = _get_default_store(), time.monotonic()
    while True:
        waited, entries = time.monotonic() - began, _entries(store, ranks)
        absent = [rank for rank in ranks if rank not in entries]
        named = {rank for _, missing in entries.values() for rank in missing} - {dist.get_rank()}
        # Ranks that have an entry may still look for the ranks that they miss.
        grace = 2 * _GRACE_S if not absent else _CLOSED_GRACE_S if closed else _GRACE_S
        if named or waited > grace:
            return entries, sorted(named or absent)
        time.sleep(0.05 + len(ranks) / 1000)  # a thousand ranks must not keep the store busy


def _entries(store: dist.Store, ranks: Sequence[int]) -> dict[int, _Entry]:
    keys = [_ENTRY.format(rank) for rank in ranks]
    if not ranks or store.check(keys):  # to get a key that has never been set would block
        values = map(json.loads, store.multi_get(keys) if keys else ())
        return {rank: entry for rank, entry in zip(ranks, values, strict=True) if entry is not None}
    half = len(ranks) // 2
    return {**_entries(store, ranks[:half]), **_entries(store, ranks[half:])} if half else {}


def missing_message(
    missing: Sequence[int] | None, operation: str, seconds: float, elsewhere: Mapping[int, str] | None = None
) -> str:
    """The message of the error that the waiting ranks raise.

    Args:
        missing: the global ranks that are missing; None if the store cannot be asked.
        operation: what this rank waited in.
        seconds: how long it waited.
        elsewhere: the ranks that wait in another operation, and in which one.
    """
    after = f"after {seconds:.1f} s"
    if missing is None:
        return (
            f"{operation}: failed {after}. Which ranks are missing is not known, because the store of "
            "torch.distributed does not answer: the process that hosts it has ended or hangs, which is rank 0 unless "
            f"torchrun hosts it; {ADVICE}"
        )
    if missing:
        return f"{operation}: rank(s) {[*missing]} of the job did not arrive, or have ended, {after}; {ADVICE}"
    if elsewhere:
        where = ", ".join(f"rank {rank} in {what}" for rank, what in elsewhere.items())
        return (
            f"{operation}: other ranks wait elsewhere ({where}), {after}; make the same calls on all ranks: skip no "
            "layer at random, and set SEQPAR_CHECK on every rank or on none"
        )
    return (
        f"{operation}: all ranks arrived, but it did not end, {after}; one of them called another collective of this "
        f"group before it that the others did not call; {ADVICE}"
    )


def _key(purpose: str, group: str, ranks: Sequence[int]) -> str:
    digest = hashlib.sha1(repr((group, *ranks)).encode(), usedforsecurity=False).hexdigest()
    return f"seqpar/{purpose}/{digest}"
