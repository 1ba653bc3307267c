"""All-gather and reduce-scatter of shards that may differ in length.

Shapes: b batch, s tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..ranks.calls import calls_of, current
from ..ranks.mesh import Ranks
from ..ranks.rendezvous import is_simulated
from .communicator import communicator
from .p2p import Link, connect, sends_messages
from .shared_memory import share_messages
from .trace import count_sent
from .waiting import Pending, call, operation, operation_name, start, waiting

# torch 2.13 renamed two of the collectives; 2.11 has only the old names.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_to_all_single: Callable[..., Any] = dist.all_to_all_single


def run(collective: Callable[..., Any], *args: Any, group: ProcessGroup, **kwargs: Any) -> None:
    """Run a collective of torch.distributed, whose first argument is a tensor. Its errors name the missing ranks.

    It is a call of the group, unless it is a part of one. Tensors on the host are sent in the group's communicator:
    after an error its connections are closed, so that no rank waits, and none takes them for another call's.
    """
    what, x = operation_name(collective.__name__), args[0]
    is_part = current.get() is calls_of(group)
    with nullcontext() if is_part else call(group, what, x.numel(), x.itemsize), operation(what):
        if x.is_cpu and not is_simulated():
            started = partial(collective, **kwargs)
            start(started, *args, buffers=[x], ranks=group, group=communicator(group, x.device)).wait()
            return
        with waiting(what, group):
            try:
                collective(*args, group=group, **kwargs)
            except BaseException:
                calls_of(group).unusable = what
                raise


def all_gather(x: Tensor, lengths: Sequence[int], dim: int, group: ProcessGroup | None) -> Tensor:
    """Concatenate every rank's ``x`` along ``dim``.

    Args:
        x: any shape and dtype; rank ``r`` has ``lengths[r]`` entries along ``dim``.
        lengths: the entries of each rank along ``dim``.
        dim: the dimension that is concatenated.
        group: the ranks; None is one rank.

    The shards are padded to the longest one and sent as bytes, which every backend accepts.
    """
    if group is None or group.size() == 1:
        return x
    rows = x.movedim(dim, 0).contiguous()
    longest = max(lengths)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    payload = padded.view(-1).view(torch.uint8)
    gathered = payload.new_empty(group.size() * payload.numel())
    if payload.numel():
        run(all_gather_single, gathered, payload, group=group)
        count_sent(payload.numel() * (group.size() - 1), group, messages=group.size() - 1)
    shards = gathered.view(x.dtype).view(group.size(), longest, *rows.shape[1:])
    full = torch.cat([shard[:length] for shard, length in zip(shards, lengths, strict=True)])
    return full.movedim(0, dim)


def reduce_scatter(chunks: Sequence[Tensor], group: ProcessGroup) -> Tensor:
    """Sum every rank's ``chunks[r]`` and keep the sum on rank ``r``.

    Args:
        chunks: for each rank a tensor ``[b, s, ...]``. They may differ in ``s``, and are padded to the longest one.
        group: the ranks.

    Returns:
        This rank's sum, ``[b, s, ...]``.
    """
    if group.size() == 1:
        return chunks[0]
    longest = max(c.shape[1] for c in chunks)
    like = chunks[group.rank()]
    padded = like.new_zeros(len(chunks), like.shape[0], longest, *like.shape[2:])  # [ranks, b, s, ...]
    for slot, chunk in zip(padded, chunks, strict=True):
        slot[:, : chunk.shape[1]] = chunk
    total = torch.empty_like(padded[0])
    if padded.numel():
        run(reduce_scatter_single, total.view(-1), padded.view(-1), group=group)
        count_sent(total.nbytes * (group.size() - 1), group, messages=group.size() - 1)
    return total[:, : like.shape[1]].contiguous()


def sum_shards(shards: Sequence[Tensor], dim: int, group: ProcessGroup) -> Tensor:
    """The adjoint of ``all_gather``: sum every rank's ``shards[r]``, whose lengths along ``dim`` may differ, on rank r.

    The sum is computed and sent in float32 (float64 for float64), and rounded once.
    """
    like = shards[0]
    is_complex = like.is_complex()
    rows = [(torch.view_as_real(x) if is_complex else x).movedim(dim, 0)[None] for x in shards]  # [1, s, ...]
    total = reduce_scatter([x.to(torch.promote_types(x.dtype, torch.float32)) for x in rows], group)[0].movedim(0, dim)
    return (torch.view_as_complex(total.contiguous()) if is_complex else total).to(like.dtype).contiguous()


def start_all_gather(x: Tensor, ranks: Ranks | Link) -> tuple[Tensor, Pending]:
    """Start to all-gather ``x``, contiguous and of the same shape on every rank; returns ``[ranks, *x.shape]``.

    It uses attention's own communicator, like the messages of ``p2p.exchange``.
    """
    link = connect(ranks, x.device)
    assert link is not None
    ranks = link.ranks
    gathered = x.new_empty(ranks.size(), *x.shape)
    count_sent(x.nbytes * (ranks.size() - 1), ranks, messages=ranks.size() - 1)
    if not x.numel() or not sends_messages():
        return gathered, Pending()
    if (memory := link.memory) is not None:
        x, peers = memory.share(x), _peers(ranks)
        sends, receives = [(peer, x) for peer in peers], [(peer, gathered[peer]) for peer in peers]
        pending = share_messages(ranks, memory, sends, receives, "copy", [x, gathered])
        gathered[ranks.rank()].copy_(x)
        return gathered, pending
    # As bytes, which every backend accepts.
    sent, received = (y.view(-1).view(torch.uint8) for y in (x, gathered))
    return gathered, start(all_gather_single, received, sent, buffers=[x, gathered], ranks=ranks, group=link.group)


def start_reduce_scatter(x: Tensor, ranks: Ranks | Link) -> tuple[Tensor, Pending]:
    """Start to sum ``x [ranks, ...]``, contiguous, over the ranks; returns this rank's ``x[rank]`` of the sum."""
    link = connect(ranks, x.device)
    assert link is not None
    ranks, total = link.ranks, torch.empty_like(x[0])
    count_sent(total.nbytes * (ranks.size() - 1), ranks, messages=ranks.size() - 1)
    if not x.numel() or not sends_messages():
        return total, Pending()
    if (memory := link.memory) is not None:
        peers = _peers(ranks)
        sends, receives = [(peer, x[peer]) for peer in peers], [(peer, total) for peer in peers]
        pending = share_messages(ranks, memory, sends, receives, "add", [x, total])
        total.copy_(x[ranks.rank()])
        return total, pending
    sums = total.view(-1)
    return total, start(reduce_scatter_single, sums, x.view(-1), buffers=[x, total], ranks=ranks, group=link.group)


