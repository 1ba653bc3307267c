"""``parallelize`` and ``restore``, for transformers models that use transformers' ``AttentionInterface``.

Model code does not change. The config of the model's modules is replaced by a copy that names seqpar's attention
function. Hooks are registered around the model's forward and its output embedding. ``TokenLoss`` replaces the loss
function.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from ..kernels import BackendName
from ..layers.holders import refuse_shards
from ..layers.loss import Gradients
from ..memory import Memory
from ..memory import restore as restore_memory
from ..memory.switches import layers_of
from ..patching.forwards import replace_forward
from ..patching.replaced import replaced
from ..placement.strategies import StrategyName, StrategyOptions, resolve
from ..ranks.mesh import all_ranks_group, size_of
from ..sharding.spec import Deterministic
from .batch import BatchLayout
from .calls import forward
from .calls.attention import (
    attention_forward,
    compare_masks,
    full_mask_in_layer,
    layer_mask_of,
    model_mask,
    no_mask,
    scale_of,
    structure,
)
from .calls.full_batch import before_text_model, check_shareable
from .calls.generate import generate_alike
from .calls.per_rank import call_with_all_batches
from .calls.towers import split_tower
from .inspection.support import (
    check_adapters,
    check_encoder,
    check_layerdrop,
    check_model,
    masks_like,
    pools_last_token,
    text_model,
)
from .inspection.tower_trial import find_towers
from .inspection.trial import Trial
from .losses.loss import replace_loss_function, replace_router_loss, restore_loss_function
from .mechanisms.compressors import replace_compressors
from .mechanisms.encoders import ATTENDS_ACROSS, check_settings, has_encoder, positional_embeddings
from .mechanisms.indexers import replace_indexers
from .mechanisms.key_values import disable_latent_kv, enable_latent_kv
from .mechanisms.mixers import replace_mixers
from .state import NAME, OWNER, Batches, Outputs, Patch, Settings, patch_of
from .verification.monitoring import verify_while_training

if TYPE_CHECKING:
    from typing_extensions import Unpack

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, no_mask)

Model = TypeVar("Model", bound=nn.Module)


class ParallelizeArguments(StrategyOptions, total=False):
    """The arguments of ``parallelize`` except for the ranks, as ``ParallelismConfig`` takes them too."""

    strategy: StrategyName
    layout: BatchLayout
    backend: BackendName
    softmax_scale: float | None
    alibi_slopes: Tensor | Sequence[float] | None
    deterministic: Deterministic
    gradients: Gradients
    loss_chunk: int | None
    outputs: Outputs
    memory: Memory | None
    share_prompts: bool
    split_towers: bool


def parallelize(
    model: Model,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    strategy: StrategyName = "ring",
    layout: BatchLayout = "zigzag",
    backend: BackendName = "auto",
    softmax_scale: float | None = None,
    alibi_slopes: Tensor | Sequence[float] | None = None,
    deterministic: Deterministic = False,
    gradients: Gradients = "mean",
    loss_chunk: int | None = None,
    outputs: Outputs = "auto",
    batches: Batches = "shared",
    memory: Memory | None = None,
    share_prompts: bool = False,
    split_towers: bool = False,
    **options: Unpack[StrategyOptions],
) -> Model:
    """Make ``model`` attend over a sequence that is sharded over ranks. Changes it in place and returns it.

    Call the model with the full batch, the same on every rank of the sequence. The model shards the batch when its
    forward starts. ``model(**batch).loss`` is the one-device loss on every rank. The mean of the ranks' gradients is
    one device's, which DDP, FSDP, DeepSpeed or ``seqpar.sync_gradients`` computes. Without labels,
    ``model(**batch).logits`` is the one-device output on every rank. You can also call the model with a batch that
    ``shard_batch`` has sharded. Call ``model.generate(input_ids)`` with the full prompt on every rank.

    In the first four calls, and in every 64th call after them, the ranks compare their full batches and raise an error
    if these differ. With the environment variable SEQPAR_CHECK=N they compare them in every N-th call, with
    SEQPAR_CHECK=0 never.

    Args:
        model: a transformers decoder or encoder whose attention layers use ``AttentionInterface``, or a peft model
            around one. Each layer keeps its causality, sliding window, softcap, sinks, scale and dropout.
        mesh: the ranks that the sequence is sharded over, as a mesh of ``seqpar.init_mesh``. If it has a dp dimension,
            the loss is the mean over all labels of all replicas, which must then call the model equally often; with
            the argument ``num_items_in_batch``, it is this replica's sum divided by that number.
        group: the ranks that the sequence is sharded over, as a process group. Without ``mesh`` and ``group``: the
            default group.
        strategy: "ring", "ulysses", "context_parallel", "hybrid", "local" or "auto", as in ``seqpar.attention``.
        layout: which tokens each rank holds: "zigzag", "contiguous", "striped", or a ``seqpar.Assigned`` for batches of
            its length. "balanced" is for packed documents: each batch gets a layout of its own, with which all ranks
            have equally much work (``Sharding.balanced``).
        backend: as in ``seqpar.attention``.
        softmax_scale: a factor on the scores of layers that pass none to their attention. Almost every model's layers
            pass their own scaling; another value here is then an error, because one device would not use it.
        alibi_slopes: ``[heads]`` of every layer, a tensor or numbers, for models trained with ALiBi whose own attention
            has none: ``slope * |i - j|`` is subtracted from the scores, for global positions ``i`` and ``j``.
        deterministic: as in ``seqpar.attention``.
        gradients: "sum" if something sums the gradients over the ranks instead of averaging them.
        loss_chunk: how many tokens have logits at a time in the loss; by default as many as fit in 128 MiB.
        outputs: what a call with a full batch returns for each token (logits, hidden states, log-probabilities).
            "full": the outputs of all tokens, in order, on every rank. "local": the outputs of this rank's tokens.
            "auto": as "full", but without logits if the call has labels, because the loss does not need all logits at
            once. A loss that every rank computes from full outputs has the same gradients as ``model(**batch).loss``.
        batches: "shared": the ranks of a sequence call the model with the same batch. "per_rank": each rank calls it
            with its own batch and gets the outputs of that batch, as if the ranks were data-parallel. The batches are
            sharded over all ranks one after another, and backward recomputes all but one of these forwards. All ranks
            must call the model equally often, and each must call backward on a loss of its outputs. The mean of all
            ranks' gradients is then the gradient of the mean of their losses. Generation runs on each rank alone.
        memory: how the layers of the text model save memory, as ``seqpar.Memory(tiled_mlp=32_768)``.
        share_prompts: whether rows of a full batch that begin with the same tokens, such as a prompt and its answers,
            store and compute these tokens once. The result is the same. The batch has ``input_ids`` and no embeddings.
            Dropout, if there is any, is the same in all rows that share a token.
        split_towers: whether each rank runs the vision and audio towers on some of the images, frames or sounds. Their
            features are then all-gathered, and the result is the same. Otherwise every rank runs them on all. A trial
            run finds out whether a tower computes each image by itself.
        options: the strategy's options, as in ``seqpar.attention``.

    Raises:
        TypeError: ``model`` is not a transformers model and does not contain one, or an option has the wrong type.
        ValueError: the model cannot be parallelized (the message names the layer), it is parallelized already, or an
            option has the wrong value.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={type(model).__name__}: expected a transformers model")
    scores: Any = {"softmax_scale": softmax_scale, "alibi_slopes": alibi_slopes, "deterministic": deterministic}
    named: Any = {"loss_chunk": loss_chunk, "outputs": outputs, "batches": batches, "memory": memory, **scores}
    named |= {"share_prompts": share_prompts, "split_towers": split_towers}
    settings = Settings(strategy, layout, backend, gradients, options=options, **named)
    return apply(settings, model, mesh, group)


