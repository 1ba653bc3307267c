"""``--case``: a failure prints a command that runs only the failed case. The mark ``thorough``: which cases have it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..cases import Batch
from ..pool import Pool

CASES = ["good one", "bad one", "bad", "it's good"]
# Cases that begin with "bad" fail; on the ranks "bad one" raises.
SAMPLE = """
import pytest

from tests.pool import Pool, on_ranks

CASES = ["good one", "bad one", "bad", "it's good"]

@pytest.fixture(scope="session")
def pool():
    workers = Pool(2)
    yield workers
    workers.close()

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


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sample") / "test_sample.py"
    path.write_text(SAMPLE)
    return path


@dataclass
class Run:
    """One run of pytest on the sample, in this process, with this package's options and fixtures."""

    code: int
    output: str
    errors: str

    @property
    def cases(self) -> list[str]:
        """The ids of the cases that ran in this process."""
        return re.findall(r"ran (.*)\.\n", self.output)

    @property
    def commands(self) -> list[list[str]]:
        """The arguments of pytest in the commands that the failures print."""
        found = re.findall(r"(?m)^E? +python -m pytest (.*--case .*)$", self.output)
        return [shlex.split(line) for line in dict.fromkeys(found)]


@pytest.fixture
def run_pytest(sample: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    def run(*arguments: str) -> Run:
        monkeypatch.chdir(sample.parent)
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
        plugins = [word for name in ("no:cacheprovider", "no:faulthandler", "no:xdist", "tests.conftest")
                   for word in ("-p", name)]  # fmt: skip
        code = pytest.main(["-s", "--rootdir=.", *plugins, *arguments])
        return Run(int(code), *capsys.readouterr())

    return run


@pytest.mark.slow
def test_the_printed_commands_run_the_failed_cases(run_pytest: Callable[..., Run]) -> None:
    done = run_pytest("test_sample.py")
    assert done.code == 1
    assert "2 of 4 cases failed" in done.output and "bad one is wrong" in done.output
    assert "raised on a rank" in done.output
    first, second, on_ranks = done.commands
    assert first == ["test_sample.py::test_here", "--case", "bad one"]
    assert second == ["test_sample.py::test_here", "--case", "bad"]
    assert on_ranks == ["test_sample.py::test_on_ranks", "--case", "bad one"]
    alone = run_pytest(second[0], *on_ranks[:1], *second[1:])
    assert alone.cases == ["bad", "bad"] and alone.code == 1
    assert "1 of 1 cases failed" in alone.output and "2 failed" in alone.output


def test_part_of_an_id_and_unknown_ids(run_pytest: Callable[..., Run]) -> None:
    good = run_pytest("test_sample.py", "-k", "not on_ranks", "--case", "good")
    assert good.cases == ["good one", "it's good"] and good.code == 0
    unknown = run_pytest("test_sample.py", "-k", "not on_ranks", "--case", "no such case")
    assert not unknown.cases and unknown.code == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "--case 'no such case': 0 cases ran" in unknown.output


MARKED = """
import pytest

@pytest.mark.thorough(ranks=[3], how=["a"])
@pytest.mark.thorough(ranks=[4])
@pytest.mark.parametrize("how", ["a", "b"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_marked(ranks, how):
    print(f"ran {ranks} {how}.")

@pytest.mark.thorough
def test_whole():
    print("ran whole.")
"""


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("value", "[4]", "[4, 5]", r"thorough\(ranks=\[5\]\): no case has these values"),
        ("value_of_the_other_mark", "[3]", "[3, 5]", r"thorough\(ranks=\[5\]\): no case has these values"),
        ("parameter", "ranks=[4]", "world=[4]", r"thorough\(world=...\): it has the parameters .*ranks"),
        ("right", "", "", ""),
    ],
)
def test_which_cases_are_thorough(
    run_pytest: Callable[..., Run], sample: Path, name: str, old: str, new: str, message: str
) -> None:
    """The marked ones. A value or a parameter that does not exist is an error."""
    file = sample.with_name(f"test_marked_{name}.py")
    file.write_text(MARKED.replace(old, new))
    thorough, others = (run_pytest(file.name, "-m", which) for which in ("thorough", "not thorough"))
    if message:
        assert thorough.code == others.code == pytest.ExitCode.USAGE_ERROR
        assert re.search(f"{file.name}::test_marked: {message}", thorough.errors)
    else:
        assert thorough.cases == ["3 a", "4 a", "4 b", "whole"] and others.cases == ["2 a", "2 b", "3 b"]
