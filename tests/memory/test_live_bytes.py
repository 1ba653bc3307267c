"""The bytes that each switch of ``Memory`` keeps and uses, against the planner's counts."""

from __future__ import annotations

import gc
from typing import Any, get_args

import pytest
import torch

from seqpar import Mask
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
