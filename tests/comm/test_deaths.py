"""tools/deaths.py, shortened: if a rank is killed, stops or raises, the errors of the others name it and no other."""

from __future__ import annotations

import os
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from tools.deaths import Case, show

from ..pool import Pool

CASES = {
    "some": [
        Case("ring", "handshake", "killed", 2),
        Case("hybrid", "forward", "stopped", 1),
        Case("ulysses", "backward", "raises", 2, shared_memory=True, late=True),
        Case("all_gather", "backward", "killed", 2, late=True),
    ],
    "more": [
        Case("ring", "forward", "killed", 0, own_store=False),
        Case("ring x tp", "unshard", "killed", 3, shared_memory=True),
    ],
}


def run(which: str, out: Path) -> None:
    """Run the cases, with ``out`` as the standard output and the standard error."""
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(not show(CASES[which], at_once=len(CASES[which])))


@pytest.mark.slow
@pytest.mark.thorough(which=["more"])
@pytest.mark.parametrize("which", CASES)
def test_a_death_is_named(pool: Pool, which: str, tmp_path: Path) -> None:
    """In forks of the pool's fork server, which import nothing again."""
    process = get_context("forkserver").Process(target=run, args=(which, tmp_path / "out"))
    process.start()
    try:
        process.join(240)
    finally:
        process.kill()
    assert process.exitcode == 0, (tmp_path / "out").read_text()
