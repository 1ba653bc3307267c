"""Layouts deal every token to one rank; shard, unshard and positions agree with them, and so do their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar.layout import LAYOUTS, global_order, shard_length, shard_positions, shard_ranges

from .pool import WORLDS, Pool
from .reference import dealt

layouts = st.sampled_from(LAYOUTS)


@given(st.integers(0, 300), st.integers(1, 20), layouts)
@example(3, 8, "zigzag")
@example(0, 4, "striped")
def test_every_token_has_one_rank(seq_len: int, ranks: int, layout: str) -> None:
    shards = [shard_positions(seq_len, ranks, rank, layout) for rank in range(ranks)]
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(seq_len))
    for rank, shard in enumerate(shards):
        assert shard.dtype == torch.int64
        assert torch.equal(shard, dealt(seq_len, ranks, rank, layout))
        assert bool((shard.diff() > 0).all())  # what makes intervals of positions intervals of local indices
        assert shard_length(seq_len, ranks, rank, layout) == len(shard)
        ranges = shard_ranges(seq_len, ranks, rank, layout)
        assert [i for r in ranges for i in r] == shard.tolist()
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= (2 if layout == "zigzag" else 1)
    assert torch.equal(torch.cat(shards)[global_order(seq_len, ranks, layout)], torch.arange(seq_len))


@given(st.integers(1, 64), st.integers(1, 16))
def test_zigzag_balances_causal_work(part: int, ranks: int) -> None:
    """Where the parts are equal, every rank's queries see the same number of keys."""
    work = [int((shard_positions(2 * ranks * part, ranks, rank, "zigzag") + 1).sum()) for rank in range(ranks)]
    assert len(set(work)) == 1


# ------------------------------------------------------------------------------------------------ on processes

Shapes = list[tuple[tuple[int, ...], int, str, torch.dtype]]


def shapes(world: int) -> Shapes:
    """(shape, dim, layout, dtype): even and uneven lengths, fewer tokens than ranks, none at all; any dim and dtype."""
    lengths = sorted({0, 1, world - 1, world, 2 * world, 2 * world + 1, 37, 64})
    cases: Shapes = [((2, n, 3), 1, layout, torch.float32) for n in lengths for layout in LAYOUTS]
    for layout in LAYOUTS:
        cases.append(((19,), 0, layout, torch.int64))
        cases.append(((2, 3, 21), -1, layout, torch.bfloat16))
        cases.append(((5, 2, 0), 0, layout, torch.float64))
        cases.append(((2, 11), 1, layout, torch.bool))
    return cases


def filled(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
    values = torch.arange(torch.Size(shape).numel()).view(shape) + offset
    return values % 2 == 0 if dtype == torch.bool else (values % 251).to(dtype)


def round_trip(group: ProcessGroup, cases: Shapes) -> list[dict[str, Tensor]]:
    results = []
    for shape, dim, layout, dtype in cases:
        differentiable = dtype.is_floating_point
        x = filled(shape, dtype).requires_grad_(differentiable)
        local = seqpar.shard(x, dim=dim, group=group, layout=layout)
        whole = seqpar.unshard(local, dim=dim, group=group, layout=layout)
        result = {
            "local": local.detach(),
            "whole": whole.detach(),
            "positions": seqpar.positions(shape[dim], group=group, layout=layout),
        }
        if differentiable:
            leaf = local.detach().clone().requires_grad_()
            seqpar.unshard(leaf, dim=dim, group=group, layout=layout).backward(filled(shape, dtype, 7))
            local.backward(filled(tuple(local.shape), dtype, 1000 * group.rank()))
            assert x.grad is not None
            assert leaf.grad is not None
            result |= {"dx": x.grad, "dlocal": leaf.grad}
        results.append(result)
    return results


@pytest.mark.parametrize("world", WORLDS)
def test_shard_and_unshard(pool: Pool, world: int) -> None:
    cases = shapes(world)
    by_rank = pool.run(world, round_trip, cases)
    for index, (shape, dim, layout, dtype) in enumerate(cases):
        whole, incoming = filled(shape, dtype), filled(shape, dtype, 7)
        dx = torch.zeros(shape, dtype=dtype)
        for rank in range(world):
            mine = dealt(shape[dim], world, rank, layout)
            got = by_rank[rank][index]
            assert torch.equal(got["positions"], mine)
            assert torch.equal(got["local"], whole.index_select(dim, mine))
            assert got["local"].is_contiguous()
            assert torch.equal(got["whole"], whole)
            if "dlocal" in got:
                assert torch.equal(got["dlocal"], incoming.index_select(dim, mine))
                dx.index_copy_(dim % len(shape), mine, filled(tuple(got["local"].shape), dtype, 1000 * rank))
        for rank in range(world):
            if "dx" in by_rank[rank][index]:
                assert torch.equal(by_rank[rank][index]["dx"], dx)


def unshard_wrongly(group: ProcessGroup) -> list[str]:
    """Shards that no layout gives: every rank is told, none hangs."""
    said = []
    shards = [
        torch.zeros(1, 4 + group.rank(), 2),  # growing lengths
        torch.zeros(1, 4, 2 + group.rank()),  # another dimension differs
        torch.zeros(1, 4, 2, dtype=torch.float64 if group.rank() == 1 else torch.float32),
    ]
    for shard in shards:
        try:
            seqpar.unshard(shard, group=group)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_unshard_refuses_what_shard_does_not_give(pool: Pool) -> None:
    for said in pool.run(3, unshard_wrongly):
        assert "[4, 5, 6]" in said[0]
        assert "[5, 5, 5]" in said[0]
        assert "dimension other than 1" in said[1]
        assert "dtype" in said[2]


def test_one_process_needs_no_group() -> None:
    x: Any = torch.arange(6.0).view(1, 6)
    assert torch.equal(seqpar.shard(x, layout="zigzag"), x)
    assert torch.equal(seqpar.unshard(x, layout="striped"), x)
    assert torch.equal(seqpar.positions(6, layout="zigzag"), torch.arange(6))
