"""The ranks of a training run: they start together, fail together, and take their files from rank 0."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous

from ...mesh import init_mesh, rank_in, sequence_group, size_of
from ..launch import under_launcher
from .config import TrainConfig

_T = TypeVar("_T")  # str, int or None: what JSON can carry
_WAIT = timedelta(seconds=300)  # for a rank that does not say whether it can start


@dataclass(frozen=True)
class World:
    """The ranks of the run, and this rank's device.

    Attributes:
        group: the ranks that share each sequence; None is this process alone.
        device: of this rank's tensors.
        local_ranks: ranks on this machine, which share its memory and its GPUs.
        store: the launcher's key-value store, which hands short messages from rank to rank; None without a launcher.
    """

    group: ProcessGroup | None
    device: torch.device
    local_ranks: int
    store: Store | None

    @property
    def rank(self) -> int:
        return rank_in(self.group)

    @property
    def size(self) -> int:
        return size_of(self.group)

    @staticmethod
    def init(config: TrainConfig) -> World:
        """Check the options, and start the process group if a launcher started this process.

        Raises:
            TypeError, ValueError: an option is wrong, or does not fit one of the machines. Every rank raises then.
        """
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        store, rank, ranks = None, 0, 1
        if under_launcher():
            store, rank, ranks = next(rendezvous("env://", timeout=_WAIT))

        def device_type() -> str:
            config.check(ranks, local_ranks)
            if config.device == "auto":
                return "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
            return config.device

        types = _exchange("device", device_type, store, rank, ranks)
        chosen = "cuda" if set(types) == {"cuda"} else "cpu"  # with "auto", some of the machines may have no GPUs
        group = None if store is None else sequence_group(init_mesh(ring=-1, device_type=chosen))
        device = torch.device("cuda", torch.cuda.current_device()) if chosen == "cuda" else torch.device("cpu")
        return World(group, device, local_ranks, store)

    def on_all_ranks(self, name: str, make: Callable[[], _T]) -> list[_T]:
        """What ``make()`` returns on each rank, by rank. If it raises on one rank, every rank raises the same message.

        Args:
            name: of this exchange; another name for each.
            make: called on every rank.

        Raises:
            Whatever ``make`` raises on this rank. ValueError: it raised on another one.
        """
        return _exchange(name, make, self.store, self.rank, self.size)

    def from_rank_0(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What ``make()`` returns on rank 0, which alone calls it: tensors, which come to the CPU, and plain values.

        Raises:
            Whatever ``make`` raises, on rank 0. ValueError: the same message, on the other ranks.
        """
        if self.group is None:
            return make()
        buffer = io.BytesIO()

        def serialize() -> int:
            if self.rank == 0:
                torch.save(make(), buffer)
            return buffer.tell()

        size = self.on_all_ranks(name, serialize)[0]
        data = torch.empty(size, dtype=torch.uint8)
        if self.rank == 0:
            data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        data = data.to(self.device)
        dist.broadcast(data, group=self.group, group_src=0)
        # Not pickle, which would run what it is sent: weights_only makes tensors and plain values and nothing else.
        state: dict[str, Any] = torch.load(io.BytesIO(data.cpu().numpy().tobytes()), weights_only=True)
        return state

    def all_reduce(self, *values: float) -> list[float]:
        """Each value summed over the ranks."""
        if self.group is None:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self.group)
        return [float(x) for x in total.tolist()]

    def destroy(self) -> None:
        """End the process group, after all ranks have come here."""
        if self.group is not None:
            dist.barrier(self.group)
            dist.destroy_process_group()


def _exchange(name: str, make: Callable[[], _T], store: Store | None, rank: int, ranks: int) -> list[_T]:
    """``World.on_all_ranks``, which also works before there is a process group."""
    if store is None:
        return [make()]
    store = PrefixStore(f"seqpar train, {name}", store)
    try:
        answer = {"value": make()}
    except Exception as error:
        store.set(str(rank), json.dumps({"error": str(error)}))
        raise
    store.set(str(rank), json.dumps(answer))
    answers = [json.loads(store.get(str(r))) for r in range(ranks)]
    for other in answers:
        if "error" in other:
            raise ValueError(other["error"])
    return [other["value"] for other in answers]
