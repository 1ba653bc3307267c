"""Data loaders for sharded sequences.

Ranks that differ along dp get different batches. Ranks that share a sequence get their parts of the same batch.
"""

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

    All dp ranks get the same number of batches. How they share the dataset depends on its type:

    * A dataset with indices: dp rank ``r`` of ``n`` loads the batches ``r``, ``r + n``, ``r + 2n`` and so on. If the
      number of batches is not a multiple of ``n``, the last batches are left out. A loader with a
      ``DistributedSampler`` is used as it is, and the sampler must have the size and rank of dp.
    * A streaming dataset of Hugging Face: ``split_dataset_by_node`` splits it, unless it has been split already. Any
      other iterable dataset with a method ``shard(num_shards=, index=)`` is split by this method. The parts of the
      dp ranks may have different lengths. Before each batch the dp ranks therefore tell one another whether they have
      one, and the epoch ends for all of them as soon as one has none.
    * Any other iterable dataset: every rank loads all batches, and skips those of the other dp ranks.

    ``state_dict`` and ``load_state_dict`` resume in the middle of an epoch, at the batch after the last yielded one:

    * A loader with these two methods (torchdata's ``StatefulDataLoader``) resumes itself and its worker processes.
    * Without workers, an iterable dataset with these two methods resumes itself. A streaming dataset with a shuffle
      buffer is excluded, because it would lose the examples in its buffer.
    * In all other cases the earlier batches of the epoch are loaded again and skipped. The loader's generator is set to
      the state it had at the start of the epoch, so that it gives the same order.

    Args:
        loader: yields full batches. If it shuffles, it must use the same order on all ranks: give it a seeded
            generator.
        mesh: as in ``shard_batch``.
        group: as in ``shard_batch``.
        layout: as in ``shard_batch``.
        shift_labels: as in ``shard_batch``.
        scatter: whether only the first rank of each sequence group loads batches and sends the other ranks their parts.
            The other ranks unpickle what they receive.

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
        self.stride, self.offset = 1, 0  # this rank yields every ``stride``-th batch that it loads, from ``offset`` on
        self._dp_group: ProcessGroup | None = None  # set if the dp ranks may have different numbers of batches
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
        self._yielded = 0  # the number of batches that the current epoch has yielded
        self._generator_at_start: Tensor | None = None  # the generator's state at the start of the current epoch
        self._loaded: dict[str, Any] | None = None  # the state that the next iteration resumes from

    def __len__(self) -> int:
        """The number of batches that each rank yields in an epoch."""
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
        """Call ``set_epoch`` of the loader's dataset and samplers, which may derive their order from the epoch.

        Call this method before each epoch. Do not call ``set_epoch`` of your dataset instead, because this loader may
        read a split-off part of it, which is another object.
        """
        self._epoch = epoch
        for part in (self.loader.dataset, self.loader.sampler, self.loader.batch_sampler):
            part = getattr(part, "sampler", part) if isinstance(part, StridedSampler) else part
            if (set_epoch := getattr(part, "set_epoch", None)) is not None:
                set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the iteration, for ``load_state_dict`` on the same rank. It is small and can be saved."""
        if self._loaded is not None:
            return self._loaded
        generator = self._generator_at_start if self._yielded else self._generator_state()
        state = {"dp": self.size, "yielded": self._yielded, "generator": generator, "epoch": self._epoch}
        streams = isinstance(self.loader.dataset, IterableDataset)
        if self._is_stateful:
            # Between epochs, no state: the next epoch starts at the beginning of the stream. This rank's stream may not
            # be at its end, because the epoch ended when another dp rank had no more batches.
            state["loader"] = None if streams and not self._yielded else cast(Any, self.loader).state_dict()
        elif self._yielded and self._dataset_resumes:
            state["dataset"] = cast(Any, self.loader.dataset).state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from ``state``.

        If the loader has a sampler with an epoch (``DistributedSampler``), first set the sampler to the epoch in which
        the state was made. This is not necessary if you set the epoch by this loader's ``set_epoch``, because the state
        then contains it.

        Args:
            state: what ``state_dict`` returned.

        Raises:
            ValueError: the state was saved with another number of dp ranks, or with another kind of loader.
        """
        if state["dp"] != self.size:
            raise ValueError(
                f"state: it was saved with dp={state['dp']}, but this loader has dp={self.size}; resume with the same "
                "size, or start the epoch again"
            )
        if ("loader" in state) != self._is_stateful:
            raise ValueError("state: it was saved with another kind of loader; give ShardedLoader one of that kind")
        if state.get("epoch") is not None:
            self.set_epoch(state["epoch"])
        if self._is_stateful:
            if state["loader"] is not None:
                cast(Any, self.loader).load_state_dict(state["loader"])
        elif state["generator"] is not None and self.loader.generator is not None:
            self.loader.generator.set_state(state["generator"])
        self._yielded, self._generator_at_start, self._loaded = state["yielded"], state["generator"], state

    def _start(self) -> int:
        """Begin an epoch, or resume the loaded one. Returns the number of batches to load and skip first."""
        state, self._loaded = self._loaded, None
        dataset: Any = self.loader.dataset
        if state is None:
            self._yielded, self._generator_at_start = 0, self._generator_state()
            rewind(dataset)
            return 0
        if self._is_stateful:
            return 0
        if state.get("dataset") is not None and self._dataset_resumes:
            dataset.load_state_dict(state["dataset"])
            return 0
        rewind(dataset)
        return self._yielded

    @property
    def _loads(self) -> bool:
        """Whether this rank loads batches. Otherwise it receives its parts from the first rank of the group."""
        return not self.scatter or rank_in(self.group) == 0

    @property
    def _is_stateful(self) -> bool:
        """Whether the loader itself saves and loads its state."""
        return self._loads and hasattr(self.loader, "state_dict")

    @property
    def _dataset_resumes(self) -> bool:
        """Whether the dataset saves and loads its state, and is iterated in this process."""
        dataset = self.loader.dataset
        is_local = self._loads and self.loader.num_workers == 0 and isinstance(dataset, IterableDataset)
        return is_local and resumes_exactly(dataset)

    def _generator_state(self) -> Tensor | None:
        """The state of the loader's generator. At the start of an epoch it determines the order of the examples."""
        return None if self.loader.generator is None else self.loader.generator.get_state()

    def _batches(self) -> Iterator[Any]:
        """The full batches of this rank's dp rank. None on a rank that does not load batches."""
        if not self._loads:
            return iter(())
        return iter(self.loader) if self.stride == 1 else _every(self.loader, self.stride, self.offset)


class ShardCollator:
    """A collate function that returns this rank's part of each batch, for a DataLoader of your own.

    It does not communicate, so that it can run in worker processes. It has no state, so that torchdata's
    ``StatefulDataLoader`` resumes in the middle of an epoch as usual.

    All ranks of a sequence must load the same examples in the same order. This is not checked. A ``DistributedSampler``
    must therefore have the size and rank of dp, not those of the world.

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
        # The group itself is not kept, because worker processes cannot unpickle it.
        self.ranks, self.rank = size_of(group), rank_in(group)

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """This rank's part of the batch of ``examples``, as ``shard_batch`` returns it."""
        return shard_for_rank(self.collate(examples), self.ranks, self.rank, self.layout, self.shift_labels)


class PlanCollator:
    """A collate function that plans the attention of ``model`` for each batch in the worker processes.

    The plan says what a rank sends and receives. It depends on the documents and the padding of the batch. Without this
    collate function, the first attention layer of each step makes the plan.

    The result is the full batch with an additional entry ``seqpar_mask``, which contains the plans. Pass it to the
    model, to ``shard_batch`` or ``ShardedLoader``, or combine the two collate functions:
    ``ShardCollator(PlanCollator(...))``. If a batch is changed after it was collated, the step makes a new plan.

    Batches with images are not supported, because their masks are known only inside the model. Each rank makes its own
    plan. With ``ShardedLoader(scatter=True)``, the ranks that load no batches make it in the step.

    Args:
        model: a parallelized model. This object does not keep a reference to it.
        collate: makes a full batch, a dict with ``input_ids``, from a list of examples.

    Raises:
        ValueError: the model is not parallelized, or it is parallelized with ``strategy="auto"``.
    """

    def __init__(self, model: nn.Module, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        patch = patch_of(model)
        if patch.strategy == "auto":
            raise ValueError(
                "model: with strategy='auto' the strategy is chosen in each call; call parallelize with the name of a "
                "strategy"
            )
        groups = resolve(patch.strategy, patch.mesh, patch.given_group, patch.options)
        sharding = SequenceSharding(patch.ranks, patch.layout, groups.ring_size, groups.ulysses_size)
        self.collate = collate
        self.planner = MaskPlanner(sharding, groups.ring_rank, groups.gathers, groups.per_host)
        self.layer_masks = tuple(patch.layer_masks)

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """The full batch of ``examples``, with the plans of this rank's layers."""
        batch = self.collate(examples)
        mask, length = mask_and_length(batch)
        for layer in self.layer_masks:
            self.planner(keep_layer_mask(mask, layer), length)
        return {**batch, PLANNED: mask}


def _every(items: Any, stride: int, offset: int) -> Iterator[Any]:
    """Item ``offset`` of each ``stride`` consecutive items. A last group of fewer than ``stride`` items is left out."""
    iterator = iter(items)
    while len(consecutive := list(islice(iterator, stride))) == stride:
        yield consecutive[offset]


class StridedSampler(Sampler[Any]):
    """Every ``stride``-th item of another sampler or batch sampler, from item ``offset`` on."""

    def __init__(self, sampler: Any, stride: int, offset: int) -> None:
        self.sampler, self.stride, self.offset = sampler, stride, offset

    def __len__(self) -> int:
        return len(self.sampler) // self.stride

    def __iter__(self) -> Iterator[Any]:
        return _every(self.sampler, self.stride, self.offset)


def strided_loader(loader: DataLoader[Any], stride: int, offset: int) -> DataLoader[Any]:
    """A loader like ``loader`` that loads only every ``stride``-th of its batches, from batch ``offset`` on."""
    sampling: dict[str, Any]
    if loader.batch_sampler is None:  # automatic batching is off: each example is a batch
        sampling = {"batch_size": None, "sampler": StridedSampler(loader.sampler, stride, offset)}
    else:
        sampling = {"batch_sampler": StridedSampler(loader.batch_sampler, stride, offset)}
    return _like(loader, loader.dataset, sampling)


def _loader_of_stream(loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
    """A loader like ``loader`` that loads ``dataset``, another iterable dataset."""
    return _like(loader, dataset, {"batch_size": loader.batch_size, "drop_last": loader.drop_last})


def _like(loader: DataLoader[Any], dataset: Any, sampling: dict[str, Any]) -> DataLoader[Any]:
    """A loader of ``dataset`` with the settings of ``loader`` and the arguments ``sampling``.

    If ``loader`` is a ``StatefulDataLoader`` of torchdata, the result is one too.
    """
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
        generator=loader.generator,  # needed here too, because a loader draws a seed from it before its sampler does
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
