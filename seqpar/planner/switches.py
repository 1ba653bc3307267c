"""``Switches``: what a training step does to need less memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Recompute = Literal["none", "keep_attention", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class Switches:
    """What a training step recomputes, offloads or computes some tokens at a time, to need less device memory.

    Attributes:
        recompute: what backward recomputes: nothing ("none"), a layer without its attention ("keep_attention"), or a
            whole layer ("full").
        offload: whether saved activations are copied to host memory until backward.
        chunked_loss: whether logits are computed for some tokens at a time.
        tiled_mlp: whether the MLP is computed for some tokens at a time, and recomputed in backward.
        head_groups: in how many groups of heads the projections to q, k and v and attention are computed, one group
            after another.
    """

    recompute: Recompute = "none"
    offload: bool = False
    chunked_loss: bool = True
    tiled_mlp: bool = False
    head_groups: int = 1

    @property
    def saving(self) -> int:
        """How many of ``offload``, ``tiled_mlp`` and ``head_groups`` are in use."""
        return self.offload + self.tiled_mlp + (self.head_groups > 1)

    def __str__(self) -> str:
        words = {"none": [], "keep_attention": ["recompute all but attention"], "full": ["recompute all"]}
        return ", ".join(
            words[self.recompute]
            + ["offload"] * self.offload
            + ["tiled MLP"] * self.tiled_mlp
            + [f"heads in {self.head_groups} groups"] * (self.head_groups > 1)
            + ["whole logits"] * (not self.chunked_loss)
        )
