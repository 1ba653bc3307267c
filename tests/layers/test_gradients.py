"""``sync_gradients``: the mean of the gradients over the ranks that hold a parameter."""

from __future__ import annotations

import copy
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import seqpar

from ..pool import OwnPool, Pool, mesh_of, on_ranks
from ..reference import assert_close


@on_ranks
def sync_linears(group: ProcessGroup, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Gradients on all ranks, on one rank, on none; frozen and tied parameters."""
    rank = group.rank()
    linears = {name: nn.Linear(3, 3, bias=False, dtype=dtype) for name in ("all", "one", "none", "frozen", "tied")}
    linears["tied"].weight = linears["all"].weight
    linears["frozen"].weight.requires_grad_(False)
    linears["frozen"].weight.grad = torch.full((3, 3), float(rank), dtype=dtype)
    # A running sum in bfloat16 would stay at 256: there, 1 is half of the last digit.
    linears["all"].weight.grad = torch.full((3, 3), 256.0 if rank == 0 else 1.0, dtype=dtype)
    if rank == 1:
        linears["one"].weight.grad = torch.full((3, 3), 5.0, dtype=dtype)
    with seqpar.trace() as trace:
        seqpar.sync_gradients(nn.ModuleDict(linears), group=group)
    assert trace.bytes_sent > 0
    return {name: linear.weight.grad for name, linear in linears.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_averaged_in_float32(pool: Pool, dtype: torch.dtype) -> None:
    for rank, grads in enumerate(pool.run(4, sync_linears, dtype)):
        mean = torch.tensor((256.0 + 3 * 1.0) / 4).to(dtype)
        assert grads["all"] is not None and grads["all"].dtype == dtype
        assert (grads["all"] == mean).all()
        assert grads["tied"] is not None and (grads["tied"] == mean).all()
        assert grads["one"] is not None and (grads["one"] == 5 / 4).all()
        assert grads["none"] is None
        assert grads["frozen"] is not None and (grads["frozen"] == rank).all()


@on_ranks
def ranks_looked_up(group: ProcessGroup, layers: int) -> int:
    """How often ``sync_gradients`` looks up the ranks of a group, for DTensors that are replicated over other ranks."""
    module = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(layers))
    mesh = mesh_of(dp=2, ring=4, ulysses=1, tp=1)
    for linear in module:
        weight = nn.Parameter(DTensor.from_local(torch.ones(1, 2), mesh["dp"], [Shard(0)]))
        weight.grad = DTensor.from_local(torch.ones(1, 2), mesh["dp"], [Shard(0)])
        linear.weight = weight
    with mock.patch.object(dist, "get_process_group_ranks", wraps=dist.get_process_group_ranks) as looked_up:
        seqpar.sync_gradients(module, mesh=mesh)
    return looked_up.call_count


def test_the_checks_of_many_parameters_look_up_the_ranks_once(pool: Pool) -> None:
    few, many = pool.run(8, ranks_looked_up, 1), pool.run(8, ranks_looked_up, 20)
    assert max(many) <= max(few)


@on_ranks
def sync_modules_that_differ(group: ProcessGroup, how: str) -> str:
    """The error of this rank when rank 1's module differs, or the module is unsuitable; "" for a good one."""
    odd = group.rank() == 1
    layers: list[nn.Module] = [nn.Linear(3, 4 if how == "shape" and odd else 3)]
    if how == "number" and odd:
        layers.append(nn.Linear(2, 2))
    module: nn.Module = nn.Sequential(*layers)
    layers[0](torch.ones(1, 3)).sum().backward()
    if how == "sparse":
        module = nn.Embedding(4, 2, sparse=True)
        module(torch.tensor([1])).sum().backward()
    try:
        seqpar.sync_gradients(module, group=group, reduce="sum" if how == "reduce" and odd else "mean")
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("number", "differ in number ([2, 4])"),
        ("shape", "shape or dtype"),
        ("sparse", "sparse=False"),
        ("reduce", "reduce"),
        ("", ""),
    ],
)
def test_modules_that_differ(pool: Pool, how: str, words: str) -> None:
    for message in pool.run(2, sync_modules_that_differ, how):
        assert words in message and bool(words) == bool(message)


