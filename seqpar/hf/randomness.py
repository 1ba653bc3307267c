"""Random numbers that the ranks of a sequence must draw alike: of samplers, datasets, collate functions and workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.data import get_worker_info

from ..comm.waiting import waiting
from ..ranks.mesh import size_of


class SharedRandom:
    """The random number generators of the ranks' loaders. Those of dropout are others, which each rank draws from.

    In a ``with`` block the global generators of Python, NumPy and PyTorch (on the CPU) are in the loaders' states.
    Afterwards they are as before. The states start as the first rank's global generators.

    Args:
        group: the ranks that load the same batches. The generators of one rank are the global ones.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self._states: Any = None
        self._outside: Any = None

    def start_epoch(self) -> None:
        """Give the first rank's states to all ranks, which call this together."""
        if self.group is not None and size_of(self.group) > 1:
            states = [self._states or _states()]
            with waiting("the states of random number generators", self.group):
                dist.broadcast_object_list(states, group=self.group, group_src=0)
            self._states = states[0]

    def __enter__(self) -> None:
        if self._states is not None:
            self._outside = _states()
            _set_states(self._states)

    def __exit__(self, *error: object) -> None:
        if self._states is not None:
            self._states = _states()
            _set_states(self._outside)

    def iterate(self, loader: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """The batches of ``loader()``, which are loaded in ``with`` blocks."""
        with self:
            batches = iter(loader())
        while True:
            with self:
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


def _states() -> tuple[Any, Any, Any]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


class SeedAlike:
    """A ``worker_init_fn`` with one seed for the same worker of all ranks of a sequence.

    Args:
        first: the ``worker_init_fn`` to call before. transformers' sets a seed that depends on the rank.
        replica: the number of the sequence, whose workers share seeds; workers of other sequences have other seeds.
    """

    def __init__(self, first: Callable[[int], None] | None, replica: int) -> None:
        self.first, self.replica = first, replica

    def __call__(self, worker: int) -> None:
        if self.first is not None:
            self.first(worker)
        info: Any = get_worker_info()
        seed = info.seed + self.replica * info.num_workers  # the loader has drawn it, from the generators above
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
