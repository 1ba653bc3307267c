"""Many cases in one test, and ``pytest --case ID`` to run one of them.

A round trip to the worker processes takes longer than a small attention problem. A test therefore sends all its cases
in one ``Pool.run`` (``Batch.check``). The id of a case is its ``str()``. A failure prints the id of each case that
failed, and the command that runs only that case.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch.distributed import ProcessGroup

from .pool import Pool, on_ranks

Case = TypeVar("Case")
Result = TypeVar("Result")
MOST_REPORTED = 10


class CaseBody(Protocol):
    """What runs on each rank: a top-level function ``body(group, case, *args)``, marked ``@on_ranks``."""

    def __call__(self, group: ProcessGroup, case: Any, /, *args: Any) -> Any: ...


class Batch:
    """Runs the cases of one test. Tests get it from the fixture ``batch``.

    Args:
        pool: the worker processes.
        node_id: pytest's id of the test.
        wanted: the value of ``--case``. Only the case with this id runs. If no case has exactly this id, all cases run
            whose ids contain it.

    Attributes:
        ran: number of cases that ran.
    """

    def __init__(self, pool: Pool, node_id: str, wanted: str | None = None) -> None:
        self.pool, self.node_id, self.wanted = pool, node_id, wanted
        self.ran = 0

    def check(
        self,
        world: int,
        body: Callable[..., Result],
        cases: Sequence[Case],
        verify: Callable[[Case, list[Result]], None],
        *args: Any,
        shared_memory: bool = False,
    ) -> None:
        """Run ``body(group, case, *args)`` for every case on ``world`` ranks, then ``verify(case, results)`` here.

        Args:
            world: number of ranks.
            body: see ``CaseBody``.
            cases: values that can be pickled, with different ids.
            verify: raises an AssertionError if the results of a case, by rank, are wrong.
            args: further arguments of ``body``.
            shared_memory: see ``Pool.run``.

        Raises:
            AssertionError: for all cases that are wrong, with the commands that run each alone.
            WorkerError: ``body`` raised on some rank; the message names the case and the command.
        """
        cases = self._select(cases)
        if not cases:
            return
        named = [(case, self.command(case)) for case in cases]
        by_rank = self.pool.run(world, _run_cases, body, named, args, shared_memory=shared_memory)
        self._verify(cases, lambda index: verify(cases[index], [results[index] for results in by_rank]))

    def check_here(self, cases: Sequence[Case], verify: Callable[[Case], None]) -> None:
        """Run ``verify(case)`` for every case in this process."""
        cases = self._select(cases)
        self._verify(cases, lambda index: verify(cases[index]))

    def command(self, case: object) -> str:
        """The command that runs only this case."""
        return f"python -m pytest {shlex.quote(self.node_id)} --case {shlex.quote(str(case))}"

    def _select(self, cases: Sequence[Case]) -> list[Case]:
        """The cases that ``--case`` asks for; all without it."""
        twice = [case_id for case_id, count in Counter(map(str, cases)).items() if count > 1]
        assert not twice, f"ids of more than one case: {twice}"
        chosen = list(cases)
        if self.wanted is not None:
            exact = [case for case in cases if str(case) == self.wanted]
            chosen = exact or [case for case in cases if self.wanted in str(case)]
        self.ran += len(chosen)
        return chosen

    def _verify(self, cases: Sequence[Case], verify: Callable[[int], None]) -> None:
        failures: list[tuple[Case, AssertionError]] = []
        for index, case in enumerate(cases):
            try:
                verify(index)
            except AssertionError as error:
                failures.append((case, error))
        if not failures:
            return
        reports = [f"{case}\n{error}\nto run only this case:\n  {self.command(case)}" for case, error in failures]
        if len(failures) > MOST_REPORTED:
            reports[MOST_REPORTED:] = [f"... and {len(failures) - MOST_REPORTED} more"]
        title = f"{len(failures)} of {len(cases)} cases failed"
        raise AssertionError("\n\n".join([title, *reports])) from failures[0][1]


@on_ranks
def _run_cases(group: ProcessGroup, body: CaseBody, named: list[tuple[Any, str]], args: tuple[Any, ...]) -> list[Any]:
    """This rank's results of ``body``, by case."""
    results = []
    for case, command in named:
        try:
            results.append(body(group, case, *args))
        except Exception as error:
            raise RuntimeError(f"in case {case}; to run only this case:\n  {command}") from error
    return results
