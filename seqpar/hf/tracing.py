"""Which layers of a transformers model let tokens see each other, found by running it on a few tokens.

Every attention function that the model asks transformers' interface for is replaced by one in which a token sees
itself alone. Whatever still carries one token to another mixes tokens outside of the interface, under whatever name:
where one token of the input is changed, the outputs of all other tokens must stay the same.

The model's weights are not read and not moved: they may be on a GPU, on the meta device, quantized or sharded. During
the run every parameter is a view of a few kilobytes of numbers, and linear layers and embeddings, which are most of a
model, are replaced by cheap functions of each token. So the cost does not depend on the size of the weights. Of layers
that are alike, only the first one runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

from .latent import expand, hands_on_latents
from .state import NAME

_CHANGED = (0, 4, 10)  # the token that is changed, by row; the row before these is unchanged
_ROWS = len(_CHANGED) + 1
_LENGTHS = (11, 13, 17, 19, 23, 29)  # of which one is no other dimension of the model
_TOLERANCE = 1e-4
_CHANNELS = 1024  # of a tensor that are looked at, spread over all of them
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_SMALL = 1 << 16  # elements of a parameter that is copied

MaskedLayer = tuple[nn.Module, bool | None, int | None]  # an attention layer, its is_causal and its sliding_window


@dataclass
class Trace:
    """What the model did.

    Attributes:
        attends: the modules that called the attention interface.
        masked: each of them with the ``is_causal`` and the ``sliding_window`` that it passed.
        mixes: name and class of the innermost module whose output for a token depends on other tokens, or None.
        pools: name and class of the innermost module that returns one vector for all tokens, or None.
        error: why the model could not be run; None if it was.
    """

    attends: list[nn.Module] = field(default_factory=list)
    masked: list[MaskedLayer] = field(default_factory=list)
    mixes: tuple[str, str] | None = None
    pools: tuple[str, str] | None = None
    error: Exception | None = None


def attend_to_own_token(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention function in which each token sees itself alone, with all of its query, key and value."""
    if hands_on_latents(module):
        k, v = expand(module, k, v)
    groups = q.shape[1] // k.shape[1]
    token = v + k.mean(-1, keepdim=True)  # [batch, kv_heads, seq, v_head_dim]
    out = token.repeat_interleave(groups, dim=1) + q.mean(-1, keepdim=True)
    return out.transpose(1, 2).contiguous().to(v.dtype), None


@torch.no_grad()
def trace_tokens(root: PreTrainedModel) -> Trace:
    """Run ``root`` on a few tokens, and follow what each token depends on. Nothing of it changes."""
    trace = Trace()
    sizes = {n for p in (*root.parameters(), *root.buffers()) for n in p.shape}
    length = next((n for n in _LENGTHS if n not in sizes), _LENGTHS[0])
    names = {module: name for name, module in root.named_modules()}

    one_a_row: list[tuple[Tensor, nn.Module]] = []
    running: list[nn.Module] = []  # the modules whose forward is under way, innermost last

    def mixed_in(module: nn.Module) -> None:
        if trace.mixes is None:
            trace.mixes = names.get(module, ""), type(module).__name__

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        # The forward that calls this module has mixed what it gives to it.
        if trace.mixes is None and any(_depends_on_others(x, length) for x in _tensors((*args, *kwargs.values()))):
            mixed_in(running[-1] if running else root)
        running.append(module)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()
        for x in _tensors(output):
            if x.dim() == 2 and len(x) == _ROWS:
                one_a_row.append((x, module))
            if trace.mixes is None and _depends_on_others(x, length):
                mixed_in(module)

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        trace.attends.append(module)
        trace.masked.append((module, kwargs.get("is_causal"), kwargs.get("sliding_window")))
        if any(_depends_on_others(x.transpose(1, 2), length) for x in (q, k, v)):
            mixed_in(module)
        return attend_to_own_token(module, q, k, v)

    with ExitStack() as stack:
        try:
            stack.enter_context(_substitutes(root))
            stack.enter_context(torch.random.fork_rng([]))
            # So few tokens that threads would wait for one another most of the time.
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            ids = _token_ids(root, length)
            for module in root.modules():
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after).remove)
            alike = _run_one_of_each_kind(root)
            stack.enter_context(replaced_interface(lambda name, default: attend))
            stack.enter_context(_TokenwiseFunctions(max(root.config.get_text_config().vocab_size, _SMALL)))
            positions = torch.arange(length)[None].expand(_ROWS, -1)
            output = root(input_ids=ids, position_ids=positions, **_without_cache(root))
            attends = set(trace.attends)
            for layer, first in alike:
                pairs = zip(layer.modules(), first.modules(), strict=True)
                trace.attends += [m for m, same in pairs if same in attends and m not in attends]
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


