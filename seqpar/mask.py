"""Masks as one interval of visible keys per query.

Every mask here has the same form: the query at global position ``i`` sees the keys at global positions
``lo(i) <= j < hi(i)``, and neither ``lo`` nor ``hi`` ever decreases in ``i``. Full, causal, sliding-window,
packed-document, prefix-LM, chunked and padded attention have this form, and so does every intersection of them.
A mask therefore needs two integers per query instead of a row of a dense matrix:

    documents [0, 3, 5] & sliding_window(1)

            keys 0 1 2 3 4     lo  hi
    query 0      x . . . .      0   1
    query 1      x x . . .      0   2
    query 2      . x x . .      1   3
    query 3      . . . x .      3   4
    query 4      . . . x x      3   5

Shapes: n queries, batch the batch rows that a mask tells apart (1 if all rows share it). Positions are int64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .checks import check_int

# An upper end larger than every position, and far enough from int64's limit that sums with it do not overflow.
UNBOUNDED = 1 << 62

Interval = tuple[Tensor, Tensor]


class _Rule(ABC):
    """One constraint of a mask. Rules are hashable values, so that schedules can be cached by mask."""

    @property
    def batch(self) -> int:
        """The number of batch rows that the rule tells apart."""
        return 1

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """By batch row: the positions where the rule makes a sequence begin (see ``Mask.starts``)."""
        return ((0,),)

    def check_length(self, seq_len: int) -> None:  # noqa: B027 (most rules fit every length)
        """Raise a ValueError if the rule does not fit a sequence of ``seq_len`` tokens."""

    @abstractmethod
    def intervals(self, positions: Tensor) -> Interval:
        """``(lo, hi)``, each int64 ``[n]`` or ``[batch, n]``, for the queries at ``positions [n]``."""


def _zeros(positions: Tensor) -> Tensor:
    return torch.zeros_like(positions)


def _unbounded(positions: Tensor) -> Tensor:
    return torch.full_like(positions, UNBOUNDED)


def _stack(rows: Sequence[Interval]) -> Interval:
    """The batch rows' intervals ``[n]`` as one ``[batch, n]``; a single row stays ``[n]``."""
    if len(rows) == 1:
        return rows[0]
    return torch.stack([lo for lo, _ in rows]), torch.stack([hi for _, hi in rows])


@dataclass(frozen=True)
class _SlidingWindow(_Rule):
    left: int
    right: int

    def intervals(self, positions: Tensor) -> Interval:
        lo = _zeros(positions) if self.left < 0 else (positions - self.left).clamp_min(0)
        hi = _unbounded(positions) if self.right < 0 else positions + self.right + 1
        return lo, hi


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

    def intervals(self, positions: Tensor) -> Interval:
        return _stack([self._row(row, positions) for row in self.boundaries])

    def _row(self, boundaries: tuple[int, ...], positions: Tensor) -> Interval:
        edges = torch.tensor(boundaries, dtype=torch.int64, device=positions.device)  # [docs + 1]
        # right=True: where empty documents share a boundary, take the last of them.
        document = torch.searchsorted(edges, positions, right=True) - 1  # [n]
        lo = edges[document]
        # Padding comes after the last boundary: there lo == end, so it sees nothing.
        end = edges[(document + 1).clamp_max(len(boundaries) - 1)]
        hi = torch.minimum(positions + 1, end) if self.causal else end
        return lo, torch.maximum(hi, lo)


@dataclass(frozen=True)
class _PrefixLM(_Rule):
    prefix_len: tuple[int, ...]  # by batch row

    @property
    def batch(self) -> int:
        return len(self.prefix_len)

    def intervals(self, positions: Tensor) -> Interval:
        return _stack([(_zeros(positions), (positions + 1).clamp_min(prefix)) for prefix in self.prefix_len])


