"""``seqpar.replay`` computes in one process the bits that real ranks compute, in forward and in backward."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Mask
from seqpar.kernels.cpu import CpuBackend
from seqpar.ranks.in_process import Crew
from seqpar.strategies import algorithms, call, head_exchange
from seqpar.strategies.transfers import Transfers

from ..cases import Batch
from ..hosts import hosts_of
from ..pool import Pool, mesh_of, on_ranks
from ..problems import BATCH_RULES, HEAD_RULES, RULES, Problem, heads_for
from ..reference import assert_close, rows_of
from ..strategy_cases import LAYOUTS, STRATEGIES
from .test_attention import ALL_FEATURES, FEATURES, Case, Results, attend_in_chunks, random_case, unshard


def replay(*args: Any, **kwargs: Any) -> Any:
    """``seqpar.replay`` without its return type, which depends on the arguments."""
    return seqpar.replay(*args, **kwargs)


def report(*args: Any, **kwargs: Any) -> seqpar.ReplayReport:
    """``seqpar.replay_report`` of arguments of any type."""
    return seqpar.replay_report(*args, **kwargs)


def replay_case(case: Case, ranks: int, shared_memory: bool) -> Results:
    """The results of a case over the full sequence; of forward alone if the gradients cannot be replayed."""
    tensors, options = case.problem.tensors(), case.arguments(ranks)
    options.pop("seq_len", None)
    options.update(ranks=ranks, ranks_per_host=case.per_host or None, shared_memory=shared_memory)
    names = [name for name in ("q", "k", "v", "sinks") if name in tensors]
    leaves = {name: tensors[name].requires_grad_() for name in names}
    qkv = [leaves[name] for name in names[:3]]
    options.update({name: tensors[name] for name in ("sinks", "alibi_slopes") if name in tensors})
    results: tuple[Tensor, ...] = ()
    outputs, gradients = (0, 1) if "dlse" in tensors else (0,), ("dout", "dlse")
    with suppress(ValueError):
        results = replay(*qkv, **options)
    if not results:
        with torch.no_grad():
            return dict(zip(("out", "lse"), replay(*qkv, **options), strict=True))
    torch.autograd.backward([results[i] for i in outputs], [tensors[gradients[i]] for i in outputs])
    found = {"out": results[0].detach(), "lse": results[1].detach()}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        found[f"d{name}"] = leaf.grad
    return found


@on_ranks
def attend_and_replay(group: ProcessGroup, case: Case, shared_memory: bool) -> tuple[Results, Results]:
    """This rank's shard of the results, and on the first rank the replay of all ranks."""
    chunk_bytes = 1 if case.problem.seq_len % 2 else 1 << 40
    with (
        hosts_of(case.per_host),
        mock.patch.dict(head_exchange.MIN_CHUNK_WORK, cpu=1),
        mock.patch.dict(call._MIN_CHUNK_BYTES, cpu=chunk_bytes),
    ):
        shard = attend_in_chunks(group, case)
        return shard, replay_case(case, group.size(), shared_memory) if group.rank() == 0 else {}


def verify_bits(forward_alone: list[str], case: Case, results: list[tuple[Results, Results]]) -> None:
    """Compare all bits. Notes the strategies whose gradients were not replayed."""
    shards, replayed = [shard for shard, _ in results], results[0][1]
    joined = unshard(case, shards)
    if "dsinks" in joined:
        joined["dsinks"] = reduce(add, [shard["dsinks"] for shard in shards])
    if "dq" not in replayed:
        forward_alone.append(case.strategy)
    different = [name for name, x in replayed.items() if not same_bits(x, joined[name])]
    assert not different, f"{different} differ"
    assert {"out", "lse"} <= replayed.keys() <= joined.keys()


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)


