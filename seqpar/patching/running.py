"""What is running in a thread, also while backward computes it again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Generic, TypeVar
from weakref import ref

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

T = TypeVar("T")
Enter = Callable[[Any], AbstractContextManager[Any]]


class Running(threading.local, Generic[T]):
    """A stack of what is running in this thread: ``with running(x): ...``.

    Backward may run in another thread, where the stack is empty, and after the block: see ``recomputed``.

    Attributes:
        now: the innermost value; None if there is none. Read only.
    """

    def __init__(self) -> None:
        self.now: T | None = None  # no property, because it is read in every layer
        self._stack: list[tuple[T, object]] = []  # each with its owner

    def push(self, x: T, owner: object) -> None:
        """Begin ``x``, until ``pop(owner)``: for the hooks before and after a module."""
        self._stack.append((x, owner))
        self.now = x

    def pop(self, owner: object) -> T | None:
        """End what ``owner`` has begun last, and what has begun since, and return it; None if it has begun nothing."""
        for i in range(len(self._stack) - 1, -1, -1):
            x, begun_by = self._stack[i]
            if begun_by is owner:
                del self._stack[i:]
                self.now = self._stack[-1][0] if self._stack else None
                return x
        return None

    @contextmanager
    def __call__(self, x: T) -> Iterator[None]:
        owner = object()
        self.push(x, owner)
        try:
            yield
        finally:
            self.pop(owner)

    def recomputed(self, modules: Iterable[nn.Module], undo: ExitStack, enter: Enter | None = None) -> None:
        """Let the blocks that ``modules`` compute again in backward run in ``enter(x)``, by default in ``self(x)``.

        ``x`` is what ran in forward. Gradient checkpointing of transformers and diffusers, and PyTorch's
        ``checkpoint_wrapper``, keep in an attribute of a module the function that computes a block again. It may have
        been set since the last call. ``undo`` puts it back.
        """
        for module in modules:
            name = "checkpoint_fn" if isinstance(module, CheckpointWrapper) else "_gradient_checkpointing_func"
            checkpoint = vars(module).get(name)
            if checkpoint is not None and getattr(checkpoint, "_seqpar_running", None) is not self:
                vars(module)[name] = run = self._entering(checkpoint, enter or self)
                undo.callback(_restore, ref(module), name, run, checkpoint)  # weakly: a copy may end before

    def _entering(self, checkpoint: Callable[..., Any], enter: Enter) -> Any:
        def run(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            x = self.now

            def again(*args: Any, **kwargs: Any) -> Any:
                with nullcontext() if self.now is x else enter(x):
                    return block(*args, **kwargs)

            return checkpoint(again, *args, **kwargs)

        vars(run)["_seqpar_running"] = self
        return run


def _restore(module: ref[nn.Module], name: str, ours: Any, before: Any) -> None:
    if (alive := module()) is not None and vars(alive).get(name) is ours:
        vars(alive)[name] = before
