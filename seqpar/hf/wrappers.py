"""The wrappers around a parallelized model that reduce gradients over ranks: DDP, FSDP1, ``fully_shard``, DeepSpeed."""

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

_DEEPSPEED = "deepspeed.runtime.engine.DeepSpeedEngine"  # by its name: it need not be installed

_wrappers: WeakSet[nn.Module] = WeakSet()  # every wrapper known in this process
_searched: WeakSet[nn.Module] = WeakSet()  # the models for which the process has been searched for wrappers


class Averaging(NamedTuple):
    """A wrapper that averages the gradients of a model.

    Attributes:
        name: what it is, for errors.
        ranks: the ranks that it averages over.
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
        in_forward: whether the model's forward is under way. DDP reduces the gradients only of forwards that ran
            through it, so only the DDP whose forward is under way counts then; otherwise every DDP that exists.

    Raises:
        ValueError: DeepSpeed is among them, whose configuration decides what it divides by.
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
    """The DDP, FSDP1 and ``fully_shard`` in ``model``, itself included, that average over the ranks of ``group``."""
    if group is None:
        return []
    sequence = frozenset(dist.get_process_group_ranks(group))
    kinds = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    found = {averaging for m in model.modules() if isinstance(m, kinds) for averaging in _averaging(m)}
    return [averaging for averaging in found if sequence <= averaging.ranks]


def outermost(model: nn.Module) -> nn.Module:
    """The DDP, FSDP or DeepSpeed engine around the whole ``model``, or the model itself."""
    around = [w for w in _known_wrappers(model) if any(m is model for m in w.modules())]
    return max([model, *around], key=lambda m: sum(1 for _ in m.modules()))


def keeps_weight(head: nn.Linear, model: nn.Module) -> bool:
    """Whether the full weight of ``head`` is there until the forward of ``model`` ends, not only in the head's own."""
    if isinstance(head, FSDPModule) or isinstance(head.weight, DTensor) or hasattr(head.weight, "ds_id"):
        return False  # ds_id: a parameter that DeepSpeed's ZeRO-3 partitions
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
    return ValueError(
        f"gradients='auto': {found}, and DeepSpeed's configuration decides what it divides gradients by; call "
        "parallelize with gradients='mean' if it averages over all ranks of the sequence (its default), or "
        "gradients='partial' if it averages over dp only"
    )


def _fsdp1_ranks(wrapper: Any) -> frozenset[int]:
    if wrapper._device_mesh is not None:
        return frozenset(wrapper._device_mesh.mesh.flatten().tolist())
    ranks = frozenset(dist.get_process_group_ranks(wrapper.process_group))
    across = getattr(wrapper, "_inter_node_pg", None)  # hybrid sharding replicates the shards over other ranks
    if across is None:
        return ranks
    if len(ranks) * across.size() == dist.get_world_size():
        return frozenset(range(dist.get_world_size()))
    return ranks | frozenset(dist.get_process_group_ranks(across))


def _parameter_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    # torch 2.13 has several groups a module; earlier versions have one.
    several = getattr(state, "_fsdp_param_groups", None)
    single = getattr(state, "_fsdp_param_group", None)
    return list(several) if several else [single] if single is not None else []


def _in_python(wrapper: DistributedDataParallel) -> bool:
    """Whether it reduces by hooks on the parameters, in any backward (``optimize_ddp="python_reducer"``)."""
    return bool(getattr(wrapper, "_use_python_reducer", False))


def _note(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """Note the wrappers that are made from now on: each registers the module that it wraps."""
    if _is_wrapper(type(module)):
        _wrappers.add(module)


def _known_wrappers(model: nn.Module) -> list[nn.Module]:
    """Every wrapper in this process. The first call for a model finds those that ``_note`` has not seen.

    They were made before this module was imported, or by ``fully_shard``, which registers nothing.
    """
    if model not in _searched:
        gc.collect()  # drops wrappers that nothing uses any more
        _wrappers.update(x for x in gc.get_objects() if issubclass(type(x), nn.Module) and _is_wrapper(type(x)))
        _searched.add(model)
    return list(_wrappers)


def _is_wrapper(cls: type[nn.Module]) -> bool:
    if issubclass(cls, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
        return True
    return any(f"{base.__module__}.{base.__qualname__}" == _DEEPSPEED for base in cls.__mro__)


register_module_module_registration_hook(_note)
