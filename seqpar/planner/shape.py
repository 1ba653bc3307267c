"""``ModelShape``: a model as rows of layers, with the sizes that decide its FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ..base.checks import check_int
from ..masks.mask import Mask
from .attention import SelfAttention
from .compressed_keys import Streams
from .mlp import Mlp
from .part import LayerPart
from .rank import RankTimeline


@dataclass(frozen=True)
class Layer:
    """A number of layers that compute the same.

    Attributes:
        count: their number.
        parts: what they compute, in this order, with one self-attention at most.

    Raises:
        TypeError: ``parts`` is no tuple of parts.
        ValueError: there is no part, or more than one self-attention.
    """

    count: int
    parts: tuple[LayerPart, ...]

    def __post_init__(self) -> None:
        check_int("model: count", self.count, 1)
        _check_tuple("parts", self.parts, LayerPart, "(SelfAttention(4096, 32, 8, 128), Mlp(4096, 14336))")
        if not self.parts or sum(isinstance(part, SelfAttention) for part in self.parts) > 1:
            raise ValueError(f"model: parts={self.parts}: expected at least one part, and one self-attention at most")

    @property
    def blocks(self) -> list[tuple[LayerPart, ...]]:
        """The parts that share a norm and a residual: those that mix tokens, and an MLP."""
        return [tuple(parts) for _, parts in groupby(self.parts, lambda part: part.mixes)]

    @property
    def attention(self) -> SelfAttention | None:
        """The self-attention; None for layers without it."""
        return next((part for part in self.parts if isinstance(part, SelfAttention)), None)

    @property
    def streams(self) -> int:
        """The number of residual streams."""
        return next((part.streams for part in self.parts if isinstance(part, Streams)), 1)

    def sees(self, mask: Mask, seq_len: int) -> Mask:
        """Which keys the queries of these layers see in a sequence with ``mask``."""
        for part in self.parts:
            mask = part.sees(mask, seq_len)
        return mask

    def forward(self, rank: RankTimeline) -> None:
        """Record the forward of a layer."""
        for block in self.blocks:
            rank.memory_bound("norm", 2 * block[0].hidden)
            for part in block:
                part.forward(rank)
            rank.memory_bound("residual", 3 * block[0].hidden)

    def backward(self, rank: RankTimeline) -> None:
        """Record the backward of a layer."""
        for block in reversed(self.blocks):
            for part in reversed(block):
                part.backward(rank)
            rank.memory_bound("residual, norm", (5 if block[0].mixes else 8) * block[0].hidden)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, of an encoder, or of a transformer of diffusers.

    Attributes:
        name: the name of the model, for tables.
        layers: the layers; those that compute the same are one row. All attention has the same heads.
        vocab: the size of the vocabulary.
        tied: whether the language model head shares the weight of the embedding.
        causal: whether a query sees the keys up to its own. In other models all tokens see each other, such as BERT.
        diffusion: whether it is a transformer of diffusers.
        other_weights: all other weights: norms, biases, routers, position embeddings, and weights that multiply no
            token of the sequence, but an image, the text or a row's timestep.

    Raises:
        TypeError: a size is not an int, or ``layers`` is no tuple of layers.
        ValueError: a size is out of range, no layer has attention, or layers differ in their heads or hidden size.

    Examples:
        >>> layers = Layer(32, (SelfAttention(4096, 32, 8, 128), Mlp(4096, 14336)))
        >>> ModelShape("llama3-8b", (layers,), vocab=128256)
    """

    name: str
    layers: tuple[Layer, ...]
    vocab: int
    tied: bool = False
    causal: bool = True
    diffusion: bool = False
    other_weights: int = 0

    def __post_init__(self) -> None:
        _check_tuple("layers", self.layers, Layer, "(Layer(32, (SelfAttention(4096, 32, 8, 128), Mlp(4096, 14336))),)")
        check_int("model: vocab", self.vocab, 0)
        check_int("model: other_weights", self.other_weights, 0)
        attention = [x.attention for x in self.layers if x.attention]
        if not attention:
            raise ValueError(f"model: layers={self.layers}: expected a layer with attention")
        heads = {(x.heads, x.kv_heads, x.dims, x.kv_rank): x for x in attention}
        hidden = {x.hidden: x for _, x in self.parts}
        for what, found in (("attention", [*heads.values()]), ("hidden size", [*hidden.values()])):
            if len(found) > 1:
                raise ValueError(
                    f"model: layers that differ in their {what} are not modelled: {found[0]} and {found[1]}"
                )

    @property
    def parts(self) -> Iterator[tuple[int, LayerPart]]:
        """All parts, each with the number of its layers."""
        return ((layer.count, part) for layer in self.layers for part in layer.parts)

    @property
    def depth(self) -> int:
        """The number of layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def hidden(self) -> int:
        """The hidden size."""
        return self.layers[0].parts[0].hidden

    @property
    def attention(self) -> SelfAttention:
        """The attention of the first layer that has it."""
        return next(x.attention for x in self.layers if x.attention)

    @property
    def mlp(self) -> Mlp | None:
        """The MLP with the most experts; None if no layer has an MLP."""
        return max((x for _, x in self.parts if isinstance(x, Mlp)), key=lambda x: x.experts, default=None)

    @property
    def tensor_parallel(self) -> bool:
        """Whether the package has tensor-parallel layers for the model."""
        return not self.diffusion and all(part.row.tensor_parallel for _, part in self.parts)

    @property
    def takes_memory(self) -> bool:
        """Whether ``seqpar.Memory`` changes the model's layers."""
        return not self.diffusion and all(part.row.takes_memory for _, part in self.parts)

    @cached_property
    def layer_parameters(self) -> float:
        """Number of weights of one layer, averaged over the layers, with ``other_weights``."""
        return (sum(count * part.row.weights for count, part in self.parts) + self.other_weights) / self.depth

    @property
    def parameters(self) -> int:
        """Number of weights of the model."""
        return round(self.depth * self.layer_parameters) + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def multiplied_parameters(self) -> float:
        """Number of weights that one token is multiplied by in forward and backward: of its active experts only, and
        without the embedding and indexers."""
        return sum(count * part.row.multiplied for count, part in self.parts) + self.vocab * self.hidden

    @property
    def token_flops(self) -> float:
        """FLOPs of one token in forward without self-attention."""
        return 2.0 * self.multiplied_parameters + sum(count * part.row.flops for count, part in self.parts)

    def attention_flops(self, pairs: float) -> float:
        """FLOPs of self-attention in forward.

        Args:
            pairs: number of visible pairs of a query and a key in one layer, averaged over all layers.
        """
        return 2.0 * self.depth * (self.attention.d + self.attention.d_out) * pairs

    def model_flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of forward and backward without recomputation, the numerator of MFU, for a number of tokens and the
        ``pairs`` of ``attention_flops``."""
        return 3.0 * self.token_flops * tokens + 3.0 * self.attention_flops(pairs)


def _check_tuple(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, tuple) or not all(isinstance(x, kind) for x in value):
        raise TypeError(f"model: {name}={value!r}: expected a tuple such as {example}")
