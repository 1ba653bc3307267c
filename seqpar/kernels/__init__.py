"""Attention backends: the registry, and the rule by which one is chosen.

``backend="auto"`` takes, for every call, the first of the list below that can run on this machine and supports the
request (dtype, device, head_dim, features). A backend asked for by name that lacks a feature of the request leaves
that call to the next that has it; ``seqpar.trace()`` shows which ran. The list, best first: triton (CUDA, ROCm),
cpu, reference. Triton's interpreter (``TRITON_INTERPRET=1``) checks the kernels on a CPU, slowly: it runs only when
``backend="triton"`` asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..comm.trace import count_backend
from .base import Backend, Score
from .cpu import CpuBackend
from .elementwise import interpreted
from .reference import ReferenceBackend
from .triton import TritonBackend

# Best first. A backend joins by standing here.
BACKENDS: dict[str, Backend] = {b.name: b for b in (TritonBackend(), CpuBackend(), ReferenceBackend())}


@dataclass(frozen=True)
class BackendStatus:
    """One backend and whether it can run here; ``reason`` says why not."""

    name: str
    available: bool
    reason: str | None

    def __str__(self) -> str:
        return f"{self.name}: {'available' if self.available else self.reason}"


def backends() -> list[BackendStatus]:
    """What can run on this machine, best first, then what cannot and why."""
    status = [BackendStatus(name, (why := b.unavailable()) is None, why) for name, b in BACKENDS.items()]
    return sorted(status, key=lambda s: not s.available)


def select(name: str, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool = False) -> Backend:
    """The backend for this request: the one named if it supports it, else the best that does."""
    preferred = [BACKENDS[name]] if name != "auto" else []
    others = (b for b in BACKENDS.values() if not (isinstance(b, TritonBackend) and interpreted()))
    for backend in (*preferred, *others):
        if backend.unavailable() is None and backend.unsupported(q, k, score, lse_gradient=lse_gradient) is None:
            count_backend(backend.name)
            return backend
    raise RuntimeError("no backend supports this request")  # unreachable: the reference supports every one


__all__ = ["BACKENDS", "Backend", "BackendStatus", "ReferenceBackend", "Score", "backends", "select"]
