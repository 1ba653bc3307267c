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

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cluster_smoke.py"
# Without ``site``, packages that were installed from this checkout are not found.
BARE = [sys.executable, "-S"]
# Imports torch, seqpar and what attention's first call needs once, and forks a process for each rank of each job, which
# runs the script. Prints the exit codes of each job.
FORK = """
import json, os, runpy, sys
import fsspec, torch
import torch._dynamo, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp

script, *options = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
import checkout


def wrong(outputs, inputs, *args, real=torch.autograd.grad):
    grads = real(outputs, inputs, *args)
    return (*grads[:-1], 1.001 * grads[-1]) if grads[-1].dtype == torch.float32 else grads


jobs = json.loads(os.environ["JOBS"])
ranks = {}
for number, (port, folder, broken, only) in enumerate(jobs):
    for rank in range(2):
        if pid := os.fork():
            ranks[pid] = number
            continue
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
        os.chdir(folder)
        sys.argv = [script, *options, "--only", only]
        if broken:
            torch.autograd.grad = wrong
        runpy.run_path(script, run_name="__main__")
codes = [set() for _ in jobs]
for pid, number in ranks.items():
    codes[number].add(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps([[*of_job] for of_job in codes]))
"""
Jobs = dict[str, tuple[list[int], dict[str, str]]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """For each job, the exit codes of its ranks, and the report: what each check found, with its verdict.

    In the broken job, the gradient of v is wrong by a thousandth. The jobs run at the same time.
    """
    folders = {name: tmp_path_factory.mktemp(name) for name in ("right", "broken")}
    stores = {name: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for name in folders}
    only = {"right": "", "broken": "ring"}
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(torch.__file__).parents[1]),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "JOBS": json.dumps([[stores[x].port, str(folders[x]), x == "broken", only[x]] for x in folders]),
    }
    options = ["--device", "cpu", "--small", "--masks", "10", "--timeout", "3", "--deadline", "240", "--out", "."]
    process = subprocess.Popen(
        [*BARE, "-c", FORK, str(SCRIPT), *options], env=environment, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=280)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    results: Jobs = {}
    for (name, folder), codes in zip(folders.items(), json.loads(printed.splitlines()[-1]), strict=True):
        report = json.loads((folder / "cluster-smoke.json").read_text())
        assert "nccl" in report and (folder / "cluster-smoke.txt").read_text().count("\n") > len(report["checks"])
        results[name] = codes, {check["name"]: f"{check['ok']}: {check['what']}" for check in report["checks"]}
    return results


def test_a_right_cluster(jobs: Jobs) -> None:
    codes, checks = jobs["right"]
    assert codes == [0] and len(checks) == 18, checks
    left_out = {name for name, what in checks.items() if not what.startswith("True")}
    assert left_out == {"no waiting for the GPU", "messages beside kernels"}
    assert checks["a rank is killed"].startswith("True: the rank after ")


def test_wrong_gradients_are_reported(jobs: Jobs) -> None:
    codes, checks = jobs["broken"]
    assert codes == [1]
    assert checks["ring"].startswith("False: rank(s) [0, 1]: AssertionError: relative error 1.0e-03")
