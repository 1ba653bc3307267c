"""The attention modules of a parallelized model, and their attention as an operator, for compiled blocks.

A compiled block knows which module attends. The operator finds the call of the model that is running, with its lengths
and masks, when it runs.

Shapes: b batch, s tokens, h heads, d head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..base.compile_types import Opaque, register_reference_type
from ..scaled_dot_product import SdpaCall
from ..strategies.eager_operators import EagerCall, call_operator, eager_operator, run_eagerly
from .plans import Across

KEYS = "encoder_hidden_states"  # the argument of diffusers' attention modules that has the keys' tokens


@register_reference_type(lambda site: [site.is_sharded, site.place_of_keys], reads=["is_sharded", "place_of_keys"])
class AttentionSite(Opaque):
    """An attention module of a parallelized model. Compiled code depends on the attributes of its guards only.

    Attributes:
        name: the name of the module in the model.
        module: the module.
        streams: the streams whose tokens it joins, as in the plan.
        now: ``now(name)`` returns the ``CallMode`` of the call that is running.
        is_sharded: whether it attends over sharded tokens.
        place_of_keys: the index of its argument ``KEYS``, -1 if that is passed by name only; None if it has none.
    """

    def __init__(
        self, name: str, module: nn.Module, streams: tuple[str, ...] | Across, now: Callable[[str], Any]
    ) -> None:
        self.name, self.module, self.streams, self.now = name, module, streams, now
        self.is_sharded = bool(streams)
        parameters = inspect.signature(module.forward).parameters
        self.place_of_keys = [*parameters].index(KEYS) if KEYS in parameters else None
        if KEYS in parameters and parameters[KEYS].kind is inspect.Parameter.KEYWORD_ONLY:
            self.place_of_keys = -1


def lacks_keys(site: AttentionSite, args: Any, kwargs: Any) -> bool:
    """Whether the module could get the tokens of its keys in a call, but does not."""
    place = site.place_of_keys
    if place is None:
        return False
    return kwargs.get(KEYS, args[place] if 0 <= place < len(args) else None) is None


@eager_operator
def attend_tokens(
    inputs: Sequence[Tensor], sizes: Sequence[int], needs: Sequence[bool], call: EagerCall, site: AttentionSite
) -> list[Tensor]:
    """The results of ``run_eagerly``, which has the first arguments, for attention in a parallelized model."""

    def attend(lacks: bool, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        query, key, value = (x.transpose(-2, -3) for x in (query, key, value))  # [b, h, s, d]
        with torch._C.DisableTorchFunction():
            out: Tensor = site.now(site.name).attend_at(site, lacks, SdpaCall(query, key, value, *others))
        return out.transpose(-2, -3)

    return run_eagerly(attend, site.name, inputs, sizes, needs, call)


def attend_compiled(site: AttentionSite, lacks: bool, call: SdpaCall) -> Tensor:
    """Attention ``[b, h, s, d]`` of the module in a compiled block."""
    # Modules compute [b, s, h, d], which the operator need not copy.
    query, key, value = (x.transpose(-2, -3) for x in call[:3])
    device_type, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    like = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=dtype)
    out: Tensor = call_operator(attend_tokens, like, (lacks, query, key, value, *call[3:]), {}, site)
    return out.transpose(-2, -3)
