"""``verify``: checks that a parallelized model computes what it would compute on one device.

The ranks compare their batches, models and weights, and in a dry run their calls of the attention function. Then the
model runs twice on the same batch: on each rank alone, with transformers' own attention and masks, and sharded over the
ranks as in training. Every wait has a deadline, so that no rank waits forever.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from functools import partial
from itertools import zip_longest
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ...base.checks import check_number
from ...comm.handshake import all_gather_header
from ...layers.gradients import sync_gradients
from ...layers.holders import Ignored, held_apart, shard_groups
from ...patching.replaced import replaced
from ...ranks.mesh import global_ranks
from ...verification.gradients import all_gather_values, compare_gradients, run_step
from ...verification.report import Difference, VerificationError, VerificationReport
from ...verification.step import loss_difference, tolerance_of, trainable
from ..batch import batch_checksum
from ..inspection.support import attention_layers
from ..inspection.trial import attend_to_own_token
from ..losses.loss import reduce_over_ranks
from ..state import NAME, Patch, patch_of
from .comparison import FullBatch, compare_inputs, compare_tensors
from .recording import (
    PinnedExperts,
    Recording,
    deadline,
    evaluated,
    foreign_wrappers,
    one_device,
    recording,
    unsharded_parameters,
)

Batch = Mapping[str, Any]
Shard = Callable[[Batch], dict[str, Any]]
Sync = Callable[[nn.Module], object]
DEADLINE_S = 120.0
_NOT_IN_DRY_RUN = ("labels", "shift_labels", "use_cache")  # the dry run computes no loss and does not generate


def verify(
    model: nn.Module,
    batch: Batch,
    raise_on_error: bool = True,
    *,
    shard: Shard | None = None,
    sync: Sync | None = None,
    ignore: Ignored | None = None,
    tolerance: float | None = None,
    deadline_s: float = DEADLINE_S,
) -> VerificationReport:
    """Compare a parallelized model with itself on one device, on one batch.

    All ranks of the sequence call it with the same short batch. Each rank also runs the full batch by itself, with
    transformers' eager attention, which has a dense mask. ``verify`` compares the model's inputs (tokens, positions,
    labels); for each attention layer the length, input, queries, keys, values, attention, output and their gradients;
    the loss; and the gradient of every parameter.

    The model runs in evaluation mode, so that dropout is off, and without ``torch.compile``. A model with
    ``batches="per_rank"`` runs as if its ranks shared a batch. Gradients, random number generators, buffers and modes
    are restored afterwards. No optimizer step is made.

    Args:
        model: a parallelized model, or DDP or FSDP (1 or ``fully_shard``) around it, also as accelerate prepares it.
        batch: the full batch, as the model is called with it. Without labels, the loss is a fixed function of the
            outputs.
        raise_on_error: whether to raise an error if something differs. Otherwise only return the report.
        shard: the function with which your training loop shards a batch, if the loop does not leave that to the model.
            It is called with the full batch and returns this rank's part, as ``shard_batch`` does.
        sync: the function with which your training loop averages the gradients after backward. It is called with
            ``model``. The default is ``sync_gradients``, or nothing if ``model`` has DDP or FSDP over all ranks of the
            sequence in it.
        ignore: as in ``sync_gradients``: the parameters that a rank holds alone, or with the ranks of a group. Each
            rank compares its own gradients. Their exchange of tokens runs on the whole batch of every rank too.
        tolerance: the largest error that counts as equal, relative to the norm of the compared tensor. By default 1e-3
            for float32, 0.02 for float16, 0.1 for bfloat16 and 1e-6 for float64. Use float32 if you can, because half
            precision hides small errors.
        deadline_s: how many seconds a rank waits for another rank before it reports that rank as missing.

    Returns:
        The report, the same on every rank of the sequence.

    Raises:
        VerificationError: something differs. The message names the quantity, layer, tokens and ranks.
        ValueError: the model is not parallelized, or the batch cannot be sharded.
    """
    patch = patch_of(model)
    root = next((m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, "_seqpar")), None)
    if root is None:
        raise ValueError(
            "model: it does not contain the whole transformers model (is it a pipeline stage?); give verify the model "
            "that contains all layers"
        )
    if patch.has_encoder:
        raise ValueError(
            f"model={type(root).__name__}: an encoder-decoder model cannot be verified layer by layer yet; use "
            "seqpar.verify(model, step, reference, reference_model=...), which compares the loss and the gradients"
        )
    if patch.has_indexers and any(p.dtype in (torch.float16, torch.bfloat16) for p in root.parameters()):
        raise ValueError(
            f"model={type(root).__name__}: its indexers choose keys by scores, and in half precision rounding changes "
            "which ones they choose; verify it in float32 (model.float())"
        )
    check_number("deadline_s", deadline_s)
    if tolerance is not None:
        check_number("tolerance", tolerance)
    with ExitStack() as stack:
        stack.enter_context(deadline(patch.sequence_group, deadline_s))
        stack.enter_context(evaluated(model))
        shared = replace(patch.settings, batches="shared", share_prompts=False)
        stack.enter_context(
            replaced(patch, calls=patch.calls, seed=patch.seed, settings=shared, loss_ranks=patch.sequence_group)
        )
        report = _Verification(model, root, patch, batch, tolerance, ignore).report(shard, sync)
    if raise_on_error and not report.ok:
        raise VerificationError(report)
    return report


class _VerifyHeader(NamedTuple):
    seq_len: int


class _Verification:
    """One call of ``verify``.

    ``report`` stops after a stage whose differences would make the next stages fail or hang.
    """

    def __init__(
        self,
        model: nn.Module,
        root: PreTrainedModel,
        patch: Patch,
        batch: Batch,
        tolerance: float | None,
        ignore: Ignored | None,
    ) -> None:
        self.ignore = ignore if ignore is None or isinstance(ignore, Mapping) else [*ignore]
        self.model, self.root, self.patch = model, root, patch
        self.layers, self.cause = attention_layers(root), ""

        def header() -> _VerifyHeader:
            self.batch = FullBatch(batch, patch, root)
            return _VerifyHeader(self.batch.seq_len)

        all_gather_header(header, patch.sequence_group)  # raises on every rank if the batch of one rank has an error
        self.apart = held_apart(model, self.ignore)
        self.unsharded = {n: p for n, p in unsharded_parameters(root).items() if p not in self.apart}
        self.tolerance = tolerance_of(root) if tolerance is None else tolerance

    def report(self, shard: Shard | None, sync: Sync | None) -> VerificationReport:
        dry, theirs, ours = (Recording(self.root) for _ in range(3))
        local: dict[str, Any] = {}
        not_in_dry_run = () if foreign_wrappers(self.model, self.root) else _NOT_IN_DRY_RUN
        pinned = partial(PinnedExperts, experts=[], positions=self.batch.positions, seq_len=self.batch.seq_len)

        def full_call(arguments: dict[str, Any]) -> dict[str, Any]:
            arguments = {name: x for name, x in arguments.items() if x is not None}
            return FullBatch(arguments, self.patch, self.root).for_one_device

        def shard_and_dry_run() -> None:
            local.update(self.batch.for_parallelized if shard is None else shard(self.batch.for_parallelized))
            with torch.no_grad(), recording(dry, attend_to_own_token):
                self.model(**{name: x for name, x in local.items() if name not in not_in_dry_run})

        def run_alone() -> None:
            with one_device(self.root, self.patch, full_call, self.batch.documents), pinned(pins=False):
                self._run(theirs, self.batch.for_parallelized, None, alone=True)

        def run_sharded() -> None:
            with pinned(pins=True):
                self._run(ours, local, sync)

        stages: tuple[Callable[[], list[Difference]], ...] = (
            self._compare_ranks,
            lambda: self._compare_calls(shard_and_dry_run, dry, "run"),
            lambda: self._compare_lengths(dry),
            lambda: self._compare_calls(run_alone, theirs, "run on one device"),
            lambda: self._compare_calls(run_sharded, ours, "run"),
            lambda: self._compare(ours, theirs),
        )
        differences: list[Difference] = []
        for stage in stages:
            if not any(difference.stops for difference in differences):
                differences += stage()
        settings = self.patch.settings
        by_rank = all_gather_values(
            [settings.strategy, str(settings.layout), ours.result.loss], self.patch.sequence_group
        )
        strategy, layout, _ = by_rank[0]  # rank 0's, on every rank
        loss = sum(x for *_, x in by_rank) / self.patch.ranks
        differences.sort(key=lambda d: d.order)
        sizes = trainable(self.model), self.patch.ranks, self.cause, len(self.layers), self.batch.seq_len
        return VerificationReport(tuple(differences), loss, theirs.result.loss, *sizes, strategy, layout)

    def _compare_ranks(self) -> list[Difference]:
        path = _static_path(self.root, self.patch, self.layers, self.apart)
        by_rank = all_gather_values(
            [batch_checksum(self.batch.for_parallelized), path, _weight_sums(self.unsharded)], self.patch.sequence_group
        )
        batches, paths, weights = zip(*by_rank, strict=True)
        if len(set(batches)) > 1:
            return [Difference("batch", "batch", ranks=_minority(batches), explanation="the ranks' batches differ")]
        for lines in zip_longest(*paths, fillvalue="no such parameter or layer"):
            if len(set(lines)) > 1:
                return [_other_path(lines)]
        for name in weights[0]:
            if len(set(values := [rank.get(name) for rank in weights])) > 1:
                why = "the ranks hold different weights; load the same checkpoint, or make the model from the same seed"
                return [Difference("weights", name, ranks=_minority(values), explanation=why, stops=True)]
        return []

    def _compare_calls(self, call: Callable[[], None], run: Recording, name: str) -> list[Difference]:
        """Run ``call``, and compare the ranks' calls of the attention function, which ``run`` records.

        The difference is the first call that differs between the ranks, or the error that a rank raised.
        """
        message = ""
        try:
            call()
        except Exception as error:
            if self.patch.ranks == 1:
                raise
            message = f"{type(error).__name__}: {error}"
        calls = [f"{call.layer} by {call.implementation!r} on {call.description}" for call in run.calls]
        by_rank = all_gather_values([message, *calls], self.patch.sequence_group)
        for i in range(1, max(map(len, by_rank))):
            ith_calls = [rank[i] if i < len(rank) else f"no {i}-th attention layer" for rank in by_rank]
            # A rank that raised an error has made fewer calls. That alone is not another path.
            if len({call for call, rank in zip(ith_calls, by_rank, strict=True) if not rank[0] or i < len(rank)}) > 1:
                return [_other_path(ith_calls)]
        failed = tuple(rank for rank, (error, *_) in enumerate(by_rank) if error)
        return [Difference("path", name, ranks=failed, explanation=by_rank[failed[0]][0], stops=True)] if failed else []

    def _compare_lengths(self, dry: Recording) -> list[Difference]:
        """The layers whose attention is not sharded, or whose queries are of other tokens than this rank's."""
        differences = []
        for call in dry.calls:
            if call.implementation != NAME:
                quantity = "attention"
                why = f"its attention ({call.implementation!r}) is not parallelized and sees this rank's tokens only"
            elif call.tokens != len(self.batch.positions):
                quantity = "length"
                why = f"its queries have {call.tokens} tokens, expected this rank's {len(self.batch.positions)}"
            else:
                continue
            differences.append(Difference("layer", quantity, call.layer, explanation=why, error=inf))
        return self._merge(differences)

    def _run(self, run: Recording, arguments: Mapping[str, Any], sync: Sync | None, alone: bool = False) -> None:
        """Run a forward and backward. ``alone``: on this rank alone, with the full batch."""

        def step() -> Tensor:
            with torch.enable_grad(), recording(run):
                output = self.model(**arguments)
                loss = _loss_of(output)
                if loss is None:
                    loss = self._artificial_loss(output, alone)
                if loss.requires_grad:
                    loss.backward()
            if loss.requires_grad and not alone:
                if sync is not None:
                    sync(self.model)
                elif not _wrapped_over(self.patch.sequence_group, self.model):
                    sync_gradients(self.model, group=self.patch.sequence_group, ignore=self.ignore)
            return loss

        run.result = run_step(step, self.model)

    def _artificial_loss(self, output: Any, alone: bool) -> Tensor:
        """A loss for a model without one: a weighted sum of its first output, with a different weight per value."""
        x = next((x for x in _values(output) if x.is_floating_point() and x.dim() in (2, 3)), None)
        if x is None:
            raise ValueError(
                f"model={type(self.model).__name__}: its output has no loss (a scalar, or an entry 'loss') and no "
                "tensor of two or three dimensions to compute one from; return one of these from its forward, or give "
                "verify the transformers model inside it"
            )
        if x.dim() == 2:  # [batch, labels]: one prediction per row, on every rank
            return (
                x.float() * torch.cos(torch.arange(x.numel(), dtype=torch.float32, device=x.device)).view(x.shape)
            ).sum() / len(x)
        alone = alone or x.shape[1] == self.batch.seq_len  # an all-gathered output has all tokens on every rank
        positions = torch.arange(self.batch.seq_len, device="cpu") if alone else self.batch.positions
        channels = torch.arange(x.shape[2], dtype=torch.float32, device="cpu")
        weight = torch.cos(positions[:, None] + 0.7 * channels)  # [seq, channels]
        valid = self.batch.valid.index_select(1, positions).to(x.device)
        total = (x.float() * weight.to(x.device) * valid[..., None]).sum() / x[..., 0, :].numel()
        return total if alone else reduce_over_ranks(total, self.patch, self.root)

    def _compare(self, ours: Recording, theirs: Recording) -> list[Difference]:
        group, tolerance = self.patch.sequence_group, self.tolerance
        found = compare_inputs(ours, theirs, self.batch, self.patch)
        losses = self.patch.ranks if self.patch.settings.gradients == "mean" else 1
        found += compare_tensors(ours, theirs, self.batch, tolerance, losses)
        found += loss_difference(ours.result.loss, theirs.result.loss, tolerance)
        gradients, self.cause = compare_gradients(ours.result, theirs.result, tolerance, group, self.root.device)
        return self._merge(found) + gradients

    def _merge(self, found: list[Difference]) -> list[Difference]:
        """The differences on all ranks. In forward and in backward, only the first one."""
        by_rank = [
            [Difference(*d) for d in rank]
            for rank in all_gather_values([list(astuple(d)) for d in found], self.patch.sequence_group)
        ]
        by_place: dict[tuple[int, int, str, str, str], dict[int, Difference]] = {}
        for i, rank in enumerate(by_rank):
            for d in rank:
                by_place.setdefault((*d.order, d.kind, d.layer, d.quantity), {})[i] = d
        merged: list[Difference] = []
        for (*_, kind, _, _), same in sorted(by_place.items(), key=lambda item: item[0][:2]):
            if kind in ("forward", "backward") and any(d.kind == kind for d in merged):
                continue  # a consequence of the first one
            worst = max(same.values(), key=lambda d: d.error)
            why = next((d.explanation for d in same.values() if d.explanation), "")
            tokens = tuple(sorted({t for d in same.values() for t in d.tokens}))
            merged.append(replace(worst, ranks=tuple(same), tokens=tokens, explanation=why))
        return merged


