"""Models and hardware from files: sizes, numbers of weights, and windows."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from seqpar import Mask
from seqpar.planner.attention import SelfAttention
from seqpar.planner.chosen_keys import ChosenKeys
from seqpar.planner.hardware import hardware_of
from seqpar.planner.mlp import Mlp
from seqpar.planner.model import MODELS, model_of
from seqpar.planner.setting import Setting
from seqpar.planner.shape import Layer, ModelShape
from seqpar.planner.split import WITHIN, Switches
from seqpar.planner.step import step

from ..settings import H100, changed


@pytest.mark.slow
def test_models_and_hardware_from_files(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    pytest.importorskip("transformers")
    assert replace(model_of(config), name="llama3-8b") == MODELS["llama3-8b"]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        assert replace(model_of(path), name="llama") == replace(counted(LLAMA), name="llama")
    assert MODELS["llama3-8b"].parameters == pytest.approx(8.03e9, rel=1e-3)
    assert MODELS["llama3-405b"].parameters == pytest.approx(405.8e9, rel=2e-3)
    assert MODELS["qwen3-30b-a3b"].parameters == pytest.approx(30.5e9, rel=1e-2)
    (tmp_path / "mine.json").write_text(json.dumps({"base": "h100", "network": 12e9}))
    mine = hardware_of(tmp_path / "mine.json")
    assert (mine.name, mine.network, mine.p2p) == ("mine", 12e9, H100.p2p)


def test_every_rate_and_every_model_has_a_source() -> None:
    table = json.loads((Path(seqpar.__file__).parent / "planner" / "hardware.json").read_text())
    for row in table["gpus"].values():
        for field, entry in {**row, **row["attention"]}.items():
            assert field in ("base", "attention") or (entry[1] in table["sources"] and len(entry) in (2, 3)), field
    models = json.loads((Path(seqpar.__file__).parent / "planner" / "models.json").read_text())
    assert all(source in models["sources"] for source, *_ in models["models"].values())
    assert all(x["date"] and x["what"] for sources in (table, models) for x in sources["sources"].values())
    assert hardware_of("h200").rate(None).forward == 664e12  # cuDNN's on H200, not H100's 539


def config(kind: str, layers: int, hidden: int, heads: int, **others: Any) -> dict[str, Any]:
    """A ``config.json`` of Hugging Face."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {"model_type": kind, **sizes, **others}


DEEPSEEK: dict[str, Any] = {
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], float, float]] = {
    "deepseek-v3": (
        config(
            "deepseek_v3", 61, 7168, 128, q_lora_rank=1536, intermediate_size=18432, moe_intermediate_size=2048,
            n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, vocab_size=129280,
            **DEEPSEEK,
        ),
        671e9, 37e9,
    ),
    "deepseek-v2-lite": (
        config(
            "deepseek_v2", 27, 2048, 16, q_lora_rank=None, intermediate_size=10944, moe_intermediate_size=1408,
            n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, vocab_size=102400,
            **DEEPSEEK,
        ),
        15.7e9, 2.4e9,
    ),
    "qwen3-235b-a22b": (
        config(
            "qwen3_moe", 94, 4096, 64, num_key_value_heads=4, head_dim=128, intermediate_size=12288, num_experts=128,
            moe_intermediate_size=1536, num_experts_per_tok=8, vocab_size=151936, tie_word_embeddings=False,
            mlp_only_layers=[], decoder_sparse_step=1, use_sliding_window=False, sliding_window=None,
        ),
        235e9, 22e9,
    ),
    "mixtral-8x7b": (
        config(
            "mixtral", 32, 4096, 32, num_key_value_heads=8, intermediate_size=14336, num_local_experts=8,
            num_experts_per_tok=2, vocab_size=32000, tie_word_embeddings=False, sliding_window=None,
        ),
        46.7e9, 12.9e9,
    ),
    "gpt-oss-120b": (
        config(
            "gpt_oss", 36, 2880, 64, num_key_value_heads=8, head_dim=64, intermediate_size=2880, num_local_experts=128,
            num_experts_per_tok=4, vocab_size=201088, sliding_window=128, tie_word_embeddings=False,
            layer_types=["sliding_attention", "full_attention"] * 18,
        ),
        116.8e9, 5.1e9,
    ),
    "gemma3-27b": (
        {"model_type": "gemma3", "text_config": config(
            "gemma3_text", 62, 5376, 32, num_key_value_heads=16, head_dim=128, intermediate_size=21504,
            vocab_size=262208, sliding_window=1024,
        )},
        27.0e9, 27.0e9,
    ),
    "deepseek-v4-flash": ({"model_type": "deepseek_v4"}, 284e9, 13e9),
    "gpt2": ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}, 124e6, 124e6),
}  # fmt: skip


