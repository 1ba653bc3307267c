"""The hooks of a parallelized model: around its forward, its output embedding and its rotary embeddings.

The hooks of the forward store a ``Forward``, which the other hooks read.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DistributedDataParallel

from ...base.checks import no_compile
from ...comm.handshake import leave_calls, propagate_errors
from ...layers.holders import refuse_shards
from ...masks.rules import Documents
from ...memory.zero import is_hook_of_zero_3
from ...patching.forwards import replace_forward, replaced_by, restore_forward
from ..batch import DECODER_TOKENS, BatchShard
from ..inspection.support import (
    cache_of,
    check_adapters,
    computes_cross_entropy,
    parameters_of,
    pools_last_token,
    predicts_in_place,
    recomputes,
    text_model,
)
from ..losses.logits import LOG_PROBS, LazyLogits, LogProbsOutput, MissingLogits, label_scores
from ..losses.loss import TokenLoss, check_loss, plain, replace_loss_function, version_of
from ..mechanisms.encoders import has_encoder, with_positions
from ..randomness import same_random_numbers
from ..state import NAME, OWNER, Forward, Patch, forwards, pop_forward, push_forward
from .full_batch import (
    FUSED,
    gather_outputs,
    generates,
    has_more_than_text,
    merges,
    reduce_fused_loss,
    shard_call,
)
from .generate import shard_generation

_log = logging.getLogger("seqpar")
_ROPE_TYPES = ("dynamic", "longrope")
# Arguments of attention functions, which a model passes on from a call to its layers.
_OF_LAYERS = ("is_causal", "sliding_window", "softcap", "s_aux", "scaling", "dropout", "position_bias")
_NOISE = "neftune_noise_alpha"


def wrap_forward(model: nn.Module) -> None:
    """Make ``model.forward(...)`` run the hooks too, as ``model(...)`` does: sentence-transformers calls it directly.

    A forward that was replaced before, by another package, is left as it is.
    """
    if "forward" not in vars(model):
        replace_forward(model, OWNER, _run_hooks)


def unwrap_forward(model: nn.Module) -> None:
    if replaced_by(model) is None:  # otherwise it stays inside of another package's, where it does nothing
        restore_forward(OWNER, model)


def _run_hooks(model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs) if _is_direct_call(model) else forward(*args, **kwargs)


@no_compile
def _is_direct_call(model: nn.Module) -> bool:
    forward = forwards.now
    if before_forward not in model._forward_pre_hooks.values() or not cast(Patch, model._seqpar).sharded:
        return False
    return forward is None or forward.model is not model


@no_compile
def before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Start a ``Forward``, and replace the arguments of the model's forward by this rank's arguments.

    A call without the argument ``seqpar`` has a full batch, or is a forward of ``model.generate``.
    """
    patch = cast(Patch, model._seqpar)
    if not patch.sharded:
        return args, kwargs
    with propagate_errors(patch.sequence_group):
        return (), _begin(model, patch, args, kwargs)


