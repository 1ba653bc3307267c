"""``make families``: compares a tiny random model of every class of transformers with one process.

The classes are the causal, the masked, the image-text, the sequence-to-sequence and the speech-to-sequence language
models of transformers' Auto classes. If
``seqpar.hf.parallelize`` accepts a class, its loss and all its gradients on two ranks are compared with one process,
for a plain, a padded and a packed batch of text. The results are written to the table in docs/families.md.
``python -m tests.families --only llama,gemma3n`` prints the rows of some models and writes nothing.

The models are made from the default config of their class, in which sizes are replaced by small ones (``SIZES``).
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers.models.auto import modeling_auto

import seqpar
import seqpar.hf

from ..pool import Pool, WorkerError, on_ranks
from ..reference import FACTOR, UNITS, nudge

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- make families -->", "<!-- /make families -->"
KINDS = {
    "causal": ("CAUSAL_LM", "Causal language models"),
    "masked": ("MASKED_LM", "Masked language models"),
    "image-text": ("IMAGE_TEXT_TO_TEXT", "Models of images and text"),
    "text-text": ("SEQ_TO_SEQ_CAUSAL_LM", "Models of text to text"),
    "speech-text": ("SPEECH_SEQ_2_SEQ", "Models of speech to text"),
}
BATCHES = ("plain", "right", "left", "packed")
_LARGEST_LIMIT = 0.05  # a larger error is wrong in any case
DEADLINE_S = 120.0
_RENEWED_AFTER = 60  # families: then the processes are started again, because imported models stay in memory

VOCAB, HIDDEN, HEADS, HEAD_DIM = 128, 64, 4, 16
_TEXT = (10, 96)  # the ids of ordinary tokens; special tokens have ids from 100 on
# The sizes of a tiny model: a pattern for the names of a config's attributes, and the largest value. The first pattern
# that matches counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(^|_)(num|n|encoder|decoder)(_hidden|_encoder|_decoder|_\w+)?_(layers?|blocks)$|^(depth|n_layers?)$", 2),
    (r"(key_value|kv)_heads|n_head_kv|multi_query_group_num", 2),
    (r"rope_head_dim", 8),
    (r"^qk_head_dim$", HEAD_DIM + 8),
    (r"head_(dim|size)$|d_head$|d_kv$|kv_channels", HEAD_DIM),
    (r"heads?$|_heads_|n_head", HEADS),
    (r"_rank$", 16),
    (r"intermediate|ffn|d_ff$|n_inner|mlp_dim|inner_dim|ff_dim", 96),
    (r"vocab", VOCAB),
    (r"position|n_ctx$|max_seq|seq_length|max_sequence", 256),
    (r"experts?$|^num_local_experts$", 4),
    (r"n_group$|topk_group$|expert_group", 1),
    (r"experts_per_tok|top_?k|moe_k$|num_selected_experts", 2),
    (r"first_k_dense|moe_layer_start", 1),
    (r"window(_size)?$", 7),
    (r"^local_attention$", 8),
    (r"^image_size$", 32),
    (r"^patch_size$", 8),
    (r"base_channels|d_latents", 32),
    (r"num_self_attends", 2),
    (r"hidden_size|d_model|n_embd|hidden_dim|_width$|^dim$|_dim$|_size$", HIDDEN),
)
_SPECIAL = re.compile(r"token_(id|index)$|^(image|video|audio)\w*_(id|index)$|(bos|eos|pad|cls|sep|mask)_\w*id$")
_RANDOM = re.compile(r"drop|jitter")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth")
_NOT_COPIED = {
    *("transformers_version", "architectures", "id2label", "label2id", "_name_or_path", "model_type", "problem_type"),
    *("dtype", "label_names", "num_classes"),
}
_DEFAULTS = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}  # for configs that have None here
# For a model type: attributes that no rule gets right.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}


def _mrope(*section: int) -> dict[str, Any]:
    """Rotary embeddings of several positions per token."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*section]}}


