"""Masks agree with their definitions for each pair of query and key, and have the properties that schedules rely on."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import seqpar
from seqpar import Mask
from seqpar.masks.mask import layer_mask, mask_of_rows
from seqpar.masks.rules import Rule
from seqpar.masks.runs import EVERYTHING, Runs

from ..generators import rules_and_length
from ..problems import BATCH_RULES, HEAD_RULES, RULES
from ..reference import Rule as Defined
from ..reference import Rules, combined_mask, rules_id, visible_pairs

# The ranges hide all keys from the first queries that they name, because the other rule shows only earlier keys.
LATE_KEYS = (Defined("ranges", (((28, 75),), ((72, 81),), ("full",))), Defined("prefix_lm", (23,))), 83


def as_rows(dense: torch.Tensor) -> torch.Tensor:
    return dense if dense.dim() == 3 else dense[None]


@given(rules_and_length())
def test_dense_is_the_definition(problem: tuple[Rules, int]) -> None:
    drawn, seq_len = problem
    expected = visible_pairs(drawn, seq_len)
    dense = as_rows(combined_mask(drawn).dense(seq_len))
    assert dense.dtype == torch.bool
    assert torch.equal(dense.expand_as(expected), expected)


@pytest.mark.parametrize("drawn", [*RULES, *BATCH_RULES], ids=rules_id)
def test_dense_is_the_definition_of_every_example(drawn: Rules) -> None:
    expected = visible_pairs(drawn, 50)
    assert torch.equal(as_rows(combined_mask(drawn).dense(50)).expand_as(expected), expected)


@given(rules_and_length(), st.data())
def test_intervals_at_any_positions(problem: tuple[Rules, int], data: st.DataObject) -> None:
    """Asked for the positions of one rank only, a mask gives the same answer as for the whole sequence."""
    drawn, seq_len = problem
    expected = visible_pairs(drawn, seq_len)
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, seq_len - 1), unique=True).map(sorted)), dtype=torch.int64)
    sets, keys = combined_mask(drawn).interval_sets(chosen), torch.arange(seq_len)
    times = torch.zeros(1, len(chosen), seq_len, dtype=torch.int64)  # each visible pair once
    for lo, hi in sets:
        assert lo.dtype == hi.dtype == torch.int64
        assert lo.shape == hi.shape == (*lo.shape[:-1], len(chosen))
        times = times + as_rows((keys >= lo[..., None]) & (keys < hi[..., None]))
    assert torch.equal(times.expand(len(expected), -1, -1), expected[:, chosen].long())


@given(rules_and_length())
def test_intervals_never_fall(problem: tuple[Rules, int]) -> None:
    """What lets a kernel find a block's keys from its first and last row."""
    drawn, seq_len = problem
    for lo, hi in combined_mask(drawn).interval_sets(torch.arange(seq_len)):
        assert bool((lo.diff() >= 0).all())
        assert bool((hi.diff() >= 0).all())
        assert bool(((lo >= 0) & (lo <= hi)).all())


@given(rules_and_length())
@example(LATE_KEYS)
def test_all_queries_of_a_run_see_a_key_or_none(problem: tuple[Rules, int]) -> None:
    """Parts of a mask without keys are found by the first query of each run."""
    drawn, seq_len = problem
    for runs in combined_mask(drawn).runs(seq_len):
        lo, hi = runs.at(torch.arange(seq_len))
        for some in (lo < hi).tensor_split([start for start in runs.starts if start < seq_len]):
            assert some.all() or not some.any()


@given(rules_and_length(), rules_and_length())
def test_and_shows_what_both_show_and_or_what_one_shows(one: tuple[Rules, int], other: tuple[Rules, int]) -> None:
    seq_len = min(one[1], other[1])
    a, b = combined_mask(one[0]), combined_mask(other[0])
    if a.batch > 1 and b.batch > 1 and a.batch != b.batch:
        with pytest.raises(ValueError, match=f"{a.batch} and {b.batch} batch rows"):
            _ = a & b
        with pytest.raises(ValueError, match=f"{a.batch} and {b.batch} batch rows"):
            _ = a | b
        return
    assert torch.equal(*torch.broadcast_tensors((a | b).dense(seq_len), a.dense(seq_len) | b.dense(seq_len)))
    assert torch.equal(*torch.broadcast_tensors((a & b).dense(seq_len), a.dense(seq_len) & b.dense(seq_len)))


