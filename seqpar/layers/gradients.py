"""Averages the gradients of weights over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from ..base.checks import check_choice, check_module
from ..base.sharded import is_dtensor
from ..comm.collectives import all_reduce, run
from ..comm.handshake import Fingerprint, all_gather_header, fingerprint, propagate_errors
from ..comm.waiting import operation
from ..ranks.mesh import all_ranks_group, global_ranks, size_of
from ..strategies.gemm import sum_dtype
from .holders import Ignored, held_apart, holders_of, local_tensor, shard_groups, tensor_parallel_parameters

Reduce = Literal["mean", "sum"]

_BUCKET_BYTES = 64 << 20  # of gradients in one all-reduce, in the dtype in which they are sent
# The dtypes of gradients. Where the ranks' gradients of a parameter have several, they are sent in the last one.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)

Named = list[tuple[str, nn.Parameter]]


@operation("sync_gradients")
def sync_gradients(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    reduce: Reduce = "mean",
    ignore: Ignored | None = None,
) -> None:
    """Average the gradients of ``module``'s parameters, in place, over the ranks that hold the parameter.

    Every rank has a loss, and the objective is the mean of the ranks' losses. So the mean of the gradients is the
    gradient of the objective: of parameters before ``shard``, between, after ``unshard``, and of terms that every rank
    adds to its loss. The loss of ``token_loss``, and of models that ``seqpar.hf`` parallelizes, is one device's loss on
    every rank. The mean is then one device's gradient.

    DDP, FSDP and DeepSpeed average as well. To average twice, or after each micro-batch, changes nothing. Call it after
    ``backward`` and before anything reads the gradients (clipping, the optimizer).

    With a mesh the mean is over all its ranks, the replicas along dp included. A DTensor is averaged over the
    dimensions of the mesh along which it is replicated. Along the others a rank's gradient must be complete, as it is
    under ``fully_shard`` and in layers with ``strategy="tp_sp"``.

    Half-precision gradients are summed in float32 and rounded once. If a parameter has a gradient on some ranks only,
    the other ranks contribute zeros. A parameter without a gradient on any rank keeps none.

    Args:
        module: the module, built in the same way on every rank. Frozen parameters are left out.
        mesh: the mesh that was given to the layers.
        group: all ranks whose losses are averaged, as a ProcessGroup. With neither, the default group.
        reduce: "sum" if the objective is the sum of the ranks' losses, as where each rank's loss is its share of one
            device's loss. Then call it once a step, after the last micro-batch: a sum of sums would be multiplied by
            the number of ranks.
        ignore: parameters that a rank holds alone, such as its experts, or modules of such parameters. Their gradients
            are left as they are. If several ranks hold the same expert, a dictionary of parameters or modules, each
            with the group of these ranks: ``{experts: group}``. Their gradients are averaged over this group (with
            ``reduce="sum"`` summed). ``clip_grad_norm_`` and ``seqpar.hf.verify`` take the same value. An empty list
            says that there are none, where DDP or FSDP leaves parameters out.

    Raises:
        TypeError: a sparse gradient, or an argument of another type.
        ValueError: the ranks' parameters differ in number, name, shape or dtype; a parameter is sharded over the ranks
            of ``group``; the mesh has a dimension whose ranks may hold other parameters; no parameter has a gradient on
            any rank; with ``reduce="sum"`` a gradient has been summed over these ranks, and has not changed since (one
            that has changed cannot be told from a new one); or DDP or FSDP leaves parameters out, and ``ignore`` does
            not say whether a rank holds them alone.
        RuntimeError: another rank raised an error on its own gradients.
    """
    ranks = all_ranks_group(mesh, group)
    with propagate_errors(ranks):
        check_choice("reduce", reduce, get_args(Reduce))
        by_ranks = _by_ranks(module, mesh, group, ignore)
        sums = {key: None if reduce == "mean" else key[1] if key[0] else ranks for key in by_ranks}
        for key, named in by_ranks.items():
            _refuse_second_sum(named, sums[key])
    found = []
    for (apart, holders), named in by_ranks.items():  # in the same order on every rank
        over = sums[apart, holders]
        found.append(_sync(named, holders, size_of(holders) / size_of(over)))
        note_sum(named, over)
    if by_ranks and not any(found):
        raise ValueError(
            f"module={type(module).__name__}: no parameter has a gradient on any rank; call sync_gradients after "
            "backward and before zero_grad. If an optimizer steps inside backward, or DeepSpeed's engine holds the "
            "gradients, leave it out; see seqpar.average_in_backward"
        )


def average_in_backward(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    ignore: Ignored | None = None,
) -> ExitStack:
    """Average each gradient over the ranks as soon as backward has computed it, instead of ``sync_gradients``.

    For optimizers that step inside backward, in ``Tensor.register_post_accumulate_grad_hook``, such as LOMO or GaLore
    layer by layer. Call it before their hooks are registered, because hooks run in the order of their registration.
    It sends one message a parameter. Under ``fully_shard`` it is not needed.

    Every parameter must have its gradient on all ranks, in the same order. With micro-batches, what has been
    accumulated is averaged after each of them.

    Args:
        module: as in ``sync_gradients``.
        mesh: as in ``sync_gradients``.
        group: as in ``sync_gradients``.
        ignore: as in ``sync_gradients``.

    Returns:
        A context manager. Its end, or ``close()``, ends the averaging.

    Raises:
        TypeError: an argument of another type.
        ValueError: as in ``sync_gradients``.
        RuntimeError: in backward, the ranks have gradients of different parameters.
    """
    hooks = ExitStack()
    for (_, ranks), named in _by_ranks(module, mesh, group, ignore).items():
        if ranks is None:
            continue
        _check_same_parameters(named, ranks)
        for i, (name, p) in enumerate(named):
            hooks.callback(p.register_post_accumulate_grad_hook(partial(_average_one, name, i, ranks)).remove)
    return hooks


@torch.no_grad()
@operation("average_in_backward")
def _average_one(name: str, index: int, ranks: ProcessGroup, p: Tensor) -> None:
    assert p.grad is not None
    g = local_tensor(p.grad)
    flat = _flatten([g], sum_dtype(g))
    total = all_reduce(torch.cat([flat, flat.new_tensor([index])]), ranks).div_(ranks.size())
    same, words = total[-1].real == index, f"{name}: another rank has another parameter's gradient at this time"
    if total.is_cuda:
        torch._assert_async(same, words)
    elif not same:
        raise RuntimeError(f"{words}; use sync_gradients after backward where ranks lack different gradients")
    g.copy_(total[:-1].view_as(g))


def _by_ranks(
    module: nn.Module, mesh: DeviceMesh | None, group: ProcessGroup | None, ignore: Ignored | None
) -> dict[tuple[bool, ProcessGroup | None], Named]:
    """The trainable parameters, by the ranks that hold the same elements of them; None is this rank alone.

    First the parameters that all ranks hold, then, with True, the parameters of ``ignore`` that some ranks hold.
    """
    check_module("module", module)
    ranks = all_ranks_group(mesh, group)
    apart = held_apart(module, ignore)
    sharded, tensor_parallel = shard_groups(module), tensor_parallel_parameters(module)
    holders: dict[Any, ProcessGroup | None] = {}  # by the given ranks and the groups of the shards
    by_ranks: dict[tuple[bool, ProcessGroup | None], Named] = {}
    for name, p in sorted(module.named_parameters(), key=lambda named: named[1] in apart):
        given = apart.get(p, ranks)
        if p.requires_grad and not (p in apart and given is None):
            over = tuple(sharded.get(p, ()))
            key = (p in apart, given, over)
            if key not in holders:
                holders[key] = holders_of(name, over, None if p in apart else mesh, given, p in tensor_parallel)
            one = None if size_of(holders[key]) == 1 else holders[key]
            by_ranks.setdefault((p in apart, one), []).append((name, p))
    return by_ranks


class _GradientHeader(NamedTuple):
    """What the ranks compare before they reduce gradients."""

    parameters: int
    names_and_shapes: Fingerprint
    gradients: Fingerprint


def _check_same_parameters(
    named: Named, ranks: ProcessGroup | None, kinds: Callable[[], Sequence[int]] = tuple, divisor: float = 1
) -> bool:
    """Raise unless the ranks' parameters and divisors are alike. Returns whether ``kinds()`` are."""

    def header() -> _GradientHeader:
        description = "; ".join(f"{name} {tuple(local_tensor(p).shape)} {p.dtype}" for name, p in named)
        return _GradientHeader(len(named), fingerprint(description, divisor), fingerprint(*kinds()))

    headers = all_gather_header(header, ranks)
    if any(header[:2] != headers[0][:2] for header in headers):
        counts = [header.parameters for header in headers]
        raise ValueError(
            f"module: the ranks' trainable parameters differ in number ({counts}), name, shape or dtype, or the ranks "
            "pass other values of reduce; build the same module on every rank, or pass the parameters that a rank "
            "holds alone as ignore="
        )
    return all(header == headers[0] for header in headers)


