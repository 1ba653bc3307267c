"""Finds the layers that use transformers' ``AttentionInterface``, and rejects models that cannot be parallelized."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import Parameter
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..memory.weights import CACHE_ARGUMENTS
from .mixers import of_mixer_files
from .state import NAME
from .trial import Trial, run_trial

# ``check_model`` checks class names before the trial run. This takes no time, its error names the whole layer, and it
# also finds layers that mix tokens only in longer sequences.

# Class names of layers that mix tokens. Such a layer would mix the tokens of one rank only, unless it is an attention
# layer that uses the interface, or contains one.
_MIXES_TOKENS = re.compile(
    r"attention|attn|^mobilebertembeddings|mamba|mixer(?!mlp)|deltanet|rwkv|recurrent|rglru|retention|hyena|shortconv|timemix|mlstm|slstm",
    re.IGNORECASE,
)
# Class names of modules that match ``_MIXES_TOKENS``, but act on each token alone.
_ACTS_ON_EACH_TOKEN = re.compile(r"(norm|(?<!^mobilebert)embeddings?|mlp|output|dropout)$", re.IGNORECASE)
# Class names of modules that select keys for an attention layer. They would select among the keys of one rank only.
_CHOOSES_KEYS = re.compile(r"indexer", re.IGNORECASE)
_INTERFACE = ("ALL_ATTENTION_FUNCTIONS", "attention_interface(")  # in the source of a layer that uses the interface
# The functions of transformers that are replaced, and that compute softmax attention with the mask of the model.
_ATTENTION = (sdpa_attention_forward, flash_attention_forward, flex_attention_forward)
_MASKS = (eager_mask, sdpa_mask, flash_attention_mask, flex_attention_mask)
_POOLER = re.compile(r"pooler$", re.IGNORECASE)
_OPERATORS = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.MultiheadAttention)
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# Of models whose layers mix tokens by the functions of ``mixers``; the trial run finds layers that do not.
_MIXER_TYPES = ("linear_attention", "conv", "mamba", "attention", "hybrid", "moe", "mlp")
_LOSSES_IN_PLACE = ("ForMaskedLM", "ForTokenClassification")  # the model predicts each token itself, not the next one
_LOSSES = ("ForCausalLM", "ForConditionalGeneration", *_LOSSES_IN_PLACE)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_TOWERS = ("vision_config", "audio_config")
# Methods of peft that cannot be sharded, and why.
_ADAPTERS = {
    "PREFIX_TUNING": "it hands every layer keys and values of its own, as a cache",
    "CARTRIDGE": "it hands every layer keys and values of its own, as a cache",
    "ADAPTION_PROMPT": "its layers attend to keys of their own, outside transformers' attention interface",
    "CPT": "its loss is its own, and needs the logits of all tokens",
    "XLORA": "it scales each token by a forward on all tokens",
    "SHADOW": "it runs a second model on all tokens",
}
_ATTENDS_ACROSS = ("cross_attention_states", "encoder_hidden_states")


def check_adapters(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        adapters = getattr(module, "peft_config", None)
        for name, config in adapters.items() if isinstance(adapters, dict) else ():
            method = str(getattr(config.peft_type, "value", config.peft_type))
            why = _ADAPTERS.get(method)
            if getattr(config, "alora_invocation_tokens", None):
                method, why = "activated LoRA (alora_invocation_tokens)", "it counts tokens from the end of the row"
            if why is not None:
                raise ValueError(
                    f"model: its adapter {name!r} is peft's {method}, which cannot be sharded: {why}; use LoRA, prompt "
                    "tuning or p-tuning instead, or train without seqpar"
                )


def text_model(root: PreTrainedModel) -> PreTrainedModel:
    """The model whose sequence is sharded: the text model inside a model with a vision or audio tower, or ``root``."""
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


def recomputes(model: Any) -> bool:
    """Whether ``model`` recomputes activations in backward. transformers then makes no cache."""
    decoder = text_model(model).base_model
    return bool(model.training and getattr(decoder, "gradient_checkpointing", False))


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The key/value cache among the arguments of a forward, or None."""
    return next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)


