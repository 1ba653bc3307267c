"""Masks as one interval of visible keys per query.

Every mask here has the same form: the query at global position ``i`` sees the keys at global positions
``lo(i) <= j < hi(i)``, and neither ``lo`` nor ``hi`` ever decreases in ``i``. Full, causal, sliding-window,
packed-document, prefix-LM, chunked and padded attention have this form, and so does every intersection of them.
A mask therefore needs two integers per query instead of a row of a dense matrix. ``runs.py`` describes them by even
fewer:

    documents [0, 3, 5] & sliding_window(1)

            keys 0 1 2 3 4     lo  hi
    query 0      x . . . .      0   1
    query 1      x x . . .      0   2
    query 2      . x x . .      1   3
    query 3      . . . x .      3   4
    query 4      . . . x x      3   5

Shapes: n queries; batch is the number of batch rows with masks of their own (1 if all rows share one). Positions are
int64.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from itertools import pairwise
from operator import and_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import check_bool, check_int
from .compile_types import Opaque, register_reference_type
from .runs import EVERYTHING, UNBOUNDED, Interval, Runs

_CACHED_LENGTHS = 8


class _Rule(ABC):
    """One constraint of a mask. Rules are hashable values, so that schedules can be cached by mask."""

    @property
    def batch(self) -> int:
        """The number of batch rows with intervals of their own; 1 if all rows share them."""
        return 1

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """For each batch row, the positions at which a sequence begins according to the rule (see ``Mask.starts``)."""
        return ((0,),)

    def check_length(self, seq_len: int) -> None:  # noqa: B027 (most rules fit every length)
        """Raise a ValueError if the rule does not fit a sequence of ``seq_len`` tokens."""

    @abstractmethod
    def runs(self, row: int, seq_len: int) -> Runs:
        """The intervals of batch row ``row``, at least for the queries below ``seq_len``."""


@dataclass(frozen=True)
class _SlidingWindow(_Rule):
    left: int
    right: int

    def runs(self, row: int, seq_len: int) -> Runs:
        hi, hi_step = (UNBOUNDED, 0) if self.right < 0 else (self.right + 1, 1)
        if self.left < 0:
            return Runs.of([0], 0, 0, hi, hi_step)
        return Runs.of([0, self.left], 0, [0, 1], [hi, hi + self.left * hi_step], hi_step)


@dataclass(frozen=True)
class _Documents(_Rule):
    boundaries: tuple[tuple[int, ...], ...]  # by batch row
    causal: bool
    padding: bool  # whether tokens may follow the last boundary

    @property
    def batch(self) -> int:
        return len(self.boundaries)

    def check_length(self, seq_len: int) -> None:
        for row, boundaries in enumerate(self.boundaries):
            last = boundaries[-1]
            if last == seq_len or (last < seq_len and self.padding):
                continue
            where = f" of batch row {row}" if self.batch > 1 else ""
            fix = ", or padding=True if the tokens after it are padding" if last < seq_len else ""
            raise ValueError(
                f"cu_seqlens: the last boundary{where} is {last}, but the sequence has {seq_len} tokens; pass the "
                f"boundaries of the whole sequence, in global positions{fix}"
            )

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        return self.boundaries

    def runs(self, row: int, seq_len: int) -> Runs:
        start = np.asarray(self.boundaries[row], dtype=np.int64)
        stop = np.append(start[1:], start[-1])  # the padding after the last boundary sees nothing
        if not self.causal:
            return Runs.of(start, start, 0, stop, 0)
        tokens = stop > start
        return Runs.of(start, start, 0, start + tokens, tokens)


@dataclass(frozen=True)
class _CausalBlocks(_Rule):
    blocks: tuple[tuple[tuple[int, int], ...], ...]  # by batch row: (first token, one past the last), increasing
    window: int | None = None

    @property
    def batch(self) -> int:
        return len(self.blocks)

    def runs(self, row: int, seq_len: int) -> Runs:
        # One run inside each block, and one run from its end to the next block.
        spans = np.asarray(self.blocks[row], dtype=np.int64).reshape(-1, 2)  # [blocks, 2]
        start = np.append(0, spans)
        step = np.append(1, np.tile([0, 1], len(spans)))
        hi = np.append(1, np.stack([spans[:, 1], spans[:, 1] + 1], 1))
        if self.window is None:
            return Runs.of(start, 0, 0, hi, step)
        # A run ends wherever the first key of the window becomes position 0, or the first token of its block.
        left = self.window - 1
        starts = np.unique(np.concatenate([start, [left], np.minimum(spans[:, 0] + left, spans[:, 1])]))
        run = np.searchsorted(start, starts, side="right") - 1
        block = np.append(UNBOUNDED, np.repeat(spans[:, 0], 2))[run]  # the first token of the block
        block[step[run] == 1] = UNBOUNDED  # outside blocks
        lo = np.minimum(np.maximum(starts - left, 0), block)
        hi = hi[run] + step[run] * (starts - start[run])
        return Runs.of(starts, lo, (starts >= left) & (lo < block), hi, step[run])


@dataclass(frozen=True)
class _PrefixLM(_Rule):
    prefix_len: tuple[int, ...]  # by batch row

    @property
    def batch(self) -> int:
        return len(self.prefix_len)

    def runs(self, row: int, seq_len: int) -> Runs:
        prefix = max(1, self.prefix_len[row])
        return Runs.of([0, prefix - 1], 0, 0, prefix, [0, 1])


@dataclass(frozen=True)
class _Chunked(_Rule):
    size: int
    causal: bool
    origins: tuple[tuple[int, ...], ...]  # by batch row: increasing, the first one 0

    @property
    def batch(self) -> int:
        return len(self.origins)

    def runs(self, row: int, seq_len: int) -> Runs:
        origins = [origin for origin in self.origins[row] if origin < seq_len] or [0]
        following = [*origins[1:], next((o for o in self.origins[row] if o >= seq_len), UNBOUNDED)]
        chunks = [np.arange(o, max(o + 1, min(f, seq_len)), self.size) for o, f in zip(origins, following, strict=True)]
        start = np.concatenate(chunks)
        if self.causal:
            return Runs.of(start, start, 0, start + 1, 1)
        end = np.repeat(following, [len(chunk) for chunk in chunks])
        return Runs.of(start, start, 0, np.minimum(start + self.size, end), 0)


@dataclass(frozen=True)
class _Padding(_Rule):
    begin: tuple[int, ...]  # by batch row: the first token
    end: tuple[int, ...]  # by batch row: one past the last token

    @property
    def batch(self) -> int:
        return len(self.begin)

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        return tuple((start,) for start in self.begin)

    def runs(self, row: int, seq_len: int) -> Runs:
        start, stop = self.begin[row], self.end[row]
        # Padding sees nothing: lo == hi == start before the tokens, lo == hi == stop after them. Neither decreases.
        return Runs.of([0, start, stop], [start, start, stop], 0, [start, stop, stop], 0)


# A compiled function depends on the kinds of rules, not on the boundaries of documents.
@register_reference_type(lambda mask: [mask.is_local], reads=["is_local"])
@dataclass(frozen=True)
class Mask(Opaque):
    """Which keys each query sees. Make masks with the constructors below and combine them with ``&``.

    A mask is immutable, hashable and comparable. It holds no tensors and does not depend on how the sequence is
    sharded. Positions are always *global*.

    Examples:
        >>> Mask.causal() & Mask.sliding_window(1023)  # the last 1,024 tokens, the query's own included
    """

    rules: tuple[_Rule, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)
    _runs: dict[int, tuple[Runs, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)
    # Plans and layer masks that have been computed from this mask. They are freed and pickled together with it.
    plans: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        # Each layer looks the mask up in caches. Hashing thousands of document boundaries each time would be slow.
        object.__setattr__(self, "_hash", hash(self.rules))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def checksum(self) -> int:
        """A checksum of the rules, by which ranks compare their masks."""
        return zlib.crc32(repr(self.rules).encode())

    @staticmethod
    def full() -> Mask:
        """Every query sees every key."""
        return Mask()

    @staticmethod
    def causal(blocks: Sequence[Any] | None = None, window: int | None = None) -> Mask:
        """The query at ``i`` sees the keys ``j <= i``; inside a block, all keys of the block too.

        Args:
            blocks: pairs (first token, one past the last), increasing and without overlap, or a list of such lists,
                one for each batch row. The tokens of one image are such a block in Gemma 3.
            window: the number of keys up to its own that a query sees, besides the keys of its block.

        Raises:
            TypeError: a position is not an int.
            ValueError: blocks overlap, decrease or are negative, or the window is below 1.
        """
        if window is not None:
            check_int("causal window", window, 1)
        if blocks is None:
            return Mask((_SlidingWindow(-1 if window is None else window - 1, 0),))
        return Mask((_CausalBlocks(_checked_blocks(blocks), window),))

    @staticmethod
    def sliding_window(left: int, right: int = 0) -> Mask:
        """The query at ``i`` sees the keys ``i - left <= j <= i + right`` (flash-attn's ``window_size``).

        Args:
            left: keys visible before the query; -1 is unlimited.
            right: keys visible after the query; -1 is unlimited.

        Raises:
            TypeError: a side is not an int.
            ValueError: a side is below -1.
        """
        for name, side in (("left", left), ("right", right)):
            check_int(f"sliding_window {name}", side)
            if side < -1:
                raise ValueError(f"sliding_window {name}={side}: use a width >= 0, or -1 for unlimited")
        return Mask((_SlidingWindow(left, right),)) if (left, right) != (-1, -1) else Mask()

    @staticmethod
    def documents(cu_seqlens: Any, causal: bool = True, padding: bool = False) -> Mask:
        """Packed documents: a query sees only keys of its own document.

        Args:
            cu_seqlens: int ``[docs + 1]``, the documents' boundaries in global positions of the whole sequence, not of
                a shard: 0 first, never decreasing, the sequence's length last. A tensor or a sequence of ints, or a
                list of those, one for each batch row. A CUDA tensor is copied to the host once, here.
            causal: inside a document, a query sees only the keys up to itself.
            padding: whether the last boundary may be smaller than the sequence's length. Tokens after it are padding:
                they see nothing and no query sees them. Otherwise attention raises an error for such boundaries.

        Raises:
            TypeError: the boundaries are not integers, or another argument is not a bool.
            ValueError: the boundaries decrease or do not start at 0.
        """
        check_bool("documents causal", causal)
        check_bool("documents padding", padding)
        return Mask((_Documents(document_boundaries(cu_seqlens), causal, padding),))

    @staticmethod
    def prefix_lm(prefix_len: int | Sequence[int] | Tensor) -> Mask:
        """Every query sees the first ``prefix_len`` keys, and the rest causally (T5's prefix LM).

        Args:
            prefix_len: one int, or one for each batch row.

        Raises:
            TypeError: a length is not an int.
            ValueError: a length is negative.
        """
        lengths = _ints("prefix_len", prefix_len)
        if not lengths or min(lengths) < 0:
            raise ValueError(f"prefix_len={_short(lengths)}: give lengths >= 0, one int or one for each batch row")
        return Mask((_PrefixLM(lengths),))

    @staticmethod
    def chunked(size: int, causal: bool = True, starts: Any = None) -> Mask:
        """The sequence is divided into chunks of ``size`` tokens; a query sees only keys of its own chunk.

        These are the local layers of Llama 4.

        Args:
            size: tokens in a chunk.
            causal: inside a chunk, a query sees only the keys up to itself.
            starts: positions at which a new chunk starts even if the last one is not full, such as the starts of packed
                documents: a sequence of ints or an integer tensor, or a list of those, one for each batch row.
                Position 0 always starts a chunk.

        Raises:
            TypeError: ``size`` or a start is not an int, or ``causal`` is not a bool.
            ValueError: ``size`` is below 1, or a start is negative.
        """
        check_int("chunked size", size)
        check_bool("chunked causal", causal)
        if size < 1:
            raise ValueError(f"chunked size={size}: a chunk holds at least 1 token")
        rows = _batch_rows("chunked starts", () if starts is None else starts)
        for row in rows:
            if row and min(row) < 0:
                raise ValueError(f"chunked starts={_short(row)}: give positions >= 0")
        return Mask((_Chunked(size, causal, tuple(tuple(sorted({0, *row})) for row in rows)),))

    @staticmethod
    def padding(starts: int | Sequence[int] | Tensor, stops: int | Sequence[int] | Tensor | None = None) -> Mask:
        """The positions ``start <= i < stop`` hold tokens; the others see nothing and no query sees them.

        Args:
            starts: the position of the first token: one int, or one for each batch row.
            stops: one past the position of the last token, likewise. None: the end of the sequence.

        Raises:
            TypeError: a position is not an int.
            ValueError: a start is negative, a stop lies before its start, or the numbers of batch rows differ.
        """
        begin = _ints("padding starts", starts)
        end = (UNBOUNDED,) if stops is None else _ints("padding stops", stops)
        rows = max(len(begin), len(end))
        if {len(begin), len(end)} - {1, rows} or not begin or not end:
            raise ValueError(
                f"padding: starts for {len(begin)} batch rows, stops for {len(end)}; give one int, or one for each row"
            )
        begin, end = (x * rows if len(x) == 1 else x for x in (begin, end))
        for start, stop in zip(begin, end, strict=True):
            if start < 0 or stop < start:
                raise ValueError(f"padding: start {start}, stop {stop}; expected 0 <= start <= stop")
        return Mask((_Padding(begin, end),))

    def __and__(self, other: Mask) -> Mask:
        """A query sees the keys that it sees under both masks."""
        if not isinstance(other, Mask):
            return NotImplemented
        sizes = {m.batch for m in (self, other) if m.batch > 1}
        if len(sizes) > 1:
            raise ValueError(f"masks for {self.batch} and {other.batch} batch rows cannot be combined")
        return Mask(self.rules + tuple(rule for rule in other.rules if rule not in self.rules))

    @cached_property
    def batch(self) -> int:
        """The number of batch rows with masks of their own; 1 if all rows share one."""
        return max((rule.batch for rule in self.rules), default=1)

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """For each batch row, the positions at which a sequence begins, increasing.

        They are position 0, the boundaries of ``documents`` and the first tokens of ``padding``. ``Mask.chunked`` takes
        them, to count its chunks from the beginning of each sequence: ``Mask.chunked(size, starts=mask.starts)``.
        """
        merged: list[set[int]] = [{0} for _ in range(self.batch)]
        for rule in self.rules:
            for i, row in enumerate(merged):
                row.update(rule.starts[i % len(rule.starts)])
        rows = tuple(tuple(sorted(row)) for row in merged)
        return rows[:1] if len(set(rows)) == 1 else rows

    @property
    def has_window(self) -> bool:
        """Whether a window or chunks hide distant keys from queries."""
        return any(
            isinstance(rule, _Chunked)
            or (isinstance(rule, _SlidingWindow) and rule.left >= 0)
            or (isinstance(rule, _CausalBlocks) and rule.window is not None)
            for rule in self.rules
        )

    @property
    def is_local(self) -> bool:
        """Whether most queries see only keys nearby, because of a window, chunks or packed documents."""
        return self.has_window or any(isinstance(rule, _Documents) for rule in self.rules)

    def check_length(self, seq_len: int) -> None:
        """Check that the mask fits a sequence of ``seq_len`` tokens. Attention calls it.

        Raises:
            ValueError: the last boundary of ``documents`` lies beyond the sequence's end, or before it without
                ``padding``.
        """
        for rule in self.rules:
            rule.check_length(seq_len)

    def intervals(self, positions: Tensor) -> Interval:
        """The visible keys of the queries at ``positions``.

        Args:
            positions: int64 ``[n]``, global positions.

        Returns:
            ``(lo, hi)``, int64 ``[n]`` (``[batch, n]`` if the batch rows differ): first and one past the last
            visible key. ``hi`` may be larger than the sequence's length. A query that sees nothing has ``lo == hi``.

        Raises:
            TypeError: ``positions`` is not an integer tensor.
        """
        if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
            got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
            raise TypeError(f"positions: expected an integer tensor [n], got {got}")
        seq_len = int(positions.max()) + 1 if positions.numel() else 0
        rows = [runs.at(positions) for runs in self.runs(seq_len)]
        if len(rows) == 1:
            return rows[0]
        return torch.stack([lo for lo, _ in rows]), torch.stack([hi for _, hi in rows])

    def runs(self, seq_len: int) -> tuple[Runs, ...]:
        """For each batch row, the intervals of a sequence of ``seq_len`` tokens. Cached and pickled with the mask."""
        if seq_len not in self._runs:
            by_row = []
            for row in range(self.batch):
                by_rule = [rule.runs(row % rule.batch, seq_len) for rule in self.rules] or [EVERYTHING]
                by_row.append(reduce(and_, by_rule))
            if len(self._runs) >= _CACHED_LENGTHS:
                self._runs.clear()
            self._runs[seq_len] = tuple(by_row)
        return self._runs[seq_len]

    def dense(self, seq_len: int) -> Tensor:
        """The mask as bool ``[seq_len, seq_len]`` (``[batch, seq_len, seq_len]``), True where visible.

        For references and tests: its size is quadratic in the sequence's length.
        """
        check_int("seq_len", seq_len, 0)
        keys = torch.arange(seq_len, device="cpu")
        lo, hi = self.intervals(keys)
        return (keys >= lo[..., None]) & (keys < hi[..., None])


def document_boundaries(cu_seqlens: Any) -> tuple[tuple[int, ...], ...]:
    """Checked boundaries of packed documents, one tuple for each batch row (or one for all rows).

    Args:
        cu_seqlens: as in ``Mask.documents``.

    Raises:
        TypeError: the boundaries are not integers.
        ValueError: the boundaries decrease or do not start at 0.
    """
    rows = _batch_rows("cu_seqlens", cu_seqlens)
    for row in rows:
        if not row or row[0] != 0:
            raise ValueError(f"cu_seqlens={_short(row)}: the first boundary must be 0; put a 0 in front")
        for before, after in pairwise(row):
            if after < before:
                raise ValueError(
                    f"cu_seqlens={_short(row)}: {after} follows {before}, but boundaries must not decrease; "
                    "pass cumulative lengths (torch.cumsum of the documents' lengths, after a 0)"
                )
    return rows


def _checked_blocks(blocks: Sequence[Any]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The blocks of each batch row, checked; of one row if they are given once for all rows."""
    if not isinstance(blocks, Sequence) or not all(isinstance(item, Sequence) for item in blocks):
        raise TypeError(
            f"causal blocks={blocks!r}: expected pairs (first token, one past the last), or a list of those"
        )
    nested = any(len(item) == 0 or not isinstance(item[0], int) for item in blocks)
    checked = []
    for row in blocks if nested else [blocks]:
        pairs = [_ints("causal blocks", pair) for pair in row]
        ends = [position for pair in pairs for position in pair]
        if (
            any(len(pair) != 2 or pair[0] >= pair[1] for pair in pairs)
            or ends != sorted(ends)
            or min(ends, default=0) < 0
        ):
            raise ValueError(
                f"causal blocks={_short(pairs)}: expected pairs (first token, one past the last), increasing and "
                "without overlap"
            )
        checked.append(tuple((first, stop) for first, stop in pairs))
    return tuple(checked)


def _ints(name: str, value: Any) -> tuple[int, ...]:
    """``value`` as a flat tuple of ints."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or value.dim() > 1:
            raise TypeError(
                f"{name}: expected a one-dimensional integer tensor, got {value.dtype} of {value.dim()} dimensions"
            )
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        value = (value,)
    items: list[Any] = [item.item() if isinstance(item, Tensor) and item.dim() == 0 else item for item in value]
    for item in items:
        check_int(name, item)
    return tuple(items)


def _batch_rows(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """``value`` as one tuple of ints for each batch row."""
    if isinstance(value, Tensor) and value.dim() == 2:
        value = list(value)
    nested = isinstance(value, Sequence) and any(
        isinstance(row, Sequence) or (isinstance(row, Tensor) and row.dim() == 1) for row in value
    )
    if not nested and not isinstance(value, Sequence | Tensor):
        raise TypeError(f"{name}={value!r}: expected a sequence of ints or an integer tensor")
    return tuple(_ints(name, row) for row in value) if nested else (_ints(name, value),)


def _short(values: Sequence[Any]) -> str:
    shown = [str(v) for v in values[:8]] + (["..."] if len(values) > 8 else [])
    return f"[{', '.join(shown)}]"


LayerMask = tuple[bool, int | None, int | None]  # causal, window and chunk of ``layer_mask``


def layer_mask(mask: Mask, causal: bool, window: int | None, chunk: int | None) -> Mask:
    """The mask of a layer: the batch's mask, restricted to causal pairs, to ``|i - j| < window`` or to chunks."""
    kept: Mask | None = mask.plans.get((causal, window, chunk))
    return _layer_mask(mask, causal, window, chunk) if kept is None else kept


def keep_layer_mask(mask: Mask, layer: LayerMask) -> Mask:
    """``layer_mask``, stored in ``mask.plans``, so that the layer's mask and its plans are pickled with ``mask``."""
    result = layer_mask(mask, *layer)
    if result is not mask:
        mask.plans[layer] = result
    return result


@lru_cache(maxsize=512)
def _layer_mask(mask: Mask, causal: bool, window: int | None, chunk: int | None) -> Mask:
    result = mask & Mask.causal() if causal else mask
    if window is not None:
        result = result & Mask.sliding_window(window - 1, 0 if causal else window - 1)
    if chunk:
        result = result & Mask.chunked(chunk, causal, starts=mask.starts)
    return result
