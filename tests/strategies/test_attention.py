"""Conformance: every strategy, layout and mask gives the results of one device, in forward and in backward.

A strategy is tested here as soon as it has a row in ``strategies.py``. Each test sends many cases to the workers at
once. The workers return their shards of the results. This process concatenates the shards and compares the results.
``--case`` runs one case alone (see ``cases.py``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from itertools import cycle, product
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import seqpar
from seqpar.strategies import call, head_exchange, transport

from ..cases import Batch
from ..hosts import hosts_of
from ..pool import Pool, mesh_of, on_ranks
from ..problems import (
    BATCH_RULES,
    HEAD_RULES,
    RULES,
    Problem,
    heads_for,
    present_backends,
    random_problem,
    solve,
)
from ..reference import Rule, Rules, assert_close, groups_of, rank_positions, rows_of, rules_id
from ..strategy_cases import DISTINCT, LAYOUTS, STRATEGIES, WORLDS, layout_of

IN_SHARED_MEMORY = 3  # on 3 ranks the messages go through shared memory
# A hybrid of 2 or 3 ranks is a ring or Ulysses. `make test-fast` runs two ranks.
EVERY_STRATEGY_AND_WORLD = [
    pytest.param(strategy, world, marks=pytest.mark.slow if world > 2 else ())
    for strategy in DISTINCT
    for world in ((4,) if strategy == "hybrid" else WORLDS)
]
V_HEAD_DIMS = (None, 4, 12, 5)  # head_dim of v; q and k have 8


class PassThrough(TorchDispatchMode):
    """Sees every operator below autograd, and changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# Dispatch modes. Below autograd, where these run, views do not know the tensor that they are views of.
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "CommDebugMode": CommDebugMode,
    "PassThrough": PassThrough,
}
Item = TypeVar("Item")
Results = dict[str, Tensor]  # out, lse, dq, dk, dv and, with sinks, dsinks


@dataclass(frozen=True)
class Case:
    """A problem, and how it is to be solved.

    Attributes:
        strategy: a row of ``STRATEGIES``, or "local".
        mesh: sizes of dp, ring, ulysses and tp, where a mesh is to be passed instead of a group.
        seq_len_given: whether ``seq_len`` is passed, with which the ranks do not exchange their lengths.
        per_host: how many ranks share a host; 0: all.
        mode: a row of ``MODES``, the dispatch mode under which forward and backward run; "" is none.
    """

    problem: Problem
    strategy: str = "ring"
    layout: str = "contiguous"
    backend: str = "auto"
    ulysses_size: int | None = None
    mesh: tuple[int, int, int, int] | None = None
    seq_len_given: bool = False
    per_host: int = 0
    mode: str = ""

    def __str__(self) -> str:
        words = [self.strategy, self.layout, str(self.problem)]
        for f in fields(self)[3:]:
            if (value := getattr(self, f.name)) != f.default:
                words.append(f"{f.name}={value}".replace(" ", ""))
        return " ".join(words)

    def arguments(self, ranks: int) -> dict[str, Any]:
        layout = layout_of(self.layout, self.problem.seq_len, ranks)
        chosen = dict(STRATEGIES.get(self.strategy, {"strategy": self.strategy}))
        if self.ulysses_size is not None:
            chosen["ulysses_size"] = self.ulysses_size
        if self.seq_len_given:
            chosen["seq_len"] = self.problem.seq_len
        return {**chosen, **self.problem.arguments(), "layout": layout, "backend": self.backend}


def attention(*args: Any, **kwargs: Any) -> Any:
    """``seqpar.attention`` without its return type, which depends on the arguments."""
    return seqpar.attention(*args, **kwargs)


