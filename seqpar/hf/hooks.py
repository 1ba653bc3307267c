"""The hooks of a parallelized model: around its forward, its output embedding, its rotary embeddings and its router.

They do not change the model's code. The hooks of the forward store a ``Forward``, which the other hooks read.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks import no_compile
from .generate import finish_forward, prepare_forward
from .log_probs import LOG_PROBS, LogProbsOutput
from .loss import LazyLogits, TokenLoss, label_log_probs, reduce_over_ranks
from .multimodal import has_more_than_text, merges, shard_merged_call
from .state import Forward, Patch, current_forward, pop_forward, push_forward
from .support import predicts_in_place, uses_loss_function
from .whole import gather_outputs, generates, shard_call
from .wrappers import keeps_weight

_ROPE_TYPES = ("dynamic", "longrope")
_ROUTER_LOSS = "load_balancing_loss_func"
_FUSED_ROUTER = "transformers.models.mixtral.modeling_mixtral"  # whose router loss TRL calls for every model


@no_compile
def before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Start a ``Forward``. A call without a shard has the full batch, or is part of a generation.

    Raises:
        ValueError: the full batch cannot be sharded, or the ranks have different batches; or there are labels together
            with ``logits_to_keep``.
    """
    patch = cast(Patch, model._seqpar)
    if not patch.sharded:
        return args, kwargs
    parameters = inspect.signature(model.forward).parameters
    kwargs = {**dict(zip(parameters, args, strict=False)), **kwargs}
    wants_log_probs = kwargs.pop(LOG_PROBS, False)
    whole = cut = keep_logits = None
    merging = merges(model)
    if kwargs.get("seqpar") is not None:
        if merging and has_more_than_text(kwargs):
            raise ValueError(
                f"batch: it is sharded, but {type(model).__name__} merges images into all tokens before they are "
                "sharded; call it with the full batch, without shard_batch"
            )
    elif not generates(kwargs):
        if merging and has_more_than_text(kwargs):
            kwargs, whole, kwargs["seqpar"], keep_logits = shard_merged_call(model, kwargs)
            cut = whole.tokens[patch.rank]
        else:
            kwargs, whole = shard_call(model, kwargs)
    shard, labels = kwargs.get("seqpar"), kwargs.get("labels")
    forward = Forward(model, patch, shard, wants_loss=labels is not None, whole=whole, cut=cut, keep=keep_logits)
    if shard is not None:
        if (shard.layout, shard.ranks) == (patch.layout, patch.ranks):  # otherwise the first layer raises
            shard.add_sharding(patch.mesh, patch.given_group)
        keep = kwargs.get("logits_to_keep", 0)
        if labels is not None and (isinstance(keep, Tensor) or keep):
            raise ValueError(f"logits_to_keep={keep}: with labels the loss needs every token; leave it out")
        if labels is not None and shard.in_place is not None and predicts_in_place(model):
            kwargs["labels"] = shard.in_place[0].to(labels.device)
            kwargs["seqpar"] = forward.shard = shard.for_in_place_labels()
        if wants_log_probs:
            forward.targets, kwargs["return_dict"] = labels, True
        if labels is not None and not uses_loss_function(type(model)):
            forward.labels, forward.num_items = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        # Models use a cache by default. In training it would keep every layer's keys for nothing.
        if "use_cache" in parameters and kwargs.get("past_key_values") is None:
            kwargs["use_cache"] = False
    else:
        forward.generation = prepare_forward(model, patch, kwargs, merging and has_more_than_text(kwargs))
        forward.shard, forward.cut = kwargs["seqpar"], forward.generation.cut
        if forward.cut is not None:
            forward.keep = kwargs.pop("logits_to_keep", None)
    if merging:
        del kwargs["seqpar"]  # before_text_model passes it to the text model
    push_forward(forward)
    return (), kwargs


