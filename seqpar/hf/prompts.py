"""Sequences that begin with the same tokens: these tokens are stored once, and the sequences attend as a tree.

A token of two sequences is shared if both have the same tokens up to it, at the same positions, and it predicts the
same label in both. The last token of a prompt predicts another token in each answer, so that each answer begins with a
copy of it. So every token has one label, and the outputs of a shared token belong to all sequences that have it.

Shapes: rows of seq tokens; n tokens of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..masks.mask import Mask
from ..masks.runs import MOST_PARTS

_NO_LABEL = -100
# The fewest tokens that one more level of branches saves. Each level is one more call of the attention kernel, whose
# tiles have 128 keys: answers that begin with a few equal words would cost more than they save.
LEAST = 128
PROMPTS = "seqpar_prompts"  # the entry of a batch that has its ``SharedPrompts``

Array = NDArray[np.int64]
Ends = tuple[int, int]  # the first token of a sequence and one past its last, as indices of all tokens


@dataclass(frozen=True, eq=False)
class TokenTree:
    """Which tokens of a batch are stored, and as which tree.

    Attributes:
        mask: the ``Mask.tree`` of the segments.
        stored: int64 ``[n]``, which token of the batch each token of the tree is, as an index of ``rows * seq`` tokens.
        places: int64 ``[rows, seq]``, for each token of the batch its index in the tree; -1 for padding.
        copies: int64 ``[1, n]``, for how many tokens of the batch each token of the tree stands.
        windows: whether layers with windows can attend to it.
    """

    mask: Mask
    stored: Tensor
    places: Tensor
    copies: Tensor
    windows: bool

    @staticmethod
    def of(keys: Tensor, spans: Sequence[Ends], windows: bool) -> TokenTree:
        """The tree of the sequences at ``spans``.

        Args:
            keys: integers ``[rows, seq, columns]``. Tokens with other keys are not shared.
            spans: the first token of each sequence and one past its last, as indices of ``rows * seq`` tokens.
            windows: whether layers have windows that are shorter than a sequence. A tree then has at most
                ``MOST_PARTS`` leaves, and what more sequences share is stored several times.
        """
        tree = _Growing(keys.flatten(0, 1).cpu().numpy())
        tree.grow([span for span in spans if span[0] < span[1]], 0, -1, 0, MOST_PARTS if windows else None)
        stored = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *tree.stored]))
        places = torch.from_numpy(tree.places).view(keys.shape[:2])
        copies = torch.bincount(places[places >= 0], minlength=len(stored))[None]
        return TokenTree(Mask.tree(tree.parents, [*map(len, tree.stored)]), stored, places, copies, windows)

    def store(self, x: Tensor) -> Tensor:
        """The rows ``x [rows, seq, ...]`` of the tokens of the tree: ``[1, n, ...]``."""
        return x.flatten(0, 1).index_select(0, self.stored.to(x.device))[None]


def unshare(x: Tensor, places: Tensor) -> Tensor:
    """For each of the ``places [rows, seq]`` the row of ``x [1, n, ...]`` there, and 0 where the place is -1."""
    at = places.to(x.device)
    rows: Tensor = x[0].index_select(0, at.clamp(min=0).flatten()).unflatten(0, at.shape)
    return rows.masked_fill((at < 0).view(*at.shape, *[1] * (x.dim() - 2)), 0)


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """Rollouts whose common beginnings are stored once, in one row of n tokens. ``share_prompts`` makes it.

    Attributes:
        input_ids: int64 ``[1, n]``.
        position_ids: int64 ``[1, n]``, positions along each rollout.
        labels: int64 ``[1, n]``, the token that follows each token; -100 where no log-probability is wanted.
        places: int64 ``[rollouts, tokens]``, for each wanted token of each rollout the token of the row that predicts
            it; -1 behind the end of a shorter rollout.
        tree: the segments of the row.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    places: Tensor
    tree: TokenTree

    @property
    def mask(self) -> Mask:
        """What each token of the row sees, for ``seqpar.attention``."""
        return self.tree.mask

    @property
    def counted(self) -> Tensor:
        """Where rollouts have tokens, bool ``[rollouts, tokens]``."""
        return self.places >= 0

    def to(self, device: torch.device | str) -> SharedPrompts:
        """The same with its tensors on ``device``. The tree stays on the host, where attention is planned."""
        names = ("input_ids", "position_ids", "labels", "places")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def batch(self) -> dict[str, Any]:
        """The arguments of a call of a parallelized model, whose outputs are those of the row."""
        row = {"input_ids": self.input_ids, "position_ids": self.position_ids, "shift_labels": self.labels}
        return {**row, PROMPTS: self}

    def unshare(self, x: Tensor) -> Tensor:
        """Values of the row's tokens, in the order of the rollouts. Differentiable: gradients of shared tokens add.

        Args:
            x: ``[1, n, ...]``, for each token of the row what it predicts: log-probabilities, entropies, hidden states.

        Returns:
            ``[rollouts, tokens, ...]``, 0 behind the end of a shorter rollout.

        Raises:
            ValueError: ``x`` has another shape.
        """
        if tuple(x.shape[:2]) != tuple(self.labels.shape):
            raise ValueError(
                f"x: shape {tuple(x.shape)}; expected {tuple(self.labels.shape)} first, for all tokens of the row; "
                "gather a rank's own by sharding.unshard(x)"
            )
        return unshare(x, self.places)


