"""Packs documents into rows of a fixed length.

The documents are read into a buffer of limited size, so that a stream of any length can be packed while it is read. The
documents of a buffer are packed from the longest to the shortest. Each is put into the row with the least room that
still holds it.
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
Document = tuple[list[int], list[int]]  # the tokens and their labels, at most a row of them


class PackedDataset(IterableDataset[dict[str, Tensor]]):
    """Packs documents into rows of ``length`` tokens, for ``DataLoader(dataset, batch_size=...)``.

    A row is a dict of int64 tensors ``[length]``:

    * ``input_ids``.
    * ``labels``, not shifted. They are -100 for padding, and for the first token of each document, so that the last
      token of a document does not predict the first token of the next.
    * ``position_ids``, which restart at 0 at each document.
    * ``attention_mask``, which is 0 for the padding at the end of the row and 1 elsewhere.

    The workers of a data loader pack different documents, as do the dp ranks under ``ShardedLoader``. ``state_dict``
    and ``load_state_dict`` resume after the last row, also in the workers of torchdata's ``StatefulDataLoader``.

    Args:
        documents: dicts with ``input_ids``, and with ``labels`` if these differ from ``input_ids``. Other entries are
            ignored. It can be a list, a dataset of Hugging Face (streaming too), or another iterable that gives the
            same documents in each iteration.
        length: the number of tokens of a row.
        buffer: the number of documents that are packed at a time. A larger buffer leaves less padding.
        too_long: how to pack a document of more than ``length`` tokens. "split": as several documents, of ``length``
            tokens each except for the last. "truncate": as a document of its first ``length`` tokens.
        pad_token_id: the token that fills the end of a row.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has the wrong value. An iteration raises it for a document without ``input_ids``, or
            with another number of ``labels``.

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
                f"documents={type(documents).__name__}: expected an iterable that can be iterated several times, such "
                "as a list or a dataset"
            )
        check_int("length", length, 1)
        check_int("buffer", buffer, 1)
        check_choice("too_long", too_long, get_args(TooLong))
        check_int("pad_token_id", pad_token_id)
        self.documents, self.length, self.buffer = documents, length, buffer
        self.too_long, self.pad_token_id = too_long, pad_token_id
        self._stride, self._offset = 1, 0  # every ``_stride``-th document is packed, from ``_offset`` on
        self._read = 0  # the number of documents that the current iteration has read
        self._state: dict[str, Any] | None = None  # the position of the current iteration
        self._loaded: dict[str, Any] | None = None  # the state that the next iteration resumes from
        self._rows = self._tokens = 0  # the number of rows made so far, and of their tokens that are not padding

    @property
    def fill_rate(self) -> float:
        """The fraction of tokens that are not padding, in all rows made in this process; 1.0 before the first row."""
        return self._tokens / (self._rows * self.length) if self._rows else 1.0

    def shard(self, num_shards: int, index: int) -> PackedDataset:
        """A dataset that packs one of ``num_shards`` disjoint parts of the documents.

        Of documents that are not streamed, it packs every ``num_shards``-th one, from document ``index`` on. A
        streaming dataset of Hugging Face is split by ``split_dataset_by_node``.
        """
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
        """Call ``set_epoch`` of the documents' dataset, if it has one."""
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the iteration after the last row. It contains at most the documents of one row."""
        state = self._state if self._loaded is None else self._loaded
        return {} if state is None else dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from ``state``, which ``state_dict`` returned with the same documents."""
        self._loaded = dict(state)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the rows, from the loaded state on if there is one."""
        state, self._loaded = self._loaded or {}, None
        position, carried, rows_to_skip = state.get("place"), state.get("carried", []), state.get("rows", 0)
        self._state = None
        documents = self._read_documents(position)
        while True:
            # The same documents are always packed in the same way. The state therefore consists of the position and the
            # carried documents with which the buffer starts, and the number of rows made from the buffer.
            start = {"place": position, "carried": carried}
            buffer: list[Document] = [(list(tokens), list(labels)) for tokens, labels in carried]
            ended = self._fill(buffer, documents)
            position = self._position()
            rows = pack([len(tokens) for tokens, _ in buffer], self.length)
            if not ended:  # keep the documents of the emptiest row: the next buffer may fill it
                emptiest = min(rows, key=lambda row: sum(len(buffer[i][0]) for i in row))
                rows.remove(emptiest)
                carried = [buffer[i] for i in emptiest]
            for done, row in enumerate(rows[rows_to_skip:], start=rows_to_skip + 1):
                self._state = {**start, "rows": done}
                yield self._row([buffer[i] for i in row])
            if ended:
                return
            rows_to_skip = 0

    def _fill(self, buffer: list[Document], documents: Iterator[list[Document]]) -> bool:
        """Append ``documents`` to ``buffer`` until it is full. Returns whether the documents ended before that.

        A full buffer has ``self.buffer`` documents, and more tokens than a row.
        """
        count = sum(len(tokens) for tokens, _ in buffer)
        while len(buffer) < self.buffer or count <= self.length:
            pieces = next(documents, None)
            if pieces is None:
                return True
            buffer += pieces
            count += sum(len(tokens) for tokens, _ in pieces)
        return False

    def _read_documents(self, position: Any) -> Iterator[list[Document]]:
        """For each document that this worker packs, from ``position`` on: the documents that it is split into."""
        source: Any = self.documents
        stride, offset = self._stride, self._offset
        worker = get_worker_info()
        if worker is not None and not is_streaming(source):  # a streaming dataset splits itself over the workers
            stride, offset = stride * worker.num_workers, offset + stride * worker.id
        examples: Iterator[Any]
        self._read = 0
        if self._source_resumes:
            if position is None:
                rewind(source)
            else:
                source.load_state_dict(position)
            examples = iter(source)
        else:
            rewind(source)
            self._read = position or 0
            first = offset + stride * self._read
            if _has_items(source):
                examples = (source[i] for i in range(first, len(source), stride))
            else:
                examples = islice(iter(source), first, None, stride)
        for example in examples:
            self._read += 1
            yield self._pieces(example)

    def _position(self) -> Any:
        """The position of the next document, for ``_read_documents``."""
        source: Any = self.documents
        return source.state_dict() if self._source_resumes else self._read

    @property
    def _source_resumes(self) -> bool:
        """Whether the dataset of the documents saves and loads its own state."""
        return is_streaming(self.documents) and resumes_exactly(self.documents)

    def _pieces(self, example: Mapping[str, Any]) -> list[Document]:
        """The documents of at most ``length`` tokens that ``example`` is split into.

        Raises:
            ValueError: ``example`` has no ``input_ids``, or another number of ``labels``.
        """
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
        """The row that contains ``documents`` and, at its end, padding."""
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
    """Assign documents to rows of ``capacity`` tokens.

    The algorithm is best fit decreasing, or first fit if that needs fewer rows.

    Args:
        lengths: the number of tokens of each document, at most ``capacity``.
        capacity: the number of tokens of a row.

    Returns:
        For each row, the increasing indices of its documents. The rows are ordered by their first documents.
    """
    rows = _best_fit(lengths, sorted(range(len(lengths)), key=lambda i: -lengths[i]), capacity)
    if len(rows) * capacity - sum(lengths) >= capacity:  # the padding fills a row, so that fewer rows may be possible
        rows = min(rows, _first_fit(lengths, capacity), key=len)
    return sorted(sorted(row) for row in rows)


def _best_fit(lengths: Sequence[int], order: Iterable[int], capacity: int) -> list[list[int]]:
    """Put each document, in the given order, into the row with the least room that still holds it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row) of each row that is not full, in increasing order
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
    """Put each document into the first row that has room for it."""
    rows: list[list[int]] = []
    room: list[int] = []  # the tokens left in each row
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
