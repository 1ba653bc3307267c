"""How gradients are reduced over ranks, as found in autograd's graph during backward.

Between ``shard`` and ``unshard`` (or ``token_loss``) each rank computes on its own tokens. The gradients of parameters
that are used there are *partial*: their sum over the ranks of the sequence is the gradient. Before ``shard`` and after
``unshard`` every rank computes the same, and gradients are *whole*.

A wrapper such as DDP over the P ranks of the sequence averages all gradients, so partial gradients have to be P times
larger. There, the backward of ``token_loss`` and of ``unshard`` multiplies the gradient by P, and the backward of
``shard`` divides it by P. Without such a wrapper, gradients have no factor: ``sync_gradients`` sums partial gradients
and averages whole ones. For that, the backward notes here which parameters were used in which part.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from .wrappers import EXPLICIT, Reduction, averaged_ranks, owners

Gradients = Literal["auto", "sum", "mean"]
Region = Literal["whole", "partial"]


@dataclass
class Boundary:
    """Belongs to a node of autograd's graph where tokens are sharded or gathered."""

    ranks: frozenset[int]  # the global ranks of the sequence
    region: Region  # the gradients of parameters that were used for the node's input
    open: bool = False  # whether a use of the same parameters may follow, as after ``unshard``
    backward: int = -1  # the number of the backward that has set ``factor``
    factor: int = 1  # how much larger the gradients between ``shard`` and ``unshard`` are because of a wrapper


@dataclass
class _Use:
    """In which regions a parameter was used since its gradient was None."""

    backward: int = -1  # the number of the last backward
    whole: bool = False
    partial: bool = False
    unsharded: bool = False  # whether an ``unshard`` followed
    after: bool = False  # whether it was used after an ``unshard``, as far as the graph shows it
    wrapper: str = ""  # the wrapper whose factor its gradient has, although the wrapper does not hold it


# By parameter and by the ranks of the sequence.
_uses: MutableMapping[nn.Parameter, dict[frozenset[int], _Use]] = WeakIdKeyDictionary()
_any_boundary = [False]  # whether ``shard`` or ``unshard`` has been called in this process on a tensor with a gradient
_frozen: set[frozenset[int]] = set()  # the ranks over which tensors without a gradient have been unsharded


def mark(node: Any, group: ProcessGroup, region: Region, open: bool = False) -> None:
    """Give ``node``, in the forward of its Function, a ``Boundary``."""
    if any(node.needs_input_grad):
        _any_boundary[0] = True
        node.boundary = Boundary(frozenset(dist.get_process_group_ranks(group)), region, open)


def note_frozen(x_local: Tensor, group: ProcessGroup) -> None:
    """Note that ``x_local`` is about to be unsharded, if it has no gradient where it could have one.

    No backward of ``unshard`` will run then, although modules after it may be trained.
    """
    if torch.is_grad_enabled() and x_local.is_floating_point() and not x_local.requires_grad:
        _frozen.add(frozenset(dist.get_process_group_ranks(group)))


def factor_at(node: Any, gradients: Gradients = "auto") -> int:
    """In the backward of a node with a ``Boundary``: by how much larger the gradients of the sharded tokens are.

    This is the number of ranks of the sequence under a wrapper that averages over them, otherwise 1. With
    ``gradients="auto"`` it looks for wrappers, and raises a ValueError for one that averages over some of the ranks
    only, or over unknown ones.
    """
    boundary: Boundary = node.boundary
    if boundary.backward != torch._C._current_graph_task_id():  # no later node of this backward has found it
        _explore(node, boundary.ranks, boundary.region, gradients)
    return boundary.factor


def reduction_behind(node: Any, group: ProcessGroup, gradients: Gradients) -> Reduction | None:
    """In the backward of the loss: how a wrapper will reduce the gradients, over all ranks of ``group`` or over others.

    None without a wrapper, and if ``gradients`` is not "auto". ``node`` is the loss's node of autograd's graph; None if
    there is no graph, as under compiled autograd. Raises the errors of ``factor_at``, and one if wrappers differ.
    """
    ranks = frozenset(dist.get_process_group_ranks(group))
    if node is None:
        if gradients == "auto" and _any_wrapper():
            raise ValueError(f"gradients='auto': autograd's graph is not known in a compiled backward; {EXPLICIT}")
        return None
    found = _explore(node, ranks, "partial", gradients)
    if len(found) > 1:
        names = " and ".join(f"{r.name} over ranks {sorted(r.ranks)}" for r in found)
        raise ValueError(f"gradients='auto': {names} reduce gradients of one loss differently; {EXPLICIT}")
    return next(iter(found), None)


