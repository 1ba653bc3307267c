"""The settings, options and fixtures of all tests."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Generator, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import settings

from .cases import Batch
from .pool import OwnPool, Pool
from .reference import MARGINS

# Hypothesis draws the same examples in every run, so that a failing test fails again. An example has no deadline,
# because the machine may be busy.
settings.register_profile("seqpar", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("seqpar")

# Until the fork server has been forked: OpenMP hangs in a fork of a process that has had its threads.
torch.set_num_threads(1)

_CASES_RAN = pytest.StashKey[int]()
# A test that takes longer than this, alone on one core, is marked slow.
_SLOW_S = 8.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--case", metavar="ID", help="in tests with many cases, run only the case with this id (or part of an id)"
    )
    parser.addoption(
        "--margins", action="store_true", help="print the largest error of each test as a share of its limit"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that the processes end at the same time.

    With ``--case``, deselect the tests that do not run cases.
    """
    _keep_thorough(items, whole_files=not any("::" in argument for argument in config.args))
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)
    if config.getoption("--case") is None:
        return
    with_cases = [item for item in items if "batch" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=[item for item in items if item not in with_cases])
    items[:] = with_cases


def _keep_thorough(items: list[pytest.Item], whole_files: bool) -> None:
    """Keep the mark ``thorough(ranks=[3, 4])`` for the cases in which ``ranks`` is 3 or 4.

    With several parameters, each must have one of its values. Without parameters it is kept for all cases.

    Raises:
        pytest.UsageError: the test has no such parameter, or no case has a value of the list.
    """
    unused: dict[tuple[str, str, int], list[Any]] = {}
    for item in items:
        test, kept = item.nodeid.partition("[")[0], False
        marks = [mark for mark in item.own_markers if mark.name == "thorough"]
        for mark in marks:
            params, matches = item.callspec.params if hasattr(item, "callspec") else {}, True
            for name, values in mark.kwargs.items():
                if name not in params:
                    raise pytest.UsageError(f"{test}: thorough({name}=...): it has the parameters {', '.join(params)}")
                left = unused.setdefault((test, name, id(mark)), list(values))
                left[:] = [value for value in left if value != params[name]]
                matches &= params[name] in values
            kept |= matches
        if not kept:
            item.own_markers[:] = [mark for mark in item.own_markers if mark not in marks]
    for (test, name, _), left in unused.items():
        if left and whole_files:
            raise pytest.UsageError(f"{test}: thorough({name}={left}): no case has these values")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Note how near the test's comparisons came to their limits, also of a test that fails."""
    MARGINS.take()
    try:
        return (yield)
    finally:
        item.user_properties.append(("nearest", MARGINS.take()))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the objects made by imports and collection out of garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With ``--case``, let the session fail if no test has such a case."""
    wanted = session.config.getoption("--case")
    if wanted is not None and not session.config.stash.get(_CASES_RAN, 0):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tests that ought to be marked slow. It is no failure, because the machine may have been busy."""
    seconds, marked = defaultdict[str, float](float), set[str]()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += report.duration
            marked |= {report.nodeid} if "slow" in report.keywords else set()
    for nodeid, duration in sorted(seconds.items(), key=lambda item: -item[1]):
        if duration > _SLOW_S and nodeid not in marked:
            terminalreporter.write_line(f"warning: {nodeid} took {duration:.0f} s and is not marked slow", yellow=True)
    if config.getoption("--margins"):
        calls = [x for x in chain.from_iterable(terminalreporter.stats.values()) if getattr(x, "when", "") == "call"]
        nearest = ((dict(x.user_properties)["nearest"], x.nodeid) for x in calls)
        for (share, what), nodeid in sorted(nearest, reverse=True):
            if share:
                terminalreporter.write_line(f"{share:.3f} of the limit: {nodeid}: {what}")
    wanted = config.getoption("--case")
    if wanted is not None:
        terminalreporter.write_line(f"--case {wanted!r}: {config.stash.get(_CASES_RAN, 0)} cases ran")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight worker processes, which the first ``pool.run`` starts."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(scope="module", autouse=True)
def _few_groups(pool: Pool) -> Iterator[None]:
    """After each file, end the workers if its tests have made many groups."""
    yield
    pool.close_if_many_groups()


@pytest.fixture(scope="module")
def own() -> Iterator[OwnPool]:
    """Four worker processes whose default group the tests of a file may replace."""
    made = OwnPool(4)
    yield made
    made.pool.close()


@pytest.fixture
def batch(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Batch]:
    """Runs many cases in one test. With ``--case`` it runs one of them."""
    made = Batch(pool, request.node.nodeid, request.config.getoption("--case"))
    yield made
    stash = request.config.stash
    stash[_CASES_RAN] = stash.get(_CASES_RAN, 0) + made.ran