@pytest.mark.parametrize("drawn", [*RULES, *BATCH_RULES, *HEAD_RULES], ids=rules_id)
def test_masks_are_values(drawn: Rules) -> None:
    mask, again = combined_mask(drawn), combined_mask(drawn)
    assert mask == again
    assert hash(mask) == hash(again)
    assert pickle.loads(pickle.dumps(mask)) == mask
    assert hash(pickle.loads(pickle.dumps(mask))) == hash(mask)
    others = [combined_mask(other) for other in (*RULES, *BATCH_RULES, *HEAD_RULES) if other != drawn]
    assert mask not in others


def test_the_same_mask_however_it_is_spelled() -> None:
    as_ints = Mask.documents([0, 3, 7])
    assert Mask.documents((0, 3, 7)) == as_ints
    assert Mask.documents(torch.tensor([0, 3, 7], dtype=torch.int32)) == as_ints
    assert Mask.documents([torch.tensor([0, 3]), [0, 7]]) == Mask.documents(((0, 3), (0, 7)))
    assert Mask.sliding_window(-1, -1) == Mask.full()
    assert Mask.sliding_window(-1, 0) == Mask.causal()
    assert Mask.causal() & Mask.causal() == Mask.causal()
    assert Mask.prefix_lm(torch.tensor([2, 5])) == Mask.prefix_lm([2, 5])
    assert Mask.chunked(4) == Mask.chunked(4, starts=[0]) == Mask.chunked(4, starts=torch.tensor([0]))
    assert Mask.chunked(4, starts=[7, 3, 3]) == Mask.chunked(4, starts=(0, 3, 7))
    assert Mask.padding(torch.tensor([2, 5]), 9) == Mask.padding([2, 5], [9, 9])


def test_numpy() -> None:
    boundaries = np.array([0, 3, 7], dtype=np.uint16)
    as_ints = Mask.documents([0, 3, 7])
    assert Mask.documents(boundaries) == Mask.documents([*boundaries]) == as_ints
    assert Mask.documents(np.array([[0, 3, 7], [0, 2, 7]])) == Mask.documents([[0, 3, 7], [0, 2, 7]])
    assert Mask.documents([boundaries, [0, 7]]) == Mask.documents([[0, 3, 7], [0, 7]])
    assert Mask.prefix_lm(np.int32(3)) == Mask.prefix_lm(3)
    assert Mask.padding(np.array([1, 2])) == Mask.padding([1, 2])
    for wrong in (np.array([0.0, 7.0]), [np.float64(0), 7], np.array(["0"]), np.array([True])):
        with pytest.raises(TypeError, match="cu_seqlens"):
            Mask.documents(wrong)


SPELLED = [
    "Mask.full()",
    "Mask.causal()",
    "Mask.causal() & Mask.sliding_window(1023)",
    "Mask.sliding_window(-1, 3)",
    "Mask.causal([(2, 5)], window=3)",
    "Mask.causal([[(2, 5)], []])",
    "Mask.causal([])",
    "Mask.documents([0, 3, 8], causal=False, padding=True)",
    "Mask.documents([[0, 3], [0, 8]])",
    "Mask.prefix_lm(3)",
    "Mask.prefix_lm([3, 4])",
    "Mask.chunked(3)",
    "Mask.chunked(3, causal=False, starts=[[0, 1], [0]])",
    "Mask.padding(3)",
    "Mask.padding([0, 2], [4, 5])",
    "Mask.causal() | Mask.prefix_lm(3) | Mask.documents([[0, 3], [0, 8]])",
    "(Mask.sliding_window(3) | Mask.global_tokens(2)) & Mask.causal()",
    "Mask.causal() & Mask.sliding_window(3) | Mask.global_tokens(2)",
    "Mask.tree([-1, 0, 0], [3, 2, 2])",
    "Mask.tree([[-1], [-1, 0]], [[3], [1, 2]], padding=True)",
    "Mask.tree([-1, 0, 0], [3, 2, 2], window=3)",
    "Mask.block_diffusion(6, 2)",
    "Mask.ranges([(0, 4), (4, 8)], [(0, 4), (2, 6)], ['causal', 'bi_causal'])",
]


