"""The program of one rank: its steps in order, with the messages that each step posts, as values to execute and print.

[Note: posts] Messages are posted ahead of the step that needs them, so that they overlap with the kernels of the steps
before. Every rank posts the messages of all steps in the same order, also of steps in which it has none: NCCL would
deadlock if two ranks posted the messages between them in different orders.

While one step is computed, the messages of the next ``prefetch`` steps are under way. Rows of other hosts arrive in two
hops. The intra-host hop of a step can only be posted after the inter-host hop that brings its rows has arrived. A ring
therefore posts it when the step itself begins, so that no earlier step waits for other hosts. An all-gather over
several hosts posts it one step earlier, after the kernel of the rank's own keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ..placement.heads import Heads, kv_index
from .rows import GatheredRows, RowSpans, ShardRows

Post = tuple[Literal["inter_host", "intra_host"], int]


@dataclass(frozen=True)
class Transfer:
    """Rows of K/V that this rank sends to ``peer`` or receives from it.

    Attributes:
        peer: a rank of the ring. In an intra-host hop it is this rank itself if an inter-host hop brought it the rows.
        owner: the rank of the ring whose shard has the rows. The sender is another rank if an inter-host hop brought it
            the rows.
        owner_rows: the rows, as indices into the owner's shard.
        sender_rows: the same rows, as indices into the sender's tensor: its shard, or the owner's rows that an
            inter-host hop brought it.
    """

    peer: int
    owner: int
    owner_rows: RowSpans
    sender_rows: RowSpans


class ByPeer:
    """The messages of transfers: the transfers of one peer form one message, in their order.

    Attributes:
        rows: the rows of the message of each peer.
        places: for each transfer the peer, and the first row and the number of rows in its message.
    """

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self.rows: dict[int, int] = {}
        self.places: list[tuple[int, int, int]] = []
        for transfer in transfers:
            start, count = self.rows.get(transfer.peer, 0), transfer.owner_rows.count
            self.places.append((transfer.peer, start, count))
            self.rows[transfer.peer] = start + count


@dataclass(frozen=True, eq=False)
class Hop:
    """The K/V rows that one rank sends and receives at a time, inside its host or between hosts.

    Attributes:
        receives: the transfers that this rank receives.
        sends: the transfers that this rank sends. The transfers to one peer form one message, in this order.
        rounds: the peers, round by round. The messages of one round are sent and received together.
    """

    receives: tuple[Transfer, ...] = ()
    sends: tuple[Transfer, ...] = ()
    rounds: Sequence[Sequence[int]] = ()

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent or received."""
        return not self.receives and not self.sends

    @cached_property
    def received(self) -> ByPeer:
        """The transfers that this rank receives, in one message from each peer."""
        return ByPeer(self.receives)

    @cached_property
    def sent(self) -> ByPeer:
        """The transfers that this rank sends, in one message to each peer."""
        return ByPeer(self.sends)

    def __str__(self) -> str:
        words = [f"receive {len(t.owner_rows)} rows of {t.owner} from {t.peer}" for t in self.receives]
        return ", ".join([*words, *(f"send {len(t.owner_rows)} rows to {t.peer}" for t in self.sends)]) or "no messages"


NO_HOP = Hop()


@dataclass(frozen=True, eq=False)
class Step:
    """One step of one rank: messages, and the attention of some heads to the keys that the messages bring.

    A plan's steps have the fields up to ``ends_inter_host``. A ``Program`` sets the other fields.

    Attributes:
        index: 0 for the rank's own keys; the same step has the same index on every rank.
        keys: the keys of the step; None if no query of this rank sees any of them.
        intra_host: the messages that bring the keys, between the ranks of one host.
        inter_host: the messages between hosts that bring the rows which ``intra_host`` sends; None if it sends the
            senders' own rows.
        starts_inter_host: whether this is the first step that needs the rows of ``inter_host``.
        ends_inter_host: whether it is the last one. The gradients of these rows then go back to their owners.
        q_heads, kv_heads: the heads of the step, as indices into q and into k and v; None if it has all heads.
        chunks: the chunks of heads that the step covers.
        attends: whether a kernel runs: some query sees a key.
        is_last: whether no later step attends with these heads, so that the result is final.
        group: which of the program's plans the step is of.
        posts: the messages that are posted before the kernel of this step, in order: the level, and the number of the
            step in the program that they belong to.
        new_dq, new_dkv: whether backward writes the gradients of these heads, where it otherwise adds to them.
    """

    index: int
    keys: ShardRows | GatheredRows | None = None
    intra_host: Hop = NO_HOP
    inter_host: Hop | None = None
    starts_inter_host: bool = False
    ends_inter_host: bool = False
    q_heads: range | None = None
    kv_heads: range | None = None
    chunks: range = range(1)
    attends: bool = False
    is_last: bool = False
    group: int = 0
    posts: tuple[Post, ...] = ()
    new_dq: bool = False
    new_dkv: bool = False

    def __str__(self) -> str:
        words = [f"step {self.index}: {self.intra_host}" if self.index else "step 0: own keys"]
        if self.starts_inter_host:
            words.append(f"between hosts: {self.inter_host}")
        if self.keys is not None:
            words.append(f"attend to {len(self.keys)} keys")
        if self.q_heads is not None:
            words.append(f"query heads {self.q_heads.start} to {self.q_heads.stop - 1}")
        return "; ".join(words)