# With few heads, many scores of an indexer are 0.
_INDEXER = {"index_n_heads": 16, "index_topk": 6}
OVERRIDES: dict[str, dict[str, Any]] = {
    "axk2": _INDEXER,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "deepseek_v32": _INDEXER,
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 8}, "head_dim": 32,
        "index_head_dim": 16, "index_n_heads": 16, "index_topk": 6, "o_groups": 4,
    },
    "dots3_note_text": {  # otherwise its layer with a window is 1,000 times as large as the others
        **_INDEXER,
        "per_layer_config": {
            2: {
                "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
                "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 24,
            }
        },
    },
    "glm_moe_dsa": {
        **_INDEXER, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"],
        "layer_types": ["indexed_attention"] * 3, "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "hy_v4": _INDEXER,
    "mistral_large4_text": _INDEXER,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dory": {
        "num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1,
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "emu3": {"vocabulary_map": {"<image>": 120, "<|extra_200|>": 121}},
    "ernie4_5_vl_moe_text": _mrope(3, 3, 2),
    "esm": {"pad_token_id": 1, "mask_token_id": 5},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "glm4v_text": _mrope(4, 2, 2),
    "glm4v_moe_text": _mrope(2, 1, 1),
    "glm_ocr_text": _mrope(4, 2, 2),
    "glm5_next_text": {"index_topk": 16, "index_kpool": 4},
    "gptj": {"rotary_dim": 8},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hunyuan_vl_text": _mrope(2, 2, 2, 2),
    "hy_v4_vl_text": {**_INDEXER, **_mrope(2, 1, 1)},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "longformer": {"attention_window": [8, 8]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "mistral4": {"qk_nope_head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2},
    "paddleocr_vl_text": _mrope(4, 2, 2),
    "qwen2_vl_text": _mrope(4, 2, 2),
    "qwen2_5_vl_text": _mrope(4, 2, 2),
    "qwen2_5_omni_text": _mrope(4, 2, 2),
    "qwen2_5_omni_thinker": {"vision_start_token_id": 121},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 121},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "ngram_vocab_size_base": 100, "split_ngram_parts": 1,
    },
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "step3p5": {"sliding_window": 7},
    "zamba": {
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2,
        "attention_hidden_size": 128, "attention_head_dim": 32,
    },
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "n_mamba_heads": 8, "mamba_headdim": 16, "mamba_d_state": 16, "mamba_ngroups": 1, "attention_head_dim": 32,
        "attention_hidden_size": 128,
    },
}  # fmt: skip

_ALTERNATE = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_SHARED_KEYS = {**_ALTERNATE, "num_kv_shared_layers": 2}
# Configs that are not the default one: name, class and overrides by model type.
VARIANTS: tuple[tuple[str, str, dict[str, dict[str, Any]]], ...] = (
    ("gemma2, bidirectional", "Gemma2ForCausalLM", {"gemma2": {"use_bidirectional_attention": True}}),
    ("gemma3_text, bidirectional", "Gemma3ForCausalLM", {"gemma3_text": {"use_bidirectional_attention": True}}),
    ("gemma3n_text, shared keys", "Gemma3nForCausalLM", {"gemma3n_text": _SHARED_KEYS}),
    ("gemma4_text, shared keys", "Gemma4ForCausalLM", {"gemma4_text": _SHARED_KEYS}),
    (
        "granitemoehybrid, attention only", "GraniteMoeHybridForCausalLM",
        {"granitemoehybrid": {**_MAMBA, "layer_types": ["attention"] * 2}},
    ),
    ("qwen2, window", "Qwen2ForCausalLM", {"qwen2": {**_ALTERNATE, "use_sliding_window": True, "sliding_window": 7}}),
)  # fmt: skip

_LARGE = ("VibeVoiceForConditionalGeneration",)  # whose sizes are not in its config


class Error(NamedTuple):
    """The largest relative error of the loss and the gradients, and its limit.

    The limit follows from the rounding of one process, whose weights are changed by one unit in the last place.
    """

    error: float
    limit: float