@on_ranks
def sync_dtensors(group: ProcessGroup) -> tuple[Tensor, Tensor, list[int]]:
    """Parameters sharded over dp; their gradients are averaged over the sequence dimension of the mesh."""
    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "sequence"))
    module = nn.Linear(6, 4, bias=True)
    for name, local, placement in (("weight", torch.ones(2, 6), Shard(0)), ("bias", torch.ones(4), Replicate())):
        setattr(module, name, nn.Parameter(DTensor.from_local(local, mesh["dp"], [placement])))
    if group.rank() % 4 != 2:  # one rank of each sequence group has no gradient
        module.weight.grad = torch.ones_like(module.weight) * float(group.rank())
        module.bias.grad = torch.ones_like(module.bias)
    seqpar.sync_gradients(module, mesh=mesh["sequence"])
    assert isinstance(module.weight.grad, DTensor) and isinstance(module.bias.grad, DTensor)
    return module.weight.grad.to_local(), module.bias.grad.to_local(), list(module.weight.grad.shape)


def test_dtensor_parameters(pool: Pool) -> None:
    for rank, (weight, bias, shape) in enumerate(pool.run(8, sync_dtensors)):
        assert shape == [4, 6] and weight.shape == (2, 6)
        assert (weight == (0 + 1 + 3 if rank < 4 else 4 + 5 + 7) / 4).all()
        assert (bias == 3 / 4).all()


@on_ranks
def mixed_precision(group: ProcessGroup) -> tuple[torch.dtype, bool]:
    """``fully_shard`` casts the arguments of a layer that takes a mask and a sharding."""
    layer, policy = seqpar.ParallelAttention("ring", 32, 4, group=group), MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(layer, mesh=DeviceMesh.from_group(group, "cpu"), mp_policy=policy)
    sharding = seqpar.Sharding(24, "zigzag", group=group)
    y = layer(torch.randn(1, 12, 32), mask=seqpar.Mask.documents([0, 9, 24]), sharding=sharding)
    y.sum().backward()
    return y.dtype, all(p.grad is not None for p in layer.parameters())


def test_fully_shard_casts_beside_masks_and_shardings(pool: Pool) -> None:
    assert pool.run(2, mixed_precision) == [(torch.bfloat16, True)] * 2


@on_ranks
def sync_twice(group: ProcessGroup, how: str) -> str:
    """The error of ``sync_gradients`` beside a wrapper over the same ranks; "" if it changes nothing."""
    mesh = mesh_of(dp=1, ring=4, ulysses=1, tp=1)
    sequence = mesh["ring"].get_group()
    module: Any = nn.Linear(4, 4)
    if how.startswith("ddp"):
        module = DistributedDataParallel(module, process_group=sequence)
    if how.startswith("fsdp2"):
        fully_shard(module, mesh=mesh["ring"])
    if how.startswith("fsdp1"):
        module = FullyShardedDataParallel(module, process_group=sequence, device_id=torch.device("cpu"))
    (group.rank() * module(torch.ones(2, 4))).sum().backward()
    before = [p.grad.clone() for p in module.parameters()]
    try:
        where: Any = {"group": sequence} if "group" in how else {"mesh": mesh}
        for _ in range(2):
            seqpar.sync_gradients(module.module if "inside" in how else module, **where)
    except ValueError as error:
        return str(error)
    if how == "plain":
        assert all(bool((g == 2 * group.rank()).all()) for g in before)
        assert all(bool((p.grad == 3).all()) for p in module.parameters())
    else:
        assert all(torch.equal(g, p.grad) for g, p in zip(before, module.parameters(), strict=True))
    return ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        *(("plain", ""), ("ddp", ""), ("ddp, inside", ""), ("fsdp1", ""), ("fsdp2", "")),
        ("fsdp1, inside", "pass the wrapped module"),
        ("fsdp1, group", "its shards are on the ranks that its gradient would be averaged over"),
        ("fsdp2, group", "its shards are on the ranks that its gradient would be averaged over"),
    ],
)
def test_to_average_twice_changes_nothing(own: OwnPool, how: str, words: str) -> None:
    for error in own.pool.run(4, sync_twice, how):
        assert words in error and bool(words) == bool(error)


