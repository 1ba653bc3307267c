"""Data loaders for sharded sequences: ranks along dp get different batches, ranks along the sequence the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, default_collate

from ..checks import check_choice
from ..comm.handshake import all_gather_header, propagate_errors
from ..layout import LAYOUTS, Layout, SequenceSharding
from ..mask import keep_layer_mask
from ..mesh import rank_in, sequence_group, size_of
from ..schedule import MaskPlanner
from ..strategies import resolve
from .batch import PLANNED, mask_and_length, shard_batch, shard_for_rank
from .state import patch_of
from .streaming import resumes_exactly, rewind, split_stream


class _BatchFollows(NamedTuple):
    """Whether the loader has another batch."""

    follows: bool


class ShardedLoader:
    """Iterates over ``loader`` and yields this rank's part of each batch, as ``shard_batch`` returns it.

    The ranks of a sequence get parts of the same batch, and dp ranks different batches, all of them the same number.

    * Of a dataset with indices, dp rank ``r`` loads every dp-th batch from batch ``r`` on. Batches that do not fill a
      round are left out. A loader with a ``DistributedSampler`` is used as it is; the sampler must have dp's size and
      rank.
    * A streaming dataset of Hugging Face is split by ``split_dataset_by_node``, unless it is split by dp already.
      Another iterable dataset is split by its method ``shard(num_shards=, index=)`` if it has one. Parts may differ in
      length: the epoch ends for all dp ranks when one of them has no more batches, which they tell each other at every
      batch.
    * Of other iterable datasets every rank loads all batches, and skips those of the other dp ranks.

    ``state_dict`` and ``load_state_dict`` resume in the middle of an epoch, at the batch after the last one that was
    yielded. A loader that has them itself (torchdata's ``StatefulDataLoader``) does it, in its worker processes too.
    Without workers an iterable dataset with ``state_dict`` and ``load_state_dict`` does it, but not a streaming one
    with a shuffle buffer, which would lose the examples in the buffer. In all other cases the batches before are loaded
    again and skipped, in the order that the loader's generator gave.

    Args:
        loader: yields full batches. If it shuffles, it must do so alike on all ranks: give it a seeded generator.
        mesh: as in ``shard_batch``.
        group: as in ``shard_batch``.
        layout: as in ``shard_batch``.
        shift_labels: as in ``shard_batch``.
        scatter: only the first rank of each sequence group loads batches, and sends the others their parts, which they
            unpickle.

    Raises:
        ValueError: the loader's DistributedSampler, or the split of its dataset, has another size or rank than dp.
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
        dp = mesh["dp"] if mesh is not None and has_dp else None
        size, rank = (1, 0) if dp is None else (dp.size(), dp.get_local_rank())
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            if (sampler.num_replicas, sampler.rank) != (size, rank):
                raise ValueError(
                    f"loader: its DistributedSampler has num_replicas={sampler.num_replicas}, rank={sampler.rank}, but "
                    f"the mesh has dp={size} and this is dp rank {rank}; make it with num_replicas={size}, rank={rank}"
                )
            size, rank = 1, 0
        self.size = size
        self.stride, self.offset = 1, 0  # of the batches that are yielded, among those that are loaded
        self._dp_group: ProcessGroup | None = None  # whose ranks may have different numbers of batches
        if isinstance(loader.dataset, IterableDataset):
            part = split_stream(loader.dataset, size, rank)
            if part is None:
                self.stride, self.offset = size, rank
            else:
                self._dp_group = dp.get_group() if dp is not None and size > 1 else None
                loader = loader if part is loader.dataset else _loader_of_stream(loader, part)
        elif size > 1:
            loader = strided_loader(loader, size, rank)
        self.loader = loader
        self._epoch: int | None = None
        self._yielded = 0  # batches of the epoch under way
        self._generator_at_start: Tensor | None = None  # of that epoch
        self._loaded: dict[str, Any] | None = None  # where the next iteration starts

    def __len__(self) -> int:
        return len(self.loader) // self.stride

    def __iter__(self) -> Iterator[dict[str, Any]]:
        skip = self._start()
        batches = self._batches()
        if self._loads:
            with propagate_errors(self.group):
                for _ in islice(batches, skip):
                    pass
        scatter = self.scatter and size_of(self.group) > 1
        batch: Any = None

        def load() -> _BatchFollows:
            nonlocal batch
            batch = next(batches, None)
            return _BatchFollows(batch is not None)

        def load_on_each_dp_rank() -> _BatchFollows:
            return _BatchFollows(self._loads and all(h.follows for h in all_gather_header(load, self._dp_group)))

        while True:
            if scatter:
                follows = all_gather_header(load_on_each_dp_rank, self.group)[0].follows
            else:
                with propagate_errors(self.group):
                    follows = load_on_each_dp_rank().follows
            if not follows:
                self._yielded = 0
                return
            self._yielded += 1
            yield shard_batch(batch, group=self.group, layout=self.layout, shift_labels=self.shift_labels)

    def set_epoch(self, epoch: int) -> None:
        """Tell the epoch to the loader's dataset and samplers, where they shuffle by it: call it before each epoch.

        Call it here, and not on the dataset, of which this loader may have split off a part.
        """
        self._epoch = epoch
        for part in (self.loader.dataset, self.loader.sampler, self.loader.batch_sampler):
            part = getattr(part, "sampler", part) if isinstance(part, StridedSampler) else part
            if (tell := getattr(part, "set_epoch", None)) is not None:
                tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands, for ``load_state_dict`` on the same rank. It is small, and can be saved."""
        if self._loaded is not None:
            return self._loaded
        generator = self._generator_at_start if self._yielded else self._generator_state()
        state = {"dp": self.size, "yielded": self._yielded, "generator": generator, "epoch": self._epoch}
        streams = isinstance(self.loader.dataset, IterableDataset)
        if self._is_stateful:
            # Between epochs a stream starts at its beginning, though another rank's may have ended before it.
            state["loader"] = None if streams and not self._yielded else cast(Any, self.loader).state_dict()
        elif self._yielded and self._asks_dataset:
            state["dataset"] = cast(Any, self.loader.dataset).state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from ``state``, which ``state_dict`` returned.

        A sampler with an epoch (``DistributedSampler``) must be set to the epoch of the state first, unless
        ``set_epoch`` of this loader did it before the state was made.

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
        if state.get("epoch") is not None:
            self.set_epoch(state["epoch"])
        if self._is_stateful:
            if state["loader"] is not None:
                cast(Any, self.loader).load_state_dict(state["loader"])
        elif state["generator"] is not None and self.loader.generator is not None:
            self.loader.generator.set_state(state["generator"])
        self._yielded, self._generator_at_start, self._loaded = state["yielded"], state["generator"], state

    def _start(self) -> int:
        """Begin an epoch, or go on with the loaded one. Returns how many batches are to be loaded and skipped."""
        state, self._loaded = self._loaded, None
        dataset: Any = self.loader.dataset
        if state is None:
            self._yielded, self._generator_at_start = 0, self._generator_state()
            rewind(dataset)
            return 0
        if self._is_stateful:
            return 0
        if state.get("dataset") is not None and self._asks_dataset:
            dataset.load_state_dict(state["dataset"])
            return 0
        rewind(dataset)
        return self._yielded

    @property
    def _loads(self) -> bool:
        """Whether this rank loads batches. Otherwise it is sent its parts."""
        return not self.scatter or rank_in(self.group) == 0

    @property
    def _is_stateful(self) -> bool:
        return self._loads and hasattr(self.loader, "state_dict")

    @property
    def _asks_dataset(self) -> bool:
        """Whether the dataset itself, which is in this process, says where it stands and goes on from there."""
        dataset = self.loader.dataset
        here = self._loads and self.loader.num_workers == 0 and isinstance(dataset, IterableDataset)
        return here and resumes_exactly(dataset)

    def _generator_state(self) -> Tensor | None:
        """The state of the loader's generator, which gives the order of an epoch when it starts."""
        return None if self.loader.generator is None else self.loader.generator.get_state()

    def _batches(self) -> Iterator[Any]:
        """The full batches of this rank's dp rank."""
        if not self._loads:
            return iter(())
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


class PlanCollator:
    """A collate function that plans the attention of ``model`` under each batch's mask, in the worker processes.

    What a rank sends and receives follows from the batch's documents and padding, and is otherwise planned in the first
    layer of each step. The batch stays the full batch; its entry ``seqpar_mask`` holds the plans, for a call of the
    model, ``shard_batch``, ``ShardedLoader`` or ``ShardCollator(PlanCollator(...))``. A batch that is changed after it
    was collated is planned again in the step.

    It is for batches of text: the masks of images are known only inside the model. Each rank plans for itself: with
    ``scatter=True`` of ``ShardedLoader``, the ranks that do not load plan in the step.

    Args:
        model: a parallelized model. It is not kept.
        collate: makes a full batch from a list of examples: a dict with ``input_ids``.

    Raises:
        ValueError: the model is not parallelized, or with ``strategy="auto"``.
    """

    def __init__(self, model: nn.Module, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        patch = patch_of(model)
        if patch.strategy == "auto":
            raise ValueError(
                "model: strategy='auto' chooses a strategy in each call; parallelize it with the name of one"
            )
        groups = resolve(patch.strategy, patch.mesh, patch.given_group, patch.options)
        sharding = SequenceSharding(patch.ranks, patch.layout, groups.ring_size, groups.ulysses_size)
        self.collate = collate
        self.planner = MaskPlanner(sharding, groups.ring_rank, groups.gathers, groups.per_host)
        self.layer_masks = tuple(patch.layer_masks)

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        batch = self.collate(examples)
        mask, length = mask_and_length(batch)
        for layer in self.layer_masks:
            self.planner(keep_layer_mask(mask, layer), length)
        return {**batch, PLANNED: mask}


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
    """A loader of every ``stride``-th batch of ``loader``, which loads no other batch."""
    sampling: dict[str, Any]
    if loader.batch_sampler is None:  # each example is a batch
        sampling = {"batch_size": None, "sampler": StridedSampler(loader.sampler, stride, offset)}
    else:
        sampling = {"batch_sampler": StridedSampler(loader.batch_sampler, stride, offset)}
    return _like(loader, loader.dataset, sampling)


def _loader_of_stream(loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
    """A loader like ``loader`` of another iterable dataset."""
    return _like(loader, dataset, {"batch_size": loader.batch_size, "drop_last": loader.drop_last})


def _like(loader: DataLoader[Any], dataset: Any, sampling: dict[str, Any]) -> DataLoader[Any]:
    """A loader with the settings of ``loader``. Of torchdata's ``StatefulDataLoader``, another one of these."""
    stateful = hasattr(loader, "state_dict")
    if stateful:
        sampling["snapshot_every_n_steps"] = getattr(loader, "snapshot_every_n_steps", 1)
    return (type(loader) if stateful else DataLoader)(
        dataset,
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
