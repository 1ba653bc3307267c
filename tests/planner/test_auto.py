"""``strategy="auto"``: all ranks make the same choice without messages, by costs that are measured once and stored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Mask
from seqpar.kernels.cpu import computed_pairs
from seqpar.layout import SequenceSharding
from seqpar.planner import auto, costs
from seqpar.planner.auto import (
    AttentionShape,
    Candidate,
    candidates,
    choose_strategy,
    mask_summary,
    pairs_before,
    predict,
)
from seqpar.planner.costs import Costs, Overhead, cost_file, costs_of, default_costs, fit, measure
from seqpar.planner.hardware import HARDWARE
from seqpar.planner.layer import RankTimeline, attention_seconds
from seqpar.planner.setting import Setting
from seqpar.planner.simulate import Timeline
from seqpar.schedule.plan import AttentionPlan

from ..pool import OwnPool, Pool, on_ranks, start
from ..reference import assert_close

CPU = torch.device("cpu")
H100 = Costs(HARDWARE["h100"])
LLAMA = AttentionShape(1, 32, 8, 128, torch.bfloat16)


def best(
    mask: Mask, seq_len: int, ranks: int, shape: AttentionShape = LLAMA, known: Costs = H100, layout: Any = "zigzag"
) -> Candidate:
    found = predict(mask_summary(mask, seq_len, layout, ranks), seq_len, layout, shape, ranks, known)
    return min(found, key=lambda x: found[x])


def one_device(tokens: int, mask: Mask) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v and dout; and out, dq, dk and dv in float64."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, tokens, n, 16, generator=generator, dtype=torch.float64) for n in (4, 2, 2, 4)]
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    keys, values = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) / 4
    weights = scores.masked_fill(~mask.dense(tokens), float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return inputs, [out.detach(), *torch.autograd.grad(out, (q, k, v), inputs[3])]


MASKS = {"causal": Mask.causal(), "window": Mask.sliding_window(9), "documents": Mask.documents([0, 5, 40, 50, 67])}


@on_ranks
def _attend(group: ProcessGroup, layout: Any) -> list[Any]:
    """Every mask with and without a sharding: what differs from float64, what was chosen, how many messages it took."""
    found: list[Any] = []
    for mask in MASKS.values():
        inputs, expected = one_device(67, mask)
        sharding = seqpar.Sharding(67, layout, group=group)
        for arguments in ({"sharding": sharding}, {"group": group, "layout": layout}):
            q, k, v, dout = (sharding.shard(x.float()) for x in inputs)
            for x in (q, k, v):
                x.requires_grad_()
            with seqpar.trace() as t:
                out = seqpar.attention(q, k, v, strategy="auto", mask=mask, **arguments)
                results = [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]
            for result, full in zip(results, expected, strict=True):
                assert_close(result, sharding.shard(full), torch.float32)
            with seqpar.trace() as named:
                (name,) = t.chosen or {"local": 1}
                options = {"ulysses_size": 2} if name == "hybrid" else {}
                given = {} if name == "local" else arguments
                if name != "local":
                    out = seqpar.attention(q, k, v, strategy=name, mask=mask, **given, **options)
                    out.backward(dout)
            found.append((name, t.bytes_sent == named.bytes_sent))
    return found


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_chooses_alike_and_is_right(pool: Pool, world: int, layout: str) -> None:
    by_rank = pool.run(world, _attend, layout)
    assert all(found == by_rank[0] for found in by_rank)
    assert all(same for _, same in by_rank[0])  # nothing is sent for the choice
    assert {name for name, _ in by_rank[0]} <= ({"local"} if world == 1 else {c.strategy for c in candidates(world, 4)})


@on_ranks
def _layer(group: ProcessGroup) -> tuple[float, list[str]]:
    torch.manual_seed(0)
    layer = seqpar.ParallelAttention("auto", 32, 4, 2, dtype=torch.float64)
    one = seqpar.ParallelAttention("local", 32, 4, 2, dtype=torch.float64)
    one.load_state_dict(layer.state_dict())
    x = torch.randn(2, 33, 32, dtype=torch.float64)
    sharding = seqpar.Sharding(33, group=group)
    with seqpar.trace() as t:
        y = layer(sharding.shard(x), sharding=sharding)
    expected = sharding.shard(one(x, seq_len=33))
    return float((y - expected).abs().max()), list(t.chosen)


def test_the_layer_chooses_too(pool: Pool) -> None:
    found = pool.run(2, _layer)
    assert all(error < 1e-12 and chosen == found[0][1] and chosen for error, chosen in found)


@pytest.mark.parametrize("call", [lambda s: seqpar.mask_planner(s, "auto"), seqpar.AutoAttention(8, 2).mask_planner])
def test_nothing_is_planned_ahead_for_auto(call: Any) -> None:
    with pytest.raises(ValueError, match="name the strategy to plan for"):
        call(seqpar.Sharding(8))


def test_it_is_no_context_of_a_tensor_parallel_layer() -> None:
    with pytest.raises(ValueError, match="context='auto'"):
        seqpar.ParallelAttention("tp_sp", 8, 2, context="auto")


# Without gradients


@contextmanager
def forward_takes_ulysses(group: ProcessGroup) -> Iterator[None]:
    """Costs by which a ring is the fastest for a training step, and Ulysses for a forward alone."""
    names = "ring", "context_parallel", "ulysses", "hybrid"
    both, forward = ({"causal": {x: Overhead(1.0) for x in names if x != best}} for best in ("ring", "ulysses"))
    patch = pytest.MonkeyPatch()
    for name in ("_choices", "_simulated"):
        patch.setattr(auto, name, WeakKeyDictionary())
    patch.setattr(costs, "_known", WeakKeyDictionary({group: {"cpu": Costs(costs._CPU, both, forward)}}))
    try:
        yield
    finally:
        patch.undo()


@on_ranks
def _passes(group: ProcessGroup) -> dict[str, list[str]]:
    """What is taken with and without gradients; every result against float64."""
    inputs, (expected, *gradients) = one_device(67, Mask.causal())
    sharding = seqpar.Sharding(67, "zigzag", group=group)
    q, k, v, dout = (sharding.shard(x.float()) for x in inputs)
    layer = seqpar.ParallelAttention("auto", 16, 4, 2, layout="zigzag")
    found: dict[str, list[str]] = {}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
        out = seqpar.attention(q, k, v, strategy="auto", **(arguments or {"sharding": sharding}))
        assert_close(out.detach(), sharding.shard(expected), torch.float32)
        return out

    @contextmanager
    def case(name: str) -> Iterator[None]:
        with seqpar.trace() as t:
            yield
        found[name] = list(t.chosen.elements())

    asked: dict[str, Any] = {"group": group, "layout": "zigzag"}
    with forward_takes_ulysses(group):
        with case("no_grad"), torch.no_grad():
            attend(q, k, v)
            attend(q.requires_grad_(), k, v, **asked)
            layer(q[:, :, 0], sharding=sharding)
        with case("inference_mode"), torch.inference_mode():
            attend(q, k, v)
        q, k, v = (x.detach() for x in (q, k, v))
        with case("nothing needs a gradient"):
            attend(q, k, v, **asked)
        with case("gradients are on"):
            attend(q, k, v)
        with case("one rank does"):
            attend(q.clone().requires_grad_(group.rank() == 1), k, v, **asked)
        with case("one rank is under no_grad"), torch.set_grad_enabled(group.rank() == 1):
            attend(q, k, v, **asked)
        for reentrant in (True, False):
            with case(f"checkpoint {reentrant}"):
                q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
                checkpoint(attend, q, k, v, use_reentrant=reentrant).backward(dout)
            for x, full in zip((q, k, v), gradients, strict=True):
                assert x.grad is not None
                assert_close(x.grad, sharding.shard(full), torch.float32)
    return found


def test_a_forward_without_gradients_is_chosen_for(pool: Pool) -> None:
    """Where all ranks know that there is no backward: gradients are off, or the handshake says that none needs one."""
    ring, ulysses = ["ring"], ["ulysses"]
    assert (
        pool.run(4, _passes)
        == [
            {
                "no_grad": 3 * ulysses,
                "inference_mode": ulysses,
                "nothing needs a gradient": ulysses,
                "gradients are on": ring,
                "one rank does": ring,
                "one rank is under no_grad": ulysses,
                "checkpoint True": ulysses + ring,  # the forward, and the forward that is recomputed
                "checkpoint False": 2 * ring,
            }
        ]
        * 4
    )


@on_ranks
def _one_rank_forgets(group: ProcessGroup, port: int) -> str:
    """Rank 1 does not turn gradients off."""
    world = start(port, "one rank forgets", group.rank(), group.size(), timeout_s=2.0)
    seqpar.init_mesh(ring=-1, device_type="cpu")
    sharding = seqpar.Sharding(16, "zigzag", group=world)
    q = torch.randn(1, sharding.seq_local, 4, 8)
    with forward_takes_ulysses(world), torch.set_grad_enabled(world.rank() == 1):
        try:
            seqpar.attention(q, q, q, strategy="auto", sharding=sharding)
        except RuntimeError as error:
            return str(error)
    return "nothing was raised"


def test_ranks_that_differ_are_named(own: OwnPool) -> None:
    """With a sharding no rank asks another one, so their first forward without gradients is a meeting."""
    for rank, message in enumerate(own.pool.run(2, _one_rank_forgets, own.port)):
        assert rank == 1 or "torch.no_grad() on all ranks, or on none): rank(s) [1]" in message, message
        assert "nothing was raised" not in message


# The choice


def test_heads_and_memory_rule_strategies_out() -> None:
    assert {c.ulysses for c in candidates(8, 4)} == {1, 2, 4}
    few = AttentionShape(1, 4, 4, 128, torch.bfloat16)
    found = predict(mask_summary(Mask.causal(), 1 << 19, "zigzag", 8), 1 << 19, "zigzag", few, 8, H100)
    assert {c.strategy for c in found} == {"ring", "context_parallel", "hybrid"}
    small = replace(H100, hardware=replace(H100.hardware, memory_bytes=1e9))
    found = predict(mask_summary(Mask.causal(), 1 << 19, "zigzag", 8), 1 << 19, "zigzag", few, 8, small)
    assert {c.strategy for c in found} == {"ring", "hybrid"}


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.prefix_lm([0, 0]), Mask.padding(0, 0)], ids=str)
@pytest.mark.parametrize("seq_len", [0, 1, 3])
def test_a_sequence_of_fewer_tokens_than_ranks(seq_len: int, mask: Mask) -> None:
    assert best(mask, seq_len, 8) in set(candidates(8, LLAMA.heads))


def test_a_contiguous_causal_sequence_takes_all_to_alls() -> None:
    """A ring's last rank would have all the work."""
    assert best(Mask.causal(), 1 << 17, 8, layout="contiguous") == Candidate("ulysses", 8)


