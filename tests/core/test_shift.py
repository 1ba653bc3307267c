"""``seqpar.shift``: the rows and gradients of one device's shift, and the bytes that are sent."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar
from examples import draft
from seqpar import Mask, Sharding, shift
from seqpar.placement.layout import LAYOUTS, Layout

from ..pool import OwnPool, Pool, mesh_of, on_ranks, start
from ..reference import assert_close
from ..strategies.test_bytes import watch_one

BATCH, SEQ_LEN = 2, 23
DOCUMENTS = {
    "one": None,
    "packed": Mask.documents([0, 1, 9, 10, SEQ_LEN]),
    "rows": Mask.documents([[0, 4, SEQ_LEN], [0, 11, 12, SEQ_LEN]]),
    "window": Mask.causal() & Mask.sliding_window(3, 0),
}
STEPS: tuple[tuple[int, ...], ...] = ((1,), (-1,), (1, 2, 3), (0, -5, 7), (40, -40))
DTYPES = torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.int16, torch.float8_e5m2


def expected(x: Tensor, step: int, mask: Mask | None, fill: float) -> Tensor:
    """``x [b, t, ...]`` shifted on one device, token by token."""
    starts = [(0,)] if mask is None else mask.starts
    rows = []
    for row in range(x.shape[0]):
        of_row = starts[row % len(starts)]
        document = [sum(start <= p for start in of_row) for p in range(x.shape[1])]
        none = torch.full_like(x[row, 0], fill)
        tokens = []
        for p in range(x.shape[1]):
            inside = 0 <= p + step < x.shape[1] and document[p + step] == document[p]
            tokens.append(x[row, p + step] if inside else none)
        rows.append(torch.stack(tokens))
    return torch.stack(rows)


def check(group: ProcessGroup, layout: Layout, seed: int) -> None:
    torch.manual_seed(seed)
    where: dict[str, Any] = {"mesh": mesh_of(1, 4, 2, 1)} if group.size() == 8 else {"group": group}
    sharding = Sharding(SEQ_LEN, layout, **where)
    dtypes = cycle(DTYPES)
    for of_mask, mask in DOCUMENTS.items():
        for steps in STEPS:
            dtype = next(dtypes)
            x = (torch.randn(BATCH, SEQ_LEN, 3, dtype=torch.float64) * 5).to(dtype)
            fill = 0.0 if dtype == torch.bool else -3.0
            found = shift(sharding.shard(x), steps, sharding=sharding, mask=mask, fill=fill)
            for step, y in zip(steps, found, strict=True):
                wanted = sharding.shard(expected(x, step, mask, fill))
                assert y.dtype == dtype and y.shape == wanted.shape
                assert torch.equal(y.view(torch.uint8), wanted.view(torch.uint8)), (of_mask, step, dtype)
        x = torch.randn(BATCH, SEQ_LEN, 3, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(3, BATCH, SEQ_LEN, 3, dtype=torch.float64)
        total = sum((expected(x, step, mask, 0) * w).sum() for step, w in zip((1, 2, -3), weights, strict=True))
        (gradient,) = torch.autograd.grad(torch.as_tensor(total), x)
        x_local = sharding.shard(x.detach()).requires_grad_()
        outs = shift(x_local, (1, 2, -3), sharding=sharding, mask=mask)
        local = sum((y * sharding.shard(w)).sum() for y, w in zip(outs, weights, strict=True))
        (found_gradient,) = torch.autograd.grad(torch.as_tensor(local), x_local)
        torch.testing.assert_close(found_gradient, sharding.shard(gradient), rtol=1e-14, atol=1e-14)
    # Other dimensions, and a tensor without a batch.
    x = torch.randn(SEQ_LEN, 3)
    assert torch.equal(
        shift(sharding.shard(x, 0), sharding=sharding, dim=0), sharding.shard(expected(x[None], 1, None, 0)[0], 0)
    )
    heads_first = torch.randn(BATCH, 3, SEQ_LEN, 2)
    wanted = expected(heads_first.transpose(1, 2), 2, DOCUMENTS["rows"], 0).transpose(1, 2)
    found_one = shift(sharding.shard(heads_first, -2), 2, sharding=sharding, mask=DOCUMENTS["rows"], dim=-2)
    assert torch.equal(found_one, sharding.shard(wanted, -2))


@pytest.mark.thorough(world=[2, 3, 8])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_equal_to_one_device(pool: Pool, world: int) -> None:
    for layout in LAYOUTS:
        pool.run(world, check, layout, int(torch.randint(1 << 30, ())))


def sent(group: ProcessGroup, layout: Layout, steps: tuple[int, ...], documents: list[int] | None) -> int:
    """The bytes that this rank sends for rows of eight bytes."""
    sharding = Sharding(64, layout, group=group)
    mask = None if documents is None else Mask.documents(documents)
    x = sharding.shard(torch.arange(64)[None])
    traced, handed_over, *_ = watch_one(lambda: shift(x, steps, sharding=sharding, mask=mask))
    assert traced == handed_over
    return traced


def test_one_row_for_each_border(pool: Pool) -> None:
    def rows(layout: Layout, steps: tuple[int, ...], documents: list[int] | None = None) -> list[int]:
        return [n // 8 for n in pool.run(4, sent, layout, steps, documents)]

    assert rows("contiguous", (1,)) == [0, 1, 1, 1]
    assert rows("contiguous", (1, 2, 3)) == [0, 3, 3, 3]  # one exchange: a row that two steps need is sent once
    assert rows("contiguous", (-2,)) == [2, 2, 2, 0]
    assert rows("contiguous", (1,), [0, 16, 40, 64]) == [0, 0, 1, 1]  # nothing at the ends of documents
    assert rows("zigzag", (1,)) == [1, 2, 2, 1]
    assert sum(rows("striped", (1,))) == 63


def test_bad_input() -> None:
    sharding, x = Sharding(8), torch.zeros(2, 8)
    bad: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "by=1.5", lambda: shift(x, 1.5, sharding=sharding)),
        (ValueError, r"by=\(\)", lambda: shift(x, (), sharding=sharding)),
        (TypeError, "sharding=8", lambda: shift(x, sharding=8)),
        (TypeError, "mask=list", lambda: shift(x, sharding=sharding, mask=[0, 8])),
        (ValueError, "7 tokens|seq_len", lambda: shift(x[:, :7], sharding=sharding)),
        (ValueError, "fill=-100", lambda: shift(x.bool(), sharding=sharding, fill=-100)),
        (ValueError, "fill=0.5", lambda: shift(x.long(), sharding=sharding, fill=0.5)),
        (ValueError, "3 batch rows", lambda: shift(x, sharding=sharding, mask=Mask.documents([[0, 8]] * 3))),
        (ValueError, "dim", lambda: shift(x, sharding=sharding, dim=4)),
    ]
    for kind, text, call in bad:
        with pytest.raises(kind, match=text):
            call()
    assert seqpar.shift(x, sharding=sharding).shape == x.shape


@on_ranks
def draft_losses(group: ProcessGroup, port: int, run: str) -> list[float]:
    start(port, run, group.rank(), group.size())
    return draft.train(seqpar.init_mesh(ring=-1, device_type="cpu"), steps=4)


def test_a_draft_model_has_the_losses_of_one_process(own: OwnPool) -> None:
    one, *others = (own.pool.run(world, draft_losses, own.port, f"draft {world}") for world in (1, 2, 4))
    for by_rank in others:
        assert all(losses == by_rank[0] for losses in by_rank)
        assert_close(by_rank[0], one[0])
