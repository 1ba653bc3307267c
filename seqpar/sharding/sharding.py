"""``Sharding``: which tokens of a sequence each rank holds.

Shapes: a tensor has ``seq`` entries along ``dim``, and its shard has ``seq_local``. All other dimensions are arbitrary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, overload
from weakref import ReferenceType, WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup

from ..base.checks import check_bool, check_choice, check_int, no_compile
from ..base.compile_types import Opaque, register_reference_type
from ..comm.handshake import Fingerprint, fingerprint
from ..masks.mask import Mask
from ..placement.balanced import balanced_layout
from ..placement.layout import (
    Grain,
    Layout,
    TokenLayout,
    check_layout,
    check_length,
    segments_layout,
    shard_length,
    shard_positions,
)
from ..placement.placement import ANY_RANKS, ParallelContext, Placement
from ..placement.strategies import STRATEGIES, StrategyName, resolve
from ..ranks.mesh import (
    all_ranks_group,
    context_group,
    global_ranks,
    known_per_host,
    rank_in,
    sequence_group_of,
    shown,
    size_of,
)
from .report import TOKEN_BYTES, check_masks, report
from .same_rows import compare, compares_now
from .shards import Unshard, check_dim, check_full, local_shard
from .spec import REPLICATED, AttentionSpec
from .worker import WorkerSharding, in_worker


# A compiled function depends on the ranks, and with them on their hosts, and on the layout's name and grain, but not on
# the length. ``Assigned`` layouts of one grain share a graph, so that new ranges cause at most four graphs.
@register_reference_type(
    lambda sharding: [*sharding.ranks_key, sharding.layout_name, sharding.grain],
    reads=["layout_name", "grain", "ranks", "per_host"],
)
@dataclass(frozen=True, eq=False, repr=False)
class Sharding(Opaque):
    """How one sequence is divided over ranks: its length, its layout, and the ranks.

    Make one for each length, and pass it instead of ``mesh``, ``group``, ``layout`` and ``seq_len``. The layout is then
    written in one place, and no rank has to ask the others for their lengths. Making one communicates nothing, with one
    exception: for a mesh that ``init_mesh`` did not make, it creates the process group of the sequence.

    Shardings are immutable and hashable, and equal if they are made with equal arguments.

    A sharding can be used in processes that this one starts, such as the workers of a DataLoader: in a forked process
    everything that needs no message works, and the rest raises an error. Where it is pickled, for a spawned process or
    a pool of forked processes, it becomes a ``WorkerSharding`` of this rank, with ``lengths``, ``positions`` and
    ``shard``.

    Args:
        seq_len: tokens of the full sequence. It need not divide by anything.
        layout: which tokens each rank holds: "contiguous", "zigzag", "striped" or a ``seqpar.Assigned``, which lists
            each rank's ranges of positions.
        mesh: the sequence is sharded over its ring and ulysses dimensions.
        group: the ranks the sequence is sharded over, instead of a mesh. With neither, the default group.
        strategy: with "tp_sp" the sequence is sharded over the mesh's tp dimension too. No other strategy makes a
            difference: where ring and ulysses are 1, it is sharded over tp anyway.

    Attributes:
        sequence_group: the ranks that the sequence is sharded over; None in a process without torch.distributed.
        layout_name: the layout's name; "assigned" for a ``seqpar.Assigned``.
        balanced_for: the mask or masks that ``Sharding.balanced`` was given; None for any other sharding. ``print`` of
            such a sharding shows its ``report``.

    Raises:
        TypeError: an argument has another type.
        ValueError: a negative ``seq_len``, an unknown layout or strategy, a mesh without the dimensions or whose ranks
            do not increase along them, or both a mesh and a group.

    Examples:
        >>> sharding = Sharding(8, "zigzag")  # in one process
        >>> sharding.lengths, sharding.positions().tolist()
        ((8,), [0, 1, 2, 3, 4, 5, 6, 7])
    """

    seq_len: int
    layout: Layout = "zigzag"
    _: KW_ONLY
    mesh: DeviceMesh | None = None
    group: ProcessGroup | None = None
    strategy: StrategyName | Literal["tp_sp"] | None = None
    sequence_group: ProcessGroup | None = field(init=False)
    layout_name: str = field(init=False)
    balanced_for: Mask | Mapping[Mask, int] | None = field(init=False, default=None)
    _key: tuple[Any, ...] = field(init=False)
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        check_int("seq_len", self.seq_len, 0)
        check_layout(self.layout)
        group = resolve_sequence_group(self.mesh, self.group, self.strategy)
        check_layout(self.layout, self.seq_len, size_of(group))
        # Without a mesh, compare the resolved group, because the default group may change later.
        key = self.seq_len, self.layout, self.strategy == "tp_sp", group if self.mesh is None else self.mesh
        layout_name = self.layout if isinstance(self.layout, str) else "assigned"
        found = {"sequence_group": group, "layout_name": layout_name, "_key": key, "_hash": hash(key)}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @classmethod
    def segments(
        cls,
        lengths: Sequence[int],
        *,
        layout: Literal["contiguous", "zigzag"] = "contiguous",
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
    ) -> Sharding:
        """A sharding of several streams, each of which is sharded by itself: each rank holds a part of every stream.

        The sequence is all streams, one after another. So a model that joins this rank's tokens of its streams, such as
        text and image, in this order, has this rank's shard of the joint sequence.

        Args:
            lengths: tokens of each stream. They need not divide by anything, and may be 0.
            layout: how each stream is divided: "contiguous" or "zigzag".
            mesh: the mesh of the ranks, as in ``Sharding``.
            group: the ranks, as in ``Sharding``.

        Raises:
            TypeError: ``lengths`` is no list of ints.
            ValueError: a negative length, or an argument that ``Sharding`` refuses.

        Examples:
            >>> Sharding.segments([3, 8]).lengths  # in one process; with 2 ranks: (2 + 4, 1 + 4)
            (11,)
        """
        if not isinstance(lengths, Sequence):
            raise TypeError(f"lengths={lengths!r}: expected the number of tokens of each stream, such as [512, 4096]")
        for length in lengths:
            check_int("lengths", length, 0)
        check_choice("layout", layout, ("contiguous", "zigzag"))
        assigned = segments_layout(tuple(lengths), size_of(resolve_sequence_group(mesh, group, None)), layout)
        return cls(assigned.seq_len, assigned, mesh=mesh, group=group)

    @overload
    @staticmethod
    def balanced(
        mask: Mask | Mapping[Mask, int],
        seq_len: int,
        *,
        ranks: int,
        rank: int,
        ranks_per_host: int | None = None,
        ulysses: int = 1,
    ) -> WorkerSharding: ...

    @overload
    @staticmethod
    def balanced(
        mask: Mask | Mapping[Mask, int],
        seq_len: int,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        strategy: StrategyName | Literal["tp_sp"] | None = None,
        ranks_per_host: int | None = None,
        ulysses: int = 1,
    ) -> Sharding: ...

    @staticmethod
    def balanced(
        mask: Mask | Mapping[Mask, int],
        seq_len: int,
        *,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        strategy: StrategyName | Literal["tp_sp"] | None = None,
        ranks: int | None = None,
        rank: int | None = None,
        ranks_per_host: int | None = None,
        ulysses: int = 1,
    ) -> Sharding | WorkerSharding:
        """A sharding in which every rank has the same number of tokens and of visible pairs of a query and a key.

        It is made for packed documents, whose work zigzag does not divide evenly. Every rank makes it alone, and equal
        arguments give equal layouts in every process, such as the model's and a worker of a DataLoader. The layout
        depends on ``mask``, ``seq_len``, the number of ranks, ``ranks_per_host`` and ``ulysses``, and on nothing else.

        Under a mask that zigzag or contiguous shards balance, such as plain causality, the layout is one of these.
        ``placement/balanced.py`` explains how it is found: with 64 ranks and 2,000 documents in 10 to 25 milliseconds.
        With several masks, the ranks have equally many pairs of the mask with the most, and nearly of the others. In
        rows of a few tiles for each rank, the sum over the layers of the busiest rank's pairs decides.

        Args:
            mask: which keys each query sees. If layers have different masks: each mask with its number of layers, as
                ``{documents: 8, documents & Mask.sliding_window(4095): 24}``.
            seq_len: tokens of the full sequence.
            mesh: the sequence is sharded over its ring and ulysses dimensions.
            group: the ranks the sequence is sharded over, instead of a mesh. With neither, the default group.
            strategy: as given to ``Sharding``.
            ranks: in a process without process groups, such as a worker of a DataLoader: the number of ranks, instead
                of a mesh or group.
            rank: the rank whose tokens the worker cuts, with ``ranks``.
            ranks_per_host: how many consecutive ranks share a host, so that ranks with documents in common do. By
                default, all ranks do.
            ulysses: how many consecutive ranks attend with the same tokens, because an all-to-all joins them: the size
                of the mesh's ulysses dimension, or with "tp_sp" of ulysses x tp. These ranks get equally many pairs
                together, and fewer keys are sent. With another number the result of attention is the same.

        Returns:
            A Sharding, or with ``ranks`` a ``WorkerSharding``. Its ``layout`` can be sent to another process and given
            to ``Sharding(seq_len, layout)`` there. The lengths of two ranks differ by at most 2 % of their mean, or by
            one token. In sequences with fewer than 512 tokens for each rank the layout is zigzag or contiguous.

        Raises:
            TypeError: an argument has another type.
            ValueError: a mask does not fit ``seq_len``, there is none or one of no layers, ``ranks`` beside a mesh or
                group or without ``rank``, ``ulysses`` does not divide the number of ranks, or an argument that
                ``Sharding`` does not take.

        Examples:
            >>> Sharding.balanced(Mask.documents([0, 3000, 4096]), 4096, ranks=4, rank=0).layout
            Assigned(4096 tokens, 4 ranks, 12 ranges, checksum=d0e7aec1)
        """
        check_int("seq_len", seq_len, 0)
        check_masks(mask)
        if ranks_per_host is not None:
            check_int("ranks_per_host", ranks_per_host, 1)
        check_int("ulysses", ulysses, 1)
        of_worker = ranks is not None or rank is not None
        if of_worker:
            if mesh is not None or group is not None or strategy is not None or ranks is None or rank is None:
                raise ValueError(f"ranks={ranks}, rank={rank}: give both, and neither mesh, group nor strategy")
            check_int("ranks", ranks, 1)
            check_int("rank", rank, 0)
            if rank >= ranks:
                raise ValueError(f"rank={rank}: expected one of {ranks} ranks, from 0 to {ranks - 1}")
        else:
            ranks = size_of(resolve_sequence_group(mesh, group, strategy))
        assert ranks is not None
        if ranks % ulysses:
            raise ValueError(f"ulysses={ulysses}: expected a divisor of the {ranks} ranks that share the sequence")
        layout = balanced_layout(mask, seq_len, ranks, ulysses, ranks_per_host or 0)
        if of_worker:
            assert rank is not None
            return WorkerSharding(seq_len, layout, ranks, rank, balanced_for=mask)
        sharding = Sharding(seq_len, layout, mesh=mesh, group=group, strategy=strategy)
        object.__setattr__(sharding, "balanced_for", mask)
        return sharding

    @cached_property
    def _placements(self) -> dict[Any, Placement]:
        return {}

    @cached_property
    def calls(self) -> WeakKeyDictionary[Mask, dict[Any, Any]]:
        """Of ``strategies.prepare.prepared``."""
        return WeakKeyDictionary()

    @cached_property
    def calls_by_id(self) -> dict[int, tuple[ReferenceType[Mask], dict[Any, Any]]]:
        """The values of ``calls`` by the ``id`` of the mask: a weak key is hashed and compared in Python."""
        return {}

    @cached_property
    def chunks(self) -> dict[Any, Any]:
        """Of ``strategies.tensor_operators.chunks_of``."""
        return {}

    @cached_property
    def tokens(self) -> TokenLayout:
        """Which tokens each rank holds."""
        return TokenLayout(self.seq_len, self.layout, ring=self.ranks)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return size_of(self.sequence_group)

    @cached_property
    def grain(self) -> Grain:
        """How the tokens of most ranks lie in the sequence."""
        return self.tokens.grain

    @cached_property
    def sequence_ranks(self) -> ParallelContext:
        """``sequence_group``, for ``place``: one dimension, also if the ranks are several dimensions of a mesh."""
        return ParallelContext(None, self.sequence_group)

    @property
    def all_ranks(self) -> ProcessGroup | None:
        """The ranks whose mean loss is the objective: all ranks of the mesh, or the ranks of the sequence."""
        return self.sequence_group if self.mesh is None else all_ranks_group(self.mesh, None)

    @property
    def over_tp(self) -> bool:
        """Whether the sequence is sharded over the ranks of tp."""
        if self.mesh is None or self.mesh.ndim == 1:
            return self.strategy == "tp_sp"
        return self.sequence_group is not context_group(self.mesh)

    @property
    def per_host(self) -> int:
        """How many consecutive ranks share a host (see ``mesh.known_per_host``)."""
        return known_per_host(self.sequence_group)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of tokens of each rank, by rank."""
        ranks = size_of(self.sequence_group)
        return tuple(shard_length(self.seq_len, ranks, rank, self.layout) for rank in range(ranks))

    @property
    def ranks_key(self) -> tuple[int, ...]:
        """A key that is equal for shardings over the same ranks, whatever their lengths and layouts."""
        return size_of(self.sequence_group), id(self._key[3])

    @cached_property
    def checksum(self) -> Fingerprint:
        """Of the length and the layout: ranks compare it."""
        return fingerprint(self.seq_len, self.layout)

    @cached_property
    def seq_local(self) -> int:
        """The number of tokens of this rank."""
        group = self.sequence_group
        return shard_length(self.seq_len, size_of(group), rank_in(group), self.layout)

    @no_compile
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens: int64 ``[seq_local]`` on the CPU, increasing."""
        group = self.sequence_group
        # A copy: the cached tensor must not be written to.
        return shard_positions(self.seq_len, size_of(group), rank_in(group), self.layout).clone()

    def permutation(self, restore: bool = False) -> Tensor:
        """Positions in the order of the ranks: equal contiguous parts of ``x[:, permutation]`` are the ranks' shards.

        For code that shards by equal parts, such as PyTorch's context parallelism: a load balancer of
        ``torch.distributed.tensor.experimental._context_parallel`` whose ``_generate_indices(restore)`` returns
        ``sharding.permutation(restore)[None]`` gives its ranks this layout.

        Args:
            restore: whether to return the inverse: ``x[:, permutation][:, inverse]`` is ``x``.

        Returns:
            int64 ``[seq_len]`` on the CPU.

        Raises:
            ValueError: the ranks have different numbers of tokens.

        Examples:
            >>> Sharding(4, "zigzag").permutation().tolist()  # in one process; with 2 ranks: [0, 3, 1, 2]
            [0, 1, 2, 3]
        """
        if len(set(self.lengths)) > 1:
            raise ValueError(
                f"seq_len={self.seq_len}: the ranks have {', '.join(map(str, self.lengths))} tokens, and code that "
                "shards by equal parts would move some of them to other ranks; pad the sequence, so that all ranks "
                "have the same number"
            )
        by_rank = [shard_positions(self.seq_len, self.ranks, rank, self.layout) for rank in range(self.ranks)]
        permutation = torch.cat(by_rank)  # [seq_len]
        return permutation.argsort() if restore else permutation

    @no_compile
    def shard(self, x: Tensor, dim: int = 1, *, check: bool = False) -> Tensor:
        """This rank's shard of ``x``, which every rank holds in full. Nothing is sent, unless a check is asked for.

        Differentiable. Backward sends nothing either: the gradient of ``x`` is 0 at the tokens of other ranks. The mean
        over the ranks (``sync_gradients``, DDP, FSDP) is the gradient of ``x`` and of what it was computed from.

        Args:
            x: tensor of any dtype and shape, with ``seq_len`` entries along ``dim``.
            dim: the dimension of the sequence.
            check: whether the ranks compare their ``x``, bit by bit, and their layouts: checksums and a handshake. It
                must be the same on all ranks. With the environment variable ``SEQPAR_CHECK=N`` they also compare in
                every N-th call.

        Returns:
            ``x`` with ``seq_local`` entries along ``dim``, contiguous.

        Raises:
            TypeError: an argument has another type.
            ValueError: ``x`` does not have the dimension, or not ``seq_len`` entries along it; or the ranks compared
                their ``x`` and their layouts, and they differ.
            RuntimeError: the ranks compared their ``x``, and another rank raised an error on its own.
        """
        check_bool("check", check)
        if compares_now(self.sequence_group) or check:
            check_x = partial(check_full, x, dim, self.seq_len)
            compare(x, check_x, self.sequence_group, layout=self.checksum)
        dim = check_full(x, dim, self.seq_len)
        if self.sequence_group is None:
            return x
        return local_shard(x, dim, self.tokens, rank_in(self.sequence_group))

    @no_compile
    def unshard(self, x_local: Tensor, dim: int = 1) -> Tensor:
        """The full tensor on every rank, all-gathered from the shards.

        Differentiable. Backward reduce-scatters the gradient in float32, so every rank must run it. The ranks may
        compute the same loss from the result, or different terms of a mean over the ranks.

        The ranks do not compare their shards beforehand.

        Args:
            x_local: this rank's shard, with ``seq_local`` entries along ``dim``.
            dim: the dimension of the sequence.

        Returns:
            ``x_local`` with ``seq_len`` entries along ``dim``, in the order of the sequence.

        Raises:
            TypeError: an argument has another type.
            ValueError: ``x_local`` does not have the dimension, or not ``seq_local`` entries along it.
        """
        dim = check_dim("x_local", x_local, dim)
        self.check_local(x_local.shape[dim])
        if self.sequence_group is None:
            return x_local
        global_ranks(self.sequence_group)  # raises if the group has been destroyed
        out: Tensor = Unshard.apply(x_local, dim, self.tokens, self.sequence_group)
        return out

    def report(self, mask: Mask | Mapping[Mask, int], token_bytes: int = TOKEN_BYTES) -> str:
        """A table of each rank's tokens, the visible pairs of its queries, and the bytes that it receives.

        The bytes are k and v in the forward of ``strategy="ring"`` with all ranks on one host. Ranks of the
        mesh's ulysses dimension, and of tp with ``strategy="tp_sp"``, divide the pairs and the bytes of their tokens.

        Args:
            mask: which keys each query sees. If layers have different masks: each mask with its number of layers.
            token_bytes: bytes of k and v of one token; by default of 8 KV heads with head_dim 128 in bfloat16.

        Returns:
            A line for each rank.

        Raises:
            TypeError: an argument has another type.
            ValueError: a mask does not fit the sequence's length.
        """
        ulysses = 1
        if self.mesh is not None and self.mesh.mesh_dim_names and self.mesh.ndim > 1:
            names = ("ulysses", "tp") if self.over_tp else ("ulysses",)
            ulysses = math.prod(self.mesh[name].size() for name in names if name in self.mesh.mesh_dim_names)
        return report(self.seq_len, self.layout, self.ranks, ulysses, mask, token_bytes)

    def lengths_in(self, group: ProcessGroup | None) -> tuple[int, ...]:
        """The number of tokens of each rank of ``group``, whose ranks must all share the sequence.

        Raises:
            ValueError: a rank of ``group`` is not one over which the sequence is sharded.
        """
        ranks, members = global_ranks_or_own(self.sequence_group), global_ranks_or_own(group)
        if not {*members} <= {*ranks}:
            raise ValueError(
                f"sharding: the sequence is sharded over the ranks {shown(ranks)}, but the layer's are "
                f"{shown(members)}; make both with the same mesh or group, and the Sharding with strategy='tp_sp'"
            )
        return tuple(self.lengths[ranks.index(rank)] for rank in members)

    def check_local(self, length: int) -> None:
        """Raise a ValueError if this rank does not hold ``length`` tokens."""
        if length == self.seq_local:
            return
        group = self.sequence_group
        check_length(length, self.seq_len, size_of(group), rank_in(group), self.layout)

    def check_ranks(self, group: ProcessGroup | None) -> None:
        """Raise a ValueError if the ranks of ``group`` are not those that the sequence is sharded over."""
        if group is self.sequence_group:
            return
        ranks, others = global_ranks_or_own(self.sequence_group), global_ranks_or_own(group)
        if ranks != others:
            raise ValueError(
                f"sharding: the sequence is sharded over the ranks {shown(ranks)}, but this call is for the ranks "
                f"{shown(others)}; make both with the same mesh or group (and the Sharding with strategy='tp_sp' for "
                "tp_sp, for nothing else)"
            )

    def place(self, spec: AttentionSpec, ranks: ParallelContext = ANY_RANKS) -> Placement:
        """Who takes part in attention with ``spec``, and which positions they hold. Found once.

        Args:
            spec: the constants of the call.
            ranks: the mesh or the group that a layer was made with; by default the sharding's.

        Raises:
            ValueError: ``ranks`` are not the ranks of the sharding.
        """
        key = ranks, spec.strategy, spec.strategy_options, spec.tensor_parallel, spec.deterministic == "invariant"
        placement = self._placements.get(key)
        if placement is None:
            placement = self._placements[key] = self._place(spec, ranks)
        return placement

    def _place(self, spec: AttentionSpec, ranks: ParallelContext) -> Placement:
        own = ranks.mesh is not None or ranks.group is not None
        mesh, group = (ranks.mesh, ranks.group) if own else (self.mesh, self.group)
        tensor_size = 1
        if spec.tensor_parallel:
            self.check_ranks(sequence_group_of(mesh, group, "tp_sp"))
            tensor_size, group = size_of(ranks.tensor), None
        replicated = spec.strategy == REPLICATED
        if spec.tensor_parallel and spec.strategy == "local":
            placement = Placement()
        else:
            placement = resolve(
                "context_parallel" if replicated else spec.strategy, mesh, group, dict(spec.strategy_options)
            )
        if not spec.tensor_parallel:
            self.check_ranks(placement.sequence_group)
        if spec.deterministic == "invariant":  # one algorithm for every strategy
            group = placement.sequence_group
            placement = Placement(group, ulysses=group, algorithm="invariant")
        degrees = size_of(placement.ring), size_of(placement.ulysses), tensor_size
        tokens = TokenLayout(self.seq_len, self.layout, *degrees, replicated)
        if replicated:  # nothing is sent
            return Placement(placement.sequence_group, tokens=tokens)
        return replace(placement, tokens=tokens)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Sharding) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __copy__(self) -> Sharding:
        return self  # process groups cannot be copied, and nothing changes a sharding

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return self

    def __reduce__(self) -> Any:
        group, rank = self.sequence_group, rank_in(self.sequence_group)
        started_by = None if group is None or self.ranks == 1 else global_ranks(group)[rank]
        return in_worker(self.seq_len, self.layout, self.ranks, rank, started_by)

    def __repr__(self) -> str:
        lengths = shown(self.lengths)
        strategy = f", strategy={self.strategy!r}" if self.strategy is not None else ""
        return f"Sharding({self.seq_len}, {self.layout!r}{strategy}, lengths={lengths})"

    def __str__(self) -> str:
        if self.balanced_for is None:
            return repr(self)
        return f"balanced for {self.balanced_for!r}: {self!r}\n{self.report(self.balanced_for)}"


def resolve_sequence_group(
    mesh: DeviceMesh | None, group: ProcessGroup | None, strategy: str | None
) -> ProcessGroup | None:
    """The ranks the sequence is sharded over, after checking the strategy's name."""
    if strategy is not None:
        check_choice("strategy", strategy, (*STRATEGIES, "tp_sp"))
    if strategy == "local" and mesh is None and group is None:
        return None
    return sequence_group_of(mesh, group, strategy)


def global_ranks_or_own(group: ProcessGroup | None) -> tuple[int, ...]:
    if group is None:
        return (dist.get_rank() if dist.is_initialized() else 0,)
    return global_ranks(group)