def _begin(model: nn.Module, patch: Patch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Start a ``Forward``, and return the arguments of this rank's forward."""
    _check_unchanged(model)
    refuse_shards(model, patch.sequence_group)  # weights may have been sharded since ``parallelize``
    _check_wrapper(model, patch)
    watch_head(model, patch)
    _read_scores_last(model)
    replace_loss_function(model, patch, model)  # the user may have set another one
    parameters = parameters_of(model)
    kwargs = {**dict(zip(parameters, args, strict=False)), **kwargs}
    _check_arguments(model, kwargs, parameters)
    wants_log_probs = kwargs.pop(LOG_PROBS, False)
    encodes = has_encoder(model)
    if not encodes and any(kwargs.get(name) is not None for name in DECODER_TOKENS):
        raise ValueError(
            f"{DECODER_TOKENS[0]}: {type(model).__name__} has no encoder beside its decoder; pass input_ids"
        )
    has_images = merges(model) and has_more_than_text(kwargs)
    forward = Forward(model, patch, None)
    if kwargs.get("seqpar") is not None:  # the batch is sharded already
        if encodes and "decoder_position_ids" not in kwargs:
            raise ValueError(
                "batch: shard_batch has sharded the tokens of the encoder; give it decoder_input_ids too, which are "
                "then sharded, or call the model with the full batch"
            )
        if has_images:
            raise ValueError(
                f"batch: it is sharded, but {type(model).__name__} must merge images into all tokens before the tokens "
                "are sharded; call it with the full batch, without shard_batch"
            )
    elif generates(kwargs):
        if kept := patch.unkept:
            raise ValueError(
                f"cache: {type(model).__name__} has {kept}, which are not kept for a sharded prompt yet; generate "
                "with batches='per_rank' or after seqpar.hf.restore(model), or pass use_cache=False"
            )
        kwargs, forward.full_call = shard_generation(model, kwargs, has_images)
    elif (outer := _outer(patch)) is not None:
        outer.alike.close()  # each rank draws its own random numbers for its tokens
        seed = 0 if outer.batch_shard is None else outer.batch_shard.seed + 1
        kwargs, forward.full_call = shard_call(model, kwargs, False, seed % 2**62)
    else:
        kwargs, forward.full_call = shard_call(model, kwargs, has_images)
    if has_images and forward.full_call is not None:
        forward.positions = forward.full_call.tokens[patch.rank]
    if isinstance(kwargs["seqpar"], BatchShard):
        kwargs["seqpar"] = patch.place(kwargs["seqpar"])
    forward.shard = kwargs["seqpar"]
    if forward.batch_shard is not None:
        _prepare(forward, kwargs, parameters, wants_log_probs)
    if encodes and forward.batch_shard is not None:
        forward.decoder_positions = kwargs.pop("decoder_position_ids")
    if encodes or merges(model):
        del kwargs["seqpar"]  # before_text_model passes it to the text model
    if patch.outer is not None and forward.batch_shard is not None:
        _prepare_encoder(forward.batch_shard, kwargs, parameters)
    if encodes or forward.positions is not None:
        _draw_alike(forward, kwargs)
    push_forward(forward)
    return kwargs


def _outer(patch: Patch) -> Forward | None:
    """The running forward of the encoder-decoder model whose encoder ``patch`` is about."""
    forward = forwards.now
    return forward if forward is not None and forward.patch is patch.outer else None


def _draw_alike(forward: Forward, arguments: dict[str, Any], seed: int = 0) -> None:
    """Let all ranks draw the same random numbers until ``forward.alike`` is closed. Another ``seed``: other numbers."""
    if forward.patch.ranks > 1 and (shard := forward.batch_shard) is not None:
        tensors = [x for x in arguments.values() if isinstance(x, Tensor)]  # weights may be offloaded to the CPU
        devices = {x.device for x in (*tensors, *forward.model.parameters())}
        forward.alike.enter_context(same_random_numbers(shard.seed + seed, devices))


def _prepare_encoder(shard: BatchShard, kwargs: dict[str, Any], parameters: list[str]) -> None:
    """Change the arguments of an encoder's forward on its sharded sequence, in place."""
    ids = kwargs["position_ids"]
    if "position_ids" not in parameters:
        del kwargs["position_ids"]
    if shard.valid is not None:  # the padding is part of the shard's mask; without a mask, some encoders look for more
        kwargs["attention_mask"] = torch.ones_like(ids)


def _prepare(forward: Forward, kwargs: dict[str, Any], parameters: list[str], wants_log_probs: bool | str) -> None:
    """Change the arguments of a forward on a sharded sequence, in place, and set ``forward`` accordingly."""
    model, patch, shard, labels = forward.model, forward.patch, kwargs["seqpar"], kwargs.get("labels")
    forward.wants_loss = labels is not None
    if shard.jump is not None and "use_cache" in parameters and not _caches(model, kwargs):
        raise ValueError(
            f"position_ids: {shard.jump}, which is no restart. Without an attention_mask and without a cache, "
            "transformers starts a document there, and otherwise it does not; pass an attention_mask of ones if "
            "the row is one document, or the boundaries of its documents as cu_seq_lens"
        )
    if patch.has_mixers and any(isinstance(rule, Documents) for rule in shard.mask.rules):
        _say_documents_are_apart(type(model).__name__)
    if labels is not None:
        keep = kwargs.get("logits_to_keep", 0)
        if isinstance(keep, Tensor) or keep:
            raise ValueError(f"logits_to_keep={keep}: with labels the loss needs every token; leave it out")
        if shard.in_place is not None and predicts_in_place(model):
            labels = kwargs["labels"] = shard.in_place[0].to(labels.device)
            kwargs["seqpar"] = forward.shard = shard.having(num_items=shard.in_place[1])
        if wants_log_probs:
            forward.targets, kwargs["return_dict"] = labels, True
            forward.wants_entropy = wants_log_probs == "entropy"
        if computes_cross_entropy(model):
            forward.labels = kwargs.pop("labels")
        if "skip_logits" in parameters:
            kwargs["skip_logits"] = False  # Liger then calls self.loss_function instead of its own fused loss
    if isinstance(local_labels := kwargs.get("labels"), Tensor):
        forward.local_labels, forward.labels_version = local_labels, version_of(local_labels)
    _scale_noise(forward, kwargs)
    # Models use a cache by default. In training the cache would hold the keys of all layers, and nothing reads it.
    if ("use_cache" in parameters or patch.has_mixers) and cache_of(kwargs) is None:
        kwargs["use_cache"] = False


@cache
def _say_documents_are_apart(name: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log.warning(
            "%s: packed documents are kept apart in its convolutions, linear attention and state-space layers. Without "
            "seqpar, transformers lets them see one another there (except in kernels that get cu_seq_lens_q or "
            "seq_idx), and a run of that kind has another loss",
            name,
        )


def _check_arguments(model: nn.Module, kwargs: dict[str, Any], parameters: list[str]) -> None:
    for name in _OF_LAYERS:
        if kwargs.get(name) is not None and name not in parameters:
            raise ValueError(
                f"{name}: some of transformers' attention functions use it instead of what the model's layers and "
                f"masks say, and others ignore it; set it in the config of {type(model).__name__} before parallelize, "
                "and leave it out here"
            )


def _check_wrapper(model: nn.Module, patch: Patch) -> None:
    trains = model.training and torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
    if patch.needs_wrapper and trains:
        raise ValueError(
            f"model={type(model).__name__}: it is trained without a wrapper (DistributedDataParallel, FSDP), so that "
            "nothing averages the gradients of the ranks of the ParallelismConfig; train what "
            "accelerator.prepare(model) returns, without evaluation_mode=True, or make a new Trainer for the training "
            "if this one has evaluated"
        )


def _scale_noise(forward: Forward, kwargs: dict[str, Any]) -> None:
    """Give the noise of NEFTune its magnitude on one device, until the forward ends.

    Its hook on the embedding divides ``neftune_noise_alpha`` by the square root of the size of a row of embeddings, and
    a rank has only a part of the row.
    """
    tokens, shard = kwargs.get("input_ids"), forward.batch_shard
    if forward.positions is not None or tokens is None or shard is None:
        return  # the embedding gets all tokens, or none
    try:
        embedding = cast(Any, forward.model).get_input_embeddings()
    except NotImplementedError:
        return  # a pipeline stage without an embedding
    alpha = getattr(embedding, _NOISE, None)
    if alpha is not None and has_encoder(forward.model):
        raise ValueError(
            f"{_NOISE}={alpha}: encoders and decoders may share the embedding, and a rank has all tokens of one and "
            "some of the other's; leave it out"
        )
    if alpha is not None:
        forward.noise = embedding, alpha
        row = shard.seq_len if shard.places is None else shard.places.shape[1]
        setattr(embedding, _NOISE, alpha * (tokens.shape[1] / row) ** 0.5)


def _check_unchanged(model: nn.Module) -> None:
    config = text_model(cast(Any, model)).config if has_encoder(model) else cast(Any, model.config).get_text_config()
    implementation = config._attn_implementation
    if implementation != NAME:
        raise ValueError(
            f"attn_implementation={implementation!r}: it was set after parallelize, so that each rank would attend to "
            "its own tokens only; call seqpar.hf.restore(model), set it, and call parallelize again"
        )
    check_adapters([model])


def _caches(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    if cache_of(kwargs) is not None:
        return True
    default = getattr(cast(Any, model.config).get_text_config(), "use_cache", False)
    use_cache = kwargs.get("use_cache")
    return not recomputes(model) and bool(default if use_cache is None else use_cache)


@no_compile
def after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """End the ``Forward``, and return the output that the caller asked for. None: the model's forward has raised."""
    if (forward := forwards.now) is None or forward.model is not model:
        return None
    if forward.noise is not None:
        setattr(forward.noise[0], _NOISE, forward.noise[1])
    forward.alike.close()
    if output is None:
        leave_calls(forward.patch.sequence_group, sys.exc_info()[1])
    try:
        if output is not None:
            output = _with_loss(output, forward, bool(kwargs.get(FUSED)))
            if forward.full_call is not None:
                return gather_outputs(output, forward, forward.full_call)
            if kwargs.get(FUSED) and (shard := forward.batch_shard) is not None and shard.weights is not None:
                output = reduce_fused_loss(output, forward, kwargs["num_items_in_batch"])
    except Exception as error:
        leave_calls(forward.patch.sequence_group, error)
        raise
    finally:
        pop_forward(forward)
        if (outer := _outer(forward.patch)) is not None:
            _draw_alike(outer, kwargs, 2)
    if output is None:
        return None
    if isinstance(output, tuple):
        return tuple(x for x in output if not isinstance(x, LazyLogits))
    if isinstance(lazy := getattr(output, "logits", None), LazyLogits):
        full = forward.patch.settings.batches == "per_rank" and forward.patch.settings.outputs == "full"
        return type(output)(**{**output, "logits": lazy.materialize() if full else MissingLogits()})
    return output


def _with_loss(output: Any, forward: Forward, fused: bool) -> Any:
    """``output`` with the loss, log-probabilities or scores that the model's forward did not compute.

    A loss that the forward did compute is checked, unless TRL's ``fused`` head computed it.
    """
    patch = forward.patch
    if forward.targets is not None:
        chunk, entropy = patch.settings.loss_chunk, forward.wants_entropy
        output = LogProbsOutput(*label_scores(output.logits, forward.targets, chunk, entropy).unbind(-1))
    elif forward.labels is not None:
        logits = output[0] if isinstance(output, tuple) else output.to_tuple()[0]  # of each token
        loss = TokenLoss(patch, forward.model)(logits, forward.labels, seqpar=forward.batch_shard)
        output = (loss, *output) if isinstance(output, tuple) else type(output)(**{"loss": loss, **output})
    elif not (fused and (forward.full_call or patch.settings.batches == "per_rank")):
        if isinstance(output, Mapping):
            found = output.get("loss")
        else:  # a tuple starts with the loss, if there is one
            first = output[0] if isinstance(output, tuple) else None
            found = first if isinstance(first, Tensor) and first.dim() == 0 else None
        if found is not None:
            check_loss(found, forward)
    if isinstance(output, MutableMapping):
        for name, x in output.items():
            output[name] = plain(x)
    elif isinstance(output, tuple):
        output = tuple(map(plain, output))
    if forward.scores is not None:
        if isinstance(output, tuple):
            raise ValueError("return_dict=False: a sequence's scores are all-gathered by name; leave return_dict out")
        output = type(output)(**{**output, "logits": forward.scores})
    return output


def after_score(head: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Keep the scores of all tokens of this rank, ``[batch, seq_local, num_labels]``.

    The model itself returns the scores of this rank's last token, which may not be the last token of the sequence.
    """
    if (forward := forwards.now) is not None and forward.batch_shard is not None:
        forward.scores = output


def _read_scores_last(model: nn.Module) -> None:
    """Let ``after_score`` run after the hooks that were registered since ``parallelize``."""
    if pools_last_token(model):
        for module in cast(nn.Module, model.score).modules():
            for key in [key for key, hook in module._forward_hooks.items() if hook is after_score]:
                cast(Any, module._forward_hooks).move_to_end(key)


def watch_head(model: nn.Module, patch: Patch) -> None:
    """Let ``call_head`` answer the calls of the output embedding, which may be another module than in the last call."""
    head: Any = cast(Any, model).get_output_embeddings()
    if isinstance(head, nn.Module) and "_call_impl" not in vars(head):
        patch.undo.callback(replace_forward(head, OWNER, call_head, "_call_impl"))


@no_compile
def call_head(head: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the output embedding with its input ``[..., seq, hidden]``.

    If the caller asked for the logits of some tokens, it gets these tokens. In a call with labels, the result is a
    ``LazyLogits``, and the output embedding is not called yet. Hooks of the user must see all logits: then the result
    holds them already.
    """
    forward = forwards.now
    if forward is None or head is not cast(Any, forward.model).get_output_embeddings() or len(args) != 1 or kwargs:
        return call(*args, **kwargs)
    hidden: Tensor = args[0]
    if forward.full_call is not None and (keep := forward.full_call.keep) is not None:
        hidden = hidden.index_select(-2, keep.to(hidden.device))
    elif forward.wants_loss:
        hooked = _has_any_global_hook() or any(not _gathers(*hook) for hook in _hooks_of(head))
        vocabulary: int = cast(Any, forward.model).config.get_text_config().vocab_size
        return LazyLogits(head, hidden, vocabulary, full=call(hidden) if hooked else None)
    return call(hidden)


def _hooks_of(head: nn.Module) -> Iterator[tuple[bool, Any]]:
    """The hooks of ``head`` and of its submodules, each with whether it is around a forward that computes a loss."""
    core: Any = head
    while isinstance(core, FullyShardedDataParallel | DistributedDataParallel):
        core = core.module
    for module in head.modules():
        around = module is core or module not in core.modules()
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
            for hook in getattr(module, kind).values():
                yield around, hook


def _gathers(around: bool, hook: Any) -> bool:
    """Whether ``hook`` belongs to a wrapper that gathers the weight for a whole forward, and reads no output."""
    functions = [hook]
    while (wrapped := getattr(functions[-1], "__wrapped__", None)) is not None:
        functions.append(wrapped)
    return around and any(
        isinstance(getattr(function, "__self__", None), FSDPState) or is_hook_of_zero_3(function)
        for function in functions
    )


def before_positional_embedding(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Embed the global positions of this rank's tokens, in a decoder that takes no position_ids."""
    if (forward := forwards.now) is None or (shard := forward.batch_shard) is None:
        return None
    given = (*args, *kwargs.values(), *module.parameters())
    device = next(x.device for x in given if isinstance(x, Tensor))
    return (), with_positions(module.forward, args, kwargs, shard.positions[forward.patch.rank].to(device))


def depends_on_length(module: nn.Module) -> bool:
    """Whether ``module`` is a rotary embedding whose frequencies depend on the largest position in its input."""
    rope_type = getattr(module, "rope_type", None)
    rope_types = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(x in _ROPE_TYPES for x in rope_types)


def before_rope(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Append the batch's largest position to this rank's ``position_ids [..., batch, seq_local]``.

    The rotary embedding then computes the frequencies for the length of the full sequence.
    """
    if (forward := forwards.now) is None or (shard := forward.batch_shard) is None:
        return None

    def append(ids: Tensor) -> Tensor:
        return torch.cat([ids, ids.new_full((*ids.shape[:-1], 1), shard.max_position)], dim=-1)

    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": append(kwargs["position_ids"])}
    return (args[0], append(args[1]), *args[2:]), kwargs


def after_rope(module: nn.Module, args: Any, kwargs: Any, output: tuple[Tensor, Tensor]) -> Any:
    """Remove the appended position from ``cos, sin [batch, seq_local + 1, head_dim]``."""
    if (forward := forwards.now) is None or forward.batch_shard is None:
        return None
    return tuple(x[..., :-1, :] for x in output)
