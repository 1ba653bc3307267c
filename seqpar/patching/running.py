"""What is running in a thread, also while backward computes it again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

T = TypeVar("T")


class Running(threading.local, Generic[T]):
    """A stack of what is running in this thread: ``with running(x): ...``.

    Backward may run in another thread, where the stack is empty, and after the block: see ``recomputed``.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[T, object]] = []  # each with its owner

    @property
    def now(self) -> T | None:
        """The innermost value; None if there is none."""
        return self._stack[-1][0] if self._stack else None

    def push(self, x: T, owner: object) -> None:
        """Begin ``x``, until ``pop(owner)``: for the hooks before and after a module."""
        self._stack.append((x, owner))

    def pop(self, owner: object) -> T | None:
        """End what ``owner`` has begun last, and what has begun since, and return it; None if it has begun nothing."""
        for i in range(len(self._stack) - 1, -1, -1):
            x, begun_by = self._stack[i]
            if begun_by is owner:
                del self._stack[i:]
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

    def recomputed(
        self, module: nn.Module, undo: ExitStack, enter: Callable[[Any], AbstractContextManager[Any]] | None = None
    ) -> None:
        """Let the blocks that ``module`` computes again in backward run with the value that ran in forward.

        Gradient checkpointing of transformers and diffusers, and PyTorch's ``checkpoint_wrapper``, keep in an attribute
        of a module the function that computes a block again. It may have been set since the last call.

        Args:
            module: the module.
            undo: puts the function back.
            enter: the context with a value, by default this object.
        """
        name = "checkpoint_fn" if isinstance(module, CheckpointWrapper) else "_gradient_checkpointing_func"
        checkpoint = vars(module).get(name)
        if checkpoint is None or getattr(checkpoint, "_seqpar_running", None) is self:
            return

        def run(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            x = self.now

            def again(*args: Any, **kwargs: Any) -> Any:
                with nullcontext() if self.now is x else (enter or self)(x):  # type: ignore[arg-type]
                    return block(*args, **kwargs)

            return checkpoint(again, *args, **kwargs)

        def restore() -> None:
            if vars(module).get(name) is run:
                vars(module)[name] = checkpoint

        vars(run)["_seqpar_running"] = self
        vars(module)[name] = run
        undo.callback(restore)
