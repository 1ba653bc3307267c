"""``Sharding``: length, layout and ranks in one object. It needs no messages, and contradictions raise an error."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar
from seqpar import Mask, Sharding
from seqpar.layers.rotary import rotary_length
from seqpar.schedule import plan
from seqpar.sharding import same_rows
from seqpar.sharding.spec import REPLICATED, AttentionSpec

from ..cases import Batch
from ..observe import counted_handshakes, message_of
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close, rank_positions
from ..strategy_cases import LAYOUTS, STRATEGIES, layout_of

HIDDEN, SEQ_LEN = 24, 29


# The value.


def test_equal_arguments_make_equal_shardings() -> None:
    sharding = Sharding(12)
    assert sharding == Sharding(12, "zigzag") == Sharding(12, layout="zigzag", strategy="ring")
    assert hash(sharding) == hash(Sharding(12, "zigzag"))
    others = [Sharding(13), Sharding(12, "striped"), Sharding(12, strategy="tp_sp"), 12]
    assert sharding not in others
    assert copy.deepcopy(sharding) == sharding

    @lru_cache
    def cached(sharding: Sharding) -> object:
        return object()

    assert cached(sharding) is cached(Sharding(12))


@on_ranks
def compare_shardings(group: ProcessGroup) -> None:
    mesh = mesh_of(1, 2, 2, 2)
    half = dist.new_group(list(range(4)))
    made: list[Callable[[], Sharding]] = [
        lambda: Sharding(12),
        lambda: Sharding(12, group=half) if group.rank() < 4 else Sharding(12, "striped"),
        lambda: Sharding(12, mesh=mesh),
        lambda: Sharding(12, mesh=mesh, strategy="tp_sp"),
    ]
    for i, one in enumerate(made):
        assert one() == one() and hash(one()) == hash(one())
        assert all(one() != other() for other in made[:i])
    assert Sharding(12) == Sharding(12, group=dist.group.WORLD)
    with pytest.raises(AttributeError):
        Sharding(12).seq_len = 13  # type: ignore[misc]


def test_shardings_of_other_ranks_differ(pool: Pool) -> None:
    pool.run(8, compare_shardings)


@pytest.mark.parametrize(
    ("strategy", "options", "ring", "ulysses"),
    [
        ("ring", (), 8, 1),
        ("ulysses", (), 1, 8),
        ("hybrid", (("ulysses_size", 4),), 2, 4),
        ("context_parallel", (("comm", "all_gather"),), 8, 1),
    ],
)
def test_who_attends_is_found_once(strategy: str, options: Any, ring: int, ulysses: int) -> None:
    with simulated(5, 8):
        sharding, spec = Sharding(64), AttentionSpec(strategy, options)
        placement = sharding.place(spec)
        assert sharding.place(spec) is placement and sharding.place(spec.having(softcap=2.0)) is placement
        assert (placement.tokens.ring, placement.tokens.ulysses) == (ring, ulysses)
        assert (placement.rank, placement.ring_rank, placement.length) == (5, 5 // ulysses, 8)
        plan = placement.tokens, 5 // ulysses, strategy == "context_parallel", ring
        assert placement.plan_arguments == plan
        if ulysses == 1:  # with keys that every rank holds, nothing is sent
            everywhere = sharding.place(spec.having(strategy=REPLICATED))
            assert not everywhere.sends and everywhere.plan_arguments == (everywhere.tokens, 5, False, ring)


@contextmanager
def simulated(rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Each item is what a spawned worker gets out of its sharding, and what it raises."""

    def __init__(self, sharding: Any, balanced: Any) -> None:
        self.sharding, self.balanced = sharding, balanced

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        sharding = self.sharding
        full = torch.arange(46).view(23, 2)
        assert sharding.lengths[2] == sharding.seq_local and sum(sharding.lengths) == 23
        assert torch.equal(seqpar.shard(full, 0, sharding=sharding), sharding.shard(full, 0))
        assert torch.equal(seqpar.positions(sharding=sharding), sharding.positions())
        x = torch.zeros(1, sharding.seq_local, 2, 4)
        pickled = pickle.loads(pickle.dumps(sharding))
        refused: dict[str, Callable[[], Any]] = {
            "a file": pickled.positions,
            "check=True": lambda: sharding.shard(full, 0, check=True),
            "unshard": lambda: sharding.unshard(x),
            "no process group is running": lambda: seqpar.attention(x, x, x, sharding=sharding),
            "WORLD_SIZE=4": lambda: Sharding(23),
            "init_mesh": lambda: seqpar.init_mesh(ring=-1, device_type="cpu"),
        }
        found: dict[str, Any] = {name: message_of(call) for name, call in refused.items()}
        with simulated(1, 4):
            found["own groups"] = message_of(sharding.positions)
        of_given_rank = seqpar.Sharding.balanced(Mask.causal(), 23, ranks=4, rank=2)
        return {
            **found,
            "positions": [sharding.positions(), self.balanced.positions(), of_given_rank.positions()],
            "shard": sharding.shard(full, 0),
        }


