"""Triton's interpreter in less time."""

from __future__ import annotations

from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter


def make_faster() -> None:
    """Leave out most of the interpreter's work that says nothing about the kernels.

    Triton patches ``triton.language`` at every call of a device function; once, when a kernel is launched, is enough.
    It computes every sum and product of integers in int64 too, to detect overflow, which a GPU does not do.
    """
    interpreter._patch_lang(tl.standard.zeros.fn)  # tl.core, which the functions of tl.standard use
    interpreter.InterpretedFunction.__call__ = lambda function, *args, **kwargs: function.rewrite()(*args, **kwargs)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
