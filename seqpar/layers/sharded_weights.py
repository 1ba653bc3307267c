"""Weights sharded over a tensor-parallel group: the slice that each rank holds, and their form in the state dict.

``register_weight_shards`` records how a module's own parameters are sharded. After that:

* ``state_dict()`` holds DTensors where the weight is sharded evenly, and full (all-gathered) tensors where heads do not
  divide evenly or key/value heads are replicated. For the latter all ranks of the group must call it together.
* ``load_state_dict()`` takes full tensors, DTensors, or this rank's slices.

Both have the names and full shapes of the unsharded module, so a checkpoint loads under any number of ranks.

Shapes: a full weight is ``[..., full_size, ...]`` and a rank's slice ``[..., stop - start, ...]`` at dimension ``dim``.
For a projection, ``nn.Linear``'s ``[out_features, in_features]``: column-parallel is ``dim=0``, row-parallel ``dim=1``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ..comm.collectives import all_gather, all_reduce
from ..comm.handshake import all_gather_header
from ..mesh import rank_in, size_of
from ..opaque import Opaque, passed_as_it_is

_SHARDS = "_seqpar_shards"  # the attribute in which a module keeps its WeightShards, by parameter name


@passed_as_it_is(lambda shard: [shard.has_shared_rows], reads=["has_shared_rows"])
@dataclass(frozen=True)
class WeightShard(Opaque):
    """The slice of a full weight that each rank holds.

    Attributes:
        group: the tensor-parallel group; None is a single rank.
        dim: the sharded dimension.
        spans: by rank, the ``(start, stop)`` of its slice. Slices of several ranks overlap if key/value heads are
            replicated.
        full_size: the size of ``dim`` in the full weight.
    """

    group: ProcessGroup | None
    dim: int
    spans: tuple[tuple[int, int], ...]
    full_size: int

    @property
    def span(self) -> tuple[int, int]:
        """This rank's ``(start, stop)``."""
        return self.spans[rank_in(self.group)]

    @property
    def is_even(self) -> bool:
        """Whether a DTensor can describe the slices: equal, in the order of the ranks, without overlap."""
        size, remainder = divmod(self.full_size, len(self.spans))
        return remainder == 0 and all(span == (i * size, (i + 1) * size) for i, span in enumerate(self.spans))

    @cached_property
    def shared_spans(self) -> list[tuple[int, int]]:
        """The ``(start, stop)`` of rows that several ranks hold. Each is entirely inside a rank's slice or outside."""
        edges = sorted({edge for span in self.spans for edge in span})
        return [(a, b) for a, b in pairwise(edges) if sum(start <= a and b <= stop for start, stop in self.spans) > 1]

    @property
    def has_shared_rows(self) -> bool:
        """Whether some rows are held by several ranks."""
        return bool(self.shared_spans)

    def to_local(self, full: Tensor) -> Tensor:
        """This rank's slice, a view of ``full``."""
        start, stop = self.span
        return full.narrow(self.dim, start, stop - start)

    def full_shape(self, local: Tensor) -> list[int]:
        """The shape of the full weight, from a rank's slice of it."""
        return [*local.shape[: self.dim], self.full_size, *local.shape[self.dim + 1 :]]

    def all_gather(self, local: Tensor) -> Tensor:
        """The full weight, on every rank of the group, from every rank's slice."""
        lengths = [stop - start for start, stop in self.spans]
        by_rank = all_gather(local, lengths, self.dim, self.group).split(lengths, self.dim)
        full = local.new_empty(self.full_shape(local))
        # Overlapping slices hold the same values, so the order of the copies does not matter.
        for (start, stop), part in zip(self.spans, by_rank, strict=True):
            full.narrow(self.dim, start, stop - start).copy_(part)
        return full

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightShard:
        return self  # process groups cannot be copied


def make_spans(
    group: ProcessGroup | None, range_of_rank: Callable[[int], range], rows_per_item: int = 1
) -> tuple[tuple[int, int], ...]:
    """The spans of all ranks.

    Args:
        group: the tensor-parallel group.
        range_of_rank: the items (heads, or rows) of a rank.
        rows_per_item: the rows of the weight for each item, such as head_dim for a head.
    """
    ranges = (range_of_rank(rank) for rank in range(size_of(group)))
    return tuple((r.start * rows_per_item, r.stop * rows_per_item) for r in ranges)


def weight_shards(module: nn.Module) -> dict[Tensor, WeightShard]:
    """The WeightShard of every parameter of ``module`` and its submodules that is sharded.

    It is looked up by the parameters' names, because the parameters themselves are replaced by ``to_empty``, by a deep
    copy, by ``load_state_dict(assign=True)`` and by FSDP.
    """
    return {
        getattr(submodule, name): shard
        for submodule in module.modules()
        for name, shard in getattr(submodule, _SHARDS, {}).items()
    }


