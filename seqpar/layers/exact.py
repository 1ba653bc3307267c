"""Linear layers, embeddings and norms with the same bits on any number of ranks.

The sum of floating-point numbers depends on their order, and so on the ranks that hold them. The sum of integers does
not. A factor of a matrix product is written as integers of 14 bits, scaled by a power of two for each row. Float64
holds the products and sums of these integers without rounding, whatever the library, the order and the ranks (Ozaki et
al., 2012, https://doi.org/10.1007/s11075-011-9478-1). The result is rounded once.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh, ProcessGroup
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..base.checks import check_choice, check_module, no_compile
from ..base.sharded import is_dtensor
from ..comm.collectives import all_reduce
from ..comm.handshake import Fingerprint, all_gather_header, check_same, fingerprint
from ..comm.waiting import operation
from ..patching.forwards import WithoutHooks, is_replaced, replace_forward
from ..ranks.mesh import all_ranks_group, size_of
from .gradients import Reduce, note_sum

OWNER = "seqpar.invariant_layers"
_BITS = 14  # of an integer
_MOST_TERMS = 1 << 23  # of a sum: 4 products of 28 bits and 2**23 terms need 53 bits, as many as float64 has


class _ModuleHeader(NamedTuple):
    reduce: bool
    parameters_of_module: Fingerprint  # names, shapes, dtypes, and which are trained


class _Over(NamedTuple):
    """The ranks over which gradients are summed, and what the sum is divided by."""

    ranks: ProcessGroup | None
    divisor: int


_ALONE = _Over(None, 1)


@operation("invariant_layers")
def invariant_layers(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    reduce: Reduce = "mean",
) -> ExitStack:
    """Let a model's linear layers, embeddings and norms have the same bits on any number of ranks.

    Together with ``deterministic="invariant"`` in attention, a training has the same losses and weights, to the last
    bit, in every layout, and on any number of ranks with ``reduce="sum"``, on powers of two with "mean". It is for
    comparing trainings, not for training fast: a matrix product is three products in float64, and takes about nine
    times as long on a CPU.

    The results of linear layers are rounded once, from sums without rounding. The gradients of weights are reduced over
    the ranks as soon as backward has computed them, and are rounded once too. So leave ``sync_gradients`` out, and do
    not wrap the model in DDP: they would average equal numbers, and round.

    Every rank must call the modules equally often and in the same order.

    Args:
        module: the model, built in the same way on every rank. Its parameters must belong to modules that call
            ``F.linear``, ``F.embedding`` or ``torch.addmm`` with them, and to norms: ``nn.LayerNorm``, ``nn.RMSNorm``,
            and other modules that multiply ``[..., hidden]`` by a weight ``[hidden]`` or add one, token by token, as
            the norms of transformers do.
        mesh: the mesh that was given to the layers. The sums are over all its ranks, the replicas along dp included.
        group: all ranks whose losses are averaged, as a ProcessGroup. With neither, the default group.
        reduce: "sum" if the loss of each rank is its share of one device's loss, as with ``gradients="sum"`` in
            ``token_loss`` and in ``seqpar.hf.parallelize``. With "mean", a rank's gradients are as many times one
            device's as there are ranks: they have other bits if the number is no power of two, or if they are smaller
            than the normal numbers of their dtype (in float16 many are, 6e-5).

    Returns:
        A context manager. Its end, or ``close()``, restores the modules.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: a parameter is sharded, or the ranks' modules differ. In a forward, a module uses its parameters in
            another way. In backward, a sum has more than 8 million terms.
        RuntimeError: in backward, a parameter has a gradient from something else than a call of its module.

    Example:
        >>> model = seqpar.hf.parallelize(model, deterministic="invariant", gradients="sum")
        >>> with seqpar.invariant_layers(model, reduce="sum"):
        ...     train(model)  # without sync_gradients
    """
    ranks, found = all_ranks_group(mesh, group), list[tuple[nn.Module, Any]]()

    def header() -> _ModuleHeader:
        check_module("module", module)
        check_choice("reduce", reduce, get_args(Reduce))
        found.extend((one, run) for name, one in module.named_modules() if (run := _run_of(name, one)) is not None)
        described = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()]
        return _ModuleHeader(reduce == "sum", fingerprint(described))

    check_same(all_gather_header(header, ranks), "reduce", "parameters_of_module")
    over = _Over(ranks, size_of(ranks) if reduce == "mean" else 1)
    undo, summed = ExitStack(), set[Tensor]()

    def check(name: str, p: nn.Parameter) -> None:
        if reduce == "sum":
            note_sum([(name, p)], ranks)
        if p not in summed:
            raise RuntimeError(
                f"{name}: it has a gradient, but not from a call of the module that it belongs to; something else uses "
                "the parameter, and the gradient may depend on the number of ranks; leave invariant_layers out"
            )

    for one, run in found:
        undo.callback(replace_forward(one, OWNER, partial(no_compile(run), over, summed)))
    for name, p in module.named_parameters():
        if p.requires_grad:
            undo.callback(p.register_post_accumulate_grad_hook(partial(check, name)).remove)
    return undo


def is_invariant(module: nn.Module) -> bool:
    """Whether a module in ``module`` sums the gradients of its weights over ranks by itself."""
    return any(is_replaced(one, OWNER) for one in module.modules())


def _run_of(name: str, module: nn.Module) -> Any:
    """What to run in place of the forward of ``module``; None if the module has no parameters of its own."""
    own = _own(module)
    for key, p in own.items():
        if is_dtensor(p):
            raise ValueError(f"{name}.{key}: it is sharded; call invariant_layers on a model of whole weights")
    if not own:
        return None
    return _in_norm if all(p.dim() == 1 for p in own.values()) else _in_exact_products


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the module itself, and not also of a module in it, as the bias of BERT's head is."""
    inner = {p for child in module.children() for p in child.parameters()}
    return {name: p for name, p in module.named_parameters(recurse=False) if p not in inner}


