"""Finds the wrappers that reduce a model's gradients over ranks: DDP, FSDP1, ``fully_shard`` and DeepSpeed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple
from weakref import WeakSet

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..checks import no_compile
from ..reductions import known_wrappers, reductions

_collected: WeakSet[nn.Module] = WeakSet()  # the models for which unused wrappers have been freed


class Averaging(NamedTuple):
    """A wrapper that averages the gradients of a model."""

    name: str  # of its class, for error messages
    ranks: frozenset[int]  # the global ranks that it averages over


@no_compile
def averaging_wrappers(model: nn.Module, in_forward: bool) -> set[Averaging]:
    """The wrappers in and around ``model`` that average gradients of its parameters.

    A wrapper counts if it holds any part of the model, as a pipeline stage may. With ``fully_shard``, groups of
    parameters whose ``gradient_divide_factor`` was set by hand do not count. DDP reduces only the gradients of forwards
    that were called through it: ``in_forward``, in the model's forward, only the DDP that is running counts.

    Raises:
        ValueError: one of the wrappers is DeepSpeed, whose configuration decides what it divides by.
    """
    found = _known_wrappers(model)
    if found:
        parts = {id(x) for x in chain(model.modules(), model.parameters())}
        found = [w for w in found if any(id(x) in parts for x in chain(w.modules(), w.parameters()))]
    if in_forward:
        active = DistributedDataParallel._active_ddp_module
        found = [w for w in found if not isinstance(w, DistributedDataParallel) or w is active or _in_python(w)]
    return {averaging for wrapper in found for averaging in _averaging(wrapper)}


def gradient_wrappers(model: nn.Module, group: dist.ProcessGroup | None) -> list[Averaging]:
    """The DDP, FSDP1 and ``fully_shard`` modules in ``model``, or ``model`` itself, that average over all ``group``."""
    if group is None:
        return []
    sequence = frozenset(dist.get_process_group_ranks(group))
    types = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    found = {averaging for m in model.modules() if isinstance(m, types) for averaging in _averaging(m)}
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
    for reduction in reductions(wrapper):
        if reduction.divisor is None:
            raise deepspeed_error(f"the model is inside a {reduction.name}")
        if reduction.divisor == len(reduction.ranks):
            yield Averaging(reduction.name, reduction.ranks)


def deepspeed_error(found: str) -> ValueError:
    """The error for ``gradients="auto"`` with DeepSpeed. ``found`` says where DeepSpeed was found."""
    return ValueError(
        f"gradients='auto': {found}, and DeepSpeed's configuration decides what it divides gradients by; call "
        "parallelize with gradients='mean' if it averages over all ranks of the sequence (its default), or "
        "gradients='partial' if it averages over dp only"
    )


def _in_python(wrapper: DistributedDataParallel) -> bool:
    """Whether the DDP reduces gradients in any backward, by hooks on parameters (``optimize_ddp="python_reducer"``)."""
    return bool(getattr(wrapper, "_use_python_reducer", False))


def _known_wrappers(model: nn.Module) -> list[nn.Module]:
    """Every wrapper in this process. The first call for a model frees the wrappers that are no longer used."""
    if model not in _collected:
        gc.collect()
        _collected.add(model)
    return known_wrappers()
