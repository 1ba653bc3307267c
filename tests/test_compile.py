"""torch.compile around layers that communicate: the same numbers, and one graph break for each such layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar

from .models import Transformer, random_tokens, randomize
from .pool import Pool, on_ranks
from .strategies import LAYER_STRATEGIES, ONE_PER_CLASS

# Breaks: attention; with tp_sp the embedding, attention, the MLP, the head and the loss.
GRAPHS = {"tp_sp": 4}
Results = list[Tensor | None]  # the loss and the gradients


@on_ranks
def plain_and_compiled(group: ProcessGroup, strategy: str) -> tuple[int, Results, Results]:
    """The number of graphs, and the results without and with compilation."""
    torch.manual_seed(7)
    torch._dynamo.reset()
    model = Transformer(**LAYER_STRATEGIES[strategy], options={"layout": "zigzag"}, group=group)
    randomize(model)
    ids, labels = (seqpar.shard(x, group=group, layout="zigzag") for x in random_tokens(46))
    graphs = 0

    def counting_backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    results: list[Results] = []
    for run in (model, torch.compile(model, backend=counting_backend)):
        model.zero_grad()
        loss = run(ids, labels)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    plain, compiled = results
    return graphs, plain, compiled


@pytest.mark.parametrize("strategy", ONE_PER_CLASS)
def test_compiled_is_the_same(pool: Pool, strategy: str) -> None:
    for graphs, plain, compiled in pool.run(2, plain_and_compiled, strategy):
        assert graphs == GRAPHS.get(strategy, 2)
        for a, b in zip(plain, compiled, strict=True):
            assert a is not None and b is not None and torch.allclose(a, b, rtol=1e-10, atol=1e-10)