def share_prompts(
    sequences: Sequence[Any], answers: Sequence[Sequence[Any]] | None = None, *, windows: bool = False
) -> SharedPrompts:
    """Store what sequences have in common at their beginning once, as one row of tokens.

    A prompt and its answers become a prompt and branches. Each sequence attends, and is scored, as if it were alone.
    Equal answers are stored once, and remain rollouts of their own. Common beginnings of answers, and of prompts, are
    stored once too where that saves 128 tokens, so that an agent's episode can be given as whole sequences.

    Args:
        sequences: the tokens of each prompt, as lists of ints or int64 tensors ``[length]``. Without ``answers``: of
            each whole sequence.
        answers: for each prompt its answers, likewise. Only their tokens are labels.
        windows: whether layers of the model have sliding windows that are shorter than a sequence. Prompts with more
            than 16 answers are then stored once for each 16 of them.

    Returns:
        A ``SharedPrompts``. Its rollouts are the answers, prompt after prompt, or the sequences. Its tokens per
        rollout are those of the answer, or all but the first of the sequence.

    Raises:
        TypeError: a sequence is not a list of ints.
        ValueError: there are no sequences, one is empty, or there are answers for another number of prompts.

    Example:
        >>> rollouts = seqpar.hf.share_prompts([[5, 6, 7]], [[[8, 9], [8, 4, 2]]])
        >>> log_probs = seqpar.hf.token_log_probs(model, rollouts)  # [2, 3]
    """
    heads = [_tokens(f"sequences[{i}]", x) for i, x in enumerate(sequences)]
    if not heads or not all(map(len, heads)):
        raise ValueError(f"sequences: lengths {[*map(len, heads)]}; give at least one, each of at least one token")
    if answers is None:
        first, rows = [1] * len(heads), heads
    else:
        if len(answers) != len(heads):
            raise ValueError(f"answers: for {len(answers)} prompts, but there are {len(heads)}; give a list for each")
        pairs = [
            (head, _tokens(f"answers[{i}][{j}]", x))
            for i, (head, of_head) in enumerate(zip(heads, answers, strict=True))
            for j, x in enumerate(of_head)
        ]
        if not pairs:
            raise ValueError("answers: there are none; give at least one")
        first, rows = [len(head) for head, _ in pairs], [torch.cat(pair) for pair in pairs]
    ids = pad_sequence(rows, batch_first=True)  # [rollouts, seq]
    position = torch.arange(ids.shape[1], device="cpu").expand_as(ids)
    begin, end = torch.tensor(first, device="cpu")[:, None], torch.tensor([*map(len, rows)], device="cpu")[:, None]
    predicts = (position >= begin - 1) & (position < end - 1)
    labels = torch.where(predicts, ids.roll(-1, 1), _NO_LABEL)
    spans = [(i * ids.shape[1], i * ids.shape[1] + len(row)) for i, row in enumerate(rows)]
    tree = TokenTree.of(torch.stack([ids, position, labels], -1), spans, windows)
    at = begin - 1 + torch.arange(int((end - begin).max()), device="cpu")  # [rollouts, tokens]
    places = torch.where(at < end - 1, tree.places.gather(1, at.clamp(max=ids.shape[1] - 1)), -1)
    return SharedPrompts(tree.store(ids), tree.store(position), tree.store(labels), places, tree)


