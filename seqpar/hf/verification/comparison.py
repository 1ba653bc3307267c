"""Compares what a parallelized model computed with what one device computed, and explains the differences.

Shapes: b batch, s the full sequence, s_local this rank's tokens, h query heads, n KV heads, d head_dim.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ...layout import LAYOUTS, shard_positions
from ...mask import document_boundaries
from ..batch import BOUNDARY_NAMES, IGNORE_INDEX, UNUSED_NAMES
from ..full_batch import has_more_than_text, merges
from ..masks import window_and_chunk
from ..state import Patch
from ..support import parameters_of, pools_last_token, predicts_in_place
from .recording import Place, Recording

_KINDS = ("batch", "path", "weights", "layer", "input", "forward", "loss", "backward", "gradient")


@dataclass(frozen=True)
class Difference:
    """One difference between a parallelized model and the same model on one device.

    Attributes:
        kind: what differs. "batch", "path" or "weights": the ranks' batches, models or weights differ from one another.
            "layer": a layer does not attend over the sharded sequence. "input": the tokens, positions or labels that
            the model received. "forward": a tensor of the forward, the first one that differs. "loss": the loss.
            "backward": the gradient of a tensor of the forward, the first one in backward that differs. "gradient": the
            gradient of a parameter.
        quantity: the name of the tensor or parameter.
        layer: the name of the attention layer; empty for the model itself.
        tokens: the global positions of the tokens that differ.
        ranks: the ranks of the sequence on which the quantity differs.
        error: the norm of the difference, relative to the norm of what one device computes.
        tolerance: the largest error that counts as equal.
        explanation: a probable cause.
        stops: whether nothing after this difference can be compared.
        at: its position in the order of the training step, among the differences of its kind.
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
        """A sort key: differences in the order of a training step."""
        return _KINDS.index(self.kind), self.at

    def values(self) -> tuple[Any, ...]:
        """The attributes, in the order of the arguments of ``Difference``."""
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
    """The increasing positions ``tokens`` as text, such as "0-3, 7". At most eight ranges are shown."""
    ranges: list[list[int]] = []
    for token in tokens:
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in ranges[:8]]
    return ", ".join(shown + ["..."] * (len(ranges) > 8))


