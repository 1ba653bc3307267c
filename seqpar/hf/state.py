"""The state of a parallelized model (``Patch``), and the state of its current forward (``Forward``).

The hooks write this state. The attention function and the loss function, which other modules call, read it.
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

NAME = "seqpar"  # the name of the attention function in a model's config
Gradients = Literal["auto", "partial", "mean"]
Outputs = Literal["auto", "full", "local"]
Batches = Literal["shared", "per_rank"]


@dataclass(eq=False)
class Patch:
    """How a model is parallelized, and what ``restore`` needs to undo that.

    The parallelized model and its attention layers refer to it by their attribute ``_seqpar``.

    Attributes:
        mesh, strategy, layout, backend, options, gradients, loss_chunk, outputs, batches: as given to ``parallelize``.
        given_group: the argument ``group`` of ``parallelize``.
        group: the process group that the sequence is sharded over; None in a process without torch.distributed.
        ulysses_ranks: the number of ranks in each all-to-all of the strategy.
        sharded: False while the model runs on this rank alone.
        layer_masks: the causality, window and chunk size of the attention layers, as found by the trial run.
        disputed: the layer masks whose causality is not that of the mask that the model asks for (see ``asked_masks``).
        known_masks: the structures of the mask functions that the model asked for in the trial run.
        implementation: the attention implementation of the model before ``parallelize``.
        calls: how many times the model has been called with a full batch. It is the same on every rank.
        seed: the seed from which attention dropout in these calls is derived. It is the same on every rank.
        depends_on_length: whether the frequencies of a rotary embedding depend on the largest position.
        needs_wrapper: whether a Trainer or accelerate must wrap the model before it is trained, and no forward has yet
            found the wrapper.
        handles: the registered hooks.
        modules: the modules that refer to this object.
        configs: (module, attribute name, original config) for each config that was replaced.
        config_copies: (original config, copy, initial values of the copy) for each config that was replaced.
        loss_functions: the models whose loss function was replaced.
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
    disputed: dict[LayerMask, bool] = field(default_factory=dict)
    known_masks: set[Any] = field(default_factory=set)
    implementation: str = ""
    calls: int = 0
    seed: int = 0
    depends_on_length: bool = False
    needs_wrapper: bool = False
    handles: list[RemovableHandle] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    configs: list[tuple[nn.Module, str, PreTrainedConfig]] = field(default_factory=list)
    config_copies: list[tuple[PreTrainedConfig, PreTrainedConfig, dict[str, Any]]] = field(default_factory=list)
    loss_functions: list[nn.Module] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """The number of ranks that the sequence is sharded over."""
        return size_of(self.group)

    @property
    def rank(self) -> int:
        """This rank, among the ranks of the sequence."""
        return rank_in(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        return self  # process groups cannot be copied; a copy of the model uses the same groups

    def __getstate__(self) -> Any:
        raise TypeError(
            "model: a parallelized model cannot be pickled, because process groups cannot; save its state_dict "
            "(save_pretrained does), or call seqpar.hf.restore(model) first"
        )


def patch_of(model: nn.Module) -> Patch:
    """The ``Patch`` of ``model``, or of the parallelized model inside it (peft, DDP).

    Raises:
        ValueError: neither ``model`` nor a module inside it is parallelized.
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
    """What the attention layers need to know in a decoding step. It is passed to them as ``seqpar``.

    Attributes:
        cache: a transformers Cache whose layers are ``ShardedCacheLayer``.
        start: the global position of the first new token.
        mask: the padding at the start of the prompt. Each layer adds its causality and window itself.
        intervals: a cache of key intervals. The keys are all values that the intervals depend on, so that layers with
            the same mask compute the intervals once.
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
class FullCall:
    """Describes a forward that was called with a full batch.

    Attributes:
        rows: the number of rows of the batch.
        tokens: for each rank, the global positions of its tokens, int64.
        logits: for each rank, the indices of its logits among the logits that the caller asked for, int64.
        fused: whether TRL's fused head computes the outputs.
        drop_last: whether the fused head was called with unshifted labels, so that the last token has no output.
        num_items: the divisor of the fused head's loss.
        last: for a model that classifies sequences: int64 ``[rows]``, the token of each row whose scores count.
        labels: for a model that classifies sequences: the labels of the rows.
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
        model: the parallelized model.
        patch: its ``Patch``.
        shard: what the attention layers need to know; None until a hook has set it.
        wants_loss: whether the caller passed labels.
        generation: set in a forward of ``model.generate``; otherwise None.
        full_call: set if the caller passed a full batch; otherwise None.
        cut: int64 ``[seq_local]``, the positions of this rank's tokens, until the text model shards its input. None if
            the batch is sharded already.
        keep: int64, the indices of this rank's tokens whose logits are computed; None for all.
        hidden: ``[batch, seq, hidden]``, the input of the output embedding, until the lazy logits are created.
        scores: for a model that classifies sequences: the scores of each token, ``[batch, seq_local, num_labels]``.
        labels: the labels that a hook has removed, because the model's forward would compute a cross-entropy itself.
        local_labels, labels_version: the labels that the model's forward was given, and their version (see
            ``version_of``).
        reduced: for each term of the loss that was reduced over the ranks, its node in the autograd graph and its
            value.
        noise: the embedding that adds NEFTune's noise, and the value of its ``neftune_noise_alpha``.
        targets: this rank's shifted labels, if the caller asked for their log-probabilities instead of a loss.
    """

    model: nn.Module
    patch: Patch
    shard: BatchShard | DecodeShard | None
    wants_loss: bool = False
    generation: GenerationStep | None = None
    full_call: FullCall | None = None
    cut: Tensor | None = None
    keep: Tensor | None = None
    hidden: Tensor | None = None
    scores: Tensor | None = None
    labels: Tensor | None = None
    local_labels: Tensor | None = None
    labels_version: int = 0
    reduced: list[tuple[Any, Tensor]] = field(default_factory=list)
    noise: tuple[nn.Module, float] | None = None
    targets: Tensor | None = None

    @property
    def batch_shard(self) -> BatchShard | None:
        """``shard`` in a forward on a sharded sequence; None in a decoding step."""
        return self.shard if isinstance(self.shard, BatchShard) else None


# A stack, because the forward of a parallelized model may call another parallelized model.
_forwards: ContextVar[tuple[Forward, ...]] = ContextVar("seqpar_forwards", default=())


# Whether ``cut`` of the innermost forward is set. It is stored in a list, because torch.compile can trace a read of a
# list, but not of ``_forwards``.
shards_text_model = [False]


def current_forward() -> Forward | None:
    """The innermost current forward, or None."""
    forwards = _forwards.get()
    return forwards[-1] if forwards else None


def push_forward(forward: Forward) -> None:
    """Make ``forward`` the innermost current forward."""
    _forwards.set((*_forwards.get(), forward))
    shards_text_model[0] = forward.cut is not None


def pop_forward() -> None:
    """Remove the innermost current forward."""
    _forwards.set(_forwards.get()[:-1])
    forward = current_forward()
    shards_text_model[0] = forward is not None and forward.cut is not None
