"""Counts the memory that a computation uses on the CPU, where PyTorch does not count it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """In the block, counts the bytes of the live tensors that operators have returned.

    Attributes:
        peak: the largest number of bytes at any time.
        before: for each operator, the number of bytes when it was first called.
        largest: for each operator, the bytes of the largest tensor that it has returned.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.before: dict[str, int] = {}
        self.largest: dict[str, int] = {}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def now(self) -> int:
        """The number of bytes now."""
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func.overloadpacket) not in self.before:
            self.before[str(func.overloadpacket)] = self.now()
        if func.namespace == "seqpar":  # one operator for autograd and compilers, and many inside
            with self:
                return func.function(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        new = [x for x in tree_leaves(result) if isinstance(x, Tensor) and not self._counts(x)]
        if new:
            given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            new = [x for x in new if x.untyped_storage()._cdata not in given]
        for x in new:
            storage = x.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            name = str(func.overloadpacket)
            self.largest[name] = max(self.largest.get(name, 0), storage.nbytes())
        if new:
            self.peak = max(self.peak, self.now())
        return result

    def _counts(self, x: Tensor) -> bool:
        """Whether the memory of ``x`` is counted already."""
        held = self._alive.get(x.untyped_storage()._cdata)
        return held is not None and not held[0].expired()
