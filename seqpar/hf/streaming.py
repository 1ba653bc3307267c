"""Streaming datasets: which part of one a dp rank reads, and where its next iteration starts."""

from __future__ import annotations

import sys
from typing import Any


def is_streaming(dataset: Any) -> bool:
    """Whether it is an ``IterableDataset`` of Hugging Face's ``datasets``."""
    datasets = sys.modules.get("datasets")  # imported already if there is such a dataset
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)


def split_stream(dataset: Any, size: int, rank: int) -> Any:
    """The part of ``dataset`` that dp rank ``rank`` of ``size`` reads; None if the dataset cannot be split.

    Raises:
        ValueError: it is split already, and not by dp.
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
    """Whether ``dataset``, in this process, goes on from its ``state_dict`` with the examples that follow.

    A streaming dataset that shuffles does not: its state leaves the examples in the shuffle buffer out.
    """
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    return not (is_streaming(dataset) and _has_buffer(dataset))


def _has_buffer(iterable: Any) -> bool:
    """Whether a streaming dataset, or one of the iterables that it is made of, shuffles in a buffer."""
    parts = [getattr(iterable, name, None) for name in ("_ex_iterable", "ex_iterable")]
    parts += getattr(iterable, "ex_iterables", ())
    shuffles = type(iterable).__name__ == "BufferShuffledExamplesIterable"
    return shuffles or any(_has_buffer(part) for part in parts if part is not None)


def rewind(dataset: Any) -> None:
    """Let the next iteration start at the beginning. A streaming dataset starts all of them at a state it was given."""
    if is_streaming(dataset):
        dataset.load_state_dict(None)
