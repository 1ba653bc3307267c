"""The choice of an attention backend."""

from __future__ import annotations

import pytest
import torch

import seqpar
from seqpar.kernels import BACKENDS
from seqpar.kernels.reference import ReferenceBackend


class NonDeterministic(ReferenceBackend):
    """Stands for a backend whose gradients depend on the order of atomic additions."""

    name = "atomic"
    deterministic = False


@pytest.mark.parametrize("named", [False, True])
def test_deterministic_leaves_out_other_backends(named: bool) -> None:
    rest = dict(BACKENDS)
    BACKENDS.clear()
    BACKENDS.update({"atomic": NonDeterministic(), **rest})
    try:
        used = []
        for deterministic in (False, True):
            q, k, v = torch.randn(3, 1, 8, 2, 4).requires_grad_().unbind()
            with seqpar.trace() as t:
                backend = "atomic" if named else "auto"
                out = seqpar.attention(q, k, v, strategy="local", backend=backend, deterministic=deterministic)
                out.sum().backward()
            used.append(set(t.backends))
    finally:
        BACKENDS.clear()
        BACKENDS.update(rest)
    assert used == [{"atomic"}, {"cpu"}]


def test_present_backends_are_deterministic() -> None:
    """Two runs of forward and backward give the same bits."""
    made = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 200, heads, 16, generator=made) for heads in (4, 2, 2)]
    for backend in ("cpu", "reference"):
        assert BACKENDS[backend].deterministic
        runs = []
        for _ in range(2):
            q, k, v = (x.clone().requires_grad_() for x in tensors)
            out = seqpar.attention(q, k, v, strategy="local", backend=backend)
            runs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), backend
