"""Strategies with the Triton backend in Triton's interpreter on two processes, which carry results between steps.

Expected values come from ``strategy="local"`` in float64, which the reference backend computes.
``tests/kernels/test_triton_kernels.py`` starts a process with TRITON_INTERPRET=1 for these tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask

from ..interpreter import make_faster
from ..pool import Pool, on_ranks
from ..reference import assert_close

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton_kernels.py in a process with TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

MASKS = {
    "causal": Mask.causal(),
    "documents": Mask.documents([[0, 9, 30, 45], [0, 23, 40]], padding=True) & Mask.sliding_window(20),
    "full": Mask.full(),
}


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Pool]:
    workers = Pool(ranks=2)
    yield workers
    workers.close()


def _gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = seqpar.attention(*leaves, **options)
    assert isinstance(out, Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@on_ranks
def check_strategy_worker(
    group: ProcessGroup, strategy: str, layout: str, mask: str, dtype: torch.dtype, features: dict[str, Any]
) -> None:
    make_faster()
    torch.manual_seed(7)
    q, dout = torch.randn(2, 2, 45, 4, 12, dtype=dtype).unbind()
    k, v = torch.randn(2, 2, 45, 2, 12, dtype=dtype).unbind()
    features = dict(features)
    for name in ("sinks", "alibi_slopes"):
        if features.pop(name, False):
            features[name] = torch.rand(4)
    full = _gradients(*(x.double() for x in (q, k, v, dout)), strategy="local", mask=MASKS[mask], **features)
    local_inputs = [seqpar.shard(x, group=group, layout=layout) for x in (q, k, v, dout)]
    with seqpar.trace() as used:
        local = _gradients(
            *local_inputs, strategy=strategy, group=group, layout=layout, mask=MASKS[mask], backend="triton", **features
        )
    assert set(used.backends) == {"triton"}
    for name, actual, expected in zip(("out", "dq", "dk", "dv"), local, full, strict=True):
        assert_close(seqpar.unshard(actual, group=group, layout=layout), expected, dtype, name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("strategy", "layout", "mask", "dtype", "features"),
    [
        ("ring", "striped", "documents", torch.float32, {"sinks": True}),
        ("ring", "contiguous", "full", torch.float16, {}),
        ("ring", "zigzag", "causal", torch.float32, {"dropout_p": 0.2, "dropout_seed": 3}),
        ("ulysses", "zigzag", "documents", torch.float32, {"softcap": 3.0}),
        ("context_parallel", "striped", "causal", torch.float32, {"alibi_slopes": True}),
    ],
    ids=str,
)
def test_two_ranks(
    two_workers: Pool, strategy: str, layout: str, mask: str, dtype: torch.dtype, features: dict[str, Any]
) -> None:
    two_workers.run(2, check_strategy_worker, strategy, layout, mask, dtype, features)


@pytest.mark.thorough(dtype=[torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_invariant(dtype: torch.dtype) -> None:
    """``deterministic="invariant"``: the bits of one rank on two and three, a document's bits alone, and the values of
    float64; of documents, and of a document beside a tree, whose queries see two intervals of keys."""
    torch.manual_seed(7)
    q, dout = torch.randn(2, 1, 150, 4, 12, dtype=dtype).unbind()
    k, v = torch.randn(2, 1, 150, 2, 12, dtype=dtype).unbind()
    make_faster()
    trees = ([-1], [20]), ([-1, 0, 0], [60, 40, 30]), ([-1, -1, 1, 1], [20, 60, 40, 30])
    first, second, mask = (Mask.tree(*tree) & Mask.sliding_window(90) for tree in trees)
    if dtype == torch.float16:
        first = second = Mask.sliding_window(90)
        mask = first & Mask.documents([0, 20, 150])
    of_call: dict[str, Any] = {"mask": mask, "softcap": 3.0, "sinks": torch.rand(4)}
    expected = _gradients(*(x.double() for x in (q, k, v, dout)), strategy="local", **of_call)
    of_call |= {"deterministic": "invariant", "backend": "triton"}
    with seqpar.trace() as used:
        alone = _gradients(q, k, v, dout, strategy="local", **of_call)
    assert set(used.backends) == {"triton"}
    for name, x, y in zip(("out", "dq", "dk", "dv"), alone, expected, strict=True):
        assert_close(x, y, dtype, name)
    for document, seen in ((slice(20), first), (slice(20, 150), second)):
        of_document = [x[:, document] for x in (q, k, v, dout)]
        found = _gradients(*of_document, strategy="local", **{**of_call, "mask": seen})
        assert [torch.equal(x, y[:, document]) for x, y in zip(found, alone, strict=True)] == [True] * 4
    for ranks, layout, strategy in ((2, "zigzag", "ring"), (3, "striped", "ulysses")):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = seqpar.replay(*leaves, ranks=ranks, layout=layout, strategy=strategy, **of_call)
        found = [out, *torch.autograd.grad(out, leaves, dout)]
        assert [torch.equal(x, y) for x, y in zip(found, alone, strict=True)] == [True] * 4
