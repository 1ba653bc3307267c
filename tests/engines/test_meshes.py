"""All kinds of parallelism at once: pipeline x HSDP x ring x Ulysses x tensor parallelism, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

import seqpar
from seqpar import Mask, Sharding

from ..models import HEAD_DIM, HIDDEN, INTERMEDIATE, MLP, VOCAB, full
from ..pool import Pool, on_ranks
from ..reference import assert_close, assert_error

TOKENS, MICRO_BATCHES, STEPS = 21, 2, 2
NAMES = ("pp", "dp", "ring", "ulysses", "tp")
MASK = Mask.documents([0, 5, 6, TOKENS])


class Block(nn.Module):
    """Attention and an MLP: tensor-parallel layers on a mesh, or ``nn.Linear`` and local attention."""

    def __init__(self, where: dict[str, Any]) -> None:
        super().__init__()
        rope = seqpar.RotaryEmbedding(HEAD_DIM)
        strategy = "tp_sp" if where else "local"
        self.attention = seqpar.ParallelAttention(strategy, HIDDEN, 6, 2, HEAD_DIM, rope=rope, qk_norm=True, **where)
        self.norm = nn.RMSNorm(HIDDEN)
        self.mlp = seqpar.MegatronMLP(HIDDEN, INTERMEDIATE, bias=True, **where) if where else MLP("swiglu").float()

    def forward(self, x: Tensor, sharding: Sharding | None) -> Tensor:
        x = x + self.attention(self.norm(x), mask=MASK, sharding=sharding)
        y: Tensor = x + (self.mlp(x) if sharding is None else self.mlp(x, sharding=sharding))
        return y


class Part(nn.Module):
    """Some of ``count`` blocks, with the embedding before the first one and the head after the last one."""

    def __init__(self, blocks: range, count: int, sharding: Sharding | None = None, **where: Any) -> None:
        super().__init__()
        self.sharding = sharding
        self.blocks = nn.ModuleDict({str(i): Block(where) for i in blocks})
        self.embed: nn.Module | None = None
        self.head: nn.Module | None = None
        if 0 in blocks:
            self.embed = seqpar.VocabParallelEmbedding(VOCAB, HIDDEN, **where) if where else nn.Embedding(VOCAB, HIDDEN)
        if count - 1 in blocks:
            linear = nn.Linear(HIDDEN, VOCAB, bias=False)
            self.head = seqpar.VocabParallelHead(HIDDEN, VOCAB, **where) if where else linear

    def forward(self, x: Tensor) -> Tensor:
        given = {} if self.sharding is None else {"sharding": self.sharding}
        x = x if self.embed is None else self.embed(x, **given)
        for block in self.blocks.values():
            x = block(x, self.sharding)
        return x if self.head is None else self.head(x, **given)


def random_rows(count: int) -> tuple[Tensor, Tensor]:
    """Ids and labels, int64 ``[count, TOKENS]``. Each row has another number of labels that count."""
    ids, labels = torch.randint(VOCAB, (2, count, TOKENS)).unbind()
    labels[torch.rand(count, TOKENS) < torch.rand(count, 1) * 0.8] = -100
    labels[:, 0] = 1
    return ids, labels


def shard_of(x: Tensor) -> Tensor:
    """This rank's part of a DTensor. An operation on a DTensor of three dimensions takes torch 0.1 s to plan."""
    return x.to_local() if isinstance(x, DTensor) else x