def apply(settings: Settings, model: Model, mesh: DeviceMesh | None, group: ProcessGroup | None) -> Model:
    """``parallelize`` with checked arguments."""
    placement = resolve(settings.strategy, mesh, group, settings.options)
    if any(hasattr(m, "_seqpar") for m in model.modules()):
        raise ValueError("model: it is parallelized already; call seqpar.hf.restore(model) first")
    roots = _root_models(model)
    if not roots:
        raise TypeError(f"model={type(model).__name__}: it holds no transformers model (PreTrainedModel)")
    check_adapters(model.modules())
    refuse_shards(model, placement.sequence_group)
    for root in filter(has_encoder, roots):
        check_settings(settings, type(root).__name__)
    trials = {root: check_model(root) for root in roots}
    found = filter(None, map(check_encoder, filter(has_encoder, roots)))
    encoders = [(encoder, trial) for encoder, trial in found if _has_masks_of_layers(encoder, trial)]
    patch = _apply(settings, model, trials, mesh, group)
    for encoder, trial in encoders:
        _shard_encoder(encoder, trial, patch)
    return model


def _shard_encoder(encoder: PreTrainedModel, trial: Trial, patch: Patch) -> None:
    """Let ``encoder`` shard the sequence that it is called with, and all-gather its outputs."""
    layout = patch.settings.layout if isinstance(patch.settings.layout, str) else "contiguous"  # of another length
    settings = replace(patch.settings, outputs="full", layout=layout, share_prompts=False)
    with ExitStack() as stack:
        stack.callback(patch.undo.close)
        inner = _apply(settings, encoder, {encoder: trial}, patch.mesh, patch.group, patch)
        stack.pop_all()
    patch.undo.callback(inner.undo.close)


