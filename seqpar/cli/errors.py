"""Errors that a user of the command line can mend: a line on stderr and an exit code, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

FAILED = 1
BAD_OPTION = 2
TIMED_OUT = 124


class CommandError(Exception):
    """Ends the command with ``message`` on stderr and the exit code ``code``."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def bad_options() -> Iterator[None]:
    """What the package refuses inside the block was a bad option."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise CommandError(str(error), BAD_OPTION) from error
