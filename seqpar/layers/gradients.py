"""Averages the gradients of weights over the ranks that hold them, and clips them by their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FlatParameter, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..base.checks import check_choice, check_module
from ..comm.collectives import all_reduce, run
from ..comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint, propagate_errors
from ..comm.waiting import operation
from ..ranks.mesh import (
    all_ranks_group,
    averaged_dimensions,
    default_group,
    dimension_group,
    global_ranks,
    rank_in,
    sequence_group_of,
    shown,
    size_of,
)
from ..strategies.gemm import sum_dtype

Reduce = Literal["mean", "sum"]

_BUCKET_BYTES = 64 << 20  # of gradients in one all-reduce, in the dtype in which they are sent
# The dtypes of gradients. Where the ranks' gradients of a parameter have several, they are sent in the last one.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)

Named = list[tuple[str, nn.Parameter]]
# Parameters, or modules of parameters, that each rank holds alone; or each with the ranks that hold the same one.
Ignored = Iterable[nn.Parameter | nn.Module] | Mapping[nn.Parameter | nn.Module, ProcessGroup]


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
        _note_sum(named, over)
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
    g = _local_tensor(p.grad)
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
                holders[key] = _holders(name, over, None if p in apart else mesh, given, p in tensor_parallel)
            one = None if size_of(holders[key]) == 1 else holders[key]
            by_ranks.setdefault((p in apart, one), []).append((name, p))
    return by_ranks


def held_apart(module: nn.Module, ignore: Ignored | None) -> dict[nn.Parameter, ProcessGroup | None]:
    """The parameters of ``ignore``, each with the ranks that hold the same one; None is this rank alone.

    Raises:
        TypeError: ``ignore`` has something else.
        ValueError: ``ignore`` is not given, and a wrapper leaves out parameters, which may differ between ranks.
    """
    if ignore is None:
        if names := _left_out(module):
            raise ValueError(
                f"ignore: DDP or FSDP leaves out {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}, and it is "
                "not known whether every rank holds the same; pass as ignore= the parameters that a rank holds alone, "
                "such as its experts, or ignore=[] if there are none"
            )
        return {}
    apart: dict[nn.Parameter, ProcessGroup | None] = {}
    for x in ignore:
        holders = ignore[x] if isinstance(ignore, Mapping) else None
        if not isinstance(x, nn.Parameter | nn.Module):
            raise TypeError(f"ignore: expected parameters and modules, got {type(x).__name__}")
        if isinstance(ignore, Mapping) and not isinstance(holders, ProcessGroup):
            raise TypeError(
                f"ignore: expected for each parameter or module the ProcessGroup of the ranks that hold the same one, "
                f"got {type(holders).__name__}; pass a list of those that a rank holds alone"
            )
        apart.update(dict.fromkeys(x.parameters() if isinstance(x, nn.Module) else (x,), holders))
    return apart


def _left_out(module: nn.Module) -> list[str]:
    """The names of the trainable parameters that DDP or FSDP does not average, although they are inside of it."""
    found: set[nn.Parameter] = set()
    gathered = gathered_parameters(module)
    for wrapper in module.modules():
        if names := getattr(wrapper, "_ddp_params_and_buffers_to_ignore", ()):  # DDP's mark of the module in it
            found.update(p for name, p in wrapper.named_parameters() if name in names)
        if isinstance(wrapper, FullyShardedDataParallel | FSDPModule):
            assert isinstance(wrapper, nn.Module)
            found.update(p for p in wrapper.parameters() if not (p in gathered or is_flattened(p)))
    named = module.named_parameters()
    return [name for name, p in named if p in found and p.requires_grad and not isinstance(p, DTensor)]


def refuse_shards(module: nn.Module, ranks: ProcessGroup | None) -> None:
    """Raise if weights are used as shards on the ranks of a sequence, whose layers would add what belongs to different
    tokens. Weights that ``fully_shard`` gathers, and weights of this package's tensor-parallel layers, are right.
    """
    sharded = {n: p for n, p in module.named_parameters() if isinstance(p, DTensor)}
    if not sharded or size_of(ranks) == 1:
        return
    assert ranks is not None
    own, gathered = tensor_parallel_parameters(module), gathered_parameters(module)
    for name, p in sharded.items():
        for i, place in enumerate(p.placements if p not in own else ()):
            over = p.device_mesh.get_group(i)
            by_fsdp = any(shares_ranks(over, one) for one in gathered.get(p, ()))
            if not place.is_replicate() and not by_fsdp and shares_ranks(over, ranks):
                tp, rest = over.size(), ranks.size() // over.size()
                fits = f"seqpar.init_mesh(ring={max(rest, 2)}, tp={tp})"
                raise ValueError(
                    f"{name}: it is sharded over ranks {shown(global_ranks(over))}, which share a sequence, so tensor "
                    "parallelism would add what belongs to different tokens; give tensor parallelism ranks of its own: "
                    f"mesh={fits} on {max(rest, 2) * tp} ranks, or do not shard the weights. If fully_shard around the "
                    "module gathers them, pass the module that fully_shard was called with"
                )


def gathered_parameters(module: nn.Module) -> dict[nn.Parameter, list[ProcessGroup]]:
    """The parameters that ``fully_shard`` gathers for the forward, each with the groups of ranks that it works on."""
    found = {}
    for wrapper in module.modules():
        if isinstance(wrapper, FSDPModule):
            state = wrapper._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", [state._fsdp_param_group])  # several from torch 2.12 on
            for one in (p for group in groups if group is not None for p in group.fsdp_params):
                info, mesh = one._module_info, one.mesh_info.mesh
                found[getattr(info.module, info.param_name)] = [mesh.get_group(i) for i in range(mesh.ndim)]
    return found


def _holders(
    name: str,
    sharded_over: Sequence[ProcessGroup],
    mesh: DeviceMesh | None,
    ranks: ProcessGroup | None,
    tensor_parallel: bool,
) -> ProcessGroup | None:
    """The ranks of ``mesh``, or of ``ranks``, that hold the same elements of a parameter."""
    if ranks is None or not any(shares_ranks(one, ranks) for one in sharded_over):
        return ranks
    if mesh is not None and mesh.ndim > 1:
        names = averaged_dimensions(mesh)
        own = [n for n in names if not any(shares_ranks(one, mesh.get_group(n)) for one in sharded_over)]
        holders = dimension_group(mesh, tuple(own), False) if own else None
        if holders is None or not any(shares_ranks(one, holders) for one in sharded_over):
            return holders
    elif tensor_parallel and {*global_ranks(ranks)} <= {*global_ranks(sharded_over[-1])}:
        return None  # each rank of tp holds other elements
    raise ValueError(
        f"{name}: its shards are on the ranks that its gradient would be averaged over; leave sync_gradients out if a "
        "wrapper such as fully_shard averages over all of them, or pass a mesh with the dimensions of the shards"
    )


def shard_groups(module: nn.Module) -> dict[nn.Parameter, list[ProcessGroup]]:
    """The parameters that are sharded, and the groups whose ranks hold the shards."""
    found: dict[nn.Parameter, list[ProcessGroup]] = {}
    for wrapper in module.modules():
        if isinstance(wrapper, FullyShardedDataParallel):  # the innermost one holds a parameter
            assert wrapper.process_group is not None
            found |= {p: [wrapper.process_group] for p in wrapper.parameters() if is_flattened(p)}
    for name, p in module.named_parameters():
        if isinstance(p, DTensor):
            placements = enumerate(p.placements)
            found[p] = [p.device_mesh.get_group(i) for i, place in placements if not place.is_replicate()]
        elif p not in found and is_flattened(p):
            raise ValueError(f"{name}: FSDP1 around the module has flattened it; pass the wrapped module")
    return found


def is_flattened(p: nn.Parameter) -> bool:
    """Whether FSDP1 has put ``p`` into a flat parameter, or it is one."""
    return isinstance(p, FlatParameter) or getattr(p, "_fsdp_flattened", False)


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
        description = "; ".join(f"{name} {tuple(_local_tensor(p).shape)} {p.dtype}" for name, p in named)
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
            by_dtype.setdefault((dtype, p.device), []).append(_local_tensor(p.grad))
    for (dtype, _), gradients in by_dtype.items():  # every rank has the same lists, and makes the same buckets
        for bucket in _buckets(gradients, dtype):
            flat = all_reduce(_flatten(bucket, dtype), ranks)
            for g, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                torch.div(total.view_as(g), divisor, out=g)
    return any(dtypes)


# Gradients that are sums: their version after they were summed, and over which ranks of the job.
_sums: MutableMapping[Tensor, tuple[int, tuple[int, ...]]] = WeakTensorKeyDictionary()


def _note_sum(named: Named, ranks: ProcessGroup | None) -> None:
    for g in (_local_tensor(p.grad) for _, p in named if p.grad is not None and size_of(ranks) > 1):
        assert ranks is not None
        _sums[g] = g._version, global_ranks(ranks)


def _refuse_second_sum(named: Named, ranks: ProcessGroup | None) -> None:
    """Raise if a gradient is a sum over several of ``ranks``, and nobody has written to it since."""
    for name, g in ((name, _local_tensor(p.grad)) for name, p in named if p.grad is not None):
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
    if isinstance(p, DTensor) and (not isinstance(p.grad, DTensor) or p.grad.placements != p.placements):
        placed = p.grad.placements if isinstance(p.grad, DTensor) else "a plain tensor"
        raise TypeError(
            f"{name}: the parameter is placed as {p.placements}, but its gradient as {placed}; redistribute the "
            "gradient first"
        )
    return 1 + _DTYPES.index(p.grad.dtype)


def shares_ranks(one: ProcessGroup, other: ProcessGroup) -> bool:
    return len({*global_ranks(one)} & {*global_ranks(other)}) > 1


def _local_tensor(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x


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


@torch.no_grad()
@operation("clip_grad_norm_")
def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    ignore: Ignored | None = None,
) -> Tensor:
    """Scale the gradients so that their norm is at most ``max_norm``. The norm is that on one device, for any strategy.

    Unlike ``torch.nn.utils.clip_grad_norm_``, it takes plain parameters and DTensors together, also DTensors on
    different meshes. Call it after ``sync_gradients``. Without tensor-parallel layers, DTensor parameters or ``ignore``
    nothing is sent.

    Args:
        module: the module, built in the same way on every rank. Parameters without a gradient are left out.
        max_norm: the largest norm, positive. With ``inf`` the norm is computed and nothing is clipped.
        mesh: the mesh that was given to the layers.
        group: the group that was given to the layers.
        ignore: as in ``sync_gradients``: the parameters that a rank holds alone, or with the ranks of a group. Each
            counts once in the norm, and is scaled as all others are. Give it on every rank, also on a rank without
            such parameters (``ignore=[]``). The ranks of ``mesh`` or ``group`` must hold all of them. A list is refused
            if all of its parameters and gradients have the same norms on two ranks: they look like copies, which would
            be counted twice. If they are not, say so by ``{experts: group}`` with a group of this rank alone.

    Returns:
        The norm of all gradients before clipping, a scalar in float32 (float64 for float64), the same on every rank.

    Raises:
        TypeError: ``max_norm`` is not a number, ``module`` is not a module, or ``ignore`` has something else than
            parameters and modules.
        ValueError: ``max_norm`` is not positive, or the ranks pass different ones; DDP or FSDP leaves parameters out,
            and ``ignore`` does not say whether a rank holds them alone; or several ranks hold the same parameters and
            gradients, although ``ignore`` says that each rank holds them alone.
        RuntimeError: another rank raised an error on its own input.
    """
    check_module("module", module)
    default_group()  # raises if this is one of several processes and no process group is running
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    sharded, tensor_parallel = shard_groups(module), tensor_parallel_parameters(module)
    apart: dict[nn.Parameter, ProcessGroup | None] = {}
    if ignore is not None:
        ranks = all_ranks_group(mesh, group)
    else:
        ranks = sequence_group_of(mesh, group, "tp_sp") if tensor_parallel else None

    def header() -> _ClipHeader:
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float):
            raise TypeError(f"max_norm={max_norm!r}: expected a number, got {type(max_norm).__name__}")
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm}: expected a positive number, or inf to measure only")
        apart.update(held_apart(module, ignore))
        for name, p in named:
            if (holders := apart.get(p)) is not None:
                _holders(name, sharded.get(p, ()), None, holders, p in tensor_parallel)  # raises
                if ranks is not None and not {*global_ranks(holders)} <= {*global_ranks(ranks)}:
                    raise ValueError(
                        f"ignore: {name} is held by ranks {shown(global_ranks(holders))}, but the norm is over ranks "
                        f"{shown(global_ranks(ranks))}; pass a mesh or group with all ranks that hold parameters"
                    )
        return _ClipHeader(fingerprint(float(max_norm)))

    check_same(all_gather_header(header, ranks), "max_norm")
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    dtype = torch.float64 if wide else torch.float32  # of the norm
    # By the groups whose ranks hold different elements. Every rank has the same keys, also if it has no gradients.
    squares: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for p in parameters:
        if p not in apart:
            squares.setdefault(tuple(sharded.get(p, ())), []).extend([] if p.grad is None else [_local_tensor(p.grad)])
    total: Tensor | None = None
    for groups, tensors in squares.items():
        square = _sum_of_squares(tensors, dtype, parameters[0].device)
        for holders in groups:
            all_reduce(square, holders)
        total = square if total is None else total + square
    if ignore is not None:
        held = [p for p in parameters if p in apart and p.grad is not None]
        square = _square_of_apart(held, apart, ranks, parameters[0].device if parameters else torch.device("cpu"))
        total = square.to(dtype) if total is None else total + square.to(dtype)
    norm = torch.zeros((), dtype=dtype, device="cpu") if total is None else total.sqrt()
    gradients: dict[torch.device, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            gradients.setdefault(p.grad.device, []).append(_local_tensor(p.grad))
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as in torch.nn.utils; the host does not read it
    for device, tensors in gradients.items():
        torch._foreach_mul_(tensors, scale.to(device))
    return norm


@torch.no_grad()
def _square_of_apart(
    parameters: Sequence[nn.Parameter],
    apart: Mapping[nn.Parameter, ProcessGroup | None],
    ranks: ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """The sum of the squares of all ranks' gradients of parameters that a rank holds alone or with others, each once.

    Raises:
        ValueError: two ranks hold the same parameters and gradients, although each of them holds them alone.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for p in parameters:
        assert p.grad is not None
        by_copies.setdefault(_copies(p, apart[p]), []).append(_local_tensor(p.grad))
    square = torch.zeros((), dtype=torch.float64, device=device)
    for copies, tensors in by_copies.items():
        square = square + _sum_of_squares(tensors, torch.float64, device) / copies
    alone = [p for p in parameters if apart[p] is None and not isinstance(p, DTensor)]
    own = [_sum_of_squares(x, torch.float64, device) for x in ([p.grad for p in alone if p.grad is not None], alone)]
    numbers = torch.zeros(size_of(ranks), 3, dtype=torch.float64, device=device)
    numbers[rank_in(ranks)] = torch.stack([square, *own])
    all_reduce(numbers, ranks)
    # Copies are counted once only if ``ignore`` names the ranks that hold them.
    same = (numbers[:, None, 1:] == numbers[:, 1:]).all(-1) & (numbers[:, 1] > 0)  # [ranks, ranks]
    words = (
        "ignore: several ranks hold the same parameters with the same gradients, but ignore= says that each rank holds "
        "them alone; pass a dictionary, such as ignore={experts: group}, with the group of the ranks that hold the "
        "same. If they are other parameters, which are equal by chance, each rank passes a group of itself alone"
    )
    if same.is_cuda:
        torch._assert_async(~same.triu(1).any(), words)
    elif same.triu(1).any():
        raise ValueError(words)
    return numbers[:, 0].sum()


def _copies(p: nn.Parameter, holders: ProcessGroup | None) -> int:
    """How many ranks hold the same elements of ``p``."""
    copies = size_of(holders)
    if isinstance(p, DTensor):
        for i, place in enumerate(p.placements):
            of_mesh = p.device_mesh.get_group(i)
            if place.is_replicate() and (holders is None or not shares_ranks(of_mesh, holders)):
                copies *= of_mesh.size()
    return copies


class _ClipHeader(NamedTuple):
    max_norm: Fingerprint


def _sum_of_squares(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    total = torch.zeros((), dtype=dtype, device=device)
    for x in tensors:
        norm = torch.linalg.vector_norm(torch.view_as_real(x) if x.is_complex() else x, dtype=dtype)
        total = total + norm.to(device).square()
    return total


def tensor_parallel_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The DTensor parameters of ``megatron.ShardedWeights`` in ``module``. The last dimension of their mesh is tp."""
    return {getattr(m, name) for m in module.modules() for name in getattr(m, "tensor_parallel_parts", ())}
