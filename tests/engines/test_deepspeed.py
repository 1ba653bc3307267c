"""Training steps in DeepSpeed's engine with every stage of ZeRO, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask, Sharding

from ..pool import OwnPool, mesh_of, on_ranks
from .engine import full_weights, initialize, needs_deepspeed

pytestmark = needs_deepspeed

TOKENS, HIDDEN, VOCAB, STEPS, MICRO_BATCHES = 13, 16, 19, 3, 2


class Model(nn.Module):
    """A small language model. Its loss is the mean over all labels that count.

    Args:
        strategy: of its attention layer.
        where: ``mesh`` or ``group``; nothing with "local".
    """

    def __init__(self, strategy: str = "local", **where: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.attention = seqpar.ParallelAttention(
            strategy, HIDDEN, 4, 2, rope=seqpar.RotaryEmbedding(4), sinks=True, **where
        )
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.temperature = nn.Parameter(torch.ones(1))  # DeepSpeed cannot broadcast a scalar

    def forward(self, ids: Tensor, labels: Tensor, sharding: Sharding | None = None) -> Tensor:
        """The loss. ``ids`` and ``labels`` are int64 ``[b, s]``, of all tokens."""
        if sharding is not None:
            ids, labels = sharding.shard(ids), sharding.shard(labels)
        x = self.embed(ids)
        x = x + self.attention(x, mask=Mask.sliding_window(7), sharding=sharding)
        losses = F.cross_entropy(self.head(x + self.mlp(x)).mT * self.temperature, labels, reduction="none")
        if sharding is None:
            mean = losses.sum() / (labels != -100).sum()
        else:
            mean = seqpar.token_loss(losses, labels, sharding=sharding)
        return mean + 0.1 * self.head.weight.square().mean()  # a term that every rank has


def random_rows(count: int) -> tuple[Tensor, Tensor]:
    """Random ids and labels, int64 ``[count, TOKENS]``. Each row has another number of labels that count."""
    ids, labels = torch.randint(VOCAB, (2, count, TOKENS)).unbind()
    for row, ignored in zip(labels, torch.randperm(TOKENS - 1)[:count].tolist(), strict=True):
        row[torch.randperm(TOKENS)[:ignored]] = -100
    return ids, labels


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # With a small eps, AdamW would enlarge the rounding of gradients that are almost 0.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


@on_ranks
def train(group: ProcessGroup, seed: int, zero: int, dp: int, strategy: str, clip: float) -> float:
    """Returns the largest difference of a weight from one process, after three steps of two micro-batches."""
    torch.manual_seed(seed)
    mesh = mesh_of(dp, 2, 2 // dp, 1)
    local, model = Model().double(), Model(strategy, mesh=mesh)  # DeepSpeed has master weights in float32 only
    local.load_state_dict(model.state_dict())
    before = {name: p.detach().clone() for name, p in local.named_parameters()}
    engine, optimizer = initialize(model, optimizer_of(model), zero, MICRO_BATCHES, clip), optimizer_of(local)
    sharding = Sharding(TOKENS, "zigzag", mesh=mesh)
    row = mesh["dp"].get_local_rank()
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            ids, labels = random_rows(dp)
            loss, expected = engine(ids[row : row + 1], labels[row : row + 1], sharding), local(ids, labels)
            torch.testing.assert_close(loss, expected, check_dtype=False, rtol=1e-5, atol=0)
            engine.backward(loss)
            engine.step()
            (expected / MICRO_BATCHES).backward()
        norm = nn.utils.clip_grad_norm_(local.parameters(), clip or torch.inf)
        assert not clip or norm > clip
        optimizer.step()
        optimizer.zero_grad()
    with full_weights(engine) as weights:
        differences = [float((weights[name] - p).detach().abs().max()) for name, p in local.named_parameters()]
        assert all(float((weights[name] - x).detach().abs().max()) > 1e-3 for name, x in before.items())
    engine.destroy()
    return max(differences)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weights_equal_one_process(own: OwnPool, zero: int) -> None:
    for dp, strategy, clip in ((1, "hybrid", 0.0), (2, "ring", 0.1)):
        differences = own.pool.run(4, train, int(torch.randint(1 << 30, ())), zero, dp, strategy, clip)
        assert max(differences) < 1e-5, (dp, strategy, clip, differences)


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
