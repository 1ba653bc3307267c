"""What a batch says about visibility, as a ``Mask``: padding on either side and packed documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..mask import Interval, Mask


@dataclass(frozen=True)
class _Padding:
    """Row ``b`` holds tokens at ``starts[b] <= i < stops[b]``; the others see nothing and nothing sees them."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.starts)

    def intervals(self, positions: Tensor) -> Interval:
        start, stop = (torch.tensor(x, device=positions.device)[:, None] for x in (self.starts, self.stops))
        lo = start.expand(-1, len(positions))
        hi = torch.where(positions < start, start, stop)
        # Past the end nothing is seen, and the lower end may not fall again.
        lo = torch.where(positions < stop, lo, stop)
        return (lo[0], hi[0]) if self.batch == 1 else (lo, hi)


@dataclass(frozen=True)
class _Chunks:
    """Chunks of ``size`` tokens, which begin anew in row ``b`` at each of ``starts[b]``, the first of which is 0."""

    size: int
    starts: tuple[tuple[int, ...], ...]

    @property
    def batch(self) -> int:
        return len(self.starts)

    def intervals(self, positions: Tensor) -> Interval:
        rows = []
        for row in self.starts:
            starts = torch.tensor(row, device=positions.device)
            start = starts[torch.searchsorted(starts, positions, right=True) - 1]
            rows.append(positions - (positions - start) % self.size)
        lo = rows[0] if self.batch == 1 else torch.stack(rows)
        return lo, lo + self.size


def chunks(size: int, batch: Mask) -> Mask:
    """Chunked attention within the rows and documents of ``batch_mask``'s ``batch``."""
    edges: list[Any] = [rule.boundaries for rule in batch.rules if hasattr(rule, "boundaries")]
    edges += [[(start,) for start in rule.starts] for rule in batch.rules if isinstance(rule, _Padding)]
    rows = max(map(len, edges), default=1)
    starts = ({0}.union(*(given[row % len(given)] for given in edges)) for row in range(rows))
    return Mask((_Chunks(size, tuple(tuple(sorted(row)) for row in starts)),))


def token_ranges(attention_mask: Tensor) -> list[tuple[int, int]] | None:
    """First and one past the last token of each row of a ``[batch, seq]`` mask of ones and zeros; None: all are.

    Raises:
        ValueError: a mask of another shape, other values, or with a hole.
    """
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask: shape {tuple(attention_mask.shape)}; [batch, seq] of ones and zeros is needed "
            "(causality, windows and documents need no dense mask here)"
        )
    mask = attention_mask.detach().cpu()
    if mask.dtype != torch.bool:
        if bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(
                f"attention_mask: values up to {mask.max().item()}; ones and zeros are needed (give packed documents "
                "by position_ids that restart, or by cu_seq_lens)"
            )
        mask = mask != 0
    if bool(mask.all()):
        return None
    length = mask.shape[1]
    count = mask.sum(1)
    first = mask.int().argmax(1)
    last = length - mask.flip(1).int().argmax(1)
    stop = torch.where(count > 0, last, first)
    if bool((stop - first != count).any()):
        row = int((stop - first != count).nonzero()[0])
        raise ValueError(
            f"attention_mask: row {row} has zeros between ones; padding is allowed at the start and at the end of a row"
        )
    return list(zip(first.tolist(), stop.tolist(), strict=True))


def documents_in(position_ids: Tensor, ranges: list[tuple[int, int]] | None) -> list[tuple[int, ...]] | None:
    """Boundaries of the documents in each row of ``position_ids [batch, seq]``: one starts where the ids do not go on
    by one. Padding tells nothing. None: every row is one document."""
    ids = position_ids.detach().cpu()
    length = ids.shape[1]
    jumps = torch.zeros(ids.shape, dtype=torch.bool)
    jumps[:, 1:] = ids.diff(dim=1) != 1
    rows = []
    for row, (start, stop) in zip(jumps, ranges or [(0, length)] * len(ids), strict=True):
        inner = row[start + 1 : stop].nonzero().flatten() + start + 1
        rows.append((0, *inner.tolist(), length))
    return rows if any(len(row) > 2 for row in rows) else None


def documents_at(cu_seq_lens: Any, batch: int, length: int) -> list[tuple[int, ...]]:
    """Boundaries given outright, checked against the batch."""
    rows = Mask.documents(cu_seq_lens).rules[0].boundaries  # type: ignore[attr-defined]
    if len(rows) not in (1, batch):
        raise ValueError(f"cu_seq_lens: boundaries for {len(rows)} rows, but the batch has {batch}")
    for row in rows:
        if row[-1] > length:
            raise ValueError(f"cu_seq_lens: the last boundary is {row[-1]}, but the rows hold {length} tokens")
    return list(rows)


def restarting(documents: list[tuple[int, ...]], length: int) -> Tensor:
    """Position ids ``[len(documents), seq]`` that start again at each boundary."""
    ids = torch.arange(length).repeat(len(documents), 1)
    for row, edges in zip(ids, documents, strict=True):
        starts = torch.tensor([edge for edge in edges if edge < length])
        row -= starts[torch.searchsorted(starts, torch.arange(length), right=True) - 1]
    return ids


def batch_mask(documents: list[tuple[int, ...]] | None, ranges: list[tuple[int, int]] | None) -> Mask:
    """Documents and padding together; causality and windows are each layer's own."""
    mask = Mask.full()
    if documents is not None:
        mask = mask & Mask.documents(documents[:1] if len(set(documents)) == 1 else documents, causal=False)
    if ranges is not None:
        alike = ranges[:1] if len(set(ranges)) == 1 else ranges
        mask = mask & Mask((_Padding(tuple(a for a, _ in alike), tuple(b for _, b in alike)),))
    return mask
