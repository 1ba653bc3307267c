"""Layers: every strategy's layer is the local layer; the local layer is attention written out; rotary formulas."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardOf

import seqpar
from seqpar import Mask

from .pool import Pool, WorkerError
from .reference import dealt, dense_attention, difference

HIDDEN = 24

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ring": ("ring", {}),
    "ulysses": ("ulysses", {}),
    "all_gather": ("context_parallel", {}),
    "p2p": ("context_parallel", {"comm": "p2p"}),
    "a2a": ("context_parallel", {"comm": "a2a"}),
    "a2a+p2p": ("context_parallel", {"comm": "a2a+p2p"}),
    "hybrid": ("hybrid", {}),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True)
class Case:
    """A layer and its input. ``layer`` are its arguments, with the rotary scaling in place of the embedding."""

    layer: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    rotary: bool = False
    mask: Mask = field(default_factory=Mask.causal)
    seq_len: int = 37
    batch: int = 2
    positions: bool = False
    give_length: bool = False
    dtype: torch.dtype = torch.float64

    def make(self, strategy: str, group: ProcessGroup | None, layout: str, options: dict[str, Any]) -> nn.Module:
        arguments = {"num_heads": 4, **self.layer}
        head_dim = arguments.get("head_dim", HIDDEN // arguments["num_heads"])
        rope = seqpar.RotaryEmbedding(head_dim, scaling=self.rope) if self.rotary else None
        return seqpar.ParallelAttention(
            strategy, HIDDEN, **arguments, rope=rope, group=group, layout=layout, dtype=self.dtype, **options
        )

    def tensors(self) -> dict[str, Tensor]:
        """x, dy, and positions (documents that start again at 0, and one that starts far away)."""
        made = torch.Generator().manual_seed(1)
        x, dy = (
            torch.randn(self.batch, self.seq_len, HIDDEN, generator=made, dtype=torch.float64).to(self.dtype)
            for _ in range(2)
        )
        tensors = {"x": x, "dy": dy}
        if self.positions:
            rows = [(torch.arange(self.seq_len) + 7 * b) % (20 + b) for b in range(self.batch)]
            tensors["positions"] = torch.stack(rows)
        return tensors

    def state(self) -> dict[str, Tensor]:
        made = torch.Generator().manual_seed(2)
        layer = self.make("local", None, "contiguous", {})
        return {
            name: (0.3 * torch.randn(p.shape, generator=made, dtype=torch.float64) + ("norm" in name)).to(p.dtype)
            for name, p in layer.state_dict().items()
        }


CASES = {
    "plain": Case(),
    "grouped": Case({"num_heads": 6, "num_kv_heads": 2, "bias": True, "out_bias": False, "qk_norm": True}, rotary=True),
    "sinks": Case({"num_heads": 8, "num_kv_heads": 1, "sinks": True, "softcap": 2.0, "out_bias": True}, batch=1),
    "head_dim": Case({"num_heads": 3, "head_dim": 10}, rotary=True, rope=YARN, mask=Mask.sliding_window(5)),
    "llama3": Case({"num_kv_heads": 2}, rotary=True, rope=LLAMA3, mask=Mask.documents([0, 9, 30]), give_length=True),
    "positions": Case(
        rotary=True, rope=DYNAMIC, positions=True, mask=Mask.documents([[0, 13, 37], [0, 14, 35]]), give_length=True
    ),
    "dynamic": Case(rotary=True, rope=DYNAMIC),
    "dropout": Case({"dropout_p": 0.3, "num_kv_heads": 2}),
    "dropout, given length": Case({"dropout_p": 0.3}, give_length=True),
    "short": Case({"qk_norm": True}, rotary=True, seq_len=5),
    "float32": Case({"num_kv_heads": 2, "sinks": True}, rotary=True, dtype=torch.float32),
}


def run_layer(
    group: ProcessGroup | None, case: Case, strategy: str, layout: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Forward, backward and gradient summing on this rank."""
    torch.manual_seed(0 if group is None or group.rank() == 0 else 99)  # dropout's seeds come from rank 0
    layer = case.make(strategy, group, layout, options)
    layer.load_state_dict(case.state())
    tensors = case.tensors()
    if group is not None:
        tensors = {name: seqpar.shard(x, dim=1, group=group, layout=layout) for name, x in tensors.items()}
    x = tensors["x"].requires_grad_()
    seq_len = case.seq_len if case.give_length else None
    y = layer(x, mask=case.mask, positions=tensors.get("positions"), seq_len=seq_len)
    y.backward(tensors["dy"])
    seqpar.sync_gradients(layer, group=group) if group is not None else None
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **gradients}


