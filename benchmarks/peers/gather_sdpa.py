"""All-gather of k and v, then PyTorch's attention under a mask, as users would write it without a package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seqpar.cli.bench_runners import BenchAttention, BenchSetting, sdpa
from seqpar.comm.collectives import all_gather_single, reduce_scatter_single

NAME = "all-gather + SDPA"


class _AllGather(torch.autograd.Function):
    """Concatenate the ranks' ``x [b, s, n, d]`` along s; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        rows = x.transpose(0, 1).contiguous()  # [s, b, n, d]
        gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        all_gather_single(gathered, rows, group=group)
        return gathered.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        rows = grads[0].transpose(0, 1).contiguous()
        own = rows.new_empty(rows.shape[0] // ctx.group.size(), *rows.shape[1:])
        reduce_scatter_single(own, rows, group=ctx.group)
        return own.transpose(0, 1), None


def make(setting: BenchSetting) -> BenchAttention:
    setting.need_divisible(setting.group.size())
    positions = setting.positions()
    local = sdpa(setting, positions)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (_AllGather.apply(x, setting.group) for x in (k, v))  # type: ignore[no-untyped-call]
        return local(q, k, v)

    return BenchAttention(attention, positions, any_group=True)
