"""The wrappers that reduce a model's gradients over ranks: DDP, FSDP1, ``fully_shard`` and DeepSpeed.

``owners`` says what they do to the gradient of each parameter. The functions after it find the wrappers of one model.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from .checks import no_compile

EXPLICIT = (
    "pass token_loss gradients='mean' if it averages over all ranks of the sequence, otherwise gradients='sum' "
    "(in seqpar.hf.parallelize: 'mean' or 'partial')"
)
_DEEPSPEED = "deepspeed.runtime.engine.DeepSpeedEngine"  # recognized by name, because it may not be installed

_wrappers: WeakSet[nn.Module] = WeakSet()  # every DDP, FSDP1 and DeepSpeed wrapper known in this process
_searched = [False]  # whether the process has been searched for wrappers that were made before this file was imported


@dataclass(frozen=True)
class Reduction:
    """What a wrapper does to the gradients of its parameters: the sum over ``ranks``, divided by ``divisor``."""

    ranks: frozenset[int]  # global ranks
    divisor: float | None  # None if it is not known (DeepSpeed)
    name: str = field(compare=False)  # of the wrapper's class
    groups: tuple[ProcessGroup, ...] = field(compare=False)  # a sum over one after another is a sum over ``ranks``


class Owners(NamedTuple):
    """Who reduces the gradients of which parameters in this process."""

    # By the ``id`` of a parameter, or of the tensor that is in autograd's graph in its place.
    reductions: dict[int, tuple[Reduction, ...]]
    # By the ``id`` of such a tensor: the parameters that it stands for.
    parameters: dict[int, tuple[nn.Parameter, ...]]


def owners() -> Owners:
    """The owners of all parameters. This runs in every backward, so it creates few objects."""
    ownership = Owners({}, {})
    for wrapper in known_wrappers():
        if isinstance(wrapper, FSDPModule):
            for reduction, group in zip(reductions(wrapper), parameter_groups(wrapper), strict=True):
                for p in group.fsdp_params:
                    _add(ownership, (reduction,), (p.sharded_param,), getattr(p, "_unsharded_param", None))
            continue
        in_graph: Any = None
        # A wrapper whose constructor has raised an error may lack its attributes.
        if isinstance(wrapper, DistributedDataParallel):
            parameters = tuple(vars(wrapper).get("_module_parameters", ()))
        elif isinstance(wrapper, FullyShardedDataParallel):
            in_graph = getattr(vars(wrapper).get("_handle"), "flat_param", None)
            parameters = () if in_graph is None else tuple(in_graph._params or [in_graph])
        else:
            parameters = tuple(wrapper.parameters())
        if parameters:
            _add(ownership, tuple(reductions(wrapper)), parameters, in_graph)
    return ownership


def _add(ownership: Owners, found: tuple[Reduction, ...], parameters: Sequence[nn.Parameter], in_graph: Any) -> None:
    """Add the owners of some parameters. ``in_graph`` stands for all of them in autograd's graph, unless it is None."""
    for p in parameters:
        ownership.reductions[id(p)] = ownership.reductions[id(p)] + found if id(p) in ownership.reductions else found
    if in_graph is not None:
        ownership.reductions[id(in_graph)] = found
        ownership.parameters[id(in_graph)] = tuple(parameters)


def reductions(wrapper: nn.Module) -> Iterator[Reduction]:
    """What a wrapper does to gradients: one reduction, or one for each group of parameters of ``fully_shard``."""
    if isinstance(wrapper, DistributedDataParallel):
        yield _average("DistributedDataParallel", [wrapper.process_group])
    elif isinstance(wrapper, FullyShardedDataParallel):
        groups = [wrapper.process_group, getattr(wrapper, "_inter_node_pg", None)]
        yield _average("FullyShardedDataParallel", groups, _hybrid_ranks(wrapper))
    elif isinstance(wrapper, FSDPModule):
        for group in parameter_groups(wrapper):
            info = group.mesh_info
            groups = [getattr(info, f"{kind}_process_group", None) for kind in ("shard", "replicate")]
            hybrid = None not in groups
            reduction = _average(
                "fully_shard", groups, frozenset(info.mesh.mesh.flatten().tolist()) if hybrid else None
            )
            by_hand = group.gradient_divide_factor
            yield reduction if by_hand is None else replace(reduction, divisor=by_hand)
    else:
        yield Reduction(frozenset(range(dist.get_world_size())), None, type(wrapper).__name__, ())