@torch.no_grad()
def _sync(named: Named, ranks: ProcessGroup | None, divisor: float) -> bool:
    """Replace the gradients by their sum over the ranks over ``divisor``. Returns whether any rank has a gradient."""
    dtypes: list[int] = []  # of each parameter's gradient: 1 + its index in _DTYPES, or 0 without a gradient

    def kinds() -> list[int]:
        dtypes.extend(_kind_of_gradient(name, p) for name, p in named)
        return dtypes

    # Ranks may lack different gradients, such as an expert's that received no tokens of one rank.
    if not _check_same_parameters(named, ranks, kinds, divisor):
        assert ranks is not None
        dtypes = _on_any_rank(torch.tensor(dtypes, dtype=torch.int32, device="cpu"), ranks).tolist()
    if ranks is None and divisor == 1:
        return any(dtypes)
    by_dtype: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for (_, p), kind in zip(named, dtypes, strict=True):
        if kind:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None) or p.dtype)
            dtype = torch.promote_types(_DTYPES[kind - 1], torch.float32)
            by_dtype.setdefault((dtype, p.device), []).append(local_tensor(p.grad))
    for (dtype, _), gradients in by_dtype.items():  # every rank has the same lists, and makes the same buckets
        for bucket in _buckets(gradients, dtype):
            flat = all_reduce(_flatten(bucket, dtype), ranks)
            for g, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                torch.div(total.view_as(g), divisor, out=g)
    return any(dtypes)


