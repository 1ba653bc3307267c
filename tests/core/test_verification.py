"""``seqpar.verify`` finds no fault in right training steps, and names the planted mistakes of wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Mask

from ..models import sum_gradients
from ..pool import Pool, on_ranks

TOKENS, VOCABULARY = 24, 11
LOCAL = Mask.causal(window=TOKENS)  # stands for attention that was not replaced: each rank attends to its own tokens


class Decoder(nn.Module):
    """Embeddings of tokens and positions, one attention, one head; labels of -100 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 16), nn.Embedding(TOKENS, 16)
        self.stem, self.qkv, self.head = nn.Linear(16, 16), nn.Linear(16, 48), nn.Linear(16, VOCABULARY)
        self.key_bias = nn.Parameter(torch.randn(2, 8))  # its gradient is zero, but for rounding
        self.dropout = nn.Dropout(0.5)
        self.shifts = self.pools = False

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        sharding: Any = None,
        shards_after_stem: bool = False,
        mask: Mask = Mask.causal(),  # noqa: B008 (an immutable value)
    ) -> Tensor:
        x = self.dropout(self.stem(self.tokens(ids) + self.positions(positions)))
        if self.shifts:
            x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        if shards_after_stem:
            x = sharding.shard(x)
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 8)).unbind(2)
        k = k + self.key_bias
        strategy: Any = "local" if sharding is None else "ring"
        if mask is LOCAL:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            attended = seqpar.attention(q, k, v, strategy=strategy, mask=mask, sharding=sharding)
        x = x + attended.flatten(2)
        logits: Tensor = self.head(x.mean(1, keepdim=True).expand_as(x) if self.pools else x)
        return logits


class Run:
    """One case on one rank: the model, its rows, and the training step with at most one mistake."""

    def __init__(self, group: ProcessGroup, seed: int, mistake: str) -> None:
        torch.manual_seed(seed)
        self.mistake, self.group = mistake, group
        self.sharding = seqpar.Sharding(TOKENS, "zigzag", group=group)
        self.plain = Decoder()
        self.model: nn.Module = self.plain
        self.plain.shifts, self.plain.pools = mistake == "token shift", "pooled" in mistake
        if mistake == "rows":
            torch.manual_seed(seed + 1 + group.rank())
        self.ids = torch.randint(VOCABULARY, (2, TOKENS))
        self.labels = self.ids.roll(-1, 1)
        self.labels[:, -1] = -100
        if mistake == "uneven":
            self.labels[:, 12:18] = -100  # held by rank 1

    def losses(self, logits: Tensor, labels: Tensor, reduction: str = "none") -> Tensor:
        return F.cross_entropy(logits.mT, labels, reduction=reduction)

    def reference(self) -> Tensor:
        logits = self.model(self.ids, torch.arange(TOKENS))
        if self.mistake == "pooled output":
            loss: Tensor = logits.square().mean()
        else:
            loss = self.losses(logits, self.labels, "mean")
        loss.backward()
        return loss

    def step(self) -> Tensor:
        sharding, mistake, stem = self.sharding, self.mistake, "stem" in self.mistake
        labels = sharding.shard(self.labels)
        ids, positions = self.ids, torch.arange(TOKENS)
        if not stem:
            ids = sharding.shard(ids)
            positions = torch.arange(len(ids[0])) if mistake == "positions" else sharding.positions()
        if mistake == "labels":
            labels = ids.roll(-1, 1)
        mask = {"mask": Mask.full(), "not replaced": LOCAL}.get(mistake, Mask.causal())
        logits = self.model(ids, positions, sharding, stem, mask)
        gradients: Any = "sum" if mistake == "averaged" else "mean"
        if mistake == "uneven":
            loss = self.losses(logits, labels, "mean")
        else:
            losses = self.losses(logits, labels)
            counted = labels.clamp(min=0) if mistake == "counted" else labels
            loss = seqpar.token_loss(losses, counted, sharding=sharding, gradients=gradients)
        if "shares" in mistake:
            loss = self.losses(logits, labels).sum() / (self.labels != -100).sum()
        if mistake == "term":  # of each rank's own weight
            loss = loss + 0.1 * (1 + self.group.rank()) * self.plain.head.weight.square().sum()
        if mistake == "pooled output":
            loss = logits.square().mean()
        if mistake.startswith("divisor"):
            loss = loss / float(mistake.split()[-1])
        loss.backward()
        if mistake == "summed":
            for p in self.model.parameters():
                dist.all_reduce(p.grad, group=self.group)
        elif mistake == "shares, summed":
            seqpar.sync_gradients(self.model, group=self.group, reduce="sum")
        elif mistake not in ("not averaged", "shares, not summed", "wrapper that sums", "FSDP1", "FSDP2"):
            seqpar.sync_gradients(self.model, group=self.group)
        if mistake == "two factors":
            for factor, weight in enumerate([self.plain.head.weight, self.plain.stem.weight], start=2):
                assert weight.grad is not None
                weight.grad.mul_(factor)
        if mistake == "no gradient" and self.group.rank() == 1:
            self.plain.head.weight.grad = None
        return loss


