"""PyTorch's fused symmetric-memory matrix products, where the hardware has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_enabled: set[str] = set()


def symmetric_memory_reason(group: ProcessGroup, device: torch.device, even: bool) -> str | None:
    """Why the fused operators cannot serve this group, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it needs NVIDIA GPUs, and the tensors are on {device.type}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs NVLink multicast (Hopper or later)"
    if group.size() > torch.cuda.device_count():
        return "the group spans several hosts"
    if not even:
        return "it needs shards of equal length in the contiguous layout"
    if group.group_name not in _enabled:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        try:
            enable_symm_mem_for_group(group.group_name)
        except RuntimeError as error:
            return str(error)
        _enabled.add(group.group_name)
    return None


def all_gather_matmul(x: Tensor, weights: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """All-gather ``x [batch, seq_local, in]`` along the sequence and multiply by each ``weight [out, in]``."""
    _, outs = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t() for w in weights], 1, group.group_name)
    return list(outs)


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: ProcessGroup) -> Tensor:
    """``x [batch, tokens, in] @ weight [in, out]``, summed over the ranks and scattered along the sequence."""
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 1, group.group_name)
    return y
