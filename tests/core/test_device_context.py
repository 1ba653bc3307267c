"""PyTorch's default device and dtype change nothing, because the package says both of every tensor that it makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask

from ..models import full
from ..pool import Pool, on_ranks
from ..problems import present_backends
from ..strategy_cases import DISTINCT_LAYERS, LAYER_STRATEGIES

MASK = Mask.documents([0, 5, 31, 38]) & Mask.sliding_window(20, 3)


@contextmanager
def default(what: torch.device | torch.dtype) -> Iterator[None]:
    """In the block, tensors are made on this device, or with this dtype."""
    before = torch.get_default_dtype()
    with what if isinstance(what, torch.device) else nullcontext():
        torch.set_default_dtype(what if isinstance(what, torch.dtype) else before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@on_ranks
def layer_under_default(
    group: ProcessGroup, strategy: str, backend: str, what: torch.device | torch.dtype
) -> list[torch.Tensor]:
    """The output over the full sequence, and the gradients of a layer that runs under another default."""
    torch.manual_seed(3)
    layer = seqpar.ParallelAttention(
        hidden_size=24,
        num_heads=6,
        num_kv_heads=2,
        group=group,
        layout="zigzag",
        sinks=True,
        backend=backend,
        dropout_p=0.1 if backend == "reference" else 0.0,
        device="cpu",
        **LAYER_STRATEGIES[strategy],
    )
    x = torch.randn(2, 38, 24)
    # Schedules are cached. No other test has this mask and length, so this one's is made under the default.
    with default(what):
        layer.rope = seqpar.RotaryEmbedding(4)
        x_local = seqpar.shard(x, group=group, layout="zigzag").requires_grad_()
        y_local = layer(x_local, mask=MASK)
        y_local.sum().backward()
        seqpar.sync_gradients(layer, group=group)
        y = seqpar.unshard(y_local.detach(), group=group, layout="zigzag")
    assert x_local.grad is not None
    return [y, x_local.grad, *(full(p.grad) for p in layer.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.thorough(strategy=["all_gather", "all_gather in chunks", "activations"])
@pytest.mark.parametrize("backend", present_backends())
@pytest.mark.parametrize("strategy", DISTINCT_LAYERS)
def test_the_default_device_does_not_matter(pool: Pool, strategy: str, backend: str) -> None:
    compare(pool, strategy, backend, torch.device("meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("strategy", ["ring", "hybrid", "tp_sp"])
def test_the_default_dtype_does_not_matter(pool: Pool, strategy: str, dtype: torch.dtype) -> None:
    compare(pool, strategy, "cpu", dtype)


def compare(pool: Pool, strategy: str, backend: str, what: torch.device | torch.dtype) -> None:
    under_other = pool.run(4, layer_under_default, strategy, backend, what)
    usual = pool.run(4, layer_under_default, strategy, backend, torch.device("cpu"))
    for other, expected in zip(under_other, usual, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(other, expected, strict=True))