@on_ranks
def sums_and_averages(group: ProcessGroup) -> None:
    """A gradient that is a sum is not summed again. Averages change nothing, beside sums, clipping and hooks too."""
    ranks, rank = group.size(), group.rank()
    module = nn.Linear(3, 1, bias=False).double()
    weight: Any = module.weight
    total = torch.full((1, 3), ranks * (ranks + 1) / 2, dtype=torch.float64)

    def backward(times: int = 1) -> None:
        for _ in range(times):
            (module(torch.ones(1, 3, dtype=torch.float64)) * (rank + 1)).sum().backward()

    def sync(**options: Any) -> Tensor:
        seqpar.sync_gradients(module, group=group, **options)
        return weight.grad

    backward(2)  # micro-batches
    assert torch.equal(sync(reduce="sum"), 2 * total)
    with pytest.raises(ValueError, match="weight: its gradient has been summed over these ranks"):
        sync(reduce="sum")
    assert torch.equal(sync(), 2 * total)  # the mean of what all ranks hold alike
    for set_to_none in (False, True):  # the next steps
        module.zero_grad(set_to_none)
        backward()
        assert torch.equal(sync(reduce="sum"), total)
    # Over two dimensions of a mesh, one after the other; and over both, which have summed it already.
    dims = torch.distributed.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "ring"))
    module.zero_grad()
    backward()
    for name in ("dp", "ring"):
        seqpar.sync_gradients(module, group=dims[name].get_group(), reduce="sum")
    assert torch.equal(weight.grad, total)
    with pytest.raises(ValueError, match="has been summed over these ranks"):
        sync(reduce="sum")
    # Averaged in backward: the mean stays, and the sum of the ranks' means is the sum.
    module.zero_grad()
    with seqpar.average_in_backward(module, group=group):
        backward(2)
    expected = 2 * total / ranks
    assert_close(sync(), expected)
    norm = seqpar.clip_grad_norm_(module, 1e-3, group=group)
    assert_close(norm, expected.norm())
    clipped = weight.grad.clone()
    assert_close(sync(), clipped)
    assert_close(sync(reduce="sum"), clipped * ranks)
    # Parameters that a rank holds alone, which are equal by chance: a group of one rank says so.
    weight.data.fill_(1)
    sync().fill_(1)
    with pytest.raises(ValueError, match="equal by chance, each rank passes a group of itself alone"):
        seqpar.clip_grad_norm_(module, 1e9, group=group, ignore=[weight])
    alone = [dist.new_group([i]) for i in range(ranks)][rank]
    norm = seqpar.clip_grad_norm_(module, 1e9, group=group, ignore={weight: alone})
    assert_close(norm, torch.tensor((3.0 * ranks) ** 0.5, dtype=torch.float64))


def test_sums_and_averages(own: OwnPool) -> None:
    own.pool.run(4, sums_and_averages)


def test_one_process_has_nothing_to_average() -> None:
    module = nn.Linear(2, 2)
    module.weight.grad = torch.ones(2, 2)
    seqpar.sync_gradients(module)
    assert module.weight.grad.eq(1).all()


