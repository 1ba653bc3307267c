"""A tiled MLP computes what the whole one does, and its weights are gathered and reduced as often."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from seqpar.memory import Memory, restore
from seqpar.memory.tiles import tile_mlp

from ..pool import Pool, on_ranks
from ..reference import assert_close
from .modules import MLP, Experts, Model, gradients

SWITCHES = [Memory(tiled_mlp=5), Memory(tiled_mlp=5, head_groups=2, checkpoint="attention", offload=True)]
MODULES: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "lora": partial(MLP, lora=True), "experts": Experts}


def assert_same(
    module: nn.Module,
    tiled: nn.Module,
    x: Tensor,
    call: Callable[..., Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    expected, actual = gradients(module, x), gradients(tiled, x, call)
    for a, b in zip(expected, actual, strict=True):
        assert_close(b, a, dtype)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("shape", [(3, 11, 16), (33, 16), (1, 4, 16)], ids=str)
def test_outputs_and_gradients(module: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    whole, x = MODULES[module](), torch.randn(shape, dtype=torch.float64)
    tiled = copy.deepcopy(whole)
    tile_mlp(tiled, 7)
    assert_same(whole, tiled, x)
    assert_same(whole, copy.deepcopy(tiled), x)
    assert_same(whole, tiled, x, partial(checkpoint, tiled, use_reentrant=False))
    assert_same(whole, tiled, x, partial(checkpoint, tiled, use_reentrant=True))
    calls: list[int] = []
    tiled.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        assert_close(tiled(x), whole(x))
    assert len(calls) == 1 and tiled.state_dict().keys() == whole.state_dict().keys()
    restore(tiled)
    assert "forward" not in vars(tiled)


@pytest.mark.slow
def test_compiled() -> None:
    torch.manual_seed(0)
    whole, x = MLP(), torch.randn(3, 11, 16, dtype=torch.float64)
    tiled = copy.deepcopy(whole)
    tile_mlp(tiled, 7)
    compiled = torch.compile(tiled, backend="aot_eager", fullgraph=True)
    assert_same(whole, tiled, x, lambda x: compiled(x))


def test_gradients_of_weights_are_summed_in_float32() -> None:
    """Of 32 tiles in bfloat16: as exact as without tiles. Sums in bfloat16 have about four times the error."""
    torch.manual_seed(0)
    whole = MLP(64, 192, dtype=torch.bfloat16)
    del whole.lora
    exact, tiled = copy.deepcopy(whole).double(), copy.deepcopy(whole)
    tile_mlp(tiled, 128)
    x = torch.randn(1, 4096, 64).bfloat16()

    def error(module: nn.Module) -> float:
        of_weights = torch.cat([g.double().flatten() for g in gradients(module, x)[2:]])
        expected = torch.cat([g.flatten() for g in gradients(exact, x.double())[2:]])
        return float((of_weights - expected).norm() / expected.norm())

    assert error(tiled) < 1.2 * error(whole)


def test_further_tensors_are_refused() -> None:
    class Scaled(MLP):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            return super().forward(x) * (1 if scale is None else scale)

    module = Scaled()
    tile_mlp(module, 2)
    with pytest.raises(ValueError, match="tiled_mlp: Scaled takes several tensors"):
        module(torch.zeros(3, 16, dtype=torch.float64), torch.ones(3, 1))


@on_ranks
def distributed_data_parallel(group: ProcessGroup, memory: Memory) -> list[int]:
    """Compares with DDP of the untiled model. Returns how often the gradient of each weight was ready."""
    torch.manual_seed(0)
    whole = Model(hidden=16, heads=4, kv_heads=2, width=24)
    tiled = copy.deepcopy(whole)
    memory.apply(tiled)
    torch.manual_seed(group.rank())
    x, ready, sent = torch.randn(2, 12, 16, dtype=torch.float64), dict.fromkeys(tiled.parameters(), 0), [0, 0]

    def count(p: Any) -> None:
        ready[p] += 1

    for p in ready:
        p.register_post_accumulate_grad_hook(count)
    wrapped = [DistributedDataParallel(m, process_group=group) for m in (whole, tiled)]

    def hook(number: int, bucket: Any) -> Any:
        sent[number] += bucket.buffer().nbytes
        work = torch.distributed.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    hook.__annotations__.clear()  # DDP compares them with classes, and they are strings
    for number, ddp in enumerate(wrapped):
        ddp.register_comm_hook(number, hook)
    for _ in range(2):
        assert_same(wrapped[0], wrapped[1], x, dtype=torch.float32)  # attention computes in float32
    assert sent[0] == sent[1] == 2 * sum(p.nbytes for p in tiled.parameters())
    return [*ready.values()]


@pytest.mark.parametrize("memory", SWITCHES, ids=str)
def test_under_ddp_each_weight_is_reduced_once(pool: Pool, memory: Memory) -> None:
    for ready in pool.run(2, distributed_data_parallel, memory):
        assert set(ready) == {2}


class Collectives(TorchDispatchMode):
    """Counts the collectives by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += func.namespace in ("c10d", "_c10d_functional")
        return func(*args, **(kwargs or {}))


@on_ranks
def fully_sharded(group: ProcessGroup, memory: Memory) -> None:
    torch.manual_seed(0)
    whole = Model(hidden=16, heads=4, kv_heads=2, width=24)
    tiled = copy.deepcopy(whole)
    memory.apply(tiled)
    mesh = torch.distributed.DeviceMesh.from_group(group, "cpu")
    counts = []
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    results = []
    for model in (whole, tiled):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with Collectives() as collectives:
            found = gradients(model, x)
        results.append([g.full_tensor() if isinstance(g, DTensor) else g for g in found])
        counts.append(collectives.counts)
    used = [+count for count in counts]
    assert used[0] == used[1] and used[0]
    for a, b in zip(*results, strict=True):
        assert_close(b, a, torch.float32)  # attention computes in float32


@pytest.mark.parametrize("memory", SWITCHES, ids=str)
def test_under_fsdp_weights_are_gathered_once_a_layer(pool: Pool, memory: Memory) -> None:
    pool.run(2, fully_sharded, memory)


@on_ranks
def sharded_inside(group: ProcessGroup) -> None:
    module = MLP()
    tile_mlp(module, 5)
    fully_shard(module.down, mesh=torch.distributed.DeviceMesh.from_group(group, "cpu"))
    with pytest.raises(ValueError, match="tiled_mlp: fully_shard was called for FSDPLinear inside of MLP"):
        module(torch.zeros(12, 16, dtype=torch.float64))


def test_weights_that_would_be_gathered_for_every_tile_are_refused(pool: Pool) -> None:
    pool.run(2, sharded_inside)
