"""The loss of a sharded sequence: every rank's value is the one-device loss, every rank's gradient its share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from .batch import IGNORE, BatchShard
from .chunked import chunked_cross_entropy
from .forward import current
from .logits import LazyLogits

if TYPE_CHECKING:
    from .patch import Patch

GRADIENTS = ("auto", "share", "mean")


class TokenLoss:
    """A model's loss function while it is parallelized: cross-entropy over the tokens of the whole sequence.

    Called by the model's forward as transformers' own are; ``labels`` are shifted already.
    """

    def __init__(self, patch: Patch) -> None:
        self.patch = patch

    def __call__(
        self,
        logits: Tensor | LazyLogits,
        labels: Tensor,
        *args: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE,
        seqpar: BatchShard | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """A float32 scalar.

        Raises:
            ValueError: the labels did not come from ``shard_batch``.
        """
        call = current()
        shard = seqpar or (call.shard if call is not None else None)
        if not isinstance(shard, BatchShard) or (shard.items is None and num_items_in_batch is None):
            raise ValueError(
                "labels: they were not cut by seqpar.hf.shard_batch; give it the whole batch with 'labels'"
            )
        labels = labels.reshape(-1)
        if isinstance(logits, LazyLogits):
            hidden = logits.hidden.reshape(len(labels), -1)
            total = chunked_cross_entropy(
                hidden, logits.head, labels, logits.pointwise, ignore_index, self.patch.loss_chunk
            )
        else:
            flat = logits.reshape(len(labels), -1).float()
            total = F.cross_entropy(flat, labels, ignore_index=ignore_index, reduction="sum")
        items: Any = shard.items if num_items_in_batch is None else num_items_in_batch
        if isinstance(items, Tensor):
            items = items.to(total.device)
        if not isinstance(items, Tensor) and items == 0:
            items = total.new_zeros(())  # no label counts: not a number, as on one device
        return whole(total / items, self.patch)


def whole(share: Tensor, patch: Patch) -> Tensor:
    """The sum of the ranks' shares, on every rank; its gradient is this rank's share's (times the ranks, under a
    wrapper that averages over them)."""
    if patch.group is None or patch.ranks == 1:
        return share
    total: Tensor = _Whole.apply(share, patch.group, _scale(patch))
    return total


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, group: ProcessGroup, scale: int) -> Tensor:
        ctx.scale = scale
        total = share.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.scale, None, None


def _scale(patch: Patch) -> int:
    """By how much the wrappers around the model will divide the sum over the sequence."""
    if patch.gradients == "share":
        return 1
    if patch.gradients == "mean":
        return patch.ranks
    assert patch.group is not None
    call = current()
    averaged = _averaged_ranks(call.model) if call is not None else None
    ours = set(dist.get_process_group_ranks(patch.group))
    return patch.ranks if averaged is not None and ours <= averaged else 1


def _averaged_ranks(model: nn.Module) -> set[int] | None:
    """The ranks over which DDP or ``fully_shard`` will average the gradients of ``model``; None: there is no such."""
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None and any(m is model for m in ddp.modules()):
        return set(dist.get_process_group_ranks(ddp.process_group))
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _parameter_groups(module):
            if group.gradient_divide_factor is not None:  # the user has decided
                return None
            return set(group.mesh_info.mesh.mesh.flatten().tolist())
    return None


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    many = getattr(state, "_fsdp_param_groups", None)
    one = getattr(state, "_fsdp_param_group", None)
    return list(many) if many else [one] if one is not None else []