def _tokens(name: str, x: Any) -> Tensor:
    tokens = torch.as_tensor(x, device="cpu") if len(x) else torch.empty(0, dtype=torch.int64, device="cpu")
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"{name}: {tokens.dtype} of shape {tuple(tokens.shape)}; expected the ids of its tokens, ints")
    return tokens.long()


class _Growing:
    """A tree while it is made. ``keys`` is int ``[tokens, columns]``."""

    def __init__(self, keys: NDArray[Any]) -> None:
        self.keys = keys
        self.parents: list[int] = []
        self.stored: list[Array] = []  # the tokens of each segment
        self.places: Array = np.full(len(keys), -1, dtype=np.int64)
        self.tokens = 0

    def grow(self, spans: list[Ends], done: int, parent: int, level: int, leaves: int | None) -> None:
        """Add the segments below ``parent`` of the sequences ``spans``, whose first ``done`` tokens are in the tree."""
        # A query sees an interval of keys for each level of branches. At the last level nothing is shared.
        groups = [[span] for span in spans] if level == MOST_PARTS - 1 else self._groups(spans, done, done, parent < 0)
        below = level + (parent < 0 or len(groups) > 1)
        for group in groups:
            for i in range(0, len(group), leaves or len(group)):
                self._add(group[i : i + (leaves or len(group))], done, parent, below)

    def _groups(self, spans: list[Ends], done: int, at: int, roots: bool) -> list[list[Ends]]:
        """The sequences that share a segment, which begins behind their first ``done`` tokens. They agree up to ``at``.

        A segment with branches below it that saves less than ``LEAST`` tokens is made only of ``roots``, and if there
        are no other branches. Otherwise each of its branches begins with a copy of it.
        """
        by_key: dict[Any, list[Ends]] = {}
        for span in spans:
            key = tuple(self.keys[span[0] + at].tolist()) if span[0] + at < span[1] else None  # None: it ends here
            by_key.setdefault(key, []).append(span)
        groups = []
        for group in by_key.values():
            end = self._common(group, at)
            inside = [group] if self._equal(group, end) else self._groups(group, done, end, False)
            pays = (len(inside) - 1) * (end - done) >= LEAST or (roots and all(self._equal(x, end) for x in inside))
            groups += [group] if pays else inside
        return groups

    def _equal(self, spans: list[Ends], at: int) -> bool:
        """Whether the sequences, which agree up to ``at``, are equal."""
        length = self._common(spans, at)
        return all(stop - start == length for start, stop in spans)

    def _common(self, spans: list[Ends], done: int) -> int:
        """How many tokens the sequences have in common. They agree up to ``done``."""
        keys, start, length = self.keys, spans[0][0], min(stop - start for start, stop in spans)
        for other, _ in spans[1:]:
            at, step = done, 256
            while at < length:  # in longer and longer pieces, so that the cost is that of the common tokens
                end = min(at + step, length)
                same = (keys[start + at : start + end] == keys[other + at : other + end]).all(1)
                at, step, length = end, 2 * step, length if same.all() else at + int(same.argmin())
        return length

    def _add(self, spans: list[Ends], done: int, parent: int, level: int) -> None:
        start, length = spans[0][0], self._common(spans, done)
        new = np.arange(self.tokens, self.tokens + length - done)
        for first, _ in spans:
            self.places[first + done : first + length] = new
        segment = len(self.parents)
        self.parents.append(parent)
        self.stored.append(np.arange(start + done, start + length))
        self.tokens += len(new)
        longer = [span for span in spans if span[1] - span[0] > length]
        if longer:
            self.grow(longer, length, segment, level, None)
