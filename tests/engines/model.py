"""The language model that the tests of engines and optimizers train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqpar
from seqpar import Mask, Sharding

TOKENS, HIDDEN, VOCAB = 13, 64, 19  # optimizers with states of 8 bits leave out parameters of less than 4096 elements


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
            strategy, HIDDEN, 4, 2, rope=seqpar.RotaryEmbedding(16), sinks=True, **where
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
