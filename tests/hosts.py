"""Simulates several hosts on one machine, by replacing what the package knows about the hosts of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from seqpar.ranks import mesh


@contextmanager
def hosts_of(per_host: int) -> Iterator[None]:
    """In the block, each ``per_host`` consecutive ranks of the default group share a host. With 0, all ranks do."""
    world = dist.group.WORLD
    assert world is not None
    ranks = range(world.size())
    names = tuple(str(rank // per_host if per_host else 0) for rank in ranks)
    with mock.patch.dict(mesh._hosts, {world: {tuple(ranks): names}}, clear=True):
        yield
