"""transformers models with their sequence sharded over ranks: one line to patch, the same loss, the same gradients.

``parallelize`` the model, call it with what ``shard_batch`` returns, and sum the partial gradients with
``seqpar.sync_gradients``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError("seqpar.hf requires transformers 5: pip install 'seqpar[hf]'") from error

from .batch import BatchShard, shard_batch
from .loader import ShardCollator, ShardedLoader
from .patch import parallelize, restore
from .verification import VerificationError, VerificationReport, verify

if TYPE_CHECKING:
    from .trainer import SequenceParallelMixin, SequenceParallelTrainer

__all__ = [
    "BatchShard",
    "SequenceParallelMixin",
    "SequenceParallelTrainer",
    "ShardCollator",
    "ShardedLoader",
    "VerificationError",
    "VerificationReport",
    "parallelize",
    "restore",
    "shard_batch",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import the trainer at its first use: it imports accelerate, which takes a second."""
    if name in ("SequenceParallelMixin", "SequenceParallelTrainer"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