@pytest.mark.slow
def test_a_spawned_worker_has_the_tokens_of_the_rank_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with simulated(2, 4):
        sharding, balanced = Sharding(23, "zigzag"), Sharding.balanced(Mask.causal(), 23)
        tokens = Tokens(sharding, balanced)
        (found,) = torch.utils.data.DataLoader(tokens, num_workers=1, batch_size=None, multiprocessing_context="spawn")
        positions, of_balanced, of_given_rank = found.pop("positions")
        assert torch.equal(positions, sharding.positions())
        assert torch.equal(of_balanced, balanced.positions()) and torch.equal(of_given_rank, of_balanced)
        assert torch.equal(found.pop("shard"), sharding.shard(torch.arange(46).view(23, 2), 0))
        assert "made by rank 2 of 4 in the process that started this one" in found.pop("own groups")
        assert "rank 2 of 4 pickled it" in found.pop("a file")
        for name, message in found.items():
            assert name in message and "nothing" not in message, (name, message)
        assert copy.copy(sharding) is sharding
        pickled = pickle.loads(pickle.dumps(sharding))  # as if sent to another rank
        for call in (pickled.positions, lambda: pickled.lengths, lambda: seqpar.shard(positions, 0, sharding=pickled)):
            assert "which has process groups of its own; make a seqpar.Sharding" in message_of(call)
        explicit = pickle.loads(pickle.dumps(Sharding.balanced(Mask.causal(), 23, ranks=4, rank=2)))
        assert torch.equal(explicit.positions(), of_balanced)


def test_a_destroyed_world() -> None:
    x = torch.zeros(1, 6, 2, 4)
    with simulated(2, 4):
        sharding = Sharding(23, "zigzag")
    calls: list[Callable[[], Any]] = [
        lambda: sharding.unshard(x),
        *(partial(seqpar.attention, x, x, x, sharding=sharding, strategy=name) for name in ("ring", "hybrid", "auto")),
        lambda: seqpar.mask_planner(sharding),
    ]
    for running in (nullcontext(), simulated(1, 4)):
        with running:
            for call in calls:
                with pytest.raises(ValueError, match=r"group has been destroyed .*; make .* the Sharding again"):
                    call()


def test_one_process() -> None:
    x = torch.arange(6.0).view(1, 6)
    sharding = Sharding(6, "striped")
    assert (sharding.seq_len, sharding.layout, sharding.lengths, sharding.seq_local) == (6, "striped", (6,), 6)
    assert sharding.mesh is None and sharding.group is None
    assert torch.equal(sharding.shard(x), x) and torch.equal(sharding.unshard(x), x)
    assert torch.equal(sharding.positions(), torch.arange(6))


def test_the_permutation_that_equal_parts_shard() -> None:
    """In zigzag the permutation equals the indices of PyTorch's own load balancer."""
    ranks, x = 4, torch.randn(2, 48, 3)
    mask = Mask.documents([0, 5, 8, 40, 48])
    for rank in range(ranks):
        with simulated(rank, ranks):
            for sharding in (Sharding(48, "zigzag"), Sharding(48, "striped"), Sharding.balanced(mask, 48)):
                order, inverse = sharding.permutation(), sharding.permutation(restore=True)
                assert torch.equal(x[:, order].chunk(ranks, 1)[rank], sharding.shard(x))
                assert torch.equal(x[:, order][:, inverse], x)
            theirs = _HeadTailLoadBalancer(48, ranks, "cpu")
            for restore in (False, True):
                ours = Sharding(48, "zigzag").permutation(restore)
                assert torch.equal(ours[None], theirs._generate_indices(restore))
            with pytest.raises(ValueError, match=r"seq_len=29: the ranks have 8, 7, 7, 7 tokens.* pad the sequence"):
                Sharding(29, "contiguous").permutation()


