"""The bytes that each switch of ``Memory`` keeps and uses, against the planner's counts."""

from __future__ import annotations

import gc
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from seqpar import Mask, attention
from seqpar.kernels import BACKENDS
from seqpar.kernels.base import Carry, Grads
from seqpar.kernels.reference import ReferenceBackend
from seqpar.memory import Memory
from seqpar.memory.head_groups import group_heads
from seqpar.memory.switches import Checkpoint
from seqpar.memory.tiles import tile_mlp
from seqpar.planner import memory as counts
from seqpar.planner import mlp
from seqpar.planner.mlp import Mlp
from seqpar.planner.setting import Setting
from seqpar.planner.split import Recompute, Switches

from ..live_bytes import LiveBytes
from ..settings import H100, decoder
from .host_copies import HostCopies
from .modules import MLP, Attention, Model

HIDDEN, HEADS, KV_HEADS, WIDTH, LAYERS, TOKENS, TILE = 128, 8, 4, 384, 5, 1024, 128
SHAPE = decoder("m", LAYERS, HIDDEN, HEADS, KV_HEADS, HIDDEN // HEADS, WIDTH, 64)
SETTING = Setting(H100, Mask.causal(), TOKENS, model=SHAPE)
RECOMPUTE: dict[Checkpoint, Recompute] = {"none": "none", "attention": "keep_attention", "full": "full"}
MODES = [(how, False) for how in get_args(Checkpoint)] + [(how, True) for how in get_args(Checkpoint) if how != "none"]
# Each value of a switch with each value of every other switch.
COMBINATIONS = [
    Memory(tile, (1, 4)[(i + (tile > 0)) % 2], how, offload)
    for i, (how, offload) in enumerate(MODES)
    for tile in (0, TILE)
]


def hidden(**options: Any) -> torch.Tensor:
    return torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, **options)


@pytest.mark.thorough(memory=[x for x in COMBINATIONS if x.tiled_mlp or (x.checkpoint != "none" and not x.offload)])
@pytest.mark.parametrize("memory", COMBINATIONS, ids=str)
def test_bytes_that_are_kept(memory: Memory) -> None:
    """After the forward of a model, on the device and on the host."""
    model = Model(LAYERS, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, width=WIDTH, dtype=torch.bfloat16)
    memory.apply(model)
    x, host = hidden(requires_grad=True), HostCopies()
    gc.collect()
    with host(), LiveBytes() as live:
        y = model(x.clone())
        gc.collect()
        kept = live.now() - y.nbytes - host.nbytes
    recompute = RECOMPUTE[memory.checkpoint]
    switches = Switches(recompute, memory.offload, True, memory.tiled_mlp > 0, memory.head_groups)
    expected = counts.memory(SETTING, switches)
    embedding_and_head = 2 * 2 * HIDDEN * TOKENS
    on_device = expected.activations - embedding_and_head
    if memory.offload:
        on_device /= 2  # the planner counts two layers; after the last layer only its own tensors are on the device
    assert kept == pytest.approx(on_device, rel=0.05)
    assert host.nbytes == pytest.approx(expected.host, rel=0.05)
    del y
    gc.collect()
    assert host.nbytes == 0 and live.now() < 0.05 * kept  # indices of the mask stay in a cache


def test_peak_of_the_backward_of_a_tiled_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "TILE_TOKENS", TILE)
    counted, switches = Mlp(HIDDEN, WIDTH), Switches(tiled_mlp=True)
    pieces = counted.pieces(SETTING, switches)
    expected = counted.kept(SETTING, pieces) + counted.working(SETTING, pieces)
    module = MLP(HIDDEN, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
    tile_mlp(module, TILE)
    x, dy = hidden(requires_grad=True), hidden()
    y = module(x)
    with LiveBytes() as live:
        y.backward(dy)
    assert live.peak + dy.nbytes == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("groups", [2, 4])
def test_bytes_when_the_backward_of_a_group_of_heads_begins(groups: int) -> None:
    """The group's q, k, v, output and log-sum-exp, the gradient of its output, and the layer's output.

    The gradient of the layer's output is in float32, as is the sum of the groups.
    """
    module = Attention(HIDDEN, HEADS, KV_HEADS, torch.bfloat16).requires_grad_(False)
    group_heads(module, groups)
    x, dy = hidden(requires_grad=True), hidden()
    with LiveBytes() as live:
        y = module(x)
        y.backward(dy)
    recomputed = SHAPE.attention.kept(SETTING, groups)
    expected = recomputed + 2 * HIDDEN * TOKENS / groups + (2 + 4) * HIDDEN * TOKENS
    assert live.before["seqpar.attention_backward"] == pytest.approx(expected, rel=0.05)


class _Rounds(ReferenceBackend):
    """A library's kernel: its gradients are in the model's dtype."""

    reads_delta = False

    def forward(self, q: Tensor, *_: Any) -> Carry:
        return torch.zeros_like(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> None:
        grads: Grads = others[-1]
        for x in grads.make(q, k, v, rounded=True):
            x.zero_()


def test_gradients_of_a_single_step_have_no_float32_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward of one rank makes dq, dk and dv, and nothing else."""
    monkeypatch.setitem(BACKENDS, "reference", _Rounds())
    q, k, v = (torch.randn(1, TOKENS, HEADS, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for _ in range(2):
        out = attention(q, k, v, strategy="local", backend="reference")
        dout = torch.randn_like(out)
        with LiveBytes() as live:
            gradients = torch.autograd.grad(out, (q, k, v), dout)
        assert all(x.dtype == torch.bfloat16 for x in gradients)
        assert live.peak == 3 * q.nbytes


@pytest.mark.parametrize(("kv_heads", "is_final"), [(8, True), (4, True), (2, False)])
def test_gradients_that_ranks_add_up_are_not_rounded(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, is_final: bool
) -> None:
    """Ulysses over four ranks: two ranks read the same of two KV heads, and send float32 gradients of it."""
    found: list[bool] = []

    class Noted(_Rounds):
        def backward(self, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> None:
            found.append(others[-1].final)
            super().backward(q, k, v, *others)

    monkeypatch.setitem(BACKENDS, "reference", Noted())
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        q, k = (torch.zeros(1, 16, heads, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (8, kv_heads))
        attention(q, k, k, strategy="ulysses", backend="reference", layout="zigzag").sum().backward()
    finally:
        dist.destroy_process_group()
    assert found == [is_final]