def test_a_slow_network_between_hosts_takes_what_sends_least() -> None:
    hardware = replace(HARDWARE["h100"], network=1e9)
    one_kv_head = LLAMA._replace(kv_heads=1)
    assert best(Mask.sliding_window(1024), 1 << 18, 16, one_kv_head, Costs(hardware)).ulysses < 16


def test_on_a_cpu_the_tiles_of_its_kernel_count() -> None:
    """A window of half the sequence: over the whole sequence, most of what is visible is in masked tiles; two chunks of
    a zigzag ring have most of it in full and causal ones. Measured, forward of 2,048 tokens: ring 27 ms, Ulysses 33."""
    window, whole, half = Mask.sliding_window(1023), SequenceSharding(2048), SequenceSharding(2048, "zigzag", 2)
    of_all = AttentionPlan(window, whole, 0).intervals(0, CPU)
    of_rank = [AttentionPlan(window, half, 1).intervals(i, CPU) for i in range(2)]
    assert of_all is not None
    # A causal square of 1,024 in blocks of 256 queries and 512 keys, then four masked tiles of 256 queries.
    square, masked = 256 * 2 * (512 + 1024), 256 * 4 * (1024 + 255)
    assert computed_pairs(of_all) == square + 1.5 * masked
    assert sum(computed_pairs(x) for x in of_rank if x is not None) < 0.95 * (square + 1.5 * masked) / 2
    shape = AttentionShape(1, 8, 8, 64, torch.float32)
    assert best(window, 2048, 2, shape, default_costs(CPU)).strategy != "ulysses"


