"""Sums the gradients of weights over the ranks that share one sequence, and clips them by their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ..checks import check_module
from ..comm.collectives import all_reduce
from ..comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint
from ..mesh import context_group, sequence_group
from ..reductions import gradient_kinds
from ..strategies.gemm import sum_dtype
from ..wrappers import Reduction, owners

_BUCKET_BYTES = 64 << 20  # of gradients in one all-reduce, in the dtype in which they are sent

# By gradient: the groups over which it was summed, and its version after that. Every write increases the version.
_summed_over: MutableMapping[Tensor, dict[ProcessGroup, int]] = WeakIdKeyDictionary()


def sync_gradients(module: nn.Module, *, mesh: DeviceMesh | None = None, group: ProcessGroup | None = None) -> None:
    """Make the gradients of ``module``'s parameters one device's, in place: sum them over the ranks of the sequence.

    Call it once a step, after the last ``backward`` and before anything reads the gradients (clipping, the optimizer).
    The losses of the ranks must add up to the global loss: each rank's loss covers its own tokens, divided by the
    global number of tokens, as ``token_loss`` is. Each rank then holds a partial gradient, and the sum of the partial
    gradients is the full gradient.

    Gradients of parameters that are used before ``shard`` or after ``unshard`` are whole on every rank, and are
    averaged instead of summed, and so are gradients of modules that work on the full outputs of a parallelized model.
    Where only the values can tell, a gradient counts as whole if it is the same on every rank.

    Gradients of weights that tensor-parallel layers shard are summed over the mesh's ring and ulysses dimensions only.
    All other gradients are summed over the whole sequence group, which includes tp if the module has such layers.
    There, dimensions over which ``fully_shard`` has reduced a gradient are left out.

    Half-precision gradients are summed in float32 and rounded once. If a parameter has a gradient on some ranks only,
    the other ranks contribute zeros, and afterwards every rank has the sum. A parameter without a gradient on any rank
    keeps none. If a parameter is a DTensor, sharded over other dimensions of the mesh, its local shards are summed.

    DDP or FSDP over a mesh that includes the sequence's dimensions already reduces the gradients over them. Without
    tensor-parallel layers, a call then raises an error. So does a call for gradients that have been summed before,
    whether or not a backward has added to them. Set them to None after each step, as ``zero_grad`` does by default:
    gradients that were zeroed in place cannot be told from these.

    Args:
        module: the module, built in the same way on every rank. Frozen parameters are left out.
        mesh: the mesh that was given to the layers.
        group: the group that was given to the layers. With neither, the default group.

    Raises:
        TypeError: a sparse gradient, or an argument of another type.
        ValueError: the ranks' parameters differ in number, name, shape or dtype; or the gradients have been summed over
            these ranks before, by a wrapper or by this function; or a parameter is used both on sharded tokens and
            before ``shard`` or after ``unshard``.
        RuntimeError: another rank raised an error on its own gradients.
    """
    check_module("module", module)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    frozen = any(not p.requires_grad for p in module.parameters())
    tensor_parallel = tensor_parallel_parameters(module)
    if not tensor_parallel:
        _sync(named, sequence_group(mesh, group), frozen)
        return
    by_groups: dict[tuple[ProcessGroup, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, p in named:
        by_groups.setdefault(_groups_left(p, p in tensor_parallel, mesh, group), []).append((name, p))
    for groups, parameters in by_groups.items():  # in the same order on every rank
        for summed_over in groups:
            _sync(parameters, summed_over, frozen)


def tensor_parallel_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The DTensor parameters of ``megatron.ShardedWeights`` in ``module``. The last dimension of their mesh is tp."""
    return {getattr(m, name) for m in module.modules() for name in getattr(m, "tensor_parallel_parts", ())}


