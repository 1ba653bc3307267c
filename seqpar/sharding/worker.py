"""``WorkerSharding``: a sharding without process groups, for the processes that a rank starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..base.checks import check_bool
from ..masks.mask import Mask
from ..placement.layout import Layout, shard_length, shard_positions
from ..ranks.processes import inherited
from .report import TOKEN_BYTES, report
from .shards import check_full


@dataclass(frozen=True)
class WorkerSharding:
    """Which tokens one rank holds, without process groups: a ``Sharding`` in a process that the rank has started.

    Such a process is a worker of a DataLoader. In a process with process groups of its own, the methods raise an error,
    because the process may be another rank. One that ``Sharding.balanced`` has made for a given rank works everywhere.

    Attributes:
        seq_len: tokens of the full sequence.
        layout: which tokens each rank holds.
        ranks: the number of ranks.
        rank: the rank whose tokens these are, among these.
        started_by: the global rank whose ``Sharding`` was pickled; None if it is for a given rank, or for one rank.
        spawned: whether it was pickled for a process that was being started. If not, for example for a pool of
            processes or for a file, only forks of ``started_by`` may use it.
        balanced_for: as in ``Sharding``.
    """

    seq_len: int
    layout: Layout
    ranks: int
    rank: int
    started_by: int | None = field(default=None, compare=False, repr=False)
    spawned: bool = field(default=False, compare=False, repr=False)
    balanced_for: Mask | Mapping[Mask, int] | None = field(default=None, compare=False, repr=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each rank, by rank."""
        self.check_process()
        return tuple(shard_length(self.seq_len, self.ranks, rank, self.layout) for rank in range(self.ranks))

    @property
    def seq_local(self) -> int:
        """The number of tokens of the rank."""
        return self.lengths[self.rank]

    def positions(self) -> Tensor:
        """Global positions of the rank's tokens: int64 ``[seq_local]`` on the CPU, increasing."""
        self.check_process()
        return shard_positions(self.seq_len, self.ranks, self.rank, self.layout).clone()

    def shard(self, x: Tensor, dim: int = 1, *, check: bool = False) -> Tensor:
        """The rank's shard of ``x``, with ``seq_local`` instead of ``seq_len`` entries along ``dim``.

        Raises:
            ValueError: ``x`` does not have ``seq_len`` entries along ``dim``, or the process has process groups.
            RuntimeError: ``check`` is True.
        """
        check_bool("check", check)
        self.check_process(check)
        return x.index_select(check_full(x, dim, self.seq_len), self.positions().to(x.device))

    def report(self, mask: Mask | Mapping[Mask, int], token_bytes: int = TOKEN_BYTES) -> str:
        """As ``Sharding.report``."""
        return report(self.seq_len, self.layout, self.ranks, 1, mask, token_bytes)

    def __str__(self) -> str:
        if self.balanced_for is None:
            return repr(self)
        return f"balanced for {self.balanced_for!r}: {self!r}\n{self.report(self.balanced_for)}"

    def unshard(self, x_local: Tensor, dim: int = 1) -> Tensor:
        """Raises a RuntimeError: this process has no process groups in which it could gather the ranks' shards."""
        raise RuntimeError(
            f"unshard: {self!r} has no process groups in which it could gather the other ranks' shards; call it in the "
            "rank"
        )

    def check_process(self, check: bool = False) -> None:
        """Raise a ValueError in a process that may belong to another rank, and a RuntimeError if ``check`` is True."""
        if check and self.ranks > 1:
            raise RuntimeError(
                f"check=True: {self!r} has no process groups to compare the ranks' tensors in; pass check=False here, "
                "and compare in the rank"
            )
        if self.started_by is None or (inherited() and dist.get_rank() == self.started_by):
            return
        if dist.is_initialized():
            raise ValueError(
                f"sharding: it was made by rank {self.rank} of {self.ranks} in the process that started this one, "
                "which has process groups of its own; make a seqpar.Sharding in this process"
            )
        if not self.spawned:
            raise ValueError(
                f"sharding: rank {self.rank} of {self.ranks} pickled it, but not for the start of this process, which "
                "may belong to another rank; make it again, from its seq_len and layout"
            )

    def __reduce__(self) -> Any:
        return in_worker(self.seq_len, self.layout, self.ranks, self.rank, self.started_by)


def in_worker(*values: Any) -> Any:
    """How to pickle a sharding. A process that is being started belongs to this rank; another one may not."""
    return WorkerSharding, (*values, get_spawning_popen() is not None)