def _unknown(module: nn.Module) -> ValueError:
    shapes = ", ".join(f"{key} {tuple(p.shape)}" for key, p in _own(module).items())
    return ValueError(
        f"{type(module).__name__}: invariant_layers does not know how it uses its parameters ({shapes}), so that their "
        "gradients may depend on the number of ranks; expected linear layers, embeddings without max_norm, sparse and "
        "scale_grad_by_freq, and norms of [..., hidden] with weights [hidden]; leave invariant_layers out"
    )


def _in_exact_products(
    over: _Over, summed: set[Tensor], module: nn.Module, forward: Any, *args: Any, **kwargs: Any
) -> Any:
    with _ExactProducts(over, summed, module):
        return forward(*args, **kwargs)


class _ExactProducts(TorchFunctionMode):
    """In the block, the matrix products and embeddings with parameters of ``module`` are exact. Other uses raise."""

    def __init__(self, over: _Over, summed: set[Tensor], module: nn.Module) -> None:
        super().__init__()
        self.over, self.summed, self.module, self.own = over, summed, module, [*_own(module).values()]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = [x for x in tree_leaves((args, kwargs)) if any(x is p for p in self.own)]
        if own and (run := _EXACT.get(function)) is not None:
            self.summed.update(own)
            return run(self, *args, **kwargs)
        result = function(*args, **kwargs)
        if own and any(isinstance(x, Tensor) for x in tree_leaves(result)):
            raise _unknown(self.module)
        return result

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = input
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if x.dtype != weight.dtype or x.shape[-1:] != weight.shape[1:]:
            return F.linear(x, weight, bias)  # raises PyTorch's error
        out: Tensor = _ExactLinear.apply(x, weight, bias, self.over)
        return out

    def addmm(self, input: Tensor, mat1: Tensor, mat2: Tensor) -> Tensor:
        return self.linear(mat1, mat2.T, input)

    def embedding(
        self, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Tensor:  # fmt: skip
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise _unknown(self.module)
        out: Tensor = _ExactEmbedding.apply(input, weight, padding_idx, self.over)
        return out


_EXACT: dict[Any, Any] = {
    F.linear: _ExactProducts.linear,
    F.embedding: _ExactProducts.embedding,
    torch.addmm: _ExactProducts.addmm,
}


def _in_norm(over: _Over, summed: set[Tensor], module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward with a copy of each weight for each token. The gradient of a weight is the sum of its copies'."""
    x = next(iter((*args, *kwargs.values())), None)  # [..., hidden]
    weights = {key: p for key, p in _own(module).items() if p.requires_grad}
    if not isinstance(x, Tensor) or any(p.shape != x.shape[-1:] for p in weights.values()):
        raise _unknown(module)
    summed.update(weights.values())
    copies = {f"module.{key}": _WeightCopies.apply(p, x.shape[:-1], over) for key, p in weights.items()}
    run = partial(functional_call, WithoutHooks(module, forward), args=args, kwargs=kwargs)
    with _NormsInSteps():
        try:
            out = run(copies)
            # At other weights, because of weights that are 0 a sum over copies is 0 too.
            steps = torch.linspace(0.3, 0.9, x.shape[-1], dtype=x.dtype, device=x.device)
            moved = {f"module.{key}": p.detach() + steps.to(p.dtype) for key, p in weights.items()}
            with torch.no_grad():
                plain = run(moved)
                of_copies = run({key: p.expand(x.shape) for key, p in moved.items()})
        except RuntimeError as error:  # of shapes that do not fit
            raise _unknown(module) from error
    if not isinstance(out, Tensor) or not torch.allclose(of_copies, plain, rtol=0, atol=0, equal_nan=True):
        raise _unknown(module)
    return out


class _NormsInSteps(TorchFunctionMode):
    """In the block, ``F.layer_norm`` and ``F.rms_norm`` multiply by the weight and add the bias in steps of their own.

    Weight and bias may therefore be copies ``[..., hidden]`` for each token.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (F.layer_norm, F.rms_norm):
            return function(*args, **(kwargs or {}))
        given = signature(function).bind(*args, **(kwargs or {})).arguments
        weight, bias = given.pop("weight", None), given.pop("bias", None)
        out = function(**given)
        out = out if weight is None else out * weight
        return out if bias is None else out + bias


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, over: _Over) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.over = over
        out = _product(x.reshape(-1, x.shape[-1]), weight.T).view(*x.shape[:-1], len(weight))
        return (out if bias is None else out + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad, rows = grad.reshape(-1, len(weight)), x.reshape(-1, x.shape[-1])  # [t, out], [t, in]
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = _product(grad, weight).view_as(x).to(x.dtype) if needs_x else None
        dw = _product(grad.T, rows, ctx.over).to(x.dtype) if needs_weight else None
        return dx, dw, _sum_of_rows(grad, ctx.over) if needs_bias else None, None


class _ExactEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, over: _Over) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.padding, ctx.over = padding, over
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        ids, weight = ctx.saved_tensors
        ids, grad = ids.flatten(), grad.reshape(-1, weight.shape[1])  # [t], [t, d]
        if ctx.padding is not None:
            grad = grad.masked_fill((ids == ctx.padding)[:, None], 0)
        scale = _scales(grad.T, terms=len(ids), over=ctx.over)  # [d]
        parts = [
            torch.zeros(weight.shape, dtype=torch.float64, device=grad.device).index_add_(0, ids, part)
            for part in _integers(grad, scale)
        ]
        return None, _reduced(parts, scale, ctx.over).to(weight.dtype), None, None


class _WeightCopies(torch.autograd.Function):
    """A weight ``[d]`` as ``[..., d]``. Its gradient is the sum of the copies' gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: torch.Size, over: _Over) -> Tensor:
        ctx.over = over
        return weight.expand(*shape, len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _sum_of_rows(grad.reshape(-1, grad.shape[-1]), ctx.over), None, None


def _sum_of_rows(rows: Tensor, over: _Over) -> Tensor:
    """``rows [t, d]`` summed over t and over the ranks."""
    return _product(rows.new_ones(1, len(rows)), rows, over)[0].to(rows.dtype)


def _product(a: Tensor, b: Tensor, over: _Over = _ALONE) -> Tensor:
    """``a [m, k] @ b [k, n]``, summed over the ranks: float64."""
    by_row, by_column = _scales(a, b.T, terms=a.shape[1], over=over).split([len(a), b.shape[1]])
    left, right = _integers(a, by_row[:, None]), _integers(b, by_column)
    parts = []
    for k in range(len(left)):  # products with the same power of two
        pairs = [left[i] @ right[k - i] for i in range(k + 1)]  # [m, n] each
        parts.append(torch.stack(pairs).sum(0))
    return _reduced(parts, by_row[:, None] * by_column, over)


def _scales(*factors: Tensor, terms: int, over: _Over) -> Tensor:
    """A power of two for each row of each factor, on all ranks, by which its numbers become ``_integers``: float64."""
    largest = [x.abs().amax(1).double() if x.shape[1] else x.new_zeros(len(x)).double() for x in factors]
    known = torch.cat([*largest, largest[0].new_tensor([terms])])
    with operation("the backward of invariant_layers"):
        *_, most = all_reduce(known, over.ranks, dist.ReduceOp.MAX)
    if most * size_of(over.ranks) > _MOST_TERMS:
        raise ValueError(
            f"invariant_layers: a sum over {int(most)} tokens on each of {size_of(over.ranks)} ranks would be rounded; "
            f"at most {_MOST_TERMS} together are summed without rounding"
        )
    powers = known[:-1] / known[:-1].frexp().mantissa
    scales: Tensor = torch.where(known[:-1] == 0, 1, powers) / 2**_BITS
    return scales


def _integers(x: Tensor, scale: Tensor) -> list[Tensor]:
    """Integers of at most 14 bits, in float64, with ``x = scale * sum(integers[i] * 2 ** (-14 * i))``."""
    rest, found = x.double() / scale, list[Tensor]()
    for _ in range(4 if x.dtype == torch.float64 else 2):
        found.append(rest.round())
        rest = (rest - found[-1]) * 2**_BITS
    return found


def _reduced(parts: list[Tensor], scale: Tensor, over: _Over) -> Tensor:
    """``scale * sum(parts[i] * 2 ** (-14 * i))``, summed over the ranks, over the divisor: float64."""
    with operation("the backward of invariant_layers"):
        sums = all_reduce(torch.stack(parts), over.ranks)
    total: Tensor = sums[-1]  # the smallest
    for part in reversed(sums[:-1].unbind()):
        total = part + total / 2**_BITS
    return total * scale / over.divisor
