"""The planner's activation memory against what autograd keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.planner.memory import layer_activations
from seqpar.planner.mlp import Mlp
from seqpar.planner.setting import Setting
from seqpar.planner.split import Switches

from ..pool import Pool, on_ranks
from ..settings import H100, decoder
from ..strategies.test_activation_memory import PaperLayer, saved_bytes
from .paper import paper_activations

HIDDEN, HEADS, TOKENS = 64, 8, 64


class LlamaLayer(nn.Module):
    """A layer of this package as the planner takes it: q, k, v and o projections, SwiGLU, two norms."""

    def __init__(self, strategy: str, kv_heads: int, group: ProcessGroup) -> None:
        super().__init__()
        options: dict[str, Any] = {"group": group, "dtype": torch.bfloat16}
        if strategy == "invariant":
            strategy, options["deterministic"] = "ring", strategy
        self.attention = seqpar.ParallelAttention(strategy, HIDDEN, HEADS, kv_heads, 8, layout="contiguous", **options)
        options.pop("deterministic", None)
        self.mlp: nn.Module
        if strategy == "tp_sp":
            self.mlp = seqpar.MegatronMLP(HIDDEN, 3 * HIDDEN, **options)
        else:
            self.gate, self.up, self.down = (
                nn.Linear(a, b, bias=False, dtype=torch.bfloat16)
                for a, b in ((HIDDEN, 3 * HIDDEN), (HIDDEN, 3 * HIDDEN), (3 * HIDDEN, HIDDEN))
            )
            self.mlp = nn.Identity()
        self.norm1, self.norm2 = (nn.LayerNorm(HIDDEN, dtype=torch.bfloat16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        if hasattr(self, "gate"):
            y = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        result: Tensor = x + self.mlp(y)
        return result


@on_ranks
def kept(group: ProcessGroup, strategy: str, kv_heads: int) -> tuple[int, int]:
    """Bytes that autograd keeps of a layer, without and with full recomputation."""
    layer = LlamaLayer(strategy, kv_heads, group)
    x = torch.randn(2, TOKENS // group.size(), HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    return saved_bytes(layer, x), saved_bytes(layer, x, recompute=True)


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("strategy", ["ring", "context_parallel", "ulysses", "tp_sp", "invariant"])
def test_activations_are_within_5_percent_of_what_autograd_keeps(pool: Pool, strategy: str, kv_heads: int) -> None:
    world = 2
    kernel = "invariant" if strategy == "invariant" else None
    degree = {"ulysses": "ulysses", "tp_sp": "tensor"}.get(strategy, "ring")
    model = decoder("m", 1, HIDDEN, HEADS, kv_heads, 8, 3 * HIDDEN, 64)
    setting = replace(Setting(H100, Mask.causal(), TOKENS, 2, model=model, kernel=kernel), **{degree: world})
    for everything, recomputed in pool.run(world, kept, strategy, kv_heads):
        assert layer_activations(model.layers[0], setting) == pytest.approx(everything, rel=0.05)
        assert layer_activations(model.layers[0], setting, Switches("full")) == pytest.approx(recomputed, rel=0.05)


@on_ranks
def kept_by_the_paper_layer(group: ProcessGroup) -> int:
    layer = PaperLayer(group)
    x = torch.randn(2, TOKENS // group.size(), 32, dtype=torch.bfloat16, requires_grad=True)
    return saved_bytes(layer, x)


def test_the_layer_of_the_paper(pool: Pool) -> None:
    """Ours, without dropout; and theirs without scores, which has two dropout masks of a byte an element."""
    (measured,) = pool.run(1, kept_by_the_paper_layer)
    model = decoder("paper", 1, 32, 8, 8, 4, 128, 64, gated=False)
    setting = Setting(H100, Mask.causal(), TOKENS, 2, model=model)
    assert layer_activations(model.layers[0], setting) == pytest.approx(measured, rel=0.05)
    paper = paper_activations(model, TOKENS, 2, recompute="selective")
    assert paper - 2 * TOKENS * 2 * 32 == pytest.approx(measured, rel=0.05)


def test_experts_keep_copies_of_their_tokens() -> None:
    """What autograd keeps of a mixture of experts, whose copies and outputs have ``active_experts`` rows a token."""
    torch.manual_seed(0)
    experts, active, hidden, width = 4, 2, 32, 48
    gate, up = (nn.Parameter(torch.randn(experts, width, hidden)) for _ in range(2))
    down, x = nn.Parameter(torch.randn(experts, hidden, width)), torch.randn(TOKENS, hidden, requires_grad=True)
    chosen = torch.rand(TOKENS, experts).topk(active).indices
    kept = 0

    def keep(saved: Tensor) -> Tensor:
        nonlocal kept
        if saved.is_floating_point() and saved.untyped_storage().data_ptr() not in {
            p.untyped_storage().data_ptr() for p in (gate, up, down, x, scores)
        }:
            kept += saved.nbytes
        return saved

    scores = torch.randn(TOKENS, active, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        for i in range(experts):
            token, slot = (chosen == i).nonzero(as_tuple=True)
            copy = x[token]
            seen = kept
            (nn.functional.silu(copy @ gate[i].T) * (copy @ up[i].T) @ down[i].T) * scores[token, slot][:, None]
            kept -= copy.nbytes if kept > seen else 0  # two products save it, the storage is one
    kept -= 4 * TOKENS * active  # the chosen scores, one number a row
    setting = Setting(H100, Mask.causal(), TOKENS, model=decoder("m", 1, hidden, 4, 4, 8, width, 64))
    assert Mlp(hidden, width, True, experts, active).kept(setting) == pytest.approx(kept / 2, rel=0.05)
