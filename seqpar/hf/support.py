"""Which layers attend through transformers' interface, and which models cannot be parallelized, and why."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from .tracing import MaskedLayer, Trace, trace_tokens

# A first look, before ``trace_tokens`` runs the model. It costs nothing, names the layer by what it is (the trial run
# names the innermost module that it happens in), and finds a mixer whose memory a few tokens do not fill.
# Class names of layers that mix tokens. A layer that neither attends through the interface nor holds a layer that does
# would mix the tokens of one rank only.
_MIXES_TOKENS = re.compile(
    r"attention|attn|^mobilebertembeddings|mamba|mixer(?!mlp)|deltanet|rwkv|recurrent|rglru|retention|hyena|shortconv|timemix|mlstm|slstm",
    re.IGNORECASE,
)
# Class names of parts of such layers that act on each token alone.
_ACTS_ON_EACH_TOKEN = re.compile(r"(norm|(?<!^mobilebert)embeddings?|mlp|output|dropout)$", re.IGNORECASE)
# Class names of parts of an attention layer that choose among the keys in their input, which are one rank's.
_CHOOSES_KEYS = re.compile(r"indexer", re.IGNORECASE)
_COUNTS_POSITIONS = "create_position_ids_from_input_ids"
_POOLER = re.compile(r"pooler$", re.IGNORECASE)
_OPERATORS = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.MultiheadAttention)
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_LOSSES_IN_PLACE = ("ForMaskedLM", "ForTokenClassification")  # the prediction is for the token itself
_LOSSES = ("ForCausalLM", "ForConditionalGeneration", *_LOSSES_IN_PLACE)
_TOWERS = ("vision_config", "audio_config")
_ATTENDS_ACROSS = ("cross_attention_states", "encoder_hidden_states")


def text_model(root: PreTrainedModel) -> PreTrainedModel:
    """The part of ``root`` whose sequence is sharded: the text model of a wrapper, otherwise ``root`` itself.

    Raises:
        ValueError: ``root`` has a vision or audio tower, and does not merge its output into the text's embeddings.
    """
    towers = [name for name in _TOWERS if getattr(root.config, name, None) is not None]
    if not towers or root.config.get_text_config() is root.config:
        return root
    text = cast(Any, root).get_decoder()
    if isinstance(text, PreTrainedModel) and text is not root and "inputs_embeds" in parameters_of(root):
        parameters = parameters_of(text)
        if "inputs_embeds" in parameters and not any(name in parameters for name in _ATTENDS_ACROSS):
            return text
    raise ValueError(
        f"model={type(root).__name__}: it has a {towers[0]}, but does not merge images or sound into the embeddings of "
        "a text model; parallelize its language model alone"
    )


def parameters_of(module: nn.Module) -> list[str]:
    """The names of its forward's parameters."""
    return list(inspect.signature(module.forward).parameters)


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that call transformers' attention interface, by name. Vision and audio towers have none."""
    in_towers: set[nn.Module] = set()
    for root in model.modules():
        if isinstance(root, PreTrainedModel) and (text := text_model(root)) is not root:
            in_towers |= {*root.modules()} - {*text.modules()}
    used = {name: module for name, module in model.named_modules() if module not in in_towers}
    return {name: module for name, module in used.items() if _uses_interface(type(module))}


def check_model(model: PreTrainedModel, layers: dict[str, nn.Module]) -> list[MaskedLayer]:
    """Raise if a sharded sequence would give wrong results.

    Args:
        model: a transformers model.
        layers: its ``attention_layers``.

    Returns:
        What the layers passed to the attention function in the trial run; nothing if it failed.

    Raises:
        ValueError: with the reason and the layer's name.
    """
    model_name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model={model_name}: encoder-decoder models attend across two sequences; give a decoder or an encoder"
        )
    text = text_model(model)
    if (found := _find_mixer(text, layers if text is model else attention_layers(text))) is not None:
        name, class_name = found
        raise ValueError(
            f"model={model_name}: layer {name!r} ({class_name}) mixes tokens but does not go through transformers' "
            "AttentionInterface; such a layer cannot be sharded along the sequence"
        )
    if not layers:
        raise ValueError(f"model={model_name}: none of its layers goes through transformers' AttentionInterface")
    _check_layer_types(model, model_name)
    _check_head(model, model_name)
    _check_positions(text, model_name)
    trace = trace_tokens(model)
    _check_trace(trace, model, layers)
    return trace.masked


def _check_trace(trace: Trace, model: PreTrainedModel, layers: dict[str, nn.Module]) -> None:
    """Raise if the model, run on a few tokens, lets them see each other outside of the interface.

    Layers that attend without ``_uses_interface`` having seen it are added to ``layers``.
    """
    model_name = type(model).__name__
    if trace.mixes is not None:
        name, class_name = trace.mixes
        raise ValueError(
            f"model={model_name}: layer {name!r} ({class_name}) mixes tokens: in a trial run on a few tokens its "
            "output for a token depended on other tokens, and not through transformers' AttentionInterface; such a "
            "layer cannot be sharded along the sequence"
        )
    if trace.pools is not None and not pools_last_token(model):
        name, class_name = trace.pools
        raise ValueError(
            f"model={model_name}: layer {name!r} ({class_name}) pools the tokens in its input, which here are one "
            "rank's; take the model without it"
        )
    if trace.error is not None:
        warnings.warn(
            f"model={model_name}: its trial run on a few tokens failed ({type(trace.error).__name__}: {trace.error}), "
            "so its layers were checked by their names only; compare it with one device by seqpar.hf.verify",
            stacklevel=4,
        )
        return
    known = set(map(id, layers.values()))
    layers.update({name: m for name, m in model.named_modules() if m in trace.attends and id(m) not in known})


