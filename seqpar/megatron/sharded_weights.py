"""Weights of tensor-parallel layers: DTensor parameters over the tensor-parallel ranks.

A weight that divides over the ranks is ``Shard(dim)``. Each rank holds one chunk of it, as ``torch.chunk`` makes them.
All other weights are ``Replicate()``: each rank holds the full weight. Where heads do not divide over the ranks, a rank
computes with a part of a replicated weight, and the gradient is zero outside of this part.

Parameters have the names and shapes of the full weights. PyTorch knows from the DTensors which rank holds what:
``state_dict``, ``torch.distributed.checkpoint`` with the optimizer's state, ``clip_grad_norm_`` and ``fully_shard``,
which adds its own dimensions before the tensor-parallel one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..layers.holders import tensor_parallel_parameters
from ..placement.layout import chunk_range
from ..placement.placement import ParallelContext
from ..ranks.mesh import size_of


class WeightPart(NamedTuple):
    """The part of a replicated weight that this rank computes with: ``weight.narrow(dim, start, length)``."""

    dim: int
    start: int
    length: int


class ShardedWeights(nn.Module):
    """A module whose own parameters are DTensors over the tensor-parallel ranks, unless there is one rank."""

    # By name of a DTensor parameter. None: this rank computes with all that it holds. ``layers/holders.py`` reads it.
    tensor_parallel_parts: Mapping[str, WeightPart | None] = MappingProxyType({})

    def distribute(self, ranks: ParallelContext, **splits: int | WeightPart | None) -> None:
        """Replace full parameters by DTensors.

        Args:
            ranks: the ranks of the layer.
            splits: for each parameter the dimension in which it is sharded, or, for a replicated one, the part that
                this rank computes with. None: all of it.
        """
        if size_of(ranks.tensor) == 1:
            return
        full = {name: getattr(self, name) for name in splits if getattr(self, name) is not None}
        self.tensor_parallel_parts = {
            name: part if isinstance(part := splits[name], WeightPart) else None for name in full
        }
        for name, weight in full.items():
            dim = splits[name]
            placement = Shard(dim) if isinstance(dim, int) else Replicate()
            meta = TensorMeta(weight.shape, weight.stride(), weight.dtype)
            spec = DTensorSpec(_tensor_mesh(ranks, weight.device), (placement,), tensor_meta=meta)
            setattr(self, name, nn.Parameter(_shard(weight.detach(), spec)))

    def local_weight(self, name: str) -> Any:
        """The part of parameter ``name`` that this rank computes with, a plain tensor; None if there is no such one."""
        weight = getattr(self, name)
        if not isinstance(weight, DTensor):
            return weight
        if weight.device_mesh.ndim > 1:
            raise ValueError(
                f"{name}: fully_shard has sharded this weight and not gathered it; call fully_shard on the whole "
                "tensor-parallel layer, or on a module around it, not on a projection inside"
            )
        # A shard has the gradients of the losses of all ranks of tp. A replicated weight has them on several ranks, and
        # ``sync_gradients`` computes their mean.
        losses = weight.device_mesh.size() if weight.placements[0].is_shard() else 1
        if torch.compiler.is_compiling():
            own = _MeanOverLosses.apply(weight.to_local(), losses)
        else:
            own = _ToLocal.apply(weight, losses)
        part = self.tensor_parallel_parts[name]
        return own if part is None else own.narrow(*part)

    def copy_parameters(self, full: nn.Module) -> None:
        """Copy the parameters of the full module."""
        with torch.no_grad():
            for name, weight in self.named_parameters(recurse=False):
                weight.copy_(shard_like(getattr(full, name), weight))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedWeights:
        try:
            moved: ShardedWeights = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return moved
        except RuntimeError as error:
            if "swap" not in str(error):
                raise
            raise RuntimeError(
                f"{type(self).__name__}: its weights are DTensors, which cannot be moved or cast here because "
                "something refers to them. If it is DeepSpeed: its engines take no DTensors; use "
                'torch.distributed.fsdp.fully_shard(model, mesh=mesh["dp"]), or no wrapper and sync_gradients'
            ) from error

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.tensor_parallel_parts:
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = shard_like(value, getattr(self, name))
        super()._load_from_state_dict(state_dict, prefix, *args)


class ShardedLinear(ShardedWeights, nn.Linear):
    """A projection of a tensor-parallel layer. Every rank draws the full weight, so that one seed gives the same
    weights for every number of ranks.

    Args:
        in_features: of the full weight.
        out_features: of the full weight.
        bias: whether it has a bias.
        ranks: the ranks of the layer.
        split: 0 for column-parallel, 1 for row-parallel, or the ``WeightPart`` of a replicated weight in one of these
            dimensions. The bias of a row-parallel projection is replicated.
        factory_kwargs: device and dtype of the weights.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        ranks: ParallelContext,
        split: int | WeightPart,
        factory_kwargs: dict[str, Any],
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, **factory_kwargs)
        rows = split == 0 or (isinstance(split, WeightPart) and split.dim == 0)
        self.distribute(ranks, weight=split, bias=split if rows else None)

    def reset_parameters(self) -> None:
        """Draw the weights."""
        if not self.tensor_parallel_parts:
            super().reset_parameters()
            return
        factory_kwargs: dict[str, Any] = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.copy_parameters(nn.Linear(self.in_features, self.out_features, self.bias is not None, **factory_kwargs))


