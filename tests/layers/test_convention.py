"""One convention of gradients: every rank has a loss, and every gradient is averaged over the ranks that hold it.

Gradients equal one device's under every wrapper and without one, of parameters anywhere in the model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import seqpar
from seqpar import Sharding

from ..pool import OwnPool, Pool, mesh_of, on_ranks
from ..reference import assert_close

TOKENS, HIDDEN, VOCAB = 13, 8, 11


class Model(nn.Module):
    """A stem, a body with attention, and a head, in float64.

    Args:
        kind: which of them work on this rank's tokens.
            * "tokens": all of them. The loss is ``token_loss``.
            * "parts": the body. The loss is computed from the whole output.
            * "skip": the same, and the head also gets the output of the stem.
            * "twice": as "parts", with the body twice.
            * "attention": only attention, in two layers. Every other module works on whole tensors.
            * "mixed": stem and body, with a loss of their own from whole outputs beside ``token_loss``.
            * "middle": stem, body and head. A module between body and head works on whole tensors.
            * "stem": body and head.
            * "tied": as "parts", but the body uses the stem's weights again.
        checkpointed: None, or the ``use_reentrant`` of activation checkpointing.
    """

    def __init__(self, kind: str, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.kind, self.checkpointed = kind, checkpointed
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.stem, self.body, self.out, self.middle = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.head, self.pooled = nn.Linear(HIDDEN, VOCAB), nn.Linear(HIDDEN, 3)
        self.double()

    def attend(self, x: Tensor, sharding: Sharding | None, layer: nn.Linear) -> Tensor:
        q = layer(x).unflatten(-1, (2, HIDDEN // 2))  # [b, s, heads, head_dim]
        if self.kind == "attention" and sharding is not None:
            q = sharding.shard(q)
        strategy = "local" if sharding is None else "ring"
        attended = seqpar.attention(q, q, q, strategy=strategy, sharding=sharding).flatten(2)
        return sharding.unshard(attended) if self.kind == "attention" and sharding is not None else attended

    def layer(self, x: Tensor, sharding: Sharding | None) -> Tensor:
        x = x + self.attend(x, sharding, self.stem if self.kind == "tied" else self.body)
        return x + self.out(x).tanh()

    def forward(self, ids: Tensor, labels: Tensor, sharding: Sharding | None) -> Tensor:
        """The loss. ``ids`` and ``labels`` are int64 ``[b, s]``, of all tokens."""
        shard, unshard = (seqpar.shard, seqpar.unshard) if sharding is not None else (lambda x, sharding: x,) * 2
        kind = self.kind
        if kind in ("tokens", "mixed", "middle"):
            ids = shard(ids, sharding=sharding)
        x = stem = self.stem(self.embed(ids)).tanh()
        if kind in ("parts", "skip", "stem", "tied", "twice"):
            x = shard(x, sharding=sharding)
        for _ in range(2 if kind in ("attention", "twice") else 1):
            if self.checkpointed is None:
                x = self.layer(x, sharding)
            else:
                x = checkpoint(self.layer, x, sharding, use_reentrant=self.checkpointed)
        loss: Tensor = torch.zeros((), dtype=x.dtype)
        if kind == "middle":
            x = shard(self.middle(unshard(x, sharding=sharding).cumsum(1)), sharding=sharding)
        if kind in ("tokens", "mixed", "middle", "stem"):
            losses = F.cross_entropy(self.head(x).mT, shard(labels, sharding=sharding), reduction="none")
            if sharding is not None:
                loss = loss + seqpar.token_loss(losses, shard(labels, sharding=sharding), sharding=sharding)
            else:
                loss = loss + losses.sum() / (labels != -100).sum()
        if kind not in ("tokens", "middle", "stem"):
            whole = x if kind == "attention" else unshard(x, sharding=sharding)
            if kind == "skip":
                whole = whole + stem
            loss = loss + self.pooled(whole[:, -1]).square().mean()
        return loss


def rows(dp: int) -> tuple[Tensor, Tensor]:
    """Random ids and labels, int64 ``[dp, TOKENS]`` each. Fewer labels count in the first row."""
    ids, labels = torch.randint(VOCAB, (2, dp, TOKENS)).unbind()
    labels[0, 2:9] = -100
    return ids, labels


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def wrap(model: Model, how: str, mesh: DeviceMesh) -> nn.Module:
    """``model`` inside a wrapper over a mesh of one or two dimensions."""
    if how == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    if how == "fsdp1":
        return FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True)
    if how == "fsdp2":
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def gradients(model: nn.Module, wrapped: nn.Module) -> dict[str, Tensor]:
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in wrapped.named_parameters()}
            return {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Tensor], local: nn.Module) -> None:
    for name, p in local.named_parameters():
        if p.grad is None:
            assert name not in got or not got[name].any(), name
        else:
            assert_close(got[name], p.grad, what=name)


def two_models(kind: str, checkpointed: bool | None = None) -> tuple[Model, Model]:
    """The same model twice, without the parts that ``kind`` does not use: DDP would wait for their gradients."""
    local, model = Model(kind), Model(kind, checkpointed)
    model.load_state_dict(local.state_dict())
    local(*rows(1), None).backward()
    for p, q in zip(local.parameters(), model.parameters(), strict=True):
        p.requires_grad_(p.grad is not None)
        q.requires_grad_(p.grad is not None)
        p.grad = None
    return local, model


@on_ranks
def step(
    group: ProcessGroup, seed: int, how: str, kind: str, checkpointed: bool | None = None, compiled: bool = False
) -> None:
    """Two steps of one model, each with other data, against the same on one device. Only rank 0 compiles."""
    torch.manual_seed(seed)
    local, model = two_models(kind, checkpointed)
    wrapped = wrap(model, how, DeviceMesh.from_group(group, "cpu"))
    run = torch.compile(wrapped, backend="aot_eager") if compiled and group.rank() == 0 else wrapped
    sharding = Sharding(TOKENS, "zigzag", group=group)
    for _ in range(2):
        ids, labels = rows(2)
        local.zero_grad()
        wrapped.zero_grad()
        local(ids, labels, None).backward()
        run(ids, labels, sharding).backward()
        if how in ("sync", "ddp"):  # beside DDP, it changes nothing
            seqpar.sync_gradients(model, group=group)
        assert_equal(gradients(model, wrapped), local)


def fresh_seed() -> int:
    return int(torch.randint(1 << 30, ()))


KINDS = ("tokens", "parts", "skip", "twice", "attention", "mixed", "middle", "stem", "tied")


@pytest.mark.thorough(how=["fsdp1"])
@pytest.mark.parametrize("how", ["sync", "ddp", "fsdp2", "fsdp1"])
def test_gradients_equal_one_device(pool: Pool, how: str) -> None:
    """Where a module works on whole tensors makes a difference to the gradients, and none to how they are averaged."""
    for kind in KINDS if how == "sync" else ("tokens", "attention", "mixed", "middle", "tied"):
        pool.run(3 if how == "sync" else 2, step, fresh_seed(), how, kind)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(pool: Pool, use_reentrant: bool) -> None:
    for how in ("sync", "fsdp2"):
        pool.run(2, step, fresh_seed(), how, "mixed", use_reentrant)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sync", "ddp", "fsdp2"])
def test_compiled_models(pool: Pool, how: str) -> None:
    pool.run(2, step, fresh_seed(), how, "tokens", compiled=True)


@on_ranks
def step_with_dp(group: ProcessGroup, seed: int, how: str, over: str, kind: str) -> None:
    """A row for each dp rank, with unlike numbers of labels, against all rows on one device."""
    torch.manual_seed(seed)
    mesh = mesh_of(dp=2, ring=2, ulysses=1, tp=1)
    local, model = two_models(kind)
    flat = mesh["dp", "ring"]._flatten("dp_ring")
    wrapped = wrap(model, how, {"dp": mesh["dp"], "both": flat, "hybrid": mesh["dp", "ring"], "": flat}[over])
    sharding = Sharding(TOKENS, "zigzag", mesh=mesh)
    for _ in range(2):
        ids, labels = rows(2)
        local.zero_grad()
        wrapped.zero_grad()
        own = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1)
        loss, expected = wrapped(ids[own], labels[own], sharding), local(ids, labels, None)
        if kind == "tokens":
            assert_close(loss, expected)
        loss.backward()
        expected.backward()
        if over in ("dp", ""):
            seqpar.sync_gradients(wrapped, mesh=mesh)
        assert_equal(gradients(model, wrapped), local)
        if how != "fsdp1":
            seqpar.clip_grad_norm_(model, 1e-3, mesh=mesh)  # writes to gradients that have been summed


@pytest.mark.slow
@pytest.mark.thorough(how=["fsdp2"])
@pytest.mark.parametrize(
    ("how", "over"),
    [("", ""), *(x.split() for x in ("ddp dp", "fsdp2 dp", "fsdp1 dp", "ddp both", "fsdp2 both", "fsdp2 hybrid"))],
)
def test_dp_ranks_with_unlike_numbers_of_labels(own: OwnPool, how: str, over: str) -> None:
    for kind in ("tokens", "mixed") if how != "fsdp1" else ("tokens",):
        own.pool.run(4, step_with_dp, fresh_seed(), how, over, kind)


@on_ranks
def divide_by_hand(group: ProcessGroup, seed: int) -> None:
    """``fully_shard`` that sums, as torchtitan sets it."""
    torch.manual_seed(seed)
    local, model = two_models("mixed")
    wrapped = wrap(model, "fsdp2", DeviceMesh.from_group(group, "cpu"))
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    ids, labels = rows(2)
    logits = local.head(local.embed(ids))
    F.cross_entropy(logits.mT, labels).backward()
    sharding = Sharding(TOKENS, "zigzag", group=group)

    def losses() -> Tensor:
        logits = model.head(model.embed(sharding.shard(ids)))
        return F.cross_entropy(logits.mT, sharding.shard(labels), reduction="none")

    vars(model)["forward"] = losses
    seqpar.token_loss(wrapped(), sharding.shard(labels), sharding=sharding, gradients="sum").backward()
    for layer in ("head", "embed"):
        assert_close(whole(getattr(model, layer).weight.grad), getattr(local, layer).weight.grad)


def test_a_divisor_that_was_set_by_hand(pool: Pool) -> None:
    pool.run(2, divide_by_hand, fresh_seed())


@on_ranks
def frozen_base(group: ProcessGroup, seed: int) -> None:
    """A trained head behind a frozen body. ``unshard`` of a tensor without a gradient changes nothing."""
    torch.manual_seed(seed)
    body, head = nn.Linear(HIDDEN, HIDDEN).double().requires_grad_(False), nn.Linear(HIDDEN, 1).double()
    x = torch.randn(1, 12, HIDDEN, dtype=torch.float64)
    wanted = torch.autograd.grad(head(body(x)).square().mean(), head.bias)[0]
    sharding = Sharding(12, "zigzag", group=group)
    for whole in (False, True):
        head.zero_grad()
        hidden = body(sharding.shard(x))
        sharding.unshard(hidden.detach())  # to log it
        out = head(sharding.unshard(hidden)) if whole else head(hidden)
        out.square().mean().backward()  # each rank has 4 tokens
        seqpar.sync_gradients(nn.Sequential(body, head), group=group)
        assert_close(head.bias.grad, wanted)


def test_a_frozen_base(pool: Pool) -> None:
    pool.run(3, frozen_base, fresh_seed())


@on_ranks
def encoder_and_decoder(group: ProcessGroup, seed: int, how: str) -> None:
    """Sharded queries attend to the whole output of an encoder whose tokens are sharded too."""
    torch.manual_seed(seed)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.query, self.out = (nn.Linear(HIDDEN, HIDDEN).double() for _ in range(3))

        def forward(self, source: Tensor, target: Tensor, shardings: tuple[Sharding, Sharding] | None) -> Tensor:
            if shardings is not None:
                source, target = shardings[0].shard(source), shardings[1].shard(target)
            memory = self.encoder(source).tanh()
            if shardings is not None:
                memory = shardings[0].unshard(memory)
            q, kv = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (self.query(target), memory))
            y = F.scaled_dot_product_attention(q, kv, kv).transpose(1, 2).flatten(2)
            losses = self.out(y).square().sum(-1)
            if shardings is None:
                return losses.mean()
            return seqpar.token_loss(losses, torch.zeros_like(losses, dtype=torch.int64), sharding=shardings[1])

    local = Both()
    model = Both()
    model.load_state_dict(local.state_dict())
    wrapped: nn.Module = model
    if how == "ddp":
        wrapped = DistributedDataParallel(model, process_group=group)
    if how == "fsdp2":
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    source, target = (torch.randn(2, n, HIDDEN, dtype=torch.float64) for n in (9, 13))
    local(source, target, None).backward()
    wrapped(source, target, tuple(Sharding(n, "striped", group=group) for n in (9, 13))).backward()
    if how == "sync":
        seqpar.sync_gradients(model, group=group)
    assert_equal(gradients(model, wrapped), local)


@pytest.mark.parametrize("how", ["sync", "ddp", "fsdp2"])
def test_an_encoder_that_is_unsharded_for_sharded_queries(pool: Pool, how: str) -> None:
    pool.run(2, encoder_and_decoder, fresh_seed(), how)


@on_ranks
def unshard_twice_differentiated(group: ProcessGroup, seed: int) -> None:
    """A penalty on the gradient of a loss of the whole tensor."""
    torch.manual_seed(seed)
    w = torch.randn(HIDDEN, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 7, HIDDEN, dtype=torch.float64)
    sharding = Sharding(7, "zigzag", group=group)

    def loss(x: Tensor, unshard: Any) -> Tensor:
        y = unshard((x * w).sin())
        (grad,) = torch.autograd.grad(y.square().mean(), w, create_graph=True)
        return grad

    local = loss(x, lambda y: y)
    (wanted,) = torch.autograd.grad(local.square().sum(), w)
    share = loss(sharding.shard(x), sharding.unshard) / group.size()
    gathered = dist_nn.all_reduce(share, group=group)  # the mean of the first gradients
    assert_close(gathered, local)
    (second,) = torch.autograd.grad(gathered.square().sum(), w)
    torch.distributed.all_reduce(second, group=group)
    assert_close(second / group.size(), wanted)


def test_second_derivatives_of_unshard(pool: Pool) -> None:
    pool.run(3, unshard_twice_differentiated, fresh_seed())
