"""PyTorch's fused symmetric-memory operators: an all-gather with the GEMM after it, a GEMM with its reduce-scatter."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_symm_mem_groups: set[str] = set()  # names of the groups for which symmetric memory is enabled


def symmetric_memory_reason(group: ProcessGroup, device: torch.device, even: bool) -> str | None:
    """Why PyTorch's fused symmetric-memory operators cannot run over this group, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it needs NVIDIA GPUs, and the tensors are on {device.type}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs NVLink multicast (Hopper or later)"
    # torchrun numbers the ranks host by host, and says how many each host runs.
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    if len({rank // per_host for rank in dist.get_process_group_ranks(group)}) > 1:
        return "the group spans several hosts"
    if not even:
        return "it needs shards of equal length in the contiguous layout"
    if group.group_name not in _symm_mem_groups:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        try:
            enable_symm_mem_for_group(group.group_name)
        except RuntimeError as error:
            return str(error)
        _symm_mem_groups.add(group.group_name)
    return None


def all_gather_matmul(x: Tensor, weights: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """All-gather ``x [b, s, in]`` along the sequence and multiply it by each ``weight [out, in]``, fused."""
    assert group is not None
    _, outs = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t() for w in weights], 1, group.group_name)
    return list(outs)


def matmul_reduce_scatter(x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
    """``x [b, t, in] @ weight [in, out]``, summed over the ranks and scattered along the sequence, fused."""
    assert group is not None
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", 1, group.group_name)
    return y
