"""Bytes by level: keys and values are sent between hosts once for each host that needs them, not once for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar.layout import LAYOUTS, Layout

from .hosts import hosts_of
from .pool import Pool, on_ranks

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
MODES: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "all_gather": {"strategy": "context_parallel"},
    "all_gather in chunks": {"strategy": "context_parallel", "chunks": 2},
}
Counted = tuple[int, int]  # bytes between hosts, and all bytes


def count(group: ProcessGroup, mask: seqpar.Mask, layout: Layout, tokens: int, **options: Any) -> list[Counted]:
    """The bytes that this rank sends in forward and in backward, in bfloat16."""
    sharding = seqpar.Sharding(tokens, layout, group=group)
    shapes = ((BATCH, sharding.seq_local, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    with seqpar.trace() as forward:
        out = seqpar.attention(q, k, v, mask=mask, sharding=sharding, **options)
    with seqpar.trace() as backward:
        out.sum().backward()
    return [(t.bytes_between_hosts, t.bytes_sent) for t in (forward, backward)]


@contextmanager
def simulated(world: int, rank: int, per_host: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    """This process as one of ``world`` ranks, which send nothing."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_host))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 8), (8, 8)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_bytes_by_level(mode: str, hosts: int, per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full mask: each rank's rows to every other host once, and their gradients back once. No more bytes in all."""
    world = hosts * per_host
    row = BATCH * 2 * KV_HEADS * HEAD_DIM  # elements of k and v
    for layout, rank in product(LAYOUTS, (0, world // 2 + 1)):
        with simulated(world, rank, per_host, monkeypatch) as group:
            forward, backward = count(group, seqpar.Mask.full(), layout, 4 * world, **MODES[mode])
        assert forward == (4 * row * 2 * (hosts - 1), 4 * row * 2 * (world - 1))
        assert backward == (4 * row * (2 + 4) * (hosts - 1), 4 * row * (2 + 4) * (world - 1))


def test_without_hosts_every_rank_is_sent_its_own_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bounds above are compared with: an uneven number of ranks on each host has one level."""
    with simulated(7, 3, 4, monkeypatch) as group:
        (between, total), _ = count(group, seqpar.Mask.full(), "contiguous", 28, strategy="ring")
    row = BATCH * 2 * KV_HEADS * HEAD_DIM
    assert (between, total) == (4 * row * 2 * 3, 4 * row * 2 * 6)


@on_ranks
def count_on_rank(group: ProcessGroup, mode: str, layout: Layout, per_host: int) -> list[Counted]:
    """The bytes that this rank sends under a window."""
    with hosts_of(per_host):
        return count(group, seqpar.Mask.sliding_window(20), layout, 64, **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_what_a_window_needs(pool: Pool, mode: str) -> None:
    """4 ranks of 16 tokens, 2 on each host, and queries that see 20 tokens before them."""
    row = BATCH * 2 * KV_HEADS * HEAD_DIM * 2  # bytes
    by_rank = pool.run(4, count_on_rank, mode, "contiguous", 2)
    # Rank 2 needs 4 rows of rank 0 and the 16 rows of rank 1, which rank 3 has fetched. Rank 3 sees 4 of those.
    assert [counted[0][0] for counted in by_rank] == [4 * row, 16 * row, 0, 0]
    assert [counted[0][1] for counted in by_rank] == [(16 + 4) * row, 16 * row, 16 * row, 16 * row]
