"""Hypothesis strategies that generate masks: the rules of ``reference.py``, and the package's masks for these rules."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from seqpar import Mask

from .reference import Rule, Rules, combined_mask


@st.composite
def boundaries(draw: st.DrawFn, seq_len: int, padding: bool) -> tuple[int, ...]:
    """Document boundaries. Documents may be empty. With ``padding`` the last tokens may belong to no document."""
    inner = sorted(draw(st.lists(st.integers(0, seq_len), max_size=6)))
    return (0, *inner) if padding else (0, *inner, seq_len)


@st.composite
def trees(draw: st.DrawFn, seq_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The parents and lengths of a tree, whose segments may be empty."""
    parents, path = list[int](), list[int]()
    for i, up in enumerate(draw(st.lists(st.integers(0, 3), min_size=1, max_size=8))):
        path = path[: max(0, len(path) - up)]
        parents.append(path[-1] if path else -1)
        path.append(i)
    edges = sorted(draw(st.lists(st.integers(0, seq_len), min_size=len(parents) - 1, max_size=len(parents) - 1)))
    return tuple(parents), tuple(b - a for a, b in pairwise((0, *edges, seq_len)))


@st.composite
def rules(draw: st.DrawFn, seq_len: int, rows: int = 1) -> Rule:
    """Any rule. With ``rows > 1``, its arguments may differ between the ``rows`` batch rows."""

    def per_row(one: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
        return st.one_of(one, st.tuples(*[one] * rows)) if rows > 1 else one

    names = ["full", "causal", "sliding_window", "documents", "prefix_lm", "chunked", "padding", "tree", "any_of"]
    name = draw(st.sampled_from(names))
    if name == "any_of":
        of_one = st.lists(rules(seq_len, rows), min_size=1, max_size=2).map(tuple)
        return Rule(name, (draw(of_one), draw(st.one_of(of_one, st.just((Rule("global_tokens", (2,)),))))))
    if name == "tree":
        if draw(st.booleans()):
            pair = st.tuples(st.integers(0, seq_len), st.integers(0, seq_len)).map(lambda x: (min(x), max(x)))
            kinds = st.sampled_from(["full", "causal", "inv_causal", "bi_causal"])
            ranges = draw(st.lists(st.tuples(pair, pair, kinds), min_size=1, max_size=4))
            return Rule("ranges", tuple(zip(*ranges, strict=True)))
        if seq_len % 2 == 0 and draw(st.booleans()):
            return Rule("block_diffusion", (seq_len // 2, draw(st.integers(1, seq_len))))
        return Rule(name, (*draw(trees(seq_len)), *draw(st.sampled_from([(), (False, 1), (False, 4), (False, 9)]))))
    if name == "sliding_window":
        return Rule(name, (draw(st.integers(-1, seq_len)), draw(st.integers(-1, seq_len))))
    if name == "documents":
        padding = draw(st.booleans())
        return Rule(name, (draw(per_row(boundaries(seq_len, padding))), draw(st.booleans()), padding))
    if name == "prefix_lm":
        return Rule(name, (draw(per_row(st.integers(0, seq_len + 3))),))
    if name == "chunked":
        starts = per_row(st.lists(st.integers(0, seq_len + 3), max_size=4).map(tuple))
        return Rule(name, (draw(st.integers(1, seq_len + 2)), draw(st.booleans()), draw(starts)))
    if name == "causal" and draw(st.booleans()):
        edges = st.lists(st.integers(0, seq_len), max_size=6, unique=True).map(sorted)
        blocks = edges.map(lambda x: tuple(zip(x[::2], x[1::2], strict=False)))
        block_rows = st.tuples(*[blocks] * rows)
        window = draw(st.one_of(st.just(()), st.tuples(st.integers(1, seq_len + 2))))
        return Rule(name, (draw(block_rows if rows > 1 else blocks), *window))
    if name == "padding":
        ends = st.lists(st.integers(0, seq_len + 3), min_size=2, max_size=2).map(sorted)
        by_row = tuple(zip(*draw(st.tuples(*[ends] * rows)), strict=True))
        return Rule(name, draw(st.sampled_from([by_row, (by_row[0][0], by_row[1][0])])))
    return Rule(name)


@st.composite
def rules_and_length(draw: st.DrawFn) -> tuple[Rules, int]:
    """Up to three rules to be combined, and a sequence length."""
    seq_len, rows = draw(st.integers(1, 24)), draw(st.integers(2, 3))
    return tuple(draw(st.lists(rules(seq_len, rows), min_size=1, max_size=3))), seq_len


@st.composite
def masks(draw: st.DrawFn, seq_len: int) -> Mask:
    """One rule, or the intersection of two, the same for all batch rows."""
    return combined_mask(tuple(draw(st.lists(rules(seq_len), min_size=1, max_size=2))))
