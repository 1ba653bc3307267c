"""Conformance: every strategy, layout and mask gives what one device would, forward and backward.

A strategy joins these tests by standing in ``STRATEGIES``. Cases travel to the workers many at a time; their shards
of the results come back, and are put together and compared here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.kernels.dropout import philox
from seqpar.layout import LAYOUTS

from . import reference
from .pool import Pool
from .reference import (
    BATCH_RULES,
    HEADS,
    RULES,
    Problem,
    Rule,
    assert_close,
    combined,
    dealt,
    dense_attention,
    difference,
    random_problem,
    seen_by_definition,
    solve,
)

STRATEGIES: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring"},
    "ulysses": {"strategy": "ulysses"},
    "all_gather": {"strategy": "context_parallel"},
    "p2p": {"strategy": "context_parallel", "comm": "p2p"},
    "a2a": {"strategy": "context_parallel", "comm": "a2a"},
    "a2a+p2p": {"strategy": "context_parallel", "comm": "a2a+p2p"},
    "hybrid": {"strategy": "hybrid"},
}
SEVERAL = (2, 3, 4, 8)


@dataclass(frozen=True)
class Case:
    """A problem, and how it is to be solved."""

    problem: Problem
    strategy: str = "ring"
    layout: str = "contiguous"
    backend: str = "auto"
    ulysses_size: int | None = None
    mesh: tuple[int, int, int, int] | None = None  # dp, ring, ulysses, tp, instead of the group
    seq_len_given: bool = False

    def arguments(self) -> dict[str, Any]:
        chosen = dict(STRATEGIES.get(self.strategy, {"strategy": self.strategy}))
        if self.ulysses_size is not None:
            chosen["ulysses_size"] = self.ulysses_size
        if self.seq_len_given:
            chosen["seq_len"] = self.problem.seq_len
        return {**chosen, **self.problem.arguments(), "layout": self.layout, "backend": self.backend}


Results = dict[str, Tensor]


def attention(*args: Any, **kwargs: Any) -> Any:
    """``seqpar.attention``, whose result's type depends on its arguments."""
    return seqpar.attention(*args, **kwargs)