def parameters_of(module: nn.Module) -> list[str]:
    """The names of the parameters of ``module.forward``, and of the parents' forwards if it passes ``**kwargs`` on."""
    parents = (vars(cls)["forward"] for cls in type(module).__mro__[1:] if "forward" in vars(cls))
    names: dict[str, None] = {}
    variadic: list[str] = []  # such as kwargs
    for forward in (module.forward, *parents):
        parameters = inspect.signature(forward).parameters
        names.update(dict.fromkeys(x for x, p in parameters.items() if x != "self" and p.kind not in _VARIADIC))
        passes_on = [name for name, p in parameters.items() if p.kind is Parameter.VAR_KEYWORD]
        variadic += passes_on
        if not passes_on:
            break
    return [*names, *variadic]


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules outside of towers that call an attention function of transformers' interface, by name."""
    in_towers: set[nn.Module] = set()
    for root in model.modules():
        if isinstance(root, PreTrainedModel) and (text := text_model(root)) is not root:
            in_towers |= {*root.modules()} - {*text.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if module not in in_towers and any(x in _forward_source(type(module)) for x in _INTERFACE)
    }


def check_model(model: PreTrainedModel, layers: dict[str, nn.Module]) -> Trial:
    """Raise an error, with the name of the layer, if ``model`` would compute wrong results on a sharded sequence.

    ``layers`` are its ``attention_layers``. Attention layers that only the trial run finds are added.
    """
    name = type(model).__name__
    for reason in _reasons(model, layers, of_mixer_files(text_model(model))):
        raise ValueError(f"model={name}: {reason}")
    trial = run_trial(model)
    if trial.mixers and getattr(model, "_use_kernels", False):
        raise ValueError(
            f"model={name}: it was loaded with use_kernels=True, which may replace whole layers that mix tokens; "
            "load it without, and install flash-linear-attention, causal-conv1d or mamba-ssm for their kernels"
        )
    for reason in _reasons(model, layers, set()) if trial.error is not None else ():  # by the names alone
        raise ValueError(f"model={name}: {reason} (its trial run failed: {trial.error})")
    for reason in (*_reasons_of_functions(trial, model), *_reasons_of_trial(trial, model)):
        raise ValueError(f"model={name}: {reason}")
    if trial.error is not None:
        warnings.warn(
            f"model={name}: its trial run on a few tokens failed ({type(trial.error).__name__}: {trial.error}), so "
            "that only the names of its layers were checked; compare it with one device by seqpar.hf.verify",
            stacklevel=3,
        )
    else:
        unnamed = set(trial.attention_modules) - set(layers.values())
        layers.update({name: m for name, m in model.named_modules() if m in unnamed})
    return trial


def _reasons(model: PreTrainedModel, layers: dict[str, nn.Module], unchecked: set[str]) -> Iterator[str]:
    """Why ``model`` cannot be parallelized, by its classes and its config.

    The trial run checks whether the modules of the text model that are ``unchecked`` here mix tokens.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        yield "encoder-decoder models attend across two sequences; give a decoder or an encoder"
    text = text_model(model)
    if (mixer := _find_mixer(text, layers if text is model else attention_layers(text), unchecked)) is not None:
        yield (
            f"layer {mixer[0]!r} ({mixer[1]}) mixes tokens but does not use transformers' AttentionInterface; such a "
            "layer cannot be sharded along the sequence"
        )
    if not layers and not unchecked:
        yield "none of its layers uses transformers' AttentionInterface"
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for i, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type not in _LAYER_TYPES and not (unchecked and layer_type in _MIXER_TYPES):
            supported = ", ".join(_LAYER_TYPES)
            yield f"layer {i} is of type {layer_type!r}; only {supported} can be sharded along the sequence"
    loss = getattr(model, "loss_type", None)
    # A class of an unusual name (GPT2LMHeadModel, a subclass of the user's) has no loss_type, but it may use the loss
    # function in its forward, or in the forward of a parent class.
    uses_loss_function = any("loss_function(" in _forward_source(cls) for cls in type(model).__mro__)
    has_loss = loss in _LOSSES or pools_last_token(model) or (loss is None and uses_loss_function)
    if model.base_model is not model and not has_loss:
        yield (
            f"its loss is {loss or 'its own'}; supported are models with one prediction per token "
            f"({', '.join(_LOSSES)}), decoders that classify a sequence by its last token, and base models without "
            "a head"
        )
    purposes = {"kwargs": "to pass the mask to the layers", "position_ids": "for the positions of each rank's tokens"}
    for parameter, purpose in purposes.items():
        if parameter not in parameters_of(model):
            yield f"its forward takes no {parameter}, which are needed {purpose}"
    for name, module in text.named_modules():
        if getattr(module, "layerdrop", None):
            yield (
                f"layer {name!r} ({type(module).__name__}) drops whole layers at random, layerdrop={module.layerdrop}, "
                "and the ranks would drop different ones; set its layerdrop to 0"
            )
        if _POOLER.search(type(module).__name__):
            yield f"{_pools(name, type(module).__name__)}; create the model with add_pooling_layer=False"


def _reasons_of_functions(trial: Trial, model: PreTrainedModel) -> Iterator[str]:
    """Functions that ``parallelize`` would replace, and that may compute something else than softmax attention."""
    name = text_model(model).config._attn_implementation
    if name in (None, NAME):
        return
    instead = "seqpar would replace it; call model.set_attn_implementation('sdpa') before, if that is what you train"
    for function in (*trial.functions, ALL_ATTENTION_FUNCTIONS.get(name)):
        if not (function is None or function in _ATTENTION or _in_model_file(function)):
            found = _described(function)
            yield f"its attn_implementation {name!r} is {found}, not softmax attention of transformers, and {instead}"
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if mask not in _MASKS:
        found = _described(mask)
        yield f"the mask of its attn_implementation {name!r} is {found}, not one of transformers, and {instead}"


def _in_model_file(function: Any) -> bool:
    """Whether ``function`` is the global name of a file of transformers' models, as their eager attention is."""
    module, name = str(getattr(function, "__module__", "")), getattr(function, "__name__", "")
    return module.startswith("transformers.models.") and getattr(sys.modules.get(module), name, None) is function


