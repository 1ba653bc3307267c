"""The cost of plans: their size depends on the runs of the mask and on the ranks, and past masks keep no memory."""

from __future__ import annotations

import gc
import pickle
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from unittest import mock
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.base import cache
from seqpar.masks.mask import layer_mask
from seqpar.placement.layout import CPU, LAYOUTS, Layout, TokenLayout
from seqpar.schedule import plan as plans
from seqpar.schedule.plan import AttentionPlan, attention_plan

from ..pool import Pool, on_ranks


def packed(seq_len: int, documents: int, seed: int = 0) -> Mask:
    """Documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(1, seq_len, (documents - 1,), generator=generator).sort().values
    return Mask.documents([0, *inner.tolist(), seq_len])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gather", [False, True])
def test_size_of_a_plan_does_not_depend_on_the_tokens(layout: Layout, gather: bool) -> None:
    sizes = []
    for seq_len in (1 << 14, 1 << 24):
        sharding = TokenLayout(seq_len, layout, ring=8)
        boundaries = [seq_len * i // 64 for i in range(65)]
        plan = AttentionPlan(Mask.documents(boundaries), sharding, 3, gather).prepare()
        sizes.append(len(pickle.dumps(plan)))
    # Larger numbers take more bytes.
    assert sizes[1] < 1.5 * sizes[0] + 4096, f"layout={layout!r}: let _merged_positions describe its tokens by stripes"


@pytest.mark.slow
def test_past_masks_keep_no_memory() -> None:
    """400 masks in a row: the memory of host and device does not grow."""
    sharding = TokenLayout(1 << 14, "zigzag", ring=4)

    def use(seeds: range) -> None:
        for seed in seeds:
            mask = packed(sharding.seq_len, 100, seed)
            for _ in range(2):  # as two layers would
                plan = attention_plan(mask, sharding, 3)
                for step in range(len(plan)):
                    plan.intervals(step, CPU)

    cache._tensors.clear()  # of earlier tests: tracemalloc would see what replaces it, but not that it is freed
    plans._plans.clear()
    tracemalloc.start()
    use(range(200))
    gc.collect()
    host, tensors = tracemalloc.get_traced_memory()[0], cache._tensors.total
    use(range(200, 400))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - host
    tracemalloc.stop()
    assert grown < 1 << 20, f"{grown} bytes of the host's memory"
    assert cache._tensors.total <= max(tensors, 64 << 20)


@on_ranks
def objects_after_steps(group: ProcessGroup, strategy: str) -> list[int]:
    """The Python objects after every 40 steps, each with a mask and a length of its own."""
    counts = []
    for first in range(0, 160, 40):
        for seed in range(first, first + 40):
            seq_len = 100 + 3 * seed
            sharding = seqpar.Sharding(seq_len, "zigzag", group=group)
            q, k, v = (torch.randn(1, sharding.seq_local, 2, 4, requires_grad=True) for _ in range(3))
            mask = packed(seq_len, 6, seed)
            mask = mask if seed % 2 else Mask.by_heads([mask, packed(seq_len, 3, seed)])
            seqpar.attention(q, k, v, strategy=strategy, mask=mask, sharding=sharding).sum().backward()
        gc.collect()
        counts.append(len(gc.get_objects()))
    return counts


@pytest.mark.thorough(strategy=["ulysses"])
@pytest.mark.thorough(shared_memory=[True])
@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shared memory"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_past_steps_leave_no_objects(pool: Pool, strategy: str, shared_memory: bool) -> None:
    """What a step leaves is there after every step; what a process makes once, such as a cache of ``abc``, is not."""
    for counts in pool.run(2, objects_after_steps, strategy, shared_memory=shared_memory):
        grown = [after - before for before, after in pairwise(counts)]
        assert min(grown) < 40, f"{grown} objects in 40 steps"


def test_an_entry_is_dropped_with_its_owner() -> None:
    class Owner:
        pass

    small: cache.ByteCache[torch.Tensor] = cache.ByteCache(100, cache.tensor_bytes, entries=3)
    owner, other = Owner(), Owner()
    for key, of in (("a", owner), ("b", other), ("c", owner), ("d", None)):
        small.get(key, lambda: torch.zeros(10, dtype=torch.uint8), of)
    assert len(small) == 3 and small.total == 30  # without "a", the oldest
    del owner
    assert len(small) == 2 and small.total == 20
    small.get("b", lambda: pytest.fail("it is held"), other)


def test_the_mask_of_a_layer_is_freed_with_the_mask_of_the_batch() -> None:
    mask = Mask.documents([0, 300, 1000])
    of_layer = ref(layer_mask(mask, True, 8, None))
    assert layer_mask(mask, True, 8, None) is of_layer()
    assert layer_mask(mask, False, None, None) is mask
    del mask
    gc.collect()
    assert of_layer() is None


def test_layers_share_the_intervals_of_a_mask() -> None:
    sharding = TokenLayout(256, "zigzag", ring=4)
    first = attention_plan(packed(256, 5), sharding, 1)
    again = attention_plan(packed(256, 5), sharding, 1)  # an equal mask, made anew
    assert again is first
    assert first.intervals(1, CPU) is again.intervals(1, CPU)


def test_a_plan_made_ahead_travels_with_the_mask() -> None:
    """As from a data-loader worker: the other process finds the steps planned."""
    sharding = TokenLayout(1 << 12, "zigzag", ring=4)
    mask = packed(1 << 12, 50)
    attention_plan(mask, sharding, 2).prepare()
    received = pickle.loads(pickle.dumps(mask))
    assert received == mask
    plan = attention_plan(received, sharding, 2)
    assert sorted(plan._steps) == list(range(4))
    fresh = AttentionPlan(mask, sharding, 2)
    for step in range(4):
        for ours, theirs in zip(plan.intervals(step, CPU), fresh.intervals(step, CPU), strict=True):
            assert torch.equal(ours.lo, theirs.lo) and torch.equal(ours.hi, theirs.hi)
        hop, expected = plan[step].intra_host, fresh[step].intra_host
        assert hop.sends == expected.sends and hop.receives == expected.receives


@on_ranks
def planner_of_rank(group: ProcessGroup, strategy: str) -> Callable[[Mask], Mask]:
    return seqpar.mask_planner(seqpar.Sharding(60, "striped", group=group), strategy)


@on_ranks
def attend_with_a_planned_mask(group: ProcessGroup, strategy: str, masks: list[Mask]) -> bool:
    sharding = seqpar.Sharding(60, "striped", group=group)
    torch.manual_seed(0)
    q, k, v = (sharding.shard(x).requires_grad_() for x in torch.randn(3, 1, 60, 2, 8))
    expected = seqpar.attention(q, k, v, strategy=strategy, mask=packed(60, 4), sharding=sharding)
    with mock.patch.object(AttentionPlan, "__init__", side_effect=AssertionError("planned again")):
        out = seqpar.attention(q, k, v, strategy=strategy, mask=masks[group.rank()], sharding=sharding)
        out.sum().backward()
    return torch.equal(out, expected)


@pytest.mark.parametrize("strategy", ["ring", "context_parallel"])
def test_planning_in_a_worker(pool: Pool, strategy: str) -> None:
    """Plan in this process, which has no process groups; attention on the ranks then plans nothing."""
    assert not dist.is_initialized()
    masks = [planner(packed(60, 4)) for planner in pool.run(2, planner_of_rank, strategy)]
    assert pool.run(2, attend_with_a_planned_mask, strategy, masks) == [True] * 2


def test_a_layer_plans_for_its_own_ranks() -> None:
    sharding = seqpar.Sharding(64, "zigzag")
    layer = seqpar.ParallelAttention("local", 16, 2)
    mask = layer.mask_planner(sharding)(Mask.causal())
    with mock.patch.object(AttentionPlan, "__init__", side_effect=AssertionError("planned again")):
        layer(torch.randn(1, 64, 16), mask=mask, sharding=sharding)


def test_cache_refuses_values_larger_than_itself() -> None:
    small: cache.ByteCache[torch.Tensor] = cache.ByteCache(100, cache.tensor_bytes)
    made = []

    def make(size: int) -> torch.Tensor:
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    for size in (60, 30, 60, 30, 200, 200, 50, 30):
        small.get(size, lambda size=size: make(size))  # type: ignore[misc]
        assert small.total <= 100
    assert made == [60, 30, 200, 200, 50]  # 60 was used least recently, and made room for 50
