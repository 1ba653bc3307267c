"""Attention on cuDNN's kernels for key intervals, from the package nvidia-cudnn-frontend.

These kernels read a plan: which blocks of keys the queries of a block see in whole, and which in part, with one bit for
each pair. The package makes a plan on the GPU, and the host waits for it once. One plan serves the forward and the
backward of all layers. It is kept with the key intervals and freed with them.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base.cache import is_captured, outside_modes, refuse_capture
from ..schedule.rows import KeyIntervals
from .bands import Abilities, KernelCall
from .base import head_dims
from .flash import PackageBackend
from .library import Options, PreparedCall

_OLDEST = 1, 32  # the plans of older versions differ
_CAPABILITIES = (9, 0), (10, 0), (10, 3)
_FORWARD, _BACKWARD = "execution._flex_attention_forward", "execution._flex_attention_backward"


class CudnnFlexBackend(PackageBackend):
    """cuDNN's kernels for key intervals, several for each query. Every step is one call, whatever its mask."""

    name = "cudnn_flex"
    module, install, hub = "cudnn.flex_attention", "pip install 'seqpar[cudnn]'", None
    required: ClassVar = {
        "create_mask_plan": ("build_backward",),
        _FORWARD: ("mask_plan", "softmax_scale", "return_lse"),
        _BACKWARD: ("mask_plan", "softmax_scale", "deterministic"),
    }
    softcap = False
    capabilities = (9, 10)
    abilities = Abilities(intervals=True)

    def unavailable(self) -> str | None:
        cuda = torch.version.cuda
        if cuda is not None and int(cuda.split(".")[0]) < 13:
            return f"this PyTorch is built with CUDA {cuda}, and nvidia-cudnn-frontend needs CUDA 13"
        if (why := super().unavailable()) is not None:
            return why
        version = import_module("cudnn").__version__
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
            return f"nvidia-cudnn-frontend is {version}, and 1.32 or newer is needed ({self.install})"
        return None

    def refused_head_dim(self, head_dim: int, v_head_dim: int, capability: tuple[int, int]) -> str | None:
        if capability not in _CAPABILITIES:
            return f"compute capability {capability[0]}.{capability[1]} (9.0, 10.0 and 10.3 only)"
        if max(head_dim, v_head_dim) <= 128 or (head_dim, v_head_dim) in ((192, 128), (256, 256)):
            return None
        return f"{head_dims(head_dim, v_head_dim)} (up to 128, 192 and 128, or 256)"

    def launches(self, intervals: KeyIntervals, q: Tensor, k: Tensor) -> list[PreparedCall]:
        return [PreparedCall(KernelCall(0, q.shape[1], 0, k.shape[1], -1, -1, every_row=True, masked=True))]

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
        plan = self._plan(q, k, v, options)
        out, lse, *_ = self.call(
            _FORWARD, q, k, v, mask_plan=plan, softmax_scale=options.softmax_scale, return_lse=True
        )  # fmt: skip
        return out, lse

    def call_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        plan = self._plan(q, k, v, options)
        dq, dk, dv = self.call(
            _BACKWARD, q, k, v, out, dout, lse, mask_plan=plan, softmax_scale=options.softmax_scale,
            deterministic=self.deterministic,
        )  # fmt: skip
        return dq, dk, dv

    def _plan(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
        intervals = options.intervals
        assert intervals is not None  # every call is masked
        key = self.name, q.shape, k.shape, v.shape, q.dtype, q.device
        if key not in intervals.tiles:
            if is_captured():
                refuse_capture()
            with outside_modes():
                endpoints = mask_endpoints(intervals, len(q))
                intervals.tiles[key] = self.call("create_mask_plan", endpoints, q, k, v, build_backward=True)
        return intervals.tiles[key]


def mask_endpoints(intervals: KeyIntervals, batch: int) -> Tensor:
    """The key intervals as cuDNN takes them: int32 ``[1, 1 + 2 * parts, batch * q_len]``.

    A query with the endpoints ``f0, f1, f2, ...``, which do not decrease, sees the keys ``0 <= j < f0``,
    ``f1 <= j < f2`` and so on of its batch row.
    """
    lo, hi = (x.view(-1, *x.shape[-2:]).expand(-1, batch, -1).flatten(1) for x in (intervals.lo, intervals.hi))
    # The intervals of a query in increasing order, those without keys behind the last key that it sees. No two overlap,
    # so each end is sorted by itself.
    last, seen = hi.amax(0), lo < hi
    lo, hi = (torch.where(seen, x, last).sort(0).values for x in (lo, hi))
    return torch.cat((torch.zeros_like(lo[:1]), torch.stack((lo, hi), 1).flatten(0, 1)))[None]