def _apply(
    settings: Settings,
    model: nn.Module,
    trials: dict[PreTrainedModel, Trial],
    mesh: DeviceMesh | None,
    group: ProcessGroup | None,
    outer: Patch | None = None,
) -> Patch:
    """Change ``model``, which holds the models of ``trials``. ``outer`` is of the model that has it as its encoder."""
    roots, placement = [*trials], resolve(settings.strategy, mesh, group, settings.options)
    towers = [x for root in roots for x in find_towers(root)] if settings.split_towers else []
    layers = {module: None for trial in trials.values() for module in trial.attention_modules}
    loss_ranks = None if placement.sequence_group is None else all_ranks_group(mesh, group)
    ulysses = size_of(placement.ulysses)
    patch = Patch(settings, mesh, group, placement.sequence_group, loss_ranks, ulysses=ulysses, outer=outer)
    for root, trial in trials.items():
        _record_masks(root, trial, patch)
        if trial.longest is not None and trial.counter is not None:
            patch.longest.append((trial.longest, "layer {!r} ({})".format(*trial.counter)))
        for name, scaling in trial.scalings.items():
            scale_of(settings, scaling, f"layer {name!r}")
    texts = [text_model(root) for root in roots]
    patch.implementation = masks_like(roots[0])
    patch.attention = texts[0].config._attn_implementation
    patch.has_encoder = any(map(has_encoder, roots))
    with patch.undo as undo:
        _replace_configs(model, {module for text in texts for module in text.modules()}, patch)
        for module in (*roots, *layers):
            undo.enter_context(replaced(module, _seqpar=patch))
            patch.modules.append(module)
        for trial in trials.values():
            for module, function in trial.across.items():
                undo.enter_context(replaced(module, _seqpar=patch, **{ATTENDS_ACROSS: function}))
                patch.modules.append(module)
        for layer in layers:
            enable_latent_kv(layer)
            patch.undo.callback(disable_latent_kv, layer)
        replace_compressors([*layers], patch)
        replace_indexers([*layers], patch, lambda layer, shard: full_mask_in_layer(layer, shard, patch))
        for root, trial in trials.items():
            undo.enter_context(replaced(root, _seqpar_loss=trial.loss, _seqpar_from_labels=trial.from_labels))
            for module in (m for m in root.modules() if hasattr(m, "layerdrop")):
                patch.undo.callback(module.register_forward_pre_hook(check_layerdrop).remove)
            replace_mixers(root, trial.mixers, patch)
            _register_hooks(root, patch)
            if outer is None:
                verify_while_training(root, patch)
        if settings.share_prompts:
            for root in roots:
                check_shareable(root, patch)
        for tower, items in towers:
            undo.callback(replace_forward(tower, OWNER, split_tower(patch, items)))
        if settings.memory is not None:
            settings.memory.apply(model, [layer for text in texts for layer in layers_of(text)])
        patch.undo = undo.pop_all()  # no error: keep it
    return patch


def restore(model: Model) -> Model:
    """Undo ``parallelize``, so that the model computes what it did before. Changes it in place and returns it.

    Values that were set in the model's config after ``parallelize`` are kept.

    Raises:
        ValueError: the model is not parallelized, or it is a copy of a parallelized model; or something has replaced a
            forward that ``memory`` has replaced.
    """
    patch = patch_of(model)
    if not any(m is module for m in model.modules() for module in patch.modules):
        raise ValueError("model: this is a copy of a parallelized model; restore the original before copying it")
    if patch.settings.memory is not None:
        restore_memory(model)  # first, because it may refuse
    patch.undo.close()
    return model


def _has_masks_of_layers(encoder: PreTrainedModel, trial: Trial) -> bool:
    patch = Patch(Settings(), None, None, None)
    try:
        _record_masks(encoder, trial, patch)
    except ValueError:
        return False
    return not patch.causality_conflicts


