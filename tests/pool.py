"""A persistent pool of worker processes. A test on several ranks takes milliseconds and cannot hang.

The processes form a gloo group over the loopback interface, and a subgroup of the first ``n`` ranks for each smaller
``n`` in ``WORLDS``. ``Pool.run`` calls a function on the first ``n`` ranks and returns the results by rank. If a rank
raises an error, ends or misses the deadline, ``run`` ends all processes and raises a ``WorkerError`` with the traceback
or the stack of each rank. The next ``run`` starts new processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

import seqpar
from seqpar.comm.shared_memory import VARIABLE, _transports
from seqpar.patching.replaced import replaced

from .reference import MARGINS

WORLDS = (1, 2, 3, 4, 8)
# The threads of PyTorch's operators in each process. Another number changes the order of sums (see CONTRIBUTING.md).
THREADS = int(os.environ.get("TEST_THREADS", "1"))
_START_DEADLINE_S = 120.0
# After a rank has failed, the other ranks have so many seconds to report, because the cause may be an error on one of
# them.
_GRACE_S = 3.0
_MOST_GROUPS = 12
# What many tests import on the ranks, by a module that their files import.
_ALSO = {
    "seqpar.hf": "seqpar.hf",
    "datasets": "datasets",
    "diffusers": "diffusers.models.transformers",
    "accelerate": "deepspeed",  # accelerate imports it
    "tests.engines.engine": "deepspeed",
}
_PR_SET_PDEATHSIG = 1
_CONTINUE, _PAUSE = signal.SIGCONT, signal.SIGSTOP

Result = TypeVar("Result")
Body = TypeVar("Body", bound=Callable[..., Any])


def on_ranks(body: Body) -> Body:
    """Mark a function that runs in the worker processes, on each rank: ``body(group, *args, **kwargs)``.

    The decorator does nothing but tell the reader that the function runs in another process. Such a function must be at
    the top level of its module, and its arguments and result must be picklable.
    """
    return body


class WorkerError(AssertionError):
    """A rank raised an error, ended or missed the deadline. The message has the traceback or stack of each one."""


class _Answer(NamedTuple):
    """The answer of one rank: its result or the text of its error.

    Also the number of process groups that it has, and the comparison that came nearest to its limit.
    """

    ok: bool
    value: Any
    groups: int = 0
    nearest: tuple[float, str] = (0.0, "")


class Pool:
    """Worker processes that run functions of the tests. They are started by the first ``run``.

    Args:
        ranks: the number of processes.
        deadline_s: how many seconds ``run`` waits for the results. Only a rank that hangs takes so long, also on a busy
            machine.
        worlds: the numbers of ranks, below ``ranks``, that ``run`` can call a function on.
    """

    def __init__(self, ranks: int = 8, deadline_s: float = 480.0, worlds: Sequence[int] = WORLDS) -> None:
        _start_fork_server()
        self.ranks = ranks
        self.worlds = (*(world for world in worlds if world < ranks), ranks)
        self.deadline_s = deadline_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._stack_files: list[Any] = []
        self._store: dist.TCPStore | None = None
        self._groups = 0

    def run(
        self,
        world: int,
        body: Callable[..., Result],
        *args: Any,
        shared_memory: bool = False,
        **kwargs: Any,
    ) -> list[Result]:
        """Call ``body(group, *args, **kwargs)`` on ranks ``0..world-1`` and return the results by rank.

        Args:
            world: one of ``worlds``, less than the pool's ranks, or all of these.
            body: a top-level function that the workers can import, marked ``@on_ranks``. ``group`` is the process
                group of those ranks.
            args, kwargs: further arguments of ``body``.
            shared_memory: whether attention's messages are sent through shared memory. The default is gloo,
                which runs the operations that a cluster runs.

        Raises:
            WorkerError: a rank raised an error, ended or missed the deadline.
        """
        if world not in self.worlds:
            raise ValueError(f"world={world}: the pool has groups of {self.worlds} ranks")
        if not self._processes:
            self._start()
        message = pickle.dumps((world, shared_memory, body, args, kwargs))
        self._signal(world, _CONTINUE)
        for pipe in self._pipes[:world]:
            pipe.send_bytes(message)
        return self._collect(world, self.deadline_s)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for resource in (*self._pipes, *self._stack_files):
            resource.close()
        self._processes, self._pipes, self._stack_files, self._groups = [], [], [], 0

    def close_if_many_groups(self) -> None:
        """End the processes if they have many groups. Each group has a gloo thread that wakes up 100 times a second."""
        if self._groups > _MOST_GROUPS:
            self.close()

    def _start(self) -> None:
        # Each worker is a fork of the fork server, so that eight workers start in half a second.
        context = multiprocessing.get_context("forkserver")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.ranks):
            here, there = context.Pipe()
            stack_file = tempfile.NamedTemporaryFile("w+", prefix=f"rank{rank}-")  # noqa: SIM115 (see close)
            process = context.Process(
                target=_worker,
                args=(rank, self.worlds, self._store.port, there, stack_file.name),
                daemon=True,
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
            self._stack_files.append(stack_file)
        self._collect(self.ranks, _START_DEADLINE_S)

    def _collect(self, world: int, deadline_s: float) -> list[Any]:
        """The results of the first ``world`` ranks. Any failure closes the pool."""
        answers: dict[int, _Answer] = {}
        end = time.monotonic() + deadline_s
        while len(answers) < world and (left := end - time.monotonic()) > 0:
            rank_of = {self._pipes[rank]: rank for rank in range(world) if rank not in answers}
            for pipe in wait(list(rank_of), left):
                assert isinstance(pipe, Connection)
                rank = rank_of[pipe]
                try:
                    answers[rank] = _Answer(*pickle.loads(pipe.recv_bytes()))
                except EOFError:
                    self._processes[rank].join(1)
                    code, stack = self._processes[rank].exitcode, self._stack_files[rank].read()
                    answers[rank] = _Answer(False, f"the process ended with code {code}; {stack}")
                if not answers[rank].ok:
                    end = min(end, time.monotonic() + _GRACE_S)
        for answer in answers.values():
            MARGINS.add(*answer.nearest)
        if len(answers) == world and all(answer.ok for answer in answers.values()):
            self._groups = max(self._groups, *(answer.groups for answer in answers.values()))
            self._signal(world, _PAUSE)
            return [answers[rank].value for rank in range(world)]
        message = self._failures(world, answers, deadline_s)
        self.close()
        raise WorkerError(message)

    def _signal(self, world: int, number: int) -> None:
        """Pause or continue the first ``world`` processes: gloo's threads would wake up 100 times a second."""
        if sys.platform == "linux":  # on other systems a paused process would outlive its parent
            for process in self._processes[:world]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, number)

    def _failures(self, world: int, answers: dict[int, _Answer], deadline_s: float) -> str:
        """The errors of the ranks that failed, then the stacks of the ranks that have not answered."""
        errors = {rank: answer.value for rank, answer in sorted(answers.items()) if not answer.ok}
        lines = [f"rank {rank} of {world}: {error}" for rank, error in errors.items()]
        silent = [rank for rank in range(world) if rank not in answers]
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        if silent:
            time.sleep(0.5)  # faulthandler writes the stacks meanwhile
        why = "did not answer after another rank had failed" if errors else f"did not answer in {deadline_s:.0f} s"
        for rank in silent:
            lines.append(f"rank {rank} of {world}: {why}; its stack:\n{self._stack_files[rank].read()}")
        return "\n".join(lines)


