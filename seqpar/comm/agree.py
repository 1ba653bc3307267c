"""A few integers exchanged before any payload, so that ranks that disagree all raise instead of hanging."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .gather import all_gather_single

_WIDTH = 16
_FAILED = 1
# Exchanges a failing rank started and did not wait for; their buffers must outlive the call.
_unwaited: deque[object] = deque(maxlen=64)


@contextmanager
def refusing(group: ProcessGroup | None) -> Iterator[None]:
    """An exception in the block, which comes before an ``agree``, makes the other ranks' ``agree`` raise as well."""
    try:
        yield
    except Exception:
        if group is not None and group.size() > 1:
            _unwaited.append(_start([_FAILED], group, wait=False))
        raise


def agree(fields: Callable[[], Sequence[int]], group: ProcessGroup | None) -> list[list[int]]:
    """Exchange ``fields()`` of every rank.

    ``fields`` checks this rank's input and may raise: then the other ranks are told, without waiting for them, and
    raise as well.

    Returns:
        The integers of each rank, by rank in ``group``.

    Raises:
        Whatever ``fields`` raises, on the rank where it does. RuntimeError: another rank refused its input.
    """
    with refusing(group):
        values = list(fields())
    if group is None or group.size() == 1:
        return [values]
    _, gathered = _start([0, *values], group, wait=True)
    headers = gathered.tolist()
    failed = [rank for rank, header in enumerate(headers) if header[0] == _FAILED]
    if failed:
        raise RuntimeError(f"rank(s) {failed} of the group refused their input; their own error says why")
    return [header[1 : 1 + len(values)] for header in headers]


def _start(values: Sequence[int], group: ProcessGroup, wait: bool) -> tuple[object, Tensor]:
    device = _control_device(group)
    header = torch.tensor([*values, *[0] * (_WIDTH - len(values))], dtype=torch.int64, device=device)
    gathered = torch.empty(group.size(), _WIDTH, dtype=torch.int64, device=device)
    work = all_gather_single(gathered.view(-1), header, group=group, async_op=True)
    if wait:
        work.wait()
    return (work, header), gathered


def _control_device(group: ProcessGroup) -> torch.device:
    """The host where the group can talk from there: no synchronisation with the GPU."""
    types = {device.type for device in group._device_types}
    return torch.device("cpu") if "cpu" in types else torch.device(next(iter(types)), torch.cuda.current_device())


def global_length(local_length: int, group: ProcessGroup | None) -> int:
    """The whole sequence's length: the sum of every rank's ``local_length``."""
    return sum(header[0] for header in agree(lambda: [local_length], group))