@dataclass(frozen=True)
class Row:
    """The result for one class.

    Attributes:
        refused: the reason why ``parallelize`` refuses the model; empty if it accepts it.
        unbuilt: the reason why the model could not be made, or cannot run in one process.
        cells: for each batch the error of the loss and the gradients, or the text of an exception.
        warned: a warning of ``parallelize``.
    """

    refused: str = ""
    unbuilt: str = ""
    cells: dict[str, Error | str] = field(default_factory=dict)
    warned: str = ""


@dataclass(frozen=True)
class Family:
    """A row of the table: the kind of language model, the names of the model type, the class and the overrides."""

    kind: str
    types: str
    name: str
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)


def families() -> list[Family]:
    """Every class once, and the variants."""
    found: dict[str, tuple[str, list[str]]] = {}
    for kind, (mapping, _) in KINDS.items():
        for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            types = found.setdefault(name, (kind, []))[1]
            if model_type not in types:
                types.append(model_type)
    every = [Family(kind, ", ".join(types), name) for name, (kind, types) in found.items() if name not in _LARGE]
    return every + [Family(found[name][0], types, name, changes) for types, name, changes in VARIANTS]


def tiny(family: Family) -> Any:
    """A model with random weights that are large enough that attention matters."""
    model_class = getattr(transformers, family.name)
    config = model_class.config_class
    errors = []
    for kv_heads in (2, HEADS):  # not every model has groups of query heads
        try:
            arguments = _small(config(), {**OVERRIDES, **family.changes}, {}, kv_heads)
            if "is_decoder" in arguments:  # an encoder may be made a causal model
                arguments["is_decoder"] = family.kind == "causal"
            small = config(**arguments)
            torch.manual_seed(0)
            model = model_class._from_config(small, attn_implementation="eager", dtype=torch.float32)
            break
        except Exception as error:
            errors.append(error)
    else:
        raise errors[-1]
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if p.dim() > 1:
                p.normal_(0, 0.15)
            elif "sink" in parameter_name:
                p.normal_(0, 1)
    return model.train()


def _small(config: Any, overrides: dict[str, dict[str, Any]], ids: dict[int, int], kv_heads: int) -> dict[str, Any]:
    """The arguments of the config of a tiny model.

    Args:
        config: the config of a large model.
        overrides: by model type.
        ids: the new ids of special tokens, to which this function adds.
        kv_heads: the largest number of key heads.
    """
    names = config.to_dict().keys() - _NOT_COPIED
    values = {n: v for n, v in vars(config).items() if n in names}
    layers = next((values[n] for n in _LAYERS if isinstance(values.get(n), int)), 0)
    per_layer = [n for n, v in values.items() if isinstance(v, list | tuple) and len(v) == layers > 2]
    first_of_kind: dict[Any, int] = {}
    for i in range(layers if per_layer else 0):
        first_of_kind.setdefault(tuple(str(values[n][i]) for n in per_layer), i)
    kept = [*first_of_kind.values()][:4] if len(first_of_kind) > 1 else [0, 1]
    head_dim = values.get("head_dim") or getattr(config, "hidden_size", HIDDEN) // getattr(
        config, "num_attention_heads", HEADS
    )
    kv_heads = HEADS if "kv_lora_rank" in values else kv_heads
    small: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, transformers.PreTrainedConfig):
            small[name] = {**_small(value, overrides, ids, kv_heads), "model_type": value.model_type}
        elif name == "head_dim" and "qk_rope_head_dim" in values:
            continue  # the config derives it
        elif name == "vocab_size":
            small[name] = VOCAB
        elif name in per_layer:
            small[name] = [_small_value(name, value[i], ids) for i in kept]
        elif name in _LAYERS and per_layer:
            small[name] = len(kept)
        elif re.search(r"(key_value|kv)_heads", name) and isinstance(value, int):
            small[name] = min(value, kv_heads)
        elif name in _DEFAULTS and value is None:
            small[name] = kv_heads if "heads" in name else _DEFAULTS[name]
        elif name == "rope_parameters" and isinstance(value, dict):
            small[name] = _small_rope(value, HEAD_DIM / head_dim)
        else:
            small[name] = _small_value(name, value, ids)
    return {**small, **copy.deepcopy(overrides.get(config.model_type, {}))}  # a config changes its arguments