@dataclass(frozen=True)
class _Chunked(_Rule):
    size: int
    causal: bool
    origins: tuple[tuple[int, ...], ...]  # by batch row: increasing, the first one 0

    @property
    def batch(self) -> int:
        return len(self.origins)

    def intervals(self, positions: Tensor) -> Interval:
        return _stack([self._row(row, positions) for row in self.origins])

    def _row(self, origins: tuple[int, ...], positions: Tensor) -> Interval:
        edges = torch.tensor((*origins, UNBOUNDED), dtype=torch.int64, device=positions.device)
        following = torch.searchsorted(edges, positions, right=True)  # [n], the first origin after each position
        origin = edges[following - 1]
        lo = positions - (positions - origin) % self.size
        hi = positions + 1 if self.causal else torch.minimum(lo + self.size, edges[following])
        return lo, hi


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

    def intervals(self, positions: Tensor) -> Interval:
        return _stack([self._row(start, stop, positions) for start, stop in zip(self.begin, self.end, strict=True)])

    def _row(self, start: int, stop: int, positions: Tensor) -> Interval:
        # Before the tokens lo == hi == start, after them lo == hi == stop: empty, and never decreasing.
        lo = torch.where(positions < stop, start, stop)
        hi = torch.where(positions < start, start, stop)
        return lo, hi


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees. Make one with the constructors below and combine them with ``&``.

    A mask is a value: hashable, comparable, without tensors, and independent of how the sequence is sharded.
    Positions are always *global*.

    Examples:
        >>> Mask.causal() & Mask.sliding_window(1023)  # the last 1,024 tokens, the query's own included
    """

    rules: tuple[_Rule, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Every layer looks the mask up in caches. Hashing thousands of document boundaries each time would be slow.
        object.__setattr__(self, "_hash", hash(self.rules))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def full() -> Mask:
        """Every query sees every key."""
        return Mask()

    @staticmethod
    def causal() -> Mask:
        """The query at ``i`` sees the keys ``j <= i``."""
        return Mask((_SlidingWindow(-1, 0),))

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
            padding: the last boundary may stop short of the sequence's length. Tokens after it are padding: they see
                nothing and no query sees them. Without it, attention raises an error for such boundaries.

        Raises:
            TypeError: the boundaries are not integers.
            ValueError: the boundaries decrease or do not start at 0.
        """
        return Mask((_Documents(document_boundaries(cu_seqlens), bool(causal), bool(padding)),))

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
            starts: positions where a new chunk starts even if the last one is not full, such as the starts of packed
                documents: a sequence of ints or an integer tensor, or a list of those, one for each batch row.
                Position 0 is always one of them.

        Raises:
            TypeError: ``size`` or a start is not an int.
            ValueError: ``size`` is below 1, or a start is negative.
        """
        check_int("chunked size", size)
        if size < 1:
            raise ValueError(f"chunked size={size}: a chunk holds at least 1 token")
        rows = _batch_rows("chunked starts", () if starts is None else starts)
        for row in rows:
            if row and min(row) < 0:
                raise ValueError(f"chunked starts={_short(row)}: give positions >= 0")
        return Mask((_Chunked(size, bool(causal), tuple(tuple(sorted({0, *row})) for row in rows)),))

    @staticmethod
    def padding(starts: int | Sequence[int] | Tensor, stops: int | Sequence[int] | Tensor | None = None) -> Mask:
        """The positions ``start <= i < stop`` hold tokens; the others see nothing and no query sees them.

        Args:
            starts: the first token: one int, or one for each batch row.
            stops: one past the last token, likewise. None: the tokens go on to the end of the sequence.

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

    @property
    def batch(self) -> int:
        """The number of batch rows that the mask tells apart; 1 if all rows share it."""
        return max((rule.batch for rule in self.rules), default=1)

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """By batch row: the increasing positions where a sequence begins.

        They are position 0, the boundaries of ``documents`` and the first tokens of ``padding``. Rules that count
        tokens from a sequence's beginning need them: ``Mask.chunked(size, starts=mask.starts)``.
        """
        merged: list[set[int]] = [{0} for _ in range(self.batch)]
        for rule in self.rules:
            for i, row in enumerate(merged):
                row.update(rule.starts[i % len(rule.starts)])
        rows = tuple(tuple(sorted(row)) for row in merged)
        return rows[:1] if len(set(rows)) == 1 else rows

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
        """
        lo, hi = _zeros(positions), _unbounded(positions)
        for rule in self.rules:
            rule_lo, rule_hi = rule.intervals(positions)
            lo, hi = torch.maximum(lo, rule_lo), torch.minimum(hi, rule_hi)
        lo, hi = torch.broadcast_tensors(lo, hi)
        return lo.contiguous(), torch.maximum(lo, hi)

    def dense(self, seq_len: int) -> Tensor:
        """The mask as bool ``[seq_len, seq_len]`` (``[batch, seq_len, seq_len]``), True where visible.

        For references and tests: its size is quadratic in the sequence's length.
        """
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


def _short(values: Sequence[int]) -> str:
    shown = [str(v) for v in values[:8]] + (["..."] if len(values) > 8 else [])
    return f"[{', '.join(shown)}]"
