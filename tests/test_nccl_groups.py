"""The exchanges of every schedule end under NCCL's rules, at the scale of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from seqpar import Mask
from seqpar.comm.p2p import Message, Pending
from seqpar.heads import Heads
from seqpar.kernels.base import Score
from seqpar.layout import LAYOUTS, Layout
from seqpar.schedule import AttentionPlan, SequenceSharding
from seqpar.strategies import ring
from seqpar.strategies.call import AttentionCall

from .nccl import Group, HangError, Operation, run


def messages_of(plan: AttentionPlan) -> list[Group]:
    """The groups of messages that ring attention starts on one rank, in forward and in backward."""
    groups: list[Group] = []

    def record(sends: Sequence[Message], receives: Sequence[Message], ranks: Any) -> Pending:
        groups.append([Operation(True, peer) for peer, _ in sends] + [Operation(False, peer) for peer, _ in receives])
        return Pending()

    heads = Heads.of_model(1, 1)
    stub = SimpleNamespace(forward=_no_forward, backward=_no_backward, reads_delta=False)
    call: Any = AttentionCall(
        groups=SimpleNamespace(ring=object(), ring_rank=plan.rank, gather=plan.gather, chunks=1),
        sharding=plan.sharding, plan=plan, score=Score(1.0), backend="auto", deterministic=False, heads=heads,
        return_lse=False,
    )  # fmt: skip
    tokens = len(plan.sharding.ring_positions(plan.rank))
    x, lse = torch.zeros(1, tokens, 1, 1), torch.zeros(1, 1, tokens)
    with (
        mock.patch.object(ring, "exchange", record),
        mock.patch.object(ring, "make_ready"),
        mock.patch.object(ring, "select", return_value=stub),
    ):
        ring.ring_forward(call, heads, x, x, x)
        ring.ring_backward(call, heads, x, None, x, x, x, x, lse)
    return [group for group in groups if group]


def _no_forward(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return q, q[..., 0].transpose(1, 2)


def _no_backward(*args: Any, **options: Any) -> None:
    pass


def documents(seq_len: int, length: int) -> Mask:
    """Documents of ``length`` tokens, with every seventh boundary left out."""
    boundaries = [b for i, b in enumerate(range(0, seq_len, length)) if i % 7 != 3]
    return Mask.documents([*boundaries, seq_len])


def check(mask: Mask, ranks: int, layout: Layout, gather: bool) -> None:
    sharding = SequenceSharding(ranks * 16, layout, ring=ranks)
    plans = [AttentionPlan(mask, sharding, rank, gather) for rank in range(ranks)]
    if plans[0].dense:
        return  # a collective, in which all ranks do the same
    programs = [messages_of(plan) for plan in plans]
    assert max((len(group) for program in programs for group in program), default=0) <= 32
    run(programs)


@pytest.mark.parametrize("ranks", [8, 9, pytest.param(72, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("gather", [True, False], ids=["all_gather", "ring"])
def test_exchanges_end(ranks: int, layout: Layout, gather: bool) -> None:
    tokens = ranks * 16
    masks = [Mask.causal(), documents(tokens, 24), Mask.sliding_window(50, 25), documents(tokens, 250)]
    for mask in masks[: 4 if ranks < 10 else 2]:
        check(mask, ranks, layout, gather)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [8, 9])
def test_exchanges_of_random_documents_end(ranks: int, seed: int) -> None:
    """Documents that span some ranks: each rank has messages in some of the steps only."""
    tokens = ranks * 16
    inner = torch.randint(1, tokens, (5,), generator=torch.Generator().manual_seed(seed)).sort().values
    for layout in LAYOUTS:
        check(Mask.documents([0, *inner.tolist(), tokens]), ranks, layout, gather=False)


@pytest.mark.slow
def test_exchanges_end_at_1024_ranks() -> None:
    check(Mask.sliding_window(300, 300), 1024, "contiguous", gather=True)


@pytest.mark.parametrize("ranks", [72, 128])
def test_one_group_for_all_peers_hangs(ranks: int) -> None:
    """What is wrong with the obvious all-gather under a mask: all messages in one group, nearest peers first."""
    sharding = SequenceSharding(ranks * 64, "zigzag", ring=ranks)
    programs: list[list[Group]] = []
    for rank in range(ranks):
        step = AttentionPlan(Mask.causal(), sharding, rank, gather=True)[1]
        sends, receives = ({t.peer for t in transfers} for transfers in (step.sends, step.receives))
        distances = range(1, ranks)
        group = [Operation(True, p) for p in ((rank + d) % ranks for d in distances) if p in sends for _ in "kv"]
        group += [Operation(False, p) for p in ((rank - d) % ranks for d in distances) if p in receives for _ in "kv"]
        programs.append([group])
    with pytest.raises(HangError):
        run(programs)


def test_a_missing_end_hangs() -> None:
    with pytest.raises(HangError):
        run([[[Operation(True, 1)]], [[]]])
