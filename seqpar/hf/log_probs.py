"""``token_log_probs``: the log-probabilities of a sharded sequence, without the logits of all tokens in memory."""

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

LOG_PROBS = "seqpar_log_probs"  # an argument of the model's forward: True asks for log-probabilities


@dataclass
class LogProbsOutput(ModelOutput):
    """The output of a forward that was asked for log-probabilities.

    Attributes:
        log_probs: float32 ``[batch, seq]``.
    """

    log_probs: Tensor | None = None


def token_log_probs(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The log-probability of each token given the tokens before it.

    The logits are computed for a few tokens at a time (``loss_chunk`` of ``parallelize``), and again in backward. Each
    rank must compute the same loss from the result. Backward then computes partial gradients, which are summed over the
    ranks in the same way as those of ``model(**batch).loss``. With ``batches="own"``, each rank has its own batch and
    its own loss.

    Args:
        model: a parallelized language model, also inside peft, DDP or FSDP.
        batch: the full batch, as the model is called with it. Without ``labels`` or ``shift_labels``, all tokens are
            labels, except for padding and for tokens whose position is 0 in ``position_ids``, which start a document.

    Returns:
        float32 ``[batch, seq - 1]``, the same on every rank. Entry ``t`` is the log-probability of label ``t + 1``, and
        0 if this label is -100. With ``shift_labels [batch, seq]`` the result is ``[batch, seq]``, and entry ``t`` is
        the log-probability of label ``t``. With ``outputs="local"``, or with a batch from ``shard_batch``, the result
        has this rank's tokens only, ``[batch, seq_local]``.

    Raises:
        ValueError: the model is not parallelized, it does not predict the next token, or the batch cannot be sharded.
    """
    patch_of(model)
    root = next(m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, "_seqpar"))
    if pools_last_token(root) or predicts_in_place(root) or root.get_output_embeddings() is None:
        raise ValueError(
            f"model={type(root).__name__}: it does not predict the next token; give a causal language model"
        )
    given = dict(batch)
    if "labels" not in given and "shift_labels" not in given:
        given["labels"] = _labels(given)
    output: Any = model(**given, **{LOG_PROBS: True})
    return cast(Tensor, output.log_probs)


def _labels(batch: dict[str, Any]) -> Tensor:
    """The labels of a batch without labels: its tokens, and -100 for padding and the first token of each document."""
    labels, ids, mask = batch.get("input_ids"), batch.get("position_ids"), batch.get("attention_mask")
    if not isinstance(labels, Tensor) or "seqpar" in batch:
        raise ValueError("batch: expected 'input_ids' [batch, seq] of a full batch, or 'labels'")
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
    if isinstance(ids, Tensor) and ids.dim() <= 2:
        labels = torch.where(ids == 0, IGNORE_INDEX, labels)
    return labels
