"""DeepSpeed Ulysses: ``DistributedAttention`` around PyTorch's attention."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from torch import Tensor

from seqpar.cli.bench_runners import BenchAttention, BenchSetting, sdpa

NAME = "DeepSpeed DistributedAttention"


def make(setting: BenchSetting) -> BenchAttention:
    setting.need_divisible(setting.group.size())  # with shards of different lengths, gloo aborts the process
    local = sdpa(setting)  # all tokens of some heads, under any mask
    if setting.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.comm
    from deepspeed.sequence.layer import DistributedAttention

    if not deepspeed.comm.is_initialized():
        # DeepSpeed would now compile its all-reduce over shared memory for a minute, and attention does not use it.
        backend: Any = import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
        deepspeed.comm.init_distributed(
            dist_backend="nccl" if setting.device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False
        )

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return local(q, k, v)

    layer = DistributedAttention(attend, setting.group, scatter_idx=2, gather_idx=1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(q, k, v, 0)
        return out

    return BenchAttention(attention, setting.positions(), any_group=True)
