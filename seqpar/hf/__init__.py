"""transformers models with their sequence sharded over ranks: patched in one line, same loss, same gradients.

``parallelize`` a model, feed it what ``shard_batch`` gives, and sum gradients with ``seqpar.sync_gradients``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError("seqpar.hf needs transformers 5: pip install 'seqpar[hf]'") from error

from .batch import BatchShard, shard_batch
from .loader import ShardCollator, ShardedLoader
from .patch import parallelize, restore

if TYPE_CHECKING:
    from .trainer import SequenceParallelMixin, SequenceParallelTrainer

__all__ = [
    "BatchShard",
    "SequenceParallelMixin",
    "SequenceParallelTrainer",
    "ShardCollator",
    "ShardedLoader",
    "parallelize",
    "restore",
    "shard_batch",
]


def __getattr__(name: str) -> Any:
    """The Trainer brings accelerate and much else; it is imported when asked for."""
    if name in ("SequenceParallelMixin", "SequenceParallelTrainer"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