def _small_value(name: str, value: Any, ids: dict[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_small_value(name, x, ids) for x in value)
    if isinstance(value, float):
        return 0.0 if _RANDOM.search(name) else value
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if _SPECIAL.search(name):
        return value if value < _TEXT[0] else ids.setdefault(value, 100 + len(ids) % (VOCAB - 100))
    return next((min(value, size) for pattern, size in SIZES if re.search(pattern, name)), value)


def _small_rope(rope: dict[str, Any], ratio: float) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            value = _small_rope(value, ratio)
        elif name == "mrope_section" and value:  # the channels of each of several positions
            section = [max(1, int(x * ratio)) for x in value]
            value = [section[0] + max(0, round(sum(value) * ratio) - sum(section)), *section[1:]]
        elif name == "original_max_position_embeddings" and isinstance(value, int):
            value = min(value, 16)
        small[name] = value
    return small


def make_batch(how: str, causal: bool, model: Any) -> dict[str, Tensor]:
    """A batch of text. "packed": a row of three documents. "left" or "right": padding there."""
    g = torch.Generator().manual_seed(1)
    rows, length = (1, 40) if how == "packed" else (2, 37)
    ids = torch.randint(*_TEXT, (rows, length), generator=g)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -100)
    batch = {"input_ids": ids, "labels": labels}
    if how == "packed":
        batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in pairwise(_BOUNDARIES)])[None]
        if causal:
            labels[:, _BOUNDARIES[:-1]] = -100
    elif how != "plain":
        index = torch.arange(length)
        pad = torch.tensor([[5], [12]])
        # What a padding token sees differs between attention implementations: no label is predicted from one.
        valid = index >= pad if how == "left" else index < length - pad
        predicted = index >= pad + causal if how == "left" else valid
        batch.update(attention_mask=valid.long(), labels=labels.masked_fill(~predicted, -100))
    parameters = seqpar.hf.inspection.support.parameters_of(model)
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in parameters and causal and hasattr(model.config, "vision_config"):
            # In PaliGemma the tokens of type 0 see one another. In the other models these are text.
            config: Any = model.config
            prefix = 12 if config.model_type == "paligemma" else ids.shape[1]
            batch[name] = (torch.arange(ids.shape[1]) >= prefix).long().expand(ids.shape)
    return _with_encoder(model, batch, g) if is_encoder_decoder(model) else batch


def is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def _with_encoder(model: Any, batch: dict[str, Tensor], g: torch.Generator) -> dict[str, Tensor]:
    """``batch`` as the decoder's, and text, an image or sound for the encoder."""
    parameters, config = seqpar.hf.inspection.support.parameters_of(model), model.get_encoder().config
    named = {name if name == "labels" else f"decoder_{name}": x for name, x in batch.items()}
    rows = len(batch["labels"])
    if "pixel_values" in parameters and hasattr(config, "image_size"):
        named["pixel_values"] = torch.randn(rows, 3, config.image_size, config.image_size, generator=g)
    elif "input_features" in parameters:
        length = 2 * getattr(config, "max_source_positions", 40)
        named["input_features"] = torch.randn(rows, config.num_mel_bins, length, generator=g)
    elif "input_values" in parameters:
        named["input_values"] = torch.randn(rows, 8000, generator=g)
    else:
        named["input_ids"] = torch.randint(*_TEXT, (rows, 23), generator=g)
        if "attention_mask" in batch:
            named["attention_mask"] = (torch.arange(23) < torch.tensor([[15], [23]])).long()
    return named


_BOUNDARIES = [0, 11, 29, 40]


