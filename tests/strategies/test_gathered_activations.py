"""``gather="activations"``: the numbers of one device, and the bytes of its formula."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard

import seqpar
from seqpar import Mask, Sharding
from seqpar.schedule.plan import AttentionPlan

from ..cases import Batch
from ..pool import Pool, mesh_of, on_ranks
from ..problems import BATCH_RULES, RULES
from ..reference import Rules, assert_close, assert_error, combined_mask, fitted, rank_positions, rules_id
from ..strategy_cases import LAYOUTS, layout_of

HIDDEN, HEAD_DIM, BATCH = 24, 4, 2
ACTIVATIONS: dict[str, Any] = {"strategy": "context_parallel", "gather": "activations"}


@dataclass(frozen=True)
class Case:
    """A layer, its mask and its input.

    Attributes:
        layer: arguments of ``seqpar.ParallelAttention`` besides the strategy.
    """

    rules: Rules = ()
    layout: str = "contiguous"
    heads: tuple[int, int] = (6, 6)
    layer: dict[str, Any] = field(default_factory=dict, hash=False)
    seq_len: int = 50
    positions: bool = False

    def __str__(self) -> str:
        options = ",".join(map(str, self.layer))
        return f"{self.layout} {rules_id(self.rules)} {self.heads} {options} {self.seq_len} {self.positions}"

    def make(self, strategy: str = "local", dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        """The layer with random weights, the same ones for every strategy."""
        arguments = {**self.layer, "rope": seqpar.RotaryEmbedding(HEAD_DIM)} if "rope" in self.layer else self.layer
        layer = seqpar.ParallelAttention(
            strategy, HIDDEN, *self.heads, HEAD_DIM, dtype=dtype, **{**arguments, **options}
        )  # fmt: skip
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, p in layer.named_parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64) + ("norm" in name))
        return layer

    def tensors(self) -> dict[str, Tensor]:
        """x and dy, ``[batch, seq_len, hidden]``, and positions, ``[batch, seq_len]``."""
        generator = torch.Generator().manual_seed(1)
        x, dy = torch.randn(2, BATCH, self.seq_len, HIDDEN, generator=generator, dtype=torch.float64).unbind()
        positions = torch.stack([(torch.arange(self.seq_len) + 7 * b) % (20 + b) for b in range(BATCH)])
        return {"x": x, "dy": dy, "positions": positions}

    def run(self, layer: Any, sharding: Sharding) -> dict[str, Tensor]:
        """Forward and backward: y, dx and the gradients by parameter name."""
        local = {name: sharding.shard(x) for name, x in self.tensors().items()}
        x = local["x"].to(layer.q_proj.weight.dtype).requires_grad_()
        y = layer(x, mask=self.mask, sharding=sharding, positions=local["positions"] if self.positions else None)
        y.backward(local["dy"].to(y.dtype))
        if sharding.sequence_group is not None:
            seqpar.sync_gradients(layer, group=sharding.sequence_group, reduce="sum")
        assert x.grad is not None
        return {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in layer.named_parameters() if p.grad is not None}}

    @property
    def mask(self) -> Mask:
        return combined_mask(fitted(self.rules, self.seq_len))


@lru_cache
def on_one_device(case: Case) -> dict[str, Tensor]:
    return case.run(case.make(), Sharding(case.seq_len))


ALL_OPTIONS = {"bias": True, "out_bias": False, "qk_norm": True, "rope": True, "softcap": 2.0, "sinks": True}
CASES = [
    *(Case(rules, layout) for rules, layout in product((*RULES, *BATCH_RULES), LAYOUTS)),
    *(
        Case(RULES[0], layout, (4, 2), {"rope": True, "qk_norm": True}, seq_len)
        for layout, seq_len in product(LAYOUTS, (1, 3, 5))
    ),
]
# Every pair of a mask, positions or none, a layout and head counts.
WITH_OPTIONS = [
    Case(RULES[(0, 5)[n % 2]], layout, heads, ALL_OPTIONS, positions=n // 2 % 2 == 1)
    for n, (layout, heads) in enumerate(product(LAYOUTS, ((6, 6), (6, 2), (8, 1))))
]
# Two and four ranks share the cases, and each runs every mask, layout and option.
CASES_OF_WORLD = {
    1: [*CASES[::8], *WITH_OPTIONS[::2]],
    2: [*CASES[::2], *WITH_OPTIONS],
    4: [*CASES[1::2], *WITH_OPTIONS],
}


@on_ranks
def run_on_ranks(group: ProcessGroup, case: Case) -> dict[str, Tensor]:
    sharding = Sharding(case.seq_len, layout_of(case.layout, case.seq_len, group.size()), group=group)
    return case.run(case.make(**ACTIVATIONS), sharding)


@pytest.mark.slow
@pytest.mark.thorough(world=[4])
@pytest.mark.parametrize("world", CASES_OF_WORLD)
def test_every_mask_layout_and_option_is_one_device(batch: Batch, world: int) -> None:
    def verify(case: Case, by_rank: list[dict[str, Tensor]]) -> None:
        for name, expected in on_one_device(Case(**{**vars(case), "layout": "contiguous"})).items():
            actual = by_rank[0][name]
            if name in ("y", "dx"):
                actual = torch.empty_like(expected)
                for rank, results in enumerate(by_rank):
                    actual[:, rank_positions(case.seq_len, world, rank, case.layout)] = results[name]
            assert_close(actual, expected, torch.float64, name)

    batch.check(world, run_on_ranks, CASES_OF_WORLD[world], verify)


@on_ranks
def errors_in_bfloat16(group: ProcessGroup, gather: str) -> dict[str, float]:
    """Relative errors of a bfloat16 layer against float64 with the same weights and input."""
    case = Case(RULES[0], "zigzag", (6, 6), {"rope": True}, seq_len=256)
    layer = case.make("context_parallel", torch.bfloat16, gather=gather)
    exact = case.make("context_parallel")
    exact.load_state_dict(layer.state_dict())
    sharding = Sharding(case.seq_len, case.layout, group=group)
    rounded = {name: x.bfloat16().to(x.dtype) for name, x in case.tensors().items()}
    with mock.patch.object(Case, "tensors", return_value=rounded):
        actual, expected = case.run(layer, sharding), case.run(exact, sharding)
    return {name: float((actual[name] - x).norm() / x.norm()) for name, x in expected.items()}


def test_half_precision_is_as_good_as_sending_keys(pool: Pool) -> None:
    """Each rank rounds its own part of dk, dv; the parts of the hidden states' gradients are summed in float32."""
    kv, activations = (pool.run(4, errors_in_bfloat16, gather)[0] for gather in ("kv", "activations"))
    for name in ("y", "dx", "k_proj.weight", "v_proj.weight"):
        assert activations[name] <= 1.15 * kv[name], (name, activations[name], kv[name])