def _find_mixer(model: nn.Module, layers: dict[str, nn.Module]) -> tuple[str, str] | None:
    """Name and class of a layer that mixes tokens without the interface: the innermost that is not an operator."""
    supported = set(map(id, layers.values()))
    mixers = {}
    for name, module in model.named_modules():
        if any(name.startswith(layer + ".") for layer in layers):  # part of a supported layer: a norm, a gate
            if isinstance(module, _OPERATORS) or _CHOOSES_KEYS.search(type(module).__name__):
                return name, type(module).__name__
            continue
        if not any(id(child) in supported for child in module.modules()) and _mixes_tokens(module):
            mixers[name] = module
    for name, module in mixers.items():
        inner = (m for n, m in mixers.items() if n.startswith(name + ".") or (name == "" and n))
        if all(isinstance(m, _OPERATORS) for m in inner):
            return name, type(module).__name__
    return None


def _mixes_tokens(module: nn.Module) -> bool:
    name = type(module).__name__
    return isinstance(module, _OPERATORS) or bool(_MIXES_TOKENS.search(name) and not _ACTS_ON_EACH_TOKEN.search(name))


def _check_layer_types(model: PreTrainedModel, model_name: str) -> None:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for i, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type not in _LAYER_TYPES:
            raise ValueError(
                f"model={model_name}: layer {i} is of type {layer_type!r}; only {', '.join(_LAYER_TYPES)} can be "
                "sharded along the sequence"
            )


def _check_head(model: PreTrainedModel, model_name: str) -> None:
    loss = getattr(model, "loss_type", None)
    # A language model whose class has an unusual name (GPT2LMHeadModel) has no loss type, but transformers' loss.
    supported = loss in _LOSSES or pools_last_token(model) or (loss is None and uses_loss_function(type(model)))
    has_head = model.base_model is not model
    if has_head and not supported:
        raise ValueError(
            f"model={model_name}: its loss is {loss or 'its own'}; supported are heads with one prediction a token "
            f"({', '.join(_LOSSES)}), decoders that classify a sequence by its last token, and base models without "
            "a head"
        )
    for parameter, reason in (("kwargs", "which pass the mask to the layers"), ("position_ids", "which shards need")):
        if parameter not in inspect.signature(model.forward).parameters:
            raise ValueError(f"model={model_name}: its forward takes no {parameter}, {reason}")


def _check_positions(model: PreTrainedModel, model_name: str) -> None:
    for name, module in model.named_modules():
        if _POOLER.search(type(module).__name__):
            raise ValueError(
                f"model={model_name}: layer {name!r} ({type(module).__name__}) pools the tokens in its input, which "
                "here are one rank's; make the model with add_pooling_layer=False"
            )
        if _counts_positions(module):
            raise ValueError(
                f"model={model_name}: layer {name!r} ({type(module).__name__}) counts positions from the tokens in its "
                "input, which here are one rank's"
            )


def _counts_positions(module: nn.Module) -> bool:
    """Whether its default positions depend on the padding (RoBERTa, OPT). Here positions are global indices."""
    source = _forward_source(type(module))
    if isinstance(module, PreTrainedModel) and "position_ids = torch.cumsum(" in source:
        return True
    return hasattr(module, _COUNTS_POSITIONS) or _COUNTS_POSITIONS in source


def _uses_interface(cls: type[Any]) -> bool:
    """Whether its forward gets the attention function from the interface."""
    return "ALL_ATTENTION_FUNCTIONS" in _forward_source(cls) or "attention_interface(" in _forward_source(cls)


def uses_loss_function(cls: type[Any]) -> bool:
    """Whether its forward calls the model's ``loss_function``. Otherwise it computes a loss of its own."""
    return "loss_function(" in _forward_source(cls)


def pools_last_token(model: nn.Module) -> bool:
    """Whether it is one of transformers' decoders that classify a sequence: by the score of the last token."""
    forward = getattr(inspect.getattr_static(type(model), "forward", None), "__wrapped__", None)
    generic = inspect.getattr_static(GenericForSequenceClassification, "forward").__wrapped__
    return isinstance(model, GenericForSequenceClassification) and forward is generic


def predicts_in_place(model: nn.Module) -> bool:
    """Whether a token's label is the token itself, not the next one."""
    return getattr(model, "loss_type", None) in _LOSSES_IN_PLACE


def _forward_source(cls: type[Any]) -> str:
    """The source code of its forward, unwrapped. Subclasses that wrappers make have the same forward."""
    if cls not in _SOURCES:
        try:
            _SOURCES[cls] = inspect.getsource(inspect.unwrap(cls.forward))
        except (OSError, TypeError, AttributeError):
            _SOURCES[cls] = ""
    return _SOURCES[cls]


_SOURCES: dict[type[Any], str] = {}
