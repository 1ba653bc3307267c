"""MagiAttention: packed documents and causal masks, dispatched by its own solver."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from seqpar.cli.bench_runners import BenchAttention, BenchSetting, RefusalError

NAME = "MagiAttention"
_CHUNK = 512  # tokens that are dispatched together


def make(setting: BenchSetting) -> BenchAttention:
    from magi_attention.api import calc_attn, compute_pad_size, get_position_ids, magi_attn_flex_key
    from magi_attention.common import AttnRanges
    from magi_attention.common.enum import AttnMaskType

    setting.need_cuda()
    setting.need_half()
    setting.need_equal_head_dims()
    case = setting.case
    if case.batch > 1:
        raise RefusalError("one row only")
    boundaries = [0, case.seq_len] if case.causal is False else setting.boundaries()
    if boundaries is None:
        raise RefusalError(f"its adapter has no mask {case.mask}: causal, full and packed documents only")
    padding = compute_pad_size(total_seqlen_q=case.seq_len, cp_size=setting.group.size(), chunk_size=_CHUNK)
    if padding:
        raise RefusalError(f"{case.seq_len:,} tokens do not divide by its chunks of {_CHUNK} on every rank")
    ranges = [list(pair) for pair in pairwise(boundaries)]
    kind = AttnMaskType.FULL if case.causal is False else AttnMaskType.CAUSAL
    key = magi_attn_flex_key(
        q_ranges=AttnRanges.from_ranges(ranges),
        k_ranges=AttnRanges.from_ranges(ranges),
        attn_mask_type=[kind] * len(ranges),
        total_seqlen_q=case.seq_len,
        total_seqlen_k=case.seq_len,
        num_heads_q=case.heads,
        num_heads_kv=case.kv_heads,
        head_dim=case.head_dim,
        pad_size=0,
        chunk_size=_CHUNK,
        cp_group_or_mesh=setting.group,
    )

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = calc_attn(q=q[0], k=k[0], v=v[0], key=key)[0]
        return out[None]

    return BenchAttention(attention, get_position_ids(key).to(torch.int64).cpu())
