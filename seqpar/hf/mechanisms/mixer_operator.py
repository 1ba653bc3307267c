"""A mixer of a transformers model as one operator, for compiled layers.

Which rows a mixer sends, and how often it calls its function, depends on the length and the documents of a batch. The
operator gets the sharding and the mask as arguments, so that a compiled layer depends on neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...base.compile_types import Opaque, register_reference_type
from ...masks.mask import Mask
from ...sharding.sharding import Sharding
from ...strategies.eager_operators import EagerCall, eager_operator, run_eagerly

_FULL = Mask.full()


@register_reference_type()
class MixerFunction(Opaque):
    """A function that mixes tokens.

    Attributes:
        name: the name of the function, for errors.
        run: ``run(options, *args, **kwargs)`` returns what the function returns for this rank's tokens.
    """

    def __init__(self, name: str, run: Callable[..., Any]) -> None:
        self.name, self.run = name, run


@eager_operator
def mix_tokens(
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    needs: Sequence[bool],
    call: EagerCall,
    mixer: MixerFunction,
    sharding: Sharding,
    mask: Mask,
) -> list[Tensor]:
    """The results of ``run_eagerly``, which has the first arguments, for a mixer over a sharded sequence."""
    options = {"sharding": sharding, "mask": None if mask == _FULL else mask}
    return run_eagerly(partial(mixer.run, options), mixer.name, inputs, sizes, needs, call)