@on_ranks
def experts(group: ProcessGroup, seed: int) -> None:
    """Rank r holds expert r alone; an all-to-all sends each token's hidden state to its expert and back."""
    torch.manual_seed(seed)
    ranks = group.size()
    router, all_experts = nn.Linear(8, 8).double(), [nn.Linear(8, 3).double() for _ in range(ranks)]
    expert = copy.deepcopy(all_experts[group.rank()])
    model = nn.ModuleDict({"router": router, "expert": expert})
    x = torch.randn(1, ranks * ranks, 8, dtype=torch.float64)  # token i goes to expert i % ranks
    outs = [all_experts[i % ranks](router(x)[:, i]) for i in range(ranks * ranks)]
    wanted = torch.autograd.grad(
        torch.stack(outs, 1).square().mean(), [router.weight, all_experts[group.rank()].weight]
    )
    sharding = seqpar.Sharding(ranks * ranks, "contiguous", group=group)
    hidden = router(sharding.shard(x))[0].contiguous()  # [ranks, hidden], one token for each expert
    received = dist_nn.all_to_all_single(torch.empty_like(hidden), hidden, group=group)
    expert(received).square().mean().backward()  # of this expert's tokens, on this rank
    seqpar.sync_gradients(model, group=group, ignore=[expert])
    assert_close(router.weight.grad, wanted[0])
    assert expert.weight.grad is not None
    assert_close(expert.weight.grad / ranks, wanted[1])
    before = expert.weight.grad.clone()
    seqpar.sync_gradients(model, group=group, ignore=expert.parameters())
    assert torch.equal(expert.weight.grad, before)


def test_experts_that_differ_by_rank(pool: Pool) -> None:
    pool.run(3, experts, int(torch.randint(1 << 30, ())))


@on_ranks
def norms_of_held_apart(group: ProcessGroup, seed: int) -> None:
    """Plain parameters and DTensors, held by all ranks, by one rank alone, and by two ranks, on ep 2 x tp 2."""
    torch.manual_seed(seed)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    ep, tp = (mesh[name].get_local_rank() for name in ("ep", "tp"))
    full = {name: torch.randn(4, 6, dtype=torch.float64) for name in ("shared", "0", "1", "2", "3", "ep 0", "ep 1")}
    of_ep, alone = full[f"ep {ep}"], full[str(group.rank())]

    def parameter(grad: Tensor, of: DeviceMesh | None = None, *placements: Any) -> nn.Parameter:
        grad = grad.clone() if of is None else DTensor.from_local(grad.clone(), of, placements)
        p = nn.Parameter(torch.ones_like(grad))
        p.grad = grad
        return p

    module = nn.ParameterDict({"shared": parameter(full["shared"]), "alone": parameter(alone)})
    both = dist.new_group([*range(2)]), dist.new_group([2, 3])
    module["both"] = parameter(of_ep)
    rows = of_ep.chunk(2)[tp]
    module["sharded"] = parameter(rows, mesh["tp"], Shard(0))
    module["replicated"] = parameter(of_ep, mesh["tp"], Replicate())
    module["on both"] = parameter(of_ep[:1], mesh, Shard(0), Replicate())  # known from its placements
    squares = {name: float(x.square().sum()) for name, x in full.items()}
    on_both = sum(float(full[f"ep {i}"][:1].square().sum()) for i in range(2))
    expected = (
        squares["shared"] + sum(squares[str(i)] for i in range(4)) + 3 * (squares["ep 0"] + squares["ep 1"]) + on_both
    )
    held = both[ep]
    assert isinstance(held, ProcessGroup)
    with pytest.raises(TypeError, match="the ProcessGroup of the ranks that hold the same one, got NoneType"):
        seqpar.clip_grad_norm_(module, 1.0, ignore={module["alone"]: None})
    only: Any = [dist.new_group([i]) for i in range(4)][group.rank()]
    ignore = {module["both"]: held, **{module[name]: only for name in ("alone", "sharded", "replicated")}}
    norm = seqpar.clip_grad_norm_(module, 0.5, ignore=ignore)
    torch.testing.assert_close(norm, torch.tensor(expected, dtype=torch.float64).sqrt(), rtol=1e-12, atol=0)
    scale = 0.5 / (norm + 1e-6)
    torch.testing.assert_close(module["shared"].grad, full["shared"] * scale)
    torch.testing.assert_close(module["alone"].grad, alone * scale)
    torch.testing.assert_close(module["sharded"].grad.to_local(), rows * scale)


