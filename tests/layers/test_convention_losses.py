"""The convention of gradients with other losses than a mean over tokens, and with optimizers inside backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Sharding

from ..models import sum_gradients
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close
from .test_convention import HIDDEN, TOKENS, VOCAB, assert_equal, fresh_seed, gradients, rows, two_models, whole


class Terms(nn.Module):
    """A body, a head, and a loss with terms beside the mean over tokens.

    Args:
        term: "penalty": every rank adds it. "learned weight": of the mean over tokens. "distillation": of the whole
            output. "one rank": rank 0 alone has a loss, P times one device's. "weighted": the ranks' losses have other
            weights. "mean of means": the mean over this rank's tokens, of ranks with equally many.
    """

    def __init__(self, term: str) -> None:
        super().__init__()
        self.term = term
        self.body, self.head = nn.Linear(HIDDEN, HIDDEN).double(), nn.Linear(HIDDEN, VOCAB).double()
        self.s = nn.Parameter(torch.tensor([0.3], dtype=torch.float64))
        self.unused = nn.Linear(2, 2).double()

    def forward(self, x: Tensor, labels: Tensor, sharding: Sharding | None, rank: int = 0, ranks: int = 1) -> Tensor:
        if sharding is not None:
            x, labels = sharding.shard(x), sharding.shard(labels)
        y = self.body(x).tanh()
        losses = F.cross_entropy(self.head(y).mT, labels, reduction="none")
        if self.term == "mean of means":
            return losses.mean()
        if sharding is None:
            loss = losses.sum() / (labels != -100).sum()
        else:
            loss = seqpar.token_loss(losses, labels, sharding=sharding)
        if self.term == "penalty":
            loss = loss + 0.1 * self.body.weight.square().sum()
        if self.term == "learned weight":
            loss = (loss * torch.exp(-self.s) + self.s).sum()
        if self.term == "distillation":
            whole = y if sharding is None else sharding.unshard(y)
            loss = loss + (whole.cumsum(1) - 1).square().mean() * self.s.sum()
        if self.term == "one rank":
            loss = loss * (ranks if rank == 0 else 0)
        if self.term == "weighted":
            loss = loss * (rank + 1) if ranks > 1 else loss
        return loss


@on_ranks
def step_with_terms(group: ProcessGroup, seed: int, term: str, how: str) -> None:
    """Two micro-batches with an average after each of them, and one more after that."""
    torch.manual_seed(seed)
    rank, ranks = group.rank(), group.size()
    local, model = Terms(term), Terms(term)
    model.load_state_dict(local.state_dict())
    wrapped: Any = model
    if how == "ddp":
        wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    if how == "fsdp2":
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    sharding = Sharding(12, "zigzag", group=group)
    for _ in range(2):
        x, labels = torch.randn(2, 12, HIDDEN, dtype=torch.float64), torch.randint(VOCAB, (2, 12))
        labels[:, 1:5] = labels[:, 1:5] if term == "mean of means" else -100
        wrapped(x, labels, sharding, rank, ranks).backward()
        weight = (ranks + 1) / 2 if term == "weighted" else 1.0
        (weight * local(x, labels, None)).backward()
        if how != "fsdp2":
            seqpar.sync_gradients(model, group=group)
    if how == "sync":
        seqpar.sync_gradients(model, group=group)
    assert_equal(gradients(model, wrapped), local)


TERMS = ("penalty", "learned weight", "distillation", "one rank", "weighted", "mean of means")


@pytest.mark.parametrize("how", ["sync", "ddp", "fsdp2"])
def test_terms_beside_the_loss_of_the_tokens(pool: Pool, how: str) -> None:
    for term in TERMS:
        pool.run(3 if how == "sync" else 2, step_with_terms, fresh_seed(), term, how)


@on_ranks
def a_sum_instead_of_a_mean(group: ProcessGroup, seed: int, how: str) -> None:
    """Where something sums gradients: losses that are shares of a sum, or a wrapper that sums."""
    torch.manual_seed(seed)
    local, model = two_models("tokens")
    ids, labels = rows(2)
    local(ids, labels, None).backward()
    sharding = Sharding(TOKENS, "zigzag", group=group)
    labels_local = sharding.shard(labels)
    wrapped = DistributedDataParallel(model, process_group=group) if how == "hook" else model

    def losses(*_: Any) -> Tensor:
        hidden = model.layer(model.stem(model.embed(sharding.shard(ids))).tanh(), sharding)
        return F.cross_entropy(model.head(hidden).mT, labels_local, reduction="none")

    vars(model)["forward"] = losses
    if how == "hook":  # DDP with a communication hook that sums
        sum_gradients(wrapped, group)
        seqpar.token_loss(wrapped(), labels_local, sharding=sharding, gradients="sum").backward()
    else:
        (losses().sum() / (labels != -100).sum()).backward()
        seqpar.sync_gradients(model, group=group, reduce="sum")
    assert_equal(gradients(model, wrapped), local)


@pytest.mark.parametrize("how", ["shares", "hook"])
def test_gradients_that_are_summed(pool: Pool, how: str) -> None:
    pool.run(2, a_sum_instead_of_a_mean, fresh_seed(), how)


@on_ranks
def sharded_vocabulary(group: ProcessGroup, seed: int, degrees: tuple[int, int, int, int], how: str) -> None:
    """The losses of a vocabulary that tp shards, with unlike labels over ranks and replicas, and a penalty."""
    torch.manual_seed(seed)
    mesh = mesh_of(*degrees)
    rows, tokens, vocab = degrees[0], 23, 11
    local: Any = nn.ModuleDict(
        {"embedding": nn.Embedding(vocab, HIDDEN), "norm": nn.RMSNorm(HIDDEN), "head": nn.Linear(HIDDEN, vocab)}
    ).double()
    options: Any = {"mesh": mesh, "dtype": torch.float64}
    model: Any = nn.ModuleDict(
        {
            "embedding": seqpar.VocabParallelEmbedding(vocab, HIDDEN, **options),
            "norm": copy.deepcopy(local["norm"]),
            "head": seqpar.VocabParallelHead(HIDDEN, vocab, bias=True, **options),
        }
    )
    model.load_state_dict(local.state_dict())
    sharding = Sharding(tokens, "zigzag", mesh=mesh, strategy="tp_sp")
    if how == "fsdp2":
        for module in model.values():
            fully_shard(module, mesh=mesh["dp"])
    for _ in range(2):
        ids, labels = torch.randint(vocab, (2, rows, tokens)).unbind()
        labels[0, 3:19] = -100
        penalty = 0.1 * local["norm"].weight.square().sum()
        logits = local["head"](local["norm"](local["embedding"](ids)).tanh())
        (F.cross_entropy(logits.mT, labels) + penalty).backward()

        at = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
        ids_local, labels_local = sharding.shard(ids[at]), sharding.shard(labels[at])
        x = model["norm"](model["embedding"](ids_local, sharding)).tanh()
        if how == "logits":
            logits = model["head"](x, None, sharding)
            losses = seqpar.vocab_parallel_cross_entropy(logits, labels_local, vocab, sharding=sharding)
        else:
            losses = model["head"](x, labels_local, sharding)
        loss = seqpar.token_loss(losses, labels_local, sharding=sharding)
        assert_close(loss, F.cross_entropy(local_logits(local, ids).mT, labels))
        (loss + 0.1 * whole(model["norm"].weight).square().sum()).backward()
        seqpar.sync_gradients(model, mesh=mesh)
    assert_equal(gradients(model, model), local)


def local_logits(local: nn.ModuleDict, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = local["head"](local["norm"](local["embedding"](ids)).tanh())
    return logits


@pytest.mark.thorough(how=["fsdp2"])
@pytest.mark.parametrize("how", ["chunks", "logits", "fsdp2"])
def test_losses_of_a_sharded_vocabulary(pool: Pool, how: str) -> None:
    for degrees in [(2, 2, 1, 2), *([(1, 1, 1, 8)] if how == "chunks" else [])]:
        pool.run(8, sharded_vocabulary, fresh_seed(), degrees, how)


def projected(gradient: Tensor, rank: int) -> Tensor:
    """GaLore's update: the gradient in the space of its largest left singular vectors, [rows, columns]."""
    u = torch.linalg.svd(gradient, full_matrices=False)[0][:, :rank]
    return u @ (u.T @ gradient).sign()


