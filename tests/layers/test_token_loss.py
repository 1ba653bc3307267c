"""``token_loss``: one device's mean over the labels that count, on every rank, whose gradients are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import seqpar

from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close

IGNORED = -100


def losses_and_labels(seq_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``[2, seq_len]`` each: half of the labels do not count, among them all of the first tokens, and NaN losses."""
    made = torch.Generator().manual_seed(seq_len)
    losses = torch.rand(2, seq_len, generator=made, dtype=torch.float64).to(dtype)
    labels = torch.randint(10, (2, seq_len), generator=made)
    labels[torch.rand(2, seq_len, generator=made) < 0.4] = IGNORED
    labels[:, : seq_len // 3] = IGNORED  # under a contiguous layout, the first ranks have no label that counts
    losses[:, 0] = torch.nan
    return losses, labels


@on_ranks
def compute(group: ProcessGroup, seq_len: int, layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    losses, labels = losses_and_labels(seq_len, dtype)
    sharding: dict[str, Any] = {"group": group, "layout": layout}
    losses_local = seqpar.shard(losses, **sharding).requires_grad_()
    loss = seqpar.token_loss(losses_local, seqpar.shard(labels, **sharding), group=group)
    loss.backward()
    assert losses_local.grad is not None
    return loss.detach(), seqpar.unshard(losses_local.grad, **sharding) / group.size()  # the mean over the ranks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_loss_of_one_device(pool: Pool, world: int, layout: str, dtype: torch.dtype) -> None:
    losses, labels = losses_and_labels(29, dtype)
    counts = labels != IGNORED
    expected = losses[counts].double().mean()
    for loss, gradient in pool.run(world, compute, 29, layout, dtype):
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        assert_close(loss, expected, loss.dtype)
        assert_close(gradient, counts.to(dtype) / counts.sum())


@on_ranks
def compute_on_a_mesh(group: ProcessGroup) -> Tensor:
    mesh = mesh_of(dp=1, ring=2, ulysses=2, tp=2)
    losses, labels = losses_and_labels(29, torch.float64)
    sharding: dict[str, Any] = {"mesh": mesh, "strategy": "tp_sp"}
    losses, labels = (seqpar.shard(x, layout="contiguous", **sharding) for x in (losses, labels))
    return seqpar.token_loss(losses, labels, mesh=mesh)


def test_tokens_that_are_sharded_over_tp_too(pool: Pool) -> None:
    losses, labels = losses_and_labels(29, torch.float64)
    expected = losses[labels != IGNORED].mean()
    for loss in pool.run(8, compute_on_a_mesh):
        assert_close(loss, expected)


def test_no_label_counts() -> None:
    assert seqpar.token_loss(torch.ones(1, 3), torch.full((1, 3), IGNORED)).isnan()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.ones(1, 3), torch.zeros(1, 4, dtype=torch.int64)), ValueError, r"\(1, 3\), but labels have \(1, 4\)"),
        ((torch.ones(3), torch.zeros(3, dtype=torch.int64)), ValueError, r"expected \[batch, seq_local\]"),
        ((torch.ones(1, 3, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)), TypeError, "losses: expected"),
        ((torch.ones(1, 3), torch.ones(1, 3)), TypeError, "labels: expected an integer tensor"),
        ((torch.ones(1, 3), torch.ones(1, 3).to(torch.uint16)), TypeError, r"uint16; convert it with labels\.long"),
    ],
)
def test_bad_input(arguments: tuple[Any, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        seqpar.token_loss(*arguments)


def test_gradients_that_are_no_choice() -> None:
    how: Any = "average"
    with pytest.raises(ValueError, match="gradients='average': did you mean"):
        seqpar.token_loss(torch.ones(1, 3), torch.zeros(1, 3, dtype=torch.int64), gradients=how)


@on_ranks
def compute_unlike(group: ProcessGroup, what: str) -> str:
    odd = group.rank() == 1
    losses = torch.ones(1, 3, dtype=torch.float64 if what == "dtype" and odd else torch.float32)
    labels = torch.zeros(1, 4 if what == "shape" and odd else 3, dtype=torch.int64)
    try:
        seqpar.token_loss(losses, labels, group=group)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"), [("dtype", ["dtype", "dtype"]), ("shape", ["rank(s) [1]", "losses: shape"])]
)
def test_ranks_that_disagree_all_raise(pool: Pool, what: str, words: list[str]) -> None:
    for said, word in zip(pool.run(2, compute_unlike, what), words, strict=True):
        assert word in said
