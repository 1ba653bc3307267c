"""Finds the layers that use transformers' ``AttentionInterface``, and rejects models that cannot be parallelized."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import Parameter
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    flash_attention_mask,
    flex_attention_mask,
    sdpa_mask,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...memory.weights import CACHE_ARGUMENTS
from ...patching.forwards import function_of, runs_of
from ..mechanisms.compressors import has_compressor
from ..mechanisms.encoders import STATES, STATES_MASK, decoder_of, has_encoder
from ..mechanisms.indexers import has_indexer
from ..mechanisms.mixers import of_mixer_files
from ..state import NAME
from .indexer_trial import UnsupportedIndexerError
from .trial import Loss, Trial, run_trial

# The functions of transformers that are replaced, and that compute softmax attention with the mask of the model.
_ATTENTION = (sdpa_attention_forward, flash_attention_forward, flex_attention_forward)
_MASKS = (eager_mask, sdpa_mask, flash_attention_mask, flex_attention_mask)
# These mix tokens. A module that did not run in the trial run may be of these classes only outside of the text model.
_OPERATORS = (nn.Conv1d, nn.Conv2d, nn.RNNBase, nn.MultiheadAttention)
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
# Of models whose layers mix tokens by the functions of ``mixers``; the trial run finds layers that do not.
_MIXER_TYPES = ("linear_attention", "conv", "mamba", "attention", "hybrid", "moe", "mlp")
_COMPRESSED_TYPES = ("compressed_sparse_attention", "heavily_compressed_attention")
_LOSSES_IN_PLACE = ("ForMaskedLM", "ForTokenClassification")  # the model predicts each token itself, not the next one
_LOSSES = ("ForCausalLM", "ForConditionalGeneration", *_LOSSES_IN_PLACE)
_KEEPING_LOSSES = {"transformers", "accelerate", "torch", "seqpar"}  # whose decorators keep a forward's loss
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
TOWERS = ("vision_config", "audio_config")
# Methods of peft that cannot be sharded, and why.
_ADAPTERS = {
    "PREFIX_TUNING": "it hands every layer keys and values of its own, as a cache",
    "CARTRIDGE": "it hands every layer keys and values of its own, as a cache",
    "ADAPTION_PROMPT": "its layers attend to keys of their own, outside transformers' attention interface",
    "CPT": "its loss is its own, and needs the logits of all tokens",
    "XLORA": "it scales each token by a forward on all tokens",
    "SHADOW": "it runs a second model on all tokens",
}
_ATTENDS_ACROSS = ("cross_attention_states", STATES)


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
    """The model whose sequence is sharded: ``root``, or the model in it that runs after a tower or an encoder."""
    if has_encoder(root):
        return decoder_of(root)
    towers = [name for name in TOWERS if getattr(root.config, name, None) is not None]
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
        parameters = _parameters_of_function(getattr(forward, "__func__", forward))
        names.update(dict.fromkeys(x for x, p in parameters.items() if x != "self" and p.kind not in _VARIADIC))
        passes_on = [name for name, p in parameters.items() if p.kind is Parameter.VAR_KEYWORD]
        variadic += passes_on
        if not passes_on:
            break
    return [*names, *variadic]


# By function: its parameters. ``inspect.signature`` takes as long as a layer's attention of one token.
_parameters: WeakKeyDictionary[Any, Mapping[str, Parameter]] = WeakKeyDictionary()


def _parameters_of_function(function: Any) -> Mapping[str, Parameter]:
    found = _parameters.get(function)
    if found is None:
        found = _parameters[function] = inspect.signature(function).parameters
    return found


def attention_layers(root: PreTrainedModel) -> dict[str, nn.Module]:
    """The layers of a parallelized model that call the attention function, by name."""
    return {name: module for name, module in root.named_modules() if name and "_seqpar" in vars(module)}


def check_encoder(model: PreTrainedModel) -> tuple[PreTrainedModel, Trial] | None:
    """The encoder of ``model`` and its trial run, if it can be sharded too. None: every rank runs it on all tokens."""
    encoder, decoder = cast(Any, model).get_encoder(), decoder_of(model)
    if not isinstance(encoder, PreTrainedModel) or encoder is model or has_encoder(encoder):
        return None
    if "input_ids" not in parameters_of(encoder) or STATES_MASK not in parameters_of(decoder):
        return None
    try:
        trial = check_model(encoder, positions=True)
    except ValueError:
        return None
    shared = any(module in {*decoder.modules()} for module in trial.attention_modules)
    return None if shared or trial.mixers or trial.longest is not None else (encoder, trial)


def check_model(model: PreTrainedModel, positions: bool = False) -> Trial:
    """Raise an error, with the name of the layer, if ``model`` would compute wrong results on a sharded sequence.

    ``positions``: whether it may take no position_ids, if modules in it embed them.
    """
    name = type(model).__name__
    for reason in _reasons(model, positions):
        raise ValueError(f"model={name}: {reason}")
    trial = run_trial(model)
    if trial.mixers and getattr(model, "_use_kernels", False):
        raise ValueError(
            f"model={name}: it was loaded with use_kernels=True, which may replace whole layers that mix tokens; "
            "load it without, and install flash-linear-attention, causal-conv1d or mamba-ssm for their kernels"
        )
    for reason in (*_reasons_of_functions(trial, model), *_reasons_of_trial(trial, model)):
        raise ValueError(f"model={name}: {reason}")
    return trial


def _reasons(model: PreTrainedModel, positions: bool) -> Iterator[str]:
    """Why ``model`` cannot be parallelized, by its classes and its config."""
    text = text_model(model)
    composite = hasattr(model.config, "get_text_config") and not has_encoder(model)
    config = model.config.get_text_config() if composite else text.config
    supported = _LAYER_TYPES + (_MIXER_TYPES if of_mixer_files(text) else ())
    supported += ("indexed_attention",) if any(map(has_indexer, text.modules())) else ()
    supported += _COMPRESSED_TYPES if any(map(has_compressor, text.modules())) else ()
    for i, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type == "indexed_attention" and layer_type not in supported:
            yield (
                f"layer {i} is of type 'indexed_attention', and its indexer does not choose latents, but in another "
                "way, such as by keys pooled over runs of tokens; such an indexer cannot be sharded"
            )
        if layer_type not in supported:
            names, todo = ", ".join(supported), ""
            if layer_type in _MIXER_TYPES:
                todo = "; if a function in the model's file mixes tokens there, name it by seqpar.hf.register_mixer"
            yield f"layer {i} is of type {layer_type!r}; only {names} can be sharded along the sequence{todo}"
    purposes = {"kwargs": "to pass the mask to the layers", "position_ids": "for the positions of each rank's tokens"}
    if positions or has_encoder(model):  # the trial run tells whether the positions can be given
        del purposes["position_ids"]
    for parameter, purpose in purposes.items():
        if parameter not in parameters_of(text if has_encoder(model) else model):
            yield f"its forward takes no {parameter}, which are needed {purpose}"
    for name, module in text.named_modules():
        if getattr(module, "layerdrop", None):
            yield f"layer {name!r} {_dropping(module)}"


def _dropping(module: Any) -> str:
    return (
        f"({type(module).__name__}) drops whole layers at random, layerdrop={module.layerdrop}, and the ranks would "
        "drop different ones; set its layerdrop to 0"
    )


def check_layerdrop(module: nn.Module, args: Any) -> None:
    """A hook before the forward of a module with a ``layerdrop``, which may have been changed after ``parallelize``."""
    if module.training and getattr(module, "layerdrop", None):
        raise ValueError(f"model: a layer {_dropping(module)}")


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
    has_head = model.base_model is not model and not pools_last_token(model)
    if has_head and trial.error is None and not _is_supported(trial.loss, model):
        yield (
            f"its loss is {getattr(model, 'loss_type', None) or 'its own'}; supported are models with one prediction "
            f"per token ({', '.join(_LOSSES)}), decoders that classify a sequence by its last token, and base models "
            "without a head"
        )
    if trial.bias is not None:
        name, class_name = trial.bias
        yield (
            f"layer {name!r} ({class_name}) adds a trained bias of the distance of two tokens to its scores "
            "(position_bias), which cannot be sharded along the sequence yet"
        )
    if trial.scaler is not None:
        name, class_name = trial.scaler
        yield (
            f"layer {name!r} ({class_name}) scales all tokens in its input together, as float8 training with one scale "
            "per tensor does, and a rank has only some of the tokens; use one scale per row (in torchao "
            "Float8LinearConfig.from_recipe_name('rowwise'))"
        )
    if trial.mixer is not None:
        name, class_name = trial.mixer
        yield (
            f"layer {name!r} ({class_name}) mixes tokens: in a trial run on a few tokens its output for a token "
            "depended on other tokens, and not through transformers' AttentionInterface; such a layer cannot be "
            "sharded along the sequence"
        )
    elif trial.counter is not None and trial.longest is None:
        name, class_name = trial.counter
        yield (
            f"layer {name!r} ({class_name}) counts the tokens in its input: in a trial run on a few tokens its output "
            "for a token depended on the token's index, although the position_ids were equal, and a rank has only some "
            "of the tokens; compute it from position_ids"
        )
    elif trial.measures:
        yield (
            "in a trial run on a few tokens its outputs depended on how many tokens follow, so that a layer takes the "
            "number of tokens in its input for the length of the sequence, and a rank has only some of the tokens; "
            "compute it from position_ids"
        )
    elif trial.own_positions:
        yield (
            "without position_ids it counts positions itself, from the tokens that are not padding or from another "
            "number than 0, and a rank has only some of the tokens"
        )
    if trial.pooler is not None and not pools_last_token(model):
        name, class_name = trial.pooler
        yield (
            f"layer {name!r} ({class_name}) pools the tokens in its input, and a rank has only some of the tokens; use "
            "the model without this layer (add_pooling_layer=False)"
        )
    if trial.error is not None:
        name, class_name = trial.failed
        where = f"layer {name!r} ({class_name})" if name else class_name
        if isinstance(trial.error, UnsupportedIndexerError):
            yield f"{where} {trial.error}"
        yield (
            f"its trial run on a few tokens failed in {where}: {type(trial.error).__name__}: "
            f"{trial.error}. Without it, it is not known whether the layers mix tokens; they must run without a mask "
            "and without a cache, and attend through transformers' AttentionInterface"
        )
    elif not trial.attention_modules and not trial.mixers:
        yield "none of its layers uses transformers' AttentionInterface"
    text = text_model(model)
    of_mixers = of_mixer_files(text)  # whose functions take the weights of such a module
    for name, module in text.named_modules():
        if isinstance(module, _OPERATORS) and module not in trial.ran and name not in of_mixers:
            yield (
                f"layer {name!r} ({type(module).__name__}) mixes tokens, and did not run in a trial run on a few "
                "tokens, so that it is not known whether these belong to the sequence; parallelize the text model alone"
            )


def _is_supported(loss: Loss, model: PreTrainedModel) -> bool:
    """Whether ``TokenLoss`` can compute the loss of ``model``, or checks it in each call (``check_loss``)."""
    if loss.calls_loss_function:
        return default_loss(model) in [LOSS_MAPPING[name] for name in _LOSSES]
    return loss.shift is not None or not _is_of_transformers(model)


def _is_of_transformers(model: nn.Module) -> bool:
    """Whether the forward of ``model`` is in a file of transformers, and each of its decorators keeps the loss."""
    forward, packages = _forward_of(model), []
    while forward is not None:
        file = getattr(getattr(forward, "__func__", forward), "__globals__", {}).get("__name__", "")
        packages.append(file.partition(".")[0])
        forward = getattr(forward, "__wrapped__", None)
    return packages[-1] == "transformers" and {*packages} <= _KEEPING_LOSSES


def _forward_of(model: nn.Module) -> Any:
    """The forward that ``model`` has now; one that ``wrap_forward`` has replaced is the class's at each call."""
    forward = vars(model).get("forward")
    return type(model).forward if forward is None or runs_of(forward) else forward


def default_loss(model: nn.Module) -> Callable[..., Any]:
    """The loss function that transformers takes for ``model`` if the user has set none."""
    name = getattr(model, "loss_type", None)
    function: Callable[..., Any] = LOSS_MAPPING[name if name in LOSS_MAPPING else "ForCausalLM"]
    return function


def computes_cross_entropy(model: nn.Module) -> bool:
    """Whether the forward of ``model`` is transformers' and returns a cross-entropy that it computes itself."""
    loss: Loss = cast(Any, model)._seqpar_loss
    return loss.shift is not None and function_of(_forward_of(model)) is loss.forward and _is_of_transformers(model)


def pools_last_token(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers decoder that classifies a sequence, by the scores of its last token."""
    generic = inspect.unwrap(GenericForSequenceClassification.forward)
    return isinstance(model, GenericForSequenceClassification) and function_of(model.forward) is generic


def predicts_in_place(model: nn.Module) -> bool:
    """Whether ``model`` predicts each token itself, not the next one."""
    loss: Loss = cast(Any, model)._seqpar_loss
    if loss.shift is not None:
        return loss.shift == 0
    return loss.in_place or default_loss(model) in [LOSS_MAPPING[name] for name in _LOSSES_IN_PLACE]