class FullBatch:
    """A full batch, prepared for the parallelized model and for one device.

    Attributes:
        given: the batch for the parallelized model or ``shard_batch``. Labels that a padding token would predict are
            -100, because what a padding token sees depends on the attention implementation.
        for_one_device: the batch for the model without ``parallelize``, with the same labels.
        documents: int ``[b, s]``, the index of the document to which a token belongs. None if each row is one document.
        merges: whether the batch has images or sound. The model then merges them into the text before it shards.
        valid: bool ``[b, s]``, False for padding.
        positions: int64 ``[s_local]``, the global positions of this rank's tokens.
        position_ids: int64 ``[b, s]``.
        in_place: whether the model predicts each token itself, not the next one.
        labels: int64 ``[b, s]``, the label that the output for each token is compared with, or None.

    Raises:
        TypeError: the batch is not a mapping.
        ValueError: the batch is sharded already, or has no tokens.
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
        ids, documents, jumps = rest.get("position_ids"), None, False
        if self.merges and isinstance(ids, Tensor) and ids.dim() == 3:
            ids = ids[0] if len(ids) == 4 else None  # [4, b, s]: row 0 counts the tokens, the others are for images
        if boundaries and boundaries[0] is not None:
            edges = [torch.tensor(row) for row in document_boundaries(boundaries[0])]
            documents = torch.stack([torch.searchsorted(row[1:], index, right=True) for row in edges]).expand(shape)
            starts = torch.stack([row[torch.searchsorted(row, index, right=True) - 1] for row in edges])
            self.valid = torch.stack([index < row[-1] for row in edges]).expand(shape)
            ids = (index - starts).to(tokens.device) if ids is None else ids
        elif ids is not None:
            documents, jumps = _documents((ids[None] if ids.dim() == 1 else ids).expand(shape))
        self.documents = None if documents is None else documents.to(tokens.device)
        ids = index[None].to(tokens.device) if ids is None else ids[None] if ids.dim() == 1 else ids
        self.position_ids = ids.expand(shape)
        if not self.merges:  # with images, the model may compute the positions itself
            rest["position_ids"] = self.position_ids
        mask = rest.pop("attention_mask", None)
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool((mask != 0).all()):
            self.valid = self.valid & (mask != 0).cpu()
            rest["attention_mask"] = mask
        elif jumps:  # transformers would take jumps for documents
            rest["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=tokens.device)
        self.in_place = predicts_in_place(root)
        self.given = dict(batch)
        self.labels: Tensor | None = None
        if not pools_last_token(root):  # a model that classifies sequences has one label per row
            self._set_labels(rest)
        if "use_cache" in parameters_of(root):
            rest["use_cache"] = False
        self.for_one_device = rest

    def _set_labels(self, rest: dict[str, Any]) -> None:
        """Set the labels in ``given``, in ``rest`` and in ``self.labels``."""
        labels, shifted = rest.get("labels"), rest.get("shift_labels")
        if shifted is not None:
            self.given["shift_labels"] = rest["shift_labels"] = self.labels = self._ignore_padding(shifted, 0)
            rest["labels"] = self.labels  # without labels the model would compute no loss
        elif labels is not None:
            shift = 0 if self.in_place else 1
            labels = self.given["labels"] = rest["labels"] = self._ignore_padding(labels, shift)
            self.labels = F.pad(labels, (0, shift), value=IGNORE_INDEX)[:, shift:]

    def _ignore_padding(self, labels: Tensor, shift: int) -> Tensor:
        """``labels`` with -100 wherever the token that predicts them, ``shift`` tokens before, is padding."""
        is_predicted = F.pad(self.valid, (shift, 0), value=False)[:, : self.seq_len]
        return labels.masked_fill(~is_predicted.to(labels.device), IGNORE_INDEX)

    @property
    def checksum(self) -> int:
        """A checksum of the tensors of ``given``."""
        value = 0
        for name in sorted(self.given):
            if isinstance(x := self.given[name], Tensor):
                data = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                value = zlib.crc32(data, zlib.crc32(f"{name} {tuple(x.shape)}".encode(), value))
        return value


def _documents(ids: Tensor) -> tuple[Tensor | None, bool]:
    """The documents in the position ids ``[b, s]``, and whether the ids jump or repeat elsewhere.

    A document starts where the ids come back to the row's smallest id.

    Returns:
        int ``[b, s]``, or None if each row is one document; and whether they jump.
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

    Args:
        ours: the recording of the parallelized model on this rank.
        theirs: the recording of the model on one device.
        batch: the full batch.
        patch: the model's ``Patch``.
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
        want = full.index_select(-1, batch.positions)  # [b, s_local], or [ids, b, s_local] for several ids per token
        mine = mine.expand(want.shape) if mine.shape[-1] == want.shape[-1] and mine.dim() <= want.dim() else mine
        if mine.shape != want.shape:
            why = f"shape {tuple(mine.shape)}, expected this rank's part {tuple(want.shape)}"
            found.append(Difference("input", name, error=math.inf, explanation=why, at=at))
            continue
        valid = batch.valid.index_select(1, batch.positions)
        wrong = ((mine != want) & (valid if name != "input_ids" else True)).flatten(0, -2).any(0)
        if wrong.any():
            tokens = tuple(batch.positions[wrong].tolist())
            why = _explain_input(name, mine, full, patch, batch)
            found.append(Difference("input", name, tokens=tokens, error=math.inf, explanation=why, at=at))
    return found


def _explain_input(name: str, mine: Tensor, full: Tensor, patch: Patch, batch: FullBatch) -> str:
    """A probable cause why the input ``mine [b, s_local]`` is not this rank's part of ``full [b, s]``."""
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
    """Compare the recorded tensors and their gradients.

    Args:
        ours: the recording of the parallelized model on this rank.
        theirs: the recording of the model on one device.
        batch: the full batch.
        tolerance: the largest error that counts as equal, relative to the norm of a token's values.
        ranks: the number of ranks of the sequence.

    Returns:
        The first tensor of the forward that differs, and the first gradient in backward that differs. Each list has at
        most one item.
    """
    valid = batch.valid.index_select(1, batch.positions)  # [b, s_local]
    order = {place: at for at, place in enumerate(theirs.tensors) if not _is_expanded(place, ours)}
    forward, backward = [], []
    for place in order:
        found = _compare(ours.tensors.get(place), theirs.tensors[place], batch, valid, tolerance)
        if found is not None:
            tokens, error, why = found
            why = why or _explain_forward(place, ours, theirs, batch, tolerance)
            at = order[place]
            forward.append(Difference("forward", place.quantity, place.layer, tokens, (), error, tolerance, why, at=at))
            break
    scale = _gradient_scale(ours, theirs, batch, valid, ranks)
    for place in reversed(order):
        if place not in theirs.gradients:
            continue
        mine = ours.gradients.get(place)
        mine = None if mine is None else mine / scale
        found = _compare(mine, theirs.gradients[place], batch, valid, tolerance)
        if found is not None:
            tokens, error, why = found
            why = why or _explain_backward(place)
            at = len(theirs.tensors) - order[place]
            quantity = f"gradient of {place.quantity}"
            backward.append(Difference("backward", quantity, place.layer, tokens, (), error, tolerance, why, at=at))
            break
    return forward, backward


def _is_expanded(place: Place, ours: Recording) -> bool:
    """Whether ``place`` holds keys or values of a layer of which the parallelized model records the latents instead."""
    return place.quantity in ("key", "value") and Place(place.layer, "latents") in ours.tensors


