"""Tensor-parallel layers on sequence shards, compared with the same layers on one device in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Mask

from ..cases import Batch
from ..models import HIDDEN, MASK, Transformer, attention_layer, full, random_tokens, randomize
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close
from ..strategy_cases import LAYOUTS, layout_of


@dataclass(frozen=True)
class Case:
    """An attention layer with (heads, kv_heads). With ``alibi`` each head has its own slope."""

    heads: tuple[int, int]
    layout: str = "zigzag"
    overlap: str = "ring"
    alibi: bool = False

    def __str__(self) -> str:
        return f"heads={self.heads[0]}/{self.heads[1]} {self.layout} overlap={self.overlap}" + " alibi" * self.alibi


# Heads that tp divides, grouped heads, fewer kv_heads than ranks, heads that tp does not divide, fewer than ranks.
CASES = [
    Case((8, 8), "contiguous", "ring"),
    Case((8, 8), "contiguous", "none"),
    Case((8, 2), "zigzag", "ring"),
    Case((8, 2), "zigzag", "none"),
    Case((6, 3), "striped", "ring"),
    Case((6, 3), "striped", "none"),
    Case((6, 2), "contiguous", "ring"),
    Case((6, 2), "contiguous", "none"),
    Case((3, 1), "zigzag", "ring"),
    Case((3, 1), "zigzag", "none"),
    Case((8, 4), "zigzag", "ring", alibi=True),
    Case((6, 2), "striped", "ring", alibi=True),
    Case((3, 3), "contiguous", "ring", alibi=True),
    Case((6, 3), "assigned", "ring"),
    Case((6, 3), "assigned", "none"),
]
assert {case.layout for case in CASES} == set(LAYOUTS)
# Fewer than 4 ranks have some of the cases, with every layout and both values of ``overlap``.
CASES_OF_WORLD = {1: CASES[1::3], 2: CASES[1::2], 3: CASES[::2], 4: CASES}
OVERLAPPED = [case for case in CASES if case.overlap == "ring"]


def check_gradients(parallel: nn.Module, local: nn.Module) -> None:
    """Compare the gradients of ``parallel``, DTensors where its weights are, with the gradients of ``local``."""
    expected = dict(local.named_parameters())
    for name, p in parallel.named_parameters():
        assert p.grad is not None, name
        assert_close(full(p.grad), expected[name].grad, torch.float64, name)


def check_state(parallel: nn.Module, local: nn.Module) -> None:
    """The state dict of ``parallel`` holds the full weights of ``local``."""
    expected = local.state_dict()
    for name, value in parallel.state_dict().items():
        assert torch.equal(full(value), expected[name]), name


def compare_with_local(case: Case, seq_len: int, **where: Any) -> None:
    """Output, gradients and state dict of a tensor-parallel layer against the local layer with the same weights."""
    constants: dict[str, Any] = {}
    if case.alibi:
        constants = {"softmax_scale": 0.7, "alibi_slopes": torch.rand(case.heads[0]), "deterministic": True}
    local = attention_layer(case.heads, **constants)
    randomize(local)
    ranks = seqpar.Sharding(0, mesh=where.get("mesh"), group=where.get("group"), strategy="tp_sp").ranks
    layout = layout_of(case.layout, seq_len, ranks)
    parallel = attention_layer(case.heads, "tp_sp", layout=layout, overlap=case.overlap, **constants, **where)
    parallel.load_state_dict(local.state_dict())
    x, dy = torch.randn(2, 2, seq_len, HIDDEN, dtype=torch.float64).unbind()  # [b, s, hidden]
    mask = MASK & Mask.documents([0, seq_len // 3, seq_len - 1], padding=True)
    if case.overlap == "none" or case.alibi:  # a mask for each half of the heads, or for each KV head
        groups = 2 if case.heads[1] % 2 == 0 else case.heads[1]
        mask = Mask.by_heads([mask, *(mask & Mask.sliding_window(9 + 7 * i) for i in range(1, groups))])
    x.requires_grad_()
    y = local(x, mask=mask)
    y.backward(dy)
    sharded: dict[str, Any] = {"layout": layout, "strategy": "tp_sp", **where}
    x_local = seqpar.shard(x.detach(), **sharded).requires_grad_()
    y_local = parallel(x_local, mask=mask)
    y_local.backward(ranks * seqpar.shard(dy, **sharded))  # the mean over the ranks is the mean over all tokens
    seqpar.sync_gradients(parallel, **where)
    assert x.grad is not None and x_local.grad is not None
    assert_close(seqpar.unshard(y_local.detach(), **sharded), y.detach(), torch.float64, "output")
    assert_close(seqpar.unshard(x_local.grad / ranks, **sharded), x.grad, torch.float64, "input gradient")
    check_gradients(parallel, local)
    check_state(parallel, local)


@on_ranks
def attention_on_group(group: ProcessGroup, case: Case) -> None:
    compare_with_local(case, 61, group=group)


def no_results(case: Case, by_rank: list[None]) -> None:
    """The ranks compare: nothing is left to verify."""


@pytest.mark.thorough(world=[3, 4])
@pytest.mark.parametrize("world", [1, 2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))])
def test_attention_equals_one_device(batch: Batch, world: int) -> None:
    batch.check(world, attention_on_group, CASES_OF_WORLD[world], no_results)


@on_ranks
def attention_on_mesh_of_one_dimension(group: ProcessGroup) -> None:
    compare_with_local(CASES[0], 61, mesh=DeviceMesh.from_group(group, "cpu"))


def test_a_mesh_of_one_dimension(pool: Pool) -> None:
    pool.run(2, attention_on_mesh_of_one_dimension)


@on_ranks
def attention_on_mesh(group: ProcessGroup, case: Case, sizes: tuple[int, int, int, int]) -> None:
    compare_with_local(case, 67, mesh=mesh_of(*sizes))


@pytest.mark.slow
@pytest.mark.thorough(sizes=[(1, 2, 1, 4), (1, 1, 4, 2), (2, 2, 1, 2), (1, 1, 2, 4)])
@pytest.mark.parametrize(
    ("sizes", "cases"),  # dp, ring, ulysses and tp; on (1, 1, 2, 4), heads=3 leaves a rank of tp without heads
    [
        ((1, 2, 2, 2), OVERLAPPED[::4]),
        ((1, 2, 1, 4), OVERLAPPED[1::4]),
        ((1, 1, 4, 2), OVERLAPPED[2::4]),
        ((2, 2, 1, 2), OVERLAPPED[3::4]),
        ((1, 1, 2, 4), OVERLAPPED[1::3]),
    ],
    ids=lambda x: str(x) if isinstance(x[0], int) else "",
)
def test_composition_equals_one_device(batch: Batch, sizes: tuple[int, int, int, int], cases: list[Case]) -> None:
    batch.check(8, attention_on_mesh, cases, no_results, sizes)


@on_ranks
def attention_with_context(group: ProcessGroup, sizes: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    mesh = mesh_of(*sizes)
    layer = attention_layer((8, 2), "tp_sp", mesh=mesh, layout="contiguous", **options)
    assert isinstance(layer, seqpar.MegatronAttention) and layer.context == options["context"]
    y = layer(
        seqpar.shard(torch.ones(1, 16, HIDDEN, dtype=torch.float64), mesh=mesh, layout="contiguous", strategy="tp_sp")
    )
    assert y.shape == (1, 2, HIDDEN)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 2, 2, 2), {"context": "context_parallel", "comm": "all_gather"}),
        ((1, 1, 4, 2), {"context": "ulysses"}),
    ],
    ids=["context_parallel", "ulysses"],
)
def test_context_is_an_option(pool: Pool, sizes: tuple[int, int, int, int], options: dict[str, Any]) -> None:
    pool.run(8, attention_with_context, sizes, options)


@on_ranks
def attention_over_tp_alone(group: ProcessGroup, options: dict[str, Any]) -> None:
    mesh = mesh_of(2, 1, 1, 4)
    local, parallel = attention_layer((8, 2)), attention_layer((8, 2), "tp_sp", mesh=mesh, **options)
    parallel.load_state_dict(local.state_dict())
    x = torch.randn(2, 21, HIDDEN, dtype=torch.float64)
    sharding = seqpar.Sharding(21, "zigzag", mesh=mesh, strategy="tp_sp")
    layers = [parallel]
    if options["context"] == "ring":  # compiled, which one rank is, it is the same for every context
        compiled = torch.compile(parallel, backend="eager", fullgraph=True)
        layers.append(parallel if group.rank() else compiled)
    for layer in layers:
        assert_close(layer(sharding.shard(x), sharding=sharding), sharding.shard(local(x)), torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"context": name} for name in ("ring", "ulysses", "hybrid")] + [{"context": "context_parallel", "comm": "p2p"}],
    ids=str,
)
def test_context_of_one_rank(pool: Pool, options: dict[str, Any]) -> None:
    """On a mesh without ring and ulysses ranks every context is the same as none."""
    pool.run(8, attention_over_tp_alone, options)


@on_ranks
def transformer_on_group(group: ProcessGroup, activation: str, overlap: str) -> None:
    local = Transformer(activation=activation)
    randomize(local)
    parallel = Transformer("tp_sp", activation, overlap, group=group)
    parallel.load_state_dict(local.state_dict())
    ids, labels = random_tokens(45)
    loss = local(ids, labels)
    loss.backward()
    loss_parallel = parallel(
        seqpar.shard(ids, group=group, layout="contiguous"), seqpar.shard(labels, group=group, layout="contiguous")
    )
    loss_parallel.backward()
    seqpar.sync_gradients(parallel, group=group)
    assert_close(loss_parallel.detach(), loss.detach(), torch.float64, "loss")
    check_gradients(parallel, local)


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize(("activation", "overlap"), [("swiglu", "ring"), ("gelu", "none")])
def test_transformer_equals_one_device(pool: Pool, activation: str, overlap: str, world: int) -> None:
    pool.run(world, transformer_on_group, activation, overlap)


@on_ranks
def transformer_with_new_parameters(group: ProcessGroup, how: str) -> None:
    """The parameters of the parallel model are replaced after its construction."""
    local = Transformer()
    randomize(local)
    with torch.device("meta" if how == "to_empty" else "cpu"):
        parallel = Transformer("tp_sp", group=group)
    if how == "copy":
        for name, child in list(parallel.named_children()):
            setattr(parallel, name, copy.deepcopy(child))
    if how == "to_empty":
        parallel.to_empty(device="cpu")
    parallel.load_state_dict(copy.deepcopy(local.state_dict()), assign=how == "assign")
    ids, labels = random_tokens(45)
    local(ids, labels).backward()
    parallel(
        seqpar.shard(ids, group=group, layout="contiguous"), seqpar.shard(labels, group=group, layout="contiguous")
    ).backward()
    seqpar.sync_gradients(parallel, group=group)
    check_gradients(parallel, local)


@pytest.mark.parametrize("how", ["copy", "to_empty", "assign"])
def test_parameters_may_be_replaced(pool: Pool, how: str) -> None:
    pool.run(4, transformer_with_new_parameters, how)


@on_ranks
def fully_sharded(group: ProcessGroup, heads: tuple[int, int], path: str) -> None:
    """FSDP2 over dp around a tensor-parallel layer: gradients, and saving and loading a checkpoint."""
    mesh = mesh_of(2, 2, 1, 2)
    local = attention_layer(heads)
    randomize(local)
    parallel = attention_layer(heads, "tp_sp", mesh=mesh, layout="zigzag")
    parallel.load_state_dict(local.state_dict())
    fully_shard(parallel, mesh=mesh["dp"])
    x = torch.randn(2, 1, 67, HIDDEN, dtype=torch.float64)  # [dp, b, s, hidden]
    x_local = seqpar.shard(x[mesh.get_local_rank("dp")], mesh=mesh, layout="zigzag", strategy="tp_sp")
    parallel(x_local, mask=MASK).square().sum().backward()
    seqpar.sync_gradients(parallel, mesh=mesh, reduce="sum")
    local(x.flatten(0, 1), mask=MASK).square().sum().backward()
    for p in parallel.parameters():
        assert isinstance(p.grad, DTensor)
    check_gradients(parallel, local)
    dcp.save({"layer": parallel.state_dict()}, checkpoint_id=path, process_group=group)
    loaded = attention_layer(heads, "tp_sp", mesh=mesh)
    fully_shard(loaded, mesh=mesh["dp"])
    state = {"layer": loaded.state_dict()}
    dcp.load(state, checkpoint_id=path, process_group=group)
    loaded.load_state_dict(state["layer"])
    check_state(loaded, local)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("heads", [(8, 8), (3, 1)], ids=str)  # heads that tp divides, and not
def test_fsdp_over_dp(pool: Pool, tmp_path: Path, heads: tuple[int, int]) -> None:
    pool.run(8, fully_sharded, heads, str(tmp_path))


@on_ranks
def fully_sharded_over_the_ring(group: ProcessGroup, heads: tuple[int, int]) -> None:
    """FSDP2 over ring x tp around attention, whose weights are all DTensors, and a plain norm."""
    mesh = mesh_of(2, 2, 1, 2)
    plain = nn.RMSNorm(HIDDEN, dtype=torch.float64)
    local = nn.ModuleList([attention_layer(heads), plain])
    randomize(local)
    parallel = nn.ModuleList([attention_layer(heads, "tp_sp", mesh=mesh, layout="zigzag"), copy.deepcopy(plain)])
    parallel.load_state_dict(local.state_dict())
    for module in parallel:
        fully_shard(module, mesh=mesh["ring"])
    x = torch.randn(1, 30, HIDDEN, dtype=torch.float64)
    attention, norm = local
    norm(attention(x, mask=MASK)).square().sum(-1).mean().backward()
    attention, norm = parallel
    x_local = seqpar.shard(x, mesh=mesh, layout="zigzag", strategy="tp_sp")
    losses = norm(attention(x_local, mask=MASK)).square().sum(-1)  # [b, s]
    seqpar.token_loss(losses, torch.zeros_like(losses, dtype=torch.int64), mesh=mesh).backward()
    seqpar.sync_gradients(parallel, mesh=mesh)
    seqpar.sync_gradients(parallel, mesh=mesh)  # changes nothing
    check_gradients(parallel, local)
    found, expected = (nn.utils.clip_grad_norm_(layer.parameters(), 1.0) for layer in (attention, local[0]))
    assert_close(full(found), expected, torch.float64, "norm")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("heads", [(8, 8), (3, 1)], ids=str)  # heads that tp divides, and not
def test_fsdp_over_the_ring(pool: Pool, heads: tuple[int, int]) -> None:
    pool.run(8, fully_sharded_over_the_ring, heads)


@on_ranks
def bad_wrappers(group: ProcessGroup) -> None:
    mesh = mesh_of(4, 1, 1, 2)
    layer = seqpar.MegatronMLP(8, 16, mesh=mesh)
    with pytest.raises(ValueError, match=r"DistributedDataParallel: .*tensor-parallel layers.*fully_shard"):
        DistributedDataParallel(nn.Sequential(layer), process_group=mesh["dp"].get_group())
    with pytest.raises(ValueError, match=r"FullyShardedDataParallel: .*tensor-parallel layers.*fully_shard"):
        FullyShardedDataParallel(nn.Sequential(layer), device_mesh=mesh["dp"], device_id=torch.device("cpu"))
    layer = seqpar.MegatronMLP(8, 16, mesh=mesh)
    fully_shard(layer.up_proj, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"weight: fully_shard .* call fully_shard on the whole tensor-parallel layer"):
        layer(torch.zeros(1, 2, 8))


def test_bad_wrappers(pool: Pool) -> None:
    pool.run(8, bad_wrappers)


@on_ranks
def bad_input(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"overlap='rign'.*'ring'"):
        seqpar.ParallelAttention("tp_sp", 32, 4, group=group, overlap="rign")
    with pytest.raises(ValueError, match=r"context='ring'.*mesh"):
        seqpar.ParallelAttention("tp_sp", 32, 4, group=group, context="ring")
    ids = torch.full((1, 4), 99) if group.rank() == 1 else torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises((ValueError, RuntimeError), match=r"99|rank\(s\) \[1\]"):
        seqpar.VocabParallelEmbedding(50, 8, group=group)(ids)


def test_bad_input(pool: Pool) -> None:
    pool.run(2, bad_input)
