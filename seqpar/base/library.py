"""Operators of ``torch.library``: functions that torch.compile and selective checkpointing see as one node each.

Eager code calls the same operators. ``torch.library.custom_op`` would do, but the autograd.Function that its
``register_autograd`` generates takes 0.1 ms a call where tensors are in lists. Here it is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .checks import no_compile

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
        # Operators wait for messages, which CUDA graphs cannot hold.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
        _library.define(name + torch.library.infer_schema(function, mutates_args=()), tags=tags)
        # After a graph break, torch.compile would trace what an operator calls.
        _library.impl(name, no_compile(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"seqpar::{name}", fake, lib=_library)
        overload = getattr(torch.ops.seqpar, name).default

        def with_autograd(*args: Any) -> Any:
            if autograd is not None and torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
                return autograd(*args)
            with torch._C._AutoDispatchBelowAutograd():
                return overload(*args)

        # A lambda, because no_compile sets attributes, which methods do not have.
        kernel = (lambda *args: autograd(*args)) if autograd and computes else with_autograd
        _library.impl(name, no_compile(kernel) if autograd else torch.library.fallthrough_kernel, "Autograd")
        overload.function, overload.autograd = function, autograd  # for tests that look inside
        return overload

    return define