def counted(given: dict[str, Any]) -> ModelShape:
    pytest.importorskip("transformers")
    return model_of(given)


@pytest.mark.thorough(name=["deepseek-v3", "deepseek-v4-flash", "qwen3-235b-a22b"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_models_are_those_that_their_cards_name(name: str) -> None:
    """All and active ones; the cards round, and some count the embedding as active."""
    given, weights, active = CONFIGS[name]
    shape = counted(given)
    assert shape.parameters == pytest.approx(weights, rel=0.03 if name == "gemma3-27b" else 0.007)
    assert shape.multiplied_parameters == pytest.approx(active, rel=0.03)
    if name == "deepseek-v3":  # its report has 187 million weights of one layer's attention
        x = shape.attention
        assert (x.head_dim, x.v_head_dim, x.d, x.d_out) == (192, 128, 128 * 192, 128 * 128)
        assert (x.q_rank, x.kv_rank, x.shared_dim) == (1536, 512, 64)
        assert x.row.weights == pytest.approx(187.1e6, rel=1e-3)


@pytest.mark.thorough(name=["gpt-7b", "lfm2-1.2b", "qwen3.5-27b", "kimi-linear-48b-a3b"])
@pytest.mark.parametrize(
    "name",
    [
        "llama3-8b",
        "nemotron-3-nano-30b-a3b",
        "kimi-linear-48b-a3b",
        "gpt-7b",
        "lfm2-1.2b",
        "qwen3.5-27b",
    ],
)
def test_models_by_name_are_counted(name: str) -> None:
    """Those of transformers, in the class that their configuration names."""
    table = json.loads((Path(seqpar.__file__).parent / "planner" / "models.json").read_text())["models"]
    assert replace(counted(table[name][1]), name=name) == MODELS[name]


# With the default configuration of each type, of fewer layers: experts, experts of a token, the width of the shared
# ones; the width of dense MLPs; the layers that have them; whether MLPs have a gate; whether the head has the
# embedding's weight; the window and the layers that have it; whether attention is causal.
LAYERS = 4
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "bert": ((0, 0, 0), 3072, 0, False, True, (0, 0), False),
    "roberta": ((0, 0, 0), 3072, 0, False, True, (0, 0), False),
    "bart": ((0, 0, 0), 4096, 0, False, True, (0, 0), True),
    "modernbert": ((0, 0, 0), 1152, 0, True, True, (65, 2), False),
    "gpt_bigcode": ((0, 0, 0), 3072, 0, False, True, (0, 0), True),
    "phi3": ((0, 0, 0), 8192, 0, True, False, (0, 0), True),
    "cohere2": ((0, 0, 0), 22528, 0, True, True, (4096, 3), True),
    "aria_text": ((8, 2, 8192), 0, 0, True, False, (0, 0), True),
    "afmoe": ((64, 6, 2816), 6144, 1, True, False, (1024, 3), True),
    "ernie4_5_moe": ((64, 6, 3072), 12288, 1, True, True, (0, 0), True),
    "qwen3_next": ((512, 10, 512), 0, 0, True, False, (0, 0), True),
    "got_ocr2": ((0, 0, 0), 2816, 0, True, True, (0, 0), True),
}


def windows_of(shape: ModelShape) -> dict[int, int]:
    """How many layers have each window."""
    found = Counter[int]()
    for layer in shape.layers:
        if layer.attention and layer.attention.window:
            found[layer.attention.window] += layer.count
    return dict(found)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_sizes_are_counted_in_the_model(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    text = config.get_text_config()
    text.update({text.attribute_map.get("num_hidden_layers", "num_hidden_layers"): LAYERS})
    shape = model_of(config)
    autos = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
    auto = next(auto for auto in autos if type(config) in auto._model_mapping)
    with torch.device("meta"):
        model = auto.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    experts, width, dense, *others, (window, windows), causal = DEFAULTS[kind]
    mlps = [(count, part) for count, part in shape.parts if isinstance(part, Mlp)]
    widest = shape.mlp
    assert widest and (widest.experts, widest.active_experts, widest.shared_width) == experts
    assert width in (0, *(x.width for _, x in mlps))
    assert sum(count for count, x in mlps if widest.experts > x.experts) == dense
    assert [widest.gated, shape.tied] == others
    assert (windows_of(shape), shape.causal) == ({window: windows} if window else {}, causal)
    if not widest.experts:
        masks = Mask.causal() if causal else Mask.full(), None
        given, default = (seqpar.plan(shape, 4096, 2, mask=mask).pairs for mask in masks)
        assert given == default


def test_a_window_of_attention_that_is_not_causal_has_two_sides() -> None:
    seen = SelfAttention(64, 4, 4, 16, window=65).sees(Mask.full(), 256)
    assert torch.equal(seen.dense(256), Mask.sliding_window(64, 64).dense(256))


LLAMA: dict[str, Any] = config(
    "llama", 4, 64, 4, num_key_value_heads=2, head_dim=16, intermediate_size=96, vocab_size=64
)  # fmt: skip
MIXTRAL: dict[str, Any] = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**LLAMA, "num_key_value_heads": 8}, "num_key_value_heads=8: expected a divisor of the 4 query heads"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads=3: expected a divisor of the 4 query heads"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers=0: expected at least 1"),
        ({**LLAMA, "hidden_size": -3}, r"hidden size \(-3\) is not a multiple of the number of attention heads"),
        ({**LLAMA, "intermediate_size": 0}, "intermediate_size=0: expected at least 1"),
        ({**LLAMA, "model_type": "gpt2", "num_attention_heads": 0}, "n_head=0: expected at least 1"),
        (
            {**LLAMA, "model_type": "qwen3", "layer_types": ["full_attention"] * 3},
            r"\(4\) must be .* `layer_types` \(3\)",
        ),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 0}, "sliding_window=0: expected at least 1"),
        ({**MIXTRAL, "num_experts_per_tok": 5}, "num_experts_per_tok=5: expected at most 4"),
        ({**MIXTRAL, "num_experts_per_tok": 0}, r"0 experts \(num_experts_per_tok=0\)"),
        ({**LLAMA, "model_type": "lama"}, "model_type='lama' is none that transformers .* has"),
        ({"hidden_size": 8, "num_attention_heads": 2}, "model_type=None is none"),
        (config("falcon", 2, 64, 4, vocab_size=64), "Falcon.* calls attention through .* AttentionInterface"),
        ({"model_type": "diffusion_gemma"}, "None: .*num_experts, top_k_experts, moe_intermediate_size; set the sizes"),
        ({**LLAMA, "model_type": "t5"}, "no language model for model_type='t5'"),
    ],
)
def test_configurations_that_contradict_themselves_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counted(given)


