"""Layouts assign every token to one rank. shard, unshard, positions and their gradients agree with the reference."""

from __future__ import annotations

import pickle
import re
from dataclasses import FrozenInstanceError, dataclass
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Assigned
from seqpar.placement.layout import CPU, merged_positions, shard_length, shard_positions, shard_ranges

from ..cases import Batch
from ..observe import message_of
from ..pool import Pool, on_ranks
from ..reference import rank_positions
from ..strategy_cases import LAYOUTS, layout_of

layouts = st.sampled_from(LAYOUTS)


@given(st.integers(0, 300), st.integers(1, 20), layouts)
@example(3, 8, "zigzag")
@example(0, 4, "striped")
def test_every_token_has_one_rank(seq_len: int, ranks: int, name: str) -> None:
    layout = layout_of(name, seq_len, ranks)
    shards = [shard_positions(seq_len, ranks, rank, layout) for rank in range(ranks)]
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(seq_len))
    for rank, shard in enumerate(shards):
        assert shard.dtype == torch.int64
        assert torch.equal(shard, rank_positions(seq_len, ranks, rank, name))
        assert bool((shard.diff() > 0).all())  # so that an interval of positions is an interval of local indices
        assert shard_length(seq_len, ranks, rank, layout) == len(shard)
        ranges = shard_ranges(seq_len, ranks, rank, layout)
        assert [i for r in ranges for i in r] == shard.tolist()
    lengths = [len(shard) for shard in shards]
    if name in (most := {"contiguous": 1, "zigzag": 2, "striped": 1}):  # other layouts may be uneven
        assert max(lengths) - min(lengths) <= most[name]
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(seq_len))


@given(st.integers(0, 60), st.integers(1, 4), st.integers(1, 4), layouts, st.data())
def test_positions_of_several_ranks(seq_len: int, groups: int, each: int, name: str, data: st.DataObject) -> None:
    """Positions by formula, of ``each`` neighbouring ranks together, against a list of them."""
    layout = layout_of(name, seq_len, groups * each)
    first = each * data.draw(st.integers(0, groups - 1))
    expected = sorted(
        i for rank in range(first, first + each) for r in shard_ranges(seq_len, groups * each, rank, layout) for i in r
    )
    held = merged_positions(seq_len, groups * each, first, each, layout)
    assert held.tensor(CPU).tolist() == expected == [held.at(i) for i in range(len(held))]
    x = torch.arange(seq_len + 5)
    below = [sum(position < i for position in expected) for i in range(seq_len + 5)]
    assert held.counts_below(x).tolist() == below == [held.count_below(i) for i in range(seq_len + 5)]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(expected))] * 2)))
    assert held.tensor(CPU, start, stop).tolist() == expected[start:stop]


def test_an_assigned_layout() -> None:
    """It is a value: equal if its ranks hold the same positions, and the same in every process."""
    one = Assigned([[range(6, 9), range(12, 12)], [range(6)], []])
    same = Assigned(((range(6, 7), range(7, 9)), [range(2), range(2, 6)], ()))
    other = Assigned([[range(6)], [range(6, 9)], []])
    assert one == same == pickle.loads(pickle.dumps(one)) and one != other and one != "zigzag"
    assert len({one, same, other}) == 2 and one.by_rank == ((range(6, 9),), (range(6),), ())
    assert repr(one) == "Assigned(9 tokens, 3 ranks, 2 ranges, checksum=da6009f5)"
    with pytest.raises(FrozenInstanceError):
        one.seq_len = 3  # type: ignore[misc]
    assert seqpar.Sharding(0, Assigned([[]])).lengths == (0,)


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        ([[range(3)], [range(2, 5)]], r"ValueError: by_rank: ranks 0 and 1 both hold range\(2, 3\)"),
        ([[range(3)], [range(4, 5)]], r"ValueError: by_rank: no rank holds range\(3, 4\)"),
        ([[range(2, 4), range(2)]], r"ValueError: by_rank: rank 0 holds range\(0, 2\) after range\(2, 4\)"),
        ([[range(0, 4, 2)], [range(1, 4, 2)]], r"ValueError: by_rank: rank 0 holds range\(0, 4, 2\); .* step 1"),
        ([[range(-1, 4)]], r"ValueError: by_rank: rank 0 holds range\(-1, 4\); positions are at least 0"),
        ([[(0, 4)]], r"TypeError: by_rank: rank 0 holds \(0, 4\); expected a range"),
    ],
)
def test_ranges_that_are_no_layout(by_rank: Any, words: str) -> None:
    assert re.match(words, message_of(lambda: Assigned(by_rank)))


@pytest.mark.parametrize("call", [seqpar.Sharding, seqpar.positions], ids=["Sharding", "positions"])
def test_an_assigned_layout_fits_one_length_and_number_of_ranks(call: Any) -> None:
    two = Assigned([[range(5)], [range(5, 9)]])
    assert "the sequence is sharded over 1 ranks" in message_of(lambda: call(9, layout=two))
    assert "the sequence has 8 tokens" in message_of(lambda: call(8, layout=Assigned([[range(9)]])))


@on_ranks
def attend_with_other_ranges(group: ProcessGroup) -> str:
    """Ranks whose layouts differ, but not in their lengths."""
    cut = 3 + group.rank()
    layout = Assigned([[range(cut), range(cut + 1, 5)], [range(cut, cut + 1), range(5, 8)]])
    q = torch.zeros(1, 4, 2, 8)
    return message_of(lambda: seqpar.attention(q, q, q, group=group, layout=layout))