def _explore(node: Any, ranks: frozenset[int], region: Region, gradients: Gradients) -> set[Reduction]:
    """Follow the graph from ``node`` to its parameters, note how they are used, and find who reduces their gradients.

    Every ``Boundary`` on the way gets the same factor.
    """
    if not _any_boundary[0] and gradients != "auto":
        return set()
    ownership = owners()
    if not _any_boundary[0] and not ownership.reductions:
        return set()
    task = torch._C._current_graph_task_id()
    leaves: list[tuple[Any, Region]] = []
    boundaries = [node.boundary] if hasattr(node, "boundary") else []
    has_hidden = False
    starts = [(below, region) for below, _ in node.next_functions]
    seen: dict[Region, set[Any]] = {"whole": {None}, "partial": {None}}
    while starts:
        below, region = starts.pop()
        stack, visited = [below], seen[region]
        while stack:  # a model has thousands of nodes
            below = stack.pop()
            if below in visited:
                continue
            visited.add(below)
            next_functions = below.next_functions
            if not next_functions:
                leaves.append((getattr(below, "variable", None), region))
            elif isinstance(below, BackwardCFunction):
                has_hidden |= type(below).__name__ == "CheckpointFunctionBackward"
                boundary = getattr(below, "boundary", None)
                if boundary is not None and boundary.ranks == ranks:
                    boundaries.append(boundary)
                    starts += [(deeper, boundary.region) for deeper, _ in next_functions]
                    continue
            stack += [deeper for deeper, _ in next_functions]
    by_id = {id(of): of for leaf, _ in leaves if (of := ownership.reductions.get(id(leaf)))}
    found = {r for of in by_id.values() for r in of if len(r.ranks) > 1}
    tensor_parallel = [leaf for leaf, _ in leaves if isinstance(leaf, DTensor)]
    tensor_ranks = {rank for p in tensor_parallel for rank in p.device_mesh.mesh.flatten().tolist()}
    if gradients == "auto":
        factor = averaged_ranks(found, ranks, tensor_ranks)
        if has_hidden and not found and (other := _any_wrapper()):
            raise ValueError(
                "gradients='auto': reentrant activation checkpointing hides the parameters, so that it is not known "
                f"whether {other} reduces their gradients; checkpoint with use_reentrant=False, or {EXPLICIT}"
            )
    else:
        factor, found = len(ranks) if gradients == "mean" else 1, set()
    for boundary in boundaries:
        if boundary.backward == task and boundary.factor != factor:
            raise ValueError(
                "shard: one part of the model that works on its tokens is inside a wrapper that averages gradients "
                "over the ranks of the sequence, and another is not; wrap the model as a whole"
            )
        boundary.backward, boundary.factor = task, factor
    unsharded = any(boundary.region == "partial" for boundary in boundaries)
    is_open = any(boundary.open for boundary in boundaries)
    # Gradients that a wrapper averages over the sequence never reach sync_gradients.
    wrapper = next((r.name for r in found), "") if factor > 1 else ""
    for leaf, region in leaves if _any_boundary[0] or wrapper else ():
        if isinstance(leaf, nn.Parameter) and not (wrapper and id(leaf) in ownership.reductions):
            for p in ownership.parameters.get(id(leaf), (leaf,)):
                use = _use(p, ranks, task)
                setattr(use, region, True)
                use.unsharded |= unsharded
                use.wrapper = use.wrapper or wrapper
    for leaf in _used_after_unshard(ranks) if is_open and factor == 1 else ():
        for p in ownership.parameters.get(id(leaf), (leaf,)):
            _use(p, ranks, task).after = True
    return found


