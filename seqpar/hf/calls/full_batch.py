"""Calls with a full batch: the model runs on this rank's part of the batch, and the ranks all-gather the outputs.

All ranks of the sequence call the model with the same batch. After the all-gather, every rank has the outputs of all
tokens, in the order of the sequence. A loss that every rank computes from these outputs is the one-device loss.
Backward reduce-scatters the gradients of the outputs, so that the mean of the ranks' gradients is the one-device
gradient.

With images or sound, a multimodal model runs on the full batch on every rank, and merges the output of its towers into
the embeddings of its text model. ``before_text_model`` then shards the merged embeddings, the positions, and all other
tensors with a value for each token. The labels are sharded earlier. Each rank computes the gradients of the towers and
embeddings from its own tokens.

Shapes: batch rows of seq tokens (the full sequence), seq_local of them on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from ...base.checks import no_compile
from ...masks.mask import Mask
from ...memory.weights import CACHE_ARGUMENTS
from ...sharding.same_rows import check_every
from ..batch import BOUNDARY_NAMES, DECODER_TOKENS, UNUSED_NAMES, BatchCut, shard_for_rank, shard_over
from ..inspection.support import cache_of, parameters_of, pools_last_token, predicts_in_place, text_model
from ..losses.logits import LazyLogits, MissingLogits
from ..losses.loss import WHOLE, all_gather_tokens, join_tiles, plain, reduce_over_ranks
from ..mechanisms.encoders import has_encoder, start_decoder
from ..prompts import PROMPTS, unshare
from ..state import Forward, FullCall, Patch, forwards, shards_text_model

# The ranks compare their batches in the first 4 calls, and then in every 64th call.
_CHECKED_FIRST, _CHECKED_EVERY = 4, 64
_SEED_STEP = 0x9E3779B97F4A7C15  # an odd number: the seeds of successive calls differ in many bits
# The argument of a call of a model with TRL's add_fused_lm_head, which returns a FusedCausalLMOutput.
FUSED = "fused_lm_head"
_FUSED_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
# The outputs that have a value for each token. They are listed by name and not recognized by their shapes, because all
# ranks must all-gather the same outputs, and the shapes differ between the ranks.
PER_TOKEN = (
    *("logits", "last_hidden_state", "hidden_states", "decoder_hidden_states", "router_logits"),
    *_FUSED_PER_TOKEN,
)

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # 0 for text
_LABELS = ("labels", "shift_labels")  # sharded before the multimodal model runs
_TEXT_INPUTS = {
    *("input_ids", "inputs_embeds", "per_layer_inputs", "attention_mask", "position_ids", *CACHE_ARGUMENTS, "seqpar"),
    *("logits_to_keep", "num_items_in_batch", *_LABELS, *_TOKEN_TYPES, *BOUNDARY_NAMES, *UNUSED_NAMES, PROMPTS),
}
# Arguments of Qwen3-VL's text model: which tokens are visual, bool [rows, seq], and for each of the first layers the
# values that it adds to the visual tokens, [visual tokens, hidden].
_VISUAL_TOKENS, _VISUAL_EMBEDS = "visual_pos_masks", "deepstack_visual_embeds"
_SHARDED_SEPARATELY = ("attention_mask", "position_ids", _VISUAL_EMBEDS)  # by ``_shard_text_inputs``


def generates(kwargs: dict[str, Any]) -> bool:
    """Whether a call with full tokens reads or fills a cache."""
    if cache_of(kwargs) is not None:
        return True
    return bool(kwargs.get("use_cache")) and kwargs.get("labels") is None and not kwargs.get(FUSED)


def shard_call(
    model: Any, kwargs: dict[str, Any], has_images: bool, seed: int | None = None, fills_cache: bool = False
) -> tuple[dict[str, Any], FullCall]:
    """Prepare a call with a full batch. With images, the text model's hook shards the tokens.

    ``seed`` is the seed of attention dropout, if all ranks are known to have the same batch. Without it the ranks
    compare their batches, in some of the calls, and agree on a seed. Where a call ``fills_cache``, rows share nothing,
    because a cache has the keys of each row. The first result is the arguments of this rank's forward, with the entry
    ``seqpar``.
    """
    patch: Patch = model._seqpar
    cut, given = patch.cut, kwargs.get(PROMPTS) is not None
    if fills_cache:
        cut = replace(cut, share_prompts=False)
    if cut.share_prompts or given:
        check_shareable(model, patch)
        if has_images:
            raise ValueError("share_prompts: the batch has images; only batches of text can share prompts")
        if given and fills_cache:
            raise ValueError(f"{PROMPTS}: a call with a cache needs each row by itself; pass use_cache=False")
    return (_shard_merged_call if has_images else _shard_text_call)(model, kwargs, seed, cut)


def check_shareable(model: nn.Module, patch: Patch) -> None:
    """Raise an error if branches that share a prompt would not compute what each computes alone."""
    name, settings = type(model).__name__, patch.settings
    if patch.has_encoder:
        why = "it has an encoder, whose input differs between the rows"
    elif patch.has_mixers:
        why = "it has layers with recurrent states or convolutions, which would run from one answer into the next"
    elif patch.has_compressors:
        why = "it compresses windows of tokens, which would run from one answer into the next"
    elif patch.has_indexers:
        why = "it has indexers, which choose keys in rows without branches only"
    elif settings.alibi_slopes is not None:
        why = "alibi_slopes count all tokens between two tokens, also tokens of other answers"
    elif predicts_in_place(model) or not all(causal for causal, _, _ in patch.layer_masks):
        why = "it has layers that are not causal, in which a prompt sees its answers"
    elif any(chunk for _, _, chunk in patch.layer_masks):
        why = "it has layers that attend in chunks, which are counted without branches"
    else:
        return
    raise ValueError(f"share_prompts: {name}: {why}; train it with share_prompts=False")


def _shard_text_call(
    model: Any, kwargs: dict[str, Any], seed: int | None, cut: BatchCut
) -> tuple[dict[str, Any], FullCall]:
    patch: Patch = model._seqpar
    batch = {name: x for name, x in kwargs.items() if x is not None}
    if has_encoder(model) and not any(name in batch for name in DECODER_TOKENS):
        batch["decoder_input_ids"] = _decoder_tokens(model, batch.get("labels"))
    pools = pools_last_token(model)
    row_labels = batch.pop("labels", None) if pools else None
    fused, is_shifted = bool(batch.get(FUSED)), "shift_labels" in batch
    keep = batch.pop("logits_to_keep", 0)
    keeps_some = isinstance(keep, Tensor) or keep != 0
    if keeps_some and cut.share_prompts:
        raise ValueError(
            f"logits_to_keep={keep}: with share_prompts=True pass labels, or leave it out; TRL's GRPO and RLOO pass "
            "labels from TRL 1.15 on"
        )
    if keeps_some and ("labels" in batch or is_shifted):
        raise ValueError(f"logits_to_keep={keep}: with labels the loss needs every token; leave it out")
    if seed is None:
        local = _shard(batch, patch, cut)
    else:
        local = shard_for_rank(batch, cut, patch.rank, seed=seed)
    shard, ids = local["seqpar"], local["decoder_position_ids" if has_encoder(model) else "position_ids"]
    logits = tokens = shard.positions
    if keeps_some:
        wanted = (
            keep.cpu() % shard.seq_len
            if isinstance(keep, Tensor)
            else torch.arange(shard.seq_len, device="cpu")[-keep:]
        )
        logits = tuple(torch.isin(wanted, positions).nonzero().flatten() for positions in tokens)
        local_keep = torch.searchsorted(tokens[patch.rank], wanted[logits[patch.rank]])
        local["logits_to_keep"] = local_keep.to(ids.device)
    num_items = None
    if fused and "labels" in local:  # the labels are shifted already: the fused head would shift ``labels`` once more
        local["shift_labels"] = local.pop("labels")
        num_items = local.get("num_items_in_batch")
        num_items = local["num_items_in_batch"] = max(1, shard.num_items) if num_items is None else num_items
    last = _last_tokens(model, batch) if pools else None
    rows, places = len(ids), shard.places
    return local, FullCall(rows, tokens, logits, fused, not is_shifted, num_items, last, row_labels, places=places)


def _decoder_tokens(model: Any, labels: Tensor | None) -> Tensor:
    """The decoder's tokens that the model would make from ``labels [batch, seq]``, which are shifted to the right."""
    if labels is None or model._seqpar_from_labels is None:
        given = "neither labels nor decoder_input_ids" if labels is None else "labels without decoder_input_ids"
        raise ValueError(
            f"batch: it has {given}, so that {type(model).__name__} would make the decoder's tokens itself, in a way "
            "that is not known; pass decoder_input_ids [batch, seq]"
        )
    tokens: Tensor = model._seqpar_from_labels(labels)
    return tokens


