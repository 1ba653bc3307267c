"""The loss over the tokens of all ranks.

Shapes: b batch, s tokens of this rank.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh, ProcessGroup

from ..checks import DTYPES, check_choice, check_int, no_compile
from ..comm.handshake import all_gather_header, check_same
from ..library import operator
from ..mesh import size_of
from ..reductions import Gradients, reduction_behind
from ..sharding import Sharding, check_sharding
from ..strategies import StrategyName
from ..strategies.gemm import sum_dtype

GRADIENTS: tuple[str, ...] = get_args(Gradients)


class _LossHeader(NamedTuple):
    batch: int
    dtype: torch.dtype
    ignore_index: int


def token_loss(
    losses: Tensor,
    labels: Tensor,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    sharding: Sharding | None = None,
    ignore_index: int = -100,
    strategy: StrategyName | Literal["tp_sp"] | None = None,
    gradients: Gradients = "auto",
) -> Tensor:
    """The mean loss per token over all ranks' tokens, except those whose label is ``ignore_index``.

    Averaging the means of all ranks would be wrong if the ranks ignore different numbers of labels, and the gradient of
    a rank's own mean is too large by the number of ranks. The value of this function is the loss that one device would
    compute. Its backward gives this rank's partial gradient, which ``seqpar.sync_gradients`` sums.

    Inside DDP, FSDP1 or ``fully_shard``, the backward allows for what the wrapper does to the gradients. If the wrapper
    averages over all ranks of the sequence, the gradients that it computes are one device's, without
    ``sync_gradients``. If it averages over other ranks (dp), call ``sync_gradients`` over the ranks of the sequence. In
    both cases the gradients are of the mean over the labels of all ranks involved, also if the dp ranks have different
    numbers of labels: the backward counts them all, with one more message. The value that is returned is always the
    mean over this sequence alone.

    Args:
        losses: ``[batch, seq_local]``, the loss of each of this rank's tokens, such as ``F.cross_entropy`` returns with
            ``reduction="none"``.
        labels: integers ``[batch, seq_local]``, at least 0 or ``ignore_index``, shifted before they were sharded.
        mesh: the ranks that the sequence is sharded over, as given to the layers.
        group: the same as a ProcessGroup. With neither, the default group.
        sharding: the ``Sharding`` of the tokens, instead of mesh, group and strategy. The ranks do not compare their
            input then.
        ignore_index: the label of tokens that are left out of the mean.
        strategy: as given to ``shard``: with "tp_sp", the tokens are sharded over the mesh's tp dimension too. Leave it
            out if ``vocab_parallel_cross_entropy`` computed ``losses``, which then has the tokens of all ranks of tp.
        gradients: "auto" finds the wrapper of the parameters that ``losses`` was computed from, when the backward runs.
            "sum": the gradients will be summed over the ranks of the sequence; the backward looks for no wrapper.
            "mean": they will be averaged over these ranks, and are multiplied by their number. With "sum" and "mean",
            a wrapper that averages over dp too averages the gradients of the sequences' means.

    Returns:
        A scalar, float32 (float64 for float64), the same on every rank. NaN if all labels are ignored, as on one
        device, and on a GPU if a label is negative and not ``ignore_index``.

    Raises:
        TypeError: ``losses`` is not a floating-point tensor, or ``labels`` not an integer one.
        ValueError: their shapes differ; a label is negative and not ``ignore_index`` (on the CPU); the ranks differ in
            batch, dtype or ``ignore_index``; or the sharding gives this rank another number of tokens. In the backward,
            with ``gradients="auto"``: a wrapper averages over some ranks of the sequence only, or it is not known what
            reduces the gradients (DeepSpeed, parameters that reentrant checkpointing hides, compiled autograd); "sum"
            or "mean" says it.
        RuntimeError: another rank raised an error on its own input.
    """
    if isinstance(sharding, Sharding) and mesh is None and group is None and strategy is None:
        _check(losses, labels, ignore_index, gradients)
        loss: Tensor = mean_over_tokens(losses, labels, sharding, True, ignore_index, gradients)[0]
        return loss
    where = {"mesh": mesh, "group": group, "strategy": strategy}
    return _agree_on_loss(losses, labels, sharding, ignore_index, gradients, where)


@no_compile
def _agree_on_loss(
    losses: Tensor,
    labels: Tensor,
    sharding: Sharding | None,
    ignore_index: int,
    gradients: Gradients,
    where: dict[str, Any],
) -> Tensor:
    """``token_loss`` after a handshake, or after comparing the sharding with ``where``: mesh, group and strategy."""
    check_sharding(sharding, **where)
    if sharding is not None:
        return token_loss(losses, labels, sharding=sharding, ignore_index=ignore_index, gradients=gradients)
    ranks = Sharding(0, "contiguous", **where)  # names the ranks only

    def header() -> _LossHeader:
        _check(losses, labels, ignore_index, gradients)
        return _LossHeader(losses.shape[0], losses.dtype, ignore_index)

    check_same(all_gather_header(header, ranks.sequence_group), "batch", "dtype", "ignore_index")
    loss: Tensor = mean_over_tokens(losses, labels, ranks, False, ignore_index, gradients)[0]
    return loss


def _check(losses: Tensor, labels: Tensor, ignore_index: int, gradients: str) -> None:
    if not isinstance(losses, Tensor) or losses.dtype not in DTYPES:
        what = f"{losses.dtype}" if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(f"losses: expected a floating-point tensor [batch, seq_local], got {what}")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        what = f"{labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels: expected an integer tensor [batch, seq_local], got {what}")
    if losses.dim() == 1 and losses.shape == labels.shape:
        raise ValueError(
            f"losses and labels: flattened, {tuple(losses.shape)}; expected [batch, seq_local], as from "
            "F.cross_entropy(logits.mT, labels, reduction='none')"
        )
    if losses.dim() != 2 or losses.shape != labels.shape:
        raise ValueError(
            f"losses: shape {tuple(losses.shape)}, but labels have {tuple(labels.shape)}; expected "
            "[batch, seq_local] of both, not flattened: one loss a token (reduction='none')"
        )
    check_int("ignore_index", ignore_index)
    check_choice("gradients", gradients, GRADIENTS)


@operator(
    fake=lambda losses, *_: tuple(losses.new_empty((), dtype=sum_dtype(losses)) for _ in range(2)),
    autograd=lambda *args: _MeanOverTokens.apply(*args),
)
def mean_over_tokens(
    losses: Tensor, labels: Tensor, sharding: Sharding, fits_sharding: bool, ignore_index: int, gradients: str
) -> tuple[Tensor, Tensor]:
    """The loss, and the number of labels on all ranks that are not ignored, of ``losses`` and ``labels [b, s]``.

    ``fits_sharding``: the sharding says how many tokens this rank holds, not only over which ranks to sum.
    """
    if fits_sharding:
        sharding.check_local(losses.shape[1])
    sequence, counts = sharding.sequence_group, labels != ignore_index  # [b, s]
    # The loss of an ignored label may be NaN or infinite, so it is masked instead of multiplied by 0.
    local_sum = losses.masked_fill(~counts, 0.0).to(sum_dtype(losses)).sum()
    invalid = ((labels < 0) & counts).any()
    count = torch.where(invalid, torch.nan, counts.sum()).to(local_sum.dtype)  # NaN on all ranks if invalid on one
    if size_of(sequence) > 1:
        dist.all_reduce(count, group=sequence)
    if count.device.type == "cpu" and count.isnan():  # on a GPU the loss is NaN, because the host would have to wait
        raise ValueError(
            f"labels: some are negative on some rank, and not ignore_index={ignore_index}; pass the ignore_index that "
            "F.cross_entropy gets"
        )
    loss = local_sum / count
    if size_of(sequence) > 1:
        dist.all_reduce(loss, group=sequence)
    return loss, count


@operator(fake=lambda grad, *_: torch.empty_like(grad))
def gradient_of_a_token(grad: Tensor, count: Tensor, sharding: Sharding, gradients: str) -> Tensor:
    """The gradient of the loss of each token that counts, a scalar; ``grad`` is the gradient of the mean.

    It looks for wrappers whenever it runs. In compiled code autograd's node belongs to the compiled function, whose
    inputs include the parameters.
    """
    sequence, mode = sharding.sequence_group, cast(Gradients, gradients)
    if sequence is None:
        return grad / count
    reduction = reduction_behind(torch._C._current_autograd_node(), sequence, mode)
    if reduction is None:
        return grad / count * (sequence.size() if gradients == "mean" else 1)
    ranks = frozenset(dist.get_process_group_ranks(sequence))
    if reduction.ranks != ranks:
        count = count / len(reduction.ranks & ranks)  # which have the same count
        for group in reduction.groups:
            dist.all_reduce(count, group=group)
    assert reduction.divisor is not None
    return grad / count * reduction.divisor


class _MeanOverTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, labels: Tensor, *constants: Any) -> tuple[Tensor, Tensor]:
        loss, count = mean_over_tokens(losses, labels, *constants)
        ctx.save_for_backward(labels, count)
        ctx.mark_non_differentiable(count)
        ctx.dtype, ctx.constants = losses.dtype, constants
        return loss, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        labels, count = ctx.saved_tensors
        sharding, _, ignore_index, gradients = ctx.constants
        share = gradient_of_a_token(grad, count, sharding, gradients).to(ctx.dtype)
        return torch.where(labels != ignore_index, share, torch.zeros_like(share)), *[None] * 5


def all_reduce_loss(local_loss: Tensor, group: ProcessGroup | None, gradient_scale: int = 1) -> Tensor:
    """The sum of all ranks' ``local_loss``, a scalar.

    Its backward gives this rank's partial gradient, multiplied by ``gradient_scale``. If a wrapper such as DDP averages
    the gradients over the ranks, pass their number.
    """
    if group is None or group.size() == 1:
        return local_loss
    total: Tensor = _AllReduceLoss.apply(local_loss, group, gradient_scale)
    return total


class _AllReduceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local_loss: Tensor, group: ProcessGroup, gradient_scale: int) -> Tensor:
        ctx.group, ctx.gradient_scale = group, gradient_scale
        total = local_loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        reduction_behind(ctx, ctx.group, "sum" if ctx.gradient_scale == 1 else "mean")  # notes the partial gradients
        return grad * ctx.gradient_scale, None, None
