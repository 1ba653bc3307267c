"""Loaders and collate functions: the ranks of a sequence get their parts of one batch, dp ranks different batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.data import DistributedSampler, IterableDataset, default_collate

from ..comm.handshake import Fingerprint, all_gather_header
from ..functional import mask_planner
from ..masks.mask import layer_mask
from ..placement.layout import TokenLayout
from ..ranks.mesh import rank_in, sequence_group_of, size_of
from .batch import PLANNED, BatchCut, BatchLayout, BatchSpec, batch_checksum, shard_batch, shard_for_rank
from .randomness import SharedRandom
from .state import patch_of


class _NextBatch(NamedTuple):
    follows: bool  # whether the rank's loader has another batch
    first: Fingerprint  # of an epoch's first batch


class ShardedLoader:
    """Iterates over ``loader`` and yields this rank's part of each batch, as ``shard_batch`` returns it.

    All ranks of a sequence load the same batches, and dp ranks load different ones: give the loader a
    ``DistributedSampler`` with the size and rank of dp, or a dataset that
    ``datasets.distributed.split_dataset_by_node`` has split by dp. Before each batch the ranks tell one another whether
    they have one. An epoch ends for all dp ranks as soon as one of them has no batch, and an error that the loader
    raises on one rank is raised on the others too.

    ``state_dict`` and ``load_state_dict`` call the loader's, which torchdata's ``StatefulDataLoader`` has. They resume
    at the batch after the last yielded one. Each rank saves and loads its own state.

    ``shard_batch`` explains mesh, group, layout and shift_labels.

    Args:
        loader: yields the full batches of this dp rank. Its sampler, dataset and collate function, which draw random
            numbers from the global generators of Python, NumPy and PyTorch, draw the same ones on all ranks of a
            sequence, whatever the ranks draw for dropout. Generators of their own need the same seed on these ranks.
        scatter: whether only the first rank of each sequence loads batches and sends the other ranks their parts.
            The other ranks unpickle what they receive.

    Raises:
        ValueError: the loader's DistributedSampler, or the split of its dataset, has another size or rank than dp. An
            iteration raises it if two dp ranks load the same first batch, or if only some ranks of a sequence have
            another batch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        layout: BatchLayout = "zigzag",
        shift_labels: bool | None = None,
        scatter: bool = False,
    ) -> None:
        BatchCut(1, layout)  # raises for another layout
        self.sequence_group, self._mesh, self._group = sequence_group_of(mesh, group), mesh, group
        has_dp = mesh is not None and "dp" in (mesh.mesh_dim_names or ())
        self.dp_group = mesh["dp"].get_group() if mesh is not None and has_dp else None
        _check_split(loader, size_of(self.dp_group), rank_in(self.dp_group))
        self.loader: Any = loader
        self.layout, self.shift_labels, self.scatter = layout, shift_labels, scatter
        self._loads = not scatter or rank_in(self.sequence_group) == 0
        self._random = SharedRandom(None if scatter else self.sequence_group)
        self._in_epoch = False  # whether the last epoch has yielded a batch and has not ended
        self._resumes = False  # whether the next epoch starts at a loaded state

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._random.share()
        batches = self._batches()
        batch: Any = None
        is_first = True

        def load() -> _NextBatch:
            nonlocal batch
            batch = next(batches, None)
            compare = is_first and isinstance(batch, Mapping) and size_of(self.dp_group) > 1
            return _NextBatch(batch is not None, Fingerprint(batch_checksum(batch) if compare else 0))

        def load_on_each_dp_rank() -> _NextBatch:
            if not self._loads:
                return _NextBatch(False, Fingerprint(0))
            by_dp_rank = all_gather_header(load, self.dp_group)
            follows = all(header.follows for header in by_dp_rank)
            if follows and is_first:
                self._check_different([header.first for header in by_dp_rank])
            return _NextBatch(follows, Fingerprint(0))

        while True:
            by_rank = [header.follows for header in all_gather_header(load_on_each_dp_rank, self.sequence_group)]
            if not self.scatter and len(set(by_rank)) > 1:
                raise ValueError(
                    f"loader: only ranks {[rank for rank, follows in enumerate(by_rank) if follows]} of the sequence "
                    f"group's {len(by_rank)} have another batch; give all of them the same dataset, sampler and seed"
                )
            self._in_epoch = by_rank[0]
            if not by_rank[0]:
                return
            is_first = False
            ranks: dict[str, Any] = {"mesh": self._mesh, "group": self._group}
            yield shard_batch(batch, **ranks, layout=self.layout, shift_labels=self.shift_labels)

    def state_dict(self) -> dict[str, Any]:
        """The position of the iteration, for ``load_state_dict`` on the same rank."""
        state = {"dp": size_of(self.dp_group)}
        # A stream ends for all dp ranks when the shortest one ends. The next epoch starts at its beginning.
        ended = isinstance(getattr(self.loader, "dataset", None), IterableDataset) and not self._in_epoch
        return {**state, "loader": self._stateful.state_dict()} if self._loads and not ended else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from ``state``, which ``state_dict`` returned.

        A sampler with an epoch needs its ``set_epoch`` first, as without this class.

        Raises:
            ValueError: the state was saved with another number of dp ranks.
        """
        size = size_of(self.dp_group)
        if state["dp"] != size:
            raise ValueError(
                f"state: it was saved with dp={state['dp']}, but this loader has dp={size}; resume with the same size, "
                "or start the epoch again"
            )
        if "loader" in state:
            self._stateful.load_state_dict(state["loader"])
            self._in_epoch = self._resumes = True

    @property
    def _stateful(self) -> Any:
        if not hasattr(self.loader, "state_dict"):
            raise TypeError(
                f"loader={type(self.loader).__name__}: it has no state_dict; use "
                "torchdata.stateful_dataloader.StatefulDataLoader"
            )
        return self.loader

    def _batches(self) -> Iterator[Any]:
        dataset: Any = getattr(self.loader, "dataset", None)
        if not self._resumes and hasattr(dataset, "_distributed"):
            dataset.load_state_dict(None)  # a stream of Hugging Face that has resumed once resumes in every epoch
        self._resumes = False
        if self._loads:
            yield from self._random.iterate(lambda: self.loader)

    def _check_different(self, first: list[Fingerprint]) -> None:
        if len(set(first)) < (size := len(first)):
            rank = rank_in(self.dp_group)
            raise ValueError(
                "loader: two dp ranks load the same batch; give each dp rank its own, by DistributedSampler(dataset, "
                f"num_replicas={size}, rank={rank}) or split_dataset_by_node(dataset, rank={rank}, world_size={size})"
            )


class _RowSplit(NamedTuple):
    owner: str  # what splits the rows
    name: str  # of its argument with the number of parts
    size: int
    rank: int


def split_of(loader: Any) -> _RowSplit | None:
    """How the loader's sampler or stream is split, if it is."""
    sampler, dataset = getattr(loader, "sampler", None), getattr(loader, "dataset", None)
    if isinstance(sampler, DistributedSampler):
        return _RowSplit("DistributedSampler", "num_replicas", sampler.num_replicas, sampler.rank)
    if (split := getattr(dataset, "_distributed", None)) is not None:  # a stream of Hugging Face
        return _RowSplit("split_dataset_by_node", "world_size", split.world_size, split.rank)
    return None


