"""Activation checkpointing and offloading by torch's own means: same numbers, and no communication repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

import seqpar
from tests.pool import Pool


def _gradients(
    run: Callable[[Tensor], Tensor], layer: torch.nn.Module, x: Tensor
) -> tuple[list[Tensor | None], int, int]:
    """Gradients, and the bytes sent forward and backward."""
    x.grad = None
    layer.zero_grad()
    with seqpar.trace() as forward:
        y = run(x)
    with seqpar.trace() as backward:
        y.square().sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters())], forward.bytes_sent, backward.bytes_sent


def _compare(group: ProcessGroup, strategy: str, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    layer = seqpar.ParallelAttention(strategy, 32, 4, 2, group=group, dropout_p=0.1, layout="zigzag", **options)
    x = torch.randn(2, 64 // group.size(), 32, requires_grad=True)

    def fresh(run: Callable[[Tensor], Tensor]) -> tuple[list[Tensor | None], int, int]:
        torch.manual_seed(9)
        return _gradients(run, layer, x)

    def offloaded(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return layer(x)

    plain, sent_forward, sent_backward = fresh(layer)
    runs = {
        "reentrant": lambda x: checkpoint(layer, x, use_reentrant=True),
        "whole": lambda x: checkpoint(layer, x, use_reentrant=False),
        "keep_attention": lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=seqpar.keep_attention),
        "offloaded": offloaded,
    }
    for name, run in runs.items():
        gradients, forward, backward = fresh(run)
        for expected, actual in zip(plain, gradients, strict=True):
            assert expected is not None and actual is not None and torch.equal(expected, actual), name
        assert forward == sent_forward, name
        if name in ("keep_attention", "offloaded") and strategy != "tp_sp":
            assert backward == sent_backward, name
        elif name in ("whole", "reentrant"):
            assert backward == sent_backward + sent_forward, name


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("ring", {}), ("ulysses", {}), ("context_parallel", {}), ("hybrid", {"ulysses_size": 2}), ("tp_sp", {})],
    ids=str,
)
def test_recomputation_changes_no_number_and_repeats_no_attention(
    pool: Pool, strategy: str, options: dict[str, Any]
) -> None:
    pool.run(4, _compare, strategy, options)
