"""ring-flash-attn: zigzag rings, and Llama 3's all-gather for packed documents."""

from __future__ import annotations

import torch
from torch import Tensor

from seqpar.cli.bench_runners import BenchAttention, BenchSetting, RefusalError

NAME = "ring-flash-attn"


def make(setting: BenchSetting) -> BenchAttention:
    import ring_flash_attn

    setting.need_cuda()
    setting.need_half()
    setting.need_equal_head_dims()
    ranks = setting.group.size()
    if setting.case.causal is not None:
        setting.need_divisible(2 * ranks)
        causal = setting.case.causal
        function = ring_flash_attn.zigzag_ring_flash_attn_func if causal else ring_flash_attn.ring_flash_attn_func

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = function(q, k, v, causal=causal, group=setting.group)
            return out

        return BenchAttention(attention, setting.positions("zigzag" if causal else "contiguous"), any_group=True)
    boundaries = setting.boundaries()
    if boundaries is None:
        raise RefusalError(f"no mask {setting.case.mask}: causal, full and packed documents only")
    if setting.case.batch > 1:
        raise RefusalError("packed documents in one row only")
    setting.need_divisible(ranks)
    cu_seqlens = torch.tensor(boundaries, dtype=torch.int32, device=setting.device)
    prepared = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, setting.group.rank(), ranks)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cu_q, cu_k, longest_q, longest_k, rows = prepared
        out: Tensor = ring_flash_attn.llama3_flash_attn_varlen_func(
            q[0],
            k[0],
            v[0],
            cu_q,
            cu_k,
            longest_q,
            longest_k,
            heads_k_stride=1,
            local_k_slice=rows,
            causal=True,
            group=setting.group,
        )
        return out[None]

    return BenchAttention(packed, setting.positions(), any_group=True)
