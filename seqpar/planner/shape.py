"""``ModelShape``: the sizes of a transformer that decide its FLOPs and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..base.checks import check_int
from ..masks.mask import Mask
from .mixer import Mixer


class Kind(NamedTuple):
    """A number of layers that compute the same.

    Attributes:
        layers: their number.
        attention: whether they have attention.
        mixer: whether they have the model's ``mixer``.
        mlp: whether they have an MLP.
        local: whether their queries see ``local_tokens`` keys at most. The others have the full mask.
        indexed: whether their queries see the keys that an indexer chose.
        indexer: whether they have an indexer of their own. Others use what the layer before them chose.
    """

    layers: int = 1
    attention: bool = True
    mixer: bool = False
    mlp: bool = True
    local: bool = False
    indexed: bool = False
    indexer: bool = False


PLAIN = Kind()


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, or of a transformer of diffusers.

    Layers may differ in what they compute (``kinds``) and in the width of their MLP (``dense_layers``). Everything else
    is the same in all layers.

    Attributes:
        name: the name of the model, for tables.
        layers: number of layers.
        hidden: the hidden size.
        heads: query heads.
        kv_heads: KV heads.
        head_dim: the head_dim of q and k.
        intermediate: the width of the MLP; of one expert in a mixture of experts.
        vocab: the size of the vocabulary.
        gated: True for an MLP with a gate (SwiGLU, three matrices), False for one without (GeLU, two matrices).
        tied: whether the language model head shares the weight of the embedding.
        experts: experts per layer; 0 for a model without experts.
        active_experts: experts per layer that compute each token.
        v_head_dim: the head_dim of v; 0 if it equals ``head_dim``.
        q_rank: the rank of the low-rank projection of q in latent attention (DeepSeek); 0 if q has a single matrix.
        kv_rank: the rank of the shared low-rank projection of k and v in latent attention; 0 without latent attention.
        shared_dim: in latent attention, elements of k (those with rotary positions) that are the same for all heads.
        shared_width: the width of the shared expert, which computes every token; 0 if there is none.
        dense_layers: layers without experts, in a mixture of experts.
        dense_width: the width of the MLP of these layers.
        kinds: what the layers compute; empty: all have attention with the full mask and an MLP.
        local_tokens: the size of the sliding window or of the chunks of local layers.
        chunked: whether local layers have chunks (Llama 4) instead of sliding windows.
        mixer: linear attention, a state-space layer or a short convolution; None if no layer has one.
        gated_attention: whether q's projection also returns a gate of the attention output (Qwen3-Next).
        index_heads: heads of an indexer; 0 without indexers.
        index_dim: their head_dim, and the elements of an indexer's key.
        index_keys: how many keys it chooses for each query.
        diffusion: whether it is a transformer of diffusers.
        cross_tokens: keys of each layer's cross-attention, which every rank holds; 0 without cross-attention.
        other_weights: all other weights: norms, biases, routers, position embeddings, and weights that multiply no
            token of the sequence, but an image, the text or a row's timestep.
        causal: whether a query sees the keys up to its own. In other models all tokens see each other, such as BERT.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is out of range, or does not fit another one.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    gated: bool = True
    tied: bool = False
    experts: int = 0
    active_experts: int = 0
    v_head_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    shared_dim: int = 0
    shared_width: int = 0
    dense_layers: int = 0
    dense_width: int = 0
    kinds: tuple[Kind, ...] = ()
    local_tokens: int = 0
    chunked: bool = False
    mixer: Mixer | None = None
    gated_attention: bool = False
    index_heads: int = 0
    index_dim: int = 0
    index_keys: int = 0
    diffusion: bool = False
    cross_tokens: int = 0
    other_weights: int = 0
    causal: bool = True

    def __post_init__(self) -> None:
        least = {"layers": 1, "hidden": 1, "heads": 1, "kv_heads": 1, "head_dim": 1}
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int):
                if name not in ("name", "kinds", "mixer") and not isinstance(value, bool):
                    check_int(f"model: {name}", value)
                continue
            check_int(f"model: {name}", value, least.get(name, 0))
        if self.heads % self.kv_heads:
            raise ValueError(f"model: kv_heads={self.kv_heads}: expected a divisor of heads={self.heads}")
        if self.active_experts > self.experts or (self.experts and not self.active_experts):
            raise ValueError(
                f"model: active_experts={self.active_experts}: expected at least 1 and at most experts={self.experts}"
            )
        if self.kinds and (found := sum(kind.layers for kind in self.kinds)) != self.layers:
            raise ValueError(f"model: kinds={self.kinds}: they have {found} layers together, not layers={self.layers}")
        if self.dense_layers > self.layers:
            raise ValueError(f"model: dense_layers={self.dense_layers}: expected at most layers={self.layers}")
        for part, needed, size in (
            ("local", "local_tokens", self.local_tokens),
            ("mixer", "mixer", self.mixer),
            ("indexed", "index_keys", self.index_keys),
        ):
            if any(getattr(kind, part) for kind in self.kinds) and not size:
                raise ValueError(f"model: {needed}={size}: layers of kinds={self.kinds} need it")

    def masks(self, mask: Mask, seq_len: int) -> list[tuple[Kind, Mask]]:
        """The masks of the layers when a sequence of ``seq_len`` tokens has ``mask``.

        Returns:
            For each kind of layer, which keys its queries see. An indexer chooses as many as a window would have.
        """
        counts = Counter[tuple[Kind, Mask]]()
        for kind in self.all_kinds:
            tokens = self.local_tokens if kind.local else self.index_keys if kind.indexed else seq_len
            seen = mask
            if tokens < seq_len:
                chunks = kind.local and self.chunked
                seen = mask & (Mask.chunked(tokens) if chunks else Mask.sliding_window(tokens - 1, tokens - 1))
            counts[kind._replace(layers=0, local=kind.local and seen is not mask), seen] += kind.layers
        return [(kind._replace(layers=count), seen) for (kind, seen), count in counts.items() if count]

    @property
    def all_kinds(self) -> tuple[Kind, ...]:
        """``kinds``, or one kind for all layers if there are none."""
        return self.kinds or (Kind(self.layers),)

    def count(self, part: str) -> int:
        """The number of layers that have a part, a field of ``Kind``."""
        return sum(kind.layers for kind in self.all_kinds if getattr(kind, part))

    @property
    def d(self) -> int:
        """Elements of q for one token."""
        return self.heads * self.head_dim

    @property
    def d_kv(self) -> int:
        """Elements of k for one token."""
        return self.kv_heads * self.head_dim

    @property
    def d_out(self) -> int:
        """Elements of the attention output for one token."""
        return self.heads * (self.v_head_dim or self.head_dim)

    @property
    def d_v(self) -> int:
        """Elements of v for one token."""
        return self.kv_heads * (self.v_head_dim or self.head_dim)

    @property
    def sent_kv_heads(self) -> int:
        """Heads of the K/V that ranks send: a single one with latent attention, which sends latents."""
        return 1 if self.kv_rank else self.kv_heads

    @property
    def sent_kv(self) -> int:
        """Elements of the K/V of one token that ranks send."""
        return self.kv_rank + self.shared_dim if self.kv_rank else self.d_kv + self.d_v

    @property
    def copies(self) -> float:
        """How often a token is copied to the experts that compute it, averaged over the layers with an MLP."""
        layers = self.count("mlp")
        return self.active_experts * (layers - self.dense_layers) / layers if self.experts else 0.0

    @property
    def mlp_width(self) -> float:
        """The summed width of the MLPs that compute one token in a layer, averaged over the layers with an MLP."""
        width = (self.active_experts if self.experts else 1) * self.intermediate + self.shared_width
        return self._mean_over_layers(width)

    @property
    def qkv_parameters(self) -> int:
        """Number of weights of the projections to q, k and v in one layer."""
        q = self.q_rank * (self.hidden + self.d) if self.q_rank else self.hidden * self.d
        gate = self.hidden * self.d_out if self.gated_attention else 0
        return q + gate + self.hidden * self.sent_kv + self.expanding_parameters

    @property
    def expanding_parameters(self) -> int:
        """Number of weights that expand the latents of one layer to keys and values."""
        return self.kv_rank * (self.d_kv - self.kv_heads * self.shared_dim + self.d_v)

    @property
    def attention_parameters(self) -> int:
        """Number of weights of the q, k, v and output projections in one layer."""
        return self.qkv_parameters + self.d_out * self.hidden

    @property
    def cross_parameters(self) -> int:
        """Number of weights of one layer's cross-attention that multiply the sequence's tokens."""
        return 2 * self.d * self.hidden if self.cross_tokens else 0

    @property
    def index_parameters(self) -> int:
        """Number of weights of an indexer: to its queries, to its key, and to the weights of its heads."""
        return self.index_heads * (self.q_rank * self.index_dim + self.hidden) + self.hidden * self.index_dim

    @cached_property
    def layer_parameters(self) -> float:
        """Number of weights of one layer, averaged over the layers, with ``other_weights``."""
        others = self.other_weights + self.count("indexer") * self.index_parameters
        return (self._mixing_parameters + self.count("mlp") * self.mlp_parameters + others) / self.layers

    @property
    def mlp_parameters(self) -> float:
        """Number of weights of the MLP of one layer, of all its experts, averaged over the layers with an MLP."""
        width = max(1, self.experts) * self.intermediate + self.shared_width
        return self._weights_per_width * self._mean_over_layers(width)

    @property
    def parameters(self) -> int:
        """Number of weights of the model."""
        return round(self.layers * self.layer_parameters) + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def multiplied_parameters(self) -> float:
        """Number of weights that one token is multiplied by in forward and backward: of its active experts only, and
        without the embedding and indexers."""
        mlps = self.count("mlp") * self._weights_per_width * self.mlp_width
        return self._mixing_parameters + mlps + self.vocab * self.hidden

    @property
    def token_flops(self) -> float:
        """FLOPs of one token in forward: of weights and of the recurrences of mixers, without attention."""
        recurrences = self.count("mixer") * self.mixer.heads * self.mixer.flops if self.mixer else 0.0
        return 2.0 * self.multiplied_parameters + recurrences

    @property
    def _mixing_parameters(self) -> float:
        """Number of weights of attention and of the mixers, of all layers."""
        mixers = self.count("mixer") * self.mixer.weights if self.mixer else 0
        return self.count("attention") * (self.attention_parameters + self.cross_parameters) + mixers

    @property
    def _weights_per_width(self) -> int:
        return (3 if self.gated else 2) * self.hidden

    def _mean_over_layers(self, width: int) -> float:
        return width + self.dense_layers * (self.dense_width - width) / max(1, self.count("mlp"))

    def model_flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of forward and backward without recomputation, the numerator of MFU.

        Args:
            tokens: number of tokens.
            pairs: number of visible pairs of a query and a key in one layer, averaged over the layers.
        """
        pairs += tokens * self.cross_tokens
        return 3.0 * self.token_flops * tokens + 6.0 * self.layers * (self.d + self.d_out) * pairs
