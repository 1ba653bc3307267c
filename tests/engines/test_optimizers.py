"""Optimizers that read more of a gradient than its element, or that step inside backward, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import seqpar
from seqpar import Sharding

from ..models import full
from ..pool import Pool, on_ranks
from ..reference import assert_close, nudge
from .model import TOKENS, Model, random_rows

STEPS, RANK, NEW_SPACE = 3, 2, 2


class GaLore(Optimizer):
    """AdamW whose moments are in the space of a gradient's largest singular vectors (Zhao et al., 2024).

    The space is computed from the gradient of every ``NEW_SPACE``-th step. It needs the whole gradient of a matrix.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self._step_of(p, group["lr"])

    def _step_of(self, p: Tensor, lr: float) -> None:
        assert p.grad is not None
        grad, state = full(p.grad), self.state[p]
        count = state["count"] = state.get("count", 0) + 1
        if grad.dim() == 2:
            if count % NEW_SPACE == 1:
                space = torch.linalg.svd(grad, full_matrices=False)[0][:, :RANK]
                # The signs of singular vectors are arbitrary, and rounding may change them.
                state["space"] = space * space.gather(0, space.abs().argmax(0, keepdim=True)).sign()
            grad = state["space"].T @ grad
        mean, square = (state.setdefault(name, torch.zeros_like(grad)) for name in ("mean", "square"))
        mean.lerp_(grad, 0.1)
        square.lerp_(grad.square(), 0.01)
        update = (mean / (1 - 0.9**count)) / ((square / (1 - 0.99**count)).sqrt() + 1e-6)
        update = state["space"] @ update if "space" in state else update
        if isinstance(p, DTensor):
            update = DTensor.from_local(update, p.device_mesh, run_check=False).redistribute(placements=p.placements)
        p.sub_(lr * update)


def muon(model: nn.Module, group: ProcessGroup | None) -> list[Optimizer]:
    """Muon for matrices, as it is used, and AdamW for everything else."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for p in model.parameters() if all(p is not x for x in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def zero_redundancy(model: nn.Module, group: ProcessGroup | None) -> list[Optimizer]:
    if group is None:
        return [torch.optim.AdamW(model.parameters(), lr=0.01)]
    return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)]


def of_8_bits(package: str) -> Callable[[nn.Module, ProcessGroup | None], list[Optimizer]]:
    return lambda model, group: [import_module(f"{package}.optim").AdamW8bit(model.parameters(), lr=0.01)]


# By name: the optimizers of a model. On one process the group is None.
OPTIMIZERS: dict[str, Callable[[nn.Module, ProcessGroup | None], list[Optimizer]]] = {
    "AdamW, fused": lambda model, group: [torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)],
    "Muon": muon,
    "Adafactor": lambda model, group: [torch.optim.Adafactor(model.parameters(), lr=0.01)],
    "ZeroRedundancyOptimizer": zero_redundancy,
    "GaLore": lambda model, group: [GaLore(model.parameters())],
    "torchao": of_8_bits("torchao"),
    "bitsandbytes": of_8_bits("bitsandbytes"),
}


def models_of(seed: int, group: ProcessGroup) -> tuple[Model, Model, Model, Sharding]:
    """The model on one process, the same with the last unit of its weights changed, and on ``group``, in float64."""
    torch.manual_seed(seed)
    local, sharding = Model().double(), Sharding(TOKENS, "zigzag", group=group)
    nudged = copy.deepcopy(local)
    nudge(nudged.parameters())
    model = Model("ring", group=group, layout="zigzag").double()
    model.load_state_dict(local.state_dict())
    return local, nudged, model, sharding


def check(local: Model, nudged: Model, model: Model) -> None:
    theirs, rounded = (dict(x.named_parameters()) for x in (local, nudged))
    for name, p in model.named_parameters():
        assert_close(p, theirs[name], what=name, rounded=rounded[name])


@on_ranks
def train(group: ProcessGroup, seed: int, name: str) -> None:
    local, nudged, model, sharding = models_of(seed, group)
    optimizers = [OPTIMIZERS[name](x, None) for x in (local, nudged)] + [OPTIMIZERS[name](model, group)]
    before = [p.detach().clone() for p in local.parameters()]
    for _ in range(STEPS):
        ids, labels = random_rows(2)
        local(ids, labels).backward()
        nudged(ids, labels).backward()
        model(ids, labels, sharding).backward()
        seqpar.sync_gradients(model, group=group)
        for optimizer in chain(*optimizers):
            optimizer.step()
            optimizer.zero_grad()
    assert not any(torch.equal(p, x) for p, x in zip(local.parameters(), before, strict=True))
    check(local, nudged, model)


def fresh_seed() -> int:
    return int(torch.randint(1 << 30, ()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_after_the_average(pool: Pool, name: str) -> None:
    if name in ("torchao", "bitsandbytes") and find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    pool.run(2, train, fresh_seed(), name)  # torchao compiles its step


@on_ranks
def train_in_backward(group: ProcessGroup, seed: int, how: str) -> None:
    """GaLore layer by layer: each parameter has an optimizer of its own, which steps and then frees the gradient."""
    local, nudged, model, sharding = models_of(seed, group)
    averaging = ExitStack()
    if how == "fully_shard":
        for module in (model.attention, model.mlp, model):
            fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    else:
        averaging = seqpar.average_in_backward(model, group=group)
    optimizers = {p: GaLore([p]) for m in (local, nudged, model) for p in m.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    with averaging:
        for _ in range(STEPS):
            ids, labels = random_rows(2)
            local(ids, labels).backward()
            nudged(ids, labels).backward()
            model(ids, labels, sharding).backward()
            assert all(p.grad is None for p in model.parameters())
    check(local, nudged, model)


@pytest.mark.parametrize("how", ["average_in_backward", "fully_shard"])
def test_an_optimizer_inside_backward(pool: Pool, how: str) -> None:
    pool.run(2 if how == "fully_shard" else 3, train_in_backward, fresh_seed(), how)