def cases_of(world: int, turn: int, turns: int = 5) -> list[Case]:
    """Some of all masks and features, and a random case of each strategy. They meet the strategies, layouts, heads and
    dtypes in turn."""
    problems = [
        Problem((53, 48)[i % 2], rows_of(rules), rules=rules)
        for i, rules in enumerate((*RULES, *BATCH_RULES, *HEAD_RULES))
    ]
    problems += [Problem(**{"seq_len": 49, "v_head_dim": 12, **feature}) for feature in (*FEATURES, ALL_FEATURES)]
    cases = []
    for i, problem in [*enumerate(problems)][turn::turns]:
        heads, kv_heads = heads_for(problem.rules, i)
        problem = replace(problem, heads=heads, kv_heads=kv_heads, dtype=(torch.float32, torch.bfloat16)[i // 3 % 2])
        cases.append(Case(problem, [*STRATEGIES][(i + turn) % len(STRATEGIES)], LAYOUTS[(i + turn) % len(LAYOUTS)]))
    return cases + [random_case(7000 * world + i, strategy=strategy) for i, strategy in enumerate(STRATEGIES)]


@pytest.mark.thorough(world=[2, 4], shared_memory=[True])
@pytest.mark.thorough(turn=[4])
@pytest.mark.parametrize(
    ("turn", "world", "shared_memory"), [(0, 1, False), (1, 2, True), (2, 3, False), (3, 4, True), (4, 4, False)]
)
def test_the_bits_of_real_ranks(batch: Batch, turn: int, world: int, shared_memory: bool) -> None:
    """Every strategy, mask and feature, with messages through gloo and through shared memory."""
    cases = cases_of(world, turn)
    if world == 4 and not shared_memory:  # two hosts of two ranks
        cases += [Case(Problem(53, heads=6, kv_heads=3), name, "zigzag", per_host=2) for name in ("ring", "all_gather")]
    check(batch, world, cases, shared_memory)


def test_the_bits_of_eight_ranks(batch: Batch) -> None:
    """A hybrid of two hosts, and a ring."""
    problem = Problem(101, heads=6, kv_heads=2, sinks=True, lse_gradient=True)
    hybrid = Case(problem, "hybrid", "striped", ulysses_size=2, per_host=4)
    check(batch, 8, [hybrid, Case(replace(problem, dtype=torch.bfloat16), "ring", "zigzag")], shared_memory=False)


def check(batch: Batch, world: int, cases: list[Case], shared_memory: bool) -> None:
    forward_alone = list[str]()
    verify = partial(verify_bits, forward_alone)
    batch.check(world, attend_and_replay, cases, verify, shared_memory, shared_memory=shared_memory)
    assert len(forward_alone) < 5
    assert not forward_alone or (world == 4 and not shared_memory)
    assert all("all_gather" in strategy for strategy in forward_alone)


@on_ranks
def attend_with_latents(group: ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
    """The output, the gradients of q, k, v and the partial gradient of the weight: of this rank, and replayed."""
    torch.manual_seed(0)
    shapes = (1, 29, 4, 12), (1, 29, 1, 8), (1, 29, 1, 4), (4, 13, 8)
    *qkv, weight = (torch.randn(shape) for shape in shapes)
    dout, mask = torch.randn(1, 29, 4, 5), Mask.tree([-1, 0, 0], [11, 9, 9])
    sharding = seqpar.Sharding.balanced(mask, 29, group=group)
    leaves = [x.requires_grad_() for x in (*map(sharding.shard, qkv), weight.clone())]
    out = seqpar.ring_attention(*leaves[:3], sharding=sharding, mask=mask, latent_weight=leaves[3])
    own = [out.detach(), *torch.autograd.grad(out, leaves, sharding.shard(dout))]
    leaves = [x.requires_grad_() for x in (*qkv, weight)]
    ranks: dict[str, Any] = {"ranks": group.size(), "layout": sharding.layout, "shared_memory": False}
    out = replay(*leaves[:3], mask=mask, latent_weight=leaves[3], **ranks)
    replayed = [out, *torch.autograd.grad(out, leaves, dout)]
    return own, [*map(sharding.shard, replayed[:4]), replayed[4]]


def test_latents_a_tree_and_a_balanced_layout(pool: Pool) -> None:
    results = pool.run(3, attend_with_latents)
    for own, replayed in results:
        assert [same_bits(x, y) for x, y in zip(own[:4], replayed[:4], strict=True)] == [True] * 4
    assert same_bits(reduce(add, [own[4] for own, _ in results]), results[0][1][4])


def test_no_process_group_is_needed() -> None:
    """In this process: one device's results up to rounding, in every mode, for any number of ranks."""
    assert not dist.is_initialized()
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 37, heads, 8, requires_grad=True) for heads in (6, 2, 2))
    options: dict[str, Any] = {"mask": Mask.full(), "dropout_p": 0.2, "dropout_seed": 5}
    expected = seqpar.attention(q, k, v, strategy="local", **options)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    layouts = {r: seqpar.Sharding.balanced(Mask.full(), 37, ranks=r, rank=0).layout for r in (1, 5, 8)}
    for (ranks, layout), strategy in zip(layouts.items(), ("auto", "ring", "hybrid"), strict=True):
        with seqpar.trace() as trace:
            out = replay(q, k, v, ranks=ranks, strategy=strategy, layout=layout, **options)
            assert_close([out, *torch.autograd.grad(out.sum(), (q, k, v))], [expected, *gradients])
        assert trace.transports == ({"copies"} if ranks > 1 else set())
        assert (trace.bytes_sent > 0) == (ranks > 1)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                again = replay(q, k, v, ranks=ranks, strategy=strategy, layout=layout, **options)
                assert not again.requires_grad
                assert torch.equal(again, out)
    with torch.autocast("cpu", torch.bfloat16):
        out = replay(q, k, v, ranks=3)
        assert out.dtype == torch.bfloat16
    assert torch.equal(out, replay(q.bfloat16(), k.bfloat16(), v.bfloat16(), ranks=3))
    assert not dist.is_initialized()


def test_the_log_sum_exp_alone() -> None:
    """A loss of the log-sum-exp alone has the gradients of one device, twice if the graph is kept."""
    q, k, v = (torch.randn(1, 23, 4, 8, requires_grad=True) for _ in range(3))
    for strategy in ("ring", "ulysses"):
        both = [
            attend(q, k, v, strategy=name, return_lse=True, **ranks)[1]
            for attend, name, ranks in ((replay, strategy, {"ranks": 3}), (seqpar.attention, "local", {}))
        ]
        got, again, expected = (
            torch.autograd.grad(lse.sum(), (q, k), retain_graph=True) for lse in (both[0], both[0], both[1])
        )
        assert_close([*got], [*expected])
        assert all(map(torch.equal, got, again))


@pytest.mark.thorough(strategy=["ulysses"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_compiled_and_checkpointed(strategy: str) -> None:
    """A replay in compiled code runs uncompiled, and one that is computed again in backward has the same bits."""
    leaves = [torch.randn(1, 23, 4, 8, requires_grad=True) for _ in range(3)]

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = replay(*qkv, ranks=3, strategy=strategy)
        return out * 2

    results = []
    for function in (attend, torch.compile(attend, backend="eager"), partial(checkpoint, attend, use_reentrant=False)):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_errors() -> None:
    q = torch.randn(1, 16, 4, 8, requires_grad=True)
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "expected", {"ranks": 0}),
        (TypeError, "ranks", {"ranks": 2.0}),
        (TypeError, "one process", {"mesh": None}),
        (TypeError, "one process", {"sharding": seqpar.Sharding(16)}),
        (ValueError, "it is a layer", {"strategy": "tp_sp"}),
        (TypeError, "of the layer", {"strategy": "context_parallel", "gather": "activations"}),
        (ValueError, "within one rank", {"strategy": "local"}),
        (ValueError, "pass the seed", {"dropout_p": 0.5}),
        (ValueError, "ulysses_size=3", {"strategy": "hybrid", "ulysses_size": 3}),
        (ValueError, "layout", {"layout": "diagonal"}),
        (ValueError, "ranks", {"layout": seqpar.Assigned([[range(16)]])}),
        (TypeError, "shared_memory", {"shared_memory": 1}),
        (ValueError, "reduce-scatter", {"strategy": "context_parallel", "mask": Mask.full(), "shared_memory": False}),
    ]
    for error, message, arguments in refused:
        with pytest.raises(error, match=message):
            replay(q, q, q, **{"ranks": 4, **arguments})


def test_an_error_on_one_rank_ends_all() -> None:
    """The caller gets the first error, and the next call is right."""
    q = torch.randn(1, 16, 4, 8)
    expected, calls, attend = replay(q, q, q, ranks=3), list[int](), call.Run.attend

    def fails(run: call.Run, *args: Any) -> Any:
        calls.append(run.plan.rank)
        if len(calls) == 2:
            raise MemoryError("no memory on one rank")
        return attend(run, *args)

    with mock.patch.object(call.Run, "attend", fails), pytest.raises(MemoryError, match="no memory on one rank"):
        replay(q, q, q, ranks=3)
    assert torch.equal(replay(q, q, q, ranks=3), expected)
    crew = Crew(3, 3, True)
    with pytest.raises(RuntimeError, match="no rank sends"):
        crew.run(lambda rank: crew.receive("a message", rank) if rank else None)


REPORTED: dict[str, dict[str, Any]] = {
    "ring": {"strategy": "ring", "dropout_p": 0.2, "dropout_seed": 5},
    "ulysses": {"strategy": "ulysses", "softcap": 2.0},
    "all-gather": {"strategy": "context_parallel", "comm": "all_gather", "mask": Mask.full()},
    "invariant": {"strategy": "ring", "deterministic": "invariant"},
    "by heads": {"strategy": "ring", "mask": Mask.by_heads([Mask.full(), Mask.causal(), Mask.sliding_window(9)])},
}


@on_ranks
def reports(group: ProcessGroup, faults: bool) -> dict[str, seqpar.ReplayReport]:
    """Reports of several strategies, or of a ring in which one rank makes an error."""
    torch.manual_seed(0)
    sharding = seqpar.Sharding(37, "zigzag", group=group)
    q, k, v = (sharding.shard(torch.randn(2, 37, heads, 8)) for heads in (6, 3, 3))
    if not faults:
        options = {**REPORTED, "sinks": {"sinks": torch.randn(6), "alibi_slopes": torch.rand(6)}}
        return {name: seqpar.replay_report(q, k, v, sharding=sharding, **of_call) for name, of_call in options.items()}
    found, wait, forward, backward = {}, Transfers.wait, CpuBackend.forward, algorithms.Ring.backward
    calls = list[int]()

    def wrong_message(transfers: Any, step: Any) -> Any:
        keys, values = wait(transfers, step)
        return (keys, values) if step.index != 2 else (keys, values.nextafter(torch.tensor(9.0)))

    def wrong_kernel(*args: Any) -> Any:
        calls.append(1)
        out, lse = forward(*args)
        return (out, lse) if len(calls) != 2 else (out, lse + 1e-3)

    def wrong_return(*args: Any) -> Any:
        dq, dk, dv, dsinks = backward(*args)
        return dq, dk * 2, dv, dsinks

    for name, rank, fault in (
        ("message", 1, mock.patch.object(Transfers, "wait", wrong_message)),
        ("kernel", 2, mock.patch.object(CpuBackend, "forward", wrong_kernel)),
        ("returned", 1, mock.patch.object(algorithms.Ring, "backward", wrong_return)),
    ):
        with fault if group.rank() == rank else nullcontext():
            found[name] = seqpar.replay_report(q, k, v, sharding=sharding, strategy="ring", mask=Mask.full())
    return found


@pytest.mark.parametrize(("world", "shared_memory"), [(4, False), (3, True)])
def test_report(pool: Pool, world: int, shared_memory: bool) -> None:
    """All bits are equal, also of one rank with itself; the backward of an all-gather over gloo is not compared."""
    for of_rank in pool.run(world, reports, False, shared_memory=shared_memory):
        for name, report in of_rank.items():
            assert report.ok and not any(report.differing.values()), f"{name}: {report}"
            over_gloo = name == "all-gather" and world == 4
            assert bool(report.not_compared) == over_gloo
            assert report.errors.keys() == ({"out"} if over_gloo else {"out", "dq", "dk", "dv"})
            assert max(report.errors.values()) < 100 * report.unit
            assert name != "invariant" or not any(report.errors.values())
        assert "every bit of forward and backward on" in str(of_rank["ring"])


@on_ranks
def report_on_a_mesh(group: ProcessGroup) -> seqpar.ReplayReport:
    sharding = seqpar.Sharding(37, "zigzag", mesh=mesh_of(dp=2, ring=1, ulysses=4, tp=1))
    torch.manual_seed(group.rank() // 4)
    q, k, v = (sharding.shard(torch.randn(1, 37, 4, 8)) for _ in range(3))
    return seqpar.replay_report(q, k, v, sharding=sharding, strategy="hybrid")


def test_report_on_a_mesh(pool: Pool) -> None:
    """Of each replica, with the mesh's number of ranks in an all-to-all."""
    assert all(report.ok and len(report.threads) == 4 for report in pool.run(8, report_on_a_mesh))


def test_report_of_a_fault(pool: Pool) -> None:
    """It names the rank, the step and the tensor, and says whether a message or a kernel is wrong."""
    first, *others = pool.run(3, reports, True)
    assert all(of_rank == first for of_rank in others)
    expected = {
        "message": ("forward", 1, "v", "input", "step 2 (keys of ring rank(s) 2)", "message"),
        "kernel": ("forward", 2, "lse", "result", "step 1 (keys of ring rank(s) 1)", "kernel has read the same"),
        "returned": ("backward", 1, "dk", "returned", "", "all kernels computed the same"),
    }
    for name, (direction, rank, quantity, role, step, text) in expected.items():
        report, found = first[name], first[name].first
        assert found is not None and not report.ok
        assert (found.direction, found.rank, found.quantity, found.role) == (direction, rank, quantity, role)
        assert found.step == step and text in str(report)
    assert first["returned"].differing == {"out": (), "lse": (), "dq": (), "dk": (1,), "dv": ()}
    assert first["message"].differing["out"] == (1,)


def test_errors_of_the_report() -> None:
    q = torch.randn(1, 16, 4, 8)
    with pytest.raises(TypeError, match="sharding=None: expected"):
        seqpar.replay_report(q, q, q, sharding=None)
    with pytest.raises(ValueError, match="without dropout_seed"):
        seqpar.replay_report(q, q, q, sharding=seqpar.Sharding(16), dropout_p=0.5)
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "not an option", {"chunks": 2}),
        (TypeError, "did you mean 'softcap'", {"softcaps": 2.0}),
        (TypeError, "mask=int: expected a seqpar.Mask", {"mask": 3}),
        (ValueError, "sinks", {"sinks": torch.ones(3)}),
        (ValueError, "alibi_slopes", {"alibi_slopes": torch.ones(3)}),
    ]
    for error, message, options in refused:
        for function, where in ((replay, {"ranks": 2}), (report, {"sharding": seqpar.Sharding(16)})):
            with pytest.raises(error, match=message):
                function(q, q, q, **where, **options)