def test_the_norm_counts_what_ranks_hold_apart_once(own: OwnPool) -> None:
    own.pool.run(4, norms_of_held_apart, int(torch.randint(1 << 30, ())))


@on_ranks
def wrong_ignore(group: ProcessGroup, how: str) -> str:
    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    ignore: Any = {
        "names": ["weight"] if group.rank() else [],
        "a name": "weight",
        "no group": {module: [0, 1]},
        "no gradients": [module.bias],
        "none": [],
    }[how]
    if how == "no gradients":
        module.bias.grad = None
    try:
        norm = seqpar.clip_grad_norm_(module, 1.0, group=group, ignore=ignore)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return f"{norm:.4f}"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("names", [r"rank\(s\) \[1\]", "ignore: expected parameters and modules, got str"]),
        ("a name", ["ignore: expected parameters and modules, got str"] * 2),
        ("no group", ["ignore: expected for each"] * 2),
        ("no gradients", ["2.0000"] * 2),
        ("none", ["2.4495"] * 2),
    ],
)
def test_what_ignore_may_be(pool: Pool, how: str, words: list[str]) -> None:
    for said, expected in zip(pool.run(2, wrong_ignore, how), words, strict=True):
        assert re.search(expected, said), said


@on_ranks
def unlike_gradients(group: ProcessGroup) -> None:
    """Gradients in another dtype than the parameter, on one rank only; in two dtypes; complex ones."""
    odd = group.rank() == 1
    module = nn.ParameterList(
        [
            nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
            nn.Parameter(torch.zeros(3, dtype=torch.complex64)),
            nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        ]
    )
    module[0].grad_dtype = torch.float32
    module[2].grad_dtype = None
    module[1].grad = torch.full((3,), complex(1, group.rank()))
    module[2].grad = torch.ones(3, dtype=torch.float32 if odd else torch.bfloat16)
    if odd:
        module[0].grad = torch.full((3,), 4.0)
    seqpar.sync_gradients(module, group=group)
    grads = [p.grad for p in module]
    assert all(grad is not None for grad in grads)
    assert grads[0].dtype == torch.float32 and grads[0].eq(2).all()
    assert grads[1].eq(complex(1, 0.5)).all() and grads[2].eq(1).all()
    norm = seqpar.clip_grad_norm_(module, 1.0, group=group)
    assert_close(norm, torch.tensor((3 * 4 + 3 * 1.25 + 3 * 1) ** 0.5))


def test_gradients_of_other_dtypes(pool: Pool) -> None:
    pool.run(2, unlike_gradients)


@on_ranks
def no_gradient(group: ProcessGroup) -> str:
    module = nn.Linear(2, 2)
    seqpar.sync_gradients(nn.Linear(2, 2).requires_grad_(False), group=group)  # nothing is trained
    try:
        seqpar.sync_gradients(module, group=group)
    except ValueError as error:
        return str(error)
    return ""


def test_no_gradient_at_all(pool: Pool) -> None:
    assert all("no parameter has a gradient on any rank" in message for message in pool.run(2, no_gradient))


@on_ranks
def other_dimensions(group: ProcessGroup) -> str:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ring"))
    module = nn.Linear(2, 2)
    module.weight.grad = torch.full((2, 2), float(group.rank()))
    module.bias.grad = torch.zeros(2)
    seqpar.sync_gradients(module, mesh=mesh["ring"])
    assert module.weight.grad.eq(0.5 if group.rank() < 2 else 2.5).all()
    try:
        seqpar.sync_gradients(module, mesh=mesh)
    except ValueError as error:
        return str(error)
    return ""


def test_a_mesh_with_pipeline_stages_is_refused(own: OwnPool) -> None:
    assert all("pass the part of the mesh whose ranks do" in x for x in own.pool.run(4, other_dimensions))