def one_process(model: Any, batch: dict[str, Tensor], causal: bool) -> float:
    """The loss of the model without seqpar. The gradients are added to the parameters.

    A packed batch is computed document by document, because only some models keep documents apart.
    """
    rest = {k: v for k, v in batch.items() if k != "position_ids"}
    edges = _BOUNDARIES if "position_ids" in batch else [0, batch["labels"].shape[1]]
    cache = {"use_cache": False} if "use_cache" in seqpar.hf.inspection.support.parameters_of(model) else {}
    counted = [int((batch["labels"][:, a + causal : b] != -100).sum()) for a, b in pairwise(edges)]
    total = 0.0
    for (a, b), items in zip(pairwise(edges), counted, strict=True):
        part = {name: x[:, a:b] for name, x in rest.items()} if len(edges) > 2 else rest
        loss = model(**part, **cache).loss * items / sum(counted)
        loss.backward()
        total += float(loss.detach())
    return total


def error_of(model: Any, loss: float, expected: dict[str, Tensor], expected_loss: float) -> float:
    """The largest relative error of the loss and of the gradients."""
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(g.norm()) for g in expected.values())
    errors = [abs(loss - expected_loss) / max(abs(expected_loss), 1e-6)]
    for name in {**expected, **ours}:
        want, mine = (x.get(name, torch.zeros(())) for x in (expected, ours))
        errors.append(float((mine - want).norm()) / max(float(want.norm()), 1e-3 * largest))
    return next((x for x in errors if x != x), max(errors))  # NaN, or the largest


