"""The choice of an attention backend."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import seqpar
from seqpar import Mask
from seqpar.kernels import BACKENDS, BackendChoice, BackendName, _warn_of_reference
from seqpar.kernels.base import Score
from seqpar.kernels.elementwise import interpreted, targeted
from seqpar.kernels.reference import ReferenceBackend
from seqpar.kernels.triton import TritonBackend

from ..problems import present_backends
from ..reference import assert_close


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
            options: dict[str, Any] = {"backend": "atomic" if named else "auto", "deterministic": deterministic}
            layer = seqpar.ParallelAttention("ring", 8, 2, **options)
            with seqpar.trace() as of_function:
                seqpar.attention(q, k, v, strategy="local", **options).sum().backward()
            with seqpar.trace() as of_layer:
                layer(q.flatten(2)).sum().backward()
            used += [set(of_function.backends), set(of_layer.backends)]
    finally:
        BACKENDS.clear()
        BACKENDS.update(rest)
    assert used == [{"atomic"}] * 2 + [{"cpu"}] * 2


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Fake CUDA tensors; what is cached about devices and warnings is forgotten afterwards."""
    monkeypatch.setattr("seqpar.kernels.triton.unavailable", lambda: None)
    for cached in (targeted, _warn_of_reference):
        cached.cache_clear()
    with FakeTensorMode() as mode:
        yield mode
    for cached in (targeted, _warn_of_reference):
        cached.cache_clear()


@pytest.mark.skipif(interpreted(), reason="the interpreter runs no GPU tensors")
@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus_that_triton_does_not_target(
    gpu: FakeTensorMode, capability: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q = torch.empty(1, 8, 2, 64, dtype=dtype, device="cuda")
        why = TritonBackend().unsupported(q, q, Score(1.0), lse_gradient=False)
        assert why is None if runs else why is not None and "compute capability is below 8.0" in why


@pytest.mark.skipif(interpreted(), reason="the interpreter runs no GPU tensors")
def test_a_gpu_left_with_the_reference_warns_once(gpu: FakeTensorMode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def chosen(name: str, dtype: torch.dtype, head_dim: int = 64) -> str:
        q = torch.empty(1, 8, 2, head_dim, dtype=dtype, device="cuda")
        return BackendChoice(name, q).backend(q, q, Score(1.0)).name

    with pytest.warns(RuntimeWarning, match=r"triton: torch.float64 \(float16, bfloat16 and float32 only\)") as warned:
        assert [chosen("auto", torch.float64) for _ in range(2)] == ["reference"] * 2
    assert len(warned) == 1
    with pytest.warns(RuntimeWarning, match="head_dim=1024"):
        assert chosen("triton", torch.bfloat16, 1024) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen("reference", torch.float64, 32) == "reference"  # as asked for
        assert chosen("auto", torch.bfloat16) == "triton"


@pytest.mark.skipif(interpreted(), reason="the interpreter runs no GPU tensors")
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_wide_heads_on_a_gpu_run_on_triton(
    gpu: FakeTensorMode, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def chosen(head_dim: int, v_head_dim: int, dtype: torch.dtype = torch.bfloat16) -> str:
        q, k = (torch.empty(1, 8, heads, head_dim, dtype=dtype, device="cuda") for heads in (16, 1))
        return BackendChoice("auto", q).backend(q, k, Score(1.0), v_head_dim=v_head_dim).name

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dims in ((512, 512), (576, 512)):
            assert chosen(*dims) == "triton"
    with pytest.warns(RuntimeWarning, match=r"head_dim=576 \(at most head_dim=576 of q and k, 512 of v in torch.bf"):
        assert chosen(576, 576) == "reference"
    with pytest.warns(
        RuntimeWarning, match=r"head_dim=576 of q and k, 512 of v \(at most head_dim=256 in torch.float32"
    ):
        assert chosen(576, 512, torch.float32) == "reference"


def test_an_error_of_the_compiler_says_what_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    error = type("PTXASError", (Exception,), {"__module__": "triton.runtime.errors"})

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("no such instruction")

    kernels: Any = SimpleNamespace(attention_forward=fail, attention_backward=fail)
    monkeypatch.setitem(sys.modules, "seqpar.triton_kernels", kernels)
    monkeypatch.setattr(seqpar, "triton_kernels", kernels, raising=False)
    q = torch.zeros(1, 4, 1, 16)
    intervals: Any = SimpleNamespace(to=lambda device: None)
    with pytest.raises(RuntimeError, match="pass backend='reference'") as raised:
        TritonBackend().forward(q, q, q, intervals, Score(1.0), None, True)
    assert isinstance(raised.value.__cause__, error)


@pytest.mark.parametrize("backend", present_backends())
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
    assert_close(out[:, :, 0], plain[:, :, 0])
    assert_close(lse[:, 0], plain_lse[:, 0])
    assert (out[:, :8] == 0).all() and (lse[:, 0, :8] == -torch.inf).all()
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, sinks))
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert gradients[-1][0] == 0


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    """PyTorch's CPU kernel hides keys before it scales: -inf times 0 is NaN, and times -0.5 it is inf."""
    q, k, v = torch.randn(3, 1, 40, 2, 8).unbind(0)
    with seqpar.trace() as t:
        out = seqpar.attention(q, k, v, strategy="local", softmax_scale=scale, backend="cpu")
    queries, keys, values = (x.double().transpose(1, 2) for x in (q, k, v))
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    expected = (queries @ keys.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ values
    assert_close(out, expected.transpose(1, 2), torch.float32)
    assert t.backends and "cpu" not in t.backends


def test_triton_is_made_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "unavailable", lambda self: None)
    monkeypatch.setattr(TritonBackend, "unsupported", lambda self, q, k, score, **_: None)
    q = torch.zeros(1, 4, 2, 8)
    for deterministic in (False, True):
        backend = BackendChoice("triton", q, deterministic).backend(q, q, Score(1.0))
        assert isinstance(backend, TritonBackend) and backend.deterministic == deterministic


def test_present_backends_are_deterministic() -> None:
    """Two runs of forward and backward give the same bits."""
    made = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 200, heads, 16, generator=made) for heads in (4, 2, 2)]
    names = [name for name in present_backends() if BACKENDS[name].deterministic]
    assert {"cpu", "reference"} <= {*names}
    for backend in names:
        runs = []
        for _ in range(2):
            q, k, v = (x.clone().requires_grad_() for x in tensors)
            out = seqpar.attention(q, k, v, strategy="local", backend=cast(BackendName, backend))
            runs.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), backend
