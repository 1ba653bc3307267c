"""``ModelShape``: the sizes of a transformer that decide its FLOPs and bytes, by name or from a Hugging Face config."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..base.checks import check_choice, check_int
from ..masks.mask import Mask
from .diffusion import shape_of
from .hardware import read_mapping
from .mixer import Mixer, mixer_of


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
                seen = mask & (Mask.chunked(tokens) if chunks else Mask.sliding_window(tokens - 1, -1))
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

    @property
    def layer_parameters(self) -> float:
        """Number of weights of one layer, averaged over the layers, without norms, biases and routers."""
        others = self.other_weights + self.count("indexer") * self.index_parameters
        return (self._mixing_parameters + self.count("mlp") * self.mlp_parameters + others) / self.layers

    @property
    def mlp_parameters(self) -> float:
        """Number of weights of the MLP of one layer, of all its experts, averaged over the layers with an MLP."""
        width = max(1, self.experts) * self.intermediate + self.shared_width
        return self._weights_per_width * self._mean_over_layers(width)

    @property
    def parameters(self) -> int:
        """Number of weights of the model, without norms, biases, routers and learned position embeddings."""
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
    "nemotron", "nemotron_h", "opt", "phi", "starcoder2",
)  # fmt: skip
# Defaults of model types, for configurations without the entry. The head shares the weight of the embedding in model
# types that begin with one of these:
_TIED = ("bloom", "cohere", "falcon", "gemma", "gpt2", "gpt_bigcode", "lfm2", "mpt", "opt", "smollm3", "starcoder2")
_UNTIED = ("falcon_h1",)  # although they do
# One of this many layers has full attention, the others have a window or chunks:
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4, "olmo3": 4}
# Model types whose projection to q also returns a gate:
_GATED_ATTENTION = ("qwen3_next", "qwen3_5")
# What a layer has, by its name in ``layer_types`` and the like, or by its letter in Nemotron-H's pattern.
_MIXER = Kind(attention=False, mixer=True)
_KINDS = {
    "full_attention": PLAIN,
    "attention": PLAIN,
    "*": PLAIN,
    "sliding_attention": Kind(local=True),
    "chunked_attention": Kind(local=True),
    "indexed_attention": Kind(indexed=True, indexer=True),
    "linear_attention": _MIXER,
    "mamba": _MIXER,
    "M": _MIXER,
    "conv": _MIXER,
    "hybrid": Kind(mixer=True),
    "mlp": Kind(attention=False),
    "-": Kind(attention=False),
    "moe": Kind(attention=False),
    "E": Kind(attention=False),
}


def _of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of a Hugging Face configuration, called ``name``."""
    if "_class_name" in config:
        return ModelShape(name, **shape_of(config))
    config = config.get("text_config") or config  # multimodal models have one configuration for each part
    if linear := config.get("linear_attn_config"):  # Kimi Linear
        own = {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim"}
        own["linear_conv_kernel_dim"] = "short_conv_kernel_size"
        config = {**config, **{key: linear.get(entry) for key, entry in own.items()}}

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
    types = _layer_types(config)
    layers = len(types) or size("num_hidden_layers", "n_layer", "n_layers")
    # Multi-query attention has one KV head. Falcons with the new decoder architecture have ``num_kv_heads`` instead.
    one_kv_head = bool(config.get("multi_query")) and not config.get("new_decoder_architecture")
    kv_heads = 1 if one_kv_head else size("num_key_value_heads", "num_kv_heads", default=heads)
    latent = bool(config.get("kv_lora_rank"))
    shared = size("qk_rope_head_dim") if latent else 0
    head_dim = size("qk_nope_head_dim") + shared if latent else size("head_dim", default=hidden // heads)
    width = size("block_ff_dim", "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    if kind == "lfm2" and config.get("block_auto_adjust_ff_dim", True):  # as the model does
        width, unit = int((config.get("block_ffn_dim_multiplier") or 1) * int(2 * width / 3)), size("block_multiple_of")
        width = -(-width // unit) * unit
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if kind == "nemotron_h" and not {"moe", "E"} & set(types):
        experts = 0
    if experts > 1 and config.get("moe_latent_size"):
        raise ValueError("model: moe_latent_size: experts that compute latents are not modelled")
    if kind == "granitemoehybrid" and experts <= 1:
        width = size("shared_intermediate_size")
    moe: dict[str, Any] = {}
    if experts > 1:
        expert_width = size("moe_intermediate_size", default=width)
        shared_width = size(
            "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
            default=0,
        )  # fmt: skip
        shared_width = shared_width or expert_width * size("n_shared_experts", "num_shared_experts", default=0)
        if kind == "llama4_text":
            shared_width = expert_width
        moe = {
            "experts": experts,
            "active_experts": size("num_experts_per_tok", "num_experts_per_token", default=1),
            "shared_width": shared_width,
            "dense_layers": _dense_layers(config, types, layers),
            "dense_width": size("intermediate_size_mlp", default=width),
        }
        width = expert_width
    if str(kind).startswith("zamba"):
        raise ValueError(f"model: model_type={kind!r}: layers that share their weights are not modelled")
    kinds, local_tokens = _kinds(config, types, layers)
    mixes, indexed = any(x.mixer for x in kinds), any(x.indexed for x in kinds)
    mixer = mixer_of(config, size, hidden) if mixes or not types else None
    if mixer and not types:
        raise ValueError("model: the configuration does not say which layers have attention; add layer_types")
    if mixes and mixer is None:
        names = sorted({name for name in types if _KINDS[name].mixer})
        raise ValueError(
            f"model: layer_types: the {', '.join(names)} layers of model_type={kind!r} are not modelled, only Gated "
            "DeltaNet, Kimi Delta Attention, Mamba-1, Mamba-2 and short convolutions, by their entries of config.json"
        )
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
        tied=bool(config.get("tie_word_embeddings", str(kind).startswith(_TIED) and kind not in _UNTIED)),
        v_head_dim=size("v_head_dim") if latent else 0,
        q_rank=config.get("q_lora_rank") or 0 if latent else 0,
        kv_rank=size("kv_lora_rank") if latent else 0,
        shared_dim=shared,
        kinds=kinds,
        local_tokens=local_tokens,
        chunked=kind == "llama4_text",
        mixer=mixer,
        gated_attention=str(kind).startswith(_GATED_ATTENTION),
        index_heads=size("index_n_heads") if indexed else 0,
        index_dim=size("index_head_dim") if indexed else 0,
        index_keys=size("index_topk") if indexed else 0,
        **moe,
    )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """The name of each layer's type, a key of ``_KINDS`` if it is modelled; empty if the configuration names none."""
    for entry in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if config.get(entry):
            return list(config[entry])
    layers, kind = range(config.get("num_hidden_layers") or 0), str(config.get("model_type"))
    if kind == "falcon_h1":
        return ["hybrid" for _ in layers]
    if kind in ("deepseek_v32", "glm_moe_dsa"):
        return ["indexed_attention" for _ in layers]
    attention: Any = None  # the layers that have it
    if linear := config.get("linear_attn_config"):
        attention = {i - 1 for i in linear["full_attn_layers"]}
    elif period := config.get("attn_layer_period"):
        attention = {i for i in layers if i % period == (config.get("attn_layer_offset") or 0)}
    elif kind.startswith(_GATED_ATTENTION):
        every = config.get("full_attention_interval") or 4
        attention = {i for i in layers if (i + 1) % every == 0}
    else:
        attention = config.get("full_attn_idxs") or config.get("attn_layer_indices")
    if attention is None:
        return []
    return ["attention" if i in attention else "linear_attention" for i in layers]


def _dense_layers(config: Mapping[str, Any], types: Sequence[str], layers: int) -> int:
    if config.get("model_type") == "nemotron_h":
        return sum(name in ("mlp", "-") for name in types)
    if named_types := config.get("mlp_layer_types"):
        return sum(name == "dense" for name in named_types)
    if period := config.get("expert_layer_period"):
        return sum(i % period != (config.get("expert_layer_offset") or 0) for i in range(layers))
    first = config.get("first_k_dense_replace") or config.get("num_dense_layers") or 0
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    named = config.get("mlp_only_layers") or ()
    return sum(i < first or i in named or (i + 1) % step > 0 for i in range(layers))


def _kinds(config: Mapping[str, Any], types: Sequence[str], layers: int) -> tuple[tuple[Kind, ...], int]:
    """The kinds of layers, empty if all have attention with the full mask, and the tokens of local layers' window or
    chunk.

    Raises:
        ValueError: a layer's type is not modelled.
    """
    chunked = config.get("model_type") == "llama4_text"
    tokens = int(config.get("attention_chunk_size" if chunked else "sliding_window") or 0)
    if types:
        for name in types:
            if name not in _KINDS:
                known = ", ".join(name for name in _KINDS if len(name) > 1)
                raise ValueError(f"model: layer_types: {name!r} layers are not modelled, only {known} layers")
        found = [_KINDS[name] for name in types]
    else:
        every = config.get("sliding_window_pattern") or _FULL_EVERY.get(str(config.get("model_type")))
        if not config.get("use_sliding_window", True):
            count = 0
        elif config.get("use_sliding_window"):  # Qwen
            count = layers - (config.get("max_window_layers") or 0)
        else:
            count = layers - layers // every if every else layers
        found = [PLAIN] * (layers - count) + [Kind(local=True)] * count
    if config.get("model_type") == "nemotron_h":  # a layer is attention, a mixer or an MLP alone
        found = [kind._replace(mlp=not (kind.attention or kind.mixer)) for kind in found]
    chooses = config.get("indexer_types") or config.get(
        "index_topk_pattern"
    )  # "full" or "F" with an indexer of its own
    every, first = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2) - 1
    reuses = {i for i in range(layers) if (chooses[i][0] not in "fF" if chooses else max(i - first, 0) % every)}
    found = [
        kind._replace(local=kind.local and tokens > 0, indexer=kind.indexer and i not in reuses)
        for i, kind in enumerate(found)
    ]
    counts = Counter(found)
    plain = counts == {PLAIN: layers}
    kinds = () if plain else tuple(kind._replace(layers=n) for kind, n in counts.items())
    return kinds, tokens if any(kind.local for kind in kinds) else 0


def _table() -> dict[str, ModelShape]:
    table = json.loads(Path(__file__).with_name("models.json").read_text())["models"]
    return {name: _of_config(config, name) for name, (_, config) in table.items()}


MODELS = _table()
