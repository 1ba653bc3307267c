"""All-gather inside a host by the GPUs' copy engines: every rank copies the other ranks' tensors out of their memory.

NCCL's all-gather runs on SMs, which attention needs too. A copy between two GPUs connected by NVLink uses no SM. Each
rank puts its tensor into memory that all ranks of the host have mapped (``torch.distributed._symmetric_memory``), and
copies the other ranks' tensors from there:

    put own       |  barrier: all have put  |  copy of 1, of 2, of 3  |  barrier: all have copied  |

The last barrier is needed because the next all-gather writes to the same memory. A barrier is a kernel of one block.
All of this runs in order on one stream, that of ``streams.TransferStream``.

It is off unless the environment variable SEQPAR_COPY_ENGINE is 1 on every rank, because it has never run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ..mesh import Ranks, parent_group, ranks_by_host
from ..rendezvous import group_timeout
from .communicator import communicator, sends_nothing
from .p2p import Pending
from .trace import count_sent

VARIABLE = "SEQPAR_COPY_ENGINE"
# Shared memory is allocated in multiples of this, because an allocation is collective and takes milliseconds.
_ROUND_BYTES = 2 << 20


class Handle(Protocol):
    """The methods of PyTorch's ``_SymmetricMemory`` that are used here."""

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int | None = 0) -> Tensor:
        """A tensor in the memory of ``rank``."""

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Make the current stream wait until all ranks have reached this barrier."""


def symmetric_memory() -> Any:
    """PyTorch's class of memory that the GPUs of a host share."""
    return torch._C._distributed_c10d._SymmetricMemory


class SharedMemory:
    """Memory of every rank that all ranks of a group have mapped. It grows when more is needed.

    Args:
        group: the ranks, all on one host.
        device: this rank's GPU.
        timeout: how long a barrier waits for the other ranks.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, timeout: timedelta) -> None:
        self.timeout_ms = int(timeout.total_seconds() * 1000)
        self._name, self._device = group.group_name, device
        self._handle: Handle | None = None
        self._tensor: Tensor | None = None
        store = PrefixStore(f"{self._name}/shared", c10d._get_default_store())
        symmetric_memory().set_group_info(self._name, group.rank(), group.size(), store)

    def handle(self, nbytes: int) -> Handle:
        """A handle to at least ``nbytes`` of each rank. Collective if the memory grows, which it does on all ranks."""
        if self._tensor is None or self._tensor.numel() < nbytes:
            # No rank may still copy from the old memory, so each rank waits for its copies before the rendezvous.
            torch.cuda.current_stream(self._device).synchronize()
            size = -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES
            try:
                tensor = symmetric_memory().empty_strided_p2p((size,), (1,), torch.uint8, self._device, self._name)
                self._handle, self._tensor = symmetric_memory().rendezvous(tensor), tensor
            except RuntimeError as error:
                raise RuntimeError(
                    f"{VARIABLE}=1: the GPUs of this host cannot map one another's memory; unset it on every rank"
                ) from error
        assert self._handle is not None
        return self._handle


class Copied:
    """Copies that have been started on a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        """Make the current stream wait for the copies."""
        torch.cuda.current_stream().wait_event(self._event)


_shared: MutableMapping[ProcessGroup, SharedMemory] = WeakKeyDictionary()


def shared_memory(ranks: Ranks, device: torch.device) -> SharedMemory | None:
    """The memory for ``start_pulls``, or None if NCCL sends messages instead: by default, and between hosts."""
    if device.type != "cuda" or os.environ.get(VARIABLE, "0") in ("", "0") or sends_nothing():
        return None
    if torch.version.hip is not None or len(ranks_by_host(ranks)) > 1:
        return None
    group = communicator(ranks, device)
    if group not in _shared:
        device = torch.device("cuda", torch.cuda.current_device())
        _shared[group] = SharedMemory(group, device, group_timeout(parent_group(ranks)))
    return _shared[group]


def start_pulls(x: Tensor, ranks: Ranks, memory: SharedMemory) -> tuple[Tensor, Pending]:
    """``collectives.start_all_gather`` by copies out of the other ranks' memory, on the current stream."""
    size, rank = ranks.size(), ranks.rank()
    gathered = x.new_empty(size, *x.shape)
    if not x.numel():
        return gathered, Pending()
    handle = memory.handle(x.nbytes)
    handle.get_buffer(rank, x.shape, x.dtype).copy_(x)
    handle.barrier(0, memory.timeout_ms)
    gathered[rank].copy_(x)
    for step in range(1, size):  # at each step, every rank copies from another peer, so that all links are in use
        peer = (rank + step) % size
        gathered[peer].copy_(handle.get_buffer(peer, x.shape, x.dtype))
    handle.barrier(0, memory.timeout_ms)
    count_sent(x.nbytes * (size - 1), ranks, messages=size - 1)
    return gathered, Pending([cast(Any, Copied(torch.cuda.current_stream()))], [x, gathered])