@cache
def _start_fork_server() -> None:
    """Start multiprocessing's fork server as a fork of this process, which has imported the tests.

    A server that is a new Python process would import all of this again, which takes 10 seconds.
    """

    def fork(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]  # its lock is held, and this is no client
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        links = {descriptor: os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors}
        for name in os.listdir("/proc/self/fd"):  # the server ends when the last copy of its pipe's other end is closed
            with contextlib.suppress(OSError):
                if int(name) not in links and os.readlink(f"/proc/self/fd/{name}") in links.values():
                    os.close(int(name))
        try:
            exec(arguments[-1])
        finally:
            os._exit(0)

    also = [module for package, module in _ALSO.items() if package in sys.modules]
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch._inductor.compile_fx", *also])
    multiprocessing.resource_tracker.ensure_running()
    spawn = fork if sys.platform == "linux" else multiprocessing.util.spawnv_passfds
    with (
        _environment(OMP_NUM_THREADS=str(THREADS), GLOO_SOCKET_IFNAME=_loopback(), DS_ACCELERATOR="cpu"),
        replaced(multiprocessing.util, spawnv_passfds=spawn),
    ):
        multiprocessing.forkserver.ensure_running()
    torch.set_num_threads(THREADS)


class OwnPool:
    """Worker processes whose default group a test may replace.

    Attributes:
        pool: the worker processes.
        port: the port of a store for new default groups.
    """

    def __init__(self, ranks: int, worlds: Sequence[int] = WORLDS) -> None:
        self.pool = Pool(ranks, worlds=worlds)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = self._store.port


