"""The shape of a transformer: what decides its FLOPs and its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checks import check_choice, check_int
from .hardware import read_mapping


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers.

    Attributes:
        name: what it is called.
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocab: sizes. ``intermediate`` is the width of the MLP.
        gated: whether the MLP has a gate (SwiGLU, three matrices) or not (GeLU, two).
        tied: whether the embedding is the head.
        experts: MLPs of a layer; 0 if it has one.
        active_experts: how many of them a token passes through.
        v_head_dim: head_dim of v; 0 if it is that of q and k.
        q_rank, kv_rank, shared_dim: of latent attention (DeepSeek): q, and k and v, are projected by way of so many
            numbers, and so many columns of k are the same for all heads. 0 for one matrix each.
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
    def active(self) -> int:
        """MLPs that a token passes through."""
        return self.active_experts if self.experts else 1

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
    def expert_parameters(self) -> int:
        """Weights of one MLP."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer, without norms and biases."""
        return self.attention_parameters + max(1, self.experts) * self.expert_parameters

    @property
    def parameters(self) -> int:
        """All weights, without norms, biases and learned positions."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def multiplied_parameters(self) -> int:
        """Weights that a token is multiplied with: of its experts only, and without the embedding's look-up."""
        layer = self.attention_parameters + self.active * self.expert_parameters
        return self.layers * layer + self.vocab * self.hidden

    def model_flops(self, tokens: float, pairs: float) -> float:
        """FLOPs of forward and backward, without recomputation: the numerator of MFU.

        Args:
            tokens: how many tokens there are.
            pairs: how many pairs of a query and a key that it sees, in one layer.
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


def _of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    config = config.get("text_config") or config  # of a model that also sees images

    def size(*names: str, default: int | None = None) -> int:
        for key in names:
            if config.get(key) is not None:
                check_int(f"model: {key}", config[key], 1)
                return int(config[key])
        if default is None:
            raise ValueError(f"model: the configuration has no {names[0]}; add it")
        return default

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=1)
    gelu = config.get("model_type") in (
        "gpt2",
        "gpt_neox",
        "opt",
        "bloom",
        "falcon",
        "phi",
        "gpt_bigcode",
        "starcoder2",
    )
    width = size("intermediate_size", "ffn_dim", "n_inner", default=4 * hidden)
    latent = bool(config.get("kv_lora_rank"))
    shared = size("qk_rope_head_dim") if latent else 0
    head_dim = size("qk_nope_head_dim") + shared if latent else size("head_dim", default=hidden // heads)
    return ModelShape(
        name,
        size("num_hidden_layers", "n_layer"),
        hidden,
        heads,
        heads if latent else size("num_key_value_heads", default=heads),
        head_dim,
        size("moe_intermediate_size", default=width) if experts > 1 else width,
        size("vocab_size"),
        gated=not gelu,
        tied=bool(config.get("tie_word_embeddings", gelu)),
        experts=experts if experts > 1 else 0,
        active_experts=size("num_experts_per_tok", "num_experts_per_token", default=1) if experts > 1 else 0,
        v_head_dim=size("v_head_dim") if latent else 0,
        q_rank=config.get("q_lora_rank") or 0 if latent else 0,
        kv_rank=size("kv_lora_rank") if latent else 0,
        shared_dim=shared,
    )
