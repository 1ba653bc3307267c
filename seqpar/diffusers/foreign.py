"""What other packages put on a model: wrappers, and the hooks of diffusers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

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
