"""Conformance: every strategy, layout and mask gives the results of one device, in forward and in backward.

A strategy is tested here as soon as it has a row in ``strategies.py``. Each test sends many cases to the workers at
once. The workers return their shards of the results. This process concatenates the shards and compares the results.
``--case`` runs one case alone (see ``cases.py``).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import cycle, product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar.layout import LAYOUTS
from seqpar.strategies import call, head_exchange

from ..cases import Batch
from ..hosts import hosts_of
from ..pool import Pool, mesh_of, on_ranks
from ..reference import (
    BATCH_RULES,
    HEADS,
    RULES,
    Problem,
    Rule,
    Rules,
    assert_close,
    combined_mask,
    dense_attention,
    difference,
    fitted,
    random_problem,
    rank_positions,
    rows_of,
    rules_id,
    solve,
    visible_pairs,
)
from ..strategy_cases import STRATEGIES, WORLDS

# While editing, two sizes have a case of every strategy, mask, head count, feature and dtype.
# The values of ``comm`` that are other names of ring, Ulysses and hybrid: on one number of ranks only.
OTHER_NAMES = ("p2p", "a2a", "a2a+p2p")
EVERY_STRATEGY_AND_WORLD = [
    pytest.param(strategy, world, marks=() if world in (2, 4) else pytest.mark.slow, id=f"{strategy}-{world}")
    for strategy in STRATEGIES
    for world in ((4,) if strategy in OTHER_NAMES else WORLDS)
]
# Of v, beside 8 of q and k: the same, less, more.
V_HEAD_DIMS = (None, 4, 12, 5)
Results = dict[str, Tensor]  # out, lse, dq, dk, dv and, with sinks, dsinks


@dataclass(frozen=True)
class Case:
    """A problem, and how it is to be solved.

    Attributes:
        strategy: a row of ``STRATEGIES``, or "local".
        mesh: sizes of dp, ring, ulysses and tp, where a mesh is to be passed instead of a group.
        seq_len_given: whether ``seq_len`` is passed, with which the ranks do not exchange their lengths.
        per_host: how many ranks share a host; 0: all.
    """

    problem: Problem
    strategy: str = "ring"
    layout: str = "contiguous"
    backend: str = "auto"
    ulysses_size: int | None = None
    mesh: tuple[int, int, int, int] | None = None
    seq_len_given: bool = False
    per_host: int = 0

    def __str__(self) -> str:
        words = [self.strategy, self.layout, str(self.problem)]
        for f in fields(self)[3:]:
            if (value := getattr(self, f.name)) != f.default:
                words.append(f"{f.name}={value}".replace(" ", ""))
        return " ".join(words)

    def arguments(self) -> dict[str, Any]:
        chosen = dict(STRATEGIES.get(self.strategy, {"strategy": self.strategy}))
        if self.ulysses_size is not None:
            chosen["ulysses_size"] = self.ulysses_size
        if self.seq_len_given:
            chosen["seq_len"] = self.problem.seq_len
        return {**chosen, **self.problem.arguments(), "layout": self.layout, "backend": self.backend}


def attention(*args: Any, **kwargs: Any) -> Any:
    """``seqpar.attention`` without its return type, which depends on the arguments."""
    return seqpar.attention(*args, **kwargs)


def attend(case: Case, positions: Tensor, **where: Any) -> Results:
    """One rank's shard of the results: those of the tokens at ``positions``."""
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


@on_ranks
def attend_on_rank(group: ProcessGroup, case: Case) -> Results:
    """This rank's shard of the results of a case."""
    # In chunks of heads, however short the sequence; ring and all-gather in one chunk where the length is even.
    chunk_bytes = 1 if case.problem.seq_len % 2 else 1 << 40
    with (
        hosts_of(case.per_host),
        mock.patch.dict(head_exchange.MIN_CHUNK_WORK, cpu=1),
        mock.patch.dict(call._CHUNK_BYTES, cpu=chunk_bytes),
    ):
        return attend_in_chunks(group, case)


def attend_in_chunks(group: ProcessGroup, case: Case) -> Results:
    seq_len, layout = case.problem.seq_len, case.layout
    if case.mesh is None:
        return attend(case, rank_positions(seq_len, group.size(), group.rank(), layout), group=group)
    mesh = mesh_of(*case.mesh)
    _, ring, ulysses, _ = case.mesh
    rank = mesh.get_local_rank("ring") * ulysses + mesh.get_local_rank("ulysses")
    positions = rank_positions(seq_len, ring * ulysses, rank, layout)
    assert torch.equal(seqpar.positions(seq_len, mesh=mesh, layout=layout), positions)
    return attend(case, positions, mesh=mesh)


