"""The state of a parallelized model (``Patch``), and the state of its current forward (``Forward``).

The hooks write this state. The attention function and the loss function, which other modules call, read it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from transformers import PreTrainedConfig

from ..base.checks import check_bool, check_choice, check_int, check_number, check_slopes, no_compile
from ..base.compile_types import hide_fields
from ..decoding import Shared
from ..kernels import BackendName, check_backend
from ..layers.loss import Gradients
from ..masks.mask import LayerMask, Mask
from ..masks.rules import Documents
from ..memory import Memory
from ..patching.running import Running
from ..placement.layout import Assigned, Layout, TokenLayout
from ..placement.strategies import STRATEGIES, StrategyName, StrategyOptions, check_options
from ..ranks.mesh import rank_in, size_of
from ..sharding.sharding import Sharding
from ..sharding.spec import Deterministic, check_deterministic
from .batch import BatchCut, BatchLayout, BatchShard, PlacedShard

NAME = "seqpar"  # the name of the attention function in a model's config
OWNER = "seqpar.hf"  # of the methods that are replaced
Outputs = Literal["auto", "full", "local"]
Batches = Literal["shared", "per_rank"]


@dataclass(frozen=True)
class Settings:
    """The arguments of ``parallelize`` except for the ranks. They are checked when this value is made."""

    strategy: StrategyName = "ring"
    layout: BatchLayout = "zigzag"
    backend: BackendName = "auto"
    gradients: Gradients = "mean"
    loss_chunk: int | None = None
    outputs: Outputs = "auto"
    batches: Batches = "shared"
    memory: Memory | None = None
    softmax_scale: float | None = None
    alibi_slopes: tuple[float, ...] | None = None  # made from the tensor or the numbers that the caller gave
    deterministic: Deterministic = False
    share_prompts: bool = False
    split_towers: bool = False
    options: StrategyOptions = field(default_factory=StrategyOptions)

    def __post_init__(self) -> None:
        check_choice("strategy", self.strategy, STRATEGIES)
        check_options(self.strategy, self.options, STRATEGIES[self.strategy].options, Settings)
        BatchCut(1, self.layout)  # raises for another layout
        check_backend(self.backend)
        for name, choices in (("gradients", Gradients), ("outputs", Outputs), ("batches", Batches)):
            check_choice(name, getattr(self, name), get_args(choices))
        if self.batches == "per_rank" and self.outputs == "local":
            raise ValueError(
                "outputs='local': with batches='per_rank' each rank gets all outputs of its batch; leave outputs out"
            )
        if self.softmax_scale is not None:
            check_number("softmax_scale", self.softmax_scale)
        object.__setattr__(self, "alibi_slopes", check_slopes(self.alibi_slopes))
        check_deterministic(self.deterministic)
        check_bool("share_prompts", self.share_prompts)
        check_bool("split_towers", self.split_towers)
        if self.split_towers and self.batches == "per_rank":
            raise ValueError("split_towers=True: with batches='per_rank' a batch has no images; leave split_towers out")
        if self.share_prompts and self.outputs == "local":
            raise ValueError(
                "outputs='local': with share_prompts=True a call returns the outputs of all rows of its batch, on every"
                " rank; leave outputs out"
            )
        if self.batches == "per_rank" and (self.softmax_scale, self.alibi_slopes) != (None, None):
            raise ValueError(
                "softmax_scale, alibi_slopes: with batches='per_rank' each rank generates with the model's own "
                "attention, which has neither; leave them out"
            )
        if self.loss_chunk is not None:
            check_int("loss_chunk", self.loss_chunk, 1)
        if self.memory is not None and not isinstance(self.memory, Memory):
            raise TypeError(
                f"memory={self.memory!r}: expected a seqpar.Memory, such as seqpar.Memory(checkpoint='attention')"
            )

    @classmethod
    def of(cls, **arguments: Any) -> Settings:
        """The settings with the keyword arguments of ``parallelize``."""
        options = {name: arguments.pop(name) for name in [*arguments] if name not in cls.__dataclass_fields__}
        return cls(**arguments, options=cast(StrategyOptions, options))


@dataclass(eq=False)
class Patch:
    """How a model is parallelized. The model and its attention layers refer to it by their attribute ``_seqpar``."""

    settings: Settings
    mesh: DeviceMesh | None  # as given to ``parallelize``, like ``group``
    group: ProcessGroup | None
    sequence_group: ProcessGroup | None  # None in a process without torch.distributed
    loss_ranks: ProcessGroup | None = None  # the ranks whose labels the loss counts: with dp, of all replicas
    ulysses: int = 1  # ranks in each all-to-all of the strategy
    sharded: bool = True  # False while the model runs on this rank alone
    # what the trial run found
    layer_masks: Counter[LayerMask] = field(default_factory=Counter)  # with the number of layers
    causality_conflicts: dict[LayerMask, bool] = field(default_factory=dict)  # as ``compare_masks`` returns it
    known_masks: set[Any] = field(default_factory=set)  # the structures of the mask functions
    # the longest rows that each of the models can take, and its layer that could not take longer ones
    longest: list[tuple[int, str]] = field(default_factory=list)
    last_sharding: Sharding | None = None
    implementation: str = ""  # of the model's masks before ``parallelize``, as ``masks_like`` returns it
    calls: int = 0  # with a full batch, the same on every rank
    seed: int = 0  # of attention dropout in these calls, the same on every rank
    depends_on_length: bool = False  # whether the largest position changes the frequencies of a rotary embedding
    attention: str = ""  # the name of the attention function of the text model before ``parallelize``
    outer: Patch | None = None  # of the encoder-decoder model whose encoder this is about
    has_encoder: bool = False  # whether a model is an encoder-decoder model, whose decoder is sharded
    has_mixers: bool = False  # whether layers mix tokens by the functions of ``mixers``
    has_indexers: bool = False  # whether layers attend to keys that an indexer chooses
    has_compressors: bool = False  # whether layers attend to keys that are compressed from several tokens
    needs_wrapper: bool = False  # whether an Accelerator must wrap the model for training, and has not yet
    undo: ExitStack = field(default_factory=ExitStack)  # undoes each change of the model
    modules: list[nn.Module] = field(default_factory=list)  # the modules that refer to this object
    loss_functions: list[nn.Module] = field(default_factory=list)  # the models whose loss function was replaced
    config_copies: list[tuple[PreTrainedConfig, PreTrainedConfig]] = field(default_factory=list)  # original and copy

    @property
    def ranks(self) -> int:
        return size_of(self.sequence_group)

    @property
    def unkept(self) -> str:
        """What the models have whose states a sharded prompt does not keep. Empty if there is nothing."""
        kinds = (
            (self.has_mixers, "layers with recurrent states"),
            (self.has_indexers, "indexers with keys of their own"),
            (self.has_compressors, "compressors with windows that are not full yet"),
        )
        return next((what for has, what in kinds if has), "")

    @property
    def rank(self) -> int:
        """This rank, among the ranks of the sequence."""
        return rank_in(self.sequence_group)

    @property
    def cut(self) -> BatchCut:
        """How batches are cut into the parts of the ranks."""
        layout, alone = self.settings.layout, self.sequence_group is None
        cut = BatchCut(1, layout) if alone else BatchCut.over(self.mesh, self.group, layout)
        layers = tuple(self.layer_masks.items()) or cut.layers
        return replace(cut, layers=layers, share_prompts=self.settings.share_prompts)

    def sharding(self, tokens: TokenLayout) -> Sharding:
        """The sharding of a batch over the ranks of the model. The last one is kept for the next batch."""
        if self.last_sharding is None or self.last_sharding.tokens != tokens:
            self.last_sharding = self.new_sharding(tokens.seq_len, tokens.layout)
        return self.last_sharding

    def new_sharding(self, seq_len: int, layout: Layout) -> Sharding:
        strategy: Literal["local"] | None = "local" if self.sequence_group is None else None
        return Sharding(seq_len, layout, mesh=self.mesh, group=self.group, strategy=strategy)

    @no_compile
    def place(self, shard: BatchShard) -> PlacedShard:
        """``shard`` over the ranks of the model, after checking that it was cut for this model."""
        layout, tokens = self.settings.layout, shard.tokens
        # A balanced batch may have a layout with a name. An Assigned layout lists each rank's tokens.
        same = layout in ("balanced", tokens.layout) or isinstance(tokens.layout, Assigned)
        if not same or tokens.ranks != self.ranks:
            raise ValueError(
                f"the batch was sharded with layout={tokens.layout!r} over {tokens.ranks} ranks, but the model is "
                f"parallelized with layout={layout!r} over {self.ranks}; give shard_batch and parallelize the same"
            )
        for longest, layer in self.longest:
            if shard.seq_len > longest:
                raise ValueError(
                    f"a row of {shard.seq_len} tokens: {layer} counts the tokens in its input, which changes its "
                    f"output in rows of more than {longest} tokens, and a rank has only some of them; use shorter "
                    "rows, or compute it from position_ids"
                )
        if self.has_compressors and any(isinstance(rule, Documents) for rule in shard.mask.rules):
            raise ValueError(
                "position_ids, cu_seq_lens: a row has several documents, but layers of the model compress windows of "
                "tokens across documents, and one process would too; pack no documents, give them rows of their own"
            )
        return PlacedShard(shard, self.sharding(tokens))

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        return self  # process groups cannot be copied; a copy of the model uses the same groups

    def __getstate__(self) -> Any:
        raise TypeError(
            "model: a parallelized model cannot be pickled, because process groups cannot; save its state_dict "
            "(save_pretrained does), or call seqpar.hf.restore(model) first"
        )


def patch_of(model: nn.Module) -> Patch:
    """The ``Patch`` of ``model``, or of the parallelized model inside it (peft, DDP)."""
    for module in model.modules():
        if isinstance(patch := getattr(module, "_seqpar", None), Patch):
            return patch
    raise ValueError(
        f"model={type(model).__name__}: it is not parallelized; call seqpar.hf.parallelize(model, ...) first"
    )


@hide_fields
@dataclass(frozen=True, eq=False)
class DecodeShard:
    """What the attention layers need to know in a decoding step. It is passed to them as ``seqpar``."""

    cache: Any  # a transformers Cache whose layers are ``ShardedCacheLayer``
    start: int  # the global position of the first new token
    mask: Mask  # the padding at the start of the prompt; each layer adds its causality and window
    # Of an encoder-decoder model: which of the encoder's states a query sees, and which states this rank has, int64.
    states: tuple[Mask, Tensor] | None = None
    shared: Shared = field(default_factory=dict, repr=False)  # what the layers share (see ``attend_to_cached``)


@dataclass(frozen=True, eq=False)
class FullCall:
    """A forward that was called with a full batch, or with a full prompt."""

    rows: int
    tokens: tuple[Tensor, ...]  # for each rank, the global positions of its tokens, int64
    logits: tuple[Tensor, ...]  # for each rank, the indices of its logits among the logits that the caller wants, int64
    fused: bool = False  # whether TRL's fused head computes the outputs
    drop_last: bool = False  # whether the fused head got unshifted labels, so that the last token has no output
    num_items: Any = None  # the divisor of the fused head's loss
    last: Tensor | None = None  # int64 [rows], for a sequence classifier: the token of each row whose scores count
    labels: Tensor | None = None  # for a sequence classifier: the labels of the rows
    fills_cache: bool = False  # whether the batch is the prompt of a generation
    keep: Tensor | None = None  # with images, the indices of this rank's tokens that get logits, int64; None: all
    places: Tensor | None = None  # as in ``BatchShard``: where the outputs of the batch's rows are among all outputs


@dataclass
class Forward:
    """The current forward of a parallelized model."""

    model: nn.Module
    patch: Patch
    shard: PlacedShard | DecodeShard | None  # None until a hook has set it
    wants_loss: bool = False  # whether the caller passed labels
    full_call: FullCall | None = None  # if the caller passed a full batch
    positions: Tensor | None = None  # int64 [seq_local], this rank's positions, until the text model shards its input
    scores: Tensor | None = None  # [batch, seq_local, num_labels], in a sequence classifier
    labels: Tensor | None = None  # removed from a call, because the model would compute a cross-entropy itself
    local_labels: Tensor | None = None  # the labels that the model's forward got, and their version (``version_of``)
    labels_version: int = 0
    noise: tuple[nn.Module, float] | None = None  # the embedding that adds NEFTune's noise, and its alpha
    targets: Tensor | None = None  # this rank's shifted labels, if the caller wants log-probabilities, not a loss
    wants_entropy: bool = False  # whether the caller wants entropies too
    # Until the sharded text model starts, if other modules run on their whole input before: what ends the block in
    # which the ranks draw the same random numbers.
    alike: ExitStack = field(default_factory=ExitStack)
    # Of an encoder-decoder model: the position_ids of the decoder, [batch, seq_local], and the mask of the encoder's
    # states that the decoder got, bool [batch, seq of the encoder], which is ``unmasked`` if the model gave it none.
    decoder_positions: Tensor | None = None
    states_mask: Tensor | None = None
    unmasked_states: bool = False

    @property
    def batch_shard(self) -> PlacedShard | None:
        """``shard`` in a forward on a sharded sequence; None in a decoding step."""
        return self.shard if isinstance(self.shard, PlacedShard) else None


# A forward of a parallelized model may call another parallelized model.
forwards: Running[Forward] = Running()

# Whether ``positions`` of the innermost forward is set. torch.compile can trace a read of a list, but not of
# ``forwards``.
shards_text_model = [False]


def push_forward(forward: Forward) -> None:
    forwards.push(forward, forward.model)
    shards_text_model[0] = forward.positions is not None


def pop_forward(forward: Forward) -> None:
    forwards.pop(forward.model)
    shards_text_model[0] = forwards.now is not None and forwards.now.positions is not None
