"""The handshake before a payload is sent: every rank learns what the others bring, so that all raise if they disagree.

Each rank checks its own input and describes it by a header, a NamedTuple of integers, fingerprints and dtypes. One
all-gather of 128 bytes a rank, on the host where the group can, hands every header to every rank. A rank whose check
raises sends a header that says so, and does not wait: the others raise too instead of waiting for its payload.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..checks import DTYPES, check_alike
from .collectives import all_gather_single

Header = TypeVar("Header", bound=tuple[Any, ...])  # a NamedTuple of int, bool, Fingerprint and torch.dtype

_WIDTH = 16  # int64 words sent by each rank: a status, the header's type, its fields
_OK, _FAILED = 0, 1
# All-gathers that a failing rank started and did not wait for; their buffers must outlive the call.
_unwaited: deque[object] = deque(maxlen=64)


class Fingerprint(int):
    """A checksum of values too large to send: the same on every rank where the values are."""


@lru_cache(maxsize=1024)
def fingerprint(*values: Hashable) -> Fingerprint:
    """A checksum of the values' ``repr``."""
    return Fingerprint(zlib.crc32(" ".join(map(repr, values)).encode()))


@contextmanager
def propagate_errors(group: ProcessGroup | None) -> Iterator[None]:
    """If the block raises on this rank, the next ``all_gather_header`` of the other ranks raises instead of hanging."""
    try:
        yield
    except Exception:
        if group is not None and group.size() > 1:
            _unwaited.append(_start([_FAILED], group, wait=False))
        raise


def all_gather_header(make_header: Callable[[], Header], group: ProcessGroup | None) -> list[Header]:
    """All-gather the header that ``make_header`` returns on each rank.

    ``make_header`` checks this rank's input and may raise: the other ranks then raise as well.

    Returns:
        The header of each rank, by rank in ``group``.

    Raises:
        Whatever ``make_header`` raises, on the rank where it does. RuntimeError: another rank's check raised, or
        another rank is in a different call.
    """
    with propagate_errors(group):
        header = make_header()
    if group is None or group.size() == 1:
        return [header]
    kind = fingerprint(type(header).__qualname__)
    _, gathered = _start([_OK, kind, *map(_encode, header)], group, wait=True)
    by_rank = gathered.tolist()
    if failed := [rank for rank, words in enumerate(by_rank) if words[0] == _FAILED]:
        raise RuntimeError(f"rank(s) {failed} of the group raised an error on their own input; see their traceback")
    if other := [rank for rank, words in enumerate(by_rank) if words[1] != kind]:
        raise RuntimeError(f"rank(s) {other} of the group called another function; call the same one on every rank")
    return [type(header)(*map(_decode, words[2:], header)) for words in by_rank]


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
    """The value that was encoded as ``word``, of the type that this rank's own header has there."""
    return DTYPES[word] if isinstance(like, torch.dtype) else type(like)(word)


def _start(words: Sequence[int], group: ProcessGroup, wait: bool) -> tuple[object, Tensor]:
    device = _control_device(group)
    header = torch.tensor([*words, *[0] * (_WIDTH - len(words))], dtype=torch.int64, device=device)
    gathered = torch.empty(group.size(), _WIDTH, dtype=torch.int64, device=device)  # [ranks, words]
    work = all_gather_single(gathered.view(-1), header, group=group, async_op=True)
    if wait:
        work.wait()
    return (work, header), gathered


def _control_device(group: ProcessGroup) -> torch.device:
    """The host if the group can communicate from there, which needs no synchronisation with the GPU; else the GPU."""
    types = {device.type for device in group._device_types}
    return torch.device("cpu") if "cpu" in types else torch.device(next(iter(types)), torch.cuda.current_device())