def _groups_left(
    p: nn.Parameter, tensor_parallel: bool, mesh: DeviceMesh | None, group: ProcessGroup | None
) -> tuple[ProcessGroup, ...]:
    """The groups over which a gradient is still to be summed, after FSDP, in a model with tensor-parallel layers."""
    is_shard = tensor_parallel and isinstance(p, DTensor) and not p.placements[-1].is_replicate()
    has_dimensions = mesh is not None and mesh.ndim > 1
    if not is_shard:
        summed_over = sequence_group(mesh, group, "tp_sp")
    else:
        summed_over = context_group(mesh) if mesh is not None and has_dimensions else None
    if summed_over is None or summed_over.size() == 1:
        return ()
    fsdp_groups = _reduced_groups(p, tensor_parallel)
    if mesh is None or not has_dimensions or not any(_shares_ranks(one, summed_over) for one in fsdp_groups):
        return (summed_over,)
    names = ("ring", "ulysses") if is_shard else ("ring", "ulysses", "tp")
    dimensions = [mesh.get_group(name) for name in names if name in (mesh.mesh_dim_names or ())]
    return tuple(one for one in dimensions if not any(_shares_ranks(one, other) for other in fsdp_groups))


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, mesh: DeviceMesh | None = None, group: ProcessGroup | None = None
) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``. The norm is that on one device, for any strategy.

    Unlike ``torch.nn.utils.clip_grad_norm_``, it takes plain parameters and DTensors together, also DTensors on
    different meshes. Call it after ``sync_gradients``. Without tensor-parallel layers or DTensor parameters nothing is
    sent.

    Args:
        module: the module, built in the same way on every rank. Parameters without a gradient are left out.
        max_norm: the largest norm, positive. With ``inf`` the norm is computed and nothing is clipped.
        mesh: the mesh that was given to the layers.
        group: the group that was given to the layers.

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
        squares.setdefault(_sharded_over(p), []).extend([] if p.grad is None else [_local_tensor(p.grad)])
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
    max_norm: Fingerprint


def _sharded_over(p: nn.Parameter) -> tuple[ProcessGroup, ...]:
    if not isinstance(p, DTensor):
        return ()
    return tuple(p.device_mesh.get_group(i) for i, place in enumerate(p.placements) if not place.is_replicate())


