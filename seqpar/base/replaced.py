"""Values that are set for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
