"""Weights sharded over a tensor-parallel group: what each rank holds, and how whole weights go in and out.

A module that holds shards says so with ``shard_weights``; its ``state_dict`` then carries DTensors where every rank's
share is what a DTensor would give it, and whole tensors (gathered, on all ranks of the group together) where heads do
not divide or are replicated. ``load_state_dict`` takes whole tensors, DTensors, or this rank's shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..comm.collectives import all_gather
from ..mesh import rank_in, size_of

_SHARDS = "_seqpar_shards"  # the attribute of a module that holds them


@dataclass(frozen=True)
class WeightShard:
    """Which slice of a whole weight a rank holds.

    Attributes:
        group: the tensor-parallel group; None is one rank.
        dim: the sharded dimension.
        spans: by rank, the (start, stop) of the rows it holds. Ranks may share rows (replicated key/value heads).
        size: the whole dimension.
    """

    group: ProcessGroup | None
    dim: int
    spans: tuple[tuple[int, int], ...]
    size: int

    @property
    def span(self) -> tuple[int, int]:
        return self.spans[rank_in(self.group)]

    @property
    def even(self) -> bool:
        """Whether the spans are a DTensor's: equal, in order, without overlap."""
        step, rest = divmod(self.size, len(self.spans))
        return rest == 0 and all(span == (i * step, (i + 1) * step) for i, span in enumerate(self.spans))

    @property
    def shared(self) -> bool:
        """Whether two ranks hold the same rows."""
        return sum(stop - start for start, stop in self.spans) > self.size

    def take(self, whole: Tensor) -> Tensor:
        """This rank's slice."""
        start, stop = self.span
        return whole.narrow(self.dim, start, stop - start)

    def whole_shape(self, local: Tensor) -> list[int]:
        """The shape of the weight of which ``local`` is a slice."""
        return [*local.shape[: self.dim], self.size, *local.shape[self.dim + 1 :]]

    def gather(self, local: Tensor) -> Tensor:
        """The whole weight, on every rank of the group."""
        lengths = [stop - start for start, stop in self.spans]
        parts = all_gather(local, lengths, self.dim, self.group).split(lengths, self.dim)
        whole = local.new_empty(self.whole_shape(local))
        for (start, stop), part in zip(self.spans, parts, strict=True):
            whole.narrow(self.dim, start, stop - start).copy_(part)
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightShard:
        return self  # groups cannot be copied


def weight_shards(module: nn.Module) -> dict[Tensor, WeightShard]:
    """How those parameters of ``module`` that are sharded over a tensor-parallel group are.

    Modules know it by the parameters' names: parameters themselves are replaced by ``to_empty``, by a copy, by
    ``load_state_dict(assign=True)`` and by FSDP.
    """
    return {
        getattr(part, name): shard for part in module.modules() for name, shard in getattr(part, _SHARDS, {}).items()
    }


def make_spans(
    group: ProcessGroup | None, of_rank: Callable[[int], range], unit: int = 1
) -> tuple[tuple[int, int], ...]:
    """The spans of all ranks, from the heads (or rows) of each and the rows of one head."""
    ranges = (of_rank(rank) for rank in range(size_of(group)))
    return tuple((r.start * unit, r.stop * unit) for r in ranges)


def shard_weights(module: nn.Module, shards: dict[str, WeightShard]) -> None:
    """Declare how ``module``'s own parameters are sharded, by name, and hook its state dict to it."""
    shards = {name: shard for name, shard in shards.items() if getattr(module, name) is not None}
    setattr(module, _SHARDS, shards)

    def save(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name, shard in shards.items():
            if prefix + name in state and size_of(shard.group) > 1:
                state[prefix + name] = _whole(state[prefix + name], shard)

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, shard in shards.items():
            if prefix + name in state:
                state[prefix + name] = _local(state[prefix + name], shard, getattr(module, name))

    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)


@lru_cache(maxsize=64)
def _mesh_of(group: ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


def _whole(local: Tensor, shard: WeightShard) -> Tensor:
    if isinstance(local, DTensor):  # FSDP cut this rank's share again
        local = local.full_tensor()
    if shard.even and shard.group is not None:
        return DTensor.from_local(local, _mesh_of(shard.group, local.device.type), [Shard(shard.dim)], run_check=False)
    return shard.gather(local)


def _local(value: Tensor, shard: WeightShard, parameter: Tensor) -> Tensor:
    local = _share(value, shard)
    if isinstance(parameter, DTensor) and not isinstance(local, DTensor):  # FSDP cuts it again
        return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return local


def _share(value: Tensor, shard: WeightShard) -> Tensor:
    start, stop = shard.span
    if isinstance(value, DTensor):
        if shard.even and shard.group is not None and value.device_mesh == _mesh_of(shard.group, value.device.type):
            return value.to_local()
        value = value.full_tensor()
    if value.shape[shard.dim] == shard.size:
        return shard.take(value)
    if value.shape[shard.dim] != stop - start:
        raise ValueError(
            f"state dict: dimension {shard.dim} has {value.shape[shard.dim]} entries; the whole weight has "
            f"{shard.size} and this rank's shard {stop - start}; pass one of those"
        )
    return value


class _SumShared(torch.autograd.Function):
    """The identity; backward sums the gradient of rows that several ranks hold."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shard: WeightShard) -> Tensor:
        ctx.shard = shard
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shard: WeightShard = ctx.shard
        whole = grad.new_zeros(shard.whole_shape(grad), dtype=torch.promote_types(grad.dtype, torch.float32))
        shard.take(whole).copy_(grad)
        dist.all_reduce(whole, group=shard.group)
        return shard.take(whole).to(grad.dtype), None


def sum_shared(module: nn.Module, name: str) -> Tensor:
    """That weight, whose gradient is summed over the ranks that hold the same rows (replicated key/value heads)."""
    weight: Tensor = getattr(module, name)
    shard: WeightShard | None = getattr(module, _SHARDS, {}).get(name)
    if shard is None or not shard.shared:
        return weight
    summed: Tensor = _SumShared.apply(weight, shard)
    return summed
