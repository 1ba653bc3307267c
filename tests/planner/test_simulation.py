"""The planner's simulation. Its pairs are compared with a dense mask, and its bytes with the runtime's count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import seqpar
from seqpar import Mask
from seqpar.placement.balanced import balanced_layout
from seqpar.placement.layout import LAYOUTS, Assigned, Layout, TokenLayout
from seqpar.planner.hardware import AttentionRate
from seqpar.planner.mixes import mask_of
from seqpar.planner.pairs import computed_pairs, visible_pairs
from seqpar.planner.rank import RankTimeline
from seqpar.planner.setting import Setting
from seqpar.planner.simulate import COMPUTE, Task, Timeline, simulate
from seqpar.planner.split import Switches
from seqpar.planner.step import step
from seqpar.strategies.invariant import Invariant

from ..core.test_hosts import simulated
from ..pool import Pool, on_ranks
from ..settings import H100, attention, attention_shape, decoder, sent_bytes

# The simulation


def seconds(*tasks: Task) -> list[tuple[float, float]]:
    return [(round(a, 9), round(b, 9)) for a, b in simulate(tasks)]


def test_a_stream_runs_one_task_after_another() -> None:
    assert seconds(Task("a", "s", {"x": 2}), Task("b", "s", {"y": 3})) == [(0, 2), (2, 5)]


def test_streams_run_at_the_same_time_and_share_links() -> None:
    # Both use the link until the shorter one has sent its second at half the speed; then the other has it alone.
    assert seconds(Task("a", "s", {"x": 1}), Task("b", "t", {"x": 3})) == [(0, 2), (0, 4)]
    assert seconds(Task("a", "s", {"x": 1}), Task("b", "t", {"y": 3})) == [(0, 1), (0, 3)]


def test_a_task_uses_several_links_at_the_same_time_after_its_delay() -> None:
    assert seconds(Task("a", "s", {"x": 1, "y": 2}, delay=0.5)) == [(0, 2.5)]


def test_a_task_waits_for_those_before_it() -> None:
    assert seconds(Task("a", "s", {"x": 2}), Task("b", "t", {"y": 1}, after=(0,))) == [(0, 2), (2, 3)]
    with pytest.raises(ValueError, match="wait for one another"):
        simulate([Task("a", "s", {"x": 1}, after=(1,)), Task("b", "t", {"x": 1}, after=(0,))])


def test_a_timeline_starts_transfers_behind_computations() -> None:
    timeline = Timeline()
    early = timeline.start("early", "link", {"x": 5})
    timeline.compute("first", 2)
    late = timeline.start("late", "link", {"x": 1})  # after "first", and after "early" in its stream
    timeline.wait(early)
    timeline.compute("second", 1)
    timeline.wait(late)
    timeline.compute("third", 1)
    result = timeline.run()
    assert list(result.spans) == [(0, 5), (0, 2), (5, 6), (5, 6), (6, 7)]
    assert (result.seconds, result.compute, result.exposed) == (7, 4, 3)


def test_a_ring_whose_transfers_take_longer_than_its_kernels() -> None:
    """Full mask, 4 ranks, two steps on the way: a kernel of 1 s behind transfers of 3 s waits for each of them."""
    tokens, heads, dim = 4096, 1, 64
    pairs = (tokens // 4) ** 2
    message = 2 * 2 * tokens // 4 * heads * dim
    gpu = replace(
        H100,
        attention={"test": replace(H100.rate(None), forward=4.0 * pairs * dim, carries=True)},
        p2p=message / 3,
        peer=message / 3,
        latency=0.0,
        kernel=0.0,
    )
    forward, _ = attention(Setting(gpu, Mask.full(), tokens, model=attention_shape(heads, heads, dim), ring=4))
    assert forward.compute == pytest.approx(4)
    assert forward.seconds == pytest.approx(3 * 3 + 1)
    fast = replace(gpu, p2p=2 * message, peer=2 * message)
    faster, _ = attention(Setting(fast, Mask.full(), tokens, model=attention_shape(heads, heads, dim), ring=4))
    assert faster.seconds == pytest.approx(4)


# Pairs

MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.sliding_window(5),
    "two-sided": Mask.sliding_window(3, 2),
    "documents": Mask.documents([0, 7, 8, 20, 50, 61]),
    "documents in a window": Mask.documents([0, 7, 8, 20, 50, 61]) & Mask.sliding_window(4),
    "chunks": Mask.chunked(9),
    "prefix": Mask.prefix_lm(11),
    "window around": Mask.sliding_window(70, 3),
    "padding": Mask.causal() & Mask.padding(3, 9),
    "rows": Mask.documents([[0, 7, 61], [0, 30, 61]]),
    "tree": Mask.tree([-1, 0, 0, 2, 0], [20, 11, 3, 9, 18]),
    "union of rows": Mask.documents([[0, 7, 61], [0, 30, 61]]) | Mask.global_tokens(4),
    "by heads": Mask.by_heads([Mask.documents([[0, 7, 61], [0, 30, 61]]), Mask.causal()]),
}


@pytest.mark.parametrize("name", MASKS)
def test_pairs_are_those_of_the_dense_mask(name: str) -> None:
    tokens, mask = 61, MASKS[name]
    dense = mask.dense(tokens).view(-1, tokens, tokens)
    assert visible_pairs(mask, tokens) == int(dense.sum()) // len(dense)
    for layout in LAYOUTS:
        for ring, ulysses, tensor in ((1, 1, 1), (4, 1, 1), (3, 2, 1), (2, 2, 2), (1, 1, 4), (70, 1, 1)):
            sharding = TokenLayout(tokens, layout, ring, ulysses, tensor)
            shards = [sharding.ring_positions(rank) for rank in range(ring)]
            at = [shard.tensor(torch.device("cpu")) for shard in shards]
            for rank in {0, ring // 2, ring - 1}:
                expected = [int(dense[:, at[rank]][:, :, keys].sum()) // len(dense) for keys in at]
                assert computed_pairs(mask, tokens, shards[rank], shards, 1) == expected
                computed = computed_pairs(mask, tokens, shards[rank], shards, 4)
                assert all(a >= b for a, b in zip(computed, expected, strict=True))


def test_a_kernel_computes_whole_tiles() -> None:
    (positions,) = (TokenLayout(512).ring_positions(0),)
    # Causal tiles of 128: 1 + 2 + 3 + 4 of 16.
    assert computed_pairs(Mask.causal(), 512, positions, [positions], 128) == [10 * 128**2]
    # Two documents of 256 tokens: 1 + 2 tiles each.
    assert computed_pairs(Mask.documents([0, 256, 512]), 512, positions, [positions], 128) == [6 * 128**2]


# Bytes

STRATEGIES: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "context_parallel": {"strategy": "context_parallel", "comm": "all_gather"},
    "ulysses": {"strategy": "ulysses"},
    "hybrid": {"strategy": "hybrid", "ulysses_size": 4},
}
BATCH, HEAD_DIM, V_HEAD_DIM, PER_HOST = 2, 8, 4, 8


class Idle:
    """A backend that computes nothing, so that 1,024 steps take no time."""

    name, deterministic, reads_delta = "idle", True, False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, _d = q.shape
        return q.new_empty(batch, tokens, heads, v.shape[3]), q.new_empty(batch, heads, tokens, dtype=torch.float32)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> None:
        others[-1].make(q, k, v)  # the gradients


def counted(group: ProcessGroup, mask: Mask, layout: Any, tokens: int, heads: int, options: Any) -> list[Any]:
    """What this rank sends inside its host and to others, in forward and in backward."""
    sharding = seqpar.Sharding(tokens, layout, group=group)
    shapes = [(BATCH, sharding.seq_local, *x) for x in ((heads, HEAD_DIM), (2, HEAD_DIM), (2, V_HEAD_DIM))]
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    with seqpar.trace() as forward:
        out = seqpar.attention(q, k, v, mask=mask, sharding=sharding, **options)
    with seqpar.trace() as backward:
        out.sum().backward()
    return [(t.bytes_sent - t.bytes_between_hosts, t.bytes_between_hosts) for t in (forward, backward)]


@pytest.mark.slow
@pytest.mark.thorough(strategy=["ulysses"], world=[1024])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_bytes_are_those_that_the_runtime_counts(world: int, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqpar.kernels.BackendChoice.backend", lambda *_, **__: Idle())
    tokens = 4 * world
    masks = {
        "full": Mask.full(),
        "causal": Mask.causal(),
        "window": Mask.sliding_window(3 * world // 2),
        "documents": Mask.documents([0, world, world + 3, 5 * world // 2, tokens]),
        "by heads": Mask.by_heads([Mask.full(), Mask.sliding_window(world)]),
        "balanced": Mask.documents([0, world, world + 3, 5 * world // 2, tokens]),
    }
    heads = world if strategy == "ulysses" else 8
    ulysses = world if strategy == "ulysses" else STRATEGIES[strategy].get("ulysses_size", 1)
    rank = world // 2 + 1
    if world == 1024:
        masks = {"documents": masks["documents"]}
    monkeypatch.setattr("seqpar.placement.balanced.TILE", 1)  # so that these short sequences have four tiles a rank
    for number, (name, mask) in enumerate(masks.items()):
        layout: Layout = LAYOUTS[(number + 1) % 3]
        if name == "balanced":
            layout = balanced_layout(mask, tokens, world, ulysses if ulysses < world else 1, PER_HOST)
            assert isinstance(layout, Assigned)
        with simulated(world, rank, PER_HOST, monkeypatch) as group:
            expected = counted(group, mask, layout, tokens, heads, STRATEGIES[strategy])
        setting = Setting(
            replace(H100, gpus_per_host=PER_HOST),
            mask,
            tokens,
            BATCH,
            model=attention_shape(heads, 2, HEAD_DIM, V_HEAD_DIM),
            ring=world // ulysses,
            ulysses=ulysses,
            layout=layout,
            gather=strategy == "context_parallel",
        )
        assert sent_bytes(setting, rank) == expected, name


class Products(TorchDispatchMode):
    """Counts the FLOPs of batched matrix products."""

    flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.bmm.default:
            self.flops += 2 * args[0].numel() * args[1].shape[2]
        return function(*args, **(kwargs or {}))

    def during(self, function: Any) -> Any:
        def run(*args: Any) -> Any:
            with self:
                return function(*args)

        return run


@on_ranks
def sent_and_multiplied(group: ProcessGroup, cases: Sequence[tuple[Mask, Layout, str]]) -> list[list[Any]]:
    """Of this rank, with ``deterministic="invariant"``: what ``counted`` returns, and the FLOPs of matrix products."""
    found = []
    for mask, layout, strategy in cases:
        forward, backward = Products(), Products()
        counted_too: Any = {
            "forward": forward.during(Invariant.forward),
            "backward": backward.during(Invariant.backward),
        }
        with mock.patch.multiple(Invariant, **counted_too):
            sent = counted(group, mask, layout, INVARIANT_TOKENS, 4, {"strategy": strategy, **INVARIANT_OPTIONS})
        found.append([*sent, forward.flops, backward.flops])
    return found


def invariant_setting(world: int, mask: Mask, layout: Layout) -> Setting:
    """Whose FLOPs take as many seconds as there are."""
    gpu = replace(H100, gpus_per_host=PER_HOST, attention={"invariant": AttentionRate(1.0, 1.0)}, kernel=0.0)
    shape = attention_shape(4, 2, HEAD_DIM, V_HEAD_DIM)
    return Setting(
        gpu, mask, INVARIANT_TOKENS, BATCH, model=shape, ring=world, layout=layout, kernel="invariant"
    )  # fmt: skip


INVARIANT_TOKENS, INVARIANT_OPTIONS = 390, {"deterministic": "invariant"}
INVARIANT_MASKS = {
    **{name: MASKS[name] for name in ("full", "causal", "window", "window around")},
    "documents": Mask.documents([[0, 100, 150, 390], [0, 30, 300, 390]]) & Mask.sliding_window(90),
    "padding": Mask.causal() & Mask.padding(3, 150),
    "by heads": Mask.by_heads([Mask.full(), Mask.sliding_window(100)]),
    "tree": Mask.tree([-1, 0, 0, -1, 3], [140, 60, 50, 70, 70]),
}


@pytest.mark.thorough(world=[3])
@pytest.mark.parametrize("world", [2, 3])
def test_bytes_and_flops_of_invariant_bits(pool: Pool, world: int) -> None:
    """Of every rank of a real run. A backward has seven products, and not five."""
    layouts = *LAYOUTS, "zigzag"
    cases = [
        (mask, layouts[i % 4], ("ring", "ulysses", "context_parallel")[i % 3])
        for i, mask in enumerate(INVARIANT_MASKS.values())
    ]
    totals = [0, 0]  # of the full mask, on all ranks
    for rank, of_rank in enumerate(pool.run(world, sent_and_multiplied, cases)):
        totals = [total + flops for total, flops in zip(totals, of_rank[0][2:], strict=True)]
        for (mask, layout, _), (*sent, forward, backward) in zip(cases, of_rank, strict=True):
            setting = invariant_setting(world, mask, layout)
            assert sent_bytes(setting, rank) == sent, (mask, layout)
            flops = [
                sum(x.links[COMPUTE] for x in result.tasks if x.name in ("attend", "dq", "dk, dv"))
                for result in attention(setting, rank)
            ]
            if mask.branches:  # a kernel computes a tile once for each part of the mask that has pairs in it
                assert flops[0] >= forward and flops[1] >= backward
            else:
                assert flops == [forward, backward], (mask, layout)
    assert totals[1] * (HEAD_DIM + V_HEAD_DIM) == totals[0] * (4 * HEAD_DIM + 3 * V_HEAD_DIM)


def test_bytes_of_invariant_bits_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for mask, layout in zip(INVARIANT_MASKS.values(), LAYOUTS * 3, strict=False):
        with simulated(3 * PER_HOST, 13, PER_HOST, monkeypatch) as group:
            options = {"strategy": "hybrid", "ulysses_size": 4, **INVARIANT_OPTIONS}
            expected = counted(group, mask, layout, INVARIANT_TOKENS, 4, options)
        assert sent_bytes(invariant_setting(3 * PER_HOST, mask, layout), 13) == expected, (mask, layout)
        assert all(expected[1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_latents_are_sent_as_the_runtime_sends_them(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, tokens, heads, rank, nope, e, width, rope = 16, 128, 16, 9, 8, 4, 12, 2

    monkeypatch.setattr("seqpar.kernels.BackendChoice.backend", lambda *_, **__: Idle())
    ulysses = world if strategy == "ulysses" else STRATEGIES[strategy].get("ulysses_size", 1)
    with simulated(world, rank, PER_HOST, monkeypatch) as group:
        sharding = seqpar.Sharding(tokens, "zigzag", group=group)
        shapes = ((heads, nope + rope), (1, width), (1, rope))
        q, latents, rotated = (
            torch.zeros(BATCH, tokens // world, *x, dtype=torch.bfloat16, requires_grad=True) for x in shapes
        )
        weight = torch.zeros(heads, nope + e, width, dtype=torch.bfloat16, requires_grad=True)
        with seqpar.trace() as forward:
            out = seqpar.attention(q, latents, rotated, latent_weight=weight, sharding=sharding, **STRATEGIES[strategy])
        with seqpar.trace() as backward:
            out.sum().backward()
    model = decoder("m", 1, 64, heads, heads, nope + rope, 64, 64, v_head_dim=e, kv_rank=width, shared_dim=rope)
    setting = Setting(
        replace(H100, gpus_per_host=PER_HOST), Mask.causal(), tokens, BATCH, model=model, ring=world // ulysses,
        ulysses=ulysses, layout="zigzag", gather=strategy == "context_parallel",
    )  # fmt: skip
    assert [*map(sum, sent_bytes(setting, rank))] == [forward.bytes_sent, backward.bytes_sent]


@pytest.mark.parametrize("checkpoint", ["none", "attention", "full"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bytes_of_groups_of_heads(strategy: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer whose K/V heads are shared by ranks of an all-to-all, more so in groups of heads."""
    monkeypatch.setattr("seqpar.kernels.BackendChoice.backend", lambda *_, **__: Idle())
    world, heads, kv_heads, tokens = 4, 8, 4, 64
    options = {**STRATEGIES[strategy], **({"ulysses_size": 2} if strategy == "hybrid" else {})}
    with simulated(world, world - 1, PER_HOST, monkeypatch) as group:
        layer = seqpar.ParallelAttention(
            options.pop("strategy"),
            64,
            heads,
            kv_heads,
            HEAD_DIM,
            group=group,
            layout="contiguous",
            dtype=torch.bfloat16,
            **options,
        )
        block = nn.ModuleDict({"self_attn": layer, "mlp": nn.Linear(64, 64, dtype=torch.bfloat16)})
        block.forward = lambda x: block["mlp"](x + layer(x))
        seqpar.Memory(head_groups=2, checkpoint=checkpoint).apply(nn.ModuleDict({"layers": nn.ModuleList([block])}))
        x = torch.zeros(1, tokens // world, 64, dtype=torch.bfloat16, requires_grad=True)
        with seqpar.trace() as trace:
            block(x).sum().backward()
    model = decoder("m", 1, 64, heads, kv_heads, HEAD_DIM, 64, 64)
    ulysses = {"ulysses": world, "hybrid": 2}.get(strategy, 1)
    setting = Setting(
        replace(H100, gpus_per_host=PER_HOST), Mask.causal(), tokens, model=model, ring=world // ulysses,
        ulysses=ulysses, gather=strategy == "context_parallel",
    )  # fmt: skip
    how: Any = {"attention": "keep_attention"}.get(checkpoint, checkpoint)
    sent = step(setting, Switches(how, head_groups=2)).bytes_sent
    assert sum(sent.values()) == trace.bytes_sent


@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal(), Mask.sliding_window(20), mask_of("documents:96", 512)])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_strategies_are_ranked_by_bytes_as_the_runtime_counts_them(
    kv_heads: int, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What noise cannot hide: the order by what a rank sends, and the order by what the slowest computes."""
    monkeypatch.setattr("seqpar.kernels.BackendChoice.backend", lambda *_, **__: Idle())
    world, tokens, rank = 8, 512, 5
    planned, runtime = {}, {}
    for name, options in STRATEGIES.items():
        ulysses = world if name == "ulysses" else options.get("ulysses_size", 1)
        sharding = TokenLayout(tokens, "zigzag", world // ulysses, ulysses)
        with simulated(world, rank, PER_HOST, monkeypatch) as group:
            q, k = (torch.zeros(BATCH, tokens // world, n, HEAD_DIM, requires_grad=True) for n in (8, kv_heads))
            with seqpar.trace() as t:
                out = seqpar.attention(
                    q, k, k, mask=mask, sharding=seqpar.Sharding(tokens, "zigzag", group=group), **options
                )
                out.sum().backward()
        runtime[name] = t.bytes_sent
        setting = Setting(
            H100, mask, tokens, BATCH, model=attention_shape(8, kv_heads, HEAD_DIM), ring=sharding.ring,
            ulysses=ulysses, layout="zigzag", gather=name == "context_parallel", dtype=torch.float32,
        )  # fmt: skip
        planned[name] = sum(map(sum, sent_bytes(setting, rank)))
    assert sorted(planned, key=lambda x: planned[x]) == sorted(runtime, key=lambda x: runtime[x])
    work = {}
    for layout in LAYOUTS:
        setting = Setting(H100, mask, tokens, model=attention_shape(8, 8, 64), ring=world, layout=layout)
        dense = mask.dense(tokens).view(-1, tokens, tokens)[0]
        shards = [setting.tokens.ring_positions(r).tensor(torch.device("cpu")) for r in range(world)]
        counted = max(int(dense[positions].sum()) for positions in shards)
        work[layout] = setting.imbalance(), counted
    assert sorted(work, key=lambda x: work[x][0]) == sorted(work, key=lambda x: work[x][1])


@pytest.mark.parametrize(("ring", "tensor", "kernel"), [(1, 2, None), (1, 8, None), (3, 4, "invariant")])
def test_bytes_of_a_tensor_parallel_layer(ring: int, tensor: int, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, tokens = 64, 40 * ring * tensor
    with simulated(ring * tensor, 1, 4, monkeypatch):
        mesh = init_device_mesh("cpu", (ring, tensor), mesh_dim_names=("ring", "tp"))
        options: dict[str, Any] = {"mesh": mesh, "dtype": torch.bfloat16}
        attention_layer = seqpar.ParallelAttention(
            "tp_sp", hidden, 8, 8, 8, **options, layout="zigzag", deterministic=kernel or False
        )
        mlp = seqpar.MegatronMLP(hidden, 2 * hidden, **options)
        sharding = seqpar.Sharding(tokens, "zigzag", mesh=mesh, strategy="tp_sp")
        x = torch.zeros(1, 40, hidden, dtype=torch.bfloat16, requires_grad=True)
        with seqpar.trace() as forward:
            y = mlp(attention_layer(x, sharding=sharding), sharding)
        with seqpar.trace() as backward:
            y.sum().backward()
    model = decoder("m", 1, hidden, 8, 8, 8, 2 * hidden, 64)
    hardware = replace(H100, gpus_per_host=4)
    setting = Setting(
        hardware, Mask.causal(), tokens, model=model, ring=ring, tensor=tensor, layout="zigzag", kernel=kernel
    )
    (layer,) = model.layers
    for run, trace in ((layer.forward, forward), (layer.backward, backward)):
        rank = RankTimeline(setting, 0, tensor=1)
        run(rank)
        assert sum(rank.timeline.sent.values()) == trace.bytes_sent