def _compare(
    mine: Tensor | None, full: Tensor, batch: FullBatch, valid: Tensor, tolerance: float
) -> tuple[tuple[int, ...], float, str] | None:
    """Compare ``mine [b, s_local, ...]`` with this rank's part of ``full [b, s, ...]``.

    Returns:
        The global positions of the tokens that differ, the largest error, and a probable cause, which is empty if it
        is not known. None if nothing differs.
    """
    if mine is None:
        return (), math.inf, "this rank computed none"
    want = full.index_select(1, batch.positions)
    if mine.shape != want.shape:
        return (), math.inf, f"shape {tuple(mine.shape)}, expected this rank's part {tuple(want.shape)}"
    per_token = want.flatten(2).norm(dim=2)  # [b, s_local]
    # The error is relative to the token's norm plus the mean norm. With the token's norm alone, tokens whose values are
    # nothing but rounding error would count as different.
    counted = batch.valid.sum().clamp(min=1)
    mean = (full.flatten(2).norm(dim=2) * batch.valid).sum() / counted
    error = (mine - want).flatten(2).norm(dim=2) / (per_token + mean).clamp(min=1e-30) * valid
    wrong = ~(error <= tolerance)
    if not wrong.any():
        return None
    return tuple(batch.positions[wrong.any(0)].tolist()), float(error.nan_to_num(math.inf).max()), ""


def _gradient_scale(ours: Recording, theirs: Recording, batch: FullBatch, valid: Tensor, ranks: int) -> float:
    """The factor between this rank's gradients and those of one device: ``ranks``, ``1 / ranks`` or 1.

    It is not 1 if a wrapper averages the gradients of the parameters over the ranks, and the loss is scaled for that.
    """
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
    """A probable cause if ``place`` is the first tensor of the forward that differs; empty if none is known."""
    if place.quantity in ("query", "key", "rotated keys"):
        return "its input is equal to that on one device; the positions in its rotary embedding are probably different"
    if place.quantity == "input" and "input_ids" in ours.inputs:
        return "a module between the previous attention layer and this one mixes or changes tokens"
    if place.quantity == "attention":
        return _explain_attention(place, ours, theirs, batch, tolerance)
    return ""


def _explain_backward(place: Place) -> str:
    """A probable cause if ``place`` has the first gradient in backward that differs; empty if none is known."""
    if place.quantity in ("query", "key", "value", "latents", "rotated keys"):
        return (
            "the gradient of the attention's output is correct; the backward of the attention used different keys, "
            "values or log-sum-exps"
        )
    return ""


def _explain_attention(place: Place, ours: Recording, theirs: Recording, batch: FullBatch, tolerance: float) -> str:
    """A probable cause why this rank's attention differs although its queries, keys and values are correct.

    Compute the attention without the padding mask, without causality, without the window, and so on, and compare each
    result with what this rank computed.
    """
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
            return f"its queries, keys and values are correct; it is the attention without {left_out}"
    return "its queries, keys and values are correct; the mask, the scale or the keys of other ranks are wrong"


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention with a dense mask, as the reference.

    Args:
        q: ``[b, s_local, h, d]``.
        k: ``[b, s, n, d]``.
        v: ``[b, s, n, v_head_dim]``.
        mask: bool ``[b, s_local, s]``, or 1 in any of these dimensions. True where a query sees a key.
        scale: the factor of the scores.
        softcap: the limit of the scores, or None.
        sinks: float32 ``[h]``, or None.

    Returns:
        ``[b, s_local, h, v_head_dim]``.
    """
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
    """Compare the gradients of the parameters.

    Args:
        ours: the gradients of the parallelized model after they were summed over the ranks, by parameter name.
        theirs: the gradients of the model on one device.
        tolerance: the largest error that counts as equal, relative to the norm of the gradient.
        ranks: the number of ranks of the sequence.

    Returns:
        The parameters whose gradients differ. The explanation says if they differ by a factor only.
    """
    largest = max((float(g.norm()) for g in theirs.values()), default=0.0)
    found = []
    for name in dict.fromkeys([*theirs, *ours]):
        mine, want = ours.get(name), theirs.get(name)
        if want is None or mine is None:
            only = ours[name] if want is None else want
            if float(only.norm()) <= 1e-3 * tolerance * largest:
                continue
            why = "on one device it has no gradient" if want is None else "it has no gradient"
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
                    f"it is divided by the number of ranks, {ranks}, because a wrapper averages over them; call "
                    "parallelize with gradients='auto' or 'mean'"
                )
            elif abs(factor / ranks - 1) < 0.01:
                why = (
                    f"it is multiplied by the number of ranks, {ranks}, because no wrapper averages over them; call "
                    "parallelize with gradients='partial'"
                )
            else:
                why = f"it is the correct gradient times {factor:.4g}"
        found.append(Difference("gradient", name, error=error, tolerance=tolerance, explanation=why))
    return found
