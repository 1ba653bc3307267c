"""Waits through the store: what ranks that have ended left there does not disturb those that are started again."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.run
from torch.distributed import ProcessGroup

from seqpar.ranks import rendezvous
from seqpar.ranks.rendezvous import store_all_gather

from ..pool import OwnPool, on_ranks

TIMEOUT = timedelta(seconds=5)


class KilledWhileWaiting(dist.PrefixStore):
    """The store of such a process."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]
        try:
            super().wait(keys, timeout)
        except RuntimeError:
            raise SystemExit from None


@on_ranks
def gather_again(group: ProcessGroup, port: int, absent: list[int]) -> list[list[str]]:
    """All ranks gather. Then the ``absent`` ones end, and the others wait for them and are killed. Then all gather
    twice, in the same store."""
    rank, ranks = group.rank(), list(range(group.size()))
    server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store, killed = (kind(f"without {absent}", server) for kind in (dist.PrefixStore, KilledWhileWaiting))
    with mock.patch.object(rendezvous, "_get_default_store", return_value=store):
        results = [store_all_gather("a test", ranks, f"first {rank}", TIMEOUT)]
        if rank not in absent:
            with (
                mock.patch.object(rendezvous, "_get_default_store", return_value=killed),
                mock.patch.object(rendezvous, "_GRACE_S", 0.0),
                pytest.raises((SystemExit, RuntimeError)),
            ):
                store_all_gather("a test", ranks, "nobody reads this", timedelta(seconds=0.3))
        group.barrier().wait()
        results += [store_all_gather("a test", ranks, f"{word} {rank}", TIMEOUT) for word in ("second", "third")]
        group.barrier().wait()
    return results


@pytest.mark.parametrize("absent", [[0], [1], [0, 2], [1, 2]], ids=str)
def test_ranks_that_torchrun_starts_again_store_all_gather(own: OwnPool, absent: list[int]) -> None:
    for values in own.pool.run(3, gather_again, own.port, absent):
        assert values == [[f"{word} {rank}" for rank in range(3)] for word in ("first", "second", "third")]


# At first, the ranks arrive more than a second apart. Twice, a rank is killed after its first call of attention.
SCRIPT = """
import os, signal, time, torch, seqpar
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
torch.set_num_threads(1)
for start in (0, 1):
    time.sleep(1.2 * (rank != start) * (attempt == 0))
    if start == 0:
        mesh = seqpar.init_mesh(ring=-1, device_type="cpu", timeout=30)
    sharding = seqpar.Sharding(32, mesh=mesh)
    q = sharding.shard(torch.randn(1, 32, 2, 4))
    seqpar.attention(q, q, q, sharding=sharding)
print(f"[attempt {attempt} of rank {rank}]", flush=True)
if attempt < 2:
    if rank == attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""


def run_torchrun(out: Path, arguments: list[str]) -> None:
    """``torchrun``, with ``out`` as the standard output and the standard error of the ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.distributed.run.main(arguments)


@pytest.mark.thorough
def test_a_mesh_after_a_restart_has_nothing_of_the_ranks_that_have_ended(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    # The ranks are forks of torchrun's process, which import nothing again.
    fast = ["--monitor-interval", "0.1", "--run-path", "--start-method=fork"]
    arguments = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", *fast, str(script)]
    torchrun = get_context("forkserver").Process(target=run_torchrun, args=(out, arguments))
    torchrun.start()
    try:
        torchrun.join(100)
    finally:
        torchrun.kill()
    text = out.read_text()
    assert torchrun.exitcode == 0, text
    ended = re.findall(r"attempt (\d) of rank (\d)", text)
    assert sorted(ended) == [(str(attempt), str(rank)) for attempt in range(3) for rank in range(2)], text
    assert "timed out" not in text, text  # lines of torch that read like a failure
