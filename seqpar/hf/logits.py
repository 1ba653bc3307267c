"""Logits that are not made until a loss asks for them, a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .forward import current

Pointwise = Callable[[Tensor], Tensor]


def before_head(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Where a loss is to come, the output embedding gets no tokens; the call keeps them."""
    call = current()
    if call is None or not call.wants_loss or not _is_plain(head):
        return None
    call.hidden = args[0]
    return (args[0][..., :0, :], *args[1:])


def after_head(head: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
    """Logits to come, in place of those of no token."""
    call = current()
    if call is None or call.hidden is None:
        return None
    hidden, call.hidden = call.hidden, None
    return LazyLogits(cast(nn.Linear, head), hidden, ())


def _is_plain(head: nn.Module) -> bool:
    """A whole linear layer, whose weight is at hand until the model's forward ends."""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and not isinstance(head, FSDPModule)
        and not isinstance(head.weight, DTensor)
        and tuple(head.weight.shape) == (head.out_features, head.in_features)
    )


class LazyLogits:
    """``head(hidden)`` and what a model does to its logits element by element (a softcap, a scale), not yet done.

    Anything else that is asked of it makes the logits.
    """

    def __init__(self, head: nn.Linear, hidden: Tensor, pointwise: tuple[Pointwise, ...]) -> None:
        self.head = head
        self.hidden = hidden  # [..., hidden]
        self.pointwise = pointwise

    def then(self, step: Pointwise) -> LazyLogits:
        return LazyLogits(self.head, self.hidden, (*self.pointwise, step))

    def make(self) -> Tensor:
        """The logits ``[..., vocabulary]``."""
        logits = F.linear(self.hidden, self.head.weight, self.head.bias)
        for step in self.pointwise:
            logits = step(logits)
        return logits

    def _with(self, operation: Callable[[Any, Any], Any], other: Any) -> Any:
        if isinstance(other, int | float):
            return self.then(lambda x: operation(x, other))
        return operation(self.make(), other)

    def __truediv__(self, other: Any) -> Any:
        return self._with(torch.true_divide, other)

    def __mul__(self, other: Any) -> Any:
        return self._with(torch.mul, other)

    __rmul__ = __mul__

    def float(self) -> LazyLogits:
        return self.then(lambda x: x.float())

    def tanh(self) -> LazyLogits:
        return self.then(torch.tanh)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and isinstance(args[0], LazyLogits):
            return args[0].tanh()
        made = [x.make() if isinstance(x, LazyLogits) else x for x in args]
        return function(*made, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.make(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.make()[index]
