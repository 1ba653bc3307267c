"""Which ranks hold a parameter: its shards, its copies, and parameters that a rank holds alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

from ..base.sharded import is_dtensor, is_flat_parameter, is_fsdp1, is_fsdp2
from ..ranks.mesh import averaged_dimensions, dimension_group, global_ranks, shown

# Parameters, or modules of parameters, that each rank holds alone; or each with the ranks that hold the same one.
Ignored = Iterable[nn.Parameter | nn.Module] | Mapping[nn.Parameter | nn.Module, ProcessGroup]


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
        if is_fsdp1(wrapper) or is_fsdp2(wrapper):
            assert isinstance(wrapper, nn.Module)
            found.update(p for p in wrapper.parameters() if not (p in gathered or is_flattened(p)))
    named = module.named_parameters()
    return [name for name, p in named if p in found and p.requires_grad and not is_dtensor(p)]


def refuse_shards(module: nn.Module, ranks: ProcessGroup | None) -> None:
    """Raise if weights are used as shards on the ranks of a sequence, whose layers would add what belongs to different
    tokens. Weights that ``fully_shard`` gathers, and weights of this package's tensor-parallel layers, are right.
    """
    if ranks is None or ranks.size() == 1 or _all_plain(module):
        return
    sharded = {n: p for n, p in module.named_parameters() if is_dtensor(p)}
    if not sharded:
        return
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


def _all_plain(module: nn.Module) -> bool:
    """Whether no parameter is of a class of its own, as a DTensor is. Every decoded token asks it anew, because any
    code may replace a parameter; ``named_parameters`` would take four times as long."""
    kinds, seen, left = set[type](), set[nn.Module](), [module]
    while left:
        kinds.update(map(type, (one := left.pop())._parameters.values()))
        seen.add(one)
        left += [child for child in one._modules.values() if child is not None and child not in seen]
    return kinds <= {nn.Parameter, type(None)}


def gathered_parameters(module: nn.Module) -> dict[nn.Parameter, list[ProcessGroup]]:
    """The parameters that ``fully_shard`` gathers for the forward, each with the groups of ranks that it works on."""
    found = {}
    for wrapper in module.modules():
        if is_fsdp2(wrapper):
            state = wrapper._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", [state._fsdp_param_group])  # several from torch 2.12 on
            for one in (p for group in groups if group is not None for p in group.fsdp_params):
                info, mesh = one._module_info, one.mesh_info.mesh
                found[getattr(info.module, info.param_name)] = [mesh.get_group(i) for i in range(mesh.ndim)]
    return found


def holders_of(
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
        if is_fsdp1(wrapper):  # the innermost one holds a parameter
            assert wrapper.process_group is not None
            found |= {p: [wrapper.process_group] for p in wrapper.parameters() if is_flattened(p)}
    for name, p in module.named_parameters():
        if is_dtensor(p):
            placements = enumerate(p.placements)
            found[p] = [p.device_mesh.get_group(i) for i, place in placements if not place.is_replicate()]
        elif p not in found and is_flattened(p):
            raise ValueError(f"{name}: FSDP1 around the module has flattened it; pass the wrapped module")
    return found


def is_flattened(p: nn.Parameter) -> bool:
    """Whether FSDP1 has put ``p`` into a flat parameter, or it is one."""
    return is_flat_parameter(p) or getattr(p, "_fsdp_flattened", False)


def shares_ranks(one: ProcessGroup, other: ProcessGroup) -> bool:
    return len({*global_ranks(one)} & {*global_ranks(other)}) > 1


def local_tensor(x: Tensor) -> Tensor:
    return x._local_tensor if is_dtensor(x) else x


def tensor_parallel_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The DTensor parameters of ``megatron.ShardedWeights`` in ``module``. The last dimension of their mesh is tp."""
    return {getattr(m, name) for m in module.modules() for name in getattr(m, "tensor_parallel_parts", ())}
