"""``invariant_layers`` and ``exact_sum``: sums that are the same on any number of ranks."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import seqpar
from seqpar import Mask
from seqpar.layers.loss import exact_sum

from ..observe import message_of
from ..pool import Pool, mesh_of, on_ranks
from ..reference import assert_close

HIDDEN, VOCAB = 32, 48
TOKENS = 384  # so that 1, 2, 3, 4 and 8 ranks have a multiple of 16
STRATEGIES = {1: "local", 2: "ring", 3: "context_parallel", 4: "ulysses", 8: "hybrid"}  # by the number of ranks
LAYOUTS = {1: "contiguous", 2: "zigzag", 3: "striped", 4: "zigzag", 8: "contiguous"}


class ScaleNorm(nn.Module):
    """A norm as transformers writes it: its weight and bias are of no class that PyTorch has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = hidden_states.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        return self.weight * (hidden_states * scale.to(hidden_states.dtype)) + self.offset


class PlusOne(nn.LayerNorm):
    """A norm as Nemotron has it."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Scaling(nn.Embedding):
    """An embedding as Gemma has it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.5


class Model(nn.Module):
    """A layer of a transformer with every kind of module that ``invariant_layers`` takes. The embeddings are tied."""

    def __init__(self, strategy: str, **options: Any) -> None:
        super().__init__()
        self.embed = Scaling(VOCAB, HIDDEN, padding_idx=3)
        self.norms = nn.ModuleList([PlusOne(HIDDEN), nn.RMSNorm(HIDDEN), ScaleNorm()])
        self.attention = seqpar.ParallelAttention(strategy, HIDDEN, 4, 2, qk_norm=True, bias=True, **options)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor, mask: Mask, **loss: Any) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(self.norms[0](x), mask=mask)
        x = x + self.down(F.silu(self.up(self.norms[1](x))))
        logits = self.head(self.norms[2](hidden_states=self.norm(x)))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return seqpar.token_loss(losses, labels, **loss)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(VOCAB, (2, 2, TOKENS), generator=torch.Generator().manual_seed(seed))
    ids, labels = drawn.unbind()
    return ids, labels.where(torch.arange(TOKENS) % 5 < 3, -100)