def _last_tokens(model: Any, batch: dict[str, Any]) -> Tensor:
    """For each row, the last token that is not padding, found as in transformers: int64 ``[batch]``."""
    pad, ids = model.config.get_text_config().pad_token_id, batch.get("input_ids")
    if pad is None or ids is None:
        rows, seq_len = batch["inputs_embeds" if ids is None else "input_ids"].shape[:2]
        return torch.full((rows,), seq_len - 1, device="cpu")
    last: Tensor = (torch.arange(ids.shape[1], device=ids.device) * (ids != pad)).argmax(-1)
    return last


def _shard(batch: dict[str, Any], patch: Patch, cut: BatchCut) -> dict[str, Any]:
    """This rank's part of ``batch``. In some calls, whatever the batch, the ranks compare their batches."""
    call, patch.calls = patch.calls, patch.calls + 1
    every = check_every()
    if every is None:
        compares = call < _CHECKED_FIRST or call % _CHECKED_EVERY == 0
    else:
        compares = bool(every) and call % every == 0
    if compares:
        local = shard_over(patch.sequence_group, cut, batch)
        patch.seed = local["seqpar"].seed
    else:
        local = shard_for_rank(batch, cut, patch.rank, seed=patch.seed)
    local["seqpar"].seed = (patch.seed + call * _SEED_STEP) % 2**62
    return local