# Terms of a loss: their operands are not used together.
_SUMS = ("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "NegBackward0")


def _used_after_unshard(ranks: frozenset[int]) -> list[nn.Parameter]:
    """The parameters that the running backward's loss uses together with an output of ``unshard``.

    A node of the graph does not know the nodes above it, so this starts at the tensors whose backward is running.
    """
    roots: list[Any] = []
    for frame in sys._current_frames().values():  # on GPUs, backward runs in another thread than its caller
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is _engine_run_backward.__code__:
                roots += [getattr(x, "grad_fn", None) or getattr(x, "node", None) for x in caller.f_locals["t_outputs"]]
            caller = caller.f_back
    below: dict[Any, tuple[Any, ...]] = {None: ()}  # the graph
    cuts: set[Any] = {None}  # where tokens are sharded or gathered
    after: set[Any] = set()  # every ``unshard``, and what follows it up to the next cut
    stack = [(root, False) for root in roots]
    while stack:
        node, complete = stack.pop()
        if complete:
            boundary = getattr(node, "boundary", None)
            if boundary is not None and boundary.ranks == ranks:
                cuts.add(node)
                after.update((node,) if boundary.open else ())
            elif any(x in after for x in below[node]):
                after.add(node)
        elif node not in below:
            below[node] = tuple(x for x, _ in node.next_functions)
            stack += [(node, True), *((x, False) for x in below[node])]
    terms: set[Any] = set()
    starts = list(roots)
    while starts:
        node = starts.pop()
        if node in after and node not in cuts and node not in terms and node.name() in _SUMS:
            terms.add(node)
            starts += below[node]
    used: set[Any] = set()
    starts = [x for node in after - terms - cuts for x in below[node] if x not in after]
    while starts:
        node = starts.pop()
        if node not in used and node not in cuts:
            used.add(node)
            starts += below[node]
    return [x for node in used if isinstance(x := getattr(node, "variable", None), nn.Parameter)]


def _any_wrapper() -> str:
    """The name of a wrapper in this process that is still used, if there is one."""
    if owners().reductions:
        gc.collect()
    return next((r.name for of in owners().reductions.values() for r in of if len(r.ranks) > 1), "")


def _use(p: nn.Parameter, ranks: frozenset[int], task: int) -> _Use:
    uses = _uses.setdefault(p, {})
    use = uses.get(ranks)
    if use is None or (use.backward != task and p.grad is None):  # the gradient starts anew
        use = uses[ranks] = _Use()
    use.backward = task
    return use


def gradient_kinds(
    named: Sequence[tuple[str, nn.Parameter]], group: ProcessGroup, frozen: bool
) -> list[tuple[bool, bool, bool]]:
    """For each parameter: is its gradient known to be whole, is it known to be partial, or have its values to tell?

    Only the values can tell if the parameter was used neither before ``shard`` nor before ``unshard``, and the backward
    of ``unshard`` has run: it may have been used after ``unshard``. All three are False for a gradient that is a rank's
    part of a sum, as every gradient is without ``shard`` and ``unshard``.

    Args:
        named: parameters by name.
        group: the ranks that their gradients are reduced over.
        frozen: whether the module has frozen parameters too. What comes before ``unshard`` may then be frozen, so that
            ``unshard`` has no backward.
    """
    ranks = frozenset(dist.get_process_group_ranks(group))
    unsharded_over = {
        over for p, uses in _uses.items() if p.grad is not None for over, use in uses.items() if use.unsharded
    }
    kinds = []
    for name, p in named:
        uses = _uses.get(p, {}) if p.grad is not None else {}
        for over, use in uses.items():
            if use.wrapper and len(over & ranks) > 1:
                raise ValueError(
                    f"{name}: its gradient was computed together with gradients that {use.wrapper} averages over the "
                    f"ranks of the sequence, but {use.wrapper} does not hold it; wrap the model as a whole, and leave "
                    "sync_gradients out"
                )
        if any(use.partial and use.after for use in uses.values()):
            raise ValueError(
                f"{name}: used before unshard, where its gradient is a part of a sum, and after unshard, where its "
                "gradient is whole; compute the loss from sharded tokens (token_loss), or wrap the model in DDP or "
                "FSDP over the ranks of the sequence"
            )
        whole_over = {over for over, use in uses.items() if use.whole or use.after} if uses else unsharded_over
        for over in whole_over - {ranks} if uses else ():  # without uses, another model may have been unsharded
            if len(over & ranks) > 1:
                raise ValueError(
                    f"{name}: shard or unshard was called for ranks {sorted(over)}, and sync_gradients for ranks "
                    f"{sorted(ranks)}; pass sync_gradients the same mesh or group, and sum over other ranks afterwards"
                )
        use = uses.get(ranks, _Use())
        unclear = not uses and (ranks in whole_over or (frozen and ranks in _frozen))
        kinds.append((use.whole, use.partial, unclear or use.after))
    return kinds
