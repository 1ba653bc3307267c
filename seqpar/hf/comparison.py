"""Comparing a parallelized model's recording with one device's, and saying what a difference looks like.

Shapes: b batch, s the whole sequence, s_local this rank's tokens, h heads, n kv heads, d head_dim.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from ..layout import LAYOUTS, shard_positions
from ..mask import document_boundaries
from .attention import window_and_chunk
from .batch import BOUNDARY_NAMES, IGNORE_INDEX, UNUSED_NAMES
from .multimodal import has_more_than_text, merges
from .recording import Place, Recording
from .state import Patch
from .support import pools_last_token, predicts_in_place

_KINDS = ("batch", "path", "weights", "layer", "input", "forward", "loss", "backward", "gradient")


@dataclass(frozen=True)
class Difference:
    """Something in which a parallelized model differs from one device.

    Attributes:
        kind: "batch", "path" or "weights": the ranks differ from one another. "layer": a layer does not attend over the
            sharded sequence. "input": the model got other tokens, positions or labels. "forward": the first tensor of
            the forward that differs. "loss". "backward": the first gradient of such a tensor that differs, from the
            last layer to the first. "gradient": of a parameter.
        quantity: the tensor, or the parameter's name.
        layer: the attention layer's name; empty for the model itself.
        tokens: global positions of the tokens that differ.
        ranks: the ranks of the sequence on which it differs.
        error: the norm of the difference, relative to the norm of what one device computes.
        tolerance: the largest error that counts as equal.
        explanation: what the difference looks like.
        stops: whether nothing after it could be compared.
        at: its place in the order of the step, within its kind.
    """

    kind: str
    quantity: str
    layer: str = ""
    tokens: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    error: float = 0.0
    tolerance: float = 0.0
    explanation: str = ""
    stops: bool = False
    at: int = 0

    @property
    def order(self) -> tuple[int, int]:
        return _KINDS.index(self.kind), self.at

    def values(self) -> tuple[Any, ...]:
        return astuple(self)

    def __str__(self) -> str:
        where = f"layer {self.layer!r}, {self.quantity}" if self.layer else self.quantity
        parts = [f"{self.kind}: {where}"]
        if self.ranks:
            parts.append(f"on rank(s) {', '.join(map(str, self.ranks))}")
        if self.tokens:
            parts.append(f"tokens {token_list(self.tokens)}")
        if self.tolerance:
            parts.append(f"error {self.error:.2g} (tolerance {self.tolerance:.0e})")
        return "; ".join([*parts, *([self.explanation] if self.explanation else [])])


def token_list(tokens: Iterable[int]) -> str:
    """Positions as ranges: "0-3, 7"."""
    ranges: list[list[int]] = []
    for token in tokens:
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges[:8]]
    return ", ".join(shown + ["..."] * (len(ranges) > 8))


class FullBatch:
    """A full batch, as one device gets it, and what this rank should get of it.

    Attributes:
        given: the batch for ``shard_batch``. Labels that a padding token would predict do not count: what such a token
            sees depends on the attention implementation.
        for_one_device: the arguments of the model without ``parallelize``.
        documents: int ``[b, s]``, or None where each row is one document.
        merges: whether images (or sound) come with the text: the model then shards what it has merged.
        valid: bool ``[b, s]``, False for padding.
        positions: int64 ``[s_local]``, this rank's tokens.
    """

    def __init__(self, batch: Mapping[str, Any], patch: Patch, root: PreTrainedModel) -> None:
        if not isinstance(batch, Mapping):
            raise TypeError(f"batch={type(batch).__name__}: expected a dict of tensors, with 'input_ids'")
        if "seqpar" in batch:
            raise ValueError("batch: it is sharded already; give verify the full batch")
        rest = dict(batch)
        tokens = rest.get("input_ids", rest.get("inputs_embeds"))
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise ValueError("batch: expected 'input_ids' [batch, seq] or 'inputs_embeds' [batch, seq, hidden]")
        rows, self.seq_len = tokens.shape[:2]
        shape = (rows, self.seq_len)
        self.positions = shard_positions(self.seq_len, patch.ranks, patch.rank, patch.layout)
        index = torch.arange(self.seq_len)
        self.valid = torch.ones(shape, dtype=torch.bool)
        boundaries = [rest.pop(name) for name in BOUNDARY_NAMES if name in rest]
        for name in UNUSED_NAMES:
            rest.pop(name, None)
        self.merges = merges(root) and has_more_than_text(dict(batch))
        ids, documents = rest.get("position_ids"), None
        if self.merges and isinstance(ids, Tensor) and ids.dim() == 3:
            ids = ids[0] if len(ids) == 4 else None  # [4, b, s]: the first are the text's
        if boundaries and boundaries[0] is not None:
            edges = [torch.tensor(row) for row in document_boundaries(boundaries[0])]
            documents = torch.stack([torch.searchsorted(row[1:], index, right=True) for row in edges]).expand(shape)
            starts = torch.stack([row[torch.searchsorted(row, index, right=True) - 1] for row in edges])
            self.valid = torch.stack([index < row[-1] for row in edges]).expand(shape)
            ids = (index - starts).to(tokens.device) if ids is None else ids
        elif ids is not None:
            documents = find_packed_sequence_indices((ids[None] if ids.dim() == 1 else ids).expand(shape))
        self.documents = None if documents is None else documents.to(tokens.device)
        ids = index[None].to(tokens.device) if ids is None else ids[None] if ids.dim() == 1 else ids
        self.position_ids = ids.expand(shape)
        if not self.merges:  # otherwise the model may derive others from its images
            rest["position_ids"] = self.position_ids
        mask = rest.pop("attention_mask", None)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool((mask != 0).all()):
            self.valid = self.valid & (mask != 0).cpu()
            rest["attention_mask"] = mask
        self.in_place = predicts_in_place(root)
        self.given = dict(batch)
        self.labels: Tensor | None = None  # [b, s], of the token that predicts
        if not pools_last_token(root):  # otherwise they are the rows'
            self._set_labels(rest)
        if "use_cache" in inspect.signature(root.forward).parameters:
            rest["use_cache"] = False
        self.for_one_device = rest

    def _set_labels(self, rest: dict[str, Any]) -> None:
        labels, shifted = rest.get("labels"), rest.get("shift_labels")
        if shifted is not None:
            self.given["shift_labels"] = rest["shift_labels"] = self.labels = self._counting(shifted, 0)
            rest["labels"] = self.labels  # otherwise the model computes no loss
        elif labels is not None:
            shift = 0 if self.in_place else 1
            labels = self.given["labels"] = rest["labels"] = self._counting(labels, shift)
            self.labels = F.pad(labels, (0, shift), value=IGNORE_INDEX)[:, shift:]

    def _counting(self, labels: Tensor, shift: int) -> Tensor:
        """``labels`` without those that padding predicts."""
        predicting = F.pad(self.valid, (shift, 0), value=False)[:, : self.seq_len]
        return labels.masked_fill(~predicting.to(labels.device), IGNORE_INDEX)

    @property
    def checksum(self) -> int:
        value = 0
        for name in sorted(self.given):
            if isinstance(x := self.given[name], Tensor):
                data = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                value = zlib.crc32(data, zlib.crc32(f"{name} {tuple(x.shape)}".encode(), value))
        return value


def compare_inputs(ours: Recording, theirs: Recording, batch: FullBatch, patch: Patch) -> list[Difference]:
    """Compare the tokens, positions and labels that the model's forward got with this rank's part of the batch.

    With images, the positions are those that its text model got; its embeddings are compared as other tensors are.
    """
    expected = {
        "input_ids": None if batch.merges else batch.for_one_device.get("input_ids"),
        "position_ids": theirs.inputs.get("position_ids", batch.position_ids) if batch.merges else batch.position_ids,
        "labels": batch.labels,
    }
    found = []
    for at, (name, full) in enumerate(expected.items()):
        mine = ours.inputs.get(name)
        if mine is None or full is None:
            continue
        full = full.cpu()
        want = full.index_select(-1, batch.positions)  # [b, s_local]; of several positions a token [ids, b, s_local]
        mine = mine.expand(want.shape) if mine.shape[-1] == want.shape[-1] and mine.dim() <= want.dim() else mine
        if mine.shape != want.shape:
            why = f"shape {tuple(mine.shape)}, expected this rank's part {tuple(want.shape)}"
            found.append(Difference("input", name, error=math.inf, explanation=why, at=at))
            continue
        valid = batch.valid.index_select(1, batch.positions)
        wrong = ((mine != want) & (valid if name != "input_ids" else True)).flatten(0, -2).any(0)
        if wrong.any():
            tokens = tuple(batch.positions[wrong].tolist())
            why = _guess_input(name, mine, full, patch, batch)
            found.append(Difference("input", name, tokens=tokens, error=math.inf, explanation=why, at=at))
    return found


def _guess_input(name: str, mine: Tensor, full: Tensor, patch: Patch, batch: FullBatch) -> str:
    if name == "position_ids" and torch.equal(mine, torch.arange(mine.shape[-1]).expand(mine.shape)):
        return "they count this rank's tokens, not those of the sequence"
    for layout in LAYOUTS:
        other = full.index_select(-1, shard_positions(batch.seq_len, patch.ranks, patch.rank, layout))
        if layout != patch.layout and other.shape == mine.shape and torch.equal(other, mine):
            return f"they are those of layout {layout!r}, but the model has layout={patch.layout!r}"
    if name == "labels":
        unshifted = F.pad(full, (1, 0), value=IGNORE_INDEX)[:, : batch.seq_len]
        twice = F.pad(full, (0, 1), value=IGNORE_INDEX)[:, 1:]
        for candidate, how in ((twice, "shifted twice"), (unshifted, "not shifted")):
            part = candidate.index_select(1, batch.positions)
            known = (part != IGNORE_INDEX) & (mine != IGNORE_INDEX)
            if known.any() and torch.equal(part[known], mine[known]):
                return f"they are {how}: shard_batch shifts labels once, before the batch is cut"
        return "they are not the labels of this rank's tokens"
    return "they are not those of this rank's tokens"


def compare_tensors(
    ours: Recording, theirs: Recording, batch: FullBatch, tolerance: float, ranks: int
) -> tuple[list[Difference], list[Difference]]:
    """The first tensor of the forward that differs, and the first gradient of one in backward."""
    valid = batch.valid.index_select(1, batch.positions)  # [b, s_local]
    order = {place: at for at, place in enumerate(theirs.tensors) if not _is_expanded(place, ours)}
    forward, backward = [], []
    for place in order:
        found = _compare(place, ours.tensors.get(place), theirs.tensors[place], batch, valid, tolerance)
        if found is not None:
            kind, tokens, error, why = "forward", *found
            why = why or _explain_forward(place, ours, theirs, batch, tolerance)
            forward.append(
                Difference(kind, place.quantity, place.layer, tokens, (), error, tolerance, why, at=order[place])
            )
            break
    scale = _gradient_scale(ours, theirs, batch, valid, ranks)
    for place in reversed(order):
        if place not in theirs.gradients:
            continue
        mine = ours.gradients.get(place)
        mine = None if mine is None else mine / scale
        found = _compare(place, mine, theirs.gradients[place], batch, valid, tolerance)
        if found is not None:
            tokens, error, why = found
            why = why or _explain_backward(place)
            at = len(theirs.tensors) - order[place]
            quantity = f"gradient of {place.quantity}"
            backward.append(Difference("backward", quantity, place.layer, tokens, (), error, tolerance, why, at=at))
            break
    return forward, backward


def _is_expanded(place: Place, ours: Recording) -> bool:
    """Whether it is the keys or values of a layer whose latents were recorded, because those are what is sent."""
    return place.quantity in ("key", "value") and Place(place.layer, "latents") in ours.tensors


def _compare(
    place: Place, mine: Tensor | None, full: Tensor, batch: FullBatch, valid: Tensor, tolerance: float
) -> tuple[tuple[int, ...], float, str] | None:
    """The tokens that differ, the largest error and what is known about it; None where nothing differs."""
    if mine is None:
        return (), math.inf, "this rank computed none"
    want = full.index_select(1, batch.positions)
    if mine.shape != want.shape:
        return (), math.inf, f"shape {tuple(mine.shape)}, expected this rank's part {tuple(want.shape)}"
    per_token = want.flatten(2).norm(dim=2)  # [b, s_local]
    # Next to the mean norm, so that tokens with nothing but rounding error do not count.
    counted = batch.valid.sum().clamp(min=1)
    mean = (full.flatten(2).norm(dim=2) * batch.valid).sum() / counted
    error = (mine - want).flatten(2).norm(dim=2) / (per_token + mean).clamp(min=1e-30) * valid
    wrong = ~(error <= tolerance)
    if not wrong.any():
        return None
    return tuple(batch.positions[wrong.any(0)].tolist()), float(error.nan_to_num(math.inf).max()), ""


def _gradient_scale(ours: Recording, theirs: Recording, batch: FullBatch, valid: Tensor, ranks: int) -> float:
    """The factor of this rank's gradients: a wrapper that averages divides it out of the parameters' gradients."""
    for place in reversed(theirs.gradients):
        mine, full = ours.gradients.get(place), theirs.gradients[place]
        if mine is None:
            continue
        want = full.index_select(1, batch.positions)
        square = float((want * valid.reshape(*valid.shape, *[1] * (want.dim() - 2))).square().sum())
        if mine.shape != want.shape or square == 0.0:
            continue
        factor = float((mine * want).sum()) / float(want.square().sum())
        return next((float(f) for f in (ranks, 1 / ranks) if abs(factor / f - 1) < 0.05), 1.0)
    return 1.0


def _explain_forward(place: Place, ours: Recording, theirs: Recording, batch: FullBatch, tolerance: float) -> str:
    if place.quantity in ("query", "key", "rotated keys"):
        return "from the same input as on one device: the positions in its rotary embedding are others"
    if place.quantity == "input" and "input_ids" in ours.inputs:
        return "something before this layer, and after the attention before it, mixes or changes tokens"
    if place.quantity == "attention":
        return _guess_mask(place, ours, theirs, batch, tolerance)
    return ""


def _explain_backward(place: Place) -> str:
    if place.quantity in ("query", "key", "value", "latents", "rotated keys"):
        return "from the right gradient of the attention: its backward used other keys, values or statistics"
    return ""


def _guess_mask(place: Place, ours: Recording, theirs: Recording, batch: FullBatch, tolerance: float) -> str:
    """Compute the attention without its window, its documents and so on, to find the one that this rank computed."""
    module, options = theirs.options[place.layer]
    q, k, v, right = (theirs.tensors[Place(place.layer, name)] for name in ("query", "key", "value", "attention"))
    mine, positions = ours.tensors[place], batch.positions
    i, j = positions[:, None], torch.arange(batch.seq_len)[None]
    causal = bool(options.get("is_causal", None) if options.get("is_causal") is not None
                  else getattr(module, "is_causal", True))  # fmt: skip
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
    scale = options.get("scaling") or q.shape[-1] ** -0.5
    valid = batch.valid.index_select(1, positions)
    for left_out in (*parts, *filter(None, [images]), *([] if sinks is None else ["its sinks"])):
        mask = torch.ones(1, 1, 1, dtype=torch.bool)
        for name, part in {**parts, "causality": alone}.items() if left_out == images else parts.items():
            mask = mask & (part if name != left_out else True)
        found = _dense_attention(
            q.index_select(1, positions), k, v, mask, scale, options.get("softcap"),
            None if left_out == "its sinks" else sinks,
        )  # fmt: skip
        error = (mine - found).flatten(2).norm(dim=2) / right.flatten(2).norm(dim=2).mean()
        if mine.shape == found.shape and bool((error[valid] <= tolerance).all()):
            return f"from the same queries, keys and values: it is the attention without {left_out}"
    return "from the same queries, keys and values: the mask, the scale or the keys of other ranks are not right"


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """``[b, s_local, h, d]``, of ``q [b, s_local, h, d]``, ``k, v [b, s, n, d]`` and ``mask [b, s_local, s]``."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale  # [b, h, s_local, s]
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=3)
    weights = scores.softmax(-1).nan_to_num()[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def parameter_differences(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float, ranks: int
) -> list[Difference]:
    """The parameters whose gradients differ, and by which factor if that is all."""
    largest = max((float(g.norm()) for g in theirs.values()), default=0.0)
    found = []
    for name in dict.fromkeys([*theirs, *ours]):
        mine, want = ours.get(name), theirs.get(name)
        if want is None or mine is None:
            only = ours[name] if want is None else want
            if float(only.norm()) <= 1e-3 * tolerance * largest:
                continue
            why = "one device has none" if want is None else "it has none"
            found.append(Difference("gradient", name, error=math.inf, tolerance=tolerance, explanation=why))
            continue
        mine, want = mine.float(), want.float()
        scale = max(float(want.norm()), 1e-3 * largest, 1e-30)
        error = float((mine - want).norm()) / scale
        if error <= tolerance:
            continue
        factor = float((mine * want).sum()) / max(float(want.square().sum()), 1e-30)
        why = ""
        if ranks > 1 and float((mine - factor * want).norm()) / scale <= tolerance * max(abs(factor), 1.0):
            if abs(factor * ranks - 1) < 0.01:
                why = (
                    f"it is divided by the {ranks} ranks: a wrapper averages over them; give parallelize "
                    "gradients='auto' or 'mean'"
                )
            elif abs(factor / ranks - 1) < 0.01:
                why = (
                    f"it is multiplied by the {ranks} ranks: nothing averages it; parallelize with gradients='partial'"
                )
            else:
                why = f"it is the right one times {factor:.4g}"
        found.append(Difference("gradient", name, error=error, tolerance=tolerance, explanation=why))
    return found