PARTS = SelfAttention(64, 4, 2, 16), Mlp(64, 96)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SelfAttention(64, 32, 12, 16), "kv_heads=12: expected a divisor of heads=32"),
        (lambda: SelfAttention(64, 0, 12, 16), "heads=0: expected at least 1"),
        (lambda: SelfAttention(64, 32, 64, 16), "kv_heads=64: expected a divisor of heads=32"),
        (lambda: SelfAttention(64, 32, 32, 16, window=-1), "window=-1: expected at least 0"),
        (lambda: Mlp(64, 96, True, 4, 5), "active_experts=5: expected at least 1 and at most experts=4"),
        (lambda: Mlp(64, 96, experts=4), "active_experts=0: expected at least 1"),
        (lambda: Layer(0, PARTS), "count=0: expected at least 1"),
        (lambda: Layer(1, ()), "at least one part"),
        (lambda: Layer(1, (PARTS[0], *PARTS)), "one self-attention at most"),
        (lambda: ChosenKeys(64, 4, 4, 16, keys=8), "kv_rank=0: expected latent attention"),
        (lambda: ChosenKeys(64, 4, 4, 16, kv_rank=8, keys=0), "keys=0: expected at least 1"),
        (lambda: ModelShape("m", (Layer(1, PARTS[1:]),), 64), "expected a layer with attention"),
        (lambda: ModelShape("m", (Layer(1, PARTS),), -1), "vocab=-1: expected at least 0"),
        (
            lambda: ModelShape("m", (Layer(1, PARTS), Layer(1, (replace(PARTS[0], heads=8),))), 64),
            "layers that differ in their attention",
        ),
        (lambda: ModelShape("m", (Layer(1, (PARTS[0], Mlp(32, 96))),), 64), "layers that differ in their hidden size"),
    ],
)
def test_shapes_that_contradict_themselves_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(TypeError, match=r"hidden=4096\.5: expected an int"):
        Mlp(4096.5, 64)
    for parts in (64, (64,), [*PARTS]):
        with pytest.raises(TypeError, match=r"parts=.*: expected a tuple such as \(SelfAttention"):
            Layer(1, parts)
        with pytest.raises(TypeError, match=r"layers=.*: expected a tuple such as \(Layer"):
            ModelShape("m", parts, 64)


