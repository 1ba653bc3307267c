"""Data loaders for sharded sequences: ranks along dp get different batches, ranks along the sequence the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, default_collate

from ..checks import check_choice
from ..comm.handshake import all_gather_header
from ..layout import LAYOUTS
from ..mesh import rank_in, sequence_group, size_of
from .batch import cut, shard_batch


class _More(NamedTuple):
    """Whether the loader has another batch."""

    more: bool


class ShardedLoader:
    """Iterates over ``loader`` and yields this rank's part of each batch, as of ``shard_batch``.

    Over a mesh with a dp dimension, the batches are dealt to its ranks in turn (a remainder is left out, so that all
    ranks take the same number of steps), unless the loader has a ``DistributedSampler``, which must then be made with
    dp's size and rank.

    Args:
        loader: of whole batches. Shuffling must be alike on all ranks: give it a seeded generator.
        mesh, group, layout, shift_labels: as in ``shard_batch``.
        scatter: only the first rank of each sequence group loads; the others receive their parts.

    Raises:
        ValueError: a DistributedSampler that deals to ranks of the sequence.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        layout: str = "zigzag",
        shift_labels: bool | None = None,
        scatter: bool = False,
    ) -> None:
        self.group = sequence_group(mesh, group)
        check_choice("layout", layout, LAYOUTS)
        self.layout, self.shift_labels, self.scatter = layout, shift_labels, scatter
        names = (mesh.mesh_dim_names or ()) if mesh is not None else ()
        size, rank = (mesh["dp"].size(), mesh["dp"].get_local_rank()) if mesh is not None and "dp" in names else (1, 0)
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != (size, rank):
                raise ValueError(
                    f"loader: its DistributedSampler deals to {sampler.num_replicas} ranks (this is {sampler.rank}), "
                    f"but the mesh has dp={size} (this is {rank}); make it with num_replicas={size}, rank={rank}"
                )
            size, rank = 1, 0
        self.loader = loader if size == 1 else deal(loader, size, rank)
        self.every, self.offset = (size, rank) if isinstance(loader.dataset, IterableDataset) else (1, 0)

    def __len__(self) -> int:
        return len(self.loader) // self.every

    def __iter__(self) -> Iterator[dict[str, Any]]:
        whole = iter(self._mine())
        scatter = self.scatter and size_of(self.group) > 1
        while True:
            batch = next(whole, None) if not scatter or rank_in(self.group) == 0 else None
            if scatter:
                more = all_gather_header(partial(_More, batch is not None), self.group)[0].more
            else:
                more = batch is not None
            if not more:
                return
            yield shard_batch(batch, group=self.group, layout=self.layout, shift_labels=self.shift_labels)

    def _mine(self) -> Iterator[Any]:
        if self.every == 1:
            yield from self.loader
            return
        batches = iter(self.loader)
        while len(turn := list(islice(batches, self.every))) == self.every:
            yield turn[self.offset]


class ShardCollator:
    """A collate function that cuts: for a DataLoader of one's own, in worker processes too (it does not communicate).

    Every rank of the sequence must load the same examples in the same order, and nothing checks it: the
    ``DistributedSampler`` takes dp's size and rank, not the world's.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any] = default_collate,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        layout: str = "zigzag",
        shift_labels: bool | None = None,
    ) -> None:
        group = sequence_group(mesh, group)
        check_choice("layout", layout, LAYOUTS)
        self.collate, self.layout, self.shift_labels = collate, layout, shift_labels
        self.ranks, self.rank = size_of(group), rank_in(group)

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        return cut(self.collate(examples), self.ranks, self.rank, self.layout, self.shift_labels)


class _InTurn(Sampler[list[Any]]):
    """Every ``size``-th batch of another batch sampler."""

    def __init__(self, batches: Any, size: int, rank: int) -> None:
        self.batches, self.size, self.rank = batches, size, rank

    def __len__(self) -> int:
        return len(self.batches) // self.size

    def __iter__(self) -> Iterator[list[Any]]:
        batches = iter(self.batches)
        while len(turn := list(islice(batches, self.size))) == self.size:
            yield turn[self.rank]


def deal(loader: DataLoader[Any], size: int, rank: int) -> DataLoader[Any]:
    """A loader of every ``size``-th batch of ``loader``, loading no other; an iterable dataset's is left alone."""
    if isinstance(loader.dataset, IterableDataset):
        return loader
    turns: dict[str, Any]
    if loader.batch_sampler is None:  # each example is a batch
        turns = {"batch_size": None, "sampler": _InTurn(loader.sampler, size, rank)}
    else:
        turns = {"batch_sampler": _InTurn(loader.batch_sampler, size, rank)}
    return DataLoader(
        loader.dataset,
        **turns,
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