@on_ranks
def train(group: ProcessGroup, seed: int, schedule: str, sizes: tuple[int, ...], fsdp: tuple[str, ...]) -> float:
    """Two steps of gradient descent. Returns the largest difference of a weight from one process."""
    torch.manual_seed(seed)
    root = dist.init_device_mesh("cpu", sizes, mesh_dim_names=NAMES)
    mesh, pp = root[NAMES[1:]], root["pp"].get_group()
    sharding = Sharding(TOKENS, "zigzag", mesh=mesh, strategy="tp_sp")
    per_rank = 2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1
    count = per_rank * pp.size()
    second = 2 * pp.size() - 1 - pp.rank() if schedule == "ZBVZeroBubble" else pp.rank() + pp.size()
    stages = [pp.rank(), second][:per_rank]
    local = Part(range(count), count).double()
    parts = [Part(range(i, i + 1), count, sharding, mesh=mesh).double() for i in stages]
    for part in parts:
        assert not part.load_state_dict(local.state_dict(), strict=False).missing_keys
        # Where a schedule splits backward, torch 2.13 loses gradients of modules that are sharded inside a stage.
        inside = [] if schedule == "ZBVZeroBubble" else [*part.blocks.values()]
        for module in [*inside, part] if fsdp else []:
            fully_shard(module, mesh=root[fsdp])
    modules = nn.ModuleList(parts)
    torch.manual_seed(seed)  # the ranks have drawn weights of different stages

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        losses = seqpar.vocab_parallel_cross_entropy(logits, labels, VOCAB, sharding=sharding)
        return seqpar.token_loss(losses, labels, sharding=sharding)

    if schedule:
        made = [PipelineStage(parts[n], i, count, torch.device("cpu"), group=pp) for n, i in enumerate(stages)]
        make: Any = getattr(pipelining, f"Schedule{schedule}")
        run = make(made if per_rank > 1 else made[0], MICRO_BATCHES, loss_fn=loss_of)
    dp = mesh["dp"].get_local_rank()
    for _ in range(STEPS):
        batches = [random_rows(mesh["dp"].size()) for _ in range(MICRO_BATCHES)]  # of each micro-batch, a row a replica
        ids, labels = (sharding.shard(torch.stack(x)[:, dp]) for x in zip(*batches, strict=True))
        losses: list[Tensor] = []
        if schedule == "":
            for i, labels_of_one in zip(ids.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
                losses.append(loss_of(parts[0](i), labels_of_one))
                (losses[-1] / MICRO_BATCHES).backward()
        else:
            given = {"target": labels, "losses": losses} if count - 1 in stages else {}
            run.step(*([ids] if 0 in stages else []), **given)
        seqpar.sync_gradients(modules, mesh=mesh)
        expected = [F.cross_entropy(local(x).mT, y) for x, y in batches]
        torch.stack(expected).mean().backward()
        if count - 1 in stages:
            assert_close(torch.stack(losses), torch.stack(expected))
        norm = nn.utils.clip_grad_norm_(local.parameters(), torch.inf)
        square = seqpar.clip_grad_norm_(modules, torch.inf, mesh=mesh).square()  # of this rank's stages
        dist.all_reduce(square, group=pp)
        assert_close(square.sqrt(), norm)
        for p in (*local.parameters(), *modules.parameters()):
            assert p.grad is not None
            shard_of(p.data).sub_(shard_of(p.grad), alpha=0.1)
            p.grad = None
    theirs = dict(local.named_parameters())
    return max(float((full(p) - theirs[n]).detach().abs().max()) for part in parts for n, p in part.named_parameters())


def check(pool: Pool, schedule: str, sizes: tuple[int, ...], fsdp: tuple[str, ...]) -> None:
    ranks = int(torch.tensor(sizes).prod())
    differences = pool.run(ranks, train, int(torch.randint(1 << 30, ())), schedule, sizes, fsdp)
    assert_error(max(differences), 0.0, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schedule", "sizes", "fsdp"),
    [
        ("1F1B", (2, 2, 1, 1, 2), ()),
        ("Interleaved1F1B", (2, 1, 2, 2, 1), ()),
        ("ZBVZeroBubble", (2, 1, 2, 1, 2), ("ring",)),
        ("", (1, 2, 2, 1, 2), ("dp", "ring")),
    ],
)
def test_eight_ranks(pool: Pool, schedule: str, sizes: tuple[int, ...], fsdp: tuple[str, ...]) -> None:
    check(pool, schedule, sizes, fsdp)


@pytest.fixture(scope="module")
def sixteen() -> Iterator[Pool]:
    made = Pool(16, worlds=())
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.thorough
def test_sixteen_ranks(sixteen: Pool) -> None:
    check(sixteen, "1F1B", (2, 2, 2, 1, 2), ("dp", "ring"))
