"""Functions of eager code as operators of ``torch.library``, for compiled layers and blocks of other packages' models.

What such a function sends and computes depends on values that change from call to call, such as the lengths. The
operator runs the function as eager code does, so that compiled code does not depend on these values. Its forward keeps
a graph of autograd, which its backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import index
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from ..base.compile_types import Opaque, register_constant_type
from ..base.library import operator
from ..sharding.spec import constant_float

_TENSOR = ("tensor",)  # among the arguments of a function, in place of a tensor
# What autograd consists of, and may be turned off inside of an operator.
_AUTOGRAD = [key for name, key in DispatchKey.__members__.items() if name.startswith(("Autograd", "ADInplaceOrView"))]


@register_constant_type()
@dataclass(frozen=True)
class EagerCall(Opaque):
    """What compiled code knows of a call of a function.

    Attributes:
        args: the positional arguments: ``(value,)``, or ``_TENSOR``.
        kwargs: the names and values of the other arguments.
        dims: the number of dimensions of each output that is a tensor.
        dtypes: the name of the dtype of each output that is a tensor.
        autocast: the name of autocast's dtype; "" without autocast.
    """

    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    autocast: str


def call_operator(overload: Any, like: Any, args: Any, kwargs: dict[str, Any], *others: Any) -> Any:
    """Call an ``eager_operator`` in compiled code. ``like`` has its outputs' structure, shapes and dtypes.

    ``args`` and ``kwargs`` are the function's, tensors and what ``is_constant``; ``others`` are the operator's own.
    Returns ``like`` itself if it holds no tensor.
    """
    outputs = like if isinstance(like, tuple) else (like,)
    tensors = [x for x in outputs if isinstance(x, Tensor)]
    if not tensors:
        return like
    device_type = tensors[0].device.type
    autocast = torch.is_autocast_enabled(device_type)
    call = EagerCall(
        tuple(_TENSOR if isinstance(x, Tensor) else (_constant(x),) for x in args),
        tuple((name, _TENSOR if isinstance(x, Tensor) else (_constant(x),)) for name, x in kwargs.items()),
        tuple(x.dim() for x in tensors),
        tuple(_name(x.dtype) for x in tensors),
        _name(torch.get_autocast_dtype(device_type)) if autocast else "",
    )
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    results = overload(inputs, [n for x in tensors for n in x.shape], [], call, *others)
    if not isinstance(like, tuple):
        return results[0]
    found: list[Any] = []
    for x in outputs:
        found.append(results[len([y for y in found if y is not None])] if isinstance(x, Tensor) else x)
    return tuple(found)


def is_constant(x: Any) -> bool:
    """Whether ``x`` may be an argument of the function of an operator, besides tensors."""
    if isinstance(x, tuple | list):
        return all(is_constant(y) for y in x)
    return x is None or isinstance(x, bool | int | float | str)


def _constant(x: Any) -> Any:
    """``x`` without variables of torch.compile. Lists become tuples."""
    if isinstance(x, tuple | list):
        return tuple(_constant(y) for y in x)
    if isinstance(x, float):
        return constant_float(x)
    return index(x) if isinstance(x, int) and not isinstance(x, bool) else x


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Graph(bytearray):
    """The graph of one forward. It lives as long as the memory of the tensor that the operator returns for it.

    The memory may belong to several tensors: a checkpoint detaches what it saves.
    """

    leaves: list[Tensor]
    outputs: list[Tensor]
    inputs: Sequence[Tensor] = ()  # of the operator, during backward


_graphs: WeakValueDictionary[int, _Graph] = WeakValueDictionary()  # by the number that the tensor holds
_numbers = count(1)


@contextmanager
def _with_autograd() -> Iterator[None]:
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


def _shapes(sizes: Sequence[int], dims: Sequence[int]) -> Iterator[Sequence[int]]:
    at = 0
    for dim in dims:
        yield sizes[at : at + dim]
        at += dim


def _fake(inputs: Any, sizes: Any, needs: Any, call: Any, *_: Any) -> list[Tensor]:
    outputs = zip(_shapes(sizes, call.dims), call.dtypes, strict=True)
    made = [inputs[0].new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in outputs]
    return [*made, torch.empty(1, dtype=torch.int64, device="cpu")]


def eager_operator(function: Callable[..., list[Tensor]]) -> Any:
    """Decorates a function that returns ``run_eagerly(...)``, which becomes an operator (see ``operator``).

    Its arguments are ``inputs: Sequence[Tensor], sizes: Sequence[int], needs: Sequence[bool], call: EagerCall`` and
    opaque objects.
    """

    def autograd(inputs: Any, *others: Any) -> Any:
        return _DifferentiableCall.apply(overload, others, *inputs)

    overload = operator(fake=_fake, autograd=autograd)(function)
    return overload


def run_eagerly(
    function: Callable[..., Any],
    name: str,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    needs: Sequence[bool],
    call: EagerCall,
) -> list[Tensor]:
    """The outputs of ``function`` that are tensors, and a tensor that keeps the graph for backward.

    Args:
        function: it gets the arguments that ``call`` says.
        name: the name of the function, for errors.
        inputs: the arguments of the function that are tensors.
        sizes: the sizes of the outputs, one shape after another.
        needs: which inputs need a gradient. Without one, no graph is kept.
        call: the other arguments of the function, and the outputs.
    """
    graph = _Graph(8)
    keeps = any(needs)
    places = [x.untyped_storage().data_ptr() for x in inputs]
    copied = [
        x.contiguous() if places.count(place) == 1 else x.clone() for x, place in zip(inputs, places, strict=True)
    ]
    # By where their memory is, which does not keep it. The same holds for the hooks.
    own = {
        place: (i, x.dtype, x.storage_offset())
        for i, (x, place) in enumerate(zip(inputs, places, strict=True))
        if x is copied[i] and x.numel()
    }
    kept = ref(graph)

    # Compiled code may write to an input of the operator afterwards, or compute it again in backward, which gets it.
    def pack(x: Tensor) -> Any:
        i, dtype, offset = own.get(x.untyped_storage().data_ptr(), (None, None, 0))
        if i is None:
            return x
        return x.clone() if x.dtype != dtype else (i, x.shape, x.stride(), x.storage_offset() - offset)

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        i, shape, stride, offset = packed
        alive = kept()
        assert alive is not None
        x: Tensor = alive.inputs[i]
        return x.as_strided(shape, stride, x.storage_offset() + offset)

    device_type, amp = inputs[0].device.type, getattr(torch, call.autocast) if call.autocast else None
    with (
        _with_autograd(),
        torch.set_grad_enabled(keeps),
        torch.autocast(device_type, dtype=amp, enabled=amp is not None),
        saved_tensors_hooks(pack, unpack),
    ):
        leaves = [
            x.detach().requires_grad_(need) for x, need in zip(copied, needs or [False] * len(inputs), strict=True)
        ]
        given = iter(leaves)
        args = [next(given) if x == _TENSOR else x[0] for x in call.args]
        kwargs = {name: next(given) if x == _TENSOR else x[0] for name, x in call.kwargs}
        found = function(*args, **kwargs)
    outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, Tensor)]
    _check_outputs(outputs, sizes, call, name)
    if keeps:
        number = next(_numbers)
        graph[:] = number.to_bytes(8, "little")
        graph.leaves, graph.outputs = [x for x in leaves if x.requires_grad], outputs
        _graphs[number] = graph
    # Copies, because the graph may hold the outputs and compiled code may write to them.
    results = [
        x.detach().to(getattr(torch, dtype)).clone(memory_format=torch.contiguous_format)
        for x, dtype in zip(outputs, call.dtypes, strict=True)
    ]
    return [*results, torch.frombuffer(graph, dtype=torch.int64)]


def _check_outputs(outputs: list[Tensor], sizes: Sequence[int], call: EagerCall, name: str) -> None:
    found = [(tuple(x.shape), _name(x.dtype)) for x in outputs]
    expected = [(tuple(shape), dtype) for shape, dtype in zip(_shapes(sizes, call.dims), call.dtypes, strict=True)]
    same = [shape for shape, _ in found] == [shape for shape, _ in expected]
    if not same or any(
        torch.promote_types(x.dtype, getattr(torch, dtype)) != getattr(torch, dtype)
        for x, dtype in zip(outputs, call.dtypes, strict=True)
    ):
        raise ValueError(
            f"{name}: it returned {found}, but the compiled code expects {expected}; of a mixer, its tokenwise "
            "function says so: let both return the same, or do not compile the layer"
        )


@operator(
    fake=lambda douts, inputs, graph, needs: [x.new_empty(x.shape) for x, n in zip(inputs, needs, strict=True) if n]
)
def run_backward(
    douts: Sequence[Tensor], inputs: Sequence[Tensor], graph: Tensor, needs: Sequence[bool]
) -> list[Tensor]:
    """The gradients of the ``inputs`` of ``run_eagerly`` that need one.

    Args:
        douts: of its outputs.
        inputs: as in forward.
        graph: its last result.
        needs: as in forward.
    """
    kept = _graphs.get(int(graph))
    if kept is None:
        raise RuntimeError(
            "backward: the graph of an operator's forward is gone, because the tensors that were saved for backward "
            "were copied, for example by torch.autograd.graph.save_on_cpu; do not compile the layers, or do not copy "
            "the tensors"
        )
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    pairs = [(x, dout.to(x.dtype)) for x, dout in zip(kept.outputs, douts, strict=True) if x.requires_grad]
    kept.inputs = [x.contiguous() for x in inputs]
    try:
        with _with_autograd():
            # The graph ends with its tensor, so that a caller may run backward again with retain_graph=True.
            found = torch.autograd.grad(
                [x for x, _ in pairs], kept.leaves, [dout for _, dout in pairs], retain_graph=True, allow_unused=True
            )
    finally:
        kept.inputs = ()
    return [x.new_zeros(x.shape) if dx is None else dx.contiguous() for x, dx in zip(wanted, found, strict=True)]


class _DifferentiableCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, overload: Any, others: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        sizes, _, *rest = others
        ctx.needs = [bool(need) for need in ctx.needs_input_grad[2:]]
        with torch._C._AutoDispatchBelowAutograd():
            *outputs, graph = overload(list(inputs), sizes, ctx.needs, *rest)
        ctx.save_for_backward(graph, *inputs)
        ctx.mark_non_differentiable(graph)
        return *outputs, graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Any, ...]:
        graph, *inputs = ctx.saved_tensors
        found = iter(run_backward([x.contiguous() for x in douts[:-1]], inputs, graph, ctx.needs))
        return None, None, *(next(found) if need else None for need in ctx.needs)
