"""State dicts have Llama's names and shapes. A checkpoint of one strategy can be loaded under every other strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar

from .models import attention_layer, full, randomize
from .pool import Pool, on_ranks

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