def gather_outputs(output: Any, forward: Forward, full_call: FullCall) -> Any:
    """All-gather the output of a forward on this rank's part, according to ``outputs`` of ``parallelize``."""
    if full_call.fused:
        output = reduce_fused_loss(output, forward, full_call.num_items)
    patch = forward.patch
    outputs = "full" if full_call.fills_cache else patch.settings.outputs
    leaves_logits_out = forward.wants_loss and outputs != "full"
    if isinstance(output, tuple):
        if full_call.places is not None:
            raise ValueError("return_dict=False: with share_prompts=True outputs are found by name; leave it out")
        if has_encoder(forward.model):
            raise ValueError(
                "return_dict=False: outputs of an encoder-decoder model are all-gathered by name; leave return_dict out"
            )
        if full_call.logits is not full_call.tokens:
            raise ValueError("return_dict=False: with logits_to_keep outputs are all-gathered by name; leave it out")
        output = tuple(x for x in output if not (leaves_logits_out and isinstance(x, LazyLogits)))
        return output if outputs == "local" else _gather("", output, full_call, patch)
    named = dict(output.items())
    if leaves_logits_out and "logits" in named:
        named["logits"] = MissingLogits()
    if outputs != "local" or full_call.last is not None:
        named = {name: _gather(name, x, full_call, patch) for name, x in named.items()}
        named = finish_call(named, full_call, forward.model)
    return type(output)(**named)


def finish_call(named: dict[str, Any], full_call: FullCall, model: Any) -> dict[str, Any]:
    """The outputs that ``model`` returns on one device, from the outputs of all tokens."""
    if full_call.places is not None:
        named = {name: _unshared(x, full_call.places, name) if name in PER_TOKEN else x for name, x in named.items()}
    if full_call.drop_last:
        named.update({name: x[:, :-1] for name, x in named.items() if name in _FUSED_PER_TOKEN and x is not None})
    if full_call.last is not None:
        scores = named["logits"]  # [batch, seq, num_labels]
        pooled = scores[torch.arange(len(scores), device=scores.device), full_call.last.to(scores.device)]
        named["logits"] = pooled  # [batch, num_labels]
        if full_call.labels is not None:
            user_loss = getattr(vars(model).get("_loss_function"), "user_loss", None)
            loss = user_loss or LOSS_MAPPING["ForSequenceClassification"]
            value = loss(logits=scores, labels=full_call.labels, pooled_logits=pooled, config=model.config)
            named = {"loss": value, **named}
    elif isinstance(logits := named.get("logits"), Tensor):
        setattr(logits, WHOLE, True)
    return named


