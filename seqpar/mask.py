"""Masks as one interval of visible keys per query.

Every mask here says: the query at global position ``i`` sees the keys at global positions
``lo(i) <= j < hi(i)``, with ``lo`` and ``hi`` never decreasing in ``i``. Full, causal, sliding-window,
packed-document, prefix-LM and chunked attention are all of that form, and so is every intersection of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

# "No upper end": past every position, and far enough from int64's limit to add to.
UNBOUNDED = 1 << 62

Interval = tuple[Tensor, Tensor]


class _Rule(Protocol):
    """One constraint of a mask. Rules are hashable values, so that schedules can be cached by mask."""

    @property
    def batch(self) -> int: ...

    def intervals(self, positions: Tensor) -> Interval: ...


def _zeros(positions: Tensor) -> Tensor:
    return torch.zeros_like(positions)


def _unbounded(positions: Tensor) -> Tensor:
    return torch.full_like(positions, UNBOUNDED)


@dataclass(frozen=True)
class _SlidingWindow:
    left: int
    right: int
    batch: int = field(default=1, init=False)

    def intervals(self, positions: Tensor) -> Interval:
        lo = _zeros(positions) if self.left < 0 else (positions - self.left).clamp_min(0)
        hi = _unbounded(positions) if self.right < 0 else positions + self.right + 1
        return lo, hi


@dataclass(frozen=True)
class _Documents:
    """Boundaries of one row of packed documents for each batch row (or one for all of them)."""

    boundaries: tuple[tuple[int, ...], ...]
    causal: bool

    @property
    def batch(self) -> int:
        return len(self.boundaries)

    def intervals(self, positions: Tensor) -> Interval:
        rows = [self._row(edges, positions) for edges in self.boundaries]
        if len(rows) == 1:
            return rows[0]
        return torch.stack([lo for lo, _ in rows]), torch.stack([hi for _, hi in rows])

    def _row(self, boundaries: tuple[int, ...], positions: Tensor) -> Interval:
        edges = torch.tensor(boundaries, dtype=torch.int64, device=positions.device)
        # The edge that opens this position's document; empty documents share an edge and are stepped over.
        document = torch.searchsorted(edges, positions, right=True) - 1
        lo = edges[document]
        end = edges[(document + 1).clamp_max(len(boundaries) - 1)]  # padding: lo == end, so it sees nothing
        hi = torch.minimum(positions + 1, end) if self.causal else end
        return lo, torch.maximum(hi, lo)


@dataclass(frozen=True)
class _PrefixLM:
    prefix_len: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.prefix_len)

    def intervals(self, positions: Tensor) -> Interval:
        prefix = torch.tensor(self.prefix_len, dtype=torch.int64, device=positions.device)
        hi = torch.maximum(positions + 1, prefix[:, None])
        return _zeros(positions), hi[0] if self.batch == 1 else hi


@dataclass(frozen=True)
class _Chunked:
    size: int
    causal: bool
    batch: int = field(default=1, init=False)

    def intervals(self, positions: Tensor) -> Interval:
        lo = positions - positions % self.size
        return lo, positions + 1 if self.causal else lo + self.size


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees. Make one with the constructors below and combine them with ``&``.

    A mask is a value: hashable, comparable, without tensors, and independent of how the sequence is sharded.
    Positions are always *global*.

    >>> Mask.causal() & Mask.sliding_window(1023)   # the last 1,024 tokens, itself included
    """

    rules: tuple[_Rule, ...] = ()

    def __post_init__(self) -> None:
        # Hashing thousands of document boundaries at every call would show; masks are looked up at each layer.
        object.__setattr__(self, "_hash", hash(self.rules))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

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
        """The query at ``i`` sees ``i - left <= j <= i + right``; -1 is unlimited (flash-attn's ``window_size``).

        Raises:
            TypeError: a side is not an int. ValueError: a side is below -1.
        """
        for name, side in (("left", left), ("right", right)):
            _check_int(f"sliding_window {name}", side)
            if side < -1:
                raise ValueError(f"sliding_window {name}={side}: use a width >= 0, or -1 for unlimited")
        return Mask((_SlidingWindow(left, right),)) if (left, right) != (-1, -1) else Mask()

    @staticmethod
    def documents(cu_seqlens: Any, causal: bool = True) -> Mask:
        """Packed documents that see only themselves.

        Args:
            cu_seqlens: int ``[docs + 1]``, the documents' boundaries in global positions, starting at 0 and never
                falling (a tensor or a sequence of ints); or a list of those, one for each batch row. Tokens past
                the last boundary are padding: they see nothing and nothing sees them. A CUDA tensor is read back
                to the host once, here.
            causal: inside a document, see only the keys up to the query.

        Raises:
            TypeError: not integers. ValueError: boundaries that fall or do not start at 0.
        """
        rows = _batch_rows("cu_seqlens", cu_seqlens)
        for row in rows:
            if not row or row[0] != 0:
                raise ValueError(f"cu_seqlens={_short(row)}: the first boundary must be 0; put a 0 in front")
            for before, after in pairwise(row):
                if after < before:
                    raise ValueError(
                        f"cu_seqlens={_short(row)}: {after} follows {before}, but boundaries must not fall; "
                        "pass cumulative lengths (torch.cumsum of the documents' lengths, after a 0)"
                    )
        return Mask((_Documents(rows, bool(causal)),))

    @staticmethod
    def prefix_lm(prefix_len: int | Sequence[int] | Tensor) -> Mask:
        """Every query sees the first ``prefix_len`` keys, and causally the rest (T5's prefix LM).

        ``prefix_len`` is one int, or one for each batch row.
        """
        lengths = _ints("prefix_len", prefix_len)
        if not lengths or min(lengths) < 0:
            raise ValueError(f"prefix_len={_short(lengths)}: give lengths >= 0, one int or one for each batch row")
        return Mask((_PrefixLM(lengths),))

    @staticmethod
    def chunked(size: int, causal: bool = True) -> Mask:
        """The sequence is cut in chunks of ``size`` tokens that see only themselves (Llama 4's local layers)."""
        _check_int("chunked size", size)
        if size < 1:
            raise ValueError(f"chunked size={size}: a chunk holds at least 1 token")
        return Mask((_Chunked(size, bool(causal)),))

    def __and__(self, other: Mask) -> Mask:
        """Keys that both masks show."""
        if not isinstance(other, Mask):
            return NotImplemented
        sizes = {m.batch for m in (self, other) if m.batch > 1}
        if len(sizes) > 1:
            raise ValueError(f"masks for {self.batch} and {other.batch} batch rows cannot be combined")
        return Mask(self.rules + tuple(rule for rule in other.rules if rule not in self.rules))

    @property
    def batch(self) -> int:
        """The number of batch rows the mask tells apart; 1 when all rows share it."""
        return max((rule.batch for rule in self.rules), default=1)

    def intervals(self, positions: Tensor) -> Interval:
        """The visible keys of the queries at ``positions``.

        Args:
            positions: int64 ``[n]``, global positions.

        Returns:
            ``(lo, hi)``, int64 ``[n]`` (``[batch, n]`` when the batch rows differ): first and one past the last
            visible key. ``hi`` may lie past the end of the sequence. A query that sees nothing has ``lo == hi``.
        """
        lo, hi = _zeros(positions), _unbounded(positions)
        for rule in self.rules:
            rule_lo, rule_hi = rule.intervals(positions)
            lo, hi = torch.maximum(lo, rule_lo), torch.minimum(hi, rule_hi)
        lo, hi = torch.broadcast_tensors(lo, hi)
        return lo.contiguous(), torch.maximum(lo, hi)

    def dense(self, seq_len: int) -> Tensor:
        """The mask as bool ``[seq_len, seq_len]`` (``[batch, seq_len, seq_len]``), True where visible.

        For references and tests: it holds the square of the sequence.
        """
        keys = torch.arange(seq_len, device="cpu")
        lo, hi = self.intervals(keys)
        return (keys >= lo[..., None]) & (keys < hi[..., None])


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: an int is needed, not {type(value).__name__}")


def _ints(name: str, value: Any) -> tuple[int, ...]:
    """``value`` as a flat tuple of ints."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or value.dim() > 1:
            raise TypeError(
                f"{name}: a one-dimensional integer tensor is needed, not {value.dtype} of {value.dim()} dims"
            )
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        value = (value,)
    items: list[Any] = [item.item() if isinstance(item, Tensor) and item.dim() == 0 else item for item in value]
    for item in items:
        _check_int(name, item)
    return tuple(items)


def _batch_rows(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """``value`` as one tuple of ints for each batch row."""
    if isinstance(value, Tensor) and value.dim() == 2:
        value = list(value)
    nested = isinstance(value, Sequence) and any(
        isinstance(row, Sequence) or (isinstance(row, Tensor) and row.dim() == 1) for row in value
    )
    if not nested and not isinstance(value, Sequence | Tensor):
        raise TypeError(f"{name}={value!r}: a sequence of ints or an integer tensor is needed")
    return tuple(_ints(name, row) for row in value) if nested else (_ints(name, value),)


def _short(values: Sequence[int]) -> str:
    shown = [str(v) for v in values[:8]] + (["..."] if len(values) > 8 else [])
    return f"[{', '.join(shown)}]"