def test_measured_overheads_count() -> None:
    slow_ring = replace(
        H100, overheads={"causal": {name: Overhead(1.0) for name in ("ring", "context_parallel", "hybrid")}}
    )
    assert best(Mask.causal(), 1 << 17, 8, known=slow_ring).strategy == "ulysses"
    slow_ulysses = replace(H100, overheads={"causal": {"ulysses": Overhead(0.0, 9.0)}})
    assert best(Mask.causal(), 1 << 17, 8, known=slow_ulysses).strategy != "ulysses"


def test_a_forward_alone_has_costs_of_its_own() -> None:
    setting = Setting(costs.attention_shape(32, 8, 128), HARDWARE["h100"], Mask.causal(), 1 << 15, ring=4, ulysses=2)
    forward, backward = (Timeline(), Timeline())
    RankTimeline(setting).attention(forward)
    RankTimeline(setting).attention(backward, backward=True)
    assert attention_seconds(setting, backward=False) == forward.run().seconds
    assert attention_seconds(setting) == forward.run().seconds + backward.run().seconds
    names = ("ring", "context_parallel", "hybrid")
    slow = replace(H100, overheads={"causal": {name: Overhead(1.0) for name in names}})
    slow = replace(slow, forward_overheads={"causal": {"ulysses": Overhead(1.0)}})
    summary, chosen = mask_summary(Mask.causal(), 1 << 17, "zigzag", 8), []
    known: dict[Any, float] = {}
    for needs_backward in (True, False, True):
        found = predict(summary, 1 << 17, "zigzag", LLAMA, 8, slow, known, needs_backward)
        assert found == predict(summary, 1 << 17, "zigzag", LLAMA, 8, slow, None, needs_backward)
        chosen.append(min(found, key=found.__getitem__).strategy)
    assert chosen[0] == chosen[2] == "ulysses" != chosen[1]


