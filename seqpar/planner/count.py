"""``counted_shape``: the sizes of a model of transformers, counted in the model itself.

The model is made on the meta device, where it takes no memory, and runs on a few tokens there. What its layers pass to
attention gives heads and windows, their parameters give the widths, and PyTorch's formulas of FLOPs give the number of
weights that a token is multiplied by. If the sizes do not add up to the FLOPs and weights that are counted, the planner
does not understand one of the layers, and refuses the model.

Only mixers and the number of keys that an indexer chooses are read from entries of the configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..base.checks import check_int
from .attention import SelfAttention
from .chosen_keys import ChosenKeys
from .compressed_keys import CompressedKeys, Streams
from .mixer import Mixer
from .mixer_sizes import mixer_of
from .mlp import Mlp
from .part import LayerPart
from .shape import Layer, ModelShape

_NAME = "seqpar_count"  # of the functions of attention and of masks that record
_TOKENS = 16
_TOLERANCE, _TOLERANCE_OUTSIDE = 0.02, 0.05  # of the weights that multiply a token, in layers and outside of them
_SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "sliding_window",
)  # fmt: skip
T = TypeVar("T")


def counted_shape(config: Any, name: str) -> ModelShape:
    """The shape of the model that a configuration of transformers describes.

    Args:
        config: the entries of a ``config.json``, or a config object.
        name: the name of the model, for tables.

    Raises:
        ValueError: transformers is not installed or cannot make and run the model, entries contradict one another, or
            the planner does not understand a layer.
    """
    model = _model(config)
    entries = model.config.get_text_config().to_dict()
    run = _CountedRun(model, entries)
    layers = _layers(run)
    hidden = layers[0].hidden
    mixer = mixer_of(entries, hidden)
    rows = Counter(x.parts(mixer) for x in layers)
    directions = {call.causal for call in run.calls}
    if len(directions) > 1:
        raise ValueError(f"model: {run.of} has causal attention and other attention, which is not modelled")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    words = getattr(head, "weight", None)  # [vocab, hidden]
    if not isinstance(words, Tensor) or words.shape[1] != hidden:
        raise ValueError(f"model: {run.of} has no language model head that reads the layers' hidden states")
    shape = ModelShape(
        name,
        tuple(Layer(count, parts) for parts, count in rows.items()),
        vocab=len(words),
        tied=words is embedding.weight,
        causal=directions.pop(),
    )
    if not shape.mlp:
        raise ValueError(f"model: no layer of {run.of} has an MLP")
    of_layers = sum(run.flops(x.module) - x.flops_apart for x in layers)
    outside = run.flops() - sum(run.flops(x.module) for x in layers)
    head_weights = shape.vocab * hidden
    explained = sum(count * part.row.multiplied for count, part in shape.parts if not isinstance(part, Mixer))
    for what, counted, known, tolerance in (
        ("the layers", of_layers, explained, _TOLERANCE * explained),
        ("what is outside of layers", outside, head_weights, _TOLERANCE_OUTSIDE * run.flops()),
    ):
        if abs(counted - known) > tolerance:
            raise ValueError(
                f"model: in {what} of {run.of} a token is multiplied by {counted:,.0f} weights, but by {known:,.0f} in "
                "attention, MLPs and head of the sizes that the planner found; something there is not modelled"
            )
    weights = sum(p.numel() for p in model.parameters())
    if weights < shape.parameters:
        raise ValueError(
            f"model: {run.of} has {weights:,} weights, but layers of the sizes that the planner found have "
            f"{shape.parameters:,}; it has something that is not modelled"
        )
    return replace(shape, other_weights=weights - shape.parameters)


# The model and its run


def _model(config: Any) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "model: the sizes are counted in the model of the configuration, which needs transformers (pip install "
            "transformers); or pass a seqpar.ModelShape, or a name that `seqpar plan --help` lists"
        ) from error
    if isinstance(config, Mapping):
        kind = config.get("model_type")
        if kind not in transformers.CONFIG_MAPPING:
            version = transformers.__version__
            raise ValueError(f"model: model_type={kind!r} is none that transformers {version} has; add or correct it")
        config = _tried(partial(transformers.CONFIG_MAPPING[kind].from_dict, {**config}), f"model_type={kind!r}")
    autos = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForImageTextToText,
    )
    config = deepcopy(config)  # on which transformers sets the attention of the model
    text = config.get_text_config()
    for size in (text.attribute_map.get(name, name) for name in _SIZES):
        if isinstance(value := vars(text).get(size), int):
            check_int(f"model: {size}", value, 1)
    auto = next((auto for auto in autos if type(config) in auto._model_mapping), None)
    if auto is None:
        raise ValueError(f"model: transformers has no language model for model_type={config.model_type!r}")
    with torch.device("meta"):
        return _tried(partial(auto.from_config, config, attn_implementation="eager"), type(config).__name__, text)


def _tried(function: Callable[[], T], what: str, config: Any = None) -> T:
    """The result of a function of transformers, which raises errors of many types for entries that do not fit.

    If the error is about None, it names the entries of ``config`` that are None.
    """
    from transformers import PreTrainedConfig, logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # that kernels are missing does not matter here
    try:
        return function()
    except Exception as error:
        reason = " ".join(str(error).split())
        if config is not None and "None" in reason:
            common = vars(PreTrainedConfig())
            unset = ", ".join(name for name, x in vars(config).items() if x is None and name not in common)
            reason += f"; entries that are None: {unset}; set the sizes among them"
        raise ValueError(f"model: {what}: transformers raises {type(error).__name__}: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)


class _SeenAttention(NamedTuple):
    """What a layer passes to attention: the shapes of q, k and v, its window (0: none) and whether it is causal."""

    module: nn.Module
    q: torch.Size
    k: torch.Size
    v: torch.Size
    window: int
    causal: bool
    is_own: bool  # whether the layer chooses the keys, by indices or a mask of its own
    shares_kv: bool  # whether k and v are the same tensor


class _CountedRun(TorchDispatchMode):
    """A forward of a model on the meta device, of one row of ``_TOKENS`` tokens, and what it records."""

    def __init__(self, model: Any, entries: Mapping[str, Any]) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.entries, self.of = model, entries, type(model).__name__
        self.names = {module: name for name, module in model.named_modules()}
        self.calls: list[_SeenAttention] = []
        self.hidden = dict[nn.Module, int]()  # of the modules that ran
        self.streams = dict[nn.Module, int]()  # of the modules that ran with several vectors a token
        self._masks: list[tuple[Tensor, int, bool]] = []  # of the model: their window, and whether they are causal
        self._inside: list[nn.Module] = []  # that run at this moment, from the model to the innermost one
        self._flops = Counter[nn.Module]()
        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(_NAME, self._mask)
        hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in self.names]
        hooks += [module.register_forward_hook(self._leave) for module in self.names]
        tokens = torch.empty(1, _TOKENS, dtype=torch.int64, device="meta")
        try:
            model.set_attn_implementation(_NAME)
            model.set_experts_implementation("batched_mm")
            with torch.no_grad(), self:
                sizes = ", ".join(f"{name}={x}" for name in _SIZES if (x := entries.get(name)) is not None)
                _tried(partial(model.eval(), input_ids=tokens, use_cache=False), f"{self.of} of {sizes}")
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True  # models ask whether all of a mask is set: the row has one document and no padding
        if func is aten.topk.default and args[1] > args[0].shape[-1]:
            chosen = self.entries_of(args[1], "per") or args[1]
            raise ValueError(f"{chosen}: expected at most {args[0].shape[-1]}, of which as many are chosen")
        out = func(*args, **(kwargs or {}))
        if formula := flop_registry.get(func.overloadpacket):
            flops = formula(*args, **(kwargs or {}), out_val=out)
            self._flops.update(dict.fromkeys(self._inside, flops))
        return out

    def entries_of(self, value: int, word: str) -> str:
        """The entries of the configuration with a value, for errors."""
        return ", ".join(f"{name}={x}" for name, x in self.entries.items() if x == value and word in name)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(module)
        if module in self.hidden and self.hidden[module] and next(module.parameters(), None) is not None:
            self.hidden[module] *= -1  # it runs again
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        given = [x.shape for x in tensors if x.shape[:2] == (1, _TOKENS)]
        self.hidden.setdefault(module, next((shape[2] for shape in given if len(shape) == 3), 0))
        if given and len(given[0]) == 4:
            self.streams[module], self.hidden[module] = given[0][2:]

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._inside.pop()

    def _mask(self, *args: Any, mask_function: Any, local_size: int | None = None, **kwargs: Any) -> Tensor:
        mask = torch.empty(1, 1, _TOKENS, _TOKENS, dtype=torch.bool, device="meta")
        first, second = (torch.tensor(i, device="cpu") for i in range(2))
        try:
            causal = not mask_function(first, first, first, second)
        except NotImplementedError:  # the mask of chunks, which is causal, reads a tensor on the meta device
            causal = True
        self._masks.append((mask, local_size or 0, causal))
        return mask

    def _attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        found = next((x for x in self._masks if x[0] is attention_mask), None)
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        _, window, causal = found or (None, 0, bool(causal))
        is_own = attention_mask is not None and not found
        is_own = is_own or any("indices" in name and x is not None for name, x in kwargs.items())
        window = kwargs.get("sliding_window") or window
        self.calls.append(_SeenAttention(module, q.shape, k.shape, v.shape, window, causal, is_own, k is v))
        return q.new_empty(len(q), q.shape[2], q.shape[1], v.shape[3]), None

    def flops(self, module: nn.Module | None = None) -> float:
        """The number of weights that a token is multiplied by in a module, by default in the model."""
        return self._flops[module or self.model] / (2 * _TOKENS)


# Its layers


def _layers(run: _CountedRun) -> list[_CountedLayer]:
    if not run.calls:
        raise ValueError(
            f"model: no layer of {run.of} calls attention through transformers' AttentionInterface, as "
            "seqpar.hf.parallelize needs it"
        )
    if max(Counter(call.module for call in run.calls).values()) > 1:
        raise ValueError(f"model: {run.of} has layers that share their weights, which is not modelled")
    stacks = dict.fromkeys(_stack(run.names[call.module]) for call in run.calls)
    if len(stacks) > 1 or None in stacks:
        raise ValueError(f"model: {run.of} has attention outside of a single list of layers, which is not modelled")
    stack = next(iter(stacks))
    layers = [_CountedLayer(run, layer) for layer in run.model.get_submodule(stack).children() if layer in run.hidden]
    if min(run.hidden[x.module] for x in layers) < 0:
        raise ValueError(f"model: {run.of} has layers that share their weights, which is not modelled")
    return layers


def _stack(name: str) -> str | None:
    """The list of layers that a module belongs to."""
    parts = name.split(".")
    at = next((i for i in reversed(range(len(parts))) if parts[i].isdigit()), 0)
    return ".".join(parts[:at]) or None


class _CountedLayer:
    """One layer: which of its children is attention, a mixer, an indexer, and its MLP."""

    def __init__(self, run: _CountedRun, module: nn.Module) -> None:
        self.run, self.module, self.hidden = run, module, abs(run.hidden[module])
        self.name = f"layer {run.names[module]!r} ({type(module).__name__})"
        if not self.hidden:
            raise ValueError(f"model: {self.name} gets no hidden states of one vector a token, which is not modelled")
        inside = {*module.modules()}
        calls = [call for call in run.calls if call.module in inside]
        if len(calls) > 1:
            raise ValueError(f"model: {self.name} calls attention {len(calls)} times, which is not modelled")
        self.call = calls[0] if calls else None
        if self.call and self.call.is_own and not run.entries.get("index_topk"):
            raise ValueError(f"model: {self.name} makes a mask of its own, which is not modelled")
        self.rest = [child for child in module.children() if child in run.hidden and [*child.parameters()]]
        self.flops_apart = 0.0  # weights that multiply a token in a mixer, an indexer or a router
        self.indexer: list[nn.Linear] = []
        self.streams: list[LayerPart] = []
        if streams := run.streams.get(module):
            connections = [child for child in self.rest if child in run.streams and not _matrices(child)]
            self.rest = [child for child in self.rest if child not in connections]
            self.flops_apart = run.flops(module) - sum(map(run.flops, module.children()))
            weights = sum(map(run.flops, connections))
            self.streams = [Streams(self.hidden, streams, int(weights), int(self.flops_apart))]
        if self.call:
            self._of_attention = next(x for x in self.rest if self.call.module in {*x.modules()})
            self.rest.remove(self._of_attention)
            self._find_indexer()

    def parts(self, mixer: Mixer | None) -> tuple[LayerPart, ...]:
        """What the layer computes; ``mixer`` is the mixer of the configuration."""
        found = [*self.streams, *([self._attention(self.call)] if self.call else [])]
        for child in self.rest:
            if mixer and sum(w.numel() for w in _matrices(child)) == mixer.row.weights:
                self.flops_apart += self.run.flops(child)
                self.rest.remove(child)
                found.append(mixer)
                break
        return (*found, *self._mlp())

    def _find_indexer(self) -> None:
        """An indexer has a projection to queries, one to its key, and one to the weights of its heads."""
        for module in self._of_attention.modules():
            linear = [x for x in module.children() if isinstance(x, nn.Linear)]
            sizes = sorted(x.out_features for x in linear)
            if len(linear) == 3 and self.call and self.call.is_own and sizes[0] * sizes[1] == sizes[2]:
                self.indexer = linear
                self.flops_apart += self.run.flops(module)

    def _attention(self, call: _SeenAttention) -> SelfAttention:
        _, q, k, v, window, *_ = call
        heads, kv_heads, head_dim, v_head_dim = q[1], k[1], q[3], v[3]
        if call.shares_kv:
            return self._compressed(call)
        if q[2] != _TOKENS or k[2] != _TOKENS:
            raise ValueError(f"model: {self.name} attends with {q[2]} of {_TOKENS} tokens to {k[2]}: not modelled")
        if kv_heads > heads or heads % kv_heads:
            entries = self.run.entries_of(kv_heads, "head")
            raise ValueError(f"model: {entries or kv_heads}: expected a divisor of the {heads} query heads")
        linear = [
            (x.in_features, x.out_features)
            for x in self._of_attention.modules()
            if isinstance(x, nn.Linear) and x not in self.indexer
        ]
        q_rank = next((a for a, b in linear if b == heads * head_dim and a != self.hidden and a < b), 0)
        latents = [
            (rank, out - rank)
            for a, out in linear
            for rank, b in linear
            if a == self.hidden and 0 < out - rank < head_dim and b == heads * (head_dim - (out - rank) + v_head_dim)
        ]
        kv_rank, shared = latents[0] if latents and heads == kv_heads else (0, 0)
        own_v_dim = v_head_dim if v_head_dim != head_dim else 0
        sizes = self.hidden, heads, kv_heads, head_dim, own_v_dim, q_rank, kv_rank, shared
        weights = sum(w.numel() for w in _matrices(self._of_attention)) - sum(x.weight.numel() for x in self.indexer)
        gated = weights - SelfAttention(*sizes).row.weights >= self.hidden * heads * v_head_dim
        if not call.is_own:
            chunked = 0 < window == self.run.entries.get("attention_chunk_size")
            return SelfAttention(*sizes, gated, window, chunked)
        # The queries of all of an indexer's heads have as many elements as heads times dimensions.
        of_index = sorted(x.out_features for x in self.indexer if x.in_features == self.hidden)
        index_heads, index_dim = of_index or (0, 0)
        keys = self.run.entries["index_topk"]
        return ChosenKeys(*sizes, gated, keys=keys, index_heads=index_heads, index_dim=index_dim)

    def _compressed(self, call: _SeenAttention) -> CompressedKeys:
        """Attention whose values are its keys. ``seqpar.hf`` finds compressors and indexers by the same attributes."""
        heads, kv_heads, head_dim = call.q[1], call.k[1], call.q[3]
        more: dict[str, Any] = {}
        if (compressor := getattr(call.module, "compressor", None)) is not None:
            overlaps = compressor.kv_proj.out_features > head_dim
            more = {"size": compressor.compress_rate, "overlaps": overlaps}
            if (indexer := getattr(compressor, "indexer", None)) is not None:
                self.flops_apart += self.run.flops(indexer)
                more |= {"keys": indexer.index_topk, "index_heads": indexer.num_heads, "index_dim": indexer.head_dim}
        linear = [x for x in self._of_attention.modules() if isinstance(x, nn.Linear)]
        rank = next(x.in_features for x in linear if x.out_features == heads * head_dim)
        sizes = self.hidden, heads, kv_heads, head_dim, 0, rank
        known = CompressedKeys(*sizes, window=call.window, weights_out=1, **more).row
        weights = sum(w.numel() for w in _matrices(self._of_attention))
        return CompressedKeys(
            *sizes, window=call.window, weights_out=int(weights - known.before - known.unused), **more
        )

    def _mlp(self) -> list[Mlp]:
        """The MLP: two equal matrices, or three with a gate, of each expert and of the shared expert."""
        matrices = [w for child in self.rest for w in _matrices(child)]
        stacked = [
            (module, [p for p in module.parameters(recurse=False) if p.dim() == 3])
            for child in self.rest
            for module in child.modules()
            if not isinstance(module, nn.modules.conv._ConvNd)
        ]
        stacked = [(module, weights) for module, weights in stacked if weights]
        if len(stacked) > 1 or any(w.dim() > 2 for w in matrices):
            raise ValueError(f"model: {self.name} has something besides attention and an MLP, which is not modelled")
        if not stacked:
            return [Mlp(self.hidden, *self._width(matrices))] if matrices else []
        ((module, weights),) = stacked
        experts = len(weights[0])
        width, gated = self._width([w[0] for w in weights])
        active = self.run.flops(module) * experts / sum(w.numel() for w in weights)
        if active != int(active) or not active:
            entries = self.run.entries_of(int(active), "per")
            raise ValueError(f"model: {self.name} computes a token with {active:g} experts ({entries}): not modelled")
        shared = [w for w in matrices if len(w) > 1]  # without a gate of its result
        router = next((i for i, w in enumerate(shared) if w.shape == (experts, self.hidden)), None)
        if router is not None:
            self.flops_apart += shared.pop(router).numel()
        shared_width, shared_gated = self._width(shared) if shared else (0, gated)
        if shared_gated != gated:
            raise ValueError(f"model: {self.name} has shared experts of another kind, which are not modelled")
        return [Mlp(self.hidden, width, gated, experts, int(active), shared_width)]

    def _width(self, matrices: list[Tensor]) -> tuple[int, bool]:
        """The width of an MLP with these matrices, and whether it has a gate; up and gate may be in one matrix."""
        sizes = [w.numel() for w in matrices]
        width, count = min(sizes) / self.hidden, sum(sizes) / max(1, min(sizes))
        if count not in (2, 3) or not width or width != int(width):
            shapes = ", ".join(str(tuple(w.shape)) for w in matrices)
            raise ValueError(f"model: {self.name} has matrices of {shapes} besides attention, which no MLP has")
        return int(width), count == 3


def _matrices(module: nn.Module) -> list[Tensor]:
    """The weights with at least two dimensions of the modules inside a module."""
    weights = (getattr(x, "weight", None) for x in module.modules())
    return [w for w in weights if isinstance(w, nn.Parameter) and w.dim() > 1]