def _record_masks(root: PreTrainedModel, trial: Trial, patch: Patch) -> None:
    """Compare the masks that ``root`` asked for in the trial run with its layers. The results go to ``patch``."""
    names = {module: name for name, module in root.named_modules()}
    claims = [(names[layer[0]], layer_mask_of(*layer)) for layer in trial.attention_calls]
    masks = [model_mask(**arguments) for arguments in trial.mask_calls]
    conflicts = compare_masks(masks, claims, trial.length, type(root).__name__)
    patch.causality_conflicts.update(conflicts)
    patch.known_masks.update(structure(mask.function) for mask in masks)
    patch.layer_masks.update((not x[0], *x[1:]) if x in conflicts else x for _, x in claims)


def _root_models(model: nn.Module) -> list[PreTrainedModel]:
    """The transformers models in ``model`` that are not part of another transformers model, each once."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [*dict.fromkeys(root for child in model.children() for root in _root_models(child))]


def _replace_configs(model: nn.Module, sharded: set[nn.Module], patch: Patch) -> None:
    """Replace the configs of all modules by copies. In ``sharded`` modules they name seqpar's attention function.

    The original configs are not changed, because another model may have been created from them.
    """
    memos: tuple[dict[int, Any], ...] = {}, {}
    copies: dict[tuple[int, bool], PreTrainedConfig] = {}  # by the original's id
    encoders = {m for root in _root_models(model) if has_encoder(root) for m in root.modules()} - sharded
    for module in model.modules():
        apart = module in encoders  # an encoder may share its config with the decoder
        for name, original in [*vars(module).items()]:
            if not isinstance(original, PreTrainedConfig):
                continue
            if (id(original), apart) not in copies:
                ours = copies[id(original), apart] = copy.deepcopy(original, memos[apart])
                if module in sharded:
                    ours._attn_implementation = NAME
                elif ours._attn_implementation == NAME:  # from_pretrained sets it for towers too, which are not sharded
                    ours._attn_implementation_internal = "sdpa"
                patch.config_copies.append((original, ours))
                patch.undo.callback(_copy_new_values, original, ours, dict(vars(ours)))
            patch.undo.enter_context(replaced(module, **{name: copies[id(original), apart]}))


def _copy_new_values(original: PreTrainedConfig, ours: PreTrainedConfig, first_values: dict[str, Any]) -> None:
    for name, value in vars(ours).items():
        unchanged = name in first_values and first_values[name] is value
        if name != "_attn_implementation_internal" and not unchanged:
            setattr(original, name, value)


def _register_hooks(root: PreTrainedModel, patch: Patch) -> None:
    def before(module: nn.Module, hook: Any, with_kwargs: bool = True) -> None:
        patch.undo.callback(module.register_forward_pre_hook(hook, with_kwargs=with_kwargs).remove)

    def after(module: nn.Module, hook: Any, **options: bool) -> None:
        patch.undo.callback(module.register_forward_hook(hook, **options).remove)

    forward.wrap_forward(root)
    patch.undo.callback(forward.unwrap_forward, root)
    before(root, forward.before_forward)
    # always_call, because the ``Forward`` must end even if the model's forward raises an error.
    after(root, forward.after_forward, prepend=True, with_kwargs=True, always_call=True)
    text = text_model(root)
    if text is not root:
        before(text, before_text_model)
    for module in positional_embeddings(text) if has_encoder(root) or patch.outer is not None else ():
        before(module, forward.before_positional_embedding)
    for module in filter(forward.depends_on_length, text.modules()):
        patch.depends_on_length = True
        before(module, forward.before_rope)
        after(module, forward.after_rope, with_kwargs=True)
    for module in root.modules():
        if isinstance(module, PreTrainedModel):
            patch.loss_functions.append(module)
            replace_loss_function(module, patch, root)
            patch.undo.callback(restore_loss_function, module)
            replace_router_loss(module, patch.undo)
    if pools_last_token(root):
        after(root.score, forward.after_score)
    if patch.settings.batches != "per_rank" and hasattr(root, "generate"):
        patch.undo.callback(replace_forward(root, OWNER, generate_alike, "generate"))
    # One rank generates alone if its states are of kinds that a sharded prompt does not keep.
    if patch.settings.batches == "per_rank" if patch.ranks > 1 else patch.unkept:
        patch.undo.callback(replace_forward(root, OWNER, call_with_all_batches, "_call_impl"))
    forward.watch_head(root, patch)
