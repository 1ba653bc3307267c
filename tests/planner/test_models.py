"""Models and hardware from files: sizes, numbers of weights, and windows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from seqpar import Mask
from seqpar.planner.hardware import hardware_of
from seqpar.planner.memory import Switches
from seqpar.planner.model import MODELS, Kind, model_of
from seqpar.planner.setting import WITHIN, Setting
from seqpar.planner.step import step

from ..settings import H100


@pytest.mark.slow
def test_models_and_hardware_from_files(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for value in (config, tmp_path, tmp_path / "config.json"):
        assert replace(model_of(value), name="llama3-8b") == MODELS["llama3-8b"]
    assert MODELS["llama3-8b"].parameters == pytest.approx(8.03e9, rel=1e-3)
    assert MODELS["llama3-405b"].parameters == pytest.approx(405.8e9, rel=2e-3)
    latent = {  # DeepSeek-V3's, and its report's 187 million weights of one layer's attention
        "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
        "intermediate_size": 18432, "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    shape = model_of(latent)
    assert (shape.head_dim, shape.v_head_dim, shape.d, shape.d_out) == (192, 128, 128 * 192, 128 * 128)
    assert shape.attention_parameters == pytest.approx(187.1e6, rel=1e-3)
    assert seqpar.plan(latent, 65536, 64).best.strategy
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
    assert all(source in models["sources"] for source, _ in models["models"].values())
    assert all(x["date"] and x["what"] for sources in (table, models) for x in sources["sources"].values())
    assert hardware_of("h200").rate(None).forward == 688e12  # cuDNN's on H200, not H100's 539


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
    "falcon-7b": (config("falcon", 32, 4544, 71, multi_query=True, vocab_size=65024), 6.92e9, 6.92e9),
    "gpt2": ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}, 124e6, 124e6),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_models_are_those_that_their_cards_name(name: str) -> None:
    """All and active ones; the cards round, and some count the embedding as active."""
    given, weights, active = CONFIGS[name]
    shape = model_of(given)
    assert shape.parameters == pytest.approx(weights, rel=0.007)
    assert shape.multiplied_parameters == pytest.approx(active, rel=0.03)


def test_layers_with_windows_compute_and_send_less() -> None:
    """gpt-oss: every other layer sees 128 keys. Its step is the mean of one without windows and one with only them."""
    given, *_ = CONFIGS["gpt-oss-120b"]
    shape = model_of(given)
    assert (shape.count("local"), shape.local_tokens) == (18, 128)
    assert [kind.layers for kind, _ in shape.masks(Mask.causal(), 4096)] == [18, 18]
    assert shape.masks(Mask.causal(), 128) == [(Kind(36), Mask.causal())]
    seen = dict(shape.masks(Mask.causal(), 300))[Kind(18, local=True)]
    assert torch.equal(seen.dense(300), Mask.sliding_window(127).dense(300))
    steps = []
    for local in (0, 18, 36):
        kinds = Kind(36 - local), Kind(local, local=True)
        setting = Setting(replace(shape, kinds=kinds), H100, Mask.causal(), 65536, ring=4, layout="zigzag")
        steps.append(step(setting, Switches(), 1))
    none, half, every = steps
    assert half.bytes_sent[WITHIN] == (none.bytes_sent[WITHIN] + every.bytes_sent[WITHIN]) / 2
    assert half.seconds == pytest.approx((none.seconds + every.seconds) / 2)
    assert every.bytes_sent[WITHIN] < none.bytes_sent[WITHIN] / 100
    shapes = shape, replace(shape, kinds=())
    plan, whole = (seqpar.plan(x, 65536, 64, recompute="full", offload=False) for x in shapes)
    assert 0.5 < plan.pairs / whole.pairs < 0.51 and plan.best.tokens_per_s > 1.2 * whole.best.tokens_per_s


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"sliding_window": 64}, (8, 64)),
        ({"sliding_window": 64, "use_sliding_window": False}, (0, 0)),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6}, (2, 64)),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, (6, 64)),
        ({"model_type": "gemma2", "sliding_window": 64}, (4, 64)),
        ({"model_type": "llama4_text", "attention_chunk_size": 64}, (6, 64)),
    ],
)
def test_windows_of_configurations(others: dict[str, Any], expected: tuple[int, int]) -> None:
    shape = model_of({**config("mistral", 8, 64, 4, vocab_size=32), **others})
    assert (shape.count("local"), shape.local_tokens) == expected
    if shape.chunked:
        assert dict(shape.masks(Mask.causal(), 256))[Kind(6, local=True)] == Mask.causal() & Mask.chunked(64)