def unshard(case: Case, shards: list[Results]) -> Results:
    """The results over the full sequence, from the shards of a sequence group's ranks; ``dsinks`` is their sum."""
    ranks = len(shards)
    order = torch.cat([rank_positions(case.problem.seq_len, ranks, rank, case.layout) for rank in range(ranks)])
    results = {}
    for name in shards[0]:
        tensors = [shard[name] for shard in shards]
        if name == "dsinks":
            results[name] = torch.stack(tensors).sum(0)
        else:
            dim = 2 if name == "lse" else 1  # [b, h, s] or [b, s, h, d]
            results[name] = torch.cat(tensors, dim).index_select(dim, order.argsort())
    return results


def verify_group(case: Case, shards: list[Results]) -> None:
    """Compare the results of one sequence group with those of one device."""
    problem, got = case.problem, unshard(case, shards)
    wrong = []
    for name, expected in solve(problem).items():
        dtype = problem.dtype
        # lse and the sinks' gradient are float32 for every dtype; but the latter depends on ``out``, which is rounded.
        if name == "lse" or (name == "dsinks" and dtype.itemsize > 2):
            dtype = torch.float32
        if (found := difference(got[name], expected, dtype)) is not None:
            wrong.append(f"{name}: {found}")
    if wrong:
        raise AssertionError("\n".join(wrong))


def verify(case: Case, shards: list[Results]) -> None:
    """Compare the results of every sequence group: one, or on a mesh one for each dp and tp rank."""
    dp, ring, ulysses, tp = case.mesh or (1, len(shards), 1, 1)
    ranks = torch.arange(len(shards)).view(dp, ring * ulysses, tp)
    for dp_rank, tp_rank in product(range(dp), range(tp)):
        verify_group(case, [shards[rank] for rank in ranks[dp_rank, :, tp_rank].tolist()])


def verify_local(case: Case) -> None:
    """Solve a case in this process and compare."""
    verify(case, [attend(case, torch.arange(case.problem.seq_len))])


def random_case(seed: int, **fixed: Any) -> Case:
    """A case drawn from every problem, strategy and layout, except for the ``fixed`` fields."""
    chance = random.Random(f"case {seed}")
    problem = random_problem(seed, dtype=chance.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16)))
    if problem.dtype.itemsize == 2:
        # Gradients of very few products do not average out the rounding of ``out``.
        problem = replace(problem, seq_len=max(problem.seq_len, 13), head_dim=max(problem.head_dim, 8))
        if problem.v_head_dim is not None:
            problem = replace(problem, v_head_dim=max(problem.v_head_dim, 8))
    return replace(Case(problem, chance.choice([*STRATEGIES]), chance.choice(LAYOUTS)), **fixed)


def test_local(batch: Batch) -> None:
    batch.check_here([random_case(seed, strategy="local", layout="contiguous") for seed in range(300)], verify_local)


@pytest.mark.parametrize(
    ("rules", "v_head_dim"),
    [*zip([*RULES, *BATCH_RULES], cycle((None, 8, None, 24)), strict=False)],
    ids=lambda x: rules_id(x) if isinstance(x, tuple) else f"v{x}",
)
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_backends_on_long_sequences(rules: Rules, v_head_dim: int | None, backend: str) -> None:
    """Long enough for full, causal and masked tiles in one call."""
    longer = tuple(times(rule, 11) for rule in rules)
    problem = Problem(601, rows_of(rules), 4, 2, head_dim=16, v_head_dim=v_head_dim, rules=longer)
    verify_local(Case(problem, "local", backend=backend))


