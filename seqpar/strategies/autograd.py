"""Which ranks take part in the backward of attention, and the dtype of autocast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..placement.placement import ANY_RANKS, ParallelContext
from ..sharding.sharding import Sharding
from ..sharding.spec import AttentionSpec


def gradient_state(*tensors: Tensor | None) -> int:
    """Whether this rank needs a backward, as a number that ``any_needs_gradient`` reads: 0 if gradients are turned off,
    2 if one of the tensors requires a gradient, and 1 if none does."""
    if not torch.is_grad_enabled():
        return 0
    return 2 if any(x is not None and x.requires_grad for x in tensors) else 1


def any_needs_gradient(states: Sequence[int]) -> bool:
    """Whether a backward will run, in which all ranks take part. ``states`` is the ``gradient_state`` of each rank."""
    without, needing = ([rank for rank, state in enumerate(states) if state == value] for value in (0, 2))
    if without and needing:
        raise ValueError(
            f"gradients: rank(s) {without} of the group run under torch.no_grad(), but the inputs of rank(s) {needing} "
            "require gradients; use the same mode on every rank"
        )
    return bool(needing)


def with_gradient(x: Tensor) -> Tensor:
    """``x``, or an alias of it that requires a gradient if gradients are on. In compiled code, ``x``.

    The backward of attention communicates. A rank whose inputs require no gradient would not run it, and the ranks
    whose inputs do would wait for it. With the alias it takes part.
    """
    if x.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return x
    return x.detach().requires_grad_()


def join_backward(
    q: Tensor,
    others: Sequence[Tensor | None],
    spec: AttentionSpec,
    sharding: Sharding,
    ranks: ParallelContext = ANY_RANKS,
) -> Tensor:
    """``q``, or an alias that requires a gradient if attention sends messages and no tensor of this rank requires one.

    The backward of attention communicates. A rank whose inputs require no gradient would not run it, and the ranks
    whose inputs do would wait for it. With the alias it takes part.
    """
    if gradient_state(q, *others) == 1 and sharding.place(spec, ranks).sends:
        return with_gradient(q)
    return q


def to_autocast_dtype(*tensors: Tensor) -> list[Tensor]:
    """The tensors, cast to autocast's dtype if autocast is on. As in PyTorch's own operators, float64 is not cast.

    Call it before a custom autograd.Function, inside of which autocast does nothing.
    """
    if not autocasts():
        return list(tensors)
    device_type = tensors[0].device.type
    # torch 2.11 cannot trace ``is_autocast_available``. All devices for which code is compiled have autocast.
    known = device_type in _HAVE_AUTOCAST or torch.compiler.is_compiling()
    if not (known or torch.amp.is_autocast_available(device_type)) or not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


_NO_AUTOCAST = nullcontext()
autocasts = torch._C._is_any_autocast_enabled  # on any device: it takes long to ask for the device of a tensor
_HAVE_AUTOCAST = "cpu", "cuda"  # which PyTorch need not be asked


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """In the block, autocast is off for tensors on the device of ``like``."""
    if not autocasts():
        return _NO_AUTOCAST
    device_type = like.device.type
    available = device_type in _HAVE_AUTOCAST or torch.amp.is_autocast_available(device_type)
    if available and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NO_AUTOCAST


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's decorator, which does nothing where no gradient of the gradient is asked for."""
    once = torch.autograd.function.once_differentiable(backward)

    @wraps(backward)
    def of_mode(*args: Any) -> Any:
        return once(*args) if torch.is_grad_enabled() else backward(*args)

    return of_mode
