"""Whether a tensor or a module is of PyTorch's distributed classes, without importing the modules that define them.

``torch.distributed.tensor`` and ``torch.distributed.fsdp`` take about as long to import as ``torch``, and most programs
use one of them or neither. An object of their classes exists only where its module has been imported.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_FSDP = "torch.distributed.fsdp"


def is_dtensor(x: object) -> TypeIs[DTensor]:
    """Whether ``x`` is a DTensor."""
    if type(x) in (Tensor, nn.Parameter):  # torch.compile can trace this, but not a look into ``sys.modules``
        return False
    return _is_of("torch.distributed.tensor", "DTensor", x)


def is_fsdp1(module: nn.Module) -> TypeIs[FullyShardedDataParallel]:
    """Whether ``module`` is a wrapper of the first FSDP."""
    return _is_of(_FSDP, "FullyShardedDataParallel", module)


def is_fsdp2(module: nn.Module) -> TypeIs[FSDPModule]:  # type: ignore[narrowed-type-not-subtype]
    """Whether ``fully_shard`` has been applied to ``module``."""
    return _is_of(_FSDP, "FSDPModule", module)


def is_flat_parameter(x: Tensor) -> TypeIs[FlatParameter]:
    """Whether ``x`` holds the parameters of a wrapper of the first FSDP, one after another."""
    return _is_of(_FSDP, "FlatParameter", x)


def _is_of(module: str, name: str, x: object) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(x, kind)
