"""Random numbers that the ranks of a sequence must draw alike: of samplers, datasets, collate functions and workers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.data import get_worker_info

from ..comm.waiting import waiting
from ..ranks.mesh import rank_in, size_of


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

    def save(self, path: Path) -> None:
        """Write the states to a file."""
        python, (name, key, *rest), torch_state = self._states or _states()
        torch.save((python, (name, key.tolist(), *rest), torch_state), path)

    def load(self, path: Path) -> None:
        """Give all ranks, which call this together, the states that the first rank reads from a file, if it exists."""
        if rank_in(self.group) == 0 and path.exists():
            self._states = torch.load(path, weights_only=True)
        self.share()

    def share(self) -> None:
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


@contextmanager
def same_random_numbers(seed: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """In the block, the generators of Python, NumPy, PyTorch and of ``devices`` start with ``seed``.

    Afterwards they are as before.
    """
    generators = {device: torch.get_device_module(device) for device in devices if device.type not in ("cpu", "meta")}
    before, on_devices = _states(), {device: module.get_rng_state(device) for device, module in generators.items()}
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        for device, module in generators.items():
            with module.device(device):
                module.manual_seed(seed)
        yield
    finally:
        _set_states(before)
        for device, state in on_devices.items():
            generators[device].set_rng_state(state, device)


class SeedAlike:
    """A ``worker_init_fn`` with one seed for the same worker of all ranks of a sequence.

    A loader that is made from another one's parts, as by accelerate's ``skip_first_batches``, gets the same object, and
    so the generators that its ranks share.

    Args:
        first: the ``worker_init_fn`` to call before. transformers' sets a seed that depends on the rank.
        replica: the number of the sequence, whose workers share seeds; workers of other sequences have other seeds.
        shared: the generators of the loader in this process.
    """

    def __init__(self, first: Callable[[int], None] | None, replica: int, shared: SharedRandom) -> None:
        self.first, self.replica, self.shared = first, replica, shared

    def __call__(self, worker: int) -> None:
        if self.first is not None:
            self.first(worker)
        info: Any = get_worker_info()
        seed = info.seed + self.replica * info.num_workers  # the loader has drawn it, from the generators above
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "shared": None}  # for worker processes, which do not draw from these generators

    def __deepcopy__(self, memo: dict[int, Any]) -> SeedAlike:
        return self  # process groups cannot be copied


def share_random(loader: Any) -> None:
    """Let each iteration of ``loader`` draw from the generators of its ``SeedAlike``, if it has one."""
    if isinstance(loader.worker_init_fn, SeedAlike):
        vars(loader)["__iter__"] = MethodType(_iterate, loader)  # accelerate's loaders call it by its name


def _iterate(loader: Any) -> Iterator[Any]:
    shared: SharedRandom = loader.worker_init_fn.shared
    shared.share()
    return shared.iterate(lambda: type(loader).__iter__(loader))