@on_ranks
def bytes_sent(group: ProcessGroup, case: Case, dtype: torch.dtype, gather: str) -> tuple[int, int, int]:
    """Sent before the query projection, in forward and in backward."""
    layer = case.make("context_parallel", dtype, gather=gather)
    sharding = Sharding(case.seq_len, case.layout, group=group)
    x = sharding.shard(case.tensors()["x"]).to(dtype).requires_grad_()
    early: list[int] = []
    with seqpar.trace() as sent:
        layer.q_proj.register_forward_pre_hook(lambda *_: early.append(sent.bytes_sent))
        y = layer(x, mask=case.mask, sharding=sharding)
        forward = sent.bytes_sent
        y.sum().backward()
    return early[0], forward, sent.bytes_sent - forward


@pytest.mark.thorough(dtype=[torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes(pool: Pool, world: int, dtype: torch.dtype) -> None:
    """(P-1)/P x N x hidden x e forward; in backward the same again, and gradients in float32. Under every mask."""
    for rules, layout in product((RULES[0], RULES[1], RULES[2]), LAYOUTS[:3]):
        case = Case(rules, layout, (6, 2), {"qk_norm": True}, seq_len=48)
        row = BATCH * case.seq_len * (world - 1) // world * HIDDEN
        forward, backward = row * dtype.itemsize, row * (dtype.itemsize + 4)
        # The transfers start with the messages to one rank, ahead of the query projection.
        first = forward // max(1, world - 1)
        sent = pool.run(world, bytes_sent, case, dtype, "activations")
        assert sent == [(first, forward, backward)] * world


def test_bytes_of_uneven_shards(pool: Pool) -> None:
    case = Case(RULES[1], "zigzag", seq_len=50)
    lengths = [len(rank_positions(50, 4, rank, "zigzag")) for rank in range(4)]
    for own, (_, forward, backward) in zip(
        lengths, pool.run(4, bytes_sent, case, torch.bfloat16, "activations"), strict=True
    ):
        assert forward == 3 * own * BATCH * HIDDEN * 2
        assert backward == forward + (50 - own) * BATCH * HIDDEN * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_the_bytes_of_multi_head_attention(pool: Pool, dtype: torch.dtype) -> None:
    """Where heads x head_dim is the hidden size, forward and backward."""
    case = Case(RULES[1], seq_len=48)
    kv, activations = (pool.run(4, bytes_sent, case, dtype, gather) for gather in ("kv", "activations"))
    for (_, forward, backward), (_, forward_of_kv, backward_of_kv) in zip(activations, kv, strict=True):
        assert 2 * forward == forward_of_kv and 2 * backward == backward_of_kv


# What surrounds the layer


@on_ranks
def gradients_under_autocast(group: ProcessGroup) -> None:
    """Of float32 weights with biases and norms, ``gather="activations"`` is as exact as "kv"."""
    case = Case(RULES[0], "zigzag", (6, 2), ALL_OPTIONS)
    sharding = Sharding(case.seq_len, case.layout, group=group)
    results = []
    for gather, cast in (("kv", False), ("kv", True), ("activations", True)):
        layer = case.make("context_parallel", torch.float32, gather=gather)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            results.append(case.run(layer, sharding))
    exact, rounded, found = results
    assert all(found[name].dtype == x.dtype for name, x in rounded.items())
    for name, x in exact.items():
        error, rounding = (float((y[name] - x).norm() / x.norm()) for y in (found, rounded))
        assert_error(error, rounding, name, dtype=torch.bfloat16)


def test_autocast(pool: Pool) -> None:
    pool.run(2, gradients_under_autocast)


@on_ranks
def frozen_parts(group: ProcessGroup, frozen: tuple[str, ...]) -> None:
    """The other gradients are equal to the gradients of a layer in which nothing is frozen."""
    case = Case(RULES[0], "striped", (6, 2), ALL_OPTIONS)
    sharding = Sharding(case.seq_len, case.layout, group=group)
    layer = case.make(**ACTIVATIONS)
    expected = case.run(case.make(**ACTIVATIONS), sharding)
    for name, p in layer.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    found = case.run(layer, sharding)
    assert set(found) == {name for name in expected if not name.startswith(frozen)}
    for name, x in found.items():
        assert_close(x, expected[name])


@pytest.mark.parametrize("frozen", [("k_proj", "q_proj"), ("k_", "v_", "q_", "sinks"), ("v_proj.weight", "k_norm")])
def test_frozen_parameters(pool: Pool, frozen: tuple[str, ...]) -> None:
    pool.run(2, frozen_parts, frozen)


@on_ranks
def gradients_under_fsdp(group: ProcessGroup) -> None:
    """FSDP frees the weights after forward and gathers them again for backward, which projects the keys again."""
    case = Case(RULES[0], "zigzag", (6, 2), ALL_OPTIONS)
    sharding, mesh = Sharding(case.seq_len, case.layout, group=group), DeviceMesh.from_group(group, "cpu")
    expected = case.run(case.make(**ACTIVATIONS), sharding)
    layer = case.make(**ACTIVATIONS)
    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    x, dy = (sharding.shard(case.tensors()[name]) for name in ("x", "dy"))
    layer(x, mask=case.mask, sharding=sharding).backward(dy)
    for name, p in layer.named_parameters():
        gradient = p.grad.full_tensor() * group.size()  # FSDP averages
        assert_close(gradient, expected[name])


def test_fsdp(pool: Pool) -> None:
    pool.run(2, gradients_under_fsdp)


@on_ranks
def planned_ahead(group: ProcessGroup) -> int:
    """Plans made in a forward after ``mask_planner``."""
    sharding = Sharding(32, group=group)
    layer = Case().make(**ACTIVATIONS)
    mask = layer.mask_planner(sharding)(Mask.documents([0, 7, 32]))
    with mock.patch.object(AttentionPlan, "__init__", side_effect=AssertionError):
        layer(sharding.shard(torch.randn(1, 32, HIDDEN, dtype=torch.float64)), mask=mask, sharding=sharding)
    (plan,) = mask.plans.values()
    return len(plan)


def test_a_plan_made_ahead(pool: Pool) -> None:
    assert pool.run(2, planned_ahead) == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"gather": "activation"}, ValueError, "gather='activation': did you mean 'activations'"),
        ({"gather": True}, TypeError, "gather=True: expected a str"),
        ({"gather": "activations", "comm": "p2p"}, ValueError, "gather='activations': .*all_gather.* comm='p2p'"),
        ({"gather": "activations", "comm": "a2a"}, ValueError, "gather='activations': .*all_gather.* comm='a2a'"),
        ({"gather": "activations", "chunks": 2}, ValueError, "chunks=2: .*gather='kv'"),
        ({"strategy": "ring", "gather": "activations"}, TypeError, "gather: .*'ring'.*ContextParallelAttention"),
    ],
)
def test_bad_options(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        seqpar.ParallelAttention(**{"strategy": "context_parallel", "hidden_size": 24, "num_heads": 4, **arguments})


def test_only_the_layer_has_the_option() -> None:
    q = torch.zeros(1, 4, 2, 4)
    call: dict[str, Any] = {"strategy": "context_parallel", "gather": "activations"}
    with pytest.raises(TypeError, match=r"gather: .*seqpar\.ContextParallelAttention.*leave it out"):
        seqpar.attention(q, q, q, **call)
    pytest.importorskip("transformers")
    from seqpar.hf import parallelize

    with pytest.raises(TypeError, match=r"gather: .*seqpar\.ContextParallelAttention.*leave it out"):
        parallelize(nn.Linear(1, 1), **call)


@on_ranks
def other_projections(group: ProcessGroup) -> list[str]:
    """What layers raise whose projections, norm or strategy do not allow it."""

    class Adapted(nn.Linear):
        """As LoRA's: it adds to what its weight gives."""

    messages = []
    sharding = Sharding(16, group=group)
    x = sharding.shard(torch.randn(1, 16, HIDDEN))
    layer = seqpar.ParallelAttention(**ACTIVATIONS, hidden_size=HIDDEN, num_heads=6, group=group, layout="zigzag")
    layer.v_proj = Adapted(HIDDEN, HIDDEN)
    for arguments in ({"sharding": sharding}, {}):
        try:
            layer(x, **arguments)
        except TypeError as error:
            messages.append(str(error))
    try:
        mesh = mesh_of(1, 4, 1, 2)
        seqpar.ParallelAttention("tp_sp", HIDDEN, 6, mesh=mesh, context="context_parallel", gather="activations")
    except TypeError as error:
        messages.append(str(error))
    return messages


def test_layers_that_cannot(pool: Pool) -> None:
    for opaque, with_handshake, tensor_parallel in pool.run(8, other_projections):
        assert opaque == with_handshake and opaque.startswith("v_proj=Adapted: gather='activations'")
        assert "gather='kv'" in opaque
        assert tensor_parallel.startswith("gather: not an option of strategy \"tp_sp with context 'context_parallel'\"")
