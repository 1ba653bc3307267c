"""``clip_grad_norm_``: the norm and the training steps are one device's under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import implicit_replication

import seqpar
from seqpar.megatron.sharded_weights import shard_like

from ..models import HIDDEN, MASK, Transformer, attention_layer, full, random_tokens, randomize
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close, assert_error
from ..strategy_cases import LAYER_STRATEGIES, ONE_PER_CLASS

pytestmark = pytest.mark.slow
MAX_NORM = 0.5  # of gradients whose norm is hundreds: every step clips


def assert_same_weights(parallel: nn.Module, local: nn.Module) -> None:
    state = {name: full(value) for name, value in parallel.state_dict().items()}
    for name, expected in local.state_dict().items():
        assert_close(state[name], expected, what=name)


@on_ranks
def train(group: ProcessGroup, strategy: str) -> None:
    """Three steps of gradient descent, clipped, of a transformer on all ranks and of the same on one device."""
    options = dict(LAYER_STRATEGIES[strategy])
    local = Transformer()
    randomize(local)
    parallel = Transformer(options.pop("strategy"), options=options, group=group)
    parallel.load_state_dict(local.state_dict())
    for _ in range(3):
        ids, labels = random_tokens(45)
        for model in (local, parallel):
            model.zero_grad()
        local(ids, labels).backward()
        expected = nn.utils.clip_grad_norm_(local.parameters(), MAX_NORM)
        parallel(
            seqpar.shard(ids, group=group, layout="contiguous"), seqpar.shard(labels, group=group, layout="contiguous")
        ).backward()
        # A rank's loss covers its own tokens; where the vocabulary is sharded, the tokens of all ranks.
        seqpar.sync_gradients(parallel, group=group, reduce="mean" if strategy == "tp_sp" else "sum")
        norm = seqpar.clip_grad_norm_(parallel, MAX_NORM, group=group)
        assert expected > MAX_NORM
        assert_close(norm, expected)
        with torch.no_grad():
            for model in (local, parallel):
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)
    assert_same_weights(parallel, local)


@pytest.mark.thorough(strategy=["tp_sp"], world=[3])
@pytest.mark.parametrize(
    ("strategy", "world"), [*((strategy, 3) for strategy in (*ONE_PER_CLASS, "activations")), ("tp_sp", 2)]
)
def test_steps_that_clip_equal_one_device(pool: Pool, strategy: str, world: int) -> None:
    pool.run(world, train, strategy)


@on_ranks
def clip_under_fsdp(group: ProcessGroup, heads: tuple[int, int]) -> None:
    """Weights that tensor parallelism shards, and FSDP shards again over dp."""
    mesh = mesh_of(dp=2, ring=2, ulysses=1, tp=2)
    sharding: dict[str, Any] = {"mesh": mesh, "strategy": "tp_sp", "layout": "contiguous"}
    local = attention_layer(heads)
    randomize(local)
    parallel = attention_layer(heads, "tp_sp", mesh=mesh, layout="contiguous")
    parallel.load_state_dict(local.state_dict())
    fully_shard(parallel, mesh=mesh["dp"])
    x = torch.randn(1, 67, HIDDEN, dtype=torch.float64)
    (4 * parallel(seqpar.shard(x, **sharding), mask=MASK).square().sum()).backward()
    seqpar.sync_gradients(parallel, mesh=mesh)
    norm = seqpar.clip_grad_norm_(parallel, MAX_NORM, mesh=mesh)
    local(x, mask=MASK).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(local.parameters(), MAX_NORM)
    assert_close(norm, expected)
    # Clipped gradients have the largest norm that is allowed.
    again = seqpar.clip_grad_norm_(parallel, float("inf"), mesh=mesh)
    assert_error(abs(float(again) - MAX_NORM), 1e-6, dtype=torch.float64)  # PyTorch adds 1e-6 to the norm


@pytest.mark.thorough
@pytest.mark.parametrize("heads", [(8, 8), (6, 2), (3, 1)])
def test_fsdp_over_dp(pool: Pool, heads: tuple[int, int]) -> None:
    pool.run(8, clip_under_fsdp, heads)


@on_ranks
def steps_of_pytorch(group: ProcessGroup, heads: tuple[int, int]) -> None:
    """PyTorch's own functions: on a layer alone, and on a model with plain weights under ``implicit_replication``."""
    pairs: list[tuple[nn.Module, nn.Module, Callable[[], AbstractContextManager[Any]]]] = [
        (attention_layer(heads), attention_layer(heads, "tp_sp", group=group), nullcontext),
        (Transformer(), Transformer("tp_sp", group=group), implicit_replication),
    ]
    for local, parallel, context in pairs:
        parallel.load_state_dict(local.state_dict())
        for options in ({"foreach": True}, {"fused": True}, {}):
            optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, **options) for model in (local, parallel)]
            for p, want in zip(parallel.parameters(), local.parameters(), strict=True):
                want.grad = torch.randn_like(want)
                p.grad = shard_like(want.grad.clone(), p)
            expected = nn.utils.clip_grad_norm_(local.parameters(), MAX_NORM)
            with context():
                norm = nn.utils.clip_grad_norm_(parallel.parameters(), MAX_NORM)
                optimizers[1].step()
            optimizers[0].step()
            assert_close(full(norm), expected)
            assert_same_weights(parallel, local)


