"""What DeepSpeed's ZeRO-3 does with a module, as far as seqpar has to know it."""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from torch import Tensor


def is_partitioned(p: Tensor) -> bool:
    """Whether ZeRO-3 partitions the parameter ``p``: each rank holds a part of it, except while it is used."""
    utils = sys.modules.get("deepspeed.runtime.zero.utils")
    return utils is not None and bool(utils.is_zero_param(p))


def is_hook_of_zero_3(hook: Any) -> bool:
    """Whether ``hook`` is one of the hooks that ZeRO-3 registers on each module, to gather and free its parameters."""
    offload, nvtx = (sys.modules.get(f"deepspeed.{name}") for name in ("runtime.zero.parameter_offload", "utils.nvtx"))
    register = getattr(getattr(offload, "DeepSpeedZeRoOffload", None), "_register_deepspeed_module", None)
    if _defined_in(getattr(nvtx, "instrument_w_nvtx", None), hook):  # around the hook, to measure its time
        return any(_defined_in(register, cell.cell_contents) for cell in hook.__closure__)
    return _defined_in(register, hook)


def _defined_in(outer: Any, function: Any) -> bool:
    """Whether ``function`` is defined in the body of the function ``outer``."""
    return getattr(function, "__code__", None) in [
        x for x in getattr(getattr(outer, "__code__", None), "co_consts", ()) if isinstance(x, CodeType)
    ]
