"""Several hosts: keys and values are sent once to each host that needs them, and context_parallel chooses ``comm``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar.placement.layout import LAYOUTS, Layout
from seqpar.ranks import mesh

from ..hosts import hosts_of
from ..planner.test_rules import one_device
from ..pool import OwnPool, Pool, on_ranks, start
from ..reference import assert_close

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
MODES: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "all_gather": {"strategy": "context_parallel", "comm": "all_gather"},
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


# How context_parallel communicates without ``comm``


def attend(group: ProcessGroup, **options: Any) -> seqpar.Trace:
    """What a causal forward of context_parallel does, of 8 tokens a rank."""
    sharding = seqpar.Sharding(8 * group.size(), "zigzag", group=group)
    q, k, v = (torch.zeros(1, sharding.seq_local, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    with seqpar.trace() as t:
        seqpar.attention(q, k, v, strategy="context_parallel", sharding=sharding, **options)
    return t


@pytest.mark.parametrize(
    ("world", "per_host", "comm"), [(16, 16, "all_gather"), (16, 8, "p2p"), (4, 1, "p2p"), (7, 4, "p2p")], ids=str
)
def test_the_hosts_decide(world: int, per_host: int, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One host, two levels, one rank a host, and hosts of different sizes; alike on every rank."""
    for rank in (0, world // 2, world - 1):
        with simulated(world, rank, per_host, monkeypatch) as group:
            by_hosts, named, gathered = attend(group), attend(group, comm=comm), attend(group, comm="all_gather")
            sharding = seqpar.Sharding(8 * world, group=group)
            layer = seqpar.ContextParallelAttention(16, HEADS)
            planners: Any = seqpar.mask_planner(sharding, "context_parallel"), layer.mask_planner(sharding)
            in_chunks = attend(group, chunks=2)
        assert by_hosts.chosen == {comm: 1} and not named.chosen and not gathered.chosen and not in_chunks.chosen
        assert (by_hosts.steps, by_hosts.messages) == (named.steps, named.messages)
        # No level has more bytes than with an all-gather.
        levels = [(t.bytes_sent, t.bytes_between_hosts) for t in (by_hosts, gathered)]
        assert levels[0] == levels[1]
        assert gathered.steps == in_chunks.steps == 1 and (by_hosts.steps > 1) == (comm == "p2p")
        assert all(planner.args[0][2] == (comm == "all_gather") for planner in planners)


@on_ranks
def attend_on_hosts(group: ProcessGroup, port: int, hosts: str, init_mesh: bool) -> list[str]:
    """Forward and backward by hosts that SEQPAR_HOST names, against float64; after that, ranks that disagree."""
    world = start(port, f"{hosts} {init_mesh}", group.rank(), group.size())
    inputs, expected = one_device(67, seqpar.Mask.causal())
    with pytest.MonkeyPatch.context() as patch, seqpar.trace() as t:
        patch.setenv("SEQPAR_HOST", hosts[world.rank()])
        if init_mesh:
            seqpar.init_mesh(ring=-1, device_type="cpu")
        sharding = seqpar.Sharding(67, "zigzag", group=world)
        bad = world.rank() == 1
        mask: Any = "causal" if bad else seqpar.Mask.causal()
        x = torch.zeros(1, 5, 2, 8)
        with pytest.raises((TypeError, RuntimeError), match="mask=" if bad else r"rank\(s\) \[1\]"):
            seqpar.context_parallel_attention(x, x, x, mask=mask, layout="contiguous")
        q, k, v, dout = (sharding.shard(x.float()).requires_grad_() for x in inputs)
        for arguments in ({"sharding": sharding}, {"layout": "zigzag"}):
            out = seqpar.context_parallel_attention(q, k, v, **arguments)
            results = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())]
            for result, full in zip(results, expected, strict=True):
                assert_close(result, sharding.shard(full), torch.float32)
    return list(t.chosen.elements())


@pytest.mark.parametrize(("hosts", "comm"), [("aaaa", "all_gather"), ("aabb", "p2p"), ("aaab", "p2p")])
@pytest.mark.parametrize("init_mesh", [True, False])
def test_hosts_on_real_ranks(own: OwnPool, hosts: str, comm: str, init_mesh: bool) -> None:
    """Also where the hosts are not known before the first attention, and one rank raises an error in it."""
    assert own.pool.run(4, attend_on_hosts, own.port, hosts, init_mesh) == [[comm, comm]] * 4