def start_all_to_all(
    x: Tensor, sends: Sequence[int], receives: Sequence[int], ranks: Ranks | Link | None
) -> tuple[list[Tensor], Pending]:
    """Start to send each rank its part of ``x``.

    Args:
        x: the parts, one after another; contiguous. In shared memory if ``new_message`` made it.
        sends: for each rank, the number of elements of its part.
        receives: for each rank, the number of elements that it sends to this rank.
        ranks: the ranks, or their link.

    Returns:
        The part that each rank sends to this rank, in one dimension. Make views of it after the wait.
    """
    link, parts = connect(ranks, x.device), list(x.view(-1).split_with_sizes(list(sends)))
    if link is None:
        return parts, Pending()
    ranks, rank, size = link.ranks, link.ranks.rank(), len(parts)
    peers = [peer for peer in range(size) if peer != rank]
    for peer in peers:
        if sends[peer]:
            count_sent(parts[peer].nbytes, ranks, peer)
    if (memory := link.memory) is not None and sends_messages():
        received = [parts[rank] if peer == rank else x.new_empty(receives[peer]) for peer in range(size)]
        to_peers = [(peer, parts[peer]) for peer in peers if sends[peer]]
        from_peers = [(peer, received[peer]) for peer in peers if receives[peer]]
        return received, share_messages(ranks, memory, to_peers, from_peers, "alias", [x, *received])
    buffer = x.new_empty(sum(receives))
    received = list(buffer.split_with_sizes(list(receives)))
    if not sends_messages():
        return received, Pending()
    # As bytes, which every backend accepts.
    into, sent = buffer.view(torch.uint8), x.view(-1).view(torch.uint8)
    into_sizes, sent_sizes = ([elements * x.element_size() for elements in counts] for counts in (receives, sends))
    where: dict[str, Any] = {"buffers": [x, buffer], "ranks": ranks, "group": link.group}
    return received, start(all_to_all_single, into, sent, into_sizes, sent_sizes, **where)


def _peers(ranks: Ranks) -> list[int]:
    return [peer for peer in range(ranks.size()) if peer != ranks.rank()]


def all_reduce(x: Tensor, group: ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce ``x`` over the ranks, in place, and return it.

    Its bytes are counted as if it were a ring all-reduce, whatever algorithm the backend chooses.
    """
    if group is not None and group.size() > 1:
        run(dist.all_reduce, x, op=op, group=group)
        peers = group.size() - 1
        count_sent(2 * x.nbytes * peers // group.size(), group, messages=2 * peers)
    return x
