"""tools/deaths.py, shortened: if a rank is killed, stops or raises, the errors of the others name it and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "some": """
        Case("ring", "handshake", "killed", 2),
        Case("hybrid", "forward", "stopped", 1),
        Case("ulysses", "backward", "raises", 2, shared_memory=True),
    """,
    "more": """
        Case("ring", "forward", "killed", 0, own_store=False),
        Case("ring x tp", "unshard", "killed", 3, shared_memory=True),
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("which", CASES)
def test_a_death_is_named(which: str) -> None:
    root = Path(__file__).parents[2]
    script = f"from tools.deaths import Case, show\nraise SystemExit(not show([{CASES[which]}], at_once=5))"
    process = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=240)
    assert process.returncode == 0, process.stdout + process.stderr