@no_compile
def after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """End the ``Forward``: add a loss, all-gather the outputs of a full batch or prompt, leave out lazy logits."""
    forward = current_forward()
    if forward is None or forward.model is not model:
        return None
    try:
        # Before pop_forward, because the loss looks up the wrappers around the model of the current forward.
        if forward.targets is not None and output is not None:
            output = LogProbsOutput(label_log_probs(output.logits, forward.targets, forward.patch.loss_chunk))
        elif forward.labels is not None and output is not None:
            output = _add_loss(output, forward, forward.labels)
        if forward.scores is not None and output is not None:
            output = _with_scores(output, forward.scores)
        if forward.whole is not None and output is not None:
            return gather_outputs(output, forward, forward.whole)
    finally:
        pop_forward()
    if output is None:  # the model's forward raised
        return None
    if forward.generation is not None:
        return finish_forward(output, forward.generation, forward.patch)
    if isinstance(output, tuple):
        return tuple(x for x in output if not isinstance(x, LazyLogits))
    if isinstance(lazy := getattr(output, "logits", None), LazyLogits):
        if forward.patch.batches == "own" and forward.patch.outputs == "whole":
            return type(output)(**{**output, "logits": lazy.materialize()})
        return type(output)(**{name: x for name, x in output.items() if name != "logits"})
    changed = forward.labels is not None or forward.scores is not None or forward.targets is not None
    return output if changed else None


def after_score(head: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    """Keep the scores of this rank's tokens. The model itself would return those of the last token on this rank."""
    forward = current_forward()
    if forward is not None and forward.batch_shard is not None:
        forward.scores = output


def _with_scores(output: Any, scores: Tensor) -> Any:
    """``output`` with the scores of all of this rank's tokens instead of those of one token per row."""
    if isinstance(output, tuple):
        raise ValueError("return_dict=False: a sequence's scores are all-gathered by name; leave it out")
    return type(output)(**{**output, "logits": scores})


def _add_loss(output: Any, forward: Forward, labels: Tensor) -> Any:
    """``output`` with a loss in front. Its first value must be the logits, one prediction per token."""
    logits = output[0] if isinstance(output, tuple) else output.to_tuple()[0]
    token_loss = TokenLoss(forward.patch, forward.model)
    loss = token_loss(logits, labels, num_items_in_batch=forward.num_items, seqpar=forward.batch_shard)
    return (loss, *output) if isinstance(output, tuple) else type(output)(**{"loss": loss, **output})


@no_compile
def before_head(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """If a loss follows, keep the input of the output embedding, ``[..., seq, hidden]``, and pass it no tokens."""
    forward = current_forward()
    if forward is None:
        return None
    if forward.keep is not None:
        return (args[0].index_select(-2, forward.keep.to(args[0].device)), *args[1:])
    if not forward.wants_loss or not _is_plain_linear(head, forward.model):
        return None
    forward.hidden = args[0]
    return (args[0][..., :0, :], *args[1:])


@no_compile
def after_head(head: nn.Module, args: tuple[Any, ...], output: Tensor) -> LazyLogits | None:
    """Return the lazy logits of the kept input."""
    forward = current_forward()
    if forward is None or forward.hidden is None:
        return None
    hidden, forward.hidden = forward.hidden, None
    return LazyLogits(cast(nn.Linear, head), hidden)


def _is_plain_linear(head: nn.Module, model: nn.Module) -> bool:
    """Whether the logits depend only on the head's weight, and the weight exists until the model's forward ends."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and keeps_weight(head, model)


def depends_on_length(module: nn.Module) -> bool:
    """Whether ``module`` is a rotary embedding whose frequencies depend on the largest position in its input."""
    rope_type = getattr(module, "rope_type", None)
    rope_types = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    return any(x in _ROPE_TYPES for x in rope_types)


def before_rope(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Append the batch's largest position to this rank's ``position_ids [..., batch, seq_local]``.

    The module then computes the frequencies of the full sequence. ``after_rope`` drops the extra angle.
    """
    forward = current_forward()
    if forward is None or (shard := forward.batch_shard) is None:
        return None
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": _append(kwargs["position_ids"], shard.max_position)}
    return (args[0], _append(args[1], shard.max_position), *args[2:]), kwargs


def after_rope(module: nn.Module, args: Any, kwargs: Any, output: tuple[Tensor, Tensor]) -> Any:
    """Drop the appended position from ``cos, sin [batch, seq_local + 1, head_dim]``."""
    forward = current_forward()
    if forward is None or forward.batch_shard is None:
        return None
    return tuple(x[..., :-1, :] for x in output)


def _append(position_ids: Tensor, position: int) -> Tensor:
    return torch.cat([position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), position)], dim=-1)


