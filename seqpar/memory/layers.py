"""Activation checkpointing of layers, which can keep the results of attention, and offload what it keeps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ..patching.forwards import replace_forward
from ..patching.running import Running
from ..strategies.checkpointing import keep_attention
from .offload import Kept, copies_to_host
from .weights import CACHE_ARGUMENTS, OWNER, OriginalForward

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class Chain:
    """The order of the layers' calls: what the last called layer keeps."""

    def __init__(self) -> None:
        self._last: ref[Kept] | None = None

    def next(self, offload: bool) -> Kept:
        kept = Kept(offload, None if self._last is None else self._last())
        self._last = ref(kept)
        return kept


def checkpoint_layer(module: nn.Module, attention: bool, offload: bool, chain: Chain) -> None:
    """Recompute ``module`` in backward. Its input is kept. In place.

    Args:
        module: a layer.
        attention: whether the results of attention are kept too. They are not computed again.
        offload: whether what is kept is copied to the host until backward. Tensors on the CPU are not.
        chain: shared by the layers of a model.
    """

    def run(self: nn.Module, forward: OriginalForward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.training and getattr(self, "gradient_checkpointing", False):
            raise ValueError(
                f"memory: {type(self).__name__} has gradient checkpointing switched on, and would be recomputed twice; "
                "call model.activation_checkpointing_disable(), or leave checkpoint out of Memory"
            )
        for name in CACHE_ARGUMENTS:
            if kwargs.get(name) is not None:
                kwargs[name] = None  # a cache must not be written again in backward
        if offload:
            return _offloaded(chain, attention, forward, args, kwargs)
        if torch.compiler.is_compiling():
            options: dict[str, Any] = {"context_fn": keep_attention} if attention else {}
        else:
            options = {"context_fn": partial(_contexts, Results(Kept()), attention)}
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    replace_forward(module, OWNER, run)


@_disable_dynamo(recursive=False)  # the layer's own code is compiled
def _offloaded(
    chain: Chain, attention: bool, forward: OriginalForward, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    kept = chain.next(offload=True)

    def pack(x: Tensor) -> int | Tensor:
        return kept.put(x) if copies_to_host(x) and not isinstance(x, nn.Parameter) else x

    def unpack(x: int | Tensor) -> Tensor:
        return kept.get(x) if isinstance(x, int) else x

    context_fn = partial(_contexts, Results(kept), attention)
    with saved_tensors_hooks(pack, unpack):  # for the layer's input
        y = checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)
    kept.end()
    return y


class Results:
    """The results of the calls of attention in one call of a layer."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.calls: list[list[int]] = []  # the numbers of each call's results


def _contexts(results: Results, attention: bool) -> Contexts:
    return (_Keep(results), _Reuse(results)) if attention else (nullcontext(), nullcontext())


def contexts_of_part() -> Contexts:
    """Contexts for a part of a layer that is recomputed by itself, and that calls attention once.

    If the layer keeps the results of attention, the part reuses them too. PyTorch uses the contexts that were made in
    the layer's forward: when backward needs the part, it recomputes the layer, and then the part.
    """
    mode = _modes.now
    if not isinstance(mode, _Keep):
        return nullcontext(), nullcontext()
    return nullcontext(), _Reuse(mode.results, len(mode.results.calls))


def _is_attention(func: Any) -> bool:
    return func is torch.ops.seqpar.attention.default


class _Mode(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        _modes.push(self, self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _modes.pop(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]


_modes: Running[_Mode] = Running()


class _Keep(_Mode):
    """Keeps the results of attention."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if _is_attention(func):
            self.results.calls.append([self.results.kept.put(x) for x in results])
        return results


class _Reuse(_Mode):
    """Returns the results that were kept, from the call of number ``first`` on, instead of calling attention."""

    def __init__(self, results: Results, first: int = 0) -> None:
        super().__init__(results)
        self.first = self.next = first

    def __enter__(self) -> Any:
        self.next = self.first
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_attention(func):
            return func(*args, **(kwargs or {}))
        self.next += 1
        return [self.results.kept.get(number) for number in self.results.calls[self.next - 1]]
