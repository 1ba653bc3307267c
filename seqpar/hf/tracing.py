"""Which layers of a transformers model let tokens see each other, found by running it on a few tokens.

Every attention function that the model asks transformers' interface for is replaced by one in which a token sees
itself alone. Whatever still carries one token to another mixes tokens outside of the interface, under whatever name:
where one token of the input is changed, the outputs of all other tokens must stay the same.

The model's weights are not read and not moved: they may be on a GPU, on the meta device, quantized or sharded. During
the run every parameter is a view of a few kilobytes of numbers, and linear layers and embeddings, which are most of a
model, are replaced by cheap functions of each token. So the cost does not depend on the size of the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .state import NAME

_CHANGED = (0, 4, 10)  # the token that is changed, by row; the row before these is unchanged
_ROWS = len(_CHANGED) + 1
_LENGTHS = (11, 13, 17, 19, 23, 29)  # of which one is no other dimension of the model
_TOLERANCE = 1e-4


@dataclass
class Trace:
    """What the model did.

    Attributes:
        attends: the modules that called the attention interface.
        mixes: name and class of the innermost module whose output for a token depends on other tokens, or None.
        pools: name and class of the innermost module that returns one vector for all tokens, or None.
        error: why the model could not be run; None if it was.
    """

    attends: list[nn.Module] = field(default_factory=list)
    mixes: tuple[str, str] | None = None
    pools: tuple[str, str] | None = None
    error: Exception | None = None


def attend_to_own_token(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention function in which each token sees itself alone, with all of its query, key and value."""
    groups = q.shape[1] // k.shape[1]
    token = v + k.mean(-1, keepdim=True)  # [batch, kv_heads, seq, v_head_dim]
    out = token.repeat_interleave(groups, dim=1) + q.mean(-1, keepdim=True)
    return out.transpose(1, 2).to(v.dtype), None


@torch.no_grad()
def trace_tokens(root: PreTrainedModel) -> Trace:
    """Run ``root`` on a few tokens, and follow what each token depends on. Nothing of it changes."""
    trace = Trace()
    sizes = {n for p in (*root.parameters(), *root.buffers()) for n in p.shape}
    length = next((n for n in _LENGTHS if n not in sizes), _LENGTHS[0])
    names = {module: name for name, module in root.named_modules()}

    one_a_row: list[tuple[Tensor, nn.Module]] = []

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        for x in _tensors(output):
            if x.dim() == 2 and len(x) == _ROWS:
                one_a_row.append((x, module))
            if trace.mixes is None and _depends_on_others(x, length):
                trace.mixes = names[module], type(module).__name__

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        trace.attends.append(module)
        return attend_to_own_token(module, q, k, v)

    with ExitStack() as stack:
        try:
            stack.enter_context(_substitutes(root))
            stack.enter_context(torch.random.fork_rng([]))
            ids = _token_ids(root, length)
            for module in root.modules():
                handle = module.register_forward_hook(watch)
                stack.callback(handle.remove)
            ALL_ATTENTION_FUNCTIONS.get_interface = lambda name, default: attend
            stack.callback(ALL_ATTENTION_FUNCTIONS.__dict__.pop, "get_interface")
            stack.enter_context(_TokenwiseFunctions())
            positions = torch.arange(length)[None].expand(_ROWS, -1)
            output = root(input_ids=ids, position_ids=positions, **_without_cache(root))
            if trace.mixes is None and any(_depends_on_others(x, length) for x in _tensors(output)):
                trace.mixes = "", type(root).__name__
            for x in _tensors(output):
                pooled = next((module for y, module in one_a_row if y is x), None)
                if pooled is not None and trace.pools is None:
                    trace.pools = names[pooled], type(pooled).__name__
            if not any(bool(x.isfinite().all()) for x in _tensors(output)):
                raise ValueError("its outputs are not finite")
        except Exception as error:
            trace.error = error
    return trace


def _without_cache(root: PreTrainedModel) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(root.forward).parameters else {}