class Program:
    """What one rank does in attention with some heads: the steps of its plan, for one chunk of heads after another.

    While one chunk is computed, the next chunk is received. Groups of heads with masks of their own have plans of their
    own, whose steps follow one another.

    Args:
        groups: for each group of the heads, the steps of its plan, each for all heads of the group.
        heads: the heads of q, k and v.
        num_chunks: into how many chunks of heads the messages are divided, if the heads can be divided equally.
        attends: whether this rank has queries. One without queries still sends and receives.
        prefetch: how many steps ahead messages are posted.
        split_own: whether backward computes the second half of the rank's own keys last, while the gradients of the
            last step are returned. In vain where nothing is sent.
        gather: whether the plan is an all-gather.

    Attributes:
        plans: the plans of the groups; none if all heads have one plan.
    """

    plans: tuple[Any, ...] = ()

    def __init__(
        self,
        groups: Sequence[tuple[Heads, Sequence[Step]]],
        heads: Heads,
        num_chunks: int,
        attends: bool,
        prefetch: int,
        split_own: bool,
        gather: bool,
    ) -> None:
        self.heads, self._split_own = heads, split_own
        self.chunks: tuple[Heads, ...] = ()
        self._groups: list[tuple[Heads, slice]] = []  # with their steps
        attends = attends and bool(heads.queries)
        steps: list[Step] = []
        for group, (part, plan) in enumerate(groups):
            chunks = part.chunks(-(-num_chunks // len(groups))) if len(plan) > 1 else (part,)
            numbers = range(len(self.chunks), len(self.chunks) + len(chunks))
            order = [(part, numbers, plan[0])]
            for chunk, number in zip(chunks, numbers, strict=True):
                order += [(chunk, range(number, number + 1), step) for step in plan[1:]]
            last = max((i for i, step in enumerate(plan) if attends and step.keys is not None), default=0)
            self._groups.append((part, slice(len(steps), len(steps) + len(order))))
            self.chunks += chunks
            for of_step, numbers, step in order:
                q_heads, kv_heads = self._of_tensors(of_step)
                steps.append(
                    replace(
                        step,
                        q_heads=q_heads,
                        kv_heads=kv_heads,
                        chunks=numbers,
                        attends=attends and step.keys is not None,
                        is_last=step.index == last,
                        group=group,
                        new_dkv=bool(step.intra_host.receives),
                    )
                )
        posts = _posts(steps, prefetch, gather)
        self.steps = tuple(replace(step, posts=tuple(x)) for step, x in zip(steps, posts, strict=True))

    @cached_property
    def backward_steps(self) -> tuple[Step, ...]:
        """The steps of backward. Where messages are sent, the second half of a group's step 0 comes last."""
        steps: list[Step] = []
        for heads, at in self._groups:
            local, *remote = self.steps[at]
            splits = self._split_own and kv_index(heads) is None and not all(x.intra_host.is_local for x in remote)
            first, *second = heads.split_in_two() if splits else (heads,)
            shared_kv = any(set(half.kv) & set(first.kv) for half in second)
            q_heads, kv_heads = self._of_tensors(first)
            new_dkv = not shared_kv
            steps += [replace(local, q_heads=q_heads, kv_heads=kv_heads, new_dq=True, new_dkv=new_dkv), *remote]
            for half in second:
                q_heads, kv_heads = self._of_tensors(half)
                steps.append(replace(local, q_heads=q_heads, kv_heads=kv_heads, posts=()))
        return tuple(steps)

    def _of_tensors(self, heads: Heads) -> tuple[range | None, range | None]:
        if heads == self.heads:
            return None, None
        return heads.q_range(within=self.heads), heads.kv_range(within=self.heads)

    def __str__(self) -> str:
        lines = []
        for number, step in enumerate(self.steps):
            posts = [f"{level} of {i}" for level, i in step.posts]
            lines.append(f"{number}  {step}" + (f"; post {', '.join(posts)}" if posts else ""))
        return "\n".join(lines)


def _posts(steps: Sequence[Step], prefetch: int, gather: bool) -> list[list[Post]]:
    """For each step, what is posted before its kernel (see "posts" above)."""
    posts: list[list[Post]] = [[] for _ in steps]
    inter_host: deque[Post] = deque(("inter_host", i) for i, step in enumerate(steps) if step.starts_inter_host)
    # The inter-host hops of two steps are under way at a time in an all-gather, of one step in a ring.
    for _ in range(min(2 if gather else 1, len(inter_host))):
        posts[0].append(inter_host.popleft())
    at = 0
    for i in range(1, len(steps)):
        if not steps[i].index:  # the own keys of another group of heads
            continue
        earliest = 0 if not steps[i].starts_inter_host else 1 if gather else i
        at = max(at, i - prefetch, earliest)
        if steps[i].starts_inter_host and inter_host:
            posts[at].append(inter_host.popleft())
        posts[at].append(("intra_host", i))
    return posts
