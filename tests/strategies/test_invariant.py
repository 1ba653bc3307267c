"""``deterministic="invariant"``: the same bits for any number of ranks, whatever is packed beside a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Mask
from seqpar.kernels import document_tiles as kernels
from seqpar.schedule import document_tiles as schedule
from seqpar.strategies import invariant, row_exchange

from ..core.test_hosts import simulated
from ..pool import Pool, mesh_of, on_ranks
from ..problems import BATCH_RULES, HEAD_RULES, RULES, Problem, heads_for, solve
from ..reference import assert_close, fitted, rows_of
from ..strategy_cases import LAYOUTS, STRATEGIES, layout_of
from .test_attention import attention

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
OPTIONS: dict[str, Any] = {"deterministic": "invariant", "return_lse": True}
MASKS = (*RULES, *BATCH_RULES, *HEAD_RULES)


@contextmanager
def tiles_of(rows: int) -> Iterator[None]:
    """Tiles of so few rows that a short sequence has several."""
    with ExitStack() as stack:
        for module in (schedule, kernels):
            stack.enter_context(mock.patch.object(module, "TILE", rows))
        yield


def differentiate(attend: Any, problem: Problem, **options: Any) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of the whole sequence."""
    tensors = problem.tensors()
    leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
    of_call: dict[str, Any] = {name: tensors[name] for name in ("alibi_slopes", "sinks") if name in tensors}
    names = ["dq", "dk", "dv"]
    if problem.sinks:
        leaves.append(of_call["sinks"].requires_grad_())
        names.append("dsinks")
    out, lse = attend(*leaves[:3], **{**problem.arguments(), **of_call, **options, **OPTIONS})
    outputs, gradients = [out], [tensors["dout"]]
    if problem.lse_gradient:
        outputs, gradients = [out, lse], [*gradients, tensors["dlse"]]
    found = torch.autograd.grad(outputs, leaves, gradients)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, found, strict=True))}