def test_a_forward_alone_has_no_gradients_in_memory() -> None:
    """K and V of the other ranks take 2 bytes an element, and their gradients 4."""
    few = AttentionShape(1, 4, 4, 128, torch.bfloat16)
    summary = mask_summary(Mask.causal(), 1 << 19, "zigzag", 8)
    gathered = 7 / 8 * (1 << 19) * 2 * 4 * 128 * 2
    small = replace(H100, hardware=replace(H100.hardware, memory_bytes=gathered / auto._GATHERED_SHARE))
    for backward in (True, False):
        found = predict(summary, 1 << 19, "zigzag", few, 8, small, None, backward)
        assert ("context_parallel" in {c.strategy for c in found}) != backward


def test_fit() -> None:
    assert fit([1.0, 3.0], [2.5, 6.5]) == Overhead(0.5, 2.0)
    assert fit([1.0, 3.0], [1.0, 9.0]) == Overhead(0.0, 3.0)  # no negative overhead
    assert fit([1.0, 3.0], [5.0, 4.5]) == Overhead(0.0, 1.5)  # the short one was disturbed


def test_new_documents_are_decided_as_those_before() -> None:
    """Masks of every step, in which a query sees about as many keys, share one simulation."""
    step, other = Mask.documents([0, 500, 1000, 2048]), Mask.documents([0, 510, 990, 2048])
    assert mask_summary(step, 2048, "zigzag", 4) == mask_summary(other, 2048, "zigzag", 4)
    assert mask_summary(step, 2048, "zigzag", 4) != mask_summary(Mask.documents([0, 2048]), 2048, "zigzag", 4)
    # One long document at the end is the work of one rank of a contiguous ring, whatever the mean.
    uneven = mask_summary(Mask.documents([*range(0, 1537, 16), 2048]), 2048, "contiguous", 4)
    assert uneven.imbalance[4] > 3
    assert mask_summary(step, 2048, "striped", 4).imbalance[4] == 1


