"""``seqpar.tiled_loss``: the loss and gradients of one process that computes all logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard

import seqpar
from seqpar import Sharding, tiled_loss

from ..live_bytes import LiveBytes
from ..observe import message_of
from ..pool import Pool, on_ranks
from ..reference import assert_close

BATCH, SEQ_LEN, HIDDEN, VOCABULARY = 2, 37, 8, 50


def problem(dtype: torch.dtype, seed: int, capped: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """A head, hidden states and labels, of which some do not count."""
    torch.manual_seed(seed)
    cap: list[nn.Module] = [nn.Tanh()] if capped else []
    head = nn.Sequential(nn.Linear(HIDDEN, VOCABULARY), *cap).to(dtype)
    labels = torch.randint(VOCABULARY, (BATCH, SEQ_LEN))
    labels[0, :20], labels[1, 5] = -100, -100
    return head, torch.randn(BATCH, SEQ_LEN, HIDDEN).to(dtype), labels


def expected(head: nn.Module, hidden: Tensor, labels: Tensor) -> list[Tensor]:
    head.double()
    x = hidden.double().requires_grad_()
    loss = F.cross_entropy(head(x).flatten(0, 1), labels.flatten())
    return [loss.detach(), *torch.autograd.grad(loss, [x, *head.parameters()])]


@on_ranks
def found(group: ProcessGroup, dtype: torch.dtype, seed: int, capped: bool, how: str, tokens: int) -> list[Tensor]:
    """The loss, the gradient of the whole hidden states, and the gradients of the head."""
    head, hidden, labels = problem(dtype, seed, capped)
    sharding = Sharding(SEQ_LEN, "zigzag", group=group)
    calls: list[int] = []
    head.register_forward_hook(lambda *_: calls.append(1))
    if how == "fsdp2":
        fully_shard(head, mesh=DeviceMesh.from_group(group, "cpu"))
    x = sharding.shard(hidden).requires_grad_()
    loss = tiled_loss(head, x, sharding.shard(labels), tokens=tokens, sharding=sharding)
    loss.backward()
    assert len(calls) == 1
    if how != "fsdp2":
        seqpar.sync_gradients(head, group=group)
    grads = [p.grad.full_tensor() if how == "fsdp2" else p.grad for p in head.parameters()]  # type: ignore[union-attr]
    assert x.grad is not None
    return [loss.detach(), sharding.unshard(x.grad) / group.size(), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_loss_and_gradients_of_one_process(pool: Pool, world: int) -> None:
    seed = int(torch.randint(1 << 30, ()))
    cases: list[tuple[torch.dtype, bool, str, int]] = [
        (torch.float64, False, "plain", 7),
        (torch.float32, True, "plain", 1000),
    ]
    cases += [(torch.float32, False, "fsdp2", 3)] if world == 2 else [(torch.bfloat16, False, "plain", 2)]
    for dtype, capped, how, tokens in cases:
        head, hidden, labels = problem(dtype, seed, capped)
        wanted = expected(head, hidden, labels)
        for by_rank in pool.run(world, found, dtype, seed, capped, how, tokens):
            for x, y in zip(by_rank, wanted, strict=True):
                assert_close(x, y, dtype)


def test_only_one_tile_of_logits_exists() -> None:
    tokens, vocabulary, tile = 512, 4096, 32
    head = nn.Linear(HIDDEN, vocabulary)
    hidden, labels = torch.randn(1, tokens, HIDDEN, requires_grad=True), torch.randint(vocabulary, (1, tokens))
    with LiveBytes() as live:
        tiled_loss(head, hidden, labels, tokens=tile, group=None).backward()
    logits = 4 * tile * vocabulary
    assert live.peak < 5 * logits < 4 * tokens * vocabulary  # logits, their softmax, its gradient, and the weights'


def test_bad_input() -> None:
    head, hidden, labels = problem(torch.float32, 0, False)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "head", lambda: tiled_loss(F.linear, hidden, labels)),
        (ValueError, r"hidden: shape \(37, 8\)", lambda: tiled_loss(head, hidden[0], labels)),
        (ValueError, "hidden: shape", lambda: tiled_loss(head, hidden, labels[:, 1:])),
        (TypeError, "labels=list", lambda: tiled_loss(head, hidden, labels.tolist())),
        (ValueError, "tokens=0", lambda: tiled_loss(head, hidden, labels, tokens=0)),
    ]
    for kind, text, call in wrong:
        with pytest.raises(kind, match=text):
            call()
    assert "forward" not in vars(head)


@on_ranks
def errors_of_rank_1(group: ProcessGroup) -> list[str]:
    """What the ranks say if rank 1 passes another head, and hidden states of other shapes."""
    head, hidden, labels = problem(torch.float32, 0, False)
    odd = group.rank() == 1
    given: list[Any] = [
        (F.linear if odd else head, hidden, labels),
        (head, hidden[:, odd:], labels),
        (head, hidden[..., odd:], labels),
    ]
    return [message_of(partial(tiled_loss, *arguments, group=group)) for arguments in given]


def test_an_error_of_one_rank_is_raised_on_all(pool: Pool) -> None:
    first, second = pool.run(2, errors_of_rank_1)
    assert all(text.startswith("RuntimeError: rank(s) [1] of the group raised an error") for text in first), first
    assert [text.partition(":")[0] for text in second] == ["TypeError", "ValueError", "RuntimeError"], second
