"""Finds the wrappers that reduce a model's gradients over ranks: DDP, FSDP1, ``fully_shard`` and DeepSpeed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..checks import no_compile

_DEEPSPEED = "deepspeed.runtime.engine.DeepSpeedEngine"  # recognized by name, because it may not be installed

_wrappers: WeakSet[nn.Module] = WeakSet()  # every wrapper known in this process
_searched: WeakSet[nn.Module] = WeakSet()  # the models for which the process has been searched for wrappers


class Averaging(NamedTuple):
    """A wrapper that averages the gradients of a model.

    Attributes:
        name: the name of its class, for error messages.
        ranks: the global ranks that it averages over.
    """

    name: str
    ranks: frozenset[int]


@no_compile
def averaging_wrappers(model: nn.Module, in_forward: bool) -> set[Averaging]:
    """The wrappers in and around ``model`` that average gradients of its parameters.

    A wrapper counts if it holds any part of the model, as a pipeline stage may. With ``fully_shard``, groups of
    parameters whose ``gradient_divide_factor`` was set by hand do not count.

    Args:
        model: the parallelized model.
        in_forward: whether this function is called in the model's forward. DDP reduces only the gradients of forwards
            that were called through it. In a forward, only the DDP that is running counts. Otherwise every DDP counts.

    Raises:
        ValueError: one of the wrappers is DeepSpeed, whose configuration decides what it divides by.
    """
    known = _known_wrappers(model)
    found: list[nn.Module] = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if known:
        parts = {id(x) for x in chain(model.modules(), model.parameters())}
        found += [w for w in known if any(id(x) in parts for x in chain(w.modules(), w.parameters()))]
    if in_forward:
        active = DistributedDataParallel._active_ddp_module
        found = [w for w in found if not isinstance(w, DistributedDataParallel) or w is active or _in_python(w)]
    return {averaging for wrapper in found for averaging in _averaging(wrapper)}


def gradient_wrappers(model: nn.Module, group: dist.ProcessGroup | None) -> list[Averaging]:
    """The DDP, FSDP1 and ``fully_shard`` modules in ``model``, or ``model`` itself, that average over all ``group``."""
    if group is None:
        return []
    sequence = frozenset(dist.get_process_group_ranks(group))
    kinds = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    found = {averaging for m in model.modules() if isinstance(m, kinds) for averaging in _averaging(m)}
    return [averaging for averaging in found if sequence <= averaging.ranks]


def outermost(model: nn.Module) -> nn.Module:
    """The outermost DDP, FSDP or DeepSpeed engine around ``model``, or ``model`` itself."""
    around = [w for w in _known_wrappers(model) if any(m is model for m in w.modules())]
    return max([model, *around], key=lambda m: sum(1 for _ in m.modules()))


def keeps_weight(head: nn.Linear, model: nn.Module) -> bool:
    """Whether the full weight of ``head`` is available until the forward of ``model`` ends.

    A wrapper that shards ``head`` by itself gathers its weight only for the forward of ``head``.
    """
    if isinstance(head, FSDPModule) or isinstance(head.weight, DTensor) or hasattr(head.weight, "ds_id"):
        return False  # DeepSpeed's ZeRO-3 marks the parameters that it partitions by ds_id
    if any(isinstance(w, FullyShardedDataParallel) and w.module is head for w in _known_wrappers(model)):
        return False
    return tuple(head.weight.shape) == (head.out_features, head.in_features)


def _averaging(wrapper: nn.Module) -> Iterator[Averaging]:
    if isinstance(wrapper, DistributedDataParallel):
        yield Averaging("DistributedDataParallel", frozenset(dist.get_process_group_ranks(wrapper.process_group)))
    elif isinstance(wrapper, FullyShardedDataParallel):
        yield Averaging("FullyShardedDataParallel", _fsdp1_ranks(wrapper))
    elif isinstance(wrapper, FSDPModule):
        for group in _parameter_groups(wrapper):
            if group.gradient_divide_factor is None:
                yield Averaging("fully_shard", frozenset(group.mesh_info.mesh.mesh.flatten().tolist()))
    else:
        raise deepspeed_error(f"the model is inside a {type(wrapper).__name__}")


def deepspeed_error(found: str) -> ValueError:
    """The error for ``gradients="auto"`` with DeepSpeed. ``found`` says where DeepSpeed was found."""
    return ValueError(
        f"gradients='auto': {found}, and DeepSpeed's configuration decides what it divides gradients by; call "
        "parallelize with gradients='mean' if it averages over all ranks of the sequence (its default), or "
        "gradients='partial' if it averages over dp only"
    )


def _fsdp1_ranks(wrapper: Any) -> frozenset[int]:
    """The ranks that an FSDP1 wrapper averages over. With hybrid sharding, they include the ranks of the replicas."""
    if wrapper._device_mesh is not None:
        return frozenset(wrapper._device_mesh.mesh.flatten().tolist())
    ranks = frozenset(dist.get_process_group_ranks(wrapper.process_group))
    replicas = getattr(wrapper, "_inter_node_pg", None)
    if replicas is None:
        return ranks
    if len(ranks) * replicas.size() == dist.get_world_size():
        return frozenset(range(dist.get_world_size()))
    return ranks | frozenset(dist.get_process_group_ranks(replicas))


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    # In torch 2.13 a module may have several parameter groups; in earlier versions it has at most one.
    several = getattr(state, "_fsdp_param_groups", None)
    single = getattr(state, "_fsdp_param_group", None)
    return list(several) if several else [single] if single is not None else []


def _in_python(wrapper: DistributedDataParallel) -> bool:
    """Whether the DDP reduces gradients in any backward, by hooks on parameters (``optimize_ddp="python_reducer"``)."""
    return bool(getattr(wrapper, "_use_python_reducer", False))


def _note(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Add ``module`` to the known wrappers if it is one. torch calls this hook when a module registers a submodule."""
    if _is_wrapper(type(module)):
        _wrappers.add(module)


def _known_wrappers(model: nn.Module) -> list[nn.Module]:
    """Every wrapper in this process.

    The first call for a model also searches the process for wrappers that ``_note`` has not seen: those that were
    created before this file was imported, and those of ``fully_shard``, which registers no submodule.
    """
    if model not in _searched:
        gc.collect()  # free the wrappers that are no longer used
        _wrappers.update(x for x in gc.get_objects() if issubclass(type(x), nn.Module) and _is_wrapper(type(x)))
        _searched.add(model)
    return list(_wrappers)


def _is_wrapper(cls: type[nn.Module]) -> bool:
    if issubclass(cls, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
        return True
    return any(f"{base.__module__}.{base.__qualname__}" == _DEEPSPEED for base in cls.__mro__)


register_module_module_registration_hook(_note)
