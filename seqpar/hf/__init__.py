"""transformers models with their sequence sharded over ranks: one line to patch, the same loss, the same gradients.

Give a ``ParallelismConfig`` to the Trainer, to TRL or to accelerate. In a loop of your own, ``parallelize`` the model,
call it with the batch, and average the gradients with ``seqpar.sync_gradients``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError("seqpar.hf requires transformers 5.23 and Python 3.11: pip install 'seqpar[hf]'") from error
if tuple(map(int, _transformers.__version__.split(".")[:2])) < (5, 23):
    raise ImportError(
        f"seqpar.hf requires transformers 5.23 or later, but {_transformers.__version__} is installed: "
        "pip install --upgrade 'seqpar[hf]', on Python 3.11 or later"
    )

from ..verification import VerificationError, VerificationReport
from .batch import BatchShard, shard_batch
from .data import PlanCollator, ShardCollator, ShardedLoader
from .losses.logits import token_log_probs
from .mechanisms.mixers import register_mixer
from .patch import parallelize, restore
from .prompts import SharedPrompts, share_prompts
from .verification.run import verify

if TYPE_CHECKING:
    from .accelerate import ParallelismConfig, SequenceParallelMixin, SequenceParallelTrainer

__all__ = [
    "BatchShard",
    "ParallelismConfig",
    "PlanCollator",
    "SequenceParallelMixin",
    "SequenceParallelTrainer",
    "ShardCollator",
    "ShardedLoader",
    "SharedPrompts",
    "VerificationError",
    "VerificationReport",
    "parallelize",
    "register_mixer",
    "restore",
    "shard_batch",
    "share_prompts",
    "token_log_probs",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import what imports accelerate at its first use: that takes a second."""
    if name in ("ParallelismConfig", "SequenceParallelMixin", "SequenceParallelTrainer"):
        from . import accelerate

        return getattr(accelerate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
