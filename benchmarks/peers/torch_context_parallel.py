"""PyTorch's own ring: inside the context manager ``context_parallel``, ``scaled_dot_product_attention`` is a ring."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.nn import functional

from seqpar.cli.bench_runners import BenchAttention, BenchSetting, RefusalError

NAME = "PyTorch context_parallel"


def make(setting: BenchSetting) -> BenchAttention:
    from torch.distributed.tensor.experimental import context_parallel

    if setting.device.type != "cuda":
        raise RefusalError("it has no attention on CPUs: only the CUDA kernels of scaled_dot_product_attention")
    setting.need_half()
    causal = setting.need_causal_or_full()
    setting.need_equal_head_dims()
    ranks = setting.group.size()
    setting.need_divisible(2 * ranks)
    mesh = DeviceMesh.from_group(setting.group, "cuda")
    grouped = setting.case.heads != setting.case.kv_heads

    def block() -> AbstractContextManager[Any]:
        # context_parallel shards this buffer, and takes the length of the sequence from it.
        buffer = torch.zeros(1, setting.case.seq_len, device=setting.device)
        context: AbstractContextManager[Any] = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1])
        return context

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        # The name is looked up at each call, because context_parallel replaces the function.
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

    return BenchAttention(attention, setting.positions("zigzag"), block=block)
