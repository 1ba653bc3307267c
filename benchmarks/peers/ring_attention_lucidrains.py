"""ring-attention-pytorch: a ring in plain PyTorch, striped under a causal mask."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.cli.bench_runners import BenchAttention, BenchSetting, RefusalError

NAME = "ring-attention-pytorch"
_BUCKET = 1024  # the package's default


def make(setting: BenchSetting) -> BenchAttention:
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    causal = setting.need_causal_or_full()
    setting.need_equal_head_dims()
    ranks = setting.group.size()
    if ranks != setting.world:
        raise RefusalError(f"it sends in the default group, of {setting.world} ranks, and cannot use {ranks} of them")
    setting.need_divisible(ranks)
    local = setting.case.seq_len // ranks
    bucket = min(_BUCKET, local)
    if local % bucket:
        raise RefusalError(f"a rank's {local:,} tokens do not divide by its buckets of {bucket:,}")
    striped = causal and ranks > 1
    positions = setting.positions()
    if striped:
        # Bucket j of all ranks' buckets holds the tokens j, j + buckets, j + 2 buckets, ...
        buckets = setting.case.seq_len // bucket
        first = setting.group.rank() * (local // bucket)
        own = torch.arange(first, first + local // bucket)
        positions = (own[:, None] + buckets * torch.arange(bucket)).reshape(-1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = ring_flash_attn(
            q,
            k,
            v,
            causal=causal,
            bucket_size=bucket,
            ring_reduce_col=ranks > 1,
            striped_ring_attn=striped,
            ring_size=ranks,
        )
        return out

    return BenchAttention(attention, positions)
