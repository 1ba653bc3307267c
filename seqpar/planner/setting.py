"""``Setting``: what the planner simulates, that is a model on a ``Split``, and how its weights are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Literal

from ..masks.mask import Mask
from .pairs import visible_pairs
from .shape import Layer, ModelShape
from .split import FLOAT32_BYTES, Split, Switches

GRADIENT_BYTES = FLOAT32_BYTES  # gradients of weights are accumulated and reduce-scattered in float32
# AdamW with FSDP2 and a mixed-precision policy, for each weight: 4 bytes each for the float32 weight, its gradient and
# the two moments. Weights in bfloat16 exist only while they are gathered.
STATE_BYTES = 16.0

WeightSharding = Literal["fsdp", "hsdp", "zero2", "zero1"]
WEIGHTS: dict[WeightSharding, str] = {
    "fsdp": "weights, gradients and optimizer sharded over all ranks (ZeRO-3)",
    "hsdp": "the same over the ranks of a host, with a copy on every host",
    "zero2": "the same as fsdp, but gathered weights are kept from forward to backward",
    "zero1": "the same as fsdp, but weights and gradients are whole until the last backward of a step",
}


@dataclass(frozen=True)
class Setting(Split):
    """A model on a split of the ranks.

    Attributes:
        model: the shape of the model.
        accumulation: how often a replica computes ``batch`` sequences in a step, before the optimizer.
        weights: how weights are sharded, see ``WEIGHTS``.
        state_bytes: bytes per weight, for the weight, its gradient and the state of the optimizer.
    """

    _: KW_ONLY
    model: ModelShape
    accumulation: int = 1
    weights: WeightSharding = "fsdp"
    state_bytes: float = STATE_BYTES

    @property
    def state_ranks(self) -> int:
        """Number of ranks that the state of the optimizer is sharded over."""
        return min(self.ranks, self.hardware.gpus_per_host) if self.weights == "hsdp" else self.ranks

    @property
    def layers(self) -> Iterator[tuple[Layer, Split]]:
        """The layers of the model, each with the mask that its queries see."""
        return ((x, replace(self, mask=x.sees(self.mask, self.seq_len))) for x in self.model.layers)

    @property
    def pairs(self) -> int:
        """Visible pairs of a query and a key in one sequence, the mean of all layers, also those without attention."""
        return _mean_pairs(self.model, self.mask, self.seq_len)

    def lacking(self, switches: Switches) -> tuple[str, ...]:
        """The switches in use that ``seqpar.Memory`` lacks.

        It tiles MLPs and groups heads in layers without tensor parallelism.
        """
        grouped = self.model.attention.has_groups(switches.head_groups, self.ulysses)
        lacks = {
            "offload": switches.offload and switches.recompute == "none",
            "tiled_mlp": switches.tiled_mlp and self.tensor > 1,
            "head_groups": switches.head_groups > 1 and (self.tensor > 1 or not grouped),
        }
        return tuple(name for name, is_lacking in lacks.items() if is_lacking)


@lru_cache(maxsize=16)
def _mean_pairs(model: ModelShape, mask: Mask, seq_len: int) -> int:
    seen = ((x.count, x.attention, x.sees(mask, seq_len)) for x in model.layers if x.attention)
    pairs = (count * (visible_pairs(mask, seq_len) + x.more_pairs(seq_len)) for count, x, mask in seen)
    return sum(pairs) // model.depth
