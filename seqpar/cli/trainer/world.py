"""The ranks of a training run. They start together, fail together, and receive the files that rank 0 has read."""

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

_T = TypeVar("_T")  # str, int or None: a value that JSON can represent
_WAIT = timedelta(seconds=300)  # for the other ranks to start


@dataclass(frozen=True)
class World:
    """The ranks of the run, and this rank's device.

    Attributes:
        group: the ranks that each sequence is sharded over; None is this process alone.
        device: the device of this rank.
        local_ranks: the number of ranks on this machine, which share its memory and its GPUs.
        store: the launcher's key-value store, for short messages between ranks; None without a launcher.
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
        """Check the options, and start the process group if a launcher has started this process.

        Raises:
            TypeError, ValueError: an option is not allowed, or does not fit one of the machines. All ranks raise an
                error then.
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
        """Call ``make()`` on every rank. If it raises an error on one rank, all ranks raise an error with its message.

        Args:
            name: the name of this exchange. Each exchange needs another name.
            make: the function to call.

        Returns:
            What ``make()`` has returned on each rank, in the order of the ranks.

        Raises:
            ValueError: ``make`` raised an error on another rank. What it raises on this rank is raised as it is.
        """
        return _exchange(name, make, self.store, self.rank, self.size)

    def from_rank_0(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Call ``make()`` on rank 0, and send what it returns to all ranks.

        Args:
            name: the name of this exchange. Each exchange needs another name.
            make: the function to call. It returns tensors and plain values.

        Returns:
            The same on every rank, with tensors on the CPU.

        Raises:
            ValueError: ``make`` raised an error on rank 0, and this is another rank. On rank 0 it is raised as it is.
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
        # A pickle could run code. With weights_only, torch.load makes tensors and plain values only.
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
        """End the process group after all ranks have called this."""
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
