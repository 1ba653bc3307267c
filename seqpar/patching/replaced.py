"""Values that are set for the length of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any


@contextmanager
def replaced(target: object, **values: Any) -> Iterator[None]:
    """In the block, the attributes of ``target`` called like the keyword arguments have these ``values``."""
    own = {name: vars(target)[name] for name in values if name in vars(target)}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(target, name, own[name])
            elif name in vars(target):
                delattr(target, name)


_shared: dict[tuple[object, str], list[Any]] = {}  # the original, its replacement, and the number of blocks


@contextmanager
def replaced_in(owner: object, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """In the block, the attribute ``name`` of a module or class, or the code of a function, is ``make(original)``.

    Blocks may overlap, and need not end in the order in which they began. All of them share the first one's value.
    """
    entry = _shared.get((owner, name))
    if entry is None:
        original = _value(owner, name)
        entry = _shared[owner, name] = [original, make(original), 0]
        setattr(owner, name, entry[1])
    entry[2] += 1
    try:
        yield
    finally:
        entry[2] -= 1
        if not entry[2]:
            del _shared[owner, name]
            if _value(owner, name) is entry[1]:
                setattr(owner, name, entry[0])


def _value(owner: object, name: str) -> Any:
    return getattr(owner, name) if isinstance(owner, FunctionType) else vars(owner)[name]
