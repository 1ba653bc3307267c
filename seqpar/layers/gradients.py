"""Summing the gradients of replicated weights over the ranks that share one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from ..comm.handshake import Fingerprint, all_gather_header, fingerprint
from ..comm.trace import count_sent
from ..mesh import context_group, sequence_group, size_of
from .sharded_weights import weight_shards

_BUCKET_BYTES = 64 << 20


def sync_gradients(module: nn.Module, mesh: DeviceMesh | None = None, group: ProcessGroup | None = None) -> None:
    """Sum the gradients of ``module``'s parameters over the ranks that hold the same weights, in place.

    Call it after ``backward`` and before anything reads the gradients (clipping, the optimizer). Each rank's loss is
    its tokens' share of the whole loss, so that the sum of the shares' gradients is the whole gradient.

    Weights that tensor-parallel layers shard are summed over the mesh's ring and ulysses dimensions only. All others
    are summed over the whole sequence group, which includes tp where the module has such layers.

    Half-precision gradients are summed in float32 and rounded once. A parameter with a gradient on some ranks only
    counts as zero on the others (and has one everywhere afterwards); one without any stays without. Of a DTensor
    parameter, sharded over other dimensions of the mesh, the local shards are summed. Under DDP or FSDP over a mesh
    that includes the sequence's dimensions gradients are reduced already: do not call it then.

    Args:
        module: the same on every rank; frozen parameters are left out.
        mesh, group: as given to the layers. With neither, the default group; one process has nothing to sum.

    Raises:
        ValueError: the ranks' parameters differ in number, name, shape or dtype. TypeError: a sparse gradient.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    shards = weight_shards(module)
    sharded = [(name, p) for name, p in named if p in shards and size_of(shards[p].group) > 1]
    if not sharded:
        _sync(named, sequence_group(mesh, group))
        return
    tensor = {shards[p].group for _, p in sharded}
    context = sequence_group(mesh, group) if mesh is None or mesh.ndim == 1 else context_group(mesh)
    if context not in tensor:  # on a plain group, the tokens are sharded over the same ranks as the weights
        _sync(sharded, context)
    sharded_ids = {id(p) for _, p in sharded}
    _sync([(name, p) for name, p in named if id(p) not in sharded_ids], sequence_group(mesh, group, "tp_sp"))


class _GradientHeader(NamedTuple):
    """The parameters of a rank: their number, their names and shapes, and which of them have gradients."""

    parameters: int
    names_and_shapes: Fingerprint
    have_gradients: Fingerprint


def _sync(named: list[tuple[str, nn.Parameter]], group: ProcessGroup | None) -> None:
    """Sum the gradients of these parameters over ``group``."""
    if group is None or group.size() == 1:
        return
    parameters = [p for _, p in named]

    def header() -> _GradientHeader:
        for name, p in named:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise TypeError(f"{name}: its gradient is {p.grad.layout}; make it dense (nn.Embedding: sparse=False)")
        described = "; ".join(f"{name} {tuple(_local(p).shape)} {p.dtype}" for name, p in named)
        return _GradientHeader(len(named), fingerprint(described), fingerprint(*_flags(parameters)))

    headers = all_gather_header(header, group)
    if any(header[:2] != headers[0][:2] for header in headers):
        counts = [header.parameters for header in headers]
        raise ValueError(
            f"module: the ranks' trainable parameters differ in number ({counts}), name, shape or dtype; "
            "build the same module on every rank"
        )
    flags = torch.tensor(_flags(parameters), dtype=torch.int32, device="cpu")
    if any(header.have_gradients != headers[0].have_gradients for header in headers):
        flags = _any_rank(flags, group)
    for p, wanted in zip(parameters, flags.tolist(), strict=True):
        if wanted and p.grad is None:
            p.grad = torch.zeros_like(p)
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    with torch.no_grad():
        for bucket in _buckets(gradients):
            _sum(bucket, group)


def _local(x: Tensor) -> Tensor:
    """A DTensor's own shard, sharing its storage; any other tensor itself."""
    return x._local_tensor if isinstance(x, DTensor) else x


def _flags(parameters: Sequence[Tensor]) -> list[int]:
    """1 for each parameter that has a gradient here."""
    return [int(p.grad is not None) for p in parameters]


def _any_rank(flags: Tensor, group: ProcessGroup) -> Tensor:
    """The flags raised on some rank."""
    types = {device.type for device in group._device_types}
    flags = flags.to("cpu" if "cpu" in types else next(iter(types)))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags.cpu()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients that travel together: of one dtype and device, up to a size."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for g in gradients:
        kinds.setdefault((g.dtype, g.device), []).append(g)
    for same in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for g in same:
            nbytes = g.numel() * _sum_dtype(g.dtype).itemsize
            if bucket and size + nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(g)
            size += nbytes
        yield bucket


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _sum(bucket: list[Tensor], group: ProcessGroup) -> None:
    flat = torch.cat([g.reshape(-1) for g in bucket]).to(_sum_dtype(bucket[0].dtype))
    dist.all_reduce(flat, group=group)
    # Counted as a ring's reduce-scatter and all-gather, whatever the backend chooses.
    count_sent(2 * flat.numel() * flat.element_size() * (group.size() - 1) // group.size(), 2 * (group.size() - 1))
    for g, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        g.copy_(summed.view_as(g))