@pytest.mark.parametrize("code", SPELLED)
def test_repr_is_the_code(code: str) -> None:
    assert repr(eval(code)) == code


@pytest.mark.parametrize("drawn", [*RULES, *BATCH_RULES, *HEAD_RULES], ids=rules_id)
def test_repr_makes_the_mask(drawn: Rules) -> None:
    mask = combined_mask(drawn)
    assert eval(repr(mask)) == mask and "\n" not in repr(mask)


def test_a_picture() -> None:
    assert str(Mask.causal() & Mask.sliding_window(2)).splitlines() == [
        "Mask.causal() & Mask.sliding_window(2)",
        "queries down, keys across",
        "■ · · · · · · ·",
        "■ ■ · · · · · ·",
        "■ ■ ■ · · · · ·",
        "· ■ ■ ■ · · · ·",
        "· · ■ ■ ■ · · ·",
        "· · · ■ ■ ■ · ·",
        "· · · · ■ ■ ■ ·",
        "· · · · · ■ ■ ■",
    ]


def test_a_picture_of_many_tokens() -> None:
    assert str(Mask.documents([[0, 16, 24, 32], [0, 32]], causal=False)).splitlines()[1:] == [
        "queries down, keys across; 4 tokens a cell, ■ all, ▪ some; row 0 of 2",
        *["■ ■ ■ ■ · · · ·"] * 4,
        *["· · · · ■ ■ · ·"] * 2,
        *["· · · · · · ■ ■"] * 2,
    ]
    name, _, *rows = str(Mask.documents(list(range(0, 2000, 10)))).splitlines()
    assert (
        name == "Mask.documents([0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 170, 18..."
    )
    assert [row.count("▪") for row in rows] == [1, 2, 2, 2, 2, 2, 2, 2]
    assert "131,072 tokens a cell" in str(Mask.sliding_window(2**60))


@pytest.mark.parametrize("drawn", [*RULES, *BATCH_RULES], ids=rules_id)
def test_a_picture_has_the_pairs(drawn: Rules) -> None:
    """A cell is empty, full or in part, as its pairs of queries and keys are by the definition."""
    _, legend, *rows = str(combined_mask(drawn)).splitlines()
    side = int(legend.split("; ")[1].split()[0]) if "tokens a cell" in legend else 1
    pairs = visible_pairs(drawn, 8 * side)[0].view(8, side, 8, side)
    symbols = {(False, False): "·", (True, False): "▪", (True, True): "■"}
    seen = zip(pairs.any(3).any(1).flatten().tolist(), pairs.all(3).all(1).flatten().tolist(), strict=True)
    assert [symbols[cell] for cell in seen] == " ".join(rows).split()


def test_pictures_of_branching_masks() -> None:
    """A prompt of three tokens with two answers, of two tokens and of three; and block diffusion: readable by eye."""
    assert str(Mask.tree([-1, 0, 0], [3, 2, 3])).splitlines() == [
        "Mask.tree([-1, 0, 0], [3, 2, 3])",
        "queries down, keys across",
        "■ · · · · · · ·",
        "■ ■ · · · · · ·",
        "■ ■ ■ · · · · ·",
        "■ ■ ■ ■ · · · ·",
        "■ ■ ■ ■ ■ · · ·",
        "■ ■ ■ · · ■ · ·",
        "■ ■ ■ · · ■ ■ ·",
        "■ ■ ■ · · ■ ■ ■",
    ]
    assert str(Mask.block_diffusion(4, 2)).splitlines()[2:] == [
        *["■ ■ · · · · · ·"] * 2,
        *["■ ■ ■ ■ · · · ·"] * 2,
        *["· · · · ■ ■ · ·"] * 2,
        *["■ ■ · · · · ■ ■"] * 2,
    ]
    assert str(Mask.sliding_window(1, 1) | Mask.global_tokens(1)).splitlines()[2:6] == [
        "■ ■ · · · · · ·",
        "■ ■ ■ · · · · ·",
        "■ ■ ■ ■ · · · ·",
        "■ · ■ ■ ■ · · ·",
    ]


