"""Models that merge the output of a vision or audio tower into the embeddings of a text model.

The multimodal model, with its towers, runs on the full batch on every rank. Before its text model runs, the arguments
of the text model are sharded: the merged embeddings ``inputs_embeds``, the positions, and all other tensors with a
value for each token. The labels are sharded before the multimodal model runs. Each rank therefore computes the
gradients of the towers and embeddings from its own tokens. They are partial gradients, like those of all other weights.

A batch without images is sharded before the multimodal model runs, as for any other model.

Shapes: rows of a batch, seq tokens of the full sequence, seq_local of them on this rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checks import no_compile
from ..mask import Mask
from .batch import BOUNDARY_NAMES, UNUSED_NAMES, BatchShard
from .state import Forward, Whole, current_forward, cuts_below
from .support import parameters_of, text_model
from .whole import shard_call

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # 0 for text
_LABELS = ("labels", "shift_labels")  # sharded before the multimodal model runs
_TEXT_INPUTS = {
    *("input_ids", "inputs_embeds", "per_layer_inputs", "attention_mask", "position_ids", "past_key_values", "seqpar"),
    *("logits_to_keep", "num_items_in_batch", *_LABELS, *_TOKEN_TYPES, *BOUNDARY_NAMES, *UNUSED_NAMES),
}
# Arguments of Qwen3-VL's text model: which tokens are visual, bool [rows, seq], and for each of the first layers the
# values that it adds to the visual tokens, [visual tokens, hidden].
_VISUAL_TOKENS, _VISUAL_EMBEDS = "visual_pos_masks", "deepstack_visual_embeds"
_SHARDED_SEPARATELY = ("attention_mask", "position_ids", _VISUAL_EMBEDS)  # ``_cut`` shards them in a way of their own


def merges(model: nn.Module) -> bool:
    """Whether ``model`` merges the output of a tower into the embeddings of a text model."""
    return isinstance(model, PreTrainedModel) and text_model(model) is not model


def has_more_than_text(kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of a call contain images, video, sound, or placeholder tokens for these."""
    plain = bool | int | float | str
    if any(
        not (name in _TEXT_INPUTS or x is None or isinstance(x, plain) or _is_scalar(x)) for name, x in kwargs.items()
    ):
        return True
    ids = kwargs.get("position_ids")
    if isinstance(ids, Tensor) and ids.dim() == 3:  # several ids per token, as for images
        return True
    return any(isinstance(x := kwargs.get(name), Tensor) and bool(x.any()) for name in _TOKEN_TYPES)


def _is_scalar(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0


def shard_merged_call(
    model: nn.Module, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Whole, BatchShard, Tensor | None]:
    """Prepare a call with a full batch with images, whose tokens are sharded before the text model runs.

    Args:
        model: the multimodal model.
        kwargs: the arguments of its forward.

    Returns:
        * The arguments of the multimodal model, with all tokens and with this rank's labels.
        * What ``gather_outputs`` needs to know about the call.
        * What the attention layers need to know about the batch.
        * The indices of this rank's tokens whose logits are computed, int64; None for all.

    Raises:
        ValueError: the batch cannot be sharded, or the ranks have different batches.
    """
    given = {name: x for name, x in kwargs.items() if x is not None}
    ids = given.get("position_ids")
    boundaries = [name for name in BOUNDARY_NAMES if name in given]
    if boundaries and ids is None:
        raise ValueError(
            f"{boundaries[0]}: with images and document boundaries, give position_ids that restart at each boundary; "
            "the positions that the model computes itself do not restart"
        )
    batch = dict(given)
    if isinstance(ids, Tensor) and ids.dim() == 3:
        # In [4, rows, seq], row 0 counts the tokens of each document. In [3, rows, seq] there is one document.
        batch.pop("position_ids")
        if len(ids) == 4:
            batch["position_ids"] = ids[0]
    local, whole = shard_call(model, batch)
    shard, keep = local["seqpar"], local.get("logits_to_keep")
    for name in (*BOUNDARY_NAMES, *UNUSED_NAMES, *_LABELS, "logits_to_keep"):
        given.pop(name, None)
    given.update({name: local[name] for name in (*_LABELS, "num_items_in_batch") if name in local})
    if given.get("attention_mask") is None:  # with one, transformers does not look for documents, which ``shard`` has
        tokens: Any = given.get("input_ids", given.get("inputs_embeds"))
        given["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    return given, whole, shard, keep


@no_compile
def before_text_model(text: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The hook before the text model's forward: shard its arguments, unless the batch was sharded before.

    Raises:
        ValueError: a tensor argument has no dimension of tokens.
    """
    forward = current_forward()
    if forward is None or forward.shard is None:
        return None
    parameters = parameters_of(text)
    kwargs = {**dict(zip(parameters, args, strict=False)), **kwargs}
    if "use_cache" in parameters and forward.generation is None and kwargs.get("past_key_values") is None:
        kwargs["use_cache"] = False
    if forward.cut is not None:
        kwargs = _cut(text, kwargs, forward, forward.cut)
        forward.cut = None
        cuts_below[0] = False
    kwargs["seqpar"] = forward.shard
    return (), kwargs


def _cut(text: nn.Module, kwargs: dict[str, Any], forward: Forward, positions: Tensor) -> dict[str, Any]:
    """This rank's part of the text model's arguments.

    Args:
        text: the text model.
        kwargs: the arguments of its forward, with all tokens.
        forward: the current ``Forward``. The masks of images and the largest position are added to its ``shard``.
        positions: int64 ``[seq_local]``, the positions of this rank's tokens.
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
                f"first dimensions must be those of the tokens, {rows, seq}"
            )
    masks = kwargs.get("attention_mask")
    by_type = masks if isinstance(masks, dict) else {"": masks}
    blocks = {kind: shard.mask & mask for kind, mask in by_type.items() if isinstance(mask, Mask)}
    local["attention_mask"] = dict.fromkeys(masks) if isinstance(masks, dict) else None
    ids = kwargs.get("position_ids")
    if ids is None:
        local["position_ids"] = positions.expand(rows, -1)
    else:
        local["position_ids"] = ids.index_select(-1, positions)
    longest = int(ids.max()) if ids is not None and forward.patch.depends_on_length else shard.max_position
    forward.shard = replace(shard, block_masks=blocks, max_position=longest)
    if kwargs.get(_VISUAL_EMBEDS) is not None:
        visual = kwargs[_VISUAL_TOKENS].to(embeds.device)  # [rows, seq]
        index = visual.flatten().cumsum(0).view_as(visual) - 1  # the row of each visual token in the visual embeddings
        local_index = index.index_select(1, positions)[local[_VISUAL_TOKENS].to(embeds.device)]
        local[_VISUAL_EMBEDS] = [x.index_select(0, local_index.to(x.device)) for x in kwargs[_VISUAL_EMBEDS]]
    return local