def test_ranks_compare_their_ranges(pool: Pool) -> None:
    errors = pool.run(2, attend_with_other_ranges)
    assert all("mask or options: the ranks of the group differ" in error for error in errors), errors


@given(st.integers(1, 64), st.integers(1, 16))
def test_zigzag_balances_causal_work(chunk: int, ranks: int) -> None:
    """With equal chunks, the queries of every rank see the same number of keys."""
    work = [int((shard_positions(2 * ranks * chunk, ranks, rank, "zigzag") + 1).sum()) for rank in range(ranks)]
    assert len(set(work)) == 1


@dataclass(frozen=True)
class ShardCase:
    """A tensor to shard along ``dim`` and to unshard."""

    shape: tuple[int, ...]
    dim: int
    layout: str
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.layout} {str(self.dtype).removeprefix('torch.')} shape={self.shape} dim={self.dim}"


def shard_cases(world: int) -> list[ShardCase]:
    """Even and uneven lengths, fewer tokens than ranks, no tokens; every dim and several dtypes."""
    lengths = sorted({0, 1, world - 1, world, 2 * world, 2 * world + 1, 37, 64})
    cases = [ShardCase((2, length, 3), 1, layout) for length, layout in product(lengths, LAYOUTS)]
    for layout in LAYOUTS:
        cases.append(ShardCase((19,), 0, layout, torch.int64))
        cases.append(ShardCase((2, 3, 21), -1, layout, torch.bfloat16))
        cases.append(ShardCase((5, 2, 0), 0, layout, torch.float64))
        cases.append(ShardCase((2, 11), 1, layout, torch.bool))
    return cases


def filled(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
    """A tensor whose neighbouring values differ."""
    values = torch.arange(torch.Size(shape).numel()).view(shape) + offset
    return values % 2 == 0 if dtype == torch.bool else (values % 251).to(dtype)


@on_ranks
def round_trip(group: ProcessGroup, case: ShardCase) -> dict[str, Tensor]:
    """Shard, unshard, positions, and the backward of the first two."""
    layout = layout_of(case.layout, case.shape[case.dim], group.size())
    where: dict[str, Any] = {"dim": case.dim, "group": group, "layout": layout}
    differentiable = case.dtype.is_floating_point
    x = filled(case.shape, case.dtype).requires_grad_(differentiable)
    local = seqpar.shard(x, **where)
    results = {
        "local": local.detach(),
        "full": seqpar.unshard(local, **where).detach(),
        "positions": seqpar.positions(case.shape[case.dim], group=group, layout=layout),
    }
    if differentiable:
        leaf = local.detach().clone().requires_grad_()
        seqpar.unshard(leaf, **where).backward(filled(case.shape, case.dtype, 7))
        local.backward(filled(tuple(local.shape), case.dtype, 1000 * group.rank()))
        assert x.grad is not None
        assert leaf.grad is not None
        results |= {"dx": x.grad, "dlocal": leaf.grad}
    return results


def verify_round_trip(case: ShardCase, by_rank: list[dict[str, Tensor]]) -> None:
    full, dfull = filled(case.shape, case.dtype), filled(case.shape, case.dtype, 7)
    for rank, got in enumerate(by_rank):
        mine = rank_positions(case.shape[case.dim], len(by_rank), rank, case.layout)
        assert torch.equal(got["positions"], mine)
        assert torch.equal(got["local"], full.index_select(case.dim, mine))
        assert got["local"].is_contiguous()
        assert torch.equal(got["full"], full)
        if "dlocal" in got:
            # Every rank has the gradient of its full tensor, and each full tensor depends on all shards.
            assert torch.equal(
                got["dlocal"], (len(by_rank) * dfull.float()).to(case.dtype).index_select(case.dim, mine)
            )
            dlocal = filled(tuple(got["local"].shape), case.dtype, 1000 * rank)
            dx = torch.zeros(case.shape, dtype=case.dtype).index_copy(case.dim % len(case.shape), mine, dlocal)
            assert torch.equal(got["dx"], dx)


@pytest.mark.thorough(world=[3])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shard_and_unshard(batch: Batch, world: int) -> None:
    batch.check(world, round_trip, shard_cases(world), verify_round_trip)


@on_ranks
def unshard_errors(group: ProcessGroup) -> list[str]:
    """What unshard raises on this rank for shards that no layout gives."""
    shards = [
        torch.zeros(1, 4 + group.rank(), 2),  # growing lengths
        torch.zeros(1, 4, 2 + group.rank()),  # another dimension differs
        torch.zeros(1, 4, 2, dtype=torch.float64 if group.rank() == 1 else torch.float32),
    ]
    messages = []
    for shard in shards:
        with pytest.raises(ValueError) as raised:  # noqa: PT011 (the test reads the message)
            seqpar.unshard(shard, group=group, layout="contiguous")
        messages.append(str(raised.value))
    return messages


def test_unshard_raises_on_all_ranks(pool: Pool) -> None:
    for lengths, dimension, dtype in pool.run(3, unshard_errors):
        assert "[4, 5, 6]" in lengths
        assert "[5, 5, 5]" in lengths
        assert "dimension other than 1" in dimension
        assert "dtype" in dtype


def test_one_process_needs_no_group() -> None:
    x: Any = torch.arange(6.0).view(1, 6)
    assert torch.equal(seqpar.shard(x, layout="zigzag"), x)
    assert torch.equal(seqpar.unshard(x, layout="striped"), x)
    assert torch.equal(seqpar.positions(6, layout="zigzag"), torch.arange(6))
