"""Data loaders for sharded sequences: ranks along dp get different batches, ranks along the sequence the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, default_collate

from ..checks import check_choice
from ..comm.handshake import all_gather_header
from ..layout import LAYOUTS, Layout
from ..mesh import rank_in, sequence_group, size_of
from .batch import shard_batch, shard_for_rank


class _BatchFollows(NamedTuple):
    """Whether the loader has another batch."""

    follows: bool


class ShardedLoader:
    """Iterates over ``loader`` and yields this rank's part of each batch, as ``shard_batch`` returns it.

    With a mesh that has a dp dimension, batch ``i`` goes to dp rank ``i % dp``. Batches that do not fill a round are
    left out, so that all ranks take the same number of steps. A loader with a ``DistributedSampler`` is used as it is;
    the sampler must have dp's size and rank.

    ``state_dict`` and ``load_state_dict`` resume in the middle of an epoch, at the batch after the last one that was
    yielded. A loader that has them itself (torchdata's ``StatefulDataLoader``) does it; of any other, the batches
    before are loaded again and skipped, in the order that its generator gave.

    Args:
        loader: yields full batches. If it shuffles, it must do so alike on all ranks: give it a seeded generator.
        mesh: as in ``shard_batch``.
        group: as in ``shard_batch``.
        layout: as in ``shard_batch``.
        shift_labels: as in ``shard_batch``.
        scatter: only the first rank of each sequence group loads batches, and sends the others their parts, which they
            unpickle.

    Raises:
        ValueError: the loader's DistributedSampler has another size or rank than dp.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        layout: Layout = "zigzag",
        shift_labels: bool | None = None,
        scatter: bool = False,
    ) -> None:
        self.group = sequence_group(mesh, group)
        check_choice("layout", layout, LAYOUTS)
        self.layout, self.shift_labels, self.scatter = layout, shift_labels, scatter
        has_dp = mesh is not None and "dp" in (mesh.mesh_dim_names or ())
        size, rank = (mesh["dp"].size(), mesh["dp"].get_local_rank()) if mesh is not None and has_dp else (1, 0)
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != (size, rank):
                raise ValueError(
                    f"loader: its DistributedSampler has num_replicas={sampler.num_replicas}, rank={sampler.rank}, but "
                    f"the mesh has dp={size} and this is dp rank {rank}; make it with num_replicas={size}, rank={rank}"
                )
            size, rank = 1, 0
        self.size = size
        self.loader = loader if size == 1 else strided_loader(loader, size, rank)
        # An iterable dataset cannot be strided: every rank loads all batches and skips the others'.
        self.stride, self.offset = (size, rank) if isinstance(loader.dataset, IterableDataset) else (1, 0)
        self._yielded = 0  # batches of the epoch under way
        self._generator_at_start: Tensor | None = None  # of that epoch
        self._loaded = False  # whether load_state_dict said where the next iteration starts

    def __len__(self) -> int:
        return len(self.loader) // self.stride

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._loaded:
            self._yielded, self._generator_at_start = 0, self._generator_state()
        skip, self._loaded = 0 if self._is_stateful else self._yielded, False
        batches = self._batches()
        scatter = self.scatter and size_of(self.group) > 1
        if self._loads:
            for _ in islice(batches, skip):
                pass
        while True:
            batch = next(batches, None) if self._loads else None
            if scatter:
                follows = all_gather_header(partial(_BatchFollows, batch is not None), self.group)[0].follows
            else:
                follows = batch is not None
            if not follows:
                self._yielded = 0
                return
            self._yielded += 1
            yield shard_batch(batch, group=self.group, layout=self.layout, shift_labels=self.shift_labels)

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands, for ``load_state_dict`` on the same rank. It is small, and can be saved."""
        generator = self._generator_at_start if self._yielded else self._generator_state()
        state = {"dp": self.size, "yielded": self._yielded, "generator": generator}
        if self._is_stateful:
            state["loader"] = cast(Any, self.loader).state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from ``state``, which ``state_dict`` returned.

        A sampler with an epoch (``DistributedSampler``) must be set to the epoch of the state first.

        Raises:
            ValueError: the state was saved with another number of dp ranks, or with another kind of loader.
        """
        if state["dp"] != self.size:
            raise ValueError(
                f"state: it was saved with dp={state['dp']}, but this loader has dp={self.size}; resume with the same, "
                "or start the epoch again"
            )
        if ("loader" in state) != self._is_stateful:
            raise ValueError("state: it was saved with another kind of loader; give the same one")
        if self._is_stateful:
            cast(Any, self.loader).load_state_dict(state["loader"])
        elif state["generator"] is not None and self.loader.generator is not None:
            self.loader.generator.set_state(state["generator"])
        self._yielded, self._generator_at_start, self._loaded = state["yielded"], state["generator"], True

    @property
    def _loads(self) -> bool:
        """Whether this rank loads batches. Otherwise it is sent its parts."""
        return not self.scatter or rank_in(self.group) == 0

    @property
    def _is_stateful(self) -> bool:
        return self._loads and hasattr(self.loader, "state_dict")

    def _generator_state(self) -> Tensor | None:
        """The state of the loader's generator, which gives the order of an epoch when it starts."""
        return None if self.loader.generator is None else self.loader.generator.get_state()

    def _batches(self) -> Iterator[Any]:
        """The full batches of this rank's dp rank."""
        return iter(self.loader) if self.stride == 1 else _every(self.loader, self.stride, self.offset)


