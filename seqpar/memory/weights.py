"""Calls of a module's forward several times in one pass, with gradients of its weights that are summed in float32.

If a bfloat16 weight is used in several calls, autograd sums the calls' gradients in bfloat16 and rounds each sum. Here
a weight is replaced by a ``_Weight``, whose gradient goes to the weight's ``_Sum`` in float32. A ``_Sum`` has the shape
of the weight and no memory: it exists only because autograd adds up the gradients of its uses. The weight itself gets
one gradient, after the last call. DDP and FSDP therefore reduce it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ..layers.exact import is_invariant
from ..patching.forwards import WithoutHooks
from .zero import is_partitioned

OWNER = "seqpar.memory"  # of the forwards that it replaces

# The argument that holds the key/value cache: of transformers 5.24 and later, and of earlier versions.
CACHE_ARGUMENTS = ("cache", "past_key_values")
# The original forward of a module.
OriginalForward = Callable[..., Any]
# By a weight's name and values: the part of the weight that a call uses.
SliceWeight = Callable[[str, Tensor], Tensor]


class _Sum(torch.autograd.Function):
    """A weight to a tensor of its shape, whose gradient is the float32 sum of the gradients of all uses."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.promote_types(weight.dtype, torch.float32)).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Weight(torch.autograd.Function):
    """The values of a weight, for one use. The gradient goes to the weight's ``_Sum``."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, sum_: Tensor) -> Tensor:
        ctx.dtype = sum_.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient.to(ctx.dtype)


class SummedWeights:
    """The trainable weights of a module, for several calls of its forward.

    DTensors and the parameters that DeepSpeed partitions are left as they are: their gradients are summed by autograd.
    """

    def __init__(self, module: nn.Module) -> None:
        if is_invariant(module):
            raise ValueError(
                f"{type(module).__name__}: invariant_layers sums the gradients of its weights over the ranks in each "
                "call, so that it cannot be called for some tokens at a time; leave out tiled_loss and the tiles of "
                "seqpar.Memory"
            )
        self.module = module
        self.sums: dict[str, Tensor] = {
            name: _Sum.apply(p)
            for name, p in module.named_parameters()
            if p.requires_grad and not isinstance(p, DTensor) and not is_partitioned(p)
        }

    def call(self, forward: OriginalForward, *args: Any, cut: SliceWeight | None = None, **kwargs: Any) -> Any:
        """``forward(*args, **kwargs)``, the original forward of the module, with gradients that go to the sums.

        Args:
            forward: the original forward.
            args, kwargs: its arguments.
            cut: by default a call uses all of each weight.
        """
        values: dict[str, Tensor] = {}
        for name, p in self.module.named_parameters():  # looked up anew: a wrapper may have gathered them again
            total = self.sums.get(name)
            if total is not None:
                parts = (p.detach(), total) if cut is None else (cut(name, p.detach()), cut(name, total))
                values[f"module.{name}"] = _Weight.apply(*parts)
            elif cut is not None:
                values[f"module.{name}"] = cut(name, p)
        return functional_call(WithoutHooks(self.module, forward), values, args, kwargs)