# Gradients that are sums: their version after they were summed, and over which ranks of the job.
_sums: MutableMapping[Tensor, tuple[int, tuple[int, ...]]] = WeakTensorKeyDictionary()


def note_sum(named: Named, ranks: ProcessGroup | None) -> None:
    for g in (local_tensor(p.grad) for _, p in named if p.grad is not None and size_of(ranks) > 1):
        assert ranks is not None
        _sums[g] = g._version, global_ranks(ranks)


def _refuse_second_sum(named: Named, ranks: ProcessGroup | None) -> None:
    """Raise if a gradient is a sum over several of ``ranks``, and nobody has written to it since."""
    for name, g in ((name, local_tensor(p.grad)) for name, p in named if p.grad is not None):
        version, summed = _sums.get(g, (-1, ()))
        if ranks is not None and version == g._version and len({*summed} & {*global_ranks(ranks)}) > 1:
            raise ValueError(
                f"{name}: its gradient has been summed over these ranks, and has not changed since; another sum would "
                "multiply it by the number of ranks; call sync_gradients(reduce='sum') once a step, after backward"
            )


def _kind_of_gradient(name: str, p: nn.Parameter) -> int:
    if p.grad is None:
        return 0
    if p.grad.layout != torch.strided:
        raise TypeError(f"{name}: expected a dense gradient, got {p.grad.layout}; for nn.Embedding, pass sparse=False")
    if is_dtensor(p) and (not is_dtensor(p.grad) or p.grad.placements != p.placements):
        placed = p.grad.placements if is_dtensor(p.grad) else "a plain tensor"
        raise TypeError(
            f"{name}: the parameter is placed as {p.placements}, but its gradient as {placed}; redistribute the "
            "gradient first"
        )
    return 1 + _DTYPES.index(p.grad.dtype)


def _on_any_rank(flags: Tensor, group: ProcessGroup) -> Tensor:
    """The maximum of the ranks' ``flags``, on the CPU. Control data: not counted as sent."""
    types = {device.type for device in group._device_types}
    flags = flags.to("cpu" if "cpu" in types else next(iter(types)))
    run(dist.all_reduce, flags, op=dist.ReduceOp.MAX, group=group)
    return flags.cpu()


def _buckets(gradients: Sequence[Tensor], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Gradients of up to ``_BUCKET_BYTES`` together, for one all-reduce each."""
    bucket: list[Tensor] = []
    size = 0
    for g in gradients:
        nbytes = g.numel() * dtype.itemsize
        if bucket and size + nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(g)
        size += nbytes
    yield bucket


def _flatten(bucket: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([g.reshape(-1) for g in bucket]).to(dtype)  # [elements of the bucket]
