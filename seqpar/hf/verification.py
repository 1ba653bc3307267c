"""``verify``: tests that a parallelized model computes what it would compute on one device.

The model runs twice on the same batch: as it is trained, and on one rank with transformers' own attention and masks.
Before values are compared, the ranks compare what they are about to run, and every wait has a deadline. If a rank runs
something else, the report says so, and no rank waits forever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..checks import check_number
from ..comm.communicator import existing_communicators
from ..comm.handshake import Fingerprint, all_gather_header, fingerprint
from ..layers.gradients import sync_gradients
from ..mesh import global_ranks
from ..rendezvous import group_timeout, meet
from .comparison import Difference, FullBatch, compare_inputs, compare_tensors, parameter_differences
from .loss import reduce_over_ranks
from .own import shared_calls
from .recording import Recording, one_device, recording
from .state import NAME, Patch, patch_of
from .support import attention_layers
from .tracing import attend_to_own_token
from .wrappers import gradient_wrappers, outermost

# Errors relative to the norm of what is compared, by the lowest precision in the model.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Batch = Mapping[str, Any]
DEADLINE_S = 120.0
_NOT_IN_DRY_RUN = ("labels", "shift_labels", "use_cache")  # the dry run computes no loss and does not generate


@dataclass(frozen=True)
class VerificationReport:
    """What ``verify`` found; the same on every rank of the sequence.

    Attributes:
        differences: the differences from one device, in the order of a training step: the path, the inputs, the first
            layer, the loss, the first gradient. Empty if there are none.
        loss, expected_loss: the loss of the parallelized model and on one device; NaN if it was not computed.
        layers: the number of attention layers that were compared.
        seq_len, ranks: the tokens of the sequence, and the ranks it is sharded over.
        strategy, layout: those of the model.
    """

    differences: tuple[Difference, ...]
    loss: float
    expected_loss: float
    layers: int
    seq_len: int
    ranks: int
    strategy: str
    layout: str

    @property
    def ok(self) -> bool:
        """Whether the model computes what one device would."""
        return not self.differences

    def __str__(self) -> str:
        what = f"{self.seq_len} tokens on {self.ranks} rank(s), strategy={self.strategy!r}, layout={self.layout!r}"
        if self.ok:
            return (
                f"seqpar.hf.verify: equal to one device: {what}, {self.layers} attention layers, loss {self.loss:.6f} "
                f"(one device {self.expected_loss:.6f}), all gradients"
            )
        return "\n".join([f"seqpar.hf.verify: not what one device computes: {what}", *map(str, self.differences)])


class VerificationError(AssertionError):
    """A parallelized model does not compute what one device would.

    Attributes:
        report: the ``VerificationReport``.
    """

    def __init__(self, report: VerificationReport) -> None:
        super().__init__(str(report))
        self.report = report


def verify(
    model: nn.Module,
    batch: Batch,
    raise_on_error: bool = True,
    *,
    shard: Callable[[Batch], dict[str, Any]] | None = None,
    sync: Callable[[nn.Module], object] | None = None,
    tolerance: float | None = None,
    deadline_s: float = DEADLINE_S,
) -> VerificationReport:
    """Compare a parallelized model with itself on one device, on one batch.

    All ranks of the sequence call it with the same short batch. Each rank also runs the full batch by itself, without
    the hooks of ``parallelize`` and with transformers' eager attention, which has a dense mask. ``verify`` compares the
    inputs of the model (tokens, positions, labels); for each attention layer the length, input, queries, keys, values,
    attention, output and their gradients; the loss; and the gradient of every parameter.

    The model runs in evaluation mode, so that dropout is off, and without ``torch.compile``. A model with
    ``batches="own"`` runs as if its ranks shared a batch. Gradients, random number generators, buffers and modes are
    restored afterwards. No optimizer step is made.

    Args:
        model: a parallelized model, or DDP or FSDP (1 or ``fully_shard``) around it, also as accelerate prepares it.
        batch: the full batch, as the model is called with. Without labels, a fixed function of the outputs is the loss.
        raise_on_error: whether to raise if something differs; otherwise only return the report.
        shard: how the training loop shards a batch, if it does not leave that to the model: a function from the full
            batch to this rank's part, such as ``shard_batch`` with the loop's mesh and layout.
        sync: how the training loop sums gradients after backward: a function of ``model``. By default
            ``sync_gradients``, or nothing inside DDP or FSDP over the ranks of the sequence.
        tolerance: the largest error relative to the norm of the compared tensor; by default 1e-3 for float32, 0.02 for
            float16, 0.1 for bfloat16 and 1e-6 for float64. Use float32 if you can: half precision hides small errors.
        deadline_s: how many seconds a rank waits for another before it reports the other rank as missing.

    Returns:
        The report, the same on every rank of the sequence.

    Raises:
        VerificationError: something differs. The message names the quantity, layer, tokens and ranks.
        ValueError: the model is not parallelized, or the batch cannot be sharded.
    """
    patch = patch_of(model)
    root = _root(model)
    check_number("deadline_s", deadline_s)
    if tolerance is not None:
        check_number("tolerance", tolerance)
    with ExitStack() as stack:
        stack.enter_context(_deadline(patch.group, deadline_s))
        stack.enter_context(_unchanged(model))
        stack.callback(patch.__setattr__, "calls", patch.calls)
        stack.callback(patch.__setattr__, "seed", patch.seed)
        stack.enter_context(shared_calls(root, patch))
        run = _Verification(model, root, patch, batch, tolerance, deadline_s)
        report = run.report(shard, sync)
    if raise_on_error and not report.ok:
        raise VerificationError(report)
    return report


class _Header(NamedTuple):
    """The values that the ranks compare before anything runs."""

    seq_len: int
    batch: Fingerprint
    path: Fingerprint
    weights: Fingerprint


@dataclass
class _Run:
    """One forward and backward: its recording, its loss and the gradients of the parameters."""

    record: Recording
    loss: float = float("nan")
    gradients: dict[str, Tensor] = field(default_factory=dict)


class _Verification:
    """One call of ``verify``. ``report`` runs its stages in order, and stops when later stages would be meaningless."""

    def __init__(
        self, model: nn.Module, root: PreTrainedModel, patch: Patch, batch: Batch, tolerance: float | None, limit: float
    ) -> None:
        self.model, self.root, self.patch = model, root, patch
        self.layers = attention_layers(root)
        self.limit = timedelta(seconds=limit)
        weights: dict[str, float] = {}
        path: list[str] = []

        def header() -> _Header:
            self.batch = FullBatch(batch, patch, root)
            path.extend(_static_path(root, patch, self.layers))
            weights.update(_weight_sums(root))
            same = fingerprint(*weights.items()), fingerprint(*path)
            return _Header(self.batch.seq_len, Fingerprint(self.batch.checksum), same[1], same[0])

        self.headers = all_gather_header(header, patch.group)
        self.weights, self.path = weights, path
        self.whole = whole_parameters(root)
        self.tolerance = TOLERANCE[lowest_dtype(root)] if tolerance is None else tolerance

    def report(
        self, shard: Callable[[Batch], dict[str, Any]] | None, sync: Callable[[nn.Module], object] | None
    ) -> VerificationReport:
        ours, theirs = _Run(Recording(self.root)), _Run(Recording(self.root))
        differences = self._before_anything_runs()
        if not differences:
            local: dict[str, Any] = {}
            dry = Recording(self.root)

            def cut_and_dry_run() -> None:
                local.update(self.batch.given if shard is None else shard(self.batch.given))
                with torch.no_grad(), recording(self.root, attend_to_own_token) as record:
                    dry.__dict__.update(record.__dict__)
                    self.model(**{name: x for name, x in local.items() if name not in _NOT_IN_DRY_RUN})

            differences = self._on_same_path(cut_and_dry_run, dry) + self._lengths(dry)
        if not any(difference.stops for difference in differences):
            differences += self._on_same_path(lambda: self._run(ours, local, sync), ours.record)
        if not any(difference.stops for difference in differences):
            with one_device(self.model, self.patch, self.batch.documents):
                self._run(theirs, self.batch.for_one_device, None, alone=True)
            differences += self._compare(ours, theirs)
        found = (ours.loss, theirs.loss, len(self.layers), self.batch.seq_len)
        named = self._exchange([self.patch.strategy, self.patch.layout])[0]  # on another path they may differ
        return VerificationReport(tuple(sorted(differences, key=lambda d: d.order)), *found, self.patch.ranks, *named)

    def _before_anything_runs(self) -> list[Difference]:
        """Differences between the ranks' batches, models and weights."""
        batches, paths, weights = ([h[i] for h in self.headers] for i in (1, 2, 3))
        if len(set(batches)) > 1:
            return [Difference("batch", "batch", ranks=_minority(batches), explanation="the ranks' batches differ")]
        if len(set(paths)) > 1:
            lines = self._exchange(self.path)
            other = next((i for i, same in enumerate(zip(*lines, strict=False)) if len(set(same)) > 1), None)
            said = [rank[other] if other is not None else f"{len(rank)} parameters and layers" for rank in lines]
            return [_other_path(said)]
        if len(set(weights)) > 1:
            sums = [dict(rank) for rank in self._exchange(list(self.weights.items()))]
            name = next(n for n in sums[0] if len({rank.get(n) for rank in sums}) > 1)
            ranks = _minority([rank[name] for rank in sums])
            why = "the ranks hold different weights; load the same checkpoint, or make the model from the same seed"
            return [Difference("weights", name, ranks=ranks, explanation=why, stops=True)]
        return []

    def _on_same_path(self, run: Callable[[], None], record: Recording) -> list[Difference]:
        """Run, and compare what the ranks did. An error, or other calls on another rank, is a difference."""
        said = ""
        try:
            run()
        except Exception as error:
            if self.patch.ranks == 1:
                raise
            said = f"{type(error).__name__}: {error}"
        calls = [f"{call.layer} by {call.implementation!r} on {call.described}" for call in record.calls]
        ranks = self._exchange([said, *calls])
        longest = max(map(len, ranks))
        for i in range(1, longest):
            at = [rank[i] if i < len(rank) else f"no {i}-th attention layer" for rank in ranks]
            # A rank that waited for another one has made fewer calls.
            if len({x for x, rank in zip(at, ranks, strict=True) if not rank[0] or i < len(rank)}) > 1:
                return [_other_path(at)]
        if not any(rank[0] for rank in ranks):
            return []
        errors = [rank[0] for rank in ranks]
        failed = tuple(rank for rank, error in enumerate(errors) if error)
        return [Difference("path", "run", ranks=failed, explanation=errors[failed[0]], stops=True)]

    def _lengths(self, dry: Recording) -> list[Difference]:
        """Layers whose queries are not this rank's part of the sequence, and layers that attend by themselves."""
        found = []
        for call in dry.calls:
            if call.implementation != NAME:
                why = f"its attention ({call.implementation!r}) is not parallelized: it sees this rank's tokens only"
                found.append(Difference("layer", "attention", call.layer, explanation=why, error=float("inf")))
            elif call.tokens != len(self.batch.positions):
                why = f"its queries have {call.tokens} tokens, expected this rank's {len(self.batch.positions)}"
                found.append(Difference("layer", "length", call.layer, explanation=why, error=float("inf")))
        return self._merge(found)

    def _run(
        self,
        run: _Run,
        arguments: Mapping[str, Any],
        sync: Callable[[nn.Module], object] | None,
        alone: bool = False,
    ) -> None:
        """Run forward and backward. ``alone``: on the full batch on one rank."""
        for p in self.model.parameters():
            p.grad = None
        with torch.enable_grad(), recording(self.root) as record:
            run.record = record
            output = self.model(**arguments)
            loss = getattr(output, "loss", None)
            if not isinstance(loss, Tensor):
                loss = self._function_of(output, alone)
            if loss.requires_grad:
                loss.backward()
        run.loss = float(loss.detach())
        if loss.requires_grad and not alone:
            self._sum_gradients(sync)
        run.gradients = {
            name: (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).detach().cpu()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        for p in self.model.parameters():
            p.grad = None

    def _function_of(self, output: Any, alone: bool) -> Tensor:
        """A loss for a model without one: a weighted sum of its first output, with a different weight per value."""
        values = output if isinstance(output, tuple) else tuple(output.values())
        x = next(x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.dim() in (2, 3))
        if x.dim() == 2:  # one prediction a row, on every rank
            return (x.float() * torch.cos(torch.arange(x.numel(), device=x.device)).view(x.shape)).sum() / len(x)
        alone = alone or x.shape[1] == self.batch.seq_len  # whole on every rank: all-gathered
        positions = torch.arange(self.batch.seq_len) if alone else self.batch.positions
        weight = torch.cos(positions[:, None] + 0.7 * torch.arange(x.shape[2]))  # [seq, channels]
        valid = self.batch.valid.index_select(1, positions).to(x.device)
        total = (x.float() * weight.to(x.device) * valid[..., None]).sum() / x[..., 0, :].numel()
        return total if alone else reduce_over_ranks(total, self.patch, self.root)

    def _sum_gradients(self, sync: Callable[[nn.Module], object] | None) -> None:
        if sync is not None:
            sync(self.model)
        elif not gradient_wrappers(self.model, self.patch.group):
            sync_gradients(self.root, mesh=self.patch.mesh, group=self.patch.given_group)

    def _compare(self, ours: _Run, theirs: _Run) -> list[Difference]:
        batch, tolerance = self.batch, self.tolerance
        found = compare_inputs(ours.record, theirs.record, batch, self.patch)
        forward, backward = compare_tensors(ours.record, theirs.record, batch, tolerance, self.patch.ranks)
        found += forward
        error = abs(ours.loss - theirs.loss) / max(abs(theirs.loss), 1e-6)
        if not error <= tolerance:
            why = f"{ours.loss:.6f}, on one device {theirs.loss:.6f}"
            found.append(Difference("loss", "loss", error=error, tolerance=tolerance, explanation=why))
        found += backward
        differences = self._merge(found)
        return differences + self._compare_gradients(ours.gradients, theirs.gradients)

    def _compare_gradients(self, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[Difference]:
        mine = parameter_differences(ours, theirs, self.tolerance, self.patch.ranks)
        by_rank = self._exchange([[d.quantity, d.error, d.explanation] for d in mine])
        names = {name for rank in by_rank for name, _, _ in rank}
        if not names:
            return []
        first = next(name for name in {**theirs, **ours} if name in names)
        ranks = tuple(i for i, rank in enumerate(by_rank) if any(name == first for name, _, _ in rank))
        worst, why = max((e, w) for rank in by_rank for name, e, w in rank if name == first)
        if (partial_of := self._is_partial(first, ours, theirs)) is not None:
            why = partial_of
        elif not why and len(names) < len(theirs):
            why = f"{len(theirs) - len(names)} other parameters have the right one"
        if len(names) > 1:
            why = f"{why or 'its gradient is another one'}; so with {len(names) - 1} more parameters"
        return [Difference("gradient", first, ranks=ranks, error=worst, tolerance=self.tolerance, explanation=why)]

    def _is_partial(self, name: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> str | None:
        """Whether the ranks' gradients of a parameter add up to the one-device gradient."""
        group = self.patch.group
        parameter = dict(self.model.named_parameters())[name]
        if group is None or name not in theirs or all(parameter is not p for p in self.whole.values()):
            return None
        mine, full = ours.get(name, torch.zeros_like(theirs[name])).float(), theirs[name].float()
        total = mine.to(parameter.device, copy=True)
        dist.all_reduce(total, group=group)
        total = total.cpu()
        scales = (1, self.patch.ranks)  # the loss is multiplied by the ranks where a wrapper averages
        is_sum = any(bool((total / c - full).norm() <= self.tolerance * full.norm()) for c in scales)
        alike = bool((self.patch.ranks * mine - total).norm() <= self.tolerance * total.norm())
        by_rank = self._exchange([is_sum, alike])
        if not all(is_sum for is_sum, _ in by_rank) or all(alike for _, alike in by_rank):
            return None
        return "each rank has its partial gradient, which nobody summed: call seqpar.sync_gradients after backward"

    def _merge(self, found: list[Difference]) -> list[Difference]:
        """The differences of all ranks, the same on every rank; of forward and backward only the first one."""
        by_rank = [[Difference(*d) for d in rank] for rank in self._exchange([list(d.values()) for d in found])]
        merged = []
        for kind in dict.fromkeys(d.kind for rank in by_rank for d in rank):
            all_of_kind = [d for rank in by_rank for d in rank if d.kind == kind]
            for place in dict.fromkeys((d.at, d.layer, d.quantity) for d in sorted(all_of_kind, key=lambda d: d.at)):
                same = {
                    i: d for i, rank in enumerate(by_rank) for d in rank if (d.at, d.layer, d.quantity) == place
                    and d.kind == kind
                }  # fmt: skip
                worst = max(same.values(), key=lambda d: d.error)
                why = next((d.explanation for d in same.values() if d.explanation), "")
                tokens = tuple(sorted({t for d in same.values() for t in d.tokens}))
                merged.append(replace(worst, ranks=tuple(same), tokens=tokens, explanation=why))
                if kind in ("forward", "backward"):
                    break  # the differences that follow are consequences of the first one
        return merged

    def _exchange(self, value: list[Any]) -> list[Any]:
        return exchange(self.patch, value, self.limit)


def exchange(patch: Patch, value: list[Any], limit: timedelta) -> list[Any]:
    """Each rank's ``value``, exchanged through the store, which works also after a message has failed."""
    if patch.group is None or patch.ranks == 1:
        return [json.loads(json.dumps(value))]
    met = meet("verify", global_ranks(patch.group), json.dumps(value), limit + timedelta(seconds=5))
    return [json.loads(rank) for rank in met.values]


def _root(model: nn.Module) -> PreTrainedModel:
    roots = [m for m in model.modules() if isinstance(m, PreTrainedModel) and hasattr(m, "_seqpar")]
    if not roots:
        raise ValueError("model: its transformers model is not in it (a pipeline stage?); give verify the whole model")
    return roots[0]


def _static_path(root: PreTrainedModel, patch: Patch, layers: dict[str, nn.Module]) -> list[str]:
    """Lines of text that describe everything that decides which messages a rank sends."""

    def of(patch: Any) -> str:
        if not isinstance(patch, Patch):
            return "not parallelized"
        options = " ".join(f"{name}={value}" for name, value in sorted(patch.options.items()))
        return f"strategy={patch.strategy!r}, layout={patch.layout!r}, backend={patch.backend!r} {options}".strip()

    lines = [f"{type(root).__name__} with {of(patch)}, ranks={patch.ranks}, gradients={patch.gradients!r}"]
    for name, layer in layers.items():
        lines.append(f"layer {name!r} ({type(layer).__name__}) with {of(getattr(layer, '_seqpar', None))}")
    for name, p in root.named_parameters():
        lines.append(f"{name} {p.dtype} {'trained' if p.requires_grad else 'frozen'}")
    return lines


def whole_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not sharded: every rank of the sequence holds them in full."""
    if any(isinstance(m, FullyShardedDataParallel) for m in outermost(root).modules()):
        return {}
    return {n: p for n, p in root.named_parameters() if not isinstance(p, DTensor) and p.device.type != "meta"}


def _weight_sums(root: nn.Module) -> dict[str, float]:
    """A checksum of each parameter that is not sharded."""
    whole = {n: p for n, p in whole_parameters(root).items() if p.is_floating_point()}
    sums = [p.detach().double().mul(torch.arange(p.numel(), device=p.device).reshape(p.shape) % 7 + 1).sum()
            for p in whole.values()]  # fmt: skip
    return dict(zip(whole, torch.stack(sums).tolist() if sums else (), strict=True))


def _other_path(said: list[str]) -> Difference:
    ranks = _minority(said)
    here, there = said[ranks[0]], next(x for rank, x in enumerate(said) if rank not in ranks)
    why = f"another path than the other ranks: {here}; the others: {there}"
    return Difference("path", "path", ranks=ranks, explanation=why, stops=True)


def _minority(values: list[Any]) -> tuple[int, ...]:
    """The ranks whose value is not the most frequent one. Of equally frequent values, the first counts as the most."""
    most = max(dict.fromkeys(values), key=values.count)
    return tuple(rank for rank, value in enumerate(values) if value != most)


def lowest_dtype(root: nn.Module) -> torch.dtype:
    """Of the parameters' dtypes the one with the fewest bits."""
    return max((p.dtype for p in root.parameters() if p.dtype in TOLERANCE), key=lambda dtype: TOLERANCE[dtype])


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """In the block the model is in evaluation mode. After it, gradients, random number generators, buffers and modes
    are restored."""
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, name, b, None if b is None else b.detach().clone()) for m in model.modules()
               for name, b in m._buffers.items()]  # fmt: skip
    # "Dynamic" rotary embeddings store the longest length that they have seen.
    lengths = [(m, vars(m)["max_seq_len_cached"]) for m in model.modules() if "max_seq_len_cached" in vars(m)]
    compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())
    on_cuda = any(p.is_cuda for p in model.parameters())
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([torch.cuda.current_device()] if on_cuda else []))
            if compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            model.eval()
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                with torch.no_grad():
                    buffer.copy_(value)
        for module, length in lengths:
            module.max_seq_len_cached = length


@contextmanager
def _deadline(group: ProcessGroup | None, seconds: float) -> Iterator[None]:
    """In the block, an operation between ranks that takes longer than ``seconds`` fails."""
    if group is None or dist.group.WORLD is None:
        yield
        return
    limit = timedelta(seconds=seconds)
    groups = list({id(g): g for g in (dist.group.WORLD, group, *existing_communicators())}.values())
    before = [(g, group_timeout(g)) for g in groups]
    for g in groups:
        _set_timeout(g, limit)
    try:
        yield
    finally:
        known = {id(g): timeout for g, timeout in before}
        # A communicator that was made inside the block gets the group's timeout.
        for g in (*groups, *existing_communicators()):
            _set_timeout(g, known.get(id(g), known[id(group)]))


def _set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if hasattr(backend, "_set_default_timeout"):
            backend._set_default_timeout(timeout)
        if hasattr(backend, "options") and hasattr(backend.options, "_timeout"):
            backend.options._timeout = timeout
