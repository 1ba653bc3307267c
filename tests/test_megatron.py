"""Tensor-parallel layers on sequence shards against the same layers on one rank, in float64."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Mask
from seqpar.layers.sharded_weights import weight_shards
from tests.pool import Pool
from tests.reference import assert_close

HIDDEN, HEAD_DIM, VOCAB = 24, 4, 37
MASK = Mask.documents([0, 5, 31, 60]) & Mask.sliding_window(20)
# Divisible, grouped, fewer key/value heads than ranks, heads that do not divide, fewer heads than ranks.
HEADS = [(8, 8), (8, 2), (6, 3), (6, 2), (3, 1)]


def _layer(strategy: str, heads: tuple[int, int], **options: Any) -> seqpar.AttentionLayer:
    torch.manual_seed(11)
    return seqpar.ParallelAttention(
        strategy, HIDDEN, *heads, HEAD_DIM, bias=True, qk_norm=True, sinks=True, dtype=torch.float64,
        rope=seqpar.RotaryEmbedding(HEAD_DIM), **options,
    )  # fmt: skip


def _randomise(module: nn.Module) -> None:
    for p in module.parameters():
        p.data = torch.randn_like(p) * 0.3


def _check_gradients(parallel: nn.Module, whole: nn.Module) -> None:
    expected, shards = dict(whole.named_parameters()), weight_shards(parallel)
    for name, p in parallel.named_parameters():
        shard, grad = shards.get(p), expected[name].grad
        assert grad is not None and p.grad is not None, name
        assert_close(p.grad, grad if shard is None else shard.to_local(grad), torch.float64, name)


def _against_local(where: dict[str, Any], heads: tuple[int, int], layout: str, overlap: str, seq_len: int) -> None:
    local = _layer("local", heads)
    _randomise(local)
    parallel = _layer("tp_sp", heads, layout=layout, overlap=overlap, **where)
    parallel.load_state_dict(local.state_dict())
    x, dy = torch.randn(2, 2, seq_len, HIDDEN, dtype=torch.float64).unbind()
    mask = MASK & Mask.documents([0, seq_len // 3, seq_len - 1])
    whole = x.clone().requires_grad_()
    y = local(whole, mask=mask)
    y.backward(dy)
    cut: dict[str, Any] = {"layout": layout, "strategy": "tp_sp", **where}
    x_local = seqpar.shard(x, **cut).requires_grad_()
    y_local = parallel(x_local, mask=mask)
    y_local.backward(seqpar.shard(dy, **cut))
    seqpar.sync_gradients(parallel, **where)
    assert whole.grad is not None and x_local.grad is not None
    assert_close(seqpar.unshard(y_local.detach(), **cut), y.detach(), torch.float64, "output")
    assert_close(seqpar.unshard(x_local.grad, **cut), whole.grad, torch.float64, "input gradient")
    _check_gradients(parallel, local)
    for name, value in parallel.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, local.state_dict()[name]), name


def _group_cases(group: ProcessGroup, seq_len: int) -> None:
    for i, heads in enumerate(HEADS):
        layout = ("contiguous", "zigzag", "striped")[i % 3]
        for overlap in ("ring", "none"):
            _against_local({"group": group}, heads, layout, overlap, seq_len)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_attention_equals_one_rank(pool: Pool, world: int) -> None:
    pool.run(world, _group_cases, 61)


def _mesh_cases(group: ProcessGroup, sizes: dict[str, int], options: dict[str, Any]) -> None:
    mesh = seqpar.init_mesh(**sizes, device_type="cpu")
    for i, heads in enumerate(HEADS):
        _against_local({"mesh": mesh}, heads, ("zigzag", "striped", "contiguous")[i % 3], "ring", 67)
    if options:
        layer = _layer("tp_sp", (8, 2), mesh=mesh, **options)
        assert isinstance(layer, seqpar.MegatronAttention) and layer.context == options["context"]
        y = layer(seqpar.shard(torch.ones(1, 16, HIDDEN, dtype=torch.float64), mesh=mesh, strategy="tp_sp"))
        assert y.shape == (1, 2, HIDDEN)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"ring": 2, "ulysses": 2, "tp": 2}, {"context": "context_parallel", "comm": "all_gather"}),
        ({"ring": 2, "tp": 4}, {}),
        ({"ulysses": 4, "tp": 2}, {"context": "ulysses"}),
        ({"dp": 2, "ring": 2, "tp": 2}, {}),
        ({"ulysses": 2, "tp": 4}, {}),  # a rank of tp without heads
    ],
    ids=str,
)
def test_composition_equals_one_rank(pool: Pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    if "dp" in sizes:
        options = {}
    pool.run(8, _mesh_cases, sizes, options)


class Block(nn.Module):
    """A whole transformer with one layer, whole or tensor-parallel."""

    def __init__(self, activation: str, where: dict[str, Any] | None, overlap: str = "ring") -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": torch.float64}
        self.where = where
        if where is None:
            self.embed: nn.Module = nn.Embedding(VOCAB, HIDDEN, **kind)
            self.mlp: nn.Module = WholeMLP(activation)
            self.head: nn.Module = nn.Linear(HIDDEN, VOCAB, bias=False, **kind)
        else:
            self.embed = seqpar.VocabParallelEmbedding(VOCAB, HIDDEN, **where, **kind)
            self.mlp = seqpar.MegatronMLP(HIDDEN, 30, activation, bias=True, overlap=overlap, **where, **kind)
            self.head = seqpar.VocabParallelHead(HIDDEN, VOCAB, overlap=overlap, **where, **kind)
        self.norm1 = nn.RMSNorm(HIDDEN, eps=1e-6, **kind)
        self.norm2 = nn.LayerNorm(HIDDEN, eps=1e-6, **kind)
        strategy, options = ("local", {}) if where is None else ("tp_sp", {**where, "overlap": overlap})
        self.attention = _layer(strategy, (6, 2), **options)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(self.norm1(x), mask=MASK)
        x = x + self.mlp(self.norm2(x))
        if self.where is None:
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return seqpar.vocab_parallel_cross_entropy(self.head(x), labels, VOCAB, **self.where).sum()


class WholeMLP(nn.Module):
    def __init__(self, activation: str) -> None:
        super().__init__()
        kind: dict[str, Any] = {"dtype": torch.float64}
        self.activation = activation
        self.gate_proj = nn.Linear(HIDDEN, 30, **kind) if activation == "swiglu" else None
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, 30, **kind), nn.Linear(30, HIDDEN, **kind)

    def forward(self, x: Tensor) -> Tensor:
        up: Tensor = self.up_proj(x)
        hidden = F.silu(self.gate_proj(x)) * up if self.gate_proj is not None else F.gelu(up)
        y: Tensor = self.down_proj(hidden)
        return y


def _block_cases(group: ProcessGroup) -> None:
    for activation, overlap in (("swiglu", "ring"), ("gelu", "none")):
        whole = Block(activation, None)
        _randomise(whole)
        parallel = Block(activation, {"group": group}, overlap)
        parallel.load_state_dict(whole.state_dict())
        ids, labels = torch.randint(VOCAB, (2, 2, 45)).unbind()
        labels[:, 7:9] = -100
        loss = whole(ids, labels)
        loss.backward()
        loss_parallel = parallel(seqpar.shard(ids, group=group), seqpar.shard(labels, group=group))
        loss_parallel.backward()
        seqpar.sync_gradients(parallel, group=group)
        assert_close(loss_parallel.detach(), loss.detach(), torch.float64, "loss")
        _check_gradients(parallel, whole)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_block_equals_one_rank(pool: Pool, world: int) -> None:
    pool.run(world, _block_cases)


def _replaced_parameters(group: ProcessGroup, how: str) -> None:
    where: dict[str, Any] = {"group": group}
    whole = Block("swiglu", None)
    _randomise(whole)
    with torch.device("meta" if how == "to_empty" else "cpu"):
        parallel = Block("swiglu", where)
    if how == "copy":
        for name, child in list(parallel.named_children()):
            setattr(parallel, name, copy.deepcopy(child))
    if how == "to_empty":
        parallel.to_empty(device="cpu")
    parallel.load_state_dict(copy.deepcopy(whole.state_dict()), assign=how == "assign")
    ids, labels = torch.randint(VOCAB, (2, 2, 45)).unbind()
    whole(ids, labels).backward()
    parallel(seqpar.shard(ids, **where), seqpar.shard(labels, **where)).backward()
    seqpar.sync_gradients(parallel, **where)
    _check_gradients(parallel, whole)


@pytest.mark.parametrize("how", ["copy", "to_empty", "assign"])
def test_parameters_may_be_replaced(pool: Pool, how: str) -> None:
    pool.run(4, _replaced_parameters, how)


def _bytes(group: ProcessGroup, overlap: str) -> None:
    world, tokens = group.size(), 2 * 48
    layer = seqpar.ParallelAttention("tp_sp", HIDDEN, 8, 8, HEAD_DIM, group=group, overlap=overlap)
    x = torch.randn(2, 48 // world, HIDDEN, requires_grad=True)
    one_way = (world - 1) * tokens // world * HIDDEN * 4
    with seqpar.trace() as forward:
        y = layer(x, seq_len=48)
    with seqpar.trace() as backward:
        y.sum().backward()
    assert forward.bytes_sent == 2 * one_way
    assert backward.bytes_sent == 3 * one_way  # the mirror image, and the input gathered once more


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("overlap", ["ring", "none"])
def test_bytes_meet_the_lower_bound(pool: Pool, world: int, overlap: str) -> None:
    pool.run(world, _bytes, overlap)


def _saved(group: ProcessGroup | None, module: nn.Module, x: Tensor, recompute: bool) -> int:
    """Bytes that autograd keeps of a forward, each storage once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = checkpoint(module, x, use_reentrant=False) if recompute else module(x)
    del y
    return sum(kept.values())


