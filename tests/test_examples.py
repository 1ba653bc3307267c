"""The example scripts: two ranks have the losses of one process."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState

from .pool import Pool, on_ranks
from .test_hf_parallelism import torchrun

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
TEXT = str(ROOT / "LICENSE")
# By script: the packages it needs beside transformers and accelerate, and its arguments.
EXAMPLES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "finetune.py": ((), ["--length", "257", "--accumulate", "2"]),
    "fsdp2.py": ((), ["--length", "257"]),
    "gemma3.py": ((), ["--documents", "3"]),
    "images.py": (("PIL",), []),
    "lora.py": (("peft",), ["--length", "257"]),
    "sft.py": (("trl", "datasets"), ["--length", "256"]),
}
ELSEWHERE = {
    "__init__.py",
    "bytelm.py",  # test_demo.py
    "grpo.py",  # test_hf_trl.py
    "quickstart.py",  # test_docs.py
    "two_hosts.py",  # below
}


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    workers = Pool(2)
    yield workers
    workers.close()


def losses(script: str, arguments: list[str]) -> list[float]:
    found: list[float] = runpy.run_path(str(ROOT / "examples" / script))["main"](arguments)
    return found


@on_ranks
def losses_of_ranks(group: ProcessGroup, script: str, arguments: list[str]) -> list[float]:
    with torchrun(group):
        if script == "fsdp2.py":
            PartialState(cpu=True)  # accelerate uses FSDP2 on accelerators only; the processes have none
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        found = losses(script, arguments)
        assert (AcceleratorState().distributed_type == DistributedType.FSDP) == (script == "fsdp2.py")
        return found


@pytest.mark.parametrize("script", EXAMPLES)
def test_example(two: Pool, tmp_path: Path, script: str) -> None:
    packages, arguments = EXAMPLES[script]
    for package in packages:
        pytest.importorskip(package)
    arguments = ["--text", TEXT, "--steps", "2", *arguments]
    if "--output" in (ROOT / "examples" / script).read_text():
        arguments += ["--output", str(tmp_path)]
    with torchrun(None):
        alone = losses(script, arguments)
    assert len(alone) == 2 and min(alone) > 0
    for together in two.run(2, losses_of_ranks, script, arguments, deadline_s=120):
        assert together == pytest.approx(alone, abs=5e-5)


def test_two_hosts() -> None:
    """One torchrun for each host, as the script describes it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script, arguments = "two_hosts.py", ["--text", TEXT, "--length", "257", "--steps", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    hosts = []
    for host in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}"]
        command += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command += [str(ROOT / "examples" / script), *arguments]
        hosts.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    try:
        with torchrun(None):
            alone = losses(script, arguments)
        ended = [host.communicate(timeout=180) for host in hosts]
    finally:
        for process in hosts:
            process.kill()
    assert [host.returncode for host in hosts] == [0, 0], ended
    (line,) = [line for line in ended[0][0].splitlines() if line.startswith('{"losses"')]
    assert json.loads(line)["losses"] == pytest.approx(alone, abs=5e-5)


def test_every_example_is_short_and_tested() -> None:
    files = {file.name: file for file in (ROOT / "examples").glob("*.py")}
    assert files.keys() == EXAMPLES.keys() | ELSEWHERE
    assert max(len(file.read_text().splitlines()) for file in files.values()) <= 80
