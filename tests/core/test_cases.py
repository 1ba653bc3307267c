"""``--case``: a failure prints a command that runs only the failed case."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ..cases import Batch
from ..pool import Pool

ROOT = Path(__file__).parents[2]
CASES = ["good one", "bad one", "bad", "it's good"]
# Cases that begin with "bad" fail; on the ranks "bad one" raises.
SAMPLE = """
from tests.cases import Batch
from tests.pool import on_ranks

CASES = ["good one", "bad one", "bad", "it's good"]

@on_ranks
def body(group, case, how):
    if how == "on ranks" and group.rank() == 1 and case == "bad one":
        raise ValueError("raised on a rank")
    return case

def verify(case, by_rank):
    print(f"ran {case}.")
    assert by_rank == [case] * len(by_rank)
    assert not case.startswith("bad"), f"{case} is wrong"

def test_here(batch):
    batch.check_here(CASES, lambda case: verify(case, []))

def test_on_ranks(batch):
    batch.check(2, body, CASES, verify, "on ranks")

def test_without_cases():
    print("ran without cases.")
"""


def verify_here(case: str) -> None:
    assert not case.startswith("bad"), f"{case} is wrong"


def test_a_failure_names_the_cases_and_their_commands() -> None:
    batch = Batch(Pool(), "tests/test_x.py::test_y[2-ring]")
    with pytest.raises(AssertionError) as raised:
        batch.check_here(CASES, verify_here)
    message = str(raised.value)
    assert message.startswith("2 of 4 cases failed\n\nbad one\nbad one is wrong")
    assert "  python -m pytest 'tests/test_x.py::test_y[2-ring]' --case 'bad one'\n" in message
    assert message.endswith("  python -m pytest 'tests/test_x.py::test_y[2-ring]' --case bad")


@pytest.mark.parametrize(
    ("wanted", "cases"), [("bad", ["bad"]), ("good", ["good one", "it's good"]), ("no such case", []), (None, CASES)]
)
def test_the_wanted_cases(wanted: str | None, cases: list[str]) -> None:
    """The case with exactly this id, or else the cases whose ids contain it."""
    batch, chosen = Batch(Pool(), "test_x", wanted), list[str]()
    batch.check_here(CASES, chosen.append)
    assert chosen == cases and batch.ran == len(cases)


def test_ids_are_unique() -> None:
    with pytest.raises(AssertionError, match=r"ids of more than one case: \['1'\]"):
        Batch(Pool(), "test_x").check_here([1, "1"], print)


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on the sample, with this package's options and fixtures."""
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-p", "tests.conftest", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def ran(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"ran (.*)\.\n", done.stdout)


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    return tmp_path


def commands(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    """The arguments of pytest in the commands that the failures print."""
    found = re.findall(r"(?m)^E? +python -m pytest (.*--case .*)$", done.stdout)
    return [shlex.split(line) for line in dict.fromkeys(found)]


@pytest.mark.slow
def test_the_printed_commands_run_the_failed_cases(sample: Path) -> None:
    done = run_pytest(sample, "test_sample.py")
    assert done.returncode == 1
    assert "2 of 4 cases failed" in done.stdout and "bad one is wrong" in done.stdout
    assert "raised on a rank" in done.stdout
    first, second, on_ranks = commands(done)
    assert first == ["test_sample.py::test_here", "--case", "bad one"]
    assert second == ["test_sample.py::test_here", "--case", "bad"]
    assert on_ranks == ["test_sample.py::test_on_ranks", "--case", "bad one"]
    alone = run_pytest(sample, second[0], *on_ranks[:1], *second[1:])
    assert ran(alone) == ["bad", "bad"] and alone.returncode == 1
    assert "1 of 1 cases failed" in alone.stdout and "2 failed" in alone.stdout


@pytest.mark.slow
def test_part_of_an_id_and_unknown_ids(sample: Path) -> None:
    good = run_pytest(sample, "test_sample.py", "-k", "not on_ranks", "--case", "good")
    assert ran(good) == ["good one", "it's good"] and good.returncode == 0
    unknown = run_pytest(sample, "test_sample.py", "-k", "not on_ranks", "--case", "no such case")
    assert not ran(unknown) and unknown.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "--case 'no such case': 0 cases ran" in unknown.stdout