def test_unions_are_as_few_intervals_as_they_can_be() -> None:
    """Intervals that touch are one, and the parts of a mask are no more than a query sees."""

    def parts(mask: Mask) -> int:
        return len(mask.parts(64))

    assert (
        parts(Mask.sliding_window(5) | Mask.causal()) == parts(Mask.sliding_window(3) | Mask.sliding_window(0, 4)) == 1
    )
    assert (Mask.sliding_window(3) | Mask.sliding_window(0, 4)).intervals(torch.tensor([9]))[1].tolist() == [14]
    assert parts(Mask.full() | Mask.causal()) == 1 and Mask.causal() | Mask.full() == Mask.full()
    assert parts((Mask.sliding_window(5) | Mask.global_tokens(2)) & Mask.causal()) == 2
    assert parts(Mask.tree([-1, 0, 1, 2], [10, 20, 30, 4])) == 1  # only children
    assert parts(Mask.tree([-1] + [0] * 6, [4] + [10] * 6)) == parts(Mask.block_diffusion(32, 8)) == 2
    window = Mask.sliding_window(3)
    assert window | window == window
    assert (window | Mask.causal()) | Mask.prefix_lm(2) == window | (Mask.causal() | Mask.prefix_lm(2))


def test_what_has_one_interval_refuses_several() -> None:
    mask = Mask.sliding_window(5) | Mask.global_tokens(2)
    with pytest.raises(ValueError, match=r"up to 2 intervals of keys .*call mask\.interval_sets"):
        mask.intervals(torch.arange(16))
    for branching in (mask, Mask.causal() & mask, Mask.tree([-1, 0, 0], [2, 3, 4]), Mask.block_diffusion(4, 2)):
        assert branching.branches
        with pytest.raises(ValueError, match="several intervals of keys for a query, so its tokens are no sequences"):
            _ = branching.starts
    assert not (Mask.causal() & Mask.padding(3)).branches


def caterpillar(levels: int) -> list[int]:
    """The parents of a tree in which a query of the last segment sees ``levels`` intervals."""
    return [-1, *(parent for level in range(0, 2 * levels - 2, 2) for parent in (level, level))]


def test_too_many_intervals() -> None:
    parents = caterpillar(16)
    seq_len = 3 * len(parents)
    mask = Mask.tree(parents, [3] * len(parents))
    assert len(mask.parts(seq_len)) == 16
    hidden = int((~mask.dense(seq_len)[-1]).nonzero()[1])  # in the middle of a segment that the last query does not see
    one_more = Mask.ranges([(seq_len - 1, seq_len)], [(hidden, hidden + 1)], ["full"])
    with pytest.raises(ValueError, match="more than 16 intervals of keys"):
        (mask | one_more).parts(seq_len)
    with pytest.raises(ValueError, match="a query would see 17 intervals of keys"):
        Mask.tree(caterpillar(17), [1] * 33)


def test_ranges_with_queries_between_them() -> None:
    """Queries that see nothing lie between two ranges whose keys overlap: no end decreases there."""
    mask = Mask.ranges([(0, 4), (6, 8)], [(0, 4), (2, 6)], ["full", "full"])
    sets = mask.interval_sets(torch.arange(8))
    assert all(bool((end.diff() >= 0).all()) for ends in sets for end in ends)
    assert [int(row.sum()) for row in mask.dense(8)] == [4, 4, 4, 4, 0, 0, 4, 4]


