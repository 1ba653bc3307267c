"""Runs the command line in this process."""

from __future__ import annotations

import pytest

from seqpar.cli import main


def exit_code(*arguments: str) -> int:
    """The exit code of ``seqpar <arguments>``."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    return int(end.value.code or 0)