class ReplicatedNorm(ShardedWeights, nn.RMSNorm):
    """``nn.RMSNorm`` of a tensor-parallel layer."""

    def __init__(self, size: int, ranks: ParallelContext, **options: Any) -> None:
        super().__init__(size, **options)
        self.distribute(ranks, weight=None)

    def forward(self, x: Tensor) -> Tensor:
        """``x [..., size]``, normalised."""
        return nn.functional.rms_norm(x, self.normalized_shape, self.local_weight("weight"), self.eps)


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """A full tensor, or a DTensor, distributed as ``parameter`` is. Nothing is sent for a full tensor.

    A tensor of another shape, and any tensor for a plain parameter, is returned as it is.
    """
    value = value.detach()
    if not isinstance(parameter, DTensor):
        return value
    if isinstance(value, DTensor):
        if value.device_mesh == parameter.device_mesh and value.placements == parameter.placements:
            return value
        value = value.full_tensor()
    return _shard(value, parameter._spec) if value.shape == parameter.shape else value


def _shard(full: Tensor, spec: DTensorSpec) -> DTensor:
    # fully_shard puts its dimensions first, and shards the chunks of the dimensions after them.
    for i, placement in reversed(list(enumerate(spec.placements))):
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]  # of Shard and of _StridedShard
            rows = chunk_range(full.shape[dim], spec.mesh.size(i), spec.mesh.get_local_rank(i))
            full = full.narrow(dim, rows.start, len(rows))
    return DTensor(full.clone(memory_format=torch.contiguous_format), spec, requires_grad=False)


def _tensor_mesh(ranks: ParallelContext, device: torch.device) -> DeviceMesh:
    """The tensor-parallel ranks as a mesh of one dimension. A part of the layer's mesh, so that FSDP's can join it.

    A layer's weights share it: PyTorch takes a millisecond to make one.
    """
    if ranks.mesh is not None and ranks.mesh.ndim == 1:
        return ranks.mesh
    assert ranks.tensor is not None
    types = {d.type for d in ranks.tensor._device_types}
    kind = device.type if device.type in types else min(types)
    if kind not in ranks.tensor_meshes:
        made = ranks.mesh["tp"] if ranks.mesh is not None else DeviceMesh.from_group(ranks.tensor, kind)
        ranks.tensor_meshes[kind] = made
    return ranks.tensor_meshes[kind]


class _ToLocal(torch.autograd.Function):
    """``DTensor.to_local`` in a third of its host time. Backward divides by the number of ``losses``."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor, losses: int) -> Tensor:
        ctx.spec, ctx.losses = weight._spec, losses
        return weight._local_tensor.view_as(weight._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        grad = grad / ctx.losses if ctx.losses > 1 else grad
        return DTensor(grad.contiguous(), ctx.spec, requires_grad=False), None


class _MeanOverLosses(torch.autograd.Function):
    """The identity. Backward divides by the number of ``losses``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, losses: int) -> Tensor:
        ctx.losses = losses
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.losses, None


def _refuse_wrappers(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Raise if DDP or FSDP1, which do not take DTensors, is put around tensor-parallel layers. torch calls this hook
    when a module registers a submodule."""
    if not isinstance(module, DistributedDataParallel | FullyShardedDataParallel) or child is None:
        return
    if tensor_parallel_parameters(child):
        raise ValueError(
            f"{type(module).__name__}: the model has tensor-parallel layers, whose weights are DTensors; use "
            'torch.distributed.fsdp.fully_shard(model, mesh=mesh["dp"]), or no wrapper and sync_gradients'
        )


register_module_module_registration_hook(_refuse_wrappers)