# What str(report) says of each mistake, and which gradients it names.
MISTAKES = {
    "averaged": "gradients were averaged where their sum is due",
    "shares": "call seqpar.sync_gradients(model, reduce='sum')",
    "shares, not summed": "each rank has a share of the loss and of the gradient",
    "not averaged": "the step does not average them: call seqpar.sync_gradients",
    "summed": "2 ranks were summed where their mean is due",
    "wrapper that sums": "if a wrapper sums, pass token_loss gradients='sum'",
    "term": "a term of the loss differs between ranks",
    "uneven": "take the loss from seqpar.token_loss",
    "rows": "the ranks hold different rows",
    "positions": "which the step did not ask for",
    "labels": "labels that were shifted after",
    "mask": "another mask",
    "token shift": "tokens mixed by something that is not attention",
    "pooled": "such as a convolution or a pooled mean",
    "pooled output": "otherwise, such as a pooled output, unshard them first",
    "divisor 2": "every gradient, and the loss, is 0.5 times one device's: the loss divides by another number",
    "divisor 0.5": "every gradient, and the loss, is 2 times one device's: the loss divides by another number",
    "divisor 3": "the loss divides by another number",
    "not replaced": "the step computed no attention of seqpar",
    "counted": "the ignore_index of the reference",
    "two factors": "it is 3 times one device's",
    "no gradient": "some rank, or one device, has no gradient for head.weight",
}


@on_ranks
def reports(group: ProcessGroup, seed: int) -> dict[str, tuple[bool, str]]:
    found = {}
    for name in ("", "stem", "DDP", "FSDP1", "FSDP2", "shares, summed", *MISTAKES):
        run = Run(group, seed, name)
        if name in ("DDP", "averaged", "wrapper that sums"):
            run.model = wrapper = DistributedDataParallel(run.plain, process_group=group)
            if name == "wrapper that sums":
                sum_gradients(wrapper, group)
        if name == "FSDP1":
            cpu = torch.device("cpu")
            run.model = FullyShardedDataParallel(run.plain, group, device_id=cpu, use_orig_params=True)
        if name == "FSDP2":
            fully_shard(run.plain, mesh=DeviceMesh.from_group(group, "cpu"))
        before = [p.grad for p in run.plain.parameters()]
        report = seqpar.verify(run.model, run.step, run.reference, group=group)
        assert before == [p.grad for p in run.plain.parameters()]
        assert run.plain.dropout.training
        found[name] = report.ok, str(report)
    return found


@pytest.mark.slow
def test_right_steps_and_planted_mistakes(pool: Pool) -> None:
    by_rank = pool.run(2, reports, torch.seed() % 2**31)
    assert by_rank[0] == by_rank[1]  # the report is the same on every rank
    for name, (ok, text) in by_rank[0].items():
        if name in MISTAKES:
            assert not ok and MISTAKES[name] in text, (name, text)
        else:
            assert ok and "equal to one device" in text, (name, text)


def test_another_model_as_reference_and_the_error() -> None:
    """``step`` may take the model; with ``raise_on_error`` the report is the error's."""

    def step(factor: float) -> Callable[[nn.Module], Tensor]:
        def run(model: nn.Module) -> Tensor:
            loss: Tensor = model(torch.ones(2, 4)).square().mean() * factor
            loss.backward()
            return loss

        return run

    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    other.load_state_dict(model.state_dict())
    assert seqpar.verify(model, step(1.0), step(1.0), reference_model=other).ok
    with pytest.raises(seqpar.VerificationError, match="not what one device computes") as error:
        seqpar.verify(model, step(1.5), step(1.0), reference_model=other, raise_on_error=True)
    assert {x.name for x in error.value.report.gradients} == {"weight", "bias"}


def test_nan_gradient_differs() -> None:
    model = nn.Linear(4, 1)

    def reference() -> Tensor:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    def step() -> Tensor:
        loss = reference()
        model.bias.grad = torch.full_like(model.bias, torch.nan)
        return loss

    assert [x.name for x in seqpar.verify(model, step, reference).gradients] == ["bias"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": 3}, "model=int"),
        ({"step": 3}, "step=3: expected a function"),
        ({"reference": lambda: None}, "returned NoneType; expected the loss"),
        ({"tolerance": "x"}, "tolerance"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        seqpar.verify(**{"model": nn.Linear(1, 1), "step": lambda: 1.0, "reference": lambda: 1.0, **arguments})
