"""Start several ranks on this machine, and the errors and exit codes of the command line.

Every command also runs under torchrun. ``launch`` is for commands that start their own ranks. Compared with torchrun:

* it has a deadline;
* it shows one error message, that of the rank that failed first, and exits with its code;
* its ranks end when the launcher is killed (see ``follow_launcher``);
* its rendezvous store listens on a port that the operating system chooses, so several launches can run at a time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, NoReturn

from torch.distributed import TCPStore

FAILED = 1
BAD_OPTION = 2
TIMED_OUT = 124
INTERRUPTED = 130

_LAUNCHER = "SEQPAR_LAUNCHER"  # an environment variable of the ranks: the process id of the launcher
_GRACE_S = 3.0  # between SIGTERM and SIGKILL
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class CommandError(Exception):
    """An error that the user can fix. The command prints its message on stderr, without a traceback, and exits.

    Attributes:
        code: the exit code of the command.
    """

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
    """Print the error on stderr and exit with its code. If there are several ranks, the message names this rank."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    rank = f" (rank {os.environ['RANK']})" if several and "RANK" in os.environ else ""
    print(f"error{rank}: {error}", file=sys.stderr, flush=True)
    sys.exit(error.code)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(nproc: int) -> int:
    """The number of threads of each of ``nproc`` ranks on this machine, at which no two ranks compete for a core."""
    return max(1, cores() // nproc)


def loopback() -> str:
    """The name of the loopback network interface."""
    return "lo" if sys.platform.startswith("linux") else "lo0"


def under_launcher() -> bool:
    """Whether torchrun or ``launch`` started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    arguments: Sequence[str],
    nproc: int,
    deadline_s: float,
    *,
    prefix: Callable[[int], Sequence[str]] | None = None,
    environment: Callable[[int], Mapping[str, str]] | None = None,
) -> None:
    """Run ``python <arguments>`` as ``nproc`` ranks that communicate over the loopback interface.

    Only rank 0 writes to this terminal. The stdout of the other ranks is discarded, and stderr is kept for the error
    message.

    Args:
        arguments: arguments of the Python interpreter.
        nproc: number of ranks.
        deadline_s: seconds after which ranks that are still running are ended.
        prefix: returns the words to put before a rank's command, such as ``["ip", "netns", "exec", name]``.
        environment: returns a rank's environment variables that replace those of the launcher.

    Raises:
        CommandError: a rank failed, with the exit code and the last lines of stderr of that rank; or the deadline
            passed.
    """
    store = _local_store()
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(nproc)]
        try:
            for rank in range(nproc):
                command = [*(prefix(rank) if prefix else ()), sys.executable, *arguments]
                variables = _environment(rank, nproc, store.port) | dict(environment(rank) if environment else {})
                stdout = None if rank == 0 else subprocess.DEVNULL
                ranks.append(subprocess.Popen(command, env=variables, stdout=stdout, stderr=errors[rank]))
            _wait(ranks, errors, deadline_s)
        finally:
            _end(ranks)


def _local_store() -> TCPStore:
    """A store that only processes of this machine can reach, on a port that the operating system chooses."""
    # Without the listener, TCPStore would listen on all interfaces, and it has no password.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def follow_launcher() -> None:
    """Let the operating system kill this rank when its launcher ends, even by SIGKILL (Linux only)."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # the launcher ended before the call above
        sys.exit(FAILED)


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    """The environment variables of a rank: those that torchrun sets, and those that limit the rank to this machine's
    loopback interface and to its share of the cores."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher hosts the store; rank 0 must not start another
        "GLOO_SOCKET_IFNAME": loopback(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads_per_rank(nproc))),
        _LAUNCHER: str(os.getpid()),
    }


def _wait(ranks: Sequence[subprocess.Popen[bytes]], errors: Sequence[IO[bytes]], deadline_s: float) -> None:
    """Wait until all ranks have ended without an error.

    Raises:
        CommandError: a rank failed, or the deadline passed.
    """
    end = time.monotonic() + deadline_s
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes):  # a code is None while the rank runs, and 0 when it is done
            time.sleep(0.2)  # the failure of one rank makes others fail: wait for them, then choose whose error to show
            codes = [rank.poll() for rank in ranks]
            raise _first_error(codes, errors)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise CommandError(f"rank(s) {running} were still running after {deadline_s:.0f} s", TIMED_OUT)
        time.sleep(0.02)


def _first_error(codes: Sequence[int | None], errors: Sequence[IO[bytes]]) -> CommandError:
    """The error of the rank that most likely failed first.

    A rank that a signal has ended is chosen before a rank that raised an error. A rank whose stderr says that a peer
    closed the connection is chosen last, because the peer failed before it.
    """
    failed = [rank for rank, code in enumerate(codes) if code]
    stderr = {rank: _last_lines(errors[rank]) for rank in failed}
    rank = min(failed, key=lambda r: ((codes[r] or 0) > 0, "onnection closed by peer" in stderr[r], r))
    code = codes[rank] or FAILED
    if code < 0:  # minus the signal's number
        name = signal.Signals(-code).name
        hint = " (out of memory, perhaps)" if name == "SIGKILL" else ""
        return CommandError(f"rank {rank} was ended by {name}{hint}\n{stderr[rank]}".rstrip())
    last = stderr[rank].splitlines()[-1] if stderr[rank] else ""
    if last.startswith("error"):  # printed by exit_with: the message is enough
        return CommandError(last.split(": ", 1)[-1], code)
    return CommandError(f"rank {rank} failed:\n{stderr[rank]}", FAILED)


def _last_lines(file: IO[bytes], lines: int = 30) -> str:
    """The last lines of a file."""
    file.seek(0)
    return "\n".join(file.read().decode(errors="replace").strip().splitlines()[-lines:])


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that are still running, by SIGTERM and after a few seconds by SIGKILL."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    end = time.monotonic() + _GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
