"""Training steps in DeepSpeed's engine with every stage of ZeRO, against one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

import seqpar
from examples import own_loop
from seqpar import Sharding

from ..pool import OwnPool, mesh_of, on_ranks
from ..reference import assert_close, assert_error
from .engine import full_weights, initialize, needs_deepspeed, start_deepspeed
from .model import HIDDEN, TOKENS, Model, random_rows

pytestmark = needs_deepspeed

STEPS, MICRO_BATCHES = 3, 2


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # With a small eps, AdamW would enlarge the rounding of gradients that are almost 0.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


@on_ranks
def train(group: ProcessGroup, seed: int, zero: int, dp: int, strategy: str, clip: float) -> None:
    """Compare the weights with one process in float64, in three steps of two micro-batches.

    The rounding is the difference of one process in float32.
    """
    torch.manual_seed(seed)
    mesh = mesh_of(dp, 2, 2 // dp, 1)
    model = Model(strategy, mesh=mesh)  # DeepSpeed has master weights in float32 only
    exact, rounded = Model().double(), Model()
    for local in (exact, rounded):
        local.load_state_dict(model.state_dict())
    before = {name: p.detach().clone() for name, p in exact.named_parameters()}
    engine = initialize(model, optimizer_of(model), zero, MICRO_BATCHES, clip)
    optimizers = {local: optimizer_of(local) for local in (exact, rounded)}
    sharding = Sharding(TOKENS, "zigzag", mesh=mesh)
    row = mesh["dp"].get_local_rank()
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            ids, labels = random_rows(dp)
            loss, expected = engine(ids[row : row + 1], labels[row : row + 1], sharding), exact(ids, labels)
            assert_close(loss, expected, torch.float32)
            engine.backward(loss)
            engine.step()
            for local in optimizers:
                (local(ids, labels) / MICRO_BATCHES).backward()
        for local, optimizer in optimizers.items():
            norm = nn.utils.clip_grad_norm_(local.parameters(), clip or torch.inf)
            assert not clip or norm > clip
            optimizer.step()
            optimizer.zero_grad()
        with full_weights(engine) as weights, torch.no_grad():
            error, rounding = (
                max(float((found[name] - p).abs().max()) for name, p in exact.named_parameters())
                for found in (weights, dict(rounded.named_parameters()))
            )
            assert_error(error, rounding, "weights")
    engine.destroy()
    # Each weight is trained: a weight that the engine left as it was would be found.
    moved = [float((p - before[name]).abs().max()) for name, p in exact.named_parameters()]
    assert min(moved) > 100 * max(error, rounding), (moved, error, rounding)


@pytest.mark.thorough
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weights_equal_one_process(own: OwnPool, zero: int) -> None:
    for dp, strategy, clip in ((1, "hybrid", 0.0), (2, "ring", 0.1)):
        own.pool.run(4, train, int(torch.randint(1 << 30, ())), zero, dp, strategy, clip)


@on_ranks
def losses_of_the_page(group: ProcessGroup, source: str) -> list[float]:
    start_deepspeed()
    losses: list[float] = []
    names: dict[str, Any] = {"print": lambda step, loss: losses.append(loss)}
    exec(source, names)
    names["engine"].destroy()
    return losses


def test_the_loop_of_the_page(own: OwnPool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    (source,) = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    model, expected = own_loop.GPT(256), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        ids, labels = own_loop.rows(step, 256, 2)
        loss = F.cross_entropy(model(ids, torch.arange(256)).mT, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in own.pool.run(4, losses_of_the_page, source):
        assert_close(losses, expected)


@on_ranks
def refused(group: ProcessGroup) -> str:
    model = seqpar.MegatronMLP(HIDDEN, 8, group=group)
    try:
        initialize(model, optimizer_of(model), zero=1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_tensor_parallel_layers_are_refused(own: OwnPool) -> None:
    words = "DeepSpeed: its engines take no DTensors; use torch.distributed.fsdp.fully_shard"
    assert all(words in message for message in own.pool.run(4, refused))
