"""A user's default device, and torch.device as a context, change nothing: what belongs on the host is made there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask

from .pool import Pool

MASK = Mask.documents([0, 5, 31, 38]) & Mask.sliding_window(20, 3)


def _run(group: ProcessGroup, strategy: str, backend: str, default: str) -> list[torch.Tensor]:
    torch.manual_seed(3)
    layer = seqpar.ParallelAttention(strategy, 24, 6, 2, group=group, layout="zigzag", sinks=True, backend=backend,
                                     dropout_p=0.1 if backend == "reference" else 0.0, device="cpu")  # fmt: skip
    x = torch.randn(2, 38, 24)
    with torch.device(default):  # the schedule of this mask and shape is made here, and cached
        layer.rope = seqpar.RotaryEmbedding(4)
        x_local = seqpar.shard(x, group=group, layout="zigzag").requires_grad_()
        y = layer(x_local, mask=MASK)
        y.sum().backward()
        seqpar.sync_gradients(layer, group=group)
        whole = seqpar.unshard(y.detach(), group=group, layout="zigzag")
    assert x_local.grad is not None
    return [whole, x_local.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "context_parallel", "hybrid", "tp_sp"])
def test_the_default_device_does_not_matter(pool: Pool, strategy: str, backend: str) -> None:
    results: Any = [pool.run(4, _run, strategy, backend, default) for default in ("meta", "cpu")]
    for under_meta, plain in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(under_meta, plain, strict=True))