def attend(case: Case, positions: Tensor, **where: Any) -> Results:
    """One rank's shard of the results: the tokens at ``positions``."""
    tensors = case.problem.tensors()
    leaves = {name: tensors[name][:, positions].clone().requires_grad_() for name in ("q", "k", "v")}
    extra = {"alibi_slopes": tensors["alibi_slopes"]} if "alibi_slopes" in tensors else {}
    if "sinks" in tensors:
        leaves["sinks"] = extra["sinks"] = tensors["sinks"].clone().requires_grad_()
    ranks = where["group"].size() if "group" in where else math.prod((case.mesh or (1, 1, 1))[1:3])
    out, lse = attention(leaves["q"], leaves["k"], leaves["v"], **case.arguments(ranks), **extra, **where)
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
        mock.patch.dict(call._MIN_CHUNK_BYTES, cpu=chunk_bytes),
        MODES[case.mode](),
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
    given = layout_of(layout, seq_len, ring * ulysses)
    assert torch.equal(seqpar.positions(seq_len, mesh=mesh, layout=given), positions)
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
    """Compare the results of one sequence group with one device's."""
    problem, got = case.problem, unshard(case, shards)
    for name, expected in solve(problem).items():
        dtype = problem.dtype
        # lse and the sinks' gradient are float32 for every dtype; but the latter depends on ``out``, which is rounded.
        if name == "lse" or (name == "dsinks" and dtype.itemsize > 2):
            dtype = torch.float32
        assert_close(got[name], expected, dtype, name, solve(problem, torch.float32)[name])


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
    batch.check_here([random_case(seed, strategy="local", layout="contiguous") for seed in range(100)], verify_local)


@pytest.mark.parametrize(
    ("rules", "v_head_dim"),
    [*zip([*RULES, *BATCH_RULES, *HEAD_RULES], cycle((None, 8, None, 24)), strict=False)],
    ids=lambda x: rules_id(x) if isinstance(x, tuple) else f"v{x}",
)
@pytest.mark.parametrize("backend", [name for name in present_backends() if name != "reference"])  # which has no tiles
def test_backends_on_long_sequences(rules: Rules, v_head_dim: int | None, backend: str) -> None:
    """Long enough for full, causal and masked tiles in one call."""
    longer = tuple(times(rule, 11) for rule in rules)
    heads = (2, 1) if groups_of(rules) == 1 else heads_for(rules, 1)
    problem = Problem(602, rows_of(rules), *heads, head_dim=16, v_head_dim=v_head_dim, rules=longer)
    verify_local(Case(problem, "local", backend=backend))


def times(rule: Rule, factor: int) -> Rule:
    """The same mask for a sequence ``factor`` times as long."""

    def scaled(x: Any) -> Any:
        if isinstance(x, Rule):
            return times(x, factor)
        if isinstance(x, tuple):
            return tuple(scaled(item) for item in x)
        return x if isinstance(x, bool | str) or x < 0 else x * factor

    kept = rule.args[:1] if rule.name == "tree" else ()  # the parents
    return replace(rule, args=(*kept, *scaled(rule.args[len(kept) :])))


def in_layouts(items: Sequence[Item], strategy: str, world: int) -> list[tuple[Item, str]]:
    """Each item with one layout. Every item meets every layout over the strategies and worlds."""
    first = [*STRATEGIES].index(strategy) + 2 * world
    return [(item, LAYOUTS[(first + index) % len(LAYOUTS)]) for index, item in enumerate(items)]


