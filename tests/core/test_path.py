"""The tables of docs/architecture.md name every function between a call and its kernel, and a call stays short."""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqpar

from ..pool import OwnPool, on_ranks, start

PACKAGE = Path(seqpar.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text()
ROW = re.compile(r"^\| \d+ \| \*?`([\w.]+)`\*? \| `([\w/.]+)` \|", re.MULTILINE)
# The heading of each table, and how many of the package's functions a warm forward calls at most. Comprehensions and
# lambdas are not counted.
MOST_CALLS = {
    "seqpar.ring_attention(q, k, v)": 100,
    "seqpar.ulysses_attention(q, k, v)": 124,
    'seqpar.ParallelAttention("tp_sp", ...)(x_local)': 335,
}
# Forward and backward: of a call on one rank, and of each further step of a ring.
MOST_CALLS_ON_ONE_RANK = 50
MOST_CALLS_OF_A_STEP = 108
MOST_CALLS_IN_SHARED_MEMORY = 620


def stops(heading: str) -> list[str]:
    """The functions of a table, as ``file:function``."""
    table = PAGE.split(f"### `{heading}`")[1].split("\n### ")[0].split("\nBackward runs")[0]
    return [f"{file}:{name.split('.')[-1]}" for name, file in ROW.findall(table)]


@contextmanager
def one_of(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=max(ranks // 2 - 1, 0), world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def profile(call: Callable[[], Any]) -> tuple[int, list[str], list[str]]:
    """Of a warm call: the number of the package's functions, these in order, and the stack above the backend."""
    calls: list[str] = []
    stack: list[str] = []
    to_backend: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if PACKAGE not in path.parents or name.startswith("<"):
            return
        if event == "call":
            stack.append(f"{path.relative_to(PACKAGE).as_posix()}:{name}")
            calls.append(stack[-1])
            if stack[-1] == "kernels/cpu.py:forward" and not to_backend:
                to_backend.extend(stack)
        elif event == "return" and stack:
            stack.pop()

    for _ in range(3):
        call()
    gc.collect()
    gc.disable()  # the end of other tests' objects would be counted
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(calls), calls, to_backend


def layer_on_two_ranks() -> Callable[[], Any]:
    """A call of a tensor-parallel layer on the two ranks of the default group."""
    mesh = seqpar.init_mesh(tp=2, device_type="cpu")
    sharding = seqpar.Sharding(64, mesh=mesh, strategy="tp_sp")
    layer = seqpar.ParallelAttention("tp_sp", hidden_size=32, num_heads=4, mesh=mesh, rope=seqpar.RotaryEmbedding(8))
    x = torch.randn(1, 32, 32)  # [b, s, hidden]
    return lambda: layer(x, sharding=sharding)


def write_zeros(patch: pytest.MonkeyPatch) -> None:
    """A simulated group writes nothing to what a rank receives. Values that are not finite would take another path."""
    patch.setattr(torch, "empty", torch.zeros)
    patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)


@pytest.mark.parametrize("heading", MOST_CALLS)
def test_tables_list_the_path(heading: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zeros(monkeypatch)
    with one_of(2), torch.no_grad():
        if "ParallelAttention" in heading:
            number, calls, _ = profile(layer_on_two_ranks())
            order = [calls.index(stop) for stop in stops(heading)]
            assert order == sorted(order)
        else:
            name = "ring" if "ring" in heading else "ulysses"
            sharding, q = seqpar.Sharding(64, "zigzag"), torch.randn(1, 32, 4, 16)
            number, _, path = profile(lambda: seqpar.attention(q, q, q, strategy=name, sharding=sharding))
            assert path == stops(heading)
    assert number <= MOST_CALLS[heading]


def test_calls_and_steps_stay_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a call nor a step computes again what earlier calls have computed."""
    write_zeros(monkeypatch)
    numbers = []
    for ranks in (1, 4, 8):
        with one_of(ranks):
            sharding, q = seqpar.Sharding(16 * ranks, "zigzag"), torch.randn(1, 16, 4, 16, requires_grad=True)
            call = partial(seqpar.attention, q, q, q, sharding=sharding)
            numbers.append(profile(lambda call=call: call().sum().backward())[0])  # type: ignore[misc]
    assert numbers[0] <= MOST_CALLS_ON_ONE_RANK and numbers[2] - numbers[1] <= 4 * MOST_CALLS_OF_A_STEP, numbers


@on_ranks
def calls_in_shared_memory(group: ProcessGroup, port: int) -> Counter[str]:
    """The least of several calls: one that finds no free block, because the other rank is late, makes another block."""
    start(port, "path", group.rank(), 2)
    with torch.no_grad():
        call = layer_on_two_ranks()
        return min((Counter(profile(call)[1]) for _ in range(5)), key=Counter.total)


def test_the_path_stays_short_in_shared_memory(own: OwnPool) -> None:
    """16 messages to the other rank, in shared memory: so many more functions, whatever the number of its blocks is."""
    for calls in own.pool.run(2, calls_in_shared_memory, own.port, shared_memory=True):
        assert calls.total() <= MOST_CALLS_IN_SHARED_MEMORY, calls.most_common(12)
