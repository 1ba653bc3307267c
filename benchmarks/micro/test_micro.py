"""Micro-benchmarks of the parts: ``make bench`` runs them and prints ratios to the stored run of the same machine.

Everything runs in one thread, but for what needs a second rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import seqpar
from seqpar import Mask
from seqpar.kernels import BACKENDS
from seqpar.placement.layout import CPU, LAYOUTS, TokenLayout
from seqpar.schedule.plan import AttentionPlan

from .conftest import Together
from .operations import HEAD_DIM, HEADS, OPERATIONS, SEQ_LEN

torch.set_num_threads(1)
KERNELS = [name for name, b in BACKENDS.items() if b.unavailable() is None and name != "reference"]


@pytest.fixture(scope="module")
def boundaries() -> torch.Tensor:
    """8,000 documents of random lengths in 1,048,576 tokens."""
    inner = torch.randint(1, 1 << 20, (7999,), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.zeros(1, dtype=torch.int64), inner.sort().values, torch.tensor([1 << 20])])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward+backward"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
@pytest.mark.parametrize("backend", KERNELS)
def test_kernel(benchmark: BenchmarkFixture, backend: Any, mask: str, backward: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, SEQ_LEN, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).requires_grad_(backward) for _ in range(3))
    dout = torch.randn_like(q)
    masks = {
        "causal": Mask.causal(),
        "window": Mask.causal() & Mask.sliding_window(255),
        "documents": Mask.documents([0, 300, 1000, SEQ_LEN]),
    }

    def run() -> None:
        out = seqpar.attention(q, k, v, strategy="local", mask=masks[mask], backend=backend)
        if backward:
            out.backward(dout)
        if device.type == "cuda":
            torch.cuda.synchronize()

    benchmark(run)


def test_mask_of_documents(benchmark: BenchmarkFixture, boundaries: torch.Tensor) -> None:
    benchmark(lambda: Mask.documents(boundaries))


def test_intervals(benchmark: BenchmarkFixture, boundaries: torch.Tensor) -> None:
    mask, positions = Mask.documents(boundaries), torch.arange(1 << 14)
    benchmark(lambda: mask.intervals(positions))


@pytest.mark.parametrize("gather", [False, True], ids=["ring", "all_gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plan(benchmark: BenchmarkFixture, boundaries: torch.Tensor, layout: Any, gather: bool) -> None:
    sharding = TokenLayout(1 << 20, layout, ring=64)

    def run() -> None:
        plan = AttentionPlan(Mask.documents(boundaries), sharding, 32, gather, 8).prepare()
        plan.intervals(0, CPU)

    benchmark(run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard(benchmark: BenchmarkFixture, second_rank: Any, layout: Any) -> None:
    sharding = seqpar.Sharding(SEQ_LEN, layout, group=torch.distributed.group.WORLD)
    x = torch.randn(1, SEQ_LEN, HEADS * HEAD_DIM)
    benchmark(lambda: sharding.shard(x))


@pytest.mark.parametrize("name", OPERATIONS)
def test_two_ranks(together: Together, name: str) -> None:
    """Collectives of 1 MiB, unshard, and the host's part of attention of 16 tokens whose messages take no time."""
    together(name)
