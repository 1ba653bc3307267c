"""A rank that raises an error ends soon, even while it waits for a message that no other rank will send."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

# Between the error and the end of the process, on a busy machine. It takes two to four seconds otherwise.
_END_S = 240
# The flush of an NCCL group waits for all its messages. gloo's does not, so here a flush that never ends stands for it.
# The process imports torch once, and rank 1 is a fork of it.
RANKS = """
import os, sys, time
import torch
import torch.distributed as dist
import seqpar
from seqpar.comm.communicator import existing_communicators
from seqpar.comm.p2p import exchange

os.environ["RANK"] = "0" if os.fork() else "1"
if os.environ["RANK"] == "1":
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
if "by init_mesh" in sys.argv:
    seqpar.init_mesh(ring=-1, device_type="cpu")
else:
    dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.group.WORLD
exchange([(1 - rank, torch.ones(8))], [(1 - rank, torch.empty(8))], world).wait()
assert len(existing_communicators()) == 1
dist.ProcessGroup.shutdown = lambda group: time.sleep(3600)
print("connected", flush=True)
if rank == 1:
    time.sleep(3600)
pending = exchange([], [(1, torch.empty(8))], world)
raise ValueError("out of memory")
"""


@pytest.mark.slow
@pytest.mark.thorough(started=["by the caller"])
@pytest.mark.parametrize("started", ["by init_mesh", "by the caller"])
def test_a_rank_that_raises_does_not_wait_for_messages(started: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "SEQPAR_SHARED_MEMORY": "0",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", RANKS, started],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        _, errors = process.communicate(timeout=_END_S)
        assert process.returncode == 1 and "ValueError: out of memory" in errors
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # rank 1
        process.communicate()
