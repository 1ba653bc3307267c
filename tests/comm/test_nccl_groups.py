"""The exchanges of every schedule end under NCCL's rules, with as many ranks as on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from seqpar import Mask
from seqpar.comm import p2p
from seqpar.comm.waiting import PeerTensor, Pending
from seqpar.kernels.base import Score
from seqpar.placement.heads import Heads
from seqpar.placement.layout import LAYOUTS, Layout, TokenLayout
from seqpar.schedule.plan import AttentionPlan
from seqpar.sharding.spec import AttentionSpec
from seqpar.strategies import call as calls
from seqpar.strategies import ring, transport
from seqpar.strategies.call import AttentionCall, Run

from ..nccl import Group, HangError, Operation, run


def messages_of(plan: AttentionPlan, fails_after: int | None = None) -> list[Group]:
    """The groups of messages that ring attention starts on one rank, in forward and in backward.

    The kernels raise an error after the first ``fails_after`` ones of each.
    """
    groups: list[Group] = []

    def record(sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], link: p2p.Link) -> Pending:
        ranks: Any = link.ranks
        operations = [Operation(True, ranks[peer]) for peer, _ in sends]
        groups.append(operations + [Operation(False, ranks[peer]) for peer, _ in receives])
        return Pending()

    number = 4 if plan.tokens.ring <= 4 else 1  # with few ranks, heads are sent in chunks
    heads = Heads.of_model(number, number)
    counts = {_no_forward: 0, _no_backward: 0}

    def kernel(function: Callable[..., Any], *args: Any) -> Any:
        counts[function] += 1
        if fails_after is not None and counts[function] > fails_after:
            raise MemoryError
        return function(*args)

    forward, backward = partial(kernel, _no_forward), partial(kernel, _no_backward)
    stub = SimpleNamespace(forward=forward, backward=backward, reads_delta=False)
    first = plan.rank // plan.per_host * plan.per_host
    within: Any = range(first, first + plan.per_host)
    across: Any = range(plan.rank % plan.per_host, plan.tokens.ring, plan.per_host)
    none: Any = None
    links = p2p.Links(None, p2p.Link(within, None, None, none, 0), p2p.Link(across, None, None, none, 0))
    call: Any = AttentionCall(
        placement=SimpleNamespace(chunks=None, tokens=plan.tokens),
        plan=plan, spec=AttentionSpec(), heads=heads, score=Score(1.0), errors=[],
    )  # fmt: skip
    tokens = len(plan.tokens.ring_positions(plan.rank))
    x, lse = torch.zeros(1, tokens, number, 1), torch.zeros(1, number, tokens)
    with (
        mock.patch.dict(calls._MIN_CHUNK_BYTES, cpu=1),
        mock.patch.object(transport, "exchange", record),
        mock.patch.object(calls, "links_of", return_value=links),
        mock.patch.object(calls, "BackendChoice", return_value=SimpleNamespace(backend=lambda *args, **options: stub)),
    ):
        run = Run(call, heads, x, x, x)
        ring.ring_forward(run, x, x, x)
        ring.ring_backward(run, x, None, x, x, x, x, lse)
    return [group for group in groups if group]


def _no_forward(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q, q[..., 0].transpose(1, 2)


def _no_backward(*args: Any, **options: Any) -> None:
    pass


def documents(seq_len: int, length: int) -> Mask:
    """Documents of ``length`` tokens, with every seventh boundary left out."""
    boundaries = [b for i, b in enumerate(range(0, seq_len, length)) if i % 7 != 3]
    return Mask.documents([*boundaries, seq_len])


def check(mask: Mask, ranks: int, layout: Layout, gather: bool, per_host: int | None = None) -> None:
    """Run the exchanges of all ranks, those inside a host and those between hosts one after another.

    They have two communicators and so two streams. What ends in one queue ends in two.
    """
    sharding = TokenLayout(ranks * 16, layout, ring=ranks)
    plans = [AttentionPlan(mask, sharding, rank, gather, per_host) for rank in range(ranks)]
    if plans[0].dense:
        return  # a collective, in which all ranks do the same
    programs = [messages_of(plan) for plan in plans]
    assert max((len(group) for program in programs for group in program), default=0) <= 32
    run(programs)


@pytest.mark.parametrize(
    ("ranks", "per_host", "layout"),
    [(*hosts, layout) for hosts in ((2, 2), (3, 3), (4, 2), (8, 8), (9, 9), (8, 2), (8, 4)) for layout in LAYOUTS],
    ids=str,
)
@pytest.mark.parametrize("gather", [True, False], ids=["all_gather", "ring"])
def test_exchanges_end(ranks: int, per_host: int, layout: Layout, gather: bool) -> None:
    tokens = ranks * 16
    for mask in (Mask.causal(), documents(tokens, 24), Mask.sliding_window(50, 25), documents(tokens, 250)):
        check(mask, ranks, layout, gather, per_host)


@pytest.mark.parametrize("gather", [True, False], ids=["all_gather", "ring"])
@pytest.mark.parametrize("per_host", [8, 4])
def test_exchanges_go_on_after_an_error(gather: bool, per_host: int) -> None:
    """A rank whose kernel raises sends and receives what it would have otherwise, until the end of the call."""
    for mask in (Mask.causal(), documents(128, 24)):
        plan = AttentionPlan(mask, TokenLayout(128, "zigzag", ring=8), 5, gather, per_host)
        for fails_after in (0, 1, 2):
            assert messages_of(plan, fails_after) == messages_of(plan)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [8, 9])
def test_exchanges_of_random_documents_end(ranks: int, seed: int) -> None:
    """Documents that span some ranks: each rank has messages in some of the steps only."""
    tokens = ranks * 16
    inner = torch.randint(1, tokens, (5,), generator=torch.Generator().manual_seed(seed)).sort().values
    for layout in LAYOUTS:
        check(Mask.documents([0, *inner.tolist(), tokens]), ranks, layout, gather=False)


@pytest.mark.slow
@pytest.mark.thorough(ranks=[72, 128, 96])
@pytest.mark.parametrize(
    ("ranks", "per_host", "layout", "gather", "mask"),
    [
        (72, 72, "zigzag", True, Mask.causal()),
        (40, 8, "striped", False, documents(40 * 16, 24)),
        (128, 128, "contiguous", True, Mask.sliding_window(300, 300)),
        (96, 8, "contiguous", True, Mask.sliding_window(300, 300)),
    ],
    ids=["72", "40 by 8", "128", "96 by 8"],
)
def test_exchanges_end_on_many_ranks(ranks: int, per_host: int, layout: Layout, gather: bool, mask: Mask) -> None:
    check(mask, ranks, layout, gather, per_host)


@pytest.mark.parametrize("ranks", [72, 128])
def test_one_group_for_all_peers_hangs(ranks: int) -> None:
    """What is wrong with the obvious all-gather under a mask: all messages in one group, nearest peers first."""
    sharding = TokenLayout(ranks * 64, "zigzag", ring=ranks)
    programs: list[list[Group]] = []
    for rank in range(ranks):
        hop = AttentionPlan(Mask.causal(), sharding, rank, gather=True)[1].intra_host
        sends, receives = ({t.peer for t in x} for x in (hop.sends, hop.receives))
        distances = range(1, ranks)
        group = [Operation(True, p) for p in ((rank + d) % ranks for d in distances) if p in sends for _ in "kv"]
        group += [Operation(False, p) for p in ((rank - d) % ranks for d in distances) if p in receives for _ in "kv"]
        programs.append([group])
    with pytest.raises(HangError):
        run(programs)


def test_a_missing_end_hangs() -> None:
    with pytest.raises(HangError):
        run([[[Operation(True, 1)]], [[]]])
