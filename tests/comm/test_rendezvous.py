"""Waits through the store: what ranks that have ended left there does not disturb those that are started again."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist
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
    for values in own.pool.run(3, gather_again, own.port, absent, deadline_s=30):
        assert values == [[f"{word} {rank}" for rank in range(3)] for word in ("first", "second", "third")]
