"""Messages between the ranks of one process: a copy of each. Nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..ranks.in_process import RankInProcess
from ..ranks.mesh import Ranks, global_ranks, ranks_by_host
from .shared_memory import Notice, ReceiveMode, SharedMemoryTransport
from .waiting import PeerTensor

Value = TypeVar("Value")


class InProcessTransport(SharedMemoryTransport):
    """Carries messages between ranks of one process, whether they act as ranks that share memory or not.

    Args:
        ranks: the ranks.
        rank: this rank.
        device: where the tensors are.
    """

    name = "copies"

    def __init__(self, ranks: Ranks, rank: RankInProcess, device: torch.device) -> None:
        self.reads_in_place = device.type == "cpu" and rank.crew.share_memory and len(ranks_by_host(ranks)) == 1
        self._crew, self._route, self._own, self._device = rank.crew, global_ranks(ranks), ranks.rank(), device

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def share(self, x: Tensor) -> Tensor:
        return x

    def exchange(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], mode: ReceiveMode) -> list[Notice]:
        for peer, x in sends:
            route = self._route, self._own, peer
            self._crew.send(x.clone(), *route, self._crew.number("sent", *route))
        numbers = [self._crew.number("received", self._route, peer, self._own) for peer, _ in receives]
        return [Notice(self, peer, x, mode, (n, 0)) for (peer, x), n in zip(receives, numbers, strict=True)]

    def receive(self, notice: Notice) -> None:
        message: Tensor = self._crew.receive(self._route, notice.peer, self._own, notice.tag[0])
        message, out = message.view(notice.out.shape), notice.out
        if notice.mode == "alias":
            out.set_(message.untyped_storage(), message.storage_offset(), message.shape, message.stride())
        elif notice.mode == "add":
            out.add_(message)
        else:
            out.copy_(message)


def all_gather_in_process(value: Value, ranks: Ranks, rank: RankInProcess) -> list[Value]:
    """The ``value`` of each of ``ranks``."""
    route, own, crew = global_ranks(ranks), ranks.rank(), rank.crew
    number = crew.number("headers", route, own)
    for peer in range(ranks.size()):
        crew.send(value, "header", route, own, peer, number)
    return [crew.receive("header", route, peer, own, number) for peer in range(ranks.size())]