def _token_ids(root: PreTrainedModel, length: int) -> Tensor:
    """int64 ``[rows, length]``: rows that differ from the first in one token. No special token is among them."""
    config = root.config.get_text_config()
    special = {getattr(config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    usual = [i for i in range(3, config.vocab_size) if i not in special][: length + 1] or [0, 1]
    ids = torch.tensor([usual[i % (len(usual) - 1)] for i in range(length)]).repeat(_ROWS, 1)
    for row, token in enumerate(_CHANGED, start=1):
        ids[row, token] = usual[-1]
    return ids


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, tuple | list):
        for x in output:
            yield from _tensors(x)
    elif hasattr(output, "values"):
        for x in output.values():
            yield from _tensors(x)


def _depends_on_others(x: Tensor, length: int) -> bool:
    """Whether a token's values in ``x`` change where another token was changed.

    ``x`` is ``[rows, ..., length, ...]`` or ``[rows * length, ...]``. Of other shapes nothing is known.
    """
    if x.dim() and x.shape[0] == _ROWS * length:
        x = x.reshape(_ROWS, length, *x.shape[1:])
    if x.dim() < 2 or x.shape[0] != _ROWS or list(x.shape[1:]).count(length) != 1:
        return False
    x = x.movedim(x.shape[1:].index(length) + 1, 1).flatten(2).nan_to_num() if x.dim() > 2 else x[..., None]
    size = float(x.abs().max())
    for row, token in enumerate(_CHANGED, start=1):
        others = torch.arange(length) != token
        if float((x[row, others] - x[0, others]).abs().max()) > _TOLERANCE * max(size, 1e-6):
            return True
    return False


@contextmanager
def _substitutes(root: PreTrainedModel) -> Iterator[None]:
    """In the block, parameters and buffers are small substitutes on the CPU, and no hook runs."""
    with ExitStack() as stack:
        shared: dict[int, Tensor] = {}
        for module in root.modules():
            for store in (module._parameters, module._buffers):
                before = dict(store)
                stack.callback(store.update, before)
                for name, x in before.items():
                    if x is not None and (x.device.type != "cpu" or store is module._parameters):
                        store[name] = shared.setdefault(id(x), _substitute(x))  # type: ignore[assignment]
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                kept = dict(hooks)
                stack.callback(hooks.update, kept)
                hooks.clear()
            stack.callback(setattr, module, "training", module.training)
            module.training = False
        configs = {id(x): x for m in root.modules() for x in vars(m).values() if isinstance(x, PreTrainedConfig)}
        for config in configs.values():
            for name, value in (("_attn_implementation_internal", NAME), ("_experts_implementation_internal", "eager")):
                if hasattr(config, name):
                    stack.callback(setattr, config, name, getattr(config, name))
                    setattr(config, name, value)
        no_mask = ALL_MASK_ATTENTION_FUNCTIONS
        stack.callback(no_mask._local_mapping.pop, NAME, None)
        no_mask[NAME] = lambda *args, **kwargs: None
        yield


def _substitute(x: Tensor) -> Tensor:
    """A tensor of the shape of ``x`` whose rows overlap in memory, so that it takes a few kilobytes."""
    if not x.is_floating_point():
        return torch.zeros((), dtype=x.dtype).expand(x.shape)
    shape = tuple(x.shape)
    size = sum(n - 1 for n in shape) + 1
    values = torch.sin(torch.arange(size) * 1.7 + 0.3) * 0.5 + 0.1
    # nn.Parameter, because modules accept nothing else where a parameter was.
    return nn.Parameter(torch.as_strided(values, shape, (1,) * len(shape)), requires_grad=False)


class _TokenwiseFunctions(TorchFunctionMode):
    """Linear layers and embeddings, each replaced by a cheap function of the token alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(args[0], (args[1] if len(args) > 1 else kwargs["weight"]).shape[0])
        if func is F.embedding:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            return _embedding(args[0] if args else kwargs["input"], weight.shape[-1])
        return func(*args, **kwargs)


def _linear(x: Tensor, features: int) -> Tensor:
    """``[..., features]``, of ``x [..., channels]``: each value is the sum of two channels of different weight."""
    channel = torch.arange(features)
    one, two = channel * 7 % x.shape[-1], (channel * 3 + 1) % x.shape[-1]
    weight = torch.cos(channel * 0.9)
    return x[..., one] * (weight + 0.2) + x[..., two] * (0.8 - weight) + x.mean(-1, keepdim=True)


def _embedding(ids: Tensor, channels: int) -> Tensor:
    """``[..., channels]``, other values for each id."""
    return torch.sin((ids[..., None] + 1) * (torch.arange(channels) * 0.37 + 1.0))
