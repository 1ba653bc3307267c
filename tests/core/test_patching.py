"""How forwards of modules are replaced and restored, what is running in a thread, and what backward computes again."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from types import MethodType
from typing import Any
from weakref import ref

import accelerate.hooks
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqpar.patching.forwards import is_replaced, replace_forward, replaced_by, restore_forward
from seqpar.patching.running import Running

hooks: Any = pytest.importorskip("diffusers.hooks")


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, x: float, *, add: float = 0.0) -> float:
        return self.factor * x + add


def tripled(module: Any, forward: Callable[..., float], x: float, **kwargs: Any) -> float:
    assert isinstance(module, Doubling)
    return 3 * forward(x, **kwargs)


def plus_one(module: Any, forward: Callable[..., float], x: float, **kwargs: Any) -> float:
    return forward(x, **kwargs) + 1


def own(module: Any) -> None:
    """The module has a forward of its own, which sees the module that it is called on."""
    module.forward = MethodType(lambda self, x, add=0.0: 5 * self.factor * x + add, module)


def accelerates(module: Any) -> None:
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())


def diffusers_hook(module: Any) -> None:
    hooks.HookRegistry.check_if_exists_or_initialize(module).register_hook(hooks.ModelHook(), "h")


@pytest.mark.parametrize("before", [None, own, accelerates, diffusers_hook], ids=lambda f: getattr(f, "__name__", "-"))
def test_a_replaced_forward(before: Callable[[Any], None] | None) -> None:
    module: Any = Doubling()
    if before is not None:
        before(module)
    expected, attributes = module(1.0, add=1.0), set(vars(module))
    undo = replace_forward(module, "a", tripled)
    restore_plus_one = replace_forward(module, "b", plus_one)  # around the other
    assert [*inspect.signature(module.forward).parameters] == ["x", "add"]
    twin = copy.deepcopy(module)
    assert module(1.0, add=1.0) == 3 * expected + 1 == module.forward(1.0, add=1.0)
    calls = []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    module(1.0)
    handle.remove()
    assert calls == [1]
    undo()  # in any order
    undo()  # twice
    assert module(1.0, add=1.0) == expected + 1 and is_replaced(module, "b") and not is_replaced(module, "a")
    restore_plus_one()
    assert module(1.0, add=1.0) == expected and set(vars(module)) == attributes
    if before is not diffusers_hook:  # whose copies call the original
        twin.factor = 0.0  # a copy calls its own forward
        assert twin(1.0, add=1.0) == 4.0
        restore_forward("b", twin)
        restore_forward("a", twin)
        assert twin(1.0, add=1.0) == 1.0 and set(vars(twin)) == attributes


def test_hooks_that_come_later_stay() -> None:
    for hook in (accelerates, diffusers_hook):
        module: Any = Doubling()
        undo = replace_forward(module, "a", tripled)
        hook(module)
        assert replaced_by(module) is None and module(1.0) == 6.0
        undo()
        assert module(1.0) == 2.0


def test_what_replaced_a_forward_is_named() -> None:
    module: Any = Doubling()
    undo = replace_forward(module, "a", tripled)
    ours = module.forward

    def decorator(forward: Any) -> Any:
        @wraps(forward)  # with the names and the attributes of ours
        def decorated(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        return decorated

    def of_instance(self: Any, x: float) -> float:
        return x

    for theirs, name in (
        (MethodType(of_instance, module), "of_instance"),
        (partial(Doubling.forward, module), "Doubling.forward"),
        (decorator(ours), "decorated"),
        (MethodType(decorator(ours.__func__), module), "decorated"),
    ):
        module.forward = theirs
        assert is_replaced(module, "a") and name in str(replaced_by(module))
        for change in (undo, partial(replace_forward, module, "b", plus_one)):
            with pytest.raises(ValueError, match=rf"forward of Doubling that a has set was replaced by .*{name}"):
                change()
        assert module.forward is theirs
    module.forward = ours
    undo()
    assert "forward" not in vars(module)


def test_calls_are_replaced_too() -> None:
    module: Any = Doubling()
    module.register_forward_hook(lambda module, args, output: output + 1)
    undo = replace_forward(module, "a", tripled, "_call_impl")
    replace_forward(module, "a", tripled)
    assert module(1.0) == 3 * (3 * 2.0 + 1)  # the call is around the hooks
    undo()
    assert module(1.0) == 3 * 2.0 + 1


class Block(nn.Module):
    """Multiplies by what is running, when forward and when backward compute it."""

    def __init__(self, running: Running[float | None], reentrant: bool) -> None:
        super().__init__()
        self.running, self.seen = running, list[float | None]()
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=reentrant)

    def compute(self, x: Tensor) -> Tensor:
        self.seen.append(self.running.now)
        return torch.sin(x) * (self.running.now or 0.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self._gradient_checkpointing_func(self.compute, x)
        return result


@pytest.mark.parametrize("reentrant", [False, True])
def test_backward_computes_blocks_again_with_what_was_running(reentrant: bool) -> None:
    running: Running[float | None] = Running()
    blocks = [Block(running, reentrant) for _ in range(2)]
    originals = [block._gradient_checkpointing_func for block in blocks]
    with ExitStack() as undo:
        for _ in range(2):  # the second time does nothing
            running.recomputed(blocks, undo)
        x = torch.randn(3, dtype=torch.float64, requires_grad=True)
        with running(2.0):
            y = blocks[0](x)
            with running(5.0):
                y = blocks[1](y)
        assert running.now is None
        for other in (None, 7.0):  # in a thread where nothing or something else runs
            (expected,) = torch.autograd.grad((5 * torch.sin(2 * torch.sin(x))).sum(), x)
            x.grad = None

            def backward(other: float | None = other) -> None:
                with running(other):
                    y.sum().backward(retain_graph=not reentrant)
                    assert running.now == other

            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
            assert x.grad is not None and torch.equal(x.grad, expected)
            if reentrant:
                break
    assert {*blocks[0].seen} == {2.0} and {*blocks[1].seen} == {5.0} and len(blocks[0].seen) == (2 if reentrant else 3)
    assert [block._gradient_checkpointing_func for block in blocks] == originals


def test_a_function_that_replaced_ours_stays() -> None:
    running: Running[float | None] = Running()
    block = Block(running, False)
    with ExitStack() as undo:
        running.recomputed([block], undo)
        block._gradient_checkpointing_func = theirs = partial(checkpoint, use_reentrant=False)
        other = Block(running, False)
        running.recomputed([other], undo)
        alive = ref(other)
        del other
        gc.collect()
        assert alive() is None  # a copy of a model ends before the model is restored
    assert block._gradient_checkpointing_func is theirs


def test_what_is_running() -> None:
    """Each thread has its own stack, and a hook ends what its module has begun, not what another one has."""
    running: Running[str] = Running()
    found = []
    with running("outer"):
        thread = threading.Thread(target=lambda: found.append(running.now))
        thread.start()
        thread.join()
        with running("inner"):
            running.push("never ended", owner := object())
        assert running.now == "outer" and running.pop(owner) is None and running.now == "outer"
        running.push("module", owner)
        assert running.pop(owner) == "module"
    assert found == [None] and running.now is None
