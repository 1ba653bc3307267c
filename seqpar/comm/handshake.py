"""The handshake before a payload is sent: the ranks exchange descriptions of their inputs, and raise if these disagree.

Each rank checks its own input and describes it by a header, a NamedTuple of integers, fingerprints and dtypes. One
all-gather of 128 bytes per rank sends every header to every rank. A rank whose check raises sends a header that says
so, and does not wait. The other ranks then raise too, instead of waiting for its payload. If a rank does not arrive
within the group's timeout, the others raise an error that names it.

If the group can send tensors on the CPU (gloo), the GPU is not used. If it cannot (NCCL alone), the headers are sent on
a CUDA stream and in a communicator of their own. The host then waits for the headers, but not for the computation and
the messages that the GPU has queued.

Each call without the length of the sequence has a handshake. A rank cannot skip it when its own header is the same as
in the last call: another rank's header may have changed, and that rank would wait for the handshake. Only a value that
all ranks know beforehand, such as the length of the full sequence, can replace it.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from ..base.checks import DTYPES, check_alike
from ..masks.mask import Mask
from ..ranks.calls import calls_of, check_tag, current, current_tag
from ..ranks.in_process import RankInProcess
from ..ranks.mesh import Ranks, global_ranks, parent_group
from ..ranks.processes import check_own_process
from ..ranks.rendezvous import LONG_WAIT, group_timeout, own_entry, waits_in_vain
from .collectives import all_gather_single
from .communicator import communicator
from .in_process import all_gather_in_process
from .waiting import call, waiting

Header = TypeVar("Header", bound=tuple[Any, ...])  # a NamedTuple of int, bool, Fingerprint and torch.dtype

_WIDTH = 16  # int64 words sent by each rank: a status, the number of the call, the header's type, its fields
_OK, _FAILED = 0, 1
# All-gathers that a failing rank started and did not wait for. They are kept because their buffers are still in use.
_unwaited: deque[object] = deque(maxlen=64)
# A rank that has raised an error waits at most this long for the others to connect, if they are not connected yet.
_PATIENCE = timedelta(seconds=10)
# The interval at which the host polls whether the GPU has received the headers.
_POLL_S = 20e-6


class Fingerprint(int):
    """A checksum of values that are too large to send. Ranks with equal values have equal checksums."""


def fingerprint(*values: object) -> Fingerprint:
    """A checksum of the values' ``repr``. A mask, whose ``repr`` may be long, stores its own checksum."""
    parts = (value.checksum if isinstance(value, Mask) else value for value in values)
    return Fingerprint(zlib.crc32(" ".join(map(repr, parts)).encode()))


# The errors of which ranks have told one another, in the blocks of ``propagate_errors`` that are open.
_told: ContextVar[list[tuple[Ranks, Exception]] | None] = ContextVar("told", default=None)


@contextmanager
def propagate_errors(ranks: Ranks | None) -> Iterator[None]:
    """If the block raises on this rank, the next ``all_gather_header`` of the other ranks raises instead of hanging.

    An error of which the ranks have told one another already, in a handshake in the block, is left alone.
    """
    told = [] if (found := _told.get()) is None else found
    token = _told.set(told)
    try:
        yield
    except Exception as error:
        if ranks is not None and ranks.size() > 1 and not any(x is ranks and y is error for x, y in told):
            told.append((ranks, error))
            with contextlib.suppress(RuntimeError), _call(ranks) as number:  # the error to raise is the block's
                _unwaited.append(_start([_FAILED, number], ranks, _PATIENCE))
        raise
    finally:
        _told.reset(token)


def leave_calls(ranks: Ranks | None, error: BaseException | None) -> None:
    """After ``error`` on this rank, let every rank that waits for it in the next call of ``ranks`` raise too.

    The error may be the user's, between two calls. An error of which the ranks have told one another is left alone.
    """
    if ranks is None or ranks.size() == 1 or isinstance(parent := parent_group(ranks), RankInProcess):
        return
    # A recomputation ends like this as soon as it has what it needs.
    if not isinstance(error, Exception) or isinstance(error, _StopRecomputationError):
        return
    told = [] if (found := _told.get()) is None else found
    if not any(x is ranks and y is error for x, y in told):
        told.append((ranks, error))
        calls_of(parent).leave()


@contextmanager
def _call(ranks: Ranks) -> Iterator[int]:
    """A call of its own, unless it is a part of one. Yields the number of the group's calls."""
    with contextlib.nullcontext() if current.get() is not None else call(ranks, "handshake"):
        yield current_tag()[0]


def all_gather_header(make_header: Callable[[], Header], group: Ranks | None) -> list[Header]:
    """All-gather the header that ``make_header`` returns on each rank.

    ``make_header`` checks this rank's input and may raise: the other ranks then raise as well.

    Returns:
        The header of each rank, by rank in ``group``.

    Raises:
        Whatever ``make_header`` raises, on the rank where it does. RuntimeError: another rank's check raised, another
        rank is in a different call, or did not arrive within the group's timeout.
    """
    with propagate_errors(group):
        header = make_header()
    if group is None or group.size() == 1:
        return [header]
    if isinstance(parent := parent_group(group), RankInProcess):
        return all_gather_in_process(header, group, parent)
    kind = fingerprint(type(header).__qualname__)
    with _call(group) as number:
        by_rank = _wait(_start([_OK, number, kind, *map(_encode, header)], group), group)
        for rank, words in zip(global_ranks(group), by_rank, strict=True):
            check_tag(rank, (words[1], 0), (number, 0))
    if failed := [rank for rank, words in enumerate(by_rank) if words[0] == _FAILED]:
        error = RuntimeError(f"rank(s) {failed} of the group raised an error on their own input; see their traceback")
        if (told := _told.get()) is not None:
            told.append((group, error))
        raise error
    if other := [rank for rank, words in enumerate(by_rank) if words[2] != kind]:
        raise RuntimeError(f"rank(s) {other} of the group called another function; call the same one on every rank")
    return [type(header)(*map(_decode, words[3:], header)) for words in by_rank]