def _memory(group: ProcessGroup) -> None:
    # Per layer and rank, in units of s b h elements (heads * head_dim = hidden): the input of the gather (1/t), q, k, v
    # and out (4/t), its flattened copy shares storage. Everything is divided by t: that is sequence parallelism.
    world, seq, batch = group.size(), 64, 2
    layer = seqpar.ParallelAttention("tp_sp", 32, 8, 8, 4, group=group)
    x = torch.randn(batch, seq // world, 32, requires_grad=True)
    unit = seq * batch * 32 * 4 // world
    lse = 4 * batch * seq * 8 // world
    assert _saved(group, layer, x, False) == 5 * unit + lse
    assert _saved(group, layer, x, True) <= unit  # full recomputation keeps the input
    mlp = seqpar.MegatronMLP(32, 96, group=group)
    # The gather's input, and gate, up, silu(gate), their product: 3 h wide each, over t.
    assert _saved(group, mlp, x, False) == unit + 4 * 3 * unit


class _PaperLayer(nn.Module):
    """The transformer layer of Korthikanti et al., 2022, without its two dropouts."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.norms = nn.ModuleList(nn.LayerNorm(32, eps=1e-6, dtype=dtype) for _ in range(2))
        self.attention = seqpar.ParallelAttention("tp_sp", 32, 8, 8, 4, group=group, dtype=dtype)
        self.mlp = seqpar.MegatronMLP(32, 4 * 32, "gelu", group=group, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def _paper_memory(group: ProcessGroup) -> None:
    seq, batch, tp = 64, 2, group.size()
    sbh = seq * batch * 32
    layer = _PaperLayer(group)
    x = torch.randn(batch, seq // tp, 32, dtype=torch.bfloat16, requires_grad=True)
    masks = 2 * sbh  # of the dropouts, one byte an element
    statistics = 4 * seq * batch * 8 + 2 * 2 * 2 * seq * batch  # lse; mean and deviation of two norms
    # sbh/t (34 + 5as/h), of which the last term, the attention matrix, is never kept.
    assert _saved(group, layer, x, False) == (34 * sbh - masks + statistics) // tp
    assert _saved(group, layer, x, True) == 2 * sbh // tp  # full recomputation: the layer's input


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_saved_activations_meet_the_formula_of_sequence_parallelism(pool: Pool, world: int) -> None:
    pool.run(world, _paper_memory)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_saved_activations_are_divided_by_the_ranks(pool: Pool, world: int) -> None:
    pool.run(world, _memory)


# Every strategy at a number of ranks by which some weights divide and others do not.
SAVED_ON = {"local": 1, "ring": 2, "ulysses": 3, "context_parallel": 4, "hybrid": 4, "tp_sp": 4}
LOADED_ON = {"local": 1, "ring": 3, "ulysses": 2, "context_parallel": 2, "hybrid": 8, "tp_sp": 3}


def _parallel_context(group: ProcessGroup, strategy: str) -> dict[str, Any]:
    return {} if strategy == "local" else {"group": group}


def _save(group: ProcessGroup, strategy: str, heads: tuple[int, int], path: str) -> dict[str, Tensor]:
    whole = _layer("local", heads)
    _randomise(whole)
    layer = _layer(strategy, heads, **_parallel_context(group, strategy))
    layer.load_state_dict(whole.state_dict())
    dcp.save({"layer": layer.state_dict()}, checkpoint_id=path, process_group=group)
    return dict(whole.state_dict())


def _load(group: ProcessGroup, strategy: str, heads: tuple[int, int], paths: list[str]) -> list[dict[str, Tensor]]:
    loaded = []
    for path in paths:
        layer = _layer(strategy, heads, **_parallel_context(group, strategy))
        for p in layer.parameters():
            nn.init.zeros_(p)  # nothing of what is loaded stands there already
        state = {"layer": layer.state_dict()}
        dcp.load(state, checkpoint_id=path, process_group=group)
        layer.load_state_dict(state["layer"])
        loaded.append({n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in layer.state_dict().items()})
    return loaded


@pytest.mark.parametrize("heads", [(8, 8), (6, 2)])
def test_checkpoints_cross_over_between_every_pair(pool: Pool, tmp_path: Path, heads: tuple[int, int]) -> None:
    saved = {
        str(tmp_path / strategy): pool.run(ranks, _save, strategy, heads, str(tmp_path / strategy))[0]
        for strategy, ranks in SAVED_ON.items()
    }
    for strategy, ranks in LOADED_ON.items():
        for loaded in pool.run(ranks, _load, strategy, heads, list(saved)):
            for (path, expected), state in zip(saved.items(), loaded, strict=True):
                assert state.keys() == expected.keys()
                for name, value in expected.items():
                    assert torch.equal(state[name], value), f"{path} under {strategy}: {name}"


def _fully_sharded(group: ProcessGroup, heads: tuple[int, int], path: str) -> None:
    mesh = seqpar.init_mesh(dp=2, ring=2, tp=2, device_type="cpu")
    local = _layer("local", heads)
    _randomise(local)
    cut: dict[str, Any] = {"mesh": mesh, "layout": "zigzag", "strategy": "tp_sp"}
    parallel = _layer("tp_sp", heads, mesh=mesh, layout="zigzag")
    parallel.load_state_dict(local.state_dict())
    fully_shard(parallel, mesh=mesh["dp"])
    rows = torch.randn(2, 1, 67, HIDDEN, dtype=torch.float64)  # one for each data-parallel rank
    parallel(seqpar.shard(rows[mesh.get_local_rank("dp")], **cut), mask=MASK).square().sum().backward()
    seqpar.sync_gradients(parallel, mesh=mesh)
    local(rows.flatten(0, 1), mask=MASK).square().sum().backward()
    for p in parallel.parameters():
        assert isinstance(p.grad, DTensor)
        p.grad = 2 * p.grad.full_tensor()  # FSDP averages over dp
    _check_gradients(parallel, local)
    dcp.save({"layer": parallel.state_dict()}, checkpoint_id=path, process_group=group)
    other = _layer("tp_sp", heads, mesh=mesh)
    fully_shard(other, mesh=mesh["dp"])
    state = {"layer": other.state_dict()}
    dcp.load(state, checkpoint_id=path, process_group=group)
    other.load_state_dict(state["layer"])
    for name, value in other.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(full, local.state_dict()[name]), name


@pytest.mark.parametrize("heads", [(8, 8), (6, 2), (3, 1)])
def test_fsdp_over_dp(pool: Pool, tmp_path: Path, heads: tuple[int, int]) -> None:
    pool.run(8, _fully_sharded, heads, str(tmp_path))


def _recompute(group: ProcessGroup, use_reentrant: bool) -> None:
    layer = _layer("tp_sp", (6, 2), group=group)
    _randomise(layer)
    x = torch.randn(2, 48 // group.size(), HIDDEN, dtype=torch.float64, requires_grad=True)
    results = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)):
        x.grad = None
        layer.zero_grad()
        run(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in layer.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert plain is not None and recomputed is not None and torch.equal(plain, recomputed)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_full_recomputation_changes_nothing(pool: Pool, use_reentrant: bool) -> None:
    pool.run(2, _recompute, use_reentrant)


def _bad_input(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"overlap='rign'.*'ring'"):
        seqpar.ParallelAttention("tp_sp", 32, 4, group=group, overlap="rign")
    with pytest.raises(ValueError, match=r"symm_mem.*NVIDIA"):
        seqpar.MegatronMLP(32, 64, group=group, overlap="symm_mem")(torch.zeros(1, 2, 32))
    with pytest.raises(ValueError, match="needs a mesh"):
        seqpar.ParallelAttention("tp_sp", 32, 4, group=group, context="ring")
    ids = torch.full((1, 4), 99) if group.rank() == 1 else torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises((ValueError, RuntimeError), match=r"99 lies outside|rank\(s\) \[1\]"):
        seqpar.VocabParallelEmbedding(50, 8, group=group)(ids)


def test_bad_input(pool: Pool) -> None:
    pool.run(2, _bad_input)
