"""Rotary embeddings: the papers' formulas, Hugging Face's frequencies, rounding, and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import seqpar

from .reference import inverse_frequencies

SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "default": {"rope_type": "default", "rope_theta": 500000.0, "factor": None},
    "linear": {"type": "linear", "factor": 4.0},
    "ntk": {"type": "ntk", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
    "dynamic, short": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
    "yarn, gpt-oss": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
    "yarn, DeepSeek": {
        "type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8, "original_max_position_embeddings": 4096,
    },
    "yarn, factor": {
        "type": "yarn", "factor": 4.0, "attention_factor": 1.5, "original_max_position_embeddings": 256,
    },
}  # fmt: skip


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_formulas(name: str, dim: int) -> None:
    rope = seqpar.RotaryEmbedding(dim, base=20000.0, scaling=SCALINGS[name])
    positions = torch.tensor([0, 1, 5, 300, 127])
    frequencies, factor = inverse_frequencies(dim, 20000.0, SCALINGS[name], 301)
    q, k = torch.randn(1, 5, 2, dim, dtype=torch.float64), torch.randn(1, 5, 1, dim, dtype=torch.float64)
    for x, rotated in zip((q, k), rope(q, k, positions), strict=True):
        for t, position in enumerate(positions.tolist()):
            for i in range(0, dim // 2, 7):
                c, s = math.cos(position * frequencies[i]) * factor, math.sin(position * frequencies[i]) * factor
                a, b = x[0, t, 0, i].item(), x[0, t, 0, i + dim // 2].item()
                assert rotated[0, t, 0, i].item() == pytest.approx(a * c - b * s, abs=3e-4)
                assert rotated[0, t, 0, i + dim // 2].item() == pytest.approx(b * c + a * s, abs=3e-4)
    _, sin = rope.cos_sin(torch.tensor([1]), torch.float64, q.device, 301)
    assert sin.flatten().tolist() == pytest.approx([math.sin(f) * factor for f in frequencies], rel=1e-5)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name not in ("none", "default", "ntk", "linear")])
def test_frequencies_are_those_of_transformers(name: str) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    scaling = dict(SCALINGS[name] or {})
    rope_type = scaling.setdefault("rope_type", scaling.pop("type", None))
    scaling.setdefault("rope_theta", 20000.0)
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters=scaling,
        max_position_embeddings=scaling["original_max_position_embeddings"],
    )  # fmt: skip
    inverse, factor = rope_utils.ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=301)
    rope = seqpar.RotaryEmbedding(64, scaling=scaling)
    cos, sin = rope.cos_sin(torch.tensor([1]), torch.float32, inverse.device, 301)
    torch.testing.assert_close(cos.flatten(), inverse.cos() * factor)
    torch.testing.assert_close(sin.flatten(), inverse.sin() * factor)


def test_the_rotation_rounds_once_and_survives_a_half_module() -> None:
    rope = seqpar.RotaryEmbedding(16).to(torch.bfloat16)
    x = torch.randn(2, 7, 3, 16, dtype=torch.bfloat16)
    positions = torch.arange(7) + 100_000
    rotated, _ = rope(x, x, positions)
    exact, _ = rope(x.float(), x.float(), positions)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, exact.to(torch.bfloat16))
    by_row, _ = rope(x, x, positions.expand(2, 7))
    assert torch.equal(by_row, rotated)
    assert not list(rope.state_dict())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"head_dim": 7}, ValueError, "head_dim=7: .*even"),
        ({"base": 0.0}, ValueError, "base=0.0: .*positive"),
        ({"scaling": "linear"}, TypeError, "scaling='linear'"),
        ({"scaling": {"factor": 2.0}}, ValueError, "rope_type='': .*linear"),
        ({"scaling": {"type": "yarm"}}, ValueError, "did you mean 'yarn'"),
        ({"scaling": {"type": "yarn", "factor": 2.0}}, ValueError, "original_max_position_embeddings"),
        ({"scaling": {"type": "linear", "factor": -2.0}}, ValueError, "factor=-2.0: .*positive"),
        ({"scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, ValueError, "beta_fast"),
        (
            {
                "scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 32,
                }
            },
            ValueError,
            "high_freq_factor=1.0",
        ),
    ],
)
def test_errors(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        seqpar.RotaryEmbedding(**{"head_dim": 8, **arguments})
