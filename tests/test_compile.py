"""torch.compile around what communicates: the same numbers, one graph break for each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar

from .pool import Pool

HIDDEN, VOCAB = 24, 11


class Block(nn.Module):
    def __init__(self, strategy: str, group: ProcessGroup) -> None:
        super().__init__()
        rope = seqpar.RotaryEmbedding(6)
        self.norm = nn.RMSNorm(HIDDEN)
        self.attention = seqpar.ParallelAttention(strategy, HIDDEN, 4, 2, group=group, layout="zigzag", rope=rope)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.silu(self.attention(self.norm(x) * 2))
        return y


class Model(nn.Module):
    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.embed = seqpar.VocabParallelEmbedding(VOCAB, HIDDEN, group=group)
        self.mlp = seqpar.MegatronMLP(HIDDEN, 30, group=group)
        self.head = seqpar.VocabParallelHead(HIDDEN, VOCAB, group=group)

    def forward(self, ids: Tensor) -> Tensor:
        ids = seqpar.shard(ids, group=self.group)
        logits = self.head(self.mlp(F.silu(self.embed(ids))))
        return seqpar.vocab_parallel_cross_entropy(logits, ids, VOCAB, group=self.group).mean()


def _run(group: ProcessGroup, what: str) -> tuple[int, list[Any]]:
    torch.manual_seed(7)
    torch._dynamo.reset()
    whole = torch.randn(2, 20, HIDDEN)
    module: nn.Module = Model(group) if what == "vocabulary" else Block(what, group)
    x = seqpar.shard(whole, group=group, layout="zigzag")
    graphs = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    results = []
    for run in (module, torch.compile(module, backend=backend)):
        module.zero_grad()
        x = x.detach().requires_grad_()
        y = run(torch.arange(34).reshape(2, 17) % VOCAB if what == "vocabulary" else x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    return graphs, results


@pytest.mark.parametrize("what", ["ring", "ulysses", "context_parallel", "hybrid", "tp_sp", "vocabulary"])
def test_compiled_is_the_same(pool: Pool, what: str) -> None:
    for graphs, (plain, compiled) in pool.run(2, _run, what):
        assert what == "vocabulary" or graphs == 2  # before the attention and after it
        for a, b in zip(plain, compiled, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, atol=1e-6)
