"""Which layers attend through transformers' interface, and which models cannot be parallelized, and why."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# Names of layers that mix tokens. One that neither attends through the interface nor holds a layer that does would
# mix the tokens of one rank only.
_MIXES = re.compile(
    r"attention|attn|^mobilebertembeddings|mamba|mixer(?!mlp)|deltanet|rwkv|recurrent|rglru|retention|hyena|shortconv|timemix|mlstm|slstm",
    re.IGNORECASE,
)
# Parts named after the layers they stand in, which act on each token alone.
_ACTS_ALONE = re.compile(r"(norm|(?<!^mobilebert)embeddings?|mlp|output|dropout)$", re.IGNORECASE)
# What an attention layer may not hold either: it chooses among the keys at hand.
_CHOOSES = re.compile(r"indexer", re.IGNORECASE)
_COUNTS = "create_position_ids_from_input_ids"
_POOLER = re.compile(r"pooler$", re.IGNORECASE)
_OPERATORS = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.MultiheadAttention)
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_IN_PLACE = ("ForMaskedLM", "ForTokenClassification")  # a prediction for the token itself, not for the next one
_LOSSES = ("ForCausalLM", *_IN_PLACE)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that call transformers' attention interface, by name."""
    return {name: module for name, module in model.named_modules() if _uses_interface(type(module))}


def check_model(model: PreTrainedModel, layers: dict[str, nn.Module]) -> None:
    """Refuse a model that would give wrong results.

    Raises:
        ValueError: why, with the layer's name.
    """
    what = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model={what}: encoder-decoder models attend across two sequences; give a decoder or an encoder"
        )
    for kind in ("vision_config", "audio_config"):
        if getattr(model.config, kind, None) is not None:
            raise ValueError(f"model={what}: it has a {kind}; parallelize its language model alone")
    if (found := _foreign(model, layers)) is not None:
        name, kind = found
        raise ValueError(
            f"model={what}: layer {name!r} ({kind}) mixes tokens but does not go through transformers' "
            "AttentionInterface; such a layer cannot be sharded along the sequence"
        )
    if not layers:
        raise ValueError(f"model={what}: none of its layers goes through transformers' AttentionInterface")
    _check_layer_types(model, what)
    _check_heads(model, what)


def _foreign(model: nn.Module, layers: dict[str, nn.Module]) -> tuple[str, str] | None:
    """Name and class of the first layer that mixes tokens in its own way: the innermost that is no mere operator."""
    ours = set(map(id, layers.values()))
    mixes = {}
    for name, module in model.named_modules():
        if any(name.startswith(layer + ".") for layer in layers):  # else a norm, a head-wise gate
            if isinstance(module, _OPERATORS) or _CHOOSES.search(type(module).__name__):
                return name, type(module).__name__
            continue
        if not any(id(child) in ours for child in module.modules()) and _mixes(module):
            mixes[name] = module
    for name, module in mixes.items():
        inner = (m for n, m in mixes.items() if n.startswith(name + ".") or (name == "" and n))
        if all(isinstance(m, _OPERATORS) for m in inner):
            return name, type(module).__name__
    return None


def _mixes(module: nn.Module) -> bool:
    kind = type(module).__name__
    return isinstance(module, _OPERATORS) or bool(_MIXES.search(kind) and not _ACTS_ALONE.search(kind))


def _check_layer_types(model: PreTrainedModel, what: str) -> None:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for i, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            raise ValueError(
                f"model={what}: layer {i} is of type {kind!r}; only {', '.join(_LAYER_TYPES)} can be sharded along "
                "the sequence"
            )


def _check_heads(model: PreTrainedModel, what: str) -> None:
    loss = getattr(model, "loss_type", None)
    # A language model whose class has another name (GPT2LMHeadModel) has no loss type, but transformers' loss.
    known = loss in _LOSSES or (loss is None and uses_loss_function(type(model)))
    if not known and not _is_base(model):
        raise ValueError(
            f"model={what}: its loss is {loss or 'its own'}; supported are heads with one prediction a token "
            f"({', '.join(_LOSSES)}), and base models without a head"
        )
    for needed, why in (("kwargs", "by which the mask travels to the layers"), ("position_ids", "which shards need")):
        if needed not in inspect.signature(model.forward).parameters:
            raise ValueError(f"model={what}: its forward takes no {needed}, {why}")
    for name, module in model.named_modules():
        if _POOLER.search(type(module).__name__):
            raise ValueError(
                f"model={what}: layer {name!r} ({type(module).__name__}) pools the tokens at hand, which are one "
                "rank's here; make the model with add_pooling_layer=False"
            )
        if _counts_positions(module):
            raise ValueError(
                f"model={what}: layer {name!r} ({type(module).__name__}) counts positions in its own way, from the "
                "tokens at hand, which are one rank's here"
            )


def _is_base(model: PreTrainedModel) -> bool:
    return model.base_model is model


def _counts_positions(module: nn.Module) -> bool:
    """Whether positions that are not given depend on the padding (RoBERTa, OPT); here they are the tokens' places."""
    source = _source(type(module))
    if isinstance(module, PreTrainedModel) and "position_ids = torch.cumsum(" in source:
        return True
    return hasattr(module, _COUNTS) or _COUNTS in source


def _uses_interface(kind: type[Any]) -> bool:
    """Whether its forward asks the interface for the attention function."""
    return "ALL_ATTENTION_FUNCTIONS" in _source(kind) or "attention_interface(" in _source(kind)


def uses_loss_function(kind: type[Any]) -> bool:
    """Whether its forward calls the model's ``loss_function``. Otherwise the loss is its own, of the logits at hand."""
    return "loss_function(" in _source(kind)


def predicts_in_place(model: nn.Module) -> bool:
    """Whether its labels are the tokens' own, not the next ones'."""
    return getattr(model, "loss_type", None) in _IN_PLACE


def _source(kind: type[Any]) -> str:
    """The code of its forward. Wrappers' subclasses have the same one."""
    if kind not in _SOURCES:
        try:
            _SOURCES[kind] = inspect.getsource(inspect.unwrap(kind.forward))
        except (OSError, TypeError, AttributeError):
            _SOURCES[kind] = ""
    return _SOURCES[kind]


_SOURCES: dict[type[Any], str] = {}
