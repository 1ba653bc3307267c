"""``ModelShape``: the sizes of a transformer that decide its FLOPs and bytes, by name or from a Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.checks import check_choice, check_int
from ..masks.mask import Mask
from .diffusion import shape_of
from .hardware import read_mapping


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder, or of a transformer of diffusers.

    Layers may differ in the width of their MLP (``dense_layers``) and in the keys that their queries see
    (``local_layers``). Everything else is the same in all layers.

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
        local_layers: layers whose queries see ``local_tokens`` keys at most. The other layers have the full mask.
        local_tokens: the size of the sliding window or of the chunks of ``local_layers``.
        chunked: whether ``local_layers`` have chunks (Llama 4) instead of sliding windows.
        diffusion: whether it is a transformer of diffusers, in which all tokens see each other.
        cross_tokens: keys of each layer's cross-attention, which every rank holds; 0 without cross-attention.
        other_weights: weights that multiply no token of the sequence, but the text or a row's timestep, in all layers.
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
    local_layers: int = 0
    local_tokens: int = 0
    chunked: bool = False
    diffusion: bool = False
    cross_tokens: int = 0
    other_weights: int = 0

    def masks(self, mask: Mask, seq_len: int) -> list[tuple[int, Mask]]:
        """The masks of the layers when a sequence of ``seq_len`` tokens has ``mask``.

        Returns:
            ``(count, mask)`` for each kind of layer: the number of layers, and which keys their queries see.
        """
        if not self.local_layers or self.local_tokens >= seq_len:
            return [(self.layers, mask)]
        n = self.local_tokens
        local = mask & (Mask.chunked(n) if self.chunked else Mask.sliding_window(n - 1, -1))
        kinds = [(self.layers - self.local_layers, mask), (self.local_layers, local)]
        return [kind for kind in kinds if kind[0]]

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
        """How often a token is copied to the experts that compute it, averaged over the layers."""
        return self.active_experts * (self.layers - self.dense_layers) / self.layers if self.experts else 0.0

    @property
    def mlp_width(self) -> float:
        """The summed width of the MLPs that compute one token in a layer, averaged over the layers."""
        width = (self.active_experts if self.experts else 1) * self.intermediate + self.shared_width
        return self._mean_over_layers(width)

    @property
    def qkv_parameters(self) -> int:
        """Number of weights of the projections to q, k and v in one layer."""
        q = self.q_rank * (self.hidden + self.d) if self.q_rank else self.hidden * self.d
        return q + self.hidden * self.sent_kv + self.expanding_parameters

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
    def layer_parameters(self) -> float:
        """Number of weights of one layer, averaged over the layers, without norms, biases and routers."""
        others = self.cross_parameters + self.other_weights / self.layers
        return self.attention_parameters + self.mlp_parameters + others

    @property
    def mlp_parameters(self) -> float:
        """Number of weights of the MLP of one layer, of all its experts, averaged over the layers."""
        width = max(1, self.experts) * self.intermediate + self.shared_width
        return self._weights_per_width * self._mean_over_layers(width)

    @property
    def parameters(self) -> int:
        """Number of weights of the model, without norms, biases, routers and learned position embeddings."""
        return round(self.layers * self.layer_parameters) + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def multiplied_parameters(self) -> float:
        """Number of weights that one token is multiplied by: of its active experts only, and without the embedding."""
        layer = self.attention_parameters + self.cross_parameters + self._weights_per_width * self.mlp_width
        return self.layers * layer + self.vocab * self.hidden

    @property
    def _weights_per_width(self) -> int:
        return (3 if self.gated else 2) * self.hidden

    def _mean_over_layers(self, width: int) -> float:
        return width + self.dense_layers * (self.dense_width - width) / self.layers

    def model_flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of forward and backward without recomputation, the numerator of MFU.

        Args:
            tokens: number of tokens.
            pairs: number of visible pairs of a query and a key in one layer, averaged over the layers.
        """
        pairs += tokens * self.cross_tokens
        return 6.0 * self.multiplied_parameters * tokens + 6.0 * self.layers * (self.d + self.d_out) * pairs


def model_of(value: str | Path | Mapping[str, Any] | ModelShape | Any) -> ModelShape:
    """The ``ModelShape`` of a model. Nothing is read from the network.

    Args:
        value: a name of ``MODELS``, the path of a ``config.json`` of transformers or diffusers or of its folder, a
            config object, a mapping with the entries of a ``config.json``, or a ``ModelShape``, which is returned as
            it is.

    Raises:
        TypeError: ``value`` has another type.
        ValueError: the name or the file does not exist, or the configuration lacks a size or has layers that are not
            modelled.
    """
    if isinstance(value, ModelShape):
        return value
    if isinstance(value, str | Path):
        path = Path(value)
        if path.is_dir() and (path / "config.json").exists():
            path = path / "config.json"
        if path.suffix == ".json" or path.is_file():
            name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
            return _of_config(read_mapping("model", path), name)
        check_choice("model", str(value).lower(), MODELS)
        return MODELS[str(value).lower()]
    if isinstance(value, Mapping):
        return _of_config(value, str(value.get("model_type", value.get("_class_name", "model"))))
    if callable(getattr(value, "to_dict", None)):
        return _of_config(value.to_dict(), str(getattr(value, "model_type", "model")))
    raise TypeError(f"model={value!r}: expected a name, the path of a config.json, a config object or a dict")