def _unshared(x: Any, places: Tensor, name: str) -> Any:
    """The output ``x`` called ``name`` of the tokens of a tree, for the tokens of the batch's rows."""
    if isinstance(x, tuple | list):
        return type(x)(_unshared(y, places, name) for y in x)
    if not isinstance(x, Tensor) or isinstance(x, MissingLogits):
        return x
    if name == "router_logits":  # [n, experts]
        return unshare(x[None], places).flatten(0, 1)
    if x.dim() == 4:  # [streams, 1, n, ...]
        return unshare(x.movedim(0, 2), places).movedim(2, 0)
    return unshare(x, places)


def reduce_fused_loss(output: Any, forward: Forward, num_items: Any) -> Any:
    """Replace the loss of this rank's tokens, ``-log_probs.sum() / num_items``, by the loss of the full sequence."""
    if getattr(output, "loss", None) is None or getattr(output, "log_probs", None) is None:
        return output
    local_loss = total = -output.log_probs.sum() / num_items
    if (shard := forward.batch_shard) is not None and shard.weights is not None:
        total = -(output.log_probs * shard.weights.to(output.log_probs.device)).sum() / num_items
    # ``output.loss`` may also contain the router's loss, which has been reduced over the ranks already.
    loss = output.loss - local_loss + plain(reduce_over_ranks(total, forward.patch, forward.model))
    return type(output)(**{**output, "loss": loss})


def _gather(name: str, x: Any, full_call: FullCall, patch: Patch) -> Any:
    """The output ``x`` called ``name``, all-gathered if it has a value for each token.

    An output without a name (``return_dict=False``) has one for each token if it has the shape of hidden states.
    """
    if name == "router_logits" and isinstance(x, tuple):
        x = join_tiles(x, full_call.rows * len(full_call.tokens[patch.rank]))
    if isinstance(x, tuple | list):
        return type(x)(_gather(name, y, full_call, patch) for y in x)
    if isinstance(x, LazyLogits):
        x, name = x.materialize(), "logits"
    is_output = isinstance(x, Tensor) and not isinstance(x, MissingLogits)
    if patch.ranks == 1 or not is_output or not (name in PER_TOKEN or (not name and x.dim() == 3)):
        return x
    places = full_call.logits if name == "logits" else full_call.tokens
    if has_streams(x, full_call.rows, len(places[patch.rank])):
        return all_gather_tokens(x.movedim(0, 2), places, patch).movedim(2, 0)
    if name == "router_logits":  # [batch * seq_local, experts]
        return all_gather_tokens(x.unflatten(0, (full_call.rows, -1)), places, patch).flatten(0, 1)
    return all_gather_tokens(x, places, patch)


def has_streams(x: Tensor, rows: int, tokens: int) -> bool:
    """Whether ``x`` is ``[streams, batch, seq, ...]``, as the hidden states of Gemma 3n are."""
    return x.dim() == 4 and tuple(x.shape[1:3]) == (rows, tokens) != tuple(x.shape[:2])


def merges(model: nn.Module) -> bool:
    """Whether ``model`` merges the output of a tower into the embeddings of a text model."""
    return isinstance(model, PreTrainedModel) and not has_encoder(model) and text_model(model) is not model


