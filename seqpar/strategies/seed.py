"""The dropout seed of an attention call, which must be the same in forward and backward, also in compiled code."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def draw_seed() -> Tensor:
    """A dropout seed from torch's CPU generator, int64 ``[]``.

    If the backward of compiled code recomputes the graph, as under ``torch.utils.checkpoint``, it would draw another
    seed, and the gradients would belong to another dropout mask. There, the seed is marked as a value to be saved.
    """
    if not torch.compiler.is_compiling():
        return _draw_seed()
    kept = partial(create_selective_checkpoint_contexts, _keep_all)
    seed: Tensor = checkpoint(_draw_seed, use_reentrant=False, context_fn=kept)
    return seed


def _draw_seed() -> Tensor:
    return torch.randint(2**62, (), device="cpu")


def _keep_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def check_seed_is_kept() -> None:
    """Raise if torch.compile saves only a function's arguments for backward, and ignores that the seed is marked."""
    in_region = fx_traceback.current_meta.get("custom", {}).get("_region_activation_memory_budget")
    if 0 in (in_region, functorch_config.activation_memory_budget):
        raise ValueError(
            "dropout: with an activation memory budget of 0, torch.compile draws random numbers again in backward, and "
            "the gradients would be wrong; use a larger budget, or pass dropout_seed to seqpar.attention"
        )
