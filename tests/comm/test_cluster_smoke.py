"""benchmarks/cluster_smoke.py, which checks a cluster, runs over gloo from a bare checkout and finds what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cluster_smoke.py"
# Without ``site``, packages that were installed from this checkout are not found.
BARE = [sys.executable, "-S"]
# A strategy whose gradient of v is wrong by a thousandth.
BROKEN = """
import runpy, sys, torch
sys.argv, path = sys.argv[1:], sys.argv[1]
real = torch.autograd.grad
def wrong(outputs, inputs, *args):
    grads = real(outputs, inputs, *args)
    return (*grads[:-1], 1.001 * grads[-1]) if grads[-1].dtype == torch.float32 else grads
torch.autograd.grad = wrong
runpy.run_path(path, run_name="__main__")
"""


def run(ranks: int, folder: Path, *command: str, only: str = "") -> tuple[list[int], dict[str, str]]:
    """The exit codes of the ranks, and the report: what each check found, with its verdict."""
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
    options += ["--only", only]
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen([*BARE, *command, str(SCRIPT), *options], env=environment, cwd=folder))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        codes = [process.wait(280) for process in processes]
    report = json.loads((folder / "cluster-smoke.json").read_text())
    assert "nccl" in report and (folder / "cluster-smoke.txt").read_text().count("\n") > len(report["checks"])
    return codes, {check["name"]: f"{check['ok']}: {check['what']}" for check in report["checks"]}


@pytest.mark.slow
def test_a_right_cluster(tmp_path: Path) -> None:
    codes, checks = run(2, tmp_path)
    assert codes == [0, 0] and len(checks) == 15, checks
    assert {name for name, what in checks.items() if not what.startswith("True")} == {"no waiting for the GPU"}
    assert checks["a rank is killed"].startswith("True: the rank after ")


@pytest.mark.slow
def test_wrong_gradients_are_reported(tmp_path: Path) -> None:
    codes, checks = run(2, tmp_path, "-c", BROKEN, only="ring")
    assert codes == [1, 1]
    assert checks["ring"].startswith("False: rank(s) [0, 1]: AssertionError: relative error 1.0e-03")