@on_ranks
def train(group: ProcessGroup, dtype: torch.dtype, steps: int, reduce: Any, rows: int = 2) -> dict[str, Tensor]:
    """The losses, and the gradients of the first step. On 8 ranks, two replicas have a batch row each.

    ``reduce``: how ``invariant_layers`` reduces gradients; None without it.
    """
    strategy, where = STRATEGIES[group.size()], dict[str, Any](group=group)
    if group.size() == 8:
        where = {"mesh": mesh_of(dp=2, ring=2, ulysses=2, tp=1)}
        row = where["mesh"].get_local_rank("dp")
    local: dict[str, Any] = {**where, "layout": LAYOUTS[group.size()]}
    torch.manual_seed(0)
    model = Model(strategy, deterministic="invariant", **({} if strategy == "local" else local)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    mask, losses, gradients = Mask.documents([0, 77, TOKENS]), list[Tensor](), dict[str, Tensor]()
    with seqpar.invariant_layers(model, **where, reduce=reduce) if reduce else nullcontext():
        for step in range(steps):
            tokens = [x[row, None] if "mesh" in where else x[:rows] for x in batch(step)]
            ids, labels = (seqpar.shard(x, **local) for x in tokens)
            loss = model(ids, labels, mask, **where, gradients=reduce or "mean")
            loss.backward()
            if not reduce:
                seqpar.sync_gradients(model, **where)
            if not step:
                gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            gradients[f"norm {step}"] = seqpar.clip_grad_norm_(model, 1.0, **where)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return {"losses": torch.stack(losses), **gradients}


def reference(dtype: torch.dtype, compute: torch.dtype) -> dict[str, Tensor]:
    """The first loss and its gradients, on one device without this module."""
    torch.manual_seed(0)
    model = Model("local").to(dtype).to(compute)
    ids, labels = batch(0)
    x = model.embed(ids)
    x = x + model.attention(model.norms[0](x), mask=Mask.documents([0, 77, TOKENS]))
    x = x + model.down(F.silu(model.up(model.norms[1](x))))
    logits = model.head(model.norms[2](model.norm(x))).to(torch.promote_types(compute, torch.float32))
    loss = F.cross_entropy(logits.mT, labels)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def check_bits(found: dict[int, list[dict[str, Tensor]]], dtype: torch.dtype) -> None:
    """All ranks of every number of ranks have the same bits, and the first step is one device's."""
    first, exact, own = found[1][0], reference(dtype, torch.float64), reference(dtype, dtype)
    for ranks, results in found.items():
        for rank, result in enumerate(results):
            unequal = [name for name in first if not torch.equal(result[name], first[name])]
            assert not unequal, (ranks, rank, unequal)
    assert_close(first["losses"][0], exact["loss"], dtype, "loss", own["loss"])
    for name in exact.keys() - {"loss"}:
        assert_close(first[name], exact[name], dtype, name, own[name])


@pytest.mark.thorough(dtype=[torch.float64, torch.float16])
@pytest.mark.parametrize(
    ("dtype", "worlds"),
    [(torch.float32, (1, 3, 4)), (torch.bfloat16, (1, 8)), (torch.float64, (1, 2, 8)), (torch.float16, (1, 3, 8))],
)
def test_a_training_has_the_same_bits_on_any_number_of_ranks(
    pool: Pool, dtype: torch.dtype, worlds: tuple[int, ...]
) -> None:
    steps = 1 if dtype == torch.float16 else 2  # AdamW divides by 0 in float16
    check_bits({ranks: pool.run(ranks, train, dtype, steps, "sum") for ranks in worlds}, dtype)


def test_averaged_gradients(pool: Pool) -> None:
    found = {ranks: pool.run(ranks, train, torch.float32, 2, "mean") for ranks in (1, 2, 3, 4)}
    (of_three, *_) = found.pop(3)  # equal bits are promised on powers of two
    for name, x in of_three.items():
        assert_close(x, found[1][0][name], what=name)
    check_bits(found, torch.float32)


@pytest.mark.thorough
def test_a_hundred_steps(pool: Pool) -> None:
    losses = [pool.run(ranks, train, torch.float32, 100, "sum", 1)[0]["losses"] for ranks in (1, 2, 3, 4)]
    assert all(torch.equal(losses[0], x) for x in losses)
    plain = pool.run(4, train, torch.float32, 10, None, 1)[0]["losses"]
    assert not torch.equal(losses[0][:10], plain)
    assert_close(plain[:3], losses[0][:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_sum(dtype: torch.dtype) -> None:
    """The parts do not depend on the order, nor on the ranks that add them; the sum is right to its last bits."""
    x = torch.randn(9000, dtype=dtype) * 10.0 ** torch.randint(-12, 4, (9000,))
    parts = exact_sum(x)
    for _ in range(5):
        pieces = x[torch.randperm(len(x))].tensor_split(sorted(torch.randint(9000, (3,)).tolist()))
        assert torch.equal(torch.stack([exact_sum(piece) for piece in pieces]).sum(0), parts)
    assert abs(parts.sum().item() - math.fsum(x.tolist())) <= 9000 * 2.0**-62 + 2.0**-52 * abs(parts.sum().item())
    assert exact_sum(torch.tensor([1.0, math.inf])).sum() == math.inf
    assert exact_sum(torch.tensor([1.0, math.nan])).sum().isnan()
    (gradient,) = torch.autograd.grad(exact_sum(x.requires_grad_()).sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))


def test_numbers_of_any_size() -> None:
    """A product of rows of very different sizes, zeros, infinities and NaN."""
    linear = nn.Linear(64, 48)
    with torch.no_grad():
        linear.weight *= 10.0 ** torch.randint(-20, 15, (48, 1))
    x = torch.randn(70, 64) * 10.0 ** torch.randint(-20, 20, (70, 1))
    x[3] = 0
    with seqpar.invariant_layers(linear):
        out = linear(x.requires_grad_())
        gradient = torch.randn_like(out)
        (dx,) = torch.autograd.grad(out, x, gradient)
    exact = x.double() @ linear.weight.double().T + linear.bias.double()
    # Each product is right to 27 bits of the largest numbers of its row and column.
    size = 64 * x.abs().amax(1).double()[:, None] * linear.weight.abs().amax(1).double() + linear.bias.abs().double()
    assert ((out.double() - exact).abs() <= 2.0**-23 * size).all()
    size = 48 * gradient.abs().amax(1).double()[:, None] * linear.weight.abs().amax(0).double()
    assert ((dx.double() - gradient.double() @ linear.weight.double()).abs() <= 2.0**-23 * size).all()
    with torch.no_grad(), seqpar.invariant_layers(linear):
        assert linear(torch.full((2, 64), math.nan)).isnan().all()
        assert not linear(torch.tensor([[math.inf] * 64, [1.0] * 64]))[0].isfinite().any()
        assert linear(torch.zeros(0, 64)).shape == (0, 48)


def test_autocast_and_closing() -> None:
    linear, x = nn.Linear(HIDDEN, HIDDEN), torch.randn(3, HIDDEN)
    with seqpar.invariant_layers(linear), torch.autocast("cpu", torch.bfloat16):
        out = linear(x)
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert linear.weight.grad is not None
    assert_close(linear.weight.grad, x.bfloat16().double().sum(0).expand(HIDDEN, HIDDEN), torch.bfloat16)
    assert "forward" not in vars(linear)
    assert not linear.weight._post_accumulate_grad_hooks


class Scaled(nn.Module):
    """Divides its weight by the weight's norm, so that a copy for each token is something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight / self.weight.norm()


class Summed(nn.Module):
    """Adds the sum of its weight, which is 0 at first, also over copies for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


IDS = torch.zeros(1, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Conv1d(4, 4, 3), torch.randn(1, 4, 9)),
        (nn.Embedding(4, 4, max_norm=1.0), IDS),
        (nn.Embedding(4, 4, sparse=True), IDS),
        (nn.GRUCell(4, 4), torch.randn(3, 4)),
        (nn.GroupNorm(2, 4), torch.randn(3, 4, 5)),
        (Scaled(), torch.randn(1, 4, HIDDEN)),
        (Summed(), torch.randn(1, 4, HIDDEN)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_modules_are_refused(module: nn.Module, x: Tensor) -> None:
    with seqpar.invariant_layers(module), pytest.raises(ValueError, match="does not know how it uses its parameters"):
        module(x)


def test_what_the_modules_do_is_checked() -> None:
    head = nn.Linear(HIDDEN, VOCAB)
    x, labels = torch.randn(1, 4, HIDDEN), torch.zeros(1, 4, dtype=torch.long)
    with seqpar.invariant_layers(head):
        with pytest.raises(RuntimeError, match=r"weight: it has a gradient, but not from a call of the module"):
            F.linear(x, head.weight).sum().backward()
        with pytest.raises(ValueError, match="leave out tiled_loss"):
            seqpar.tiled_loss(head, x, labels)
    with pytest.raises(TypeError, match="module"):
        seqpar.invariant_layers("model")


@on_ranks
def refused(group: ProcessGroup) -> list[str]:
    same, other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN + group.rank())

    def sum_twice() -> None:
        with seqpar.invariant_layers(same, group=group, reduce="sum"):
            same(torch.ones(3, HIDDEN)).sum().backward()
        assert same.bias.grad is not None
        assert torch.equal(same.bias.grad, torch.full((HIDDEN,), 3.0 * group.size()))
        seqpar.sync_gradients(same, group=group, reduce="sum")

    return [
        message_of(lambda: seqpar.invariant_layers(other, group=group)),
        message_of(lambda: seqpar.invariant_layers(same, group=group, reduce=("mean", "sum")[group.rank()])),
        message_of(sum_twice),
    ]


def test_refused_on_ranks(pool: Pool) -> None:
    for modules, reduce, twice in pool.run(2, refused):
        assert "parameters of module" in modules
        assert "reduce" in reduce
        assert "has been summed over these ranks" in twice