def check_same(headers: Sequence[Any], *fields: str) -> None:
    """Raise a ValueError on every rank if the ranks' headers differ in one of the fields."""
    for field in fields:
        values = [getattr(header, field) for header in headers]
        name = field.replace("_", " ") if "_or_" in field or "_of_" in field else field
        if isinstance(values[0], Fingerprint):
            if len(set(values)) > 1:
                raise ValueError(f"{name}: the ranks of the group differ; pass the same on every rank")
        else:
            check_alike(name, values)


def _encode(value: Any) -> int:
    return DTYPES.index(value) if isinstance(value, torch.dtype) else int(value)


def _decode(word: int, like: Any) -> Any:
    """The value that was encoded as ``word``; ``like`` is this rank's own value of the same field."""
    return DTYPES[word] if isinstance(like, torch.dtype) else type(like)(word)


class _HeaderExchange(Protocol):
    """An all-gather of headers that has been started."""

    def wait(self, limit: timedelta) -> bool:
        """Wait until it is done, or for ``limit``. Returns whether it is done. RuntimeError: it failed."""

    def headers(self) -> list[list[int]]:
        """The words of each rank, after it is done."""


class _HostAllGather:
    def __init__(self, words: Tensor, ranks: Ranks, patience: timedelta | None) -> None:
        group = communicator(ranks, words.device, patience=patience)
        self._words = words
        self._gathered = torch.empty(group.size(), _WIDTH, dtype=torch.int64, device="cpu")  # [ranks, words]
        self._work = all_gather_single(self._gathered.view(-1), words, group=group, async_op=True)

    def wait(self, limit: timedelta) -> bool:
        try:
            self._work.wait(limit)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # it has failed, or ended just after the wait
        return True

    def headers(self) -> list[list[int]]:
        gathered: list[list[int]] = self._gathered.tolist()
        return gathered


class _DeviceAllGather:
    """An all-gather between GPUs, on a stream of its own, so that it does not wait for work on other streams."""

    def __init__(self, words: Tensor, ranks: Ranks, device: torch.device, patience: timedelta | None) -> None:
        group = communicator(ranks, device, "handshake", patience)
        with torch.cuda.stream(_side_stream(device)):
            # Copies from and to pinned memory do not block the host. The tensors must live until the copies are done.
            self._words = _pinned(_WIDTH).copy_(words)
            self._sent = torch.empty(_WIDTH, dtype=torch.int64, device=device)
            self._gathered = torch.empty(group.size(), _WIDTH, dtype=torch.int64, device=device)  # [ranks, words]
            self._received = _pinned(group.size(), _WIDTH)
            self._sent.copy_(self._words, non_blocking=True)
            all_gather_single(self._gathered.view(-1), self._sent, group=group)  # the side stream waits, not the host
            self._received.copy_(self._gathered, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self, limit: timedelta) -> bool:
        # Not event.synchronize(), which has no timeout.
        end = time.monotonic() + limit.total_seconds()
        while not self._done.query():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_S)
        return True

    def headers(self) -> list[list[int]]:
        received: list[list[int]] = self._received.tolist()
        return received


def _start(words: Sequence[int], ranks: Ranks, patience: timedelta | None = None) -> _HeaderExchange:
    check_own_process("handshake")
    header = torch.tensor([*words, *[0] * (_WIDTH - len(words))], dtype=torch.int64, device="cpu")
    if (device := _control_device(ranks)).type == "cpu":
        return _HostAllGather(header, ranks, patience)
    return _DeviceAllGather(header, ranks, device, patience)


def _wait(pending: _HeaderExchange, ranks: Ranks) -> list[list[int]]:
    """The words of each rank. After the group's timeout, an error that names the ranks that did not arrive."""
    limit = group_timeout(parent_group(ranks))
    end, told = time.monotonic() + limit.total_seconds(), False
    with waiting("handshake", ranks):
        while not pending.wait(min(LONG_WAIT, limit / 2)):
            if not told:
                own_entry.write("handshake")
                told = True
            if waits_in_vain.get()("handshake"):
                raise RuntimeError("another rank has left the call")
            if time.monotonic() > end:
                raise RuntimeError(f"the group's timeout of {limit.total_seconds():.0f} s is over")
    return pending.headers()


def _control_device(ranks: Ranks) -> torch.device:
    """The host if the group can communicate from there; else the GPU."""
    parent = parent_group(ranks)
    types = {device.type for device in parent._device_types}
    if "cpu" in types:
        return torch.device("cpu")
    return parent.bound_device_id or torch.device(next(iter(types)), torch.cuda.current_device())


@lru_cache(maxsize=64)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


def _pinned(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="cpu", pin_memory=True)
