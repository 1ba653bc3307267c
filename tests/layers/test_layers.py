"""Attention layers: every strategy equals the local layer, and the local layer equals its definition."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, repeat
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import seqpar
from seqpar import Mask

from ..pool import OwnPool, Pool, WorkerError, mesh_of, on_ranks, start
from ..reference import assert_close, dense_attention, nudge, rank_positions
from ..rotary_reference import inverse_frequencies
from ..strategy_cases import LAYER_STRATEGIES, LAYOUTS, OTHER_NAMES, STRATEGIES, layout_of

HIDDEN = 24
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# Of a layer with 6 heads.
CONSTANTS = {"softmax_scale": 0.7, "alibi_slopes": [0.5, 0.02, 0.3, 0.0, 1.0, 0.1], "deterministic": True}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}


@dataclass(frozen=True)
class Case:
    """A layer and its input.

    Attributes:
        layer: arguments of ``seqpar.ParallelAttention``.
        rotary: whether the layer has a rotary embedding, scaled by ``rope``.
        positions: whether ``positions`` are passed. They differ between the batch rows and start again at 0.
        seq_len_given: whether ``seq_len`` is passed, with which the ranks do not exchange their lengths.
    """

    layer: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    rotary: bool = False
    mask: Mask = field(default_factory=Mask.causal)
    seq_len: int = 37
    batch: int = 2
    positions: bool = False
    seq_len_given: bool = False
    dtype: torch.dtype = torch.float64

    def make(self, strategy: str = "local", **options: Any) -> seqpar.AttentionLayer:
        arguments = {"num_heads": 4, **self.layer}
        head_dim = arguments.get("head_dim", HIDDEN // arguments["num_heads"])
        rope = seqpar.RotaryEmbedding(head_dim, scaling=self.rope) if self.rotary else None
        return seqpar.ParallelAttention(strategy, HIDDEN, **arguments, rope=rope, dtype=self.dtype, **options)

    def tensors(self) -> dict[str, Tensor]:
        """x and dy, ``[batch, seq_len, hidden]``, and positions, ``[batch, seq_len]``."""
        generator = torch.Generator().manual_seed(1)
        shape = (2, self.batch, self.seq_len, HIDDEN)
        x, dy = torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype).unbind()
        tensors = {"x": x, "dy": dy}
        if self.positions:
            rows = [(torch.arange(self.seq_len) + 7 * b) % (20 + b) for b in range(self.batch)]
            tensors["positions"] = torch.stack(rows)
        return tensors

    def state(self) -> dict[str, Tensor]:
        """Random weights; the weights of norms are around 1."""
        generator = torch.Generator().manual_seed(2)
        return {
            name: (0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + ("norm" in name)).to(p.dtype)
            for name, p in self.make().state_dict().items()
        }


CASES = {
    "plain": Case(),
    "grouped": Case({"num_heads": 6, "num_kv_heads": 2, "bias": True, "out_bias": False, "qk_norm": True}, rotary=True),
    "sinks": Case({"num_heads": 8, "num_kv_heads": 1, "sinks": True, "softcap": 2.0, "out_bias": True}, batch=1),
    "head_dim": Case({"num_heads": 3, "head_dim": 10}, rotary=True, rope=YARN, mask=Mask.sliding_window(5)),
    "llama3": Case(
        {"num_kv_heads": 2}, rotary=True, rope=LLAMA3, mask=Mask.documents([0, 9, 30, 37]), seq_len_given=True
    ),
    "positions": Case(
        rotary=True,
        rope=DYNAMIC,
        positions=True,
        mask=Mask.documents([[0, 13, 37], [0, 14, 35]], padding=True),
        seq_len_given=True,
    ),
    "dynamic": Case(rotary=True, rope=DYNAMIC),
    "dropout": Case({"dropout_p": 0.3, "num_kv_heads": 2}),
    "dropout, seq_len": Case({"dropout_p": 0.3}, seq_len_given=True),
    "by heads": Case(
        {"num_heads": 6, "num_kv_heads": 3, **CONSTANTS},
        mask=Mask.by_heads([Mask.sliding_window(9), Mask.causal(), Mask.documents([0, 20, 37], causal=False)]),
    ),
    "alibi": Case({"num_heads": 6, "num_kv_heads": 2, **CONSTANTS}, mask=Mask.sliding_window(20)),
    "short": Case({"qk_norm": True}, rotary=True, seq_len=5),
    "float32": Case({"num_kv_heads": 2, "sinks": True}, rotary=True, dtype=torch.float32),
}

WORLDS_AND_LAYOUTS = [*zip(chain((2, 3), repeat(4)), LAYOUTS, strict=False)]


def run_layer(
    case: Case, strategy: str, layout: str, options: dict[str, Any], seed: int = 0, nudged: bool = False
) -> dict[str, Tensor]:
    """Forward, backward and ``sync_gradients``: y, dx and the gradients by parameter name."""
    layout = layout_of(layout, case.seq_len, options["group"].size()) if "group" in options else layout
    torch.manual_seed(seed)  # of dropout
    layer = case.make(strategy, layout=layout, **options)
    layer.load_state_dict(case.state())
    tensors = case.tensors()
    if strategy != "local":
        tensors = {name: seqpar.shard(x, dim=1, layout=layout, group=options["group"]) for name, x in tensors.items()}
    if nudged:
        nudge([tensors["x"], *layer.parameters()])
    x = tensors["x"].requires_grad_()
    seq_len = case.seq_len if case.seq_len_given else None
    y = layer(x, mask=case.mask, positions=tensors.get("positions"), seq_len=seq_len)
    y.backward(tensors["dy"])
    if strategy != "local":
        seqpar.sync_gradients(layer, group=options["group"], reduce="sum")
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "dx": x.grad, **gradients}


@on_ranks
def layer_on_group(group: ProcessGroup, case: Case, row: dict[str, Any], layout: str) -> dict[str, Tensor]:
    options = {name: value for name, value in row.items() if name != "strategy"}
    # Rank 0 draws the seed of dropout for all ranks.
    seed = 0 if group.rank() == 0 else 99
    return run_layer(case, row["strategy"], layout, {**options, "group": group}, seed)


@cache
def local_layer(name: str, nudged: bool = False) -> dict[str, Tensor]:
    return run_layer(CASES[name], "local", "contiguous", {}, nudged=nudged)


@pytest.mark.thorough(name=["head_dim", "dropout", "short", "float32"])
@pytest.mark.parametrize(
    ("name", "strategy", "world", "layout"),
    [
        pytest.param(
            name,
            strategy,
            *WORLDS_AND_LAYOUTS[(i + j) % len(LAYOUTS)],
            marks=pytest.mark.slow if (i + j) % len(LAYOUTS) else (),
        )
        for i, name in enumerate(CASES)
        for j, strategy in enumerate((*STRATEGIES, "activations"))
        if strategy not in OTHER_NAMES or i % 4 == 0
    ],
)
def test_every_strategy_is_the_local_layer(pool: Pool, name: str, strategy: str, world: int, layout: str) -> None:
    case = CASES[name]
    by_rank = pool.run(world, layer_on_group, case, LAYER_STRATEGIES[strategy], layout)
    for key, expected in local_layer(name).items():
        actual = by_rank[0][key]
        if key in ("y", "dx"):
            actual = torch.empty_like(expected)
            for rank, results in enumerate(by_rank):
                actual[:, rank_positions(case.seq_len, world, rank, layout)] = results[key]
        else:
            assert all(torch.equal(actual, results[key]) for results in by_rank), f"{key} differs between ranks"
        assert_close(actual, expected, case.dtype, key, local_layer(name, nudged=True)[key])


def layer_by_definition(case: Case) -> dict[str, Tensor]:
    """The layer's output and the gradient of its input in float64, with rotations as products of complex numbers."""
    w = {name: p.double() for name, p in case.state().items()}
    tensors = case.tensors()
    x = tensors["x"].double().requires_grad_()
    heads = case.layer.get("num_heads", 4)
    head_dim = case.layer.get("head_dim", HIDDEN // heads)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in w:
            return x
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]

    def rotate(x: Tensor) -> Tensor:
        if not case.rotary:
            return x
        positions = tensors.get("positions", torch.arange(case.seq_len)[None])  # [b or 1, s]
        frequencies, scale = inverse_frequencies(head_dim, 10000.0, case.rope, int(positions.max()) + 1)
        angle = positions[..., None, None].double() * torch.tensor(frequencies, dtype=torch.float64)  # [b, s, 1, d / 2]
        z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.full_like(angle, scale), angle)
        return torch.cat([z.real, z.imag], -1)

    q, k, v = (linear(x, f"{n}_proj").unflatten(-1, (-1, head_dim)) for n in ("q", "k", "v"))
    q, k = rotate(norm(q, "q_norm")), rotate(norm(k, "k_norm"))
    constants = {name: case.layer[name] for name in ("softcap", "softmax_scale") if name in case.layer}
    slopes = torch.tensor(case.layer["alibi_slopes"]) if "alibi_slopes" in case.layer else None
    visible = case.mask.dense(case.seq_len)
    out, _ = dense_attention(q, k, v, visible, sinks=w.get("sinks"), alibi_slopes=slopes, **constants)
    y = linear(out.flatten(2), "o_proj")
    return {"y": y.detach(), "dx": torch.autograd.grad(y, x, tensors["dy"].double())[0]}