_LOCAL: dict[str, dict[str, Tensor]] = {}


def local_layer(name: str) -> dict[str, Tensor]:
    if name not in _LOCAL:
        _LOCAL[name] = run_layer(None, CASES[name], "local", "contiguous", {})
    return _LOCAL[name]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_is_the_local_layer(pool: Pool, name: str, strategy: str, world: int) -> None:
    case = CASES[name]
    layout = ("contiguous", "zigzag", "striped")[(world + len(name) + len(strategy)) % 3]
    kind, options = STRATEGIES[strategy]
    ranks = pool.run(world, run_layer, case, kind, layout, options)
    expected = local_layer(name)
    for key in expected:
        actual = ranks[0][key]
        if key in ("y", "dx"):
            actual = torch.empty_like(expected[key])
            for rank in range(world):
                actual[:, dealt(case.seq_len, world, rank, layout)] = ranks[rank][key]
        else:
            assert all(torch.equal(actual, r[key]) for r in ranks), f"{key} differs between ranks"
        assert (why := difference(actual, expected[key].double(), case.dtype)) is None, f"{key}: {why}"


def written_out(case: Case) -> Tensor:
    """The layer's output from its definition, with rotations as complex numbers."""
    w = {name: p.double() for name, p in case.state().items()}
    tensors = case.tensors()
    heads = case.layer.get("num_heads", 4)
    head_dim = case.layer.get("head_dim", HIDDEN // heads)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in w:
            return x
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        if not case.rotary:
            return x
        positions = tensors.get("positions", torch.arange(case.seq_len)[None])
        length = int(positions.max()) + 1
        inverse, scale = inverse_frequencies(head_dim, 10000.0, case.rope, length)
        angle = positions[..., None, None].double() * torch.tensor(inverse, dtype=torch.float64)
        z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.full_like(angle, scale), angle)
        return torch.cat([z.real, z.imag], -1)

    q, k, v = (linear(tensors["x"].double(), f"{n}_proj").unflatten(-1, (-1, head_dim)) for n in ("q", "k", "v"))
    q, k = turn(norm(q, "q_norm")), turn(norm(k, "k_norm"))
    out, _ = dense_attention(
        q, k, v, case.mask.dense(case.seq_len), softcap=case.layer.get("softcap", 0.0), sinks=w.get("sinks")
    )
    return linear(out.flatten(2), "o_proj")


@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_the_local_layer_is_what_is_written_out(name: str) -> None:
    actual, expected = local_layer(name)["y"], written_out(CASES[name])
    # Frequencies are float32 in the layer; angles of tens of radians then differ in the sixth digit.
    bound = 3e-5 if CASES[name].rotary or CASES[name].dtype == torch.float32 else 1e-12
    assert (actual - expected).abs().max() <= bound * expected.abs().max()


def test_dropout_rests_in_evaluation() -> None:
    case = CASES["dropout"]
    layer = case.make("ring", None, "contiguous", {})
    layer.load_state_dict(case.state())
    plain = Case({"num_kv_heads": 2}).make("ring", None, "contiguous", {})
    plain.load_state_dict(case.state())
    x = case.tensors()["x"]
    assert torch.equal(layer.eval()(x), plain(x))
    assert not torch.equal(layer.train()(x), plain(x))


# ------------------------------------------------------------------------------------------------ rotary embedding


