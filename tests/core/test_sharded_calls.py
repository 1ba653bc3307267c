"""Attention, layers and losses that are given a sharding: their results, and what raises without communication."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask, Sharding

from ..cases import Batch
from ..observe import counted_handshakes, message_of
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close, dense_attention
from ..strategy_cases import LAYER_STRATEGIES, LAYOUTS, STRATEGIES, layout_of

HIDDEN, SEQ_LEN = 24, 29


def whole_tensors(heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout ``[2, SEQ_LEN, heads or kv_heads, 8]``, float64."""
    made = torch.Generator().manual_seed(5)
    shapes = [(2, SEQ_LEN, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes)
    return q, k, v, dout


@on_ranks
def attend(group: ProcessGroup, layout: str, options: dict[str, Any]) -> tuple[list[Tensor], int]:
    """out, dq, dk, dv over the full sequence, and the number of handshakes, with a sharding alone."""
    tensors = whole_tensors()
    with counted_handshakes() as handshakes:
        sharding = Sharding(SEQ_LEN, layout_of(layout, SEQ_LEN, group.size()), group=group)
        q, k, v = leaves = [sharding.shard(x).requires_grad_() for x in tensors[:3]]
        out = seqpar.attention(q, k, v, sharding=sharding, **options)
        out.backward(sharding.shard(tensors[3]))
        results = [sharding.unshard(x) for x in (out.detach(), *(x.grad for x in leaves if x.grad is not None))]
    return results, handshakes[0]


@pytest.mark.thorough(strategy=["all_gather in chunks", "p2p", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attention_with_a_sharding(batch: Batch, strategy: str, world: int) -> None:
    """A shard made with zigzag cannot be attended to as contiguous: the layout is written once."""
    q, k, v, dout = whole_tensors()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(q, k, v, torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril())
    expected = [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def verify(layout: str, by_rank: list[tuple[list[Tensor], int]]) -> None:
        for results, handshakes in by_rank:
            assert handshakes == 0
            for name, actual, right in zip(("out", "dq", "dk", "dv"), results, expected, strict=True):
                assert_close(actual, right, torch.float64, name)

    batch.check(world, attend, LAYOUTS, verify, STRATEGIES[strategy])


def make_layer(strategy: str, **options: Any) -> seqpar.AttentionLayer:
    torch.manual_seed(11)
    rope = seqpar.RotaryEmbedding(
        4, scaling={"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}
    )
    return seqpar.ParallelAttention(strategy, HIDDEN, 6, 2, 4, rope=rope, dtype=torch.float64, **options)


def layer_input() -> tuple[Tensor, Tensor]:
    """x and dy, ``[2, SEQ_LEN, HIDDEN]``."""
    x, dy = torch.randn(2, 2, SEQ_LEN, HIDDEN, generator=torch.Generator().manual_seed(6), dtype=torch.float64).unbind()
    return x, dy


def run_layer(layer: seqpar.AttentionLayer, sharding: Sharding) -> tuple[list[Tensor], int]:
    """y and dx over the full sequence, and the handshakes of forward and backward."""
    x, dy = (sharding.shard(part) for part in layer_input())
    x.requires_grad_()
    with counted_handshakes() as handshakes:
        y = layer(x, mask=Mask.causal() & Mask.documents([0, 11, SEQ_LEN]), sharding=sharding)
        y.backward(dy)
    assert x.grad is not None
    return [sharding.unshard(y.detach()), sharding.unshard(x.grad)], handshakes[0]


@on_ranks
def layer_on_group(group: ProcessGroup, layout: str, options: dict[str, Any]) -> tuple[list[Tensor], int]:
    """A layer that is told neither ranks nor layout, except that tp_sp shards its weights over the group."""
    where = {"group": group} if options["strategy"] == "tp_sp" else {}
    given = layout_of(layout, SEQ_LEN, group.size())
    sharding = Sharding(SEQ_LEN, given, group=group, strategy=options["strategy"])
    return run_layer(make_layer(**options, **where), sharding)


def check_layer(by_rank: list[tuple[list[Tensor], int]]) -> None:
    expected, _ = run_layer(make_layer("local"), Sharding(SEQ_LEN))
    for results, handshakes in by_rank:
        assert handshakes == 0
        for name, actual, right in zip(("y", "dx"), results, expected, strict=True):
            assert_close(actual, right, torch.float64, name)


@pytest.mark.slow
@pytest.mark.thorough(strategy=["all_gather in chunks", "p2p", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("strategy", LAYER_STRATEGIES)
def test_layers_with_a_sharding(batch: Batch, strategy: str, world: int) -> None:
    batch.check(
        world, layer_on_group, LAYOUTS, lambda layout, by_rank: check_layer(by_rank), LAYER_STRATEGIES[strategy]
    )


@on_ranks
def layer_on_mesh(group: ProcessGroup, layout: str, options: dict[str, Any], own: bool) -> tuple[list[Tensor], int]:
    mesh = mesh_of(1, 2, 2, 2)
    ranks = Sharding(0, mesh=mesh, strategy=options["strategy"]).ranks
    given = layout_of(layout, SEQ_LEN, ranks)
    sharding = Sharding(SEQ_LEN, given, mesh=mesh, strategy=options["strategy"])
    where = {"mesh": mesh} if own or options["strategy"] == "tp_sp" else {}
    return run_layer(make_layer(**options, **where), sharding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "own"),
    [("ring", False), ("ring", True), ("hybrid", False), ("all_gather", True), ("activations", False), ("tp_sp", True)],
)
def test_layers_with_a_sharding_on_a_mesh(batch: Batch, strategy: str, own: bool) -> None:
    layouts = LAYOUTS[own : own + 1]
    batch.check(
        8, layer_on_mesh, layouts, lambda layout, by_rank: check_layer(by_rank), LAYER_STRATEGIES[strategy], own
    )


@on_ranks
def mlp_on_mesh(group: ProcessGroup, layout: str) -> Tensor:
    """An MLP whose ranks take their lengths from the sharding; and the errors of shardings that do not fit."""
    mesh = mesh_of(1, 2, 2, 2)
    torch.manual_seed(12)
    mlp = seqpar.MegatronMLP(HIDDEN, 30, mesh=mesh, dtype=torch.float64)
    sharding = Sharding(SEQ_LEN, layout_of(layout, SEQ_LEN, 8), mesh=mesh, strategy="tp_sp")
    x = sharding.shard(layer_input()[0])
    with counted_handshakes() as handshakes:
        y = mlp(x, sharding=sharding)
        y.sum().backward()
        other = Sharding(SEQ_LEN, group=[dist.new_group([r]) for r in range(8)][group.rank()])
        with pytest.raises(ValueError, match=r"strategy='tp_sp'"):
            mlp(other.shard(layer_input()[0]), sharding=other)
        with pytest.raises(ValueError, match="this rank holds"):
            mlp(layer_input()[0], sharding=sharding)
    assert handshakes == [0]
    return sharding.unshard(y.detach())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_mlp_with_a_sharding(pool: Pool, layout: str) -> None:
    torch.manual_seed(12)
    expected = seqpar.MegatronMLP(HIDDEN, 30, dtype=torch.float64)(layer_input()[0])
    for y in pool.run(8, mlp_on_mesh, layout):
        assert_close(y, expected.detach(), torch.float64)


@on_ranks
def handshakes_without_a_sharding(group: ProcessGroup, strategy: str) -> tuple[int, int, int]:
    """Of a layer without a length, of one with dropout, and of a call with dropout and a seed."""
    sharding = Sharding(SEQ_LEN, "zigzag", group=group)
    x = sharding.shard(layer_input()[0])
    counts = []
    for options, arguments in (({}, {}), ({"dropout_p": 0.1}, {"sharding": sharding})):
        layer = make_layer(**LAYER_STRATEGIES[strategy], group=group, layout="zigzag", **options)
        with counted_handshakes() as handshakes:
            layer(x, **arguments)
        counts.append(handshakes[0])
    q = x.unflatten(-1, (6, 4))
    row = STRATEGIES.get(strategy, {"strategy": "ring"})
    with counted_handshakes() as handshakes:
        seqpar.attention(q, q, q, sharding=sharding, dropout_p=0.1, dropout_seed=3, **row)
    return counts[0], counts[1], handshakes[0]


@pytest.mark.parametrize("strategy", LAYER_STRATEGIES)
def test_handshakes_are_counted(pool: Pool, strategy: str) -> None:
    """The test of ``counted_handshakes``: calls without a sharding, and dropout whose seed rank 0 draws."""
    assert pool.run(2, handshakes_without_a_sharding, strategy) == [(1, 1, 0)] * 2


@on_ranks
def dropout_of_a_layer(group: ProcessGroup) -> Tensor:
    torch.manual_seed(0 if group.rank() == 0 else 99)
    sharding = Sharding(SEQ_LEN, "striped", group=group)
    layer = make_layer("ring", dropout_p=0.4)
    torch.manual_seed(0 if group.rank() == 0 else 99)  # rank 0 draws the seed for all
    return sharding.unshard(layer(sharding.shard(layer_input()[0]), sharding=sharding).detach())


def test_dropout_with_a_sharding(pool: Pool) -> None:
    layer = make_layer("local", dropout_p=0.4)
    torch.manual_seed(0)
    expected = layer(layer_input()[0])
    for y in pool.run(4, dropout_of_a_layer):
        assert_close(y, expected.detach(), torch.float64)


@on_ranks
def mismatches(group: ProcessGroup) -> dict[str, str]:
    """What this rank's calls raise, and whether they communicate."""
    mesh = mesh_of(1, 2, 2, 2)
    zigzag = Sharding(SEQ_LEN, "zigzag", group=group)
    on_mesh = Sharding(SEQ_LEN, "zigzag", mesh=mesh)
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    x = zigzag.shard(layer_input()[0])
    x_mesh = on_mesh.shard(layer_input()[0])
    q = x.unflatten(-1, (6, 4))
    q_mesh = x_mesh.unflatten(-1, (6, 4))
    losses, labels = x[..., 0].float(), torch.zeros(x.shape[:2], dtype=torch.int64)
    ring = make_layer("ring")
    tp_sp = make_layer("tp_sp", mesh=mesh)
    calls: dict[str, Callable[[], Any]] = {
        "attention, layout": lambda: seqpar.attention(q, q, q, sharding=zigzag, layout="contiguous"),
        "attention, seq_len": lambda: seqpar.attention(q, q, q, sharding=zigzag, seq_len=28),
        "attention, group": lambda: seqpar.attention(q, q, q, sharding=zigzag, group=alone),
        "attention, mesh": lambda: seqpar.attention(q, q, q, sharding=zigzag, mesh=mesh),
        "attention, type": lambda: seqpar.attention(q, q, q, sharding="zigzag"),
        "attention, local": lambda: seqpar.attention(q, q, q, sharding=zigzag, strategy="local"),
        "attention, tp_sp": lambda: seqpar.attention(
            q_mesh, q_mesh, q_mesh, sharding=Sharding(SEQ_LEN, mesh=mesh, strategy="tp_sp")
        ),
        "attention, length": lambda: seqpar.attention(q[:, 1:], q[:, 1:], q[:, 1:], sharding=zigzag),
        "wrapper, layout": lambda: seqpar.hybrid_attention(q, q, q, sharding=zigzag, layout="striped"),
        "layer, layout": lambda: make_layer("ring", layout="contiguous")(x, sharding=zigzag),
        "layer, group": lambda: make_layer("ring", group=alone)(x, sharding=zigzag),
        "layer, mesh": lambda: make_layer("ring", mesh=mesh)(x, sharding=zigzag),
        "layer, seq_len": lambda: ring(x, sharding=zigzag, seq_len=28),
        "layer, type": lambda: ring(x, sharding=group),
        "layer, length": lambda: ring(x[:, 1:], sharding=zigzag),
        "tp_sp, without strategy": lambda: tp_sp(x_mesh, sharding=on_mesh),
        "token_loss, length": lambda: seqpar.token_loss(losses[:, 1:], labels[:, 1:], sharding=zigzag),
        "token_loss, group": lambda: seqpar.token_loss(losses, labels, sharding=zigzag, group=alone),
    }
    messages = {}
    for name, call in calls.items():
        with counted_handshakes() as handshakes, seqpar.trace() as sent:
            message = message_of(call)
        messages[name] = message if handshakes == [0] and sent.bytes_sent == 0 else f"communicates, then {message}"
    return messages


# Name -> words of the message.
MISMATCHES = {
    "attention, layout": "ValueError: layout='contiguous': the sharding has layout='zigzag'; leave layout out",
    "attention, seq_len": "ValueError: seq_len=28: the sharding has seq_len=29; leave seq_len out",
    "attention, group": "the sharding's are [0, 1, 2, 3, 4, 5, 6, 7]; leave group out",
    "attention, mesh": "leave mesh out",
    "attention, type": "TypeError: sharding='zigzag': expected a seqpar.Sharding",
    "attention, local": "ValueError: strategy='local' with a sequence group of 8 ranks",
    "attention, tp_sp": "with strategy='tp_sp' for tp_sp, for nothing else",
    "attention, length": "but layout='zigzag' gives it",
    "wrapper, layout": "ValueError: layout='striped': the sharding has layout='zigzag'; leave layout out",
    "layer, layout": "its layout is 'zigzag', but the layer was made with layout='contiguous'",
    "layer, group": "sharded over the ranks [0, 1, 2, 3, 4, 5, 6, 7], but this call is for the ranks [",
    "layer, mesh": "sharded over the ranks [0, 1, 2, 3, 4, 5, 6, 7], but this call is for the ranks [",
    "layer, seq_len": "ValueError: seq_len=28: the sharding has seq_len=29; leave seq_len out",
    "layer, type": "TypeError: sharding=",
    "layer, length": "but layout='zigzag' gives it",
    "tp_sp, without strategy": "with strategy='tp_sp'",
    "token_loss, length": "but layout='zigzag' gives it",
    "token_loss, group": "leave group out",
}


def test_disagreement_raises_without_communication(pool: Pool) -> None:
    for messages in pool.run(8, mismatches):
        assert messages.keys() == MISMATCHES.keys()
        wrong = {
            name: text for name, text in messages.items() if MISMATCHES[name] not in text or "communicates" in text
        }
        assert not wrong


@on_ranks
def redundant_arguments(group: ProcessGroup) -> None:
    """Arguments that are given beside a sharding and agree with it."""
    sharding = Sharding(SEQ_LEN, "zigzag", group=group)
    x = sharding.shard(layer_input()[0], 1)
    q = x.unflatten(-1, (6, 4))
    again: dict[str, Any] = {"group": group, "layout": "zigzag", "seq_len": SEQ_LEN}
    assert torch.equal(
        seqpar.attention(q, q, q, sharding=sharding), seqpar.attention(q, q, q, sharding=sharding, **again)
    )
    layer = make_layer("ring", group=group, layout="zigzag")
    assert torch.equal(layer(x, sharding=sharding), layer(x, sharding=sharding, seq_len=SEQ_LEN))


def test_arguments_that_agree_may_be_given(pool: Pool) -> None:
    pool.run(2, redundant_arguments)


@on_ranks
def one_rank_raises(group: ProcessGroup) -> str:
    """Only rank 1 calls, with a shard of another length: it must not wait for the others."""
    if group.rank() != 1:
        return ""
    sharding = Sharding(SEQ_LEN, group=group)
    x = torch.zeros(1, 2, HIDDEN, dtype=torch.float64)
    return message_of(lambda: make_layer("ring")(x, sharding=sharding))


def test_a_shard_of_another_length_raises_alone(pool: Pool) -> None:
    assert "this rank holds 2 tokens" in pool.run(4, one_rank_raises)[1]


@pytest.mark.parametrize("assigned", [False, True])
def test_a_new_length_compiles_nothing_again(assigned: bool) -> None:
    """Nor do other ranges for each rank."""
    layer = make_layer("ring")
    torch._dynamo.reset()

    def block(x: Tensor, sharding: Sharding) -> Tensor:
        y: Tensor = layer(x * 2, sharding=sharding) + 1
        return y

    compiled = torch.compile(block, backend="eager", dynamic=True)  # the layer's rotary embedding is "dynamic"
    for length in (8, 8, 16, 24):
        x = torch.randn(1, length, HIDDEN, dtype=torch.float64)
        sharding = Sharding(length, seqpar.Assigned([[range(length)]]) if assigned else "zigzag")
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(compiled(x, sharding), block(x, sharding))


# The loss.


@on_ranks
def loss_with_a_sharding(group: ProcessGroup, layout: str) -> tuple[Tensor, Tensor, int]:
    made = torch.Generator().manual_seed(8)
    logits = torch.randn(2, SEQ_LEN, 7, generator=made, dtype=torch.float64)
    labels = torch.randint(7, (2, SEQ_LEN), generator=made)
    labels[:, :13] = -100
    sharding = Sharding(SEQ_LEN, layout_of(layout, SEQ_LEN, group.size()), group=group)
    logits_local, labels_local = sharding.shard(logits).requires_grad_(), sharding.shard(labels)
    losses = F.cross_entropy(logits_local.mT, labels_local, reduction="none")
    with counted_handshakes() as handshakes:
        loss = seqpar.token_loss(losses, labels_local, sharding=sharding)
        loss.backward()
    full = logits.clone().requires_grad_()
    expected = F.cross_entropy(full.mT, labels)
    expected.backward()
    assert logits_local.grad is not None and full.grad is not None
    assert_close(logits_local.grad / group.size(), sharding.shard(full.grad))
    return loss.detach(), expected.detach(), handshakes[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_token_loss_with_a_sharding(pool: Pool, world: int, layout: str) -> None:
    for loss, expected, handshakes in pool.run(world, loss_with_a_sharding, layout):
        assert handshakes == 0
        assert_close(loss, expected)


# The mask, the length in tokens, and words of the message.
UNFIT: list[tuple[Mask, str]] = [
    (Mask.documents([0, 3, 8]), "the last boundary is 8, but the sequence has 29 tokens; .* global positions, or pad"),
    (Mask.causal() & Mask.documents([0, 31], padding=True), "is 31, but the sequence has 29 tokens; .*positions$"),
    (Mask.documents([0, 30]), "is 30, but the sequence has 29 tokens"),
    (Mask.documents([[0, 29], [0, 9]]), "of batch row 1 is 9, but the sequence has 29 tokens"),
    (Mask.documents([[0, 40], [0, 9]], padding=True), "of batch row 0 is 40"),
]


@on_ranks
def unfit_masks(group: ProcessGroup, strategy: str) -> list[tuple[str, int]]:
    """What each call raises, and the bytes it sends before."""
    options = LAYER_STRATEGIES[strategy]
    sharding = Sharding(SEQ_LEN, "zigzag", group=group)
    x = sharding.shard(layer_input()[0])
    q = x.unflatten(-1, (6, 4))
    layer = make_layer(**options, group=group, layout="zigzag")
    where: dict[str, Any] = {"group": group, "layout": "zigzag"}
    found = []
    for mask, _ in UNFIT:
        calls: list[Callable[[], Any]] = [
            lambda: layer(x, mask=mask),  # noqa: B023
            lambda: layer(x, mask=mask, sharding=sharding),  # noqa: B023
        ]
        if strategy in STRATEGIES:
            calls += [
                lambda: seqpar.attention(q, q, q, mask=mask, **where, **options),  # noqa: B023
                lambda: seqpar.attention(q, q, q, mask=mask, sharding=sharding, **options),  # noqa: B023
                lambda: seqpar.attention(q, q, q, mask=mask, seq_len=SEQ_LEN, **where, **options),  # noqa: B023
            ]
        for call in calls:
            with seqpar.trace() as sent:
                message = message_of(call)
            found.append((message, sent.bytes_sent))
        layer(x, sharding=sharding)  # a good call works after it
    return found


@pytest.mark.parametrize("strategy", LAYER_STRATEGIES)
def test_a_mask_of_another_length_raises_on_all_ranks(pool: Pool, strategy: str) -> None:
    for found in pool.run(2, unfit_masks, strategy):
        each = len(found) // len(UNFIT)
        for i, (message, sent) in enumerate(found):
            assert message.startswith("ValueError") and sent == 0
            assert re.search(UNFIT[i // each][1], message), message
