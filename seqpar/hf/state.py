"""The state of a parallelized model (``Patch``), and the state of its current forward (``Forward``).

A hook on one module writes the state, and the attention function or the loss function of another module reads it.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from ..kernels import BackendName
from ..keys import KeyIntervals
from ..layout import Layout
from ..mask import LayerMask, Mask
from ..mesh import rank_in, size_of
from ..strategies import StrategyName, StrategyOptions
from .batch import BatchShard

NAME = "seqpar"  # of the attention function, in a model's config
Gradients = Literal["auto", "partial", "mean"]
Outputs = Literal["auto", "whole", "local"]
Batches = Literal["shared", "own"]


@dataclass(eq=False)
class Patch:
    """How a model is parallelized, and what ``restore`` needs to undo it. The patched modules hold it as ``_seqpar``.

    Attributes:
        mesh, given_group: as given to ``parallelize``.
        group: the process group that the sequence is sharded over; None is one process.
        ulysses_ranks: the number of ranks in each all-to-all.
        sharded: False while the model runs on this rank alone.
        layer_masks: the ``LayerMask`` of the layers that a trial run has reached.
        calls: how many times the model has been called with a full batch; the same on every rank.
        seed: the seed of the dropout of attention weights in those calls, drawn by the first rank of the sequence.
        handles: the registered hooks.
        modules: the modules that hold this patch.
        configs: (module, attribute name, original config) of every config that was replaced.
        depends_on_length: whether a rotary embedding's frequencies depend on the largest position.
        config_copies: (original, copy, the copy's values at first) of every replaced config.
        loss_functions: (model, its own loss function or None) of every model whose loss function was replaced.
    """

    mesh: DeviceMesh | None
    given_group: ProcessGroup | None
    strategy: StrategyName
    layout: Layout
    backend: BackendName
    options: StrategyOptions
    group: ProcessGroup | None
    gradients: Gradients
    loss_chunk: int | None
    outputs: Outputs
    batches: Batches
    ulysses_ranks: int = 1
    sharded: bool = True
    layer_masks: set[LayerMask] = field(default_factory=set)
    calls: int = 0
    seed: int = 0
    depends_on_length: bool = False
    handles: list[RemovableHandle] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    configs: list[tuple[nn.Module, str, PreTrainedConfig]] = field(default_factory=list)
    config_copies: list[tuple[PreTrainedConfig, PreTrainedConfig, dict[str, Any]]] = field(default_factory=list)
    loss_functions: list[tuple[nn.Module, Any]] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return size_of(self.group)

    @property
    def rank(self) -> int:
        return rank_in(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        return self  # a copy of the model uses the same process groups, which cannot be copied

    def __getstate__(self) -> Any:
        raise TypeError(
            "model: a parallelized model cannot be pickled, because process groups cannot; save its state_dict "
            "(save_pretrained does), or call seqpar.hf.restore(model) first"
        )


def patch_of(model: nn.Module) -> Patch:
    """The patch of a parallelized model, or of one inside it (peft, DDP).

    Raises:
        ValueError: none of its modules is parallelized.
    """
    for module in model.modules():
        patch = getattr(module, "_seqpar", None)
        if isinstance(patch, Patch):
            return patch
    raise ValueError(
        f"model={type(model).__name__}: it is not parallelized; call seqpar.hf.parallelize(model, ...) first"
    )


@dataclass(frozen=True, eq=False)
class DecodeShard:
    """What the attention layers read while new tokens are decoded. Passed to them as ``seqpar``.

    Attributes:
        cache: a transformers Cache whose layers are ``ShardedCacheLayer``.
        start: global position of the first new token.
        mask: the padding at the start of the prompt. Causality and windows belong to the layers.
        intervals: the key intervals that layers of this forward have computed, by everything they depend on. Layers
            with the same mask share them.
    """

    cache: Any
    start: int
    mask: Mask
    intervals: dict[Hashable, KeyIntervals | None] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class GenerationStep:
    """One forward of ``model.generate``: the prefill, or a decoding step.

    Attributes:
        sharded: whether the tokens of this forward are sharded, as in a prefill. Otherwise every rank computes all of
            them.
        logits_to_keep: as given by the caller: the number of last tokens whose logits are returned, or 0 for all.
        last_rank: the rank that holds the last token.
        cut: int64 ``[seq_local]``, the positions of this rank's tokens if the text model shards its input; otherwise
            None.
    """

    sharded: bool
    logits_to_keep: int = 0
    last_rank: int = 0
    cut: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Whole:
    """A forward that was called with a full batch.

    Attributes:
        rows: the number of rows of the batch.
        tokens: for each rank, the positions of its tokens in the full sequence, int64.
        logits: for each rank, the indices of its logits among those that the caller asked for, int64.
        fused: whether TRL's fused head computes the outputs.
        drop_last: whether the fused head was called with unshifted labels, so that the last token has no output.
        num_items: the divisor of the fused head's loss.
        last: int64 ``[rows]``, for a model that classifies sequences: the token whose scores are those of the row.
        labels: the labels of the rows, for such a model.
    """

    rows: int
    tokens: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]
    fused: bool = False
    drop_last: bool = False
    num_items: Any = None
    last: Tensor | None = None
    labels: Tensor | None = None


@dataclass
class Forward:
    """The current forward of a parallelized model.

    Attributes:
        shard: what the attention layers read; None until a hook has set it.
        wants_loss: whether the caller passed labels.
        generation: set while the model generates; otherwise None.
        whole: set if the caller passed the full batch.
        cut: the positions of this rank's tokens ``[seq_local]``, until the text model shards its input. None if the
            batch is sharded already.
        keep: the tokens of this rank that get logits; None for all.
        hidden: the input of the output embedding ``[batch, seq, hidden]``, kept until the loss needs it.
        scores: for a model that classifies sequences, the scores of each token, ``[batch, seq_local, num_labels]``.
        labels, num_items: arguments that were removed because the model's forward would compute its own loss.
        targets: this rank's labels, shifted, if the caller asked for their log-probabilities instead of a loss.
    """

    model: nn.Module
    patch: Patch
    shard: BatchShard | DecodeShard | None
    wants_loss: bool = False
    generation: GenerationStep | None = None
    whole: Whole | None = None
    cut: Tensor | None = None
    keep: Tensor | None = None
    hidden: Tensor | None = None
    scores: Tensor | None = None
    labels: Tensor | None = None
    num_items: Any = None
    targets: Tensor | None = None

    @property
    def batch_shard(self) -> BatchShard | None:
        """The shard of a forward on a sharded sequence; None while tokens are decoded."""
        return self.shard if isinstance(self.shard, BatchShard) else None


# A stack, because the forward of a parallelized model may call another parallelized model.
_forwards: ContextVar[tuple[Forward, ...]] = ContextVar("seqpar_forwards", default=())


# Whether the innermost forward was started with ``cut``. A plain value, which torch.compile can read where it cannot
# read the forwards.
cuts_below = [False]


def current_forward() -> Forward | None:
    """The innermost current forward, or None."""
    forwards = _forwards.get()
    return forwards[-1] if forwards else None


def push_forward(forward: Forward) -> None:
    _forwards.set((*_forwards.get(), forward))
    cuts_below[0] = forward.cut is not None


def pop_forward() -> None:
    _forwards.set(_forwards.get()[:-1])
    forward = current_forward()
    cuts_below[0] = forward is not None and forward.cut is not None
