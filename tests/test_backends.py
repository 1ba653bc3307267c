"""The choice of an attention backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Mask
from seqpar.kernels import BACKENDS, BackendName
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


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_sink_of_minus_infinity_is_no_sink(backend: BackendName) -> None:
    """Also for the queries that see no key: 0 and -inf, and no NaN in forward or backward."""
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 8, generator=made).requires_grad_() for _ in range(3))
    sinks = torch.tensor([-torch.inf, 0.5]).requires_grad_()
    mask = Mask.padding(8, 30)

    def run(sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return seqpar.attention(q, k, v, strategy="local", mask=mask, sinks=sinks, backend=backend, return_lse=True)

    out, lse = run(sinks)
    plain, plain_lse = run(None)
    torch.testing.assert_close(out[:, :, 0], plain[:, :, 0])
    torch.testing.assert_close(lse[:, 0], plain_lse[:, 0])
    assert (out[:, :8] == 0).all() and (lse[:, 0, :8] == -torch.inf).all()
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, sinks))
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert gradients[-1][0] == 0


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