@dataclass(frozen=True)
class ShardCase:
    seq_len: int
    layout: str
    dim: int

    def __str__(self) -> str:
        return f"{self.layout} seq_len={self.seq_len} dim={self.dim}"


@on_ranks
def round_trip(group: ProcessGroup, case: ShardCase) -> None:
    """Everything that a sharding says about this rank, and shard and unshard with their gradients."""
    with counted_handshakes() as handshakes, seqpar.trace() as sent:
        ranks, rank = group.size(), group.rank()
        sharding: Any = Sharding(case.seq_len, layout_of(case.layout, case.seq_len, ranks), group=group)
        by_rank = [rank_positions(case.seq_len, ranks, r, case.layout) for r in range(ranks)]
        mine = by_rank[rank]
        assert sharding.group is sharding.sequence_group is group
        assert sharding.lengths == tuple(len(positions) for positions in by_rank)
        assert sharding.seq_local == len(mine)
        assert torch.equal(sharding.positions(), mine)
        assert torch.equal(seqpar.positions(sharding=sharding), mine)
        x = torch.arange(case.seq_len * 6.0).view(2, case.seq_len, 3).movedim(1, case.dim).requires_grad_()
        x_local = sharding.shard(x, case.dim)
        assert torch.equal(x_local, x.index_select(case.dim, mine)) and x_local.is_contiguous()
        assert torch.equal(seqpar.shard(x, case.dim, sharding=sharding), x_local)
        assert sent.bytes_sent == 0
    leaf = x_local.detach().clone().requires_grad_()
    with counted_handshakes() as more:
        full = sharding.unshard(leaf, case.dim)
        assert torch.equal(full, x)
        assert torch.equal(seqpar.unshard(leaf, case.dim, sharding=sharding), x)
        full.backward(x.detach() + 7)
        x_local.backward(x_local.detach() * 2)
    assert handshakes == more == [0]
    assert leaf.grad is not None and x.grad is not None
    assert torch.equal(leaf.grad, ranks * (x_local + 7))  # every rank has used the full tensor
    assert torch.equal(x.grad, torch.zeros_like(x).index_copy(case.dim, mine, 2 * x_local))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shard_and_unshard(batch: Batch, world: int) -> None:
    lengths = sorted({0, 1, world, SEQ_LEN})
    cases = [ShardCase(*case) for case in product(lengths, LAYOUTS, (0, 1, -1))]
    batch.check(world, round_trip, cases, lambda case, results: None)


def test_errors_of_the_constructor() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"seq_len": 8.0}, "TypeError: seq_len=8.0: expected an int"),
        ({"seq_len": True}, "TypeError: seq_len=True: expected an int"),
        ({"seq_len": -1}, "ValueError: seq_len=-1: expected at least 0"),
        ({"layout": "zig"}, "ValueError: layout='zig': did you mean 'zigzag'"),
        ({"layout": None}, "TypeError: layout=None"),
        ({"strategy": "tp-sp"}, "ValueError: strategy='tp-sp': did you mean 'tp_sp'"),
        ({"group": 4}, "TypeError: group=4: expected a torch.distributed ProcessGroup"),
        ({"mesh": (2, 2)}, "TypeError: mesh=(2, 2): expected a torch.distributed DeviceMesh"),
    ]
    for arguments, words in cases:
        assert message_of(lambda: Sharding(**{"seq_len": 8, **arguments})).startswith(words)  # noqa: B023


def test_errors_of_shard_and_unshard() -> None:
    sharding, x = Sharding(8), torch.zeros(2, 8, 3)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: sharding.shard(x, 2), "has 3 entries along dim 2, but the sharding is of seq_len=8"),
        (lambda: sharding.shard(x, 3), "dim=3: x has 3 dimensions"),
        (lambda: sharding.shard([1]), "TypeError: x: expected a tensor"),
        (lambda: sharding.unshard(x[:, 1:]), "this rank holds 7 tokens, but layout='zigzag' gives it 8"),
        (lambda: seqpar.shard(x, sharding=sharding, layout="striped"), "layout='striped': the sharding has .*'zigzag'"),
        (lambda: seqpar.unshard(x, sharding=sharding, strategy="tp_sp"), "strategy='tp_sp': .* leave strategy out"),
        (lambda: seqpar.positions(9, sharding=sharding), "seq_len=9: the sharding has seq_len=8; leave seq_len out"),
        (lambda: seqpar.positions(), "TypeError: seq_len=None"),
        (lambda: seqpar.shard(x, sharding="zigzag"), "TypeError: sharding='zigzag'"),
    ]
    for call, words in cases:
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert re.search(words, f"{raised.type.__name__}: {raised.value}"), raised.value