def times(rule: Rule, factor: int) -> Rule:
    """The same mask for a sequence ``factor`` times as long."""

    def scaled(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(scaled(item) for item in x)
        return x if isinstance(x, bool) or x < 0 else x * factor

    return replace(rule, args=scaled(rule.args))


@pytest.mark.parametrize(("strategy", "world"), EVERY_STRATEGY_AND_WORLD)
def test_masks(batch: Batch, strategy: str, world: int) -> None:
    """Every mask in every layout, grouped heads, other head_dims of v, and a length that no number of ranks divides."""
    cases = [
        Case(Problem(53, rows_of(rules), heads=6, kv_heads=3, v_head_dim=v_head_dim, rules=rules), strategy, layout)
        for (layout, rules), v_head_dim in zip(product(LAYOUTS, RULES), cycle(V_HEAD_DIMS), strict=False)
    ]
    batch.check(world, attend_on_rank, cases, verify)


@pytest.mark.parametrize(("strategy", "world"), EVERY_STRATEGY_AND_WORLD)
def test_heads(batch: Batch, strategy: str, world: int) -> None:
    """Every pair of head counts in every layout, with a length that every number of ranks divides."""
    cases = [
        Case(Problem(48, heads=heads, kv_heads=kv_heads, v_head_dim=v_head_dim), strategy, layout)
        for (layout, (heads, kv_heads)), v_head_dim in zip(product(LAYOUTS, HEADS), cycle(V_HEAD_DIMS), strict=False)
    ]
    batch.check(world, attend_on_rank, cases, verify)


FEATURES: tuple[dict[str, Any], ...] = (
    {"softcap": 1.5},
    {"sinks": True},
    {"alibi": "heads"},
    {"alibi": "batch", "batch": 2},
    {"dropout_p": 0.3, "batch": 2},
    {"lse_gradient": True},
    {"lse_gradient": True, "sinks": True},
    {"softmax_scale": 0.7},
)
ALL_FEATURES: dict[str, Any] = {
    "softcap": 2.0,
    "sinks": True,
    "alibi": "heads",
    "dropout_p": 0.2,
    "lse_gradient": True,
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("strategy", "world"), EVERY_STRATEGY_AND_WORLD)
def test_features(batch: Batch, strategy: str, world: int) -> None:
    """Each feature alone, all features in every dtype and layout, short sequences, and queries that see nothing."""
    # The last 5 tokens are padding.
    windows = (Rule("documents", ((0, 17, 44), True, True)), Rule("sliding_window", (6, 0)))
    base = Problem(seq_len=49, heads=6, kv_heads=3, rules=windows)
    full = replace(base, rules=(Rule("full"),))
    all_padding = replace(base, rules=(Rule("documents", ((0,), True, True)),), sinks=True)
    cases = [Case(replace(base, **feature), strategy, "zigzag") for feature in FEATURES]
    cases += [Case(replace(full, **feature), strategy, "striped") for feature in FEATURES]
    for dtype, layout in product(DTYPES, LAYOUTS):
        cases.append(Case(replace(base, dtype=dtype, batch=2), strategy, layout))
        cases.append(Case(replace(base, dtype=dtype, **ALL_FEATURES), strategy, layout))
    short = replace(base, rules=(Rule("causal"),))
    for seq_len, layout in product(sorted({0, 1, world - 1, world + 1}), LAYOUTS):
        cases.append(Case(replace(short, seq_len=seq_len), strategy, layout))
    cases.append(Case(all_padding, strategy))
    cases.append(Case(base, strategy, "zigzag", seq_len_given=True))
    cases.append(Case(base, strategy, "striped", backend="reference"))
    batch.check(world, attend_on_rank, cases, verify)


def test_one_rank(batch: Batch) -> None:
    """Every strategy, and "local", in a group of one rank."""
    combinations = product([*STRATEGIES, "local"], LAYOUTS, range(3))
    cases = [Case(random_problem(seed), strategy, layout) for seed, (strategy, layout, _) in enumerate(combinations)]
    batch.check(1, attend_on_rank, cases, verify)


@pytest.mark.parametrize(
    ("world", "sizes"), [(2, (1, 2)), (4, (1, 2, 4)), pytest.param(8, (1, 2, 4, 8), marks=pytest.mark.slow)], ids=str
)
def test_ulysses_size(batch: Batch, world: int, sizes: tuple[int, ...]) -> None:
    """A plain group divided into ring and ulysses subgroups of every size."""
    combinations = product(sizes, ("hybrid", "a2a+p2p"), LAYOUTS, range(2))
    cases = [
        Case(random_problem(seed), strategy, layout, ulysses_size=size)
        for seed, (size, strategy, layout, _) in enumerate(combinations)
    ]
    batch.check(world, attend_on_rank, cases, verify)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [(1, 4, 2, 1), (1, 2, 4, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 8, 1, 1), (1, 1, 8, 1), (2, 2, 1, 2)],
    ids="dp{0[0]}-ring{0[1]}-ulysses{0[2]}-tp{0[3]}".format,
)
def test_mesh(batch: Batch, mesh: tuple[int, int, int, int]) -> None:
    """Sequence groups taken from a mesh, with and without data- and tensor-parallel dimensions."""
    cases = [
        Case(random_problem(seed, seq_len=50), strategy, layout, mesh=mesh)
        for seed, (strategy, layout) in enumerate(product(STRATEGIES, LAYOUTS))
    ]
    batch.check(8, attend_on_rank, cases, verify)


