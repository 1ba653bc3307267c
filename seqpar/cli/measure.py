"""Quick measurements of this machine: rates in operations or bytes a second, the best of a few repeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..comm.trace import trace
from ..functional import attention

_HEADS, _HEAD_DIM = 8, 64
_LONG_ENOUGH_S = 0.15
_REPEATS = 3


@dataclass(frozen=True)
class AttentionRate:
    """What a backend does on one device, in operations a second; ``ran`` is the backend that really ran."""

    ran: str
    seq_len: int
    forward: float
    forward_backward: float


def best_seconds(run: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """The shortest of ``repeats`` runs."""
    times = []
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        run()
        _synchronise(device)
        times.append(time.perf_counter() - start)
    return min(times)


def attention_rate(backend: str, device: torch.device) -> AttentionRate:
    """Causal attention of 8 heads of 64, at the shortest sequence of 512 and its doubles that takes 0.15 s.

    float32 on the CPU, bfloat16 on CUDA. A forward counts ``2 * seq_len**2 * 8 * 64`` operations (half of a full
    mask's), a backward 2.5 times that.
    """
    dtype, longest = (torch.bfloat16, 32768) if device.type == "cuda" else (torch.float32, 8192)
    seq_len = 256
    while True:
        seq_len *= 2
        shape = (1, seq_len, _HEADS, _HEAD_DIM)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        dout = torch.randn_like(q)

        def forward() -> torch.Tensor:
            out = cast(Any, attention)(q, k, v, strategy="local", backend=backend)  # noqa: B023 (called within the turn)
            assert isinstance(out, torch.Tensor)
            return out

        with trace() as t:
            forward()  # compiles and caches, where there is something to
        once = best_seconds(forward, device, 1)
        if once > _LONG_ENOUGH_S / 3 or seq_len >= longest:
            break
    seconds = best_seconds(forward, device)
    both = best_seconds(lambda: forward().backward(dout), device)
    operations = 2.0 * seq_len**2 * _HEADS * _HEAD_DIM
    ran = ", ".join(t.backends)
    return AttentionRate(ran, seq_len, operations / seconds, 3.5 * operations / both)


def matrix_rate(device: torch.device) -> float:
    """Operations a second of a square matrix product: float32 on the CPU, bfloat16 on CUDA."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1536, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    return 2.0 * n**3 / best_seconds(lambda: torch.mm(a, b), device)


def copy_rate(device: torch.device) -> float:
    """Bytes a second read and written in copying 256 MiB (1 GiB on CUDA)."""
    n = (1 << 30) if device.type == "cuda" else (256 << 20)
    source = torch.zeros(n, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2.0 * n / best_seconds(lambda: target.copy_(source), device)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