def test_positions_along_a_tree() -> None:
    assert seqpar.tree_positions([-1, 0, 0, 2], [3, 2, 1, 2]).tolist() == [0, 1, 2, 3, 4, 3, 4, 5]
    by_row = seqpar.tree_positions([[-1, 0, 0], [-1, -1, 1]], [[2, 1, 1], [1, 0, 3]])
    assert by_row.dtype == torch.int64 and by_row.tolist() == [[0, 1, 2, 2], [0, 0, 1, 2]]
    # A token's position is the number of earlier tokens that it sees.
    parents, lengths = [-1, 0, 1, 1, 0, -1, 5], [4, 3, 0, 5, 6, 2, 7]
    seen = Mask.tree(parents, lengths).dense(27).sum(1) - 1
    assert torch.equal(seqpar.tree_positions(parents, lengths), seen)


def test_a_new_rule_must_say_whether_it_is_local() -> None:
    class Silent(Rule):
        constructor, shown = "silent()", 8

        def runs(self, row: int, seq_len: int) -> Runs:
            return EVERYTHING

    with pytest.raises(TypeError, match=r"abstract.* is_local"):
        Silent()  # type: ignore[abstract]


def test_a_worked_example() -> None:
    """Two documents and a padding token, a window of two: readable by eye."""
    mask = Mask.documents([0, 3, 5]) & Mask.sliding_window(1)
    expected = [
        "x.....",
        "xx....",
        ".xx...",
        "...x..",
        "...xx.",
        "......",
    ]
    assert ["".join("x" if seen else "." for seen in row) for row in mask.dense(6)] == expected


def test_chunks_of_padded_documents() -> None:
    """Chunks of two start again at each document and at the first token: readable by eye."""
    packed = Mask.documents([0, 3, 6], causal=False) & Mask.padding(1)
    mask = packed & Mask.chunked(2, causal=False, starts=packed.starts)
    expected = [
        "......",
        ".xx...",
        ".xx...",
        "...xx.",
        "...xx.",
        ".....x",
    ]
    assert ["".join("x" if seen else "." for seen in row) for row in mask.dense(6)] == expected


def test_starts() -> None:
    assert Mask.full().starts == Mask.causal().starts == ((0,),)
    assert Mask.documents([0, 3, 3, 7]).starts == ((0, 3, 7),)
    assert Mask.padding([0, 2], [5, 9]).starts == ((0,), (0, 2))
    assert Mask.padding([2, 2], [5, 9]).starts == ((0, 2),)
    both = Mask.documents([[0, 4], [0, 6]]) & Mask.padding([1, 0], 6) & Mask.sliding_window(3)
    assert both.starts == ((0, 1, 4), (0, 6))