def inverse_frequencies(
    dim: int, base: float, scaling: dict[str, Any] | None, length: int
) -> tuple[list[float], float]:
    """Each pair's frequency, from the papers' formulas, one number at a time."""
    s = dict(scaling or {})
    kind = s.get("rope_type") or s.get("type") or "default"
    base = s.get("rope_theta", base)
    trained, factor = s.get("original_max_position_embeddings", 0), s.get("factor", 1.0)
    if kind == "ntk":
        base *= factor ** (dim / (dim - 2))
    if kind == "dynamic" and length > trained:
        base *= (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if kind == "linear":
        return [f / factor for f in plain], 1.0
    if kind == "llama3":
        low, high = trained / s["low_freq_factor"], trained / s["high_freq_factor"]
        scaled = []
        for f in plain:
            wavelength = 2 * math.pi / f
            if wavelength < high:
                scaled.append(f)
            elif wavelength > low:
                scaled.append(f / factor)
            else:
                smooth = (trained / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
                scaled.append((1 - smooth) * f / factor + smooth * f)
        return scaled, 1.0
    if kind == "yarn":
        # The pair whose wavelength fits ``turns`` times into the trained length: base ** (2 i / dim) * 2 pi * turns.
        edges = [
            dim / 2 * math.log(trained / (turns * 2 * math.pi), base)
            for turns in (s.get("beta_fast", 32), s.get("beta_slow", 1))
        ]
        if s.get("truncate", True):
            edges = [math.floor(edges[0]), math.ceil(edges[1])]
        first, last = max(edges[0], 0), min(edges[1], dim - 1)
        scaled = []
        for i, f in enumerate(plain):
            ramp = min(max((i - first) / (last - first), 0.0), 1.0)  # 0: many turns, kept; 1: few, interpolated
            scaled.append(f * (1 - ramp) + f / factor * ramp)
        temperature = 0.1 * math.log(factor) + 1
        if "mscale" in s:
            temperature = (0.1 * s["mscale"] * math.log(factor) + 1) / (
                0.1 * s["mscale_all_dim"] * math.log(factor) + 1
            )
        return scaled, s.get("attention_factor", temperature)
    return plain, 1.0


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
def test_rotary_formulas(name: str, dim: int) -> None:
    rope = seqpar.RotaryEmbedding(dim, base=20000.0, scaling=SCALINGS[name])
    positions = torch.tensor([0, 1, 5, 300, 127])
    expected, factor = inverse_frequencies(dim, 20000.0, SCALINGS[name], 301)
    q, k = torch.randn(1, 5, 2, dim, dtype=torch.float64), torch.randn(1, 5, 1, dim, dtype=torch.float64)
    for x, turned in zip((q, k), rope(q, k, positions), strict=True):
        for t, position in enumerate(positions.tolist()):
            for i in range(0, dim // 2, 7):
                c, s = math.cos(position * expected[i]) * factor, math.sin(position * expected[i]) * factor
                a, b = x[0, t, 0, i].item(), x[0, t, 0, i + dim // 2].item()
                assert turned[0, t, 0, i].item() == pytest.approx(a * c - b * s, abs=3e-4)
                assert turned[0, t, 0, i + dim // 2].item() == pytest.approx(b * c + a * s, abs=3e-4)
    assert rope.cos_sin(torch.tensor([1]), torch.float64, q.device, 301)[1].flatten().tolist() == pytest.approx(
        [math.sin(f) * factor for f in expected], rel=1e-5
    )


@pytest.mark.parametrize("name", [name for name in SCALINGS if name not in ("none", "default", "ntk", "linear")])
def test_rotary_frequencies_are_those_of_transformers(name: str) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    scaling = dict(SCALINGS[name] or {})
    kind = scaling.setdefault("rope_type", scaling.pop("type", None))
    scaling.setdefault("rope_theta", 20000.0)
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, rope_parameters=scaling,
        max_position_embeddings=scaling["original_max_position_embeddings"],
    )  # fmt: skip
    inverse, factor = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=301)
    cos, sin = seqpar.RotaryEmbedding(64, scaling=scaling).cos_sin(
        torch.tensor([1]), torch.float32, inverse.device, 301
    )
    torch.testing.assert_close(cos.flatten(), inverse.cos() * factor)
    torch.testing.assert_close(sin.flatten(), inverse.sin() * factor)


def test_rotary_rounds_once_and_survives_a_half_module() -> None:
    rope = seqpar.RotaryEmbedding(16).to(torch.bfloat16)
    x = torch.randn(2, 7, 3, 16, dtype=torch.bfloat16)
    positions = torch.arange(7) + 100_000
    turned, _ = rope(x, x, positions)
    exact, _ = rope(x.float(), x.float(), positions)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, exact.to(torch.bfloat16))
    by_row, _ = rope(x, x, positions.expand(2, 7))
    assert torch.equal(by_row, turned)
    assert not list(rope.state_dict())


# ------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"strategy": "rign"}, ValueError, r"strategy='rign': did you mean 'ring'\?.*ulysses"),
        ({"strategy": 3}, TypeError, "strategy=3"),
        ({"num_heads": 5}, ValueError, "num_heads=5: it does not divide hidden_size=24"),
        ({"num_kv_heads": 3}, ValueError, r"num_kv_heads=3: it must divide num_heads=4: one of 1, 2, 4"),
        ({"num_heads": 0}, ValueError, "num_heads=0: expected at least 1"),
        ({"hidden_size": 2.0}, TypeError, "hidden_size=2.0: expected an int, got float"),
        ({"layout": "zig"}, ValueError, "layout='zig': did you mean 'zigzag'"),
        ({"backend": "cuda"}, ValueError, "backend='cuda'"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p=1.0: expected a probability in \[0, 1\)"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0: expected a positive cap"),
        ({"rope": seqpar.RotaryEmbedding(8)}, ValueError, "rope: made for head_dim=8, but the layer has 6"),
        ({"rope": 10000.0}, TypeError, "rope=10000.0: expected a seqpar.RotaryEmbedding"),
        ({"comm": "p2p"}, TypeError, "comm: not an option of strategy 'ring'"),
        ({"strategy": "context_parallel", "comm": "p2"}, ValueError, "comm='p2': did you mean 'p2p'"),
        ({"strategy": "hybrid", "ulysses_sise": 2}, TypeError, "ulysses_sise: .*did you mean 'ulysses_size'"),
        ({"strategy": "hybrid", "ulysses_size": 0}, ValueError, "ulysses_size=0: expected at least 1"),
        ({"group": "all"}, TypeError, "group='all': expected a torch.distributed ProcessGroup"),
        ({"mesh": (2, 2)}, TypeError, "mesh=.*DeviceMesh"),
    ],
)
def test_constructor_errors(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        seqpar.ParallelAttention(**{"strategy": "ring", "hidden_size": HIDDEN, "num_heads": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"head_dim": 7}, ValueError, "head_dim=7: .*even"),
        ({"base": 0.0}, ValueError, "base=0.0: expected a positive number"),
        ({"scaling": "linear"}, TypeError, "scaling='linear'"),
        ({"scaling": {"factor": 2.0}}, ValueError, "rope_type='': .*linear"),
        ({"scaling": {"type": "yarm"}}, ValueError, "did you mean 'yarn'"),
        ({"scaling": {"type": "yarn", "factor": 2.0}}, ValueError, "original_max_position_embeddings is missing"),
        ({"scaling": {"type": "linear", "factor": -2.0}}, ValueError, "factor=-2.0: expected a positive number"),
        ({"scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, ValueError, "beta_fast=3 is not a key"),
        ({"scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ValueError, "high_freq_factor=1.0 must be above"),
    ],
)
def test_rotary_errors(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        seqpar.RotaryEmbedding(**{"head_dim": 8, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"x_local": torch.zeros(1, 9, 7)}, ValueError, r"x_local: shape \(1, 9, 7\); .*hidden_size=24"),
        ({"x_local": torch.zeros(9, HIDDEN)}, ValueError, "x_local: shape"),
        ({"x_local": None}, TypeError, "x_local: expected a tensor .*, got NoneType"),
        ({"mask": "causal"}, TypeError, "mask=str: expected a seqpar.Mask"),
        ({"mask": Mask.prefix_lm([1, 2, 3])}, ValueError, "mask: made for 3 batch rows, but x_local has 1"),
        ({"positions": torch.zeros(9)}, TypeError, "positions: dtype torch.float32; expected integers"),
        ({"positions": torch.zeros(8, dtype=torch.int64)}, ValueError, r"positions: shape \(8,\); expected \(9,\)"),
        ({"positions": [0]}, TypeError, "positions=list"),
        ({"seq_len": 8}, ValueError, "9 tokens.*seq_len=8"),
        ({"seq_len": 9.0}, TypeError, "seq_len=9.0: expected an int"),
    ],
)
def test_input_errors(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    layer = seqpar.ParallelAttention("ring", HIDDEN, 4)
    with pytest.raises(error, match=words):
        layer(**{"x_local": torch.zeros(1, 9, HIDDEN), **arguments})


def disagree(group: ProcessGroup, what: str) -> str:
    """The error of this rank when rank 1's input is another."""
    layer = seqpar.ParallelAttention("ring", HIDDEN, 4, group=group)
    odd = group.rank() == 1
    x = torch.zeros(2, 6 if what == "length" and odd else 4, HIDDEN - (what == "shape" and odd))
    x = x[:1] if what == "batch" and odd else x
    try:
        layer(x, mask=Mask.full() if what == "mask" and odd else Mask.causal())
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_ranks_that_disagree_all_raise(pool: Pool) -> None:
    words = {"length": "contiguous", "batch": "batch: the ranks", "mask": "mask: the ranks"}
    for what, expected in words.items():
        for said in pool.run(3, disagree, what):
            assert said.startswith("ValueError")
            assert expected in said
    said = pool.run(3, disagree, "shape")
    assert [s.split(":")[0] for s in said] == ["RuntimeError", "ValueError", "RuntimeError"]
    assert len(pool.run(3, disagree, "nothing")) == 3


def test_a_group_that_does_not_fit(pool: Pool) -> None:
    with pytest.raises(
        WorkerError, match="ulysses_size=3: expected a divisor of the group's 4 ranks; choose one of 1, 2, 4"
    ):
        Pool.run(pool, 4, run_layer, CASES["plain"], "hybrid", "contiguous", {"ulysses_size": 3})


# ------------------------------------------------------------------------------------------------ as a module


def test_parameters_are_named_and_shaped_as_llama() -> None:
    layer = seqpar.ParallelAttention("ulysses", 32, 4, 2, 12, bias=True, out_bias=False, qk_norm=True, sinks=True)
    assert isinstance(layer, seqpar.UlyssesAttention)
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == {
        "q_proj.weight": (48, 32), "q_proj.bias": (48,), "k_proj.weight": (24, 32), "k_proj.bias": (24,),
        "v_proj.weight": (24, 32), "v_proj.bias": (24,), "o_proj.weight": (32, 48), "q_norm.weight": (12,),
        "k_norm.weight": (12,), "sinks": (4,),
    }  # fmt: skip
    assert layer.sinks is not None and not layer.sinks.any()
    classes = {
        "local": seqpar.LocalAttention,
        "ring": seqpar.RingAttention,
        "context_parallel": seqpar.ContextParallelAttention,
        "hybrid": seqpar.HybridAttention,
    }
    for strategy, cls in classes.items():
        assert type(seqpar.ParallelAttention(strategy, 32, 4)) is cls


def test_meta_and_copies() -> None:
    layer = seqpar.ParallelAttention("ring", 32, 4, sinks=True, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in layer.parameters())
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.sinks is not None and not layer.sinks.any()
    assert "strategy='ring'" in repr(layer)


def copied(group: ProcessGroup) -> bool:
    layer = seqpar.ParallelAttention("ring", HIDDEN, 4, group=group)
    other = copy.deepcopy(layer)
    x = torch.randn(1, 3, HIDDEN)
    return other.group is group and torch.equal(layer(x), other(x)) and other.q_proj.weight is not layer.q_proj.weight


def test_a_copy_works_on_the_same_group(pool: Pool) -> None:
    assert all(pool.run(2, copied))


def test_autocast() -> None:
    layer = seqpar.ParallelAttention("ring", HIDDEN, 4, qk_norm=True, rope=seqpar.RotaryEmbedding(6), sinks=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(1, 9, HIDDEN))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.q_proj.weight.grad is not None and layer.q_proj.weight.grad.dtype == torch.float32


def on_mesh(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The hybrid on a mesh of all eight ranks."""
    case = CASES["grouped"]
    mesh = seqpar.init_mesh(ring=-1, ulysses=2, device_type="cpu")
    layer = seqpar.HybridAttention(HIDDEN, 6, 2, mesh=mesh, layout="zigzag", bias=True, out_bias=False, qk_norm=True,
                                   rope=seqpar.RotaryEmbedding(4), dtype=torch.float64)  # fmt: skip
    layer.load_state_dict(case.state())
    tensors = case.tensors()
    x, dy = (seqpar.shard(tensors[name], mesh=mesh, layout="zigzag") for name in ("x", "dy"))
    y = layer(x)
    y.backward(dy)
    seqpar.sync_gradients(layer, mesh=mesh)
    assert layer.k_proj.weight.grad is not None
    return seqpar.unshard(y.detach(), mesh=mesh, layout="zigzag"), layer.k_proj.weight.grad


def test_on_a_mesh(pool: Pool) -> None:
    expected = local_layer("grouped")
    for y, gradient in pool.run(8, on_mesh):
        assert difference(y, expected["y"], torch.float64) is None
        assert difference(gradient, expected["k_proj.weight"], torch.float64) is None


def save_distributed(group: ProcessGroup, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    layer = CASES["grouped"].make("ulysses", group, "contiguous", {})
    layer.load_state_dict(CASES["grouped"].state())
    dcp.save({"layer": layer.state_dict()}, checkpoint_id=folder, process_group=group)


def load_distributed(group: ProcessGroup, folder: str) -> bool:
    import torch.distributed.checkpoint as dcp

    layer = CASES["grouped"].make("ring", group, "zigzag", {})
    state = {"layer": layer.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    layer.load_state_dict(state["layer"])
    return all(torch.equal(p, CASES["grouped"].state()[name]) for name, p in layer.state_dict().items())


def test_a_checkpoint_loads_under_another_strategy_and_size(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_distributed, str(tmp_path))
    assert all(pool.run(4, load_distributed, str(tmp_path)))


# ------------------------------------------------------------------------------------------------ gradients


def summed(group: ProcessGroup, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Gradients that only some ranks have, none at all, frozen and shared parameters."""
    rank = group.rank()
    names = ("all", "one", "no", "frozen", "tied")
    linears = {name: nn.Linear(3, 3, bias=False, dtype=dtype) for name in names}
    linears["tied"].weight = linears["all"].weight
    linears["frozen"].weight.requires_grad_(False)
    linears["frozen"].weight.grad = torch.full((3, 3), float(rank), dtype=dtype)
    # In half precision the running sum would stay at 256: 1 is half its last digit in bfloat16.
    linears["all"].weight.grad = torch.full((3, 3), 256.0 if rank == 0 else 1.0, dtype=dtype)
    if rank == 1:
        linears["one"].weight.grad = torch.full((3, 3), 5.0, dtype=dtype)
    with seqpar.trace() as t:
        seqpar.sync_gradients(nn.ModuleDict(linears), group=group)
    assert t.bytes_sent > 0
    return {name: m.weight.grad for name, m in linears.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_summed_in_float32(pool: Pool, dtype: torch.dtype) -> None:
    for rank, g in enumerate(pool.run(4, summed, dtype)):
        whole = torch.tensor(259.0).to(dtype)
        assert g["all"] is not None and g["all"].dtype == dtype
        assert (g["all"] == whole).all()
        assert g["tied"] is not None and (g["tied"] == whole).all()
        assert g["one"] is not None and (g["one"] == 5).all()
        assert g["no"] is None
        assert g["frozen"] is not None and (g["frozen"] == rank).all()


def uneven_modules(group: ProcessGroup, what: str) -> str:
    odd = group.rank() == 1
    module: nn.Module = nn.Sequential(nn.Linear(3, 4 if what == "shape" and odd else 3))
    if what == "number" and odd:
        module.append(nn.Linear(2, 2))  # type: ignore[operator]
    if what == "sparse":
        module = nn.Embedding(4, 2, sparse=True)
        module(torch.tensor([1])).sum().backward()
    try:
        seqpar.sync_gradients(module, group=group)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def test_modules_that_differ_are_refused(pool: Pool) -> None:
    assert all("differ in number ([2, 4])" in said for said in pool.run(2, uneven_modules, "number"))
    assert all("shape or dtype" in said for said in pool.run(2, uneven_modules, "shape"))
    assert all("sparse=False" in said for said in pool.run(2, uneven_modules, "sparse"))
    assert pool.run(2, uneven_modules, "") == ["", ""]


def sharded_parameters(group: ProcessGroup) -> tuple[Tensor, Tensor, list[int]]:
    """Parameters sharded over dp, gradients summed over the sequence."""
    mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "sequence"))
    module = nn.Linear(6, 4, bias=True)
    for name, placement in (("weight", ShardOf(0)), ("bias", Replicate())):
        p = getattr(module, name)
        local = DTensor.from_local(torch.ones(2 if name == "weight" else 4, *p.shape[1:]), mesh["dp"], [placement])
        setattr(module, name, nn.Parameter(local))
    if group.rank() % 4 != 2:  # one rank of each sequence group has no gradient
        module.weight.grad = torch.ones_like(module.weight) * float(group.rank())
        module.bias.grad = torch.ones_like(module.bias)
    seqpar.sync_gradients(module, mesh=mesh["sequence"])
    assert isinstance(module.weight.grad, DTensor) and isinstance(module.bias.grad, DTensor)
    return module.weight.grad.to_local(), module.bias.grad.to_local(), list(module.weight.grad.shape)


def test_dtensor_parameters(pool: Pool) -> None:
    for rank, (weight, bias, shape) in enumerate(pool.run(8, sharded_parameters)):
        assert shape == [4, 6] and weight.shape == (2, 6)
        assert (weight == (0 + 1 + 3 if rank < 4 else 4 + 5 + 7)).all()
        assert (bias == 3).all()


def test_one_process_has_nothing_to_sum() -> None:
    module = nn.Linear(2, 2)
    module.weight.grad = torch.ones(2, 2)
    seqpar.sync_gradients(module)
    assert module.weight.grad.eq(1).all()
