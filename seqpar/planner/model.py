"""The shape of a transformer: what decides its FLOPs and its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checks import check_choice, check_int
from ..mask import Mask
from .hardware import read_mapping


@dataclass(frozen=True)
class ModelShape:
    """A decoder. Its layers differ in their MLP and in the keys that their queries see, and in nothing else.

    Attributes:
        name: what it is called.
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocab: sizes. ``intermediate`` is the width of the MLP.
        gated: whether the MLP has a gate (SwiGLU, three matrices) or not (GeLU, two).
        tied: whether the embedding is the head.
        experts: MLPs of a layer; 0 if it has one.
        active_experts: how many of them a token passes through.
        shared_width: the width of the MLP beside the experts that every token passes through; 0 if there is none.
        dense_layers, dense_width: layers without experts, and the width of their MLP.
        v_head_dim: head_dim of v; 0 if it is that of q and k.
        q_rank, kv_rank, shared_dim: of latent attention (DeepSeek): q, and k and v, are projected by way of so many
            numbers, and so many columns of k are the same for all heads. 0 for one matrix each.
        local_layers, local_tokens: layers whose queries see so many keys at most; the others see what the mask says.
        chunked: whether those keys are of the query's chunk, not of a window that ends at the query.
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

    def masks(self, mask: Mask, seq_len: int) -> list[tuple[int, Mask]]:
        """How many layers see which keys of a sequence that ``mask`` is for."""
        if not self.local_layers or self.local_tokens >= seq_len:
            return [(self.layers, mask)]
        n = self.local_tokens
        local = mask & (Mask.chunked(n) if self.chunked else Mask.sliding_window(n - 1, -1))
        kinds = [(self.layers - self.local_layers, mask), (self.local_layers, local)]
        return [kind for kind in kinds if kind[0]]

    @property
    def d(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.head_dim

    @property
    def d_kv(self) -> int:
        """Elements of a token's keys."""
        return self.kv_heads * self.head_dim

    @property
    def d_out(self) -> int:
        """Elements of a token's output of attention."""
        return self.heads * (self.v_head_dim or self.head_dim)

    @property
    def d_v(self) -> int:
        """Elements of a token's values."""
        return self.kv_heads * (self.v_head_dim or self.head_dim)

    @property
    def mlp_width(self) -> float:
        """The width of the MLPs that a token passes through in a layer, the mean of the layers."""
        each = (self.active_experts if self.experts else 1) * self.intermediate + self.shared_width
        return self._mean_of_layers(each, self.dense_width)

    @property
    def qkv_parameters(self) -> int:
        """Weights of the projections to q, k and v of one layer."""
        q = self.q_rank * (self.hidden + self.d) if self.q_rank else self.hidden * self.d
        if not self.kv_rank:
            return q + self.hidden * (self.d_kv + self.d_v)
        own = self.d_kv - self.kv_heads * self.shared_dim  # columns of k that each head has of its own
        return q + self.hidden * (self.kv_rank + self.shared_dim) + self.kv_rank * (own + self.d_v)

    @property
    def attention_parameters(self) -> int:
        """Weights of the projections of one layer."""
        return self.qkv_parameters + self.d_out * self.hidden

    @property
    def layer_parameters(self) -> float:
        """Weights of one layer, without norms, biases and routers, the mean of the layers."""
        each = max(1, self.experts) * self.intermediate + self.shared_width
        return self.attention_parameters + self._matrices * self._mean_of_layers(each, self.dense_width)

    @property
    def parameters(self) -> int:
        """All weights, without norms, biases, routers and learned positions."""
        return round(self.layers * self.layer_parameters) + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def multiplied_parameters(self) -> float:
        """Weights that a token is multiplied with: of its experts only, and without the embedding's look-up."""
        layer = self.attention_parameters + self._matrices * self.mlp_width
        return self.layers * layer + self.vocab * self.hidden

    @property
    def _matrices(self) -> int:
        """Weights of an MLP for each unit of its width."""
        return (3 if self.gated else 2) * self.hidden

    def _mean_of_layers(self, width: int, dense_width: int) -> float:
        return width + self.dense_layers * (dense_width - width) / self.layers

    def model_flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of forward and backward, without recomputation: the numerator of MFU.

        Args:
            tokens: how many tokens there are.
            pairs: how many pairs of a query and a key that it sees, in one layer; the mean of the layers.
        """
        return 6.0 * self.multiplied_parameters * tokens + 6.0 * self.layers * (self.d + self.d_out) * pairs


def _gpt(name: str, heads: int, hidden: int, layers: int, vocab: int = 51200) -> ModelShape:
    """A GPT of Megatron: multi-head attention, an MLP of width 4 h."""
    return ModelShape(name, layers, hidden, heads, heads, hidden // heads, 4 * hidden, vocab, gated=False, tied=True)


# Llama 3: arXiv 2407.21783, table 3. Qwen3: the config.json files on Hugging Face. gpt-22b to gpt-1t: Korthikanti et
# al., arXiv 2205.05198, table 3. gpt-7b: the dense 7B of DeepSpeed-Ulysses, arXiv 2309.14509.
MODELS: dict[str, ModelShape] = {
    m.name: m
    for m in (
        ModelShape("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        ModelShape("llama3-405b", 126, 16384, 128, 8, 128, 53248, 128256),
        ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
        ModelShape("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, tied=True),
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        ModelShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, experts=128, active_experts=8),
        _gpt("gpt-7b", 32, 4096, 32, 50304),
        _gpt("gpt-22b", 64, 6144, 48),
        _gpt("gpt-175b", 96, 12288, 96),
        _gpt("gpt-530b", 128, 20480, 105),
        _gpt("gpt-1t", 160, 25600, 128),
    )
}


def model_of(value: str | Path | Mapping[str, Any] | ModelShape | Any) -> ModelShape:
    """The shape of a name of the table, or of a Hugging Face configuration: a path, a mapping or a config object.

    Nothing is read from the network.

    Raises:
        ValueError: no such name or file, or a configuration without the sizes.
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
        return _of_config(value, str(value.get("model_type", "model")))
    if callable(getattr(value, "to_dict", None)):
        return _of_config(value.to_dict(), str(getattr(value, "model_type", "model")))
    raise TypeError(f"model={value!r}: expected a name, the path of a config.json, a config or a dict")


# Model types whose MLP has no gate.
_NOT_GATED = (
    "apertus", "arcee", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt",
    "nemotron", "opt", "phi", "starcoder2",
)  # fmt: skip
# What a configuration that leaves it out means: the beginnings of the model types whose embedding is the head, and the
# types in which one layer of so many has full attention.
_TIED = ("bloom", "cohere", "falcon", "gemma", "gpt2", "gpt_bigcode", "mpt", "opt", "smollm3", "starcoder2")
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "llama4_text": 4, "olmo3": 4}


