"""How ``verify`` runs a model: what it records, and the states of the model and of its process groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    causal_mask_function,
    eager_mask,
    packed_sequence_mask_function,
)

from ...comm.communicator import existing_communicators
from ...layers.holders import is_flattened
from ...patching.replaced import replaced
from ...ranks.rendezvous import group_timeout
from ...verification.gradients import StepResult
from ...verification.step import unchanged
from ..calls.attention import scale_of
from ..calls.per_rank import on_this_rank
from ..inspection.support import attention_layers, parameters_of, text_model
from ..inspection.trial import replaced_interface
from ..losses.loss import restore_loss_function
from ..mechanisms.indexers import indexers
from ..mechanisms.key_values import has_latent_kv, recorded_expansion
from ..mechanisms.mixers import documents_apart
from ..state import Patch, Settings

# The libraries whose modules are known to work with this package.
LIBRARIES = ("accelerate", "bitsandbytes", "deepspeed", "peft", "torch", "torchao", "transformers", "trl")
_INPUTS = ("input_ids", "position_ids", "labels")

AttentionFunction = Callable[..., tuple[Tensor, Any]]


class TensorPlace(NamedTuple):
    """Where a tensor was recorded."""

    layer: str  # the name of the attention layer; empty for the model itself
    quantity: str  # which tensor of the layer it is, such as "query" or "output"


class RecordedCall(NamedTuple):
    """A call of the attention function that transformers' ``AttentionInterface`` returns."""

    layer: str  # the name of the attention layer
    implementation: str  # the name of the attention function, as in the model's config
    tokens: int  # the number of queries
    description: str  # the other properties of the call that must be the same on every rank


class PinnedExperts(TorchFunctionMode):
    """Records to which experts one run routes each token, and routes it to the same experts in another run (``pins``).

    Otherwise rounding could route a token to another expert in half precision, and its output would differ by far more
    than rounding error. The experts are the result of ``torch.topk``, as in the routers of transformers.
    """

    def __init__(
        self,
        pins: bool,  # whether the topk of this run returns the recorded ``experts``, or records them
        experts: list[Tensor],  # for each call the indices, [rows * seq, k] or [rows, seq, k]
        positions: Tensor,  # int64 [seq_local], the tokens that this run computes
        seq_len: int,  # of the recorded run
    ) -> None:
        super().__init__()
        self.pins, self.experts, self.positions, self.seq_len = pins, experts, positions, seq_len
        self._recorded = iter(experts)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or indexers.now is not None:
            return result
        if not self.pins:
            self.experts.append(result[1])
            return result
        full, shape = next(self._recorded, None), result[1].shape
        if full is None or full.numel() * len(self.positions) != result[1].numel() * self.seq_len:
            return result  # not a choice for each token
        per_token = full.view(-1, self.seq_len, shape[-1]).index_select(1, self.positions.to(full.device))
        indices = per_token.reshape(shape)
        return torch.return_types.topk((args[0].gather(-1, indices), indices))


