"""Masks as intervals of visible keys, for most masks one for each query.

Most masks have the same form: the query at global position ``i`` sees the keys at global positions
``lo(i) <= j < hi(i)``, and neither ``lo`` nor ``hi`` ever decreases in ``i``. Full, causal, sliding-window,
packed-document, prefix-LM, chunked and padded attention have this form, and so does every intersection of them.
A mask therefore needs two integers per query instead of a row of a dense matrix. ``runs.py`` describes them by even
fewer. A union, a tree or block diffusion consists of a few *parts* of this form that are disjoint: attention computes
them one after another. Groups of heads may have masks of their own.

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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..base.checks import check_bool, check_choice, check_int
from ..base.compile_types import Opaque, register_reference_type
from .rules import (
    RANGE_TYPES,
    AnyOf,
    BlockDiffusion,
    ByHeads,
    CausalBlocks,
    Chunked,
    Documents,
    GlobalTokens,
    Padding,
    PrefixLM,
    QueryRanges,
    RangeType,
    Rule,
    SlidingWindow,
    Tree,
    batch_rows,
    causal_blocks,
    described,
    document_boundaries,
    ints,
    merged_positions,
    parts_of,
    range_pairs,
    short,
    tree_rows,
)
from .runs import NOTHING, UNBOUNDED, Interval, Runs

_CACHED_LENGTHS = 8
# Of a picture: the cells along a side, the most tokens, and cells of which no, some and all pairs are visible.
_CELLS, _MOST_SHOWN = 8, 1 << 20
_EMPTY, _PART, _FULL = "·▪■"


# A compiled function depends on the kinds of rules, not on the boundaries of documents.
@register_reference_type(lambda mask: [mask.is_local], reads=["is_local"])
@dataclass(frozen=True)
class Mask(Opaque):
    """Which keys each query sees. Make masks with the constructors below and combine them with ``&`` and ``|``.

    A mask is immutable, hashable and comparable. It holds no tensors and does not depend on how the sequence is
    sharded. Positions are always *global*. ``print`` draws a mask; its ``repr`` is the code that makes it.

    Examples:
        >>> Mask.causal() & Mask.sliding_window(1023)  # the last 1,024 tokens, the query's own included
    """

    rules: tuple[Rule, ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)
    _parts: dict[int, tuple[tuple[Runs, ...], ...]] = field(init=False, repr=False, compare=False, default_factory=dict)
    # Plans and layer masks that have been computed from this mask. They are freed and pickled together with it.
    plans: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        # Each layer looks the mask up in caches. Hashing thousands of document boundaries each time would be slow.
        object.__setattr__(self, "_hash", hash(self.rules))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return described(self.rules)

    def __str__(self) -> str:
        """The constructors, and a picture of what the queries of the first batch row see."""
        tokens = min(max([_CELLS, *(rule.shown for rule in self.rules)]), _MOST_SHOWN)
        side = -(-tokens // _CELLS)  # of a cell, in tokens
        name = repr(self) if len(repr(self)) <= 100 else f"{repr(self)[:97]}..."
        of_cells = f"; {side:,} tokens a cell, {_FULL} all, {_PART} some" if side > 1 else ""
        of_rows = f"; row 0 of {self.batch}" if self.batch > 1 else ""
        lines = [name, f"queries down, keys across{of_cells}{of_rows}"]
        for i, group in enumerate(self.head_groups, 1):
            lines += [f"heads: group {i} of {len(self.head_groups)}", *group._picture(side)]
        return "\n".join(lines if self.head_groups else [*lines, *self._picture(side)])

    def _picture(self, side: int) -> list[str]:
        """The rows of a picture whose cells have ``side`` tokens."""
        positions = torch.arange(_CELLS * side, device="cpu")
        first, drawn = positions[::side], []  # the first key of each cell
        for queries in positions.split(side):
            pairs = torch.zeros(_CELLS, dtype=torch.int64, device="cpu")  # visible ones
            for lo, hi in ((torch.atleast_2d(x)[0, :, None] for x in ends) for ends in self.interval_sets(queries)):
                pairs += (hi.minimum(first + side) - lo.maximum(first)).clamp(min=0).sum(0)
            drawn.append(" ".join(_EMPTY if x == 0 else _FULL if x == side**2 else _PART for x in pairs.tolist()))
        return drawn

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
            return Mask((SlidingWindow(-1 if window is None else window - 1, 0),))
        return Mask((CausalBlocks(causal_blocks(blocks), window),))

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
        return Mask((SlidingWindow(left, right),)) if (left, right) != (-1, -1) else Mask()

    @staticmethod
    def documents(cu_seqlens: Any, causal: bool = True, padding: bool = False) -> Mask:
        """Packed documents: a query sees only keys of its own document.

        Args:
            cu_seqlens: int ``[docs + 1]``, the documents' boundaries in global positions of the whole sequence, not of
                a shard: 0 first, never decreasing, the sequence's length last. A tensor, a NumPy array or a sequence of
                ints, or a list of those, one for each batch row. A CUDA tensor is copied to the host once, here.
            causal: inside a document, a query sees only the keys up to itself.
            padding: whether the last boundary may be smaller than the sequence's length. Tokens after it are padding:
                they see nothing and no query sees them. Otherwise attention raises an error for such boundaries.

        Raises:
            TypeError: the boundaries are not integers, or another argument is not a bool.
            ValueError: the boundaries decrease or do not start at 0.
        """
        check_bool("documents causal", causal)
        check_bool("documents padding", padding)
        return Mask((Documents(document_boundaries(cu_seqlens), causal, padding),))

    @staticmethod
    def prefix_lm(prefix_len: int | Sequence[int] | Tensor) -> Mask:
        """Every query sees the first ``prefix_len`` keys, and the rest causally (T5's prefix LM).

        Args:
            prefix_len: one int, or one for each batch row.

        Raises:
            TypeError: a length is not an int.
            ValueError: a length is negative.
        """
        lengths = ints("prefix_len", prefix_len)
        if not lengths or min(lengths) < 0:
            raise ValueError(f"prefix_len={short(lengths)}: give lengths >= 0, one int or one for each batch row")
        return Mask((PrefixLM(lengths),))

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
        rows = batch_rows("chunked starts", () if starts is None else starts)
        for row in rows:
            if row and min(row) < 0:
                raise ValueError(f"chunked starts={short(row)}: give positions >= 0")
        return Mask((Chunked(size, causal, tuple(tuple(sorted({0, *row})) for row in rows)),))

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
        begin = ints("padding starts", starts)
        end = (UNBOUNDED,) if stops is None else ints("padding stops", stops)
        rows = max(len(begin), len(end))
        if {len(begin), len(end)} - {1, rows} or not begin or not end:
            raise ValueError(
                f"padding: starts for {len(begin)} batch rows, stops for {len(end)}; give one int, or one for each row"
            )
        begin, end = (x * rows if len(x) == 1 else x for x in (begin, end))
        for start, stop in zip(begin, end, strict=True):
            if start < 0 or stop < start:
                raise ValueError(f"padding: start {start}, stop {stop}; expected 0 <= start <= stop")
        return Mask((Padding(begin, end),))

    @staticmethod
    def global_tokens(n: int) -> Mask:
        """Every query sees the first ``n`` keys, and no others.

        A part of a union: ``(Mask.sliding_window(255) | Mask.global_tokens(4)) & Mask.causal()`` is a causal window
        that keeps the first keys. For tokens that also see all keys, as in Longformer, add
        ``Mask.ranges([(0, n)], [(0, seq_len)], ["full"])``.

        Args:
            n: the number of global tokens.

        Raises:
            TypeError: ``n`` is not an int.
            ValueError: ``n`` is below 1.
        """
        check_int("global_tokens n", n)
        if n < 1:
            raise ValueError(f"global_tokens n={n}: give at least 1 token")
        return Mask((GlobalTokens(n),))

    @staticmethod
    def tree(parents: Any, lengths: Any, padding: bool = False, window: int | None = None) -> Mask:
        """A tree of segments: a token sees its own segment causally, and the segments of all ancestors.

        A prompt and its answers are such a tree, ``Mask.tree([-1, 0, 0], [100, 20, 30])``, and so are the branches of
        an agent's episode. The segments lie depth first: each one directly behind its parent, or behind the branches of
        its elder siblings. ``seqpar.tree_positions`` has the positions for rotary embeddings.

        Args:
            parents: for each segment the number of its parent, an earlier segment; -1 for a root. A sequence of ints or
                an integer tensor, or a list of those, one for each batch row.
            lengths: the number of tokens of each segment, in the order of ``parents``.
            padding: whether the sequence may be longer. Tokens after the last segment are padding: they see nothing and
                no query sees them.
            window: how many tokens of its path a token sees at most, the last ones up to itself. ``& sliding_window``
                counts all tokens that lie between two tokens, also those of other branches. A tree with more than 16
                leaves may need too many intervals of keys.

        Raises:
            TypeError: the parents, lengths or window are not integers, or ``padding`` is not a bool.
            ValueError: the segments do not lie depth first, a query would see too many intervals of keys, or the window
                is below 1.
        """
        check_bool("tree padding", padding)
        if window is not None:
            check_int("tree window", window, 1)
        return Mask((Tree(*tree_rows(parents, lengths), padding, window),))

    @staticmethod
    def block_diffusion(clean_len: int, block_size: int) -> Mask:
        """The mask of block diffusion, for ``clean_len`` clean tokens followed by as many noisy ones.

        Both halves are divided into blocks. A clean token sees the clean blocks up to its own; a noisy token sees the
        clean blocks before its own, and its own noisy block (Arriola et al., "Block Diffusion", 2025).

        Args:
            clean_len: half of the sequence's tokens.
            block_size: tokens in a block. The last block may be smaller.

        Raises:
            TypeError: an argument is not an int.
            ValueError: an argument is below 1.
        """
        for name, value in (("clean_len", clean_len), ("block_size", block_size)):
            check_int(f"block_diffusion {name}", value)
            if value < 1:
                raise ValueError(f"block_diffusion {name}={value}: give at least 1 token")
        return Mask((BlockDiffusion(clean_len, block_size),))

    @staticmethod
    def ranges(q_ranges: Any, k_ranges: Any, types: Sequence[RangeType]) -> Mask:
        """Each range of queries sees a range of keys, as in MagiAttention. Ranges may overlap.

        Args:
            q_ranges: pairs (first position, one past the last), in positions of the whole sequence.
            k_ranges: the keys that each range of queries sees, as the same kind of pairs.
            types: which of the keys each of them sees. "full": all. "causal": the last query sees all of them, and each
                query before it one key fewer at the end. "inv_causal": the first query sees all of them, and each query
                after it one key fewer at the beginning. "bi_causal": both.

        Raises:
            TypeError: a position is not an int.
            ValueError: a pair that is no range, another type, or different numbers of ranges and types.
        """
        queries, keys = range_pairs("q_ranges", q_ranges), range_pairs("k_ranges", k_ranges)
        for kind in types:
            check_choice("ranges type", kind, RANGE_TYPES)
        if not len(queries) == len(keys) == len(types):
            raise ValueError(
                f"ranges: {len(queries)} q_ranges, {len(keys)} k_ranges and {len(types)} types; give one of each for "
                "each range"
            )
        return Mask((QueryRanges(queries, keys, tuple(types)),))

    @staticmethod
    def by_heads(masks: Sequence[Mask]) -> Mask:
        """A mask for each group of heads: the query heads in as many equal groups of consecutive heads, with their KV
        heads.

        Each group's keys and values are sent only where its mask needs them. In LongLoRA's shifted sparse attention,
        the blocks of half of the heads are shifted by half a block:
        ``Mask.by_heads([Mask.chunked(n), Mask.chunked(n, starts=[n // 2])])``. The number of groups must divide
        the query heads and the KV heads of the call; of a tensor-parallel layer, those of the model.

        Args:
            masks: for each group its mask, none of which is made by ``by_heads``.

        Raises:
            TypeError: ``masks`` is not a list or tuple of masks.
            ValueError: there is none, one is made by ``by_heads``, or they differ in the number of batch rows.
        """
        if not isinstance(masks, list | tuple) or not all(isinstance(mask, Mask) for mask in masks):
            raise TypeError(f"by_heads masks={masks!r:.200}: expected a list of masks, one for each group of heads")
        if not masks or any(mask.head_groups for mask in masks):
            raise ValueError(f"by_heads masks={masks!r:.200}: give at least one mask, and none that is by_heads itself")
        if len(rows := {mask.batch for mask in masks} - {1}) > 1:
            raise ValueError(f"by_heads masks: they are for {sorted(rows)} batch rows; give masks for the same rows")
        return Mask((ByHeads(tuple(mask.rules for mask in masks)),)) if len(masks) > 1 else masks[0]

    @cached_property
    def head_groups(self) -> tuple[Mask, ...]:
        """The mask of each group of heads; none if all heads share this mask."""
        rule = self.rules[0] if len(self.rules) == 1 else None
        return tuple(map(Mask, rule.masks)) if isinstance(rule, ByHeads) else ()

    def check_heads(self, heads: int, kv_heads: int) -> None:
        """Check that every group of heads of the mask has as many of the ``heads`` and ``kv_heads`` of attention.

        Raises:
            ValueError: the heads do not divide by the groups, or two groups would read the same KV head.
        """
        groups = max(1, len(self.head_groups))
        if heads % groups or kv_heads % groups:
            raise ValueError(
                f"mask: by_heads of {groups} groups, but attention has {heads} query heads and {kv_heads} KV heads; "
                "the groups have equally many heads, and share no KV head: give a number of masks that divides both "
                "(latents count as one KV head)"
            )

    def __or__(self, other: Mask) -> Mask:
        """A query sees the keys that it sees under one of the masks or under both.

        Attention computes a union as a few parts that are disjoint, in each of which a query sees one interval of keys.
        A union that needs more than 16 parts raises a ValueError where it is used with a sequence.
        """
        if not isinstance(other, Mask):
            return NotImplemented
        self._check_combined(other)
        if self.head_groups or other.head_groups:
            raise ValueError(
                f"mask: {self!r:.60} | {other!r:.60}: by_heads cannot be a part of a union; write the union for each "
                "group of heads, Mask.by_heads([a | c, b | c])"
            )
        masks: tuple[tuple[Rule, ...], ...] = ()
        for mask in (self, other):
            rules = mask.rules
            masks += rules[0].masks if len(rules) == 1 and isinstance(rules[0], AnyOf) else (rules,)
        if () in masks:
            return Mask()
        masks = tuple(dict.fromkeys(masks))
        return Mask((AnyOf(masks),)) if len(masks) > 1 else Mask(masks[0])

    def _check_combined(self, other: Mask) -> None:
        if len({m.batch for m in (self, other) if m.batch > 1}) > 1:
            raise ValueError(f"masks for {self.batch} and {other.batch} batch rows cannot be combined")

    def __and__(self, other: Mask) -> Mask:
        """A query sees the keys that it sees under both masks."""
        if not isinstance(other, Mask):
            return NotImplemented
        self._check_combined(other)
        if groups := max(len(self.head_groups), len(other.head_groups)):
            ours, theirs = self.head_groups or (self,) * groups, other.head_groups or (other,) * groups
            if len(ours) != len(theirs):
                raise ValueError(f"masks of {len(ours)} and {len(theirs)} groups of heads cannot be combined")
            return Mask.by_heads([a & b for a, b in zip(ours, theirs, strict=True)])
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
        return merged_positions([rule.starts for rule in self.rules], self.batch)

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """For each batch row, positions that no visible pair crosses, increasing: they divide it into documents.

        The positions of ``starts``, and under a mask with branches the roots of trees and the ends of connected ranges.
        """
        return merged_positions([rule.cuts for rule in self.rules], self.batch)

    @property
    def has_window(self) -> bool:
        """Whether a window or chunks hide distant keys from queries."""
        return any(rule.has_window for rule in self.rules)

    @property
    def is_local(self) -> bool:
        """Whether most queries see only keys nearby, because of a window, chunks or packed documents."""
        return any(rule.is_local for rule in self.rules)

    @property
    def branches(self) -> bool:
        """Whether queries may see several intervals of keys: a union, a tree, global tokens, block diffusion."""
        return any(rule.branches for rule in self.rules)

    def check_length(self, seq_len: int) -> None:
        """Check that the mask fits a sequence of ``seq_len`` tokens. Attention calls it.

        Raises:
            ValueError: the last boundary of ``documents`` lies beyond the sequence's end, or before it without
                ``padding``; or a block of ``causal`` lies beyond the end.
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
            ValueError: a query sees several intervals of keys, which ``interval_sets`` returns.
        """
        sets = self.interval_sets(positions)
        if len(sets) > 1:
            raise ValueError(
                f"mask: queries see up to {len(sets)} intervals of keys under {repr(self)[:80]}; call "
                "mask.interval_sets(positions) where several are possible"
            )
        return sets[0]

    def interval_sets(self, positions: Tensor) -> list[Interval]:
        """The visible keys of the queries at ``positions``, for a mask whose queries may see several intervals.

        Args:
            positions: int64 ``[n]``, global positions.

        Returns:
            One or more pairs ``(lo, hi)`` as ``intervals`` returns them. A query sees the keys of all pairs, which have
            no key in common; in some pairs it may see nothing. Neither ``lo`` nor ``hi`` decreases along the positions.

        Raises:
            TypeError: ``positions`` is not an integer tensor.
            ValueError: the mask needs too many intervals.
        """
        if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
            got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
            raise TypeError(f"positions: expected an integer tensor [n], got {got}")
        seq_len = int(positions.max()) + 1 if positions.numel() else 0
        sets = []
        for part in self.parts(seq_len):
            rows = [runs.at(positions) for runs in part]
            if len(rows) > 1:
                rows[0] = torch.stack([lo for lo, _ in rows]), torch.stack([hi for _, hi in rows])
            sets.append(rows[0])
        return sets

    def parts(self, seq_len: int) -> tuple[tuple[Runs, ...], ...]:
        """For each part of the mask and each batch row, the intervals of a sequence of ``seq_len`` tokens.

        A mask whose queries see one interval each has one part. Cached and pickled with the mask.
        """
        if seq_len not in self._parts:
            by_row = [parts_of(self.rules, row, seq_len) for row in range(self.batch)]
            if len(self._parts) >= _CACHED_LENGTHS:
                self._parts.clear()
            self._parts[seq_len] = tuple(zip_longest(*by_row, fillvalue=NOTHING))
        return self._parts[seq_len]

    def runs(self, seq_len: int) -> tuple[Runs, ...]:
        """The intervals of all groups of heads, parts and batch rows, one group and one part after another."""
        if groups := self.head_groups:
            return tuple(runs for group in groups for runs in group.runs(seq_len) * (self.batch // group.batch))
        first, *more = self.parts(seq_len)
        return sum(more, first)

    def dense(self, seq_len: int) -> Tensor:
        """The mask as bool ``[seq_len, seq_len]`` (``[batch, seq_len, seq_len]``), True where visible.

        Of ``by_heads`` it is ``[batch, groups, seq_len, seq_len]``, with a batch of 1 if all rows share the mask. For
        references and tests: its size is quadratic in the sequence's length.
        """
        check_int("seq_len", seq_len, 0)
        if groups := [group.dense(seq_len) for group in self.head_groups]:
            return torch.stack([x.expand(self.batch, seq_len, seq_len) for x in groups], 1)
        keys = torch.arange(seq_len, device="cpu")
        seen = [(keys >= lo[..., None]) & (keys < hi[..., None]) for lo, hi in self.interval_sets(keys)]
        return torch.stack(seen).any(0)


def check_rows(mask: Mask, name: str, x: Tensor) -> None:
    """Raise if ``mask`` has rows of its own for another number of batch rows than ``x``, called ``name``, has."""
    if mask.batch not in (1, x.shape[0]):
        raise ValueError(
            f"mask: made for {mask.batch} batch rows, but {name} has {x.shape[0]}; if {name} is a micro-batch of a "
            "pipeline, give the stages what the mask is made from as a tensor with one row for each batch row, which "
            "the schedule splits into micro-batches, and make the mask in the stage"
        )


def mask_of_rows(mask: Mask, rows: Sequence[int]) -> Mask:
    """The mask of some of the batch rows, such as a micro-batch's. A mask that all rows share is returned as it is."""
    return mask if mask.batch == 1 else Mask(tuple(rule.of_rows(rows) for rule in mask.rules))


LayerMask = tuple[bool, int | None, int | None]  # causal, window and chunk of ``layer_mask``


def layer_mask(mask: Mask, causal: bool, window: int | None, chunk: int | None) -> Mask:
    """The mask of a layer: the batch's mask, restricted to causal pairs, to ``|i - j| < window`` or to chunks.

    In a tree, ``i`` and ``j`` are positions along a path.

    Stored in ``mask.plans``, so that the layer's mask and its plans are freed and pickled together with ``mask``.
    """
    key = causal, window, chunk
    result: Mask | None = mask.plans.get(key)
    if result is None and mask.head_groups:
        mask.plans[key] = result = Mask.by_heads([layer_mask(x, *key) for x in mask.head_groups])
    elif result is None:
        result = mask & Mask.causal() if causal else mask
        if window is not None and any(isinstance(rule, AnyOf) and rule.has_tree for rule in mask.rules):
            raise ValueError(
                f"mask: {mask!r:.60}: a layer has a window of {window} tokens, which would be counted across the "
                "branches of the tree inside of the union; pass the tree itself as the mask"
            )
        if window is not None and any(isinstance(rule, Tree) for rule in mask.rules):
            along = (replace(rule, window=window) if isinstance(rule, Tree) else rule for rule in result.rules)
            result = Mask(tuple(along))
        elif window is not None:
            result = result & Mask.sliding_window(window - 1, 0 if causal else window - 1)
        if chunk:
            result = result & Mask.chunked(chunk, causal, starts=mask.starts)
        if result is not mask:
            mask.plans[key] = result
    return result
