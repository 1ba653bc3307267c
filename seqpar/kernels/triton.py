"""Attention on the package's own Triton kernels, which take key intervals and a carry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..base.settings import switch
from ..schedule.rows import KeyIntervals
from .base import Carry, Grads, OutputGrad, Score, head_dims
from .elementwise import DTYPES, interpreted, targeted, unavailable

# By bytes of an element: the largest head_dim of q and k, and of v.
_MAX_HEAD_DIMS = {2: (576, 512), 4: (256, 256)}


class TritonBackend:
    """CUDA and ROCm GPUs, and CPU tensors under ``TRITON_INTERPRET=1`` for tests."""

    name = "triton"
    reads_delta = True

    def __init__(self, *, deterministic: bool = False) -> None:
        """``deterministic``: do not use the backward kernel that adds to ``dq`` in a different order in every run."""
        self.deterministic = deterministic

    def made_deterministic(self) -> TritonBackend:
        return type(self)(deterministic=True)

    def unavailable(self) -> str | None:
        switch("SEQPAR_TRITON_AUTOTUNE")  # raises for a value that it cannot have
        return unavailable()

    def unsupported(
        self, q: Tensor, k: Tensor, score: Score, *, lse_gradient: bool, v_head_dim: int | None = None
    ) -> str | None:
        if q.dtype not in DTYPES:
            return f"{q.dtype} (float16, bfloat16 and float32 only)"
        most, v_most = _MAX_HEAD_DIMS[q.dtype.itemsize]
        if q.shape[-1] > most or (v_head_dim or q.shape[-1]) > v_most:
            return f"{head_dims(q.shape[-1], v_head_dim)} (at most {head_dims(most, v_most)} in {q.dtype})"
        if not score.softmax_scale > 0:
            return f"softmax_scale={score.softmax_scale} (positive only)"
        if interpreted():
            if q.device.type != "cpu":
                return f"the tensors are on {q.device.type}, and TRITON_INTERPRET runs on the CPU"
            if q.dtype == torch.bfloat16:
                return "bfloat16 (Triton's interpreter multiplies it wrongly)"
        elif q.device.type != "cuda":
            return f"the tensors are on {q.device.type}"
        elif not targeted(q.device):
            return "the GPU's compute capability is below 8.0, which Triton does not compile for"
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, intervals: KeyIntervals, score: Score, carry: Carry | None, last: bool
    ) -> Carry:
        from ..triton_kernels import attention_forward

        with explain_errors(self.name):
            return attention_forward(q, k, v, intervals.to(q.device), score, carry=carry, last=last)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, output: OutputGrad, intervals: KeyIntervals, score: Score, grads: Grads
    ) -> None:
        from ..triton_kernels import attention_backward

        dout, _, lse, delta = output
        assert delta is not None
        with explain_errors(self.name):
            attention_backward(
                dout,
                q,
                k,
                v,
                lse,
                delta,
                intervals.to(q.device),
                score,
                *grads.make(q, k, v, rounded=True),
                new_dq=grads.new_dq,
                new_dkv=grads.new_dkv,
                deterministic=self.deterministic or torch.are_deterministic_algorithms_enabled(),
            )


@contextmanager
def explain_errors(name: str) -> Iterator[None]:
    """Raise errors of Triton's compiler or launcher again, with advice for the user."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("triton.") or "PassManager" in str(error):  # the latter from MLIR's C++
            first: BaseException = error
            while first.__cause__ is not None:
                first = first.__cause__
            raise RuntimeError(
                f"backend={name!r}: Triton could not compile or launch an attention kernel "
                f"({type(first).__name__}: {str(first)[:500]}); pass backend='reference', which is slower, or install "
                "another version of Triton"
            ) from error
        raise
