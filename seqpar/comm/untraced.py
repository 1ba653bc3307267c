"""Functions that torch.compile leaves alone."""

from __future__ import annotations

# torch.compiler.disable, but it keeps signatures and imports the compiler (half a second) at the first call only.
from torch._compile import _disable_dynamo as untraced

__all__ = ["untraced"]
