"""Triton's interpreter in less time."""

from __future__ import annotations

import triton.language as tl
from triton.runtime import interpreter


def patch_language_once() -> None:
    """Patch ``triton.language`` only when a kernel is launched.

    Triton also patches it at every call of a device function, which takes more than a third of the interpreter's time.
    """
    interpreter._patch_lang(tl.standard.zeros.fn)  # tl.core, which the functions of tl.standard use
    interpreter.InterpretedFunction.__call__ = lambda function, *args, **kwargs: function.rewrite()(*args, **kwargs)