@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_the_local_layer_is_its_definition(name: str) -> None:
    dtype = torch.float32 if CASES[name].rotary else CASES[name].dtype  # the layer's frequencies are float32
    for key, expected in layer_by_definition(CASES[name]).items():
        assert_close(local_layer(name)[key], expected, dtype, key, local_layer(name, nudged=True)[key])


def test_no_dropout_in_evaluation() -> None:
    case = CASES["dropout"]
    layer, plain = case.make("ring"), Case({"num_kv_heads": 2}).make("ring")
    layer.load_state_dict(case.state())
    plain.load_state_dict(case.state())
    x = case.tensors()["x"]
    assert torch.equal(layer.eval()(x), plain(x))
    assert not torch.equal(layer.train()(x), plain(x))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"strategy": "rign"}, ValueError, r"strategy='rign': did you mean 'ring'\?.*ulysses"),
        ({"strategy": 3}, TypeError, "strategy=3"),
        ({"num_heads": 5}, ValueError, "num_heads=5: .*divide hidden_size=24"),
        ({"num_kv_heads": 3}, ValueError, r"num_kv_heads=3: .*divide num_heads=4.*1, 2, 4"),
        ({"num_heads": 0}, ValueError, "num_heads=0: expected at least 1"),
        ({"hidden_size": 2.0}, TypeError, "hidden_size=2.0: expected an int, got float"),
        ({"layout": "zig"}, ValueError, "layout='zig': did you mean 'zigzag'"),
        ({"backend": "cuda"}, ValueError, "backend='cuda'"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p=1.0: expected a probability in \[0, 1\)"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0: expected a positive cap"),
        ({"softmax_scale": "0.5"}, TypeError, "softmax_scale='0.5': expected a number"),
        ({"deterministic": 1}, TypeError, "deterministic=1: expected True, False or 'invariant'"),
        ({"alibi_slopes": torch.zeros(3)}, ValueError, "alibi_slopes: 3 slopes; expected one for each of 4 query"),
        ({"alibi_slopes": torch.zeros(2, 4)}, ValueError, r"alibi_slopes: shape \(2, 4\), .*\[num_heads\]"),
        ({"alibi_slopes": nn.Parameter(torch.zeros(4))}, ValueError, "alibi_slopes: .*requires_grad=True.* detached"),
        ({"alibi_slopes": torch.zeros(4, device="meta")}, ValueError, "alibi_slopes: .*meta; .* holds data"),
        ({"alibi_slopes": [0.5, float("nan"), 0, 0]}, ValueError, "alibi_slopes=nan: expected a finite number"),
        ({"alibi_slopes": 0.5}, TypeError, r"alibi_slopes=0.5: expected .*\[num_heads\]"),
        ({"rope": seqpar.RotaryEmbedding(8)}, ValueError, "rope: .*head_dim=8.* 6"),
        ({"qk_norm": "no"}, TypeError, "qk_norm='no': expected True or False, got str"),
        ({"sinks": torch.zeros(4)}, TypeError, "sinks=tensor.*expected True or False, got Tensor"),
        ({"dtype": torch.int8}, TypeError, "dtype=torch.int8: expected one of torch.float32"),
        ({"window_size": 3}, TypeError, "window_size: not an option; pass a mask, such as mask=.*sliding_window"),
        ({"rope": 10000.0}, TypeError, "rope=10000.0: expected a seqpar.RotaryEmbedding"),
        ({"comm": "p2p"}, TypeError, "comm: not an option of strategy 'ring'; comm is an option of context_parallel;"),
        ({"ulyses_size": 2}, TypeError, "ulysses_size is an option of context_parallel and hybrid;"),
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
        ({"x_local": torch.zeros(1, 9, 7)}, ValueError, r"x_local: .*\(1, 9, 7\).*hidden_size=24"),
        ({"x_local": torch.zeros(9, HIDDEN)}, ValueError, r"x_local: .*\(9, 24\)"),
        ({"x_local": torch.zeros(1, 9, HIDDEN, device="meta")}, ValueError, "x_local: device meta"),
        ({"x_local": None}, TypeError, "x_local: expected a tensor .*, got NoneType"),
        ({"mask": "causal"}, TypeError, "mask=str: expected a seqpar.Mask"),
        ({"mask": Mask.prefix_lm([1, 2, 3])}, ValueError, "mask: .*3 batch rows.* 1"),
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