@on_ranks
def calls_without_a_layout(group: ProcessGroup) -> list[tuple[str, int]]:
    """What calls raise that are given neither a layout nor a sharding, and the bytes they send."""
    x = torch.zeros(1, 4, 4, 8)  # [b, s, h, d]
    hidden = x.flatten(2)
    calls: list[Callable[[], Any]] = [
        lambda: seqpar.shard(x, group=group),
        lambda: seqpar.unshard(x, group=group),
        lambda: seqpar.positions(8, group=group),
        lambda: seqpar.attention(x, x, x, strategy="auto", group=group),
        lambda: seqpar.attention(x, x, x, group=group, seq_len=4 * group.size()),
    ]
    for row in STRATEGIES.values():
        calls.append(partial(seqpar.attention, x, x, x, group=group, **row))
        calls.append(partial(seqpar.ParallelAttention(hidden_size=32, num_heads=4, group=group, **row), hidden))
    mesh = mesh_of(1, 1, 1, -1) if group.size() == 8 else None
    if mesh is not None:  # a layer that does not know that it is alone on tp
        calls.append(lambda: seqpar.attention(x, x, x, mesh=mesh))
        both = mesh_of(1, 4, 1, 2)
        calls.append(lambda: seqpar.shard(x, mesh=both, strategy="tp_sp"))
        calls.append(lambda: seqpar.ParallelAttention("tp_sp", 32, 4, mesh=both)(hidden))
    found = []
    for call in calls:
        with seqpar.trace() as sent:
            found.append((message_of(call), sent.bytes_sent))
    return found


@pytest.mark.parametrize("world", [2, 8])
def test_over_several_ranks_no_layout_is_assumed(pool: Pool, world: int) -> None:
    for found in pool.run(world, calls_without_a_layout):
        for message, sent in found:
            assert message.startswith(f"ValueError: layout=None: over {world} ranks"), message
            assert "sharding=" in message and "'zigzag'" in message and sent == 0


@on_ranks
def layouts_that_are_known(group: ProcessGroup) -> None:
    """One rank, and ranks that are tensor-parallel alone, whose tokens are all-gathered before attention."""
    torch.manual_seed(0)
    x = torch.randn(1, 16, 4, 8)  # [b, s, h, d]
    mesh = mesh_of(1, 1, 1, -1)
    where: dict[str, Any]
    for where in ({"mesh": mesh}, {"mesh": mesh, "strategy": "tp_sp"}, {"group": group, "strategy": "tp_sp"}):
        local = seqpar.shard(x, **where)
        assert torch.equal(local, seqpar.shard(x, layout="contiguous", **where))
        assert torch.equal(seqpar.unshard(local, **where), x)
        assert torch.equal(seqpar.positions(16, **where), seqpar.positions(16, layout="contiguous", **where))
    one = seqpar.ParallelAttention("local", 32, 4)
    for where in ({"mesh": mesh}, {"group": group}):
        layer = seqpar.ParallelAttention("tp_sp", 32, 4, **where)
        layer.load_state_dict(one.state_dict())
        y = layer(seqpar.shard(x.flatten(2), strategy="tp_sp", **where))
        assert_close(y, seqpar.shard(one(x.flatten(2)), strategy="tp_sp", **where), torch.float32)


def test_one_rank_and_tensor_parallel_ranks_need_no_layout(pool: Pool) -> None:
    pool.run(8, layouts_that_are_known)
    x = torch.randn(1, 8, 4, 8)
    assert torch.equal(seqpar.unshard(seqpar.shard(x)), x)
    assert seqpar.attention(x, x, x).shape == seqpar.ParallelAttention("ring", 32, 4)(x.flatten(2)).view_as(x).shape


