"""TransformerEngine: ``DotProductAttention`` with context parallelism by point-to-point messages."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.cli.bench_runners import BenchAttention, BenchSetting

NAME = "TransformerEngine, p2p"


def make(setting: BenchSetting) -> BenchAttention:
    from transformer_engine.pytorch import DotProductAttention

    setting.need_cuda()
    setting.need_half()
    case, ranks = setting.case, setting.group.size()
    causal = setting.need_causal_or_full()
    setting.need_divisible(2 * ranks)
    layer = DotProductAttention(
        num_attention_heads=case.heads,
        kv_channels=case.head_dim if case.head_dim == case.v_head_dim else (case.head_dim, case.v_head_dim),
        num_gqa_groups=case.kv_heads,
        attention_dropout=0.0,
        qkv_format="bshd",
        attn_mask_type="causal" if causal else "no_mask",
    )
    if ranks > 1:
        layer.set_context_parallel_group(
            setting.group, dist.get_process_group_ranks(setting.group), torch.cuda.Stream(), cp_comm_type="p2p"
        )

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(q, k, v)
        return out.view(*q.shape[:3], case.v_head_dim)

    # TransformerEngine expects this layout under every mask.
    return BenchAttention(attention, setting.positions("zigzag"))