def _run_one_of_each_kind(root: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Let each layer of a list return what the first one like it returned, if its arguments have the same shapes.

    The forwards stay replaced: ``_substitutes`` puts them back. Returns each such layer, with the first one like it.
    """
    alike = []
    lists = [(name, m) for name, m in root.named_modules() if isinstance(m, nn.ModuleList)]
    for name, layers in lists:
        if any(name.startswith(outer + ".") for outer, _ in lists):
            continue
        first: dict[Any, tuple[nn.Module, dict[Any, Any]]] = {}
        for layer in layers:
            like, results = first.setdefault(_kind(layer), (layer, {}))
            vars(layer)["forward"] = _memoized(layer.forward, results)
            if like is not layer:
                alike.append((layer, like))
    return alike


def _memoized(forward: Callable[..., Any], results: dict[Any, Any]) -> Callable[..., Any]:
    """``forward``, or the result in ``results`` of another one with arguments of the same shapes."""

    def run_once(*args: Any, **kwargs: Any) -> Any:
        shapes = str([tuple(x.shape) if isinstance(x, Tensor) else type(x) for x in tree_leaves((args, kwargs))])
        if shapes not in results:
            results[shapes] = forward(*args, **kwargs)
        return tree_map_only(Tensor, Tensor.clone, results[shapes])  # models add to it in place

    return run_once


def _kind(layer: nn.Module) -> Any:
    """Equal for layers that differ in their index and in the values of their weights only."""
    kind = []
    for name, module in layer.named_modules():
        held = {"type": type(module), "name": name}
        config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
        types = getattr(config, "layer_types", None)
        if types and isinstance(index, int) and index < len(types):
            held["layer type"] = types[index]
        for key, x in vars(module).items():
            if key in _OF_EVERY_MODULE or key in ("layer_idx", "layer_id"):
                continue
            if isinstance(x, str | int | float | list | tuple | None):
                held[key] = str(x)
            else:  # such as a forward of its own
                held[key] = _function(x) if callable(x) else type(x)
        for key, x in (*module._parameters.items(), *module._buffers.items()):
            held[key] = None if x is None else tuple(x.shape)
        kind.append(tuple(held.items()))
    return tuple(kind)


def _function(x: Any) -> Any:
    """Equal for one function with the same options, bound to several modules."""
    if isinstance(x, partial):
        return _function(x.func), str(x.keywords)
    return id(getattr(x, "__func__", x))


def _without_cache(root: PreTrainedModel) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(root.forward).parameters else {}


def _token_ids(root: PreTrainedModel, length: int) -> Tensor:
    """int64 ``[rows, length]``: rows that differ from the first in one token. No special token is among them."""
    config = root.config.get_text_config()
    special: set[int | None] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = getattr(config, name, None)
        special.update(ids if isinstance(ids, list) else [ids])
    usual = [i for i in range(min(config.vocab_size, 1000)) if i not in special][3 : length + 4]
    tokens = torch.tensor([usual[i % (len(usual) - 1)] for i in range(length)]).repeat(_ROWS, 1)
    for row, token in enumerate(_CHANGED, start=1):
        tokens[row, token] = usual[-1]
    return tokens


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

    ``x`` is ``[rows, ..., length, ...]``. Of other shapes nothing is known: experts have tokens in another order.
    """
    if x.dim() < 2 or x.shape[0] != _ROWS or list(x.shape[1:]).count(length) != 1:
        return False
    x = x.movedim(x.shape[1:].index(length) + 1, 1).reshape(_ROWS, length, -1)
    x = x[:, :, :: -(-x.shape[2] // _CHANNELS) or 1]
    change = (x[1:] - x[:1]).abs().amax(2) if x.shape[2] else x.new_zeros(len(_CHANGED), length)  # [rows - 1, length]
    change[range(len(_CHANGED)), _CHANGED] = 0.0
    return float(change.max()) > _TOLERANCE * max(float(x[0].abs().max()), 1e-6) if x.shape[2] else False


@contextmanager
def replaced_interface(replace: Callable[[str, Any], Any]) -> Iterator[None]:
    """In the block, models that look up an attention function get ``replace(implementation, function)``."""
    # transformers 5.0 has no get_interface: models index the interface, and take "eager" from their own file.
    name = "get_interface" if hasattr(AttentionInterface, "get_interface") else "__getitem__"
    given = getattr(AttentionInterface, name)

    def look_up(self: AttentionInterface, attn_implementation: str, *default: Any) -> Any:
        return replace(attn_implementation, given(self, attn_implementation, *default))

    # On the class, because some model files have an interface object of their own.
    setattr(AttentionInterface, name, look_up)
    try:
        yield
    finally:
        setattr(AttentionInterface, name, given)


@contextmanager
def _substitutes(root: PreTrainedModel) -> Iterator[None]:
    """In the block, parameters and buffers are small substitutes on the CPU, and no hook runs."""
    with ExitStack() as stack:
        shared: dict[int, Tensor] = {}
        for module in root.modules():
            # transformers adds attributes and hooks of its own at a model's first forward.
            stack.callback(_restore, vars(module), dict(vars(module)))
            for held in (x for x in vars(module).values() if isinstance(x, dict)):
                stack.callback(_restore, held, dict(held))
            for store in (module._parameters, module._buffers):
                for name, x in list(store.items()):
                    if x is not None and (x.device.type != "cpu" or store is module._parameters):
                        store[name] = shared.setdefault(id(x), _substitute(x))
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
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


def _restore(values: dict[Any, Any], before: dict[Any, Any]) -> None:
    values.clear()
    values.update(before)


def _substitute(x: Tensor) -> Tensor:
    """A tensor of the shape of ``x`` whose rows overlap in memory, so that it takes a few kilobytes."""
    if not x.is_floating_point():
        return torch.zeros((), dtype=x.dtype).expand(x.shape)
    shape = tuple(x.shape)
    size = sum(n - 1 for n in shape) + 1
    values = torch.sin(torch.arange(size) * 1.7 + 0.3) * 0.5 + 0.1
    overlapping = torch.as_strided(values, shape, (1,) * len(shape))
    if x.numel() <= _SMALL:
        overlapping = overlapping.contiguous()  # as model code that calls view() expects
    # nn.Parameter, because modules accept nothing else where a parameter was.
    return nn.Parameter(overlapping, requires_grad=False)


# By a weight that overlaps in memory these would first write it out.
_PRODUCTS = (torch.bmm, torch.matmul, Tensor.bmm, Tensor.matmul, Tensor.__matmul__)


def _overlaps(x: Any) -> bool:
    """Whether it is a large parameter's substitute, or a part of one."""
    return isinstance(x, Tensor) and x.dim() > 1 and x.untyped_storage().nbytes() < x.numel() * x.element_size()


class _TokenwiseFunctions(TorchFunctionMode):
    """Linear layers and embeddings, each replaced by a cheap function of the token alone.

    Args:
        vocabulary: the features of a linear layer that get no values of their own: there are too many logits.
    """

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            features = (args[1] if len(args) > 1 else kwargs["weight"]).shape[0]
            x = args[0] if args else kwargs["input"]
            if features >= self.vocabulary:
                return _linear(x, 1).expand(*x.shape[:-1], features)
            return _linear(x, features)
        if func in _PRODUCTS and len(args) == 2 and _overlaps(args[1]):  # experts that are no linear layers
            x, weight = args
            return _linear(x.expand(*weight.shape[: weight.dim() - x.dim()], *x.shape), weight.shape[-1])
        if func is F.embedding:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            return _embedding(args[0] if args else kwargs["input"], weight.shape[-1])
        return func(*args, **kwargs)


def _linear(x: Tensor, features: int) -> Tensor:
    """``[..., features]``, of ``x [..., channels]``: sums of two channels and the mean, each with its own factor."""
    x = x + 0.5 * x.roll(3, -1) + x.mean(-1, keepdim=True)
    copies = -(-features // x.shape[-1])
    out = x.repeat(*[1] * (x.dim() - 1), copies)[..., :features]
    return out * (1 + 0.3 * torch.cos(torch.arange(features) * 0.9))


def _embedding(ids: Tensor, channels: int) -> Tensor:
    """``[..., channels]``, other values for each id."""
    return torch.sin((ids[..., None] + 1) * (torch.arange(channels) * 0.37 + 1.0))
