"""The loss over the tokens of all ranks.

Shapes: b batch, s tokens of this rank, t tokens whose losses this rank holds.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh, ProcessGroup

from ..base.checks import DTYPES, check_choice, check_dense, check_int, no_compile
from ..base.library import operator
from ..comm.collectives import all_gather, all_reduce
from ..comm.handshake import all_gather_header, check_same
from ..comm.waiting import operation
from ..ranks.mesh import size_of, tensor_group
from ..sharding.arguments import check_sharding
from ..sharding.sharding import Sharding
from ..strategies.gemm import sum_dtype

Gradients = Literal["mean", "sum"]
GRADIENTS: tuple[str, ...] = get_args(Gradients)


# 2**27 numbers of up to 2**17 are summed without rounding, but for what is below the last unit.
_UNITS = (2.0**-9, 2.0**-35, 2.0**-61)


class _LossHeader(NamedTuple):
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
    gradients: Gradients = "mean",
) -> Tensor:
    """The mean loss per token over all ranks' tokens, except those whose label is ``ignore_index``.

    The value is the loss that one device computes for the whole batch, the same number on every rank. With a mesh the
    mean is over all its ranks, the replicas along dp included. Ranks and replicas may have different numbers of labels.

    The mean of the gradients over these ranks is one device's gradient. DDP, FSDP and DeepSpeed compute this mean, and
    ``seqpar.sync_gradients`` does without a wrapper. The ranks may add to the loss any term that all of them compute
    alike: it counts once.

    Args:
        losses: ``[batch, seq_local]``, the loss of each of this rank's tokens, such as ``F.cross_entropy`` returns with
            ``reduction="none"``. Or ``[batch, tokens]`` as ``VocabParallelHead`` returns them, for the tokens of all
            ranks of tp.
        labels: integers ``[batch, seq_local]``, at least 0 or ``ignore_index``, shifted before they were sharded. With
            losses of ``VocabParallelHead`` and a sharding, also this rank's labels alone.
        mesh: the mesh of the layers, with its dp dimension.
        group: all ranks over which the mean is taken, as a ProcessGroup. With neither, the default group.
        sharding: the ``Sharding`` of the tokens, instead of mesh and group. Its mesh or group says over which ranks the
            mean is taken. The ranks do not compare their input then.
        ignore_index: the label of tokens that are left out of the mean.
        gradients: "sum" if something sums the gradients over these ranks instead of averaging them.

    Returns:
        A scalar, float32 (float64 for float64), the same on every rank. NaN if all labels are ignored, as on one
        device, and on a GPU if a label is negative and not ``ignore_index``.

    Raises:
        TypeError: ``losses`` is not a floating-point tensor, or ``labels`` not an integer one.
        ValueError: their shapes differ; a label is negative and not ``ignore_index`` (on the CPU); the ranks differ in
            dtype or ``ignore_index``; or the sharding gives this rank another number of tokens.
        RuntimeError: another rank raised an error on its own input.
    """
    if isinstance(sharding, Sharding) and mesh is None and group is None:
        _check(losses, labels, ignore_index, gradients, shapes_may_differ=True)
        loss: Tensor = mean_over_tokens(losses, labels, sharding, True, ignore_index, gradients)[0]
        return loss
    return _agree_on_loss(losses, labels, mesh, group, sharding, ignore_index, gradients)


@no_compile
def _agree_on_loss(
    losses: Tensor,
    labels: Tensor,
    mesh: DeviceMesh | None,
    group: ProcessGroup | None,
    sharding: Sharding | None,
    ignore_index: int,
    gradients: Gradients,
) -> Tensor:
    """``token_loss`` after a handshake, or after comparing the sharding with mesh and group."""
    check_sharding(sharding, mesh=mesh, group=group)
    if sharding is not None:
        return token_loss(losses, labels, sharding=sharding, ignore_index=ignore_index, gradients=gradients)
    ranks = Sharding(0, "contiguous", mesh=mesh, group=group)  # names the ranks only

    def header() -> _LossHeader:
        _check(losses, labels, ignore_index, gradients)
        return _LossHeader(losses.dtype, ignore_index)

    check_same(all_gather_header(header, ranks.all_ranks), "dtype", "ignore_index")
    loss: Tensor = mean_over_tokens(losses, labels, ranks, False, ignore_index, gradients)[0]
    return loss


# PyTorch compares no numbers of uint16, uint32 and uint64.
_LABELS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _check(losses: Tensor, labels: Tensor, ignore_index: int, gradients: str, shapes_may_differ: bool = False) -> None:
    if not isinstance(losses, Tensor) or losses.dtype not in DTYPES:
        what = f"{losses.dtype}" if isinstance(losses, Tensor) else type(losses).__name__
        raise TypeError(f"losses: expected a floating-point tensor [batch, seq_local], got {what}")
    if not isinstance(labels, Tensor) or labels.dtype not in _LABELS:
        what = f"{labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(
            f"labels: expected an integer tensor [batch, seq_local], int64 or uint8 to int32, got {what}; convert it "
            "with labels.long()"
        )
    check_dense("losses", losses)
    check_dense("labels", labels)
    if losses.dim() == 1 and losses.shape == labels.shape:
        raise ValueError(
            f"losses and labels: flattened, {tuple(losses.shape)}; expected [batch, seq_local], as from "
            "F.cross_entropy(logits.mT, labels, reduction='none')"
        )
    same = losses.shape[:1] == labels.shape[:1] if shapes_may_differ else losses.shape == labels.shape
    if losses.dim() != 2 or labels.dim() != 2 or not same:
        raise ValueError(
            f"losses: shape {tuple(losses.shape)}, but labels have {tuple(labels.shape)}; expected "
            "[batch, seq_local] of both, not flattened: one loss a token (reduction='none')"
        )
    check_int("ignore_index", ignore_index)
    check_choice("gradients", gradients, GRADIENTS)


@operator(
    fake=lambda losses, *_: tuple(losses.new_empty(x, dtype=sum_dtype(losses)) for x in ((), losses.shape)),
    autograd=lambda *args: _MeanOverTokens.apply(*args),
)
def mean_over_tokens(
    losses: Tensor, labels: Tensor, sharding: Sharding, fits_sharding: bool, ignore_index: int, gradients: str
) -> tuple[Tensor, Tensor]:
    """The loss, and its derivative with respect to each of ``losses [b, t]``. The backward reads ``gradients``.

    ``fits_sharding``: the sharding says how many tokens this rank holds, not only over which ranks to sum.
    """
    if fits_sharding:
        labels = _labels_of_losses(losses, labels, sharding)
    ranks, counts = sharding.all_ranks, labels != ignore_index  # [b, t]
    # The loss of an ignored label may be NaN or infinite, so it is masked instead of multiplied by 0.
    parts = exact_sum(losses.masked_fill(~counts, 0.0))
    invalid = ((labels < 0) & counts).any()
    count = torch.where(invalid, torch.nan, counts.sum()).to(parts.dtype)  # NaN on all ranks if invalid on one
    with operation("token_loss"):
        *_, count = sums = all_reduce(torch.cat([parts, count[None]]), ranks)
    if count.device.type == "cpu" and count.isnan():  # on a GPU the loss is NaN, because the host would have to wait
        raise ValueError(
            f"labels: some are negative on some rank, and not ignore_index={ignore_index}; pass the ignore_index that "
            "F.cross_entropy gets"
        )
    dtype = sum_dtype(losses)
    return (sums[:-1].sum() / count).to(dtype), torch.where(counts, 1 / count, 0.0).to(dtype)


def exact_sum(x: Tensor) -> Tensor:
    """The sum of ``x``, in parts ``[3]``, float64. The parts do not depend on the order, also of a sum over ranks."""
    parts: Tensor = _ExactSum.apply(x)
    return parts


class _ExactSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        parts, rest = [], x.double()
        for unit in _UNITS:
            whole = (rest / unit).round() * unit
            parts.append(whole.sum())
            rest = (rest - whole).nan_to_num()  # infinity is in the first part only
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # the same number for each part, because their sum is used
        return grad[0].to(ctx.dtype).expand(ctx.shape)


@operation("token_loss")
def _labels_of_losses(losses: Tensor, labels: Tensor, sharding: Sharding) -> Tensor:
    """The label of each of ``losses``, which are for this rank's tokens or for the tokens of all ranks of tp.

    Ranks of tp that hold the same losses count the same labels. The mean is the same.
    """
    tokens, own = losses.shape[1], labels.shape[1]
    if tokens == own == sharding.seq_local:
        return labels
    tensor = tensor_group(sharding.mesh, sharding.group) if sharding.over_tp else None
    lengths = sharding.lengths_in(tensor) if sharding.over_tp else (sharding.seq_local,)
    if tokens != sum(lengths) or own not in (tokens, sharding.seq_local):
        sharding.check_local(own)
        sharding.check_local(tokens)
    return labels if own == tokens else all_gather(labels, lengths, 1, tensor)


@operator(fake=lambda grad, *_: torch.empty_like(grad))
def sum_of_gradients(grad: Tensor, sharding: Sharding) -> Tensor:
    """The gradient of a loss that all ranks hold, summed over these ranks."""
    with operation("the backward of token_loss"):
        return all_reduce(grad.clone(), sharding.all_ranks)


class _MeanOverTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, labels: Tensor, *constants: Any) -> tuple[Tensor, Tensor]:
        loss, shares = mean_over_tokens(losses, labels, *constants)
        ctx.save_for_backward(shares)
        ctx.mark_non_differentiable(shares)
        ctx.set_materialize_grads(False)
        ctx.sharding, ctx.dtype = constants[0], losses.dtype
        ctx.divisor = size_of(ctx.sharding.all_ranks) if constants[-1] == "sum" else 1
        return loss, shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        (shares,) = ctx.saved_tensors
        # Multiplied in float32, because a share may underflow in half precision before a loss scaler has multiplied it.
        return (sum_of_gradients(grad, ctx.sharding) / ctx.divisor * shares).to(ctx.dtype), *[None] * 5


class AllReduced(torch.autograd.Function):
    """The sum of the ranks' ``x``. The gradient is this rank's: let ``SummedGradients`` sum it over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        return all_reduce(x.detach().clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad, None


class SummedGradients(torch.autograd.Function):
    """``x``, which every rank holds and uses. Backward sums the gradients of all of them, over ``divisor``.

    The divisor is the number of ranks where gradients are summed instead of averaged, and otherwise 1.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, divisor: int) -> Tensor:
        ctx.group, ctx.divisor = group, divisor
        return x.clone()  # the user may add to a loss in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return AllReduced.apply(grad, ctx.group) / ctx.divisor, None, None
