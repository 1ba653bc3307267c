"""``LayerPart``: a kind of layer, as a row of sizes with what it computes, sends and keeps.

Each kind has one class in a file of its own: ``SelfAttention`` (``attention.py``), ``ChosenKeys`` (``chosen_keys.py``),
``CompressedKeys`` and ``Streams`` (``compressed_keys.py``), ``Mixer`` (``mixer.py``),
``CrossAttention`` and ``Mlp`` (``mlp.py``). A new kind is another subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, NamedTuple

from ..base.checks import check_int
from ..masks.mask import Mask
from .rank import RankTimeline
from .split import Split, Switches


class PartRow(NamedTuple):
    """What the rest of the planner asks of a part of a layer. Numbers are of one token in forward.

    Attributes:
        before: weights that it is multiplied by before the part's own computation.
        after: weights that it is multiplied by after it.
        between: weights that it is multiplied by in it.
        unused: weights that it is not multiplied by, such as the weights of other experts.
        flops: FLOPs besides the products with weights and self-attention.
        moved: elements that are read and written between the products, besides the part's own computation.
        moved_backward: the same in backward.
        tensor_parallel: whether the package has tensor-parallel layers for it.
        takes_memory: whether ``seqpar.Memory`` changes layers with it.
        is_forecast: whether the planner's forecasts have been compared with published runs with it.
    """

    before: float
    after: float
    between: float = 0
    unused: float = 0
    flops: float = 0.0
    moved: float = 0
    moved_backward: float = 0
    tensor_parallel: bool = True
    takes_memory: bool = True
    is_forecast: bool = True

    @property
    def multiplied(self) -> float:
        """Number of weights that a token is multiplied by."""
        return self.before + self.between + self.after

    @property
    def weights(self) -> float:
        """Number of weights, without norms, biases and routers."""
        return self.multiplied + self.unused


@dataclass(frozen=True)
class LayerPart(ABC):
    """A part of a layer: a product with some weights, its own computation and messages, and a product with others.

    The operations besides products and attention only read and write device memory.

    Attributes:
        hidden: the hidden size.
        mixes: whether tokens see each other in it. Parts that mix tokens share one norm and one residual.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is out of range, or does not fit another one.
    """

    hidden: int

    mixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                check_int(f"model: {field.name}", getattr(self, field.name), 0 if field.default == 0 else 1)

    @property
    @abstractmethod
    def row(self) -> PartRow:
        """Its numbers."""

    def sees(self, mask: Mask, seq_len: int) -> Mask:
        """Which keys its queries see in a sequence with ``mask``."""
        return mask

    # Its memory

    def pieces(self, split: Split, switches: Switches) -> int:
        """In how many pieces it is computed, of which backward recomputes one at a time; 0 for a part that keeps all
        its activations."""
        return 0

    @abstractmethod
    def kept(self, split: Split, pieces: int = 1) -> float:
        """Bytes of tensors that autograd keeps on the rank with the longest shard for one of ``pieces`` pieces."""

    def checkpointed(self, split: Split) -> list[float]:
        """Bytes of each tensor that is kept if all but attention is recomputed."""
        return []

    def working(self, split: Split, pieces: int = 1) -> float:
        """Bytes of the temporary tensors of the backward of one of ``pieces`` pieces."""
        return 0.0

    # Its time

    def product_seconds(self, rank: RankTimeline) -> tuple[float, float]:
        """Seconds of its products with weights in forward, before and after its own computation."""
        return rank.gemm_seconds(self.row.before), rank.gemm_seconds(self.row.after)

    def record(self, rank: RankTimeline, backward: bool = False) -> None:  # noqa: B027 (an MLP has none)
        """Record its own computation with all messages, in forward or in backward."""

    def forward(self, rank: RankTimeline) -> None:
        """Record its forward."""
        (before, after), name = self.product_seconds(rank), type(self).__name__
        rank.linear(name, self.hidden, gathered=before)
        rank.memory_bound(name, self.row.moved)
        self.record(rank)
        rank.linear(name, self.hidden, summed=after)

    def backward(self, rank: RankTimeline) -> None:
        """Record its backward. A product has two GEMMs there: the gradients of its input and of its weight."""
        (before, after), name = self.product_seconds(rank), type(self).__name__
        rank.linear(name, self.hidden, gathered=2 * after)
        self.record(rank, backward=True)
        rank.memory_bound(name, self.row.moved_backward)
        rank.linear(name, self.hidden, gathered=before, summed=before)
