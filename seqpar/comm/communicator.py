"""The process groups in which attention sends its messages.

A process group runs its operations one after another, on one CUDA stream. If keys and values were sent in the group
that DDP or FSDP uses, they would wait for gradients and weights that were sent before. So each set of ranks that
exchanges messages has a communicator of its own, on a stream of high priority. It is neither the default group nor the
group that the caller passed, even if it has the same ranks.

A communicator is made at the first call that needs it, by its own ranks alone, while other ranks run other code. The
functions of torch.distributed that make a group do not allow this: ``new_group`` must be called by all ranks of the
job, and ``new_group(use_local_synchronization=True)`` and ``split_group`` name the group after the number of groups
that this process has, which may differ from rank to rank. So the group is made here from its backend, under a name
that its ranks agree on through the store. It is not entered in torch's table of groups, because that would change the
names of the groups that these ranks make later.

There is one communicator for a set of ranks, however many meshes and groups with these ranks are made and destroyed.
All communicators are shut down with the default group, or at exit.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ..mesh import Ranks, global_ranks, parent_group, rank_in, size_of
from ..rendezvous import group_timeout, store_all_gather

Purpose = Literal["messages", "handshake"]
# NCCL ends the process when one of its operations takes longer than the timeout. The timeout of handshakes is longer by
# this margin, so that the error that names the missing ranks is raised first.
_HANDSHAKE_MARGIN = timedelta(seconds=60)

Key = TypeVar("Key")
Value = TypeVar("Value")


class PerWorld(Generic[Key, Value]):
    """Values by key that end with the default group. ``end`` is called with each value then."""

    def __init__(self, end: Callable[[Value], None]) -> None:
        self._end = end
        self._caches: MutableMapping[ProcessGroup, dict[Key, Value]] = WeakKeyDictionary()

    def cache(self) -> dict[Key, Value]:
        """The values of the current default group. The caller may add more."""
        world = dist.group.WORLD
        assert world is not None
        if world not in self._caches:
            self.end_all()  # torch's own modules may hold a default group that was destroyed
            self._caches[world] = {}
            weakref.finalize(world, self._end_values, self._caches[world])
        return self._caches[world]

    def end_all(self) -> None:
        """End the values of every default group."""
        for cache in list(self._caches.values()):
            self._end_values(cache)

    def _end_values(self, cache: dict[Key, Value]) -> None:
        for value in cache.values():
            self._end(value)
        cache.clear()


def communicator(
    ranks: Ranks, device: torch.device, purpose: Purpose = "messages", patience: timedelta | None = None
) -> ProcessGroup:
    """The process group in which ``ranks`` exchange tensors on ``device``. Its rank ``i`` is rank ``i`` of ``ranks``.

    The first call with these ranks is collective: all of them must make it, in the same order among such calls.

    Args:
        ranks: the ranks that exchange messages.
        device: where the tensors are.
        purpose: each purpose has a communicator of its own.
        patience: how long the first call waits for the other ranks; by default the group's timeout.

    Raises:
        RuntimeError: in the first call, some ranks did not arrive; the message names them.
    """
    communicators, key = _communicators.cache(), (purpose, device.type, global_ranks(ranks))
    if key not in communicators:
        communicators[key] = _make(ranks, device, purpose, patience)
    return communicators[key]


def existing_communicators() -> list[ProcessGroup]:
    """The communicators that this process has made since the default group started."""
    return list(_communicators.cache().values()) if dist.group.WORLD is not None else []


def _make(ranks: Ranks, device: torch.device, purpose: Purpose, patience: timedelta | None) -> ProcessGroup:
    parent, rank, size = parent_group(ranks), rank_in(ranks), size_of(ranks)
    name = parent._get_backend(device).name()
    if type(parent) is not ProcessGroup or name not in ("gloo", "nccl", "fake"):
        if parent.size() == size:
            return parent  # a group of another backend cannot be made here
        raise ValueError(
            f"group: its backend {name!r} cannot be divided into rings and all-to-alls; pass a mesh made by "
            "seqpar.init_mesh, or use nccl or gloo"
        )
    timeout, what = group_timeout(parent), f"the first exchange of {purpose} on {device.type}"
    nonce = store_all_gather(what, global_ranks(ranks), uuid.uuid4().hex, patience or timeout)[0]
    store = PrefixStore(f"seqpar/group/{nonce}/", c10d._get_default_store())
    group: Any = ProcessGroup(store, rank, size)  # Any: the private methods below have no type stubs
    if name == "nccl":
        backend_type = ProcessGroup.BackendType.NCCL
        backend = _nccl(store, ranks, timeout + _HANDSHAKE_MARGIN if purpose == "handshake" else timeout)
    elif name == "gloo":
        backend_type = ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    else:
        backend_type = ProcessGroup.BackendType.CUSTOM
        options = c10d._DistributedBackendOptions()
        options.group_rank, options.group_size = rank, size
        backend = c10d.Backend._plugins["FAKE"].creator_fn(options, None)
    group._set_default_backend(backend_type)
    group._register_backend(device, backend_type, backend)
    group._set_group_name(f"seqpar/{nonce}")
    group._set_group_desc(f"seqpar_{purpose}")
    if name == "nccl":
        # Connect now, with all ranks present, because the first exchange of a schedule may leave some of them out.
        backend.eager_connect_single_device(torch.device(device.type, torch.cuda.current_device()))
    # dist.P2POp looks up the ranks of its group here.
    c10d._world.pg_group_ranks[group] = {global_rank: i for i, global_rank in enumerate(global_ranks(ranks))}
    result: ProcessGroup = group
    return result


def _nccl(store: dist.Store, ranks: Ranks, timeout: timedelta) -> Any:
    """An NCCL backend on a stream of high priority, with the number of SMs that the environment variables set."""
    options = c10d.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    for name in ("min_ctas", "max_ctas"):
        variable = f"SEQPAR_NCCL_{name.upper()}"
        if (value := os.environ.get(variable)) is not None:
            if not (value.isdecimal() and 1 <= int(value) <= 64):
                raise ValueError(
                    f"{variable}={value!r}: expected the number of SMs that NCCL uses for attention's transfers, 1 to "
                    "64, the same on every rank; or leave it unset"
                )
            setattr(options.config, name, int(value))
    options._timeout = timeout
    options.global_ranks_in_group = list(global_ranks(ranks))
    return c10d.ProcessGroupNCCL(store, rank_in(ranks), size_of(ranks), options)


def _shut_down(group: ProcessGroup) -> None:
    c10d._world.pg_group_ranks.pop(group, None)
    group.shutdown()


_communicators: PerWorld[tuple[Purpose, str, tuple[int, ...]], ProcessGroup] = PerWorld(_shut_down)