@pytest.mark.parametrize(("world", "per_host"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_gather in chunks", "hybrid"])
def test_several_hosts(batch: Batch, strategy: str, world: int, per_host: int) -> None:
    """Keys and values are sent once to each host that needs them, and shared there."""
    cases = [
        Case(
            Problem(53, rows_of(rules), heads=6, kv_heads=3, v_head_dim=v_head_dim, rules=rules),
            strategy,
            layout,
            per_host=per_host,
        )
        for layout, rules, v_head_dim in zip(cycle(LAYOUTS), RULES, cycle(V_HEAD_DIMS), strict=False)
    ]
    cases += [random_case(2000 * world + seed, strategy=strategy, per_host=per_host) for seed in range(12)]
    batch.check(world, attend_on_rank, cases, verify)


@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_random_cases(batch: Batch, world: int) -> None:
    """Shapes, masks, features, strategies and layouts drawn together; the seed is in the case's id."""
    batch.check(world, attend_on_rank, [random_case(1000 * world + seed) for seed in range(60)], verify)


@on_ranks
def attend_at_the_size_of_a_chunk(group: ProcessGroup, strategy: str) -> Results:
    """Two ranks of 9 and 8 tokens, of which only the first has the bytes of a second chunk of heads."""
    problem = Problem(17, heads=4, kv_heads=4, head_dim=8)
    case = Case(problem, strategy, "contiguous", seq_len_given=True)
    with mock.patch.dict(call._CHUNK_BYTES, cpu=2 * 9 * 4 * 8 * problem.dtype.itemsize // 2):
        return attend(case, rank_positions(17, 2, group.rank(), "contiguous"), group=group)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_uneven_shards_have_as_many_chunks(pool: Pool, strategy: str) -> None:
    problem = Problem(17, heads=4, kv_heads=4, head_dim=8)
    verify_group(Case(problem, strategy, "contiguous"), pool.run(2, attend_at_the_size_of_a_chunk, strategy))


@on_ranks
def attend_without_group(group: ProcessGroup) -> Tensor:
    """A call with neither group nor mesh, which is for the default group."""
    x = torch.randn(1, 32, 2, 4, generator=torch.Generator().manual_seed(3))
    x_local = seqpar.shard(x, layout="zigzag")
    out = attention(x_local, x_local, x_local, strategy="ring", layout="zigzag")
    return seqpar.unshard(out, layout="zigzag")


def test_the_default_group(pool: Pool) -> None:
    x = torch.randn(1, 32, 2, 4, generator=torch.Generator().manual_seed(3))
    expected = attention(x, x, x, strategy="local")
    for out in pool.run(8, attend_without_group):
        torch.testing.assert_close(out, expected)


@on_ranks
def gradient_of_even_ranks(group: ProcessGroup, strategy: str) -> Tensor:
    """The loss is the sum of ``lse`` on the even ranks. The odd ranks have no gradient but take part in backward."""
    x = torch.randn(1, 24, 4, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    q, k, v = (seqpar.shard(x, group=group, layout="contiguous") for _ in range(3))
    out, lse = attention(q, k, v, group=group, return_lse=True, **STRATEGIES[strategy], layout="contiguous")
    loss = lse.sum() if group.rank() % 2 == 0 else out.sum() * 0
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_that_only_some_ranks_have(pool: Pool, strategy: str) -> None:
    x = torch.randn(1, 24, 4, 4, generator=torch.Generator().manual_seed(4)).requires_grad_()
    _, lse = attention(x, x, x, strategy="local", return_lse=True)
    even = torch.cat([rank_positions(24, 4, rank, "contiguous") for rank in (0, 2)])
    lse[:, :, even].sum().backward()
    for dx in pool.run(4, gradient_of_even_ranks, strategy):
        torch.testing.assert_close(dx, x.grad)


@on_ranks
def strided_inputs(group: ProcessGroup, strategy: str) -> None:
    """Inputs that are not contiguous give the same results as contiguous ones, and nothing writes to them."""
    generator = torch.Generator().manual_seed(5)
    fused = torch.randn(2, 4, 12, 3 * 8, generator=generator).requires_grad_()  # [b, h, s, 3 d]: a fused projection
    before = fused.detach().clone()
    q, k, v = fused.transpose(1, 2).chunk(3, dim=-1)
    out = attention(q, k, v, group=group, layout="striped", **STRATEGIES[strategy])
    dout = torch.ones_like(out)
    out.backward(dout)
    contiguous = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    expected = attention(*contiguous, group=group, layout="striped", **STRATEGIES[strategy])
    expected.backward(dout)
    assert fused.grad is not None
    gradients = torch.cat([x.grad for x in contiguous if x.grad is not None], dim=-1).transpose(1, 2)
    assert torch.equal(out, expected)
    assert torch.equal(fused.grad, gradients)
    assert torch.equal(fused.detach(), before)
    assert bool((dout == 1).all())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strides_do_not_matter(pool: Pool, strategy: str) -> None:
    pool.run(3, strided_inputs, strategy)


@on_ranks
def attend_with_wrong_layout(group: ProcessGroup) -> None:
    """Shards of one layout, and a call that names another."""
    x_local = seqpar.shard(torch.zeros(1, 22, 2, 4), group=group, layout="contiguous")
    seqpar.ring_attention(x_local, x_local, x_local, group=group, layout="zigzag")


def test_lengths_that_the_layout_does_not_give(pool: Pool) -> None:
    """A wrong layout is noticed where the lengths of the shards differ from the layout's."""
    with pytest.raises(AssertionError, match=r"length: the ranks hold \[6, 6, 5, 5\]"):
        pool.run(4, attend_with_wrong_layout)


# One mask for each strategy.
SHARED_RULES = [fitted(rules, 40) for rules in RULES if rows_of(rules) == 1]
LAYERS = list(zip(STRATEGIES.values(), SHARED_RULES, strict=False))


@on_ranks
def layers_in_a_row(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Many calls of different strategies in one graph, with their backwards in the reverse order."""
    x = torch.randn(1, 40, 4, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    x_local = seqpar.shard(x, group=group, layout="zigzag").requires_grad_()
    h, loss = x_local, torch.zeros((), dtype=torch.float64)
    for strategy, rules in LAYERS:
        out = attention(h, h, h, group=group, layout="zigzag", mask=combined_mask(rules), **strategy)
        loss = loss + out.square().sum()
        h = (h + out) / 2
    loss.backward()
    assert x_local.grad is not None
    return x_local.grad, h.detach()


def test_layers_in_a_row(pool: Pool) -> None:
    x = torch.randn(1, 40, 4, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64).requires_grad_()
    h, loss = x, torch.zeros((), dtype=torch.float64)
    for _, rules in LAYERS:
        out, _ = dense_attention(h, h, h, visible_pairs(rules, 40))
        loss = loss + out.square().sum()
        h = (h + out) / 2
    loss.backward()
    assert x.grad is not None
    for rank, (dx, last) in enumerate(pool.run(4, layers_in_a_row)):
        mine = rank_positions(40, 4, rank, "zigzag")
        assert_close(last, h.detach()[:, mine], torch.float64)
        assert_close(dx, x.grad[:, mine], torch.float64)


@on_ranks
def under_autocast(group: ProcessGroup, dtype: torch.dtype) -> None:
    """Attention casts as PyTorch's own attention does, and its gradients have the dtypes of the inputs."""
    torch.manual_seed(4)
    for inputs in ([torch.float32] * 3, [torch.float32, torch.float32, dtype], [torch.float64] * 3):
        full = [torch.randn(2, 24, 4, 8).to(d).requires_grad_() for d in inputs]
        q, k, v = (x.detach() for x in full)
        exact, _ = dense_attention(q, k, v, torch.ones(24, 24, dtype=torch.bool))
        shards = [seqpar.shard(x.detach(), group=group, layout="contiguous").requires_grad_() for x in full]
        with torch.autocast("cpu", dtype):
            expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in full))
            out = seqpar.ring_attention(*shards, group=group, mask=seqpar.Mask.full(), layout="contiguous")
        assert out.dtype == expected.dtype
        assert_close(out.detach(), seqpar.shard(exact, group=group, layout="contiguous"), out.dtype, f"{inputs}")
        out.sum().backward()
        assert [x.grad.dtype for x in shards if x.grad is not None] == inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(2, under_autocast, dtype)
