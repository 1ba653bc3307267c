"""The process groups in which attention sends its messages.

A process group runs its operations one after another, on one CUDA stream. If keys and values were sent in the group
that DDP or FSDP uses, they would wait for gradients and weights that were sent before. So each set of ranks that
exchanges messages has a communicator of its own, on a stream of high priority. It is neither the default group nor the
group that the caller passed, even if it has the same ranks.

A communicator is made at the first call that needs it, by its own ranks alone, while other ranks run other code. The
functions of torch.distributed that make a group do not allow this. ``new_group`` must be called by all ranks of the
job, and ``split_group`` by all ranks of a group that is bound to a GPU; gloo cannot be split.
``new_group(use_local_synchronization=True)`` names the group after the number of groups that this process has, which
may differ from rank to rank, and on a GPU it divides the default group, for which all ranks of the job are needed. A
caller may pass any group at any time. So all communicators are made here, in one way, also for a mesh of ``init_mesh``:
from their backend, under a name that their ranks agree on through the store.

They are then entered in torch's tables, like all other groups. So torch's errors and its flight recorder name them,
``destroy_process_group`` flushes them, ``_abort_process_group`` aborts them, and at exit PyTorch ends them without
waiting for messages that other ranks may never send. As with ``new_group(use_local_synchronization=True)``, ranks that
have made different numbers of groups cannot make another group whose name depends on this number.

A communicator belongs to the group that the caller passed. It is ended together with this group, and after an error
in the middle of a call (``ranks/calls.py``).
"""

from __future__ import annotations

import json
import os
import uuid
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ..ranks.calls import MESSAGES_FAILED, Close, all_calls, calls_of, other_threads
from ..ranks.mesh import Ranks, global_ranks, parent_group, rank_in, size_of
from ..ranks.rendezvous import group_timeout, store_all_gather
from ..schedule.rounds import p2p_rounds
from .nccl import Purpose, nccl_backend
from .waiting import start_messages

# NCCL ends the process when one of its operations takes longer than the timeout. The timeout of handshakes is longer by
# this margin, so that the error that names the missing ranks is raised first.
_HANDSHAKE_MARGIN = timedelta(seconds=60)
# Larger than the tags of messages.
_UNUSED_TAG = (1 << 31) - 1
# In communicators of more ranks, a pair is connected by its first message: each takes memory of the GPU, whether it is
# used or not.
_MOST_CONNECTED = 256


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
    parent = parent_group(ranks)

    def make() -> tuple[ProcessGroup, Close]:
        made = _make(ranks, device, purpose, patience)
        return made, (lambda _: None) if made is parent else partial(_end, made)

    found: ProcessGroup = calls_of(parent).connect((purpose, device.type, global_ranks(ranks)), make)
    return found


def existing_communicators() -> list[ProcessGroup]:
    """The communicators that this process has made since the default group started."""
    connections = [connection for calls in all_calls() for connection in calls.connections.values()]
    return [x for x in connections if isinstance(x, ProcessGroup) and dist.group.WORLD is not None]


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
    entry = [uuid.uuid4().hex, _may_open(2 * size)]
    where = what, global_ranks(ranks), json.dumps(entry), patience or timeout, parent.group_name
    (nonce, _), *_ = entries = [json.loads(text) for text in store_all_gather(*where)]
    if short := [rank for rank, (_, enough) in zip(where[1], entries, strict=True) if not enough]:
        raise RuntimeError(f"{what}: rank(s) {short} of the job may open too few files; raise their limit (ulimit -n)")
    group_name = f"seqpar/{nonce}"
    job_store: Any = c10d._get_default_store()
    if other_threads():  # a group's constructor keeps them from the store, while other ranks wait for their keys
        job_store = job_store.clone()
    store = PrefixStore(f"{group_name}/", job_store)
    group: Any = ProcessGroup(store, rank, size)  # Any: the private methods below have no type stubs
    if name == "nccl":
        backend_type = ProcessGroup.BackendType.NCCL
        limit = timeout + _HANDSHAKE_MARGIN if purpose == "handshake" else timeout
        backend = nccl_backend(store, ranks, device, purpose, group_name, limit)
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
    group._set_group_name(group_name)
    group._set_group_desc(f"seqpar_{purpose}")
    _register(group, name, f"{device.type}:{name}", store, ranks)
    try:
        if name == "nccl":
            backend.eager_connect_single_device(device)
        if purpose == "messages" and name != "fake":
            _connect_pairs(group, device)
    except BaseException:
        _end(group, MESSAGES_FAILED)
        raise
    result: ProcessGroup = group
    return result


def _register(group: ProcessGroup, backend: str, config: str, store: dist.Store, ranks: Ranks) -> None:
    """Enter the group in torch's tables, under a tag of its own. So torch does not find it by its ranks alone."""
    world: Any = c10d._world
    tag = f"ptd:{group.group_name}"
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = group.group_name
    world.pg_backend_config[group] = config
    world.pg_group_ranks[group] = {global_rank: i for i, global_rank in enumerate(global_ranks(ranks))}
    world.pg_to_tag[group] = tag
    world.tags_to_pg[tag] = [group]
    register: Any = c10d._register_process_group
    register(group.group_name, group)


def _connect_pairs(group: ProcessGroup, device: torch.device) -> None:
    """Send one byte between all pairs of ranks.

    NCCL connects a pair at its first message. The host waits for the peer meanwhile, and memory of the GPU is taken
    that is not torch's. Documents may let a pair exchange its first message in any step, so all pairs are connected
    before the first one.
    """
    if group.size() > _MOST_CONNECTED:
        return
    for peers in p2p_rounds(group.size(), group.rank()):
        if peers:
            sent, received = (torch.zeros(len(peers), dtype=torch.uint8, device=device).split(1) for _ in range(2))
            sends, receives = (list(zip(peers, x, strict=True)) for x in (sent, received))
            start_messages(sends, receives, group, group).wait()


def _may_open(files: int) -> bool:
    """Whether this process may open so many more files. A rank that finds out later lets the others wait for it."""
    with ExitStack() as opened:
        try:
            for _ in range(files):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return False
    return True


def _end(group: ProcessGroup, left_by: int | None) -> None:
    """End a communicator, without waiting for its messages."""
    if group not in c10d._world.pg_map:
        return
    if left_by is not None and dist.get_backend(group) == "gloo":
        # A wait of gloo that times out closes the connections to all ranks, so that none of them waits for this one.
        with suppress(RuntimeError):
            nothing, peer = torch.empty(1, device="cpu"), (group.rank() + 1) % group.size()
            work = dist.irecv(nothing, group=group, group_src=peer, tag=_UNUSED_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))
    c10d._abort_process_group(group)
