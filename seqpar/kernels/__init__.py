"""The attention backends of this machine, and the rule by which one is chosen for a call.

``backend="auto"`` takes the first backend that can run on this machine and supports the call (dtype, device, head_dim,
features), in an order that depends on the GPU: see ``order``. If a backend is named but lacks a feature of the call,
the call falls back to the next one that has it; ``seqpar.trace()`` shows which one ran. If only the reference can run
on a GPU, a RuntimeWarning says why. Triton's interpreter (``TRITON_INTERPRET=1``) runs the kernels on a CPU for tests.
It is slow, and "auto" never chooses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..base.checks import check_choice
from ..comm.trace import count_backend, open_traces
from .base import Backend, Score
from .cpu import CpuBackend
from .cudnn import CudnnBackend, CudnnVarlenBackend
from .cudnn_flex import CudnnFlexBackend
from .elementwise import interpreted
from .flash import FlashAttention2Backend, FlashAttention3Backend, FlashAttention4Backend, TorchFlashBackend
from .hopper import HopperBackend
from .library import LibraryBackend
from .max_logit import MaxLogitBackend
from .reference import ReferenceBackend
from .triton import TritonBackend

BackendName = Literal[
    "auto",
    "triton",
    "hopper",
    "flash_attn_4",
    "flash_attn_3",
    "cudnn",
    "cudnn_varlen",
    "cudnn_flex",
    "flash_attn",
    "flash",
    "cpu",
    "reference",
]

# By the major of the compute capability: backends, fastest first, by published rates. Sources: docs/numerics.md.
_FASTEST: dict[int, tuple[str, ...]] = {
    8: ("flash_attn", "flash", "triton", "cudnn"),
    9: ("flash_attn_4", "flash_attn_3", "cudnn", "triton", "flash_attn", "flash"),
    10: ("flash_attn_4", "cudnn", "triton", "flash_attn", "flash"),
    11: ("flash_attn_4", "triton", "flash_attn", "flash"),
    12: ("flash_attn", "flash", "triton", "cudnn"),
}

# "auto", `seqpar doctor` and `seqpar bench` do not try these: no GPU has passed their checks in benchmarks/gpu.py yet.
ONLY_BY_NAME = ("hopper", "cudnn_varlen", "cudnn_flex")


def _fallback(q: Tensor, k: Tensor, v: Tensor, score: Score) -> Backend:
    """The backend for a step whose mask the kernels of a library do not support."""
    triton = BACKENDS["triton"]
    why = triton.unavailable() or triton.unsupported(q, k, score, lse_gradient=False, v_head_dim=v.shape[3])
    if why is None and not interpreted():
        return triton
    if q.is_cuda:
        _warn_of_reference(f"the library has no kernel for this mask; triton: {why}")
    return BACKENDS["reference"]


# To add a backend, add it here.
_ALL: tuple[Backend, ...] = (
    TritonBackend(),
    HopperBackend(),
    FlashAttention4Backend(_fallback),
    FlashAttention3Backend(_fallback),
    CudnnBackend(_fallback),
    CudnnVarlenBackend(_fallback),
    CudnnFlexBackend(_fallback),
    FlashAttention2Backend(_fallback),
    TorchFlashBackend(_fallback),
    CpuBackend(),
    ReferenceBackend(),
)
BACKENDS: dict[str, Backend] = {b.name: b for b in _ALL}
# Named by ``strategies`` only: what it computes is not attention.
_MAX_LOGIT = MaxLogitBackend()


@dataclass(frozen=True)
class BackendStatus:
    """Whether one backend can run on this machine."""

    name: str  # the ``backend`` of ``seqpar.attention``
    available: bool
    reason: str | None  # why it cannot run

    def __str__(self) -> str:
        return f"{self.name}: {'available' if self.available else self.reason}"


def backends() -> list[BackendStatus]:
    """The attention backends, best first: first the backends that can run on this machine, then the others, and why."""
    status = [BackendStatus(name, (why := b.unavailable()) is None, why) for name, b in BACKENDS.items()]
    return sorted(status, key=lambda s: not s.available)


def check_backend(name: str) -> None:
    """Raise a ValueError (TypeError for no string) unless ``name`` is "auto" or a backend that can run here."""
    check_choice("backend", name, ("auto", *BACKENDS))
    if name != "auto" and (why := BACKENDS[name].unavailable()) is not None:
        raise ValueError(f"backend={name!r} cannot run here: {why}; use backend='auto'")


def order(q: Tensor) -> Sequence[str]:
    """The names of the backends, in the order in which "auto" tries them for ``q [b, q, h, d]``.

    Calls of several steps have the same order. Merging the steps of a library takes less time than it saves, and a step
    whose mask the library does not support runs on ``triton``.
    """
    fastest: tuple[str, ...] = ()
    if q.is_cuda and torch.version.hip is None and torch.cuda.is_available():
        fastest = _FASTEST.get(torch.cuda.get_device_capability(q.device)[0], ())
    return [x for x in dict.fromkeys((*fastest, *BACKENDS)) if x in BACKENDS and x not in ONLY_BY_NAME]


class BackendChoice:
    """The backends that may compute calls of one kind: the named one, then the others, best first.

    Whether a backend supports these calls is asked once. Whether it can run is asked at every call, because a process
    may switch a backend off.

    Args:
        name: a name in ``BACKENDS``, or "auto".
        q: ``[b, q, h, d]``, whose device decides the order.
        deterministic: leave out backends whose gradients may differ from run to run.
    """

    def __init__(self, name: str, q: Tensor, deterministic: bool = False) -> None:
        self._name, self._deterministic = name, deterministic
        self._candidates: list[Backend] = []
        self._supports: dict[str, bool] = {}
        named = [] if name == "auto" else [name]
        others = [other for other in order(q) if other != "triton" or q.is_cuda]
        for candidate in dict.fromkeys((*named, *others)):
            backend: Backend | None = _MAX_LOGIT if candidate == _MAX_LOGIT.name else BACKENDS[candidate]
            if isinstance(backend, LibraryBackend) and backend.device_type != q.device.type:
                continue
            if deterministic and isinstance(backend, (LibraryBackend, TritonBackend)):
                backend = backend.made_deterministic()
            if backend is not None and (backend.deterministic or not deterministic):
                self._candidates.append(backend)

    def backend(
        self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool = False, v_head_dim: int | None = None
    ) -> Backend:
        """The first backend that can run and supports the call.

        Args:
            q: ``[b, q, h, d]``. k: ``[b, k, n, d]``. Equal in shape, dtype and device in all calls.
            score: how scores are computed. The same features in all calls.
            lse_gradient: whether the backward receives a gradient of the log-sum-exp.
            v_head_dim: the head_dim of v; by default the head_dim of q.
        """
        for backend in self._candidates:
            name = backend.name
            if backend.unavailable() is not None:
                continue
            if name not in self._supports:
                why = backend.unsupported(q, k, score, lse_gradient=lse_gradient, v_head_dim=v_head_dim)
                self._supports[name] = why is None
            if self._supports[name]:
                if open_traces:
                    count_backend(name)
                if name == "reference" and self._name != "reference" and q.is_cuda:
                    _warn_of_reference(_why_not(q, k, score, lse_gradient, self._deterministic, v_head_dim))
                return backend
        raise RuntimeError("no backend supports this call")  # unreachable: the reference supports every call


def _why_not(
    q: Tensor, k: Tensor, score: Score, lse_gradient: bool, deterministic: bool, v_head_dim: int | None
) -> str:
    reasons = {}
    for name, backend in BACKENDS.items():
        if name not in ("cpu", "reference", *ONLY_BY_NAME):
            reasons[name] = backend.unavailable() or backend.unsupported(
                q, k, score, lse_gradient=lse_gradient, v_head_dim=v_head_dim
            )
            if deterministic and name != "triton" and not backend.deterministic:
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
