"""Replaces the ``forward`` of modules, or another method that ``nn.Module`` looks up in the instance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn

# Takes a module, its method without the wrapper, and the arguments of the call.
Wrapper = Callable[..., Any]
OwnedWrappers = tuple[tuple[str, Wrapper], ...]  # with their owners, the outermost last


def replace_forward(module: nn.Module, owner: str, run: Wrapper, name: str = "forward") -> Callable[[], None]:
    """Make ``module.forward(...)`` call ``run(module, forward, ...)``, and return what undoes it.

    ``forward`` is what it was before; a second run goes around the first one. The module's hooks, parameters and names
    do not change. A copy of the module is replaced in the same way. Accelerate and diffusers put their hooks around a
    forward, and put the forward that they found back to remove them: ``run`` goes inside of hooks that are there.

    ``owner`` is who replaces it, such as "seqpar.memory". ``name`` may be another method that is looked up in the
    instance: ``_call_impl``, which runs the hooks and the forward.
    """
    _refuse_replaced(module, name)
    _change(module, name, lambda runs: (*runs, (owner, run)))
    return partial(restore_forward, owner, module, name=name)


def restore_forward(owner: str, *modules: nn.Module, name: str = "forward") -> None:
    """Take away what ``owner`` has set by ``replace_forward``, in those modules where it has. What others set stays.

    Raises:
        ValueError: something has replaced one of the forwards since. Nothing has changed then.
    """
    changed = [module for module in modules if is_replaced(module, owner, name)]
    for module in changed:
        _refuse_replaced(module, name)
    for module in changed:
        _change(module, name, lambda runs: tuple(run for run in runs if run[0] != owner))


def is_replaced(module: nn.Module, owner: str, name: str = "forward") -> bool:
    """Whether ``owner`` has replaced the forward and not restored it."""
    return owner in vars(module).get(_kept(name), (None, ()))[1]


def _refuse_replaced(module: nn.Module, name: str) -> None:
    if by := replaced_by(module, name):
        owners = " and ".join(dict.fromkeys(vars(module)[_kept(name)][1]))
        raise ValueError(
            f"model: the {name} of {type(module).__name__} that {owners} has set was replaced by {by}; undo that first"
        )


def replaced_by(module: nn.Module, name: str = "forward") -> str | None:
    """What has replaced the forward since ``replace_forward``; None if nothing has."""
    place, key = _slot(module, name)
    if _kept(name) not in vars(module) or runs_of(place.get(key)):
        return None
    outer = inner = getattr(module, name)
    while inner is not None and not runs_of(inner):
        outer, inner = inner, _inside(inner)
    function = getattr(outer, "func", getattr(outer, "__func__", outer))
    if inner is None or not hasattr(function, "__code__"):
        return name_of(function)
    # A decorator around ours has taken its name. The code has its own.
    return f"{function.__globals__['__name__']}.{function.__code__.co_name}"


def function_of(forward: Any) -> Any:
    """The function of a method, without the hooks, decorators and casts around it that say what they are around."""
    while (inner := _inside(forward)) is not None:
        forward = inner
    return forward


def _inside(forward: Any) -> Any:
    """What a decorator, a partial or a bound method is around; None for a function."""
    wrapped = getattr(forward, "__wrapped__", None)
    if wrapped is None:
        wrapped = forward.func if isinstance(forward, partial) else getattr(forward, "__func__", None)
    return wrapped


def name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


def _kept(name: str) -> str:
    """The attribute of a module that holds the method of the instance before, or None, and the owners of the runs."""
    return f"_seqpar_{name.strip('_')}"


def _found(name: str) -> str:
    """The attribute of a module that holds the method of its class, for code that torch.compile traces."""
    return f"{_kept(name)}_of_class"


def find_in_class(module: nn.Module, name: str = "forward") -> Callable[[], None]:
    """Let compiled code call the method that the module's class has now, and return what undoes it.

    torch.compile cannot trace ``type(module).forward`` of some classes, such as diffusers' ``Attention``. Call this
    before each call of compiled code, which is compiled again if another package has replaced the method of the class.
    """
    vars(module)[_found(name)] = getattr(type(module), name)
    return partial(vars(module).pop, _found(name), None)


def _change(module: nn.Module, name: str, change: Callable[[OwnedWrappers], OwnedWrappers]) -> None:
    """Put a method with other runs where the method of the module is, or without runs, the one that was there."""
    place, key = _slot(module, name)
    kept, runs = _kept(name), change(runs_of(place.get(key)))
    before = vars(module)[kept][0] if kept in vars(module) else place.get(key)
    if runs:
        # A copy of the module copies the attribute, and so calls the method of the copy. It copies a bound method too.
        vars(module)[kept] = before, tuple(owner for owner, _ in runs)
        function = getattr(type(module), name) if before is None else getattr(before, "__func__", before)
        place[key] = MethodType(_method(kept, name, function, runs), module)
        return
    del vars(module)[kept]
    if before is not None or place is not vars(module) or key != name:  # a hook holds the forward that it is around
        place[key] = MethodType(getattr(type(module), name), module) if before is None else before
    else:
        del place[key]


def _method(kept: str, name: str, function: Any, runs: OwnedWrappers) -> Any:
    *inner, (_, outer) = runs
    found_name = _found(name)

    @wraps(function, updated=())
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = getattr(self, kept)[0]
        if call is None:
            # The class is asked in each call, because other packages replace the methods of classes.
            found = getattr(self, found_name, None) if torch.compiler.is_compiling() else None
            call = partial(found or getattr(type(self), name), self)
        for _, run in inner:
            call = partial(run, self, call)
        return outer(self, call, *args, **kwargs)

    vars(method)["_seqpar_runs"] = method, runs  # with the function itself, because decorators copy attributes
    return method


def runs_of(method: Any) -> OwnedWrappers:
    """The runs of a method that ``replace_forward`` has set; of any other one, none."""
    function = getattr(method, "__func__", method)
    of, runs = getattr(function, "_seqpar_runs", (None, ()))
    return runs if of is function else ()


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where our method is, in hooks or in the module, or else the one that all hooks are around: a dict and a key."""
    own, hooks = vars(module), list[tuple[dict[str, Any], str]]()
    if name == "forward":
        hooks.append((own, "_old_forward"))  # accelerate's
        for hook in getattr(own.get("_diffusers_hook"), "_fn_refs", ()):
            hooks.append((vars(hook), "forward" if hook.original_forward is None else "original_forward"))
    ours = [slot for slot in (*hooks, (own, name)) if runs_of(slot[0].get(slot[1]))]
    inner = [slot for slot in hooks if not isinstance(slot[0].get(slot[1]), partial | None)]  # a hook is a partial
    return (*ours, *inner, (own, name))[0]


class WithoutHooks(nn.Module):
    """Calls the original forward of ``module``, without the hooks of ``module``."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)