@pytest.mark.thorough(strategy=[x for x in DISTINCT if x != "hybrid"], world=[2, 4])
@pytest.mark.parametrize(("strategy", "world"), EVERY_STRATEGY_AND_WORLD)
def test_masks_and_heads(batch: Batch, strategy: str, world: int) -> None:
    """Every mask, every pair of head counts and every layout, with a length that no number of ranks divides and one
    that every number divides. Over the strategies and worlds every mask meets every pair of head counts.

    On 4 ranks a strategy has every other mask, and a hybrid every mask.
    """
    s = [*STRATEGIES].index(strategy)
    masks = (*RULES, *HEAD_RULES) if world < 4 or strategy == "hybrid" else (*RULES, *HEAD_RULES)[s % 2 :: 2]
    cases = []
    for index, (rules, layout) in enumerate(in_layouts(masks, strategy, world)):
        heads, kv_heads = heads_for(rules, index + 2 * s + world)
        v_head_dim = V_HEAD_DIMS[(index + s // 2 + world) % len(V_HEAD_DIMS)]
        seq_len = (53, 48)[(index // 4 + s) % 2]
        problem = Problem(seq_len, rows_of(rules), heads, kv_heads, v_head_dim=v_head_dim, rules=rules)
        cases.append(Case(problem, strategy, layout))
    batch.check(world, attend_on_rank, cases, verify, shared_memory=world == IN_SHARED_MEMORY)


@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shared memory"])
def test_dispatch_modes(batch: Batch, shared_memory: bool) -> None:
    """Under a dispatch mode, such as PyTorch's counters, every strategy gives the same numbers.

    Each mode meets each strategy once: through gloo or shared memory, and on one host or on two.
    """
    cases = []
    for (m, mode), (s, strategy) in product(enumerate(filter(None, MODES)), enumerate(STRATEGIES)):
        if (m + s) % 2 == shared_memory:
            seq_len, per_host = ((48, 0), (53, 2))[(m + s // 2) % 2]
            problem = Problem(seq_len, heads=6, kv_heads=3)
            cases.append(Case(problem, strategy, "zigzag", per_host=per_host, mode=mode))
    batch.check(4, attend_on_rank, cases, verify, shared_memory=shared_memory)


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


# test_random_cases combines features on every number of ranks.
@pytest.mark.thorough(strategy=["ulysses", "all_gather", "all_gather in chunks"], world=[2])
@pytest.mark.parametrize(
    ("strategy", "world"), [p for p in EVERY_STRATEGY_AND_WORLD if p.values[1] != 4 or p.values[0] == "hybrid"]
)
def test_features(batch: Batch, strategy: str, world: int) -> None:
    """Each feature alone, all features in every dtype, short sequences, and queries that see nothing."""
    # The last 5 tokens are padding.
    windows = (Rule("documents", ((0, 17, 44), True, True)), Rule("sliding_window", (6, 0)))
    base = Problem(seq_len=49, heads=6, kv_heads=3, rules=windows)
    full = replace(base, rules=(Rule("full"),))
    all_padding = replace(base, rules=(Rule("documents", ((0,), True, True)),), sinks=True)
    problems = [replace(problem, **feature) for feature, problem in zip(FEATURES, cycle((base, full)), strict=False)]
    problems += [replace(base, dtype=dtype, batch=2) for dtype in DTYPES]
    problems += [replace(base, dtype=dtype, **ALL_FEATURES) for dtype in DTYPES]
    if world < 4:  # the other half in the other world
        problems = problems[([*STRATEGIES].index(strategy) + world) % 2 :: 2]
    cases = [Case(problem, strategy, layout) for problem, layout in in_layouts(problems, strategy, world)]
    short = replace(base, rules=(Rule("causal"),))
    for seq_len, layout in in_layouts(sorted({0, 1, world - 1, world + 1}), strategy, world):
        cases.append(Case(replace(short, seq_len=seq_len), strategy, layout))
    cases.append(Case(all_padding, strategy))
    cases.append(Case(base, strategy, "zigzag", seq_len_given=True))
    cases.append(Case(base, strategy, "striped", backend="reference"))
    batch.check(world, attend_on_rank, cases, verify, shared_memory=world == IN_SHARED_MEMORY)


def test_one_rank(batch: Batch) -> None:
    """Every strategy, and "local", in a group of one rank."""
    combinations = product([*STRATEGIES, "local"], LAYOUTS)
    cases = [Case(random_problem(seed), strategy, layout) for seed, (strategy, layout) in enumerate(combinations)]
    batch.check(1, attend_on_rank, cases, verify)


@pytest.mark.thorough(world=[4, 8])
@pytest.mark.parametrize(
    ("world", "sizes"), [(2, (1, 2)), (4, (1, 2, 4)), pytest.param(8, (2, 4), marks=pytest.mark.slow)], ids=str
)
def test_ulysses_size(batch: Batch, world: int, sizes: tuple[int, ...]) -> None:
    """A plain group divided into ring and ulysses subgroups of every size."""
    cases = [
        Case(random_problem(seed), ("hybrid", "a2a+p2p")[(seed + size_index) % 2], layout, ulysses_size=size)
        for seed, ((size_index, size), layout) in enumerate(product(enumerate(sizes), LAYOUTS))
    ]
    batch.check(world, attend_on_rank, cases, verify)


@pytest.mark.slow
@pytest.mark.thorough(mesh=[(2, 2, 2, 1), (1, 2, 2, 2), (1, 8, 1, 1)])
@pytest.mark.parametrize(
    "mesh",
    [(1, 4, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 8, 1, 1), (2, 2, 1, 2)],
    ids="dp{0[0]}-ring{0[1]}-ulysses{0[2]}-tp{0[3]}".format,
)
def test_mesh(batch: Batch, mesh: tuple[int, int, int, int]) -> None:
    """Sequence groups taken from a mesh, with and without data- and tensor-parallel dimensions."""
    cases = [
        Case(random_problem(seed, seq_len=50), strategy, layout, mesh=mesh)
        for seed, (strategy, layout) in enumerate(zip(DISTINCT, cycle(LAYOUTS), strict=False))
    ]
    batch.check(8, attend_on_rank, cases, verify)


@pytest.mark.slow
@pytest.mark.thorough(strategy=["all_gather", "all_gather in chunks"])
@pytest.mark.thorough(strategy=["ring"], world=[4])
@pytest.mark.thorough(strategy=["hybrid"], world=[8])
@pytest.mark.parametrize(("world", "per_host"), [(4, 2), (8, 4)], ids=str)
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_gather in chunks", "hybrid"])
def test_several_hosts(batch: Batch, strategy: str, world: int, per_host: int) -> None:
    """Keys and values are sent once to each host that needs them, and shared there. On two hosts of two ranks the
    strategies share the masks among them."""
    cases = [
        Case(
            Problem(53, rows_of(rules), *heads_for(rules, 3), v_head_dim=v_head_dim, rules=rules),
            strategy,
            layout,
            per_host=per_host,
        )
        for (rules, layout), v_head_dim in zip(
            in_layouts((*RULES, *HEAD_RULES)[[*STRATEGIES].index(strategy) % 4 :: world], strategy, world),
            cycle(V_HEAD_DIMS),
            strict=False,
        )
    ]
    cases += [random_case(2000 * world + seed, strategy=strategy, per_host=per_host) for seed in range(8 // world)]
    batch.check(world, attend_on_rank, cases, verify)


@pytest.mark.thorough(world=[2, 4, 8])
@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4, 8))])
def test_random_cases(batch: Batch, world: int) -> None:
    """Every strategy, with shapes, masks, features and layouts drawn together; the seed is in the case's id."""
    strategies = zip(range(64 // world), cycle(STRATEGIES), strict=False)
    cases = [random_case(1000 * world + seed, strategy=strategy) for seed, strategy in strategies]
    batch.check(world, attend_on_rank, cases, verify, shared_memory=world == IN_SHARED_MEMORY)


@on_ranks
def attend_at_the_size_of_a_chunk(group: ProcessGroup, strategy: str) -> Results:
    """Two ranks of 9 and 8 tokens, of which only the first has the bytes of a second chunk of heads."""
    problem = Problem(17, heads=4, kv_heads=4, head_dim=8)
    case = Case(problem, strategy, "contiguous", seq_len_given=True)
    with mock.patch.dict(call._MIN_CHUNK_BYTES, cpu=2 * 9 * 4 * 8 * problem.dtype.itemsize // 2):
        return attend(case, rank_positions(17, 2, group.rank(), "contiguous"), group=group)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_uneven_shards_have_equal_numbers_of_chunks(pool: Pool, strategy: str) -> None:
    problem = Problem(17, heads=4, kv_heads=4, head_dim=8)
    verify_group(Case(problem, strategy, "contiguous"), pool.run(2, attend_at_the_size_of_a_chunk, strategy))


@on_ranks
def attend_with_padding(group: ProcessGroup) -> list[bool]:
    """Whether each collective of an uneven all-gather sends finite numbers, if new memory is full of NaN."""
    finite = list[bool]()

    def checked(name: str) -> Any:
        start = getattr(transport, name)

        def started(x: Tensor, *args: Any) -> Any:
            finite.append(bool(x.isfinite().all()))
            return start(x, *args)

        return mock.patch.object(transport, name, started)

    torch.use_deterministic_algorithms(True)  # with its default, which fills new memory
    try:
        with checked("start_all_gather"), checked("start_reduce_scatter"):
            case = Case(Problem(17, rules=(Rule("full"),)), "all_gather", "contiguous", seq_len_given=True)
            attend(case, rank_positions(17, 2, group.rank(), "contiguous"), group=group)
    finally:
        torch.use_deterministic_algorithms(False)
    return finite


def test_padding_is_finite(pool: Pool) -> None:
    """NCCL can be told to check what it sends (TORCH_NCCL_NAN_CHECK)."""
    for finite in pool.run(2, attend_with_padding):
        assert len(finite) >= 2 and all(finite)
