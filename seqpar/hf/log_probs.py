"""``token_log_probs``: the log-probability of every token of a sharded sequence, without the logits of all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .batch import IGNORE_INDEX
from .state import patch_of
from .support import pools_last_token, predicts_in_place

LOG_PROBS = "seqpar_log_probs"  # the argument of a call that asks for them


@dataclass
class LogProbsOutput(ModelOutput):
    """What a call that asks for log-probabilities returns: ``log_probs [batch, seq]``."""

    log_probs: Tensor | None = None


def token_log_probs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The log-probability that the model gives each token, from those before it.

    The logits are computed some tokens at a time (``loss_chunk`` of ``parallelize``), and again in backward. Every rank
    computes the same loss from the result; the gradients are then summed as those of ``model(**batch).loss`` are.
    With ``batches="own"``, each rank has its own batch and loss.

    Args:
        model: a parallelized language model, also inside peft, DDP or FSDP.
        batch: the full batch, as the model is called with. Without ``labels`` or ``shift_labels``, all tokens count but
            padding and those with ``position_ids`` of 0, which start a document.

    Returns:
        float32 ``[batch, seq - 1]``, the same on every rank: at ``t`` that of label ``t + 1``, and 0 where it is -100.
        With ``shift_labels [batch, seq]``: at ``t`` that of label ``t``. With ``outputs="local"``, or a batch from
        ``shard_batch``: this rank's tokens, ``[batch, seq_local]``.

    Raises:
        ValueError: the model is not parallelized, or predicts no next tokens; or the batch cannot be sharded.
    """
    patch_of(model)
    root = next(m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, "_seqpar"))
    if pools_last_token(root) or predicts_in_place(root) or root.get_output_embeddings() is None:
        raise ValueError(f"model={type(root).__name__}: it predicts no next tokens; give a causal language model")
    given = dict(batch)
    if "labels" not in given and "shift_labels" not in given:
        given["labels"] = _labels(given)
    output: Any = model(**given, **{LOG_PROBS: True})
    return cast(Tensor, output.log_probs)


def _labels(batch: dict[str, Any]) -> Tensor:
    """The tokens themselves, int64 ``[batch, seq]``, and -100 for padding and the first tokens of documents."""
    labels, ids, mask = batch.get("input_ids"), batch.get("position_ids"), batch.get("attention_mask")
    if not isinstance(labels, Tensor) or "seqpar" in batch:
        raise ValueError("batch: expected 'input_ids' [batch, seq], or 'labels' of its tokens")
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
    if isinstance(ids, Tensor) and ids.dim() <= 2:
        labels = torch.where(ids == 0, IGNORE_INDEX, labels)
    return labels
