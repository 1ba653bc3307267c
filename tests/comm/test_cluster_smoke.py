"""benchmarks/cluster_smoke.py, which checks a cluster, runs over gloo from a bare checkout and finds what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cluster_smoke.py"
# Without ``site``, packages that were installed from this checkout are not found.
BARE = [sys.executable, "-S"]
# Imports torch once, and forks a process for each rank, which runs the script. Its exit code is that of all ranks.
FORK = """
import os, runpy, sys
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp

ranks = []
for rank in range(int(os.environ["WORLD_SIZE"])):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        del sys.argv[0]
        {change}
        runpy.run_path(sys.argv[0], run_name="__main__")
codes = {{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks}}
sys.exit(codes.pop() if len(codes) == 1 else f"exit codes {{codes}}")
"""
# A strategy whose gradient of v is wrong by a thousandth.
BROKEN = """
        def wrong(outputs, inputs, *args, real=torch.autograd.grad):
            grads = real(outputs, inputs, *args)
            return (*grads[:-1], 1.001 * grads[-1]) if grads[-1].dtype == torch.float32 else grads
        torch.autograd.grad = wrong
"""


def run(ranks: int, folder: Path, change: str = "", only: str = "") -> tuple[int, dict[str, str]]:
    """The exit code of the ranks, and the report: what each check found, with its verdict."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(torch.__file__).parents[1]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    options = ["--device", "cpu", "--small", "--masks", "10", "--timeout", "3", "--deadline", "240", "--out", "."]
    command = [*BARE, "-c", FORK.format(change=change), str(SCRIPT), *options, "--only", only]
    process = subprocess.Popen(command, env=environment, cwd=folder, start_new_session=True)
    try:
        code = process.wait(280)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    report = json.loads((folder / "cluster-smoke.json").read_text())
    assert "nccl" in report and (folder / "cluster-smoke.txt").read_text().count("\n") > len(report["checks"])
    return code, {check["name"]: f"{check['ok']}: {check['what']}" for check in report["checks"]}


@pytest.mark.slow
def test_a_right_cluster(tmp_path: Path) -> None:
    code, checks = run(2, tmp_path)
    assert code == 0 and len(checks) == 15, checks
    assert {name for name, what in checks.items() if not what.startswith("True")} == {"no waiting for the GPU"}
    assert checks["a rank is killed"].startswith("True: the rank after ")


@pytest.mark.slow
def test_wrong_gradients_are_reported(tmp_path: Path) -> None:
    code, checks = run(2, tmp_path, BROKEN, only="ring")
    assert code == 1
    assert checks["ring"].startswith("False: rank(s) [0, 1]: AssertionError: relative error 1.0e-03")