def test_without_transformers_a_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="needs transformers"):
        model_of(LLAMA)
    assert model_of("llama3-8b").depth == 32


@pytest.mark.thorough
def test_layers_with_windows_compute_and_send_less() -> None:
    """gpt-oss: every other layer sees 128 keys. Its step is the mean of one without windows and one with only them."""
    given, *_ = CONFIGS["gpt-oss-120b"]
    shape = counted(given)
    assert windows_of(shape) == {128: 18}
    local, other = sorted(shape.layers, key=lambda x: x.attention is not None and not x.attention.window)
    assert local.sees(Mask.causal(), 128) == other.sees(Mask.causal(), 300) == Mask.causal()
    assert torch.equal(local.sees(Mask.causal(), 300).dense(300), Mask.sliding_window(127).dense(300))
    steps = []
    for rows in ((replace(other, count=36),), shape.layers, (replace(local, count=36),)):
        setting = Setting(H100, Mask.causal(), 65536, model=replace(shape, layers=rows), ring=4, layout="zigzag")
        steps.append(step(setting, Switches()))
    none, half, every = steps
    assert half.bytes_sent[WITHIN] == (none.bytes_sent[WITHIN] + every.bytes_sent[WITHIN]) / 2
    assert half.seconds == pytest.approx((none.seconds + every.seconds) / 2)
    assert every.bytes_sent[WITHIN] < none.bytes_sent[WITHIN] / 100
    shapes = shape, changed(shape, SelfAttention, window=0)
    plan, whole = (seqpar.plan(x, 65536, 64, recompute="full", offload=False) for x in shapes)
    assert 0.5 < plan.pairs / whole.pairs < 0.51 and plan.best.tokens_per_s > 1.2 * whole.best.tokens_per_s


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"sliding_window": 64}, {64: 8}),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, {}),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6}, {64: 2}),
        ({"model_type": "cohere2", "sliding_window": 64, "sliding_window_pattern": 4}, {64: 6}),
        ({"model_type": "gemma2", "sliding_window": 64}, {64: 4}),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, {64: 6}),
    ],
)
def test_windows_of_configurations(others: dict[str, Any], expected: dict[int, int]) -> None:
    sizes = {"num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96, "vocab_size": 32}
    shape = counted({**config("mistral", 8, 64, 4, **sizes), **others})
    assert windows_of(shape) == expected
    if "attention_chunk_size" in others:
        seen = {x.sees(Mask.causal(), 256) for x in shape.layers}
        assert seen == {Mask.causal(), Mask.causal() & Mask.chunked(64)}