@on_ranks
def layer_in_disagreement(group: ProcessGroup, what: str) -> str:
    """The error of this rank when the input of rank 1 differs in ``what``."""
    layer = seqpar.ParallelAttention("ring", HIDDEN, 4, group=group, layout="contiguous")
    odd = group.rank() == 1
    x = torch.zeros(2, 6 if what == "length" and odd else 4, HIDDEN - (what == "shape" and odd))
    x = x[:1] if what == "batch" and odd else x
    try:
        layer(x, mask=Mask.full() if what == "mask" and odd else Mask.causal())
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("what", "words"), [("length", "contiguous"), ("batch", "batch: the ranks"), ("mask", "mask or options: the ranks")]
)
def test_ranks_that_disagree_all_raise(pool: Pool, what: str, words: str) -> None:
    for message in pool.run(3, layer_in_disagreement, what):
        assert message.startswith("ValueError") and words in message


def test_one_bad_rank_makes_all_raise(pool: Pool) -> None:
    messages = pool.run(3, layer_in_disagreement, "shape")
    assert [message.split(":")[0] for message in messages] == ["RuntimeError", "ValueError", "RuntimeError"]
    assert pool.run(3, layer_in_disagreement, "nothing") == ["nothing"] * 3


def test_a_group_that_ulysses_size_does_not_divide(pool: Pool) -> None:
    row = {"strategy": "hybrid", "ulysses_size": 3}
    with pytest.raises(WorkerError, match="ulysses_size=3: expected a divisor of the group's 4 ranks"):
        pool.run(4, layer_on_group, CASES["plain"], row, "contiguous")


