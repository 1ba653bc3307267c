"""A new algorithm needs its own file only: eager and compiled calls run it under every mask, layout and head count.

Latents, heads that tensor parallelism divides unevenly, and kernels that raise need nothing in it either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

import seqpar
from seqpar.placement.strategies import STRATEGIES
from seqpar.strategies.algorithms import ALGORITHMS

from .. import strategy_cases
from ..cases import Batch
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close, groups_of
from . import pass_q, test_caught_errors, test_latent_attention
from .test_attention import Case, Results, attend_in_chunks, random_case, verify

CASES = 20


@contextmanager
def registered() -> Iterator[None]:
    """In the block, "pass_q" is a strategy of this process, and a row of the tests' strategies."""
    rows = mock.patch.dict(strategy_cases.STRATEGIES, pass_q={"strategy": "pass_q"})
    with mock.patch.dict(ALGORITHMS), mock.patch.dict(STRATEGIES), rows:
        pass_q.register()
        yield


@on_ranks
def attend_with_queries_sent(group: ProcessGroup, case: Case) -> Results:
    with registered():
        return attend_in_chunks(group, case)


@pytest.mark.parametrize("world", [2, 3])
def test_every_mask_layout_and_head_count(batch: Batch, world: int) -> None:
    cases = [random_case(seed, strategy="pass_q") for seed in range(world * CASES, (world + 1) * CASES)]
    cases = [case for case in cases if groups_of(case.problem.rules) == 1]
    batch.check(world, attend_with_queries_sent, cases, verify)


@on_ranks
def attend_by_heads(group: ProcessGroup) -> None:
    x, sharding = torch.randn(1, 4, 2, 8), seqpar.Sharding(4 * group.size(), "zigzag", group=group)
    options: dict[str, Any] = {"sharding": sharding, "strategy": "pass_q"}
    with registered(), pytest.raises(ValueError, match="by_heads has 2 groups of heads, and this algorithm"):
        seqpar.attention(x, x, x, mask=seqpar.Mask.by_heads([seqpar.Mask.causal(), seqpar.Mask.full()]), **options)


def test_an_algorithm_that_knows_no_groups_of_heads_refuses_them(pool: Pool) -> None:
    pool.run(2, attend_by_heads)


@on_ranks
def compiled(group: ProcessGroup, seed: int) -> None:
    torch.manual_seed(seed)
    sharding = seqpar.Sharding(13, "zigzag", group=group)
    shards = [sharding.shard(torch.randn(1, 13, 4, 8)) for _ in range(3)]

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return seqpar.attention(q, k, v, strategy="pass_q", sharding=sharding)

    with registered():
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


@on_ranks
def attend_after_error(group: ProcessGroup, case: test_caught_errors.Case) -> tuple[bool, list[torch.Tensor]]:
    with registered():
        return test_caught_errors.attend_after_error(group, case)


@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shared memory"])
def test_a_kernel_that_raises(batch: Batch, shared_memory: bool) -> None:
    at = (0, 1, 0, 1), (None, None, 2, None)
    cases = [test_caught_errors.Case("pass_q", phase, x) for phase in ("forward", "backward") for x in at]
    batch.check(4, attend_after_error, cases, test_caught_errors.verify, shared_memory=shared_memory)


@on_ranks
def attend_to_latents(
    group: ProcessGroup, case: test_latent_attention.Case
) -> tuple[test_latent_attention.Results, tuple[int, int]]:
    with registered():
        return test_latent_attention.attend(group, case)


def test_latents(batch: Batch) -> None:
    cases = [
        test_latent_attention.Case("pass_q", layout, heads=heads, sinks=sinks, block_heads=sinks, seed=heads)
        for layout, heads, sinks in (("zigzag", 4, False), ("contiguous", 5, True))
    ]
    batch.check(3, attend_to_latents, cases, test_latent_attention.compare)


@on_ranks
def with_uneven_heads(group: ProcessGroup, seed: int) -> list[list[torch.Tensor]]:
    """The results of a tensor-parallel layer of 10 query heads and 5 KV heads in a ring, and with queries sent."""
    mesh, found = mesh_of(2, 2, 1, 2), list[list[torch.Tensor]]()
    with registered():
        for context in ("ring", "pass_q"):
            torch.manual_seed(seed)
            options = {"hidden_size": 20, "num_heads": 10, "num_kv_heads": 5, "head_dim": 4, "dtype": torch.float64}
            layer = seqpar.ParallelAttention("tp_sp", context=context, mesh=mesh, **options)
            sharding = seqpar.Sharding(22, "zigzag", mesh=mesh, strategy="tp_sp")
            x = sharding.shard(torch.randn(1, 22, 20, dtype=torch.float64)).requires_grad_()
            y = layer(x, sharding=sharding)
            y.sin().sum().backward()
            grads = [p.grad for p in layer.parameters()]
            local = (g.to_local() if isinstance(g, DTensor) else g for g in (x.grad, *grads) if g is not None)
            found.append([y.detach(), *local])
    return found


def test_uneven_heads(pool: Pool) -> None:
    for in_a_ring, with_queries_sent in pool.run(8, with_uneven_heads, int(torch.randint(1 << 30, ()))):
        for expected, actual in zip(in_a_ring, with_queries_sent, strict=True):
            assert_close(actual, expected)
