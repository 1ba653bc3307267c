"""The context ``torch.device`` changes nothing, because the package creates its host tensors on the CPU explicitly."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask

from ..models import full
from ..pool import Pool, on_ranks
from ..strategy_cases import LAYER_STRATEGIES

MASK = Mask.documents([0, 5, 31, 38]) & Mask.sliding_window(20, 3)


@on_ranks
def layer_under_default_device(
    group: ProcessGroup, strategy: str, backend: str, default_device: str
) -> list[torch.Tensor]:
    """The output over the full sequence, and the gradients of a layer that runs under another default device."""
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
    # Schedules are cached. No other test has this mask and length, so this one's is made under the default device.
    with torch.device(default_device):
        layer.rope = seqpar.RotaryEmbedding(4)
        x_local = seqpar.shard(x, group=group, layout="zigzag").requires_grad_()
        y_local = layer(x_local, mask=MASK)
        y_local.sum().backward()
        seqpar.sync_gradients(layer, group=group)
        y = seqpar.unshard(y_local.detach(), group=group, layout="zigzag")
    assert x_local.grad is not None
    return [y, x_local.grad, *(full(p.grad) for p in layer.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("strategy", LAYER_STRATEGIES)
def test_the_default_device_does_not_matter(pool: Pool, strategy: str, backend: str) -> None:
    under_meta = pool.run(4, layer_under_default_device, strategy, backend, "meta")
    under_cpu = pool.run(4, layer_under_default_device, strategy, backend, "cpu")
    for meta, cpu in zip(under_meta, under_cpu, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(meta, cpu, strict=True))
