"""Operators of ``torch.library``: functions that torch.compile and selective checkpointing see as one node each.

Eager code calls the same operators. ``torch.library.custom_op`` would do, but the autograd.Function that its
``register_autograd`` generates takes 0.1 ms a call where tensors are in lists. Here it is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("seqpar", "FRAGMENT")


def operator(
    fake: Callable[..., Any],
    autograd: Callable[..., Any] | None = None,
    *,
    computes: bool = False,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function, which becomes the operator ``seqpar::<its name>``; its annotations are the schema.

    The function returns new tensors, never its arguments or views of them.

    Args:
        fake: takes the same arguments while a function is traced, and returns tensors without values.
        autograd: takes the same arguments if one of them requires a gradient, and applies an autograd.Function whose
            forward calls the operator again. Gradients are off there, so that this call computes.
        computes: whether ``autograd`` is called without gradients too, because it can compute by itself.
    """

    def define(function: Callable[..., Any]) -> Any:
        name = function.__name__
        _library.define(
            name + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,)
        )
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"seqpar::{name}", fake, lib=_library)
        overload = getattr(torch.ops.seqpar, name).default

        def with_autograd(*args: Any) -> Any:
            if autograd is not None and torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
                return autograd(*args)
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*args)

        kernel = autograd if computes else with_autograd
        _library.impl(name, kernel if autograd else torch.library.fallthrough_kernel, "Autograd")
        overload.function, overload.autograd = function, autograd  # for tests that look inside
        return overload

    return define