@on_ranks
def check(group: ProcessGroup, family: Family) -> Row:
    """The result for one class, the same on every rank."""
    transformers.logging.set_verbosity_error()
    try:
        model, ours, nudged = tiny(family), tiny(family), tiny(family)
        nudge(nudged.parameters())
    except Exception as error:
        return Row(unbuilt=_text(error))
    causal = family.kind != "masked" and not is_encoder_decoder(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            seqpar.hf.parallelize(ours, group=group)
        except (ValueError, TypeError) as error:
            return Row(refused=str(error))
    warned = next((str(w.message) for w in caught if "trial run" in str(w.message)), "")
    cells: dict[str, Error | str] = {}
    errors, rounding = dict[str, float](), 0.0
    for how in BATCHES:
        for each in (model, ours, nudged):
            each.zero_grad()
        if how == "packed" and is_encoder_decoder(model):
            cells[how] = "-"  # no documents are packed: all of them would see the encoder's whole input
            continue
        batch = make_batch(how, causal, model)
        try:
            expected_loss = one_process(model, batch, causal)
        except Exception as error:
            return Row(unbuilt=_text(error), cells=cells, warned=warned)
        expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        # The largest one of all batches: whether a ReLU changes its sign is chance.
        rounding = max(rounding, error_of(nudged, one_process(nudged, batch, causal), expected, expected_loss))
        try:
            loss = ours(**batch).loss
            loss.backward()
            seqpar.sync_gradients(ours, group=group)
            errors[how] = error_of(ours, float(loss.detach()), expected, expected_loss)
        except Exception as error:
            cells[how] = _text(error)
    seqpar.hf.restore(ours)
    limit = min(FACTOR * rounding + UNITS * torch.finfo(torch.float32).eps, _LARGEST_LIMIT)
    cells |= {how: Error(error, limit) for how, error in errors.items()}
    return Row(cells=cells, warned=warned)


def _text(error: Exception) -> str:
    """The error's text. "refused" stands for an error that this package raises."""
    frames = traceback.extract_tb(error.__traceback__)
    refused = isinstance(error, ValueError | TypeError) and "/seqpar/" in frames[-1].filename
    return f"{'refused' if refused else type(error).__name__}: {' '.join(str(error).split())}"


def cells_of(row: Row) -> tuple[list[str], str, bool]:
    """The cells "plain", "padded" and "packed" of the table, the reason, and whether the row is right."""
    if row.refused or row.unbuilt:
        why = re.sub(r"^model=\w+: ", "", row.refused) or f"could not be built: {row.unbuilt}"
        return ["refused" if row.refused else "-"] * 3, why, True
    cells, reasons = [], []
    for hows in (("plain",), ("right", "left"), ("packed",)):
        words = []
        for how in hows:
            result = row.cells.get(how, "did not run")
            if isinstance(result, str):
                word, _, why = result.partition(": ")
                words.append(word if word in ("refused", "-") else "FAILS")
                reasons.append(why if word in ("refused", "-") else result)
            else:
                words.append("equal" if result.error <= result.limit else f"WRONG ({result.error:.0e})")
        cells.append(next((word for word in words if word != "equal"), "equal"))
    right = all(cell in ("equal", "refused", "-") for cell in cells)
    return cells, "; ".join(dict.fromkeys(filter(None, [*reasons, row.warned]))), right


def table(kind: str, rows: list[tuple[Family, Row]]) -> list[str]:
    lines = [
        f"### {KINDS[kind][1]}",
        "",
        "| model | class | plain | padded | packed | reason |",
        "|---|---|---|---|---|---|",
    ]
    for family, row in sorted(rows, key=lambda x: x[0].types):
        if family.kind == kind:
            cells, why, _ = cells_of(row)
            why = why if len(why) <= 200 else why[:200].rsplit(" ", 1)[0] + " ..."
            why = why.replace("|", "\\|").replace("<", "\\<").replace("[", "\\[")
            lines.append(f"| {' | '.join([family.types, f'`{family.name}`', *cells, why])} |")
    return [*lines, ""]


def summary(rows: list[tuple[Family, Row]]) -> str:
    results = [row for _, row in rows]
    built = [row for row in results if not row.unbuilt]
    refused = sum(bool(row.refused) or "refused" in cells_of(row)[0] for row in built)
    errors = [x for row in built for x in row.cells.values() if isinstance(x, Error)]
    wrong = [family.name for family, row in rows if not cells_of(row)[2]]
    return (
        f"transformers {transformers.__version__}, torch {torch.__version__}: of {len(rows)} models "
        f"{len(built) - refused - len(wrong)} are equal to one process, {refused} are refused, {len(wrong)} are wrong, "
        f"and {len(rows) - len(built)} could not be built. The largest relative error of a loss or gradient is "
        f"{max((x.error for x in errors if x.error <= x.limit), default=0.0):.0e}, and at most "
        f"{max((x.error / x.limit for x in errors if x.error <= x.limit), default=0.0):.2f} of its limit, which is "
        f"{FACTOR:.0f} times the error of one process whose weights are changed by one unit in the last place."
    )


def run(chosen: list[Family]) -> list[tuple[Family, Row]]:
    """The results for some families. A family that crashes or hangs ends its processes, which are started again."""
    pool = Pool(2, DEADLINE_S)
    started = time.monotonic()
    rows = []
    for at, family in enumerate(chosen, start=1):
        try:
            row = pool.run(2, check, family)[0]
        except WorkerError as error:
            lines = str(error).splitlines()  # a rank's state, or its traceback
            row = Row(cells={"plain": f"WorkerError: {lines[-1] if 'Traceback' in lines[0] else lines[0]}"})
        rows.append((family, row))
        cells, why, _ = cells_of(row)
        errors = " ".join(f"{x.error:.0e}/{x.limit:.0e}" for x in row.cells.values() if isinstance(x, Error))
        print(
            f"{time.monotonic() - started:5.0f} s", f"{family.types} ({family.name}):", *cells, errors, why, flush=True
        )
        if at % _RENEWED_AFTER == 0:
            pool.close()
    pool.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.families")
    parser.add_argument("--only", type=lambda text: set(text.split(",")), help="names of models or classes")
    only = parser.parse_args().only
    rows = run([f for f in families() if only is None or only & {f.name, *f.types.split(", ")}])
    print(summary(rows))
    if only is None:
        text = PAGE.read_text()
        lines = [BEGIN, "", summary(rows), "", *(line for kind in KINDS for line in table(kind, rows)), END]
        PAGE.write_text(text.split(BEGIN)[0] + "\n".join(lines) + text.split(END)[1])
    return 0 if all(cells_of(row)[2] for _, row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