def _sum_of_squares(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    total = torch.zeros((), dtype=sum_dtype(like), device=like.device)
    for x in tensors:
        norm = torch.linalg.vector_norm(x, dtype=sum_dtype(x))
        total = total + norm.to(total.device).square()
    return total


class _GradientHeader(NamedTuple):
    parameters: int
    names_and_shapes: Fingerprint
    gradients: Fingerprint


def _sync(named: list[tuple[str, nn.Parameter]], group: ProcessGroup | None, frozen: bool) -> None:
    if group is None or group.size() == 1:
        return
    facts: list[list[int]] = []  # for each parameter: has it a gradient, and the values of gradient_kinds

    def header() -> _GradientHeader:
        reductions = owners().reductions
        ranks = frozenset(dist.get_process_group_ranks(group))
        shares = cache(lambda other: len(ranks.intersection(dist.get_process_group_ranks(other))) > 1)
        for name, p in named:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise TypeError(
                    f"{name}: expected a dense gradient, got {p.grad.layout}; for nn.Embedding, pass sparse=False"
                )
            _check_not_reduced(name, p, ranks, shares, reductions.get(id(p), ()))
        for (_, p), kind in zip(named, gradient_kinds(named, group, frozen), strict=True):
            facts.append([int(p.grad is not None), *map(int, kind)])
        description = "; ".join(f"{name} {tuple(_local_tensor(p).shape)} {p.dtype}" for name, p in named)
        return _GradientHeader(len(named), fingerprint(description), fingerprint(str(facts)))

    headers = all_gather_header(header, group)
    if any(header[:2] != headers[0][:2] for header in headers):
        counts = [header.parameters for header in headers]
        raise ValueError(
            f"module: the ranks' trainable parameters differ in number ({counts}), name, shape or dtype; "
            "build the same module on every rank"
        )
    # Ranks may lack different gradients, such as an expert's that received no tokens of one rank.
    if any(header.gradients != headers[0].gradients for header in headers):
        facts = _on_any_rank(torch.tensor(facts, dtype=torch.int32, device="cpu"), group).tolist()
    whole: dict[int, str] = {}  # by gradient: the names of parameters whose gradients must be the same on every rank
    summed: list[Tensor] = []
    compared: list[Tensor] = []
    for (name, p), (has_gradient, is_whole, is_partial, is_unclear) in zip(named, facts, strict=True):
        if is_whole and is_partial:
            raise ValueError(
                f"{name}: used before shard, where its gradient is whole, and between shard and unshard or the loss, "
                "where its gradient is a part of a sum; shard the tokens before its first use (token ids rather than "
                "embeddings), or wrap the model in DDP or FSDP over the ranks of the sequence"
            )
        if not has_gradient:
            continue
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        # A new tensor, because zero_grad followed by backward may set p.grad to the same tensor again (DDP's buckets).
        p.grad = p.grad.detach()
        g = _local_tensor(p.grad)
        if is_whole:
            whole[id(g)] = name
        (compared if is_whole or (is_unclear and not is_partial) else summed).append(g)
    with torch.no_grad():
        # Every rank has the same lists, and makes the same buckets in the same order.
        for bucket in _buckets(compared):
            _reduce_whole(bucket, group, whole)
        for bucket in _buckets(summed):
            for g, total in zip(bucket, _all_reduce_bucket(bucket, group), strict=True):
                g.copy_(total)
    for g in (*summed, *compared):
        _summed_over.setdefault(g, {})[group] = g._version


def _reduced_groups(p: nn.Parameter, tensor_parallel: bool) -> list[ProcessGroup]:
    """The groups over which FSDP reduces a gradient: the dimensions of the DTensor's mesh, tp's left out."""
    if not isinstance(p, DTensor):
        return []
    return [p.device_mesh.get_group(i) for i in range(p.device_mesh.ndim - tensor_parallel)]


def _reduce_whole(bucket: list[Tensor], group: ProcessGroup, whole: Mapping[int, str]) -> None:
    """Average gradients that are the same on every rank, as all in ``whole`` must be, and sum the others."""
    totals = _all_reduce_bucket(bucket, group)
    ranks = group.size()
    differs = torch.stack([_differs(g, total / ranks) for g, total in zip(bucket, totals, strict=True)])
    all_reduce(differs, group, dist.ReduceOp.MAX)
    for g, total, different in zip(bucket, totals, differs.tolist(), strict=True):
        if different and id(g) in whole:
            raise ValueError(
                f"{whole[id(g)]}: used before shard, so that every rank should have the same gradient, but the ranks' "
                "gradients differ; compute the same on every rank before shard and after unshard (the same dropout, "
                "the same loss), and use the parameter nowhere else"
            )
        g.copy_(total if different else total / ranks)


def _differs(g: Tensor, mean: Tensor) -> Tensor:
    """Whether a rank's gradient is another than the mean of all ranks, beyond rounding: int32, a scalar.

    Gradients of different tokens differ by about their own norm. NaN and infinite gradients count as equal.
    """
    differs: Tensor = torch.linalg.vector_norm(g.to(mean.dtype) - mean) > 1e-2 * torch.linalg.vector_norm(mean)
    return differs.to(torch.int32)


def _check_not_reduced(
    name: str,
    p: nn.Parameter,
    ranks: frozenset[int],
    shares: Callable[[ProcessGroup], bool],
    owned: Iterable[Reduction],
) -> None:
    """Raise if a gradient has been reduced over several of ``ranks``, by a wrapper or by ``sync_gradients``.

    ``shares`` says whether a group has several of ``ranks``.
    """
    for reduction in owned:
        if reduction.divisor is not None and len(reduction.ranks & ranks) > 1:
            raise ValueError(
                f"{name}: {reduction.name} over the ranks of the sequence reduces its gradient; leave sync_gradients "
                "out, because token_loss allows for the wrapper, or wrap the module over dp only. If the wrapper is no "
                "longer used, delete it and call gc.collect()"
            )
    if isinstance(p, DTensor):
        for dim, placement in enumerate(p.placements):
            if placement.is_shard() and shares(p.device_mesh.get_group(dim)):
                raise ValueError(
                    f"{name}: a DTensor whose shards are on the ranks that its gradient would be summed over; shard it "
                    "over other dimensions of the mesh"
                )
    if p.grad is None:
        return
    g = _local_tensor(p.grad)
    for earlier, version in _summed_over.get(g, {}).items():
        if shares(earlier):
            since = "no backward has added to it since" if version == g._version else "it has been written to since"
            raise ValueError(
                f"{name}: sync_gradients has summed this gradient already, and {since}; call it once a step, after the "
                "last backward, and set the gradients to None after the step (zero_grad does, with set_to_none=True)"
            )


def _shares_ranks(one: ProcessGroup, other: ProcessGroup) -> bool:
    return len({*dist.get_process_group_ranks(one)} & {*dist.get_process_group_ranks(other)}) > 1


def _local_tensor(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


def _on_any_rank(flags: Tensor, group: ProcessGroup) -> Tensor:
    """The maximum of the ranks' ``flags``, on the CPU. Control data: not counted as sent."""
    types = {device.type for device in group._device_types}
    flags = flags.to("cpu" if "cpu" in types else next(iter(types)))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags.cpu()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one dtype and device, up to ``_BUCKET_BYTES`` together, for one all-reduce each."""
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for g in gradients:
        alike.setdefault((g.dtype, g.device), []).append(g)
    for tensors in alike.values():
        bucket: list[Tensor] = []
        size = 0
        for g in tensors:
            nbytes = g.numel() * sum_dtype(g).itemsize
            if bucket and size + nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(g)
            size += nbytes
        yield bucket


def _all_reduce_bucket(bucket: list[Tensor], group: ProcessGroup) -> list[Tensor]:
    """The sums of the gradients in ``bucket`` over the ranks, new tensors, by one all-reduce."""
    flat = torch.cat([g.reshape(-1) for g in bucket]).to(sum_dtype(bucket[0]))  # [elements of the bucket]
    all_reduce(flat, group)
    return [total.view_as(g) for g, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True)]