def _wrapped_over(group: ProcessGroup | None, model: nn.Module) -> bool:
    if group is None:
        return True
    wrappers = (m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel))
    sharded = (one for over in shard_groups(model).values() for one in over)
    return any({*global_ranks(group)} <= {*global_ranks(one)} for one in (*wrappers, *sharded))


def _values(output: Any) -> list[Tensor]:
    values = [output] if isinstance(output, Tensor) else output.values() if hasattr(output, "values") else output
    return [x for x in values if isinstance(x, Tensor)] if isinstance(values, Iterable) else []


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Tensor | tuple):
        loss = next((x for x in _values(output)[:1] if x.dim() == 0), None)
    return loss if isinstance(loss, Tensor) else None


def _static_path(
    root: PreTrainedModel, patch: Patch, layers: dict[str, nn.Module], apart: Container[nn.Parameter]
) -> list[str]:
    """What decides which messages a rank sends, as lines of text."""
    lines = [f"{type(root).__name__} with {patch.settings}, ranks={patch.ranks}"]
    for name, layer in layers.items():
        settings = getattr(getattr(layer, "_seqpar", None), "settings", "no settings: not parallelized")
        lines.append(f"layer {name!r} ({type(layer).__name__}) with {settings}")
    for name, p in root.named_parameters():
        if p not in apart:
            lines.append(f"{name} {p.dtype} {'trained' if p.requires_grad else 'frozen'}")
    return lines


def _weight_sums(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    full = {n: p for n, p in parameters.items() if p.is_floating_point()}
    sums = [p.detach().double().mul(torch.arange(p.numel(), device=p.device).reshape(p.shape) % 7 + 1).sum()
            for p in full.values()]  # fmt: skip
    return dict(zip(full, map(str, torch.stack(sums).tolist() if sums else ()), strict=True))


def _other_path(descriptions: Sequence[str]) -> Difference:
    ranks = _minority(descriptions)
    here = descriptions[ranks[0]]
    elsewhere = next(x for rank, x in enumerate(descriptions) if rank not in ranks)
    why = f"the ranks run different models or attention calls; here: {here}; on the other ranks: {elsewhere}"
    return Difference("path", "path", ranks=ranks, explanation=why, stops=True)


def _minority(values: Sequence[Any]) -> tuple[int, ...]:
    """The ranks whose value is not the most frequent one (the first of equally frequent values)."""
    majority = max(dict.fromkeys(values), key=values.count)
    return tuple(rank for rank, value in enumerate(values) if value != majority)