def _average(name: str, groups: Iterable[ProcessGroup | None], ranks: frozenset[int] | None = None) -> Reduction:
    present = tuple(group for group in groups if group is not None)
    try:
        ranks = ranks or frozenset(dist.get_process_group_ranks(present[0]))
    except KeyError:  # the group has been destroyed, and with it the wrapper's use
        ranks = frozenset()
    return Reduction(ranks, len(ranks), name, present)


def _hybrid_ranks(wrapper: Any) -> frozenset[int] | None:
    """With hybrid sharding, the ranks of an FSDP1 wrapper's shards and replicas together."""
    if wrapper._device_mesh is not None:
        return frozenset(wrapper._device_mesh.mesh.flatten().tolist())
    replicas = getattr(wrapper, "_inter_node_pg", None)
    if replicas is None:
        return None
    if wrapper.process_group.size() * replicas.size() == dist.get_world_size():
        return frozenset(range(dist.get_world_size()))
    return frozenset(chain(*map(dist.get_process_group_ranks, (wrapper.process_group, replicas))))


def parameter_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that ``fully_shard`` made for ``module`` itself."""
    state = module._get_fsdp_state()
    # In torch 2.13 a module may have several parameter groups; in earlier versions it has at most one.
    several = getattr(state, "_fsdp_param_groups", None)
    single = getattr(state, "_fsdp_param_group", None)
    return list(several) if several else [single] if single is not None else []


def known_wrappers() -> list[nn.Module]:
    """Every DDP, FSDP1 and DeepSpeed wrapper and every module of ``fully_shard`` in this process.

    The first call also searches the process for wrappers that were created before this file was imported.
    """
    if not _searched[0]:
        _wrappers.update(x for x in gc.get_objects() if issubclass(type(x), nn.Module) and _is_wrapper(type(x)))
        _searched[0] = True
    return [*_wrappers, *(m for m in list(_module_state_mapping) if isinstance(m, FSDPModule))]


def _is_wrapper(cls: type[nn.Module]) -> bool:
    if issubclass(cls, DistributedDataParallel | FullyShardedDataParallel):
        return True
    return any(f"{base.__module__}.{base.__qualname__}" == _DEEPSPEED for base in cls.__mro__)


def _remember(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Add ``module`` to the known wrappers if it is one. torch calls this hook when a module registers a submodule."""
    if _is_wrapper(type(module)):
        _wrappers.add(module)


register_module_module_registration_hook(_remember)


_collected: WeakSet[nn.Module] = WeakSet()  # the models for which unused wrappers have been freed


@no_compile
def averaging_wrappers(model: nn.Module, in_forward: bool) -> set[Reduction]:
    """What the wrappers in and around ``model`` do that average gradients of its parameters, or divide them by a number
    that is not known (DeepSpeed).

    A wrapper counts if it holds any part of the model, as a pipeline stage may. With ``fully_shard``, groups of
    parameters whose ``gradient_divide_factor`` was set by hand do not count. DDP reduces only the gradients of forwards
    that were called through it: ``in_forward``, in the model's forward, only the DDP that is running counts.
    """
    found = _known_wrappers(model)
    if found:
        parts = {id(x) for x in chain(model.modules(), model.parameters())}
        found = [w for w in found if any(id(x) in parts for x in chain(w.modules(), w.parameters()))]
    if in_forward:
        active = DistributedDataParallel._active_ddp_module
        found = [w for w in found if not isinstance(w, DistributedDataParallel) or w is active or _in_python(w)]
    several = (r for wrapper in found for r in reductions(wrapper) if len(r.ranks) > 1)
    return {r for r in several if r.divisor in (None, len(r.ranks))}


