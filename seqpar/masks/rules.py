"""The rules of masks: the intervals of visible keys of each, and the checks of their arguments (see ``mask.py``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from ..base.checks import check_dense, check_int
from .runs import EVERYTHING, MOST_PARTS, NOTHING, UNBOUNDED, Array, Parts, Runs, intersection, union


class Rule(ABC):
    """One constraint of a mask. Rules are hashable values, so that schedules can be cached by mask.

    Rules are dataclasses. A field that is a tuple has one entry for each batch row.
    """

    @property
    def batch(self) -> int:
        """The number of batch rows with intervals of their own; 1 if all rows share them."""
        return 1

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """For each batch row, the positions at which a sequence begins according to the rule (see ``Mask.starts``)."""
        return ((0,),)

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """For each batch row, positions that divide it into documents (see ``Mask.cuts``)."""
        return self.starts

    @property
    @abstractmethod
    def is_local(self) -> bool:
        """Whether most queries see only keys nearby (see ``Mask.is_local``)."""

    @property
    def has_window(self) -> bool:
        """Whether a window or chunks are the reason that it is local."""
        return self.is_local

    @property
    def branches(self) -> bool:
        """Whether queries may see several intervals of keys."""
        return False

    @property
    @abstractmethod
    def constructor(self) -> str:
        """The call of ``Mask`` that makes the rule, such as "sliding_window(7)"."""

    @property
    @abstractmethod
    def shown(self) -> int:
        """How many tokens a picture of the rule shows."""

    def check_length(self, seq_len: int) -> None:  # noqa: B027 (most rules fit every length)
        """Raise a ValueError if the rule does not fit a sequence of ``seq_len`` tokens."""

    def of_rows(self, rows: Sequence[int]) -> Rule:
        """The rule for some of the batch rows."""
        if self.batch == 1:
            return self
        by_row = {name: tuple(x[row] for row in rows) for name, x in vars(self).items() if isinstance(x, tuple)}
        return cast(Rule, replace(cast(Any, self), **by_row))

    def parts(self, row: int, seq_len: int) -> Parts:
        """The intervals of batch row ``row``, at least for the queries below ``seq_len``."""
        return (self.runs(row, seq_len),)

    def runs(self, row: int, seq_len: int) -> Runs:
        """The same for a rule with one interval for each query. Every rule has either ``runs`` or ``parts``."""
        raise NotImplementedError


class BranchingRule(Rule):
    """A rule whose queries may see several intervals of keys."""

    @property
    def is_local(self) -> bool:
        return False

    @property
    def branches(self) -> bool:
        return True

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        raise ValueError(
            f"mask: {self.constructor[:60]} has several intervals of keys for a query, so its tokens are no sequences "
            "one after another; what depends on where a sequence starts is refused under it: chunks, seqpar.mixers, "
            "seqpar.shift, indexers"
        )

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        return ((0,),)


@dataclass(frozen=True)
class _OfMasks(BranchingRule):
    """A rule of several masks, each given by its rules."""

    masks: tuple[tuple[Rule, ...], ...]

    @property
    def batch(self) -> int:
        return max((rule.batch for rules in self.masks for rule in rules), default=1)

    @property
    def is_local(self) -> bool:
        return all(any(rule.is_local for rule in rules) for rules in self.masks)

    @property
    def has_window(self) -> bool:
        return any(rule.has_window for rules in self.masks for rule in rules)

    @property
    def shown(self) -> int:
        return max((rule.shown for rules in self.masks for rule in rules), default=0)

    def check_length(self, seq_len: int) -> None:
        for rules in self.masks:
            for rule in rules:
                rule.check_length(seq_len)

    def of_rows(self, rows: Sequence[int]) -> Rule:
        return replace(self, masks=tuple(tuple(rule.of_rows(rows) for rule in rules) for rules in self.masks))


class AnyOf(_OfMasks):
    """What a query sees under any of several masks."""

    @property
    def constructor(self) -> str:
        return " | ".join(map(described, self.masks))

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        by_mask = [merged_positions([rule.cuts for rule in rules], self.batch) for rules in self.masks]
        by_row = ([set(rows[row % len(rows)]) for rows in by_mask] for row in range(self.batch))
        return tuple(tuple(sorted(set.intersection(*cuts))) for cuts in by_row)

    @property
    def has_tree(self) -> bool:
        rules = [rule for rules in self.masks for rule in rules]
        return any(isinstance(rule, Tree) or (isinstance(rule, AnyOf) and rule.has_tree) for rule in rules)

    def parts(self, row: int, seq_len: int) -> Parts:
        return union([part for rules in self.masks for part in parts_of(rules, row, seq_len)], seq_len)


class ByHeads(_OfMasks):
    """A mask for each group of heads. It is the only rule of its mask."""

    @property
    def constructor(self) -> str:
        return f"by_heads([{', '.join(map(described, self.masks))}])"

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        raise self._several("what depends on where a sequence starts (chunks, seqpar.mixers, seqpar.shift)")

    def parts(self, row: int, seq_len: int) -> Parts:
        raise self._several("this")

    def _several(self, what: str) -> ValueError:
        return ValueError(
            f"mask: {self.constructor[:60]} is a mask for each of {len(self.masks)} groups of heads, and {what} takes "
            "one mask of all heads; pass one of mask.head_groups, or call it for each of them"
        )


@dataclass(frozen=True)
class GlobalTokens(BranchingRule):
    count: int

    @property
    def is_local(self) -> bool:
        return True  # most queries see the few global tokens only

    @property
    def has_window(self) -> bool:
        return False

    @property
    def constructor(self) -> str:
        return f"global_tokens({self.count})"

    @property
    def shown(self) -> int:
        return 2 * self.count

    def parts(self, row: int, seq_len: int) -> Parts:
        return (Runs.of([0], 0, 0, self.count, 0),)


@dataclass(frozen=True)
class Tree(BranchingRule):
    parents: tuple[tuple[int, ...], ...]  # by batch row
    lengths: tuple[tuple[int, ...], ...]
    padding: bool
    window: int | None = None  # of positions along a path

    @property
    def batch(self) -> int:
        return len(self.parents)

    @property
    def is_local(self) -> bool:
        return self.window is not None

    @property
    def constructor(self) -> str:
        options = f"{', padding=True' if self.padding else ''}{f', window={self.window}' if self.window else ''}"
        return f"tree({_by_row(self.parents)}, {_by_row(self.lengths)}{options})"

    @property
    def shown(self) -> int:
        return max(map(sum, self.lengths))

    def check_length(self, seq_len: int) -> None:
        for row, lengths in enumerate(self.lengths):
            if (total := sum(lengths)) == seq_len or (total < seq_len and self.padding):
                continue
            where = f" of batch row {row}" if self.batch > 1 else ""
            fix = ", or padding=True if the tokens after it are padding" if total < seq_len else ""
            raise ValueError(
                f"tree: the segments{where} have {total} tokens, but the sequence has {seq_len}; give the lengths of "
                f"all segments of the whole sequence{fix}"
            )

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """Where a root begins, and the padding."""
        edges = [(*row, -1) for row in self.parents], [accumulate(row, initial=0) for row in self.lengths]
        return tuple(
            tuple(start for parent, start in zip(*row, strict=True) if parent < 0) for row in zip(*edges, strict=True)
        )

    def parts(self, row: int, seq_len: int) -> Parts:
        # An only child continues the interval of its parent, so a query sees an interval for each level of branches.
        heads, level_of = map(np.asarray, _levels(self.parents[row]))
        start = np.append(0, np.cumsum(self.lengths[row], dtype=np.int64))
        chains = np.flatnonzero(np.append(heads, True).astype(bool))
        stop = start[np.repeat(chains[1:], np.diff(chains))]  # of the chain of only children that has the segment
        # A token at global position i has position i - offset along its path.
        offset = start[:-1] - np.asarray(first_positions(self.parents[row], self.lengths[row]), dtype=np.int64)
        parts, total = [], start[-1]
        for level in range(max(level_of, default=-1) + 1):
            # Depth first: the ancestor of a segment at a level is the last chain at this level that has begun.
            begun = np.maximum.accumulate(np.where((level_of == level) & heads, np.arange(len(heads)), -1))
            inside, stops = level_of == level, np.where(begun >= 0, stop[begun], 0)
            lo = np.where(level_of >= level, start[begun], stops)
            hi = np.where(inside, start[:-1] + 1, stops)
            part = Runs.of(start, np.append(lo, total), 0, np.append(hi, total), np.append(inside, False))
            if self.window is not None:
                oldest = start[:-1] - offset + offset[begun] - self.window + 1  # for a segment's first token
                part = part & Runs.of(start, np.append(oldest, total), 1, UNBOUNDED, 0)
            parts.append(part)
        # The windows of a segment's children start at the same keys again, so that lo would decrease.
        return union(parts, seq_len) if self.window is not None and parts else tuple(parts) or (NOTHING,)


@dataclass(frozen=True)
class BlockDiffusion(BranchingRule):
    clean_len: int
    block_size: int

    @property
    def constructor(self) -> str:
        return f"block_diffusion({self.clean_len}, {self.block_size})"

    @property
    def shown(self) -> int:
        return 2 * self.clean_len

    def check_length(self, seq_len: int) -> None:
        if seq_len != 2 * self.clean_len:
            raise ValueError(
                f"block_diffusion: clean_len={self.clean_len}, but the sequence has {seq_len} tokens; it has twice "
                "clean_len tokens, the clean ones and then the noisy ones"
            )

    def parts(self, row: int, seq_len: int) -> Parts:
        n = self.clean_len
        first = np.arange(0, n, self.block_size, dtype=np.int64)  # of each block
        stop = np.minimum(first + self.block_size, n)
        start = np.concatenate([first, first + n, [2 * n]])

        def part(lo: Array, noisy_lo: Array, hi: Array, noisy_hi: Array, end: int) -> Runs:
            return Runs.of(start, np.concatenate([lo, noisy_lo, [end]]), 0, np.concatenate([hi, noisy_hi, [end]]), 0)

        nothing = 0 * first
        return part(nothing, first + n, stop, stop + n, 2 * n), part(nothing, nothing, nothing, first, n)


RangeType = Literal["full", "causal", "inv_causal", "bi_causal"]
RANGE_TYPES: tuple[RangeType, ...] = get_args(RangeType)


@dataclass(frozen=True)
class QueryRanges(BranchingRule):
    q_ranges: tuple[tuple[int, int], ...]
    k_ranges: tuple[tuple[int, int], ...]
    types: tuple[str, ...]

    @property
    def constructor(self) -> str:
        return f"ranges({[*self.q_ranges]}, {[*self.k_ranges]}, {[*self.types]})"

    @property
    def shown(self) -> int:
        return max((stop for _, stop in (*self.q_ranges, *self.k_ranges)), default=0)

    def of_rows(self, rows: Sequence[int]) -> Rule:
        return self

    def check_length(self, seq_len: int) -> None:
        for name, ranges in (("q_ranges", self.q_ranges), ("k_ranges", self.k_ranges)):
            if (last := max((stop for _, stop in ranges), default=0)) > seq_len:
                raise ValueError(
                    f"{name}: a range ends at {last}, but the sequence has {seq_len} tokens; pass ranges inside the "
                    "whole sequence, in global positions"
                )

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """The ends of the ranges of tokens that are connected: of one pair, or of pairs that overlap."""
        cuts, end = [0], 0
        for start, stop in sorted(
            (min(q[0], k[0]), max(q[1], k[1])) for q, k in zip(self.q_ranges, self.k_ranges, strict=True)
        ):
            if start >= end:
                cuts += [end, start]
            end = max(end, stop)
        return ((*cuts, end),)

    def parts(self, row: int, seq_len: int) -> Parts:
        found = []  # first query, one past the last; lo and hi of the first query, and their steps
        for (q0, q1), (k0, k1), kind in zip(self.q_ranges, self.k_ranges, self.types, strict=True):
            lo_step, hi_step = int(kind in ("inv_causal", "bi_causal")), int(kind in ("causal", "bi_causal"))
            # Queries before ``first`` and from ``stop`` on see nothing.
            first = max(q0, q1 - (k1 - k0)) if kind == "causal" else q0
            stop = min(q1, q0 + k1 - k0) if kind == "inv_causal" else q1
            lo, hi = k0 + lo_step * (first - q0), k1 - hi_step * (q1 - 1 - first)
            if first < stop and lo < hi:
                found.append((first, stop, lo, hi, lo_step, hi_step))
        chains: list[list[tuple[int, int, int, int, int, int]]] = []
        for item in sorted(found):
            for chain in chains:  # ranges of queries that follow one another
                if item[0] >= chain[-1][1]:
                    chain.append(item)
                    break
            else:
                chains.append([item])
        parts: Parts = (NOTHING,)
        for i in range(0, len(chains), MOST_PARTS):  # the cost of a union grows with the square of its parts
            parts = union([*parts, *map(_chain, chains[i : i + MOST_PARTS])], seq_len)
        return parts


def _chain(items: Sequence[tuple[int, int, int, int, int, int]]) -> Runs:
    """The runs of ranges of queries that follow one another; the queries between them see nothing."""
    rows = [(0, items[0][2], 0, items[0][2], 0)]
    for first, stop, lo, hi, lo_step, hi_step in items:
        end = hi + hi_step * (stop - 1 - first)
        rows += [(first, lo, lo_step, hi, hi_step), (stop, end, 0, end, 0)]
    return Runs.of(*np.array(rows, dtype=np.int64).T)


def range_pairs(name: str, ranges: Any) -> tuple[tuple[int, int], ...]:
    """``ranges`` as pairs of ints, checked."""
    pairs = batch_rows(name, ranges) if len(ranges) else ()
    for pair in pairs:
        if len(pair) != 2 or not 0 <= pair[0] <= pair[1]:
            raise ValueError(f"{name}: {short(pair)}; expected pairs (first position, one past the last)")
    return tuple((start, stop) for start, stop in pairs)


def parts_of(rules: Sequence[Rule], row: int, seq_len: int) -> Parts:
    """The intervals of batch row ``row`` under all of the rules."""
    return intersection([rule.parts(row % rule.batch, seq_len) for rule in rules] or [(EVERYTHING,)], seq_len)


def merged_positions(by_rule: Sequence[tuple[tuple[int, ...], ...]], batch: int) -> tuple[tuple[int, ...], ...]:
    """For each of ``batch`` rows, or once for all of them, 0 and the positions of all rules, increasing."""
    merged: list[set[int]] = [{0} for _ in range(batch)]
    for rows in by_rule:
        for i, row in enumerate(merged):
            row.update(rows[i % len(rows)])
    found = tuple(tuple(sorted(row)) for row in merged)
    return found[:1] if len(set(found)) == 1 else found


def described(rules: Sequence[Rule]) -> str:
    """The code that makes a mask with these rules."""
    if len(rules) == 1 and isinstance(rules[0], AnyOf):
        return rules[0].constructor
    return (
        " & ".join(f"({x.constructor})" if isinstance(x, AnyOf) else f"Mask.{x.constructor}" for x in rules)
        or "Mask.full()"
    )


@dataclass(frozen=True)
class SlidingWindow(Rule):
    left: int
    right: int

    @property
    def is_local(self) -> bool:
        return self.left >= 0

    @property
    def constructor(self) -> str:
        if (self.left, self.right) == (-1, 0):
            return "causal()"
        return f"sliding_window({self.left}{f', {self.right}' if self.right else ''})"

    @property
    def shown(self) -> int:
        return 2 * (max(self.left, self.right) + 1)

    def runs(self, row: int, seq_len: int) -> Runs:
        hi, hi_step = (UNBOUNDED, 0) if self.right < 0 else (self.right + 1, 1)
        if self.left < 0:
            return Runs.of([0], 0, 0, hi, hi_step)
        return Runs.of([0, self.left], 0, [0, 1], [hi, hi + self.left * hi_step], hi_step)


@dataclass(frozen=True)
class Documents(Rule):
    boundaries: tuple[tuple[int, ...], ...]  # by batch row
    causal: bool
    padding: bool  # whether tokens may follow the last boundary

    @property
    def batch(self) -> int:
        return len(self.boundaries)

    @property
    def is_local(self) -> bool:
        return True

    @property
    def has_window(self) -> bool:
        return False

    @property
    def constructor(self) -> str:
        flags = "" if self.causal else ", causal=False"
        return f"documents({_by_row(self.boundaries)}{flags}{', padding=True' if self.padding else ''})"

    @property
    def shown(self) -> int:
        return max(row[-1] for row in self.boundaries)

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
class CausalBlocks(Rule):
    blocks: tuple[tuple[tuple[int, int], ...], ...]  # by batch row: (first token, one past the last), increasing
    window: int | None = None

    def check_length(self, seq_len: int) -> None:
        for row, blocks in enumerate(self.blocks):
            if blocks and blocks[-1][1] > seq_len:
                where = f" of batch row {row}" if self.batch > 1 else ""
                raise ValueError(
                    f"causal blocks: the last block{where} is {blocks[-1]}, but the sequence has {seq_len} tokens; "
                    "pass blocks inside the whole sequence, in global positions"
                )

    @property
    def batch(self) -> int:
        return len(self.blocks)

    @property
    def is_local(self) -> bool:
        return self.window is not None

    @property
    def constructor(self) -> str:
        return f"causal({_by_row(self.blocks)}{'' if self.window is None else f', window={self.window}'})"

    @property
    def shown(self) -> int:
        return max([2 * (self.window or 0), *(stop for row in self.blocks for _, stop in row)])

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
class PrefixLM(Rule):
    prefix_len: tuple[int, ...]  # by batch row

    @property
    def batch(self) -> int:
        return len(self.prefix_len)

    @property
    def is_local(self) -> bool:
        return False

    @property
    def constructor(self) -> str:
        return f"prefix_lm({_by_row(self.prefix_len)})"

    @property
    def shown(self) -> int:
        return 2 * max(self.prefix_len)

    def runs(self, row: int, seq_len: int) -> Runs:
        prefix = max(1, self.prefix_len[row])
        return Runs.of([0, prefix - 1], 0, 0, prefix, [0, 1])


@dataclass(frozen=True)
class Chunked(Rule):
    size: int
    causal: bool
    origins: tuple[tuple[int, ...], ...]  # by batch row: increasing, the first one 0

    @property
    def batch(self) -> int:
        return len(self.origins)

    @property
    def is_local(self) -> bool:
        return True

    @property
    def constructor(self) -> str:
        starts = "" if self.origins == ((0,),) else f", starts={_by_row(self.origins)}"
        return f"chunked({self.size}{'' if self.causal else ', causal=False'}{starts})"

    @property
    def shown(self) -> int:
        return max(row[-1] for row in self.origins) + 2 * self.size

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
class Padding(Rule):
    begin: tuple[int, ...]  # by batch row: the first token
    end: tuple[int, ...]  # by batch row: one past the last token

    @property
    def batch(self) -> int:
        return len(self.begin)

    @property
    def is_local(self) -> bool:
        return False

    @property
    def constructor(self) -> str:
        stops = "" if set(self.end) == {UNBOUNDED} else f", {_by_row(self.end)}"
        return f"padding({_by_row(self.begin)}{stops})"

    @property
    def shown(self) -> int:
        return max(2 * start if stop == UNBOUNDED else stop for start, stop in zip(self.begin, self.end, strict=True))

    @property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        return tuple((start,) for start in self.begin)

    def runs(self, row: int, seq_len: int) -> Runs:
        start, stop = self.begin[row], self.end[row]
        # Padding sees nothing: lo == hi == start before the tokens, lo == hi == stop after them. Neither decreases.
        return Runs.of([0, start, stop], [start, start, stop], 0, [start, stop, stop], 0)


def tree_rows(parents: Any, lengths: Any) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """The checked parents and lengths of trees, one tuple of each for each batch row (or one for all rows).

    Args:
        parents, lengths: as in ``Mask.tree``.

    Raises:
        TypeError: they are not integers.
        ValueError: they do not describe trees whose segments lie depth first.
    """
    by_row, sizes = batch_rows("tree parents", parents), batch_rows("tree lengths", lengths)
    if [*map(len, by_row)] != [*map(len, sizes)]:
        raise ValueError(
            f"tree: parents of {[*map(len, by_row)]} segments and lengths of {[*map(len, sizes)]} (by batch row); give "
            "one parent and one length for each segment"
        )
    for row, of_row in zip(by_row, sizes, strict=True):
        if of_row and min(of_row) < 0:
            raise ValueError(f"tree lengths={short(of_row)}: give lengths >= 0")
        path: list[int] = []  # from a root to the last segment
        for i, parent in enumerate(row):
            if not -1 <= parent < i:
                raise ValueError(f"tree parents={short(row)}: segment {i} has parent {parent}; give -1 for a root, or "
                                 "the number of an earlier segment")  # fmt: skip
            while path and path[-1] != parent:
                path.pop()
            if parent >= 0 and not path:
                raise ValueError(
                    f"tree parents={short(row)}: segment {i} follows a segment outside the branch of its parent "
                    f"{parent}; order the segments depth first, each directly behind the branches of its elder siblings"
                )
            path.append(i)
        if (levels := max(_levels(row)[1], default=0) + 1) > MOST_PARTS:
            raise ValueError(
                f"tree: a query would see {levels} intervals of keys, one for each level of branches; at most "
                f"{MOST_PARTS} are attended one after another; cut the tree into trees of fewer levels"
            )
    return by_row, sizes


def _levels(parents: Sequence[int]) -> tuple[list[bool], list[int]]:
    """For each segment of a tree, whether it is a root or has siblings, and how many such segments lie above it."""
    children, heads, levels = [0] * len(parents), list[bool](), list[int]()
    for parent in parents:
        if parent >= 0:
            children[parent] += 1
    for parent in parents:
        heads.append(parent < 0 or children[parent] > 1)
        levels.append(levels[parent] + heads[-1] if parent >= 0 else 0)
    return heads, levels


def tree_positions(parents: Any, lengths: Any) -> Tensor:
    """The position of each token along its branch, for rotary embeddings: a segment continues behind its parent.

    Args:
        parents: the parent of each segment, as in ``Mask.tree``.
        lengths: the tokens of each segment.

    Returns:
        int64 ``[seq]`` on the host; ``[batch, seq]`` for a tree for each batch row.

    Raises:
        TypeError, ValueError: as ``Mask.tree``; or the trees of the batch rows have different numbers of tokens.
    """
    rows = []
    for of_row, sizes in zip(*tree_rows(parents, lengths), strict=True):
        first = first_positions(of_row, sizes)
        length = np.asarray(sizes, dtype=np.int64)
        begin = np.cumsum(length) - length
        rows.append(np.arange(length.sum()) + np.repeat(np.asarray(first, dtype=np.int64) - begin, length))
    if len({len(row) for row in rows}) != 1:
        raise ValueError(
            f"tree_positions: batch rows of {short([*map(len, rows)])} tokens; call it for each row and pad the results"
        )
    return torch.from_numpy(np.stack(rows) if len(rows) > 1 else rows[0])


def first_positions(parents: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """For each segment of a tree, the position of its first token along its path."""
    first: list[int] = []
    for parent in parents:
        first.append(first[parent] + lengths[parent] if parent >= 0 else 0)
    return first


def document_boundaries(cu_seqlens: Any) -> tuple[tuple[int, ...], ...]:
    """Checked boundaries of packed documents, one tuple for each batch row (or one for all rows).

    Args:
        cu_seqlens: as in ``Mask.documents``.

    Raises:
        TypeError: the boundaries are not integers.
        ValueError: the boundaries decrease or do not start at 0.
    """
    rows = batch_rows("cu_seqlens", cu_seqlens)
    for row in rows:
        if not row or row[0] != 0:
            raise ValueError(f"cu_seqlens={short(row)}: the first boundary must be 0; put a 0 in front")
        for before, after in pairwise(row):
            if after < before:
                raise ValueError(
                    f"cu_seqlens={short(row)}: {after} follows {before}, but boundaries must not decrease; "
                    "pass cumulative lengths (torch.cumsum of the documents' lengths, after a 0)"
                )
    return rows


def causal_blocks(blocks: Sequence[Any]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """The blocks of each batch row, checked; of one row if they are given once for all rows."""
    if not isinstance(blocks, Sequence) or not all(isinstance(item, Sequence) for item in blocks):
        raise TypeError(
            f"causal blocks={blocks!r}: expected pairs (first token, one past the last), or a list of those"
        )
    nested = any(len(item) == 0 or not isinstance(item[0], int) for item in blocks)
    checked = []
    for row in blocks if nested else [blocks]:
        pairs = [ints("causal blocks", pair) for pair in row]
        ends = [position for pair in pairs for position in pair]
        if (
            any(len(pair) != 2 or pair[0] >= pair[1] for pair in pairs)
            or ends != sorted(ends)
            or min(ends, default=0) < 0
        ):
            raise ValueError(
                f"causal blocks={short(pairs)}: expected pairs (first token, one past the last), increasing and "
                "without overlap"
            )
        checked.append(tuple((first, stop) for first, stop in pairs))
    return tuple(checked)


def ints(name: str, value: Any) -> tuple[int, ...]:
    """``value`` as a flat tuple of ints."""
    if isinstance(value, np.ndarray):
        value = _as_tensor(name, value)
    if isinstance(value, Tensor):
        check_dense(name, value)
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool or value.dim() > 1:
            raise TypeError(
                f"{name}: expected a one-dimensional integer tensor, got {value.dtype} of {value.dim()} dimensions"
            )
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str):
        value = (value,)
    items: list[Any] = [
        item.item() if isinstance(item, np.generic) or (isinstance(item, Tensor) and item.dim() == 0) else item
        for item in value
    ]
    for item in items:
        check_int(name, item)
    return tuple(items)


def batch_rows(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    """``value`` as one tuple of ints for each batch row."""
    if isinstance(value, np.ndarray):
        value = _as_tensor(name, value)
    if isinstance(value, Tensor) and value.dim() == 2:
        check_dense(name, value)
        value = list(value)
    nested = isinstance(value, Sequence) and any(
        isinstance(row, Sequence) or (isinstance(row, Tensor | np.ndarray) and row.ndim == 1) for row in value
    )
    if not nested and not isinstance(value, Sequence | Tensor):
        raise TypeError(f"{name}={value!r}: expected a sequence of ints or an integer tensor")
    return tuple(ints(name, row) for row in value) if nested else (ints(name, value),)


def _as_tensor(name: str, value: np.ndarray[Any, Any]) -> Tensor:
    if value.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got a NumPy array of {value.dtype}")
    return torch.from_numpy(value.astype(np.int64))


def _by_row(rows: Sequence[Any]) -> str:
    """The argument of a constructor for ``rows``, one value for each batch row; the only one alone."""
    values = [list(row) if isinstance(row, tuple) else row for row in rows]
    return repr(values if len(values) > 1 else values[0])


def short(values: Sequence[Any]) -> str:
    shown = [str(v) for v in values[:8]] + (["..."] if len(values) > 8 else [])
    return f"[{', '.join(shown)}]"