def attend(case: Case, positions: Tensor, **where: Any) -> Results:
    """One rank's part of a case: out, lse and gradients of the tokens at ``positions``."""
    tensors = case.problem.tensors()
    leaves = {name: tensors[name][:, positions].clone().requires_grad_() for name in ("q", "k", "v")}
    extra = {"alibi_slopes": tensors["alibi_slopes"]} if "alibi_slopes" in tensors else {}
    if "sinks" in tensors:
        leaves["sinks"] = extra["sinks"] = tensors["sinks"].clone().requires_grad_()
    out, lse = attention(leaves["q"], leaves["k"], leaves["v"], **case.arguments(), **extra, **where)
    assert out.dtype == case.problem.dtype
    assert lse.dtype == (torch.float64 if case.problem.dtype == torch.float64 else torch.float32)
    outputs, gradients = [out], [tensors["dout"][:, positions]]
    if "dlse" in tensors:
        outputs, gradients = [out, lse], [*gradients, tensors["dlse"][:, :, positions]]
    torch.autograd.backward(outputs, gradients)
    results = {"out": out.detach(), "lse": lse.detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        results[f"d{name}"] = leaf.grad
    return results


@lru_cache(maxsize=16)
def mesh_of(shape: tuple[int, int, int, int]) -> DeviceMesh:
    dp, ring, ulysses, tp = shape
    return seqpar.init_mesh(dp=dp, ring=ring, ulysses=ulysses, tp=tp, device_type="cpu")


def attend_all(group: ProcessGroup, cases: list[Case]) -> list[Results]:
    """The pool's errand: this rank's part of every case."""
    results = []
    for case in cases:
        try:
            if case.mesh is None:
                mine = dealt(case.problem.seq_len, group.size(), group.rank(), case.layout)
                results.append(attend(case, mine, group=group))
            else:
                mesh = mesh_of(case.mesh)
                _, ring, ulysses, _ = case.mesh
                rank = mesh.get_local_rank("ring") * ulysses + mesh.get_local_rank("ulysses")
                mine = dealt(case.problem.seq_len, ring * ulysses, rank, case.layout)
                assert torch.equal(seqpar.positions(case.problem.seq_len, mesh=mesh, layout=case.layout), mine)
                results.append(attend(case, mine, mesh=mesh))
        except Exception as error:
            raise RuntimeError(f"in {case}") from error
    return results


def whole(case: Case, shards: list[Results]) -> Results:
    """The shards of a group's ranks put together; the sinks' gradient summed."""
    order = torch.cat([dealt(case.problem.seq_len, len(shards), rank, case.layout) for rank in range(len(shards))])
    back = order.argsort()
    results = {}
    for name in shards[0]:
        pieces = [shard[name] for shard in shards]
        if name == "dsinks":
            results[name] = torch.stack(pieces).sum(0)
        else:
            dim = 2 if name == "lse" else 1
            results[name] = torch.cat(pieces, dim).index_select(dim, back)
    return results


def complaints(case: Case, shards: list[Results], label: str = "") -> list[str]:
    """What is wrong with a case's results."""
    problem, got = case.problem, whole(case, shards)
    expected = solve(problem)
    found = []
    for name, x in expected.items():
        # Statistics and sinks stay float32 whatever the inputs are.
        dtype = problem.dtype if name not in ("lse", "dsinks") else torch.float32
        if name == "dsinks" and problem.dtype.itemsize == 2:
            dtype = problem.dtype  # made from the rounded ``out``
        if (what := difference(got[name], x, dtype)) is not None:
            found.append(f"{name}: {what}, in {label}{case}")
    return found


def check(pool: Pool, world: int, cases: list[Case]) -> None:
    """Run the cases on ``world`` ranks and compare each with one device."""
    by_rank = pool.run(world, attend_all, cases)
    found: list[str] = []
    for index, case in enumerate(cases):
        shards = [results[index] for results in by_rank]
        if case.mesh is None:
            found += complaints(case, shards)
            continue
        dp, ring, ulysses, tp = case.mesh
        ranks = torch.arange(world).view(dp, ring * ulysses, tp)
        for copy, replica in product(range(dp), range(tp)):  # each is a sequence group of its own
            members = ranks[copy, :, replica].tolist()
            found += complaints(case, [shards[rank] for rank in members], f"ranks {members} of ")
    assert not found, f"{len(found)} of {len(cases)} cases:\n" + "\n".join(found[:10])


def rows_of(rules: tuple[Rule, ...]) -> int:
    return max(rule.rows for rule in rules)


# ------------------------------------------------------------------------------------------------ one process


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
def test_local(seed: int, dtype: torch.dtype) -> None:
    case = Case(random_problem(seed, dtype=dtype), "local")
    assert not complaints(case, [attend(case, torch.arange(case.problem.seq_len))])


@pytest.mark.parametrize("rules", [*RULES, *BATCH_RULES], ids=str)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_backends_on_long_sequences(rules: tuple[Rule, ...], backend: str) -> None:
    """Long enough for full, causal and masked tiles side by side."""
    scaled = tuple(_times(rule, 11) for rule in rules)
    problem = Problem(seq_len=601, batch=rows_of(rules), heads=4, kv_heads=2, head_dim=16, rules=scaled)
    case = Case(problem, "local", backend=backend)
    assert not complaints(case, [attend(case, torch.arange(problem.seq_len))])


def _times(rule: Rule, factor: int) -> Rule:
    """The same mask of a sequence ``factor`` times as long."""

    def grown(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(grown(item) for item in x)
        return x if isinstance(x, bool) or x < 0 else x * factor

    return replace(rule, args=grown(rule.args))


# ------------------------------------------------------------------------------------------------ several processes


@pytest.mark.parametrize("world", SEVERAL)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_masks_layouts_and_heads(pool: Pool, strategy: str, world: int) -> None:
    """Every mask in every layout, the head counts taking turns."""
    cases = []
    for index, (layout, rules) in enumerate(product(LAYOUTS, RULES)):
        heads, kv_heads = HEADS[index % len(HEADS)]
        problem = Problem(50 + index % 3, rows_of(rules), heads, kv_heads, rules=rules, seed=index)
        cases.append(Case(problem, strategy, layout))
    check(pool, world, cases)


@pytest.mark.parametrize("world", SEVERAL)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_features(pool: Pool, strategy: str, world: int) -> None:
    """Each feature by itself, then all at once, in every dtype; masked rows and few tokens with them."""
    window = (Rule("documents", ((0, 17, 44), True)), Rule("sliding_window", (6, 0)))  # ends in padding
    base = Problem(seq_len=49, heads=6, kv_heads=3, rules=window)
    features: list[dict[str, Any]] = [
        {"softcap": 1.5},
        {"sinks": True},
        {"alibi": "heads"},
        {"alibi": "batch", "batch": 2},
        {"dropout_p": 0.3, "batch": 2},
        {"lse_gradient": True},
        {"lse_gradient": True, "sinks": True},
        {"softmax_scale": 0.7},
        {"softcap": 2.0, "sinks": True, "alibi": "heads", "dropout_p": 0.2, "lse_gradient": True},
    ]
    cases = []
    for index, feature in enumerate(features):
        layout = LAYOUTS[index % len(LAYOUTS)]
        cases.append(Case(replace(base, seed=index, **feature), strategy, layout))
        cases.append(Case(replace(base, seed=index, rules=(Rule("full"),), **feature), strategy, layout))
    everything = features[-1]
    for dtype, layout in product((torch.float64, torch.bfloat16, torch.float16), LAYOUTS):
        cases.append(Case(replace(base, dtype=dtype, batch=2), strategy, layout))
        cases.append(Case(replace(base, dtype=dtype, **everything), strategy, layout))
    for seq_len, layout in product((0, 1, world - 1, world + 1), LAYOUTS):
        cases.append(Case(replace(base, seq_len=seq_len, rules=(Rule("causal"),)), strategy, layout))
    cases.append(Case(replace(base, rules=(Rule("documents", ((0,), True)),), sinks=True), strategy))  # all padding
    cases.append(Case(base, strategy, "zigzag", seq_len_given=True))
    cases.append(Case(base, strategy, "striped", backend="reference"))
    check(pool, world, cases)


@pytest.mark.parametrize("world", [1])
def test_one_rank(pool: Pool, world: int) -> None:
    """Every strategy in a group of one, and local."""
    names = [*STRATEGIES, "local"]
    cases = [Case(random_problem(seed), names[seed % len(names)], LAYOUTS[seed % 3]) for seed in range(64)]
    check(pool, world, cases)


@pytest.mark.parametrize(("world", "sizes"), [(2, (1, 2)), (4, (1, 2, 4)), (8, (1, 2, 4, 8))])
def test_ulysses_size(pool: Pool, world: int, sizes: tuple[int, ...]) -> None:
    """A plain group cut in two dimensions, every way."""
    cases = []
    for seed, (size, name, layout) in enumerate(product(sizes, ("hybrid", "a2a+p2p"), LAYOUTS)):
        cases += [Case(random_problem(seed + 100 * more), name, layout, ulysses_size=size) for more in range(2)]
    check(pool, world, cases)


MESHES = [(1, 4, 2, 1), (1, 2, 4, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 8, 1, 1), (1, 1, 8, 1), (2, 2, 1, 2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_mesh(pool: Pool, mesh: tuple[int, int, int, int]) -> None:
    """Groups taken from a mesh, with data- and tensor-parallel dimensions beside them."""
    names = [*STRATEGIES]
    cases = [
        Case(random_problem(seed, seq_len=50), names[seed % len(names)], LAYOUTS[seed % 3], mesh=mesh)
        for seed in range(14)
    ]
    check(pool, 8, cases)


@settings(max_examples=5, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("world", SEVERAL)
def test_anything(pool: Pool, world: int, data: st.DataObject) -> None:
    """Shapes, masks and features drawn together, a dozen cases at a time."""
    seeds = data.draw(st.lists(st.integers(0, 2**32), min_size=12, max_size=12))
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
    cases = [
        Case(
            random_problem(seed, dtype=data.draw(dtypes)),
            data.draw(st.sampled_from([*STRATEGIES])),
            data.draw(st.sampled_from(LAYOUTS)),
        )
        for seed in seeds
    ]
    check(pool, world, cases)


# ------------------------------------------------------------------------------------------------ particular promises


def default_group(group: ProcessGroup) -> Tensor:
    """Neither group nor mesh: the default group."""
    x = torch.randn(1, 32, 2, 4, generator=torch.Generator().manual_seed(3))
    mine = seqpar.shard(x, layout="zigzag")
    out = seqpar.ring_attention(mine, mine, mine, layout="zigzag")
    assert isinstance(out, Tensor)
    return seqpar.unshard(out, layout="zigzag")


def test_without_a_group_the_default_group_is_meant(pool: Pool) -> None:
    x = torch.randn(1, 32, 2, 4, generator=torch.Generator().manual_seed(3))
    expected = attention(x, x, x, strategy="local")
    for out in pool.run(8, default_group):
        torch.testing.assert_close(out, expected)


def gradient_of_part(group: ProcessGroup, strategy: str) -> list[Tensor]:
    """Only lse, and only on the even ranks, enters the loss: the others take part in backward all the same."""
    x = torch.randn(1, 24, 4, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    q, k, v = (seqpar.shard(x, group=group) for _ in range(3))
    out, lse = attention(q, k, v, group=group, return_lse=True, **STRATEGIES[strategy])
    loss = lse.sum() if group.rank() % 2 == 0 else out.sum() * 0
    loss.backward()
    assert x.grad is not None
    return [x.grad]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_only_some_ranks_have(pool: Pool, strategy: str) -> None:
    x = torch.randn(1, 24, 4, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    _, lse = attention(x, x, x, strategy="local", return_lse=True)
    even = torch.cat([dealt(24, 4, rank, "contiguous") for rank in (0, 2)])
    lse[:, :, even].sum().backward()
    for (dx,) in pool.run(4, gradient_of_part, strategy):
        torch.testing.assert_close(dx, x.grad)


def inputs_untouched(group: ProcessGroup, strategy: str) -> bool:
    """Non-contiguous inputs (transposed heads, a slice of a fused projection) work, and nobody writes to them."""
    made = torch.Generator().manual_seed(5)
    fused = torch.randn(2, 4, 12, 3 * 8, generator=made).requires_grad_()  # [batch, heads, seq, 3 * head_dim]
    before = fused.detach().clone()
    q, k, v = fused.transpose(1, 2).chunk(3, dim=-1)
    out = attention(q, k, v, group=group, layout="striped", **STRATEGIES[strategy])
    dout = torch.ones_like(out)
    out.backward(dout)
    straight = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    again = attention(*straight, group=group, layout="striped", **STRATEGIES[strategy])
    again.backward(dout)
    assert fused.grad is not None
    gradients = torch.cat([x.grad for x in straight if x.grad is not None], dim=-1).transpose(1, 2)
    return (
        torch.equal(out, again)
        and torch.equal(fused.grad, gradients)
        and torch.equal(fused.detach(), before)
        and bool((dout == 1).all())
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strides_do_not_matter(pool: Pool, strategy: str) -> None:
    assert all(pool.run(3, inputs_untouched, strategy))


def drawn_seeds(group: ProcessGroup) -> list[Tensor]:
    """Dropout without a seed: rank 0's generator decides for all of them."""
    torch.manual_seed(100 + group.rank())
    x = torch.ones(1, 16, 2, 4)
    outs = []
    for _ in range(2):
        mine = seqpar.shard(x, group=group)
        out = attention(mine, mine, mine, group=group, mask=Mask.full(), dropout_p=0.5)
        outs.append(seqpar.unshard(out, group=group))
    return outs


def test_dropout_draws_one_seed_for_all_ranks(pool: Pool) -> None:
    torch.manual_seed(100)
    x = torch.ones(1, 16, 2, 4)
    expected = [attention(x, x, x, strategy="local", mask=Mask.full(), dropout_p=0.5) for _ in range(2)]
    assert not torch.equal(*expected)
    for outs in pool.run(4, drawn_seeds):
        for out, one in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, one)


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [  # Random123's known answers (tests/kat_vectors, philox4x32 10)
        ((0, 0, 0, 0), (0, 0), 0x6627E8D5),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF, 0xFFFFFFFF), 0x408F276D),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), 0xD16CFE09),
    ],
)
def test_philox(counter: tuple[int, int, int, int], key: tuple[int, int], word: int) -> None:
    """The package's and the reference's: the same bits on every machine, for ever."""
    seed = key[1] << 32 | key[0]
    assert int(reference.philox(seed, counter)[0]) == word
    c0, c1, c2, c3 = (torch.tensor(c) for c in counter)
    assert int(philox(seed, c0, c1, c2, c3)) == word


def test_dropout_is_a_fair_coin() -> None:
    """The share kept, the mean of the output over seeds, and independence of neighbours."""
    heads, seq_len, p = 2, 64, 0.25
    v = torch.eye(seq_len)[None, :, None].expand(1, seq_len, heads, seq_len).contiguous()
    q, k = (torch.zeros(1, seq_len, heads, seq_len) for _ in range(2))
    draws = torch.stack(
        [
            attention(q, k, v, strategy="local", mask=Mask.full(), dropout_p=p, dropout_seed=seed)[0]
            for seed in range(200)
        ]
    )  # [seed, query, head, key]: 1 / (seq_len * (1 - p)) where kept, 0 where dropped
    coins = draws > 0
    n = coins.numel()
    assert abs(float(coins.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    assert abs(float(draws.double().mean()) * seq_len - 1) < 5 * (p / (1 - p) / n) ** 0.5
    centred = coins.double() - (1 - p)
    for dim in range(4):
        neighbours = (
            centred.narrow(dim, 0, coins.shape[dim] - 1) * centred.narrow(dim, 1, coins.shape[dim] - 1)
        ).mean()
        assert abs(float(neighbours)) < 5 * p * (1 - p) / (n * 0.4) ** 0.5


def test_the_layouts_of_a_group_are_those_of_shard(pool: Pool) -> None:
    """The same call with another layout's shards is another problem: it is noticed where lengths betray it."""
    with pytest.raises(AssertionError, match=r"length: the ranks hold \[6, 6, 5, 5\]"):
        pool.run(4, wrong_layout)


def wrong_layout(group: ProcessGroup) -> None:
    mine = seqpar.shard(torch.zeros(1, 22, 2, 4), group=group, layout="contiguous")
    seqpar.ring_attention(mine, mine, mine, group=group, layout="zigzag")


def in_a_row(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """A model's many calls of different kinds: graphs alive at once, backward in the other order."""
    x = torch.randn(1, 40, 4, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    leaf = seqpar.shard(x, group=group, layout="zigzag").requires_grad_()
    h, total = leaf, torch.zeros((), dtype=torch.float64)
    for options, rules in zip(STRATEGIES.values(), RULES_IN_A_ROW, strict=True):
        out = attention(h, h, h, group=group, layout="zigzag", mask=combined(rules), **options)
        total = total + out.square().sum()
        h = (h + out) / 2
    total.backward()
    assert leaf.grad is not None
    return leaf.grad, h.detach()


RULES_IN_A_ROW = [rules for rules in RULES if rows_of(rules) == 1][: len(STRATEGIES)]


def test_layers_in_a_row(pool: Pool) -> None:
    x = torch.randn(1, 40, 4, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64).requires_grad_()
    h, total = x, torch.zeros((), dtype=torch.float64)
    for rules in RULES_IN_A_ROW:
        out, _ = dense_attention(h, h, h, seen_by_definition(rules, 40))
        total = total + out.square().sum()
        h = (h + out) / 2
    total.backward()
    assert x.grad is not None
    for rank, (dx, last) in enumerate(pool.run(4, in_a_row)):
        mine = dealt(40, 4, rank, "zigzag")
        assert_close(last, h.detach()[:, mine], torch.float64)
        assert_close(dx, x.grad[:, mine], torch.float64)
