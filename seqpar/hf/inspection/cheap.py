"""Makes a model of transformers cheap to run on a few tokens, whatever its weights are and wherever they are.

Each parameter is a view of a few kilobytes of numbers on the CPU, cheap functions of each token replace linear layers
and embeddings, and of several layers of the same kind only the first one runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ...patching.replaced import replaced
from ...patching.substitutes import count, is_quantized, linear, substitute, substituted
from ..state import NAME

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@contextmanager
def substitutes(root: PreTrainedModel, mask_calls: list[dict[str, Any]]) -> Iterator[None]:
    """In the block, small tensors on the CPU replace the weights, and the model has no hooks.

    The mask interface returns no mask, and appends the arguments of its calls to ``mask_calls``.
    """
    with ExitStack() as stack:
        parallel = {m for m in root.modules() if any(isinstance(x, DTensor) for x in m._parameters.values())}
        stack.enter_context(substituted(root, _on_cpu))
        for module in root.modules():
            if module in parallel and not is_quantized(module):
                # transformers' tensor parallelism sets a forward that converts from and to DTensors.
                vars(module).pop("forward", None)
            # transformers installs the hooks that record outputs in a model's first forward, and again without this.
            vars(module).pop("_output_capturing_hooks_installed", None)
            module.training = False
        for config in configs(root):
            values = ("_attn_implementation_internal", NAME), ("_experts_implementation_internal", "eager")
            for name, value in (*values, ("use_cache", False)):
                if hasattr(config, name):
                    stack.enter_context(replaced(config, **{name: value}))
        stack.callback(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping.pop, NAME, None)
        ALL_MASK_ATTENTION_FUNCTIONS[NAME] = lambda *args, **kwargs: mask_calls.append(kwargs)
        yield


def _on_cpu(x: Tensor, is_parameter: bool) -> Tensor:
    return substitute(x) if is_parameter or x.device.type != "cpu" else x


def configs(root: PreTrainedModel) -> list[PreTrainedConfig]:
    configs = {id(x): x for m in root.modules() for x in vars(m).values() if isinstance(x, PreTrainedConfig)}
    return list(configs.values())


# These functions would make a contiguous copy of a weight whose rows overlap in memory.
_PRODUCTS = (torch.bmm, torch.matmul, Tensor.bmm, Tensor.matmul, Tensor.__matmul__)
_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_NO_OPTIONS = [None, None, -100, None, "mean", 0.0]  # weight, size_average, ignore_index, reduce, reduction, smoothing


class TokenwiseFunctions(TorchFunctionMode):
    """Replaces linear layers, products with large weights, and embeddings by cheap functions of each token.

    All logits, the outputs of a linear layer with at least ``vocabulary`` features, have the same value.
    With a ``last_index``, ``torch.arange(length)`` counts from 0 to ``last_index`` in ``length`` numbers.
    With a list of ``cross_entropies``, ``F.cross_entropy`` without options is 0, and appends the 0, its logits and its
    labels to the list.
    """

    def __init__(self, vocabulary: int, length: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.length = length
        self.last_index: int | None = None
        self.cross_entropies: list[tuple[Tensor, Tensor, Tensor]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            features = (args[1] if len(args) > 1 else kwargs["weight"]).shape[0]
            x = args[0] if args else kwargs["input"]
            if features >= self.vocabulary:
                return linear(x, 1).expand(*x.shape[:-1], features)
            return linear(x, features)
        if func in _PRODUCTS and len(args) == 2 and args[1].untyped_storage().nbytes() < args[1].nbytes:
            x, weight = args  # experts whose weights are one tensor, whose rows overlap
            return linear(x.expand(*weight.shape[: weight.dim() - x.dim()], *x.shape), weight.shape[-1])
        if func is F.embedding:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            ids = args[0] if args else kwargs["input"]  # [...], to [..., channels] with different values for each id
            return torch.sin((ids[..., None] + 1) * (count(weight.shape[-1]) * 0.37 + 1.0))
        if func is F.cross_entropy and self.cross_entropies is not None:
            call = _CROSS_ENTROPY.bind(*args, **kwargs)
            call.apply_defaults()
            logits, labels, *options = call.args
            if options == _NO_OPTIONS:
                self.cross_entropies.append((torch.zeros((), device="cpu"), logits, labels))
                return self.cross_entropies[-1][0]
        result = func(*args, **kwargs)
        if func is torch.arange and self.last_index is not None and result.shape == (self.length,):
            return (result.long() * self.last_index // (self.length - 1)).to(result.dtype)
        return result


def run_one_of_each_kind(root: nn.Module) -> tuple[list[tuple[nn.Module, nn.Module]], list[dict[Any, Any]]]:
    """Replace the forward of layers in lists, so that only the first layer of each kind runs.

    The other layers return its results (0.6 s instead of 20 s for a model of 80 layers). Returns each of them with the
    first layer of its kind, and the tables of the results. ``substitutes`` restores the forwards.
    """
    same_kind, tables = [], []
    lists = [(name, m) for name, m in root.named_modules() if isinstance(m, nn.ModuleList)]
    for name, layers in lists:
        if any(name.startswith(outer + ".") for outer, _ in lists):
            continue
        first_of_kind: dict[Any, tuple[nn.Module, dict[Any, Any]]] = {}
        for layer in layers:
            first, results = first_of_kind.setdefault(_kind(layer), (layer, {}))
            vars(layer)["forward"] = _memoized(layer.forward, results)
            if first is not layer:
                same_kind.append((layer, first))
        tables += [results for _, results in first_of_kind.values()]
    return same_kind, tables


def _memoized(forward: Callable[..., Any], results: dict[Any, Any]) -> Callable[..., Any]:
    def run_once(*args: Any, **kwargs: Any) -> Any:
        shapes = str([tuple(x.shape) if isinstance(x, Tensor) else type(x) for x in tree_leaves((args, kwargs))])
        if shapes not in results:
            results[shapes] = forward(*args, **kwargs)
        return tree_map_only(Tensor, Tensor.clone, results[shapes])  # a copy, because models change it in place

    return run_once


def _kind(layer: nn.Module) -> Any:
    """Equal for layers that differ only in their index and in the values of their weights."""
    kind = []
    for name, module in layer.named_modules():
        properties = {"type": type(module), "name": name}
        config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
        types = getattr(config, "layer_types", None)
        if types and isinstance(index, int) and index < len(types):
            properties["layer type"] = types[index]
        for key, x in vars(module).items():
            if key in _OF_EVERY_MODULE or key in ("layer_idx", "layer_id"):
                continue
            if isinstance(x, str | int | float | list | tuple | None):
                properties[key] = str(x)
            else:  # for example a forward that accelerate has set on the instance
                properties[key] = _function_key(x) if callable(x) else type(x)
        for key, x in (*module._parameters.items(), *module._buffers.items()):
            properties[key] = None if x is None else tuple(x.shape)
        kind.append(tuple(properties.items()))
    return tuple(kind)


def _function_key(x: Any) -> Any:
    """Equal for the same function with the same options, to whatever module it is bound."""
    if isinstance(x, partial):
        return _function_key(x.func), str(x.keywords)
    return id(getattr(x, "__func__", x))
