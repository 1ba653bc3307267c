"""A new algorithm needs its own file only: eager and compiled calls run it under every mask, layout and head count."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

import seqpar
from seqpar.placement.strategies import STRATEGIES
from seqpar.strategies.algorithms import ALGORITHMS

from ..cases import Batch
from ..pool import Pool, on_ranks
from ..reference import assert_close
from . import pass_q
from .test_attention import Case, Results, attend_in_chunks, random_case, verify

CASES = 20


@on_ranks
def attend_with_queries_sent(group: ProcessGroup, case: Case) -> Results:
    with mock.patch.dict(ALGORITHMS), mock.patch.dict(STRATEGIES):
        pass_q.register()
        return attend_in_chunks(group, case)


@pytest.mark.parametrize("world", [2, 3])
def test_every_mask_layout_and_head_count(batch: Batch, world: int) -> None:
    cases = [random_case(seed, strategy="pass_q") for seed in range(world * CASES, (world + 1) * CASES)]
    batch.check(world, attend_with_queries_sent, cases, verify)


@on_ranks
def compiled(group: ProcessGroup, seed: int) -> None:
    torch.manual_seed(seed)
    sharding = seqpar.Sharding(13, "zigzag", group=group)
    shards = [sharding.shard(torch.randn(1, 13, 4, 8)) for _ in range(3)]

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return seqpar.attention(q, k, v, strategy="pass_q", sharding=sharding)

    with mock.patch.dict(ALGORITHMS), mock.patch.dict(STRATEGIES):
        pass_q.register()
        results = []
        for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
            leaves = [x.clone().requires_grad_() for x in shards]
            out = function(*leaves)
            out.square().sum().backward()
            results.append([out.detach(), *(x.grad for x in leaves)])
    for eager, traced in zip(*results, strict=True):
        assert_close(traced, eager)


def test_compiled(pool: Pool) -> None:
    pool.run(2, compiled, int(torch.randint(1 << 30, ())))