# Router balancing losses of mixture-of-experts models. transformers' ``load_balancing_loss_func`` multiplies two means
# over tokens, so the sum of the ranks' losses is not the loss of the full sequence: the means must be taken over all
# ranks first. Model code looks the function up in its own module. There it is replaced by a function that calls the
# original, except during a forward on a sharded sequence.
_original_losses: dict[str, Callable[..., Any]] = {}  # by module name
_patched_models: dict[str, set[int]] = {}  # by module name: ids of the parallelized models that need the replacement


def patch_router_loss(model: nn.Module) -> None:
    """Replace the router loss in those modules that define ``model`` and have one."""
    names = [cls.__module__ for cls in type(model).__mro__]
    if hasattr(cast(Any, model.config).get_text_config(), "router_aux_loss_coef"):
        names.append(import_module(_FUSED_ROUTER).__name__)
    for name in names:
        original = getattr(sys.modules.get(name), _ROUTER_LOSS, None)
        if original is None:
            continue
        if name not in _original_losses:
            _original_losses[name] = original
            setattr(sys.modules[name], _ROUTER_LOSS, _sharded_router_loss(original))
        _patched_models.setdefault(name, set()).add(id(model))


def unpatch_router_loss(model: nn.Module) -> None:
    """Put the original back, unless another parallelized model needs the replacement."""
    for name, models in list(_patched_models.items()):
        models.discard(id(model))
        if not models:
            setattr(sys.modules[name], _ROUTER_LOSS, _original_losses.pop(name))
            del _patched_models[name]


def _sharded_router_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_balancing_loss(
        gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
    ) -> Any:
        forward = current_forward()
        if (
            forward is None
            or (shard := forward.batch_shard) is None
            or not isinstance(gate_logits, tuple)
            or num_experts is None
        ):
            return original(gate_logits, num_experts, top_k, attention_mask)
        chosen, probability, tokens = _router_sums(gate_logits, num_experts, top_k, shard.valid)
        patch = forward.patch
        sums = torch.cat([chosen, tokens])  # [num_experts + 1]
        if patch.group is not None and patch.ranks > 1:
            dist.all_reduce(sums, group=patch.group)
        chosen, tokens = sums[:-1], sums[-1]  # of all ranks
        # The loss is linear in this rank's probabilities, so the local loss has this rank's partial gradient.
        local_loss = (chosen / tokens * (probability / tokens)).sum() * num_experts
        return reduce_over_ranks(local_loss, patch, forward.model)

    return load_balancing_loss


def _router_sums(
    gate_logits: tuple[Tensor, ...], num_experts: int, top_k: int, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over this rank's tokens and all layers, float32.

    Args:
        gate_logits: for each layer ``[tokens, num_experts]``.
        num_experts: experts to choose from.
        top_k: experts chosen by a token.
        valid: bool ``[batch, seq_local]``, False for padding, which does not count.

    Returns:
        How often each expert was chosen ``[num_experts]``, the sum of its probabilities ``[num_experts]``, and the
        number of tokens times layers ``[1]``.
    """
    device = gate_logits[0].device
    chosen, probability = (torch.zeros(num_experts, device=device) for _ in range(2))
    tokens = torch.zeros(1, device=device)
    for gate in gate_logits:
        p = torch.softmax(gate.to(device), dim=-1)  # [tokens, num_experts]
        weight = torch.ones(len(p), device=device) if valid is None else valid.reshape(-1).to(device).float()
        experts = p.detach().topk(top_k, dim=-1).indices  # [tokens, top_k]
        chosen = chosen.index_add(0, experts.reshape(-1), weight.repeat_interleave(top_k))
        probability = probability + (p.float() * weight[:, None]).sum(0)
        tokens = tokens + weight.sum()
    return chosen, probability, tokens
