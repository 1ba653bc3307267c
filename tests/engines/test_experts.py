"""Experts of one's own beside a sequence that is sharded, against one process.

Each rank holds one expert, and several ranks may hold the same one. Tokens go to the ranks of an expert-parallel group.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Mask, Sharding

from ..pool import OwnPool, on_ranks
from ..reference import assert_close

TOKENS, HIDDEN, VOCAB = 19, 8, 11


class Expert(nn.Sequential):
    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__(nn.Linear(hidden, 12), nn.GELU(), nn.Linear(12, hidden))


class Mixture(nn.Module):
    """Sends each token to one expert, and multiplies the expert's output by its probability.

    Args:
        experts: all experts, or this rank's one, by their numbers.
        count: the number of all experts.
        group: the ranks that hold them, in the order of the experts; None if this process holds all.
        hidden: the number of channels.
    """

    def __init__(
        self, experts: dict[int, Expert], count: int, group: ProcessGroup | None = None, hidden: int = HIDDEN
    ) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, count)
        self.experts = nn.ModuleDict({str(number): expert for number, expert in experts.items()})
        self.count, self.group = count, group
        if group is not None:  # an expert has the gradients of the losses of all ranks in the group: their mean is due
            for p in self.experts.parameters():
                p.register_hook(lambda grad: grad / group.size())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)  # [tokens, hidden]
        probability, chosen = self.router(flat).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = chosen.bincount(minlength=self.count)  # [experts]
        y = torch.empty_like(flat).index_copy(0, order, self._run(flat[order], sent.tolist()))
        return (probability[:, None] * y).view_as(x)

    def _run(self, tokens: Tensor, sent: list[int]) -> Tensor:
        """The experts' outputs of ``tokens``, which are ordered by expert, ``sent[i]`` of them for expert i."""
        experts = [*self.experts.values()]
        if self.group is None:
            return torch.cat([expert(x) for expert, x in zip(experts, tokens.split(sent), strict=True)])
        counts = torch.tensor(sent)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        received = arriving.tolist()
        here = tokens.new_empty(sum(received), tokens.shape[1])
        here = dist_nn.all_to_all_single(here, tokens, received, sent, group=self.group)
        back: Tensor = dist_nn.all_to_all_single(
            torch.empty_like(tokens), experts[0](here), sent, received, group=self.group
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
def mesh_of(*sizes: int) -> DeviceMesh:
    return dist.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ring", "ulysses"))


@cache
def groups_of(mesh: DeviceMesh, dimension: int) -> list[ProcessGroup]:
    """For each index of the mesh along a dimension, the group of all ranks with this index."""
    return [dist.new_group(ranks.flatten().tolist()) for ranks in mesh.mesh.unbind(dimension)]


@on_ranks
def train(group: ProcessGroup, seed: int, sizes: tuple[int, ...], spread: str, wrapper: str, folder: str) -> None:
    """A step. The experts are spread over the ranks of one dimension of the mesh, whose sizes are ``sizes``."""
    torch.manual_seed(seed)
    mesh = mesh_of(*sizes)
    parallel, dp = mesh[spread].get_group(), sizes[0]
    count = parallel.size()
    local = Model(Mixture({i: Expert() for i in range(count)}, count)).double()
    number = parallel.rank()
    model = Model(Mixture({number: Expert()}, count, parallel)).double()
    model.load_state_dict(local.state_dict(), strict=False)
    own = model.mixture.experts
    holders = groups_of(mesh, ("dp", "ring", "ulysses").index(spread))[number]
    ignore: Any = [own] if holders.size() == 1 else {own: holders}

    wrapped: Any = model
    if wrapper == "ddp":
        names = [name for name, _ in model.named_parameters() if "experts" in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        wrapped = DistributedDataParallel(model)
    elif wrapper == "fsdp1":
        wrapped = FullyShardedDataParallel(
            model, ignored_modules=[own], device_id=torch.device("cpu"), use_orig_params=True
        )
    elif wrapper == "fsdp2":
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (group.size(),)), ignored_params={*own.parameters()})

    sharding = Sharding(TOKENS, "zigzag", mesh=mesh)
    ids, labels = torch.randint(VOCAB, (2, dp, TOKENS)).unbind()
    labels[0, 2:9] = -100
    row = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
    labels_local = sharding.shard(labels[row])

    def step(sync: bool = True) -> Tensor:
        losses = F.cross_entropy(wrapped(sharding.shard(ids[row]), sharding).mT, labels_local, reduction="none")
        loss = seqpar.token_loss(losses, labels_local, sharding=sharding)
        loss.backward()
        for _ in range(2 * sync):  # averaging twice changes nothing
            seqpar.sync_gradients(wrapped, mesh=mesh, ignore=ignore)
        return loss

    def reference() -> Tensor:
        loss = F.cross_entropy(local(ids).mT, labels)
        loss.backward()
        return loss

    report = seqpar.verify(wrapped, step, reference, reference_model=local) if wrapper != "fsdp1" else None
    assert report is None or report.ok, report
    step(sync=False)
    reference()
    if wrapper:
        for refused in (seqpar.sync_gradients, partial(seqpar.clip_grad_norm_, max_norm=1.0)):
            with pytest.raises(ValueError, match=r"ignore: DDP or FSDP leaves out .*experts\.\d\.0\.weight"):
                refused(wrapped, mesh=mesh)
    for _ in range(2):
        seqpar.sync_gradients(wrapped, mesh=mesh, ignore=ignore)
    theirs = dict(local.named_parameters())

    def compare() -> None:
        for name, p in model.named_parameters():
            grad: Any = p.grad
            if wrapper != "fsdp1" or "experts" in name:  # FSDP1 keeps parts of flattened gradients
                grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
                assert_close(grad, theirs[name].grad, what=name)

    compare()
    if holders.size() > 1:
        with pytest.raises(ValueError, match="several ranks hold the same parameters with the same gradients"):
            seqpar.clip_grad_norm_(wrapped, 0.01, mesh=mesh, ignore=[own])
    norm = seqpar.clip_grad_norm_(wrapped, 0.01, mesh=mesh, ignore=ignore)
    expected = nn.utils.clip_grad_norm_(local.parameters(), 0.01)
    assert expected > 0.02  # the gradients are clipped
    assert_close(norm, expected)
    norms: list[Any] = [None] * group.size()
    dist.all_gather_object(norms, norm.item())
    assert len({*norms}) == 1
    compare()
    if wrapper:
        return
    for p in own.parameters():
        p.register_hook(lambda grad: grad * count)
    said = str(seqpar.verify(wrapped, step, reference, reference_model=local))
    assert "what one rank holds alone" in said and f"divide these gradients by {count}" in said, said
    dcp.save(model.state_dict(), checkpoint_id=folder)  # each expert under its own name
    loaded = {name: torch.zeros_like(x) for name, x in local.state_dict().items()}
    dcp.load(loaded, checkpoint_id=folder)
    for name, x in local.state_dict().items():
        assert torch.equal(loaded[name], x), name


@pytest.mark.parametrize(
    ("sizes", "spread", "wrapper"),
    [
        ((1, 1, 4), "ulysses", ""),  # dp, ring, ulysses: each rank holds an expert alone
        ((1, 2, 2), "ulysses", ""),  # two ranks of the sequence hold the same expert
        ((2, 1, 2), "ulysses", ""),  # the replicas hold the same experts
        ((2, 2, 1), "dp", ""),
        ((4, 1, 1), "dp", ""),
        ((1, 2, 2), "ulysses", "ddp"),
        ((1, 1, 4), "ulysses", "fsdp1"),
        ((2, 1, 2), "ulysses", "fsdp2"),
    ],
)
def test_experts_of_ones_own(own: OwnPool, tmp_path: Path, sizes: tuple[int, ...], spread: str, wrapper: str) -> None:
    own.pool.run(4, train, int(torch.randint(1 << 30, ())), sizes, spread, wrapper, str(tmp_path))
