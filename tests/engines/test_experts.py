"""Experts of one's own beside a sequence that is sharded, against one process.

Each rank holds one expert, and several ranks may hold the same one. Tokens go to the ranks of an expert-parallel group.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup

import seqpar
from seqpar import Mask, Sharding

from ..pool import OwnPool, on_ranks

TOKENS, HIDDEN, VOCAB = 19, 8, 11


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(HIDDEN, 12), nn.GELU(), nn.Linear(12, HIDDEN))


class Mixture(nn.Module):
    """Sends each token to one expert, and multiplies the expert's output by its probability.

    Args:
        experts: all experts, or this rank's one.
        count: the number of all experts.
        group: the ranks that hold them, in the order of the experts; None if this process holds all.
    """

    def __init__(self, experts: list[Expert], count: int, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.group = nn.Linear(HIDDEN, count), nn.ModuleList(experts), group
        self.count = count
        for p in self.experts.parameters() if group is not None else ():
            p.allreduce = False  # type: ignore[attr-defined]  # as Megatron-LM marks them

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)  # [tokens, hidden]
        probability, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=self.count)  # [experts]
        y = torch.empty_like(flat).index_copy(0, order, self._run(flat[order], sent.tolist()))
        return (probability[:, None] * y).view_as(x)

    def _run(self, tokens: Tensor, sent: list[int]) -> Tensor:
        """The experts' outputs of ``tokens``, which are ordered by expert, ``sent[i]`` of them for expert i."""
        if self.group is None:
            parts = zip(self.experts, tokens.split(sent), strict=True)
            return torch.cat([expert(x) for expert, x in parts])
        counts = torch.tensor(sent)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        received = arriving.tolist()
        here = tokens.new_empty(sum(received), HIDDEN)
        here = dist_nn.all_to_all_single(here, tokens, received, sent, group=self.group)
        back: Tensor = dist_nn.all_to_all_single(
            torch.empty_like(tokens), self.experts[0](here), sent, received, group=self.group
        )
        return back


class Model(nn.Module):
    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, 24), nn.Linear(HIDDEN, VOCAB)
        self.mixture = mixture

    def forward(self, ids: Tensor, sharding: Sharding | None = None) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
        strategy = "local" if sharding is None else "ring"
        x = x + seqpar.attention(q, k, v, mask=Mask.causal(), strategy=strategy, sharding=sharding).flatten(2)
        return self.head(x + self.mixture(x))


@cache
def mesh_of(dp: int, ring: int) -> DeviceMesh:
    return dist.init_device_mesh("cpu", (dp, ring), mesh_dim_names=("dp", "ring"))


@on_ranks
def train(group: ProcessGroup, seed: int, dp: int, expert_ranks: str) -> None:
    """A step. The experts are on the ranks of a sequence, or on the ranks that hold the same tokens of other rows."""
    torch.manual_seed(seed)
    mesh = mesh_of(dp, group.size() // dp)
    parallel = mesh[expert_ranks].get_group()
    count = parallel.size()
    experts = [Expert() for _ in range(count)]
    local = Model(Mixture(experts, count)).double()
    model = Model(Mixture([Expert()], count, parallel)).double()
    model.load_state_dict({n: x for n, x in local.state_dict().items() if "experts" not in n}, strict=False)
    model.mixture.experts[0].load_state_dict(experts[parallel.rank()].state_dict())
    sharding = Sharding(TOKENS, "zigzag", mesh=mesh)
    ids, labels = torch.randint(VOCAB, (2, dp, TOKENS)).unbind()
    labels[0, 2:9] = -100
    row = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
    labels_local = sharding.shard(labels[row])
    losses = F.cross_entropy(model(sharding.shard(ids[row]), sharding).mT, labels_local, reduction="none")
    seqpar.token_loss(losses, labels_local, sharding=sharding).backward()
    F.cross_entropy(local(ids).mT, labels).backward()

    marked = [p for p in model.parameters() if not getattr(p, "allreduce", True)]
    seqpar.sync_gradients(model, mesh=mesh, ignore=marked)
    holders: Any = mesh["ring" if expert_ranks == "dp" else "dp"].get_group()  # of this rank's expert
    seqpar.sync_gradients(model.mixture.experts, group=holders)
    for p in marked:
        assert p.grad is not None
        p.grad /= group.size() / holders.size()

    theirs = {n: p for n, p in local.named_parameters() if "experts" not in n}
    theirs |= {f"mixture.experts.0.{n}": p for n, p in experts[parallel.rank()].named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, theirs[name].grad, rtol=1e-9, atol=1e-13, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize(("dp", "expert_ranks"), [(1, "ring"), (2, "ring"), (2, "dp")])
def test_experts_of_ones_own(own: OwnPool, dp: int, expert_ranks: str) -> None:
    own.pool.run(4, train, int(torch.randint(1 << 30, ())), dp, expert_ranks)
