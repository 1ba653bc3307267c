"""Sums the gradients of weights over the ranks that share one sequence, and clips them by their norm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from ..checks import check_module
from ..comm.collectives import all_reduce
from ..comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint
from ..mesh import context_group, sequence_group
from .sharded_weights import tensor_parallel_parameters

_BUCKET_BYTES = 64 << 20  # of gradients in one all-reduce, in the dtype in which they are sent

# By gradient: the groups over which it was summed, and its version after that. Every write increases the version.
_summed_over: MutableMapping[Tensor, dict[ProcessGroup, int]] = WeakIdKeyDictionary()


def sync_gradients(module: nn.Module, *, mesh: DeviceMesh | None = None, group: ProcessGroup | None = None) -> None:
    """Sum the gradients of ``module``'s parameters over the ranks that hold the same weights, in place.

    Call it after ``backward`` and before anything reads the gradients (clipping, the optimizer). The losses of the
    ranks must add up to the global loss: each rank's loss covers its own tokens, divided by the global number of
    tokens. Each rank then holds a partial gradient, and the sum of the partial gradients is the full gradient.

    Weights that tensor-parallel layers shard are summed over the mesh's ring and ulysses dimensions only. All others
    are summed over the whole sequence group, which includes tp if the module has such layers. In a module with such
    layers, dimensions over which ``fully_shard`` has reduced a gradient are left out. ``fully_shard`` divides by its
    number of ranks, so the loss has to be multiplied by it.

    Half-precision gradients are summed in float32 and rounded once. If a parameter has a gradient on some ranks only,
    the other ranks contribute zeros, and afterwards every rank has the sum. A parameter without a gradient on any rank
    keeps none. If a parameter is a DTensor, sharded over other dimensions of the mesh, its local shards are summed.

    DDP or FSDP over a mesh that includes the sequence's dimensions already reduces the gradients over them. Without
    tensor-parallel layers, a call then raises an error. A second call for the same gradients also raises. Pass the DDP
    or FSDP1 wrapper, not the module inside it, which has no reference to its wrapper.

    Args:
        module: the module, built in the same way on every rank. Frozen parameters are left out.
        mesh: as given to the layers.
        group: as given to the layers. With neither, the default group. A single process has nothing to sum.

    Raises:
        TypeError: a sparse gradient, or an argument of another type.
        ValueError: the ranks' parameters differ in number, name, shape or dtype, or the gradients have been summed over
            these ranks before, by a wrapper or by this function.
        RuntimeError: another rank raised an error on its own gradients.
    """
    check_module("module", module)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    wrappers = [m for m in module.modules() if isinstance(m, DistributedDataParallel | FullyShardedDataParallel)]
    tensor_parallel = tensor_parallel_parameters(module)
    if not tensor_parallel:
        _sync(named, sequence_group(mesh, group), wrappers)
        return
    by_groups: dict[tuple[ProcessGroup, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, p in named:
        by_groups.setdefault(_groups_left(p, p in tensor_parallel, mesh, group), []).append((name, p))
    for groups, some in by_groups.items():  # in the same order on every rank
        for one in groups:
            _sync(some, one, wrappers, tensor_parallel)


def _groups_left(
    p: nn.Parameter, tensor_parallel: bool, mesh: DeviceMesh | None, group: ProcessGroup | None
) -> tuple[ProcessGroup, ...]:
    """The groups over which a gradient is still to be summed after FSDP, in a model with tensor-parallel layers."""
    is_shard = tensor_parallel and isinstance(p, DTensor) and not p.placements[-1].is_replicate()
    several = mesh is not None and mesh.ndim > 1
    if not is_shard:
        needed = sequence_group(mesh, group, "tp_sp")
    else:
        needed = context_group(mesh) if mesh is not None and several else None
    if needed is None or needed.size() == 1:
        return ()
    reduced = _reduced_groups(p, tensor_parallel)
    if mesh is None or not several or not any(_shares_ranks(one, needed) for one in reduced):
        return (needed,)
    names = ("ring", "ulysses") if is_shard else ("ring", "ulysses", "tp")
    dimensions = [mesh.get_group(name) for name in names if name in (mesh.mesh_dim_names or ())]
    return tuple(one for one in dimensions if not any(_shares_ranks(one, other) for other in reduced))


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, mesh: DeviceMesh | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``. The norm is that on one device, for any strategy.

    Unlike ``torch.nn.utils.clip_grad_norm_``, it takes plain parameters and DTensors together, also DTensors on
    different meshes. Call it after ``sync_gradients``. Without tensor-parallel layers or DTensor parameters nothing is
    sent.

    Args:
        module: as given to ``sync_gradients``. Parameters without a gradient are left out.
        max_norm: the largest norm, positive. With ``inf`` the norm is computed and nothing is clipped.
        mesh: as given to ``sync_gradients``.
        group: as given to ``sync_gradients``.

    Returns:
        The norm of all gradients before clipping, a scalar in float32 (float64 for float64), the same on every rank.

    Raises:
        TypeError: ``max_norm`` is not a number, or ``module`` is not a module.
        ValueError: ``max_norm`` is not positive, or the ranks of tp pass different ones.
        RuntimeError: another rank of tp raised an error on its own input.
    """
    check_module("module", module)
    parameters = [p for p in module.parameters() if p.requires_grad]
    tensor_parallel = bool(tensor_parallel_parameters(module))

    def header() -> _ClipHeader:
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
            raise TypeError(f"max_norm={max_norm!r}: expected a number, got {type(max_norm).__name__}")
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm}: expected a positive number, or inf to measure only")
        return _ClipHeader(fingerprint(float(max_norm)))

    check_same(all_gather_header(header, sequence_group(mesh, group, "tp_sp") if tensor_parallel else None), "max_norm")
    # By the groups whose ranks hold different elements. Every rank has the same keys, also if it has no gradients.
    squares: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for p in parameters:
        own = [] if p.grad is None else [_local_tensor(p.grad)]
        squares.setdefault(_sharded_over(p), []).extend(own)
    total: Tensor | None = None
    for groups, tensors in squares.items():
        square = _sum_of_squares(tensors, parameters[0])
        for holders in groups:
            all_reduce(square, holders)
        total = square if total is None else total + square
    norm = torch.zeros(()) if total is None else total.sqrt()
    gradients: dict[torch.device, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            gradients.setdefault(p.grad.device, []).append(_local_tensor(p.grad))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils; the host does not read it
    for device, tensors in gradients.items():
        torch._foreach_mul_(tensors, scale.to(device))
    return norm


class _ClipHeader(NamedTuple):
    """The values that must be the same on all ranks of tp."""

    max_norm: Fingerprint


def _sharded_over(p: nn.Parameter) -> tuple[ProcessGroup, ...]:
    """The groups whose ranks hold different elements of a parameter."""
    if not isinstance(p, DTensor):
        return ()
    return tuple(p.device_mesh.get_group(i) for i, place in enumerate(p.placements) if not place.is_replicate())


def _sum_of_squares(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of the squares of all elements, a scalar on the device of ``like``, in float32 or float64."""
    total = torch.zeros((), dtype=_sum_dtype(like.dtype), device=like.device)
    for x in tensors:
        norm = torch.linalg.vector_norm(x, dtype=_sum_dtype(x.dtype))
        total = total + norm.to(total.device).square()
    return total


class _GradientHeader(NamedTuple):
    """A rank's parameters: their number, their names and shapes, and which of them have gradients."""

    parameters: int
    names_and_shapes: Fingerprint
    have_gradients: Fingerprint


def _sync(
    named: list[tuple[str, nn.Parameter]],
    group: ProcessGroup | None,
    wrappers: Sequence[DistributedDataParallel | FullyShardedDataParallel],
    tensor_parallel: Collection[nn.Parameter] = (),
) -> None:
    """Sum the gradients of these parameters over ``group``."""
    if group is None or group.size() == 1:
        return
    parameters = [p for _, p in named]

    def header() -> _GradientHeader:
        for name, p in named:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise TypeError(
                    f"{name}: expected a dense gradient, got {p.grad.layout}; for nn.Embedding, pass sparse=False"
                )
            _check_not_reduced(name, p, group, p in tensor_parallel)
        for wrapper in wrappers:
            if wrapper.process_group is not None and _shares_ranks(wrapper.process_group, group):
                raise ValueError(
                    f"module: {type(wrapper).__name__} over the ranks of the sequence has reduced the gradients "
                    "already; leave sync_gradients out, or wrap the module over dp only"
                )
        described = "; ".join(f"{name} {tuple(_local_tensor(p).shape)} {p.dtype}" for name, p in named)
        return _GradientHeader(len(named), fingerprint(described), fingerprint(*_has_gradient(parameters)))

    headers = all_gather_header(header, group)
    if any(header[:2] != headers[0][:2] for header in headers):
        counts = [header.parameters for header in headers]
        raise ValueError(
            f"module: the ranks' trainable parameters differ in number ({counts}), name, shape or dtype; "
            "build the same module on every rank"
        )
    has_gradient = torch.tensor(_has_gradient(parameters), dtype=torch.int32, device="cpu")  # [parameters]
    # Ranks may lack different gradients, for example those of an expert that received no tokens of one rank.
    if any(header.have_gradients != headers[0].have_gradients for header in headers):
        has_gradient = _on_any_rank(has_gradient, group)
    for p, on_any_rank in zip(parameters, has_gradient.tolist(), strict=True):
        if on_any_rank and p.grad is None:
            p.grad = torch.zeros_like(p)
    gradients = [_local_tensor(p.grad) for p in parameters if p.grad is not None]
    with torch.no_grad():
        # Every rank has the same list, and makes the same buckets in the same order.
        for bucket in _buckets(gradients):
            _all_reduce_bucket(bucket, group)
    for g in gradients:
        _summed_over.setdefault(g, {})[group] = g._version


def _reduced_groups(p: nn.Parameter, tensor_parallel: bool) -> list[ProcessGroup]:
    """The groups over which FSDP reduces a gradient: the dimensions of the DTensor's mesh, tp's left out."""
    if not isinstance(p, DTensor):
        return []
    return [p.device_mesh.get_group(i) for i in range(p.device_mesh.ndim - tensor_parallel)]


def _check_not_reduced(name: str, p: nn.Parameter, group: ProcessGroup, tensor_parallel: bool) -> None:
    """Raise if a gradient has been summed over the ranks of ``group`` already, by FSDP or by ``sync_gradients``."""
    if any(_shares_ranks(one, group) for one in _reduced_groups(p, tensor_parallel)):
        raise ValueError(
            f"{name}: a DTensor over ranks that share the sequence, whose gradient FSDP has reduced already; "
            "leave sync_gradients out, or shard the parameters over dp only"
        )
    if p.grad is not None:
        g = _local_tensor(p.grad)
        if _summed_over.get(g, {}).get(group) == g._version:
            raise ValueError(
                f"{name}: sync_gradients has summed this gradient already, and no backward has added to it since; call "
                "it once a step"
            )


def _shares_ranks(one: ProcessGroup, other: ProcessGroup) -> bool:
    """Whether two groups have this rank and at least one more in common."""
    return len({*dist.get_process_group_ranks(one)} & {*dist.get_process_group_ranks(other)}) > 1


def _local_tensor(x: Tensor) -> Tensor:
    """A DTensor's local shard, which shares its storage, or ``x`` itself if it is any other tensor."""
    return x._local_tensor if isinstance(x, DTensor) else x


def _has_gradient(parameters: Sequence[Tensor]) -> list[int]:
    """1 for each parameter that has a gradient on this rank, 0 for the others."""
    return [int(p.grad is not None) for p in parameters]


def _on_any_rank(flags: Tensor, group: ProcessGroup) -> Tensor:
    """The maximum of the ranks' ``flags [parameters]``, on the CPU. Control data: not counted as sent."""
    types = {device.type for device in group._device_types}
    flags = flags.to("cpu" if "cpu" in types else next(iter(types)))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags.cpu()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype and device, up to ``_BUCKET_BYTES`` together, for one all-reduce each."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for g in gradients:
        alike.setdefault((g.dtype, g.device), []).append(g)
    for (dtype, _), same in alike.items():
        bucket: list[Tensor] = []
        size = 0
        for g in same:
            nbytes = g.numel() * _sum_dtype(dtype).itemsize
            if bucket and size + nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(g)
            size += nbytes
        yield bucket


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` are summed: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _all_reduce_bucket(bucket: list[Tensor], group: ProcessGroup) -> None:
    """Sum the gradients in ``bucket`` over the ranks, in place, with one all-reduce."""
    flat = torch.cat([g.reshape(-1) for g in bucket]).to(_sum_dtype(bucket[0].dtype))  # [elements of the bucket]
    all_reduce(flat, group)
    for g, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        g.copy_(summed.view_as(g))