@on_ranks
def steps_inside_backward(group: ProcessGroup, seed: int) -> None:
    """GaLore layer by layer, in hooks that also free the gradients, against one device. Two micro-batches a step."""
    torch.manual_seed(seed)
    local, model = two_models("tokens")

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p.sub_(0.01 * (projected(p.grad, 2) if p.dim() == 2 else p.grad))
        p.grad = None

    handle = seqpar.average_in_backward(model, group=group)
    for m in (local, model):
        for p in m.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(hook)
    sharding = Sharding(TOKENS, "zigzag", group=group)
    for _ in range(3):
        ids, labels = rows(2)
        local(ids, labels, None).backward()
        model(ids, labels, sharding).backward()
    for (name, p), q in zip(local.named_parameters(), model.parameters(), strict=True):
        assert_close(q, p, what=name)
    with pytest.raises(ValueError, match="If an optimizer steps inside backward"):
        seqpar.sync_gradients(model, group=group)
    handle.close()


def test_an_optimizer_inside_backward(pool: Pool) -> None:
    pool.run(3, steps_inside_backward, fresh_seed())


@on_ranks
def other_gradients_inside_backward(group: ProcessGroup) -> str:
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    seqpar.average_in_backward(nn.ModuleList([a, b]), group=group)
    try:
        (a if group.rank() else b)(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_with_other_gradients_inside_backward(pool: Pool) -> None:
    assert all(
        "another rank has another parameter's gradient" in x for x in pool.run(2, other_gradients_inside_backward)
    )
