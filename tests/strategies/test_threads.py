"""Backward in another thread than forward, as autograd runs it on CUDA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar

from ..models import HIDDEN, attention_layer, full
from ..pool import Pool, on_ranks
from ..strategy_cases import LAYER_STRATEGIES


@on_ranks
def compare_threads(group: ProcessGroup, strategy: str) -> None:
    """Gradients and bytes are the same in this thread and in another one."""
    layer = attention_layer((6, 2), group=group, layout="zigzag", dropout_p=0.1, **LAYER_STRATEGIES[strategy])
    x = torch.randn(2, 12, HIDDEN, dtype=torch.float64, requires_grad=True)
    results: list[tuple[list[Tensor], int]] = []
    for in_thread in (False, True):
        torch.manual_seed(9)  # of dropout
        loss = layer(x).square().sum()
        with seqpar.trace() as sent, ThreadPoolExecutor(1) as thread:
            inputs = [x, *layer.parameters()]
            if in_thread:
                gradients = thread.submit(torch.autograd.grad, loss, inputs).result()
            else:
                gradients = torch.autograd.grad(loss, inputs)
        results.append(([full(g) for g in gradients], sent.bytes_sent))
    (here, bytes_here), (there, bytes_there) = results
    assert bytes_here == bytes_there > 0
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize("strategy", LAYER_STRATEGIES)
def test_backward_runs_in_any_thread(pool: Pool, strategy: str) -> None:
    pool.run(2, compare_threads, strategy)
