"""Start ranks on this machine with torch's launcher, and the errors and exit codes of the command line.

Every command also runs under torchrun. ``launch`` is for commands that start their own ranks.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..ranks.mesh import init_mesh

FAILED = 1
BAD_OPTION = 2
TIMED_OUT = 124
INTERRUPTED = 130

_GRACE_S = 1.0
_STDERR_LINES = 30  # of a rank that ended without an exception

T = TypeVar("T")


class CommandError(Exception):
    """An error that the user can fix: the command prints it on stderr without a traceback, and exits with ``code``."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def bad_options() -> Iterator[None]:
    """Turn a TypeError or ValueError raised in the block into a CommandError with the exit code for a bad option."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise CommandError(str(error), BAD_OPTION) from error


def exit_with(error: CommandError) -> NoReturn:
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    rank = f" (rank {os.environ['RANK']})" if several and "RANK" in os.environ else ""
    print(f"error{rank}: {error}", file=sys.stderr, flush=True)
    sys.exit(error.code)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(nproc: int) -> int:
    """The threads of each of ``nproc`` ranks on this machine, so that no two ranks compete for a core."""
    return max(1, cores() // nproc)


def under_launcher() -> bool:
    """Whether torchrun started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def this_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def join(timeout: timedelta | None = None, device: str = "auto") -> torch.device:
    """Make the default group of the ranks that were started, and return this rank's device.

    The device is a GPU if this host has one for each of its ranks, and ``device`` is "auto" or "cuda".

    Raises:
        CommandError: ``device`` is "cuda", but there are fewer GPUs than ranks.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda = device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    if device == "cuda" and not cuda:
        raise CommandError(
            f"device='cuda': {torch.cuda.device_count()} GPU(s) for {local_ranks} rank(s); use --device cpu", BAD_OPTION
        )
    init_mesh(ring=-1, device_type="cuda" if cuda else "cpu", timeout=timeout)
    return this_device() if cuda else torch.device("cpu")


def launch(function: Callable[..., T], nproc: int, *arguments: Any, deadline_s: float) -> list[T]:
    """Call ``function(*arguments)`` on ``nproc`` new ranks, which communicate over the loopback interface.

    The ranks are forks of one process that has imported the function's module. They end when this process ends, even if
    it is killed. Only rank 0 writes to this terminal.

    Args:
        function: a function at the top level of a module.
        nproc: number of ranks.
        arguments: picklable.
        deadline_s: seconds after which ranks that are still running are ended.

    Returns:
        What the function returns, by rank.

    Raises:
        CommandError: a rank failed, with the traceback of the rank that failed first; or the deadline passed.
    """
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # the error below is shown instead
    multiprocessing.set_forkserver_preload([function.__module__, "torch._dynamo"])
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id="seqpar",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",  # a port that the operating system chooses
            rdzv_configs={"is_host": True},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.02,
            start_method="forkserver",
            signals_to_handle="SIGTERM",  # SIGINT remains a KeyboardInterrupt
            logs_specs=DefaultLogsSpecs(folder, redirects=Std.ERR, local_ranks_filter={0}),
        )
        try:
            by_rank = elastic_launch(config, _run)(function, nproc, arguments, deadline_s)
        except ChildFailedError as error:
            raise _first_error(error, Path(folder), deadline_s) from None
    return [by_rank[rank] for rank in range(nproc)]


def _run(function: Callable[..., T], nproc: int, arguments: tuple[Any, ...], deadline_s: float) -> T:
    threading.Thread(target=_follow_launcher, args=(deadline_s,), daemon=True).start()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or threads_per_rank(nproc)))
    try:
        return function(*arguments)
    except Exception:
        time.sleep(_GRACE_S)  # if a signal has ended another rank, which caused this, the launcher sees that rank first
        raise


def _follow_launcher(deadline_s: float) -> None:
    """End this rank when its launcher has ended or the deadline has passed."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join(deadline_s)
    os._exit(TIMED_OUT if launcher.is_alive() else FAILED)


def _first_error(failed: ChildFailedError, folder: Path, deadline_s: float) -> CommandError:
    """The error of the rank that failed first. The failure of one rank makes others fail."""
    rank, failure = failed.get_first_failure()
    if failure.exitcode == TIMED_OUT:
        return CommandError(f"the ranks were still running after {deadline_s:.0f} s", TIMED_OUT)
    errors = sorted(folder.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns)
    if failure.exitcode < 0 or not errors:  # ended by a signal, or by sys.exit
        hint = " (out of memory, perhaps)" if failure.signal_name() == "SIGKILL" else ""
        how = f"was ended by {failure.signal_name()}{hint}" if failure.exitcode < 0 else "failed:"
        stderr = "".join(file.read_text(errors="replace") for file in folder.rglob(f"{rank}/stderr.log"))
        return CommandError("\n".join([f"rank {rank} {how}", *stderr.strip().splitlines()[-_STDERR_LINES:]]))
    error = json.loads(errors[0].read_text())["message"]
    name, _, message = error["message"].partition(": ")
    if name == CommandError.__name__:
        return CommandError(message)
    return CommandError(f"rank {errors[0].parent.name} failed:\n{error['extraInfo']['py_callstack'].strip()}")
