"""Rotary embeddings: the formulas of the papers, Hugging Face's frequencies, rounding, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar.layers import rotary as rotary_module

from ..pool import Pool, on_ranks
from ..reference import assert_close, assert_error
from ..rotary_reference import inverse_frequencies

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
                # The frequencies are float32: an angle of up to 300 radians has as many units in the last place.
                at = rotated[0, t, 0, [i, i + dim // 2]]
                for found, exact in zip(at.tolist(), (a * c - b * s, b * c + a * s), strict=True):
                    assert_error(abs(found - exact), position * factor * torch.finfo(torch.float32).eps)
    _, sin = rope.cos_sin(torch.tensor([1]), torch.float64, q.device, 301)
    assert_close(sin.flatten(), torch.tensor([math.sin(f) * factor for f in frequencies]), torch.float32)


@pytest.mark.slow
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
    assert_close(cos.flatten(), inverse.cos() * factor)
    assert_close(sin.flatten(), inverse.sin() * factor)


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


@pytest.mark.parametrize("start", [0, 2**20 - 3, 2**24 - 3, 2**24 + 2_000_000])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_are_exact_at_long_positions(name: str, start: int) -> None:
    """Against Python's float64, one angle at a time. float32 angles are off by half a radian at 2 ** 24."""
    positions = torch.arange(start, start + 6)
    length = start + 6
    frequencies, factor = inverse_frequencies(128, 500_000.0, SCALINGS[name], length)
    rope = seqpar.RotaryEmbedding(128, base=500_000.0, scaling=SCALINGS[name])
    found = rope.cos_sin(positions, torch.float32, torch.device("cpu"), length)
    for table, function in zip(found, (math.cos, math.sin), strict=True):
        expected = [[function(p * f) * factor for f in frequencies] for p in positions.tolist()]
        assert table.dtype == torch.float32
        assert_close(table[0, :, 0], torch.tensor(expected, dtype=torch.float64), torch.float32, name)


def test_long_tables_are_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.stack([torch.randperm(50), torch.arange(50)])
    rope = seqpar.RotaryEmbedding(16)
    expected = rope.cos_sin(positions, torch.float64, positions.device)
    monkeypatch.setattr(rotary_module, "_FLOAT64_ELEMENTS", 16 * 7)
    for table, want in zip(rope.cos_sin(positions.clone(), torch.float64, positions.device), expected, strict=True):
        assert torch.equal(table, want)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments with which tables were made."""
    make, calls = rotary_module._make_table, []
    rotary_module._tables.clear()

    def counted(*args: Any) -> Any:
        calls.append(args)
        return make(*args)

    monkeypatch.setattr(rotary_module, "_make_table", counted)
    return calls


def saved_storages(run: Callable[[], Any], shape: tuple[int, ...]) -> int:
    """How many different storages of tensors of ``shape`` autograd keeps of ``run()``."""
    storages: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.shape == shape:
            storages[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    del result
    return len(storages)


@pytest.mark.parametrize("given", [True, False], ids=["given positions", "default positions"])
def test_layers_share_one_table(made: list[Any], given: bool) -> None:
    layers = [
        seqpar.ParallelAttention("local", 32, 4, rope=seqpar.RotaryEmbedding(8, scaling={"type": "ntk", "factor": 2.0}))
        for _ in range(4)
    ]
    positions = torch.randint(100, (2, 10)) if given else None

    def run() -> Tensor:
        x = torch.randn(2, 10, 32)
        for layer in layers:
            x = layer(x, positions=positions)
        return x

    assert saved_storages(run, (2 if given else 1, 10, 1, 4)) == 2  # cos and sin
    run().sum().backward()
    assert len(made) == 1


@on_ranks
def tensor_parallel_layers(group: ProcessGroup, given: bool) -> list[int]:
    """The tables that were made after each of three calls; the positions change before the third."""
    layers = [
        seqpar.ParallelAttention("tp_sp", 32, 4, group=group, layout="zigzag", rope=seqpar.RotaryEmbedding(8))
        for _ in range(3)
    ]
    positions = seqpar.positions(16, group=group, layout="zigzag") + 5
    x = torch.randn(1, len(positions), 32)
    rotary_module._tables.clear()
    tables = mock.Mock(wraps=rotary_module._make_table)
    counts = []
    with mock.patch.object(rotary_module, "_make_table", tables):
        for call in range(3):
            if call == 2:
                positions += 1
            for layer in layers:
                x = layer(x, positions=positions if given else None)
            counts.append(tables.call_count)
    return counts


# Every layer all-gathers positions that it is given, because no collective may depend on what one rank has cached.
@pytest.mark.parametrize(("given", "counts"), [(True, [3, 6, 9]), (False, [1, 1, 1])])
def test_tables_of_tensor_parallel_layers(pool: Pool, given: bool, counts: list[int]) -> None:
    assert pool.run(2, tensor_parallel_layers, given) == [counts] * 2


def test_a_table_is_made_again_for_other_values(made: list[Any]) -> None:
    rope, other = seqpar.RotaryEmbedding(8), seqpar.RotaryEmbedding(8, base=500.0)
    x = torch.randn(1, 5, 1, 8)
    positions = torch.arange(5)
    first, _ = rope(x, x, positions)
    assert len(made) == 1
    positions += 7  # in place: the same tensor
    moved, _ = rope(x, x, positions)
    assert len(made) == 2 and not torch.equal(first, moved)
    for module, dtype in ((other, torch.float32), (rope, torch.float64)):
        module(x.to(dtype), x.to(dtype), positions)
    assert len(made) == 4
    for start in range(20):  # a new tensor is often at the address of one that is gone
        rotated, _ = rope(x, x, torch.arange(5) + start)
        exact, _ = seqpar.RotaryEmbedding(8)(x, x, torch.arange(5) + start)
        assert torch.equal(rotated, exact)


def test_tables_go_with_their_positions_and_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotary_module, "_TABLE_BYTES", 3 * 2 * 5 * 4 * 4)  # of three tables
    rotary_module._tables.clear()
    rope, several = seqpar.RotaryEmbedding(8), [torch.arange(5) for _ in range(4)]
    held = []
    for positions in several:
        rope.cos_sin(positions, torch.float32, positions.device)
        held.append(len(rotary_module._tables))
    assert held == [1, 2, 3, 1] and several[-1] in rotary_module._tables
    several.clear()
    del positions
    assert not len(rotary_module._tables)


def test_a_table_of_inference_mode_serves_training() -> None:
    rope, positions = seqpar.RotaryEmbedding(8), torch.arange(5)
    with torch.inference_mode():
        x = torch.randn(1, 5, 1, 8)
        rope(x, x, positions)
        rope(x, x, torch.arange(5))
    y = torch.randn(1, 5, 1, 8, requires_grad=True)
    rope(y, y, positions)[0].sum().backward()
    assert y.grad is not None