@pytest.mark.thorough
@pytest.mark.parametrize("heads", [(8, 8), (6, 1), (3, 1)])
def test_pytorch_clips_and_steps(pool: Pool, heads: tuple[int, int]) -> None:
    pool.run(2, steps_of_pytorch, heads)


def test_half_precision_is_measured_in_float32() -> None:
    module = nn.Linear(1000, 1000, bias=False, dtype=torch.bfloat16)
    module.weight.grad = torch.full_like(module.weight, 2.0**-8)
    norm = seqpar.clip_grad_norm_(module, 1.0)
    assert norm.dtype == torch.float32 and norm == 1000 * 2.0**-8
    assert module.weight.grad.dtype == torch.bfloat16
    assert_close(module.weight.grad.float().norm(), torch.tensor(1.0), torch.bfloat16)


def test_a_module_without_gradients() -> None:
    assert seqpar.clip_grad_norm_(nn.Linear(2, 2), 1.0) == 0
    assert seqpar.clip_grad_norm_(nn.Identity(), 1.0) == 0


@pytest.mark.parametrize(
    ("max_norm", "error", "words"),
    [(0, ValueError, "max_norm=0: expected a positive"), ("1", TypeError, "max_norm='1': expected a number"),
     (float("nan"), ValueError, "max_norm=nan")],
)  # fmt: skip
def test_bad_norms(max_norm: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        seqpar.clip_grad_norm_(nn.Linear(2, 2), max_norm)


def test_parameters_are_no_module() -> None:
    parameters: Any = nn.Linear(2, 2).parameters()
    for call in (seqpar.sync_gradients, lambda module: seqpar.clip_grad_norm_(module, 1.0)):
        with pytest.raises(TypeError, match=r"module: expected an nn.Module, got generator; pass the model"):
            call(parameters)


@on_ranks
def clip_with(group: ProcessGroup, norms: list[Any]) -> str:
    layer = attention_layer((4, 4), "tp_sp", group=group)
    try:
        seqpar.clip_grad_norm_(layer, norms[group.rank()], group=group)
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def test_ranks_that_disagree_all_raise(pool: Pool) -> None:
    assert all("max_norm: the ranks of the group differ" in said for said in pool.run(2, clip_with, [1.0, 2.0]))
    first, second = pool.run(2, clip_with, [1.0, -1.0])
    assert "rank(s) [1]" in first and "max_norm=-1.0" in second