def different(results: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that differ in a bit."""

    def bits(x: Tensor) -> Tensor:
        return x.contiguous().view(INTEGERS[x.element_size()])

    return [name for name, x in results.items() if not torch.equal(bits(x), bits(expected[name]))]


def on_one_device(problem: Problem) -> dict[str, Tensor]:
    """The results of one rank, compared with dense attention in float64."""
    results = differentiate(seqpar.attention, problem, strategy="local")
    for name, x in results.items():
        assert_close(x, solve(problem)[name], problem.dtype, name, solve(problem, torch.float32)[name])
    return results


def check_all_ranks(problems: Sequence[Problem], counts: Sequence[int], turn: int = 0) -> None:
    """Every number of ranks has the bits of one rank. The strategies and layouts take turns."""
    turns = islice(cycle(product(STRATEGIES.values(), LAYOUTS)), turn, None)
    wrong = []
    for problem in problems:
        expected = on_one_device(problem)
        for ranks in counts:
            strategy, layout = next(turns)
            where = {**strategy, "ranks": ranks, "layout": layout_of(layout, problem.seq_len, ranks)}
            found = differentiate(seqpar.replay, problem, **where)
            if problem.sinks:  # a sum of the ranks' parts
                assert_close(found.pop("dsinks"), expected["dsinks"])
            if names := different(found, expected):
                wrong.append(f"{problem}, {where}: {names} differ")
    assert not wrong, "\n".join(wrong)


def test_any_number_of_ranks() -> None:
    """Every mask, feature, number of heads and dtype, in tiles of 16 rows; then tiles as they are."""
    problems = [Problem((53, 96, 31)[i % 3], rows_of(rules), rules=rules) for i, rules in enumerate(MASKS)]
    problems += [
        Problem(70, 2, **feature)
        for feature in (
            {"softcap": 1.5, "v_head_dim": 12},
            {"alibi": "heads"},
            {"softmax_scale": 0.3, "lse_gradient": True, "sinks": True},
        )
    ]
    dtypes = torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float16
    for i, problem in enumerate(problems):
        heads, kv_heads = heads_for(problem.rules, i)
        problems[i] = replace(problem, heads=heads, kv_heads=kv_heads, dtype=dtypes[i % len(dtypes)])
    with tiles_of(16):
        for i, problem in enumerate(problems):
            check_all_ranks([problem], [(8, 2, 3, 4, 8, 1)[i % 6]], turn=i)
    check_all_ranks([Problem(300, 2, 4, 2, 24, dtype=dtype) for dtype in dtypes[:2]], (2, 3, 8))


@pytest.mark.thorough
def test_every_strategy_and_layout() -> None:
    """All of their combinations, with documents and tiles of 128 rows."""
    problem = Problem(200, 1, 4, 2, 64, rules=fitted(RULES[6], 200))
    dtypes = torch.float32, torch.bfloat16
    check_all_ranks([replace(problem, seed=i, dtype=dtypes[i % 2]) for i in range(10)], (2, 3, 4, 8))


def test_whatever_is_packed_beside_a_document() -> None:
    """A document has the bits that it has alone: at any place, in any batch row, on any number of ranks."""
    torch.manual_seed(0)
    lengths = 200, 77, 130
    for dtype in (torch.float32, torch.bfloat16):
        documents = [torch.randn(4, 1, length, 4, 16).to(dtype) for length in lengths]

        def attend(x: Tensor, mask: Mask, **where: Any) -> Tensor:
            q, k, v = (y.clone().requires_grad_() for y in (x[0], x[1, :, :, :2], x[2, :, :, :2]))
            if where:
                out = seqpar.replay(q, k, v, mask=mask, deterministic="invariant", **where)
            else:
                out = seqpar.attention(q, k, v, mask=mask, strategy="local", deterministic="invariant")
            return torch.cat([out.detach(), *torch.autograd.grad(out, (q, k, v), x[3])], 2)

        alone = [attend(x, Mask.causal()) for x in documents]
        packed = torch.cat([torch.cat([documents[i] for i in order], 2) for order in ((0, 1, 2), (2, 0, 1))], 1)
        mask = Mask.documents([[0, 200, 277, 407], [0, 130, 330, 407]])
        expected = torch.cat([torch.cat([alone[i] for i in order], 1) for order in ((0, 1, 2), (2, 0, 1))])
        assert torch.equal(attend(packed, mask), expected)
        assert torch.equal(attend(packed, mask, ranks=3, layout="zigzag", strategy="ulysses"), expected)


def test_branches_beside_others() -> None:
    """A tree, connected ranges and a document have the bits that they have alone, with any trees beside them."""
    torch.manual_seed(0)
    parents, lengths = [[-1, 0, 0, 2, 2], [-1], [-1, 0, 1, 1, 0]], [[40, 30, 21, 9, 20], [70], [9, 60, 33, 5, 14]]
    of_ranges = (
        [(0, 90, 30, 70, "full"), (50, 120, 0, 60, "causal")],
        [(0, 70, 0, 70, "causal")],
        [(0, 50, 0, 50, "bi_causal"), (40, 121, 0, 81, "full")],
    )

    def trees(order: Sequence[int]) -> Mask:
        first = [sum(len(parents[i]) for i in order[:at]) for at in range(len(order))]
        moved = [x if x < 0 else x + at for i, at in zip(order, first, strict=True) for x in parents[i]]
        return Mask.tree(moved, [n for i in order for n in lengths[i]])

    def ranges(order: Sequence[int]) -> Mask:
        at = [sum(sum(lengths[i]) for i in order[:n]) for n in range(len(order))]
        moved = [
            ((a + x, b + x), (c + x, d + x), kind)
            for i, x in zip(order, at, strict=True)
            for a, b, c, d, kind in of_ranges[i]
        ]
        return Mask.ranges(*zip(*moved, strict=True))

    def of_heads(order: Sequence[int]) -> Mask:
        return Mask.by_heads([trees(order), trees(order) & Mask.sliding_window(25)])

    assert trees((0, 1, 2)).cuts == ((0, 120, 190, 311),) and ranges((0, 1)).cuts == ((0, 120, 190),)
    assert (trees((0, 1, 2)) | Mask.global_tokens(2)).cuts == ((0,),)
    inputs = [torch.randn(4, 1, sum(of_one), 4, 16) for of_one in lengths]
    for mask, dtype in product((trees, ranges, of_heads), (torch.float32, torch.bfloat16)):

        def attend(x: Tensor, seen: Mask, **where: Any) -> Tensor:
            q, k, v = (y.clone().requires_grad_() for y in (x[0], x[1, :, :, :2], x[2, :, :, :2]))
            out = seqpar.replay(q, k, v, mask=seen, deterministic="invariant", **where)
            return torch.cat([out.detach(), *torch.autograd.grad(out, (q, k, v), x[3])], 2)

        with tiles_of(16):
            alone = [attend(x.to(dtype), mask((i,)), ranks=1) for i, x in enumerate(inputs)]
            if mask is trees:  # a document under a mask without branches is a tree of one segment
                assert torch.equal(alone[1], attend(inputs[1].to(dtype), Mask.causal(), ranks=1))
            for order, ranks, layout in (
                ((0, 1, 2), 1, "zigzag"),
                ((2, 0, 1), 3, "striped"),
                ((1, 2), 8, "contiguous"),
            ):
                packed = torch.cat([inputs[i] for i in order], 2).to(dtype)
                expected = torch.cat([alone[i] for i in order], 1)
                assert torch.equal(attend(packed, mask(order), ranks=ranks, layout=layout), expected), (mask, order)


def test_messages_are_sent_while_kernels_run() -> None:
    """Only the K/V of the first half of the heads arrive before a kernel runs; the others are sent ahead of it."""
    events: list[str] = []
    start, forward = row_exchange.start_fetch, kernels._TorchTiles.forward
    query_gradients, key_gradients = kernels._TorchTiles.query_gradients, kernels._TorchTiles.key_gradients

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            events.append(name)
            return function(*args)

        return call

    def started(*args: Any) -> Any:
        events.append("start")
        return noted("arrived", start(*args))

    leaves = [torch.randn(1, 40, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    with (
        mock.patch.object(invariant, "start_fetch", started),
        mock.patch.object(kernels._TorchTiles, "forward", noted("out", forward)),
        mock.patch.object(kernels._TorchTiles, "query_gradients", noted("dq", query_gradients)),
        mock.patch.object(kernels._TorchTiles, "key_gradients", noted("dk", key_gradients)),
    ):
        out = seqpar.replay(*leaves, ranks=1, deterministic="invariant")
        assert events == ["start", "start", "arrived", "out", "arrived", "out"]
        events.clear()
        out.sum().backward()
    queries = ["start"] * 2  # q with dout, and lse with delta
    first = ["start", *queries, "arrived", "dq", "start", "arrived", "arrived", "dk"]
    assert events == [*first, *queries, "arrived", "dq", "arrived", "arrived", "dk"]


@on_ranks
def attend_on_ranks(group: ProcessGroup) -> list[tuple[str, list[str]]]:
    """For each case, the tensors of this rank that differ in a bit from one device's."""
    found = []
    tree = Mask.tree([-1, 0, 0, -1, 3], [90, 60, 51, 80, 20])
    masks = Mask.documents([[0, 40, 301], [0, 200, 290]], padding=True), tree, Mask.by_heads([tree, Mask.causal()])
    problem = Problem(301, 2, 4, 2, 16)
    for (name, options), layout, dtype, mask in zip(
        STRATEGIES.items(), LAYOUTS * 2, (torch.float32, torch.bfloat16) * 4, masks * 3, strict=False
    ):
        tensors = replace(problem, dtype=dtype).tensors()
        leaves = [tensors[x].requires_grad_() for x in "qkv"]
        out, lse = attention(*leaves, mask=mask, strategy="local", **OPTIONS)
        expected = [out, *torch.autograd.grad(out, leaves, tensors["dout"])]
        sharding = seqpar.Sharding(301, layout_of(layout, 301, group.size()), group=group)
        local = [sharding.shard(x).detach().requires_grad_() for x in leaves]
        where: dict[str, Any] = {**options, "mask": mask, "sharding": sharding}
        for compiled in (False, True):
            attend = torch.compile(attention, backend="aot_eager") if compiled else attention
            if compiled and name != "hybrid":
                continue
            mine, mine_lse = attend(*local, **where, **OPTIONS)
            got = [mine, *torch.autograd.grad(mine, local, sharding.shard(tensors["dout"]))]
            results = dict(zip(("out", "dq", "dk", "dv"), got, strict=True), lse=mine_lse.mT)
            of_one = dict(zip(("out", "dq", "dk", "dv"), expected, strict=True), lse=lse.mT)
            found.append((f"{name} {layout}", different(results, {x: sharding.shard(y) for x, y in of_one.items()})))
    return found


@pytest.mark.thorough(world=[2])
@pytest.mark.parametrize(("world", "shared_memory"), [(2, True), (3, False)])
def test_real_ranks(pool: Pool, world: int, shared_memory: bool) -> None:
    for of_rank in pool.run(world, attend_on_ranks, shared_memory=shared_memory):
        assert len(of_rank) == len(STRATEGIES) + 1
        assert not [case for case in of_rank if case[1]]


@on_ranks
def attend_under_tensor_parallelism(
    group: ProcessGroup, degrees: Sequence[int], mask: Mask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> dict[str, Tensor]:
    """out, dq, dk and dv of all tokens by a layer whose projections are exact.

    A token of its input is q, k and v one after another, and a token of its result is out and zeros.
    """
    mesh, sizes, dtype = mesh_of(*degrees), [x.shape[2] * x.shape[3] for x in (q, k, v)], q.dtype
    x, one = torch.cat([y.flatten(2) for y in (q, k, v)], 2), torch.eye(sum(sizes), dtype=dtype)
    where: dict[str, Any] = {"mesh": mesh, "layout": "zigzag", "dtype": dtype}
    layer = seqpar.ParallelAttention(
        "tp_sp", x.shape[2], q.shape[2], k.shape[2], q.shape[3], **where, deterministic="invariant"
    )
    weights = dict(zip(("q_proj", "k_proj", "v_proj"), one.split(sizes), strict=True), o_proj=one[:, : sizes[0]])
    for name, weight in weights.items():
        p = getattr(layer, name).weight
        p.data.copy_(distribute_tensor(weight, p.device_mesh, p.placements) if isinstance(p, DTensor) else weight)
    sharding = seqpar.Sharding(x.shape[1], "zigzag", mesh=mesh, strategy="tp_sp")
    mine = sharding.shard(x).requires_grad_()
    y = layer(mine, mask, sharding)
    zeros = dout.new_zeros(*x.shape[:2], sum(sizes[1:]))
    (dx,) = torch.autograd.grad(y, mine, sharding.shard(torch.cat([dout.flatten(2), zeros], 2)))
    found = [sharding.unshard(y.detach())[:, :, : sizes[0]], *sharding.unshard(dx).split(sizes, 2)]
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))