def register_weight_shards(module: nn.Module, shards: dict[str, WeightShard]) -> None:
    """Record how ``module``'s own parameters are sharded, by name, and convert them in its state dict."""
    shards = {name: shard for name, shard in shards.items() if getattr(module, name) is not None}
    setattr(module, _SHARDS, shards)

    def save(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name, shard in shards.items():
            if prefix + name in state and size_of(shard.group) > 1:
                state[prefix + name] = _to_state_dict(state[prefix + name], shard)

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for name, shard in shards.items():
            if prefix + name in state:
                state[prefix + name] = _from_state_dict(state[prefix + name], shard, getattr(module, name))

    module.register_state_dict_post_hook(save)
    module.register_load_state_dict_pre_hook(load)


def _mesh_of(group: ProcessGroup, device_type: str) -> DeviceMesh:
    """``group`` as a mesh of one dimension, for DTensors. It is not kept, because it keeps the group alive."""
    return DeviceMesh.from_group(group, device_type)


def _to_state_dict(local: Tensor, shard: WeightShard) -> Tensor:
    """A DTensor if the slices are even, else the all-gathered full weight."""
    if isinstance(local, DTensor):  # FSDP has sharded this rank's slice once more
        local = local.full_tensor()
    if shard.is_even and shard.group is not None:
        return DTensor.from_local(local, _mesh_of(shard.group, local.device.type), [Shard(shard.dim)], run_check=False)
    # If only some ranks make this call, they raise an error that names the missing ranks.
    all_gather_header(lambda: _SavedWeight(shard.full_size, local.dtype), shard.group)
    return shard.all_gather(local)


class _SavedWeight(NamedTuple):
    """A weight that the ranks all-gather for a state dict."""

    full_size: int
    dtype: torch.dtype


def _from_state_dict(value: Tensor, shard: WeightShard, parameter: Tensor) -> Tensor:
    """This rank's slice of a loaded value, sharded once more where FSDP has sharded ``parameter``."""
    local = _local_slice(value, shard)
    if isinstance(parameter, DTensor) and not isinstance(local, DTensor):
        return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return local


def _local_slice(value: Tensor, shard: WeightShard) -> Tensor:
    """This rank's slice of a DTensor or a full tensor; a slice is returned as it is."""
    start, stop = shard.span
    if isinstance(value, DTensor):
        if shard.is_even and shard.group is not None and value.device_mesh == _mesh_of(shard.group, value.device.type):
            return value.to_local()
        value = value.full_tensor()
    if value.shape[shard.dim] == shard.full_size:
        return shard.to_local(value)
    if value.shape[shard.dim] != stop - start:
        raise ValueError(
            f"state dict: dimension {shard.dim} of {tuple(value.shape)} has {value.shape[shard.dim]} entries; expected "
            f"the full weight's {shard.full_size} or this rank's {stop - start}; pass the full weight"
        )
    return value


class _AllReduceSharedRows(torch.autograd.Function):
    """Forward is the identity; backward sums the gradient of rows that several ranks hold."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shard: WeightShard) -> Tensor:
        ctx.shard = shard
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_shared_rows(grad, ctx.shard), None


@torch.library.custom_op("seqpar::sum_shared_rows", mutates_args=())
def _sum_shared_rows(grad: Tensor, shard: WeightShard) -> Tensor:
    """``grad`` with its shared rows summed over the ranks that hold them."""
    # Different heads are shared by different ranks. One all-reduce of all shared rows over the whole group avoids a
    # process group for each set of ranks.
    dim, (start, stop) = shard.dim, shard.span
    sizes = [b - a for a, b in shard.shared_spans]
    shared = grad.new_zeros(
        *grad.shape[:dim], sum(sizes), *grad.shape[dim + 1 :], dtype=torch.promote_types(grad.dtype, torch.float32)
    )
    total = grad.clone()
    held = [
        (total.narrow(dim, a - start, b - a), rows)
        for (a, b), rows in zip(shard.shared_spans, shared.split(sizes, dim), strict=True)
        if start <= a and b <= stop
    ]
    for own, rows in held:
        rows.copy_(own)
    all_reduce(shared, shard.group)
    for own, rows in held:
        own.copy_(rows)
    return total


@_sum_shared_rows.register_fake
def _(grad: Tensor, shard: WeightShard) -> Tensor:
    return torch.empty_like(grad)


def with_reduced_gradient(module: nn.Module, name: str) -> Tensor:
    """The weight ``name`` of ``module``, for use in forward.

    If several ranks hold the same rows (replicated key/value heads), its gradient is summed over those ranks, so that
    the copies stay equal.
    """
    weight: Tensor = getattr(module, name)
    shard: WeightShard | None = getattr(module, _SHARDS, {}).get(name)
    if shard is None or not shard.has_shared_rows:
        return weight
    out: Tensor = _AllReduceSharedRows.apply(weight, shard)
    return out