def start(port: int, name: str, rank: int, world: int, timeout_s: float = 30.0) -> ProcessGroup:
    """Replace the default group by a group of ``world`` ranks. All these ranks must call it.

    Args:
        port: the port of the store, ``OwnPool.port``.
        name: a name that no other group of this store has.
        rank: the rank of this process in the new group.
        world: the number of ranks.
        timeout_s: how many seconds an operation of the new group may take, once the group has been made. gloo's
            messages keep the timeout under which their communicator was made.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    assert dist.group.WORLD is not None
    limit_waits(timeout_s)
    return dist.group.WORLD


def limit_waits(timeout_s: float) -> None:
    """Let collectives, and messages in shared memory, take so many seconds. The groups exist by now."""
    timeout = timedelta(seconds=timeout_s)
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in dist.distributed_c10d._world.pg_map:
        set_timeout(timeout, group)
    for transport in _transports:
        transport._timeout = timeout


@contextlib.contextmanager
def may_have_children() -> Iterator[None]:
    """In the block, this worker may start the workers of a data loader. Daemon processes may not do that otherwise."""
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before, config["daemon"] = config.get("daemon"), False
    try:
        # A loader that the garbage collector ends cannot tell its workers, and waits for each so long (5 s by default)
        # before it ends them.
        torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
        yield
    finally:
        config["daemon"] = before


def at_once(
    world: int,
    calls: Sequence[Callable[[ProcessGroup], Result]],
    timeout_s: float = 30.0,
    shared_memory: bool = False,
) -> list[list[Result]]:
    """Make several calls at the same time, each in worker processes of its own, because most of them wait.

    Args:
        world: the number of ranks of a call.
        calls: functions of a new default group, marked ``@on_ranks``.
        timeout_s: as in ``start``.
        shared_memory: as in ``Pool.run``.

    Returns:
        The results of each call by rank.
    """
    pools = [OwnPool(world, worlds=()) for _ in calls]
    try:
        with ThreadPoolExecutor(len(pools)) as threads:
            runs = [
                threads.submit(
                    own.pool.run, world, _in_new_group, own.port, call, timeout_s, shared_memory=shared_memory
                )
                for own, call in zip(pools, calls, strict=True)
            ]
            return [run.result() for run in runs]
    finally:
        for own in pools:
            own.pool.close()


@contextlib.contextmanager
def meanwhile(
    request: pytest.FixtureRequest, fixture: str, function: Callable[[], Result]
) -> Iterator[Callable[[], Result]]:
    """Call a function that waits most of the time, such as ``at_once``, while other tests run.

    Args:
        request: of a fixture with the scope of a file.
        fixture: the function is called if a test of the session has this fixture.
        function: what is called, in a thread.

    Yields:
        A function that returns the result.
    """
    is_needed = any(fixture in getattr(item, "fixturenames", ()) for item in request.session.items)
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(function) if is_needed else Future[Result]()
        yield run.result


@on_ranks
def _in_new_group(group: ProcessGroup, port: int, call: Callable[[ProcessGroup], Result], timeout_s: float) -> Result:
    return call(start(port, "the call", group.rank(), group.size(), timeout_s))


@cache
def mesh_of(dp: int, ring: int, ulysses: int, tp: int) -> DeviceMesh:
    """A mesh over all workers of the pool, made once in each worker."""
    return seqpar.init_mesh(dp=dp, ring=ring, ulysses=ulysses, tp=tp, device_type="cpu")


def _worker(rank: int, worlds: Sequence[int], port: int, pipe: Connection, stack_file: str) -> None:
    """The main function of a worker process. It makes the groups, and then runs functions until the pipe is closed."""
    stacks = open(stack_file, "w")  # noqa: SIM115 (it is open until the process ends)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=stacks)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if sys.platform == "linux":  # this also ends a paused process, when the fork server ends together with the tests
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(THREADS)
    gc.freeze()  # leave the objects made by imports out of garbage collection, and collect less often
    gc.set_threshold(10_000)
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
            world, shared_memory, body, args, kwargs = pickle.loads(message)
            os.environ[VARIABLE] = str(int(shared_memory))
            MARGINS.take()
            result = body(groups[world], *args, **kwargs)
            answer = pickle.dumps((True, result, dist.get_pg_count(), MARGINS.take()))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _die_with_parent() -> None:
    """End this process when its parent ends. A worker that is blocked in a collective would not notice that."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _loopback() -> str:
    """The name of the loopback interface."""
    return "lo0" if os.uname().sysname == "Darwin" else "lo"


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables for the processes that the block starts."""
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
