"""A persistent pool of worker processes, so that a multi-process test costs milliseconds and never hangs.

Eight processes, forked from a clean one, form a gloo group over the loopback interface, with a subgroup of the first
``n`` ranks for each ``n`` of ``WORLDS``. A function runs on the first ranks and its results come back by rank. Whatever
goes wrong (an exception, a dead process, a rank that does not answer in time) ends the pool with the ranks' own words;
the next run starts a fresh one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

WORLDS = (1, 2, 3, 4, 8)
_START_DEADLINE_S = 120.0
# After one rank has failed, the others get this long to answer: their words may be the more telling ones.
_GRACE_S = 3.0


class WorkerError(AssertionError):
    """What went wrong on which rank, with that rank's traceback or stack."""


class Pool:
    """``run`` is the whole of it. Processes start at the first ``run``."""

    def __init__(self, ranks: int = 8, deadline_s: float = 60.0, environment: dict[str, str] | None = None) -> None:
        self.ranks = ranks
        self.environment = environment or {}
        self.worlds = tuple(world for world in WORLDS if world <= ranks)
        self.deadline_s = deadline_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._stacks: list[Any] = []

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, deadline_s: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """``function(group, *args, **kwargs)`` on ranks ``0..world-1``; the results, by rank.

        Args:
            world: one of ``WORLDS``, not above the pool's ranks.
            function: a top-level function of a module that the workers can import. ``group`` is the process group
                of those ranks.
            deadline_s: for all ranks to answer, ``self.deadline_s`` by default.

        Raises:
            WorkerError: a rank raised, died, or did not answer in time.
        """
        if world not in self.worlds:
            raise ValueError(f"world={world}: the pool has groups of {self.worlds} ranks")
        if not self._processes:
            self._start()
        message = pickle.dumps((world, function, args, kwargs))
        for pipe in self._pipes[:world]:
            pipe.send_bytes(message)
        return self._collect(world, self.deadline_s if deadline_s is None else deadline_s)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for resource in (*self._pipes, *self._stacks):
            resource.close()
        self._processes, self._pipes, self._stacks = [], [], []

    def _start(self) -> None:
        # Forked from a clean process that has imported torch once: a start takes a second, not eight imports.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "seqpar"])
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with _environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=_loopback()):
            for rank in range(self.ranks):
                ours, theirs = context.Pipe()
                stack = tempfile.NamedTemporaryFile("w+", prefix=f"rank{rank}-")  # noqa: SIM115 (closed in close)
                process = context.Process(
                    target=_work,
                    args=(rank, self.worlds, store.port, theirs, stack.name, self.environment),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
                self._stacks.append(stack)
        self._store = store
        self._collect(self.ranks, _START_DEADLINE_S)

    def _collect(self, world: int, deadline_s: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + deadline_s
        while len(answers) < world and (left := end - time.monotonic()) > 0:
            open_pipes = {self._pipes[rank]: rank for rank in range(world) if rank not in answers}
            for pipe in wait(list(open_pipes), left):
                assert isinstance(pipe, Connection)
                rank = open_pipes[pipe]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self._processes[rank].join(1)
                    answers[rank] = False, f"the process ended with code {self._processes[rank].exitcode}"
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + _GRACE_S)
        if len(answers) == world and all(good for good, _ in answers.values()):
            return [answers[rank][1] for rank in range(world)]
        words = self._words(world, answers, deadline_s)
        self.close()
        raise WorkerError(words)

    def _words(self, world: int, answers: dict[int, tuple[bool, Any]], deadline_s: float) -> str:
        failed = {rank: said for rank, (good, said) in sorted(answers.items()) if not good}
        parts = [f"rank {rank} of {world}: {said}" for rank, said in failed.items()]
        silent = [rank for rank in range(world) if rank not in answers]
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        if silent:
            time.sleep(0.5)  # for the stacks to be written
        why = "did not answer after another failed" if failed else f"did not answer in {deadline_s:.0f} s"
        for rank in silent:
            parts.append(f"rank {rank} of {world}: {why}; it was here:\n{self._stacks[rank].read()}")
        return "\n".join(parts)


def _work(
    rank: int, worlds: Sequence[int], port: int, pipe: Connection, stack_file: str, environment: dict[str, str]
) -> None:
    """The life of a worker: join the groups, then run what comes."""
    # Here, not around its start: the process that workers are forked from is older than the second pool.
    os.environ.update(environment)
    stacks = open(stack_file, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=worlds[-1], timeout=timedelta(seconds=_START_DEADLINE_S)
        )
        groups = {world: dist.new_group(list(range(world))) for world in worlds}
    except Exception:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            world, function, args, kwargs = pickle.loads(message)
            answer = pickle.dumps((True, function(groups[world], *args, **kwargs)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _die_with_parent() -> None:
    """A worker that waits inside a collective does not notice that its parent ended; this thread does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _loopback() -> str:
    return "lo0" if os.uname().sysname == "Darwin" else "lo"


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for the processes started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