# Model types whose MLP has no gate.
_NOT_GATED = (
    "apertus", "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt",
    "nemotron", "opt", "phi", "starcoder2",
)  # fmt: skip
# Defaults of model types, for configurations without the entry. The head shares the weight of the embedding in model
# types that begin with one of these:
_TIED = ("bloom", "cohere", "falcon", "gemma", "gpt2", "gpt_bigcode", "mpt", "opt", "smollm3", "starcoder2")
# One of this many layers has full attention, the others have a window or chunks:
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4, "olmo3": 4}


def _of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of a Hugging Face configuration, called ``name``."""
    if "_class_name" in config:
        return ModelShape(name, **shape_of(config))
    config = config.get("text_config") or config  # multimodal models have one configuration for each part

    def size(*names: str, default: int | None = None) -> int:
        """The first of the entries ``names`` that the configuration has. Model types name their sizes differently."""
        for key in names:
            if config.get(key) is not None:
                check_int(f"model: {key}", config[key], min(1, 1 if default is None else default))
                return int(config[key])
        if default is None:
            raise ValueError(f"model: the configuration has no {names[0]}; add it")
        return default

    kind = config.get("model_type")
    hidden = size("hidden_size", "n_embd", "d_model")
    heads = size("num_attention_heads", "n_head", "n_heads")
    layers = size("num_hidden_layers", "n_layer", "n_layers")
    # Multi-query attention has one KV head. Falcons with the new decoder architecture have ``num_kv_heads`` instead.
    one_kv_head = bool(config.get("multi_query")) and not config.get("new_decoder_architecture")
    kv_heads = 1 if one_kv_head else size("num_key_value_heads", "num_kv_heads", default=heads)
    latent = bool(config.get("kv_lora_rank"))
    shared = size("qk_rope_head_dim") if latent else 0
    head_dim = size("qk_nope_head_dim") + shared if latent else size("head_dim", default=hidden // heads)
    width = size("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=1)
    moe: dict[str, Any] = {}
    if experts > 1:
        expert_width = size("moe_intermediate_size", default=width)
        shared_width = size("shared_expert_intermediate_size", default=0)
        shared_width = shared_width or expert_width * size("n_shared_experts", default=0)
        if kind == "llama4_text":
            shared_width = expert_width
        moe = {
            "experts": experts,
            "active_experts": size("num_experts_per_tok", "num_experts_per_token", default=1),
            "shared_width": shared_width,
            "dense_layers": _dense_layers(config, layers),
            "dense_width": size("intermediate_size_mlp", default=width),
        }
        width = expert_width
    local_layers, local_tokens = _local_layers(config, layers)
    return ModelShape(
        name,
        layers,
        hidden,
        heads,
        heads if latent else kv_heads,
        head_dim,
        width,
        size("vocab_size"),
        gated=kind not in _NOT_GATED,
        tied=bool(config.get("tie_word_embeddings", str(kind).startswith(_TIED))),
        v_head_dim=size("v_head_dim") if latent else 0,
        q_rank=config.get("q_lora_rank") or 0 if latent else 0,
        kv_rank=size("kv_lora_rank") if latent else 0,
        shared_dim=shared,
        local_layers=local_layers,
        local_tokens=local_tokens,
        chunked=kind == "llama4_text",
        **moe,
    )


def _dense_layers(config: Mapping[str, Any], layers: int) -> int:
    first = config.get("first_k_dense_replace") or 0
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    named = config.get("mlp_only_layers") or ()
    return sum(i < first or i in named or (i + 1) % step > 0 for i in range(layers))


def _local_layers(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """The number of layers with a sliding window (Llama 4: with chunks), and the tokens of the window or chunk.

    Raises:
        ValueError: ``layer_types`` names a kind of layer that is not modelled.
    """
    chunked = config.get("model_type") == "llama4_text"
    tokens = config.get("attention_chunk_size" if chunked else "sliding_window") or 0
    if kinds := config.get("layer_types"):
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
                raise ValueError(
                    f"model: layer_types: {kind!r} layers are not modelled, only 'full_attention', "
                    "'sliding_attention' and 'chunked_attention' layers"
                )
        count = sum(kind != "full_attention" for kind in kinds)
    elif not config.get("use_sliding_window", True):
        count = 0
    elif config.get("use_sliding_window"):  # Qwen
        count = layers - (config.get("max_window_layers") or 0)
    else:
        every = config.get("sliding_window_pattern") or _FULL_EVERY.get(str(config.get("model_type")))
        count = layers - layers // every if every else layers
    return (count, int(tokens)) if count and tokens else (0, 0)


def _table() -> dict[str, ModelShape]:
    table = json.loads(Path(__file__).with_name("models.json").read_text())["models"]
    return {name: _of_config(config, name) for name, (_, config) in table.items()}


MODELS = _table()