def _check_split(loader: Any, size: int, rank: int) -> None:
    """Raise an error if the loader's sampler or stream is split for other ranks than dp has."""
    split = split_of(loader)
    if split is not None and (split.size, split.rank) != (size, rank):
        raise ValueError(
            f"loader: its {split.owner} has {split.name}={split.size}, rank={split.rank}, but the mesh has dp={size} "
            f"and this is dp rank {rank}; make it with {split.name}={size}, rank={rank}"
        )


class ShardCollator:
    """A collate function that returns this rank's part of each batch, for a DataLoader of your own.

    It does not communicate, so that it can run in worker processes. It has no state, so that torchdata's
    ``StatefulDataLoader`` resumes in the middle of an epoch as usual.

    All ranks of a sequence must load the same examples in the same order. This is not checked. A ``DistributedSampler``
    must therefore have the size and rank of dp, not of the world.

    ``shard_batch`` explains mesh, group, layout and shift_labels.

    Args:
        collate: makes a full batch from a list of examples.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any] = default_collate,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        layout: BatchLayout = "zigzag",
        shift_labels: bool | None = None,
    ) -> None:
        self.collate, self.shift_labels = collate, shift_labels
        # The group itself is not kept, because worker processes cannot unpickle it.
        self.cut, self.rank = BatchCut.over(mesh, group, layout), rank_in(sequence_group_of(mesh, group))

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """This rank's part of the batch of ``examples``, as ``shard_batch`` returns it."""
        return shard_for_rank(self.collate(examples), self.cut, self.rank, self.shift_labels)


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
        if patch.settings.strategy == "auto":
            raise ValueError(
                "model: with strategy='auto' the strategy is chosen in each call; call parallelize with the name of a "
                "strategy"
            )
        self.collate = collate
        # Each batch has a length and a layout of its own.
        sharding = patch.sharding(TokenLayout(patch.ranks, ring=patch.ranks))
        self.cut = patch.cut
        self.planner = mask_planner(sharding, patch.settings.strategy, **patch.settings.options)
        self.layer_masks = tuple(patch.layer_masks)

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """The full batch of ``examples``, with the plans of this rank's layers."""
        batch = self.collate(examples)
        spec = BatchSpec(batch, self.cut)
        for layer in self.layer_masks:
            self.planner(layer_mask(spec.mask, *layer), spec.seq_len, spec.tokens.layout)
        return {**batch, PLANNED: spec.mask}
