"""``Mlp`` and ``CrossAttention``: the parts of a layer that need no messages between the ranks of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .part import LayerPart, PartRow
from .rank import RankTimeline
from .split import ELEMENT_BYTES, Split, Switches

TILE_TOKENS = 32_768  # of a tiled MLP, at most


@dataclass(frozen=True)
class Mlp(LayerPart):
    """An MLP, or a mixture of experts.

    Attributes:
        width: the width of the MLP; of one expert in a mixture of experts.
        gated: True for an MLP with a gate (SwiGLU, three matrices), False for one without (GeLU, two matrices).
        experts: number of experts; 0 for an MLP without experts.
        active_experts: experts that compute each token.
        shared_width: the width of the shared expert, which computes every token; 0 if there is none.
    """

    width: int
    gated: bool = True
    experts: int = 0
    active_experts: int = 0
    shared_width: int = 0

    mixes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active_experts > self.experts or (self.experts and not self.active_experts):
            raise ValueError(
                f"model: active_experts={self.active_experts}: expected at least 1 and at most experts={self.experts}"
            )

    @property
    def _token_width(self) -> int:
        """The summed width of the MLPs that compute one token."""
        return max(1, self.active_experts) * self.width + self.shared_width

    @property
    def _elements(self) -> int:
        """Elements that a token keeps besides its input.

        With a gate: the outputs of gate and up, silu(gate), and its product with up. Without: the input and output of
        GeLU. With experts: also each expert's copy of its tokens, and its outputs, which the weights of the router
        multiply.
        """
        return (4 if self.gated else 2) * self._token_width + 2 * self.active_experts * self.hidden

    @property
    def row(self) -> PartRow:
        matrices, moved, moved_backward = (3, 3, 5) if self.gated else (2, 2, 3)
        matrix, copies = self.hidden * self._token_width, self.active_experts * self.hidden
        idle = max(1, self.experts) - max(1, self.active_experts)
        return PartRow(
            before=(matrices - 1) * matrix,
            after=matrix,
            unused=matrices * self.hidden * idle * self.width,
            moved=moved * self._token_width + 4 * copies,  # of the activation, and of the copies to experts and back
            moved_backward=moved_backward * self._token_width + 8 * copies,
            tensor_parallel=not self.experts,
            is_forecast=not self.experts,  # no published run names its settings well enough, except one of 1M tokens
        )

    def pieces(self, split: Split, switches: Switches) -> int:
        return -(-split.most_tokens // TILE_TOKENS) if switches.tiled_mlp else 0

    def kept(self, split: Split, pieces: int = 1) -> float:
        return ELEMENT_BYTES * self._elements * (split.most_tokens / pieces)

    def working(self, split: Split, pieces: int = 1) -> float:
        """The gradients of the activations of a piece, and of the input and output."""
        ends = 2 * ELEMENT_BYTES * split.most_tokens * self.hidden
        if split.tensor > 1:  # also the input of two tensor-parallel ranks
            ends *= 2
        return self.kept(split, pieces) / (2 if self.gated else 1) + ends

    def product_seconds(self, rank: RankTimeline) -> tuple[float, float]:
        """With experts, at least the time in which the weights of all experts are read."""
        before, after = super().product_seconds(rank)
        if self.experts:
            matrices = 3 if self.gated else 2
            read = ELEMENT_BYTES * self.row.weights / matrices / rank.split.tensor
            after = max(after, read / rank.split.hardware.memory_bandwidth)
            before = (matrices - 1) * after
        return before, after


@dataclass(frozen=True)
class CrossAttention(LayerPart):
    """Attention to the text, whose keys and values every rank holds, as in diffusers' transformers.

    Attributes:
        width: elements of q for one token.
        keys: tokens of the text.
    """

    width: int
    keys: int

    @property
    def row(self) -> PartRow:
        weights, flops = self.hidden * self.width, 4.0 * self.width * self.keys
        return PartRow(weights, weights, flops=flops, tensor_parallel=False)

    def kept(self, split: Split, pieces: int = 1) -> float:
        """The input and output of a norm of its own, q and the output."""
        return float(ELEMENT_BYTES * (2 * self.hidden + 2 * self.width) * split.most_tokens)

    def record(self, rank: RankTimeline, backward: bool = False) -> None:
        rank.compute("attention to the text", (2 if backward else 1) * self.row.flops * rank.tokens)