def has_more_than_text(kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of a call contain images, video, sound, or placeholder tokens for these."""
    plain = bool | int | float | str
    for name, x in kwargs.items():
        is_scalar = isinstance(x, plain) or (isinstance(x, Tensor) and x.dim() == 0)
        if not (name in _TEXT_INPUTS or x is None or is_scalar):
            return True
    ids = kwargs.get("position_ids")
    if isinstance(ids, Tensor) and ids.dim() == 3:  # several ids per token: images
        return True
    return any(isinstance(x := kwargs.get(name), Tensor) and bool(x.any()) for name in _TOKEN_TYPES)


def _shard_merged_call(
    model: nn.Module, kwargs: dict[str, Any], seed: int | None, cut: BatchCut
) -> tuple[dict[str, Any], FullCall]:
    full = {name: x for name, x in kwargs.items() if x is not None}
    ids = full.get("position_ids")
    boundaries = [name for name in BOUNDARY_NAMES if name in full]
    if boundaries and ids is None:
        raise ValueError(
            f"{boundaries[0]}: with images and document boundaries, give position_ids that restart at each boundary; "
            "the positions that the model computes itself do not restart"
        )
    local, full_call = _shard_text_call(model, without_image_positions(full), seed, cut)
    for name in (*BOUNDARY_NAMES, *UNUSED_NAMES, *_LABELS, "logits_to_keep"):
        full.pop(name, None)
    full.update({name: local[name] for name in (*_LABELS, "num_items_in_batch", "seqpar") if name in local})
    if full.get("attention_mask") is None:  # with one, transformers does not look for documents, which ``shard`` has
        tokens: Any = full.get("input_ids", full.get("inputs_embeds"))
        full["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    return full, replace(full_call, keep=local.get("logits_to_keep"))


def without_image_positions(batch: Mapping[str, Any]) -> dict[str, Any]:
    """``batch`` with one position id for each token, or none."""
    text, ids = dict(batch), batch.get("position_ids")
    if isinstance(ids, Tensor) and ids.dim() == 3:
        # In [4, rows, seq], row 0 counts the tokens of each document. In [3, rows, seq] there is one document.
        text.pop("position_ids")
        if len(ids) == 4:
            text["position_ids"] = ids[0]
    return text


@no_compile
def before_text_model(text: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The hook before the text model's forward: shard its arguments, unless the batch is sharded already."""
    if (forward := forwards.now) is None or forward.shard is None:
        return None
    parameters = parameters_of(text)
    kwargs = {**dict(zip(parameters, args, strict=False)), **kwargs}
    if "use_cache" in parameters and cache_of(kwargs) is None:
        kwargs["use_cache"] = False
    forward.alike.close()  # from here on each rank draws its own random numbers
    if has_encoder(forward.model):
        kwargs = start_decoder(text, kwargs, forward)
    if forward.positions is not None:
        kwargs = _shard_text_inputs(text, kwargs, forward, forward.positions)
        forward.positions = None
        shards_text_model[0] = False
    kwargs["seqpar"] = forward.shard
    return (), kwargs


def _shard_text_inputs(text: nn.Module, kwargs: dict[str, Any], forward: Forward, positions: Tensor) -> dict[str, Any]:
    """The text model's arguments for the tokens at ``positions``, int64 ``[seq_local]``.

    ``forward.shard`` gets the masks of images and the largest position.
    """
    shard, embeds = forward.batch_shard, kwargs.get("inputs_embeds")
    if shard is None or embeds is None:
        raise ValueError(f"{type(text).__name__}: expected inputs_embeds into which images have been merged, got none")
    rows, seq = embeds.shape[:2]
    positions = positions.to(embeds.device)
    local: dict[str, Any] = {}
    for name, x in kwargs.items():
        if name in _SHARDED_SEPARATELY or name in _LABELS or not isinstance(x, Tensor) or x.numel() == 1:
            local[name] = x
        elif tuple(x.shape[:2]) == (rows, seq):
            local[name] = x.index_select(1, positions)
        else:
            raise ValueError(
                f"{name}: the text model received a tensor of shape {tuple(x.shape)}, which cannot be sharded; its "
                f"first dimensions must be batch and seq, {rows, seq}"
            )
    masks = kwargs.get("attention_mask")
    by_type = masks if isinstance(masks, dict) else {"": masks}
    blocks = {layer_type: shard.mask & mask for layer_type, mask in by_type.items() if isinstance(mask, Mask)}
    local["attention_mask"] = dict.fromkeys(masks) if isinstance(masks, dict) else None
    ids = kwargs.get("position_ids")
    local["position_ids"] = positions.expand(rows, -1) if ids is None else ids.index_select(-1, positions)
    longest = int(ids.max()) if ids is not None and forward.patch.depends_on_length else shard.max_position
    forward.shard = shard.having(block_masks=blocks, max_position=longest)
    if kwargs.get(_VISUAL_EMBEDS) is not None:
        visual = kwargs[_VISUAL_TOKENS].to(embeds.device)  # [rows, seq]
        index = visual.flatten().cumsum(0).view_as(visual) - 1  # the row of each visual token in the visual embeddings
        local_index = index.index_select(1, positions)[local[_VISUAL_TOKENS].to(embeds.device)]
        local[_VISUAL_EMBEDS] = [x.index_select(0, local_index.to(x.device)) for x in kwargs[_VISUAL_EMBEDS]]
    return local
