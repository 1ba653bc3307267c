"""The text as bytes, and the batch of each step. Every rank makes the full batch and then takes its shard.

Shapes: ``n`` bytes of the text, ``b`` batch, ``s`` tokens of the full sequence.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ...mask import Mask
from .model import IGNORE_INDEX

MASKS = "causal, window:N, chunked:N, documents, documents:N, or several joined by +"
BATCH_BYTES = 32  # bytes per token while a batch is made: four int64 tensors
_FORM_FEED = b"\f"
_SKIPPED = {"build", "dist", "node_modules", "site-packages", "venv"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text.

    Attributes:
        name: the path of the file, for messages.
        data: the bytes, uint8 ``[n]``.
        starts: whether a document starts at a byte, bool ``[n]``.
    """

    name: str
    data: Tensor
    starts: Tensor

    @property
    def digest(self) -> int:
        """A checksum of the bytes."""
        return zlib.crc32(self.data.numpy().tobytes())

    def save(self, path: Path) -> None:
        """Write a text file from which ``read_corpus`` reads the same bytes and documents again."""
        edges = [*self.starts.nonzero().flatten().tolist(), len(self.data)]
        text = self.data.numpy().tobytes()
        documents = [text[a:b].removesuffix(_FORM_FEED) for a, b in pairwise(edges)]
        path.write_bytes(_FORM_FEED.join(documents))


def read_corpus(path: str | None) -> Corpus:
    """The text at ``path``; for None, the source files of this package.

    Documents end at form feeds, or at empty lines if the text has no form feed. Each source file is one document.

    Raises:
        ValueError: the file cannot be read, or has less than two bytes.
    """
    if path is None:
        files = _own_sources()
        text = _FORM_FEED.join(file.read_bytes().replace(_FORM_FEED, b"") for file in files)
        return _make_corpus(f"seqpar's own {len(files)} source files", text, _FORM_FEED)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror or error}; name a readable text file") from error
    if len(text) < 2:
        raise ValueError(f"--text {path}: {len(text)} bytes; expected at least 2")
    return _make_corpus(path, text, _FORM_FEED if _FORM_FEED in text else b"\n\n")


def _own_sources() -> list[Path]:
    """The README and the Python files of the repository. Without a repository, the Python files of the package."""
    package = Path(__file__).resolve().parents[2]
    root = package.parent
    if not (root / "pyproject.toml").exists():
        return sorted(package.rglob("*.py"))
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not any(part.startswith(".") or part in _SKIPPED for part in file.relative_to(root).parts)
    ]
    return [readme for readme in [root / "README.md"] if readme.exists()] + files


def _make_corpus(name: str, text: bytes, separator: bytes) -> Corpus:
    """The corpus of a text whose documents end with ``separator``."""
    parts = text.split(separator)
    lengths = [len(part) + len(separator) for part in parts[:-1]] + [len(parts[-1])]
    edges = torch.tensor([0, *lengths]).cumsum(0)
    starts = torch.zeros(len(text) + 1, dtype=torch.bool)
    starts[edges] = True
    return Corpus(name, torch.frombuffer(bytearray(text), dtype=torch.uint8), starts[:-1])


@dataclass(frozen=True)
class MaskChoice:
    """The mask that ``--mask`` names.

    Attributes:
        fixed: the part of the mask that is the same in every step.
        documents: whether tokens see only their own document. The documents differ from batch to batch.
        mean_document: the mean length of documents with random boundaries, in tokens; 0 for the documents of the text.
    """

    fixed: Mask
    documents: bool = False
    mean_document: int = 0

    @staticmethod
    def parse(text: str) -> MaskChoice:
        """The choice that ``--mask`` names.

        Raises:
            ValueError: ``text`` is not one of ``MASKS``.
        """
        fixed, documents, mean = Mask.causal(), False, 0
        for item in text.split("+"):
            name, _, number = item.strip().partition(":")
            missing = name in ("window", "chunked") and not number
            if missing or (number and not (number.isdigit() and int(number) >= 1)):
                raise ValueError(f"--mask {text}: {item!r} needs a number of tokens, at least 1, as in {name}:256")
            if name == "causal" and not number:
                continue
            if name == "window":
                fixed = fixed & Mask.sliding_window(int(number) - 1)  # a window of N counts the token itself
            elif name == "chunked":
                fixed = fixed & Mask.chunked(int(number))
            elif name == "documents":
                documents, mean = True, int(number or 0)
            else:
                raise ValueError(f"--mask {text}: {item!r} is not a mask of a language model; choose {MASKS}")
        return MaskChoice(fixed, documents, mean)


@dataclass(frozen=True, eq=False)
class Batch:
    """The full batch of one step, before it is sharded.

    Attributes:
        tokens: int64 ``[b, s]``.
        labels: int64 ``[b, s]``: the next token, or ``IGNORE_INDEX`` if the next token belongs to another document.
        mask: the mask of the full sequence.
        count: the number of labels that are not ``IGNORE_INDEX``.
    """

    tokens: Tensor
    labels: Tensor
    mask: Mask
    count: int


def make_batch(corpus: Corpus, choice: MaskChoice, batch: int, seq_len: int, seed: int, step: int) -> Batch:
    """The batch of a step.

    It depends on the arguments only, so a resumed run needs no state of a data loader. Each row starts at a random byte
    and continues at the start of the text after its end, so ``seq_len`` may be larger than the text.

    Args:
        corpus: the text.
        choice: the mask.
        batch: rows of the batch.
        seq_len: tokens of each row.
        seed: the seed of the run.
        step: the number of the step.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    first = torch.randint(len(corpus.data), (batch, 1), generator=generator)
    index = (first + torch.arange(seq_len + 1)) % len(corpus.data)  # [b, s + 1]
    text = corpus.data[index].long()
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].clone()  # [b, s]
    mask = choice.fixed
    if choice.documents:
        starts = corpus.starts[index]  # [b, s + 1]
        if choice.mean_document:
            starts = torch.rand(starts.shape, generator=generator) * choice.mean_document < 1
        labels[starts[:, 1:]] = IGNORE_INDEX
        mask = mask & Mask.documents([_boundaries(row[:-1]) for row in starts])
    return Batch(tokens, labels, mask, int((labels != IGNORE_INDEX).sum()))


def _boundaries(starts: Tensor) -> list[int]:
    """The cu_seqlens of a row from ``starts``, bool ``[s]``. The first token of a row always starts a document."""
    inner = starts.nonzero().flatten().tolist()
    return [*([] if inner[:1] == [0] else [0]), *inner, len(starts)]
