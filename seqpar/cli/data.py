"""Text as bytes, and the batches of each step. Every rank makes the same batch and keeps its shard."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..mask import Mask
from .model import IGNORED

MASKS = "causal, window:N, chunked:N, documents, documents:N, or several joined by +"
_FORM_FEED = b"\f"
_SKIPPED = {"build", "dist", "node_modules", "site-packages", "venv"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text.

    Attributes:
        data: uint8 ``[length]``.
        starts: bool ``[length]``, True where a document starts.
    """

    name: str
    data: Tensor
    starts: Tensor

    @property
    def digest(self) -> int:
        return zlib.crc32(self.data.numpy().tobytes())

    def save(self, path: Path) -> None:
        """Write it as a text file that ``read_corpus`` reads back, documents included."""
        edges = [*self.starts.nonzero().flatten().tolist(), len(self.data)]
        text = self.data.numpy().tobytes()
        documents = [text[a:b].removesuffix(_FORM_FEED) for a, b in pairwise(edges)]
        path.write_bytes(_FORM_FEED.join(documents))


def read_corpus(path: str | None) -> Corpus:
    """The text at ``path``; by default this package's own sources.

    A text's documents end at form feeds, or, where it has none, at empty lines. Of the sources each file is one.

    Raises:
        ValueError: a file that cannot be read or holds less than two bytes.
    """
    if path is None:
        files = _own_sources()
        text = _FORM_FEED.join(file.read_bytes().replace(_FORM_FEED, b"") for file in files)
        return _corpus(f"seqpar's own {len(files)} source files", text, _FORM_FEED)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror or error}; name a readable text file") from error
    if len(text) < 2:
        raise ValueError(f"--text {path}: {len(text)} bytes; at least 2 are needed")
    return _corpus(path, text, _FORM_FEED if _FORM_FEED in text else b"\n\n")


def _own_sources() -> list[Path]:
    """README and Python files of the repository this package lies in, or else of the package."""
    package = Path(__file__).resolve().parents[1]
    root = package.parent
    if not (root / "pyproject.toml").exists():
        return sorted(package.rglob("*.py"))
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not any(part.startswith(".") or part in _SKIPPED for part in file.relative_to(root).parts)
    ]
    return [readme for readme in [root / "README.md"] if readme.exists()] + files


def _corpus(name: str, text: bytes, separator: bytes) -> Corpus:
    """A document ends with its separator."""
    parts = text.split(separator)
    lengths = [len(part) + len(separator) for part in parts[:-1]] + [len(parts[-1])]
    edges = torch.tensor([0, *lengths]).cumsum(0)
    starts = torch.zeros(len(text) + 1, dtype=torch.bool)
    starts[edges] = True
    return Corpus(name, torch.frombuffer(bytearray(text), dtype=torch.uint8), starts[:-1])


@dataclass(frozen=True)
class MaskChoice:
    """The mask asked for on the command line; documents depend on the batch."""

    fixed: Mask
    documents: bool = False
    mean_document: int = 0  # tokens of a random document; 0: the text's own documents

    @staticmethod
    def parse(text: str) -> MaskChoice:
        """
        Raises:
            ValueError: a name or number that is none of ``MASKS``.
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
                fixed = fixed & Mask.sliding_window(int(number) - 1)  # with the token itself
            elif name == "chunked":
                fixed = fixed & Mask.chunked(int(number))
            elif name == "documents":
                documents, mean = True, int(number or 0)
            else:
                raise ValueError(f"--mask {text}: {item!r} is not a mask of a language model; choose {MASKS}")
        return MaskChoice(fixed, documents, mean)


@dataclass(frozen=True, eq=False)
class Batch:
    """One step's data, whole.

    Attributes:
        tokens, labels: int64 ``[batch, seq_len]``; the label of a token is the next one, or -100 where that belongs
            to another document.
        count: labels that are not -100.
    """

    tokens: Tensor
    labels: Tensor
    mask: Mask
    count: int


def make_batch(corpus: Corpus, choice: MaskChoice, batch: int, seq_len: int, seed: int, step: int) -> Batch:
    """The batch of a step: a function of its arguments, so that a resumed run needs no state of a data loader.

    Rows start anywhere; the text is taken as a circle, so that any ``seq_len`` will do.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    first = torch.randint(len(corpus.data), (batch, 1), generator=generator)
    index = (first + torch.arange(seq_len + 1)) % len(corpus.data)
    text = corpus.data[index].long()
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].clone()
    mask = choice.fixed
    if choice.documents:
        starts = corpus.starts[index]
        if choice.mean_document:
            starts = torch.rand(starts.shape, generator=generator) * choice.mean_document < 1
        labels[starts[:, 1:]] = IGNORED
        mask = mask & Mask.documents([_boundaries(row[:-1]) for row in starts])
    return Batch(tokens, labels, mask, int((labels != IGNORED).sum()))


def _boundaries(starts: Tensor) -> list[int]:
    inner = starts.nonzero().flatten().tolist()
    return [*([] if inner[:1] == [0] else [0]), *inner, len(starts)]
