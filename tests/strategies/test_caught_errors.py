"""An error in the middle of attention, which the caller catches, leaves no messages behind: the next call is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from seqpar.kernels.cpu import CpuBackend
from seqpar.strategies import call, head_exchange, transport

from ..cases import Batch
from ..pool import on_ranks
from ..reference import assert_close, dense_gradients
from ..strategy_cases import DISTINCT, STRATEGIES

SEQ_LEN, WORLD = 53, 4


@dataclass(frozen=True)
class Case:
    """An error, and the call after it.

    Attributes:
        strategy: a row of ``STRATEGIES``.
        phase: "forward" or "backward", whose kernel raises; after "packing in ", there is no memory for a message.
        at: by rank, in which kernel or message of the call it is raised; None on a rank without an error.
    """

    strategy: str
    phase: str
    at: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.strategy} {self.phase} {self.at}".replace(", ", ",")


class PlantedError(MemoryError):
    pass


@contextmanager
def planted(case: Case, phase: str, rank: int) -> Iterator[None]:
    """In the block, which is a phase of the call, the kernel or message of the case raises."""
    at = case.at[rank]
    if at is None or phase != case.phase.removeprefix("packing in "):
        yield
        return
    owner, name = (transport.Message, "__init__") if case.phase != phase else (CpuBackend, phase)
    real, count = getattr(owner, name), 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count - 1 == at:
            raise PlantedError
        return real(*args, **kwargs)

    with mock.patch.object(owner, name, counting):
        yield


def tensors() -> list[Tensor]:
    """q, k, v and dout of the full sequence."""
    torch.manual_seed(3)
    return [torch.randn(1, SEQ_LEN, heads, 8) for heads in (8, 4, 4, 8)]


def attend(group: ProcessGroup, case: Case, with_error: bool) -> list[Tensor]:
    """out, dq, dk and dv of the full sequence. If ``with_error``, the step ends after the phase that has the error."""
    sharding, planted_in = seqpar.Sharding(SEQ_LEN, "zigzag", group=group), nullcontext[None]()
    *leaves, dout = (sharding.shard(x) for x in tensors())
    q, k, v = (x.requires_grad_() for x in leaves)
    with planted(case, "forward", group.rank()) if with_error else planted_in:
        out = seqpar.attention(q, k, v, sharding=sharding, **STRATEGIES[case.strategy])
    if with_error and not case.phase.endswith("backward"):
        return []
    with planted(case, "backward", group.rank()) if with_error else planted_in:
        out.backward(dout)
    if with_error:
        return []
    return [sharding.unshard(x) for x in (out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None))]


@on_ranks
def attend_after_error(group: ProcessGroup, case: Case) -> tuple[bool, list[Tensor]]:
    """Whether this rank raised, and the results of the next step."""
    with (
        mock.patch.dict(head_exchange.MIN_CHUNK_WORK, cpu=1),  # in chunks of heads
        mock.patch.dict(call._MIN_CHUNK_BYTES, cpu=1),
    ):
        raised = False
        try:
            attend(group, case, with_error=True)
        except (PlantedError, RuntimeError):  # also if another rank has left the call while this rank waited for it
            raised = True
        results = attend(group, case, with_error=False)
    return raised, results


def verify(case: Case, by_rank: list[tuple[bool, list[Tensor]]]) -> None:
    assert any(raised for raised, _ in by_rank)
    q, k, v, dout = tensors()
    visible = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
    expected = dense_gradients(q=q, k=k, v=v, dout=dout, visible=visible)
    for _, results in by_rank:
        for name, x in zip(("out", "dq", "dk", "dv"), results, strict=True):
            assert_close(x, expected[name], torch.float32, name)


@pytest.mark.thorough(shared_memory=[True])
@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shared memory"])
def test_the_next_call_is_right(batch: Batch, shared_memory: bool) -> None:
    """The ranks raise in different kernels, one of them raises alone, or all raise where a message is packed."""
    cases = [
        Case(strategy, phase, at)
        for strategy, phase in product(DISTINCT, ("forward", "backward"))
        for at in ((0, 1, 0, 1), (None, None, 0, None))
    ]
    phases = ("packing in forward", "packing in backward")
    cases += [Case(strategy, phase, (2, 2, 2, 2)) for strategy in ("ring", "all_gather") for phase in phases]
    batch.check(WORLD, attend_after_error, cases, verify, shared_memory=shared_memory)
