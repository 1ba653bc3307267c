"""yunchang (USP): ``LongContextAttention`` as Ulysses, with a ring of one rank. On CPUs it has no backward."""

from __future__ import annotations

from torch import Tensor

from seqpar.cli.bench_runners import BenchAttention, BenchSetting, RefusalError

NAME = "yunchang LongContextAttention"


def make(setting: BenchSetting) -> BenchAttention:
    from yunchang import LongContextAttention
    from yunchang.globals import HAS_FLASH_ATTN, PROCESS_GROUP
    from yunchang.kernels import AttnType

    causal = setting.need_causal_or_full()
    setting.need_equal_head_dims()
    setting.need_divisible(setting.group.size())
    setting.need_heads(setting.group.size())
    cuda = setting.device.type == "cuda"
    if cuda and not HAS_FLASH_ATTN:
        raise RefusalError("flash_attn is not installed")
    if not cuda and setting.case.heads != setting.case.kv_heads:
        raise RefusalError("its attention for CPUs has no grouped heads")
    # The layer's constructor takes its process groups from here.
    PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG = setting.group, setting.alone
    layer = LongContextAttention(ring_impl_type="basic", attn_type=AttnType.FA if cuda else AttnType.TORCH_MATH)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = layer(q, k, v, causal=causal)
        return out

    why = None if cuda else "its attention for CPUs has none"
    return BenchAttention(attention, setting.positions(), no_backward=why, any_group=True)