@pytest.mark.parametrize(
    ("strategy", "cls"),
    [
        ("local", seqpar.LocalAttention),
        ("ring", seqpar.RingAttention),
        ("ulysses", seqpar.UlyssesAttention),
        ("context_parallel", seqpar.ContextParallelAttention),
        ("hybrid", seqpar.HybridAttention),
    ],
)
def test_the_class_of_each_strategy(strategy: str, cls: type) -> None:
    assert type(seqpar.ParallelAttention(strategy, 32, 4)) is cls


def test_meta_and_dtype() -> None:
    layer = seqpar.ParallelAttention("ring", 32, 4, sinks=True, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in layer.parameters())
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.sinks is not None and not layer.sinks.any()
    assert "strategy='ring'" in repr(layer)


@on_ranks
def deep_copy(group: ProcessGroup) -> None:
    layer = seqpar.ParallelAttention("ring", HIDDEN, 4, group=group, layout="contiguous")
    other = copy.deepcopy(layer)
    x = torch.randn(1, 3, HIDDEN)
    assert other.group is group
    assert other.q_proj.weight is not layer.q_proj.weight
    assert torch.equal(layer(x), other(x))


def test_a_copy_works_on_the_same_group(pool: Pool) -> None:
    pool.run(2, deep_copy)


