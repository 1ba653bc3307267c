"""What other packages put on a model: wrappers, replaced forwards, and the hooks of accelerate and diffusers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

# What a wrapper of a module inside of a model adds to its name.
_ADDED = re.compile(r"(^|(?<=\.))(_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)(\.|$)")
# The hooks of diffusers that move or cast weights, or leave out a computation of each token.
_TOKENWISE = {
    "GroupOffloadingHook",
    "LazyPrefetchGroupOffloadingHook",
    "LayerExecutionTrackerHook",
    "LayerwiseCastingHook",
    "PeftInputAutocastDisableHook",
    "AttentionProcessorSkipHook",
    "FeedForwardSkipHook",
    "TransformerBlockSkipHook",
}


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by name, without what wrappers add to names: the modules inside of wrappers, not the wrappers."""
    return {_ADDED.sub("", name).removesuffix("."): module for name, module in model.named_modules()}


def matching(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The modules whose name has the pattern, in which ``*`` stands for one part, and ``-1`` for the largest number."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+").replace(r"\-1", r"(\d+)"))
    modules = modules_of(model)
    numbers = {name: [*map(int, match.groups())] for name in modules if (match := wanted.fullmatch(name))}
    last = max(numbers.values(), default=[])
    return {name: modules[name] for name, found in numbers.items() if found == last}


def models_in(model: nn.Module) -> Iterator[nn.Module]:
    """The models of diffusers in ``model`` that are not part of another one."""
    if any(cls.__name__ == "ModelMixin" and cls.__module__.startswith("diffusers.") for cls in type(model).__mro__):
        yield model
    else:
        for child in model.children():
            yield from models_in(child)


def function_of(forward: Any) -> Any:
    """The function of a method, without the hooks, decorators and casts around it that say what they are around."""
    outer = None
    while forward is not outer:
        outer = inspect.unwrap(forward)
        forward = outer.func if isinstance(outer, partial) else getattr(outer, "__func__", outer)
    return forward


def name_of(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


class Wrapped:
    """A module whose forward is ``run(module, forward, *args, **kwargs)``, of which ``forward`` is the one before.

    Accelerate and diffusers put their hooks around a forward, and put the forward that they found back to remove them.
    ``run`` is therefore put inside of the hooks that are there already.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        place, key = _inner_slot(module)
        self.module, self._before = module, place.get(key)
        # A copy of the module calls the forward of the copy, in which the attribute below is copied too.
        name = f"_seqpar_{key}"
        if self._before is not None:
            vars(module)[name] = self._before

        def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return run(self, vars(self).get(name) or partial(type(self).forward, self), *args, **kwargs)

        vars(wrapped)["_seqpar_name"] = name
        self.forward = place[key] = MethodType(wrapped, module)

    def undo(self) -> None:
        place, key = next(slot for slot in _slots(self.module) if _is_ours(slot[0].get(slot[1])))
        vars(self.module).pop(self.forward.__func__._seqpar_name, None)  # type: ignore[attr-defined]
        if self._before is not None:
            place[key] = self._before
        elif key == "forward" and place is vars(self.module):
            del place[key]
        else:
            place[key] = MethodType(type(self.module).forward, self.module)


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the forward of a module may be, in hooks and in the module: dicts and keys."""
    own = vars(module)
    yield own, "_old_forward"  # accelerate's
    for hook in getattr(own.get("_diffusers_hook"), "_fn_refs", ()):
        yield vars(hook), "forward" if hook.original_forward is None else "original_forward"
    yield own, "forward"


def _inner_slot(module: nn.Module) -> tuple[dict[str, Any], str]:
    """Where the forward is that all hooks are around; a hook is a ``partial``."""
    *hooks, own = _slots(module)
    return next((slot for slot in hooks if not isinstance(slot[0].get(slot[1]), partial | None)), own)


def _is_ours(forward: Any) -> bool:
    return hasattr(getattr(forward, "__func__", None), "_seqpar_name")


def replaced_by(module: nn.Module) -> str | None:
    """What has replaced the forward of a ``Wrapped`` module since; None if nothing has."""
    if any(_is_ours(place.get(key)) for place, key in _slots(module)):
        return None
    return name_of(function_of(module.forward))


def checkpoint_functions(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that compute blocks again in backward, with the attribute that holds the function that does it."""
    for module in model.modules():
        name = "checkpoint_fn" if isinstance(module, CheckpointWrapper) else "_gradient_checkpointing_func"
        if vars(module).get(name) is not None:
            yield module, name


def check_hooks(model: Any) -> None:
    """Raise for hooks of diffusers that compare, keep or mix tokens, because a rank has only some of them."""
    for name, module in model.named_modules():
        for key, hook in getattr(vars(module).get("_diffusers_hook"), "hooks", {}).items():
            classes = [cls for cls in type(hook).__mro__ if cls.__module__.startswith("diffusers.")]
            known = [cls for cls in classes if cls.__name__ != "ModelHook"]
            if any(cls.__name__ in _TOKENWISE for cls in known) or not (known or hook._is_stateful):
                continue
            if getattr(model, "is_cache_enabled", False):
                todo = "call the model's disable_cache()"
            else:
                todo = (
                    f"remove it: diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model).remove_hook({key!r})"
                )
            raise ValueError(
                f"model: the hook {type(hook).__name__} on {name or 'the model'} compares, keeps or mixes tokens, of "
                f"which a rank has only some; {todo}"
            )


def skips_scores(module: nn.Module) -> bool:
    """Whether a hook of diffusers makes the output of an attention module its values, without scores."""
    hooks = getattr(vars(module).get("_diffusers_hook"), "hooks", {}).values()
    return any(getattr(hook, "skip_attention_scores", False) for hook in hooks)
