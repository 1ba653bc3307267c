"""State dicts have Llama's names and shapes. A checkpoint of one strategy can be loaded under every other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import seqpar
from seqpar.megatron.sharded_weights import shard_like

from ..models import HIDDEN, Transformer, attention_layer, full, randomize
from ..pool import OwnPool, Pool, mesh_of, on_ranks

# Strategy -> number of ranks. By each number some of the weights divide and others do not.
SAVED_ON = {"local": 1, "ring": 2, "ulysses": 3, "context_parallel": 4, "hybrid": 4, "tp_sp": 4}
LOADED_ON = {"local": 1, "ring": 3, "ulysses": 2, "context_parallel": 2, "hybrid": 8, "tp_sp": 3}


def test_parameters_are_named_and_shaped_as_llama() -> None:
    layer = seqpar.ParallelAttention("ulysses", 32, 4, 2, 12, bias=True, out_bias=False, qk_norm=True, sinks=True)
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == {
        "q_proj.weight": (48, 32), "q_proj.bias": (48,), "k_proj.weight": (24, 32), "k_proj.bias": (24,),
        "v_proj.weight": (24, 32), "v_proj.bias": (24,), "o_proj.weight": (32, 48), "q_norm.weight": (12,),
        "k_norm.weight": (12,), "sinks": (4,),
    }  # fmt: skip
    assert layer.sinks is not None and not layer.sinks.any()


def layer_on(group: ProcessGroup, strategy: str, heads: tuple[int, int]) -> seqpar.AttentionLayer:
    where: dict[str, Any] = {} if strategy == "local" else {"group": group}
    return attention_layer(heads, strategy, **where)


@on_ranks
def save(group: ProcessGroup, strategy: str, heads: tuple[int, int], path: str) -> dict[str, Tensor]:
    """Save a layer with random weights; the full weights."""
    local = attention_layer(heads)
    randomize(local)
    layer = layer_on(group, strategy, heads)
    layer.load_state_dict(local.state_dict())
    dcp.save({"layer": layer.state_dict()}, checkpoint_id=path, process_group=group)
    return dict(local.state_dict())


@on_ranks
def load(group: ProcessGroup, strategy: str, heads: tuple[int, int], paths: list[str]) -> list[dict[str, Tensor]]:
    """Load each checkpoint under another strategy; the full weights of each."""
    loaded = []
    for path in paths:
        layer = layer_on(group, strategy, heads)
        for p in layer.parameters():
            nn.init.zeros_(p)  # new layers have the weights that were saved before ``randomize``
        state = {"layer": layer.state_dict()}
        dcp.load(state, checkpoint_id=path, process_group=group)
        layer.load_state_dict(state["layer"])
        loaded.append({n: full(v) for n, v in layer.state_dict().items()})
    return loaded


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.thorough(heads=[(6, 2)])
@pytest.mark.parametrize("heads", [(8, 8), (6, 2)], ids=str)
def test_a_checkpoint_loads_under_every_strategy_and_size(pool: Pool, tmp_path: Path, heads: tuple[int, int]) -> None:
    saved = {
        str(tmp_path / strategy): pool.run(ranks, save, strategy, heads, str(tmp_path / strategy))[0]
        for strategy, ranks in SAVED_ON.items()
    }
    for strategy, ranks in LOADED_ON.items():
        for loaded in pool.run(ranks, load, strategy, heads, list(saved)):
            for (path, expected), state in zip(saved.items(), loaded, strict=True):
                assert state.keys() == expected.keys()
                for name, value in expected.items():
                    assert torch.equal(state[name], value), f"{path} under {strategy}: {name}"


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model with random weights after one step with random gradients, the same for every model."""
    torch.manual_seed(2)
    randomize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = shard_like(torch.randn(p.shape, dtype=p.dtype), p)
    optimizer.step()
    return optimizer


def model_on(tp: int, fsdp: bool) -> Transformer:
    """A model with sharded and replicated weights, plain ones too, in each replica or under FSDP2."""
    if tp == 1:
        return Transformer()
    mesh = mesh_of(dp=-1, ring=1, ulysses=1, tp=tp)
    model = Transformer("tp_sp", mesh=mesh)
    if fsdp:
        fully_shard(model.attention, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


@on_ranks
def save_training(group: ProcessGroup, tp: int, fsdp: bool, path: str) -> None:
    model = model_on(tp, fsdp)
    weights, state = get_state_dict(model, trained(model))
    for name, p in model.named_parameters():  # nothing is gathered
        saved: Any = weights[name]
        assert not isinstance(p, DTensor) or saved.to_local().shape == p.to_local().shape
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path, process_group=group)


@on_ranks
def resume_training(group: ProcessGroup, tp: int, fsdp: bool, path: str) -> None:
    """Compare the weights and moments with one device's."""
    local, model = Transformer(), model_on(tp, fsdp)
    expected, optimizer = trained(local), torch.optim.AdamW(model.parameters(), lr=0.1)
    for p in model.parameters():
        nn.init.zeros_(p)
        # The state as a step makes it; torch takes seconds to plan a step of DTensors.
        moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=path, process_group=group)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for (name, p), want in zip(model.named_parameters(), local.parameters(), strict=True):
        assert torch.equal(full(p), want), name
        for moment, value in expected.state[want].items():
            assert torch.equal(full(optimizer.state[p][moment]), value), f"{name}: {moment}"


@pytest.mark.slow
@pytest.mark.thorough
def test_the_state_of_the_optimizer_survives(pool: Pool, own: OwnPool, tmp_path: Path) -> None:
    """From two tensor-parallel ranks to one and four, over which the 6 heads and 2 KV heads do not divide."""
    own.pool.run(4, save_training, 2, False, str(tmp_path / "plain"))
    own.pool.run(4, save_training, 2, True, str(tmp_path / "fsdp"))
    pool.run(8, resume_training, 4, True, str(tmp_path / "plain"))
    own.pool.run(4, resume_training, 1, False, str(tmp_path / "fsdp"))
    own.pool.run(4, resume_training, 4, False, str(tmp_path / "fsdp"))


@on_ranks
def new_weights(group: ProcessGroup) -> None:
    """``reset_parameters`` draws the weights of one device; a weight of another shape is refused."""
    for heads in ((4, 4), (3, 1)):
        local, parallel = attention_layer(heads), attention_layer(heads, "tp_sp", group=group)
        for layer in (local, parallel):
            randomize(layer)
            torch.manual_seed(4)
            for module in (layer, layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, layer.q_norm, layer.k_norm):
                assert module is not None
                module.reset_parameters()
        for (name, p), want in zip(parallel.named_parameters(), local.parameters(), strict=True):
            assert torch.equal(full(p), want), name
        half = layer.q_proj.weight.shape[0] // 2
        with pytest.raises(RuntimeError, match=r"size mismatch for q_proj.weight"):
            parallel.load_state_dict({"q_proj.weight": torch.zeros(half, HIDDEN)}, strict=False)


def test_weights_are_drawn_as_on_one_device(pool: Pool) -> None:
    pool.run(2, new_weights)