def _of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    config = config.get("text_config") or config  # of a model that also sees images

    def size(*names: str, default: int | None = None) -> int:
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
    # One KV head for all; in newer Falcons num_kv_heads says how many.
    one_kv_head = bool(config.get("multi_query")) and not config.get("new_decoder_architecture")
    kv_heads = 1 if one_kv_head else size("num_key_value_heads", "num_kv_heads", default=heads)
    latent = bool(config.get("kv_lora_rank"))
    shared = size("qk_rope_head_dim") if latent else 0
    head_dim = size("qk_nope_head_dim") + shared if latent else size("head_dim", default=hidden // heads)
    width = size("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=1)
    moe: dict[str, int] = {}
    if experts > 1:
        each = size("moe_intermediate_size", default=width)
        shared_width = size("shared_expert_intermediate_size", default=0) or each * size("n_shared_experts", default=0)
        if kind == "llama4_text":
            shared_width = each
        moe = {
            "experts": experts,
            "active_experts": size("num_experts_per_tok", "num_experts_per_token", default=1),
            "shared_width": shared_width,
            "dense_layers": _dense_layers(config, layers),
            "dense_width": size("intermediate_size_mlp", default=width),
        }
        width = each
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
    """How many layers of a mixture of experts have none."""
    first = config.get("first_k_dense_replace") or 0
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    named = config.get("mlp_only_layers") or ()
    return sum(i < first or i in named or (i + 1) % step > 0 for i in range(layers))


def _local_layers(config: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """How many layers see a window (Llama 4: a chunk) only, and of how many tokens.

    Raises:
        ValueError: there are layers of another kind.
    """
    chunked = config.get("model_type") == "llama4_text"
    tokens = config.get("attention_chunk_size" if chunked else "sliding_window") or 0
    if kinds := config.get("layer_types"):
        for kind in kinds:
            if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
                raise ValueError(
                    f"model: layer_types: {kind!r} layers are not modelled, only those of full attention, "
                    "of a sliding window and of chunks"
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