@pytest.mark.parametrize("mask", [*MASKS.values(), Mask.documents([0, 9, 67], causal=False) & Mask.sliding_window(4)])
def test_pairs_before_a_position(mask: Mask) -> None:
    rows = mask.dense(67).view(-1, 67).sum(1)
    expected = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)])
    (runs,) = mask.runs(67)
    positions = torch.tensor([67, 0, 30, 5, 6, 66])
    assert pairs_before(runs, positions.numpy()).tolist() == expected[positions].tolist()


# Costs


@on_ranks
def _measure(group: ProcessGroup, file: str) -> Any:
    """Measure, keep, and read again."""
    rounds, costs._ROUNDS = costs._ROUNDS, 1
    state = torch.random.get_rng_state()
    try:
        with seqpar.trace() as t, torch.no_grad():
            first = measure(group, CPU, Path(file))
    finally:
        costs._ROUNDS = rounds
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not t.bytes_sent and not t.backends
    return first.to_json()


def test_costs_are_measured_once_and_kept(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "new" / "costs.json"
    texts = pool.run(2, _measure, str(file))
    assert texts[0] == texts[1] == file.read_text()
    found = Costs.from_json(texts[0])
    assert found.measured
    for overheads in (found.overheads, found.forward_overheads):
        assert set(overheads) == {"causal", "window", "documents"}
        assert all(set(by_name) == {"ring", "context_parallel", "ulysses"} for by_name in overheads.values())
    assert found.overheads != found.forward_overheads
    assert found.hardware.device == "cpu" and found.hardware.p2p > 1e6
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_a_home_that_cannot_be_written() -> None:
    costs._write(Path("/proc/nowhere/costs.json"), "{}")  # nothing is kept, and nothing is raised


@on_ranks
def _agree(group: ProcessGroup, folder: str, own: float) -> Any:
    """The costs of a group whose ranks have different files."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SEQPAR_CACHE", f"{folder}/{group.rank()}")
    known = costs._known.pop(group, None)
    try:
        value = Costs(replace(costs._CPU, latency=own * (1 + group.rank())), {"causal": {"ring": Overhead(0.0, 2.0)}})
        costs._write(cost_file(CPU, seqpar.mesh.ranks_by_host(group)), value.to_json())
        found = costs_of(group, CPU)
        assert costs_of(group, CPU) is found
        return found.to_json(), found.measured
    finally:
        costs._known.pop(group, None)
        if known is not None:
            costs._known[group] = known
        patch.undo()


def test_rank_0s_costs_count(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(2, _agree, str(tmp_path), 3e-6)
    assert answers[0] == answers[1]
    assert Costs.from_json(answers[0][0]).hardware.latency == 3e-6


def test_a_file_that_is_damaged_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for text in ("", "{", "[]", '{"version": 0}', '{"version": 5, "hardware": {}}'):
        file.write_text(text)
        assert costs._read(file) is None
    text = default_costs(CPU).to_json()
    file.write_text(text)
    assert costs._read(file) == text
    assert costs._read(tmp_path / "none") is None


def test_a_choice_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mask that has been decided: a look into a table. The simulation is not run again."""
    from ..core.test_hosts import simulated

    with simulated(8, 3, 8, monkeypatch) as group:
        first = choose_strategy(Mask.causal(), 4096, "zigzag", LLAMA, group, CPU)
        monkeypatch.setattr("seqpar.planner.auto.predict", None)
        assert choose_strategy(Mask.causal(), 4096, "zigzag", LLAMA, group, CPU) == first
        monkeypatch.undo()


def test_new_documents_are_not_simulated_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a hundred steps with other documents, most find all four candidates in the table."""
    chance, simulated = random.Random(0), []

    def counted(setting: Setting, backward: bool) -> float:
        simulated.append(setting)
        return attention_seconds(setting, backward)

    monkeypatch.setattr(auto, "attention_seconds", counted)
    known: dict[Any, float] = {}
    counts = []
    for _ in range(100):
        mask = Mask.documents([0, *sorted(chance.sample(range(1, 4096), 30)), 4096])
        predict(mask_summary(mask, 4096, "zigzag", 4), 4096, "zigzag", LLAMA, 4, H100, known)
        counts.append(len(simulated))
    assert counts[-1] < 4 * 100 / 3, counts
    assert counts[-1] - counts[49] < counts[49] / 2, counts
