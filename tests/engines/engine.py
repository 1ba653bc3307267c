"""DeepSpeed's engine on the CPU: how the tests start it, and how they read the weights that it partitions."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def start_deepspeed() -> Any:
    """The package, over the default group of this worker process."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
    logging.disable(logging.WARNING)
    deepspeed = import_module("deepspeed")
    if not deepspeed.comm.is_initialized():
        # DeepSpeed would now compile its all-reduce over shared memory for a minute.
        backend: Any = import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, zero: int, accumulate: int = 1, clip: float = 0.0
) -> Any:
    """An engine around ``model``, with torch's optimizer.

    Args:
        model: the model.
        optimizer: an optimizer of its parameters.
        zero: ZeRO's stage.
        accumulate: the number of micro-batches in a step.
        clip: the largest norm of all gradients; with 0 they are not clipped. Without it DeepSpeed clips at 1.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    return start_deepspeed().initialize(model=model, optimizer=optimizer, config=config)[0]


@contextmanager
def full_weights(engine: Any) -> Iterator[dict[str, Tensor]]:
    """The weights of the engine's model by name, which ZeRO-3 all-gathers for the block."""
    parameters = dict(engine.module.named_parameters())
    with import_module("deepspeed").zero.GatheredParameters([*parameters.values()]):
        yield parameters