class Recording:
    """Copies on the CPU of what one forward and backward of a model computed, in the order of the forward."""

    def __init__(self, root: PreTrainedModel) -> None:
        self.root = root
        self.result = StepResult(float("nan"), {})
        # input_ids, position_ids and labels, as the model's forward received them. With a tower, position_ids are the
        # ones that the text model received.
        self.inputs: dict[str, Tensor] = {}
        # Float [batch, seq, ...]: for each attention layer its input, query, key, value, attention and output; the
        # model's last hidden states; and, with a tower, the embeddings that the text model received. A parallelized
        # layer with latent attention has latents and rotated keys instead of key and value; on one device it has both.
        self.tensors: dict[TensorPlace, Tensor] = {}
        self.gradients: dict[TensorPlace, Tensor] = {}  # of the loss, with respect to these tensors
        self.calls: list[RecordedCall] = []
        # for each layer, the module and the keyword arguments of its call of the attention function
        self.options: dict[str, tuple[nn.Module, dict[str, Any]]] = {}
        self._names = {module: name for name, module in root.named_modules()}
        self._in_towers = {*root.modules()} - {*text_model(root).modules()}

    def attend(
        self, implementation: str, function: AttentionFunction, substitute: AttentionFunction | None,
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        """Record a call of the attention function ``function``, and call it or its ``substitute``."""
        if module in self._in_towers:
            return function(module, q, k, v, *args, **kwargs)
        layer = self._names.get(module, type(module).__name__)
        plain = {
            name: x for name, x in kwargs.items() if isinstance(x, str | int | float | bool) and name != "max_length_q"
        }
        description = f"{[(x.shape[0], x.shape[1], x.shape[3], x.dtype) for x in (q, k, v)]} {sorted(plain.items())}"
        self.calls.append(RecordedCall(layer, implementation, q.shape[2], description))
        self.options[layer] = module, {"attention_mask": args[0] if args else None, **kwargs}
        self._record(layer, "query", q, token_dim=2)
        if has_latent_kv(module):
            self.record_latents(module, k, v)
        else:
            # On one device, the rows that a layer has compressed from several tokens come after the keys of the tokens.
            self._record(layer, "key", k, token_dim=2, tokens=q.shape[2])
            self._record(layer, "value", v, token_dim=2, tokens=q.shape[2])
        out, weights = (substitute or function)(module, q, k, v, *args, **kwargs)
        self._record(layer, "attention", out)
        return out, weights

    def record_latents(self, layer: nn.Module, latents: Tensor, rotated: Tensor) -> None:
        self._record(self._names[layer], "latents", latents, token_dim=2)
        self._record(self._names[layer], "rotated keys", rotated, token_dim=2)

    def watch_inputs(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs |= {name: kwargs[name].detach().cpu() for name in _INPUTS if isinstance(kwargs.get(name), Tensor)}

    def watch_text_inputs(self, text: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(ids := kwargs.get("position_ids"), Tensor):
            self.inputs["position_ids"] = ids.detach().cpu()
        if isinstance(x := kwargs.get("inputs_embeds"), Tensor):
            self._record("", "embeddings", x)

    def watch_input(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._record_first(self._names[layer], "input", (*args, kwargs.get("hidden_states")))

    def watch_output(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._record_first(self._names[layer], "output", output if isinstance(output, tuple) else (output,))

    def watch_last(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        values = tuple(output.values()) if hasattr(output, "values") else output
        self._record_first("", "last hidden states", values if isinstance(values, tuple | list) else ())

    def _record_first(self, layer: str, quantity: str, values: Sequence[Any]) -> None:
        x = next((x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3), None)
        if x is not None:
            self._record(layer, quantity, x)

    def _record(self, layer: str, quantity: str, x: Tensor, token_dim: int = 1, tokens: int | None = None) -> None:
        """Record ``x``, with the tokens along ``token_dim``, and in backward its gradient, as ``[batch, seq, ...]``."""
        place, calls = TensorPlace(layer, quantity), 1
        while place in self.tensors:  # the module is called several times in a forward
            calls += 1
            place = TensorPlace(f"{layer}, call {calls}", quantity)
        self.tensors[place] = _on_cpu(x, token_dim, tokens)
        if x.requires_grad and torch.is_grad_enabled():
            x.register_hook(partial(self._record_gradient, place, token_dim, tokens))

    def _record_gradient(self, place: TensorPlace, token_dim: int, tokens: int | None, gradient: Tensor) -> None:
        self.gradients[place] = _on_cpu(gradient, token_dim, tokens)


def _on_cpu(x: Tensor, token_dim: int, tokens: int | None) -> Tensor:
    """``x [batch, seq, ...]`` on the CPU, in float32 or float64, with all tokens or the first ``tokens``."""
    x = x.detach().to("cpu", torch.promote_types(x.dtype, torch.float32))
    return x.transpose(1, token_dim)[:, :tokens]


@contextmanager
def recording(record: Recording, attend: AttentionFunction | None = None) -> Iterator[None]:
    """Record what the model computes in the block.

    ``attend`` is called instead of the model's attention functions, except in vision and audio towers.
    """
    root = record.root

    def record_calls(implementation: str, function: AttentionFunction, look_up: Any) -> AttentionFunction:
        return partial(record.attend, implementation, function, attend)

    layers = attention_layers(root).values()
    with ExitStack() as stack:
        stack.enter_context(root.register_forward_pre_hook(record.watch_inputs, with_kwargs=True))
        if (text := text_model(root)) is not root:
            stack.enter_context(text.register_forward_pre_hook(record.watch_text_inputs, with_kwargs=True))
        for layer in layers:
            stack.enter_context(layer.register_forward_pre_hook(record.watch_input, with_kwargs=True))
            stack.enter_context(layer.register_forward_hook(record.watch_output))
            stack.enter_context(recorded_expansion(layer, record.record_latents))
        if root.base_model is not root or root.get_output_embeddings() is None:  # the base model returns hidden states
            # This hook must run before the hook of ``parallelize``, which all-gathers the output of a base model.
            stack.enter_context(root.base_model.register_forward_hook(record.watch_last, prepend=True))
        stack.enter_context(replaced_interface(record_calls))
        yield


@contextmanager
def one_device(
    root: PreTrainedModel,
    patch: Patch,
    prepare: Callable[[dict[str, Any]], dict[str, Any]],  # the arguments of a call to the arguments of the forward
    documents: Tensor | None,  # int [batch, seq], the index of each token's document
) -> Iterator[None]:
    """In the block, ``root`` runs as without ``parallelize``, with transformers' eager attention and masks."""

    def before_forward(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return (), prepare({**dict(zip(parameters_of(root), args, strict=False)), **kwargs})

    with ExitStack() as stack:
        # Where the layers' ``is_causal`` differs from the model's mask, SDPA and eager attention differ too.
        implementation = "sdpa" if patch.causality_conflicts and patch.implementation == "sdpa" else "eager"
        stack.enter_context(on_this_rank(patch, implementation))
        if patch.settings.alibi_slopes is not None and implementation == "sdpa":
            raise ValueError(
                "alibi_slopes: one device would attend with SDPA, to which a layer says whether it is causal; "
                "verify the model without slopes"
            )
        stack.enter_context(
            replaced_interface(lambda name, function, _: partial(_attend_alone, patch.settings, function))
        )
        stack.callback(root.register_forward_pre_hook(before_forward, with_kwargs=True).remove)
        for module in patch.loss_functions:
            if (ours := restore_loss_function(module)) is not None:
                stack.callback(vars(module).__setitem__, "_loss_function", ours)
        # Only some models look for documents in ``position_ids``, and not in the way of ``shard_batch``.
        stack.enter_context(replaced(masking_utils, find_packed_sequence_indices=lambda *args, **kwargs: documents))
        if documents is not None:
            stack.enter_context(documents_apart(documents))
            # An entry of this instance takes precedence over the entry of the class.
            ALL_MASK_ATTENTION_FUNCTIONS[implementation] = partial(_mask_of_documents, documents)
            stack.callback(ALL_MASK_ATTENTION_FUNCTIONS.__delitem__, implementation)
        yield


def _attend_alone(
    settings: Settings, function: AttentionFunction, module: nn.Module, q: Tensor, k: Tensor, v: Tensor,
    attention_mask: Tensor | None, *args: Any, **kwargs: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """transformers' eager attention ``function`` with the softmax scale and the slopes of ``parallelize``."""
    if hasattr(module, "_seqpar"):  # not a layer of a tower
        kwargs["scaling"] = scale_of(settings, kwargs.get("scaling"), type(module).__name__)
        if settings.alibi_slopes is not None:
            slopes = torch.tensor(settings.alibi_slopes, dtype=q.dtype, device=q.device)[:, None, None]
            at = torch.arange(q.shape[2], device=q.device)
            bias = -slopes * (at[:, None] - at).abs()  # [h, s, s]
            attention_mask = bias[None] if attention_mask is None else attention_mask + bias
    return function(module, q, k, v, attention_mask, *args, **kwargs)


def _mask_of_documents(
    documents: Tensor, *args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any
) -> Tensor:
    kwargs["allow_is_bidirectional_skip"] = False
    same_document = packed_sequence_mask_function(documents.to(kwargs.get("device", "cpu")))
    mask: Tensor = eager_mask(*args, mask_function=and_masks(mask_function, same_document), **kwargs)
    return mask


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """In the block, ``model`` is in evaluation mode and not compiled. Afterwards its state is restored."""
    compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())
    with unchanged(model), ExitStack() as stack:
        for module in model.modules():
            if "max_seq_len_cached" in vars(module):  # of rotary embeddings of the type "dynamic"
                stack.callback(setattr, module, "max_seq_len_cached", module.max_seq_len_cached)
        if compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        model.eval()
        yield


@contextmanager
def deadline(group: ProcessGroup | None, seconds: float) -> Iterator[None]:
    """In the block, the timeout of collectives and messages between ranks is ``seconds``."""
    if group is None or dist.group.WORLD is None:
        yield
        return
    limit = timedelta(seconds=seconds)
    groups = list({id(g): g for g in (dist.group.WORLD, group, *existing_communicators())}.values())
    timeouts = {id(g): group_timeout(g) for g in groups}
    for g in groups:
        _set_timeout(g, limit)
    try:
        yield
    finally:
        # A communicator that was created inside the block gets the timeout of ``group``.
        for g in (*groups, *existing_communicators()):
            _set_timeout(g, timeouts.get(id(g), timeouts[id(group)]))


def _set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timeout)
        if hasattr(backend, "options") and hasattr(backend.options, "_timeout"):
            backend.options._timeout = timeout


def foreign_wrappers(model: nn.Module, root: nn.Module) -> bool:
    """Whether ``root`` is inside a module of a class that is not of transformers, peft, accelerate, TRL or torch."""
    name = next(name for name, module in model.named_modules() if module is root)
    parts = name.split(".") if name else []
    around = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts))]
    return any(type(module).__module__.split(".")[0] not in LIBRARIES for module in around)


def unsharded_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that every rank of the sequence holds in full, by name."""
    named = ((n, p) for n, p in root.named_parameters() if not isinstance(p, DTensor) and p.device.type != "meta")
    return {n: p for n, p in named if not is_flattened(p)}
