"""Compares what a parallelized model computed with what one device computed, and explains the differences.

Shapes: b batch, s the full sequence, s_local this rank's tokens, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ...masks.mask import Mask
from ...masks.rules import document_boundaries
from ...placement.layout import LAYOUTS, shard_positions
from ...verification.report import Difference
from ..batch import BOUNDARY_NAMES, IGNORE_INDEX, UNUSED_NAMES, BatchSpec, tokens_of
from ..calls.attention import window_and_chunk
from ..calls.full_batch import has_more_than_text, merges, without_image_positions
from ..inspection.support import parameters_of, pools_last_token, predicts_in_place
from ..prompts import PROMPTS
from ..state import Patch
from .recording import Recording, TensorPlace

# Probable causes, by the quantity that differs first. The attention's are found by ``_explain_attention``.
_ROTARY = "its input is equal to that on one device; the positions in its rotary embedding are probably different"
_MIXED = "a module between the previous attention layer and this one mixes or changes tokens"
_FORWARD_CAUSES = {**dict.fromkeys(("query", "key", "rotated keys"), _ROTARY), "input": _MIXED}
_BACKWARD_CAUSES = dict.fromkeys(
    ("query", "key", "value", "latents", "rotated keys"),
    "the gradient of the attention's output is correct; the backward of the attention used different keys, values or "
    "log-sum-exps",
)


class FullBatch:
    """A full batch, prepared for the parallelized model and for one device.

    It is parsed without ``hf/batch.py``, so that errors of that file are found. Labels that a padding token would
    predict are -100, because what a padding token sees depends on the attention implementation.
    """

    def __init__(self, batch: Mapping[str, Any], patch: Patch, root: PreTrainedModel) -> None:
        tokens, entries = tokens_of(batch, "give verify the full batch"), dict(batch)
        if entries.get(PROMPTS) is not None:
            raise ValueError(
                f"{PROMPTS}: verify compares whole rows; give it some rollouts as rows, each one behind its prompt"
            )
        rows, self.seq_len = tokens.shape[:2]
        shape = (rows, self.seq_len)
        # With "balanced", the documents that ``hf/batch.py`` finds decide which tokens a rank holds, but no result.
        found = BatchSpec(without_image_positions(batch), patch.cut) if patch.settings.layout == "balanced" else None
        self.tokens = patch.cut.tokens(self.seq_len, Mask.full()) if found is None else found.tokens
        self.positions = self.tokens.rank_positions(patch.rank)  # [s_local]
        index = torch.arange(self.seq_len, device="cpu")
        self.valid = torch.ones(shape, dtype=torch.bool, device="cpu")  # False for padding
        boundaries = [entries.pop(name) for name in BOUNDARY_NAMES if name in entries]
        for name in UNUSED_NAMES:
            entries.pop(name, None)
        self.merges = merges(root) and has_more_than_text(dict(batch))  # images or sound into the text
        ids, documents, jumps = entries.get("position_ids"), None, False
        if self.merges and isinstance(ids, Tensor) and ids.dim() == 3:
            ids = ids[0] if len(ids) == 4 else None  # [4, b, s]: row 0 counts the tokens, the others are for images
        if boundaries and boundaries[0] is not None:
            edges = [torch.tensor(row, device="cpu") for row in document_boundaries(boundaries[0])]
            documents = torch.stack([torch.searchsorted(row[1:], index, right=True) for row in edges]).expand(shape)
            starts = torch.stack([row[torch.searchsorted(row, index, right=True) - 1] for row in edges])
            self.valid = torch.stack([index < row[-1] for row in edges]).expand(shape)
            ids = (index - starts).to(tokens.device) if ids is None else ids
        elif ids is not None:
            documents, jumps = _documents((ids[None] if ids.dim() == 1 else ids).expand(shape))
        # [b, s], the index of each token's document; None if each row is one document
        self.documents = None if documents is None else documents.to(tokens.device)
        ids = index[None].to(tokens.device) if ids is None else ids[None] if ids.dim() == 1 else ids
        self.position_ids = ids.expand(shape)  # [b, s]
        if not self.merges:  # with images, the model may compute the positions itself
            entries["position_ids"] = self.position_ids
        mask = entries.pop("attention_mask", None)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool((mask != 0).all()):
            self.valid = self.valid & (mask != 0).cpu()
            entries["attention_mask"] = mask
        elif jumps:  # transformers would take jumps for documents
            entries["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=tokens.device)
        self.in_place = predicts_in_place(root)
        self.for_parallelized = dict(batch)
        self.labels: Tensor | None = None  # [b, s], the label of the output for each token
        if not pools_last_token(root):  # a model that classifies sequences has one label per row
            self._set_labels(entries)
        if "use_cache" in parameters_of(root):
            entries["use_cache"] = False
        self.for_one_device = entries

    def _set_labels(self, entries: dict[str, Any]) -> None:
        labels, targets = entries.get("labels"), entries.get("shift_labels")
        if targets is not None:
            self.labels = self.for_parallelized["shift_labels"] = self._ignore_padding(targets, 0)
            # without labels the model would compute no loss
            entries["shift_labels"] = entries["labels"] = self.labels
        elif labels is not None:
            shift = 0 if self.in_place else 1
            labels = self.for_parallelized["labels"] = entries["labels"] = self._ignore_padding(labels, shift)
            self.labels = F.pad(labels, (0, shift), value=IGNORE_INDEX)[:, shift:]

    def _ignore_padding(self, labels: Tensor, shift: int) -> Tensor:
        """``labels`` with -100 wherever the token that predicts them, ``shift`` tokens before, is padding."""
        is_predicted = F.pad(self.valid, (shift, 0), value=False)[:, : self.seq_len]
        return labels.masked_fill(~is_predicted.to(labels.device), IGNORE_INDEX)


def _documents(ids: Tensor) -> tuple[Tensor | None, bool]:
    """The index of each token's document, int ``[b, s]``, and whether ``ids`` jump or repeat elsewhere.

    A document starts where the ids come back to the row's smallest id. None if each row is one document.
    """
    step = F.pad(ids.diff(dim=1), (1, 0), value=1)
    smallest = ids == ids.amin(1, keepdim=True)
    repeats = ((step == 0) & ~smallest).any(1, keepdim=True)  # then the smallest id may be repeated as well
    starts = smallest & ((step < 0) | ((step == 0) & ~repeats))
    return starts.cumsum(1) if bool(starts.any()) else None, bool(((step != 1) & ~starts).any())


def compare_inputs(ours: Recording, theirs: Recording, batch: FullBatch, patch: Patch) -> list[Difference]:
    """Compare the tokens, positions and labels that the model's forward received with this rank's part of the batch.

    With images, compare only the labels and the positions that the text model received. ``compare_tensors`` compares
    the merged embeddings.
    """
    full_inputs = {
        "input_ids": None if batch.merges else batch.for_one_device.get("input_ids"),
        "position_ids": theirs.inputs.get("position_ids", batch.position_ids) if batch.merges else batch.position_ids,
        "labels": batch.labels,
    }
    differences = []
    for at, (name, full) in enumerate(full_inputs.items()):
        local = ours.inputs.get(name)
        if local is None or full is None:
            continue
        full = full.cpu()
        expected = full.index_select(-1, batch.positions)  # [b, s_local], or [ids, b, s_local] with several ids
        if local.shape[-1] == expected.shape[-1] and local.dim() <= expected.dim():
            local = local.expand(expected.shape)
        if local.shape != expected.shape:
            why = _shapes(local, expected)
            differences.append(Difference("input", name, error=math.inf, explanation=why, at=at))
            continue
        valid = batch.valid.index_select(1, batch.positions)
        wrong = ((local != expected) & (valid if name != "input_ids" else True)).flatten(0, -2).any(0)
        if wrong.any():
            tokens = tuple(batch.positions[wrong].tolist())
            why = next(sentence for x, sentence in _input_causes(name, full, patch, batch) if _matches(local, x, name))
            differences.append(Difference("input", name, tokens=tokens, error=math.inf, explanation=why, at=at))
    return differences


def _input_causes(name: str, full: Tensor, patch: Patch, batch: FullBatch) -> Iterator[tuple[Tensor | None, str]]:
    """Wrong parts of ``full [..., s]`` that a rank may have, each with a sentence. The last one is any part."""
    if name == "position_ids":
        count = torch.arange(len(batch.positions), device="cpu").expand(*full.shape[:-1], -1)
        yield count, "they count this rank's tokens, not the tokens of the sequence"
    for layout in LAYOUTS:
        if layout != batch.tokens.layout:
            part = full.index_select(-1, shard_positions(batch.seq_len, patch.ranks, patch.rank, layout))
            yield part, f"they belong to layout {layout!r}, but the model has layout={batch.tokens.layout!r}"
    if name == "labels":
        once = "shard_batch shifts labels once, before the batch is cut"
        for padding, start, how in (((0, 1), 1, "shifted twice"), ((1, 0), 0, "not shifted")):
            moved = F.pad(full, padding, value=IGNORE_INDEX)[:, start : start + batch.seq_len]
            yield moved.index_select(1, batch.positions), f"they are {how}: {once}"
    yield None, f"they are not the {name if name == 'labels' else 'values'} of this rank's tokens"


def _matches(local: Tensor, candidate: Tensor | None, name: str) -> bool:
    if candidate is None or local.shape != candidate.shape:
        return candidate is None
    if name != "labels":
        return torch.equal(local, candidate)
    counted = (candidate != IGNORE_INDEX) & (local != IGNORE_INDEX)
    return bool(counted.any()) and torch.equal(candidate[counted], local[counted])


def _shapes(local: Tensor, expected: Tensor) -> str:
    return f"shape {tuple(local.shape)}, expected this rank's part {tuple(expected.shape)}"


def compare_tensors(
    ours: Recording, theirs: Recording, batch: FullBatch, tolerance: float, losses: int
) -> list[Difference]:
    """The first recorded tensor of the forward that differs, and the first gradient in backward that differs.

    A gradient of this rank's tokens is the sum of the gradients of that many ``losses``.
    """
    # A parallelized layer of latent attention records latents instead of keys and values.
    order = [
        place
        for place in theirs.tensors
        if place.quantity not in ("key", "value") or TensorPlace(place.layer, "latents") not in ours.tensors
    ]
    differences = []
    for kind, places, local, full in (
        ("forward", order, ours.tensors, theirs.tensors),
        ("backward", order[::-1], {p: x / losses for p, x in ours.gradients.items()}, theirs.gradients),
    ):
        for at, place in enumerate(places):
            result = _compare(local.get(place), full[place], batch, tolerance) if place in full else None
            if result is None:
                continue
            tokens, error, why = result
            if kind == "backward":
                why = why or _BACKWARD_CAUSES.get(place.quantity, "")
            elif not why and place.quantity == "attention":
                why = _explain_attention(place, ours, theirs, batch, tolerance)
            elif not why and (place.quantity != "input" or "input_ids" in ours.inputs):
                why = _FORWARD_CAUSES.get(place.quantity, "")
            name = place.quantity if kind == "forward" else f"gradient of {place.quantity}"
            differences.append(Difference(kind, name, place.layer, tokens, (), error, tolerance, why, at=at))
            break
    return differences


def _compare(
    local: Tensor | None, full: Tensor, batch: FullBatch, tolerance: float
) -> tuple[tuple[int, ...], float, str] | None:
    """Compare ``local [b, s_local, ...]`` with this rank's part of ``full [b, s, ...]``.

    Returns the global positions of the tokens that differ, the largest error, and a cause if it is known; or None.
    """
    if local is None:
        return (), math.inf, "this rank computed none"
    expected = full.index_select(1, batch.positions)
    if local.shape != expected.shape:
        return (), math.inf, _shapes(local, expected)
    per_token = expected.flatten(2).norm(dim=2)  # [b, s_local]
    # The error is relative to the token's norm plus the mean norm. With the token's norm alone, tokens whose values are
    # nothing but rounding error would count as different.
    mean = (full.flatten(2).norm(dim=2) * batch.valid).sum() / batch.valid.sum().clamp(min=1)
    error = (local - expected).flatten(2).norm(dim=2) / (per_token + mean).clamp(min=1e-30)
    error = error * batch.valid.index_select(1, batch.positions)
    wrong = ~(error <= tolerance)
    if not wrong.any():
        return None
    return tuple(batch.positions[wrong.any(0)].tolist()), float(error.nan_to_num(math.inf).max()), ""


def _explain_attention(
    place: TensorPlace, ours: Recording, theirs: Recording, batch: FullBatch, tolerance: float
) -> str:
    """Why this rank's attention may differ although its queries, keys and values are correct.

    The attention is computed without the padding mask, without causality, without the window, and so on. One of these
    results may be what this rank computed.
    """
    module, options = theirs.options[place.layer]
    q, k, v, right = (theirs.tensors[TensorPlace(place.layer, name)] for name in ("query", "key", "value", "attention"))
    local, positions = ours.tensors[place], batch.positions
    i, j = positions[:, None], torch.arange(batch.seq_len, device="cpu")[None]
    is_causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window, chunk = window_and_chunk(module, options.get("sliding_window"))
    parts: dict[str, Tensor] = {"the padding mask": batch.valid[:, None, :]}  # bool [b or 1, s_local or 1, s]
    dense, images = options.get("attention_mask"), ""
    if causal:
        parts["causality"] = alone = (j <= i)[None]
        if batch.merges and isinstance(dense, Tensor):  # [b, 1, s, s], 0 where visible
            parts["causality"] = alone | (dense[:, 0].cpu().index_select(1, positions) == 0)
            images = "the blocks of its images"
    if window is not None:
        parts[f"its sliding window of {window}"] = ((i - j).abs() < window)[None]
    if chunk is not None:
        parts[f"its chunks of {chunk}"] = (i // chunk == j // chunk)[None]
    if batch.documents is not None:
        documents = batch.documents.cpu()
        parts["the documents' boundaries"] = documents[:, positions][:, :, None] == documents[:, None, :]
    sinks = options.get("s_aux")
    sinks = None if sinks is None else sinks.detach().cpu().float()
    scale, softcap = options.get("scaling") or q.shape[-1] ** -0.5, options.get("softcap")
    valid = batch.valid.index_select(1, positions)
    for missing in (*parts, *filter(None, [images]), *([] if sinks is None else ["its sinks"])):
        mask = torch.ones(1, 1, 1, dtype=torch.bool, device="cpu")
        for name, part in {**parts, "causality": alone}.items() if missing == images else parts.items():
            mask = mask & (part if name != missing else True)
        q_local = q.index_select(1, positions)
        found = _dense_attention(q_local, k, v, mask, scale, softcap, None if missing == "its sinks" else sinks)
        error = (local - found).flatten(2).norm(dim=2) / right.flatten(2).norm(dim=2).mean()
        if local.shape == found.shape and bool((error[valid] <= tolerance).all()):
            return f"its queries, keys and values are correct; it is the attention without {missing}"
    return (
        "its queries, keys and values are correct; the mask, the scale, a kernel or the keys of other ranks are wrong "
        "(seqpar.replay_report finds the step that a message or a kernel has made wrong)"
    )


def _dense_attention(
    q: Tensor,  # [b, s_local, h, d]
    k: Tensor,  # [b, s, n, d]
    v: Tensor,  # [b, s, n, v_head_dim]
    mask: Tensor,  # bool [b, s_local, s], or 1 in any of these dimensions; True where a query sees a key
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,  # float32 [h]
) -> Tensor:
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale  # [b, h, s_local, s]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=3)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v)