def test_autocast() -> None:
    layer = seqpar.ParallelAttention("ring", HIDDEN, 4, qk_norm=True, rope=seqpar.RotaryEmbedding(6), sinks=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(1, 9, HIDDEN))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.q_proj.weight.grad is not None and layer.q_proj.weight.grad.dtype == torch.float32


@on_ranks
def hybrid_on_mesh(group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The output over the full sequence, and the gradient of ``k_proj``."""
    case, mesh = CASES["grouped"], seqpar.init_mesh(ring=-1, ulysses=2, device_type="cpu")
    layer = case.make("hybrid", mesh=mesh, layout="zigzag")
    layer.load_state_dict(case.state())
    tensors = case.tensors()
    x, dy = (seqpar.shard(tensors[name], mesh=mesh, layout="zigzag") for name in ("x", "dy"))
    y = layer(x)
    y.backward(dy)
    seqpar.sync_gradients(layer, mesh=mesh, reduce="sum")
    assert layer.k_proj.weight.grad is not None
    return seqpar.unshard(y.detach(), mesh=mesh, layout="zigzag"), layer.k_proj.weight.grad


def test_on_a_mesh(pool: Pool) -> None:
    expected = local_layer("grouped")
    for y, gradient in pool.run(8, hybrid_on_mesh):
        assert_close(y, expected["y"], torch.float64)
        assert_close(gradient, expected["k_proj.weight"], torch.float64)


@on_ranks
def attention_over_tp(group: ProcessGroup, options: dict[str, Any]) -> None:
    """The function and a layer equal one device on a mesh that shards the sequence over tp alone."""
    sharding = seqpar.Sharding(37, "zigzag", mesh=mesh_of(2, 1, 1, 4))
    torch.manual_seed(3)
    full = [torch.randn(2, 37, 4, 8, dtype=torch.float64) for _ in range(3)]  # [b, s, h, d]
    expected = seqpar.attention(*full, strategy="local")
    out = seqpar.attention(*map(sharding.shard, full), sharding=sharding, **options)
    layers = []
    for arguments in ({"strategy": "local"}, {**options, "mesh": sharding.mesh}):
        torch.manual_seed(4)
        layers.append(seqpar.ParallelAttention(hidden_size=32, num_heads=4, dtype=torch.float64, **arguments))
    x = full[0].flatten(2)
    y, y_local = layers[0](x), layers[1](sharding.shard(x), sharding=sharding)
    for actual, one in ((out, expected), (y_local, y)):
        assert_close(actual, sharding.shard(one))


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_sequence_is_sharded_over_tp_where_it_is_all_there_is(pool: Pool, name: str) -> None:
    pool.run(8, attention_over_tp, STRATEGIES[name])


@on_ranks
def different_options(group: ProcessGroup, port: int, one: dict[str, Any], others: dict[str, Any]) -> tuple[str, int]:
    """The error where the last rank's layer has options of its own, and the bytes sent until then."""
    world = start(port, f"{one} {others}", group.rank(), group.size(), timeout_s=10)
    options = {"strategy": "ring", "num_heads": 4, **(one if world.rank() == world.size() - 1 else others)}
    layer = seqpar.ParallelAttention(hidden_size=32, group=world, **options, layout="contiguous")
    with seqpar.trace() as used:
        try:
            layer(torch.zeros(1, 4, 32))
        except Exception as error:
            return f"{type(error).__name__}: {error}", used.bytes_sent
    return "nothing", 0


OPTIONS_THAT_DIFFER = [
    ({"strategy": "ulysses"}, {}),
    ({"softcap": 2.0}, {}),
    ({"softmax_scale": 0.5}, {}),
    ({"alibi_slopes": [0.0] * 4}, {}),
    ({"dropout_p": 0.1}, {}),
    ({"strategy": "hybrid", "ulysses_size": 4}, {"strategy": "hybrid"}),
    ({"strategy": "context_parallel", "comm": "p2p"}, {"strategy": "context_parallel"}),
    ({"strategy": "context_parallel", "chunks": 2}, {"strategy": "context_parallel", "chunks": 1}),
    ({"strategy": "tp_sp", "overlap": "none"}, {"strategy": "tp_sp"}),
]


@pytest.mark.parametrize(("one", "others"), OPTIONS_THAT_DIFFER, ids=str)
def test_options_that_differ_between_ranks(own: OwnPool, one: dict[str, Any], others: dict[str, Any]) -> None:
    for message, sent in own.pool.run(4, different_options, own.port, one, others):
        assert message == "ValueError: mask or options: the ranks of the group differ; pass the same on every rank"
        assert not sent


def test_an_option_that_does_not_fit_on_one_rank(own: OwnPool) -> None:
    hybrid = {"strategy": "hybrid"}
    *others, last = own.pool.run(4, different_options, own.port, {**hybrid, "ulysses_size": 3}, hybrid)
    assert last[0].startswith("ValueError: ulysses_size=3: expected a divisor of the group's 4 ranks")
    for message, _ in others:
        assert message.startswith("RuntimeError: rank(s) [3] of the group raised an error on their own input")


@on_ranks
def count_mesh_slices(group: ProcessGroup, strategy: str) -> int:
    """How often the second forward of a layer slices its mesh."""
    mesh = mesh_of(dp=1, ring=2, ulysses=2, tp=2)
    options = dict(LAYER_STRATEGIES[strategy])
    layer = seqpar.ParallelAttention(options.pop("strategy"), 32, 4, mesh=mesh, **options, layout="contiguous")
    x = seqpar.shard(torch.randn(1, 16, 32), mesh=mesh, strategy=layer.strategy, layout="contiguous")
    layer(x)
    with mock.patch.object(DeviceMesh, "__getitem__", autospec=True, side_effect=DeviceMesh.__getitem__) as sliced:
        layer(x).sum().backward()
    return int(sliced.call_count)


@pytest.mark.parametrize("strategy", [name for name in LAYER_STRATEGIES if name not in OTHER_NAMES])
def test_a_mesh_is_sliced_once(pool: Pool, strategy: str) -> None:
    assert pool.run(8, count_mesh_slices, strategy) == [0] * 8


@on_ranks
def sharded_projection(group: ProcessGroup, name: str) -> str:
    """A projection that ``parallelize_module`` has sharded over the ranks of the sequence."""
    mesh = DeviceMesh.from_group(group, "cpu")
    layer = seqpar.ParallelAttention("ring", 32, 4, mesh=mesh)
    style = RowwiseParallel() if name == "o_proj" else ColwiseParallel(output_layouts=Replicate())
    parallelize_module(layer, mesh, {name: style})
    sharding = seqpar.Sharding(16, "zigzag", mesh=mesh)
    with pytest.raises(ValueError, match=rf"^{name}.weight: it is sharded over ranks \[0, 1\], which share a sequence"):
        layer(torch.randn(1, 8, 32), sharding=sharding)
    gathered = seqpar.ParallelAttention("ring", 32, 4, mesh=mesh)
    fully_shard(gathered, mesh=mesh)
    gathered(torch.randn(1, 8, 32), sharding=sharding).sum().backward()
    return name


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_projections_sharded_over_the_sequence_are_refused(pool: Pool, name: str) -> None:
    assert pool.run(2, sharded_projection, name) == [name] * 2
