"""Splits streaming datasets over dp ranks, and decides whether they can resume."""

from __future__ import annotations

import sys
from typing import Any


def is_streaming(dataset: Any) -> bool:
    """Whether ``dataset`` is an ``IterableDataset`` of Hugging Face's ``datasets``."""
    datasets = sys.modules.get("datasets")  # if such a dataset exists, the package has been imported already
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)


def split_stream(dataset: Any, size: int, rank: int) -> Any:
    """The part of ``dataset`` that dp rank ``rank`` of ``size`` reads; None if the dataset cannot be split.

    Raises:
        ValueError: the dataset has already been split with another size or rank.
    """
    if is_streaming(dataset):
        split = getattr(dataset, "_distributed", None)
        if split is not None:
            if (split.world_size, split.rank) != (size, rank):
                raise ValueError(
                    f"dataset: split_dataset_by_node has split it with world_size={split.world_size}, "
                    f"rank={split.rank}, but dp={size} and this is dp rank {rank}; split it with world_size={size}, "
                    f"rank={rank}, or leave the split out"
                )
            return dataset
        if size > 1:
            from datasets.distributed import split_dataset_by_node

            return split_dataset_by_node(dataset, rank=rank, world_size=size)
        return dataset
    if size == 1:
        return dataset
    shard = getattr(dataset, "shard", None)
    return shard(num_shards=size, index=rank) if callable(shard) else None


def resumes_exactly(dataset: Any) -> bool:
    """Whether ``dataset`` can resume from its ``state_dict`` in this process without losing examples.

    A streaming dataset with a shuffle buffer cannot, because its state does not contain the examples in the buffer.
    """
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    return not (is_streaming(dataset) and _has_buffer(dataset))


def _has_buffer(iterable: Any) -> bool:
    """Whether a streaming dataset, or one of the iterables that it is composed of, has a shuffle buffer."""
    parts = [getattr(iterable, name, None) for name in ("_ex_iterable", "ex_iterable")]
    parts += getattr(iterable, "ex_iterables", ())
    shuffles = type(iterable).__name__ == "BufferShuffledExamplesIterable"
    return shuffles or any(_has_buffer(part) for part in parts if part is not None)


def rewind(dataset: Any) -> None:
    """Make the next iteration start at the beginning of ``dataset``.

    This clears the state that a streaming dataset has loaded, because it would start every iteration at this state.
    """
    if is_streaming(dataset):
        dataset.load_state_dict(None)
