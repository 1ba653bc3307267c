"""The attention backends of this machine, and the rule by which one is chosen for a call.

``backend="auto"`` takes the first backend of the list below that can run on this machine and supports the call (dtype,
device, head_dim, features). If a backend is named but lacks a feature of the call, the call falls back to the next one
that has it; ``seqpar.trace()`` shows which ran. Where a GPU is left with the reference, a RuntimeWarning says why. The
list, best first: triton (CUDA, ROCm), cpu, reference. Triton's interpreter (``TRITON_INTERPRET=1``) runs the kernels on
a CPU, slowly, for tests: "auto" never chooses it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..checks import check_choice
from ..comm.trace import count_backend
from .base import Backend, RepeatedKV, Score
from .cpu import CpuBackend
from .elementwise import interpreted
from .reference import ReferenceBackend
from .triton import TritonBackend

BackendName = Literal["auto", "triton", "cpu", "reference"]

# Best first. To add a backend, add it here.
BACKENDS: dict[str, Backend] = {b.name: b for b in (TritonBackend(), CpuBackend(), ReferenceBackend())}


@dataclass(frozen=True)
class BackendStatus:
    """Whether one backend can run on this machine.

    Attributes:
        name: what ``seqpar.attention(backend=...)`` takes.
        available: whether it can run.
        reason: why it cannot, or None.
    """

    name: str
    available: bool
    reason: str | None

    def __str__(self) -> str:
        return f"{self.name}: {'available' if self.available else self.reason}"


def backends() -> list[BackendStatus]:
    """The attention backends, best first: those that can run on this machine, then those that cannot, and why."""
    status = [BackendStatus(name, (why := b.unavailable()) is None, why) for name, b in BACKENDS.items()]
    return sorted(status, key=lambda s: not s.available)


def check_backend(name: str) -> None:
    """Raise a ValueError (TypeError for no string) unless ``name`` is "auto" or a backend that can run here."""
    check_choice("backend", name, ("auto", *BACKENDS))
    if name != "auto" and (why := BACKENDS[name].unavailable()) is not None:
        raise ValueError(f"backend={name!r} cannot run here: {why}; use backend='auto'")


def select(
    name: str,
    q: Tensor,
    k: Tensor,
    score: Score,
    *,
    lse_gradient: bool = False,
    deterministic: bool = False,
    kv_index: list[int] | None = None,
) -> Backend:
    """The backend for a call: the named one if it supports the call, else the best one that does.

    Args:
        name: a name in ``BACKENDS``, or "auto".
        q: ``[b, q, h, d]``. k: ``[b, k, n, d]``.
        score: how scores are computed.
        lse_gradient: whether the backward has a gradient of the log-sum-exp.
        deterministic: leave out backends whose gradients may differ from run to run.
        kv_index: the KV head of each query head, if the query heads do not form equal groups over the KV heads.
    """
    preferred = [BACKENDS[name]] if name != "auto" else []
    others = [b for b in BACKENDS.values() if not (b.name == "triton" and interpreted())]
    for backend in (*preferred, *others):
        if deterministic and not backend.deterministic:
            continue
        if backend.unavailable() is None and backend.unsupported(q, k, score, lse_gradient=lse_gradient) is None:
            count_backend(backend.name)
            if backend.name == "reference" and name != "reference" and q.is_cuda:
                _warn_of_reference(_why_not(q, k, score, lse_gradient, deterministic))
            return backend if kv_index is None else RepeatedKV(backend, torch.tensor(kv_index, device=q.device))
    raise RuntimeError("no backend supports this call")  # unreachable: the reference supports every call


def _why_not(q: Tensor, k: Tensor, score: Score, lse_gradient: bool, deterministic: bool) -> str:
    """Why each backend for GPUs cannot run a call."""
    reasons = {}
    for name, backend in BACKENDS.items():
        if name not in ("cpu", "reference"):
            reasons[name] = backend.unavailable() or backend.unsupported(q, k, score, lse_gradient=lse_gradient)
            if deterministic and not backend.deterministic:
                reasons[name] = reasons[name] or "not deterministic"
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())


@lru_cache(maxsize=64)  # once for each reason
def _warn_of_reference(why: str) -> None:
    warnings.warn(
        "seqpar: attention on this GPU runs on backend='reference', plain PyTorch, which is slow and waits for the GPU "
        f"({why})",
        RuntimeWarning,
        stacklevel=3,
    )