def test_padding_without_an_end() -> None:
    assert torch.equal(Mask.padding(3).dense(8), Mask.padding(3, 8).dense(8))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Mask.padding(-1), ValueError, "start -1"),
        (lambda: Mask.padding([0, 5], [4, 3]), ValueError, "start 5, stop 3"),
        (lambda: Mask.padding([0, 1], [4, 4, 4]), ValueError, "starts for 2 batch rows, stops for 3"),
        (lambda: Mask.padding([]), ValueError, "starts for 0 batch rows"),
        (lambda: Mask.padding(1.5), TypeError, r"starts=1\.5: expected an int, got float"),
        (lambda: Mask.chunked(4, starts=[-2]), ValueError, r"starts=\[-2\]: give positions >= 0"),
        (lambda: Mask.chunked(4, starts=3), TypeError, "starts=3: expected a sequence"),
        (lambda: Mask.causal([(4, 6), (5, 7)]), ValueError, r"blocks=\[\(4, 6\), \(5, 7\)\]: expected pairs"),
        (lambda: Mask.causal([[(1, 2)], [(3, 3)]]), ValueError, r"blocks=\[\(3, 3\)\]: expected pairs"),
        (lambda: Mask.causal([(-1, 2)]), ValueError, "expected pairs"),
        (lambda: Mask.causal([3, 5]), TypeError, r"blocks=\[3, 5\]: expected pairs"),
        (lambda: Mask.causal(cast(Any, 3)), TypeError, "blocks=3: expected pairs"),
        (lambda: Mask.documents([0, 4], causal=cast(Any, "no")), TypeError, "causal='no': expected True or False"),
        (lambda: Mask.chunked(4, causal=cast(Any, None)), TypeError, "causal=None: expected True or False"),
        (lambda: Mask.global_tokens(0), ValueError, "global_tokens n=0: give at least 1"),
        (lambda: Mask.block_diffusion(8, 0), ValueError, "block_diffusion block_size=0: give at least 1"),
        (lambda: Mask.block_diffusion(cast(Any, 8.0), 2), TypeError, "clean_len=8.0: expected an int"),
        (lambda: Mask.ranges([(0, 4)], [(5, 4)], ["full"]), ValueError, r"k_ranges: \[5, 4\]; expected pairs"),
        (lambda: Mask.ranges([(0, 4)], [(0, 4)], cast(Any, ["casual"])), ValueError, "did you mean 'causal'"),
        (lambda: Mask.ranges([(0, 4)], [(0, 4)], []), ValueError, "1 q_ranges, 1 k_ranges and 0 types"),
        (lambda: Mask.ranges([(0, 4)], [(0, 9)], ["full"]).check_length(8), ValueError, "k_ranges: a range ends at 9"),
        (lambda: Mask.tree([-1, 0], [3]), ValueError, r"parents of \[2\] segments and lengths of \[1\]"),
        (lambda: Mask.tree([-1, 1], [3, 2]), ValueError, "segment 1 has parent 1; give -1 for a root"),
        (lambda: Mask.tree([-2], [3]), ValueError, "segment 0 has parent -2"),
        (
            lambda: layer_mask(Mask.tree([-1, 0], [3, 2]) | Mask.global_tokens(1), True, 4, None),
            ValueError,
            "a window of 4 tokens, which would be counted across the branches",
        ),
        (lambda: Mask.tree([-1, 0, 0, 1], [3, 2, 2, 2]), ValueError, "segment 3 follows a segment outside the branch"),
        (lambda: Mask.tree([-1], [-3]), ValueError, r"lengths=\[-3\]: give lengths >= 0"),
        (lambda: Mask.tree([-1.0], [3]), TypeError, "tree parents=-1.0: expected an int"),
        (lambda: Mask.tree([-1], [3], padding=cast(Any, 1)), TypeError, "padding=1: expected True or False"),
        (lambda: seqpar.tree_positions([[-1], [-1]], [[2], [3]]), ValueError, r"batch rows of \[2, 3\] tokens"),
        (lambda: Mask.tree([-1], [3]).check_length(4), ValueError, "have 3 tokens, but the sequence has 4"),
        (lambda: Mask.tree([[-1], [-1]], [[4], [5]]).check_length(4), ValueError, "of batch row 1 have 5 tokens"),
        (lambda: Mask.block_diffusion(4, 2).check_length(9), ValueError, "clean_len=4, but the sequence has 9 tokens"),
        (lambda: (Mask.causal() | Mask.documents([0, 3])).check_length(4), ValueError, "last boundary is 3"),
        (lambda: Mask.causal().dense(-1), ValueError, "seq_len=-1: expected at least 0"),
        (lambda: Mask.causal().intervals(cast(Any, [1])), TypeError, "positions: expected an integer tensor .*list"),
        (lambda: Mask.causal().intervals(torch.ones(2)), TypeError, "positions: .*torch.float32"),
    ],
)
def test_bad_arguments(make: Callable[[], Mask], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def pair(**changes: Any) -> Mask:
    """A mask for each of two groups of heads."""
    return Mask.by_heads([changes.get("first", Mask.causal()), changes.get("second", Mask.sliding_window(2, 2))])


@given(rules_and_length(), rules_and_length())
def test_each_group_of_heads_sees_its_mask(one: tuple[Rules, int], other: tuple[Rules, int]) -> None:
    """Alone and under a mask for all heads; ``dense`` has the groups side by side."""
    seq_len, a, b = min(one[1], other[1]), combined_mask(one[0]), combined_mask(other[0])
    if a.batch > 1 and b.batch > 1 and a.batch != b.batch:
        with pytest.raises(ValueError, match="by_heads masks: they are for"):
            pair(first=a, second=b)
        return
    mask = pair(first=a, second=b)
    assert mask.head_groups == (a, b) and (mask & mask) == mask and mask.batch == max(a.batch, b.batch)
    narrow = Mask.sliding_window(3, 1)
    for of_groups, expected in ((mask, (a, b)), (narrow & mask, (narrow & a, narrow & b))):
        dense = of_groups.dense(seq_len)
        assert dense.shape == (mask.batch, 2, seq_len, seq_len)
        for seen, group in zip(dense.unbind(1), expected, strict=True):
            assert torch.equal(seen, as_rows(group.dense(seq_len)).expand_as(seen))
    if mask.batch > 1:
        assert torch.equal(mask_of_rows(mask, [1]).dense(seq_len), mask.dense(seq_len)[1:2])


def test_a_mask_by_heads_is_a_value() -> None:
    mask = pair()
    assert mask.is_local is False and pair(first=Mask.chunked(4)).is_local and mask.has_window
    assert Mask.by_heads([Mask.causal()]) == Mask.causal() and not Mask.causal().head_groups
    assert Mask.by_heads([Mask.full(), Mask.full()]).dense(3).all()
    tree, layer = Mask.tree([-1, 0, 0], [2, 3, 4]), (True, 2, None)
    assert layer_mask(pair(first=tree), *layer).head_groups == tuple(
        layer_mask(x, *layer) for x in (tree, pair().head_groups[1])
    )
    assert str(mask).splitlines() == [
        "Mask.by_heads([Mask.causal(), Mask.sliding_window(2, 2)])",
        "queries down, keys across",
        "heads: group 1 of 2",
        *str(Mask.causal()).splitlines()[2:],
        "heads: group 2 of 2",
        *str(Mask.sliding_window(2, 2)).splitlines()[2:],
    ]
    planner = seqpar.mask_planner(seqpar.Sharding(16, "zigzag"), "ring")
    planned = pickle.loads(pickle.dumps(planner(mask)))
    assert all(group.plans for group in planned.head_groups)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Mask.by_heads([]), ValueError, "give at least one mask"),
        (lambda: Mask.by_heads(cast(Any, Mask.causal())), TypeError, "expected a list of masks"),
        (lambda: Mask.by_heads(cast(Any, [Mask.causal(), "full"])), TypeError, "expected a list of masks"),
        (lambda: Mask.by_heads([pair(), Mask.full()]), ValueError, "none that is by_heads itself"),
        (
            lambda: Mask.by_heads([Mask.full(), *(Mask.prefix_lm(range(n)) for n in (2, 3))]),
            ValueError,
            r"for \[2, 3\] batch rows",
        ),
        (lambda: pair() | Mask.full(), ValueError, "by_heads cannot be a part of a union"),
        (lambda: Mask.causal() | pair(), ValueError, "by_heads cannot be a part of a union"),
        (lambda: pair() & Mask.by_heads([Mask.full()] * 3), ValueError, "masks of 2 and 3 groups of heads"),
        (lambda: pair(first=Mask.documents([0, 3])).check_length(4), ValueError, "last boundary is 3"),
        (lambda: pair().check_heads(5, 5), ValueError, "2 groups, but attention has 5 query heads and 5 KV heads"),
        (lambda: pair().check_heads(6, 3), ValueError, "6 query heads and 3 KV heads"),
        (lambda: pair().intervals(torch.arange(3)), ValueError, "a mask for each of 2 groups of heads, and this takes"),
        (lambda: pair().starts, ValueError, "what depends on where a sequence starts"),
    ],
)
def test_bad_masks_by_heads(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
