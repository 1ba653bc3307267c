"""``SEQPAR_VERIFY=N``: runs ``verify`` inside any training loop, before every N-th step of the optimizer."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from ..layers.wrappers import outermost
from ..sharding import Sharding
from .batch import BOUNDARY_NAMES, UNUSED_NAMES, BatchShard
from .comparison import Difference, FullBatch
from .state import Patch
from .support import parameters_of
from .verification import (
    DEADLINE_S,
    TOLERANCE,
    VerificationError,
    VerificationReport,
    exchange,
    lowest_dtype,
    verify,
    whole_parameters,
)

_log = logging.getLogger("seqpar")


class _Monitor:
    """The hooks that ``verify_while_training`` registers.

    Args:
        root: the parallelized model.
        patch: its ``Patch``.
        every: the model is verified before the first step of the optimizer and every ``every``-th step after it.
        tokens: the batch is cut to so many tokens per row.
    """

    def __init__(self, root: PreTrainedModel, patch: Patch, every: int, tokens: int) -> None:
        self.root, self.patch, self.every, self.tokens = root, patch, every, tokens
        self.steps = 0
        self.batch: dict[str, Any] | None = None

    def before_forward(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if root.training and torch.is_grad_enabled():
            self.batch = {**dict(zip(parameters_of(root), args, strict=False)), **kwargs}

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        ours = {id(p) for p in self.root.parameters()}
        if self.batch is None or not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        self.steps += 1
        if (self.steps - 1) % self.every:
            return
        with torch.no_grad():
            batch = self._first_tokens(self._whole(self.batch))
        self._check_summed(FullBatch(batch, self.patch, self.root).seq_len)
        report = verify(outermost(self.root), batch)  # raises an error if something differs
        _log.info("step %d: %s", self.steps, report)

    def _check_summed(self, seq_len: int) -> None:
        """Raise a VerificationError if the gradients that the optimizer is about to use differ between the ranks."""
        patch, root = self.patch, self.root
        if patch.ranks == 1:
            return
        whole = {n: p.grad for n, p in whole_parameters(root).items() if p.grad is not None}
        norms = {n: g.detach().double().norm() for n, g in whole.items()}
        values = torch.stack([*norms.values()]).tolist() if norms else []
        by_rank = exchange(patch, [[*zip(norms, values, strict=True)]], timedelta(seconds=DEADLINE_S))
        ranks = [dict(rank[0]) for rank in by_rank]
        tolerance = TOLERANCE[lowest_dtype(root)]
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            norm = [rank.get(name, 0.0) for rank in ranks]
            error = (max(norm) - min(norm)) / max(*norm, 1e-30)
            if error > tolerance:
                why = "it differs between the ranks: the ranks' partial gradients were not summed"
                found = Difference("gradient", name, ranks=tuple(range(patch.ranks)), error=error, tolerance=tolerance,
                                   explanation=why)  # fmt: skip
                nan = float("nan")
                raise VerificationError(
                    VerificationReport((found,), nan, nan, 0, seq_len, patch.ranks, patch.strategy, patch.layout)
                )

    def _whole(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The full batch. It is all-gathered if the model was called with this rank's part."""
        shard = batch.get("seqpar")
        if not isinstance(shard, BatchShard):
            return batch
        given = {name: x for name, x in batch.items() if name != "seqpar"}
        if shard.in_place is not None:
            given["labels"] = shard.in_place[0]
        elif "labels" in given:
            given["shift_labels"] = given.pop("labels")
        if shard.valid is not None:
            given["attention_mask"] = shard.valid.int()
        sharding = Sharding(shard.seq_len, shard.layout, mesh=self.patch.mesh, group=self.patch.given_group)
        local = sharding.lengths[self.patch.rank]
        return {
            name: sharding.unshard(x) if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == local else x
            for name, x in given.items()
        }

    def _first_tokens(self, batch: dict[str, Any]) -> dict[str, Any]:
        """At most ``tokens`` tokens of each row, without the padding at the start of all rows.

        The batch is cut because a single rank must compute it alone.

        Raises:
            ValueError: the batch has images, and its rows have more than ``tokens`` tokens.
        """
        full = FullBatch(batch, self.patch, self.root)
        if full.seq_len <= self.tokens:
            return batch
        if full.merges:
            raise ValueError(
                f"SEQPAR_VERIFY_TOKENS={self.tokens}: the rows of the batch have {full.seq_len} tokens, and rows with "
                f"images cannot be cut; set it to {full.seq_len} or more, or verify a shorter batch by seqpar.hf.verify"
            )
        start = int(full.valid.any(0).int().argmax())
        span = slice(start, start + self.tokens)
        cut = {name: x[:, span] if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == full.seq_len else x
               for name, x in batch.items() if name not in (*BOUNDARY_NAMES, *UNUSED_NAMES)}  # fmt: skip
        cut["position_ids"] = full.position_ids[:, span]
        return cut


def verify_while_training(root: PreTrainedModel, patch: Patch) -> None:
    """Verify ``root`` before the optimizer's first step and every N-th step after it, if ``SEQPAR_VERIFY=N`` is set.

    The batch is the last training batch, cut to its first ``SEQPAR_VERIFY_TOKENS`` tokens (1,024 by default). A longer
    batch with images raises an error.

    Args:
        root: the parallelized model.
        patch: its ``Patch``, to which the handles of the hooks are added.

    Raises:
        ValueError: one of the environment variables is not a positive number.
    """
    numbers = []
    for name, default in (("SEQPAR_VERIFY", "0"), ("SEQPAR_VERIFY_TOKENS", "1024")):
        text = os.environ.get(name) or default
        if not text.isdecimal() or (int(text) == 0 and default != "0"):
            raise ValueError(f"{name}={text!r}: expected a number")
        numbers.append(int(text))
    every, tokens = numbers
    if every == 0:
        return
    monitor = _Monitor(root, patch, every, max(tokens, patch.ranks))
    patch.handles.append(root.register_forward_pre_hook(monitor.before_forward, prepend=True, with_kwargs=True))
    patch.handles.append(register_optimizer_step_pre_hook(monitor.before_step))
