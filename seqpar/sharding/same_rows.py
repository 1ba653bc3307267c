"""A check that the ranks that share a sequence hold the same tensor before it is sharded."""

from __future__ import annotations

import zlib
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.settings import number
from ..comm.handshake import Fingerprint, all_gather_header
from ..ranks.processes import inherited


class OtherRowsError(ValueError):
    """The ranks that share a sequence were about to shard different tensors."""


class _FullHeader(NamedTuple):
    content: Fingerprint
    layout: Fingerprint


# The number of calls of ``Sharding.shard`` with each group, while SEQPAR_CHECK is set.
_calls: MutableMapping[ProcessGroup, int] = WeakKeyDictionary()


def compares_now(group: ProcessGroup | None) -> bool:
    """Whether the environment variable SEQPAR_CHECK asks the ranks of ``group`` to compare the tensor of this call.

    Never in a process that was forked from a rank, such as a worker of a DataLoader, because it cannot communicate.
    """
    every = check_every()
    if not every or group is None or inherited():
        return False
    _calls[group] = _calls.get(group, -1) + 1
    return _calls[group] % every == 0


def check_every() -> int | None:
    """The number of calls after which the ranks compare what they should all hold, from SEQPAR_CHECK; 0 for never.

    Raises:
        ValueError: the environment variable is not a number.
    """
    return number("SEQPAR_CHECK")


_SAME_ROWS = (
    "give all of them the same rows. Usually a sampler has dealt the rows to all ranks: in a data loader, use "
    "DistributedSampler(dataset, num_replicas=dp, rank=dp_rank), with the size of the mesh's dp dimension and this "
    "rank's index in it"
)


def compare(
    x: Tensor,
    check: Callable[[], Any],
    group: ProcessGroup | None,
    advice: str = _SAME_ROWS,
    layout: int = 0,
) -> None:
    """Raise a ValueError on every rank if the ranks' ``x`` differ, or the layouts by which they will cut it.

    ``check()`` raises if ``x`` does not fit.
    """

    def header() -> _FullHeader:
        check()
        data: Any = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        content = zlib.crc32(data, zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode()))
        return _FullHeader(Fingerprint(content), Fingerprint(layout))

    headers = all_gather_header(header, group)
    check_layouts(headers)
    contents = [header.content for header in headers]
    if other := [rank for rank, content in enumerate(contents) if content != contents[0]]:
        raise OtherRowsError(
            f"x: rank(s) {other} of the {len(contents)} ranks that share the sequence hold another tensor than rank 0; "
            + advice
        )


def check_layouts(headers: Sequence[Any]) -> None:
    """Raise a ValueError on every rank if the ranks' headers differ in the field ``layout``."""
    if other := [rank for rank, header in enumerate(headers) if header.layout != headers[0].layout]:
        raise ValueError(
            f"sharding: rank(s) {other} of the {len(headers)} ranks that share the sequence have another layout or "
            "length than rank 0; make it with equal arguments on every rank"
        )