@on_ranks
def rows_that_differ(group: ProcessGroup) -> dict[str, list[str]]:
    """What ``shard`` says to equal tensors, then to rows, dtypes, lengths and types that differ on rank 1."""
    odd = group.rank() == 1
    sharding, x = Sharding(8, group=group), torch.arange(16).view(2, 8)
    given = [x, x.float(), x.bool(), x + odd, x.int() if odd else x, x[:, odd:], None if odd else x, x]
    found = {"check": [message_of(lambda: sharding.shard(each, check=True)) for each in given]}  # noqa: B023
    found["function"] = [message_of(lambda: seqpar.shard(x + odd, sharding=sharding, check=True))]
    found["unchecked"] = [message_of(lambda: sharding.shard(x + odd))]
    other, q = Sharding(8, ("zigzag", "striped")[odd], group=group), torch.ones(1, 4, 2, 4)
    found["layout"] = [
        message_of(lambda: other.shard(x, check=True)),
        message_of(lambda: seqpar.ring_attention(q, q, q, sharding=other, dropout_p=0.1)),
        message_of(lambda: rotary_length(q, torch.arange(4), other)),
    ]
    for every in ("0", "1", "2", "many"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SEQPAR_CHECK", every)
            same_rows._calls.clear()
            found[every] = [message_of(lambda: sharding.shard(x + odd)) for _ in range(3)]
    return found


def test_ranks_that_hold_other_rows_are_noticed(pool: Pool) -> None:
    other = r"OtherRowsError: x: rank\(s\) \[1\] of the 2 ranks that share .* hold another tensor.*num_replicas=dp"
    for rank, found in enumerate(pool.run(2, rows_that_differ)):
        *_, length, kind, _ = found["check"]
        assert found["check"][:3] == ["nothing"] * 3 and found["check"][-1] == "nothing"
        assert all(re.match(other, message) for message in (*found["check"][3:5], *found["function"], *found["1"]))
        assert length.startswith("ValueError: x: shape (2, 7)" if rank else "RuntimeError: rank(s) [1]")
        assert kind.startswith("TypeError: x: expected a tensor" if rank else "RuntimeError: rank(s) [1]")
        words = "sharding: rank(s) [1] of the 2 ranks", "mask or options: the ranks", "sharding: rank(s) [1]"
        assert all(x in message for x, message in zip(words, found["layout"], strict=True)), found["layout"]
        assert found["unchecked"] == ["nothing"] and found["0"] == ["nothing"] * 3
        assert [message == "nothing" for message in found["2"]] == [False, True, False]
        many = "ValueError: SEQPAR_CHECK=many: expected a number, at least 0; off, no or false is 0 ("
        assert all(message.startswith(many) for message in found["many"]) and len(found["many"]) == 3


# The length of a mask.


def test_masks_that_fit() -> None:
    Mask.documents([0, 3, 8]).check_length(8)
    Mask.documents([0, 3, 3, 6], padding=True).check_length(8)
    Mask.documents([[0, 8], [0, 5]], padding=True).check_length(8)
    Mask.documents([0]).check_length(0)
    (Mask.sliding_window(9) & Mask.prefix_lm(99) & Mask.chunked(3, starts=[50]) & Mask.padding(2, 70)).check_length(8)


def test_comparing_masks_does_not_keep_them() -> None:
    """Without a sharding every call compares its mask with the other ranks' masks."""
    q, layer = torch.zeros(1, 64, 2, 4), seqpar.RingAttention(8, 2)
    masks = []
    for end in range(1, 9):
        mask = Mask.documents([0, end, 64])
        seqpar.attention(q, q, q, mask=mask)
        layer(q.flatten(2), mask=mask)
        masks.append(weakref.ref(mask))
    del mask
    plan._plans.clear()  # this cache is bounded in bytes
    gc.collect()
    assert not any(mask() is not None for mask in masks)


def test_a_mask_of_another_length_raises_in_one_process() -> None:
    q = torch.zeros(1, 64, 2, 4)
    with pytest.raises(ValueError, match="the last boundary is 16, but the sequence has 64 tokens"):
        seqpar.attention(q, q, q, strategy="local", mask=Mask.documents([0, 16]))
    padded = seqpar.attention(q + 1, q + 1, q + 1, strategy="local", mask=Mask.documents([0, 16], padding=True))
    assert bool((padded[:, :16] == 1).all()) and not padded[:, 16:].any()
