"""Runs ``verify`` inside any training loop, before a step of the optimizer.

With ``SEQPAR_VERIFY=N`` it runs before every N-th step. Without this variable it runs once, before the first step, on a
few tokens, if the model has code that is not of transformers and its weights are not sharded. ``SEQPAR_VERIFY=0`` turns
it off.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from ...base.settings import number
from ...patching.forwards import function_of
from ...verification.gradients import all_gather_values
from ...verification.report import Difference, VerificationError, VerificationReport
from ...verification.step import tolerance_of
from ..batch import BOUNDARY_NAMES, IGNORE_INDEX, UNUSED_NAMES, BatchShard
from ..inspection.support import parameters_of
from ..state import Patch
from .comparison import FullBatch
from .recording import LIBRARIES, unsharded_parameters
from .run import verify

_log = logging.getLogger("seqpar")


class _Monitor:
    """Verifies before every ``every``-th step of the optimizer, or once, if ``foreign`` names code that is unknown."""

    def __init__(self, root: PreTrainedModel, patch: Patch, every: int, tokens: int, foreign: str) -> None:
        self.root, self.patch, self.every, self.tokens, self.foreign = root, patch, every, tokens, foreign
        self.steps, self.batch = 0, dict[str, Any]()
        self.handles = [
            root.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
            register_optimizer_step_pre_hook(self.before_step),
        ]
        for handle in self.handles:
            patch.undo.callback(handle.remove)

    def before_forward(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if root.training and torch.is_grad_enabled():
            self.batch = {**dict(zip(parameters_of(root), args, strict=False)), **kwargs}

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        ours = {id(p) for p in self.root.parameters()}
        if not self.batch or not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            return
        self.steps += 1
        if self.foreign:
            for handle in self.handles:
                handle.remove()
            self._verify_once()
        elif (self.steps - 1) % self.every == 0:
            report = self._verify(1)
            if not report.ok:
                raise VerificationError(report)
            _log.info("step %d: %s", self.steps, report)

    def _verify_once(self) -> None:
        """Log in one line what was compared. An error that ends one of the two runs is no difference."""
        why = "its weights are sharded"
        if len(unsharded_parameters(self.root)) == len([*self.root.parameters()]):
            try:
                report = self._verify(4)  # nobody asked for this run, so that rounding must not end the training
                if any(d.kind != "path" or d.quantity == "path" for d in report.differences):  # not a run that failed
                    raise VerificationError(report)
                why = "" if report.ok else str(report)
            except VerificationError:
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
        said = f"could not be compared with one device ({why}); compare it on a short batch by seqpar.hf.verify"
        if not why:
            said = f"was compared on {report.seq_len} tokens of the first batch: {report}"
        if not dist.is_initialized() or dist.get_rank() == 0:
            words = type(self.root).__name__, self.foreign, said
            _log.warning("%s: %s, so that it %s. SEQPAR_VERIFY=0 turns this off", *words)

    def _verify(self, tolerances: int) -> VerificationReport:
        with torch.no_grad():
            batch = self._some_tokens(self._unsharded(self.batch))
        self._compare_ranks()
        return verify(self.root, batch, raise_on_error=False, tolerance=tolerances * tolerance_of(self.root))

    def _compare_ranks(self) -> None:
        """Compare the gradients that the optimizer is about to use."""
        parameters = unsharded_parameters(self.root).items()
        norms = {n: float(p.grad.detach().double().norm()) for n, p in parameters if p.grad is not None}
        by_rank, tolerance = all_gather_values(norms, self.patch.sequence_group), tolerance_of(self.root)
        for name in dict.fromkeys(name for rank in by_rank for name in rank):
            norm = [rank.get(name, 0.0) for rank in by_rank]
            if (error := (max(norm) - min(norm)) / max(*norm, 1e-30)) > tolerance:
                why, nan = "it differs between the ranks: the ranks' gradients were not averaged", float("nan")
                ranks = tuple(range(len(norm)))
                found = Difference("gradient", name, "", (), ranks, error, tolerance, why)
                raise VerificationError(VerificationReport((found,), nan, nan, len(norms), len(norm)))

    def _unsharded(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The full batch: all-gathered if the model was called with this rank's part."""
        full = dict(batch)
        if not isinstance(shard := full.pop("seqpar", None), BatchShard):
            return batch
        if shard.mask.branches:
            raise ValueError("seqpar: a batch whose rows share prompts cannot be verified; verify whole rows")
        if shard.in_place is not None:
            full["labels"] = shard.in_place[0]
        elif "labels" in full:
            full["shift_labels"] = full.pop("labels")
        if shard.valid is not None:
            full["attention_mask"] = shard.valid.int()
        sharding = self.patch.sharding(shard.tokens)
        local = sharding.lengths[self.patch.rank]
        return {
            name: sharding.unshard(x) if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == local else x
            for name, x in full.items()
        }

    def _some_tokens(self, batch: dict[str, Any]) -> dict[str, Any]:
        """At most ``tokens`` consecutive tokens of each row, because one rank must compute them alone.

        These are the tokens with the most labels, or, without labels, with the least padding.
        """
        full = FullBatch(batch, self.patch, self.root)
        if full.seq_len <= self.tokens:
            return batch
        if full.merges:
            raise ValueError(
                f"SEQPAR_VERIFY_TOKENS={self.tokens}: the rows of the batch have {full.seq_len} tokens, and rows with "
                f"images cannot be cut; set it to {full.seq_len} or more, or verify a shorter batch by seqpar.hf.verify"
            )
        counted = full.valid if full.labels is None else (full.labels != IGNORE_INDEX).cpu()
        # [seq - tokens + 1]: how many tokens count, in all rows, from each start on
        start = int(counted.sum(0).unfold(0, self.tokens, 1).sum(1).argmax())
        span = slice(start, start + self.tokens)
        window = {
            name: x[:, span] if isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == full.seq_len else x
            for name, x in batch.items()
            if name not in (*BOUNDARY_NAMES, *UNUSED_NAMES)
        }
        return {**window, "position_ids": full.position_ids[:, span]}


def verify_while_training(root: PreTrainedModel, patch: Patch) -> None:
    """Verify ``root`` before steps of the optimizer: every N-th one, or once if ``root`` has code of its own.

    The batch is the last training batch, cut to ``SEQPAR_VERIFY_TOKENS`` tokens: by default 1,024 with
    ``SEQPAR_VERIFY=N``, and otherwise 128. A longer batch with images is not verified.
    """
    every, tokens = (number(name) for name in ("SEQPAR_VERIFY", "SEQPAR_VERIFY_TOKENS"))
    foreign = foreign_code(root, patch) if every is None else ""
    if every or foreign:
        length = tokens or (128 if foreign else 1024)
        _Monitor(root, patch, every or 1, max(length, patch.ranks), foreign)


def foreign_code(root: PreTrainedModel, patch: Patch) -> str:
    """Says which module of ``root`` runs code that is not of a known library; empty if none does."""
    for module in patch.loss_functions:
        loss_function = getattr(getattr(module, "_loss_function", None), "user_loss", None)
        if loss_function is not None and not _is_known(loss_function):
            return f"the loss_function of {type(module).__name__} is not transformers' own"
    for name, module in root.named_modules():
        if not _is_known(vars(module).get("forward", type(module).forward)) or not _is_known(type(module)):
            where = f"{name} ({type(module).__name__})" if name else f"class {type(module).__name__}"
            return f"the code of {where} is not transformers' own"
    return ""


def _is_known(code: Any) -> bool:
    return str(function_of(code).__module__).split(".")[0] in (*LIBRARIES, "seqpar")
