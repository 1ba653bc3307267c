"""Clips the gradients of weights by the norm that they have on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..base.checks import check_module
from ..base.sharded import is_dtensor
from ..comm.collectives import all_reduce
from ..comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint
from ..comm.waiting import operation
from ..ranks.mesh import all_ranks_group, default_group, global_ranks, rank_in, sequence_group_of, shown, size_of
from .holders import (
    Ignored,
    held_apart,
    holders_of,
    local_tensor,
    shard_groups,
    shares_ranks,
    tensor_parallel_parameters,
)


@torch.no_grad()
@operation("clip_grad_norm_")
def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    ignore: Ignored | None = None,
) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``. The norm is that on one device, for any strategy.

    Unlike ``torch.nn.utils.clip_grad_norm_``, it takes plain parameters and DTensors together, also DTensors on
    different meshes. Call it after ``sync_gradients``. Without tensor-parallel layers, DTensor parameters or ``ignore``
    nothing is sent.

    Args:
        module: the module, built in the same way on every rank. Parameters without a gradient are left out.
        max_norm: the largest norm, positive. With ``inf`` the norm is computed and nothing is clipped.
        mesh: the mesh that was given to the layers.
        group: the group that was given to the layers.
        ignore: as in ``sync_gradients``: the parameters that a rank holds alone, or with the ranks of a group. Each
            counts once in the norm, and is scaled as all others are. Give it on every rank, also on a rank without
            such parameters (``ignore=[]``). The ranks of ``mesh`` or ``group`` must hold all of them. A list is refused
            if all of its parameters and gradients have the same norms on two ranks: they look like copies, which would
            be counted twice. If they are not, say so by ``{experts: group}`` with a group of this rank alone.

    Returns:
        The norm of all gradients before clipping, a scalar in float32 (float64 for float64), the same on every rank.

    Raises:
        TypeError: ``max_norm`` is not a number, ``module`` is not a module, or ``ignore`` has something else than
            parameters and modules.
        ValueError: ``max_norm`` is not positive, or the ranks pass different ones; DDP or FSDP leaves parameters out,
            and ``ignore`` does not say whether a rank holds them alone; or several ranks hold the same parameters and
            gradients, although ``ignore`` says that each rank holds them alone.
        RuntimeError: another rank raised an error on its own input.
    """
    check_module("module", module)
    default_group()  # raises if this is one of several processes and no process group is running
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    sharded, tensor_parallel = shard_groups(module), tensor_parallel_parameters(module)
    apart: dict[nn.Parameter, ProcessGroup | None] = {}
    if ignore is not None:
        ranks = all_ranks_group(mesh, group)
    else:
        ranks = sequence_group_of(mesh, group, "tp_sp") if tensor_parallel else None

    def header() -> _ClipHeader:
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
            raise TypeError(f"max_norm={max_norm!r}: expected a number, got {type(max_norm).__name__}")
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm}: expected a positive number, or inf to measure only")
        apart.update(held_apart(module, ignore))
        for name, p in named:
            if (holders := apart.get(p)) is not None:
                holders_of(name, sharded.get(p, ()), None, holders, p in tensor_parallel)  # raises
                if ranks is not None and not {*global_ranks(holders)} <= {*global_ranks(ranks)}:
                    raise ValueError(
                        f"ignore: {name} is held by ranks {shown(global_ranks(holders))}, but the norm is over ranks "
                        f"{shown(global_ranks(ranks))}; pass a mesh or group with all ranks that hold parameters"
                    )
        return _ClipHeader(fingerprint(float(max_norm)))

    check_same(all_gather_header(header, ranks), "max_norm")
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    dtype = torch.float64 if wide else torch.float32  # of the norm
    # By the groups whose ranks hold different elements. Every rank has the same keys, also if it has no gradients.
    squares: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for p in parameters:
        if p not in apart:
            squares.setdefault(tuple(sharded.get(p, ())), []).extend([] if p.grad is None else [local_tensor(p.grad)])
    total: Tensor | None = None
    for groups, tensors in squares.items():
        square = _sum_of_squares(tensors, dtype, parameters[0].device)
        for holders in groups:
            all_reduce(square, holders)
        total = square if total is None else total + square
    if ignore is not None:
        held = [p for p in parameters if p in apart and p.grad is not None]
        square = _square_of_apart(held, apart, ranks, parameters[0].device if parameters else torch.device("cpu"))
        total = square.to(dtype) if total is None else total + square.to(dtype)
    norm = torch.zeros((), dtype=dtype, device="cpu") if total is None else total.sqrt()
    gradients: dict[torch.device, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            gradients.setdefault(p.grad.device, []).append(local_tensor(p.grad))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils; the host does not read it
    for device, tensors in gradients.items():
        torch._foreach_mul_(tensors, scale.to(device))
    return norm


@torch.no_grad()
def _square_of_apart(
    parameters: Sequence[nn.Parameter],
    apart: Mapping[nn.Parameter, ProcessGroup | None],
    ranks: ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """The sum of the squares of all ranks' gradients of parameters that a rank holds alone or with others, each once.

    Raises:
        ValueError: two ranks hold the same parameters and gradients, although each of them holds them alone.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for p in parameters:
        assert p.grad is not None
        by_copies.setdefault(_copies(p, apart[p]), []).append(local_tensor(p.grad))
    square = torch.zeros((), dtype=torch.float64, device=device)
    for copies, tensors in by_copies.items():
        square = square + _sum_of_squares(tensors, torch.float64, device) / copies
    alone = [p for p in parameters if apart[p] is None and not is_dtensor(p)]
    own = [_sum_of_squares(x, torch.float64, device) for x in ([p.grad for p in alone if p.grad is not None], alone)]
    numbers = torch.zeros(size_of(ranks), 3, dtype=torch.float64, device=device)
    numbers[rank_in(ranks)] = torch.stack([square, *own])
    all_reduce(numbers, ranks)
    # Copies are counted once only if ``ignore`` names the ranks that hold them.
    same = (numbers[:, None, 1:] == numbers[:, 1:]).all(-1) & (numbers[:, 1] > 0)  # [ranks, ranks]
    words = (
        "ignore: several ranks hold the same parameters with the same gradients, but ignore= says that each rank holds "
        "them alone; pass a dictionary, such as ignore={experts: group}, with the group of the ranks that hold the "
        "same. If they are other parameters, which are equal by chance, each rank passes a group of itself alone"
    )
    if same.is_cuda:
        torch._assert_async(~same.triu(1).any(), words)
    elif same.triu(1).any():
        raise ValueError(words)
    return numbers[:, 0].sum()


def _copies(p: nn.Parameter, holders: ProcessGroup | None) -> int:
    """How many ranks hold the same elements of ``p``."""
    copies = size_of(holders)
    if is_dtensor(p):
        for i, place in enumerate(p.placements):
            of_mesh = p.device_mesh.get_group(i)
            if place.is_replicate() and (holders is None or not shares_ranks(of_mesh, holders)):
                copies *= of_mesh.size()
    return copies


class _ClipHeader(NamedTuple):
    max_norm: Fingerprint


def _sum_of_squares(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=dtype, device=device)
    for x in tensors:
        norm = torch.linalg.vector_norm(torch.view_as_real(x) if x.is_complex() else x, dtype=dtype)
        total = total + norm.to(device).square()
    return total