def _described(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def masks_like(model: PreTrainedModel) -> str:
    """The implementation whose masks ``model`` uses: "sdpa", "flash" or "eager", which has them in every call."""
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(text_model(model).config._attn_implementation)
    return "sdpa" if mask is sdpa_mask else "flash" if mask is flash_attention_mask else "eager"


def _reasons_of_trial(trial: Trial, model: PreTrainedModel) -> Iterator[str]:
    if trial.mixer is not None:
        name, class_name = trial.mixer
        yield (
            f"layer {name!r} ({class_name}) mixes tokens: in a trial run on a few tokens its output for a token "
            "depended on other tokens, and not through transformers' AttentionInterface; such a layer cannot be "
            "sharded along the sequence"
        )
    elif trial.counter is not None:
        name, class_name = trial.counter
        yield (
            f"layer {name!r} ({class_name}) counts the tokens in its input: in a trial run on a few tokens its output "
            "for a token depended on the token's index, although the position_ids were equal, and a rank has only some "
            "of the tokens; compute it from position_ids"
        )
    elif trial.own_positions:
        yield (
            "without position_ids it counts positions itself, from the tokens that are not padding or from another "
            "number than 0, and a rank has only some of the tokens"
        )
    if trial.pooler is not None and not pools_last_token(model):
        yield f"{_pools(*trial.pooler)}; use the model without this layer"


def _pools(name: str, class_name: str) -> str:
    return f"layer {name!r} ({class_name}) pools the tokens in its input, and a rank has only some of the tokens"


def _find_mixer(model: nn.Module, layers: dict[str, nn.Module], unchecked: set[str]) -> tuple[str, str] | None:
    """Name and class of a layer that mixes tokens without the interface: the innermost that is no plain operator."""
    supported = set(map(id, layers.values()))
    mixers = {}
    for name, module in model.named_modules():
        if any(name.startswith(layer + ".") for layer in layers):  # inside a supported layer: a norm, a gate
            if isinstance(module, _OPERATORS) or _CHOOSES_KEYS.search(type(module).__name__):
                return name, type(module).__name__
            continue
        if name in unchecked and not _CHOOSES_KEYS.search(type(module).__name__):
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


def computes_cross_entropy(model: nn.Module) -> bool:
    """Whether ``model`` is of transformers and computes a cross-entropy in its forward, without a loss function."""
    forward = inspect.unwrap(model.forward)
    return forward.__module__.startswith("transformers.") and "loss_function(" not in _forward_source(type(model))


def ignores_num_items(model: nn.Module) -> bool:
    """Whether the loss of ``model`` is a mean even if its forward is given ``num_items_in_batch``."""
    return computes_cross_entropy(model) or str(getattr(model, "loss_type", None)).endswith("Classification")


def pools_last_token(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers decoder that classifies a sequence, by the scores of its last token."""
    generic = inspect.unwrap(GenericForSequenceClassification.forward)
    forward = inspect.unwrap(model.forward)
    return isinstance(model, GenericForSequenceClassification) and getattr(forward, "__func__", forward) is generic


def predicts_in_place(model: nn.Module) -> bool:
    """Whether ``model`` predicts each token itself, not the next one."""
    return getattr(model, "loss_type", None) in _LOSSES_IN_PLACE


def _forward_source(cls: Any) -> str:
    """The source code of the forward of ``cls`` without decorators; empty if it is not available."""
    return _source(inspect.unwrap(cls.forward)) if hasattr(cls, "forward") else ""


@cache
def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""
