"""What a call does: the handshakes that it makes, and the error that it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from seqpar.comm import handshake


@contextmanager
def counted_handshakes() -> Iterator[list[int]]:
    """Counts the handshakes of the block, in the list's only element."""
    count = [0]
    start = handshake._start

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return start(*args, **kwargs)

    with mock.patch.object(handshake, "_start", counting):
        yield count


def message_of(call: Callable[[], Any]) -> str:
    """The type and message of what ``call`` raises; "nothing" if it returns."""
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
