"""torch's pipeline schedules with a model whose attention spans the ranks of each stage, against one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup, pipelining
from torch.distributed.pipelining import PipelineStage

import seqpar
from seqpar import Mask, Sharding

from ..pool import OwnPool, on_ranks
from ..reference import assert_close

TOKENS, HIDDEN, VOCAB, LAYERS, MICRO_BATCHES, STEPS = 13, 8, 11, 4, 4, 2
SINGLE = ("GPipe", "1F1B")  # schedules with one stage on each rank
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # rank r of P has the stages r and r + P
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # it has the stages r and 2P - 1 - r


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, strategy: str, **where: Any) -> None:
        super().__init__()
        self.attention = seqpar.ParallelAttention(strategy, HIDDEN, 2, rope=seqpar.RotaryEmbedding(4), **where)
        self.norm = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: Tensor, mask: Mask, sharding: Sharding | None) -> Tensor:
        x = x + self.attention(self.norm(x), mask=mask, sharding=sharding)
        return x + self.mlp(x)


class Part(nn.Module):
    """Some consecutive blocks of the model. The first part also has the embedding, and the last part the head.

    Args:
        blocks: which blocks.
        strategy: of their attention.
        where: the ranks; nothing with "local".
    """

    def __init__(self, blocks: range, strategy: str, sharding: Sharding | None = None, **where: Any) -> None:
        super().__init__()
        self.sharding = sharding
        self.blocks = nn.ModuleDict({str(i): Block(strategy, **where) for i in blocks})
        self.embed = nn.Embedding(VOCAB, HIDDEN) if 0 in blocks else None
        self.head = nn.Linear(HIDDEN, VOCAB) if LAYERS - 1 in blocks else None

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """``cu_seqlens``: the boundaries of each row's documents, ``[b, documents + 1]``."""
        mask = Mask.documents(cu_seqlens)
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x, mask, self.sharding)
        return x if self.head is None else self.head(x)


def random_batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and labels ``[rows, TOKENS]``, and the boundaries of two or three documents in each row ``[rows, 4]``."""
    ids, labels = torch.randint(VOCAB, (2, rows, TOKENS)).unbind()
    labels[torch.rand(rows, TOKENS) < torch.rand(rows, 1) * 0.8] = -100
    labels[:, 0] = 0
    inner = torch.randint(1, TOKENS, (rows, 2)).sort().values
    return ids, labels, F.pad(F.pad(inner, (1, 0)), (0, 1), value=TOKENS)


@cache
def mesh_of(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    return dist.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def stages_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """The stages on a rank of the pipeline."""
    if schedule in SINGLE:
        return [rank]
    return [rank, rank + ranks if schedule in LOOPED else 2 * ranks - 1 - rank]


@on_ranks
def train(group: ProcessGroup, seed: int, schedule: str, strategy: str) -> None:
    """Two ranks of the pipeline x two of a sequence, and two steps of four micro-batches.

    With the ring, the losses of the micro-batches are averaged. With Ulysses, the loss is the mean over all labels.
    """
    torch.manual_seed(seed)
    mesh = mesh_of(("pp", "ring"), (2, 2))
    sharding = Sharding(TOKENS, "zigzag", mesh=mesh["ring"])
    pp = mesh["pp"].get_group()
    stages = stages_of(schedule, pp.rank(), pp.size())
    count = len(stages) * pp.size()
    local = Part(range(LAYERS), "local").double()
    per_stage = LAYERS // count
    parts = [
        Part(range(i * per_stage, (i + 1) * per_stage), strategy, sharding, mesh=mesh["ring"]).double() for i in stages
    ]
    modules = nn.ModuleList(parts)
    for part in parts:
        part.load_state_dict(local.state_dict(), strict=False)

    averages, total = strategy == "ring", torch.zeros(())

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.mT, labels, reduction="none")
        return seqpar.token_loss(losses, labels, sharding=sharding) if averages else losses.sum() / total

    made = [PipelineStage(parts[n], i, count, torch.device("cpu"), group=pp) for n, i in enumerate(stages)]
    make: Any = getattr(pipelining, f"Schedule{schedule}")
    run = make(made[0] if schedule in SINGLE else made, MICRO_BATCHES, loss_fn=loss_of, scale_grads=averages)
    torch.manual_seed(seed)  # the ranks have drawn weights of different stages
    # With a smaller eps the step of a gradient near zero would depend on its rounding.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (local, modules)]
    for _ in range(STEPS):
        ids, labels, cu_seqlens = random_batch(2 * MICRO_BATCHES)
        losses: list[Tensor] = []
        total = (labels != -100).sum()
        ids_local, labels_local = sharding.shard(ids), sharding.shard(labels)
        given = {"target": labels_local, "losses": losses} if count - 1 in stages else {}
        run.step(*([ids_local] if 0 in stages else []), cu_seqlens=cu_seqlens, **given)
        seqpar.sync_gradients(modules, mesh=mesh["ring"], reduce="mean" if averages else "sum")
        logits = local(ids, cu_seqlens)
        if averages:
            parts_of_batch = zip(logits.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True)
            expected = torch.stack([F.cross_entropy(x.mT, y) for x, y in parts_of_batch]).mean()
        else:
            expected = F.cross_entropy(logits.mT, labels)
        expected.backward()
        if averages and count - 1 in stages:
            assert_close(torch.stack(losses).mean(), expected)
        theirs = dict(local.named_parameters())
        for part in parts:
            for name, p in part.named_parameters():
                assert_close(p.grad, theirs[name].grad, what=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for part in parts:
        for name, p in part.named_parameters():
            assert_close(p, theirs[name], what=name)


@pytest.mark.thorough(schedule=["GPipe", *LOOPED, "ZBVZeroBubble"])
@pytest.mark.thorough(schedule=["1F1B"], strategy=["ulysses"])
@pytest.mark.thorough(schedule=["DualPipeV"], strategy=["ring"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("schedule", [*SINGLE, *LOOPED, *V_SHAPED])
def test_schedules(own: OwnPool, schedule: str, strategy: str) -> None:
    if not hasattr(pipelining, f"Schedule{schedule}"):
        pytest.skip(f"this torch has no {schedule}")
    if schedule in V_SHAPED and torch.__version__ < "2.13":
        pytest.skip("this torch sends from a rank to itself first, which gloo cannot")
    own.pool.run(4, train, int(torch.randint(1 << 30, ())), schedule, strategy)
