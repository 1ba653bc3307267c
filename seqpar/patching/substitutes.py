"""Small weights in place of a model's, for runs on a few tokens that find out what the model computes from what."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

_SMALL = 1 << 16  # parameters of at most so many elements are replaced by contiguous tensors


def _set_entries(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(values)


@contextmanager
def substituted(
    root: nn.Module, of: Callable[[Tensor, bool], Tensor], keeps: Callable[[Any], bool] = lambda hook: False
) -> Iterator[None]:
    """In the block, ``of(x, is_parameter)`` replaces each tensor of the modules, and only hooks that ``keeps`` run.

    After the block, the modules have the attributes, hooks, parameters and buffers that they had before.
    """
    with ExitStack() as stack:
        shared: dict[int, Tensor] = {}  # by the id of a parameter or buffer, which several modules may share
        for module in root.modules():
            for attributes in (vars(module), *(x for x in vars(module).values() if type(x) in (dict, OrderedDict))):
                stack.callback(_set_entries, attributes, dict(attributes))
            stores: tuple[dict[str, Any], dict[str, Any]] = module._parameters, module._buffers
            for store in stores:
                for name, x in store.items():
                    if x is not None:
                        store[name] = shared.setdefault(id(x), of(x, store is stores[0]))
            if is_quantized(module):
                vars(module)["forward"] = partial(linear, features=cast(int, module.out_features))
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if not keeps(hook)]:
                    del hooks[key]
        yield


def substitute(x: Tensor, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of the shape of ``x`` that takes a few kilobytes, because its rows overlap in memory."""
    shape = tuple(getattr(x, "ds_shape", x.shape))  # DeepSpeed's ZeRO-3 keeps the shape of a parameter there
    if not x.is_floating_point():
        return torch.zeros((), dtype=x.dtype, device=device).expand(shape)
    size = sum(n - 1 for n in shape) + 1
    values = (torch.sin(count(size, device) * 1.7 + 0.3) * 0.5 + 0.1).to(dtype)
    overlapping = torch.as_strided(values, shape, (1,) * len(shape))
    if overlapping.numel() <= _SMALL:
        overlapping = overlapping.contiguous()  # model code may call view() on small parameters
    # A parameter may only be replaced by another nn.Parameter.
    return nn.Parameter(overlapping, requires_grad=False)


def count(size: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(size, dtype=torch.float32, device=device)


def linear(x: Tensor, features: int) -> Tensor:
    """``x [..., channels]`` to ``[..., features]``: sums of two channels and the mean, each with a different factor."""
    x = x + 0.5 * x.roll(3, -1) + x.mean(-1, keepdim=True)
    copies = -(-features // x.shape[-1])
    out = x.repeat(*[1] * (x.dim() - 1), copies)[..., :features]
    return out * (1 + 0.3 * torch.cos(count(features, x.device) * 0.9)).to(x.dtype)


def own_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention ``[b, h, s, d]`` in which a token sees itself only. It depends on the token's q, k and v."""
    token = (v + k.mean(-1, keepdim=True)).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return token + q.mean(-1, keepdim=True)


def is_quantized(module: nn.Module) -> bool:
    """Whether ``module`` is a linear layer with integer weights, of which only its class knows how they multiply."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if any(module.children()) or not all(isinstance(size, int) for size in sizes):
        return False
    return any(x.numel() > 1 and not x.is_floating_point() for x in (*module.parameters(), *module.buffers()))


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors of numbers in tuples, lists and dicts."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, tuple | list):
        for x in values:
            yield from tensors_of(x)
    elif hasattr(values, "values"):
        for x in values.values():
            yield from tensors_of(x)
