"""Each rank of a sequence brings a batch of its own: outputs, losses and gradients are those of one device."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")

import transformers

import seqpar
import seqpar.hf

from .hf_workers import PARALLELIZE, gradients, make_batch, tiny, worst
from .pool import Pool, WorkerError, mesh_of, on_ranks

pytestmark = pytest.mark.slow
LOSS, GRADIENT, OUTPUT = 2e-5, 1e-3, 1e-4


def batch_of(rank: int, how: str) -> dict[str, Tensor]:
    """Batches of different lengths and, where they are not packed, numbers of rows."""
    return make_batch(how, 45 + 7 * rank, 1 + rank % 3, seed=rank)


@cache
def one_device(world: int, kind: str, how: str) -> tuple[list[float], dict[str, Tensor]]:
    """Each batch's loss, and the gradients of the losses' weighted sum, without sequence parallelism."""
    model = tiny(kind)
    losses = [model(**batch_of(rank, how), use_cache=False).loss for rank in range(world)]
    torch.stack([(1 + rank) * loss for rank, loss in enumerate(losses)]).sum().backward()
    return [loss.item() for loss in losses], gradients(model)


@on_ranks
def trained(
    group: ProcessGroup, kind: str, strategy: str, how: str, checkpointing: bool | None = None
) -> tuple[float, float]:
    """Errors of loss and gradients. ``checkpointing``: of the layers, with this ``use_reentrant``."""
    rank = group.rank()
    losses, grads = one_device(group.size(), kind, how)
    model = seqpar.hf.parallelize(tiny(kind), group=group, batches="own", **PARALLELIZE[strategy])
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    loss = model(**batch_of(rank, how)).loss
    ((1 + rank) * loss).backward()
    seqpar.sync_gradients(model, group=group)
    return abs(loss.item() - losses[rank]), worst(gradients(model), grads)


@pytest.mark.parametrize(
    ("kind", "strategy", "how", "world", "checkpointing"),
    [
        ("llama", "ring-zigzag", "left", 2, None),
        ("mistral", "ulysses-contiguous", "right", 4, None),
        ("qwen3_moe", "hybrid-zigzag", "right", 4, None),
        ("llama", "all_gather-striped", "packed", 2, None),
        ("llama", "ring-zigzag", "plain", 2, False),
        ("llama", "ring-zigzag", "plain", 2, True),
        ("llama", "ring-zigzag", "plain", 1, None),
    ],
)
def test_loss_and_gradients(
    pool: Pool, kind: str, strategy: str, how: str, world: int, checkpointing: bool | None
) -> None:
    for loss, gradient in pool.run(world, trained, kind, strategy, how, checkpointing):
        assert loss < LOSS and gradient < GRADIENT
