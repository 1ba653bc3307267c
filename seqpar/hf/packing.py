"""Rows of a fixed length, filled with whole documents.

Documents are taken from a buffer of the next ones, so that a stream of any length is packed as it is read. In a buffer,
each document goes into the row that it fills best, the longest documents first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from ..checks import check_choice, check_int
from .batch import IGNORE_INDEX
from .streaming import is_streaming, resumes_exactly, rewind, split_stream

TooLong = Literal["split", "truncate"]
Document = tuple[list[int], list[int]]  # tokens and their labels


class PackedDataset(IterableDataset[dict[str, Tensor]]):
    """Packs documents into rows of ``length`` tokens, for ``DataLoader(dataset, batch_size=...)``.

    A row is a dict of int64 tensors ``[length]``: ``input_ids``; ``labels``, which are -100 at each document's first
    token, so that no document predicts the next one's, and for padding; ``position_ids``, which restart at each
    document; and ``attention_mask``, 0 for the padding at the end.

    The workers of a data loader, and the dp ranks under ``ShardedLoader``, pack different documents. ``state_dict`` and
    ``load_state_dict`` resume after the last row, also in the workers of torchdata's ``StatefulDataLoader``.

    Args:
        documents: dicts with ``input_ids`` and, if they are not the same, ``labels``: a list, a dataset of Hugging Face
            (streaming too), or another iterable that gives the same documents in each iteration. Other entries are left
            out.
        length: tokens of a row.
        buffer: documents that are packed at a time. More of them leave less padding.
        too_long: what becomes of a document of more than ``length`` tokens. "split": documents of ``length`` tokens and
            one of the rest. "truncate": its first ``length`` tokens.
        pad_token_id: the token at the end of rows that are not full.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong value.

    Examples:
        >>> rows = PackedDataset([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}], length=4)
        >>> next(iter(rows))["position_ids"].tolist()
        [0, 1, 2, 0]
    """

    def __init__(
        self,
        documents: Iterable[Mapping[str, Any]],
        length: int,
        *,
        buffer: int = 1024,
        too_long: TooLong = "split",
        pad_token_id: int = 0,
    ) -> None:
        if isinstance(documents, Iterator) or not (isinstance(documents, Iterable) or _has_items(documents)):
            raise TypeError(
                f"documents={type(documents).__name__}: expected an iterable that can be read again, such as a "
                "list or a dataset"
            )
        check_int("length", length, 1)
        check_int("buffer", buffer, 1)
        check_choice("too_long", too_long, get_args(TooLong))
        check_int("pad_token_id", pad_token_id)
        self.documents, self.length, self.buffer = documents, length, buffer
        self.too_long, self.pad_token_id = too_long, pad_token_id
        self._stride, self._offset = 1, 0  # of the documents that this dataset packs
        self._read = 0  # documents read, in the iteration under way
        self._state: dict[str, Any] | None = None
        self._loaded: dict[str, Any] | None = None
        self._rows = self._tokens = 0

    @property
    def fill_rate(self) -> float:
        """The share of tokens that are no padding, of all rows that were made in this process; 1.0 before the first."""
        return self._tokens / (self._rows * self.length) if self._rows else 1.0

    def shard(self, num_shards: int, index: int) -> PackedDataset:
        """A dataset that packs every ``num_shards``-th document, from ``index`` on, or such a part of a stream."""
        check_int("num_shards", num_shards, 1)
        check_int("index", index, 0)
        documents = self.documents
        if is_streaming(documents):
            documents = split_stream(documents, num_shards, index)
        part = PackedDataset(
            documents, self.length, buffer=self.buffer, too_long=self.too_long, pad_token_id=self.pad_token_id
        )
        if not is_streaming(documents):
            part._stride, part._offset = self._stride * num_shards, self._offset + self._stride * index
        return part

    def set_epoch(self, epoch: int) -> None:
        """Tell the documents' dataset the epoch, if it can be told."""
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration stands, after the last row. It holds at most a row's documents."""
        state = self._state if self._loaded is None else self._loaded
        return {} if state is None else dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on after ``state``, which ``state_dict`` returned with the same documents."""
        self._loaded = dict(state)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        state, self._loaded = self._loaded or {}, None
        place, carried, skip = state.get("place"), state.get("carried", []), state.get("rows", 0)
        self._state = None
        documents = self._documents(place)
        while True:
            # A buffer is packed alike whenever it is read again, so the state is the buffer's start and a row in it.
            start = {"place": place, "carried": carried}
            buffer: list[Document] = [(list(tokens), list(labels)) for tokens, labels in carried]
            tokens = sum(len(document[0]) for document in buffer)
            while len(buffer) < self.buffer or tokens <= self.length:
                pieces = next(documents, None)
                if pieces is None:
                    break
                buffer += pieces
                tokens += sum(len(piece[0]) for piece in pieces)
            ended = len(buffer) < self.buffer or tokens <= self.length
            place = self._place()
            rows = pack([len(document[0]) for document in buffer], self.length)
            if not ended:  # the documents of the emptiest row may fill a later row
                emptiest = min(rows, key=lambda row: sum(len(buffer[i][0]) for i in row))
                rows.remove(emptiest)
                carried = [buffer[i] for i in emptiest]
            for done, row in enumerate(rows[skip:], start=skip + 1):
                self._state = {**start, "rows": done}
                yield self._row([buffer[i] for i in row])
            if ended:
                return
            skip = 0

    def _documents(self, place: Any) -> Iterator[list[Document]]:
        """The pieces of each document from ``place`` on, of the documents that this worker packs."""
        source: Any = self.documents
        stride, offset = self._stride, self._offset
        worker = get_worker_info()
        if worker is not None and not is_streaming(source):  # a streaming dataset deals to workers itself
            stride, offset = stride * worker.num_workers, offset + stride * worker.id
        examples: Iterator[Any]
        self._read = 0
        if self._asks_source:
            if place is None:
                rewind(source)
            else:
                source.load_state_dict(place)
            examples = iter(source)
        else:
            rewind(source)
            self._read = place or 0
            first = offset + stride * self._read
            if _has_items(source):
                examples = (source[i] for i in range(first, len(source), stride))
            else:
                examples = islice(iter(source), first, None, stride)
        for example in examples:
            self._read += 1
            yield self._pieces(example)

    def _place(self) -> Any:
        """Where the documents stand, for ``_documents``."""
        source: Any = self.documents
        return source.state_dict() if self._asks_source else self._read

    @property
    def _asks_source(self) -> bool:
        return is_streaming(self.documents) and resumes_exactly(self.documents)

    def _pieces(self, example: Mapping[str, Any]) -> list[Document]:
        """The documents of at most ``length`` tokens that an example becomes."""
        if not isinstance(example, Mapping) or "input_ids" not in example:
            raise ValueError("documents: expected dicts with 'input_ids'; tokenize the text first")
        tokens = _ints(example["input_ids"])
        labels = _ints(example["labels"]) if example.get("labels") is not None else tokens
        if len(labels) != len(tokens):
            raise ValueError(f"documents: a document has {len(tokens)} input_ids, but {len(labels)} labels")
        stop = min(len(tokens), self.length) if self.too_long == "truncate" else len(tokens)
        return [
            (tokens[i : min(i + self.length, stop)], labels[i : min(i + self.length, stop)])
            for i in range(0, stop, self.length)
        ]

    def _row(self, documents: list[Document]) -> dict[str, Tensor]:
        count = sum(len(tokens) for tokens, _ in documents)
        self._rows, self._tokens = self._rows + 1, self._tokens + count
        padding = self.length - count
        row = {
            "input_ids": [x for tokens, _ in documents for x in tokens] + [self.pad_token_id] * padding,
            "labels": [x for _, labels in documents for x in (IGNORE_INDEX, *labels[1:])] + [IGNORE_INDEX] * padding,
            "position_ids": [i for tokens, _ in documents for i in range(len(tokens))] + list(range(padding)),
            "attention_mask": [1] * count + [0] * padding,
        }
        return {name: torch.tensor(values) for name, values in row.items()}


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which of the documents of ``lengths`` tokens go into the same row of ``capacity`` tokens.

    Best fit decreasing, or first fit where that takes fewer rows.

    Returns:
        For each row the documents' indices, increasing. Rows are in the order of their first documents.
    """
    rows = _best_fit(lengths, sorted(range(len(lengths)), key=lambda i: -lengths[i]), capacity)
    if len(rows) * capacity - sum(lengths) >= capacity:  # fewer rows may do
        rows = min(rows, _first_fit(lengths, capacity), key=len)
    return sorted(sorted(row) for row in rows)


def _best_fit(lengths: Sequence[int], order: Iterable[int], capacity: int) -> list[list[int]]:
    """Each document, in this order, goes into the row with the least room that holds it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row) of the rows that are not full, increasing
    for i in order:
        at = bisect_left(room, (lengths[i], -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(i)
        if left > lengths[i]:
            insort(room, (left - lengths[i], row))
    return rows


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Each document goes into the first row that holds it."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i, length in enumerate(lengths):
        row = next((row for row, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(i)
        room[row] -= length
    return rows


def _has_items(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def _ints(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)