@on_ranks
def compiled_on_hosts(group: ProcessGroup, per_host: int) -> tuple[list[str], int]:
    """A compiled layer and a compiled call against eager ones; what they took, and the number of steps.

    Only the last rank compiles.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer: Any = seqpar.ContextParallelAttention(16, 4, 2, dtype=torch.float64)
    sharding = seqpar.Sharding(33, "zigzag", group=group)
    x = sharding.shard(torch.randn(1, 33, 16, dtype=torch.float64)).requires_grad_()
    q = sharding.shard(torch.randn(1, 33, 2, 8, dtype=torch.float64))

    def call(q: torch.Tensor) -> torch.Tensor:
        return seqpar.context_parallel_attention(q, q, q, sharding=sharding)

    with hosts_of(per_host):
        expected = layer(x, sharding=sharding), call(q)
        gradient = torch.autograd.grad(expected[0].sin().sum(), x)
        with seqpar.trace() as t:
            run, run_call = layer, call
            if group.rank() == group.size() - 1:
                run, run_call = (torch.compile(x, backend="aot_eager", fullgraph=True) for x in (layer, call))
            y = run(x, sharding=sharding)
            results = torch.autograd.grad(y.sin().sum(), x)
            out = run_call(q)
    assert_close((y, out, results), (*expected, gradient))
    return list(t.chosen.elements()), t.steps


@pytest.mark.slow
@pytest.mark.parametrize(("per_host", "comm", "steps"), [(0, "all_gather", 3), (2, "p2p", 9)])
def test_compiled_code_goes_by_the_hosts(pool: Pool, per_host: int, comm: str, steps: int) -> None:
    assert pool.run(4, compiled_on_hosts, per_host) == [([comm, comm], steps)] * 4


@on_ranks
def compiled_before_the_hosts_are_known(group: ProcessGroup) -> list[list[int]]:
    """The messages of "auto" in two steps, of which the first finds out the hosts; each compiled, and then not.

    A window takes a ring, which needs the hosts. Only rank 1 has another number of tokens in the second step. Ranks 0
    and 3 do not compile.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    window, causal = seqpar.Mask.sliding_window(5), seqpar.Mask.causal()
    found = []

    def step(q: torch.Tensor, k: torch.Tensor, sharding: seqpar.Sharding) -> torch.Tensor:
        out = seqpar.attention(q, k, k, strategy="auto", mask=window, sharding=sharding)
        return seqpar.attention(out, k, k, strategy="auto", mask=causal, sharding=sharding)

    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(mesh._hosts, clear=True):
        patch.setenv("SEQPAR_HOST", "ab"[group.rank() // 2])
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        for tokens in (33, 34):
            sharding = seqpar.Sharding(tokens, "contiguous", group=group)
            q, k = (torch.randn(1, tokens, heads, 8, dtype=torch.float64) for heads in (4, 2))
            want = q
            for mask in (window, causal):
                want = seqpar.attention(want, k, k, strategy="local", mask=mask, layout="contiguous")
            messages = []
            for run in (compiled if group.rank() in (1, 2) else step, step):
                with seqpar.trace() as t:
                    out = run(sharding.shard(q), sharding.shard(k), sharding)
                assert_close(out, sharding.shard(want))
                messages.append(t.messages)
            found.append(messages)
    return found


@pytest.mark.slow
def test_compiled_code_learns_the_hosts(pool: Pool) -> None:
    for first, second in pool.run(4, compiled_before_the_hosts_are_known):
        assert first[1] == second[0] == second[1]  # not the messages of the first step, which took all for one host


def test_a_layer_says_only_what_it_was_given() -> None:
    assert "comm" not in repr(seqpar.ContextParallelAttention(16, 4))
    assert "comm='all_gather'" in repr(seqpar.ContextParallelAttention(16, 4, comm="all_gather"))
    # What is an option of the all-gather asks for it.
    assert "comm='all_gather'" in repr(seqpar.ContextParallelAttention(16, 4, gather="activations"))