@pytest.mark.thorough(tp=[1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_beside_tensor_parallel_ones(pool: Pool, tp: int) -> None:
    """With as many tensor-parallel ranks, every number of ring and Ulysses ranks has the same bits."""
    documents, tree = Mask.documents([0, 40, 301]), Mask.tree([-1, 0, 0, -1, 3], [90, 60, 51, 80, 20])
    for dtype, mask in ((torch.float32, documents), (torch.bfloat16, Mask.by_heads([tree, Mask.causal()]))):
        problem = Problem(301, 1, 8, 4, 16, dtype=dtype)
        tensors = problem.tensors()
        q, k, v = (tensors[x].detach().requires_grad_() for x in "qkv")
        out = seqpar.attention(q, k, v, mask=mask, strategy="local")
        expected = [out, *torch.autograd.grad(out, (q, k, v), tensors["dout"])]
        inputs = [x.detach() for x in (q, k, v, tensors["dout"])]
        degrees = [
            (8 // tp // ring // ulysses, ring, ulysses, tp) for ring, ulysses in ((1, 1), (2, 1), (1, 2), (4, 2))
        ]
        first, *others = (pool.run(8, attend_under_tensor_parallelism, x, mask, *inputs)[0] for x in degrees if x[0])
        for name, x in zip(first, expected, strict=True):
            assert_close(first[name], x.flatten(2), dtype, name)
        assert not any(different(found, first) for found in others)


def test_values_that_are_not_finite() -> None:
    """They reach the tokens that see them or that they see, and change no bit of the others."""
    for name, value in product("qkv", (torch.nan, torch.inf)):
        problem = Problem(300, 1, 4, 2, 16)
        expected = differentiate(seqpar.attention, problem, strategy="local")
        tensors = problem.tensors()
        tensors[name][0, 140, 0, 3] = value
        with mock.patch.object(Problem, "tensors", return_value=tensors):
            results = [
                differentiate(seqpar.attention, problem, strategy="local"),
                differentiate(seqpar.replay, problem, ranks=3, layout="striped"),
            ]
        for found in results:
            before = {
                x: y[:, :, :140] if x == "lse" else y[:, :140] for x, y in found.items() if x in ("out", "lse", "dq")
            }
            of_one = {x: expected[x][:, :, :140] if x == "lse" else expected[x][:, :140] for x in before}
            assert not different(before, of_one), name  # causal: they do not see token 140
            after = {x: found[x][:, 141:, 1:] for x in ("dk", "dv")}
            assert not different(after, {x: expected[x][:, 141:, 1:] for x in after}), name  # of the other KV head
            assert value == torch.inf or not found["out"][0, 140, 0].isfinite().all()
        names = [x for x in results[0] if not torch.equal(*(y[x].nan_to_num(7.0, 8.0, 9.0) for y in results))]
        assert not names, f"{name}: {names} differ between one and three ranks"


def test_few_tokens_and_other_modes() -> None:
    """Ranks without tokens, no tokens, no batch rows, autocast, a gradient of lse alone, and a checkpoint."""
    for batch, tokens, ranks in ((2, 3, 8), (2, 0, 2), (0, 5, 2)):
        leaves = [torch.randn(batch, tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        outs = attention(*leaves, strategy="local", **OPTIONS), seqpar.replay(*leaves, ranks=ranks, **OPTIONS)
        for i, x in ((0, "out"), (1, "lse")):
            of_one, of_all = (
                [out[i], *torch.autograd.grad(out[i].sum(), leaves, allow_unused=True, retain_graph=True)]
                for out in outs
            )
            assert all(map(torch.equal, of_one[:3], of_all[:3])), (batch, tokens, x)
    leaves = [torch.randn(1, 40, heads, 8, requires_grad=True) for heads in (4, 2, 2)]

    def attend(*qkv: Tensor) -> Tensor:
        return seqpar.replay(*qkv, ranks=3, deterministic="invariant") * 2

    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    again = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False).sum(), leaves)
    assert all(map(torch.equal, again, expected))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(attend(*leaves), attention(*leaves, strategy="local", **OPTIONS)[0] * 2)


@on_ranks
def attend_after_an_error(group: ProcessGroup) -> bool:
    """A kernel raises on rank 1, in forward and then in backward, and all ranks attend again."""
    torch.manual_seed(0)
    sharding = seqpar.Sharding(300, "zigzag", group=group)
    whole = [torch.randn(1, 300, heads, 8) for heads in (4, 2, 2)]
    leaves = [sharding.shard(x).requires_grad_() for x in whole]
    of_call: dict[str, Any] = {"sharding": sharding, "deterministic": "invariant"}
    for method in ("forward", "query_gradients"):
        error = MemoryError("no memory on one rank")
        fails = mock.patch.object(kernels._TorchTiles, method, side_effect=error)
        with fails if group.rank() == 1 else nullcontext(), suppress(MemoryError):
            out = seqpar.attention(*leaves, **of_call)
            if method != "forward":
                out.sum().backward()
    out = seqpar.attention(*leaves, **of_call)
    expected = seqpar.attention(*whole, strategy="local", deterministic="invariant")
    return torch.equal(out, sharding.shard(expected))


def test_a_kernel_that_raises(pool: Pool) -> None:
    assert pool.run(2, attend_after_an_error) == [True, True]


@on_ranks
def of_one_rank_only(group: ProcessGroup) -> list[str]:
    """The errors of attention and of a layer, with and without a sharding, if only rank 1 wants invariant bits."""
    deterministic: Any = "invariant" if group.rank() else True
    sharding, found = seqpar.Sharding(40, "zigzag", group=group), []
    q, x = torch.randn(1, 20, 4, 8), torch.randn(1, 20, 32)
    layer = seqpar.UlyssesAttention(32, 4, group=group, layout="zigzag", deterministic=deterministic)
    of_call: dict[str, Any] = {"strategy": "ulysses", "deterministic": deterministic}
    calls: list[Callable[[], Any]] = [
        lambda: seqpar.attention(q, q, q, sharding=sharding, **of_call),
        lambda: seqpar.attention(q, q, q, group=group, layout="zigzag", **of_call),
        lambda: layer(x, sharding=sharding),
        lambda: layer(x),
    ]
    for call in calls:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    return found


def test_ranks_that_differ(pool: Pool) -> None:
    for found in pool.run(2, of_one_rank_only):
        assert [words in error for words, error in zip(("another call", "group differ") * 2, found, strict=True)] == [
            True
        ] * 4


def test_bytes() -> None:
    """Forward sends K/V, backward sends them again, and q and dout with two float32 numbers of each head."""
    ranks, tokens, heads, kv_heads, dim, v_dim = 4, 512, 6, 2, 8, 12
    q, k, v = (
        torch.randn(1, tokens, *shape).bfloat16().requires_grad_()
        for shape in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim))
    )
    with seqpar.trace() as forward:
        out = seqpar.replay(q, k, v, ranks=ranks, strategy="hybrid", mask=Mask.full(), deterministic="invariant")
    with seqpar.trace() as backward:
        out.sum().backward()
    kv = (ranks - 1) * tokens * kv_heads * (dim + v_dim) * 2  # of all ranks
    assert forward.bytes_sent == kv
    assert backward.bytes_sent == kv + (ranks - 1) * tokens * heads * ((dim + v_dim) * 2 + 2 * 4)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, refused = simulated(3, 0, 8, monkeypatch), pytest.raises(ValueError, match="by the 3 tp ranks")
    with ranks as group, refused:
        seqpar.ParallelAttention("tp_sp", 48, 6, 2, group=group, deterministic="invariant")
    q = torch.randn(1, 20, 4, 8)
    weight = torch.randn(4, 12, 8)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("dropped", {"dropout_p": 0.1, "dropout_seed": 1}),
        ("batch row", {"alibi_slopes": torch.ones(1, 4)}),
    ]
    for message, options in cases:
        for attend, where in ((seqpar.attention, {"strategy": "local"}), (seqpar.replay, {"ranks": 2})):
            with pytest.raises(ValueError, match=f"deterministic='invariant'.*{message}"):
                attend(q, q, q, **options, **where, deterministic="invariant")
    latents = torch.randn(1, 20, 1, 8), torch.randn(1, 20, 1, 4)
    with pytest.raises(ValueError, match="latent_weight"):
        seqpar.attention(q, *latents, latent_weight=weight, strategy="local", deterministic="invariant")
    layer, cache = seqpar.LocalAttention(32, 4, deterministic="invariant"), seqpar.KeyValueCache(seqpar.Sharding(3))
    with torch.no_grad():
        layer(torch.randn(1, 3, 32), cache=cache)
        with pytest.raises(ValueError, match="with a cache"):
            layer(torch.randn(1, 1, 32), cache=cache)
    for wrong in ("yes", 1, None):
        with pytest.raises(TypeError, match="True, False or 'invariant'"):
            seqpar.attention(q, q, q, strategy="local", deterministic=wrong)
        with pytest.raises(TypeError, match="True, False or 'invariant'"):
            seqpar.RingAttention(32, 4, deterministic=wrong)
