"""Ranks that the command line starts: their results, how they fail, and that they end with their launcher."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import seqpar
from seqpar.cli.launch import CommandError, launch


def total(x: int) -> tuple[int, float]:
    mesh = seqpar.init_mesh(ring=-1, device_type="cpu")
    y = torch.tensor(float(x + dist.get_rank()))
    dist.all_reduce(y)
    return mesh.get_rank(), float(y)


def fail(how: str) -> None:
    rank = int(os.environ["RANK"])
    seqpar.init_mesh(ring=-1, device_type="cpu")
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stderr.write("a bad day\n")
        if how == "exits":
            sys.exit(3)
        raise CommandError("no such option") if how == "command" else ValueError("a bad day")
    dist.barrier()  # fails because rank 1 has ended


def sleep(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.slow
def test_results_by_rank() -> None:
    assert launch(total, 2, 5, deadline_s=240) == [(0, 11.0), (1, 11.0)]


@pytest.mark.slow
@pytest.mark.thorough(how=["raises", "command", "exits"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", r"(?s)^rank 1 failed:\nTraceback.*in fail\n.*ValueError: a bad day$"),
        ("command", r"^no such option$"),
        ("exits", r"^rank 1 failed:\na bad day$"),
        ("killed", r"^rank 1 was ended by SIGKILL \(out of memory, perhaps\)"),
    ],
)
def test_the_first_error_is_shown(how: str, message: str) -> None:
    with pytest.raises(CommandError, match=message) as error:
        launch(fail, 2, how, deadline_s=240)
    assert error.value.code == 1


@pytest.mark.slow
def test_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="the ranks were still running after 1 s") as error:
        launch(sleep, 2, str(tmp_path), deadline_s=1)
    assert error.value.code == 124


def launch_sleep(folder: str) -> None:
    launch(sleep, 2, folder, deadline_s=240)


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """Even if the launcher is killed, and can end nothing itself."""
    launcher = multiprocessing.get_context("forkserver").Process(target=launch_sleep, args=(str(tmp_path),))
    launcher.start()
    try:
        _until(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
        ranks = [int((tmp_path / rank).read_text()) for rank in "01"]
    finally:
        os.kill(launcher.pid or 0, signal.SIGKILL)
        launcher.join(60)
    _until(lambda: not any(_alive(pid) for pid in ranks))


def _until(condition: Any, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