def averages_over(group: ProcessGroup | None, model: nn.Module) -> bool:
    """Whether a DDP, FSDP1 or ``fully_shard`` module in ``model``, or ``model`` itself, averages over all ``group``."""
    if group is None:
        return False
    sequence = frozenset(dist.get_process_group_ranks(group))
    types = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    found = (r for m in model.modules() if isinstance(m, types) for r in reductions(m))
    return any(r.divisor == len(r.ranks) and sequence <= r.ranks for r in found)


def averaged_ranks(found: Iterable[Reduction], ranks: frozenset[int], tensor_ranks: Collection[int] = ()) -> int:
    """The number of ranks of the sequence that wrappers average over: ``len(ranks)``, or 1 without such a wrapper.

    Raises:
        ValueError: a wrapper averages over some of the ranks only, or divides by a number that is not known; or one
            wrapper averages over the ranks, and another does not.
    """
    factors = set()
    for r in found:
        if r.divisor is None:
            raise ValueError(
                f"gradients='auto': the model is inside a {r.name}, and DeepSpeed's configuration decides what it "
                f"divides by; {EXPLICIT}"
            )
        shared = len(r.ranks & ranks)
        # Under tensor parallelism, fully_shard reduces over the ring, and sync_gradients over the ranks of tp.
        in_ring = ranks.issuperset(tensor_ranks) and len(tensor_ranks) < len(ranks)
        if 1 < shared < len(ranks) and not (in_ring and len(r.ranks.intersection(tensor_ranks)) == 1):
            raise ValueError(
                f"gradients='auto': {r.name} averages over ranks {sorted(r.ranks)}, which are some but not all of the "
                f"ranks of the sequence, {sorted(ranks)}; wrap the model over all of them, or over dp only"
            )
        factors.add(shared)
    if len(factors) > 1:
        raise ValueError(
            "gradients='auto': a part of the model is wrapped over the ranks of the sequence, another over dp only; "
            "wrap all of it over the same ranks"
        )
    return factors.pop() if factors else 1


def outermost(model: nn.Module) -> nn.Module:
    """The outermost DDP, FSDP or DeepSpeed engine around ``model``, or ``model`` itself."""
    enclosing = [w for w in _known_wrappers(model) if any(m is model for m in w.modules())]
    return max([model, *enclosing], key=lambda m: sum(1 for _ in m.modules()))


def keeps_weight(head: nn.Linear, model: nn.Module) -> bool:
    """Whether the full weight of ``head`` is available until the forward of ``model`` ends.

    A wrapper that shards ``head`` by itself gathers its weight only for the forward of ``head``.
    """
    if isinstance(head, FSDPModule) or isinstance(head.weight, DTensor) or hasattr(head.weight, "ds_id"):
        return False  # DeepSpeed's ZeRO-3 marks the parameters that it partitions by ds_id
    if any(isinstance(w, FullyShardedDataParallel) and w.module is head for w in _known_wrappers(model)):
        return False
    return tuple(head.weight.shape) == (head.out_features, head.in_features)


def _in_python(wrapper: DistributedDataParallel) -> bool:
    """Whether the DDP reduces gradients in any backward, by hooks on parameters (``optimize_ddp="python_reducer"``)."""
    return bool(getattr(wrapper, "_use_python_reducer", False))


def _known_wrappers(model: nn.Module) -> list[nn.Module]:
    """Every wrapper in this process. The first call for a model frees the wrappers that are no longer used."""
    if model not in _collected:
        gc.collect()
        _collected.add(model)
    return known_wrappers()