class ShardCollator:
    """A collate function that shards: for your own DataLoader, in worker processes too. It does not communicate.

    Every rank of the sequence must load the same examples in the same order, and nothing checks it: give a
    ``DistributedSampler`` dp's size and rank, not the world's. It holds no state: torchdata's ``StatefulDataLoader``
    around it resumes in the middle of an epoch by itself.

    Args:
        collate: makes a full batch from a list of examples.
        mesh: as in ``shard_batch``.
        group: as in ``shard_batch``.
        layout: as in ``shard_batch``.
        shift_labels: as in ``shard_batch``.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any] = default_collate,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        layout: Layout = "zigzag",
        shift_labels: bool | None = None,
    ) -> None:
        group = sequence_group(mesh, group)
        check_choice("layout", layout, LAYOUTS)
        self.collate, self.layout, self.shift_labels = collate, layout, shift_labels
        # Not the group: worker processes cannot unpickle it.
        self.ranks, self.rank = size_of(group), rank_in(group)

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        return shard_for_rank(self.collate(examples), self.ranks, self.rank, self.layout, self.shift_labels)


def _every(items: Any, stride: int, offset: int) -> Iterator[Any]:
    """Item ``offset`` of each full run of ``stride`` items."""
    iterator = iter(items)
    while len(run := list(islice(iterator, stride))) == stride:
        yield run[offset]


class StridedSampler(Sampler[Any]):
    """Every ``stride``-th item of another sampler or batch sampler, from ``offset`` on."""

    def __init__(self, sampler: Any, stride: int, offset: int) -> None:
        self.sampler, self.stride, self.offset = sampler, stride, offset

    def __len__(self) -> int:
        return len(self.sampler) // self.stride

    def __iter__(self) -> Iterator[Any]:
        return _every(self.sampler, self.stride, self.offset)


def strided_loader(loader: DataLoader[Any], stride: int, offset: int) -> DataLoader[Any]:
    """A loader of every ``stride``-th batch of ``loader``, which loads no other batch.

    A loader of an iterable dataset is returned as it is. One of torchdata's ``StatefulDataLoader`` stays one.
    """
    if isinstance(loader.dataset, IterableDataset):
        return loader
    sampling: dict[str, Any]
    if loader.batch_sampler is None:  # each example is a batch
        sampling = {"batch_size": None, "sampler": StridedSampler(loader.sampler, stride, offset)}
    else:
        sampling = {"batch_sampler": StridedSampler(loader.batch_sampler, stride, offset)}
    stateful = hasattr(loader, "state_dict")
    if stateful:
        sampling["snapshot_every_n_steps"] = getattr(loader, "snapshot_every_n_steps", 1)
    return (type(loader) if stateful else DataLoader)(
        loader.dataset,
        **sampling,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,  # a loader draws from it before its sampler does
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
