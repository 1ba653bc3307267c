"""Activation checkpointing and offloading with PyTorch's tools give the same numbers and repeat no communication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import seqpar

from ..models import HIDDEN, attention_layer, randomize
from ..pool import Pool, on_ranks
from ..strategy_cases import DISTINCT_LAYERS, LAYER_STRATEGIES


def gradients_and_bytes(
    run: Callable[[Tensor], Tensor], layer: torch.nn.Module, x: Tensor
) -> tuple[list[Tensor | None], int, int]:
    """The gradients of ``x`` and the parameters, and the bytes sent in forward and in backward."""
    x.grad = None
    layer.zero_grad()
    torch.manual_seed(9)  # of dropout
    with seqpar.trace() as forward:
        y = run(x)
    with seqpar.trace() as backward:
        y.square().sum().backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]  # torch.equal of DTensors communicates
    return local, forward.bytes_sent, backward.bytes_sent


@on_ranks
def compare_checkpointing(group: ProcessGroup, strategy: str) -> None:
    """Run a layer plainly and in four ways that save memory; compare gradients and bytes."""
    torch.manual_seed(3)
    layer = seqpar.ParallelAttention(
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        group=group,
        dropout_p=0.1,
        layout="zigzag",
        **LAYER_STRATEGIES[strategy],
    )
    x = torch.randn(2, 64 // group.size(), 32, requires_grad=True)

    def offloaded(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            y: Tensor = layer(x)
            return y

    plain, sent_forward, sent_backward = gradients_and_bytes(layer, layer, x)
    runs = {
        "reentrant": lambda x: checkpoint(layer, x, use_reentrant=True),
        "full": lambda x: checkpoint(layer, x, use_reentrant=False),
        "keep_attention": lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=seqpar.keep_attention),
        "offloaded": offloaded,
    }
    for name, run in runs.items():
        gradients, forward, backward = gradients_and_bytes(run, layer, x)
        for expected, actual in zip(plain, gradients, strict=True):
            assert expected is not None and actual is not None and torch.equal(expected, actual), name
        assert forward == sent_forward, name
        repeated = {"reentrant": sent_forward, "full": sent_forward, "keep_attention": 0, "offloaded": 0}[name]
        if strategy == "tp_sp" and name in ("full", "keep_attention"):
            # The all-gather. PyTorch stops where all is saved that backward needs: before the reduce-scatter.
            repeated = sent_forward // 2
        if strategy == "activations" and name == "keep_attention":
            repeated = sent_forward  # k and v are computed again, and the weights' gradients need the input once more
        assert backward == sent_backward + repeated, name


@pytest.mark.slow
@pytest.mark.thorough(strategy=["all_gather", "all_gather in chunks", "hybrid", "activations"])
@pytest.mark.parametrize("strategy", DISTINCT_LAYERS)
def test_recomputation_repeats_no_attention(pool: Pool, strategy: str) -> None:
    pool.run(4, compare_checkpointing, strategy)


@on_ranks
def recompute_tensor_parallel_layer(group: ProcessGroup, heads: tuple[int, int], how: dict[str, Any]) -> None:
    """A tensor-parallel layer with every kind of parameter, in float64."""
    layer = attention_layer(heads, "tp_sp", group=group)
    randomize(layer)
    x = torch.randn(2, 48 // group.size(), HIDDEN, dtype=torch.float64, requires_grad=True)
    plain, _, _ = gradients_and_bytes(layer, layer, x)
    recomputed, _, _ = gradients_and_bytes(lambda x: checkpoint(layer, x, **how), layer, x)
    for expected, actual in zip(plain, recomputed, strict=True):
        assert expected is not None and actual is not None and torch.equal(expected, actual)


HOW: dict[str, dict[str, Any]] = {
    "full": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "keep_attention": {"use_reentrant": False, "context_fn": seqpar.keep_attention},
}


# Of 10 heads the second rank's first one shares its KV head with the first rank; of one head it has none.
@pytest.mark.parametrize("heads", [(6, 2), (10, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("how", HOW)
def test_recomputation_of_a_tensor_parallel_layer(pool: Pool, heads: tuple[int, int], how: str) -> None:
    pool.run(2, recompute_tensor_parallel_layer, heads, HOW[how])
