"""Which rank sends which keys to which rank at which step, and which keys each query sees: pure functions.

A plan is computed from the mask, the sharding and the rank alone, without a process group and without data. The runtime
executes it as a program (``program.py``), tests and byte counts read it, and the planner simulates it for any number of
ranks. ``print(plan)`` shows its steps.

In a ring of ``n`` ranks, step 0 computes with a rank's own keys. At step ``h``, rank ``r`` computes with keys of rank
``(r - h) % n``. The owner of K/V rows sends them directly to the rank that needs them, instead of forwarding them
around the ring. With a full mask this sends the same bytes. With any other mask, each rank receives only the rows that
its queries see, and no step waits for a neighbour to forward a block. An all-gather is the same schedule with all steps
after step 0 merged into one.

If the ranks are on several hosts, every row is sent once to each other host that needs it, and shared inside that host.
In an inter-host hop, rank ``l`` of a host receives the rows of rank ``l`` of another host that any rank of its own host
needs. The intra-host hops of the next steps send these rows from rank to rank inside the host. A ring over several
hosts thus has one ring inside the host for each inter-host hop, in whose first step a rank computes with the rows that
it has received itself. Half of the steps with keys of the rank's host come first and half come last, so that the first
inter-host hop and the last return of gradients overlap with computation.

The cost of planning grows with the runs of the mask and the ranks of the group, not with the tokens. The intervals of
each query are computed on the device that the kernels run on, by formulas over the runs.

Eight tokens, four ranks, zigzag, causal mask. The step of each (query rank, key rank) pair, and the global positions of
the keys that are sent ("-": the queries see none of them, so nothing is sent):

                   keys of rank 0 [0 7]   rank 1 [1 6]   rank 2 [2 5]   rank 3 [3 4]
    queries 0 7        step 0  own        step 3  1 6    step 2  2 5    step 1  3 4
    queries 1 6        step 1  0          step 0  own    step 3  2 5    step 2  3 4
    queries 2 5        step 2  0          step 1  1      step 0  own    step 3  3 4
    queries 3 4        step 3  0          step 2  1      step 1  2      step 0  own

Shapes: b is 1 or the batch size, q_len and k_len are the numbers of local queries and of the step's keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from ..base.cache import ByteCache, cached_tensors
from ..masks.mask import Mask
from ..placement.heads import Heads
from ..placement.layout import CPU, Layout, Positions, TokenLayout
from .program import NO_HOP, Hop, Program, Step, Transfer
from .rounds import p2p_rounds
from .rows import NO_ROWS, GatheredRows, KeyIntervals, RowSpans, ShardRows, merged_ranges, rows_in, visible_ranges

# Under a striped layout, a rank's queries see up to one range of keys per document. If documents times ranks exceed
# this number, a rank receives all keys between the first and the last one that it needs. A list of ranges would then
# take more time than the few rows that it leaves out.
_EXACT_RANGES = 2048
# If every rank needs the whole sequence except for at most this share, an all-gather is a collective of all rows.
_DENSE_WITHOUT = 1 / 1024
# Positions below this fit into 32 bits, also after the number of ranks is added to them.
_INT32 = 1 << 30


class AttentionPlan:
    """The steps of one ring rank, own keys first. Each step is planned when it is first read.

    All ranks have the same number of steps, some of which may be empty. What a rank sends in step ``h``, its peer
    receives in step ``h``, so any two ranks see the messages between them in the same order.

    A plan holds no tensors, and can be pickled.

    Attributes:
        tokens: which positions each rank holds.
        rank: this rank in the ring.
        gather: receive from all ranks in one step (all-gather) instead of one rank a step (ring).
        per_host: how many consecutive ranks of the ring share a host. By default all.
        num_steps: the number of steps, which ``len`` returns too.
        parts: for each part of the mask and each batch row, its intervals.
        runs: all of them, one part after another.
    """

    def __init__(
        self,
        mask: Mask,
        tokens: TokenLayout,
        rank: int,
        gather: bool = False,
        per_host: int | None = None,
    ) -> None:
        self.tokens = tokens
        self.rank = rank
        self.gather = gather
        self.per_host = tokens.ring if per_host is None else per_host
        self.num_steps = 1 if tokens.replicated else min(2, tokens.ring) if gather else tokens.ring
        self.parts, self.runs = mask.parts(tokens.seq_len), mask.runs(tokens.seq_len)
        self._steps: dict[int, Step] = {}
        self._inter_host_hops: dict[int, Hop] = {}
        self._ranges: dict[int, tuple[tuple[int, int], ...]] = {}
        self._host_ranges: dict[int, tuple[tuple[int, int], ...]] = {}
        self._programs: dict[Hashable, Program] = {}
        self._token = object()  # the plan's key in caches, which must not hold a reference to the plan

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, index: int) -> Step:
        if index not in self._steps:
            if not 0 <= index < len(self):
                raise IndexError(index)  # ends iteration
            self._steps[index] = self._local_step() if index == 0 else self._remote_step(index)
        return self._steps[index]

    def __iter__(self) -> Iterator[Step]:
        return (self[index] for index in range(len(self)))

    @property
    def hosts(self) -> int:
        """How many hosts the ring has."""
        return self.tokens.ring // self.per_host

    def prepare(self) -> AttentionPlan:
        """Plan all steps now, and return the plan."""
        for _ in self:
            pass
        return self

    def __str__(self) -> str:
        return "\n".join([f"rank {self.rank} of {self.tokens.ring}", *map(str, self)])

    def program(
        self, heads: Heads, num_chunks: int = 1, *, attends: bool = True, prefetch: int = 2, split_own: bool = True
    ) -> Program:
        """The steps of a call with these heads. Made once; see ``Program``."""
        key = heads, num_chunks, attends, prefetch, split_own
        if key not in self._programs:
            groups, attends = self.groups_of(heads), attends and self._has_queries
            steps = [(part, tuple(plan)) for part, plan in groups]
            made = self._programs[key] = Program(steps, heads, num_chunks, attends, prefetch, split_own, self.gather)
            if groups[0][1] is not self:
                made.plans = tuple(plan for _, plan in groups)
        return self._programs[key]

    def groups_of(self, heads: Heads) -> list[tuple[Heads, AttentionPlan]]:
        """``heads`` in groups with one mask each, and the plan of each group."""
        return [(heads, self)]

    @cached_property
    def checksum(self) -> int:
        """A checksum of the mask and of what each rank holds. The same on every rank that has the same plan."""
        value = zlib.crc32(f"{self.tokens} {self.gather} {self.per_host} {len(self.parts)}".encode())
        for runs in self.runs:
            for column in (runs.start, runs.lo, runs.hi):
                value = zlib.crc32(column.tobytes(), value)
        return value

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest shard."""
        return max(len(self.tokens.ring_positions(rank)) for rank in range(self.tokens.ring))

    @property
    def rows_received(self) -> int:
        """The tokens of other ranks whose k and v this rank's queries see: what it receives in a ring on one host."""
        visible = self._visible(self.rank)
        own = rows_in(visible, self.tokens.ring_positions(self.rank))
        return sum(b - a for a, b in visible) - len(own)

    @cached_property
    def dense(self) -> bool:
        """Whether every rank needs nearly all keys, so that an all-gather is a collective of all rows. The same on
        every rank."""
        if not self.gather:
            return False
        n = self.tokens.ring
        enough = self.tokens.seq_len * (1 - _DENSE_WITHOUT)
        # The first and the last rank are the most likely ones to need less.
        return all(sum(b - a for a, b in self._visible(r)) >= enough for r in (0, n - 1, *range(1, n - 1)))

    def nbytes(self) -> int:
        """The approximate size of the plan in memory."""
        hops = (*(step.intra_host for step in self._steps.values()), *self._inter_host_hops.values())
        spans = sum(len(t.owner_rows.spans) + 2 for hop in hops for t in (*hop.receives, *hop.sends))
        return 400 * sum(map(len, self.runs)) + 200 * spans + 1000 * len(self)

    def intervals(self, index: int, device: torch.device, positions: bool = False) -> tuple[KeyIntervals, ...]:
        """Which of the keys of step ``index`` each local query sees, on ``device``: for each part of the mask in which
        some query sees some of the keys. None if the step has no keys.

        Args:
            index: the step.
            device: where the kernels run.
            positions: whether the scores depend on global positions.
        """
        step = self._steps.get(index) or self[index]
        keys = step.keys
        if keys is None or not self._has_queries:
            return ()

        def make() -> tuple[KeyIntervals, ...]:
            plan = ref(self)  # a cached value must not keep the plan alive
            return tuple(
                replace(
                    self._intervals(part, self.rank, keys, device, positions),
                    made_on_host=partial(_intervals_on_host, plan, index, number),
                )
                for number, part in enumerate(self._parts_of(keys))
            )

        return cached_tensors((self._token, index, positions), device, make, self)

    def between(
        self, query_rank: int, key_rank: int, device: torch.device, positions: bool = False
    ) -> tuple[KeyIntervals, ...]:
        """Which keys of ``key_rank`` each query of ``query_rank`` sees, for each part of the mask; none if one of the
        ranks has no tokens."""
        shard = self.tokens.ring_positions(key_rank)
        if not len(shard) or not len(self.tokens.ring_positions(query_rank)):
            return ()
        keys = ShardRows(shard, RowSpans(((0, len(shard)),)))
        return tuple(self._intervals(i, query_rank, keys, device, positions) for i in range(len(self.parts)))

    def _parts_of(self, keys: ShardRows | GatheredRows) -> list[int]:
        """The parts of the mask in which some query of this rank sees some of the keys of a step."""
        found = [*range(len(self.parts))]
        if len(found) == 1:
            return found
        shards = [keys] if isinstance(keys, ShardRows) else keys.shards
        queries, seq_len = self.tokens.ring_positions(self.rank), self.tokens.seq_len
        seen = [visible_ranges(part, queries, seq_len, self._exact) for part in self.parts]
        return [i for i in found if any(len(rows_in(seen[i], shard.shard_positions)) for shard in shards)]

    def _intervals(
        self, part: int, query_rank: int, keys: ShardRows | GatheredRows, device: torch.device, positions: bool
    ) -> KeyIntervals:
        lo, hi = (keys.counts_below(x).int() for x in self._global_intervals(part, query_rank, device))  # [b, q_len]
        q_positions = k_positions = lo
        if positions:
            q_positions = self.tokens.ring_positions(query_rank).tensor(device).int()
            k_positions = keys.positions(device).int()
        return KeyIntervals(lo, hi, q_positions, k_positions)

    def _global_intervals(self, part: int, query_rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The first and one past the last position that each query of a rank sees in a part, ``[b, q_len]``.
        Cached."""

        def make() -> tuple[Tensor, Tensor]:
            queries = self.tokens.ring_positions(query_rank).tensor(device)
            rows = [runs.at(queries) for runs in self.parts[part]]
            seq_len = self.tokens.seq_len
            dtype = torch.int32 if seq_len < _INT32 else torch.int64
            lo, hi = (torch.stack(ends).clamp_(max=seq_len).to(dtype) for ends in zip(*rows, strict=True))
            return lo, hi

        return cached_tensors((self._token, "global", part, query_rank), device, make, self)

    @cached_property
    def _exact(self) -> bool:
        return max(map(len, self.runs)) * self.tokens.ring <= _EXACT_RANGES

    @cached_property
    def _has_queries(self) -> bool:
        return len(self.tokens.ring_positions(self.rank)) > 0

    def _visible(self, query_rank: int) -> tuple[tuple[int, int], ...]:
        if query_rank not in self._ranges:
            queries = self.tokens.ring_positions(query_rank)
            self._ranges[query_rank] = visible_ranges(self.runs, queries, self.tokens.seq_len, self._exact)
        return self._ranges[query_rank]

    def _transfer_rows(self, query_rank: int, key_rank: int) -> RowSpans:
        shard = self.tokens.ring_positions(key_rank)
        if self.dense:
            return RowSpans(((0, len(shard)),)) if len(shard) else NO_ROWS
        if query_rank != self.rank and not self._may_see(query_rank, shard):
            return NO_ROWS
        return rows_in(self._visible(query_rank), shard)

    def _host_rows(self, host: int, key_rank: int) -> RowSpans:
        """The rows of ``key_rank``'s shard that are sent to ``host``: those that any of its ranks needs."""
        shard = self.tokens.ring_positions(key_rank)
        if self.dense:
            return RowSpans(((0, len(shard)),)) if len(shard) else NO_ROWS
        ranks = self._ranks_of_host(host)
        if self.rank not in ranks and not any(self._may_see(rank, shard) for rank in ranks):
            return NO_ROWS
        return rows_in(self._visible_on_host(host), shard)

    def _ranks_of_host(self, host: int) -> range:
        return range(host * self.per_host, (host + 1) * self.per_host)

    def _visible_on_host(self, host: int) -> tuple[tuple[int, int], ...]:
        if host not in self._host_ranges:
            ranges = (x for rank in self._ranks_of_host(host) for x in self._visible(rank))
            self._host_ranges[host] = merged_ranges(ranges)
        return self._host_ranges[host]

    def _may_see(self, query_rank: int, shard: Positions) -> bool:
        """Whether the keys at ``shard`` overlap the range from the first to the last key visible to ``query_rank``."""
        if not len(shard):
            return False
        start, stop = shard.stripes[0].start, shard.stripes[-1].stop
        for stripe in self.tokens.ring_positions(query_rank).stripes:
            for runs in self.runs:
                lo, hi = runs.bounds(stripe.start, stripe.stop - 1)
                if lo < stop and hi > start:
                    return True
        return False

    def _distances(self, index: int) -> tuple[int, int]:
        first = (self.per_host + 1) // 2  # steps of the own host that come first
        inter_host_steps = (self.hosts - 1) * self.per_host
        if index < first:
            return 0, index
        if index < first + inter_host_steps:
            distance, local = divmod(index - first, self.per_host)
            return distance + 1, local
        return 0, index - inter_host_steps

    def _local_step(self) -> Step:
        tokens = self.tokens.all_gathered() if self.tokens.replicated else self.tokens
        shard = tokens.ring_positions(0 if self.tokens.replicated else self.rank)
        rows = rows_in(self._visible(self.rank), shard)
        everything = RowSpans(((0, len(shard)),))
        return Step(0, ShardRows(shard, everything) if len(rows) else None)

    def _remote_step(self, index: int) -> Step:
        size, (host, local) = self.per_host, divmod(self.rank, self.per_host)
        if self.gather:
            distance, step, last = min(1, self.hosts - 1), 0, 0
            rounds = _ranks_of(p2p_rounds(size, local), host * size, 1)
            # The rows that an inter-host hop has brought this rank come last.
            sources = targets = [*(peer for peers in rounds for peer in peers), *([self.rank] * (self.hosts > 1))]
            owners = range(self.hosts)
        else:
            (distance, step), last = self._distances(index), size - 1
            sources, targets = [host * size + (local - step) % size], [host * size + (local + step) % size]
            rounds = [[peer for peer in {*sources, *targets} if peer != self.rank]]
            owners = range((host - distance) % self.hosts, (host - distance) % self.hosts + 1)
        receives = [self._transfer(self.rank, peer, peer, owner) for peer in sources for owner in owners]
        sends = [self._transfer(peer, self.rank, peer, owner) for peer in targets for owner in owners]
        hop = _hop(receives, sends, rounds)
        if not distance:
            return Step(index, self._keys(hop), hop)
        return Step(index, self._keys(hop), hop, self._inter_host(distance), step == 0, step == last)

    def _transfer(self, receiver: int, sender: int, peer: int, host: int) -> Transfer:
        """The rows that ``sender`` sends to ``receiver``, a rank of the same host. Their owner is the rank of ``host``
        with the sender's index inside its host."""
        size = self.per_host
        owner = host * size + sender % size
        rows = NO_ROWS if owner == receiver else self._transfer_rows(receiver, owner)
        at = rows
        if owner != sender and sender == self.rank and len(rows):
            at = self._host_rows(self.rank // size, owner).locate(rows)
        return Transfer(peer, owner, rows, at)

    def _keys(self, hop: Hop) -> ShardRows | GatheredRows | None:
        shards = tuple(ShardRows(self.tokens.ring_positions(t.owner), t.owner_rows) for t in hop.receives)
        if not self.gather or not shards:
            return shards[0] if shards else None
        ranges = ((0, self.tokens.seq_len),) if self.dense else self._visible(self.rank)
        own = self.tokens.ring_positions(self.rank)
        return GatheredRows(ranges, ShardRows(own, rows_in(ranges, own)), shards)

    def _inter_host(self, distance: int) -> Hop:
        """The hop that brings rows of the host at a distance; in an all-gather, of all hosts. Planned once."""
        if distance not in self._inter_host_hops:
            size, hosts, (host, local) = self.per_host, self.hosts, divmod(self.rank, self.per_host)
            if self.gather:
                rounds = _ranks_of(p2p_rounds(hosts, host), local, size)
                sources = targets = [peer for peers in rounds for peer in peers]
            else:
                sources, targets = ([(host + d) % hosts * size + local] for d in (-distance, distance))
                rounds = [list({*sources, *targets})]
            received = ((peer, peer, self._host_rows(host, peer)) for peer in sources)
            sent = ((peer, self.rank, self._host_rows(peer // size, self.rank)) for peer in targets)
            receives, sends = (
                [Transfer(peer, owner, rows, rows) for peer, owner, rows in transfers] for transfers in (received, sent)
            )
            self._inter_host_hops[distance] = _hop(receives, sends, rounds)
        return self._inter_host_hops[distance]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_token": None, "_programs": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _token=object())


class PlanByHeads(AttentionPlan):
    """The plans of ``Mask.by_heads``: the steps of a group of heads follow the steps of the group before.

    Attributes:
        plans: the plan of each group, the same object for equal masks.
        size: the query heads of a group.
    """

    def __init__(self, plans: Sequence[AttentionPlan], size: int) -> None:
        one = plans[0]
        self.tokens, self.rank, self.gather, self.per_host = one.tokens, one.rank, one.gather, one.per_host
        self.plans, self.size, self.num_steps, self._programs = plans, size, one.num_steps, {}

    def groups_of(self, heads: Heads) -> list[tuple[Heads, AttentionPlan]]:
        found: list[tuple[Heads, AttentionPlan]] = []
        for i, part in heads.groups(self.size):
            if found and found[-1][1] is self.plans[i]:  # neighbours with equal masks are one group
                part = replace(part, queries=range(found.pop()[0].queries.start, part.queries.stop))
            found.append((part, self.plans[i]))
        return found or [(heads, self.plans[0])]  # a tensor-parallel rank without heads

    def __getitem__(self, index: int) -> Step:
        group, step = divmod(index, self.num_steps)
        return self.plans[group][step]

    def __len__(self) -> int:
        return self.num_steps * len(self.plans)

    def __str__(self) -> str:
        return "\n".join(f"heads: group {i} of {len(self.plans)}, {plan}" for i, plan in enumerate(self.plans, 1))

    @cached_property
    def checksum(self) -> int:
        return zlib.crc32(str([self.size, *(plan.checksum for plan in self.plans)]).encode())

    @cached_property
    def dense(self) -> bool:
        return all(plan.dense for plan in self.plans)

    def intervals(self, index: int, device: torch.device, positions: bool = False) -> tuple[KeyIntervals, ...]:
        group, step = divmod(index, self.num_steps)
        return self.plans[group].intervals(step, device, positions)

    def between(
        self, query_rank: int, key_rank: int, device: torch.device, positions: bool = False
    ) -> tuple[KeyIntervals, ...]:
        raise ValueError(
            f"mask: by_heads has {len(self.plans)} groups of heads, and this algorithm attends with one plan for all "
            "heads; let it attend with the heads and the plan of each of plan.groups_of(heads)"
        )


def _hop(receives: list[Transfer], sends: list[Transfer], rounds: list[list[int]]) -> Hop:
    receives, sends = ([t for t in transfers if t.owner_rows.count] for transfers in (receives, sends))
    return Hop(tuple(receives), tuple(sends), rounds) if receives or sends else NO_HOP


def _ranks_of(rounds: list[list[int]], first: int, stride: int) -> list[list[int]]:
    return [[first + i * stride for i in indices] for indices in rounds]


def _intervals_on_host(plan: ReferenceType[AttentionPlan], index: int, number: int) -> KeyIntervals | None:
    """Some of the intervals of a step, computed on the host; None if the plan has been freed."""
    alive = plan()
    return None if alive is None else alive.intervals(index, CPU)[number]


# Plans by mask and sharding. Equal masks share a plan, so a mask that is made anew for every layer is planned once.
_plans: ByteCache[AttentionPlan] = ByteCache(8 << 20, AttentionPlan.nbytes, entries=32)
_PLANS_OF_A_MASK = 8


def attention_plan(
    mask: Mask,
    tokens: TokenLayout,
    rank: int,
    gather: bool = False,
    per_host: int | None = None,
    heads: int = 0,
) -> AttentionPlan:
    """The plan of one ring rank. It is cached in ``mask.plans``.

    Args:
        mask: which keys each query sees.
        tokens: which positions each rank holds.
        rank: this rank in the ring.
        gather: receive from all ranks in one step (all-gather) instead of one rank a step (ring).
        per_host: how many consecutive ranks of the ring share a host. By default all.
        heads: the query heads of the model, which ``Mask.by_heads`` divides into groups.
    """
    groups, arguments = mask.head_groups, (tokens, rank, gather, per_host or tokens.ring)
    key: Hashable = (*arguments, heads) if groups else arguments
    plan: AttentionPlan | None = mask.plans.get(key)
    if plan is None:
        if groups:
            by_mask = {x: attention_plan(x, *arguments) for x in groups}
            plan = PlanByHeads([by_mask[x] for x in groups], heads // len(groups))
        else:
            plan = _plans.get((mask, key), lambda: AttentionPlan(mask, *arguments))
        while len(mask.plans) >= _PLANS_OF_A_MASK:  # such as the causal mask of sequences of any length
            mask.plans.pop(next(iter(mask.plans)), None)
        mask.plans[key] = plan
    return plan


def plan_ahead(
    arguments: tuple[TokenLayout, int, bool, int], mask: Mask, seq_len: int | None = None, layout: Layout | None = None
) -> Mask:
    """Plan attention under ``mask``, and return the mask. It then holds the plan, also when it is pickled.

    ``arguments`` are of ``attention_plan``; ``seq_len`` and ``layout`` replace the ones in it.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask={type(mask).__name__}: expected a seqpar.Mask, such as seqpar.Mask.documents(...)")
    tokens, rank, gather, per_host = arguments
    tokens = replace(
        tokens,
        seq_len=tokens.seq_len if seq_len is None else seq_len,
        layout=tokens.layout if layout is None else layout,
    )
    for group in mask.head_groups or (mask,):
        attention_plan(group, tokens, rank, gather, per_host).prepare()
    return mask
