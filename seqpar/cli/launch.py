"""Starting several ranks on this machine: what torchrun does for one node, without its agent process.

The launcher hosts the ranks' rendezvous store, so that no port is guessed; it waits for all of them, brings down the
rest when one dies, and shows the error of the rank that failed first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO

from torch.distributed import TCPStore

from .errors import FAILED, TIMED_OUT, CommandError

_LAUNCHER = "SEQPAR_LAUNCHER"  # its process id, in the environment of the ranks
_GRACE_S = 3.0
_PR_SET_PDEATHSIG = 1


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(nproc: int) -> int:
    """Threads for each of ``nproc`` ranks on this machine: ranks that share cores slow each other down."""
    return max(1, cores() // nproc)


def under_launcher() -> bool:
    """Whether torchrun, or ``launch``, started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], nproc: int, deadline_s: float) -> None:
    """Run ``python <arguments>`` as ``nproc`` ranks that talk over the loopback interface.

    Rank 0 writes to this terminal; what the others print is dropped.

    Raises:
        CommandError: a rank failed (with its code and the end of its stderr), or the deadline passed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[subprocess.Popen[bytes]] = []
    with ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(nproc)]
        try:
            for rank in range(nproc):
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *arguments],
                        env=_environment(rank, nproc, store.port),
                        stdout=None if rank == 0 else subprocess.DEVNULL,
                        stderr=errors[rank],
                    )
                )
            _wait(ranks, errors, deadline_s)
        finally:
            _end(ranks)


def follow_launcher() -> None:
    """In a rank: die with the launcher, even when it is killed (Linux)."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it died before the line above
        sys.exit(FAILED)


def _environment(rank: int, nproc: int, port: int) -> dict[str, str]:
    threads = str(threads_per_rank(nproc))
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher hosts the store; rank 0 must not
        "GLOO_SOCKET_IFNAME": _loopback(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        _LAUNCHER: str(os.getpid()),
    }


def _loopback() -> str:
    return "lo" if sys.platform.startswith("linux") else "lo0"


def _wait(ranks: Sequence[subprocess.Popen[bytes]], errors: Sequence[IO[bytes]], deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes):  # neither running (None) nor done (0)
            time.sleep(0.2)  # peers of a dead rank fail as well: see who did before choosing whom to blame
            codes = [rank.poll() for rank in ranks]
            raise _blame(codes, errors)
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > end:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise CommandError(f"rank(s) {running} were still running after {deadline_s:.0f} s", TIMED_OUT)
        time.sleep(0.02)


def _blame(codes: Sequence[int | None], errors: Sequence[IO[bytes]]) -> CommandError:
    """The error of the rank that most likely failed first: killed, else without "connection closed" in its words."""
    failed = [rank for rank, code in enumerate(codes) if code]
    said = {rank: _end_of(errors[rank]) for rank in failed}
    rank = min(failed, key=lambda r: ((codes[r] or 0) > 0, "onnection closed by peer" in said[r], r))
    code = codes[rank] or FAILED
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory, perhaps)" if name == "SIGKILL" else ""
        return CommandError(f"rank {rank} was ended by {name}{hint}\n{said[rank]}".rstrip())
    last = said[rank].splitlines()[-1] if said[rank] else ""
    if last.startswith("error"):  # one of ours: no more than its message
        return CommandError(last.split(": ", 1)[-1], code)
    return CommandError(f"rank {rank} failed:\n{said[rank]}", FAILED)


def _end_of(file: IO[bytes], lines: int = 30) -> str:
    file.seek(0)
    return "\n".join(file.read().decode(errors="replace").strip().splitlines()[-lines:])


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run: ask, wait a little, insist."""
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
