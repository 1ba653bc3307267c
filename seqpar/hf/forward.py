"""What happens around a parallelized model's forward: its own hooks, and the call that is under way."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .batch import BatchShard
from .decode import DecodeShard
from .refuse import predicts_in_place, uses_loss_function

if TYPE_CHECKING:
    from .generate import Prefill
    from .patch import Patch


@dataclass
class Forward:
    """One forward of a parallelized model. ``hidden``: what its output embedding was given, until a loss asks.
    ``labels``, ``items``: kept from a head that would make a loss of its own."""

    model: nn.Module
    patch: Patch
    shard: BatchShard | DecodeShard | None
    wants_loss: bool = False
    prefill: Prefill | None = None
    hidden: Tensor | None = None
    labels: Tensor | None = None
    items: Any = None


_calls: ContextVar[tuple[Forward, ...]] = ContextVar("seqpar_forwards", default=())


def current() -> Forward | None:
    """The innermost forward under way, or None."""
    calls = _calls.get()
    return calls[-1] if calls else None


def before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Take note of the call; a call without a shard generates.

    Raises:
        ValueError: labels or a whole sequence without a shard, or labels and ``logits_to_keep``.
    """
    from .generate import prepare

    patch: Patch = model._seqpar  # type: ignore[assignment]
    parameters = inspect.signature(model.forward).parameters
    kwargs = {**dict(zip(parameters, args, strict=False)), **kwargs}
    shard = kwargs.get("seqpar")
    call = Forward(model, patch, shard, wants_loss=kwargs.get("labels") is not None)
    if shard is not None:
        labels = kwargs.get("labels")
        kept = kwargs.get("logits_to_keep", 0)
        if labels is not None and (isinstance(kept, Tensor) or kept):
            raise ValueError(f"logits_to_keep={kept}: with labels the loss takes every token; leave it out")
        if labels is not None and shard.in_place is not None and predicts_in_place(model):
            kwargs["labels"] = shard.in_place[0].to(labels.device)
            kwargs["seqpar"] = call.shard = shard.unshifted()
        if labels is not None and not uses_loss_function(type(model)):
            call.labels, call.items = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        # A cache is on by default; it would only keep every layer's keys.
        if "use_cache" in parameters and kwargs.get("past_key_values") is None:
            kwargs["use_cache"] = False
    else:
        call.prefill = prepare(model, patch, kwargs)
        call.shard = kwargs["seqpar"]
    _calls.set((*_calls.get(), call))
    return (), kwargs


def after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Give the caller what it asked for: whole logits after a sharded prefill, none that were never made."""
    from .generate import finish
    from .logits import LazyLogits

    call = current()
    if call is None or call.model is not model:
        return None
    try:
        if call.labels is not None and output is not None:  # while the call is current: its wrappers count
            output = _with_loss(output, call, call.labels)
    finally:
        _calls.set(_calls.get()[:-1])
    if output is None:  # the forward raised
        return None
    if call.prefill is not None:
        return finish(output, call.prefill, call.patch)
    if isinstance(output, tuple):
        return tuple(x for x in output if not isinstance(x, LazyLogits))
    if isinstance(getattr(output, "logits", None), LazyLogits):
        return type(output)(**{name: x for name, x in output.items() if name != "logits"})
    return output if call.labels is not None else None


def _with_loss(output: Any, call: Forward, labels: Tensor) -> Any:
    """Its first value are the logits, one prediction a token."""
    logits = output[0] if isinstance(output, tuple) else output.to_tuple()[0]
    shard = call.shard if isinstance(call.shard, BatchShard) else None
    loss = call.patch.loss(logits, labels, num_items_in_batch=call.items, seqpar=shard)
    return (loss, *output) if isinstance(output, tuple) else type(output)(**{"loss": loss, **output})
